"""`headwater bench vllm`: the time to the first token over shared prefixes in a real vLLM, ours beside others.

Each contender is an engine in a process of its own, with the same random model, in float32. They take turns, round by
round, each round in another order, and only one computes at a time. Prompts are a shared prefix and a short tail.
Before a hit vLLM's own prefix cache is emptied, and a sample counts only if vLLM says that the whole prefix came from
the connector. Costs are differences to a hit in vLLM's own prefix cache in the same round.

Overhead: engines with our connector and without one compute prompts that nobody has seen, in turns.
"""

import random
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from headwater.core.errors import HeadwaterError, InvalidConfig
from headwater.engine.make_model import make_model
from headwater.lab.bench.pool_ways import NotHere
from headwater.lab.bench.report import BenchReport, Samples, Tell
from headwater.lab.bench.vllm_client import EngineProcess, WorkerFailed, start_worker
from headwater.lab.bench.vllm_contenders import NAMES, OURS, PLAIN, open_contender, require_vllm
from headwater.lab.bench.vllm_figures import ContenderCourse, length_figures, overhead_figures
from headwater.lab.bench.vllm_models import SHAPES, family_of

COLD: Final = "cold"
LOCAL: Final = "local"
_BLOCK_TOKENS: Final = 128
_TAIL_TOKENS: Final = 20
_NUM_TAILS: Final = 3
_CHECK_TOKENS: Final = 4  # of each answer: the first one is timed
_ROOM_BYTES: Final = 1 << 30
_UP_S: Final = 300.0
_ANSWER_S: Final = 300.0
_RESETS: Final = 20
_PAUSE_S: Final = 0.1
_NOTES: Final = {
    "N_cold_ms": "per number N of shared tokens, medians: computed, nothing cached, no connector",
    "N_local_ms": "the prefix is in vLLM's own prefix cache, no connector",
    "N_offloading_ms": "vLLM's OffloadingConnector: its scheduler and LRU, memcpy as the copy, nothing verified",
    "N_lmcache_ms, N_lmcache-shm_ms": "LMCache's server connector: its default, and over shared memory",
    "N_headwater_ms": "HeadwaterConnector, a store in memory and one on disk, every byte verified, loads async",
    "N_headwater-sync_ms": "the same with load=sync: inside the step that needs the blocks",
    "*_cost_ms": "above a local hit in the same round: median, with the interval of the middle half",
    "*_against_*_ms": "ours minus the other in the same round: median, with its 95 % interval",
    "overhead": "with our connector / without, prompts that nobody has seen, median of pairs with its 95 % interval",
    "discarded": "samples that did not come from where they should, or not whole; they count nowhere",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOptions:
    """What to measure."""

    python: str = sys.executable
    lmcache: Path = Path(".lmc")
    contenders: tuple[str, ...] = NAMES
    shape: str = "medium"
    lengths: tuple[int, ...] = (1024, 4096)
    rounds: int = 15
    pairs: int = 30
    pair_tokens: int = 1024
    step_tokens: int = 512
    threads: int = 1
    kv_gib: int = 1

    def __post_init__(self) -> None:
        """Refuse what cannot be measured."""
        strange = [name for name in self.contenders if name not in NAMES]
        if strange:
            raise InvalidConfig(f"--contenders are some of {', '.join(NAMES)}, not {', '.join(strange)}")
        if self.shape not in SHAPES:
            raise InvalidConfig(f"no shape {self.shape!r}; there are: {', '.join(SHAPES)}")
        if not self.lengths or any(
            length < 2 * _BLOCK_TOKENS or length % (2 * _BLOCK_TOKENS) for length in self.lengths
        ):
            raise InvalidConfig(
                f"--lengths are multiples of {2 * _BLOCK_TOKENS}: all share whole blocks and chunks only"
            )
        if min(self.rounds, self.step_tokens, self.pair_tokens, self.threads, self.kv_gib) < 1 or self.pairs < 0:
            raise InvalidConfig("--rounds, --threads and token counts must be positive, --pairs not negative")

    @property
    def max_tokens(self) -> int:
        """The longest prompt, with its answer."""
        return max(*self.lengths, self.pair_tokens) + _TAIL_TOKENS + _CHECK_TOKENS


@dataclass(slots=True)
class _Field:
    """The engines that are up, and what is known of them."""

    workers: dict[str, EngineProcess]
    absent: dict[str, str] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)

    def drop(self, name: str, error: Exception) -> None:
        """Go on without one; without vLLM itself there is nothing to compare with."""
        if name == PLAIN:
            raise error
        self.absent[name] = str(error)
        worker = self.workers.pop(name, None)
        if worker is not None:
            worker.close()


def run(options: VllmOptions, *, tell: Tell | None = None) -> BenchReport:
    """Measure. Blocks for minutes; starts engines and servers on loopback and ends them. Raises HeadwaterError."""
    require_vllm(options.python)
    say = tell if tell is not None else _silent
    samples = Samples()
    results: dict[str, Any] = {}
    num_stages = len(options.lengths) + 2
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headwater-vllm-")))
        say("starting engines", 0, num_stages)
        engines = _start(options, directory, stack)
        discarded: dict[str, int] = {}
        num_unequal = 0
        for done, num_tokens in enumerate(options.lengths):
            say(f"{num_tokens:,} tokens", done + 1, num_stages)
            courses = _measure_length(engines, num_tokens, options)
            results |= length_figures(num_tokens, courses, local=LOCAL, ours=OURS)
            for name, course in courses.items():
                samples.values[f"{num_tokens}_{name}_ms"] = [value * 1e3 for value in course.ttft_s.values()]
                discarded[name] = discarded.get(name, 0) + course.num_discarded
                num_unequal += course.num_unequal
        say("overhead", num_stages - 1, num_stages)
        results |= _measure_overhead(engines, options, samples)
    return BenchReport(
        command="bench vllm",
        options={name: getattr(options, name) for name in options.__slots__} | {"lmcache": str(options.lmcache)},
        results={
            **results,
            "tokens_equal": num_unequal == 0,
            "discarded": discarded,
            "absent": engines.absent,
            **engines.about,
        },
        notes=_NOTES,
        samples=samples.values,
    )


def _silent(stage: str, done: int, total: int) -> None:
    """Tell nobody."""


def _start(options: VllmOptions, directory: Path, stack: ExitStack) -> _Field:
    """All engines, at once: most of it is imports."""
    make_model(family_of(options.shape), directory / "model", overrides=SHAPES[options.shape])
    engine = {
        "dtype": "float32",
        "block_size": _BLOCK_TOKENS,
        "max_model_len": options.max_tokens,
        "max_num_batched_tokens": options.step_tokens,
        "max_num_seqs": 4,
    }
    setup = {"model": str(directory / "model"), "engine": engine, "kv_gib": options.kv_gib}
    engines = _Field({})
    for name in (PLAIN, *options.contenders):
        try:
            contender = stack.enter_context(
                open_contender(name, python=options.python, lmcache=options.lmcache, room_bytes=_ROOM_BYTES)
            )
        except NotHere as error:
            engines.absent[name] = str(error)
            continue
        log = directory / f"{name}.log"
        worker = start_worker(contender, python=options.python, setup=setup, threads=options.threads, log=log)
        stack.callback(worker.close)
        engines.workers[name] = worker
    for name, worker in list(engines.workers.items()):
        try:
            about = worker.wait_up(_UP_S)
            _ask(worker, prompt_of(name, 2 * _BLOCK_TOKENS))  # what is made at the first use
        except WorkerFailed as error:
            engines.drop(name, error)
            continue
        if name == PLAIN:
            engines.about = {key: about[key] for key in ("vllm", "torch", "num_threads")}
    return engines


def _measure_length(engines: _Field, num_tokens: int, options: VllmOptions) -> dict[str, ContenderCourse]:
    shared = prompt_of("shared", num_tokens)
    prompts = [shared + prompt_of(f"tail {at}", _TAIL_TOKENS) for at in range(_NUM_TAILS)]
    courses = {COLD: ContenderCourse(), LOCAL: ContenderCourse()}
    plain = engines.workers[PLAIN]
    right: list[list[int]] = []
    for at, prompt in enumerate(prompts):
        _empty(plain)
        answer = _ask(plain, prompt)
        courses[COLD].ttft_s[at] = answer["ttft_s"]
        right.append(answer["tokens"])

    def guarded(name: str, work: Callable[[EngineProcess], None]) -> None:
        try:
            work(engines.workers[name])
        except WorkerFailed as error:
            engines.drop(name, error)
            courses.pop(name, None)

    for name in [other for other in engines.workers if other != PLAIN]:
        courses[name] = ContenderCourse()
        guarded(name, lambda worker: _fill(worker, prompts[0]))
    for number in range(-1, options.rounds):  # the first one warms up
        order = list(engines.workers)
        first = number % len(order)
        for name in order[first:] + order[:first]:
            at = number % _NUM_TAILS

            def take(worker: EngineProcess, at: int = at, number: int = number) -> None:
                course = courses[LOCAL if worker.name == PLAIN else worker.name]
                _take(worker, prompts[at], right[at], course, number=number, num_tokens=num_tokens)

            guarded(name, take)
    return courses


def _fill(worker: EngineProcess, prompt: list[int]) -> None:
    _ask(worker, prompt)
    _empty(worker)


def _take(
    worker: EngineProcess, prompt: list[int], right: list[int], course: ContenderCourse, *, number: int, num_tokens: int
) -> None:
    """One sample: of the local cache where there is no connector, else of the connector."""
    local = worker.name == PLAIN
    if not local:
        _empty(worker)
    answer = _ask(worker, prompt)
    course.num_unequal += answer["tokens"] != right
    if number < 0:
        return
    whole = answer["cached_tokens"] == num_tokens and answer["external_tokens"] == (0 if local else num_tokens)
    if whole:
        course.ttft_s[number] = answer["ttft_s"]
    else:
        course.num_discarded += 1


def _measure_overhead(engines: _Field, options: VllmOptions, samples: Samples) -> dict[str, float]:
    """Prompts that nobody has seen, both engines the same ones, in turns."""
    if OURS not in engines.workers or not options.pairs:
        return {}
    sides = [("off", engines.workers[PLAIN]), ("on", engines.workers[OURS])]
    taken: dict[str, list[float]] = {"off": [], "on": []}
    for pair in range(-1, options.pairs):
        prompt = prompt_of(f"pair {pair}", options.pair_tokens)
        for side, worker in sides if pair % 2 else sides[::-1]:
            answer = _ask(worker, prompt)
            if answer["cached_tokens"]:
                raise HeadwaterError(f"{worker.name} had seen a prompt that is new")
            if pair >= 0:
                taken[side].append(answer["ttft_s"])
    for side, values in taken.items():
        samples.values[f"{side}_ms"] = [value * 1e3 for value in values]
    return overhead_figures(taken["off"], taken["on"])


def _ask(worker: EngineProcess, prompt: list[int]) -> dict[str, Any]:
    """Compute, and let everything that it began come to an end."""
    time.sleep(_PAUSE_S)
    answer = worker.ask("generate", timeout_s=_ANSWER_S, prompt=prompt, max_tokens=_CHECK_TOKENS)
    worker.ask("rest", timeout_s=_ANSWER_S)
    return answer


def _empty(worker: EngineProcess) -> None:
    """Empty vLLM's own prefix cache. It refuses while somebody still holds blocks. Raises WorkerFailed."""
    for _ in range(_RESETS):
        if worker.ask("reset", timeout_s=_ANSWER_S)["reset"]:
            return
        worker.ask("rest", timeout_s=_ANSWER_S)
    raise WorkerFailed(f"{worker.name} does not let vLLM empty its prefix cache")


def prompt_of(seed: str, num_tokens: int) -> list[int]:
    """Tokens that follow from the seed."""
    source = random.Random(seed)  # noqa: S311  nothing secret
    return [source.randrange(3, 256) for _ in range(num_tokens)]
