"""The command line: options in, tables or one JSON document out. Decides nothing and measures nothing itself.

Standard output holds the answer and nothing else; progress, questions and errors go to standard error. What is expected
to go wrong (`HeadwaterError`, a file that cannot be opened) is one line and exit code 1, never a traceback.
"""

import errno
import json
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.text import Text

from headwater import __version__, config, draw
from headwater.build import open_local
from headwater.core.errors import HeadwaterError, InvalidConfig, StoreBusy, StoreError
from headwater.storage import attach, audit
from headwater.storage.base import Deadline
from headwater.storage.local import LocalStore

_DESTROY_S: Final = 10.0


class _Group(typer.core.TyperGroup):
    """Turns what is expected to go wrong into one line and exit code 1."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except HeadwaterError as error:
            problem = str(error)
        except MemoryError:
            problem = "not enough memory for that"
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            problem = "this command moves tensors and needs torch: pip install 'headwater[torch]'"
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise
            problem = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        draw.errors().print(Text(f"headwater: {problem}"), style="red", soft_wrap=True)
        raise typer.Exit(1)


app = typer.Typer(
    cls=_Group,
    name="headwater",
    help="A tiered, shared, verified KV cache for LLM serving.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench = typer.Typer(help="Measure, beside plain baselines, on this machine and now.", no_args_is_help=True)
app.add_typer(bench, name="bench")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else on standard output.")]
Directory = Annotated[
    Path | None,
    typer.Argument(
        metavar="DIR",
        help="Directory of the store; $HEADWATER_DIR, or ~/.cache/headwater, where none is given.",
        show_default=False,
    ),
]


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"headwater {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Say what concerns all commands; each does its own work."""
    signal.signal(signal.SIGTERM, _interrupt)  # so that whatever was made for a moment is removed


# --- demonstration and benchmarks -------------------------------------------------------------------------------------


@app.command()
def demo(
    device: Annotated[str, typer.Option(help="Where the KV lives: cpu or cuda.")] = "cpu",
    as_json: Json = False,
) -> None:
    """Take every layout from the device to host and disk, through a restart, and back; compare every byte."""
    from headwater import demo as journey  # torch takes a second to load, and only this command wants it

    with draw.progress() as tell:
        results = journey.run(device=device, tell=tell)
    unequal = [result for result in results if not result.equal]
    if as_json:
        rows = [asdict(result) | {"equal": result.equal} for result in results]
        _print_json({"command": "demo", "device": device, "results": rows, "all_equal": not unequal})
    else:
        draw.demo(results)
    if unequal:
        raise typer.Exit(1)


@bench.command("index")
def bench_index(
    tokens: Annotated[int, typer.Option(help="Length of the prompt.")] = 131_072,
    block: Annotated[int, typer.Option(help="Tokens per block.")] = 64,
    rounds: Annotated[int, typer.Option(help="Interleaved repetitions.")] = 21,
    as_json: Json = False,
) -> None:
    """Name the blocks of a long prompt, beside a bare loop of chained SHA-256."""
    from headwater.bench import index

    with draw.progress() as tell:
        report = index.run(num_tokens=tokens, block_tokens=block, rounds=rounds, tell=tell)
    _print_json(report.document()) if as_json else draw.report(report)


@bench.command("store")
def bench_store(
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Where to make the store in memory; /dev/shm by default.")
    ] = None,
    disk_directory: Annotated[
        Path | None, typer.Option("--disk-dir", help="Where to make the store on disk; a temporary place by default.")
    ] = None,
    page_kib: Annotated[int, typer.Option(help="Payload of a page.")] = 1024,
    live_mib: Annotated[int, typer.Option(help="Pages that each store keeps.")] = 512,
    pool_mib: Annotated[int, typer.Option(help="Size of the pools that pages come from and go to.")] = 320,
    entries: Annotated[int, typer.Option(help="Pages in the store that is reopened.")] = 100_000,
    seconds: Annotated[float, typer.Option(help="How long to measure churn; at least five rounds.")] = 40.0,
    as_json: Json = False,
) -> None:
    """Write, evict and read pages in memory and on disk, beside memcpy, one file per block, and plain pwrite/pread."""
    from headwater.bench import store

    options = store.Options(
        directory=directory,
        disk_directory=disk_directory,
        page_kib=page_kib,
        live_mib=live_mib,
        pool_mib=pool_mib,
        entries=entries,
        seconds=seconds,
    )
    with draw.progress() as tell:
        report = store.run(options, tell=tell)
    _print_json(report.document()) if as_json else draw.report(report)


# --- directories ------------------------------------------------------------------------------------------------------


@app.command("ls")
def list_(directory: Directory = None, as_json: Json = False) -> None:
    """Show what is in a directory, by identity and tenant."""
    with _open(directory) as store:
        found = audit.survey(store)
    if as_json:
        _print_json({"command": "ls", **found.document()})
    else:
        draw.survey(found)


@app.command()
def purge(
    directory: Directory = None,
    identity: Annotated[
        str | None, typer.Option(metavar="HEX", help="Only this identity; the first digits will do.")
    ] = None,
    tenant: Annotated[
        str | None, typer.Option(metavar="HEX", help="Only this tenant; `-` is the one without a salt.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="The whole store, its files included; nobody else may have it open.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Remove pages of an identity, a tenant, or all, and wipe them."""
    if everything == (identity is not None or tenant is not None):
        raise InvalidConfig("say what to remove: --identity and/or --tenant, or --all")
    if as_json and not yes:
        raise InvalidConfig("--json asks no questions: add --yes")
    path = directory or config.default_directory()
    audit.require_store(path)
    purged = _purge_all(path, yes=yes) if everything else _purge_some(path, identity, tenant, yes=yes)
    if as_json:
        _print_json({"command": "purge", "directory": str(path), "all": everything, **asdict(purged)})
    else:
        draw.output().print(Text(f"{purged.num_pages:,} pages removed, {draw.size(purged.num_bytes)}"))
        if purged.num_left:
            draw.errors().print(f"{purged.num_left:,} pages could not be removed in time: try again", style="red")
    if purged.num_left:
        raise typer.Exit(1)


def _purge_some(path: Path, identity: str | None, tenant: str | None, *, yes: bool) -> audit.Purged:
    with _open(path) as store:
        families = audit.survey(store).families
        chosen = audit.select(families, identity_prefix=identity, tenant_prefix=tenant)
        num_pages = sum(family.num_pages for family in chosen)
        num_bytes = sum(family.num_bytes for family in chosen)
        _confirm(f"Remove {num_pages:,} pages ({draw.size(num_bytes)}) from {path}?", yes=yes)
        with draw.progress() as tell:
            return audit.purge(store, chosen, progress=lambda done, total: tell("removing", done, total))


def _purge_all(path: Path, *, yes: bool) -> audit.Purged:
    num_pages = num_bytes = 0
    try:
        with _open(path) as store:
            found = audit.survey(store)
        num_pages, num_bytes = found.num_live, sum(family.num_bytes for family in found.families)
    except StoreBusy:
        raise
    except StoreError as error:  # damaged, or of another version: all the more reason to remove it
        draw.errors().print(Text(f"the pages cannot be counted: {error}"), style="yellow")
    _confirm(f"Remove the whole store in {path} ({num_pages:,} pages, {draw.size(num_bytes)})?", yes=yes)
    attach.destroy(path, deadline=Deadline.after(_DESTROY_S))
    return audit.Purged(num_pages=num_pages, num_bytes=num_bytes, num_left=0)


@app.command()
def check(
    directory: Directory = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove bad pages, and what builds on them.")] = False,
    as_json: Json = False,
) -> None:
    """Read and verify every page; exit code 1 if one is bad."""
    with _open(directory) as store, draw.progress() as tell:
        found = audit.check(store, remove=remove, progress=lambda done, total: tell("checking", done, total))
    if as_json:
        _print_json({"command": "check", **found.document()})
    else:
        draw.checked(found)
    if not found.intact:
        raise typer.Exit(1)


@contextmanager
def _open(directory: Path | None) -> Iterator[LocalStore]:
    """Open the store of a directory, only if there is one."""
    path = directory or config.default_directory()
    audit.require_store(path)
    with open_local(config.LocalStoreConfig(directory=path)) as store:
        yield store


def _confirm(question: str, *, yes: bool) -> None:
    if not yes:
        draw.errors().print(Text(f"{question} [y/N]: "), end="")
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise typer.Exit(1)


def _print_json(document: Mapping[str, Any]) -> None:
    typer.echo(json.dumps(document, indent=2))
