"""Several replays of one trace, beside what no policy can exceed. Runs them one after the other; draws nothing."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from headwater import policy
from headwater.core.errors import InvalidConfig
from headwater.lab.replay.belady import Future
from headwater.lab.replay.bill import LAYOUT, ReplayOutcome, ReplaySetup
from headwater.lab.replay.run import replay
from headwater.lab.replay.trace import Tell, Trace, TraceSurvey, survey

CAPACITIES: Final = (1_000, 3_000, 10_000, 30_000)
PLOT_CAPACITIES: Final = (500, 1_000, 2_000, 3_000, 5_000, 10_000, 20_000, 30_000, 50_000, 100_000)
NOTES: Final = {
    "hit_ratio": "hit blocks / requested blocks; only leading blocks of a request are hits",
    "partial_blocks": "the last block of a prompt counts like any other, full or not; --full-blocks-only leaves it out",
    "too_long": "a request of more blocks than the device has is cut to them; the rest counts as requested and missed",
    "min_hit_ratio": "Belady's MIN, which knows the future, with the blocks of device and store together: a bound as "
    "long as requests follow each other (with --store-gbs they may overtake)",
    "min_running_hit_ratio": "the same where the device must hold the whole running request as well: what a perfect "
    "policy would reach here; only without a store",
    "missed_blocks": "by the brain's reasons; what it evicted long ago and has forgotten counts as never_stored",
    "unbounded_hit_ratio": "where nothing is ever evicted",
    "read_bytes": "copied from a tier to another one; computing a block copies nothing",
    "saved_s": "computing that hits made unnecessary, less the waiting, by --compute-ms and --compute-slope-ms",
    "time": "requests come at their timestamps; computing takes no virtual time, and output takes no blocks",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """What is possible with so many blocks, on device and store together."""

    blocks: int
    min_hit_ratio: float
    min_running_hit_ratio: float | None  # None: there is a store


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """All outcomes, and the bound of each number of blocks."""

    trace: Trace
    survey: TraceSurvey
    outcomes: Sequence[ReplayOutcome]
    bounds: Sequence[Bound]

    def bound(self, outcome: ReplayOutcome) -> Bound:
        """What would have been possible."""
        blocks = outcome.setup.blocks + outcome.setup.store_blocks
        return next(bound for bound in self.bounds if bound.blocks == blocks)

    def document(self) -> dict[str, Any]:
        """All of it as plain JSON values: a single run's figures at the top, of several a list."""
        runs = [outcome.document() | _ratios(self.bound(outcome)) for outcome in self.outcomes]
        found, setup = self.survey, self.outcomes[0].setup
        unbounded = {"unbounded_hit_ratio": round(found.unbounded_hit_ratio, 6)}
        figures = runs[0] | unbounded if len(runs) == 1 else {"runs": runs, "bounds": self._bounds() | unbounded}
        return figures | {
            "trace": {
                "name": self.trace.name,
                "num_requests": found.num_requests,
                "num_blocks": found.num_blocks,
                "num_unique_blocks": found.num_unique_blocks,
                "longest_blocks": found.longest_blocks,
                "span_s": found.span_s,
                "num_ids_behind_two_prefixes": found.num_ids_behind_two_prefixes,
            },
            "options": {
                "block_tokens": self.trace.block_tokens,
                "full_blocks_only": self.trace.full_blocks_only,
                "block_bytes": setup.cache_config(self.trace.block_tokens).block_bytes,
                "block_bytes_of": None if setup.block_bytes is not None else LAYOUT,
                "store_gbs": setup.stores[0].gbs if setup.stores else None,
                "compute_base_s": setup.compute_base_s,
                "compute_slope_s": setup.compute_slope_s,
            },
            "notes": dict(NOTES),
        }

    def _bounds(self) -> dict[str, Any]:
        return {"min": [{"blocks": bound.blocks, **_ratios(bound)} for bound in self.bounds]}


def policies(name: str) -> list[str]:
    """The policy of this name, or every one there is for `all`."""
    return policy.policy_names() if name == "all" else [name]


def capacities(text: str) -> list[int]:
    """Numbers of blocks from `1000,3000`. Raises InvalidConfig for anything else."""
    try:
        return list(dict.fromkeys(int(one) for one in text.split(",")))
    except ValueError:
        raise InvalidConfig(f"--blocks is a number, or several with commas between them, not {text!r}") from None


def sweep(trace: Trace, setups: Iterable[ReplaySetup], *, tell: Tell | None = None) -> Sweep:
    """Replay a trace on each setup. Blocks; raises InvalidInput for a bad line before anything is replayed."""
    wanted = list(setups)
    for setup in wanted:
        setup.cache_config(trace.block_tokens)  # refuses what makes no sense before anything takes time
    future = Future()
    found = survey(trace, each=future.add, tell=tell)
    bounds: dict[int, Bound] = {}
    for setup in wanted:
        blocks = setup.blocks + setup.store_blocks
        if blocks not in bounds:
            running = None if setup.store_blocks else future.min_hits(blocks, hold_running=True) / found.num_blocks
            least = future.min_hits(blocks) / found.num_blocks
            bounds[blocks] = Bound(blocks=blocks, min_hit_ratio=least, min_running_hit_ratio=running)
    del future  # a long trace's is large, and nobody needs it any more
    outcomes = [replay(trace, setup, survey=found, tell=tell) for setup in wanted]
    return Sweep(trace=trace, survey=found, outcomes=outcomes, bounds=list(bounds.values()))


def _ratios(bound: Bound) -> dict[str, float | None]:
    running = bound.min_running_hit_ratio
    return {
        "min_hit_ratio": round(bound.min_hit_ratio, 6),
        "min_running_hit_ratio": None if running is None else round(running, 6),
    }
