"""One gather or scatter, from its first piece to its end: what has arrived, what was right, who is told.

Its pieces are moved by a queue (`copy_queue.py`), which whoever waits drives. Not here: how it is cut, and what it is
good for (`copy_engine.py`).

Invariants: it ends once. Whoever sees `over` knows that its listener was told. One that was cancelled, or failed, ends
when nothing of it is on the wire.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from headwater.core.errors import ResourceClosed
from headwater.transfer.device.wire import Digests, WirePiece

if TYPE_CHECKING:
    from headwater.transfer.device.copy_queue import CopyQueue

log = logging.getLogger("headwater")

_LOOK_S: Final = 0.02  # between looks whether a transfer is still wanted

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
        self.num_blocks: Final = len(slots)
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
        self._queue: CopyQueue | None = None  # None: there is nothing to copy
        self.over = self._ending = not cuts
        self.num_planes_ready = 0 if cuts else num_planes

    @property
    def ends_by_itself(self) -> bool:
        """Whether it goes on though nobody waits: somebody wants to hear of its end, or waited and left before."""
        return self._on_over is not None or self._left_alone

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
        return self._queue is None or self._queue.drive(self, lambda: self.over, timeout_s, hurry=hurry)

    def wait_planes(self, num_planes: int, timeout_s: float) -> bool:
        """Wait until so many leading planes of every block are there, and right. Blocks.

        False: it took too long, or they never will be: a block was not what it should be, or the transfer ended early.
        """

        def until() -> bool:
            return self.over or self.num_planes_ready >= num_planes

        if self._queue is not None:
            self._queue.drive(self, until, timeout_s, hurry=True)
        return self.num_planes_ready >= num_planes

    def see_through(self, wanted: Callable[[], bool] | None = None, *, hurry: bool = True) -> None:
        """Wait until it is over, however long that takes. Blocks. Raises what the device raised.

        One that is not `wanted` any more is cancelled, and waited for: what was launched must not land later. Who does
        not say wants all of it: ResourceClosed if the engine was closed before.
        """
        while not self.over and self._queue is not None:
            ended = self._queue.drive(self, lambda: self.over, _LOOK_S, hurry=hurry)
            if not ended and wanted is not None and not wanted():
                self.cancel()
        if self.error is not None:
            raise self.error
        if wanted is None and not self.complete:
            raise ResourceClosed("the copy engine was closed before everything was copied")

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


def tell(listener: Callable[[], None]) -> None:
    """Call somebody's code, which must not keep a transfer from ending. What ends a program passes."""
    try:
        listener()
    except Exception:
        log.exception("who wanted to hear of a copy raised")
