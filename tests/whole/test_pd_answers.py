"""Prefill and decode apart: the fields of a request do there what they do at one node, or are refused as clearly."""

import json
import secrets
from pathlib import Path
from typing import Any

import pytest

from headwater.engine.models.base import Model
from serve_kit import directory, model, serving
from test_pd_serve import COMPLETIONS, TEXT, Cluster, cluster, envelope, error_of, pair, pool, until

__all__ = ["directory", "model", "pair", "pool"]  # fixtures

CHAT = "/v1/chat/completions"
A = ord("A")
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": 12}
SEEDED: dict[str, Any] = {"temperature": 1.1, "seed": 9, "ignore_eos": True, "max_tokens": 12}
BODIES: list[dict[str, Any]] = [
    {"prompt": TEXT, **SEEDED, "top_k": 7, "min_p": 0.05},
    {"prompt": TEXT, **GREEDY, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"prompt": TEXT, **GREEDY, "logit_bias": {str(A): 100}, "stop_token_ids": [A]},
    {"prompt": TEXT, **GREEDY, "logit_bias": {str(A): 100}, "min_tokens": 3, "stop_token_ids": [A]},
    {"prompt": TEXT, **GREEDY, "logit_bias": {str(A): 100}, "stop": "AAA", "include_stop_str_in_output": True},
    {"prompt": TEXT, **GREEDY, "logit_bias": {str(A): 100}, "stop": "AA", "min_tokens": 3},
    {"prompt": TEXT, **GREEDY, "echo": True},
    {"prompt": TEXT, **SEEDED, "n": 4},
    {"prompt": TEXT, **SEEDED, "n": 3, "max_tokens": 1},  # over with the first token: there is nothing to read
    {"prompt": "short", **SEEDED, "n": 2},
    {"prompt": [TEXT, "another prompt", TEXT * 2], **SEEDED},
    {"prompt": [[1, 2, 3], [4] * 40], **SEEDED, "n": 2},
    {"prompt": [TEXT, "x"], **GREEDY, "n": 2, "echo": True, "logit_bias": {str(A): 100}},
]


def streamed(text: str) -> dict[int, str]:
    """The texts of a stream by index."""
    said: dict[int, str] = {}
    for line in text.split("\n\n"):
        if line.startswith("data: {"):
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                said[choice["index"]] = said.get(choice["index"], "") + choice["text"]
    assert text.endswith("data: [DONE]\n\n")
    return said


@pytest.mark.fault("B12")
def test_fields_do_what_they_do_at_one_node(pair: Cluster, directory: Path, model: Model) -> None:
    chat = {"messages": [{"role": "user", "content": TEXT}], **SEEDED, "n": 2}
    with serving(directory, model) as alone:
        wanted = [alone.post(COMPLETIONS, body).json()["choices"] for body in BODIES]
        wanted_chat = alone.post(CHAT, chat).json()["choices"]
    for body, choices in zip(BODIES, wanted, strict=True):
        found = pair.ask(body)
        assert found.status_code == 200, found.text
        assert found.json()["choices"] == choices, body
        stream = pair.ask({**body, "stream": True})
        assert streamed(stream.text) == {choice["index"]: choice["text"] for choice in choices}
    assert pair.ask(chat, CHAT).json()["choices"] == wanted_chat


def test_n_answers_are_prefilled_once_and_read_once(pair: Cluster) -> None:
    prompt = [secrets.randbelow(256) for _ in range(200)]  # twelve blocks and eight tokens
    before = [node.running.engine.num_computed_tokens for node in (pair.prefill, pair.decode)]
    usage = pair.ask({"prompt": prompt, "n": 4, "max_tokens": 5, "ignore_eos": True}).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (200, 20)
    prefilled, decoded = (
        node.running.engine.num_computed_tokens - was
        for node, was in zip((pair.prefill, pair.decode), before, strict=True)
    )
    assert prefilled == 200
    assert decoded == 3 * 8 + 4 * 4  # what is behind the last full block, for all but the first; and the answers
    assert usage["headwater"]["cached_tokens"]["device"] == 3 * 192


def test_several_prompts_are_taken_together_or_not_at_all(directory: Path, model: Model, pool: str) -> None:
    two = {"prompt": [[5] * 20, [6] * 20], **GREEDY}
    with cluster(directory, model, pool, max_running=2) as pair:
        prefilled = pair.prefill.post("/pd/prefill", {"endpoint": COMPLETIONS, "body": two})
        ticket = prefilled.json()["ticket"]
        assert len(ticket["tickets"]) == 2
        assert ticket["identity"] == model.identity.digest.hex()
        busy = {"prompt": [7] * 20, "temperature": 0, "ignore_eos": True, "max_tokens": 6000}
        with pair.decode.raw({"endpoint": COMPLETIONS, "body": busy, "ticket": pair.ticket([7] * 20)}, "/pd/decode"):
            until(lambda: pair.decode.running.engine.num_requests == 1)
            found = pair.decode.post("/pd/decode", {"endpoint": COMPLETIONS, "body": two, "ticket": ticket})
            error_of(found, 503, "no_room")
            until(lambda: pair.decode.running.engine.num_requests == 1)
            with pair.decode.running.cache.still() as brain:
                brain.validate()
                assert len(brain.requests) == 1
        pair.decode.until_free()
        found = pair.decode.post("/pd/decode", {"endpoint": COMPLETIONS, "body": two, "ticket": ticket})
        assert len(found.json()["choices"]) == 2
        three = {"prompt": [[5] * 20] * 3, **GREEDY}
        refused = pair.ask(three)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt"), refused.text
        for wrong in (ticket["tickets"][0], {**ticket, "tickets": ticket["tickets"][::-1]}, {**ticket, "tickets": []}):
            found = pair.decode.post("/pd/decode", {"endpoint": COMPLETIONS, "body": two, "ticket": wrong})
            error_of(found, 502, "handoff_foreign")
        pair.decode.until_free()


@pytest.mark.fault("S3")
def test_more_answers_than_run_at_once_are_refused(directory: Path, model: Model, pool: str) -> None:
    """They would wait at the decode node, where nobody waits, and keep everybody else out."""
    with cluster(directory, model, pool, max_running=2) as pair:
        for body in ({"prompt": [5] * 20, "n": 3}, {"prompt": [[5] * 20, [6] * 20], "n": 2}):
            found = pair.ask({**body, **GREEDY})
            assert (found.status_code, found.json()["error"]["param"]) == (400, "n"), found.text
            ticket = pair.prefill.post("/pd/prefill", {"endpoint": COMPLETIONS, "body": body}).json()["ticket"]
            asked = {"endpoint": COMPLETIONS, "body": {**body, **GREEDY}, "ticket": ticket}
            found = pair.decode.post("/pd/decode", asked)
            assert (found.status_code, found.json()["error"]["param"]) == (400, "n"), found.text
        assert len(pair.ask({"prompt": [5] * 20, "n": 2, **GREEDY}).json()["choices"]) == 2


def test_what_nobody_knows_is_refused_through_a_router_too(pair: Cluster) -> None:
    for field, param in (({"temprature": 1}, "temprature"), ({"guided_json": {}}, "guided_json"), ({"n": 0}, "n")):
        found = pair.ask({"prompt": TEXT, **field})
        assert (found.status_code, found.json()["error"]["param"]) == (400, param), found.text
    found = pair.prefill.post("/pd/prefill", envelope([1], temprature=1))
    assert found.json()["error"]["param"] == "temprature"
