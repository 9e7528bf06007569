"""Belady's MIN for a prefix cache: what one that knows the future would hit. A bound, not a policy.

The future is read into two numbers per block of the trace (who it is, which request wants it next); a capacity is then
one pass with a heap, O(n log n).

The definition. A block is a *hit* if it was kept from its last use until this one. Between two requests at most
`capacity` blocks are kept, each one that was kept before or that the last request had. When there are too many, those
whose next use lies farthest away go; among those of one next request, the deepest. Blocks that nobody wants again are
never kept.

Why it is a bound on every policy here. Any cache of `capacity` blocks has such a set between two requests, and hits of
the next one at most what is in it; and with blocks of one size, dropping the farthest next use maximises the hits of
all such sets (Belady 1966, with the right not to keep what was just used). Leaf-only eviction costs it nothing: who
uses a block uses all blocks before it, so the next use of a block is never before that of its parent, and with the tie
broken by depth a block leaves before what it builds on. The kept set is prefix-closed at any time, so its hits are
prefix hits.

`hold_running=True` is the tighter bound of a device that must also hold the whole running request, as an engine's does:
while a request runs, at most `capacity` less its blocks are kept of what it does not use. The same choice is the best
under such limits too (intervals of equal worth, of which the one that ends last is dropped). It is what a perfect
policy would reach in a replay without stores. A store may hold what the device cannot: with one, only the first holds.

Both are of requests one after the other. Where loads take time, requests overtake each other, and neither is a proof.
"""

import heapq
from array import array
from typing import Final

from headwater.core.keys import BlockKey
from headwater.lab.replay.trace import TraceRequest

_NEVER: Final = (1 << 31) - 1


class Future:
    """All requests of a trace, as numbers: eight bytes a block, and an entry for each different one."""

    def __init__(self) -> None:
        self.num_blocks = 0
        self._ends = array("q")  # of each request, where its blocks end
        self._blocks = array("i")
        self._next_use = array("i")  # which request wants the block next
        self._numbers: dict[BlockKey, int] = {}
        self._last_at = array("q")  # of each different block, where it was requested last

    def add(self, request: TraceRequest) -> None:
        """The next request. Mutates."""
        now = len(self._ends)
        for key in request.keys:
            number = self._numbers.setdefault(key, len(self._last_at))
            at = len(self._blocks)
            if number == len(self._last_at):
                self._last_at.append(at)
            else:
                self._next_use[self._last_at[number]] = now
                self._last_at[number] = at
            self._blocks.append(number)
            self._next_use.append(_NEVER)
        self._ends.append(len(self._blocks))
        self.num_blocks = len(self._blocks)

    def min_hits(self, capacity: int, *, hold_running: bool = False) -> int:
        """How many blocks MIN hits. Pure; see the module for what `hold_running` means."""
        kept: dict[int, int] = {}  # block -> the request that wants it next
        farthest: list[tuple[int, int, int]] = []  # next use and depth, negated, and block; entries may be stale
        hits = start = 0
        for end in self._ends:
            blocks = self._blocks[start:end]
            for block in blocks:
                hits += kept.pop(block, None) is not None
            if hold_running:
                _trim(kept, farthest, max(0, capacity - len(blocks)))
                blocks = blocks[:capacity]  # what does not fit on the device is not there afterwards
            for depth, block in enumerate(blocks):
                next_use = self._next_use[start + depth]
                if next_use != _NEVER:
                    kept[block] = next_use
                    heapq.heappush(farthest, (-next_use, -depth, block))
            _trim(kept, farthest, capacity)
            start = end
            if len(farthest) > 2 * len(kept) + 4096:  # mostly stale: a long trace must not keep all of its past
                farthest = [entry for entry in farthest if kept.get(entry[2]) == -entry[0]]
                heapq.heapify(farthest)
        return hits


def _trim(kept: dict[int, int], farthest: list[tuple[int, int, int]], room: int) -> None:
    while len(kept) > room:
        next_use, _, block = heapq.heappop(farthest)
        if kept.get(block) == -next_use:
            del kept[block]
