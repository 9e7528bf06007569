"""Hints of clients: what a body may say of its turn, what is refused, and that it comes to the cache's policy."""

from pathlib import Path
from typing import Any

import pytest

from headwater.core.errors import InvalidConfig
from headwater.core.events import NO_TENANT, session_of
from headwater.engine.models.base import Model
from headwater.engine.request import SaidOfTurn
from headwater.serve.body import Fields
from headwater.serve.errors import ApiError
from headwater.serve.hints import hints_of, with_header
from serve_kit import directory, model, serving

__all__ = ["directory", "model"]  # fixtures

MINE = "mine and mine alone"
PROMPT = "The quick brown fox jumps over the lazy dog, and over again."


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, ("", 0.0, False)),
        ({"session_id": MINE, "prompt_cache_key": "other"}, (MINE, 0.0, False)),
        ({"prompt_cache_key": MINE}, (MINE, 0.0, False)),
        ({"prompt_cache_key": "", "session_id": None}, ("", 0.0, False)),
        ({"session_id": MINE, "session_end": True}, (MINE, 0.0, True)),
        ({"prompt_cache_retention": "in_memory"}, ("", 0.0, False)),
        ({"prompt_cache_retention": "24h"}, ("", 86_400.0, False)),
        ({"prompt_cache_options": {"mode": "implicit", "ttl": "30m"}}, ("", 1_800.0, False)),
        ({"cache_control": {"type": "ephemeral"}}, ("", 300.0, False)),
        ({"cache_control": {"type": "ephemeral", "ttl": "1h"}}, ("", 3_600.0, False)),
        ({"cache_control": {"type": "ephemeral"}, "prompt_cache_retention": "24h"}, ("", 86_400.0, False)),
    ],
)
def test_what_a_body_says(body: dict[str, Any], says: tuple[str, float, bool]) -> None:
    assert hints_of(Fields(body)) == SaidOfTurn(*says)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"session_id": ""}, "session_id"),
    ({"session_id": 5}, "session_id"),
    ({"session_id": "s" * 257}, "session_id"),
    ({"prompt_cache_key": "s" * 257}, "prompt_cache_key"),
    ({"session_end": "yes"}, "session_end"),
    ({"prompt_cache_retention": "1h"}, "prompt_cache_retention"),
    ({"prompt_cache_options": {"ttl": "5m"}}, "prompt_cache_options.ttl"),
    ({"prompt_cache_options": {"mode": "explicit"}}, "prompt_cache_options.mode"),
    ({"prompt_cache_options": {"later": 1}}, "prompt_cache_options.later"),
    ({"cache_control": {}}, "cache_control.type"),
    ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control.ttl"),
    ({"cache_control": {"type": "ephemeral", "scope": 1}}, "cache_control.scope"),
    ({"cache_control": "ephemeral"}, "cache_control"),
]


@pytest.mark.parametrize(("body", "param"), WRONG)
def test_what_is_wrong_is_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        hints_of(Fields(body))
    assert caught.value.status == 400
    assert caught.value.param == param


def test_a_header_says_it_where_the_body_does_not() -> None:
    assert with_header(SaidOfTurn(), MINE).session == MINE
    assert with_header(SaidOfTurn(MINE), "other").session == MINE
    assert with_header(SaidOfTurn(), None) == SaidOfTurn()
    with pytest.raises(ApiError, match="x-session-id has 1 to 256 characters"):
        with_header(SaidOfTurn(), "")


@pytest.mark.parametrize(
    ("body", "headers"),
    [({"session_id": MINE}, {}), ({"prompt_cache_key": MINE}, {}), ({}, {"X-Session-ID": MINE})],
)
def test_the_policy_hears_of_it_and_nobody_else_is_told_apart(
    directory: Path, model: Model, body: dict[str, Any], headers: dict[str, str]
) -> None:
    with serving(directory, model, policy="session", num_blocks=64) as served:
        ask = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0}
        wish = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
        first = served.post("/v1/completions", {**ask, **wish, **body}, headers=headers)
        assert first.status_code == 200, first.text
        served.until_free()
        with served.running.cache.still() as brain:
            facts = repr(brain.index.facts())
            assert facts.count(session_of(MINE).hex()) > 0
            assert session_of(MINE, b"t" * 16).hex() not in facts
        again = served.complete(PROMPT, max_tokens=2, session_id="somebody else")["usage"]
        assert again["prompt_tokens_details"]["cached_tokens"] == len(PROMPT) // 16 * 16  # it bears on no name
        served.until_free()
        with served.running.cache.still() as brain:
            assert session_of("somebody else", NO_TENANT).hex() in repr(brain.index.facts())


def test_a_policy_that_nobody_knows_is_refused_at_the_start(directory: Path, model: Model) -> None:
    with (
        pytest.raises(InvalidConfig, match="no eviction policy 'best'; there are: lru, lru-2, session, value"),
        serving(directory, model, policy="best"),
    ):
        pass
