"""What `bench pd` asks and hears: completions over HTTP, one by one, or as a trace says; and what each of them cost.

Prompts are tokens that follow from a seed. A trace's blocks become as many tokens as the scale says, the same for the
same block, so what prompts share in the trace they share here. Answers are greedy, of a given length, and streamed.

Not here: processes, figures (`pd.py`).
"""

import random
import statistics
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPException
from itertools import islice
from typing import Any, Final

from headwater.core.errors import HeadwaterError, InvalidInput
from headwater.disagg.node_auth import Signer
from headwater.lab.bench.client import BenchClient
from headwater.lab.bench.report import Tell
from headwater.lab.replay.trace import Trace, TraceRecord

COMPLETIONS: Final = "/v1/completions"
_FIRST_TOKEN, _LAST_TOKEN = 0x20, 0x7E  # of prompts: ASCII to a model of bytes, and somewhere in every vocabulary
_POOL_PARTS: Final = ("pool_write_s", "pool_read_s")
_LOOK_S: Final = 0.1  # between two reports of progress


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedAnswer:
    """An answer, when its tokens came, and what it cost by the servers' account."""

    text: str
    num_tokens: int
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    ttft_s: float  # as the client sees it
    last_s: float  # likewise: from sending the request to the last token
    phases: Mapping[str, float]  # seconds by part

    @property
    def tpot_s(self) -> float | None:
        """Seconds for each token after the first, if there are any."""
        return (self.last_s - self.ttft_s) / (self.num_tokens - 1) if self.num_tokens > 1 else None

    @property
    def pool_s(self) -> float:
        """Seconds in the pool, at both ends."""
        return sum(self.phases.get(part, 0.0) for part in _POOL_PARTS)


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request to make, so many seconds after the first."""

    at_s: float
    prompt: tuple[int, ...]
    max_tokens: int


def body_of(prompt: Sequence[int], *, max_tokens: int, salt: str) -> dict[str, Any]:
    """A completion that is streamed, greedy and of that length."""
    return {
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "cache_salt": salt,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def ask(url: str, body: Mapping[str, Any], *, path: str = COMPLETIONS, signer: Signer | None = None) -> TimedAnswer:
    """Ask on a connection of its own, because servers close idle ones, and read the answer to its end.

    Blocks. Raises HeadwaterError where there is no answer, or no whole one.
    """
    begin_s = now_s = time.perf_counter()
    first_s: float | None = None
    text, ended, usage = "", False, None
    try:
        with BenchClient(url, signer) as client:
            for event in client.events(path, body):
                for choice in event["choices"]:
                    if choice["text"]:
                        now_s = time.perf_counter()
                        first_s = now_s if first_s is None else first_s
                    text += choice["text"]
                    ended = ended or choice["finish_reason"] is not None
                usage = event["usage"] or usage
    except (HTTPException, OSError) as error:
        raise HeadwaterError(f"{type(error).__name__}: {error}") from error
    if first_s is None or usage is None or not ended:
        raise HeadwaterError("the stream ended before the answer did")
    own = usage["headwater"]
    return TimedAnswer(
        text=text,
        num_tokens=usage["completion_tokens"],
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        computed_tokens=own["computed_tokens"],
        ttft_s=first_s - begin_s,
        last_s=now_s - begin_s,
        phases=own["phases"],
    )


def prompt_of(num_tokens: int, *, seed: str) -> tuple[int, ...]:
    """Tokens that nobody else asks for."""
    chance = random.Random(seed)  # noqa: S311  no secret
    return tuple(chance.randint(_FIRST_TOKEN, _LAST_TOKEN) for _ in range(num_tokens))


def plan(
    trace: Trace,
    *,
    num_requests: int,
    scale: float,
    max_prompt: int,
    max_tokens: int,
    rate_per_s: float,
) -> list[PlannedRequest]:
    """The first requests of a trace, smaller: lengths by `scale` and the limits, times so that the mean rate is right.

    Who came together in the trace comes together here. Raises InvalidInput if there is no request.
    """
    records = list(islice(trace.records(), num_requests))
    if not records:
        raise InvalidInput(f"{trace.name}: there is no request")
    begin_ms = records[0].timestamp_ms
    span_s = (records[-1].timestamp_ms - begin_ms) / 1e3
    wanted_s = (len(records) - 1) / rate_per_s
    stretch = wanted_s / span_s if span_s else 0.0
    block = max(1, round(trace.block_tokens * scale))
    return [
        PlannedRequest(
            at_s=(record.timestamp_ms - begin_ms) / 1e3 * stretch,
            prompt=_prompt(record, block, max(1, min(max_prompt, round(record.input_tokens * scale)))),
            max_tokens=max(2, min(max_tokens, round(record.output_tokens * scale))),
        )
        for record in records
    ]


def _prompt(record: TraceRecord, block_tokens: int, num_tokens: int) -> tuple[int, ...]:
    found: list[int] = []
    for number in record.ids:
        if len(found) >= num_tokens:
            break
        found += prompt_of(block_tokens, seed=f"block {number}")
    missing = num_tokens - len(found)  # rounding
    if missing > 0:
        found += prompt_of(missing, seed=f"rest {record.ids[-1:]}")
    return tuple(found[:num_tokens])


@dataclass(frozen=True, slots=True)
class ReplayedPlan:
    """What became of a plan: an answer or an error for each request, in its order."""

    answers: Sequence[TimedAnswer | None]
    errors: Sequence[str]
    seconds: float

    def figures(self) -> dict[str, Any]:
        """What a report says of it."""
        found = [answer for answer in self.answers if answer is not None]
        tpot_ms = [answer.tpot_s * 1e3 for answer in found if answer.tpot_s is not None]
        prompt_tokens = sum(answer.prompt_tokens for answer in found)
        return {
            "answers": len(found),
            "ttft_p50_ms": percentile([answer.ttft_s * 1e3 for answer in found], 50),
            "ttft_p95_ms": percentile([answer.ttft_s * 1e3 for answer in found], 95),
            "tpot_p50_ms": percentile(tpot_ms, 50),
            "tpot_p95_ms": percentile(tpot_ms, 95),
            "requests_per_s": len(found) / self.seconds,
            "prompt_tokens": prompt_tokens,
            "pool_share_p50": percentile([answer.pool_s / answer.ttft_s for answer in found], 50),
        }


def replay(url: str, asked: Sequence[PlannedRequest], *, stage: str, salt: str, tell: Tell | None) -> ReplayedPlan:
    """Make every request at its time, whether or not those before were answered. Blocks until the last answer."""
    errors: list[str] = []
    done = 0
    lock = threading.Lock()
    begin_s = time.perf_counter()

    def one(number: int) -> TimedAnswer | None:
        nonlocal done
        request = asked[number]
        time.sleep(max(0.0, begin_s + request.at_s - time.perf_counter()))
        answer = None
        try:
            answer = ask(url, body_of(request.prompt, max_tokens=request.max_tokens, salt=salt))
        except HeadwaterError as error:
            with lock:
                errors.append(f"{stage}, request {number}: {error}")
        with lock:
            done += 1
        return answer

    with ThreadPoolExecutor(len(asked)) as threads:  # whoever comes late waits for nobody
        under_way = [threads.submit(one, number) for number in range(len(asked))]
        while done < len(asked):
            if tell is not None:
                tell(stage, done, len(asked))
            time.sleep(_LOOK_S)
        seconds = time.perf_counter() - begin_s
    return ReplayedPlan([future.result() for future in under_way], errors, seconds)


def percentile(values: Iterable[float], share: float) -> float | None:
    """The value under which so many of a hundred lie; None of none."""
    ordered = sorted(values)
    if not ordered:
        return None
    if share == 50:
        return statistics.median(ordered)
    return ordered[min(len(ordered) - 1, int(share / 100 * len(ordered)))]
