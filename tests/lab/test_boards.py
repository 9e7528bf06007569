"""The Grafana board and the alert rules: every metric is one that servers have, and Prometheus understands it all."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from headwater.cli import app
from headwater.core.errors import InvalidInput
from headwater.core.results import MISS_REASONS
from headwater.core.role import Role
from headwater.disagg.headers import DECODE, ENDPOINTS, PREFILL
from headwater.lab import boards
from headwater.lab.boards import ALERTS, _query, alerts, grafana
from headwater.metrics import FAMILIES, PREFIX
from headwater.router.nodes import NodeTable
from router_kit import world
from serve_kit import Served, directory, model, served

__all__ = ["directory", "model", "served"]  # fixtures

NAME = re.compile(rf"{PREFIX}\w+")
MATCHER = re.compile(r'(\w+)(=~|=)"([^"]*)"')


def expressions() -> Iterator[str]:
    for panel in json.loads(grafana())["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    for rule in rules():
        yield rule["expr"]


def rules() -> list[dict[str, Any]]:
    (group,) = json.loads(alerts())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def for_prometheus(expression: str) -> str:
    return expression.replace("$__rate_interval", "5m").replace("$instance", ".*")


def check(path: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *command, str(path)], capture_output=True, text=True, timeout=60, check=False)


def told(text: str) -> set[str]:
    """Names of samples that `/metrics` has or may have: a family without samples is told with its type."""
    ends = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
    families = text_string_to_metric_families(text)
    return {family.name + end for family in families for end in ends.get(family.type, ())}


def test_every_metric_is_one_that_servers_have(served: Served) -> None:
    served.complete([1, 2, 3], max_tokens=1)
    with world() as routed:
        texts = [served.get("/metrics").text, routed.client.get("/metrics").text]
    have = set().union(*map(told, texts))
    asked = {name for expression in expressions() for name in NAME.findall(expression)}
    assert asked <= have
    assert len(asked) >= 25


def test_the_board_finds_a_server_that_has_answered_nothing_yet(served: Served) -> None:
    (asked,) = [one for one in json.loads(grafana())["templating"]["list"] if one["name"] == "instance"]
    (name,) = NAME.findall(asked["query"]["query"])
    assert re.search(rf"^{name} 0\.0$", served.get("/metrics").text, re.MULTILINE)


def test_a_hit_ratio_before_the_first_hit_is_none(tmp_path: Path) -> None:
    (panel,) = [one for one in json.loads(grafana())["panels"] if one["title"] == "Hit ratio"]
    expression = for_prometheus(panel["targets"][0]["expr"])
    series = [{"series": 'headwater_miss_tokens_total{instance="a",reason="never_stored"}', "values": "0+10x30"}]
    wanted = {"expr": expression, "eval_time": "20m", "exp_samples": [{"labels": "{}", "value": 0}]}
    tests = [{"interval": "1m", "input_series": series, "promql_expr_test": [wanted]}]
    path = tmp_path / "test.yml"
    path.write_text(json.dumps({"rule_files": [], "evaluation_interval": "1m", "tests": tests}))
    done = check(path, "test", "rules")
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_value_of_a_label_is_one_that_it_has() -> None:
    known = {
        "reason": {"queue_full", "too_slow"},
        "status": {"5.."},
        "state": {"usable", "full", "quarantined"},
        "role": {role.value for role in Role},
        "endpoint": {*ENDPOINTS, PREFILL, DECODE},
    }
    for expression in expressions():
        for label, _, value in MATCHER.findall(expression):
            if label != "instance":
                assert set(value.split("|")) <= known[label], expression
    assert "usable" in FAMILIES["router_nodes"].help
    assert "quarantined" in FAMILIES["device_slots"].help
    assert not known["reason"] & MISS_REASONS  # of blocks that were not kept, not of misses


@pytest.mark.parametrize(
    ("expression", "says"),
    [
        ("rate(nothing_total[5m])", "no family nothing_total"),
        ("max(brain_faild)", "no family brain_faild"),
        ("brain_faild>0", "no family brain_faild"),
        ("sum by(colour)(brain_failed)", "colour"),
        ("stddev(brain_failed)", "no family stddev"),
        ("sum by (colour) (rate(hit_tokens_total[5m]))", "colour"),
        ('hit_tokens_total{colour="red"}', "has not all labels"),
        ("rate(ttft_seconds[5m])", "is a histogram"),
    ],
)
def test_what_is_not_declared_is_refused(expression: str, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        _query(expression, "")


def test_a_choice_of_servers_is_put_in() -> None:
    assert _query("max(brain_failed)", 'i="1"') == 'max(headwater_brain_failed{i="1"})'
    assert _query('rate(http_requests_total{status="200"}[5m])', 'i="1"') == (
        'rate(headwater_http_requests_total{status="200", i="1"}[5m])'
    )
    assert _query("brain_failed > 0", "") == "headwater_brain_failed > 0"


def test_grafana_can_place_it() -> None:
    panels = json.loads(grafana())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells


def test_prometheus_understands_every_line(tmp_path: Path) -> None:
    path = tmp_path / "alerts.yml"
    path.write_text(alerts())
    done = check(path, "check", "rules")
    assert done.returncode == 0, done.stderr
    assert f"{len(ALERTS)} rules found" in done.stdout
    recorded = [{"record": f"a:b{i}", "expr": for_prometheus(one)} for i, one in enumerate(expressions())]
    path.write_text(json.dumps({"groups": [{"name": "all", "rules": recorded}]}))
    done = check(path, "check", "rules")
    assert done.returncode == 0, done.stderr


def nodes(**states: dict[str, int]) -> dict[str, str]:
    """All series that a router has, whatever nodes are there: `counts` of its node table."""
    counts = NodeTable(pause_s=1.0, max_pause_s=1.0).counts(0.0)
    series = {}
    for role, state in counts:
        number = states.get(role.value, {}).get(state, 0)
        series[f'headwater_router_nodes{{instance="a",role="{role.value}",state="{state}"}}'] = f"{number}+0x60"
    return series


def answers(status: int, more: str = "0+98x60") -> dict[str, str]:
    name = 'headwater_http_requests_total{{instance="a",endpoint="{}",status="{}"}}'
    return {
        name.format("/v1/completions", status): "0+2x60",
        name.format("/v1/completions", 200): more,
        name.format("/health", 200): "0+900x60",
    }


# Per alert: series for which it must ring, and for which it must not.
CASES: dict[str, tuple[list[dict[str, str]], list[dict[str, str]]]] = {
    "HeadwaterBrainFailed": (
        [{'headwater_brain_failed{instance="a"}': "1+0x60"}],
        [{'headwater_brain_failed{instance="a"}': "0+0x60"}],
    ),
    "HeadwaterTierOff": (
        [
            {'headwater_breaker_state{instance="a",tier="disk"}': "3+0x60"},
            {'headwater_breaker_state{instance="a",tier="disk"}': "2 2 1 2 2 1 2 2 2 1 2 2 1 2 2 2 1 2 2 2 2 1 2 2"},
        ],
        [
            {'headwater_breaker_state{instance="a",tier="disk"}': "0+0x60"},
            {'headwater_breaker_state{instance="a",tier="disk"}': "2 0 0 0 1 0 0 2 0 0 0 0 2 0 0 0 0 2 2 0 0 0 0 0"},
        ],
    ),
    "HeadwaterDamagedPages": (
        [
            {'headwater_bad_pages_total{instance="a",fault="corrupt"}': "1+1x60"},
            {'headwater_bad_pages_total{instance="a",fault="corrupt"}': "_x8 1+0x80"},  # as a server says it
        ],
        [{'headwater_bad_pages_total{instance="a",fault="corrupt"}': "7+0x60"}],
    ),
    "HeadwaterStuckCalls": (
        [{'headwater_stuck_calls{instance="a",store="pool"}': "2+0x60"}],
        [{'headwater_stuck_calls{instance="a",store="pool"}': "0+0x60"}],
    ),
    "HeadwaterCostsMoreThanItSaves": (
        [
            {
                'headwater_lost_seconds_total{instance="a"}': "0+9x90",
                'headwater_saved_seconds_total{instance="a"}': "0+1x90",
            }
        ],
        [
            {
                'headwater_lost_seconds_total{instance="a"}': "0+0x90",
                'headwater_saved_seconds_total{instance="a"}': "0+0x90",
            }
        ],
    ),
    "HeadwaterCannotKeepUp": (
        [{'headwater_dropped_blocks_total{instance="a",tier="disk",reason="too_slow"}': "0+1x90"}],
        [{'headwater_dropped_blocks_total{instance="a",tier="disk",reason="no_parent"}': "0+1x90"}],
    ),
    "HeadwaterSlotsWithheld": (
        [{'headwater_device_slots{instance="a",state="quarantined"}': "1+0x60"}],
        [{'headwater_device_slots{instance="a",state="own"}': "1+0x60"}],
    ),
    "HeadwaterNotFinite": (
        [{'headwater_not_finite_requests_total{instance="a"}': "0+1x60"}],
        [{'headwater_not_finite_requests_total{instance="a"}': "3+0x60"}],
    ),
    "HeadwaterServerErrors": ([answers(500), answers(500, "0+0x60")], [answers(429)]),
    "HeadwaterNoUsableNode": (
        [nodes(), nodes(decode={"resting": 2}, prefill={"usable": 1}), nodes(mixed={"draining": 1})],
        [
            nodes(mixed={"usable": 1}),
            nodes(mixed={"full": 3}),
            nodes(prefill={"usable": 1}, decode={"usable": 1, "resting": 1}),
            nodes(prefill={"full": 1}, decode={"full": 1}),
        ],
    ),
}


@pytest.mark.parametrize("name", [one.name for one in ALERTS])
def test_an_alert_rings_when_it_should_and_not_otherwise(name: str, tmp_path: Path) -> None:
    rule = next(rule for rule in rules() if rule["alert"] == name)
    (tmp_path / "rules.yml").write_text(alerts())
    tests = []
    rings_for, not_for = CASES[name]
    for rings, series in [*((True, one) for one in rings_for), *((False, one) for one in not_for)]:
        label = re.findall(r'(\w+)="([^"]*)"', next(iter(series)))
        kept = re.findall(r"by \(([^)]*)\)", rule["expr"])[0].split(", ")
        labels = {key: value for key, value in label if key in kept} | rule["labels"]
        notes = {
            key: re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda found: labels[found[1]], text)  # noqa: B023
            for key, text in rule["annotations"].items()
        }
        tests.append(
            {
                "interval": "1m",
                "input_series": [{"series": key, "values": values} for key, values in series.items()],
                "alert_rule_test": [
                    {
                        "eval_time": "65m" if "30m" in rule["for"] else "20m",
                        "alertname": name,
                        "exp_alerts": [{"exp_labels": labels, "exp_annotations": notes}] if rings else [],
                    }
                ],
            }
        )
    path = tmp_path / "test.yml"
    path.write_text(json.dumps({"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": tests}))
    done = check(path, "test", "rules")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_command() -> None:
    for kind, text in (("grafana", grafana()), ("alerts", alerts())):
        assert CliRunner().invoke(app, ["boards", kind]).stdout == text + "\n"
    refused = CliRunner().invoke(app, ["boards", "paper"])
    assert refused.exit_code == 1
    assert "grafana and alerts" in refused.stderr
    assert boards.KINDS == ("grafana", "alerts")
