"""`headwater bench serve`: what it counts, that it sees other answers; a server without a cache. Never how fast."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headwater.cli import app
from headwater.config.serve import ServeConfig
from headwater.core.errors import HeadwaterError, InvalidConfig
from headwater.engine.models.base import Model
from headwater.lab.bench import serve
from headwater.lab.bench.report import BenchReport
from headwater.lab.bench.serve import BenchTurn, ServeOptions, ServerLoad
from serve_kit import directory, model, serving

__all__ = ["directory", "model"]  # fixtures

BLOCK = 16


def test_conversations_are_computed_once_and_answered_the_same() -> None:
    options = ServeOptions(conversations=3, turns=3, max_tokens=24)
    found = CliRunner().invoke(
        app, ["bench", "serve", "--conversations", "3", "--turns", "3", "--max-tokens", "24", "--json"]
    )
    assert found.exit_code == 0, found.output
    document = json.loads(found.stdout)
    assert document["command"] == "bench serve"
    assert document["options"]["conversations"] == 3
    assert document["answers_equal"] is True
    assert document["counts_agree"] is True, document
    assert document["errors"] == []
    # One token a byte; each message has a token before and one behind, the prompt one more at either end.
    first = 2 + (options.system_chars + 2) + (options.user_chars + 2)
    prompts = [first + turn * (options.max_tokens + 2 + options.user_chars + 2) for turn in range(options.turns)]
    assert document["prompt_tokens_on"] == document["prompt_tokens_off"] == 3 * sum(prompts)
    assert document["computed_tokens_off"] == 3 * sum(prompts)
    assert not any(document["cached_tokens_off"].values())
    # Later turns find all full blocks of the turn before, its answer's too, whose last token was never computed. Of
    # first turns one computes the system prompt, or several at the same time.
    later = sum(prompt - (before + options.max_tokens - 1) // BLOCK * BLOCK for before, prompt in pairwise(prompts))
    shared = (options.system_chars + 4) // BLOCK * BLOCK
    assert 3 * (first - shared + later) + shared - 2 * BLOCK <= document["computed_tokens_on"] <= 3 * (first + later)
    assert document["computed_fall"] > 0.5
    cached = document["cached_tokens_on"]
    assert cached.keys() == {"device", "host", "disk"}
    assert document["computed_tokens_on"] + sum(cached.values()) == document["prompt_tokens_on"]
    assert len(document["samples"]["ttft_on_ms"]) == len(document["samples"]["ttft_off_ms"]) == 9


def test_what_a_server_refuses_is_an_error_and_no_equal_answer() -> None:
    told: list[tuple[str, int, int]] = []
    report = serve.run(ServeOptions(conversations=2, turns=2, max_tokens=9000), tell=lambda *what: told.append(what))
    assert report.results["answers_equal"] is False
    assert len(report.results["errors"]) == 4
    assert all("status 400" in error and "max_tokens" in error for error in report.results["errors"])
    assert "no answer" in report.notes["different"]
    assert {stage for stage, _, _ in told} == {"with the cache", "without"}
    json.dumps(report.document(), allow_nan=False)


def test_a_server_that_does_not_start_is_one_line_that_says_why() -> None:
    with pytest.raises(HeadwaterError, match=r"the server did not start: .*/nowhere"):
        serve.run(ServeOptions(model=Path("/nowhere")))


@pytest.mark.parametrize("options", [{"conversations": 0}, {"turns": 0}, {"max_tokens": 0}, {"system_chars": 0}])
def test_nonsense_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig):
        ServeOptions(**options)


def test_another_answer_is_seen() -> None:
    turn = BenchTurn(
        text="yes",
        finish_reason="length",
        prompt_tokens=100,
        completion_tokens=3,
        cached_tokens=96,
        cached_by_tier={"device": 96},
        engine_tokens=6,
        preemptions=0,
        ttft_s=0.1,
    )
    assert (turn.computed_tokens, turn.engine_prompt_tokens) == (4, 4)
    off = ServerLoad(conversations=[[turn, turn], [turn, turn]], errors=[], seconds=1.0, metrics_tokens=16)
    assert serve.difference(off, off, num_turns=2) is None
    for other in (replace(turn, text="yes."), replace(turn, finish_reason="stop")):
        on = replace(off, conversations=[[turn, turn], [turn, other]])
        assert "conversation 1, turn 1: " in (serve.difference(on, off, num_turns=2) or "")
    for on in (replace(off, conversations=[[turn, turn], [turn]]), replace(off, conversations=[[], []])):
        assert "no answer" in (serve.difference(on, off, num_turns=2) or "")
        assert "no answer" in (serve.difference(on, on, num_turns=2) or "")


@pytest.mark.parametrize("equal", [True, False])
def test_the_command_fails_if_answers_differ(equal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(options: ServeOptions, **more: Any) -> BenchReport:
        return BenchReport(command="bench serve", options={}, results={"answers_equal": equal}, notes={}, samples={})

    monkeypatch.setattr(serve, "run", run)
    for arguments in ([], ["--json"]):
        found = CliRunner().invoke(app, ["bench", "serve", *arguments])
        assert found.exit_code == (0 if equal else 1)
        assert "answers_equal" in found.stdout
    assert json.loads(found.stdout)["answers_equal"] is equal


# --- `headwater serve --no-cache` -------------------------------------------------------------------------------------


def test_a_server_without_a_cache_computes_every_prompt(directory: Path, model: Model) -> None:
    prompt = "A cache keeps what was computed once, and gives it back."
    with serving(directory, model) as served:
        answers = [served.complete(prompt, cache_salt="one") for _ in range(2)]
        assert answers[1]["usage"]["headwater"]["cached_tokens"] == {"device": 48}
    with serving(directory, model, cache=False) as served:
        for options in ({}, {}, {"cache_salt": "one"}, {"cache_salt": "one"}):
            found = served.complete(prompt, **options)
            assert found["usage"]["headwater"]["cached_tokens"] == {"device": 0}
            assert found["usage"]["headwater"]["computed_tokens"] == 57 + found["usage"]["completion_tokens"] - 1
            assert found["choices"] == answers[0]["choices"]


@pytest.mark.parametrize("tier", ["host_directory", "disk_directory"])
def test_a_server_without_a_cache_has_no_tiers(tier: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {tier: tmp_path / "tier"}
    with pytest.raises(InvalidConfig, match="without a cache"):
        ServeConfig(model=tmp_path, cache=False, **options)
