"""Blocks straight into a slab and straight out of it: bit for bit, nothing left reserved, no wrong byte ever."""

import logging
import mmap
import os
import random
import select
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Self

import pytest
import torch

from copy_kit import WAIT_S, Hold, OddWire, at_call, no_traces, raise_trouble
from headwater.build import open_local
from headwater.config.stores import LocalStoreConfig
from headwater.core.errors import ResourceClosed
from headwater.core.events import Cancel, Copied, Instruction, Job, JobDone, JobFailed, Load, Probe, Save, Stuck
from headwater.core.page import PageName, page_name
from headwater.core.results import Reason, Status
from headwater.layout.frame import PageMeta, frame_bytes, header_bytes, seal
from headwater.layout.spec import KVLayout, opaque_layout
from headwater.metrics import Metrics
from headwater.storage.base import SYSTEM_CLOCK, Addressable, Borrow, Clock, Deadline, Reservation, Store
from headwater.storage.local import MappedStore
from headwater.storage.local.records import RecordState
from headwater.storage.verified import VerifiedStore
from headwater.storage.wrappers import WrapperStore
from headwater.testing.clock import FakeClock
from headwater.testing.faulty_stores import DelayStore
from headwater.testing.layouts import randomise
from headwater.testing.pages import IDENTITY, sample_page
from headwater.testing.samples import sample_layouts
from headwater.testing.stores import soon
from headwater.transfer.device import cuda, populate
from headwater.transfer.device.arena import DeviceCache, HostCache, create_host_cache, create_kv_cache
from headwater.transfer.device.copy_engine import CopyEngine
from headwater.transfer.device.transfer import Transfer
from headwater.transfer.device.wire import Digests, Direction, Wire
from headwater.transfer.executor import save_throttle
from headwater.transfer.executor.staging import TorchStaging
from headwater.transfer.executor.worker import Worker
from worker_kit import PATIENCE_S, TENANT, Ear, Gate, key, keys, wait_until

pytestmark = pytest.mark.usefixtures(no_traces.__name__)

LAYOUT = opaque_layout((64, 100, 33), 4)
NUM_PLANES = len(LAYOUT.planes)
FRAME_BYTES = frame_bytes(LAYOUT.plane_bytes)
LIMIT_BYTES = 16 << 20
ADDRESSED = ("memory", "reserve", "publish", "abandon", "borrow")


class OddSlab(WrapperStore, Addressable):
    """A store with addresses whose calls can be made to wait, to raise, and to answer something else."""

    def __init__(self, store: MappedStore) -> None:
        super().__init__(store)
        self.slab = store
        self.gates = {call: Gate() for call in ADDRESSED}
        self.raises: dict[str, BaseException] = {}
        self.answers: dict[str, Callable[[Any], Any]] = {}
        self.calls: list[str] = []

    def _do(self, call: str, real: Callable[[], Any]) -> Any:
        self.calls.append(call)
        self.gates[call]()
        if call in self.raises:
            raise self.raises[call]
        found = real()
        return self.answers[call](found) if call in self.answers else found

    def addressable(self) -> Self:
        return self

    def memory(self) -> memoryview | None:
        return self._do("memory", self.slab.memory)  # type: ignore[no-any-return]

    def reserve(self, pages: Sequence[tuple[PageMeta, int]], *, deadline: Deadline) -> list[Reservation | Status]:
        return self._do("reserve", lambda: self.slab.reserve(pages, deadline=deadline))  # type: ignore[no-any-return]

    def publish(self, reservations: Sequence[Reservation], *, deadline: Deadline) -> list[Status]:
        return self._do("publish", lambda: self.slab.publish(reservations, deadline=deadline))  # type: ignore[no-any-return]

    def abandon(self, reservations: Sequence[Reservation], *, deadline: Deadline) -> None:
        self._do("abandon", lambda: self.slab.abandon(reservations, deadline=deadline))

    def borrow(self, names: Sequence[PageName], *, deadline: Deadline) -> list[Borrow | Status]:
        return self._do("borrow", lambda: self.slab.borrow(names, deadline=deadline))  # type: ignore[no-any-return]

    def still_valid(self, borrow: Borrow) -> bool:
        return self.slab.still_valid(borrow)

    def open(self) -> None:
        for gate in self.gates.values():
            gate.open()


class OddEngine(CopyEngine):
    """A copy engine that can be made to raise before a copy in place, and remembers those."""

    def __init__(self, device: DeviceCache, wires: Callable[[DeviceCache, KVLayout, Direction], Wire]) -> None:
        super().__init__(device, wires=wires)
        self.begun: list[Transfer] = []  # into a slab
        self.rows: list[int] = []  # blocks of each copy out of one
        self.before: Callable[[], None] | None = None  # each copy in place

    def gather(
        self, slots: Sequence[int], frames: Sequence[memoryview], *, on_over: Callable[[], None] | None = None
    ) -> Transfer:
        if on_over is not None and self.before is not None:
            self.before()
        transfer = super().gather(slots, frames, on_over=on_over)
        if on_over is not None:
            self.begun.append(transfer)
        return transfer

    def scatter(self, frames: Sequence[memoryview], slots: Sequence[int], **more: Any) -> Transfer:
        if more.get("on_over") is not None:
            if self.before is not None:
                self.before()
            self.rows.append(len(slots))
        return super().scatter(frames, slots, **more)


class OddStaging(TorchStaging):
    """Staging that can be made to reach nothing. Its engine is odd, and its wires are under the test's control."""

    def __init__(self, device: DeviceCache, host: HostCache, *, place_bytes: int) -> None:
        super().__init__(device, host)
        self.engine.close()
        self.wires: dict[Direction, OddWire] = {}

        def make(cache: DeviceCache, layout: KVLayout, direction: Direction) -> Wire:
            return self.wires.setdefault(direction, OddWire(cache, layout, direction, place_bytes=place_bytes))

        self.engine = self.odd = OddEngine(device, make)
        self.far = False
        self.through_pages = 0

    @property
    def out(self) -> OddWire:
        return self.wires[Direction.OUT]

    @property
    def into(self) -> OddWire:
        return self.wires[Direction.IN]

    def reaches(self, memory: memoryview) -> bool:
        return not self.far and super().reaches(memory)

    def gather(self, slots: Sequence[int], pages: Sequence[int]) -> Digests | None:
        self.through_pages += len(pages)
        return super().gather(slots, pages)

    def scatter(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        self.through_pages += len(pages)
        super().scatter(pages, slots)


class Rig:
    """A worker between a small device and a slab, and an ear. Checks at the end that nothing was left behind."""

    def __init__(
        self,
        directory: Path,
        *,
        layout: KVLayout = LAYOUT,
        num_slots: int = 64,
        clock: Clock = SYSTEM_CLOCK,
        place_bytes: int = 1,
        limit_bytes: int = LIMIT_BYTES,
        odd: bool = True,
        layerwise: bool = True,
        wrap: Callable[[Store], Store] = lambda store: store,
        **options: Any,
    ) -> None:
        slab = open_local(LocalStoreConfig(directory=directory, limit_bytes=limit_bytes), clock=clock)
        assert isinstance(slab, MappedStore)
        self.slab = slab
        self.store = OddSlab(slab)
        self.layout, self.clock, self.ear, self.metrics = layout, clock, Ear(), Metrics()
        self.planes = create_kv_cache(layout, num_slots)
        self.planes.layerwise = layerwise
        randomise(self.planes, seed=1)
        self.original = [row.clone() for row in self.planes.rows]
        self.pages = create_host_cache(frame_bytes(layout.plane_bytes), 4)
        self.staging = OddStaging(self.planes, self.pages, place_bytes=place_bytes)
        self.jobs: list[int] = []
        self.worker = Worker(
            {"host": wrap(self.store if odd else slab)},
            self.staging,
            **{
                "layout": layout,
                "identity": IDENTITY,
                "block_tokens": layout.block_tokens,
                "deliver": self.ear,
                "clock": clock,
                "metrics": self.metrics,
                "slice_pages": 2,
                "in_place_pages": 2,
                **options,
            },
        )

    def submit(self, *instructions: Instruction) -> None:
        self.worker.submit(instructions)
        self.jobs += [one.job for one in instructions if isinstance(one, Job)]

    def cancel(self, job: int) -> None:
        self.submit(Cancel(job=job))

    def look(self, num_blocks: int = 1, *, chain: int = 1, within_s: float = PATIENCE_S) -> int:
        return self._job(Probe, keys(chain, num_blocks), within_s)

    def load(self, slots: Sequence[int], *, chain: int = 1, within_s: float = PATIENCE_S) -> int:
        return self._job(Load, keys(chain, len(slots)), within_s, slots=tuple(slots))

    def save(self, slots: Sequence[int], *, chain: int = 1, start: int = 0, within_s: float = PATIENCE_S) -> int:
        facts = {"slots": tuple(slots), "parent": key(chain, start - 1), "depth": start, "tenant": TENANT}
        return self._job(Save, keys(chain, len(slots), start), within_s, **facts)

    def _job(self, kind: type[Job], wanted: Sequence[bytes], within_s: float, **facts: Any) -> int:
        number = len(self.jobs) + 1
        deadline_s = self.clock.monotonic() + within_s
        self.submit(kind(job=number, store="host", keys=tuple(wanted), deadline_s=deadline_s, **facts))  # type: ignore[arg-type]
        return number

    # --- what came of it ----------------------------------------------------------------------------------------------

    def saved(self, slots: Sequence[int], **where: Any) -> None:
        assert set(self.ear.results(self.save(slots, **where))) <= {"stored", "exists"}

    def loaded(self, slots: Sequence[int], source: Sequence[int], **where: Any) -> None:
        """Load blocks and insist that they are those that were saved from `source`."""
        for slot in slots:
            for row in self.planes.rows:
                row[slot] = 0
        assert self.ear.results(self.load(slots, **where)) == ["hit"] * len(slots)
        assert [self.block(slot) for slot in slots] == [self.was(slot) for slot in source]

    def block(self, slot: int) -> bytes:
        return torch.cat([row[slot] for row in self.planes.rows]).numpy().tobytes()

    def was(self, slot: int) -> bytes:
        return torch.cat([row[slot] for row in self.original]).numpy().tobytes()

    def untouched(self, slots: Sequence[int]) -> bool:
        return all(self.block(slot) == self.was(slot) for slot in slots)

    def frame(self, name: PageName) -> memoryview:
        """A page's memory in the slab, to be spoilt."""
        at = self.slab._attachment
        assert at is not None
        return at.slab.view(at.catalog.mirror.places[name].offset, frame_bytes(self.layout.plane_bytes))

    def held(self, num_blocks: int, chain: int = 1) -> int:
        """How many leading blocks of a chain are there; behind the first that is not, none may be."""
        there = self.slab.contains([page_name(one) for one in keys(chain, num_blocks)], deadline=soon())
        assert there == sorted(there, reverse=True), "there is a hole"
        return sum(there)

    def nothing_is_out(self) -> None:
        """No slot is reserved, and the store is sound. What could not be given back in time is, by now."""
        self.slab.label(IDENTITY, bytes(16), "a test", deadline=soon())
        assert self.slab.slots(deadline=soon()).get(RecordState.RESERVED, 0) == 0
        assert self.slab.validate(deadline=soon()) == []
        at = self.slab._attachment
        assert at is not None
        assert not at._lent

    def pass_time(self, seconds: float) -> None:
        """Move a FakeClock on, and have the watchdog look at it."""
        assert isinstance(self.clock, FakeClock)
        self.clock.advance(seconds)
        self.cancel(-1)

    def finish(self) -> None:
        self.store.open()
        assert self.worker.close(PATIENCE_S)
        assert self.worker.num_held_pages == 0
        ends = Counter(event.job for event in self.ear.events if isinstance(event, JobDone | JobFailed))
        assert ends == Counter(self.jobs), "a job ended twice, or never"
        for job in self.jobs:
            *before, last = self.ear.of(job)
            assert isinstance(last, JobDone | JobFailed), "something was said of a job after its end"
            assert [type(event) for event in before] in ([], [Copied])
        self.staging.close()
        self.nothing_is_out()
        self.slab.close()
        self.pages.close()
        self.planes.close()


@contextmanager
def rig(directory: Path, **options: Any) -> Iterator[Rig]:
    here = Rig(directory / "store", **options)
    try:
        yield here
    finally:
        for wire in here.staging.wires.values():
            wire.on_launch = wire.on_finish = None
        here.finish()


def hold(here: Rig, wire: OddWire, at: int) -> Hold:
    """Have the k-th piece from now on wait."""
    wire.on_finish = found = Hold(at)
    return found


# --- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.fault("D8")
@pytest.mark.parametrize("wrap", [WrapperStore, lambda store: WrapperStore(DelayStore(store, 0.0))])
def test_a_wrapped_slab_is_still_copied_in_place(shm: Path, wrap: Callable[[Store], Store]) -> None:
    with rig(shm, wrap=wrap) as here:
        here.saved(range(5))
        here.loaded(range(20, 25), range(5))
        assert here.staging.through_pages == 0
        assert {"reserve", "publish", "borrow"} <= set(here.store.calls)


@pytest.mark.parametrize(("layerwise", "rows"), [(True, [64, 206]), (False, [16, 32, 64, 128, 30])])
def test_a_long_load_is_on_its_way_while_its_rest_is_looked_up(shm: Path, layerwise: bool, rows: list[int]) -> None:
    with rig(shm, num_slots=600, layerwise=layerwise, in_place_pages=128) as here:
        here.saved(range(270))
        here.loaded(range(300, 570), range(270))
        assert here.staging.odd.rows == rows


def test_rows_of_a_load_beside_another_are_not_cut_short(shm: Path) -> None:
    with rig(shm, num_slots=600, layerwise=False, in_place_pages=128) as here:
        here.saved(range(150))
        stop = hold(here, here.staging.into, 0)
        first = here.load(range(200, 350))
        assert stop.arrived.wait(PATIENCE_S)
        wait_until(lambda: len(here.staging.odd.rows) == 4)
        second = here.load(range(400, 550))
        wait_until(lambda: len(here.staging.odd.rows) == 6)
        stop.go_on.set()
        for job in (first, second):
            assert here.ear.results(job) == ["hit"] * 150
        assert here.staging.odd.rows == [16, 32, 64, 38, 128, 22]
        assert [here.block(slot) for slot in range(400, 550)] == [here.was(slot) for slot in range(150)]


@pytest.mark.parametrize("at", [0, 15, 16, 47, 48, 111, 112, 239, 240, 269])
def test_a_bad_page_in_any_row_ends_the_load_there(shm: Path, at: int) -> None:
    with rig(shm, num_slots=600, layerwise=False, in_place_pages=128) as here:
        here.saved(range(270))
        here.frame(page_name(key(1, at)))[-1] ^= 1
        results = here.ear.results(here.load(range(300, 570)))
        assert results == ["hit"] * at + ["corrupt"] + ["miss"] * (269 - at)
        assert [here.block(slot) for slot in range(300, 300 + at)] == [here.was(slot) for slot in range(at)]
        assert here.held(270) == at


@pytest.mark.parametrize("place_bytes", [1, 1 << 20], ids=["pieces", "whole"])
@pytest.mark.parametrize("name", ["odd", "gqa-fp8-scales", "dsa", "opaque"])
def test_device_to_slab_to_device_bit_for_bit(shm: Path, name: str, place_bytes: int) -> None:
    layout = {**sample_layouts(), "opaque": LAYOUT}[name]
    with rig(shm, layout=layout, num_slots=24, place_bytes=place_bytes, limit_bytes=64 << 20, odd=False) as here:
        source, target = [3, 5, 0, 9, 8, 1, 7], [20, 11, 12, 23, 14, 15, 16]
        job = here.save(source)
        assert here.ear.results(job) == ["stored"] * 7
        assert [type(event) for event in here.ear.of(job)] == [Copied, JobDone]
        here.loaded(target, source)
        assert here.untouched(sorted(set(range(24)) - set(target)))
        assert here.staging.through_pages == 0
        moved = {way: here.metrics.value("moved_bytes_total", tier="host", direction=way) for way in ("in", "out")}
        assert moved == dict.fromkeys(("in", "out"), 7 * frame_bytes(layout.plane_bytes))
        assert here.ear.results(here.save(range(9))) == ["exists"] * 7 + ["stored"] * 2
        assert here.ear.results(here.load(range(10, 20)))[7:] == ["hit", "hit", "miss"]


def test_what_is_stored_is_a_sealed_frame(shm: Path) -> None:
    clock = FakeClock()
    with rig(shm, clock=clock) as here:
        here.saved(range(5))
        reader = VerifiedStore(here.slab, identity=IDENTITY, plane_bytes=LAYOUT.plane_bytes, clock=clock)
        for depth in range(5):
            meta = PageMeta(
                key=key(1, depth),
                identity=IDENTITY,
                parent=key(1, depth - 1),
                depth=depth,
                valid_tokens=4,
                tenant=TENANT,
            )
            wanted = memoryview(bytearray(FRAME_BYTES))
            wanted[header_bytes(NUM_PLANES) :] = here.was(depth)
            seal(wanted, meta, LAYOUT, now_ms=int(clock.time() * 1000))
            found = memoryview(bytearray(FRAME_BYTES))
            assert reader.get_into([(meta.name, found)], deadline=soon()) == [Status.HIT]
            assert found == wanted


def test_pages_of_others_and_pages_for_others(shm: Path) -> None:
    """What went through pages can be loaded in place, and the other way round."""
    with rig(shm) as here:
        here.staging.far = True
        here.saved(range(3))
        assert here.staging.through_pages == 3
        assert "reserve" not in here.store.calls
        here.staging.far = False
        here.loaded(range(20, 23), range(3))
        here.saved(range(3, 6), chain=2)
        assert here.staging.through_pages == 3
        here.staging.far = True
        here.loaded(range(20, 23), range(3, 6), chain=2)
        assert here.staging.through_pages == 6


def test_a_store_that_is_down_is_not_reached(shm: Path) -> None:
    with rig(shm) as here:
        here.saved(range(3))
        here.store.answers["memory"] = lambda _: None
        here.loaded(range(20, 23), range(3))
        assert here.staging.through_pages == 3


def test_jobs_of_nothing_end_too(shm: Path) -> None:
    with rig(shm) as here:
        assert [here.ear.results(job) for job in (here.load([]), here.save([]))] == [[], []]


def test_memory_is_registered_once_however_many_jobs_come_at_once(
    shm: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pinned: list[int] = []
    go_on = threading.Event()

    class Pin:
        def release(self) -> None:
            pinned.remove(0)

    def pin(memory: memoryview, address: int) -> Pin | str:
        if pinned:
            return "already registered"
        pinned.append(0)
        assert go_on.wait(WAIT_S)
        return Pin()

    monkeypatch.setattr(cuda, "pin", pin)
    with create_kv_cache(LAYOUT, 2) as planes, create_host_cache(FRAME_BYTES, 2) as pages:
        staging = TorchStaging(planes, pages)
        staging._cuda = True
        memory = memoryview(bytearray(100))
        found: list[bool] = []
        threads = [threading.Thread(target=lambda: found.append(staging.reaches(memory))) for _ in range(3)]
        for thread in threads:
            thread.start()
        wait_until(lambda: bool(pinned))
        threads[-1].join(0.05)  # time for the others to come
        go_on.set()
        for thread in threads:
            thread.join(WAIT_S)
        assert found == [True] * 3
        assert "cannot be registered" not in caplog.text
        other = memoryview(bytearray(100))
        with caplog.at_level(logging.WARNING, "headwater"):
            assert [staging.reaches(other) for _ in range(2)] == [False, False]
        assert caplog.text.count("cannot be registered") == 1
        staging.close()
        assert not pinned


@pytest.mark.fault("C1")
def test_memory_that_is_being_registered_is_not_used_yet(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nobody waits for it: jobs go through pages until it is there."""
    go_on = threading.Event()

    class Pin:
        def release(self) -> None:
            pass

    def pin(memory: memoryview, address: int) -> Pin | str:
        assert go_on.wait(WAIT_S)
        return Pin()

    monkeypatch.setattr(cuda, "pin", pin)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    with create_kv_cache(LAYOUT, 2) as planes, create_host_cache(FRAME_BYTES, 2) as pages:
        staging = TorchStaging(planes, pages)
        memory = memoryview(mmap.mmap(-1, 1 << 20))
        assert staging.register(memory, timeout_s=0.0), "a CPU reaches it as it is"
        staging._cuda = True
        try:
            assert not staging.register(memory, timeout_s=0.01)
            assert not staging.reaches(memory)
        finally:
            go_on.set()
        wait_until(lambda: staging.reaches(memory))
        other = memoryview(mmap.mmap(-1, 1 << 20))
        assert staging.register(other, timeout_s=WAIT_S)
        assert staging.reaches(other)
        staging.close()


def test_populated_memory_is_there_and_holds_what_it_held(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(populate, "_POPULATED_BYTES", 1 << 16)
    path = shm / "memory"
    size = (1 << 18) + 4096
    path.write_bytes(b"")
    os.truncate(path, size)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as mapping:
        mapping[5000:5003] = b"abc"
        before = os.stat(path).st_blocks
        with memoryview(mapping) as memory:
            done = populate.populate(memory)
        assert mapping[5000:5003] == b"abc"
        assert mapping[:5000] == bytes(5000)
        if done:  # else the kernel cannot
            assert os.stat(path).st_blocks * 512 >= size > before * 512


def test_memory_is_provided_in_time_or_later(shm: Path) -> None:
    path = shm / "memory"
    path.write_bytes(b"")
    os.truncate(path, 1 << 20)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 1 << 20) as mapping, memoryview(mapping) as memory:
        assert not populate.populate(memory, timeout_s=0.0)
        assert os.stat(path).st_blocks == 0


# --- damage -----------------------------------------------------------------------------------------------------------


def test_a_flipped_byte_is_caught_a_thousand_times_of_a_thousand(shm: Path) -> None:
    rng = random.Random(5)
    caught: Counter[str] = Counter()
    with rig(shm, odd=False, place_bytes=200) as here:
        here.saved(range(3))
        payload_at = header_bytes(NUM_PLANES)
        for turn in range(1000):
            bad = rng.randrange(3)
            name = page_name(key(1, bad))
            frame = here.frame(name)
            at = rng.randrange(payload_at if turn % 4 == 0 else 0, FRAME_BYTES) if turn % 4 < 2 else _hot(rng)
            if turn % 4 == 3:
                at = payload_at + rng.randrange(LAYOUT.page_bytes)
            flip = 1 << rng.randrange(8)
            frame[at] ^= flip
            results = here.ear.results(here.load([20, 21, 22]))
            assert results[:bad] == ["hit"] * bad
            assert results[bad] != "hit", f"byte {at} of the frame"
            assert results[bad + 1 :] == ["miss"] * (2 - bad)
            assert [here.block(20 + i) for i in range(bad)] == [here.was(i) for i in range(bad)]
            caught[results[bad]] += 1
            if results[bad] == "unknown_version":  # it may be a newer one's: not ours to remove
                frame[at] ^= flip
            else:
                assert here.held(3) == bad
            del frame
            if turn % 25 == 0:
                here.saved(range(3))
                here.loaded([20, 21, 22], range(3))
            else:
                here.saved(range(3))
                assert here.ear.results(here.load([30])) == ["hit"]
        counted = sum(
            here.metrics.value("bad_pages_total", fault=fault) for fault in ("corrupt", "foreign", "short", "stale")
        )
        assert counted == 1000 - caught["unknown_version"]
    assert set(caught) <= {"corrupt", "unknown_version", "foreign", "short"}
    assert caught["corrupt"] > 900


def _hot(rng: random.Random) -> int:
    """In what a header says."""
    return rng.randrange(192 + 16 * NUM_PLANES)


def give_slot_away(here: Rig, name: PageName) -> None:
    """Have a page's slot taken by another page, as an eviction by another process would."""
    frame = here.frame(name)
    before = bytes(frame)
    assert here.slab.delete([name], deadline=soon())
    for number in range(10_000):
        page = sample_page(1000 + number, plane_bytes=LAYOUT.plane_bytes)
        assert here.slab.put([page.item], deadline=soon()) == [Status.STORED]
        if bytes(frame[4096:]) != before[4096:]:
            return
    raise AssertionError("the slot was not taken")


@pytest.mark.parametrize("when", ["before the header was read", "before the bytes were copied", "in the middle"])
def test_a_page_that_is_replaced_meanwhile_is_a_miss_and_no_damage(shm: Path, when: str) -> None:
    with rig(shm) as here:
        here.saved(range(4))
        name = page_name(key(1, 2))

        def replace(found: Any = None) -> Any:
            give_slot_away(here, name)
            return found

        if when == "before the header was read":
            here.store.answers["borrow"] = replace
        elif when == "in the middle":
            here.staging.into.on_launch = at_call(5, replace)
        else:
            here.staging.odd.before = replace
        results = here.ear.results(here.load(range(20, 24)))
        assert results == ["hit", "hit", "miss", "miss"]
        assert [here.block(slot) for slot in (20, 21)] == [here.was(slot) for slot in (0, 1)]
        assert sum(here.metrics.value("bad_pages_total", fault=one) for one in ("corrupt", "foreign", "short")) == 0
        here.store.answers.clear()
        here.staging.odd.before = here.staging.into.on_launch = None
        here.saved(range(4))
        here.loaded(range(20, 24), range(4))


def test_a_page_of_the_wrong_size_is_thrown_out(shm: Path) -> None:
    with rig(shm) as here:
        here.saved(range(2))
        here.store.answers["borrow"] = lambda found: [
            Borrow(one.name, one.view[:-1], one.slot, one.stamp) for one in found
        ]
        assert here.ear.results(here.load([20, 21])) == ["short", "miss"]
        here.store.answers.clear()
        assert here.held(2) == 0


# --- in the middle ----------------------------------------------------------------------------------------------------

NUM_BLOCKS = 6
NUM_PIECES = NUM_BLOCKS * NUM_PLANES  # one each


@pytest.mark.parametrize("how", ["cancel", "deadline", "error", "close"])
@pytest.mark.parametrize("at", [0, 3, 6, 11, 14, NUM_PIECES - 1])
def test_a_save_that_ends_in_the_middle_leaves_nothing_behind(shm: Path, at: int, how: str) -> None:
    clock = FakeClock()
    with rig(shm, clock=clock) as here:
        if how == "error":
            here.staging.out.on_finish = at_call(at, raise_trouble)
            assert here.ear.failure(here.save(range(NUM_BLOCKS), within_s=5)) is Reason.FAILED
        else:
            held = hold(here, here.staging.out, at)
            job = here.save(range(NUM_BLOCKS), within_s=5)
            assert held.arrived.wait(WAIT_S)
            if how == "cancel":
                here.cancel(job)
            elif how == "deadline":
                here.pass_time(5.1)
            else:
                assert not here.worker.close(0.01)
            assert not here.ear.ends(job)
            held.go_on.set()
            end = here.ear.end(job)
            if how == "deadline":
                results = list(end.results) if isinstance(end, JobDone) else [end.failure.value] * NUM_BLOCKS
                assert set(results) <= {"stored", "late"}
                assert results == sorted(results, reverse=True)
            else:
                assert here.ear.failure(job) is Reason.CANCELLED
        here.staging.out.on_finish = None
        if how == "close":
            assert here.worker.close(PATIENCE_S)
            here.held(NUM_BLOCKS)
            return
        assert here.worker.drain(PATIENCE_S)
        wait_until(lambda: here.worker._queues["host"]._num_unhurried == 0)  # its thread has cleared up
        num_held = here.held(NUM_BLOCKS)
        assert num_held <= at // NUM_PLANES
        here.nothing_is_out()
        launched = len(here.staging.out.launched)
        assert here.ear.results(here.save(range(NUM_BLOCKS))) == ["exists"] * num_held + ["stored"] * (
            NUM_BLOCKS - num_held
        )
        assert len(here.staging.out.launched) == launched + (NUM_BLOCKS - num_held) * NUM_PLANES
        here.loaded(range(20, 20 + NUM_BLOCKS), range(NUM_BLOCKS))


@pytest.mark.parametrize("how", ["cancel", "deadline", "error"])
@pytest.mark.parametrize("at", [0, 5, 6, NUM_PIECES - 1])
def test_a_load_that_ends_in_the_middle_writes_no_slot_after_its_end(shm: Path, at: int, how: str) -> None:
    clock = FakeClock()
    with rig(shm, clock=clock) as here:
        here.saved(range(NUM_BLOCKS))
        slots = range(20, 20 + NUM_BLOCKS)
        if how == "error":
            here.staging.into.on_finish = at_call(at, raise_trouble)
            job = here.load(slots, within_s=5)
            assert here.ear.failure(job) is Reason.FAILED
        else:
            held = hold(here, here.staging.into, at)
            job = here.load(slots, within_s=5)
            assert held.arrived.wait(WAIT_S)
            here.cancel(job) if how == "cancel" else here.pass_time(5.1)
            assert not here.ear.ends(job)
            held.go_on.set()
            end = here.ear.end(job)
            if how == "cancel":
                assert here.ear.failure(job) is Reason.CANCELLED
            else:
                results = list(end.results) if isinstance(end, JobDone) else [end.failure.value]
                assert set(results) in ({"late"}, {"hit"})
        seen = [here.block(slot) for slot in slots]
        here.staging.into.on_finish = None
        here.loaded(range(40, 40 + NUM_BLOCKS), range(NUM_BLOCKS))
        assert [here.block(slot) for slot in slots] == seen


def test_layers_are_waited_for_one_by_one(shm: Path) -> None:
    with rig(shm) as here:
        here.saved(range(3))
        woken = threading.Event()
        here.worker.on_first_layer(woken.set)
        held = hold(here, here.staging.into, 4)
        job = here.load([20, 21, 22])
        assert woken.wait(WAIT_S)
        assert here.worker.wait_layer(job, 0, WAIT_S)
        assert held.arrived.wait(WAIT_S)
        assert [here.block(slot)[:64] for slot in (20, 21, 22)] == [here.was(slot)[:64] for slot in (0, 1, 2)]
        assert not here.worker.wait_layer(job, 1, 0)
        assert not here.worker.wait_layer(job, 2, -1.0)
        held.go_on.set()
        assert here.ear.results(job) == ["hit"] * 3
        assert not here.worker.wait_layer(job, 0, 0)  # it is over: its event says all
        assert not here.worker.wait_layer(999, 0, WAIT_S)


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("how", ["missing", "wrong at the beginning", "wrong at the end"])
def test_no_layer_is_ready_of_which_a_block_is_not_there(shm: Path, how: str, long: bool) -> None:
    num_blocks = 150 if long else 5  # a long one goes in two rows
    with rig(shm, num_slots=2 * num_blocks, place_bytes=1 << 20, slice_pages=64) as here:
        here.saved(range(num_blocks))
        said: list[int] = []
        here.worker.on_first_layer(lambda: said.append(1))
        slots = range(num_blocks, 2 * num_blocks)
        here.loaded(slots, range(num_blocks))
        assert said == [1]
        bad = {"missing": num_blocks - 2, "wrong at the beginning": 1, "wrong at the end": num_blocks - 1}[how]
        name = page_name(key(1, bad))
        if how == "missing":
            here.slab.delete([name], deadline=soon())
        else:
            here.frame(name)[header_bytes(NUM_PLANES)] ^= 1
        status = "miss" if how == "missing" else "corrupt"
        results = here.ear.results(here.load(slots))
        assert results == ["hit"] * bad + [status] + ["miss"] * (num_blocks - bad - 1)
        assert said == [1], "who waited was told that it may begin"


def test_who_waits_for_a_layer_hears_that_the_load_was_cancelled(shm: Path) -> None:
    with rig(shm) as here:
        here.saved(range(3))
        held = hold(here, here.staging.into, 4)
        job = here.load([20, 21, 22])
        assert held.arrived.wait(WAIT_S)
        found: list[bool] = []
        waiting = threading.Thread(target=lambda: found.append(here.worker.wait_layer(job, 2, WAIT_S)))
        waiting.start()
        here.cancel(job)
        held.go_on.set()
        waiting.join(WAIT_S)
        assert found == [False]


def test_copied_comes_before_the_last_page_is_published(shm: Path) -> None:
    with rig(shm) as here:
        here.store.gates["publish"].shut()
        job = here.save(range(2))
        here.ear.wait(lambda event: isinstance(event, Copied) and event.job == job)
        here.store.gates["publish"].wait_for_arrival()
        assert not here.ear.ends(job)
        here.store.open()
        assert here.ear.results(job) == ["stored"] * 2


def test_the_next_slice_is_copied_while_one_is_published(shm: Path) -> None:
    with rig(shm) as here:
        here.store.gates["publish"].shut()
        job = here.save(range(6))
        here.store.gates["publish"].wait_for_arrival()
        wait_until(lambda: len(here.staging.out.finished) == 4 * NUM_PLANES)
        assert not here.ear.of(job)
        here.store.open()
        assert here.ear.results(job) == ["stored"] * 6


def test_slices_stand_back_while_the_engine_is_in_a_hurry(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_throttle, "MOST_S", PATIENCE_S)
    with rig(shm) as here:
        here.store.gates["publish"].shut()
        job = here.save(range(6))
        here.store.gates["publish"].wait_for_arrival()  # of the first slice; the second was copied
        here.worker.throttle_saves(on=True)
        wait_until(lambda: len(here.staging.out.finished) == 4 * NUM_PLANES)
        here.store.open()
        names = [page_name(key(1, i)) for i in range(2)]
        wait_until(lambda: all(here.store.store.contains(names, deadline=soon())))
        here.loaded(range(10, 12), range(2))
        assert len(here.staging.out.finished) == 4 * NUM_PLANES
        assert not here.ear.ends(job)
        here.worker.throttle_saves(on=False)
        assert here.ear.results(job) == ["stored"] * 6


# --- stores and staging that fail -------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 1, 2])
def test_staging_that_raises_fails_the_save(shm: Path, at: int) -> None:
    with rig(shm) as here:
        left = [at]

        def fail() -> None:
            left[0] -= 1
            if left[0] < 0:
                raise_trouble()

        here.staging.odd.before = fail
        assert here.ear.failure(here.save(range(6))) is Reason.FAILED
        wait_until(lambda: here.worker._queues["host"]._num_unhurried == 0)
        here.nothing_is_out()
        assert here.held(6) <= 2 * at
        here.staging.odd.before = None
        here.saved(range(6))
        here.loaded(range(20, 26), range(6))


def test_staging_that_raises_fails_the_load(shm: Path) -> None:
    with rig(shm) as here:
        here.saved(range(3))
        here.staging.odd.before = raise_trouble
        assert here.ear.failure(here.load([20, 21, 22])) is Reason.FAILED
        assert here.untouched([20, 21, 22])
        here.staging.odd.before = None
        assert here.ear.failure(here.load([20, 21, 999])) is Reason.FAILED
        assert here.ear.failure(here.save([999], chain=2)) is Reason.FAILED
        here.loaded([20, 21, 22], range(3))


@pytest.mark.parametrize("trouble", [RuntimeError, ResourceClosed, SystemExit])
@pytest.mark.parametrize("call", ADDRESSED)
def test_whatever_a_store_raises_the_job_ends_and_nothing_is_left(
    shm: Path, call: str, trouble: type[BaseException]
) -> None:
    with rig(shm) as here:
        here.saved(range(3))
        here.store.raises[call] = trouble("boom")
        job = here.load(range(20, 23)) if call == "borrow" else here.save(range(6), chain=2)
        if call == "abandon":  # nobody minds: everything is published
            assert here.ear.results(job) == ["stored"] * 6
        else:
            assert here.ear.failure(job) is Reason.FAILED
        wait_until(lambda: here.worker._queues["host"]._num_unhurried == 0)
        here.store.raises.clear()
        here.nothing_is_out()
        assert here.untouched(range(20, 23))
        here.saved(range(6), chain=2)
        here.loaded(range(20, 26), range(6), chain=2)


@pytest.mark.parametrize("layerwise", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 2])
def test_a_load_that_loses_its_store_keeps_the_rows_that_came(shm: Path, layerwise: bool, rows: int) -> None:
    """What was looked up, copied and verified before counts; the rest failed, and its slots are as they were."""
    kept = [0, 64, 64][rows] if layerwise else [0, 16, 48][rows]  # layer by layer, the rest is one row
    with rig(shm, num_slots=600, layerwise=layerwise, in_place_pages=128) as here:
        here.saved(range(270))
        count = len([one for one in here.store.calls if one == "borrow"])

        def lose(found: list[Borrow | Status]) -> list[Borrow | Status]:
            if len([one for one in here.store.calls if one == "borrow"]) - count > rows:
                raise RuntimeError("boom")
            return found

        here.store.answers["borrow"] = lose
        job = here.load(range(300, 570))
        if kept:
            assert here.ear.results(job) == ["hit"] * kept + ["failed"] * (270 - kept)
        else:
            assert here.ear.failure(job) is Reason.FAILED
        assert [here.block(slot) for slot in range(300, 300 + kept)] == [here.was(slot) for slot in range(kept)]
        assert here.untouched(range(300 + kept, 570))
        assert here.metrics.value("moved_bytes_total", direction="out") == kept * FRAME_BYTES
        here.store.answers.clear()
        here.loaded(range(300, 570), range(270))


def test_a_store_lost_in_the_middle_keeps_what_was_published(shm: Path) -> None:
    with rig(shm) as here:

        def lose(found: list[Status]) -> list[Status]:
            here.store.raises["publish"] = RuntimeError("boom")
            return found

        here.store.answers["publish"] = lose
        assert here.ear.results(here.save(range(6))) == ["stored", "stored", "failed"] + ["no_parent"] * 3
        here.store.raises.clear()
        here.store.answers.clear()
        wait_until(lambda: here.worker._queues["host"]._num_unhurried == 0)
        here.nothing_is_out()
        assert here.held(6) == 2
        here.saved(range(6))
        here.loaded(range(20, 26), range(6))


NONSENSE: dict[str, Callable[[list[Any]], Any]] = {
    "short": lambda found: found[:-1],
    "long": lambda found: [*found, found[0]],
    "empty": lambda found: [],
    "none": lambda found: None,
    "text": lambda found: [*found[:-1], "stored"],
    "number": lambda found: [*found[:-1], 1],
    "hit": lambda found: [Status.HIT for _ in found],
    "hit for one": lambda found: [*found[:-1], Status.HIT],
}


@pytest.mark.parametrize("nonsense", NONSENSE)
@pytest.mark.parametrize("call", ["reserve", "publish", "borrow"])
def test_nonsense_for_an_answer_is_a_failure(shm: Path, call: str, nonsense: str) -> None:
    with rig(shm) as here:
        here.saved(range(3))

        def answer(found: list[Any]) -> Any:
            said = NONSENSE[nonsense](found)
            kept = [one for one in found if said is None or not any(one is other for other in said)]
            here.slab.abandon([one for one in kept if isinstance(one, Reservation)], deadline=soon())
            return said

        here.store.answers[call] = answer
        if call == "borrow":
            end = here.ear.end(here.load(range(20, 23)))
            results = list(end.results) if isinstance(end, JobDone) else []
            good = 2 if nonsense in ("short", "hit for one") else 0  # what it did give
            assert results[:3] == [] or results.count(Status.HIT) == good, results
            assert here.untouched(range(20 + good, 23))
        else:
            assert here.ear.failure(here.save(range(6), chain=2)) is Reason.FAILED
        wait_until(lambda: here.worker._queues["host"]._num_unhurried == 0)
        here.store.answers.clear()
        here.nothing_is_out()
        here.saved(range(6), chain=2)
        here.loaded(range(20, 26), range(6), chain=2)


def test_a_reader_takes_no_mere_word_for_a_hit(shm: Path) -> None:
    """The same hole where pages are copied out through a buffer."""
    with rig(shm) as here:
        here.saved(range(2))
        here.store.answers["borrow"] = lambda found: [Status.HIT for _ in found]
        here.staging.far = True
        assert "hit" not in here.ear.results(here.load([20, 21]))
        assert here.untouched([20, 21])


@pytest.mark.parametrize("at", [0, 1])
def test_a_row_ends_where_a_slot_is_refused(shm: Path, at: int) -> None:
    with rig(shm) as here:

        def refuse(found: list[Any]) -> list[Any]:
            if here.store.calls.count("reserve") == 1:
                return found
            here.slab.abandon([found[at]], deadline=soon())  # of the second slice
            return [*found[:at], Status.NO_ROOM, *found[at + 1 :]]

        here.store.answers["reserve"] = refuse
        num_stored = 2 + at
        results = here.ear.results(here.save(range(6)))
        assert results == ["stored"] * num_stored + ["no_room"] + ["no_parent"] * (5 - num_stored)
        assert len(here.staging.out.launched) == num_stored * NUM_PLANES
        wait_until(lambda: here.worker._queues["host"]._num_unhurried == 0)
        here.nothing_is_out()
        here.store.answers.clear()
        assert here.held(6) == num_stored


def test_what_was_not_copied_whole_is_not_published(shm: Path) -> None:
    """Somebody closes staging under a job: its copies end, and nothing says so but they themselves."""
    with rig(shm) as here:
        held = hold(here, here.staging.out, 2 * NUM_PLANES + 1)  # in the last slice
        job = here.save(range(4))
        assert held.arrived.wait(WAIT_S)
        closing = threading.Thread(target=here.staging.close)
        closing.start()
        wait_until(lambda: here.staging.engine._queues[Direction.OUT]._closed)
        held.go_on.set()
        here.ear.end(job)
        closing.join(WAIT_S)
        wait_until(lambda: here.worker._queues["host"]._num_unhurried == 0)
        assert here.held(4) == 2
        here.nothing_is_out()


def test_a_slot_goes_back_when_no_copy_can_write_to_it(shm: Path) -> None:
    with rig(shm) as here:
        held = hold(here, here.staging.out, 2 * NUM_PLANES)  # the second slice is on its way,
        here.store.gates["publish"].shut()
        job = here.save(range(6))
        here.store.gates["publish"].wait_for_arrival()
        assert held.arrived.wait(WAIT_S)
        here.store.raises["publish"] = RuntimeError("boom")  # and the first one cannot be published
        here.store.open()
        wait_until(lambda: here.staging.odd.begun[1].cancelled or "abandon" in here.store.calls)
        assert "abandon" not in here.store.calls, "the slot was given back under the copy"
        held.go_on.set()
        assert here.ear.failure(job) is Reason.FAILED
        assert here.store.calls[-1] == "abandon"
        here.store.raises.clear()
        here.nothing_is_out()


def test_a_row_ends_where_a_page_is_not_published(shm: Path) -> None:
    with rig(shm) as here:

        def late(found: list[Status]) -> list[Status]:
            return [found[0], Status.NO_ROOM]

        here.store.answers["publish"] = late
        assert here.ear.results(here.save(range(6))) == ["stored", "no_room"] + ["no_parent"] * 4
        assert here.store.calls.count("publish") == 1
        wait_until(lambda: here.worker._queues["host"]._num_unhurried == 0)
        here.nothing_is_out()


def test_what_another_published_meanwhile_is_there(shm: Path) -> None:
    with rig(shm, odd=True) as here, open_local(LocalStoreConfig(directory=shm / "store")) as other:
        assert isinstance(other, MappedStore)
        here.store.gates["reserve"].shut()
        job = here.save(range(3))
        here.store.gates["reserve"].wait_for_arrival()
        frame = memoryview(bytearray(FRAME_BYTES))
        frame[header_bytes(NUM_PLANES) :] = here.was(0)
        meta = PageMeta(key=key(1, 0), identity=IDENTITY, parent=key(1, -1), depth=0, valid_tokens=4, tenant=TENANT)
        seal(frame, meta, LAYOUT, now_ms=1)
        assert other.put([(meta.name, frame)], deadline=soon()) == [Status.STORED]
        here.store.open()
        assert here.ear.results(job) == ["exists", "stored", "stored"]
        here.loaded(range(20, 23), range(3))


# --- calls that hang --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["reserve", "publish", "borrow"])
def test_a_call_that_hangs_makes_the_job_late_and_gives_all_back_later(shm: Path, call: str) -> None:
    clock = FakeClock()
    with rig(shm, clock=clock) as here:
        here.saved(range(3))
        here.store.gates[call].shut()
        job = here.load(range(20, 23), within_s=5) if call == "borrow" else here.save(range(6), chain=2, within_s=5)
        here.store.gates[call].wait_for_arrival()
        wait_until(lambda: len(here.staging.out.finished) == len(here.staging.out.launched))
        wait_until(lambda: not here.worker._ledger.live[job].copying)
        here.pass_time(6)
        assert here.ear.failure(job) is Reason.LATE
        here.store.open()
        wait_until(lambda: here.worker._queues["host"].num_stuck == 0)
        here.nothing_is_out()
        assert here.untouched(range(20, 23))
        here.saved(range(6), chain=2)
        here.loaded(range(20, 26), range(6), chain=2)


def test_a_row_that_hangs_behind_one_that_failed_is_told_of(shm: Path) -> None:
    """The job waits for both: neither may land when it is over, and somebody must hear that one does not return."""
    with rig(shm, layerwise=False, grace_s=0.1, place_bytes=1 << 20) as here:
        here.saved(range(20))
        hangs, both = threading.Event(), threading.Event()
        num_begun = 0

        def finish(_: object) -> None:
            nonlocal num_begun
            num_begun += 1
            if num_begun == 1:
                assert both.wait(PATIENCE_S)
                raise RuntimeError("the device is gone for a moment")
            assert hangs.wait(PATIENCE_S)

        here.staging.into.on_finish = finish
        before = here.staging.odd.rows
        job = here.load(range(30, 50), within_s=0.5)  # two rows
        wait_until(lambda: before[-2:] == [16, 4])
        both.set()
        wait_until(lambda: any(isinstance(event, Stuck) for event in here.ear.of(job)))
        assert not here.ear.ends(job), "its slots may still be written to"
        hangs.set()
        end = here.ear.end(job)
        assert isinstance(end, JobFailed)
        here.ear.events[:] = [one for one in here.ear.events if not isinstance(one, Stuck)]  # as `finish` wants it


def test_a_device_that_failed_under_a_copy_does_not_speak_against_the_store(shm: Path) -> None:
    with rig(shm, layerwise=False, place_bytes=1 << 20) as here:
        here.saved(range(20))
        num_begun = 0

        def finish(_: object) -> None:
            nonlocal num_begun
            num_begun += 1
            if num_begun == 1:
                wait_until(lambda: here.staging.odd.rows[-2:] == [16, 4])
                raise RuntimeError("the device is gone for a moment")

        here.staging.into.on_finish = finish
        end = here.ear.end(here.load(range(30, 50)))
        assert isinstance(end, JobFailed)
        assert end.on_device


def test_a_publish_that_hangs_while_the_next_slice_is_copied(shm: Path) -> None:
    """The copy holds the job up, the store's call must not: it ends LATE when the copy is over."""
    clock = FakeClock()
    with rig(shm, clock=clock) as here:
        held = hold(here, here.staging.out, 2 * NUM_PLANES)  # the second slice
        here.store.gates["publish"].shut()
        job = here.save(range(6), within_s=5)
        behind = here.save(range(6), chain=2, within_s=5)  # saves are done one at a time
        here.store.gates["publish"].wait_for_arrival()
        assert held.arrived.wait(WAIT_S)
        here.pass_time(6)
        assert here.ear.failure(behind) is Reason.LATE  # so the watchdog has looked
        assert not here.ear.ends(job)
        held.go_on.set()
        assert here.ear.failure(job) is Reason.LATE
        assert here.worker._queues["host"].num_stuck == 1
        here.loaded([], [])
        here.store.open()
        wait_until(lambda: here.worker._queues["host"].num_stuck == 0)
        here.nothing_is_out()
        assert here.held(6) <= 2
        here.saved(range(6))
        here.loaded(range(20, 26), range(6))


def test_a_save_cancelled_while_its_store_hangs_ends_with_its_copies(shm: Path) -> None:
    with rig(shm) as here:
        held = hold(here, here.staging.out, 2 * NUM_PLANES)
        here.store.gates["publish"].shut()
        job = here.save(range(6))
        here.store.gates["publish"].wait_for_arrival()
        assert held.arrived.wait(WAIT_S)
        here.cancel(job)
        assert not here.ear.ends(job)
        held.go_on.set()
        assert here.ear.failure(job) is Reason.CANCELLED
        here.store.open()
        wait_until(lambda: here.worker._queues["host"]._num_unhurried == 0)
        here.nothing_is_out()
        here.saved(range(6))


# --- two processes ----------------------------------------------------------------------------------------------------

NUM_CHAINS, LONGEST = 12, 5
LARGE = opaque_layout((40_000, 60_000, 33_001), 4)
SMALL_BYTES = 8 << 20  # fewer than all of their pages
SMALL: dict[str, Any] = {"layout": LARGE, "limit_bytes": SMALL_BYTES, "num_slots": 32}


def fill(here: Rig, slot: int, chain: int, depth: int) -> None:
    """A block whose every byte follows from its name."""
    rng = random.Random(1000 * chain + depth)
    for row in here.planes.rows:
        row[slot] = torch.frombuffer(bytearray(rng.randbytes(row.shape[1])), dtype=torch.uint8)


def wanted(chain: int, depth: int) -> bytes:
    rng = random.Random(1000 * chain + depth)
    return b"".join(rng.randbytes(size) for size in LARGE.plane_bytes)


def serve(here: Rig, rng: random.Random, num_turns: int) -> int:
    """Save and load chains that others save and load, too. Returns the hits; AssertionError for a wrong byte."""
    hits = 0
    for _ in range(num_turns):
        chain, length = rng.randrange(NUM_CHAINS), rng.randint(1, LONGEST)
        if rng.random() < 0.5:
            for depth in range(length):
                fill(here, depth, chain, depth)
            statuses = here.ear.results(here.save(range(length), chain=chain))
            assert set(statuses) <= {"stored", "exists", "no_parent", "no_room", "late"}
        else:
            results = here.ear.results(here.load(range(20, 20 + length), chain=chain))
            assert not {"corrupt", "foreign", "short", "stale"} & set(results), results
            for depth, result in enumerate(results):
                assert result != "hit" or here.block(20 + depth) == wanted(chain, depth), "a wrong byte"
            hits += results.count(Status.HIT)
    return hits


def evict(here: Rig) -> None:
    """Put so many pages that slots are wanted which dead processes had reserved."""
    number = 2000
    while not here.slab.metrics.value("local_evicted_pages_total", medium="memory") or number < 2100:
        page = sample_page(number, plane_bytes=LARGE.plane_bytes)
        assert here.slab.put([page.item], deadline=soon()) == [Status.STORED]
        number += 1


@contextmanager
def child(work: Callable[[Callable[[bytes], None]], None]) -> Iterator[tuple[int, int]]:
    """Another process, made before this one has threads: its number, and where what it says can be read."""
    source, sink = os.pipe()
    pid = os.fork()
    if pid == 0:  # pragma: no cover  reports through the pipe
        code = 1
        with suppress(BaseException):
            os.close(source)
            torch.set_num_threads(1)  # those that torch had did not come with us
            work(lambda said: void(os.write(sink, said)))
            code = 0
        os._exit(code)
    os.close(sink)
    try:
        yield pid, source
    finally:
        os.close(source)
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def void(_: object) -> None:
    pass


def hear(source: int, number: int = 1) -> bytes:
    said = b""
    until_s = time.monotonic() + WAIT_S
    while len(said) < number:
        ready, _, _ = select.select([source], [], [], max(0.0, until_s - time.monotonic()))
        assert ready, "the other process is silent"
        found = os.read(source, number - len(said))
        assert found, "the other process is gone"
        said += found
    return said


@pytest.mark.parametrize("at", [0, 1, 4, 6, 8, 13, 14])
def test_killed_in_the_middle_of_a_save_nothing_wrong_is_left(shm: Path, at: int) -> None:
    def save_and_stop(say: Callable[[bytes], None]) -> None:  # pragma: no cover
        here = Rig(shm / "store", **SMALL)

        def stop() -> None:
            say(b".")
            time.sleep(WAIT_S)

        for depth in range(LONGEST):
            fill(here, depth, 1, depth)
        here.staging.out.on_finish = at_call(at, stop)
        here.save(range(LONGEST))
        time.sleep(WAIT_S)

    with child(save_and_stop) as (pid, source), rig(shm, **SMALL) as here:
        hear(source)
        results = here.ear.results(here.load(range(20, 20 + LONGEST)))
        hits = results.count(Status.HIT)  # it may publish what it has, while it stands where it does
        assert results == ["hit"] * hits + ["miss"] * (LONGEST - hits)
        assert [here.block(20 + depth) for depth in range(hits)] == [wanted(1, depth) for depth in range(hits)]
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert hits <= here.held(LONGEST) <= at // NUM_PLANES
        for depth in range(LONGEST):
            fill(here, depth, 1, depth)
        here.saved(range(LONGEST))
        assert here.ear.results(here.load(range(20, 20 + LONGEST))) == ["hit"] * LONGEST
        assert [here.block(20 + depth) for depth in range(LONGEST)] == [wanted(1, depth) for depth in range(LONGEST)]
        evict(here)
        here.nothing_is_out()


def test_two_processes_on_one_slab_and_one_is_killed_again_and_again(shm: Path) -> None:
    def serve_for_ever(seed: int) -> Callable[[Callable[[bytes], None]], None]:
        def work(say: Callable[[bytes], None]) -> None:  # pragma: no cover
            here = Rig(shm / "store", odd=False, **SMALL)
            rng = random.Random(seed)
            try:
                while True:
                    serve(here, rng, 5)
                    say(b".")
            except BaseException:
                say(b"!")
                raise

        return work

    rng = random.Random(3)
    for turn in range(4):
        with child(serve_for_ever(2 * turn)) as (pid, source), child(serve_for_ever(2 * turn + 1)) as (_, other):
            said = hear(source, rng.randint(1, 4)) + hear(other, 2)
            os.kill(pid, signal.SIGKILL)
            said += hear(other, 6)
            assert set(said) == set(b".")
    with rig(shm, odd=False, **SMALL) as here:
        assert serve(here, rng, 60) > 0
        evict(here)
