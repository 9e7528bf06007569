"""The door of a server: what is slow, too much, too large, unread or nonsense ends clearly, in nobody's way."""

import asyncio
import contextlib
import errno
import json
import os
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import h11
import pytest
from typer.testing import CliRunner

from headwater.cli import app
from headwater.config.environment import default_api_key
from headwater.config.serve import ServeConfig
from headwater.core.errors import InvalidConfig
from headwater.engine.models.base import Model
from headwater.engine.tokenizer import Tokenizer
from headwater.metrics import Metrics
from headwater.serve import readers
from headwater.serve.connection import _Conversation
from headwater.serve.connections import ConnectionPhase, Connections, Cut
from headwater.serve.errors import ApiError
from headwater.serve.limits import Limits, Pace, fit_connections, host_name
from serve_kit import WAIT_S, Served, directory, model, served, serving

__all__ = ["directory", "model", "served"]  # fixtures

COMPLETIONS = "/v1/completions"
START = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
LONG: dict[str, Any] = {"prompt": "on and on", "max_tokens": 6000, "temperature": 0, "ignore_eos": True}
SOON_S = 8.0  # nobody is held up for as long; an upper bound, and far below what the faults cost

# --- what is heard ----------------------------------------------------------------------------------------------------


def all_of(connection: socket.socket) -> bytes:
    """What comes until the other side closes."""
    found = b""
    try:
        while data := connection.recv(1 << 16):
            found += data
    except ConnectionError:
        pass
    return found


def one_of(connection: socket.socket) -> bytes:
    """One answer; more may follow."""
    found = b""
    while not (size := re.search(rb"content-length: (\d+)\r\n(?s:.*?)\r\n\r\n", found.lower())) or len(
        found
    ) < size.end() + int(size[1]):
        data = connection.recv(1 << 16)
        assert data, found
        found += data
    return found


def error_in(answer: bytes, status: int, code: str) -> dict[str, Any]:
    """The error of an answer, in OpenAI's form."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.split(b" ")[1] == str(status).encode(), answer
    assert b"content-type: application/json" in head.lower()
    assert b"x-request-id: " in head.lower()
    error: dict[str, Any] = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    return error


def cuts(served: Served, why: Cut) -> float:
    return served.running.metrics.value("connections_cut_total", why=why)


# --- giant prompts ----------------------------------------------------------------------------------------------------


@pytest.mark.fault("B1")
def test_a_giant_prompt_stops_nobody(served: Served) -> None:
    waits_s: list[float] = []
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            begin_s = time.monotonic()
            assert served.get("/health").status_code == 200
            waits_s.append(time.monotonic() - begin_s)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for piece in ("a", " ", "\u4e2d", "e\u0301"):
            giant = {"prompt": piece * (7_000_000 // (len(json.dumps(piece)) - 2)), "max_tokens": 1}
            found = served.post(COMPLETIONS, giant, headers={"x-headwater-timeout-s": "30"})
            assert (found.status_code, found.json()["error"]["code"]) == (400, "context_length_exceeded"), found.text
            assert found.json()["error"]["param"] == "prompt"
    finally:
        over.set()
        looking.join()
    assert max(waits_s) < SOON_S / 2, sorted(waits_s)[-5:]


@pytest.mark.fault("B1")
def test_tokenising_lets_others_run(directory: Path) -> None:
    tokenizer, text = Tokenizer.load(directory), "a" * 1_000_000
    span: list[float] = []

    def encode() -> None:
        span.append(time.monotonic())
        tokenizer.encode(text)
        span.append(time.monotonic())

    thread = threading.Thread(target=encode)
    ticks = [time.monotonic()]
    thread.start()
    while len(span) < 2:
        ticks.append(time.monotonic())
    thread.join()
    inside = [span[0], *(tick for tick in ticks if span[0] < tick < span[1]), span[1]]
    longest_s = max(later - earlier for earlier, later in pairwise(inside))
    assert longest_s < (span[1] - span[0]) / 2, "the interpreter was held"


@pytest.mark.fault("B1")
def test_reading_ends_at_the_deadline_and_the_next_is_read(directory: Path, model: Model) -> None:
    with serving(directory, model, max_prompt_chars=100_000_000) as served:
        giant, begin_s = {"prompt": "a" * 7_000_000, "max_tokens": 1}, time.monotonic()
        found = served.post(COMPLETIONS, giant, headers={"x-headwater-timeout-s": "0.5"})
        assert (found.status_code, found.json()["error"]["code"]) == (504, "timeout")
        assert time.monotonic() - begin_s < SOON_S
        padded = {"prompt": "short", "max_tokens": 1, "temperature": 0, "user": " " * 2_000_000}
        assert served.post(COMPLETIONS, padded).status_code == 200


def test_a_large_body_is_read_as_a_small_one_is(served: Served) -> None:
    small = served.complete("once upon a time", max_tokens=4, logprobs=1)
    large = served.complete("once upon a time", max_tokens=4, logprobs=1, metadata={"list": [{}] * 100_000})
    assert large["choices"][0]["text"] == small["choices"][0]["text"]
    assert large["usage"]["prompt_tokens"] == small["usage"]["prompt_tokens"]
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "user": " " * 100_000}
    assert served.post("/v1/chat/completions", chat).status_code == 200
    for body, status, param in (
        ({"prompt": 5}, 400, "prompt"),
        ({"prompt": "a", "model": "other"}, 404, "model"),
        ({"prompt": [1] * 50_000}, 400, "prompt"),
        ({"prompt": "a", "max_tokens": 1 << 20}, 400, "max_tokens"),
    ):
        found = served.post(COMPLETIONS, {**body, "user": " " * 100_000})
        assert (found.status_code, found.json()["error"]["param"]) == (status, param), found.text
    broken = served.post(COMPLETIONS, content=b"{" * 100_000, headers={"content-type": "application/json"})
    assert (broken.status_code, broken.json()["error"]["code"]) == (400, "invalid_json")


def readers_of(pid: int) -> list[int]:
    """Processes that read bodies for this one."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that has ended, or a child
            children = (task / "children").read_text().split()
            found += [int(one) for one in children if b"reader_process" in Path(f"/proc/{one}/cmdline").read_bytes()]
    return found


def test_a_reader_that_dies_is_replaced(directory: Path, model: Model) -> None:
    with serving(directory, model, max_prompt_chars=100_000_000) as served:
        padded = {"prompt": "short", "max_tokens": 1, "user": " " * 2_000_000}
        assert served.post(COMPLETIONS, padded).status_code == 200
        giant = {"prompt": "a" * 7_000_000, "max_tokens": 1}
        answers: list[Any] = []
        asking = threading.Thread(target=lambda: answers.append(served.post(COMPLETIONS, giant)))
        asking.start()
        bodies = served.server._service.bodies
        served.until(lambda: bodies.num_bytes > 6_000_000)  # it is read, or about to be
        for pid in readers_of(os.getpid()):
            os.kill(pid, signal.SIGKILL)
        asking.join()
        assert answers[0].status_code == 400, answers[0].text  # another one has read it
        assert served.post(COMPLETIONS, padded).status_code == 200
        assert bodies.num_bytes == 0
    assert readers_of(os.getpid()) == []


def test_a_reader_has_so_much_memory_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "_LEAST_MEMORY_BYTES", 160 << 20)

    async def run() -> None:
        one = readers.Readers(max_body_bytes=1)
        until_s = asyncio.get_running_loop().time() + WAIT_S
        bomb, small = b'{"x": [' + b"{}," * 2_700_000 + b"{}]}", b'{"x": 1}'
        try:
            for _ in range(2):
                with pytest.raises(ApiError) as refused:
                    await one.read("routable", bomb, num_bytes=len(bomb), until_s=until_s)
                assert (refused.value.status, refused.value.code) == (413, "body_too_large")
                found = await one.read("routable", small, num_bytes=len(bomb), until_s=until_s)
                assert found.content == b'{"x":1}'
        finally:
            one.close()

    asyncio.run(run())


def test_a_tokenizer_that_has_changed_is_not_used(directory: Path) -> None:
    async def run() -> None:
        facts: dict[str, Any] = {"model": "tiny", "max_tokens": 100, "max_chars": 100}
        one = readers.Readers(max_body_bytes=1000, directory=str(directory), digest="another", **facts)
        try:
            with pytest.raises(RuntimeError, match="start the server again"):
                await one.read(
                    "prompt", COMPLETIONS, b"{}", num_bytes=2, until_s=asyncio.get_running_loop().time() + WAIT_S
                )
        finally:
            one.close()

    asyncio.run(run())


def test_who_reads_bodies_loads_no_torch() -> None:
    script = "import sys, headwater.serve.reader_process; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


# --- answers that nobody reads ----------------------------------------------------------------------------------------


@contextmanager
def unread(served: Served) -> Iterator[socket.socket]:
    """A long stream, and a client that does not read it."""
    data = json.dumps({**LONG, "stream": True, "logprobs": 20}).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(WAIT_S)
        host, _, port = served.url.removeprefix("http://").partition(":")
        connection.connect((host, int(port)))
        connection.sendall(f"{START}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        yield connection


@pytest.mark.fault("B2")
def test_answers_that_nobody_reads_lock_nobody_out(directory: Path, model: Model) -> None:
    # On a busy machine it takes a while until all four are inside, and the first of them must not be closed before.
    with (
        serving(directory, model, max_running=3, max_waiting=1, door={"patience_s": 8.0}) as served,
        ExitStack() as all_,
    ):
        for _ in range(4):
            all_.enter_context(unread(served))
        served.until(lambda: served.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1}).status_code == 429)
        served.until(lambda: served.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1}).status_code == 200)
        served.until(lambda: cuts(served, Cut.UNREAD) == 4)  # while their sockets are open
        served.until(lambda: served.get("/health").json()["free"] == 4)
        served.until_free()


@pytest.mark.fault("B2")
def test_sending_ends_at_the_deadline(directory: Path, model: Model) -> None:
    door = {"grace_s": 0.2, "patience_s": 600}
    # On a busy machine it takes a while until so much was computed that it does not fit between the two.
    with serving(directory, model, request_timeout_s=20.0, door=door) as served, unread(served) as connection:
        served.until(lambda: served.running.engine.num_requests == 1)
        served.until(lambda: cuts(served, Cut.LATE) == 1)
        served.until(lambda: served.server._service.num_inside == 0)
        served.until_free()
        assert b"[DONE]" not in all_of(connection)


def test_what_lies_unread_is_bounded(directory: Path, model: Model) -> None:
    with serving(directory, model, door={"unread_bytes": 100_000}) as served, unread(served), unread(served):
        served.until(lambda: cuts(served, Cut.UNREAD) == 1)  # the other may stay for its ten seconds


# --- slow heads, and many connections ---------------------------------------------------------------------------------


@pytest.mark.fault("B4")
def test_heads_that_do_not_end_are_told_so(directory: Path, model: Model) -> None:
    with serving(directory, model, door={"patience_s": 0.5, "idle_timeout_s": 3.0}) as served, ExitStack() as all_:
        half = [all_.enter_context(served.connect()) for _ in range(50)]
        silent = [all_.enter_context(served.connect()) for _ in range(50)]
        for connection in half:
            connection.sendall(START.encode())
        for connection in half:
            error_in(all_of(connection), 408, "timeout")
        for connection in silent:
            assert all_of(connection) == b""
        assert (cuts(served, Cut.SLOW), cuts(served, Cut.SILENT)) == (50, 50)
        assert served.get("/health").status_code == 200


@pytest.mark.fault("B4")
def test_silent_connections_make_room_for_those_who_ask(directory: Path, model: Model) -> None:
    with serving(directory, model, max_connections=8) as served, ExitStack() as all_:
        for number in range(40):
            connection = all_.enter_context(served.connect())
            if number % 2:
                connection.sendall(START.encode())
            if number % 4 == 3:
                connection.sendall(b"Content-Length: 100\r\n\r\n{")
        served.complete("a", max_tokens=2)  # whoever came before has been let in
        served.until(lambda: len(served.server.server_state.connections) <= 8)
        assert cuts(served, Cut.CROWDED) >= 33
    with serving(directory, model, max_connections=2) as served, served.raw(LONG), served.raw(LONG):
        served.until(lambda: served.running.engine.num_requests == 2)  # whole requests are not sent away for others
        found = served.get("/health")
        assert (found.status_code, found.json()["error"]["code"]) == (503, "too_many_connections")
        assert int(found.headers["retry-after"]) >= 1


@pytest.mark.fault("S5")
def test_bodies_that_nobody_wants_make_room_first(directory: Path, model: Model) -> None:
    refused = f"{START.replace('json', 'xml')}Content-Length: 1000\r\n\r\n{{".encode()
    with serving(directory, model, max_connections=8, door={"linger_s": 600}) as served, ExitStack() as all_:
        kept = all_.enter_context(served.connect())
        kept.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b'"ok"' in one_of(kept)
        for _ in range(20):
            connection = all_.enter_context(served.connect())
            connection.sendall(refused)
            error_in(one_of(connection), 415, "unsupported_media_type")
        served.complete("a", max_tokens=2)
        kept.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")  # nobody who is idle had to go
        assert b'"ok"' in one_of(kept)
        assert cuts(served, Cut.CROWDED) >= 13


def test_a_connection_that_is_kept_is_closed_when_it_is_idle_for_long(directory: Path, model: Model) -> None:
    with serving(directory, model, door={"idle_timeout_s": 2.0}) as served, served.connect() as connection:
        for _ in range(2):
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b'"ok"' in one_of(connection)
        assert all_of(connection) == b""


@contextmanager
def process(place: Path, *options: str, max_files: int | None = None) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server as people start it, and its address."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("HEADWATER_", "XDG_"))}
    env |= {"HOME": str(place), "XDG_CACHE_HOME": str(place / "cache")}

    def limit() -> None:
        if max_files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, max_files))

    command = [sys.executable, "-c", "from headwater.cli import app; app()", *options]
    with (place / "log").open("w") as log:
        child = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=log, text=True, preexec_fn=limit)
    try:
        assert child.stdout is not None
        found = re.search(r"http://[0-9.:]+", child.stdout.readline())
        assert found is not None, (place / "log").read_text()
        yield child, found[0]
    finally:
        child.kill()
        child.communicate()


def status_of(url: str, path: str = "/health") -> int:
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        return int(all_of(connection).split(b" ")[1])


@pytest.mark.fault("B4")
def test_a_process_with_few_descriptors_answers_and_says_little(tmp_path: Path) -> None:
    with process(tmp_path, "router", "--port", "0", max_files=200) as (_, url), ExitStack() as all_:
        host, _, port = url.removeprefix("http://").partition(":")
        for _ in range(600):
            all_.enter_context(socket.create_connection((host, int(port)), timeout=WAIT_S))
        for _ in range(3):
            assert status_of(url) == 503  # no node is here; it answers
        assert (tmp_path / "log").stat().st_size < 20_000


def test_the_number_of_connections_fits_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(1024, 1024)]
    monkeypatch.setattr(resource, "getrlimit", lambda what: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda what, both: limits.append(both))
    assert fit_connections(500) == 500
    assert fit_connections(1024) == 768
    assert fit_connections(1024, other_files=1024) == 384
    assert fit_connections(5) == 5
    limits.append((100, 100))
    assert 1 <= fit_connections(1024) <= 50
    limits.append((1024, 4096))
    assert fit_connections(1024) == 1024
    assert limits[-1] == (1280, 4096)


class Seat:
    """A connection that does what it is told, for `Connections`."""

    phase = ConnectionPhase.ARRIVING
    num_unread_bytes = 0

    def __init__(self) -> None:
        self.left: Cut | None = None

    def look(self, now_s: float) -> float:
        return now_s

    def leave(self, why: Cut) -> None:
        self.left = why


@pytest.mark.fault("B4")
def test_out_of_descriptors_some_connections_go_and_the_log_stays_small(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        door, loop = Connections(Limits(), Metrics()), asyncio.get_running_loop()
        seats = [Seat() for _ in range(100)]
        for seat in seats:
            assert door.enter(seat)
        error = OSError(errno.EMFILE, "too many open files")
        for _ in range(2048):  # as often as asyncio says it
            door.on_trouble(loop, {"message": "socket.accept() out of system resource", "exception": error})
        gone = [seat for seat in seats if seat.left is Cut.CROWDED]
        assert gone == seats[:16]  # those who came first
        assert len(door) == 84
        for seat in seats:
            door.left(seat)

    asyncio.run(run())
    assert len(caplog.records) < 3


# --- bodies -----------------------------------------------------------------------------------------------------------


@contextmanager
def half_bodies(
    served: Served, number: int, head: str = "", *, length: int = 1000, sent: int = 1
) -> Iterator[list[socket.socket]]:
    """Bodies that have begun, and do not go on."""
    with ExitStack() as all_:
        found = [all_.enter_context(served.connect()) for _ in range(number)]
        for connection in found:
            connection.sendall(f"{START}{head}Content-Length: {length}\r\n\r\n".encode() + b" " * sent)
        yield found


@pytest.mark.fault("B5")
def test_bodies_that_do_not_come_take_no_place(directory: Path, model: Model) -> None:
    with serving(directory, model, max_running=1, max_waiting=1) as served, half_bodies(served, 6):
        assert served.get("/health").status_code == 200  # whoever came before has been heard
        served.complete("a", max_tokens=2)


@pytest.mark.fault("B5")
def test_a_requests_time_begins_with_its_first_byte(served: Served) -> None:
    begin_s = time.monotonic()
    with half_bodies(served, 3, "x-headwater-timeout-s: 0.3\r\n") as found:
        for connection in found:
            error_in(one_of(connection), 504, "timeout")
    assert time.monotonic() - begin_s < SOON_S


@pytest.mark.fault("B5")
def test_a_slow_body_is_told_so(directory: Path, model: Model) -> None:
    with (
        serving(directory, model, door={"patience_s": 0.5, "linger_s": 0.5}) as served,
        half_bodies(served, 5) as found,
    ):
        for connection in found:
            error_in(all_of(connection), 408, "timeout")  # and what is left of it is not waited for, either
        assert cuts(served, Cut.SLOW) == 5


def test_a_pace_is_kept_in_every_part_of_the_way() -> None:
    pace = Pace(Limits(patience_s=10.0, pace_bytes_s=100), 50.0)
    assert pace.until_s == 60.0
    pace.moved(59.0, 999)
    assert pace.until_s == 60.0  # a byte too few
    pace.moved(59.5, 5_000)
    assert pace.until_s == 69.5
    pace.moved(69.0, 5_999)
    assert pace.until_s == 69.5  # what came before does not count again
    pace.moved(69.0, 6_000)
    assert pace.until_s == 79.0


def test_large_bodies_share_a_budget(directory: Path, model: Model) -> None:
    door = {"bodies_bytes": 1_000_000}
    with serving(directory, model, door=door) as served:
        bodies = served.server._service.bodies
        with half_bodies(served, 12, length=400_000, sent=300_000) as found:
            served.until(lambda: sum(b" 503 " in peek(one) for one in found) >= 8)
            assert bodies.num_bytes <= 1_000_000
            assert sum(peek(one) == b"" for one in found) in (3, 4)  # they go on waiting
            refused = [one for one in found if peek(one)]
            served.until(lambda: all(peek(one).rstrip().endswith(b"}") for one in refused))  # heads come before bodies
            for one in refused:
                error_in(peek(one), 503, "too_many_bytes")
            served.complete("small ones are in nobody's way", max_tokens=1)
            assert served.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1, "user": " " * 200_000}).status_code == 200
        served.until(lambda: bodies.num_bytes == 0)


def peek(connection: socket.socket) -> bytes:
    """What has come so far; it stays."""
    return connection.recv(1 << 16, socket.MSG_PEEK) if select.select([connection], [], [], 0)[0] else b""


@pytest.mark.fault("B6")
def test_the_routers_bodies_are_bounded(tmp_path: Path) -> None:
    def memory_mib(pid: int) -> int:
        return int(Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()[0]) >> 10

    with process(tmp_path, "router", "--port", "0") as (child, url), ExitStack() as all_:
        host, _, port = url.removeprefix("http://").partition(":")
        before_mib = memory_mib(child.pid)
        for _ in range(60):
            connection = all_.enter_context(socket.create_connection((host, int(port)), timeout=WAIT_S))
            connection.sendall(f"{START}Content-Length: 8000000\r\n\r\n".encode())
            connection.sendall(b" " * 7_900_000)
        assert status_of(url) == 503  # no node is here; it answers
        assert memory_mib(child.pid) - before_mib < 300


# --- what is no HTTP --------------------------------------------------------------------------------------------------

NONSENSE: list[tuple[bytes, int, str]] = [
    (b"hello\r\n\r\n", 400, "invalid_http"),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "invalid_http"),
    (b"GET / HTTP/1.1\r\n\r\n", 400, "invalid_http"),  # no Host
    (b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", 400, "invalid_http"),
    (b"GET / HTTP/1.1\r\nHost: localhost\r\na\x00: b\r\n\r\n", 400, "invalid_http"),
    (START.encode() + b"Content-Length: -5\r\n\r\n", 400, "invalid_http"),
    (START.encode() + b"Transfer-Encoding: gzip\r\n\r\n", 501, "invalid_http"),
    (START.encode() + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400, "invalid_http"),
    (b"GET / HTTP/1.1\r\nHost: localhost\r\na: " + b"b" * 20_000, 431, "head_too_large"),
    (b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"a: b\r\n" * 40_000 + b"\r\n", 431, "head_too_large"),
    (START.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 3000, 400, "small_chunks"),
    (START.encode() + b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n", 400, "invalid_http"),  # S23
]


@pytest.mark.fault("B11")
@pytest.mark.parametrize(("sent", "status", "code"), NONSENSE, ids=range(len(NONSENSE)))
def test_what_is_no_http_gets_an_error_in_openais_form(served: Served, sent: bytes, status: int, code: str) -> None:
    with served.connect() as connection:
        connection.sendall(sent)
        error_in(all_of(connection), status, code)
    served.until(lambda: cuts(served, Cut.MALFORMED) == 1)
    served.complete("a", max_tokens=1)


@pytest.mark.fault("S1")
def test_many_tiny_lines_are_refused_before_they_are_taken_apart(served: Served) -> None:
    tiny = b"a:\r\n" * 4000
    head, body = b"GET /health HTTP/1.1\r\nHost: localhost\r\n", b"5\r\nab\n\nc\r\n0\r\n"
    chunked = START.encode() + b"Transfer-Encoding: chunked\r\n\r\n"
    for sent in (
        [head + tiny + b"\r\n"],
        [head, *[b"a:\r\n"] * 99],  # as they come; the last is the first too many, or what follows could be reset
        [head + b"\r\n" + head + tiny + b"\r\n"],  # behind another request
        [f"{START.replace('json', 'xml')}Content-Length: 9\r\n\r\n{{".encode(), b" " * 8 + head + tiny + b"\r\n"],
        [chunked + body + tiny + b"\r\n"],  # after a body
    ):
        with served.connect() as connection:
            connection.sendall(sent[0])
            if len(sent) == 2:
                error_in(one_of(connection), 415, "unsupported_media_type")
            for more in sent[1:]:
                connection.sendall(more)
            heard = all_of(connection)
            error_in(heard[heard.rindex(b"HTTP/1.1 ") :], 431, "head_too_large")
    many_lines = json.dumps({"prompt": "a", "max_tokens": 1}, indent=1).replace("\n", "\n" * 1000).encode()
    with served.connect() as connection:  # of a body there may be as many as one likes, and of headers a few
        few = b"a:\r\n" * 90
        connection.sendall(f"{START}Content-Length: {len(many_lines)}\r\n".encode() + few + b"\r\n" + many_lines)
        assert one_of(connection).startswith(b"HTTP/1.1 200 ")


@pytest.mark.fault("S18")
def test_small_chunks_are_taken_unless_there_are_very_many(served: Served) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 1, "user": " " * 60_000}).encode()
    for size, status in ((100, 200), (1000, 200), (10, 400)):
        pieces = [body[i : i + size] for i in range(0, len(body), size)]
        sent = b"".join(f"{len(one):x}\r\n".encode() + one + b"\r\n" for one in pieces) + b"0\r\n\r\n"
        with served.connect() as connection:
            connection.sendall(START.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + sent)
            heard = one_of(connection)
            assert heard.startswith(f"HTTP/1.1 {status} ".encode()), heard
            if status == 400:
                assert "chunks of 128 bytes or more" in error_in(heard, 400, "small_chunks")["message"]


def test_pieces_that_come_slowly_may_be_small() -> None:
    now_s = 0.0
    limits = Limits(free_pieces=10, piece_bytes=100, pieces_s=5)
    talk = _Conversation(limits, lambda: now_s)
    talk.receive_data(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
    talk.next_event()
    for number in range(1, 16):
        now_s = 1.0
        talk.receive_data(b"1\r\n \r\n")
        assert isinstance(talk.next_event(), h11.Data), number
    talk.receive_data(b"1\r\n \r\n")
    with pytest.raises(h11.RemoteProtocolError):
        talk.next_event()


def test_a_client_with_keep_alive_hears_of_a_body_that_is_too_large(directory: Path, model: Model) -> None:
    with serving(directory, model, max_body_bytes=1_000_000) as served, served.connect() as connection:
        big = b" " * 3_000_000
        connection.sendall(f"{START}Content-Length: {len(big)}\r\n\r\n".encode() + big)
        error_in(one_of(connection), 413, "body_too_large")
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")  # what was left of it was thrown away
        assert b'"ok"' in one_of(connection)


def test_requests_that_come_at_once_are_answered_in_turn(served: Served) -> None:
    one = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with served.connect() as connection:
        connection.sendall(one * 5 + one.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        assert all_of(connection).count(b'"status":"ok"') == 6
    with served.connect() as connection:
        connection.sendall(one + b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 10_000 + b"\r\n")
        heard = all_of(connection)
        assert heard.count(b'"status":"ok"') == 1
        error_in(heard[heard.rindex(b"HTTP/1.1") :], 431, "head_too_large")


# --- keys and hosts ---------------------------------------------------------------------------------------------------


@pytest.mark.fault("B8")
@pytest.mark.parametrize("command", [["serve", "--model", "nowhere"], ["router", "--port", "1"]])
def test_an_empty_key_does_not_open_the_door(command: list[str]) -> None:
    found = CliRunner().invoke(app, [*command, "--api-key", ""])
    assert found.exit_code == 1
    assert "a key is not empty" in found.stderr
    found = CliRunner().invoke(app, command, env={"HEADWATER_API_KEY": ""})
    assert found.exit_code == 1
    assert "HEADWATER_API_KEY is empty" in found.stderr


def test_the_key_in_the_environment() -> None:
    assert default_api_key({}) is None
    assert default_api_key({"HEADWATER_API_KEY": "sesame"}) == "sesame"
    with pytest.raises(InvalidConfig, match="HEADWATER_API_KEY is empty"):
        default_api_key({"HEADWATER_API_KEY": ""})


OWN = ["localhost", "LocalHost:80", "127.0.0.1", "127.0.0.1:8000", "127.9.9.9", "[::1]", "[::1]:8000", "localhost.:1"]
FOREIGN = [
    "evil.example",
    "evil.example:8000",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "10.0.0.1",
    "",
    "[::2]",
    "[::1].evil.example",
    "[::1]evil.example",
    "[::1",
    "localhost:80@evil.example",
    "localhost:80.evil.example",
    "user@localhost",
]


@pytest.mark.fault("B13")
def test_a_server_on_loopback_answers_to_its_own_names_only(directory: Path, model: Model) -> None:
    with serving(directory, model, allowed_hosts=("mine.example",)) as served:
        for host in [*OWN, "mine.example", "MINE.example:99"]:
            assert served.get("/v1/models", headers={"host": host}).status_code == 200, host
        for host in FOREIGN:
            for path in ("/v1/models", "/health", "/metrics"):
                found = served.get(path, headers={"host": host})
                assert (found.status_code, found.json()["error"]["code"]) == (421, "wrong_host"), host
        assert "--allow-host" in found.json()["error"]["message"]
    with serving(directory, model, api_key="sesame") as served:  # the key is what pages do not have
        found = served.get("/v1/models", headers={"host": "evil.example", "authorization": "Bearer sesame"})
        assert found.status_code == 200


@pytest.mark.fault("S23")
def test_bodies_come_as_they_are(served: Served) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    for encoding, status in (("gzip", 415), ("identity, gzip", 415), ("identity", 200)):
        found = served.post(COMPLETIONS, body, headers={"content-encoding": encoding})
        assert found.status_code == status, encoding
    assert "Content-Encoding" in served.post(COMPLETIONS, body, headers={"content-encoding": "br"}).text


def test_names_of_hosts() -> None:
    assert [host_name(host) for host in ("A.b:1", "[::1]:5", " x ", "a.")] == ["a.b", "::1", "x", "a"]
    assert ServeConfig(model=Path("somewhere"), allowed_hosts=["a.b"]).allowed_hosts == ("a.b",)  # type: ignore[arg-type]
    for bad in ("http://a", "a:80", "a/b", ""):
        with pytest.raises(InvalidConfig, match="a host's name"):
            ServeConfig(model=Path("somewhere"), allowed_hosts=(bad,))


def test_limits_are_checked() -> None:
    for name in ("patience_s", "max_connections", "bodies_bytes", "request_timeout_s"):
        for bad in (0, -1, float("inf")):
            with pytest.raises(InvalidConfig, match=name):
                Limits(**{name: bad})  # type: ignore[arg-type]  # that is the point
