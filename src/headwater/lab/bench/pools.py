"""Pages for the store benchmark: names without end, frames in page-aligned, prefaulted pools, and what a copy costs.

The pools are larger than any CPU cache, so that every page comes from memory, as a gathered page does.
"""

import hashlib
import mmap
import time
from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from headwater.core.page import PageName
from headwater.layout.frame import ALIGNMENT, PageMeta, frame_bytes, header_bytes, seal
from headwater.layout.spec import KVLayout

IDENTITY: Final = bytes(range(32))

Page = tuple[PageMeta, memoryview]  # what to write
Wanted = tuple[PageName, memoryview]  # what to read, and where to


class Pool:
    """Frames of one layout, page aligned, back to back in one mapping."""

    def __init__(self, layout: KVLayout, num_pages: int) -> None:
        self.layout = layout
        self.num_pages = num_pages
        self.page_bytes = layout.page_bytes
        self.frame_bytes = frame_bytes(layout.plane_bytes)
        self.stride = -(-self.frame_bytes // ALIGNMENT) * ALIGNMENT
        self._header_bytes = header_bytes(len(layout.plane_bytes))
        self._memory = memoryview(mmap.mmap(-1, self.stride * num_pages))  # shared and anonymous, as a HostCache is
        self._words: npt.NDArray[np.uint64] = np.frombuffer(self._memory, dtype=np.uint64)
        self._words[:: ALIGNMENT // 8] = 0  # touched: no copy pays for a page fault later

    def fill(self, seed: int) -> None:
        """Random bytes everywhere."""
        rng = np.random.default_rng(seed)
        for start in range(0, len(self._words), 1 << 20):
            part = self._words[start : start + (1 << 20)]
            part[:] = rng.integers(0, 1 << 64, len(part), dtype=np.uint64)

    def frame(self, index: int) -> memoryview:
        """One frame, header and payload."""
        return self._memory[index * self.stride : index * self.stride + self.frame_bytes]

    def payload(self, index: int) -> memoryview:
        """One frame's payload."""
        return self.frame(index)[self._header_bytes :]

    def array(self, index: int) -> npt.NDArray[np.uint8]:
        """One frame's payload, for numpy."""
        return np.frombuffer(self.payload(index), dtype=np.uint8)


def endless(layout: KVLayout, *, seed: int, chain: int) -> Iterator[PageMeta]:
    """Pages of endless sequences, each `chain` pages long."""
    number = 0
    while True:
        parent = hashlib.sha256(b"bench root %d" % seed).digest()
        for depth in range(chain):
            key = hashlib.sha256(b"bench %d %d" % (seed, number)).digest()
            yield PageMeta(key=key, identity=IDENTITY, parent=parent, depth=depth, valid_tokens=layout.block_tokens)
            parent = key
            number += 1


def seal_all(pages: list[Page], layout: KVLayout) -> None:
    """Make digests and headers in place."""
    now_ms = int(time.time() * 1000)
    for meta, frame in pages:
        seal(frame, meta, layout, now_ms=now_ms)


def memcpy_gbs(source: Pool, target: Pool, *, num_pages: int, rng: np.random.Generator) -> dict[str, float]:
    """Copy random pages from pool to pool, by numpy and by memoryview; GB/s of each. One thread."""
    pairs = list(
        zip(rng.integers(0, source.num_pages, num_pages), rng.integers(0, target.num_pages, num_pages), strict=True)
    )
    arrays = [(source.array(int(a)), target.array(int(b))) for a, b in pairs]
    begin_s = time.perf_counter()
    for array_from, array_to in arrays:
        np.copyto(array_to, array_from)
    numpy_s = time.perf_counter() - begin_s
    views = [(source.payload(int(a)), target.payload(int(b))) for a, b in pairs]
    begin_s = time.perf_counter()
    for view_from, view_to in views:
        view_to[:] = view_from
    view_s = time.perf_counter() - begin_s
    num_bytes = num_pages * source.page_bytes
    return {"memcpy_numpy_gbs": num_bytes / numpy_s / 1e9, "memcpy_memoryview_gbs": num_bytes / view_s / 1e9}
