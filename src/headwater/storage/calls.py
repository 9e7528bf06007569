"""Calls: a store's calls on threads of their own, so that each is answered by its deadline even when the store blocks.

A store that keeps deadlines by itself answers, late pages and all, as it would without this. One that blocks (it is not
`interruptible`: a client whose server is gone) is given up at the deadline: the answer is LATE, the thread and the
memory stay with the call until it returns, and what it then says is not heard. A circuit breaker (`core/breaker.py`)
stands before it all: a store that is down is asked by one call at a time, and everybody else is answered at once.

Not here: what the bytes mean, whose pages they are, in which order slices go (`transfer/executor/slices.py`). Calls
does not own the store: close it after `close` said True. `storage/bounded.py` is the same as a plain Store.

Invariants:
- Every call that was submitted is answered once, by its deadline + `grace_s` and what a lock takes: one answer per
  page, whatever the store does.
- `on_return` is called exactly once per call, when nothing reads or writes the memory any more: before the answer of a
  call that came back in time (or was never made) is heard, else when the late call returns. A pool that gives pages out
  again only then quarantines by construction (rule 3). It is called without a lock, and must neither block nor raise.
- At most `num_threads` threads take calls, at most `max_extra_threads` more are stuck. When all are stuck, calls are
  answered at once. Where there are two or more, one is kept free of puts and deletes.
- While the breaker is open no call is made; then exactly one, the probe, until it is answered.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any, Final, TypeAlias, TypeVar

from headwater.core.breaker import MAX_PAUSE_S, Breaker, BreakerState
from headwater.core.errors import InvalidInput
from headwater.core.page import PageName
from headwater.core.results import Status
from headwater.metrics import Metrics
from headwater.storage.base import SYSTEM_CLOCK, Clock, Deadline, Store
from headwater.storage.pending import CONTAINS, DELETE, GET, PUT, CallEnd, Pending, Sort, says

log: Final = logging.getLogger("headwater")

S = TypeVar("S")
Items: TypeAlias = Sequence[tuple[PageName, memoryview]]


class Calls:
    """Runs the calls of one store. Every method may be called from several threads; none but `close` and `wait` blocks.

    A Calls belongs to one process: after fork() make another.
    """

    def __init__(
        self,
        store: Store,
        *,
        name: str = "pool",
        num_threads: int = 4,
        max_extra_threads: int = 4,
        breaker_failures: int = 3,
        breaker_pause_s: float = 1.0,
        breaker_max_pause_s: float = MAX_PAUSE_S,
        grace_s: float = 0.1,
        clock: Clock = SYSTEM_CLOCK,
        metrics: Metrics | None = None,
    ) -> None:
        """Starts no thread yet. `grace_s`: how long after its deadline a store may still say what it did by then.

        Raises InvalidInput.
        """
        least = {"num_threads": 1, "max_extra_threads": 0, "breaker_failures": 1, "breaker_pause_s": 0, "grace_s": 0}
        given = (num_threads, max_extra_threads, breaker_failures, breaker_pause_s, grace_s)
        for (what, low), value in zip(least.items(), given, strict=True):
            if not low <= value < float("inf"):
                raise InvalidInput(f"{what} must be at least {low}, not {value}")
        self.store = store
        self.name = name
        self._num_threads = num_threads
        self._max_threads = num_threads + max_extra_threads
        self._grace_s = grace_s
        self._clock = clock
        self._metrics = metrics if metrics is not None else Metrics()
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)  # a call that a thread may take
        self._queues: tuple[deque[Pending[Any]], deque[Pending[Any]]] = (deque(), deque())  # hurried, others
        self._running: list[Pending[Any]] = []
        self._num_able = 0  # threads that take calls or are at one that is not overdue
        self._num_idle = 0
        self._num_stuck = 0
        self._breaker = Breaker(
            failures=breaker_failures, pause_s=breaker_pause_s, max_pause_s=max(breaker_pause_s, breaker_max_pause_s)
        )
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._numbers = count()

    # --- calls --------------------------------------------------------------------------------------------------------

    def put(self, pages: Items, *, deadline: Deadline, on_return: Callable[[], None]) -> Pending[Status]:
        """Store sealed frames, which are the call's until `on_return`. Does not block."""
        work = partial(self.store.put, pages, deadline=deadline)
        return self._submit(PUT, work, num_pages=len(pages), deadline=deadline, on_return=on_return)

    def get_into(self, pages: Items, *, deadline: Deadline, on_return: Callable[[], None]) -> Pending[Status]:
        """Copy frames into buffers, which are the call's until `on_return`. Does not block, and verifies nothing."""
        work = partial(self.store.get_into, pages, deadline=deadline)
        return self._submit(GET, work, num_pages=len(pages), deadline=deadline, on_return=on_return)

    def contains(self, names: Sequence[PageName], *, deadline: Deadline) -> Pending[bool]:
        """Whether each page seems to be there. Does not block."""
        work = partial(self.store.contains, names, deadline=deadline)
        return self._submit(CONTAINS, work, num_pages=len(names), deadline=deadline, on_return=_nothing)

    def delete(self, names: Sequence[PageName], *, deadline: Deadline) -> Pending[Status]:
        """Remove pages by force. Does not block."""
        work = partial(self.store.delete, names, deadline=deadline)
        return self._submit(DELETE, work, num_pages=len(names), deadline=deadline, on_return=_nothing)

    @property
    def ready(self) -> bool:
        """Whether a call might be made now: the breaker lets one through, and there is a thread. Changes nothing."""
        with self._lock:
            self._notice_overdue()
            return not self._closed and self._has_thread() and self._breaker.would_allow(self._clock.monotonic())

    @property
    def num_stuck(self) -> int:
        """Calls that did not return by their deadline, and have not yet."""
        return self._num_stuck

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self, timeout_s: float = 10.0) -> bool:
        """End the threads; idempotent. Blocks until they ended, or `timeout_s` passed: then False.

        Calls that wait for a thread are answered at once; those under way keep their deadlines. After False a call has
        not returned: its memory and the store must stay as they are until another close() says True.
        """
        until = Deadline.after(timeout_s)  # the clock that waiting goes by, whatever `clock` is
        with self._lock:
            self._closed = True
            left = [call for queue in self._queues for call in queue]
            for queue in self._queues:
                queue.clear()
            self._work.notify_all()
            threads = list(self._threads)
        for call in left:
            self._hand_back(call)
        with self._lock:
            for call in left:
                if call.end is None:  # else its waiter gave up first
                    self._settle(call, CallEnd.CLOSED, why="it was closed")
        for thread in threads:
            thread.join(until.remaining_s)
        still = [thread.name for thread in threads if thread.is_alive()]
        if still:
            log.warning("not back from a call of %s %g s after close(): %s", self.name, timeout_s, still)
        return not still

    # --- taking calls in ----------------------------------------------------------------------------------------------

    def _submit(
        self,
        sort: Sort[S],
        work: Callable[[], Sequence[S]],
        *,
        num_pages: int,
        deadline: Deadline,
        on_return: Callable[[], None],
    ) -> Pending[S]:
        call = Pending(self._lock, self._wait, sort, work, num_pages=num_pages, deadline=deadline, on_return=on_return)
        with self._lock:
            self._notice_overdue()
            end = self._refusal(call)
            if end is None:
                call.probe = self._breaker.state is BreakerState.HALF_OPEN
                self._queues[not sort.hurried].append(call)
                self._ensure_thread()
                self._work.notify()
                self._show()
        if end is not None:
            if num_pages:
                self._metrics.count("refused_calls_total", store=self.name, reason=end.value)
            self._hand_back(call)
            with self._lock:
                self._settle(call, end, why=_WORDS[end])
        return call

    def _refusal(self, call: Pending[Any]) -> CallEnd | None:
        """Why a call is answered without asking the store. The breaker comes last: to pass it may spend the probe."""
        if self._closed:
            return CallEnd.CLOSED
        if not call.num_pages:
            return CallEnd.ANSWERED
        if call.deadline.expired:
            return CallEnd.LATE
        if not self._has_thread():
            return CallEnd.NO_THREAD
        return None if self._breaker.allows(self._clock.monotonic()) else CallEnd.LEFT_ALONE

    def _has_thread(self) -> bool:
        return self._num_able > 0 or self._num_stuck < self._max_threads

    def _ensure_thread(self) -> None:
        """Start one if calls wait that no idle thread will take, and another is allowed."""
        num_queued = sum(map(len, self._queues))
        allowed = self._num_able < self._num_threads and self._num_able + self._num_stuck < self._max_threads
        if num_queued <= self._num_idle or not allowed:
            return
        name = f"headwater {self.name} call {next(self._numbers)}"
        thread = threading.Thread(target=self._serve, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the machine has no more: then calls end LATE
            log.warning("no thread for the calls of %s: %s", self.name, error)
            return
        self._threads = [one for one in self._threads if one.is_alive()] + [thread]
        self._num_able += 1

    # --- waiting ------------------------------------------------------------------------------------------------------

    def _wait(self, call: Pending[S]) -> list[S]:
        until = self._until(call)
        with self._lock:
            while call.end is None and not until.expired:
                call.changed.wait(until.remaining_s)
            queued = call.end is None and not call.begun and self._withdraw(call)
        if queued:
            self._hand_back(call)
        with self._lock:
            if call.end is None:
                self._give_up(call)
            return list(call.answers)

    def _until(self, call: Pending[Any]) -> Deadline:
        return Deadline(call.deadline.at_s + self._grace_s, call.deadline.clock)

    def _withdraw(self, call: Pending[Any]) -> bool:
        """Take a call out of its queue, if it is still there."""
        queue = self._queues[not call.sort.hurried]
        if call not in queue:
            return False
        queue.remove(call)
        return True

    def _notice_overdue(self) -> None:
        """Give up calls that nobody waits for and that do not return: their threads are to be replaced too."""
        for call in list(self._running):
            if call.end is None and self._until(call).expired:
                self._give_up(call)

    def _give_up(self, call: Pending[Any]) -> None:
        """Answer LATE, and leave the thread, if one is at it, to the call."""
        self._settle(call, CallEnd.LATE, why="it did not return in time" if call.begun else "no thread was free")
        if call.begun:
            call.stuck = True
            self._num_able -= 1
            self._num_stuck += 1
            self._metrics.event("store_stuck", store=self.name, job=call.sort.name)
            self._ensure_thread()
            self._work.notify_all()  # in its place another may begin
            self._show()

    # --- the threads --------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while (call := self._next()) is not None:
            self._run(call)

    def _next(self) -> Pending[Any] | None:
        """Wait for a call. None: the thread shall end, and is counted out."""
        with self._lock:
            while not self._closed and self._num_able <= self._num_threads:
                call = self._pop()
                if call is not None:
                    call.begun = not call.deadline.expired
                    self._running.append(call)
                    return call
                self._num_idle += 1
                self._work.wait()
                self._num_idle -= 1
            self._num_able -= 1
            return None

    def _pop(self) -> Pending[Any] | None:
        hurried, others = self._queues
        if hurried:
            return hurried.popleft()
        num_others = sum(not call.sort.hurried and not call.stuck for call in self._running)
        return others.popleft() if others and num_others < max(1, self._num_threads - 1) else None

    def _run(self, call: Pending[Any]) -> None:
        """Make a call, give its memory back, then settle it, unless somebody gave it up. Raises nothing."""
        sort, end, why, answers = call.sort, CallEnd.ANSWERED, "", []
        if not call.begun:
            end, why = CallEnd.LATE, "no thread was free"
        else:
            try:
                answers = list(call.work())
                typed = len(answers) == call.num_pages and all(isinstance(one, sort.kind) for one in answers)
                if not typed or not sort.answers.issuperset(answers):
                    end, why = CallEnd.RAISED, f"{self.name} gave no {sort.kind.__name__} for each of its pages"
            except BaseException as error:  # noqa: BLE001  foreign code: a thread that dies would take a place with it
                end, why = CallEnd.RAISED, f"{self.name} raised {type(error).__name__}: {error}"
        call.work = list  # nor does the call itself keep the memory any longer
        self._hand_back(call)
        with self._lock:
            self._running.remove(call)
            if call.end is None:
                if call.begun and self._until(call).expired:
                    end, why = CallEnd.LATE, "it did not return in time"
                self._settle(call, end, answers=answers, why=why)
            if call.stuck:
                self._num_stuck -= 1
                self._num_able += 1  # or it is one too many, and ends
            self._show()

    # --- how a call ends ----------------------------------------------------------------------------------------------

    def _settle(self, call: Pending[Any], end: CallEnd, *, answers: Sequence[Any] = (), why: str) -> None:
        """Give a call its answers, once, and the breaker its news. The lock is held."""
        filler = call.sort.late if end is CallEnd.LATE else call.sort.failed
        call.answers = list(answers) if end is CallEnd.ANSWERED else [filler] * call.num_pages
        call.end, call.why = end, why
        call.changed.notify_all()
        self._tell_breaker(call)

    def _tell_breaker(self, call: Pending[Any]) -> None:
        """While a probe is out only the probe is heard: what began before it says nothing of the store as it is now."""
        if self._breaker.state is BreakerState.HALF_OPEN and not call.probe:
            return
        now_s = self._clock.monotonic()
        said = says(call)
        if said is None and call.probe:
            self._breaker.undecided(now_s)
        elif said is True and self._breaker.succeeded():
            self._metrics.event("tier_resumed", tier=self.name, job=call.sort.name)
        elif said is False:
            was_closed = self._breaker.state is BreakerState.CLOSED
            if self._breaker.failed(now_s) and was_closed:
                why = call.why or f"nothing but {call.answers[0]}"
                self._metrics.event("tier_paused", tier=self.name, job=call.sort.name, why=why)
        self._show()

    def _hand_back(self, call: Pending[Any]) -> None:
        """Say that nothing touches the call's memory any more. Called once per call, without the lock."""
        try:
            call.on_return()
        except Exception:
            log.exception("what %s was told to do when a call returned failed", self.name)

    def _show(self) -> None:
        self._metrics.gauge("breaker_state", self._breaker.state.value, tier=self.name)
        self._metrics.gauge("stuck_calls", self._num_stuck, store=self.name)


def _nothing() -> None:
    """The memory of a call that was given none."""


_WORDS: Final = {
    CallEnd.ANSWERED: "",
    CallEnd.LATE: "its deadline had passed",
    CallEnd.LEFT_ALONE: "the store is left alone after failures",
    CallEnd.NO_THREAD: "all threads are in calls that do not return",
    CallEnd.CLOSED: "it was closed",
}
