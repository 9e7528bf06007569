"""A row: one sliced write or read under way. Its blocks, its time, the pages it uses, and how far it got.

Counts only; what is done with the pages is `slices.py`'s business. A row belongs to one thread; a lease is shared with
the store's call that was given its pages.
"""

import enum
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from headwater.config.writes import WriteConfig
from headwater.core.events import Save
from headwater.storage.base import Clock, Deadline
from headwater.storage.calls import Items
from headwater.transfer.executor.pages import Account, PagePool


class Why(enum.StrEnum):
    """Why a sliced write or read got as far as it did."""

    WHOLE = "whole"
    INCOMPLETE = "incomplete"  # the store did not take, or have, all of a slice
    SLICE_TIMEOUT = "slice_timeout"
    TOTAL_TIMEOUT = "total_timeout"
    ERROR = "error"  # the store or the device raised
    STORE_DOWN = "store_down"  # it was not asked: it is left alone, or its calls do not return
    CANCELLED = "cancelled"
    INDEX_ONLY = "index_only"  # no data is moved at all


@dataclass(frozen=True, slots=True)
class Reached:
    """How many blocks in a row, counted from the first that was asked for, and why not more."""

    num_blocks: int
    why: Why
    detail: str = ""  # for people
    status: str = field(default="", compare=False)  # a store's word for the first block that did not do, if it gave one


class Ended(Exception):
    """Nothing more of a row: why."""

    def __init__(self, why: Why, detail: str, status: str = "") -> None:
        super().__init__(detail)
        self.why = why
        self.detail = detail
        self.status = status


class Lease:
    """Pages that go back to their pool when the last of their users is done: who works on them, and a store's call.

    So pages of a call that does not return stay out of use until it does (rule 3).
    """

    def __init__(self, pool: PagePool, account: Account, pages: list[int]) -> None:
        """One user, the caller; the pages were taken from the pool for `account`."""
        self.pages = pages
        self._pool = pool
        self._account = account
        self._num_users = 1
        self._lock = threading.Lock()

    def lend(self) -> Callable[[], None]:
        """One user more, which calls what is returned when it is done."""
        with self._lock:
            self._num_users += 1
        return self.end

    def end(self) -> None:
        """One user less. Does not block."""
        with self._lock:
            self._num_users -= 1
            last = not self._num_users
        if last:
            self._pool.give_back(self._account, self.pages)


@dataclass(frozen=True, slots=True)
class Piece:
    """Blocks `start` to `end` of a row, and the pages they go through."""

    start: int
    end: int
    lease: Lease
    items: Items


class Row:
    """Blocks in a row, and the time they have."""

    def __init__(
        self, order: Save, *, config: WriteConfig, timeout_s: float, clock: Clock, stopped: Callable[[], bool]
    ) -> None:
        """The total begins now. `order` says which blocks; its deadline does not count."""
        self.order = order
        self.num_blocks = len(order.keys)
        self.num_done = 0
        self.total = Deadline.after(timeout_s, clock)
        self.stopped = stopped
        self._config = config
        self._clock = clock
        self._slice = -1
        self._until = self.total

    def end_of_slice(self, start: int) -> int:
        """Where the slice of a block ends."""
        size = self._config.slice_blocks
        return min((start // size + 1) * size, self.num_blocks)

    def deadline(self, start: int) -> Deadline:
        """When the slice of a block has to be done. Its time begins when this is first asked, and ends with the total.

        Slices are asked about in order.
        """
        number = start // self._config.slice_blocks
        if number != self._slice:
            until_s = min(self._clock.monotonic() + self._config.slice_timeout_s, self.total.at_s)
            self._slice, self._until = number, Deadline(until_s, self._clock)
        return self._until

    def check(self) -> None:
        """Raise Ended where nothing more shall begin."""
        if self.stopped():
            raise Ended(Why.CANCELLED, "nobody wants the rest")
        if self.total.expired:
            raise self.timeout("no time is left")

    def timeout(self, detail: str) -> Ended:
        """Some time is over: the slice's, or the total."""
        return Ended(Why.TOTAL_TIMEOUT if self.total.expired else Why.SLICE_TIMEOUT, detail)
