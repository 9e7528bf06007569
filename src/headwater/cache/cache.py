"""TieredCache: what an engine calls. `match / reserve / commit / release` over the brain, with hands and a clock.

    match      what is there of a prompt: on the device at once, in the stores as their answers come in
    reserve    slots for a request, and loads into them where that pays
    poll       how far the loads are; `wait` blocks for them, until a deadline
    commit     blocks that were really computed get their names, and go to the stores
    release    the request is over: everything it held is given back, and its bill is handed out

No call waits for a store, but `wait`, `drain` and `close`, each until its deadline. Calls may come from any thread;
what the hands report comes from theirs. One lock keeps them apart, and is held only while the brain thinks.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from headwater.cache.match import Match
from headwater.cache.records import JobKind
from headwater.cache.state import Brain
from headwater.core import events as ev
from headwater.core.errors import InvalidInput, ResourceClosed
from headwater.core.keys import BlockKey
from headwater.metrics import Metrics

log = logging.getLogger("headwater")


class Hands(Protocol):
    """Who carries instructions out (`transfer/worker.py`). Reports through the callback it was given."""

    def submit(self, instructions: Sequence[ev.Instruction]) -> None:
        """Begin jobs, or cancel them. Does not block."""
        ...

    def glance(self, look: ev.Look) -> tuple[str, ...] | None:
        """The answer to a Look, if memory has it; None: the store has to be asked. Does not block."""
        ...

    def stand_back(self, *, hurry: bool) -> None:
        """Do what nobody waits for a little later, while the engine is in a hurry. Does not block."""
        ...

    def drain(self, timeout_s: float) -> bool:
        """Wait until no job is under way; False if that took too long."""
        ...

    def close(self, timeout_s: float) -> bool:
        """End all jobs and threads; False if one did not end in time. May be asked again."""
        ...

    def revive(self, store: str) -> bool:
        """Put a store right that was switched off; False if that did not work. Blocks."""
        ...

    def wait_layer(self, job: int, layer: int, timeout_s: float) -> bool:
        """Wait until a load has brought all planes up to a layer's. Blocks. False: too late, or it is over."""
        ...


class NoHands:
    """The hands of a cache without stores: nothing is to be done, and nothing is."""

    def submit(self, instructions: Sequence[ev.Instruction]) -> None:
        """Forget them."""

    def glance(self, look: ev.Look) -> tuple[str, ...] | None:
        """Nobody knows."""
        return None

    def stand_back(self, *, hurry: bool) -> None:
        """Nobody is in the way."""

    def drain(self, timeout_s: float) -> bool:
        """Nothing is under way."""
        return True

    def close(self, timeout_s: float) -> bool:
        """Nothing to end."""
        return True

    def revive(self, store: str) -> bool:
        """There is none."""
        raise InvalidInput(f"there is no store {store!r}")

    def wait_layer(self, job: int, layer: int, timeout_s: float) -> bool:
        """There is no load."""
        return False


class Announcer(Protocol):
    """Who tells the cluster what this cache holds (`residency/publisher.py`)."""

    def offer(self, moves: Sequence[ev.Came | ev.Went | ev.Lost]) -> None:
        """Hear what came to a tier or left one, in order. Must not block and must not raise."""
        ...


class Clock(Protocol):
    """Where time comes from."""

    def monotonic(self) -> float:
        """Seconds that never go back."""
        ...


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a request is: its first `num_ready` blocks are on the device and may be used.

    While it is `loading`, the first `num_expected` will be, if all goes well.
    """

    num_ready: int
    loading: bool
    num_expected: int


class TieredCache:
    """The cache of one engine process."""

    def __init__(
        self,
        brain: Brain,
        hands: Hands,
        *,
        clock: Clock,
        metrics: Metrics | None = None,
        record: Callable[[ev.Event], None] | None = None,
    ) -> None:
        """Takes the hands over: `close` closes them. `record` hears every event before the brain does."""
        self.brain = brain
        self.metrics = metrics if metrics is not None else Metrics()
        self._hands = hands
        self._clock = clock
        self._record = record
        self._lock = threading.RLock()  # re-entered where hands report at once, as in virtual time
        self._changed = threading.Condition(self._lock)
        self._closed = False
        self._announcer: Announcer | None = None
        self.on_change: Callable[[], None] | None = None  # called, without a lock, when a job of anybody has ended

    # --- the engine's side --------------------------------------------------------------------------------------------

    def match(
        self,
        request: str,
        keys: Sequence[BlockKey],
        *,
        root: BlockKey,
        tenant: bytes = ev.NO_TENANT,
        resumed: bool = False,
    ) -> Match:
        """What is there of a prompt, by the keys of its full blocks. What is on the device is held until release.

        `resumed`: the request was preempted and comes back; its own blocks are not counted as hits.
        Ask again to see what the stores answered since. Raises InvalidInput for keys that are none, and for a request
        that is here already with other keys.
        """
        with self._lock:
            self._handle(
                ev.Arrived(
                    now_s=self._now_s(), request=request, keys=tuple(keys), root=root, tenant=tenant, resumed=resumed
                )
            )
            return self.brain.view(request)

    def reserve(
        self, request: str, num_blocks: int, *, load: bool = True, promised: str = ""
    ) -> tuple[int, ...] | None:
        """Slots for the first `num_blocks` blocks of a request, in order; None if there is no room now.

        Evicts what it must. The first call begins to load what the stores have, if that pays: those slots are not to
        be used before `poll` says that nothing is loading. Later calls add slots. `promised`: a store that is known to
        have all blocks of the prompt; it is not asked, and they are loaded whether that pays or not.
        """
        if num_blocks < 0:
            raise InvalidInput(f"a request has no {num_blocks} blocks")
        with self._lock:
            out = self._handle(
                ev.Wanted(now_s=self._now_s(), request=request, num_blocks=num_blocks, load=load, promised=promised)
            )
            return next((one.slots for one in out if isinstance(one, ev.Granted)), None)

    def poll(self, request: str) -> Progress:
        """How far a request is."""
        with self._lock:
            return self._progress(request)

    def wait(self, request: str, timeout_s: float) -> Progress:
        """Wait until nothing is being looked up or loaded for a request. Blocks, until the time is over at most."""
        until_s = self._clock.monotonic() + timeout_s
        with self._lock:
            while True:
                progress = self._progress(request)
                waiting = progress.loading or bool(self.brain.requests[request].looks)
                left_s = until_s - self._clock.monotonic()
                if not waiting or left_s <= 0 or self._closed:
                    return progress
                self._changed.wait(left_s)

    def wait_layer(self, request: str, layer: int, timeout_s: float) -> bool:
        """Wait until all blocks that are being loaded have their planes up to a layer's on the device, verified.

        Blocks, until the time is over at most. False: it was, or a load failed. What True allows is to compute with
        that layer; the blocks count as loaded when `poll` says so, and not before.
        """
        until_s = self._clock.monotonic() + timeout_s
        with self._lock:
            self._progress(request)
            record = self.brain.requests[request]
            jobs = list(record.loads)
        for job in jobs:
            if job.results is None and self._hands.wait_layer(job.job, layer, until_s - self._clock.monotonic()):
                continue
            with self._lock:  # it is over, or late: then its event says what came of it
                while job.results is None and not self._closed and (left_s := until_s - self._clock.monotonic()) > 0:
                    self._changed.wait(left_s)
                if job.results is None or any(result != "hit" for result in job.results):
                    return False
        return record.broken is None

    def give_up(self, request: str) -> None:
        """Do not wait for stores any longer. Loads under way are cancelled; `poll` says when their slots are usable."""
        with self._lock:
            self._handle(ev.GaveUp(now_s=self._now_s(), request=request))

    def commit(self, request: str, keys: Sequence[BlockKey]) -> int:
        """The next blocks of a request were computed, on every rank, and are named so. Returns how many it has now.

        A block that another request committed first stays in that one's slot for others; this request keeps its own.
        """
        with self._lock:
            self._handle(ev.Filled(now_s=self._now_s(), request=request, keys=tuple(keys)))
            return self.brain.requests[request].hold.num_blocks

    def wait_saved(
        self, request: str, store: str, timeout_s: float, *, stopped: Callable[[], bool] = lambda: False
    ) -> bool:
        """Wait until no blocks of a request are on their way to a store. Blocks, until the time is over at most.

        False: it was, or `stopped` says so; who changes its mind calls `wake`.
        """
        until_s = self._clock.monotonic() + timeout_s
        with self._lock:
            while self._saving(request, store):
                left_s = until_s - self._clock.monotonic()
                if left_s <= 0 or self._closed or stopped():
                    return False
                self._changed.wait(left_s)
        return True

    def wake(self) -> None:
        """Have everybody who waits here look again whether that makes sense."""
        with self._lock:
            self._changed.notify_all()

    def release(self, request: str) -> ev.Finished | None:
        """A request is over, or preempted: give back what it holds. Returns its bill; None if it never reserved."""
        with self._lock:
            out = self._handle(ev.Left(now_s=self._now_s(), request=request))
            return next((one for one in out if isinstance(one, ev.Finished)), None)

    def pace(self, base_s: float, slope_s: float) -> None:
        """What computing a block costs here, as measured: `base_s`, and `slope_s` more for each block before it."""
        with self._lock:
            self._handle(ev.Paced(now_s=self._now_s(), base_s=base_s, slope_s=slope_s))

    def stand_back(self, *, hurry: bool) -> None:
        """The engine is in a hurry, or not any more: what nobody waits for is done a little later. Does not block."""
        self._hands.stand_back(hurry=hurry)

    # --- the hands' side ----------------------------------------------------------------------------------------------

    def deliver(self, event: ev.Event) -> None:
        """Hear what became of a job. For the hands; never raises, because nobody there could help."""
        with self._lock:
            try:
                self._handle(event)
            except Exception:
                log.exception("the brain could not take in %s", event)
                self.metrics.event("event_refused", what=repr(event))
            self._changed.notify_all()
        self.notice()

    def announce(self, to: Announcer) -> None:
        """From now on, say which blocks come and go. To be called while nothing is known yet: it hears all or none."""
        with self._lock:
            if len(self.brain.index) or self.brain.requests:
                raise InvalidInput("who is to hear what the cache holds must be there before the first request")
            self._announcer = to
            self.brain.moves.watched = True

    def notice(self) -> None:
        """Something may have changed that no event tells: a load has begun to arrive. For the hands."""
        if self.on_change is not None:
            self.on_change()

    def revive(self, tier: str) -> bool:
        """Put a store right that was switched off, and use it again; False if not. Blocks, seconds for a rebuild."""
        return self._hands.revive(tier)

    # --- the end ------------------------------------------------------------------------------------------------------

    def drain(self, timeout_s: float) -> bool:
        """Wait until no job is under way. Blocks, until the time is over at most; False if it was."""
        return self._hands.drain(timeout_s)

    def close(self, timeout_s: float = 10.0) -> bool:
        """End all jobs; requests that are still here keep nothing. Idempotent. False if a store did not let go."""
        with self._lock:
            for request in list(self.brain.requests):
                self._handle(ev.Left(now_s=self._clock.monotonic(), request=request))
            self._closed = True
            self._changed.notify_all()
        return self._hands.close(timeout_s)

    def __enter__(self) -> Self:
        """Return self; it closes itself at the end of the block."""
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        """Close."""
        if not self.close():
            log.error("a store's call has not returned: its pages and the store itself must stay until it does")

    # --- inside -------------------------------------------------------------------------------------------------------

    def _now_s(self) -> float:
        if self._closed:
            raise ResourceClosed("the cache is closed")
        return self._clock.monotonic()

    def _handle(self, event: ev.Event) -> list[ev.Instruction]:
        if self._record is not None:
            try:
                self._record(event)
            except Exception:  # a full disk must not cost the event
                log.exception("no event is recorded any more")
                self._record = None
        out = self.brain.handle(event)
        self._report(out)
        if self._announcer is not None and (moves := self.brain.moves.take()):
            self._announcer.offer(moves)
        work: list[ev.Instruction] = []
        answers: list[ev.JobDone] = []
        for one in out:
            seen = self._hands.glance(one) if isinstance(one, ev.Look) else None
            if seen is not None and isinstance(one, ev.Look):
                answers.append(ev.JobDone(now_s=event.now_s, job=one.job, results=seen))
            elif isinstance(one, ev.Job | ev.Cancel):
                work.append(one)
        if work:
            self._hands.submit(work)
        for answer in answers:  # nobody has to wait for a thread to wake up
            out += self._handle(answer)
        return out

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
            for state, num in self.brain.slots.counts().items():
                self.metrics.gauge("device_slots", num, state=state.name.lower())
            for tier in self.brain.tiers.values():
                self.metrics.gauge("breaker_state", tier.state.value, tier=tier.name)

    def _saving(self, request: str, store: str) -> bool:
        record = self.brain.requests.get(request)
        return record is not None and any(
            job.kind is JobKind.SAVE and job.store == store and job.request is record for job in self.brain.jobs
        )

    def _progress(self, request: str) -> Progress:
        record = self.brain.requests.get(request)
        if record is None:
            raise InvalidInput(f"there is no request {request!r}: it has not asked, or has left")
        ready, loading = record.hold.num_blocks, bool(record.loads)
        return Progress(ready, loading=loading, num_expected=record.load_end if loading else ready)
