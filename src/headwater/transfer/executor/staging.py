"""Staging: the host pages through which blocks travel between device slots and stores, one frame each.

A page here is a frame's memory: header first, payload behind it. `gather` and `scatter` move payloads only; sealing and
verifying is done on the frame, by others. Staging owns no decision: who may use which page, when a slot may be read or
written, is the worker's business (`worker.py`), and whether the bytes are right is `layout/frame.py`'s.

Staging that has a copy engine (`in_place`) may reach into a store's own memory: blocks go straight into a slab and
straight out of it, and no page is needed. Where a GPU is, that memory has to be registered first; what cannot be
registered goes through the pages.

Torch is loaded by `TorchStaging` and by nothing else that the worker imports: whoever has a DeviceCache has loaded it.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from headwater.core.closing import Closing
from headwater.core.errors import CopyDamaged, InvalidInput
from headwater.core.results import Status
from headwater.layout.frame import frame_bytes, promised
from headwater.layout.spec import KVLayout
from headwater.transfer.device.populate import address_of, populate

if TYPE_CHECKING:
    from headwater.transfer.device.arena import DeviceCache, HostCache
    from headwater.transfer.device.copy_engine import CopyEngine
    from headwater.transfer.device.cuda import Pin
    from headwater.transfer.device.wire import Digests, Direction, Wire

log = logging.getLogger("headwater")

_NUM_TRIED = 4  # pages that the copy engine measures with


class Staging(Protocol):
    """Host pages of frame size beside a device's slots. All calls may come from several threads for disjoint pages."""

    @property
    def num_pages(self) -> int:
        """How many pages there are, numbered from 0."""
        ...

    def frame(self, page: int) -> memoryview:
        """A page's memory, writable, exactly one frame long."""
        ...

    def gather(self, slots: Sequence[int], pages: Sequence[int]) -> "Digests | None":
        """Copy the blocks in `slots` into the payloads of `pages`. Blocks until the bytes are there; may raise.

        Returns the digest of each plane of each block, if it made them.
        """
        ...

    def scatter(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        """Copy the payloads of verified `pages` into `slots`. Blocks until the device has them, and has the same bytes.

        May raise, having written some. After it returned or raised it writes to no slot any more.
        """
        ...

    def in_place(self, memory: memoryview | None = None) -> "CopyEngine | None":
        """Who copies between slots and frames in this memory of a store, or in the pages; None: nobody does.

        Then everything goes through the pages. The first time it may take a while to register a store's memory.
        """
        ...


class TorchStaging(Closing):
    """Staging between a DeviceCache and the pages of a HostCache, and memory beyond them, by the copy engine.

    Owns neither cache, but the engine: close it before them. It does not wait for the model's streams: a block is
    named, or its slot given up, only after the model's work on it is over (rule 1).
    """

    def __init__(
        self,
        device: "DeviceCache",
        host: "HostCache",
        *,
        layout: KVLayout | None = None,
        wires: "Callable[[DeviceCache, KVLayout, Direction], Wire] | None" = None,
    ) -> None:
        """`layout` picks the planes that make a page; all of the device's by default. Raises InvalidInput.

        `wires`: how bytes move; as the device has it, by default.
        """
        from headwater.transfer.device.copy_engine import CopyEngine  # loads torch

        layout = layout if layout is not None else device.layout
        needed = frame_bytes(layout.plane_bytes)
        if host.page_bytes != needed:
            raise InvalidInput(f"a frame of this layout has {needed} bytes, a page of the host cache {host.page_bytes}")
        self._host = host
        self._cuda = device.device.type == "cuda"
        self._planes_on = device.device
        self.engine = CopyEngine(device, layout=layout, wires=wires)
        self.engine.calibrate([host.page(page) for page in range(min(_NUM_TRIED, host.num_pages))])
        if self._cuda:
            self.engine.warm([host.page(page) for page in range(min(host.num_pages, device.num_blocks))])
        self._pins: dict[
            int, Pin | memoryview
        ] = {}  # by address; memory that cannot be registered is held all the same
        self._pinning = threading.Lock()
        self._registering: dict[int, threading.Thread] = {}  # by address: it goes on beside jobs

    @property
    def on_gpu(self) -> bool:
        """Whether the slots are on a GPU, so that memory has to be registered."""
        return self._cuda

    @property
    def num_pages(self) -> int:
        """How many pages the host cache has."""
        return self._host.num_pages

    def in_place(self, memory: memoryview | None = None) -> "CopyEngine | None":
        """The copy engine, unless there is memory that it does not reach."""
        return self.engine if memory is None or self.reaches(memory) else None

    def frame(self, page: int) -> memoryview:
        """A page's memory. Raises InvalidInput for one that does not exist, ResourceClosed after close."""
        return self._host.page(page)

    def gather(self, slots: Sequence[int], pages: Sequence[int]) -> "Digests | None":
        """Copy blocks into payloads. Blocks. Raises InvalidCopy, having copied nothing, or what the device raises."""
        transfer = self.engine.gather(slots, [self._host.page(page) for page in pages])
        transfer.see_through()
        return transfer.digests

    def scatter(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        """Copy the payloads of sealed pages into blocks, and check what arrived there. Blocks.

        Raises InvalidCopy, having copied nothing; CopyDamaged; or what the device raises.
        """
        frames = [self._host.page(page) for page in pages]
        digests = [promised(frame) for frame in frames]
        expected = [one for one in digests if not isinstance(one, Status)]
        if len(expected) < len(frames):
            raise CopyDamaged("a page is not sealed any more")
        transfer = self.engine.scatter(frames, slots, expected=np.stack(expected) if expected else None)
        transfer.see_through()
        if transfer.num_good < len(frames):
            raise CopyDamaged(f"block {transfer.num_good} of {len(frames)} is not what its page is on the device")

    def reaches(self, memory: memoryview) -> bool:
        """Whether blocks can go there now; on a GPU it is registered the first time, and kept so until close.

        While `register` is still at it: no.
        """
        if not self._cuda:
            return True
        address = address_of(memory)
        registering = self._registering.get(address)
        if registering is not None and registering.is_alive():
            return False
        return self._pin(memory, address)

    def register(self, memory: memoryview, *, timeout_s: float) -> bool:
        """Register memory ahead of its first use. Blocks, `timeout_s` at most. True: it is done, whatever came of it.

        False: it goes on beside jobs, which use pages of staging meanwhile. For the beginning, once for each memory.
        """
        if not self._cuda:
            return True
        address = address_of(memory)
        thread = threading.Thread(
            target=self._register, args=(memory, address), name="headwater registers", daemon=True
        )
        self._registering[address] = thread
        thread.start()
        thread.join(timeout_s)
        return not thread.is_alive()

    def _register(self, memory: memoryview, address: int) -> None:
        import torch

        with torch.cuda.device(self._planes_on):  # a thread begins with the first one, whosever that is
            populate(memory)
            self._pin(memory, address)

    def _pin(self, memory: memoryview, address: int) -> bool:
        from headwater.transfer.device.cuda import pin

        with self._pinning:  # two jobs may come at once, and CUDA takes the same memory only once
            if address not in self._pins:
                found = pin(memory, address)
                if isinstance(found, str):
                    log.warning(
                        "%d bytes of a store cannot be registered with CUDA (%s): blocks go through pinned pages "
                        "instead. In a container, raise the limit of locked memory (ulimit -l unlimited).",
                        memory.nbytes,
                        found,
                    )
                self._pins[address] = memory if isinstance(found, str) else found
            return not isinstance(self._pins[address], memoryview)

    def close(self) -> None:
        """End all copies, then let go of memory that was registered. Idempotent. Blocks, milliseconds.

        A copy that does not return keeps it for seconds, and all memory that it may touch for good.
        """
        ended = self.engine.close()
        if not ended:
            log.error("a copy does not return: the memory that it may touch is kept until this process ends")
            self._host.keep()
        for thread in self._registering.values():
            thread.join()
        for held in self._pins.values():
            if not isinstance(held, memoryview):
                held.release() if ended else held.keep()
        self._pins.clear()
