"""A mapped file that is cut under a process: zeros instead of a signal that ends it.

A slab in memory is mapped, so that a copy engine can address it. Where somebody truncates the file, touching what is
gone raises SIGBUS, which by default kills the process, in the microseconds between any check and the end of a copy.
Here the signal of a guarded range puts zeros where the file was, marks the range as lost, and lets the copy go on: what
was copied fails its verification, and the store turns itself off at its next look (`Slab.require_whole`).

The signal is raised by the very instruction that touches the memory, never at an arbitrary moment. So the handler runs
as if that copy had called it, and may be Python: a thread that holds the interpreter's lock keeps it, another waits
for it, and neither is inside an allocator or a lock of the interpreter. A signal for any other address goes to whoever
handled it before us.

Not here: files. Invariant: a range stands here exactly as long as its mapping.
"""

import ctypes
import mmap
import os
import signal
import threading
import weakref
from typing import Final

import numpy as np

_SIGINFO: Final = 4  # SA_SIGINFO: the handler is told the address
_CODE_AT: Final = 8  # in siginfo_t, on 64-bit machines: above 0, the kernel raised it
_ADDRESS_AT: Final = 16
_IGNORE: Final = 1  # SIG_IGN
_MAP: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10 | 0x4000  # MAP_FIXED, MAP_NORESERVE
_PAGE: Final = mmap.PAGESIZE


class _Action(ctypes.Structure):
    """`struct sigaction`, as glibc and musl have it."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_uint8 * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64)
_libc.sigaction.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class GuardedRange:
    """A mapping in which a fault is survived. `lost`: there was one, and what lies there is not the file any more."""

    def __init__(self, mapping: mmap.mmap) -> None:
        """Guard a whole mapping, until it is unmapped."""
        self.lost = False
        self.start = int(np.frombuffer(mapping, np.uint8).ctypes.data)
        self.end = self.start + len(mapping)
        _install()
        _ranges[self] = None
        weakref.finalize(mapping, self.forget)

    def forget(self) -> None:
        """It is not mapped any more; another one may be, at the same address."""
        _ranges.pop(self, None)  # one call of C: other threads do the same


_ranges: dict[GuardedRange, None] = {}  # the oldest first
_lock = threading.Lock()
_before: _Action | None = None  # who handled the signal before us; not None: we do


def _on_fault(number: int, info: int, context: int) -> None:
    if ctypes.c_int32.from_address(info + _CODE_AT).value <= 0:
        _pass_on(number, info, context)
        return
    address = ctypes.c_uint64.from_address(info + _ADDRESS_AT).value
    for one in reversed(list(_ranges)):  # an older one at the same address is about to be forgotten
        if one.start <= address < one.end:
            at = address // _PAGE * _PAGE
            one.lost = True
            if _libc.mmap(at, one.end - at, mmap.PROT_READ | mmap.PROT_WRITE, _MAP, -1, 0) == at:
                return
    if _before is not None:  # not ours, or not to be helped: the instruction is repeated under the handler before us
        _libc.sigaction(number, ctypes.byref(_before), None)


def _pass_on(number: int, info: int, context: int) -> None:
    """Somebody sent the signal: do what would be done without us."""
    before = _before.handler if _before is not None else None
    if before is None:  # the default: it ends the process
        _libc.sigaction(number, ctypes.byref(_Action()), None)
        os.kill(os.getpid(), number)
    elif before != _IGNORE:
        _Handler(before)(number, info, context)


_handler = _Handler(_on_fault)  # kept: the C side has only its address


def _install() -> None:
    global _before
    with _lock:
        ours = _Action(handler=ctypes.cast(_handler, ctypes.c_void_p), flags=_SIGINFO)
        before = _Action()
        _libc.sigaction(int(signal.SIGBUS), None, ctypes.byref(before))
        if before.handler != ours.handler:  # at first, and where somebody took it from us
            _libc.sigaction(int(signal.SIGBUS), ctypes.byref(ours), ctypes.byref(before))
            _before = before
