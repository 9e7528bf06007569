"""What copies cost a model that computes meanwhile: windows of matrix products, with copies beside them and without.

Products are queued on the default stream and timed by the device's own events; those queued before the first event keep
the device busy until all are queued, so that no window is longer because a thread had to wait for Python. CUDA only.
"""

import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final

import torch

from headwater.lab.bench.copy_course import finish
from headwater.transfer.device.transfer import Transfer

WINDOWS: Final = 30
_SIZE: Final = 8192
_IN_WINDOW: Final = 8
_BEFORE: Final = 2
_WARM_UP: Final = 3
_MARGIN: Final = 1.5  # products are queued for so much longer than a copy should take

Submit = Callable[[], Transfer]


class Gemm:
    """A square product in bf16, about 1.6 ms on an H200."""

    def __init__(self, device: torch.device, size: int = _SIZE) -> None:
        self._left, self._right = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
        self._product = torch.empty_like(self._left)
        for _ in range(_WARM_UP):
            self.window_s()
        self.product_s = self.window_s() / _IN_WINDOW

    def queue(self, count: int) -> None:
        """Queue products. Does not block."""
        for _ in range(count):
            torch.mm(self._left, self._right, out=self._product)

    def window_s(self) -> float:
        """How long the device takes for a few products. Blocks."""
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self.queue(_BEFORE)
        first.record()
        self.queue(_IN_WINDOW)
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3


def slowdowns(gemm: Gemm, copies: Mapping[str, Submit], windows: int = WINDOWS) -> dict[str, float]:
    """How many times longer products take beside each sort of copies: the median of windows in turns. Blocks."""
    ratios: dict[str, list[float]] = {name: [] for name in copies}
    for window in range(-_WARM_UP, windows):
        alone_s = gemm.window_s()
        for name, submit in copies.items():
            with _copying(submit):
                beside_s = gemm.window_s()
            if window >= 0:
                ratios[name].append(beside_s / alone_s)
    return {name: statistics.median(values) for name, values in ratios.items()}


def beside_s(gemm: Gemm, submit: Submit, alone_s: float) -> float:
    """How long one whole copy takes while products run, if it takes `alone_s` without them. Blocks."""
    gemm.queue(_BEFORE + math.ceil(_MARGIN * alone_s / gemm.product_s))
    begin_s = time.perf_counter()
    finish(submit())
    seconds = time.perf_counter() - begin_s
    torch.cuda.synchronize()
    return seconds


@contextmanager
def _copying(submit: Submit) -> Iterator[None]:
    """Copies behind each other in a thread, from before the block to its end, where the last one is cut short."""
    begun, over = threading.Event(), threading.Event()
    now: list[Transfer] = []

    def keep_on() -> None:
        try:
            while not over.is_set():
                now[:] = [submit()]
                begun.set()
                finish(now[0])
        finally:
            begun.set()

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(keep_on)
        begun.wait()
        try:
            yield
        finally:
            over.set()
            for transfer in now:
                transfer.cancel()
        done.result()
