"""Least recently used: the oldest use leaves first."""

from typing import ClassVar

from headwater.policy.base import BlockFacts, Policy


class Lru(Policy):
    """Recency alone. Depth needs no term: only leaves are evicted, so a chain goes from its end."""

    name: ClassVar[str] = "lru"
    by_recency: ClassVar[bool] = True

    def priority(self, facts: BlockFacts) -> float:
        """Time of the last use."""
        return facts.used_s
