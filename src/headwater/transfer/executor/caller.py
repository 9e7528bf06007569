"""Caller: jobs for an executor by who has no brain. It numbers them, hands each end to who asked, and has the breakers.

A brain knows its stores and leaves a bad one alone; whoever else gives jobs to an executor (`rows.py`, a handoff) does
it through a Caller, with one breaker for each store (`core/breaker.py`): a store that is down is asked by one job at a
time, and everybody else is told at once. The executor may be the caller's own, or one that a brain uses too: then the
numbers lie apart (`first_job`), and `hears` says which events were for whom.

Takes no decision about blocks and moves none. Does not own the executor.

Invariants:
- A job that `submit` took ends with one call of `on_end`, in a thread of the executor, without a lock held. One that it
  refused was not given to the executor, and `on_end` is not called.
- A job whose copy hangs does not end. That it is stuck is said once (`on_stuck`), before its end; until that its slots
  are lent (`lent_slots`), and nobody may use them (rule 2). Its breaker hears of it then, and not of its end.
- `call` waits for a job until `limit_s` after its deadline and no longer, whatever the executor does.
- While a breaker is open no job is submitted; then exactly one, the probe, until it has ended or is stuck.
"""

import contextlib
import threading
from collections.abc import Callable, Collection, Sequence
from itertools import count
from typing import Final, Protocol, TypeAlias

from headwater.core.breaker import MAX_PAUSE_S, Breaker, BreakerState
from headwater.core.errors import InvalidInput, ResourceClosed
from headwater.core.events import (
    Cancel,
    Event,
    Instruction,
    Job,
    JobDone,
    JobFailed,
    Load,
    Probe,
    Save,
    StoreOff,
    StoreOn,
    Stuck,
)
from headwater.core.results import PUT_HELD, STORE_TROUBLE, Reason, Status
from headwater.metrics import Metrics
from headwater.storage.base import SYSTEM_CLOCK, Clock
from headwater.transfer.executor.tier import BAD_PAGES

End: TypeAlias = JobDone | JobFailed
BESIDE: Final = 1 << 48  # the first number of jobs beside those of a brain, which counts from 1
_BACK_ON_S: Final = 10.0  # a store that gave nothing but bad pages is read again after so long
_LIMIT_S: Final = 5.0  # an executor says by its grace that a job hangs; one that does not say it is itself in trouble
_LOOK_S: Final = 0.05  # between looks at a clock that does not go by itself
_LONG_S: Final = 3600.0
_HANGS: Final = "a copy did not end in time"
_GOOD: Final = PUT_HELD | {Status.HIT}


class JobTaker(Protocol):
    """Who carries jobs out: a `Worker`, or the ranks of a group."""

    def submit(self, instructions: Sequence[Instruction], /) -> None:
        """Begin jobs, or cancel them. Does not block; raises with nothing taken."""
        ...

    def revive(self, store: str, /) -> bool:
        """Put a store right that was switched off."""
        ...


class _CallerJob:
    """A job that was submitted."""

    __slots__ = ("is_probe", "is_stuck", "on_end", "on_stuck", "order")

    def __init__(
        self,
        order: Job,
        on_end: Callable[[End], None],
        on_stuck: Callable[[Stuck], None] | None,
        *,
        is_probe: bool,
    ) -> None:
        self.order = order
        self.on_end = on_end
        self.on_stuck = on_stuck
        self.is_probe = is_probe
        self.is_stuck = False


class Caller:
    """Calls may come from any thread; none blocks but `call`."""

    def __init__(
        self,
        executor: JobTaker,
        stores: Collection[str],
        *,
        identity: bytes,
        first_job: int = 1,
        breaker_failures: int = 3,
        breaker_pause_s: float = 1.0,
        breaker_max_pause_s: float = MAX_PAUSE_S,
        limit_s: float = _LIMIT_S,
        clock: Clock = SYSTEM_CLOCK,
        metrics: Metrics | None = None,
    ) -> None:
        """`identity`: whose pages the executor moves. `clock` is the executor's, which has to deliver its events here.

        `limit_s`, more than the executor's grace: how long after a job's deadline `call` returns at the latest. Raises
        InvalidInput.
        """
        for what, value, least in (
            ("breaker_failures", breaker_failures, 1),
            ("breaker_pause_s", breaker_pause_s, 0),
            ("limit_s", limit_s, 0),
        ):
            if not least <= value < float("inf"):
                raise InvalidInput(f"{what} must be at least {least}, not {value}")
        self.identity: Final = identity
        self.clock = clock
        self.metrics = metrics if metrics is not None else Metrics()
        self._executor = executor
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._asked: dict[int, _CallerJob] = {}
        self._numbers = count(first_job)
        self._breakers = {
            store: Breaker(
                failures=breaker_failures,
                pause_s=breaker_pause_s,
                max_pause_s=max(breaker_pause_s, breaker_max_pause_s),
            )
            for store in stores
        }
        self._off: dict[str, tuple[float, str]] = {}  # since when, and why

    def number(self) -> int:
        """A number for a job that nobody else has."""
        return next(self._numbers)

    def submit(
        self, order: Job, on_end: Callable[[End], None], on_stuck: Callable[[Stuck], None] | None = None
    ) -> JobFailed | None:
        """Give a job to the executor. Returns its end where it was refused: then that is all that comes of it.

        Who waits for it gives `on_stuck` too, which hears that it may never end. Raises InvalidInput for a job that
        can never be done.
        """
        self._wake(order.store)
        now_s = self.clock.monotonic()
        with self._lock:
            why = self._refusal(order.store, now_s)
            if why is None:
                is_probe = self._breakers[order.store].state is BreakerState.HALF_OPEN
                self._asked[order.job] = _CallerJob(order, on_end, on_stuck, is_probe=is_probe)
        if why is not None:
            reason = "off" if order.store in self._off else "left_alone"
            self.metrics.count("refused_calls_total", store=order.store, reason=reason)
            return JobFailed(now_s=now_s, job=order.job, failure=Reason.DOWN, why=why)
        try:
            self._executor.submit([order])
        except ResourceClosed:
            end = JobFailed(now_s=now_s, job=order.job, failure=Reason.CANCELLED, why="it was closed")
            self._forget(end)
            return end
        except BaseException as error:
            self._forget(JobFailed(now_s=now_s, job=order.job, failure=Reason.CANCELLED, why=str(error)))
            raise
        return None

    def cancel(self, job: int) -> None:
        """Nobody waits for a job any more. It still ends, soon, with its event."""
        with contextlib.suppress(ResourceClosed):  # then all jobs were cancelled
            self._executor.submit([Cancel(job=job)])

    def call(self, order: Job) -> End | Stuck:
        """Give a job to the executor, and wait for its end. Blocks, by its deadline and the executor's grace.

        Stuck: it has not ended, and may never. It begins no further copy, but its slots are lent (`lent_slots`).
        """
        over = threading.Event()
        said: list[End | Stuck] = []

        def hear(event: End | Stuck) -> None:
            said.append(event)
            over.set()

        refused = self.submit(order, hear, hear)
        if refused is not None:
            return refused
        until_s = order.deadline_s + self._limit_s
        while not over.wait(max(_LOOK_S, min(until_s - self.clock.monotonic(), _LONG_S))):
            now_s = self.clock.monotonic()
            if now_s >= until_s:  # nobody said anything: the executor itself hangs
                self.cancel(order.job)
                self.hears(Stuck(now_s=now_s, job=order.job))
        return said[0]

    def lent_slots(self) -> frozenset[int]:
        """Slots that copies which hang may still write to or read: nobody may use them. Does not block."""
        with self._lock:
            stuck = [one.order for one in self._asked.values() if one.is_stuck]
        return frozenset(slot for order in stuck if isinstance(order, Load | Save) for slot in order.slots)

    def deliver(self, event: Event) -> None:
        """Hear an event of an executor that nobody else uses. Raises what `on_end` raises."""
        self.hears(event)

    def hears(self, event: Event) -> bool:
        """Hear an event of the executor. Whether it was of a job of this caller. Raises what `on_end` raises."""
        if isinstance(event, StoreOff | StoreOn):
            with self._lock:
                if isinstance(event, StoreOff):
                    self._off[event.store] = event.now_s, event.why
                else:
                    self._off.pop(event.store, None)
            return False
        job = getattr(event, "job", None)
        if isinstance(event, Stuck):
            self._stick(event)
        if not isinstance(event, JobDone | JobFailed):
            return job in self._asked
        asked = self._forget(event)
        if asked is None:
            return False
        asked.on_end(event)
        return True

    # ------------------------------------------------------------------------------------------------------------------

    def _refusal(self, store: str, now_s: float) -> str | None:
        """Why a store is not asked now. The breaker comes last: to pass it may spend the probe. The lock is held."""
        if store not in self._breakers:
            raise InvalidInput(f"there is no store {store!r} here; there are {', '.join(self._breakers)}")
        if store in self._off:
            return f"{store} is off: {self._off[store][1]}"
        return None if self._breakers[store].allows(now_s) else f"{store} is left alone after failures"

    def _wake(self, store: str) -> None:
        """Read again from a store that gave nothing but bad pages, after a while. Does not block: nothing is rebuilt.

        One that is damaged has to be put right by somebody who can wait.
        """
        with self._lock:
            since_s, why = self._off.get(store, (0.0, ""))
            due = why == BAD_PAGES and self.clock.monotonic() - since_s >= _BACK_ON_S
            if due:
                del self._off[store]
        if due:
            with contextlib.suppress(ResourceClosed):  # then the job is refused for that
                self._executor.revive(store)

    def _forget(self, end: End) -> _CallerJob | None:
        """A job has ended: the breaker hears how."""
        with self._lock:
            asked = self._asked.pop(end.job, None)
            if asked is not None and not asked.is_stuck:  # that was held against the store already
                said = says(asked.order, end, self.clock.monotonic())
                why = end.why if isinstance(end, JobFailed) else "nothing but " + "".join(end.results[:1])
                self._judge(asked, why, end.now_s, said=said)
        return asked

    def _stick(self, event: Stuck) -> None:
        """A job may never end: who waits for it is told, once. Raises what `on_stuck` raises."""
        with self._lock:
            asked = self._asked.get(event.job)
            if asked is None or asked.is_stuck:
                return
            asked.is_stuck = True
            self._judge(asked, _HANGS, event.now_s, said=False)
        if asked.on_stuck is not None:
            asked.on_stuck(event)

    def _judge(self, asked: _CallerJob, why: str, now_s: float, *, said: bool | None) -> None:
        """While a probe is out only the probe is heard: what began before it says nothing of the store as it is now."""
        store, breaker = asked.order.store, self._breakers[asked.order.store]
        if breaker.state is BreakerState.HALF_OPEN and not asked.is_probe:
            return
        kind = type(asked.order).__name__.lower()
        if said is None and asked.is_probe:
            breaker.undecided(now_s)
        elif said is True and breaker.succeeded():
            self.metrics.event("tier_resumed", tier=store, job=kind)
        elif said is False:
            was_closed = breaker.state is BreakerState.CLOSED
            if breaker.failed(self.clock.monotonic()) and was_closed:
                self.metrics.event("tier_paused", tier=store, job=kind, why=why)
        self.metrics.gauge("breaker_state", breaker.state.value, tier=store)


def says(order: Job, end: End, now_s: float) -> bool | None:
    """What the end of a job says of its store: that it works, that it does not, or (None) nothing. Pure.

    A page that is missing or has no room is a fine answer. A probe that found nothing is none: what cannot be
    reached looks the same.
    """
    if isinstance(end, JobFailed):
        return False if end.failure in (Reason.FAILED, Reason.LATE) and not end.on_device else None
    if isinstance(order, Probe):
        return True if Status.HELD in end.results else False if now_s > order.deadline_s else None
    if not end.results:
        return None
    # Behind a failure nothing was tried.
    return end.results[0] not in STORE_TROUBLE or not _GOOD.isdisjoint(end.results)
