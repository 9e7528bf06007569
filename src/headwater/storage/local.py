"""LocalStore: the embedded default, on tmpfs (the host tier of a node) or on disk, shared by several processes.

A slab of slots (`slab.py`), an index of names (`catalog.py`), a directory with locks (`directory.py`, `attach.py`), and
an allocator that makes room within the directory's byte limit (`allocator.py`).

Order of a write: unpublish the victim (commit), wipe, payload, header, publish (commit). Order of a read: copy, then
look whether the slot still holds what was copied. There is no lock between processes around bytes: a lost race is a
miss.

Damage found under way (a cut slab, an unreadable index) turns the store off: calls answer FAILED or MISS at once, the
reason stands in `down`, and `revive` comes in again, which rebuilds when no other process is inside.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from typing import ClassVar, Final, TypeVar

from headwater.config import Durability, LocalStoreConfig
from headwater.core.errors import ResourceClosed, StoreBusy, StoreError, StoreForked
from headwater.core.page import PageName
from headwater.layout.frame import PREFIX_BYTES, Fault, Header, PageMeta, claims, parse
from headwater.metrics import Metrics
from headwater.storage.allocator import Allocator
from headwater.storage.attach import attach, index_share
from headwater.storage.attachment import Attachment
from headwater.storage.base import SYSTEM_CLOCK, Clock, Deadline, DeleteStatus, GetStatus, PutStatus, Store
from headwater.storage.catalog import Catalog
from headwater.storage.database import CatalogBusy, CatalogFull
from headwater.storage.families import FamilyUse, PagePath
from headwater.storage.mirror import Slot
from headwater.storage.slab import Progress

_BATCH_PAGES: Final = 32  # slots taken in one transaction: bounds what a writer holds, and what a late one wasted
_TOUCHES_KEPT: Final = 1024
_TOUCH_INTERVAL_S: Final = 1.0

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
        self._pid = os.getpid()
        self._allocator = Allocator(self.metrics, clock)
        self._touched_at_s = clock.monotonic()
        self.down: StoreError | None = None
        self._attachment: Attachment | None = self._attach(progress)

    def _attach(self, progress: Progress | None = None) -> Attachment:
        deadline = Deadline.after(self.config.open_timeout_s)
        return attach(self.config, metrics=self.metrics, clock=self._clock, deadline=deadline, progress=progress)

    # --- the store interface ------------------------------------------------------------------------------------------

    def put(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[PutStatus]:
        """Store sealed frames; what cannot be had in time or room is said per page."""
        results = [PutStatus.FAILED] * len(pages)

        def work(at: Attachment) -> None:
            headers: list[tuple[int, Header]] = []
            for i, (name, frame) in enumerate(pages):
                header = parse(frame)
                if isinstance(header, Fault) or header.meta.name != name or len(frame) != header.frame_bytes:
                    results[i] = PutStatus.REFUSED
                else:
                    headers.append((i, header))
            for start in range(0, len(headers), _BATCH_PAGES):
                batch = headers[start : start + _BATCH_PAGES]
                statuses = self._put_batch(at, [(pages[i][1], header) for i, header in batch], deadline)
                for (i, _), status in zip(batch, statuses, strict=True):
                    results[i] = status

        self._run(work, None)
        return results

    def _put_batch(
        self, at: Attachment, pages: Sequence[tuple[memoryview, Header]], deadline: Deadline
    ) -> list[PutStatus]:
        taken = self._take_slots(at, [(header.meta, header.frame_bytes) for _, header in pages], deadline)
        results = [PutStatus.LATE if isinstance(one, Slot) else one for one in taken]
        slots = [(i, one) for i, one in enumerate(taken) if isinstance(one, Slot)]
        written: list[tuple[int, Slot]] = []
        try:
            for i, slot in slots:
                if deadline.expired:
                    break
                frame, header = pages[i]
                at.slab.write_frame(slot.offset, frame, header.header_bytes)
                written.append((i, slot))
            if self.config.durability is Durability.POWER and written:
                at.slab.sync()
            statuses = self._publish(at, [(slot, pages[i][1]) for i, slot in written], deadline)
        except BaseException:
            at.give_back([slot for _, slot in slots], deadline)
            raise
        at.give_back([slot for _, slot in slots[len(written) :]], deadline)
        for (i, _), status in zip(written, statuses, strict=True):
            results[i] = status
        return results

    def get_into(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[GetStatus]:
        """Copy frames out, as they are: the caller verifies."""
        results = [GetStatus.FAILED] * len(pages)

        def work(at: Attachment) -> None:
            if not all(at.catalog.mirror.has_all([name for name, _ in pages])):
                at.refresh(deadline)
            for i, (name, buffer) in enumerate(pages):
                results[i] = self._get(at, name, buffer, deadline)
                if results[i] is GetStatus.HIT:
                    self._touch(at, name)
            self._flush_touches(at, deadline)

        self._run(work, None)
        return results

    def _get(self, at: Attachment, name: PageName, buffer: memoryview, deadline: Deadline) -> GetStatus:
        for _ in range(2):  # once more if another process moved the page under us
            place = at.catalog.mirror.places.get(name)
            if place is None:
                return GetStatus.MISS
            if deadline.expired:
                return GetStatus.LATE
            if len(buffer) != place.num_bytes:
                return GetStatus.SHORT
            if not at.slab.read_into(place.offset, buffer):
                return GetStatus.SHORT
            if claims(buffer, name) and at.slab.starts_with(place.offset, buffer[:PREFIX_BYTES]):
                return GetStatus.HIT
            if not at.refresh(deadline, force=True):
                return GetStatus.LATE
            if at.catalog.mirror.places.get(name) == place:
                return GetStatus.HIT  # the index stands by it: what is wrong with the bytes, their verifier will say
        return GetStatus.MISS

    def contains(self, names: Sequence[PageName], *, deadline: Deadline) -> list[bool]:
        """Which pages seem to be there: one look at what is new in the index, then memory."""

        def work(at: Attachment) -> list[bool]:
            at.refresh(deadline)
            return at.catalog.mirror.has_all(names)

        nothing = [False] * len(names)
        return nothing if deadline.expired else self._run(work, nothing)

    def glance(self, names: Sequence[PageName]) -> list[bool] | None:
        """What `contains` would say, where nobody changed the index since we looked; otherwise None. Memory only."""

        def work(at: Attachment) -> list[bool] | None:
            mirror = at.catalog.mirror
            return mirror.has_all(names) if at.slab.mark() == mirror.seq else None

        return self._run(work, None)

    def delete(self, names: Sequence[PageName], *, deadline: Deadline) -> list[DeleteStatus]:
        """Remove pages and what builds on them, and wipe them, so that no rebuild brings them back."""

        def work(at: Attachment) -> list[DeleteStatus]:
            def unpublish() -> tuple[list[Slot], list[bool]]:
                at.retire_dead()  # one of them may have left a whole page behind that it never published
                there = at.catalog.mirror.has_all(names)
                return at.catalog.take_pages(names, at.owner), there

            if at.log_too_long(self._log_share(at) * 2, deadline):
                return [DeleteStatus.LATE] * len(names)
            try:
                slots, there = at.transact(unpublish, deadline)
            except (CatalogBusy, CatalogFull):
                return [DeleteStatus.LATE] * len(names)
            at.give_back(slots, deadline)
            return [DeleteStatus.REMOVED if was else DeleteStatus.ABSENT for was in there]

        return self._run(work, [DeleteStatus.FAILED] * len(names))

    def close(self) -> None:
        """Leave the directory. Reservations that are out keep the place in it until they are given back."""
        with self._state:
            if self._closed:
                return
            self._closed = True
            at, self._attachment = self._attachment, None
        if at is not None and self._pid == os.getpid():
            at.retire()

    # --- beyond the interface -----------------------------------------------------------------------------------------

    def revive(self) -> bool:
        """Come in again after damage; rebuilds if no other process is inside. Blocks. True if the store is up.

        Other threads' calls go on answering FAILED or MISS meanwhile.
        """
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
                return True
        attachment.retire()
        return False

    def label(self, identity: bytes, tenant: bytes, text: str, *, deadline: Deadline) -> None:
        """Give an identity a name for people, shown by `headwater ls`. Raises StoreError."""
        self._answer(lambda at: at.transact(lambda: at.catalog.families.label(identity, tenant, text), deadline))

    def usage(self, *, deadline: Deadline) -> list[FamilyUse]:
        """What each identity and tenant keep here, largest first. Raises StoreError."""
        return self._ask(lambda catalog: catalog.families.usage(), deadline)

    def names(
        self, *, deadline: Deadline, identity: bytes | None = None, tenant: bytes | None = None
    ) -> list[PageName]:
        """The pages of an identity, a tenant, both, or all. Raises StoreError."""
        return self._ask(lambda catalog: catalog.families.names(identity, tenant), deadline)

    def paths(self, identity: bytes, num_tokens: int, *, after: int, limit: int, deadline: Deadline) -> list[PagePath]:
        """Pages of an identity's full blocks, by slot, from behind a slot on. Raises StoreError."""
        return self._ask(
            lambda catalog: catalog.families.paths(identity, num_tokens, after=after, limit=limit), deadline
        )

    def slots(self, *, deadline: Deadline) -> dict[int, int]:
        """How many slots are free, reserved and live (`database.py` names the states). Raises StoreError."""
        return self._ask(Catalog.counts, deadline)

    def validate(self, *, deadline: Deadline) -> list[str]:
        """What contradicts itself in index and slab, in words; nothing in a sound store. Verifies no page. Raises."""

        def examine(at: Attachment) -> list[str]:
            geometry, classes = at.slab.geometry, at.catalog.slot_classes()
            wrong = [i for i in range(geometry.num_extents) if at.slab.extent_slot_bytes(i) != classes.get(i, 0)]
            found = at.catalog.problems(geometry)
            return found + [f"slab and index disagree about extent {extent}" for extent in wrong]

        return self._answer(lambda at: at.ask(lambda: examine(at), deadline))

    def peek(self, name: PageName, buffer: memoryview, *, deadline: Deadline) -> GetStatus:
        """Copy one frame out as `get_into` does, without counting it as a use."""
        return self._run(lambda at: self._get(at, name, buffer, deadline), GetStatus.FAILED)

    def frame_bytes(self, name: PageName) -> int | None:
        """Size of a page's frame, if the page seems to be there. Memory only."""
        place = self._run(lambda at: at.catalog.mirror.places.get(name), None)
        return None if place is None else place.num_bytes

    @property
    def limit_bytes(self) -> int:
        """The directory's byte limit; 0 while the store is down."""
        return self._run(lambda at: at.slab.geometry.limit_bytes, 0)

    # --- slots --------------------------------------------------------------------------------------------------------

    def _take_slots(
        self, at: Attachment, pages: Sequence[tuple[PageMeta, int]], deadline: Deadline
    ) -> list[Slot | PutStatus]:
        if at.log_too_long(self._log_share(at), deadline):
            self.metrics.count("local_log_full_total", medium=at.slab.medium)
            return [PutStatus.NO_ROOM] * len(pages)
        return self._allocator.take(at, pages, deadline)

    def _log_share(self, at: Attachment) -> int:
        """How long SQLite's log may get before it takes no more pages; deletions may double that."""
        return index_share(at.slab.geometry.limit_bytes) // 2

    def _publish(self, at: Attachment, written: Sequence[tuple[Slot, Header]], deadline: Deadline) -> list[PutStatus]:
        """Make written frames visible; slots of those that are not to be seen are wiped and given back."""
        if not written:
            return []

        def publish() -> list[PutStatus]:
            statuses = at.catalog.publish(written, at.owner, now_s=self._clock.time())
            ours = [PutStatus.EXISTS, PutStatus.NO_PARENT]  # FAILED: the slot is not ours any more
            lost = [slot for (slot, _), status in zip(written, statuses, strict=True) if status in ours]
            for slot in lost:
                at.wipe(slot)
            at.catalog.give_back(lost, at.owner)
            return statuses

        try:
            return at.transact(publish, deadline)
        except (CatalogBusy, CatalogFull):
            at.give_back([slot for slot, _ in written], deadline)
            return [PutStatus.LATE] * len(written)

    # --- recency ------------------------------------------------------------------------------------------------------

    def _touch(self, at: Attachment, name: PageName) -> None:
        place = at.catalog.mirror.places.get(name)
        if place is not None:
            at.catalog.touch(place, self._clock.time())

    def _flush_touches(self, at: Attachment, deadline: Deadline) -> None:
        """Write recency in batches; never wait for it, and never let it grow SQLite's log."""
        now_s = self._clock.monotonic()
        if at.catalog.num_touched < _TOUCHES_KEPT and now_s - self._touched_at_s < _TOUCH_INTERVAL_S:
            return
        self._touched_at_s = now_s
        soon = Deadline.after(0.001)
        if deadline.expired or at.log_too_long(self._log_share(at), soon):
            return
        with contextlib.suppress(CatalogBusy, CatalogFull):
            at.transact(at.catalog.write_touches, soon)

    # --- coming and going ---------------------------------------------------------------------------------------------

    def _ask(self, question: Callable[[Catalog], T], deadline: Deadline) -> T:
        return self._answer(lambda at: at.ask(lambda: question(at.catalog), deadline))

    def _answer(self, work: Callable[[Attachment], T]) -> T:
        """A person's question, which wants an answer or an error. Raises StoreBusy where the index stays locked."""
        answer: list[T] = []

        def keep(at: Attachment) -> None:
            try:
                answer.append(work(at))
            except (CatalogBusy, CatalogFull) as error:
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
            if at is None:
                return otherwise
            at.enter()
        return self._run_in(at, 1, work, otherwise)

    def _run_in(self, at: Attachment, num_users: int, work: Callable[[Attachment], T], otherwise: T) -> T:
        """Do `work` for users that are counted in, and count them out. Damage turns the store off."""
        self._require_same_process()
        try:
            at.slab.require_whole()
            return work(at)
        except StoreBusy:
            raise
        except StoreError as error:
            self._turn_off(at, error)
            return otherwise
        finally:
            at.leave(num_users)

    def _turn_off(self, at: Attachment, error: StoreError) -> None:
        with self._state:
            if self._attachment is not at:
                return
            self._attachment = None
            self.down = error
        self.metrics.event("local_down", directory=str(self.config.directory), reason=str(error))
        at.retire(damaged=True)

    def _require_same_process(self) -> None:
        if self._pid != os.getpid():
            raise StoreForked("this store was opened before fork(): open it again in the child")
