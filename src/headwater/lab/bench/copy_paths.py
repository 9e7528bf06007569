"""Ways to move blocks that the copy engine is measured against: one contiguous copy, the limit, and what others do.

`Limit` copies as many bytes as the blocks have, in one piece, between the same host memory and a buffer on the device.
`Pieces` copies each plane of each block by itself, one call each, or all of them in one `cudaMemcpyBatchAsync`. All of
them block until the bytes are there. Nothing here is part of the engine.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch

from headwater.layout.frame import header_bytes
from headwater.transfer.device.arena import DeviceCache
from headwater.transfer.device.cuda import TO_DEVICE, TO_HOST, copy_calls
from headwater.transfer.device.wire import Direction, frame_address


class Limit:
    """One contiguous copy between host memory, registered where there is CUDA, and a buffer of the same size."""

    def __init__(self, area: memoryview, device: torch.device) -> None:
        """Allocates the buffer, as large as `area`."""
        self.device: Final = device
        self._buffer = torch.empty(area.nbytes, dtype=torch.uint8, device=device)
        self._host = torch.from_numpy(np.frombuffer(area, np.uint8))
        self._streams: dict[Direction, Any] = {}
        if device.type == "cuda":
            self._streams = {direction: torch.cuda.Stream(device) for direction in Direction}  # type: ignore[no-untyped-call]

    def copy(self, direction: Direction, num_bytes: int) -> None:
        """One way. Blocks. On the way out it overwrites the area's first bytes."""
        self._begin(direction, 0, num_bytes)
        self._wait()

    def both(self, num_bytes: int, *, second_at: int) -> None:
        """So many bytes out, to the area's beginning, and as many in, from `second_at` on, at once. Blocks."""
        self._begin(Direction.OUT, 0, num_bytes)
        self._begin(Direction.IN, second_at, num_bytes)
        self._wait()

    def close(self) -> None:
        """Give the buffer back."""
        self._buffer = self._host = torch.empty(0, dtype=torch.uint8)

    def _begin(self, direction: Direction, at: int, num_bytes: int) -> None:
        pair = self._host[at : at + num_bytes], self._buffer[at : at + num_bytes]
        target, source = pair if direction is Direction.OUT else pair[::-1]
        if not self._streams:
            target.copy_(source)
            return
        kind = TO_HOST if direction is Direction.OUT else TO_DEVICE
        stream = self._streams[direction].cuda_stream
        copy_calls().copy(target.data_ptr(), source.data_ptr(), num_bytes, kind, stream)

    def _wait(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()


class Pieces:
    """The planes of some blocks and their places in frames, as pairs of addresses. CUDA only."""

    def __init__(
        self, cache: DeviceCache, slots: Sequence[int], frames: Sequence[memoryview], direction: Direction
    ) -> None:
        layout = cache.layout
        start = header_bytes(len(layout.planes))
        planes = list(zip(cache.rows, layout.plane_bytes, layout.offsets, strict=True))
        host = [frame_address(frame) + start + offset for frame in frames for _, _, offset in planes]
        device = [rows.data_ptr() + slot * size for slot in slots for rows, size, _ in planes]
        self._targets, self._sources = (host, device) if direction is Direction.OUT else (device, host)
        self._sizes = [size for _ in slots for _, size, _ in planes]
        self._kind = TO_HOST if direction is Direction.OUT else TO_DEVICE
        self._stream: Any = torch.cuda.Stream(cache.device)  # type: ignore[no-untyped-call]

    def one_by_one(self) -> None:
        """A call for each. Blocks."""
        copy, stream = copy_calls().copy, self._stream.cuda_stream
        for target, source, size in zip(self._targets, self._sources, self._sizes, strict=True):
            copy(target, source, size, self._kind, stream)
        self._stream.synchronize()

    def batch(self) -> None:
        """Few calls for all. Blocks. Raises InvalidCopy if CUDA refuses."""
        calls, stream = copy_calls(), self._stream.cuda_stream
        for size in set(self._sizes):
            rows = [one for one, num_bytes in enumerate(self._sizes) if num_bytes == size]
            calls.copy_batch([self._targets[i] for i in rows], [self._sources[i] for i in rows], size, stream)
        self._stream.synchronize()
