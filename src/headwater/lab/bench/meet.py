"""`headwater bench meet`: a stored prompt computed alone, loaded alone, and with compute meeting load in the middle.

A whole engine with random weights, over a store that is slowed down to a few paces: so that loading a prompt takes a
given multiple of what computing it takes. At each pace the same two prompts take turns on a device that holds only one
of them. Loading alone is the cache's whole load, whatever it costs; meeting is what the cache does by itself, by what
it has measured. The ratio is to the better of the two alone, all in one run.

Where other work shares the machine, computing takes two or three times as long from one prompt to the next. With
`block_ms` a block takes at least so long to compute, and the processor sleeps: then the figures are of the way that it
is done, and not of who else was there.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from headwater.build import open_local
from headwater.config.stores import LocalStoreConfig
from headwater.core.errors import InvalidConfig
from headwater.engine.connector import Connector
from headwater.engine.models.base import Computed, Model, Span
from headwater.lab.bench.bench_engine import BenchEngine, bench_engine, bench_model, make_prompt
from headwater.lab.bench.report import BenchReport, Samples, Tell
from headwater.lab.bench.shapes import require_shape
from headwater.layout.frame import frame_bytes
from headwater.storage.base import Store
from headwater.storage.scratch import limit_for, memory_root
from headwater.testing.faulty_stores import ThrottledStore
from headwater.transfer.device.arena import DeviceCache

_TIER: Final = "slow"
_WAIT_S: Final = 600.0
_PAUSE_S: Final = 0.1  # before each request that is timed, the same for all
_NUM_WARM: Final = 3  # prompts that nobody has seen, so that what computing costs is known
_NOTES: Final = {
    "paces": "per pace of the store, medians in ms of the time to the first token",
    "load_over_compute": "what loading takes beside computing, as the store was slowed down to",
    "ratio": "meet / the better of compute and load; 1 would be no gain, 0.5 is the best where both take as long",
    "loaded": "share of the stored prompt that was loaded, in the meeting",
}


@dataclass(frozen=True, slots=True)
class MeetOptions:
    """What to measure."""

    shape: str = "tiny"
    device: str = "cpu"
    tokens: int = 4096
    block_tokens: int = 64
    step_tokens: int = 1024
    paces: tuple[float, ...] = (0.1, 0.5, 1.0, 2.0, 8.0)
    rounds: int = 4
    block_ms: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        require_shape(self.shape)
        if min(self.tokens // max(1, self.block_tokens), self.block_tokens, self.step_tokens, self.rounds) < 1:
            raise InvalidConfig("a prompt has at least one block, and token counts and rounds are positive")
        if not self.paces or min(self.paces) <= 0:
            raise InvalidConfig("at least one pace, and all above 0")
        if not 0 <= self.block_ms < float("inf"):
            raise InvalidConfig(f"a block cannot take {self.block_ms} ms to compute")

    @property
    def num_blocks(self) -> int:
        """Full blocks of a prompt."""
        return self.tokens // self.block_tokens


class _SlowedModel(Model):
    """A model whose steps take at least so long for each token. Owns nothing."""

    def __init__(self, model: Model, token_s: float) -> None:
        self.name, self.identity, self.layout = model.name, model.identity, model.layout
        self.block_tokens, self.vocab_size, self.max_positions = (
            model.block_tokens,
            model.vocab_size,
            model.max_positions,
        )
        self.eos_ids, self.device, self.dtype = model.eos_ids, model.device, model.dtype
        self._model = model
        self._token_s = token_s

    def forward(
        self, planes: DeviceCache, spans: Sequence[Span], *, before_layer: Callable[[int], None] | None = None
    ) -> Computed:
        """Compute, and sleep for the rest of the time."""
        until_s = time.perf_counter() + self._token_s * sum(len(span.tokens) for span in spans)
        computed = self._model.forward(planes, spans, before_layer=before_layer)
        time.sleep(max(0.0, until_s - time.perf_counter()))
        return computed


class _LoadsAll(Connector):
    """Does not learn what computing costs: so whatever is stored is loaded, whole."""

    def measured(self, num_tokens: int, token_contexts: int, seconds: float) -> None:
        """Say nothing."""


def _serving(
    model: Model, stores: dict[str, Store], options: MeetOptions, kind: type[Connector] = Connector
) -> AbstractContextManager[BenchEngine]:
    return bench_engine(
        model,
        stores,
        num_tokens=options.tokens,
        step_tokens=options.step_tokens,
        load_timeout_s=_WAIT_S,
        kind=kind,
    )


def run(options: MeetOptions | None = None, *, tell: Tell | None = None) -> BenchReport:
    """Measure. Blocks for a minute, or minutes on a large shape."""
    options = options if options is not None else MeetOptions()
    model: Model = bench_model(options.shape, device=options.device, block_tokens=options.block_tokens)
    if options.block_ms:
        model = _SlowedModel(model, options.block_ms / 1e3 / options.block_tokens)
    samples = Samples()
    num_pages = (3 + _NUM_WARM * (1 + len(options.paces))) * (options.num_blocks + 2)
    limit = limit_for(frame_bytes=frame_bytes(model.layout.plane_bytes), num_pages=num_pages)
    paces = []
    with tempfile.TemporaryDirectory(prefix="headwater-meet-", dir=memory_root(limit)) as memory:
        place = LocalStoreConfig(directory=Path(memory) / "store", limit_bytes=limit)
        with open_local(place) as inner:
            store = ThrottledStore(inner, 0.0)
            prompts = [make_prompt(model, options.tokens, seed) for seed in (1, 2)]
            with _serving(model, {_TIER: store}, options) as server:  # they are stored from now on
                for prompt in prompts:
                    server.ask(prompt)
                    server.rest()
            compute_s = _compute(model, prompts, options, samples)
            for done, pace in enumerate(options.paces):
                if tell is not None:
                    tell(f"loading takes {pace:g} x computing", done, len(options.paces))
                store.page_s = pace * compute_s / options.num_blocks
                paces.append(_at_pace(model, store, prompts, pace, options, samples))
    ratios = [row["ratio"] for row in paces]
    return BenchReport(
        command="bench meet",
        options={name: getattr(options, name) for name in options.__slots__},
        results={"paces": paces, "worst_ratio": max(ratios), "best_ratio": min(ratios)},
        notes=_NOTES,
        samples=samples.values,
    )


def _compute(model: Model, prompts: list[list[int]], options: MeetOptions, samples: Samples) -> float:
    """What computing a prompt takes, without stores."""
    with _serving(model, {}, options) as server:
        _warm(server, model, options, seed=100)
        for turn in range(max(2, options.rounds)):
            _take(server, prompts[turn % 2], "first_compute_ms", samples)
    return samples.median("first_compute_ms") / 1e3


def _at_pace(
    model: Model, store: ThrottledStore, prompts: list[list[int]], pace: float, options: MeetOptions, samples: Samples
) -> dict[str, Any]:
    """The three ways, in turns, at one pace of the store."""
    loaded = []
    with (
        _serving(model, {}, options) as computing,
        _serving(model, {_TIER: store}, options, _LoadsAll) as loading,
        _serving(model, {_TIER: store}, options) as meeting,
    ):
        for server in (computing, meeting):
            _warm(server, model, options, seed=200 + 10 * int(10 * pace))
        for turn in range(2):  # the first load of a store is whole: nobody knows its pace
            for server in (loading, meeting):
                server.ask(prompts[turn])
                server.rest()
        for turn in range(options.rounds):
            for name, server in (("compute", computing), ("load", loading), ("meet", meeting)):
                cached = _take(server, prompts[turn % 2], f"{pace:g}_{name}_ms", samples)
                if name == "meet":
                    loaded.append(cached / (options.num_blocks * options.block_tokens))
    row: dict[str, Any] = {"load_over_compute": pace, "page_ms": 1e3 * store.page_s}
    for name in ("compute", "load", "meet"):
        row[f"{name}_ms"] = samples.median(f"{pace:g}_{name}_ms")
    row["ratio"] = row["meet_ms"] / min(row["compute_ms"], row["load_ms"])
    row["loaded"] = sum(loaded) / len(loaded)
    return row


def _warm(server: BenchEngine, model: Model, options: MeetOptions, seed: int) -> None:
    for at in range(_NUM_WARM):
        server.ask(make_prompt(model, options.tokens, seed + at))
        server.rest()


def _take(server: BenchEngine, prompt: list[int], name: str, samples: Samples) -> int:
    """Time a prompt; how many of its tokens came from the store."""
    time.sleep(_PAUSE_S)
    (usage,) = server.ask(prompt)
    samples.add(name, (usage.ttft_s or 0.0) * 1e3)
    server.rest()
    return usage.cached_by_tier.get(_TIER, 0)
