"""Commands that show that it works: demo, verify, doctor, chaos, replay."""

import sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from headwater.cli.main import app
from headwater.cli.options import Device, Json, print_json, write_json
from headwater.config import environment
from headwater.core.errors import InvalidConfig
from headwater.lab import draw, draw_figures


@app.command()
def demo(
    device: Annotated[str, typer.Option(help="Where the KV lives: cpu or cuda.")] = "cpu",
    as_json: Json = False,
) -> None:
    """Take every layout from the device to host and disk, through a restart, and back; compare every byte."""
    from headwater.lab import demo as journey  # torch takes a second to load, and only this command wants it

    with draw.progress() as tell:
        results = journey.run(device=device, tell=tell)
    unequal = [result for result in results if not result.equal]
    if as_json:
        rows = [asdict(result) | {"equal": result.equal} for result in results]
        print_json({"command": "demo", "device": device, "results": rows, "all_equal": not unequal})
    else:
        draw.demo(results)
    if unequal:
        raise typer.Exit(1)


@app.command()
def verify(
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A model's directory; without it, tiny ones of every family.")
    ] = None,
    device: Device = "cpu",
    inject: Annotated[
        bool, typer.Option("--inject", help="Damage bytes behind the checks: this has to be noticed, so it must fail.")
    ] = False,
    pd: Annotated[
        bool, typer.Option("--pd", help="Instead: prefill and decode apart, through a pool, equal one engine alone.")
    ] = False,
    pool: Annotated[
        str | None,
        typer.Option(help="With --pd: local, mooncake, redis or all; servers are started for it.", show_default="all"),
    ] = None,
    vllm: Annotated[
        bool, typer.Option("--vllm", help="Instead: a real vLLM answers the same with our connector as without.")
    ] = False,
    python: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="With --vllm: an interpreter that has it.", show_default="this one"),
    ] = None,
    only: Annotated[
        str | None, typer.Option(metavar="MODEL,...", help="With --vllm: of these models.", show_default="all")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="With --vllm: the report so far is written there, and engines' logs beside it."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Prove that a cached answer equals a computed one, bit for bit, for every family and every way to a hit."""
    if vllm and pd:
        raise InvalidConfig("--pd and --vllm are two proofs: ask for one of them")
    for option, value in (("--python", python), ("--only", only), ("--out", out)):
        if value is not None and not vllm:
            raise InvalidConfig(f"{option} is for --vllm")
    if vllm and model is not None:
        raise InvalidConfig("--vllm has models of its own: --only says which")
    if vllm:
        _verify_vllm(python or sys.executable, device=device, only=only, out=out, inject=inject, as_json=as_json)
        return
    from headwater.lab import verify as proof

    if pd:
        _verify_pd("all" if pool is None else pool, model=model, device=device, inject=inject, as_json=as_json)
        return
    if pool is not None:
        raise InvalidConfig("--pool is for --pd: without it nothing goes through a pool")
    with draw.progress() as tell:
        cases = proof.run(model=model, device=device, inject=inject, tell=tell)
    equal = all(case.equal for case in cases)
    if as_json:
        rows = [asdict(case) | {"equal": case.equal} for case in cases]
        print_json({"command": "verify", "equal": equal, "device": device, "inject": inject, "cases": rows})
    else:
        draw.verified(cases)
    if not equal:
        raise typer.Exit(1)


def _verify_pd(pool: str, *, model: Path | None, device: str, inject: bool, as_json: bool) -> None:
    from headwater.lab.verify import pd

    pools = pd.POOLS if pool == "all" else (pool,)
    with draw.progress() as tell:
        report = pd.run(pools=pools, model=model, device=device, inject=inject, tell=tell)
    print_json(report.document()) if as_json else draw.verified_pd(report)
    if not report.ok:
        raise typer.Exit(1)


def _verify_vllm(python: str, *, device: str, only: str | None, out: Path | None, inject: bool, as_json: bool) -> None:
    from headwater.lab.verify import vllm as verify_vllm

    def keep(case: str, document: dict[str, Any]) -> None:
        if out is not None:
            write_json(out, document)

    kinds = tuple(only.split(",")) if only else None
    with draw.progress() as tell:
        report = verify_vllm.run(
            python=python, device=device, kinds=kinds, inject=inject, tell=tell, keep=keep, logs=out and out.parent
        )
    print_json(report.document()) if as_json else draw.verified_vllm(report)
    if not report.ok:
        raise typer.Exit(1)


@app.command()
def doctor(
    pool: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="A pool to try: mooncake://, redis:// or local:DIR.", show_default="$HEADWATER_POOL"
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what this machine allows, and what to do about the rest; exit code 1 if something needed is broken."""
    from headwater.lab import doctor as looks

    found = looks.examine(pool=pool or environment.default_pool())
    print_json({"command": "doctor", **looks.document(found)}) if as_json else draw.doctor(found)
    if not found.ok:
        raise typer.Exit(1)


@app.command()
def chaos(
    times: Annotated[int, typer.Option(help="How often each fault is injected.")] = 50,
    fault: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only this one; may be given several times.", show_default="all"),
    ] = None,
    clients: Annotated[int, typer.Option(help="Requests at a time.")] = 6,
    seed: Annotated[int, typer.Option(help="Another seed asks, and breaks, in another order.")] = 0,
    pool: Annotated[str, typer.Option(help="local or mooncake, for faults that do not need a certain one.")] = "local",
    inject: Annotated[
        str, typer.Option(help="A fault of our own that has to be found, so it must fail: spoil or leak.")
    ] = "",
    keep: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the logs go.", show_default="nowhere, in the end")
    ] = None,
    as_json: Json = False,
) -> None:
    """Break a router's nodes and their pool, under load, again and again: answers stay right, or errors honest."""
    from headwater.lab.chaos import chaos as campaign  # the test kit, and only for this command

    options = ["--times", str(times), "--clients", str(clients), "--seed", str(seed), "--pool", pool]
    options += [word for name in fault or () for word in ("--fault", name)]
    options += (["--inject", inject] if inject else []) + (["--keep", str(keep)] if keep is not None else [])
    raise typer.Exit(campaign.main([*options, *(["--json"] if as_json else [])]))


@app.command()
def replay(
    trace: Annotated[
        Path | None,
        typer.Argument(
            metavar="TRACE",
            help="JSONL with timestamp (ms), input_length, output_length and hash_ids on each line.",
            show_default=False,
        ),
    ] = None,
    policy: Annotated[str, typer.Option(help="Who leaves first; `all` compares every policy.")] = "value",
    blocks: Annotated[
        str | None,
        typer.Option(metavar="N,...", help="Blocks of the device.", show_default="1000 ... 30000"),
    ] = None,
    store_blocks: Annotated[int, typer.Option(help="Blocks of a store behind it, written through; 0: none.")] = 0,
    store_gbs: Annotated[
        float | None, typer.Option(help="GB/s at which that store reads, and writes.", show_default="at once")
    ] = None,
    block_tokens: Annotated[int, typer.Option(help="Tokens of a block of the trace.")] = 512,
    block_bytes: Annotated[
        int | None, typer.Option(help="Bytes of a block.", show_default="128 KiB a token, as Llama 3.1 8B in BF16")
    ] = None,
    full_blocks_only: Annotated[
        bool, typer.Option("--full-blocks-only", help="Leave out last blocks that are not full, as engines do.")
    ] = False,
    compute_ms: Annotated[float, typer.Option(help="What a block costs to compute, to say what hits save.")] = 0.0,
    compute_slope_ms: Annotated[float, typer.Option(help="And how much more for each block before it.")] = 0.0,
    synthetic: Annotated[
        str | None,
        typer.Option(
            metavar="KIND", help="Instead of TRACE, make one up: chat, agents, documents, coding or research."
        ),
    ] = None,
    requests: Annotated[int, typer.Option(help="Requests of a made-up trace.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Of a made-up trace.")] = 0,
    plot: Annotated[
        Path | None, typer.Option(help="Draw hit ratio over blocks, with its bounds, as .png, .svg or .pdf.")
    ] = None,
    events: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Instead of TRACE: handle again what a server or connector recorded (--record); exit code 1 if "
            "anything comes out differently.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Replay a request trace through the cache's own decisions, in virtual time, beside Belady's MIN.

    The hit ratio is hit blocks over requested blocks; the last block of a prompt counts, full or not.

    A request of more blocks than the device has is cut to as many, and the rest counts as missed.
    """
    from headwater.lab.replay import plot as picture
    from headwater.lab.replay import sweep as replays
    from headwater.lab.replay.bill import STORE, ReplaySetup, ReplayStore
    from headwater.lab.replay.synthetic import Synthetic
    from headwater.lab.replay.trace import Trace, TraceFile

    if (trace is not None) + (synthetic is not None) + (events is not None) != 1:
        raise InvalidConfig("say what to replay: a TRACE, --synthetic or --events")
    if events is not None:
        _replay_events(events, as_json=as_json)
        return
    source: Trace
    if trace is not None:
        source = TraceFile(trace, block_tokens=block_tokens, full_blocks_only=full_blocks_only)
    else:
        source = Synthetic(
            synthetic or "", requests, seed=seed, block_tokens=block_tokens, full_blocks_only=full_blocks_only
        )
    if store_gbs is not None and not store_blocks:
        raise InvalidConfig("there is no store whose speed could be set: give it blocks")
    stores = (ReplayStore(name=STORE, blocks=store_blocks, gbs=store_gbs),) if store_blocks else ()
    default = replays.CAPACITIES if plot is None else replays.PLOT_CAPACITIES
    setups = [
        ReplaySetup(
            policy=name,
            blocks=number,
            stores=stores,
            block_bytes=block_bytes,
            compute_base_s=compute_ms / 1e3,
            compute_slope_s=compute_slope_ms / 1e3,
        )
        for name in replays.policies(policy)
        for number in (default if blocks is None else replays.capacities(blocks))
    ]
    with picture.canvas(plot) if plot is not None else nullcontext() as canvas:
        with draw.progress() as tell:
            found = replays.sweep(source, setups, tell=tell)
        if plot is not None and canvas is not None:
            picture.draw(found, canvas, format=plot.suffix[1:].lower())
    print_json({"command": "replay", **found.document()}) if as_json else draw_figures.replays(found)


def _replay_events(path: Path, *, as_json: bool) -> None:
    from headwater.lab.replay.events import replay_events

    with draw.progress() as tell:
        found = replay_events(path, tell=tell)
    print_json({"command": "replay --events", **found.document()}) if as_json else draw.recording(found)
    if not found.same:
        raise typer.Exit(1)
