"""Loads from a disk that several threads read: bit for bit, verified once, and no page is used before all let go."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from headwater.build import open_local
from headwater.config.stores import LocalStoreConfig
from headwater.core.events import Event, JobDone, JobFailed, Load, Save
from headwater.core.page import page_name
from headwater.core.results import Reason
from headwater.layout.frame import frame_bytes
from headwater.layout.spec import opaque_layout
from headwater.storage import arriving
from headwater.storage.arriving import ArrivingPages
from headwater.storage.local import LocalStore, reading
from headwater.storage.local.slab import Slab
from headwater.storage.memory import MemoryStore
from headwater.storage.verified import VerifiedStore
from headwater.testing.clock import FakeClock
from headwater.testing.layouts import randomise
from headwater.testing.pages import IDENTITY
from headwater.testing.stores import soon
from headwater.transfer.device.arena import DeviceCache, create_host_cache, create_kv_cache
from headwater.transfer.executor import jobs
from headwater.transfer.executor.staging import TorchStaging
from headwater.transfer.executor.worker import Worker
from worker_kit import FRAME_BYTES, PATIENCE_S, TENANT, Ear, Gate, OddStore, Rig, key, keys, odd, rigs, wait_until

LIMIT_BYTES = 16 << 20
LAYOUT = opaque_layout((640, 100, 333), 4)
NUM_BLOCKS = 20


@pytest.fixture
def make() -> Iterator[Callable[..., Rig]]:
    """Makes rigs, and finishes them."""
    yield from rigs()


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of the tests are small: cut all the same, and shared."""
    monkeypatch.setattr(reading, "UNIT_BYTES", 400)
    monkeypatch.setattr(reading, "SHARE_BYTES", 1)
    monkeypatch.setattr(arriving, "PIECE_BYTES", 300)


def disk(path: Path, *, readers: int = 3) -> LocalStore:
    store = open_local(LocalStoreConfig(directory=path, limit_bytes=LIMIT_BYTES, readers=readers))
    assert type(store) is LocalStore
    return store


def hang_at(monkeypatch: pytest.MonkeyPatch, store: LocalStore, block: int) -> Gate:
    """A gate before the read of a block of the first chain: shut."""
    gate, real = Gate(), Slab.read_into
    gate.shut()
    attachment = store._attachment
    assert attachment is not None
    place = attachment.catalog.mirror.places[page_name(key(1, block))]

    def braked(slab: Slab, offset: int, buffer: memoryview) -> bool:
        if place.offset <= offset < place.offset + place.num_bytes and len(buffer) > 256:
            gate()
        return real(slab, offset, buffer)

    monkeypatch.setattr(Slab, "read_into", braked)
    return gate


# --- through pages, verified there ------------------------------------------------------------------------------------


@pytest.mark.parametrize("readers", [1, 2, 5])
@pytest.mark.parametrize("num_pages", [8, 64])
def test_what_was_saved_is_loaded_promoted_and_demoted(
    make: Callable[..., Rig], tmp_path: Path, readers: int, num_pages: int
) -> None:
    rig = make({"disk": disk(tmp_path / "disk", readers=readers), "host": MemoryStore(64 << 20)}, num_pages=num_pages)
    rig.saved(range(NUM_BLOCKS), store="disk")
    rig.loaded(range(100, 100 + NUM_BLOCKS), range(NUM_BLOCKS), store="disk")
    assert rig.ear.results(rig.promote(NUM_BLOCKS, "host", store="disk")) == ["stored"] * NUM_BLOCKS
    rig.loaded(range(150, 150 + NUM_BLOCKS), range(NUM_BLOCKS), store="host")
    rig.saved(range(30, 50), chain=2, store="host")
    assert rig.ear.results(rig.demote(20, "disk", chain=2, store="host")) == ["stored"] * 20
    rig.loaded(range(200, 220), range(30, 50), chain=2, store="disk")


@pytest.mark.parametrize("end", ["late", "cancelled"])
def test_a_reader_that_hangs_ends_its_job_and_no_page_of_it_is_used_before_all_have_let_go(
    make: Callable[..., Rig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    clock = FakeClock()
    store = disk(tmp_path / "disk")
    rig = make({"disk": store, "host": MemoryStore(64 << 20)}, clock=clock, num_pages=32, slice_pages=8)
    rig.saved(range(8), store="disk")
    rig.saved(range(8), store="host")
    gate = hang_at(monkeypatch, store, 1)
    job = rig.load(range(100, 108), store="disk", within_s=5)
    gate.wait_for_arrival()
    held = rig.worker.num_held_pages
    assert held > 1
    if end == "late":
        rig.pass_time(6)
        assert rig.ear.failure(job) is Reason.LATE
    else:
        rig.cancel(job)
        assert rig.ear.failure(job) is Reason.CANCELLED
    assert rig.worker.num_held_pages >= held, "its readers have not let go"
    for start in range(200, 240, 8):
        rig.loaded(range(start, start + 8), range(8), store="host")
    assert rig.worker.num_held_pages >= held
    scattered = len(rig.staging.scattered)
    gate.open()
    wait_until(lambda: rig.worker.num_held_pages == 0)
    assert len(rig.staging.scattered) == scattered
    assert rig.untouched(range(100, 108))
    rig.loaded(range(100, 108), range(8), store="disk")


def test_a_demotion_has_few_bytes_in_hand_and_stands_back_for_loads(
    make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "DEMOTE_BYTES", 2 * FRAME_BYTES)
    monkeypatch.setattr(jobs, "STAND_BACK_S", PATIENCE_S)
    rig = make({"host": OddStore(), "disk": OddStore()}, slice_pages=8)
    rig.saved(range(4), chain=2, store="disk")
    rig.saved(range(9))
    target = odd(rig, "disk")
    target.gates["get_into"].shut()
    load = rig.load(range(100, 104), chain=2, store="disk")
    target.gates["get_into"].wait_for_arrival()
    target.asked.clear()
    demotion = rig.demote(9, "disk")
    wait_until(lambda: "contains" in target.calls())
    assert not rig.ear.ends(demotion)
    assert "put" not in target.calls(), "somebody waits for this store"
    target.gates["get_into"].open()
    assert rig.ear.results(load) == ["hit"] * 4
    assert rig.ear.results(demotion) == ["stored"] * 9
    assert [len(names) for call, names in target.asked if call == "put"] == [2, 2, 2, 2, 1]


def test_a_demotion_does_not_wait_for_loads_for_ever(make: Callable[..., Rig]) -> None:
    rig = make({"host": OddStore(), "disk": OddStore()}, slice_pages=8)
    rig.saved(range(4), chain=2, store="disk")
    rig.saved(range(9))
    odd(rig, "disk").gates["get_into"].shut()
    load = rig.load(range(100, 104), chain=2, store="disk")
    odd(rig, "disk").gates["get_into"].wait_for_arrival()
    assert rig.ear.results(rig.demote(9, "disk")) == ["stored"] * 9
    assert not rig.ear.ends(load)


# --- checked where they arrive ----------------------------------------------------------------------------------------


class TorchRig:
    """A worker between a device of torch and a store on a disk."""

    def __init__(self, store: LocalStore, device: DeviceCache, staging: TorchStaging, **options: Any) -> None:
        self.store = store
        self.device = device
        self.staging = staging
        self.ear = Ear()
        self.worker = Worker(
            {"disk": store},
            staging,
            **{
                "layout": LAYOUT,
                "identity": IDENTITY,
                "block_tokens": LAYOUT.block_tokens,
                "deliver": self.ear,
                **options,
            },
        )
        self._job = 0

    def save(self, slots: Sequence[int]) -> None:
        self._job += 1
        order = Save(
            job=self._job,
            store="disk",
            keys=keys(1, len(slots)),
            deadline_s=soon().at_s,
            slots=tuple(slots),
            parent=key(1, -1),
            depth=0,
            tenant=TENANT,
        )
        self.worker.submit([order])
        assert self.ear.results(self._job) == ["stored"] * len(slots)

    def load(self, slots: Sequence[int]) -> int:
        self._job += 1
        order = Load(
            job=self._job,
            store="disk",
            keys=keys(1, len(slots)),
            deadline_s=soon().at_s,
            slots=tuple(slots),
        )
        self.worker.submit([order])
        return self._job

    def same(self, slots: Sequence[int], as_in: Sequence[int]) -> bool:
        return all(torch.equal(row[list(slots)], row[list(as_in)]) for row in self.device.rows)

    def held(self) -> list[bool]:
        return self.store.contains([page_name(one) for one in keys(1, NUM_BLOCKS)], deadline=soon())


@contextmanager
def torch_rig(path: Path, *, num_pages: int = 16, **options: Any) -> Iterator[TorchRig]:
    with (
        create_kv_cache(LAYOUT, 3 * NUM_BLOCKS, "cpu") as device,
        create_host_cache(frame_bytes(LAYOUT.plane_bytes), num_pages) as pages,
        TorchStaging(device, pages) as staging,
        disk(path) as store,
    ):
        randomise(device, seed=4)
        rig = TorchRig(store, device, staging, **options)
        try:
            yield rig
        finally:
            assert rig.worker.close(PATIENCE_S)
            assert rig.worker.num_held_pages == 0


FIRST, SECOND = range(NUM_BLOCKS), range(NUM_BLOCKS, 2 * NUM_BLOCKS)


@pytest.mark.parametrize("num_pages", [2, 16, 64])
def test_bytes_from_a_disk_are_digested_once_where_they_arrive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_pages: int
) -> None:
    def twice(*_: object) -> None:
        raise AssertionError("digested on the way")

    with torch_rig(tmp_path / "disk", num_pages=num_pages) as rig:
        rig.save(FIRST)
        monkeypatch.setattr(ArrivingPages, "digest_piece", twice)
        monkeypatch.setattr(VerifiedStore, "_judge", twice)
        job = rig.load(SECOND)
        assert rig.ear.results(job) == ["hit"] * NUM_BLOCKS
        assert rig.same(SECOND, FIRST)
        end = rig.ear.end(job)
        assert isinstance(end, JobDone)
        assert end.num_bytes == NUM_BLOCKS * frame_bytes(LAYOUT.plane_bytes)


@pytest.mark.parametrize("block", [0, 7, NUM_BLOCKS - 1])
@pytest.mark.parametrize("where", ["header", "payload"])
def test_a_bad_page_is_found_where_it_arrives_and_is_removed(tmp_path: Path, block: int, where: str) -> None:
    with torch_rig(tmp_path / "disk") as rig:
        rig.save(FIRST)
        attachment = rig.store._attachment
        assert attachment is not None
        at = attachment.catalog.mirror.places[page_name(key(1, block))].offset
        at += 70 if where == "header" else frame_bytes(LAYOUT.plane_bytes) - 1
        attachment.slab.write(at, bytes([attachment.slab.read(at, 1)[0] ^ 4]))
        results = rig.ear.results(rig.load(SECOND))
        assert results == ["hit"] * block + ["corrupt"] + ["miss"] * (NUM_BLOCKS - block - 1)
        assert rig.same(SECOND[:block], FIRST[:block])
        assert rig.held() == [True] * block + [False] * (NUM_BLOCKS - block)


def test_a_copy_that_spoils_a_good_page_is_the_device_s_fault(tmp_path: Path) -> None:
    """The page stays: the store has nothing to do with it."""
    with torch_rig(tmp_path / "disk") as rig:
        rig.save(FIRST)
        real = rig.staging.engine.scatter

        def spoiling(frames: Sequence[memoryview], slots: Sequence[int], **more: Any) -> Any:
            frames[0][-1] ^= 1
            try:
                transfer = real(frames, slots, **more)
                assert transfer.wait(PATIENCE_S)
            finally:
                frames[0][-1] ^= 1
            return transfer

        rig.staging.engine.scatter = spoiling  # type: ignore[method-assign]
        event: Event = rig.ear.end(rig.load(SECOND))
        assert isinstance(event, JobFailed)
        assert event.on_device
        assert "not what its page is" in event.why
        assert all(rig.held())
        del rig.staging.engine.scatter
        assert rig.ear.results(rig.load(SECOND)) == ["hit"] * NUM_BLOCKS
        assert rig.same(SECOND, FIRST)
