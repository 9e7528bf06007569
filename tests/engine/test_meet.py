"""An engine that computes from the front while its end is loaded: exact, on every tier, whatever becomes of rows."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

from brain_kit import Injected
from engine_kit import WAIT_S, EngineRig, Run, make_prompt
from headwater.build import open_cache, open_local, open_pool
from headwater.cache.cache import TieredCache
from headwater.config.cache import CacheConfig, TierConfig
from headwater.config.stores import LocalStoreConfig
from headwater.core import events as ev
from headwater.core.keys import BlockKey
from headwater.core.page import PageName, page_name
from headwater.core.results import Status
from headwater.engine.make_model import FAMILIES, random_model
from headwater.engine.models.base import Computed, Model, Span
from headwater.engine.request import Finish
from headwater.layout.frame import frame_bytes, header_bytes
from headwater.storage.base import Deadline, Store
from headwater.testing.faulty_stores import ThrottledStore
from headwater.testing.redis import redis_server
from headwater.transfer.device.arena import DeviceCache, create_host_cache, create_kv_cache
from headwater.transfer.executor.staging import TorchStaging
from worker_kit import Gate

BLOCK = 8
NUM_BLOCKS = 20  # of a prompt
TAIL = 3
ANSWER = 4
BLOCK_S = 0.02  # to compute a block, and to load one
LATE_S = 5.0  # a tier's timeout: a load that was to be fast is waited for a fifth of it
LIMIT_BYTES = 64 << 20


class Slow(Model):
    """A model that takes its time, so that a load is worth it. One block is computed in a step: always alike."""

    def __init__(self, model: Model) -> None:
        self.model = model
        for name in ("name", "identity", "layout", "block_tokens", "vocab_size", "max_positions", "eos_ids"):
            setattr(self, name, getattr(model, name))
        self.device, self.dtype = model.device, model.dtype
        self.before_step: Callable[[Sequence[Span]], None] | None = None

    def forward(
        self, planes: DeviceCache, spans: Sequence[Span], *, before_layer: Callable[[int], None] | None = None
    ) -> Computed:
        if self.before_step is not None:
            self.before_step(spans)
        threading.Event().wait(BLOCK_S * sum(len(span.tokens) for span in spans) / BLOCK)
        return self.model.forward(planes, spans, before_layer=before_layer)


class Odd(ThrottledStore):
    """Slow, and of some calls it can be had that they hang, or give other bytes."""

    def __init__(self, store: Store, *, in_place: bool = False) -> None:
        super().__init__(store, BLOCK_S, in_place=in_place)
        self.gate = Gate()
        self.spoilt: set[PageName] = set()
        self.failing: set[PageName] = set()
        self.late_after: int | None = None  # pages: then a call takes all the time it has, once

    def be_late(self, num_pages: int) -> None:
        """Once, in the call that comes to more than so many pages."""
        self.late_after = num_pages

    def _late(self, num_pages: int, deadline: Deadline) -> bool:
        if self.late_after is not None and num_pages > self.late_after:
            self.late_after = None
            threading.Event().wait(deadline.remaining_s)
            return True
        self.late_after = None if self.late_after is None else self.late_after - num_pages
        return super()._late(num_pages, deadline)

    def get_into(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[Status]:
        self.gate()
        results = super().get_into(pages, deadline=deadline)
        for i, (name, frame) in enumerate(pages):
            if name in self.spoilt:
                frame[-1] ^= 1
            if name in self.failing:
                results[i] = Status.FAILED
        return results


class Rig(EngineRig):
    """An engine on one slow store."""

    def __init__(self, model: Slow, planes: DeviceCache, cache: TieredCache, store: Odd, *, meets: bool) -> None:
        super().__init__(model, planes, cache, step_tokens=BLOCK, num_answer=ANSWER, meets=meets)
        self.model, self.store = model, store
        self.heard: list[ev.Event] = []

    def end(self, run: Run, num_blocks: int | None = None) -> Run:
        """Look at the prompt's blocks only, unless told."""
        return super().end(run, len(run.request.prompt) // BLOCK if num_blocks is None else num_blocks)

    def counted(self, name: str, **labels: str) -> float:
        with self.cache.still() as brain:
            totals = brain.accounts.totals.items()
            return sum(
                num for (series, found), num in totals if series == name and labels.items() <= dict(found).items()
            )


@contextmanager
def rig(
    model: Model, name: str, store: Odd, *, meets: bool = True, primed: bool = True, load_timeout_s: float = WAIT_S
) -> Iterator[Rig]:
    tier = TierConfig(name=name, probe_timeout_s=WAIT_S, load_timeout_s=load_timeout_s, save_timeout_s=WAIT_S)
    config = CacheConfig(
        num_slots=3 * NUM_BLOCKS,
        block_tokens=BLOCK,
        block_bytes=model.layout.page_bytes,
        tiers=(tier,),
        compute_base_s=BLOCK_S,
    )
    slow = Slow(model)
    with (
        create_kv_cache(model.layout, config.num_slots) as planes,
        create_host_cache(frame_bytes(model.layout.plane_bytes), 8) as pages,
        TorchStaging(planes, pages) as staging,
        open_cache(config, {name: store}, staging, layout=model.layout, identity=model.identity.digest) as cache,
    ):
        for row in planes.rows:
            row.fill_(0x7F)  # who reads what nobody has written says other tokens
        here = Rig(slow, planes, cache, store, meets=meets)
        try:
            if primed:
                first = here.ask(make_prompt(model, 3 * BLOCK + TAIL, seed=7))  # loaded whole: now the pace is known
                assert first.usage is not None
                assert first.usage.cached_by_tier == {name: 3 * BLOCK}
            yield here
        finally:
            store.gate.open()
            assert here.engine.close()
        here.check_nothing_is_held()


@contextmanager
def opened(where: str, shm: Path, tmp_path: Path) -> Iterator[tuple[str, Odd]]:
    """A slow store: its tier, and itself."""
    with ExitStack() as stack:
        if where == "pool":
            inner = stack.enter_context(open_pool(stack.enter_context(redis_server(LIMIT_BYTES))))
        else:
            directory = (tmp_path if where == "disk" else shm) / "store"
            inner = stack.enter_context(open_local(LocalStoreConfig(directory=directory, limit_bytes=LIMIT_BYTES)))
        yield where.split()[0], Odd(inner, in_place=where == "host in place")


@pytest.fixture(scope="module")
def model() -> Model:
    return random_model(FAMILIES["llama"], dtype="fp32", block_tokens=BLOCK)


@pytest.fixture
def prompt(model: Model) -> list[int]:
    return make_prompt(model, NUM_BLOCKS * BLOCK + TAIL)


@pytest.fixture
def host(shm: Path, tmp_path: Path) -> Iterator[Odd]:
    with opened("host", shm, tmp_path) as (_, store):
        yield store


def run_cold(model: Model, name: str, store: Odd, prompt: list[int]) -> Run:
    """Compute prompts, and have their blocks in the store."""
    with rig(model, name, store, primed=False) as here:
        here.ask(make_prompt(model, 3 * BLOCK + TAIL, seed=7))
        run = here.ask(prompt)
        assert run.usage is not None
        assert run.usage.cached_tokens == 0
        assert here.cache.drain(WAIT_S)
        return run


def assert_same(run: Run, cold: Run) -> None:
    assert run.finish is Finish.LENGTH
    assert run.tokens == cold.tokens
    assert len(run.logits) == len(cold.logits) == ANSWER
    assert all(map(torch.equal, run.logits, cold.logits))
    assert run.blocks == cold.blocks
    assert len(run.blocks) == NUM_BLOCKS


def assert_met(here: Rig, run: Run) -> None:
    """Some of it was loaded, some computed, and all is accounted for."""
    assert run.usage is not None
    num_loaded = sum(run.usage.cached_by_tier.values()) // BLOCK
    assert 0 < num_loaded < NUM_BLOCKS
    assert here.counted("split_loads_total") >= 1
    assert here.counted("split_blocks_total", how="loaded") > 0
    assert here.counted("split_blocks_total", how="computed") > 0


# --- it goes well -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["host", "host in place", "disk", "pool"])
def test_the_answer_is_that_of_a_cold_run_and_of_a_whole_load(
    where: str, model: Model, shm: Path, tmp_path: Path, prompt: list[int]
) -> None:
    with opened(where, shm, tmp_path) as (name, store):
        cold = run_cold(model, name, store, prompt)
        with rig(model, name, store) as here:
            run = here.ask(prompt)
            assert_same(run, cold)
            assert_met(here, run)
            assert run.usage is not None
            assert run.usage.computed_tokens == len(prompt) - run.usage.cached_tokens + ANSWER - 1
            assert here.counted("miss_tokens_total", reason="computed_meanwhile") > 0
            again = here.ask(prompt)  # from the device
            assert_same(again, cold)
            assert again.usage is not None
            assert again.usage.cached_by_tier == {"device": NUM_BLOCKS * BLOCK}
        store.page_s = 0.0
        with rig(model, name, store, meets=False) as here:
            whole = here.ask(prompt)
            assert_same(whole, cold)
            assert whole.usage is not None
            assert whole.usage.cached_by_tier == {name: NUM_BLOCKS * BLOCK}


@pytest.mark.parametrize("num_come", [0, 9])
@pytest.mark.parametrize("where", ["host", "host in place", "pool"])
def test_a_load_that_was_to_be_fast_and_is_late_meets(
    where: str, num_come: int, model: Model, shm: Path, tmp_path: Path, prompt: list[int]
) -> None:
    with opened(where, shm, tmp_path) as (name, store):
        cold = run_cold(model, name, store, prompt)
        store.page_s = BLOCK_S / 10  # so fast that all of it is loaded before anything is computed
        with rig(model, name, store, load_timeout_s=LATE_S) as here:
            store.be_late(num_come)
            run = here.ask(prompt)
            assert_same(run, cold)
            assert store.late_after is None, "nothing was late"
            assert here.counted("split_loads_total") == 1
            assert here.counted("split_blocks_total", how="loaded") > 0
            assert run.usage is not None
            assert run.usage.preemptions == 0
            assert run.usage.computed_tokens == len(prompt) - run.usage.cached_tokens + ANSWER - 1
            assert here.counted("hit_tokens_total") + here.counted("miss_tokens_total") == (3 + NUM_BLOCKS) * BLOCK
            assert here.counted("trial_loads_total") == 0
            assert here.cache.drain(WAIT_S)
            assert_same(here.ask(prompt), cold)  # from the device
        with rig(model, name, store, meets=False) as here:
            assert_same(here.ask(prompt), cold)  # what is stored is as it was


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32"])
def test_other_families(family: str, host: Odd) -> None:
    model = random_model(FAMILIES[family], dtype="fp32", block_tokens=BLOCK)
    prompt = make_prompt(model, NUM_BLOCKS * BLOCK + TAIL)
    cold = run_cold(model, "host", host, prompt)
    with rig(model, "host", host) as here:
        run = here.ask(prompt)
        assert_same(run, cold)
        assert_met(here, run)


def test_a_prompt_that_is_wholly_stored_computes_its_last_token_beside_the_shared_block(
    model: Model, host: Odd
) -> None:
    prompt = make_prompt(model, NUM_BLOCKS * BLOCK)
    cold = run_cold(model, "host", host, prompt)
    with rig(model, "host", host) as here:
        run = here.ask(prompt)
        assert run.tokens == cold.tokens
        assert run.blocks == cold.blocks, "a shared block was written to"
        assert_met(here, run)


def test_several_at_once(model: Model, host: Odd, prompt: list[int]) -> None:
    other = make_prompt(model, NUM_BLOCKS * BLOCK + TAIL, seed=3)
    with rig(model, "host", host, primed=False) as here:
        here.ask(make_prompt(model, 3 * BLOCK + TAIL, seed=7))
        cold = [here.ask(prompt), here.ask(other)]
        assert here.cache.drain(WAIT_S)
    with rig(model, "host", host) as here:
        runs = [here.begin(prompt), here.begin(other), here.begin(prompt)]
        for run, first in zip(runs, [*cold, cold[0]], strict=True):
            here.end(run)
            assert run.tokens == first.tokens
            assert run.blocks.keys() == first.blocks.keys()
            for key, block in run.blocks.items():  # they share steps: what rounds otherwise is not what is meant here
                found, wanted = (
                    torch.frombuffer(bytearray(one), dtype=torch.float32) for one in (block, first.blocks[key])
                )
                assert torch.allclose(found, wanted, atol=1e-4)
        assert here.counted("split_blocks_total", how="loaded") > 0


# --- and badly --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("places", [(NUM_BLOCKS - 1,), (NUM_BLOCKS - 2, NUM_BLOCKS // 2), (0, 1, NUM_BLOCKS - 3)])
def test_a_bad_page_is_computed_and_what_lies_behind_it_is_used(
    places: tuple[int, ...], model: Model, host: Odd, prompt: list[int]
) -> None:
    cold = run_cold(model, "host", host, prompt)
    with rig(model, "host", host) as here:
        host.spoilt = {page_name(cold.request.keys[at]) for at in places}
        run = here.ask(prompt)
        assert_same(run, cold)
        assert_met(here, run)
        assert here.counted("miss_tokens_total", reason="corrupt") > 0


def test_a_store_that_fails_in_the_middle(model: Model, host: Odd, prompt: list[int]) -> None:
    cold = run_cold(model, "host", host, prompt)
    with rig(model, "host", host) as here:
        host.failing = {page_name(key) for key in cold.request.keys[NUM_BLOCKS // 2 : NUM_BLOCKS - 4]}
        run = here.ask(prompt)
        assert_same(run, cold)
        assert_met(here, run)
        assert here.counted("miss_tokens_total", reason="failed") > 0


def test_a_row_that_hangs_is_not_waited_for(model: Model, host: Odd, prompt: list[int]) -> None:
    cold = run_cold(model, "host", host, prompt)
    with rig(model, "host", host) as here:
        seen: list[int] = []

        def hang(spans: Sequence[Span]) -> None:
            seen.append(spans[0].start)
            if len(seen) == 4:
                host.gate.shut()  # the next row waits here until the test is over

        here.model.before_step = hang
        run = here.ask(prompt)
        assert_same(run, cold)
        assert run.usage is not None
        assert run.usage.computed_tokens > ANSWER


def test_who_cancels_in_the_middle_leaves_nothing(model: Model, host: Odd, prompt: list[int]) -> None:
    cold = run_cold(model, "host", host, prompt)
    with rig(model, "host", host) as here:
        started: list[int] = []

        def cancel(spans: Sequence[Span]) -> None:
            started.append(spans[0].start)
            if len(started) == 4:
                here.engine.cancel(run.request)

        here.model.before_step = cancel
        run = here.begin(prompt)
        assert here.end(run).finish is Finish.CANCELLED
        here.check_nothing_is_held()
        here.model.before_step = None
        assert_same(here.ask(prompt), cold)


@pytest.mark.parametrize("at", [2, 5])
def test_preempted_in_the_middle(at: int, model: Model, host: Odd, prompt: list[int]) -> None:
    cold = run_cold(model, "host", host, prompt)
    with rig(model, "host", host) as here:
        run = here.end(here.begin(prompt, preempt_at=at * BLOCK))
        assert_same(run, cold)
        assert run.usage is not None
        assert run.usage.preemptions == 1
        assert here.counted("split_loads_total") >= 1


def test_a_brain_that_fails_in_the_middle(model: Model, host: Odd, prompt: list[int]) -> None:
    cold = run_cold(model, "host", host, prompt)
    with rig(model, "host", host) as here:
        brain, num_claims = here.cache.brain, 0
        handle = brain.handle

        def failing(event: ev.Event) -> list[ev.Instruction]:
            nonlocal num_claims
            num_claims += isinstance(event, ev.Claimed)
            if num_claims == 3:
                raise Injected("in the middle of a meeting")
            return handle(event)

        brain.handle = failing  # type: ignore[method-assign]
        run = here.end(here.begin(prompt))
        assert run.tokens == cold.tokens
        assert all(map(torch.equal, run.logits, cold.logits))
        assert here.cache.failed is not None
        assert here.cache.drain(WAIT_S)
        assert here.cache.revive_brain()


def spoil_in_place(store: Store, key: BlockKey, model: Model) -> None:
    """Flip a byte of a page in the slab."""
    attachment = store._attachment  # type: ignore[attr-defined]
    place = attachment.catalog.mirror.places[page_name(key)]
    view = attachment.slab.view(place.offset, place.num_bytes)
    view[header_bytes(len(model.layout.planes))] ^= 1


def test_bytes_that_are_wrong_when_they_arrive(model: Model, shm: Path, tmp_path: Path, prompt: list[int]) -> None:
    with opened("host in place", shm, tmp_path) as (name, store):
        cold = run_cold(model, name, store, prompt)
        with rig(model, name, store) as here:
            spoil_in_place(store.store, cold.request.keys[NUM_BLOCKS - 2], model)
            run = here.ask(prompt)
            assert_same(run, cold)
            assert_met(here, run)
