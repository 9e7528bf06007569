"""One step laid out for the device: spans flattened, sorted into groups, as index tensors that all layers share.

A plane is a table of *rows*: one token's part of it, per head where the plane has heads. Row `(slot x H + head) x B +
offset` of a plane [blocks, H, B, ...], H = 1 where there is no head axis. Attention writes and reads by row.

Spans of a few new tokens (decode, a short tail) that have as many of them, and contexts of about the same length, are
attended together, padded to the longest; a longer span is attended by itself. So the padding is never more than the
bytes, and what a span computes depends on its neighbours by nothing but the rounding of a batched matmul.

Invariants: everything is checked on the host before anything is made. One copy to the device per step. Rows behind a
span's last position repeat that position, so padding reads the span's own valid bytes and never a stranger's or stale
ones; it is masked besides.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from headwater.core.errors import InvalidInput
from headwater.engine.models.base import Span

FEW_TOKENS: Final = 16  # a span of at most so many new tokens is grouped with others, and masked

_Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class StepLimits:
    """What spans must fit."""

    vocab_size: int
    max_positions: int
    num_blocks: int
    block_tokens: int


@dataclass(frozen=True, kw_only=True)
class Group:
    """Spans attended together: `num_spans` of `num_new` tokens each, the longest `num_positions` long."""

    first: int  # of the step's tokens
    num_spans: int
    num_new: int
    num_positions: int
    uniform: bool  # whether all are equally long, so that nothing is padding
    heads: int  # rows per token
    block_tokens: int
    positions: torch.Tensor  # [spans, new]
    totals: torch.Tensor  # [spans]: positions, the new ones included
    table: torch.Tensor  # [spans, blocks], zeros behind the end

    @property
    def tokens(self) -> slice:
        """Its part of the step's tokens."""
        return slice(self.first, self.first + self.num_spans * self.num_new)

    @property
    def few(self) -> bool:
        """Whether its spans are short, and masked; otherwise it is one span, and causal."""
        return self.num_new <= FEW_TOKENS

    @property
    def fresh(self) -> bool:
        """Whether everything that it attends to is new, so that nothing needs to be read back."""
        return not self.few and self.num_new == self.num_positions

    @cached_property
    def rows(self) -> torch.Tensor:
        """The row of every position, [spans, heads, positions]."""
        device = self.table.device
        position = torch.arange(self.num_positions, device=device).minimum(self.totals[:, None] - 1)
        slot = self.table.gather(1, position // self.block_tokens)
        head = torch.arange(self.heads, device=device)[:, None]
        return (slot[:, None] * self.heads + head) * self.block_tokens + (position % self.block_tokens)[:, None]

    @cached_property
    def visible(self) -> torch.Tensor:
        """Which position each new token may look at, bool [spans, new, positions]."""
        return torch.arange(self.num_positions, device=self.table.device) <= self.positions[..., None]


@dataclass(frozen=True, kw_only=True)
class Step:
    """All tokens of a step in the groups' order, and where they go."""

    tokens: torch.Tensor  # [tokens]
    positions: torch.Tensor  # [tokens]
    rows: torch.Tensor  # [tokens x heads]: where each token is written
    logits: torch.Tensor  # which tokens' logits are wanted, in the spans' order
    groups: tuple[Group, ...]
    spans: tuple[slice, ...]  # each span's tokens


def plan(spans: Sequence[Span], *, limits: StepLimits, heads: int, device: torch.device) -> Step:
    """Check the spans, and lay them out on the device. Raises InvalidInput for a span that cannot be computed."""
    block = limits.block_tokens
    tables = [_checked(span, limits) for span in spans]
    members = _group(spans)
    ordered = [index for member in members for index in member]
    first = dict(zip(ordered, accumulate((len(spans[i].tokens) for i in ordered), initial=0), strict=False))
    host = [
        _join([np.asarray(spans[i].tokens) for i in ordered]),
        _join([_positions(spans[i]) for i in ordered]),
        _join([tables[i][_positions(spans[i]) // block] for i in ordered]),
        _join([first[i] + len(span.tokens) + np.arange(-span.num_logits, 0) for i, span in enumerate(spans)]),
    ]
    for member in members:
        totals = np.array([spans[i].start + len(spans[i].tokens) for i in member])
        table = np.zeros((len(member), -(-int(totals.max()) // block)), dtype=np.int64)
        for line, index in zip(table, member, strict=True):
            used = tables[index][: len(line)]
            line[: len(used)] = used
        host += [totals, table.ravel()]
    parts = iter(_to_device(host, device))
    tokens, positions, slots, logits = (next(parts) for _ in range(4))
    rows = (slots[:, None] * heads + torch.arange(heads, device=device)) * block + (positions % block)[:, None]
    groups = []
    for member in members:
        num_new, begin = len(spans[member[0]].tokens), first[member[0]]
        starts = {spans[i].start for i in member}
        groups.append(
            Group(
                first=begin,
                num_spans=len(member),
                num_new=num_new,
                num_positions=max(starts) + num_new,
                uniform=len(starts) == 1,
                heads=heads,
                block_tokens=block,
                positions=positions[begin : begin + len(member) * num_new].view(len(member), num_new),
                totals=next(parts),
                table=next(parts).view(len(member), -1),
            )
        )
    return Step(
        tokens=tokens,
        positions=positions,
        rows=rows.flatten(),
        logits=logits,
        groups=tuple(groups),
        spans=tuple(slice(first[i], first[i] + len(span.tokens)) for i, span in enumerate(spans)),
    )


def _positions(span: Span) -> _Ints:
    return np.arange(span.start, span.start + len(span.tokens))


def _group(spans: Sequence[Span]) -> list[list[int]]:
    """Indices of the spans that are attended together, in a fixed order."""
    together: dict[tuple[int, ...], list[int]] = {}
    for index, span in enumerate(spans):
        new = len(span.tokens)
        if new <= FEW_TOKENS:
            together.setdefault((new, (span.start + new).bit_length()), []).append(index)
        else:
            together[new, 0, index] = [index]
    return [together[key] for key in sorted(together)]


def _checked(span: Span, limits: StepLimits) -> _Ints:
    """The span's block table; InvalidInput for what cannot be computed."""
    new = len(span.tokens)
    if new < 1:
        raise InvalidInput("a span has at least one token")
    if span.start < 0 or span.start + new > limits.max_positions:
        raise InvalidInput(
            f"positions {span.start} to {span.start + new} do not fit a model of {limits.max_positions} positions"
        )
    if not 0 <= span.num_logits <= new:
        raise InvalidInput(f"a span of {new} tokens has no {span.num_logits} logits to give")
    _check_range("token", np.asarray(span.tokens), limits.vocab_size)
    table = np.asarray(span.slots, dtype=np.int64)
    _check_range("slot", table, limits.num_blocks)
    if len(table) * limits.block_tokens < span.start + new:
        raise InvalidInput(
            f"{len(table)} slots of {limits.block_tokens} tokens do not cover {span.start + new} positions"
        )
    return table


def _check_range(what: str, values: npt.NDArray[np.generic], end: int) -> None:
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise InvalidInput(f"a span's {what}s are a sequence of ints, not {values.dtype} of shape {values.shape}")
    low, high = int(values.min(initial=0)), int(values.max(initial=0))
    if low < 0 or high >= end:
        raise InvalidInput(f"{what} {low if low < 0 else high} does not exist; there are {end}")


def _join(parts: Sequence[npt.NDArray[np.generic]]) -> _Ints:
    return np.concatenate([np.empty(0, dtype=np.int64), *parts]).astype(np.int64, copy=False)


def _to_device(parts: Sequence[_Ints], device: torch.device) -> Sequence[torch.Tensor]:
    """All of them in one copy."""
    packed = torch.from_numpy(_join(parts))
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    found: Sequence[torch.Tensor] = packed.split([len(part) for part in parts])  # type: ignore[no-untyped-call]
    return found
