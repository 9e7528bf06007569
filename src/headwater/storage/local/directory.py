"""The directory of a LocalStore: may we use it, and one at a time through its gate.

    slab        everything: pages, index, locks (`slab.py`, `table.py`, `locks.py`)

One file, on purpose: processes that have it open share pages, index and locks, or none of them. There is nothing beside
it that a cleaner of old files could take away under a process.

A directory is ours only if its slab says so (`slab.py`), or if it is empty. In any other one nothing is read, made,
changed or removed, and no symbolic link is followed. The gate is a lock on the directory itself.
"""

import fcntl
import os
import re
import stat
import time
from pathlib import Path
from typing import Final

from headwater.core.closing import Closing
from headwater.core.errors import StoreBusy, StoreUnavailable
from headwater.storage.base import Deadline
from headwater.storage.local import descriptors

SLAB: Final = "slab"
_POLL_S: Final = 0.005
_ESCAPED: Final = re.compile(rb"\\([0-3][0-7]{2})")  # how the kernel writes spaces and the like in names


class Gate(Closing):
    """The directory, opened and held: whoever comes in, makes or removes a store holds it meanwhile.

    `fd` is the directory's: everything in it is reached through that, so a path that leads elsewhere by now misleads
    nobody. A context.
    """

    def __init__(self, path: Path, deadline: Deadline, *, create: bool) -> None:
        """Make the directory if need be, and wait for the gate. Raises StoreUnavailable; StoreBusy at the deadline."""
        self.path = path
        self.fd = -1
        try:
            if create:
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            while self.fd < 0:
                self._take(deadline)
        except OSError as error:
            self.close()
            raise StoreUnavailable(f"cannot use {path} as a store: {_why(path, error)}") from error
        except BaseException:
            self.close()
            raise

    def _take(self, deadline: Deadline) -> None:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        self.fd = descriptors.keep(lambda: os.open(self.path, flags))
        _require_private(self.path, self.fd)
        while not _try_lock(self.fd):
            if deadline.expired:
                raise StoreBusy(f"another process is opening or repairing {self.path}; try again later")
            time.sleep(_POLL_S)
        if not os.path.samestat(os.fstat(self.fd), os.stat(self.path)):  # it was replaced while we waited
            self.close()

    def names(self) -> list[str]:
        """What is in the directory."""
        return os.listdir(self.fd)

    def close(self) -> None:
        """Let others through. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            try:
                fcntl.flock(fd, fcntl.LOCK_UN)  # also for a child that has the open file
            finally:
                descriptors.close(fd)


def has_slab(path: Path) -> bool:
    """Whether a directory has something that may be a store. Looks at names only."""
    try:
        return stat.S_ISREG(os.lstat(path / SLAB).st_mode)
    except OSError:
        return False


def is_memory(path: Path) -> bool:
    """Whether a directory lies on tmpfs (host memory) rather than on a disk; it need not exist yet."""
    best, kind = b"", b""
    real = os.fsencode(os.path.realpath(path))
    with open("/proc/self/mountinfo", "rb") as mounts:  # names are bytes: somebody's may be no text
        for line in mounts:
            left, _, right = line.partition(b" - ")
            point = _ESCAPED.sub(lambda found: bytes([int(found[1], 8)]), left.split(b" ")[4])
            inside = real == point or real.startswith(point.rstrip(b"/") + b"/")
            if inside and len(point) >= len(best):
                best, kind = point, right.split(b" ")[0]
    return kind in (b"tmpfs", b"ramfs")


def free_bytes(path: Path) -> int:
    """How much can be allocated here: room in the file system, and on tmpfs memory that is really there.

    A tmpfs may be as large as the machine's memory; filling it would not fail but have processes killed.
    """
    stat = os.statvfs(path)
    free = stat.f_bavail * stat.f_frsize
    if is_memory(path):
        free = min(free, available_memory())
    return free


def available_memory() -> int:
    """Memory that can be had without taking it from somebody: the machine's, or the container's if that is less."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            bound, taken = Path(limit).read_text(encoding="ascii"), Path(used).read_text(encoding="ascii")
        except OSError:
            continue
        if bound.strip() != "max":
            available = min(available, max(0, int(bound) - int(taken)))
    return available


def boot_id() -> str:
    """Changes with every start of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _require_private(path: Path, fd: int) -> None:
    info = os.fstat(fd)
    if info.st_uid != os.geteuid():
        raise StoreUnavailable(f"{path} belongs to user {info.st_uid}, this process is user {os.geteuid()}")
    if stat.S_IMODE(info.st_mode) & 0o022:
        raise StoreUnavailable(f"{path} can be written by other users: chmod go-w it, a store trusts its directory")
    if not os.access(path, os.W_OK | os.X_OK):
        raise StoreUnavailable(f"{path} is not writable")


def _why(path: Path, error: OSError) -> str:
    if path.is_symlink():
        return "it is a symbolic link; give the directory itself"
    return error.strerror or str(error)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
