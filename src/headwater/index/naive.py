"""The prefix index as a dict of blocks: slow, and easy to believe. The oracle of `radix.py`; nothing else uses it."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from headwater.core.keys import BlockKey
from headwater.index.base import Hold, PrefixIndex, Victim
from headwater.policy import BlockFacts, Policy


@dataclass(slots=True)
class _Block:
    parent: BlockKey | None
    depth: int
    slot: int
    used_s: float
    hits: int = 0
    marks: int = 0
    guards: int = 0  # holds and pins that end here


class NaiveIndex(PrefixIndex):
    """One entry per block; every question is a loop."""

    def __init__(self, policy: Policy, *, block_bytes: int) -> None:
        self._policy = policy
        self._block_bytes = block_bytes
        self._blocks: dict[BlockKey, _Block] = {}

    def __len__(self) -> int:
        """Blocks known."""
        return len(self._blocks)

    @property
    def num_evictable(self) -> int:
        """Blocks that no hold or pin keeps."""
        kept = {key for key, block in self._blocks.items() if block.guards for key in self._path(key)}
        return len(self._blocks) - len(kept)

    def find(self, keys: Sequence[BlockKey]) -> int:
        """How many leading blocks of a sequence are known."""
        return next((i for i, key in enumerate(keys) if key not in self._blocks), len(keys))

    def hold(self, keys: Sequence[BlockKey], *, now_s: float) -> Hold:
        """Hold the longest known prefix."""
        hold = Hold(None, 0)
        self.advance(hold, keys, now_s=now_s)
        return hold

    def advance(self, hold: Hold, keys: Sequence[BlockKey], *, now_s: float) -> int:
        """Move a hold over those of the next keys that are known by now."""
        found = keys[: self.find(keys)]
        for key in found:
            self._blocks[key].hits += 1
            self._blocks[key].used_s = now_s
        if found:
            self._guard(hold, -1)
            hold.at, hold.num_blocks = found[-1], hold.num_blocks + len(found)
            self._guard(hold, 1)
        return len(found)

    def extend(self, hold: Hold, keys: Sequence[BlockKey], slots: Sequence[int], *, now_s: float) -> "array[int]":
        """Get or create the blocks behind a hold, and move it to the last of them."""
        num_known = self.advance(hold, keys, now_s=now_s)
        for key, slot in zip(keys[num_known:], slots[num_known:], strict=True):
            self._blocks[key] = _Block(cast(BlockKey | None, hold.at), hold.num_blocks, slot, now_s)
            self._guard(hold, -1)
            hold.at, hold.num_blocks = key, hold.num_blocks + 1
            self._guard(hold, 1)
        return array("i", [self._blocks[key].slot for key in keys])

    def release(self, hold: Hold, *, now_s: float) -> None:
        """Give a hold back."""
        for key in self._path(hold.at):
            self._blocks[key].used_s = now_s
        self._guard(hold, -1)

    def pin(self, hold: Hold, num_blocks: int | None = None) -> Hold:
        """Keep the first blocks of a hold, or all, for a job."""
        path = self._path(hold.at)[:num_blocks]
        pin = Hold(path[-1] if path else None, len(path))
        self._guard(pin, 1)
        return pin

    def unpin(self, pin: Hold) -> None:
        """Give a pin back."""
        self._guard(pin, -1)

    def pin_coldest(self, bit: int) -> Hold | None:
        """Pin the first of the next victims that lacks `bit`."""
        for key in self.free_leaves():
            block = self._blocks[key]
            if not block.marks & bit:
                block.guards += 1
                return Hold(key, block.depth + 1)
        return None

    def slots(self, hold: Hold, start: int = 0) -> "array[int]":
        """Slots of the held blocks from `start` on."""
        return array("i", [self._blocks[key].slot for key in self.keys(hold, start)])

    def keys(self, hold: Hold, start: int = 0) -> list[BlockKey]:
        """Keys of the held blocks from `start` on."""
        return self._path(hold.at)[start:]

    def num_hot(self, hold: Hold, hits: int) -> int:
        """How many leading held blocks were hit at least so often."""
        return sum(self._blocks[key].hits >= hits for key in self._path(hold.at))

    def mark(self, hold: Hold, start: int, end: int, *, bit: int, on: bool) -> None:
        """Remember, or forget, that blocks [start, end) are in the store of this bit."""
        for key in self._path(hold.at)[start:end]:
            block = self._blocks[key]
            block.marks = block.marks | bit if on else block.marks & ~bit

    def num_marked(self, hold: Hold, bit: int) -> int:
        """How many held blocks come before those at the end that lack `bit`."""
        path = self._path(hold.at)
        return next((i + 1 for i in reversed(range(len(path))) if self._blocks[path[i]].marks & bit), 0)

    def evict(self) -> Victim | None:
        """Remove the free leaf with the lowest priority."""
        leaves = self.free_leaves()
        return self.remove(leaves[0]) if leaves else None

    def remove(self, key: BlockKey) -> Victim:
        """Remove a free leaf."""
        block = self._blocks.pop(key)
        return Victim(key, block.slot, block.depth, block.hits, block.used_s, block.marks)

    def free_leaves(self) -> list[BlockKey]:
        """The blocks that may leave now, lowest priority first."""
        parents = {block.parent for block in self._blocks.values()}
        free = [key for key, block in self._blocks.items() if key not in parents and not block.guards]
        return sorted(free, key=self.priority)

    def priority(self, key: BlockKey) -> float:
        """What a known block is worth."""
        block = self._blocks[key]
        facts = BlockFacts(used_s=block.used_s, hits=block.hits, depth=block.depth, num_bytes=self._block_bytes)
        return self._policy.priority(facts)

    def blocks(self) -> list[tuple[BlockKey, BlockKey | None, int]]:
        """Every block as (key, key before it, slot)."""
        return [(key, block.parent, block.slot) for key, block in self._blocks.items()]

    def validate(self) -> None:
        """Raise AssertionError if the index contradicts itself."""
        for block in self._blocks.values():
            assert block.guards >= 0
            assert block.depth == (0 if block.parent is None else self._blocks[block.parent].depth + 1)

    def _path(self, at: object) -> list[BlockKey]:
        found: list[BlockKey] = []
        key = cast(BlockKey | None, at)
        while key is not None:
            found.append(key)
            key = self._blocks[key].parent
        return found[::-1]

    def _guard(self, hold: Hold, change: int) -> None:
        if hold.at is not None:
            self._blocks[cast(BlockKey, hold.at)].guards += change
