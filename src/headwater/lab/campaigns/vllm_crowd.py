"""The engine's side of `vllm_mixed.py`: a crowd of requests, in vLLM's process, and what is left of them at rest."""

import os
import random
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from headwater.lab.verify.vllm_worker import EngineStage, Proven, worker_side

_PREFIXES, _LONGEST = 120, 12  # prefixes, and their blocks at most
_AGAIN: Final = 0.25  # of the requests are ones of the last
_RECENT: Final = 300
_ABORTED: Final = 0.04
_SHORT, _LONG = 8, 80  # tokens of answers, at most
_TOGETHER, _GROUPS = 40, 20  # of so many groups of so many requests, one has short prompts and long answers
WIDTHS: Final = (1, 4, 16, 64)  # that are there at a time, by turns
_SAME_WIDTH: Final = 4  # times as many requests come before it changes
_HUNG_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class MixedRequest:
    """One request. `abort_after`: so many steps after it came; 0: never."""

    prompt: list[int]
    num_answer: int
    abort_after: int


def requests_of(seed: int, number: int, block_tokens: int) -> list[MixedRequest]:
    """The requests of a campaign, the same in all processes."""
    chance = random.Random(seed)

    def tokens(number: int) -> list[int]:
        return [chance.randrange(3, 256) for _ in range(number)]

    prefixes = [tokens(chance.randint(1, _LONGEST) * block_tokens) for _ in range(_PREFIXES)]
    found: list[MixedRequest] = []
    for at in range(number):
        grows = at // _TOGETHER % _GROUPS == 1  # together they need more blocks than there are
        if found and not grows and chance.random() < _AGAIN:
            prompt = chance.choice(found[-_RECENT:]).prompt
        else:
            prefix = prefixes[min(int(chance.expovariate(4 / _PREFIXES)), _PREFIXES - 1)]
            kept = 0 if grows else chance.randint(0, len(prefix) // block_tokens) * block_tokens
            prompt = prefix[:kept] + tokens(chance.randint(1, 2 * block_tokens))
        aborts = chance.randint(1, 2 * _SHORT) if chance.random() < _ABORTED else 0
        found.append(MixedRequest(prompt, _LONG if grows else chance.randint(1, _SHORT), aborts))
    return found


class Crowded(EngineStage):
    """What the worker serves: an engine that is asked for all of them."""

    def begin(self, seed: int, number: int) -> dict[str, Any]:
        """Before the first round."""
        here = self._here
        self._course = _MixedCourse(here, requests_of(seed, number, here.facts["block_tokens"]), random.Random(seed))
        self._before = here.counted()
        return {"begun": True}

    def play(self, start: int, end: int) -> dict[str, Any]:
        """Ask for these, and come to rest. Blocks."""
        course, begin_s = self._course, time.monotonic()
        course.run(range(start, end))
        seconds = time.monotonic() - begin_s
        rest = {"requests": end, **self._rest()}
        counted = self._here.counted()
        return {
            "answers": [course.answers.pop(at, None) for at in range(start, end)],
            "num_aborted": course.num_aborted,
            "num_hung": course.num_hung,
            "rest": rest,
            "counted": {name: value - self._before.get(name, 0) for name, value in counted.items()},
            "seconds": seconds,
        }

    def _rest(self) -> dict[str, Any]:
        """Everything ends, vLLM's own cache is emptied: who still has something, and how much memory is used."""
        said = self.settle()
        pool = self._here._core.scheduler.kv_cache_manager.block_pool
        return {
            "settled": said["settled"],
            "emptied": said["reset"],
            "blocks_held": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),  # one is vLLM's own, and never free
            "requests_kept": _requests_kept(self._here),
            **_memory(),
        }


class _MixedCourse:
    """Requests that come, run, are aborted, end."""

    def __init__(self, engine: Proven, asked: Sequence[MixedRequest], chance: random.Random) -> None:
        self._engine = engine
        self._asked = asked
        self._chance = chance
        self._here: dict[str, tuple[int, int, float]] = {}  # by name: which, steps left until it is aborted, since when
        self.answers: dict[int, list[int]] = {}
        self.num_aborted = self.num_hung = self.num_over = 0

    def run(self, order: Iterable[int]) -> None:
        """Until all of these are over."""
        waiting = deque(order)
        width, left = 0, 0
        while waiting or self._here:
            if not left:
                width = self._chance.choice(WIDTHS)
                left = width * _SAME_WIDTH
            while waiting and left and len(self._here) < width:
                self._add(waiting.popleft())
                left -= 1
            for output in self._engine._step():
                if output.finished and output.request_id in self._here:
                    at, _, _ = self._here.pop(output.request_id)
                    self.answers[at] = list(output.outputs[0].token_ids)
                    self.num_over += 1
            self._abort()

    def _add(self, at: int) -> None:
        from vllm.inputs import TokensPrompt

        one = self._asked[at]
        self._engine._number += 1
        name = f"{self._engine._number}"
        prompt = TokensPrompt(prompt_token_ids=one.prompt)
        self._engine._engine.add_request(name, prompt, self._engine._sampling(one.num_answer))
        self._here[name] = at, one.abort_after, time.monotonic()

    def _abort(self) -> None:
        """Those whose steps are over, and those that never end."""
        now_s = time.monotonic()
        ending = []
        for name, (at, steps, since_s) in self._here.items():
            self._here[name] = at, steps - 1, since_s
            hung = now_s - since_s > _HUNG_S
            self.num_hung += hung
            if steps == 1 or hung:
                ending.append(name)
        for name in ending:
            del self._here[name]
            self.num_over += 1
            self.num_aborted += 1
        if ending:
            self._engine._engine.abort_request(ending)


def _requests_kept(engine: Proven) -> int:
    """What our scheduler's side still knows of requests, and the brain of slots, when there are none. It is checked."""
    opened = getattr(engine._core.scheduler.connector, "_scheduler", None)
    if opened is None:
        return 0
    with opened.cache.still() as brain:
        brain.validate()
    side = opened.side
    return len(side._tracked) + len(side._leaving) + len(side._pinned)


def _memory() -> dict[str, Any]:
    """Of the device, of this process, and of its executor."""
    import torch

    found: dict[str, Any] = {"host_bytes": _own_bytes(os.getpid())}
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        found["device_bytes"] = total - free
    executor = getattr(worker_side(), "process", None)
    if executor is not None:
        found["executor_bytes"] = _own_bytes(executor.pid)
    return found


def _own_bytes(pid: int) -> int:
    """A process' own memory: what is shared with others, as a slab is, does not count."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    return 0
