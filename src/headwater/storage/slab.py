"""One allocated file that holds pages: header, extent table, then extents of equal slots.

    offset            what
         0   4 KiB    header, copy A   magic, version, store id, epoch, sizes, checksum
      4096   4 KiB    header, copy B
      8192   4 KiB    high-water mark  newest change the index knew when a page was last published
     12288   n KiB    extent table     per extent: slot size and a checksum
      data            extents          each cut into slots of one size, so pages of different layouts share one limit

The slab knows offsets and bytes, nothing of names: which slot holds what is the catalog's business, and what a page is
the page says itself. Invariants: the file is allocated, never sparse (rule 11); its size is checked before each batch;
the epoch is checked before each write (rule 10).

On tmpfs it is mapped (fast, and a copy engine can address it); on a disk, where a fault would be a signal and not an
error, it is read with pread and written with pwrite.
"""

import contextlib
import dataclasses
import errno
import mmap
import os
import secrets
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from xxhash import xxh3_64_intdigest

from headwater.core.errors import StoreDamaged, StoreUnavailable
from headwater.storage.directory import free_bytes

MAGIC: Final = b"HWSLAB\0\0"
VERSION: Final = 1
SECTOR: Final = 4096
MARK_AT: Final = 2 * SECTOR
TABLE_AT: Final = 3 * SECTOR
_HEADER: Final = struct.Struct("<8sI4x16sQ16sQQQII")  # magic, version, id, epoch, policy, then Geometry
_EPOCH_AT: Final = 32
_MARK: Final = struct.Struct("<QQ")
_ENTRY: Final = struct.Struct("<QQ")
_U64: Final = struct.Struct("<Q")
_CHUNK: Final = 64 << 20
_ZEROS: Final = bytes(SECTOR)
_MADV_POPULATE_WRITE: Final = 23

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Geometry:
    """Where things are in a slab, and the limit of the directory it was made for."""

    limit_bytes: int
    file_bytes: int
    extent_bytes: int
    num_extents: int
    max_slots: int  # per extent: bounds the index, whatever the page size

    @property
    def data_at(self) -> int:
        """Offset of the first extent."""
        return TABLE_AT + -(-self.num_extents * _ENTRY.size // SECTOR) * SECTOR

    @classmethod
    def plan(cls, limit_bytes: int, *, index_bytes: int, max_slots: int) -> "Geometry":
        """Sixteen extents or more, each a multiple of the sector and at most 1 GiB.

        Few and large, because an extent loses what does not fill a slot; many enough that layouts can share.
        """
        file_bytes = (limit_bytes - index_bytes) // SECTOR * SECTOR
        usable = file_bytes - TABLE_AT - SECTOR
        extent_bytes = min(1 << 30, usable // 16 // SECTOR * SECTOR)
        if extent_bytes < 16 * SECTOR:
            raise StoreUnavailable(f"a slab of {file_bytes} bytes is too small to hold pages")
        num_extents = usable // extent_bytes
        while TABLE_AT + -(-num_extents * _ENTRY.size // SECTOR) * SECTOR + num_extents * extent_bytes > file_bytes:
            num_extents -= 1
        return cls(limit_bytes, file_bytes, extent_bytes, num_extents, max(1, max_slots // num_extents))

    def slots_in_extent(self, slot_bytes: int) -> int:
        """How many slots of this size one extent is cut into; 0 where a page does not fit."""
        return min(self.extent_bytes // slot_bytes, self.max_slots)

    def extent_offset(self, extent: int) -> int:
        """Byte offset of an extent in the file."""
        return self.data_at + extent * self.extent_bytes

    def has_slot(self, offset: int, slot_bytes: int) -> bool:
        """Whether a slot of this size can begin here: an index that was damaged might say anything."""
        extent, inside = divmod(offset - self.data_at, self.extent_bytes)
        index, rest = divmod(inside, slot_bytes)
        return 0 <= extent < self.num_extents and rest == 0 and index < self.slots_in_extent(slot_bytes)


@dataclass(frozen=True, slots=True)
class SlabHeader:
    """What both header copies say: which store this is, its settings, its epoch."""

    store_id: bytes
    epoch: int
    policy: str  # the eviction policy, by name; an ASCII word of at most 16 letters
    geometry: Geometry

    def encode(self) -> bytes:
        """One sector."""
        name = self.policy.encode("ascii").ljust(16, b"\0")
        body = _HEADER.pack(MAGIC, VERSION, self.store_id, self.epoch, name, *dataclasses.astuple(self.geometry))
        body = body.ljust(SECTOR - _U64.size, b"\0")  # checksummed to the end: a later version may say more
        return body + _U64.pack(xxh3_64_intdigest(body))


class Slab:
    """An open slab file. Not safe to close while another thread copies: `local.py` counts who is inside."""

    def __init__(self, path: Path, fd: int, header: SlabHeader, *, mapped: bool) -> None:
        geometry = header.geometry
        self.path = path
        self.geometry = geometry
        self.store_id = header.store_id
        self.policy = header.policy
        self.epoch = header.epoch
        self.repaired = False  # it was cut, and what was lost reads zero: an index of it is worth nothing
        self._fd = fd
        self._map = mmap.mmap(fd, geometry.file_bytes) if mapped else None
        self._view = memoryview(self._map) if self._map is not None else None

    @classmethod
    def create(
        cls, path: Path, geometry: Geometry, *, policy: str, mapped: bool, progress: Progress | None = None
    ) -> "Slab":
        """Allocate a new slab, replacing what is there. Raises StoreUnavailable where there is no room."""
        header = SlabHeader(secrets.token_bytes(16), 1, policy, geometry)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            _allocate(fd, path, geometry.file_bytes, progress)
            slab = cls(path, fd, header, mapped=mapped)
            slab.set_epoch(header.epoch)
        except BaseException:
            os.close(fd)
            raise
        return slab

    @classmethod
    def open(cls, path: Path, *, mapped: bool, repair: bool, progress: Progress | None = None) -> "Slab":
        """Open an existing slab. With `repair` a cut file gets its full size again; the lost part reads zero.

        Raises StoreDamaged when neither header can be believed or the file is short, FileNotFoundError when there is
        none, StoreUnavailable for another version.
        """
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            header = _read_header(fd, path)
            size = header.geometry.file_bytes
            whole = os.fstat(fd).st_size == size
            if not whole:
                if not repair:
                    raise StoreDamaged(f"{path} is not {size} bytes long: it was cut or grown")
                os.truncate(fd, min(os.fstat(fd).st_size, size))
            if repair:  # also fills holes that someone punched, and a header of which one copy is left
                _allocate(fd, path, size, progress)
                for at in (0, SECTOR):
                    os.pwrite(fd, header.encode(), at)
            slab = cls(path, fd, header, mapped=mapped)
            slab.repaired = not whole
            return slab
        except BaseException:
            os.close(fd)
            raise

    @property
    def mapped(self) -> bool:
        """Whether pages have an address."""
        return self._view is not None

    @property
    def medium(self) -> str:
        """Where it lies, as counters tell it."""
        return "memory" if self.mapped else "disk"

    def require_whole(self) -> None:
        """Raise StoreDamaged if the file was cut, unlinked or belongs to another epoch. Costs two calls."""
        stat = os.fstat(self._fd)
        if stat.st_size != self.geometry.file_bytes or stat.st_nlink == 0:
            raise StoreDamaged(f"{self.path} was cut, grown or removed under this process")
        if self._read_u64(_EPOCH_AT) != self.epoch:
            raise StoreDamaged(f"{self.path} has another epoch: its index was rebuilt or an old file was put back")

    def view(self, offset: int, num_bytes: int) -> memoryview:
        """The memory of a slot; only where `mapped`."""
        if self._view is None or not 0 <= offset <= self.geometry.file_bytes - num_bytes:
            raise StoreDamaged(f"{self.path} has no {num_bytes} bytes with an address at {offset}")
        return self._view[offset : offset + num_bytes]

    @property
    def memory(self) -> memoryview | None:
        """The whole mapping, where there is one; who holds it keeps it mapped."""
        return self._view[:] if self._view is not None else None

    def read_into(self, offset: int, buffer: memoryview) -> bool:
        """Copy bytes out. False where the file ends early."""
        if not 0 <= offset <= self.geometry.file_bytes - len(buffer):
            return False
        if self._view is not None:
            buffer[:] = self._view[offset : offset + len(buffer)]
            return True
        done = 0
        while done < len(buffer):
            try:
                got = os.preadv(self._fd, [buffer[done:]], offset + done)
            except OSError:  # a bad sector is a miss
                return False
            if got == 0:
                return False
            done += got
        return True

    def starts_with(self, offset: int, stamp: memoryview | bytes) -> bool:
        """Whether the bytes at `offset` still are `stamp`."""
        if self._view is not None:
            return offset >= 0 and self._view[offset : offset + len(stamp)] == stamp
        now = memoryview(bytearray(len(stamp)))
        return self.read_into(offset, now) and now == stamp

    def write(self, offset: int, data: memoryview) -> None:
        """Copy bytes in. Raises StoreDamaged if there is no such place, or the medium refuses."""
        if not 0 <= offset <= self.geometry.file_bytes - len(data):
            raise StoreDamaged(f"{self.path} has no {len(data)} bytes at {offset}")
        if self._view is not None:
            self._view[offset : offset + len(data)] = data
            return
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(self._fd, data[done:], offset + done)
        except OSError as error:
            raise StoreDamaged(f"cannot write to {self.path}: {error.strerror}") from error

    def write_frame(self, offset: int, frame: memoryview, header_bytes: int) -> None:
        """Write a frame so that a crash at any point leaves no valid header over other bytes: wipe, payload, header."""
        self.wipe(offset)
        self.write(offset + header_bytes, frame[header_bytes:])
        self.write(offset, frame[:header_bytes])

    def wipe(self, offset: int) -> None:
        """Make whatever page is at `offset` unreadable, so that no rebuild brings it back.

        A whole sector: a smaller write would have the kernel read that sector from the disk first.
        """
        if offset < self.geometry.data_at:
            raise StoreDamaged(f"{self.path} has no slot at {offset}")
        self.write(offset, memoryview(_ZEROS))

    def sync(self) -> None:
        """Force written pages to the medium. Raises StoreDamaged if it cannot."""
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise StoreDamaged(f"cannot sync {self.path}: {error.strerror}") from error

    def extent_slot_bytes(self, extent: int) -> int:
        """Slot size an extent is cut into; 0 for one that is unused or whose entry is damaged."""
        raw = memoryview(bytearray(_ENTRY.size))
        if not self.read_into(TABLE_AT + extent * _ENTRY.size, raw):
            return 0
        slot_bytes, checksum = _ENTRY.unpack(raw)
        return slot_bytes if checksum == self._entry_checksum(extent, slot_bytes) else 0

    def set_extent_slot_bytes(self, extent: int, slot_bytes: int) -> None:
        """Record how an extent is cut; 0 frees it."""
        entry = _ENTRY.pack(slot_bytes, self._entry_checksum(extent, slot_bytes))
        self.write(TABLE_AT + extent * _ENTRY.size, memoryview(entry))

    def mark(self) -> int:
        """Newest index change that a publisher of a page had seen; 0 where unknown."""
        raw = memoryview(bytearray(_MARK.size))
        if not self.read_into(MARK_AT, raw):
            return 0
        value, check = _MARK.unpack(raw)
        return value if value ^ self.epoch == check else 0

    def set_mark(self, value: int) -> None:
        """Record the newest index change."""
        self.write(MARK_AT, memoryview(_MARK.pack(value, value ^ self.epoch)))

    def set_epoch(self, epoch: int) -> None:
        """Begin a new epoch: every process that still writes under the old one is told at its next write."""
        self.epoch = epoch
        body = SlabHeader(self.store_id, epoch, self.policy, self.geometry).encode()
        self.write(0, memoryview(body))
        self.write(SECTOR, memoryview(body))
        self.set_mark(0)

    def prefault(self, progress: Progress | None = None) -> None:
        """Map every page now, so that no copy pays for it later. Does nothing on a disk."""
        if self._map is None:
            return
        total = self.geometry.file_bytes
        for start in range(0, total, _CHUNK):
            length = min(_CHUNK, total - start)
            try:
                self._map.madvise(_MADV_POPULATE_WRITE, start, length)
            except OSError as error:  # an old kernel: the first copies pay instead
                if error.errno != errno.EINVAL:
                    raise StoreUnavailable(f"cannot map {self.path} into memory: {error.strerror}") from error
                return
            if progress is not None:
                progress(start + length, total)

    def close(self) -> None:
        """Close the file. Views that callers still hold keep their mapping until they are gone."""
        if self._fd < 0:
            return
        view, self._view = self._view, None
        mapping, self._map = self._map, None
        if view is not None:
            view.release()
        if mapping is not None:
            with contextlib.suppress(BufferError):  # a borrowed page is still held: the last holder unmaps it
                mapping.close()
        os.close(self._fd)
        self._fd = -1

    def _entry_checksum(self, extent: int, slot_bytes: int) -> int:
        return xxh3_64_intdigest(self.store_id + _ENTRY.pack(extent, slot_bytes))

    def _read_u64(self, offset: int) -> int:
        raw = memoryview(bytearray(_U64.size))
        if not self.read_into(offset, raw):
            raise StoreDamaged(f"cannot read {self.path}")
        return int(_U64.unpack(raw)[0])


def sectors(num_bytes: int) -> int:
    """A size rounded up to whole sectors: the slot that a frame needs."""
    return -(-num_bytes // SECTOR) * SECTOR


def _read_header(fd: int, path: Path) -> SlabHeader:
    for at in (0, SECTOR):
        raw = os.pread(fd, SECTOR, at)
        end = SECTOR - _U64.size
        if len(raw) < SECTOR or _U64.unpack_from(raw, end)[0] != xxh3_64_intdigest(raw[:end]):
            continue
        magic, version, store_id, epoch, policy, *geometry = _HEADER.unpack_from(raw)
        if magic != MAGIC:
            continue
        if version != VERSION:
            raise StoreUnavailable(
                f"{path} was written in format {version}, this version reads {VERSION}: "
                "use another directory, or empty this one with `headwater purge --all`"
            )
        return SlabHeader(store_id, epoch, policy.rstrip(b"\0").decode("ascii"), Geometry(*geometry))
    raise StoreDamaged(f"{path} has no readable header")


def _allocate(fd: int, path: Path, size: int, progress: Progress | None) -> None:
    missing = size - os.fstat(fd).st_blocks * 512
    if missing <= 0 and os.fstat(fd).st_size == size:
        return  # whole already; asking again would have tmpfs touch every page
    free = free_bytes(path.parent)
    if missing > free:
        raise StoreUnavailable(f"{path} needs {missing} bytes more and only {free} are free: choose a lower limit")
    for start in range(0, size, _CHUNK):
        length = min(_CHUNK, size - start)
        try:
            os.posix_fallocate(fd, start, length)
        except OSError as error:  # others may have been faster, or a quota is in the way
            raise StoreUnavailable(f"cannot allocate {size} bytes for {path}: {error.strerror}") from error
        if progress is not None:
            progress(start + length, size)
