"""A router's state document: nodes that come, work, drain, fall ill and go; and its stream and page."""

import asyncio
import json
from typing import Any

import httpx2

from router_kit import World, world

KEY = "s3cret"
AUTH = {"authorization": f"Bearer {KEY}"}


def board(here: World, **headers: str) -> dict[str, Any]:
    found = httpx2.get(f"{here.url}/admin/state", headers=headers, trust_env=False, timeout=30)
    assert found.status_code == 200, found.text
    said: dict[str, Any] = found.json()
    return said


def nodes(here: World) -> dict[str, dict[str, Any]]:
    return {node["name"]: node for node in board(here)["fleet"]["nodes"]}


def test_nodes_come_work_and_go() -> None:
    with world() as here:
        said = board(here)
        assert (said["kind"], said["ready"], said["tiers"], said["engine"]) == ("router", False, [], None)
        assert (said["fleet"]["nodes"], said["fleet"]["num_nodes"], said["hit_ratio"]) == ([], 0, None)
        load = {"running": 2, "waiting": 1, "free_slots": 7}
        here.add("p1", "prefill", load=load, rates={"prefill_tokens_per_s": 1234.5})
        d1 = here.add("d1", "decode", lease_s=30)
        assert here.complete().status_code == 200
        said, found = board(here), nodes(here)
        assert said["ready"]
        assert (said["model"], said["requests"]["answered"]) == ("tiny", {"answered": 1})
        assert list(found) == ["d1", "p1"]
        p1 = found["p1"]
        assert (p1["role"], p1["state"], p1["running"], p1["waiting"]) == ("prefill", "usable", 2, 1)
        assert (p1["free_slots"], p1["prefill_tokens_per_s"], p1["lease_s"]) == (7, 1234.5, 60)
        assert 0 < found["d1"]["lease_left_s"] <= 30
        told = {node["node"]: node for node in here.state()["nodes"]}
        assert {name: node["url"] for name, node in found.items()} == {n: one["url"] for n, one in told.items()}
        assert [event["kind"] for event in said["events"]] == ["node_joined", "node_joined"]
        assert said["events"][0]["facts"]["node"] == "d1", "the newest first"
        assert here.client.post("/pd/drain", json={"node": "p1"}).status_code == 200
        assert nodes(here)["p1"]["state"] == "draining"
        assert not board(here)["ready"], "nobody prefills"
        assert here.join(d1, lease_s=0).status_code == 200
        assert list(nodes(here)) == ["p1"]
        assert board(here)["events"][0]["kind"] == "node_left"


def test_a_node_that_is_silent_is_gone_when_its_lease_is_over() -> None:
    with world() as here:
        here.add("m1", "mixed", lease_s=0.3)
        here.until(lambda: not nodes(here))
        assert [event["kind"] for event in board(here)["events"]][-2:] == ["node_expired", "node_joined"]


def test_a_node_that_died_rests() -> None:
    with world() as here:
        m1 = here.add("m1", "mixed", lease_s=600)
        assert here.complete().status_code == 200
        here.inside(m1.kill())
        assert here.complete().status_code >= 500
        here.until(lambda: nodes(here)["m1"]["state"] in ("resting", "unproven"))
        assert board(here)["requests"]["answered"]["answered"] == 1
        assert sum(board(here)["requests"]["answered"].values()) == 2


def test_requests_under_way_say_where_they_are() -> None:
    with world(request_timeout_s=60.0, silence_s=30.0) as here:
        m1 = here.add("m1", "mixed")

        async def hold() -> asyncio.Event:
            m1.gate = asyncio.Event()
            return m1.gate

        gate = here.inside(hold())
        asking = httpx2.AsyncClient(base_url=here.url, trust_env=False, timeout=60)

        async def ask() -> asyncio.Task[httpx2.Response]:
            body = {"prompt": "once", "max_tokens": 4}
            return asyncio.create_task(
                asking.post("/v1/completions", json=body, headers={"x-request-id": "my-request"})
            )

        task = here.inside(ask())
        here.until(lambda: board(here)["requests"]["phases"] == {"mixed": 1})
        said = board(here)
        (one,) = said["requests"]["oldest"]
        assert (one["id"], one["phase"], one["node"]) == ("my-request", "mixed", "m1")
        assert one["age_s"] >= 0
        assert said["fleet"]["queues"]["requests"] == said["requests"]["in_flight"] == 1
        assert nodes(here)["m1"]["requests_of_this_router"] == 1

        async def end() -> int:
            gate.set()
            status: int = (await task).status_code
            await asking.aclose()
            return status

        assert here.inside(end()) == 200


def test_it_is_behind_the_key_and_its_stream_ends_with_the_router() -> None:
    with world(api_key=KEY) as here:
        assert httpx2.get(f"{here.url}/admin/state", trust_env=False).status_code == 401
        assert httpx2.get(f"{here.url}/admin/stream", trust_env=False).status_code == 401
        found = httpx2.get(f"{here.url}/", trust_env=False)
        assert (found.status_code, 'data-key="wanted"' in found.text) == (200, True)
        assert board(here, **AUTH)["kind"] == "router"
        assert httpx2.post(f"{here.url}/admin/revive", json={}, headers=AUTH, trust_env=False).status_code == 404
        with httpx2.stream("GET", f"{here.url}/admin/stream", headers=AUTH, trust_env=False, timeout=30) as answer:
            lines = answer.iter_lines()
            assert json.loads(next(lines).removeprefix("data: "))["kind"] == "router"
            here.add("m1", "mixed")
            assert any('"m1"' in line for line in lines)
            here.server.should_exit = True
            assert sum(1 for _ in lines) >= 0  # it ends, whole
        here.thread.join(30)
        assert not here.thread.is_alive()
