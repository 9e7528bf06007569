"""The leaves of a radix index that nobody holds or pins, in the order in which they leave.

Knows runs and what they are worth, not the tree: `radix.py` says which run became a free leaf, and which is none any
more. Nothing is searched: an entry of a run that was withdrawn stays in the heap, and is stale by its ticket.
"""

import heapq
from collections.abc import Iterator
from typing import Final, TypeAlias

from headwater.index.appraisal import Appraisal
from headwater.index.runs import Run

_Entry: TypeAlias = tuple[float, int, Run]

_REACH: Final = 64  # how far from the next victim `first_without` looks: what lies behind has time


class FreeLeaves:
    """Runs by what their last block is worth, the lowest first; beside it, where the policy says it, by when it is due.

    A run that is due is in both orders, and leaves by the one that the policy says.
    """

    def __init__(self, worth: Appraisal) -> None:
        self._worth = worth
        # (priority, ticket, run). Entries whose ticket is no longer the run's are stale.
        self._heap: list[_Entry] = []
        self._due: list[_Entry] = []  # with the moment at which it is due, negated: the last one first
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
        run.level = self._worth.priority(run, run.start) == priority
        self._heap = self._pushed(self._heap, (priority, run.ticket, run))
        due_s = self._worth.due_s(run)
        if due_s is not None:
            self._due = self._pushed(self._due, (-due_s, run.ticket, run))

    def withdraw(self, run: Run) -> None:
        """Take a run out that is in."""
        run.ticket = 0
        self._num_runs -= 1

    def rank_anew(self) -> None:
        """What runs are worth has changed."""
        for run in sorted((run for _, run in self), key=lambda run: run.ticket):
            self.renew(run)

    def renew(self, run: Run) -> None:
        """What is known of a run has changed. It is asked again, if it is in."""
        if run.ticket:
            self.withdraw(run)
            self.offer(run)

    def first(self) -> Run | None:
        """The run whose last block leaves next; None if there is none."""
        first, due = _top(self._heap), _top(self._due)
        if first is None:
            return None
        return due[2] if due is not None and self._worth.leaves_before(-due[0], first[0]) else first[2]

    def is_shorter(self, run: Run) -> None:
        """The run that `first` gave has lost its last block, and has others."""
        if run.level:
            return
        if self._heap[0][2] is run:
            heapq.heapreplace(self._heap, (self.priority(run), run.ticket, run))
        else:
            self.renew(run)

    def first_without(self, bit: int) -> Run | None:
        """The first run whose last block is not marked with `bit`, if one is near."""
        first, due = _first_without(self._heap, bit), _first_without(self._due, bit)
        if first is None or due is None:
            return (first or due or (0.0, 0, None))[2]
        return due[2] if self._worth.leaves_before(-due[0], first[0]) else first[2]

    def priority(self, run: Run) -> float:
        """What the last block of a run is worth."""
        return self._worth.priority(run, run.end - 1)

    def validate(self, num_runs: int) -> None:
        """Raise AssertionError unless there are so many, all of them where they belong. Reads everything."""
        found = [run for _, run in self]
        assert num_runs == self._num_runs == len(found), "leaves do not add up"
        due = [id(run) for _, ticket, run in self._due if run.ticket == ticket]
        assert len(set(due)) == len(due), "a run that is due twice"
        assert set(due) <= set(map(id, found)), "a run that is due, and no free leaf"

    def _pushed(self, heap: list[_Entry], entry: _Entry) -> list[_Entry]:
        """A heap with one entry more, without the stale ones when they are many."""
        heapq.heappush(heap, entry)
        if len(heap) > 2 * self._num_runs + 64:
            heap = [one for one in heap if one[2].ticket == one[1]]
            heapq.heapify(heap)
        return heap


def _top(heap: list[_Entry]) -> _Entry | None:
    """The first true entry, which stays."""
    while heap and heap[0][2].ticket != heap[0][1]:
        heapq.heappop(heap)
    return heap[0] if heap else None


def _first_without(heap: list[_Entry], bit: int) -> _Entry | None:
    """The first true entry whose run's last block is not marked with `bit`, if one is near. It stays."""
    seen: list[_Entry] = []
    found: _Entry | None = None
    while found is None and len(seen) < _REACH and _top(heap) is not None:
        seen.append(heapq.heappop(heap))
        found = None if seen[-1][2].marks[-1] & bit else seen[-1]
    for entry in seen:
        heapq.heappush(heap, entry)
    return found
