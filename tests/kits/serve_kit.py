"""A real server in this process: a tiny model, an engine, uvicorn on a free port; and clients that misbehave."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from fleet_kit import KEY, Signed, signature
from headwater.build import Running, open_engine
from headwater.config.serve import ServeConfig
from headwater.disagg.node_auth import node_called
from headwater.engine.loader import load_model
from headwater.engine.make_model import make_model
from headwater.engine.models.base import Model
from headwater.index.slots import SlotState
from headwater.serve.limits import limits_of
from headwater.serve.server import Server
from headwater.serve.service import Service
from headwater.serve.sockets import address, listen
from headwater.serve.start import heartbeats

WAIT_S = 60.0  # until a test gives up; nothing is measured


@dataclass(frozen=True)
class Served:
    """A server that answers."""

    url: str
    running: Running
    server: Server
    thread: threading.Thread
    who: str  # to routers

    @property
    def auth(self) -> Signed:
        """As a router signs."""
        return Signed(self.who)

    @contextmanager
    def openai(self, key: str = "none") -> Iterator[openai.OpenAI]:
        """The official client; it does not try again."""
        with openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=WAIT_S) as client:
            yield client

    def post(self, path: str, body: object = None, **options: Any) -> httpx2.Response:
        """One request of its own connection, without any client's help; `body` goes as JSON."""
        with httpx2.Client(base_url=self.url, auth=self.auth, timeout=WAIT_S) as client:
            return client.post(path, **options if body is None else {"json": body, **options})

    def get(self, path: str, **options: Any) -> httpx2.Response:
        """The same."""
        with httpx2.Client(base_url=self.url, auth=self.auth, timeout=WAIT_S) as client:
            return client.get(path, **options)

    def complete(self, prompt: str | list[int], **body: Any) -> dict[str, Any]:
        """A completion, greedy and of full length unless told."""
        found = self.post("/v1/completions", {"prompt": prompt, "temperature": 0, "ignore_eos": True, **body})
        assert found.status_code == 200, found.text
        answer: dict[str, Any] = found.json()
        return answer

    def connect(self) -> socket.socket:
        """A bare socket."""
        host, _, port = self.url.removeprefix("http://").partition(":")
        return socket.create_connection((host, int(port)), timeout=WAIT_S)

    @contextmanager
    def raw(
        self, body: dict[str, Any], path: str = "/v1/completions", *, headers: dict[str, str] | None = None
    ) -> Iterator[socket.socket]:
        """A request on a bare socket; the answer is the caller's to read, or not to."""
        data = json.dumps(body).encode()
        signed = signature(self.url, path, data, who=self.who) if path.startswith("/pd/") else {}
        more = "".join(f"{name}: {value}\r\n" for name, value in {**signed, **(headers or {})}.items())
        head = (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{more}"
            f"Content-Length: {len(data)}\r\n\r\n"
        )
        with self.connect() as connection:
            connection.sendall(head.encode() + data)
            yield connection

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds."""
        end = time.monotonic() + WAIT_S
        while not holds():
            assert time.monotonic() < end, "it did not come to that"
            time.sleep(0.002)

    def until_free(self) -> None:
        """Wait until the engine has no requests; then nothing may be held for any."""
        self.until(lambda: self.running.engine.num_requests == 0)
        assert self.running.engine.alive
        with self.running.cache.still() as brain:
            brain.validate()
            assert not brain.requests
            assert brain.slots.counts()[SlotState.OWN] == 0

    def stop(self) -> None:
        """End it as a signal would."""
        self.server.should_exit = True
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()


@contextmanager
def serving(
    directory: Path, model: Model, *, survives: bool = True, door: dict[str, Any] | None = None, **options: Any
) -> Iterator[Served]:
    """A server that is gone, with all it had, at the end; unless the engine is to die, nothing may be held then.

    `door`: its limits that are not the usual ones. Stores get the time they take, however busy the machine is.
    """
    patient = {"probe_timeout_s": WAIT_S, "load_timeout_s": WAIT_S}
    config = ServeConfig(**{"model": directory, "num_blocks": 512, "node_key": KEY, **patient, **options})
    with open_engine(config, model=model) as running, listen("127.0.0.1", 0) as listener:
        answers = threading.Event()
        service = Service(running, config, replace(limits_of(config), **door or {}), url=address(listener))
        server = Server(service, beats=heartbeats(service), announce=answers.set)
        thread = threading.Thread(target=server.run, args=([listener],), name="test server")
        served = Served(address(listener), running, server, thread, node_called(service.node, service.url))
        thread.start()
        try:
            assert answers.wait(WAIT_S)
            yield served
            if survives:
                served.until_free()
        finally:
            served.stop()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model on disk, and"""
    path = tmp_path_factory.mktemp("models") / "tiny"
    make_model("llama", path)
    return path


@pytest.fixture(scope="module")
def model(directory: Path) -> Model:
    """in memory."""
    return load_model(directory)


@pytest.fixture
def served(directory: Path, model: Model) -> Iterator[Served]:
    """A server on it, with no tier but the device."""
    with serving(directory, model) as one:
        yield one
