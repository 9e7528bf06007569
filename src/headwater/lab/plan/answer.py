"""A plan in words, and as plain JSON values. Says where each figure it began with came from."""

from typing import Any, Final

from headwater.lab.plan.paces import ASSUMED, TIERS
from headwater.lab.plan.search import HOURS_A_MONTH, Amounts, Plan, Row

NOTES: Final = {
    "hit_ratio": "hit blocks / requested blocks, by the brain and policy that run in production, in virtual time",
    "saved_s": "computing that hits made unnecessary, less the waiting for loads, over the whole trace",
    "gained": f"money a month, beyond the device alone: seconds saved, as GPUs free all the time, {HOURS_A_MONTH:g} "
    "hours of them; true where what is freed is used or not rented",
    "knee_gib": "the size from which on more of this tier, alone, costs more than it brings; null: the largest tried "
    "is the best",
    "halves": "the best choice on the first and on the second half of the trace, each from an empty cache",
    "time": "requests come at their timestamps, compute beside each other in steps, and output takes no blocks",
    "blocks": "a prompt's last block that is not full is not counted: engines do not name it",
    "pool": "the traffic of one engine: what others bring into a shared pool, and take from it, is not in a trace",
}
_HOUR_S: Final = 3_000.0  # nearly: many traces are cut at the hour
_NAMES: Final = {"host": "host memory", "disk": "disk", "pool": "shared pool"}


def document(plan: Plan) -> dict[str, Any]:
    """All of it."""
    options, found = plan.options, plan.survey
    together = [row for row in plan.rows.values() if sum(map(bool, row.amounts)) > 1]
    return {
        "recommendation": sentence(plan),
        "best": row_document(plan.best),
        "agree": agree(plan),
        "halves": [row_document(row) for row in plan.halves],
        "device_alone": row_document(plan.device),
        "alone": {tier: [row_document(row) for row in plan.curve(tier)] for tier in plan.tried},
        "knee_gib": {tier: plan.knee(tier) for tier in plan.tried},
        "remarks": remarks(plan),
        "together": [row_document(row) for row in together],
        "trace": {
            "name": plan.trace.name,
            "num_requests": found.num_requests,
            "num_blocks": found.num_blocks,
            "span_s": found.span_s,
            "unbounded_hit_ratio": round(found.unbounded_hit_ratio, 6),
            "unique_gib": round(found.num_unique_blocks * plan.trace.block_tokens * options.token_bytes / 2**30, 3),
        },
        "options": {
            "policy": options.policy,
            "block_tokens": plan.trace.block_tokens,
            "token_bytes": options.token_bytes,
            "device_gib": options.device_gib,
            "gpu_hour": options.prices.gpu_hour,
            "gib_month": dict(options.prices.gib_month),
            "compute_base_s": options.computing.base_s,
            "compute_slope_s": options.computing.slope_s,
            "compute_source": options.computing_source,
            "paces": {tier: {"gbs": pace.gbs, "source": pace.source} for tier, pace in options.paces.items()},
        },
        "notes": dict(NOTES),
    }


def row_document(row: Row) -> dict[str, Any]:
    """One choice of sizes."""
    outcome = row.outcome
    return {
        **{f"{tier}_gib": size for tier, size in zip(TIERS, row.amounts, strict=True)},
        "hit_ratio": round(outcome.hit_ratio, 6),
        "hit_ratios": {
            tier.name: round(tier.hit_blocks / max(1, outcome.requested_blocks), 6) for tier in outcome.tiers
        },
        "missed_blocks": dict(outcome.missed_blocks),
        "saved_s": round(outcome.saved_s, 3),
        "waited_s": round(outcome.waited_s, 3),
        "cut_requests": outcome.cut_requests,
        "gained": round(row.gained, 2),
        "spent": round(row.spent, 2),
        "net": round(row.net, 2),
    }


def agree(plan: Plan) -> bool | None:
    """Whether each half of the trace, by itself, says that the best choice pays. None: they were not asked."""
    return all(row.net > 0 for row in plan.halves) if plan.halves else None


def sentence(plan: Plan) -> str:
    """What to do."""
    best = plan.best
    if not any(best.amounts):
        closest = max((row for row in plan.rows.values() if any(row.amounts)), key=lambda row: row.net, default=None)
        if closest is None:
            return "No size was tried."
        return (
            f"Buy nothing at these prices: the closest, {sizes(closest.amounts)}, "
            f"would bring {_money(closest.gained)} a month and cost {_money(closest.spent)}."
        )
    hits = f"{plan.device.outcome.hit_ratio:.1%} to {best.outcome.hit_ratio:.1%} of blocks hit"
    money = f"{_money(best.gained)} a month gained for {_money(best.spent)}, {_money(best.net)} kept"
    return f"Take {sizes(best.amounts)}: {hits}, {money}, by {_span(plan)} of trace; {_how_sure(plan)}."


def remarks(plan: Plan) -> list[str]:
    """What to know before believing it: where more does not pay, what was assumed, what was cut."""
    options = plan.options
    said = [_knee(plan, tier) for tier in plan.tried]
    assumed = [
        f"{tier} {options.paces[tier].gbs:g} GB/s" for tier in plan.tried if options.paces[tier].source == ASSUMED
    ]
    if options.computing_source == ASSUMED:
        assumed.append(f"what an 8B model takes on an H200, with {options.token_bytes >> 10} KiB of KV a token")
    if assumed:
        said.append(f"assumed, not measured here: {', '.join(assumed)}")
    cut = plan.device.outcome.cut_requests
    if cut:
        said.append(f"{cut:,} requests are longer than the device and were cut; what was cut off counts as missed")
    if plan.survey.span_s < _HOUR_S:
        said.append(f"{_span(plan)} of trace say little about a month")
    return said


def _knee(plan: Plan, tier: str) -> str:
    size, largest = plan.knee(tier), plan.curve(tier)[-1].amounts[TIERS.index(tier)]
    if size is None:
        return f"{_NAMES[tier]} alone pays up to {largest:,g} GiB, the largest that was tried"
    if not size:
        return f"{_NAMES[tier]} alone does not pay"
    return f"{_NAMES[tier]} alone: more than {size:,g} GiB costs more than it brings"


def _span(plan: Plan) -> str:
    seconds = plan.survey.span_s
    for unit, name in ((86_400, "days"), (3_600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.3g} seconds"


def sizes(amounts: Amounts) -> str:
    """Sizes for people."""
    named = [f"{size:,g} GiB of {_NAMES[tier]}" for tier, size in zip(TIERS, amounts, strict=True) if size]
    return " and ".join(filter(None, [", ".join(named[:-1]), *named[-1:]])) or "the device alone"


def _how_sure(plan: Plan) -> str:
    if not plan.halves:
        return "the trace is too short to ask its halves"
    low, high = sorted(row.net for row in plan.halves)
    verdict = "both halves of the trace agree" if agree(plan) else "the halves of the trace do not agree"
    return f"{verdict} ({_money(low)} and {_money(high)} kept)"


def _money(amount: float) -> str:
    return f"{amount:,.0f}" if abs(amount) >= 10 else f"{amount:,.2f}"
