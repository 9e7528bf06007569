"""The residency index: hears what nodes say, and answers who holds how much of a prefix, in which tier.

    apply(update) -> Applied            lookup(keys) -> Found            nodes() -> who is there

What every index keeps to (`tests/machines/residency_machine.py` checks it):

- It never claims a block of a node that was never there: a claim is something that node said, in this epoch.
- Updates of a node count in order, each once. A hole in their numbers makes the node *doubtful*: what it said still
  counts, and a whole round (BEGIN to END, nothing missing) puts it right. After a round the index holds exactly what
  the node holds.
- A newer epoch ends all claims of the older one. A node that is silent for its lease is not there, and has to begin a
  round when it comes back.
- What it answers is a hint, as everything is but a verified page. It moves no bytes and decides nothing.

`apply` and `lookup` never raise for trouble with a server: they say so, by their deadline.
"""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from headwater.core.closing import Closing
from headwater.core.keys import BlockKey, Extra, Tokens, block_keys
from headwater.residency.events import TIERS, Applied, Update
from headwater.storage.base import Deadline

_ANY: Final = 1 << len(TIERS)  # in some tier
_BITS: Final = (*TIERS.values(), _ANY)


@dataclass(frozen=True, slots=True)
class Holder:
    """How many leading blocks a node holds: in one tier or another, and in each."""

    node: str
    num_blocks: int  # each of them in some tier
    device: int
    host: int
    disk: int
    pool: int
    doubtful: bool = False  # something that the node said was lost; it is being put right


@dataclass(frozen=True, slots=True)
class Found:
    """Who holds what of a prefix: the nodes that hold its first block, who has most first."""

    num_blocks: int  # that were asked about
    holders: tuple[Holder, ...] = ()
    pool: int = 0  # leading blocks that one node or another has seen in the shared pool
    answered: bool = True  # False: the index could not be asked

    def of(self, node: str) -> Holder:
        """What one node holds; all zeros if that is nothing."""
        return next((one for one in self.holders if one.node == node), Holder(node, 0, 0, 0, 0, 0))


@dataclass(frozen=True, slots=True)
class Node:
    """A node that is there."""

    name: str
    epoch: int
    lease_left_s: float
    doubtful: bool


class Residency(Closing):
    """The index. All calls may come from several threads."""

    @abstractmethod
    def apply(self, update: Update, *, deadline: Deadline) -> Applied:
        """Take in what a node says. Blocks until the deadline at most."""

    @abstractmethod
    def lookup(self, keys: Sequence[BlockKey], *, deadline: Deadline) -> Found:
        """The longest prefix of a path per node and tier. Blocks until the deadline at most, one round trip."""

    @abstractmethod
    def nodes(self, *, deadline: Deadline) -> tuple[Node, ...] | None:
        """Who is there; None if the index could not be asked. Blocks until the deadline at most."""

    @abstractmethod
    def last_epoch(self, node: str, *, deadline: Deadline) -> int | None:
        """The newest epoch that was heard of a node, alive or not; None if there was none, or nobody could be asked."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back. Idempotent."""


def lookup_tokens(
    residency: Residency,
    tokens: Tokens,
    *,
    root: BlockKey,
    block_tokens: int,
    deadline: Deadline,
    extras: Iterable[Extra] = (),
) -> Found:
    """The longest prefix of a prompt's full blocks per node and tier. `root` is the identity's (`CacheIdentity`)."""
    keys = block_keys(tokens, parent=root, block_tokens=block_tokens, extras=extras)
    return residency.lookup(keys, deadline=deadline)


def prefixes(runs: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """Of (tiers, how many blocks in a row) from the first block on: the longest prefix in each tier, and in any."""
    lengths = [0] * len(_BITS)
    still, at = (1 << len(_BITS)) - 1, 0
    for bits, count in runs:
        still &= bits | _ANY if bits else 0
        if not still:
            break
        at += count
        for i, bit in enumerate(_BITS):
            if still & bit:
                lengths[i] = at
    return tuple(lengths)


def holder(node: str, runs: Iterable[tuple[int, int]], *, doubtful: bool) -> Holder:
    """What a node holds."""
    device, host, disk, pool, most = prefixes(runs)
    return Holder(node, most, device, host, disk, pool, doubtful)


def ranked(holders: Iterable[Holder]) -> tuple[Holder, ...]:
    """Who holds something, who has most first."""
    return tuple(sorted((one for one in holders if one.num_blocks), key=lambda one: (-one.num_blocks, one.node)))
