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
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Final, TextIO

_REST_S: Final = 20.0
_QUIET_S: Final = 0.05
_QUIET_SHARE: Final = 0.1  # of a core: what a process uses that only waits
_EMPTY_STEP_S: Final = 0.001
_LOOK_S: Final = 1.0
_EXTERNAL: Final = "vllm:external_prefix_cache_hits"


class VllmEngine:
    """vLLM, asked for one prompt, or for several at once."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        begin_s = time.monotonic()
        if setup.get("odd_objects"):
            _tolerate_odd_objects()
        options = {"enforce_eager": True, **setup["engine"]}
        if setup.get("transfer") is not None:
            options["kv_transfer_config"] = KVTransferConfig(**setup["transfer"])
        self._llm = LLM(
            model=setup["model"],
            skip_tokenizer_init=True,
            disable_log_stats=False,  # it counts what a connector gave only then
            **options,
        )
        if setup.get("packed"):
            _tell_packed()
        self._engine = self._llm.llm_engine
        self._core = self._engine.engine_core.engine_core
        self._number = 0
        self._computed = True
        after_step = self._core.post_step

        def post_step(*, model_executed: bool) -> None:
            self._computed = model_executed
            after_step(model_executed=model_executed)

        self._core.post_step = post_step
        self._start_s = time.monotonic() - begin_s

    def generate(
        self, prompt: list[int], max_tokens: int = 1, profile: str | None = None, logprobs: int | None = None
    ) -> dict[str, Any]:
        """Compute tokens; times the first one. `logprobs`: of so many candidates for each token, too."""
        from vllm.inputs import TokensPrompt

        self._number += 1
        sampling = self._sampling(max_tokens, logprobs=logprobs)
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
        seconds = time.perf_counter() - begin_s
        if isinstance(watch, cProfile.Profile):
            watch.dump_stats(profile or "")
        return {
            "ttft_s": ttft_s,
            "cpu_s": cpu_s,
            "seconds": seconds,
            "logprobs": [
                {str(token): one.logprob for token, one in at.items()} for at in last.outputs[0].logprobs or ()
            ],
            "tokens": list(last.outputs[0].token_ids),
            "cached_tokens": last.num_cached_tokens or 0,
            "external_tokens": self._external() - before,
        }

    def batch(self, prompts: Sequence[list[int]], max_tokens: int, give_up_s: float) -> dict[str, Any]:
        """Compute all of these at once. `over` is False where some had not ended in time; they are aborted."""
        from vllm.inputs import TokensPrompt

        sampling = self._sampling(max_tokens)
        before = self._external()
        begin_s = time.monotonic()
        names = []
        for prompt in prompts:
            self._number += 1
            names.append(f"{self._number}")
            self._engine.add_request(names[-1], TokensPrompt(prompt_token_ids=prompt), sampling)
        last: dict[str, Any] = {}
        num_steps, first_step = 0, 0
        while not _all_over(names, last) and time.monotonic() - begin_s < give_up_s:
            for output in self._step():
                last[output.request_id] = output
            num_steps += self._computed
            first_step = first_step or (num_steps if last else 0)
        seconds = time.monotonic() - begin_s
        over = _all_over(names, last)
        if not over:
            self._engine.abort_request(names)
        outputs = [last.get(name) for name in names]
        return {
            "over": over,
            "seconds": seconds,
            "tokens": [list(one.outputs[0].token_ids) if one is not None else [] for one in outputs],
            "cached_tokens": [(one.num_cached_tokens or 0) if one is not None else 0 for one in outputs],
            "external_tokens": self._external() - before,
            "steps_to_first": first_step,
        }

    def rest(self, within_s: float = _REST_S) -> dict[str, Any]:
        """Let what was begun come to an end: steps that vLLM still wants, then threads that still compute."""
        begin_s = time.perf_counter()
        busy = True
        while busy and time.perf_counter() - begin_s < within_s:
            while self._core.scheduler.has_requests() and time.perf_counter() - begin_s < within_s:
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

        cache = self._engine.vllm_config.cache_config
        return {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "num_threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
            "num_blocks": cache.num_gpu_blocks,
            "block_tokens": cache.block_size,
            "layout": str(getattr(cache, "kv_cache_layout", None)),
            "engine_start_s": self._start_s,
        }

    @staticmethod
    def _sampling(max_tokens: int, **more: Any) -> Any:
        """Greedy, to the end."""
        from vllm import SamplingParams

        return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, **more)

    def _step(self) -> list[Any]:
        """A step, and after one that computed nothing a pause, as `vllm serve` makes: threads of a connector go on."""
        outputs: list[Any] = self._engine.step()
        if not self._computed and self._core.scheduler.has_requests():
            time.sleep(_EMPTY_STEP_S)
        return outputs

    def _external(self) -> int:
        return sum(int(metric.value) for metric in self._llm.get_metrics() if metric.name == _EXTERNAL)


def _all_over(names: Sequence[str], last: Mapping[str, Any]) -> bool:
    return all(name in last and last[name].finished for name in names)


def _tolerate_odd_objects() -> None:
    """Let vLLM look through modules that hold objects whose `__dict__` is none, as some that LMCache brings along.

    This vLLM looks for kernels in all that is imported, and dies of such an object. It gets a `vars` that does not.
    """
    from vllm.triton_utils import dispatcher

    def safe(value: object) -> Mapping[str, Any]:
        found: object = vars(value)
        return found if isinstance(found, Mapping) else {}

    dispatcher.vars = safe


def _tell_packed() -> None:
    """Have LMCache look at vLLM's tensors now: it finds out at its first copy, whose room has another shape then."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    adapter: Any = get_kv_transfer_group()._lmcache_engine
    gpu = adapter.lmcache_engine.gpu_connector
    gpu.initialize_kvcaches_ptr(kvcaches=list(adapter.kv_caches.values()))
    gpu._initialize_kv_cache_pointers()


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
        engine = (start or VllmEngine)(setup)
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
