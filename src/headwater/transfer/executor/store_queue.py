"""StoreQueue: the jobs that wait for one store, in the order they shall begin, and the count of threads that take them.

Probes and loads come first, because somebody waits for them, then promotions and awaited saves, then other saves and
demotions, which are writes of their target's; within a sort, who came first: so what a row builds on is written before
it. Where a store has two threads or more, one is kept for probes and loads: so no load waits for a long save, and a
store that hangs in `put` alone can still be read. Counts and orders only; the threads are `worker.py`'s, and the
ledger's lock guards everything here.

Invariants: a job is queued, or at one thread, or over. `num_able` threads can take jobs or are at one; `num_stuck` more
are in calls that do not return, and count again when they are back.
"""

from collections import OrderedDict
from threading import Condition
from typing import Final

from headwater.core.events import Demote, Job, Load, Probe, Promote, Save
from headwater.core.results import Reason
from headwater.metrics import Metrics
from headwater.storage.base import Clock
from headwater.transfer.executor.ledger import JobPhase, JobState, Ledger

PROMOTIONS: Final = "promotions"  # somebody waits for these: a queue of their own, which no write holds up
PRIORITY: Final[dict[type[Job], int]] = {Probe: 0, Load: 0, Promote: 1, Save: 2, Demote: 2}  # lower goes first
_AWAITED: Final = 1  # a Save that somebody waits for


class StoreQueue:
    """The queue of one store, or of promotions. All but `take` want the ledger's lock held, and do not block."""

    def __init__(
        self, name: str, ledger: Ledger, *, num_threads: int, frame_bytes: int, clock: Clock, metrics: Metrics
    ) -> None:
        self.name = name
        self.num_threads: Final = num_threads  # wanted
        self.num_able = 0
        self.num_stuck = 0
        self._ledger = ledger
        self._clock = clock
        self._news = Condition(ledger.lock)  # a job that a thread may take, or the end
        self._closed = False
        self._num_unhurried = 0  # promotions, saves and demotions that able threads are at
        self._queues: tuple[OrderedDict[int, JobState], ...] = (OrderedDict(), OrderedDict(), OrderedDict())
        self._queued_bytes = 0
        self._frame_bytes = frame_bytes
        self._metrics = metrics

    def push(self, job: JobState) -> None:
        """Queue a job."""
        self._queues[_rank(job)][job.order.job] = job
        self._count(job, 1)
        self._news.notify()

    def take(self) -> JobState | None:
        """Wait for the next job: it is the calling thread's now. Blocks. Takes the lock.

        None: the thread shall end, because the queue was closed, or one thread too many is here since another came back
        from a call that it was stuck in. It is counted out.
        """
        with self._ledger.lock:
            while not self._closed and self.num_able <= self.num_threads:
                job = self._pop()
                if job is None:
                    self._news.wait()
                elif job.deadline.expired:
                    self.leave(job)
                    self._ledger.fail(job, Reason.LATE, "it had not begun by its deadline")
                    self._ledger.notice()
                else:
                    job.started_s = self._clock.monotonic()
                    return job
            self.num_able -= 1
            self._news.notify()  # what woke this thread may have been a job: that is another's now
            return None

    def close(self) -> None:
        """Have all threads end."""
        self._closed = True
        self._news.notify_all()

    def _pop(self) -> JobState | None:
        """The next job that may begin, if there is one.

        Nobody needs to be woken when a job that had to wait may begin: the thread whose return makes that so is here.
        """
        most_unhurried = min(self.num_threads, self.num_able) - 1 if self.num_threads > 1 else 1
        for rank, queue in enumerate(self._queues):
            if queue and (rank == 0 or self._num_unhurried < most_unhurried):
                _, job = queue.popitem(last=False)
                self._count(job, -1)
                self._num_unhurried += rank > 0
                job.phase = JobPhase.RUNNING
                self._ledger.at_work.add(job)
                return job
        return None

    def remove(self, job: JobState) -> None:
        """Take a job out of the queue, if it is in it."""
        if self._queues[_rank(job)].pop(job.order.job, None) is not None:
            self._count(job, -1)

    def stick(self, job: JobState) -> None:
        """The thread that is at a job is stuck in it."""
        job.stuck = True
        self.num_able -= 1
        self.num_stuck += 1
        self._num_unhurried -= _rank(job) > 0
        self._metrics.gauge("stuck_calls", self.num_stuck, store=self.name)
        self._news.notify_all()  # in its place another may begin

    def leave(self, job: JobState) -> None:
        """The thread that was at a job is back from it."""
        job.phase = JobPhase.OVER
        self._ledger.at_work.discard(job)
        self._ledger.changed.notify_all()
        if job.stuck:
            self.num_able += 1
            self.num_stuck -= 1
            self._metrics.gauge("stuck_calls", self.num_stuck, store=self.name)
        else:
            self._num_unhurried -= _rank(job) > 0

    def _count(self, job: JobState, sign: int) -> None:
        num_pages = 0 if isinstance(job.order, Probe) else len(job.order.keys)
        self._queued_bytes += sign * num_pages * self._frame_bytes
        self._metrics.gauge("queue_jobs", sum(map(len, self._queues)), tier=self.name)
        self._metrics.gauge("queue_bytes", self._queued_bytes, tier=self.name)


def _rank(job: JobState) -> int:
    order = job.order
    return _AWAITED if isinstance(order, Save) and order.awaited else PRIORITY[type(order)]


def queue_of(order: Job) -> str:
    """Whose threads do a job."""
    if isinstance(order, Demote):
        return order.target
    return PROMOTIONS if isinstance(order, Promote) else order.store
