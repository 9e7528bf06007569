"""The command line: options in, tables or one JSON document out. Decides nothing and measures nothing itself.

Standard output holds the answer and nothing else; progress, questions and errors go to standard error. What is expected
to go wrong (`HeadwaterError`, a file that cannot be opened) is one line and exit code 1, never a traceback.
"""

import errno
import json
import logging
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.text import Text

from headwater import config
from headwater.build import open_local
from headwater.core.errors import HeadwaterError, InvalidConfig, StoreBusy, StoreError
from headwater.core.node_key import NodeKey
from headwater.core.role import Role
from headwater.core.version import __version__
from headwater.lab import draw
from headwater.storage.base import Deadline
from headwater.storage.local import LocalStore, attach, audit

_DESTROY_S: Final = 10.0


class _Group(typer.core.TyperGroup):
    """Turns what is expected to go wrong into one line and exit code 1."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except HeadwaterError as error:
            problem = str(error)
        except MemoryError:
            problem = "not enough memory for that"
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            problem = "this command moves tensors and needs torch: pip install 'headwater[torch]'"
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise
            problem = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        draw.errors().print(Text(f"headwater: {problem}"), style="red", soft_wrap=True)
        raise typer.Exit(1)


app = typer.Typer(
    cls=_Group,
    name="headwater",
    help="A tiered, shared, verified KV cache for LLM serving.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
pool = typer.Typer(help="A Mooncake pool on this machine, shared by its processes.", no_args_is_help=True)
app.add_typer(pool, name="pool")
bench = typer.Typer(help="Measure, beside plain baselines, on this machine and now.", no_args_is_help=True)
app.add_typer(bench, name="bench")

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
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else on standard output.")]
Directory = Annotated[
    Path | None,
    typer.Argument(
        metavar="DIR",
        help="Directory of the store; $HEADWATER_DIR, or ~/.cache/headwater/store, where none is given.",
        show_default=False,
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


def _log_to_stderr() -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # a line per heartbeat and exchange


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"headwater {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Say what concerns all commands; each does its own work."""
    signal.signal(signal.SIGTERM, _interrupt)  # so that whatever was made for a moment is removed


# --- demonstration and benchmarks -------------------------------------------------------------------------------------


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
        _print_json({"command": "demo", "device": device, "results": rows, "all_equal": not unequal})
    else:
        draw.demo(results)
    if unequal:
        raise typer.Exit(1)


@app.command()
def verify(
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A model's directory; without it, tiny ones of every family.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where to compute: cpu or cuda.")] = "cpu",
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
    if vllm:
        _verify_vllm(python or sys.executable, device=device, only=only, out=out, inject=inject, as_json=as_json)
        return
    from headwater.lab import verify as proof

    if pd:
        _verify_pd(pool or "all", model=model, device=device, inject=inject, as_json=as_json)
        return
    if pool is not None:
        raise InvalidConfig("--pool is for --pd: without it nothing goes through a pool")
    with draw.progress() as tell:
        cases = proof.run(model=model, device=device, inject=inject, tell=tell)
    equal = all(case.equal for case in cases)
    if as_json:
        rows = [asdict(case) | {"equal": case.equal} for case in cases]
        _print_json({"command": "verify", "equal": equal, "device": device, "inject": inject, "cases": rows})
    else:
        draw.verified(cases)
    if not equal:
        raise typer.Exit(1)


def _verify_pd(pool: str, *, model: Path | None, device: str, inject: bool, as_json: bool) -> None:
    from headwater.lab.verify import pd

    pools = pd.POOLS if pool == "all" else (pool,)
    with draw.progress() as tell:
        report = pd.run(pools=pools, model=model, device=device, inject=inject, tell=tell)
    _print_json(report.document()) if as_json else draw.verified_pd(report)
    if not report.ok:
        raise typer.Exit(1)


def _verify_vllm(python: str, *, device: str, only: str | None, out: Path | None, inject: bool, as_json: bool) -> None:
    from headwater.lab.verify import vllm as verify_vllm

    def keep(case: str, document: dict[str, Any]) -> None:
        if out is not None:
            _write_json(out, document)

    kinds = tuple(only.split(",")) if only else None
    with draw.progress() as tell:
        report = verify_vllm.run(
            python=python, device=device, kinds=kinds, inject=inject, tell=tell, keep=keep, logs=out and out.parent
        )
    _print_json(report.document()) if as_json else draw.verified_vllm(report)
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

    found = looks.examine(pool=pool or config.default_pool())
    _print_json({"command": "doctor", **looks.document(found)}) if as_json else draw.doctor(found)
    if not found.ok:
        raise typer.Exit(1)


@bench.command("index")
def bench_index(
    tokens: Annotated[int, typer.Option(help="Length of the prompt.")] = 131_072,
    block: Annotated[int, typer.Option(help="Tokens per block.")] = 64,
    rounds: Annotated[int, typer.Option(help="Interleaved repetitions.")] = 21,
    as_json: Json = False,
) -> None:
    """Name the blocks of a long prompt, beside a bare loop of chained SHA-256."""
    from headwater.lab.bench import index

    with draw.progress() as tell:
        report = index.run(num_tokens=tokens, block_tokens=block, rounds=rounds, tell=tell)
    _print_json(report.document()) if as_json else draw.report(report)


@bench.command("cache")
def bench_cache(
    blocks: Annotated[int, typer.Option(help="Length of the prompt that is matched, in blocks.")] = 2048,
    others: Annotated[int, typer.Option(help="Other blocks that are known.")] = 10_000,
    many: Annotated[int, typer.Option(help="Other blocks that are known, in the large case.")] = 1_000_000,
    rounds: Annotated[int, typer.Option(help="Repetitions.")] = 51,
    as_json: Json = False,
) -> None:
    """Match, reserve, commit and release among few and many known blocks, beside a bare dict."""
    from headwater.lab.bench import cache

    with draw.progress() as tell:
        report = cache.run(blocks=blocks, others=others, many=many, rounds=rounds, tell=tell)
    _print_json(report.document()) if as_json else draw.report(report)


@bench.command("ttft")
def bench_ttft(
    shape: Annotated[str, typer.Option(help="Shape of the random model: tiny, 0.5b or 8b.")] = "tiny",
    device: Annotated[str, typer.Option(help="Where to compute: cpu or cuda.")] = "cpu",
    lengths: Annotated[str, typer.Option(help="Prompt lengths, with commas.")] = "512,1024,2048",
    block: Annotated[int, typer.Option(help="Tokens per block.")] = 64,
    step: Annotated[int, typer.Option(help="Tokens computed in one step.")] = 8192,
    rounds: Annotated[int, typer.Option(help="Repetitions.")] = 5,
    pairs: Annotated[int, typer.Option(help="Pairs with and without the cache, to see what it costs.")] = 15,
    pair_tokens: Annotated[int, typer.Option(help="Length of the prompts in those pairs.")] = 1024,
    as_json: Json = False,
) -> None:
    """Time to the first token, cold and from each tier, over prompt lengths; and the cost when nothing hits."""
    from headwater.lab.bench import ttft

    options = ttft.Options(
        shape=shape,
        device=device,
        lengths=tuple(_numbers("lengths", lengths)),
        block_tokens=block,
        step_tokens=step,
        rounds=rounds,
        pairs=pairs,
        pair_tokens=pair_tokens,
    )
    with draw.progress() as tell:
        report = ttft.run(options, tell=tell)
    _print_json(report.document()) if as_json else draw.report(report)


@bench.command("handoff")
def bench_handoff(
    shape: Annotated[str, typer.Option(help="Shape of the random model: tiny, 0.5b or 8b.")] = "tiny",
    device: Annotated[str, typer.Option(help="Where to compute: cpu or cuda.")] = "cpu",
    lengths: Annotated[str, typer.Option(help="Prompt lengths, with commas.")] = "2048,2043",
    block: Annotated[int, typer.Option(help="Tokens per block.")] = 64,
    step: Annotated[int, typer.Option(help="Tokens computed in one step.")] = 2048,
    rounds: Annotated[int, typer.Option(help="Repetitions.")] = 5,
    as_json: Json = False,
) -> None:
    """Hand prompts from one engine process to another through a pool in memory, beside two plain copies."""
    from headwater.lab.bench import handoff

    options = handoff.Options(
        shape=shape,
        device=device,
        lengths=tuple(_numbers("lengths", lengths)),
        block_tokens=block,
        step_tokens=step,
        rounds=rounds,
    )
    with draw.progress() as tell:
        report = handoff.run(options, tell=tell)
    _print_json(report.document()) if as_json else draw.report(report)
    if not report.results["equal"]:
        raise typer.Exit(1)


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

    options = copy.Options(
        device=device,
        layouts=tuple(layouts.split(",")) if layouts is not None else tuple(copy.layouts()),
        blocks=tuple(_numbers("blocks", blocks)) if blocks is not None else None,
        rounds=rounds,
        max_bytes=max_bytes if max_bytes is not None else copy.MAX_BYTES,
    )
    with draw.progress() as tell:
        report = copy.run(options, tell=tell)
    if as_json and "device" in report.notes:
        draw.errors().print(Text(report.notes["device"]), style="yellow", soft_wrap=True)
    _print_json(report.document()) if as_json else draw.copies(report)
    if not report.results["correct"]:
        raise typer.Exit(1)


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

    options = pools.Options(
        stores=tuple(stores.split(",")) if stores is not None else NAMES,
        page_kib=tuple(_numbers("page-kib", page_kib)),
        batch_pages=batch,
        round_mib=round_mib,
        rounds=rounds,
    )
    with draw.progress() as tell:
        report = pools.run(options, tell=tell)
    _print_json(report.document()) if as_json else draw.pools(report)


@bench.command("vllm")
def bench_vllm(
    python: Annotated[
        str | None, typer.Option(metavar="PATH", help="An interpreter that has vLLM.", show_default="this one")
    ] = None,
    device: Annotated[str, typer.Option(help="Where to compute: cpu or cuda.")] = "cpu",
    course: Annotated[
        str | None,
        typer.Option(
            help="turns: all engines are up, and take turns. alone: one after another, each with the whole device, "
            "also its start, crowds, running requests and prompts that nobody has seen.",
            show_default="turns on cpu, alone on cuda",
        ),
    ] = None,
    lmcache: Annotated[
        Path, typer.Option(metavar="DIR", help="Where LMCache lies (`make vllm-peers` puts it there for cpu).")
    ] = Path(".lmc"),
    contenders: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="Connectors to measure; alone: none, ours, offload, lmcache.",
            show_default="all that can be had",
        ),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(help="Shape of the random model: tiny, medium, 8b or mla.", show_default="medium, or 8b on cuda"),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="N,...", help="Shared tokens of the prompts.", show_default="1024,4096; alone 2048,8192,32768"
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option("--rounds", "--repeats", help="Rounds; figures are medians.", show_default="15; alone 5"),
    ] = None,
    pairs: Annotated[int, typer.Option(help="Turns: pairs with and without our connector, to see its cost.")] = 30,
    pair_tokens: Annotated[int, typer.Option(help="Turns: length of the prompts in those pairs.")] = 1024,
    threads: Annotated[int, typer.Option(help="Turns: threads of an engine.")] = 1,
    crowds: Annotated[str, typer.Option(metavar="N,...", help="Alone: prompts at once.")] = "16,64",
    crowd_tokens: Annotated[int, typer.Option(help="Alone: shared tokens of each, and of fresh prompts.")] = 2048,
    running: Annotated[int, typer.Option(help="Alone: requests that run beside others; 0: none.")] = 8,
    beside: Annotated[int, typer.Option(help="Alone: shared tokens of those others.")] = 4096,
    fresh: Annotated[int, typer.Option(help="Alone: prompts that nobody has seen, three times; 0: none.")] = 32,
    answer: Annotated[int, typer.Option(help="Alone: tokens that a running request computes.")] = 384,
    room_gib: Annotated[float, typer.Option(help="Alone: host memory of each connector.")] = 24.0,
    load_when: Annotated[
        str, typer.Option(help="Alone: always, to see what a hit costs; pays is our connector's default.")
    ] = "always",
    disk: Annotated[bool, typer.Option("--disk", help="Alone: ours has a disk tier, too.")] = False,
    warm: Annotated[bool, typer.Option("--warm", help="Alone: start an engine that does not count, first.")] = False,
    models: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Alone: keep weights there for the next run.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Alone: for everything; what does not fit is left out.")] = 360.0,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Alone: what each contender showed is written there as it comes, and its log."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Time to the first token in a real vLLM over shared prefixes, beside other connectors; and the cost of no hits."""
    from headwater.lab.bench import vllm, vllm_alone, vllm_contenders, vllm_stages

    course = course or ("alone" if device == "cuda" else "turns")
    if course not in ("turns", "alone") or (course == "turns" and device != "cpu"):
        raise InvalidConfig("--course is turns (on cpu) or alone")
    names = tuple(vllm_alone.ALIASES.get(name, name) for name in contenders.split(",")) if contenders else None
    interpreter = python if python is not None else sys.executable
    if course == "alone":
        options = vllm_stages.Options(
            python=interpreter,
            device=device,
            contenders=names or vllm_stages.USUAL,
            lmcache=lmcache,
            shape=shape or ("8b" if device == "cuda" else "medium"),
            models=models,
            logs=out,
            lengths=tuple(_numbers("lengths", lengths or "2048,8192,32768")),
            repeats=5 if rounds is None else rounds,
            crowds=tuple(_numbers("crowds", crowds)) if crowds else (),
            crowd_tokens=crowd_tokens,
            running=running,
            running_answer=answer,
            others_tokens=beside,
            fresh=fresh,
            fresh_tokens=crowd_tokens,
            room_gib=room_gib,
            load_when=load_when,
            disk=disk,
            warm=warm,
            seconds=seconds,
        )
        with draw.progress() as tell:
            report = vllm_alone.run(options, tell=tell, keep=_keep_in(out))
        if out is not None:
            _write_json(out / "vllm.json", report.document())
    else:
        turns = vllm.Options(
            python=interpreter,
            lmcache=lmcache,
            contenders=names or vllm_contenders.NAMES,
            shape=shape or "medium",
            lengths=tuple(_numbers("lengths", lengths or "1024,4096")),
            rounds=15 if rounds is None else rounds,
            pairs=pairs,
            pair_tokens=pair_tokens,
            threads=threads,
        )
        with draw.progress() as tell:
            report = vllm.run(turns, tell=tell)
    if as_json:
        _print_json(report.document())
    else:
        draw.contenders(report) if course == "alone" else draw.report(report)
    if not report.results["tokens_equal"]:
        raise typer.Exit(1)


def _keep_in(directory: Path | None) -> Callable[[str, Mapping[str, Any]], None]:
    """Write what was measured so far into a file of its own; without a directory, say it."""
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)

    def keep(name: str, found: Mapping[str, Any]) -> None:
        if directory is not None:
            _write_json(directory / f"vllm-{name}.json", found)
        stage = list(found)[-1]
        said = "" if directory is not None else f" {json.dumps(found[stage])}"
        draw.errors().print(Text(f"{name}: {stage}{said}"), soft_wrap=True, highlight=False)

    return keep


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Whole, or not at all."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


@bench.command("serve")
def bench_serve(
    conversations: Annotated[int, typer.Option(help="Conversations at once.")] = 8,
    turns: Annotated[int, typer.Option(help="Questions of each.")] = 6,
    max_tokens: Annotated[int, typer.Option(help="Length of an answer.")] = 64,
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A model's directory.", show_default="a tiny random one")
    ] = None,
    device: Annotated[str, typer.Option(help="Where to compute: cpu or cuda.")] = "cpu",
    as_json: Json = False,
) -> None:
    """Hold conversations over HTTP, with the cache and without: what is computed, when tokens come, equal answers."""
    from headwater.lab.bench import serve as load

    options = load.Options(conversations=conversations, turns=turns, max_tokens=max_tokens, model=model, device=device)
    with draw.progress() as tell:
        report = load.run(options, tell=tell)
    _print_json(report.document()) if as_json else draw.report(report)
    if not report.results["answers_equal"]:
        raise typer.Exit(1)


@bench.command("pd")
def bench_pd(
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A model's directory.", show_default="a random one")
    ] = None,
    shape: Annotated[str, typer.Option(help="Shape of the random model: demo, tiny or 0.5b.")] = "tiny",
    device: Annotated[str, typer.Option(help="Where to compute: cpu or cuda.")] = "cpu",
    pool: Annotated[
        str, typer.Option(metavar="POOL", help="local, redis or mooncake, started for this; or a pool's URL.")
    ] = "local",
    block: Annotated[int, typer.Option(help="Tokens per block.")] = 16,
    step: Annotated[int, typer.Option(help="Tokens computed in one step.")] = 512,
    lengths: Annotated[str, typer.Option(help="Prompt lengths, with commas.")] = "512,2048,4096",
    max_tokens: Annotated[int, typer.Option(help="Length of an answer.")] = 16,
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

    options = apart.Options(
        model=model,
        shape=shape,
        device=device,
        pool=pool,
        block_tokens=block,
        step_tokens=step,
        lengths=tuple(_numbers("lengths", lengths)),
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
    with draw.progress() as tell:
        report = apart.run(options, tell=tell)
    _print_json(report.document()) if as_json else draw.report(report)
    if not report.results["answers_equal"]:
        raise typer.Exit(1)


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
    as_json: Json = False,
) -> None:
    """Write, evict and read pages in memory and on disk, beside memcpy, one file per block, and plain pwrite/pread."""
    from headwater.lab.bench import store

    options = store.Options(
        directory=directory,
        disk_directory=disk_directory,
        page_kib=page_kib,
        live_mib=live_mib,
        pool_mib=pool_mib,
        entries=entries,
        seconds=seconds,
    )
    with draw.progress() as tell:
        report = store.run(options, tell=tell)
    _print_json(report.document()) if as_json else draw.report(report)


# --- the server -------------------------------------------------------------------------------------------------------


@app.command()
def serve(
    model: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A Hugging Face directory.", show_default="a tiny model, made once"),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="What clients call the model.", show_default="the directory's name")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(help="Port to listen on.", show_default=f"{config.DEFAULT_PORT}, or a free one")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            help="Clients must show it; better set $HEADWATER_API_KEY, which others on this machine cannot see."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
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
    look_timeout: Annotated[
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
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Compute every prompt in full, and keep nothing: to compare.")
    ] = False,
    max_running: Annotated[int, typer.Option(help="Requests that are computed together.")] = 16,
    max_waiting: Annotated[int, typer.Option(help="Requests that may wait; more are sent away (429).")] = 256,
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
    ] = config.RECORD_BYTES,
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

    _log_to_stderr()
    index_only = index_only or config.index_only()
    options = config.ServeConfig(
        model=model or start.tiny_model(config.cache_directory()),
        name=name,
        host=host,
        port=config.DEFAULT_PORT if port is None else port,
        api_key=_key(api_key, config.default_api_key()),
        device=device,
        dtype=dtype,
        kv=kv,
        generation_config=generation_config,
        block_tokens=block_tokens,
        num_blocks=num_blocks,
        device_bytes=None if device_mib is None else device_mib << 20,
        host_directory=(host_dir or config.default_host_directory()) if host_mib != 0 and not no_cache else None,
        host_bytes=host_mib << 20 if host_mib else None,
        disk_directory=(disk_dir or config.default_directory()) if disk_mib != 0 and not no_cache else None,
        disk_bytes=disk_mib << 20 if disk_mib else None,
        pool=pool or (None if no_cache or index_only else config.default_pool()),
        residency=residency or (None if no_cache else config.default_residency()),
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
        pd_via=config.pd_via(),
        pd_timeout_s=pd_timeout,
        pd_recompute=recompute,
        look_timeout_s=look_timeout,
        load_timeout_s=load_timeout,
        max_body_bytes=max_body_mib << 20,
        max_prompt_chars=max_prompt_chars,
        max_connections=max_connections,
        allowed_hosts=tuple(allow_host or ()),
        max_running=max_running,
        max_waiting=max_waiting,
        step_tokens=step_tokens,
        request_timeout_s=timeout,
        cache=not no_cache,
        record=record,
        record_bytes=record_bytes,
    )
    start.run(options, any_port=port is None, say=typer.echo)


@app.command()
def revive(
    what: Annotated[
        str | None, typer.Argument(help="A tier's name, or `brain`.", show_default="all that is off")
    ] = None,
    url: Annotated[
        str, typer.Option(metavar="URL", help="Where the server is.")
    ] = f"http://127.0.0.1:{config.DEFAULT_PORT}",
    api_key: Annotated[
        str | None, typer.Option(help="The server's key.", show_default="$HEADWATER_API_KEY, or none")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait: a store may have to be rebuilt.")] = 120.0,
    as_json: Json = False,
) -> None:
    """Have a server use again what its cache has switched off: a damaged tier, a brain that failed. No restart."""
    from headwater.serve.revive import ask_to_revive

    key = _key(api_key, config.default_api_key())
    found = ask_to_revive(url.rstrip("/"), what=what, key=key, timeout_s=timeout)
    _print_json({"command": "revive", **found.document()}) if as_json else draw.revived(found)
    if found.still_off:
        raise typer.Exit(1)


def _key(option: str | None, default: str | None) -> str | None:
    """A key as an option says it, or else the default. One that is empty must not open the door."""
    if option == "":
        raise InvalidConfig("a key is not empty: leave the option out to want none")
    return default if option is None else option


def _role(text: str) -> Role:
    try:
        return Role(text)
    except ValueError as error:
        raise InvalidConfig(f"a role is one of {', '.join(Role)}, not {text!r}") from error


# --- prefill and decode apart -----------------------------------------------------------------------------------------


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
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
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
    timeout: Annotated[float, typer.Option(help="Seconds that a request may take.")] = 600.0,
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
    from headwater.serve import vllm_start
    from headwater.serve.vllm_node import NodeOptions

    _log_to_stderr()
    where = pool or config.default_pool()
    if where is None:
        raise InvalidConfig("a node hands KV over through the pool of vLLM's connector: say --pool URL")
    if role not in list(Role):
        raise InvalidConfig(f"a role is one of {', '.join(Role)}, not {role!r}")
    for url in (vllm, *(router or ()), *(() if advertise is None else (advertise,))):
        config.require_url("an address", url)
    options = NodeOptions(
        vllm=vllm,
        role=Role(role),
        node_key=find_node_key(node_key_file),
        vllm_key=_key(vllm_key, config.default_vllm_key()),
        max_requests=max_requests,
        request_timeout_s=timeout,
        pool_timeout_s=pool_timeout,
    )
    vllm_start.run(
        options,
        pool=where,
        host=host,
        port=port,
        routers=router or (),
        node=node,
        advertise=advertise,
        lease_s=lease,
        wait_s=wait,
        max_connections=max_connections,
        allowed_hosts=config.require_hosts(allow_host or ()),
        say=typer.echo,
    )


@app.command()
def router(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(help="Port to listen on.", show_default=f"{config.DEFAULT_PORT}, or a free one")
    ] = None,
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
    api_key: Annotated[
        str | None,
        typer.Option(
            help="Clients must show it; better set $HEADWATER_API_KEY, which others on this machine cannot see.",
            show_default=False,
        ),
    ] = None,
    node_key_file: NodeKeyFile = None,
    timeout: Annotated[float, typer.Option(help="Seconds that a request may take.")] = 600.0,
    queue_timeout: Annotated[float, typer.Option(help="Seconds that it may wait for a node with room.")] = 30.0,
    silence: Annotated[
        float, typer.Option(help="Seconds that a node may say nothing, before it is asked whether it hangs.")
    ] = 10.0,
    max_attempts: Annotated[int, typer.Option(help="Nodes that may fail a request, before it fails.")] = 4,
    max_prefills: Annotated[int, typer.Option(help="Times that a lost prompt is prefilled; 1: never again.")] = 3,
    max_requests: Annotated[int, typer.Option(help="Requests at a time; more are sent away (429).")] = 1024,
    max_connections: MaxConnections = 1024,
    allow_host: AllowHost = None,
) -> None:
    """Stand before prefill, decode and mixed nodes: one address for clients, who is asked, and whether again."""
    from headwater.disagg.key_file import find_node_key
    from headwater.disagg.settings import RouterConfig
    from headwater.serve import router_start

    _log_to_stderr()
    options = RouterConfig(
        api_key=_key(api_key, config.default_api_key()),
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
        port=config.DEFAULT_PORT if port is None else port,
        any_port=port is None,
        residency=residency or config.default_residency(),
        model=model,
        max_connections=max_connections,
        allowed_hosts=config.require_hosts(allow_host or ()),
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
    from headwater.serve import operate

    config.require_url("an address of a router", router.rstrip("/"))
    found = operate.drain(router.rstrip("/"), node, draining=not back, key=find_node_key(node_key_file))
    if as_json:
        _print_json({"command": "drain", **found})
    else:
        state = "gets nothing new" if found["draining"] else "gets requests"
        typer.echo(f"{found['node']} {state}, and works on {found['requests']} requests of this router")


@app.command()
def pd(
    model: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A Hugging Face directory.", show_default="a tiny model, made once"),
    ] = None,
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
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(help="The router's port.", show_default=f"{config.DEFAULT_PORT}, or a free one")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    num_blocks: Annotated[int | None, typer.Option(help="Blocks of KV on each device.", show_default="many")] = None,
) -> None:
    """Start a pool, a router and nodes on this machine; say where they are. Ctrl-C ends them all."""
    from headwater.fleet import Fleet, FleetOptions
    from headwater.serve import start
    from headwater.serve.sockets import curl

    _log_to_stderr()
    directory = model or start.tiny_model(config.cache_directory())
    index = residency or config.default_residency()
    options = FleetOptions(
        prefill=prefill,
        decode=decode,
        mixed=mixed,
        pool=pool or config.default_pool(),
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
        typer.echo(f"the pool is {fleet.pool if pool is None and not config.default_pool() else 'yours'}")
        typer.echo(f"the router answers on {fleet.url}/v1; {fleet.url}/state shows what it decides")
        typer.echo(curl(fleet.url, with_key=config.default_api_key() is not None))
        with suppress(KeyboardInterrupt):
            fleet.watch(lambda text: draw.errors().print(Text(text), style="red", soft_wrap=True))


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


# --- a pool on this machine -------------------------------------------------------------------------------------------

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
    from headwater.storage.mooncake_config import parse_size

    found = local.up(directory or config.default_pool_directory(), segment_bytes=parse_size(size))
    _print_json({"command": "pool up", **found.document()}) if as_json else draw.pool(found)


@pool.command("down")
def pool_down(directory: PoolDirectory = None, as_json: Json = False) -> None:
    """End them, with all that they hold."""
    from headwater.pool import local

    path = directory or config.default_pool_directory()
    num_ended = local.down(path)
    if as_json:
        _print_json({"command": "pool down", "directory": str(path), "num_ended": num_ended})
    else:
        typer.echo(f"{num_ended} processes ended" if num_ended else f"there is no pool in {path}")


@pool.command("status")
def pool_status(directory: PoolDirectory = None, as_json: Json = False) -> None:
    """Show what runs, where, and what it holds; exit code 1 if it does not run."""
    from headwater.pool import local

    found = local.status(directory or config.default_pool_directory())
    _print_json({"command": "pool status", **found.document()}) if as_json else draw.pool(found)
    if not found.up:
        raise typer.Exit(1)


# --- replays ----------------------------------------------------------------------------------------------------------


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
        str | None, typer.Option(metavar="KIND", help="Instead of TRACE, make one up: chat, agents or documents.")
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
    from headwater.lab.replay.bill import Setup
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
    default = replays.CAPACITIES if plot is None else replays.PLOT_CAPACITIES
    setups = [
        Setup(
            policy=name,
            blocks=number,
            store_blocks=store_blocks,
            store_gbs=store_gbs,
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
    _print_json({"command": "replay", **found.document()}) if as_json else draw.replays(found)


def _replay_events(path: Path, *, as_json: bool) -> None:
    from headwater.lab.replay.events import replay_events

    with draw.progress() as tell:
        found = replay_events(path, tell=tell)
    _print_json({"command": "replay --events", **found.document()}) if as_json else draw.recording(found)
    if not found.same:
        raise typer.Exit(1)


# --- models -----------------------------------------------------------------------------------------------------------


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
        _print_json({"command": "make-model", **asdict(made)})
    else:
        size = f"{made.num_parameters:,} parameters, {made.num_bytes:,} bytes"
        typer.echo(f"{made.directory}: a random {made.family}, {size}, seed {made.seed}")


# --- directories ------------------------------------------------------------------------------------------------------


@app.command("ls")
def list_(directory: Directory = None, as_json: Json = False) -> None:
    """Show what is in a directory, by identity and tenant."""
    with _open(directory) as store:
        found = audit.survey(store)
    if as_json:
        _print_json({"command": "ls", **found.document()})
    else:
        draw.survey(found)


@app.command()
def purge(
    directory: Directory = None,
    identity: Annotated[
        str | None, typer.Option(metavar="HEX", help="Only this identity; the first digits will do.")
    ] = None,
    tenant: Annotated[
        str | None, typer.Option(metavar="HEX", help="Only this tenant; `-` is the one without a salt.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="The whole store, its files included; nobody else may have it open.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Remove pages of an identity, a tenant, or all, and wipe them."""
    if everything == (identity is not None or tenant is not None):
        raise InvalidConfig("say what to remove: --identity and/or --tenant, or --all")
    if as_json and not yes:
        raise InvalidConfig("--json asks no questions: add --yes")
    path = directory or config.default_directory()
    audit.require_store(path)
    purged = _purge_all(path, yes=yes) if everything else _purge_some(path, identity, tenant, yes=yes)
    if as_json:
        _print_json({"command": "purge", "directory": str(path), "all": everything, **asdict(purged)})
    else:
        draw.output().print(Text(f"{purged.num_pages:,} pages removed, {draw.size(purged.num_bytes)}"))
        if purged.num_left:
            draw.errors().print(f"{purged.num_left:,} pages could not be removed in time: try again", style="red")
    if purged.num_left:
        raise typer.Exit(1)


def _purge_some(path: Path, identity: str | None, tenant: str | None, *, yes: bool) -> audit.Purged:
    with _open(path) as store:
        families = audit.survey(store).families
        chosen = audit.select(families, identity_prefix=identity, tenant_prefix=tenant)
        num_pages = sum(family.num_pages for family in chosen)
        num_bytes = sum(family.num_bytes for family in chosen)
        _confirm(f"Remove {num_pages:,} pages ({draw.size(num_bytes)}) from {path}?", yes=yes)
        with draw.progress() as tell:
            return audit.purge(store, chosen, progress=lambda done, total: tell("removing", done, total))


def _purge_all(path: Path, *, yes: bool) -> audit.Purged:
    num_pages = num_bytes = 0
    try:
        with _open(path) as store:
            found = audit.survey(store)
        num_pages, num_bytes = found.num_live, sum(family.num_bytes for family in found.families)
    except StoreBusy:
        raise
    except StoreError as error:  # damaged, or of another version: all the more reason to remove it
        draw.errors().print(Text(f"the pages cannot be counted: {error}"), style="yellow")
    _confirm(f"Remove the whole store in {path} ({num_pages:,} pages, {draw.size(num_bytes)})?", yes=yes)
    attach.destroy(path, deadline=Deadline.after(_DESTROY_S))
    return audit.Purged(num_pages=num_pages, num_bytes=num_bytes, num_left=0)


@app.command()
def check(
    directory: Directory = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove bad pages, and what builds on them.")] = False,
    as_json: Json = False,
) -> None:
    """Read and verify every page; exit code 1 if one is bad."""
    with _open(directory) as store, draw.progress() as tell:
        found = audit.check(store, remove=remove, progress=lambda done, total: tell("checking", done, total))
    if as_json:
        _print_json({"command": "check", **found.document()})
    else:
        draw.checked(found)
    if not found.intact:
        raise typer.Exit(1)


@contextmanager
def _open(directory: Path | None) -> Iterator[LocalStore]:
    """Open the store of a directory, only if there is one."""
    path = directory or config.default_directory()
    audit.require_store(path)
    with open_local(config.LocalStoreConfig(directory=path)) as store:
        yield store


def _confirm(question: str, *, yes: bool) -> None:
    if not yes:
        draw.errors().print(Text(f"{question} [y/N]: "), end="")
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise typer.Exit(1)


def _print_json(document: Mapping[str, Any]) -> None:
    typer.echo(json.dumps(document, indent=2))


def _numbers(name: str, text: str) -> list[int]:
    try:
        return [int(one) for one in text.split(",")]
    except ValueError as error:
        raise InvalidConfig(f"{name} are whole numbers with commas, not {text!r}") from error
