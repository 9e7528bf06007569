"""Memory for KV: an engine's paged planes on a device, and block-major pages on the host. Owns and frees what it made.

A cache here is an allocation with a shape, nothing more: who uses which block or page is decided elsewhere.

Invariants: `close()` may be called any number of times, and every use after it raises ResourceClosed. Memory that
somebody still looks at through a tensor or a memoryview stays mapped until that goes away; no pointer ever dangles. A
host cache that cannot be had in full, pinned where there is CUDA, is not had at all: HostTierUnavailable, and nothing
is left behind.
"""

import mmap
from abc import abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import numpy as np
import torch

from headwater.core.closing import Closing
from headwater.core.errors import HostTierUnavailable, InvalidCopy, InvalidInput, ResourceClosed
from headwater.layout.spec import DType, KVLayout
from headwater.storage.local.directory import available_memory
from headwater.transfer.device.cuda import Pin, pin

PAGE_ALIGNMENT: Final = 4096

_TORCH_DTYPE: Final = {
    DType.BF16: torch.bfloat16,
    DType.FP16: torch.float16,
    DType.FP32: torch.float32,
    DType.FP8_E4M3: torch.float8_e4m3fn,
    DType.FP8_E5M2: torch.float8_e5m2,
    DType.INT8: torch.int8,
    DType.UINT8: torch.uint8,
}


class Owned(Closing):
    """Memory that frees itself once: by close(), at the end of a `with` block, or when the last reference goes."""

    @abstractmethod
    def close(self) -> object:
        """Give the memory up; idempotent."""


class DeviceCache(Owned):
    """Per-layer paged planes, [num_blocks, *plane.shape] each, as an engine's attention wants them."""

    layerwise: bool = True  # whether somebody computes with a block's first layers while the others are on their way
    takes_turns: bool = False  # whether our kernels never run beside the engine's: it is in another process

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.device = device
        # Bytes first, types as views of them: every dtype can be zeroed and copied as bytes, not every one as itself.
        self._rows = [
            torch.zeros(num_blocks, num_bytes, dtype=torch.uint8, device=device) for num_bytes in layout.plane_bytes
        ]
        self._flat = [
            row.view(_TORCH_DTYPE[plane.dtype]).view(num_blocks, *plane.shape)
            for plane, row in zip(layout.planes, self._rows, strict=True)
        ]
        names = [(plane.role.name, plane.layer) for plane in layout.planes]
        self._tensors = MappingProxyType(dict(zip(names, self._flat, strict=True)))
        self._closed = False

    @property
    def rows(self) -> list[torch.Tensor]:
        """Each plane as bytes, [num_blocks, plane bytes], in flat order; the same memory as `flat`."""
        self._check_open()
        return self._rows

    @property
    def flat(self) -> list[torch.Tensor]:
        """The planes in flat order, as engines address them by position."""
        self._check_open()
        return self._flat

    @property
    def tensors(self) -> Mapping[tuple[str, int], torch.Tensor]:
        """The planes by (role name, layer)."""
        self._check_open()
        return self._tensors

    def close(self) -> None:
        """Give the memory up; idempotent. Tensors held elsewhere stay valid."""
        self._closed = True
        self._rows = []
        self._flat = []
        self._tensors = MappingProxyType({})

    def _check_open(self) -> None:
        if self._closed:
            raise ResourceClosed("the device cache is closed")


class HostCache(Owned):
    """Block-major pages in one anonymous mapping, each page aligned, registered with CUDA where there is one.

    Made by `create_host_cache`. Close it only when no copy from or to it is in flight on another device or thread.
    """

    def __init__(self, mapping: mmap.mmap, *, page_bytes: int, page_stride: int, num_pages: int) -> None:
        self.page_bytes = page_bytes
        self.page_stride = page_stride
        self.num_pages = num_pages
        # numpy holds the buffer, torch.frombuffer would not: it would let the mapping be closed under the tensor.
        # Nobody ever calls mapping.close(): the last reference unmaps it.
        array = np.frombuffer(mapping, dtype=np.uint8).reshape(num_pages, page_stride)
        self._pages: torch.Tensor | None = torch.from_numpy(array)
        self._memory = memoryview(mapping)
        self._held: Pin | None = None

    @property
    def pages(self) -> torch.Tensor:
        """All pages, uint8 [num_pages, page_stride]; bytes from `page_bytes` on are padding."""
        if self._pages is None:
            raise ResourceClosed("the host cache is closed")
        return self._pages

    @property
    def pinned(self) -> bool:
        """Whether the memory is registered with CUDA right now."""
        return self._held is not None and self._held.alive

    @property
    def memory(self) -> memoryview:
        """All of it, for who has to be shown where the pages lie."""
        return self._memory

    def page(self, index: int) -> memoryview:
        """One page, writable, exactly `page_bytes` long."""
        if not 0 <= index < len(self.pages):
            raise InvalidInput(f"page {index} does not exist; there are {self.num_pages}")
        return self._memory[index * self.page_stride : index * self.page_stride + self.page_bytes]

    def close(self) -> None:
        """Unpin, then give the memory up; idempotent. Waits for the current device's copies."""
        if self._held is not None:
            self._held.release()
        self._pages = None
        self._memory = memoryview(b"")

    def keep(self) -> None:
        """Leave it registered for good: a copy that does not return may still use it. `close` only forgets it then."""
        if self._held is not None:
            self._held.keep()

    def _pin(self) -> str | None:
        """Register the mapping in its exact size (torch's own pinning rounds up to powers of two); say what failed."""
        found = pin(self._memory, self.pages.data_ptr())
        if isinstance(found, str):
            return found
        self._held = found
        return None


def create_kv_cache(layout: KVLayout, num_blocks: int, device: str | torch.device = "cpu") -> DeviceCache:
    """Allocate zeroed planes for `num_blocks` blocks. Blocks; raises what torch raises when the device is full."""
    _check_positive("num_blocks", num_blocks)
    where = torch.device(device)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise InvalidInput(f"there is no CUDA device here for {device}")
    return DeviceCache(layout, num_blocks, where)


def find_planes(cache: DeviceCache, layout: KVLayout) -> list[torch.Tensor]:
    """The cache's rows for each plane of a layout, in its flat order; InvalidCopy where a plane is not the same."""
    rows = cache.rows
    found = []
    for plane in layout.planes:
        index = cache.layout.index(plane.role.name, plane.layer)
        if cache.layout.planes[index] != plane:
            raise InvalidCopy(f"the cache's plane is {cache.layout.planes[index]}, the page's {plane}")
        found.append(rows[index])
    return found


def create_host_cache(page: int | KVLayout, num_pages: int) -> HostCache:
    """Allocate zeroed, aligned pages of `page` bytes (or of a layout's page), pinned where CUDA is there.

    Blocks while the memory is registered. Raises HostTierUnavailable if it cannot be had; nothing is left behind then.
    """
    page_bytes = page.page_bytes if isinstance(page, KVLayout) else page
    _check_positive("page_bytes", page_bytes)
    _check_positive("num_pages", num_pages)
    stride = -(-page_bytes // PAGE_ALIGNMENT) * PAGE_ALIGNMENT
    num_bytes = stride * num_pages
    available = available_memory()
    if num_bytes > available:  # the mapping itself would succeed, and using it would have processes killed
        raise HostTierUnavailable(f"{num_bytes} bytes of host memory cannot be had: {available} are available")
    try:
        # Shared, so that a fork() cannot make the CPU and a pinned device look at different copies of a page.
        mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
    except (MemoryError, OSError, OverflowError) as error:
        raise HostTierUnavailable(f"{num_bytes} bytes of host memory cannot be had: {error}") from error
    cache = HostCache(mapping, page_bytes=page_bytes, page_stride=stride, num_pages=num_pages)
    problem = cache._pin() if torch.cuda.is_available() else None
    if problem is not None:
        cache.close()
        del mapping  # the exception's traceback would keep it
        raise HostTierUnavailable(f"{num_bytes} bytes of host memory cannot be pinned: {problem}")
    return cache


def _check_positive(what: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidInput(f"{what} must be a positive int, not {value!r}")
