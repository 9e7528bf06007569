"""The pool of staging pages: bounded, shared by all jobs, and fair enough that no store and no save starves a load.

Counts pages, moves no bytes. A page that was taken is its taker's until it is given back, however long a store's call
keeps it (rule 3): nothing here takes a page away.

Invariants:
- Every page is free or held by one taker.
- Who holds pages does not wait for pages: a slice is taken at once, and is as large as what is there. So no two jobs
  wait for each other.
- Each *account* (a store, and whether somebody waits for the job) has a floor that others cannot take. However many
  pages the calls of a hanging store keep, loads from every other store go on.
- Of those who wait, loads come first, then who came first; who cannot take a page now holds nobody up.
"""

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TypeAlias

from headwater.core.errors import InvalidInput
from headwater.storage.base import Deadline

Account: TypeAlias = tuple[str, bool]  # a store's name, and whether somebody waits for the job


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    account: Account
    turn: tuple[bool, int]


class PagePool:
    """`num_pages` pages, numbered from 0, for the jobs of some stores."""

    def __init__(self, num_pages: int, stores: Collection[str], changed: threading.Condition) -> None:
        """`changed` is notified when pages come back; its lock guards the pool. Raises InvalidInput."""
        if num_pages < 1:
            raise InvalidInput(f"staging needs at least one page, not {num_pages}")
        self.num_pages = num_pages
        self._changed = changed
        self._free = list(range(num_pages))
        share = num_pages // max(1, len(stores))
        # A quarter of a store's share for loads, an eighth for the rest: most of the pool is whoever's comes first.
        self._floors: dict[Account, int] = {}
        for store in stores:
            self._floors[store, True] = max(share // 4, int(share >= 2))
            self._floors[store, False] = max(share // 8, int(share >= 4))
        self._held = dict.fromkeys(self._floors, 0)
        self._waiters: list[_Waiter] = []
        self._turns = count()

    @property
    def num_held(self) -> int:
        """Pages that somebody has now."""
        with self._changed:
            return self.num_pages - len(self._free)

    def is_spent(self, account: Account, num_kept: int) -> bool:
        """Whether there is no page, and nobody to give one back but calls that hang and keep so many. Lock held."""
        return self._available(account) <= 0 and self.num_pages - len(self._free) <= num_kept

    def take(self, account: Account, num_pages: int, *, deadline: Deadline, stopped: Callable[[], bool]) -> list[int]:
        """At least one page and at most `num_pages`; none if the deadline came first, or `stopped` said so.

        Blocks until then. `stopped` is asked with the lock held, whenever `changed` is notified.
        """
        waiter = _Waiter(account, (not account[1], next(self._turns)))
        with self._changed:
            self._waiters.append(waiter)
            try:
                while not stopped() and not deadline.expired:
                    if self._is_next(waiter):
                        return self._hand_out(account, num_pages)
                    self._changed.wait(deadline.remaining_s)
                return []
            finally:
                self._waiters.remove(waiter)
                self._changed.notify_all()  # who stood behind may be next, and found that it was not

    def take_now(self, account: Account, num_pages: int) -> list[int]:
        """What could be taken without waiting, and without stepping before anybody who waits; maybe none."""
        waiter = _Waiter(account, (not account[1], next(self._turns)))
        with self._changed:
            return self._hand_out(account, num_pages) if self._is_next(waiter) else []

    def give_back(self, account: Account, pages: Sequence[int]) -> None:
        """Return pages that were taken. Does not block."""
        with self._changed:
            self._free.extend(pages)
            self._held[account] -= len(pages)
            self._changed.notify_all()

    def _available(self, account: Account) -> int:
        kept = sum(max(0, floor - self._held[other]) for other, floor in self._floors.items() if other != account)
        return len(self._free) - kept

    def _is_next(self, waiter: _Waiter) -> bool:
        if self._available(waiter.account) <= 0:
            return False
        ahead = (other for other in self._waiters if other.turn < waiter.turn)
        return not any(self._available(other.account) > 0 for other in ahead)

    def _hand_out(self, account: Account, num_pages: int) -> list[int]:
        number = min(num_pages, self._available(account))
        taken = [self._free.pop() for _ in range(number)]
        self._held[account] += number
        return taken
