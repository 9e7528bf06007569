"""The node before a vLLM server, where things go wrong that a real vLLM does not do when asked (see tests_vllm too).

vLLM's place is taken by a server that says what it is told to; the pool is a real one.
"""

import asyncio
import json
import secrets
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from fleet_kit import KEY, Signed
from headwater.build import open_local
from headwater.config.stores import LocalStoreConfig
from headwater.core.errors import InvalidConfig, InvalidInput
from headwater.core.identity import CacheIdentity
from headwater.core.keys import BlockKey
from headwater.core.page import PageName
from headwater.core.role import Role
from headwater.disagg.headers import ATTEMPT, TIMEOUT
from headwater.disagg.node_auth import AUTH, Authenticator, node_called
from headwater.disagg.prompt_pages import TELL, is_asked, read_pages, say_pages
from headwater.disagg.vllm_ticket import VllmTicket, body_digest
from headwater.integrations.vllm import node_reading as vllm_reading
from headwater.integrations.vllm.client import Facts, Vllm, VllmGone
from headwater.integrations.vllm.node import NodeOptions, VllmNode
from headwater.integrations.vllm.node_start import VllmServer, run
from headwater.metrics import Metrics
from headwater.serve.body import parse
from headwater.serve.connections import Connections
from headwater.serve.fleet_guard import FleetGuard
from headwater.serve.limits import Limits
from headwater.serve.sockets import address, listen, setup
from headwater.storage.base import Deadline
from headwater.storage.memory import MemoryStore
from headwater.testing.pages import SamplePage, items, sample_chain
from headwater.testing.stores import soon
from worker_kit import wait_until

WHO = node_called("node", "http://node")
IDENTITY = CacheIdentity(model="m", weights=bytes(32), config=bytes(32), layout=bytes(32), block_tokens=16)
ANSWER = {"choices": [{"text": "ab", "token_ids": [1, 2]}], "usage": {"prompt_tokens": 70}}


class Stand:
    """What stands in vLLM's place."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[dict[str, Any]] = []
        self.left = threading.Event()  # somebody closed the connection in the middle
        self.answer: Callable[[dict[str, Any]], Awaitable[Response]] = self.fine
        self.pages: list[SamplePage] = []

    async def complete(self, http: Request) -> Response:
        """What a completion gets."""
        self.asked.append(await http.json())
        return await self.answer(self.asked[-1])

    def told(self) -> dict[str, Any]:
        """What the connector says."""
        return say_pages(IDENTITY, [(0, 1)], [BlockKey(page.meta.key) for page in self.pages])

    async def fine(self, body: dict[str, Any]) -> Response:
        """An answer as vLLM's."""
        return JSONResponse(
            {**ANSWER, "kv_transfer_params": self.told() if is_asked(body.get("kv_transfer_params")) else None}
        )


@pytest.fixture
def stand() -> Iterator[Stand]:
    """Answering."""
    stand = Stand()

    async def models(http: Request) -> Response:
        return JSONResponse({"data": [{"id": "tiny", "max_model_len": 512}]})

    async def health(http: Request) -> Response:
        return Response()

    app = Starlette(
        routes=[
            Route("/v1/completions", stand.complete, methods=["POST"]),
            Route("/v1/models", models),
            Route("/health", health),
        ]
    )
    server = uvicorn.Server(setup(app, Connections(Limits(), Metrics())))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        stand.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        yield stand
        server.should_exit = True
        thread.join(30)


FACTS = Facts(
    model="tiny",
    max_model_len=512,
    identity=IDENTITY.digest.hex(),
    layout=IDENTITY.layout.hex(),
    block_tokens=IDENTITY.block_tokens,
)


async def at(
    stand: Stand, role: Role, use: Callable[[httpx2.AsyncClient, VllmNode], Awaitable[None]], **more: Any
) -> None:
    """Ask a node."""
    vllm, pool = Vllm(stand.url), more.pop("pool")
    options = NodeOptions(vllm=stand.url, role=role, node_key=KEY, **{"pool_timeout_s": 0.3, **more})
    fleet = FleetGuard(Authenticator(KEY, WHO))
    try:
        node = VllmNode(options, await vllm.facts(20.0), vllm, pool, fleet=fleet, metrics=Metrics())
        transport = httpx2.ASGITransport(node.app())
        async with httpx2.AsyncClient(
            transport=transport, base_url="http://node", auth=Signed(WHO), timeout=30.0
        ) as client:
            await use(client, node)
        assert node.num_requests == 0
        await node.stop()
        node.close()
    finally:
        await vllm.aclose()


def ticket(**more: Any) -> dict[str, Any]:
    """As a prefill node gives it, of what `envelope` asks."""
    made = VllmTicket(
        model=FACTS.model,
        identity=FACTS.identity,
        body=body_digest(envelope()["body"]),
        num_prompt_tokens=70,
        nonce=secrets.token_hex(32),
        expires_at_ms=int((time.time() + 60) * 1000),
    )
    return replace(made, **more).sealed(KEY).document()


def envelope(**more: Any) -> dict[str, Any]:
    """As a router asks."""
    body = {
        "prompt": [1] * 70,
        "max_tokens": 8,
        "stream": True,
        "stream_options": {"include_usage": True},
        "min_tokens": 4,
    }
    return {"endpoint": "/v1/completions", "body": body, **more}


def test_facts_come_from_the_connector_and_from_nothing_else(stand: Stand) -> None:
    async def ask() -> Facts:
        vllm = Vllm(stand.url)
        try:
            return await vllm.facts(20.0)
        finally:
            await vllm.aclose()

    assert asyncio.run(ask()) == FACTS

    async def without(body: dict[str, Any]) -> Response:
        return JSONResponse(ANSWER)

    stand.answer = without
    with pytest.raises(VllmGone, match="without Headwater's connector"):
        asyncio.run(ask())


@pytest.mark.parametrize("num_there", [0, 2, 3])
def test_a_ticket_leaves_when_the_pool_has_every_page(stand: Stand, num_there: int) -> None:
    stand.pages = sample_chain(1, 3)
    with MemoryStore(1 << 20) as pool:
        pool.put(items(stand.pages[:num_there]), deadline=soon())

        async def use(client: httpx2.AsyncClient, node: VllmNode) -> None:
            found = await client.post("/pd/prefill", json=envelope())
            asked = stand.asked[-1]
            assert (asked["max_tokens"], asked["stream"], asked["kv_transfer_params"]) == (1, False, TELL)
            assert not {"stream_options", "min_tokens"} & asked.keys()
            if num_there == 3:
                assert found.status_code == 200
                assert found.json()["ticket"]["identity"] == FACTS.identity
            else:
                assert found.status_code == 502
                assert found.json()["kind"] == "late"
                assert f"{num_there} of 3 pages" in found.json()["error"]["message"]

        asyncio.run(at(stand, Role.PREFILL, use, pool=pool))


def test_pages_that_come_later_are_waited_for(stand: Stand) -> None:
    stand.pages = sample_chain(1, 3)
    with MemoryStore(1 << 20) as pool:

        async def use(client: httpx2.AsyncClient, node: VllmNode) -> None:
            asking = asyncio.create_task(client.post("/pd/prefill", json=envelope()))
            while not stand.asked[1:]:
                await asyncio.sleep(0.01)
            pool.put(items(stand.pages), deadline=soon())
            assert (await asking).status_code == 200

        asyncio.run(at(stand, Role.PREFILL, use, pool=pool, pool_timeout_s=30.0))


@pytest.mark.parametrize("said", [None, {}, {"headwater": {}}, {"headwater": {"pages": "!"}}, {"headwater": 7}])
def test_an_answer_that_says_nothing_of_pages_is_no_ticket(stand: Stand, said: Any) -> None:
    with pytest.raises(InvalidInput):
        read_pages(said)

    async def use(client: httpx2.AsyncClient, node: VllmNode) -> None:
        async def bare(body: dict[str, Any]) -> Response:
            return JSONResponse({**ANSWER, "kv_transfer_params": said})

        stand.answer = bare
        found = await client.post("/pd/prefill", json=envelope())
        assert (found.status_code, found.json()["kind"]) == (502, "failed")

    with MemoryStore(1 << 20) as pool:
        asyncio.run(at(stand, Role.PREFILL, use, pool=pool))


def test_pages_survive_being_said(stand: Stand) -> None:
    keys = [BlockKey(page.meta.key) for page in sample_chain(1, 3)]
    told = read_pages(json.loads(json.dumps(say_pages(IDENTITY, [(0, 2), (1, 2)], keys))))
    assert len(set(told.pages)) == 6
    assert (told.identity, told.layout, told.block_tokens) == (FACTS.identity, FACTS.layout, FACTS.block_tokens)


def test_a_ticket_of_another_model_is_refused(stand: Stand) -> None:
    async def use(client: httpx2.AsyncClient, node: VllmNode) -> None:
        for given in (ticket(identity="00"), {"identity": FACTS.identity}, {"identity": "00"}, None, 7):
            found = await client.post("/pd/decode", json=envelope(ticket=given))
            assert (found.status_code, found.json()["kind"]) == (502, "foreign")
        assert len(stand.asked) == 1, "vLLM was asked who it is, and nothing else"

    with MemoryStore(1 << 20) as pool:
        asyncio.run(at(stand, Role.DECODE, use, pool=pool))


def test_the_client_s_faults_are_told_and_vllm_s_are_ours(stand: Stand) -> None:
    async def use(client: httpx2.AsyncClient, node: VllmNode) -> None:
        for status, expected in ((400, 400), (404, 404), (429, 429), (500, 502), (503, 503)):

            async def fail(body: dict[str, Any], status: int = status) -> Response:
                return JSONResponse({"error": {"message": "no", "code": status}}, status)

            stand.answer = fail
            found = await client.post("/pd/decode", json=envelope(ticket=ticket()))
            assert found.status_code == expected
            assert "message" in found.json()["error"]

    with MemoryStore(1 << 20) as pool:
        asyncio.run(at(stand, Role.DECODE, use, pool=pool))


def test_what_takes_too_long_is_told_so(stand: Stand) -> None:
    async def slow(body: dict[str, Any]) -> Response:
        await asyncio.sleep(3)
        return JSONResponse(ANSWER)

    async def use(client: httpx2.AsyncClient, node: VllmNode) -> None:
        stand.answer = slow
        headers = {TIMEOUT: "0.3"}
        found = await client.post("/pd/decode", json=envelope(ticket=ticket()), headers=headers)
        assert found.status_code == 504

    with MemoryStore(1 << 20) as pool:
        asyncio.run(at(stand, Role.DECODE, use, pool=pool))


def test_who_leaves_ends_what_vllm_does_for_it(stand: Stand) -> None:
    """The connection to vLLM is closed, which is how vLLM hears of it; the attempt is over."""

    async def endless(body: dict[str, Any]) -> Response:
        async def events() -> Any:
            try:
                while True:
                    yield b"data: {}\n\n"
                    await asyncio.sleep(0.01)
            finally:
                stand.left.set()

        return StreamingResponse(events(), media_type="text/event-stream")

    async def use(client: httpx2.AsyncClient, node: VllmNode) -> None:
        stand.answer = endless
        app, begun, gone = node.app(), asyncio.Event(), asyncio.Event()
        content = json.dumps(envelope(ticket=ticket())).encode()
        request = client.build_request("POST", "/pd/decode", content=content)
        flow = Signed(WHO).auth_flow(request)
        flow.send(await client.send(next(flow), auth=httpx2.Auth()))  # says hello, and signs
        messages = [{"type": "http.request", "body": content, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message.get("body"):
                begun.set()

        signed = (AUTH.encode(), request.headers[AUTH].encode())
        headers = [(b"content-type", b"application/json"), (ATTEMPT.encode(), b"one"), signed]
        scope = {"type": "http", "method": "POST", "path": "/pd/decode", "headers": headers, "query_string": b""}
        work = asyncio.create_task(app(scope, receive, send))
        await asyncio.wait_for(begun.wait(), 20)
        assert (await client.get("/pd/attempts/one")).status_code == 200
        gone.set()
        await asyncio.wait_for(work, 20)
        assert (await client.get("/pd/attempts/one")).status_code == 404

    with MemoryStore(1 << 20) as pool:
        asyncio.run(at(stand, Role.DECODE, use, pool=pool))
    assert stand.left.wait(20)


def test_a_vllm_that_is_away_gets_nothing_until_it_is_back_as_itself(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwater.integrations.vllm.node.HEALTH_S", 0.02)

    async def until(node: VllmNode, *, lost: bool) -> None:
        end = time.monotonic() + 20
        while node.lost != lost:
            assert time.monotonic() < end
            await asyncio.sleep(0.01)

    async def use(client: httpx2.AsyncClient, node: VllmNode) -> None:
        well, real = True, node._vllm.is_well

        async def is_well() -> bool:
            return well and await real()

        monkeypatch.setattr(node._vllm, "is_well", is_well)
        watching = asyncio.create_task(node.watch())
        well = False
        await until(node, lost=True)
        found = await client.post("/pd/decode", json=envelope(ticket=ticket()))
        assert (found.status_code, (await client.get("/health")).status_code) == (503, 503)
        other = CacheIdentity(
            **{
                **{name: getattr(IDENTITY, name) for name in ("model", "weights", "config", "layout")},
                "block_tokens": 32,
            }
        )

        async def another(body: dict[str, Any]) -> Response:
            return JSONResponse({**ANSWER, "kv_transfer_params": say_pages(other, [(0, 1)], [])})

        num_asked, stand.answer, well = len(stand.asked), another, True
        while len(stand.asked) < num_asked + 2:
            await asyncio.sleep(0.01)
        assert node.lost, "it came back as another one"
        stand.answer = stand.fine
        await until(node, lost=False)
        watching.cancel()

    with MemoryStore(1 << 20) as pool:
        asyncio.run(at(stand, Role.DECODE, use, pool=pool))


# --- waiting for the pool ---------------------------------------------------------------------------------------------


class Watched(MemoryStore):
    """A pool that takes its time, and writes down how it is asked."""

    def __init__(self, seconds: float) -> None:
        super().__init__(1 << 20)
        self.left_s: list[float] = []  # of each look, when it began
        self._seconds = seconds

    def contains(self, names: Sequence[PageName], *, deadline: Deadline) -> list[bool]:
        self.left_s.append(deadline.remaining_s)
        time.sleep(self._seconds)
        return super().contains(names, deadline=deadline)


@pytest.mark.fault("D4")
def test_many_that_wait_for_the_pool_are_looked_for_together(stand: Stand) -> None:
    """One look after the other, each with its whole time, whoever waits; and rarer while nothing comes."""
    stand.pages = sample_chain(1, 3)
    with Watched(0.05) as pool:

        async def use(client: httpx2.AsyncClient, node: VllmNode) -> None:
            asking = [asyncio.create_task(client.post("/pd/prefill", json=envelope())) for _ in range(40)]
            found = await asyncio.gather(*asking)
            assert {one.json()["kind"] for one in found} == {"late"}
            assert min(pool.left_s) > 1.0
            assert len(pool.left_s) < 40
            pool.left_s.clear()
            asking = [asyncio.create_task(client.post("/pd/prefill", json=envelope())) for _ in range(40)]
            while not pool.left_s:
                await asyncio.sleep(0.01)
            pool.put(items(stand.pages), deadline=soon())
            assert {one.status_code for one in await asyncio.gather(*asking)} == {200}

        asyncio.run(at(stand, Role.PREFILL, use, pool=pool, pool_timeout_s=2.0))


@pytest.mark.fault("D4")
def test_everybody_gets_one_look(stand: Stand) -> None:
    """However little time there is, and however long the looks of others take."""
    stand.pages = sample_chain(1, 3)
    with Watched(0.1) as pool:
        pool.put(items(stand.pages), deadline=soon())

        async def use(client: httpx2.AsyncClient, node: VllmNode) -> None:
            asking = [asyncio.create_task(client.post("/pd/prefill", json=envelope())) for _ in range(20)]
            assert {one.status_code for one in await asyncio.gather(*asking)} == {200}

        asyncio.run(at(stand, Role.PREFILL, use, pool=pool, pool_timeout_s=0.01))


@pytest.mark.fault("D4")
def test_who_leaves_is_looked_for_no_more(stand: Stand) -> None:
    stand.pages = sample_chain(1, 3)
    with Watched(0.0) as pool:

        async def use(client: httpx2.AsyncClient, node: VllmNode) -> None:
            probes = node._probes
            names = [page.meta.name for page in stand.pages]
            waiting = asyncio.create_task(probes.until_held(names, 600.0))
            while not pool.left_s:
                await asyncio.sleep(0.01)
            waiting.cancel()
            await asyncio.wait({waiting})
            assert probes._probing is not None
            await asyncio.wait_for(asyncio.shield(probes._probing), 20)  # it ends by itself

        asyncio.run(at(stand, Role.PREFILL, use, pool=pool))


def test_a_node_that_ends_tells_who_waits(stand: Stand) -> None:
    stand.pages = sample_chain(1, 3)
    with MemoryStore(1 << 20) as pool:

        async def use(client: httpx2.AsyncClient, node: VllmNode) -> None:
            asking = asyncio.create_task(client.post("/pd/prefill", json=envelope()))
            while not node._probes._waiters:
                await asyncio.sleep(0.01)
            await node.stop()
            assert (await asyncio.wait_for(asking, 20)).json()["kind"] == "late"

        asyncio.run(at(stand, Role.PREFILL, use, pool=pool, pool_timeout_s=600.0))


# --- tickets ----------------------------------------------------------------------------------------------------------


@pytest.mark.fault("B3")
def test_a_ticket_is_for_one_request_and_one_answer(stand: Stand) -> None:
    """What a prefill node gives is taken once; forged, replayed, expired ones and those of another model are not."""
    stand.pages = []
    made: list[dict[str, Any]] = []

    async def prefill(client: httpx2.AsyncClient, node: VllmNode) -> None:
        found = await client.post("/pd/prefill", json=envelope())
        assert found.status_code == 200, found.text
        made.append(found.json()["ticket"])

    async def decode(client: httpx2.AsyncClient, node: VllmNode) -> None:
        async def kind(given: Any, **more: Any) -> str:
            found = await client.post("/pd/decode", json={**envelope(ticket=given), **more})
            return str(found.json().get("kind", found.status_code))

        (good,) = made
        for changed in ({"num_prompt_tokens": 71}, {"mac": "0" * 64}, {"mac": ""}, {"nonce": "0" * 64}, {"model": "x"}):
            assert await kind({**good, **changed}) == "foreign"
        assert await kind(ticket(model="another")) == "foreign"
        assert await kind(ticket(identity="00")) == "foreign"
        assert await kind(ticket(expires_at_ms=int(time.time() * 1000) - 5)) == "expired"
        other = {**envelope()["body"], "prompt": [2] * 70}
        assert await kind(good, body=other) == "foreign"
        assert len(stand.asked) == 3, "vLLM has heard of none of them"

        async def fail(body: dict[str, Any]) -> Response:
            return JSONResponse({"error": {"message": "no"}}, 500)

        stand.answer = fail
        assert await kind(good) == "502"  # no token came of it: it is still good
        stand.answer = stand.fine
        assert await kind(good) == "200"
        assert await kind(good) == "used"

    with MemoryStore(1 << 20) as pool:
        asyncio.run(at(stand, Role.PREFILL, prefill, pool=pool))
        asyncio.run(at(stand, Role.DECODE, decode, pool=pool))


@pytest.mark.fault("B3")
def test_strangers_get_nothing_done(stand: Stand) -> None:
    async def use(client: httpx2.AsyncClient, node: VllmNode) -> None:
        for path in ("/pd/prefill", "/pd/decode", "/pd/hello", "/pd/attempts/x"):
            for headers in ({}, {"authorization": f"Bearer {KEY.text}"}):
                found = await client.post(path, json=envelope(), headers=headers, auth=httpx2.Auth())
                assert found.status_code == 401
        assert len(stand.asked) == 1, "vLLM was asked who it is, and nothing else"

    with MemoryStore(1 << 20) as pool:
        asyncio.run(at(stand, Role.PREFILL, use, pool=pool))


@pytest.mark.fault("S14")
@pytest.mark.parametrize("size", [10, 100_000])
def test_bodies_are_read_beside_the_loop_and_passed_on(
    stand: Stand, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    threads: list[str] = []

    def watched(body: bytes) -> dict[str, object]:
        threads.append(threading.current_thread().name)
        return parse(body)

    monkeypatch.setattr(vllm_reading, "parse", watched)
    stand.pages = sample_chain(1, 3)
    body = {**envelope()["body"], "user": "\u00e9" * size}
    given: list[Any] = []

    async def prefill(client: httpx2.AsyncClient, node: VllmNode) -> None:
        found = await client.post("/pd/prefill", json=envelope(body=body))
        assert found.status_code == 200, found.text
        assert stand.asked[-1]["user"] == body["user"]
        given.append(found.json()["ticket"])
        assert node.bodies.num_bytes == 0

    async def decode(client: httpx2.AsyncClient, node: VllmNode) -> None:
        found = await client.post("/pd/decode", json=envelope(body=body, ticket=given[0]))
        assert found.status_code == 200, found.text
        assert stand.asked[-1] == body

    async def plain(client: httpx2.AsyncClient, node: VllmNode) -> None:
        found = await client.post("/v1/completions", json=body)
        assert found.status_code == 200, found.text
        assert stand.asked[-1] == body
        for wrong in (b"{" * size, b"[1]" + b" " * size):
            refused = await client.post("/v1/completions", content=wrong, headers={"content-type": "application/json"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_json")

    with MemoryStore(1 << 20) as pool:
        pool.put(items(stand.pages), deadline=soon())
        for role, use in ((Role.PREFILL, prefill), (Role.DECODE, decode), (Role.MIXED, plain)):
            asyncio.run(at(stand, role, use, pool=pool))
    assert len(threads) == (5 if size == 10 else 0), "large ones are another process's"
    assert all(name.startswith("headwater reading") for name in threads)


def test_who_wants_many_answers_takes_as_many_places(stand: Stand) -> None:
    seen: list[int] = []

    async def use(client: httpx2.AsyncClient, node: VllmNode) -> None:
        async def fine(body: dict[str, Any]) -> Response:
            seen.append(node.num_free)
            if body["prompt"] == ["a", "b"]:
                refused = await client.post("/v1/completions", json={"prompt": "c", "n": 2})
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_room")
                assert (await client.post("/v1/completions", json={"prompt": "c"})).status_code == 200
            return await stand.fine(body)

        # It is asked by a loop of its own.
        loop = asyncio.get_running_loop()

        async def answer(body: dict[str, Any]) -> Response:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(fine(body), loop))

        stand.answer = answer
        assert (await client.post("/v1/completions", json={"prompt": ["a", "b"], "n": 2})).status_code == 200
        assert seen == [1, 0]
        assert node.num_free == 5
        for body in ({"prompt": ["a"] * 6}, {"prompt": "a", "n": 6}, {"prompt": ["a", "b"], "n": 3}):
            found = await client.post("/v1/completions", json=body)
            assert (found.status_code, found.json()["error"]["code"]) == (400, "invalid_value")

    with MemoryStore(1 << 20) as pool:
        asyncio.run(at(stand, Role.MIXED, use, pool=pool, max_requests=5))


def test_a_prefill_takes_a_place_for_each_prompt() -> None:
    body = {"prompt": ["a", "b", "c"], "n": 4}
    asked = json.dumps({"endpoint": "/v1/completions", "body": body, "ticket": {}}).encode()
    assert vllm_reading.prefill(asked).num_answers == 3
    assert vllm_reading.decode(asked).num_answers == 12
    assert vllm_reading.plain(json.dumps(body).encode()).num_answers == 12


def test_a_node_begins_when_vllm_answers(stand: Stand) -> None:
    said: list[Facts] = []
    with listen("127.0.0.1", 0) as listener, MemoryStore(1 << 20) as pool:
        options = NodeOptions(vllm=stand.url, role=Role.DECODE, node_key=KEY, node="one")
        server = VllmServer(options, pool, url=address(listener), limits=Limits(), announce=said.append)
        thread = threading.Thread(target=server.serve_forever, args=([listener],))
        thread.start()
        try:
            wait_until(lambda: bool(said))
            assert said == [FACTS]
            assert httpx2.get(f"{address(listener)}/health").json() == {"status": "ok", "requests": 0}
        finally:
            server.should_exit = True
            thread.join(30)
        assert server.failure is None


def test_a_node_does_not_begin_without_vllm(tmp_path: Path) -> None:
    with listen("127.0.0.1", 0) as nobody:
        url = address(nobody)
    said: list[str] = []
    options = NodeOptions(vllm=url, role=Role.DECODE, node_key=KEY, wait_s=0.01)
    with (
        open_local(LocalStoreConfig(directory=tmp_path / "pool", limit_bytes=8 << 20)),  # small; others join it
        pytest.raises(InvalidConfig, match="no vLLM answers at"),
    ):
        run(options, f"local:{tmp_path / 'pool'}", say=said.append)
    assert not said
