"""Tables of what was measured: benchmarks, contenders, copies, pools, replays. The rest is in `draw.py`."""

from typing import TYPE_CHECKING

from rich.text import Text

from headwater.lab.bench.report import BenchReport

if TYPE_CHECKING:
    from headwater.lab.replay.sweep import Sweep
from headwater.lab.draw import new_table, output, size


def report(result: BenchReport) -> None:
    """Draw a benchmark's result."""
    document = result.document()
    table = new_table("figure", "median", "lowest", "highest", text=1)
    table.add_column("what it is")
    for name in result.results:
        value = document[name]
        taken = document["samples"].get(name, ())
        spread = (f"{min(taken):g}", f"{max(taken):g}") if taken else ("", "")
        note = document["notes"].get(name, "")
        table.add_row(name, f"{value:g}" if isinstance(value, float) else str(value), *spread, note)
    machine = document["machine"]
    table.caption = f"{machine['cpu']}, {machine['num_cores']} cores, Python {machine['python']}, {document['date']}"
    output().print(table)
    if "skipped" in document["notes"]:
        output().print(Text(f"skipped: {document['notes']['skipped']}"), style="yellow")


def contenders(result: BenchReport) -> None:
    """Draw what `headwater bench vllm` found of contenders that came one after another, and ours beside the others."""
    head, *rows = result.results["table"]
    table = new_table(*head, text=1)
    for name in ("to plain", "to better peer"):
        table.add_column(name, justify="right")
    for row in rows:
        ratio = result.results["ratios"].get(row[0], {})
        sides = (ratio.get(name) for name in ("to_plain", "to_better_peer"))
        table.add_row(*row, *(f"{side:g}" if side is not None else "" for side in sides))
    table.caption = (
        "medians [lowest, highest]; the last two columns: ours to vLLM alone, and to the better of the others"
    )
    output().print(table)
    for name, why in result.results["absent"].items():
        output().print(Text(f"{name} is not there: {why}"), style="yellow", soft_wrap=True)


def copies(result: BenchReport) -> None:
    """Draw what `headwater bench copy` found: a line per layout and count, then the whole way."""
    names = ("d2h_ratio", "h2d_ratio", "both_ratio", "d2h_ratio_plain", "h2d_ratio_plain", "gemm_slowdown", "submit_ms")
    table = new_table("layout", "blocks", "size", *(name.replace("_", " ") for name in names), "correct", text=1)
    for row in result.results["rows"]:
        figures = [f"{row[name]:.3g}" if row.get(name) is not None else "-" for name in names]
        verdict = "skipped" if "skipped" in row else "yes" if row["correct"] else "NO"
        table.add_row(row["layout"], f"{row['blocks']:,}", size(row["bytes"]), *figures, verdict)
    document = result.document()
    table.caption = (
        f"{document['gpu'] or document['machine']['cpu']}, {document['date']}; ratios: of one contiguous copy"
    )
    output().print(table)
    for name, what in (("store", "device to store"), ("load", "store to device")):
        if f"{name}_gbs" in document:
            ratio = document.get(f"{name}_ratio") or 0
            line = f"{what}, through cache and index, {size(document['whole_bytes'])}: {document[f'{name}_gbs']:g} GB/s"
            output().print(Text(f"{line}, {ratio:.2f} of one contiguous copy"))
    taken = f"{size(document['staging_bytes'])} on the device, {document['leaked_bytes']} bytes left after close"
    output().print(Text(f"staging: {taken}"))
    if "device" in document["notes"]:
        output().print(Text(document["notes"]["device"]), style="yellow", soft_wrap=True)


def pools(result: BenchReport) -> None:
    """A line per store and page size: GB/s through us, and the share of memcpy and of the bare client."""
    table = new_table("store", "page", "put", "of memcpy", "of bare", "get", "of memcpy", "of bare", "checks/s", text=1)
    for row in result.results["rows"]:
        page = size(row["page_kib"] << 10)
        if "skipped" in row:
            table.add_row(row["store"], page, Text(row["skipped"], style="yellow"))
            continue
        figures = [row[f"{what}{name}"] for what in ("put", "get") for name in ("_gbs", "_memcpy_ratio", "_ratio")]
        shown = ["" if figure is None else f"{figure:.2f}" for figure in figures]
        table.add_row(row["store"], page, *shown, f"{row['checks_per_s_512']:,.0f}")
    output().print(table)
    if "residency_lookups_per_s" in result.results:
        output().print(f"residency: {result.results['residency_lookups_per_s']:,.0f} blocks looked up per second")


def replays(found: "Sweep") -> None:
    """Draw what became of a trace, one line per replay."""
    setups = [outcome.setup for outcome in found.outcomes]
    with_store, costs = any(one.store_blocks for one in setups), any(one.costs for one in setups)
    tiers = ("device", "store") if with_store else ()
    moved = ("read from store", "written to store") if with_store else ()
    saved = ("saved s",) if costs else ()
    headings = ("blocks", "hit ratio", *tiers, "MIN", "unbounded", "evicted", *moved, *saved, "requests/s")
    table = new_table("policy", *headings, text=1)
    unbounded = found.survey.unbounded_hit_ratio
    for outcome in found.outcomes:
        shares = [f"{tier.hit_blocks / outcome.requested_blocks:.4f}" for tier in outcome.tiers] if with_store else []
        store = outcome.tiers[-1]
        table.add_row(
            outcome.setup.policy,
            f"{outcome.setup.blocks:,}",
            f"{outcome.hit_ratio:.4f}",
            *shares,
            f"{found.bound(outcome).min_hit_ratio:.4f}",
            f"{unbounded:.4f}",
            f"{outcome.tiers[0].evicted_blocks:,}",
            *((size(store.read_bytes), size(store.written_bytes)) if with_store else ()),
            *((f"{outcome.saved_s:,.1f}",) if costs else ()),
            f"{outcome.requests_per_s:,.0f}",
        )
    output().print(table)
    trace = found.survey
    line = f"{found.trace.name}: {trace.num_requests:,} requests, {trace.num_blocks:,} blocks of "
    line += f"{found.trace.block_tokens:,} tokens, {trace.num_unique_blocks:,} different"
    output().print(Text(line), soft_wrap=True)
    if len(found.outcomes) == 1:  # of several, --json has it
        counts = {"missed": found.outcomes[0].missed_blocks, "not written": found.outcomes[0].dropped_blocks}
        for what, reasons in counts.items():
            if reasons:
                said = ", ".join(f"{num:,} {reason}" for reason, num in sorted(reasons.items()))
                output().print(Text(f"{what}: {said}"), soft_wrap=True)
    cut = sum(outcome.cut_requests for outcome in found.outcomes)
    if cut:
        line = f"{cut:,} requests were longer than the device and were cut; what was cut off counts as missed"
        output().print(Text(line), style="yellow", soft_wrap=True)
    if trace.num_ids_behind_two_prefixes:
        line = f"{trace.num_ids_behind_two_prefixes:,} ids stand behind different prefixes; each is a block of its own"
        output().print(Text(line), style="yellow", soft_wrap=True)
