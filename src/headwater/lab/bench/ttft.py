"""`headwater bench ttft`: the time to the first token, cold and from each tier, and the cost when nothing hits.

A whole engine with random weights. For each prompt length two prompts take turns on a device that holds only one of
them, so that each comes from the store again; asked twice in a row, the second time it comes from the device. Whether a
hit is loaded or computed again is the cache's decision, by what it has measured; the share that it loaded is told. The
limit is one contiguous copy of the same bytes from pinned memory, and a forward of one token.

Overhead: engines with and without stores serve prompts that nobody has seen, in turns.
"""

import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from headwater.build import open_local
from headwater.config.stores import LocalStoreConfig
from headwater.core.errors import InvalidConfig
from headwater.engine.models.base import Model, Span
from headwater.engine.request import Usage
from headwater.lab.bench.bench_engine import BenchEngine, bench_engine, bench_model, make_prompt
from headwater.lab.bench.report import BenchReport, Samples, Tell
from headwater.lab.bench.shapes import require_shape
from headwater.layout.frame import frame_bytes
from headwater.storage.base import Store
from headwater.storage.scratch import disk_root, limit_for, memory_root
from headwater.transfer.device.arena import create_kv_cache

_WAIT_S: Final = 600.0
_STAGING_PAGES: Final = 16
_PAUSE_S: Final = 0.2  # before each request that is timed, the same for all: a device that was just busy is slower
_NOTES: Final = {
    "lengths": "per prompt length, medians in ms; limit: one contiguous copy of the KV and a one-token forward",
    "loaded": "share of the prompt that the cache chose to load instead of computing it again",
    "off_ms, on_ms": "cold prompts that nobody has seen, without stores and with both, in turns, median",
    "overhead": "on / off, median of the pairs, with the interval of its middle half",
    "throughput_ratio": "prompt tokens per second, on / off, several requests at once, nothing hits; likewise",
}


@dataclass(frozen=True, slots=True)
class TtftOptions:
    """What to measure."""

    shape: str = "tiny"
    device: str = "cpu"
    lengths: tuple[int, ...] = (512, 1024, 2048)
    block_tokens: int = 64
    step_tokens: int = 8192
    rounds: int = 5
    pairs: int = 15
    pair_tokens: int = 1024

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        require_shape(self.shape)
        if min(self.rounds, self.pairs, self.block_tokens, self.step_tokens, self.pair_tokens, *self.lengths) < 1:
            raise InvalidConfig("lengths, rounds, pairs and token counts must be positive")
        if self.rounds < 2:
            raise InvalidConfig("at least two rounds: in the first one everything is new")


def run(options: TtftOptions | None = None, *, tell: Tell | None = None) -> BenchReport:
    """Measure. Blocks for minutes on a large shape."""
    options = options if options is not None else TtftOptions()
    model = bench_model(options.shape, device=options.device, block_tokens=options.block_tokens)
    samples = Samples()
    lengths = []
    with tempfile.TemporaryDirectory(prefix="headwater-ttft-", dir=disk_root()) as disk:
        need = 4 * max(options.lengths) // options.block_tokens * frame_bytes(model.layout.plane_bytes)
        with tempfile.TemporaryDirectory(prefix="headwater-ttft-", dir=memory_root(need)) as memory:
            places = {"host": Path(memory), "disk": Path(disk)}
            for done, num_tokens in enumerate(options.lengths):
                if tell is not None:
                    tell(f"{num_tokens:,} tokens", done, len(options.lengths) + 1)
                lengths.append(_measure_length(model, num_tokens, places, options, samples))
            if tell is not None:
                tell("overhead", len(options.lengths), len(options.lengths) + 1)
            overhead = _measure_overhead(model, places, options, samples)
    return BenchReport(
        command="bench ttft",
        options={name: getattr(options, name) for name in options.__slots__},
        results={"lengths": lengths, **overhead},
        notes=_NOTES,
        samples=samples.values,
    )


def _measure_length(
    model: Model, num_tokens: int, places: dict[str, Path], options: TtftOptions, samples: Samples
) -> dict[str, Any]:
    prompts = [make_prompt(model, num_tokens, seed) for seed in (1, 2)]
    row: dict[str, Any] = {"tokens": num_tokens}
    limit = limit_for(
        frame_bytes=frame_bytes(model.layout.plane_bytes), num_pages=4 * (num_tokens // options.block_tokens + 2)
    )
    for tier, place in places.items():
        directory = place / f"{tier}-{num_tokens}"
        with (
            open_local(LocalStoreConfig(directory=directory, limit_bytes=limit)) as store,
            bench_engine(model, {tier: store}, num_tokens=num_tokens, step_tokens=options.step_tokens) as server,
        ):
            for seed in (3, 4):  # warm up; and what computing costs is measured
                server.ask(make_prompt(model, num_tokens, seed))
                server.rest()
            loaded = []
            for turn in range(2 * options.rounds):
                if turn < 2:
                    _take(server, prompts[turn], f"{num_tokens}_cold_ms", samples)
                    server.rest()
                    continue
                usage = _take(server, prompts[turn % 2], f"{num_tokens}_{tier}_ms", samples)
                loaded.append(usage.cached_by_tier.get(tier, 0) / num_tokens)
                server.rest()
                _take(server, prompts[turn % 2], f"{num_tokens}_device_ms", samples)
            row[f"{tier}_loaded"] = statistics.median(loaded)
        for path in sorted(directory.rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
    for _ in range(options.rounds):
        samples.add(f"{num_tokens}_limit_ms", _limit_s(model, num_tokens) * 1e3)
    for name in ("cold", "device", "host", "disk", "limit"):
        row[f"{name}_ms"] = samples.median(f"{num_tokens}_{name}_ms")
    return row


def _take(server: BenchEngine, prompt: list[int], name: str, samples: Samples) -> Usage:
    time.sleep(_PAUSE_S)
    (usage,) = server.ask(prompt)
    samples.add(name, (usage.ttft_s or 0.0) * 1e3)
    return usage


def _measure_overhead(model: Model, places: dict[str, Path], options: TtftOptions, samples: Samples) -> dict[str, Any]:
    num_tokens = options.pair_tokens
    limit = limit_for(frame_bytes=frame_bytes(model.layout.plane_bytes), num_pages=64)
    with ExitStack() as stack:
        stores: dict[str, Store] = {
            name: stack.enter_context(open_local(LocalStoreConfig(directory=place / "overhead", limit_bytes=limit)))
            for name, place in places.items()
        }
        room, step = 4 * num_tokens, options.step_tokens
        off = stack.enter_context(bench_engine(model, {}, num_tokens=room, step_tokens=step))
        on = stack.enter_context(bench_engine(model, stores, num_tokens=room, step_tokens=step))
        for pair in range(-2, options.pairs):
            for name, server in (("off", off), ("on", on)) if pair % 2 else (("on", on), ("off", off)):
                prompt = make_prompt(model, num_tokens, 100 + 2 * pair + (name == "on"))
                time.sleep(_PAUSE_S)
                (usage,) = server.ask(prompt)
                server.rest()
                if pair >= 0:
                    samples.add(f"{name}_ms", (usage.ttft_s or 0.0) * 1e3)
        for turn in range(options.pairs):
            for name, server in (("off", off), ("on", on)) if turn % 2 else (("on", on), ("off", off)):
                prompts = [
                    make_prompt(model, num_tokens, 10_000 + 100 * turn + 10 * i + (name == "on")) for i in range(3)
                ]
                time.sleep(_PAUSE_S)
                begin_s = time.perf_counter()
                server.ask(*prompts)
                samples.add(f"{name}_tokens_per_s", 3 * num_tokens / (time.perf_counter() - begin_s))
                server.rest()
    return {
        "off_ms": samples.median("off_ms"),
        "on_ms": samples.median("on_ms"),
        **_of_pairs("overhead", samples, "ms"),
        **_of_pairs("throughput_ratio", samples, "tokens_per_s"),
    }


def _of_pairs(name: str, samples: Samples, what: str) -> dict[str, float]:
    """On / off, pair by pair: the median, and the interval of the middle half."""
    ratios = sorted(
        on / off for on, off in zip(samples.values[f"on_{what}"], samples.values[f"off_{what}"], strict=True)
    )
    quarter = len(ratios) // 4
    return {name: statistics.median(ratios), f"{name}_low": ratios[quarter], f"{name}_high": ratios[-1 - quarter]}


def _limit_s(model: Model, num_tokens: int) -> float:
    """One contiguous copy of a prompt's KV to the device, and a forward of one token behind it."""
    num_blocks = -(-(num_tokens + 1) // model.block_tokens)
    num_bytes = num_tokens // model.block_tokens * model.layout.page_bytes
    cuda = model.device.type == "cuda"
    source = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=cuda)
    target = torch.empty(num_bytes, dtype=torch.uint8, device=model.device)
    with create_kv_cache(model.layout, num_blocks, model.device) as planes:
        span = Span(tokens=[5], start=num_tokens, slots=range(num_blocks))
        model.forward(planes, [span]).logits.cpu()
        begin_s = time.perf_counter()
        target.copy_(source, non_blocking=True)
        model.forward(planes, [span]).logits.argmax().cpu()
        return time.perf_counter() - begin_s
