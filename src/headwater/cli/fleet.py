"""Commands of prefill and decode apart: router, vllm-node, pd, drain."""

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from headwater.cli.main import app
from headwater.cli.options import (
    AllowHost,
    ApiKey,
    Device,
    Host,
    Json,
    MaxConnections,
    ModelDirectory,
    NodeKeyFile,
    Port,
    Timeout,
    Traces,
    key_option,
    log_to_stderr,
    print_json,
)
from headwater.config import environment
from headwater.config.checks import require_hosts, require_url
from headwater.config.serve import DEFAULT_PORT
from headwater.core.errors import InvalidConfig
from headwater.core.role import Role
from headwater.lab import draw


@app.command("vllm-node")
def vllm_node(
    vllm: Annotated[str, typer.Option(metavar="URL", help="Where vLLM answers: http://HOST:PORT.")],
    role: Annotated[str, typer.Option(help="What vLLM does: prefill, decode or mixed.")],
    pool: Annotated[
        str | None,
        typer.Option(metavar="URL", help="The pool that vLLM's connector uses.", show_default="$HEADWATER_POOL"),
    ] = None,
    router: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="A router to join; may be said several times.")
    ] = None,
    host: Host = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", show_default="a free one")] = 0,
    node: Annotated[
        str | None, typer.Option(help="What this node is called: as vLLM's connector is in the residency index.")
    ] = None,
    advertise: Annotated[
        str | None, typer.Option(metavar="URL", help="Where routers find it.", show_default="where it listens")
    ] = None,
    node_key_file: NodeKeyFile = None,
    vllm_key: Annotated[
        str | None,
        typer.Option(
            help="What vLLM wants to be shown; better set $HEADWATER_VLLM_KEY, which others here cannot see.",
            show_default=False,
        ),
    ] = None,
    timeout: Timeout = 600.0,
    pool_timeout: Annotated[float, typer.Option(help="Seconds until the pool has a prompt that was computed.")] = 30.0,
    lease: Annotated[float, typer.Option(help="Seconds that routers believe a heartbeat.")] = 6.0,
    max_requests: Annotated[
        int, typer.Option(help="Requests at a time, each prompt and choice counted; more are sent away.")
    ] = 256,
    wait: Annotated[float, typer.Option(help="Seconds to wait for vLLM at the start.")] = 600.0,
    max_connections: MaxConnections = 1024,
    allow_host: AllowHost = None,
) -> None:
    """Stand before a vLLM server with Headwater's connector, so that our router can use it as a node."""
    from headwater.disagg.key_file import find_node_key
    from headwater.integrations.vllm import node_start as vllm_start
    from headwater.integrations.vllm.node import NodeOptions

    log_to_stderr()
    where = pool or environment.default_pool()
    if where is None:
        raise InvalidConfig("a node hands KV over through the pool of vLLM's connector: say --pool URL")
    if role not in list(Role):
        raise InvalidConfig(f"a role is one of {', '.join(Role)}, not {role!r}")
    for url in (vllm, *(router or ()), *(() if advertise is None else (advertise,))):
        require_url("an address", url)
    options = NodeOptions(
        vllm=vllm,
        role=Role(role),
        node=node or environment.default_node(),
        host=host,
        port=port,
        advertise=advertise,
        routers=tuple(router or ()),
        lease_s=lease,
        wait_s=wait,
        node_key=find_node_key(node_key_file),
        vllm_key=key_option(vllm_key, environment.default_vllm_key()),
        max_requests=max_requests,
        max_connections=max_connections,
        allowed_hosts=require_hosts(allow_host or ()),
        request_timeout_s=timeout,
        pool_timeout_s=pool_timeout,
    )
    vllm_start.run(options, where, say=typer.echo)


@app.command()
def router(
    host: Host = "127.0.0.1",
    port: Port = None,
    residency: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="The index of who holds what, which nodes tell: redis://HOST:PORT.",
            show_default="$HEADWATER_RESIDENCY, or none: nodes take turns",
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A directory with the model's tokenizer, to ask the index about text."),
    ] = None,
    api_key: ApiKey = None,
    node_key_file: NodeKeyFile = None,
    timeout: Timeout = 600.0,
    queue_timeout: Annotated[float, typer.Option(help="Seconds that it may wait for a node with room.")] = 30.0,
    silence: Annotated[
        float, typer.Option(help="Seconds that a node may say nothing, before it is asked whether it hangs.")
    ] = 10.0,
    max_attempts: Annotated[int, typer.Option(help="Nodes that may fail a request, before it fails.")] = 4,
    max_prefills: Annotated[int, typer.Option(help="Times that a lost prompt is prefilled; 1: never again.")] = 3,
    max_requests: Annotated[int, typer.Option(help="Requests at a time; more are sent away (429).")] = 1024,
    max_connections: MaxConnections = 1024,
    allow_host: AllowHost = None,
    traces: Traces = None,
) -> None:
    """Stand before prefill, decode and mixed nodes: one address for clients, who is asked, and whether again."""
    from headwater.disagg.key_file import find_node_key
    from headwater.router import start as router_start
    from headwater.router.settings import RouterConfig

    log_to_stderr()
    options = RouterConfig(
        api_key=key_option(api_key, environment.default_api_key()),
        node_key=find_node_key(node_key_file),
        request_timeout_s=timeout,
        queue_timeout_s=queue_timeout,
        silence_s=silence,
        max_attempts=max_attempts,
        max_prefills=max_prefills,
        max_requests=max_requests,
    )
    router_start.run(
        options,
        host=host,
        port=DEFAULT_PORT if port is None else port,
        any_port=port is None,
        residency=residency or environment.default_residency(),
        model=model,
        max_connections=max_connections,
        allowed_hosts=require_hosts(allow_host or ()),
        traces=traces or environment.default_traces(),
        say=typer.echo,
    )


@app.command()
def drain(
    node: Annotated[str, typer.Argument(metavar="NODE", help="The node's name.")],
    router: Annotated[str, typer.Option(metavar="URL", help="The router: http://HOST:PORT.")],
    back: Annotated[bool, typer.Option("--back", help="Give it requests again.")] = False,
    node_key_file: NodeKeyFile = None,
    as_json: Json = False,
) -> None:
    """Have a router give a node nothing new, so that it can be ended when it has finished what it has."""
    from headwater.disagg.key_file import find_node_key
    from headwater.router import operate

    require_url("an address of a router", router.rstrip("/"))
    found = operate.drain(router.rstrip("/"), node, draining=not back, key=find_node_key(node_key_file))
    if as_json:
        print_json({"command": "drain", **found})
    else:
        state = "gets nothing new" if found["draining"] else "gets requests"
        typer.echo(f"{found['node']} {state}, and works on {found['requests']} requests of this router")


@app.command()
def pd(
    model: ModelDirectory = None,
    prefill: Annotated[int, typer.Option(help="Prefill nodes.")] = 1,
    decode: Annotated[int, typer.Option(help="Decode nodes.")] = 1,
    mixed: Annotated[int, typer.Option(help="Mixed nodes.")] = 0,
    pool: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="The pool between them.", show_default="$HEADWATER_POOL, or one in memory, for now"
        ),
    ] = None,
    pool_mib: Annotated[int, typer.Option(help="Size of a pool in memory.")] = 256,
    residency: Annotated[
        str | None,
        typer.Option(metavar="URL", help="An index of who holds what.", show_default="$HEADWATER_RESIDENCY, or none"),
    ] = None,
    host: Host = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(help="The router's port.", show_default=f"{DEFAULT_PORT}, or a free one")
    ] = None,
    device: Device = "cpu",
    num_blocks: Annotated[int | None, typer.Option(help="Blocks of KV on each device.", show_default="many")] = None,
) -> None:
    """Start a pool, a router and nodes on this machine; say where they are. Ctrl-C ends them all."""
    from headwater.fleet import Fleet, FleetOptions
    from headwater.serve import start
    from headwater.serve.sockets import curl

    log_to_stderr()
    directory = model or start.tiny_model(environment.cache_directory())
    index = residency or environment.default_residency()
    options = FleetOptions(
        prefill=prefill,
        decode=decode,
        mixed=mixed,
        pool=pool or environment.default_pool(),
        pool_bytes=pool_mib << 20,
        host=host,
        port=port,
        router=[] if index is None else ["--residency", index, "--model", str(directory)],
        node=[
            *("--model", str(directory), "--device", device),
            *([] if num_blocks is None else ["--num-blocks", str(num_blocks)]),
            *([] if index is None else ["--residency", index]),
        ],
    )
    with Fleet(options) as fleet:
        for child in fleet.children.values():
            typer.echo(f"{child.name} is process {child.pid} on {child.url}; its log is {child.log}")
        typer.echo(f"the pool is {fleet.pool if pool is None and not environment.default_pool() else 'yours'}")
        typer.echo(f"the router answers on {fleet.url}/v1; {fleet.url}/state shows what it decides")
        typer.echo(curl(fleet.url, with_key=environment.default_api_key() is not None))
        with suppress(KeyboardInterrupt):
            fleet.watch(lambda text: draw.errors().print(Text(text), style="red", soft_wrap=True))
