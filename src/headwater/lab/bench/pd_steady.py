"""Requests that are being answered while a decode node reads the KV of others: whether their tokens come later.

Streams run at a decode node all the time. Beside them, in turns, windows in which nothing else happens and windows in
which tickets are taken over, one after another, as fast as one prefill node of this machine makes them. The tickets are
made before, so that computing prompts, which wants the same cores here, is no part of it; how much *that* slows the
streams is told besides. A window's time per token is that of all streams in it.

Not here: whether answers are right (`pd.py` compares them), any decision.
"""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPException
from itertools import pairwise
from typing import Any, Final

from headwater.core.errors import HeadwaterError
from headwater.disagg.node_auth import Signer
from headwater.lab.bench.client import BenchClient
from headwater.lab.bench.pd_load import COMPLETIONS, ask, body_of, prompt_of
from headwater.lab.bench.report import Samples, Tell

_BEGIN_S: Final = 60.0  # for all streams to say something
_SETTLE_S: Final = 0.15  # between two windows
_STREAM_PROMPT: Final = 32
_STREAM_TOKENS: Final = 4000  # then something else is asked for
_LOAD_TOKENS: Final = 2  # an answer that is over with its first token needs no KV at all
_LEAST_TOKENS: Final = 4  # to say anything
_WINDOW_S: Final = 10.0  # the longest window in which next to nothing is said

Window = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Steady:
    """How to measure."""

    router: str  # addresses
    prefill: str
    decode: str
    prefill_signer: Signer  # what they believe
    decode_signer: Signer
    streams: int
    pairs: int
    loads: int  # in a window
    load_tokens: int  # of each prompt
    every_s: float  # between two loads
    seed: int


@dataclass(slots=True)
class Stream:
    """One client that reads an answer after the other until it is told to stop."""

    number: int
    steady: Steady
    times_s: list[float] = field(default_factory=list)  # of its tokens
    breaks_s: list[float] = field(default_factory=list)  # when it asked anew: no gap between tokens
    stop: threading.Event = field(default_factory=threading.Event)
    error: str = ""

    def run(self) -> None:
        """Until stopped, or an error."""
        num_tokens = _STREAM_TOKENS * (self.number + 1) // self.steady.streams  # they begin anew one after another
        try:
            while not self.stop.is_set():
                self.breaks_s.append(time.perf_counter())
                prompt = prompt_of(_STREAM_PROMPT, seed=f"stream {self.steady.seed} {self.number} {num_tokens}")
                body = body_of(prompt, max_tokens=num_tokens, salt="steady")
                num_tokens = _STREAM_TOKENS
                with BenchClient(self.steady.router) as client:  # closing it in the middle cancels the request
                    for event in client.events(COMPLETIONS, body):
                        if event["choices"] and event["choices"][0]["text"]:
                            self.times_s.append(time.perf_counter())
                        if self.stop.is_set():
                            break
        except (HeadwaterError, HTTPException, OSError) as error:
            self.error = f"a stream broke: {type(error).__name__}: {error}"


def measure(steady: Steady, samples: Samples, *, tell: Tell | None) -> dict[str, Any]:
    """Windows in turns. Blocks, for a minute or so. Raises HeadwaterError if a stream or a load fails."""
    with _streaming(steady) as streams:
        loads: list[Window] = []
        for pair in range(-1, steady.pairs):  # the first is to warm up
            if tell is not None:
                tell("beside loads", max(0, pair), steady.pairs)
            begin_s = time.perf_counter()
            tickets = [_prefilled(steady, f"{steady.seed} {pair} {i}") for i in range(steady.loads)]
            windows = {"prefilling": (begin_s, time.perf_counter())}
            for kind in ("idle", "loading") if pair % 2 else ("loading", "idle"):
                time.sleep(_SETTLE_S)
                begin_s, before = time.perf_counter(), _num_tokens(streams)
                taken = _take(steady, tickets if kind == "loading" else [None] * len(tickets), steady.every_s)
                _linger(streams, before, begin_s + _WINDOW_S)
                windows[kind] = (begin_s, time.perf_counter())
                if pair >= 0:
                    loads += taken
            _check(streams)
            if pair >= 0:
                note(samples, [stream.times_s for stream in streams], [s.breaks_s for s in streams], windows)
    for begin_s, end_s in loads:
        samples.add("load_ms", (end_s - begin_s) * 1e3)
    return figures(samples)


def figures(samples: Samples) -> dict[str, Any]:
    """What the windows say: medians, and the ratio of neighbours with its interval."""
    if not samples.values.get("tpot_idle_ms"):
        raise HeadwaterError("the streams beside which loads are measured said next to nothing")
    found: dict[str, Any] = {f"tpot_{kind}_ms": samples.median(f"tpot_{kind}_ms") for kind in ("idle", "loading")}
    for kind in ("loading", "prefilling"):
        name = f"tpot_while_{kind}_ratio"
        if samples.values.get(name):
            ratio, low, high = median_of(samples.values[name])
            found |= {name: ratio, f"{name}_low": low, f"{name}_high": high}
    return found | {"load_ms": samples.median("load_ms")}


def median_of(values: Sequence[float]) -> tuple[float, float, float]:
    """The median of what was seen, and the interval that holds the true one at about 95 %, by order alone."""
    ordered = sorted(values)
    number = len(ordered)
    reach = round(0.98 * number**0.5)
    middle = (ordered[(number - 1) // 2] + ordered[number // 2]) / 2
    low = ordered[max(0, (number - 1) // 2 - reach)]
    return middle, low, ordered[min(number - 1, number // 2 + reach)]


def time_per_token(
    times_s: Sequence[Sequence[float]], breaks_s: Sequence[Sequence[float]], window: Window
) -> float | None:
    """Seconds that a token took in a window, over all streams; None if they said next to nothing.

    Where a stream began anew (`breaks_s`), there is no time between two tokens.
    """
    begin_s, end_s = window
    total_s, number = 0.0, 0
    for times, breaks in zip(times_s, breaks_s, strict=True):
        inside = [at_s for at_s in times if begin_s <= at_s < end_s]
        for before_s, after_s in pairwise(inside):
            if not any(before_s < at_s < after_s for at_s in breaks):
                total_s += after_s - before_s
                number += 1
    return total_s / number if number >= _LEAST_TOKENS else None


def note(
    samples: Samples,
    times_s: Sequence[Sequence[float]],
    breaks_s: Sequence[Sequence[float]],
    windows: Mapping[str, Window],
) -> None:
    """Keep what neighbouring windows say, if it is anything."""
    found = {kind: time_per_token(times_s, breaks_s, window) for kind, window in windows.items()}
    idle_s = found["idle"]
    if idle_s is None or found["loading"] is None:
        return
    for kind, seconds in found.items():
        if seconds is not None:
            samples.add(f"tpot_{kind}_ms", seconds * 1e3)
            if kind != "idle":
                samples.add(f"tpot_while_{kind}_ratio", seconds / idle_s)


def _num_tokens(streams: Sequence[Stream]) -> int:
    return sum(len(stream.times_s) for stream in streams)


def _linger(streams: Sequence[Stream], before: int, until_s: float) -> None:
    """A window lasts until something was said in it, for a while at most."""
    wanted = before + 2 * _LEAST_TOKENS * len(streams)
    while _num_tokens(streams) < wanted and time.perf_counter() < until_s:
        time.sleep(0.005)


@contextmanager
def _streaming(steady: Steady) -> Iterator[list[Stream]]:
    streams = [Stream(number, steady) for number in range(steady.streams)]
    threads = [threading.Thread(target=stream.run, daemon=True) for stream in streams]
    for thread in threads:
        thread.start()
    try:
        until_s = time.perf_counter() + _BEGIN_S
        while any(len(stream.times_s) < _LEAST_TOKENS for stream in streams):
            _check(streams)
            if time.perf_counter() > until_s:
                raise HeadwaterError("the streams beside which loads are measured do not begin")
            time.sleep(0.05)
        yield streams
    finally:
        for stream in streams:
            stream.stop.set()
        for thread in threads:
            thread.join()


def _check(streams: Sequence[Stream]) -> None:
    for stream in streams:
        if stream.error:
            raise HeadwaterError(stream.error)


def _prefilled(steady: Steady, name: str) -> dict[str, Any]:
    """What to ask a decode node: the prompt's ticket, and the client's body."""
    prompt = prompt_of(steady.load_tokens, seed=f"load {name}")
    body = body_of(prompt, max_tokens=_LOAD_TOKENS, salt="steady")
    with BenchClient(steady.prefill, steady.prefill_signer) as client:
        found = client.post("/pd/prefill", {"endpoint": COMPLETIONS, "body": body})
    return {"endpoint": COMPLETIONS, "ticket": found["ticket"], "body": body}


def _take(steady: Steady, asked: Sequence[dict[str, Any] | None], every_s: float) -> list[Window]:
    """Take tickets over, one every so often; without them wait as long. When each was being read."""
    found: list[Window] = []
    begin_s = time.perf_counter()
    for number, one in enumerate(asked):
        if one is not None:
            ask_s = time.perf_counter()
            answer = ask(steady.decode, one, path="/pd/decode", signer=steady.decode_signer)
            found.append((ask_s, ask_s + answer.ttft_s))
            if answer.computed_tokens >= _LOAD_TOKENS:
                raise HeadwaterError(f"a decode node computed {answer.computed_tokens} tokens that it was to read")
        time.sleep(max(0.0, begin_s + (number + 1) * every_s - time.perf_counter()))
    return found
