"""What clients wish to stay: for how many blocks at a time, all together, and until when.

A budget and no more: a wish is granted while there is room, in place of what the same session wished for before, and
counts until its time is over, whatever became of its blocks meanwhile and whether the session is still remembered. So
what is kept by wishes is never more than `most` blocks. Pure; time is what the holder says. Which blocks, is the
holder's affair (`what`).
"""

import heapq
from typing import NamedTuple


class Granted(NamedTuple):
    """A wish that counts."""

    until_s: float
    num_blocks: int
    what: object  # the holder's own


class Wishes:
    """The wishes that count now, one a session."""

    def __init__(self, most: int) -> None:
        """`most`: blocks."""
        self._most = most
        self._num_blocks = 0
        self._granted: dict[bytes, Granted] = {}  # each for a block at least, so there are never more than `most`
        self._ends: list[tuple[float, bytes]] = []  # some are stale

    def take_back(self, name: bytes) -> Granted | None:
        """A session wishes for nothing any more: what it had wished for, if that counted."""
        wish = self._granted.pop(name, None)
        if wish is not None:
            self._num_blocks -= wish.num_blocks
        return wish

    def grant(self, name: bytes, until_s: float, num_blocks: int, what: object, *, now_s: float) -> bool:
        """Whether a session's wish counts; it has none besides. Mutates."""
        while self._ends and self._ends[0][0] <= now_s:
            end_s, over = heapq.heappop(self._ends)
            if over in self._granted and self._granted[over].until_s == end_s:
                self.take_back(over)
        if name in self._granted or num_blocks < 1 or until_s <= now_s or self._num_blocks + num_blocks > self._most:
            return False
        self._granted[name] = Granted(until_s, num_blocks, what)
        self._num_blocks += num_blocks
        heapq.heappush(self._ends, (until_s, name))
        if len(self._ends) > 2 * len(self._granted) + 64:
            self._ends = [(wish.until_s, one) for one, wish in self._granted.items()]
            heapq.heapify(self._ends)
        return True

    def facts(self) -> list[object]:
        """All that counts, for snapshots."""
        return [[name.hex(), wish.until_s, wish.num_blocks] for name, wish in self._granted.items()]
