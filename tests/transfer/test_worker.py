"""The executor: bytes come back bit for bit, results say what happened, and who is waited for goes first."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from headwater.build import open_local
from headwater.config.stores import LocalStoreConfig
from headwater.core.errors import InvalidInput
from headwater.core.events import Copied, Event, JobDone, Load, Save
from headwater.core.page import page_name
from headwater.core.results import Reason, Status
from headwater.layout.frame import Header, frame_bytes, parse
from headwater.layout.shard import Shard
from headwater.storage.base import Store
from headwater.storage.local import MappedStore
from headwater.storage.memory import MemoryStore
from headwater.testing.clock import FakeClock
from headwater.testing.faulty_stores import Faults, FaultyStore
from headwater.testing.layouts import randomise
from headwater.testing.pages import IDENTITY
from headwater.testing.samples import sample_layouts
from headwater.testing.stores import soon
from headwater.transfer.device.arena import create_host_cache, create_kv_cache
from headwater.transfer.executor import save_throttle
from headwater.transfer.executor.staging import TorchStaging
from headwater.transfer.executor.worker import Worker
from worker_kit import (
    CALLS,
    FRAME_BYTES,
    LAYOUT,
    PATIENCE_S,
    TENANT,
    OddStore,
    Rig,
    key,
    keys,
    odd,
    rigs,
    slowly,
    wait_until,
)

LIMIT_BYTES = 16 << 20


def frame_of(store: Store, name: bytes) -> bytes:
    """What a store holds under a name."""
    buffer = memoryview(bytearray(FRAME_BYTES))
    assert store.get_into([(name, buffer)], deadline=soon()) == [Status.HIT]  # type: ignore[list-item]
    return bytes(buffer)


@pytest.fixture
def make() -> Iterator[Callable[..., Rig]]:
    """Makes rigs, and finishes them."""
    yield from rigs()


# --- bytes ------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["memory", "tmpfs", "disk", "metered tmpfs"])
def store(request: pytest.FixtureRequest, shm: Path, tmp_path: Path) -> Store:
    if request.param == "memory":
        return MemoryStore(64 << 20)
    path = (tmp_path if request.param == "disk" else shm) / "store"
    local = open_local(LocalStoreConfig(directory=path, limit_bytes=LIMIT_BYTES))
    assert isinstance(local, MappedStore) == ("tmpfs" in request.param)
    return local if request.param != "metered tmpfs" else FaultyStore(local, Faults())


def test_device_to_store_to_device_bit_for_bit(make: Callable[..., Rig], store: Store) -> None:
    rig = make({"host": store}, slice_pages=32, num_pages=40)
    source, target = list(range(70)), list(range(200, 130, -1))
    rig.saved(source)
    rig.loaded(target, source)
    assert [rig.ear.results(rig.probe(71))[i] for i in (0, 69, 70)] == ["held", "held", "absent"]


def test_promoted_frames_are_the_same_frames(make: Callable[..., Rig], shm: Path) -> None:
    host = open_local(LocalStoreConfig(directory=shm / "store", limit_bytes=LIMIT_BYTES))
    disk = OddStore()
    rig = make({"disk": disk, "host": host}, slice_pages=4)
    rig.saved(range(10), store="disk")
    assert rig.ear.results(rig.promote(10, "host", store="disk")) == ["stored"] * 10
    for name in map(page_name, keys(1, 10)):
        assert frame_of(host, name) == frame_of(disk, name)
    rig.loaded(range(100, 110), range(10))


def test_frames_say_what_the_instruction_said(make: Callable[..., Rig]) -> None:
    rig = make(shard=Shard(1, 2), part=77)
    rig.saved(range(3))
    rig.saved(range(3, 5), start=3)
    for depth in range(5):
        header = parse(memoryview(frame_of(odd(rig), page_name(key(1, depth), 1, 2, part=77))))
        assert isinstance(header, Header)
        meta = header.meta
        assert (meta.identity, meta.tenant, meta.depth) == (IDENTITY, TENANT, depth)
        assert (meta.key, meta.parent) == (key(1, depth), key(1, depth - 1))
        assert (meta.valid_tokens, meta.expires_at_ms) == (LAYOUT.block_tokens, 0)


@pytest.mark.parametrize("seed", range(3))
def test_a_faulty_store_gives_right_bytes_or_none(make: Callable[..., Rig], seed: int) -> None:
    faults = Faults(get_fails=0.02, get_misses=0.02, flips_byte=0.04, cuts_tail=0.04, swaps_page=0.04)
    faulty = FaultyStore(MemoryStore(64 << 20), faults, seed=seed)
    rig = make({"host": faulty}, slice_pages=8)
    num_hits = 0
    for _ in range(20):
        rig.ear.end(rig.save(range(40)))  # once more what was thrown out
        rig.staging.device[100:140] = 0
        results = rig.ear.results(rig.load(range(100, 140)))
        hits = next((i for i, one in enumerate(results) if one != "hit"), 40)
        assert all(rig.staging.block(100 + i) == rig.staging.block(i) for i in range(hits))
        assert not rig.staging.device[100 + hits : 140].any(), "what was no hit was written to a slot"
        assert set(results[hits + 1 :]) <= {"miss"}
        num_hits += hits
    assert faulty.num_injected
    assert num_hits


@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
@pytest.mark.parametrize("name", sample_layouts())
def test_through_torch_every_layout_comes_back(shm: Path, name: str, device: str) -> None:
    layout = sample_layouts()[name]
    there, back = [7, 0, 3, 9, 4], [1, 8, 2, 6, 5]
    size = frame_bytes(layout.plane_bytes)
    ends: list[Event] = []
    config = LocalStoreConfig(directory=shm / "store", limit_bytes=32 * size + (8 << 20))
    with (
        open_local(config) as host,
        create_kv_cache(layout, 10, device) as cache,
        create_host_cache(size, 3) as pages,
        TorchStaging(cache, pages) as staging,
    ):
        randomise(cache, seed=1)
        before = [row.cpu().clone() for row in cache.rows]
        facts = {"layout": layout, "identity": IDENTITY, "block_tokens": layout.block_tokens}
        worker = Worker({"host": host}, staging, **facts)  # type: ignore[arg-type]
        worker.deliver = ends.append
        job = {"store": "host", "keys": keys(1, 5), "deadline_s": time.monotonic() + PATIENCE_S}
        worker.submit([Save(job=1, slots=tuple(there), parent=key(1, -1), depth=0, tenant=TENANT, **job)])  # type: ignore[arg-type]
        assert worker.drain(PATIENCE_S)
        worker.submit([Load(job=2, slots=tuple(back), **job)])  # type: ignore[arg-type]
        assert worker.drain(PATIENCE_S)
        assert worker.close()
        results = [event.results for event in ends if isinstance(event, JobDone)]
        assert results == [("stored",) * 5, ("hit",) * 5]
        for row, old in zip(cache.rows, before, strict=True):
            assert torch.equal(row.cpu()[back], old[there])
            assert torch.equal(row.cpu()[there], old[there])


def test_staging_refuses_pages_of_another_size() -> None:
    layout = next(iter(sample_layouts().values()))
    with (
        create_kv_cache(layout, 2) as cache,
        create_host_cache(layout, 2) as pages,
        pytest.raises(InvalidInput, match="a frame of this layout"),
    ):
        TorchStaging(cache, pages)


def test_the_worker_does_without_torch() -> None:
    code = "import sys, headwater.transfer.executor.worker, headwater.testing.device; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- results ----------------------------------------------------------------------------------------------------------


def test_a_load_stops_at_the_first_block_that_is_not_there(make: Callable[..., Rig]) -> None:
    rig = make(slice_pages=4)
    rig.saved(range(10))
    job = rig.load(range(100, 120))
    assert rig.ear.results(job) == ["hit"] * 10 + ["miss"] * 10
    assert [len(names) for call, names in odd(rig).asked if call == "get_into"] == [4, 4, 4]
    assert rig.untouched(range(110, 120))
    end = rig.ear.end(job)
    assert isinstance(end, JobDone)
    assert end.num_bytes == 10 * FRAME_BYTES


def test_a_bad_page_is_said_and_what_follows_is_not_used(make: Callable[..., Rig]) -> None:
    store = OddStore()

    def spoil(found: list[Status]) -> list[Status]:
        store.buffers[2][-1] ^= 1
        return found

    rig = make({"host": store})
    rig.saved(range(6))
    store.answers["get_into"] = spoil
    assert rig.ear.results(rig.load(range(100, 106))) == ["hit", "hit", "corrupt", "miss", "miss", "miss"]
    assert rig.untouched(range(102, 106))


def test_a_load_whose_deadline_passes_between_slices_keeps_its_hits(make: Callable[..., Rig]) -> None:
    clock = FakeClock()
    rig = make(slice_pages=4, clock=clock)
    rig.saved(range(12))
    rig.staging.on_scatter = lambda slot, _: clock.advance(1.0) if slot == 107 else None
    assert rig.ear.results(rig.load(range(100, 112), within_s=0.5)) == ["hit"] * 8 + ["late"] * 4
    assert rig.untouched(range(108, 112))
    assert odd(rig).calls().count("get_into") == 2


def test_bytes_that_came_after_the_deadline_are_not_used(make: Callable[..., Rig]) -> None:
    clock = FakeClock()
    rig = make(clock=clock)
    rig.saved(range(4))
    odd(rig).answers["get_into"] = slowly(clock)
    assert rig.ear.results(rig.load(range(100, 104), within_s=0.9)) == ["late"] * 4
    assert rig.untouched(range(100, 104))


def test_a_save_gathers_only_what_is_missing_and_says_copied_once(make: Callable[..., Rig]) -> None:
    rig = make(slice_pages=4)
    rig.saved(range(6))
    rig.staging.gathered.clear()
    job = rig.save([*range(50, 56), *range(6, 12)])
    assert rig.ear.results(job) == ["exists"] * 6 + ["stored"] * 6
    assert [slot for slot, _ in rig.staging.gathered] == list(range(6, 12))
    assert [type(event) for event in rig.ear.of(job)] == [Copied, JobDone]
    again = rig.save(range(12))
    assert rig.ear.results(again) == ["exists"] * 12
    assert len(rig.staging.gathered) == 6
    assert [type(event) for event in rig.ear.of(again)] == [Copied, JobDone]
    rig.loaded(range(100, 112), range(12))


def test_a_page_in_the_middle_that_is_there_keeps_the_order(make: Callable[..., Rig]) -> None:
    rig = make(slice_pages=3)
    odd(rig).answers["contains"] = lambda found: [i in (1, 4) for i in range(len(found))]  # a store without parents
    rig.ear.end(rig.save(range(8)))
    puts = [names for call, names in odd(rig).asked if call == "put"]
    assert puts[0] == [page_name(key(1, i)) for i in (0, 2, 3)]


def test_copied_comes_before_the_last_put_is_through(make: Callable[..., Rig]) -> None:
    rig = make(slice_pages=4)
    rig.saved(range(4))
    odd(rig).gates["put"].shut()
    job = rig.save(range(8))
    rig.ear.wait(lambda event: isinstance(event, Copied) and event.job == job)
    assert not rig.ear.ends(job)
    odd(rig).open()
    assert rig.ear.results(job) == ["exists"] * 4 + ["stored"] * 4


def test_a_save_stops_behind_the_first_page_that_is_not_held(make: Callable[..., Rig]) -> None:
    rig = make(slice_pages=4)
    odd(rig).answers["put"] = lambda found: [Status.NO_ROOM if i == 2 else one for i, one in enumerate(found)]
    job = rig.save(range(12))
    assert rig.ear.results(job) == ["stored", "stored", "no_room", "stored"] + ["no_parent"] * 8
    assert odd(rig).calls().count("put") == 1
    assert len(rig.staging.gathered) == 4
    assert [type(event) for event in rig.ear.of(job)] == [Copied, JobDone]


def test_a_save_whose_deadline_passes_between_slices_keeps_what_it_stored(make: Callable[..., Rig]) -> None:
    clock = FakeClock()
    rig = make(slice_pages=4, clock=clock)
    rig.staging.on_gather = lambda slot, _: clock.advance(1.0) if slot == 7 else None
    job = rig.save(range(12), within_s=0.5)
    assert rig.ear.results(job) == ["stored"] * 4 + ["late"] * 8
    assert odd(rig).calls().count("put") == 1


def test_a_promotion_says_what_it_could_not_read_and_what_was_not_kept(make: Callable[..., Rig]) -> None:
    rig = make({"disk": OddStore(), "host": OddStore()}, slice_pages=4)
    rig.saved(range(6), store="disk")
    assert rig.ear.results(rig.promote(10, "host", store="disk")) == ["stored"] * 6 + ["failed"] * 4
    assert rig.ear.results(rig.promote(6, "host", store="disk")) == ["exists"] * 6
    rig.saved(range(12), store="disk", chain=2)
    odd(rig).answers["put"] = lambda found: [Status.NO_ROOM for _ in found]
    job = rig.promote(12, "host", store="disk", chain=2)
    assert rig.ear.results(job) == ["no_room"] * 4 + ["no_parent"] * 8


def test_a_promotion_that_runs_out_of_time_is_late_for_the_rest(make: Callable[..., Rig]) -> None:
    clock = FakeClock()
    rig = make({"disk": OddStore(), "host": OddStore()}, slice_pages=4, clock=clock)
    rig.saved(range(12), store="disk")
    odd(rig).answers["put"] = slowly(clock)
    assert rig.ear.results(rig.promote(12, "host", store="disk", within_s=0.9)) == ["stored"] * 4 + ["late"] * 8


def test_jobs_of_nothing_end_too(make: Callable[..., Rig]) -> None:
    rig = make({"host": OddStore(), "disk": OddStore()})
    jobs = [rig.probe(0), rig.load([]), rig.save([]), rig.promote(0, "disk")]
    assert [rig.ear.results(job) for job in jobs] == [[]] * 4


# --- order ------------------------------------------------------------------------------------------------------------


def test_looks_and_loads_pass_saves_and_promotions_hold_up_nobody(make: Callable[..., Rig]) -> None:
    rig = make({"host": OddStore(), "disk": OddStore()}, threads_per_store=1)
    rig.saved(range(2))
    odd(rig).gates["contains"].shut()
    first = rig.probe(1)
    odd(rig).gates["contains"].wait_for_arrival()
    waiting = [
        *(rig.save(range(2), chain=2), rig.save(range(2), chain=3), rig.promote(2, "disk"), rig.promote(1, "disk")),
        *(rig.load(range(100, 102)), rig.probe(2), rig.load(range(102, 104))),
    ]
    save, other_save, promotion, other_promotion, load, probe, other_load = waiting
    assert [set(rig.ear.results(job)) for job in (promotion, other_promotion)] == [{"stored"}, {"exists"}]
    assert rig.metrics.value("queue_jobs", tier="host") == 5
    assert rig.metrics.value("queue_bytes", tier="host") == 8 * FRAME_BYTES
    odd(rig).open()
    assert rig.worker.drain(PATIENCE_S)
    order = [event.job for event in rig.ear.events if isinstance(event, JobDone)][1:]
    order = [job for job in order if job not in (promotion, other_promotion)]
    assert order == [first, load, probe, other_load, save, other_save]
    assert rig.metrics.value("queue_jobs", tier="host") == rig.metrics.value("queue_bytes", tier="host") == 0


def test_saves_leave_a_thread_to_loads(make: Callable[..., Rig]) -> None:
    rig = make(threads_per_store=2)
    rig.saved(range(2))
    odd(rig).gates["put"].shut()
    saves = [rig.save(range(2), chain=chain) for chain in (2, 3, 4)]
    odd(rig).gates["put"].wait_for_arrival()
    rig.loaded(range(100, 102), range(2))
    assert not any(rig.ear.ends(job) for job in saves)
    assert odd(rig).calls().count("put") == 2


def test_saves_stand_back_while_the_engine_is_in_a_hurry(
    make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_throttle, "MOST_S", PATIENCE_S)
    rig = make(slice_pages=2)
    rig.saved(range(2))
    odd(rig).asked.clear()
    rig.worker.throttle_saves(on=True)
    save = rig.save(range(6), chain=2)
    rig.loaded(range(100, 102), range(2))  # a load does not stand back
    assert odd(rig).calls() == ["get_into"]
    assert not rig.ear.ends(save)
    rig.worker.throttle_saves(on=False)
    assert rig.ear.results(save) == ["stored"] * 6


def test_a_save_stands_back_between_its_slices(make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_throttle, "MOST_S", PATIENCE_S)
    rig = make(slice_pages=2)
    odd(rig).gates["put"].shut()
    save = rig.save(range(6))
    odd(rig).gates["put"].wait_for_arrival()
    rig.worker.throttle_saves(on=True)
    odd(rig).open()
    names = [page_name(key(1, i)) for i in range(2)]
    wait_until(lambda: all(odd(rig).store.contains(names, deadline=soon())))
    rig.loaded(range(100, 102), range(2))
    assert odd(rig).calls().count("put") == 1
    rig.worker.throttle_saves(on=False)
    assert rig.ear.results(save) == ["stored"] * 6


def test_nobody_stands_back_for_ever(make: Callable[..., Rig]) -> None:
    rig = make(slice_pages=4)
    rig.worker.throttle_saves(on=True)
    assert rig.ear.results(rig.save(range(8))) == ["stored"] * 8


def test_a_store_that_hangs_in_put_can_still_be_read(make: Callable[..., Rig]) -> None:
    clock = FakeClock()
    rig = make(clock=clock, threads_per_store=2, max_extra_threads=2)
    rig.saved(range(2))
    odd(rig).gates["put"].shut()
    for chain in range(2, 8):
        job = rig.save(range(2), chain=chain, within_s=5)
        if chain < 5:
            odd(rig).gates["put"].wait_for_arrival()
        rig.pass_time(6)
        assert rig.ear.failure(job) is Reason.LATE
    assert odd(rig).calls().count("put") == 1 + 3
    rig.save(range(2), chain=9, within_s=1000)
    for _ in range(3):  # the last thread is not given to that save
        rig.loaded(range(100, 102), range(2))


def test_a_slow_store_does_not_hold_up_another(make: Callable[..., Rig]) -> None:
    rig = make({"host": OddStore(), "disk": OddStore()})
    rig.saved(range(4))
    for call in CALLS:
        odd(rig, "disk").gates[call].shut()
    slow = [rig.probe(4, store="disk"), rig.load(range(100, 104), store="disk"), rig.save(range(4), store="disk")]
    rig.loaded(range(200, 204), range(4))
    assert not any(rig.ear.ends(job) for job in slow)
