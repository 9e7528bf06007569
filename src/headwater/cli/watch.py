"""Commands that look at a server: top."""

import time
from typing import Annotated

import typer
from rich.live import Live

from headwater.cli.main import app
from headwater.cli.options import Json, key_option, print_json
from headwater.config import environment
from headwater.config.serve import DEFAULT_PORT
from headwater.core.errors import InvalidConfig
from headwater.lab import draw


@app.command()
def top(
    url: Annotated[
        str, typer.Option(metavar="URL", help="Where the server or router is.")
    ] = f"http://127.0.0.1:{DEFAULT_PORT}",
    api_key: Annotated[
        str | None, typer.Option(help="The server's key.", show_default="$HEADWATER_API_KEY, or none")
    ] = None,
    every: Annotated[float, typer.Option(help="Seconds between two looks.")] = 1.0,
    looks: Annotated[int, typer.Option(help="Looks until it ends.", show_default="0: until Ctrl-C")] = 0,
    as_json: Json = False,
) -> None:
    """Show what a server's dashboard shows, in a terminal. One look, where the output is none."""
    from headwater.lab.draw_state import screen
    from headwater.serve.ask_state import ask_state

    if every < 0.1:
        raise InvalidConfig(f"every look costs the server something: wait 0.1 s at least, not {every:g}")
    key = key_option(api_key, environment.default_api_key())
    address = url.rstrip("/")
    state = ask_state(address, key=key)
    if as_json:
        print_json(state)
        return
    console = draw.output()
    if not console.is_terminal:
        console.print(screen(state))
        return
    with Live(screen(state), console=console, screen=looks == 0, auto_refresh=False) as live:
        look = 1
        try:
            while looks == 0 or look < looks:
                time.sleep(every)
                live.update(screen(ask_state(address, key=key)), refresh=True)
                look += 1
        except KeyboardInterrupt:
            return
