"""`/admin/state`, `/admin/stream` and the page: what they say is what is counted, and looking costs nobody anything."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from brain_kit import fail_at
from headwater.core.results import MISS_REASONS
from headwater.engine.models.base import Model
from headwater.metrics import FAMILIES, PREFIX, Metrics, Notice
from headwater.serve import dashboard, page
from headwater.serve.state import MAX_EVENTS, MAX_SHOWN, Flight, Snapshot, TierFacts, document, shares
from headwater.storage.verified import VerifiedStore
from headwater.transfer.executor.worker import Worker
from serve_kit import WAIT_S, Served, directory, model, serving

__all__ = ["directory", "model"]  # fixtures

KEY = "s3cret"
AUTH = {"authorization": f"Bearer {KEY}"}
PROMPT = list(range(1, 100))


@pytest.fixture
def here(directory: Path, model: Model, tmp_path: Path) -> Iterator[Served]:
    """A server with a disk tier that wants a key."""
    disk: dict[str, Any] = {"disk_directory": tmp_path / "disk", "disk_bytes": 16 << 20}
    with serving(directory, model, api_key=KEY, num_blocks=64, **disk) as one:
        yield one


def ask(here: Served, prompt: list[int] = PROMPT, **more: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "temperature": 0, "ignore_eos": True, "max_tokens": 4, **more}
    found = here.post("/v1/completions", body, headers=AUTH)
    assert found.status_code == 200, found.text
    answer: dict[str, Any] = found.json()
    return answer


def state(here: Served, headers: dict[str, str] | None = None) -> dict[str, Any]:
    found = here.get("/admin/state", headers=AUTH if headers is None else headers)
    assert found.status_code == 200, found.text
    assert found.headers["cache-control"] == "no-store"
    said: dict[str, Any] = found.json()
    return said


@contextmanager
def stream(here: Served, **headers: str) -> Iterator[Iterator[dict[str, Any]]]:
    """The documents of a stream."""
    told = {**AUTH, **headers}
    with (
        httpx2.Client(base_url=here.url, timeout=WAIT_S, trust_env=False) as client,
        client.stream("GET", "/admin/stream", headers=told) as answer,
    ):
        if answer.status_code != 200:
            answer.read()
            raise AssertionError(answer.text)
        assert answer.headers["content-type"].startswith("text/event-stream")

        def documents() -> Iterator[dict[str, Any]]:
            for line in answer.iter_lines():
                if line:
                    yield json.loads(line.removeprefix("data: "))

        yield documents()


def board_of(here: Served) -> dashboard.Dashboard:
    """The server's own, to see how many look."""
    app: Any = here.server.config.app
    route = next(route for route in app.routes if route.path == dashboard.STATE)
    board: dashboard.Dashboard = route.endpoint.__self__
    return board


def scraped(here: Served) -> dict[str, dict[tuple[str, ...], float]]:
    """/metrics, as `Metrics.numbers` would have it."""
    text = here.get("/metrics", headers=AUTH).text
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removeprefix(PREFIX)
            labels = FAMILIES[name].labels if name in FAMILIES else ()
            found.setdefault(name, {})[tuple(sample.labels[label] for label in labels)] = sample.value
    return found


# --- what the document says -------------------------------------------------------------------------------------------


def test_numbers_are_those_of_metrics_and_of_usage(here: Served) -> None:
    usages = [ask(here)["usage"] for _ in range(2)]
    usages.append(ask(here, [*PROMPT[:48], *range(150, 200)])["usage"])
    assert here.running.cache.drain(WAIT_S)
    said, told = state(here), scraped(here)
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert sum(said["hit_tokens"].values()) == cached > 0
    assert said["hit_tokens"] == {"device": cached, "disk": 0}
    assert said["hit_tokens"]["device"] == told["hit_tokens_total"]["device",]
    assert said["miss_tokens"] == sum(told["miss_tokens_total"].values()) > 0
    assert {one["reason"]: one["tokens"] for one in said["misses"]} == {
        reason: tokens for (reason,), tokens in told["miss_tokens_total"].items()
    }
    assert said["hit_ratio"] == pytest.approx(cached / (cached + said["miss_tokens"]), rel=1e-5)
    for name, family in (("saved_total", "saved"), ("lost_total", "lost"), ("waited_total", "waited")):
        assert said["seconds"][name] == pytest.approx(told[f"{family}_seconds_total"][()], rel=1e-5)
    seconds = said["seconds"]
    by_tier = sum(seconds["saved"].values()) - sum(seconds["lost"].values())
    assert by_tier == pytest.approx(seconds["saved_total"] - seconds["lost_total"], rel=1e-4, abs=1e-9)
    assert said["requests"]["looked_up"] == {"served": told["requests_total"]["served",]} == {"served": 3}
    assert (said["kind"], said["name"], said["role"], said["ready"]) == (
        "node",
        here.server._service.node,
        "mixed",
        True,
    )
    assert (said["format"], said["model"], said["fleet"]) == (1, here.running.name, None)


def test_bytes_are_those_of_the_stores_and_stay_below_their_limits(here: Served) -> None:
    for i in range(3):
        ask(here, [i, *PROMPT])
    assert here.running.cache.drain(WAIT_S)
    tiers = {tier["name"]: tier for tier in state(here)["tiers"]}
    assert list(tiers) == ["device", "disk"]
    with here.running.cache.still() as brain:
        config, counts = brain.config, brain.slots.counts()
        block_bytes = config.block_bytes
        used = sum(num for slot_state, num in counts.items() if slot_state.name != "FREE")
        pace_s = brain.tiers["disk"].saving.facts()[0]
    assert tiers["device"]["limit_bytes"] == 64 * block_bytes
    assert tiers["device"]["used_bytes"] == used * block_bytes > 0
    fill = here.running.stores["disk"].fill()
    assert fill is not None
    assert 0 < fill.used_bytes < fill.limit_bytes == 16 << 20
    assert [tiers["disk"]["used_bytes"], tiers["disk"]["limit_bytes"]] == list(fill)
    assert pace_s is not None
    assert tiers["disk"]["save_bytes_per_s"] == pytest.approx(1 / pace_s, rel=1e-5)
    assert tiers["disk"]["moved_bytes"]["in"] == scraped(here)["moved_bytes_total"]["disk", "in"]
    assert tiers["disk"]["jobs"]["save done"] >= 3
    assert tiers["disk"]["queued_bytes"] == 0


def test_a_tier_that_is_off_and_a_brain_that_failed_are_said(here: Served) -> None:
    ask(here)
    executor = here.running.cache._executor
    assert isinstance(executor, Worker)
    reader: VerifiedStore = executor._tiers["disk"].reader
    reader._bad._num_bad = reader._bad._max_bad
    ask(here, [7, *PROMPT])
    here.until(lambda: "disk" in here.running.cache.troubles())
    said = state(here)
    disk = said["tiers"][1]
    assert (disk["state"], disk["revivable"], said["tiers"][0]["revivable"]) == ("off", True, False)
    assert disk["why"] == here.running.cache.troubles()["disk"]
    assert said["events"], "that it went off was told"
    assert said["events"][0]["number"] == max(event["number"] for event in said["events"])
    assert abs(said["events"][0]["at_s"] - said["now_s"]) < 2 * WAIT_S
    fail_at(here.running.cache.brain, 0)
    ask(here)
    said = state(here)
    assert said["brain"]["failed"] == here.running.cache.failed
    assert said["tiers"][1]["state"] == "off"
    assert said["can_revive"]
    assert here.post("/admin/revive", {}, headers=AUTH).status_code == 200
    here.until(lambda: state(here)["tiers"][1]["state"] == "closed")
    assert state(here)["brain"]["failed"] is None


def test_requests_in_flight_have_phases(here: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(here)  # so that the engine is warm, and the next step is the request's
    engine = here.running.engine
    go, forward = threading.Event(), engine.model.forward

    def held(*arguments: Any, **options: Any) -> Any:
        assert all(one.num_generated < 3 for one in engine._scheduler.running) or go.wait(WAIT_S)
        return forward(*arguments, **options)

    monkeypatch.setattr(engine.model, "forward", held)
    body = {"prompt": PROMPT, "max_tokens": 30, "ignore_eos": True, "stream": True}
    told = {**AUTH, "x-request-id": "my-request"}
    with ThreadPoolExecutor(1) as thread:  # nothing is sent before the tokens are text, which three need not be
        answer = thread.submit(here.post, "/v1/completions", body, headers=told)
        here.until(lambda: [one["generated_tokens"] for one in state(here)["requests"]["oldest"]] == [3])
        said = state(here)
        assert (said["requests"]["in_flight"], said["requests"]["phases"]) == (1, {"decode": 1})
        (one,) = said["requests"]["oldest"]
        assert (one["id"], one["phase"], one["prompt_tokens"]) == ("my-request", "decode", len(PROMPT))
        assert one["age_s"] > 0
        assert one["cached_tokens"] == 96, "what the request before it computed"
        assert said["engine"]["running"] == 1
        go.set()
        assert answer.result(WAIT_S).status_code == 200
    here.until(lambda: state(here)["requests"]["in_flight"] == 0)
    with here.connect() as half:  # a body that is still coming
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
        half.sendall(f"{head}Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{{".encode())
        here.until(lambda: state(here)["requests"]["phases"] == {"arriving": 1})
    here.until(lambda: state(here)["requests"]["in_flight"] == 0)


@given(st.dictionaries(st.sampled_from(sorted(MISS_REASONS)), st.floats(0, 1e15) | st.integers(0, 10**15)))
def test_shares_add_up_to_a_thousand(counts: dict[str, float]) -> None:
    found = shares(counts)
    assert sum(found.values()) == (1000 if sum(counts.values()) > 0 else 0)
    total = sum(counts.values())
    for name, share in found.items():
        assert abs(share - 1000 * counts[name] / total) < 1 + 1e-6
    assert list(found.values()) == sorted(found.values(), reverse=True)


_FACTS = st.dictionaries(
    st.text(max_size=400),
    st.floats() | st.integers() | st.text(max_size=1000) | st.binary() | st.none() | st.booleans(),
)


@given(
    st.lists(st.tuples(st.text(), _FACTS), max_size=60),
    st.lists(st.tuples(st.text(max_size=200), st.floats() | st.none()), max_size=80),
    st.floats() | st.none(),
)
def test_the_document_is_small_and_any_reader_takes_it(
    events: list[tuple[str, dict[str, Any]]], flights: list[tuple[str, float | None]], pace: float | None
) -> None:
    metrics = Metrics()
    metrics.count("hit_tokens_total", 5, tier="half a \udc80")
    now = Snapshot(
        kind="node",
        name="\udc80" * 500,
        model=None,
        role=None,
        ready=True,
        now_s=1.0,
        numbers=metrics.numbers(),
        tiers=[TierFacts(name="disk", load_s_per_byte=pace, save_s_per_byte=0.0, why="x" * 5000, state="off")],
        engine={"rate": pace},
        flights=[Flight(id=name, phase="waiting", age_s=age_s) for name, age_s in flights],
        events=[Notice(kind, facts, i, 1.0) for i, (kind, facts) in enumerate(events)],
    )
    said = json.dumps(document(now), allow_nan=False)
    assert len(said) < 2 << 20
    read = json.loads(said)
    assert len(read["events"]) == min(len(events), MAX_EVENTS)
    assert len(read["requests"]["oldest"]) == min(len(flights), MAX_SHOWN)
    assert read["requests"]["in_flight"] == len(flights)
    assert len(read["tiers"][0]["why"]) == len(read["name"]) == 300


# --- who may look -----------------------------------------------------------------------------------------------------


def test_it_is_behind_the_key_and_the_page_is_not(here: Served) -> None:
    for path in (dashboard.STATE, dashboard.STREAM):
        for headers in ({}, {"authorization": "Bearer another"}, {"authorization": KEY}):
            found = here.get(path, headers=headers)
            assert (found.status_code, found.json()["error"]["code"]) == (401, "invalid_api_key")
        assert here.get(f"{path}?key={KEY}&api_key={KEY}").status_code == 401, "a key in an address is none"
        assert here.post(path, {}, headers=AUTH).status_code == 405
        assert here.get(f"{path}/", headers=AUTH).status_code == 404
    assert here.get("/admin", headers=AUTH).status_code == 404
    for path, (name, kind) in page.FILES.items():
        found = here.get(path)
        assert found.status_code == 200
        assert found.headers["content-type"] == kind
        assert found.headers["x-content-type-options"] == "nosniff"
        policy = found.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert len(found.content) == len(page.content(path)) + (len("wanted") - len("none") if path == "/" else 0), name
        assert here.post(path, {}).status_code == 405
    assert 'data-key="wanted"' in here.get("/").text
    assert here.get("/dashboard").status_code == 401
    here.until(lambda: here.running.metrics.value("http_requests_total", endpoint="/admin/state") >= 5)


def test_the_page_asks_nobody_else_and_sets_no_markup() -> None:
    for path in page.FILES:
        text = page.content(path).decode()
        for outside in ("https://", "//cdn", "@import", "url("):
            assert outside not in text, path
        assert text.count("http://") == text.count("http://www.w3.org/2000/svg"), path
    scripts = [path for path in page.FILES if path.endswith(".js")]
    script = "".join(page.content(path).decode() for path in scripts)
    assert len(scripts) == 3
    for way in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "localStorage",
        "EventSource",
    ):
        assert way not in script
    assert " style=" not in page.content("/").decode()


def test_a_page_of_another_site_gets_nothing(directory: Path, model: Model) -> None:
    with serving(directory, model, num_blocks=64) as here:  # without a key
        assert 'data-key="none"' in here.get("/").text
        for path in (dashboard.STATE, dashboard.STREAM):
            for site in ("cross-site", "same-site"):
                found = here.get(path, headers={"sec-fetch-site": site})
                assert (found.status_code, found.json()["error"]["code"]) == (403, "cross_site")
                assert "access-control-allow-origin" not in found.headers
        assert here.get(dashboard.STATE, headers={"sec-fetch-site": "same-origin"}).status_code == 200
        for path in ("/", dashboard.STATE):
            with here.connect() as bare:
                bare.sendall(f"GET {path} HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n".encode())
                assert b" 421 " in bare.makefile("rb").readline()


# --- streams ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard, "EVERY_S", 0.01)


def test_a_stream_says_the_state_now_and_again(here: Served) -> None:
    with stream(here) as one, stream(here) as other:
        first = next(one)
        assert first.keys() == state(here).keys() == next(other).keys()
        assert first["miss_tokens"] == 0
        ask(here)
        for documents in (one, other):
            assert next(said for said in documents if said["miss_tokens"])["miss_tokens"] == 96
        assert board_of(here).num_streams == 2
    here.until(lambda: board_of(here).num_streams == 0)


def test_nothing_runs_while_nobody_looks(here: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    board = board_of(here)
    taken: list[object] = []
    take = board._take

    def counted() -> object:
        taken.append(None)
        return take()

    monkeypatch.setattr(board, "_take", counted)
    ask(here)  # it starts a thread that reads bodies
    threads = set(threading.enumerate())
    with stream(here) as one:
        next(one)
        next(one)
    here.until(lambda: board.num_streams == 0)
    num = len(taken)
    ask(here)
    time.sleep(3 * dashboard.EVERY_S)
    assert len(taken) == num
    assert {one.name for one in set(threading.enumerate()) - threads} <= {"AnyIO worker thread"}


def test_too_many_streams_are_told_so(here: Served, hasty: None) -> None:
    with ExitStack() as stack:
        streams = [stack.enter_context(stream(here)) for _ in range(dashboard.MAX_STREAMS)]
        for one in streams:
            next(one)
        found = here.get(dashboard.STREAM, headers=AUTH)
        assert (found.status_code, found.json()["error"]["code"]) == (429, "too_many_streams")
        assert found.headers["retry-after"] == "1"
        assert state(here)["ready"], "the document can still be had"
        ask(here)
    here.until(lambda: board_of(here).num_streams == 0)
    with stream(here) as one:
        next(one)


def test_a_small_door_has_fewer_streams(directory: Path, model: Model, hasty: None) -> None:
    with serving(directory, model, num_blocks=64, door={"max_connections": 4}) as here:
        with stream(here) as one:
            next(one)
            assert here.get(dashboard.STREAM).status_code == 429
        here.until(lambda: board_of(here).num_streams == 0)


def test_a_stream_ends_by_itself(here: Served, hasty: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard, "LASTS_S", 0.2)
    with stream(here) as one:
        assert len(list(one)) >= 1
    monkeypatch.setattr(dashboard, "LASTS_S", WAIT_S)
    with stream(here, **{"x-headwater-timeout-s": "0.2"}) as one:
        assert len(list(one)) >= 1
    assert here.get(dashboard.STREAM, headers={**AUTH, "x-headwater-timeout-s": "soon"}).status_code == 400
    with httpx2.Client(base_url=here.url, timeout=WAIT_S, trust_env=False) as client:
        assert client.head(dashboard.STREAM, headers=AUTH).status_code == 200
    here.until(lambda: board_of(here).num_streams == 0)


def test_a_client_that_never_reads_holds_nothing(
    directory: Path, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboard, "EVERY_S", 0.0)  # as much as it would take
    with serving(directory, model, num_blocks=64, door={"patience_s": 0.5}) as here:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with connection:
            connection.settimeout(WAIT_S)
            host, _, port = here.url.removeprefix("http://").partition(":")
            connection.connect((host, int(port)))
            connection.sendall(f"GET {dashboard.STREAM} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            here.until(lambda: board_of(here).num_streams == 1)
            here.until(lambda: board_of(here).num_streams == 0)
        assert here.running.metrics.value("connections_cut_total", why="unread") == 1
        with stream(here) as one:
            next(one)


def test_a_client_that_leaves_is_noticed(here: Served) -> None:
    with here.connect() as connection:
        connection.sendall(
            f"GET {dashboard.STREAM} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode()
        )
        assert connection.recv(1)
        here.until(lambda: board_of(here).num_streams == 1)
    here.until(lambda: board_of(here).num_streams == 0)


def test_a_server_that_stops_does_not_wait_for_who_looks(here: Served) -> None:
    with stream(here) as one:
        next(one)
        here.server.should_exit = True
        assert list(one) is not None  # it ends, whole
        here.thread.join(WAIT_S)
        assert not here.thread.is_alive()
    assert here.running.metrics.value("connections_cut_total") == 0
