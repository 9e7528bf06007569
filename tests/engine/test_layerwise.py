"""An engine that computes behind its bytes, layer by layer: it begins early, and what did not come it never used."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from copy_kit import WAIT_S, Hold, OddWire, no_traces
from engine_kit import EngineRig, Run, make_prompt
from headwater.build import open_cache, open_local
from headwater.cache.cache import TieredCache
from headwater.config.cache import CacheConfig, TierConfig
from headwater.config.stores import LocalStoreConfig
from headwater.core.events import Load
from headwater.core.keys import BlockKey
from headwater.core.page import page_name
from headwater.engine.make_model import FAMILIES, random_model
from headwater.engine.models.base import Computed, Model, Span
from headwater.engine.request import Finish
from headwater.index.slots import SlotState
from headwater.layout.frame import frame_bytes, header_bytes
from headwater.layout.spec import KVLayout
from headwater.storage.local import MappedStore
from headwater.storage.verified import Loan, VerifiedStore
from headwater.testing.stores import soon
from headwater.transfer.device.arena import DeviceCache, create_host_cache, create_kv_cache
from headwater.transfer.device.copy_engine import CopyEngine
from headwater.transfer.device.transfer import Transfer
from headwater.transfer.device.wire import Digests, Direction, Wire, WirePiece
from headwater.transfer.executor.staging import TorchStaging
from headwater.transfer.executor.worker import Worker
from worker_kit import make_late, wait_until

pytestmark = pytest.mark.usefixtures(no_traces.__name__)

BLOCK = 16
NUM_BLOCKS = 6  # of a prompt
TAIL = 5
CHUNK = 2 * BLOCK  # a step's tokens: what is computed together is the same however much is cached
ANSWER = 6


class Watched(Model):
    """A model that writes down which layers it waited for, and which it got."""

    def __init__(self, model: Model) -> None:
        self.model = model
        for name in ("name", "identity", "layout", "block_tokens", "vocab_size", "max_positions", "eos_ids"):
            setattr(self, name, getattr(model, name))
        self.device, self.dtype = model.device, model.dtype
        self.asked: list[int] = []  # layers of early steps: all before it are computed
        self.got: list[int] = []
        self.num_early = 0
        self.computed = threading.Event()  # a whole early step

    def forward(
        self, planes: DeviceCache, spans: Sequence[Span], *, before_layer: Callable[[int], None] | None = None
    ) -> Computed:
        if before_layer is None:
            return self.model.forward(planes, spans)
        gate = before_layer
        self.num_early += 1

        def wait(layer: int) -> None:
            self.asked.append(layer)
            gate(layer)
            self.got.append(layer)

        found = self.model.forward(planes, spans, before_layer=wait)
        self.computed.set()
        return found


class WiredStaging(TorchStaging):
    """Copies plane by plane, over wires that a test holds; and remembers the loads."""

    def __init__(self, planes: DeviceCache, pages: Any) -> None:
        super().__init__(planes, pages)
        self.engine.close()
        self.wires: dict[Direction, OddWire] = {}
        self.loads: list[Transfer] = []

        def make(cache: DeviceCache, layout: KVLayout, direction: Direction) -> Wire:
            return self.wires.setdefault(direction, OddWire(cache, layout, direction, place_bytes=1))

        self.engine = engine = CopyEngine(planes, wires=make)
        begin = engine.scatter

        def scatter(*args: Any, **more: Any) -> Transfer:
            self.loads.append(begin(*args, **more))
            return self.loads[-1]

        engine.scatter = scatter  # type: ignore[method-assign]


class Rig(EngineRig):
    """An engine on a slab. What comes late is computed, and not loaded from its end: `test_meet.py` has that."""

    def __init__(self, model: Watched, planes: DeviceCache, staging: WiredStaging, cache: TieredCache) -> None:
        super().__init__(model, planes, cache, step_tokens=CHUNK, num_answer=ANSWER, meets=False)
        self.model, self.staging = model, staging

    @property
    def into(self) -> OddWire:
        return self.staging.wires[Direction.IN]

    def make_late(self) -> None:
        assert isinstance(self.cache._executor, Worker)
        make_late(self.cache._executor)

    def block_count(self, state: SlotState) -> int:
        with self.cache.still() as brain:
            return brain.slots.counts()[state]

    def hold_plane(self, plane: int) -> Hold:
        """Have the loads wait at the first piece of a plane."""
        held = Hold()
        self.into.on_finish = lambda piece: held(piece) if plane in piece.planes else None
        return held


@contextmanager
def rig(model: Model, shm: Path) -> Iterator[tuple[Rig, MappedStore]]:
    watched = Watched(model)
    config = CacheConfig(
        num_slots=40,
        block_tokens=BLOCK,
        block_bytes=model.layout.page_bytes,
        tiers=(TierConfig(name="host", probe_timeout_s=WAIT_S, load_timeout_s=WAIT_S, save_timeout_s=WAIT_S),),
        compute_base_s=1000.0,
    )
    with (
        open_local(LocalStoreConfig(directory=shm / "store", limit_bytes=64 << 20)) as store,
        create_kv_cache(model.layout, 40) as planes,
        create_host_cache(frame_bytes(model.layout.plane_bytes), 8) as pages,
        WiredStaging(planes, pages) as staging,
        open_cache(config, {"host": store}, staging, layout=model.layout, identity=model.identity.digest) as cache,
    ):
        assert isinstance(store, MappedStore)
        here = Rig(watched, planes, staging, cache)
        try:
            yield here, store
        finally:
            here.into.on_finish = here.into.judge = None
            assert here.engine.close()
        here.check_nothing_is_held()


@pytest.fixture(scope="module", params=["llama", "deepseek_v3"])
def model(request: pytest.FixtureRequest) -> Model:
    return random_model(FAMILIES[request.param], dtype="fp32", block_tokens=BLOCK)


@pytest.fixture
def prompt(model: Model) -> list[int]:
    return make_prompt(model, NUM_BLOCKS * BLOCK + TAIL)


def run_cold(model: Model, shm: Path, prompt: list[int]) -> Run:
    """Compute a prompt, and have its blocks in the store."""
    with rig(model, shm) as (here, _):
        run = here.ask(prompt)
        assert here.cache.drain(WAIT_S)
        assert run.usage is not None
        assert (run.usage.cached_tokens, here.model.num_early) == (0, 0)
        return run


def assert_same(run: Run, cold: Run, num_cached: int) -> None:
    assert run.finish is Finish.LENGTH
    assert run.usage is not None
    assert run.usage.cached_tokens == num_cached * BLOCK
    assert run.tokens == cold.tokens
    assert len(run.logits) == len(cold.logits) == ANSWER  # nothing of a step that was thrown away was seen
    assert all(map(torch.equal, run.logits, cold.logits))
    assert run.blocks == cold.blocks


def spoil(store: MappedStore, key: BlockKey, layout: KVLayout, plane: int) -> None:
    """Flip a byte of a plane of a page in the slab."""
    at = store._attachment
    assert at is not None
    place = at.catalog.mirror.places[page_name(key)]
    view = at.slab.view(place.offset, place.num_bytes)
    view[header_bytes(len(layout.planes)) + layout.offsets[plane]] ^= 1


def last_plane(model: Model) -> int:
    return len(model.layout.planes) - 1


# --- it goes well -----------------------------------------------------------------------------------------------------


def test_it_begins_before_all_is_there(model: Model, shm: Path, prompt: list[int]) -> None:
    cold = run_cold(model, shm, prompt)
    with rig(model, shm) as (here, _):
        held = here.hold_plane(last_plane(model))
        run = here.begin(prompt)
        assert held.arrived.wait(WAIT_S)
        wait_until(lambda: here.model.asked == [0, 1, 2])
        assert here.model.got == [0, 1]  # two of three layers are computed, and the third waits for its bytes
        assert not here.staging.loads[0].over
        assert (run.tokens, run.logits) == ([], [])
        with here.cache.still() as brain:
            assert not list(brain.blocks())
        held.go_on.set()
        here.end(run)
        assert here.model.num_early == 1
        assert_same(run, cold, NUM_BLOCKS)
        assert run.usage is not None
        assert run.usage.computed_tokens == TAIL + ANSWER - 1
        assert_same(here.ask(prompt), cold, NUM_BLOCKS)  # and from the device


@pytest.mark.parametrize("plane", range(3))
def test_no_layer_is_read_before_its_bytes(model: Model, shm: Path, prompt: list[int], plane: int) -> None:
    """Planes that have not come hold rubbish here: whoever read them would say other tokens."""
    cold = run_cold(model, shm, prompt)
    with rig(model, shm) as (here, _):
        for row in here.planes.rows:
            row.fill_(0x7F)
        held = here.hold_plane(plane)
        run = here.begin(prompt)
        assert held.arrived.wait(WAIT_S)
        layer = model.layout.planes[plane].layer
        if layer:
            wait_until(lambda: here.model.asked == list(range(layer + 1)))
        assert here.model.got == list(range(layer))
        held.go_on.set()
        assert_same(here.end(run), cold, NUM_BLOCKS)


def test_a_prompt_that_is_wholly_cached_leaves_the_shared_block_alone(model: Model, shm: Path) -> None:
    prompt = make_prompt(model, NUM_BLOCKS * BLOCK)
    cold = run_cold(model, shm, prompt)
    with rig(model, shm) as (here, _):
        held = here.hold_plane(last_plane(model))
        run = here.begin(prompt)
        assert held.arrived.wait(WAIT_S)
        wait_until(lambda: here.model.asked == [0, 1, 2])
        held.go_on.set()
        here.end(run)
        assert here.model.num_early == 1
        assert run.usage is not None
        assert run.usage.computed_tokens == ANSWER
        assert run.tokens == cold.tokens
        assert run.blocks == cold.blocks, "a shared block was written to"
        again = here.ask(prompt)
        assert again.tokens == cold.tokens
        assert again.blocks == cold.blocks
        assert len(run.logits) == ANSWER
        assert all(map(torch.equal, run.logits, again.logits))


def test_a_long_rest_goes_on_as_usual(model: Model, shm: Path, prompt: list[int]) -> None:
    """The first chunk behind what is cached is computed early, the others are not."""
    long = prompt[: NUM_BLOCKS * BLOCK] + make_prompt(model, 3 * BLOCK + TAIL, seed=2)
    run_cold(model, shm, prompt)
    with rig(model, shm / "another") as (here, _):
        cold = here.ask(long)
    with rig(model, shm) as (here, _):
        held = here.hold_plane(last_plane(model))
        run = here.begin(long)
        assert held.arrived.wait(WAIT_S)
        wait_until(lambda: here.model.asked == [0, 1, 2])
        held.go_on.set()
        assert_same(here.end(run), cold, NUM_BLOCKS)
        assert here.model.num_early == 1


def test_nobody_waits_with_it(model: Model, shm: Path, prompt: list[int]) -> None:
    """Where another request has work, that one is done, and the loading one waits for all of its bytes."""
    cold = run_cold(model, shm, prompt)
    with rig(model, shm) as (here, _):
        heard = threading.Semaphore(0)
        other = here.begin(make_prompt(model, 20, seed=3), max_tokens=400, heard=heard.release)
        assert heard.acquire(timeout=WAIT_S)
        held = here.hold_plane(last_plane(model))
        run = here.begin(prompt)
        assert held.arrived.wait(WAIT_S)
        while heard.acquire(blocking=False):
            pass
        for _ in range(5):
            assert heard.acquire(timeout=WAIT_S)
        assert here.model.num_early == 0
        assert not other.over.is_set()
        held.go_on.set()
        assert run.over.wait(WAIT_S)
        assert here.model.num_early == 0
        assert run.tokens == cold.tokens
        here.engine.cancel(other.request)
        assert other.over.wait(WAIT_S)


# --- it does not ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [False, True], ids=["with a rest", "wholly cached"])
def test_a_wrong_byte_in_the_last_layer_throws_the_step_away(model: Model, shm: Path, whole: bool) -> None:
    prompt = make_prompt(model, NUM_BLOCKS * BLOCK + (0 if whole else TAIL))
    cold = run_cold(model, shm, prompt)
    with rig(model, shm) as (here, store):
        num_good = 4
        store.contains([], deadline=soon())
        spoil(store, cold.request.keys[num_good], model.layout, last_plane(model))
        held = here.hold_plane(last_plane(model))
        run = here.begin(prompt)
        assert held.arrived.wait(WAIT_S)
        wait_until(lambda: here.model.asked == [0, 1, 2])
        held.go_on.set()
        here.end(run)
        assert (here.model.got, here.model.num_early) == ([0, 1], 1)
        assert not here.model.computed.is_set()
        assert_same(run, cold, num_good)
        assert run.usage is not None
        assert run.usage.computed_tokens == len(prompt) - num_good * BLOCK + ANSWER - 1
        assert here.cache.drain(WAIT_S)
        assert here.engine.num_steps == -(-(len(prompt) - num_good * BLOCK) // CHUNK) + ANSWER - 1
    with rig(model, shm) as (here, _):  # the page was thrown out, and written again
        assert_same(here.ask(prompt), cold, NUM_BLOCKS) if not whole else here.ask(prompt)


@pytest.mark.parametrize("how", ["given up", "late", "raises"])
def test_a_load_that_ends_in_the_middle_throws_the_step_away(
    model: Model, shm: Path, prompt: list[int], how: str
) -> None:
    cold = run_cold(model, shm, prompt)
    with rig(model, shm) as (here, _):
        held = here.hold_plane(last_plane(model))
        run = here.begin(prompt)
        assert held.arrived.wait(WAIT_S)
        wait_until(lambda: here.model.asked == [0, 1, 2])
        worker = here.cache._executor
        assert isinstance(worker, Worker)
        load = next(job for job in worker._ledger.live.values() if isinstance(job.order, Load))
        if how == "given up":
            here.cache.give_up(f"{run.request.name}#0")
            wait_until(lambda: load.failing is not None)
        elif how == "late":
            make_late(worker)
            wait_until(lambda: load.stuck)
        else:
            here.into.judge = _raise
        held.go_on.set()
        here.end(run)
        assert_same(run, cold, 0)
        if how != "given up":  # what was under way may still have come then
            assert not here.staging.loads[0].complete
            assert 2 not in here.model.got


def _raise(piece: WirePiece, found: Digests | None) -> Digests | None:
    raise RuntimeError("the device is gone")


@pytest.mark.parametrize("plane", ["first", "last"])
def test_a_copy_that_hangs_costs_its_deadline_and_its_slots(
    model: Model, shm: Path, prompt: list[int], plane: str
) -> None:
    """Before the step has begun or in the middle of it: the request is computed, in slots that no copy writes to."""
    cold = run_cold(model, shm, prompt)
    with rig(model, shm) as (here, _):
        held = here.hold_plane(0 if plane == "first" else last_plane(model))
        try:
            run = here.begin(prompt)
            assert held.arrived.wait(WAIT_S)
            if plane == "last":
                wait_until(lambda: here.model.asked == [0, 1, 2])
            here.make_late()
            here.end(run)  # and the copy still hangs
            assert_same(run, cold, 0)
            assert run.usage is not None
            assert run.usage.preemptions == 1
            assert_same(here.ask(prompt), cold, NUM_BLOCKS)  # from the device
            with here.cache.still() as brain:
                brain.validate()
            assert here.block_count(SlotState.QUARANTINED) == NUM_BLOCKS
        finally:
            held.go_on.set()
        assert here.cache.drain(WAIT_S)
        assert here.block_count(SlotState.QUARANTINED) == 0
        assert_same(here.ask(prompt), cold, NUM_BLOCKS)  # what came late spoiled nothing


def test_who_queues_behind_a_copy_that_hangs_goes_on(model: Model, shm: Path, prompt: list[int]) -> None:
    """All places of the wire are taken: what was not launched is given up, and gives its slots back."""
    other = make_prompt(model, NUM_BLOCKS * BLOCK + TAIL, seed=7)
    colds = [run_cold(model, shm, one) for one in (prompt, other)]
    with rig(model, shm) as (here, _):
        held = here.hold_plane(0)
        try:
            runs = [here.begin(prompt)]
            assert held.arrived.wait(WAIT_S)
            wait_until(lambda: not here.staging.engine._queues[Direction.IN]._free)
            runs.append(here.begin(other))
            wait_until(lambda: len(here.staging.loads) == 2)
            here.make_late()
            for run, cold in zip(runs, colds, strict=True):  # they may share steps, which are rounded otherwise
                here.end(run)
                assert run.usage is not None
                assert (run.finish, run.tokens, run.usage.cached_tokens) == (Finish.LENGTH, cold.tokens, 0)
            wait_until(lambda: here.block_count(SlotState.QUARANTINED) == NUM_BLOCKS)
        finally:
            held.go_on.set()
        assert here.cache.drain(WAIT_S)
        assert here.block_count(SlotState.QUARANTINED) == 0


def test_a_load_that_fails_at_its_very_end_throws_the_step_away(
    model: Model, shm: Path, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All layers came, all were computed with; and then the store does not stand by the pages."""
    cold = run_cold(model, shm, prompt)
    with rig(model, shm) as (here, _):

        def settle(self: VerifiedStore, loans: Sequence[Loan], num_good: int, **_: object) -> list[Any]:
            assert here.model.computed.wait(WAIT_S)
            for row in here.planes.rows:
                row[here.staging.loads[0]._slots] = 0x7F  # nothing there is to be used
            raise RuntimeError("boom")

        monkeypatch.setattr(VerifiedStore, "settle", settle)
        run = here.ask(prompt)
        assert (here.model.got, here.model.num_early) == ([0, 1, 2], 1)
        assert_same(run, cold, 0)
        assert run.usage is not None
        assert run.usage.computed_tokens == len(prompt) + ANSWER - 1


def test_a_request_that_leaves_while_it_computes_early(model: Model, shm: Path, prompt: list[int]) -> None:
    cold = run_cold(model, shm, prompt)
    with rig(model, shm) as (here, _):
        held = here.hold_plane(last_plane(model))
        run = here.begin(prompt, max_tokens=100)
        assert held.arrived.wait(WAIT_S)
        wait_until(lambda: here.model.asked == [0, 1, 2])
        here.engine.cancel(run.request)
        held.go_on.set()
        assert run.over.wait(WAIT_S)
        assert run.finish is Finish.CANCELLED
        here.into.on_finish = None
        assert here.ask(prompt).tokens == cold.tokens


def test_planes_are_copied_in_the_order_of_layers(model: Model) -> None:
    layers = [plane.layer for plane in model.layout.planes]
    assert layers == sorted(layers)
    assert np.unique(layers).tolist() == [0, 1, 2]
