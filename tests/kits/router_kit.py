"""A router as it is served, in front of scripted nodes: real HTTP servers on loopback, whose every byte can be bent.

A node speaks the protocol of `headwater.router.router` and answers with tokens that name the node, the attempt and the
request, so that a test can see whose tokens a client got. What goes wrong, and when, is its script's business. All
nodes of a world live in one event loop, in one thread.
"""

import asyncio
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import httpx2

from fleet_kit import KEY, Signed
from headwater.disagg.node_auth import AUTH, HELLO, HELLO_PATH, Authenticator, NotAdmitted, node_called
from headwater.metrics import Metrics
from headwater.router.lookup import Lookup
from headwater.router.router import Router
from headwater.router.server import RouterServer
from headwater.router.settings import RouterConfig
from headwater.tracing.spans import NO_TRACING, Tracing

WAIT_S = 30.0  # until a test gives up; nothing is measured
IDENTITY, LAYOUT = "ab" * 32, "cd" * 32
NUM_TOKENS = 5

OPTIONS: dict[str, Any] = {  # a machine may be busy: nobody is called silent for it
    "request_timeout_s": WAIT_S,
    "queue_timeout_s": 1.0,
    "silence_s": WAIT_S,
    "probe_timeout_s": WAIT_S,
    "pause_s": 0.1,
    "max_pause_s": 0.2,
}
IMPATIENT: dict[str, Any] = {
    "silence_s": 0.1,
    "probe_timeout_s": 0.2,
}  # where nodes fall silent, and nothing is counted


class Fault(StrEnum):
    """What a node does with one request, besides its work."""

    NONE = "none"
    SLOW = "slow"  # silent for a while, and says so when it is asked
    REFUSE = "refuse"
    ERROR = "error"  # 500
    BAD_GATEWAY = "bad_gateway"  # 502: a failed write, or a failed read
    MISSING = "missing"  # 502: prefill again
    REJECT = "reject"  # 400
    GARBAGE = "garbage"  # not HTTP
    NONSENSE = "nonsense"  # HTTP, but no answer
    EMPTY = "empty"  # 200, and nothing
    FOREIGN = "foreign"  # a ticket of another identity
    HANG = "hang"  # says nothing, not even when it is asked
    STALL = "stall"  # says that it does nothing
    DIE = "die"  # resets the connection at once
    HALF = "half"  # dies in the middle of the first thing it says
    # in the middle of a stream, after the first tokens
    MID_DIE = "mid_die"
    MID_END = "mid_end"  # ends without [DONE]
    MID_HANG = "mid_hang"
    MID_GARBAGE = "mid_garbage"
    MID_ERROR = "mid_error"  # an error event


BEFORE: list[Fault] = [
    one for one in Fault if not one.startswith("mid_") and one not in (Fault.NONE, Fault.SLOW, Fault.REJECT)
]
MIDDLE: list[Fault] = [one for one in Fault if one.startswith("mid_")]


@dataclass(frozen=True)
class Asked:
    """A request at a node."""

    path: str
    request_id: str
    attempt: str
    timeout_s: float
    body: dict[str, Any]
    proof: Callable[[int], str] = lambda status: ""  # headers of its answer, by status
    traceparent: str = ""

    @property
    def what(self) -> str:
        return self.path.removeprefix("/pd/") if self.path.startswith("/pd/") else "mixed"

    @property
    def asked(self) -> dict[str, Any]:
        """The client's body."""
        found: dict[str, Any] = self.body["body"] if self.path.startswith("/pd/") else self.body
        return found


@dataclass
class Node:
    """A scripted node."""

    name: str
    role: str
    script: Callable[[Asked], Fault] = lambda asked: Fault.NONE
    port: int = 0
    slow_s: float = 0.3  # longer than silence
    error_code: str = "scripted"  # of an error
    gate: asyncio.Event | None = None  # where set, the work waits for it
    asked: list[Asked] = field(default_factory=list)
    left: list[str] = field(default_factory=list)  # attempts whose connection was closed while it worked
    wrong: list[str] = field(default_factory=list)  # what the router should never have sent
    under_way: dict[str, str] = field(default_factory=dict)  # attempts: what it would say of them
    probes: int = 0
    probe_pad: int = 0  # bytes that its answers to probes are longer by
    finished: int = 0
    server: asyncio.Server | None = None
    door: Authenticator | None = None
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def beat(self, **changes: Any) -> dict[str, Any]:
        return {
            "node": self.name,
            "url": self.url,
            "role": self.role,
            "model": "tiny",
            "identity": IDENTITY,
            "layout": LAYOUT,
            "block_tokens": 16,
            "max_model_len": 4096,
            "lease_s": 60,
            "load": {"running": 0, "waiting": 0, "free_slots": 1000},
            **changes,
        }

    # --- HTTP, by hand ------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        self.server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)
        self.port = self.server.sockets[0].getsockname()[1]
        self.door = Authenticator(KEY, node_called(self.name, self.url))

    async def kill(self) -> None:
        """Be gone, as after kill -9: nobody listens, and what was open is reset."""
        if self.server is not None:
            for listener in self.server.sockets:
                asyncio.get_running_loop().remove_reader(listener.fileno())
            await asyncio.sleep(0.001)  # who was let in before has a task now
            self.server.close()
            for task in list(self.tasks):
                task.cancel("killed")
            if self.tasks:
                await asyncio.wait(self.tasks)
            self.server = None

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        try:
            await self._serve(reader, writer)
        except (asyncio.CancelledError, ConnectionError, asyncio.IncompleteReadError):
            _reset(writer)
        finally:
            self.tasks.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, path, _ = head[0].split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        assert self.door is not None
        if path == HELLO_PATH:
            found = self.door.admit_hello(headers.get(HELLO))
            lines = "".join(f"{name}: {value}\r\n" for name, value in self.door.answer(found, 204).items())
            writer.write(f"HTTP/1.1 204 X\r\n{lines}\r\n".encode())
            await reader.read(1)  # until the router lets go of it
            return
        try:
            admitted = self.door.admit(headers.get(AUTH), method=method, target=path)
        except NotAdmitted as error:  # signed for the process that was here before
            await _json(writer, 401, {"error": {"message": str(error), "code": "invalid_node_key"}})
            return

        def proof(status: int) -> str:
            assert self.door is not None
            return "".join(f"{name}: {value}\r\n" for name, value in self.door.answer(admitted, status).items())

        if method == "GET":
            await self._probed(path.rpartition("/")[2], writer, proof)
            return
        asked = Asked(
            path, headers["x-request-id"], headers["x-headwater-attempt"], float(headers["x-headwater-timeout-s"]),
            json.loads(body), proof, headers.get("traceparent", ""),
        )  # fmt: skip
        self.asked.append(asked)
        work = asyncio.create_task(self._work(asked, writer))
        leaving = asyncio.create_task(reader.read(1))
        try:
            await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                self.left.append(asked.attempt)
            else:
                work.result()
                self.finished += 1
        finally:
            for one in (work, leaving):
                one.cancel()
            try:
                await asyncio.wait({work, leaving})
            finally:  # also if it is killed just now
                self.under_way.pop(asked.attempt, None)
            for one in (work, leaving):
                if not one.cancelled():
                    one.exception()

    async def _probed(self, attempt: str, writer: asyncio.StreamWriter, proof: Callable[[int], str]) -> None:
        self.probes += 1
        state = self.under_way.get(attempt)
        if state == "hangs":
            await asyncio.sleep(WAIT_S)
        elif state is None:
            await _json(writer, 404, {"error": {"message": "unknown", "code": "not_found"}}, more=proof(404))
        else:
            said = {"state": state, "idle_s": 1000.0 if state == "stalled" else 0.0, "pad": "x" * self.probe_pad}
            await _json(writer, 200, said, more=proof(200))

    # --- what it does -------------------------------------------------------------------------------------------------

    async def _work(self, asked: Asked, writer: asyncio.StreamWriter) -> None:
        self._check(asked)
        fault = self.script(asked)
        self.under_way[asked.attempt] = {Fault.HANG: "hangs", Fault.STALL: "stalled", Fault.MID_HANG: "hangs"}.get(
            fault, "computing"
        )
        if self.gate is not None:
            await self.gate.wait()
        if fault is Fault.SLOW:
            await asyncio.sleep(self.slow_s)
        if fault in (Fault.HANG, Fault.STALL):
            await asyncio.sleep(WAIT_S)
        if fault is Fault.DIE:
            raise ConnectionResetError
        if fault is Fault.GARBAGE:
            writer.write(b"\x00\xff garbage\r\n\r\n" * 20)
            await writer.drain()
            return
        plain = {
            Fault.REFUSE: (503, "no slots"),
            Fault.ERROR: (500, "it broke"),
            Fault.BAD_GATEWAY: (502, "the pool did not take it"),
            Fault.REJECT: (400, "prompt is wrong"),
        }.get(fault)
        if plain is not None:
            status, message = plain
            error = {"message": message, "type": "invalid_request_error", "param": "prompt", "code": self.error_code}
            await _json(writer, status, {"error": error}, more=asked.proof(status))
        elif fault is Fault.MISSING:
            error = {"message": "a block is gone", "type": "server_error", "code": "missing"}
            said = {"error": error, "kind": "missing", "first_missing_block": 3}
            await _json(writer, 502, said, more=asked.proof(502))
        elif fault is Fault.NONSENSE:
            await _json(writer, 200, {"hello": [1, 2]}, more=asked.proof(200))
        elif asked.what == "prefill":
            await self._prefill(asked, fault, writer)
        elif asked.asked.get("stream") is True:
            await self._stream(asked, fault, writer)
        else:
            await self._whole(asked, fault, writer)

    def _check(self, asked: Asked) -> None:
        expected = {"prefill": "prefill", "decode": "decode"}.get(asked.what, "mixed")
        if expected != self.role:
            self.wrong.append(f"{asked.path} at a {self.role} node")
        if asked.what == "decode":
            ticket = asked.body["ticket"]
            if ticket["request"] != asked.request_id or ticket["prompt"] != asked.asked.get("prompt"):
                self.wrong.append(f"a ticket of another request: {ticket}")
        if asked.timeout_s <= 0:
            self.wrong.append("no time left")

    async def _prefill(self, asked: Asked, fault: Fault, writer: asyncio.StreamWriter) -> None:
        ticket = {
            "identity": "ef" * 32 if fault is Fault.FOREIGN else IDENTITY,
            "request": asked.request_id,
            "prompt": asked.asked.get("prompt"),
            "by": f"{self.name}|{asked.attempt}",
        }
        usage = {"prompt_tokens": 7, "cached_tokens": 0, "computed_tokens": 7}
        answer = {"ticket": ticket, "usage": usage, "phases": {"pool_s": 0.001}}
        cut = {Fault.HALF: 0.5, Fault.EMPTY: 0.0}.get(fault)
        await _json(writer, 200, answer, cut=cut, more=asked.proof(200))

    def _texts(self, asked: Asked) -> list[str]:
        by = asked.body["ticket"]["by"] if asked.what == "decode" else "-"
        return [f"{self.name}|{asked.attempt}|{asked.request_id}|{by}|{i} " for i in range(NUM_TOKENS)]

    def _usage(self) -> dict[str, Any]:
        return {"prompt_tokens": 7, "completion_tokens": NUM_TOKENS, "headwater": {"computed_tokens": 7}}

    async def _whole(self, asked: Asked, fault: Fault, writer: asyncio.StreamWriter) -> None:
        answer: dict[str, Any] = {
            "id": asked.request_id,
            "choices": [{"text": "".join(self._texts(asked))}],
            "usage": self._usage(),
        }
        cut = {Fault.HALF: 0.5, Fault.EMPTY: 0.0, Fault.MID_DIE: 0.7, Fault.MID_END: 0.7}.get(fault)
        if fault in (Fault.MID_GARBAGE, Fault.MID_ERROR):
            answer = {"error": {"message": "it broke"}}
        if fault is Fault.MID_HANG:
            await asyncio.sleep(WAIT_S)
        times = "x-headwater-pool-s: 0.002\r\nx-headwater-first-s: 0.001\r\n"
        await _json(writer, 200, answer, cut=cut, more=times + asked.proof(200))

    async def _stream(self, asked: Asked, fault: Fault, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\nx-headwater-pool-s: 0.002\r\n"
            b"transfer-encoding: chunked\r\nconnection: close\r\n" + asked.proof(200).encode() + b"\r\n"
        )

        async def chunk(data: bytes) -> None:
            writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            await writer.drain()
            await asyncio.sleep(0)

        def event(document: dict[str, Any]) -> bytes:
            return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"

        texts = self._texts(asked)
        if fault is Fault.EMPTY:
            await chunk(b": nothing yet\n\n")
            writer.write(b"0\r\n\r\n")
            return
        if fault is Fault.HALF:
            await chunk(event({"choices": [{"text": texts[0]}]})[:-3])
            raise ConnectionResetError
        for i, text in enumerate(texts):
            if i == 2 and fault in MIDDLE:
                await self._go_wrong(fault, chunk, event, writer)
                return
            whole = event({"id": asked.request_id, "choices": [{"text": text}], "usage": None})
            cut = len(whole) * (i + 1) // (NUM_TOKENS + 1)
            await chunk(whole[:cut])  # chunks and events have nothing to do with each other
            await chunk(whole[cut:])
        if asked.asked.get("stream_options"):
            await chunk(event({"id": asked.request_id, "choices": [], "usage": self._usage()}))
        await chunk(b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    async def _go_wrong(
        self,
        fault: Fault,
        chunk: Callable[[bytes], Coroutine[Any, Any, None]],
        event: Callable[[dict[str, Any]], bytes],
        writer: asyncio.StreamWriter,
    ) -> None:
        if fault is Fault.MID_DIE:
            await chunk(b'data: {"choi')
            raise ConnectionResetError
        if fault is Fault.MID_HANG:
            await asyncio.sleep(WAIT_S)
        if fault is Fault.MID_GARBAGE:
            await chunk(b"data: \x00\xff\n\n")
            await asyncio.sleep(WAIT_S)
        if fault is Fault.MID_ERROR:
            await chunk(event({"error": {"message": "it broke", "type": "server_error", "code": self.error_code}}))
        writer.write(b"0\r\n\r\n")
        await writer.drain()


async def _json(
    writer: asyncio.StreamWriter, status: int, document: object, *, cut: float | None = None, more: str = ""
) -> None:
    data = json.dumps(document).encode()
    sizes = f"content-type: application/json\r\ncontent-length: {len(data)}\r\nconnection: close\r\n"
    head = f"HTTP/1.1 {status} X\r\n{sizes}{more}\r\n"
    writer.write(head.encode() + data[: None if cut is None else int(len(data) * cut)])
    await writer.drain()
    if cut is not None:
        await asyncio.sleep(0.01)
        raise ConnectionResetError


def _reset(writer: asyncio.StreamWriter) -> None:
    with suppress(OSError, AttributeError):
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    writer.transport.abort()


class Stalls:
    """How long this process stood still, because the machine gave it no time: seen by a thread of its own.

    A router that blocks its own loop does not hold up that thread, so this excuses no fault of the router.
    """

    def __init__(self) -> None:
        self._lost: list[tuple[float, float]] = []  # when, and how long
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="test stalls")

    def _watch(self) -> None:
        before_s = time.monotonic()
        while not self._over.wait(0.01):
            now_s = time.monotonic()
            self._lost.append((now_s, max(0.0, now_s - before_s - 0.01)))
            before_s = now_s

    @property
    def most_s(self) -> float:
        """The most that was lost within any three seconds, which is longer than a request may take."""
        most_s, sum_s, first = 0.0, 0.0, 0
        for at_s, lost_s in self._lost:
            sum_s += lost_s
            while self._lost[first][0] < at_s - 3.0:
                sum_s -= self._lost[first][1]
                first += 1
            most_s = max(most_s, sum_s)
        return most_s

    def __enter__(self) -> "Stalls":
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._over.set()
        self._thread.join()


# --- the world --------------------------------------------------------------------------------------------------------


@dataclass
class World:
    """A router that answers, and nodes that it knows."""

    url: str
    router: Router
    server: RouterServer
    thread: threading.Thread
    loop: asyncio.AbstractEventLoop  # of the nodes
    client: httpx2.Client
    nodes: dict[str, Node] = field(default_factory=dict)

    def inside(self, what: Coroutine[Any, Any, Any]) -> Any:
        """Run in the nodes' loop."""
        found: Future[Any] = asyncio.run_coroutine_threadsafe(what, self.loop)
        return found.result(WAIT_S)

    async def end(self) -> None:
        """End all nodes, and whatever is left of their connections."""
        for node in self.nodes.values():
            await node.kill()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        if rest:
            await asyncio.wait(rest)
        await asyncio.sleep(0.01)

    def add(self, name: str, role: str, *, fault: Fault = Fault.NONE, join: bool = True, **beat: Any) -> Node:
        node = self.nodes[name] = Node(name, role, script=lambda asked: fault)
        self.inside(node.open())
        if join:
            assert self.join(node, **beat).status_code == 200
        return node

    def join(self, node: Node, **beat: Any) -> httpx2.Response:
        return self.client.post("/pd/nodes", json=node.beat(**beat))

    def complete(self, prompt: str = "once", *, timeout_s: float = 10.0, **body: Any) -> httpx2.Response:
        headers = {"x-headwater-timeout-s": str(timeout_s), "x-request-id": body.pop("request_id", "one")}
        return self.client.post("/v1/completions", json={"prompt": prompt, **body}, headers=headers)

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = self.client.get("/state").json()
        return found

    def until(self, holds: Callable[[], Any]) -> None:
        end = time.monotonic() + WAIT_S
        while not holds():
            assert time.monotonic() < end, "it did not come to that"
            time.sleep(0.005)

    def until_idle(self) -> None:
        """Wait until nothing is under way; then every slot must be back."""
        self.until(lambda: self.router.num_requests == 0)
        state = self.state()
        assert state["queues"] == dict.fromkeys(state["queues"], 0)
        for node in state["nodes"]:
            assert (node["requests_of_this_router"], node["pending_tokens"]) == (0, 0), node
        self.until(lambda: not any(node.under_way for node in self.nodes.values()))
        assert not [wrong for node in self.nodes.values() for wrong in node.wrong]

    def tokens(self, found: httpx2.Response) -> "Tokens":
        return Tokens.of(found.status_code, found.headers.get("content-type", ""), found.content)


@dataclass(frozen=True)
class Tokens:
    """What a client got: tokens, by whom, and how it ended."""

    status: int
    texts: list[str]
    error: dict[str, Any] | None
    done: bool
    usage: dict[str, Any] | None = None

    @staticmethod
    def of(status: int, kind: str, content: bytes) -> "Tokens":
        if status != 200:
            return Tokens(status, [], json.loads(content)["error"], done=False)
        if not kind.startswith("text/event-stream"):
            document = json.loads(content)
            texts = document["choices"][0]["text"].split()
            return Tokens(status, texts, None, done=True, usage=document.get("usage"))
        lines = [line for line in content.decode().split("\n\n") if line]
        said = [json.loads(line.removeprefix("data: ")) for line in lines if line != "data: [DONE]"]
        texts = [choice["text"].strip() for one in said for choice in one.get("choices", ())]
        errors = [one["error"] for one in said if "error" in one]
        usage = next((one["usage"] for one in said if one.get("usage")), None)
        assert len(errors) <= 1
        assert lines.count("data: [DONE]") <= 1
        return Tokens(status, texts, errors[0] if errors else None, lines[-1:] == ["data: [DONE]"], usage)

    @property
    def node(self) -> str:
        return self.texts[0].split("|")[0]

    def check(self, request_id: str) -> None:
        """One node's stream, of this request, from its beginning on; whole, or ended by an error."""
        by = Counter(text.rpartition("|")[0] for text in self.texts)
        assert len(by) <= 1, f"tokens of several attempts: {by}"
        assert [int(text.rpartition("|")[2]) for text in self.texts] == list(range(len(self.texts)))
        assert all(text.split("|")[2] == request_id for text in self.texts)
        if self.status != 200:
            assert self.status in (400, 429, 502, 503, 504)
            assert not self.texts
            assert self.error is not None
            assert self.error["message"]
        elif self.done:
            assert len(self.texts) == NUM_TOKENS
            assert self.error is None
        else:
            assert self.texts
            assert self.error is not None


@contextmanager
def world(
    *,
    lookup: Lookup | None = None,
    metrics: Metrics | None = None,
    tracing: Tracing = NO_TRACING,
    **options: Any,
) -> Iterator[World]:
    """A router and no node yet; at the end nothing may be under way, and all of it is gone."""
    loop = asyncio.new_event_loop()
    nodes_thread = threading.Thread(target=loop.run_forever, name="test nodes")
    listener = socket.create_server(("127.0.0.1", 0))
    answers = threading.Event()
    router = Router(
        RouterConfig(**{**OPTIONS, "node_key": KEY, **options}),
        metrics=metrics or Metrics(),
        lookup=lookup,
        tracing=tracing,
    )
    server = RouterServer(router, announce=answers.set)
    thread = threading.Thread(target=server.run, args=([listener],), name="test router")
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    client = httpx2.Client(base_url=url, auth=Signed(), timeout=WAIT_S, trust_env=False, verify=False)
    found = World(url, router, server, thread, loop, client)
    nodes_thread.start()
    thread.start()
    try:
        assert answers.wait(WAIT_S)
        yield found
        if thread.is_alive():
            found.until_idle()
    finally:
        client.close()
        server.should_exit = True
        thread.join(WAIT_S)
        found.inside(found.end())
        loop.call_soon_threadsafe(loop.stop)
        nodes_thread.join(WAIT_S)
        loop.close()
        listener.close()
        assert not thread.is_alive()
