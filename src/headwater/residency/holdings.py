"""What a store of this node holds, asked of the store itself: for the publisher, which puts its book right by it.

A block is there if all its pages are: on several ranks it has one page per shard and part. Only blocks of one identity
are listed, and only full ones: others' blocks are others' to announce, a partial tail enters no shared index (rule 9).
"""

from collections.abc import Iterator, Sequence
from typing import Final

from headwater.core.errors import HeadwaterError
from headwater.core.keys import BlockKey
from headwater.core.page import KEY_BYTES, PageName, page_name
from headwater.residency.publisher import Row
from headwater.storage.base import SYSTEM_CLOCK, Clock, Deadline, PagePath, Store

_PORTION: Final = 512
WHOLE: Final = ((0, 1, 0),)


class StoreHoldings:
    """The `Holdings` of one store. Calls end by `timeout_s`, as far as the store keeps its deadlines."""

    def __init__(
        self,
        store: Store,
        *,
        identity: bytes,
        block_tokens: int,
        pages: Sequence[tuple[int, int, int]] = WHOLE,
        timeout_s: float = 1.0,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`pages`: shard, number of shards and part of each page that a block has."""
        self._store = store
        self._identity = identity
        self._block_tokens = block_tokens
        self._suffixes = [page_name(bytes(KEY_BYTES), *page[:2], part=page[2])[KEY_BYTES:] for page in pages]
        self._timeout_s = timeout_s
        self._clock = clock

    def held(self, keys: Sequence[BlockKey]) -> list[bool] | None:
        """Which of these blocks are there; None: the store could not be asked."""
        names = [PageName(key + suffix) for key in keys for suffix in self._suffixes]
        deadline = Deadline.after(self._timeout_s, self._clock)
        try:
            found = self._store.contains(names, deadline=deadline)
        except HeadwaterError:
            return None
        damageable = self._store.damageable()
        if deadline.expired or (damageable is not None and damageable.down is not None):  # then all misses: no answer
            return None
        each = len(self._suffixes)
        return [all(found[at : at + each]) for at in range(0, len(found), each)]

    def listed(self) -> Iterator[list[Row]]:
        """All full blocks of the identity, in portions; none where the store keeps no list."""
        store, after = self._store.listing(), -1
        while store is not None:
            deadline = Deadline.after(self._timeout_s, self._clock)
            try:
                rows = store.paths(self._identity, self._block_tokens, after=after, limit=_PORTION, deadline=deadline)
            except HeadwaterError:
                return
            if not rows:
                return
            after = rows[-1].slot
            yield self._whole([row for row in rows if row.name[KEY_BYTES:] == self._suffixes[0]])

    def _whole(self, pages: Sequence[PagePath]) -> list[Row]:
        """Those blocks of which all pages are there."""
        rows = [(BlockKey(page.name[:KEY_BYTES]), BlockKey(page.parent[:KEY_BYTES]), page.depth) for page in pages]
        if len(self._suffixes) == 1:
            return rows
        there = self.held([row[0] for row in rows]) or [False] * len(rows)
        return [row for row, whole in zip(rows, there, strict=True) if whole]
