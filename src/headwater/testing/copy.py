"""Gather and scatter between an engine's paged planes and block-major pages: the bit-exact reference, in torch.

    gather    page[page_ids[i]] <- block[block_ids[i]]      scatter    block[block_ids[i]] <- page[page_ids[i]]

A page holds its planes back to back in flat order from `payload_offset` on, behind what a frame's header takes. Works
on CPU and CUDA, on any ids in any order, on planes of any length. It is the oracle for faster kernels, not one of them:
it makes one temporary per plane, and across devices it waits for the bytes.

Invariant: everything is checked before the first byte moves, so a refused copy changed nothing. Bytes of a page outside
the payload are never touched. Not here: which ids, when, and whether the bytes are right (`layout/frame.py`).
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from headwater.core.errors import InvalidCopy
from headwater.layout.spec import KVLayout
from headwater.transfer.device.arena import DeviceCache, find_planes

Ids: TypeAlias = Sequence[int] | npt.NDArray[Any] | torch.Tensor


def gather(
    cache: DeviceCache,
    block_ids: Ids,
    pages: torch.Tensor,
    page_ids: Ids,
    *,
    layout: KVLayout | None = None,
    payload_offset: int = 0,
) -> None:
    """Copy blocks into pages. Mutates `pages`; raises InvalidCopy for ids, sizes or planes that do not fit.

    `layout` picks the planes that make a page (one part of a sharded block); all of the cache's by default. A block may
    be gathered twice, a page filled only once.
    """
    planes = _planes(cache, pages, layout or cache.layout, payload_offset)
    sources = _ids("block", block_ids, cache.num_blocks, unique=False)
    targets = _ids("page", page_ids, len(pages), unique=True)
    _check_lengths(sources, targets)
    for row, column in planes:
        taken = row.index_select(0, sources.to(row.device))
        column.index_copy_(0, targets.to(column.device), taken.to(column.device))


def scatter(
    cache: DeviceCache,
    block_ids: Ids,
    pages: torch.Tensor,
    page_ids: Ids,
    *,
    layout: KVLayout | None = None,
    payload_offset: int = 0,
) -> None:
    """Copy pages into blocks: the same pairs as `gather`, the other way. Mutates the cache's planes.

    A page may be scattered into several blocks, a block filled only once.
    """
    planes = _planes(cache, pages, layout or cache.layout, payload_offset)
    sources = _ids("page", page_ids, len(pages), unique=False)
    targets = _ids("block", block_ids, cache.num_blocks, unique=True)
    _check_lengths(sources, targets)
    for row, column in planes:
        taken = column.index_select(0, sources.to(column.device))
        row.index_copy_(0, targets.to(row.device), taken.to(row.device))


def _planes(
    cache: DeviceCache, pages: torch.Tensor, layout: KVLayout, payload_offset: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pair each plane's rows in the cache with its columns in the pages, both [n, plane bytes]."""
    check_rows(pages, payload_offset, layout.page_bytes)
    return [
        (row, pages.narrow(1, payload_offset + offset, row.shape[1]))
        for row, offset in zip(find_planes(cache, layout), layout.offsets, strict=True)
    ]


def check_rows(pages: torch.Tensor, payload_offset: int, num_bytes: int) -> None:
    """Raise InvalidCopy unless these are rows of bytes, apart from each other, with room for the payload."""
    if pages.dtype != torch.uint8 or pages.dim() != 2:
        raise InvalidCopy(f"pages must be uint8 rows, not {pages.dtype} of shape {tuple(pages.shape)}")
    if len(pages) > 1 and (pages.stride(0) < pages.shape[1] or pages.stride(1) != 1):
        raise InvalidCopy(f"pages must be rows that do not overlap, not strides of {pages.stride()}")
    if payload_offset < 0 or payload_offset + num_bytes > pages.shape[1]:
        raise InvalidCopy(
            f"a payload of {num_bytes} bytes at offset {payload_offset} does not fit rows of {pages.shape[1]}"
        )


def _ids(what: str, ids: Ids, end: int, *, unique: bool) -> torch.Tensor:
    try:
        found = np.asarray(ids.cpu() if isinstance(ids, torch.Tensor) else ids)
    except (TypeError, ValueError) as error:
        raise InvalidCopy(f"{what} ids must be a vector of ints: {error}") from error
    if found.shape == (0,):
        return torch.empty(0, dtype=torch.int64)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise InvalidCopy(f"{what} ids must be a vector of ints, not {found.dtype} of shape {found.shape}")
    low, high = int(found.min()), int(found.max())
    if low < 0 or high >= end:
        raise InvalidCopy(f"{what} id {low if low < 0 else high} does not exist; there are {end}")
    if unique:
        values, counts = np.unique(found, return_counts=True)
        if len(values) < len(found):
            raise InvalidCopy(f"{what} id {values[counts > 1][0]} is a destination more than once")
    return torch.from_numpy(found.astype(np.int64))


def _check_lengths(sources: torch.Tensor, targets: torch.Tensor) -> None:
    if len(sources) != len(targets):
        raise InvalidCopy(f"{len(sources)} sources cannot fill {len(targets)} destinations")
