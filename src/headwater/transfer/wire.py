"""A wire: one direction of copies between a device's blocks and host frames, a fixed number of pieces at a time.

    OUT    frame payload <- block        IN    block <- frame payload

A piece is some planes of some blocks. `launch` begins one at a *place* and returns; `finish` waits for it and gives the
digests of the bytes that passed. Places are numbered, and a place holds one piece from launch to finish: that bounds
the memory. Who uses which place when is the copy engine's business (`copy_engine.py`).

`CudaWire` gathers and digests in one kernel into a buffer on the device, and has the copy engine of the GPU move that
buffer, piece by piece behind each other on two streams; the other direction the same backwards. For a CPU there is
`TorchWire` (`torch_wire.py`).

Invariants: everything is checked before a byte moves. Nothing is allocated and no device synchronised after the
beginning. A digest is of the bytes as they were written at their target, or in the buffer that was copied from there.
"""

import enum
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from headwater.core.errors import InvalidInput
from headwater.layout.frame import header_bytes
from headwater.layout.spec import KVLayout
from headwater.transfer.arena import DeviceCache
from headwater.transfer.cuda import TO_DEVICE, TO_HOST, copy_calls

Digests: TypeAlias = npt.NDArray[np.uint64]  # [blocks, planes]
MAX_ROWS: Final = 1024  # blocks of one piece
_ALIGNMENT: Final = 16  # of a row in a buffer on the device: vector loads
_PLACES, _PLACE_BYTES = 4, 31 << 20
_TURN_PLACES, _TURN_BYTES = 2, 124 << 20  # the same, where kernels take turns with those of another process
_PROGRAMS: Final = 32  # of a kernel that runs beside an engine's


class Direction(enum.Enum):
    """Which way the bytes go."""

    OUT = "out"  # from the device
    IN = "in"


@dataclass(frozen=True, slots=True)
class Piece:
    """Planes `planes` of the blocks in `slots`, and the frames whose payload they are."""

    slots: npt.NDArray[np.int64]
    frames: Sequence[memoryview]
    planes: range
    addresses: Sequence[int] = ()  # where the frames begin; none, for a wire that does not ask for them


class Wire(Protocol):
    """One direction. Calls of one place come from one thread at a time; several places may be in use at once."""

    @property
    def num_places(self) -> int:
        """How many pieces can be under way."""
        ...

    @property
    def place_bytes(self) -> int:
        """The largest piece."""
        ...

    @property
    def by_address(self) -> bool:
        """Whether it has to know where frames lie."""
        ...

    def launch(self, place: int, piece: Piece) -> None:
        """Begin. Does not wait. Raises what the device raises; the place is to be finished all the same."""
        ...

    def finish(self, place: int, *, hurry: bool) -> Digests | None:
        """Wait until the piece is over; then its digests, if this wire makes them. Raises what the device raises.

        `hurry`: somebody waits for just this, so microseconds count more than a core.
        """
        ...

    def close(self) -> None:
        """Give memory back; nothing is under way. Idempotent."""
        ...


class CudaWire:
    """Kernel and DMA behind each other, on streams of their own. Memory on the device: places x place bytes.

    A piece of at most `direct_bytes` whose frames lie evenly spaced is copied by the kernel itself, over the bus: one
    stage less, and slower per byte.
    """

    by_address: Final = True

    def __init__(
        self,
        cache: DeviceCache,
        layout: KVLayout,
        direction: Direction,
        *,
        num_places: int | None = None,
        place_bytes: int | None = None,
        digests: bool = True,
        direct_bytes: int = 0,
    ) -> None:
        from headwater.transfer.triton_copy import Launcher, PlaneTable
        from headwater.transfer.xxh3 import SHORT

        # Beside an engine's kernels a copy takes few processors, for long. In turns with them it takes all, and rarely:
        # while it runs nothing else does, and a turn costs as much as a small copy.
        programs = None if cache.takes_turns else _PROGRAMS
        num_places = num_places or (_TURN_PLACES if cache.takes_turns else _PLACES)
        most = place_bytes or (_TURN_BYTES if cache.takes_turns else _PLACE_BYTES)
        self.num_places: Final = num_places
        self.place_bytes: Final = max(most, *map(_aligned, layout.plane_bytes))
        self._out: Final = direction is Direction.OUT
        self._payload_at = header_bytes(len(layout.planes))
        self.direct_bytes = direct_bytes
        # Short pieces are read twice, once to be digested: out of memory that others write to, that proves nothing.
        self._may_be_direct = self._out or min(layout.plane_bytes) > SHORT.value
        self._calls = calls = copy_calls()
        self._pieces: list[tuple[int, int]] = [(0, 0)] * num_places  # rows and planes of what is at each place
        with torch.cuda.device(cache.device):
            self._table = PlaneTable(cache, layout)
            self._kernel = Launcher(self._table, scatters=not self._out, digests=digests, programs=programs)
            self._buffers = torch.empty(num_places * self.place_bytes, dtype=torch.uint8, device=cache.device)
            self._buffers_at = self._buffers.data_ptr()
            self._device_number = self._buffers.get_device()
            self._slots = _Table(num_places, MAX_ROWS)
            self._digests = _Table(num_places, MAX_ROWS * len(layout.planes)) if digests else None
            self._streams: list[Any] = [torch.cuda.Stream(cache.device) for _ in range(3)]  # type: ignore[no-untyped-call]
            self._kernels, *self._copies = (int(stream.cuda_stream) for stream in self._streams)
            self._half = [calls.create_event(spins=True) for _ in range(num_places)]
            self._over = [
                {spins: calls.create_event(spins=spins) for spins in (True, False)} for _ in range(num_places)
            ]
            torch.cuda.synchronize(cache.device)  # the cache was zeroed on another stream, which ours do not follow

    def launch(self, place: int, piece: Piece) -> None:
        """Queue kernel and copies on the device."""
        num_rows, planes = len(piece.slots), piece.planes
        start, width = self._table.span(planes)
        stride = _aligned(width)
        if num_rows > MAX_ROWS or num_rows * stride > self.place_bytes:
            raise InvalidInput(f"{num_rows} rows of {stride} bytes are more than one place takes")
        self._pieces[place] = num_rows, len(planes)
        self._slots.words[place, :num_rows] = piece.slots
        calls, half = self._calls, self._half[place]
        copies = self._copies[place % 2]  # in turns: while one piece ends, the next has begun
        buffer = self._buffers_at + place * self.place_bytes
        with calls.on_device(self._device_number), self._all_or_nothing():
            last = self._kernels
            direct = self._may_be_direct and num_rows * width <= self.direct_bytes
            if direct and self._copy_direct(place, piece, self._payload_at + start):
                pass
            elif self._out:
                self._run_kernel(place, piece, buffer, stride)  # first: what follows is prepared while it runs
                calls.record(half, self._kernels)
                calls.follow(copies, half)
                self._copy(self._addresses(piece, start), buffer, width, stride, copies)
                last = copies
            else:
                self._copy(self._addresses(piece, start), buffer, width, stride, copies)
                calls.record(half, copies)
                calls.follow(self._kernels, half)
                self._run_kernel(place, piece, buffer, stride)
            for event in self._over[place].values():
                calls.record(event, last)

    def finish(self, place: int, *, hurry: bool = False) -> Digests | None:
        """Wait for the device's event."""
        self._calls.wait(self._over[place][hurry])
        if self._digests is None:
            return None
        num_rows, num_planes = self._pieces[place]
        found: Digests = self._digests.words[place, : num_rows * num_planes].view(np.uint64).copy()
        return found.reshape(num_rows, num_planes)

    def close(self) -> None:
        """Free everything."""
        self._buffers = torch.empty(0)
        self._table.close()
        self._slots.close()
        if self._digests is not None:
            self._digests.close()
        for event in (*self._half, *(event for pair in self._over for event in pair.values())):
            self._calls.destroy_event(event)
        self._half, self._over = [], []

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """If not everything could be queued, nothing of it may land later."""
        try:
            yield
        except BaseException:
            for stream in self._streams:
                stream.synchronize()
            raise

    def _addresses(self, piece: Piece, start: int) -> list[int]:
        at = self._payload_at + start
        return [address + at for address in piece.addresses]

    def _run_kernel(self, place: int, piece: Piece, rows: int, stride: int) -> None:
        self._kernel(
            self._kernels,
            piece.planes,
            slots=self._slots.at(place),
            rows=rows,
            row_stride=stride,
            num_rows=len(piece.slots),
            digests=self._digests.at(place) if self._digests is not None else 0,
        )

    def _copy_direct(self, place: int, piece: Piece, start: int) -> bool:
        """Have the kernel reach into the frames. False: they are not evenly spaced, and nothing was done."""
        addresses = self._addresses(piece, start - self._payload_at)
        if _even_run(addresses, 0) < len(addresses):
            return False
        pitch = addresses[1] - addresses[0] if len(addresses) > 1 else 0
        self._run_kernel(place, piece, addresses[0], pitch)
        return True

    def _copy(self, addresses: list[int], buffer: int, width: int, stride: int, stream: int) -> None:
        """Copies between evenly spaced rows of the buffer and frames anywhere; neighbours at one distance in one go."""
        kind = TO_HOST if self._out else TO_DEVICE
        at = 0
        while at < len(addresses):
            end = _even_run(addresses, at)
            host, device = addresses[at], buffer + at * stride
            if end - at == 1:
                target, source = (host, device) if self._out else (device, host)
                self._calls.copy(target, source, width, kind, stream)
            else:
                ends = (host, addresses[at + 1] - host), (device, stride)
                target_rows, source_rows = ends if self._out else ends[::-1]
                self._calls.copy_rows(
                    target_rows, source_rows, row_bytes=width, num_rows=end - at, kind=kind, stream=stream
                )
            at = end


class _Table:
    """Words in pinned memory, a row for each place, which kernels read and write over the bus: they are few."""

    def __init__(self, num_places: int, num_words: int) -> None:
        self._tensor = torch.zeros(num_places, num_words, dtype=torch.int64, pin_memory=True)
        self.words: npt.NDArray[np.int64] = self._tensor.numpy()
        self._address = self._tensor.data_ptr()
        self._row_bytes = 8 * num_words

    def at(self, place: int) -> int:
        """Where a place's row is."""
        return self._address + place * self._row_bytes

    def close(self) -> None:
        """Free it."""
        self._tensor = torch.empty(0, 0, dtype=torch.int64)
        self.words = np.empty((0, 0), np.int64)


_MAX_PITCH: Final = (1 << 31) - 1


def _even_run(addresses: list[int], at: int) -> int:
    """Where the run of ascending, evenly spaced addresses that begins at `at` ends."""
    end = at + 1
    if end == len(addresses):
        return end
    pitch = addresses[end] - addresses[at]
    if not 0 < pitch <= _MAX_PITCH:
        return end
    while end < len(addresses) and addresses[end] - addresses[end - 1] == pitch:
        end += 1
    return end


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def frame_address(frame: memoryview) -> int:
    """Where a frame's memory begins."""
    address: int = np.frombuffer(frame, np.uint8).__array_interface__["data"][0]
    return address
