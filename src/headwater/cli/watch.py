"""Commands that look at a server: top, dashboard."""

import time
from typing import Annotated

import typer
from rich.live import Live

from headwater.cli.main import app
from headwater.cli.options import AllowHost, Host, Json, Port, key_option, log_to_stderr, print_json
from headwater.config import environment
from headwater.config.checks import is_loopback, require_hosts, require_url
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
    from headwater.serve.ask_server import ask_state

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


@app.command()
def dashboard(
    url: Annotated[str, typer.Option(metavar="URL", help="A server with /metrics: vLLM with our connector.")],
    host: Host = "127.0.0.1",
    port: Port = None,
    api_key: Annotated[
        str | None,
        typer.Option(help="Who looks must show it.", show_default="$HEADWATER_API_KEY, or none"),
    ] = None,
    metrics_key: Annotated[
        str | None,
        typer.Option(help="What that server wants to be shown.", show_default="$HEADWATER_VLLM_KEY, or none"),
    ] = None,
    allow_host: AllowHost = None,
) -> None:
    """Serve the dashboard's page for a server that has metrics and no page of its own."""
    from headwater.serve.limits import Limits, hosts_for
    from headwater.serve.metrics_board import MetricsBoard, MetricsReader
    from headwater.serve.sockets import address, listen

    log_to_stderr()
    server = url.rstrip("/").removesuffix("/metrics")
    require_url("a server's address", server)
    key = key_option(api_key, environment.default_api_key())
    reader = MetricsReader(server, key=key_option(metrics_key, environment.default_vllm_key()))
    with listen(host, DEFAULT_PORT if port is None else port, or_any=port is None) as listener:
        bound = listener.getsockname()[0]
        if key is None and not is_loopback(bound):
            raise InvalidConfig(f"everybody who can reach {host} could look: give a key (--api-key)")
        limits = Limits(max_connections=64, hosts=hosts_for(bound, key=key, allowed=require_hosts(allow_host or ())))
        where = address(listener)
        MetricsBoard(
            reader, limits=limits, api_key=key, announce=lambda: typer.echo(f"the dashboard of {server} is at {where}/")
        ).serve_forever([listener])


@app.command()
def boards(
    kind: Annotated[
        str, typer.Argument(metavar="KIND", help="grafana: a board to import; alerts: a Prometheus rules file.")
    ],
) -> None:
    """Print what shows and watches our metrics: a Grafana board, or Prometheus alert rules, as a file to save."""
    from headwater.lab import boards as made

    if kind not in made.KINDS:
        raise InvalidConfig(f"there is {' and '.join(made.KINDS)}, and no {kind!r}")
    typer.echo(made.grafana() if kind == "grafana" else made.alerts())
