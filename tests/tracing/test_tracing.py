"""Traces: spans as a collector gets them over HTTP, from servers and routers; and a collector that does not answer."""

import http.server
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from headwater.cache.state import Brain
from headwater.config.cache import CacheConfig, TierConfig
from headwater.config.serve import ServeConfig
from headwater.core import events as ev
from headwater.core.errors import InvalidConfig
from headwater.core.keys import BlockKey
from headwater.engine.models.base import Model
from headwater.engine.scheduler import QueueFull
from headwater.serve.answer import Answer
from headwater.serve.errors import too_late
from headwater.tracing.jobs import JobSpans
from headwater.tracing.otel import OtelTracing
from headwater.tracing.spans import NO_SPAN, NO_TRACING
from router_kit import world
from serve_kit import WAIT_S, Served, directory, model, serving

__all__ = ["directory", "model"]  # fixtures

PROMPT = list(range(1, 100))
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"
UNSAMPLED = f"00-{TRACE}-b7ad6b7169203331-00"


class Collector:
    """Takes spans over HTTP as a collector does, and keeps them."""

    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []
        self.resources: list[dict[str, Any]] = []
        self.paths: set[str] = set()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.take(self.path, self.rfile.read(int(self.headers["content-length"])), self.headers)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = False
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def take(self, path: str, body: bytes, headers: Any) -> None:
        self.paths.add(path)
        assert headers["content-type"] == "application/x-protobuf"
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resources.append({one.key: value_of(one.value) for one in resource.resource.attributes})
            for scope in resource.scope_spans:
                self.spans += [
                    {
                        "name": span.name,
                        "trace": span.trace_id.hex(),
                        "id": span.span_id.hex(),
                        "parent": span.parent_span_id.hex(),
                        "kind": span.kind,
                        "begin": span.start_time_unix_nano / 1e9,
                        "end": span.end_time_unix_nano / 1e9,
                        "error": span.status.code == 2,
                        **{one.key: value_of(one.value) for one in span.attributes},
                    }
                    for span in scope.spans
                ]

    def named(self, name: str) -> list[dict[str, Any]]:
        return [span for span in self.spans if span["name"] == name]

    def one(self, name: str) -> dict[str, Any]:
        (span,) = self.named(name)
        return span

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def value_of(value: Any) -> Any:
    kind = value.WhichOneof("value")
    found = getattr(value, kind)
    return [value_of(one) for one in found.values] if kind == "array_value" else found


@pytest.fixture
def told() -> Iterator[Collector]:
    found = Collector()
    yield found
    found.close()


@pytest.fixture
def traced(told: Collector, directory: Path, model: Model, tmp_path: Path) -> Callable[..., Any]:
    """A server with a disk tier; its spans have come when the block is left."""

    @contextmanager
    def start(**options: Any) -> Iterator[Served]:
        tiers: dict[str, Any] = {"disk_directory": tmp_path / "disk", "disk_bytes": 16 << 20, "num_blocks": 64}
        with serving(directory, model, traces=told.url, **tiers | options) as one:
            yield one

    return start


def test_a_request_and_what_the_cache_did_for_it(told: Collector, traced: Callable[..., Any]) -> None:
    before_s = time.time()
    with traced() as here:
        here.complete(PROMPT, max_tokens=3)
        assert here.running.cache.drain(WAIT_S)
    with traced() as here:  # from disk
        found = here.post(
            "/v1/completions",
            {"prompt": PROMPT, "max_tokens": 3, "temperature": 0, "ignore_eos": True},
            headers={"traceparent": PARENT, "x-request-id": "mine"},
        )
        assert found.status_code == 200
    name = f"text_completion {here.running.name}"
    assert told.paths == {"/v1/traces"}
    assert {one["service.name"] for one in told.resources} == {"headwater"}

    stored, loaded = told.named(name)
    assert stored["parent"] == ""
    assert (loaded["trace"], loaded["parent"], loaded["kind"]) == (TRACE, "b7ad6b7169203331", 2)
    assert loaded["headwater.request_id"] == "mine"
    assert loaded["gen_ai.operation.name"] == "text_completion"
    assert loaded["gen_ai.request.model"] == here.running.name
    assert loaded["gen_ai.usage.input_tokens"] == len(PROMPT)
    assert loaded["gen_ai.usage.output_tokens"] == loaded["gen_ai.request.max_tokens"] == 3
    assert loaded["gen_ai.response.finish_reasons"] == ["length"]
    assert loaded["gen_ai.usage.cache_read.input_tokens"] == loaded["headwater.cached_tokens.disk"] > 0
    assert stored["gen_ai.usage.cache_read.input_tokens"] == 0
    assert not stored["error"]
    assert not loaded["error"]

    (save,) = [span for span in told.named("save disk") if span["parent"] == stored["id"]]
    assert save["headwater.bytes"] > 0
    assert save["headwater.results.stored"] == save["headwater.blocks"] > 0
    (load,) = told.named("load disk")
    assert load["parent"] == loaded["id"]
    assert load["headwater.results.hit"] == load["headwater.blocks"]
    probes = {span["parent"]: span for span in told.named("probe disk")}
    assert set(probes) == {stored["id"], loaded["id"]}

    assert {span["trace"] for span in told.spans} == {stored["trace"], TRACE}
    for root in (stored, loaded):
        parts = [
            one for one in told.spans if one["parent"] == root["id"] and one["name"] in ("queue", "prefill", "decode")
        ]
        assert [one["name"] for one in sorted(parts, key=lambda one: one["begin"])] == ["queue", "prefill", "decode"]
        for span in parts:
            assert before_s - 1 < root["begin"] - 0.01 <= span["begin"] <= span["end"] <= root["end"] + 0.01
    text = json.dumps(told.spans)
    assert str(PROMPT[5:9]).strip("[]") not in text  # nothing of what a client wrote


def test_choices_and_streams(told: Collector, traced: Callable[..., Any]) -> None:
    with traced() as here:
        body = {"prompt": PROMPT, "max_tokens": 2, "n": 2, "stream": True, "ignore_eos": True}
        assert here.post("/v1/completions", body).status_code == 200
    root = told.one(f"text_completion {here.running.name}")
    assert root["headwater.stream"] is True
    assert root["gen_ai.request.choice.count"] == 2
    assert sorted(span["headwater.choice"] for span in told.named("decode")) == [0, 1]
    assert root["gen_ai.usage.output_tokens"] == 4


def test_who_says_that_it_is_not_to_be_traced_is_not(told: Collector, traced: Callable[..., Any]) -> None:
    with traced() as here:
        body = {"prompt": PROMPT, "max_tokens": 1}
        assert here.post("/v1/completions", body, headers={"traceparent": UNSAMPLED}).status_code == 200
    assert not told.spans


@pytest.mark.fault("X26")
@pytest.mark.parametrize("said", ["", "nonsense", "00-0-0-0", "x" * 5000, f"{PARENT}-more"])
def test_a_traceparent_that_is_none_begins_a_trace(
    told: Collector, traced: Callable[..., Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """X26: a line in the log for each that was too long."""
    with traced() as here:
        body = {"prompt": PROMPT, "max_tokens": 1}
        assert here.post("/v1/completions", body, headers={"traceparent": said}).status_code == 200
    root = told.one(f"text_completion {here.running.name}")
    assert root["parent"] == ""
    assert not [line for line in caplog.records if line.name.startswith("opentelemetry")]


def test_what_is_refused_says_why(told: Collector, traced: Callable[..., Any]) -> None:
    with traced() as here:
        assert here.post("/v1/completions", {"prompt": PROMPT, "max_tokens": -1}).status_code == 400
    root = told.one(f"text_completion {here.running.name}")
    assert root["error"]
    assert root["error.type"]
    assert not told.named("prefill")


def test_a_client_that_leaves(told: Collector, traced: Callable[..., Any]) -> None:
    with traced() as here:
        body = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": True}
        with here.raw(body) as line:
            line.recv(1)
        here.until_free()
    root = told.one(f"text_completion {here.running.name}")
    assert root["error.type"] == "gone"


def test_nothing_is_followed_for_ever(told: Collector, traced: Callable[..., Any]) -> None:
    with traced() as here:
        for _ in range(3):
            here.complete(PROMPT, max_tokens=1)
        assert here.running.cache.drain(WAIT_S)
        tracing = here.running.tracing
        assert isinstance(tracing, OtelTracing)
        here.until(lambda: not tracing._followed)


def test_a_router_s_attempts_are_part_of_the_trace_and_nodes_hear_of_it(told: Collector) -> None:
    tracing = OtelTracing(told.url, service="router", instance="one")
    with world(tracing=tracing) as here:
        prefill, decode = here.add("p1", "prefill"), here.add("d1", "decode")
        body = {"prompt": "once", "max_tokens": 5}
        assert here.client.post("/v1/completions", json=body, headers={"traceparent": PARENT}).status_code == 200
        here.until_idle()
    tracing.close()
    root = told.one("route /v1/completions")
    assert (root["trace"], root["parent"]) == (TRACE, "b7ad6b7169203331")
    assert (root["headwater.outcome"], root["headwater.attempts"]) == ("answered", 2)
    for phase, node in (("prefill", prefill), ("decode", decode)):
        attempt = told.one(phase)
        assert attempt["parent"] == root["id"]
        assert attempt["headwater.node"] == {"prefill": "p1", "decode": "d1"}[phase]
        assert node.asked[0].traceparent == f"00-{TRACE}-{attempt['id']}-01"


def test_a_router_that_traces_nothing_passes_on_what_it_was_told() -> None:
    with world() as here:
        node = here.add("m1", "mixed")
        for said in (PARENT, "nonsense", ""):
            headers = {"traceparent": said}
            assert here.client.post("/v1/completions", json={"prompt": "x"}, headers=headers).status_code == 200
        assert [one.traceparent for one in node.asked] == [PARENT, "", ""]


def test_what_a_router_could_not_have_answered(told: Collector) -> None:
    tracing = OtelTracing(told.url, service="router", instance="one")
    with world(tracing=tracing, queue_timeout_s=0.05) as here:
        assert here.complete().status_code == 503
    tracing.close()
    root = told.one("route /v1/completions")
    assert root["error.type"] == "refused"


def test_a_collector_that_is_gone_or_hangs_costs_traces_only(directory: Path, model: Model) -> None:
    class Hangs(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            over.wait(WAIT_S)

        def log_message(self, *args: object) -> None:
            pass

    over = threading.Event()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hangs)
    server.daemon_threads = False  # so that closing it waits for them
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        for url in (f"http://127.0.0.1:{server.server_port}", "http://127.0.0.1:1"):
            with serving(directory, model, traces=url) as here:
                for _ in range(3):
                    here.complete(PROMPT, max_tokens=1)
    finally:
        over.set()
        server.shutdown()
        thread.join()
        server.server_close()
        for left in threading.enumerate():  # they are daemons, and nobody waits for them but this test
            if left.name in ("headwater traces", "OtelBatchSpanRecordProcessor"):
                left.join(WAIT_S)


@pytest.mark.parametrize(
    "url", ["", "collector:4318", "ftp://here", "http://", "http://h:0", "http://h:1/x", "http://h:1?a", "http://a b:1"]
)
def test_a_collector_that_cannot_be_is_refused_before_anything_is_loaded(url: str) -> None:
    with pytest.raises(InvalidConfig, match="--traces"):
        ServeConfig(model=Path("nowhere"), traces=url)
    with pytest.raises(InvalidConfig) as raised:
        ServeConfig(model=Path("nowhere"), traces="http://user:secret@h:1")
    assert "secret" not in str(raised.value)


def test_settings_of_the_sdk_that_do_not_fit_ours(monkeypatch: pytest.MonkeyPatch, told: Collector) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "100000")
    OtelTracing(told.url, service="one", instance="one").close()


def test_a_stream_that_breaks_off_says_so(
    told: Collector, traced: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, pieces = Answer.next, itertools.count()

    async def stops(answer: Answer) -> Any:
        if next(pieces) == 2:
            raise too_late(1.0)
        return await real(answer)

    monkeypatch.setattr(Answer, "next", stops)
    with traced() as here:
        body = {"prompt": PROMPT, "max_tokens": 9, "ignore_eos": True, "stream": True}
        found = here.post("/v1/completions", body)
        assert (found.status_code, "[DONE]" in found.text) == (200, False)
    root = told.one(f"text_completion {here.running.name}")
    assert (root["error"], root["error.type"]) == (True, "timeout")


def test_what_the_engine_does_not_take_is_not_followed(
    told: Collector, traced: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with traced() as here:

        def full(*requests: object) -> None:
            raise QueueFull("no")

        monkeypatch.setattr(here.running.engine, "submit", full)
        assert here.post("/v1/completions", {"prompt": PROMPT}).status_code == 429
        assert not here.running.tracing._followed


def test_jobs_of_a_cache_that_ends_end_with_it(told: Collector) -> None:
    tracing = OtelTracing(told.url, service="one", instance="one")
    root = tracing.begin("root", at_s=time.monotonic(), traceparent="")
    tracing.follow("a", root)
    spans = JobSpans(tracing)
    brain = Brain(CacheConfig(num_slots=4, block_tokens=1, block_bytes=1, tiers=(TierConfig(name="disk"),)))
    spans.began(brain)
    arrived = ev.Arrived(now_s=time.monotonic(), request="a#0", keys=(BlockKey(bytes(32)),), root=BlockKey(b"r" * 32))
    spans.heard(arrived, brain.handle(arrived))
    spans.ended("")
    root.end(time.monotonic())
    tracing.close()
    assert told.one("probe disk")["error.type"] == "cancelled"


def test_nothing_costs_nothing() -> None:
    assert NO_TRACING.begin("x", at_s=0.0, traceparent=PARENT) is NO_SPAN
    assert NO_SPAN.child("y", at_s=0.0) is NO_SPAN
    assert NO_SPAN.traceparent == ""
