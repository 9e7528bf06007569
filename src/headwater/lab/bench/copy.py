"""`headwater bench copy`: how near the copy engine comes to one contiguous copy, for every layout and count.

Blocks lie at random places of a device, frames one behind the other in registered host memory, as a store's slots do.
In each round everybody moves the same blocks, in turns: one contiguous copy of as many bytes (the limit), others'
ways, ours without digests, ours. Times are of a waiting caller's clock, from the call until the last byte is there.
Before anything is timed, random blocks go to the host and back into other blocks, where every byte is compared.

Then the model's view: matrix products with copies beside them and without (`copy_gemm.py`); and the whole way through
cache and index (`copy_whole.py`). Without CUDA the reference is measured, in small: no figure of a wire.
"""

import gc
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch

from headwater.core.errors import InvalidConfig
from headwater.lab.bench import copy_whole
from headwater.lab.bench.copy_course import NAMES, CopyCourse, cut_frames, finish, frame_stride
from headwater.lab.bench.copy_gemm import Gemm, beside_s, slowdowns
from headwater.lab.bench.copy_paths import Limit
from headwater.lab.bench.report import BenchReport, Samples, Tell
from headwater.layout.dsa import dsa_layout
from headwater.layout.frame import frame_bytes
from headwater.layout.gqa import gqa_fp8_layout, gqa_layout
from headwater.layout.mla import mla_layout
from headwater.layout.spec import DType, KVLayout, combine
from headwater.transfer.device.arena import create_host_cache, create_kv_cache
from headwater.transfer.device.copy_engine import CopyEngine
from headwater.transfer.device.wire import Direction

BLOCKS: Final = (1, 8, 64, 512, 2048)
CPU_BLOCKS: Final = (1, 8)
MAX_BYTES: Final = 8 << 30
_SMALL_BYTES: Final = 64 << 20  # such transfers are over so soon that a median needs more of them
_LARGE_BYTES: Final = 1 << 30
_GEMM_BYTES: Final = 128 << 20  # smaller ones are over before one product is
_BESIDE_ROUNDS: Final = 3
_BASELINES_OF: Final = ("gqa-64", "gqa-16", "mla")
_WHOLE_LAYOUT: Final = "gqa-64"
_WHOLE_BLOCKS: Final = 512  # 4 GiB
_WHOLE_ROUNDS: Final = 2
_NOTES: Final = {
    "rows": "per layout and number of blocks; ratios: time of one contiguous copy of the same bytes / time, of medians",
    "d2h_ratio, h2d_ratio": "the copy engine, digests on and compared, frames in order",
    "*_plain": "the same without digests",
    "*_scattered": "the same with digests, frames in random order",
    "*_batch, *_pieces": "others' ways: one cudaMemcpyBatchAsync, or a call per block and plane",
    "both_ratio": "both directions at once / two contiguous copies at once, both_blocks blocks each way",
    "submit_ms": "how long gather() and scatter() keep their caller, the slower of the two, median",
    "gemm_slowdown": "products of 8192 x 8192 bf16 beside copies / without, the worse direction, median of 30 windows",
    "*_beside_gemm": "the copy engine while such products run / one contiguous copy while none do",
    "correct": "every byte of every way there and back, digests as xxhash has them, and all digests in timed copies",
    "d2h_gbs, h2d_gbs": "the largest row's contiguous copy",
    "store_gbs, load_gbs": "whole_bytes between device and a store in memory, through cache and index, verified",
    "store_ratio, load_ratio": "store_gbs / d2h_gbs, load_gbs / h2d_gbs",
    "staging_bytes, leaked_bytes": "memory on the device that an engine takes, and what is left of it after close()",
    "steady_allocations": "allocations on the device by one more gather and scatter",
}


def layouts() -> dict[str, KVLayout]:
    """The layouts that are measured, by name: whole models; pure."""
    gqa = partial(gqa_layout, num_kv_heads=8, head_dim=128, dtype=DType.BF16)
    return {
        "gqa-64": gqa(num_layers=32, block_tokens=64),
        "gqa-16": gqa(num_layers=32, block_tokens=16),
        "gqa-fp8": gqa_fp8_layout(num_layers=32, num_kv_heads=8, head_dim=128, block_tokens=64),
        "mla": mla_layout(num_layers=61, block_tokens=64),
        "dsa": dsa_layout(num_layers=61, block_tokens=64),
        "mixed": combine(
            gqa(num_layers=16, block_tokens=64), mla_layout(num_layers=16, block_tokens=64, layer_offset=16)
        ),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOptions:
    """What to measure. `device`: None is what there is; `blocks`: None is as many as make sense there."""

    device: str | None = None
    layouts: tuple[str, ...] = tuple(layouts())
    blocks: tuple[int, ...] | None = None
    rounds: int = 7
    max_bytes: int = MAX_BYTES

    def __post_init__(self) -> None:
        """Refuse what cannot be measured."""
        unknown = sorted(set(self.layouts) - set(layouts()))
        if unknown:
            raise InvalidConfig(f"no layout {unknown[0]!r}; there are: {', '.join(layouts())}")
        if min(self.rounds, self.max_bytes, *(self.blocks or (1,))) < 1:
            raise InvalidConfig("blocks, rounds and max-bytes must be positive")
        if self.device not in (None, "cpu", "cuda"):
            raise InvalidConfig(f"device must be cpu or cuda, not {self.device!r}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise InvalidConfig("no CUDA device here: use --device cpu")


def run(options: CopyOptions, *, tell: Tell | None = None) -> BenchReport:
    """Measure. Blocks for minutes. `results["correct"]`: whether all bytes were right. Raises what a device raises."""
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    cuda = device.type == "cuda"
    counts = sorted(set(options.blocks or (BLOCKS if cuda else CPU_BLOCKS)))
    chosen = {name: layout for name, layout in layouts().items() if name in options.layouts}
    samples = Samples()
    rows = _rows(chosen, counts, options, device, samples, tell)
    results: dict[str, Any] = {
        "device": device.type,
        "gpu": torch.cuda.get_device_name(device) if cuda else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "correct": all(row.get("correct", True) for row in rows),
        "rows": rows,
    }
    largest = max((row for row in rows if "skipped" not in row), key=lambda row: int(row["bytes"]), default=None)
    for name in NAMES.values():
        results[f"{name}_gbs"] = None if largest is None else largest[f"{name}_limit_gbs"]
    if tell is not None:
        tell("staging and the whole way", 0, 1)
    results |= _staging(device)
    layout = layouts()[_WHOLE_LAYOUT]
    whole_blocks = min(_WHOLE_BLOCKS if cuda else max(counts), options.max_bytes // frame_stride(layout))
    if whole_blocks:
        whole = copy_whole.run(layout, whole_blocks, rounds=_WHOLE_ROUNDS, device=device, samples=samples)
        results |= whole
        results["correct"] &= whole.get("whole_correct", True)
        for ours, limit in (("store", "d2h"), ("load", "h2d")):
            if f"{ours}_gbs" in whole and results[f"{limit}_gbs"]:
                results[f"{ours}_ratio"] = whole[f"{ours}_gbs"] / results[f"{limit}_gbs"]
    notes = dict(_NOTES)
    if not cuda:
        notes["device"] = "no CUDA device is used: this is the reference for CPUs, and no figure of a wire"
    return BenchReport(
        command="bench copy",
        options=asdict(options) | {"device": device.type, "blocks": counts},
        results=results,
        notes=notes,
        samples=samples.values,
    )


def _rows(
    chosen: dict[str, KVLayout],
    counts: Sequence[int],
    options: CopyOptions,
    device: torch.device,
    samples: Samples,
    tell: Tell | None,
) -> list[dict[str, Any]]:
    sizes = [count * frame_stride(layout) for layout in chosen.values() for count in counts]
    area_bytes = max((size for size in sizes if size <= options.max_bytes), default=0)
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        if area_bytes:  # registered once: that takes seconds
            area = stack.enter_context(create_host_cache(area_bytes, 1)).page(0)
            limit = Limit(area, device)
            stack.callback(limit.close)
        gemm = Gemm(device) if device.type == "cuda" else None
        for name, layout in chosen.items():
            fitting = [count for count in counts if count * frame_stride(layout) <= area_bytes]
            if fitting:
                rows += _measure(name, layout, fitting, area, limit, gemm, options, samples, tell)
            for count in counts[len(fitting) :]:
                found = {"layout": name, "blocks": count, "bytes": count * layout.page_bytes}
                rows.append(found | {"skipped": f"more host memory than --max-bytes {options.max_bytes}"})
    return rows


def _measure(
    name: str,
    layout: KVLayout,
    counts: Sequence[int],
    area: memoryview,
    limit: Limit,
    gemm: Gemm | None,
    options: CopyOptions,
    samples: Samples,
    tell: Tell | None,
) -> list[dict[str, Any]]:
    """One layout's rows."""
    rows: list[dict[str, Any]] = []
    frames = cut_frames(area, layout)
    device = limit.device
    with (
        create_kv_cache(layout, 2 * max(counts), device) as cache,
        CopyEngine(cache) as engine,
        CopyEngine(cache, digests=False) as plain,
    ):
        ids = np.random.default_rng(0).permutation(cache.num_blocks).tolist()
        for done, count in enumerate(counts):
            if tell is not None:
                tell(f"{name}, {layout.page_bytes:,} bytes a block", done, len(counts))
            course = CopyCourse(cache, (engine, plain), limit, frames, ids=ids, num_blocks=count)
            course.check()
            course.take(
                _num_rounds(options.rounds, course.num_bytes), baselines=gemm is not None and name in _BASELINES_OF
            )
            row: dict[str, Any] = {"layout": name, "blocks": count, "bytes": course.num_bytes, **course.figures()}
            row |= _beside_gemm(course, gemm if course.num_bytes >= _GEMM_BYTES else None)
            rows.append({key: _rounded(value) for key, value in row.items()} | {"correct": course.correct})
            for way in NAMES.values():
                pairs = zip(course.seconds.values[f"{way}_limit"], course.seconds.values[way], strict=True)
                for limit_s, ours_s in pairs:
                    samples.add(f"{name} {count} {way}_ratio", limit_s / ours_s)
    return rows


def _num_rounds(rounds: int, num_bytes: int) -> int:
    if num_bytes < _SMALL_BYTES:
        return 3 * rounds
    return rounds if num_bytes < _LARGE_BYTES else -(-rounds // 2)


def _beside_gemm(course: CopyCourse, gemm: Gemm | None) -> dict[str, Any]:
    """What copies cost products, and products copies; all None where copies are too short, or there is no GPU."""
    found: dict[str, Any] = {"gemm_slowdown": None}
    for name in NAMES.values():
        found |= {f"{name}_gemm_slowdown": None, f"{name}_ratio_beside_gemm": None}
    if gemm is None:
        return found
    finish(course.submit(Direction.OUT))  # the frames are what they should be again
    copies = {name: partial(course.submit, direction) for direction, name in NAMES.items()}
    slower = slowdowns(gemm, copies)
    found["gemm_slowdown"] = max(slower.values())
    for name, submit in copies.items():
        found[f"{name}_gemm_slowdown"] = slower[name]
        for _ in range(_BESIDE_ROUNDS):
            course.seconds.add(f"{name}_beside", beside_s(gemm, submit, course.seconds.median(name)))
        found[f"{name}_ratio_beside_gemm"] = course.ratio(f"{name}_beside", f"{name}_limit")
    return found


def _staging(device: torch.device) -> dict[str, Any]:
    """Memory on the device that an engine takes, what is left after close(), and whether it allocates in between."""
    gc.collect()  # what rows left behind must not go away meanwhile
    layout = layouts()[_WHOLE_LAYOUT]
    num = 2
    with create_kv_cache(layout, num, device) as cache, create_host_cache(frame_bytes(layout.plane_bytes), num) as host:
        frames = [host.page(i) for i in range(num)]
        before = _allocated(device)
        engine = CopyEngine(cache)
        taken = _allocated(device)
        for _ in range(2):  # the first time kernels may be loaded
            calls = _allocations(device)
            finish(engine.gather(range(num), frames))
            finish(engine.scatter(frames, range(num)))
            calls = _allocations(device) - calls
        engine.close()
        return {
            "staging_bytes": taken - before,
            "leaked_bytes": _allocated(device) - before,
            "steady_allocations": calls,
        }


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _allocations(device: torch.device) -> int:
    return int(torch.cuda.memory_stats(device)["allocation.all.allocated"]) if device.type == "cuda" else 0


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value
