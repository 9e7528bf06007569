"""Finding slots for new pages: what is free first, then what costs others least.

In one transaction: free slots, unused extents, slots of dead owners, then victims in the order of the policy. Pages
whose time is over, and extents that are taken from another page size, need a second one: they are unpublished, and
only after that is committed are they wiped and cut anew, because until then somebody may be reading them.

Invariants: a slot that is free holds no valid header; at most one extent changes hands in a call; what the caller's
pages build on, and what it asks for, is never the victim.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from headwater.core.errors import StoreDamaged
from headwater.core.page import PageName
from headwater.layout.frame import PageMeta
from headwater.metrics import Metrics
from headwater.storage.attachment import Attachment
from headwater.storage.base import Clock, Deadline, PutStatus
from headwater.storage.database import CatalogBusy, CatalogFull
from headwater.storage.mirror import Slot
from headwater.storage.slab import sectors


@dataclass
class _Search:
    """One call's state: what it wants, what it found, what it has emptied for it."""

    pages: Sequence[tuple[PageMeta, int]]
    results: list[Slot | PutStatus]
    spare: frozenset[PageName]
    emptied: list[Slot] = field(default_factory=list)  # unpublished, ours, to be wiped
    extent: tuple[int, int] | None = None  # to be cut into slots of this size

    def wanted(self) -> dict[int, list[int]]:
        """Indices of pages without a slot, by slot size."""
        groups: dict[int, list[int]] = {}
        for i, ((_, frame_bytes), result) in enumerate(zip(self.pages, self.results, strict=True)):
            if result is PutStatus.NO_ROOM:
                groups.setdefault(sectors(frame_bytes), []).append(i)
        return groups


class Allocator:
    """Takes slots for writers. Called by several threads; its own memory is only a hint for balance."""

    def __init__(self, metrics: Metrics, clock: Clock) -> None:
        self._metrics = metrics
        self._clock = clock
        self._evicted = 0  # since page sizes were last weighed against each other

    def take(self, at: Attachment, pages: Sequence[tuple[PageMeta, int]], deadline: Deadline) -> list[Slot | PutStatus]:
        """Reserve a slot for each (page, frame bytes), in order, or say why there is none."""
        names = frozenset(name for meta, _ in pages for name in (meta.name, meta.parent_name))
        search = _Search(pages, [PutStatus.NO_ROOM] * len(pages), names)
        try:
            at.transact(lambda: self._first(at, search), deadline)
        except CatalogBusy:
            return [PutStatus.LATE] * len(pages)
        except CatalogFull:
            return [PutStatus.NO_ROOM] * len(pages)
        if search.emptied or search.extent is not None:
            for slot in search.emptied:
                at.wipe(slot)
            try:
                at.transact(lambda: self._second(at, search), deadline)
            except (CatalogBusy, CatalogFull):
                at.give_back(search.emptied, deadline)
        return search.results

    def _first(self, at: Attachment, search: _Search) -> None:
        catalog, now_s = at.catalog, self._clock.time()
        catalog.write_touches()
        expired = catalog.expired(int(now_s * 1000))
        if expired:
            search.emptied += catalog.take_pages(expired, at.owner)
        coming: set[PageName] = set()
        for i, (meta, frame_bytes) in enumerate(search.pages):
            place = catalog.mirror.places.get(meta.name)
            if place is not None:
                catalog.touch(place, now_s)
                search.results[i] = PutStatus.EXISTS
            elif frame_bytes < 1 or not at.slab.geometry.slots_in_extent(sectors(frame_bytes)):
                search.results[i] = PutStatus.REFUSED
            elif meta.depth and not (
                meta.parent_name in coming
                or meta.parent_name in catalog.mirror.places
                or at.is_coming(meta.parent_name)
            ):
                search.results[i] = PutStatus.NO_PARENT
            else:
                coming.add(meta.name)
        for slot_bytes, indices in search.wanted().items():
            self._fill(at, search, slot_bytes, indices, last=False)

    def _second(self, at: Attachment, search: _Search) -> None:
        """Cut the emptied extent, give the other emptied slots back, and go on with what is still wanted."""
        geometry, catalog = at.slab.geometry, at.catalog
        catalog.give_back(search.emptied, at.owner)
        if search.extent is not None:
            extent, slot_bytes = search.extent
            catalog.uncut(geometry, extent)
            at.slab.set_extent_slot_bytes(extent, slot_bytes)
            catalog.cut(geometry, extent, slot_bytes)
        for slot_bytes, indices in search.wanted().items():
            self._fill(at, search, slot_bytes, indices, last=True)

    def _fill(self, at: Attachment, search: _Search, slot_bytes: int, indices: list[int], *, last: bool) -> None:
        catalog, owner, wanted = at.catalog, at.owner, len(indices)
        slots = catalog.take_free(slot_bytes, owner, wanted)
        while len(slots) < wanted and self._cut_extent(at, slot_bytes):
            slots += catalog.take_free(slot_bytes, owner, wanted - len(slots))
        if len(slots) < wanted and at.retire_dead():
            slots += catalog.take_free(slot_bytes, owner, wanted - len(slots))
        short = len(slots) < wanted
        if short and not last and (search.emptied or self._empty_extent(at, search, slot_bytes)):
            short = False  # what is being emptied for us comes before victims
        if short:
            victims = catalog.take_victims(slot_bytes, owner, wanted=wanted - len(slots), spare=search.spare)
            self._evicted += len(victims)
            self._metrics.count("local_evicted_pages_total", len(victims), medium=at.slab.medium)
            slots += victims
        if not all(at.slab.geometry.has_slot(slot.offset, slot_bytes) for slot in slots):
            raise StoreDamaged("the index names slots that do not exist")
        for i, slot in zip(indices, slots, strict=False):
            search.results[i] = slot

    def _cut_extent(self, at: Attachment, slot_bytes: int) -> bool:
        """Cut an unused extent into slots of this size."""
        geometry = at.slab.geometry
        used = at.catalog.slot_classes()
        unused = next((i for i in range(geometry.num_extents) if i not in used), None)
        if unused is None:
            return False
        at.slab.set_extent_slot_bytes(unused, slot_bytes)
        at.catalog.cut(geometry, unused, slot_bytes)
        return True

    def _empty_extent(self, at: Attachment, search: _Search, slot_bytes: int) -> bool:
        """Empty an extent of another page size: when ours has no page, or when theirs is colder than our next victim.

        The comparison reads every slot, so it is made once per extent's worth of evictions.
        """
        geometry, catalog = at.slab.geometry, at.catalog
        ours = catalog.mirror.order.lowest(slot_bytes)
        if search.extent is not None or (ours is not None and self._evicted < geometry.slots_in_extent(slot_bytes)):
            return False
        self._evicted = 0
        coldest = catalog.coldest_extent(geometry, slot_bytes)
        if coldest is None or (ours is not None and coldest[1] >= ours):
            return False
        emptied = catalog.take_extent(geometry, coldest[0], at.owner, search.spare)
        if emptied is None:
            return False
        self._metrics.count("local_evicted_pages_total", len(emptied), medium=at.slab.medium)
        search.emptied += emptied
        search.extent = (coldest[0], slot_bytes)
        return True
