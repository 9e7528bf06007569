"""The node table: who is there, for how long that is believed, how busy each is, and who is left alone for a while.

Pure: told the time, knows no socket. A node is there while its lease runs; it joins, stays and is found again by
heartbeats (`heartbeat.py`), and leaves by one with a lease of 0 or by saying nothing. An answer of its own is a word
too: a node that has so much to do that its heartbeats are late is not taken for dead. What it said of its load is
carried forward with what this router has sent there since.

Invariants:
- All nodes that are there have one identity, layout, block size and model name. Another is refused with a sentence
  (`NodeRefused`); it may come when the last of the others has gone.
- A name belongs to one host while its lease runs, and there to the newest process that used it (`epoch`): a node that
  is started again has its name at once, somebody elsewhere when the lease is over, or was given up.
- A node that drains, by its own word or by ours, is given nothing new; what it has, it finishes.
- A node that failed is given nothing for a while, then one request as a probe (`core/breaker.py`). Silence and broken
  connections count at once, a bad answer only when several follow one another: it may have been the request's fault.
  A connection that did not come in time does not count where the node was heard meanwhile, and silence about one
  request not at once where it just answered another: it is slow, or we are.
"""

import enum
from dataclasses import dataclass, field, replace
from typing import Any, Final
from urllib.parse import urlsplit

from headwater.config.checks import is_loopback
from headwater.core.breaker import Breaker
from headwater.core.errors import InvalidInput
from headwater.core.role import Role
from headwater.disagg.heartbeat import Heartbeat, Rates
from headwater.router.choice import NodeFacts

_FAILURES: Final = 3  # bad answers in a row, until a node is left alone
_WEIGHT: Final = 0.2  # of a new measurement


class NodeRefused(InvalidInput):
    """A node that cannot be one of these. The message says what to change."""


class NameTaken(NodeRefused):
    """Another node has this name, and may still live. It may be free when that one's lease is over."""


class HeartbeatKind(enum.StrEnum):
    """What a heartbeat was."""

    NEW = "new"
    KNOWN = "known"
    LEFT = "left"


@dataclass(slots=True)
class Entry:
    """A node that is there."""

    heartbeat: Heartbeat
    until_s: float
    breaker: Breaker
    since_s: float
    told_to_drain: bool = False
    doubted: bool = False  # who answers there has not proven to be it
    num_running: int = 0  # our requests there
    pending_tokens: int = 0  # of our prompts that it has yet to compute
    refused_until_s: float = 0.0
    lived_s: float = float("-inf")  # when it last proved itself, with an answer or a heartbeat
    measured: Rates = field(default_factory=Rates)  # by this router
    num_taken: int = 0  # slots of ours, less those given back, since its last word on its load

    @property
    def draining(self) -> bool:
        """Whether it takes nothing new."""
        return self.told_to_drain or self.heartbeat.draining

    def facts(self, now_s: float) -> NodeFacts:
        """What is known of it now."""
        free = 0 if now_s < self.refused_until_s else max(0, self.heartbeat.load.free_slots - self.num_taken)
        said, seen = self.heartbeat.rates, self.measured
        return NodeFacts(
            name=self.heartbeat.node,
            role=self.heartbeat.role,
            free_slots=free,
            max_answers=self.heartbeat.max_answers,
            num_requests=max(self.num_running, self.heartbeat.load.running + self.heartbeat.load.waiting),
            pending_tokens=self.pending_tokens,
            rates=Rates(**{one: getattr(said, one) or getattr(seen, one) for one in Rates.__slots__}),
            draining=self.draining,
            resting=not self.breaker.would_allow(now_s),
        )


class NodeSlot:
    """One request at one node. Must be ended once, in any case."""

    def __init__(self, entry: Entry, tokens: int, num_slots: int) -> None:
        self.entry = entry
        self._tokens = tokens
        self._num_slots = num_slots
        entry.num_running += 1
        entry.num_taken += num_slots
        entry.pending_tokens += tokens

    @property
    def name(self) -> str:
        """Whom it is to."""
        return self.entry.heartbeat.node

    def computed(self) -> None:
        """Its prompt is computed: whoever comes next need not wait for that. Idempotent."""
        self.entry.pending_tokens -= self._tokens
        self._tokens = 0

    def end(self) -> None:
        """Give its slots back."""
        self.computed()
        self.entry.num_running -= 1
        self.entry.num_taken -= self._num_slots


class NodeTable:
    """The nodes. For one thread."""

    def __init__(self, *, pause_s: float = 1.0, max_pause_s: float = 10.0, refusal_s: float = 0.25) -> None:
        """A node that failed is left alone for `pause_s`, up to `max_pause_s`; one that refused for `refusal_s`."""
        self._entries: dict[str, Entry] = {}
        self._drained: dict[str, int] = {}  # by name, the process that was told to, also while its lease has run out
        self._pause_s = pause_s
        self._max_pause_s = max_pause_s
        self._refusal_s = refusal_s

    def heard(self, heartbeat: Heartbeat, now_s: float) -> HeartbeatKind:
        """Take in a heartbeat. Raises NodeRefused."""
        self.expire(now_s)
        known = self._entries.get(heartbeat.node)
        if known is not None:
            self._require_name(known.heartbeat, heartbeat)
        if heartbeat.lease_s == 0:
            self._entries.pop(heartbeat.node, None)
            return HeartbeatKind.LEFT
        for other in self._entries.values():
            if other is not known:
                _require_fit(other.heartbeat, heartbeat)
        if known is not None and known.heartbeat.epoch == heartbeat.epoch:
            known.heartbeat, known.until_s, known.num_taken = heartbeat, now_s + heartbeat.lease_s, 0
            known.lived_s = now_s
            return HeartbeatKind.KNOWN
        breaker = Breaker(failures=_FAILURES, pause_s=self._pause_s, max_pause_s=self._max_pause_s)
        entry = Entry(heartbeat, now_s + heartbeat.lease_s, breaker, now_s)
        entry.told_to_drain = self._drained.get(heartbeat.node) == heartbeat.epoch
        self._entries[heartbeat.node] = entry
        return HeartbeatKind.NEW

    @staticmethod
    def _require_name(known: Heartbeat, heartbeat: Heartbeat) -> None:
        if heartbeat.epoch < known.epoch:  # or its clock went back, and its former self has gone
            raise NameTaken(f"a newer process is called {heartbeat.node}: give this one another name, or end it")
        if heartbeat.epoch > known.epoch and _host(heartbeat.url) != _host(known.url):
            raise NameTaken(
                f"{heartbeat.node} is the name of a node at {known.url}, and not of one at {heartbeat.url}: give each "
                "node a name of its own, or end that one first"
            )
        if heartbeat.epoch == known.epoch and (heartbeat.url, heartbeat.role) != (known.url, known.role):
            raise NodeRefused(
                f"{heartbeat.node} is the {known.role} node at {known.url}, and not the {heartbeat.role} node at "
                f"{heartbeat.url}: give each node a name of its own"
            )

    def expire(self, now_s: float) -> list[str]:
        """Forget who was silent for its lease, and say who that was."""
        gone = [name for name, one in self._entries.items() if one.until_s <= now_s]
        for name in gone:
            del self._entries[name]
        return gone

    def get(self, name: str) -> Entry | None:
        """A node that is there, as of the last `heard` or `expire`."""
        return self._entries.get(name)

    def entries(self) -> list[Entry]:
        """All that are there, by name."""
        return [self._entries[name] for name in sorted(self._entries)]

    def facts(self, now_s: float) -> list[NodeFacts]:
        """What is known of each that is there now."""
        self.expire(now_s)
        return [one.facts(now_s) for one in self.entries()]

    def drain(self, name: str, *, draining: bool) -> Entry:
        """Give a node nothing new, or give it something again. Raises InvalidInput if it is not there."""
        entry = self._entries.get(name)
        if entry is None:
            raise InvalidInput(f"no node is called {name!r:.80}")
        entry.told_to_drain = draining
        if draining:
            self._drained[name] = entry.heartbeat.epoch
        else:
            self._drained.pop(name, None)
        return entry

    def take_slot(self, name: str, *, tokens: int, now_s: float, num_slots: int = 1) -> NodeSlot | None:
        """Send a request there; None if it went, or somebody else is probing it."""
        entry = self._entries.get(name)
        if entry is None or not entry.breaker.allows(now_s):
            return None
        return NodeSlot(entry, tokens, num_slots)

    # --- what became of a request at a node ---------------------------------------------------------------------------

    def lives(self, slot: NodeSlot, now_s: float) -> None:
        """It has proven itself with an answer, whatever that was: as good as a heartbeat, which may be late."""
        slot.entry.until_s = max(slot.entry.until_s, now_s + slot.entry.heartbeat.lease_s)
        slot.entry.lived_s = now_s

    def went_well(self, slot: NodeSlot) -> None:
        """It answered."""
        slot.entry.breaker.succeeded()

    def refused(self, slot: NodeSlot, now_s: float) -> None:
        """It has no room. That is an answer: it lives."""
        slot.entry.breaker.succeeded()
        slot.entry.refused_until_s = now_s + self._refusal_s

    def failed(self, slot: NodeSlot, now_s: float, *, at_once: bool) -> bool:
        """It failed; `at_once` leaves it alone from now on. True if it is left alone from now on."""
        failed = slot.entry.breaker.failed
        return any(failed(now_s) for _ in range(_FAILURES if at_once else 1))

    def unproven(self, slot: NodeSlot, now_s: float) -> None:
        """Nobody waited for its answer."""
        slot.entry.breaker.unproven(now_s)

    def measured(self, slot: NodeSlot, **rates: float) -> None:
        """Tokens a second that this router saw, by name of the rate."""
        old = slot.entry.measured
        for name, rate in rates.items():
            before = getattr(old, name) or rate
            old = replace(old, **{name: before + _WEIGHT * (rate - before)})
        slot.entry.measured = old

    # --- what is told -------------------------------------------------------------------------------------------------

    def models(self) -> dict[str, tuple[int | None, float]]:
        """By name: tokens that every node takes, and since when it is served."""
        found: dict[str, tuple[int | None, float]] = {}
        for one in self._entries.values():
            limit, since_s = found.get(one.heartbeat.model, (None, one.since_s))
            both = [most for most in (limit, one.heartbeat.max_model_len) if most is not None]
            found[one.heartbeat.model] = (min(both, default=None), min(since_s, one.since_s))
        return found

    def max_answers(self) -> int | None:
        """Answers to one request that some node here could give; None: nobody knows."""
        said = [one.heartbeat.max_answers for one in self._entries.values() if one.heartbeat.role is not Role.PREFILL]
        known = [most for most in said if most is not None]
        return max(known, default=None) if len(known) == len(said) else None

    def blocks(self) -> tuple[bytes, int] | None:
        """The identity of all nodes and their blocks' tokens; None where there are none. From any thread."""
        some = list(self._entries.values())[:1]
        return (bytes.fromhex(some[0].heartbeat.identity), some[0].heartbeat.block_tokens) if some else None

    def documents(self, now_s: float) -> list[dict[str, Any]]:
        """All that is known of each, for people."""
        self.expire(now_s)
        return [
            {
                **one.heartbeat.document(),
                "lease_left_s": round(one.until_s - now_s, 3),
                "draining": one.draining,
                "told_to_drain": one.told_to_drain,
                "doubted": one.doubted,
                "breaker": one.breaker.state.name.lower(),
                "requests_of_this_router": one.num_running,
                "pending_tokens": one.pending_tokens,
                "believed_free_slots": one.facts(now_s).free_slots,
            }
            for one in self.entries()
        ]

    def counts(self, now_s: float) -> dict[tuple[Role, str], int]:
        """How many nodes of each role can be used, drain, rest or are full."""
        found = {(role, state): 0 for role in Role for state in ("usable", "draining", "resting", "full")}
        for one in self.facts(now_s):
            state = "draining" if one.draining else "resting" if one.resting else "usable" if one.free_slots else "full"
            found[one.role, state] += 1
        return found


def _host(url: str) -> str:
    host = urlsplit(url).hostname or ""
    return "localhost" if is_loopback(host) else host


def _require_fit(here: Heartbeat, heartbeat: Heartbeat) -> None:
    """Refuse a node whose KV or whose answers would not be those of the nodes that are here."""
    if heartbeat.block_tokens != here.block_tokens:
        raise NodeRefused(
            f"{heartbeat.node} has blocks of {heartbeat.block_tokens} tokens and {here.node}, which is here, of "
            f"{here.block_tokens}: start all nodes with the same block size"
        )
    if heartbeat.layout != here.layout:
        raise NodeRefused(
            f"{heartbeat.node} has the KV layout {heartbeat.layout[:12]} and {here.node}, which is here, "
            f"{here.layout[:12]}: start all nodes with the same model and the same KV dtype"
        )
    if heartbeat.identity != here.identity:
        raise NodeRefused(
            f"{heartbeat.node} has the cache identity {heartbeat.identity[:12]} and {here.node}, which is here, "
            f"{here.identity[:12]}: start all nodes with the same weights, configuration, adapter and quantisation"
        )
    if heartbeat.model != here.model:
        raise NodeRefused(
            f"{heartbeat.node} calls its model {heartbeat.model!r} and {here.node}, which is here, {here.model!r}: "
            "start all nodes with the same model name"
        )
