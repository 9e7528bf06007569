"""Commands around one server: serve, revive, make-model."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

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
    Traces,
    key_option,
    log_to_stderr,
    print_json,
)
from headwater.config import environment
from headwater.config.serve import DEFAULT_PORT, RECORD_BYTES, ExplainLevel, ServeConfig
from headwater.core.errors import InvalidConfig
from headwater.core.node_key import NodeKey
from headwater.core.role import Role
from headwater.lab import draw


@app.command()
def serve(
    model: ModelDirectory = None,
    name: Annotated[
        str | None, typer.Option(help="What clients call the model.", show_default="the directory's name")
    ] = None,
    host: Host = "127.0.0.1",
    port: Port = None,
    api_key: ApiKey = None,
    device: Device = "cpu",
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16 or fp32.", show_default="the model's own")] = None,
    kv: Annotated[str, typer.Option(help="What is cached: auto, bf16, fp16, fp32 or fp8.")] = "auto",
    generation_config: Annotated[
        bool,
        typer.Option(help="Whether the model's generation_config.json says what sampling is where a request does not."),
    ] = True,
    block_tokens: Annotated[int, typer.Option(help="Tokens of a block.")] = 16,
    num_blocks: Annotated[
        int | None,
        typer.Option(help="Blocks on the device.", show_default="most of a GPU's free memory, 1 GiB of a CPU's"),
    ] = None,
    device_mib: Annotated[int | None, typer.Option(help="The same in MiB.", show_default=False)] = None,
    host_dir: Annotated[
        Path | None,
        typer.Option(help="Directory of the host tier, on tmpfs.", show_default="$HEADWATER_HOST_DIR, or in /dev/shm"),
    ] = None,
    host_mib: Annotated[
        int | None, typer.Option(help="Its size; 0: no host tier.", show_default="its own, 256 for a new one")
    ] = None,
    disk_dir: Annotated[
        Path | None,
        typer.Option(help="Directory of the disk tier.", show_default="$HEADWATER_DIR, or ~/.cache/headwater/store"),
    ] = None,
    disk_mib: Annotated[
        int | None, typer.Option(help="Its size; 0: no disk tier.", show_default="its own, 1024 for a new one")
    ] = None,
    pool: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="A pool shared with others: mooncake://HOST:PORT, redis://HOST:PORT or local:DIR.",
            show_default="$HEADWATER_POOL, or none",
        ),
    ] = None,
    residency: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Where others are told what is held here: redis://HOST:PORT.",
            show_default="$HEADWATER_RESIDENCY, or nowhere",
        ),
    ] = None,
    node: Annotated[
        str | None,
        typer.Option(
            help="What this server is called there, and by routers.",
            show_default="$HEADWATER_NODE, or machine and process",
        ),
    ] = None,
    role: Annotated[
        str, typer.Option(help="mixed, or for a router: prefill (writes KV to the pool) or decode (reads it there).")
    ] = "mixed",
    router: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="A router to tell that this node is here; may be given several times."),
    ] = None,
    advertise: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Where routers find this node: http://HOST:PORT.", show_default="where it listens"
        ),
    ] = None,
    node_key_file: NodeKeyFile = None,
    lease: Annotated[float, typer.Option(help="Seconds that routers believe what this node last said.")] = 6.0,
    drain: Annotated[float, typer.Option(help="Seconds that requests under way get when the server is ended.")] = 0.0,
    pd_timeout: Annotated[float, typer.Option(help="Seconds that a decode node may read one prompt's KV.")] = 10.0,
    probe_timeout: Annotated[
        float, typer.Option(help="Seconds that a tier may take to say what it has; then it is a miss.")
    ] = 0.5,
    load_timeout: Annotated[
        float, typer.Option(help="Seconds that a load may take; then what is missing is computed.")
    ] = 5.0,
    recompute: Annotated[
        bool, typer.Option(help="Whether a decode node computes what it could not read, or says 502.")
    ] = True,
    index_only: Annotated[
        bool,
        typer.Option(
            "--index-only",
            help="Keep the residency index, and use no pool, not $HEADWATER_POOL either ($HEADWATER_INDEX_ONLY).",
        ),
    ] = False,
    policy: Annotated[
        str, typer.Option(help="Who leaves the device first: value, session (for agents), lru or lru-2.")
    ] = "value",
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Compute every prompt in full, and keep nothing: to compare.")
    ] = False,
    max_running: Annotated[int, typer.Option(help="Requests that are computed together.")] = 16,
    max_waiting: Annotated[int, typer.Option(help="Requests that may wait; more are sent away (429).")] = 256,
    pin_share: Annotated[
        float, typer.Option(help="Share of the device's blocks that `headwater admin pin` may keep, up to 0.9.")
    ] = 0.1,
    step_tokens: Annotated[int, typer.Option(help="Tokens that are computed together.")] = 2048,
    max_body_mib: Annotated[int, typer.Option(help="Largest body that is read.")] = 8,
    record: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write down all that the cache's brain hears, for `headwater replay --events FILE`.",
            show_default="nowhere",
        ),
    ] = None,
    record_bytes: Annotated[
        int, typer.Option(help="How large that file may get; then it says that it is cut.")
    ] = RECORD_BYTES,
    traces: Traces = None,
    explain: Annotated[
        ExplainLevel | None,
        typer.Option(
            help="What `headwater explain` tells: blocks; tokens (and of other salts); or text, too.",
            show_default="blocks; tokens on loopback without a key",
        ),
    ] = None,
    max_prompt_chars: Annotated[
        int | None,
        typer.Option(
            help="Longest text that is made into tokens.", show_default="the context's tokens x the longest token"
        ),
    ] = None,
    max_connections: MaxConnections = 1024,
    allow_host: AllowHost = None,
    timeout: Annotated[float, typer.Option(help="Seconds that a request may take, from its first byte on.")] = 600.0,
) -> None:
    """Serve a model over OpenAI's API, with its KV cached on the device, in host memory, on disk and in a pool."""
    from headwater.disagg.key_file import find_node_key
    from headwater.serve import start  # torch takes a second to load, and only this command wants it

    log_to_stderr()
    index_only = index_only or environment.index_only()
    options = ServeConfig(
        model=model or start.tiny_model(environment.cache_directory()),
        name=name,
        host=host,
        port=DEFAULT_PORT if port is None else port,
        api_key=key_option(api_key, environment.default_api_key()),
        device=device,
        dtype=dtype,
        kv=kv,
        generation_config=generation_config,
        block_tokens=block_tokens,
        num_blocks=num_blocks,
        device_bytes=None if device_mib is None else device_mib << 20,
        host_directory=(host_dir or environment.default_host_directory()) if host_mib != 0 and not no_cache else None,
        host_bytes=host_mib << 20 if host_mib else None,
        disk_directory=(disk_dir or environment.default_directory()) if disk_mib != 0 and not no_cache else None,
        disk_bytes=disk_mib << 20 if disk_mib else None,
        pool=pool or (None if no_cache or index_only else environment.default_pool()),
        residency=residency or (None if no_cache else environment.default_residency()),
        node=node,
        index_only=index_only,
        role=_role(role),
        node_key=(
            find_node_key(node_key_file)
            if router or role != Role.MIXED or node_key_file is not None
            else NodeKey.random(own=True)
        ),
        routers=tuple(url.rstrip("/") for url in router or ()),
        advertise=None if advertise is None else advertise.rstrip("/"),
        lease_s=lease,
        drain_s=drain,
        pd_via=environment.pd_via(),
        pd_timeout_s=pd_timeout,
        pd_recompute=recompute,
        probe_timeout_s=probe_timeout,
        load_timeout_s=load_timeout,
        max_body_bytes=max_body_mib << 20,
        max_prompt_chars=max_prompt_chars,
        max_connections=max_connections,
        allowed_hosts=tuple(allow_host or ()),
        max_running=max_running,
        max_waiting=max_waiting,
        pin_share=pin_share,
        step_tokens=step_tokens,
        request_timeout_s=timeout,
        policy=policy,
        cache=not no_cache,
        record=record,
        record_bytes=record_bytes,
        traces=traces or environment.default_traces(),
        explain=explain,
    )
    start.run(options, any_port=port is None, say=typer.echo)


@app.command()
def revive(
    what: Annotated[
        str | None, typer.Argument(help="A tier's name, or `brain`.", show_default="all that is off")
    ] = None,
    url: Annotated[str, typer.Option(metavar="URL", help="Where the server is.")] = f"http://127.0.0.1:{DEFAULT_PORT}",
    api_key: Annotated[
        str | None, typer.Option(help="The server's key.", show_default="$HEADWATER_API_KEY, or none")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait: a store may have to be rebuilt.")] = 120.0,
    as_json: Json = False,
) -> None:
    """Have a server use again what its cache has switched off: a damaged tier, a brain that failed. No restart."""
    from headwater.serve.revive import ask_to_revive

    key = key_option(api_key, environment.default_api_key())
    found = ask_to_revive(url.rstrip("/"), what=what, key=key, timeout_s=timeout)
    print_json({"command": "revive", **found.document()}) if as_json else draw.revived(found)
    if found.still_off:
        raise typer.Exit(1)


def _role(text: str) -> Role:
    try:
        return Role(text)
    except ValueError as error:
        raise InvalidConfig(f"a role is one of {', '.join(Role)}, not {text!r}") from error


@app.command("make-model")
def make_model(
    family: Annotated[str, typer.Argument(metavar="FAMILY", help="llama, qwen2, qwen3, deepseek_v2, _v3 or _v32.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write it; must be new or empty.")],
    seed: Annotated[int, typer.Option(help="Another seed gives other weights; the same one the same.")] = 0,
    as_json: Json = False,
) -> None:
    """Write a tiny random checkpoint with a byte-level tokenizer, as transformers and `serve` read it."""
    from headwater.engine import make_model as maker

    made = maker.make_model(family, directory, seed=seed)
    if as_json:
        print_json({"command": "make-model", **asdict(made)})
    else:
        size = f"{made.num_parameters:,} parameters, {made.num_bytes:,} bytes"
        typer.echo(f"{made.directory}: a random {made.family}, {size}, seed {made.seed}")
