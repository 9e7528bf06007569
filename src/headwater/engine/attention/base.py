"""What backends share: the interface, rows in and out of planes, and softmax attention through torch.

A backend declares its layout and computes on planes of that layout: first it writes what the new tokens leave behind,
then it attends to everything up to each of them. It sees bytes that another run wrote exactly as it sees its own:
what was rounded or quantised on the way in is used rounded, also by the step that wrote it. It keeps nothing between
calls; bytes live in the planes only.

Not here: projections, norms and rotary embeddings (`engine/models/`), and which slots there are.
"""

from typing import Final, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from headwater.layout.spec import DType, KVLayout

TORCH_DTYPE: Final = {DType.BF16: torch.bfloat16, DType.FP16: torch.float16, DType.FP32: torch.float32}

_HALF: Final = (torch.bfloat16, torch.float16)
_WORDS: Final = (torch.int64, torch.int32, torch.int16, torch.uint8)
_MASK_ELEMENTS: Final = 1 << 22  # the largest mask that is made where no kernel knows causality with a context
_FLASH_DIM: Final = 256  # the widest head of the flash kernels


class Attention(Protocol):
    """What the rest of the engine knows of a backend; how it is called is between it and its model."""

    @property
    def layout(self) -> KVLayout:
        """The planes it computes on."""
        ...

    @property
    def heads(self) -> int:
        """Rows per token of its planes (see `engine/step.py`)."""
        ...

    @property
    def quantisation(self) -> str:
        """What the layout's dtypes do not say about the bytes; part of the cache identity."""
        ...


def write_rows(plane: Tensor, rows: Tensor, values: Tensor) -> None:
    """Put `values` [n, width], of the plane's dtype, into the plane's rows. Mutates the plane."""
    _words(plane.view(-1, values.shape[-1])).index_copy_(0, rows, _words(values.contiguous()))


def read_rows(plane: Tensor, rows: Tensor, width: int) -> Tensor:
    """A copy of the plane's rows, [*rows.shape, width]."""
    table = plane.view(-1, width)
    return _words(table).index_select(0, rows.flatten()).view(table.dtype).view(*rows.shape, width)


def _words(table: Tensor) -> Tensor:
    """The same bytes as the widest integers that divide a row: faster to move, and never computed with."""
    num_bytes = table.shape[-1] * table.element_size()
    return table.view(next(dtype for dtype in _WORDS if num_bytes % dtype.itemsize == 0))


def masked_attention(q: Tensor, k: Tensor, v: Tensor, *, visible: Tensor | None, scale: float) -> Tensor:
    """Attention of few queries: q [N, L, Hq, D], k and v [N, Hkv, S, D], visible [N, L, S] -> [N, L, Hq, D].

    The query heads that share a KV head are taken as further queries of it, so nothing is repeated.
    """
    spans, new, heads, dim = q.shape
    shared = heads // k.shape[1]
    folded = q.view(spans, new, k.shape[1], shared, dim).permute(0, 2, 3, 1, 4).reshape(spans, -1, shared * new, dim)
    mask = None
    if visible is not None:
        mask = visible[:, None, None].expand(-1, 1, shared, -1, -1).reshape(spans, 1, shared * new, -1)
    out = functional.scaled_dot_product_attention(folded, k, v, attn_mask=mask, scale=scale)
    return out.view(spans, -1, shared, new, dim).permute(0, 3, 1, 2, 4).reshape(spans, new, heads, dim)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    """Attention of the last L of S positions, each to all up to itself: q [L, Hq, D], k and v [Hkv, S, D] -> q's shape.

    No mask of L x S is ever made: the flash kernels know causality, with a context before the queries too; where they
    cannot be used, queries go in blocks with a bounded mask each.
    """
    new, heads, dim = q.shape
    total = k.shape[1]
    q, k, v = q.transpose(0, 1)[None], k[None], v[None]
    flash = q.is_cuda and q.dtype in _HALF and dim <= _FLASH_DIM
    if q.is_cuda and not flash:  # the other CUDA kernels want as many KV heads as query heads
        k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    if new == total:
        grouped = k.shape[1] != heads
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    elif flash:
        out = _flash_with_context(q, k, v, scale)
    else:
        out = _in_blocks(q, k, v, scale)
    return out[0].transpose(0, 1)


def blocks(length: int, size: int) -> list[tuple[int, int]]:
    """Cut a length into pieces of at most `size`, at least 1."""
    size = max(size, 1)
    return [(begin, min(begin + size, length)) for begin in range(0, length, size)]


def _in_blocks(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Blocks of queries, each with a mask over the keys that its last one sees."""
    new, total = q.shape[2], k.shape[2]
    out = []
    for begin, end in blocks(new, _MASK_ELEMENTS // total):
        seen = total - new + end
        mask = torch.ones(end - begin, seen, dtype=torch.bool, device=q.device).tril(seen - (end - begin))
        part = q[:, :, begin:end], k[:, :, :seen], v[:, :, :seen]
        grouped = k.shape[1] != q.shape[1]
        out.append(functional.scaled_dot_product_attention(*part, attn_mask=mask, scale=scale, enable_gqa=grouped))
    return torch.cat(out, dim=2)


def _flash_with_context(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """The CUDA flash kernel itself: there, `is_causal` aligns the last query with the last key."""
    dim = q.shape[-1]
    q, k, v = (functional.pad(x, (0, -dim % 8)) if dim % 8 else x for x in (q, k, v))
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, is_causal=True, scale=scale)[0]
    return out[..., :dim]
