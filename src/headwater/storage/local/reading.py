"""How pages are read out of a slab: in pieces, by several threads, each page looked at once more when it is there.

Order of a read: copy, then look whether the slot still holds what was copied. It takes no lock between processes: a
lost race is tried once more, then a miss. On a disk the work is cut into units of a MiB and more, so that one large
page keeps several readers busy, and small pages do not cost a turn each. Whoever reads the last unit of a page looks at
it.
Not here: what the bytes are worth (`verified.py`), and whose threads these are (`readers.py`).

Invariant: a page's result is set once, when nobody reads into its buffer any more.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from headwater.core.page import PageName
from headwater.core.results import Status
from headwater.layout.frame import PREFIX_BYTES, claims
from headwater.storage.base import Deadline
from headwater.storage.local.attachment import Attachment
from headwater.storage.local.mirror import Place
from headwater.storage.readers import Readers

UNIT_BYTES: Final = 1 << 20  # at least, that a reader takes at a time: some hundred microseconds
SHARE_BYTES: Final = 1 << 20  # of a call for each reader: to wake one for less costs more than it brings
_TURNS: Final = 4  # of each reader in a call: so they end at about the same time


class Pieces(NamedTuple):
    """Where the pieces of each page end, and who hears that one is there: (page, piece)."""

    ends: Sequence[int]
    arrived: Callable[[int, int], None]


class _Part(NamedTuple):
    """Some pieces of a page, one behind the other."""

    page: int
    first: int
    end: int


class PageReading:
    """One call's reads."""

    def __init__(
        self,
        at: Attachment,
        pages: Sequence[tuple[PageName, memoryview]],
        results: list[Status],
        deadline: Deadline,
        pieces: Pieces | None = None,
    ) -> None:
        """`results`, one per page, are set as they come: who gives up half-way has those of before."""
        self._at = at
        self._pages = pages
        self._results = results
        self._deadline = deadline
        self._pieces = pieces
        self._places: dict[int, Place] = {}  # of pages that are to be read, by their number in the call
        self._faults: dict[int, Status] = {}  # of those of which a part could not be read
        self._num_left: dict[int, int] = {}  # parts of each page
        self._unit_bytes = UNIT_BYTES
        self._lock = threading.Lock()  # around what threads share

    def run(self, readers: Readers, *, use: bool) -> None:
        """Read. Blocks. With `use` that counts as one. Raises StoreError, when nobody reads any more; or ReadStuck."""
        at, names = self._at, [name for name, _ in self._pages]
        if not all(at.catalog.mirror.has_all(names)):
            at.refresh(self._deadline)
        for i in range(len(names)):
            found = self._find(i)
            if isinstance(found, Status):
                self._results[i] = found
            else:
                self._places[i] = found
        num_bytes = sum(len(self._pages[i][1]) for i in self._places)
        most = 1 if at.slab.mapped else min(readers.num_readers, 1 + num_bytes // SHARE_BYTES)
        self._unit_bytes = max(UNIT_BYTES, num_bytes if most == 1 else num_bytes // (most * _TURNS))
        units = list(self._units())
        readers.run(
            lambda unit: self._read_unit(units[unit]), len(units), deadline=self._deadline, most=most, hurry=use
        )
        if use:
            places = at.catalog.mirror.places
            hits = [name for name, status in zip(names, self._results, strict=True) if status is Status.HIT]
            at.catalog.recency.touch([place for name in hits if (place := places.get(name)) is not None])
        at.flush_touches()

    def _find(self, i: int) -> Place | Status:
        name, buffer = self._pages[i]
        place = self._at.catalog.mirror.places.get(name)
        if place is None:
            return Status.MISS
        if self._deadline.expired:
            return Status.LATE
        return place if len(buffer) == place.num_bytes else Status.SHORT

    def _ends(self, i: int) -> Sequence[int]:
        if self._pieces is not None:
            return self._pieces.ends
        size, unit_bytes = len(self._pages[i][1]), self._unit_bytes
        return [*range(unit_bytes, size - unit_bytes // 2, unit_bytes), size]

    def _units(self) -> Iterator[list[_Part]]:
        """All pieces of all pages, in order, some at a time. Counts how many parts each page has."""
        unit: list[_Part] = []
        most_bytes = self._unit_bytes
        size = 0
        for i in self._places:
            first, start = 0, 0
            ends = self._ends(i)
            self._num_left[i] = 0
            for piece, end in enumerate(ends, 1):
                size += end - start
                start = end
                if size >= most_bytes or piece == len(ends):
                    unit.append(_Part(i, first, piece))
                    self._num_left[i] += 1
                    first = piece
                if size >= most_bytes:
                    yield unit
                    unit, size = [], 0
        if unit:
            yield unit

    def _read_unit(self, unit: Sequence[_Part]) -> None:
        for part in unit:
            i = part.page
            fault = self._read_part(part, self._places[i])
            with self._lock:
                if fault is not None:
                    self._faults[i] = fault
                self._num_left[i] -= 1
                last = not self._num_left[i]
            if last:
                self._results[i] = self._faults[i] if i in self._faults else self._look_at(i)

    def _read_part(self, part: _Part, place: Place) -> Status | None:
        """Read pieces of a page. Returns what went wrong."""
        i, first, end = part
        if self._deadline.expired:
            return Status.LATE
        if i in self._faults:
            return self._faults[i]
        buffer, ends = self._pages[i][1], self._ends(i)
        start = ends[first - 1] if first else 0
        for piece in range(first, end):
            if not self._at.slab.read_into(place.offset + start, buffer[start : ends[piece]]):
                return Status.SHORT
            start = ends[piece]
            if self._pieces is not None:
                self._pieces.arrived(i, piece)
        return None

    def _look_at(self, i: int) -> Status:
        """What a page is, of which all parts are there; once more if another process moved it under us."""
        for again in (True, False):
            status = self._verdict(i, self._places[i])
            if status is not None:
                return status
            if not self._at.refresh(self._deadline):
                return Status.LATE
            if again:
                found = self._find(i)
                if isinstance(found, Status):
                    return found
                self._places[i] = found
                fault = self._read_part(_Part(i, 0, len(self._ends(i))), found)
                if fault is not None:
                    return fault
        return Status.MISS

    def _verdict(self, i: int, place: Place) -> Status | None:
        """HIT, if the slot holds what was read; None: another process changed it meanwhile."""
        name, buffer = self._pages[i]
        if claims(buffer, name) and self._at.slab.starts_with(place.offset, buffer[:PREFIX_BYTES]):
            return Status.HIT
        if self._at.catalog.follower.stands_by(place):
            return Status.HIT  # the index stands by it: what is wrong with the bytes, their verifier will say
        return None
