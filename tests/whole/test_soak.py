"""A soak: a thousand requests of every kind on real sockets, with too few slots and places; then nothing is left.

What each client does follows from its number; who comes when does not. Requests are known by their seed, which greedy
answers do not use: so the engine's side of each can be preempted, cancelled and looked at.
"""

import asyncio
import gc
import itertools
import json
import logging
import os
import random
import select
import socket
import struct
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import pytest
import torch

from headwater.engine.engine import Engine
from headwater.engine.loader import load_model
from headwater.engine.make_model import make_model
from headwater.engine.models.base import Model, Span
from headwater.engine.request import Finish, Output, Request
from headwater.engine.tokenizer import Tokenizer
from headwater.index.slots import SlotState
from headwater.serve.logprobs import token_name
from headwater.serve.transcript import Transcript
from headwater.transfer.device.arena import create_kv_cache
from headwater.transfer.executor.worker import Worker
from serve_kit import WAIT_S, Served, serving

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
KEY = "soak"
HEADERS = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
SEED = 6
NUM_CLIENTS = 9
NUM_BLOCKS = 24  # for five running requests of up to 17
BODY_BYTES = 20_000
MOST_TRIES = 500  # of one client, a tenth of a second apart
LONGEST = 36  # tokens of an answer that is compared
LONG = 200  # of one that nobody waits for
LIMITS: dict[str, Any] = {
    "num_blocks": NUM_BLOCKS,
    "max_running": 5,
    "max_waiting": 3,  # one client too many, and those who left may still be here
    "step_tokens": 96,
    "max_body_bytes": BODY_BYTES,
    "api_key": KEY,
}

# Prompts that share beginnings, some of whole blocks (16 tokens, the first of which no text shows).
STEMS = (
    "You are a helpful assistant who keeps things.  ",  # 3 blocks
    "A cache keeps what was computed once, and gives it back to who asks again.",
)
TEXTS = (
    *("", "Why?", "What is 16 by 16", "What is 16 by 16, and then", "Tell me of rivers and their sources, all of"),
    "Tell me of rivers and their sources, and of what they carry away",
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiniest model on disk, and"""
    path = tmp_path_factory.mktemp("models") / "tiny"
    make_model("llama", path, overrides={"num_hidden_layers": 2})
    return path


@pytest.fixture(scope="module")
def model(directory: Path) -> Model:
    """in memory."""
    return load_model(directory)


@dataclass(frozen=True)
class Question:
    """A prompt, and what the model says to it when it is alone in the world."""

    path: str
    body: dict[str, Any]
    num_prompt: int
    answer: list[int]


def alone(model: Model, prompt: list[int]) -> list[int]:
    """The greedy answer, computed without an engine or a cache."""
    num_blocks = -(-(len(prompt) + LONGEST) // model.block_tokens)
    with create_kv_cache(model.layout, num_blocks, model.device) as planes:
        tokens, start = list(prompt), 0
        while len(tokens) < len(prompt) + LONGEST:
            span = Span(tokens=tokens[start:], start=start, slots=tuple(range(num_blocks)))
            best = torch.topk(model.forward(planes, [span]).logits[0], 2)
            assert best.values[0] - best.values[1] > 1e-4, "too close to call: what is computed together decides it"
            start = len(tokens)
            tokens.append(int(best.indices[0]))
    return tokens[len(prompt) :]


def questions(model: Model, tokenizer: Tokenizer) -> list[Question]:
    """All that is asked."""
    found = []
    for stem, text in itertools.product(STEMS, TEXTS):
        prompt = tokenizer.encode(stem + text)
        found.append(Question(COMPLETIONS, {"prompt": stem + text}, len(prompt), alone(model, prompt)))
    for text in TEXTS[1:4]:
        messages = [{"role": "system", "content": STEMS[0]}, {"role": "user", "content": text}]
        prompt = tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False)
        found.append(Question(CHAT, {"messages": messages}, len(prompt), alone(model, prompt)))
    return found


# --- what clients do --------------------------------------------------------------------------------------------------

KINDS = {
    "whole": 230,
    "stream": 180,
    "names": 50,  # whole, with every token's name
    "stop string": 50,
    "sampled": 40,
    "preempted": 120,
    "cancelled": 40,
    "cancelled in the stream": 50,
    "leaves at once": 50,
    "leaves soon": 40,
    "leaves in the stream": 50,
    "leaves in the body": 20,
    "bad": 80,
}


@dataclass(frozen=True)
class Bad:
    """A request that cannot be answered, and what it hears."""

    status: int
    param: str | None
    code: str
    body: Any = None  # JSON, or bytes as they are
    path: str = COMPLETIONS
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)


BAD = (
    Bad(400, None, "invalid_json", b'{"prompt": "a"'),
    Bad(400, None, "invalid_json", b"\xff\xfe"),
    Bad(400, None, "invalid_json", ["prompt"]),
    Bad(400, "prompt", "invalid_value", {"prompt": {"a": 1}}),
    Bad(400, "prompt", "invalid_value", {"prompt": [264]}),
    Bad(400, "prompt", "invalid_value", {"prompt": ["a", 5]}),
    Bad(400, "prompt", "context_length_exceeded", {"prompt": "a" * (NUM_BLOCKS * 16)}),
    Bad(400, "max_tokens", "context_length_exceeded", {"prompt": "a", "max_tokens": NUM_BLOCKS * 16}),
    Bad(400, "max_tokens", "invalid_value", {"prompt": "a", "max_tokens": -1}),
    Bad(400, "temperature", "invalid_value", {"prompt": "a", "temperature": "hot"}),
    Bad(400, "stream", "invalid_value", {"prompt": "a", "stream": 1}),
    Bad(400, "cache_salt", "invalid_value", {"prompt": "a", "cache_salt": 5}),
    Bad(400, "cache_salt", "invalid_value", {"prompt": "a", "cache_salt": ""}),
    Bad(400, "cache_salt", "invalid_value", {"prompt": "a", "cache_salt": "\ud800"}),
    Bad(400, "n", "invalid_value", {"prompt": "a", "n": 0}),
    Bad(400, "nn", "unsupported_parameter", {"prompt": "a", "nn": 2}),
    Bad(400, "messages[0].role", "invalid_value", {"messages": [{"role": "?", "content": "a"}]}, CHAT),
    Bad(401, None, "invalid_api_key", {"prompt": "a"}, headers={"authorization": "Bearer guess"}),
    Bad(404, "model", "model_not_found", {"prompt": "a", "model": "other"}),
    Bad(404, None, "not_found", {"prompt": "a"}, "/v1/nowhere"),
    Bad(405, None, "method_not_allowed", method="GET"),
    Bad(413, None, "body_too_large", {"prompt": "a" * BODY_BYTES}),
    Bad(413, None, "body_too_large", b'{"prompt', headers={"content-length": str(1 << 40)}),
    Bad(415, None, "unsupported_media_type", {"prompt": "a"}, headers={"content-type": "text/plain"}),
)


class Soak:
    """The clients, and what they and the engine saw."""

    def __init__(self, served: Served, asked: list[Question]) -> None:
        self.seen: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()
        self.requests: dict[int, Request] = {}  # that the engine took, by seed
        self.ends: dict[int, list[Output]] = {}
        self.loop: asyncio.AbstractEventLoop | None = None
        self._served = served
        self._questions = asked
        self._tokenizer = served.running.tokenizer
        self._preempt_at: dict[int, int] = {}
        self._cancelled: set[int] = set()  # as soon as they are submitted
        self._lock = threading.Lock()
        host, _, port = served.url.removeprefix("http://").partition(":")
        self._address = (host, int(port))

    def watch(self, engine: Engine, patch: pytest.MonkeyPatch) -> None:
        """See every request that the engine takes, and meddle with some."""
        submit = engine.submit

        def watched(request: Request) -> None:
            self.loop = asyncio.get_running_loop()
            seed, listen = request.sampling.seed, request.listen
            if seed is None:  # a bad one
                submit(request)
                return
            ends: list[Output] = []

            def heard(output: Output) -> None:
                if output.finish is not None:
                    ends.append(output)
                listen(output)

            request.listen = heard
            request.preempt_at = self._preempt_at.get(seed)
            submit(request)
            self.requests[seed], self.ends[seed] = request, ends
            if seed in self._cancelled:
                engine.cancel(request)

        patch.setattr(engine, "submit", watched)

    def do(self, number: int, kind: str) -> None:
        """Be one client."""
        chance = random.Random(f"{SEED} {number}")
        if kind == "bad":
            bad = BAD[number % len(BAD)]
            self._refused(bad, chance)
            self._saw(f"bad {bad.status}")
            return
        question = chance.choice([one for one in self._questions if kind != "names" or one.path == COMPLETIONS])
        num_tokens = LONGEST if kind == "stop string" else chance.choice((1, 2, 8, 16, 17, 24, LONGEST))
        body = {
            **question.body,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "seed": number,
            **chance.choice(({}, {}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"model": "tiny"})),
        }
        if kind == "sampled":
            self._sampled(question, body, chance)
        elif kind.startswith("leaves"):
            self._leave(kind, question, body, chance)
        elif kind == "cancelled in the stream":
            self._cancel_in_stream(question, body, number, chance)
            return
        elif kind == "cancelled":
            self._cancelled.add(number)
            with self._asked(question, {**body, "max_tokens": LONG}, chance) as response:
                if response.status == 200:  # it was faster
                    return
                check_error(response, 503, None, "shutting_down")
        else:
            if kind == "preempted":
                # While it loads, in the prompt or in the answer. The prompt may be one step: then only if it goes on.
                body["max_tokens"] = max(2, num_tokens)
                self._preempt_at[number] = chance.choice((0, chance.randrange(question.num_prompt + num_tokens - 1)))
            self.complete(kind, question, body, chance)
            if kind == "preempted":
                usage = self.ends[number][0].usage
                assert usage is not None
                assert usage.preemptions >= 1
        self._saw(kind)

    def complete(self, kind: str, question: Question, body: dict[str, Any], chance: random.Random) -> None:
        """Get an answer, and compare it."""
        num_tokens: int = body["max_tokens"]
        stops: tuple[str, ...] = ()
        if kind == "stop string":
            said = self._text(question.answer[:num_tokens])
            at = chance.randrange(len(said))
            stops = (said[at : at + chance.randint(1, 3)], "never said")
            body = {**body, "stop": stops}
        if kind == "names":
            body = {**body, "logprobs": 0}
        streamed = kind == "stream" or (kind in ("preempted", "stop string") and chance.random() < 0.5)
        with self._asked(question, {**body, "stream": streamed}, chance) as response:
            assert response.status == 200, response.read()
            if streamed:
                *choices, last = list(events(response))
                assert last == "[DONE]"
                text, finish = "".join(map(text_of, choices)), choices[-1]["choices"][0]["finish_reason"]
            else:
                document = json.loads(response.read())
                (choice,) = document["choices"]
                text, finish = text_of(document), choice["finish_reason"]
                assert document["usage"]["prompt_tokens"] == question.num_prompt
                if kind == "names":
                    names = [token_name(self._tokenizer, token) for token in question.answer[:num_tokens]]
                    assert choice["logprobs"]["tokens"] == names
        assert text == self._text(question.answer[:num_tokens], *stops), (kind, question.body)
        assert finish == ("stop" if stops else "length")

    def _sampled(self, question: Question, body: dict[str, Any], chance: random.Random) -> None:
        with self._asked(question, {**body, "temperature": 1, "top_p": 0.9}, chance) as response:
            assert response.status == 200, response.read()
            assert json.loads(response.read())["usage"]["completion_tokens"] == body["max_tokens"]

    def _cancel_in_stream(self, question: Question, body: dict[str, Any], seed: int, chance: random.Random) -> None:
        """Take the engine's request away from the server."""
        with self._asked(question, {**body, "max_tokens": LONG, "stream": True}, chance) as response:
            assert response.status == 200, response.read()
            heard = events(response)
            first = [next(heard) for _ in range(chance.randint(1, 3))]
            self._served.running.engine.cancel(self.requests[seed])
            *choices, last = [*first, *heard]
        text, right = "".join(map(text_of, choices)), self._text(question.answer)
        assert right.startswith(text[: len(right)].rstrip("\ufffd")), "a wrong beginning"
        if last != "[DONE]":  # it was in time
            assert last["error"]["code"] == "shutting_down"
            self._saw("cancelled in the stream")

    def _leave(self, kind: str, question: Question, body: dict[str, Any], chance: random.Random) -> None:
        """Go away before the end, politely or not."""
        body = {**body, "max_tokens": LONG, "stream": kind == "leaves in the stream" or chance.random() < 0.5}
        if kind == "leaves in the stream":
            with self._asked(question, body, chance) as response:
                assert response.status == 200, response.read()
                for _, event in zip(range(chance.randint(1, 9)), events(response), strict=False):
                    assert "error" not in event
            return
        data = json.dumps(body).encode()
        head = f"POST {question.path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in HEADERS.items()) + "\r\n"
        with socket.create_connection(self._address, timeout=WAIT_S) as connection:
            rude(connection, chance)
            if kind == "leaves in the body":
                data = data[: chance.randrange(len(data))]
            connection.sendall(head.encode() + data)
            if kind == "leaves soon":
                self._served.until(lambda: body["seed"] in self.requests or not waiting(connection))

    def _refused(self, bad: Bad, chance: random.Random) -> None:
        data = bad.body if bad.body is None or isinstance(bad.body, bytes) else json.dumps(bad.body).encode()
        for _ in range(MOST_TRIES):
            with closing(HTTPConnection(*self._address, timeout=WAIT_S)) as connection:
                with suppress(ConnectionError):  # it need not read what it refuses
                    connection.request(bad.method, bad.path, data, {**HEADERS, **bad.headers})
                response = connection.getresponse()
                if not self._is_full(response, chance):
                    check_error(response, bad.status, bad.param, bad.code)
                    return
        pytest.fail("there is never a place")

    @contextmanager
    def _asked(self, question: Question, body: dict[str, Any], chance: random.Random) -> Iterator[HTTPResponse]:
        """A response, when there is room for the request."""
        for _ in range(MOST_TRIES):
            with closing(HTTPConnection(*self._address, timeout=WAIT_S)) as connection:
                connection.request("POST", question.path, json.dumps(body), HEADERS)
                rude(connection.sock, chance)
                response = connection.getresponse()
                if not self._is_full(response, chance):
                    yield response
                    return
        pytest.fail("there is never a place")

    def _is_full(self, response: HTTPResponse, chance: random.Random) -> bool:
        """Whether it was sent away; then it waits a little."""
        with self._lock:
            self.statuses[response.status] += 1
        if response.status != 429:
            return False
        check_error(response, 429, None, "queue_full")
        time.sleep(chance.random() * 0.2)
        return True

    def _text(self, tokens: list[int], *stops: str) -> str:
        transcript = Transcript(self._tokenizer.stream(), stops)
        return "".join([transcript.push(tokens).text, transcript.finish().text])

    def _saw(self, what: str) -> None:
        with self._lock:
            self.seen[what] += 1


def check_error(response: HTTPResponse, status: int, param: str | None, code: str) -> None:
    found = response.read().decode()
    assert response.status == status, found
    error = json.loads(found)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], error["code"]) == (param, code), error
    assert error["message"]


def events(response: HTTPResponse) -> Iterator[Any]:
    """What a stream says, the last word included."""
    for line in response:
        if line.startswith(b"data: "):
            data = line.removeprefix(b"data: ").strip()
            yield "[DONE]" if data == b"[DONE]" else json.loads(data)


def text_of(document: dict[str, Any]) -> str:
    (choice,) = document["choices"]
    part = choice.get("message") or choice.get("delta") or choice
    return str(part.get("text", "") or part.get("content", "") or "")


def rude(connection: socket.socket, chance: random.Random) -> None:
    """Half of the clients cut the line instead of closing it."""
    if chance.random() < 0.5:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def waiting(connection: socket.socket) -> bool:
    """Whether nothing was answered yet."""
    return not select.select([connection], [], [], 0)[0]


# --- what is left -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Footprint:
    """What this process has: threads, open files of every sort, files in memory."""

    threads: set[threading.Thread]
    files: dict[str, str]
    mapped: set[str]

    @staticmethod
    def now() -> "Footprint":
        gc.collect()
        files = {}
        for fd in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # the one that lists them
                files[fd] = os.readlink(f"/proc/self/fd/{fd}")
        maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        return Footprint(
            set(threading.enumerate()), files, {line.split(maxsplit=5)[5] for line in maps if len(line.split()) > 5}
        )

    def check_nothing_more_than(self, before: "Footprint") -> None:
        assert not {thread.name for thread in self.threads - before.threads}
        assert not {target for fd, target in self.files.items() if before.files.get(fd) != target}
        assert not {path for path in self.mapped - before.mapped if "/store" in path or "/dev/shm" in path}


def check_nothing_is_held(served: Served, soak: Soak) -> None:
    running = served.running
    served.until_free()
    assert soak.loop is not None
    loop = soak.loop
    served.until(lambda: len(asyncio.all_tasks(loop)) == 1)  # uvicorn's own: nobody is being answered
    assert not served.server._service._attempts
    assert served.server._service._num_inside == 0
    assert running.cache.drain(WAIT_S)
    with running.cache.still() as brain:
        brain.validate()
        counts = brain.slots.counts()
        assert (counts[SlotState.OWN], counts[SlotState.QUARANTINED]) == (0, 0)
        assert brain.slots.num_evictable == len(brain.blocks()) == counts[SlotState.KNOWN]  # no hold, no pin
        assert not [*brain.requests, *brain.jobs, *brain.pending, *brain.loader.promoting]
        for tier in brain.tiers.values():
            assert (tier.queued_load_bytes, tier.queued_save_bytes, tier.num_pinning) == (0, 0, 0)
    worker = running.cache._executor
    assert isinstance(worker, Worker)
    assert worker.num_held_pages == 0
    assert not worker._ledger.live
    scheduler = running.engine._scheduler
    assert not [*scheduler.running, *scheduler.waiting, *running.engine._inbox]


def check_what_was_seen(soak: Soak, served: Served) -> None:
    """Every kind happened, every request that was taken ended once, and the server counted what clients saw."""
    ends = {seed: ends[0] for seed, ends in soak.ends.items() if len(ends) == 1}
    assert ends.keys() == soak.requests.keys()
    finishes = Counter(end.finish for end in ends.values())
    assert finishes[Finish.FAILED] == 0
    for kind, num in KINDS.items():
        if kind.startswith("cancelled"):
            assert num / 2 < soak.seen[kind] <= num  # some may have been faster
        elif kind != "bad":
            assert soak.seen[kind] == num
    assert sum(num for what, num in soak.seen.items() if what.startswith("bad ")) == KINDS["bad"]
    assert {what for what in soak.seen if what.startswith("bad ")} == {f"bad {bad.status}" for bad in BAD}
    assert soak.statuses[429] > 0

    leavers = [ends[seed] for seed, kind in enumerate(plan()) if kind.startswith("leaves") and seed in ends]
    assert len(leavers) >= KINDS["leaves in the stream"]  # others may have left before they were taken in
    assert sum(end.finish is Finish.CANCELLED for end in leavers) > 0.75 * len(leavers)  # their leaving was noticed

    metrics = served.running.metrics
    for status in {bad.status for bad in BAD} | {503}:
        assert metrics.value("http_requests_total", status=str(status)) == soak.statuses[status]
    assert metrics.value("http_requests_total", status="500") == 0
    pressed = [request.preemptions for seed, request in soak.requests.items() if plan()[seed] != "preempted"]
    assert sum(pressed) > 0  # by want of room
    for tier in ("device", "host"):
        assert metrics.value("hit_tokens_total", tier=tier) > 0
    assert metrics.value("evicted_blocks_total", tier="device") > 0


def plan() -> list[str]:
    kinds = [kind for kind, num in KINDS.items() for _ in range(num)]
    random.Random(SEED).shuffle(kinds)
    return kinds


@contextmanager
def soaking(
    directory: Path, model: Model, asked: list[Question], patch: pytest.MonkeyPatch, **tiers: Any
) -> Iterator[tuple[Served, Soak]]:
    with serving(directory, model, **LIMITS, **tiers) as served:
        engine = served.running.engine
        soak = Soak(served, asked)
        soak.watch(engine, patch)
        patch.setattr(engine.connector, "measured", lambda *_: None)  # loading a tiny model's blocks never pays
        yield served, soak


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_thousand_requests_leave_nothing_behind(
    directory: Path,
    model: Model,
    shm: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    size = 16 << 20
    tiers: dict[str, Any] = {
        "host_directory": shm / "store",
        "host_bytes": size,
        "disk_directory": tmp_path / "store",
        "disk_bytes": size,
    }
    with serving(directory, model, host_directory=shm / "warm", host_bytes=size) as served:
        served.complete("what is opened once and kept", max_tokens=2)
        asked = questions(model, served.running.tokenizer)
    before = Footprint.now()

    with monkeypatch.context() as patch, soaking(directory, model, asked, patch, **tiers) as (served, soak):
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            list(pool.map(soak.do, itertools.count(), plan()))
        check_nothing_is_held(served, soak)
        check_what_was_seen(soak, served)
        for number, question in enumerate(asked, len(plan())):  # what is cached now is right as well
            soak.complete("whole", question, greedy(question, number), random.Random(number))
        check_nothing_is_held(served, soak)
    Footprint.now().check_nothing_more_than(before)

    with monkeypatch.context() as patch, soaking(directory, model, asked, patch, **tiers) as (served, soak):
        for number, question in enumerate(asked):  # and what the stores kept
            soak.complete("whole", question, greedy(question, number), random.Random(number))
        metrics = served.running.metrics
        assert sum(metrics.value("hit_tokens_total", tier=tier) for tier in ("host", "disk")) > 0
        check_nothing_is_held(served, soak)
    Footprint.now().check_nothing_more_than(before)
    assert not os.listdir(tmp_path / "temporary")
    assert sorted(os.listdir(shm)) == ["store", "warm"]
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


def greedy(question: Question, seed: int) -> dict[str, Any]:
    return {**question.body, "max_tokens": LONGEST, "temperature": 0, "ignore_eos": True, "seed": seed}
