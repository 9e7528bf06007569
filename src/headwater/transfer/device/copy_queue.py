"""The queues that move transfers: one direction of a device each, in pieces, a bounded number at a time.

A queue takes transfers in the order they came and puts their pieces on the wire as places are free. Whoever waits for a
transfer drives the queue meanwhile; a thread drives what nobody waits for. Not here: what became of a transfer
(`transfer.py`); how bytes move (`wire.py`).

What interrupts who drives (Ctrl-C, SystemExit) is theirs and passes. Its books are kept: a piece on the wire stays
there until it is seen to have ended, one that was not launched ends its transfer.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from headwater.core.errors import CopyDamaged, ResourceClosed
from headwater.transfer.device.transfer import Transfer, tell
from headwater.transfer.device.wire import Wire, WirePiece

log = logging.getLogger("headwater")

_IDLE_S: Final = 0.001  # between looks, while another takes a piece off the wire
_GRACE_S: Final = 0.0005  # for who submitted to wait, before the thread drives
CLOSE_S: Final = 5.0  # for the pieces that have begun: then one of them does not return


@dataclass(slots=True)
class _UnderWay:
    """A piece on the wire."""

    place: int
    transfer: Transfer
    piece: WirePiece
    at: tuple[int, int]
    error: Exception | None = None


class CopyQueue:
    """One direction: a wire, and the transfers that want it, in the order they came.

    Whoever waits for a transfer drives the queue: puts pieces on the wire, and takes them off in the same order, also
    those of others. While nobody waits, a thread does.
    """

    def __init__(self, wire: Wire, name: str) -> None:
        self.wire = wire
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._launching = threading.Lock()  # one at a time puts pieces on the wire,
        self._finishing = threading.Lock()  # and one takes them off
        self._free = list(range(wire.num_places))
        self._under_way: deque[_UnderWay] = deque()
        self._queue: deque[Transfer] = deque()  # transfers that were not launched to the end
        self._num_drivers = 0  # who waits, and drives meanwhile
        self._is_fresh = False  # who submitted will probably wait, and drive: the thread gives it a moment
        self._closed = False
        self._name = f"headwater copies {name}"
        self._thread: threading.Thread | None = None  # from the first time it is needed
        self._left_behind: threading.Thread | None = None  # by a `close` that did not wait for its copy any longer
        self._is_short = False  # it could not be started once, and that was said

    @property
    def is_busy(self) -> bool:
        """Whether anything is queued or on the wire."""
        with self._lock:
            return bool(self._queue or self._under_way)

    def submit(self, transfer: Transfer, *, alone: bool = True) -> None:
        """Queue a transfer, and launch what there is room for. Does not wait for the device. Raises ResourceClosed.

        `alone`: the device copies nothing else, so who submitted will probably wait for just this, and drive it.
        """
        if transfer.over:
            if transfer._on_over is not None:
                tell(transfer._on_over)
            return
        transfer._queue = self
        with self._lock:
            if self._closed:
                raise ResourceClosed("the copy engine is closed")
            self._queue.append(transfer)
            self._is_fresh = alone and not transfer.ends_by_itself
        try:
            if not transfer.ends_by_itself:
                places = self.wire.num_places
                for _ in range(places if len(transfer._pieces) <= places else 1):
                    if not self._launch_first(wait=False):
                        break
        except BaseException:  # then nobody will wait for it
            transfer.cancel()
            transfer._left_alone = True
            raise
        finally:
            with self._lock:
                self._wake_thread()

    def drive(self, transfer: Transfer, until: Callable[[], bool], timeout_s: float | None, *, hurry: bool) -> bool:
        """Push copies on until something is so of a transfer. Blocks. False if that took too long.

        Pieces are launched while there are places, and finished in the same order.
        """
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        transfer._left_alone = True  # unless it is over when this returns
        with self._lock:
            self._num_drivers += 1
        try:
            while not until() and (end_s is None or time.monotonic() < end_s):
                if not (self._launch_first() or self._finish_oldest(until, hurry=hurry)):
                    break
        finally:
            with self._lock:
                self._num_drivers -= 1
                self._wake_thread()
        with transfer._changed:  # the last piece may be in another's hands
            return transfer._changed.wait_for(until, None if end_s is None else max(0.0, end_s - time.monotonic()))

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Cancel what is queued, wait for what has begun, end the thread. Idempotent. Blocks, for a few pieces.

        False: a piece does not return, and may still be copied. Then the wire stays as it is.
        """
        until_s = time.monotonic() + timeout_s
        with self._lock:
            self._closed = True
            queued = list(self._queue)
        for transfer in queued:
            transfer.cancel()  # tells somebody: without the lock
        with self._lock:
            self._work.notify()
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
            if thread.is_alive():
                return False
        if not self._is_drained(until_s):
            return False
        with self._launching, self._finishing:
            self.wire.close()
        return True

    def _is_drained(self, until_s: float) -> bool:
        """Take what has begun off the wire, in a thread that can be left behind. Blocks. False: it did not end."""
        if self._left_behind is not None:
            self._left_behind.join(max(0.0, until_s - time.monotonic()))
            if self._left_behind.is_alive():
                return False
        if not self.is_busy:
            return True
        draining = threading.Thread(target=self._drain, name=self._name, daemon=True)
        try:
            draining.start()
        except RuntimeError:  # the machine has no more
            self._drain()
            return True
        self._left_behind = draining
        draining.join(max(0.0, until_s - time.monotonic()))
        return not draining.is_alive()

    def _drain(self) -> None:
        while self._launch_first() or self._finish_oldest(_never, hurry=True):
            pass

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _wake_thread(self) -> None:
        """Have the thread drive, if nobody else does and there is need; or end, after close. The lock is held.

        Raises nothing: a transfer is queued by now, and must end before its slots are anybody else's.
        """
        if self._num_drivers or not (self._closed or self._is_needed()):
            return
        if self._thread is None and not self._closed:
            thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the machine has no more: who waits drives; it is tried again at next need
                if not self._is_short:
                    log.warning("%s: there is no thread for them; those that somebody waits for go on", self._name)
                self._is_short = True
            else:
                self._thread = thread
        self._work.notify()

    def _is_needed(self) -> bool:
        """Whether something is queued, or must end by itself. The lock is held."""
        return bool(self._queue) or any(one.transfer.ends_by_itself for one in self._under_way)

    def _serve(self) -> None:
        while True:
            with self._lock:
                while self._num_drivers or not self._is_needed():
                    if self._closed and not self._is_needed():
                        return
                    self._work.wait()
                if self._is_fresh:
                    self._is_fresh = False
                    self._work.wait(_GRACE_S)
                    continue
            try:
                if not self._launch_first():
                    self._finish_oldest(_never, hurry=False)
            except BaseException:  # somebody's listener: a thread that dies would leave all copies where they are
                log.exception("a copy was interrupted")

    # --- driving ------------------------------------------------------------------------------------------------------

    def _launch_first(self, *, wait: bool = True) -> bool:
        """Launch a piece of the first transfer, or strike it off. False: neither is possible, or another is at it.

        With `wait` it waits for that other one a moment; True, if that did not do: look again whether it is needed.
        """
        if not self._launching.acquire(timeout=_IDLE_S if wait else 0):
            return wait
        try:
            with self._lock:
                transfer = self._queue[0] if self._queue and self._free else None
            if transfer is None:
                return False
            found = transfer._next()
            if found is None:
                with self._lock:
                    self._queue.popleft()
                return True
            with self._lock:
                one = _UnderWay(self._free.pop(), transfer, *found)
            one.error = CopyDamaged("who launched it was interrupted")
            try:
                self.wire.launch(one.place, one.piece)
                one.error = None
            except Exception as error:
                log.exception("a copy could not be begun")
                one.error = error
            finally:
                with self._lock:
                    self._under_way.append(one)
            return True
        finally:
            self._launching.release()

    def _finish_oldest(self, until: Callable[[], bool], *, hurry: bool) -> bool:
        """Wait for the oldest piece and hand it to its transfer. False: there was none."""
        if not self._finishing.acquire(timeout=_IDLE_S):
            return True  # another is at it: look again whether that is needed at all
        try:
            if until():
                return True
            with self._lock:
                if not self._under_way:
                    return False
                one = self._under_way[0]
            digests = None
            try:
                digests = self.wire.finish(one.place, hurry=hurry)
            except Exception as error:
                log.exception("a copy failed on the device")
                one.error = one.error or error
            with self._lock:
                self._under_way.popleft()
                self._free.append(one.place)
            one.transfer._collect(one.piece, one.at, digests, one.error)
            return True
        finally:
            self._finishing.release()


def _never() -> bool:
    return False
