"""The few calls of the CUDA runtime that torch does not offer, or not cheaply: copies between addresses, events, pins.

No state but the library, no streams, no decisions. The library is the one that torch has loaded, so both speak of the
same context.
"""

import ctypes
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from headwater.core.errors import InvalidCopy

TO_DEVICE: Final = 1
TO_HOST: Final = 2
_BLOCKING_SYNC: Final = 1
_NO_TIMING: Final = 2
_BATCH_SINCE: Final = 13  # the runtime's major version from which on `cudaMemcpyBatchAsync` has these arguments
_BATCH: Final = 64  # copies of one call: one huge call begins later, and was slower in all
_IN_STREAM_ORDER: Final = 1


class _Attributes(ctypes.Structure):
    """`cudaMemcpyAttributes`: the order in which sources are read, and hints where source and target are."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_place", ctypes.c_int),
        ("source_id", ctypes.c_int),
        ("target_place", ctypes.c_int),
        ("target_id", ctypes.c_int),
        ("flags", ctypes.c_uint),
    )


class CopyCalls:
    """Copies between registered host memory and a device, by address, on a stream; events. Nothing but `wait` blocks.

    A microsecond or two a call: pieces are small, and torch's own objects cost ten times that.
    """

    def __init__(self) -> None:
        """Find the runtime that torch uses. Raises InvalidCopy where there is none."""
        major = (torch.version.cuda or "").partition(".")[0]
        try:
            # What only queues work keeps the interpreter's lock: to get it back may take as long as many copies.
            library = ctypes.PyDLL(f"libcudart.so.{major}")
            waiting = ctypes.CDLL(f"libcudart.so.{major}")
        except OSError as error:
            raise InvalidCopy(f"there is no CUDA runtime {major or 'for this torch'} to copy with: {error}") from error
        address, size = ctypes.c_void_p, ctypes.c_size_t
        self._copy = library.cudaMemcpyAsync
        self._copy.argtypes = (address, address, size, ctypes.c_int, address)
        self._copy_rows = library.cudaMemcpy2DAsync
        self._copy_rows.argtypes = (address, size, address, size, size, size, ctypes.c_int, address)
        self._batch: Any = None
        if int(major or 0) >= _BATCH_SINCE:
            self._batch = library.cudaMemcpyBatchAsync
            attributes = ctypes.POINTER(_Attributes), ctypes.POINTER(size)
            self._batch.argtypes = (address, address, address, size, *attributes, size, address)
        self._attributes = _Attributes(source_order=_IN_STREAM_ORDER)
        self._first = size(0)
        self._sizes: dict[int, npt.NDArray[np.uint64]] = {}
        self._create = library.cudaEventCreateWithFlags
        self._create.argtypes = (ctypes.POINTER(address), ctypes.c_uint)
        self._destroy = library.cudaEventDestroy
        self._destroy.argtypes = (address,)
        self._record = library.cudaEventRecord
        self._record.argtypes = (address, address)
        self._follow = library.cudaStreamWaitEvent
        self._follow.argtypes = (address, address, ctypes.c_uint)
        self._wait = waiting.cudaEventSynchronize
        self._wait.argtypes = (address,)
        self._get_device = library.cudaGetDevice
        self._get_device.argtypes = (ctypes.POINTER(ctypes.c_int),)
        self._set_device = library.cudaSetDevice
        self._set_device.argtypes = (ctypes.c_int,)
        self._describe = library.cudaGetErrorString
        self._describe.argtypes, self._describe.restype = (ctypes.c_int,), ctypes.c_char_p

    def copy(self, target: int, source: int, num_bytes: int, kind: int, stream: int) -> None:
        """One piece. Raises InvalidCopy if CUDA refuses."""
        self._check(self._copy(target, source, num_bytes, kind, stream))

    def copy_rows(
        self,
        target: tuple[int, int],
        source: tuple[int, int],
        *,
        row_bytes: int,
        num_rows: int,
        kind: int,
        stream: int,
    ) -> None:
        """Evenly spaced pieces; `target` and `source`: the first one's address, and the distance to the next."""
        self._check(self._copy_rows(*target, *source, row_bytes, num_rows, kind, stream))

    @property
    def batches(self) -> bool:
        """Whether `copy_batch` can be called: it needs CUDA 13."""
        return self._batch is not None

    def copy_batch(self, targets: Sequence[int], sources: Sequence[int], num_bytes: int, stream: int) -> None:
        """Pieces of one size, anywhere, in few calls. Raises InvalidCopy if CUDA refuses; some may be queued then.

        Copies that are queued one by one leave the wire idle for microseconds between them: pieces of 64 KiB came at a
        third of its speed, and in batches at all of it.
        """
        sizes = self._sizes.get(num_bytes)
        if sizes is None:
            sizes = self._sizes[num_bytes] = np.full(_BATCH, num_bytes, np.uint64)
        rows = [np.array(addresses, np.uint64) for addresses in (targets, sources)]
        target, source, size = (row.__array_interface__["data"][0] for row in (*rows, sizes))
        for at in range(0, len(targets), _BATCH):
            num = min(_BATCH, len(targets) - at)
            places = target + 8 * at, source + 8 * at, size
            self._check(self._batch(*places, num, self._attributes, self._first, 1, stream))

    def create_event(self, *, spins: bool) -> int:
        """An event of the current device. Who waits for it sleeps, or spins: that takes a core, and is faster."""
        event = ctypes.c_void_p()
        self._check(self._create(ctypes.byref(event), _NO_TIMING if spins else _NO_TIMING | _BLOCKING_SYNC))
        return event.value or 0

    def destroy_event(self, event: int) -> None:
        """Give an event back."""
        self._check(self._destroy(event))

    def record(self, event: int, stream: int) -> None:
        """The event fires when the stream has come this far."""
        self._check(self._record(event, stream))

    def follow(self, stream: int, event: int) -> None:
        """What comes next on the stream waits for the event."""
        self._check(self._follow(stream, event, 0))

    def wait(self, event: int) -> None:
        """Wait until the event has fired. Blocks. Raises what went wrong on the device before it."""
        self._check(self._wait(event))

    @contextmanager
    def on_device(self, number: int) -> Iterator[None]:
        """Make a device this thread's current one, for as long as it takes."""
        before = ctypes.c_int()
        self._check(self._get_device(ctypes.byref(before)))
        if before.value == number:
            yield
            return
        self._check(self._set_device(number))
        try:
            yield
        finally:
            self._check(self._set_device(before.value))

    def _check(self, error: int) -> None:
        if error:
            raise InvalidCopy(f"CUDA refused: {self._describe(error).decode()}")


@cache
def copy_calls() -> CopyCalls:
    """The calls, found once."""
    return CopyCalls()


_kept: list[object] = []  # memory that a copy which does not return may still use


class Pin:
    """Host memory registered with CUDA, in its exact size, until `release`, or until the pin is dropped.

    Holds the memory meanwhile. A registration is its process's: a forked child lets it be.
    """

    def __init__(self, memory: memoryview, address: int) -> None:
        """Made by `pin`."""
        self.address: Final = address
        self.num_bytes: Final = memory.nbytes
        self._release = weakref.finalize(self, _unregister, memory, address, os.getpid())

    @property
    def alive(self) -> bool:
        """Whether it is registered."""
        return self._release.alive

    def release(self) -> None:
        """Unregister; idempotent. Waits for the current device's work."""
        self._release()

    def keep(self) -> None:
        """Leave it registered, and the memory where it is, for as long as the process lives. `release` does nothing."""
        _kept.append(self._release.detach())


def pin(memory: memoryview, address: int) -> Pin | str:
    """Register memory for every device, or say what failed. Blocks, about 40 ms a GiB."""
    try:
        runtime = _runtime()
        error = runtime.cudaHostRegister(address, memory.nbytes, 1)  # 1: portable
    except RuntimeError as failure:  # the driver is there, a usable context is not
        return str(failure)
    if int(error) == 0:
        return Pin(memory, address)
    with suppress(RuntimeError):
        # CUDA remembers the error and hands it to the next kernel launch: let that be one of ours.
        torch.zeros(1, device="cuda")
    return str(runtime.cudaGetErrorString(error))


def _unregister(memory: memoryview, address: int, owner_pid: int) -> None:
    """`memory` is only held, so that the address is still ours here."""
    if os.getpid() != owner_pid:
        return  # a forked child has no CUDA context, and the registration is its parent's
    with suppress(RuntimeError):  # at interpreter exit the context may be gone, and the registration with it
        torch.cuda.synchronize()
        _runtime().cudaHostUnregister(address)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
