"""`headwater verify --vllm`: a real vLLM with our connector answers what it answers without one, token for token.

Every way to a hit, and everything that can go wrong with one, for grouped and for latent attention, with tiny random
models that are made on the spot. vLLM runs under an interpreter that has it, in processes of their own
(`vllm_worker.py`); two of them, one after the other, so that restarts and pools are real. The scene of each case
is in `vllm_cases.py`: it also has to be what it says, by vLLM's own counters.

One case is a control: bytes are damaged behind all checks, and its tokens must differ, or the comparison could not
fail. `inject` does the same to every case with a hit and no fault of its own: then the whole must fail.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from headwater.bench.vllm_client import Worker, WorkerFailed, worker_command
from headwater.bench.vllm_contenders import require_vllm
from headwater.core.errors import StoreUnavailable
from headwater.engine.make_model import make_model
from headwater.pool.redis import redis_server
from headwater.storage.scratch import disk_root, memory_root
from headwater.verify.vllm_cases import (
    DEADLINE_S,
    FIRST,
    KINDS,
    LATER,
    LOAD_S,
    ROOM_BYTES,
    Case,
    Cases,
    Kind,
    Places,
    Scene,
)

_UP_S: Final = 600.0
_NOTES: Final = {
    "equal": "greedy tokens of float32 models, equal to those of the same vLLM without a connector",
    "cached_tokens": "what vLLM says of each request; hits: tokens by where vLLM counts them from (p2p is the pool)",
    "control": "bytes are damaged behind all checks: its tokens must differ",
    "half-way": f"a load's own deadline is {LOAD_S:g} s, its store hangs for minutes; a request that has not ended "
    f"after {DEADLINE_S:g} s (other work is on this machine) is a problem",
    "skipped": "vLLM itself cannot do this with that model on this machine",
}

Tell = Callable[[str, int, int], None]


@dataclass(slots=True)
class VllmReport:
    """All that was compared."""

    inject: bool
    pool: str = ""
    about: dict[str, Any] = field(default_factory=dict)
    cases: list[Case] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def equal(self) -> bool:
        """Whether nothing that was compared differs, and the control did."""
        return all(not case.problem for case in self.cases)

    @property
    def ok(self) -> bool:
        """Whether something was compared, and is as it should be."""
        return self.equal and any(not case.skipped for case in self.cases)

    def document(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "command": "verify --vllm",
            "ok": self.ok,
            "equal": self.equal,
            "inject": self.inject,
            "pool": self.pool,
            **self.about,
            "seconds": round(self.seconds, 1),
            "cases": [asdict(case) | {"equal": case.equal} for case in self.cases],
            "notes": _NOTES,
        }


def run(
    *,
    python: str,
    kinds: tuple[str, ...] = tuple(KINDS),
    inject: bool = False,
    only: Callable[[str], bool] | None = None,
    tell: Tell | None = None,
) -> VllmReport:
    """Verify with the vLLM of this interpreter. Blocks for minutes. Raises NotInstalled, WorkerFailed.

    `only` picks cases by their names; the first has to be among them, it saves what the others load.
    """
    require_vllm(python)
    begin_s = time.monotonic()
    report = VllmReport(inject)
    with ExitStack() as stack:
        disk = stack.enter_context(_scratch(disk_root()))
        memory = stack.enter_context(_scratch(memory_root(len(kinds) * ROOM_BYTES)))
        pool = _pool(stack, disk)
        report.pool = pool.partition(":")[0]
        places = {kind: Places(host=memory / kind, disk=disk / f"{kind}-disk", pool=pool) for kind in kinds}
        for kind in kinds:
            make_model(KINDS[kind].family, disk / kind, overrides=KINDS[kind].overrides)
        right: dict[str, dict[str, list[list[int]]]] = {kind: {} for kind in kinds}
        for number, cases in enumerate((FIRST, LATER)):
            if only is not None and not any(map(only, cases)):
                continue
            with _worker(python, log=disk / f"{number}.log") as (worker, about):
                report.about = about
                for kind in kinds:
                    scene = Scene(worker, KINDS[kind], places[kind], disk / kind, right[kind], inject=inject)
                    _play(scene, cases, only, report, tell)
    report.seconds = time.monotonic() - begin_s
    return report


def _play(
    scene: Scene,
    cases: Cases,
    only: Callable[[str], bool] | None,
    report: VllmReport,
    tell: Tell | None,
) -> None:
    for at, (name, check) in enumerate(cases.items()):
        if only is not None and not only(name):
            continue
        if tell is not None:
            tell(f"{scene.kind.name}: {name}", at, len(cases))
        try:
            report.cases.append(check(scene))
        except WorkerFailed as error:
            report.cases.append(Case(model=scene.kind.name, case=name, problem=str(error)))
            if not scene.alive:
                raise


@contextmanager
def _worker(python: str, *, log: Path) -> Iterator[tuple[Worker, dict[str, Any]]]:
    """A process that has imported vLLM."""
    settings = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in the process that is asked
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "PYTHONHASHSEED": "0",
    }
    command = worker_command(python, (), {}, module="headwater.verify.vllm_worker")
    worker = Worker("vLLM", command, settings=settings, log=log)
    try:
        about = worker.wait_up(_UP_S)
        yield worker, {name: about[name] for name in ("vllm", "torch", "num_threads")}
    finally:
        worker.close()


@contextmanager
def _scratch(root: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="headwater-verify-", dir=root, ignore_cleanup_errors=True) as path:
        yield Path(path)


def _pool(stack: ExitStack, disk: Path) -> str:
    """A pool's address: of a Redis server of our own, or of a directory where there is none."""
    try:
        return stack.enter_context(redis_server(2 * ROOM_BYTES))
    except StoreUnavailable:
        return f"local:{disk / 'pool'}"


__all__ = ["Case", "Kind", "VllmReport", "run"]
