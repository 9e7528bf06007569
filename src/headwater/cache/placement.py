"""Which store gets what, when; what is dropped when it cannot keep up; and whether loading pays.

Pure arithmetic over what was measured: a store's speed, what it has queued, and what computing costs. The brain asks,
and acts on the answer.
"""

from dataclasses import dataclass
from typing import Final

from headwater.cache.records import JobKind
from headwater.config.cache import TierConfig
from headwater.core.breaker import Breaker, BreakerState

_WEIGHT: Final = 0.2  # of the newest measurement
_WORTH: Final = 0.75  # of computing, that a load may take: what is expected is off by that much from step to step
_FORGOTTEN_S: Final = 30.0  # a tier that was too slow to be used is tried again: nobody else would find it well


class BytePace:
    """Seconds per byte, smoothed over jobs. Unknown until the first, and again when the last was long ago."""

    def __init__(self) -> None:
        self._s_per_byte: float | None = None
        self._measured_s = 0.0

    def measured(self, num_bytes: int, seconds: float, now_s: float) -> None:
        """A job moved so much in such a time."""
        if not (num_bytes > 0 and 0 <= seconds < float("inf")):
            return  # neither is what is no number: it would stay for ever
        now = seconds / num_bytes
        before = self._s_per_byte
        self._measured_s = now_s
        self._s_per_byte = now if before is None else before + _WEIGHT * (now - before)

    def seconds(self, num_bytes: int, now_s: float) -> float:
        """How long so many bytes should take; nothing, as long as nobody knows."""
        if self._s_per_byte is None or now_s - self._measured_s > _FORGOTTEN_S:
            return 0.0
        return self._s_per_byte * num_bytes

    def facts(self) -> tuple[float | None, float]:
        """All that it knows, for snapshots."""
        return self._s_per_byte, self._measured_s


@dataclass(slots=True)
class ComputeCost:
    """What a block costs to compute, given those before it: attention looks back, so deeper blocks cost more."""

    base_s: float
    slope_s: float

    def block_s(self, depth: int) -> float:
        """One block."""
        return self.base_s + self.slope_s * depth

    def row_s(self, start: int, end: int) -> float:
        """Blocks [start, end)."""
        num = end - start
        return num * self.base_s + self.slope_s * num * (start + end - 1) / 2


class TierState:
    """What the brain knows of one store."""

    def __init__(self, config: TierConfig, bit: int) -> None:
        self.config = config
        self.name = config.name
        self.bit = bit  # of this store in a block's marks
        self.breakers = {
            kind: Breaker(failures=config.breaker_failures, pause_s=config.breaker_pause_s)
            for kind in (JobKind.PROBE, JobKind.LOAD, JobKind.SAVE)
        }
        self.loading = BytePace()
        self.saving = BytePace()
        self.lag_s: float | None = None  # from saying what is to be loaded to hearing that it was, but for the loading
        self.queued_load_bytes = 0
        self.queued_save_bytes = 0
        self.num_pinning = 0  # saves that have not read their blocks yet, and keep them on the device

    def refuses_save(self, num_bytes: int, now_s: float) -> str | None:
        """Why so many bytes more are not to be written now; None if they are. Changes nothing."""
        up = self.breakers[JobKind.SAVE].would_allow(now_s)
        return self.overloaded(num_bytes, now_s) if up else "store_down"

    def overloaded(self, num_bytes: int, now_s: float) -> str | None:
        """Why so many bytes more are too much, behind what is queued; None if they are not."""
        queued = self.queued_save_bytes + num_bytes
        if self.queued_save_bytes and queued > self.config.max_queued_bytes:
            return "queue_full"
        if self.queued_save_bytes and self.saving.seconds(queued, now_s) > self.config.max_queued_s:
            return "too_slow"
        return None

    @property
    def state(self) -> BreakerState:
        """The worst state of its breakers."""
        return max(breaker.state for breaker in self.breakers.values())

    def loaded(self, num_bytes: int, seconds: float, lag_s: float | None, now_s: float) -> None:
        """A load moved so much in such a time, and came so much later; None: it stood behind others."""
        self.loading.measured(num_bytes, seconds, now_s)
        if lag_s is not None and 0 <= lag_s < float("inf"):
            self.lag_s = lag_s if self.lag_s is None else self.lag_s + _WEIGHT * (lag_s - self.lag_s)

    def load_s(self, num_bytes: int, now_s: float) -> float:
        """How long a load should take, behind what is queued; nothing, as long as nobody knows."""
        seconds = self.loading.seconds(self.queued_load_bytes + num_bytes, now_s)
        return seconds + (self.lag_s or 0.0) if seconds else 0.0


def load_pays(tier: TierState, cost: ComputeCost, *, start: int, end: int, block_bytes: int, now_s: float) -> bool:
    """Whether loading blocks [start, end) is expected to be clearly faster than computing them.

    A gain that is missed costs little; a hit that is slower than none breaks a promise. Where computing was never
    measured, loading pays: a hit is what a cache is for.
    """
    compute_s = cost.row_s(start, end)
    return compute_s <= 0 or tier.load_s((end - start) * block_bytes, now_s) <= _WORTH * compute_s
