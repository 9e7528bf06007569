"""How much counters grew between two questions: what crosses a process' border instead of `Metrics`. No vLLM here."""

from collections.abc import Mapping
from typing import Final

from headwater.metrics import Metrics
from headwater.storage.base import SYSTEM_CLOCK, Clock

_EVERY_S: Final = 0.05  # vLLM asks with every step


class Counted:
    """A process' counters, asked now and then."""

    def __init__(self, metrics: Metrics, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._metrics = metrics
        self._clock = clock
        self._last: dict[str, float] = {}
        self._next_s = 0.0

    def grown(self, *, now: bool = False) -> dict[str, float]:
        """What grew since the last answer, by title; nothing, if that is a moment ago, unless `now`."""
        now_s = self._clock.monotonic()
        if now_s < self._next_s and not now:
            return {}
        self._next_s = now_s + _EVERY_S
        found = self._metrics.counters()
        grown = {
            title: value - self._last.get(title, 0.0)
            for title, value in found.items()
            if value > self._last.get(title, 0.0)
        }
        self._last = found
        return grown


def merged(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """The sum of what two processes counted."""
    return {title: one.get(title, 0.0) + other.get(title, 0.0) for title in {**one, **other}}
