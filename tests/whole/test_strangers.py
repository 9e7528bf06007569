"""Whoever may ask is no node, and no router: strangers at the doors of the commands as users start them.

Everything here is seen from outside: processes, and what is said to them over HTTP.
"""

import http.server
import json
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest

from headwater.fleet import COMMAND
from pd_kit import new_pool
from serve_kit import WAIT_S, directory

__all__ = ["directory"]

SECRET = "what-only-the-fleet-knows-0123456789"
CLIENT = "what-every-client-knows"
PROMPT = "a prompt that is nobody else's business"
COMPLETION = {
    "id": "x",
    "choices": [{"text": "a false answer", "finish_reason": "stop", "index": 0}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1},
}


@dataclass
class Stranger:
    """An HTTP server that holds no key, writes down all that it is sent, and says yes to everything."""

    url: str
    heard: list[str] = field(default_factory=list)


@contextmanager
def stranger(answer: Callable[[str], Mapping[str, Any]]) -> Iterator[Stranger]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0))).decode()
            found.heard.append(f"{self.command} {self.path}\n{self.headers}\n{body}")
            data = json.dumps(answer(self.path)).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, *said: object) -> None:
            return

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found = Stranger(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, name="test stranger")
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        thread.join(WAIT_S)
        server.server_close()


def until(holds: Callable[[], object]) -> None:
    end = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.01)


def environment(home: Path, **more: str) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith(("HEADWATER_", "FD_", "XDG_"))}
    return {**own, "HOME": str(home), **more}


@contextmanager
def running(home: Path, *arguments: str, **more: str) -> Iterator[str]:
    """A command that answers; where."""
    with (home / "log").open("w") as log:
        process = subprocess.Popen(
            [*COMMAND, *arguments], env=environment(home, **more), stdout=subprocess.PIPE, stderr=log, text=True
        )
    try:
        assert process.stdout is not None
        found = re.search(r"on (http://[^/\s]+)", process.stdout.readline())
        assert found is not None, (home / "log").read_text()
        yield found[1]
    finally:
        process.kill()
        process.communicate()


@pytest.mark.fault("B3")
@pytest.mark.parametrize("shown", [None, CLIENT])
def test_who_may_ask_may_not_be_a_node(shown: str | None, tmp_path: Path) -> None:
    """Neither without a key nor with a client's: no prompt gets there, and no key."""
    headers = {} if shown is None else {"authorization": f"Bearer {shown}"}
    keys = {} if shown is None else {"HEADWATER_API_KEY": shown}
    with (
        stranger(lambda path: COMPLETION) as false,
        running(tmp_path, "router", "--port", "0", "--queue-timeout", "0.5", **keys) as router,
        httpx2.Client(base_url=router, headers=headers, timeout=WAIT_S, trust_env=False) as client,
    ):
        beat = {"node": "n", "url": false.url, "role": "mixed", "model": "m", "identity": "ab", "layout": "cd"}
        found = client.post("/pd/nodes", json={**beat, "block_tokens": 16, "lease_s": 60, "load": {"free_slots": 9}})
        assert found.status_code == 401, found.text
        assert client.post("/pd/drain", json={"node": "n"}).status_code == 401
        answer = client.post("/v1/completions", json={"prompt": PROMPT})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_node")
        assert false.heard == []


@pytest.mark.fault("B3")
def test_who_may_ask_may_not_be_a_router(tmp_path: Path, shm: Path, directory: Path) -> None:
    """A node works for those who hold the fleet's key, whatever a client shows it."""
    options = ["--role", "prefill", "--model", str(directory), "--port", "0", "--pool", new_pool(shm)]
    tiers = ["--host-mib", "0", "--disk-mib", "0", "--num-blocks", "64"]
    with (
        running(tmp_path, "serve", *options, *tiers, HEADWATER_API_KEY=CLIENT) as node,
        httpx2.Client(base_url=node, timeout=WAIT_S, trust_env=False) as client,
    ):
        body = {"endpoint": "/v1/completions", "body": {"prompt": PROMPT}}
        for shown in ({}, {"authorization": f"Bearer {CLIENT}"}, {"authorization": f"Bearer {SECRET}"}):
            assert client.post("/pd/prefill", json=body, headers=shown).status_code == 401
            assert client.post("/pd/decode", json=body, headers=shown).status_code == 401
            assert client.get("/pd/attempts/x", headers=shown).status_code == 401


@pytest.mark.fault("B3")
def test_a_false_router_learns_no_key(tmp_path: Path, directory: Path) -> None:
    """And a node does not work for it: it says so, and ends."""
    with stranger(lambda path: {"node": "n", "came": "new", "draining": False}) as false:
        options = ["--model", str(directory), "--port", "0", "--router", false.url, "--node", "n", "--num-blocks", "64"]
        tiers = ["--host-mib", "0", "--disk-mib", "0"]
        keys = {"HEADWATER_NODE_KEY": SECRET, "HEADWATER_API_KEY": CLIENT}
        log = tmp_path / "log"
        with log.open("w") as output:
            node = subprocess.Popen(
                [*COMMAND, "serve", *options, *tiers], env=environment(tmp_path, **keys), stdout=output, stderr=output
            )
        try:
            until(lambda: false.heard or node.poll() is not None)
            heard = "".join(false.heard)
            assert heard
            assert SECRET not in heard
            assert CLIENT not in heard
            assert node.wait(WAIT_S) == 1
        finally:
            node.kill()
            node.wait()
    said = log.read_text()
    assert "not trusted" in said
    assert "Traceback" not in said
    assert SECRET not in said


@pytest.mark.fault("B3")
@pytest.mark.parametrize(
    "arguments",
    [
        ["router", "--host", "0.0.0.0"],
        ["serve", "--role", "mixed", "--host", "0.0.0.0", "--router", "http://127.0.0.1:1"],
        ["serve", "--router", "http://10.0.0.1:1", "--advertise", "http://127.0.0.1:5"],
        ["vllm-node", "--vllm", "http://127.0.0.1:1", "--role", "mixed", "--pool", "local:x", "--host", "0.0.0.0"],
        ["vllm-node", "--vllm", "http://127.0.0.1:1", "--role", "mixed", "--pool", "local:x", "--router", "http://h:1"],
    ],
)
def test_without_a_key_a_fleet_stays_on_loopback(arguments: list[str], tmp_path: Path, directory: Path) -> None:
    model = ["--model", str(directory)] if arguments[0] == "serve" else []
    ended = subprocess.run(
        [*COMMAND, *arguments, "--port", "0", *model],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert ended.returncode == 1, ended.stderr
    assert "on loopback only" in ended.stderr
    assert "Traceback" not in ended.stderr
