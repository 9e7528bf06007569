"""What `bench vllm` asks of one contender that has the device to itself: the options, and the stages, one by one.

Each stage writes what it found into the contender's `Measured` as it goes, and says so. Every question to the engine
has a deadline, and none is begun without time for it.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from headwater.core.errors import HeadwaterError, InvalidConfig
from headwater.lab.bench.vllm import prompt_of
from headwater.lab.bench.vllm_client import EngineProcess, WorkerFailed
from headwater.lab.bench.vllm_contenders import OURS, PLAIN, THREADS
from headwater.lab.bench.vllm_models import SHAPES

NAMES: Final = (
    "offloading",
    PLAIN,
    OURS,
    THREADS,
    "lmcache",
)  # in this order: the first also pays for what is compiled once
USUAL: Final = tuple(name for name in NAMES if name != THREADS)  # unless more are asked for
DEVICES: Final = ("cpu", "cuda")
_LEAST_S: Final = 3.0  # a stage is begun only with so much time left
_CHUNK: Final = 256  # tokens: whole blocks, and whole chunks of everybody
_TAIL: Final = 5
_CANDIDATES: Final = 5
_GRAPHS: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64)
_ANSWER_S: Final = 120.0
_EMPTY_S: Final = 10.0
_REST_S: Final = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOptions:
    """What to measure."""

    python: str
    device: str = "cuda"
    contenders: tuple[str, ...] = USUAL
    lmcache: Path = Path(".lmc")
    shape: str = "8b"
    logs: Path | None = None  # where what engines print stays; None: nowhere
    models: Path | None = None  # where weights are kept between runs; None: nowhere
    lengths: tuple[int, ...] = (2048, 8192, 32768)
    repeats: int = 5
    crowds: tuple[int, ...] = (16, 64)
    crowd_tokens: int = 2048
    crowd_answer: int = 32
    crowd_repeats: int = 3
    running: int = 8
    running_prompt: int = 512
    running_answer: int = 384
    others: int = 16
    others_tokens: int = 4096
    others_width: int = 2
    fresh: int = 32
    fresh_tokens: int = 2048
    fresh_answer: int = 32
    fresh_width: int = 16
    fresh_repeats: int = 3
    room_gib: float = 24.0
    memory: float = 0.5  # of the GPU's, for an engine
    load_when: str = "always"
    disk: bool = False  # ours has a disk tier behind its host tier
    warm: bool = False  # an engine is started once before the first that counts
    seconds: float = 360.0

    def __post_init__(self) -> None:
        """Refuse what cannot be measured."""
        strange = [name for name in self.contenders if name not in NAMES]
        if strange or PLAIN not in self.contenders:
            raise InvalidConfig(f"--contenders are {PLAIN} and some of {', '.join(NAMES)}, not {strange}")
        if self.device not in DEVICES:
            raise InvalidConfig(f"--device is cpu or cuda, not {self.device!r}")
        if self.shape not in SHAPES:
            raise InvalidConfig(f"no shape {self.shape!r}; there are: {', '.join(SHAPES)}")
        tokens = (*self.lengths, self.crowd_tokens, self.others_tokens, self.fresh_tokens)
        if not self.lengths or any(num < _CHUNK or num % _CHUNK for num in tokens):
            raise InvalidConfig(f"lengths are multiples of {_CHUNK}: all share whole blocks and chunks only")
        if self.repeats < 1 or self.seconds <= 0 or self.room_gib <= 0 or min(self.crowds, default=1) < 1:
            raise InvalidConfig("--repeats, --seconds, --room-gib and --crowds must be positive")

    @property
    def max_tokens(self) -> int:
        """The longest prompt, with its answer."""
        longest = max(*self.lengths, self.crowd_tokens, self.others_tokens, self.fresh_tokens)
        return max(longest + 64, self.running_prompt + self.running_answer + 1) + self.crowd_answer

    def engine(self) -> dict[str, Any]:
        """What vLLM is told, of every contender."""
        common: dict[str, Any] = {"max_model_len": self.max_tokens, "enable_prefix_caching": True, "max_num_seqs": 128}
        if self.device == "cpu":
            return common | {"dtype": "float32", "block_size": 128, "max_num_batched_tokens": 2048}
        graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": list(_GRAPHS)}
        return common | {
            "dtype": "bfloat16",
            "gpu_memory_utilization": self.memory,
            "enforce_eager": False,
            "compilation_config": graphs,
        }


@dataclass(slots=True)
class Measured:
    """What one contender showed so far: plain JSON values."""

    name: str
    found: dict[str, Any] = field(default_factory=dict)
    answers: dict[str, Any] = field(default_factory=dict)  # of computed prompts, by length and number; not handed on


class TimeOver(HeadwaterError):
    """The contender's share of the time is spent."""


class ContenderRun:
    """One contender that is up, and the time that it has."""

    def __init__(self, worker: EngineProcess, options: StageOptions, until_s: float) -> None:
        self._worker = worker
        self._options = options
        self._until_s = until_s

    @property
    def left_s(self) -> float:
        """Of its share of the time."""
        return self._until_s - time.monotonic()

    def need(self, seconds: float = _LEAST_S) -> None:
        """Raise TimeOver without so much time."""
        if self.left_s < seconds:
            raise TimeOver(f"{self._worker.name}: no time left")

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Have the worker do something, within the time that is left."""
        self.need(0.0)
        return self._worker.ask(do, timeout_s=min(_ANSWER_S, max(_LEAST_S, self.left_s)), **arguments)

    def one(self, prompt: list[int], max_tokens: int = 1) -> dict[str, Any]:
        """One prompt, with what is compared."""
        return self.ask("generate", prompt=prompt, max_tokens=max_tokens, logprobs=_CANDIDATES)

    def empty(self) -> None:
        """Empty the device. Raises WorkerFailed."""
        if not self.ask("empty", rest_s=_REST_S, within_s=_EMPTY_S)["reset"]:
            raise WorkerFailed(f"{self._worker.name} does not let vLLM empty its prefix cache")

    # --- stages -------------------------------------------------------------------------------------------------------

    def length(self, num_tokens: int, measured: Measured, keep: Callable[[], None]) -> None:
        """Computed, out of vLLM's own cache, and after the device was emptied."""
        names = ("cold_ms", "local_ms", "rested_ms", "hit_ms")
        row: dict[str, Any] = {name: [] for name in names} | {"num_unequal": 0, "num_partial": 0, "num_twice_alike": 0}
        measured.found.setdefault("lengths", {})[str(num_tokens)] = row
        plain = measured.name == PLAIN
        for number in range(-1, self._options.repeats):  # the first one warms up
            self.need()
            prompt = prompt_of(f"{num_tokens} {number}", num_tokens + _TAIL)
            cold, local = self.one(prompt), self.one(prompt)
            self.ask("rest", within_s=_REST_S)
            rested = self.one(prompt)
            self.empty()
            hit = self.one(prompt)
            if plain:
                row["num_twice_alike"] += _same(cold, hit)
            elif hit["external_tokens"] and local["cached_tokens"] == hit["cached_tokens"]:
                row["num_unequal"] += not _same(local, hit)
            measured.answers[f"{num_tokens} {number}"] = (cold["tokens"], cold["logprobs"])
            if number < 0:
                continue
            for name, answer in (("cold_ms", cold), ("local_ms", local), ("rested_ms", rested)):
                row[name].append(answer["ttft_s"] * 1e3)
            if not plain and hit["external_tokens"] == num_tokens:
                row["hit_ms"].append(hit["ttft_s"] * 1e3)
            row["num_partial"] += not plain and hit["external_tokens"] != num_tokens
            keep()

    def crowd(self, num: int, measured: Measured, keep: Callable[[], None]) -> None:
        """Many at once: computed, and again and again after the device was emptied."""
        options = self._options
        prompts = [prompt_of(f"crowd {num} {at}", options.crowd_tokens + _TAIL) for at in range(num)]
        row: dict[str, Any] = {"cold_s": None, "s": [], "share": [], "other_first_tokens": 0}
        measured.found.setdefault("crowds", {})[str(num)] = row
        first: list[int] = []
        for number in range(options.crowd_repeats + 1):
            self.need()
            said = self._batch(prompts)
            tokens = [one[0] for one in said["tokens"]]
            if number == 0:
                row["cold_s"], first = said["seconds"], tokens
            else:
                row["s"].append(said["seconds"])
                row["share"].append(said["external_tokens"] / (num * options.crowd_tokens))
                row["other_first_tokens"] += sum(one != other for one, other in zip(tokens, first, strict=True))
            self.empty()
            keep()
            if measured.name == PLAIN and number:
                break  # nothing is ever there: once more is as good as three times

    def _batch(self, prompts: list[list[int]]) -> dict[str, Any]:
        give_up_s = min(_ANSWER_S, self.left_s)
        said = self._worker.ask(
            "batch",
            timeout_s=give_up_s + _LEAST_S,
            prompts=prompts,
            max_tokens=self._options.crowd_answer,
            give_up_s=give_up_s,
        )
        if not said["over"]:
            raise TimeOver(f"{self._worker.name}: a crowd did not end in {give_up_s:.0f} s")
        return said

    def decode(self, measured: Measured, keep: Callable[[], None]) -> None:
        """Requests that run: beside prompts that vLLM has itself, alone, beside hits, beside prompts that are new.

        What a hit costs those that run beyond the bytes is in the first: its last tokens are computed beside them.
        """
        options = self._options
        known = [prompt_of(f"other {at}", options.others_tokens + _TAIL) for at in range(options.others)]
        for prompt in known:
            self.need()
            self.ask("generate", prompt=prompt, max_tokens=1)
        beside: dict[str, list[list[int]]] = {"local": known, "alone": [], "hits": known}
        if measured.name == PLAIN:
            del beside["hits"]
        beside["fresh"] = [prompt_of(f"new {at}", options.others_tokens + _TAIL) for at in range(options.others)]
        for what, others in beside.items():
            self.need()
            running = [prompt_of(f"run {what} {at}", options.running_prompt) for at in range(options.running)]
            said = self.ask(
                "stream",
                prompts=others,
                width=options.others_width,
                max_tokens=1,
                give_up_s=min(_ANSWER_S / 2, self.left_s),
                running=running,
                running_tokens=options.running_answer,
            )
            if not said["over"]:
                raise TimeOver(f"{self._worker.name}: running requests did not end in time")
            share = said["external_tokens"] / (len(others) * options.others_tokens) if others else 0.0
            measured.found.setdefault("decode", {})[what] = {
                **{f"{at}_ms": said["token_s"][at] * 1e3 for at in ("p50", "p99", "mean") if at in said["token_s"]},
                "num_tokens": said["token_s"].get("num", 0),
                "others": said["prompts"],
                "others_ttft_ms": said["ttft_s"].get("p50", 0.0) * 1e3,
                "external_share": share,
            }
            self.empty()
            keep()

    def fresh(self, measured: Measured, keep: Callable[[], None]) -> None:
        """Prompts that nobody has seen, several at a time."""
        options = self._options
        row: dict[str, list[float]] = {"tokens_per_s": [], "ttft_ms": []}
        measured.found["fresh"] = row
        for number in range(options.fresh_repeats):
            self.need()
            names = range(options.fresh)
            prompts = [prompt_of(f"fresh {number} {at}", options.fresh_tokens + _TAIL) for at in names]
            said = self.ask(
                "stream",
                prompts=prompts,
                width=options.fresh_width,
                max_tokens=options.fresh_answer,
                give_up_s=min(_ANSWER_S / 2, self.left_s),
            )
            if not said["over"]:
                raise TimeOver(f"{self._worker.name}: fresh prompts did not end in time")
            row["tokens_per_s"].append(said["tokens_per_s"])
            row["ttft_ms"].append(said["ttft_s"]["p50"] * 1e3)
            self.empty()
            keep()


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return bool(one["tokens"] == other["tokens"] and one["logprobs"] == other["logprobs"])
