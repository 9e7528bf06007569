"""`headwater dashboard`: the page for a server that has only metrics, from real text and from a real server."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest
from typer.testing import CliRunner

from headwater.cli import app
from headwater.core.results import Reason
from headwater.engine.models.base import Model
from headwater.metrics import Metrics
from headwater.serve.metrics_board import metrics_snapshot
from headwater.serve.state import document
from serve_kit import WAIT_S, directory, model, serving
from test_serve_revive import KEY, ask

__all__ = ["directory", "model"]  # fixtures

# As vLLM says it: its labels first, everything twice, counters of two engines.
VLLM = """
# HELP headwater_hit_tokens_total Prompt tokens that were not computed, by the tier that had them
# TYPE headwater_hit_tokens_total counter
headwater_hit_tokens_total{engine="0",model_name="meta/one",tier="host"} 320.0
headwater_hit_tokens_total{engine="1",model_name="meta/one",tier="host"} 80.0
headwater_hit_tokens_total{engine="0",model_name="meta/one",tier="pool"} 100.0
# HELP vllm:headwater_hit_tokens_total The same
# TYPE vllm:headwater_hit_tokens_total counter
vllm:headwater_hit_tokens_total{engine="0",model_name="meta/one",tier="host"} 320.0
# HELP headwater_miss_tokens_total Prompt tokens to be computed
# TYPE headwater_miss_tokens_total counter
headwater_miss_tokens_total{engine="0",model_name="meta/one",reason="never_stored"} 200.0
headwater_miss_tokens_total{engine="0",model_name="meta/one",reason="evicted"} 300.0
# HELP headwater_tier_saved_seconds_total The same by tier
# TYPE headwater_tier_saved_seconds_total counter
headwater_tier_saved_seconds_total{engine="0",model_name="meta/one",tier="host"} 1.5
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="meta/one"} 3.0
vllm:num_requests_running{engine="1",model_name="meta/one"} 4.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="meta/one"} 2.0
"""


def test_vllm_s_words_become_the_document() -> None:
    said = document(metrics_snapshot(VLLM, name="here:8000", now_s=1.0))
    assert (said["kind"], said["name"], said["model"], said["ready"]) == ("metrics", "here:8000", "meta/one", True)
    assert said["hit_tokens"] == {"host": 400, "pool": 100}
    assert (said["hit_ratio"], said["miss_tokens"]) == (0.5, 500)
    assert [(one["reason"], one["percent"]) for one in said["misses"]] == [
        (Reason.EVICTED, 60.0),
        (Reason.NEVER_STORED, 40.0),
    ]
    assert said["seconds"]["saved"] == {"host": 1.5}
    assert [(tier["name"], tier["state"], tier["limit_bytes"]) for tier in said["tiers"]] == [
        ("host", None, None),
        ("pool", None, None),
    ]
    assert (said["engine"]["running"], said["engine"]["waiting"], said["engine"]["free"]) == (7, 2, None)
    assert not said["can_revive"]


def test_our_own_words_are_read_back() -> None:
    metrics = Metrics()
    metrics.count("hit_tokens_total", 7, tier='odd "tier"\n')
    metrics.gauge("breaker_state", 3, tier="disk")
    metrics.observe("job_seconds", 2.0, tier="disk", job="load")
    said = document(metrics_snapshot(metrics.prometheus(), name="x", now_s=1.0))
    assert said["hit_tokens"] == {"disk": 0, 'odd "tier"\n': 7}
    assert {tier["name"]: tier["state"] for tier in said["tiers"]} == {"disk": "off", 'odd "tier"\n': None}


@contextmanager
def dashboard(tmp_path: Path, *options: str, **variables: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command, and where its page is."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("HEADWATER_")} | variables
    command = [sys.executable, "-c", "from headwater.cli import app; app()", "dashboard", *options]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        where = process.stdout.readline()
        assert where.startswith("the dashboard of http"), (tmp_path / "log").read_text()
        yield process, where.split()[-1].rstrip("/")
    finally:
        process.kill()
        process.communicate()


def test_the_command_shows_a_server_s_metrics(directory: Path, model: Model, tmp_path: Path) -> None:
    with serving(directory, model, api_key=KEY, num_blocks=64) as here:
        ask(here)
        ask(here)
        options = ("--url", f"{here.url}/metrics", "--port", "0", "--metrics-key", KEY, "--api-key", "another")
        with dashboard(tmp_path, *options) as (process, url):
            auth = {"authorization": "Bearer another"}
            assert httpx2.get(f"{url}/admin/state", trust_env=False, timeout=WAIT_S).status_code == 401
            assert 'data-key="wanted"' in httpx2.get(f"{url}/", trust_env=False, timeout=WAIT_S).text
            said = httpx2.get(f"{url}/admin/state", headers=auth, trust_env=False, timeout=WAIT_S).json()
            assert said["ready"], said
            assert (said["hit_tokens"], said["miss_tokens"], said["hit_ratio"]) == ({"device": 96}, 96, 0.5)
            with httpx2.stream("GET", f"{url}/admin/stream", headers=auth, trust_env=False, timeout=WAIT_S) as answer:
                lines = answer.iter_lines()
                assert json.loads(next(lines).removeprefix("data: "))["miss_tokens"] == 96
                ask(here, [9, *range(1, 100)])
                assert any('"miss_tokens":192' in line for line in lines)
                here.stop()
                assert any('"no_metrics"' in line for line in lines)
                process.send_signal(signal.SIGTERM)
                assert sum(1 for _ in lines) >= 0  # it ends, whole
            assert process.wait(WAIT_S) == 0
    assert "Traceback" not in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("options", "why"),
    [(("--url", "nowhere"), "address"), (("--url", "http://x", "--host", "0.0.0.0", "--port", "0"), "give a key")],
)
def test_what_cannot_work_is_one_line(options: tuple[str, ...], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADWATER_API_KEY", raising=False)
    found = CliRunner().invoke(app, ["dashboard", *options])
    assert found.exit_code == 1
    assert why in found.stderr
