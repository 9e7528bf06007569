"""Staging: the host pages through which blocks travel between device slots and stores, one frame each.

A page here is a frame's memory: header first, payload behind it. `gather` and `scatter` move payloads only; sealing and
verifying is done on the frame, by others. Staging owns no decision: who may use which page, when a slot may be read or
written, is the worker's business (`worker.py`), and whether the bytes are right is `layout/frame.py`'s.

Staging that can (`in_place`) reaches into a store's own memory: blocks go straight into a slab and straight out of it,
and no page is needed. Where a GPU is, that memory has to be registered first; what cannot be registered goes through
the pages.

Torch is loaded by `TorchStaging` and by nothing else that the worker imports: whoever has a DeviceCache has loaded it.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np

from headwater.core.errors import CopyDamaged, InvalidInput, ResourceClosed
from headwater.core.results import Status
from headwater.layout.frame import frame_bytes, promised
from headwater.layout.spec import KVLayout
from headwater.transfer.device.populate import address_of, populate

if TYPE_CHECKING:
    from headwater.transfer.device.arena import DeviceCache, HostCache
    from headwater.transfer.device.copy_queue import Transfer
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

    def in_place(self) -> "InPlace | None":
        """Who copies between slots and a store's own memory; None: everything goes through pages."""
        ...


class InPlace(Protocol):
    """Staging that copies between slots and memory that is not its own, a store's slab."""

    @property
    def layerwise(self) -> bool:
        """Whether somebody computes with a block's first layers while the others are on their way."""
        ...

    @property
    def is_loading(self) -> bool:
        """Whether blocks are on their way to the device, or wait to be."""
        ...

    def reaches(self, memory: memoryview) -> bool:
        """Whether blocks can be copied from and to this memory. The first time it may take a while to register it."""
        ...

    def gather_into(
        self, slots: Sequence[int], frames: Sequence[memoryview], *, on_over: Callable[[], None]
    ) -> "Transfer":
        """Begin to copy blocks into the payloads of frames. Does not block; may raise. `on_over` hears of the end."""
        ...

    def scatter_from(
        self,
        frames: Sequence[memoryview],
        slots: Sequence[int],
        *,
        expected: "Digests",
        on_planes: Callable[[int], None] | None = None,
        on_over: Callable[[], None] | None = None,
    ) -> "Transfer":
        """Begin to copy payloads into blocks, and to check what arrives. Does not block; may raise."""
        ...


class TorchStaging:
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
        self._engine = CopyEngine(device, layout=layout, wires=wires)
        self._engine.calibrate([host.page(page) for page in range(min(_NUM_TRIED, host.num_pages))])
        if self._cuda:
            self._engine.warm([host.page(page) for page in range(min(host.num_pages, device.num_blocks))])
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
    def layerwise(self) -> bool:
        """Whether somebody computes with a block's first layers while the others are on their way."""
        return self._engine.layerwise

    @property
    def is_loading(self) -> bool:
        """Whether blocks are on their way to the device, or wait to be."""
        return self._engine.is_loading

    @property
    def num_pages(self) -> int:
        """How many pages the host cache has."""
        return self._host.num_pages

    def in_place(self) -> Self:
        """Itself."""
        return self

    def frame(self, page: int) -> memoryview:
        """A page's memory. Raises InvalidInput for one that does not exist, ResourceClosed after close."""
        return self._host.page(page)

    def gather(self, slots: Sequence[int], pages: Sequence[int]) -> "Digests | None":
        """Copy blocks into payloads. Blocks. Raises InvalidCopy, having copied nothing, or what the device raises."""
        transfer = self._engine.gather(slots, [self._host.page(page) for page in pages])
        _wait(transfer)
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
        transfer = self._engine.scatter(frames, slots, expected=np.stack(expected) if expected else None)
        _wait(transfer)
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

    def gather_into(
        self, slots: Sequence[int], frames: Sequence[memoryview], *, on_over: Callable[[], None]
    ) -> "Transfer":
        """Begin to copy blocks into a store's memory. Does not block. Raises InvalidCopy."""
        return self._engine.gather(slots, frames, on_over=on_over)

    def scatter_from(
        self,
        frames: Sequence[memoryview],
        slots: Sequence[int],
        *,
        expected: "Digests",
        on_planes: Callable[[int], None] | None = None,
        on_over: Callable[[], None] | None = None,
    ) -> "Transfer":
        """Begin to copy out of a store's memory, layer by layer, checked on arrival. Does not block."""
        return self._engine.scatter(frames, slots, expected=expected, on_planes=on_planes, on_over=on_over)

    def close(self) -> None:
        """End all copies, then let go of memory that was registered. Idempotent. Blocks, milliseconds."""
        self._engine.close()
        for thread in self._registering.values():
            thread.join()
        for held in self._pins.values():
            if not isinstance(held, memoryview):
                held.release()
        self._pins.clear()

    def __enter__(self) -> Self:
        """Return self; it closes itself at the end of the block."""
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        """Close."""
        self.close()


def _wait(transfer: "Transfer") -> None:
    """Until it is over; also after an error: what was launched must not land later."""
    transfer.wait()
    if transfer.error is not None:
        raise transfer.error
    if not transfer.complete:
        raise ResourceClosed("the copy engine was closed before everything was copied")
