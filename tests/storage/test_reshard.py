"""A cache written at one tensor-parallel size is read at another, byte for byte; what is not proven is a miss."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headwater.build import open_local
from headwater.config.stores import LocalStoreConfig
from headwater.core.errors import InvalidInput, InvalidLayout, ResourceClosed
from headwater.core.page import PageName, page_name
from headwater.core.results import Status
from headwater.layout.frame import PageMeta, frame_bytes, header_bytes, parse, seal
from headwater.layout.reshard import Plan, copy_strips, divides, part_number, plan, plans
from headwater.layout.shard import Part, Shard, parts
from headwater.layout.spec import DType, KVLayout, Plane, declare_role
from headwater.metrics import Metrics
from headwater.storage.base import Store
from headwater.storage.memory import MemoryStore
from headwater.storage.resharded import ReshardedStore
from headwater.storage.verified import VerifiedStore
from headwater.testing.clock import FakeClock
from headwater.testing.faulty_stores import Faults, FaultyStore
from headwater.testing.pages import IDENTITY
from headwater.testing.samples import sample_layouts
from headwater.testing.stores import past, soon
from machines.ranks import cut, whole_block
from rank_kit import LAYOUTS, Group, groups
from worker_kit import OddStore, key

SIZES = (1, 2, 4, 8)
ROLES = [declare_role(f"reshard_{i}", 3000 + i) for i in range(3)]
VIEW = {"view": "host"}


@pytest.fixture
def make() -> Iterator[Callable[..., Group]]:
    yield from groups()


def assembled(layout: KVLayout, one: Plan, own: Part, block: bytes) -> bytes:
    """A page of the reader's, put together by a plan from pages of the writer's."""
    target = bytearray(b"\xee" * own.layout.page_bytes)
    for source in one.sources:
        copy_strips(memoryview(cut(layout, source.part, block)), memoryview(target), source.strips)
    return bytes(target)


# --- arithmetic -------------------------------------------------------------------------------------------------------


@st.composite
def divided_layouts(draw: st.DrawFn) -> tuple[KVLayout, int, int]:
    """Planes of any shape, cut at any axis or at none, and two sizes that both can have."""
    sizes = st.sampled_from([1, 2, 3, 4, 6, 8])
    writer, reader = draw(sizes), draw(sizes)
    planes = []
    for i in range(draw(st.integers(1, 3))):
        shape = draw(st.lists(st.sampled_from([1, 2, 3, 4, 8, 12]), min_size=1, max_size=3))
        split = draw(st.none() | st.integers(0, len(shape) - 1))
        planes.append(Plane(ROLES[i], draw(st.integers(0, 1)), tuple(shape), draw(st.sampled_from(DType)), split))
    layout = KVLayout(4, tuple(planes))
    assume(divides(layout, writer) and divides(layout, reader))
    return layout, writer, reader


@given(divided_layouts(), st.binary(min_size=8, max_size=8))
@settings(max_examples=150)
def test_any_size_is_put_together_from_any_other(case: tuple[KVLayout, int, int], seed: bytes) -> None:
    layout, writer, reader = case
    block = whole_block(layout, seed)
    for rank in range(reader):
        for own in parts(layout, rank, reader):
            one = plan(layout, own, writer)
            assert assembled(layout, one, own, block) == cut(layout, own, block)
            covered = [0] * own.layout.page_bytes
            for source in one.sources:
                for strip in source.strips:
                    for row in range(strip.num_rows):
                        start = strip.target + row * strip.target_stride
                        for at in range(start, start + strip.length):
                            covered[at] += 1
            assert set(covered) == {1}


def test_only_the_pages_that_overlap_are_read() -> None:
    layout = LAYOUTS["gqa"]

    def read(rank: int, reader: int, writer: int) -> list[Shard]:
        (own,) = parts(layout, rank, reader)
        return [source.part.shard for source in plan(layout, own, writer).sources]

    assert read(0, 1, 4) == [Shard(index, 4) for index in range(4)]
    assert read(1, 2, 4) == [Shard(2, 4), Shard(3, 4)]
    assert read(3, 4, 2) == [Shard(1, 2)]
    assert read(2, 4, 1) == [Shard(0, 1)]
    assert read(5, 8, 8) == [Shard(5, 8)]
    (half,) = parts(layout, 1, 2)
    (source,) = plan(layout, half, 1).sources
    assert sum(strip.num_rows * strip.length for strip in source.strips) == layout.page_bytes // 2


def test_plans_leave_out_what_cannot_be_and_what_is_the_same() -> None:
    few = LAYOUTS["few heads"]
    (own,) = parts(few, 0, 1)
    assert [one.tp_size for one in plans(few, own, (1, 2, 3, 4, 8))] == [1, 2]  # 4 and 8 ranks share two shards
    mixed = LAYOUTS["mixed"]
    latent, heads = parts(mixed, 0, 2)
    assert [one.tp_size for one in plans(mixed, latent, (1, 4, 8))] == [1, 4]  # replicated is as it is
    assert plan(mixed, latent, 4).sources[0].part == latent
    assert [one.tp_size for one in plans(mixed, heads, (1, 4, 8))] == [1, 4, 8]
    with pytest.raises(InvalidLayout):
        plan(LAYOUTS["gqa"], heads, 3)
    with pytest.raises(InvalidLayout):
        plan(LAYOUTS["mla"], heads, 2)
    with pytest.raises(InvalidLayout, match="not a part"):
        plan(mixed, Part(Shard(0, 8), heads.layout), 2)


def test_what_needs_no_telling_apart_is_part_0() -> None:
    for layout in LAYOUTS.values():
        (whole,) = parts(layout, 0, 1)
        assert part_number(whole, layout) == 0
    assert part_number(parts(LAYOUTS["mla"], 3, 4)[0], LAYOUTS["mla"]) == 0  # the same page at every size
    latent, heads = parts(LAYOUTS["mixed"], 0, 2)
    assert part_number(latent, LAYOUTS["mixed"]) == latent.tag != 0
    assert part_number(heads, LAYOUTS["mixed"]) == heads.tag


# --- through workers and stores ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_size_reads_what_every_other_wrote(name: str, make: Callable[..., Group]) -> None:
    sizes = {"mla": (1, 4), "dsa": (1, 4), "mixed": (1, 2, 4)}.get(name, SIZES)  # replicated: all sizes are alike
    for writer in sizes:
        with MemoryStore(64 << 20) as store:
            wrote = make(name, writer, {"host": store})
            wrote.saved([3, 1, 2, 0])
            for reader in sizes:
                read = make(name, reader, {"host": store}, views=VIEW)
                tier = "host" if reader == writer else "view"
                assert read.ear.results(read.probe(5, store=tier)) == ["held"] * 4 + ["absent"]
                read.loaded([5, 6, 7, 8], store=tier)
                assert read.ranks.close(30)
            assert wrote.ranks.close(30)


@pytest.mark.parametrize("name", ["gqa-bf16", "gqa-fp8-scales", "mixed-gqa-mla", "dsa"])
def test_tp_4_written_tp_2_and_1_read_from_a_local_store(name: str, place: Path, make: Callable[..., Group]) -> None:
    layout = sample_layouts()[name]
    with open_local(LocalStoreConfig(directory=place / "store", limit_bytes=32 << 20)) as store:
        wrote = make(layout, 4, {"host": store}, num_slots=3)
        wrote.saved([2, 0, 1])
        assert wrote.ranks.close(30)
        for reader in (2, 1, 8):
            if not divides(layout, reader):
                continue
            read = make(layout, reader, {"host": store}, views=VIEW, num_slots=3)
            read.loaded([1, 2, 0], store="view")
            assert read.ranks.close(30)


def test_what_was_read_at_another_size_is_promoted_at_the_own(make: Callable[..., Group]) -> None:
    with MemoryStore(64 << 20) as pool, MemoryStore(64 << 20) as host:
        make("mixed", 4, {"pool": pool}).saved([0, 1, 2], store="pool")
        read = make("mixed", 2, {"host": host, "pool": pool}, views={"view": "pool"})
        assert read.ear.results(read.promote(3, "host", store="view")) == ["stored"] * 3
        read.loaded([4, 5, 6], store="host")
        assert read.ear.results(read.save([4, 5, 6], store="pool")) == ["stored"] * 3  # at this size it was not there


# --- the view itself --------------------------------------------------------------------------------------------------


class Bench:
    """A store that a group of one size wrote a chain to, and the view of one part of another size's rank."""

    def __init__(
        self,
        name: str = "mixed",
        writer: int = 4,
        reader: int = 2,
        *,
        rank: int = 1,
        at: int = -1,
        num_blocks: int = 4,
        clock: FakeClock | None = None,
    ) -> None:
        self.layout = LAYOUTS[name]
        self.store = OddStore(MemoryStore(64 << 20))
        self.clock = clock or FakeClock()
        self.metrics = Metrics()
        self.part = parts(self.layout, rank, reader)[at]
        others = [size for size in SIZES if size != reader]
        self.view = ReshardedStore(
            self.store, self.layout, self.part, identity=IDENTITY, sizes=others, metrics=self.metrics, clock=self.clock
        )
        self.verified = VerifiedStore(
            self.view, identity=IDENTITY, plane_bytes=self.part.layout.plane_bytes, clock=self.clock
        )
        self.sources = plan(self.layout, self.part, writer).sources
        for rank_there in range(writer):
            self.write(range(num_blocks), writer, rank_there)
        self.store.asked.clear()

    def meta(self, depth: int, part: Part, **changes: Any) -> PageMeta:
        meta = PageMeta(
            key=key(1, depth),
            identity=IDENTITY,
            parent=key(1, depth - 1),
            depth=depth,
            valid_tokens=self.layout.block_tokens,
            shard_index=part.shard.index,
            shard_count=part.shard.count,
            part=part_number(part, self.layout),
        )
        return replace(meta, **changes)

    def frame(self, depth: int, part: Part, **changes: Any) -> tuple[PageName, memoryview]:
        meta = self.meta(depth, part, **changes)
        frame = memoryview(bytearray(frame_bytes(part.layout.plane_bytes)))
        frame[header_bytes(len(part.layout.planes)) :] = cut(self.layout, part, whole_block(self.layout, key(1, depth)))
        seal(frame, meta, part.layout, now_ms=int(self.clock.time() * 1000))
        return meta.name, frame

    def write(self, depths: Sequence[int], tp_size: int, rank: int, **changes: Any) -> None:
        for part in parts(self.layout, rank, tp_size):
            status = self.store.put([self.frame(depth, part, **changes) for depth in depths], deadline=soon())
            assert all(one.held for one in status)

    def names(self, num_blocks: int, start: int = 0) -> list[PageName]:
        return [self.meta(depth, self.part).name for depth in range(start, start + num_blocks)]

    def source(self, depth: int, at: int = 0) -> PageName:
        shard = self.sources[at].part.shard
        return page_name(key(1, depth), shard.index, shard.count, part=self.sources[at].number)

    def read(self, num_blocks: int = 4, store: Store | None = None) -> list[Status]:
        """Read blocks; what is a HIT must be the right bytes."""
        size = frame_bytes(self.part.layout.plane_bytes)
        pages = [(name, memoryview(bytearray(b"\xee" * size))) for name in self.names(num_blocks)]
        results = (store or self.verified).get_into(pages, deadline=soon())
        start = header_bytes(len(self.part.layout.planes))
        for depth, ((_, frame), status) in enumerate(zip(pages, results, strict=True)):
            if status is Status.HIT:
                right = cut(self.layout, self.part, whole_block(self.layout, key(1, depth)))
                assert bytes(frame[start:]) == right, "wrong bytes were served"
        return results

    def spoil(self, name: PageName, change: Callable[[bytearray], None]) -> None:
        """Change a page where it lies."""
        inner = self.store.store
        assert isinstance(inner, MemoryStore)
        entry = inner._entries[name]
        frame = bytearray(entry.frame)
        change(frame)
        entry.frame = bytes(frame)


HIT, MISS = Status.HIT, Status.MISS


def test_what_comes_out_is_a_page_like_any_other() -> None:
    bench = Bench(clock=FakeClock())
    assert bench.read(5) == [HIT] * 4 + [MISS]
    (name,) = bench.names(1, start=2)
    buffer = memoryview(bytearray(frame_bytes(bench.part.layout.plane_bytes)))
    assert bench.view.get_into([(name, buffer)], deadline=soon()) == [HIT]
    header = parse(buffer)
    assert not isinstance(header, str)
    assert header.meta == bench.meta(2, bench.part)
    with MemoryStore(1 << 20) as other:  # which a store that looks at frames takes
        frames = [memoryview(bytearray(buffer.nbytes)) for _ in range(3)]
        bench.view.get_into(list(zip(bench.names(3), frames, strict=True)), deadline=soon())
        assert other.put(list(zip(bench.names(3), frames, strict=True)), deadline=soon()) == [Status.STORED] * 3


def test_finding_the_size_costs_one_call_more_and_then_none() -> None:
    bench = Bench("gqa", 4, 2)
    assert bench.view.contains(bench.names(6), deadline=soon()) == [True] * 4 + [False] * 2
    assert bench.store.calls() == ["contains"] * 2
    first, rest = (names for _, names in bench.store.asked)
    assert len(first) == 1 + 2 + 4  # of the first block: one page, two of four, four of eight
    assert len(rest) == 5 * 2  # of the others, those of the size that was found
    bench.store.asked.clear()
    assert bench.read() == [HIT] * 4
    assert bench.store.calls() == ["get_into"]
    assert len(bench.store.asked[0][1]) == 4 * 2
    fresh = Bench("gqa", 8, 2)
    assert fresh.read() == [HIT] * 4
    assert fresh.store.calls() == ["get_into", "contains", "get_into"]  # a try in vain, and it is known
    assert fresh.read() == [HIT] * 4
    assert fresh.store.calls() == ["get_into", "contains", "get_into", "get_into"]
    nothing = Bench("gqa", 4, 2, num_blocks=0)
    assert nothing.view.contains(nothing.names(100), deadline=soon()) == [False] * 100
    assert nothing.store.calls() == ["contains"]


def test_blocks_of_several_sizes_in_one_row() -> None:
    bench = Bench("gqa", 4, 2, num_blocks=2)
    inner = bench.store.store
    assert isinstance(inner, MemoryStore)
    with MemoryStore(1 << 20) as elsewhere:  # a store that does not know parents would keep these alone
        for depth in (2, 3):
            bench.store.store = elsewhere
            bench.write(range(depth + 1), 1, 0)
        (whole,) = parts(bench.layout, 0, 1)
        for depth in (2, 3):
            name, frame = bench.frame(depth, whole)
            inner._entries[name] = elsewhere._entries[name]
            assert frame
        bench.store.store = inner
        assert bench.read() == [HIT] * 4
        assert bench.view.contains(bench.names(4), deadline=soon()) == [True, True, False, False]  # a hint, and safe
        inner._entries.clear()


def test_one_page_missing_is_a_miss() -> None:
    for at in (0, 1):
        bench = Bench()
        bench.store.delete([bench.source(2, at)], deadline=soon())  # and what builds on it
        assert bench.view.contains(bench.names(4), deadline=soon()) == [True, True, False, False]
        assert bench.read() == [HIT, HIT, MISS, MISS]


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("where", ["magic", "key", "digest", "payload", "end"])
def test_a_damaged_page_is_a_miss_and_is_thrown_out(where: str, at: int) -> None:
    bench = Bench()
    offset = {"magic": 0, "key": 40, "digest": 200, "payload": 4096, "end": -1}[where]

    def flip(frame: bytearray) -> None:
        frame[offset] ^= 0x10

    bad = bench.source(1, at)
    bench.spoil(bad, flip)
    assert bench.read() == [HIT, Status.CORRUPT, HIT, HIT]
    assert bench.store.contains([bad], deadline=soon()) == [False]
    (event,) = bench.metrics.events("bad_source_page")
    assert event.facts["name"] == bad.hex()
    assert bench.verified.metrics.value("bad_pages_total") == 1
    assert bench.read()[:2] == [HIT, MISS]


def test_pages_swapped_between_blocks_or_shards_are_misses() -> None:
    for other in ((2, 0), (1, 1)):  # another block's page of the same shard; the same block's of another shard
        bench = Bench()
        inner = bench.store.store
        assert isinstance(inner, MemoryStore)
        first, second = inner._entries[bench.source(1, 0)], inner._entries[bench.source(*other)]
        first.frame, second.frame = second.frame, first.frame
        assert Status.FOREIGN in (results := bench.read())
        assert results[0] is HIT
        assert results[1] is not HIT


def test_pages_of_another_identity_are_misses() -> None:
    bench = Bench(num_blocks=0)
    for rank in range(4):
        bench.write([0], 4, rank, identity=bytes(32))
    assert bench.read(1) == [Status.FOREIGN]


def test_pages_that_contradict_each_other_are_thrown_out() -> None:
    bench = Bench(num_blocks=1)
    changed = bench.sources[0].part
    bench.store.delete([bench.source(0, 0)], deadline=soon())
    bench.store.put([bench.frame(0, changed, tenant=b"another tenant's")], deadline=soon())
    assert bench.read(1) == [Status.FOREIGN]
    held = bench.store.contains([bench.source(0, at) for at in range(len(bench.sources))], deadline=soon())
    assert held == [False] * len(bench.sources)


@given(st.integers(0, 10_000), st.sampled_from([(4, 2), (4, 1), (2, 4), (1, 8), (8, 2)]))
@settings(max_examples=60)
def test_whatever_goes_wrong_no_wrong_byte_comes_out(seed: int, sizes: tuple[int, int]) -> None:
    bench = Bench("three sorts", *sizes, rank=0)
    faults = Faults(get_fails=0.05, get_misses=0.05, flips_byte=0.1, cuts_tail=0.1, swaps_page=0.2, contains_lies=0.2)
    faulty = FaultyStore(bench.store, faults, seed=seed)
    others = [size for size in SIZES if size != sizes[1]]
    view = ReshardedStore(faulty, bench.layout, bench.part, identity=IDENTITY, sizes=others)
    reader = VerifiedStore(view, identity=IDENTITY, plane_bytes=bench.part.layout.plane_bytes)
    for _ in range(4):
        view.contains(bench.names(4), deadline=soon())
        bench.read(store=reader)  # which compares every HIT


def test_a_tier_that_gives_nothing_but_bad_pages_is_switched_off() -> None:
    bench = Bench("gqa", 4, 2, num_blocks=70)

    def flip(frame: bytearray) -> None:
        frame[-1] ^= 1

    for depth in range(70):
        bench.spoil(bench.source(depth), flip)
    assert bench.read(70).count(Status.CORRUPT) >= 64
    assert bench.verified.switched_off
    bench.verified.switch_on()
    assert bench.read(1) == [MISS]
    bench.write([0], 4, 2)
    assert bench.read(1) == [HIT]  # nothing inside the view stays off by itself


def test_a_partial_tail_and_the_earliest_expiry() -> None:
    clock = FakeClock()
    bench = Bench("fp8 with scales", 4, 2, num_blocks=0, clock=clock)
    now_ms = int(clock.time() * 1000)
    for rank in range(4):
        bench.write([0], 4, rank, valid_tokens=3, expires_at_ms=now_ms + 1000 * (1 + rank))
    (name,) = bench.names(1)
    buffer = memoryview(bytearray(frame_bytes(bench.part.layout.plane_bytes)))
    assert bench.verified.get_into([(name, buffer)], deadline=soon()) == [HIT]
    header = parse(buffer)
    assert not isinstance(header, str)
    assert header.meta.valid_tokens == 3
    assert header.meta.expires_at_ms == now_ms + 3000  # rank 1 of 2 reads what ranks 2 and 3 of 4 wrote
    clock.advance(3.5)
    assert bench.verified.get_into([(name, buffer)], deadline=soon()) == [Status.STALE]


def test_a_view_is_only_read() -> None:
    bench = Bench()
    (name,) = bench.names(1)
    assert bench.view.put([bench.frame(0, bench.part)], deadline=soon()) == [Status.REFUSED]
    assert bench.view.delete([name], deadline=soon()) == [Status.ABSENT]
    assert bench.read(1) == [HIT]
    stranger = page_name(key(1, 0), 0, 2, part=9)
    buffer = memoryview(bytearray(frame_bytes(bench.part.layout.plane_bytes)))
    assert bench.view.contains([stranger, name], deadline=soon()) == [False, True]
    assert bench.view.get_into([(stranger, buffer)], deadline=soon()) == [MISS]
    with pytest.raises(InvalidInput):
        bench.view.get_into([(name, buffer[1:])], deadline=soon())
    assert bench.view.contains([], deadline=soon()) == []
    assert bench.view.get_into([], deadline=soon()) == []
    assert bench.view.get_into([(name, buffer)], deadline=past()) == [Status.LATE]
    assert bench.view.contains([name], deadline=past()) == [False]
    bench.view.close()
    with pytest.raises(ResourceClosed):
        bench.view.contains([name], deadline=soon())
    assert bench.store.contains([bench.source(0)], deadline=soon()) == [True]  # which stays open


def test_a_long_row_goes_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench("gqa", 4, 2, num_blocks=7)
    monkeypatch.setattr(
        "headwater.storage.resharded._SCRATCH_BYTES", 3 * 2 * frame_bytes(bench.sources[0].part.layout.plane_bytes)
    )
    bench.view.contains(bench.names(7), deadline=soon())
    bench.store.asked.clear()
    assert bench.read(7) == [HIT] * 7
    assert [len(names) for _, names in bench.store.asked] == [6, 6, 2]


def test_random_damage_over_workers(make: Callable[..., Group]) -> None:
    """Flip bytes of stored pages at random; a load at another size gives a right prefix, never a wrong block."""
    rng = random.Random(5)
    for round_ in range(15):
        store = MemoryStore(64 << 20)
        make("three sorts", 4, {"host": store}).saved(list(range(6)))
        for name in rng.sample(store.names(), rng.randrange(1, 4)):
            frame = bytearray(store._entries[name].frame)
            frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
            store._entries[name].frame = bytes(frame)
        read = make("three sorts", 2 if round_ % 2 else 1, {"host": store}, views=VIEW)
        results = read.ear.results(read.load(list(range(6)), store="view"))
        num_hit = next((i for i, result in enumerate(results) if result != "hit"), 6)
        assert "hit" not in results[num_hit:]
        assert all(read.holds(list(range(num_hit))))
