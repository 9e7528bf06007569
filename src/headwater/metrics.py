"""Counters, gauges, histograms and a ring of recent events, behind one small class; what Prometheus reads is made here.

Not a logger, not a server: rooms say here what happened and what it took, faces (command line, server) read it. The one
clock here dates events, for people; nothing goes by it. Every family of numbers is declared once, in FAMILIES;
Prometheus sees its name with `headwater_` before it.

Invariants:
- Counting never raises and waits for nothing but a short lock, because it is done where something else has just gone
  wrong. An undeclared name, wrong labels or an impossible amount are dropped and told, once per name, by an event
  `metric_misused`; where `Metrics.strict` is set, as our tests set it, they raise InvalidInput.
- Memory is bounded. Labels come from small fixed sets; should one not, then after `max_series` series new ones fall
  into one series per family, whose labels are all `overflow` (so that sums over a family stay right), and one event
  `overflow` says so.
- A Metrics belongs to one process: after fork() make another.
"""

import enum
import json
import math
import re
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import Any, ClassVar, Final

from headwater.core.errors import InvalidInput, NotInstalled

_TITLE: Final = re.compile(r"(\w+)(?:\{(.*)\})?")
_LABEL: Final = re.compile(r'\w+=("(?:[^"\\]|\\.)*")')
PREFIX: Final = "headwater_"
OVERFLOW: Final = "overflow"
# Upper ends of a histogram's buckets, two a decade: from what a look-up takes to what nobody waits for.
BUCKETS_S: Final = (*(float(f"{digit}e{power}") for power in range(-6, 2) for digit in (1, 3)), 100.0)


class MetricKind(enum.Enum):
    """What a family's numbers are."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


COUNTER: Final = MetricKind.COUNTER
GAUGE: Final = MetricKind.GAUGE
HISTOGRAM: Final = MetricKind.HISTOGRAM


@dataclass(frozen=True, slots=True)
class Family:
    """Numbers of one meaning, told apart by labels."""

    name: str
    kind: MetricKind
    labels: tuple[str, ...]
    help: str


# Counters end in _total, units are in names, labels in braces; their values are in the help where no enum has them.
_DECLARED: Final = (
    # What the cache is for.
    (COUNTER, "requests_total{outcome}", "Requests that were looked up, by what they got"),
    (COUNTER, "hit_tokens_total{tier}", "Prompt tokens that were not computed, by the tier that had them"),
    (
        COUNTER,
        "miss_tokens_total{reason}",
        "Prompt tokens to be computed: never_stored, evicted, failed, corrupt, too_late, not_worth_it, "
        "computed_meanwhile",
    ),
    (COUNTER, "saved_seconds_total", "Seconds of computing that hits made unnecessary, less the waiting, as estimated"),
    (COUNTER, "lost_seconds_total", "Seconds that requests waited beyond what computing would have taken"),
    (
        COUNTER,
        "tier_saved_seconds_total{tier}",
        "The same by tier, device among them: what its blocks would have cost, less its share of the waiting",
    ),
    (
        COUNTER,
        "tier_lost_seconds_total{tier}",
        "The same by tier, where its share of the waiting was more; none: it was waited, and nothing was loaded",
    ),
    (COUNTER, "waited_seconds_total", "Seconds that requests waited for the cache: what the saved ones cost"),
    (COUNTER, "split_loads_total", "Requests that computed the front of what was stored while its end was loaded"),
    (COUNTER, "split_blocks_total{how}", "Their stored blocks, by how the request got them: loaded, computed"),
    # Tiers, and the jobs that move blocks between them.
    (COUNTER, "jobs_total{tier,job,outcome}", "Jobs that ended, by outcome"),
    (HISTOGRAM, "job_seconds{tier,job}", "Seconds from a job's start to its end"),
    (COUNTER, "moved_bytes_total{tier,direction}", "Bytes that jobs moved, in and out of a tier"),
    (COUNTER, "duplicate_blocks_total", "Blocks that two requests computed: the second one's slot stayed its own"),
    (COUNTER, "evicted_blocks_total{tier}", "Blocks that a tier gave up for others"),
    (COUNTER, "purged_blocks_total{tier}", "Blocks, or pages of a store, removed because somebody wanted them gone"),
    (COUNTER, "dropped_blocks_total{tier,reason}", "Blocks that were to be kept in a tier and were not"),
    (GAUGE, "load_start_seconds{tier}", "Seconds that a load takes however small, as its tier's last loads say"),
    (
        GAUGE,
        "load_gib_seconds{tier}",
        "Seconds that a GiB more takes to be loaded, as a tier's last loads say; 0: unknown",
    ),
    (COUNTER, "trial_loads_total{tier}", "Loads of a small part, to see whether a tier that was too slow still is"),
    (GAUGE, "queue_jobs{tier}", "Jobs that wait for a tier"),
    (GAUGE, "queue_bytes{tier}", "Bytes of the jobs that wait for a tier"),
    (GAUGE, "breaker_state{tier}", "Whether a tier is used: 0 closed (it is), 1 half-open, 2 open, 3 off"),
    (COUNTER, "brain_failures_total", "How often the cache's brain failed: every block was a miss from then on"),
    (GAUGE, "brain_failed", "1 while every block is a miss because the brain failed; `headwater revive` ends it"),
    (COUNTER, "recorded_events_total{outcome}", "Events for the recording (--record): written, dropped"),
    (
        GAUGE,
        "device_slots{state}",
        "Blocks of device memory: free, own (a request's), known (to all), quarantined, leaving",
    ),
    (COUNTER, "rank_trouble_total{rank,job,reason}", "Jobs of which less came because of a rank, by what it said"),
    (HISTOGRAM, "rank_seconds{rank,job}", "Seconds from asking a rank to its answer"),
    # Stores.
    (COUNTER, "refused_calls_total{store,reason}", "Calls answered without asking the store, by why"),
    (GAUGE, "stuck_calls{store}", "Calls of a store that did not return by their deadline, and have not yet"),
    (COUNTER, "bad_pages_total{fault}", "Pages that a store gave and verification turned down, by fault"),
    (COUNTER, "bad_pages_kept_total", "Pages turned down that could not be removed from their store in time"),
    (COUNTER, "local_evicted_pages_total{medium}", "Pages that a LocalStore evicted: memory, disk"),
    (COUNTER, "sliced_total{tier,call,why}", "Sliced reads and writes, by what ended them; whole: nothing did"),
    # Who holds what in the cluster.
    (COUNTER, "residency_updates_total{outcome}", "Updates to the residency index: applied, stale, resync, failed ..."),
    (COUNTER, "residency_said_blocks_total", "Blocks whose state was told to the residency index"),
    (
        COUNTER,
        "residency_dropped_blocks_total{reason}",
        "Changes that were not told as such: unheard (a round told them later), book_full",
    ),
    (GAUGE, "residency_blocks", "Blocks that this node believes to hold in one tier or another"),
    (COUNTER, "residency_lookups_total{outcome}", "Questions to the residency index: answered, failed, paused"),
    (HISTOGRAM, "residency_lookup_seconds", "Seconds that one question to the residency index took"),
    # The server.
    (COUNTER, "http_requests_total{endpoint,status}", "HTTP requests; status gone: the client left before its answer"),
    (GAUGE, "connections", "Connections that are open"),
    (
        COUNTER,
        "connections_cut_total{why}",
        "Connections that the server ended: silent, slow, late, unread, crowded (others came), malformed",
    ),
    (COUNTER, "prompt_tokens_total", "Tokens of prompts that were answered, cached or computed"),
    (COUNTER, "generated_tokens_total", "Tokens of answers"),
    (HISTOGRAM, "ttft_seconds", "Seconds from a request's arrival at the engine to its first token"),
    (HISTOGRAM, "answer_seconds", "Seconds from a request's arrival at the engine to the end of its answer"),
    (GAUGE, "engine_requests", "Requests in the engine, waiting or running"),
    (COUNTER, "not_finite_requests_total", "Requests that ended because the model computed NaN or infinity"),
    (
        COUNTER,
        "handoffs_total{way,outcome}",
        "Prompts that were sent (out) or taken over (in): ok, or why not all came",
    ),
    (COUNTER, "handoff_bytes_total{way}", "Bytes that handoffs moved besides what the cache had moved already"),
    (HISTOGRAM, "handoff_seconds{way}", "Seconds that a handoff took, besides what the cache had moved already"),
    (
        HISTOGRAM,
        "pd_phase_seconds{phase}",
        "Seconds of requests that were handed over or taken: queue, prefill, pool_write, pool_read, decode",
    ),
    # The router.
    (
        COUNTER,
        "router_requests_total{outcome}",
        "Requests, by how they ended: answered, rejected, refused, failed, late, broken (in a stream), gone (client)",
    ),
    (
        COUNTER,
        "router_attempts_total{phase,outcome}",
        "Nodes asked for a prefill, a decode or both (mixed), by what came: ok, refused, failed, unreached, hung ...",
    ),
    (COUNTER, "router_choices_total{role,how}", "Nodes chosen: estimate (prefix, load, rates) or round_robin"),
    (
        HISTOGRAM,
        "router_phase_seconds{phase}",
        "Seconds of answered requests: queue, prefill, pool, decode or mixed (to a first token), retries, ttft, total",
    ),
    (GAUGE, "router_nodes{role,state}", "Nodes that are there: usable, draining, resting (after trouble), full"),
    (GAUGE, "router_under_way{state}", "Requests in the router: waiting (for room), running"),
    # Everything that is told.
    (COUNTER, "events_total{kind}", "Events, by kind"),
)


def _family(kind: MetricKind, declared: str, text: str) -> Family:
    name, _, labels = declared.rstrip("}").partition("{")
    return Family(name, kind, tuple(labels.split(",")) if labels else (), text)


FAMILIES: Final[Mapping[str, Family]] = {family.name: family for family in (_family(*row) for row in _DECLARED)}

_Key = tuple[object, ...]  # a name and labels as a call passes them
_Cell = list[float]  # a counter's or gauge's one number; a histogram's buckets, then its sum


@dataclass(frozen=True, slots=True)
class Notice:
    """Something worth telling a person: what, and the facts."""

    kind: str
    facts: dict[str, Any] = field(default_factory=dict)
    number: int = field(default=0, compare=False)  # of all events there were, from 1
    at_s: float = field(default=0.0, compare=False)  # on the clock on the wall


class Metrics:
    """Numbers by name and labels, and the last `ring_size` events. Safe from several threads."""

    strict: ClassVar[bool] = False  # whether misuse raises

    def __init__(self, *, ring_size: int = 1024, max_series: int = 10_000) -> None:
        # Reentrant, because a signal handler or a finalizer may count while its own thread is counting.
        self._lock = threading.RLock()
        self._max_series = max_series
        self._num_series = 0
        self._overflowed = False
        self._misuses_told: set[str] = set()
        self._events: deque[Notice] = deque(maxlen=ring_size)
        self._num_events = 0
        self._series: dict[str, dict[tuple[str, ...], _Cell]] = {name: {} for name in FAMILIES}  # by label values
        # The same cells by what calls pass, labels in any order: one look-up instead of checks.
        self._counters: dict[_Key, _Cell] = {}
        self._gauges: dict[_Key, _Cell] = {}
        self._histograms: dict[_Key, _Cell] = {}

    def count(self, name: str, /, amount: float = 1, **labels: str) -> None:
        """Add `amount`, in the unit of its name, to a counter."""
        try:
            if not 0 <= amount < math.inf:  # nor NaN, which would stay for ever
                raise InvalidInput(f"{name} cannot grow by {amount}")
            key = (name, *labels.items())
            cell = self._counters.get(key) or self._find(COUNTER, name, labels, key, self._counters)
            with self._lock:
                cell[0] += amount
        except (InvalidInput, TypeError) as error:
            self._misused(name, error)

    def take_in(self, grown: Mapping[str, float]) -> None:
        """Add what counters of another process grew by, under their titles there (`counters`)."""
        for title, amount in grown.items():
            name, values = labels_of(title)
            family = FAMILIES.get(name)
            if family is not None and len(values) == len(family.labels):
                self.count(name, amount, **dict(zip(family.labels, values, strict=True)))

    def gauge(self, name: str, /, value: float, **labels: str) -> None:
        """Say what a gauge stands at."""
        try:
            key = (name, *labels.items())
            cell = self._gauges.get(key) or self._find(GAUGE, name, labels, key, self._gauges)
            with self._lock:
                cell[0] = value + 0  # what is no number fails here, and not when somebody reads
        except (InvalidInput, TypeError) as error:
            self._misused(name, error)

    def observe(self, name: str, /, value: float, **labels: str) -> None:
        """Add one thing that took `value` seconds to a histogram."""
        try:
            if not 0 <= value < math.inf:
                raise InvalidInput(f"{name} cannot have taken {value} s")
            key = (name, *labels.items())
            cell = self._histograms.get(key) or self._find(HISTOGRAM, name, labels, key, self._histograms)
            with self._lock:
                cell[bisect_left(BUCKETS_S, value)] += 1
                cell[-1] += value
        except (InvalidInput, TypeError) as error:
            self._misused(name, error)

    def event(self, kind: str, /, **facts: Any) -> None:
        """Remember an event, and count it as `events_total` under its kind."""
        with self._lock:
            self.count("events_total", kind=kind)
            self._num_events += 1
            self._events.append(Notice(kind, facts, self._num_events, time.time()))

    def events(self, kind: str | None = None) -> list[Notice]:
        """The remembered events, oldest first, of one kind or all."""
        with self._lock:
            return [event for event in self._events if kind is None or event.kind == kind]

    def counters(self) -> dict[str, float]:
        """A copy of all counters that ever counted, each under a title like `bad_pages_total{fault="stale"}`."""
        with self._lock:
            counters = [family for family in FAMILIES.values() if family.kind is COUNTER]
            return {_title(one, of): cell[0] for one in counters for of, cell in self._series[one.name].items()}

    def numbers(self) -> dict[str, dict[tuple[str, ...], float]]:
        """A copy of all there is: by name, then by label values in their order; of a histogram its seconds."""
        with self._lock:
            return {name: {of: cell[-1] for of, cell in series.items()} for name, series in self._series.items()}

    def value(self, name: str, /, **labels: str) -> float:
        """The sum over a family's series that have these labels (all, some or none); of a histogram its seconds."""
        family = FAMILIES.get(name)
        if family is None or not labels.keys() <= set(family.labels):
            raise InvalidInput(f"no family {name} with labels {sorted(labels)} is declared")
        wanted = [(i, labels[label]) for i, label in enumerate(family.labels) if label in labels]
        with self._lock:
            series = self._series[name].items()
            return sum(cell[-1] for of, cell in series if all(of[i] == value for i, value in wanted))

    def prometheus(self) -> str:
        """Everything in Prometheus' text format. Raises NotInstalled where `prometheus_client` is missing."""
        try:
            from prometheus_client import CollectorRegistry, generate_latest
            from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
            from prometheus_client.registry import Collector
        except ModuleNotFoundError as error:
            raise NotInstalled("metrics for Prometheus need its client: pip install 'headwater[prometheus]'") from error

        ends = [*map(str, BUCKETS_S), "+Inf"]
        found: list[Metric] = []
        with self._lock:
            copies = {name: {of: list(cell) for of, cell in series.items()} for name, series in self._series.items()}
        for family in FAMILIES.values():
            name, series = PREFIX + family.name, copies[family.name]
            if family.kind is HISTOGRAM:
                histogram = HistogramMetricFamily(name, family.help, labels=family.labels)
                for of, cell in series.items():
                    buckets = list(zip(ends, accumulate(cell[:-1]), strict=True))
                    histogram.add_metric(of, buckets, sum_value=cell[-1])
                found.append(histogram)
            else:
                if family.kind is COUNTER and not family.labels:
                    series.setdefault((), [0])  # Prometheus is to see the first step, from 0
                make = CounterMetricFamily if family.kind is COUNTER else GaugeMetricFamily
                metric = make(name, family.help, labels=family.labels)
                for of, cell in series.items():
                    metric.add_metric(of, cell[0])
                found.append(metric)

        class Snapshot(Collector):
            def collect(self) -> list[Metric]:
                return found

        registry = CollectorRegistry(auto_describe=False)
        registry.register(Snapshot())
        return generate_latest(registry).decode()

    def _find(
        self, kind: MetricKind, name: str, labels: Mapping[str, str], key: _Key, cells: dict[_Key, _Cell]
    ) -> _Cell:
        """The cell that a call means, made if need be."""
        family = FAMILIES.get(name)
        if family is None or family.kind is not kind:
            raise InvalidInput(f"no {kind.value} {name} is declared in headwater.metrics")
        if labels.keys() != set(family.labels):
            raise InvalidInput(f"{name} has the labels {family.labels}, not {tuple(labels)}")
        # What UTF-8 cannot say (half a surrogate, from the name of a file) would fail every reader from then on.
        of = tuple(str(labels[label]).encode(errors="replace").decode() for label in family.labels)
        empty: _Cell = [0] * (len(BUCKETS_S) + 2 if kind is HISTOGRAM else 1)
        with self._lock:
            series = self._series[name]
            if of not in series and self._num_series >= self._max_series:
                if not self._overflowed:
                    self._overflowed = True
                    self.event(OVERFLOW, family=name, max_series=self._max_series)
                return series.setdefault((OVERFLOW,) * len(of), empty)
            if of not in series:
                series[of] = empty
                self._num_series += 1
            if len(cells) < self._max_series:
                cells[key] = series[of]
            return series[of]

    def _misused(self, name: str, error: Exception) -> None:
        if self.strict:
            raise error
        with self._lock:
            if name not in self._misuses_told and len(self._misuses_told) < self._max_series:
                self._misuses_told.add(name)
                self.event("metric_misused", name=name, reason=str(error))


@lru_cache(maxsize=4096)
def labels_of(title: str) -> tuple[str, tuple[str, ...]]:
    """A counter's name and the values of its labels, in order, from `Metrics.counters`' title."""
    found = _TITLE.fullmatch(title)
    if found is None:
        return title, ()
    name, labels = found.groups()
    return name, tuple(str(json.loads(value)) for value in _LABEL.findall(labels or ""))


def _title(family: Family, of: tuple[str, ...]) -> str:
    pairs = (f"{label}={json.dumps(value)}" for label, value in zip(family.labels, of, strict=True))
    return f"{family.name}{{{','.join(pairs)}}}" if of else family.name
