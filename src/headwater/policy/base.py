"""The interface of an eviction policy: a priority from what is known of a block.

Pure: no clock, no state of its own, no bytes. The holder (a store, the device slots) keeps the number beside the block,
asks again when a fact changed (insert, hit), and evicts the lowest number among the *leaves*: a block that others
build on is never a victim, so no suffix outlives its prefix.

What a policy may know stands in `BlockFacts`. Only the first four facts are every holder's duty; the rest have defaults
that mean "not known", and every policy says what it does then. `History` gathers them all for a holder that asks it.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What the holder has measured of its own traffic: of blocks with a like past, and of new ones. See `Returns`."""

    chance: float  # of a use of such a block, that another one follows: 0 to 1
    gap_s: float  # how long the next one then takes, typically (the geometric mean)
    new_chance: float  # both for blocks that were never used again so far
    new_gap_s: float
    horizon_s: float  # how long after their only use such new blocks are evicted, at present
    cost_per_byte_s: float = 0.0  # what blocks cost to recompute, in the mean; 0: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFacts:
    """What is known of one block when its priority is asked for."""

    used_s: float  # when it was last written or read, on the holder's clock
    hits: int  # uses after the first, as far back as the holder remembers
    depth: int  # blocks before it in its sequence
    num_bytes: int
    previous_s: float | None = None  # the use before the last; None: not known, or there was none
    turns: int = 0  # how often the sequence had grown before this block was added to it
    cost_s: float = 0.0  # to recompute it when everything before it is there; 0: not known
    outlook: Outlook | None = None  # None: the holder measures nothing
    gap_s: float | None = None  # from a turn of its session to the next, as expected; None: not known. See `Sessions`
    spread: float = 0.0  # of such expectations, lately: standard deviation of the logarithm
    wished_s: float | None = None  # until when its session wishes it to stay, if it may; None: it does not
    left_chance: float | None = None  # its session left it behind: how many such blocks come back; None: it did not


class Policy(ABC):
    """A pure order of blocks; the lowest priority leaves first."""

    name: ClassVar[str]
    looks_back: ClassVar[bool] = False  # whether it needs more than the four facts that every holder has
    by_recency: ClassVar[bool] = False  # whether the priority is `used_s`, whatever else is known: nobody has to ask
    by_sessions: ClassVar[bool] = False  # whether it says when blocks are due: a holder that knows sessions asks for it

    @abstractmethod
    def priority(self, facts: BlockFacts) -> float:
        """How much the block is worth keeping. Must be finite; comparable between all blocks of one holder.

        With all else equal it only rises, or only falls, with depth: where the ends of a row are worth the same, so is
        all between them.
        """

    def due_s(self, facts: BlockFacts) -> float | None:
        """When the block is expected to be used again; None: nobody can say. Must be finite. The same at any depth."""
        return None

    def leaves_before(self, due_s: float, priority: float, now_s: float, *, usual_s: float) -> bool:
        """Whether the block that is due last, at `due_s`, leaves before the one with the lowest priority.

        `usual_s`: the gap of all sessions, in the mean.
        """
        return False
