"""The server as clients see it: the official client and a plain one, a real engine, a real socket."""

import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headwater.engine.loader import load_tokenizer
from headwater.engine.models.base import Model
from headwater.engine.request import TokenLogprob
from headwater.engine.tokenizer import Tokenizer
from headwater.serve.transcript import Likelihood, TextPiece, Transcript
from serve_kit import Served, directory, model, served, serving

__all__ = ["directory", "model", "served"]  # fixtures

PROMPT = "A cache keeps what was computed once, and gives it back."  # 57 tokens with the first: 3 full blocks
CHAT: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPT}]


# --- answers ----------------------------------------------------------------------------------------------------------


def test_the_official_client_gets_a_completion(served: Served) -> None:
    with served.openai() as client:
        found = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=8, extra_body={"ignore_eos": True})
        assert [model.id for model in client.models.list()] == ["tiny"]
        assert client.models.retrieve("tiny").owned_by == "headwater"
    assert found.object == "text_completion"
    assert found.model == "tiny"
    assert found.choices[0].finish_reason == "length"
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens, found.usage.total_tokens) == (57, 8, 65)


def test_the_official_client_chats(served: Served, directory: Path) -> None:
    with served.openai() as client:
        found = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": PROMPT}],
            max_completion_tokens=8,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        parts: Any = [{"type": "text", "text": PROMPT[:9]}, {"type": "text", "text": PROMPT[9:]}]
        same = client.chat.completions.create(
            model="tiny",
            messages=[CHAT[0], {"role": "user", "content": parts}],
            max_tokens=8,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
    assert found.id.startswith("chatcmpl-")
    assert found.choices[0].message.role == "assistant"
    assert found.choices[0].message.content == same.choices[0].message.content
    tokenizer = load_tokenizer(directory)
    prompt = tokenizer.encode(tokenizer.apply_chat_template(CHAT), add_special_tokens=False)
    assert found.usage is not None
    assert found.usage.prompt_tokens == len(prompt)
    raw = served.complete(prompt, max_tokens=8)  # the same prompt as token ids
    assert raw["choices"][0]["text"] == found.choices[0].message.content


@pytest.mark.parametrize("temperature", [0, 0.9])
def test_a_stream_says_what_a_whole_answer_says(served: Served, temperature: float) -> None:
    options: dict[str, Any] = {"model": "tiny", "temperature": temperature, "top_p": 0.95, "seed": 7, "max_tokens": 40}
    with served.openai() as client:
        whole = client.completions.create(prompt=PROMPT, logprobs=2, **options)
        events = list(
            client.completions.create(
                prompt=PROMPT, logprobs=2, stream=True, stream_options={"include_usage": True}, **options
            )
        )
        choices = [event.choices[0] for event in events[:-1]]
        assert "".join(choice.text for choice in choices) == whole.choices[0].text
        told = [choice.logprobs for choice in choices if choice.logprobs is not None]
        assert whole.choices[0].logprobs is not None
        for name, values in whole.choices[0].logprobs.model_dump().items():
            assert [value for one in told for value in one.model_dump()[name]] == values, name
        assert [choice.finish_reason for choice in choices if choice.finish_reason] == [whole.choices[0].finish_reason]
        assert all(event.usage is None for event in events[:-1])
        last = events[-1]
        assert (last.choices, last.usage and last.usage.completion_tokens) == (
            [],
            whole.usage and whole.usage.completion_tokens,
        )

        chat = client.chat.completions.create(messages=CHAT, **options)
        chunks: Any = list(client.chat.completions.create(messages=CHAT, stream=True, **options))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == chat.choices[0].message.content
    assert [chunk.choices[0].delta.role for chunk in chunks[:2]] == ["assistant", None]
    assert chunks[-1].choices[0].finish_reason == chat.choices[0].finish_reason
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert all(chunk.usage is None for chunk in chunks)


def test_what_is_sampled_follows_from_the_seed(served: Served) -> None:
    def texts(**options: Any) -> set[str]:
        return {served.complete(PROMPT, max_tokens=24, **options)["choices"][0]["text"] for _ in range(3)}

    assert len(texts()) == 1  # greedy, cold and cached
    assert len(texts(temperature=1, seed=3)) == 1
    assert texts(temperature=1, seed=3) != texts(temperature=1, seed=4)
    assert len(texts(temperature=1)) == 3  # without a seed another each time
    assert texts(temperature=1, top_p=1e-9) == texts()


def test_a_stop_string_ends_the_answer_and_is_not_sent(served: Served) -> None:
    text = served.complete(PROMPT, max_tokens=64)["choices"][0]["text"]
    for at, length in ((10, 1), (12, 3), (20, 5)):  # one token is one byte, so longer ones lie across tokens
        stop = text[at : at + length]
        before = text[: text.find(stop)]
        body = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True, "max_tokens": 64, "stop": ["never said", stop]}
        found = served.post("/v1/completions", body).json()
        assert found["choices"][0]["text"] == before
        assert found["choices"][0]["finish_reason"] == "stop"
        assert 0 < found["usage"]["completion_tokens"] < 64
        lines = served.post("/v1/completions", {**body, "stream": True}).text.split("\n\n")
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        assert "".join(event["choices"][0]["text"] for event in events) == before
        assert events[-1]["choices"][0]["finish_reason"] == "stop"
    assert served.complete(PROMPT, max_tokens=64, stop="never said")["choices"][0]["text"] == text


def test_log_probabilities_in_both_shapes(served: Served) -> None:
    with served.openai() as client:
        options: dict[str, Any] = {
            "model": "tiny",
            "temperature": 0,
            "max_tokens": 6,
            "extra_body": {"ignore_eos": True},
        }
        for num_top in (0, 3):
            told = client.completions.create(prompt=PROMPT, logprobs=num_top, **options).choices[0].logprobs
            assert told is not None
            assert told.tokens is not None
            assert told.token_logprobs is not None
            assert told.top_logprobs is not None
            assert told.text_offset is not None
            assert len(told.tokens) == len(told.token_logprobs) == len(told.text_offset) == 6
            for token, logprob, top in zip(told.tokens, told.token_logprobs, told.top_logprobs, strict=True):
                assert top[token] == logprob == max(top.values())  # greedy: the likeliest
                assert len(top) == max(1, num_top)
            assert told.text_offset == sorted(told.text_offset)
        chat = client.chat.completions.create(messages=CHAT, logprobs=True, top_logprobs=3, **options)
        assert chat.choices[0].logprobs is not None
        entries = chat.choices[0].logprobs.content or []
        assert len(entries) == 6
        for entry in entries:
            assert [one.logprob for one in entry.top_logprobs] == sorted(
                (one.logprob for one in entry.top_logprobs), reverse=True
            )
            assert entry.top_logprobs[0].token == entry.token
            assert sum(math.exp(one.logprob) for one in entry.top_logprobs) <= 1 + 1e-9
            assert entry.bytes is None or bytes(entry.bytes).decode() == entry.token
        plain = client.chat.completions.create(messages=CHAT, **options)
        assert plain.choices[0].logprobs is None


def test_a_transcript_is_the_same_however_it_is_cut(directory: Path) -> None:
    tokenizer: Tokenizer = load_tokenizer(directory)
    said = "Grüße, 世界! ab abc abcd END more"
    tokens = tokenizer.encode(said, add_special_tokens=False)
    told = [TokenLogprob(token, -1.0, ()) for token in tokens]

    def run(*stops: str) -> tuple[list[TextPiece], Transcript]:
        transcript = Transcript(tokenizer.stream(), stops)
        pieces = [transcript.push([token], [one]) for token, one in zip(tokens, told, strict=True)]
        return [*pieces, transcript.finish()], transcript

    for stops, expected in (
        ((), said),
        (("END",), "Grüße, 世界! ab abc abcd "),
        (("abcd", "世界"), "Grüße, "),
        (("abcde", "abcd "), "Grüße, 世界! ab abc "),
        (("界!",), "Grüße, 世"),
        (("more and more",), said),  # held back to the end, and then given
        (("G",), ""),
    ):
        pieces, transcript = run(*stops)
        assert "".join(piece.text for piece in pieces) == expected
        assert transcript.stopped == (expected != said)
        likelihoods: list[Likelihood] = [one for piece in pieces for one in piece.likelihoods]
        # One token is one byte: those of the text that was given, and no others, each where its character begins.
        assert len(likelihoods) == len(expected.encode())
        assert [one.offset for one in likelihoods] == [
            at for at, character in enumerate(expected) for _ in character.encode()
        ]
        given = 0
        for piece in pieces:  # a likelihood comes with its text
            given += len(piece.text)
            assert all(one.offset < given for one in piece.likelihoods)


# --- the cache --------------------------------------------------------------------------------------------------------


def test_usage_adds_up_and_a_second_prompt_is_cached(served: Served) -> None:
    first, second = (served.complete(PROMPT, max_tokens=8)["usage"] for _ in range(2))
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] == 48
    assert second["headwater"]["cached_tokens"] == {"device": 48}
    for usage in (first, second):
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (57, 8, 65)
        cached = sum(usage["headwater"]["cached_tokens"].values())
        assert cached == usage["prompt_tokens_details"]["cached_tokens"]
        assert cached + usage["headwater"]["computed_tokens"] == 57 + 8 - 1  # the last token's KV nobody needs
        assert 0 < usage["headwater"]["ttft_s"] <= usage["headwater"]["total_s"]


def test_a_salt_keeps_tenants_apart(served: Served) -> None:
    def cached(**body: Any) -> int:
        usage = served.complete(PROMPT, max_tokens=2, **body)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert [cached(), cached()] == [0, 48]
    assert [cached(cache_salt="a"), cached(cache_salt="a")] == [0, 48]
    assert [cached(cache_salt="b"), cached(cache_salt="a"), cached()] == [0, 48, 48]


def test_the_next_turn_finds_the_last_one_after_a_restart(
    directory: Path, model: Model, shm: Path, tmp_path: Path
) -> None:
    tiers: dict[str, Any] = {
        "host_directory": shm / "host",
        "host_bytes": 16 << 20,
        "disk_directory": tmp_path / "disk",
        "disk_bytes": 16 << 20,
    }
    text = PROMPT * 8
    with serving(directory, model, **tiers) as served:
        first = served.complete(text, max_tokens=8)
        assert first["usage"]["headwater"]["cached_tokens"] == {"device": 0, "host": 0, "disk": 0}
        assert served.running.cache.drain(60)
    cached: dict[str, int] = {}
    for _ in range(10):  # a store that does not answer in time is not waited for, so it may take another try
        with serving(directory, model, **{**tiers, "host_bytes": None}) as served:  # its own limit
            again = served.complete(text, max_tokens=8)
        cached = again["usage"]["headwater"]["cached_tokens"]
        assert cached["device"] == 0
        assert sum(cached.values()) == again["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert again["choices"][0]["text"] == first["choices"][0]["text"]
        assert again["system_fingerprint"] == first["system_fingerprint"]
        if cached["host"]:
            break
    assert cached["host"] == (len(text) + 1) // 16 * 16


def test_a_tier_that_cannot_be_had_is_left_out(
    directory: Path, model: Model, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    with serving(directory, model, disk_directory=tmp_path / "file") as served:
        assert served.complete(PROMPT, max_tokens=2)["usage"]["headwater"]["cached_tokens"] == {"device": 0}
    assert "tier disabled" in caplog.text


# --- many at once, and numbers ----------------------------------------------------------------------------------------


def test_eight_clients_get_what_each_would_get_alone(served: Served) -> None:
    prompts = [PROMPT + " " + "again " * i for i in range(8)]
    alone = [served.complete(prompt, max_tokens=24)["choices"][0]["text"] for prompt in prompts]
    barrier = threading.Barrier(8)

    def ask(prompt: str) -> str:
        with served.openai() as client:
            barrier.wait()
            body = {"ignore_eos": True, "cache_salt": "another"}
            events = client.completions.create(
                model="tiny", prompt=prompt, max_tokens=24, temperature=0, stream=True, extra_body=body
            )
            return "".join(event.choices[0].text for event in events)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, prompts)) == alone


def test_health_and_metrics(served: Served) -> None:
    assert served.get("/health").json() == {"status": "ok", "requests": 0, "free": 272}
    for _ in range(2):
        served.complete(PROMPT, max_tokens=4)
    served.get("/nowhere")
    served.until(lambda: served.running.metrics.value("http_requests_total") == 4)  # counted when all was sent
    found = served.get("/metrics")
    assert found.headers["content-type"].startswith("text/plain")
    values = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(found.text)
        for sample in family.samples
    }
    assert values["headwater_http_requests_total", "/v1/completions", "200"] == 2
    assert values["headwater_http_requests_total", "404", "other"] == 1
    assert values["headwater_prompt_tokens_total",] == 114
    assert values["headwater_generated_tokens_total",] == 8
    assert values["headwater_ttft_seconds_count",] == 2
    assert values["headwater_hit_tokens_total", "device"] == 48
    assert values["headwater_device_slots", "own"] == 0
    assert values["headwater_engine_requests",] == 0
