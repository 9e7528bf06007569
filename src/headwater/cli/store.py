"""Commands on a store's directory: ls, purge, check."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.text import Text

from headwater.build import open_local
from headwater.cli.main import app
from headwater.cli.options import Directory, Json, print_json
from headwater.config import environment
from headwater.config.stores import LocalStoreConfig
from headwater.core.errors import InvalidConfig, StoreBusy, StoreError
from headwater.lab import draw
from headwater.storage.base import Deadline
from headwater.storage.local import LocalStore, attach, audit

_DESTROY_S: Final = 10.0


@app.command("ls")
def list_(directory: Directory = None, as_json: Json = False) -> None:
    """Show what is in a directory, by identity and tenant."""
    with _open(directory) as store:
        found = audit.survey(store)
    if as_json:
        print_json({"command": "ls", **found.document()})
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
    path = directory or environment.default_directory()
    audit.require_store(path)
    purged = _purge_all(path, yes=yes) if everything else _purge_some(path, identity, tenant, yes=yes)
    if as_json:
        print_json({"command": "purge", "directory": str(path), "all": everything, **asdict(purged)})
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
        print_json({"command": "check", **found.document()})
    else:
        draw.checked(found)
    if not found.intact:
        raise typer.Exit(1)


@contextmanager
def _open(directory: Path | None) -> Iterator[LocalStore]:
    """Open the store of a directory, only if there is one."""
    path = directory or environment.default_directory()
    audit.require_store(path)
    with open_local(LocalStoreConfig(directory=path)) as store:
        yield store


def _confirm(question: str, *, yes: bool) -> None:
    if not yes:
        draw.errors().print(Text(f"{question} [y/N]: "), end="")
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise typer.Exit(1)
