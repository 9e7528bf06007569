"""Transfers, and the queues that move them: one direction of a device each, in pieces, a bounded number at a time.

A queue takes transfers in the order they came and puts their pieces on the wire as places are free. Whoever waits for a
transfer drives the queue meanwhile; a thread drives what nobody waits for. Not here: how a transfer is cut, and what it
is good for (`copy_engine.py`); how bytes move (`wire.py`).

What interrupts who drives (Ctrl-C, SystemExit) is theirs and passes. Its books are kept: a piece on the wire stays
there until it is seen to have ended, one that was not launched ends its transfer.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from headwater.core.errors import CopyDamaged, ResourceClosed
from headwater.transfer.device.wire import Digests, Wire, WirePiece

log = logging.getLogger("headwater")

_IDLE_S: Final = 0.001  # between looks, while another takes a piece off the wire
_GRACE_S: Final = 0.0005  # for who submitted to wait, before the thread drives

Cut: TypeAlias = tuple[int, int, range]  # blocks [start, end) of a transfer, and which of their planes


class Transfer:
    """One gather or scatter. Somebody must `wait` for it, unless it was told to call somebody at its end."""

    def __init__(
        self,
        slots: npt.NDArray[np.int64],
        frames: Sequence[memoryview],
        cuts: list[Cut],
        left: dict[range, int],
        *,
        addresses: list[int],
        num_planes: int,
        expected: Digests | None,
        on_planes: Callable[[int], None] | None,
        on_over: Callable[[], None] | None,
    ) -> None:
        self.digests: Digests | None = None  # of what was gathered, [blocks, planes]
        self.error: Exception | None = None
        self.cancelled = False
        self._slots = slots
        self._frames = frames  # held: memory that a device copies from or to must not go away
        self._addresses = addresses
        self._pieces = deque(cuts)  # that were not launched
        self._left = left  # pieces of each group that have not arrived
        self._num_unfinished = len(cuts)
        self._expected = expected
        self._good = np.ones(len(slots), np.bool_)
        self._on_planes = on_planes
        self._on_over = on_over
        self._num_planes = num_planes
        self._left_alone = False
        self._changed = threading.Condition()
        self._queue: CopyQueue | None = None
        self.over = self._ending = not cuts
        self.num_planes_ready = 0 if cuts else num_planes

    @property
    def ends_by_itself(self) -> bool:
        """Whether it goes on though nobody waits: somebody wants to hear of its end, or waited and left before."""
        return self._on_over is not None or self._left_alone

    @property
    def num_blocks(self) -> int:
        """How many blocks it moves."""
        return len(self._slots)

    @property
    def num_good(self) -> int:
        """Leading blocks that arrived and were what was expected; none, before it is over, or if it failed."""
        if not self.over or self.error is not None or self._pieces:
            return 0
        bad = np.flatnonzero(~self._good)
        return int(bad[0]) if len(bad) else len(self._good)

    @property
    def complete(self) -> bool:
        """Whether everything was copied; what was copied may still be wrong."""
        return self.over and self.error is None and not self._pieces

    def wait(self, timeout_s: float | None = None, *, hurry: bool = True) -> bool:
        """Wait until it is over. Blocks. False if that took too long.

        In a hurry it takes a core meanwhile: to be woken costs as much as a megabyte.
        """
        return self._wait(lambda: self.over, timeout_s, hurry=hurry)

    def wait_planes(self, num_planes: int, timeout_s: float) -> bool:
        """Wait until so many leading planes of every block are there, and right. Blocks.

        False: it took too long, or they never will be: a block was not what it should be, or the transfer ended early.
        """
        self._wait(lambda: self.over or self.num_planes_ready >= num_planes, timeout_s, hurry=True)
        return self.num_planes_ready >= num_planes

    def _wait(self, until: Callable[[], bool], timeout_s: float | None, *, hurry: bool) -> bool:
        begin_s = time.monotonic()
        if self._queue is not None:
            self._left_alone = True  # unless it is over when this returns
            self._queue.drive(until, timeout_s, hurry=hurry)
        left_s = None if timeout_s is None else max(0.0, begin_s + timeout_s - time.monotonic())
        with self._changed:  # the last piece may be in another's hands
            return self._changed.wait_for(until, left_s)

    def cancel(self) -> None:
        """Copy no more than what has begun. Does not block; `wait` says when it is over.

        One of which nothing was launched is over at once, whatever the wire does with those before it.
        """
        with self._changed:
            self.cancelled = True
        self._end_if_done()

    def _collect(self, piece: WirePiece, at: tuple[int, int], digests: Digests | None, error: Exception | None) -> None:
        """A piece is finished."""
        start, end = at
        ready = 0
        with self._changed:
            self._num_unfinished -= 1
            self._left[piece.planes] -= 1
            if error is not None:
                self.error = self.error or error
            elif self._expected is not None:
                wanted = self._expected[start:end, piece.planes.start : piece.planes.stop]
                self._good[start:end] &= digests is not None and (digests == wanted).all(axis=1)
            elif digests is not None:
                if self.digests is None:
                    self.digests = np.zeros((len(self._slots), self._num_planes), np.uint64)
                self.digests[start:end, piece.planes.start : piece.planes.stop] = digests
            if self.error is None and self._good.all() and not self._left[piece.planes]:
                done = [
                    planes for planes, left in self._left.items() if not left and planes.start >= self.num_planes_ready
                ]
                for planes in sorted(done, key=lambda planes: planes.start):
                    if planes.start == self.num_planes_ready:
                        ready = self.num_planes_ready = planes.stop
        try:
            if ready and self._on_planes is not None:
                tell(partial(self._on_planes, ready))
        finally:
            self._end_if_done()

    def _end_if_done(self) -> None:
        with self._changed:
            stopped = self.cancelled or self.error is not None
            ends = not self._num_unfinished or (stopped and self._num_unfinished == len(self._pieces))
            ends = ends and not self._ending
            self._ending = self._ending or ends
            self._changed.notify_all()
        if not ends:
            return
        try:
            if self._on_over is not None:
                tell(self._on_over)
        finally:
            with self._changed:
                self.over = True  # who sees this knows that it was told
                self._changed.notify_all()

    def _next(self) -> tuple[WirePiece, tuple[int, int]] | None:
        """The next piece to launch; None: there is none, or none is wanted any more."""
        with self._changed:
            if self._pieces and not self.cancelled and self.error is None:
                start, end, planes = self._pieces.popleft()
                addresses = self._addresses[start:end]
                return WirePiece(self._slots[start:end], self._frames[start:end], planes, addresses), (start, end)
        self._end_if_done()
        return None


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
            return
        transfer._queue = self
        with self._lock:
            if self._closed:
                raise ResourceClosed("the copy engine is closed")
            self._queue.append(transfer)
            self._is_fresh = alone and not transfer.ends_by_itself
        try:
            if not transfer.ends_by_itself and self._launching.acquire(blocking=False):
                places = self.wire.num_places
                try:
                    for _ in range(places if len(transfer._pieces) <= places else 1):
                        if not self._launch_first():
                            break
                finally:
                    self._launching.release()
        except BaseException:  # then nobody will wait for it
            transfer.cancel()
            transfer._left_alone = True
            raise
        finally:
            with self._lock:
                self._wake_thread()

    def drive(self, until: Callable[[], bool], timeout_s: float | None, *, hurry: bool) -> None:
        """Push copies on until something is so, the time is over, or there is nothing to push. Blocks."""
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._lock:
            self._num_drivers += 1
        try:
            while not until() and (end_s is None or time.monotonic() < end_s) and self._advance(until, hurry=hurry):
                pass
        finally:
            with self._lock:
                self._num_drivers -= 1
                self._wake_thread()

    def close(self) -> None:
        """Cancel what is queued, wait for what has begun, end the thread. Idempotent. Blocks, for a few pieces."""
        with self._lock:
            self._closed = True
            queued = list(self._queue)
        for transfer in queued:
            transfer.cancel()  # tells somebody: without the lock
        with self._lock:
            self._work.notify()
            thread = self._thread
        if thread is not None:
            thread.join()
        while self._advance(_never, hurry=True):
            pass
        with self._launching, self._finishing:
            self.wire.close()

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _wake_thread(self) -> None:
        """Have the thread drive, if nobody else does and there is need; or end, after close. The lock is held."""
        if self._num_drivers or not (self._closed or self._is_needed()):
            return
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
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
                self._advance(_never, hurry=False)
            except BaseException:  # somebody's listener: a thread that dies would leave all copies where they are
                log.exception("a copy was interrupted")

    # --- driving ------------------------------------------------------------------------------------------------------

    def _advance(self, until: Callable[[], bool], *, hurry: bool) -> bool:
        """Launch a piece, or else finish one, unless nobody needs it any more. Blocks, for a piece. False: none."""
        with self._launching:
            if self._launch_first():
                return True
        return self._finish_oldest(until, hurry=hurry)

    def _launch_first(self) -> bool:
        """Launch a piece of the first transfer, or strike it off. False: neither is possible. `_launching` is held."""
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


def tell(listener: Callable[[], None]) -> None:
    """Call somebody's code, which must not keep a transfer from ending. What ends a program passes."""
    try:
        listener()
    except Exception:
        log.exception("who wanted to hear of a copy raised")


def _never() -> bool:
    return False
