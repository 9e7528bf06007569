"""Value: chance of reuse x cost to recompute / bytes, per second that one has to wait for the reuse.

A block with chance p of another use, which typically takes g seconds to come, and which waited a seconds already, is
worth

    p x cost / bytes / (g + a)                                                                                      (1)

The sum in the denominator says how a wait bears on hope: little is lost until the usual gap is over, then hope
halves whenever the wait doubles. 1 / (g + a) is the hazard of a log-logistic gap with median g; that p itself sinks
while a block waits is left out. (With it the worth falls as 1 / a^2. On the public trace that was better by .003 in the
largest cache that we tried, and worse in the three smaller ones.)

Ranks by (1) cross as blocks age, and a holder keeps one number. So the number is not the worth but the moment at which
it is used up: a new block, never used again, leaves at the age of the holder's `horizon_s`; whatever is worth as much
as that one is then has come to its end as well. Solved for the age:

    stay = (p x cost / bytes) / (p_new x usual cost / byte) x (g_new + horizon) - g                                 (2)
    priority = used_s + stay - horizon, at most used_s + 4 x (g_new + horizon)

The number of the average new block is thus its last use, as in LRU; others lie ahead of it or behind it by what their
past is worth. Where the past tells nothing (all p and g are equal), this *is* LRU.

The scale of time is the workload's: p, g and the horizon are measured by the holder on its own traffic (`Returns`), and
a workload in which returning blocks return no more than new ones is not bent into one in which they do. What is not
measured but chosen: the shape of (1), the mean by which gaps are summed up, what counts as a like past, and the limit.
They were chosen by comparison on one public trace and on synthetic ones.

The limit is there because a number is not revised when the workload changes: what slow traffic earned must not bind the
space of the fast traffic that follows for long.

Not here: any state, and any knowledge of the forest (that only leaves leave is the holder's). Without an outlook it is
LRU. Without a cost, or a usual cost to compare with, blocks cost the same per byte. For equal outlooks: a later use, a
higher cost, a greater chance never lowers the number; more bytes, a longer gap never raise it.
"""

from typing import ClassVar, Final

from headwater.policy.base import BlockFacts, Outlook, Policy

_FOREVER_S: Final = 2.0**33  # 272 years; a float tells microseconds apart there. Keeps every number finite
_MOST_ROUNDS: Final = 4.0  # of a new block's wait and stay, that any block may outlast it: see above
_LEAST: Final = 2.0**-20  # a chance, or a ratio of costs, below one in a million is not measured but noise


class Value(Policy):
    """The moment at which a block's chance of reuse, times cost over bytes, is no longer worth its place."""

    name: ClassVar[str] = "value"
    looks_back: ClassVar[bool] = True

    def priority(self, facts: BlockFacts) -> float:
        """The last use, and how much longer than a new block this one may stay."""
        outlook = facts.outlook
        if outlook is None:
            return facts.used_s
        horizon = _between(0.0, outlook.horizon_s, _FOREVER_S)
        gap, new_gap = _between(0.0, outlook.gap_s, _FOREVER_S), _between(0.0, outlook.new_gap_s, _FOREVER_S)
        chance = _between(0.0, outlook.chance, 1.0) / _between(_LEAST, outlook.new_chance, 1.0)
        round_s = new_gap + horizon
        stay = chance * _cost_ratio(facts, outlook) * round_s - gap
        return facts.used_s + _between(-_FOREVER_S, min(stay - horizon, _MOST_ROUNDS * round_s), _FOREVER_S)


def _cost_ratio(facts: BlockFacts, outlook: Outlook) -> float:
    """What a byte of the block costs to recompute, against the holder's usual byte; 1 where either is not known."""
    if facts.cost_s <= 0 or outlook.cost_per_byte_s <= 0:
        return 1.0
    return _between(_LEAST, facts.cost_s / max(1, facts.num_bytes) / outlook.cost_per_byte_s, 1 / _LEAST)


def _between(least: float, number: float, most: float) -> float:
    return min(max(least, number), most)
