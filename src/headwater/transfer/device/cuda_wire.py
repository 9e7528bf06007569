"""Wires of a GPU: pieces on streams of their own, kernels by address, copies by the GPU's copy engines (`wire.py`).

`StagedWire` takes any planes: one kernel gathers and digests into a buffer on the device, and a copy engine moves that
buffer, piece by piece behind each other; the other direction the same backwards.

`RunWire` is for blocks that are one run of bytes each, as their pages are: copy engines move them straight between
block and frame, and a kernel digests the blocks, in front of nobody: beside the copies on their way out, behind them on
their way in. No buffer, so a piece may be large, and the device's processors are needed once for each. A kernel that
waits on the device for copies takes turns with an engine's kernels meanwhile, so it is launched when they have ended.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Final, Self

import numpy as np
import numpy.typing as npt
import torch

from headwater.core.errors import InvalidInput
from headwater.layout.frame import header_bytes
from headwater.layout.spec import KVLayout
from headwater.transfer.device.arena import DeviceCache, find_planes
from headwater.transfer.device.cuda import TO_DEVICE, TO_HOST, copy_calls
from headwater.transfer.device.wire import MAX_ROWS, Digests, DirectCopies, Direction, WirePiece

_ALIGNMENT: Final = 16  # of a row in a buffer on the device: vector loads
_PLACES, _PLACE_BYTES = 4, 31 << 20
_TURN_PLACES, _TURN_BYTES = 2, 124 << 20  # the same, where kernels take turns with those of another process
_RUN_PLACES, _RUN_BYTES = 3, 512 << 20  # of blocks that need no buffer
_PROGRAMS: Final = 32  # of a kernel that runs beside an engine's
_MAX_PITCH: Final = (1 << 31) - 1


class CudaWire(ABC):
    """What both have: a number of places, each with its slots, its digests and its events; three streams."""

    by_address: Final = True
    in_stages: ClassVar[bool]

    def __init__(
        self,
        cache: DeviceCache,
        layout: KVLayout,
        direction: Direction,
        *,
        num_places: int,
        place_bytes: int,
        digests: bool,
        copies: bool,
    ) -> None:
        """`copies`: the kernel moves bytes, too."""
        from headwater.transfer.device.triton_copy import Launcher, PlaneTable

        # Beside an engine's kernels ours take few processors, for long. In turns with them they take all, and rarely:
        # while one runs nothing else does, and a turn costs as much as a small copy.
        programs = None if cache.takes_turns else _PROGRAMS
        self.num_places: Final = num_places
        self.place_bytes: Final = place_bytes
        self._out: Final = direction is Direction.OUT
        self._payload_at = header_bytes(len(layout.planes))
        self._calls = calls = copy_calls()
        self._pieces: list[tuple[int, int]] = [(0, 0)] * num_places  # rows and planes of what is at each place
        with torch.cuda.device(cache.device):
            self._table = PlaneTable(cache, layout)
            self._kernel = Launcher(
                self._table, scatters=copies and not self._out, copies=copies, digests=digests, programs=programs
            )
            self._device_number = self._table.device.index
            self._slots = _Words(num_places, MAX_ROWS)
            self._digests = _Words(num_places, MAX_ROWS * len(layout.planes)) if digests else None
            self._streams: list[Any] = [torch.cuda.Stream(cache.device) for _ in range(3)]  # type: ignore[no-untyped-call]
            self._kernels, *self._copies = (int(stream.cuda_stream) for stream in self._streams)
            self._half = [calls.create_event(spins=True) for _ in range(num_places)]
            self._over = [
                {spins: calls.create_event(spins=spins) for spins in (True, False)} for _ in range(num_places)
            ]

    def direct(self) -> DirectCopies | None:
        """None: there is one way."""
        return None

    def launch(self, place: int, piece: WirePiece) -> None:
        """Queue kernel and copies on the device."""
        num_rows, planes = len(piece.slots), piece.planes
        start, width = self._table.span(planes)
        if num_rows > MAX_ROWS or num_rows * _aligned(width) > self.place_bytes:
            raise InvalidInput(f"{num_rows} rows of {width} bytes are more than one place takes")
        self._pieces[place] = num_rows, len(planes)
        self._slots.words[place, :num_rows] = piece.slots
        with self._calls.on_device(self._device_number), self._all_or_nothing():
            last = self._queue(place, piece, start, width)
            for event in self._over[place].values():
                self._calls.record(event, last)

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
        self._table.close()
        self._slots.close()
        if self._digests is not None:
            self._digests.close()
        for event in (*self._half, *(event for pair in self._over for event in pair.values())):
            self._calls.destroy_event(event)
        self._half, self._over = [], []

    @abstractmethod
    def _queue(self, place: int, piece: WirePiece, start: int, width: int) -> int:
        """Queue everything, and return the stream on which it ends. `start`, `width`: of the planes in a payload."""

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """If not everything could be queued, nothing of it may land later."""
        try:
            yield
        except BaseException:
            for stream in self._streams:
                stream.synchronize()
            raise

    def _addresses(self, piece: WirePiece, start: int) -> list[int]:
        """Where the planes are in each frame."""
        at = self._payload_at + start
        return [address + at for address in piece.addresses]

    def _run_kernel(self, place: int, piece: WirePiece, rows: int = 0, stride: int = 0) -> None:
        self._kernel(
            self._kernels,
            piece.planes,
            slots=self._slots.at(place),
            rows=rows,
            row_stride=stride,
            num_rows=len(piece.slots),
            digests=self._digests.at(place) if self._digests is not None else 0,
        )

    def _copy(self, hosts: list[int], devices: list[int], width: int, stream: int) -> None:
        """Copies between frames and rows on the device, anywhere."""
        if self._calls.batches and len(hosts) > 1:
            self._calls.copy_batch(*((hosts, devices) if self._out else (devices, hosts)), width, stream)
            return
        kind = TO_HOST if self._out else TO_DEVICE
        for at, end in _even_runs(hosts, devices):
            host, device = hosts[at], devices[at]
            if end - at == 1:
                target, source = (host, device) if self._out else (device, host)
                self._calls.copy(target, source, width, kind, stream)
            else:
                ends = (host, hosts[at + 1] - host), (device, devices[at + 1] - device)
                target_rows, source_rows = ends if self._out else ends[::-1]
                self._calls.copy_rows(
                    target_rows, source_rows, row_bytes=width, num_rows=end - at, kind=kind, stream=stream
                )


class StagedWire(CudaWire):
    """Through buffers on the device: places x place bytes.

    A piece of at most `direct_bytes` whose frames lie evenly spaced is copied by the kernel itself, over the bus: one
    stage less, and slower per byte.
    """

    in_stages = True

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
        from headwater.transfer.device.xxh3 import SHORT

        num_places = num_places or (_TURN_PLACES if cache.takes_turns else _PLACES)
        most = place_bytes or (_TURN_BYTES if cache.takes_turns else _PLACE_BYTES)
        place_bytes = max(most, *map(_aligned, layout.plane_bytes))
        super().__init__(
            cache, layout, direction, num_places=num_places, place_bytes=place_bytes, digests=digests, copies=True
        )
        self.direct_bytes: int = direct_bytes
        # Short pieces are read twice, once to be digested: out of memory that others write to, that proves nothing.
        self._may_be_direct = self._out or min(layout.plane_bytes) > SHORT.value
        self._buffers = torch.empty(num_places * place_bytes, dtype=torch.uint8, device=cache.device)
        self._buffers_at = self._buffers.data_ptr()
        torch.cuda.synchronize(cache.device)  # the cache was zeroed on another stream, which ours do not follow

    def direct(self) -> Self:
        """Itself."""
        return self

    def _queue(self, place: int, piece: WirePiece, start: int, width: int) -> int:
        frames = self._addresses(piece, start)
        if self._may_be_direct and len(frames) * width <= self.direct_bytes and self._copy_direct(place, piece, frames):
            return self._kernels
        calls, half, stride = self._calls, self._half[place], _aligned(width)
        copies = self._copies[place % 2]  # in turns: while one piece ends, the next has begun
        buffer = self._buffers_at + place * self.place_bytes
        rows = list(range(buffer, buffer + len(frames) * stride, stride))
        if self._out:
            self._run_kernel(place, piece, buffer, stride)  # first: what follows is prepared while it runs
            calls.record(half, self._kernels)
            calls.follow(copies, half)
            self._copy(frames, rows, width, copies)
            return copies
        self._copy(frames, rows, width, copies)
        calls.record(half, copies)
        calls.follow(self._kernels, half)
        self._run_kernel(place, piece, buffer, stride)
        return self._kernels

    def _copy_direct(self, place: int, piece: WirePiece, frames: list[int]) -> bool:
        """Have the kernel reach into the frames. False: they are not evenly spaced, and nothing was done."""
        if _even_run(frames, 0) < len(frames):
            return False
        self._run_kernel(place, piece, frames[0], frames[1] - frames[0] if len(frames) > 1 else 0)
        return True

    def close(self) -> None:
        """Free everything."""
        self._buffers = torch.empty(0)
        super().close()


class RunWire(CudaWire):
    """Straight between blocks and frames."""

    in_stages = False

    def __init__(
        self,
        cache: DeviceCache,
        layout: KVLayout,
        direction: Direction,
        *,
        num_places: int = _RUN_PLACES,
        place_bytes: int = _RUN_BYTES,
        digests: bool = True,
    ) -> None:
        """Raises InvalidInput where a block is not one run (`one_run`)."""
        run = one_run(cache, layout)
        if run is None:
            raise InvalidInput("a block of this cache is not one run of bytes, as its page is")
        self._blocks_at, self._block_stride = run
        self._undigested: list[WirePiece | None] = [None] * num_places  # pieces on their way in
        most = max(place_bytes, *map(_aligned, layout.plane_bytes))
        super().__init__(
            cache, layout, direction, num_places=num_places, place_bytes=most, digests=digests, copies=False
        )
        torch.cuda.synchronize(cache.device)  # as above

    def launch(self, place: int, piece: WirePiece) -> None:
        """Queue copies, and on their way out the kernel."""
        self._undigested[place] = None
        super().launch(place, piece)

    def close(self) -> None:
        """Free everything."""
        self._undigested = [None] * self.num_places
        super().close()

    def _queue(self, place: int, piece: WirePiece, start: int, width: int) -> int:
        frames = self._addresses(piece, start)
        blocks = (piece.slots * self._block_stride + (self._blocks_at + start)).tolist()
        calls, half = self._calls, self._half[place]
        copies = self._copies[place % 2]
        if self._digests is None:
            self._copy(frames, blocks, width, copies)
            return copies
        if self._out:
            self._run_kernel(place, piece)
            calls.record(half, self._kernels)
            self._copy(frames, blocks, width, copies)
            calls.follow(copies, half)
            return copies
        self._copy(frames, blocks, width, copies)
        self._undigested[place] = piece
        return copies

    def finish(self, place: int, *, hurry: bool = False) -> Digests | None:
        """Wait for the copies; digest what arrived, if that is still to be done; wait for that, too."""
        piece = self._undigested[place]
        if piece is not None:
            self._calls.wait(self._over[place][hurry])
            with self._calls.on_device(self._device_number):
                self._run_kernel(place, piece)
                for event in self._over[place].values():
                    self._calls.record(event, self._kernels)
            self._undigested[place] = None  # last: who was interrupted finishes it once more, and digests then
        return super().finish(place, hurry=hurry)


def one_run(cache: DeviceCache, layout: KVLayout) -> tuple[int, int] | None:
    """Where the first block is and how far the next, where a block's planes lie as in a page. None: they do not."""
    rows = find_planes(cache, layout)
    begin, stride = rows[0].data_ptr(), rows[0].stride(0)
    as_in_page = all(
        row.data_ptr() == begin + offset and row.stride(0) == stride
        for row, offset in zip(rows, layout.offsets, strict=True)
    )
    return (begin, stride) if as_in_page and layout.page_bytes <= stride else None


class _Words:
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


def _even_runs(hosts: list[int], devices: list[int]) -> Iterator[tuple[int, int]]:
    """Neighbours, from one index to before another, that lie evenly spaced on both sides. Linear in their number."""
    at = host_end = device_end = 0
    while at < len(hosts):
        # The last of a run may begin another one. What lies farther ahead is looked at once: blocks that an engine took
        # in descending order, beside frames in a row, would have all of them looked at for each.
        if host_end <= at + 1:
            host_end = _even_run(hosts, at)
        if device_end <= at + 1:
            device_end = _even_run(devices, at)
        end = min(host_end, device_end)
        yield at, end
        at = end


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
