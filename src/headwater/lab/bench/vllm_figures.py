"""The arithmetic of `bench vllm`: from times by round to costs above a local hit. Measures nothing.

A cost is a difference within one round, so that what slows the machine for a while slows both sides. Rounds in which a
hit did not come from where it should are missing, and take no part.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ByRound = Mapping[int, float]


@dataclass(slots=True)
class ContenderCourse:
    """What one contender did over one length: seconds by round, what did not count, wrong tokens."""

    ttft_s: dict[int, float] = field(default_factory=dict)
    num_discarded: int = 0
    num_unequal: int = 0


@dataclass(frozen=True, slots=True)
class Spread:
    """A median, and an interval around it."""

    median: float
    low: float
    high: float

    def figures(self, name: str, unit: str = "", scale: float = 1.0) -> dict[str, float]:
        """Three figures: the median under the name, the interval beside it."""
        return {
            f"{name}{unit}": self.median * scale,
            f"{name}_low{unit}": self.low * scale,
            f"{name}_high{unit}": self.high * scale,
        }


def middle_half(values: Iterable[float]) -> Spread:
    """The median, and the interval that holds the middle half. Raises ValueError without values."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("nothing was measured")
    quarter = len(ordered) // 4
    return Spread(statistics.median(ordered), ordered[quarter], ordered[-1 - quarter])


def median_interval(values: Iterable[float], *, confidence: float = 0.95) -> Spread:
    """The median, and between which values the true one lies: by ranks, whatever the distribution.

    Of few values (under six, for 95 %) no ranks are that sure: then it is all of them.
    """
    ordered = sorted(values)
    if not ordered:
        raise ValueError("nothing was measured")
    count, rank, outside = len(ordered), 0, 0.0
    while rank < count // 2:
        outside += math.comb(count, rank) / 2**count  # as likely as the true median below rank + 1 values
        if 2 * outside > 1 - confidence:
            break
        rank += 1
    at = max(rank - 1, 0)
    return Spread(statistics.median(ordered), ordered[at], ordered[-1 - at])


def differences(of: ByRound, base: ByRound) -> list[float]:
    """Within each round that both have."""
    return [seconds - base[number] for number, seconds in sorted(of.items()) if number in base]


def length_figures(num_tokens: int, courses: Mapping[str, ContenderCourse], *, local: str, ours: str) -> dict[str, Any]:
    """The figures of one length, in ms: medians, costs above a local hit, and ours against each of the others."""
    found: dict[str, Any] = {}
    for name, course in courses.items():
        label = f"{num_tokens}_{name}"
        if not course.ttft_s:
            continue
        found[f"{label}_ms"] = statistics.median(course.ttft_s.values()) * 1e3
        above = differences(course.ttft_s, courses[local].ttft_s)
        if name != local and above:
            found |= middle_half(above).figures(f"{label}_cost", "_ms", 1e3)
    for name, course in courses.items():
        against = differences(courses[ours].ttft_s, course.ttft_s) if ours in courses else []
        if name not in (local, ours) and against:
            found |= median_interval(against).figures(f"{num_tokens}_{ours}_against_{name}", "_ms", 1e3)
    return found


def overhead_figures(off_s: Sequence[float], on_s: Sequence[float]) -> dict[str, float]:
    """On / off, pair by pair, with the interval of its median."""
    ratios = median_interval(on / off for off, on in zip(off_s, on_s, strict=True))
    return {
        "off_ms": statistics.median(off_s) * 1e3,
        "on_ms": statistics.median(on_s) * 1e3,
        **ratios.figures("overhead"),
    }
