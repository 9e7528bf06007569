"""`headwater verify --vllm`: a real vLLM with our connector answers what it answers without one, token for token.

Every way to a hit, and everything that can go wrong with one, for grouped and for latent attention, with tiny random
models that are made on the spot. vLLM runs under an interpreter that has it, in processes of their own
(`vllm_worker.py`): the second starts while the first is there, shares its slab, and goes on when that was killed. The
scene of each case is in `vllm_cases.py`: it also has to be what it says, by vLLM's own counters.

On a GPU float32 is compared as on a CPU, with the one backend that has it. What people run is bfloat16, whose last bits
depend on how much is computed at once: there a prompt has to be answered as by vLLM alone with so many blocks of it in
its own cache, whatever that number is, and batches are left to float32.

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

from headwater.core.errors import InvalidConfig, StoreUnavailable
from headwater.engine.make_model import make_model
from headwater.lab.bench.vllm_client import EngineProcess, WorkerFailed, engine_settings, worker_command
from headwater.lab.bench.vllm_contenders import require_vllm
from headwater.lab.verify.vllm_cases import BATCHES, BOTH, DEADLINE_S, FIRST, KILLED, LATER, Cases
from headwater.lab.verify.vllm_scene import LOAD_S, ROOM_BYTES, ModelKind, Places, VllmCase, VllmScene, kinds_of
from headwater.storage.scratch import disk_root, memory_root
from headwater.testing.redis import redis_server

_UP_S: Final = 600.0
_ASKS: Final = next(iter(FIRST))  # the case that also asks everything without a connector
_NOTES: Final = {
    "equal": "greedy tokens equal to those of the same vLLM without a connector, in float32; in bfloat16 to those with "
    "so many blocks in vLLM's own cache, whatever that number is",
    "cached_tokens": "what vLLM says of each request; hits: tokens by where vLLM counts them from (p2p is the pool)",
    "control": "bytes are damaged behind all checks: its tokens must differ",
    "half-way": f"a load's own deadline is {LOAD_S:g} s, its store hangs for minutes; a request that has not ended "
    f"after {DEADLINE_S:g} s (other work is on this machine) is a problem",
    "skipped": "vLLM itself cannot do this with that model on this machine",
}

Tell = Callable[[str, int, int], None]
Keep = Callable[[str, dict[str, Any]], None]


@dataclass(slots=True)
class VllmReport:
    """All that was compared."""

    inject: bool
    device: str = "cpu"
    pool: str = ""
    about: dict[str, Any] = field(default_factory=dict)
    cases: list[VllmCase] = field(default_factory=list)
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
            "device": self.device,
            "pool": self.pool,
            **self.about,
            "seconds": round(self.seconds, 1),
            "cases": [asdict(case) | {"equal": case.equal} for case in self.cases],
            "notes": _NOTES,
        }


def run(
    *,
    python: str,
    device: str = "cpu",
    kinds: tuple[str, ...] | None = None,
    inject: bool = False,
    only: Callable[[str], bool] | None = None,
    tell: Tell | None = None,
    keep: Keep | None = None,
    logs: Path | None = None,
) -> VllmReport:
    """Verify with the vLLM of this interpreter. Blocks for minutes. Raises NotInstalled, WorkerFailed.

    `only` picks cases by their names; the first has to be among them, it saves what the others load. `keep` gets the
    report after every case. `logs`: where what engines print stays.
    """
    models = kinds_of(device)
    kinds = tuple(models) if kinds is None else kinds
    strange = [kind for kind in kinds if kind not in models]
    if strange:
        raise InvalidConfig(f"no model {', '.join(strange)} on {device}; there are: {', '.join(models)}")
    require_vllm(python)
    begin_s = time.monotonic()
    report = VllmReport(inject, device=device)
    with ExitStack() as stack:
        disk = stack.enter_context(_scratch(disk_root()))
        memory = stack.enter_context(_scratch(memory_root(len(kinds) * ROOM_BYTES)))
        pool = _pool(stack, disk)
        report.pool = pool.partition(":")[0]
        places = {kind: Places(host=memory / kind, disk=disk / f"{kind}-disk", pool=pool) for kind in kinds}
        for kind in kinds:
            make_model(models[kind].family, disk / kind, overrides=models[kind].overrides)
        right: dict[str, dict[str, list[list[list[int]]]]] = {kind: {} for kind in kinds}

        def scene_of(worker: EngineProcess, kind: str, other: VllmScene | None = None) -> VllmScene:
            return VllmScene(worker, models[kind], places[kind], disk / kind, right[kind], inject=inject, other=other)

        def play(scene: VllmScene, cases: Cases) -> None:
            for name in _play(scene, cases, only, report, tell):
                report.seconds = time.monotonic() - begin_s
                if keep is not None:
                    keep(name, report.document())

        with _worker(python, device, log=(logs or disk) / f"vllm-{kinds[0]}-1.log") as (first, report.about):
            for kind in kinds:
                play(scene_of(first, kind), FIRST)
            if only is None or any(map(only, [*BOTH, *KILLED, *LATER])):
                with _worker(python, device, log=(logs or disk) / f"vllm-{kinds[0]}-2.log") as (second, _):
                    for kind in reversed(kinds):
                        play(scene_of(second, kind, scene_of(first, kind)), BOTH)
                    play(scene_of(second, kinds[0], scene_of(first, kinds[0])), KILLED)
                    first.close()
                    for kind in kinds:
                        play(scene_of(second, kind), LATER)
    report.seconds = time.monotonic() - begin_s
    return report


def _play(
    scene: VllmScene,
    cases: Cases,
    only: Callable[[str], bool] | None,
    report: VllmReport,
    tell: Tell | None,
) -> Iterator[str]:
    """Case by case; yields its name when it is in the report."""
    for at, (name, check) in enumerate(cases.items()):
        if (only is not None and not only(name)) or (scene.kind.rounds and name in BATCHES):
            continue
        if name != _ASKS and not scene.right:
            return  # vLLM did not answer without a connector: that is in the report, and nothing can be compared
        if tell is not None:
            tell(f"{scene.kind.name}: {name}", at, len(cases))
        try:
            report.cases.append(check(scene))
        except WorkerFailed as error:
            report.cases.append(VllmCase(model=scene.kind.name, case=name, problem=str(error)))
            if not scene.alive:
                raise
        yield name


@contextmanager
def _worker(python: str, device: str, *, log: Path) -> Iterator[tuple[EngineProcess, dict[str, Any]]]:
    """A process that has imported vLLM."""
    settings = engine_settings(device) | {"TRITON_F32_DEFAULT": "ieee"}  # or its float32 has ten bits
    command = worker_command(python, (), {}, module="headwater.lab.verify.vllm_worker")
    worker = EngineProcess("vLLM", command, settings=settings, log=log)
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


__all__ = ["ModelKind", "VllmCase", "VllmReport", "run"]
