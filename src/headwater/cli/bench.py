"""`headwater bench`: measure, beside plain baselines."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from headwater.cli.options import Device, Json, decimals, numbers, print_json
from headwater.lab import draw, draw_figures
from headwater.lab.bench.report import BenchReport

bench = typer.Typer(help="Measure, beside plain baselines, on this machine and now.", no_args_is_help=True)

Shape = Annotated[str, typer.Option(help="Shape of the random model: tiny, 0.5b or 8b.")]
Lengths = Annotated[str, typer.Option(help="Prompt lengths, with commas.")]
BlockTokens = Annotated[int, typer.Option(help="Tokens per block.")]
StepTokens = Annotated[int, typer.Option(help="Tokens computed in one step.")]
Rounds = Annotated[int, typer.Option(help="Repetitions.")]
AnswerTokens = Annotated[int, typer.Option(help="Length of an answer.")]


def _measure(
    run: Callable[[draw.Tell], BenchReport],
    *,
    as_json: bool,
    show: Callable[[BenchReport], None] = draw_figures.report,
    right: str | None = None,
) -> None:
    """Run a benchmark and say what it found. Ends the command with 1 if a result that must hold does not."""
    with draw.progress() as tell:
        report = run(tell)
    if as_json and "device" in report.notes:
        draw.errors().print(Text(report.notes["device"]), style="yellow", soft_wrap=True)
    print_json(report.document()) if as_json else show(report)
    if right is not None and not report.results[right]:
        raise typer.Exit(1)


@bench.command("index")
def bench_index(
    tokens: Annotated[int, typer.Option(help="Length of the prompt.")] = 131_072,
    block: BlockTokens = 64,
    rounds: Annotated[int, typer.Option(help="Interleaved repetitions.")] = 21,
    as_json: Json = False,
) -> None:
    """Name the blocks of a long prompt, beside a bare loop of chained SHA-256."""
    from headwater.lab.bench import index

    _measure(lambda tell: index.run(num_tokens=tokens, block_tokens=block, rounds=rounds, tell=tell), as_json=as_json)


@bench.command("cache")
def bench_cache(
    blocks: Annotated[int, typer.Option(help="Length of the prompt that is matched, in blocks.")] = 2048,
    others: Annotated[int, typer.Option(help="Other blocks that are known.")] = 10_000,
    many: Annotated[int, typer.Option(help="Other blocks that are known, in the large case.")] = 1_000_000,
    rounds: Rounds = 51,
    as_json: Json = False,
) -> None:
    """Match, reserve, commit and release among few and many known blocks, beside a bare dict."""
    from headwater.lab.bench import cache

    _measure(lambda tell: cache.run(blocks=blocks, others=others, many=many, rounds=rounds, tell=tell), as_json=as_json)


@bench.command("placement")
def bench_placement(
    requests: Annotated[int, typer.Option(help="Requests of a stream, in thousands.")] = 1000,
    seeds: Annotated[int, typer.Option(help="Streams of each sort.")] = 10,
    as_json: Json = False,
) -> None:
    """Load or compute, over tiers whose pace changes under way, beside an oracle; in simulated time."""
    from headwater.lab.bench import placement

    _measure(lambda tell: placement.run(num_requests=requests, seeds=seeds, tell=tell), as_json=as_json)


@bench.command("ttft")
def bench_ttft(
    shape: Shape = "tiny",
    device: Device = "cpu",
    lengths: Lengths = "512,1024,2048",
    block: BlockTokens = 64,
    step: StepTokens = 8192,
    rounds: Rounds = 5,
    pairs: Annotated[int, typer.Option(help="Pairs with and without the cache, to see what it costs.")] = 15,
    pair_tokens: Annotated[int, typer.Option(help="Length of the prompts in those pairs.")] = 1024,
    as_json: Json = False,
) -> None:
    """Time to the first token, cold and from each tier, over prompt lengths; and the cost when nothing hits."""
    from headwater.lab.bench import ttft

    options = ttft.TtftOptions(
        shape=shape,
        device=device,
        lengths=tuple(numbers("lengths", lengths)),
        block_tokens=block,
        step_tokens=step,
        rounds=rounds,
        pairs=pairs,
        pair_tokens=pair_tokens,
    )
    _measure(lambda tell: ttft.run(options, tell=tell), as_json=as_json)


@bench.command("meet")
def bench_meet(
    shape: Shape = "tiny",
    device: Device = "cpu",
    tokens: Annotated[int, typer.Option(help="Length of the prompt.")] = 4096,
    block: BlockTokens = 64,
    step: StepTokens = 1024,
    paces: Annotated[
        str, typer.Option(metavar="X,...", help="What loading takes, as multiples of computing.")
    ] = "0.1,0.5,1,2,8",
    rounds: Rounds = 4,
    block_ms: Annotated[float, typer.Option(help="Computing a block takes at least so long: a slower device.")] = 0.0,
    as_json: Json = False,
) -> None:
    """Time to the first token of a stored prompt: computed, loaded, and with compute meeting load in the middle."""
    from headwater.lab.bench import meet

    options = meet.MeetOptions(
        shape=shape,
        device=device,
        tokens=tokens,
        block_tokens=block,
        step_tokens=step,
        paces=tuple(decimals("paces", paces)),
        rounds=rounds,
        block_ms=block_ms,
    )
    _measure(lambda tell: meet.run(options, tell=tell), as_json=as_json)


@bench.command("handoff")
def bench_handoff(
    shape: Shape = "tiny",
    device: Device = "cpu",
    lengths: Lengths = "2048,2043",
    block: BlockTokens = 64,
    step: StepTokens = 2048,
    rounds: Rounds = 5,
    as_json: Json = False,
) -> None:
    """Hand prompts from one engine process to another through a pool in memory, beside two plain copies."""
    from headwater.lab.bench import handoff

    options = handoff.HandoffOptions(
        shape=shape,
        device=device,
        lengths=tuple(numbers("lengths", lengths)),
        block_tokens=block,
        step_tokens=step,
        rounds=rounds,
    )
    _measure(lambda tell: handoff.run(options, tell=tell), as_json=as_json, right="equal")


@bench.command("copy")
def bench_copy(
    device: Annotated[
        str | None, typer.Option(help="Where the blocks are: cpu or cuda.", show_default="cuda where there is one")
    ] = None,
    layouts: Annotated[str | None, typer.Option(help="Layouts, with commas.", show_default="all")] = None,
    blocks: Annotated[
        str | None, typer.Option(metavar="N,...", help="Numbers of blocks.", show_default="1 ... 2048")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Repetitions; small transfers more, large ones fewer.")] = 7,
    max_bytes: Annotated[
        int | None, typer.Option(help="Host memory for frames; what needs more is skipped.", show_default="8 GiB")
    ] = None,
    as_json: Json = False,
) -> None:
    """Copy blocks between device and host memory, beside one contiguous copy; and what that costs a model meanwhile."""
    from headwater.lab.bench import copy

    options = copy.CopyOptions(
        device=device,
        layouts=tuple(layouts.split(",")) if layouts is not None else tuple(copy.layouts()),
        blocks=tuple(numbers("blocks", blocks)) if blocks is not None else None,
        rounds=rounds,
        max_bytes=max_bytes if max_bytes is not None else copy.MAX_BYTES,
    )
    _measure(lambda tell: copy.run(options, tell=tell), as_json=as_json, show=draw_figures.copies, right="correct")


@bench.command("pool")
def bench_pool(
    stores: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="Stores to measure.", show_default="all that can be had")
    ] = None,
    page_kib: Annotated[str, typer.Option(metavar="N,...", help="Sizes of a page.")] = "128,1024,4096",
    batch: Annotated[int, typer.Option(help="Pages in one call.")] = 32,
    round_mib: Annotated[int, typer.Option(help="Data of one round.")] = 256,
    rounds: Annotated[int, typer.Option(help="Rounds; figures are medians.")] = 5,
    as_json: Json = False,
) -> None:
    """Put pages into shared pools and read them back, beside memcpy and the pools' bare clients. Starts its servers."""
    from headwater.lab.bench import pool as pools
    from headwater.lab.bench.pool_ways import NAMES

    options = pools.PoolOptions(
        stores=tuple(stores.split(",")) if stores is not None else NAMES,
        page_kib=tuple(numbers("page-kib", page_kib)),
        batch_pages=batch,
        round_mib=round_mib,
        rounds=rounds,
    )
    _measure(lambda tell: pools.run(options, tell=tell), as_json=as_json, show=draw_figures.pools)


@bench.command("serve")
def bench_serve(
    conversations: Annotated[int, typer.Option(help="Conversations at once.")] = 8,
    turns: Annotated[int, typer.Option(help="Questions of each.")] = 6,
    max_tokens: AnswerTokens = 64,
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A model's directory.", show_default="a tiny random one")
    ] = None,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Hold conversations over HTTP, with the cache and without: what is computed, when tokens come, equal answers."""
    from headwater.lab.bench import serve as load

    options = load.ServeOptions(
        conversations=conversations, turns=turns, max_tokens=max_tokens, model=model, device=device
    )
    _measure(lambda tell: load.run(options, tell=tell), as_json=as_json, right="answers_equal")


@bench.command("pd")
def bench_pd(
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A model's directory.", show_default="a random one")
    ] = None,
    shape: Annotated[str, typer.Option(help="Shape of the random model: demo, tiny or 0.5b.")] = "tiny",
    device: Device = "cpu",
    pool: Annotated[
        str, typer.Option(metavar="POOL", help="local, redis or mooncake, started for this; or a pool's URL.")
    ] = "local",
    block: BlockTokens = 16,
    step: StepTokens = 512,
    lengths: Lengths = "512,2048,4096",
    max_tokens: AnswerTokens = 16,
    rounds: Annotated[int, typer.Option(help="Prompts of each length.")] = 5,
    streams: Annotated[int, typer.Option(help="Answers that run while others' KV is read.")] = 4,
    pairs: Annotated[int, typer.Option(help="Pairs of windows, with such reads and without.")] = 24,
    load_every_ms: Annotated[
        float | None, typer.Option(help="Time between two such reads.", show_default="what a prompt's prefill takes")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A request trace (JSONL).", show_default="a made-up one")
    ] = None,
    requests: Annotated[int, typer.Option(help="Requests of the trace that are replayed.")] = 32,
    scale: Annotated[float, typer.Option(help="Length of its prompts and answers, beside the trace's.")] = 1 / 16,
    rate: Annotated[float, typer.Option(help="Its requests a second.")] = 1.0,
    max_prompt: Annotated[int, typer.Option(help="Longest prompt that is replayed.")] = 4096,
    as_json: Json = False,
) -> None:
    """Prefill and decode apart, beside one node for both: when tokens come, what the pool costs, equal answers."""
    from headwater.lab.bench import pd as apart

    options = apart.PdOptions(
        model=model,
        shape=shape,
        device=device,
        pool=pool,
        block_tokens=block,
        step_tokens=step,
        lengths=tuple(numbers("lengths", lengths)),
        max_tokens=max_tokens,
        rounds=rounds,
        streams=streams,
        pairs=pairs,
        load_every_s=None if load_every_ms is None else load_every_ms / 1e3,
        trace=trace,
        requests=requests,
        scale=scale,
        rate_per_s=rate,
        max_prompt=max_prompt,
    )
    _measure(lambda tell: apart.run(options, tell=tell), as_json=as_json, right="answers_equal")


@bench.command("store")
def bench_store(
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Where to make the store in memory; /dev/shm by default.")
    ] = None,
    disk_directory: Annotated[
        Path | None, typer.Option("--disk-dir", help="Where to make the store on disk; a temporary place by default.")
    ] = None,
    page_kib: Annotated[int, typer.Option(help="Payload of a page.")] = 1024,
    live_mib: Annotated[int, typer.Option(help="Pages that each store keeps.")] = 512,
    pool_mib: Annotated[int, typer.Option(help="Size of the pools that pages come from and go to.")] = 320,
    entries: Annotated[int, typer.Option(help="Pages in the store that is reopened.")] = 100_000,
    seconds: Annotated[float, typer.Option(help="How long to measure churn; at least five rounds.")] = 40.0,
    readers: Annotated[
        int | None, typer.Option(help="Threads that read from the disk at once; a store's own number by default.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write, evict and read pages in memory and on disk, beside memcpy, one file per block, and plain pwrite/pread."""
    from headwater.lab.bench import store

    options = store.StoreOptions(
        directory=directory,
        disk_directory=disk_directory,
        page_kib=page_kib,
        live_mib=live_mib,
        pool_mib=pool_mib,
        entries=entries,
        seconds=seconds,
        readers=readers,
    )
    _measure(lambda tell: store.run(options, tell=tell), as_json=as_json)


@bench.command("transformers")
def bench_transformers(
    shape: Shape = "tiny",
    device: Device = "cpu",
    dtype: Annotated[str, typer.Option(help="Dtype of the model: float32, bfloat16 or float16.")] = "float32",
    tokens: Annotated[int, typer.Option(help="Length of the prompt.")] = 4096,
    block: BlockTokens = 256,
    rounds: Annotated[int, typer.Option(help="Prompts; figures are medians.")] = 3,
    as_json: Json = False,
) -> None:
    """Time to the first token of transformers' generate: alone, cold, and from a directory; equal bits."""
    from headwater.lab.bench import transformers

    options = transformers.TransformersOptions(
        shape=shape, device=device, dtype=dtype, tokens=tokens, block_tokens=block, rounds=rounds
    )
    _measure(lambda tell: transformers.run(options, tell=tell), as_json=as_json, right="equal")
