"""Both sides of the vLLM connector under an engine that behaves as vLLM does, with real stores, executors and faults.

The engine checks every byte that it computes with; these tests see to it that there is something to check.
"""

import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headwater.cache.placement import TierState
from headwater.core.errors import CopyStuck
from headwater.core.events import Copied, Event, JobDone, Load, Save
from headwater.core.identity import CacheIdentity
from headwater.core.keys import BlockKey
from headwater.core.results import Status
from headwater.integrations.vllm import build, step_executor
from headwater.integrations.vllm import scheduler as scheduler_side
from headwater.integrations.vllm.executor import ExecutorProcess, Starting
from headwater.integrations.vllm.identity import as_fields
from headwater.integrations.vllm.metadata import Orders, RankFacts, Report
from headwater.integrations.vllm.pacer import Flight
from headwater.integrations.vllm.registered import RegisteredCache, say_planes
from headwater.integrations.vllm.settings import ExecutorKind, read_config
from headwater.integrations.vllm.worker import WorkerSide
from headwater.storage.base import Deadline
from headwater.testing.clock import FakeClock
from headwater.testing.faulty_stores import Faults, FaultyStore
from headwater.transfer.device.copy_engine import CopyEngine
from vllm_kit import SIZE, WIDTHS, FakeEngine, FakeRequest, Group
from worker_kit import make_late


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return tmp_path / "disk"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


ROOM_S = 60.0  # for a busy machine; nothing here waits for its end


def plane(num_blocks: int, width: int, shared: Path | None) -> torch.Tensor:
    """KV, which other processes can map if it is in a file: as they can a GPU's."""
    if shared is None:
        return torch.zeros(num_blocks, width, dtype=torch.uint8)
    shared.parent.mkdir(exist_ok=True)
    number, name = tempfile.mkstemp(prefix="kv-", dir=shared.parent)
    os.close(number)
    storage = torch.UntypedStorage.from_file(name, shared=True, nbytes=num_blocks * width)
    found: torch.Tensor = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (num_blocks, width))  # type: ignore[call-overload]
    return found


@contextmanager
def engine_of(
    directory: Path,
    *,
    num_blocks: int = 64,
    faults: Faults | None = None,
    seed: int = 0,
    world: int = 1,
    shares: bool = False,
    **options: Any,
) -> Iterator[FakeEngine]:
    """An engine of `world` ranks on a store; each opens it for itself, as processes would."""
    config = read_config(
        {
            "host_directory": None,
            "disk_directory": str(directory),
            "disk_bytes": 16 << 20,
            "probe_timeout_s": 5.0,
            **options,
        }
    )
    far = config.executor is ExecutorKind.PROCESS
    planes = [[plane(num_blocks, width, directory if far else None) for width in WIDTHS] for _ in range(world)]
    workers: list[build.OpenWorker | ExecutorProcess | Starting] = []
    facts = []
    with pytest.MonkeyPatch.context() as patch:
        if faults is not None:
            opened = build.open_tiers

            def faulty(*args: Any, **kwargs: Any) -> Any:
                return {name: FaultyStore(store, faults, seed=seed) for name, store in opened(*args, **kwargs).items()}

            patch.setattr(build, "open_tiers", faulty)
        for rank in range(world):
            tensors = {str(at): one for at, one in enumerate(planes[rank])}
            device = RegisteredCache(tensors, num_blocks=num_blocks, block_tokens=SIZE)
            layout = device.layout
            identity = CacheIdentity(
                model="fake", weights=bytes(32), config=bytes(32), layout=layout.fingerprint, block_tokens=SIZE
            )
            who: dict[str, Any] = {"identity": identity.digest, "rank": rank, "world": world}
            workers.append(Starting(config) if far else build.open_worker(config, device, **who))
            if isinstance(workers[-1], Starting):
                workers[-1].show(say_planes(device), **who)
            facts.append(
                RankFacts(
                    rank=rank,
                    world=world,
                    block_tokens=SIZE,
                    plane_bytes=layout.plane_bytes,
                    num_blocks=num_blocks,
                    identity=as_fields(identity),
                    far=far,
                )
            )
        ready = [one.wait() if isinstance(one, Starting) else one for one in workers]
        scheduler = build.open_scheduler(config, facts)
    try:
        group = Group([worker.side for worker in ready])
        flat = [plane for of in planes for plane in of]
        yield FakeEngine(scheduler.side, group, flat, sync=config.load == "sync", shares=shares)
    finally:
        scheduler.close()
        for worker in ready:
            worker.close(0.0)


def run(engine: FakeEngine, *, chance: random.Random | None = None, may_fail: bool = False) -> None:
    """Until everything is over; with `chance`, requests are preempted and aborted on the way. `may_fail`: the brain."""
    until = time.monotonic() + ROOM_S
    while engine.is_busy:
        running = [one for one in engine.requests if one.status == "running"]
        victim = chance.choice(running) if chance and running and chance.random() < 0.05 else None
        engine.step(preempt=victim)
        if chance and engine.requests and chance.random() < 0.03:
            one = chance.choice(engine.requests)
            if one.status != "waiting":
                engine.finish(one)
        with engine.scheduler.cache.still() as brain:
            brain.validate()
        assert may_fail or not engine.scheduler.cache.metrics.value("brain_failures_total")
        assert time.monotonic() < until, [(one.request_id, one.status) for one in engine.requests]
        time.sleep(0)
    assert sorted(engine.free) == list(range(len(engine.planes[0]))), "blocks were lost"


def prompts(seed: int, number: int) -> list[list[int]]:
    """Some share their beginnings."""
    chance = random.Random(seed)
    heads = [[chance.randrange(1000) for _ in range(40)] for _ in range(3)]
    return [
        chance.choice(heads)[: chance.randrange(8, 40)]
        + [chance.randrange(1000) for _ in range(chance.randrange(1, 12))]
        for _ in range(number)
    ]


@pytest.mark.parametrize("executor", ["threads", "process"])
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_second_engine_finds_what_the_first_computed(disk: Path, mode: str, executor: str) -> None:
    prompt = list(range(1, 42))
    with engine_of(disk, load=mode, executor=executor) as one:
        one.add(FakeRequest("a", prompt, 9))
        run(one)
        assert one.scheduler.cache.metrics.value("hit_tokens_total") == 0
    with engine_of(disk, load=mode, executor=executor) as two:
        request = FakeRequest("b", prompt, 9)
        two.add(request)
        run(two)
        assert request.num_loaded == 40
        assert two.scheduler.cache.metrics.value("hit_tokens_total", tier="disk") == 40
        assert two.num_failed == 0


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("seed", range(3))
def test_no_wrong_byte_whatever_goes_wrong(disk: Path, mode: str, seed: int) -> None:
    """Prompts come in two turns each, and then others: a first block that fails once is not asked for in ten seconds.

    With the same three beginnings in all turns, three such faults before the first hit were the end of all hits.
    """
    faults = Faults(
        get_fails=0.03, get_misses=0.03, flips_byte=0.05, cuts_tail=0.03, contains_lies=0.02, put_fails=0.02
    )
    chance = random.Random(seed)
    with engine_of(disk, num_blocks=40, faults=faults, seed=seed, load=mode) as engine:
        hits = 0.0
        for turn in range(20):
            asked = prompts(100 * seed + turn // 2, 10)
            engine.add(*(FakeRequest(f"{turn}.{at}", one, 6) for at, one in enumerate(asked)))
            run(engine, chance=chance)
            hits = engine.scheduler.cache.metrics.value("hit_tokens_total")
            if turn >= 3 and hits > 0 and engine.num_failed and engine.num_preempted:
                break
        assert hits > 0, "nothing was tested"
        assert engine.num_preempted > 0
        assert engine.num_failed > 0


@pytest.mark.parametrize("seed", range(3))
def test_blocks_that_requests_share_are_saved_and_loaded_as_any(disk: Path, seed: int) -> None:
    """The engine finds blocks of others, before we have heard of them or after we have forgotten them."""
    faults = Faults(get_fails=0.02, get_misses=0.02, flips_byte=0.03, contains_lies=0.02, put_fails=0.02)
    chance = random.Random(seed)
    with engine_of(disk, num_blocks=48, faults=faults, seed=seed, shares=True) as engine:
        hits = 0.0
        for turn in range(20):
            asked = prompts(100 * seed + turn // 3, 10)
            engine.add(*(FakeRequest(f"{turn}.{at}", one, 6) for at, one in enumerate(asked)))
            run(engine, chance=chance)
            hits = engine.scheduler.cache.metrics.value("hit_tokens_total", tier="disk")
            if turn >= 5 and hits > 0 and engine.num_shared and engine.num_preempted:
                break
        assert hits > 0, "nothing was tested"
        assert engine.num_shared > 0
        assert engine.num_preempted > 0


def test_who_shares_a_block_that_is_not_named_yet_is_cached(disk: Path) -> None:
    """Few blocks of a request that runs are not named before it ends; another may build on them meanwhile."""
    first, second = list(range(1, 10)), [*range(1, 9), *range(50, 80)]
    with engine_of(disk, shares=True) as engine:
        engine.add(FakeRequest("a", first, 30))
        for _ in range(2):
            engine.step()
        engine.add(FakeRequest("b", second, 2))
        run(engine)
        assert engine.num_shared == 8
    with engine_of(disk) as engine:
        engine.add(again := FakeRequest("b", second, 2))
        run(engine)
        assert again.num_loaded == 36


def test_ranks_count_as_one(disk: Path) -> None:
    """A block is there if every rank's page of it is, and was loaded if every rank has it."""
    prompt = list(range(1, 42))
    with engine_of(disk, world=2) as one:
        one.add(FakeRequest("a", prompt, 2))
        run(one)
    with engine_of(disk, world=2) as two:
        request = FakeRequest("b", prompt, 2)
        two.add(request)
        run(two)
        assert (request.num_loaded, two.num_failed) == (40, 0)
        # one rank loses its fourth page
        lost = two.worker.sides[1]._executor._tiers["disk"].store  # type: ignore[attr-defined]
        naming = two.worker.sides[1]._executor._runner._naming  # type: ignore[attr-defined]
        assert lost.delete([naming.name(request_keys(two, prompt)[3])], deadline=Deadline.after(5.0))
    with engine_of(disk, world=2) as three:
        request = FakeRequest("c", prompt, 2)
        three.add(request)
        run(three)
        assert request.num_loaded == 12
        assert three.num_failed == 0
    with engine_of(disk, world=1) as alone:
        request = FakeRequest("d", prompt, 2)
        alone.add(request)
        run(alone)
        assert request.num_loaded == 0, "another number of ranks has other pages"
    faults = Faults(get_fails=0.02, flips_byte=0.02)
    with engine_of(disk, world=2, faults=faults, num_blocks=40) as five:
        five.add(*(FakeRequest(f"{at}", one, 4) for at, one in enumerate([*prompts(1, 8), *prompts(1, 8)])))
        run(five, chance=random.Random(1))


def request_keys(engine: FakeEngine, prompt: list[int]) -> list[BlockKey]:
    """What the blocks of a prompt are called."""
    named = engine.scheduler._namer.prompt(FakeRequest("x", prompt, 1))
    assert named is not None
    return named.extend(prompt, len(prompt) // SIZE)


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_load_that_fails_is_not_tried_again(disk: Path, mode: str) -> None:
    prompt = list(range(1, 42))
    with engine_of(disk) as one:
        one.add(FakeRequest("a", prompt, 2))
        run(one)
    with engine_of(disk, faults=Faults(get_fails=1.0), load=mode) as two:
        first, second = FakeRequest("b", prompt, 2), FakeRequest("c", prompt, 2)
        two.add(first)
        run(two)
        assert (two.num_failed, two.num_loaded) == (1, 0)
        two.add(second)
        run(two)
        assert two.num_failed == 1, "another request was told of blocks that could not be had a moment ago"


def test_a_request_is_told_of_a_bad_hit_once(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nobody remembers the blocks: vLLM would ask again and again."""
    monkeypatch.setattr(step_executor, "DROPPED_S", 0.0)
    prompt = list(range(1, 42))
    with engine_of(disk) as one:
        one.add(FakeRequest("a", prompt, 2))
        run(one)
    with engine_of(disk, faults=Faults(get_fails=1.0)) as two:
        two.add(FakeRequest("b", prompt, 2))
        run(two)
        assert two.num_failed == 1


def test_a_store_that_hangs_costs_its_deadline_and_nothing_else(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = list(range(1, 42))
    with engine_of(disk) as one:
        one.add(FakeRequest("a", prompt, 2))
        run(one)
    released = threading.Event()

    def hang(self: FaultyStore, pages: Any, *, deadline: Any) -> Any:
        released.wait(ROOM_S)
        raise OSError("too late")

    monkeypatch.setattr(FaultyStore, "get_into", hang)
    try:
        with engine_of(disk, faults=Faults(), load_timeout_s=0.2) as two:
            request = FakeRequest("b", prompt, 2)
            two.add(request)
            run(two)
            assert two.num_failed == 1
            assert len(request.all_token_ids) == len(prompt) + 2
            two.add(FakeRequest("c", prompt, 2))
            run(two)
            assert two.num_failed == 1, "the next one waited, too"
            released.set()
    finally:
        released.set()


class _Hang:
    """The first copy to the device does not return until it is let go; then it still writes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.arrived, self.go_on = threading.Event(), threading.Event()
        self.wrote = threading.Event()
        self.engine: FakeEngine | None = None  # the rank's loads are late then
        self.alone = False  # this one only
        scatter = CopyEngine.scatter

        def hang(copies: CopyEngine, frames: Any, slots: Any, **more: Any) -> Any:
            if self.arrived.is_set() or "on_over" in more:  # in place: of the host tier
                return scatter(copies, frames, slots, **more)
            assert self.engine is not None
            for side in self.engine.worker.sides:
                if side._executor._runner._staging.engine is copies:  # type: ignore[attr-defined]
                    while self.alone and sum(isinstance(one, Load) for one in side._live.values()) > 1:
                        time.sleep(0.001)  # others end before their deadlines
                    make_late(side._executor)  # type: ignore[arg-type]  # it is the worker
            self.arrived.set()
            assert self.go_on.wait(ROOM_S)
            transfer = scatter(copies, frames, slots, **more)
            assert transfer.wait(ROOM_S)
            self.wrote.set()
            return transfer

        monkeypatch.setattr(CopyEngine, "scatter", hang)


def _step_until(engine: FakeEngine, condition: Any) -> None:
    until = time.monotonic() + ROOM_S
    while not condition():
        engine.step()
        assert time.monotonic() < until


@pytest.mark.parametrize("world", [1, 2])
def test_a_copy_that_hangs_costs_its_deadline_and_its_blocks(
    disk: Path, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request is computed in other blocks; those that the copy may still write to are nobody's until it has."""
    prompt = list(range(1, 42))
    with engine_of(disk, world=world) as one:
        one.add(FakeRequest("a", prompt, 2))
        run(one)
    hang = _Hang(monkeypatch)
    try:
        with engine_of(disk, world=world, load_timeout_s=ROOM_S) as hang.engine:
            two = hang.engine
            request = FakeRequest("b", prompt, 2)
            two.add(request)
            _step_until(two, lambda: request.status == "loading")
            blocks = set(request.blocks)
            _step_until(two, lambda: not two.requests)
            assert len(request.all_token_ids) == len(prompt) + 2
            assert two.num_failed == 1
            assert two.pinned == two.ownerless == blocks
            other = FakeRequest("c", list(range(100, 150)), 2)
            two.add(other)
            _step_until(two, lambda: not two.requests)  # every byte of it is checked, and none of the blocks is its own
            assert two.pinned == blocks
            hang.go_on.set()
            assert hang.wrote.wait(ROOM_S)
            two.add(FakeRequest("d", list(range(200, 250)), 2))  # somebody must take steps for the news to arrive
            _step_until(two, lambda: not (two.pinned or two.requests))
            run(two)  # no block was lost
            assert two.num_failed == 1
            assert two.scheduler.cache.metrics.value("hit_tokens_total") == 0
    finally:
        hang.go_on.set()


def test_a_copy_that_hangs_and_ends_between_two_steps_has_loaded_nothing(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step hears at once that it hung and that it is over, with nothing in blocks that are still the request's."""
    prompt = list(range(1, 42))
    with engine_of(disk) as one:
        one.add(FakeRequest("a", prompt, 2))
        run(one)
    go_on = threading.Event()
    engine: list[FakeEngine] = []

    def hang(copies: CopyEngine, frames: Any, slots: Any, **more: Any) -> None:
        make_late(engine[0].worker.sides[0]._executor)  # type: ignore[arg-type]  # it is the worker
        assert go_on.wait(ROOM_S)
        raise RuntimeError("the copy came to nothing")

    finished = WorkerSide.finished

    def late(side: WorkerSide) -> Any:
        while side._stuck:
            go_on.set()
            time.sleep(0.001)
        return finished(side)

    monkeypatch.setattr(CopyEngine, "scatter", hang)
    monkeypatch.setattr(WorkerSide, "finished", late)
    try:
        with engine_of(disk, load_timeout_s=ROOM_S) as two:
            engine.append(two)
            request = FakeRequest("b", prompt, 2)
            two.add(request)
            _step_until(two, lambda: not two.requests)  # every byte is checked
            assert go_on.is_set()
            assert len(request.all_token_ids) == len(prompt) + 2
    finally:
        go_on.set()


def test_blocks_of_a_request_whose_load_hung_are_not_saved_when_they_are_anothers(
    disk: Path, tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some were loaded well, and vLLM takes them, too; the request comes again later. Then the copy ends."""
    host: dict[str, Any] = {"host_directory": str(shm / "host"), "host_bytes": 16 << 20}
    prompt = list(range(1, 42))
    with engine_of(disk) as one:
        one.add(FakeRequest("a", prompt, 2))
        run(one)
    with engine_of(tmp_path / "other", **host) as one:  # half of them are in a nearer tier
        one.add(FakeRequest("a", prompt[:21], 1))
        run(one)
    hang = _Hang(monkeypatch)
    hang.alone = True
    try:
        with engine_of(disk, load_timeout_s=ROOM_S, **host) as hang.engine:
            two = hang.engine
            request = FakeRequest("b", prompt, 2)
            two.add(request)
            _step_until(two, lambda: request.status == "loading")
            old = list(request.blocks)
            admit, held_back = two._admit, True
            monkeypatch.setattr(
                two, "_admit", lambda one: None if held_back and one is request and not one.blocks else admit(one)
            )
            _step_until(two, lambda: not request.blocks)
            assert 0 < len(two.pinned) < len(old)  # the others are free
            two.free.sort(key=lambda block: (block not in old, block))
            other = FakeRequest("c", list(range(500, 545)), 40)
            two.add(other)
            _step_until(two, lambda: other.status == "running" and bool(set(other.blocks) & set(old)))
            (store,) = (tier.store for name, tier in two.worker.sides[0]._executor._tiers.items() if name == "disk")  # type: ignore[attr-defined]
            naming = two.worker.sides[0]._executor._runner._naming  # type: ignore[attr-defined]
            names = [naming.name(key) for key in request_keys(two, prompt)]
            store.delete(names[:1], deadline=Deadline.after(ROOM_S))  # so that they would be worth saving
            hang.go_on.set()
            assert hang.wrote.wait(ROOM_S)
            _step_until(two, lambda: not (two.pinned or other in two.requests))
            assert not any(store.contains(names, deadline=Deadline.after(ROOM_S)))
            held_back = False
            _step_until(two, lambda: not two.requests)
            run(two)
    finally:
        hang.go_on.set()


def test_an_aborted_request_whose_copy_hangs_leaves_its_blocks_behind(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = list(range(1, 42))
    with engine_of(disk) as one:
        one.add(FakeRequest("a", prompt, 2))
        run(one)
    hang = _Hang(monkeypatch)
    try:
        with engine_of(disk, load_timeout_s=ROOM_S) as hang.engine:
            two = hang.engine
            request = FakeRequest("b", prompt, 2)
            two.add(request)
            _step_until(two, lambda: request.status == "loading")
            assert hang.arrived.wait(ROOM_S)
            two.finish(request)
            _step_until(two, lambda: not two.delayed)
            assert len(two.ownerless) == 10
            hang.go_on.set()
            _step_until(two, lambda: not two.pinned)
            run(two)
    finally:
        hang.go_on.set()


def test_a_step_that_waits_for_a_copy_that_hangs_says_so(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM would compute into the very blocks: the engine stops, and does not hang."""
    prompt = list(range(1, 42))
    with engine_of(disk) as one:
        one.add(FakeRequest("a", prompt, 2))
        run(one)
    hang = _Hang(monkeypatch)
    try:
        with engine_of(disk, load_timeout_s=ROOM_S, load="sync") as hang.engine:
            two = hang.engine
            two.add(FakeRequest("b", prompt, 2))
            with pytest.raises(CopyStuck):
                _step_until(two, lambda: False)
            hang.go_on.set()
    finally:
        hang.go_on.set()


def test_what_a_store_lost_is_written_again(disk: Path) -> None:
    prompt = list(range(1, 42))
    with engine_of(disk) as one:
        one.add(FakeRequest("a", prompt, 2))
        run(one)
        executor = one.worker.sides[0]._executor
        assert executor.drain(ROOM_S)  # type: ignore[attr-defined]
        names = [executor._runner._naming.name(key) for key in request_keys(one, prompt)]  # type: ignore[attr-defined]
        executor._tiers["disk"].store.delete(names[::-1], deadline=Deadline.after(5.0))  # type: ignore[attr-defined]
        one.add(FakeRequest("b", prompt, 2))
        run(one)
        assert executor.drain(ROOM_S)  # type: ignore[attr-defined]
        last = FakeRequest("c", prompt, 2)
        one.add(last)
        run(one)
        assert last.num_loaded == 40


def test_decoded_blocks_are_saved_some_at_a_time_and_all_at_the_end(disk: Path) -> None:
    prompt = list(range(1, 42))
    with engine_of(disk, num_blocks=128) as engine:
        request = FakeRequest("a", prompt, 47)  # 88 tokens, of which the last is never computed
        engine.add(request)
        saved: list[int] = []
        orders = engine.scheduler.orders

        def seen(blocks_of: Any) -> Orders:
            found = orders(blocks_of)
            saved.extend(len(one.keys) for one in found.jobs if isinstance(one, Save))
            return found

        engine.scheduler.orders = seen  # type: ignore[method-assign]
        run(engine)
        assert sum(saved) == 21
        assert saved[:-1] == [num for num in saved[:-1] if num >= 4]
        assert engine.worker.sides[0]._executor.drain(ROOM_S)  # type: ignore[attr-defined]
        again = FakeRequest("b", request.all_token_ids[:87], 2)
        engine.add(again)
        run(engine)
        assert again.num_loaded == 84


def test_a_short_prompt_is_saved_when_it_is_computed(disk: Path) -> None:
    """Who is preempted loads its prompt again, though it had not decoded enough to be saved with it."""
    with engine_of(disk, num_blocks=128) as engine:
        request = FakeRequest("a", list(range(1, 3 * SIZE + 2)), 40)
        engine.add(request)
        while request.num_computed_tokens < 3 * SIZE + 2:
            engine.step()
        assert engine.scheduler.cache.num_named("a#0") == 3
        assert engine.worker.sides[0]._executor.drain(ROOM_S)  # type: ignore[attr-defined]
        engine.step(preempt=request)
        run(engine)
        assert request.num_loaded == 3 * SIZE


def test_tokens_of_steps_in_flight_are_not_named(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where steps overlap, vLLM counts tokens as computed that are not."""
    monkeypatch.setattr(scheduler_side, "_TOGETHER", 1)
    with engine_of(disk) as engine:
        request = FakeRequest("a", list(range(1, 42)), 2)
        engine.add(request)
        while request.num_computed_tokens < 24:
            engine.step()
        request.num_in_flight_tokens = 8
        engine.scheduler.orders(lambda _: request.blocks)
        assert engine.scheduler.cache.num_named("a#0") == (request.num_computed_tokens - 8) // SIZE
        request.num_in_flight_tokens = 0
        engine.scheduler.orders(lambda _: request.blocks)
        assert engine.scheduler.cache.num_named("a#0") == request.num_computed_tokens // SIZE


def test_what_a_waiting_engine_takes_away_is_not_stored(disk: Path) -> None:
    """Saves of a preempted request are void: its blocks are scribbled over while they wait."""
    prompt = list(range(1, 42))
    gate = threading.Event()
    with engine_of(disk, num_blocks=16) as engine:
        executor = engine.worker.sides[0]._executor._runner  # type: ignore[attr-defined]
        save = executor._save

        def slow(job: Any, order: Any) -> Any:
            gate.wait(ROOM_S)
            return save(job, order)

        executor._save = slow
        request = FakeRequest("a", prompt, 2)
        engine.add(request)
        while not engine.worker.sides[0]._reading:
            engine.step()
        engine.step(preempt=request)
        gate.set()
        run(engine)
    with engine_of(disk) as two:
        two.add(FakeRequest("b", prompt, 2))
        run(two)  # checks every byte
        assert two.scheduler.cache.metrics.value("hit_tokens_total") == 40, "it was saved when it came again"


class _Executor:
    """An executor that does nothing until it is told."""

    def __init__(self) -> None:
        self.deliver: Any = None
        self.given: list[Any] = []
        self.hurries: list[bool] = []

    def submit(self, instructions: Any) -> None:
        self.given += instructions

    def throttle_saves(self, *, on: bool) -> None:
        self.hurries.append(on)

    def say(self, event: Event) -> None:
        self.deliver(event)


def _save(job: int, *slots: int) -> Save:
    return Save(
        job=job,
        store="host",
        keys=tuple(BlockKey(bytes([slot]) * 32) for slot in slots),
        deadline_s=9e9,
        slots=slots,
        parent=BlockKey(bytes(32)),
        depth=0,
        tenant=bytes(16),
    )


def test_eyes_take_in_what_was_written_to_each_store_before_it_is_much() -> None:
    """Saves to two stores come in pairs: neither is passed over."""
    eyes = _Executor()
    one = step_executor.StepExecutor(eyes, num_ranks=1, others_write=True)  # type: ignore[arg-type]
    for number in range(128):
        order = replace(_save(number, 1, 2, 3, 4), store=("host", "disk")[number % 2])
        one.submit([order])
        done = JobDone(now_s=1.0, job=number, results=(Status.STORED,) * 4, num_bytes=4, seconds=0.1)
        one.heard(Report(events=((0, done),)))
    assert Counter(probe.store for probe in eyes.given) == {"host": 2, "disk": 2}


def test_an_ended_request_leaves_when_its_blocks_were_read(clock: FakeClock) -> None:
    executor = _Executor()
    side = WorkerSide(executor, clock=clock)
    side.begin(Orders(jobs=(_save(1, 5), _save(2, 6)), leaving=(("r", (1, 2), 10.0),)))
    side.load()
    side.save()
    assert side.finished() == (set(), set())
    executor.say(Copied(now_s=0.0, job=1))
    assert side.finished() == (set(), set())
    executor.say(JobDone(now_s=0.0, job=2, results=(Status.STORED,)))
    assert side.finished() == ({"r"}, set())
    assert side.finished() == (set(), set()), "said twice"


def test_an_ended_request_does_not_stay_for_ever(clock: FakeClock) -> None:
    executor = _Executor()
    side = WorkerSide(executor, clock=clock)
    side.begin(Orders(sent_s=clock.monotonic(), jobs=(_save(1, 5),), leaving=(("r", (1,), clock.monotonic() + 2.0),)))
    side.load()
    side.save()
    assert side.finished() == (set(), set())
    clock.advance(3.0)
    assert side.finished() == (set(), set()), "first it is cancelled"
    assert [type(one).__name__ for one in executor.given] == ["Save", "Cancel"]
    executor.say(JobDone(now_s=0.0, job=1, results=(Status.LATE,)))
    assert side.finished() == ({"r"}, set())


def test_blocks_of_a_failed_load_are_reported_with_its_end(clock: FakeClock) -> None:
    executor = _Executor()
    side = WorkerSide(executor, clock=clock)
    keys = tuple(BlockKey(bytes([at]) * 32) for at in range(3))
    load = Load(job=1, store="host", keys=keys, deadline_s=9e9, slots=(7, 8, 9))
    side.begin(Orders(jobs=(load,), loading=(("r", (1,)),), missing=(("r", (10,)),)))
    side.load()
    side.save()
    assert side.finished() == (set(), set())
    executor.say(JobDone(now_s=0.0, job=1, results=(Status.HIT, Status.MISS, Status.MISS)))
    assert side.finished() == (set(), {"r"})
    assert side.take_bad() == {8, 9, 10}
    assert side.take_bad() == set()


# --- nobody waits in the engine's loop --------------------------------------------------------------------------------


def _step(side: WorkerSide, orders: Orders) -> tuple[set[str], set[str]]:
    side.begin(orders)
    side.load()
    side.save()
    return side.finished()


def _load(job: int) -> Load:
    return Load(job=job, store="host", keys=(BlockKey(bytes([job]) * 32),), deadline_s=9e9, slots=(job,))


@pytest.mark.fault("C3")
def test_a_step_waits_for_no_save(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even an empty one: blocks of an ended request are read while others compute."""
    monkeypatch.setattr("headwater.integrations.vllm.worker._IDLE_S", ROOM_S)
    begin_s = time.monotonic()
    side = WorkerSide(_Executor(), clock=clock)
    for at in range(8):
        leaving = (("r", (1,), 9e9),) if not at else ()
        jobs = (_save(1, 5),) if not at else ()
        assert _step(side, Orders(jobs=jobs, leaving=leaving, idle=True)) == (set(), set())
    assert time.monotonic() - begin_s < ROOM_S, "it waited for a save"


@pytest.mark.fault("C3")
def test_a_step_waits_for_no_load_while_another_is_under_way(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.integrations.vllm.worker._IDLE_S", ROOM_S)
    begin_s = time.monotonic()
    side, flight = WorkerSide(_Executor(), clock=clock), Flight()
    for at in range(8):
        idle = flight.begun(computes=not at)  # the first computes, and is not over
        orders = Orders(jobs=(_load(1),), loading=(("r", (1,)),), idle=idle) if not at else Orders(idle=idle)
        assert _step(side, orders) == (set(), set())
    assert time.monotonic() - begin_s < ROOM_S, "it waited beside a step that computes"


def test_steps_under_way_are_known_to_compute_or_not() -> None:
    flight = Flight()
    assert flight.begun(computes=False)
    assert not flight.begun(computes=True)
    assert not flight.begun(computes=False)
    flight.ended()
    assert not flight.begun(computes=False), "the second is still under way"
    flight.ended()
    assert flight.begun(computes=False)
    for _ in range(9):
        flight.ended()
    assert flight.begun(computes=False)


@pytest.mark.fault("C3")
def test_what_was_said_is_not_held_up_by_another_load(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler has not heard yet that a load ended: steps go on until it has."""
    monkeypatch.setattr("headwater.integrations.vllm.worker._IDLE_S", ROOM_S)
    begin_s = time.monotonic()
    executor = _Executor()
    side = WorkerSide(executor, overlapping=2, clock=clock)
    loading = (("a", (1,)), ("b", (2,)))
    assert _step(side, Orders(jobs=(_load(1), _load(2)), loading=loading, idle=True)) == (set(), set())
    executor.say(JobDone(now_s=0.0, job=1, results=(Status.HIT,)))
    assert _step(side, Orders(idle=True)) == (set(), {"a"})
    assert _step(side, Orders(idle=True)) == (set(), set())
    assert _step(side, Orders(idle=True)) == (set(), set())
    assert time.monotonic() - begin_s < ROOM_S


def test_who_only_waits_for_a_load_hears_of_its_end_at_once(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of asking again and again, and taking the interpreter from who loads."""
    monkeypatch.setattr("headwater.integrations.vllm.worker._IDLE_S", ROOM_S)
    executor = _Executor()
    side = WorkerSide(executor, clock=clock)
    assert _step(side, Orders(jobs=(_load(1),), loading=(("r", (1,)),), idle=True)) == (set(), set())
    waits = threading.Event()
    wait_for = side._changed.wait_for

    def waiting(*args: Any) -> Any:
        waits.set()
        return wait_for(*args)

    def say() -> None:
        waits.wait(ROOM_S)
        executor.say(JobDone(now_s=0.0, job=1, results=(Status.HIT,)))

    monkeypatch.setattr(side._changed, "wait_for", waiting)
    thread = threading.Thread(target=say)
    thread.start()
    found = _step(side, Orders(idle=True))
    thread.join()
    assert found == (set(), {"r"})
    assert waits.is_set()


def test_saves_stand_back_while_a_step_is_launched(clock: FakeClock) -> None:
    executor = _Executor()
    side = WorkerSide(executor, clock=clock)
    side.begin(Orders())
    assert executor.hurries == [True]
    side.load()
    side.save()
    assert executor.hurries == [True, False]
    side.begin(Orders(idle=True))
    assert executor.hurries[-1] is False, "nothing is launched"
    side.save()
    side.begin(Orders(vacated=(1,)))
    assert executor.hurries[-1] is False, "blocks are wanted back: what reads them has to go on"


def test_the_interpreter_is_shared_as_was_asked_and_only_then(disk: Path) -> None:
    before = sys.getswitchinterval()
    with engine_of(disk):
        assert sys.getswitchinterval() == pytest.approx(0.0005), "by default our threads keep it a tenth of the time"
    assert sys.getswitchinterval() == before
    with engine_of(disk, switch_interval_s=None):
        assert sys.getswitchinterval() == before
    with engine_of(disk, switch_interval_s=0.001):
        assert sys.getswitchinterval() == pytest.approx(0.001)
    assert sys.getswitchinterval() == before


# --- nothing is dropped that fits -------------------------------------------------------------------------------------


def _slow_saves(engine: FakeEngine, gate: threading.Event) -> None:
    """No save reads anything before the gate is open."""
    executor = engine.worker.sides[0]._executor._runner  # type: ignore[attr-defined]
    save = executor._save

    def slow(job: Any, order: Any) -> Any:
        gate.wait(ROOM_S)
        return save(job, order)

    executor._save = slow


def _dropped(engine: FakeEngine) -> dict[str, float]:
    found = engine.scheduler.cache.metrics.counters()
    return {title: num for title, num in found.items() if title.startswith("dropped_blocks_total")}


def _until_none(engine: FakeEngine) -> None:
    """Until no request is there; some may still be saved."""
    until = time.monotonic() + ROOM_S / 2
    while engine.requests:
        engine.step()
        assert time.monotonic() < until, [(one.request_id, one.status) for one in engine.requests]
        time.sleep(0)


@pytest.mark.fault("C2")
def test_a_prompt_as_long_as_the_device_is_saved_whole(disk: Path) -> None:
    """However many bytes wait: they are vLLM's own blocks."""
    gate = threading.Event()
    prompt = list(range(1, 62 * SIZE + 2))
    with engine_of(disk, num_blocks=64) as engine:
        engine.scheduler.cache.brain.jobs.block_bytes = 1 << 30  # as the brain counts
        _slow_saves(engine, gate)
        engine.add(FakeRequest("a", prompt, 1))
        _until_none(engine)  # all of it was computed, and waits to be saved
        gate.set()
        run(engine)
        assert _dropped(engine) == {}
    with engine_of(disk) as two:
        two.add(FakeRequest("b", prompt, 1))
        run(two)
        assert two.scheduler.cache.metrics.value("hit_tokens_total") == 62 * SIZE


@pytest.mark.fault("C2")
def test_no_bytes_are_too_many(disk: Path) -> None:
    tier = read_config({"host_directory": None, "disk_directory": str(disk), "save_timeout_s": 7}).tier("disk")
    here = TierState(tier, 1)
    here.queued_save_bytes = 1 << 50
    assert here.refuses_save(1 << 40, 0.0) is None, "nobody knows how slow it is"
    here.saving.measured(1 << 30, 1.0, 0.0)
    assert here.refuses_save(1 << 40, 0.0) == "too_slow"
    here.queued_save_bytes = 6 << 30
    assert here.refuses_save(1 << 30, 0.0) is None
    assert here.refuses_save(2 << 30, 0.0) == "too_slow"


def test_blocks_that_are_needed_are_not_kept_for_saves(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that finds no room waits a moment, and then gets what was only kept to be saved."""
    monkeypatch.setattr("headwater.integrations.vllm.scheduler._PATIENCE_S", 0.0)
    gate = threading.Event()
    with engine_of(disk, num_blocks=16, free_timeout_s=ROOM_S) as engine:
        _slow_saves(engine, gate)
        try:
            engine.add(FakeRequest("a", list(range(1, 14 * SIZE + 2)), 1))
            _until_none(engine)
            engine.add(FakeRequest("b", list(range(1000, 1000 + 12 * SIZE)), 1))
            _until_none(engine)  # else it waits for a save that does not go on
            assert sum(_dropped(engine).values()) >= 14, "what was given up is counted"
        finally:
            gate.set()


def test_who_ends_while_others_wait_has_its_time_too(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that always has a queue saves all the same."""
    monkeypatch.setattr("headwater.integrations.vllm.scheduler._PATIENCE_S", ROOM_S)
    with engine_of(disk, num_blocks=16) as engine:
        for at in range(6):  # there is room for one of them, beside nobody who is being saved
            engine.add(FakeRequest(str(at), list(range(1000 * at, 1000 * at + 12 * SIZE)), 1))
            _until_none(engine)
        run(engine)
        assert _dropped(engine) == {}
        assert engine.scheduler.cache.metrics.value("requests_total", outcome="served") == 6


def test_nobody_in_need_leaves_saves_alone(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.integrations.vllm.scheduler._PATIENCE_S", 0.0)
    gate = threading.Event()
    with engine_of(disk, num_blocks=64) as engine:
        _slow_saves(engine, gate)
        engine.add(FakeRequest("a", list(range(1, 14 * SIZE + 2)), 1))
        _until_none(engine)
        engine.add(FakeRequest("b", list(range(1000, 1000 + 12 * SIZE)), 1))
        _until_none(engine)
        gate.set()
        run(engine)
        assert _dropped(engine) == {}


# --- looks ------------------------------------------------------------------------------------------------------------


@pytest.mark.fault("C3")
def test_a_look_is_answered_in_the_schedulers_own_call(disk: Path) -> None:
    """However much the worker wrote since: scheduler and worker of one process have the stores open once."""
    num_blocks = 300
    prompt = [at % 1000 for at in range(1, num_blocks * SIZE + 2)]
    with engine_of(disk, num_blocks=num_blocks + 4) as engine:
        asked: list[Any] = []
        eyes = engine.scheduler._executor._prober
        submit = eyes.submit

        def watched(instructions: Any) -> None:
            asked.extend(instructions)
            submit(instructions)

        eyes.submit = watched  # type: ignore[method-assign]
        for name in ("a", "b"):
            request = FakeRequest(name, prompt, 1)
            assert engine.scheduler.matched(request, 0)[0] == (0 if name == "a" else num_blocks * SIZE)
            engine.add(request)
            run(engine)
            assert engine.worker.sides[0]._executor.drain(ROOM_S)  # type: ignore[attr-defined]
        assert asked == [], "somebody else had to look"


def test_a_prompt_that_nobody_has_is_named_when_it_was_computed(disk: Path) -> None:
    """Names take most of a question's time, and vLLM's scheduler waits for its answer."""
    prompt = list(range(1, 42))
    with engine_of(disk) as engine:
        request = FakeRequest("a", prompt, 1)
        assert engine.scheduler.matched(request, 0) == (0, False)
        assert len(engine.scheduler._tracked["a"].prompt.keys) == 1
        engine.add(request)
        run(engine)
        metrics = engine.scheduler.cache.metrics
        assert metrics.value("miss_tokens_total", reason="never_stored") == 40, "all of it was a miss"
    with engine_of(disk) as another:
        again = FakeRequest("b", prompt, 1)
        another.add(again)
        run(another)
        assert again.num_loaded == 40, "all of it was saved"


def test_a_prompt_that_several_compute_at_once_is_saved_once(disk: Path) -> None:
    prompt = list(range(1, 42))
    with engine_of(disk, num_blocks=128) as engine:
        saved: list[Any] = []
        executor = engine.worker.sides[0]._executor
        submit = executor.submit

        def watched(instructions: Any) -> None:
            saved.extend(key for one in instructions if isinstance(one, Save) for key in one.keys)
            submit(instructions)

        executor.submit = watched  # type: ignore[method-assign]
        engine.add(*(FakeRequest(str(at), prompt, 1) for at in range(6)))
        run(engine)
        assert len(saved) == len(set(saved)) == 10


def test_a_block_that_comes_between_two_looks_is_no_reason_to_load_one_alone(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = list(range(1, 42))
    with engine_of(disk) as engine:
        engine.add(FakeRequest("a", prompt, 1))
        run(engine)
        assert engine.worker.sides[0]._executor.drain(ROOM_S)  # type: ignore[attr-defined]
        monkeypatch.setattr(engine.scheduler.cache, "lacks", lambda key: True)
        assert engine.scheduler.matched(FakeRequest("b", prompt, 1), 0) == (40, True)


def test_what_comes_while_a_request_waits_is_found_when_it_asks_again(disk: Path) -> None:
    prompt = list(range(1, 42))
    with engine_of(disk) as engine:
        waiting = FakeRequest("b", prompt, 1)
        assert engine.scheduler.matched(waiting, 0) == (0, False)
        first = FakeRequest("a", prompt, 1)
        engine.add(first)
        run(engine)
        assert engine.worker.sides[0]._executor.drain(ROOM_S)  # type: ignore[attr-defined]
        assert engine.scheduler.matched(waiting, 0) == (40, True)
        engine.add(waiting)
        run(engine)
        assert waiting.num_loaded == 40


def test_what_is_open_in_a_process_is_open_once(disk: Path) -> None:
    with engine_of(disk), engine_of(disk) as two:
        shared = list(build._shared.values())
        assert [one.num_users for one in shared] == [4], "two schedulers, two workers"
        two.add(FakeRequest("a", list(range(30)), 1))
        run(two)
    assert not build._shared


# --- a reset ----------------------------------------------------------------------------------------------------------


@pytest.mark.fault("C5")
def test_after_a_reset_nothing_of_before_is_found(disk: Path) -> None:
    """Weights may have changed, and be the old ones again at a restart."""
    prompt = list(range(1, 42))
    with engine_of(disk) as engine:
        for name, hit in (("a", 0), ("b", 40)):
            engine.add(FakeRequest(name, prompt, 1))
            run(engine)
            assert engine.worker.sides[0]._executor.drain(ROOM_S)  # type: ignore[attr-defined]
            assert engine.scheduler.cache.metrics.value("hit_tokens_total") == hit
        engine.scheduler.reset()
        for name, hit in (("c", 40), ("d", 80)):
            engine.add(FakeRequest(name, prompt, 1))
            run(engine)
            assert engine.worker.sides[0]._executor.drain(ROOM_S)  # type: ignore[attr-defined]
            assert engine.scheduler.cache.metrics.value("hit_tokens_total") == hit
        engine.scheduler.reset()
        assert engine.scheduler.matched(FakeRequest("e", prompt, 1), 0) == (0, False)
    with engine_of(disk) as again:
        assert again.scheduler.matched(FakeRequest("f", prompt, 1), 0)[0] == 40, "the checkpoint's own are still there"


@pytest.mark.fault("C5")
def test_who_runs_when_all_is_reset_is_not_cached(disk: Path) -> None:
    with engine_of(disk) as engine:
        request = FakeRequest("a", list(range(1, 42)), 3)
        engine.add(request)
        while request.num_computed_tokens < 24:
            engine.step()
        engine.scheduler.reset()
        stored = engine.scheduler.cache.brain.jobs._next
        run(engine)
        assert request.status == "over"
        assert engine.scheduler.cache.brain.jobs._next == stored, "something of it was looked up, loaded or saved"
        assert not engine.scheduler._disowned


@pytest.mark.fault("C5")
def test_what_is_being_loaded_when_all_is_reset_has_failed(disk: Path) -> None:
    prompt = list(range(1, 42))
    with engine_of(disk) as engine:
        engine.add(FakeRequest("a", prompt, 1))
        run(engine)
        assert engine.worker.sides[0]._executor.drain(ROOM_S)  # type: ignore[attr-defined]
        request = FakeRequest("b", prompt, 1)
        num, beside = engine.scheduler.matched(request, 0)
        assert num == 40
        assert beside
        engine.scheduler.allocated(request, list(range(10)), num)
        engine.scheduler.reset()
        engine.worker.begin(engine.scheduler.orders(lambda _: range(10)))
        engine.worker.load()
        engine.worker.save()
        until = time.monotonic() + ROOM_S
        received: set[str] = set()
        while not received:
            _, received = engine.worker.finished()
            assert time.monotonic() < until
        assert received == {"b"}
        bad = engine.worker.take_bad()
        assert bad == set(range(10))
        engine.scheduler.heard(engine.worker.report(), ())
        assert not engine.scheduler.finished(request, list(range(10)))
