"""Shards: exact rules, and over all ranks every byte exactly once, for any shape, axis and TP size."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from headwater.core.errors import InvalidLayout
from headwater.layout.gqa import gqa_layout
from headwater.layout.mla import mla_layout
from headwater.layout.shard import Part, Shard, byte_ranges, is_writer, parts, shard_layout, shard_of
from headwater.layout.spec import KEY, DType, KVLayout, Plane, combine
from headwater.testing.samples import sample_layouts

MIXED = sample_layouts()["mixed-gqa-mla"]


def heads(count: int) -> Plane:
    return Plane(KEY, 0, (count, 2, 3), DType.BF16, 0)


def test_which_rank_has_which_shard() -> None:
    assert [shard_of(heads(8), rank, 4) for rank in range(4)] == [Shard(rank, 4) for rank in range(4)]
    assert [shard_of(heads(4), rank, 4) for rank in range(4)] == [Shard(rank, 4) for rank in range(4)]
    assert [shard_of(heads(2), rank, 4) for rank in range(4)] == [Shard(0, 2), Shard(0, 2), Shard(1, 2), Shard(1, 2)]
    assert [shard_of(heads(1), rank, 2) for rank in range(2)] == [Shard(0, 1)] * 2
    assert shard_of(Plane(KEY, 0, (8, 2), DType.BF16), 3, 4) == Shard(0, 1)
    assert shard_of(heads(7), 0, 1) == Shard(0, 1)


@pytest.mark.parametrize(("count", "tp_size"), [(6, 4), (8, 3), (3, 4), (4, 6)])
def test_uneven_heads_are_refused_with_advice(count: int, tp_size: int) -> None:
    with pytest.raises(InvalidLayout, match=f"choose a TP size that divides {count} or is a multiple of it"):
        shard_of(heads(count), 0, tp_size)


def test_what_does_not_exist_is_refused() -> None:
    for index, count in ((1, 1), (-1, 2), (0, 0), (0, -1)):
        with pytest.raises(InvalidLayout, match="does not exist"):
            Shard(index, count)
    for rank, tp_size in ((4, 4), (-1, 4), (0, 0)):
        with pytest.raises(InvalidLayout, match="does not exist"):
            shard_of(heads(8), rank, tp_size)
        with pytest.raises(InvalidLayout, match="does not exist"):
            is_writer(Shard(0, 1), rank, tp_size, turn=0)
    with pytest.raises(InvalidLayout, match="replicated"):
        byte_ranges(Plane(KEY, 0, (8, 2), DType.BF16), Shard(0, 2))
    with pytest.raises(InvalidLayout, match="do not divide"):
        byte_ranges(heads(6), Shard(0, 4))
    with pytest.raises(InvalidLayout, match="evenly"):
        is_writer(Shard(0, 3), 0, 4, turn=0)


def test_byte_ranges_are_merged() -> None:
    assert byte_ranges(heads(8), Shard(1, 4)) == ((24, 24),)
    assert byte_ranges(heads(8), Shard(0, 1)) == ((0, 96),)
    inner = Plane(KEY, 0, (2, 4, 3), DType.BF16, 1)
    assert byte_ranges(inner, Shard(1, 2)) == ((12, 12), (36, 12))
    assert byte_ranges(inner, Shard(0, 1)) == ((0, 48),)
    assert byte_ranges(Plane(KEY, 0, (1, 1, 4), DType.BF16, 2), Shard(3, 4)) == ((6, 2),)


@st.composite
def divided_planes(draw: st.DrawFn) -> tuple[Plane, int]:
    shape = draw(st.lists(st.integers(1, 8), min_size=1, max_size=4))
    split = draw(st.none() | st.integers(0, len(shape) - 1))
    tp_size = draw(st.integers(1, 8))
    extent = 0 if split is None else shape[split]
    assume(extent % tp_size == 0 or tp_size % extent == 0)
    return Plane(KEY, 0, tuple(shape), draw(st.sampled_from(DType)), split), tp_size


@given(divided_planes())
def test_distinct_shards_tile_the_plane_exactly_once(case: tuple[Plane, int]) -> None:
    plane, tp_size = case
    shards = {shard_of(plane, rank, tp_size) for rank in range(tp_size)}
    touched = np.zeros(plane.num_bytes, dtype=np.int64)
    for shard in shards:
        ranges = byte_ranges(plane, shard)
        for offset, length in ranges:
            touched[offset : offset + length] += 1
        assert all(a[0] + a[1] < b[0] for a, b in itertools.pairwise(ranges))
    assert (touched == 1).all()


@given(divided_planes())
def test_byte_ranges_are_the_bytes_of_the_slice(case: tuple[Plane, int]) -> None:
    plane, tp_size = case
    index = np.arange(plane.num_bytes).reshape(*plane.shape, plane.dtype.itemsize)
    for rank in range(tp_size):
        shard = shard_of(plane, rank, tp_size)
        (local,) = shard_layout(KVLayout(16, (plane,)), rank, tp_size).planes
        axis = plane.split or 0
        step = local.shape[axis]
        expected = index.take(range(shard.index * step, (shard.index + 1) * step), axis)
        got = [byte for offset, length in byte_ranges(plane, shard) for byte in range(offset, offset + length)]
        assert got == expected.ravel().tolist()
        assert local.num_bytes == len(got)


@given(divided_planes(), st.integers(0, 1000))
def test_exactly_one_holder_writes_and_all_take_turns(case: tuple[Plane, int], turn: int) -> None:
    plane, tp_size = case
    for shard in {shard_of(plane, rank, tp_size) for rank in range(tp_size)}:
        holders = [rank for rank in range(tp_size) if shard_of(plane, rank, tp_size) == shard]
        written: Counter[int] = Counter()
        for offset in range(len(holders)):
            writers = [rank for rank in range(tp_size) if is_writer(shard, rank, tp_size, turn=turn + offset)]
            assert len(writers) == 1
            written.update(writers)
        assert written == Counter(holders)


def test_replicated_planes_are_a_page_of_their_own_stored_once() -> None:
    by_rank = [parts(MIXED, rank, 4) for rank in range(4)]
    for rank, (replicated, split) in enumerate(by_rank):
        assert replicated.shard == Shard(0, 1)
        assert [plane.name for plane in replicated.layout.planes] == ["latent.2", "latent.3"]
        assert split.shard == Shard(rank, 4)
        assert {plane.shape[0] for plane in split.layout.planes} == {1}
    distinct = {part for rank_parts in by_rank for part in rank_parts}
    assert sum(part.layout.page_bytes for part in distinct) == MIXED.page_bytes


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
@pytest.mark.parametrize("name", [name for name in sample_layouts() if name != "odd"])
def test_distinct_parts_hold_the_block_exactly_once(name: str, tp_size: int) -> None:
    layout = sample_layouts()[name]
    distinct = {part for rank in range(tp_size) for part in parts(layout, rank, tp_size)}
    assert sum(part.layout.page_bytes for part in distinct) == layout.page_bytes


def test_groups_with_different_heads_are_parts_of_their_own() -> None:
    main = gqa_layout(num_layers=1, num_kv_heads=8, head_dim=4, block_tokens=2, dtype=DType.BF16)
    draft = gqa_layout(num_layers=1, num_kv_heads=2, head_dim=4, block_tokens=2, dtype=DType.BF16, layer_offset=1)
    latent = mla_layout(num_layers=1, block_tokens=2, layer_offset=2)
    found = parts(combine(main, draft, latent), 3, 4)
    assert [part.shard for part in found] == [Shard(0, 1), Shard(1, 2), Shard(3, 4)]
    assert [part.layout.planes[0].name for part in found] == ["latent.2", "key.1", "key.0"]
    assert parts(combine(main, draft, latent), 0, 1) == (Part(Shard(0, 1), combine(main, draft, latent)),)


def test_part_fingerprints_tell_tp_sizes_apart() -> None:
    prints: dict[bytes, Part] = {}
    for tp_size in (1, 2, 4, 8):
        for rank in range(tp_size):
            for part in parts(MIXED, rank, tp_size):
                assert prints.setdefault(part.fingerprint, part) == part
    # All planes whole; the latent alone; the rest in 2 and in 4 shards (8 ranks share 4).
    assert Counter(part.shard.count for part in prints.values()) == {1: 2, 2: 2, 4: 4}
