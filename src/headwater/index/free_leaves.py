"""The leaves of a radix index that nobody holds or pins, in the order in which they leave.

Knows runs and what they are worth, not the tree: `radix.py` says which run became a free leaf, and which is none any
more. Nothing is searched: an entry of a run that was withdrawn stays in the heap, and is stale by its ticket.
"""

import heapq
from collections.abc import Iterator
from typing import Final

from headwater.index.appraisal import Appraisal
from headwater.index.runs import Run

_REACH: Final = 64  # how far from the next victim `first_without` looks: what lies behind has time


class FreeLeaves:
    """Runs by what their last block is worth, the lowest first."""

    def __init__(self, worth: Appraisal) -> None:
        self._worth = worth
        # (priority, ticket, run). Entries whose ticket is no longer the run's are stale.
        self._heap: list[tuple[float, int, Run]] = []
        self._num_runs = 0
        self._ticket = 0

    def __len__(self) -> int:
        """Runs in it."""
        return self._num_runs

    def __iter__(self) -> Iterator[tuple[float, Run]]:
        """Every run with its priority, in no order."""
        return ((priority, run) for priority, ticket, run in self._heap if run.ticket == ticket)

    def offer(self, run: Run) -> None:
        """Put a run in if it is a free leaf, and not in yet."""
        if run.guards or run.children is not None or run.parent is None or run.ticket:
            return
        self._ticket += 1
        run.ticket = self._ticket
        self._num_runs += 1
        priority = self.priority(run)
        run.level = self._worth.priority(run.past, run.previous_s, run.start) == priority
        heapq.heappush(self._heap, (priority, run.ticket, run))
        if len(self._heap) > 2 * self._num_runs + 64:
            self._heap = [entry for entry in self._heap if entry[2].ticket == entry[1]]
            heapq.heapify(self._heap)

    def withdraw(self, run: Run) -> None:
        """Take a run out that is in."""
        run.ticket = 0
        self._num_runs -= 1

    def rank_anew(self) -> None:
        """What runs are worth has changed."""
        runs = sorted((run for _, run in self), key=lambda run: run.ticket)
        for run in runs:
            self.withdraw(run)
        for run in runs:
            self.offer(run)

    def first(self) -> Run | None:
        """The run whose last block leaves next; None if there is none."""
        heap = self._heap
        while heap and heap[0][2].ticket != heap[0][1]:
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def first_is_shorter(self) -> None:
        """The run that `first` gave has lost its last block, and has others."""
        _, ticket, run = self._heap[0]
        if not run.level:
            heapq.heapreplace(self._heap, (self.priority(run), ticket, run))

    def drop_first(self) -> None:
        """The run that `first` gave has lost all its blocks."""
        self.withdraw(heapq.heappop(self._heap)[2])

    def first_without(self, bit: int) -> Run | None:
        """The first run whose last block is not marked with `bit`, if one is near."""
        seen: list[tuple[float, int, Run]] = []
        found: Run | None = None
        while found is None and len(seen) < _REACH and self.first() is not None:
            seen.append(heapq.heappop(self._heap))
            run = seen[-1][2]
            found = None if run.marks[-1] & bit else run
        for entry in seen:
            heapq.heappush(self._heap, entry)
        return found

    def priority(self, run: Run) -> float:
        """What the last block of a run is worth."""
        return self._worth.priority(run.past, run.previous_s, run.end - 1)
