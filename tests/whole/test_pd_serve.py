"""Prefill and decode apart, as clients see it: a real router, real nodes and engines, a real pool, real sockets."""

import json
import logging
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_kit import KEY
from headwater.build import open_engine, open_pool, open_residency
from headwater.config.environment import pd_via
from headwater.config.residency import ResidencyConfig
from headwater.config.serve import ServeConfig
from headwater.core.errors import InvalidConfig
from headwater.core.keys import BlockKey, block_keys
from headwater.core.node_key import NodeKey
from headwater.core.role import Role
from headwater.disagg.handoff import PoolReceiver
from headwater.disagg.prompt import Asking
from headwater.disagg.protocol import decode
from headwater.engine.models.base import Model
from headwater.engine.request import Sending, Taking, Usage
from headwater.metrics import Metrics
from headwater.residency.base import Found, Residency
from headwater.router.lookup import PrefixLookup
from headwater.router.router import Router
from headwater.router.server import RouterServer
from headwater.router.settings import RouterConfig
from headwater.router.start import open_router, reader
from headwater.serve.phases import phases_of
from headwater.serve.server import Server
from headwater.serve.service import Service
from headwater.serve.sockets import address, listen
from headwater.serve.start import heartbeats
from headwater.storage.base import Deadline
from headwater.transfer.executor.tier import Naming
from pd_kit import new_pool
from serve_kit import WAIT_S, Served, directory, model, serving
from test_redis import Server as Redis

__all__ = ["directory", "model"]

TEXT = "A prompt that one node computes, and another one answers, is longer than a block or two. "
COMPLETIONS = "/v1/completions"


# --- a small cluster --------------------------------------------------------------------------------------------------


@dataclass
class Cluster:
    """A router, a prefill node, a decode node."""

    url: str
    router: Router
    prefill: Served
    decode: Served

    def ask(self, body: dict[str, Any], path: str = COMPLETIONS, **headers: str) -> httpx2.Response:
        with httpx2.Client(base_url=self.url, timeout=WAIT_S) as client:
            return client.post(path, json=body, headers=headers)

    def attempts(self) -> list[dict[str, Any]]:
        with httpx2.Client(base_url=self.url, timeout=WAIT_S) as client:
            return [one for trip in client.get("/state").json()["under_way"] for one in trip["attempts"]]

    def ticket(self, prompt: list[int], **body: Any) -> dict[str, Any]:
        found = self.prefill.post("/pd/prefill", envelope(prompt, **body))
        assert found.status_code == 200, found.text
        ticket: dict[str, Any] = found.json()["ticket"]
        return ticket

    def take(self, ticket: object, prompt: list[int], **body: Any) -> httpx2.Response:
        return self.decode.post("/pd/decode", {**envelope(prompt, **body), "ticket": ticket})


def envelope(prompt: list[int], **body: Any) -> dict[str, Any]:
    asked = {"prompt": prompt, "temperature": 0, "ignore_eos": True, "max_tokens": 8, **body}
    return {"endpoint": COMPLETIONS, "body": asked}


@contextmanager
def routing(port: int = 0, *, router: Router | None = None, **options: Any) -> Iterator[tuple[str, Router]]:
    """A router that answers; gone at the end."""
    one = router or Router(RouterConfig(**{"queue_timeout_s": WAIT_S, "node_key": KEY, **options}), metrics=Metrics())
    answers = threading.Event()
    with listen("127.0.0.1", port) as listener:
        server = RouterServer(one, announce=answers.set)
        thread = threading.Thread(target=server.run, args=([listener],), name="test router")
        thread.start()
        try:
            assert answers.wait(WAIT_S)
            yield address(listener), one
        finally:
            server.should_exit = True
            thread.join(WAIT_S)
            assert not thread.is_alive()


@pytest.fixture
def pool(shm: Path) -> str:
    return new_pool(shm)


@contextmanager
def cluster(directory: Path, model: Model, pool: str, **decode: Any) -> Iterator[Cluster]:
    with ExitStack() as stack:
        url, router = stack.enter_context(routing())
        common: dict[str, Any] = {"pool": pool, "routers": (url,), "lease_s": 30.0}
        nodes = [
            stack.enter_context(serving(directory, model, role=role, node=role, **{**common, **more}))
            for role, more in ((Role.PREFILL, {}), (Role.DECODE, decode))
        ]
        yield Cluster(url, router, *nodes)
        until(lambda: router.num_requests == 0)


@pytest.fixture
def pair(directory: Path, model: Model, pool: str) -> Iterator[Cluster]:
    with cluster(directory, model, pool) as one:
        yield one


def until(holds: Callable[[], Any]) -> None:
    end = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.005)


def said(text: str) -> tuple[str, dict[str, Any]]:
    """The text of a stream, and its usage."""
    events = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line.startswith("data: {")]
    assert text.endswith("data: [DONE]\n\n")
    return "".join(one["choices"][0]["text"] for one in events if one["choices"]), events[-1]["usage"]


# --- answers ----------------------------------------------------------------------------------------------------------


def test_answers_are_those_of_one_node(pair: Cluster, directory: Path, model: Model) -> None:
    numbers = [secrets.randbelow(256) for _ in range(200)]
    bodies: list[dict[str, Any]] = [
        *({"prompt": numbers[:length], "temperature": 0, "ignore_eos": True} for length in (1, 15, 16, 17, 200)),
        {"prompt": TEXT, "temperature": 0.9, "top_p": 0.9, "seed": 5, "max_tokens": 30},
        {"prompt": TEXT, "temperature": 0, "logprobs": 3},
        {"prompt": numbers[:40], "temperature": 0, "max_tokens": 1, "ignore_eos": True, "logprobs": 1},
        {"prompt": TEXT * 2, "temperature": 0, "cache_salt": "team"},
    ]
    with serving(directory, model) as alone:
        expected = [alone.post(COMPLETIONS, body).json()["choices"] for body in bodies]
        # A stop text in the middle of the answer, and one that the first token begins.
        whole = alone.complete(TEXT, max_tokens=30)["choices"][0]["text"]
        stops: list[dict[str, Any]] = [
            {"prompt": TEXT, "temperature": 0, "ignore_eos": True, "max_tokens": 30, "stop": whole[at : at + 3]}
            for at in (0, 8)
        ]
        expected += [alone.post(COMPLETIONS, body).json()["choices"] for body in stops]
        chat = {"messages": [{"role": "user", "content": TEXT}], "temperature": 0, "max_tokens": 9, "ignore_eos": True}
        told = alone.post("/v1/chat/completions", chat).json()["choices"]
    for body, choices in zip([*bodies, *stops], expected, strict=True):
        found = pair.ask(body)
        assert found.status_code == 200, found.text
        assert found.json()["choices"] == choices
        text, usage = said(pair.ask({**body, "stream": True, "stream_options": {"include_usage": True}}).text)
        assert text == choices[0]["text"]
        assert usage["completion_tokens"] == found.json()["usage"]["completion_tokens"]
    assert pair.ask(chat, "/v1/chat/completions").json()["choices"] == told
    assert pair.prefill.running.engine.num_computed_tokens > 0
    counted = pair.decode.get("/metrics").text
    assert re.search(r'handoffs_total\{[^}]*outcome="ok"[^}]*\} [1-9]', counted)


def test_what_a_request_took_is_told_from_end_to_end(pair: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headwater")
    body = {"prompt": TEXT, "max_tokens": 8, "ignore_eos": True}
    found = pair.ask(body, **{"x-request-id": "mine-1"})
    whole, stream = (
        found.json(),
        said(
            pair.ask(
                {**body, "stream": True, "stream_options": {"include_usage": True}}, **{"x-request-id": "mine-2"}
            ).text
        )[1],
    )
    names = {"queue_s", "prefill_s", "pool_write_s", "pool_read_s", "decode_s"}
    for usage in (whole["usage"]["headwater"], stream["headwater"]):
        assert set(usage["phases"]) == names
        assert all(seconds >= 0 for seconds in usage["phases"].values())
        assert sum(usage["phases"].values()) <= usage["router"]["total_s"] + 1e-4
        assert usage["router"]["nodes"] == {"prefill": "prefill", "decode": "decode"}
    assert found.headers["x-request-id"] == "mine-1"
    assert whole["id"] == "cmpl-mine-1"
    until(lambda: caplog.text.count("mine-2 attempt") == 2)
    for path in ("/pd/prefill", "/pd/decode"):
        assert re.search(rf"{path} mine-1 attempt [0-9a-f]+: \w+ \(queue_s ", caplog.text)
    assert pair.ask(body, **{"x-request-id": "no good id"}).headers["x-request-id"].startswith("req-")
    for node, parts in ((pair.prefill, {"queue", "prefill", "pool_write"}), (pair.decode, {"pool_read", "decode"})):
        metrics = node.get("/metrics").text
        counted = set(re.findall(r'headwater_pd_phase_seconds_count\{phase="(\w+)"\} [1-9]', metrics))
        assert parts <= counted <= {name.removesuffix("_s") for name in names}
    assert re.fullmatch("req-[0-9a-f]{24}", pair.ticket([1, 2, 3])["request"])  # what the router would have said


def test_many_at_once_through_little_room(directory: Path, model: Model, pool: str) -> None:
    """More than the decode node takes at a time: who is sent away comes again, and nobody gets another's tokens."""
    shared = [secrets.randbelow(256) for _ in range(48)]
    bodies = [
        {"prompt": [*shared[: i % 5 * 11], i + 1, *range(i)], "temperature": 0, "ignore_eos": True, "max_tokens": 12}
        for i in range(12)
    ]
    with serving(directory, model) as alone:
        expected = [alone.post(COMPLETIONS, body).json()["choices"] for body in bodies]
    with cluster(directory, model, pool, max_running=3) as pair, ThreadPoolExecutor(len(bodies)) as threads:
        found = list(threads.map(pair.ask, bodies))
        assert [one.json().get("choices") for one in found] == expected
        pair.prefill.until_free()
        pair.decode.until_free()
        assert all(one["requests_of_this_router"] == 0 for one in names(pair.url).values())
        assert names(pair.url)["decode"]["load"]["free_slots"] <= 3  # what it would take, not what may wait elsewhere


@given(st.floats(0, 10), st.floats(0, 10), st.floats(0, 10), st.floats(0, 10), st.sampled_from(["", "send", "take"]))
def test_phases_are_the_whole_time(queue_s: float, pool_s: float, compute_s: float, rest_s: float, way: str) -> None:
    ticket: Any = None
    handoffs: dict[str, Sending | Taking] = {
        "send": Sending(until_s=0.0), "take": Taking(ticket=ticket, until_s=0.0)
    }  # fmt: skip
    handoff = handoffs.get(way)
    ttft_s = queue_s + compute_s + (pool_s if way == "take" else 0.0)
    total_s = ttft_s + (pool_s if way == "send" else rest_s)
    usage = Usage(
        prompt_tokens=1, completion_tokens=1, cached_tokens=0, cached_by_tier={}, computed_tokens=1,
        ttft_s=ttft_s, total_s=total_s, queue_s=queue_s, pool_s=pool_s if way else None,
    )  # fmt: skip
    found = phases_of(usage, handoff)
    parts = {"queue_s": queue_s, "prefill_s": compute_s}
    parts |= {"pool_write_s": pool_s} if way == "send" else {"decode_s": rest_s}
    parts |= {"pool_read_s": pool_s} if way == "take" else {}
    assert found == pytest.approx(parts, abs=2e-6)
    early = replace(usage, ttft_s=None, queue_s=None, pool_s=None)
    assert phases_of(early, handoff) == {}


# --- at the nodes' doors ----------------------------------------------------------------------------------------------


def error_of(found: httpx2.Response, status: int, code: str) -> dict[str, Any]:
    document: dict[str, Any] = found.json()
    assert (found.status_code, document["error"]["code"]) == (status, code), found.text
    return document


def test_each_node_does_its_own_part_only(pair: Cluster, directory: Path, model: Model) -> None:
    for node in (pair.prefill, pair.decode):
        refused = error_of(node.post(COMPLETIONS, {"prompt": "x"}), 421, "wrong_role")
        assert pair.url in refused["error"]["message"]  # it names the router
        assert node.get("/v1/models").json()["data"][0]["id"] == "tiny"
    error_of(pair.prefill.post("/pd/decode", envelope([1])), 421, "wrong_role")
    error_of(pair.decode.post("/pd/prefill", envelope([1])), 421, "wrong_role")
    with serving(directory, model) as alone:
        assert "--role prefill" in alone.post("/pd/prefill", envelope([1])).json()["error"]["message"]
    for bad, param in (
        ({"endpoint": "/v1/embeddings", "body": {}}, "endpoint"),
        ({"endpoint": COMPLETIONS, "body": "x"}, "body"),
        ({"endpoint": COMPLETIONS, "body": {"prompt": ""}, "ticket": {}}, None),
        ({"endpoint": COMPLETIONS, "body": {"prompt": [1, 99999]}}, "prompt"),
        ({"endpoint": COMPLETIONS, "body": {"prompt": [1], "n": 0}}, "n"),
        ({"endpoint": COMPLETIONS, "body": {"prompt": [1], "max_tokens": 1 << 20}}, "max_tokens"),
    ):
        found = pair.prefill.post("/pd/prefill", bad)
        if param is not None:
            assert (found.status_code, found.json()["error"]["param"]) == (400, param), found.text
    assert pair.prefill.post("/pd/prefill", envelope([1]), headers={"x-headwater-timeout-s": "no"}).status_code == 400
    assert pair.prefill.post("/pd/prefill", envelope([1]), headers={"x-headwater-attempt": "a b"}).status_code == 400
    found = pair.prefill.post("/pd/prefill", envelope([1] * 500), headers={"x-headwater-timeout-s": "0.000001"})
    error_of(found, 504, "timeout")
    error_of(pair.ask({"model": "another", "prompt": "x"}), 404, "model_not_found")  # a node's word, through the router


def test_attempts_are_known_while_they_are_under_way(pair: Cluster) -> None:
    error_of(pair.decode.get("/pd/attempts/nobody"), 404, "not_found")
    prompt = [3] * 40
    body = {**envelope(prompt, max_tokens=4000, stream=True), "ticket": pair.ticket(prompt, max_tokens=4000)}
    with (
        httpx2.Client(base_url=pair.decode.url, timeout=WAIT_S) as client,
        client.stream(
            "POST", "/pd/decode", json=body, headers={"x-headwater-attempt": "abc"}, auth=pair.decode.auth
        ) as stream,
    ):
        assert stream.status_code == 200
        assert float(stream.headers["x-headwater-pool-s"]) >= 0
        found = pair.decode.get("/pd/attempts/abc").json()
        assert found["state"] == "running"
        assert 0 <= found["idle_s"] < WAIT_S
        again = pair.decode.post("/pd/decode", body, headers={"x-headwater-attempt": "abc"})
        error_of(again, 409, "duplicate_attempt")
    until(lambda: pair.decode.get("/pd/attempts/abc").status_code == 404)  # who closes a connection cancels
    pair.decode.until_free()


def test_who_waits_for_the_pool_does_not_hang(pair: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine gets nothing done meanwhile; the wait has an end of its own."""
    release, begin_fetch = threading.Event(), PoolReceiver.begin_fetch

    def slow(*given: Any, **more: Any) -> None:
        def later() -> None:
            assert release.wait(WAIT_S)
            begin_fetch(*given, **more)

        threading.Thread(target=later).start()

    monkeypatch.setattr(PoolReceiver, "begin_fetch", slow)
    prompt, found = [4] * 40, []
    body = {**envelope(prompt), "ticket": pair.ticket(prompt)}
    headers = {"x-headwater-attempt": "abc"}
    asking = threading.Thread(target=lambda: found.append(pair.decode.post("/pd/decode", body, headers=headers)))
    asking.start()
    until(lambda: pair.decode.get("/pd/attempts/abc").json().get("state") == "fetching")
    until(lambda: pair.decode.running.engine.idle_s > 0.05)
    assert pair.decode.get("/pd/attempts/abc").json() == {"idle_s": 0.0, "state": "fetching"}
    release.set()
    asking.join(WAIT_S)
    assert found[0].status_code == 200


def test_a_ticket_is_for_one_prompt_at_one_kind_of_node(pair: Cluster) -> None:
    prompt = list(range(1, 41))
    ticket = pair.ticket(prompt)
    good = pair.take(ticket, prompt)
    assert good.status_code == 200
    assert float(good.headers["x-headwater-first-s"]) >= float(good.headers["x-headwater-pool-s"])
    for changed, asked, kind in (
        (ticket, [*prompt[:-1], 99], "foreign"),
        (ticket, prompt[:-1], "foreign"),
        ({**ticket, "identity": "00" * 32}, prompt, "foreign"),
        ({**ticket, "block_tokens": 20}, prompt, "foreign"),
        ({**ticket, "headwater_ticket": 99}, prompt, "foreign"),
        ({**ticket, "pool": "redis"}, prompt, "foreign"),
        ({**ticket, "expires_at_ms": 1}, prompt, "expired"),
        ("a ticket", prompt, "foreign"),
        (None, prompt, "foreign"),
    ):
        found = pair.take(changed, asked)
        assert (found.status_code, found.json()["kind"]) == (502, kind), found.text
        assert found.json()["error"]["message"]
    other = pair.take(ticket, prompt, cache_salt="somebody else")
    assert "tenant" in other.json()["error"]["message"]
    assert pair.decode.running.engine.num_requests == 0


@pytest.mark.parametrize("recompute", [True, False])
def test_what_the_pool_lost_is_computed_or_told(directory: Path, model: Model, pool: str, *, recompute: bool) -> None:
    prompt = [secrets.randbelow(256) for _ in range(70)]
    with serving(directory, model) as alone:
        expected = alone.complete(prompt, max_tokens=8)["choices"]
    with cluster(directory, model, pool, pd_recompute=recompute) as pair:
        ticket = decode(json.dumps(pair.ticket(prompt)))
        remove(pool, model, ticket.keys[2])
        found = pair.take(json.loads(ticket.encode()), prompt)
        if recompute:
            assert found.json()["choices"] == expected
        else:
            document = error_of(found, 502, "handoff_missing")
            assert (document["kind"], document["first_missing_block"]) == ("missing", 2)
        pair.decode.until_free()
        assert (
            pair.ask({"prompt": prompt, "temperature": 0, "ignore_eos": True, "max_tokens": 8}).json()["choices"]
            == expected
        )  # written again, from block 2 on


def test_reading_ends_by_its_own_deadline(directory: Path, model: Model, pool: str) -> None:
    prompt = [secrets.randbelow(256) for _ in range(70)]
    with cluster(directory, model, pool, pd_recompute=False, pd_timeout_s=1e-6) as pair:
        assert error_of(pair.take(pair.ticket(prompt), prompt), 502, "handoff_late")["kind"] == "late"


def remove(pool: str, model: Model, key: BlockKey) -> None:
    with open_pool(pool) as store:
        name = Naming(identity=model.identity.digest, layout=model.layout).name(key)
        assert store.contains([name], deadline=Deadline.after(5)) == [True]
        store.delete([name], deadline=Deadline.after(5))


def test_a_decode_node_without_room_says_so_at_once(directory: Path, model: Model, pool: str) -> None:
    """And the router waits for its room, with the ticket in hand."""
    with cluster(directory, model, pool, max_running=1) as pair:
        prompt, other = [5] * 20, [6] * 20
        body = {**envelope(prompt, max_tokens=6000, stream=True), "ticket": pair.ticket(prompt)}
        ticket = pair.ticket(other)
        with (
            httpx2.Client(base_url=pair.decode.url, timeout=WAIT_S) as client,
            client.stream("POST", "/pd/decode", json=body, auth=pair.decode.auth) as stream,
        ):
            assert stream.status_code == 200
            refused = pair.take(ticket, other)
            error_of(refused, 503, "no_room")
            assert refused.headers["retry-after"] == "1"
            found: list[httpx2.Response] = []
            asking = threading.Thread(target=lambda: found.append(pair.ask({"prompt": other, "max_tokens": 4})))
            asking.start()
            until(lambda: any(one["outcome"] == "refused" for one in pair.attempts()))
        asking.join(WAIT_S)
        assert found[0].status_code == 200, found[0].text
        assert found[0].json()["usage"]["headwater"]["phases"]["retries_s"] > 0


@pytest.mark.parametrize("way", [COMPLETIONS, "/pd/prefill", "/pd/decode"])
@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_frees_everything(pair: Cluster, way: str, *, stream: bool) -> None:
    """At the router, and at each node."""
    prompt = [7] * 1000
    body: dict[str, Any] = envelope(prompt, max_tokens=3000, stream=stream)
    node, worker = pair.prefill, pair.prefill
    if way == COMPLETIONS:
        node, worker, body = replace(pair.decode, url=pair.url), pair.decode, body["body"]
    elif way == "/pd/decode":
        node, worker, body = pair.decode, pair.decode, {**body, "ticket": pair.ticket(prompt)}
    with node.raw(body, way):
        until(lambda: worker.running.engine.num_requests or worker.running.engine.num_steps > 10)
    pair.prefill.until_free()
    pair.decode.until_free()
    assert pair.decode.running.engine.num_computed_tokens < 2900  # it was not done to the end for nobody
    assert pair.ask({"prompt": prompt, "max_tokens": 2}).status_code == 200


# --- coming and going -------------------------------------------------------------------------------------------------


def names(url: str) -> dict[str, Any]:
    with httpx2.Client(timeout=WAIT_S) as client:
        return {one["node"]: one for one in client.get(f"{url}/state").json()["nodes"]}


def test_nodes_are_found_again_by_a_router_that_was_started_again(
    directory: Path, model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "headwater")
    with listen("127.0.0.1", 0) as one:
        port = one.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with serving(directory, model, routers=(url,), node="here", lease_s=0.3) as node:  # nobody is there yet
        assert node.complete("answers all the same", max_tokens=2)["choices"]
        for _ in range(2):
            with routing(port):
                until(lambda: "here" in names(url))
                assert names(url)["here"]["role"] == "mixed"
                with httpx2.Client(timeout=WAIT_S) as client:
                    assert client.post(url + COMPLETIONS, json={"prompt": "x"}).status_code == 200
            time.sleep(0.4)  # several heartbeats into nothing
        with routing(port):
            until(lambda: "here" in names(url))
            node.stop()
            assert names(url) == {}  # it said good-bye
    told = [one.getMessage() for one in caplog.records if one.getMessage().startswith("the router at")]
    down = ["does not answer" in one for one in told]
    assert down[0]
    assert down.count(True) >= 3
    assert all(one is not other for one, other in pairwise(down))  # each time once, however often it was tried
    assert "Traceback" not in caplog.text


def test_a_node_that_ends_lets_requests_end(directory: Path, model: Model) -> None:
    with (
        routing() as (url, _),
        serving(directory, model, routers=(url,), node="here", lease_s=30.0, drain_s=WAIT_S, survives=False) as node,
    ):
        body = {"prompt": "on", "max_tokens": 150, "ignore_eos": True, "stream": True}
        with (
            httpx2.Client(timeout=WAIT_S) as client,
            client.stream("POST", url + COMPLETIONS, json=body) as stream,
        ):
            lines = stream.iter_lines()
            next(lines)
            node.server.should_exit = True
            until(lambda: names(url).get("here", {}).get("draining"))
            late = client.post(node.url + COMPLETIONS, json={"prompt": "x"})
            assert (late.status_code, late.json()["error"]["code"]) == (503, "shutting_down")
            assert list(lines)[-2:] == ["data: [DONE]", ""]
        node.thread.join(WAIT_S)
        assert names(url) == {}


def test_a_node_that_does_not_fit_does_not_start(directory: Path, model: Model, pool: str) -> None:
    with routing() as (url, _):
        options: dict[str, Any] = {"routers": (url,), "node": "other", "lease_s": 30.0, "node_key": KEY}
        with serving(directory, model, routers=(url,), node="here", lease_s=30.0):
            for changes, words in (
                ({"name": "another"}, "same model name"),
                ({"node": "here", "role": Role.PREFILL, "pool": pool}, None),
                ({"node_key": NodeKey("another-key-than-theirs")}, "API key"),
            ):
                config = ServeConfig(model=directory, num_blocks=64, **{**options, **changes})
                with ExitStack() as stack:
                    listener = stack.enter_context(listen("127.0.0.1", 0))
                    running = stack.enter_context(open_engine(config, model=model))
                    service = Service(running, config, url=address(listener))
                    server = Server(service, beats=heartbeats(service))
                    if words is None:  # a newer process takes the name over: that is a restart
                        server.should_exit = True
                        server.run([listener])
                    else:
                        with pytest.raises(InvalidConfig, match=words):
                            server.run([listener])


# --- configuration ----------------------------------------------------------------------------------------------------

HERE, THERE = "http://127.0.0.1:1", "http://10.0.0.1:1"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"role": "prefill"}, "say --pool URL"),
        ({"role": "decode"}, "say --pool URL"),
        ({"role": "router"}, "prefill, decode, mixed"),
        ({"role": "decode", "pool": "local:x", "cache": False}, "leave --no-cache out"),
        ({"role": "prefill", "index_only": True, "residency": "redis://h:1"}, "index-only"),
        ({"role": "prefill", "pool": "local:x", "pd_via": "direct"}, "HEADWATER_PD_VIA=pool"),
        ({"routers": ("localhost:1",)}, "http://HOST:PORT"),
        ({"routers": ("http://u:secret@h:1",)}, "http://HOST:PORT"),
        ({"routers": (THERE,)}, "--advertise"),
        ({"routers": (THERE,), "host": "0.0.0.0"}, "--advertise"),
        ({"advertise": THERE}, "name the router"),
        ({"routers": (HERE,), "lease_s": 0}, "lease_s"),
        ({"routers": (HERE,), "lease_s": 5000}, "an hour"),
        ({"routers": (HERE,), "node": "two words"}, "without spaces"),
        ({"drain_s": -1}, "drain_s"),
    ],
)
def test_bad_configuration_is_refused_with_what_to_change(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidConfig, match=words) as raised:
        ServeConfig(model=Path("somewhere"), **options)
    assert "secret" not in str(raised.value)


def test_good_configuration_is_taken() -> None:
    for options in (
        {"role": "prefill", "pool": "local:x"},  # without a router: it can be called directly
        {"role": "decode", "pool": "redis://h:1", "routers": [HERE, HERE], "node": "d"},
        {"routers": (THERE,), "advertise": "http://10.0.0.2:5", "host": "0.0.0.0"},
        {"routers": (THERE,), "host": "10.0.0.2"},
        {"pd_via": "direct"},  # a mixed node hands nothing over
    ):
        ServeConfig(model=Path("somewhere"), node_key=NodeKey.random(), **options)


def test_the_way_from_prefill_to_decode_is_read_from_the_environment() -> None:
    for environ, way in (
        ({}, "pool"),
        ({"HEADWATER_PD_VIA": "pool", "FD_PD_TRANSFER_VIA_STORAGE": "1"}, "pool"),
        ({"FD_PD_TRANSFER_VIA_STORAGE": "0"}, "direct"),
        ({"HEADWATER_PD_VIA": "wires"}, "wires"),
    ):
        assert pd_via(environ) == way
    for environ in (
        {"FD_PD_TRANSFER_VIA_STORAGE": "yes"},
        {"HEADWATER_PD_VIA": "x", "FD_PD_TRANSFER_VIA_STORAGE": "1"},
    ):
        with pytest.raises(InvalidConfig, match="FD_PD_TRANSFER_VIA_STORAGE"):
            pd_via(environ)


# --- who holds what ---------------------------------------------------------------------------------------------------


def test_the_node_that_holds_the_prompt_is_asked(directory: Path, model: Model, tmp_path: Path, pool: str) -> None:
    """Two mixed nodes without a pool, and an index in Redis: whoever computed a prompt gets its next turns."""
    redis = Redis(tmp_path)
    redis.start()
    try:
        with ExitStack() as stack:
            config = RouterConfig(lookup_timeout_s=5.0, node_key=KEY)
            router = stack.enter_context(open_router(config, residency=redis.url, model=directory))
            url, _ = stack.enter_context(routing(router=router))
            client = stack.enter_context(httpx2.Client(base_url=url, timeout=WAIT_S))
            for name in ("a", "b"):
                options: dict[str, Any] = {"residency": redis.url, "routers": (url,), "node": name, "lease_s": 30.0}
                stack.enter_context(serving(directory, model, **options))
            held = {}
            for i in range(2):
                body = {"prompt": f"{i} {TEXT * 3}", "max_tokens": 4, "ignore_eos": True}
                found = client.post(COMPLETIONS, json=body).json()
                held[i] = found["usage"]["headwater"]["router"]["nodes"]["mixed"]
                until(partial(is_told, redis.url, directory, model, body))
            for i in (0, 1, 1, 0, 0, 0):
                body = {"prompt": f"{i} {TEXT * 3} and more", "max_tokens": 4, "ignore_eos": True}
                found = client.post(COMPLETIONS, json=body).json()
                assert found["usage"]["headwater"]["router"]["nodes"]["mixed"] == held[i]
                assert found["usage"]["prompt_tokens_details"]["cached_tokens"] >= 200
            last = client.get("/state").json()["decisions"][0]
            assert last["decisions"][0]["how"] == "estimate"
            redis.kill()  # the index is silent: nodes take turns
            asked = [client.post(COMPLETIONS, json={"prompt": TEXT, "max_tokens": 1}) for _ in range(4)]
            nodes = [one.json()["usage"]["headwater"]["router"]["nodes"]["mixed"] for one in asked]
            assert set(nodes) == {"a", "b"}
    finally:
        redis.kill()


def is_told(url: str, directory: Path, model: Model, body: dict[str, Any]) -> bool:
    with open_residency(ResidencyConfig(url=url)) as index:
        blocks = model.identity.digest, model.block_tokens
        ask = PrefixLookup(index, read=reader(directory), blocks=lambda: blocks)(COMPLETIONS, body)
        assert ask is not None
        held = ask(5.0)
    return held is not None and bool(held.by_node)


class _Index(Residency):
    """Remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Sequence[BlockKey]] = []

    def lookup(self, keys: Sequence[BlockKey], *, deadline: Deadline) -> Found:
        self.asked.append(keys)
        return Found(len(keys))

    def apply(self, update: Any, *, deadline: Deadline) -> Any:
        raise NotImplementedError

    def nodes(self, *, deadline: Deadline) -> Any:
        raise NotImplementedError

    def last_epoch(self, node: str, *, deadline: Deadline) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        pass


def test_what_cannot_be_read_is_no_fault_of_the_index(directory: Path, model: Model) -> None:
    index = _Index()
    digest, size = model.identity.digest, model.block_tokens
    with_text, without = (
        PrefixLookup(index, read=reader(path), blocks=lambda: (digest, size)) for path in (directory, None)
    )
    chat = {"messages": [{"role": "user", "content": TEXT}]}
    for lookup, endpoint, body, asked in (
        (with_text, COMPLETIONS, {"prompt": TEXT}, [5]),
        (with_text, "/v1/chat/completions", chat, [5]),
        (with_text, COMPLETIONS, {"prompt": list(range(40))}, [2]),
        (without, COMPLETIONS, {"prompt": list(range(40))}, [2]),
        (without, COMPLETIONS, {"prompt": TEXT}, []),
        (with_text, COMPLETIONS, {"prompt": 5}, []),
        (with_text, COMPLETIONS, {"prompt": [1 << 40]}, []),
        (with_text, "/v1/chat/completions", {"messages": []}, []),
    ):
        index.asked.clear()
        ask = lookup(endpoint, body)
        assert (ask is None) == (not asked), body
        assert ask is None or ask(1.0) is not None
        assert [len(keys) for keys in index.asked] == asked, body
    for salt in ("", "team"):  # the keys are those that nodes make
        index.asked.clear()
        ask = with_text(COMPLETIONS, {"prompt": list(range(40)), **({"cache_salt": salt} if salt else {})})
        assert ask is not None
        assert ask(1.0) is not None
        root = replace(model.identity, salt=salt.encode()).root
        assert index.asked == [block_keys(range(40), parent=root, block_tokens=size)]
    nobody = PrefixLookup(index, read=lambda *_: Asking([1] * 64), blocks=lambda: None)
    assert nobody(COMPLETIONS, {}) is None
