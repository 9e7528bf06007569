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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from headwater.lab.bench.pool_ways import NotHere
from headwater.lab.bench.report import BenchReport, Tell
from headwater.lab.bench.vllm import prompt_of
from headwater.lab.bench.vllm_client import WorkerFailed, start_worker
from headwater.lab.bench.vllm_contenders import OURS, PLAIN, THREADS, open_contender, require_vllm
from headwater.lab.bench.vllm_models import digest_model, prepare_model
from headwater.lab.bench.vllm_stages import NAMES, ContenderRun, Measured, StageOptions, TimeOver
from headwater.lab.bench.vllm_table import ratios_of, summary_of, table_of
from headwater.storage.scratch import memory_root

ALIASES: Final = {"none": PLAIN, "ours": OURS, "offload": "offloading", "threads": THREADS}
_MODULE: Final = "headwater.lab.bench.vllm_load"
_FIRST_TOKENS, _FIRST_ANSWER = 69, 4
_UP_S: Final = 240.0
_START_S: Final = 22.0  # what a start takes on a GPU, about
_ABOUT: Final = ("vllm", "torch", "gpu", "num_blocks", "block_tokens", "layout")
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


@dataclass(frozen=True, slots=True)
class _Time:
    """When the whole has to be over, and how many come behind."""

    until_s: float
    num_later: int

    def share(self, start_s: float = _START_S) -> float:
        """Until when one may go on, if those behind it take so long to start; the first takes longer than they will."""
        now_s = time.monotonic()
        return now_s + (self.until_s - now_s - self.num_later * start_s) / (self.num_later + 1)


def run(options: StageOptions, *, tell: Tell | None = None, keep: Keep | None = None) -> BenchReport:
    """Measure. Blocks for minutes; engines are started one after another, and end. Raises HeadwaterError.

    `keep` is called with a name and plain values whenever something more was measured.
    """
    require_vllm(options.python)
    until_s = time.monotonic() + options.seconds
    measured: dict[str, Measured] = {}
    absent: dict[str, str] = {}
    about: dict[str, Any] = {"device": options.device, "shape": options.shape}
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headwater-vllm-")))
        logs = options.logs or scratch
        logs.mkdir(parents=True, exist_ok=True)
        model = _model(options, stack, about)
        order = ([PLAIN] if options.warm else []) + sorted(options.contenders, key=NAMES.index)
        for at, name in enumerate(order):
            if tell is not None:
                tell("engines", at, len(order))
            one, warms = Measured(name), options.warm and at == 0
            say = _silent if warms else _keeper(one, keep)
            try:
                _contend(one, options, model, logs, say, limits=_Time(until_s, len(order) - at - 1), warms=warms)
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
    return BenchReport(
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


def _model(options: StageOptions, stack: ExitStack, about: dict[str, Any]) -> Path:
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
    one: Measured,
    options: StageOptions,
    model: Path,
    logs: Path,
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
            log=logs / f"vllm-{one.name}.log",
            module=_MODULE,
            device=options.device,
        )
        try:
            up = worker.wait_up(min(_UP_S, limits.share(0.0) - begin_s))
            one.found |= {
                "start_s": time.monotonic() - begin_s,
                "engine_start_s": up["engine_start_s"],
                "about": {name: up[name] for name in _ABOUT},
            }
            played = ContenderRun(worker, options, limits.share())
            first = played.one(prompt_of("first", _FIRST_TOKENS), _FIRST_ANSWER)
            one.found["first_ms"] = first["seconds"] * 1e3
            keep()
            if not warms:
                _play(played, one, options, keep)
        finally:
            worker.close()


def _play(played: ContenderRun, one: Measured, options: StageOptions, keep: Callable[[], None]) -> None:
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
        except TimeOver as error:
            one.found.setdefault("left_out", {})[name] = str(error)
    one.found["spare_s"] = played.left_s
    keep()


def _compare(one: Measured, plain: Measured) -> None:
    """Count what differs: hits from local hits, and computed prompts from vLLM's own where that is alike twice."""
    rows = one.found.get("lengths", {})
    unequal = sum(row["num_unequal"] for row in rows.values())
    others = 0
    for name, answer in one.answers.items():
        row = plain.found["lengths"].get(name.partition(" ")[0], {})
        if name in plain.answers and row.get("num_twice_alike") == len(row.get("cold_ms", ())) + 1:
            others += answer != plain.answers[name]
    one.found["num_unequal"] = unequal + others


def _keeper(one: Measured, keep: Keep | None) -> Callable[[], None]:
    if keep is None:
        return _silent
    return lambda: keep(one.name, one.found)


def _silent() -> None:
    """Keep nothing."""


def _samples(measured: Mapping[str, Measured]) -> Iterator[tuple[str, list[float]]]:
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
