"""`headwater bench serve`: conversations over HTTP, with the cache and without: what is computed, and what is said.

`headwater serve` itself, in a process of its own: once with tiers in temporary directories, once with `--no-cache`.
Several conversations at once, behind one system prompt. Each turn sends the whole conversation again, with the answers
that were given, as chat clients do; answers are greedy and streamed, and the time to the first token is the client's.

Without `--model`, the model is a tiny random one that says printable ASCII only. A chat sends answers back as text, and
bytes that are no text would come back as other tokens: a fault of random weights that trained ones do not have.

Not here: another engine, an arrival process, a client that is itself measured. It is the standard library's.
"""

import queue
import random
import re
import select
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final

import numpy as np

from headwater.core.errors import HeadwaterError, InvalidConfig, NotInstalled

try:
    import torch
    from safetensors.torch import load_file, save_file
except ModuleNotFoundError as error:
    raise NotInstalled(f"a server and its model need {error.name}: pip install 'headwater[serve]'") from error

from headwater.engine.checkpoint import SINGLE
from headwater.engine.make_model import make_model
from headwater.lab.bench.client import BenchClient
from headwater.lab.bench.report import BenchReport, Tell
from headwater.storage.scratch import disk_root, memory_root

# The command, and not its functions: what is measured is what users run. -P: nothing from where we happen to stand.
_COMMAND: Final = (sys.executable, "-P", "-c", "from headwater.cli import app; app()", "serve")
_TIER_MIB: Final = 256
_HEAD: Final = "lm_head.weight"
_START_S: Final = 600.0  # for a server to load its model
_STOP_S: Final = 60.0  # for a server to end
_COUNT_S: Final = 10.0  # for its counters to hear of the last answer
_COUNTERS: Final = ("prompt_tokens_total", "hit_tokens_total")

_WORDS: Final = (
    "about after again answer any ask before both check each early every find first from give help how into keep know "
    "last less like long make many more most near need never next often only order other part plain please read reply "
    "right same send short show since some state still take tell than that their then these they this through time "
    "turn under until very want what when where which while will with word work would write your"
)
_NOTES: Final = {
    "computed_tokens_on, _off": "prompt tokens that were computed, with the cache and without: prompt less cached",
    "computed_counts_on, _off": "the same by usage, the engine's own count, /metrics; preemptions make them differ",
    "computed_fall": "1 - on / off",
    "answers_equal": "every answer of every turn, to the last character",
    "cached_tokens_on, _off": "prompt tokens that were not computed, by the tier that had them",
    "requests": "answers that are asked for in each mode",
    "ttft_*_ms": "as the client sees it, over all turns: from sending a request to the first text of its answer",
    "requests_per_s_on, _off": "answers, over the time from the first request to the last answer",
    "errors": "a conversation ends with its first error",
    "tokens": "of the tiny model one is one byte: *_chars of options are tokens, besides those of the chat template",
}


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What to measure."""

    conversations: int = 8
    turns: int = 6
    max_tokens: int = 64
    system_chars: int = 768
    user_chars: int = 96
    model: Path | None = None
    device: str = "cpu"
    num_blocks: int | None = None  # on the device; None: the server's own choice
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        if min(self.conversations, self.turns, self.max_tokens, self.system_chars, self.user_chars) < 1:
            raise InvalidConfig("conversations, turns and lengths must be positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchTurn:
    """An answer, what it cost by the server's account, and when it began."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cached_by_tier: Mapping[str, int]
    engine_tokens: int  # computed, of prompt and answer
    preemptions: int
    ttft_s: float

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that the cache did not have."""
        return self.prompt_tokens - self.cached_tokens

    @property
    def engine_prompt_tokens(self) -> int:
        """The same by the engine's count. The token that makes an answer long enough is not computed any more."""
        return self.engine_tokens - self.completion_tokens + (self.finish_reason == "length")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLoad:
    """What became of all conversations at one server."""

    conversations: Sequence[Sequence[BenchTurn]]
    errors: Sequence[str]
    seconds: float
    metrics_tokens: int  # prompt tokens computed, by /metrics

    @property
    def turns(self) -> list[BenchTurn]:
        """All of them."""
        return [turn for turns in self.conversations for turn in turns]

    def results(self, mode: str) -> dict[str, Any]:
        """The figures of this mode."""
        turns = self.turns
        computed = sum(turn.computed_tokens for turn in turns)
        engine = sum(turn.engine_prompt_tokens for turn in turns)
        cached: Counter[str] = Counter()
        for turn in turns:
            cached.update(turn.cached_by_tier)
        ttft_ms = [turn.ttft_s * 1e3 for turn in turns]
        p50, p95 = (float(np.percentile(ttft_ms, share)) if turns else None for share in (50, 95))
        return {
            f"prompt_tokens_{mode}": sum(turn.prompt_tokens for turn in turns),
            f"computed_tokens_{mode}": computed,
            f"computed_counts_{mode}": {"usage": computed, "engine": engine, "metrics": self.metrics_tokens},
            f"cached_tokens_{mode}": dict(cached),
            f"preemptions_{mode}": sum(turn.preemptions for turn in turns),
            f"ttft_{mode}_p50_ms": p50,
            f"ttft_{mode}_p95_ms": p95,
            f"requests_per_s_{mode}": len(turns) / self.seconds,
        }


def run(options: ServeOptions | None = None, *, tell: Tell | None = None) -> BenchReport:
    """Measure. Blocks, for a minute or so on the tiny model. Raises HeadwaterError if a server does not start."""
    options = options if options is not None else ServeOptions()
    loads: dict[str, ServerLoad] = {}
    with ExitStack() as stack:
        disk, memory = (
            Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headwater-serve-", dir=root)))
            for root in (disk_root(), memory_root(_TIER_MIB << 20))
        )
        model = options.model
        if model is None:
            model = disk / "tiny"
            make_talker(model, seed=options.seed)
        shared = ["--model", str(model), "--device", options.device, "--host", "127.0.0.1", "--port", "0"]
        if options.num_blocks is not None:
            shared += ["--num-blocks", str(options.num_blocks)]
        tiers = ["--host-dir", str(memory / "host"), "--disk-dir", str(disk / "disk")]
        modes = {"off": ["--no-cache"], "on": [*tiers, "--host-mib", str(_TIER_MIB), "--disk-mib", str(_TIER_MIB)]}
        for mode, own in modes.items():
            with _serving([*shared, *own], disk / f"{mode}.log") as url:
                loads[mode] = _load(url, mode, options, tell)
    on, off = loads["on"], loads["off"]
    different = difference(on, off, num_turns=options.turns)
    results = on.results("on") | off.results("off")
    counts = [set(results[f"computed_counts_{mode}"].values()) for mode in modes]
    computed = {mode: results[f"computed_tokens_{mode}"] for mode in modes}
    verdict = {
        "computed_fall": 1 - computed["on"] / computed["off"] if computed["off"] else 0.0,
        "answers_equal": different is None,
        "counts_agree": all(len(found) == 1 for found in counts),
        "requests": options.conversations * options.turns,
        "errors": [*on.errors, *off.errors],
    }
    named = {name: getattr(options, name) for name in options.__slots__}
    return BenchReport(
        command="bench serve",
        options=named | {"model": None if options.model is None else str(options.model)},
        results=verdict | results,
        notes=_NOTES if different is None else {**_NOTES, "different": different},
        samples={f"ttft_{mode}_ms": [turn.ttft_s * 1e3 for turn in load.turns] for mode, load in loads.items()},
    )


def make_talker(directory: Path, *, seed: int, shape: Mapping[str, object] | None = None) -> None:
    """A tiny random model whose every answer is text: nothing but printable ASCII can be its most likely token."""
    make_model("llama", directory, seed=seed, overrides=shape)
    tensors = load_file(directory / SINGLE)
    spoken = torch.zeros(len(tensors[_HEAD]), dtype=torch.bool)
    spoken[0x20:0x7F] = True
    tensors[_HEAD][~spoken] = 0.0  # the best of 95 random logits is above 0
    save_file(tensors, directory / SINGLE, metadata={"format": "pt"})


def difference(on: ServerLoad, off: ServerLoad, *, num_turns: int) -> str | None:
    """Where answers are first not the same, or missing; None: nowhere."""
    for number, (ours, theirs) in enumerate(zip(on.conversations, off.conversations, strict=True)):
        for turn in range(num_turns):
            if turn >= min(len(ours), len(theirs)):
                return f"conversation {number}, turn {turn}: no answer"
            if (ours[turn].text, ours[turn].finish_reason) != (theirs[turn].text, theirs[turn].finish_reason):
                said = f"{ours[turn].text!r} with the cache, {theirs[turn].text!r} without"
                return f"conversation {number}, turn {turn}: {said}"
    return None


# --- the server -------------------------------------------------------------------------------------------------------


@contextmanager
def _serving(arguments: Sequence[str], log: Path) -> Iterator[str]:
    """A server process, by its address; it is gone at the end."""
    with (
        log.open("w", encoding="utf-8") as stderr,
        subprocess.Popen([*_COMMAND, *arguments], stdout=subprocess.PIPE, stderr=stderr, text=True) as process,  # noqa: S603
    ):
        try:
            yield _address(process, log)
        finally:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _address(process: subprocess.Popen[str], log: Path) -> str:
    """What a server says when it answers. Blocks until then."""
    assert process.stdout is not None  # noqa: S101  it is a pipe
    readable, _, _ = select.select([process.stdout], [], [], _START_S)
    found = re.search(r"(http://\S+)/v1$", process.stdout.readline().strip()) if readable else None
    if found is None:
        said = log.read_text(encoding="utf-8").strip().splitlines()
        why = said[-1].removeprefix("headwater: ") if said else f"it said nothing in {_START_S:g} s"
        raise HeadwaterError(f"the server did not start: {why}")
    return found[1]


# --- the clients ------------------------------------------------------------------------------------------------------


class _Client(BenchClient):
    """Asks for messages, and for what was computed."""

    def ask(self, messages: Sequence[Mapping[str, str]], *, max_tokens: int) -> BenchTurn:
        """The next message of a conversation. Raises HeadwaterError, OSError, HTTPException where there is none."""
        body = {
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        begin_s = time.perf_counter()
        first_s: float | None = None
        text, finish_reason, usage = "", None, None
        for event in self.events("/v1/chat/completions", body):
            for choice in event["choices"]:
                if first_s is None:
                    first_s = time.perf_counter()
                text += choice["delta"].get("content", "")
                finish_reason = choice["finish_reason"] or finish_reason
            usage = event["usage"] or usage
        if first_s is None or finish_reason is None or usage is None:
            raise HeadwaterError("the stream ended before the answer did")
        return BenchTurn(
            text=text,
            finish_reason=finish_reason,
            prompt_tokens=usage["prompt_tokens"],
            completion_tokens=usage["completion_tokens"],
            cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
            cached_by_tier=usage["headwater"]["cached_tokens"],
            engine_tokens=usage["headwater"]["computed_tokens"],
            preemptions=usage["headwater"]["preemptions"],
            ttft_s=first_s - begin_s,
        )

    def computed(self) -> tuple[int, int]:
        """By /metrics: tokens of all prompts that were answered, and how many of them were computed."""
        sums: Counter[str] = Counter()
        for sample in self.metrics():
            sums[sample.name] += int(sample.value) if sample.name in _COUNTERS else 0
        prompts, hits = (sums[name] for name in _COUNTERS)
        return prompts, prompts - hits


def _load(url: str, mode: str, options: ServeOptions, tell: Tell | None) -> ServerLoad:
    """Hold all conversations at once, a thread for each."""
    system, questions = _script(options)
    heard: queue.SimpleQueue[BenchTurn | str | None] = queue.SimpleQueue()
    stage = {"on": "with the cache", "off": "without"}[mode]

    def converse(number: int) -> list[BenchTurn]:
        turns: list[BenchTurn] = []
        messages = [{"role": "system", "content": system}]
        try:
            with _Client(url) as client:
                for question in questions[number]:
                    messages.append({"role": "user", "content": question})
                    turns.append(client.ask(messages, max_tokens=options.max_tokens))
                    messages.append({"role": "assistant", "content": turns[-1].text})
                    heard.put(turns[-1])
        except (HeadwaterError, HTTPException, OSError) as error:
            heard.put(f"{stage}, conversation {number}, turn {len(turns)}: {type(error).__name__}: {error}")
        finally:
            heard.put(None)
        return turns

    with _Client(url) as client:
        warm = client.ask([{"role": "user", "content": system}], max_tokens=2)  # no conversation begins like it
    before = _settled(url, warm.prompt_tokens)
    with ThreadPoolExecutor(options.conversations) as pool:
        begin_s = time.perf_counter()
        under_way = [pool.submit(converse, number) for number in range(options.conversations)]
        errors: list[str] = []
        num_turns, num_left = 0, options.conversations
        while num_left:
            if tell is not None:
                tell(stage, num_turns, options.conversations * options.turns)
            news = heard.get()
            num_left -= news is None
            num_turns += isinstance(news, BenchTurn)
            if isinstance(news, str):
                errors.append(news)
        seconds = time.perf_counter() - begin_s
    conversations = [future.result() for future in under_way]
    prompts = sum(turn.prompt_tokens for turns in conversations for turn in turns)
    after = _settled(url, before[0] + prompts)
    return ServerLoad(conversations=conversations, errors=errors, seconds=seconds, metrics_tokens=after[1] - before[1])


def _settled(url: str, prompt_tokens: int) -> tuple[int, int]:
    """What /metrics say when they know of so many prompt tokens: they hear of an answer after its client."""
    until_s = time.monotonic() + _COUNT_S
    with _Client(url) as client:
        while (found := client.computed())[0] < prompt_tokens and time.monotonic() < until_s:
            time.sleep(0.01)
    return found


def _script(options: ServeOptions) -> tuple[str, list[list[str]]]:
    """The system prompt, and what each conversation's user says, turn by turn. Follows from the seed."""
    chance = random.Random(options.seed)  # noqa: S311  no secret

    words = _WORDS.split()

    def prose(num_chars: int) -> str:
        text = ""
        while len(text) < num_chars:
            text += " ".join(chance.choices(words, k=chance.randint(5, 14))).capitalize() + ". "
        return text[:num_chars]

    return prose(options.system_chars), [
        [prose(options.user_chars) for _ in range(options.turns)] for _ in range(options.conversations)
    ]
