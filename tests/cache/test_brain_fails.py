"""A brain that fails: from then on every block is a miss, every answer is right, and nothing hangs or is lost."""

import logging
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brain_kit import fail_at
from headwater.cache.cache import TieredCache
from headwater.cache.executor import NoExecutor
from headwater.cache.match import BlockStatus
from headwater.cache.misses import LentMissBrain, MissBrain
from headwater.cache.state import Brain
from headwater.config.cache import CacheConfig, TierConfig
from headwater.core import events as ev
from headwater.core.errors import Contradiction, InvalidInput
from headwater.core.keys import BlockKey
from headwater.core.results import Reason, Status
from headwater.engine.engine import Engine, EngineConfig
from headwater.engine.models.base import Computed, Span
from headwater.index.radix import RadixIndex
from headwater.index.slots import DeviceSlots, SlotState
from headwater.lab.campaigns.simulation import Simulation
from headwater.lab.campaigns.virtual import ROOT, SimulatedEngine, VirtualExecutor, path_keys
from headwater.metrics import Metrics
from headwater.policy import policy_by_name
from headwater.storage.memory import MemoryStore
from headwater.testing.clock import FakeClock
from headwater.transfer.device.arena import DeviceCache
from test_connector import WAIT_S, WISHES, Client, Rig, Tape, Wish, rig
from test_vllm_sides import engine_of, prompts, run
from vllm_kit import FakeRequest

SIZES: dict[str, Any] = {"num_slots": 8, "block_tokens": 4, "block_bytes": 64}


def loud(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


# --- checks that `python -O` does not remove --------------------------------------------------------------------------

CHECKS = """
from headwater.core.errors import Contradiction
from headwater.index.lent import LentIndex
from headwater.index.base import Hold
from headwater.index.radix import RadixIndex
from headwater.index.slots import DeviceSlots
from headwater.policy import policy_by_name

assert False, "this must not be seen: -O removes it"
index = RadixIndex(policy_by_name("lru"), block_bytes=1, num_ghosts=0)
slots = DeviceSlots(4, index)
taken, _ = slots.take(2)
wrong = [
    lambda: slots.know([3]),  # free
    lambda: slots.unquarantine(taken),  # not quarantined
    lambda: slots.give_back([2]),
    lambda: slots.quarantine([3]),
    lambda: slots.withhold(taken),
    lambda: LentIndex(num_marks=1).slots(Hold(object(), 1)),
]
for number, act in enumerate(wrong):
    try:
        act()
    except Contradiction:
        continue
    raise SystemExit(f"number {number} went through")
print("all of them were noticed")
"""


@pytest.mark.fault("D3")
def test_checks_hold_without_asserts() -> None:
    done = subprocess.run([sys.executable, "-O", "-c", CHECKS], capture_output=True, text=True, timeout=WAIT_S)
    assert (done.returncode, done.stdout.strip()) == (0, "all of them were noticed"), done.stderr


def test_what_is_withheld_is_not_given_out_before_it_is_vacated() -> None:
    index = RadixIndex(policy_by_name("lru"), block_bytes=1, num_ghosts=0)
    slots = DeviceSlots(6, index)
    slots.withhold({1, 3, 4})
    taken, _ = slots.take(3) or ([], [])
    assert (taken, slots.take(1)) == ([0, 2, 5], None)
    slots.unquarantine([3, 1])
    slots.validate()
    assert (slots.take(2) or ((), ()))[0] == [3, 1]
    brain = Brain(CacheConfig(**SIZES), withheld=[0, 7], first_job=40)
    brain.validate()
    with pytest.raises(InvalidInput, match="not withheld"):
        brain.handle(ev.Vacated(now_s=0.0, slots=(0, 1)))
    brain.handle(ev.Vacated(now_s=0.0, slots=(0,)))
    brain.validate()
    assert brain.slots.counts()[SlotState.QUARANTINED] == 1


# --- call by call -----------------------------------------------------------------------------------------------------


class Busy(NoExecutor):
    """An executor that never finishes anything by itself."""

    def __init__(self) -> None:
        self.said: list[ev.Instruction] = []

    def submit(self, instructions: Sequence[ev.Instruction]) -> None:
        self.said += instructions

    def jobs(self, kind: type[ev.Job] = ev.Job) -> list[ev.Job]:
        return [one for one in self.said if isinstance(one, kind)]


def cached(executor: NoExecutor | None = None, **options: Any) -> TieredCache:
    config = CacheConfig(**{**SIZES, "tiers": (TierConfig(name="host"),), **options})
    return TieredCache(Brain(config), executor or Busy(), clock=FakeClock(), metrics=Metrics())


class Stillborn(Brain):
    """Fails at whatever it hears."""

    def handle(self, event: ev.Event) -> list[ev.Instruction]:
        raise RuntimeError("as the test wants it")


KEYS = path_keys([1, 2, 3])


def live(cache: TieredCache, name: str, num_blocks: int = 3, keys: Sequence[BlockKey] = KEYS) -> tuple[int, ...] | None:
    """A request asks and reserves."""
    cache.match(name, keys, root=ROOT)
    return cache.reserve(name, num_blocks)


@pytest.mark.fault("D3")
@pytest.mark.parametrize("call", ["match", "reserve", "commit", "release", "give_up", "pace", "deliver", "off"])
@pytest.mark.parametrize("half", [0, 1], ids=["at once", "half done"])
def test_whichever_call_meets_it_the_engine_goes_on(call: str, half: int, caplog: pytest.LogCaptureFixture) -> None:
    executor = Busy()
    cache = cached(executor)
    table = live(cache, "a")
    assert table is not None
    probes = executor.jobs(ev.Probe)
    fail_at(cache.brain, half)
    if half:
        cache.pace(1.0, 0.0)
    calls: dict[str, Callable[[], object]] = {
        "match": lambda: cache.match("b", KEYS, root=ROOT),
        "reserve": lambda: cache.reserve("a", 4),
        "commit": lambda: cache.commit("a", KEYS[:1]),
        "release": lambda: cache.release("a"),
        "give_up": lambda: cache.give_up("a"),
        "pace": lambda: cache.pace(0.5, 0.5),
        "deliver": lambda: cache.deliver(
            ev.JobFailed(now_s=0.0, job=probes[0].job, failure=Reason.LATE, why="as the test wants it")
        ),
        "off": lambda: cache.deliver(ev.StoreOff(now_s=0.0, store="host", why="as the test wants it")),
    }
    calls[call]()
    (line,) = loud(caplog)
    assert "brain failed" in line
    assert "Injected: as the test wants it" in line
    assert cache.metrics.value("brain_failures_total") == 1
    cache.gauges()
    assert "headwater_brain_failed 1.0" in cache.metrics.prometheus()
    assert cache.troubles()["brain"] == cache.failed
    assert isinstance(cache.brain, MissBrain)
    cancelled = {one.job for one in executor.said if isinstance(one, ev.Cancel)}
    assert {job.job for job in executor.jobs()} - cancelled <= ({probes[0].job} if call == "deliver" else set())
    # Whoever was here may go on as it was, and gets nothing more; who comes now finds nothing, and has room.
    assert call == "release" or cache.poll("a").num_ready == (1 if call == "commit" else 0)
    assert call == "release" or cache.reserve("a", 5) is None
    found = cache.match("new", KEYS, root=ROOT)
    assert [(part.status, part.end) for part in found.parts] == [(BlockStatus.MISS, 3)]
    slots = cache.reserve("new", 3)
    assert slots is not None
    assert call == "release" or not set(slots) & set(table)
    assert cache.commit("new", KEYS) == 3
    assert executor.jobs() == probes, "nothing is looked up, loaded or saved"
    assert cache.match("next", KEYS, root=ROOT).num_hit == 0
    cache.brain.validate()
    if call != "release":
        assert cache.release("a") is None
    bill = cache.release("new")
    assert bill is not None
    assert (bill.hit_tokens, bill.miss_tokens) == ((), (("failed", 12),))
    cache.release("next")
    if call == "match":
        cache.release("b")
    for job in probes:
        cache.deliver(ev.JobFailed(now_s=0.0, job=job.job, failure=Reason.CANCELLED))
    assert cache.brain.slots.counts()[SlotState.FREE] == 8
    assert len(loud(caplog)) == 1


@pytest.mark.fault("D3")
def test_what_was_interrupted_half_way_is_not_believed(caplog: pytest.LogCaptureFixture) -> None:
    """Ctrl-C in the middle of a thought: it passes, and the brain is not asked again."""
    cache = cached()
    fail_at(cache.brain, 0, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        cache.match("a", KEYS, root=ROOT)
    assert cache.failed is not None
    assert cache.match("a", KEYS, root=ROOT).num_hit == 0
    assert len(loud(caplog)) == 1


@pytest.mark.fault("D2")
def test_an_interrupt_at_a_glance_loses_no_job() -> None:
    class Cached(Busy):
        def contains_cached(self, probe: ev.Probe) -> tuple[Status, ...] | None:
            raise KeyboardInterrupt

    executor = Cached()
    cache = cached(executor, tiers=(TierConfig(name="host"), TierConfig(name="disk")))
    with pytest.raises(KeyboardInterrupt):
        cache.match("a", KEYS, root=ROOT)
    assert [probe.store for probe in executor.jobs(ev.Probe)] == ["host", "disk"]
    assert cache.failed is None
    for probe in executor.jobs(ev.Probe):
        cache.deliver(ev.JobDone(now_s=0.0, job=probe.job, results=(Status.HELD,) * 3))
    assert cache.match("a", KEYS, root=ROOT).num_hit == 3


@pytest.mark.fault("D3")
def test_a_slot_that_a_late_load_may_write_is_nobodys() -> None:
    executor = Busy()
    cache = cached(executor)
    cache.match("a", KEYS, root=ROOT)
    (probe,) = executor.jobs(ev.Probe)
    cache.deliver(ev.JobDone(now_s=0.0, job=probe.job, results=(Status.HELD,) * 3))
    table = cache.reserve("a", 4)
    assert table is not None
    (load,) = executor.jobs(ev.Load)
    assert cache.poll("a").loading
    cache.deliver(ev.StoreOff(now_s=0.0, store="nowhere", why=""))  # refused, and nothing else
    assert cache.failed is None
    fail_at(cache.brain, 0)
    cache.pace(1.0, 0.0)
    assert cache.poll("a").loading, "the load has not ended"
    assert not cache.wait_layer("a", 0, 0.0)
    assert cache.release("a") is None
    seen: set[int] = set()
    for number in range(8):
        slots = live(cache, f"new {number}", 1, KEYS[:1])
        if slots is None:
            break
        seen |= set(slots)
    assert seen == set(range(8)) - set(table[:3]), "its last slot was the request's alone"
    cache.deliver(ev.JobFailed(now_s=0.0, job=load.job, failure=Reason.CANCELLED))
    assert live(cache, "last", 3) is not None
    cache.brain.validate()


@pytest.mark.fault("D3")
def test_a_save_that_has_not_read_its_slots_keeps_them() -> None:
    executor = Busy()
    cache = cached(executor, num_slots=4)
    table = live(cache, "a")
    assert table is not None
    cache.commit("a", KEYS)
    (save,) = executor.jobs(ev.Save)
    fail_at(cache.brain, 0)
    cache.pace(1.0, 0.0)
    cache.release("a")
    assert live(cache, "b", 2, KEYS[:2]) is None
    cache.deliver(ev.Copied(now_s=0.0, job=save.job))
    assert live(cache, "b", 2, KEYS[:2]) is not None
    cache.brain.validate()


@pytest.mark.fault("D3")
def test_a_fresh_brain_begins_with_nothing_and_with_other_numbers(caplog: pytest.LogCaptureFixture) -> None:
    executor = Busy()
    cache = cached(executor)
    table = live(cache, "a", 2)
    assert table is not None
    cache.pace(3.0, 1.0)
    cache.deliver(ev.StoreOff(now_s=0.0, store="host", why="damaged"))
    assert not cache.revive_brain(), "it has not failed"
    fail_at(cache.brain, 0)
    cache.commit("a", KEYS[:2])
    before = max(job.job for job in executor.jobs())
    missing = live(cache, "b", 2)
    generation = cache.generation
    assert cache.revive_brain()
    assert (cache.failed, cache.generation) == (None, generation + 1)
    assert type(cache.brain) is Brain
    assert cache.troubles() == {"host": "damaged"}, "what is off stays off"
    assert (cache.brain.cost.base_s, cache.brain.cost.slope_s) == (3.0, 1.0)
    assert cache.brain.withheld == set(table) | set(missing or ())
    for late in executor.jobs():  # of a brain that is gone
        cache.deliver(ev.JobDone(now_s=0.0, job=late.job, results=(Status.HELD,) * 3))
    cache.deliver(ev.StoreOn(now_s=0.0, store="host"))
    assert cache.match("c", KEYS, root=ROOT).num_on_device == 0, "nothing is known of what came before"
    assert min(job.job for job in executor.jobs() if job.job > before) > before
    assert cache.reserve("c", 5) is None
    for name in ("a", "b"):
        assert cache.commit(name, KEYS[2:3]) == 3 if name == "a" else cache.commit(name, KEYS[:1]) == 1
        assert cache.release(name) is None
    slots = cache.reserve("c", 5)
    assert slots is not None
    cache.commit("c", KEYS)
    assert cache.match("d", KEYS, root=ROOT).num_on_device == 3
    cache.brain.validate()
    assert len(loud(caplog)) == 1
    assert cache.close()


def test_a_brain_that_only_misses_may_fail_too(caplog: pytest.LogCaptureFixture) -> None:
    cache = cached()
    for number in range(3):
        fail_at(cache.brain, 0)
        assert cache.match(f"{number}", KEYS, root=ROOT).num_hit == 0
    assert cache.generation == 3
    assert len(loud(caplog)) == 3
    assert live(cache, "new") is not None


def test_hands_that_take_no_more_are_no_reason_to_raise() -> None:
    class Refusing(Busy):
        def submit(self, instructions: Sequence[ev.Instruction]) -> None:
            super().submit(instructions)
            raise InvalidInput("not a job")

    cache = cached(Refusing())
    assert cache.match("a", KEYS, root=ROOT).num_hit == 0
    assert cache.failed is not None
    assert not cache._old.jobs, "nobody will ever say that they have ended"
    assert cache.reserve("a", 3) is not None


@pytest.mark.fault("D3")
@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_cache_whose_brain_fails_while_it_is_closed_is_closed(number: int) -> None:
    executor = Busy()
    cache = cached(executor)
    for name in ("a", "b", "c"):
        assert live(cache, name, 2, KEYS[:2]) is not None
    fail_at(cache.brain, number)
    assert cache.close()
    assert cache.failed is not None
    assert not cache._old.grants
    for job in executor.jobs():
        cache.deliver(ev.JobFailed(now_s=0.0, job=job.job, failure=Reason.CANCELLED))
    assert cache.brain.slots.counts()[SlotState.FREE] == 8


def test_a_fresh_brain_may_fail_at_once() -> None:
    cache = cached()
    cache.pace(1.0, 0.0)
    for store in ("host",):
        cache.deliver(ev.StoreOff(now_s=0.0, store=store, why="damaged"))
    fail_at(cache.brain, 0)
    cache.pace(2.0, 0.0)
    cache._kind = Stillborn
    assert not cache.revive_brain()
    assert cache.failed is not None
    assert live(cache, "a") is not None


@pytest.mark.parametrize("what", ["queued_load_bytes", "queued_save_bytes", "num_pinning"])
def test_sums_that_cannot_be_are_noticed(what: str) -> None:
    cache = cached()
    setattr(cache.brain.tiers["host"], what, -1)
    assert cache.match("a", KEYS, root=ROOT).num_hit == 0
    assert cache.failed is not None
    assert Contradiction.__name__ in cache.failed


def test_the_cluster_hears_that_nothing_is_held() -> None:
    heard: list[object] = []

    class Ear:
        def offer(self, moves: Sequence[object]) -> None:
            heard.extend(moves)

    cache = cached()
    cache.announce(Ear())
    assert live(cache, "a") is not None
    cache.commit("a", KEYS)
    fail_at(cache.brain, 0)
    cache.release("a")
    assert heard[-2:] == [ev.TierLost(tier="device"), ev.TierLost(tier="host")]
    live(cache, "b")
    cache.commit("b", KEYS)
    assert len(heard) == 3, "what is computed now is nobody's to hear of"
    cache.release("b")
    assert cache.revive_brain()
    live(cache, "c")
    cache.commit("c", KEYS)
    assert isinstance(heard[-1], ev.Stored)


# --- many caches and jobs in any order, every byte looked at ----------------------------------------------------------


class Failing(Simulation):
    """Brains fail at any event, and some are revived."""

    num_failures = num_revivals = 0

    def _disturb(self, engine: SimulatedEngine) -> None:
        super()._disturb(engine)
        if engine.cache.failed is not None:
            if self._rng.random() < 0.5:
                assert engine.cache.revive_brain()
                self.num_revivals += 1
        elif self._rng.random() < 0.5 and "handle" not in vars(engine.cache.brain):
            fail_at(engine.cache.brain, self._rng.randrange(60))
            self.num_failures += 1


@pytest.mark.fault("D3")
@pytest.mark.parametrize("seed", range(6))
def test_no_wrong_byte_and_nothing_lost_whenever_brains_fail(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "headwater")
    simulation = Failing(seed)
    simulation.run(120)
    assert simulation.num_revivals > 5
    assert simulation.num_failures - 3 <= len(loud(caplog)) <= simulation.num_failures


def test_jobs_of_a_failed_brain_end_in_virtual_time() -> None:
    """Cancels are reported from within, as where an executor answers at once."""
    simulation = Failing(99)
    engine = simulation.engines[0]
    executor = engine._executor
    assert isinstance(executor, VirtualExecutor)
    request = engine.arrive([1, 2, 3])
    assert executor.queued
    fail_at(engine.cache.brain, 0)
    engine.ask(request)
    executor.tell()
    assert not executor.queued
    assert not engine.cache._old.jobs
    engine.finish()


# --- under engines ----------------------------------------------------------------------------------------------------


class Deaf(Tape):
    """A tape that does not ask the brain whose slots they are: a brain that failed does not know."""

    def forward(
        self, planes: DeviceCache, spans: Sequence[Span], *, before_layer: Callable[[int], None] | None = None
    ) -> Computed:
        found = super().forward(planes, spans, before_layer=before_layer)
        self.trespasses.clear()
        return found


@contextmanager
def engine_on(one: Rig, *, step_tokens: int = 8) -> Iterator[Engine]:
    limits = EngineConfig(max_running=4, step_tokens=step_tokens)
    with Engine(Deaf(one.cache), one.planes, one.connector, limits) as engine:
        yield engine
        assert engine.alive


def ask_all(engine: Engine, wishes: Sequence[Wish]) -> None:
    """Requests of clients, all at once; every answer is right, and each ends."""
    ended = threading.Semaphore(0)
    clients = [Client(number, wish, ended) for number, wish in enumerate(wishes)]
    for client in clients:
        client.submit(engine)
    for _ in clients:
        assert ended.acquire(timeout=WAIT_S)
    assert engine.num_requests == 0
    for client in clients:
        client.check()


@pytest.mark.fault("D3")
@settings(max_examples=80)
@given(
    st.lists(WISHES, min_size=2, max_size=10),
    st.integers(0, 120),
    st.integers(9, 24),
    st.integers(1, 9),
    st.booleans(),
)
def test_answers_are_right_at_whatever_event_it_fails(
    wishes: list[Wish], number: int, num_slots: int, step_tokens: int, warm: bool
) -> None:
    store = MemoryStore(1 << 20)
    if warm:  # so that there is something to load
        with rig(store, num_slots=num_slots, probe_s=0.05) as one, engine_on(one) as engine:
            ask_all(engine, wishes)
    with (
        rig(store, num_slots=num_slots, probe_s=0.05) as one,
        engine_on(one, step_tokens=step_tokens) as engine,
    ):
        fail_at(one.cache.brain, number)
        ask_all(engine, wishes)
        one.check_nothing_is_held()
        if one.cache.failed is None:
            return  # it did not hear so many
        with one.cache.still() as brain:
            assert brain.slots.counts()[SlotState.FREE] == num_slots
        assert not one.cache._old.grants
        assert not one.cache._old.jobs
        assert one.cache.revive_brain()
        ask_all(engine, wishes)
        one.check_nothing_is_held()
        assert one.cache.failed is None


@pytest.mark.fault("D3")
def test_a_revived_brain_hits_again() -> None:
    wish = Wish(stem=0, num_stem=12, tail=(1, 2), num_answer=6, salt=b"", preempt_at=None, cancel_at=None)
    with rig(MemoryStore(1 << 20), num_slots=16) as one, engine_on(one) as engine:
        ask_all(engine, [wish])
        assert one.cache.drain(WAIT_S)
        fail_at(one.cache.brain, 0)
        for _ in range(2):
            before = one.cache.metrics.value("hit_tokens_total")
            ask_all(engine, [wish])
            assert one.cache.metrics.value("hit_tokens_total") == before, "only misses"
        assert one.cache.revive_brain()
        ask_all(engine, [wish])
        assert one.cache.metrics.value("hit_tokens_total", tier="memory") >= 12, "the store has what it had"
        before = one.cache.metrics.value("hit_tokens_total", tier="device")
        ask_all(engine, [wish])
        assert one.cache.metrics.value("hit_tokens_total", tier="device") > before


@pytest.mark.fault("D3")
@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("seed", range(8))
def test_an_engine_that_allocates_by_itself_goes_on(
    tmp_path: Path, mode: str, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine checks every byte that it computes with (`vllm_kit.py`)."""
    caplog.set_level(logging.ERROR, "headwater")
    chance = random.Random(seed)
    asked = prompts(seed, 12)
    with engine_of(tmp_path / "disk", load=mode, num_blocks=48) as engine:
        engine.add(*(FakeRequest(f"warm {i}", prompt, 3) for i, prompt in enumerate(asked[:6])))
        run(engine, may_fail=True)
        cache = engine.scheduler.cache
        fail_at(cache.brain, chance.randrange(80))
        engine.add(*(FakeRequest(f"{i}", prompt, 3) for i, prompt in enumerate(asked)))
        run(engine, chance=chance, may_fail=True)
        if cache.failed is None:
            assert not loud(caplog)
            fail_at(cache.brain, 0)
            cache.pace(1.0, 0.0)
        assert isinstance(cache.brain, LentMissBrain)
        assert len(loud(caplog)) == 1
        engine.add(*(FakeRequest(f"missing {i}", prompt, 2) for i, prompt in enumerate(asked[:4])))
        before = cache.metrics.value("hit_tokens_total")
        run(engine, may_fail=True)
        assert cache.metrics.value("hit_tokens_total") == before, "only misses"
        assert cache.revive_brain()
        engine.add(*(FakeRequest(f"again {i}", prompt, 2) for i, prompt in enumerate(asked[:4])))
        run(engine, chance=chance, may_fail=True)
        engine.add(FakeRequest("last", asked[0], 2))
        run(engine, may_fail=True)
        assert cache.metrics.value("hit_tokens_total", tier="disk") > before, "the store has what it had"
        assert not cache._old.grants
        assert len(loud(caplog)) == 1
