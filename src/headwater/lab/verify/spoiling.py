"""Damage behind all checks: bytes that change on the device after they were verified and written.

Nobody can notice but who compares what was computed. So a comparison that passes proves something.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence

import torch

from headwater.transfer.device.arena import DeviceCache
from headwater.transfer.device.transfer import Transfer
from headwater.transfer.device.wire import Digests
from headwater.transfer.executor.staging import TorchStaging


class SpoilingStaging(TorchStaging):
    """Writes blocks, and spoils them before anybody hears of it."""

    def __init__(self, device: DeviceCache, *args: object, **more: object) -> None:
        super().__init__(device, *args, **more)  # type: ignore[arg-type]
        write = self.engine.scatter

        def scatter(
            frames: Sequence[memoryview],
            slots: Sequence[int],
            *,
            expected: Digests | None = None,
            on_planes: Callable[[int], None] | None = None,
            on_over: Callable[[], None] | None = None,
        ) -> Transfer:
            transfer = write(frames, slots, expected=expected)
            transfer.wait()
            self.spoil(device.rows, slots)
            if on_over is not None:
                on_over()
            return transfer

        self.engine.scatter = scatter  # type: ignore[method-assign]

    @abstractmethod
    def spoil(self, rows: Sequence[torch.Tensor], slots: Sequence[int]) -> None:
        """Change bytes of these slots; `rows` are the device's planes."""
