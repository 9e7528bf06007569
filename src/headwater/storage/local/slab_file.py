"""How the file of a slab is made, opened and repaired.

A slab appears in its directory whole, or not at all: it is made without a name, and linked when it is complete. What is
not certainly a slab of ours is not touched. Whoever comes here has passed the directory's gate (`directory.py`).
"""

import errno
import os
import secrets
import stat
from pathlib import Path
from typing import Final

from headwater.core.errors import StoreDamaged, StoreUnavailable
from headwater.storage.local import descriptors, directory
from headwater.storage.local.directory import SLAB, Gate
from headwater.storage.local.geometry import CONTROL_AT, SECTOR, Geometry
from headwater.storage.local.slab import Progress, Slab
from headwater.storage.local.slab_header import MAGIC, SEALED_BYTES, SlabHeader, read_slab_header

_CHUNK: Final = 64 << 20
_UNFINISHED: Final = "slab.new"  # only where a file system has no unnamed files


class Remains:
    """A file that was a slab of ours until it was damaged, held open: so nothing else can be taken for it."""

    def __init__(self, slab: Slab) -> None:
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


def create_slab(gate: Gate, *, limit_bytes: int, policy: str, mapped: bool, progress: Progress | None = None) -> Slab:
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
        slab = Slab(path, fd, header, mapped=mapped)
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


def open_slab(gate: Gate, *, mapped: bool, known: Remains | None = None) -> Slab:
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
        return Slab(path, fd, header, mapped=mapped)
    except BaseException:
        descriptors.close(fd)
        raise


def repair_slab(slab: Slab, progress: Progress | None = None) -> bool:
    """Give a cut file its full size again (what was lost reads zero), and its header. True if it was cut.

    Only for who is alone. Raises StoreUnavailable where there is no room.
    """
    size = os.fstat(slab.fd).st_size
    if size > slab.geometry.file_bytes:
        os.truncate(slab.fd, slab.geometry.file_bytes)
    _allocate(slab.fd, slab.path, slab.geometry.file_bytes, progress)  # also fills holes that someone punched
    for at in (0, SECTOR):
        os.pwrite(slab.fd, slab.header.encode(), at)
    return size != slab.geometry.file_bytes


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
