"""Ranks: the executor of a tensor-parallel group. Looks like one worker; has one for each page that each rank holds.

A job goes to every rank that has a part in it, and ends with one event: what all of them did (`group_result.py`), or
who did not. No barrier and no collective: each rank works by itself, and the group only counts answers, until the
deadline.

    Load              every rank, every page of its own
    Probe, Promote    each distinct page once, by whoever holds it, in turns
    Save, Demote      the same; while what it builds on is still being written, by the rank that writes that: one rank
                      writes in order, two would race, and the second would find no parent. A Demote that comes after
                      a Save, by the ranks that do the Save: each begins when its own part of that has ended

Invariants:
- A rank that fails counts zero at once, and one that has not answered by the deadline then, whatever it says later. It
  is cancelled first; a Probe, Demote or Promote then ends, LATE. A Load or a Save touches slots: it ends when every
  rank has said done or cancelled, or is dead, and not before (rule 2). A `Worker` of this process says so by itself,
  unless its copy hangs; another process may be stopped for ever. Both make a job Stuck that somebody waits for, which
  is said once.
- A rank that says nothing for `lost_after_s` after that is *silent*, and one whose process ended is *dead*. Both are
  told, and while there is one no job begins: each fails at once, and names it. A silent rank is killed where that was
  allowed (`RemoteExecutor.kill`), which ends what it owes (a Load is Stuck only if it is not dead soon); if it answers
  after all, it is up again.
- Events are delivered one at a time, in the order things happened, without a lock held. `submit` never blocks.

Takes no decision about blocks. Not here: the link to another process (`ranks/link.py`), pages and stores (`worker.py`).
"""

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Final

from headwater.core.errors import InvalidInput, ResourceClosed
from headwater.core.events import (
    Cancel,
    Copied,
    Event,
    Instruction,
    Job,
    JobDone,
    JobFailed,
    Load,
    Probe,
    StoreCopy,
    StoreOff,
    StoreOn,
    Stuck,
    is_waited_for,
)
from headwater.core.results import Reason, Status
from headwater.metrics import Metrics
from headwater.storage.base import SYSTEM_CLOCK, Clock, Deadline
from headwater.transfer.executor.alarms import Alarms
from headwater.transfer.executor.jobs import checked, require_new
from headwater.transfer.executor.ledger import Delivers, Ledger
from headwater.transfer.ranks.assignment import Assignment
from headwater.transfer.ranks.group_job import End, GroupJob
from headwater.transfer.ranks.group_result import GroupResult
from headwater.transfer.ranks.members import Member, check_members
from headwater.transfer.ranks.roster import RankReport, RankState, Roster

log: Final = logging.getLogger("headwater")

_LATE: Final = "no answer by the deadline"
_LAST_S: Final = 1.0  # for the watching thread to end, when all executors have


class Ranks(Delivers):
    """Runs jobs on all ranks of a group. Takes over the executors of its members.

    `deliver` is called with each event. It may `submit`, and must not `drain` or `close`.
    """

    def __init__(
        self,
        members: Sequence[Member],
        *,
        stores: Collection[str],
        deliver: Callable[[Event], None] | None = None,
        clock: Clock = SYSTEM_CLOCK,
        metrics: Metrics | None = None,
        slack_s: float = 0.05,
        lost_after_s: float = 1.0,
    ) -> None:
        """`stores`: the names that jobs may use, the same on every rank. Raises InvalidInput, with nothing taken.

        `slack_s` is for an answer that is on its way when the deadline passes; `lost_after_s` for that of a rank that
        was cancelled. Deadlines are on `clock`, which is every rank's.
        """
        if not (slack_s >= 0 and lost_after_s >= 0):
            raise InvalidInput(f"slack_s and lost_after_s are seconds, not {slack_s} and {lost_after_s}")
        self._tp_size = check_members(members)
        self._members = tuple(members)
        self._stores = tuple(stores)
        self._clock = clock
        self._slack_s = slack_s
        self._lost_after_s = lost_after_s
        metrics = metrics if metrics is not None else Metrics()
        self._ledger = Ledger(clock=clock, metrics=metrics)  # for its lock, and the order of events
        self._ledger.deliver = deliver
        self._roster = Roster(self._tp_size, metrics)
        self._assignment = Assignment(members, self._tp_size)
        self._live: dict[int, GroupJob] = {}  # jobs of which a member owes an answer, told or not
        self._off: set[str] = set()  # stores that a member said to be off
        self._watch = threading.Condition(self._ledger.lock)  # something for the thread that watches
        self._alarms = Alarms[GroupJob](lambda job: not job.waiting)
        self._closed = False
        self._thread = threading.Thread(target=self._keep_watch, name="headwater ranks", daemon=True)
        self._thread.start()
        for at, member in enumerate(members):
            member.executor.deliver = partial(self._heard, at)
            remote = member.executor.remote()
            if remote is not None:
                remote.on_death = partial(self._died, member.rank)
                if remote.death is not None:  # before it could be told
                    self._died(member.rank, remote.death)

    def on_first_layer(self, wake: Callable[[], None]) -> None:
        """Have `wake` called when the first layers of a load have arrived at a rank of this process."""
        for member in self._members:
            member.executor.on_first_layer(wake)

    def reports(self) -> tuple[RankReport, ...]:
        """How each rank has done so far: who is slow, who fails, who is gone."""
        with self._ledger.lock:
            return self._roster.reports()

    # --- the face of a worker -----------------------------------------------------------------------------------------

    def submit(self, instructions: Iterable[Instruction]) -> None:
        """Begin jobs, cancel jobs. Does not block. Raises InvalidInput, or ResourceClosed, with nothing taken."""
        asked = checked(instructions, self._stores)
        with self._ledger.lock:
            if self._closed:
                raise ResourceClosed("the group is closed")
            if self._ledger.deliver is None:
                raise InvalidInput("nobody would hear what becomes of a job: set `deliver` first")
            require_new(asked, self._live)
            for one in asked:
                if isinstance(one, Job):
                    self._begin(one)
                elif isinstance(one, Cancel) and one.job in self._live:
                    self._live[one.job].cancelled = True
                    self._cancel(self._live[one.job])
            self._watch.notify()  # there is an alarm to be set, or something to tell

    def drain(self, timeout_s: float) -> bool:
        """Wait until every job has ended and every event was delivered. Blocks. False if that took too long."""
        self._require_other_thread()
        with self._ledger.changed:
            return self._ledger.changed.wait_for(lambda: self._quiet, timeout_s)

    def contains_cached(self, probe: Probe) -> tuple[Status, ...] | None:
        """Nobody knows from memory what all ranks have: they are asked."""
        return None

    def throttle_saves(self, *, on: bool) -> None:
        """Have the saves of ranks in this process stand back for a moment, or go on. Does not block."""
        for member in self._members:
            member.executor.throttle_saves(on=on)

    def wait_layer(self, job: int, layer: int, timeout_s: float) -> bool:
        """Wait until all ranks have all planes up to a layer's of all blocks of a Load. Blocks.

        False: that took too long, or the job is over. Of a rank in another process all planes are waited for.
        """
        until = Deadline.after(timeout_s)
        with self._ledger.lock:
            found = self._live.get(job)
        if found is None or not isinstance(found.order, Load):
            return False
        for at in found.members:
            if not self._members[at].executor.wait_layer(job, layer, until.remaining_s):
                with self._ledger.changed:  # it is over there, perhaps well, and the answer on its way
                    self._ledger.changed.wait_for(partial(found.is_decided_at, at), until.remaining_s)
                    if at not in found.ends:
                        return False
        with self._ledger.lock:
            return found.is_whole and not (found.cancelled or found.overdue or found.said_stuck)

    def revive(self, store: str) -> bool:
        """Put a store right that was switched off, on every rank, and say StoreOn. Blocks. False if a rank could not.

        Raises InvalidInput for a store that is not here, ResourceClosed.
        """
        if store not in self._stores:
            raise InvalidInput(f"there is no store {store!r} here; there are {', '.join(self._stores)}")
        revived = [member.executor.revive(store) for member in self._members]
        if not all(revived):
            return False
        with self._ledger.lock:
            self._off.discard(store)
            self._ledger.say(StoreOn(now_s=self._clock.monotonic(), store=store))
            self._watch.notify()
        return True

    def close(self, timeout_s: float = 10.0) -> bool:
        """Cancel every job and close every member's executor; idempotent. Blocks until they ended, or time was over.

        Every job's event was delivered when it returns True. After False a rank may still be at work.
        """
        self._require_other_thread()
        until = Deadline.after(timeout_s)
        with self._ledger.lock:
            self._closed = True
            for job in list(self._live.values()):
                job.cancelled = True
                self._cancel(job)
            self._watch.notify()
        ended = [member.executor.close(until.remaining_s) for member in self._members]
        if not all(ended):
            return False
        with self._ledger.lock:  # closed executors touch nothing, and say nothing any more
            for job in list(self._live.values()):
                for at in list(job.waiting):
                    self._answered(job, at, self._failed(job, Reason.CANCELLED, "the rank was closed"))
            self._watch.notify()
        self._thread.join(max(until.remaining_s, _LAST_S))
        return not self._thread.is_alive()

    # --- jobs; the lock is held ---------------------------------------------------------------------------------------

    @property
    def _quiet(self) -> bool:
        return self._ledger.quiet and all(job.told for job in self._live.values())

    def _begin(self, order: Job) -> None:
        job = GroupJob(order, self._assignment.who(order, reversed(self._live.values())), self._clock.monotonic())
        unfit = self._roster.unfit()
        if unfit is not None:
            self._end(job, GroupResult((), Reason.FAILED, unfit))
            return
        self._live[order.job] = job
        self._alarms.set(job, order.deadline_s + self._slack_s)
        refused: dict[int, str] = {}
        for at in job.members:
            try:
                self._members[at].executor.submit([order])
            except Exception as error:  # noqa: BLE001  whatever it is: this rank does not do it
                refused[at] = f"{type(error).__name__}: {error}"
        for at, why in refused.items():
            self._answered(job, at, self._failed(job, Reason.FAILED, why))

    def _cancel(self, job: GroupJob) -> None:
        """Tell those who have not answered that nobody waits for them. They still answer."""
        for at in job.waiting:
            try:
                self._members[at].executor.submit([Cancel(job=job.order.job)])
            except Exception as error:  # noqa: BLE001  closed, or gone: its end, or its death, is told
                log.debug("rank %d heard no cancel of job %d: %s", self._members[at].rank, job.order.job, error)

    def _answered(self, job: GroupJob, at: int, end: End) -> None:
        """A member has ended its share of a job. What it says after that is ignored."""
        if job.overdue and not (isinstance(end, JobFailed) and end.failure is Reason.FAILED):
            end = self._failed(job, Reason.LATE, _LATE)  # whatever it says now
        if not job.answer(at, end):
            return
        rank, seconds = self._members[at].rank, max(0.0, self._clock.monotonic() - job.started_s)
        self._roster.answered(rank, seconds, job=job.kind, last=not job.waiting and len(job.members) > 1)
        self._say_copied(job)
        if not job.waiting:
            del self._live[job.order.job]
            if not job.told:
                self._end(job, job.agreed(self._members))
        elif job.is_decided_by(end):
            if isinstance(job.order, Probe) and not job.told:
                self._end(job, job.agreed(self._members))
            if not (job.cancelled or job.overdue):
                job.cancelled = True  # the slots of a Load are free when all have heard it
                self._cancel(job)
        if self._roster.state(rank) is RankState.SILENT and not self._owes(rank):
            self._roster.change(rank, RankState.UP)
        self._ledger.changed.notify_all()

    def _say_copied(self, job: GroupJob) -> None:
        """Say once that the slots of a Save are read no more."""
        if job.is_copied and not job.said_copied:
            job.said_copied = True
            self._ledger.say(Copied(now_s=self._clock.monotonic(), job=job.order.job))

    def _say_stuck(self, job: GroupJob) -> None:
        """Say once that nobody is to wait for a job."""
        if is_waited_for(job.order) and not (job.said_stuck or job.told):
            job.said_stuck = True
            self._ledger.say(Stuck(now_s=self._clock.monotonic(), job=job.order.job))
            self._ledger.changed.notify_all()

    def _end(self, job: GroupJob, agreed: GroupResult) -> None:
        """Say how a job ended, and who is to blame if less came of it than was asked."""
        job.told = True
        self._ledger.say(agreed.end(job.order.job, self._clock.monotonic()))
        num_blocks = len(job.order.keys)
        self._roster.blame(agreed.blamed, job=job.kind, store=job.order.store, num_blocks=num_blocks)
        self._watch.notify()

    def _failed(self, job: GroupJob, failure: Reason, why: str) -> JobFailed:
        return JobFailed(now_s=self._clock.monotonic(), job=job.order.job, failure=failure, why=why)

    def _owes(self, rank: int) -> bool:
        return any(self._members[at].rank == rank for job in self._live.values() for at in job.waiting)

    # --- what ranks say, in their threads -----------------------------------------------------------------------------

    def _heard(self, at: int, event: Event) -> None:
        with self._ledger.lock:
            job = self._live.get(event.job) if isinstance(event, JobDone | JobFailed | Copied | Stuck) else None
            if job is not None and isinstance(event, JobDone | JobFailed):
                self._answered(job, at, event)
            elif job is not None and isinstance(event, Stuck):
                self._say_stuck(job)
            elif job is not None:
                job.copied.add(at)
                self._say_copied(job)
            elif isinstance(event, StoreOff) and event.store not in self._off:  # StoreOn is said by `revive`
                self._off.add(event.store)
                why = f"rank {self._members[at].rank}: {event.why}"
                self._ledger.say(StoreOff(now_s=self._clock.monotonic(), store=event.store, why=why))
        self._ledger.flush()

    def _died(self, rank: int, why: str) -> None:
        """A rank's process ended: it touches nothing any more, and owes nothing."""
        with self._ledger.lock:
            if self._roster.change(rank, RankState.DEAD, why):
                for job in list(self._live.values()):
                    for at in [at for at in job.waiting if self._members[at].rank == rank]:
                        self._answered(job, at, self._failed(job, Reason.FAILED, why))
        self._ledger.flush()

    # --- the thread that watches --------------------------------------------------------------------------------------

    def _keep_watch(self) -> None:
        while True:
            with self._watch:
                while True:
                    wait_s = self._look_at_alarms()
                    if self._ledger.has_news:
                        break
                    if self._closed and not self._live and self._ledger.quiet:
                        return
                    self._watch.wait(wait_s)
            self._ledger.flush()

    def _look_at_alarms(self) -> float | None:
        """See to what is overdue; seconds until the next alarm, if there is one."""
        now_s = self._clock.monotonic()
        while (job := self._alarms.take_due(now_s)) is not None:
            if not job.overdue:
                self._overdue(job)
                self._alarms.set(job, now_s + self._lost_after_s)
            else:
                self._lose(job)
        next_s = self._alarms.next_s
        return None if next_s is None else Deadline(next_s, self._clock).remaining_s

    def _overdue(self, job: GroupJob) -> None:
        """The deadline passed: who has not answered counts zero, and is told. What touches no slots ends now."""
        job.overdue = True
        if isinstance(job.order, Probe | StoreCopy) and not job.told:
            self._end(job, job.agreed(self._members, silent=_LATE))
        self._cancel(job)

    def _lose(self, job: GroupJob) -> None:
        """Ranks that were cancelled do not even say so. Those that may be killed are; their job ends with them."""
        why = f"no answer to a {job.kind} {self._lost_after_s:g} s after it was cancelled"
        killed = []
        for at in sorted(job.waiting):
            self._roster.change(self._members[at].rank, RankState.SILENT, why)
            remote = self._members[at].executor.remote()
            killed.append(remote is not None and remote.kill())
        if all(killed) and not job.killed:
            job.killed = True
            self._alarms.set(job, self._clock.monotonic() + self._lost_after_s)
        else:
            self._say_stuck(job)

    def _require_other_thread(self) -> None:
        if threading.current_thread() is self._thread:
            raise InvalidInput("the group's own thread, in which `deliver` may be called, cannot wait for itself")
