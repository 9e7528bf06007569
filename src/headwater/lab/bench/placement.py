"""`headwater bench placement`: a stream of requests over tiers whose pace changes under way, in simulated time.

A real brain hears a real stream of events; only the seconds are made up. Beside it stands an oracle that knows for each
request what loading all of its blocks and what computing them would take, and does the better. So the ratio of the two
totals is what the brain loses by having to learn: what it loads too late or too long after a change, its trials, and
what it does not dare.

Each stream runs twice: as an engine lives it that computes while the end of a prompt is loaded (`meet_*`), and one that
waits for loads, as vLLM does.

Not measured here: the machine. With the same seed the figures are the same everywhere.
"""

import hashlib
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from headwater.cache.placement import ComputeCost
from headwater.cache.state import Brain
from headwater.config.cache import CacheConfig, SaveWhen, TierConfig
from headwater.core import events as ev
from headwater.core.errors import HeadwaterError, InvalidConfig
from headwater.core.keys import BlockKey
from headwater.core.results import Reason, Status
from headwater.lab.bench.report import BenchReport, Samples, Tell

_BLOCK_TOKENS: Final = 64
_BLOCK_BYTES: Final = 8 << 20  # of an 8B model's shape, in bf16
_COST: Final = ComputeCost(1.31e-3, 7.55e-6)  # of such a block on an H200: 229 ms for 8,192 tokens, 1,658 for 32,768
_BLOCKS: Final = (8, 512)  # of a prompt, from and to; as many short as long ones
_GAP_S: Final = 0.5  # between requests, on average
_LAG_S: Final = 5e-4  # until the brain hears of what was loaded
_STEP_BLOCKS: Final = 16  # that a request which meets its load would compute next
_LOOK_S: Final = 2e-3  # until one asks again that stands before blocks on their way
_NOTES: Final = {
    "ratio": "seconds of all requests / seconds of an oracle that does for each what is better, loading or computing "
    "all; median over seeds, paces change as in `changes`",
    "ratio_worst": "the same, of the worst seed",
    "random_ratio": "as ratio, and each tier changes its pace every twenty to eighty requests",
    "random_ratio_worst": "the same, of the worst seed",
    "outliers_ratio": "as ratio, and one load in a hundred takes ten times as long, which only the oracle knows before",
    "outliers_ratio_worst": "the same, of the worst seed",
    "steady_ratio": "as ratio, and nothing changes",
    "always_load": "as ratio, had all been loaded",
    "always_compute": "as ratio, had all been computed",
    "found_s": "the longest time from a tier's becoming fast to the first whole load from it, over seeds",
    "trial_share": "seconds that loads of a small part took, in all seconds; median over seeds",
    "slower_share": "requests that took more than 1.1 times as long as had they been computed; median over seeds",
    "meet_*": "the same, where what is slow to load is loaded from its end while the engine computes from its front; "
    "the oracle does one of both, as before",
    "right": "whether meet_ratio_worst is at most 1.02: what is promised",
}


@dataclass(frozen=True, slots=True)
class _Pace:
    """What a tier takes: to start, and for each block."""

    start_s: float
    block_s: float

    def seconds(self, num_blocks: int) -> float:
        return self.start_s + num_blocks * self.block_s if num_blocks else 0.0


_TIERS: Final = {"host": _Pace(1e-3, 0.2e-3), "disk": _Pace(2e-3, 0.7e-3), "pool": _Pace(5e-3, 1.2e-3)}
# (tier, from which of a thousand requests on, times as slow): a throttled disk, and a pool that others use.
_CHANGES: Final = (("disk", 200, 4.0), ("pool", 350, 5.0), ("disk", 550, 1.0), ("pool", 750, 1.0))


@dataclass(slots=True)
class _World:
    """The tiers as they are now, and what happens to whom."""

    seed: int
    num_requests: int
    changes: Sequence[tuple[str, int, float]]
    outliers: float = 0.0
    noise: float = 0.05
    slowness: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_TIERS, 1.0))
    fast_since: dict[str, float] = field(default_factory=dict)  # tiers that became fast and were not found yet
    found_s: float = 0.0

    def change(self, at: int, now_s: float) -> None:
        for tier, first, slowness in self.changes:
            if first * self.num_requests == at * 1000:
                if slowness < self.slowness[tier]:
                    self.fast_since[tier] = now_s
                else:
                    self.fast_since.pop(tier, None)
                self.slowness[tier] = slowness

    def loaded_all(self, tier: str, now_s: float) -> None:
        if tier in self.fast_since:
            self.found_s = max(self.found_s, now_s - self.fast_since.pop(tier))


@dataclass(slots=True)
class _Totals:
    """Seconds of all requests, in each way."""

    taken_s: float = 0.0
    oracle_s: float = 0.0
    load_s: float = 0.0
    compute_s: float = 0.0
    trial_s: float = 0.0
    num_slower: int = 0
    num_requests: int = 0


def run(*, num_requests: int = 1000, seeds: int = 10, tell: Tell | None = None) -> BenchReport:
    """Simulate. Blocks, for about a second a seed; raises HeadwaterError if the brain does what it must not."""
    if num_requests < 1000 or num_requests % 1000 or seeds < 1:
        raise InvalidConfig(f"thousands of requests and at least one seed, not {num_requests} and {seeds}")
    samples = Samples()
    done, all_runs = 0, 8 * seeds
    for seed in range(seeds):
        for meets in (False, True):
            worlds = {
                "": _World(seed, num_requests, _CHANGES),
                "steady_": _World(seed, num_requests, ()),
                "random_": _World(seed, num_requests, _random_changes(seed)),
                "outliers_": _World(seed, num_requests, _CHANGES, outliers=0.01),
            }
            for name, world in worlds.items():
                if tell is not None:
                    tell("simulating", done, all_runs)
                done += 1
                totals = _Stream(world, meets=meets).run()
                samples.add(f"{'meet_' * meets}{name}ratio", totals.taken_s / totals.oracle_s)
                if not name and not meets:
                    samples.add("always_load", totals.load_s / totals.oracle_s)
                    samples.add("always_compute", totals.compute_s / totals.oracle_s)
                    samples.add("found_s", world.found_s)
                    samples.add("trial_share", totals.trial_s / totals.taken_s)
                if not name:
                    samples.add(f"{'meet_' * meets}slower_share", totals.num_slower / totals.num_requests)
    results: dict[str, Any] = samples.medians() | {"found_s": max(samples.values["found_s"])}
    for name in ("ratio", "random_ratio", "outliers_ratio"):
        for whose in ("", "meet_"):
            results[f"{whose}{name}_worst"] = max(samples.values[f"{whose}{name}"])
    results["right"] = results["meet_ratio_worst"] <= 1.02
    return BenchReport(
        command="bench placement",
        options={
            "num_requests": num_requests,
            "seeds": seeds,
            "changes": [list(one) for one in _CHANGES],
            "tiers": {name: [pace.start_s, pace.block_s] for name, pace in _TIERS.items()},
        },
        results=results,
        notes=_NOTES,
        samples=samples.values,
    )


def _random_changes(seed: int) -> list[tuple[str, int, float]]:
    dice = random.Random(f"changes {seed}")  # noqa: S311
    found = []
    for tier in _TIERS:
        at = dice.randrange(20, 80)
        while at < 1000:
            found.append((tier, at, dice.choice([0.5, 1.0, 2.0, 5.0])))
            at += dice.randrange(20, 80)
    return found


class _Stream:
    """One stream of requests through one brain."""

    def __init__(self, world: _World, *, meets: bool) -> None:
        tiers = tuple(TierConfig(name=name, save=SaveWhen.NEVER) for name in _TIERS)
        self._brain = Brain(
            CacheConfig(
                num_slots=_BLOCKS[1],
                block_tokens=_BLOCK_TOKENS,
                block_bytes=_BLOCK_BYTES,
                tiers=tiers,
                policy="lru",
                prefetch=False,
                ghosts=0,
                compute_base_s=_COST.base_s,
                compute_slope_s=_COST.slope_s,
            )
        )
        self._world = world
        self._meets = meets
        self._loads: dict[int, _Loading] = {}
        self._dice = random.Random(world.seed)  # noqa: S311
        self._now_s = 0.0
        self.totals = _Totals()

    def run(self) -> _Totals:
        """All requests, one after another."""
        world, dice = self._world, self._dice
        for at in range(world.num_requests):
            world.change(at, self._now_s)
            low, high = map(math.log, _BLOCKS)
            num_blocks = round(math.exp(dice.uniform(low, high)))
            tier = dice.choice(list(_TIERS))
            slow = math.exp(dice.gauss(0.0, world.noise)) * (10.0 if dice.random() < world.outliers else 1.0)
            compute = math.exp(dice.gauss(0.0, world.noise / 2))
            gap_s = dice.expovariate(1 / _GAP_S)
            self._request(f"{at}", num_blocks, tier, slow, compute)
            self._now_s += gap_s
        return self.totals

    def _request(self, name: str, num_blocks: int, tier: str, slow: float, compute: float) -> None:
        totals, keys = self.totals, _keys(name, num_blocks)
        pace = _TIERS[tier]
        pace = replace(pace, start_s=pace.start_s * slow, block_s=pace.block_s * slow * self._world.slowness[tier])
        begin_s = self._now_s
        out = self._hear(ev.Arrived(now_s=begin_s, request=name, keys=keys, root=_ROOT))
        for one in out:
            if isinstance(one, ev.Probe):
                status = Status.HELD if one.store == tier else Status.ABSENT
                self._hear(ev.JobDone(now_s=begin_s, job=one.job, results=(status,) * num_blocks))
        self._pace = pace
        self._hear(ev.Wanted(now_s=begin_s, request=name, num_blocks=num_blocks, meet=self._meets))
        asked_whole = any(len(one.order.keys) == num_blocks for one in self._loads.values())
        self._live(name, keys, compute)
        num_loaded = sum(self._brain.requests[name].num_loaded.values())
        self._hear(ev.Left(now_s=self._now_s, request=name))
        while self._loads:  # nobody waits for it, but its store is busy with it
            self._end_load(min(self._loads.values(), key=lambda one: one.end_s), cancelled=True)
        all_s, none_s = pace.seconds(num_blocks) + _LAG_S, compute * _COST.row_s(0, num_blocks)
        totals.num_requests += 1
        totals.taken_s += self._now_s - begin_s
        totals.load_s += all_s
        totals.compute_s += none_s
        totals.oracle_s += min(all_s, none_s)
        totals.num_slower += self._now_s - begin_s > 1.1 * none_s
        if asked_whole:
            self._world.loaded_all(tier, begin_s)
        elif num_loaded:
            totals.trial_s += pace.seconds(num_loaded)

    def _live(self, name: str, keys: Sequence[BlockKey], compute: float) -> None:
        """Until all blocks of a request are there: it computes what it may, and what is loaded comes."""
        record, step_end_s, step_to = self._brain.requests[name], math.inf, 0
        while (num_done := record.hold.num_blocks) < len(keys):
            wake_s = math.inf
            if record.ready_s is not None and step_end_s == math.inf:
                step_to = len(keys)
                if (meeting := record.meeting) is not None:
                    self._hear(ev.Claimed(now_s=self._now_s, request=name, num_blocks=num_done + _STEP_BLOCKS))
                    step_to = min(num_done + _STEP_BLOCKS, meeting.claimed)
                if step_to > num_done:
                    step_end_s = self._now_s + compute * _COST.row_s(num_done, step_to)
                else:
                    wake_s = self._now_s + _LOOK_S
            load = min(self._loads.values(), key=lambda one: one.end_s, default=None)
            if load is not None and load.end_s <= min(step_end_s, wake_s):
                self._now_s = max(self._now_s, load.end_s)
                self._end_load(load)
            elif step_end_s <= wake_s:
                self._now_s, step_end_s = step_end_s, math.inf
                self._hear(ev.Filled(now_s=self._now_s, request=name, keys=tuple(keys[num_done:step_to])))
            else:
                self._now_s = wake_s

    def _end_load(self, load: "_Loading", *, cancelled: bool = False) -> None:
        """A load has come, or what came of it by its deadline; or nobody wants it any more."""
        del self._loads[load.order.job]
        job, num_blocks = load.order.job, len(load.order.keys)
        if cancelled:
            self._hear(ev.JobFailed(now_s=self._now_s, job=job, failure=Reason.CANCELLED))
            return
        results = (Status.HIT,) * load.num_blocks + (Status.LATE,) * (num_blocks - load.num_blocks)
        num_bytes, seconds = load.num_blocks * _BLOCK_BYTES, load.seconds
        self._hear(ev.JobDone(now_s=self._now_s, job=job, results=results, num_bytes=num_bytes, seconds=seconds))

    def _hear(self, event: ev.Event) -> list[ev.Instruction]:
        out = self._brain.handle(event)
        for one in out:
            if isinstance(one, ev.Save | ev.Demote | ev.Promote):
                raise HeadwaterError("the brain writes to a tier that is only read")
            if isinstance(one, ev.Load):
                self._loads[one.job] = _Loading.begin(one, self._pace, event.now_s)
        for one in out:
            if isinstance(one, ev.Cancel) and one.job in self._loads:
                self._end_load(self._loads[one.job], cancelled=True)
        return out


@dataclass(frozen=True, slots=True)
class _Loading:
    """A load under way: when it ends, and how many blocks have come by then."""

    order: ev.Load
    end_s: float
    seconds: float
    num_blocks: int

    @classmethod
    def begin(cls, order: ev.Load, pace: _Pace, now_s: float) -> "_Loading":
        seconds, time_s = pace.seconds(len(order.keys)), order.deadline_s - now_s
        if seconds <= time_s:
            return cls(order, now_s + seconds + _LAG_S, seconds, len(order.keys))
        num = max(0, min(len(order.keys) - 1, int((time_s - pace.start_s) / pace.block_s)))
        return cls(order, now_s + time_s + _LAG_S, time_s, num)


def _keys(name: str, num_blocks: int) -> tuple[BlockKey, ...]:
    return tuple(BlockKey(hashlib.sha256(f"{name}/{at}".encode()).digest()) for at in range(num_blocks))


_ROOT: Final = BlockKey(hashlib.sha256(b"headwater bench placement").digest())
