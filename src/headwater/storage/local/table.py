"""The index of a LocalStore, as it lies in the slab: what each slot holds, and which slots changed last.

    record    what a slot holds, and who may touch its bytes: its state, owner, generation and, for a page, its name and
              what it builds on. With a checksum that depends on the slot: a torn or misplaced record is no record
    change    an entry of a ring: the number of a slot whose record changed. `newest` counts all changes ever made, so
              who knows the count at which it last looked reads only what is new
    use       when a page was used last, how often, and what it is worth to the policy

Whoever changes records holds the lock for it (`locks.py`) and says so here first (`busy`): the records, then the
changes, then `newest`, then not busy. A process that dies in between leaves `busy` behind, and the next one repairs
(`catalog.py`). Reading takes no lock and waits for nobody: a record that is being written has a wrong checksum. Uses
are written without a lock as well; one that two processes wrote at once has a wrong checksum, and is unknown.

Not here: what follows from records. The slab's size was checked by who calls.
"""

import struct
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from headwater.storage.local.geometry import (
    CHANGE_BYTES,
    CONTROL_AT,
    EXTENT_BYTES,
    EXTENTS_AT,
    LABEL_BYTES,
    NUM_LABELS,
    OWNERS_AT,
    RECORD_BYTES,
    USE_BYTES,
    Geometry,
)
from headwater.storage.local.locks import MAX_OWNERS
from headwater.storage.local.mirror import PageRow, Place
from headwater.storage.local.records import (
    COLUMNS,
    NO_PAGE,
    PADDED,
    RECORD,
    ROW,
    USE,
    USES,
    PageUse,
    Record,
    RecordRows,
    RecordState,
    UseRows,
    in_state,
    in_time,
)
from headwater.storage.local.slab import Slab, SlabRows
from headwater.storage.local.slab_header import SEALED_BYTES

_EXTENT: Final = struct.Struct("<QQ")
_U64: Final = struct.Struct("<Q")
_LEFT: Final = struct.Struct("<36sHH")
_LABEL: Final = struct.Struct("<Q32s16sH")
_BUSY_AT: Final = CONTROL_AT + 64
_LEFT_AT: Final = CONTROL_AT + 128
_EXTENT_CHANGED: Final = 1 << 31  # in an entry of the ring: not a slot, but how an extent is cut
_SPREAD: Final = 0x9E3779B1
_CHUNK_SLOTS: Final = 4096
_MAX_COUNT: Final = 1 << 62  # of changes or generations: never reached, so what says more is damaged
_MAX_LABEL: Final = LABEL_BYTES - _LABEL.size


_as_place = partial(tuple.__new__, Place)  # a hundred thousand of them: no Python call each


class LeftBehind(NamedTuple):
    """How the directory was left: by which start of the machine, whether in order, and whether all was synced."""

    boot_id: str
    clean: bool
    weak: bool  # somebody wrote without syncing: after a power cut the records may have lost their order


@dataclass(frozen=True, slots=True)
class ExtentSurvey:
    """What the slots of an extent hold. Free and reserved ones: (number, generation). `lost`: not to be believed."""

    slot_bytes: int
    pages: list[PageRow]
    free: list[tuple[int, int]]
    reserved: list[tuple[int, int]]
    lost: list[int]


class Table:
    """The index of an open slab. Calls that change something are for who holds the lock."""

    def __init__(self, slab: Slab) -> None:
        self.slab = slab
        self.geometry: Geometry = slab.geometry
        self._salt = int.from_bytes(slab.header.store_id[:8], "little")
        self._mask = slab.geometry.num_changes - 1
        num_slots = self.geometry.num_slots
        self._records = SlabRows(self.geometry.records_at, RECORD_BYTES, RECORD.size, num_slots)
        self._uses = SlabRows(self.geometry.uses_at, USE_BYTES, USE_BYTES, num_slots)

    # --- records ------------------------------------------------------------------------------------------------------

    def record(self, number: int) -> Record | None:
        """What a slot holds; None where that cannot be believed."""
        raw = self.slab.read(self.geometry.records_at + number * RECORD_BYTES, RECORD.size)
        fields = RECORD.unpack(raw)
        return self._checked(number, fields, raw[8:])

    def set_record(self, number: int, record: Record) -> None:
        """Say what a slot holds."""
        state, owner, generation, *page = record
        body = RECORD.pack(0, generation, state, owner, *page)[8:]
        checksum = _U64.pack(xxh3_64_intdigest(body, seed=self._salt ^ number))
        self.slab.write(self.geometry.records_at + number * RECORD_BYTES, checksum + body)

    def records(self, numbers: range) -> Iterator[tuple[int, Record | None]]:
        """What consecutive slots hold, each as it is when it is read."""
        for start in range(numbers.start, numbers.stop, _CHUNK_SLOTS):
            count = min(_CHUNK_SLOTS, numbers.stop - start)
            raw = self.slab.read(self.geometry.records_at + start * RECORD_BYTES, count * RECORD_BYTES)
            view = memoryview(raw)
            for i, fields in enumerate(PADDED.iter_unpack(raw)):
                at = i * RECORD_BYTES
                yield start + i, self._checked(start + i, fields, view[at + 8 : at + RECORD.size])

    def rows(self, numbers: Sequence[int]) -> tuple[RecordRows, npt.NDArray[np.bool_]]:
        """`record` of many: what these slots hold, and of which of them that can be believed."""
        raw, size = self.slab.read_rows(self._records, numbers), RECORD.size
        rows = np.frombuffer(raw, ROW)
        right: npt.NDArray[np.bool_] = rows["check"] == self._checks(raw, numbers, size, 8, size)
        return rows, right & (rows["generation"] < _MAX_COUNT)

    def set_rows(self, numbers: Sequence[int], rows: RecordRows) -> None:
        """`set_record` of many, one after the other. Mutates `rows`: gives them their checksums."""
        rows["check"] = self._checks(rows.tobytes(), numbers, RECORD.size, 8, RECORD.size)
        self.slab.write_rows(self._records, numbers, rows.tobytes())

    def _checks(self, raw: bytes, numbers: Sequence[int], pitch: int, start: int, end: int) -> npt.NDArray[np.uint64]:
        """Checksums of raw[start:end] of each place."""
        salt, begins = self._salt, range(0, pitch * len(numbers), pitch)
        return np.array(
            [
                xxh3_64_intdigest(raw[at + start : at + end], seed=salt ^ number)
                for at, number in zip(begins, numbers, strict=True)
            ],
            np.uint64,
        )

    def _checked(self, number: int, fields: tuple[Any, ...], body: bytes | memoryview) -> Record | None:
        _, generation, state, owner, *page = fields
        if fields[0] != xxh3_64_intdigest(body, seed=self._salt ^ number) or generation >= _MAX_COUNT:
            return None
        return Record(state, owner, generation, *page)

    # --- uses ---------------------------------------------------------------------------------------------------------

    def use(self, number: int) -> PageUse | None:
        """When a slot's page was used; None where that is not known."""
        raw = self.slab.read(self.geometry.uses_at + number * USE_BYTES, USE_BYTES)
        used_s, priority, hits, check = USE.unpack(raw)
        right = check == xxh3_64_intdigest(raw[:24], seed=self._salt ^ number)
        return PageUse(used_s, priority, hits) if right and isfinite(used_s) and isfinite(priority) else None

    def set_use(self, number: int, use: PageUse) -> None:
        """Say that a page was used. Needs no lock."""
        body = USE.pack(*use, 0)[:24]
        check = _U64.pack(xxh3_64_intdigest(body, seed=self._salt ^ number))
        self.slab.write(self.geometry.uses_at + number * USE_BYTES, body + check)

    def uses(self, numbers: Sequence[int]) -> tuple[UseRows, npt.NDArray[np.bool_]]:
        """`use` of many: when these slots' pages were used, and of which of them that is known."""
        raw = self.slab.read_rows(self._uses, numbers)
        uses = np.frombuffer(raw, USES)
        known: npt.NDArray[np.bool_] = uses["check"] == self._checks(raw, numbers, USE_BYTES, 0, 24)
        return uses, known & np.isfinite(uses["used_s"]) & np.isfinite(uses["priority"])

    def set_uses(self, numbers: Sequence[int], uses: UseRows) -> None:
        """`set_use` of many. Mutates `uses`: gives them their checksums."""
        uses["check"] = self._checks(uses.tobytes(), numbers, USE_BYTES, 0, 24)
        self.slab.write_rows(self._uses, numbers, uses.tobytes())

    def priorities(self, numbers: Sequence[int], now_s: float) -> npt.NDArray[np.float64]:
        """The priority of what is in each slot; that of a page used now where it is not known."""
        return in_time(*self.uses(numbers), now_s)

    def pages(self, numbers: Sequence[int], rows: RecordRows, priorities: npt.NDArray[np.float64]) -> list[PageRow]:
        """The pages that these slots hold, whose records say that they do."""
        generations, sizes, depths, expires_ms = (
            rows[field].tolist() for field in ("generation", "slot_bytes", "depth", "expires_ms")
        )
        offsets = self.geometry.offsets(numbers, rows["slot_bytes"]).tolist()
        places = zip(numbers, generations, offsets, rows["num_bytes"].tolist(), strict=True)
        names = rows["name"].tolist()
        parents = [name if depth else NO_PAGE for name, depth in zip(rows["parent"].tolist(), depths, strict=True)]
        return list(
            zip(names, parents, map(_as_place, places), sizes, priorities.tolist(), expires_ms, depths, strict=True)
        )

    def survey(self, extent: int, slot_bytes: int, now_s: float) -> "ExtentSurvey":
        """What all slots of an extent hold, each as it is when it is read: for who wants to know everything, fast.

        Uses count as not ahead of `now_s`.
        """
        numbers = self.geometry.numbers(extent, slot_bytes)
        rows, right = self.rows(numbers)
        right &= (rows["slot_bytes"] == slot_bytes) & (rows["num_bytes"] <= slot_bytes)
        right &= rows["state"] < len(RecordState)
        live = right & in_state(rows, RecordState.LIVE)
        first = numbers.start
        generations = rows["generation"].tolist()
        pages = self.pages((first + np.flatnonzero(live)).tolist(), rows[live], self.priorities(numbers, now_s)[live])
        free, reserved = (
            [(first + i, generations[i]) for i in np.flatnonzero(right & in_state(rows, state)).tolist()]
            for state in (RecordState.FREE, RecordState.RESERVED)
        )
        return ExtentSurvey(slot_bytes, pages, free, reserved, (first + np.flatnonzero(~right)).tolist())

    def reserved_by(self, owners: Collection[int], extent: int, slot_bytes: int) -> list[tuple[int, Record]]:
        """The slots of an extent that these owners have reserved."""
        numbers = self.geometry.numbers(extent, slot_bytes)
        raw = self.slab.read(self.geometry.records_at + numbers.start * RECORD_BYTES, len(numbers) * RECORD_BYTES)
        columns = np.frombuffer(raw, COLUMNS)
        theirs = in_state(columns, RecordState.RESERVED) & np.isin(columns["owner"], list(owners))
        found = [(number, self.record(number)) for number in (numbers.start + np.flatnonzero(theirs)).tolist()]
        return [
            (number, record)
            for number, record in found
            if record is not None and record.state == RecordState.RESERVED and record.owner in owners
        ]

    # --- changes ------------------------------------------------------------------------------------------------------

    def newest(self) -> int | None:
        """How many changes were ever made; None where that cannot be believed."""
        count = self.slab.header.unseal(self.slab.read(CONTROL_AT, SEALED_BYTES))
        return count if count is not None and count < _MAX_COUNT else None

    def set_newest(self, count: int) -> None:
        """Tell everybody of the changes up to this one."""
        self.slab.write(CONTROL_AT, self.slab.header.seal(count))

    def tell(self, after: int, numbers: Iterable[int], extents: Iterable[int]) -> int:
        """Write the changes behind number `after` into the ring. Returns the count to set `newest` to."""
        entries = np.array([*numbers, *(_EXTENT_CHANGED | extent for extent in extents)], np.uint64)
        told = np.empty((len(entries), 2), "<u4")
        told[:, 0] = entries
        told[:, 1] = _change_checks(after + 1, entries)
        done = 0
        for at, num in self._in_ring(after + 1, len(entries)):
            self.slab.write(at, told[done : done + num].tobytes())
            done += num
        return after + len(entries)

    def changes(self, first: int, last: int) -> list[int] | None:
        """What the changes from number `first` to `last` are about; None if the ring has gone on, or is damaged.

        Numbers of slots; of an extent, as `changed_extent` knows it.
        """
        raw = b"".join([self.slab.read(at, num * CHANGE_BYTES) for at, num in self._in_ring(first, last + 1 - first)])
        told = np.frombuffer(raw, "<u4").reshape(-1, 2)
        entries = told[:, 0].astype(np.uint64)
        extents = entries & np.uint64(_EXTENT_CHANGED) != 0
        most = np.where(extents, _EXTENT_CHANGED + self.geometry.num_extents, self.geometry.num_slots)
        if not ((told[:, 1] == _change_checks(first, entries)) & (entries < most)).all():
            return None
        numbers: list[int] = entries.tolist()
        return numbers

    def _in_ring(self, first: int, number: int) -> Iterator[tuple[int, int]]:
        """Where so many entries of the ring lie, and how many side by side."""
        while number:
            at = first & self._mask
            num = min(number, self._mask + 1 - at)
            yield self.geometry.changes_at + at * CHANGE_BYTES, num
            first, number = first + num, number - num

    @property
    def busy(self) -> bool:
        """Whether somebody changes records, or died while he did."""
        return any(self.slab.read(_BUSY_AT, _U64.size))

    def set_busy(self, owner: int) -> None:
        """Say that this owner changes records; 0: nobody."""
        self.slab.write(_BUSY_AT, _U64.pack(owner))

    # --- extents, owners, labels, how it was left ---------------------------------------------------------------------

    def classes(self) -> dict[int, int]:
        """Slot size of each extent that is cut."""
        num_extents = self.geometry.num_extents
        raw = self.slab.read(EXTENTS_AT, num_extents * EXTENT_BYTES)
        found = {}
        for extent, (slot_bytes, check) in enumerate(_EXTENT.iter_unpack(raw)):
            if check == self._extent_check(extent, slot_bytes) and self.geometry.slots_in_extent(slot_bytes):
                found[extent] = slot_bytes
        return found

    def extent(self, extent: int) -> int | None:
        """Slot size of an extent, 0 where it is not cut; None where that cannot be believed."""
        slot_bytes, check = _EXTENT.unpack(self.slab.read(EXTENTS_AT + extent * EXTENT_BYTES, EXTENT_BYTES))
        if check != self._extent_check(extent, slot_bytes):
            return None
        return slot_bytes if not slot_bytes or self.geometry.slots_in_extent(slot_bytes) else None

    def set_extent(self, extent: int, slot_bytes: int) -> None:
        """Say how an extent is cut; 0: not at all."""
        entry = _EXTENT.pack(slot_bytes, self._extent_check(extent, slot_bytes))
        self.slab.write(EXTENTS_AT + extent * EXTENT_BYTES, entry)

    def _extent_check(self, extent: int, slot_bytes: int) -> int:
        return xxh3_64_intdigest(_EXTENT.pack(extent, slot_bytes), seed=self._salt)

    def owners(self) -> list[int]:
        """The owners that have enrolled and not left: open stores, and dead ones."""
        raw = self.slab.read(OWNERS_AT, MAX_OWNERS + 1)
        return [owner for owner in range(1, MAX_OWNERS + 1) if raw[owner]] if any(raw) else []

    def set_owner(self, owner: int, *, enrolled: bool) -> None:
        """Say that an owner enrolled, or left."""
        self.slab.write(OWNERS_AT + owner, bytes([enrolled]))

    def forget_owners(self) -> None:
        """For who is alone."""
        self.slab.write(OWNERS_AT, bytes(MAX_OWNERS + 1))

    def left(self) -> LeftBehind:
        """How the directory was left."""
        raw = self.slab.read(_LEFT_AT, _LEFT.size + 8)
        boot_id, clean, weak = _LEFT.unpack(raw[:-8])
        if _U64.unpack(raw[-8:])[0] != xxh3_64_intdigest(raw[:-8], seed=self._salt):
            return LeftBehind("", clean=False, weak=True)
        return LeftBehind(boot_id.rstrip(b"\0").decode("ascii", "replace"), clean=bool(clean), weak=bool(weak))

    def set_left(self, left: LeftBehind) -> None:
        """Say how the directory is left, should this be the end."""
        body = _LEFT.pack(left.boot_id.encode()[:36], left.clean, left.weak)
        self.slab.write(_LEFT_AT, body + _U64.pack(xxh3_64_intdigest(body, seed=self._salt)))

    def labels(self) -> dict[tuple[bytes, bytes], str]:
        """Names for people, by identity and tenant."""
        return {(one[0], one[1]): one[2] for one in self._labels() if one is not None}

    def set_label(self, identity: bytes, tenant: bytes, text: str) -> None:
        """Give an identity and tenant a name; when all places are taken, the name of another one goes."""
        found = self._labels()
        same = [i for i, one in enumerate(found) if one is not None and one[:2] == (identity, tenant)]
        empty = [i for i, one in enumerate(found) if one is None]
        at = (same or empty or [int.from_bytes(identity[:4], "little") % NUM_LABELS])[0]
        encoded = text.encode(errors="replace")[:_MAX_LABEL].decode(errors="ignore").encode()
        body = _LABEL.pack(0, identity, tenant, len(encoded))[8:] + encoded
        raw = _U64.pack(xxh3_64_intdigest(body, seed=self._salt)) + body
        self.slab.write(self.geometry.labels_at + at * LABEL_BYTES, raw.ljust(LABEL_BYTES, b"\0"))

    def _labels(self) -> list[tuple[bytes, bytes, str] | None]:
        raw = self.slab.read(self.geometry.labels_at, NUM_LABELS * LABEL_BYTES)
        found: list[tuple[bytes, bytes, str] | None] = []
        for at in range(0, len(raw), LABEL_BYTES):
            check, identity, tenant, length = _LABEL.unpack_from(raw, at)
            end = at + _LABEL.size + min(length, _MAX_LABEL)
            right = check == xxh3_64_intdigest(raw[at + 8 : end], seed=self._salt)
            text = raw[at + _LABEL.size : end].decode(errors="replace")
            found.append((identity, tenant, text) if right else None)
        return found


def changed_extent(entry: int) -> int | None:
    """The extent that an entry of the ring is about; None: it is the number of a slot."""
    return entry ^ _EXTENT_CHANGED if entry & _EXTENT_CHANGED else None


def _change_checks(first: int, entries: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Of changes that are numbered from `first` on. What products lose above 64 bits is not in the 32 that count."""
    counts = np.arange(first, first + len(entries), dtype=np.uint64)
    mixed = entries * np.uint64(_SPREAD) ^ counts * np.uint64(0x85EBCA6B) ^ np.uint64(0x5A5A5A5A)
    return mixed & np.uint64(0xFFFFFFFF)
