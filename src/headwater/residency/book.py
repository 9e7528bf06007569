"""What a node holds, block by block, and what of it has not been said yet.

Pure: no clock, no thread, no link. It is told what came to a tier and what left one, keeps each block's state, and
hands out what changed since it was last said. Coalescing is in its nature: only the last state of a block is ever
handed out, nothing if that is what was said before, and rows of a path in the same state go as one.

Memory is bounded by the blocks that are there: at most `max_blocks` besides those on the device. Changes are noted only
while somebody is told (`begin` to `stop`); who is told again from the start needs no list of what it missed.
"""

from collections.abc import Iterable, Sequence
from itertools import islice
from operator import itemgetter
from typing import Final, TypeAlias

from headwater.core.keys import BlockKey
from headwater.residency.events import TIERS, Change, State

_DEVICE: Final = TIERS["device"]
_TIERS: Final = 15  # a block in one number: the tiers it is in, those it was last said to be in, and its depth
_SAID: Final = 4
_DEPTH: Final = 8
_Row: TypeAlias = tuple[BlockKey, BlockKey, int, int]  # key, parent, depth, tiers


class Book:
    """The state of every block of one node."""

    def __init__(self, *, max_blocks: int = 1 << 20) -> None:
        self.num_refused = 0  # blocks of stores for which there was no room here
        self._max_blocks = max_blocks
        # Plain numbers, and no object per block: the garbage collector would go through them all, and stop everybody.
        self._blocks: dict[BlockKey, int] = {}
        self._parents: dict[BlockKey, BlockKey] = {}
        self._unsaid: dict[BlockKey, None] = {}
        self._told = False  # whether changes are noted
        self._touched: set[BlockKey] | None = None

    def __len__(self) -> int:
        """Blocks that are somewhere, or are to be said gone."""
        return len(self._blocks)

    @property
    def num_unsaid(self) -> int:
        """Blocks whose state was not said yet."""
        return len(self._unsaid)

    def state(self, key: BlockKey) -> State:
        """Where a block is."""
        return State(self._blocks.get(key, 0) & _TIERS)

    # --- what happens -------------------------------------------------------------------------------------------------

    def came(self, tier: int, keys: Sequence[BlockKey], parent: BlockKey, depth: int) -> None:
        """A row of blocks is in a tier now."""
        blocks, parents = self._blocks, self._parents
        if self._touched is not None:
            self._touched.update(keys)
        for key in keys:
            block = blocks.get(key)
            if block is None and (tier == _DEVICE or len(blocks) < self._max_blocks):
                parents[key] = parent
                block = depth << _DEPTH
            if block is None:
                self.num_refused += 1
            elif not block & tier:
                self._set(key, block | tier)
            parent, depth = key, depth + 1

    def went(self, tier: int, keys: Iterable[BlockKey]) -> None:
        """Blocks are not in a tier any more, if they were."""
        blocks, touched = self._blocks, self._touched
        for key in keys:
            if touched is not None:
                touched.add(key)
            block = blocks.get(key, 0)
            if block & tier:
                self._set(key, block & ~tier)

    def _set(self, key: BlockKey, block: int) -> None:
        bits = block & _TIERS
        if self._told and bits != block >> _SAID & _TIERS:
            self._blocks[key] = block
            self._unsaid[key] = None
            return
        self._unsaid.pop(key, None)
        if bits:
            self._blocks[key] = block
        else:
            self._forget(key)

    def _forget(self, key: BlockKey) -> None:
        self._blocks.pop(key, None)
        self._parents.pop(key, None)

    # --- saying it ----------------------------------------------------------------------------------------------------

    def begin(self) -> list[BlockKey]:
        """A round begins: the blocks to `say` in it. What changes meanwhile is handed out by `take`."""
        self.stop()
        self._told = True
        return list(self._blocks)

    def stop(self) -> None:
        """Nobody is told: forget what was not said."""
        for key in self._unsaid:
            if not self._blocks[key] & _TIERS:
                self._forget(key)
        self._unsaid.clear()
        self._told = False

    def say(self, keys: Iterable[BlockKey]) -> list[Change]:
        """The state of these blocks, of those that are anywhere. Counts as said."""
        there = [key for key in keys if self._blocks.get(key, 0) & _TIERS]
        for key in there:
            self._unsaid.pop(key, None)
        return self._said(there)

    def take(self, limit: int) -> list[Change]:
        """What was not said yet, of at most so many blocks, those first that changed first. Counts as said."""
        keys = list(islice(self._unsaid, limit))
        for key in keys:
            del self._unsaid[key]
        return self._said(keys)

    def _said(self, keys: Iterable[BlockKey]) -> list[Change]:
        rows: list[_Row] = []
        for key in keys:
            block = self._blocks[key]
            bits, depth = block & _TIERS, block >> _DEPTH
            rows.append((key, self._parents[key], depth, bits))
            if bits:
                self._blocks[key] = depth << _DEPTH | bits << _SAID | bits
            else:
                self._forget(key)
        return _in_rows(rows)

    # --- comparing it with what a store says --------------------------------------------------------------------------

    def blocks(self) -> list[BlockKey]:
        """All blocks."""
        return list(self._blocks)

    def watch(self, tier: int, keys: Iterable[BlockKey]) -> list[BlockKey]:
        """Those of these blocks that are in a tier. From now on, what happens to any block is remembered."""
        self._touched = set()
        return [key for key in keys if self._blocks.get(key, 0) & tier]

    def untouched(self, keys: Iterable[BlockKey]) -> list[BlockKey]:
        """Those blocks to which nothing has happened since `watch`: for them, what was seen since then holds."""
        touched, self._touched = self._touched or set(), None
        return [key for key in keys if key not in touched]


def _in_rows(rows: list[_Row]) -> list[Change]:
    """Blocks that follow each other in one state, together."""
    rows.sort(key=itemgetter(2))
    found: list[tuple[BlockKey, int, list[BlockKey], int]] = []
    ends: dict[BlockKey, int] = {}  # the row that ends with a block
    for key, parent, depth, bits in rows:
        at = ends.get(parent)
        if at is not None and found[at][3] == bits:
            del ends[parent]
            found[at][2].append(key)
        else:
            at = len(found)
            found.append((parent, depth, [key], bits))
        ends[key] = at
    return [
        Change(parent=parent, depth=depth, keys=tuple(keys), state=State(bits)) for parent, depth, keys, bits in found
    ]
