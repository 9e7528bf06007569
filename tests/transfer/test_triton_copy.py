"""The copy kernels: bit equal to the reference copy, digests equal to xxhash, nothing else touched."""

import importlib
import random
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from headwater.core.errors import InvalidConfig, InvalidCopy, InvalidLayout, NotInstalled, ResourceClosed
from headwater.integrations.vllm.registered import RegisteredCache
from headwater.layout.shard import parts, shard_layout
from headwater.layout.spec import KVLayout, opaque_layout
from headwater.testing import copy
from headwater.testing.layouts import randomise
from headwater.testing.samples import sample_layouts
from headwater.transfer.device import triton_copy
from headwater.transfer.device.arena import create_kv_cache
from headwater.transfer.device.triton_copy import PlaneTable
from triton_kit import DEVICE, INTERPRETED, digest, gather, needs_gpu, needs_kernels, scatter

pytestmark = needs_kernels
ODD = sample_layouts()["odd"]
GUARD = 0x5A


@dataclass(frozen=True)
class Case:
    """A copy of some planes of some blocks, and how the rows lie: bytes before, behind and between them."""

    layout: KVLayout
    num_blocks: int
    slots: list[int]
    planes: range
    before: int = 0
    behind: int = 0
    between: int = 0
    digests: bool = True
    programs: int | None = None

    @property
    def part(self) -> KVLayout:
        return KVLayout(self.layout.block_tokens, tuple(self.layout.planes[index] for index in self.planes))

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All of the memory, and the rows in it."""
        width = self.part.page_bytes + self.behind
        memory = torch.full((self.before + len(self.slots) * (width + self.between),), GUARD, dtype=torch.uint8)
        memory = memory.to(DEVICE)
        return memory, memory[self.before :].view(len(self.slots), width + self.between)[:, :width]


def everything(layout: KVLayout, count: int, **others: Any) -> Case:
    slots = random.Random(0).sample(range(count + 2), count)
    return Case(layout, count + 2, slots, range(len(layout.planes)), **others)


def pieces_digests(case: Case, rows: torch.Tensor) -> list[list[int]]:
    host, part = rows.cpu().numpy(), case.part
    places = list(zip(part.offsets, part.plane_bytes, strict=True))
    return [[xxh3_64_intdigest(row[at : at + length].tobytes()) for at, length in places] for row in host]


def check(case: Case) -> None:
    """Gather from one cache and scatter into another, and do the same with the reference."""
    with (
        create_kv_cache(case.layout, case.num_blocks, DEVICE) as source,
        create_kv_cache(case.layout, case.num_blocks, DEVICE) as target,
        create_kv_cache(case.layout, case.num_blocks, DEVICE) as expected,
    ):
        randomise(source, seed=1)
        for one in (target, expected):
            randomise(one, seed=2)
        ids, order = torch.tensor(case.slots, dtype=torch.int64, device=DEVICE), range(len(case.slots))
        (memory, rows), (wanted_memory, wanted) = case.rows(), case.rows()
        copy.gather(source, case.slots, wanted, order, layout=case.part)
        copy.scatter(expected, case.slots, wanted, order, layout=case.part)
        for kernel, cache in ((gather, source), (scatter, target)):
            found = torch.zeros(len(ids), len(case.planes), dtype=torch.int64, device=DEVICE) if case.digests else None
            kernel(PlaneTable(cache), ids, rows, planes=case.planes, digests=found, programs=case.programs)
            assert torch.equal(memory, wanted_memory)
            if found is not None:
                assert [[digest % 2**64 for digest in row] for row in found.tolist()] == pieces_digests(case, wanted)
        found = torch.zeros(len(ids), len(case.planes), dtype=torch.int64, device=DEVICE)
        digest(PlaneTable(target), ids, found, planes=case.planes, programs=case.programs)
        assert [[number % 2**64 for number in row] for row in found.tolist()] == pieces_digests(case, wanted)
        for rows_found, rows_wanted in zip(target.rows, expected.rows, strict=True):
            assert torch.equal(rows_found, rows_wanted)


@pytest.mark.parametrize(("size", "most"), [(5 * 1024 + 48, 1024), (3000, 1000), (4096, 4096)])
def test_planes_that_are_cut_out_of_one_run(size: int, most: int) -> None:
    """A block is one run of bytes, with others between: pieces of it are planes, whose blocks are a run apart."""
    flat = torch.randint(0, 256, (7, size), dtype=torch.uint8, device=DEVICE, generator=torch.Generator(DEVICE))
    before = flat.clone()
    cache = RegisteredCache({"all": flat}, num_blocks=7, block_tokens=4, plane_bytes=most)
    assert [row.shape[1] for row in cache.rows] == [most] * (size // most) + ([size % most] if size % most else [])
    slots = [5, 0, 3]
    ids = torch.tensor(slots, dtype=torch.int64, device=DEVICE)
    rows = torch.zeros(3, size, dtype=torch.uint8, device=DEVICE)
    digests = torch.zeros(3, len(cache.rows), dtype=torch.int64, device=DEVICE)
    planes = range(len(cache.rows))
    gather(PlaneTable(cache), ids, rows, planes=planes, digests=digests)
    assert torch.equal(rows, before[slots])
    for row, found in zip(rows.cpu().numpy(), digests.tolist(), strict=True):
        cuts = [row[at : at + most].tobytes() for at in range(0, size, most)]
        assert [digest % 2**64 for digest in found] == [xxh3_64_intdigest(cut) for cut in cuts]
    flat.zero_()
    scatter(PlaneTable(cache), ids, rows, planes=planes)
    assert torch.equal(flat[slots], before[slots])
    assert not flat[[1, 2, 4, 6]].any()


LENGTHS = st.one_of(
    st.integers(1, 300),
    st.integers(1, 160).map(lambda count: 16 * count),
    st.sampled_from([256, 1016, 1023, 1024, 1025, 1040, 2047, 2048, 2049, 3072, 4096, 4097, 5120, 6149]),
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    layout = draw(
        st.one_of(st.lists(LENGTHS, min_size=1, max_size=6).map(lambda sizes: opaque_layout(sizes, 1)), st.just(ODD))
    )
    num_blocks = draw(st.integers(1, 9))
    slots = draw(st.permutations(range(num_blocks)))[: draw(st.integers(0, num_blocks))]
    first = draw(st.integers(0, len(layout.planes)))
    planes = range(first, draw(st.integers(first, len(layout.planes))))
    if not planes:
        planes = range(len(layout.planes))
    shifts = st.sampled_from([0, 0, 0, 16, 8, 4, 2, 1, 17])
    before, behind, between = draw(shifts), draw(shifts), draw(shifts)
    return Case(
        layout,
        num_blocks,
        slots,
        planes,
        before,
        behind,
        between,
        draw(st.booleans()),
        draw(st.sampled_from([None, 1, 2])),
    )


@settings(max_examples=max(1, settings().max_examples // (4 if INTERPRETED else 1)))
@given(cases())
def test_any_bytes_any_ids_any_planes(case: Case) -> None:
    check(case)


def test_every_short_length(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setattr(triton_copy, "_WARPS", 256)  # costs by the program, not by what it does
    check(everything(opaque_layout(range(1, 257), 1), 1))


@pytest.mark.parametrize("unit", [1, 2, 4, 8, 16])
def test_whole_steps_at_every_alignment(unit: int) -> None:
    check(everything(opaque_layout([9 * 1024 + unit], 1), 16))


@pytest.mark.parametrize("digests", [True, False])
def test_lengths_that_differ_in_one_program(*, digests: bool) -> None:
    check(everything(opaque_layout([8192, 32, 16, 4096, 1024, 240, 256, 5136], 1), 4, digests=digests))


def test_more_work_than_programs() -> None:
    check(everything(opaque_layout([48, 16, 1040], 1), 24, programs=2))


@needs_gpu
@pytest.mark.parametrize("programs", [None, 3, 64])
@pytest.mark.parametrize("name", sample_layouts())
def test_every_sort_of_layout(name: str, programs: int | None) -> None:
    layout = sample_layouts()[name]
    check(everything(layout, 37, programs=programs))
    check(everything(layout, 37, programs=programs, digests=False))
    check(Case(layout, 40, list(range(3, 23)), range(1, len(layout.planes)), 16, 48, 16, programs=programs))


@needs_gpu
def test_a_launch_does_not_wait() -> None:
    with create_kv_cache(ODD, 4, DEVICE) as cache:
        randomise(cache, seed=1)
        table = PlaneTable(cache)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        rows = torch.zeros(4, ODD.page_bytes, dtype=torch.uint8, device=DEVICE)
        ids = torch.arange(4, device=DEVICE)
        planes = range(len(ODD.planes))
        gather(table, ids, rows, planes=planes)  # compiles
        rows.zero_()
        torch.cuda.synchronize()
        allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]  # cycles
            gather(table, ids, rows, planes=planes)
        assert not stream.query()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated
        stream.synchronize()
        assert torch.equal(rows, torch.cat(list(cache.rows), dim=1))


def test_a_part_of_a_sharded_block() -> None:
    layout = sample_layouts()["odd"]
    local = shard_layout(layout, 1, 3)
    part = next(part for part in parts(layout, 1, 3) if len(part.layout.planes) > 1)
    with create_kv_cache(local, 3, DEVICE) as cache:
        randomise(cache, seed=1)
        rows, wanted = (torch.zeros(2, part.layout.page_bytes, dtype=torch.uint8, device=DEVICE) for _ in range(2))
        table = PlaneTable(cache, part.layout)
        assert table.layout == part.layout
        gather(table, torch.tensor([2, 0], device=DEVICE), rows, planes=range(len(part.layout.planes)))
        copy.gather(cache, [2, 0], wanted, [0, 1], layout=part.layout)
        assert torch.equal(rows, wanted)


def test_spans() -> None:
    with create_kv_cache(opaque_layout([5, 7, 11], 1), 1, DEVICE) as cache:
        table = PlaneTable(cache)
        assert [table.span(planes) for planes in (range(3), range(1, 3), range(1, 2), range(2, 2), range(3, 3))] == [
            (0, 23),
            (5, 18),
            (5, 7),
            (12, 0),
            (23, 0),
        ]
        for planes in (range(4), range(-1, 2), range(0, 3, 2), range(2, 1)):
            with pytest.raises(InvalidCopy, match="not a run of planes; there are 3"):
                table.span(planes)


def zeros(*shape: int, dtype: torch.dtype = torch.uint8, device: str = DEVICE) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


@pytest.mark.parametrize("kernel", [gather, scatter])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"slots": zeros(2, dtype=torch.int32)}, "2 rows need as many int64 slots, not torch.int32"),
        ({"slots": zeros(3, dtype=torch.int64)}, "2 rows need as many"),
        ({"slots": zeros(2, 1, dtype=torch.int64)}, "2 rows need as many"),
        ({"slots": zeros(4, dtype=torch.int64)[::2]}, "2 rows need as many"),
        ({"rows": zeros(2, 600, dtype=torch.int8)}, "uint8 rows"),
        ({"rows": zeros(2 * 588)}, "uint8 rows"),
        ({"rows": zeros(2, 587)}, "588 bytes at offset 0 does not fit rows of 587"),
        ({"rows": zeros(1, 588).expand(2, 588)}, "overlap"),
        ({"rows": zeros(600, 2).t()}, "overlap"),
        ({"slots": zeros(1, dtype=torch.int64), "rows": zeros(600, 2).t()[:1]}, "contiguous bytes"),
        ({"rows": zeros(2, 588, device="meta")}, "cannot go with planes on"),
        ({"digests": zeros(2, 8)}, "digests must be int64 of shape"),
        ({"digests": zeros(2, 7, dtype=torch.int64)}, "digests must be int64 of shape"),
        ({"digests": zeros(8, 2, dtype=torch.int64).t()}, "digests must be int64 of shape"),
        ({"digests": zeros(2, 8, dtype=torch.int64, device="meta")}, "cannot go with planes on"),
        ({"planes": range(9)}, "not a run of planes"),
        ({"programs": 0}, "at least one program"),
    ],
)
def test_what_does_not_fit_is_refused(kernel: Any, arguments: dict[str, Any], message: str) -> None:
    with create_kv_cache(ODD, 3, DEVICE) as cache:
        given_arguments = {"slots": zeros(2, dtype=torch.int64), "rows": zeros(2, 588), "planes": range(8), **arguments}
        with pytest.raises(InvalidCopy, match=message):
            kernel(PlaneTable(cache), **given_arguments)


def test_tables_of_what_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = create_kv_cache(ODD, 3, DEVICE)
    with pytest.raises(InvalidLayout, match=r"no plane key\.2"):
        PlaneTable(cache, ODD.with_layer_offset(1))
    with pytest.raises(InvalidCopy, match="the cache's plane is"):
        PlaneTable(cache, opaque_layout([105], 7))
    with pytest.raises(InvalidConfig, match="the cache is on meta"):
        PlaneTable(create_kv_cache(ODD, 3, "meta"))
    with monkeypatch.context() as patched:
        patched.setattr(triton_copy, "_MAX_PLANE_BYTES", 104)
        with pytest.raises(InvalidCopy, match="a plane has 105 bytes"):
            PlaneTable(cache)
    table = PlaneTable(cache)
    cache.close()
    with pytest.raises(ResourceClosed):
        PlaneTable(cache)
    for kernel in (gather, scatter):
        with pytest.raises(ResourceClosed):
            kernel(table, zeros(2, dtype=torch.int64), zeros(2, 588), planes=range(8))


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("triton_copy", "copy_kernels", "xxh3"):
        monkeypatch.delitem(sys.modules, f"headwater.transfer.device.{name}")
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(NotInstalled, match=r"the copy kernels need triton: pip install 'headwater\[cuda\]'"):
        importlib.import_module("headwater.transfer.device.triton_copy")
