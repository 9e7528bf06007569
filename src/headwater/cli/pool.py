"""`headwater pool`: a Mooncake pool on this machine."""

from pathlib import Path
from typing import Annotated

import typer

from headwater.cli.options import Json, print_json
from headwater.config import environment
from headwater.lab import draw

pool = typer.Typer(help="A Mooncake pool on this machine, shared by its processes.", no_args_is_help=True)


PoolDirectory = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Where it is written down what was started.",
        show_default="$XDG_RUNTIME_DIR/headwater-pool, or in /tmp",
    ),
]


@pool.command("up")
def pool_up(
    size: Annotated[str, typer.Option(help="Memory that it keeps pages in, like 2GiB.")] = "2GiB",
    directory: PoolDirectory = None,
    as_json: Json = False,
) -> None:
    """Start a master and a client in the background, unless they run; say how to use them."""
    from headwater.pool import local
    from headwater.storage.mooncake.config import parse_size

    found = local.up(directory or environment.default_pool_directory(), segment_bytes=parse_size(size))
    print_json({"command": "pool up", **found.document()}) if as_json else draw.pool(found)


@pool.command("down")
def pool_down(directory: PoolDirectory = None, as_json: Json = False) -> None:
    """End them, with all that they hold."""
    from headwater.pool import local

    path = directory or environment.default_pool_directory()
    num_ended = local.down(path)
    if as_json:
        print_json({"command": "pool down", "directory": str(path), "num_ended": num_ended})
    else:
        typer.echo(f"{num_ended} processes ended" if num_ended else f"there is no pool in {path}")


@pool.command("status")
def pool_status(directory: PoolDirectory = None, as_json: Json = False) -> None:
    """Show what runs, where, and what it holds; exit code 1 if it does not run."""
    from headwater.pool import local

    found = local.status(directory or environment.default_pool_directory())
    print_json({"command": "pool status", **found.document()}) if as_json else draw.pool(found)
    if not found.up:
        raise typer.Exit(1)
