"""Multi-head latent attention on a plane of latents and rotary keys, [block, lora + rope].

Two forms of the same sum. *Expanded*: keys and values of every head are made from the latents, then ordinary causal
attention. *Absorbed*: the expansion moves into the query and behind the sum, and all heads attend to the latents
themselves: `q·(W c) = (Wᵀ q)·c`. A position costs a query 3.4 times as much absorbed (at 512 + 64 against 192 and 128),
but nothing needs to be expanded: it pays for the few queries of decode, the other for prompts.

The functions here take latents as they come out of a plane; `dsa.py` uses them on its own rows.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from headwater.engine.attention.base import TORCH_DTYPE, causal_attention, read_rows, write_rows
from headwater.engine.step import Group, Step
from headwater.layout.mla import mla_layout
from headwater.layout.spec import LATENT, DType, KVLayout
from headwater.transfer.device.arena import DeviceCache

# Rotary keys lie as `models/rope.py` leaves them, whatever order the weights have; an engine that keeps pairs together
# would read them wrongly, and layouts look alike.
ROPE_ORDER: Final = "rotary values in halves"


@dataclass(frozen=True)
class Queries:
    """What attends: [tokens, heads, nope] and [tokens, heads, rope], rotated; and what expands latents.

    `expand` is [heads, nope + value, lora]: the rows that make a head's key from a latent, then those of its value.
    """

    nope: Tensor
    rope: Tensor
    expand: Tensor
    scale: float

    def part(self, tokens: slice) -> "Queries":
        """Those of some tokens."""
        return Queries(self.nope[tokens], self.rope[tokens], self.expand, self.scale)

    def absorbed(self) -> Tensor:
        """The queries as latents see them, [tokens, heads, lora + rope]."""
        keys = self.expand[:, : self.nope.shape[-1]]
        return torch.cat((torch.matmul(self.nope.transpose(0, 1), keys).transpose(0, 1), self.rope), dim=-1)

    def values(self, latents: Tensor) -> Tensor:
        """Sums of latents [tokens, heads, lora] as values [tokens, heads, value]."""
        values = self.expand[:, self.nope.shape[-1] :]
        return torch.matmul(latents.transpose(0, 1), values.transpose(1, 2)).transpose(0, 1)


@dataclass(frozen=True, kw_only=True)
class MlaAttention:
    """The backend."""

    num_layers: int
    lora_rank: int
    rope_dim: int
    block_tokens: int
    kv_dtype: DType
    dtype: torch.dtype

    heads = 1
    quantisation = ROPE_ORDER

    @cached_property
    def layout(self) -> KVLayout:
        """One latent plane per layer."""
        return mla_layout(
            num_layers=self.num_layers,
            block_tokens=self.block_tokens,
            dtype=self.kv_dtype,
            lora_rank=self.lora_rank,
            rope_dim=self.rope_dim,
        )

    def attend(
        self, planes: DeviceCache, layer: int, step: Step, *, q: Queries, latent: Tensor, rope: Tensor
    ) -> Tensor:
        """Write latents [tokens, lora] and rotary keys [tokens, rope], attend -> [tokens, heads x value]."""
        plane = planes.tensors[LATENT.name, layer]
        stored = torch.cat((latent, rope), dim=-1).to(TORCH_DTYPE[self.kv_dtype])
        write_rows(plane, step.rows, stored)
        out = []
        for group in step.groups:
            rows = group_rows(plane, group, stored)
            out.append(attend_latents(group, q.part(group.tokens), rows.to(self.dtype)))
        return (out[0] if len(out) == 1 else torch.cat(out)).flatten(1)


def group_rows(plane: Tensor, group: Group, stored: Tensor) -> Tensor:
    """All rows of a group, [spans, positions, width]: from the plane, or as just written where all are new."""
    if group.fresh:
        return stored[group.tokens][None]
    return read_rows(plane, group.rows[:, 0], plane.shape[-1])


def attend_latents(group: Group, q: Queries, rows: Tensor) -> Tensor:
    """A group's attention to rows [spans, positions, lora + rope], in the form that pays -> [tokens, heads, value]."""
    if not group.few:
        return expanded_attention(q, rows[0])
    visible = None if group.uniform and group.num_new == 1 else group.visible
    return absorbed_attention(q, rows, visible)


def expanded_attention(q: Queries, rows: Tensor) -> Tensor:
    """Causal attention of the last tokens of one span to rows [positions, lora + rope]."""
    heads, nope, lora = q.nope.shape[1], q.nope.shape[2], q.expand.shape[2]
    both = functional.linear(rows[:, :lora], q.expand.flatten(0, 1)).unflatten(-1, (heads, -1))  # type: ignore[no-untyped-call]
    keys = torch.cat((both[..., :nope], rows[:, None, lora:].expand(-1, heads, -1)), dim=-1)
    values = both[..., nope:]
    queries = torch.cat((q.nope, q.rope), dim=-1)
    value_dim, wide = values.shape[-1], max(values.shape[-1], keys.shape[-1])
    queries, keys, values = (
        functional.pad(x, (0, wide - x.shape[-1])) for x in (queries, keys, values)
    )  # kernels want one width
    out = causal_attention(queries, keys.transpose(0, 1), values.transpose(0, 1), scale=q.scale)
    return out[..., :value_dim]


def absorbed_attention(q: Queries, rows: Tensor, visible: Tensor | None) -> Tensor:
    """Attention of few tokens to rows [spans, positions, lora + rope]; `visible` is [spans, new, positions]."""
    spans, heads = rows.shape[0], q.nope.shape[1]
    queries = q.absorbed().view(spans, -1, q.expand.shape[2] + q.rope.shape[2])  # [spans, new x heads, ...]
    mask = None if visible is None else visible.repeat_interleave(heads, dim=1)
    sums = latent_sums(queries, rows, visible=mask, scale=q.scale, lora=q.expand.shape[2])
    return q.values(sums.view(-1, heads, sums.shape[-1]))


def latent_sums(queries: Tensor, rows: Tensor, *, visible: Tensor | None, scale: float, lora: int) -> Tensor:
    """Softmax-weighted sums of latents: queries [B, Q, lora + rope], rows [B, K, lora + rope] -> [B, Q, lora].

    Wider than the flash kernels go, and for few queries: two batched matmuls around a softmax in fp32.
    """
    scores = torch.matmul(queries, rows.transpose(1, 2)).float().mul_(scale)
    if visible is not None:
        scores.masked_fill_(~visible, float("-inf"))
    return torch.matmul(scores.softmax(-1).to(rows.dtype), rows[..., :lora])
