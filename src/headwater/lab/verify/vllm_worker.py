"""Engines of `verify --vllm` in a process of their own, one after the other: opened, asked, closed, as the parent says.

The protocol is that of `bench vllm`; the engine is its engine, asked for several prompts at once. It tells what vLLM
itself counted (cached tokens, where they are from, preemptions, steps) and what our own counters say of loads, and
judges nothing.
"""

import gc
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from headwater.lab.bench import vllm_worker
from headwater.lab.bench.vllm_worker import VllmEngine
from headwater.lab.verify.vllm_faults import VllmFault, VllmFaultyStore, flip_pages, sabotage

_SETTLE_S: Final = 30.0
_RESETS: Final = 5
_RUNNER: Final = "VLLM_USE_V2_MODEL_RUNNER"  # vLLM looks when an engine is made
_SOURCE: Final = "vllm:prompt_tokens_cached_by_source"
_EXTERNAL: Final = "vllm:external_prefix_cache_hits"
_PREEMPTIONS: Final = "vllm:num_preemptions"


class Proven(VllmEngine):
    """One engine, asked for batches."""

    def ask(self, prompts: Sequence[list[int]], *, max_tokens: int, give_up_s: float) -> dict[str, Any]:
        """Compute all of these at once. `over` is False where some had not ended in time; they are aborted."""
        before = self.counted()
        said = self.batch(prompts, max_tokens, give_up_s)
        after = self.counted()
        grown = {name: num - before.get(name, 0) for name, num in after.items() if num != before.get(name, 0)}
        return {**said, "counted": grown}

    def settle(self) -> bool:
        """Wait until all that was computed is in the stores, or not to be. False: that took too long."""
        give_up_s = time.monotonic() + _SETTLE_S
        for last in (False, True):  # what is known only after the first time is begun with the steps of a short prompt
            while self._core.scheduler.has_requests() and time.monotonic() < give_up_s:
                self._step()
            worker = worker_side()
            if worker is not None and not worker.executor.drain(max(0.0, give_up_s - time.monotonic())):
                return False
            if not last:
                self.ask([[3, 4, 5]], max_tokens=2, give_up_s=_SETTLE_S)
        return not self._core.scheduler.has_requests()

    def counted(self) -> dict[str, float]:
        """What was counted since the start, by vLLM and by us."""
        found: dict[str, float] = {}
        for metric in self._llm.get_metrics():
            if metric.name == _SOURCE:
                found[f"source {metric.labels['source']}"] = metric.value
            elif metric.name in (_EXTERNAL, _PREEMPTIONS):
                found[metric.name.removeprefix("vllm:")] = found.get(metric.name, 0) + metric.value
        worker = worker_side()
        scheduler = getattr(self._core.scheduler.connector, "_scheduler", None)
        for side in (worker, scheduler):
            if side is not None:
                for name, value in side.metrics.counters().items():
                    found[f"headwater {name}"] = found.get(f"headwater {name}", 0) + value
        return found

    @property
    def facts(self) -> dict[str, Any]:
        """What vLLM made of its options."""
        config = self._engine.vllm_config
        return {
            "prefix_caching": bool(config.cache_config.enable_prefix_caching),
            "chunked_prefill": bool(config.scheduler_config.enable_chunked_prefill),
            "block_tokens": int(config.cache_config.block_size),
            "failure_policy": str(getattr(config.kv_transfer_config, "kv_load_failure_policy", "")),
        }

    def close(self) -> None:
        """End it. Blocks, seconds."""
        self._engine.engine_core.shutdown()


class EngineStage:
    """What the parent talks to: at most one engine at a time."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        """Import vLLM: that takes longest."""
        import vllm

        self._version = vllm.__version__
        self._engine: Proven | None = None
        self._faulty: list[VllmFaultyStore] = []

    def stats(self) -> dict[str, Any]:
        """What is running here."""
        import torch

        return {"vllm": self._version, "torch": torch.__version__, "num_threads": torch.get_num_threads()}

    def open(self, setup: Mapping[str, Any], fault: str | None = None, num_good: int = 0) -> dict[str, Any]:
        """Start an engine in place of the one before. Blocks."""
        self.close()
        os.environ.pop(_RUNNER, None)
        if setup.get("runner_v1"):
            os.environ[_RUNNER] = "0"
        with sabotage(VllmFault(fault) if fault is not None else None, num_good=num_good) as self._faulty:
            self._engine = Proven(setup)
        return self._engine.facts

    def close(self) -> dict[str, Any]:
        """End the engine. Blocks."""
        for store in self._faulty:
            store.let_go()
        if self._engine is not None:
            self._engine.close()
        self._engine, self._faulty = None, []
        _let_go()
        return {"closed": True}

    def flip(self, directory: str) -> dict[str, Any]:
        """Turn a bit in each page of a store, which the engine has open."""
        return {"num_pages": flip_pages(Path(directory))}

    def ask(self, prompts: list[list[int]], max_tokens: int, give_up_s: float) -> dict[str, Any]:
        """Compute."""
        return self._here.ask(prompts, max_tokens=max_tokens, give_up_s=give_up_s)

    def settle(self) -> dict[str, Any]:
        """Let everything come to rest, then empty vLLM's own prefix cache."""
        for _ in range(_RESETS):  # vLLM may hear of the last blocks a step later, where steps overlap
            said = {"settled": self._here.settle(), **self._here.reset()}
            if said["reset"] or not said["settled"]:
                break
        return said

    @property
    def _here(self) -> Proven:
        if self._engine is None:
            raise RuntimeError("no engine was opened")
        return self._engine


def _let_go() -> None:
    """Give the device back what an engine had: the next one looks at how much is free, and at nothing else."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def worker_side() -> Any:
    """The connector's worker side in this process, if there is one."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    return getattr(get_kv_transfer_group(), "_worker", None) if has_kv_transfer_group() else None


def main() -> None:
    """Serve the pipes that the parent holds."""
    vllm_worker.main(EngineStage)
