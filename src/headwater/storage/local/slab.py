"""The one file of a LocalStore, opened: bytes at offsets, and whether it is still the file we opened.

What lies where is in `geometry.py`; how the file is made, opened and repaired, in `slab_file.py`. The slab knows
offsets and bytes, nothing of names: which slot holds what is in the index (`table.py`), and what a page is the page
says itself.

Invariants: the file is allocated, never sparse (rule 11); its size is checked before each batch, that its path still
leads to it before each change (rule 10); a file that does not say that it is ours is not touched. A child of a fork
has no descriptor of it.

On tmpfs it is mapped (fast, and a copy engine can address it; `sigbus.py` is for those who cut it under us); on a disk
it is read with pread and written with pwrite.
"""

import contextlib
import errno
import mmap
import os
import struct
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from headwater.core.errors import StoreDamaged, StoreForked, StoreUnavailable
from headwater.layout.frame import PREFIX_BYTES
from headwater.storage.local import descriptors
from headwater.storage.local.geometry import SECTOR, Geometry
from headwater.storage.local.locks import SlabLocks
from headwater.storage.local.sigbus import GuardedRange
from headwater.storage.local.slab_header import SlabHeader

_EPOCH_AT: Final = 32
_U64: Final = struct.Struct("<Q")
_CHUNK: Final = 64 << 20
_ZEROS: Final = bytes(SECTOR)
_MADV_POPULATE_WRITE: Final = 23

Progress = Callable[[int, int], None]


class SlabRows:
    """Places of one size at one distance: the first at `at`, `pitch` bytes from one to the next."""

    def __init__(self, at: int, pitch: int, num_bytes: int, count: int) -> None:
        self.at = at
        self.pitch = pitch
        self.num_bytes = num_bytes  # of each place that are meant
        self.count = count
        self.end = at + (count - 1) * pitch + num_bytes
        self.item = np.dtype(f"V{num_bytes}")


class Slab:
    """An open slab file. Not safe to close while another thread copies: `attachment.py` counts who is inside."""

    def __init__(self, path: Path, fd: int, header: SlabHeader, *, mapped: bool) -> None:
        """Takes the descriptor."""
        self.path = path
        self.geometry = Geometry.plan(header.limit_bytes)
        self.header = header
        self.epoch = header.epoch
        # Locks belong to an open file, and a mapping keeps its own open in every child of a fork: so they have another.
        self._lock_fd = descriptors.keep(lambda: os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC))
        self._leaving = weakref.finalize(self, _close_all, self._lock_fd, fd)  # where nobody closed it
        self._leaving.atexit = False
        self.locks = SlabLocks(self._lock_fd)
        self.mapped = mapped
        self.fd = fd
        self.is_new = False
        info = os.fstat(fd)
        self.inode = (info.st_dev, info.st_ino)  # which file it is
        self._map: mmap.mmap | None = None
        self._view: memoryview | None = None
        self._range: GuardedRange | None = None
        self._sectors = SlabRows(0, SECTOR, SECTOR, self.geometry.file_bytes // SECTOR)
        self._prefixes = SlabRows(0, SECTOR, PREFIX_BYTES, self._sectors.count)
        _open.add(self)

    def map(self) -> None:
        """Make it usable; it has its full size. Raises StoreDamaged if somebody cut it meanwhile."""
        if self.mapped and self._map is None:
            try:
                self._map = mmap.mmap(self.fd, self.geometry.file_bytes)
            except ValueError as error:
                raise StoreDamaged(f"{self.path} was cut while it was opened") from error
            self._range = GuardedRange(self._map)
            self._view = memoryview(self._map)

    @property
    def medium(self) -> str:
        """Where it lies, as counters tell it."""
        return "memory" if self.mapped else "disk"

    @property
    def whole(self) -> bool:
        """Whether the file has its full size."""
        return os.fstat(self.fd).st_size == self.geometry.file_bytes

    @property
    def is_removed(self) -> bool:
        """Whether the file has no name any more."""
        return os.fstat(self.fd).st_nlink == 0

    def require_whole(self) -> None:
        """Raise StoreDamaged if the file was cut or removed, or belongs to another epoch. Costs two calls."""
        info = os.fstat(self.fd)
        lost = self._range is not None and self._range.lost
        if info.st_size != self.geometry.file_bytes or info.st_nlink == 0 or lost:
            raise StoreDamaged(f"{self.path} was cut, grown or removed under this process")
        if _U64.unpack(self.read(_EPOCH_AT, _U64.size))[0] != self.epoch:
            raise StoreDamaged(f"{self.path} has another epoch: it was repaired, or an old file was put back")

    def require_in_place(self) -> None:
        """Raise StoreDamaged if the path does not lead to this file any more: others may be using another one."""
        try:
            there = os.lstat(self.path)
        except OSError:
            raise StoreDamaged(f"{self.path} was removed under this process") from None
        if (there.st_dev, there.st_ino) != self.inode:
            raise StoreDamaged(f"{self.path} was replaced under this process")

    def view(self, offset: int, num_bytes: int) -> memoryview:
        """The memory of a slot; only where `mapped`."""
        if self._view is None or not 0 <= offset <= self.geometry.file_bytes - num_bytes:
            raise StoreDamaged(f"{self.path} has no {num_bytes} bytes with an address at {offset}")
        return self._view[offset : offset + num_bytes]

    def views(self, places: Sequence[tuple[int, int]]) -> list[memoryview]:
        """`view` of many: (offset, bytes)."""
        memory, end = self._view, self.geometry.file_bytes
        if memory is None or any(not 0 <= offset <= end - num_bytes for offset, num_bytes in places):
            raise StoreDamaged(f"{self.path} has no bytes with an address at one of {len(places)} places")
        return [memory[offset : offset + num_bytes] for offset, num_bytes in places]

    @property
    def memory(self) -> memoryview | None:
        """The whole mapping, where there is one; who holds it keeps it mapped."""
        return self._view[:] if self._view is not None else None

    def read(self, offset: int, num_bytes: int) -> bytes:
        """A copy of some bytes. Raises StoreDamaged where the file ends early or cannot be read."""
        if self._view is not None:
            return bytes(self._view[offset : offset + num_bytes])
        self._require_open()
        try:
            found = os.pread(self.fd, num_bytes, offset)
        except OSError as error:
            raise StoreDamaged(f"cannot read {self.path}: {error.strerror}") from error
        if len(found) != num_bytes:
            raise StoreDamaged(f"{self.path} was cut under this process")
        return found

    def read_into(self, offset: int, buffer: memoryview) -> bool:
        """Copy bytes out. False where the file ends early."""
        if not 0 <= offset <= self.geometry.file_bytes - len(buffer):
            return False
        if self._view is not None:
            buffer[:] = self._view[offset : offset + len(buffer)]
            return True
        self._require_open()
        done = 0
        while done < len(buffer):
            try:
                got = os.preadv(self.fd, [buffer[done:] if done else buffer], offset + done)
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

    def write(self, offset: int, data: memoryview | bytes) -> None:
        """Copy bytes in. Raises StoreDamaged if there is no such place, or the medium refuses."""
        if not 0 <= offset <= self.geometry.file_bytes - len(data):
            raise StoreDamaged(f"{self.path} has no {len(data)} bytes at {offset}")
        if self._view is not None:
            self._view[offset : offset + len(data)] = data
            return
        self._require_open()
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(self.fd, data[done:] if done else data, offset + done)
        except OSError as error:
            raise StoreDamaged(f"cannot write to {self.path}: {error.strerror}") from error

    def read_rows(self, rows: SlabRows, numbers: Sequence[int]) -> bytes:
        """A copy of some of many places, back to back. Raises as `read`."""
        self._require_rows(rows, numbers)
        view = self._view
        if view is not None:
            return _as_array(view, rows)[numbers].tobytes()
        if isinstance(numbers, range) and numbers:
            raw = self.read(rows.at + numbers.start * rows.pitch, (len(numbers) - 1) * rows.pitch + rows.num_bytes)
            return np.ndarray(len(numbers), rows.item, raw, 0, (rows.pitch,)).tobytes()
        return b"".join([self.read(rows.at + number * rows.pitch, rows.num_bytes) for number in numbers])

    def prefixes(self, offsets: Sequence[int]) -> bytes:
        """The first bytes of slots, enough to see which page is in each, back to back. Only where `mapped`."""
        return self.read_rows(self._prefixes, [offset // SECTOR for offset in offsets])

    def write_rows(self, rows: SlabRows, numbers: Sequence[int], data: bytes) -> None:
        """Copy bytes, back to back, into some of many places, one after the other; or the same bytes into all of them.

        Raises as `write`.
        """
        self._require_rows(rows, numbers)
        view, size = self._view, rows.num_bytes
        if view is not None:
            _as_array(view, rows)[numbers] = np.frombuffer(data, rows.item)
            return
        for i, number in enumerate(numbers):
            self.write(rows.at + number * rows.pitch, data[i * size : (i + 1) * size] if len(data) > size else data)

    def _require_rows(self, rows: SlabRows, numbers: Sequence[int]) -> None:
        if numbers and not 0 <= min(numbers) <= max(numbers) < rows.count:
            raise StoreDamaged(f"{self.path} has no {min(numbers)} to {max(numbers)} of {rows.count} places")

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
        self.write(offset, _ZEROS)

    def wipe_all(self, offsets: Sequence[int]) -> None:
        """`wipe` many."""
        if offsets and min(offsets) < self.geometry.data_at:
            raise StoreDamaged(f"{self.path} has no slot at {min(offsets)}")
        self.write_rows(self._sectors, [offset // SECTOR for offset in offsets], _ZEROS)

    def sync(self) -> None:
        """Force written pages to the medium. Raises StoreDamaged if it cannot."""
        try:
            os.fdatasync(self.fd)
        except OSError as error:
            raise StoreDamaged(f"cannot sync {self.path}: {error.strerror}") from error

    def begin_epoch(self) -> None:
        """Every process that still works under the old epoch is told at its next call. Only for who is alone."""
        self.epoch += 1
        self.header = SlabHeader(self.header.store_id, self.epoch, self.header.policy, self.header.limit_bytes)
        for at in (0, SECTOR):
            self.write(at, self.header.encode())

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
        """Leave and close the file. Views that callers still hold keep their mapping until they are gone."""
        if self.fd < 0:
            return
        self.locks.drop_all()
        self._close()

    def drop(self) -> None:
        """In a child: nothing here leads to the file any more, which is the parent's."""
        self._leaving.detach()
        self.fd = -1
        self._view = None

    def _require_open(self) -> None:
        if self.fd < 0:
            raise StoreForked(f"{self.path} was opened before fork(): open it again in the child")

    def _close(self) -> None:
        view, self._view = self._view, None
        mapping, self._map = self._map, None
        if view is not None:
            view.release()
        if mapping is not None:
            with contextlib.suppress(BufferError):  # a borrowed page is still held: the last holder unmaps it
                mapping.close()
                if self._range is not None:
                    self._range.forget()
        self._leaving.detach()
        fd, self.fd = self.fd, -1
        _close_all(self._lock_fd, fd)


def _as_array(view: memoryview, rows: SlabRows) -> npt.NDArray[np.void]:
    """For the moment: what is mapped must not be held longer than a call. One item is copied after the other."""
    return np.ndarray(rows.count, rows.item, view[rows.at : rows.end], 0, (rows.pitch,))


def _close_all(*fds: int) -> None:
    for fd in fds:
        descriptors.close(fd)


_open: "weakref.WeakSet[Slab]" = weakref.WeakSet()


def _drop_in_child() -> None:
    for slab in list(_open):
        with contextlib.suppress(Exception):  # the others are to be dropped too
            slab.drop()


os.register_at_fork(after_in_child=_drop_in_child)
