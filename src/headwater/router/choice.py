"""Which node is asked first, and why: facts in, an order with reasons out. Pure.

A request enters at a prefill or a mixed node, and from a prefill node goes on to a decode node. Where the residency
index has answered, nodes are ordered by the seconds that each is expected to take:

    prefill   (tokens before it + prompt - held) / prefill rate
    decode    (prompt - held here) / pool rate + (requests there + 1) * wanted tokens / decode rate
    mixed     both, and nothing is read from the pool

`held` is what the node holds of the prompt in some tier, or the pool holds, if that is more; `held here` only what is
in a tier of its own. A rate that nobody has measured is taken to be that of the others, so that it has no say. Where
the index is silent there is no such sum, and nodes come round robin.

Invariants, whatever the facts:
- Every node of a role that fits is in the order or among those left out, once, with a reason.
- A node that drains, rests after trouble, or has no room for all of a request is left out. One that failed this
  request before comes last.
- The order does not depend on the order of the facts.
- A node that is at least as good in everything does not come behind (equals take turns).
"""

import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from headwater.core.role import Role
from headwater.disagg.heartbeat import Rates

# Where nobody has measured anything: a middling GPU. What counts is that it is the same for all.
_DEFAULT_RATES: Final = Rates(prefill_tokens_per_s=5_000.0, decode_tokens_per_s=500.0, pool_tokens_per_s=50_000.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What is known of a node now."""

    name: str
    role: Role
    free_slots: int  # that we believe it has
    max_answers: int | None = None  # that one request may ask for; None: it counts requests, whatever they ask for
    num_requests: int = 0  # that it has: ours, or what it said if that is more
    pending_tokens: int = 0  # of our prompts that it has yet to compute
    rates: Rates = field(default_factory=Rates)
    draining: bool = False
    resting: bool = False  # it failed, and is left alone for a while

    def num_slots(self, size: "Size") -> int:
        """What a request takes of its slots."""
        if self.max_answers is None:
            return 1
        return size.num_prompts if self.role is Role.PREFILL else size.num_answers


@dataclass(frozen=True, slots=True)
class Size:
    """How large a request is, in tokens; estimates will do. And how wide: what it takes of a node's slots."""

    prompt: int
    wanted: int
    num_prompts: int = 1  # slots of a prefill node
    num_answers: int = 1  # slots of any other


@dataclass(frozen=True, slots=True)
class Held:
    """What the residency index said: leading tokens of the prompt that nodes hold, and that the pool holds."""

    by_node: Mapping[str, int] = field(default_factory=dict)  # in one tier or another
    local: Mapping[str, int] = field(default_factory=dict)  # in a tier of the node's own, which no pool is
    pool: int = 0
    num_tokens: int | None = None  # of the prompt, where it was counted

    def at(self, node: str) -> int:
        """Tokens that a node need not compute."""
        return max(self.by_node.get(node, 0), self.local.get(node, 0), self.pool)


class How(enum.StrEnum):
    """How an order was found."""

    ESTIMATE = "estimate"  # by prefix, load and rates
    ROUND_ROBIN = "round_robin"  # the index is silent


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node that may be asked."""

    node: str
    role: Role
    reason: str
    seconds: float | None = None  # expected
    num_slots: int = 1  # that it takes there


@dataclass(frozen=True, slots=True)
class NodeChoice:
    """Nodes in the order in which to ask them, and those left out, with the reason."""

    how: How
    candidates: tuple[Candidate, ...]
    left_out: tuple[tuple[str, str], ...]


def choose_entry(
    nodes: Collection[NodeFacts],
    size: Size,
    held: Held | None,
    *,
    turn: int,
    promised: int = 0,
    failed: Collection[str] = (),
) -> NodeChoice:
    """Where a request begins: a prefill or a mixed node. `promised`: slots that requests in prefill will want.

    `held` None: the index is silent. `turn` grows with every choice. `failed`: who failed this request before.
    """
    takers = [one for one in nodes if one.role is Role.DECODE and not (one.draining or one.resting)]
    room = sum(one.free_slots for one in takers) - promised
    fits = any(one.num_slots(size) <= room and _obstacle(one, size) is None for one in takers)
    blocked = "" if fits else "no decode node has room for what it would hand over"
    seconds = _Seconds(nodes, size, held)
    return _order(
        [one for one in nodes if one.role is not Role.DECODE],
        size,
        seconds.entry if held is not None else None,
        blocked=lambda one: blocked if one.role is Role.PREFILL and blocked else None,
        turn=turn,
        failed=failed,
    )


def choose_decode(
    nodes: Collection[NodeFacts], size: Size, held: Held | None, *, turn: int, failed: Collection[str] = ()
) -> NodeChoice:
    """Where a request with a ticket goes on: at a decode node; where none takes it, at a mixed one, from the start."""
    seconds = _Seconds(nodes, size, held)
    first, second = (
        _order(
            [one for one in nodes if one.role is role],
            size,
            estimate if held is not None else None,
            blocked=lambda one: None,
            turn=turn,
            failed=failed,
        )
        for role, estimate in ((Role.DECODE, seconds.decode), (Role.MIXED, seconds.entry))
    )
    return NodeChoice(first.how, first.candidates + second.candidates, first.left_out + second.left_out)


class _Seconds:
    """What each node is expected to take, with the sum in words."""

    def __init__(self, nodes: Collection[NodeFacts], size: Size, held: Held | None) -> None:
        self._size = size
        self._held = held or Held()
        self._usual = {name: _usual(nodes, name) for name in Rates.__slots__}

    def entry(self, one: NodeFacts) -> tuple[float, str]:
        """Of a prefill node, or of a mixed one, which has to generate too."""
        held = min(self._held.at(one.name), self._size.prompt)
        rate = self._rate(one, "prefill_tokens_per_s")
        prefill_s = (one.pending_tokens + self._size.prompt - held) / rate
        before = f"{one.pending_tokens} more before them" if one.pending_tokens else "none before them"
        words = f"has {held} of {self._size.prompt} tokens, {before}, {rate:.0f} tokens a second"
        if one.role is Role.PREFILL:
            return prefill_s, words
        decode_s, share = self._generate(one)
        return prefill_s + decode_s, f"{words}; {share}"

    def decode(self, one: NodeFacts) -> tuple[float, str]:
        """Of a decode node, which has to read first."""
        held = min(self._held.local.get(one.name, 0), self._size.prompt)
        read_s = (self._size.prompt - held) / self._rate(one, "pool_tokens_per_s")
        decode_s, share = self._generate(one)
        return read_s + decode_s, f"holds {held} of {self._size.prompt} tokens; {share}"

    def _generate(self, one: NodeFacts) -> tuple[float, str]:
        rate = self._rate(one, "decode_tokens_per_s")
        words = f"{one.num_requests} requests share {rate:.0f} tokens a second"
        return (one.num_requests + 1) * self._size.wanted / rate, words

    def _rate(self, one: NodeFacts, name: str) -> float:
        return getattr(one.rates, name) or self._usual[name]


def _usual(nodes: Collection[NodeFacts], name: str) -> float:
    """The median of those that have measured."""
    known = [value for one in nodes if (value := getattr(one.rates, name)) is not None]
    return median(known) if known else float(getattr(_DEFAULT_RATES, name))


def _order(
    nodes: Sequence[NodeFacts],
    size: Size,
    seconds: Callable[[NodeFacts], tuple[float, str]] | None,
    *,
    blocked: Callable[[NodeFacts], str | None],
    turn: int,
    failed: Collection[str],
) -> NodeChoice:
    usable, left_out = [], []
    for one in sorted(nodes, key=lambda one: one.name):
        obstacle = _obstacle(one, size) or blocked(one)
        if obstacle is None:
            usable.append(one)
        else:
            left_out.append((one.name, obstacle))
    at = turn % len(usable) if usable else 0
    candidates = []
    for place, one in enumerate(usable[at:] + usable[:at]):
        took, reason = seconds(one) if seconds is not None else (None, "its turn" if not place else "after the others")
        if one.name in failed:
            reason = f"failed this request before; {reason}"
        candidates.append(Candidate(one.name, one.role, reason, took, one.num_slots(size)))
    candidates.sort(key=lambda one: (one.node in failed, one.seconds or 0.0))  # stable: equals take turns
    return NodeChoice(How.ESTIMATE if seconds is not None else How.ROUND_ROBIN, tuple(candidates), tuple(left_out))


def _obstacle(one: NodeFacts, size: Size) -> str | None:
    """Why a node does not take such a request now."""
    if one.draining:
        return "drains"
    if one.resting:
        return "failed, and is left alone for a while"
    wanted = one.num_slots(size)
    if one.max_answers is not None and wanted > one.max_answers:
        return f"gives at most {one.max_answers} answers at once"
    if one.free_slots >= wanted:
        return None
    return f"has room for {one.free_slots} of {wanted} answers" if one.free_slots else "has no room"
