"""When to look at which job of a group again: at its deadline, and when a rank that was cancelled should say so."""

import heapq
from itertools import count
from typing import Final

from headwater.transfer.ranks.group_job import GroupJob

_FEW: Final = 256  # alarms that are kept, however few jobs wait, before those of jobs that are over are swept out


class Alarms:
    """Alarms in the order of their times. Those of jobs that nobody is waited for in any more do not go off."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, GroupJob]] = []
        self._sweep_at = _FEW
        self._numbers = count()

    def set(self, job: GroupJob, at_s: float) -> None:
        """Have a job looked at from this time on."""
        if len(self._heap) >= self._sweep_at:
            self._heap = [alarm for alarm in self._heap if alarm[2].waiting]
            heapq.heapify(self._heap)
            self._sweep_at = 2 * len(self._heap) + _FEW
        heapq.heappush(self._heap, (at_s, next(self._numbers), job))

    def take_due(self, now_s: float) -> GroupJob | None:
        """A job whose time has come, without that alarm; None if there is none."""
        while self._heap and self._heap[0][0] <= now_s:
            _, _, job = heapq.heappop(self._heap)
            if job.waiting:
                return job
        return None

    @property
    def next_s(self) -> float | None:
        """When the next one goes off, if there is one."""
        return self._heap[0][0] if self._heap else None
