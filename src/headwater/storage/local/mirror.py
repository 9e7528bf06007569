"""What a process believes the index to hold: pages, places, free slots and who builds on whom, in memory.

A hint, as the index itself is; current while the index's lock is held, when the changes have just been read. Look-ups
may come from any thread; changes come one at a time (`attachment.py` holds a lock).
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple, TypeAlias

from headwater.core.page import PageName
from headwater.policy import LeafOrder
from headwater.storage.local.geometry import Geometry


class Slot(NamedTuple):
    """A slot, and how often it was given out: what a writer holds."""

    number: int
    generation: int
    offset: int  # in the slab


class Place(NamedTuple):
    """Where a page is, and the length of its frame."""

    number: int
    generation: int
    offset: int
    num_bytes: int


class Page(NamedTuple):
    """A live page as the index has it."""

    name: PageName
    parent: PageName
    place: Place
    slot_bytes: int
    priority: float
    expires_ms: int
    depth: int


PageRow: TypeAlias = tuple[PageName, PageName, Place, int, float, int, int]  # a Page, where there are very many


class Draft:
    """A mirror in the making, extent by extent: as the index was at some change, or later."""

    def __init__(self, newest: int | None, classes: dict[int, int]) -> None:
        self.newest = newest  # change, when it was begun; None: nobody could say
        self.classes = classes
        self.left = list(classes.items())  # extents that are still to be read, with their slot sizes
        self.rows: list[PageRow] = []
        self.order: LeafOrder[PageName] = LeafOrder()
        self.places: dict[PageName, Place] = {}
        self.names: dict[int, PageName] = {}
        self.free: dict[int, dict[int, None]] = {}
        self.expiring: dict[PageName, int] = {}

    def add(self, rows: Sequence[PageRow], free: Iterable[int], slot_bytes: int) -> None:
        """What an extent holds. By position: there may be a hundred thousand pages."""
        places = self.places
        known = len(places)
        places.update({row[0]: row[2] for row in rows if row[0] not in places})
        fresh: Sequence[PageRow] = rows
        if len(places) - known < len(rows):  # a damaged index may have a name twice: the first counts
            fresh = [row for row in rows if places[row[0]] is row[2]]
        self.rows += rows
        self.order.extend((row[0], row[1], row[4], row[3]) for row in fresh)
        self.names.update({row[2][0]: row[0] for row in fresh})
        self.expiring.update({row[0]: row[5] for row in fresh if row[5]})
        self.free.setdefault(slot_bytes, {}).update(dict.fromkeys(free))


class Mirror:
    """Places by name. `order` holds the same pages as a forest, grouped by slot size.

    `seen` is the newest change the mirror knows; -1: nothing, read it all.
    """

    def __init__(self, geometry: Geometry) -> None:
        self.places: dict[PageName, Place] = {}
        self.order: LeafOrder[PageName] = LeafOrder()
        self.expiring: dict[PageName, int] = {}  # when, in ms
        self._dates: list[tuple[int, PageName]] = []  # the same as a heap, and what is not so any more
        self.classes: dict[int, int] = {}  # slot size of each extent that is cut
        self.seen = -1
        self._geometry = geometry
        self._names: dict[int, PageName] = {}
        self._free: dict[int, dict[int, None]] = {}  # numbers of free slots by size, in order

    def has_all(self, names: Sequence[PageName]) -> list[bool]:
        """Which of these pages seem to be there."""
        places = self.places
        return [name in places for name in names]

    def name_in(self, number: int) -> PageName | None:
        """The page in a slot."""
        return self._names.get(number)

    def free_slots(self, slot_bytes: int) -> list[int]:
        """Numbers of slots of this size that seem free."""
        return list(self._free.get(slot_bytes, ()))

    def used_bytes(self) -> int:
        """Bytes of slots that are not free, as far as known. From any thread: looks at sizes only."""
        cut = Counter(dict(self.classes).values())  # extents by the size of their slots
        return sum(
            size * (num * self._geometry.slots_in_extent(size) - len(self._free.get(size, ())))
            for size, num in cut.items()
        )

    def next_free(self, slot_bytes: int, most: int) -> list[int]:
        """Numbers of slots of this size that seem free; they are not offered again."""
        free = self._free.get(slot_bytes, {})
        numbers = list(islice(free, most))
        for number in numbers:
            del free[number]
        return numbers

    def take(self, draft: Draft) -> None:
        """Replace everything. What is looked up meanwhile is as old or as new."""
        draft.order.settle()
        self._names = draft.names
        self.order = draft.order
        self.expiring = draft.expiring
        self._dates = [(expires_ms, name) for name, expires_ms in draft.expiring.items()]
        heapq.heapify(self._dates)
        self.classes = draft.classes
        self._free = draft.free
        self.places = draft.places
        self.seen = -1 if draft.newest is None else draft.newest

    def expired(self, now_ms: int, most: int) -> list[PageName]:
        """Pages whose time is over."""
        found: dict[PageName, int] = {}
        while self._dates and len(found) < most and self._dates[0][0] <= now_ms:
            expires_ms, name = heapq.heappop(self._dates)
            if self.expiring.get(name) == expires_ms:
                found[name] = expires_ms
        for name, expires_ms in found.items():  # until they are gone
            heapq.heappush(self._dates, (expires_ms, name))
        return list(found)

    def remember(self, pages: Sequence[PageRow]) -> None:
        """Pages are live. Where two have one name, the last counts."""
        self.places.update({row[0]: row[2] for row in pages})
        self.order.add_all((row[0], row[1], row[4], row[3]) for row in pages)
        self._names.update({row[2][0]: row[0] for row in pages})
        if self.expiring:
            for row in pages:
                self.expiring.pop(row[0], None)
        for row in pages:
            if row[5]:
                self.expiring[row[0]] = row[5]
                heapq.heappush(self._dates, (row[5], row[0]))

    def remember_free(self, number: int, slot_bytes: int) -> None:
        """A slot is free."""
        self._free.setdefault(slot_bytes, {})[number] = None

    def forget(self, numbers: Iterable[int]) -> None:
        """Slots hold no page any more, and are not free; a page of the same name in another slot stays."""
        for number in numbers:
            free = self._free.get(self.classes.get(self._geometry.extent_of(number), 0))
            if free is not None:
                free.pop(number, None)
            name = self._names.pop(number, None)
            if name is not None:
                place = self.places.get(name)
                if place is not None and place.number == number:
                    del self.places[name]
                    self.expiring.pop(name, None)
                    self.order.remove(name)

    def set_class(self, extent: int, slot_bytes: int) -> None:
        """An extent is cut anew, or (0) not cut any more: what was known of its slots is forgotten."""
        before = self.classes.get(extent, 0)
        if before:
            self.forget(self._geometry.numbers(extent, before))
        if slot_bytes:
            self.classes[extent] = slot_bytes
        else:
            self.classes.pop(extent, None)

    def coldest_extents(self, slot_bytes: int) -> list[tuple[float, int]]:
        """Extents of other slot sizes with the mean priority of their pages, the lowest first. Reads all priorities."""
        found = []
        for extent, size in self.classes.items():
            if size != slot_bytes:
                pages = self.pages_in(extent)
                worth = sum(map(self.order.priority, pages)) / len(pages) if pages else float("-inf")
                found.append((worth, extent))
        return sorted(found)

    def pages_in(self, extent: int) -> list[PageName]:
        """The pages of an extent."""
        numbers = self._geometry.numbers(extent, self.classes.get(extent, 0))
        return [name for number in numbers if (name := self.name_in(number)) is not None]
