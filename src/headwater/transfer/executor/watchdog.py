"""Watchdog: the thread that ends a worker's overdue jobs, and has threads replaced that are stuck in a call.

It sleeps until the next alarm. It decides nothing but that: how a job ends is in `ledger.py`, which jobs there are and
whose threads run them in `worker.py`. The ledger's lock guards everything here.

Invariants:
- A job that is QUEUED at its deadline, or RUNNING `grace_s` after it, is ended then; one that copies, with its copy.
- A queue gets another thread for one that is stuck while it has fewer than `max_threads`, the stuck ones among them.
- After `stop` it ends when every job has ended and every event was delivered.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Final

from headwater.core.events import Stuck, is_waited_for
from headwater.core.results import Reason
from headwater.metrics import Metrics
from headwater.storage.base import Clock, Deadline
from headwater.transfer.executor.alarms import Alarms
from headwater.transfer.executor.ledger import JobPhase, JobState, Ledger
from headwater.transfer.executor.store_queue import StoreQueue, queue_of

log: Final = logging.getLogger("headwater")


class Watchdog:
    """The alarms of one worker's jobs, and the thread that waits for them."""

    def __init__(
        self,
        queues: Mapping[str, StoreQueue],
        ledger: Ledger,
        *,
        fail: Callable[[JobState, Reason, str], None],
        start_thread: Callable[[StoreQueue], None],
        max_threads: int,
        grace_s: float,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        """Starts nothing. `fail` ends a job that has not begun, with the lock held.

        `start_thread` is called without the lock, for a queue that counts the thread already.
        """
        self._queues = queues
        self._ledger = ledger
        self._fail = fail
        self._start_thread = start_thread
        self._max_threads = max_threads
        self._grace_s = grace_s
        self._clock = clock
        self._metrics = metrics
        self._watch = threading.Condition(ledger.lock)  # something for the watchdog
        self._alarms = Alarms[JobState](lambda job: job.phase is JobPhase.OVER)
        self._short_of_threads: list[StoreQueue] = []
        self._stopping = False
        self.thread: Final = threading.Thread(target=self._keep_watch, name="headwater watchdog", daemon=True)

    def wake(self) -> None:
        """There is something for it to see or to tell. Does not block. The lock is held."""
        self._watch.notify()

    def stop(self) -> None:
        """Have it end when all is quiet, and replace no thread from now on. Does not block. The lock is held."""
        self._stopping = True
        self._watch.notify()

    def set_alarm(self, job: JobState, at_s: float) -> None:
        """Have a job looked at then. Does not block. The lock is held."""
        if self._alarms.set(job, at_s):  # the watchdog sleeps until a later one
            self._watch.notify()

    def _keep_watch(self) -> None:
        while True:
            with self._watch:
                while True:
                    wait_s = self._look_at_alarms()
                    if self._short_of_threads or self._ledger.has_news:
                        break
                    if self._stopping and self._ledger.quiet:
                        return
                    self._watch.wait(wait_s)
                queues, self._short_of_threads = self._short_of_threads, []
            for queue in queues:
                try:
                    self._start_thread(queue)
                except RuntimeError as error:  # then the store has fewer threads, and its jobs end LATE
                    log.warning("no thread to replace one that is stuck in %s: %s", queue.name, error)
                    with self._ledger.lock:
                        queue.num_able -= 1
            self._ledger.flush()

    def _look_at_alarms(self) -> float | None:
        """End what is overdue; seconds until the next alarm, if there is one. The lock is held."""
        now_s = self._clock.monotonic()
        while (job := self._alarms.take_due(now_s)) is not None:
            last_s = job.order.deadline_s + self._grace_s
            if job.phase is JobPhase.QUEUED:
                self._fail(job, Reason.LATE, "it had not begun by its deadline")
            elif now_s < last_s:
                self._alarms.set(job, last_s)
            else:
                self._give_up(job)
        next_s = self._alarms.next_s
        return None if next_s is None else Deadline(next_s, self._clock).remaining_s

    def _give_up(self, job: JobState) -> None:
        """A call or a copy does not return: end the job, leave the thread to it, get another. The lock is held.

        A job that copies ends with its copy, and not before (rule 2).
        """
        queue = self._queues[queue_of(job.order)]
        kind, why = "store_stuck", "a store's call did not return in time"
        if job.copying:
            kind, why = "copy_stuck", "a copy did not end in time"
        self._ledger.give_up(job, why)
        if job.copying and is_waited_for(job.order):
            self._ledger.say(Stuck(now_s=self._clock.monotonic(), job=job.order.job))
        queue.stick(job)
        self._ledger.stuck.add(job)
        self._ledger.changed.notify_all()  # who waits for its layers, or for its pages
        self._metrics.event(kind, store=queue.name, job=job.kind)
        if not self._stopping and queue.num_able + queue.num_stuck < self._max_threads:
            queue.num_able += 1
            self._short_of_threads.append(queue)
