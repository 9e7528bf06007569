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
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Protocol, TypeVar

from headwater.core.errors import StoreError
from headwater.core.page import PageName
from headwater.storage.base import Deadline
from headwater.storage.local.catalog import Catalog
from headwater.storage.local.mirror import Slot
from headwater.storage.local.slab import Slab
from headwater.storage.local.table import LeftBehind

T = TypeVar("T")

_CACHED_S: Final = 0.005
_CLOSE_S: Final = 1.0  # that closing waits for who changes something
_LEAVE_S: Final = 0.1  # the same, where a call happens to be the last to leave: its deadline may be over


class Taker(Protocol):
    """A call that takes slots, and what it holds of them now."""

    def held(self) -> Iterable[Slot]:
        """Slots that are reserved for it."""
        ...


class HeldSlots:
    """Slots that a call holds."""

    def __init__(self) -> None:
        self._slots: list[Slot] = []

    def add(self, slots: Iterable[Slot]) -> None:
        """More of them."""
        self._slots.extend(slots)

    def held(self) -> Iterable[Slot]:
        """All of them."""
        return self._slots


class IndexLocked(Exception):
    """The lock was not to be had by the deadline. Internal: becomes a LATE result."""


class Turn:
    """One thread at a time. An interrupt, which may come between any two steps, never leaves it locked."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # to release it is one call, and an error if we have it not: no need to know
        self._is_taken = False

    def alone(self, work: Callable[[], T], patience_s: float) -> T:
        """Do `work` alone. Raises IndexLocked if that was not to be had in time.

        So it does in the handler of a signal that came in the middle of such work of the same thread.
        """
        try:
            if not self._lock.acquire(timeout=patience_s) or self._is_taken:
                raise IndexLocked
            return self._do(work)
        finally:
            try:  # noqa: SIM105  suppress() would be one more step before the release, and an interrupt in it
                self._lock.release()
            except RuntimeError:
                pass

    def _do(self, work: Callable[[], T]) -> T:
        try:
            self._is_taken = True
            return work()
        finally:
            self._is_taken = False


class Attachment:
    """A place inside a directory. Closes when it was retired and the last user has left."""

    def __init__(self, slab: Slab, catalog: Catalog) -> None:
        """Takes the slab. `enrol` before anything is changed."""
        self.slab = slab
        self.catalog = catalog
        self.owner = 0
        self._changing = Turn()
        self._in_doubt = False  # an interrupt may have cost a call slots that it never heard of
        self._takers: dict[int, Taker] = {}
        self._looking = Turn()  # around the mirror
        self._debts: list[Slot] = []
        self._gate = threading.Lock()  # around what follows
        self._lent: dict[Slot, PageName] = {}
        self._lent_names: dict[PageName, int] = {}  # how many reservations are out for a page
        self.users: set[object] = set()  # calls that are inside
        self._retired = False
        self._closed = False
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

    def enter(self, user: object) -> bool:
        """Count a call in. False: it is closed. Who is in `users` takes itself out, and then calls `close_if_over`."""
        with self._gate:
            if self._closed:
                return False
            self.users.add(user)
            return True

    def close_if_over(self) -> None:
        """Close, if it was retired and nobody is inside any more."""
        with self._gate:
            last = self._is_over()
            self._closed = self._closed or last
        if last:
            self._close(_LEAVE_S)

    def _is_over(self) -> bool:
        return self._retired and not self._closed and not self.users and not self._lent

    def lend(self, slots: Sequence[Slot], names: Sequence[PageName]) -> None:
        """Count reservations out."""
        with self._gate:
            coming = self._lent_names
            for name in names:
                coming[name] = coming.get(name, 0) + 1
            self._lent.update(zip(slots, names, strict=True))

    def is_coming(self, name: PageName) -> bool:
        """Whether a page is being written here, in place: what builds on it may be reserved, and published after it."""
        return name in self._lent_names

    def take_back(self, slots: Sequence[Slot]) -> list[bool]:
        """Which of these reservations were still out; they are not any more. The caller is inside."""
        with self._gate:
            names = [self._lent.pop(slot, None) for slot in slots]
            for name in names:
                if name is not None:
                    num = self._lent_names.get(name, 0)
                    if num > 1:
                        self._lent_names[name] = num - 1
                    else:
                        self._lent_names.pop(name, None)
            return [name is not None for name in names]

    def retire(self, *, damaged: bool = False) -> None:
        """Close now, or as soon as nobody is inside. A damaged directory is left without a word to its index."""
        with self._gate:
            if self._retired:
                return
            self._retired = True
            self._damaged = damaged
            last = self._closed = self._is_over()
        if last:
            self._close(_CLOSE_S)

    def _close(self, patience_s: float) -> None:
        with contextlib.closing(self.slab):
            if self._damaged or not self.owner:
                return
            with contextlib.suppress(StoreError, IndexLocked):  # others see that we are gone
                self.slab.require_whole()
                self.transact(self._sign_out, Deadline.after(patience_s))

    def _sign_out(self) -> None:
        catalog, table = self.catalog, self.catalog.table
        catalog.recency.write_touches()
        catalog.leave([self.owner])
        if not table.owners():  # the last one out says that all is in order
            table.set_left(table.left()._replace(clean=True, weak=False))

    # --- the catalog --------------------------------------------------------------------------------------------------

    def transact(self, work: Callable[[], T], deadline: Deadline) -> T:
        """Run `work` as the only one who changes the index. Raises IndexLocked at the deadline.

        Raises StoreDamaged before anything is changed if the path leads to another file by now.
        """
        if deadline.expired:
            raise IndexLocked
        return self._changing.alone(lambda: self._transact(work, deadline), deadline.remaining_s)

    def _transact(self, work: Callable[[], T], deadline: Deadline) -> T:
        end_writing = self.slab.locks.end_writing
        try:
            if not self.slab.locks.begin_writing(deadline):
                raise IndexLocked
            self.slab.require_in_place()
            return self._looking.alone(lambda: self._change(work, deadline), deadline.remaining_s)
        finally:
            end_writing()

    def _change(self, work: Callable[[], T], deadline: Deadline) -> T:
        catalog = self.catalog
        if not catalog.begin(self.owner or 1, deadline):
            raise IndexLocked
        try:
            debts = list(self._debts)
            catalog.give_back(debts, self.owner)
            if self._in_doubt:
                self._find_lost()
            result = work()
            catalog.commit()
        except BaseException:
            self._in_doubt = True
            with contextlib.suppress(StoreError):
                catalog.abort()
            raise
        del self._debts[: len(debts)]
        return result

    def _find_lost(self) -> None:
        """Free what is reserved for us, and no call of ours knows of."""
        with self._gate:
            out = set(self._lent)
        out.update(slot for taker in list(self._takers.values()) for slot in taker.held())
        self.catalog.free_reserved(self.owner, {slot.number for slot in out})
        self._in_doubt = False

    @contextlib.contextmanager
    def taking(self, taker: Taker) -> Iterator[None]:
        """While a call takes slots, and until they are published or given back."""
        takers, key = self._takers, id(taker)
        try:
            takers[key] = taker
            yield
        except BaseException:
            self._in_doubt = True
            raise
        finally:
            takers.pop(key, None)  # one call of C: no interrupt comes before it

    def refresh(self, deadline: Deadline) -> bool:
        """Bring the mirror up to date. False if that was not possible in time. Waits for no other process."""
        if self.catalog.follower.is_current():
            return True
        if deadline.expired:
            return False
        try:
            return self._looking.alone(lambda: self.catalog.follower.catch_up(deadline), deadline.remaining_s)
        except IndexLocked:
            return False

    def refresh_now(self, most: int) -> bool:
        """Bring the mirror up to date if that takes no time: at most so many changes, and nobody at work on it."""
        catalog = self.catalog
        if catalog.follower.is_current():
            return True
        newest = catalog.table.newest()
        if newest is None or not 0 <= newest - catalog.mirror.seen <= most:
            return False
        try:
            return self._looking.alone(lambda: catalog.follower.catch_up(Deadline.after(_CACHED_S)), 0.0)
        except IndexLocked:
            return False

    def flush_touches(self) -> None:
        """Write what was used, in batches, if nobody is at work on the mirror just now. Never waits."""
        if self.catalog.recency.is_due():
            with contextlib.suppress(IndexLocked):
                self._looking.alone(self.catalog.recency.write_touches, 0.0)

    def give_back(self, slots: Sequence[Slot], deadline: Deadline) -> None:
        """Free reserved slots, wiped, now or with the next change."""
        if not slots:
            return
        self.wipe(slots)
        try:
            self.transact(lambda: self.catalog.give_back(slots, self.owner), deadline)
        except IndexLocked:
            self._debts.extend(slots)

    def wipe(self, slots: Sequence[Slot]) -> None:
        """Make those of these slots unreadable that are ours. Needs no lock: nobody else may change that they are."""
        self.slab.wipe_all([slot.offset for slot in self.catalog.ours(slots, self.owner)])
