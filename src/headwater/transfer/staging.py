"""Staging: the host pages through which blocks travel between device slots and stores, one frame each.

A page here is a frame's memory: header first, payload behind it. `gather` and `scatter` move payloads only; sealing and
verifying is done on the frame, by others. Staging owns no decision: who may use which page, when a slot may be read or
written, is the worker's business (`worker.py`), and whether the bytes are right is `layout/frame.py`'s.

Torch is loaded by `TorchStaging` and by nothing else that the worker imports: whoever has a DeviceCache has loaded it.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from headwater.core.errors import InvalidInput
from headwater.layout.frame import frame_bytes, header_bytes
from headwater.layout.spec import KVLayout

if TYPE_CHECKING:
    from headwater.transfer.arena import DeviceCache, HostCache


class Staging(Protocol):
    """Host pages of frame size beside a device's slots. All calls may come from several threads for disjoint pages."""

    @property
    def num_pages(self) -> int:
        """How many pages there are, numbered from 0."""
        ...

    def frame(self, page: int) -> memoryview:
        """A page's memory, writable, exactly one frame long."""
        ...

    def gather(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        """Copy the blocks in `slots` into the payloads of `pages`. Blocks until the bytes are there; may raise."""
        ...

    def scatter(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        """Copy the payloads of `pages` into `slots`. Blocks until the device has them; may raise, having written some.

        After it returned or raised it writes to no slot any more.
        """
        ...


class TorchStaging:
    """Staging between a DeviceCache and the pages of a HostCache, by the reference copy in torch.

    Owns neither. On CUDA it copies on a stream of its own and waits for it. It does not wait for the engine's streams:
    a block is named, or its slot given up, only after the engine's work on it is over (rule 1).
    """

    def __init__(self, device: "DeviceCache", host: "HostCache", *, layout: KVLayout | None = None) -> None:
        """`layout` picks the planes that make a page; all of the device's by default. Raises InvalidInput."""
        from headwater.transfer import copy  # loads torch

        self._layout = layout if layout is not None else device.layout
        needed = frame_bytes(self._layout.plane_bytes)
        if host.page_bytes != needed:
            raise InvalidInput(f"a frame of this layout has {needed} bytes, a page of the host cache {host.page_bytes}")
        self._device = device
        self._host = host
        self._offset = header_bytes(len(self._layout.planes))
        self._gather = copy.gather
        self._scatter = copy.scatter
        self._stream: Any = None
        if device.device.type == "cuda":
            import torch

            torch.cuda.synchronize(device.device)  # the cache was zeroed on another stream, which ours does not follow
            self._stream = torch.cuda.Stream(device.device)  # type: ignore[no-untyped-call]

    @property
    def num_pages(self) -> int:
        """How many pages the host cache has."""
        return self._host.num_pages

    def frame(self, page: int) -> memoryview:
        """A page's memory. Raises InvalidInput for one that does not exist, ResourceClosed after close."""
        return self._host.page(page)

    def gather(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        """Copy blocks into payloads. Blocks. Raises InvalidCopy, having copied nothing."""
        self._copy(self._gather, slots, pages)

    def scatter(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        """Copy payloads into blocks. Blocks. Raises InvalidCopy, having copied nothing."""
        self._copy(self._scatter, slots, pages)

    def _copy(self, copy: Callable[..., None], slots: Sequence[int], pages: Sequence[int]) -> None:
        with self._on_stream():
            try:
                copy(self._device, slots, self._host.pages, pages, layout=self._layout, payload_offset=self._offset)
            finally:
                self._wait()  # also after an error: what was launched must not land later

    def _on_stream(self) -> Any:
        if self._stream is None:
            return nullcontext()
        import torch

        return torch.cuda.stream(self._stream)

    def _wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
