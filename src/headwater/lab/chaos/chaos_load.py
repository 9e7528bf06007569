"""The load of a fault campaign (`chaos.py`): clients of the router, all at once, who know the right answers.

Questions are of all sorts: prompts of one token, of a block, of a little less and more, of many; tokens, text and
chats; greedy and seeded; answers of one token and of more. A client asks one after the other, as a stream or not, with
a salt of its own (then nothing of it is cached) or without, with this or that deadline; now and then it goes away in
the middle. The HTTP is written out here: what is on the wire is what is judged.

Blocking calls for whoever directs; the clients are tasks of one event loop in one thread.
"""

import asyncio
import json
import random
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final
from urllib.parse import urlsplit

from headwater.lab.chaos.chaos_report import ClientAnswer, RightAnswer, Span

BLOCK_TOKENS: Final = 16
_LENGTHS: Final = (1, 2, 15, 16, 17, 31, 32, 33, 48, 61, 100, 160, 250)
_WORDS: Final = ("river", "stones", "where", "old", "rain", "has", "time", "to", "ask", "for", "more", "hills", "keep")
_UNKNOWN: Final = RightAnswer("", "")
_GIVE_UP_S: Final = 30.0  # behind the deadline: then a client has waited for something that hangs
_BEAT_S: Final = 0.02
_STALL_S: Final = 0.05
_WAITED_S: Final = 0.005


@dataclass(frozen=True, slots=True)
class ChaosQuestion:
    """What is asked, and the right answer, if it is known."""

    path: str
    body: Mapping[str, Any]
    answer: RightAnswer = _UNKNOWN


def make_questions(number: int, seed: int) -> list[ChaosQuestion]:
    """Questions of all sorts, without answers. They follow from the seed."""
    rng = random.Random(seed)
    found = []
    for i in range(number):
        length = _LENGTHS[i % len(_LENGTHS)]
        body: dict[str, Any] = {
            "max_tokens": rng.choice([1, 2, 6, 6, 12, 24]),
            "temperature": 0.0 if i % 3 else 0.9,
            "seed": rng.randrange(1 << 40),
            "ignore_eos": True,
        }
        if i % 5 == 4:
            content = " ".join(rng.choices(_WORDS, k=max(1, length // 6)))
            body |= {"messages": [{"role": "user", "content": content}]}
            found.append(ChaosQuestion("/v1/chat/completions", body))
        else:
            tokens = [rng.randrange(0x20, 0x7F) for _ in range(length)]
            body |= {"prompt": bytes(tokens).decode() if i % 5 == 3 else tokens}
            found.append(ChaosQuestion("/v1/completions", body))
    return found


def solve(url: str, questions: Sequence[ChaosQuestion]) -> list[ChaosQuestion]:
    """The same questions with the answers that a server gives to one after the other. Blocks. Raises RuntimeError."""

    async def all_of_them() -> list[ChaosQuestion]:
        solved = []
        for number, question in enumerate(questions):
            told = ClientAnswer(
                request_id=f"solve-{number}",
                answer=_UNKNOWN,
                begin_s=time.monotonic(),
                deadline_s=time.monotonic() + 60,
            )
            await _ask(url, question.path, dict(question.body), told)
            if told.status != 200 or not told.done or told.finish is None:
                raise RuntimeError(f"the single engine did not answer: {told.line()}")
            solved.append(replace(question, answer=RightAnswer(told.text, told.finish)))
        return solved

    return asyncio.run(all_of_them())


class ChaosLoad:
    """Clients that ask until they are stopped."""

    def __init__(
        self, url: str, questions: Sequence[ChaosQuestion], *, clients: int, timeouts_s: Sequence[float], seed: int
    ) -> None:
        """Starts them."""
        self.told: list[ClientAnswer] = []
        self._url = url
        self._questions = questions
        self._timeouts_s = timeouts_s
        self._over = threading.Event()
        self._rngs = [random.Random(seed * 1000 + number) for number in range(clients)]
        self._name = f"{seed:x}"
        self._num_asked = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="chaos load")
        self._thread.start()
        self.task: Final = f"self/task/{self._thread.native_id}"  # in /proc

    @property
    def num_right(self) -> int:
        """Requests that were answered in full so far."""
        return sum(one.done and one.status == 200 for one in list(self.told))

    def stop(self, *, at_once: bool = False) -> None:
        """Ask nothing more; wait until everything has ended, or leave it as it is. Idempotent."""
        self._over.set()
        if at_once:
            with suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(self._leave)
        self._thread.join()

    def _leave(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()

    def _run(self) -> None:
        async def all_of_them() -> None:
            await asyncio.gather(*(self._client(rng) for rng in self._rngs))

        with suppress(asyncio.CancelledError), asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(all_of_them())

    async def _client(self, rng: random.Random) -> None:
        while not self._over.is_set():
            question = rng.choice(self._questions)
            self._num_asked += 1
            told = ClientAnswer(
                request_id=f"chaos-{self._name}-{self._num_asked}",
                answer=question.answer,
                begin_s=time.monotonic(),
                deadline_s=time.monotonic() + rng.choice(self._timeouts_s),
                stream=rng.random() < 0.6,
                left=rng.random() < 0.04,
            )
            body = {**question.body, "stream": True} if told.stream else dict(question.body)
            if rng.random() < 0.7:
                body["cache_salt"] = told.request_id
            await _ask(self._url, question.path, body, told, leave_s=rng.uniform(0, 0.1) if told.left else None)
            self.told.append(told)
            if told.status != 200:
                await asyncio.sleep(0.05)  # who is sent away does not come back at once


class Witness:
    """Writes down when the kernel kept a processor from somebody who was ready to run. As a context."""

    def __init__(self) -> None:
        self.stalls: list[Span] = []
        self._watched: dict[str, float] = {}  # what somebody has waited so far, by the file that says so
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="chaos witness")

    def watch(self, *tasks: str) -> None:
        """From now on, these threads, by their places in /proc: the main one of a process is `PID`, ours `self/...`."""
        self._watched = {f"/proc/{task}/schedstat": _waited_s(f"/proc/{task}/schedstat") for task in tasks}

    def _run(self) -> None:
        before_s = time.monotonic()
        while not self._over.wait(_BEAT_S):
            now_s = time.monotonic()
            if now_s - before_s > _BEAT_S + _STALL_S:  # this one itself
                self.stalls.append((before_s + _BEAT_S, now_s))
            watched = self._watched
            for place, known_s in watched.items():
                waited_s = _waited_s(place)
                if waited_s - known_s > _WAITED_S:
                    self.stalls.append((max(before_s, now_s - (waited_s - known_s)), now_s))
                watched[place] = max(known_s, waited_s)
            before_s = now_s

    def __enter__(self) -> "Witness":
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._over.set()
        self._thread.join()


def _waited_s(place: str) -> float:
    """Seconds that a thread was ready to run and did not, since it began."""
    with suppress(OSError, IndexError), open(place, "rb", buffering=0) as stat:
        return int(stat.read(100).split()[1]) / 1e9
    return 0.0


# --- one exchange -----------------------------------------------------------------------------------------------------


async def _ask(
    url: str, path: str, body: Mapping[str, Any], told: ClientAnswer, *, leave_s: float | None = None
) -> None:
    """Ask, and write down what came. With `leave_s`, go away after so long. Never raises."""
    received = bytearray()
    patience_s = told.deadline_s + _GIVE_UP_S - time.monotonic() if leave_s is None else leave_s
    try:
        async with asyncio.timeout(patience_s):
            await _exchange(url, path, body, told, received)
    except TimeoutError:
        if leave_s is None:
            told.trouble = "it hangs"
    except (OSError, EOFError) as error:
        told.trouble = f"{type(error).__name__}: {error}"
    told.end_s = time.monotonic()
    told.left = told.left and not told.done
    read_answer(bytes(received), told)
    if told.done:
        told.left = False


async def _exchange(url: str, path: str, body: Mapping[str, Any], told: ClientAnswer, received: bytearray) -> None:
    parts = urlsplit(url)
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-type: application/json\r\nconnection: close\r\n"
        f"content-length: {len(content)}\r\nx-request-id: {told.request_id}\r\n"
        f"x-headwater-timeout-s: {told.deadline_s - time.monotonic():.3f}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        writer.write(head.encode() + content)
        while chunk := await reader.read(1 << 16):
            received += chunk
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


def read_answer(received: bytes, told: ClientAnswer) -> None:
    """What the bytes of an answer say. Does not raise: what cannot be read is trouble."""
    try:
        head, end, rest = received.partition(b"\r\n\r\n")
        if not end:
            told.trouble = told.trouble or ("" if told.left else "no answer at all")
            return
        first, *lines = head.decode().split("\r\n")
        told.status = int(first.split()[1])
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        body, whole = _unchunked(rest) if headers.get("transfer-encoding") == "chunked" else (rest, True)
        if "content-length" in headers:
            whole = len(body) == int(headers["content-length"])
        if headers.get("content-type", "").startswith("text/event-stream"):
            _read_events(body, told)
            told.done = told.done and whole
        elif whole:
            _read_document(json.loads(body), told)
        if not whole and not told.left:
            told.trouble = told.trouble or "it ended in the middle"
    except (ValueError, KeyError, IndexError, TypeError) as error:
        told.trouble = told.trouble or f"{type(error).__name__}: {error}"


def _unchunked(data: bytes) -> tuple[bytes, bool]:
    body, at = b"", 0
    while True:
        end = data.find(b"\r\n", at)
        if end < 0:
            return body, False
        size = int(data[at:end], 16)
        if size == 0:
            return body, data[end:] == b"\r\n\r\n"
        piece = data[end + 2 : end + 2 + size]
        body += piece
        if len(piece) < size:
            return body, False
        at = end + 2 + size + 2


def _read_document(document: Mapping[str, Any], told: ClientAnswer) -> None:
    if told.status != 200:
        told.error = document["error"]
        return
    (choice,) = document["choices"]
    told.text = choice["text"] if "text" in choice else choice["message"]["content"]
    told.finish = choice["finish_reason"]
    told.done = True


def _read_events(body: bytes, told: ClientAnswer) -> None:
    for event in body.split(b"\n\n")[:-1]:
        said = event.removeprefix(b"data: ")
        if said == b"[DONE]":
            told.done = told.error is None
            continue
        document = json.loads(said)
        if "error" in document:
            told.error = document["error"]
            told.done = False
        for choice in document.get("choices", ()):
            told.text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            told.finish = choice["finish_reason"] or told.finish
