"""Where computing from the front and loading from the end meet: plain arithmetic over two estimates.

Blocks [start, end) are stored. To compute the first of them and to load the last ones at the same time takes as long as
the slower of both. Computing takes longer the further it goes, loading takes longer the more of the end it brings; so
the best point is where the two cross. Knows no store, no request and no clock: what loading costs is a function, given.
"""

from collections.abc import Callable
from typing import Final, NamedTuple, TypeAlias

from headwater.cache.placement import ComputeCost

LoadSeconds: TypeAlias = Callable[[int], float]  # of blocks [m, end), by m: never more for a later m, 0 for the end

_CLEARLY: Final = 0.8  # of the better of the two alone: what is expected is off by about that much
_LEAST_S: Final = 0.05  # where either takes less, a step more costs what could be gained
_LEAST_BLOCKS: Final = 2  # on either side


class Split(NamedTuple):
    """Blocks before `at` are computed, those from it on are loaded; both are over after `seconds`."""

    at: int
    seconds: float


def best_split(cost: ComputeCost, load_s: LoadSeconds, start: int, end: int, *, head_s: float = 0.0) -> Split:
    """The point of [start, end] at which computing and loading are over soonest.

    `head_s`: what passes before computing can begin. In O(log n) calls of `load_s`.
    """

    def seconds(at: int) -> float:
        return max(head_s + cost.row_s(start, at) if at > start else 0.0, load_s(at))

    low, high = start, end  # computing takes at least as long as loading at `high`
    while low < high:
        middle = (low + high) // 2
        if cost.row_s(start, middle) + head_s >= load_s(middle):
            high = middle
        else:
            low = middle + 1
    return min((Split(at, seconds(at)) for at in (high, high - 1, start) if at >= start), key=lambda one: one.seconds)


def split_pays(cost: ComputeCost, load_s: LoadSeconds, start: int, end: int, *, head_s: float = 0.0) -> bool:
    """Whether doing both at once is expected to be clearly faster than the better of the two alone.

    Not where either was never measured, nor where it is over soon, nor for a block or two.
    """
    alone_s = min(load_s(start), head_s + cost.row_s(start, end))
    if cost.row_s(start, end) <= 0 or alone_s < _LEAST_S:
        return False
    found = best_split(cost, load_s, start, end, head_s=head_s)
    if min(found.at - start, end - found.at) < _LEAST_BLOCKS:
        return False
    return found.seconds <= _CLEARLY * alone_s
