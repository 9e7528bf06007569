"""The ledger: which jobs are alive, who may end them, and what is still to be told. One lock, no threads of its own.

Everything that must be decided in one instant is decided here: whether a copy between device and pages may begin, and
with which event a job ends. Not here: stores, pages, deadlines (`worker.py` watches them), what a job does (`jobs.py`).

Invariants:
- A job that was admitted ends with exactly one JobDone or JobFailed; whoever is second changes nothing.
- While a job copies from or to device slots it does not end: what would have ended it is remembered, and ends it when
  the copy is over. No copy begins after the end, or past the deadline. So a job that ended touches no slot any more.
- Before the JobDone of a Save there is one Copied, and after the end of a job there is none.
- Events are delivered one at a time, in the order things happened, by one of the worker's threads, without the lock.
"""

import contextlib
import enum
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from headwater.core.events import Copied, Event, Job, JobDone, JobFailed, Load, Save, StoreCopy
from headwater.core.results import Reason, Status
from headwater.metrics import Metrics
from headwater.storage.base import Clock, Deadline

log: Final = logging.getLogger("headwater")


class JobPhase(enum.Enum):
    """Where a job is, whether its end was told or not."""

    QUEUED = "queued"
    RUNNING = "running"  # a thread works on it, or is stuck in it
    OVER = "over"


class Failure(NamedTuple):
    """How a job ends without a result. `on_device`, `elsewhere`: whom it speaks against, as in JobFailed."""

    reason: Reason
    why: str
    on_device: bool = False
    elsewhere: bool = False


class JobState:
    """What has become of a job so far. Guarded by the ledger's lock."""

    __slots__ = (
        *("at_source", "copied", "deadline", "ended", "failing", "judged", "kind", "num_bytes", "num_copying"),
        *("num_pages", "num_planes_ready", "order", "phase", "started_s", "stuck"),
    )

    def __init__(self, order: Job, clock: Clock) -> None:
        self.order = order
        self.kind = type(order).__name__.lower()
        self.deadline = Deadline(order.deadline_s, clock)
        self.phase = JobPhase.QUEUED
        self.started_s: float | None = None
        self.num_bytes = 0  # moved so far; only the job's thread counts
        self.num_pages = 0  # of staging that it holds
        self.judged: tuple[Status, ...] | None = None  # a Load's results, if a call does not return: what has come so
        # far, or was found of a bad page that is still there
        self.num_copying = 0  # copies between slots and host memory that are under way
        self.num_planes_ready = 0  # of every block of a Load: they are on the device, and right
        self.copied = False  # whether Copied was said
        self.at_source = False  # of a Demote: it is in a call of the store that it reads from
        self.failing: Failure | None = None  # what ends it when the copy is over
        self.stuck = False  # its thread was given up: a store's call, or a copy, does not return
        self.ended = False

    def is_wanted(self) -> bool:
        """Whether nothing speaks against what is under way for it. May be asked without the lock, as a hint."""
        return self.failing is None and not self.deadline.expired

    @property
    def copying(self) -> bool:
        """Whether one of its copies is under way."""
        return self.num_copying > 0


class Ledger:
    """Live jobs and untold events. Methods whose docstring says so want the lock held; the others take it."""

    def __init__(self, *, clock: Clock, metrics: Metrics) -> None:
        self.deliver: Callable[[Event], None] | None = None
        self.on_news: Callable[[], None] | None = None  # called, lock held, where nobody is about to `flush`
        self.on_end: Callable[[int], None] | None = None  # called, lock held, with the number of a job that has ended
        self.on_first_layer: Callable[[], None] | None = None  # called without the lock: a load has begun to arrive
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)  # a job ended, a page came back, an event was delivered
        self.live: dict[int, JobState] = {}
        self.at_work: set[JobState] = set()  # threads are in them, whether they have ended or not
        self.stuck: set[JobState] = set()  # their threads are in calls that do not return, and keep their pages
        self._clock = clock
        self._metrics = metrics
        self._outbox: deque[Event] = deque()
        self._delivering = False

    # --- lock held ----------------------------------------------------------------------------------------------------

    def admit(self, job: JobState) -> None:
        """A job is alive from now on. The lock is held."""
        self.live[job.order.job] = job

    def fail(
        self, job: JobState, failure: Reason, why: str, *, on_device: bool = False, elsewhere: bool = False
    ) -> None:
        """End a job without a result, now or when its copy is over; one that ended stays ended. The lock is held."""
        if job.ended:
            return
        if job.copying:
            job.failing = job.failing or Failure(failure, why, on_device, elsewhere)
            return
        self._end(job)
        self.say(
            JobFailed(
                now_s=self._clock.monotonic(),
                job=job.order.job,
                failure=failure,
                why=why,
                on_device=on_device,
                elsewhere=elsewhere,
            )
        )
        self._count(job, failure.value)

    def give_up(self, job: JobState, why: str) -> None:
        """End a job whose time is over: LATE, or a Load with what has come of it, or was found. Lock held."""
        if job.judged is None or job.ended or job.copying:
            self.fail(job, Reason.LATE, why, elsewhere=job.at_source)
        else:
            self._done(job, job.judged)

    def notice(self) -> None:
        """There is something to tell, and who said it is not about to `flush`. The lock is held."""
        if self.on_news is not None:
            self.on_news()

    def say(self, event: Event) -> None:
        """Put an event behind those that are to be told. The lock is held; somebody must `flush` soon."""
        self._outbox.append(event)

    @property
    def has_news(self) -> bool:
        """Whether there is something to tell that nobody is telling. The lock is held."""
        return bool(self._outbox) and not self._delivering

    @property
    def quiet(self) -> bool:
        """Whether every job has ended and everything was told. The lock is held."""
        return not self.live and not self._outbox and not self._delivering

    # --- lock taken ---------------------------------------------------------------------------------------------------

    def done(self, job: JobState, results: Sequence[Status]) -> None:
        """End a job with its results, unless it has ended."""
        with self.lock:
            if not job.ended:
                self._done(job, results)

    def copied(self, job: JobState) -> None:
        """A Save reads its slots no more: say so, once, unless the job has ended."""
        with self.lock:
            if not job.ended:
                self._say_copied(job)

    def goes_on(self, job: JobState) -> bool:
        """Whether the next step of a job is worth taking: it has not ended, nor will with its copies, and has time."""
        with self.lock:
            return not job.ended and job.is_wanted()

    def hangs_at(self, source: str) -> bool:
        """Whether a Demote is in a call of this store that does not return."""
        with self.lock:
            return any(one.at_source and one.order.store == source for one in self.stuck)

    def await_loads(self, store: str, most_s: float) -> None:
        """Wait while somebody waits for blocks of this store, so that a write is not in their way. `most_s` at most."""

        def is_read() -> bool:
            return any(isinstance(one.order, Load) and one.order.store == store for one in self.live.values())

        with self.changed:
            self.changed.wait_for(lambda: not is_read(), most_s)

    def await_writes(self, deadline: Deadline) -> set[str]:
        """Wait until what is now being written is over, also where a thread was given up. Blocks, until the deadline.

        Returns the stores that somebody may still be writing to.
        """
        with self.changed:
            writes = {job for job in (*self.live.values(), *self.at_work) if isinstance(job.order, Save | StoreCopy)}
            left: set[JobState] = set()

            def are_over() -> bool:
                nonlocal left
                left = {job for job in writes if job in self.at_work or not job.ended}
                return not left

            self.changed.wait_for(are_over, deadline.remaining_s)
            return {job.order.target if isinstance(job.order, StoreCopy) else job.order.store for job in left}

    @contextlib.contextmanager
    def copying(self, job: JobState) -> Iterator[bool]:
        """Claim a job for a copy between slots and pages; False: it has ended or has no time left, so do not copy.

        Nothing ends the job inside the block. What tried to, ends it at the block's end.
        """
        may_copy = self.begin_copy(job)
        try:
            yield may_copy
        finally:
            if may_copy:
                self.end_copy(job)

    def begin_copy(self, job: JobState) -> bool:
        """The same for a copy that goes on by itself. If True, `end_copy` must follow, from whatever thread."""
        with self.lock:
            if job.ended or not job.is_wanted():
                return False
            job.num_copying += 1
            return True

    def end_copy(self, job: JobState) -> None:
        """A copy that was begun touches no slot any more."""
        with self.lock:
            job.num_copying -= 1
            if job.failing is not None and not job.copying:
                reason, why, on_device, elsewhere = job.failing
                self.fail(job, reason, why, on_device=on_device, elsewhere=elsewhere)
                self.notice()

    def planes_ready(self, job: JobState, num_planes: int) -> None:
        """So many planes of every block of a Load have arrived."""
        with self.lock:
            first = not job.num_planes_ready
            job.num_planes_ready = num_planes
            self.changed.notify_all()
        if first and self.on_first_layer is not None:
            self.on_first_layer()

    def flush(self) -> None:
        """Tell what is to be told, unless another thread is at it. Calls `deliver` without the lock."""
        while True:
            with self.lock:
                if not self.has_news:
                    return
                event = self._outbox.popleft()
                self._delivering = True
            try:
                if self.deliver is not None:
                    self.deliver(event)
            except BaseException:  # whoever listens is foreign code, and no job may suffer from what it raises
                log.exception("nobody heard %r", event)
            finally:
                with self.lock:
                    self._delivering = False
                    self.changed.notify_all()

    # ------------------------------------------------------------------------------------------------------------------

    def _done(self, job: JobState, results: Sequence[Status]) -> None:
        """The lock is held."""
        self._say_copied(job)
        self._end(job)
        self.say(
            JobDone(
                now_s=self._clock.monotonic(),
                job=job.order.job,
                results=tuple(results),
                num_bytes=job.num_bytes,
                seconds=self._seconds(job),
            )
        )
        self._count(job, "done")

    def _say_copied(self, job: JobState) -> None:
        if isinstance(job.order, Save) and not job.copied:
            job.copied = True
            self.say(Copied(now_s=self._clock.monotonic(), job=job.order.job))

    def _end(self, job: JobState) -> None:
        """Strike a job off. The lock is held."""
        job.ended = True
        if job.phase is JobPhase.QUEUED:
            job.phase = JobPhase.OVER
        del self.live[job.order.job]
        if self.on_end is not None:
            self.on_end(job.order.job)
        self.changed.notify_all()

    def _seconds(self, job: JobState) -> float:
        return 0.0 if job.started_s is None else max(0.0, self._clock.monotonic() - job.started_s)

    def _count(self, job: JobState, outcome: str) -> None:
        self._metrics.count("jobs_total", tier=job.order.store, job=job.kind, outcome=outcome)
        if job.started_s is not None:
            self._metrics.observe("job_seconds", self._seconds(job), tier=job.order.store, job=job.kind)


class Delivers:
    """An executor: events of its ledger are heard by somebody."""

    _ledger: Ledger

    @property
    def deliver(self) -> Callable[[Event], None] | None:
        """Who hears the events. To be set before the first `submit`."""
        return self._ledger.deliver

    @deliver.setter
    def deliver(self, deliver: Callable[[Event], None]) -> None:
        self._ledger.deliver = deliver
