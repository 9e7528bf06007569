"""One vLLM engine in a process of its own, for `bench vllm`: a line of JSON in, a line of JSON out.

It runs under an interpreter that has vLLM, which need not be the one of the benchmark. Engine and model are in this one
process, so that a first token is timed without a socket in between. Standard output belongs to the protocol; whatever
libraries print goes to standard error. The first line out says that the engine is up, or why it is not.

A time to the first token is from handing in the prompt to the step that returned its first token. How many tokens came
from vLLM's own prefix cache and how many from the connector is what vLLM itself counts.
"""

import cProfile
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, Final, TextIO

_REST_S: Final = 20.0
_QUIET_S: Final = 0.05
_QUIET_SHARE: Final = 0.1  # of a core: what a process uses that only waits
_EMPTY_STEP_S: Final = 0.001
_LOOK_S: Final = 1.0
_EXTERNAL: Final = "vllm:external_prefix_cache_hits"


class Engine:
    """vLLM, asked one prompt at a time."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        if setup.get("odd_objects"):
            _tolerate_odd_objects()
        options = dict(setup["engine"])
        if setup.get("transfer") is not None:
            options["kv_transfer_config"] = KVTransferConfig(**setup["transfer"])
        self._llm = LLM(
            model=setup["model"],
            skip_tokenizer_init=True,
            enforce_eager=True,
            disable_log_stats=False,  # it counts what a connector gave only then
            **options,
        )
        self._engine = self._llm.llm_engine
        self._core = self._engine.engine_core.engine_core
        self._number = 0
        self._computed = True
        after_step = self._core.post_step

        def post_step(*, model_executed: bool) -> None:
            self._computed = model_executed
            after_step(model_executed=model_executed)

        self._core.post_step = post_step

    def generate(self, prompt: list[int], max_tokens: int = 1, profile: str | None = None) -> dict[str, Any]:
        """Compute tokens; times the first one."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        self._number += 1
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        before = self._external()
        ttft_s, last = None, None
        watch = cProfile.Profile() if profile is not None else nullcontext()
        with watch:
            begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
            self._engine.add_request(f"{self._number}", TokensPrompt(prompt_token_ids=prompt), sampling)
            while last is None or not last.finished:
                for output in self._step():
                    if ttft_s is None and output.outputs[0].token_ids:
                        ttft_s = time.perf_counter() - begin_s
                        cpu_s = time.process_time() - begin_cpu_s
                    last = output
        if isinstance(watch, cProfile.Profile):
            watch.dump_stats(profile or "")
        return {
            "ttft_s": ttft_s,
            "cpu_s": cpu_s,
            "tokens": list(last.outputs[0].token_ids),
            "cached_tokens": last.num_cached_tokens or 0,
            "external_tokens": self._external() - before,
        }

    def rest(self) -> dict[str, Any]:
        """Let what was begun come to an end: steps that vLLM still wants, then threads that still compute."""
        begin_s = time.perf_counter()
        busy = True
        while busy and time.perf_counter() - begin_s < _REST_S:
            while self._core.scheduler.has_requests() and time.perf_counter() - begin_s < _REST_S:
                self._step()
            used_s = time.process_time()
            time.sleep(_QUIET_S)
            busy = time.process_time() - used_s > _QUIET_S * _QUIET_SHARE
        return {"quiet": not busy, "waited_s": time.perf_counter() - begin_s}

    def reset(self) -> dict[str, Any]:
        """Empty vLLM's own prefix cache, as it says itself; never the connector's."""
        return {"reset": bool(self._llm.reset_prefix_cache())}

    def stats(self) -> dict[str, Any]:
        """What is running here."""
        import torch
        import vllm

        return {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "num_threads": torch.get_num_threads(),
            "num_blocks": self._llm.llm_engine.vllm_config.cache_config.num_gpu_blocks,
        }

    def _step(self) -> list[Any]:
        """A step, and after one that computed nothing a pause, as `vllm serve` makes: threads of a connector go on."""
        outputs: list[Any] = self._engine.step()
        if not self._computed and self._core.scheduler.has_requests():
            time.sleep(_EMPTY_STEP_S)
        return outputs

    def _external(self) -> int:
        return sum(int(metric.value) for metric in self._llm.get_metrics() if metric.name == _EXTERNAL)


def _tolerate_odd_objects() -> None:
    """Let vLLM look through modules that hold objects whose `__dict__` is none, as some that LMCache brings along.

    This vLLM looks for kernels in all that is imported, and dies of such an object. It gets a `vars` that does not.
    """
    from vllm.triton_utils import dispatcher

    def safe(value: object) -> Mapping[str, Any]:
        found: object = vars(value)
        return found if isinstance(found, Mapping) else {}

    dispatcher.vars = safe


def serve(
    setup: Mapping[str, Any],
    commands: TextIO,
    answers: TextIO,
    *,
    start: Callable[[Mapping[str, Any]], Any] | None = None,
) -> None:
    """Answer until there are no more commands. A command that fails is answered too. `start`: what is served."""

    def say(answer: Mapping[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        engine = (start or Engine)(setup)
        say({"up": True, **engine.stats()})
    except Exception as error:
        say({"error": f"{type(error).__name__}: {error}"})
        raise
    for line in commands:
        command = json.loads(line)
        try:
            say(getattr(engine, command.pop("do"))(**command))
        except Exception as error:  # noqa: BLE001  it is told, and the parent decides
            say({"error": f"{type(error).__name__}: {error}"})


def _end_with(parent: int) -> None:
    """End this process when its parent is gone: an engine that starts, or computes, does not look at its pipes."""
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os._exit(1)


def main(start: Callable[[Mapping[str, Any]], Any] | None = None) -> None:
    """Serve the pipes that the parent holds."""
    threading.Thread(target=_end_with, args=(os.getppid(),), name="headwater looks for its parent", daemon=True).start()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(json.loads(sys.argv[1]), sys.stdin, answers, start=start)
    answers.close()
    os._exit(0)  # nothing of an engine that was measured is worth waiting for
