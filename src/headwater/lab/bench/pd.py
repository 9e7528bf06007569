"""`headwater bench pd`: prefill and decode apart, beside one node that does both: the same machine, the same load.

Both set-ups are processes that talk over HTTP on loopback, each behind a router of its own, started as `headwater pd`
starts them, and both are there all the time: rounds take turns, because machines are noisy. Three parts:

    alone      prompts of several lengths, one at a time: TTFT, time per token, how much of the TTFT is the pool's
    steady     requests that are being answered while others' KV is read (`pd_steady.py`)
    replay     the beginning of a trace, scaled down, at its own times (`pd_load.py`)

Every answer of both set-ups must be the same. The pool's part is what computing did not hide: `pool_write_s` and
`pool_read_s` of `usage.headwater.phases`; the TTFT is the client's.
"""

import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from headwater.config.stores import pool_kind
from headwater.core.errors import InvalidConfig
from headwater.core.role import Role
from headwater.disagg.node_auth import Signer, node_called
from headwater.fleet import Fleet, FleetOptions
from headwater.lab.bench.client import BenchClient
from headwater.lab.bench.pd_load import ReplayedPlan, TimedAnswer, ask, body_of, percentile, plan, prompt_of, replay
from headwater.lab.bench.pd_steady import Steady, measure
from headwater.lab.bench.report import BenchReport, Samples, Tell
from headwater.lab.bench.serve import make_talker
from headwater.lab.bench.shapes import SHAPES
from headwater.lab.replay.synthetic import KINDS, Synthetic
from headwater.lab.replay.trace import Trace, TraceFile
from headwater.pool import local as mooncake
from headwater.storage.scratch import disk_root
from headwater.testing.redis import redis_server

DEMO: Final = "demo"  # what `headwater pd` makes where no model is named
POOLS: Final = ("local", "redis", "mooncake")  # that are started here
LONG_TOKENS: Final = 2048  # from here on the pool's part of the TTFT has a limit
_POOL_BYTES: Final = 512 << 20
_POSITIONS: Final = 16384
_SILENCE_S: Final = 120  # a node of a busy machine that says nothing for long computes, and is not to be given up
_SETUPS: Final = ("mixed", "pd")
_NOTES: Final = {
    "answers_equal": "every answer of both set-ups, to the last character",
    "ttft_*_ms": "one request at a time, prompts of 2,048 tokens and more, as the client sees it; median",
    "tpot_*_ms": "the same requests: time for each token after the first",
    "pool_share": "pool_write_s + pool_read_s over the TTFT; median over the same requests",
    "pool_share_high": "the value that 95 of 100 of them stay under",
    "lengths": "the same for each prompt length",
    "tpot_while_loading_ratio": "time per token of requests that run while a decode node reads others' KV, as fast as "
    "one prefill node makes it, over that of neighbouring windows without; median, with an interval of about 95 %",
    "tpot_while_prefilling_ratio": "the same while the prefill node computes: on few cores it takes the decode node's",
    "load_every_ms": "how often: the TTFT of such a prompt, unless told otherwise",
    "load_ms": "reading one such prompt beside running requests, from asking to its first token",
    "bytes_moved": "to and from the pool in the whole run, by the nodes' counters",
    "replay": "a trace's beginning, scaled down, at its times; every set-up on its own",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PdOptions:
    """What to measure."""

    shape: str = "tiny"
    model: Path | None = None
    device: str = "cpu"
    pool: str = "local"
    block_tokens: int = 16
    step_tokens: int = 512  # of both: on a CPU a longer step takes a second, in which nothing can be written or said
    lengths: tuple[int, ...] = (512, 2048, 4096)
    max_tokens: int = 16
    rounds: int = 5
    streams: int = 4
    pairs: int = 24
    loads: int = 1
    load_every_s: float | None = None  # None: as often as one prefill node can
    trace: Path | None = None
    kind: str = "chat"
    requests: int = 32
    scale: float = 1 / 16
    rate_per_s: float = 1.0
    max_prompt: int = 4096
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        if self.shape not in (DEMO, *SHAPES):
            raise InvalidConfig(f"no shape {self.shape!r}; there are: {', '.join((DEMO, *SHAPES))}")
        if self.kind not in KINDS:
            raise InvalidConfig(f"no synthetic trace {self.kind!r}; there are: {', '.join(KINDS)}")
        if self.pool not in POOLS:
            pool_kind(self.pool)
        counts = (
            self.rounds,
            self.streams,
            self.pairs,
            self.loads,
            self.requests,
            self.block_tokens,
            self.max_prompt,
            self.step_tokens,
        )
        if min(*counts, *self.lengths) < 1 or min(self.scale, self.rate_per_s) <= 0 or self.load_every_s == 0:
            raise InvalidConfig("lengths, counts, scale and rates must be positive")
        if self.max_tokens < 2:
            raise InvalidConfig("an answer needs two tokens at least to have a time per token")


@dataclass(frozen=True, slots=True)
class AskedBoth:
    """One request to each set-up, and what they answered."""

    num_tokens: int
    mixed: TimedAnswer
    pd: TimedAnswer

    @property
    def pool_share(self) -> float:
        """The pool's part of the TTFT."""
        return self.pd.pool_s / self.pd.ttft_s


def run(options: PdOptions | None = None, *, tell: Tell | None = None) -> BenchReport:
    """Measure. Blocks, for some minutes. Raises HeadwaterError if something does not start or answer."""
    options = options if options is not None else PdOptions()
    samples = Samples()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headwater-pd-", dir=disk_root())))
        model = options.model or _make_model(options, directory / "model")
        pool = stack.enter_context(_pool(options.pool))
        fleets: dict[str, Fleet] = {}
        for done, (setup, nodes) in enumerate({"mixed": (0, 0, 1), "pd": (1, 1, 0)}.items()):
            if tell is not None:
                tell("starting", done, len(_SETUPS))
            (directory / setup).mkdir()
            fleet = Fleet(_fleet_options(options, model, pool, *nodes), directory=directory / setup)
            fleets[setup] = stack.enter_context(fleet)
        asked = _alone(fleets, options, samples, tell)
        how = _steady(fleets["pd"], options, asked)
        steady = measure(how, samples, tell=tell) | {"load_every_ms": how.every_s * 1e3}
        replayed = _replay(fleets, options, tell)
        moved = {setup: _bytes_moved(fleet) for setup, fleet in fleets.items()}
    different = difference(asked, replayed)
    errors = [error for one in replayed.values() for error in one.errors]
    named = {name: getattr(options, name) for name in options.__slots__}
    return BenchReport(
        command="bench pd",
        options=named | {name: None if named[name] is None else str(named[name]) for name in ("model", "trace")},
        results={
            "answers_equal": different is None and not errors,
            "errors": errors,
            **figures_alone(asked),
            **steady,
            "bytes_moved": moved["pd"],
            "bytes_moved_mixed": moved["mixed"],
            "replay": {
                "trace": _trace(options).name,
                "requests": options.requests,
                **{setup: _rounded(one.figures()) for setup, one in replayed.items()},
            },
        },
        notes=_NOTES if different is None else {**_NOTES, "different": different},
        samples=samples.values,
    )


# --- alone ------------------------------------------------------------------------------------------------------------


def _alone(fleets: dict[str, Fleet], options: PdOptions, samples: Samples, tell: Tell | None) -> list[AskedBoth]:
    """Prompts that nobody has seen, one at a time, at one set-up and at the other, in turns."""
    found: list[AskedBoth] = []
    total = options.rounds * len(options.lengths)
    for turn in range(-1, options.rounds):  # the first is to warm up
        for at, num_tokens in enumerate(options.lengths):
            if tell is not None:
                tell("one at a time", max(0, turn * len(options.lengths) + at), total)
            prompt = prompt_of(num_tokens, seed=f"alone {options.seed} {turn} {num_tokens}")
            answers = {
                setup: ask(fleets[setup].url, body_of(prompt, max_tokens=options.max_tokens, salt=setup))
                for setup in (_SETUPS if turn % 2 else _SETUPS[::-1])
            }
            if turn >= 0:
                found.append(AskedBoth(num_tokens, answers["mixed"], answers["pd"]))
                _keep(samples, found[-1])
    return found


def _keep(samples: Samples, one: AskedBoth) -> None:
    for setup, answer in (("mixed", one.mixed), ("pd", one.pd)):
        samples.add(f"ttft_{setup}_{one.num_tokens}_ms", answer.ttft_s * 1e3)
        samples.add(f"tpot_{setup}_{one.num_tokens}_ms", (answer.tpot_s or 0.0) * 1e3)
    samples.add(f"pool_share_{one.num_tokens}", one.pool_share)
    for part, seconds in one.pd.phases.items():
        samples.add(f"{part.removesuffix('_s')}_{one.num_tokens}_ms", seconds * 1e3)


def figures_alone(asked: Sequence[AskedBoth]) -> dict[str, Any]:
    """Medians over the long prompts, or over all where none is long; and by length."""
    long = [one for one in asked if one.num_tokens >= LONG_TOKENS] or list(asked)
    lengths = sorted({one.num_tokens for one in asked})
    shares = [one.pool_share for one in long]
    return {
        **_medians(long),
        "pool_share_high": percentile(shares, 95),
        "lengths": [
            {"tokens": length, **_rounded(_medians([one for one in asked if one.num_tokens == length]))}
            for length in lengths
        ],
    }


def _medians(asked: Sequence[AskedBoth]) -> dict[str, float]:
    median = statistics.median
    return {
        "ttft_mixed_ms": median(one.mixed.ttft_s for one in asked) * 1e3,
        "ttft_pd_ms": median(one.pd.ttft_s for one in asked) * 1e3,
        "tpot_mixed_ms": median(one.mixed.tpot_s or 0.0 for one in asked) * 1e3,
        "tpot_pd_ms": median(one.pd.tpot_s or 0.0 for one in asked) * 1e3,
        "pool_ms": median(one.pd.pool_s for one in asked) * 1e3,
        "pool_share": median(one.pool_share for one in asked),
    }


# --- beside loads, and a trace ----------------------------------------------------------------------------------------


def _steady(fleet: Fleet, options: PdOptions, asked: Sequence[AskedBoth]) -> Steady:
    num_tokens = min((length for length in options.lengths if length >= LONG_TOKENS), default=max(options.lengths))
    prefill, decode = fleet.of(Role.PREFILL)[0], fleet.of(Role.DECODE)[0]
    return Steady(
        router=fleet.url,
        prefill=prefill.url,
        decode=decode.url,
        prefill_signer=Signer(fleet.node_key, node_called(prefill.name, prefill.url)),
        decode_signer=Signer(fleet.node_key, node_called(decode.name, decode.url)),
        streams=options.streams,
        pairs=options.pairs,
        loads=options.loads,
        load_tokens=num_tokens,
        every_s=options.load_every_s
        or statistics.median(one.pd.ttft_s for one in asked if one.num_tokens == num_tokens),
        seed=options.seed,
    )


def _trace(options: PdOptions) -> Trace:
    if options.trace is not None:
        return TraceFile(options.trace)
    return Synthetic(options.kind, options.requests, seed=options.seed)


def _replay(fleets: dict[str, Fleet], options: PdOptions, tell: Tell | None) -> dict[str, ReplayedPlan]:
    planned = plan(
        _trace(options),
        num_requests=options.requests,
        scale=options.scale,
        max_prompt=options.max_prompt,
        max_tokens=options.max_tokens,
        rate_per_s=options.rate_per_s,
    )
    return {
        setup: replay(fleets[setup].url, planned, stage=f"replay, {setup}", salt=f"replay {setup}", tell=tell)
        for setup in _SETUPS
    }


def difference(asked: Sequence[AskedBoth], replayed: Mapping[str, ReplayedPlan]) -> str | None:
    """Where answers are first not the same, or missing; None: nowhere."""
    pairs: list[tuple[str, TimedAnswer | None, TimedAnswer | None]] = [
        (f"prompt {number} of {one.num_tokens} tokens", one.mixed, one.pd) for number, one in enumerate(asked)
    ]
    for number, both in enumerate(zip(replayed["mixed"].answers, replayed["pd"].answers, strict=True)):
        pairs.append((f"replayed request {number}", *both))
    for what, mixed, apart in pairs:
        if mixed is None or apart is None:
            return f"{what}: no answer"
        if mixed.text != apart.text:
            return f"{what}: {mixed.text!r} by one node, {apart.text!r} by two"
    return None


# --- what runs --------------------------------------------------------------------------------------------------------


def _make_model(options: PdOptions, directory: Path) -> Path:
    shape = None
    if options.shape != DEMO:
        named = {name: value for name, value in SHAPES[options.shape].items() if name != "vocab_size"}  # bytes
        shape = {**named, "max_position_embeddings": _POSITIONS, "rope_scaling": None}
    make_talker(directory, seed=options.seed, shape=shape)
    return directory


@contextmanager
def _pool(name: str) -> Iterator[str | None]:
    """The address of a pool, started here if it has none; None: each set-up has one in memory."""
    if name == "redis":
        with redis_server(_POOL_BYTES) as url:
            yield url
    elif name == "mooncake":
        with tempfile.TemporaryDirectory(prefix="headwater-pd-pool-") as path:
            found = mooncake.up(Path(path), segment_bytes=_POOL_BYTES)
            try:
                yield found.url
            finally:
                mooncake.down(Path(path))
    else:
        yield None if name == "local" else name


def _fleet_options(
    options: PdOptions, model: Path, pool: str | None, prefill: int, decode: int, mixed: int
) -> FleetOptions:
    return FleetOptions(
        prefill=prefill,
        decode=decode,
        mixed=mixed,
        pool=pool,
        pool_bytes=_POOL_BYTES,
        router=["--silence", str(_SILENCE_S)],
        node=[
            *("--model", str(model), "--name", "bench", "--device", options.device),
            *("--block-tokens", str(options.block_tokens), "--step-tokens", str(options.step_tokens)),
        ],
    )


def _bytes_moved(fleet: Fleet) -> dict[str, int]:
    """To the pool and from it, by the counters of all nodes."""
    found = {"to_pool": 0, "from_pool": 0}
    for child in fleet.children.values():
        if child.role is None:
            continue
        with BenchClient(child.url) as client:
            for name, labels, value in client.metrics():
                if name == "moved_bytes_total" and labels["tier"] == "pool":
                    found["to_pool" if labels["direction"] == "in" else "from_pool"] += int(value)
    return found


def _rounded(figures: dict[str, Any]) -> dict[str, Any]:
    return {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in figures.items()}
