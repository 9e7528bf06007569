"""`LayoutTests`: what every layout must hold, whoever wrote it. Subclass it, give a `layout` fixture, run pytest.

    class TestMine(LayoutTests):
        @pytest.fixture
        def layout(self) -> KVLayout:
            return my_layout(...)

Not here: whether the layout fits what the attention kernel reads; only its author can test that.
"""

import pickle
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from headwater.core.errors import InvalidLayout
from headwater.layout.shard import Shard, byte_ranges, is_writer, parts, shard_layout, shard_of
from headwater.layout.spec import DType, KVLayout, Plane
from headwater.layout.tail import zero_tail
from headwater.testing.copy import gather, scatter
from headwater.transfer.device.arena import DeviceCache, create_host_cache, create_kv_cache

TP_SIZES = (1, 2, 4, 8)


def randomise(cache: DeviceCache, seed: int) -> None:
    """Fill a cache with bytes that differ from block to block and plane to plane. Mutates the cache."""
    generator = torch.Generator().manual_seed(seed)
    for row in cache.rows:
        row.copy_(torch.randint(0, 256, row.shape, dtype=torch.uint8, generator=generator))


def variations(layout: KVLayout) -> dict[str, KVLayout]:
    """Layouts that differ from this one in one thing each, by the thing."""
    bare = tuple(replace(plane, token_axis=None) for plane in layout.planes)  # so that a shape may change freely
    first, rest = bare[0], bare[1:]
    other_dtype = DType.INT8 if first.dtype is DType.UINT8 else DType.UINT8
    changed = {
        "shape": replace(first, shape=(*first.shape[:-1], first.shape[-1] + 1)),
        "axes": replace(first, shape=(1, *first.shape), split=None),
        "dtype": replace(first, dtype=other_dtype),
        "split": replace(first, split=None if first.split is not None else 0),
        "layer": replace(first, layer=max(plane.layer for plane in layout.planes) + 1),
    }
    found = {name: KVLayout(layout.block_tokens, (plane, *rest)) for name, plane in changed.items()}
    if any(plane.token_axis is not None for plane in layout.planes):
        found["token_axis"] = KVLayout(layout.block_tokens, bare)
    found["block_tokens"] = KVLayout(layout.block_tokens + 1, bare)
    found["layer_offset"] = layout.with_layer_offset(2)
    found["one plane more"] = KVLayout(layout.block_tokens, (*layout.planes, changed["layer"]))
    return found


class LayoutTests:
    """The conformance suite. Every test takes the subclass's `layout` fixture."""

    @pytest.fixture
    def layout(self) -> KVLayout:
        """Give the layout under test."""
        raise NotImplementedError("a subclass of LayoutTests has a `layout` fixture")

    def test_flat_order_is_layer_then_priority(self, layout: KVLayout) -> None:
        """Whatever order the planes come in, positions are the same."""
        order = [(plane.layer, plane.role.priority) for plane in layout.planes]
        assert order == sorted(set(order))
        shuffled = random.Random(1).sample(layout.planes, len(layout.planes))
        assert KVLayout(layout.block_tokens, tuple(shuffled)) == layout

    def test_names_are_stable_and_unique(self, layout: KVLayout) -> None:
        """A name is the role and the layer, and finds its plane."""
        names = [plane.name for plane in layout.planes]
        assert len(set(names)) == len(names)
        for index, plane in enumerate(layout.planes):
            assert plane.name == f"{plane.role.name}.{plane.layer}"
            assert layout.index(plane.role.name, plane.layer) == index
            assert layout.plane(plane.role.name, plane.layer) is plane

    def test_a_tail_is_zeroed_behind_its_tokens_and_nowhere_else(self, layout: KVLayout) -> None:
        """Rule 9: positions past the valid ones are zero, positions before them untouched, in every plane."""
        original = random.Random(2).randbytes(layout.page_bytes).replace(b"\0", b"\1")
        whole = memoryview(bytearray(original))
        zero_tail(whole, layout, layout.block_tokens)
        assert whole == original
        if any(plane.token_axis is None for plane in layout.planes) or layout.block_tokens == 1:
            return
        valid = layout.block_tokens // 2 + 1 if layout.block_tokens > 2 else 1
        cut = bytearray(original)
        zero_tail(memoryview(cut), layout, valid)
        for plane, offset in zip(layout.planes, layout.offsets, strict=True):
            axis = plane.token_axis or 0
            shape = (*plane.shape, plane.dtype.itemsize)
            before, after = (
                np.frombuffer(data, np.uint8, plane.num_bytes, offset).reshape(shape) for data in (original, cut)
            )
            kept, lost = np.split(after, [valid], axis=axis)
            assert not lost.any()
            assert (kept == np.split(before, [valid], axis=axis)[0]).all()

    def test_sizes_are_those_of_real_tensors(self, layout: KVLayout) -> None:
        """Bytes per plane, offsets and page size agree with what an engine allocates."""
        with create_kv_cache(layout, num_blocks=3) as cache:
            sizes = [tensor.nbytes // 3 for tensor in cache.flat]
            assert [tensor.shape for tensor in cache.flat] == [(3, *plane.shape) for plane in layout.planes]
            assert not any(tensor.view(torch.uint8).any() for tensor in cache.flat)
        assert tuple(sizes) == layout.plane_bytes
        assert layout.page_bytes == sum(sizes)
        assert list(layout.offsets) == [sum(sizes[:index]) for index in range(len(sizes))]

    def test_fingerprint_is_stable(self, layout: KVLayout) -> None:
        """Equal layouts have one fingerprint, in any process."""
        assert len(layout.fingerprint) == 32
        again = KVLayout(layout.block_tokens, layout.planes[::-1])
        travelled = pickle.loads(pickle.dumps(again))  # before anything is cached in it
        assert again.fingerprint == layout.fingerprint
        assert travelled.fingerprint == layout.fingerprint

    def test_fingerprint_sees_every_change(self, layout: KVLayout) -> None:
        """No two variations share a fingerprint."""
        prints = {name: other.fingerprint for name, other in variations(layout).items()}
        prints["itself"] = layout.fingerprint
        assert len(set(prints.values())) == len(prints), prints

    @pytest.mark.parametrize("payload_offset", [0, 1, 4096])
    def test_gather_then_scatter_is_bit_exact(self, layout: KVLayout, payload_offset: int) -> None:
        """Blocks go to pages and back into other blocks of another cache; nothing else changes."""
        rng = random.Random(payload_offset)
        num_blocks, num_pages, count = 7, 9, 5
        block_ids, other_ids = rng.sample(range(num_blocks), count), rng.sample(range(num_blocks), count)
        page_ids = rng.sample(range(num_pages), count)
        with (
            create_kv_cache(layout, num_blocks) as source,
            create_kv_cache(layout, num_blocks) as target,
            create_host_cache(layout.page_bytes + payload_offset + 3, num_pages) as host,
        ):
            randomise(source, seed=1)
            randomise(target, seed=2)
            host.pages.fill_(0xA5)
            expected = [row.clone() for row in target.rows]
            for row, old in zip(source.rows, expected, strict=True):
                old[other_ids] = row[block_ids]
            gather(source, block_ids, host.pages, page_ids, payload_offset=payload_offset)
            scatter(target, other_ids, host.pages, page_ids, payload_offset=payload_offset)
            for row, old in zip(target.rows, expected, strict=True):
                assert torch.equal(row, old)
            end = payload_offset + layout.page_bytes
            assert (host.pages[:, :payload_offset] == 0xA5).all()
            assert (host.pages[:, end:] == 0xA5).all()
            for block, page in zip(block_ids, page_ids, strict=True):
                packed = torch.cat([row[block] for row in source.rows])
                assert bytes(host.page(page)[payload_offset:end]) == packed.numpy().tobytes()

    @pytest.mark.parametrize("tp_size", TP_SIZES)
    def test_shards_tile_every_plane(self, layout: KVLayout, tp_size: int) -> None:
        """Over all ranks the distinct shards cover each plane exactly once, or the TP size is refused."""
        for plane in layout.planes:
            if not divides(plane, tp_size):
                with pytest.raises(InvalidLayout, match="choose a TP size"):
                    shard_of(plane, 0, tp_size)
                continue
            shards = {shard_of(plane, rank, tp_size) for rank in range(tp_size)}
            covered = sorted(piece for shard in shards for piece in byte_ranges(plane, shard))
            position = 0
            for offset, length in covered:
                assert offset == position
                position = offset + length
            assert position == plane.num_bytes

    @pytest.mark.parametrize("tp_size", TP_SIZES)
    def test_parts_hold_every_local_plane_once(self, layout: KVLayout, tp_size: int) -> None:
        """A rank's parts are its local planes, and each distinct part has one writer."""
        if not all(divides(plane, tp_size) for plane in layout.planes):
            with pytest.raises(InvalidLayout, match="choose a TP size"):
                parts(layout, 0, tp_size)
            return
        writers: dict[Shard, int] = {}
        for rank in range(tp_size):
            mine = parts(layout, rank, tp_size)
            local = shard_layout(layout, rank, tp_size)
            assert KVLayout(layout.block_tokens, tuple(p for part in mine for p in part.layout.planes)) == local
            assert len({part.shard.count for part in mine}) == len(mine)
            for part in mine:
                writers[part.shard] = writers.get(part.shard, 0) + is_writer(part.shard, rank, tp_size, turn=3)
        assert set(writers.values()) == {1}


def divides(plane: Plane, tp_size: int) -> bool:
    """Whether ranks can share the plane evenly, said in another way than the code under test does."""
    heads = 0 if plane.split is None else plane.shape[plane.split]
    return heads % tp_size == 0 or tp_size % heads == 0
