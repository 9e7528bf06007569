"""Metrics: what is counted is what Prometheus reads; misuse raises here and never in production; memory is bounded."""

import ast
import math
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from headwater.build import open_engine
from headwater.config.serve import ServeConfig
from headwater.core.errors import HeadwaterError, InvalidInput, NotInstalled
from headwater.engine.make_model import make_model
from headwater.engine.request import Request, Sampling
from headwater.metrics import BUCKETS_S, FAMILIES, PREFIX, MetricKind, Metrics

SOURCE = Path(__file__).resolve().parents[2] / "src" / "headwater"


@pytest.fixture
def production(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Metrics, "strict", False)


def parsed(metrics: Metrics) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(metrics.prometheus())}


def samples(metrics: Metrics, name: str) -> dict[tuple[str, ...], float]:
    """Values of one sample name, by label values in the order of label names."""
    return {
        tuple(sample.labels[label] for label in sorted(sample.labels)): sample.value
        for family in parsed(metrics).values()
        for sample in family.samples
        if sample.name == PREFIX + name
    }


# --- counting ---------------------------------------------------------------------------------------------------------


def test_counters_and_gauges_by_labels_in_any_order() -> None:
    metrics = Metrics()
    metrics.count("jobs_total", 3, tier="host", job="get", outcome="hit")
    metrics.count("jobs_total", 2, outcome="hit", tier="host", job="get")
    metrics.count("jobs_total", tier="disk", job="get", outcome="miss")
    metrics.count("saved_seconds_total", 0.25)
    metrics.count("saved_seconds_total", amount=0.5)
    metrics.gauge("queue_jobs", 7, tier="host")
    metrics.gauge("queue_jobs", 4, tier="host")
    metrics.gauge("queue_jobs", 1, tier="disk")
    assert metrics.counters() == {
        "saved_seconds_total": 0.75,
        'jobs_total{tier="host",job="get",outcome="hit"}': 5,
        'jobs_total{tier="disk",job="get",outcome="miss"}': 1,
    }
    assert metrics.value("jobs_total", tier="host", job="get", outcome="hit") == 5
    assert metrics.value("jobs_total", job="get") == 6
    assert metrics.value("jobs_total", tier="pool") == 0
    assert metrics.value("queue_jobs", tier="host") == 4
    assert metrics.value("queue_jobs") == 5


def test_events_are_kept_in_a_ring_and_counted() -> None:
    metrics = Metrics(ring_size=2)
    for i in range(3):
        metrics.event("bad_page", name=str(i), kind="a fact may be called that")
    metrics.event("local_down")
    assert [event.facts.get("name") for event in metrics.events()] == ["2", None]
    assert [event.kind for event in metrics.events("local_down")] == ["local_down"]
    assert metrics.value("events_total", kind="bad_page") == 3


def test_threads_lose_nothing() -> None:
    metrics = Metrics()
    rounds, num_threads = 5000, 4

    def work(tier: str) -> None:
        for i in range(rounds):
            metrics.count("hit_tokens_total", 2, tier=tier)
            metrics.observe("job_seconds", 0.5, tier=tier, job="load")
            metrics.gauge("queue_jobs", i, tier=tier)
            if i % 100 == 0:
                metrics.counters()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(("host", "disk")[i % 2],)) for i in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert metrics.value("hit_tokens_total") == 2 * rounds * num_threads
    assert metrics.value("job_seconds") == 0.5 * rounds * num_threads
    assert samples(metrics, "job_seconds_count") == {
        ("load", tier): rounds * num_threads / 2 for tier in ("host", "disk")
    }


def test_counting_while_counting_does_not_hang() -> None:
    metrics = Metrics()

    class Amount(float):
        def __radd__(self, other: float) -> float:  # runs inside the lock, as a signal handler or a finalizer may
            metrics.event("local_down")
            return other + float(self)

    metrics.count("saved_seconds_total", Amount(2))
    assert metrics.value("saved_seconds_total") == 2
    assert metrics.value("events_total", kind="local_down") == 1


# --- misuse -----------------------------------------------------------------------------------------------------------

MISUSES: list[Callable[[Metrics], None]] = [
    lambda metrics: metrics.count("no_such_total"),
    lambda metrics: metrics.count("queue_jobs", tier="host"),
    lambda metrics: metrics.gauge("hit_tokens_total", 1, tier="host"),
    lambda metrics: metrics.observe("hit_tokens_total", 1, tier="host"),
    lambda metrics: metrics.count("hit_tokens_total"),
    lambda metrics: metrics.count("hit_tokens_total", tier="host", reason="more"),
    lambda metrics: metrics.count("hit_tokens_total", reason="other"),
    lambda metrics: metrics.count("hit_tokens_total", -1, tier="host"),
    lambda metrics: metrics.count("hit_tokens_total", math.nan, tier="host"),
    lambda metrics: metrics.count("hit_tokens_total", math.inf, tier="host"),
    lambda metrics: metrics.count("hit_tokens_total", "1", tier="host"),  # type: ignore[arg-type]
    lambda metrics: metrics.count("hit_tokens_total", tier=["host"]),  # type: ignore[arg-type]
    lambda metrics: metrics.gauge("queue_jobs", None, tier="host"),  # type: ignore[arg-type]
    lambda metrics: metrics.observe("job_seconds", -0.1, tier="host", job="load"),
]


@pytest.mark.parametrize("misuse", MISUSES)
def test_misuse_raises_in_tests(misuse: Callable[[Metrics], None]) -> None:
    with pytest.raises((InvalidInput, TypeError)):
        misuse(Metrics())


@pytest.mark.parametrize("misuse", MISUSES)
def test_misuse_in_production_is_dropped_and_told_once(misuse: Callable[[Metrics], None], production: None) -> None:
    metrics = Metrics()
    misuse(metrics)
    misuse(metrics)
    (told,) = metrics.events()
    assert told.kind == "metric_misused"
    assert told.facts["reason"]
    assert metrics.counters() == {'events_total{kind="metric_misused"}': 1}
    metrics.prometheus()


def test_reading_what_is_not_declared_raises() -> None:
    for name, labels in (("no_such_total", {}), ("hit_tokens_total", {"reason": "x"})):
        with pytest.raises(InvalidInput, match=name):
            Metrics().value(name, **labels)


def test_every_call_in_the_tree_fits_the_table() -> None:
    """Also calls that no test reaches: names and labels are literals, so they can be read."""
    kinds = {
        "count": MetricKind.COUNTER,
        "add": MetricKind.COUNTER,
        "gauge": MetricKind.GAUGE,
        "observe": MetricKind.HISTOGRAM,
        "value": None,
    }
    found = 0
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in kinds):
                continue
            owner, kind = node.func.value, kinds[node.func.attr]
            named = (owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")).lstrip("_")
            if named not in ("metrics", "accounts") or (named == "accounts") != (node.func.attr == "add"):
                continue
            where = f"{path.relative_to(SOURCE)}:{node.lineno}"
            if where.startswith("cache/shell.py") and not isinstance(node.args[0], ast.Constant):
                continue  # passes on what accounts.add counted, which is looked at here
            name = ast.literal_eval(node.args[0])  # fails where it is not a literal
            assert name in FAMILIES, f"{where}: {name} is not declared"
            family = FAMILIES[name]
            labels = {keyword.arg for keyword in node.keywords} - {"amount", "value"}
            if kind is not None:
                assert family.kind is kind, f"{where}: {family.name} is a {family.kind.value}"
                assert labels == set(family.labels), f"{where}: {family.name} has the labels {family.labels}"
            found += 1
    assert found >= 10


def test_the_table_keeps_its_own_rules() -> None:
    for family in FAMILIES.values():
        assert family.name.endswith("_total") == (family.kind is MetricKind.COUNTER), family
        assert family.kind is not MetricKind.HISTOGRAM or family.name.endswith("_seconds"), family
        assert family.help, family
        assert len(set(family.labels)) == len(family.labels), family
        assert not {"amount", "value", "le"} & set(family.labels), family  # arguments, and Prometheus' own
    assert len({name.removesuffix("_total") for name in FAMILIES}) == len(FAMILIES)  # OpenMetrics drops _total


# --- bounds -----------------------------------------------------------------------------------------------------------


def test_too_many_series_overflow_and_one_event_says_so() -> None:
    metrics = Metrics(max_series=10)
    for i in range(100):
        metrics.count("hit_tokens_total", 2, tier=f"tier {i}")
        metrics.observe("job_seconds", 0.5, tier=f"tier {i}", job="load")
        metrics.gauge("queue_jobs", i, tier=f"tier {i}")
    metrics.count("hit_tokens_total", 5, tier="tier 0")
    metrics.count("saved_seconds_total", 3)
    assert metrics.value("hit_tokens_total") == 205
    assert metrics.value("hit_tokens_total", tier="tier 0") == 7
    assert metrics.value("hit_tokens_total", tier="overflow") > 150
    assert metrics.value("job_seconds") == 50
    assert metrics.value("saved_seconds_total") == 3
    assert [event.kind for event in metrics.events()] == ["overflow"]
    assert metrics.value("events_total", kind="overflow") == 1
    num_series = (
        len(metrics.counters()) + len(samples(metrics, "job_seconds_count")) + len(samples(metrics, "queue_jobs"))
    )
    assert num_series <= 10 + len(FAMILIES)


def test_the_default_bound_holds() -> None:
    metrics = Metrics()
    for i in range(10_100):
        metrics.event(f"kind {i}")
    assert len(metrics.counters()) == 10_001
    assert metrics.value("events_total") == 10_101  # and the one that tells of it


# --- Prometheus -------------------------------------------------------------------------------------------------------


def test_prometheus_reads_what_was_counted() -> None:
    metrics = Metrics()
    metrics.count("moved_bytes_total", 1 << 50, tier="host", direction="in")
    metrics.count("waited_seconds_total", 0.125)
    metrics.gauge("breaker_state", 2, tier="disk")
    metrics.event("local_rebuilt")
    families = parsed(metrics)
    assert set(families) == {PREFIX + name.removesuffix("_total") for name in FAMILIES}
    for name, family in FAMILIES.items():
        found = families[PREFIX + name.removesuffix("_total")]
        assert (found.type, found.documentation) == (family.kind.value, family.help)
    assert samples(metrics, "moved_bytes_total") == {("in", "host"): 1 << 50}
    assert samples(metrics, "waited_seconds_total") == {(): 0.125}
    assert samples(metrics, "saved_seconds_total") == {(): 0}
    assert samples(metrics, "breaker_state") == {("disk",): 2}
    assert samples(metrics, "events_total") == {("local_rebuilt",): 1}


def test_a_histogram_counts_up_to_each_end() -> None:
    metrics = Metrics()
    assert (BUCKETS_S[0], BUCKETS_S[-1], len(BUCKETS_S)) == (1e-6, 100, 17)
    assert list(BUCKETS_S) == sorted(BUCKETS_S)
    observed = [0, 1e-6, 1.5e-6, 0.01, 0.0101, 100, 101]
    for seconds in observed:
        metrics.observe("job_seconds", seconds, tier="host", job="get")
    found = {end: value for (_, end, _), value in samples(metrics, "job_seconds_bucket").items()}
    assert found.pop("+Inf") == len(observed)
    assert found == {str(end): sum(seconds <= end for seconds in observed) for end in BUCKETS_S}
    assert samples(metrics, "job_seconds_count") == {("get", "host"): len(observed)}
    assert samples(metrics, "job_seconds_sum") == {("get", "host"): pytest.approx(sum(observed))}
    assert metrics.value("job_seconds", tier="host") == pytest.approx(sum(observed))


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), st.integers(0, 1 << 53), min_size=1))
@example({'a "quoted" name': 1, "two\nlines": 2, "back\\slash": 3, "\\n": 4, "": 5, "{}=,": 6, "Grüße \u2028": 7})
def test_odd_labels_survive(amounts: dict[str, int]) -> None:
    metrics = Metrics()
    for tier, amount in amounts.items():
        metrics.count("hit_tokens_total", amount, tier=tier)
    assert samples(metrics, "hit_tokens_total") == {(tier,): amount for tier, amount in amounts.items()}
    assert len(metrics.counters()) == len(amounts)


def test_a_label_that_utf8_cannot_say_spoils_nothing() -> None:
    metrics = Metrics()
    metrics.count("hit_tokens_total", tier="half a \udc80")
    metrics.count("hit_tokens_total", tier="half a \udc80")
    assert samples(metrics, "hit_tokens_total") == {("half a ?",): 2}


def test_without_the_client_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.partition(".")[0] == "prometheus_client"]:
        monkeypatch.setitem(sys.modules, module, None)
    metrics = Metrics()
    metrics.count("hit_tokens_total", tier="host")
    with pytest.raises(NotInstalled, match=r"pip install 'headwater\[prometheus\]'") as caught:
        metrics.prometheus()
    assert isinstance(caught.value, HeadwaterError)


def test_only_prometheus_loads_the_client() -> None:
    code = "import sys, headwater.build, headwater.cli; sys.exit('prometheus_client' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- what a server fills ----------------------------------------------------------------------------------------------

TROUBLE = {  # counted when something goes wrong, is shared or is dropped: not in the life of this server
    *(
        "saved_seconds_total",
        "lost_seconds_total",
        "duplicate_blocks_total",
        "evicted_blocks_total",
        "dropped_blocks_total",
    ),
    *("brain_failures_total", "recorded_events_total", "bad_pages_total", "bad_pages_kept_total"),
    "purged_blocks_total",  # when somebody asks for it
    *("rank_trouble_total", "rank_seconds", "trial_loads_total"),
    *("refused_calls_total", "stuck_calls", "sliced_total"),  # of stores that are called on threads of their own
    *("split_loads_total", "split_blocks_total"),  # its stores are fast
    *("local_evicted_pages_total", "local_log_full_total"),
}


@pytest.mark.fault("D6")
def test_a_server_fills_every_family_of_caches_and_stores_but_those_of_trouble(tmp_path: Path, shm: Path) -> None:
    make_model("llama", tmp_path / "model")
    config = ServeConfig(
        model=tmp_path / "model",
        num_blocks=64,
        host_directory=shm / "host",
        host_bytes=8 << 20,
        disk_directory=tmp_path / "disk",
        disk_bytes=8 << 20,
    )
    metrics = Metrics()
    for turn in range(2):  # the second finds what the first stored
        with open_engine(config, metrics=metrics) as running:
            for number in range(3):
                over = threading.Event()
                sampling = Sampling(max_tokens=2, temperature=0, ignore_eos=True)
                request = Request(
                    name=f"{turn} {number}",
                    prompt=[1] * 70,
                    sampling=sampling,
                    listen=lambda output, over=over: over.set() if output.finish is not None else None,  # type: ignore[misc]
                )
                running.engine.submit(request)
                assert over.wait(60)
            assert running.cache.drain(60)
            running.cache.gauges()
    names = list(FAMILIES)
    ours = names[: names.index("residency_updates_total")]
    filled = {name for name in ours if any(metrics._series[name].values())}
    assert not set(ours) - filled - TROUBLE
