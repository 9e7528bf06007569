"""Ranks in processes of their own: killed, stopped, shot, strangers. What one may still write to is not free."""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headwater.build import open_local
from headwater.config.stores import LocalStoreConfig
from headwater.core.errors import InvalidInput, RankUnavailable
from headwater.core.events import JobDone, JobFailed, Probe, StoreOn
from headwater.core.results import Reason
from headwater.layout.shard import parts
from headwater.storage.local import LocalStore
from headwater.testing.pages import IDENTITY
from headwater.transfer.ranks.link import RankLink
from headwater.transfer.ranks.members import Member
from headwater.transfer.ranks.roster import RankState
from headwater.transfer.ranks.server import serve_rank
from headwater.transfer.ranks.wire import Incoming, packed
from machines.ranks import (
    RankDevices,
    RankProcess,
    RankProcesses,
    connect_rank,
    cut,
    pages_of,
    rank_processes,
    thread_rank,
    whole_block,
)
from rank_kit import LAYOUTS, Jobs
from worker_kit import PATIENCE_S, keys, wait_until

LAYOUT = LAYOUTS["mixed"]
SLACK_S = 0.5


@pytest.fixture
def local(shm: Path) -> Iterator[LocalStore]:
    with open_local(LocalStoreConfig(directory=shm / "store", limit_bytes=8 << 20)) as found:
        yield found


@pytest.fixture
def processes(shm: Path, local: LocalStore) -> Iterator[RankProcesses]:
    with rank_processes(shm, layout="mixed", tp_size=2) as found:
        yield found


class Pair(Jobs):
    """A group of two: rank 0 in this process, rank 1 in another."""

    def __init__(self, local: LocalStore, process: RankProcess, **options: Any) -> None:
        self.process = process
        self.devices = RankDevices(LAYOUT, 0, 2)
        super().__init__([*thread_rank(self.devices, 2, {"host": local}), *process.members], ["host"], **options)

    def fill(self, slot: int, block: bytes) -> None:
        self.devices.fill(slot, block)
        for device, part in zip(self.process.devices, parts(LAYOUT, 1, 2), strict=True):
            device[slot] = memoryview(cut(LAYOUT, part, block))

    def holds(self, slot: int, block: bytes) -> bool:
        there = zip(self.process.devices, parts(LAYOUT, 1, 2), strict=True)
        return self.devices.holds(slot, block) and all(
            bytes(device[slot]) == cut(LAYOUT, part, block) for device, part in there
        )

    def saved_and_loaded(self, chain: int) -> None:
        for at, name in enumerate(keys(chain, 3)):
            self.fill(at, whole_block(LAYOUT, name))
        assert self.ear.results(self.save([0, 1, 2], chain=chain)) == ["stored"] * 3
        assert self.ear.results(self.probe(4, chain=chain)) == ["held"] * 3 + ["absent"]
        assert self.ear.results(self.load([5, 6, 7], chain=chain)) == ["hit"] * 3
        for at, name in enumerate(keys(chain, 3)):
            assert self.holds(5 + at, whole_block(LAYOUT, name))

    def theirs(self) -> bytes:
        return b"".join(device.tobytes() for device in self.process.devices)


def test_a_killed_process_is_a_miss_at_once_20_times_of_20(local: LocalStore, processes: RankProcesses) -> None:
    for chain in range(20):
        group = Pair(local, processes.start(1))
        group.saved_and_loaded(chain)
        jobs = [group.load([8, 9, 10], chain=chain, within_s=5.0) for _ in range(3)] if chain % 2 else []
        group.process.kill()
        jobs += [group.load([8, 9, 10], chain=chain, within_s=5.0), group.probe(3, chain=chain, within_s=5.0)]
        begun_s = time.monotonic()
        ends = [group.ear.end(job) for job in jobs]
        assert time.monotonic() - begun_s < 5.0 + SLACK_S
        for end in ends:  # what it had done by then, it had done
            assert isinstance(end, JobDone) or "rank 1" in end.why
        wait_until(lambda group=group: group.ranks.reports()[1].state is RankState.DEAD)  # type: ignore[misc]
        last = group.ear.end(group.load([8, 9, 10], chain=chain))  # and now nobody waits for it any more
        assert isinstance(last, JobFailed)
        assert last.failure is Reason.FAILED
        assert "rank 1 is dead: its process" in last.why
        group.finish()


def paused(processes: RankProcesses, shm: Path, **options: Any) -> tuple[RankProcess, Path, Path]:
    """A rank that stops in the middle of writing to its slots: it makes the first file, and waits for the second."""
    here, until = shm / "here", shm / "until"
    return processes.start(1, pause=[str(here), str(until)], **options), here, until


def written(local: LocalStore, processes: RankProcesses) -> None:
    """Have a whole group write chain 1, and leave."""
    group = Pair(local, processes.start(1))
    group.saved_and_loaded(1)
    group.finish()


def test_slots_of_a_stopped_process_are_not_free_until_it_has_said_so(
    shm: Path, local: LocalStore, processes: RankProcesses
) -> None:
    written(local, processes)
    process, here, until = paused(processes, shm)
    group = Pair(local, process, lost_after_s=0.1)
    job = group.load([5, 6, 7], within_s=2.0)
    wait_until(here.exists)  # it is about to write
    process.stop()
    until.touch()
    wait_until(lambda: group.ranks.reports()[1].state is RankState.SILENT)
    refused = group.ear.end(group.probe(1))
    assert isinstance(refused, JobFailed)
    assert refused.why.startswith("rank 1 is silent")
    time.sleep(2.2)  # beyond its deadline, which a busy machine must not reach before it begins to write
    assert not group.ear.ends(job), "slots were free while a stopped process may write to them"
    before = group.theirs()
    process.go_on()
    assert group.ear.failure(job) is Reason.LATE
    after = group.theirs()
    assert after != before  # it did write, and said so afterwards
    time.sleep(0.1)
    assert group.theirs() == after
    wait_until(lambda: group.ranks.reports()[1].state is RankState.UP)
    group.saved_and_loaded(2)
    group.finish()


def test_a_silent_process_is_killed_where_that_is_allowed(
    shm: Path, local: LocalStore, processes: RankProcesses
) -> None:
    written(local, processes)
    process, here, _ = paused(processes, shm, may_kill=True)
    group = Pair(local, process, lost_after_s=0.1)
    job = group.load([5, 6, 7], within_s=0.1)
    wait_until(here.exists)
    process.stop()
    end = group.ear.end(job)
    assert isinstance(end, JobFailed)
    assert "rank 1: its process" in end.why
    assert end.now_s < group.ear.events[0].now_s + 5
    assert group.ranks.reports()[1].state is RankState.DEAD
    group.finish()


def test_a_process_that_does_not_read_holds_nobody_up(local: LocalStore, processes: RankProcesses) -> None:
    group = Pair(local, processes.start(1), lost_after_s=PATIENCE_S)
    group.process.stop()
    jobs = [group.probe(500, within_s=0.1) for _ in range(40)]  # far more than a socket takes
    for job in jobs:
        assert group.ear.failure(job) is Reason.LATE
    load = group.load([0], within_s=0.1)
    group.process.kill()
    assert "rank 1" in str(group.ear.end(load))
    group.finish()


def test_a_process_that_only_hangs_up_may_still_write(shm: Path, local: LocalStore, processes: RankProcesses) -> None:
    """A closed socket proves nothing; the end of the process does."""
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:  # a process that says hello like a rank, hangs up, and lives on
        ours.close()
        incoming = Incoming()
        incoming.read(theirs)
        (hello,) = incoming.documents()
        me = {"pages": pages_of(LAYOUT, parts(LAYOUT, 1, 2)), "identity": IDENTITY.hex(), "now_s": time.monotonic()}
        theirs.sendall(packed({"answer": hello["ask"], "is": me}))
        incoming.read(theirs)
        theirs.close()
        signal.pause()
        os._exit(0)
    theirs.close()
    members = connect_rank(ours, rank=1, pid=child, pages=pages_of(LAYOUT, parts(LAYOUT, 1, 2)), identity=IDENTITY)
    mine = thread_rank(RankDevices(LAYOUT, 0, 2), 2, {"host": local})
    group = Jobs([*mine, *members], ["host"], lost_after_s=0.05)
    job = group.load([0], within_s=0.1)
    wait_until(lambda: group.ranks.reports()[1].state is RankState.SILENT)
    assert not group.ear.ends(job)
    assert not group.ranks.close(0.1)
    os.kill(child, signal.SIGKILL)
    assert "rank 1" in str(group.ear.end(job))
    os.waitpid(child, 0)
    group.finish()


def test_revive_goes_over_the_link(local: LocalStore, processes: RankProcesses) -> None:
    group = Pair(local, processes.start(1))
    assert group.ranks.revive("host")
    group.ear.wait(lambda event: isinstance(event, StoreOn))
    group.saved_and_loaded(1)
    group.finish()


def test_the_group_s_end_is_the_process_s(local: LocalStore, processes: RankProcesses) -> None:
    """Closed properly, or abandoned: the process goes by itself."""
    for way in ("close", "abandon"):
        process = processes.start(1)
        if way == "close":
            Pair(local, process).finish()
        else:
            executor: Any = process.members[0].executor
            assert executor._link.abandon()
        wait_until(lambda process=process: not Path(f"/proc/{process.pid}").exists())  # type: ignore[misc]


def test_a_process_that_is_another_rank_is_refused(processes: RankProcesses) -> None:
    with pytest.raises(RankUnavailable, match="not rank 1's"):
        processes.start(1, rank_there=0)


def test_who_does_not_come_or_has_another_clock_is_refused() -> None:
    pages = [(0, 1, 0)]
    ours, theirs = socket.socketpair()
    with theirs, pytest.raises(RankUnavailable, match="did not answer within"):
        connect_rank(ours, rank=0, pid=os.getpid(), pages=pages, identity=IDENTITY, timeout_s=0.05)
    with pytest.raises(RankUnavailable, match="no process"):
        connect_rank(ours, rank=0, pid=2**22 + 1, pages=pages, identity=IDENTITY)
    now_s = time.monotonic()
    for me, why in (
        ({"pages": pages, "identity": IDENTITY.hex(), "now_s": 1.0}, "another clock"),
        ({"pages": pages, "identity": IDENTITY.hex(), "now_s": now_s + 3600}, "another clock"),
        ({"pages": pages, "identity": bytes(32).hex(), "now_s": now_s}, "not rank 0's"),
    ):
        ours, theirs = socket.socketpair()
        thread = threading.Thread(target=_answer, args=(theirs, me))
        thread.start()
        with pytest.raises(RankUnavailable, match=why):
            connect_rank(ours, rank=0, pid=os.getpid(), pages=pages, identity=IDENTITY)
        thread.join()


def _answer(sock: socket.socket, answer: Any) -> None:
    with sock:
        incoming = Incoming()
        incoming.read(sock)
        (question,) = incoming.documents()
        sock.sendall(packed({"answer": question["ask"], "is": answer}))


# --- nonsense ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "nonsense",
    [
        b"\xff\xff\xff\xff",
        b"\x03\0\0\0[1]",
        b"\x02\0\0\0{]",
        packed({"said": {"is": "Nobody"}, "member": 0}),
        packed({"said": {"is": "Probe", "job": 1, "store": "host", "keys": [], "deadline_s": 1.0}, "member": 0}),
        packed({"said": {"is": "Copied", "job": 1, "now_s": 1.0}, "member": 9}),
        packed({"what": 1}),
    ],
)
def test_a_rank_that_talks_nonsense_is_lost_and_harms_nobody(nonsense: bytes) -> None:
    ours, theirs = socket.socketpair()
    link = RankLink(ours, rank=0, pid=os.getpid(), num_members=1)
    heard: list[Any] = []
    link.executors[0].deliver = heard.append
    with theirs:
        theirs.sendall(nonsense)
        wait_until(lambda: _is_refused(link))
    assert not heard
    assert not link.close(0.05)  # this process lives, and could still write
    assert link.abandon()


def _is_refused(link: RankLink) -> bool:
    try:
        link.submit(0, [Probe(job=1, store="host", keys=(), deadline_s=1.0)])
    except Exception:  # noqa: BLE001
        return True
    return False


def test_a_group_that_talks_nonsense_ends_the_rank(local: LocalStore) -> None:
    for nonsense in (
        packed({"what": 1}),
        packed({"do": [], "member": 7}),
        packed({"do": [{"is": "Nobody"}], "member": 0}),
    ):
        ours, theirs = socket.socketpair()
        members = thread_rank(RankDevices(LAYOUT, 1, 2), 2, {"host": local})
        ended: list[bool] = []
        thread = threading.Thread(target=lambda: ended.append(serve_rank(theirs, members, identity=IDENTITY)))  # noqa: B023
        thread.start()
        ours.sendall(nonsense)
        thread.join(PATIENCE_S)
        assert ended == [True]
        ours.close()
        theirs.close()


def test_a_job_that_the_far_worker_refuses_fails(local: LocalStore) -> None:
    """Its store is not there: told, and not swallowed."""
    ours, theirs = socket.socketpair()
    far = thread_rank(RankDevices(LAYOUTS["gqa"], 0, 1), 1, {"host": local})
    thread = threading.Thread(target=lambda: serve_rank(theirs, far, identity=IDENTITY))
    thread.start()
    members = connect_rank(ours, rank=0, pid=os.getpid(), pages=[(0, 1, 0)], identity=IDENTITY)
    group = Jobs(members, ["host", "cellar"])
    assert "cellar" in str(group.ear.end(group.probe(1, store="cellar")))
    assert not group.ranks.revive("cellar")
    assert group.ear.results(group.probe(1)) == ["absent"]
    group.finish()
    thread.join(PATIENCE_S)
    theirs.close()


def test_documents_come_in_pieces() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        data = packed({"a": 1}) + packed({"b": "x" * 100_000})
        incoming = Incoming()
        found = []
        for start in range(0, len(data), 30_000):
            theirs.sendall(data[start : start + 30_000])
            assert incoming.read(ours)
            found += list(incoming.documents())
        assert found == [{"a": 1}, {"b": "x" * 100_000}]
        theirs.sendall(b"\x05\0\0\0nope!")
        assert incoming.read(ours)
        with pytest.raises(InvalidInput, match="not a document"):
            list(incoming.documents())


def test_a_seat_knows_its_page() -> None:
    executor: Any = object()
    (latent, heads) = parts(LAYOUT, 1, 2)
    assert Member(1, heads.shard, 5, executor).page == (1, 2, 5)
    assert Member(1, latent.shard, 5, executor).page == (0, 1, 5)
