"""The one file of a LocalStore, opened: bytes at offsets, and whether it is still the file we opened.

What lies where is in `geometry.py`. The slab knows offsets and bytes, nothing of names: which slot holds what is in the
index (`table.py`), and what a page is the page says itself.

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
import secrets
import stat
import struct
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from headwater.core.errors import StoreDamaged, StoreForked, StoreUnavailable
from headwater.layout.frame import PREFIX_BYTES
from headwater.storage.local import descriptors, directory
from headwater.storage.local.directory import SLAB, Gate
from headwater.storage.local.geometry import CONTROL_AT, SECTOR, Geometry
from headwater.storage.local.locks import SlabLocks
from headwater.storage.local.sigbus import GuardedRange

MAGIC: Final = b"HWSLAB\0\0"
VERSION: Final = 2
_HEADER: Final = struct.Struct("<8sI4x16sQ16sQ")  # magic, version, id, epoch, policy, limit
_EPOCH_AT: Final = 32
_U64: Final = struct.Struct("<Q")
_SEALED: Final = struct.Struct("<QQ")  # a number, and the same with what only this store knows
SEALED_BYTES: Final = _SEALED.size
_CHUNK: Final = 64 << 20
_ZEROS: Final = bytes(SECTOR)
_MADV_POPULATE_WRITE: Final = 23
_UNFINISHED: Final = "slab.new"  # only where a file system has no unnamed files

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class SlabHeader:
    """What both header copies say: which store this is, its settings, its epoch."""

    store_id: bytes
    epoch: int
    policy: str  # the eviction policy, by name; an ASCII word of at most 16 letters
    limit_bytes: int
    _key: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """What seals numbers: another store's, or another epoch's, do not fit."""
        object.__setattr__(self, "_key", self.epoch ^ int.from_bytes(self.store_id[:8], "little"))

    def encode(self) -> bytes:
        """One sector."""
        name = self.policy.encode("ascii").ljust(16, b"\0")
        body = _HEADER.pack(MAGIC, VERSION, self.store_id, self.epoch, name, self.limit_bytes)
        body = body.ljust(SECTOR - _U64.size, b"\0")  # checksummed to the end: a later version may say more
        return body + _U64.pack(xxh3_64_intdigest(body))

    def seal(self, number: int) -> bytes:
        """A number, as only this store writes it."""
        return _SEALED.pack(number, number ^ self._key)

    def unseal(self, raw: bytes) -> int | None:
        """The number; None if this store did not write it."""
        number, check = _SEALED.unpack(raw)
        return number if number ^ self._key == check else None


class Remains:
    """A file that was a slab of ours until it was damaged, held open: so nothing else can be taken for it."""

    def __init__(self, slab: "Slab") -> None:
        self.header = slab.header
        self.fd = descriptors.keep(lambda: os.dup(slab.fd))

    def are(self, fd: int) -> bool:
        """Whether this is the file, and nobody has put anything of his own into it."""
        info = os.fstat(fd)
        if not os.path.samestat(info, os.fstat(self.fd)):
            return False
        begin = os.pread(fd, SECTOR, 0)
        if info.st_size < SECTOR:  # nothing in it, or what is left of the header
            return self.header.encode().startswith(begin)
        if info.st_size == Geometry.plan(self.header.limit_bytes).file_bytes:
            return True  # damaged in place: who writes a file of his own over it gives it another size
        control = os.pread(fd, SEALED_BYTES, CONTROL_AT)
        return len(control) == SEALED_BYTES and self.header.unseal(control) is not None

    def close(self) -> None:
        """Let it go. Idempotent."""
        fd, self.fd = self.fd, -1
        descriptors.close(fd)


class Rows:
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
        self._sectors = Rows(0, SECTOR, SECTOR, self.geometry.file_bytes // SECTOR)
        self._prefixes = Rows(0, SECTOR, PREFIX_BYTES, self._sectors.count)
        _open.add(self)

    @classmethod
    def create(
        cls, gate: Gate, *, limit_bytes: int, policy: str, mapped: bool, progress: Progress | None = None
    ) -> "Slab":
        """A new slab in a directory that has none. It appears there whole, or not at all.

        Raises StoreUnavailable where there is no room, or where the directory holds anything else.
        """
        path = gate.path / SLAB
        geometry = Geometry.plan(limit_bytes)
        _remove_unfinished(gate)
        if gate.names():
            raise StoreUnavailable(
                f"{gate.path} holds files that are not a store's ({min(gate.names())!r} is one): choose an empty "
                "directory, or one that does not exist yet"
            )
        header = SlabHeader(secrets.token_bytes(16), 1, policy, limit_bytes)
        fd, named = _new_file(gate)
        try:
            os.pwrite(fd, header.encode(), 0)
            _allocate(fd, path, geometry.file_bytes, progress)
            os.pwrite(fd, header.encode(), SECTOR)
            slab = cls(path, fd, header, mapped=mapped)
            slab.is_new = True
        except BaseException:
            if named:
                os.unlink(_UNFINISHED, dir_fd=gate.fd)
            descriptors.close(fd)
            raise
        try:
            slab.map()
            if named:
                os.link(_UNFINISHED, SLAB, src_dir_fd=gate.fd, dst_dir_fd=gate.fd)
            else:
                os.link(f"/proc/self/fd/{fd}", SLAB, dst_dir_fd=gate.fd, follow_symlinks=True)
        except BaseException:
            slab.close()
            raise
        finally:
            if named:
                os.unlink(_UNFINISHED, dir_fd=gate.fd)
        return slab

    @classmethod
    def open(cls, gate: Gate, *, mapped: bool, known: Remains | None = None) -> "Slab":
        """Open the slab of a directory, as it is: it may be cut. `map` it before it is used.

        `known`: what was open before. If this is the same file, it is ours even if its header is gone.
        Raises FileNotFoundError when there is none, StoreDamaged when no header can be believed, StoreUnavailable for
        another version, and for what is no regular file of ours.
        """
        path = gate.path / SLAB
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            fd = descriptors.keep(lambda: os.open(SLAB, flags, dir_fd=gate.fd))
        except OSError as error:
            if error.errno == errno.ENOENT:
                raise
            why = "a symbolic link" if error.errno == errno.ELOOP else f"not to be opened: {error.strerror}"
            raise StoreUnavailable(f"{path} is {why}; a store's slab is a file of its own") from error
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
                raise StoreUnavailable(f"{path} is not a regular file of this user: not a store")
            header = read_slab_header(fd, path)
            if header is None and known is not None and known.are(fd):
                header = known.header
            if header is None:
                raise StoreDamaged(
                    f"{path} has no readable header: it is not a store's, or was destroyed. If it was a store's, "
                    "remove it to start anew; nothing was touched"
                )
            if info.st_nlink > 1:
                _remove_unfinished(gate, twin=info)  # of one that died when it was as good as made
            if os.fstat(fd).st_nlink > 1:  # a gate over each, and one file behind them
                raise StoreUnavailable(f"{path} has another name elsewhere (a hard link): remove that one, or copy it")
            return cls(path, fd, header, mapped=mapped)
        except BaseException:
            descriptors.close(fd)
            raise

    def repair(self, progress: Progress | None = None) -> bool:
        """Give a cut file its full size again (what was lost reads zero), and its header. True if it was cut.

        Only for who is alone. Raises StoreUnavailable where there is no room.
        """
        size = os.fstat(self.fd).st_size
        if size > self.geometry.file_bytes:
            os.truncate(self.fd, self.geometry.file_bytes)
        _allocate(self.fd, self.path, self.geometry.file_bytes, progress)  # also fills holes that someone punched
        for at in (0, SECTOR):
            os.pwrite(self.fd, self.header.encode(), at)
        return size != self.geometry.file_bytes

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
                got = os.preadv(self.fd, [buffer[done:]], offset + done)
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

    def read_rows(self, rows: Rows, numbers: Sequence[int]) -> bytes:
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

    def write_rows(self, rows: Rows, numbers: Sequence[int], data: bytes) -> None:
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

    def _require_rows(self, rows: Rows, numbers: Sequence[int]) -> None:
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


def _as_array(view: memoryview, rows: Rows) -> npt.NDArray[np.void]:
    """For the moment: what is mapped must not be held longer than a call. One item is copied after the other."""
    return np.ndarray(rows.count, rows.item, view[rows.at : rows.end], 0, (rows.pitch,))


def _close_all(*fds: int) -> None:
    for fd in fds:
        descriptors.close(fd)


def read_slab_header(fd: int, path: Path) -> SlabHeader | None:
    """What the first copy that can be believed says; None if neither can. Raises StoreUnavailable: another version."""
    for at in (0, SECTOR):
        raw = os.pread(fd, SECTOR, at)
        end = SECTOR - _U64.size
        if len(raw) < SECTOR or _U64.unpack_from(raw, end)[0] != xxh3_64_intdigest(raw[:end]):
            continue
        magic, version, store_id, epoch, policy, limit_bytes = _HEADER.unpack_from(raw)
        if magic != MAGIC:
            continue
        if version != VERSION:
            raise StoreUnavailable(
                f"{path} was written in format {version}, this version reads {VERSION}: use another directory, or "
                "remove this one with all that is in it"
            )
        try:
            Geometry.plan(limit_bytes)
            return SlabHeader(store_id, epoch, policy.rstrip(b"\0").decode("ascii"), limit_bytes)
        except (StoreUnavailable, UnicodeDecodeError):
            continue
    return None


def _new_file(gate: Gate) -> tuple[int, bool]:
    """A descriptor of a new file, and whether it has a name yet. One without a name leaves nothing in a crash."""

    def make(name: str, how: int) -> int:
        return descriptors.keep(lambda: os.open(name, os.O_RDWR | os.O_CLOEXEC | how, 0o600, dir_fd=gate.fd))

    try:
        return make(".", os.O_TMPFILE), False
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    return make(_UNFINISHED, os.O_CREAT | os.O_EXCL), True


def _remove_unfinished(gate: Gate, twin: os.stat_result | None = None) -> None:
    """Remove what a process left that died while it made a slab, if it is certainly that. `twin`: the slab's name."""
    try:
        fd = os.open(_UNFINISHED, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=gate.fd)
    except OSError:
        return
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or os.pread(fd, len(MAGIC), 0) != MAGIC:
            return
        # One that was ever opened says so behind its headers: a store that somebody may have put aside.
        if not any(os.pread(fd, SECTOR, CONTROL_AT)) or (twin is not None and os.path.samestat(info, twin)):
            os.unlink(_UNFINISHED, dir_fd=gate.fd)
    finally:
        os.close(fd)


def _allocate(fd: int, path: Path, size: int, progress: Progress | None) -> None:
    missing = size - os.fstat(fd).st_blocks * 512
    if missing <= 0 and os.fstat(fd).st_size == size:
        return  # whole already; asking again would have tmpfs touch every page
    free = directory.free_bytes(path.parent)
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


_open: "weakref.WeakSet[Slab]" = weakref.WeakSet()


def _drop_in_child() -> None:
    for slab in list(_open):
        with contextlib.suppress(Exception):  # the others are to be dropped too
            slab.drop()


os.register_at_fork(after_in_child=_drop_in_child)
