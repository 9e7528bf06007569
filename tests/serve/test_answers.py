"""What the server answers to which field: several answers, sampling, stops, defaults; and that no field is ignored."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from headwater.engine.make_model import BOS, EOS, SPECIAL
from headwater.engine.models.base import Model
from serve_kit import WAIT_S, Served, directory, model, served, serving

__all__ = ["directory", "model", "served"]  # fixtures

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI: list[Any] = [{"role": "user", "content": "hi"}]
LONG = "Once upon a time and a very good time it was. " * 4  # 185 tokens: eleven blocks and nine tokens
A, B = ord("A"), ord("B")


def ask(served: Served, body: dict[str, Any], path: str = COMPLETIONS) -> dict[str, Any]:
    found = served.post(path, body)
    assert found.status_code == 200, found.text
    answer: dict[str, Any] = found.json()
    return answer


def texts(served: Served, **body: Any) -> list[str]:
    """Completions of two tokens, greedy unless told, in the order of their indices."""
    choices = ask(served, {"prompt": "x", "max_tokens": 2, "temperature": 0, "ignore_eos": True, **body})["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(choices)))
    return [choice["text"] for choice in choices]


def events(served: Served, body: dict[str, Any], path: str = COMPLETIONS) -> Iterator[dict[str, Any]]:
    """The documents of a stream, which must end as it should."""
    with (
        httpx2.Client(base_url=served.url, timeout=WAIT_S) as client,
        client.stream("POST", path, json={**body, "stream": True}) as response,
    ):
        assert response.status_code == 200, response.read()
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    yield from (json.loads(line.removeprefix("data: ")) for line in lines[:-1])


def refused(served: Served, body: dict[str, Any], param: str, path: str = COMPLETIONS) -> str:
    found = served.post(path, body)
    assert found.status_code == 400, found.text
    error = found.json()["error"]
    assert (error["param"], error["code"]) == (param, "unsupported_parameter"), error
    return str(error["message"])


# --- several answers --------------------------------------------------------------------------------------------------


@pytest.mark.fault("B12")
def test_n_answers_in_one_and_each_is_what_it_would_be_alone(served: Served) -> None:
    with served.openai() as client:
        asked: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "seed": 7, "extra_body": {"ignore_eos": True}}
        one = client.completions.create(prompt=LONG, **asked)
        four = client.completions.create(prompt=LONG, n=4, **asked)
        again = client.completions.create(prompt=LONG, n=4, best_of=4, **asked)
        chat = client.chat.completions.create(messages=HI, n=3, **asked)
        chat_again = client.chat.completions.create(messages=HI, n=3, **asked)
    said = [choice.text for choice in four.choices]
    assert [choice.index for choice in four.choices] == [0, 1, 2, 3]
    assert len(set(said)) == 4
    assert said == [choice.text for choice in again.choices]
    assert said[0] == one.choices[0].text
    assert [choice.index for choice in chat.choices] == [0, 1, 2]
    contents = [choice.message.content for choice in chat.choices]
    assert len(set(contents)) == 3
    assert contents == [choice.message.content for choice in chat_again.choices]


@pytest.mark.fault("B12")
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_n_answers_in_a_stream_say_the_same(served: Served, path: str) -> None:
    prompt = {"prompt": LONG} if path == COMPLETIONS else {"messages": HI}
    body = {**prompt, "n": 3, "max_tokens": 9, "seed": 3, "stop": "zz"}
    whole = ask(served, body, path)
    said = dict.fromkeys(range(3), "")
    ends: dict[int, str] = {}
    for document in events(served, {**body, "stream_options": {"include_usage": True}}, path):
        for choice in document["choices"]:
            index = choice["index"]
            assert index not in ends, "something came behind the end"
            if path == CHAT and not said[index] and index not in ends and "role" in choice["delta"]:
                assert choice["delta"]["role"] == "assistant"
            said[index] += choice["text"] if path == COMPLETIONS else choice["delta"].get("content", "")
            if choice["finish_reason"] is not None:
                ends[index] = choice["finish_reason"]
        last = document
    for choice in whole["choices"]:
        text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
        assert said[choice["index"]] == text
        assert ends[choice["index"]] == choice["finish_reason"]
    assert last["choices"] == []
    for name in ("prompt_tokens", "completion_tokens"):
        assert last["usage"][name] == whole["usage"][name]


def test_the_official_client_streams_n_answers(served: Served) -> None:
    with served.openai() as client:
        whole = client.chat.completions.create(model="tiny", messages=HI, n=3, seed=1, max_tokens=8)
        stream = client.chat.completions.create(model="tiny", messages=HI, n=3, seed=1, max_tokens=8, stream=True)
        said = ["", "", ""]
        for chunk in stream:
            for choice in chunk.choices:
                said[choice.index] += choice.delta.content or ""
    assert said == [choice.message.content for choice in whole.choices]


@pytest.mark.fault("B12")
def test_n_answers_compute_their_prompt_once(directory: Path, model: Model) -> None:
    with serving(directory, model, step_tokens=32) as served:  # a prompt in six chunks: followers have time to be early
        before = served.running.engine.num_computed_tokens
        usage = ask(served, {"prompt": LONG, "n": 4, "max_tokens": 5, "ignore_eos": True})["usage"]
        num_prompt, num_cached = usage["prompt_tokens"], usage["prompt_tokens"] // 16 * 16
        assert num_prompt == 185
        assert usage["completion_tokens"] == 20
        assert usage["total_tokens"] == 205
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0  # before it came
        assert usage["headwater"]["cached_tokens"]["device"] == 3 * num_cached
        # The prompt, three times what is behind its last full block, and all tokens but each answer's last.
        computed = num_prompt + 3 * (num_prompt - num_cached) + 4 * 4
        assert usage["headwater"]["computed_tokens"] == computed
        assert served.running.engine.num_computed_tokens - before == computed
        again = ask(served, {"prompt": LONG, "n": 2, "max_tokens": 5, "ignore_eos": True})["usage"]
        assert again["prompt_tokens_details"]["cached_tokens"] == num_cached
        served.until_free()


def test_n_answers_share_their_prompt_also_where_nothing_is_cached(directory: Path, model: Model) -> None:
    with serving(directory, model, cache=False) as served:
        for _ in range(2):
            usage = ask(served, {"prompt": LONG, "n": 2, "max_tokens": 2, "ignore_eos": True})["usage"]
            assert usage["headwater"]["cached_tokens"]["device"] == 176
            assert usage["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.fault("B12")
def test_several_prompts_are_answered_as_each_alone(served: Served) -> None:
    prompts: list[str] = ["one", "a second prompt", LONG]
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 6, "seed": 5, "extra_body": {"ignore_eos": True}}
    with served.openai() as client:
        alone = [client.completions.create(prompt=prompt, n=2, **asked) for prompt in prompts]
        together = client.completions.create(prompt=prompts, n=2, **asked)
        tokens = [list(prompt.encode()) for prompt in prompts]
        by_tokens = client.completions.create(prompt=[[BOS, *one] for one in tokens], n=2, **asked)
        single = client.completions.create(prompt=["one"], **asked)
    said = [choice.text for one in alone for choice in one.choices]
    assert [choice.text for choice in together.choices] == said
    assert [choice.index for choice in together.choices] == list(range(6))
    assert [choice.text for choice in by_tokens.choices] == said
    assert single.choices[0].text == said[0]
    assert together.usage is not None
    assert together.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in alone if one.usage is not None)
    assert together.usage.completion_tokens == 36


@pytest.mark.fault("B12")
def test_all_answers_of_a_request_come_in_or_none(directory: Path, model: Model) -> None:
    long = {"prompt": "on and on", "max_tokens": 6000, "temperature": 0, "ignore_eos": True}
    with serving(directory, model, max_running=2, max_waiting=2) as served:
        for body, param in (({"n": 5}, "n"), ({"prompt": ["a"] * 5}, "prompt"), ({"prompt": ["a", "b"], "n": 3}, "n")):
            found = served.post(COMPLETIONS, {"prompt": "a", **body})
            assert (found.status_code, found.json()["error"]["param"]) == (400, param), found.text
            assert "more than the 4 that this server takes at once" in found.text
        with served.raw({**long, "n": 2}):
            served.until(lambda: served.running.engine.num_requests == 2)
            for body in ({"n": 3}, {"prompt": ["a", "b", "c"]}):
                found = served.post(COMPLETIONS, {"prompt": "a", **body})
                assert (found.status_code, found.json()["error"]["code"]) == (429, "queue_full"), found.text
                assert served.running.engine.num_requests == 2
            with served.raw({**long, "prompt": ["a", "b"]}):
                served.until(lambda: served.running.engine.num_requests == 4)
        served.until_free()
        assert len(texts(served, n=4)) == 4


def test_a_client_that_leaves_takes_all_its_answers_along(served: Served) -> None:
    for stream in (False, True):
        body = {"prompt": ["a", LONG], "n": 3, "max_tokens": 6000, "ignore_eos": True, "stream": stream}
        with served.raw(body) as connection:
            served.until(lambda: served.running.engine.num_requests == 6)
            if stream:
                assert connection.recv(1)
        served.until_free()


def test_answers_that_are_preempted_come_to_their_end(directory: Path, model: Model) -> None:
    body = {"prompt": LONG, "n": 4, "max_tokens": 60, "seed": 2, "ignore_eos": True}
    with serving(directory, model) as served:
        wanted = ask(served, body)
    with serving(directory, model, num_blocks=20) as served:
        found = ask(served, body)
        assert found["usage"]["headwater"]["preemptions"] > 0
        assert found["choices"] == wanted["choices"]


# --- what is chosen ---------------------------------------------------------------------------------------------------


@pytest.mark.fault("B12")
def test_a_bias_says_which_token_comes(served: Served) -> None:
    with served.openai() as client:
        found = client.completions.create(model="tiny", prompt="x", max_tokens=4, logit_bias={str(A): 100})
        chat = client.chat.completions.create(model="tiny", messages=HI, max_tokens=4, logit_bias={str(B): 100})
    assert found.choices[0].text == "AAAA"
    assert chat.choices[0].message.content == "BBBB"
    likeliest = texts(served, max_tokens=1, logit_bias={str(A): 100, str(B): 99})
    banned = texts(served, max_tokens=1, logit_bias={str(A): -100, str(B): 100})
    assert (likeliest, banned) == (["A"], ["B"])


@pytest.mark.fault("B12")
def test_penalties_drive_tokens_out(served: Served) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": "ABCDEFGH", "max_tokens": 40, "temperature": 0}
    asked["logit_bias"] = {str(letter): 50 for letter in b"ABCDEFGH"}
    with served.openai() as client:
        plain = client.completions.create(**asked).choices[0].text
        presence = client.completions.create(presence_penalty=2, **asked).choices[0].text
        frequency = client.completions.create(frequency_penalty=2, **asked).choices[0].text
    assert max(Counter(frequency).values()) <= 7 < max(Counter(plain).values())
    assert len(set(presence[:8])) > len(set(plain[:8]))
    # Only what was generated counts there; for this one the prompt does too.
    near = {str(A): 100, str(B): 90}
    assert texts(served, prompt="xA", max_tokens=1, logit_bias=near) == ["A"]
    assert texts(served, prompt="xA", max_tokens=1, logit_bias=near, repetition_penalty=1.5) == ["B"]
    assert texts(served, prompt="xA", max_tokens=1, logit_bias=near, presence_penalty=2) == ["A"]


@pytest.mark.fault("B12")
@pytest.mark.parametrize("field", [{"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-9}], ids=str)
def test_a_narrow_choice_is_the_greedy_one(served: Served, field: dict[str, Any]) -> None:
    greedy = texts(served, max_tokens=20)
    assert texts(served, max_tokens=20, temperature=2, **field) == greedy
    assert texts(served, max_tokens=20, temperature=2, seed=1) != greedy
    assert texts(served, max_tokens=20, temperature=2, seed=1, top_k=-1, min_p=0) == texts(
        served, max_tokens=20, temperature=2, seed=1, top_k=0
    )


@pytest.mark.fault("B12")
def test_an_answer_has_at_least_so_many_tokens(served: Served) -> None:
    ends = {"prompt": "x", "temperature": 0, "logit_bias": {str(EOS): 100, str(A): 50}, "max_tokens": 8}
    none = ask(served, ends)
    assert (none["choices"][0]["text"], none["choices"][0]["finish_reason"]) == ("", "stop")
    five = ask(served, {**ends, "min_tokens": 5})
    assert (five["choices"][0]["text"], five["choices"][0]["finish_reason"]) == ("AAAAA", "stop")
    assert five["usage"]["completion_tokens"] == 5
    full = ask(served, {**ends, "min_tokens": 8})
    assert (full["choices"][0]["text"], full["choices"][0]["finish_reason"]) == ("A" * 8, "length")
    # Stop strings wait as well, and are looked for only in what comes behind.
    stop = {**ends, "logit_bias": {str(A): 100}, "ignore_eos": True, "stop": "AA", "min_tokens": 3}
    assert ask(served, stop)["choices"][0]["text"] == "AAA"
    assert ask(served, {**stop, "min_tokens": 0})["choices"][0]["text"] == ""


@pytest.mark.fault("B12")
def test_stop_tokens_end_an_answer(served: Served) -> None:
    body = {"prompt": "x", "temperature": 0, "logit_bias": {str(A): 100}, "max_tokens": 4}
    found = ask(served, {**body, "stop_token_ids": [B, A]})["choices"][0]
    assert (found["text"], found["finish_reason"]) == ("", "stop")
    assert ask(served, {**body, "stop_token_ids": [B]})["choices"][0]["text"] == "AAAA"
    later = {**body, "logit_bias": {str(A): 100, str(B): 99}, "presence_penalty": 2, "stop_token_ids": [B]}
    assert ask(served, later)["choices"][0]["text"] == "A"


def test_a_stop_string_stays_if_it_is_wanted(served: Served) -> None:
    body = {"prompt": "x", "temperature": 0, "logit_bias": {str(A): 100}, "max_tokens": 9, "stop": ["AAA", "AAAA"]}
    assert ask(served, body)["choices"][0]["text"] == ""
    kept = {**body, "include_stop_str_in_output": True}
    assert ask(served, kept)["choices"][0]["text"] == "AAA"
    assert "".join(one["text"] for document in events(served, kept) for one in document["choices"]) == "AAA"


def test_special_tokens_are_said_if_they_are_wanted(served: Served) -> None:
    tool = 256 + SPECIAL.index("<|tool|>")
    body = {"prompt": "x", "temperature": 0, "logit_bias": {str(tool): 100}, "max_tokens": 2}
    assert ask(served, body)["choices"][0]["text"] == ""
    assert ask(served, {**body, "skip_special_tokens": False})["choices"][0]["text"] == "<|tool|><|tool|>"


@pytest.mark.fault("B12")
def test_a_prompt_is_sent_back_if_it_is_wanted(served: Served) -> None:
    with served.openai() as client:
        asked: dict[str, Any] = {"model": "tiny", "max_tokens": 3, "temperature": 0, "logit_bias": {str(A): 100}}
        text = client.completions.create(prompt="Say it. ", echo=True, **asked)
        both = client.completions.create(prompt=["one ", "two "], n=2, echo=True, **asked)
        tokens = client.completions.create(prompt=[BOS, *b"by ids "], echo=True, **asked)
        stream = client.completions.create(prompt="Say it. ", echo=True, stream=True, **asked)
        streamed = [chunk.choices[0].text for chunk in stream]
    assert text.choices[0].text == "".join(streamed) == "Say it. AAA"
    assert streamed[0].startswith("Say it. ")
    assert [choice.text for choice in both.choices] == ["one AAA", "one AAA", "two AAA", "two AAA"]
    assert tokens.choices[0].text == "by ids AAA"
    nothing = {"prompt": "p", "echo": True, "temperature": 0, "logit_bias": {str(EOS): 100}}
    assert ask(served, nothing)["choices"][0]["text"] == "p"
    assert "logprobs" in refused(served, {"prompt": "a", "echo": True, "logprobs": 1}, "echo")


def test_tokens_can_be_told_by_their_ids(served: Served) -> None:
    body = {"prompt": "x", "temperature": 0, "logit_bias": {str(A): 100}, "max_tokens": 1, "logprobs": 1}
    told = ask(served, {**body, "return_tokens_as_token_ids": True})["choices"][0]["logprobs"]
    assert told["tokens"] == [f"token_id:{A}"]
    assert ask(served, body)["choices"][0]["logprobs"]["tokens"] == ["A"]


def test_log_probabilities_are_the_models_own(served: Served) -> None:
    plain = ask(served, {"prompt": "x", "temperature": 0, "max_tokens": 1, "logprobs": 3})["choices"][0]["logprobs"]
    changed = {"temperature": 2, "top_k": 5, "repetition_penalty": 2, "logit_bias": {str(A): 100}}
    biased = ask(served, {"prompt": "x", "max_tokens": 1, "logprobs": 3, **changed})["choices"][0]["logprobs"]
    assert biased["tokens"] == ["A"]
    assert biased["token_logprobs"][0] < plain["token_logprobs"][0]
    assert plain["top_logprobs"][0].items() <= biased["top_logprobs"][0].items()


def test_usage_comes_with_every_event_if_it_is_wanted(served: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "x", "max_tokens": 3, "n": 2, "temperature": 0, "logit_bias": {str(A): 100}}
    found = [document["usage"] for document in events(served, {**body, "stream_options": options})]
    counts = [usage["completion_tokens"] for usage in found]
    assert counts == sorted(counts)
    assert counts[-1] == 6
    assert all(usage["prompt_tokens"] == 2 for usage in found)
    assert "headwater" in found[-1]
    assert all("headwater" not in usage for usage in found[:-1])


# --- defaults ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def opinionated(directory: Path, tmp_path: Path) -> Path:
    """A model whose generation_config.json has opinions."""
    path = tmp_path / "tiny"
    path.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((directory / name).read_bytes())
    said = {"eos_token_id": [EOS, 263], "temperature": 0, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.2}
    (path / "generation_config.json").write_text(json.dumps(said))
    return path


@pytest.mark.fault("B12")
def test_the_models_generation_config_is_what_is_done_unless_asked(opinionated: Path, model: Model) -> None:
    body: dict[str, Any] = {"prompt": LONG, "max_tokens": 20, "ignore_eos": True}
    said = {"temperature": 0, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.2}
    plain = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0, "seed": 1}
    with serving(opinionated, model) as served:
        by_default = ask(served, body)["choices"]
        assert ask(served, body)["choices"] == by_default  # greedy, so always the same
        assert ask(served, {**body, **said})["choices"] == by_default
        assert ask(served, {**body, "repetition_penalty": 1.0})["choices"] != by_default
        asked = ask(served, {**body, **plain})["choices"]
        with served.openai() as client:
            (listed,) = client.models.list().data
        assert listed.model_extra is not None
        assert listed.model_extra["sampling_defaults"] == {**said, "min_p": 0}
    with serving(opinionated, model, generation_config=False) as served:
        assert ask(served, {**body, "seed": 1})["choices"] == asked
        found = served.get("/v1/models").json()["data"][0]["sampling_defaults"]
        assert found == {"temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}


# --- no field is ignored ----------------------------------------------------------------------------------------------


@pytest.mark.fault("B12")
@pytest.mark.parametrize(
    ("field", "says"),
    [
        ({"temprature": 0.5}, "did you mean temperature?"),
        ({"max_token": 5}, "did you mean max_tokens?"),
        ({"best_off": 1}, "did you mean best_of?"),
        ({"unheard_of": [1]}, "it takes"),
        ({"guided_json": {"type": "object"}}, "the form of an answer cannot be forced"),
        ({"guided_regex": "a+"}, "cannot be forced"),
        ({"structured_outputs": {"json": {}}}, "cannot be forced"),
        ({"response_format": {"type": "json_object"}}, "only text"),
        ({"allowed_token_ids": [1]}, "logit_bias"),
        ({"bad_words": ["x"]}, "logit_bias"),
        ({"use_beam_search": True}, "token by token"),
        ({"prompt_logprobs": 1}, "only tokens of the answer"),
        ({"truncate_prompt_tokens": 5}, "prompts are taken whole"),
        ({"priority": 3}, "equal"),
        ({"request_id": "x"}, "x-request-id"),
        ({"store": True}, "no answer is kept"),
        ({"service_tier": "flex"}, "one tier"),
        ({"kv_transfer_params": {}}, "the cache decides"),
        ({"best_of": 3}, "every answer is sent"),
        ({"suffix": "x"}, "leave it out"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "not padded"),
        ({"stream": True, "stream_options": {"include_uasge": True}}, "did you mean include_usage?"),
    ],
    ids=str,
)
def test_what_is_not_done_is_refused_by_name(served: Served, field: dict[str, Any], says: str) -> None:
    (name,) = field.keys() - {"stream"}
    inner = f".{next(iter(field[name]))}" if name == "stream_options" else ""
    assert says in refused(served, {"prompt": "a", **field}, name + inner)
    with served.openai() as client, pytest.raises(openai.BadRequestError, match=name):
        client.completions.create(model="tiny", prompt="a", extra_body=field)


@pytest.mark.parametrize(
    ("field", "says"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "cannot call tools"),
        ({"tool_choice": "required"}, "cannot call tools"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "only text"),
        ({"functions": [{"name": "f"}]}, "cannot call tools"),
        ({"reasoning_effort": "high"}, "chat_template_kwargs"),
        ({"verbosity": "low"}, "how much to say"),
        ({"modalities": ["text", "audio"]}, "only text"),
        ({"chat_template": "{{ messages }}"}, "the model's own"),
        ({"continue_final_message": True}, "/v1/completions"),
        ({"documents": [{"title": "t"}]}, "into a message"),
        ({"mesages": []}, "did you mean messages?"),
        ({"prompt": "a"}, "it takes"),
    ],
    ids=str,
)
def test_what_a_chat_cannot_do_is_refused_by_name(served: Served, field: dict[str, Any], says: str) -> None:
    assert says in refused(served, {"messages": HI, **field}, next(iter(field)), CHAT)


def test_messages_have_no_fields_that_nobody_reads(served: Served) -> None:
    for message, param in (
        ({"role": "user", "content": "a", "contents": "b"}, "messages[0].contents"),
        ({"role": "user", "content": "a", "tool_call_id": "x"}, "messages[0].tool_call_id"),
        ({"role": "user", "content": [{"type": "text", "text": "a", "txt": "b"}]}, "messages[0].content[0].txt"),
    ):
        refused(served, {"messages": [message]}, param, CHAT)
    echoed: dict[str, Any] = {
        "role": "assistant",
        "content": "a",
        "refusal": None,
        "annotations": [],
        "tool_calls": None,
        "audio": None,
    }
    ask(served, {"messages": [*HI, echoed, {"role": "user", "content": "b", "name": "me"}], "max_tokens": 1}, CHAT)


def test_a_name_that_is_no_text_is_refused_like_any_other(served: Served) -> None:
    for name in ("\\ud800", "x" * 5000, "\\u0000", ""):
        body = f'{{"prompt": "a", "{name}": 1}}'
        found = served.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
        assert found.status_code == 400
        assert found.json()["error"]["code"] == "unsupported_parameter"
        assert len(found.json()["error"]["param"]) <= 80


@pytest.mark.parametrize("stream", [False, True])
def test_what_clients_send_unasked_is_taken(served: Served, *, stream: bool) -> None:
    """The official client's own fields at their defaults, and what benchmark and agent clients always send."""
    quiet: dict[str, Any] = {"n": 1, "user": "me", "seed": None, "stop": None, "frequency_penalty": 0, "top_p": 1}
    with served.openai() as client:
        chunks: Any = client.chat.completions.create(
            model="tiny",
            messages=HI,
            max_completion_tokens=2,
            stream=stream,
            stream_options={"include_usage": True, "include_obfuscation": False} if stream else None,
            logprobs=False,
            top_logprobs=None,
            logit_bias={},
            presence_penalty=0,
            parallel_tool_calls=True,
            tool_choice="none",
            tools=[],
            response_format={"type": "text"},
            modalities=["text"],
            store=False,
            metadata={"run": "1"},
            service_tier="auto",
            safety_identifier="me",
            prompt_cache_key="mine",
            verbosity="medium",
            reasoning_effort="none",
            **quiet,
        )
        assert list(chunks) if stream else chunks.choices[0].message.content is not None
        more: dict[str, Any] = {"temperature": 0.0, "repetition_penalty": 1.0, "min_p": 0.0, "top_k": -1}
        more |= {"ignore_eos": True, "length_penalty": 1.0, "skip_special_tokens": True, "use_beam_search": False}
        more |= {"include_stop_str_in_output": False, "spaces_between_special_tokens": True, "stop_token_ids": []}
        more |= {"cache_salt": "s", "min_tokens": 0, "truncate_prompt_tokens": None, "bad_words": [], "priority": 0}
        found: Any = client.completions.create(
            model="tiny",
            prompt="x",
            max_tokens=2,
            best_of=1,
            echo=False,
            suffix=None,
            logprobs=None,
            stream=stream,
            stream_options={"include_usage": True} if stream else None,
            extra_body=more,
            **quiet,
        )
        assert list(found) if stream else found.choices[0].finish_reason == "length"


# --- chat templates ---------------------------------------------------------------------------------------------------


def with_template(directory: Path, target: Path, template: str) -> Path:
    target.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (target / name).write_bytes((directory / name).read_bytes())
    config = json.loads((target / "tokenizer_config.json").read_text())
    (target / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    return target


@pytest.mark.fault("B9")
@pytest.mark.parametrize(
    "template", ["{{ 'abc'.index('x') }}", "{{ raise_exception('one at a time') }}", "{{ 1 // 0 }}"]
)
def test_a_template_that_raises_is_a_400_with_its_word(
    template: str, directory: Path, model: Model, tmp_path: Path
) -> None:
    with serving(with_template(directory, tmp_path / "tiny", template), model) as served:
        found = served.post(CHAT, {"messages": HI})
        assert (found.status_code, found.json()["error"]["param"]) == (400, "messages"), found.text
        message = found.json()["error"]["message"]
        assert any(said in message for said in ("substring not found", "one at a time", "by zero")), message


@pytest.mark.fault("B9")
def test_a_template_with_generation_marks_is_served_and_hears_its_variables(
    directory: Path, model: Model, tmp_path: Path
) -> None:
    template = (
        "{% for message in messages %}{{ message.name or '' }}{{ message.content }}{% endfor %}"
        "{% generation %}{{ enable_thinking | default('?') }}{% endgeneration %}"
        "{% if add_generation_prompt %}!{% endif %}"
    )
    with serving(with_template(directory, tmp_path / "tiny", template), model) as served:

        def num_tokens(**body: Any) -> int:
            usage = ask(served, {"messages": HI, "max_tokens": 1, **body}, CHAT)["usage"]
            return int(usage["prompt_tokens"])

        assert num_tokens() == len("hi?!")
        assert num_tokens(chat_template_kwargs={"enable_thinking": False}) == len("hiFalse!")
        assert num_tokens(add_generation_prompt=False) == len("hi?")
        assert num_tokens(add_special_tokens=True) == len("hi?!") + 1
        assert num_tokens(messages=[{"role": "user", "content": "hi", "name": "me"}]) == len("mehi?!")
