"""A group of ranks: the shortest prefix counts, a rank that is gone counts zero in time, and late bytes hit nobody."""

import logging
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.build import open_group, open_local, open_rank
from headwater.config.cache import CacheConfig, SaveWhen, TierConfig
from headwater.config.stores import LocalStoreConfig
from headwater.core.errors import InvalidInput, ResourceClosed
from headwater.core.events import (
    Copied,
    Demote,
    Job,
    JobDone,
    JobFailed,
    Left,
    Load,
    Probe,
    Promote,
    Save,
    StoreOff,
    StoreOn,
    Stuck,
)
from headwater.core.results import JOB_FAILURES, Reason, Status
from headwater.layout.shard import WHOLE, Shard, parts
from headwater.storage.base import SYSTEM_CLOCK, Store
from headwater.storage.memory import MemoryStore
from headwater.testing.pages import IDENTITY
from headwater.testing.stores import soon
from headwater.transfer.ranks.group import Ranks
from headwater.transfer.ranks.group_result import RankAnswer, agree, num_good
from headwater.transfer.ranks.members import Member
from headwater.transfer.ranks.roster import RankState
from headwater.transfer.ranks.server import serve_rank
from headwater.transfer.ranks.wire import Incoming, packed
from machines.ranks import RankDevices, pages_of, thread_rank, whole_block
from rank_kit import LAYOUTS, Group, Jobs, ScriptedExecutor, groups
from worker_kit import PATIENCE_S, Gate, OddStore, key, keys, wait_until

SLACK_S = 0.5  # that a miss may come after its deadline, on a machine that is busy with other things


@pytest.fixture
def make() -> Iterator[Callable[..., Group]]:
    yield from groups()


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    with MemoryStore(64 << 20) as memory:
        yield memory


# --- the agreed -------------------------------------------------------------------------------------------------------

ORDERS: dict[str, Job] = {
    "probe": Probe(job=1, store="host", keys=keys(1, 5), deadline_s=1.0),
    "load": Load(job=1, store="host", keys=keys(1, 5), deadline_s=1.0, slots=(0, 1, 2, 3, 4)),
    "save": Save(
        job=1,
        store="host",
        keys=keys(1, 5),
        deadline_s=1,
        slots=(0, 1, 2, 3, 4),
        parent=key(1, -1),
        depth=0,
        tenant=b"",
    ),
    "demote": Demote(job=1, store="host", keys=keys(1, 5), deadline_s=1.0, target="pool", parent=key(1, -1)),
    "promote": Promote(job=1, store="host", keys=keys(1, 5), deadline_s=1.0, target="pool"),
}
GOOD = {"probe": ["held", "absent"], "load": ["hit"], "save": ["stored", "exists"]}
GOOD |= {"demote": ["stored", "exists"], "promote": ["stored", "exists"]}
BAD = {
    "probe": [],
    "load": ["miss", "late", "failed", "corrupt", "stored"],
    "save": ["no_room", "no_parent", "late", "failed"],
    "demote": ["miss", "no_room", "no_parent", "late", "failed"],
    "promote": ["no_room", "late", "failed"],
}


@st.composite
def answers(draw: st.DrawFn) -> tuple[str, list[RankAnswer]]:
    kind = draw(st.sampled_from(sorted(ORDERS)))
    words = st.sampled_from([*GOOD[kind] * 4, *BAD[kind]])
    found = []
    for rank in range(draw(st.integers(1, 4))):
        results = draw(
            st.lists(words, min_size=5, max_size=5) | st.lists(words, max_size=6).filter(lambda r: len(r) != 5)
        )
        end: JobDone | JobFailed = JobDone(
            now_s=0.0,
            job=1,
            results=tuple(map(Status, results)),
            num_bytes=draw(st.integers(0, 9)),
            seconds=draw(st.floats(0, 9)),
        )
        if draw(st.integers(0, 7)) == 0:
            end = JobFailed(now_s=0.0, job=1, failure=draw(st.sampled_from(sorted(JOB_FAILURES))), why="why")
        found.append(RankAnswer(rank, draw(st.sampled_from(["shared", rank])), end))
    return kind, found


@given(answers())
@settings(max_examples=400)
def test_the_shortest_contiguous_prefix_counts(case: tuple[str, list[RankAnswer]]) -> None:
    kind, given_ = case
    order = ORDERS[kind]
    agreed = agree(order, given_)
    wrong = [one.rank for one in given_ if isinstance(one.end, JobFailed) or len(one.end.results) != 5]
    if wrong:
        assert agreed.failure is not None
        named = [int(found) for found in re.findall(r"rank (\d+):", agreed.why)]
        nothing = [one.rank for one in given_ if num_good(order, one.end) == 0]  # as little came from these
        assert named
        assert set(named) <= {*wrong, *nothing}
        blamed = {one.rank for one in agreed.blamed}
        assert blamed <= {*wrong, *nothing}
        gave_up = {one.rank for one in given_ if isinstance(one.end, JobFailed) and one.end.failure is Reason.CANCELLED}
        assert set(wrong) - gave_up <= blamed
        assert not blamed & gave_up
        return
    assert agreed.failure is None
    rows = [one.end.results for one in given_ if isinstance(one.end, JobDone)]
    if kind == "probe":
        assert list(agreed.results) == ["held" if all(row[i] == "held" for row in rows) else "absent" for i in range(5)]
        return
    expected = 0
    while expected < 5 and all(row[expected] in GOOD[kind] for row in rows):
        expected += 1
    assert num_good(order, JobDone(now_s=0, job=1, results=agreed.results)) == expected
    assert not set(agreed.results[expected:]) & set(GOOD[kind])
    if expected < 5:
        assert agreed.results[expected] in {row[expected] for row in rows}
        assert {one.rank for one in agreed.blamed} == {
            one.rank for one, row in zip(given_, rows, strict=True) if row[expected] not in GOOD[kind]
        }
    for at in range(expected):
        fresh = any(row[at] == "stored" for row in rows)
        assert agreed.results[at] == ("hit" if kind == "load" else "stored" if fresh else "exists")
    shared = [one.end.num_bytes for one in given_ if one.page == "shared" and isinstance(one.end, JobDone)]
    own = [one.end.num_bytes for one in given_ if one.page != "shared" and isinstance(one.end, JobDone)]
    assert agreed.num_bytes == max(shared, default=0) + sum(own)


# --- the whole way ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["gqa", "few heads", "mla", "three sorts"])
def test_what_a_group_saved_it_finds_and_loads(
    name: str, tp_size: int, store: MemoryStore, make: Callable[..., Group]
) -> None:
    group = make(name, tp_size, {"host": store})
    group.saved([3, 0, 2])
    distinct = {page for rank in range(tp_size) for page in pages_of(group.layout, parts(group.layout, rank, tp_size))}
    assert len(store.names()) == 3 * len(distinct)  # what several ranks hold is there once
    assert group.ear.results(group.probe(4)) == ["held"] * 3 + ["absent"]
    group.loaded([7, 8, 9])
    assert group.ear.results(group.save([3, 0, 2])) == ["exists"] * 3
    done = group.ear.end(2)
    assert isinstance(done, JobDone)
    end = group.ear.end(3)
    assert isinstance(end, JobDone)
    assert end.num_bytes == store.num_bytes  # every page counted once, whoever read it
    assert [report.state for report in group.ranks.reports()] == [RankState.UP] * tp_size
    assert sum(report.num_answers for report in group.ranks.reports()) >= tp_size


def test_shared_pages_are_written_in_turns_and_read_by_all(make: Callable[..., Group]) -> None:
    inner = MemoryStore(64 << 20)
    stores = [OddStore(inner) for _ in range(4)]
    group = make("mla", 4, lambda rank: {"host": stores[rank]})
    for chain in range(8):
        group.saved([0, 1], chain=chain)
        assert group.ear.results(group.probe(2, chain=chain)) == ["held"] * 2
    puts = [sum(call == "put" for call in one.calls()) for one in stores]
    assert puts == [2] * 4  # eight rows, two by each
    assert len(inner.names()) == 16
    for one in stores:
        one.asked.clear()
    group.loaded([4, 5], chain=3)
    assert all(one.calls() == ["get_into"] for one in stores)
    for chain in range(8):
        group.ear.results(group.probe(2, chain=chain))
    assert [one.calls().count("contains") for one in stores] == [2] * 4  # asked once each, in turns


def test_a_row_that_builds_on_one_still_being_written_follows_it(make: Callable[..., Group]) -> None:
    """Otherwise the second writer, another rank, would find no parent."""
    inner = MemoryStore(64 << 20)
    stores = [OddStore(inner) for _ in range(4)]
    group = make("three sorts", 4, lambda rank: {"host": stores[rank]})
    group.fill([0, 1, 2, 3, 4, 5])
    for one in stores:
        one.gates["put"].shut()
    first = group.save([0, 1])
    second = group.save([2, 3], start=2)
    third = group.save([4, 5], start=4)
    time.sleep(0.05)  # the second has all the time it needs to overtake
    for one in stores:
        one.gates["put"].open()
    for job in (first, second, third):
        assert group.ear.results(job) == ["stored"] * 2
    group.loaded([10, 11, 12, 13, 14, 15])
    group.fill([6], start=6)
    assert group.ear.results(group.save([6], start=6)) == ["stored"]  # nothing under way: another rank's turn


def test_rows_of_one_chain_by_any_rank_when_nothing_is_under_way(
    store: MemoryStore, make: Callable[..., Group]
) -> None:
    group = make("mixed", 4, {"host": store})
    for depth in range(0, 12, 2):
        group.saved([depth, depth + 1], start=depth)
    group.loaded(list(range(16, 28)))


# --- less than was asked ----------------------------------------------------------------------------------------------


def test_a_page_that_one_rank_lacks_ends_the_row_for_all(store: MemoryStore, make: Callable[..., Group]) -> None:
    group = make("gqa", 4, {"host": store})
    group.saved([0, 1, 2, 3, 4])
    lost = next(name for name in store.names() if name[:32] == key(1, 3) and name[32:36] == b"\x02\0\x04\0")
    store.delete([lost], deadline=soon())
    assert group.ear.results(group.probe(5)) == ["held"] * 3 + ["absent"] * 2
    assert group.ear.results(group.load([10, 11, 12, 13, 14])) == ["hit"] * 3 + ["miss"] * 2
    assert group.holds([10, 11, 12]) == [True] * 3
    assert [report.num_short for report in group.ranks.reports()] == [0, 0, 1, 0]
    assert group.metrics.value("rank_trouble_total", rank="2", job="load", reason="miss") == 1


def test_a_damaged_page_of_one_rank(store: MemoryStore, make: Callable[..., Group]) -> None:
    group = make("three sorts", 2, {"host": store})
    group.saved([0, 1, 2])
    name = next(name for name in store.names() if name[:32] == key(1, 1) and name[34:36] == b"\2\0")
    frame = bytearray(store._entries[name].frame)
    frame[-1] ^= 1
    store._entries[name].frame = bytes(frame)
    assert group.ear.results(group.load([5, 6, 7])) == ["hit", "corrupt", "miss"]
    assert group.holds([5]) == [True]


def test_a_rank_that_fails_fails_the_job_at_once_and_is_named(
    make: Callable[..., Group], caplog: pytest.LogCaptureFixture
) -> None:
    inner = MemoryStore(64 << 20)
    stores = [OddStore(inner) for _ in range(4)]
    group = make("gqa", 4, lambda rank: {"host": stores[rank]})
    group.saved([0, 1, 2])
    stores[2].raises["get_into"] = OSError("no route to the pool")
    stores[3].gates["get_into"].shut()  # slow, and not waited for: nothing it brings would count
    with caplog.at_level(logging.WARNING, "headwater"):
        job = group.load([5, 6, 7])
        end = group.ear.end(job)
    assert isinstance(end, JobFailed)
    assert end.failure is Reason.FAILED
    assert end.why == "rank 2: host raised OSError: no route to the pool"
    assert [message for message in caplog.messages if "rank 2" in message and "load of 3 blocks" in message]
    assert group.ranks.reports()[2].num_failed == 1
    stores[3].open()
    del stores[2].raises["get_into"]
    group.loaded([5, 6, 7])
    stores[1].raises["contains"] = RuntimeError("odd")
    failed = group.ear.end(group.probe(3))
    assert isinstance(failed, JobFailed)
    assert "rank 1" in failed.why


def test_a_slow_rank_is_late_and_named(make: Callable[..., Group], caplog: pytest.LogCaptureFixture) -> None:
    inner = MemoryStore(64 << 20)
    stores = [OddStore(inner) for _ in range(4)]
    group = make("mixed", 4, lambda rank: {"host": stores[rank]})
    group.saved([0, 1])
    for call in ("get_into", "contains"):
        stores[1].gates[call].shut()
        begun_s = time.monotonic()
        with caplog.at_level(logging.WARNING, "headwater"):
            job = group.load([5, 6], within_s=0.1) if call == "get_into" else group.probe(2, within_s=0.1)
            end = group.ear.end(job)
        assert time.monotonic() - begun_s < 0.1 + SLACK_S
        assert isinstance(end, JobFailed)
        assert end.failure is Reason.LATE
        assert set(re.findall(r"rank \d", end.why)) == {"rank 1"}
        assert any("rank 1: no answer by the deadline" in message for message in caplog.messages)
        stores[1].open()
        caplog.clear()
    assert [report.num_late for report in group.ranks.reports()][0::2] == [0, 0]
    assert group.ranks.reports()[1].num_late >= 2
    assert group.ranks.reports()[1].state is RankState.UP  # it was told, and heard it
    wait_until(lambda: group.ranks.drain(0.1))
    group.loaded([5, 6])


def test_a_cancelled_job_ends_cancelled(make: Callable[..., Group]) -> None:
    inner = MemoryStore(64 << 20)
    stores = [OddStore(inner) for _ in range(2)]
    group = make("gqa", 2, lambda rank: {"host": stores[rank]})
    group.saved([0, 1])
    stores[1].gates["get_into"].shut()
    job = group.load([5, 6])
    stores[1].gates["get_into"].wait_for_arrival()
    group.cancel(job)
    assert group.ear.failure(job) is Reason.CANCELLED
    assert group.ranks.reports()[1].num_late == group.ranks.reports()[1].num_failed == 0
    stores[1].open()
    group.cancel(job)  # which is over
    group.cancel(12345)  # which never was


# --- a rank that is gone ----------------------------------------------------------------------------------------------


class Heartbeat:
    """Sees when the machine itself stands still: a thread that should wake every few milliseconds, and does not."""

    def __init__(self) -> None:
        self._stalls: list[tuple[float, float]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat)
        self._thread.start()

    def _beat(self) -> None:
        last_s = time.monotonic()
        while not self._over.wait(0.005):
            now_s = time.monotonic()
            if now_s - last_s > 0.1:
                self._stalls.append((last_s, now_s))
            last_s = now_s

    def stalled_s(self, start_s: float, end_s: float) -> float:
        return sum(max(0.0, min(end, end_s) - max(start, start_s)) for start, end in list(self._stalls))

    def close(self) -> None:
        self._over.set()
        self._thread.join()


@pytest.fixture
def beat() -> Iterator[Heartbeat]:
    found = Heartbeat()
    yield found
    found.close()


def test_a_dead_rank_is_a_miss_within_the_deadline_1000_times_of_1000(
    make: Callable[..., Group], beat: Heartbeat
) -> None:
    """Thread ranks: stuck in a store, in every call of it; raising; closed. 25 rounds of 40 jobs at once."""
    rng = random.Random(3)
    ended = late = 0
    for round_ in range(25):
        inner = MemoryStore(64 << 20)
        stores = [OddStore(inner) for _ in range(2)]
        group = make("gqa", 2, lambda rank, stores=stores: {"host": stores[rank]}, num_slots=128)
        group.saved([0, 1, 2])
        before = [devices.snapshot() for devices in group.devices]
        way = ("stuck", "raises", "closed")[round_ % 3]
        dead = rng.randrange(2)
        for call in ("get_into", "contains", "put"):
            if way == "stuck":
                stores[dead].gates[call].shut()
            elif way == "raises":
                stores[dead].raises[call] = OSError("gone")
        if way == "closed":
            for member in group.by_rank[dead]:
                assert member.executor.close(PATIENCE_S)
        within_s = rng.choice([0.02, 0.05])
        jobs = []
        for i in range(10, 50):
            job = (
                group.probe(3, within_s=within_s) if rng.random() < 0.5 else group.load([i, 60, 61], within_s=within_s)
            )
            jobs.append((job, time.monotonic() + within_s))
        for job, deadline_s in jobs:
            end = group.ear.end(job)
            if isinstance(end, JobDone):  # the deadline passed between two steps of it
                assert set(end.results) == {"late"}, f"{way}: {end}"
            else:
                assert f"rank {dead}" in end.why, f"{way}: {end}"
            ended += 1
            late += end.now_s - beat.stalled_s(deadline_s, end.now_s) > deadline_s + SLACK_S
        after = [devices.snapshot() for devices in group.devices]
        assert after[dead] == before[dead], "a dead rank wrote"
        for one in stores:
            one.open()
        assert group.ranks.close(PATIENCE_S)
    assert (ended, late) == (1000, 0)


# --- rule 2 over all ranks --------------------------------------------------------------------------------------------


def test_a_rank_that_copies_past_the_deadline_holds_the_event_back(make: Callable[..., Group]) -> None:
    with MemoryStore(64 << 20) as memory:
        group = make("gqa", 2, {"host": memory}, lost_after_s=PATIENCE_S)
        group.saved([0, 1, 2])
        gate = Gate()
        gate.shut()
        (staging,) = group.devices[1].stagings
        staging.on_scatter = gate
        job = group.load([5, 6, 7], within_s=0.05)
        gate.wait_for_arrival()
        wait_until(lambda: [type(event) for event in group.ear.of(job)] == [Stuck])  # the deadline is over
        assert not group.ranks.wait_layer(job, 0, PATIENCE_S)
        assert not group.ear.ends(job), "slots were given free while a rank was writing to them"
        gate.open()
        assert group.ear.failure(job) is Reason.LATE
        after = [devices.snapshot() for devices in group.devices]
        assert staging.block(5) != bytes(len(staging.block(5)))
        time.sleep(0.1)
        assert [devices.snapshot() for devices in group.devices] == after


def test_nothing_is_written_to_a_slot_after_its_event(make: Callable[..., Group]) -> None:
    """Stores and copies take random times around the deadline; who hears the end paints the slots, and they stay so."""
    rng = random.Random(11)
    inner = MemoryStore(64 << 20)
    stores = [OddStore(inner) for _ in range(3 + 1)]
    group = make("mixed", 4, lambda rank: {"host": stores[rank]}, num_slots=128, lost_after_s=PATIENCE_S)
    group.saved([0, 1, 2])
    painted: list[int] = []
    slots_of: dict[int, list[int]] = {}

    def paint(event: Any) -> None:
        if isinstance(event, JobDone | JobFailed) and event.job in slots_of:
            if isinstance(event, JobDone) and all(result == "hit" for result in event.results):
                return
            for slot in slots_of[event.job]:
                for devices in group.devices:
                    for staging in devices.stagings:
                        staging.device[slot] = 0x5A
            painted.extend(slots_of[event.job])

    group.ear.extra = paint

    def linger(*_: Any) -> None:
        time.sleep(rng.choice([0.0, 0.0, 0.0, 0.003, 0.02]))

    def lingering(found: list[Any]) -> list[Any]:
        linger()
        return found

    for devices in group.devices:
        for staging in devices.stagings:
            staging.on_scatter = linger
    for one in stores:
        one.answers["get_into"] = lingering
    for round_ in range(40):
        slots = [4 + 3 * round_ + i for i in range(3)]
        number = len(group.jobs) + 1
        slots_of[number] = slots
        assert group.load(slots, within_s=rng.choice([0.002, 0.01, 0.03, 0.06])) == number
        if rng.random() < 0.3:
            group.cancel(number)
        if round_ % 4 == 3:
            assert group.ranks.drain(PATIENCE_S)
    assert group.ranks.drain(PATIENCE_S)
    time.sleep(0.05)
    assert painted
    for slot in painted:
        for devices in group.devices:
            for staging in devices.stagings:
                assert set(staging.block(slot)) == {0x5A}, "written to after the end of the job"
    for job, slots in slots_of.items():
        end = group.ear.end(job)
        if isinstance(end, JobDone) and all(result == "hit" for result in end.results):
            assert all(group.holds(slots))


def test_blocks_of_a_save_are_read_by_nobody_after_copied(make: Callable[..., Group]) -> None:
    with MemoryStore(64 << 20) as memory:
        group = make("three sorts", 2, {"host": memory})
        group.fill([0, 1])
        gate = Gate()
        gate.shut()
        (*_, staging) = group.devices[1].stagings
        staging.on_gather = gate
        job = group.save([0, 1])
        gate.wait_for_arrival()
        time.sleep(0.05)
        assert not group.ear.of(job)  # the others have long copied
        gate.open()
        assert group.ear.results(job) == ["stored"] * 2
        assert [type(event) for event in group.ear.of(job)] == [Copied, JobDone]


# --- ranks that say nothing -------------------------------------------------------------------------------------------


def scripted(*, mortal: bool = False, tp_size: int = 2, **options: Any) -> tuple[Jobs, list[ScriptedExecutor]]:
    """A group of executors that a test answers for."""
    executors = [ScriptedExecutor(mortal=mortal) for _ in range(tp_size)]
    members = [Member(rank, Shard(rank, tp_size), 7, one) for rank, one in enumerate(executors)]
    return Jobs(members, ["host", "pool"], **options), executors


def test_a_silent_rank_counts_zero_by_the_deadline_but_its_slots_are_not_free() -> None:
    group, (first, second) = scripted(slack_s=0.02, lost_after_s=0.1)
    probe, load = group.probe(2, within_s=0.05), group.load([0, 1], within_s=0.05)
    first.done(probe, "held", "held")
    first.done(load, "hit", "hit")
    end = group.ear.end(probe)
    assert isinstance(end, JobFailed)
    assert (end.failure, end.why) == (Reason.LATE, "rank 1: no answer by the deadline")
    wait_until(lambda: group.ranks.reports()[1].state is RankState.SILENT)
    assert sorted(second.cancels()) == [probe, load]  # it was cancelled first
    assert not group.ear.ends(load)
    wait_until(lambda: [type(event) for event in group.ear.of(load)] == [Stuck])  # nobody waits for it
    assert not group.ranks.drain(0.01)
    refused = group.ear.end(group.save([5, 6]))  # and nothing begins meanwhile
    assert isinstance(refused, JobFailed)
    assert refused.why.startswith("rank 1 is silent: no answer to a ")
    assert not [one for one in first.asked if isinstance(one, Save)]
    second.say(JobFailed(now_s=0.0, job=load, failure=Reason.CANCELLED))
    assert group.ear.failure(load) is Reason.LATE
    second.say(JobFailed(now_s=0.0, job=probe, failure=Reason.CANCELLED))
    assert group.ranks.reports()[1].state is RankState.UP  # it has answered all it pending
    again = group.load([0, 1])
    for executor in (first, second):
        executor.done(again, "hit", "hit")
    assert group.ear.results(again) == ["hit", "hit"]
    assert [event.facts["rank"] for event in group.metrics.events("rank_silent")] == [1]
    group.finish()


def test_a_rank_that_dies_owes_nothing_and_one_that_may_be_is_shot() -> None:
    group, (first, second) = scripted(mortal=True, slack_s=0.02, lost_after_s=0.05)
    load = group.load([0, 1], within_s=0.05)
    first.done(load, "hit", "hit")
    wait_until(lambda: second.num_shots == 1)
    assert not group.ear.ends(load)  # a kill that was not allowed, or did nothing
    second.die("killed")
    end = group.ear.end(load)
    assert isinstance(end, JobFailed)
    assert "rank 1: killed" in end.why
    assert group.ranks.reports()[1].state is RankState.DEAD
    second.die("killed twice")
    second.done(load, "hit", "hit")  # a ghost
    assert "rank 1 is dead: killed" in str(group.ear.end(group.probe(1)))
    group.finish()


def test_a_rank_that_was_dead_before_the_group_was_made() -> None:
    executors = [ScriptedExecutor(mortal=True) for _ in range(2)]
    executors[1].death = "never came"
    group = Jobs([Member(rank, Shard(rank, 2), 7, one) for rank, one in enumerate(executors)], ["host"])
    assert "rank 1 is dead: never came" in str(group.ear.end(group.probe(1)))
    group.finish()


def test_all_ranks_stand_back_and_nobody_knows_at_a_glance() -> None:
    group, executors = scripted()
    group.ranks.throttle_saves(on=True)
    assert [one.hurried for one in executors] == [True, True]
    group.ranks.throttle_saves(on=False)
    assert [one.hurried for one in executors] == [False, False]
    assert group.ranks.contains_cached(Probe(job=99, store="host", keys=(), deadline_s=0.0)) is None
    group.finish()


def test_hands_that_refuse_a_job_fail_it() -> None:
    group, (first, second) = scripted()
    second.refuses = ResourceClosed("shut down")
    job = group.load([0, 1])
    assert first.cancels() == [job]
    first.say(JobFailed(now_s=0.0, job=job, failure=Reason.CANCELLED))
    end = group.ear.end(job)
    assert isinstance(end, JobFailed)
    assert (end.failure, end.why) == (Reason.FAILED, "rank 1: ResourceClosed: shut down")
    group.finish()


def test_nothing_but_a_whole_answer_of_every_rank_is_a_hit() -> None:
    """A rank was cancelled because another one failed, or because the engine gave up: its bytes are not there."""
    group, (first, second) = scripted()
    job = group.load([0, 1])
    group.cancel(job)
    first.say(JobFailed(now_s=0.0, job=job, failure=Reason.CANCELLED))
    second.done(job, "hit", "hit")
    assert group.ear.failure(job) is Reason.CANCELLED
    job = group.load([0, 1])
    first.done(job, "miss", "miss")
    assert second.cancels() == [1, job]
    second.say(JobFailed(now_s=0.0, job=job, failure=Reason.CANCELLED))
    assert group.ear.results(job) == ["miss", "miss"]  # why it was a miss is not that the other was cancelled for it
    job = group.load([0, 1])
    first.done(job, "hit")  # one result for two blocks
    second.done(job, "hit", "hit")
    assert "rank 0: 1 results for 2 blocks" in str(group.ear.end(job))
    group.finish()


@given(st.integers(0, 1 << 32))
@settings(max_examples=150)
def test_whatever_ranks_say_in_whatever_order(seed: int) -> None:
    """Against a model: one end a job, no hit that a rank did not have, no slot free before all answered or died."""
    rng = random.Random(seed)
    tp_size = rng.choice([1, 2, 3])
    group, executors = scripted(mortal=True, tp_size=tp_size, slack_s=60.0)
    pending: set[tuple[int, int]] = set()  # (job, rank)
    said: dict[int, dict[int, list[str] | None]] = {}
    dead: set[int] = set()
    kinds: dict[int, str] = {}
    words = {"probe": ["held", "absent"], "load": ["hit", "hit", "miss"], "save": ["stored", "exists", "failed"]}
    for _ in range(30):
        step = rng.random()
        if step < 0.3:
            kind = rng.choice(["probe", "load", "save"])
            job = (
                group.probe(3)
                if kind == "probe"
                else group.load([0, 1, 2])
                if kind == "load"
                else group.save([0, 1, 2])
            )
            kinds[job], said[job] = kind, {}
            if not dead:
                pending |= {(job, rank) for rank in range(tp_size)}
        elif step < 0.35:
            group.cancel(rng.randint(1, len(group.jobs) + 1))
        elif step < 0.38 and len(dead) < tp_size:
            rank = rng.choice([rank for rank in range(tp_size) if rank not in dead])
            dead.add(rank)
            for job in [job for job, of in pending if of == rank]:
                pending.discard((job, rank))
                said[job][rank] = None
            executors[rank].die("killed")
        elif pending:
            job, rank = rng.choice(sorted(pending))
            if kinds[job] == "save" and rng.random() < 0.5:
                executors[rank].say(Copied(now_s=0.0, job=job))
                continue
            pending.discard((job, rank))
            if rng.random() < 0.25:
                said[job][rank] = None
                failure = rng.choice([Reason.FAILED, Reason.CANCELLED, Reason.LATE])
                executors[rank].say(JobFailed(now_s=0.0, job=job, failure=failure))
            else:
                said[job][rank] = [rng.choice(words[kinds[job]]) for _ in range(3)]
                executors[rank].done(job, *said[job][rank])  # type: ignore[misc]
        for job, kind in kinds.items():
            ends = group.ear.ends(job)
            assert len(ends) <= 1
            waiting = [rank for of, rank in pending if of == job]
            if kind != "probe":
                assert not (ends and waiting), "slots were free before every rank had said its end"
            if ends and isinstance(ends[0], JobDone):
                answered = list(said[job].values())
                assert None not in answered or "hit" not in ends[0].results
                for at, result in enumerate(ends[0].results):
                    if result in ("hit", "stored", "exists", "held"):
                        assert len(answered) == tp_size
                        good = ("held",) if kind == "probe" else ("hit",) if kind == "load" else ("stored", "exists")
                        assert all(row is not None and row[at] in good for row in answered)
    for job, rank in sorted(pending):
        executors[rank].say(JobFailed(now_s=0.0, job=job, failure=Reason.CANCELLED))
    assert group.ranks.drain(PATIENCE_S)
    group.finish()


# --- the rest of the face ---------------------------------------------------------------------------------------------


def test_seats_that_are_no_group_are_refused() -> None:
    def members(*places: tuple[int, int, int, int]) -> list[Member]:
        return [Member(rank, Shard(index, count), part, ScriptedExecutor()) for rank, index, count, part in places]

    for wrong, why in (
        ([], "from 0 on"),
        (members((1, 0, 1, 0)), "from 0 on"),
        (members((0, 0, 2, 7)), "does not hold"),
        (members((0, 0, 2, 7), (1, 0, 2, 7)), "does not hold"),
        (members((0, 1, 2, 7), (1, 0, 2, 7)), "does not hold"),
        (members((0, 0, 2, 7), (1, 1, 2, 7), (1, 0, 1, 0)), "the same parts"),
        (members((0, 0, 2, 7), (0, 0, 2, 7), (1, 1, 2, 7), (1, 1, 2, 7)), "the same parts"),
        (members((0, 0, 1, 3), (1, 0, 1, 4)), "call it part"),
        (members((0, 0, 3, 7), (1, 1, 3, 7)), "does not hold"),
    ):
        with pytest.raises(InvalidInput, match=why):
            Ranks(wrong, stores=["host"])
    with pytest.raises(InvalidInput, match="seconds"):
        Ranks(members((0, 0, 1, 0)), stores=["host"], slack_s=-1)


def test_what_cannot_be_done_is_refused_with_nothing_taken() -> None:
    group, (first, _) = scripted()
    good = Probe(job=1, store="host", keys=keys(1, 1), deadline_s=1.0)
    for bad in (
        Probe(job=2, store="nowhere", keys=keys(1, 1), deadline_s=1.0),
        Load(job=2, store="host", keys=keys(1, 1), deadline_s=1.0, slots=()),
        Probe(job=1, store="host", keys=keys(1, 1), deadline_s=1.0),
        Left(now_s=1.0, request="a"),
    ):
        with pytest.raises(InvalidInput):
            group.ranks.submit([good, bad])  # type: ignore[list-item]
    assert not first.asked
    unheard = Ranks([Member(0, Shard(0, 1), 0, ScriptedExecutor())], stores=["host"])
    with pytest.raises(InvalidInput, match="deliver"):
        unheard.submit([good])
    assert unheard.close(PATIENCE_S)
    with pytest.raises(ResourceClosed):
        unheard.submit([good])
    assert unheard.close(PATIENCE_S)
    group.finish()


def test_close_ends_every_job_and_says_when_it_could_not() -> None:
    group, (first, second) = scripted()
    jobs = [group.load([0]), group.save([1]), group.probe(1)]
    second.is_closable = False
    assert not group.ranks.close(0.1)
    assert not group.ear.ends(jobs[0])
    assert first.cancels() == second.cancels() == jobs
    second.is_closable = True
    assert group.ranks.close(PATIENCE_S)
    assert {group.ear.failure(job) for job in jobs} == {Reason.CANCELLED}
    group.check_ends()


def test_the_group_s_own_thread_may_submit_and_not_wait() -> None:
    group, (first, second) = scripted(slack_s=0.0)
    raised: list[BaseException] = []

    def again(event: Any) -> None:
        if isinstance(event, JobFailed) and event.job == 1:
            group.submit(Probe(job=2, store="host", keys=keys(1, 1), deadline_s=SYSTEM_CLOCK.monotonic() + 60))
            for wait in (group.ranks.drain, group.ranks.close):
                try:
                    wait(1.0)
                except InvalidInput as error:
                    raised.append(error)

    group.ear.extra = again
    assert group.probe(1, within_s=0.01) == 1
    wait_until(lambda: len(raised) == 2)
    for executor in (first, second):
        executor.done(2, "held")
    assert group.ear.results(2) == ["held"]
    group.finish()


def test_a_store_that_one_rank_finds_off_is_off_for_all() -> None:
    group, (first, second) = scripted()
    for executor in (second, first, second):
        executor.say(StoreOff(now_s=0.0, store="pool", why="nothing but bad pages came from it"))
    off = [event for event in group.ear.events if isinstance(event, StoreOff)]
    assert [(event.store, event.why) for event in off] == [("pool", "rank 1: nothing but bad pages came from it")]
    with pytest.raises(InvalidInput, match="no store"):
        group.ranks.revive("cellar")
    first.revives = False
    assert not group.ranks.revive("pool")
    assert second.revived == ["pool"]  # each was asked, not only up to the first that could not
    assert not [event for event in group.ear.events if isinstance(event, StoreOn)]
    first.revives = True
    assert group.ranks.revive("pool")
    second.say(StoreOn(now_s=0.0, store="pool"))
    assert group.ranks.drain(PATIENCE_S)
    assert sum(isinstance(event, StoreOn) for event in group.ear.events) == 1
    second.say(StoreOff(now_s=0.0, store="pool", why="again"))
    assert sum(isinstance(event, StoreOff) for event in group.ear.events) == 2
    group.finish()


# --- with a brain -----------------------------------------------------------------------------------------------------


def cache_config(layout: Any, *tiers: TierConfig, num_slots: int = 8) -> CacheConfig:
    return CacheConfig(
        num_slots=num_slots,
        block_tokens=layout.block_tokens,
        block_bytes=layout.page_bytes,
        tiers=tiers,
        prefetch=False,
    )


def tier(name: str, **options: Any) -> TierConfig:
    return TierConfig(name=name, probe_timeout_s=20, load_timeout_s=options.pop("load_timeout_s", 20), **options)


class Engine:
    """An engine of several ranks: a cache, devices in numpy, and what it would compute."""

    def __init__(
        self,
        name: str,
        tp_size: int,
        stores: dict[str, Store],
        config: CacheConfig,
        views: dict[str, str] | None = None,
    ) -> None:
        self.layout = LAYOUTS[name]
        self.devices = [
            RankDevices(self.layout, rank, tp_size, num_slots=config.num_slots, seed=tp_size) for rank in range(tp_size)
        ]
        members = [member for one in self.devices for member in thread_rank(one, tp_size, stores, views=views)]
        self.cache = open_group(config, members)

    def run(self, request: str, chain: int, num_blocks: int) -> dict[str, int]:
        """Serve a request: load what is there, compute the rest, commit. Returns the blocks that were hit, by tier."""
        wanted, root = keys(chain, num_blocks), key(chain, -1)
        self.cache.match(request, wanted, root=root)
        self.cache.wait(request, 20)
        slots = self.cache.reserve(request, num_blocks)
        assert slots is not None
        ready = self.cache.wait(request, 20).num_ready
        for at, (slot, name) in enumerate(zip(slots, wanted, strict=True)):
            for devices in self.devices:
                if at < ready:
                    assert devices.holds(slot, whole_block(self.layout, name)), "wrong bytes in a block that was ready"
                else:
                    devices.fill(slot, whole_block(self.layout, name))
        self.cache.commit(request, wanted[ready:])
        with self.cache.still() as brain:  # an executor may be telling it something
            brain.validate()
        bill = self.cache.release(request)
        assert bill is not None
        return {name: tokens // self.layout.block_tokens for name, tokens in bill.hit_tokens}


def test_a_cache_of_two_ranks_evicts_and_loads_back(store: MemoryStore) -> None:
    layout = LAYOUTS["three sorts"]
    engine = Engine("three sorts", 2, {"host": store}, cache_config(layout, tier("host")))
    with engine.cache as cache:
        assert engine.run("one", 1, 6) == {}
        assert cache.drain(20)
        assert engine.run("two", 1, 6) == {"device": 6}
        assert engine.run("three", 2, 8) == {}  # takes all slots
        assert cache.drain(20)
        assert engine.run("four", 1, 6) == {"host": 6}
        assert cache.drain(20)
        with cache.still() as brain:  # an executor may be telling it something
            brain.validate()


def test_a_cache_reads_what_another_size_wrote_and_keeps_it_at_its_own(store: MemoryStore) -> None:
    layout = LAYOUTS["mixed"]
    wrote = Engine("mixed", 4, {"pool": store}, cache_config(layout, tier("pool")))
    with wrote.cache as cache:
        wrote.run("one", 1, 4)
        assert cache.drain(20)
    tiers = (tier("pool"), tier("view", save=SaveWhen.NEVER))
    read = Engine("mixed", 2, {"pool": store}, cache_config(layout, *tiers), views={"view": "pool"})
    with read.cache as cache:
        assert read.run("two", 1, 6) == {"view": 4}  # and computes two more
        assert cache.drain(20)
    again = Engine("mixed", 2, {"pool": store}, cache_config(layout, *tiers), views={"view": "pool"})
    with again.cache as cache:
        assert again.run("three", 1, 6) == {"pool": 6}  # all of it is at this size now, its prefix too
        assert cache.drain(20)
    back = Engine("mixed", 4, {"pool": store}, cache_config(layout, *tiers), views={"view": "pool"})
    with back.cache as cache:
        assert back.run("four", 1, 6) == {"pool": 4, "view": 2}


def test_a_request_leaves_a_silent_rank_and_its_slots_stay_locked(make: Callable[..., Group]) -> None:
    """What an engine does: it waits as long as it likes, gives the request's slots back, and computes in others."""
    layout = LAYOUTS["gqa"]
    executors = [ScriptedExecutor(mortal=True) for _ in range(2)]
    members = [Member(rank, Shard(rank, 2), 7, one) for rank, one in enumerate(executors)]
    cache = open_group(cache_config(layout, tier("host", load_timeout_s=0.05)), members)
    wanted, root = keys(1, 3), key(1, -1)
    with cache:
        cache.match("one", wanted, root=root)
        for one in executors:
            (probe,) = one.asked
            assert isinstance(probe, Probe)
            one.done(probe.job, "held", "held", "held")
        slots = cache.reserve("one", 3)
        assert slots is not None
        job = next(one.job for one in executors[0].asked if isinstance(one, Load))
        executors[0].done(job, "hit", "hit", "hit")
        assert cache.wait("one", 0.2).loading  # rank 1 says nothing
        cache.release("one")
        cache.match("two", wanted, root=root)
        others = cache.reserve("two", 3, load=False)
        assert others is not None
        assert not set(others) & set(slots), "slots that a rank may still write to were given away"
        assert not cache.poll("two").loading
        cache.commit("two", wanted)
        with cache.still() as brain:  # an executor may be telling it something
            brain.validate()
        assert cache.reserve("two", 6) is None  # five of the eight are free, three of them locked
        executors[1].die("gone at last")
        wait_until(lambda: cache.reserve("two", 6) is not None)
        with cache.still() as brain:  # an executor may be telling it something
            brain.validate()


# --- tensors, layer by layer ------------------------------------------------------------------------------------------


def test_layers_are_waited_for_on_all_ranks(shm: Path) -> None:
    """On a slab in memory, where loads go in place and by layers: what `wait_layer` allows is there on every rank."""
    from headwater.layout.frame import frame_bytes
    from headwater.layout.shard import shard_layout
    from headwater.testing.layouts import randomise
    from headwater.transfer.device.arena import create_host_cache, create_kv_cache
    from headwater.transfer.executor.staging import TorchStaging

    layout, tp_size = LAYOUTS["three sorts"], 2
    with ExitStack() as stack:
        local = stack.enter_context(open_local(LocalStoreConfig(directory=shm / "store", limit_bytes=8 << 20)))
        caches = [
            stack.enter_context(create_kv_cache(shard_layout(layout, rank, tp_size), 16)) for rank in range(tp_size)
        ]
        members = []
        for rank, cache in enumerate(caches):
            randomise(cache, seed=rank)
            stagings = [
                stack.enter_context(
                    TorchStaging(
                        cache,
                        stack.enter_context(create_host_cache(frame_bytes(part.layout.plane_bytes), 4)),
                        layout=part.layout,
                    )
                )
                for part in parts(layout, rank, tp_size)
            ]
            members += open_rank(rank, tp_size, {"host": local}, stagings, layout=layout, identity=IDENTITY)
        latent = layout.index("latent", 3)
        for at in (latent, latent + 1):  # replicated: the same on all ranks
            caches[1].rows[at].copy_(caches[0].rows[at])
        group = Jobs(members, ["host"])
        woken: list[int] = []
        group.ranks.on_first_layer(lambda: woken.append(1))
        assert group.ear.results(group.save([0, 1, 2])) == ["stored"] * 3
        job = group.load([5, 6, 7])
        for layer in range(5):
            if not group.ranks.wait_layer(job, layer, PATIENCE_S):  # it is over: then all is there
                assert group.ear.results(job) == ["hit"] * 3
            for cache in caches:
                for row, plane in zip(cache.rows, cache.layout.planes, strict=True):
                    assert plane.layer > layer or bool((row[5:8] == row[0:3]).all())
        assert group.ear.results(job) == ["hit"] * 3
        assert woken
        assert not group.ranks.wait_layer(job, 0, PATIENCE_S)
        missing = group.load([8, 9], chain=2)
        assert not group.ranks.wait_layer(missing, 0, PATIENCE_S)
        group.finish()


def test_a_layer_is_there_when_the_last_rank_has_it_and_not_before() -> None:
    group, (first, second) = scripted()
    job = group.load([0, 1])
    found: list[bool] = []
    waiter = threading.Thread(target=lambda: found.append(group.ranks.wait_layer(job, 0, PATIENCE_S)))
    waiter.start()
    first.done(job, "hit", "hit")
    assert not group.ranks.wait_layer(job, 0, 0.05)
    assert not found
    second.done(job, "hit", "hit")
    waiter.join(PATIENCE_S)
    assert found == [True]
    for answer in (("hit", "miss"), ("miss", "miss")):
        job = group.load([0, 1])
        found.clear()
        waiter = threading.Thread(target=lambda job=job: found.append(group.ranks.wait_layer(job, 0, PATIENCE_S)))
        waiter.start()
        second.done(job, *answer)
        first.done(job, "hit", "hit")
        waiter.join(PATIENCE_S)
        assert found == [False]
    group.finish()


def test_the_example_of_the_document_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "RANKS.md"
    (example,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    exec(compile(example, "RANKS.md", "exec"), {})
    assert capsys.readouterr().out.splitlines() == [
        "TP 4: 0 blocks were there, {}",
        "TP 2: 6 blocks were there, {'pool_tp': 96}",
        "TP 2: 6 blocks were there, {'pool': 96}",
        "TP 1: 6 blocks were there, {'pool_tp': 96}",
    ]


@pytest.mark.fault("X25")
def test_a_rank_without_a_thread_to_revive_a_store_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """X25: a RuntimeError ended the rank's process."""
    ours, theirs = socket.socketpair()

    def nobody(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with ours, theirs, monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", nobody)
        ours.sendall(packed({"revive": "host", "member": 0, "ask": 1}) + packed({"close": 1.0, "ask": 2}))
        assert serve_rank(theirs, [Member(0, WHOLE, 0, ScriptedExecutor())], identity=bytes(32))
        answers = Incoming()
        assert answers.read(ours)
        assert [one["is"] for one in answers.documents()] == [False, True]
