"""`headwater bench vllm`: under a real vLLM, beside others."""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from headwater.cli.bench import bench
from headwater.cli.options import Device, Json, numbers, print_json, write_json
from headwater.core.errors import InvalidConfig
from headwater.lab import draw, draw_figures


@bench.command("vllm")
def bench_vllm(
    python: Annotated[
        str | None, typer.Option(metavar="PATH", help="An interpreter that has vLLM.", show_default="this one")
    ] = None,
    device: Device = "cpu",
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
        options = vllm_stages.StageOptions(
            python=interpreter,
            device=device,
            contenders=names or vllm_stages.USUAL,
            lmcache=lmcache,
            shape=shape or ("8b" if device == "cuda" else "medium"),
            models=models,
            logs=out,
            lengths=tuple(numbers("lengths", lengths or "2048,8192,32768")),
            repeats=5 if rounds is None else rounds,
            crowds=tuple(numbers("crowds", crowds)) if crowds else (),
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
            write_json(out / "vllm.json", report.document())
    else:
        turns = vllm.VllmOptions(
            python=interpreter,
            lmcache=lmcache,
            contenders=names or vllm_contenders.NAMES,
            shape=shape or "medium",
            lengths=tuple(numbers("lengths", lengths or "1024,4096")),
            rounds=15 if rounds is None else rounds,
            pairs=pairs,
            pair_tokens=pair_tokens,
            threads=threads,
        )
        with draw.progress() as tell:
            report = vllm.run(turns, tell=tell)
    if as_json:
        print_json(report.document())
    else:
        draw_figures.contenders(report) if course == "alone" else draw_figures.report(report)
    if not report.results["tokens_equal"]:
        raise typer.Exit(1)


def _keep_in(directory: Path | None) -> Callable[[str, Mapping[str, Any]], None]:
    """Write what was measured so far into a file of its own; without a directory, say it."""
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)

    def keep(name: str, found: Mapping[str, Any]) -> None:
        if directory is not None:
            write_json(directory / f"vllm-{name}.json", found)
        stage = list(found)[-1]
        said = "" if directory is not None else f" {json.dumps(found[stage])}"
        draw.errors().print(Text(f"{name}: {stage}{said}"), soft_wrap=True, highlight=False)

    return keep
