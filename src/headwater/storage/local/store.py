"""LocalStore: the embedded default, on tmpfs (the host tier of a node) or on disk, shared by several processes.

One file: a slab of slots (`slab.py`), an index of names in it (`table.py`, `catalog.py`), locks on it (`locks.py`), and
an allocator that makes room within its fixed size (`allocator.py`).

How pages are written is in `writing.py`, how they are read, by several threads, in `reading.py`. Who is stopped while
it changes the index costs others their changes, until their deadlines.

Damage found under way (a cut slab, one that was removed or replaced) turns the store off: calls answer FAILED or MISS
at once, the reason stands in `down`, and `revive` comes in again, which repairs when no other process is inside.
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar, Final, Self, TypeVar

from headwater.config.stores import Durability, LocalStoreConfig
from headwater.core.errors import ResourceClosed, StoreBusy, StoreError, StoreForked
from headwater.core.page import PageName
from headwater.core.results import Status
from headwater.metrics import Metrics
from headwater.storage.base import SYSTEM_CLOCK, Clock, Deadline, PagePath, Store, StoreFill
from headwater.storage.local import descriptors, families
from headwater.storage.local.allocator import Allocator
from headwater.storage.local.attach import attach
from headwater.storage.local.attachment import Attachment, IndexLocked
from headwater.storage.local.families import FamilyUse
from headwater.storage.local.mend import problems
from headwater.storage.local.reading import PageReading, Pieces
from headwater.storage.local.removal import Removal
from headwater.storage.local.slab import Progress
from headwater.storage.local.slab_file import Remains
from headwater.storage.local.writing import PageWriting
from headwater.storage.readers import Readers, ReadStuck, default_readers

_CLOSE_S: Final = 1.0  # that closing waits for who reads beside a call
_CACHED_CHANGES: Final = 256  # of others, that are read at once: some hundred microseconds

T = TypeVar("T")


class LocalStore(Store):
    """A directory of pages. Blocks only for its own copies, and for other processes until the deadline."""

    cheap_calls: ClassVar[bool] = True

    def __init__(
        self,
        config: LocalStoreConfig,
        *,
        metrics: Metrics | None = None,
        clock: Clock = SYSTEM_CLOCK,
        progress: Progress | None = None,
    ) -> None:
        """Open or create the directory. Raises a StoreError that says what to do."""
        self.config = config
        self.metrics = metrics if metrics is not None else Metrics()
        self._clock = clock
        self._state = threading.Lock()
        self._reviving = threading.Lock()
        self._closed = False
        self._process = descriptors.process()
        self._is_synced = config.durability is Durability.POWER  # pages before their records, records before the answer
        self._allocator = Allocator(self.metrics, clock)
        self._readers = Readers(config.readers if config.readers is not None else default_readers())
        self.down: StoreError | None = None
        self._remains: Remains | None = None  # of the slab that turned out to be damaged
        self._attachment: Attachment | None = self._attach(progress)

    def _attach(self, progress: Progress | None = None) -> Attachment:
        return attach(
            self.config,
            metrics=self.metrics,
            clock=self._clock,
            deadline=Deadline.after(self.config.open_timeout_s),
            progress=progress,
            known=self._remains,
        )

    # --- the store interface ------------------------------------------------------------------------------------------

    def cached_names(self) -> Self:
        """Itself: the index is in memory."""
        return self

    def piecewise(self) -> Self | None:
        """Itself: several threads read from a disk. Where pages are mapped they are copied in place (`mapped.py`)."""
        return self

    def damageable(self) -> Self:
        """Itself."""
        return self

    def listing(self) -> Self:
        """Itself."""
        return self

    def put(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[Status]:
        """Store sealed frames; what cannot be had in time or room is said per page."""
        results = [Status.FAILED] * len(pages)
        writing = PageWriting(self._allocator, pages, results, deadline, synced=self._is_synced)
        self._run(writing.run, None)
        return results

    def get_into(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[Status]:
        """Copy frames out, as they are: the caller verifies. Raises ReadStuck where a read hangs (`readers.py`)."""
        return self._read(pages, deadline, use=True)

    def peek_into(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[Status]:
        """Copy frames out. Who leaves next stays as it was."""
        return self._read(pages, deadline, use=False)

    def read_pieces(
        self,
        pages: Sequence[tuple[PageName, memoryview]],
        *,
        ends: Sequence[int],
        arrived: Callable[[int, int], None],
        use: bool,
        deadline: Deadline,
    ) -> list[Status]:
        """The same, and say of each piece that it is there."""
        return self._read(pages, deadline, use=use, pieces=Pieces(ends, arrived))

    def _read(
        self,
        pages: Sequence[tuple[PageName, memoryview]],
        deadline: Deadline,
        *,
        use: bool,
        pieces: Pieces | None = None,
    ) -> list[Status]:
        results = [Status.FAILED] * len(pages)
        self._run(lambda at: PageReading(at, pages, results, deadline, pieces).run(self._readers, use=use), None)
        return results

    def contains(self, names: Sequence[PageName], *, deadline: Deadline) -> list[bool]:
        """Which pages seem to be there: one look at what is new in the index, then memory."""

        def work(at: Attachment) -> list[bool]:
            at.refresh(deadline)
            return at.catalog.mirror.has_all(names)

        nothing = [False] * len(names)
        return nothing if deadline.expired else self._run(work, nothing)

    def contains_cached(self, names: Sequence[PageName]) -> list[bool] | None:
        """What `contains` would say, where others changed little since we looked; otherwise None. Never waits."""

        def work(at: Attachment) -> list[bool] | None:
            return at.catalog.mirror.has_all(names) if at.refresh_now(_CACHED_CHANGES) else None

        return self._run(work, None)

    def delete(self, names: Sequence[PageName], *, deadline: Deadline) -> list[Status]:
        """Remove pages and what builds on them, and wipe them, so that no rebuild brings them back.

        What builds on a page goes first. So one that is LATE is still there, with fewer that build on it.
        """
        results = [Status.FAILED] * len(names)

        def work(at: Attachment) -> None:
            results[:] = [Status.LATE] * len(names)
            removal = Removal(at, names)
            try:
                at.transact(removal.begin, deadline)
                while at.transact(removal.go_on, deadline):
                    pass
            except IndexLocked:
                pass
            if removal.begun:
                if self._is_synced:
                    at.slab.sync()
                results[:] = removal.results()

        self._run(work, None)
        return results

    def close(self) -> None:
        """Leave the directory. Reservations that are out keep the place in it until they are given back.

        In a child of a fork nothing happens: the store is the parent's, and so are its locks.
        """
        if self._process != descriptors.process():
            return
        with self._state:
            if self._closed:
                return
            self._closed = True
            at, self._attachment = self._attachment, None
            self._forget_remains()
        self._readers.close(_CLOSE_S)
        if at is not None:
            at.retire()

    # --- beyond the interface -----------------------------------------------------------------------------------------

    def revive(self) -> bool:
        """Come in again after damage; repairs if no other process is inside. Blocks. True if the store is up.

        Other threads' calls go on answering FAILED or MISS meanwhile.
        """
        self._require_same_process()
        with self._reviving:
            with self._state:
                if self._closed:
                    raise ResourceClosed("the store is closed")
                if self._attachment is not None:
                    return True
            try:
                attachment = self._attach()
            except StoreError as error:
                self.down = error
                return False
            if not self._install(attachment):
                raise ResourceClosed("the store was closed meanwhile")
            return True

    def _install(self, attachment: Attachment) -> bool:
        with self._state:
            if not self._closed:
                self._attachment, self.down = attachment, None
                self._forget_remains()
                return True
        attachment.retire()
        return False

    def label(self, identity: bytes, tenant: bytes, text: str, *, deadline: Deadline) -> None:
        """Give an identity a name for people, shown by `headwater ls`. Raises StoreError."""
        self._answer(lambda at: at.transact(lambda: at.catalog.table.set_label(identity, tenant, text), deadline))

    def usage(self, *, deadline: Deadline) -> list[FamilyUse]:
        """What each identity and tenant keep here, largest first. Raises StoreError."""
        return self._answer(lambda at: families.usage(at.catalog.table, deadline))

    def names(
        self, *, deadline: Deadline, identity: bytes | None = None, tenant: bytes | None = None
    ) -> list[PageName]:
        """The pages of an identity, a tenant, both, or all. Raises StoreError."""
        return self._answer(lambda at: families.names(at.catalog.table, identity, tenant, deadline))

    def paths(self, identity: bytes, num_tokens: int, *, after: int, limit: int, deadline: Deadline) -> list[PagePath]:
        """Pages of an identity's full blocks, by slot, from behind a slot on. Raises StoreError."""
        return self._answer(
            lambda at: families.paths(
                at.catalog.table, identity, num_tokens, after=after, limit=limit, deadline=deadline
            )
        )

    def slots(self, *, deadline: Deadline) -> dict[int, int]:
        """How many slots are free, reserved and live (`table.py` names the states). Raises StoreError."""
        return self._answer(lambda at: families.counts(at.catalog.table, deadline))

    def validate(self, *, deadline: Deadline) -> list[str]:
        """What contradicts itself in the index, in words; nothing in a sound store. Verifies no page. Raises."""
        return self._answer(lambda at: at.transact(lambda: problems(at.catalog), deadline))

    def frame_bytes(self, name: PageName) -> int | None:
        """Size of a page's frame, if the page seems to be there. Memory only."""
        place = self._run(lambda at: at.catalog.mirror.places.get(name), None)
        return None if place is None else place.num_bytes

    @property
    def limit_bytes(self) -> int:
        """The directory's byte limit; 0 while the store is down."""
        return self._run(lambda at: at.slab.header.limit_bytes, 0)

    def fill(self) -> StoreFill | None:
        """Slots that are taken, as this process last saw the index; None while the store is down."""
        return self._run(lambda at: StoreFill(at.catalog.mirror.used_bytes(), at.slab.header.limit_bytes), None)

    # --- coming and going ---------------------------------------------------------------------------------------------

    def _answer(self, work: Callable[[Attachment], T]) -> T:
        """A person's question, which wants an answer or an error. Raises StoreBusy where the index stays locked."""
        answer: list[T] = []

        def keep(at: Attachment) -> None:
            try:
                answer.append(work(at))
            except IndexLocked as error:
                message = f"the index of {self.config.directory} stays locked by another process; try again later"
                raise StoreBusy(message) from error

        self._run(keep, None)
        if not answer:
            raise self.down or StoreBusy("the store went down meanwhile")
        return answer[0]

    def _run(self, work: Callable[[Attachment], T], otherwise: T) -> T:
        """Do `work` inside the directory; `otherwise` while the store is down, or if it turns out to be damaged."""
        self._require_same_process()
        with self._state:
            if self._closed:
                raise ResourceClosed("the store is closed")
            at = self._attachment
        return otherwise if at is None else self._run_in(at, work, otherwise)

    def _run_in(self, at: Attachment, work: Callable[[Attachment], T], otherwise: T) -> T:
        """Do `work` inside a directory that may be closed already, but for what is lent. Damage turns the store off."""
        user, users = object(), at.users
        try:
            if not at.enter(user):
                raise ResourceClosed("the store is closed")
            at.slab.require_whole()
            return work(at)
        except ReadStuck as stuck:  # who hangs in a read is inside until it is back
            users.add(still := object())
            stuck.when_over(partial(self._leave, at, still))
            raise
        except (StoreBusy, StoreForked):
            raise
        except StoreError as error:
            self._turn_off(at, error)
            return otherwise
        finally:
            try:
                users.discard(user)  # one call of C: no interrupt comes before it
            finally:
                at.close_if_over()

    @staticmethod
    def _leave(at: Attachment, user: object) -> None:
        at.users.discard(user)
        at.close_if_over()

    def _turn_off(self, at: Attachment, error: StoreError) -> None:
        with self._state:
            if self._attachment is not at:
                return
            self._attachment = None
            self._forget_remains()
            if not at.slab.is_removed:  # held open, it would go on to take room
                self._remains = Remains(at.slab)
            self.down = error
        self.metrics.event("local_down", directory=str(self.config.directory), reason=str(error))
        at.retire(damaged=True)

    def _forget_remains(self) -> None:
        if self._remains is not None:
            self._remains.close()
            self._remains = None

    def _require_same_process(self) -> None:
        if self._process != descriptors.process():
            raise StoreForked("this store was opened before fork(): open it again in the child")
