"""What several commands share: options, and how they answer."""

import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from headwater.config.serve import DEFAULT_PORT
from headwater.core.errors import InvalidConfig

Host = Annotated[str, typer.Option(help="Address to listen on.")]


Port = Annotated[int | None, typer.Option(help="Port to listen on.", show_default=f"{DEFAULT_PORT}, or a free one")]


Timeout = Annotated[float, typer.Option(help="Seconds that a request may take.")]


Device = Annotated[str, typer.Option(help="Where to compute: cpu or cuda.")]


ModelDirectory = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="A Hugging Face directory.", show_default="a tiny model, made once"),
]


MaxConnections = Annotated[
    int, typer.Option(help="Connections at a time; for more, those go that keep us waiting longest.")
]


AllowHost = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="A name that a server on loopback without a key answers to, besides localhost; may be given often.",
        show_default=False,
    ),
]


ApiKey = Annotated[
    str | None,
    typer.Option(
        help="Clients must show it; better set $HEADWATER_API_KEY, which others on this machine cannot see.",
        show_default=False,
    ),
]


Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else on standard output.")]


Directory = Annotated[
    Path | None,
    typer.Argument(
        metavar="DIR",
        help="Directory of the store; $HEADWATER_DIR, or ~/.cache/headwater/store, where none is given.",
        show_default=False,
    ),
]


Traces = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="An OpenTelemetry collector that gets spans of all requests: http://HOST:4318.",
        show_default="$HEADWATER_TRACES, or none",
    ),
]


NodeKeyFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="The key that all routers and nodes of a fleet hold, and nobody else.",
        show_default="$HEADWATER_NODE_KEY_FILE, $HEADWATER_NODE_KEY, or this user's own, on loopback only",
    ),
]


def print_json(document: Mapping[str, Any]) -> None:
    """Say the answer."""
    typer.echo(json.dumps(document, indent=2))


def numbers(name: str, text: str) -> list[int]:
    """Whole numbers with commas between them. Raises InvalidConfig."""
    try:
        return [int(one) for one in text.split(",")]
    except ValueError as error:
        raise InvalidConfig(f"{name} are whole numbers with commas, not {text!r}") from error


def decimals(name: str, text: str) -> list[float]:
    """Numbers with commas between them. Raises InvalidConfig."""
    try:
        return [float(one) for one in text.split(",")]
    except ValueError as error:
        raise InvalidConfig(f"{name} are numbers with commas, not {text!r}") from error


def log_to_stderr() -> None:
    """Of commands that go on."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # a line per heartbeat and exchange


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Whole, or not at all."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def key_option(option: str | None, default: str | None) -> str | None:
    """A key as an option says it, or else the default. One that is empty must not open the door."""
    if option == "":
        raise InvalidConfig("a key is not empty: leave the option out to want none")
    return default if option is None else option
