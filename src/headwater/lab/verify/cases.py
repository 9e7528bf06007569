"""`headwater verify`: a cached answer equals a computed one, bit for bit, for every attention family and way to a hit.

Each case runs one prompt through a whole engine, with the cache in one particular state, and compares what it computed
with a run on an empty cache: the logits of every token (bit-equal: the chunk boundaries are the same), the greedy
tokens, and the KV bytes of every block of the prompt. The case also has to be what it says: a host hit that came from
somewhere else, or a preemption that did not happen, is a difference.

`inject` flips one byte of each block after it was verified and written to the device: then the comparison must fail, or
it would not be able to.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from headwater.build import open_cache, open_local
from headwater.config.cache import CacheConfig, TierConfig
from headwater.config.stores import LocalStoreConfig
from headwater.core.errors import HeadwaterError
from headwater.core.page import PageName
from headwater.core.results import Status
from headwater.engine.connector import Connector
from headwater.engine.engine import Engine, EngineConfig
from headwater.engine.loader import load_model
from headwater.engine.make_model import make_model
from headwater.engine.models.base import Model
from headwater.engine.request import Output, Request, Sampling, Usage
from headwater.lab.verify.spoiling import SpoilingStaging
from headwater.layout.frame import frame_bytes
from headwater.storage.base import Deadline, Store
from headwater.storage.scratch import disk_root, memory_root
from headwater.storage.wrappers import OpaqueStore
from headwater.transfer.device.arena import DeviceCache, create_host_cache, create_kv_cache
from headwater.transfer.executor.staging import TorchStaging

FAMILIES: Final = {  # what is verified when no model is given: family of the checkpoint, and how its KV is kept
    "gqa": ("llama", "auto"),
    "gqa-fp8": ("llama", "fp8"),
    "mla": ("deepseek_v3", "auto"),
    "dsa": ("deepseek_v32", "fp8"),
    "dsa-plain": ("deepseek_v32", "auto"),
}
BLOCK_TOKENS: Final = 16
_CHUNK: Final = 2 * BLOCK_TOKENS
_PROMPT_BLOCKS: Final = 8
_NUM_BLOCKS: Final = 24
_ANSWER: Final = 20
_WAIT_S: Final = 60.0
_LIMIT_BYTES: Final = 64 << 20

Tell = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison. `problem` is empty where everything was equal."""

    family: str
    case: str
    hit_tokens: dict[str, int]
    computed_tokens: int
    problem: str

    @property
    def equal(self) -> bool:
        """Whether the cached answer equals the computed one."""
        return not self.problem


@dataclass(slots=True)
class _Run:
    """What one request computed, and what it says of the cache."""

    logits: list[torch.Tensor] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    blocks: dict[bytes, list[bytes]] = field(default_factory=dict)  # by key: the planes
    usage: Usage | None = None
    error: str = ""

    @property
    def fingerprint(self) -> str:
        """All that was computed, in one digest: to compare with another process."""
        digest = hashlib.sha256(json.dumps(self.tokens).encode())
        for row in self.logits:
            digest.update(row.numpy().tobytes())
        for key in sorted(self.blocks):
            digest.update(key + b"".join(self.blocks[key]))
        return digest.hexdigest()


class _Injecting(SpoilingStaging):
    """Flips a byte of each block."""

    def spoil(self, rows: Sequence[torch.Tensor], slots: Sequence[int]) -> None:
        """Turn one bit of each."""
        for slot in slots:
            rows[0][slot, 0] ^= 0x40


class _Failing(OpaqueStore):
    """Fails to give any page behind the first so many of a call, after that it gives none."""

    def __init__(self, store: Store, num_good: int) -> None:
        super().__init__(store)
        self._num_good = num_good

    def get_into(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[Status]:
        """Give the first ones, fail for the rest."""
        good = self.store.get_into(pages[: self._num_good], deadline=deadline)
        self._num_good = max(0, self._num_good - len(pages))
        return good + [Status.FAILED] * (len(pages) - len(good))


class _Rig:
    """An engine on one model with a device of its own and the stores it is given."""

    def __init__(self, planes: DeviceCache, engine: Engine, runs: dict[str, _Run]) -> None:
        """`runs`: where the engine's watcher writes down what each request computes."""
        self._planes = planes
        self._engine = engine
        self._runs = runs

    def ask(self, prompt: list[int], *, preempt_at: int | None = None) -> _Run:
        """Run one greedy request to its end and take down what it computed."""
        run = _Run()
        over = threading.Event()

        def listen(output: Output) -> None:
            run.tokens.extend(output.tokens)
            if output.finish is not None:
                run.usage, run.error = output.usage, output.error
                over.set()

        sampling = Sampling(max_tokens=_ANSWER, temperature=0, ignore_eos=True)
        request = Request(name=f"verify {len(self._runs)}", prompt=prompt, sampling=sampling, listen=listen)
        request.preempt_at = preempt_at
        self._runs[request.name] = run
        self._engine.submit(request)
        if not over.wait(_WAIT_S):
            raise HeadwaterError(f"request {request.name} did not end in {_WAIT_S:g} s")
        with self._engine.connector.cache.still() as brain:
            known = {key: slot for key, _, slot in brain.blocks()}
        for key in request.keys[:_PROMPT_BLOCKS]:
            if key in known:
                run.blocks[key] = [row[known[key]].cpu().numpy().tobytes() for row in self._planes.rows]
        return run


@contextmanager
def _rig(
    model: Model, stores: dict[str, Store], *, num_blocks: int = _NUM_BLOCKS, inject: bool = False
) -> Iterator[_Rig]:
    config = CacheConfig(
        num_slots=num_blocks,
        block_tokens=model.block_tokens,
        block_bytes=model.layout.page_bytes,
        tiers=tuple(TierConfig(name=name, probe_timeout_s=_WAIT_S, load_timeout_s=_WAIT_S) for name in stores),
        policy="lru",  # which blocks leave is known then, however fast this machine is
        compute_base_s=0.0,
    )
    with ExitStack() as stack:
        planes = stack.enter_context(create_kv_cache(model.layout, num_blocks, model.device))
        pages = stack.enter_context(create_host_cache(frame_bytes(model.layout.plane_bytes), 8))
        staging = stack.enter_context((_Injecting if inject else TorchStaging)(planes, pages))
        cache = stack.enter_context(
            open_cache(config, stores, staging, layout=model.layout, identity=model.identity.digest)
        )
        runs: dict[str, _Run] = {}

        def watch(request: Request, logits: torch.Tensor) -> None:
            runs[request.name].logits.append(logits.detach().cpu().clone())

        connector = _Patient(cache, model.identity, probe_s=_WAIT_S)
        engine = stack.enter_context(Engine(model, planes, connector, EngineConfig(step_tokens=_CHUNK), watch=watch))
        yield _Rig(planes, engine, runs)
        if not cache.drain(_WAIT_S):
            raise HeadwaterError("the cache did not come to rest")


class _Patient(Connector):
    """Loads whatever is there: that computing a tiny model is faster is not the question here."""

    def measured(self, num_tokens: int, token_contexts: int, seconds: float) -> None:
        """Say nothing."""


class _Suite:
    """All cases of one family."""

    def __init__(self, family: str, model: Model, places: dict[str, Path], *, child: list[str], inject: bool) -> None:
        """`places`: where the stores of the tiers are. `child`: the command of the restart case."""
        self._family = family
        self._model = model
        self._places = places
        self._child = child
        self._inject = inject
        generator = torch.Generator().manual_seed(11)
        size = _PROMPT_BLOCKS * BLOCK_TOKENS + 5

        def prompt() -> list[int]:
            return torch.randint(3, model.vocab_size, (size,), generator=generator).tolist()

        self._prompt = prompt()
        self._others = [prompt() for _ in range(4)]
        self._cold: _Run | None = None

    def cases(self) -> dict[str, Callable[[], Case]]:
        """The cases by name, in order."""
        return {
            "cold": self._run_cold,
            "device hit": self._run_device,
            "host hit": lambda: self._run_store("host hit", "host"),
            "disk hit": lambda: self._run_store("disk hit", "disk"),
            "after eviction": self._run_evicted,
            "after a restart": self._run_restarted,
            "after preemption": self._run_preempted,
            "load fails half-way": self._run_failing,
            "everything cached": self._run_whole,
        }

    def child(self) -> dict[str, Any]:
        """In another process: a run from the disk tier, as plain values."""
        with self._stores("disk") as stores, _rig(self._model, stores, inject=self._inject) as rig:
            run = rig.ask(self._prompt)
        usage = run.usage
        return {
            "fingerprint": run.fingerprint,
            "hits": dict(usage.cached_by_tier) if usage is not None else {},
            "computed": usage.computed_tokens if usage is not None else 0,
            "error": run.error,
        }

    @contextmanager
    def _stores(self, *names: str) -> Iterator[dict[str, Store]]:
        with ExitStack() as stack:
            yield {
                name: stack.enter_context(
                    open_local(LocalStoreConfig(directory=self._places[name], limit_bytes=_LIMIT_BYTES))
                )
                for name in names
            }

    def _run_cold(self) -> Case:
        with _rig(self._model, {}) as rig:
            first = rig.ask(self._prompt)
        with self._stores("host", "disk") as stores, _rig(self._model, stores) as rig:
            self._cold = rig.ask(self._prompt)
        return self._compare("cold", first, {})

    def _run_device(self) -> Case:
        with _rig(self._model, {}) as rig:
            rig.ask(self._prompt)
            return self._compare("device hit", rig.ask(self._prompt), {"device": _PROMPT_BLOCKS})

    def _run_store(self, case: str, name: str) -> Case:
        with self._stores(name) as stores, _rig(self._model, stores, inject=self._inject) as rig:
            return self._compare(case, rig.ask(self._prompt), {name: _PROMPT_BLOCKS})

    def _run_evicted(self) -> Case:
        with self._stores("host") as stores, _rig(self._model, stores, num_blocks=12, inject=self._inject) as rig:
            rig.ask(self._prompt)
            for other in self._others:
                rig.ask(other)
            return self._compare("after eviction", rig.ask(self._prompt), {"host": _PROMPT_BLOCKS})

    def _run_restarted(self) -> Case:
        cold = self._cold
        if cold is None or not self._child:
            return Case(self._family, "after a restart", {}, 0, "there is nothing to compare with")
        done = subprocess.run(self._child, capture_output=True, text=True, check=False, timeout=2 * _WAIT_S)  # noqa: S603  ourselves
        if done.returncode != 0:
            return Case(self._family, "after a restart", {}, 0, f"the other process failed: {done.stderr[-300:]}")
        said = json.loads(done.stdout)
        wanted = {"disk": _PROMPT_BLOCKS * BLOCK_TOKENS}
        problem = said["error"]
        if not problem and said["hits"] != wanted:
            problem = f"hits were {said['hits']}, not {wanted}"
        if not problem and said["fingerprint"] != cold.fingerprint:
            problem = "another process computed something else"
        return Case(self._family, "after a restart", said["hits"], said["computed"], problem)

    def _run_preempted(self) -> Case:
        with self._stores("host") as stores, _rig(self._model, stores, inject=self._inject) as rig:
            whole = (_PROMPT_BLOCKS + 1) * BLOCK_TOKENS  # it gives way when a block of its answer is full
            run = rig.ask(self._prompt, preempt_at=whole)
            case = self._compare("after preemption", run, {"host": _PROMPT_BLOCKS})
            if run.usage is not None and run.usage.preemptions != 1 and case.equal:
                return Case(self._family, "after preemption", {}, 0, "it was not preempted")
            return case

    def _run_failing(self) -> Case:
        with self._stores("host") as stores:
            failing: dict[str, Store] = {"host": _Failing(stores["host"], _PROMPT_BLOCKS // 2)}
            with _rig(self._model, failing, inject=self._inject) as rig:
                return self._compare("load fails half-way", rig.ask(self._prompt), {"host": _PROMPT_BLOCKS // 2})

    def _run_whole(self) -> Case:
        """A prompt of whole blocks that is all there: only its last token is computed, beside the shared block."""
        prompt = self._prompt[: _PROMPT_BLOCKS * BLOCK_TOKENS]
        with _rig(self._model, {}) as rig:
            first, second = rig.ask(prompt), rig.ask(prompt)
        problem = "" if first.tokens == second.tokens else "other tokens"
        if not problem and first.blocks != second.blocks:
            problem = "a shared block was written to"
        if not problem and (second.usage is None or second.usage.computed_tokens != _ANSWER):
            problem = "more than the last token was computed"
        return self._case("everything cached", second, problem)

    def _compare(self, name: str, run: _Run, hits: dict[str, int]) -> Case:
        cold = self._cold
        usage = run.usage
        wanted = {tier: blocks * BLOCK_TOKENS for tier, blocks in hits.items()}
        if cold is None or usage is None or run.error:
            return self._case(name, run, run.error or "it did not end")
        if usage.cached_by_tier != wanted:
            return self._case(name, run, f"hits were {usage.cached_by_tier}, not {wanted}")
        if run.tokens != cold.tokens:
            return self._case(name, run, "other tokens")
        if len(run.logits) != len(cold.logits) or not all(map(torch.equal, run.logits, cold.logits)):
            return self._case(name, run, "other logits")
        if run.blocks != cold.blocks:
            return self._case(name, run, "other KV bytes")
        return self._case(name, run, "")

    def _case(self, name: str, run: _Run, problem: str) -> Case:
        usage = run.usage
        hits = dict(usage.cached_by_tier) if usage is not None else {}
        return Case(self._family, name, hits, usage.computed_tokens if usage is not None else 0, problem)


def run(
    *, model: Path | None = None, device: str = "cpu", inject: bool = False, tell: Tell | None = None
) -> list[Case]:
    """Verify every family, or one model's directory. Blocks for a minute or two."""
    found: list[Case] = []
    with tempfile.TemporaryDirectory(prefix="headwater-verify-", dir=disk_root()) as disk, ExitStack() as stack:
        memory = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="headwater-verify-", dir=memory_root(4 * _LIMIT_BYTES))
        )
        families = FAMILIES if model is None else {"model": ("", "auto")}
        for number, (family, (checkpoint, kv)) in enumerate(families.items()):
            directory = model if model is not None else Path(disk) / f"{family}-model"
            if model is None:
                make_model(checkpoint, directory)
            places = {"host": Path(memory) / family, "disk": Path(disk) / family}
            suite = _suite(family, directory, kv, places, device, inject=inject)
            for case, check in suite.cases().items():
                if tell is not None:
                    tell(f"{family}: {case}", number, len(families))
                found.append(check())
    return found


def _suite(family: str, directory: Path, kv: str, places: dict[str, Path], device: str, *, inject: bool) -> _Suite:
    model = load_model(directory, device=device, dtype="float32", kv=kv, block_tokens=BLOCK_TOKENS)
    options = [family, str(directory), kv, str(places["host"]), str(places["disk"]), device]
    options += ["inject" if inject else "", str(torch.get_num_threads())]
    return _Suite(family, model, places, child=[sys.executable, "-m", "headwater.lab.verify", *options], inject=inject)


def main() -> None:
    """The other process of the restart case: prints one JSON document."""
    family, directory, kv, host, disk, device, inject, num_threads = sys.argv[1:9]
    torch.set_num_threads(int(num_threads))  # as the first one: their number is in the bits
    places = {"host": Path(host), "disk": Path(disk)}
    suite = _suite(family, Path(directory), kv, places, device, inject=bool(inject))
    sys.stdout.write(json.dumps(suite.child()) + "\n")
