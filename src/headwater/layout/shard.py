"""Tensor parallelism: which bytes of a block belong to which rank, and who writes what several ranks hold.

A block is logical; a rank holds one *shard* of each of its planes. A plane without a split axis is replicated, shard
(0, 1). A split axis of extent H over T ranks gives T shards if T divides H, and H shards if H divides T: then T/H ranks
share one. Planes with the same number of shards travel in one page, a *part*, stored once per distinct shard and never
once per rank.

Invariant: over all ranks the distinct shards of a plane tile its bytes exactly once. Not here: how a page is named, and
anything about devices.
"""

import hashlib
import math
import struct
from dataclasses import dataclass, replace
from functools import cached_property

from headwater.core.errors import InvalidLayout
from headwater.layout.spec import KVLayout, Plane


@dataclass(frozen=True, slots=True, order=True)
class Shard:
    """Shard `index` of `count` equal ones; (0, 1) is the whole."""

    index: int
    count: int

    def __post_init__(self) -> None:
        """Refuse a shard that does not exist."""
        if not 0 <= self.index < self.count:
            raise InvalidLayout(f"shard {self.index} of {self.count} does not exist")


WHOLE = Shard(0, 1)


@dataclass(frozen=True)
class Part:
    """One page of a rank: the planes that are cut the same way, as this rank holds them."""

    shard: Shard
    layout: KVLayout  # local: shapes are the rank's

    @cached_property
    def fingerprint(self) -> bytes:
        """32 bytes that tell this page from every other page of the block, also from those of another TP size.

        The shard alone does not: (0, 1) is all planes of a mixed model on one rank, only the replicated ones on two.
        """
        shard = struct.pack("<II", self.shard.index, self.shard.count)
        return hashlib.sha256(b"headwater/part/1" + shard + self.layout.fingerprint).digest()

    @property
    def tag(self) -> int:
        """The fingerprint's first four bytes: `part` of a page's name."""
        return int.from_bytes(self.fingerprint[:4], "little")


def shard_of(plane: Plane, rank: int, tp_size: int) -> Shard:
    """Find the shard of a plane that a rank holds; InvalidLayout if heads and ranks do not divide one another."""
    _check_rank(rank, tp_size)
    if plane.split is None:
        return WHOLE
    extent = plane.shape[plane.split]
    if extent % tp_size == 0:
        return Shard(rank, tp_size)
    if tp_size % extent == 0:
        return Shard(rank * extent // tp_size, extent)
    raise InvalidLayout(
        f"plane {plane.name} has {extent} heads on its split axis, which {tp_size} ranks cannot share evenly: "
        f"choose a TP size that divides {extent} or is a multiple of it"
    )


def byte_ranges(plane: Plane, shard: Shard) -> tuple[tuple[int, int], ...]:
    """(offset, length) of a shard's bytes inside the logical plane's, ascending, adjacent ones merged."""
    if shard.count == 1:
        return ((0, plane.num_bytes),)
    axis, local = _divided(plane, shard.count)
    inner = math.prod(plane.shape[axis + 1 :]) * plane.dtype.itemsize
    length = local * inner
    stride = plane.shape[axis] * inner
    return tuple((outer * stride + shard.index * length, length) for outer in range(math.prod(plane.shape[:axis])))


def shard_layout(layout: KVLayout, rank: int, tp_size: int) -> KVLayout:
    """Return the planes as one rank holds them. They keep their split axis: local planes are not to be cut again."""
    return KVLayout(
        layout.block_tokens, tuple(_local(plane, shard_of(plane, rank, tp_size)) for plane in layout.planes)
    )


def parts(layout: KVLayout, rank: int, tp_size: int) -> tuple[Part, ...]:
    """List the pages that a rank reads and writes, coarsest cut first: replicated planes, if any, come in the first."""
    planes: dict[Shard, list[Plane]] = {}
    for plane in layout.planes:
        shard = shard_of(plane, rank, tp_size)
        planes.setdefault(shard, []).append(_local(plane, shard))
    # One rank never holds two shards of the same count, so sorting by count leaves nothing to chance.
    by_count = sorted(planes, key=lambda shard: shard.count)
    return tuple(Part(shard, KVLayout(layout.block_tokens, tuple(planes[shard]))) for shard in by_count)


def is_writer(shard: Shard, rank: int, tp_size: int, *, turn: int) -> bool:
    """Whether this rank writes the shard: exactly one of those that hold it does, another one at the next `turn`.

    `turn` is any number that all ranks agree on, such as a block's depth or the low bits of its key. A rank that does
    not hold the shard never writes it.
    """
    _check_rank(rank, tp_size)
    if tp_size % shard.count:
        raise InvalidLayout(f"{tp_size} ranks cannot hold {shard.count} shards evenly")
    num_holders = tp_size // shard.count
    return rank == shard.index * num_holders + turn % num_holders


def _local(plane: Plane, shard: Shard) -> Plane:
    if shard.count == 1:
        return plane
    axis, local = _divided(plane, shard.count)
    return replace(plane, shape=(*plane.shape[:axis], local, *plane.shape[axis + 1 :]))


def _divided(plane: Plane, count: int) -> tuple[int, int]:
    """Return the split axis and its extent in one of `count` shards."""
    if plane.split is None:
        raise InvalidLayout(f"plane {plane.name} is replicated and has no {count} shards")
    extent = plane.shape[plane.split]
    if extent % count:
        raise InvalidLayout(f"plane {plane.name} has {extent} heads, which {count} shards do not divide")
    return plane.split, extent // count


def _check_rank(rank: int, tp_size: int) -> None:
    if not 0 <= rank < tp_size:
        raise InvalidLayout(f"rank {rank} of {tp_size} does not exist")
