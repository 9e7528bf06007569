"""A Grafana board and Prometheus alert rules, made for the families that `metrics.py` declares.

Expressions are written without `headwater_` and without a choice of servers: `_query` puts them in, and refuses a
family or a label that is not declared, so that a board cannot outlive what it shows. Not here: what a board looks like
to Grafana beyond titles, units and places.
"""

import json
import re
from dataclasses import dataclass
from typing import Any, Final

from headwater.core.errors import InvalidInput
from headwater.metrics import FAMILIES, PREFIX, Family, MetricKind

KINDS: Final = ("grafana", "alerts")
#: Labels that are summed by; a range; a name, and what is chosen of it.
_PART: Final = re.compile(
    r"\bby ?\((?P<by>[^)]*)\)|\[[^\]]*\]|(?<![\w.])(?P<name>[a-z_]\w*)(?:\{(?P<inside>[^}]*)\})?", re.IGNORECASE
)
_LABEL: Final = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"')
_WORDS: Final = frozenset(
    {"sum", "max", "rate", "increase", "histogram_quantile", "min_over_time", "vector", "and", "or", "unless", "offset"}
)
_SUFFIXES: Final = ("_bucket", "_sum", "_count")
_PLACE: Final = frozenset({"instance", "job", "le"})
_RATE: Final = "[$__rate_interval]"


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture: what it shows, in which unit (Grafana's names), and its lines by legend."""

    title: str
    unit: str
    lines: tuple[tuple[str, str], ...]  # legend, expression
    help: str = ""
    stacked: bool = False


@dataclass(frozen=True, slots=True)
class Alert:
    """A rule: when somebody has to look, and what to do then."""

    name: str
    expression: str
    hold: str  # for how long it must be true
    severity: str
    summary: str
    todo: str


def _quantiles(family: str, by: str = "") -> tuple[tuple[str, str], ...]:
    labels = f"le, {by}" if by else "le"
    legend = f"{{{{{by}}}}} " if by else ""
    return tuple(
        (f"{legend}p{share}", f"histogram_quantile(0.{share}, sum by ({labels}) (rate({family}_bucket{_RATE})))")
        for share in ("50", "99")
    )


def _rates(family: str, by: str) -> tuple[tuple[str, str], ...]:
    return ((f"{{{{{by}}}}}", f"sum by ({by}) (rate({family}{_RATE}))"),)


_HITS: Final = f"(sum(rate(hit_tokens_total{_RATE})) or vector(0))"  # before the first hit there is no series
_MISSES: Final = f"sum(rate(miss_tokens_total{_RATE}))"

BOARD: Final[tuple[tuple[str, tuple[Panel, ...]], ...]] = (
    (
        "What it pays",
        (
            Panel(
                "Hit ratio",
                "percentunit",
                (("hit ratio", f"{_HITS} / ({_HITS} + {_MISSES})"),),
                "Prompt tokens that were not computed, of all.",
            ),
            Panel("Hits by tier", "short", _rates("hit_tokens_total", "tier"), "Tokens a second.", stacked=True),
            Panel("Misses by reason", "short", _rates("miss_tokens_total", "reason"), "Tokens a second.", stacked=True),
            Panel(
                "Seconds saved and lost",
                "short",
                (
                    ("saved by {{tier}}", f"sum by (tier) (rate(tier_saved_seconds_total{_RATE}))"),
                    ("lost by {{tier}}", f"-sum by (tier) (rate(tier_lost_seconds_total{_RATE}))"),
                ),
                "Of computing, a second: 1 is a device that is free all the time.",
                stacked=True,
            ),
            Panel("Time to first token", "s", _quantiles("ttft_seconds")),
            Panel(
                "Waiting for the cache",
                "short",
                (("seconds a second", f"sum(rate(waited_seconds_total{_RATE}))"),),
                "What the saved seconds cost.",
            ),
        ),
    ),
    (
        "Tiers",
        (
            Panel(
                "Breakers",
                "short",
                (("{{tier}}", "max by (tier) (breaker_state)"),),
                "0: in use, 1: tried, 2: left alone, 3: off until `headwater revive`.",
            ),
            Panel(
                "Bytes moved",
                "Bps",
                (("{{tier}} {{direction}}", f"sum by (tier, direction) (rate(moved_bytes_total{_RATE}))"),),
            ),
            Panel("Waiting to be moved", "bytes", (("{{tier}}", "sum by (tier) (queue_bytes)"),)),
            Panel("Jobs", "s", _quantiles("job_seconds", "tier")),
            Panel("Not kept, by reason", "short", _rates("dropped_blocks_total", "reason"), "Blocks a second."),
            Panel("Evicted", "short", _rates("evicted_blocks_total", "tier"), "Blocks a second."),
            Panel("Seconds to load a GiB", "s", (("{{tier}}", "max by (tier) (load_gib_seconds)"),), "0: unknown yet."),
            Panel("Device memory", "short", (("{{state}}", "sum by (state) (device_slots)"),), "Blocks.", stacked=True),
        ),
    ),
    (
        "Trouble",
        (
            Panel("Pages turned down", "short", _rates("bad_pages_total", "fault"), "A second, each a miss."),
            Panel("Calls that do not return", "short", (("{{store}}", "max by (store) (stuck_calls)"),)),
            Panel("Stores not asked", "short", _rates("refused_calls_total", "reason"), "Calls a second."),
            Panel("Brain failed", "short", (("{{instance}}", "max by (instance) (brain_failed)"),)),
            Panel("HTTP by status", "reqps", _rates("http_requests_total", "status"), stacked=True),
            Panel("Connections cut", "short", _rates("connections_cut_total", "why"), "A second."),
        ),
    ),
    (
        "Prefill and decode apart, and the router",
        (
            Panel("Handoffs", "reqps", _rates("handoffs_total", "outcome")),
            Panel("Handoff", "s", _quantiles("handoff_seconds", "way")),
            Panel("Router: requests", "reqps", _rates("router_requests_total", "outcome"), stacked=True),
            Panel("Router: phases", "s", _quantiles("router_phase_seconds", "phase")),
            Panel("Nodes", "short", (("{{role}} {{state}}", "sum by (role, state) (router_nodes)"),)),
            Panel("Router: under way", "short", (("{{state}}", "sum by (state) (router_under_way)"),)),
        ),
    ),
)

_WORKING: Final = 'sum by (instance) (router_nodes{{role="{}", state=~"usable|full"}})'
_ANSWERS: Final = 'endpoint=~"/v1/completions|/v1/chat/completions|/pd/prefill|/pd/decode"'
ALERTS: Final = (
    Alert(
        "HeadwaterBrainFailed",
        "max by (instance) (brain_failed) > 0",
        "1m",
        "critical",
        "The cache on {{ $labels.instance }} answers with misses only",
        "Keep its log, then: headwater revive",
    ),
    Alert(
        "HeadwaterTierOff",
        "max by (instance, tier) (min_over_time(breaker_state[5m])) > 0",  # now and then it is tried
        "1m",
        "warning",
        "{{ $labels.tier }} of {{ $labels.instance }} is not used",
        "Look for the store's last error in the log or at /; headwater revive once it is mended",
    ),
    Alert(
        "HeadwaterDamagedPages",
        "sum by (instance, fault) (increase(bad_pages_total[15m])) > 0"  # and a series that was born with a fault:
        " or sum by (instance, fault) (bad_pages_total unless bad_pages_total offset 15m) > 0",
        "0m",
        "warning",
        "{{ $labels.instance }} was given damaged pages ({{ $labels.fault }}); they were computed instead",
        "headwater check DIR on its store; look at that disk, memory or network",
    ),
    Alert(
        "HeadwaterStuckCalls",
        "max by (instance, store) (stuck_calls) > 0",
        "2m",
        "warning",
        "Calls of {{ $labels.store }} on {{ $labels.instance }} do not return",
        "That disk or pool hangs: its calls were given up, and their memory is kept until they return",
    ),
    Alert(
        "HeadwaterCostsMoreThanItSaves",
        "sum by (instance) (rate(lost_seconds_total[30m])) > sum by (instance) (rate(saved_seconds_total[30m]))",
        "30m",
        "warning",
        "Hits on {{ $labels.instance }} wait longer than computing would take",
        "headwater top shows which tier; headwater doctor what is slow",
    ),
    Alert(
        "HeadwaterCannotKeepUp",
        'sum by (instance, tier) (rate(dropped_blocks_total{reason=~"queue_full|too_slow"}[15m])) > 0',
        "30m",
        "info",
        "{{ $labels.tier }} of {{ $labels.instance }} is too slow to keep what is computed",
        "A faster store, or several nodes on several disks; headwater plan says what it would bring",
    ),
    Alert(
        "HeadwaterSlotsWithheld",
        'max by (instance) (device_slots{state="quarantined"}) > 0',
        "10m",
        "warning",
        "Device memory of {{ $labels.instance }} is withheld: a copy may still write there",
        "If it stays, the device or a store hangs: restart that server",
    ),
    Alert(
        "HeadwaterNotFinite",
        "sum by (instance) (increase(not_finite_requests_total[15m])) > 0",
        "0m",
        "critical",
        "The model on {{ $labels.instance }} computed NaN or infinity",
        "Not the cache: check weights, precision and the device",
    ),
    Alert(
        "HeadwaterServerErrors",
        f'sum by (instance) (rate(http_requests_total{{{_ANSWERS}, status=~"5.."}}[5m]))'
        f" > 0.01 * sum by (instance) (rate(http_requests_total{{{_ANSWERS}}}[5m]))",
        "5m",
        "warning",
        "More than one request in a hundred fails on {{ $labels.instance }}",
        "Its log says why; 503 with a Retry-After is a server that is full",
    ),
    Alert(
        "HeadwaterNoUsableNode",
        f"{_WORKING.format('mixed')} == 0 and ({_WORKING.format('prefill')} == 0 or {_WORKING.format('decode')} == 0)",
        "1m",
        "critical",
        "No nodes of the router {{ $labels.instance }} can answer a request",
        "Its page at / shows the nodes, and why each is not used",
    ),
)


def grafana() -> str:
    """The board, as JSON to import. It asks for a Prometheus data source, and which servers to show."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in BOARD:
        panels.append({"type": "row", "title": title, "collapsed": False, "gridPos": _place(0, top, 24, 1)})
        top += 1
        for i, panel in enumerate(row):
            panels.append(_panel(panel, _place(8 * (i % 3), top + 8 * (i // 3), 8, 8)))
        top += 8 * -(-len(row) // 3)
    for number, one in enumerate(panels, 1):
        one["id"] = number
    board = {
        "title": "Headwater",
        "uid": "headwater",
        "tags": ["headwater"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": [_SOURCE, _INSTANCES]},
        "panels": panels,
    }
    return json.dumps(board, indent=2)


def alerts() -> str:
    """The rules, as a file for Prometheus' `rule_files`. JSON is YAML."""
    rules = [
        {
            "alert": one.name,
            "expr": _query(one.expression, ""),
            "for": one.hold,
            "labels": {"severity": one.severity},
            "annotations": {"summary": one.summary, "description": one.todo},
        }
        for one in ALERTS
    ]
    return json.dumps({"groups": [{"name": "headwater", "rules": rules}]}, indent=2)


_DATA_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
_SOURCE: Final = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
_INSTANCES: Final = {
    "name": "instance",
    "label": "Server",
    "type": "query",
    "datasource": _DATA_SOURCE,
    "query": {"query": f"label_values({PREFIX}generated_tokens_total, instance)", "refId": "instances"},
    "refresh": 2,
    "multi": True,
    "includeAll": True,
    "allValue": ".*",
    "current": {"text": "All", "value": "$__all"},
}


def _place(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def _panel(panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    targets = [
        {
            "refId": chr(ord("A") + i),
            "datasource": _DATA_SOURCE,
            "expr": _query(expression, 'instance=~"$instance"'),
            "legendFormat": legend,
        }
        for i, (legend, expression) in enumerate(panel.lines)
    ]
    stacking = {"mode": "normal" if panel.stacked else "none"}
    custom = {"fillOpacity": 30 if panel.stacked else 0, "stacking": stacking}
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.help,
        "datasource": _DATA_SOURCE,
        "gridPos": place,
        "targets": targets,
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": custom}, "overrides": []},
    }


def _query(expression: str, chosen: str) -> str:
    """With `headwater_`, and the choice of servers. Raises InvalidInput for a name or label that is not declared."""
    labels: set[str] = set(_PLACE)

    def named(found: re.Match[str]) -> str:
        name, inside = found["name"], found["inside"] or ""
        if name is None or name in _WORDS:
            return found[0]
        family = _family(name)
        labels.update(family.labels)
        _require(set(_LABEL.findall(inside)) <= set(family.labels), f"{family.name} has not all labels of {inside}")
        both = ", ".join(filter(None, (inside, chosen)))
        return f"{PREFIX}{name}{{{both}}}" if both else f"{PREFIX}{name}"

    query = _PART.sub(named, expression)
    for found in _PART.finditer(expression):
        asked = {one.strip() for one in (found["by"] or "instance").split(",")}
        _require(asked <= labels, f"no family of {expression!r} has the label {', '.join(sorted(asked - labels))}")
    return query


def _family(name: str) -> Family:
    """The declared family that a name in an expression is of."""
    family = FAMILIES.get(name)
    if family is not None:
        _require(family.kind is not MetricKind.HISTOGRAM, f"{name} is a histogram: ask for its _bucket, _sum or _count")
        return family
    bare = next((name.removesuffix(suffix) for suffix in _SUFFIXES if name.endswith(suffix)), name)
    family = FAMILIES.get(bare)
    if family is None or family.kind is not MetricKind.HISTOGRAM:
        raise InvalidInput(f"no family {name} is declared")
    return family


def _require(holds: bool, says: str) -> None:  # noqa: FBT001  what holds
    if not holds:
        raise InvalidInput(says)
