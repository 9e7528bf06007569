"""Descriptors that no child of a fork keeps: they are closed in it at once, whatever other threads were doing.

A child has the parent's open files, and with them the parent's locks for as long as it lives. So every descriptor that
holds a lock, or leads to a store, is opened and closed here, under a lock that a fork waits for.
"""

import os
import threading
from collections.abc import Callable
from contextlib import suppress

_lock = threading.RLock()  # of one thread again: a signal handler may fork
_kept: set[int] = set()
_num_forks = 0


def keep(open_it: Callable[[], int]) -> int:
    """Open a descriptor, and remember it."""
    with _lock:
        fd = open_it()
        _kept.add(fd)
        return fd


def close(fd: int) -> None:
    """Close a descriptor, once; in a child there is nothing to close."""
    with _lock:
        if fd in _kept:
            _kept.remove(fd)
            os.close(fd)


def process() -> tuple[int, int]:
    """Which process this is: not by its number alone, which a child in a namespace of its own may share."""
    return os.getpid(), _num_forks


def _after_in_child() -> None:
    global _num_forks
    _num_forks += 1
    for fd in list(_kept):
        with suppress(OSError):
            os.close(fd)
    _kept.clear()
    _lock.release()


os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_after_in_child)
