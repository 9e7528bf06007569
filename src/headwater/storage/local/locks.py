"""Locks on the slab itself: who is inside, who is alive, and who may change the index.

They are byte ranges behind the end of the file, and belong to the open file (OFD locks), not to the process: two stores
in one process exclude each other like two processes, and closing some other descriptor drops nothing. The kernel drops
them when the open file is gone, however a process dies, and keeps them while it is stopped: so a free lock proves that
its owner is dead, and time proves nothing (rule 3). They work between containers that share the directory, where
process ids do not.

After a fork the child shares the open file. It closes its descriptor at once (`slab.py`), and `drop_all` releases the
parent's locks explicitly, so neither keeps the other's alive. A mapping would: the open file here is never mapped.
"""

import fcntl
import struct
import time
from functools import partial
from typing import Final

from headwater.core.errors import StoreBusy
from headwater.storage.base import Deadline

MAX_OWNERS: Final = 4095  # open stores at once, numbered from 1

_FLOCK: Final = struct.Struct("hhqqi4x")  # type, whence, start, length, pid; as the kernel has it on 64-bit machines
_BASE: Final = 1 << 61
_WRITING: Final = _BASE
_PRESENT: Final = _BASE + 1
_OWNERS: Final = _BASE + 4096
_ALL: Final = 8192
_FIRST_WAIT_S: Final = 0.00005
_LONGEST_WAIT_S: Final = 0.002


class SlabLocks:
    """The locks of one open slab."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        # Let the next one change the index. One call of C, so that no interrupt comes before it is done.
        self.end_writing: Final = partial(
            fcntl.fcntl, fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, 0, _WRITING, 1, 0)
        )

    def come_in(self) -> bool:
        """Take a place inside: True if nobody else has one; then nobody gets one before `settle`, or gate or end.

        Raises StoreBusy while another one is alone, whom the gate did not stop: it came by another name of the file.
        """
        if self._try(fcntl.F_WRLCK, _PRESENT):
            return True
        if not self._try(fcntl.F_RDLCK, _PRESENT):
            raise StoreBusy("another process repairs this store; try again later")
        return False

    def settle(self) -> None:
        """Inside, not alone any more."""
        self._try(fcntl.F_RDLCK, _PRESENT)

    def begin_writing(self, deadline: Deadline) -> bool:
        """Be the one who changes the index. False at the deadline. Threads of one store must take turns themselves."""
        wait_s = _FIRST_WAIT_S
        while not self._try(fcntl.F_WRLCK, _WRITING):
            left_s = deadline.remaining_s
            if left_s <= 0:
                return False
            time.sleep(min(wait_s, left_s))
            wait_s = min(wait_s * 1.5, _LONGEST_WAIT_S)
        return True

    def take_owner(self, owner: int) -> bool:
        """Be the owner of this number, for as long as the slab is open. False while somebody else is."""
        return self._try(fcntl.F_WRLCK, _OWNERS + owner)

    def is_alive(self, owner: int) -> bool:
        """Whether another open slab is the owner of this number."""
        found = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, 0, _OWNERS + owner, 1, 0))
        return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)

    def drop_all(self) -> None:
        """Leave, also for a child that still has the open file."""
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, 0, _BASE, _ALL + MAX_OWNERS, 0))

    def _try(self, kind: int, at: int) -> bool:
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, 0, at, 1, 0))
        except BlockingIOError:
            return False
        return True
