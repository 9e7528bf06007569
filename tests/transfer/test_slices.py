"""Sliced writes and reads: what is counted is there, in a row, whatever the store, the clock or the device does."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.config.writes import WriteConfig
from headwater.core.errors import InvalidInput
from headwater.core.page import PageName
from headwater.core.results import Reason, Status
from headwater.lab.campaigns.hanging import HangingStore
from headwater.layout.frame import header_bytes
from headwater.metrics import Metrics
from headwater.storage.base import SYSTEM_CLOCK, Clock, Deadline, Store
from headwater.storage.memory import MemoryStore
from headwater.testing.clock import FakeClock
from headwater.testing.device import BytesStaging
from headwater.testing.pages import IDENTITY
from headwater.transfer.executor.caller import Caller
from headwater.transfer.executor.rows import Rows
from headwater.transfer.executor.sliced import Reached
from headwater.transfer.executor.tier import Naming
from headwater.transfer.executor.worker import Worker
from worker_kit import LAYOUT, PATIENCE_S, TENANT, key, keys, wait_until

SLACK_S = 0.5
HUNG = "a store's call did not return in time"
START = header_bytes(len(LAYOUT.planes))
NAMING = Naming(identity=IDENTITY, layout=LAYOUT)
AT = {NAMING.name(key(1, depth)): depth for depth in range(64)}  # which block of the row a page is


class Scripted(Store):
    """A dict of frames that knows no parents, on a clock of its own. Does with each put or get what its script says.

    A script is by number of the call: seconds it takes per page, and what happens at which page of it.
    """

    def __init__(self, clock: FakeClock, script: Sequence[tuple[float, str, int]] = ()) -> None:
        self.clock = clock
        self.script = list(script)
        self.frames: dict[PageName, bytes] = {}
        self.calls: list[list[int]] = []  # the blocks of each
        self.left_s: list[float] = []  # what each had
        self.over_s: list[float] = []

    def _page(self, number: int, at: int, deadline: Deadline) -> str:
        seconds, what, where = self.script[number] if number < len(self.script) else (0.0, "ok", 0)
        self.clock.advance(min(seconds, deadline.remaining_s) if what != "blocks" else seconds)
        if what == "raises" and at == where:
            raise ConnectionError(f"at page {at}")
        if what != "blocks" and deadline.expired:
            return "late"
        return "fails" if what == "fails" and at == where else "ok"

    def put(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[Status]:
        number = self._begin(pages, deadline)
        results = []
        for at, (name, frame) in enumerate(pages):
            done = self._page(number, at, deadline)
            if done == "ok":
                results.append(Status.EXISTS if name in self.frames else Status.STORED)
                self.frames.setdefault(name, bytes(frame))
            else:
                results.append(Status.LATE if done == "late" else Status.NO_ROOM)
        self.over_s.append(self.clock.monotonic())
        return results

    def get_into(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[Status]:
        number = self._begin(pages, deadline)
        results = []
        for at, (name, buffer) in enumerate(pages):
            done = self._page(number, at, deadline)
            if done == "ok" and name in self.frames:
                buffer[:] = self.frames[name]
            results.append(
                {"late": Status.LATE, "fails": Status.FAILED}.get(done)
                or (Status.HIT if name in self.frames else Status.MISS)
            )
        return results

    def _begin(self, pages: Sequence[tuple[PageName, memoryview]], deadline: Deadline) -> int:
        self.calls.append([AT[name] for name, _ in pages])
        self.left_s.append(deadline.remaining_s)
        return len(self.calls) - 1

    def contains(self, names: Sequence[PageName], *, deadline: Deadline) -> list[bool]:
        return [name in self.frames for name in names]

    def delete(self, names: Sequence[PageName], *, deadline: Deadline) -> list[Status]:
        return [Status.REMOVED if self.frames.pop(name, None) else Status.ABSENT for name in names]

    def blocks(self) -> list[int]:
        return sorted(AT[name] for name in self.frames)

    def close(self) -> None:
        pass


class Rig:
    """Rows through an executor between a device in numpy and a store."""

    def __init__(
        self,
        store: Store,
        *,
        num_pages: int = 64,
        num_slots: int = 64,
        clock: Clock = SYSTEM_CLOCK,
        breaker: dict[str, Any] | None = None,
        piece_blocks: int | None = None,
        **config: Any,
    ) -> None:
        self.store = store
        self.metrics = Metrics()
        self.staging = BytesStaging(LAYOUT, num_slots=num_slots, num_pages=num_pages, seed=3)
        self.original = self.staging.device.copy()
        self.worker = Worker(
            {"pool": store},
            self.staging,
            layout=LAYOUT,
            identity=IDENTITY,
            block_tokens=LAYOUT.block_tokens,
            threads_per_store=4,
            max_extra_threads=4,
            slice_pages=piece_blocks or max(1, num_pages // 4),
            overlaps=True,
            clock=clock,
            metrics=self.metrics,
        )
        fuse = {"breaker_failures": 1000, **(breaker or {})}
        caller = Caller(self.worker, ["pool"], identity=IDENTITY, clock=clock, metrics=self.metrics, **fuse)
        self.worker.deliver = caller.deliver
        self.slices = Rows(caller, "pool", config=WriteConfig(**config))

    def write(self, num_blocks: int, start: int = 0, **options: Any) -> Reached:
        """Write blocks from the slots of the same numbers."""
        row = list(range(start, start + num_blocks))
        return self.slices.write(
            keys(1, num_blocks, start), row, parent=key(1, start - 1), depth=start, tenant=TENANT, **options
        )

    def read(self, num_blocks: int, start: int = 0, **options: Any) -> Reached:
        """Read blocks into the slots 32 further on."""
        row = list(range(32 + start, 32 + start + num_blocks))
        return self.slices.read(keys(1, num_blocks, start), row, depth=start, **options)

    def arrived(self, num_blocks: int, start: int = 0) -> bool:
        """Whether exactly these blocks are where they are read to, and all other slots are as they were."""
        expected = self.original.copy()
        expected[32 + start : 32 + start + num_blocks] = self.original[start : start + num_blocks]
        return bool((self.staging.device == expected).all())

    def __enter__(self) -> "Rig":
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def finish(self) -> None:
        if isinstance(self.store, HangingStore):
            self.store.release()
            assert self.store.spoiled == []
        assert self.worker.close(PATIENCE_S)
        assert self.worker.num_held_pages == 0, "pages were not given back"
        self.store.close()


@pytest.fixture
def rig() -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(store: Store, **options: Any) -> Rig:
        made.append(Rig(store, **options))
        return made[-1]

    yield make
    for one in made:
        one.finish()


# --- the table of sliced writes ---------------------------------------------------------------------------------------

FAST: tuple[float, str, int] = (0.0, "ok", 0)


@pytest.mark.parametrize(
    ("num_blocks", "start", "script", "reached", "why", "puts"),
    [
        pytest.param(6, 0, [], 6, Reason.WHOLE, [[0, 1, 2], [3, 4, 5]], id="exact slices"),
        pytest.param(8, 0, [], 8, Reason.WHOLE, [[0, 1, 2], [3, 4, 5], [6, 7]], id="odd tail"),
        pytest.param(2, 0, [], 2, Reason.WHOLE, [[0, 1]], id="less than a slice"),
        pytest.param(0, 0, [], 0, Reason.WHOLE, [], id="empty list"),
        pytest.param(5, 4, [], 5, Reason.WHOLE, [[4, 5, 6], [7, 8]], id="start offset"),
        pytest.param(
            9, 0, [FAST, (0.0, "fails", 1)], 4, Reason.INCOMPLETE, [[0, 1, 2], [3, 4, 5]], id="incomplete slice"
        ),
        pytest.param(9, 2, [(0.0, "fails", 0)], 0, Reason.INCOMPLETE, [[2, 3, 4]], id="nothing of the first"),
        pytest.param(9, 0, [FAST, (2.0, "ok", 0)], 4, Reason.SLICE_TIMEOUT, [[0, 1, 2], [3, 4, 5]], id="slice timeout"),
        pytest.param(
            9, 0, [(1.2, "ok", 0)] * 3, 8, Reason.TOTAL_TIMEOUT, [[0, 1, 2], [3, 4, 5], [6, 7, 8]], id="total timeout"
        ),
        pytest.param(
            9, 0, [FAST, (0.0, "raises", 2)], 3, Reason.FAILED, [[0, 1, 2], [3, 4, 5]], id="exception in slice 1"
        ),
        pytest.param(
            9, 0, [(99.0, "blocks", 0)], 0, Reason.TOTAL_TIMEOUT, [[0, 1, 2]], id="a store that keeps no time"
        ),
    ],
)
def test_sliced_writes(
    rig: Callable[..., Rig],
    num_blocks: int,
    start: int,
    script: list[tuple[float, str, int]],
    reached: int,
    why: Reason,
    puts: list[list[int]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = FakeClock()
    store = Scripted(clock, script)
    one = rig(store, clock=clock, slice_blocks=3, slice_timeout_s=4.0, total_timeout_s=10.0)
    with caplog.at_level(logging.DEBUG):
        found = one.write(num_blocks, start)
    assert (found.num_blocks, found.why) == (reached, why)
    assert store.calls == puts
    records = [record for record in caplog.records if record.name == "headwater"]
    assert [record.levelname for record in records] == ["DEBUG" if why is Reason.WHOLE else "WARNING"]
    assert records[0].message.startswith(
        f"write of {num_blocks} blocks from block {start} on, store pool: {reached} done, {why.value}"
    )
    assert one.metrics.value("sliced_total", tier="pool", call="write", why=why.value) == 1
    for depth in range(start, start + reached):
        frame = store.frames[NAMING.name(key(1, depth))]
        assert frame[START:] == bytes(one.original[depth])
    assert one.metrics.value("moved_bytes_total", direction="in") == reached * NAMING.frame_bytes


def test_a_slice_has_its_own_time_or_what_is_left_of_the_total(rig: Callable[..., Rig]) -> None:
    clock = FakeClock()
    store = Scripted(clock, [(1.0, "ok", 0)] * 4)
    one = rig(store, clock=clock, slice_blocks=3, slice_timeout_s=4.0, total_timeout_s=9.5)
    assert one.write(12).num_blocks == 9
    assert store.left_s == [4.0, 4.0, 3.5, 0.5]
    assert store.blocks() == list(range(9))


def test_a_timeout_of_the_call_is_the_total(rig: Callable[..., Rig]) -> None:
    clock = FakeClock()
    one = rig(Scripted(clock, [(1.0, "ok", 0)] * 9), clock=clock, slice_blocks=1)
    assert one.write(9, timeout_s=2.5) == Reached(2, Reason.TOTAL_TIMEOUT, "block 2: late")
    for timeout_s in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InvalidInput, match="a timeout is a positive number of seconds"):
            one.write(1, timeout_s=timeout_s)
    with pytest.raises(InvalidInput, match="2 blocks and 1 slots"):
        one.slices.write(keys(1, 2), [0], parent=key(1, -1))


def test_pieces_of_a_slice_share_its_time_and_its_end(rig: Callable[..., Rig]) -> None:
    """Eight pages make pieces of two: a slice of five is three of them, and no piece reaches into the next slice."""
    clock = FakeClock()
    store = Scripted(clock, [(0.5, "ok", 0)] * 6)
    one = rig(store, clock=clock, num_pages=8, slice_blocks=5, slice_timeout_s=4.0, total_timeout_s=99.0)
    assert one.write(10).why is Reason.WHOLE
    assert store.calls == [[0, 1], [2, 3], [4], [5, 6], [7, 8], [9]]
    assert store.left_s == [4.0, 3.0, 2.0, 4.0, 3.0, 2.0]


def test_a_single_page_is_enough(rig: Callable[..., Rig]) -> None:
    one = rig(MemoryStore(4 << 20), num_pages=1, slice_blocks=3)
    assert one.write(7) == Reached(7, Reason.WHOLE)
    assert one.read(7) == Reached(7, Reason.WHOLE)
    assert one.arrived(7)


def test_what_is_there_already_counts_and_a_missing_prefix_does_not(rig: Callable[..., Rig]) -> None:
    one = rig(MemoryStore(4 << 20), slice_blocks=2)
    assert one.write(3, start=4) == Reached(0, Reason.INCOMPLETE, "block 4: no_parent")
    assert one.write(4).why is Reason.WHOLE
    moved = one.metrics.value("moved_bytes_total")
    assert one.write(7) == Reached(7, Reason.WHOLE)
    assert one.metrics.value("moved_bytes_total") == moved + 3 * NAMING.frame_bytes
    assert one.read(3, start=4) == Reached(3, Reason.WHOLE)
    assert one.arrived(3, start=4)


# --- overlap ----------------------------------------------------------------------------------------------------------


class Watching(MemoryStore):
    """Calls `during` within each put and get, with the blocks; notes when puts begin and end."""

    def __init__(self) -> None:
        super().__init__(4 << 20)
        self.during: Callable[[list[int]], None] = lambda blocks: None
        self.notes: list[tuple[str, int]] = []
        self.asked: list[list[int]] = []

    def put(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[Status]:
        blocks = [AT[name] for name, _ in pages]
        self.notes.append(("begin", blocks[0]))
        self.during(blocks)
        results = super().put(pages, deadline=deadline)
        self.notes.append(("end", blocks[0]))
        return results

    def get_into(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[Status]:
        self.asked.append([AT[name] for name, _ in pages])
        return super().get_into(pages, deadline=deadline)


def test_the_next_piece_is_gathered_and_sealed_while_one_is_put_and_put_after_it(rig: Callable[..., Rig]) -> None:
    store = Watching()
    one = rig(store, piece_blocks=3)

    def next_is_sealed(blocks: list[int]) -> None:
        if blocks[-1] < 8:  # hangs, and so fails, unless it is done meanwhile
            wait_until(lambda: _sealed(one.staging, range(blocks[-1] + 1, blocks[-1] + 4)))

    store.during = next_is_sealed
    assert one.write(9).why is Reason.WHOLE
    assert store.notes == [(what, at) for at in (0, 3, 6) for what in ("begin", "end")]


def _sealed(staging: BytesStaging, slots: Sequence[int]) -> bool:
    pages = dict(staging.gathered)
    return all(slot in pages and bytes(staging.pages[pages[slot]][:4]) == b"HWPG" for slot in slots)


def test_the_next_piece_is_on_its_way_while_one_is_scattered(rig: Callable[..., Rig]) -> None:
    store = Watching()
    one = rig(store, piece_blocks=3)
    assert one.write(9).why is Reason.WHOLE

    def next_was_asked(slot: int, page: int) -> None:
        block = slot - 32
        if block < 6:
            wait_until(lambda: len(store.asked) > block // 3 + 1)

    one.staging.on_scatter = next_was_asked
    assert one.read(9) == Reached(9, Reason.WHOLE)
    assert store.asked == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert one.arrived(9)


# --- trouble ----------------------------------------------------------------------------------------------------------


def test_a_put_that_hangs_costs_its_deadline_and_keeps_its_pages(
    rig: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    hanging = HangingStore(MemoryStore(4 << 20))
    one = rig(hanging, num_pages=16, slice_blocks=3, slice_timeout_s=0.2, total_timeout_s=5.0)
    hanging.hang("put", times=1)
    caplog.clear()
    deadline_s = time.monotonic() + 0.2
    assert one.write(6) == Reached(0, Reason.SLICE_TIMEOUT, HUNG)
    assert time.monotonic() <= deadline_s + SLACK_S
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert one.worker.num_held_pages == 3
    quarantined = {page for _, page in one.staging.gathered[:3]}
    one.staging.touched.clear()
    for _ in range(10):  # everybody else goes on, with other pages
        assert one.write(6).why is Reason.WHOLE
        assert one.read(6).why is Reason.WHOLE
    assert quarantined.isdisjoint(one.staging.touched)
    assert one.worker.num_held_pages == 3
    hanging.release()
    wait_until(lambda: one.worker.num_held_pages == 0)
    for _ in range(10):
        assert one.read(6).why is Reason.WHOLE
    assert quarantined & set(one.staging.touched)  # in use again


def test_a_get_that_hangs_costs_its_deadline_and_hits_nobody(rig: Callable[..., Rig]) -> None:
    hanging = HangingStore(MemoryStore(4 << 20))
    one = rig(hanging, num_pages=16, slice_blocks=3, slice_timeout_s=5.0, total_timeout_s=5.0)
    assert one.write(9).why is Reason.WHOLE
    hanging.hang("get_into", times=1)
    deadline_s = time.monotonic() + 0.2
    assert one.read(6, timeout_s=0.2).why is Reason.TOTAL_TIMEOUT
    assert time.monotonic() <= deadline_s + SLACK_S
    assert one.arrived(0)
    assert one.worker.num_held_pages == 3
    before = one.staging.pages.copy()
    hanging.release()
    wait_until(lambda: one.worker.num_held_pages == 0)
    assert (one.staging.pages != before).any()  # the late bytes came, into pages that nobody had
    assert one.arrived(0)
    assert one.read(9).why is Reason.WHOLE
    assert one.arrived(9)


def test_a_hang_in_the_second_slice_keeps_the_first(rig: Callable[..., Rig]) -> None:
    store = Watching()
    hanging = HangingStore(store)
    store.during = lambda blocks: hanging.hang("put", times=1)  # the next one
    one = rig(hanging, slice_blocks=3, slice_timeout_s=0.1)
    assert one.write(9) == Reached(3, Reason.SLICE_TIMEOUT, HUNG)
    assert one.worker.num_held_pages == 3


def test_the_device_may_raise(rig: Callable[..., Rig]) -> None:
    one = rig(MemoryStore(4 << 20), slice_blocks=3)

    def raises(slot: int, page: int) -> None:
        if slot in (7, 39):
            raise RuntimeError(f"slot {slot}")

    one.staging.on_gather = raises
    assert one.write(9) == Reached(6, Reason.FAILED, "RuntimeError: slot 7")
    one.staging.on_gather = None
    assert one.write(9).why is Reason.WHOLE
    one.staging.on_scatter = raises
    assert one.read(9) == Reached(6, Reason.FAILED, "RuntimeError: slot 39")


def test_an_error_ahead_is_not_the_answer_if_what_is_before_it_failed(rig: Callable[..., Rig]) -> None:
    clock = FakeClock()
    one = rig(Scripted(clock, [(0.0, "fails", 1)]), clock=clock, slice_blocks=3)

    def raises(slot: int, page: int) -> None:
        if slot == 4:
            raise RuntimeError("too early to say")

    one.staging.on_gather = raises
    assert one.write(9) == Reached(1, Reason.INCOMPLETE, "block 1: no_room")


def test_who_is_cancelled_keeps_what_is_there(rig: Callable[..., Rig]) -> None:
    store = Watching()
    one = rig(store, slice_blocks=2)
    stop = threading.Event()
    store.during = lambda blocks: stop.set() if blocks[0] == 2 else None
    assert one.write(10, stopped=stop.is_set).why is Reason.CANCELLED
    num_written = one.write(0).num_blocks + len(store.names())
    assert num_written in (4, 6)  # the piece that was ready when it was cancelled may go, or not
    assert one.read(10, stopped=stop.is_set) == Reached(0, Reason.CANCELLED, "nobody wants the rest")
    assert one.worker.close()
    assert one.write(3).why is Reason.CANCELLED
    assert one.read(3).why is Reason.CANCELLED


def test_a_store_that_is_left_alone_costs_nothing(rig: Callable[..., Rig]) -> None:
    clock = FakeClock()
    hanging = HangingStore(MemoryStore(4 << 20, clock=clock))
    one = rig(hanging, clock=clock, slice_blocks=2, breaker={"breaker_failures": 2, "breaker_pause_s": 5.0})
    assert one.write(6).why is Reason.WHOLE
    hanging.dead = True
    assert [one.write(6).why, one.read(6).why] == [Reason.FAILED] * 2
    num_asked, num_gathered = hanging.num_asked(), len(one.staging.gathered)
    assert [one.write(6).why, one.read(6).why] == [Reason.DOWN] * 2
    assert hanging.num_asked() == num_asked
    assert len(one.staging.gathered) == num_gathered
    clock.advance(5.0)
    assert [one.read(6).why, one.write(6).why, one.read(6).why] == [Reason.FAILED, Reason.DOWN, Reason.DOWN]
    assert hanging.num_asked() == num_asked + 1  # the probe
    hanging.dead = False
    clock.advance(10.0)
    assert one.write(6) == Reached(6, Reason.WHOLE)  # its first slice is the probe; the others follow
    assert one.read(6) == Reached(6, Reason.WHOLE)


def test_nobody_waits_for_pages_that_stuck_calls_keep(rig: Callable[..., Rig]) -> None:
    hanging = HangingStore(MemoryStore(4 << 20))
    one = rig(hanging, num_pages=2, slice_blocks=2, slice_timeout_s=20.0, total_timeout_s=20.0)
    hanging.hang("put")
    assert one.write(2, timeout_s=0.05).why is Reason.TOTAL_TIMEOUT
    assert one.write(2) == Reached(0, Reason.DOWN, "the pool's calls keep all pages")
    assert one.read(1) == Reached(0, Reason.INCOMPLETE, "block 0: miss")  # a page is kept for reads


def test_many_threads_with_few_pages(rig: Callable[..., Rig]) -> None:
    one = rig(MemoryStore(4 << 20), num_pages=6, slice_blocks=4)
    found: list[Reached] = []
    assert one.write(12).why is Reason.WHOLE

    def work(start: int) -> None:
        for _ in range(15):
            found.append(one.write(12))
            found.append(one.read(2, start=start))

    threads = [threading.Thread(target=work, args=(2 * at,)) for at in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {reached.why for reached in found} == {Reason.WHOLE}
    assert len(found) == 180
    assert one.arrived(12)


# --- reading what is bad ----------------------------------------------------------------------------------------------


def test_a_read_ends_before_what_is_missing_or_bad_and_removes_it(rig: Callable[..., Rig]) -> None:
    clock = FakeClock()
    store = Scripted(clock)
    one = rig(store, clock=clock, slice_blocks=3)
    assert one.write(9).why is Reason.WHOLE
    name = NAMING.name(key(1, 4))
    good = store.frames[name]
    store.frames[name] = good[:-1] + bytes([good[-1] ^ 1])
    assert one.read(9) == Reached(4, Reason.INCOMPLETE, "block 4: corrupt")
    assert one.arrived(4)
    assert name not in store.frames  # by force (rule 8)
    assert one.metrics.value("bad_pages_total", fault="corrupt") == 1
    assert one.read(9) == Reached(4, Reason.INCOMPLETE, "block 4: miss")
    store.frames[name] = store.frames[NAMING.name(key(1, 5))]  # another page's bytes
    assert one.read(9) == Reached(4, Reason.INCOMPLETE, "block 4: foreign")
    assert one.write(5, start=4).why is Reason.WHOLE
    assert one.read(9) == Reached(9, Reason.WHOLE)


def test_a_tier_that_gives_nothing_but_bad_pages_is_switched_off(rig: Callable[..., Rig]) -> None:
    clock = FakeClock()
    store = Scripted(clock)
    one = rig(store, clock=clock)
    for _ in range(8):
        assert one.write(9).why is Reason.WHOLE
        for name in store.frames:
            store.frames[name] = bytes(len(store.frames[name]))
        assert one.read(9).why is Reason.INCOMPLETE
    num_calls = len(store.calls)
    assert one.read(9) == Reached(0, Reason.DOWN, "pool is off: nothing but bad pages came from it")
    assert len(store.calls) == num_calls
    assert one.worker.revive("pool")
    assert one.worker.drain(PATIENCE_S)  # it has said so
    assert one.write(9).why is Reason.WHOLE
    assert one.read(9).why is Reason.WHOLE


# --- properties -------------------------------------------------------------------------------------------------------

HONEST = st.tuples(st.sampled_from((0.0, 0.0, 0.5, 3.0)), st.sampled_from(("ok", "ok", "fails")), st.integers(0, 3))
ROUGH = st.tuples(
    st.sampled_from((0.0, 0.5, 3.0, 50.0)), st.sampled_from(("ok", "fails", "raises", "blocks")), st.integers(0, 3)
)
SCRIPTS = st.one_of(
    st.tuples(st.just(True), st.lists(HONEST, max_size=8)), st.tuples(st.just(False), st.lists(ROUGH, max_size=8))
)


@settings(max_examples=150)
@given(
    num_blocks=st.integers(0, 14),
    start=st.integers(0, 3),
    slice_blocks=st.integers(1, 6),
    num_pages=st.integers(1, 24),
    scripts=SCRIPTS,
)
def test_what_a_write_counts_is_the_prefix_in_the_store(
    num_blocks: int, start: int, slice_blocks: int, num_pages: int, scripts: tuple[bool, list[tuple[float, str, int]]]
) -> None:
    """Slices go in order and never past a gap; an honest store holds exactly what was counted, in a row."""
    honest, script = scripts
    clock = FakeClock()
    store = Scripted(clock, script)
    times: Any = {"slice_timeout_s": 4.0, "total_timeout_s": 9.0}
    with Rig(store, clock=clock, num_pages=num_pages, slice_blocks=slice_blocks, **times) as one:
        found = one.write(num_blocks, start)
        there = store.blocks()
        in_a_row = next((i for i in range(num_blocks) if start + i not in there), num_blocks)
        assert found.num_blocks == in_a_row if honest else found.num_blocks <= in_a_row
        assert (found.why is Reason.WHOLE) == (found.num_blocks == num_blocks)
        put = [block for blocks in store.calls for block in blocks]
        assert put == list(range(start, start + len(put)))  # in order, none twice, none left out
        for blocks in store.calls:
            assert len({(block - start) // slice_blocks for block in blocks}) == 1, "a put over two slices"
        calls: list[list[int]] = [[], *store.calls]
        *whole, last = calls
        assert all(block < start + found.num_blocks for blocks in whole for block in blocks), "put behind a gap"
        assert all(block in last for block in there if block >= start + found.num_blocks)
        assert all(left_s <= 4.0 for left_s in store.left_s)
        for name, frame in store.frames.items():
            assert frame[START:] == bytes(one.original[AT[name]])


@settings(max_examples=100)
@given(
    num_blocks=st.integers(0, 14),
    slice_blocks=st.integers(1, 6),
    num_pages=st.integers(1, 24),
    damage=st.lists(
        st.tuples(st.integers(0, 13), st.sampled_from(("flip", "swap", "cut", "gone"))),
        max_size=2,
        unique_by=lambda one: one[0],
    ),
    script=st.one_of(st.just([]), st.lists(ROUGH, max_size=6)),
)
def test_what_a_read_counts_is_the_verified_prefix(
    num_blocks: int,
    slice_blocks: int,
    num_pages: int,
    damage: list[tuple[int, str]],
    script: list[tuple[float, str, int]],
) -> None:
    """Exactly the counted blocks are on the device, all other slots are as they were, and bad pages are gone."""
    clock = FakeClock()
    store = Scripted(clock)
    times: Any = {"slice_timeout_s": 4.0, "total_timeout_s": 9.0}
    with Rig(store, clock=clock, num_pages=num_pages, slice_blocks=slice_blocks, **times) as one:
        assert one.write(num_blocks).why is Reason.WHOLE
        other = store.frames[NAMING.name(key(1, 0))] if num_blocks else b""
        bad = set()
        for block, what in damage:
            name = NAMING.name(key(1, block))
            frame = store.frames.pop(name, None)
            if frame is not None and what != "gone":
                flipped = frame[:-1] + bytes([frame[-1] ^ 0x10])
                cut = frame[: len(frame) // 2] + bytes(len(frame) - len(frame) // 2)
                store.frames[name] = {"flip": flipped, "swap": other if block else flipped, "cut": cut}[what]
                bad.add(block)
        sound = next(
            (i for i in range(num_blocks) if i in bad or NAMING.name(key(1, i)) not in store.frames), num_blocks
        )
        store.script, store.calls = script, []
        found = one.read(num_blocks)
        assert found.num_blocks <= sound
        assert (found.why is Reason.WHOLE) == (found.num_blocks == num_blocks)
        assert one.arrived(found.num_blocks)
        if not script:
            assert found.num_blocks == sound
            assert sound not in bad or NAMING.name(key(1, sound)) not in store.frames, "a bad page was left"
