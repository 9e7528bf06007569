"""Which store gets what, when; what is dropped when it cannot keep up; and whether loading pays.

Pure arithmetic over what was measured: a store's speed (`pace.py`), what it has queued, and what computing costs. The
brain asks, and acts on the answer.

A store that is too slow is not read, so nobody would find out that it became fast. So now and then a small part of what
could be loaded is (`how_much_to_load`): that costs little if the store is as slow as before, and if it was fast, the
next request tries again at once; two such trials are believed.
"""

import math
from collections import deque
from dataclasses import dataclass
from typing import Final

from headwater.cache.pace import LoadPace, lower_median
from headwater.cache.records import JobKind
from headwater.config.cache import TierConfig
from headwater.core.breaker import Breaker, BreakerState
from headwater.core.errors import InvalidInput
from headwater.core.events import Paced

_WEIGHT: Final = 0.2  # of the newest measurement
_WORTH: Final = 0.75  # of computing, that a load may take: what is expected is off by that much from step to step
_SURE: Final = 0.95  # the same, where loads take what they should: what computing takes is never known better
_FORGOTTEN_S: Final = 30.0  # what was measured longer ago says nothing
_LAGS: Final = 7  # that are remembered
_LAG_LIMIT: Final = 4.0  # of the median of these, that one of them counts for at most
_LAG_FLOOR_S: Final = 1e-3  # lags below this are all the same
_TRIAL_S: Final = 0.05  # that a trial may take, as it is expected: and not more than
_TRIAL_SHARE: Final = 0.05  # of what the request would compute, or one block
_TRIAL_EVERY: Final = 100.0  # times what a trial takes, pass between two of them; but
_TRIAL_LEAST_S: Final = 5.0  # not less than this,
_TRIAL_MOST_S: Final = 30.0  # nor more: what became fast is to be found within a minute
_PATIENCE: Final = 1.25  # times what computing would take, that a load which was to be faster is waited for; but
_LEAST_PATIENCE: Final = 0.2  # of the tier's timeout at the least
_BETTER: Final = 0.7  # of what was expected: a load that took less is news, and the next one confirms it at once


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

    def paced(self, event: Paced) -> None:
        """It was measured. Raises InvalidInput for what cannot be."""
        if not (0 <= event.base_s < float("inf") and 0 <= event.slope_s < float("inf")):
            raise InvalidInput(f"computing a block cannot cost {event.base_s} and {event.slope_s} seconds")
        self.base_s, self.slope_s = event.base_s, event.slope_s

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
        self.loading = LoadPace()
        self.saving = BytePace()
        self.lag_s: float | None = None  # from saying what is to be loaded to hearing that it was, but for the loading
        self.lags: deque[float] = deque(maxlen=_LAGS)  # the last ones
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
            if self.lag_s is None:
                self.lag_s = lag_s
            else:
                limit_s = max(_LAG_FLOOR_S, _LAG_LIMIT * lower_median(sorted(self.lags)))
                self.lag_s += _WEIGHT * (min(lag_s, limit_s) - self.lag_s)
            self.lags.append(lag_s)

    def load_s(self, num_bytes: int, now_s: float) -> float:
        """How long a load should take, behind what is queued; nothing, as long as nobody knows, or not any more."""
        return self._with_lag(self.loading.seconds(self.queued_load_bytes + num_bytes, now_s))

    def recall_s(self, num_bytes: int) -> float:
        """The same, however long ago that was measured."""
        return self._with_lag(self.loading.recall(self.queued_load_bytes + num_bytes))

    def _with_lag(self, seconds: float) -> float:
        return seconds + (self.lag_s or 0.0) if seconds else 0.0

    @property
    def worth(self) -> float:
        """Of what computing takes, that a load may be expected to take. The more alike loads are, the more."""
        spread = self.loading.spread
        return _WORTH if spread is None else min(_SURE, max(_WORTH, 1.0 - spread))

    def trial(self, compute_s: float, block_bytes: int, now_s: float) -> int:
        """How many blocks to load of a row that does not pay, to see whether it would; mostly none. Changes nothing.

        None while a load is under way: what it takes will be known.
        """
        if self.queued_load_bytes:
            return 0
        lag_s = self.lag_s or 0.0
        num_bytes = self.loading.bytes_in(min(_TRIAL_S, _TRIAL_SHARE * compute_s) - lag_s)
        num_blocks = max(1, int(num_bytes / block_bytes)) if math.isfinite(num_bytes) else 1  # bytes that cost nothing
        if num_blocks * block_bytes == self.loading.last_bytes:  # sizes that differ tell a load's start from its bytes
            if num_blocks > 1:
                num_blocks //= 2
            elif self.loading.recall(2 * block_bytes) <= _TRIAL_S:
                num_blocks = 2
        cost_s = self.loading.recall(num_blocks * block_bytes) + lag_s
        pause_s = min(_TRIAL_MOST_S, max(_TRIAL_LEAST_S, _TRIAL_EVERY * cost_s))
        due = self.loading.age_s(now_s) >= pause_s or self.loading.newest < _BETTER
        return num_blocks if due else 0


def load_pays(tier: TierState, cost: ComputeCost, *, start: int, end: int, block_bytes: int, now_s: float) -> bool:
    """Whether loading blocks [start, end) is expected to be clearly faster than computing them.

    A gain that is missed costs little; a hit that is slower than none breaks a promise. Where computing was never
    measured, loading pays: a hit is what a cache is for.
    """
    compute_s = cost.row_s(start, end)
    return compute_s <= 0 or tier.load_s((end - start) * block_bytes, now_s) <= tier.worth * compute_s


def patience_s(tier: TierState, cost: ComputeCost, start: int, end: int) -> float:
    """How long a load of blocks [start, end) is waited for: no longer than computing them instead would make good.

    It was expected to be faster than that; if it is not, the tier is not what it was. What has come by then counts.
    Of a tier that was never measured nothing was expected: a crowd of first loads waits in its queue as it may.
    """
    compute_s = cost.row_s(start, end)
    timeout_s = tier.config.load_timeout_s
    if compute_s <= 0 or not tier.loading.known:
        return timeout_s
    return min(timeout_s, max(_PATIENCE * compute_s, _LEAST_PATIENCE * timeout_s))


def how_much_to_load(
    tier: TierState, cost: ComputeCost, *, start: int, end: int, block_bytes: int, now_s: float
) -> int:
    """How many of the blocks [start, end) to load, from the first on: all, none, or a few for a trial.

    Unlike `load_pays` it goes by what was measured last, however long ago: a store that was slow when it was last read
    is not given a whole load for that nobody has read it since. One that was never read is.
    """
    num_blocks, compute_s = end - start, cost.row_s(start, end)
    if compute_s <= 0 or tier.recall_s(num_blocks * block_bytes) <= tier.worth * compute_s:
        return num_blocks
    return min(max(1, num_blocks - 1), tier.trial(compute_s, block_bytes, now_s))
