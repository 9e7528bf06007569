"""When to look at which job again: at its deadline, and a while later if it has not ended by then."""

import heapq
from collections.abc import Callable
from itertools import count
from typing import Final, Generic, TypeVar

T = TypeVar("T")

_FEW: Final = 256  # alarms that are kept, however few jobs wait, before those of jobs that are over are swept out


class Alarms(Generic[T]):
    """Alarms in the order of their times. Those of jobs that are over do not go off."""

    def __init__(self, is_over: Callable[[T], bool]) -> None:
        self._is_over = is_over
        self._heap: list[tuple[float, int, T]] = []
        self._sweep_at = _FEW
        self._numbers = count()

    def __len__(self) -> int:
        """How many are set, those of jobs that are over among them."""
        return len(self._heap)

    def set(self, job: T, at_s: float) -> bool:
        """Have a job looked at from this time on. True: none goes off before it."""
        if len(self._heap) >= self._sweep_at:
            self._heap = [alarm for alarm in self._heap if not self._is_over(alarm[2])]
            heapq.heapify(self._heap)
            self._sweep_at = 2 * len(self._heap) + _FEW
        alarm = (at_s, next(self._numbers), job)
        heapq.heappush(self._heap, alarm)
        return self._heap[0] is alarm

    def take_due(self, now_s: float) -> T | None:
        """A job whose time has come, without that alarm; None if there is none."""
        while self._heap and self._heap[0][0] <= now_s:
            _, _, job = heapq.heappop(self._heap)
            if not self._is_over(job):
                return job
        return None

    @property
    def next_s(self) -> float | None:
        """When the next one goes off, if there is one."""
        return self._heap[0][0] if self._heap else None
