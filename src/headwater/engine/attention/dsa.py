"""Sparse attention over a latent cache: an indexer scores all positions, and a query attends to the best of them only.

    score(q, s) = sum over indexer heads h of  w[q, h] x relu(q[q, h] · k[s])

The best `top_k` visible positions count; of equal scores the later one, so that the choice follows from the scores and
not from a kernel. While a span has no more than `top_k` positions everything is chosen, and nothing needs to be scored.

Quantised, a latent is a 656-byte row and an indexer key a 132-byte one (`quantise.py`); indexer keys and queries are
then rotated by a Hadamard matrix first, which leaves their products as they are and spreads what FP8 would round badly.
Plain, both are rows of the KV dtype, not rotated.
"""

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Final

import torch
from torch import Tensor

from headwater.core.errors import InvalidLayout
from headwater.engine.attention import quantise
from headwater.engine.attention.base import TORCH_DTYPE, blocks, read_rows, write_rows
from headwater.engine.attention.mla import ROPE_ORDER, Queries, attend_latents, group_rows, latent_sums
from headwater.engine.step import Group, Step
from headwater.layout.dsa import dsa_layout, dsa_plain_layout
from headwater.layout.spec import INDEXER, KEY, DType, KVLayout
from headwater.transfer.device.arena import DeviceCache

_ELEMENTS: Final = 1 << 26  # of the largest temporary: scores of all indexer heads, or the chosen rows


@dataclass(frozen=True)
class Index:
    """The indexer's view of the new tokens: queries [tokens, heads, dim], keys [tokens, dim], weights [tokens, heads].

    The scales of the score are in the weights, in fp32.
    """

    queries: Tensor
    keys: Tensor
    weights: Tensor


@dataclass(frozen=True, kw_only=True)
class DsaAttention:
    """The backend. `kv_dtype` FP8_E4M3 means packed rows."""

    num_layers: int
    lora_rank: int
    rope_dim: int
    index_dim: int
    top_k: int
    block_tokens: int
    kv_dtype: DType
    dtype: torch.dtype

    heads = 1

    def __post_init__(self) -> None:
        """Refuse what cannot be rotated."""
        if self.fp8 and self.index_dim & (self.index_dim - 1):
            raise InvalidLayout(f"an indexer key must have a power of two of values, not {self.index_dim}")

    @property
    def fp8(self) -> bool:
        """Whether rows are packed."""
        return self.kv_dtype is DType.FP8_E4M3

    @property
    def quantisation(self) -> str:
        """How packed rows were made."""
        packed = "e4m3 rows, power-of-two scales per 128, indexer rows with their scales, keys rotated by Hadamard"
        return f"{ROPE_ORDER}; {packed}" if self.fp8 else ROPE_ORDER

    @cached_property
    def layout(self) -> KVLayout:
        """A key and an indexer plane per layer."""
        sizes = {
            "num_layers": self.num_layers,
            "block_tokens": self.block_tokens,
            "lora_rank": self.lora_rank,
            "rope_dim": self.rope_dim,
            "index_dim": self.index_dim,
        }
        return dsa_layout(**sizes) if self.fp8 else dsa_plain_layout(**sizes, dtype=self.kv_dtype)

    def attend(
        self, planes: DeviceCache, layer: int, step: Step, *, q: Queries, latent: Tensor, rope: Tensor, index: Index
    ) -> Tensor:
        """Write latents, rotary keys and indexer keys, choose, attend -> [tokens, heads x value]."""
        plane, indexer = planes.tensors[KEY.name, layer], planes.tensors[INDEXER.name, layer]
        if self.fp8:
            rotate = hadamard(self.index_dim, index.keys.dtype, index.keys.device)
            index = Index(index.queries @ rotate, index.keys @ rotate, index.weights)
            stored, keys = quantise.pack_key_rows(latent, rope), quantise.pack_index_rows(index.keys)
        else:
            stored, keys = (x.to(TORCH_DTYPE[self.kv_dtype]) for x in (torch.cat((latent, rope), dim=-1), index.keys))
        write_rows(plane, step.rows, stored)
        write_rows(indexer, step.rows, keys)
        out = []
        for group in step.groups:
            part = q.part(group.tokens)
            if group.num_positions <= self.top_k:
                out.append(attend_latents(group, part, self._latents(group_rows(plane, group, stored))))
            else:
                out.append(self._sparse(plane, indexer, group, part, index))
        return (out[0] if len(out) == 1 else torch.cat(out)).flatten(1)

    def _sparse(self, plane: Tensor, indexer: Tensor, group: Group, q: Queries, index: Index) -> Tensor:
        """A group's attention to what the indexer chooses, queries in blocks of bounded memory."""
        spans, new, total = group.num_spans, group.num_new, group.num_positions
        rows = group.rows[:, 0]
        keys = self._index_keys(read_rows(indexer, rows, indexer.shape[-1]))  # [spans, positions, dim]
        queries, weights = (
            x[group.tokens].float().view(spans, new, *x.shape[1:]) for x in (index.queries, index.weights)
        )
        absorbed = q.absorbed()
        absorbed = absorbed.view(spans, new, *absorbed.shape[1:])
        # A long span reads and unpacks each row once; of a few tokens' contexts only what they chose is read.
        latents = None if group.few else self._latents(read_rows(plane, rows[0], plane.shape[-1]))
        per_query = spans * max(queries.shape[2] * total, self.top_k * absorbed.shape[-1])
        out = []
        for begin, end in blocks(new, _ELEMENTS // per_query):
            position = group.positions[:, begin:end]
            scores = index_scores(queries[:, begin:end], keys, weights[:, begin:end], position)
            chosen = choose(scores, self.top_k)  # [spans, block, top_k]
            visible = chosen <= position[..., None]
            chosen = chosen.minimum(position[..., None])
            if latents is None:
                picked = rows.gather(1, chosen.flatten(1)).view_as(chosen)
                taken = self._latents(read_rows(plane, picked.flatten(0, 1), plane.shape[-1]))
            else:
                taken = latents[chosen[0]]
            sums = latent_sums(
                absorbed[:, begin:end].flatten(0, 1),
                taken,
                visible=visible.flatten(0, 1)[:, None],
                scale=q.scale,
                lora=self.lora_rank,
            )
            out.append(sums.view(spans, end - begin, *sums.shape[1:]))
        return q.values(torch.cat(out, dim=1).flatten(0, 1))

    def _latents(self, rows: Tensor) -> Tensor:
        if self.fp8:
            return quantise.unpack_key_rows(rows, self.lora_rank, self.dtype)
        return rows.to(self.dtype)

    def _index_keys(self, rows: Tensor) -> Tensor:
        return quantise.unpack_index_rows(rows, self.index_dim) if self.fp8 else rows.float()


def index_scores(queries: Tensor, keys: Tensor, weights: Tensor, positions: Tensor) -> Tensor:
    """Scores [spans, new, positions] of fp32 queries [spans, new, heads, dim] and keys [spans, positions, dim].

    What lies behind a query's own position gets minus infinity.
    """
    spans, new, heads, _ = queries.shape
    products = torch.matmul(queries.flatten(1, 2), keys.transpose(1, 2)).relu_().view(spans, new, heads, -1)
    scores = torch.matmul(weights[:, :, None], products)[:, :, 0]
    hidden = torch.arange(scores.shape[-1], device=scores.device) > positions[..., None]
    return scores.masked_fill_(hidden, float("-inf"))


def choose(scores: Tensor, top_k: int) -> Tensor:
    """The positions of the `top_k` highest scores, ascending; of equal scores the later ones."""
    bits = (scores + 0.0).view(torch.int32)  # + 0.0: there are two zeros, and they are equal
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the floats
    position = torch.arange(scores.shape[-1], device=scores.device)
    keyed = (ordered.to(torch.int64) << 32) | position
    best = keyed.topk(top_k, dim=-1, sorted=False).values & 0xFFFFFFFF
    return best.sort(dim=-1).values  # so that what is summed over them does not depend on a kernel's order either


@cache
def hadamard(dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The orthonormal Hadamard matrix of a power of two; it is its own inverse."""
    matrix = torch.ones(1, 1, dtype=dtype, device=device)
    while matrix.shape[0] < dim:
        top, bottom = torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)
        matrix = torch.cat((top, bottom))
    scaled: Tensor = matrix * float(dim) ** -0.5
    return scaled
