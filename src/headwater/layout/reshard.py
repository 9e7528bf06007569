"""Pages of one tensor-parallel size out of those of another: which bytes of which page go where. Arithmetic on bytes.

A block's planes are divided by heads, so what one rank holds at one size is made of what some ranks held at another:
half a page, one, or several side by side. Replicated planes are the same bytes at every size. A *plan* says for one
page of the reader's which pages of the writer's it is made of, and which strips of their payloads go where.

Invariant: the strips of a plan cover every byte of the reader's payload exactly once. Not here: reading and verifying
the pages (`storage/resharded.py`); who holds and who writes what at one size (`shard.py`).
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from headwater.core.errors import InvalidLayout
from headwater.layout.shard import WHOLE, Part, Shard, parts
from headwater.layout.spec import KVLayout, Plane


@dataclass(frozen=True, slots=True)
class Strip:
    """Bytes that two payloads share: `num_rows` runs of `length` bytes, at equal distances in each."""

    num_rows: int
    length: int
    source: int  # offset of the first run in the writer's payload
    source_stride: int  # from run to run
    target: int  # the same in the reader's
    target_stride: int


@dataclass(frozen=True, slots=True)
class Source:
    """One page of the writer's, and what the reader takes from it."""

    part: Part
    number: int  # `part` of its name
    strips: tuple[Strip, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """How a page of the reader's is made of pages that were written at one tensor-parallel size."""

    tp_size: int
    sources: tuple[Source, ...]


def part_number(part: Part, layout: KVLayout) -> int:
    """What a part is called in a page's name: 0 for all planes whole, which needs no telling apart, or else its tag.

    `layout` is the unsharded one. So an engine of one rank, and one of many whose planes are all replicated, write and
    read the same pages.
    """
    return 0 if part.shard == WHOLE and part.layout == layout else part.tag


def divides(layout: KVLayout, tp_size: int) -> bool:
    """Whether so many ranks can share the layout."""
    try:
        parts(layout, 0, tp_size)
    except InvalidLayout:
        return False
    return True


def plan(layout: KVLayout, own: Part, tp_size: int) -> Plan:
    """How `own`, a page of some rank at whatever size, is made of pages that were written at `tp_size`.

    `layout` is the unsharded one. Raises InvalidLayout if so many ranks cannot share it, or `own` is no part of it.
    """
    written = dict.fromkeys(part for rank in range(tp_size) for part in parts(layout, rank, tp_size))
    sources = []
    for part in written:
        strips = tuple(_merged(_strips(layout, part, own)))
        if strips:
            sources.append(Source(part, part_number(part, layout), strips))
    covered = sum(strip.num_rows * strip.length for source in sources for strip in source.strips)
    if covered != own.layout.page_bytes:
        raise InvalidLayout("this page is not a part of this layout")
    return Plan(tp_size, tuple(sources))


def plans(layout: KVLayout, own: Part, sizes: Iterable[int]) -> tuple[Plan, ...]:
    """The plans for several sizes, in this order. Raises InvalidLayout if `own` is no part of the layout.

    Left out are plans that name the same pages as one before, and sizes at which ranks cannot share the layout.
    """
    found: dict[tuple[Part, ...], Plan] = {}
    for tp_size in sizes:
        if divides(layout, tp_size):
            one = plan(layout, own, tp_size)
            found.setdefault(tuple(source.part for source in one.sources), one)
    return tuple(found.values())


def copy_strips(source: memoryview, target: memoryview, strips: Iterable[Strip]) -> None:
    """Copy what a page gives from its payload into the reader's. Mutates `target`."""
    for strip in strips:
        taken = _rows(source, strip, strip.source, strip.source_stride)
        _rows(target, strip, strip.target, strip.target_stride)[...] = taken


def _rows(payload: memoryview, strip: Strip, start: int, stride: int) -> npt.NDArray[np.uint8]:
    return np.ndarray((strip.num_rows, strip.length), np.uint8, payload, start, (stride, 1))


def _strips(layout: KVLayout, source: Part, target: Part) -> Iterator[Strip]:
    """What a page of the writer's and one of the reader's share, plane by plane."""
    offsets = {plane.name: offset for plane, offset in zip(source.layout.planes, source.layout.offsets, strict=True)}
    for local, offset in zip(target.layout.planes, target.layout.offsets, strict=True):
        plane = layout.plane(local.role.name, local.layer)
        if plane.name not in offsets:
            continue
        strip = _shared(plane, source.shard, target.shard)
        if strip is not None:
            yield replace(strip, source=offsets[plane.name] + strip.source, target=offset + strip.target)


def _shared(plane: Plane, source: Shard, target: Shard) -> Strip | None:
    """The bytes of a plane that two shards share, at their offsets in each shard's own bytes."""
    if plane.split is None:
        return Strip(1, plane.num_bytes, 0, plane.num_bytes, 0, plane.num_bytes)
    heads, num_rows = plane.shape[plane.split], math.prod(plane.shape[: plane.split])
    inner = math.prod(plane.shape[plane.split + 1 :]) * plane.dtype.itemsize
    first, second = _heads(heads, source), _heads(heads, target)
    start, end = max(first.start, second.start), min(first.stop, second.stop)
    if start >= end:
        return None
    return Strip(
        num_rows,
        (end - start) * inner,
        (start - first.start) * inner,
        len(first) * inner,
        (start - second.start) * inner,
        len(second) * inner,
    )


def _heads(num_heads: int, shard: Shard) -> range:
    share = num_heads // shard.count
    return range(shard.index * share, (shard.index + 1) * share)


def _merged(strips: Iterable[Strip]) -> Iterator[Strip]:
    """The same strips, those that lie back to back in both payloads as one."""
    last: Strip | None = None
    for strip in strips:
        if (
            last is not None
            and last.num_rows == strip.num_rows == 1
            and (last.source + last.length, last.target + last.length) == (strip.source, strip.target)
        ):
            length = last.length + strip.length
            last = Strip(1, length, last.source, length, last.target, length)
            continue
        if last is not None:
            yield last
        last = strip
    if last is not None:
        yield last
