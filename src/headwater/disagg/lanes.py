"""Lanes: the staging pages of a handoff end, in equal shares, so that one request's trouble is not another's.

A request that is being moved has a lane, which is nobody else's meanwhile. Pages that a store's call does not give back
(rule 3) are missing in that lane, and in no other; a lane that has none left is not given out until they are back. Who
finds no lane waits, by a deadline.

Counts and lends; what is done on a lane is `mover.py`'s and `tails.py`'s.
"""

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from headwater.core.errors import InvalidConfig
from headwater.core.results import Reason
from headwater.storage.base import Deadline
from headwater.transfer.executor.pages import PagePool
from headwater.transfer.executor.staging import Staging

if TYPE_CHECKING:
    from headwater.transfer.device.wire import Digests

_LOOK_S = 0.05  # between looks whether somebody who waits is still wanted


class PageRange:
    """Some pages of a staging, as a staging of their own."""

    def __init__(self, staging: Staging, pages: range) -> None:
        self._staging = staging
        self._pages = pages

    @property
    def num_pages(self) -> int:
        """How many pages are in the range."""
        return len(self._pages)

    def in_place(self) -> None:
        """None: what is moved here goes through pages."""
        return

    def frame(self, page: int) -> memoryview:
        """A page's memory."""
        return self._staging.frame(self._pages[page])

    def gather(self, slots: Sequence[int], pages: Sequence[int]) -> "Digests | None":
        """Copy blocks into payloads. Blocks; may raise."""
        return self._staging.gather(slots, [self._pages[page] for page in pages])

    def scatter(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        """Copy payloads into blocks. Blocks; may raise."""
        self._staging.scatter([self._pages[page] for page in pages], slots)


class Lane:
    """Pages for one request at a time."""

    def __init__(self, staging: PageRange, pool: PagePool) -> None:
        self.staging = staging
        self.pool = pool


class Lanes:
    """All lanes of one staging. Several threads may ask at once."""

    def __init__(self, staging: Staging, *, num_lanes: int, stores: Collection[str]) -> None:
        """The pages of `staging` must be its alone; what is left over when they are shared out is not used."""
        share = staging.num_pages // num_lanes if num_lanes >= 1 else 0
        if share < 1:
            raise InvalidConfig(
                f"{num_lanes} handoffs at once need as many staging pages at least, and there are {staging.num_pages}: "
                "give it more pages, or fewer lanes"
            )
        self._changed = threading.Condition()  # the pools' too: a page that comes back may make a lane usable
        self.lanes = tuple(
            Lane(PageRange(staging, range(at * share, (at + 1) * share)), PagePool(share, stores, self._changed))
            for at in range(num_lanes)
        )
        self._idle = list(self.lanes)
        self._waiters: list[object] = []  # who came first has the next lane

    @property
    def num_held(self) -> int:
        """Pages that somebody has now, a request or a call that does not return."""
        return sum(lane.pool.num_held for lane in self.lanes)

    @contextmanager
    def use(self, deadline: Deadline, stopped: Callable[[], bool]) -> Iterator[Lane | Reason]:
        """A lane, or why there is none. Blocks until the deadline at most."""
        lane = self._take(deadline, stopped)
        try:
            yield lane
        finally:
            if isinstance(lane, Lane):
                with self._changed:
                    self._idle.append(lane)
                    self._changed.notify_all()

    def _take(self, deadline: Deadline, stopped: Callable[[], bool]) -> Lane | Reason:
        turn = object()
        with self._changed:
            self._waiters.append(turn)
            try:
                while True:
                    if stopped():
                        return Reason.CANCELLED
                    if deadline.expired:
                        return Reason.LATE
                    usable = [lane for lane in self._idle if lane.pool.num_held < lane.pool.num_pages]
                    if usable and self._waiters[0] is turn:
                        best = min(usable, key=lambda lane: lane.pool.num_held)
                        self._idle.remove(best)
                        return best
                    if not usable and len(self._idle) == len(self.lanes):  # their pages are in calls that hang
                        return Reason.DOWN
                    self._changed.wait(min(_LOOK_S, deadline.remaining_s))
            finally:
                self._waiters.remove(turn)
                self._changed.notify_all()  # who stood behind may be next
