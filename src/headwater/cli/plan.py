"""`headwater plan`: what to buy."""

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from headwater.cli.main import app
from headwater.cli.options import Json, decimals, print_json
from headwater.core.errors import InvalidConfig
from headwater.lab import draw

if TYPE_CHECKING:
    from headwater.lab.plan.search import Plan


@app.command()
def plan(
    trace: Annotated[
        Path,
        typer.Argument(metavar="TRACE", help="JSONL with timestamp (ms), input_length, output_length and hash_ids."),
    ],
    device_gib: Annotated[float, typer.Option(help="KV that the GPUs of one engine hold together.")] = 96.0,
    host_gib: Annotated[
        str, typer.Option(metavar="N,...", help="Sizes of host memory to try; 0: none.")
    ] = "64,256,512,1024",
    disk_gib: Annotated[str, typer.Option(metavar="N,...", help="Sizes of disk to try; 0: none.")] = "512,2048,8192",
    pool_gib: Annotated[
        str, typer.Option(metavar="N,...", help="Sizes of a shared pool to try; 0: none.")
    ] = "512,2048,8192",
    gpu_price: Annotated[float, typer.Option(help="An hour of all GPUs of one engine.")] = 2.5,
    host_price: Annotated[float, typer.Option(help="A GiB of host memory, a month.")] = 0.25,
    disk_price: Annotated[float, typer.Option(help="A GiB of disk, a month.")] = 0.01,
    pool_price: Annotated[float, typer.Option(help="A GiB of the pool, a month.")] = 0.25,
    model: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="A config.json: how large a token's KV is.", show_default="Llama 3.1 8B"),
    ] = None,
    token_bytes: Annotated[
        int | None, typer.Option(help="Or said: bytes of KV a token.", show_default="by the model")
    ] = None,
    prefill: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS:MS,...",
            help="Measured prompts, computed.",
            show_default="2048:47,8192:204,32768:1223, an 8B model on an H200",
        ),
    ] = None,
    paces: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="What `headwater bench store`, `pool` or `ttft` printed with --json; may be given several times.",
            show_default=False,
        ),
    ] = None,
    host_gbs: Annotated[float | None, typer.Option(help="GB/s of host memory.", show_default="40, on an H200")] = None,
    disk_gbs: Annotated[float | None, typer.Option(help="GB/s of the disk.", show_default="3, assumed")] = None,
    pool_gbs: Annotated[float | None, typer.Option(help="GB/s of the pool.", show_default="3, assumed")] = None,
    policy: Annotated[str, typer.Option(help="Who leaves first.")] = "value",
    block_tokens: Annotated[int, typer.Option(help="Tokens of a block of the trace.")] = 512,
    jobs: Annotated[int | None, typer.Option(help="Replays at a time.", show_default="as many as cores")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw it, as .png, .svg, .pdf, or a page, .html.")] = None,
    as_json: Json = False,
) -> None:
    """Say what memory, disk and pool would bring for a trace, in hits and in money a month, and what to buy.

    Replays the trace with the cache's own decisions, once for each choice of sizes, in virtual time.

    All prices are in one currency of yours.
    """
    from headwater.lab.plan import answer, page, search, shape
    from headwater.lab.plan import paces as speeds
    from headwater.lab.replay.bill import default_block_bytes
    from headwater.lab.replay.plot import canvas
    from headwater.lab.replay.trace import TraceFile

    if model is not None and token_bytes is not None:
        raise InvalidConfig("--model and --token-bytes both say how large a token is: give one")
    source_trace = TraceFile(trace, block_tokens=block_tokens, full_blocks_only=True)
    measured = speeds.read_files(paces or ())
    own_size = model is not None or token_bytes is not None
    points, source = speeds.H200_8B, speeds.ASSUMED
    if prefill is not None:
        points, source = speeds.read_points(prefill), speeds.GIVEN
    elif measured.prefill:
        points, source = measured.prefill, measured.prefill_source
        if not own_size and measured.shape != speeds.H200_SHAPE:
            raise InvalidConfig(f"{source} measured a model {measured.shape}: say how large its KV is (--token-bytes)")
    elif own_size:
        raise InvalidConfig(
            "what does this model take to compute? Say --prefill TOKENS:MS,..., or --paces with a bench ttft"
        )
    if model is not None:
        token_bytes = shape.read_token_bytes(model)
    given = {"host": host_gbs, "disk": disk_gbs, "pool": pool_gbs}
    options = search.PlanOptions(
        device_gib=device_gib,
        sizes={
            "host": _sizes("host", host_gib),
            "disk": _sizes("disk", disk_gib),
            "pool": _sizes("pool", pool_gib),
        },
        token_bytes=default_block_bytes(1) if token_bytes is None else token_bytes,
        computing=speeds.fit(points, block_tokens=block_tokens),
        computing_source=source,
        paces={tier: speeds.pace(tier, given[tier], measured) for tier in speeds.TIERS},
        prices=search.Prices(
            gpu_hour=gpu_price, gib_month={"host": host_price, "disk": disk_price, "pool": pool_price}
        ),
        policy=policy,
        jobs=jobs,
    )
    with canvas(plot, page.FORMATS) if plot is not None else nullcontext() as file:
        with draw.progress() as tell:
            found = search.make_plan(source_trace, options, tell=tell)
        if plot is not None and file is not None:
            page.write(found, file, format=plot.suffix[1:].lower())
    if as_json:
        print_json({"command": "plan", **answer.document(found)})
        return
    _draw(found)


def _sizes(tier: str, text: str) -> tuple[float, ...]:
    return tuple(dict.fromkeys(size for size in decimals(f"--{tier}-gib", text) if size))


def _draw(found: "Plan") -> None:
    from headwater.lab.plan import answer, page

    table = draw.new_table(*page.HEADINGS, text=1)
    for best, cells in page.table_rows(found):
        table.add_row(*cells, style="bold" if best else "")
    draw.output().print(table)
    for remark in answer.remarks(found):
        draw.output().print(Text(remark), soft_wrap=True)
    draw.output().print(Text(answer.sentence(found), style="green" if any(found.best.amounts) else ""), soft_wrap=True)
