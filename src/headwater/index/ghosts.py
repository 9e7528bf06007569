"""Blocks that are gone: what was known of the last so many of them, for when they come back.

A conversation returns after minutes. In a small cache its blocks are gone by then, and an index that forgets their past
with them takes them for new each time, so that nothing ever looks worth keeping. It also tells a block that had to
leave from one that never was here. Bounded; who left longest ago is forgotten first.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from headwater.core.keys import BlockKey


class Past(NamedTuple):
    """What was known of a block when it left."""

    hits: int
    used_s: float
    turns: int
    left: int = 0  # its session has gone on elsewhere since: in which way, see `Tails`; 0: it has not

    def facts(self) -> list[object]:
        """All of it, for snapshots; those of before there were sessions are the same."""
        return [*self[:3], *([self.left] if self.left else [])]


class Ghosts:
    """The pasts of evicted blocks, by key."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._pasts: OrderedDict[BlockKey, Past] = OrderedDict()

    def __len__(self) -> int:
        """How many are remembered."""
        return len(self._pasts)

    def __contains__(self, key: object) -> bool:
        """Whether a block was here, and left not too long ago."""
        return key in self._pasts

    def __iter__(self) -> Iterator[BlockKey]:
        """Their keys, who left first first."""
        return iter(self._pasts)

    def facts(self) -> list[object]:
        """All that is remembered, for snapshots."""
        return [[key.hex(), *past.facts()] for key, past in self._pasts.items()]

    def add(self, key: BlockKey, past: Past) -> None:
        """A block left."""
        self._pasts[key] = past
        self._pasts.move_to_end(key)
        while len(self._pasts) > self.limit:
            self._pasts.popitem(last=False)

    def take(self, key: BlockKey) -> Past | None:
        """A block is here again: its past, if it is remembered."""
        return self._pasts.pop(key, None)

    def take_like(self, key: BlockKey, past: Past) -> bool:
        """Take a block's past if it is the same as this one."""
        if self._pasts.get(key) != past:
            return False
        del self._pasts[key]
        return True
