"""`headwater bench vllm` on a GPU: contenders one after another, each with the whole device to itself.

Where several engines fit side by side they take turns (`vllm.py`), which cancels a noisy machine out. One engine fills
a GPU, so here each contender has a process of its own, and the next one begins when it is gone. Model, prompts and
their order are the same for all. Measured of each: its start and its first request; computed prompts, hits in vLLM's
own cache and hits after that was emptied; a crowd of hits at once; requests that run while others are loaded and saved;
prompts that nobody has seen. vLLM's own counters say where tokens came from.

Answers are compared bit by bit, log-probabilities included, where vLLM computes the same: a hit with a local hit of the
same prompt, and a computed prompt with that of vLLM alone, if vLLM alone computed it twice alike.

What is measured is handed on as it comes (`keep`), so a run that is killed leaves what it had. `seconds` is for the
whole: each contender has its share of what is left, and what does not fit is left out, by name.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from headwater.bench.pool_ways import NotHere
from headwater.bench.report import Report, Tell
from headwater.bench.vllm import prompt_of
from headwater.bench.vllm_client import Worker, WorkerFailed, start_worker
from headwater.bench.vllm_contenders import OURS, PLAIN, open_contender, require_vllm
from headwater.bench.vllm_models import SHAPES, digest_model, prepare_model
from headwater.bench.vllm_table import ratios_of, summary_of, table_of
from headwater.core.errors import HeadwaterError, InvalidConfig
from headwater.storage.scratch import memory_root

NAMES: Final = ("offloading", PLAIN, OURS, "lmcache")  # in this order: the first also pays for what is compiled once
ALIASES: Final = {"none": PLAIN, "ours": OURS, "offload": "offloading"}
DEVICES: Final = ("cpu", "cuda")
_MODULE: Final = "headwater.bench.vllm_load"
_CHUNK: Final = 256  # tokens: whole blocks, and whole chunks of everybody
_TAIL: Final = 5
_FIRST_TOKENS, _FIRST_ANSWER = 69, 4
_CANDIDATES: Final = 5
_GRAPHS: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64)
_UP_S: Final = 240.0
_ANSWER_S: Final = 120.0
_EMPTY_S: Final = 10.0
_REST_S: Final = 1.5
_ABOUT: Final = ("vllm", "torch", "gpu", "num_blocks", "block_tokens", "layout")
_LEAST_S: Final = 3.0  # a stage is begun only with so much time left
_MODEL_BYTES: Final = 20 << 30
_NOTES: Final = {
    "contenders": "plain: vLLM alone; headwater: every byte verified; offloading, lmcache: not",
    "start_s": "from the process' first instruction until the engine is up; engine_start_s: without imports",
    "first_ms": f"the first request after the start, {_FIRST_TOKENS} tokens, until the last of {_FIRST_ANSWER}",
    "cold_ms": "time to the first token, nothing cached",
    "local_ms": "the same prompt again at once, out of vLLM's own prefix cache, while the connector still saves",
    "rested_ms": "the same once more, when saves have ended",
    "hit_ms": "after the device was emptied; only of hits in which all shared tokens came from the connector",
    "crowd": "prompts at once after the device was emptied, until the last token of each; share: of shared tokens",
    "decode": "ms per token of running requests: alone, while others hit, while others are computed and saved",
    "fresh": "prompts that nobody has seen, several at a time: tokens per second, prompts and answers",
    "ratios": "of ours: to vLLM alone (to_plain_alone: to its running requests with nobody beside them), and to the "
    "better of the others; cost_ms: of a hit, above a local hit of vLLM alone",
    "tokens_equal": "no hit differed from a local hit in any bit, nor a computed prompt from vLLM alone",
}

Keep = Callable[[str, Mapping[str, Any]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to measure."""

    python: str
    device: str = "cuda"
    contenders: tuple[str, ...] = NAMES
    lmcache: Path = Path(".lmc")
    shape: str = "8b"
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
class _Measured:
    """What one contender showed so far: plain JSON values."""

    name: str
    found: dict[str, Any] = field(default_factory=dict)
    answers: dict[str, Any] = field(default_factory=dict)  # of computed prompts, by length and number; not handed on


class _TimeOver(HeadwaterError):
    """The contender's share of the time is spent."""


@dataclass(frozen=True, slots=True)
class _Time:
    """When the whole has to be over, and how many come behind."""

    until_s: float
    num_later: int

    def share(self, start_s: float) -> float:
        """Until when one that is up may go on, if the others start as long as it did."""
        now_s = time.monotonic()
        return now_s + (self.until_s - now_s - self.num_later * start_s) / (self.num_later + 1)


class _Run:
    """One contender that is up, and the time that it has."""

    def __init__(self, worker: Worker, options: Options, until_s: float) -> None:
        self._worker = worker
        self._options = options
        self._until_s = until_s

    @property
    def left_s(self) -> float:
        return self._until_s - time.monotonic()

    def need(self, seconds: float = _LEAST_S) -> None:
        """Raise _TimeOver without so much time."""
        if self.left_s < seconds:
            raise _TimeOver(f"{self._worker.name}: no time left")

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Have the worker do something, within the time that is left."""
        self.need(0.0)
        return self._worker.ask(do, timeout_s=min(_ANSWER_S, max(_LEAST_S, self.left_s)), **arguments)

    def one(self, prompt: list[int], max_tokens: int = 1) -> dict[str, Any]:
        return self.ask("generate", prompt=prompt, max_tokens=max_tokens, logprobs=_CANDIDATES)

    def empty(self) -> None:
        """Empty the device. Raises WorkerFailed."""
        if not self.ask("empty", rest_s=_REST_S, within_s=_EMPTY_S)["reset"]:
            raise WorkerFailed(f"{self._worker.name} does not let vLLM empty its prefix cache")

    # --- stages -------------------------------------------------------------------------------------------------------

    def length(self, num_tokens: int, measured: _Measured, keep: Callable[[], None]) -> None:
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

    def crowd(self, num: int, measured: _Measured, keep: Callable[[], None]) -> None:
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
            raise _TimeOver(f"{self._worker.name}: a crowd did not end in {give_up_s:.0f} s")
        return said

    def decode(self, measured: _Measured, keep: Callable[[], None]) -> None:
        """Requests that run: alone, beside hits, beside prompts that are computed and saved."""
        options = self._options
        known = [prompt_of(f"other {at}", options.others_tokens + _TAIL) for at in range(options.others)]
        if measured.name != PLAIN:
            for prompt in known:
                self.need()
                self.ask("generate", prompt=prompt, max_tokens=1)
            self.empty()
        beside: dict[str, list[list[int]]] = {"alone": [], "hits": known}
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
                raise _TimeOver(f"{self._worker.name}: running requests did not end in time")
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

    def fresh(self, measured: _Measured, keep: Callable[[], None]) -> None:
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
                raise _TimeOver(f"{self._worker.name}: fresh prompts did not end in time")
            row["tokens_per_s"].append(said["tokens_per_s"])
            row["ttft_ms"].append(said["ttft_s"]["p50"] * 1e3)
            self.empty()
            keep()


def run(options: Options, *, tell: Tell | None = None, keep: Keep | None = None) -> Report:
    """Measure. Blocks for minutes; engines are started one after another, and end. Raises HeadwaterError.

    `keep` is called with a name and plain values whenever something more was measured.
    """
    require_vllm(options.python)
    until_s = time.monotonic() + options.seconds
    measured: dict[str, _Measured] = {}
    absent: dict[str, str] = {}
    about: dict[str, Any] = {"device": options.device, "shape": options.shape}
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headwater-vllm-")))
        model = _model(options, stack, about)
        order = ([PLAIN] if options.warm else []) + sorted(options.contenders, key=NAMES.index)
        for at, name in enumerate(order):
            if tell is not None:
                tell("engines", at, len(order))
            one, warms = _Measured(name), options.warm and at == 0
            say = _silent if warms else _keeper(one, keep)
            try:
                _contend(one, options, model, scratch, say, limits=_Time(until_s, len(order) - at - 1), warms=warms)
            except (NotHere, WorkerFailed) as error:
                if name == PLAIN and not one.found.get("lengths"):
                    raise  # without vLLM itself there is nothing to compare with
                absent[one.name] = str(error)
            if one.found and not warms:
                measured[one.name] = one
    plain = measured[PLAIN]
    for name, one in measured.items():
        if name != PLAIN:
            _compare(one, plain)
    summaries = {name: summary_of(one.found) for name, one in measured.items()}
    return Report(
        command="bench vllm",
        options={name: _plain(getattr(options, name)) for name in options.__slots__},
        results={
            "tokens_equal": all(not one.found.get("num_unequal") for one in measured.values()),
            "contenders": summaries,
            "ratios": ratios_of(summaries, ours=OURS, plain=PLAIN),
            "table": table_of(summaries),
            "absent": absent,
            **about,
        },
        notes=_NOTES,
        samples=dict(_samples(measured)),
    )


def _model(options: Options, stack: ExitStack, about: dict[str, Any]) -> Path:
    """The model's directory, with its files, whose digest our connector will find known."""
    models = options.models
    if models is None:
        root = memory_root(_MODEL_BYTES if options.device == "cuda" else 1 << 30)
        models = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headwater-models-", dir=root)))
    directory = models.resolve() / f"{options.shape}-{options.device}"
    directory.parent.mkdir(parents=True, exist_ok=True)
    begin_s = time.monotonic()
    prepare_model(options.shape, directory, python=options.python, device=options.device, timeout_s=options.seconds / 2)
    about["weights_made_s"] = round(time.monotonic() - begin_s, 1)
    begin_s = time.monotonic()
    digest_model(directory, python=options.python, timeout_s=options.seconds / 2)
    about["weights_digest_s"] = round(time.monotonic() - begin_s, 1)  # what our first start on a new checkpoint adds
    return directory


def _contend(
    one: _Measured,
    options: Options,
    model: Path,
    scratch: Path,
    keep: Callable[[], None],
    *,
    limits: _Time,
    warms: bool,
) -> None:
    """Start one engine, measure, end it. Raises NotHere, WorkerFailed; what was measured by then stays."""
    extra: dict[str, Any] = {"load_when": options.load_when} | ({} if options.disk else {"disk_directory": None})
    with open_contender(
        one.name,
        python=options.python,
        lmcache=options.lmcache,
        room_bytes=int(options.room_gib * (1 << 30)),
        device=options.device,
        ours=extra,
    ) as contender:
        setup = {"model": str(model), "engine": options.engine(), "kv_gib": 1}
        begin_s = time.monotonic()
        worker = start_worker(
            contender,
            python=options.python,
            setup=setup,
            threads=1,
            log=scratch / f"{one.name}.log",
            module=_MODULE,
            device=options.device,
        )
        try:
            up = worker.wait_up(min(_UP_S, limits.share(0.0) - begin_s))
            start_s = time.monotonic() - begin_s
            one.found |= {
                "start_s": start_s,
                "engine_start_s": up["engine_start_s"],
                "about": {name: up[name] for name in _ABOUT},
            }
            played = _Run(worker, options, limits.share(start_s))
            first = played.one(prompt_of("first", _FIRST_TOKENS), _FIRST_ANSWER)
            one.found["first_ms"] = first["seconds"] * 1e3
            keep()
            if not warms:
                _play(played, one, options, keep)
        finally:
            worker.close()


def _play(played: _Run, one: _Measured, options: Options, keep: Callable[[], None]) -> None:
    """All stages, the ones that matter most first; those that do not fit are named."""
    stages: dict[str, Callable[[], None]] = {}
    for num_tokens in options.lengths:
        stages[f"{num_tokens} tokens"] = lambda num_tokens=num_tokens: played.length(num_tokens, one, keep)  # type: ignore[misc]
    for num in options.crowds:
        stages[f"crowd of {num}"] = lambda num=num: played.crowd(num, one, keep)  # type: ignore[misc]
    if options.running:
        stages["decode"] = lambda: played.decode(one, keep)
    if options.fresh:
        stages["fresh"] = lambda: played.fresh(one, keep)
    for name, stage in stages.items():
        try:
            stage()
        except _TimeOver as error:
            one.found.setdefault("left_out", {})[name] = str(error)
    one.found["spare_s"] = played.left_s
    keep()


def _compare(one: _Measured, plain: _Measured) -> None:
    """Count what differs: hits from local hits, and computed prompts from vLLM's own where that is alike twice."""
    rows = one.found.get("lengths", {})
    unequal = sum(row["num_unequal"] for row in rows.values())
    others = 0
    for name, answer in one.answers.items():
        row = plain.found["lengths"].get(name.partition(" ")[0], {})
        if name in plain.answers and row.get("num_twice_alike") == len(row.get("cold_ms", ())) + 1:
            others += answer != plain.answers[name]
    one.found["num_unequal"] = unequal + others


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return bool(one["tokens"] == other["tokens"] and one["logprobs"] == other["logprobs"])


def _keeper(one: _Measured, keep: Keep | None) -> Callable[[], None]:
    if keep is None:
        return _silent
    return lambda: keep(one.name, one.found)


def _silent() -> None:
    """Keep nothing."""


def _samples(measured: Mapping[str, _Measured]) -> Iterator[tuple[str, list[float]]]:
    for name, one in measured.items():
        for num_tokens, row in one.found.get("lengths", {}).items():
            for what in ("cold_ms", "local_ms", "rested_ms", "hit_ms"):
                yield f"{name}_{num_tokens}_{what}", row[what]
        for num, row in one.found.get("crowds", {}).items():
            yield f"{name}_crowd_{num}_s", row["s"]
        for what, values in one.found.get("fresh", {}).items():
            yield f"{name}_fresh_{what}", values


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
