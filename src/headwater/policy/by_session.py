"""Session: what a client's next turn is expected to need stays; what it left behind goes first.

The number of a session's block is its last use, as in LRU; beside it there is a moment at which its next use is
expected: its last use, and the session's learned gap. Who is waited for longest leaves: of the block with the lowest
number (it was idle long) and the one that is due last, that one which has the longer wait before it, an idle second
being taken for `_IDLE` seconds to come, and for more the longer it was. So where the sessions that are at work do not
all fit, those stay that come back soon, instead of each driving out the one whose turn is next, as by LRU. (Between two
blocks, that is to evict by the expected wait: the time to go until a block is due, or from then on a multiple of how
long it was idle, whichever is more.)

How much an expectation is worth follows from how expectations fared (`spread`): gaps of a lognormal law are most
likely to end, per second, not at the median but before it, the earlier the wider they are. Where they are all over the
place the moment moves to the last use, and nothing but the number is left.

A block that its session has left behind (it went on from an earlier block, to somewhere new) goes before all others, if
next to none of those left behind in the same way was seen to come back.

Blocks of no session, or of several (a shared system prompt), have the number of `value`: the number of its average new
block is the last use as well. Without sessions this *is* `value`.

`_IDLE`, `_FADES` and the factors of the gap were chosen by comparison on one public trace of agents and on synthetic
ones; from half to twice as much they change little.
"""

import math
from typing import ClassVar, Final

from headwater.policy.base import BlockFacts
from headwater.policy.value import Value

_IDLE: Final = 2.0
_FADES: Final = 4.0  # usual gaps of idleness, after which a second of it weighs twice as much: it may be over
_MOST_GAPS: Final = 1.5  # after the last use, that a block is due at the latest
_OVER: Final = 0.1  # of what was left behind, that comes back nonetheless: with less, nobody waits for it
MOST_KEPT_S: Final = 86_400.0  # that a wish counts for
_BEHIND_S: Final = 2.0**32  # 136 years: how much earlier than all others what was left behind goes


class BySession(Value):
    """The longest expected wait leaves first."""

    name: ClassVar[str] = "session"
    by_sessions: ClassVar[bool] = True

    def priority(self, facts: BlockFacts) -> float:
        """The last use of a session's block, the number of `value` for others; far lower for what was left behind.

        What is wished for counts as used at the end of that time.
        """
        number = facts.used_s if facts.gap_s is not None else super().priority(facts)
        if _is_over(facts):
            return number - _BEHIND_S
        return number if facts.wished_s is None else max(number, min(facts.wished_s, facts.used_s + MOST_KEPT_S))

    def due_s(self, facts: BlockFacts) -> float | None:
        """The last use, and the gap as far as gaps are believed."""
        if facts.gap_s is None or facts.wished_s is not None or _is_over(facts):
            return None
        return facts.used_s + facts.gap_s * min(_MOST_GAPS, 2 * _MOST_GAPS * math.exp(-(facts.spread**2) / 2))

    def leaves_before(self, due_s: float, priority: float, now_s: float, *, usual_s: float) -> bool:
        """Whether there is longer to wait for it than for the block of the lowest number."""
        idle_s = min(max(0.0, now_s - priority), _BEHIND_S)
        return due_s - now_s > _IDLE * idle_s * (1 + idle_s / (_FADES * usual_s))


def _is_over(facts: BlockFacts) -> bool:
    """Whether its session left a block behind, and such ones do not come back."""
    return facts.left_chance is not None and facts.left_chance < _OVER
