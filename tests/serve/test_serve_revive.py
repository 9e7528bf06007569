"""`POST /admin/revive` and `headwater revive`: what is switched off comes back without a restart."""

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from brain_kit import fail_at
from headwater.cli import app
from headwater.engine.models.base import Model
from headwater.storage.verified import VerifiedStore
from headwater.transfer.executor.worker import Worker
from serve_kit import WAIT_S, Served, directory, model, serving

__all__ = ["directory", "model"]  # fixtures

KEY = "s3cret"
PROMPT = list(range(1, 100))


@pytest.fixture
def here(directory: Path, model: Model, tmp_path: Path) -> Iterator[Served]:
    """A server with a disk tier that wants a key."""
    with serving(
        directory, model, api_key=KEY, disk_directory=tmp_path / "disk", disk_bytes=16 << 20, num_blocks=64
    ) as one:
        yield one


def ask(here: Served, prompt: list[int] = PROMPT) -> dict[str, Any]:
    body = {"prompt": prompt, "temperature": 0, "ignore_eos": True, "max_tokens": 4}
    found = here.post("/v1/completions", body, headers={"authorization": f"Bearer {KEY}"})
    assert found.status_code == 200, found.text
    answer: dict[str, Any] = found.json()
    return answer


def revive(here: Served, body: object = None, key: str = KEY) -> Any:
    return here.post("/admin/revive", body or {}, headers={"authorization": f"Bearer {key}"})


def command(here: Served, *words: str) -> Any:
    return CliRunner().invoke(app, ["revive", *words, "--url", here.url, "--api-key", KEY])


def reader_of(here: Served) -> VerifiedStore:
    executor = here.running.cache._executor
    assert isinstance(executor, Worker)
    return executor._tiers["disk"].reader


def switch_off(here: Served) -> None:
    """As after a hundred bad pages; the next job notices."""
    reader_of(here)._bad._num_bad = reader_of(here)._bad._max_bad
    ask(here, [7, *PROMPT])
    here.until(lambda: "disk" in here.running.cache.troubles())


@pytest.mark.fault("D5")
def test_a_tier_that_is_off_comes_back(here: Served) -> None:
    right = ask(here)["choices"][0]["text"]
    assert here.running.cache.drain(WAIT_S)
    switch_off(here)
    found = revive(here)
    assert found.status_code == 200
    assert found.json()["revived"] == ["disk"]
    assert found.json()["still_off"] == []
    assert list(found.json()["was_off"]) == ["disk"]
    here.until(lambda: not here.running.cache.troubles())
    metrics = here.get("/metrics", headers={"authorization": f"Bearer {KEY}"}).text
    assert 'headwater_breaker_state{tier="disk"} 0.0' in metrics
    assert ask(here)["choices"][0]["text"] == right
    assert revive(here).json() == {"was_off": {}, "revived": [], "still_off": []}


@pytest.mark.fault("D5")
def test_a_brain_that_failed_comes_back(here: Served) -> None:
    first = ask(here)
    assert here.running.cache.drain(WAIT_S)
    fail_at(here.running.cache.brain, 0)
    missed = ask(here)
    assert missed["choices"] == first["choices"]
    assert missed["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    health = here.get("/health")
    assert (health.status_code, health.json()) == (
        200,
        {"status": "ok", "requests": 0, "free": 272, "cache": "only misses"},
    )
    shown = command(here, "--json")
    assert shown.exit_code == 0, shown.stderr
    assert json.loads(shown.stdout)["revived"] == ["brain"]
    assert here.get("/health").json() == {"status": "ok", "requests": 0, "free": 272}
    again = ask(here)
    assert again["choices"] == first["choices"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0, "from the disk tier"
    assert "nothing was off" in command(here).stdout


@pytest.mark.fault("D5")
def test_one_of_several_is_revived_by_its_name(here: Served) -> None:
    switch_off(here)
    fail_at(here.running.cache.brain, 0)
    ask(here)
    assert set(here.running.cache.troubles()) == {"brain", "disk"}
    assert command(here, "brain").exit_code == 0
    assert set(here.running.cache.troubles()) == {"disk"}, "and the fresh brain knows that it is off"
    with here.running.cache.still() as brain:
        assert brain.tiers["disk"].state.name == "OFF"
    shown = command(here, "disk")
    assert "disk is used again" in shown.stdout
    here.until(lambda: not here.running.cache.troubles())


def test_what_cannot_be_put_right_is_said(here: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    switch_off(here)
    monkeypatch.setattr(here.running.cache._executor, "revive", lambda name: False)
    shown = command(here)
    assert shown.exit_code == 1
    assert "disk is still off" in shown.stdout


@pytest.mark.fault("D5")
def test_it_is_behind_the_key_and_takes_no_nonsense(here: Served) -> None:
    assert here.post("/admin/revive", {}).status_code == 401
    assert revive(here, key="another").status_code == 401
    assert here.get("/admin/revive", headers={"authorization": f"Bearer {KEY}"}).status_code == 405
    for body in ({"what": "nothing"}, {"what": 7}, {"what": ["disk"]}, {"tier": "disk"}):
        found = revive(here, body)
        assert found.status_code == 400, body
        assert found.json()["error"]["param"] == "what"
    shown = CliRunner().invoke(app, ["revive", "--url", here.url, "--api-key", "another"])
    assert shown.exit_code == 1
    assert "answers 401" in shown.stderr
    here.until(lambda: here.running.metrics.value("http_requests_total", endpoint="/admin/revive") >= 7)


@pytest.mark.fault("S19")
def test_it_wants_json_and_reads_all_of_it(directory: Path, model: Model) -> None:
    with serving(directory, model, num_blocks=64) as here:  # without a key: a page of some site may post here
        for headers in ({}, {"content-type": "text/plain", "origin": "http://evil.example"}):
            assert here.post("/admin/revive", content=b"", headers=headers).status_code == 415
        as_json = {"content-type": "application/json"}
        for chunks, param in (([b'{"what": ', b'"nothing"}'], "what"), ([b"{"], None), ([b""], None)):
            found = here.post("/admin/revive", content=iter(chunks), headers=as_json)  # in chunks, without a length
            assert (found.status_code, found.json()["error"]["param"]) == (400, param)
        assert here.post("/admin/revive", {}).status_code == 200


def test_nobody_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "http_proxy", "http://127.0.0.1:9")  # which is not asked
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        shown = CliRunner().invoke(app, ["revive", "--url", url])
    assert shown.exit_code == 1
    assert f"no headwater server answers at {url}" in shown.stderr
    assert CliRunner().invoke(app, ["revive", "--url", "nowhere"]).exit_code == 1
