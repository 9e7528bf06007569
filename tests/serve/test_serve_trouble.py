"""The server when things go wrong: bad bodies, limits, clients that leave, an engine that fails, the end."""

import json
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.config.serve import ServeConfig
from headwater.core.errors import InvalidConfig
from headwater.engine.models.base import Model
from headwater.engine.request import Output, Request, RequestPhase, Sampling
from headwater.serve.sockets import listen
from serve_kit import Served, directory, model, served, serving

__all__ = ["directory", "model", "served"]  # fixtures

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
LONG: dict[str, Any] = {
    "prompt": "on and on",
    "max_tokens": 6000,
    "temperature": 0,
    "ignore_eos": True,
}  # nobody waits for its end


def check_error(found: httpx2.Response, status: int, param: str | None = None, code: str | None = None) -> str:
    assert found.status_code == status, found.text
    error = found.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert code is None or error["code"] == code
    assert error["message"]
    assert "Traceback" not in found.text
    return str(error["message"])


# --- what a client gets wrong -----------------------------------------------------------------------------------------

BAD: list[tuple[str, Any, str | None]] = [
    (COMPLETIONS, {}, "prompt"),
    (COMPLETIONS, {"prompt": 5}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": [1, "a"]}, "prompt"),
    (COMPLETIONS, {"prompt": [True]}, "prompt"),
    (COMPLETIONS, {"prompt": ["a", 5]}, "prompt"),
    (COMPLETIONS, {"prompt": ["a", ["b"]]}, "prompt"),
    (COMPLETIONS, {"prompt": [[]]}, "prompt"),
    (COMPLETIONS, {"prompt": ["a"] * 2049}, "prompt"),
    (COMPLETIONS, {"prompt": ["a"] * 273}, "prompt"),
    (COMPLETIONS, {"prompt": ["a", [1, 100_000]]}, "prompt"),
    (COMPLETIONS, {"prompt": [100_000]}, "prompt"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt"),
    (COMPLETIONS, {"prompt": [10**30]}, "prompt"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": "5"}, "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": True}, "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "temperature": -1}, "temperature"),
    (COMPLETIONS, {"prompt": "a", "temperature": 10**400}, "temperature"),
    (COMPLETIONS, {"prompt": "a", "temperature": "hot"}, "temperature"),
    (COMPLETIONS, {"prompt": "a", "top_p": 0}, "top_p"),
    (COMPLETIONS, {"prompt": "a", "top_p": 1.1}, "top_p"),
    (COMPLETIONS, {"prompt": "a", "seed": 1 << 63}, "seed"),
    (COMPLETIONS, {"prompt": "a", "stop": ""}, "stop"),
    (COMPLETIONS, {"prompt": "a", "stop": [1]}, "stop"),
    (COMPLETIONS, {"prompt": "a", "stop": ["a"] * 17}, "stop"),
    (COMPLETIONS, {"prompt": "a", "stop": "a" * 257}, "stop"),
    (COMPLETIONS, {"prompt": "a", "stream": "yes"}, "stream"),
    (COMPLETIONS, {"prompt": "a", "stream_options": {}}, "stream_options"),
    (COMPLETIONS, {"prompt": "a", "stream": True, "stream_options": []}, "stream_options"),
    (
        COMPLETIONS,
        {"prompt": "a", "stream": True, "stream_options": {"include_usage": 1}},
        "stream_options.include_usage",
    ),
    (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "logprobs"),
    (COMPLETIONS, {"prompt": "a", "logprobs": True}, "logprobs"),
    (COMPLETIONS, {"prompt": "a", "cache_salt": ""}, "cache_salt"),
    (COMPLETIONS, {"prompt": "a", "cache_salt": 5}, "cache_salt"),
    (COMPLETIONS, {"prompt": "a", "model": 5}, "model"),
    (COMPLETIONS, {"prompt": "a", "n": 0}, "n"),
    (COMPLETIONS, {"prompt": "a", "n": 129}, "n"),
    (COMPLETIONS, {"prompt": "a", "n": True}, "n"),
    (COMPLETIONS, {"prompt": ["a", "b", "c"], "n": 100}, "n"),
    (COMPLETIONS, {"prompt": "a", "best_of": 2}, "best_of"),
    (COMPLETIONS, {"prompt": "a", "echo": 1}, "echo"),
    (COMPLETIONS, {"prompt": "a", "echo": True, "logprobs": 0}, "echo"),
    (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"5": 101}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"5": True}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"five": 1}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"-5": 1}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"264": 1}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": [1]}, "logit_bias"),
    (COMPLETIONS, {"prompt": "a", "presence_penalty": 2.5}, "presence_penalty"),
    (COMPLETIONS, {"prompt": "a", "frequency_penalty": "much"}, "frequency_penalty"),
    (COMPLETIONS, {"prompt": "a", "repetition_penalty": 0}, "repetition_penalty"),
    (COMPLETIONS, {"prompt": "a", "repetition_penalty": 11}, "repetition_penalty"),
    (COMPLETIONS, {"prompt": "a", "top_k": -2}, "top_k"),
    (COMPLETIONS, {"prompt": "a", "top_k": 1.5}, "top_k"),
    (COMPLETIONS, {"prompt": "a", "min_p": 1.5}, "min_p"),
    (COMPLETIONS, {"prompt": "a", "min_tokens": 17}, "min_tokens"),
    (COMPLETIONS, {"prompt": "a", "min_tokens": -1}, "min_tokens"),
    (COMPLETIONS, {"prompt": "a", "stop_token_ids": 5}, "stop_token_ids"),
    (COMPLETIONS, {"prompt": "a", "stop_token_ids": [-1]}, "stop_token_ids"),
    (COMPLETIONS, {"prompt": "a", "stop_token_ids": [264]}, "stop_token_ids"),
    (COMPLETIONS, {"prompt": "a", "stop_token_ids": [1] * 257}, "stop_token_ids"),
    (
        COMPLETIONS,
        {"prompt": "a", "stream": True, "stream_options": {"continuous_usage_stats": True}},
        "stream_options.continuous_usage_stats",
    ),
    (COMPLETIONS, {"prompt": "a", "metadata": "mine"}, "metadata"),
    (COMPLETIONS, {"prompt": "a", "user": 5}, "user"),
    (CHAT, {}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": ["hi"]}, "messages[0]"),
    (CHAT, {"messages": [*HI, {"role": "tool", "content": "x"}]}, "messages[1].role"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    (CHAT, {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
    (CHAT, {"messages": HI, "tools": [{"type": "function"}]}, "tools"),
    (CHAT, {"messages": HI, "response_format": {"type": "json_schema"}}, "response_format"),
    (CHAT, {"messages": HI, "top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"messages": HI, "logprobs": 2}, "logprobs"),
    (CHAT, {"messages": HI, "max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {"messages": HI, "n": 0}, "n"),
    (CHAT, {"messages": HI, "chat_template_kwargs": []}, "chat_template_kwargs"),
    (CHAT, {"messages": HI, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
]


def test_a_wrong_field_is_named(served: Served) -> None:
    with httpx2.Client(base_url=served.url, timeout=60) as client:
        for path, body, param in BAD:
            check_error(client.post(path, json=body), 400, param)
        half = '{"prompt": "a \\ud800 b"}'
        found = client.post(COMPLETIONS, content=half, headers={"content-type": "application/json"})
        assert "surrogate" in check_error(found, 400, "prompt")


def test_what_is_not_a_request_is_refused(served: Served) -> None:
    as_json = {"content-type": "application/json"}
    for body in (b"", b"{", b"[]", b"null", b'"a"', b"\xff\xfe", b'{"prompt": NaN}', b"[" * 100_000, b"1" * 5000):
        check_error(served.post(COMPLETIONS, content=body, headers=as_json), 400, code="invalid_json")
    deep = b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}"
    check_error(served.post(COMPLETIONS, content=deep, headers=as_json), 400, "prompt")
    plain = {"content-type": "text/plain"}
    check_error(served.post(COMPLETIONS, content=b'{"prompt": "a"}', headers=plain), 415)
    check_error(served.post(COMPLETIONS, {"prompt": "a", "model": "other"}), 404, "model", "model_not_found")
    check_error(served.get("/v1/models/other"), 404, "model", "model_not_found")
    check_error(served.get("/nowhere"), 404, code="not_found")
    check_error(served.get("/health/"), 404)
    refused = served.get(COMPLETIONS)
    check_error(refused, 405, code="method_not_allowed")
    assert refused.headers["allow"] == "POST"


def test_limits_of_body_and_prompt(directory: Path, model: Model) -> None:
    with serving(directory, model, num_blocks=4, max_body_bytes=2000) as served:
        big = {"prompt": "a" * 2000}
        check_error(served.post(COMPLETIONS, big), 413, code="body_too_large")
        chunks = (chunk.encode() for chunk in ['{"prompt": "', *["a" * 100] * 100, '"}'])
        found = served.post(COMPLETIONS, content=chunks, headers={"content-type": "application/json"})
        check_error(found, 413, code="body_too_large")
        check_error(served.post(COMPLETIONS, {"prompt": "a" * 64}), 400, "prompt", "context_length_exceeded")
        found = served.post(COMPLETIONS, {"prompt": "a" * 60, "max_tokens": 4})
        assert "61 tokens and 4" in check_error(found, 400, "max_tokens", "context_length_exceeded")
        served.complete("a" * 60, max_tokens=3)
        assert served.complete("a" * 60)["usage"]["completion_tokens"] == 3  # as many as there is room for
        chat = served.post(CHAT, {"messages": HI, "ignore_eos": True}).json()
        assert chat["usage"]["total_tokens"] == 64


def test_the_key(directory: Path, model: Model) -> None:
    with serving(directory, model, api_key="sesame") as served:
        assert served.get("/health").status_code == 200
        for path in ("/v1/models", "/metrics", "/nowhere"):
            check_error(served.get(path), 401, code="invalid_api_key")
            for wrong in ("Bearer sesam", "Bearer sesame2", "Basic sesame", "sesame", "Bearer \u00e9", "Bearer"):
                headers = {"authorization": wrong.encode("latin-1")}
                check_error(served.get(path, headers=headers), 401, code="invalid_api_key")
        assert served.get("/v1/models", headers={"authorization": "bearer sesame"}).status_code == 200
        with served.openai("sesame") as client:
            client.completions.create(model="tiny", prompt="a", max_tokens=1)
        with served.openai("guess") as client, pytest.raises(openai.AuthenticationError):
            client.completions.create(model="tiny", prompt="a", max_tokens=1)


def test_whatever_a_body_holds_it_is_never_our_fault(directory: Path, model: Model) -> None:
    scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
    anything = st.recursive(
        scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
    )
    names = [
        "model",
        "temperature",
        "top_p",
        "seed",
        "stop",
        "logprobs",
        "top_logprobs",
        "n",
        "stream",
        "tools",
        "echo",
    ]
    names += ["stream_options", "cache_salt", "ignore_eos", "response_format", "max_completion_tokens", "best_of"]
    names += ["logit_bias", "top_k", "min_p", "min_tokens", "stop_token_ids", "repetition_penalty", "metadata"]
    names += ["presence_penalty", "frequency_penalty", "chat_template_kwargs", "skip_special_tokens", "unheard_of"]
    prompts = {COMPLETIONS: st.text() | st.lists(st.integers(0, 263)) | anything}
    message = st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system"]) | anything, "content": st.text() | anything}
    )
    prompts[CHAT] = st.lists(message, min_size=1, max_size=3) | anything
    with serving(directory, model) as served, httpx2.Client(base_url=served.url, timeout=60) as client:

        @given(st.data(), st.sampled_from([COMPLETIONS, CHAT]))
        @settings(max_examples=150)
        def send(data: st.DataObject, path: str) -> None:
            body = data.draw(st.dictionaries(st.sampled_from(names), anything, max_size=3))
            body["prompt" if path == COMPLETIONS else "messages"] = data.draw(prompts[path])
            content = json.dumps({"max_tokens": 2, **body})
            found = client.post(path, content=content, headers={"content-type": "application/json"})
            assert found.status_code in (200, 400, 404), (content, found.text)
            if found.status_code != 200:
                assert set(found.json()["error"]) == {"message", "type", "param", "code"}

        send()


# --- too many, and those who leave ------------------------------------------------------------------------------------


def test_a_full_queue_sends_clients_away(directory: Path, model: Model) -> None:
    with serving(directory, model, max_running=1, max_waiting=1) as served:
        with served.raw(LONG), served.raw(LONG):
            served.until(lambda: served.running.engine.num_requests == 2)
            found = served.post(COMPLETIONS, {"prompt": "a"})
            check_error(found, 429, code="queue_full")
            assert int(found.headers["retry-after"]) >= 1
            with served.openai() as client, pytest.raises(openai.RateLimitError):
                client.completions.create(model="tiny", prompt="a")
            assert served.get("/health").status_code == 200
        served.until_free()
        served.complete("a", max_tokens=1)


def test_a_burst_into_an_idle_engine_is_served_up_to_the_limit(directory: Path, model: Model) -> None:
    with serving(directory, model, max_running=8, max_waiting=1) as served, ThreadPoolExecutor(9) as pool:
        found = pool.map(lambda i: served.complete(f"prompt {i}", max_tokens=8), range(9))
        assert all(one["usage"]["completion_tokens"] == 8 for one in found)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_everything(served: Served, *, stream: bool) -> None:
    with served.raw({**LONG, "stream": stream}) as connection:
        if stream:
            assert b"data: " in connection.recv(10_000) + connection.recv(10_000)
        served.until(lambda: served.running.engine.num_computed_tokens > 20)
        assert served.running.engine.num_requests == 1
    served.until_free()
    assert served.running.engine.num_computed_tokens < LONG["max_tokens"]


def test_one_that_leaves_while_it_waits_frees_its_place(directory: Path, model: Model) -> None:
    with serving(directory, model, max_running=1) as served, served.raw(LONG):
        served.until(lambda: served.running.engine.num_requests == 1)
        with served.raw(LONG), served.raw({**LONG, "stream": True}):
            served.until(lambda: served.running.engine.num_requests == 3)
        served.until(lambda: served.running.engine.num_requests == 1)


def test_a_client_that_reads_nothing_holds_up_nobody(served: Served) -> None:
    with served.raw({**LONG, "max_tokens": 200, "stream": True}):
        served.until(lambda: served.running.engine.num_requests == 1)
        served.until(lambda: served.running.engine.num_requests == 0)  # the engine is done with it
        served.complete("a", max_tokens=1)


def test_leaving_in_the_middle_of_a_body_is_no_error(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    with served.raw({}) as connection:
        connection.recv(10_000)
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
        connection.sendall(b'Content-Length: 100\r\n\r\n{"prompt":')
    metrics = served.running.metrics
    served.until(lambda: metrics.value("http_requests_total", endpoint=COMPLETIONS, status="gone") == 1)
    assert "Traceback" not in caplog.text


def test_a_storm_of_preemptions_and_departures_leaves_nothing(directory: Path, model: Model) -> None:
    with serving(directory, model, num_blocks=16, max_running=8) as served:
        plain = {i: served.complete(f"storm {i}", max_tokens=60)["choices"][0]["text"] for i in range(4)}
        preemptions: list[int] = []

        def ask(number: int) -> None:
            chance = random.Random(number)
            body = {**LONG, "prompt": f"storm {number % 4}", "max_tokens": 60, "stream": chance.random() < 0.5}
            if chance.random() < 0.5:
                with served.raw(body):
                    time.sleep(chance.random() * 0.2)
                return
            answer = served.complete(body["prompt"], max_tokens=60)
            preemptions.append(answer["usage"]["headwater"]["preemptions"])
            assert answer["choices"][0]["text"] == plain[number % 4]

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(ask, range(32)))
        served.until_free()
        assert sum(preemptions) > 0  # otherwise the storm was none


def test_a_preempted_request_can_be_cancelled(directory: Path, model: Model) -> None:
    with serving(directory, model, num_blocks=12) as small:
        engine = small.running.engine
        for _ in range(5):
            outputs: list[Output] = []
            requests = [
                Request(
                    name=f"{i}",
                    prompt=[i] * 20,
                    sampling=Sampling(max_tokens=150, temperature=0, ignore_eos=True),
                    listen=outputs.append,
                )
                for i in range(4)
            ]
            for request in requests:
                engine.submit(request)
            small.until(lambda: any(one.preemptions for one in requests))  # noqa: B023
            for request in sorted(requests, key=lambda one: one.phase is not RequestPhase.WAITING):
                engine.cancel(request)
            small.until_free()


# --- our own faults, and the end --------------------------------------------------------------------------------------


def test_a_failing_step_is_a_500_that_tells_nothing(
    served: Served, model: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: object, **options: object) -> torch.Tensor:
        raise RuntimeError("the secret place /root/weights")

    with monkeypatch.context() as patch:
        patch.setattr(model, "forward", fail)
        for stream in (False, True):
            found = served.post(COMPLETIONS, {"prompt": "a", "stream": stream})
            check_error(found, 500, code="internal_error")
            assert "secret" not in found.text
    assert "the secret place" in caplog.text
    served.until_free()
    served.complete("a", max_tokens=1)


def test_a_fault_in_the_server_is_a_500_that_tells_nothing(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: object, **options: object) -> list[int]:
        raise RuntimeError("the secret place /root/weights")

    with monkeypatch.context() as patch:
        patch.setattr(served.running.tokenizer, "encode", fail)
        found = served.post(COMPLETIONS, {"prompt": "a"})
    check_error(found, 500, code="internal_error")
    assert "secret" not in found.text
    served.until(lambda: "the secret place" in caplog.text)
    served.until(lambda: served.running.metrics.value("http_requests_total", status="500") == 1)


def test_an_answer_that_takes_too_long_is_given_up(directory: Path, model: Model) -> None:
    with serving(directory, model, request_timeout_s=0.2) as served:
        check_error(served.post(COMPLETIONS, LONG), 504, code="timeout")
        served.until_free()
        assert '"code":"timeout"' in served.post(COMPLETIONS, {**LONG, "stream": True}).text


def test_the_end_of_the_server_is_told_to_those_who_wait(directory: Path, model: Model) -> None:
    with serving(directory, model, max_running=1) as served:
        heard: dict[str, Callable[[], httpx2.Response]] = {}
        with ThreadPoolExecutor(2) as pool:
            heard["stream"] = pool.submit(served.post, COMPLETIONS, {**LONG, "stream": True}).result
            served.until(lambda: served.running.engine.num_computed_tokens > 20)
            heard["waiting"] = pool.submit(served.post, COMPLETIONS, LONG).result
            served.until(lambda: served.running.engine.num_requests == 2)
            served.stop()
            assert '"code":"shutting_down"' in heard["stream"]().text
            assert "[DONE]" not in heard["stream"]().text
            check_error(heard["waiting"](), 503, code="shutting_down")
        served.until_free()
        with pytest.raises(httpx2.ConnectError):
            served.get("/health")


def test_an_engine_that_stopped_is_not_healthy(directory: Path, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(directory, model, survives=False) as served:
        monkeypatch.setattr(served.running.engine.connector, "may_start", lambda *_: 1 / 0)
        check_error(served.post(COMPLETIONS, {"prompt": "a"}), 500, code="internal_error")
        check_error(served.get("/health"), 503, code="not_running")
        check_error(served.post(COMPLETIONS, {"prompt": "a"}), 503)


# --- options ----------------------------------------------------------------------------------------------------------


def test_a_taken_port() -> None:
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(InvalidConfig, match=f"cannot listen on port {port} of 127.0.0.1"):
            listen("127.0.0.1", port)
        with listen("127.0.0.1", port, or_any=True) as second:
            assert second.getsockname()[1] not in (0, port)
    with pytest.raises(InvalidConfig, match="no address"):
        listen("no such host.", 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": None}, "model must be a path"),
        ({"port": 70_000}, "port must be at most 65535"),
        ({"port": -1}, "port must be a whole number"),
        ({"api_key": ""}, "API key"),
        ({"api_key": "two words"}, "API key"),
        ({"num_blocks": 0}, "num_blocks"),
        ({"num_blocks": 5, "device_bytes": 5}, "not both"),
        ({"host_bytes": 5}, "host_bytes"),
        ({"host_directory": "x", "disk_directory": Path("x")}, "directories of their own"),
        ({"max_body_bytes": "8"}, "max_body_bytes"),
        ({"request_timeout_s": 0}, "request_timeout_s"),
        ({"host": ""}, "host must be text"),
        ({"name": "a\nb"}, "printable"),
    ],
)
def test_options_are_checked_at_the_door(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        ServeConfig(**{"model": Path("somewhere"), **options})


def test_a_key_is_not_shown() -> None:
    assert "sesame" not in repr(ServeConfig(model=Path("somewhere"), api_key="sesame"))
