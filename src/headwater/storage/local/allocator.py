"""Finding slots for new pages: what is free first, then what costs others least.

Under the index's lock: expired pages go; then free slots, unused extents, slots of dead owners, and victims in the
order of the policy. An extent that is taken from another page size is emptied in steps, each a change of its own, so
that nobody waits long for the lock and no deadline is overrun; it is cut anew when all of it is ours.

Invariants: a slot that is free holds no valid header; at most one extent changes hands in a call; what the caller's
pages build on, and what it asks for, is never the victim.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from headwater.core.page import PageName
from headwater.core.results import Status
from headwater.layout.frame import PageMeta
from headwater.metrics import Metrics
from headwater.policy import LeafOrder
from headwater.storage.base import Clock, Deadline
from headwater.storage.local.attachment import Attachment, IndexLocked
from headwater.storage.local.geometry import sectors
from headwater.storage.local.mirror import Place, Slot

STEP_PAGES: Final = 256  # removed under one lock


@dataclass
class Search:
    """One call's state: what it wants (pages and their frames' bytes), what it found, what it has emptied for it."""

    pages: Sequence[tuple[PageMeta, int]]
    results: list[Slot | Status] = field(init=False)
    spare: frozenset[PageName] = field(init=False)  # what it wants, and what that builds on, is no victim
    extent: int | None = None  # to be cut anew, for
    slot_bytes: int = 0  # slots of this size
    order: LeafOrder[PageName] | None = None  # in which its pages, and what builds on them, are
    doomed: Iterator[PageName] = field(default_factory=lambda: iter(()))  # to go
    emptied: list[Slot] = field(default_factory=list)  # its slots, ours

    def __post_init__(self) -> None:
        """Nothing is found yet."""
        self.results = [Status.NO_ROOM] * len(self.pages)
        self.spare = frozenset(name for meta, _ in self.pages for name in (meta.name, meta.parent_name))

    def wanted(self) -> dict[int, list[int]]:
        """Indices of pages without a slot, by slot size."""
        by_bytes: dict[int, list[int]] = {}
        for i, ((_, frame_bytes), result) in enumerate(zip(self.pages, self.results, strict=True)):
            if result is Status.NO_ROOM:
                by_bytes.setdefault(frame_bytes, []).append(i)
        groups: dict[int, list[int]] = {}
        for frame_bytes, indices in by_bytes.items():
            groups.setdefault(sectors(frame_bytes), []).extend(indices)
        return groups

    def held(self) -> Iterator[Slot]:
        """Slots that are reserved for it now."""
        yield from (one for one in self.results if isinstance(one, Slot))
        yield from self.emptied


class Allocator:
    """Takes slots for writers. Called by several threads; its own memory is only a hint for balance."""

    def __init__(self, metrics: Metrics, clock: Clock) -> None:
        self._metrics = metrics
        self._clock = clock
        self._evicted = 0  # since page sizes were last weighed against each other

    def take(self, at: Attachment, search: Search, deadline: Deadline) -> None:
        """Reserve a slot for each page of a search, in order, or say why there is none. `at.taking` it meanwhile."""
        try:
            at.transact(lambda: self._first(at, search), deadline)
        except IndexLocked:
            search.results[:] = [Status.LATE] * len(search.pages)
            return
        if search.extent is not None:
            self._change_hands(at, search, deadline)

    def _first(self, at: Attachment, search: Search) -> None:
        catalog = at.catalog
        catalog.recency.write_touches()
        over = catalog.mirror.expired(int(catalog.recency.now_s() * 1000), STEP_PAGES)
        catalog.remove(islice(catalog.mirror.order.leaves_first(over), STEP_PAGES), at.owner)
        places, results = catalog.mirror.places, search.results
        sizes = {frame_bytes for _, frame_bytes in search.pages}
        fits = {one for one in sizes if one > 0 and at.slab.geometry.slots_in_extent(sectors(one))}
        coming: set[PageName] = set()
        there: list[Place] = []
        for i, (meta, frame_bytes) in enumerate(search.pages):
            name = meta.name
            place = places.get(name)
            if place is not None:
                there.append(place)
                results[i] = Status.EXISTS
            elif frame_bytes not in fits:
                results[i] = Status.REFUSED
            elif meta.depth and not (
                (parent := meta.parent_name) in coming or parent in places or at.is_coming(parent)
            ):
                results[i] = Status.NO_PARENT
            else:
                coming.add(name)
        catalog.recency.touch(there)
        for slot_bytes, indices in search.wanted().items():
            self._fill(at, search, slot_bytes, indices, last=False)

    def _change_hands(self, at: Attachment, search: Search, deadline: Deadline) -> None:
        """Empty the extent that was chosen, cut it anew, and go on with what is still wanted; or give it up."""
        try:
            while at.transact(lambda: self._empty_more(at, search), deadline):
                pass
            at.wipe(search.emptied)
            at.transact(lambda: self._second(at, search), deadline)
        except IndexLocked:
            emptied, search.emptied = search.emptied, []
            at.give_back(emptied, deadline)
            search.results[:] = [Status.LATE if one is Status.NO_ROOM else one for one in search.results]

    def _empty_more(self, at: Attachment, search: Search) -> bool:
        """Unpublish some of what has to go. Whether there may be more."""
        order = at.catalog.mirror.order
        if order is not search.order and search.extent is not None:  # at first, and where everything was read again
            search.order, search.doomed = order, order.leaves_first(at.catalog.mirror.pages_in(search.extent))
        batch = list(islice(search.doomed, STEP_PAGES))
        if any(name in search.spare for name in batch):
            search.extent = None
            return False
        self._metrics.count("local_evicted_pages_total", len(batch), medium=at.slab.medium)
        search.emptied += at.catalog.take_pages(batch, at.owner)
        return bool(batch)

    def _second(self, at: Attachment, search: Search) -> None:
        """Cut the emptied extent, give the other emptied slots back, and go on with what is still wanted."""
        catalog, extent = at.catalog, search.extent
        if extent is not None and catalog.is_ours(extent, at.owner):
            inside = [slot for slot in search.emptied if catalog.geometry.extent_of(slot.number) == extent]
            search.emptied = [slot for slot in search.emptied if slot not in frozenset(inside)]
            catalog.cut(extent, search.slot_bytes)
        catalog.give_back(search.emptied, at.owner)
        search.emptied = []
        for slot_bytes, indices in search.wanted().items():
            self._fill(at, search, slot_bytes, indices, last=True)

    def _fill(self, at: Attachment, search: Search, slot_bytes: int, indices: list[int], *, last: bool) -> None:
        catalog, owner, wanted = at.catalog, at.owner, len(indices)
        slots = catalog.take_free(slot_bytes, owner, wanted)
        while len(slots) < wanted and self._cut_extent(at, slot_bytes):
            slots += catalog.take_free(slot_bytes, owner, wanted - len(slots))
        if len(slots) < wanted and catalog.retire_dead(owner):
            slots += catalog.take_free(slot_bytes, owner, wanted - len(slots))
        short = len(slots) < wanted
        if short and not last and self._choose_extent(at, search, slot_bytes):
            short = False  # what is being emptied for us comes before victims
        if short:
            victims = catalog.take_victims(slot_bytes, owner, wanted=wanted - len(slots), spare=search.spare)
            self._evicted += len(victims)
            self._metrics.count("local_evicted_pages_total", len(victims), medium=at.slab.medium)
            slots += victims
        for i, slot in zip(indices, slots, strict=False):
            search.results[i] = slot

    def _cut_extent(self, at: Attachment, slot_bytes: int) -> bool:
        """Cut an unused extent into slots of this size."""
        used = at.catalog.mirror.classes
        unused = next((extent for extent in range(at.slab.geometry.num_extents) if extent not in used), None)
        if unused is None:
            return False
        at.catalog.cut(unused, slot_bytes)
        return True

    def _choose_extent(self, at: Attachment, search: Search, slot_bytes: int) -> bool:
        """Choose an extent of another page size: when ours has no page, or when theirs is colder than our next victim.

        The comparison reads every priority, so it is made once per extent's worth of evictions.
        """
        geometry, catalog = at.slab.geometry, at.catalog
        if search.extent is not None:  # one is enough for a call: another page size of this batch waits for victims
            return search.slot_bytes == slot_bytes
        ours = catalog.mirror.order.lowest(slot_bytes)
        if ours is not None and self._evicted < geometry.slots_in_extent(slot_bytes):
            return False
        self._evicted = 0
        for worth, extent in catalog.mirror.coldest_extents(slot_bytes):
            if ours is not None and worth >= ours:
                return False
            taken = catalog.take_extent(extent, at.owner)
            if taken is not None:
                search.extent, search.slot_bytes, search.emptied = extent, slot_bytes, taken
                return True
        return False
