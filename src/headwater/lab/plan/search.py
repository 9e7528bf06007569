"""Which sizes of host, disk and pool are tried, and the replays of each: the production brain, in virtual time.

First each tier alone, at each of its sizes. Then together, in the order of their speed: the best host size so far with
each size of disk, the best of those with each size of pool. What is best is what keeps most money. The best is then
replayed on the first and the second half of the trace, each for itself, to see whether they agree.

Replays run in processes of their own, as many as there are cores.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context
from typing import Final, TypeAlias

from headwater.cache.placement import ComputeCost
from headwater.core.errors import HeadwaterError, InvalidConfig, InvalidInput
from headwater.lab.plan.paces import TIERS, Pace
from headwater.lab.replay.bill import ReplayOutcome, ReplaySetup, ReplayStore
from headwater.lab.replay.run import replay
from headwater.lab.replay.trace import Tell, Trace, TraceRecord, TraceSurvey, survey

GIB: Final = 1 << 30
HOURS_A_MONTH: Final = 730.0
_MOST: Final = 1e9  # GiB of anything, or money for it
_STEP_TOKENS: Final = 8_192  # that an engine computes at a time

Amounts: TypeAlias = tuple[float, ...]  # GiB of each tier, in the order of TIERS


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What things cost, in any one currency."""

    gpu_hour: float  # of what computes: all GPUs of one engine together
    gib_month: dict[str, float]  # by tier

    def __post_init__(self) -> None:
        """Refuse what is no price."""
        for name, price in {"gpu": self.gpu_hour, **self.gib_month}.items():
            if not 0 <= price < _MOST:
                raise InvalidConfig(f"--{name}-price is an amount of money, not {price:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What is planned for."""

    device_gib: float  # of KV, on all GPUs of one engine together
    sizes: dict[str, tuple[float, ...]]  # GiB to try, by tier
    token_bytes: int
    computing: ComputeCost
    computing_source: str
    paces: dict[str, Pace]
    prices: Prices
    policy: str = "value"
    jobs: int | None = None  # processes; None: as many as cores

    def __post_init__(self) -> None:
        """Refuse what cannot be planned."""
        if self.token_bytes < 1:
            raise InvalidConfig(f"a token has at least one byte of KV, not {self.token_bytes}")
        if self.jobs is not None and self.jobs < 1:
            raise InvalidConfig(f"--jobs is at least 1, not {self.jobs}")
        for name, sizes in {"device": (self.device_gib,), **self.sizes}.items():
            bad = [size for size in sizes if not 0 < size < _MOST]
            if bad:
                raise InvalidConfig(f"--{name}-gib is a positive number of GiB, not {bad[0]:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One choice of sizes, and what it brings a month beyond the device alone."""

    amounts: Amounts
    outcome: ReplayOutcome
    gained: float
    spent: float

    @property
    def net(self) -> float:
        """What is kept."""
        return self.gained - self.spent


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All rows by their sizes, which is best, and what each half of the trace says of that."""

    options: PlanOptions
    trace: Trace
    survey: TraceSurvey
    rows: dict[Amounts, Row]
    best: Row
    halves: tuple[Row, ...]

    @property
    def device(self) -> Row:
        """The device alone."""
        return self.rows[_NOTHING]

    def curve(self, tier: str) -> list[Row]:
        """A tier alone, from nothing up."""
        at = TIERS.index(tier)
        rows = [row for row in self.rows.values() if not any(size for i, size in enumerate(row.amounts) if i != at)]
        return sorted(rows, key=lambda row: row.amounts[at])

    @property
    def tried(self) -> list[str]:
        """Tiers of which sizes were tried."""
        return [tier for tier in TIERS if self.options.sizes.get(tier)]

    def knee(self, tier: str) -> float | None:
        """The size from which on more of this tier, alone, costs more than it brings; 0: it does not pay. GiB.

        None: the largest that was tried is the best, so it may lie beyond.
        """
        rows, at = self.curve(tier), TIERS.index(tier)
        best = max(rows, key=lambda row: row.net)
        return None if best is rows[-1] else best.amounts[at]


class PartOfTrace(Trace):
    """Some requests of a trace in a row."""

    def __init__(self, whole: Trace, begin: int, end: int) -> None:
        super().__init__(whole.name, block_tokens=whole.block_tokens, full_blocks_only=whole.full_blocks_only)
        self._whole, self._begin, self._end = whole, begin, end

    def records(self) -> Iterator[TraceRecord]:
        """Those lines."""
        return islice(self._whole.records(), self._begin, self._end)


Task: TypeAlias = tuple[Trace, Amounts, TraceSurvey]
Run: TypeAlias = Callable[[Sequence[Task]], list[ReplayOutcome]]

_NOTHING: Final[Amounts] = (0.0,) * len(TIERS)


def make_plan(trace: Trace, options: PlanOptions, *, tell: Tell | None = None) -> Plan:
    """Try all. Blocks for as long as some twenty replays take. Raises InvalidInput for a bad trace."""
    alone = [_with(_NOTHING, i, size) for i, tier in enumerate(TIERS) for size in options.sizes.get(tier, ())]
    for amounts in (_NOTHING, *alone):
        _setup(options, amounts, trace.block_tokens)  # what cannot be is said before anything takes time
    found = survey(trace, tell=tell)
    if found.span_s <= 0:
        raise InvalidInput(f"{trace.name}: all requests come at one moment, which says nothing of a month")
    with _processes(options, tell) as run:
        rows: dict[Amounts, Row] = {}
        _fill(rows, [_NOTHING, *alone], trace, found, options, run)
        best = _best(rows, [_NOTHING])
        for i, tier in enumerate(TIERS):
            wanted = [best.amounts, *(_with(best.amounts, i, size) for size in options.sizes.get(tier, ()))]
            _fill(rows, wanted, trace, found, options, run)
            best = _best(rows, wanted)
        best = _best(rows, list(rows))
        halves = _halves(trace, found) if any(best.amounts) else []
        tasks = [(half, amounts, one) for half, one in halves for amounts in (_NOTHING, best.amounts)]
        outcomes = run(tasks)
    said = tuple(
        _row(best.amounts, outcomes[2 * i + 1], outcomes[2 * i], one, options) for i, (_, one) in enumerate(halves)
    )
    return Plan(options=options, trace=trace, survey=found, rows=rows, best=best, halves=said)


def _halves(trace: Trace, found: TraceSurvey) -> list[tuple[Trace, TraceSurvey]]:
    """Both halves of its requests; none where one of them has no time or no block."""
    middle = found.num_requests // 2
    halves: list[tuple[Trace, TraceSurvey]] = []
    for begin, end in ((0, middle), (middle, found.num_requests)):
        half = PartOfTrace(trace, begin, end)
        try:
            seen = survey(half)
        except InvalidInput:  # no block
            return []
        if seen.span_s <= 0:
            return []
        halves.append((half, seen))
    return halves


def _fill(
    rows: dict[Amounts, Row],
    wanted: Sequence[Amounts],
    trace: Trace,
    found: TraceSurvey,
    options: PlanOptions,
    run: Run,
) -> None:
    """Replay what was not replayed yet. The device alone is among the first that are asked for."""
    new = [amounts for amounts in dict.fromkeys(wanted) if amounts not in rows]
    outcomes = dict(zip(new, run([(trace, amounts, found) for amounts in new]), strict=True))
    alone = outcomes[_NOTHING] if _NOTHING in outcomes else rows[_NOTHING].outcome
    rows.update({one: _row(one, outcome, alone, found, options) for one, outcome in outcomes.items()})


def _row(
    amounts: Amounts, outcome: ReplayOutcome, alone: ReplayOutcome, found: TraceSurvey, options: PlanOptions
) -> Row:
    prices = options.prices
    gpus = (outcome.saved_s - alone.saved_s) / found.span_s  # as many of them are free all the time
    spent = sum(size * prices.gib_month[tier] for tier, size in zip(TIERS, amounts, strict=True))
    return Row(amounts=amounts, outcome=outcome, gained=gpus * HOURS_A_MONTH * prices.gpu_hour, spent=spent)


def _best(rows: dict[Amounts, Row], among: Sequence[Amounts]) -> Row:
    """That keeps most money; the cheaper one of equals."""
    return max((rows[amounts] for amounts in among), key=lambda row: (row.net, -row.spent))


def _with(amounts: Amounts, at: int, size: float) -> Amounts:
    return (*amounts[:at], size, *amounts[at + 1 :])


def _setup(options: PlanOptions, amounts: Amounts, block_tokens: int) -> ReplaySetup:
    block_bytes = options.token_bytes * block_tokens

    def blocks(what: str, gib: float) -> int:
        number = int(gib * GIB) // block_bytes
        if not number:
            raise InvalidConfig(f"--{what}-gib {gib:g}: a block of the trace has {block_bytes / GIB:.3g} GiB")
        return number

    stores = tuple(
        ReplayStore(name=tier, blocks=blocks(tier, size), gbs=options.paces[tier].gbs)
        for tier, size in zip(TIERS, amounts, strict=True)
        if size
    )
    return ReplaySetup(
        policy=options.policy,
        blocks=blocks("device", options.device_gib),
        stores=stores,
        block_bytes=block_bytes,
        compute_base_s=options.computing.base_s,
        compute_slope_s=options.computing.slope_s,
        step_blocks=max(1, _STEP_TOKENS // block_tokens),
    )


def _play(task: Task, options: PlanOptions) -> ReplayOutcome:
    trace, amounts, found = task
    return replay(trace, _setup(options, amounts, trace.block_tokens), survey=found)


@contextmanager
def _processes(options: PlanOptions, tell: Tell | None) -> Iterator[Run]:
    """Something that replays several at once and says how far it is. What fails in a process is raised here."""
    jobs = options.jobs or os.cpu_count() or 1
    done = begun = 0

    def played() -> None:
        nonlocal done
        done += 1
        if tell is not None:
            tell("replays", done, begun)

    if jobs == 1:

        def run_here(tasks: Sequence[Task]) -> list[ReplayOutcome]:
            nonlocal begun
            begun += len(tasks)
            outcomes = []
            for task in tasks:
                outcomes.append(_play(task, options))
                played()
            return outcomes

        yield run_here
        return

    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:

        def run(tasks: Sequence[Task]) -> list[ReplayOutcome]:
            nonlocal begun
            begun += len(tasks)
            futures: list[Future[ReplayOutcome]] = [pool.submit(_play, task, options) for task in tasks]
            try:
                for future in as_completed(futures):
                    future.result()
                    played()
            except BrokenProcessPool as error:
                raise HeadwaterError(
                    "a process that replayed was killed: is there memory for several (--jobs 1)?"
                ) from error
            return [future.result() for future in futures]

        try:
            yield run
        finally:
            pool.shutdown(cancel_futures=True)
