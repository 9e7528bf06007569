"""What a block is worth to its policy: gathers the facts, and counts what happens to blocks with a like past.

The device side of `policy/history.py`: there a holder remembers block by block; here the runs of the tree and the
ghosts do, and only the counts are left to keep. For a policy that does not look back nothing is counted.
"""

from collections.abc import Callable
from typing import Final

from headwater.index.ghosts import Past
from headwater.policy import BlockFacts, Outlook, Policy, Returns, kind_of

_WINDOW: Final = 20  # uses that weigh, for each block that is held: four times what held blocks and ghosts make


class Appraisal:
    """The policy of an index, and what it has to know of the index's traffic."""

    def __init__(self, policy: Policy, *, block_bytes: int, cost: Callable[[int], float] | None) -> None:
        """`cost`: seconds to compute the block at a depth, given those before it; None: blocks cost the same."""
        self.num_blocks = 0
        self._policy = policy
        self._returns = Returns() if policy.looks_back else None
        self._outlooks: dict[int, Outlook] = {}  # by kind; made anew when blocks were used
        self._block_bytes = block_bytes
        self._cost = cost
        self._depths = 0  # of all blocks, summed
        self._now_s = 0.0  # the latest that was heard of

    @property
    def timeless(self) -> bool:
        """Whether a block's priority depends on that block alone."""
        return self._returns is None

    def follow(self, policy: Policy) -> None:
        """Another policy: what was counted stays, if it looks back and so did the last."""
        if policy.looks_back != self._policy.looks_back:
            self._returns = Returns() if policy.looks_back else None
        self._policy = policy
        self._outlooks.clear()

    def came(self, depth: int, num_blocks: int) -> None:
        """New blocks are there, the first at `depth`."""
        self.num_blocks += num_blocks
        self._depths += num_blocks * depth + num_blocks * (num_blocks - 1) // 2

    def used(self, past: Past | None, now: Past, num_blocks: int) -> None:
        """Blocks were used: `past` is what they were until now, if that is known, `now` what they are."""
        self._now_s = max(self._now_s, now.used_s)
        if self._returns is None:
            return
        self._outlooks.clear()
        if past is not None:
            self._returns.returned(kind_of(past.hits, past.turns), now.used_s - past.used_s, blocks=num_blocks)
        window = _WINDOW * max(64, self.num_blocks)
        self._returns.used(kind_of(now.hits, now.turns), window=window, blocks=num_blocks)

    def left(self, past: Past, depth: int) -> None:
        """A block was evicted."""
        if self._returns is not None:
            age_s = self._now_s - past.used_s
            self._returns.evicted(kind_of(past.hits, past.turns), age_s, held=self.num_blocks)
        self.num_blocks -= 1
        self._depths -= depth

    def gone(self, depth: int, num_blocks: int) -> None:
        """Blocks from `depth` on are not there any more because somebody said so: that tells nothing of their like."""
        self.num_blocks -= num_blocks
        self._depths -= num_blocks * depth + num_blocks * (num_blocks - 1) // 2

    def facts(self) -> list[object]:
        """All that was counted, for snapshots."""
        return [
            self.num_blocks,
            self._depths,
            self._now_s,
            self._returns.facts() if self._returns is not None else None,
        ]

    def priority(self, past: Past, previous_s: float | None, depth: int) -> float:
        """What the policy says of a block."""
        facts = BlockFacts(
            used_s=past.used_s,
            hits=past.hits,
            depth=depth,
            num_bytes=self._block_bytes,
            previous_s=previous_s,
            turns=past.turns,
            cost_s=0.0 if self._cost is None else self._cost(depth),
            outlook=self._outlook(past),
        )
        return self._policy.priority(facts)

    def _outlook(self, past: Past) -> Outlook | None:
        if self._returns is None:
            return None
        kind = kind_of(past.hits, past.turns)
        outlook = self._outlooks.get(kind)
        if outlook is None:
            mean_depth = self._depths // max(1, self.num_blocks)
            usual_s = 0.0 if self._cost is None else self._cost(mean_depth)
            outlook = self._returns.outlook(kind, cost_per_byte_s=usual_s / self._block_bytes)
            self._outlooks[kind] = outlook
        return outlook
