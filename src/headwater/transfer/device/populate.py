"""Memory of a mapping, provided by the kernel before somebody has to wait for it. No torch here: it takes seconds."""

import ctypes
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np

_POPULATE_WRITE: Final = 23  # of madvise: as if every page were written to
_POPULATED_BYTES: Final = 64 << 20  # by one call
_MOST_THREADS: Final = 8


def address_of(memory: memoryview) -> int:
    """Where it begins."""
    address: int = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
    return address


def populate(memory: memoryview, *, timeout_s: float | None = None) -> bool:
    """Have the kernel provide all pages of a mapping now, by several threads; nothing in it changes. Blocks.

    To register memory provides them too, but with one thread. False: there was no time for all of them, the kernel
    cannot (before Linux 5.14), or has not so much memory; to register will show it.
    """
    until_s = None if timeout_s is None else time.monotonic() + timeout_s
    address = address_of(memory)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def one(at: int) -> bool:
        if until_s is not None and time.monotonic() > until_s:
            return False
        size = min(_POPULATED_BYTES, memory.nbytes - at)
        return int(libc.madvise(address + at, size, _POPULATE_WRITE)) == 0

    starts = range(0, memory.nbytes, _POPULATED_BYTES)
    threads = max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // 2, len(starts)))
    with ThreadPoolExecutor(threads, thread_name_prefix="headwater populates") as pool:
        return all(pool.map(one, starts))
