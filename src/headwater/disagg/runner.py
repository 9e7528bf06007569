"""Runner: gives the jobs of handoffs to an executor, and the executor's events to the handoffs. Decides nothing.

A handoff is a machine (`machine.py`); its jobs run beside those of a cache, in the same queues and through the same
pages, or on an executor of their own. Nothing here blocks but `close`, and nothing polls: a pause between two tries is
a timer.

Invariant: `done` is called once for each handoff that began, without a lock held, when none of its jobs touches a slot
any more: in a thread of the executor, of a timer, or of who began or cancelled it. With one exception: a handoff that
is stuck. Then `freed` is called, once and after `done`, when its job has ended; that may be never.
"""

import threading
from collections import deque
from collections.abc import Callable

from headwater.core.events import Cancel, Event, Instruction, Job, JobDone, JobFailed
from headwater.disagg.machine import Handoff, Pause, Resumed, Stopped
from headwater.disagg.outcome import Moved
from headwater.transfer.executor.caller import Caller


class RunningHandoff:
    """One handoff under way. `cancel` may come from any thread."""

    def __init__(
        self,
        caller: Caller,
        machine: Handoff,
        done: Callable[[Moved], None],
        stopped: Callable[[], bool],
        freed: Callable[[], None] = lambda: None,
    ) -> None:
        self._caller = caller
        self._machine = machine
        self._done = done
        self._freed = freed
        self._stopped = stopped
        self._lock = threading.RLock()
        self._told = False
        self._lent = False  # it was told that its slots are still in use

    def begin(self) -> None:
        """Begin. Once."""
        self._take(None)

    def cancel(self) -> None:
        """Nobody wants it any more: it is over soon, when no job of it touches a slot. Does not block."""
        self._take(Stopped(now_s=self._now_s()))

    def _take(self, event: Event | None) -> None:
        with self._lock:
            if (event is None or isinstance(event, JobDone | JobFailed)) and self._stopped():
                self._machine.handle(Stopped(now_s=self._now_s()))  # what it would cancel has ended, or not begun
            said = self._machine.begin(self._now_s()) if event is None else self._machine.handle(event)
            self._carry_out(deque(said))
            moved = self._machine.moved if not self._told else None
            self._told = self._told or moved is not None
            freed = self._lent and not self._machine.uses_slots
            self._lent = not freed and (self._lent or (moved is not None and moved.stuck))
        if moved is not None:
            self._done(moved)
        if freed:
            self._freed()

    def _carry_out(self, said: deque[Instruction]) -> None:
        while said:
            one = said.popleft()
            if isinstance(one, Job):
                refused = self._caller.submit(one, self._take, self._take)
                if refused is not None:
                    said.extend(self._machine.handle(refused))
            elif isinstance(one, Cancel):
                self._caller.cancel(one.job)
            elif isinstance(one, Pause) and not self._pause(one.seconds):
                said.extend(self._machine.handle(Resumed(now_s=self._now_s())))

    def _pause(self, seconds: float) -> bool:
        """Have `_resume` called after so long. False: go on at once, for there is no pause, or no thread for it."""
        if seconds <= 0:
            return False
        timer = threading.Timer(seconds, self._resume)
        timer.daemon = True
        try:
            timer.start()
        except RuntimeError:  # the machine has no more threads: nobody may wait for ever because of that
            return False
        return True

    def _resume(self) -> None:
        self._take(Resumed(now_s=self._now_s()))

    def _now_s(self) -> float:
        return self._caller.clock.monotonic()
