"""A device and its staging in plain numpy: what an executor needs of torch and of a GPU, without either.

Hooks are called before each block is copied, with what goes where: a test waits there, or raises. What was copied is
recorded, block by block, in the order it happened.
"""

import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from headwater.core.errors import InvalidCopy
from headwater.layout.frame import frame_bytes, header_bytes
from headwater.layout.spec import KVLayout

Hook: TypeAlias = Callable[[int, int], None]  # slot, page


class BytesStaging:
    """A `Staging` of `num_pages` pages beside a device of `num_slots` blocks, whose bytes are random by the seed."""

    def __init__(self, layout: KVLayout, *, num_slots: int, num_pages: int, seed: int = 0) -> None:
        self.device: npt.NDArray[np.uint8] = np.random.default_rng(seed).integers(
            0, 256, (num_slots, layout.page_bytes), dtype=np.uint8
        )
        self.pages = np.zeros((num_pages, frame_bytes(layout.plane_bytes)), dtype=np.uint8)
        self.on_gather: Hook | None = None
        self.on_scatter: Hook | None = None
        self.gathered: list[tuple[int, int]] = []  # (slot, page)
        self.scattered: list[tuple[int, int]] = []  # (slot, page)
        self.touched: list[int] = []  # pages, each time they were gathered into or their frame was asked for
        self._offset = header_bytes(len(layout.planes))
        self._lock = threading.Lock()

    @property
    def num_pages(self) -> int:
        return len(self.pages)

    def in_place(self, memory: memoryview | None = None) -> None:
        return None

    def block(self, slot: int) -> bytes:
        """What a slot holds now."""
        return bytes(self.device[slot])

    def frame(self, page: int) -> memoryview:
        self._check([], [page])
        with self._lock:
            self.touched.append(page)
        return memoryview(self.pages[page])

    def gather(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        self._check(slots, pages)
        for slot, page in zip(slots, pages, strict=True):
            if self.on_gather is not None:
                self.on_gather(slot, page)
            with self._lock:
                self.touched.append(page)
                self.gathered.append((slot, page))
            self.pages[page, self._offset :] = self.device[slot]

    def scatter(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        self._check(slots, pages)
        for slot, page in zip(slots, pages, strict=True):
            if self.on_scatter is not None:
                self.on_scatter(slot, page)
            with self._lock:
                self.scattered.append((slot, page))
            self.device[slot] = self.pages[page, self._offset :]

    def _check(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        for what, ids, end in (("slot", slots, len(self.device)), ("page", pages, len(self.pages))):
            if any(not 0 <= one < end for one in ids):
                raise InvalidCopy(f"a {what} of {list(ids)} does not exist; there are {end}")
