"""What the command line draws: tables, one line of verdict, a bar that moves. Knows no options and asks nothing.

Tables and verdicts go to standard output, bars and errors to standard error. What users named (labels, paths) is
printed as it is, never read as markup.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from headwater.storage.local import audit

if TYPE_CHECKING:
    from headwater.lab.demo import LayoutResult  # brings torch, which most commands never need
    from headwater.lab.doctor import Findings
    from headwater.lab.replay.events import Replayed
    from headwater.lab.verify import Case
    from headwater.lab.verify.pd import PdReport
    from headwater.lab.verify.pd_cases import PdCase
    from headwater.lab.verify.vllm import VllmReport
    from headwater.pool.local import PoolStatus
    from headwater.serve.purge import PurgeReport
    from headwater.serve.revive import Revived

Tell = Callable[[str, int, int], None]  # stage, done, total
_BAD_SHOWN: Final = 50
_HEX_SHOWN: Final = 12
_DRAW_EVERY_S: Final = 0.1
_WIDTH: Final = 160  # where the output is no terminal


@contextmanager
def progress() -> Iterator[Tell]:
    """Yield a function that shows a bar on standard error, one per stage; it leaves nothing behind."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Drawn when told and by no thread: rich would not wait for its own to end, and a measurement wants none beside it.
    console = errors()
    with Progress(
        *columns,
        console=console,
        transient=True,
        auto_refresh=False,
        redirect_stdout=False,
        disable=not console.is_terminal,
    ) as bars:
        tasks: dict[str, TaskID] = {}
        drawn_s = 0.0

        def tell(stage: str, done: int, total: int) -> None:
            nonlocal drawn_s
            if stage not in tasks:
                for task in tasks.values():
                    bars.update(task, visible=False)
                tasks[stage] = bars.add_task(stage)
                drawn_s = 0.0
            bars.update(tasks[stage], completed=done, total=total)
            if time.monotonic() - drawn_s > _DRAW_EVERY_S:
                bars.refresh()
                drawn_s = time.monotonic()

        yield tell


def output() -> Console:
    """Return standard output as it is now."""
    return Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)


def errors() -> Console:
    """Return standard error as it is now."""
    return Console(stderr=True, highlight=False)


def size(num_bytes: int) -> str:
    """Return a number of bytes for people."""
    amount = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def demo(results: "Sequence[LayoutResult]") -> None:
    """Draw the demonstration's table and its verdict."""
    mark = "✓" if output().encoding.lower().startswith("utf") else "yes"
    table = new_table("layout", "planes", "bytes per page", "pages", text=1)
    for tier in ("host", "disk"):
        for call in ("write", "read"):
            table.add_column(f"{tier} {call}\nGB/s", justify="right")
    table.add_column("equal", justify="center")
    for result in results:
        speeds = [f"{gbs:.2f}" for tier in (result.host, result.disk) for gbs in (tier.write_gbs, tier.read_gbs)]
        sizes = [str(result.num_planes), f"{result.page_bytes:,}", str(result.num_pages)]
        table.add_row(result.layout, *sizes, *speeds, mark if result.equal else "NO")
    media = {tier.medium for result in results for tier in (result.host, result.disk)}
    if len(media) == 1:
        table.caption = f"both tiers lie in {media.pop()} here"
    output().print(table)
    unequal = [result for result in results if not result.equal]
    for result in unequal:
        for name, found in (("host", result.host), ("disk", result.disk)):
            if found.problem:
                output().print(Text(f"{result.layout} on {name}: {found.problem}"), style="red")
    if unequal:
        output().print(Text(f"not equal: {', '.join(result.layout for result in unequal)}"), style="red")
    else:
        output().print(f"all {len(results)} layouts equal, every byte, after a restart", style="green")


def doctor(found: "Findings") -> None:
    """Draw what this machine allows, and how its copies do."""
    styles = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    table = new_table("", "", "found", "what to do", text=4)
    for check in found.checks:
        table.add_row(Text(check.state, style=styles[check.state]), check.name, Text(check.found), Text(check.hint))
    output().print(table)
    if found.copies:
        speeds = new_table(
            "way", "size", "one contiguous copy\nGB/s", "copy engine\nof it", "call per piece\nof it", text=1
        )
        for row in found.copies:
            way = {"d2h": "to the host", "h2d": "to the device"}[row.direction]
            ratios = (f"{row.limit_gbs:.1f}", f"{row.staged_ratio:.2f}", f"{row.pieces_ratio:.2f}")
            speeds.add_row(way, size(row.num_bytes), *ratios)
        output().print(speeds)
    named = {state: [check.name for check in found.checks if check.state == state] for state in styles}
    if named["fail"]:
        output().print(Text(f"broken: {', '.join(named['fail'])}"), style="red")
    elif named["warn"]:
        output().print(Text(f"Headwater works here; could be better: {', '.join(named['warn'])}"), style="yellow")
    else:
        output().print("all is well", style="green")


def pool(found: "PoolStatus") -> None:
    """Draw a local pool: its processes, what it holds, how to use it."""
    if found.servers:
        table = new_table("", "process", "", "listens on", text=4)
        for server in found.servers:
            state = Text("runs", style="green") if server.running else Text("ended", style="bold red")
            table.add_row(server.name, str(server.pid), state, Text(", ".join(server.listens_on)))
        output().print(table)
    if found.capacity_bytes is not None and found.used_bytes is not None:
        held = f"{found.num_objects:,} objects, {size(found.used_bytes)} of {size(found.capacity_bytes)} used"
        output().print(Text(f"{held}, {found.num_clients} clients"))
    others = [where for server in found.servers for where in server.open_to_others]
    if others:
        warning = f"not on loopback only, and nobody is asked for a password: {', '.join(others)} (docs/STORES.md)"
        output().print(Text(warning), style="yellow", soft_wrap=True)
    if found.up:
        output().print("started" if found.started else "up", style="green")
        output().print(Text(f"headwater serve --pool '{found.url}'"), soft_wrap=True)
    else:
        output().print(Text(f"down: {found.why}"), style="red", soft_wrap=True)


def revived(found: "Revived") -> None:
    """Draw what was put right."""
    if not found.was_off:
        output().print("nothing was off")
    for name, why in found.was_off.items():
        fine = name in found.revived
        words = f"{name} is used again" if fine else f"{name} is still off"
        output().print(Text(f"{words}; it was off because: {why}"), style="" if fine else "red", soft_wrap=True)


def purged(found: "PurgeReport") -> None:
    """Draw what is gone, and what may not be."""
    where = ", ".join(f"{tier} {num:,}" for tier, num in found.removed.items())
    output().print(Text(f"removed, by tier: {where}"), soft_wrap=True)
    if found.held:
        output().print(
            f"{found.held:,} blocks leave the device with the requests that use them; nobody else finds them"
        )
    for tier, num in found.left.items():
        output().print(Text(f"{tier}: {num:,} could not be removed in time: purge again"), style="red", soft_wrap=True)
    for tier, why in found.unreached.items():
        output().print(Text(f"{tier}: {why}"), style="yellow", soft_wrap=True)


def recording(found: "Replayed") -> None:
    """Draw what became of a recording that was handled again."""
    brains = f"{found.num_brains} brains, of which {found.num_failed} failed" if found.num_brains > 1 else "one brain"
    output().print(f"{found.num_events:,} events, {brains}; digest {found.digest}")
    if found.cut is not None:
        output().print(Text(f"the recording is cut: {found.cut}"), style="yellow", soft_wrap=True)
    if found.difference is not None:
        output().print(Text(f"NOT the same: {found.difference}"), style="red", soft_wrap=True)
    else:
        output().print("everything came out as it was recorded")


def survey(found: audit.StoreSurvey) -> None:
    """Draw what is in a directory."""
    table = new_table("label", "identity", "tenant", "pages", "size", "tokens", "deepest", "last used", text=3)
    for family in found.families:
        table.add_row(
            Text(_printable(family.label) or "-"),
            family.identity.hex()[:_HEX_SHOWN],
            _tenant(family.tenant),
            f"{family.num_pages:,}",
            size(family.num_bytes),
            f"{family.num_tokens:,}",
            f"{family.max_depth:,}",
            _ago(family.last_used_s),
        )
    output().print(table)
    used = f"{found.num_live:,} pages, {size(found.num_bytes)} of at most {size(found.limit_bytes)}"
    slots = f"{found.num_live:,} used, {found.num_reserved:,} being written, {found.num_free:,} free"
    output().print(Text(f"{found.directory}: {used}; slots: {slots}"), soft_wrap=True)


def checked(found: audit.Checked) -> None:
    """Draw what a check found, bad pages first."""
    if found.bad:
        table = new_table("bad page", "fault", "identity", "tenant", text=4)
        for page in found.bad[:_BAD_SHOWN]:
            table.add_row(page.name.hex(), page.fault.value, page.identity.hex()[:_HEX_SHOWN], _tenant(page.tenant))
        if len(found.bad) > _BAD_SHOWN:
            table.caption = f"and {len(found.bad) - _BAD_SHOWN:,} more; --json lists all"
        output().print(table)
    counts = {
        **{fault.value: count for fault, count in found.faults.items()},
        "not read": found.num_unread,
        "expired": found.num_expired,
        "gone meanwhile": found.num_gone,
        "removed": found.num_removed,
    }
    said = "".join(f", {count:,} {what}" for what, count in counts.items() if count)
    verdict = "all intact" if found.intact else f"{len(found.bad):,} bad"
    line = f"{found.directory}: {found.num_pages:,} pages, {size(found.num_bytes)} read: {verdict}{said}"
    output().print(Text(line), style="green" if found.intact else "red", soft_wrap=True)


def new_table(*columns: str, text: int) -> Table:
    """Make a table whose first `text` columns are words and whose others are numbers."""
    table = Table()
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index < text else "right", overflow="fold")
    return table


def _ago(moment_s: float) -> str:
    seconds = max(0, int(time.time() - moment_s))
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length} {unit} ago"
    return f"{seconds} s ago"


def _tenant(tenant: bytes) -> str:
    return tenant.hex()[:_HEX_SHOWN] if any(tenant) else audit.NO_TENANT


def _printable(text: str) -> str:
    """A label as it can be shown: other people wrote it, and a terminal obeys control characters."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def verified(cases: "Sequence[Case] | Sequence[PdCase]") -> None:
    """What `headwater verify` found, a column per family and a mark per case."""
    names = list(dict.fromkeys(case.case for case in cases))
    families = list(dict.fromkeys(case.family for case in cases))
    table = new_table("case", text=1)
    for family in families:
        table.add_column(family, justify="center")
    by_place = {(case.family, case.case): case for case in cases}
    for name in names:
        row = [by_place.get((family, name)) for family in families]
        table.add_row(name, *(_mark(case) for case in row))
    output().print(table)
    for case in cases:
        if not case.equal:
            output().print(Text(f"{case.family}, {case.case}: {case.problem}", style="red"))


def verified_pd(report: "PdReport") -> None:
    """What `headwater verify --pd` found, a table per pool."""
    for run in report.pools:
        output().print(Text(f"pool: {run.pool}" + (f", absent: {run.absent}" if run.absent else "")))
        if not run.absent:
            verified([case for case in report.cases if case.pool == run.pool])
    if not report.ok:
        output().print(Text("not everything that was asked for is equal", style="bold red"))


def verified_vllm(report: "VllmReport") -> None:
    """What `headwater verify --vllm` found, a row per case."""
    table = new_table("model", "case", "cached tokens", "seconds", "", text=2)
    for case in report.cases:
        cached = ", ".join(str(num) for num in sorted(set(case.cached_tokens))) or "-"
        right = Text("differs, as it must" if case.case == "control" else "equal", style="green")
        mark = Text("skipped") if case.skipped else right if case.equal else Text("WRONG", style="bold red")
        table.add_row(case.model, case.case, cached, f"{case.seconds:.1f}", mark)
    output().print(table)
    for case in report.cases:
        if case.problem or case.skipped:
            style = "red" if case.problem else "default"
            output().print(Text(f"{case.model}, {case.case}: {case.problem or case.skipped}", style=style))


def _mark(case: "Case | PdCase | None") -> Text:
    if case is None:
        return Text("-")
    return Text("equal", style="green") if case.equal else Text("DIFFERENT", style="bold red")
