"""LocalStore: the embedded default, on tmpfs (the host tier of a node) or on disk, shared by several processes.

A slab of slots (`slab.py`), an index of names (`catalog.py`), a directory with locks (`directory.py`, `attach.py`). The
store evicts by itself within the directory's byte limit, leaves first, and removes with a page all that builds on it.

Order of a write: unpublish the victim (commit), wipe, payload, header, publish (commit). Order of a read: copy, then
look whether the slot still holds what was copied. There is no lock between processes around bytes: a lost race is a
miss.

Damage found under way (a cut slab, an unreadable index) turns the store off: calls answer FAILED or MISS at once, the
reason stands in `down`, and `revive` comes in again, which rebuilds when no other process is inside.
"""

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from headwater.config import Durability, LocalStoreConfig
from headwater.core.errors import ResourceClosed, StoreBusy, StoreDamaged, StoreError, StoreForked
from headwater.core.page import PageName
from headwater.layout.frame import PREFIX_BYTES, Fault, Header, PageMeta, claims, parse
from headwater.metrics import Metrics
from headwater.storage import directory
from headwater.storage.attach import Attachment, attach, index_share
from headwater.storage.base import SYSTEM_CLOCK, Clock, Deadline, DeleteStatus, GetStatus, PutStatus, Store
from headwater.storage.catalog import Catalog, FamilyUse
from headwater.storage.database import CatalogBusy, CatalogFull
from headwater.storage.mirror import Place, Slot
from headwater.storage.slab import Progress, sectors

_BATCH_PAGES: Final = 32  # slots taken in one transaction: bounds what a writer holds, and what a late one wasted
_TOUCHES_KEPT: Final = 1024
_TOUCH_INTERVAL_S: Final = 1.0

T = TypeVar("T")
_open_stores: "weakref.WeakSet[LocalStore]" = weakref.WeakSet()


class LocalStore(Store):
    """A directory of pages. Blocks only for its own copies, and for other processes until the deadline."""

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
        self._evicted_since_balance = 0
        self._touched_at_s = clock.monotonic()
        self.down: StoreError | None = None
        self._attachment: Attachment | None = self._attach(progress)
        _open_stores.add(self)

    def _attach(self, progress: Progress | None = None) -> Attachment:
        deadline = Deadline.after(self.config.open_timeout_s)
        return attach(self.config, metrics=self.metrics, clock=self._clock, deadline=deadline, progress=progress)

    # --- the store interface ------------------------------------------------------------------------------------------

    def put(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[PutStatus]:
        """Store sealed frames; what cannot be had in time or room is said per page."""
        results = [PutStatus.FAILED] * len(pages)

        def work(at: Attachment) -> None:
            headers: list[tuple[int, Header]] = []
            broken: set[PageName] = set()  # what was asked for and is not held: nothing of this call may build on it
            for i, (name, frame) in enumerate(pages):
                header = parse(frame)
                if isinstance(header, Fault) or header.meta.name != name or len(frame) != header.frame_bytes:
                    results[i] = PutStatus.REFUSED
                    broken.add(name)
                else:
                    headers.append((i, header))
            for start in range(0, len(headers), _BATCH_PAGES):
                batch = headers[start : start + _BATCH_PAGES]
                statuses = self._put_batch(at, [(pages[i][1], header) for i, header in batch], broken, deadline)
                for (i, _), status in zip(batch, statuses, strict=True):
                    results[i] = status

        self._run(work, None)
        return results

    def _put_batch(
        self,
        at: Attachment,
        pages: Sequence[tuple[memoryview, Header]],
        broken: set[PageName],
        deadline: Deadline,
    ) -> list[PutStatus]:
        taken = self._take_slots(at, [(header.meta, header.frame_bytes) for _, header in pages], deadline)
        written: list[tuple[int, Slot, Header]] = []
        unused: list[Slot] = []
        results = [status if isinstance(status, PutStatus) else PutStatus.LATE for status in taken]
        try:
            for i, ((frame, header), slot) in enumerate(zip(pages, taken, strict=True)):
                if isinstance(slot, PutStatus):
                    if not slot.held:
                        broken.add(header.meta.name)
                    continue
                unused.append(slot)
                if header.meta.parent_name in broken:
                    results[i] = PutStatus.NO_ROOM
                    broken.add(header.meta.name)
                elif not deadline.expired:
                    at.slab.write_frame(slot.offset, frame, header.header_bytes)
                    written.append((i, unused.pop(), header))
            if self.config.durability is Durability.POWER and written:
                at.slab.sync()
        finally:
            statuses = self._publish(at, [(slot, header) for _, slot, header in written], unused, deadline)
        for (i, _, _), status in zip(written, statuses, strict=True):
            results[i] = status
        return results

    def get_into(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[GetStatus]:
        """Copy frames out, as they are: the caller verifies."""
        results = [GetStatus.FAILED] * len(pages)

        def work(at: Attachment) -> None:
            if not all(at.catalog.mirror.has_all([name for name, _ in pages])):
                self._refresh(at, deadline)
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
            if not self._moved(at, name, place, deadline):
                return GetStatus.HIT  # the index stands by it: what is wrong with the bytes, their verifier will say
        return GetStatus.MISS

    def contains(self, names: Sequence[PageName], *, deadline: Deadline) -> list[bool]:
        """Which pages seem to be there: one look at what is new in the index, then memory."""

        def work(at: Attachment) -> list[bool]:
            self._refresh(at, deadline)
            return at.catalog.mirror.has_all(names)

        nothing = [False] * len(names)
        return nothing if deadline.expired else self._run(work, nothing)

    def delete(self, names: Sequence[PageName], *, deadline: Deadline) -> list[DeleteStatus]:
        """Remove pages and what builds on them, and wipe them, so that no rebuild brings them back."""

        def work(at: Attachment) -> list[DeleteStatus]:
            def unpublish() -> tuple[list[Slot], list[bool]]:
                there = at.catalog.mirror.has_all(names)
                return at.catalog.take_pages(names, at.owner), there

            try:
                slots, there = self._transact(at, unpublish, deadline)
            except (CatalogBusy, CatalogFull):
                return [DeleteStatus.LATE] * len(names)
            for slot in slots:
                at.slab.wipe(slot.offset)
            self._give_back(at, slots, deadline)
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
        self._ask(lambda catalog: catalog.label(identity, tenant, text), deadline)

    def usage(self, *, deadline: Deadline) -> list[FamilyUse]:
        """What each identity and tenant keep here, largest first. Raises StoreError."""
        return self._ask(Catalog.usage, deadline)

    def names(
        self, *, deadline: Deadline, identity: bytes | None = None, tenant: bytes | None = None
    ) -> list[PageName]:
        """The pages of an identity, a tenant, both, or all. Raises StoreError."""
        return self._ask(lambda catalog: catalog.family_names(identity, tenant), deadline)

    def slots(self, *, deadline: Deadline) -> dict[int, int]:
        """How many slots are free, reserved and live (`database.py` names the states). Raises StoreError."""
        return self._ask(Catalog.counts, deadline)

    def validate(self, *, deadline: Deadline) -> list[str]:
        """What contradicts itself in index and slab, in words; nothing, in a sound store. Does not verify pages."""

        def work(at: Attachment) -> list[str]:
            found = self._try_transact(at, lambda: at.catalog.problems(at.slab.geometry), ["not in time"], deadline)
            classes = at.catalog.slot_classes()
            wrong = [
                i for i in range(at.slab.geometry.num_extents) if at.slab.extent_slot_bytes(i) != classes.get(i, 0)
            ]
            return found + [f"slab and index disagree about extent {extent}" for extent in wrong]

        return self._run(work, [f"the store is down: {self.down}"])

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
        """Reserve a slot for each (page, frame bytes) in one transaction, evicting what must go."""
        spare = frozenset(name for meta, _ in pages for name in (meta.name, meta.parent_name))

        def take() -> list[Slot | PutStatus]:
            at.catalog.write_touches()
            results: list[Slot | PutStatus] = []
            wanted: dict[int, list[int]] = {}
            for i, (meta, frame_bytes) in enumerate(pages):
                place = at.catalog.mirror.places.get(meta.name)
                slot_bytes = sectors(frame_bytes)
                if place is not None:
                    at.catalog.touch(place, self._clock.time())
                    results.append(PutStatus.EXISTS)
                elif not at.slab.geometry.slots_in_extent(slot_bytes):
                    results.append(PutStatus.REFUSED)
                else:
                    results.append(PutStatus.NO_ROOM)
                    wanted.setdefault(slot_bytes, []).append(i)
            for slot_bytes, indices in wanted.items():
                slots = self._find_room(at, slot_bytes, len(indices), spare)
                if not all(at.slab.geometry.has_slot(slot.offset, slot_bytes) for slot in slots):
                    raise StoreDamaged("the index names slots that do not exist")
                for i, slot in zip(indices, slots, strict=False):
                    results[i] = slot
            return results

        if self._log_too_long(at, deadline):
            return [PutStatus.NO_ROOM] * len(pages)
        try:
            return self._transact(at, take, deadline)
        except CatalogBusy:
            return [PutStatus.LATE] * len(pages)
        except CatalogFull:
            return [PutStatus.NO_ROOM] * len(pages)

    def _find_room(self, at: Attachment, slot_bytes: int, wanted: int, spare: frozenset[PageName]) -> list[Slot]:
        """Slots in the order of what they cost others: free, unused extents, the dead's, the expired, victims."""
        catalog, owner = at.catalog, at.owner
        slots = catalog.take_free(slot_bytes, owner, wanted)
        while len(slots) < wanted and self._cut_extent(at, slot_bytes):
            slots += catalog.take_free(slot_bytes, owner, wanted - len(slots))
        if len(slots) < wanted and catalog.retire_dead(lambda token: directory.is_alive(at.path, token)):
            slots += catalog.take_free(slot_bytes, owner, wanted - len(slots))
        if len(slots) < wanted:
            gone = catalog.take_pages(catalog.expired(int(self._clock.time() * 1000)), owner)
            catalog.give_back(gone, owner)
            slots += catalog.take_free(slot_bytes, owner, wanted - len(slots))
        while len(slots) < wanted and self._reclaim_extent(at, slot_bytes):
            slots += catalog.take_free(slot_bytes, owner, wanted - len(slots))
        if len(slots) < wanted:
            victims = catalog.take_victims(slot_bytes, owner, wanted=wanted - len(slots), spare=spare)
            self._evicted_since_balance += len(victims)
            self.metrics.count("local.evicted", len(victims))
            slots += victims
        return slots

    def _cut_extent(self, at: Attachment, slot_bytes: int) -> bool:
        """Cut an unused extent into slots of this size."""
        geometry = at.slab.geometry
        used = at.catalog.slot_classes()
        if len(used) == geometry.num_extents:
            return False
        extent = next(i for i in range(geometry.num_extents) if i not in used)
        at.slab.set_extent_slot_bytes(extent, slot_bytes)
        at.catalog.cut(geometry, extent, slot_bytes)
        return True

    def _reclaim_extent(self, at: Attachment, slot_bytes: int) -> bool:
        """Take an extent from another page size: when ours has none, or when theirs is colder than our next victim.

        The comparison reads every slot, so it is made once per extent's worth of evictions.
        """
        geometry, catalog = at.slab.geometry, at.catalog
        ours = catalog.mirror.order.lowest(slot_bytes)
        if ours is not None and self._evicted_since_balance < geometry.slots_in_extent(slot_bytes):
            return False
        self._evicted_since_balance = 0
        coldest = catalog.coldest_extent(geometry, slot_bytes)
        if coldest is None or (ours is not None and coldest[1] >= ours):
            return False
        extent, _ = coldest
        gone = catalog.take_extent(geometry, extent, at.owner)
        catalog.give_back(gone, at.owner)
        self.metrics.count("local.evicted", len(gone))
        catalog.uncut(geometry, extent)
        at.slab.set_extent_slot_bytes(extent, slot_bytes)
        catalog.cut(geometry, extent, slot_bytes)
        return True

    def _publish(
        self, at: Attachment, written: Sequence[tuple[Slot, Header]], unused: Sequence[Slot], deadline: Deadline
    ) -> list[PutStatus]:
        """Make written frames visible and give the other slots back, in one transaction."""

        def publish() -> list[PutStatus]:
            statuses = []
            lost = list(unused)
            published = at.catalog.publish(written, at.owner, now_s=self._clock.time())
            for (slot, header), done in zip(written, published, strict=True):
                if done:
                    statuses.append(PutStatus.STORED)
                else:
                    held = at.catalog.mirror.places.get(header.meta.name) is not None
                    statuses.append(PutStatus.EXISTS if held else PutStatus.FAILED)
                    lost.append(slot)
            at.catalog.give_back(lost, at.owner)
            return statuses

        if not written and not unused:
            return []
        try:
            statuses = self._transact(at, publish, deadline)
        except (CatalogBusy, CatalogFull):
            for slot, _ in written:
                at.slab.wipe(slot.offset)  # what is not published must not come back in a rebuild either
            at.debts.extend([slot for slot, _ in written] + list(unused))
            return [PutStatus.LATE] * len(written)
        at.slab.set_mark(at.catalog.mirror.seq)
        return statuses

    def _give_back(self, at: Attachment, slots: Sequence[Slot], deadline: Deadline) -> None:
        if slots:
            self._publish(at, [], slots, deadline)

    # --- looking ------------------------------------------------------------------------------------------------------

    def _moved(self, at: Attachment, name: PageName, place: Place, deadline: Deadline) -> bool:
        """Whether a page that was not where the mirror said is elsewhere or gone, by a fresh look at the index."""
        self._refresh(at, deadline)
        return at.catalog.mirror.places.get(name) != place

    def _refresh(self, at: Attachment, deadline: Deadline) -> None:
        if not at.lock.acquire(timeout=deadline.remaining_s):
            return
        try:
            at.catalog.refresh(deadline)
        except (CatalogBusy, CatalogFull):
            pass  # the mirror stays as it is: a hint
        finally:
            at.lock.release()

    def _touch(self, at: Attachment, name: PageName) -> None:
        place = at.catalog.mirror.places.get(name)
        if place is not None:
            at.catalog.touch(place, self._clock.time())

    def _flush_touches(self, at: Attachment, deadline: Deadline) -> None:
        """Write recency in batches, and never wait for it."""
        now_s = self._clock.monotonic()
        if at.catalog.num_touched < _TOUCHES_KEPT and now_s - self._touched_at_s < _TOUCH_INTERVAL_S:
            return
        self._touched_at_s = now_s
        if not deadline.expired:
            self._try_transact(at, at.catalog.write_touches, None, Deadline.after(0.001))

    # --- bounds and trouble -------------------------------------------------------------------------------------------

    def _log_too_long(self, at: Attachment, deadline: Deadline) -> bool:
        """Whether SQLite's log outgrew its share because a stopped process keeps it from being folded in."""
        try:
            size = os.stat(at.path / (directory.INDEX + "-wal")).st_size
        except FileNotFoundError:
            return False
        if size <= index_share(at.slab.geometry.limit_bytes) // 2:
            return False
        folded = False
        if at.lock.acquire(timeout=deadline.remaining_s):
            try:
                folded = at.catalog.database.fold_log()
            finally:
                at.lock.release()
        if not folded:
            self.metrics.count("local.log_full")
        return not folded

    def _transact(self, at: Attachment, work: Callable[[], T], deadline: Deadline) -> T:
        """Run `work` under the catalog's write lock. Raises CatalogBusy at the deadline."""
        if deadline.expired or not at.lock.acquire(timeout=deadline.remaining_s):
            raise CatalogBusy
        try:
            debts = list(at.debts)
            with at.catalog.transaction(deadline):
                at.catalog.give_back(debts, at.owner)
                result = work()
            del at.debts[: len(debts)]
            return result
        finally:
            at.lock.release()

    def _try_transact(self, at: Attachment, work: Callable[[], T], otherwise: T, deadline: Deadline) -> T:
        try:
            return self._transact(at, work, deadline)
        except (CatalogBusy, CatalogFull):
            return otherwise

    def _ask(self, question: Callable[[Catalog], T], deadline: Deadline) -> T:
        """A person's question, which wants an answer or an error. Raises StoreBusy at the deadline."""
        answer: list[T] = []

        def work(at: Attachment) -> None:
            try:
                answer.append(self._transact(at, lambda: question(at.catalog), deadline))
            except (CatalogBusy, CatalogFull) as error:
                message = f"the index of {self.config.directory} stays locked by another process; try again later"
                raise StoreBusy(message) from error

        self._run(work, None)
        if not answer:
            raise self.down or StoreBusy("the store went down meanwhile")
        return answer[0]

    def _run(self, work: Callable[[Attachment], T], otherwise: T) -> T:
        """Do `work` inside the directory; `otherwise` while the store is down, or if it turns out to be damaged."""
        if self._pid != os.getpid():
            raise StoreForked("this store was opened before fork(): open it again in the child")
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
        self.metrics.event("local.down", directory=str(self.config.directory), reason=str(error))
        at.retire()

    def _after_fork(self) -> None:
        at = self._attachment
        if at is not None:
            at.drop_after_fork()


def _forget_in_child() -> None:
    for store in list(_open_stores):
        store._after_fork()


os.register_at_fork(after_in_child=_forget_in_child)
