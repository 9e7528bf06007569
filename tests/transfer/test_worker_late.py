"""Late and cancelled jobs: told in time, and from then on they touch no slot; their pages wait for their calls."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from headwater.core.events import Cancel, Copied, JobFailed, Probe, Stuck
from headwater.core.results import Reason
from headwater.metrics import Metrics
from headwater.storage.base import SYSTEM_CLOCK
from headwater.storage.readers import ReadStuck
from headwater.testing.clock import FakeClock
from headwater.transfer.executor.ledger import JobState, Ledger
from headwater.transfer.executor.store_queue import StoreQueue
from worker_kit import (
    FRAME_BYTES,
    PATIENCE_S,
    OddStore,
    Rig,
    odd,
    own_threads,
    rigs,
    slowly,
    wait_until,
)


@pytest.fixture
def make() -> Iterator[Callable[..., Rig]]:
    """Makes rigs, and finishes them."""
    yield from rigs()


# --- late, and what a late call may still do --------------------------------------------------------------------------


def test_a_call_that_does_not_return_is_late_and_keeps_its_pages_and_writes_nothing(make: Callable[..., Rig]) -> None:
    clock = FakeClock()
    rig = make({"host": OddStore(), "disk": OddStore()}, clock=clock, num_pages=16, slice_pages=8)
    rig.saved(range(8))
    rig.saved(range(8), store="disk")
    odd(rig).gates["get_into"].shut()
    job = rig.load(range(100, 108), within_s=5)
    odd(rig).gates["get_into"].wait_for_arrival()
    kept = odd(rig).buffers
    held = rig.worker.num_held_pages
    assert held == 8
    rig.pass_time(6)
    assert rig.ear.failure(job) is Reason.LATE
    assert rig.worker.num_held_pages == held
    for buffer in kept:
        buffer[:] = b"\xaa" * FRAME_BYTES
    rig.staging.touched.clear()
    for start in range(200, 240, 8):
        rig.loaded(range(start, start + 8), range(8), store="disk")
    assert all(buffer == b"\xaa" * FRAME_BYTES for buffer in kept), "a quarantined page was used"
    writes = len(rig.staging.scattered)
    odd(rig).open()
    assert rig.worker.drain(PATIENCE_S)
    rig.ear.results(rig.probe(1))  # by a thread that may be the one that was stuck
    assert rig.worker.close(PATIENCE_S)
    assert len(rig.staging.scattered) == writes
    assert rig.untouched(range(100, 108))


@pytest.mark.parametrize("call", ["contains", "put"])
def test_a_save_that_hangs_is_late_and_reads_its_slots_no_more(make: Callable[..., Rig], call: str) -> None:
    clock = FakeClock()
    rig = make(clock=clock, slice_pages=4)
    odd(rig).gates[call].shut()
    job = rig.save(range(8), within_s=5)
    odd(rig).gates[call].wait_for_arrival()
    rig.pass_time(6)
    assert rig.ear.failure(job) is Reason.LATE
    reads = len(rig.staging.gathered)
    odd(rig).open()
    assert rig.worker.close(PATIENCE_S)
    assert len(rig.staging.gathered) == reads == (0 if call == "contains" else 4)
    assert not any(isinstance(event, Copied) for event in rig.ear.of(job))


def test_a_hanging_look_or_promotion_is_late(make: Callable[..., Rig]) -> None:
    clock = FakeClock()
    rig = make({"host": OddStore(), "disk": OddStore()}, clock=clock)
    rig.saved(range(2), store="disk")
    odd(rig).gates["contains"].shut()
    odd(rig).gates["put"].shut()
    jobs = [rig.probe(3, within_s=5), rig.promote(2, "host", store="disk", within_s=5)]
    odd(rig).gates["contains"].wait_for_arrival()
    odd(rig).gates["put"].wait_for_arrival()
    rig.pass_time(6)
    assert [rig.ear.failure(job) for job in jobs] == [Reason.LATE] * 2


def test_an_answer_after_the_deadline_is_no_answer(make: Callable[..., Rig]) -> None:
    clock = FakeClock()
    rig = make(clock=clock)
    odd(rig).answers["contains"] = slowly(clock)
    assert rig.ear.failure(rig.probe(2, within_s=0.9)) is Reason.LATE


def test_a_queued_job_whose_deadline_passes_never_begins(make: Callable[..., Rig]) -> None:
    clock = FakeClock()
    rig = make(clock=clock, threads_per_store=1, max_extra_threads=0)
    odd(rig).gates["contains"].shut()
    first = rig.probe(1, within_s=100)
    odd(rig).gates["contains"].wait_for_arrival()
    jobs = [rig.probe(2, within_s=5), rig.load([100], within_s=5), rig.save([1], within_s=5), rig.probe(3, within_s=50)]
    rig.pass_time(6)
    assert [rig.ear.failure(job) for job in jobs[:3]] == [Reason.LATE] * 3
    assert not rig.ear.ends(first)
    odd(rig).open()
    assert rig.ear.results(first) == ["absent"]
    assert rig.ear.results(jobs[3]) == ["absent"] * 3
    assert [len(names) for _, names in odd(rig).asked] == [1, 3]
    assert rig.ear.failure(rig.probe(4, within_s=-1)) is Reason.LATE
    assert [len(names) for _, names in odd(rig).asked] == [1, 3]


def test_stuck_threads_are_replaced_up_to_a_bound_and_the_surplus_ends(make: Callable[..., Rig]) -> None:
    clock = FakeClock()
    rig = make(clock=clock, threads_per_store=1, max_extra_threads=2)
    gate = odd(rig).gates["contains"]
    gate.shut()
    for _ in range(3):  # the thread and both that may replace it
        job = rig.probe(1, within_s=5)
        gate.wait_for_arrival()
        rig.pass_time(6)
        assert rig.ear.failure(job) is Reason.LATE
    assert len(own_threads()) == 3
    waits = rig.probe(1, within_s=5)
    rig.pass_time(6)
    assert rig.ear.failure(waits) is Reason.LATE
    assert len(odd(rig).asked) == 3
    gate.open()
    assert rig.ear.results(rig.probe(1, within_s=5)) == ["absent"]
    wait_until(lambda: len(own_threads()) == 1)
    assert rig.ear.results(rig.probe(1, within_s=5)) == ["absent"]
    assert rig.metrics.value("events_total", kind="store_stuck") == 3


def test_a_cancelled_job_whose_call_does_not_return_is_replaced_too(make: Callable[..., Rig]) -> None:
    clock = FakeClock()
    rig = make(clock=clock, threads_per_store=1, max_extra_threads=1)
    odd(rig).gates["put"].shut()
    job = rig.save([1], within_s=5)
    odd(rig).gates["put"].wait_for_arrival()
    rig.cancel(job)
    assert rig.ear.failure(job) is Reason.CANCELLED
    rig.pass_time(6)
    assert rig.ear.results(rig.probe(1, within_s=5)) == ["absent"]


def test_the_watchdog_sleeps_until_it_is_needed(make: Callable[..., Rig]) -> None:
    class Counting(FakeClock):
        asked = 0

        def monotonic(self) -> float:
            self.asked += 1
            return super().monotonic()

    clock = Counting()
    rig = make(clock=clock)
    odd(rig).gates["contains"].shut()
    rig.probe(1)
    odd(rig).gates["contains"].wait_for_arrival()
    time.sleep(0.05)  # whoever is still on the way there
    asked = clock.asked
    time.sleep(0.3)
    assert clock.asked <= asked + 2


def test_the_watchdog_wakes_for_an_earlier_deadline(make: Callable[..., Rig]) -> None:
    rig = make(threads_per_store=1)
    odd(rig).gates["contains"].shut()
    rig.probe(1, within_s=10_000)
    odd(rig).gates["contains"].wait_for_arrival()
    assert rig.ear.failure(rig.probe(1, within_s=0.05)) is Reason.LATE


# --- cancelled --------------------------------------------------------------------------------------------------------


def test_cancelled_before_it_began(make: Callable[..., Rig]) -> None:
    rig = make(threads_per_store=1)
    odd(rig).gates["contains"].shut()
    first = rig.probe(1)
    odd(rig).gates["contains"].wait_for_arrival()
    jobs = [rig.load([100]), rig.probe(2), rig.save([1])]
    rig.submit(*(Cancel(job=job) for job in jobs))
    assert [rig.ear.failure(job) for job in jobs] == [Reason.CANCELLED] * 3
    assert rig.metrics.value("queue_jobs", tier="host") == 0
    odd(rig).open()
    assert rig.ear.results(first) == ["absent"]
    rig.cancel(first)
    rig.cancel(12345)
    rig.ear.results(rig.probe(3))
    assert [len(names) for _, names in odd(rig).asked] == [1, 3]


def test_cancelled_while_the_store_reads(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.saved(range(4))
    odd(rig).gates["get_into"].shut()
    job = rig.load(range(100, 104))
    odd(rig).gates["get_into"].wait_for_arrival()
    rig.cancel(job)
    assert rig.ear.failure(job) is Reason.CANCELLED  # at once, though the store is still at it
    assert rig.worker.num_held_pages == 4
    odd(rig).open()
    assert rig.worker.close(PATIENCE_S)
    assert rig.untouched(range(100, 104))
    assert rig.worker.num_held_pages == 0


def test_cancelled_during_the_scatter_it_ends_after_it_and_writes_no_more(make: Callable[..., Rig]) -> None:
    rig = make(slice_pages=4)
    rig.saved(range(8))
    rig.scatter.shut()
    job = rig.load(range(100, 108))
    rig.scatter.wait_for_arrival()
    rig.cancel(job)
    rig.ear.results(rig.probe(1))  # the executor goes on meanwhile, and the watchdog has been by
    assert not rig.ear.ends(job), "the end was told while slots were being written"
    snapshot: list[bytes] = []
    rig.ear.extra = lambda event: snapshot.append(bytes(rig.staging.device)) if isinstance(event, JobFailed) else None
    rig.scatter.open()
    assert rig.ear.failure(job) is Reason.CANCELLED
    assert rig.worker.close(PATIENCE_S)
    assert snapshot == [bytes(rig.staging.device)], "a slot was written after the end was told"
    assert rig.untouched(range(104, 108))


def test_late_during_the_scatter_it_ends_after_it_with_its_hits(make: Callable[..., Rig]) -> None:
    clock = FakeClock()
    rig = make(clock=clock, slice_pages=4, grace_s=2)
    rig.saved(range(8))
    rig.scatter.shut()
    job = rig.load(range(100, 108), within_s=5)
    rig.scatter.wait_for_arrival()
    rig.pass_time(6)
    rig.ear.results(rig.probe(1))
    assert not rig.ear.of(job)
    rig.scatter.open()
    assert rig.ear.results(job) == ["hit"] * 4 + ["late"] * 4
    assert rig.untouched(range(104, 108))


def test_a_scatter_that_hangs_is_told_at_once_and_ends_when_it_is_over(make: Callable[..., Rig]) -> None:
    """Nobody waits for it; its slots are not free before; the store's other jobs have a thread in its place."""
    clock = FakeClock()
    rig = make(clock=clock, slice_pages=4, threads_per_store=1, max_extra_threads=1)
    rig.saved(range(8))
    rig.scatter.shut()
    job = rig.load(range(100, 108), within_s=5)
    rig.scatter.wait_for_arrival()
    rig.pass_time(6)
    wait_until(lambda: rig.ear.of(job) != [])
    assert [type(event) for event in rig.ear.of(job)] == [Stuck]
    assert not rig.worker.wait_layer(job, 0, PATIENCE_S), "who waits for its layers waits for ever"
    rig.ear.results(rig.probe(1))
    rig.pass_time(100)
    rig.ear.results(rig.probe(1))
    assert [type(event) for event in rig.ear.of(job)] == [Stuck], "told twice, or ended while it copies"
    assert rig.worker.num_held_pages == 4
    rig.scatter.open()
    assert rig.ear.failure(job) is Reason.LATE
    wait_until(lambda: rig.worker.num_held_pages == 0)
    assert rig.untouched(range(104, 108))
    assert rig.metrics.value("events_total", kind="copy_stuck") == 1


def test_a_gather_that_hangs_holds_up_nobody_else(make: Callable[..., Rig]) -> None:
    clock = FakeClock()
    rig = make(clock=clock, slice_pages=4, threads_per_store=1, max_extra_threads=1)
    rig.gather.shut()
    job = rig.save(range(4), within_s=5)
    rig.gather.wait_for_arrival()
    rig.pass_time(6)
    assert rig.ear.results(rig.probe(1)) == ["absent"]
    assert not rig.ear.of(job), "a save whose slots are being read has not ended, and nobody waits for it"
    rig.gather.open()
    assert rig.ear.failure(job) is Reason.LATE


def test_cancelled_just_before_the_gather(make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make()
    take = rig.worker._pool.take

    def take_and_cancel(*args: Any, **options: Any) -> list[int]:
        pages = take(*args, **options)
        rig.cancel(1)
        return pages

    monkeypatch.setattr(rig.worker._pool, "take", take_and_cancel)
    assert rig.ear.failure(rig.save(range(4))) is Reason.CANCELLED
    assert rig.worker.close(PATIENCE_S)
    assert not rig.staging.gathered


@pytest.mark.parametrize("num_blocks", [4, 8])
def test_cancelled_during_the_gather_it_ends_after_it_and_stores_nothing(
    make: Callable[..., Rig], num_blocks: int
) -> None:
    rig = make(slice_pages=4)
    rig.gather.shut()
    job = rig.save(range(num_blocks))
    rig.gather.wait_for_arrival()
    rig.cancel(job)
    rig.ear.results(rig.probe(1))
    assert not rig.ear.ends(job), "the end was told while slots were being read"
    rig.gather.open()
    assert rig.ear.failure(job) is Reason.CANCELLED
    assert rig.worker.close(PATIENCE_S)
    assert "put" not in odd(rig).calls()
    assert len(rig.staging.gathered) == 4


def test_cancelled_while_it_waits_for_pages(make: Callable[..., Rig]) -> None:
    rig = make(num_pages=1, threads_per_store=2)
    rig.saved([1])
    odd(rig).gates["get_into"].shut()
    first = rig.load([100])
    odd(rig).gates["get_into"].wait_for_arrival()
    waits = rig.load([101])
    wait_until(lambda: len(rig.worker._pool._waiters) == 1)
    rig.cancel(waits)
    assert rig.ear.failure(waits) is Reason.CANCELLED
    wait_until(lambda: not rig.worker._pool._waiters)
    odd(rig).open()
    assert rig.ear.results(first) == ["hit"]
    rig.loaded([102], [1])
    assert odd(rig).calls().count("get_into") == 2


# --- pages ------------------------------------------------------------------------------------------------------------


def test_who_gets_no_pages_in_time_is_late(make: Callable[..., Rig]) -> None:
    clock = FakeClock()
    rig = make(clock=clock, num_pages=1, grace_s=1.0)
    rig.saved([1])
    odd(rig).gates["get_into"].shut()
    first = rig.load([100], within_s=50)
    odd(rig).gates["get_into"].wait_for_arrival()
    job = rig.load([101], within_s=5)
    wait_until(lambda: len(rig.worker._pool._waiters) == 1)
    rig.pass_time(5.5)
    rig.cancel(rig.probe(1))  # something changed: who waits looks at the clock
    assert rig.ear.results(job) == ["late"]
    odd(rig).open()
    assert rig.ear.results(first) == ["hit"]
    assert rig.untouched([101])


def test_saves_cannot_take_the_last_pages_from_loads(make: Callable[..., Rig]) -> None:
    rig = make({"host": OddStore(), "disk": OddStore()}, num_pages=8, slice_pages=8, threads_per_store=3)
    rig.saved(range(4))
    rig.saved(range(4), store="disk")
    for store in ("host", "disk"):
        odd(rig, store).gates["put"].shut()
    saves = [rig.save(range(8), chain=chain, store=store) for chain, store in ((2, "host"), (3, "disk"))]
    for store in ("host", "disk"):
        odd(rig, store).gates["put"].wait_for_arrival()
    rig.loaded(range(100, 104), range(4))
    rig.loaded(range(110, 114), range(4), store="disk")
    assert not any(rig.ear.ends(job) for job in saves)


def test_loads_of_a_hanging_store_leave_pages_to_the_others(make: Callable[..., Rig]) -> None:
    rig = make({"host": OddStore(), "disk": OddStore()}, num_pages=8, slice_pages=8)
    rig.saved(range(4))
    rig.saved(range(20), store="disk")
    odd(rig, "disk").gates["get_into"].shut()
    stuck = [rig.load(range(start, start + 20), store="disk") for start in (100, 120)]
    odd(rig, "disk").gates["get_into"].wait_for_arrival()
    rig.loaded(range(200, 204), range(4))
    rig.saved(range(4, 8), chain=2)
    assert not any(rig.ear.ends(job) for job in stuck)


def test_many_jobs_share_one_page(make: Callable[..., Rig]) -> None:
    rig = make({"host": OddStore(), "disk": OddStore()}, num_pages=1, num_slots=400)
    rig.saved(range(10))
    jobs = [rig.load(range(100 + 10 * i, 110 + 10 * i)) for i in range(6)]
    jobs += [rig.promote(10, "disk"), rig.save(range(10, 20), chain=2), rig.save(range(20, 30), chain=3, store="disk")]
    assert [set(rig.ear.results(job)) for job in jobs] == [{"hit"}] * 6 + [{"stored"}] * 3


def test_pages_of_a_read_that_hangs_are_kept_until_it_is_over(make: Callable[..., Rig]) -> None:
    """A store that gives up waiting for a read of its own has not given back the memory."""
    rig = make()
    rig.saved(range(2))
    stuck = ReadStuck()
    odd(rig).raises["get_into"] = stuck
    late = rig.load([100, 101], within_s=0.05)
    assert rig.ear.failure(late) is Reason.LATE
    assert rig.worker.num_held_pages == 2
    odd(rig).raises.clear()
    rig.loaded([200, 201], range(2))
    assert rig.worker.num_held_pages == 2
    stuck.end()
    wait_until(lambda: rig.worker.num_held_pages == 0)


def test_a_thread_too_many_passes_on_what_woke_it() -> None:
    """Another is back from a call that it was stuck in, and still tells of it: of two that sleep, one shall end."""
    ledger = Ledger(clock=SYSTEM_CLOCK, metrics=Metrics())
    queue = StoreQueue("disk", ledger, num_threads=2, frame_bytes=1, clock=SYSTEM_CLOCK, metrics=Metrics())
    taken: list[int] = []

    def serve() -> None:
        while (job := queue.take()) is not None:
            taken.append(job.order.job)

    threads = [threading.Thread(target=serve) for _ in range(2)]
    queue.num_able = len(threads)
    for thread in threads:
        thread.start()
    wait_until(lambda: len(queue._news._waiters) == 2)  # type: ignore[attr-defined]
    with ledger.lock:
        queue.num_able += 1
        job = JobState(Probe(job=1, store="disk", keys=(), deadline_s=time.monotonic() + PATIENCE_S), SYSTEM_CLOCK)
        ledger.admit(job)
        queue.push(job)
    try:
        wait_until(lambda: taken == [1])
    finally:
        with ledger.lock:
            queue.close()
        for thread in threads:
            thread.join(PATIENCE_S)
