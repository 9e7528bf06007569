"""Whatever a store, staging, a listener or the end does: each job ends once, and the executor goes on."""

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from headwater.build import open_local
from headwater.config.stores import LocalStoreConfig
from headwater.core.errors import InvalidInput, ResourceClosed
from headwater.core.events import (
    Cancel,
    Event,
    Granted,
    Instruction,
    JobDone,
    JobFailed,
    Load,
    Probe,
    Promote,
    StoreOff,
    StoreOn,
)
from headwater.core.results import Reason
from headwater.storage.local import LocalStore, directory
from headwater.storage.memory import MemoryStore
from headwater.storage.wrappers import WrapperStore
from headwater.testing.device import BytesStaging
from headwater.testing.faulty_stores import Faults, FaultyStore
from headwater.testing.pages import IDENTITY
from headwater.transfer.executor.worker import Worker
from worker_kit import FRAME_BYTES, LAYOUT, PATIENCE_S, Gate, OddStore, Rig, Unheard, keys, odd, rigs, wait_until

LIMIT_BYTES = 16 << 20


@pytest.fixture
def make() -> Iterator[Callable[..., Rig]]:
    """Makes rigs, and finishes them."""
    yield from rigs()


# --- trouble ----------------------------------------------------------------------------------------------------------


TROUBLES = [RuntimeError("boom"), ResourceClosed("closed"), TimeoutError(), SystemExit(1), Unheard("?")]


def job_of(rig: Rig, call: str, num_blocks: int = 4) -> int:
    """A job that comes to a call."""
    if call == "contains":
        return rig.probe(num_blocks)
    return rig.load(range(100, 100 + num_blocks)) if call == "get_into" else rig.save(range(num_blocks), chain=2)


@pytest.mark.parametrize("trouble", TROUBLES, ids=repr)
@pytest.mark.parametrize("call", ["contains", "get_into", "put"])
def test_whatever_a_store_raises_the_job_failed(make: Callable[..., Rig], call: str, trouble: BaseException) -> None:
    rig = make()
    rig.saved(range(4))
    odd(rig).raises[call] = trouble
    job = job_of(rig, call)
    assert rig.ear.failure(job) is Reason.FAILED
    end = rig.ear.end(job)
    assert isinstance(end, JobFailed)
    assert type(trouble).__name__ in end.why
    odd(rig).raises.clear()
    rig.loaded(range(200, 204), range(4))
    assert rig.untouched(range(100, 104))


def test_a_store_that_raises_while_a_bad_page_is_thrown_out(make: Callable[..., Rig]) -> None:
    rig = make({"host": OddStore(FaultyStore(MemoryStore(1 << 20), Faults(flips_byte=1.0)))})
    rig.saved(range(2))
    odd(rig).raises["delete"] = RuntimeError("boom")
    assert rig.ear.failure(rig.load([100, 101])) is Reason.FAILED
    assert rig.untouched([100, 101])


NONSENSE: dict[str, Callable[[list[Any]], Any]] = {
    "short": lambda found: found[:-1],
    "long": lambda found: [*found, found[0]],
    "empty": lambda found: [],
    "none": lambda found: None,
    "text": lambda found: [str(one) for one in found],
    "numbers": lambda found: [1 for _ in found],
}


@pytest.mark.parametrize("nonsense", NONSENSE)
@pytest.mark.parametrize("call", ["contains", "get_into", "put"])
def test_nonsense_for_an_answer_is_a_failure(make: Callable[..., Rig], call: str, nonsense: str) -> None:
    rig = make()
    rig.saved(range(4))
    odd(rig).answers[call] = NONSENSE[nonsense]
    if call == "get_into" and nonsense in (
        "text",
        "numbers",
    ):  # one answer per page: the verifier takes each for a miss
        assert rig.ear.results(job_of(rig, call))[0] == "failed"
    else:
        assert rig.ear.failure(job_of(rig, call)) is Reason.FAILED
    assert rig.untouched(range(100, 104))


def test_a_mere_word_is_no_verified_hit(make: Callable[..., Rig]) -> None:
    rig = make()
    odd(rig).answers["get_into"] = lambda found: ["hit"] * len(found)  # compares equal to a verified one
    assert rig.ear.results(rig.load(range(100, 104))) == ["failed", "miss", "miss", "miss"]
    assert rig.untouched(range(100, 104))


def test_a_store_lost_in_the_middle_leaves_what_was_done(make: Callable[..., Rig]) -> None:
    rig = make({"host": OddStore(), "disk": OddStore()}, slice_pages=4)
    rig.saved(range(8))

    def second_time(call: str, store: str = "host") -> None:
        def answer(found: list[Any]) -> list[Any]:
            odd(rig, store).raises[call] = Unheard("boom")
            return found

        odd(rig, store).answers[call] = answer

    second_time("get_into")
    assert rig.ear.results(rig.load(range(100, 108))) == ["hit"] * 4 + ["failed"] * 4
    second_time("put")
    assert rig.ear.results(rig.save(range(12), chain=2)) == ["stored"] * 4 + ["failed"] * 8
    odd(rig).raises.clear()
    odd(rig).answers.clear()
    second_time("put", "disk")
    assert rig.ear.results(rig.promote(8, "disk")) == ["stored"] * 4 + ["failed"] * 4


@pytest.mark.parametrize("trouble", [RuntimeError("the device is gone"), Unheard("?")], ids=repr)
def test_staging_that_fails_fails_the_job(make: Callable[..., Rig], trouble: BaseException) -> None:
    rig = make(slice_pages=4)
    rig.saved(range(8))

    def fail(slot: int, _: int) -> None:
        if slot in (105, 15):
            raise trouble

    rig.staging.on_scatter = rig.staging.on_gather = fail
    assert rig.ear.failure(rig.load(range(100, 108))) is Reason.FAILED
    assert rig.untouched(range(105, 108))
    assert rig.ear.failure(rig.save(range(10, 18), chain=2)) is Reason.FAILED
    assert rig.ear.failure(rig.load([9999])) is Reason.FAILED
    rig.loaded(range(200, 208), range(8))


def test_keys_that_are_none_fail_the_job(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.submit(Probe(job=1, store="host", keys=(b"short",), deadline_s=time.monotonic() + PATIENCE_S))  # type: ignore[arg-type]
    assert rig.ear.failure(1) is Reason.FAILED


def test_a_store_that_gives_only_bad_pages_is_off_until_it_is_revived(make: Callable[..., Rig]) -> None:
    store = FaultyStore(MemoryStore(64 << 20), Faults(flips_byte=1.0))
    rig = make({"host": store}, num_pages=160, slice_pages=80)
    rig.saved(range(80))
    end = rig.ear.results(rig.load(range(100, 180)))
    assert "hit" not in end
    off = rig.ear.wait(lambda event: isinstance(event, StoreOff))
    assert isinstance(off, StoreOff)
    assert (off.store, "bad pages" in off.why) == ("host", True)
    for job in (rig.probe(1), rig.load([100]), rig.save([1])):
        assert rig.ear.failure(job) is Reason.FAILED
    store.faults = Faults()
    assert rig.worker.revive("host")
    rig.ear.wait(lambda event: isinstance(event, StoreOn))
    rig.ear.end(rig.save(range(80)))
    rig.loaded(range(100, 180), range(80))
    assert sum(isinstance(event, StoreOff) for event in rig.ear.events) == 1


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_damaged_store_is_off_until_it_is_revived(make: Callable[..., Rig], tmp_path: Path, wrapped: bool) -> None:
    local = open_local(LocalStoreConfig(directory=tmp_path / "store", limit_bytes=LIMIT_BYTES))
    assert isinstance(local, LocalStore)
    rig = make({"disk": WrapperStore(local) if wrapped else local, "host": OddStore()})
    rig.saved(range(4), store="disk")
    rig.saved(range(4))
    os.truncate(tmp_path / "store" / directory.SLAB, 100_000)
    assert rig.ear.failure(rig.probe(4, store="disk")) is Reason.FAILED  # and not: nothing there
    off = rig.ear.wait(lambda event: isinstance(event, StoreOff))
    assert isinstance(off, StoreOff)
    assert off.store == "disk"
    assert rig.ear.failure(rig.promote(4, "disk")) is Reason.FAILED
    assert rig.worker.revive("disk")
    rig.ear.wait(lambda event: isinstance(event, StoreOn))
    rig.ear.end(rig.save(range(4), store="disk"))
    rig.loaded(range(100, 104), range(4), store="disk")
    assert sum(isinstance(event, StoreOff) for event in rig.ear.events) == 1


def test_a_store_that_cannot_be_put_right_stays_off(make: Callable[..., Rig], tmp_path: Path) -> None:
    local = open_local(LocalStoreConfig(directory=tmp_path / "store", limit_bytes=LIMIT_BYTES))
    rig = make({"host": local})
    os.truncate(tmp_path / "store" / directory.SLAB, 100_000)
    rig.ear.end(rig.probe(1))
    local.revive = lambda: False  # type: ignore[method-assign]
    assert not rig.worker.revive("host")
    assert rig.ear.failure(rig.probe(1)) is Reason.FAILED
    assert not any(isinstance(event, StoreOn) for event in rig.ear.events)


# --- coming and going -------------------------------------------------------------------------------------------------


def test_close_ends_everything(make: Callable[..., Rig], caplog: pytest.LogCaptureFixture) -> None:
    rig = make({"host": OddStore(), "disk": OddStore()}, num_pages=32, slice_pages=8)
    rig.saved(range(8))
    rig.saved(range(8), store="disk")
    odd(rig).gates["get_into"].shut()
    odd(rig, "disk").gates["put"].shut()
    jobs = [
        *(rig.load(range(100, 108)), rig.save(range(4), chain=2, store="disk"), rig.probe(1, store="disk")),
        *(rig.save(range(4), chain=3, store="disk"), rig.promote(4, "disk"), rig.load(range(110, 118), store="disk")),
    ]
    odd(rig).gates["get_into"].wait_for_arrival()
    odd(rig, "disk").gates["put"].wait_for_arrival()
    with caplog.at_level(logging.WARNING, "headwater"):
        assert not rig.worker.close(0.05)
    assert "not back from a call" in caplog.text
    ends = [rig.ear.end(job) for job in jobs]
    assert {end.failure for end in ends if isinstance(end, JobFailed)} == {Reason.CANCELLED}
    with pytest.raises(ResourceClosed):
        rig.probe(1)
    with pytest.raises(ResourceClosed):
        rig.worker.revive("host")
    writes = len(rig.staging.scattered)
    odd(rig).open()
    odd(rig, "disk").open()
    assert rig.worker.close(PATIENCE_S)
    assert rig.worker.close()
    assert len(rig.staging.scattered) == writes


def test_close_waits_for_a_copy_under_way(make: Callable[..., Rig]) -> None:
    rig = make(slice_pages=4)
    rig.saved(range(8))
    rig.scatter.shut()
    job = rig.load(range(100, 108))
    rig.scatter.wait_for_arrival()
    assert not rig.worker.close(0.05)
    assert not rig.ear.ends(job)
    rig.scatter.open()
    assert rig.worker.close(PATIENCE_S)
    assert rig.ear.failure(job) is Reason.CANCELLED
    assert rig.untouched(range(104, 108))


def test_drain_waits_for_events(make: Callable[..., Rig]) -> None:
    rig = make()
    assert rig.worker.drain(0)
    gate = Gate()
    gate.shut()
    rig.ear.extra = gate
    rig.probe(1)
    gate.wait_for_arrival()
    assert not rig.worker.drain(0.02)
    gate.open()
    assert rig.worker.drain(PATIENCE_S)
    odd(rig).gates["contains"].shut()
    rig.probe(1)
    assert not rig.worker.drain(0.02)


def test_events_are_told_one_at_a_time(make: Callable[..., Rig]) -> None:
    rig = make({"host": OddStore(), "disk": OddStore()})
    gate = Gate()
    gate.shut()
    rig.ear.extra = gate
    first = rig.probe(1)
    gate.wait_for_arrival()
    second = rig.probe(1, store="disk")
    wait_until(lambda: bool(rig.worker._ledger._outbox or rig.ear.ends(second)))
    assert not rig.ear.ends(second)
    gate.open()
    assert rig.ear.results(second) == rig.ear.results(first) == ["absent"]


def test_a_listener_that_raises_or_submits_disturbs_nobody(
    make: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    rig = make()
    rig.saved(range(4))
    said: list[str] = []

    def listen(event: Event) -> None:
        if isinstance(event, JobDone) and len(rig.jobs) < 4:
            for wait in (rig.worker.drain, rig.worker.close):
                try:
                    wait(1.0)
                except InvalidInput as error:
                    said.append(str(error))
            rig.probe(1)
        raise Unheard("?")

    rig.ear.extra = listen
    with caplog.at_level(logging.ERROR, "headwater"):
        rig.loaded(range(100, 104), range(4))
        rig.ear.wait(lambda event: isinstance(event, JobDone) and event.job == 4)
        assert rig.worker.drain(PATIENCE_S)
    assert "nobody heard" in caplog.text
    assert len(said) == 4
    rig.ear.extra = None
    rig.loaded(range(110, 114), range(4))


def test_what_is_not_the_hands_work_is_refused_whole(make: Callable[..., Rig]) -> None:
    rig = make({"host": OddStore(), "disk": OddStore()})
    late: dict[str, Any] = {"deadline_s": time.monotonic() + PATIENCE_S}
    good = Probe(job=1, store="host", keys=keys(1, 1), **late)
    bad: list[tuple[Sequence[Instruction], str]] = [
        ([good, Granted(request="r", slots=())], "not the executor's work"),
        ([good, Probe(job=2, store="tape", keys=(), **late)], "tape"),
        ([good, Promote(job=2, store="host", target="tape", keys=(), **late)], "tape"),
        ([good, Promote(job=2, store="host", target="host", keys=(), **late)], "to itself"),
        ([good, Load(job=2, store="host", keys=keys(1, 2), slots=(1,), **late)], "2 blocks and 1 slots"),
        ([good, Probe(job=2, store="host", keys=(), deadline_s=float("nan"))], "no deadline"),
        ([good, good], "a number of its own"),
    ]
    for instructions, why in bad:
        with pytest.raises(InvalidInput, match=why):
            rig.worker.submit(instructions)
    odd(rig).gates["contains"].shut()
    rig.submit(good)
    with pytest.raises(InvalidInput, match="a number of its own"):
        rig.worker.submit([good])
    with pytest.raises(InvalidInput, match="no store"):
        rig.worker.revive("tape")
    odd(rig).open()
    assert rig.ear.results(1) == ["absent"]
    assert odd(rig).calls() == ["contains"]
    rig.submit(Cancel(job=1))


@pytest.mark.parametrize(
    "options",
    [
        *({"threads_per_store": 0}, {"max_extra_threads": -1}, {"slice_pages": 0}, {"grace_s": -1.0}),
        *({"grace_s": float("nan")}, {"block_tokens": 5}, {"stores": {}}, {"num_pages": 0}, {"page_bytes": 17}),
    ],
    ids=repr,
)
def test_what_cannot_work_is_refused_at_the_door(options: dict[str, Any]) -> None:
    staging = BytesStaging(LAYOUT, num_slots=2, num_pages=options.pop("num_pages", 2))
    if "page_bytes" in options:
        staging.pages = staging.pages[:, : options.pop("page_bytes")]
    facts = {"stores": {"host": MemoryStore(1 << 20)}, "layout": LAYOUT, "identity": IDENTITY, "block_tokens": 4}
    with pytest.raises(InvalidInput):
        Worker(**{"staging": staging, **facts, **options})


def test_somebody_must_listen() -> None:
    staging = BytesStaging(LAYOUT, num_slots=2, num_pages=2)
    worker = Worker({"host": MemoryStore(1 << 20)}, staging, layout=LAYOUT, identity=IDENTITY, block_tokens=4)
    with pytest.raises(InvalidInput, match="deliver"):
        worker.submit([Cancel(job=1)])
    assert worker.deliver is None
    assert worker.close()


def test_numbers(make: Callable[..., Rig]) -> None:
    rig = make({"host": OddStore(), "disk": OddStore()})
    rig.saved(range(4))
    rig.loaded(range(100, 103), range(3))
    assert rig.ear.results(rig.promote(4, "disk")) == ["stored"] * 4
    odd(rig).raises["contains"] = RuntimeError("boom")
    rig.ear.end(rig.probe(1))
    moved = {
        (tier, way): rig.metrics.value("moved_bytes_total", tier=tier, direction=way)
        for tier in ("host", "disk")
        for way in ("in", "out")
    }
    assert moved == {
        ("host", "in"): 4 * FRAME_BYTES,
        ("host", "out"): 7 * FRAME_BYTES,
        ("disk", "in"): 4 * FRAME_BYTES,
        ("disk", "out"): 0,
    }
    for job, outcome in (("save", "done"), ("load", "done"), ("promote", "done"), ("probe", "failed")):
        assert rig.metrics.value("jobs_total", tier="host", job=job, outcome=outcome) == 1
        assert rig.metrics.value("job_seconds", tier="host", job=job) >= 0


def test_jobs_without_end_of_time_leave_nothing_behind(make: Callable[..., Rig]) -> None:
    rig = make()
    for _ in range(1000):
        rig.ear.end(rig.probe(1, within_s=float("inf")))
    assert len(rig.worker._watchdog._alarms) < 600
