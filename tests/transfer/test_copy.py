"""Copies: bit equality for any ids and sizes, everything refused before a byte moves, and a new variant."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headwater.core.errors import InvalidCopy, InvalidLayout, ResourceClosed
from headwater.layout.shard import parts, shard_layout
from headwater.layout.spec import KEY, DType, KVLayout, Plane, combine, declare_role
from headwater.testing.copy import gather, scatter
from headwater.testing.layouts import LayoutTests, randomise
from headwater.testing.samples import sample_layouts
from headwater.transfer.device.arena import DeviceCache, create_host_cache, create_kv_cache

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"))]
ODD = sample_layouts()["odd"]


def block(cache: DeviceCache, index: int) -> bytes:
    """One block's planes back to back, taken from the typed tensors one at a time."""
    return b"".join(tensor[index].contiguous().view(torch.uint8).cpu().numpy().tobytes() for tensor in cache.flat)


@st.composite
def copies(draw: st.DrawFn) -> tuple[list[int], int, int, list[int], list[int], int]:
    sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))
    num_blocks, num_pages = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    count = draw(st.integers(0, min(num_blocks, num_pages)))
    block_ids = draw(st.permutations(range(num_blocks)))[:count]
    page_ids = draw(st.permutations(range(num_pages)))[:count]
    return sizes, num_blocks, num_pages, block_ids, page_ids, draw(st.integers(0, 17))


@given(copies())
def test_any_bytes_any_ids(case: tuple[list[int], int, int, list[int], list[int], int]) -> None:
    sizes, num_blocks, num_pages, block_ids, page_ids, offset = case
    layout = KVLayout(1, tuple(Plane(KEY, layer, (size,), DType.INT8) for layer, size in enumerate(sizes)))
    source, target = create_kv_cache(layout, num_blocks), create_kv_cache(layout, num_blocks)
    randomise(source, seed=1)
    randomise(target, seed=2)
    pages = torch.full((num_pages, offset + layout.page_bytes + 2), 0xEE, dtype=torch.uint8)
    expected = {page: bytes(pages[page].tolist()) for page in range(num_pages)}
    for block_id, page in zip(block_ids, page_ids, strict=True):
        expected[page] = b"\xee" * offset + block(source, block_id) + b"\xee" * 2
    after = [block(target, index) for index in range(num_blocks)]
    for block_id in block_ids:
        after[block_id] = block(source, block_id)

    gather(source, block_ids, pages, page_ids, payload_offset=offset)
    assert {page: bytes(pages[page].tolist()) for page in range(num_pages)} == expected
    scatter(target, block_ids, pages, page_ids, payload_offset=offset)
    assert [block(target, index) for index in range(num_blocks)] == after
    assert {page: bytes(pages[page].tolist()) for page in range(num_pages)} == expected


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("pages_on", DEVICES)
@pytest.mark.parametrize("name", sample_layouts())
def test_round_trip_on_every_device(name: str, device: str, pages_on: str) -> None:
    layout = sample_layouts()[name]
    with (
        create_kv_cache(layout, 6, device) as source,
        create_kv_cache(layout, 6, device) as target,
        create_host_cache(layout, 4) as host,
    ):
        randomise(source, seed=3)
        pages = host.pages.to(pages_on)
        gather(source, [5, 0, 3], pages, [3, 1, 0])
        scatter(target, [1, 2, 4], pages, [3, 1, 0])
        assert [block(target, index) for index in (1, 2, 4)] == [block(source, index) for index in (5, 0, 3)]
        assert [block(target, index) for index in (0, 3, 5)] == [bytes(layout.page_bytes)] * 3
        assert [bytes(pages[page, : layout.page_bytes].tolist()) for page in (3, 1)] == [
            block(source, 5),
            block(source, 0),
        ]


@pytest.mark.parametrize(
    "ids",
    [[2, 0], (2, 0), np.array([2, 0]), np.array([2, 0], np.uint8), torch.tensor([2, 0]), torch.tensor([2, 0]).int()],
    ids=lambda ids: f"{type(ids).__name__}-{getattr(ids, 'dtype', '')}",
)
def test_ids_of_any_sort(ids: Any) -> None:
    cache, pages = create_kv_cache(ODD, 3), torch.zeros(3, ODD.page_bytes, dtype=torch.uint8)
    randomise(cache, seed=1)
    gather(cache, ids, pages, ids)
    assert [bytes(row.tolist()) for row in pages] == [block(cache, 0), bytes(ODD.page_bytes), block(cache, 2)]


@pytest.mark.parametrize("nothing", [[], (), np.array([]), torch.tensor([]), range(0)])
def test_empty_lists_copy_nothing(nothing: Any) -> None:
    cache, pages = create_kv_cache(ODD, 3), torch.zeros(3, ODD.page_bytes, dtype=torch.uint8)
    randomise(cache, seed=1)
    before = [block(cache, index) for index in range(3)]
    gather(cache, nothing, pages, nothing)
    scatter(cache, nothing, pages, nothing)
    assert not pages.any()
    assert [block(cache, index) for index in range(3)] == before


def test_a_source_may_be_read_twice() -> None:
    cache, pages = create_kv_cache(ODD, 3), torch.zeros(3, ODD.page_bytes, dtype=torch.uint8)
    randomise(cache, seed=1)
    gather(cache, [1, 1], pages, [0, 2])
    assert torch.equal(pages[0], pages[2])
    scatter(cache, [0, 2], pages, [0, 0])
    assert block(cache, 0) == block(cache, 1) == block(cache, 2)


@pytest.mark.parametrize("verb", [gather, scatter])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"block_ids": [0, 3], "page_ids": [0, 1]}, "block id 3 does not exist; there are 3"),
        ({"block_ids": [-1], "page_ids": [0]}, "block id -1"),
        ({"block_ids": [0], "page_ids": [4]}, "page id 4 does not exist; there are 4"),
        ({"block_ids": [0], "page_ids": [-4]}, "page id -4"),
        ({"block_ids": [0, 1], "page_ids": [0]}, "cannot fill"),
        ({"block_ids": [], "page_ids": [0]}, "cannot fill"),
        ({"block_ids": [1, 1], "page_ids": [2, 2]}, "more than once"),
        ({"block_ids": [0.0], "page_ids": [0]}, "vector of ints"),
        ({"block_ids": [True], "page_ids": [0]}, "vector of ints"),
        ({"block_ids": [[0]], "page_ids": [0]}, "vector of ints"),
        ({"block_ids": [[0], [1, 2]], "page_ids": [0]}, "vector of ints"),
        ({"block_ids": [2**70], "page_ids": [0]}, "vector of ints"),
        ({"block_ids": np.array([2**63], np.uint64), "page_ids": [0]}, "does not exist"),
        ({"block_ids": 0, "page_ids": [0]}, "vector of ints"),
        ({"pages": torch.zeros(4, 588, dtype=torch.int8)}, "uint8 rows"),
        ({"pages": torch.zeros(588, dtype=torch.uint8)}, "uint8 rows"),
        ({"pages": torch.tensor(1, dtype=torch.uint8)}, "uint8 rows"),
        ({"pages": torch.zeros(4, 587, dtype=torch.uint8)}, "588 bytes at offset 0 does not fit rows of 587"),
        ({"payload_offset": 1}, "at offset 1 does not fit"),
        ({"payload_offset": -1}, "at offset -1 does not fit"),
        ({"layout": KVLayout(7, (Plane(ODD.planes[0].role, 0, (105,), DType.UINT8),))}, "the cache's plane is"),
    ],
)
def test_refused_copies_change_nothing(verb: Any, arguments: dict[str, Any], message: str) -> None:
    cache = create_kv_cache(ODD, 3)
    randomise(cache, seed=1)
    pages = torch.full((4, ODD.page_bytes), 0x5A, dtype=torch.uint8)
    before = [block(cache, index) for index in range(3)]
    given_arguments = {"block_ids": [0], "pages": pages, "page_ids": [1], **arguments}
    with pytest.raises(InvalidCopy, match=message):
        verb(cache, **given_arguments)
    assert (pages == 0x5A).all()
    assert [block(cache, index) for index in range(3)] == before


def test_which_side_must_be_unique() -> None:
    cache, pages = create_kv_cache(ODD, 3), torch.zeros(3, ODD.page_bytes, dtype=torch.uint8)
    with pytest.raises(InvalidCopy, match="page id 2 is a destination more than once"):
        gather(cache, [0, 1], pages, [2, 2])
    with pytest.raises(InvalidCopy, match="block id 1 is a destination more than once"):
        scatter(cache, [1, 1], pages, [0, 2])


def test_unknown_planes_and_closed_caches() -> None:
    cache, pages = create_kv_cache(ODD, 3), torch.zeros(3, 4096, dtype=torch.uint8)
    with pytest.raises(InvalidLayout, match=r"no plane key\.2"):
        gather(cache, [0], pages, [0], layout=ODD.with_layer_offset(1))
    cache.close()
    for verb in (gather, scatter):
        with pytest.raises(ResourceClosed):
            verb(cache, [0], pages, [0])


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["mixed-gqa-mla", "gqa-draft", "gqa-fp16-few-heads", "dsa"])
def test_parts_carry_a_ranks_block_and_replicated_pages_are_shared(name: str, tp_size: int) -> None:
    layout = sample_layouts()[name]
    stored: dict[bytes, bytes] = {}
    for rank in range(tp_size):
        source = create_kv_cache(shard_layout(layout, rank, tp_size), 2)
        target = create_kv_cache(source.layout, 2)
        randomise(source, seed=rank)
        for part in parts(layout, rank, tp_size):
            pages = torch.zeros(1, part.layout.page_bytes, dtype=torch.uint8)
            gather(source, [1], pages, [0], layout=part.layout)
            scatter(target, [0], pages, [0], layout=part.layout)
            stored[part.fingerprint] = bytes(pages[0].tolist())
        assert block(target, 0) == block(source, 1)
    assert sum(map(len, stored.values())) == layout.page_bytes


# A new attention variant, defined here and nowhere else: a recurrent state beside keys that are divided on their last
# axis, and a plane of three bytes. No room of the house has to know it.
STATE = declare_role("test_state", 1000)
FLAGS = declare_role("test_flags", 1001)


def new_variant(num_layers: int) -> KVLayout:
    planes = [
        plane
        for layer in range(num_layers)
        for plane in (
            Plane(FLAGS, layer, (3,), DType.UINT8),
            Plane(STATE, layer, (2, 8, 5), DType.FP32, split=1),
            Plane(KEY, layer, (4, 16), DType.FP8_E5M2, split=1),
        )
    ]
    return KVLayout(4, tuple(planes))


class TestNewVariant(LayoutTests):
    @pytest.fixture
    def layout(self) -> KVLayout:
        return new_variant(num_layers=2)


def test_a_new_variant_goes_all_the_way() -> None:
    layout = combine(new_variant(num_layers=2), new_variant(num_layers=1).with_layer_offset(2))
    assert [plane.name for plane in layout.planes][:4] == ["key.0", "test_state.0", "test_flags.0", "key.1"]
    rng = random.Random(0)
    with create_kv_cache(layout, 16) as source, create_kv_cache(layout, 16) as target:
        source.tensors["test_state", 2].copy_(torch.randn(16, 2, 8, 5))
        source.tensors["test_flags", 0].copy_(torch.randint(0, 256, (16, 3)))
        source.tensors["key", 1].copy_(torch.randn(16, 4, 16).to(torch.float8_e5m2))
        with create_host_cache(layout, 16) as host:
            there, pages, back = (rng.sample(range(16), 10) for _ in range(3))
            gather(source, there, host.pages, pages)
            scatter(target, back, host.pages, pages)
        assert [block(target, index) for index in back] == [block(source, index) for index in there]
        assert any(any(block(target, index)) for index in back)


def test_rows_that_overlap_are_refused() -> None:
    layout = new_variant(num_layers=1)
    memory = torch.zeros(4 * layout.page_bytes, dtype=torch.uint8)
    with create_kv_cache(layout, 4) as cache:
        for pages in (
            memory.as_strided((3, layout.page_bytes), (layout.page_bytes // 2, 1)),
            memory[: layout.page_bytes].expand(3, layout.page_bytes),
        ):
            with pytest.raises(InvalidCopy, match="overlap"):
                gather(cache, [0, 1], pages, [0, 1])
