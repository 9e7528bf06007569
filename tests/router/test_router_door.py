"""The router's door: large bodies go through it as small ones do, and slow ones are in nobody's way."""

import json
import socket
import threading
from contextlib import ExitStack
from typing import Any

import pytest

from headwater.router import app as router_app
from headwater.router.start import reader
from headwater.serve.errors import ApiError
from headwater.serve.reading import LargeBody, Routable, large_routable, routable
from router_kit import WAIT_S, World, world

COMPLETIONS = "/v1/completions"
AS_JSON = {"content-type": "application/json"}


def connect(here: World) -> socket.socket:
    host, _, port = here.url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=WAIT_S)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("roles", [("mixed",), ("prefill", "decode")])
def test_a_large_body_reaches_the_nodes_as_it_is(roles: tuple[str, ...], *, stream: bool) -> None:
    with world() as here:
        nodes = [here.add(role, role) for role in roles]
        body = {
            "prompt": "\u00e9\n" * 100_000,
            "stream": stream,
            "max_tokens": 3,
            "new": [1.5, None, {"a": "\U0001f600"}],
        }
        found = here.client.post(COMPLETIONS, json=body)
        assert found.status_code == 200, found.text
        assert here.tokens(found).error is None
        for node in nodes:
            assert [asked.asked for asked in node.asked] == [body]


def test_a_large_body_that_is_no_json_reaches_nobody() -> None:
    padding = b" " * 100_000
    with world() as here:
        nodes = [here.add("p", "prefill"), here.add("d", "decode")]
        for content in (
            b"{" * 100_000,
            b'{"prompt": "a"}, "ticket": {"identity": "mine"}' + padding,
            b'{"prompt": 1e999}' + padding,
            b"[]" + padding,
            b'{"prompt": "' + b"\xff" * 100_000 + b'"}',
        ):
            found = here.client.post(COMPLETIONS, content=content, headers=AS_JSON)
            assert (found.status_code, found.json()["error"]["code"]) == (400, "invalid_json"), content[:50]
        assert not any(node.asked for node in nodes)


@pytest.mark.fault("B6")
def test_half_bodies_do_not_keep_others_out() -> None:
    with world(max_body_bytes=1_000_000) as here, ExitStack() as all_:
        here.add("m", "mixed")
        for _ in range(40):
            connection = all_.enter_context(connect(here))
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: 1000000\r\n\r\n".encode() + b" " * 900_000)
        assert here.complete().status_code == 200
        assert here.complete("large " * 50_000).status_code == 200
        assert here.server._face.bodies.num_bytes <= 16_000_000


@pytest.mark.fault("S12")
def test_a_routers_loop_reads_no_body(monkeypatch: pytest.MonkeyPatch) -> None:
    readers: list[str] = []

    def watched(body: bytes) -> Routable:
        readers.append(threading.current_thread().name)
        return routable(body)

    monkeypatch.setattr(router_app, "routable", watched)
    with world() as here:
        here.add("m", "mixed")
        assert here.complete("small").status_code == 200
    assert len(readers) == 1
    assert readers[0].startswith("headwater reading")


@pytest.mark.fault("S16")
def test_a_router_that_ends_tells_those_who_are_still_sending() -> None:
    with world() as here, connect(here) as connection:
        here.add("m", "mixed")
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: 1000\r\n\r\n{{".encode())
        assert here.complete().status_code == 200  # whoever came before has been heard
        here.server.should_exit = True
        heard = b""
        while data := connection.recv(1 << 16):
            heard += data
        head, _, body = heard.decode().partition("\r\n\r\n")
        assert head.startswith("HTTP/1.1 503 "), heard
        assert json.loads(body)["error"]["code"] == "shutting_down"
        here.thread.join(WAIT_S)


@pytest.mark.fault("B13")
def test_a_router_on_loopback_answers_to_its_own_names_only() -> None:
    with world() as here:
        for path in ("/health", "/state", "/v1/models"):  # what is under /pd/ proves itself
            found = here.client.get(path, headers={"host": "evil.example"})
            assert (found.status_code, found.json()["error"]["code"]) == (421, "wrong_host")
        assert here.client.get("/state", headers={"host": "localhost:1"}).status_code == 200
    with world(api_key="sesame") as here:
        here.client.headers.update({"authorization": "Bearer sesame"})
        assert here.client.get("/state", headers={"host": "any.example"}).status_code == 200


def test_what_a_router_keeps_of_a_large_body() -> None:
    tokens = list(range(1000))
    body: dict[str, Any] = {"prompt": tokens, "cache_salt": "s", "stream": True, "max_tokens": 7, "x": "y" * 100_000}
    found = large_routable(json.dumps(body).encode())
    assert json.loads(found.content) == body
    assert isinstance(found.body, LargeBody)
    assert {name: value for name, value in found.body.items() if value is not None} == {"stream": True, "max_tokens": 7}
    asking = reader(None)(COMPLETIONS, found.body)
    assert asking is not None
    assert (list(asking.tokens), asking.salt) == (tokens, b"s")
    for prompt in (b'"text"', b'[1, "a"]', b"null", b"{}"):
        read = large_routable(b'{"prompt": ' + prompt + b"}")
        assert reader(None)(COMPLETIONS, read.body) is None
    assert routable(b'{"a": 1}').content == b'{"a":1}'
    with pytest.raises(ApiError):
        large_routable(b'{"a": 1e999}')
