"""`headwater explain` and `/admin/requests`: the right reason at the right place, of a real server; and who hears what."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from typer.testing import CliRunner

from brain_kit import fail_at
from headwater.cli import app
from headwater.config.serve import ExplainLevel, ServeConfig
from headwater.core.errors import InvalidConfig
from headwater.engine.models.base import Model
from router_kit import world
from serve_kit import WAIT_S, Served, directory, model, serving

__all__ = ["directory", "model"]  # fixtures

BLOCK = 16


@pytest.fixture
def here(directory: Path, model: Model) -> Iterator[Served]:
    """A server of 64 blocks on loopback without a key."""
    with serving(directory, model, num_blocks=64, explain="text") as one:
        yield one


def prompt(seed: int, num_tokens: int = 4 * BLOCK) -> list[int]:
    return random.Random(seed).choices(range(5, 120), k=num_tokens)


def explain(here: Served, request: str, **options: Any) -> Any:
    return here.get(f"/admin/requests/{quote(request, safe='')}", **options)


def rows(here: Served, answer: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of an answer's only request."""
    found = explain(here, answer["usage"]["headwater"]["request"])
    assert found.status_code == 200, found.text
    (one,) = found.json()["requests"]
    return list(one["rows"])


def ask(here: Served, tokens: list[int], **body: Any) -> list[dict[str, Any]]:
    return rows(here, here.complete(tokens, max_tokens=2, **body))


def test_what_was_never_here_and_what_goes_on(here: Served) -> None:
    first = prompt(1)
    (row,) = ask(here, first)
    assert (row["blocks"], row["tokens"], row["why"]) == ([0, 4], [0, 64], "never_stored")
    hit, more = ask(here, first + prompt(2, 32))
    assert (hit["from"], hit["blocks"]) == ("device", [0, 4])
    assert (more["why"], more["blocks"], more["facts"]) == ("never_stored", [4, 6], {})


def test_a_text_that_goes_another_way_is_shown_to_the_token(here: Served) -> None:
    first = prompt(1)
    near = here.complete(first, max_tokens=2)["usage"]["headwater"]["request"]
    second = [*first[:37], 99 if first[37] != 99 else 98, *first[38:]]
    hit, row = ask(here, second)
    assert (hit["from"], hit["blocks"]) == ("device", [0, 2])
    assert (row["why"], row["counted_as"], row["blocks"]) == ("text_differs", "never_stored", [2, 4])
    decode = here.running.tokenizer.decode
    assert row["facts"] == {
        "token": 37,
        "nearest": near,
        "before": decode(second[21:37]),
        "after": decode(second[37:53]),
    }


def test_another_salt(here: Served) -> None:
    ask(here, prompt(1), cache_salt="one")
    (row,) = ask(here, prompt(1), cache_salt="two")
    assert (row["why"], row["facts"], row["blocks"]) == ("another_salt", {}, [0, 4])
