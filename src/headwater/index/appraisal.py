"""What a block is worth to its policy: gathers the facts, and counts what happens to blocks with a like past.

The device side of `policy/history.py`: there a holder remembers block by block; here the runs of the tree and the
ghosts do, and only the counts are left to keep. For a policy that does not look back nothing is counted.
"""

from collections.abc import Callable
from typing import Final

from headwater.index.ghosts import Past
from headwater.index.runs import Run
from headwater.policy import BlockFacts, Outlook, Policy, Returns, Sessions, kind_of

_WINDOW: Final = 20  # uses that weigh, for each block that is held: four times what held blocks and ghosts make
ENDED: Final = 6  # the way in which a session leaves all behind when it says that it is over: believed at its word
_DOUBT: Final = 20.0  # blocks that sessions left behind, before it is believed that such ones do not come back


class Appraisal:
    """The policy of an index, and what it has to know of the index's traffic."""

    def __init__(
        self, policy: Policy, sessions: Sessions | None, *, block_bytes: int, cost: Callable[[int], float] | None
    ) -> None:
        """`cost`: seconds to compute the block at a depth, given those before it; None: blocks cost the same.

        `sessions`: for a policy that goes by them.
        """
        self.sessions = sessions
        self.num_blocks = 0
        self._policy = policy
        self._returns = Returns() if policy.looks_back else None
        self._outlooks: dict[int, Outlook] = {}  # by kind; made anew when blocks were used
        self._block_bytes = block_bytes
        self._cost = cost
        self._depths = 0  # of all blocks, summed
        self._now_s = 0.0  # the latest that was heard of
        self._left: dict[int, float] = {}  # blocks that sessions left behind, by the way in which they did
        self._back: dict[int, float] = {}  # and those that came back nonetheless

    @property
    def timeless(self) -> bool:
        """Whether a block's priority depends on that block alone."""
        return self._returns is None

    def follow(self, policy: Policy, sessions: Sessions) -> None:
        """Another policy: what was counted stays, if it looks back and so did the last.

        `sessions`: those of the last one, if it went by them; for a policy that does.
        """
        self.sessions = sessions if policy.by_sessions else None
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
            if past.left:
                self._back[past.left] = self._back.get(past.left, 0.0) + num_blocks
            self._returns.returned(kind_of(past.hits, past.turns), now.used_s - past.used_s, blocks=num_blocks)
        window = _WINDOW * max(64, self.num_blocks)
        self._returns.used(kind_of(now.hits, now.turns), window=window, blocks=num_blocks)

    def left_behind(self, way: int, num_blocks: int) -> None:
        """The session of these blocks went on elsewhere. The last traffic weighs most."""
        self._left[way] = self._left.get(way, 0.0) + num_blocks
        if self._left[way] > _WINDOW * max(64, self.num_blocks):
            self._left[way], self._back[way] = self._left[way] / 2, self._back.get(way, 0.0) / 2

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
            *([] if self.sessions is None else [self.sessions.facts(), self._left, self._back]),
        ]

    def priority(self, run: Run, depth: int) -> float:
        """What the policy says of a block of a run."""
        return self._policy.priority(self._facts(run, depth))

    def due_s(self, run: Run) -> float | None:
        """When a run is expected to be used again; None: nobody can say."""
        return None if self.sessions is None else self._policy.due_s(self._facts(run, run.start))

    def leaves_before(self, due_s: float, priority: float) -> bool:
        """Whether the run that is due last leaves before the one with the lowest priority, now."""
        usual_s = 1.0 if self.sessions is None else self.sessions.usual_s
        return self._policy.leaves_before(due_s, priority, self._now_s, usual_s=usual_s)

    def _facts(self, run: Run, depth: int) -> BlockFacts:
        past, sessions = run.past, self.sessions
        return BlockFacts(
            used_s=past.used_s,
            hits=past.hits,
            depth=depth,
            num_bytes=self._block_bytes,
            previous_s=run.previous_s,
            turns=past.turns,
            cost_s=0.0 if self._cost is None else self._cost(depth),
            outlook=self._outlook(past),
            gap_s=sessions.gap_s(run.session) if sessions is not None and run.session else None,
            spread=0.0 if sessions is None else sessions.spread,
            wished_s=run.wished_s or None,
            left_chance=self._left_chance(past.left) if past.left else None,
        )

    def _left_chance(self, way: int) -> float:
        left, back = self._left.get(way, 0.0), self._back.get(way, 0.0)
        return min(1.0, (back + _DOUBT * (way != ENDED)) / (left + _DOUBT))

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
