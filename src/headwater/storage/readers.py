"""Readers: a few threads that work beside whoever reads many pages at once, and go back to sleep when he has them.

A disk, and the page cache in front of it, give several threads several times what they give one. Who asks works too,
so a call needs no thread to go on: helpers take what is left over, one item after the other, in order. Knows nothing of
pages: an item is a number, and the work is the caller's.

Invariants:
- `run` returns, or raises, when nobody is at an item of it any more (rule 3), with one exception: a helper that hangs
  in a read. Then it raises ReadStuck, a little after the deadline: the call's memory is the helper's until `over`.
  Other calls go on, with the helpers that are left. (A caller that hangs in a read of its own hangs.)
- No thread is started before it is needed, and none stays for longer than `_IDLE_S` with nothing to do.
- Who waits is first: helpers leave a call that nobody waits for (`hurry=False`) after the item that they are at.
- A child of a fork has no helpers, and must not `run`: its store says so (`StoreForked`).
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Final

from headwater.core.errors import StoreBusy
from headwater.storage.base import Deadline

log: Final = logging.getLogger("headwater")

MOST_READERS: Final = 16
_LEAST_READERS: Final = 4  # a cold disk is kept busy by more of them than there are cores
_IDLE_S: Final = 10.0
_GRACE_S: Final = 5.0  # after the deadline, for the item that a helper is at: then it is said to hang


class ReadStuck(StoreBusy):
    """A helper hangs in a read. What the call was given may still be written to: not to be used again before `over`."""

    def __init__(self) -> None:
        super().__init__("a read of the store does not return")
        self.over: Final = threading.Event()  # nobody reads for that call any more
        self._lock = threading.Lock()
        self._then: list[Callable[[], None]] = []

    def when_over(self, then: Callable[[], None]) -> None:
        """Have something done when it is over, by whoever reads last; at once, if it is."""
        with self._lock:
            if not self.over.is_set():
                self._then.append(then)
                return
        then()

    def end(self) -> None:
        """It is over."""
        with self._lock:
            self.over.set()
        for then in self._then:
            try:
                then()
            except Exception:  # somebody's code, in a helper that must go on
                log.exception("who waited for a read to end raised")


def default_readers() -> int:
    """As many as there are cores for this process, within bounds."""
    return max(_LEAST_READERS, min(MOST_READERS, len(os.sched_getaffinity(0))))


class _Round:
    """One call: items from 0 on, each done once. The lock of its Readers guards everything here."""

    def __init__(self, work: Callable[[int], None], num_items: int, lock: threading.Lock, *, hurry: bool) -> None:
        self.work = work
        self.hurry = hurry
        self.num_wanted = 0  # helpers that may still come
        self.num_inside = 0  # helpers that are at an item
        self.left = threading.Condition(lock)
        self._num_items = num_items
        self._next = 0
        self.error: BaseException | None = None
        self.stuck: ReadStuck | None = None  # what its caller was told, while helpers were inside

    @property
    def goes_on(self) -> bool:
        """Whether there is an item that nobody has begun, and a point in it."""
        return self.error is None and self._next < self._num_items

    def claim(self) -> int | None:
        """The next item: it is the caller's. None: there is none."""
        if not self.goes_on:
            return None
        self._next += 1
        return self._next - 1

    def stop(self) -> None:
        """Begin no item any more."""
        self._next = self._num_items


class Readers:
    """Helpers for the calls of one store. Several threads may `run` at once, and share them."""

    def __init__(self, num_readers: int) -> None:
        """`num_readers` at most are at the items of one call, its caller among them. Starts nothing."""
        self.num_readers: Final = num_readers
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # a call wants helpers, or it is closed
        self._wanting: list[_Round] = []  # those that are waited for first
        self._threads: set[threading.Thread] = set()
        self._num_idle = 0
        self._closed = False

    def run(
        self,
        work: Callable[[int], None],
        num_items: int,
        *,
        deadline: Deadline | None = None,
        most: int | None = None,
        hurry: bool = True,
    ) -> None:
        """Have `work` done with each number below `num_items`, by `most` threads at most. Blocks.

        Raises what `work` raised first; then some items were not begun. Or ReadStuck: a helper is at one `_GRACE_S`
        after the deadline.
        """
        num_helpers = min(self.num_readers, num_items, num_items if most is None else most) - 1
        if num_helpers < 1 or self._closed:
            for i in range(num_items):
                work(i)
            return
        turn = _Round(work, num_items, self._lock, hurry=hurry)
        try:
            self._call(turn, num_helpers)
            self._work(turn, helps=False)
        except BaseException as error:  # noqa: BLE001  an interrupt between two items: raised below, or ReadStuck from it
            turn.error = turn.error or error
        self._settle(turn, deadline)
        if turn.stuck is not None:
            raise turn.stuck from turn.error
        if turn.error is not None:
            raise turn.error

    def close(self, timeout_s: float) -> bool:
        """End the helpers, each after the item it is at. Blocks, `timeout_s` at most. False: one is left, and it warns.

        Idempotent. Calls that are inside go on alone, and so do those that come later.
        """
        with self._lock:
            self._closed = True
            self._changed.notify_all()
            threads = list(self._threads)
        until_s = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        left = [thread.name for thread in threads if thread.is_alive()]
        if left:
            log.warning("not back from a read %g s after close(): %s", timeout_s, ", ".join(left))
        return not left

    # ------------------------------------------------------------------------------------------------------------------

    def _call(self, turn: _Round, num_helpers: int) -> None:
        """Offer a call to helpers; start some where there are too few."""
        with self._lock:
            if self._closed:
                return
            turn.num_wanted = num_helpers
            at = next((i for i, one in enumerate(self._wanting) if turn.hurry and not one.hurry), len(self._wanting))
            self._wanting.insert(at, turn)
            num_new = min(num_helpers - self._num_idle, self.num_readers - 1 - len(self._threads))
            self._changed.notify(num_helpers)
            for _ in range(num_new):
                thread = threading.Thread(target=self._help, name="headwater reads", daemon=True)
                self._threads.add(thread)
                try:
                    thread.start()
                except RuntimeError:  # the machine has no more: then there are fewer
                    self._threads.discard(thread)
                    break

    def _help(self) -> None:
        while (turn := self._next_turn()) is not None:
            self._work(turn, helps=True)
            with self._lock:
                turn.num_inside -= 1
                turn.left.notify_all()
                freed = turn.stuck if not turn.num_inside else None
            if freed is not None:
                freed.end()

    def _next_turn(self) -> _Round | None:
        """Wait for a call that wants a helper. None: the thread shall end, and is counted out."""
        with self._lock:
            while not self._closed:
                if self._wanting:
                    turn = self._wanting[0]
                    turn.num_inside += 1
                    turn.num_wanted -= 1
                    if not turn.num_wanted:
                        del self._wanting[0]
                    return turn
                self._num_idle += 1
                told = self._changed.wait(_IDLE_S)
                self._num_idle -= 1
                if not told and not self._wanting:
                    break
            self._threads.discard(threading.current_thread())
            return None

    def _work(self, turn: _Round, *, helps: bool) -> None:
        while (i := self._claim(turn, helps=helps)) is not None:
            try:
                turn.work(i)
            except BaseException as error:  # noqa: BLE001  raised by `run`, when nobody is inside any more
                with self._lock:
                    turn.error = turn.error or error

    def _claim(self, turn: _Round, *, helps: bool) -> int | None:
        with self._lock:
            if not turn.goes_on or (helps and self._closed):
                return None
            if helps and not turn.hurry and self._wanting and self._wanting[0].hurry:
                if turn not in self._wanting:
                    self._wanting.append(turn)
                turn.num_wanted += 1  # one may come back later
                return None
            return turn.claim()

    def _settle(self, turn: _Round, deadline: Deadline | None) -> None:
        """Have nobody begin with a call any more, and wait for who is inside; an interrupt has to wait too (rule 3)."""
        until_s = None if deadline is None else time.monotonic() + deadline.remaining_s + _GRACE_S
        while True:
            try:
                with self._lock:
                    turn.stop()
                    if turn in self._wanting:
                        self._wanting.remove(turn)
                    left_s = None if until_s is None else max(0.0, until_s - time.monotonic())
                    if not turn.left.wait_for(lambda: not turn.num_inside, left_s):
                        turn.stuck = ReadStuck()
                return
            except BaseException as error:  # noqa: BLE001  an interrupt: raised by `run`
                turn.error = turn.error or error
