"""LRU-2: the oldest use before the last leaves first. Scan-resistant, as published.

E. J. O'Neil, P. E. O'Neil, G. Weikum: The LRU-K Page Replacement Algorithm for Database Disk Buffering, SIGMOD 1993,
with K = 2. A block that was used once has no use before the last: it is worth less than every block that has one, and
among its like the oldest use goes first (the paper's subsidiary LRU). What is read once in a long scan therefore never
displaces what was used twice.

Where it departs from the paper: only leaves leave; the correlated reference period is zero (a request uses a block
once, and the holder does not count the write that follows a read); and the *retained information* (uses remembered
after a block was evicted, without which LRU-2 forgets what it needs) is bounded by a number of blocks, not by a period
of time: see `History`. What two old uses protect, no later scan moves: a workload that changes is followed slowly.

Of a holder that keeps no previous use, `hits` tells at least that there was one; then the last use stands for it.
"""

from typing import ClassVar, Final

from headwater.policy.base import BlockFacts, Policy

# Once-used blocks come before all others: 272 years earlier, at which distance a float still tells microseconds apart.
_ONCE_S: Final = 2.0**33


class LruK(Policy):
    """Time of the use before the last; blocks without one go first, oldest first."""

    name: ClassVar[str] = "lru-2"
    looks_back: ClassVar[bool] = True

    def priority(self, facts: BlockFacts) -> float:
        """Time of the use before the last."""
        if facts.previous_s is not None:
            return facts.previous_s
        return facts.used_s if facts.hits > 0 else facts.used_s - _ONCE_S
