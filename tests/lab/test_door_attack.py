"""The campaign against the door: a short one on a real server, and that it finds what it is there to find."""

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headwater.lab.campaigns import door_attack
from headwater.lab.campaigns.door_attack import PLAN, AttackOptions, Target, campaign, percentile
from headwater.lab.campaigns.door_attackers import KINDS

NIGHTLY = os.environ.get("HEADWATER_TEST_PROFILE") == "nightly"

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(900 if NIGHTLY else 300)]


@pytest.mark.long
@pytest.mark.parametrize("behind_router", [False, True])
def test_honest_clients_see_nothing_of_an_attack(tmp_path: Path, *, behind_router: bool) -> None:
    options = AttackOptions(
        seconds=300.0 if NIGHTLY else 16.0,
        quiet=60.0 if NIGHTLY else 4.0,
        plan=PLAN if NIGHTLY else {kind: max(1, number // 5) for kind, number in PLAN.items()},
    )
    start = door_attack.router if behind_router else door_attack.node
    with start(tmp_path) as target:
        found = campaign(target, options)
    assert found["checks"]["no_errors"], found
    if NIGHTLY:  # it is known after two minutes
        assert found["checks"]["all_were_cut"], found
    assert found["checks"]["memory"], found
    assert found["attack"]["requests"] > options.clients
    assert found["attack"]["longest_s"] < 30  # nobody hangs; how much longer they wait is for a machine of its own
    assert set(found["attackers"]) == set(KINDS)
    assert all(heard["came"] for heard in found["attackers"].values())
    assert found["attackers"]["slow_head"]["408"]
    assert found["attackers"]["slow_body"]["408"]
    assert found["attackers"]["giant"].get("400"), found["attackers"]
    assert found["attackers"]["crumbs"].get("400"), found["attackers"]
    for log in tmp_path.glob("*.log"):
        assert "Traceback" not in log.read_text(), log


@contextmanager
def bad_server(answer: bytes) -> Iterator[str]:
    """A server that says the same to everybody."""
    loop, ready = asyncio.new_event_loop(), threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        writer.write(answer)
        writer.close()

    async def serve() -> None:
        await asyncio.start_server(say, sock=listener)
        ready.set()

    def run() -> None:
        asyncio.set_event_loop(loop)
        loop.create_task(serve())
        loop.run_forever()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ready.wait(30)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        listener.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 500 Oh\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\ndata: {}\n",  # neither a whole stream nor a document
    ],
)
def test_a_server_that_does_not_answer_is_found_out(answer: bytes) -> None:
    with bad_server(answer) as url:
        found = campaign(
            Target(url, [os.getpid()]), AttackOptions(seconds=0.5, quiet=0.2, clients=2, plan={"silent": 1})
        )
    assert not found["ok"]
    assert not found["checks"]["no_errors"]
    assert found["quiet"]["errors"]
    assert found["attack"]["errors"]
    assert found["attack"]["requests"] == 0


def test_percentiles() -> None:
    assert percentile([], 99) == 0.0
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([float(i) for i in range(100)], 99) == 99.0
