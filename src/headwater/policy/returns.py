"""Which uses are followed by another, and how soon: counts over a holder's own traffic, by what is known of a block.

A block's *kind* is its past in few words: how often it was used again (in powers of two), and for one that never was,
how often its sequence had grown before it was added (a conversation in its fourth turn comes back more often than one
in its first). Each use of a block belongs to the kind that the block has from then on; whether another use follows, and
after how long, counts for that kind. From this comes the `Outlook` that a policy asks for.

Counts are of blocks, halved when they exceed `window`, so that the last traffic weighs most and a workload that changes
is followed. A kind of which little is known is taken for a new block's until it has some `_PRIOR` uses of its own.
A use that still waits for the next one counts as one without: blocks that stay for ever must not look as if they always
came back.

Not here: which block is of which past (`History`, or the runs of a radix tree), clocks, and eviction.
"""

import math
from typing import Final

from headwater.policy.base import Outlook

NUM_KINDS: Final = 13
_NEW_KINDS: Final = 4  # never used again: the sequence grew 0, 1, 2 to 3, 4 or more times before
_PRIOR: Final = 20.0  # about the blocks of one request, which share one fate: one request's worth of doubt
_TICK_S: Final = 0.001  # gaps are compared by their logarithms, and a clock may not tell two uses apart


def kind_of(hits: int, turns: int) -> int:
    """The kind of a block that was used `hits` times after the first, added after its sequence grew `turns` times."""
    if hits > 0:
        return _NEW_KINDS + min(hits.bit_length(), NUM_KINDS - _NEW_KINDS) - 1
    return min(turns.bit_length(), _NEW_KINDS - 1)


class Returns:
    """Uses, and those followed by another, per kind."""

    def __init__(self) -> None:
        self._uses = [0.0] * NUM_KINDS
        self._returns = [0.0] * NUM_KINDS
        self._log_gaps = [0.0] * NUM_KINDS
        self._num_uses = 0.0
        self._evicted = 0
        self._horizon_s = 0.0

    @property
    def horizon_s(self) -> float:
        """How long after their only use new blocks are evicted, lately."""
        return self._horizon_s

    def facts(self) -> list[object]:
        """All that was counted, for snapshots."""
        counts = [self._uses, self._returns, self._log_gaps]
        return [*map(list, counts), self._num_uses, self._evicted, self._horizon_s]

    def returned(self, kind: int, gap_s: float, *, blocks: int = 1) -> None:
        """Blocks that were of this kind until now are used again, `gap_s` after their last use."""
        self._returns[kind] += blocks
        self._log_gaps[kind] += blocks * math.log(max(gap_s, _TICK_S))

    def used(self, kind: int, *, window: float, blocks: int = 1) -> None:
        """Blocks that are of this kind from now on are used. `window`: how many uses weigh, about."""
        self._uses[kind] += blocks
        self._num_uses += blocks
        if self._num_uses > window:
            self._num_uses /= 2
            for counts in (self._uses, self._returns, self._log_gaps):
                counts[:] = [count / 2 for count in counts]

    def evicted(self, kind: int, age_s: float, *, held: int) -> None:
        """A block of this kind was evicted `age_s` after its last use; a mean over a quarter of the `held` blocks."""
        if kind < _NEW_KINDS:
            self._evicted += 1
            self._horizon_s += (max(0.0, age_s) - self._horizon_s) / min(self._evicted, max(64, held // 4))

    def outlook(self, kind: int, *, cost_per_byte_s: float = 0.0) -> Outlook:
        """What to expect of a block of this kind."""
        usual = (sum(self._returns) + 1) / (self._num_uses + 2)
        new_returns = sum(self._returns[:_NEW_KINDS])
        new_chance = (new_returns + _PRIOR * usual) / (sum(self._uses[:_NEW_KINDS]) + _PRIOR)
        new_log_gap = sum(self._log_gaps[:_NEW_KINDS]) / new_returns if new_returns else 0.0
        returns = self._returns[kind]
        return Outlook(
            # A use counts when it happens and its return when it comes: after a halving the second may exceed the first
            chance=min(1.0, (returns + _PRIOR * new_chance) / (self._uses[kind] + _PRIOR)),
            gap_s=math.exp((self._log_gaps[kind] + _PRIOR * new_log_gap) / (returns + _PRIOR)),
            new_chance=min(1.0, new_chance),
            new_gap_s=math.exp(new_log_gap),
            horizon_s=self._horizon_s,
            cost_per_byte_s=cost_per_byte_s,
        )
