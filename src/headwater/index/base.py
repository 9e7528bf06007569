"""What an index is: which blocks are on the device, who holds them, and, where it owns them, which leaf leaves first.

Pure counting over block keys and slot numbers: no bytes, no clock, no thread. `PathIndex` is what the saver and the
loader need of every index; over an engine that evicts by itself there is no more (`lent.py`). `PrefixIndex` owns the
device's slots besides. Two of them behave alike, block for block: `radix.py`, which is used, and in the tests a dict
that is easy to believe, its oracle.

What enters is finished (rule 1): `extend` is called with blocks that were computed, or loaded and verified. What is
still under way stands in the brain, never here.

Invariants of a PrefixIndex:
- The block before a known block is known: a suffix never outlives its prefix. Only leaves are evicted.
- One key, one block: `extend` is get-or-create. The slot that came second stays its bringer's own; the answer names the
  slot that is in the index.
- A hold (a running request) or a pin (a job that copies) keeps its block and all before it. It is taken and given back
  in O(runs), and never moves a block to another slot.
- What was cut out (`cut`), or entered apart, is found by nobody and stays until its last holder leaves.
- Victims leave in the order of `Policy.priority`, asked when a block becomes a free leaf; among equals, who became one
  first leaves first. Where the policy goes by sessions, the one that is due last may leave before them.
"""

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from typing import Final, NamedTuple

from headwater.core.keys import BlockKey
from headwater.index.ghosts import Ghosts
from headwater.policy import Policy


class Victim(NamedTuple):
    """A block that has just left the index, and what was known of it."""

    key: BlockKey
    slot: int
    depth: int
    hits: int
    used_s: float
    stored: int  # bits of the stores that are believed to hold it


class Hint(NamedTuple):
    """What a client says of a request's turn. It bears on who leaves first, and on nothing else."""

    session: bytes = b""  # whose turn it is (`events.session_of`); empty: nobody says, and the rest has no effect
    keep_s: float = 0.0  # for how long after it the session's blocks are wished for
    last: bool = False  # whether it is the session's last turn


NO_HINT: Final = Hint()


class Hold:
    """A place in the forest that its holder keeps, with all blocks before it. Made and moved by an index alone."""

    __slots__ = ("at", "hint", "num_blocks", "turns")

    def __init__(self, at: object, num_blocks: int, hint: Hint = NO_HINT) -> None:
        self.at = at  # the index's own: where the last held block is
        self.num_blocks = num_blocks
        self.hint = hint
        self.turns = 0  # how often the sequence had grown before its holder came


class PathIndex(ABC):
    """Paths of blocks that requests hold and jobs pin, and which store is believed to have which of them.

    This is what every index has; what one can do besides is asked of it (`evicting`), and never of its class.
    """

    def evicting(self) -> "PrefixIndex | None":
        """Itself, where blocks stay until they are evicted here; None: they leave with their request."""
        return None

    @abstractmethod
    def hold(self, keys: Sequence[BlockKey], *, now_s: float, hint: Hint = NO_HINT) -> Hold:
        """Hold the longest known prefix. Counts a hit on each of its blocks. With keys it is a turn, as `hint` says."""

    @abstractmethod
    def extend(
        self, hold: Hold, keys: Sequence[BlockKey], slots: Sequence[int], *, now_s: float, seen: bool = False
    ) -> "array[int]":
        """Get or create the blocks behind a hold, and move it to the last of them.

        With `seen` they come from a store: somebody used them before. A block that is remembered goes on where it left
        off, with one hit more.

        Returns the slots that are in the index, one per key: the given one where the block was new, the earlier one
        where it was known; then the given slot is not taken.
        """

    @abstractmethod
    def extend_apart(self, hold: Hold, keys: Sequence[BlockKey], slots: Sequence[int]) -> None:
        """Blocks behind a hold that nobody else finds, now or later: they leave with their last holder."""

    @abstractmethod
    def release(self, hold: Hold, *, now_s: float) -> None:
        """Give a hold back. Its blocks count as used until now. The hold must not be used again."""

    @abstractmethod
    def pin(self, hold: Hold, num_blocks: int | None = None) -> Hold:
        """Keep the first blocks of a hold, or all, for a job. Counts no hit; given back by `unpin`."""

    @abstractmethod
    def unpin(self, pin: Hold) -> None:
        """Give a pin back. It may still be passed to `mark`, for what is left of its blocks."""

    @abstractmethod
    def slots(self, hold: Hold, start: int = 0) -> "array[int]":
        """Slots of the held blocks from `start` on, in order."""

    @abstractmethod
    def keys(self, hold: Hold, start: int = 0) -> list[BlockKey]:
        """Keys of the held blocks from `start` on, in order."""

    @abstractmethod
    def mark(self, hold: Hold, start: int, end: int, *, bit: int, on: bool) -> None:
        """Remember, or forget, that blocks [start, end) of a hold are in the store of this bit."""

    @abstractmethod
    def unmark(self, bit: int) -> None:
        """Forget of every block that it is in the store of this bit."""

    @abstractmethod
    def num_marked(self, hold: Hold, bit: int) -> int:
        """How many leading held blocks need not be written to the store of this bit: where writing has to begin."""

    @abstractmethod
    def num_lacking(self, hold: Hold, start: int, bit: int) -> int:
        """How many held blocks from `start` on are not in the store of this bit."""

    @abstractmethod
    def facts(self) -> list[object]:
        """All that the index knows, as plain JSON values, for snapshots. Reads everything."""

    @abstractmethod
    def validate(self) -> None:
        """Raise AssertionError if the index contradicts itself. Reads everything."""


class PrefixIndex(PathIndex):
    """An index that owns the device's slots: blocks stay until they are evicted, and it remembers some that left."""

    ghosts: Ghosts

    def evicting(self) -> "PrefixIndex":
        """Itself."""
        return self

    @abstractmethod
    def __len__(self) -> int:
        """Blocks known."""

    @property
    @abstractmethod
    def num_evictable(self) -> int:
        """Blocks that could leave, one after another, if room were needed: those that no hold or pin keeps."""

    @abstractmethod
    def find(self, keys: Sequence[BlockKey]) -> int:
        """How many leading blocks of a sequence are known. Changes nothing."""

    @abstractmethod
    def advance(self, hold: Hold, keys: Sequence[BlockKey], *, now_s: float, hit: bool = True) -> int:
        """Move a hold over those of the next keys that are known by now, a hit on each; return how many."""

    @abstractmethod
    def num_hot(self, hold: Hold, hits: int) -> int:
        """How many held blocks there are up to the last that was hit at least so often."""

    @abstractmethod
    def repin(self, pin: Hold) -> Hold | None:
        """Pin the blocks of a pin that was given back once more; None if they are not all there any more."""

    @abstractmethod
    def pin_coldest(self, bit: int) -> Hold | None:
        """Pin the first of the next victims that lacks `bit`, to save it in time; None if they all have it."""

    def num_lacking(self, hold: Hold, start: int, bit: int) -> int:
        """All of them: where writing begins, the store has nothing, and keeps nothing without its prefix."""
        return hold.num_blocks - start

    @abstractmethod
    def rank_by(self, policy: Policy) -> None:
        """Have blocks leave in another order from now on. One that looks back begins to look now."""

    @abstractmethod
    def cut(self, keys: Sequence[BlockKey]) -> list[tuple[BlockKey, int]]:
        """Have nobody find the last of these blocks any more, nor what builds on it. Returns them, with their slots.

        Who holds or pins some of them keeps those. Nothing, where the path is not known.
        """

    @abstractmethod
    def sweep(self) -> list[int]:
        """Forget blocks that nobody finds, holds or pins any more. Returns their slots."""

    @abstractmethod
    def leaving(self) -> list[int]:
        """Slots of blocks that nobody finds, and somebody holds. For tests and snapshots; reads everything."""

    @abstractmethod
    def evict(self) -> Victim | None:
        """Remove the leaf with the lowest priority that nobody holds or pins; None if there is none."""

    @abstractmethod
    def blocks(self) -> list[tuple[BlockKey, BlockKey | None, int]]:
        """Every block as (key, key before it, slot), in no order. For tests and snapshots; reads everything."""
