"""What a process believes the index to hold: pages, places and who builds on whom, so that most questions cost no SQL.

A hint, as the index itself is; current inside a transaction, where the log has just been read. Look-ups may come from
any thread; changes come one at a time (`local.py` holds the lock).
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from headwater.core.page import NAME_BYTES, PageName
from headwater.policy import LeafOrder
from headwater.storage.slab import SECTOR


class Slot(NamedTuple):
    """A slot, and how often it was given out: what a writer holds."""

    slot: int
    generation: int

    @property
    def offset(self) -> int:
        """Byte offset in the slab."""
        return self.slot * SECTOR


class Place(NamedTuple):
    """Where a page is, and the length of its frame."""

    slot: int
    generation: int
    num_bytes: int

    @property
    def offset(self) -> int:
        """Byte offset in the slab."""
        return self.slot * SECTOR


class Page(NamedTuple):
    """A live page as the index has it."""

    name: PageName
    parent: PageName
    slot: int
    generation: int
    num_bytes: int
    slot_bytes: int
    priority: float

    @classmethod
    def from_row(cls, row: Sequence[object]) -> "Page | None":
        """A page from a row of the index, or None where a damaged index says something impossible."""
        name, parent, slot, generation, num_bytes, slot_bytes, priority = row
        if not (isinstance(name, bytes) and isinstance(parent, bytes) and len(name) == len(parent) == NAME_BYTES):
            return None
        if not (isinstance(slot, int) and isinstance(generation, int) and isinstance(priority, float)):
            return None
        if not (isinstance(num_bytes, int) and isinstance(slot_bytes, int) and 0 < num_bytes <= slot_bytes):
            return None
        return cls(PageName(name), PageName(parent), slot, generation, num_bytes, slot_bytes, priority)


class Mirror:
    """Places by name. `order` holds the same pages as a forest, grouped by slot size.

    `seq` is the newest change the mirror has seen; -1: nothing, read it all.
    """

    def __init__(self) -> None:
        self.places: dict[PageName, Place] = {}
        self.order: LeafOrder[PageName] = LeafOrder()
        self.seq = -1
        self._names: dict[int, PageName] = {}

    def has_all(self, names: Sequence[PageName]) -> list[bool]:
        """Which of these pages seem to be there."""
        places = self.places
        return [name in places for name in names]

    def reload(self, pages: Iterable[Page], seq: int) -> None:
        """Replace everything."""
        rows = list(pages)
        self._names = {row[2]: row[0] for row in rows}
        self.order = LeafOrder.of((row[0], row[1], row[6], row[5]) for row in rows)
        self.places = {row[0]: Place(row[2], row[3], row[4]) for row in rows}
        self.seq = seq

    def remember(self, page: Page) -> None:
        """A page is live."""
        self.places[page.name] = Place(page.slot, page.generation, page.num_bytes)
        self.order.add(page.name, page.parent, page.priority, group=page.slot_bytes)
        self._names[page.slot] = page.name

    def forget(self, slot: int) -> None:
        """A slot holds no page any more; one of the same name in another slot stays."""
        name = self._names.pop(slot, None)
        if name is not None:
            place = self.places.get(name)
            if place is not None and place.slot == slot:
                del self.places[name]
                self.order.remove(name)
