"""A fleet under attack from inside the network: recorded and forged words, addresses and names that were taken over.

`test_strangers.py` has those who come without anything.
"""

import asyncio
import json
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from typer.testing import CliRunner

from fleet_kit import KEY, Signed, signature
from headwater.cli import app
from headwater.core.errors import InvalidConfig
from headwater.core.node_key import NodeKey
from headwater.core.role import Role
from headwater.disagg.heartbeat import Heartbeat
from headwater.disagg.key_file import write_node_key
from headwater.disagg.node_auth import AUTH, HELLO, Authenticator, NotProven, node_called
from headwater.disagg.protocol import decode
from headwater.disagg.signing import Peer
from headwater.disagg.used import TicketUse, UsedTickets
from headwater.engine.models.base import Model
from headwater.metrics import Metrics
from headwater.router.nodes import HeartbeatKind, NameTaken, NodeRefused, NodeTable
from headwater.router.relay import Relay
from headwater.router.router import Router
from headwater.router.settings import RouterConfig
from headwater.serve.heartbeats import HeartbeatSender
from router_kit import Node, World, world
from serve_kit import WAIT_S, directory, model, serving
from test_pd_serve import COMPLETIONS, Cluster, cluster, envelope, pool, routing, until
from test_router import beat

__all__ = ["directory", "model", "pool"]

PROMPT = "a prompt that is nobody else's business"
OTHER = NodeKey("the-key-of-another-fleet")

pytestmark = pytest.mark.fault("B3")


@pytest.fixture
def pair(directory: Path, model: Model, pool: str) -> Iterator[Cluster]:
    with cluster(directory, model, pool) as one:
        yield one


# --- heartbeats -------------------------------------------------------------------------------------------------------


def test_a_recorded_heartbeat_counts_once(here: World) -> None:
    """Neither again, nor with another body, nor at another path; nor at a router that was started again."""
    node = here.add("m", "mixed", join=False)
    content = json.dumps(node.beat(lease_s=0.05)).encode()
    headers = {"content-type": "application/json", **signature(here.url, "/pd/nodes", content)}

    def say(url: str = here.url, path: str = "/pd/nodes", body: bytes = content) -> int:
        return httpx2.post(url + path, content=body, headers=headers, trust_env=False).status_code

    assert say(body=json.dumps(node.beat(url="http://127.0.0.1:9")).encode()) == 401
    headers |= signature(here.url, "/pd/nodes", content)
    assert say() == 200
    here.until(lambda: not here.state()["nodes"])  # its lease is over
    assert say() == 401
    headers |= signature(here.url, "/pd/nodes", content)
    assert say(path="/pd/drain") == 401
    with routing() as (url, _):
        assert say(url) == 401
        assert "m" not in {one["node"] for one in httpx2.get(url + "/state", trust_env=False).json()["nodes"]}
    assert here.state()["nodes"] == []


def test_a_heartbeat_of_another_fleet_is_refused(here: World) -> None:
    node = here.add("m", "mixed", join=False)
    with pytest.raises(NotProven, match="refuses our node key"):
        here.client.post("/pd/nodes", json=node.beat(), auth=Signed(key=OTHER))
    headers = {AUTH: "0" * 32}
    for client_key in ({}, {"authorization": f"Bearer {KEY.text}"}, headers):  # not even the key itself, in clear
        assert (
            here.client.post("/pd/nodes", json=node.beat(), headers=client_key, auth=httpx2.Auth()).status_code == 401
        )
    assert here.state()["nodes"] == []


def test_a_name_is_its_host_s_while_the_lease_runs() -> None:
    """A newer process of the same host has it at once, somebody elsewhere when it is free, whatever epoch it says."""
    table = NodeTable()
    table.heard(beat("a", url="http://10.0.0.1:1", epoch=5), 0.0)
    for lease_s in (10.0, 0.0):  # it cannot throw it out either
        with pytest.raises(NameTaken, match=r"10\.0\.0\.1"):
            table.heard(beat("a", url="http://10.0.0.2:1", epoch=1 << 63, lease_s=lease_s), 1.0)
    assert table.heard(beat("a", url="http://10.0.0.1:2", epoch=6), 2.0) is HeartbeatKind.NEW
    with pytest.raises(NodeRefused, match="newer process"):
        table.heard(beat("a", url="http://10.0.0.1:1", epoch=5), 3.0)
    with pytest.raises(NameTaken):
        table.heard(beat("a", url="http://10.0.0.2:1", epoch=7), 11.9)
    assert table.heard(beat("a", url="http://10.0.0.2:1", epoch=7), 12.0) is HeartbeatKind.NEW  # the lease is over
    assert table.heard(beat("a", url="http://10.0.0.2:1", epoch=7, lease_s=0.0), 12.5) is HeartbeatKind.LEFT
    assert table.heard(beat("a", url="http://10.0.0.3:1", epoch=1), 13.0) is HeartbeatKind.NEW  # it was given up
    loopback = NodeTable()
    loopback.heard(beat("a", url="http://127.0.0.1:1", epoch=1), 0.0)
    assert loopback.heard(beat("a", url="http://localhost:2", epoch=2), 0.0) is HeartbeatKind.NEW


@pytest.mark.fault("S22")
def test_a_node_whose_clock_went_back_waits_for_its_own_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was started again in its place, and says a smaller epoch than the process before it, which has died."""
    table = NodeTable()
    table.heard(beat("a", url="http://10.0.0.2:1", epoch=1_000_000), 0.0)
    with pytest.raises(NameTaken, match="newer process"):
        table.heard(beat("a", url="http://10.0.0.2:1", epoch=990_000), 1.0)
    assert table.heard(beat("a", url="http://10.0.0.2:1", epoch=990_000), 10.0) is HeartbeatKind.NEW
    monkeypatch.setattr("headwater.serve.heartbeats._TIMEOUT_S", WAIT_S)  # however busy the machine is
    with routing(node_key=NodeKey.random()) as (url, router):
        key = router.config.node_key
        before = beat("here", url="http://127.0.0.1:1", epoch=10, lease_s=1.0).document()
        assert httpx2.post(url + "/pd/nodes", json=before, auth=Signed(key=key), trust_env=False).status_code == 200
        asyncio.run(asyncio.wait_for(_join(url, beat(role=Role.MIXED), key), WAIT_S))  # epoch 9
        assert _urls(url) == {"here": "http://127.0.0.1:1"}


def test_a_node_waits_for_its_name(directory: Path, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was started elsewhere while the lease of the old one ran; one that is still there keeps it."""

    async def nobody(self: Relay, node: str, url: str) -> None:
        return None

    monkeypatch.setattr(Relay, "greet", nobody)  # there is nobody to greet elsewhere
    monkeypatch.setattr("headwater.serve.heartbeats._TIMEOUT_S", WAIT_S)  # however busy the machine is
    with routing(node_key=NodeKey.random()) as (url, router):
        key = router.config.node_key
        served = _beat_of(directory, model)

        def elsewhere(lease_s: float) -> None:
            said = replace(served, node="here", url="http://elsewhere.invalid:1", lease_s=lease_s).document()
            found = httpx2.post(url + "/pd/nodes", json=said, auth=Signed(key=key), trust_env=False)
            assert found.status_code == 200, found.text

        elsewhere(3.0)
        with serving(directory, model, routers=(url,), node="here", lease_s=3 * WAIT_S, node_key=key) as node:
            assert _urls(url) == {"here": node.url}
        elsewhere(600.0)
        monkeypatch.setattr("headwater.serve.heartbeats._NAME_S", 0.5)
        with pytest.raises(InvalidConfig, match="name of its own"):
            asyncio.run(_join(url, served, key))
        assert _urls(url) == {"here": "http://elsewhere.invalid:1"}


def _beat_of(directory: Path, model: Model) -> Heartbeat:
    """What a node with this model says."""
    return beat(
        role=Role.MIXED,
        model=directory.name,
        identity=model.identity.digest.hex(),
        layout=model.layout.fingerprint.hex(),
        block_tokens=model.block_tokens,
    )


def _urls(router: str) -> dict[str, str]:
    found = httpx2.get(router + "/state", trust_env=False).json()
    return {one["node"]: one["url"] for one in found["nodes"]}


async def _join(router: str, said: Heartbeat, key: NodeKey) -> None:
    here = replace(said, node="here", url="http://127.0.0.1:1", epoch=9)
    await HeartbeatSender((router,), lambda lease_s: replace(here, lease_s=lease_s), lease_s=3 * WAIT_S, key=key).join()


@pytest.mark.parametrize("url", ["http://10.0.0.1:1", "http://example.org:80", "http://[2001:db8::1]:1"])
def test_a_router_without_a_key_takes_nobody_from_elsewhere(url: str) -> None:
    async def main() -> None:
        router = Router(RouterConfig(), metrics=Metrics())
        with pytest.raises(NodeRefused, match="--node-key-file"):
            router.membership.heard(beat("n", url=url))
        assert router.membership.heard(beat("n", url="http://127.0.0.1:1"))["came"] is HeartbeatKind.NEW
        await router.aclose()

    asyncio.run(main())


def test_clocks_that_differ_are_told_and_do_no_harm(here: World, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing that is signed has a time in it."""
    caplog.set_level(logging.WARNING, "headwater")
    here.add("m", "mixed", clock_s=time.time() + 61.0)
    here.add("n", "mixed", clock_s=time.time() - 3.0)
    assert here.complete(PROMPT).status_code == 200
    (told,) = [one.getMessage() for one in caplog.records if "clock" in one.getMessage()]
    assert told.startswith("the clock of m is 61 s ahead")


# --- addresses that were taken over -----------------------------------------------------------------------------------


class Impostor:
    """Listens where a node was, writes down every byte, and says what it is told to."""

    def __init__(self, port: int, say: Callable[[bytes], bytes]) -> None:
        self.heard: list[bytes] = []
        self._say = say
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port: int = self._listener.getsockname()[1]
        self._over = False
        self._thread = threading.Thread(target=self._run, name="test impostor")
        self._thread.start()

    def _run(self) -> None:
        while not self._over:
            with suppress(OSError):
                connection, _ = self._listener.accept()
                with connection:
                    connection.settimeout(0.5)
                    said = connection.recv(1 << 16)
                    with suppress(TimeoutError):  # a body may come behind its head
                        while b"\r\n\r\n" in said and b"POST" in said[:4] and PROMPT.encode() not in said:
                            more = connection.recv(1 << 16)
                            if not more:
                                break
                            said += more
                    self.heard.append(said)
                    connection.sendall(self._say(said))

    def close(self) -> None:
        self._over = True
        with suppress(OSError):
            socket.create_connection(self._listener.getsockname()).close()
        self._thread.join(WAIT_S)
        self._listener.close()


def _answer(document: object) -> bytes:
    data = json.dumps(document).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(data) + data


YES = _answer({"choices": [{"text": "a false answer"}], "usage": {}})


@pytest.fixture
def here() -> Iterator[World]:
    with world() as found:
        yield found


@pytest.mark.parametrize("busy", [True, False])
def test_who_takes_over_an_address_gets_no_prompt(here: World, *, busy: bool) -> None:
    """However short the moment was since the node proved itself, and whatever the other says."""
    for i in range(8):
        node = here.add(f"m{i}", "mixed", lease_s=3600)
        if busy:
            assert here.complete("before").status_code == 200
        port = node.port
        here.inside(node.kill())
        impostor = Impostor(port, lambda said: YES)
        try:
            found = here.complete(PROMPT)
            assert found.status_code == 502, found.text
            assert "not trusted" in found.text
        finally:
            impostor.close()
        assert impostor.heard
        assert PROMPT.encode() not in b"".join(impostor.heard)
        assert not [said for said in impostor.heard if said.startswith(b"POST")]
        here.join(node, lease_s=0)


@pytest.mark.parametrize("lines", [b"challenge: \xff", b"challenge: %s\r\nx-headwater-proof: \xff" % (b"0" * 32)])
@pytest.mark.fault("X7")
def test_who_answers_a_hello_with_bytes_that_are_no_text_is_not_trusted(
    here: World, caplog: pytest.LogCaptureFixture, lines: bytes
) -> None:
    """And another node is asked."""
    good = here.add("good", "mixed")
    impostor = Impostor(0, lambda said: b"HTTP/1.1 204 X\r\nx-headwater-%s\r\n\r\n" % lines)
    try:
        false = Node("false", "mixed", port=impostor.port)
        assert here.join(false).status_code == 200
        here.until(lambda: {one["node"]: one["doubted"] for one in here.state()["nodes"]}["false"])
        for i in range(4):  # one of two goes there first, until it is left alone
            tokens = here.tokens(here.complete(PROMPT, request_id=f"r{i}"))
            assert (tokens.status, tokens.node) == (200, "good")
        here.until_idle()
        assert {one["node"]: one["breaker"] for one in here.state()["nodes"]} == {"good": "closed", "false": "open"}
        assert here.join(false, lease_s=0).status_code == 200
    finally:
        impostor.close()
    assert len(good.asked) == 4
    assert "never retrieved" not in caplog.text


@pytest.mark.parametrize("abrupt", [True, False])
def test_a_process_that_died_is_trusted_no_more_at_once(*, abrupt: bool) -> None:
    """Before the event loop has had a turn to hear of it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        door, die = Authenticator(KEY, node_called("n", url)), threading.Event()

        def live_and_die() -> None:
            connection, _ = listener.accept()
            with connection:
                head = connection.recv(1 << 16).decode()
                hello = re.search(rf"{HELLO}: (\S+)", head)
                assert hello is not None
                proof = door.answer(door.admit_hello(hello[1]), 204)
                lines = "".join(f"{name}: {value}\r\n" for name, value in proof.items())
                connection.sendall(f"HTTP/1.1 204 X\r\n{lines}\r\n".encode())
                assert die.wait(WAIT_S)
                if abrupt:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")

        async def main() -> None:
            peer = Peer(KEY, node_called("n", url), url)
            seen = [peer.proven]
            await peer.prove(connect_s=WAIT_S)
            seen.append(peer.proven)
            die.set()
            thread.join(WAIT_S)
            seen.append(peer.proven)
            peer.close()
            assert seen == [False, True, False]

        thread = threading.Thread(target=live_and_die, name="test node")
        thread.start()
        asyncio.run(main())


def test_a_node_that_was_started_again_in_its_place_is_asked(here: World) -> None:
    node = here.add("m", "mixed")
    for _ in range(5):
        assert here.complete(PROMPT).status_code == 200
        here.inside(node.kill())
        here.inside(node.open())
        here.until(lambda: here.complete(PROMPT).status_code == 200)
    assert len(here.nodes["m"].asked) >= 10


class Between:
    """Somebody on the way to a node, who passes all on and remembers what was answered. In the nodes' loop."""

    def __init__(self, target: int) -> None:
        self.port = 0
        self.answers: list[bytes] = []  # to prompts
        self.replay: bytes | None = None  # what is answered instead of passing a prompt on
        self._target = target
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._pass, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: (\d+)", head)
        body = await reader.readexactly(int(length[1]) if length else 0)
        try:
            if body and self.replay is not None:
                writer.write(self.replay)
                return
            from_node, to_node = await asyncio.open_connection("127.0.0.1", self._target)
            try:
                to_node.write(head + body)
                answer = await from_node.readuntil(b"\r\n\r\n")
                writer.write(answer)
                if body:
                    rest = await from_node.read()
                    writer.write(rest)
                    self.answers.append(answer + rest)
                else:  # a connection that stays, as long as the router wants it
                    await reader.read()
            finally:
                to_node.close()
        finally:
            writer.close()


@contextmanager
def between(here: World, target: int) -> Iterator[Between]:
    found = Between(target)
    here.inside(found.open())
    try:
        yield found
    finally:
        here.inside(found.close())


def test_a_recorded_answer_answers_nothing_else(here: World) -> None:
    node = here.add("m", "mixed", join=False)
    with between(here, node.port) as one:
        node.door = Authenticator(KEY, node_called("m", one.url))
        assert here.join(node, url=one.url).status_code == 200
        first = here.complete(PROMPT)
        assert first.status_code == 200, first.text
        here.until(lambda: one.answers)
        one.replay = one.answers[0]
        second = here.complete(PROMPT)
        assert second.status_code == 502, second.text
        assert "not trusted" in second.text
        one.replay = None
        here.until(lambda: here.complete(PROMPT).status_code == 200)


def test_nobody_answers_in_another_node_s_place(here: World, caplog: pytest.LogCaptureFixture) -> None:
    """Somebody at the address of one who passes everything on to another: that one proves itself, not the first."""
    node, other = here.add("a", "mixed", join=False), here.add("b", "mixed", join=False)
    with between(here, other.port) as one:

        def doubted() -> bool:
            assert here.join(node, url=one.url).status_code == 200  # again: on a busy machine one greeting may be late
            return bool(here.state()["nodes"][0]["doubted"])

        for _ in range(3):
            here.until(doubted)
        assert here.complete(PROMPT).status_code == 502
    assert here.join(node, url=one.url).status_code == 200  # nobody is there any more, and nothing is proven by that
    here.until(lambda: not here.router.membership._greetings)
    assert here.state()["nodes"][0]["doubted"]
    assert other.asked == []
    assert caplog.text.count("a is not trusted") == 1


def test_a_false_router_in_the_place_of_a_true_one_is_not_heard(caplog: pytest.LogCaptureFixture) -> None:
    """A node that knows its router says so when somebody else answers there, and goes on."""
    caplog.set_level(logging.INFO, "headwater")

    async def main() -> None:
        with routing() as (url, router):
            beats = HeartbeatSender((url,), lambda lease_s: replace(said, lease_s=lease_s), lease_s=3.0, key=KEY)
            await beats.join()
            assert router.nodes.get("n") is not None
        port = int(url.rpartition(":")[2])
        impostor = await asyncio.to_thread(Impostor, port, lambda heard: _answer({"came": "known", "draining": True}))
        while "not trusted" not in caplog.text:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(impostor.close)
        assert KEY.text.encode() not in b"".join(impostor.heard)
        with routing(port) as (_, again):
            while again.nodes.get("n") is None:
                await asyncio.sleep(0.01)
            await beats.leave()

    said = beat("n", url="http://127.0.0.1:1")
    asyncio.run(asyncio.wait_for(main(), WAIT_S))


# --- tickets ----------------------------------------------------------------------------------------------------------


def test_a_ticket_is_good_for_one_answer(pair: Cluster) -> None:
    prompt = list(range(1, 41))
    ticket = pair.ticket(prompt)
    assert pair.take(ticket, prompt).status_code == 200
    again = pair.take(ticket, prompt)
    assert (again.status_code, again.json()["kind"]) == (502, "used")
    assert pair.take(pair.ticket(prompt), prompt).status_code == 200  # another ticket of the same prompt
    assert pair.ask({"prompt": prompt, "max_tokens": 4}).status_code == 200


@pytest.mark.fault("S21")
@pytest.mark.parametrize("end", [{"stop_token_ids": list(range(256))}, {"max_tokens": 1}])
def test_a_ticket_whose_first_token_is_the_last_is_good_for_one_answer_too(pair: Cluster, end: dict[str, Any]) -> None:
    prompt = list(range(1, 41))
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 4, **end}
    ticket = pair.prefill.post("/pd/prefill", {"endpoint": COMPLETIONS, "body": body}).json()["ticket"]
    asked = {"endpoint": COMPLETIONS, "body": body, "ticket": ticket}
    for stream in (False, True):
        found = pair.decode.post("/pd/decode", {**asked, "body": {**body, "stream": stream}})
        assert (found.status_code, stream) in ((200, False), (502, True)), found.text
    assert found.json()["kind"] == "used"


def test_a_forged_ticket_is_refused(pair: Cluster) -> None:
    """Whatever it says, and whoever sealed it."""
    prompt = list(range(1, 41))
    ticket = pair.ticket(prompt)
    for changed in (
        {"first": {**ticket["first"], "token": ticket["first"]["token"] ^ 1}},
        {"sampler": {**ticket["sampler"], "seed": 7}},
        {"expires_at_ms": ticket["expires_at_ms"] + 1},
        {"request": "another"},
        {"mac": ""},
        {"mac": "0" * 64},
        {"mac": decode(json.dumps(ticket)).sealed(OTHER).mac},
    ):
        found = pair.take({**ticket, **changed}, prompt)
        assert (found.status_code, found.json()["kind"]) == (502, "foreign"), found.text
        assert "sealed" in found.json()["error"]["message"]
    assert pair.take(ticket, prompt).status_code == 200  # nobody has used it up


def test_a_sealed_ticket_is_for_its_model_and_its_time(pair: Cluster) -> None:
    """Also one that somebody with the key has made."""
    prompt = list(range(1, 41))
    ticket = decode(json.dumps(pair.ticket(prompt)))
    now_ms = int(time.time() * 1000)
    for changes, kind, words in (
        ({"identity": bytes(32)}, "foreign", "cache identity"),
        ({"layout": bytes(32)}, "foreign", "KV layout"),
        ({"expires_at_ms": now_ms - 1000}, "expired", "mend the clocks"),
    ):
        found = pair.take(replace(ticket, **changes).sealed(KEY).document(), prompt)
        assert (found.status_code, found.json()["kind"]) == (502, kind), found.text
        assert words in found.json()["error"]["message"]
    # A prefill node whose clock is a minute behind, or ahead: its tickets are good.
    for shift_ms in (-60_000, 60_000):
        one = decode(json.dumps(pair.ticket(prompt)))
        skewed = replace(one, expires_at_ms=one.expires_at_ms + shift_ms).sealed(KEY)
        assert pair.take(skewed.document(), prompt).status_code == 200


def test_a_ticket_that_found_no_room_is_still_good(directory: Path, model: Model, pool: str) -> None:
    with cluster(directory, model, pool, max_running=1) as pair:
        prompt, other = [5] * 20, [6] * 20
        body = {**envelope(prompt, max_tokens=6000, stream=True), "ticket": pair.ticket(prompt)}
        ticket = pair.ticket(other)
        with (
            httpx2.Client(base_url=pair.decode.url, auth=pair.decode.auth, timeout=WAIT_S) as client,
            client.stream("POST", "/pd/decode", json=body) as stream,
        ):
            assert stream.status_code == 200
            assert pair.take(ticket, other).status_code == 503
        pair.decode.until_free()
        until(lambda: pair.take(ticket, other).status_code in (200, 502))
        assert pair.take(ticket, other).json()["kind"] == "used"


def test_what_is_remembered_of_tickets_has_an_end() -> None:
    used = UsedTickets(max_used=3000)
    nonces = [i.to_bytes(32, "big") for i in range(10_000)]
    for i, nonce in enumerate(nonces):
        assert used.take(nonce, expires_at_ms=i + 2000, now_ms=i) is TicketUse.FIRST
        assert used.take(nonce, expires_at_ms=i + 2000, now_ms=i) is TicketUse.AGAIN
        assert len(used._expiry_ms) <= 3000
    for nonce in nonces[-1000:]:
        assert used.take(nonce, expires_at_ms=10**6, now_ms=10_000) is TicketUse.AGAIN
    full = UsedTickets(max_used=2)
    assert [full.take(nonce, expires_at_ms=10, now_ms=1) for nonce in nonces[:3]] == [
        TicketUse.FIRST,
        TicketUse.FIRST,
        TicketUse.NO_ROOM,
    ]
    full.give_back(nonces[0])
    assert full.take(nonces[2], expires_at_ms=10, now_ms=1) is TicketUse.FIRST
    assert full.take(nonces[3], expires_at_ms=20, now_ms=10) is TicketUse.FIRST  # the others are over


# --- doors ------------------------------------------------------------------------------------------------------------


def test_a_router_comes_in_where_clients_show_a_key(directory: Path, model: Model) -> None:
    """At a mixed node: it signs what it sends, and needs no client's key."""
    with ExitStack() as stack:
        url, _ = stack.enter_context(routing())
        node = stack.enter_context(serving(directory, model, routers=(url,), lease_s=30.0, api_key="sesame"))
        body = {"prompt": PROMPT, "max_tokens": 2}
        with httpx2.Client(base_url=url, timeout=WAIT_S) as client:
            assert client.post(COMPLETIONS, json=body).status_code == 200
        assert node.post(COMPLETIONS, body).status_code == 401
        assert node.post(COMPLETIONS, body, headers={"authorization": "Bearer sesame"}).status_code == 200
        assert node.post("/pd/prefill", body, headers={"authorization": "Bearer sesame"}).status_code == 421  # signed
        sesame = {"authorization": "Bearer sesame"}
        assert httpx2.post(node.url + "/pd/prefill", json=body, headers=sesame, trust_env=False).status_code == 401


def test_a_node_that_can_be_reached_and_has_no_client_key_answers_its_routers_alone(
    directory: Path, model: Model
) -> None:
    with routing(node_key=(key := NodeKey.random())) as (url, _):
        options: dict[str, Any] = {"host": "0.0.0.0", "advertise": "http://127.0.0.1:1", "node_key": key}
        with serving(directory, model, routers=(url,), lease_s=30.0, **options) as node:
            for path in ("/v1/models", "/metrics"):
                assert node.get(path).status_code == 401
            assert node.get("/health").status_code == 200
            with httpx2.Client(base_url=url, timeout=WAIT_S) as client:
                assert client.post(COMPLETIONS, json={"prompt": PROMPT, "max_tokens": 2}).status_code == 200


def test_an_operator_drains_a_node_with_the_fleet_s_key(here: World, tmp_path: Path) -> None:
    here.add("m", "mixed")
    for name, key in (("right", KEY), ("wrong", OTHER)):
        write_node_key(tmp_path / name, key)

    def run(node: str, name: str, *more: str) -> Any:
        options = ["--router", here.url, "--node-key-file", str(tmp_path / name), *more]
        return CliRunner().invoke(app, ["drain", node, *options])

    assert "node key" in run("m", "wrong").stderr
    assert here.state()["nodes"][0]["draining"] is False
    assert json.loads(run("m", "right", "--json").stdout) == {
        "command": "drain",
        "node": "m",
        "draining": True,
        "requests": 0,
    }
    assert here.state()["nodes"][0]["draining"] is True
    assert "gets requests" in run("m", "right", "--back").stdout
    assert here.state()["nodes"][0]["draining"] is False
    nobody = run("x", "right")
    assert (nobody.exit_code, "no node is called 'x'" in nobody.stderr) == (1, True)


def test_a_configuration_without_a_key_is_for_loopback() -> None:
    from headwater.config.serve import ServeConfig

    given = NodeKey.random()
    wrong: list[dict[str, Any]] = [
        {"routers": ("http://10.0.0.1:1",), "advertise": "http://127.0.0.1:2"},
        {"routers": ("http://127.0.0.1:1",), "advertise": "http://10.0.0.1:2"},
        {"routers": ("http://127.0.0.1:1",), "host": "10.0.0.1"},
        {"role": "decode", "pool": "local:x", "host": "0.0.0.0"},
    ]
    for options in wrong:
        with pytest.raises(InvalidConfig, match="--node-key-file"):
            ServeConfig(model=Path("m"), **options)
        with pytest.raises(InvalidConfig, match="--node-key-file"):
            ServeConfig(model=Path("m"), node_key=NodeKey.random(own=True), **options)
        ServeConfig(model=Path("m"), node_key=given, **options)
    ServeConfig(model=Path("m"), host="0.0.0.0")  # a server of nobody's fleet
    with pytest.raises(InvalidConfig, match="NodeKey"):
        ServeConfig(model=Path("m"), node_key="a key as text")  # type: ignore[arg-type]
    assert given.text not in repr(ServeConfig(model=Path("m"), node_key=given))
    assert given.text not in repr(RouterConfig(node_key=given))
