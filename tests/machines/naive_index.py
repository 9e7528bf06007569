"""The prefix index as a dict of blocks: slow, and easy to believe. The oracle of `radix.py`; nothing else uses it.

Where several blocks may leave with equal right, an oracle has no say: `free_leaves`, `priority`, `remove` and
`pin_leaf` let a test ask whether a choice was right, and make the same one here.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from headwater.core.keys import BlockKey
from headwater.index.base import NO_HINT, Hint, Hold, PrefixIndex, Victim
from headwater.index.ghosts import Ghosts, Past
from headwater.policy import BlockFacts, Policy


@dataclass(slots=True, eq=False)
class _Block:
    key: BlockKey
    parent: "_Block | None"
    depth: int
    slot: int
    used_s: float
    hits: int = 0
    marks: int = 0
    guards: int = 0  # holds and pins that end here
    cut: bool = False  # nobody finds it


class NaiveIndex(PrefixIndex):
    """One entry per block; every question is a loop."""

    def __init__(self, policy: Policy, *, block_bytes: int, num_ghosts: int = 0) -> None:
        self.ghosts = Ghosts(num_ghosts)
        self._policy = policy
        self._block_bytes = block_bytes
        self._blocks: dict[BlockKey, _Block] = {}
        self._leaving: list[_Block] = []

    def __len__(self) -> int:
        """Blocks known."""
        return len(self._blocks)

    @property
    def num_evictable(self) -> int:
        """Blocks that no hold or pin keeps."""
        kept = self._kept()
        return sum(id(block) not in kept for block in self._blocks.values())

    def _kept(self) -> set[int]:
        """Blocks that a hold or pin keeps."""
        holding = (block for block in (*self._blocks.values(), *self._leaving) if block.guards)
        return {id(before) for block in holding for before in _path(block)}

    def find(self, keys: Sequence[BlockKey]) -> int:
        """How many leading blocks of a sequence are known."""
        return next((i for i, key in enumerate(keys) if key not in self._blocks), len(keys))

    def hold(self, keys: Sequence[BlockKey], *, now_s: float, hint: Hint = NO_HINT) -> Hold:
        """Hold the longest known prefix."""
        hold = Hold(None, 0, hint)
        self.advance(hold, keys, now_s=now_s)
        return hold

    def advance(self, hold: Hold, keys: Sequence[BlockKey], *, now_s: float, hit: bool = True) -> int:
        """Move a hold over those of the next keys that are known by now."""
        last = cast(_Block | None, hold.at)
        num_found = 0 if last is not None and last.cut else self.find(keys)
        for key in keys[:num_found]:
            block = self._blocks[key]
            block.hits += hit
            block.used_s = now_s
            self._move(hold, block)
        return num_found

    def extend(
        self, hold: Hold, keys: Sequence[BlockKey], slots: Sequence[int], *, now_s: float, seen: bool = False
    ) -> "array[int]":
        """Get or create the blocks behind a hold, and move it to the last of them."""
        num_known = self.advance(hold, keys, now_s=now_s)
        for key, slot in zip(keys[num_known:], slots[num_known:], strict=True):
            past = self.ghosts.take(key)
            hits = int(seen) if past is None else past.hits + 1
            self._blocks[key] = _Block(key, cast(_Block | None, hold.at), hold.num_blocks, slot, now_s, hits)
            self._move(hold, self._blocks[key])
        return array("i", [self._blocks[key].slot for key in keys])

    def extend_apart(self, hold: Hold, keys: Sequence[BlockKey], slots: Sequence[int]) -> None:
        """Blocks behind a hold that nobody else finds."""
        for key, slot in zip(keys, slots, strict=True):
            block = _Block(key, cast(_Block | None, hold.at), hold.num_blocks, slot, 0.0, cut=True)
            self._leaving.append(block)
            self._move(hold, block)

    def rank_by(self, policy: Policy) -> None:
        """Have blocks leave in another order from now on."""
        self._policy = policy

    def cut(self, keys: Sequence[BlockKey]) -> list[tuple[BlockKey, int]]:
        """Have nobody find the last of these blocks any more, nor what builds on it."""
        if not keys or self.find(keys) < len(keys):
            return []
        doomed = [block for block in self._blocks.values() if any(one.key == keys[-1] for one in _path(block))]
        for block in doomed:
            block.cut = True
            del self._blocks[block.key]
        self._leaving += doomed
        return [(block.key, block.slot) for block in doomed]

    def sweep(self) -> list[int]:
        """Forget blocks that nobody finds, holds or pins any more."""
        kept = self._kept()
        gone = [block.slot for block in self._leaving if id(block) not in kept]
        self._leaving = [block for block in self._leaving if id(block) in kept]
        return gone

    def leaving(self) -> list[int]:
        """Slots of blocks that nobody finds."""
        return [block.slot for block in self._leaving]

    def release(self, hold: Hold, *, now_s: float) -> None:
        """Give a hold back."""
        for block in _path(hold.at):
            block.used_s = now_s
        self.unpin(hold)

    def pin(self, hold: Hold, num_blocks: int | None = None) -> Hold:
        """Keep the first blocks of a hold, or all, for a job."""
        path = _path(hold.at)[:num_blocks]
        if path:
            path[-1].guards += 1
        return Hold(path[-1] if path else None, len(path))

    def unpin(self, pin: Hold) -> None:
        """Give a pin back."""
        if pin.at is not None:
            cast(_Block, pin.at).guards -= 1

    def repin(self, pin: Hold) -> Hold | None:
        """Pin the blocks of a pin that was given back once more."""
        block = cast(_Block | None, pin.at)
        if block is not None:
            if self._blocks.get(block.key) is not block:
                return None
            block.guards += 1
        return Hold(block, pin.num_blocks)

    def pin_coldest(self, bit: int) -> Hold | None:
        """Pin the first of the next victims that lacks `bit`."""
        return next((self.pin_leaf(key) for key in self.free_leaves() if not self._blocks[key].marks & bit), None)

    def pin_leaf(self, key: BlockKey) -> Hold:
        """Pin a known block, and all before it."""
        block = self._blocks[key]
        block.guards += 1
        return Hold(block, block.depth + 1)

    def slots(self, hold: Hold, start: int = 0) -> "array[int]":
        """Slots of the held blocks from `start` on."""
        return array("i", [block.slot for block in _path(hold.at)[start:]])

    def keys(self, hold: Hold, start: int = 0) -> list[BlockKey]:
        """Keys of the held blocks from `start` on."""
        return [block.key for block in _path(hold.at)[start:]]

    def num_hot(self, hold: Hold, hits: int) -> int:
        """How many held blocks there are up to the last that was hit at least so often."""
        path = _path(hold.at)
        return next((i + 1 for i in reversed(range(len(path))) if path[i].hits >= hits), 0)

    def mark(self, hold: Hold, start: int, end: int, *, bit: int, on: bool) -> None:
        """Remember, or forget, that blocks [start, end) are in the store of this bit."""
        for block in _path(hold.at)[start:end]:  # of an unpinned path some may be gone: that hurts nobody
            block.marks = block.marks | bit if on else block.marks & ~bit

    def unmark(self, bit: int) -> None:
        """Forget of every block that it is in the store of this bit."""
        for block in (*self._blocks.values(), *self._leaving):
            block.marks &= ~bit

    def facts(self) -> list[object]:
        """All that the index knows."""
        blocks = self._blocks
        return [[key.hex(), blocks[key].slot, blocks[key].used_s, blocks[key].hits] for key in sorted(blocks)]

    def num_marked(self, hold: Hold, bit: int) -> int:
        """How many held blocks come before those at the end that lack `bit`."""
        path = _path(hold.at)
        return next((i + 1 for i in reversed(range(len(path))) if path[i].marks & bit), 0)

    def evict(self) -> Victim | None:
        """Remove the free leaf with the lowest priority."""
        leaves = self.free_leaves()
        return self.remove(leaves[0]) if leaves else None

    def remove(self, key: BlockKey) -> Victim:
        """Remove a free leaf."""
        block = self._blocks.pop(key)
        self.ghosts.add(key, Past(block.hits, block.used_s, 0))
        return Victim(key, block.slot, block.depth, block.hits, block.used_s, block.marks)

    def free_leaves(self) -> list[BlockKey]:
        """The blocks that may leave now, lowest priority first."""
        parents = {block.parent.key for block in self._blocks.values() if block.parent is not None}
        kept = self._kept()
        free = [key for key, block in self._blocks.items() if key not in parents and id(block) not in kept]
        return sorted(free, key=self.priority)

    def priority(self, key: BlockKey) -> float:
        """What a known block is worth."""
        block = self._blocks[key]
        facts = BlockFacts(used_s=block.used_s, hits=block.hits, depth=block.depth, num_bytes=self._block_bytes)
        return self._policy.priority(facts)

    def marks(self, key: BlockKey) -> int:
        """The stores that a known block is marked with, as bits."""
        return self._blocks[key].marks

    def blocks(self) -> list[tuple[BlockKey, BlockKey | None, int]]:
        """Every block as (key, key before it, slot)."""
        return [
            (key, None if block.parent is None else block.parent.key, block.slot) for key, block in self._blocks.items()
        ]

    def validate(self) -> None:
        """Raise AssertionError if the index contradicts itself."""
        for key, block in self._blocks.items():
            parent = block.parent
            assert block.key == key, "a block under another's key"
            assert block.guards >= 0, "given back more often than taken"
            assert block.depth == (0 if parent is None else parent.depth + 1), "a block at the wrong depth"
            assert parent is None or self._blocks.get(parent.key) is parent, "a suffix without its prefix"

    def _move(self, hold: Hold, block: _Block) -> None:
        self.unpin(hold)
        block.guards += 1
        hold.at, hold.num_blocks = block, block.depth + 1


def _path(at: object) -> list[_Block]:
    """A block and all before it, in order."""
    found: list[_Block] = []
    block = cast(_Block | None, at)
    while block is not None:
        found.append(block)
        block = block.parent
    return found[::-1]
