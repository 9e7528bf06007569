"""`headwater doctor`: what this machine allows, line by line, and what to do about what it does not.

A line is ok, a warning (Headwater works, with less), or a failure (something that is there does not work). Tries things
rather than believing versions: registers memory, runs the kernels and compares their digests, copies. Changes nothing.
"""

import mmap
import os
import platform
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from headwater.build import open_pool
from headwater.config.stores import pool_kind
from headwater.core.errors import HeadwaterError, HostTierUnavailable, InvalidConfig
from headwater.core.results import Status
from headwater.core.version import __version__
from headwater.lab.finding import FAIL, OK, WARN, Check
from headwater.lab.pool_diagnosis import diagnose
from headwater.layout.digest import plane_digests
from headwater.layout.frame import PageMeta, frame_bytes, header_bytes, seal
from headwater.layout.spec import opaque_layout
from headwater.storage.base import Deadline, Store
from headwater.storage.local import directory
from headwater.storage.verified import VerifiedStore
from headwater.testing.samples import sample_layouts

if TYPE_CHECKING:
    import torch

    from headwater.transfer.device.copy_engine import CopyEngine
    from headwater.transfer.device.wire import Direction

_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108  the tmpfs of every Linux
_LITTLE_ROOM: Final = 1 << 30
_TRY_BYTES: Final = 64 << 20
_ROOM_HINT: Final = "the host tier lives there; in a container: --shm-size=16g, or mount a tmpfs"
_LOCK_HINT: Final = "ulimit -l unlimited; in a container: --ulimit memlock=-1"
_NVIDIA_SMI_S: Final = 10.0
_POOL_S: Final = 5.0
_PLANES: Final = 64
_PLANE_BYTES: Final = 128 << 10  # 64 of them: a block of 64 tokens of a usual model
_COPIED_BLOCKS: Final = (1, 8, 32)
_ROUNDS: Final = 5


@dataclass(frozen=True, slots=True)
class CopySpeed:
    """How near the copy engine, and a copy per block and plane, come to one contiguous copy of as many bytes."""

    num_bytes: int
    direction: str
    limit_gbs: float
    staged_ratio: float
    pieces_ratio: float


@dataclass(frozen=True, slots=True)
class Findings:
    """All lines, and a short table of copies where there is a GPU."""

    checks: list[Check]
    copies: list[CopySpeed]

    @property
    def ok(self) -> bool:
        """Whether nothing that Headwater needs is broken."""
        return all(check.state != FAIL for check in self.checks)


def examine(*, pool: str | None = None) -> Findings:
    """Look, and try; a pool too, by its address. Blocks for seconds: the kernels may have to be compiled."""
    found = _machine()
    return found if pool is None else Findings([*found.checks, *_pool(pool)], found.copies)


def _machine() -> Findings:
    checks = [
        Check("python", OK, f"{platform.python_version()}, headwater {__version__}"),
        *_packages(),
        _shared_memory(),
        _memory(),
        _locked_memory(),
    ]
    if _version("torch") is None:
        return Findings(checks, [])
    import torch

    if not torch.cuda.is_available():
        hint = "fine for trying things; a model that is served wants a GPU, and torch built for it"
        checks.append(Check("gpu", WARN, f"none that torch {torch.__version__} can use", hint))
        return Findings([*checks, _engine(torch.device("cpu"))], [])
    device = torch.device("cuda")
    checks += [Check("gpu", OK, f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"), _link()]
    checks += [_pinned_memory(), _registered_slab(), _engine(device)]
    broken = any(check.state == FAIL for check in checks)
    if broken:
        return Findings(checks, [])
    return Findings([*checks, *_choices(device)], copies(device))


def document(found: Findings) -> dict[str, Any]:
    """All of it as plain JSON values."""
    return {
        "ok": found.ok,
        "checks": [{name: getattr(check, name) for name in Check.__slots__} for check in found.checks],
        "copies": [{name: getattr(row, name) for name in CopySpeed.__slots__} for row in found.copies],
    }


def _pool(url: str) -> list[Check]:
    """Whether a page can be written to a pool and read back."""
    try:
        kind = pool_kind(url)
        if kind == "mooncake":
            return diagnose(url)
        with open_pool(url) as store:
            return [_try_pool(store)]
    except InvalidConfig as error:
        return [
            Check("pool", FAIL, str(error), "`headwater pool up` starts one on this machine, and prints its address")
        ]
    except HeadwaterError as error:
        return [Check("pool", FAIL, str(error))]


def _try_pool(store: Store) -> Check:
    sizes = (4096,)
    meta = PageMeta(key=os.urandom(32), identity=bytes(32), parent=os.urandom(32), depth=0, valid_tokens=1)
    frame, back = (memoryview(bytearray(frame_bytes(sizes))) for _ in range(2))
    seal(frame, meta, opaque_layout(sizes, block_tokens=1), now_ms=0)
    reader = VerifiedStore(store, identity=meta.identity, plane_bytes=sizes)
    (put,) = store.put([(meta.name, frame)], deadline=Deadline.after(_POOL_S))
    (got,) = reader.get_into([(meta.name, back)], deadline=Deadline.after(_POOL_S))
    store.delete([meta.name], deadline=Deadline.after(_POOL_S))
    if got is not Status.HIT or back != frame:
        return Check("pool", FAIL, f"a page was {put.value}, and then {got.value}", "is it full, or read-only?")
    return Check("pool", OK, "a page was written, read back and verified")


# --- what there is ----------------------------------------------------------------------------------------------------


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _packages() -> list[Check]:
    torch, triton = _version("torch"), _version("triton") or _version("pytorch-triton")
    return [
        Check("torch", OK, torch)
        if torch is not None
        else Check("torch", WARN, "not installed", "stores work; what moves tensors needs it: pip install torch"),
        Check("triton", OK, triton)
        if triton is not None
        else Check("triton", WARN, "not installed", "only a GPU needs it; torch for CUDA brings it along"),
    ]


def _shared_memory() -> Check:
    name, hint = "tmpfs", _ROOM_HINT
    if not _SHARED_MEMORY.is_dir() or not directory.is_memory(_SHARED_MEMORY):
        return Check(name, WARN, f"{_SHARED_MEMORY} is not in memory", hint)
    free = directory.free_bytes(_SHARED_MEMORY)
    found = f"{_gib(free)} free in {_SHARED_MEMORY}"
    return Check(name, OK, found) if free >= _LITTLE_ROOM else Check(name, WARN, found, hint)


def _memory() -> Check:
    available = directory.available_memory()
    found = f"{_gib(available)} available, by the machine and the container"
    if available >= _LITTLE_ROOM:
        return Check("memory", OK, found)
    return Check("memory", WARN, found, "tiers will be small: raise the container's limit, or free memory")


def _locked_memory() -> Check:
    """Only said: whether it is enough is tried below."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Check("memlock", OK, "unlimited" if soft == resource.RLIM_INFINITY else f"{soft >> 10:,} KiB may be locked")


def _link() -> Check:
    name, hint = "pcie", "the link is the limit of every copy: see `nvidia-smi -q`"
    program = shutil.which("nvidia-smi")
    if program is None:
        return Check(name, OK, "unknown: there is no nvidia-smi")
    query = "pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,pcie.link.width.max"
    try:
        answer = subprocess.run(  # noqa: S603  found by its name, no argument is anybody's
            [program, f"--query-gpu={query}", "--format=csv,noheader", "--id=0"],
            capture_output=True,
            text=True,
            timeout=_NVIDIA_SMI_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check(name, OK, f"unknown: {error}")
    parts = [part.strip() for part in answer.stdout.strip().split(",")]
    if answer.returncode or len(parts) != 4:
        return Check(name, OK, "unknown: nvidia-smi does not say")
    generation, best_generation, width, best_width = parts
    found = f"generation {generation} of {best_generation}, {width} lanes of {best_width}"
    return Check(name, OK if width == best_width else WARN, found, "" if width == best_width else hint)


# --- what works -------------------------------------------------------------------------------------------------------


def _pinned_memory() -> Check:
    """What everything else falls back to: without it there is no host tier."""
    from headwater.transfer.device.arena import create_host_cache

    try:
        create_host_cache(_TRY_BYTES, 1).close()
    except HostTierUnavailable as error:
        return Check("pinned memory", FAIL, str(error), _LOCK_HINT)
    return Check("pinned memory", OK, f"{_TRY_BYTES >> 20} MiB were registered with CUDA")


def _registered_slab() -> Check:
    """A store's own memory, which blocks are copied from and to directly."""
    from headwater.transfer.device.cuda import pin

    name, hint = "registered tmpfs", f"blocks go through pinned pages instead, slower; {_LOCK_HINT}"
    if not directory.is_memory(_SHARED_MEMORY) or directory.free_bytes(_SHARED_MEMORY) < _TRY_BYTES:
        return Check(name, WARN, f"no {_TRY_BYTES >> 20} MiB in {_SHARED_MEMORY}", _ROOM_HINT)
    with tempfile.TemporaryFile(dir=_SHARED_MEMORY) as file:
        file.truncate(_TRY_BYTES)
        memory = memoryview(mmap.mmap(file.fileno(), _TRY_BYTES))
    address: int = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
    begin_s = time.perf_counter()
    held = pin(memory, address)
    if isinstance(held, str):
        return Check(name, WARN, held, hint)
    seconds = time.perf_counter() - begin_s
    held.release()
    return Check(name, OK, f"{_TRY_BYTES >> 20} MiB of a file, in {seconds * 1e3:.0f} ms")


def _engine(device: "torch.device") -> Check:
    """Blocks of an odd layout to the host and back into others, their digests as xxhash has them."""
    from headwater.transfer.device.arena import create_host_cache, create_kv_cache
    from headwater.transfer.device.copy_engine import CopyEngine

    name = "copy kernels" if device.type == "cuda" else "copy engine"
    hint = (
        "`python -m torch.utils.collect_env` says what is installed; Triton compiles with a C compiler: apt install gcc"
    )
    layout = sample_layouts()["odd"]
    sizes, start = layout.plane_bytes, header_bytes(len(layout.planes))
    with ExitStack() as stack:
        cache = stack.enter_context(create_kv_cache(layout, 4, device))
        host = stack.enter_context(create_host_cache(frame_bytes(sizes), 2))
        for row in cache.rows:
            row.random_(0, 256)
        frames = [host.page(i) for i in range(2)]
        begin_s = time.perf_counter()
        try:
            engine = stack.enter_context(CopyEngine(cache))
            out = engine.gather([3, 0], frames)
            out.wait()
            back = engine.scatter(frames, [1, 2], expected=out.digests)
            back.wait()
        except (HeadwaterError, ImportError, RuntimeError) as error:
            return Check(name, FAIL, f"{type(error).__name__}: {error}", hint)
        problem = out.error or back.error
        if problem is not None:
            return Check(name, FAIL, f"{type(problem).__name__}: {problem}", hint)
        seconds = time.perf_counter() - begin_s
        expected = [plane_digests(frame[start:], sizes) for frame in frames]
        equal = all((row[[1, 2]] == row[[3, 0]]).all() for row in cache.rows)
        if out.digests is None or out.digests.tolist() != expected or back.num_good != 2 or not equal:
            return Check(name, FAIL, "a copy gave other bytes, or other digests than xxhash", "do not use this machine")
    return Check(name, OK, f"bytes and digests are right, in {seconds:.1f} s")


def _choices(device: "torch.device") -> list[Check]:
    """What the copy engine measures when it starts, and how it goes on."""
    from headwater.transfer.device.arena import create_host_cache, create_kv_cache
    from headwater.transfer.device.copy_engine import CopyEngine

    layout = opaque_layout([_PLANE_BYTES] * _PLANES, block_tokens=64)
    with ExitStack() as stack:
        cache = stack.enter_context(create_kv_cache(layout, 4, device))
        host = stack.enter_context(create_host_cache(frame_bytes(layout.plane_bytes), 4))
        engine = stack.enter_context(CopyEngine(cache))
        found = engine.calibrate([host.page(i) for i in range(4)])
    return [
        Check(
            f"{one.num_blocks * layout.page_bytes >> 20} MiB {one.direction.value}",
            OK,
            f"staged {one.staged_s * 1e3:.2f} ms, by the kernel {one.direct_s * 1e3:.2f} ms: "
            + ("by the kernel" if one.direct else "staged"),
        )
        for one in found
    ]


def copies(device: "torch.device") -> list[CopySpeed]:
    """A short table: one contiguous copy, the copy engine, and a copy per block and plane, in turns. CUDA only."""
    from headwater.lab.bench.copy_course import NAMES, cut_frames, frame_stride
    from headwater.lab.bench.copy_paths import Limit, Pieces
    from headwater.transfer.device.arena import create_host_cache, create_kv_cache
    from headwater.transfer.device.copy_engine import CopyEngine

    layout = opaque_layout([_PLANE_BYTES] * _PLANES, block_tokens=64)
    most = max(_COPIED_BLOCKS)
    rows: list[CopySpeed] = []
    with ExitStack() as stack:
        cache = stack.enter_context(create_kv_cache(layout, most, device))
        area = stack.enter_context(create_host_cache(most * frame_stride(layout), 1)).page(0)
        engine = stack.enter_context(CopyEngine(cache))
        limit = Limit(area, device)
        stack.callback(limit.close)
        for count in _COPIED_BLOCKS:
            slots, frames = list(range(count))[::-1], cut_frames(area, layout)[:count]
            for direction, name in NAMES.items():
                pieces = Pieces(cache, slots, frames, direction)
                num_bytes = count * layout.page_bytes
                limit_s, staged_s, pieces_s = _in_turns(
                    partial(limit.copy, direction, num_bytes),
                    partial(_move, engine, direction, slots, frames),
                    pieces.one_by_one,
                )
                rows.append(
                    CopySpeed(num_bytes, name, num_bytes / limit_s / 1e9, limit_s / staged_s, limit_s / pieces_s)
                )
    return rows


def _move(engine: "CopyEngine", direction: "Direction", slots: list[int], frames: list[memoryview]) -> None:
    out = direction.value == "out"
    transfer = engine.gather(slots, frames) if out else engine.scatter(frames, slots)
    transfer.wait()
    if transfer.error is not None:
        raise transfer.error


def _in_turns(*ways: Callable[[], object]) -> list[float]:
    """Seconds of each, medians; the first time is not counted."""
    taken: list[list[float]] = [[] for _ in ways]
    for number in range(-1, _ROUNDS):
        for way, seconds in zip(ways, taken, strict=True):
            begin_s = time.perf_counter()
            way()
            if number >= 0:
                seconds.append(time.perf_counter() - begin_s)
    return [statistics.median(seconds) for seconds in taken]


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"
