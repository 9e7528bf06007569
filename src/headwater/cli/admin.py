"""`headwater admin`: what is asked of a server that runs."""

import json
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.text import Text

from headwater.cli.options import Json, key_option, print_json
from headwater.config import environment
from headwater.config.serve import DEFAULT_PORT
from headwater.core.errors import HeadwaterError, InvalidConfig
from headwater.lab import draw

admin = typer.Typer(
    help="Ask something of a server that runs: purge, pin, unpin, warm, limits, drain.", no_args_is_help=True
)

_LOOK_EVERY_S: Final = 0.5
_WARM_S: Final = 60.0  # for a prompt
_LEAST_WARM_S: Final = 0.1

Url = Annotated[str, typer.Option(metavar="URL", help="Where the server is.")]


AdminKey = Annotated[
    str | None, typer.Option("--api-key", help="The server's key.", show_default="$HEADWATER_API_KEY, or none")
]


Salt = Annotated[
    str | None, typer.Option(metavar="TEXT", help="The tenant's `cache_salt`.", show_default="the one without a salt")
]


@admin.command()
def purge(
    prompt: Annotated[
        str | None, typer.Argument(help="A prefix, as text. What builds on its last full block goes.")
    ] = None,
    tokens: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The prefix as token ids: a JSON list in a file.")
    ] = None,
    cache_salt: Salt = None,
    whole_tenant: Annotated[bool, typer.Option("--whole-tenant", help="Everything of that tenant.")] = False,
    from_token: Annotated[
        int | None, typer.Option(help="Blocks of the prefix go from this token on.", show_default="its last full block")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that it may take.")] = 60.0,
    url: Url = f"http://127.0.0.1:{DEFAULT_PORT}",
    api_key: AdminKey = None,
    as_json: Json = False,
) -> None:
    """Have blocks gone from every tier of a server: a prefix with all that builds on it, or a tenant."""
    from headwater.serve.purge import ask_to_purge

    if sum((prompt is not None, tokens is not None, whole_tenant)) != 1:
        raise InvalidConfig("say what to purge: a prefix as text, or --tokens FILE, or --whole-tenant")
    order: dict[str, Any] = {
        "prompt": prompt if tokens is None else _token_ids(tokens),
        "cache_salt": cache_salt,
        "whole_tenant": whole_tenant,
        "from_token": from_token,
        "timeout_s": timeout,
    }
    key = key_option(api_key, environment.default_api_key())
    found = ask_to_purge(url.rstrip("/"), order, key=key, timeout_s=timeout)
    print_json({"command": "admin purge", **found.document()}) if as_json else draw.purged(found)
    if not found.whole:
        raise typer.Exit(1)


@admin.command()
def pin(
    prompt: Annotated[str | None, typer.Argument(help="A prefix, as text.")] = None,
    tokens: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The prefix as token ids: a JSON list in a file.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="To unpin it by.", show_default="made from its tokens")] = None,
    cache_salt: Salt = None,
    ttl: Annotated[
        float | None, typer.Option(help="Seconds that it lasts.", show_default="until it is unpinned")
    ] = None,
    url: Url = f"http://127.0.0.1:{DEFAULT_PORT}",
    api_key: AdminKey = None,
    as_json: Json = False,
) -> None:
    """Keep a prefix on a server's device, within its budget (`serve --pin-share`); without a prefix, list all pins."""
    from headwater.serve.ask_server import PINS, ask_server

    key, address = key_option(api_key, environment.default_api_key()), url.rstrip("/")
    if prompt is not None and tokens is not None:
        raise InvalidConfig("a prefix is text or --tokens FILE, and not both")
    if prompt is None and tokens is None:
        _show_pins(ask_server(address, PINS, key=key, timeout_s=10.0), as_json=as_json)
        return
    order = {"prompt": prompt if tokens is None else _token_ids(tokens), "name": name, "cache_salt": cache_salt}
    body = json.dumps({**order, "ttl_s": ttl}).encode()
    found = ask_server(address, PINS, key=key, timeout_s=60.0, body=body)
    if as_json:
        print_json({"command": "admin pin", **found})
    else:
        words = f"{found['name']}: {found['num_blocks']:,} of {found['wanted']:,} blocks stay on the device"
        draw.output().print(Text(words), soft_wrap=True)


@admin.command()
def unpin(
    name: Annotated[str, typer.Argument(help="The pin.")],
    url: Url = f"http://127.0.0.1:{DEFAULT_PORT}",
    api_key: AdminKey = None,
    as_json: Json = False,
) -> None:
    """Let the blocks of a pin go again, and list those that are left."""
    from headwater.serve.ask_server import UNPIN, ask_server

    key = key_option(api_key, environment.default_api_key())
    body = json.dumps({"name": name}).encode()
    _show_pins(ask_server(url.rstrip("/"), UNPIN, key=key, timeout_s=10.0, body=body), as_json=as_json)


def _show_pins(found: Any, *, as_json: bool) -> None:
    if as_json:
        print_json({"command": "admin pins", **found})
        return
    draw.output().print(f"{found['num_blocks']:,} of {found['most_blocks']:,} blocks are pinned")
    for one in found["pins"]:
        lasts = "" if one["left_s"] is None else f", for {one['left_s']:.0f} s more"
        draw.output().print(Text(f"{one['name']}: {one['num_blocks']:,} blocks{lasts}"), soft_wrap=True)


@admin.command()
def warm(
    prompts: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="A prompt a line, as JSON: text, token ids, or an object with `prompt`, `cache_salt`."
        ),
    ],
    timeout: Annotated[float, typer.Option(help="Seconds for all of them.")] = 600.0,
    url: Url = f"http://127.0.0.1:{DEFAULT_PORT}",
    api_key: AdminKey = None,
    as_json: Json = False,
) -> None:
    """Bring what disk and pool have of prompts to a server's host memory, one after another."""
    from headwater.serve.ask_server import WARM, ask_server

    key, address = key_option(api_key, environment.default_api_key()), url.rstrip("/")
    until_s, held, num_done = time.monotonic() + timeout, Counter[str](), 0
    with prompts.open(encoding="utf-8") as file:
        num_lines = sum(1 for _ in file)
    with prompts.open(encoding="utf-8") as file, draw.progress() as tell:
        for number, line in enumerate(file, 1):
            left_s = until_s - time.monotonic()
            if left_s < _LEAST_WARM_S:
                break
            order = {**_prompt_of(line, f"{prompts}, line {number}"), "timeout_s": min(left_s, _WARM_S)}
            body = json.dumps(order).encode()
            held.update(ask_server(address, WARM, key=key, timeout_s=_WARM_S + 10.0, body=body)["held"])
            num_done = number
            tell("warming", num_done, num_lines)
    if as_json:
        print_json({"command": "admin warm", "prompts": num_lines, "done": num_done, "held": dict(held)})
    else:
        where = ", ".join(f"{tier} {num:,}" for tier, num in sorted(held.items()))
        draw.output().print(Text(f"{num_done:,} of {num_lines:,} prompts; blocks by tier: {where or 'none'}"))
    if num_done < num_lines:
        raise typer.Exit(1)


def _prompt_of(line: str, where: str) -> dict[str, Any]:
    """What a line of a file asks for; the server looks at its fields. Raises InvalidConfig."""
    try:
        found = json.loads(line)
    except ValueError as error:
        raise InvalidConfig(f"{where} is not JSON: {error}") from error
    return found if isinstance(found, dict) else {"prompt": found}


@admin.command()
def limits(
    policy: Annotated[
        str | None, typer.Option(help="In which order blocks leave the device: lru, lru-2 or value.")
    ] = None,
    max_waiting: Annotated[
        int | None, typer.Option(help="Requests that may wait, up to what the server was started with.")
    ] = None,
    url: Url = f"http://127.0.0.1:{DEFAULT_PORT}",
    api_key: AdminKey = None,
    as_json: Json = False,
) -> None:
    """Change what may change while a server runs; show it. The rest wants a restart."""
    from headwater.serve.ask_server import LIMITS, ask_server

    key, wanted = key_option(api_key, environment.default_api_key()), {"policy": policy, "max_waiting": max_waiting}
    body = json.dumps(wanted).encode() if any(one is not None for one in wanted.values()) else None
    found = ask_server(url.rstrip("/"), LIMITS, key=key, timeout_s=10.0, body=body)
    if as_json:
        print_json({"command": "admin limits", **found})
    else:
        draw.output().print(Text(", ".join(f"{name} {value}" for name, value in found.items())))


@admin.command()
def drain(
    undo: Annotated[bool, typer.Option("--undo", help="Take requests again.")] = False,
    wait: Annotated[
        float, typer.Option(help="Seconds to wait for requests under way; exit code 1 if some are left.")
    ] = 0.0,
    url: Url = f"http://127.0.0.1:{DEFAULT_PORT}",
    api_key: AdminKey = None,
    as_json: Json = False,
) -> None:
    """Have a server take nothing new (503 with Retry-After) and finish what it has; a router leaves it out."""
    from headwater.serve.ask_server import DRAIN, ask_server

    key, address = key_option(api_key, environment.default_api_key()), url.rstrip("/")
    until_s = time.monotonic() + wait
    found = ask_server(address, DRAIN, key=key, timeout_s=10.0, body=json.dumps({"undo": undo}).encode())
    while not (undo or _drained(found, address)) and time.monotonic() < until_s:
        time.sleep(_LOOK_EVERY_S)
        found = ask_server(address, DRAIN, key=key, timeout_s=10.0)
    drained = _drained(found, address)
    if as_json:
        print_json({"command": "admin drain", **found})
    elif undo:
        draw.output().print("requests are taken again")
    else:
        left = "nothing is under way" if drained else f"{found['requests']} requests are under way"
        draw.output().print(Text(f"nothing new is taken; {left}"))
    if wait and not (undo or drained):
        raise typer.Exit(1)


def _drained(found: object, address: str) -> bool:
    """What a server says of it. Raises HeadwaterError for no such answer."""
    if not (isinstance(found, dict) and {"draining", "requests", "drained"} <= found.keys()):
        raise HeadwaterError(f"no headwater server answers at {address}")
    return found["drained"] is True


def _token_ids(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidConfig(f"{path} is not JSON: {error}") from error
