"""The interface of an eviction policy: a priority from what is known of a block.

Pure: no clock, no state of its own, no bytes. The holder (a store, the device slots) keeps the number beside the block,
asks again when a fact changed (insert, hit), and evicts the lowest number among the *leaves*: a block that others
build on is never a victim, so no suffix outlives its prefix.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFacts:
    """What is known of one block when its priority is asked for."""

    used_s: float  # when it was last written or read, on the holder's clock
    hits: int  # reads since it was written
    depth: int  # blocks before it in its sequence
    num_bytes: int


class Policy(ABC):
    """A pure order of blocks; the lowest priority leaves first."""

    name: ClassVar[str]

    @abstractmethod
    def priority(self, facts: BlockFacts) -> float:
        """How much the block is worth keeping. Must be finite; comparable between all blocks of one holder."""
