"""`headwater explain`: why a request's prompt hit or missed what it did, block by block."""

from typing import Annotated

import typer

from headwater.cli.main import app
from headwater.cli.options import Json, key_option, print_json
from headwater.config import environment
from headwater.config.serve import DEFAULT_PORT
from headwater.core.errors import InvalidConfig
from headwater.lab import draw


@app.command()
def explain(
    request: Annotated[
        str | None,
        typer.Argument(
            metavar="ID", help="usage.headwater.request of an answer, or its x-request-id.", show_default=""
        ),
    ] = None,
    last: Annotated[bool, typer.Option("--last", help="The request that ended last.")] = False,
    url: Annotated[
        str, typer.Option(metavar="URL", help="Where the server is; not the router.")
    ] = f"http://127.0.0.1:{DEFAULT_PORT}",
    api_key: Annotated[
        str | None, typer.Option(help="The server's key.", show_default="$HEADWATER_API_KEY, or none")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say where the blocks of a request's prompt came from, and why the others had to be computed."""
    from headwater.lab.draw_explain import explanation
    from headwater.serve.explain import ask_to_explain

    if (request is None) != last:
        raise InvalidConfig("say which request: an ID (usage.headwater.request of its answer), or --last")
    key = key_option(api_key, environment.default_api_key())
    found = ask_to_explain(url.rstrip("/"), request, key=key)
    print_json(found) if as_json else draw.output().print(explanation(found))
