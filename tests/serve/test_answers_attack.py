"""What a second attack found: answers that hold up everybody else, that fill the line, and that nobody reads."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from headwater.disagg.headers import ATTEMPT, REQUEST_ID
from headwater.engine.engine import Engine
from headwater.engine.models.base import Model
from headwater.engine.request import Finish, Output, Request, Sampling, TokenLogprob, Usage
from headwater.engine.tokenizer import Tokenizer
from headwater.serve.answer import Answer, Unread
from headwater.serve.errors import ApiError
from headwater.serve.logprobs import TokenNames
from headwater.serve.transcript import Transcript
from serve_kit import WAIT_S, Served, directory, model, served, serving
from test_answers import CHAT, COMPLETIONS, HI, events

__all__ = ["directory", "model", "served"]  # fixtures

LOGPROBS: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "once", "logprobs": 5},
    CHAT: {"messages": HI, "logprobs": True, "top_logprobs": 5},
}


class Recorded(Engine):
    """An engine that computes nothing: what it was given is the test's to answer."""

    def __init__(self) -> None:
        self.submitted: list[Request] = []
        self.cancelled: list[Request] = []

    def submit(self, *requests: Request) -> None:
        self.submitted += requests

    def cancel(self, request: Request) -> None:
        self.cancelled.append(request)


def answer_of(engine: Engine, tokenizer: Tokenizer, num_choices: int = 1, unread: Unread | None = None) -> Answer:
    """An answer that has begun."""
    until_s = asyncio.get_running_loop().time() + WAIT_S
    answer = Answer(engine, unread or Unread(), timeout_s=WAIT_S, until_s=until_s)
    for number in range(num_choices):
        answer.add(
            Transcript(tokenizer.stream()), name=f"a/{number}", prompt=[5], sampling=Sampling(max_tokens=999), salt=b""
        )
    engine.submit(*(choice.request for choice in answer.choices))
    return answer


def usage_of(num_tokens: int) -> Usage:
    return Usage(
        prompt_tokens=1,
        completion_tokens=num_tokens,
        cached_tokens=0,
        cached_by_tier={},
        computed_tokens=num_tokens,
        ttft_s=0.1,
        total_s=0.2,
    )


def output(token: int = 65) -> Output:
    return Output(tokens=(token,), logprobs=(TokenLogprob(token, -1.0, ((token, -1.0), (66, -2.0))),))


def over(num_tokens: int) -> Output:
    return Output(finish=Finish.LENGTH, usage=usage_of(num_tokens))


# --- answers in one piece ---------------------------------------------------------------------------------------------


@pytest.mark.fault("S2")
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_an_answer_in_one_piece_says_what_its_stream_says(served: Served, path: str) -> None:
    body = {**LOGPROBS[path], "n": 2, "seed": 4, "max_tokens": 12, "ignore_eos": True}
    whole = served.post(path, body)
    assert whole.headers["content-type"] == "application/json"
    choices: list[dict[str, Any]] = whole.json()["choices"]
    texts, told = ["", ""], [dict[str, list[Any]](), dict[str, list[Any]]()]
    for event in events(served, body, path):
        for choice in event["choices"]:
            index = choice["index"]
            texts[index] += choice["text"] if path == COMPLETIONS else choice["delta"].get("content", "")
            for field, value in (choice["logprobs"] or {}).items():
                if isinstance(value, list):
                    told[index].setdefault(field, []).extend(value)
    for index, choice in enumerate(choices):
        assert choice["index"] == index
        assert (choice["text"] if path == COMPLETIONS else choice["message"]["content"]) == texts[index]
        assert {name: value for name, value in choice["logprobs"].items() if value is not None} == told[index]
        assert choice["finish_reason"] == "length"
    if path == CHAT:
        assert choices[0]["message"]["role"] == "assistant"
        assert choices[0]["message"]["refusal"] is choices[0]["logprobs"]["refusal"] is None
    assert whole.json()["usage"]["completion_tokens"] == 24
    plain = served.post(
        path, {**body, "logprobs": None, "top_logprobs": None} if path == CHAT else {**body, "logprobs": None}
    )
    assert [choice["logprobs"] for choice in plain.json()["choices"]] == [None, None]


@pytest.mark.fault("S2")
def test_a_tokens_name_is_made_once(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer.load(directory)
    made: list[int] = []
    decode = Tokenizer.decode

    def counted(self: Tokenizer, ids: list[int], **options: Any) -> str:
        made.extend(ids)
        return decode(self, ids, **options)

    monkeypatch.setattr(Tokenizer, "decode", counted)
    names = TokenNames(tokenizer, max_names=3)
    assert [names(token) for token in (65, 66, 65, 66, 200)] == ["A", "B", "A", "B", "token_id:200"]
    assert made == [65, 66, 200]
    names(67)
    assert len(names._names) == 1  # there is an end to it


@pytest.mark.fault("S2")
def test_others_have_their_turn_between_two_outputs_of_an_answer(directory: Path) -> None:
    tokenizer = Tokenizer.load(directory)

    async def main() -> None:
        engine, turns = Recorded(), 0
        answer = answer_of(engine, tokenizer)
        for _ in range(500):
            engine.submitted[0].listen(output())
        engine.submitted[0].listen(over(500))
        await asyncio.sleep(0)  # all of them lie there

        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(others())
        pieces = 0
        while await answer.next() is not None:
            pieces += 1
        assert pieces == 501
        assert turns >= 500
        task.cancel()

    asyncio.run(main())


@pytest.mark.fault("S2")
def test_more_logprobs_than_one_body_should_hold_are_refused(served: Served) -> None:
    body = {"prompt": "a", "n": 128, "max_tokens": 300, "logprobs": 20}
    found = served.post(COMPLETIONS, body)
    assert (found.status_code, found.json()["error"]["param"]) == (400, "logprobs"), found.text
    assert "806400 log-probabilities" in found.text
    served.until_free()
    assert served.post(COMPLETIONS, {**body, "n": 2, "max_tokens": 3}).status_code == 200
    with served.raw({**body, "stream": True}) as connection:  # it is said as it comes
        assert connection.recv(12) == b"HTTP/1.1 200"


@pytest.mark.fault("S2")
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_an_answer_that_grows_too_large_is_given_up(served: Served, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.serve.generate.MAX_ANSWER_BYTES", 2000)
    body = {**LOGPROBS[path], "max_tokens": 6000, "ignore_eos": True}
    found = served.post(path, body)
    assert (found.status_code, found.json()["error"]["code"]) == (400, "answer_too_large"), found.text
    served.until_free()
    assert served.post(path, {**body, "max_tokens": 2}).status_code == 200


# --- places -----------------------------------------------------------------------------------------------------------


def free(served: Served) -> int:
    found: int = served.get("/health").json()["free"]
    return found


@pytest.mark.fault("S7")
def test_places_count_answers_and_what_is_free_is_taken(directory: Path, model: Model) -> None:
    with serving(directory, model, max_running=2, max_waiting=6) as served:
        assert free(served) == 8
        with served.raw({"prompt": ["a", "b"], "n": 3, "max_tokens": 6000, "ignore_eos": True}):
            served.until(lambda: free(served) == 2)
            assert served.running.engine.num_requests == 6
            refused = served.post(COMPLETIONS, {"prompt": "a", "n": 3, "max_tokens": 1})
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
            with served.raw({"prompt": "a", "n": 2, "max_tokens": 6000, "ignore_eos": True}):
                served.until(lambda: free(served) == 0)
                assert served.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1}).status_code == 429
        served.until_free()
        served.until(lambda: free(served) == 8)


@pytest.mark.fault("S7")
def test_one_answer_is_not_behind_all_of_a_crowd(directory: Path, model: Model) -> None:
    """The crowd has two hundred, of which two run at a time: who comes then is answered before most of them."""
    body = {"prompt": ["a", "b"], "n": 100, "max_tokens": 40, "ignore_eos": True}
    with serving(directory, model, max_running=2, max_waiting=254) as served:
        with served.raw(body):
            served.until(lambda: served.running.engine.num_requests == 200)
            assert served.post(COMPLETIONS, {"prompt": "c", "max_tokens": 1}).status_code == 200
            assert served.running.engine.num_requests > 150
        served.until_free()


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.fault("X23")
def test_names_that_clients_choose_stop_no_engine(directory: Path, model: Model) -> None:
    """X23: two requests of one name in the engine's cache, which was refused there: in the engine's own thread."""
    with serving(directory, model) as served:

        def headers(attempt: str) -> dict[str, str]:
            return {REQUEST_ID: "r", ATTEMPT: attempt}

        body = {"prompt": "a" * 40, "n": 2, "max_tokens": 6000, "ignore_eos": True}
        with served.raw(body, headers=headers("a")):
            served.until(lambda: served.running.engine.num_requests == 2)
            for attempt in ("a/0", "a/1", "a#0"):
                found = served.post(COMPLETIONS, {"prompt": "b", "max_tokens": 1}, headers=headers(attempt))
                assert found.status_code == 200, found.text
            again = served.post(COMPLETIONS, {"prompt": "b", "max_tokens": 1}, headers=headers("a"))
            assert again.status_code == 409
        served.until_free()


# --- answers that nobody reads ----------------------------------------------------------------------------------------


@pytest.mark.fault("S8")
def test_what_lies_in_answers_has_a_bound_and_the_largest_is_given_up(directory: Path) -> None:
    tokenizer = Tokenizer.load(directory)

    async def main() -> None:
        engine, unread = Recorded(), Unread(limit=100)
        large, small = answer_of(engine, tokenizer, 2, unread), answer_of(engine, tokenizer, unread=unread)
        waiting = asyncio.create_task(large.next())  # and has not run since
        await asyncio.sleep(0)
        for number in range(30):  # of three each: a token, and two alternatives
            engine.submitted[number % 2].listen(output())
            if number < 5:
                engine.submitted[2].listen(output())
        await asyncio.sleep(0)
        assert unread.num == 15
        assert set(engine.cancelled) == set(engine.submitted[:2])
        engine.submitted[0].listen(output())  # before it heard of that
        await asyncio.sleep(0)
        assert unread.num == 15
        with pytest.raises(ApiError, match="too slowly"):
            await asyncio.wait_for(waiting, WAIT_S)
        for left in range(4, -1, -1):
            assert await small.next() is not None
            assert unread.num == 3 * left
        for answer in (large, small, small):
            answer.close()
        assert unread.num == 0

    asyncio.run(main())


@pytest.mark.fault("S8")
def test_a_stream_that_is_read_too_slowly_ends_with_a_word(
    directory: Path, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(directory, model) as served:
        monkeypatch.setattr(served.server._service.unread, "_limit", 2000)
        asked = {"prompt": [5], "n": 8, "max_tokens": 6000, "logprobs": 20, "ignore_eos": True, "stream": True}
        with served.raw(asked) as connection:
            served.until(lambda: served.running.engine.num_requests == 8)
            served.until(lambda: served.running.engine.num_requests == 0)  # nobody read, and nobody computes any more
            said = b""
            while more := connection.recv(1 << 16):
                said += more
                if b"read_too_slowly" in said:
                    break
        assert said.startswith(b"HTTP/1.1 200")
        assert b"[DONE]" not in said
        assert b"read_too_slowly" in said
        served.until(lambda: served.server._service.unread.num == 0)
        assert served.complete("x", max_tokens=2)
