"""The state document: what `/admin/state` says, from a snapshot. docs/DASHBOARD.md has it field by field.

Pure: a snapshot in, plain JSON values out. Who takes the snapshot is in `board.py` (a node), `router/board.py` and
`metrics_board.py` (others' metrics). Nothing here is sampled, kept or drawn; series over time are their reader's.

Invariants:
- Every number is finite, every text is of a bounded length, lists have a bounded number of entries: the document stays
  small whatever happens, and any JSON reader takes it.
- Tokens are those of `/metrics`: hits by tier and misses by reason together are the prompts' full blocks. The misses'
  percentages add up to 100, to the last tenth.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from headwater.core.version import __version__
from headwater.metrics import Notice

FORMAT: Final = 1
MAX_SHOWN: Final = 50  # requests in flight
MAX_EVENTS: Final = 30
MAX_NODES: Final = 200
_MAX_FACTS: Final = 12  # of an event
_MAX_TEXT: Final = 300
_MAX_INT: Final = 1 << 53

Numbers = Mapping[str, Mapping[tuple[str, ...], float]]  # as `Metrics.numbers` has them


@dataclass(frozen=True, slots=True, kw_only=True)
class TierFacts:
    """A tier as it is now. What nobody knows is None."""

    name: str
    state: str | None = None  # closed (it is used), half_open, open, off, unused
    why: str | None = None  # it is off
    used_bytes: int | None = None
    limit_bytes: int | None = None
    load_s_per_byte: float | None = None
    save_s_per_byte: float | None = None
    queued_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """A request that is not over."""

    id: str
    phase: str
    age_s: float | None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    generated_tokens: int | None = None
    node: str | None = None  # that works on it, at a router


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What a server knew at one moment."""

    kind: str  # node, router, metrics: of another server
    name: str
    model: str | None
    role: str | None
    ready: bool
    now_s: float  # on the clock on the wall
    numbers: Numbers
    tiers: Sequence[TierFacts] = ()
    brain_failed: str | None = None
    can_revive: bool = False
    engine: Mapping[str, float | None] | None = None
    flights: Sequence[Flight] = ()  # all of them
    fleet: Mapping[str, Any] | None = None
    events: Sequence[Notice] = field(default=())  # oldest first


def document(now: Snapshot) -> dict[str, Any]:
    """The state document."""
    numbers = now.numbers
    hits, misses = _by_label(numbers, "hit_tokens_total"), _by_label(numbers, "miss_tokens_total")
    num_hit, num_missed = sum(hits.values()), sum(misses.values())
    tiers = {tier.name: tier for tier in now.tiers}
    strangers = [name for name in sorted(hits) if name not in tiers]
    shown = sorted(now.flights, key=lambda one: -(one.age_s or 0.0))[:MAX_SHOWN]
    return {
        "format": FORMAT,
        "version": __version__,
        "kind": now.kind,
        "name": text(now.name),
        "model": None if now.model is None else text(now.model),
        "role": now.role,
        "ready": now.ready,
        "now_s": round(now.now_s, 3),
        "hit_ratio": _ratio(num_hit, num_hit + num_missed),
        "hit_tokens": {name: hits.get(name, 0.0) for name in (*tiers, *strangers)},
        "miss_tokens": num_missed,
        "misses": [
            {"reason": reason, "tokens": misses[reason], "percent": tenths / 10}
            for reason, tenths in shares(misses).items()
        ],
        "seconds": {
            "saved": _by_label(numbers, "tier_saved_seconds_total"),
            "lost": _by_label(numbers, "tier_lost_seconds_total"),
            "saved_total": _total(numbers, "saved_seconds_total"),
            "lost_total": _total(numbers, "lost_seconds_total"),
            "waited_total": _total(numbers, "waited_seconds_total"),
        },
        "tiers": [_tier(tier, numbers, can_revive=now.can_revive) for tier in tiers.values()],
        "brain": {"failed": None if now.brain_failed is None else text(now.brain_failed)},
        "can_revive": now.can_revive,
        "engine": None if now.engine is None else {name: number(value) for name, value in now.engine.items()},
        "requests": {
            "in_flight": len(now.flights),
            "phases": dict(sorted(Counter(one.phase for one in now.flights).items())),
            "oldest": [{**asdict(one), "id": text(one.id), "age_s": number(one.age_s)} for one in shown],
            "looked_up": _by_label(numbers, "requests_total"),
            "answered": _by_label(numbers, "router_requests_total"),
        },
        "fleet": now.fleet,
        "events": [_event(one) for one in list(now.events)[: -MAX_EVENTS - 1 : -1]],
    }


def shares(counts: Mapping[str, float]) -> dict[str, int]:
    """What of a thousand each is, the largest first; they add up to a thousand. Without any, nothing."""
    total = sum(counts.values())
    if not 0 < total < math.inf:
        return {}
    exact = {name: 1000 * count / total for name, count in counts.items() if count > 0}
    found = {name: int(share) for name, share in exact.items()}
    by_rest = sorted(exact, key=lambda name: (found[name] - exact[name], name))
    for name in by_rest[: 1000 - sum(found.values())]:
        found[name] += 1
    return {name: found[name] for name in sorted(found, key=lambda name: (-exact[name], name))}


def number(value: float | None) -> float | None:
    """A number as JSON can say it, and no longer than anybody reads it."""
    if value is None or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.6g}") if abs(value) < 1e6 else round(value, 1)


def text(value: object) -> str:
    """A text of a bounded length."""
    said = str(value)
    return said if len(said) <= _MAX_TEXT else said[: _MAX_TEXT - 1] + "…"


def plain(value: object) -> str | float | bool | None:
    """A fact of an event: a number stays one, all else is a text."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and abs(value) > _MAX_INT:  # a browser would round it, or call it infinite
        return text(hex(value))
    if isinstance(value, int | float):
        return number(value)
    return text(value)


def _tier(tier: TierFacts, numbers: Numbers, *, can_revive: bool) -> dict[str, Any]:
    """What is known of a tier, and what was counted of it."""
    jobs: dict[str, float] = {}
    for (of, job, outcome), num in numbers.get("jobs_total", {}).items():
        if of == tier.name:
            jobs[f"{job} {outcome}"] = jobs.get(f"{job} {outcome}", 0) + num
    moved = numbers.get("moved_bytes_total", {})
    dropped = numbers.get("dropped_blocks_total", {})
    return {
        "name": tier.name,
        "state": tier.state,
        "why": None if tier.why is None else text(tier.why),
        "revivable": can_revive and tier.state == "off",
        "used_bytes": tier.used_bytes,
        "limit_bytes": tier.limit_bytes,
        "load_bytes_per_s": _inverse(tier.load_s_per_byte),
        "save_bytes_per_s": _inverse(tier.save_s_per_byte),
        "queued_bytes": tier.queued_bytes,
        "hit_tokens": numbers.get("hit_tokens_total", {}).get((tier.name,), 0),
        "saved_s": number(numbers.get("tier_saved_seconds_total", {}).get((tier.name,), 0.0)),
        "lost_s": number(numbers.get("tier_lost_seconds_total", {}).get((tier.name,), 0.0)),
        "moved_bytes": {of[1]: num for of, num in moved.items() if of[0] == tier.name},
        "evicted_blocks": numbers.get("evicted_blocks_total", {}).get((tier.name,), 0),
        "dropped_blocks": {of[1]: num for of, num in dropped.items() if of[0] == tier.name},
        "jobs": dict(sorted(jobs.items())),
    }


def _event(one: Notice) -> dict[str, Any]:
    facts = list(one.facts.items())[:_MAX_FACTS]
    return {
        "number": one.number,
        "at_s": round(one.at_s, 3),
        "kind": text(one.kind),
        "facts": {text(name): plain(value) for name, value in facts},
    }


def _by_label(numbers: Numbers, family: str) -> dict[str, float]:
    """A family of one label."""
    found = {of[0]: number(value) for of, value in numbers.get(family, {}).items()}
    return {name: value for name, value in sorted(found.items()) if value is not None}


def _total(numbers: Numbers, family: str) -> float:
    return number(sum(numbers.get(family, {}).values())) or 0.0


def _ratio(part: float, whole: float) -> float | None:
    return number(part / whole) if whole > 0 else None


def _inverse(seconds: float | None) -> float | None:
    return number(1 / seconds) if seconds is not None and seconds > 0 else None
