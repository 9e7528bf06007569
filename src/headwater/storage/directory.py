"""The directory of a LocalStore: may we use it, who else does, and who of them is alive.

    slab        pages (`slab.py`)
    index.db    the catalog (`catalog.py`), with SQLite's -wal and -shm
    gate, lock  who is coming in, who is inside
    owners/     one file per open store, locked while its process lives

Liveness is a held file lock, never a clock (rule 3): the kernel drops it when a process dies, however it dies, and
keeps it while the process is merely stopped. Works between containers that share the directory, where process ids do
not.
"""

import fcntl
import os
import secrets
import stat
import time
import weakref
from pathlib import Path
from typing import Final

from headwater.core.errors import StoreBusy, StoreUnavailable
from headwater.storage.base import Deadline

SLAB: Final = "slab"
INDEX: Final = "index.db"
_GATE: Final = "gate"
_LOCK: Final = "lock"
_OWNERS: Final = "owners"
_POLL_S: Final = 0.005


def prepare(path: Path) -> None:
    """Make the directory, or say in one sentence why it cannot be used."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        (path / _OWNERS).mkdir(mode=0o700, exist_ok=True)
        info = path.stat()
    except OSError as error:
        raise StoreUnavailable(f"cannot use {path} as a store: {error.strerror}") from error
    if info.st_uid != os.geteuid():
        raise StoreUnavailable(f"{path} belongs to user {info.st_uid}, this process is user {os.geteuid()}")
    if stat.S_IMODE(info.st_mode) & 0o022:
        raise StoreUnavailable(f"{path} can be written by other users: chmod go-w it, a store trusts its directory")
    if not os.access(path, os.W_OK | os.X_OK):
        raise StoreUnavailable(f"{path} is not writable")


def is_memory(path: Path) -> bool:
    """Whether the directory lies on tmpfs (host memory) rather than on a disk."""
    best, kind = "", ""
    real = os.path.realpath(path)
    with open("/proc/self/mountinfo", encoding="utf-8") as mounts:
        for line in mounts:
            left, _, right = line.partition(" - ")
            point = left.split(" ")[4].replace("\\040", " ")
            inside = real == point or real.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= len(best):
                best, kind = point, right.split(" ")[0]
    return kind in ("tmpfs", "ramfs")


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


class PresenceLock:
    """Shared while the store is open; exclusive for a process that is alone in the directory.

    Two files: `gate` is held while a process comes in (or removes the directory), `lock` while it is inside. Turning an
    exclusive lock into a shared one is not atomic, and the gate is what keeps others from slipping in between.
    """

    def __init__(self, directory: Path) -> None:
        self._gate = os.open(directory / _GATE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._fd = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except BaseException:
            os.close(self._gate)
            raise
        _held.add(self)

    def come_in(self, deadline: Deadline) -> bool:
        """Pass the gate and keep it: True if nobody else is inside. Raises StoreBusy at the deadline."""
        while not _try_lock(self._gate, fcntl.LOCK_EX):
            if deadline.expired:
                raise StoreBusy("another process is opening or rebuilding the store; try again later")
            time.sleep(_POLL_S)
        alone = _try_lock(self._fd, fcntl.LOCK_EX)
        if not alone and not _try_lock(self._fd, fcntl.LOCK_SH):
            raise StoreBusy("the store is locked by a process that does not keep its rules")
        return alone

    def settle(self) -> None:
        """Inside, with all in order: let the others through the gate."""
        _try_lock(self._fd, fcntl.LOCK_SH)  # cannot fail: whoever could take it stands before the gate
        fcntl.flock(self._gate, fcntl.LOCK_UN)

    def close(self) -> None:
        """Leave."""
        if self._fd >= 0:
            _release(self._fd)
            _release(self._gate)
            self._fd = self._gate = -1

    def drop(self) -> None:
        """In a child: let go without releasing what the parent holds."""
        if self._fd >= 0:
            os.close(self._fd)
            os.close(self._gate)
            self._fd = self._gate = -1


class OwnerLock:
    """This store's sign of life, under a random name that the catalog keeps beside its reservations."""

    def __init__(self, directory: Path) -> None:
        self.token = secrets.token_hex(8)
        self._path = directory / _OWNERS / self.token
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _held.add(self)

    def forget(self) -> None:
        """The catalog knows us no more: the file is not needed. Otherwise it stays, unlocked, as a sign of death."""
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Die."""
        if self._fd >= 0:
            _release(self._fd)
            self._fd = -1

    def drop(self) -> None:
        """In a child: let go without releasing what the parent holds."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def is_alive(directory: Path, token: str) -> bool:
    """Whether the owner `token` may be alive: only a lock that could be taken proves death.

    A missing file proves nothing (a cleaner may have taken it); such an owner is forgotten when a process comes in and
    finds nobody inside.
    """
    try:
        fd = os.open(directory / _OWNERS / token, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        return not _try_lock(fd, fcntl.LOCK_EX)
    finally:
        os.close(fd)


def _try_lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _release(fd: int) -> None:
    fcntl.flock(fd, fcntl.LOCK_UN)  # also for a child that inherited the descriptor
    os.close(fd)


def sweep_owners(directory: Path) -> None:
    """Remove the owners' files. Only for a process that is alone: all of them are dead."""
    for path in (directory / _OWNERS).iterdir():
        path.unlink(missing_ok=True)


_held: "weakref.WeakSet[PresenceLock | OwnerLock]" = weakref.WeakSet()


def _drop_in_child() -> None:
    for lock in list(_held):
        lock.drop()


os.register_at_fork(after_in_child=_drop_in_child)
