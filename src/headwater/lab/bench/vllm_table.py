"""The arithmetic of `bench vllm` where contenders come one after another: medians with spread, ratios, a table.

Measures nothing. A summary is flat, by name: each figure has a median, the lowest and the highest value. A figure that
was not taken is not there, and no ratio is made of it.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

Summary = Mapping[str, Any]
_MORE_IS_BETTER: Final = "tokens_per_s"
_NO_RATIO: Final = ("spare_s",)
_KEPT: Final = ("start_s", "engine_start_s", "first_ms", "spare_s")


def summary_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """A contender's figures: name to (median, lowest, highest), and facts as they are."""
    figures: dict[str, Any] = {name: _figure([found[name]]) for name in _KEPT if name in found}
    for num_tokens, row in found.get("lengths", {}).items():
        for what in ("cold_ms", "local_ms", "rested_ms", "hit_ms"):
            if row[what]:
                figures[f"{num_tokens}_{what}"] = _figure(row[what])
    for num, row in found.get("crowds", {}).items():
        if row["cold_s"] is not None:
            figures[f"crowd_{num}_cold_s"] = _figure([row["cold_s"]])
        if row["s"]:
            figures[f"crowd_{num}_s"] = _figure(row["s"])
            figures[f"crowd_{num}_share"] = _figure(row["share"])
    for what, row in found.get("decode", {}).items():
        for at in ("p50_ms", "p99_ms", "mean_ms"):
            if at in row:
                figures[f"decode_{what}_{at}"] = _figure([row[at]])
        if what == "hits":
            figures["decode_hits_share"] = _figure([row["external_share"]])
    for what, values in found.get("fresh", {}).items():
        if values:
            figures[f"fresh_{what}"] = _figure(values)
    facts = {name: found[name] for name in ("about", "left_out", "num_unequal") if name in found}
    partial = {size: row["num_partial"] for size, row in found.get("lengths", {}).items() if row["num_partial"]}
    return {"figures": figures, **facts, "partial_hits": partial}


def ratios_of(summaries: Mapping[str, Summary], *, ours: str, plain: str) -> dict[str, dict[str, float]]:
    """Ours to vLLM alone, and to the better of the others; a hit's cost above that side's own local hit, too."""
    if ours not in summaries:
        return {}
    mine, base = _medians(summaries[ours]), _medians(summaries[plain]) if plain in summaries else {}
    peers = [_medians(one) for name, one in summaries.items() if name != plain and not name.startswith(ours)]
    found: dict[str, dict[str, float]] = {}
    for name, value in mine.items():
        if name in _NO_RATIO or name.endswith("share"):
            continue
        row = {}
        if name.startswith("decode_"):
            at = "_".join(name.split("_")[2:])
            for what in ("alone", "local"):  # nobody beside them; others beside them whose KV vLLM has itself
                if base.get(f"decode_{what}_{at}"):
                    row[f"to_plain_{what}"] = _rounded(value / base[f"decode_{what}_{at}"])
        if base.get(name):
            row["to_plain"] = _rounded(value / base[name])
        others = [peer[name] for peer in peers if peer.get(name)]
        if others:
            best = max(others) if name.endswith(_MORE_IS_BETTER) else min(others)
            row["to_better_peer"] = _rounded(value / best)
        if name.endswith("_hit_ms"):
            row |= _hit_ratios(name.removesuffix("_hit_ms"), mine, base, peers)
        if row:
            found[name] = row
    return found


def _hit_ratios(
    num_tokens: str, mine: Mapping[str, float], base: Mapping[str, float], peers: Sequence[Mapping[str, float]]
) -> dict[str, float]:
    """Of a length's hits: how much faster than computing, and what they cost above a local hit of vLLM alone."""
    hit, local = f"{num_tokens}_hit_ms", base.get(f"{num_tokens}_local_ms")
    row = {}
    if f"{num_tokens}_cold_ms" in base:
        row["faster_than_cold"] = _rounded(base[f"{num_tokens}_cold_ms"] / mine[hit])
    if local is not None:
        row["cost_ms"] = _rounded(mine[hit] - local)
        costs = [peer[hit] - local for peer in peers if hit in peer]
        if costs:
            row["better_peer_cost_ms"] = _rounded(min(costs))
    return row


def table_of(summaries: Mapping[str, Summary]) -> list[list[str]]:
    """Rows of text, the first with the contenders' names: a median, and the lowest and highest value in brackets."""
    names = list(summaries)
    rows = list(dict.fromkeys(figure for one in summaries.values() for figure in one["figures"]))
    cells = [[row, *(_cell(summaries[name]["figures"].get(row)) for name in names)] for row in rows]
    return [["figure", *names], *cells]


def _cell(figure: Mapping[str, float] | None) -> str:
    if figure is None:
        return "-"
    spread = f" [{figure['low']:g}, {figure['high']:g}]" if figure["num"] > 1 else ""
    return f"{figure['median']:g}{spread}"


def _figure(values: Sequence[float]) -> dict[str, float]:
    return {
        "median": _rounded(statistics.median(values)),
        "low": _rounded(min(values)),
        "high": _rounded(max(values)),
        "num": len(values),
    }


def _medians(summary: Summary) -> dict[str, float]:
    return {name: figure["median"] for name, figure in summary["figures"].items()}


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
