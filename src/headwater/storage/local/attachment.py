"""One open directory: slab and catalog together, and who is using them.

Everything that must not be closed under somebody's hands is counted here: calls that are inside, and reservations that
are out (rule 3: a slot that a copy may still write to stays ours, with our sign of life, even past close()).

Changes run here, one at a time on the machine, within the caller's deadline. Three locks, always in this order: one for
the threads of this store that want to change something, the slab's for all processes, and one around the mirror, which
is held only while somebody is at work on it. So a process that is stopped while it holds the slab's lock costs others
their changes, until their deadlines, and never a look.
"""

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from headwater.core.errors import StoreError
from headwater.core.page import PageName
from headwater.storage.base import Deadline
from headwater.storage.local.catalog import Catalog
from headwater.storage.local.mirror import Slot
from headwater.storage.local.slab import Slab
from headwater.storage.local.table import LeftBehind

T = TypeVar("T")


class IndexLocked(Exception):
    """The lock was not to be had by the deadline. Internal: becomes a LATE result."""


class Attachment:
    """A place inside a directory. Closes when it was retired and the last user has left."""

    def __init__(self, slab: Slab, catalog: Catalog) -> None:
        """Takes the slab. `enrol` before anything is changed."""
        self.slab = slab
        self.catalog = catalog
        self.owner = 0
        self._changing = threading.Lock()
        self._looking = threading.Lock()  # around the mirror
        self._debts: list[Slot] = []
        self._gate = threading.Lock()  # around what follows
        self._lent: dict[Slot, PageName] = {}
        self._lent_names: dict[PageName, int] = {}  # how many reservations are out for a page
        self._users = 0
        self._retired = False
        self._damaged = False

    def enrol(self, left: LeftBehind, deadline: Deadline) -> None:
        """Become an owner, and say how the directory is left if this is the end. Raises IndexLocked at the deadline."""

        def work() -> int:
            table = self.catalog.table
            before = table.left()
            unsynced = before.weak and not before.clean and before.boot_id == left.boot_id
            table.set_left(left._replace(weak=left.weak or unsynced))
            self.catalog.retire_dead(0)
            return self.catalog.enrol()

        self.owner = self.transact(work, deadline)

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
        with contextlib.closing(self.slab):
            if self._damaged or not self.owner:
                return
            with contextlib.suppress(StoreError, IndexLocked):
                self.slab.require_whole()
                self.transact(self._sign_out, Deadline.after(1.0))

    def _sign_out(self) -> None:
        catalog, table = self.catalog, self.catalog.table
        catalog.write_touches()
        catalog.leave([self.owner])
        if not table.owners():  # the last one out says that all is in order
            table.set_left(table.left()._replace(clean=True, weak=False))

    # --- the catalog --------------------------------------------------------------------------------------------------

    def transact(self, work: Callable[[], T], deadline: Deadline) -> T:
        """Run `work` as the only one who changes the index. Raises IndexLocked at the deadline.

        Raises StoreDamaged before anything is changed if the path leads to another file by now.
        """
        if deadline.expired or not self._changing.acquire(timeout=deadline.remaining_s):
            raise IndexLocked
        try:
            if not self.slab.locks.begin_writing(deadline):
                raise IndexLocked
            try:
                self.slab.require_in_place()
                with self._looking:
                    return self._change(work)
            finally:
                self.slab.locks.end_writing()
        finally:
            self._changing.release()

    def _change(self, work: Callable[[], T]) -> T:
        catalog = self.catalog
        try:
            catalog.begin(self.owner or 1)
            debts = list(self._debts)
            catalog.give_back(debts, self.owner)
            result = work()
            catalog.commit()
        except BaseException:
            catalog.abort()
            raise
        del self._debts[: len(debts)]
        return result

    def refresh(self, deadline: Deadline) -> bool:
        """Bring the mirror up to date. False if that was not possible. Waits for no other process."""
        catalog = self.catalog
        if catalog.table.newest() == catalog.mirror.seen:
            return True
        if deadline.expired or not self._looking.acquire(timeout=deadline.remaining_s):
            return False
        try:
            catalog.catch_up()
        finally:
            self._looking.release()
        return True

    def refresh_now(self, most: int) -> bool:
        """Bring the mirror up to date if that takes no time: at most so many changes, and nobody at work on it."""
        catalog = self.catalog
        newest = catalog.table.newest()
        if newest == catalog.mirror.seen:
            return True
        if newest is None or not 0 <= newest - catalog.mirror.seen <= most or not self._looking.acquire(blocking=False):
            return False
        try:
            catalog.catch_up()
        finally:
            self._looking.release()
        return True

    def look(self, question: Callable[[], T], deadline: Deadline) -> T:
        """Ask something of a mirror that stands still and is up to date. Raises IndexLocked at the deadline."""
        if deadline.expired or not self._looking.acquire(timeout=deadline.remaining_s):
            raise IndexLocked
        try:
            self.catalog.catch_up()
            return question()
        finally:
            self._looking.release()

    def write_touches(self) -> None:
        """Write what was used, if nobody is at work on the mirror just now."""
        if self._looking.acquire(blocking=False):
            try:
                self.catalog.write_touches()
            finally:
                self._looking.release()

    def give_back(self, slots: Sequence[Slot], deadline: Deadline) -> None:
        """Free reserved slots, wiped, now or with the next change."""
        if not slots:
            return
        for slot in slots:
            self.wipe(slot)
        try:
            self.transact(lambda: self.catalog.give_back(slots, self.owner), deadline)
        except IndexLocked:
            self._debts.extend(slots)

    def wipe(self, slot: Slot) -> None:
        """Make a slot unreadable if it is ours. Needs no lock: nobody else may change that it is."""
        if self.catalog.reserved(slot, self.owner) is not None:
            self.slab.wipe(slot.offset)
