"""One open directory: locks, slab and catalog together, and who is using them.

Everything that must not be closed under somebody's hands is counted here: calls that are inside, and reservations that
are out (rule 3: a slot that a copy may still write to stays ours, with our sign of life, even past close()).

Transactions run here: one thread at a time, within the caller's deadline; what could not be given back in time is given
back with the next one.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from headwater.core.errors import StoreError
from headwater.core.page import PageName
from headwater.storage import directory
from headwater.storage.base import Deadline
from headwater.storage.catalog import Catalog
from headwater.storage.database import CatalogBusy, CatalogFull
from headwater.storage.mirror import Slot
from headwater.storage.slab import Slab

T = TypeVar("T")


class Attachment:
    """A place inside a directory. Closes when it was retired and the last user has left."""

    def __init__(
        self,
        path: Path,
        presence: directory.PresenceLock,
        owner_lock: directory.OwnerLock,
        *,
        slab: Slab,
        catalog: Catalog,
        owner: int,
    ) -> None:
        self.path = path
        self.slab = slab
        self.catalog = catalog
        self.owner = owner
        self._presence = presence
        self._owner_lock = owner_lock
        self._lock = threading.Lock()  # around the catalog
        self._debts: list[Slot] = []
        self._gate = threading.Lock()  # around what follows
        self._lent: dict[Slot, PageName] = {}
        self._lent_names: dict[PageName, int] = {}  # how many reservations are out for a page
        self._users = 0
        self._retired = False
        self._damaged = False

    # --- who is inside ------------------------------------------------------------------------------------------------

    def enter(self) -> None:
        """Count a call in."""
        with self._gate:
            self._users += 1

    def leave(self, count: int = 1) -> None:
        """Count users out; the last one of a retired attachment closes it."""
        with self._gate:
            self._users -= count
            last = self._retired and self._users == 0
        if last:
            self._close()

    def lend(self, slot: Slot, name: PageName) -> None:
        """Count a reservation out."""
        with self._gate:
            self._lent[slot] = name
            self._lent_names[name] = self._lent_names.get(name, 0) + 1
            self._users += 1

    def is_coming(self, name: PageName) -> bool:
        """Whether a page is being written here, in place: what builds on it may be reserved, and published after it."""
        return name in self._lent_names

    def take_back(self, slot: Slot) -> bool:
        """Whether the reservation was still out; it is not any more. The caller owes a `leave`."""
        with self._gate:
            name = self._lent.pop(slot, None)
            if name is None:
                return False
            self._lent_names[name] -= 1
            if not self._lent_names[name]:
                del self._lent_names[name]
            return True

    def retire(self, *, damaged: bool = False) -> None:
        """Close now, or as soon as nobody is inside. A damaged directory is left without a word to its index."""
        with self._gate:
            if self._retired:
                return
            self._retired = True
            self._damaged = damaged
            last = self._users == 0
        if last:
            self._close()

    def _close(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self._presence.close)
            stack.callback(self._owner_lock.close)
            stack.callback(self.slab.close)
            stack.callback(self.catalog.close)
            if self._damaged:
                return
            with contextlib.suppress(StoreError, CatalogBusy, CatalogFull):
                with self.catalog.transaction(Deadline.after(1.0)):
                    self.catalog.write_touches()
                    self.catalog.leave(self.owner, self.wipe)
                    if not self.catalog.num_owners():  # the last one out says that all is in order
                        self.catalog.database.set_meta(clean=1, weak=0)
                self._owner_lock.forget()

    # --- the catalog --------------------------------------------------------------------------------------------------

    def transact(self, work: Callable[[], T], deadline: Deadline) -> T:
        """Run `work` under the index's write lock. Raises CatalogBusy at the deadline, CatalogFull without room."""
        if deadline.expired or not self._lock.acquire(timeout=deadline.remaining_s):
            raise CatalogBusy
        try:
            debts = list(self._debts)
            before = self.catalog.mirror.seq
            with self.catalog.transaction(deadline):
                self.catalog.give_back(debts, self.owner)
                result = work()
            del self._debts[: len(debts)]
            if self.catalog.mirror.seq != before and self.slab.mark() < self.catalog.mirror.seq:
                self.slab.set_mark(self.catalog.mirror.seq)
            return result
        finally:
            self._lock.release()

    def ask(self, question: Callable[[], T], deadline: Deadline) -> T:
        """Run a question on one snapshot of the index, with a mirror of the same moment. Raises as `transact` does."""
        if deadline.expired or not self._lock.acquire(timeout=deadline.remaining_s):
            raise CatalogBusy
        try:
            with self.catalog.snapshot(deadline):
                return question()
        finally:
            self._lock.release()

    def refresh(self, deadline: Deadline, *, force: bool = False) -> bool:
        """Bring the mirror up to date. False if that was not possible.

        No SQL where the mark says that nothing changed; `force` asks all the same, because who changed something may
        have died before it could raise the mark.
        """
        if not force and self.slab.mark() == self.catalog.mirror.seq:
            return True
        try:
            self.ask(lambda: None, deadline)
        except (CatalogBusy, CatalogFull):
            return False
        return True

    def give_back(self, slots: Sequence[Slot], deadline: Deadline) -> None:
        """Free reserved slots, wiped, now or with the next transaction."""
        for slot in slots:
            self.wipe(slot)
        if not slots:
            return
        try:
            self.transact(lambda: self.catalog.give_back(slots, self.owner), deadline)
        except (CatalogBusy, CatalogFull):
            self._debts.extend(slots)

    def retire_dead(self) -> int:
        """Inside a transaction: free, wiped, what dead owners had reserved. Returns how many slots came back."""
        return self.catalog.retire_dead(self.owner, lambda token: directory.is_alive(self.path, token), self.wipe)

    def wipe(self, slot: Slot) -> None:
        """Make a slot that is ours unreadable: a slot that is free holds no page that a rebuild could bring back."""
        self.slab.wipe(slot.offset)

    def log_too_long(self, limit_bytes: int, deadline: Deadline) -> bool:
        """Whether SQLite's log is over a limit because a stopped process keeps it from being folded in."""
        try:
            size = os.stat(self.path / (directory.INDEX + "-wal")).st_size
        except FileNotFoundError:
            return False
        if size <= limit_bytes:
            return False
        if not self._lock.acquire(timeout=deadline.remaining_s):
            return True
        try:
            return not self.catalog.database.fold_log()
        except (CatalogBusy, CatalogFull):
            return True
        finally:
            self._lock.release()
