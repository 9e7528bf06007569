"""How pages get to the engine: where they lie, or through a buffer that it reaches.

Over TCP the engine reads and writes any memory. Over RDMA only what was registered with it, through shared memory only
what is shared with the client process. The buffer is one, and a call's at a time. Knows no page names, no statuses.
"""

import threading
from collections.abc import Sequence
from typing import Final

import numpy as np

from headwater.core.errors import StoreUnavailable
from headwater.storage.base import Deadline
from headwater.storage.mooncake.engine import INVALID, RPC_FAIL, MooncakeEngine, address_of

_ALIGNMENT: Final = 4096  # of pages in the buffer: copies to odd places are slow on some machines


def room(num_bytes: int) -> int:
    """Bytes that a page takes in the buffer."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


class MooncakeMemory:
    """Hands memory to an engine, copied where it must be. Calls may come from several threads."""

    def __init__(self, engine: MooncakeEngine, buffer_bytes: int) -> None:
        """The buffer is made when it is first needed."""
        self._engine = engine
        self._buffer_bytes = buffer_bytes
        self._buffer: memoryview | None = None
        self._busy = threading.Lock()

    def reaches(self, memory: memoryview) -> bool:
        """Whether the engine reaches a page where it lies."""
        return not len(memory) or self._engine.reaches(address_of(memory), len(memory))

    def takes(self, memory: memoryview) -> bool:
        """Whether a page can go to the engine at all: it is not larger than the buffer it would need."""
        return len(memory) <= self._buffer_bytes or self.reaches(memory)

    def move(
        self, items: Sequence[tuple[str, memoryview]], deadline: Deadline, *, reached: bool, out: bool
    ) -> list[int] | None:
        """Have the engine read memory (a put) or fill it (a get: `out`). The engine's codes, one for each.

        None: the buffer was not free by the deadline.
        """
        call = self._engine.get if out else self._engine.put
        keys, sizes = [key for key, _ in items], [len(memory) for _, memory in items]
        if reached:
            return call(keys, [address_of(memory) if len(memory) else 0 for _, memory in items], sizes, deadline)
        if not self._busy.acquire(timeout=deadline.remaining_s):
            return None
        try:
            if sum(map(room, sizes)) > self._buffer_bytes:
                return [INVALID] * len(items)
            places = self._places(sizes)
            if places is None:
                return [RPC_FAIL] * len(items)
            if not out:
                for place, (_, memory) in zip(places, items, strict=True):
                    np.copyto(place, np.frombuffer(memory, np.uint8))  # without the GIL
            codes = call(keys, [address_of(place.data) for place in places], sizes, deadline)
            if out:
                for place, code, (_, memory) in zip(places, codes, items, strict=True):
                    if code == len(memory):
                        np.copyto(np.frombuffer(memory, np.uint8), place)
            return codes
        finally:
            self._busy.release()

    def _places(self, sizes: Sequence[int]) -> list[np.typing.NDArray[np.uint8]] | None:
        """Where in the buffer each page goes; None where no buffer is to be had."""
        if self._buffer is None:
            try:
                self._buffer = self._engine.allocate(self._buffer_bytes)
            except StoreUnavailable:
                return None
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + room(size))
        whole = np.frombuffer(self._buffer, np.uint8)
        return [whole[start : start + size] for start, size in zip(starts, sizes, strict=False)]
