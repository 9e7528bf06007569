"""Where things are in a slab file, and how a byte limit is divided: pure arithmetic.

    offset              what
         0    4 KiB     header, copy A    magic, version, store id, epoch, policy, limit, checksum
      4096    4 KiB     header, copy B
      8192    4 KiB     control           newest change, who is changing, how the store was left (`table.py`)
     12288    4 KiB     owners            a byte for each open store
     16384    n x 16    extents           how each extent is cut, and a checksum
       ...    16 KiB    labels            names for people
       ...    n x 8     changes           a ring: which slots changed last
       ...    n x 256   records           what each slot holds
       ...    n x 32    uses              when each slot was used last, and what it is worth
       ...              extents           each cut into slots of one size, so pages of different layouts share one limit

Everything follows from the limit: a header that says otherwise is not believed. So the arithmetic here is part of the
format, and another one needs another version.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from headwater.core.errors import StoreUnavailable

SECTOR: Final = 4096
CONTROL_AT: Final = 2 * SECTOR
OWNERS_AT: Final = 3 * SECTOR
EXTENTS_AT: Final = 4 * SECTOR
EXTENT_BYTES: Final = 16  # of an entry
LABEL_BYTES: Final = 256
NUM_LABELS: Final = 64
CHANGE_BYTES: Final = 8
RECORD_BYTES: Final = 256
USE_BYTES: Final = 32

_BYTES_PER_SLOT: Final = 1 << 16  # of the limit: a record for pages of this size; smaller ones leave room unused
_MIN_SLOTS: Final = 4096
_MIN_CHANGES: Final = 4096
_MAX_CHANGES: Final = 1 << 20
_MIN_EXTENTS: Final = 16
_MAX_EXTENT: Final = 1 << 30
_BOOKS_SHARE: Final = 1 << 14  # of the limit, and
_BOOKS_SECTORS: Final = 4  # are left for the file system's books of where a file's pieces lie: they take disk too
_MAX_BYTES: Final = 1 << 46  # so that a slot's number fits into an entry of the ring of changes


@dataclass(frozen=True, slots=True)
class Geometry:
    """Offsets and sizes of one slab."""

    limit_bytes: int
    file_bytes: int
    extent_bytes: int
    num_extents: int
    max_slots: int  # per extent: bounds the index, whatever the page size
    num_changes: int  # that the ring holds: a power of two
    labels_at: int
    changes_at: int
    records_at: int
    uses_at: int
    data_at: int

    @classmethod
    def plan(cls, limit_bytes: int) -> "Geometry":
        """The slab of a directory with this limit: the file is all there is, and never grows.

        Sixteen extents or more, each at most 1 GiB: few and large, because an extent loses what does not fill a slot;
        many enough that layouts can share. Raises StoreUnavailable where nothing fits.
        """
        file_bytes = (limit_bytes - limit_bytes // _BOOKS_SHARE) // SECTOR * SECTOR - _BOOKS_SECTORS * SECTOR
        if limit_bytes >= _MAX_BYTES:
            raise StoreUnavailable(f"a limit of {limit_bytes} bytes is more than one slab takes: choose a lower limit")
        most_slots = max(_MIN_SLOTS, limit_bytes // _BYTES_PER_SLOT)
        num_changes = min(max(_MIN_CHANGES, 1 << (2 * most_slots - 1).bit_length()), _MAX_CHANGES)
        usable = file_bytes - EXTENTS_AT - SECTOR - NUM_LABELS * LABEL_BYTES - num_changes * CHANGE_BYTES
        usable -= most_slots * (RECORD_BYTES + USE_BYTES) + 2 * SECTOR
        extent_bytes = min(_MAX_EXTENT, usable // _MIN_EXTENTS // SECTOR * SECTOR)
        if extent_bytes < 16 * SECTOR:
            raise StoreUnavailable(f"a limit of {limit_bytes} bytes is too small to hold pages")
        num_extents = usable // extent_bytes
        while (found := cls._with(limit_bytes, file_bytes, extent_bytes, num_extents, most_slots, num_changes)) is None:
            num_extents -= 1
        return found

    @classmethod
    def _with(
        cls, limit_bytes: int, file_bytes: int, extent_bytes: int, num_extents: int, most_slots: int, num_changes: int
    ) -> "Geometry | None":
        max_slots = most_slots // num_extents
        num_slots = num_extents * max_slots
        labels_at = EXTENTS_AT + sectors(num_extents * EXTENT_BYTES)
        changes_at = labels_at + NUM_LABELS * LABEL_BYTES
        records_at = changes_at + sectors(num_changes * CHANGE_BYTES)
        uses_at = records_at + sectors(num_slots * RECORD_BYTES)
        data_at = uses_at + sectors(num_slots * USE_BYTES)
        if data_at + num_extents * extent_bytes > file_bytes:
            return None
        return cls(
            limit_bytes=limit_bytes,
            file_bytes=file_bytes,
            extent_bytes=extent_bytes,
            num_extents=num_extents,
            max_slots=max_slots,
            num_changes=num_changes,
            labels_at=labels_at,
            changes_at=changes_at,
            records_at=records_at,
            uses_at=uses_at,
            data_at=data_at,
        )

    @property
    def num_slots(self) -> int:
        """Records there are; slots of large pages are fewer."""
        return self.num_extents * self.max_slots

    def slots_in_extent(self, slot_bytes: int) -> int:
        """How many slots of this size one extent is cut into; 0 for a size that does not fit, or makes no sense."""
        if slot_bytes < SECTOR or slot_bytes % SECTOR:
            return 0
        return min(self.extent_bytes // slot_bytes, self.max_slots)

    def numbers(self, extent: int, slot_bytes: int) -> range:
        """The numbers of an extent's slots."""
        first = extent * self.max_slots
        return range(first, first + self.slots_in_extent(slot_bytes))

    def extent_of(self, number: int) -> int:
        """The extent in which a slot lies."""
        return number // self.max_slots

    def offset(self, number: int, slot_bytes: int) -> int:
        """Byte offset of a slot in the file."""
        extent, index = divmod(number, self.max_slots)
        return self.data_at + extent * self.extent_bytes + index * slot_bytes

    def offsets(self, numbers: Sequence[int], slot_bytes: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """`offset` of many."""
        extents, indices = np.divmod(np.asarray(numbers, np.int64), self.max_slots)
        offsets: npt.NDArray[np.int64] = (
            self.data_at + extents * self.extent_bytes + indices * slot_bytes.astype(np.int64)
        )
        return offsets


def sectors(num_bytes: int) -> int:
    """A size rounded up to whole sectors: the slot that a frame needs."""
    return -(-num_bytes // SECTOR) * SECTOR
