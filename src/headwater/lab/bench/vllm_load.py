"""An engine of `bench vllm` under load, in its own process: requests that run, and others that come beside them.

The protocol and the engine are those of `vllm_worker`. Times per token are of the window in which all running requests
decode and others are there; a step that returns several tokens of a request counts once for each of them.
"""

import collections
import itertools
import statistics
import time
from collections.abc import Sequence
from typing import Any, Final

from headwater.lab.bench import vllm_worker
from headwater.lab.bench.vllm_worker import VllmEngine

_SHORT: Final = 8  # tokens of a prompt whose steps let vLLM hear its connector
_PAUSE_S: Final = 0.02


class LoadedEngine(VllmEngine):
    """The same engine, with more than one request at a time."""

    def empty(self, rest_s: float, within_s: float) -> dict[str, Any]:
        """Let saves end, then empty vLLM's own prefix cache; it refuses while somebody still holds blocks."""
        give_up_s = time.monotonic() + within_s
        self.rest(rest_s)
        while not self._llm.reset_prefix_cache():
            if time.monotonic() > give_up_s:
                return {"reset": False}
            self.generate([3 + self._number % 200] * _SHORT)
            time.sleep(_PAUSE_S)
        return {"reset": True}

    def stream(
        self,
        prompts: Sequence[list[int]],
        width: int,
        max_tokens: int,
        give_up_s: float,
        running: Sequence[list[int]] = (),
        running_tokens: int = 0,
    ) -> dict[str, Any]:
        """Have `prompts` computed, `width` at a time, beside those that run. `over` is False where time was too short.

        Without running requests it ends with the last prompt; with them, when they have ended.
        """
        course = _LoadCourse(self, give_up_s)
        external = self._external()
        course.play(collections.deque(prompts), running, width=width, lengths=(max_tokens, running_tokens))
        end_s = course.end_s if course.end_s is not None else time.perf_counter()
        seconds = end_s - (course.begin_s if course.begin_s is not None else end_s)
        num_tokens = len(course.first_s) * max_tokens + sum(map(len, prompts[: len(course.first_s)]))
        return {
            "over": course.over,
            "seconds": seconds,
            "prompts": len(course.first_s),
            "tokens_per_s": num_tokens / seconds if seconds > 0 else None,
            "ttft_s": spread(course.first_s),
            "token_s": spread(course.gaps()),
            "external_tokens": self._external() - external,
        }


class _LoadCourse:
    """One `stream`: who runs, who came, when."""

    def __init__(self, engine: LoadedEngine, give_up_s: float) -> None:
        self._engine = engine
        self._give_up_s = time.perf_counter() + give_up_s
        self._begun_s: dict[str, float] = {}  # of the others: when each was handed in
        self._waiting: set[str] = set()  # those of them that have no token yet
        self._running: dict[str, list[tuple[float, int]]] = {}
        self._unfinished: set[str] = set()
        self.first_s: list[float] = []
        self.begin_s: float | None = None
        self.end_s: float | None = None
        self.over = True

    def play(
        self,
        prompts: "collections.deque[list[int]]",
        running: Sequence[list[int]],
        *,
        width: int,
        lengths: tuple[int, int],
    ) -> None:
        max_tokens, running_tokens = lengths
        for prompt in running:
            name = self._add(prompt, running_tokens)
            self._running[name] = []
        if not running:
            self.begin_s = time.perf_counter()
        here: set[str] = set()
        while self._unfinished or prompts:
            if time.perf_counter() > self._give_up_s:
                self.over = False
                self._engine._engine.abort_request(list(self._unfinished))
                break
            while self.begin_s is not None and self.end_s is None and prompts and len(here) < width:
                name = self._add(prompts.popleft(), max_tokens)
                here.add(name)
                self._waiting.add(name)
                self._begun_s[name] = time.perf_counter()
            self._take(self._engine._step(), here)
            if self.begin_s is None and all(self._running.values()):
                self.begin_s = time.perf_counter()
            if self.end_s is not None and prompts:
                prompts.clear()  # those that ran have ended: nobody is measured any more
            if not prompts and not here and self.end_s is None and (self._begun_s or not running):
                self.end_s = time.perf_counter()

    def _add(self, prompt: list[int], max_tokens: int) -> str:
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        engine = self._engine
        engine._number += 1
        name = f"{engine._number}"
        sampling = engine._sampling(max_tokens, output_kind=RequestOutputKind.DELTA)
        engine._engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), sampling)
        self._unfinished.add(name)
        return name

    def _take(self, outputs: Sequence[Any], here: set[str]) -> None:
        now_s = time.perf_counter()
        for output in outputs:
            name = output.request_id
            num = len(output.outputs[0].token_ids) if output.outputs else 0
            if name in self._running:
                if num:
                    self._running[name].append((now_s, num))
                if output.finished and self.end_s is None:
                    self.end_s = now_s  # from now on fewer run
            elif num and name in self._waiting:
                self._waiting.discard(name)
                self.first_s.append(now_s - self._begun_s[name])
            if output.finished:
                self._unfinished.discard(name)
                here.discard(name)

    def gaps(self) -> list[float]:
        """Seconds per token of those that ran, while they all did."""
        if self.begin_s is None:
            return []
        found: list[float] = []
        for times in self._running.values():
            for (before_s, _), (after_s, num) in itertools.pairwise(times):
                if before_s >= self.begin_s and (self.end_s is None or after_s <= self.end_s):
                    found += [(after_s - before_s) / num] * num
        return found


def spread(values: Sequence[float]) -> dict[str, float]:
    """How many, their mean, the middle and the slow end; empty without values."""
    if not values:
        return {}
    ordered = sorted(values)
    at = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {
        "num": len(ordered),
        "mean": statistics.fmean(ordered),
        **{name: ordered[min(len(ordered) - 1, int(share * len(ordered)))] for name, share in at.items()},
    }


def main() -> None:
    """Serve the pipes that the parent holds."""
    vllm_worker.main(LoadedEngine)
