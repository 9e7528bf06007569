"""LoadPace: how long a store takes to give so many bytes, learned from its last loads. Pure arithmetic, no clock.

A load costs something however small, and then so much per byte:

    seconds = start_s + level x bytes

`start_s` changes seldom: the median of what each two loads in a row of clearly different sizes say of it, if there are
enough of them. `level`, seconds per byte, changes whenever others use the store: the median of the last three loads,
whatever their sizes. So one bad sample changes nothing, two in a row are believed, and a load of one size says what one
of another size takes.

Not here: whether loading pays and when a slow store is tried again (`placement.py`).

Invariant: nothing but numbers of the last `_WINDOW` samples, in order, and `start_s` is known; `facts` are these.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Final

_WINDOW: Final = 16  # samples that are remembered
_RECENT: Final = 3  # of them say how fast a store is now
_APART: Final = 2.0  # two loads whose sizes differ less say nothing of what every load costs
_CHANGED: Final = 2.0  # by how much more a byte of the larger of two took: then the store is another than it was
_FEW_PAIRS: Final = 3  # of which the least is taken, as long as nothing is known: a bad sample is in two of them
_FIRST: Final = 4  # samples, of which one pair will do: something has to be believed
_PAIRS: Final = 5  # that say something of it: a bad sample is in two of them
_LEAST: Final = 0.2  # of a load's time, that its bytes took: a start is never all there is
_FORGOTTEN_S: Final = 30.0  # what was measured longer ago is not known, but remembered


class LoadPace:
    """The last loads of one store."""

    def __init__(self) -> None:
        self.start_s = 0.0  # what a load takes however small
        self._samples: deque[tuple[int, float]] = deque(maxlen=_WINDOW)  # bytes, seconds
        self._levels: list[float] = []  # of each of them
        self._measured_s = 0.0

    def measured(self, num_bytes: int, seconds: float, now_s: float) -> None:
        """A load moved so much in such a time."""
        if not (num_bytes > 0 and 0 <= seconds < float("inf")):
            return  # neither is what is no number: it would stay for a while
        self._samples.append((num_bytes, seconds))
        self._measured_s = now_s
        found = sorted(_starts(self._samples))
        if len(found) >= _PAIRS:
            self.start_s = lower_median(found)
        elif found and not self.start_s and (len(found) >= _FEW_PAIRS or len(self._samples) <= _FIRST):
            self.start_s = found[0]
        self._levels = [max(took - self.start_s, _LEAST * took) / size for size, took in self._samples]

    @property
    def known(self) -> bool:
        """Whether anything was ever measured."""
        return bool(self._samples)

    def seconds(self, num_bytes: int, now_s: float) -> float:
        """How long so many bytes should take; nothing, as long as nobody knows, or not any more."""
        return 0.0 if now_s - self._measured_s > _FORGOTTEN_S else self.recall(num_bytes)

    def recall(self, num_bytes: int) -> float:
        """The same, however long ago that was measured."""
        return self.start_s + self.level * num_bytes if self._samples else 0.0

    def bytes_in(self, seconds: float) -> float:
        """How many bytes should come in such a time; infinitely many, as long as nobody knows."""
        return (seconds - self.start_s) / self.level if self.level else float("inf")

    @property
    def level(self) -> float:
        """Seconds per byte, now; 0 as long as nobody knows."""
        return lower_median(sorted(self._levels[-_RECENT:])) if self._levels else 0.0

    @property
    def newest(self) -> float:
        """What the last load took, in terms of what it should have taken: 1 as long as nobody knows."""
        return self._levels[-1] / self.level if self.level else 1.0

    @property
    def spread(self) -> float | None:
        """By how much one load differs from the next, mostly; None: there were too few to say."""
        if len(self._levels) <= _PAIRS:
            return None
        return lower_median(sorted(abs(b - a) / max(a, b) if a or b else 0.0 for a, b in pairwise(self._levels)))

    @property
    def last_bytes(self) -> int:
        """What the last load moved."""
        return self._samples[-1][0] if self._samples else 0

    def age_s(self, now_s: float) -> float:
        """Since when nothing was measured."""
        return now_s - self._measured_s

    def facts(self) -> tuple[float | None, float, float, list[tuple[int, float]]]:
        """All that it knows, for snapshots."""
        return (self.level if self._samples else None), self.start_s, self._measured_s, list(self._samples)


def _starts(samples: Iterable[tuple[int, float]]) -> Iterator[float]:
    """What each two samples in a row say of what a load takes however small. How many do depends on sizes alone."""
    for one, other in pairwise(samples):
        (small, small_s), (large, large_s) = sorted((one, other))
        if large >= _APART * small and large_s * small <= _CHANGED * small_s * large:
            yield min(small_s, max(0.0, (small_s * large - large_s * small) / (large - small)))


def lower_median(ordered: Sequence[float]) -> float:
    """Of two in the middle the smaller: what was slow once may have been slow for another reason."""
    return ordered[(len(ordered) - 1) // 2]
