"""The shell around a brain: the lock, the executor, what is counted and told; and what follows a brain that failed.

Who calls is in `cache.py`. Here is what happens with an event: the brain hears it, the executor gets what it says.

A brain that raises, or finds that its books do not agree, is not believed any more: it fails closed. One that only
misses (`misses.py`) takes its place, jobs under way are cancelled, and it is said once, loudly. So that no slot is
given out that somebody may still use, the shell keeps a book of its own (`custody.py`), and the new brain is told to
withhold those slots until they are vacated. Requests that were here are *left over*: they may go on with the slots they
have, and give them back, but nothing of theirs is known, loaded or saved. `revive_brain` puts a fresh brain in place of
the one that misses, in the same way.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, ClassVar, Final

from headwater.cache.custody import Custody
from headwater.cache.executor import Executor, MonotonicClock, Purger, Recorder
from headwater.cache.explanations import Explanations
from headwater.cache.match import DEVICE
from headwater.cache.misses import MissBrain
from headwater.cache.state import Brain
from headwater.core import events as ev
from headwater.core.errors import HeadwaterError, InvalidInput, ResourceClosed
from headwater.core.results import Reason
from headwater.metrics import Metrics

log = logging.getLogger("headwater")


class Shell:
    """A brain, its executor and its clock. Calls may come from any thread."""

    misses: ClassVar[type[Brain]] = MissBrain  # what takes the place of a brain that failed

    def __init__(
        self,
        brain: Brain,
        executor: Executor,
        *,
        clock: MonotonicClock,
        metrics: Metrics | None = None,
        recorder: Recorder | None = None,
        purger: Purger | None = None,
    ) -> None:
        """Takes the executor over: `close` closes it. `recorder` hears all that the brain hears and says.

        `purger`: who removes blocks from the stores; None: nobody does.
        """
        self.brain = brain
        self.metrics = metrics if metrics is not None else Metrics()
        self.failed: str | None = None  # why the brain is one that only misses
        self.generation = 0  # how often the brain was replaced: who runs since before is left over
        self.on_change: Callable[[], None] | None = None  # called, without a lock, when a job of anybody has ended
        self._kind, self._config = type(brain), brain.config
        self._executor = executor
        self._clock = clock
        self._recorder = recorder
        self._purger = purger
        self._lock = threading.RLock()  # re-entered where an executor reports at once, as in virtual time
        self._changed = threading.Condition(self._lock)
        self._closed = False
        self._announcer: ev.MoveListener | None = None
        self._beside: Callable[[ev.Event], bool] | None = None
        self._custody = Custody()
        self._old = Custody()  # what brains before this one promised
        self._off: dict[str, str] = {}  # stores that are switched off, and why
        self._pace: ev.Paced | None = None  # what the engine said last
        self._explanations = Explanations()
        if recorder is not None:
            recorder.began(brain)

    # --- what the executor and others say -----------------------------------------------------------------------------

    def deliver(self, event: ev.Event) -> None:
        """Hear what became of a job. For the executor; raises nothing, because nobody there could help."""
        if self._beside is not None and self._beside(event):
            return
        if isinstance(event, ev.StoreOff | ev.StoreOn) and event.store not in self.tiers:
            return
        if isinstance(event, ev.JobFailed) and event.failure is Reason.FAILED:  # the brain only counts it
            log.warning("job %d failed: %s", event.job, event.why)
        with self._lock:
            try:
                if not self._is_old(event):
                    self._handle(event)
            except InvalidInput:
                log.exception("the brain could not take in %s", event)
                self.metrics.event("event_refused", what=repr(event))
            self._changed.notify_all()
        self.notice()

    def share_executor(self, hears: Callable[[ev.Event], bool]) -> Executor:
        """Let somebody else give jobs to the executor too, with numbers that no brain has: `hears` is asked first.

        It says whether an event was of its own jobs; it must neither block nor raise. To be called before any job.
        """
        self._beside = hears
        return self._executor

    def announce(self, to: ev.MoveListener) -> None:
        """From now on, say which blocks come and go. To be called while nothing is known yet: it hears all or none."""
        with self._lock:
            if self.brain.blocks() or self.brain.requests:
                raise InvalidInput("who is to hear what the cache holds must be there before the first request")
            self._announcer = to
            self.brain.moves.watched = True

    def notice(self) -> None:
        """Something may have changed that no event tells: a load has begun to arrive. For the executor."""
        if self.on_change is not None:
            self.on_change()

    # --- trouble ------------------------------------------------------------------------------------------------------

    @property
    def tiers(self) -> tuple[str, ...]:
        """Its stores' names, fastest first."""
        return tuple(tier.name for tier in self._config.tiers)

    def troubles(self) -> dict[str, str]:
        """What is not used, and why: stores that were switched off, by name, and `brain`."""
        with self._lock:
            return {**({"brain": self.failed} if self.failed is not None else {}), **self._off}

    def revive(self, tier: str) -> bool:
        """Put a store right that was switched off, and use it again; False if not. Blocks, seconds for a rebuild."""
        return self._executor.revive(tier)

    def revive_brain(self) -> bool:
        """Begin with a fresh brain after one failed: nothing is on the device, stores have what they have.

        False if none had failed, or if the fresh one fails at once.
        """
        with self._lock:
            if self.failed is None:
                return False
            now_s = self._now_s()
            self._renew(self._kind)
            self.failed = None
            self.metrics.event("brain_revived")
            log.warning("the brain was revived: it begins with an empty device")
            known: list[ev.Event] = [replace(self._pace, now_s=now_s)] if self._pace is not None else []
            known += [ev.StoreOff(now_s=now_s, store=store, why=why) for store, why in self._off.items()]
            for event in known:
                if self.failed is None:
                    self._handle(event)
            revived = self.failed is None
        self.notice()
        return revived

    def _fail(self, error: BaseException, event: ev.Event, *, heard: bool) -> None:
        """The brain is not believed any more: it could not take an event in, or, `heard`, not be obeyed."""
        why = f"{type(error).__name__}: {error} ({_place(error)}, at a {type(event).__name__})"
        if self._recorder is not None and not heard:
            self._recorder.failed(event, why)
        self.failed = why
        self._renew(self.misses)
        log.critical("the cache's brain failed, and every block is a miss until it is revived: %s", why)
        self.metrics.count("brain_failures_total")
        self.metrics.event("brain_failed", why=why)
        if self._announcer is not None:
            self._announcer.offer([ev.TierLost(tier=name) for name in (DEVICE, *self.tiers)])
        with suppress(HeadwaterError):  # if the executor is closed, it has ended all jobs
            self._executor.submit([ev.Cancel(job=number) for number in self._old.jobs])

    def _renew(self, kind: type[Brain]) -> None:
        """Another brain takes over. Whatever was promised by the last one is kept, and nothing of it believed."""
        self._old.take_over(self._custody)
        self._custody = Custody(next_job=self._old.next_job)
        self.brain = kind(self._config, withheld=self._old.slots(), first_job=self._old.next_job)
        self.brain.moves.watched = self._announcer is not None
        self.generation += 1
        if self._recorder is not None:
            self._recorder.began(self.brain)
        self._changed.notify_all()

    def _is_old(self, event: ev.Event) -> bool:
        """Whether an event is not for this brain: of a job of one before it, or of a store that it does not use."""
        if isinstance(event, _OF_JOBS) and event.job < self.brain.first_job:
            _NOTES[type(event)](self._old, event)
            self._vacate()
            return True
        if isinstance(event, ev.StoreOff):
            self._off[event.store] = event.why
        elif isinstance(event, ev.StoreOn):
            self._off.pop(event.store, None)
        return self.failed is not None and isinstance(event, ev.StoreOff | ev.StoreOn)

    def _drop(self, request: str) -> None:
        """A request that was left over is gone."""
        self._old.left(request)
        self._vacate()

    def _vacate(self) -> None:
        """Have the brain use slots that nobody of before uses any more."""
        withheld = self.brain.withheld
        freed = withheld - self._old.slots() if withheld else withheld
        if freed:
            self._handle(ev.Vacated(now_s=self._clock.monotonic(), slots=tuple(sorted(freed))))

    # --- an event -----------------------------------------------------------------------------------------------------

    def _now_s(self) -> float:
        if self._closed:
            raise ResourceClosed("the cache is closed")
        return self._clock.monotonic()

    def _handle(self, event: ev.Event) -> list[ev.Instruction]:
        """Have the brain hear an event, and the executor what it says. Raises InvalidInput: then nothing has changed.

        If the brain fails, nothing was said, and another one is there.
        """
        note = _NOTES.get(type(event))
        if note is not None:  # what is over is over, whatever the brain makes of it
            note(self._custody, event)
        try:
            out = self.brain.handle(event)
        except InvalidInput:
            if self._recorder is not None:
                self._recorder.refused(event)
            raise
        except BaseException as error:
            self._fail(error, event, heard=False)
            if not isinstance(error, Exception):
                raise
            return []
        if self._recorder is not None:
            self._recorder.heard(event, out)
        try:
            answers, interrupt = self._pass_on(event, out)
        except BaseException as error:
            if self._closed and isinstance(error, ResourceClosed):
                return out  # the executor has ended all jobs
            self._fail(error, event, heard=True)
            if not isinstance(error, Exception):
                raise
            return []
        generation = self.generation
        for answer in answers:  # nobody has to wait for a thread to wake up
            if generation == self.generation:
                out += self._handle(answer)
        if interrupt is not None:
            raise interrupt
        return out

    def _pass_on(self, event: ev.Event, out: Sequence[ev.Instruction]) -> tuple[list[ev.JobDone], BaseException | None]:
        """Count, tell, and have the executor begin. Returns what it knew from memory, and what interrupted that."""
        self._report(out)
        if self._announcer is not None and (moves := self.brain.moves.take()):
            self._announcer.offer(moves)
        if not out:
            return [], None
        work: list[ev.Instruction] = []
        answers: list[ev.JobDone] = []
        interrupt: BaseException | None = None
        for one in out:
            if isinstance(one, ev.Probe) and interrupt is None:
                try:
                    seen = self._executor.contains_cached(one)
                except (KeyboardInterrupt, SystemExit) as error:  # the caller's: after what is to be begun
                    interrupt, seen = error, None
                if seen is not None:
                    answers.append(ev.JobDone(now_s=event.now_s, job=one.job, results=seen))
                    continue
            if isinstance(one, ev.Job):
                work.append(one)
                record = self.brain.jobs[one.job].request
                self._custody.began(one, record.request if record is not None else None)
            elif isinstance(one, ev.Cancel):
                work.append(one)
            elif isinstance(one, ev.Granted):
                self._custody.granted(one.request, one.slots)
                self._custody.named(one.request, self.brain.requests[one.request].hold.num_blocks)
        if work:
            try:
                self._executor.submit(work)
            except HeadwaterError:  # they took none of it
                for one in work:
                    self._custody.ended(one.job) if isinstance(one, ev.Job) else None
                raise
        return answers, interrupt

    def _report(self, out: Sequence[ev.Instruction]) -> None:
        for (name, labels), amount in self.brain.accounts.take().items():
            self.metrics.count(name, amount, **dict(labels))
        for one in out:
            if isinstance(one, ev.Tell):
                log.warning("%s: %s", one.kind, ", ".join(f"{name}={fact}" for name, fact in one.facts))
                self.metrics.event(one.kind, **dict(one.facts))

    @contextmanager
    def still(self) -> Iterator[Brain]:
        """The brain, which hears nothing inside the block: for looking at it. Everybody else waits meanwhile."""
        with self._lock:
            yield self.brain

    def gauges(self) -> None:
        """Bring the gauges up to date: before they are shown."""
        with self._lock:
            self.metrics.gauge("brain_failed", int(self.failed is not None))
            for state, num in self.brain.slots.counts().items():
                self.metrics.gauge("device_slots", num, state=state.name.lower())
            for tier in self.brain.tiers.values():
                self.metrics.gauge("breaker_state", tier.state.value, tier=tier.name)
            for name, (start_s, gib_s) in self.paces().items():
                self.metrics.gauge("load_start_seconds", start_s, tier=name)
                self.metrics.gauge("load_gib_seconds", gib_s, tier=name)

    def paces(self) -> dict[str, tuple[float, float]]:
        """By tier, what a load takes however small, and each GiB, in seconds: as the last loads say; 0: not known."""
        with self._lock:
            loading = {tier.name: tier.loading for tier in self.brain.tiers.values()}
            return {name: (pace.start_s, pace.level * (1 << 30)) for name, pace in loading.items()}


_OF_JOBS: Final = (ev.JobDone, ev.JobFailed, ev.Copied, ev.Stuck)
_NOTES: Final[dict[type[ev.Event], Callable[[Custody, Any], None]]] = {
    ev.JobDone: lambda custody, event: custody.ended(event.job),
    ev.JobFailed: lambda custody, event: custody.ended(event.job),
    ev.Copied: lambda custody, event: custody.copied(event.job),
    ev.Stuck: lambda custody, event: custody.stuck(event.job),
    ev.Left: lambda custody, event: custody.left(event.request),
}


def _place(error: BaseException) -> str:
    """Where something was raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code if trace is not None else None
    return f"{code.co_name}, line {trace.tb_lineno}" if code is not None and trace is not None else "nowhere"
