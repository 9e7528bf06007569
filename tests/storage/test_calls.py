"""Every job of a store ends by its deadline, whatever the store does; its pages come back; a breaker stands before it.

The executor as whoever has no brain uses it: through a `Caller`.
"""

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.core.errors import InvalidInput
from headwater.core.events import Cancel, Instruction, Job, JobDone, JobFailed, Load, Probe, Save, Stuck
from headwater.core.results import Reason
from headwater.lab.campaigns.hanging import HangingStore
from headwater.metrics import Metrics
from headwater.storage.base import SYSTEM_CLOCK, Clock, Store
from headwater.storage.memory import MemoryStore
from headwater.testing.clock import FakeClock
from headwater.testing.device import BytesStaging
from headwater.testing.pages import IDENTITY
from headwater.transfer.executor.caller import Caller, End
from headwater.transfer.executor.worker import Worker
from worker_kit import LAYOUT, PATIENCE_S, TENANT, Gate, OddStore, key, keys, wait_until

SLACK_S = 0.5  # what the issue grants a call beyond its deadline
BEGUN_S = 1.0  # within which a job has begun, also where its thread waits for a core
NUM = 4


class Pending:
    """A job that was submitted, or refused."""

    def __init__(self) -> None:
        self.heard: queue.Queue[End] = queue.Queue()
        self._end: End | None = None

    @property
    def end(self) -> End:
        """How it ended; waits for that."""
        if self._end is None:
            self._end = self.heard.get(timeout=4 * PATIENCE_S)
        assert self.heard.empty(), "it ended twice"
        return self._end

    @property
    def results(self) -> list[str]:
        assert isinstance(self.end, JobDone), self.end
        return list(self.end.results)

    @property
    def failure(self) -> Reason:
        assert isinstance(self.end, JobFailed), self.end
        return self.end.failure


class Bench:
    """An executor on a store, and who calls it: blocks from slots 0 to 3, into slots 8 to 11."""

    def __init__(
        self,
        store: Store | None = None,
        *,
        clock: Clock = SYSTEM_CLOCK,
        breaker: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.hanging = HangingStore(MemoryStore(4 << 20, clock=clock)) if store is None else None
        self.store = store if store is not None else self.hanging
        assert self.store is not None
        self.clock = clock
        self.metrics = Metrics()
        self.staging = BytesStaging(LAYOUT, num_slots=16, num_pages=64, seed=3)
        self.original = self.staging.device.copy()
        threads = {"threads_per_store": 4, "max_extra_threads": 4, "grace_s": 0.1, **options}
        self.worker = Worker(
            {"pool": self.store},
            self.staging,
            layout=LAYOUT,
            identity=IDENTITY,
            block_tokens=LAYOUT.block_tokens,
            clock=clock,
            metrics=self.metrics,
            **threads,
        )
        self.caller = Caller(
            self.worker, ["pool"], identity=IDENTITY, clock=clock, metrics=self.metrics, **(breaker or {})
        )
        self.worker.deliver = self.caller.deliver

    def put(self, within_s: float = PATIENCE_S, *, chain: int = 1, start: int = 0, num: int = NUM) -> Pending:
        facts = {"slots": tuple(range(num)), "parent": key(chain, start - 1), "depth": start, "tenant": TENANT}
        return self.submit(Save, within_s, keys(chain, num, start), **facts)

    def get(self, within_s: float = PATIENCE_S, *, chain: int = 1, at: int = 8) -> Pending:
        return self.submit(Load, within_s, keys(chain, NUM), slots=tuple(range(at, at + NUM)))

    def contains(self, within_s: float = PATIENCE_S, *, num: int = NUM, chain: int = 1) -> Pending:
        return self.submit(Probe, within_s, keys(chain, num))

    def submit(self, kind: type[Job], within_s: float, wanted: Any, **facts: Any) -> Pending:
        pending = Pending()
        deadline_s = self.clock.monotonic() + within_s
        order = kind(job=self.caller.number(), store="pool", keys=wanted, deadline_s=deadline_s, **facts)
        refused = self.caller.submit(order, pending.heard.put)
        if refused is not None:
            pending.heard.put(refused)
        return pending

    def fail(self, times: int = 1) -> None:
        """Have the store raise so often."""
        assert self.hanging is not None
        self.hanging.dead = True
        for _ in range(times):
            assert self.put().failure is Reason.FAILED
        self.hanging.dead = False

    @property
    def left_alone(self) -> bool:
        return self.metrics.value("breaker_state", tier="pool") == 2

    @property
    def num_stuck(self) -> float:
        return self.metrics.value("stuck_calls")

    def untouched(self) -> bool:
        return bool((self.staging.device == self.original).all())

    def finish(self) -> None:
        if self.hanging is not None:
            self.hanging.release()
        if isinstance(self.store, OddStore):
            self.store.open()
        assert self.worker.close(20.0)
        assert self.worker.num_held_pages == 0, "pages did not come back"
        if self.hanging is not None:
            assert self.hanging.spoiled == []
        assert self.num_stuck == 0
        assert self.store is not None
        self.store.close()


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(store: Store | None = None, **options: Any) -> Bench:
        made.append(Bench(store, **options))
        return made[-1]

    yield make
    for one in made:
        one.finish()


def hanging_of(one: Bench) -> HangingStore:
    assert one.hanging is not None
    return one.hanging


def taking(clock: FakeClock, seconds: float) -> Callable[[list[Any]], list[Any]]:
    """A right answer that takes a while."""

    def answer(found: list[Any]) -> list[Any]:
        clock.advance(seconds)
        return found

    return answer


# --- copies that hang, and executors that do --------------------------------------------------------------------------


class Silent:
    """An executor that takes jobs and says nothing of them."""

    def __init__(self) -> None:
        self.taken: list[Instruction] = []

    def submit(self, instructions: Sequence[Instruction], /) -> None:
        self.taken += instructions

    def revive(self, store: str, /) -> bool:
        return False


def load_order(job: int, clock: Clock, within_s: float, at: int = 8) -> Load:
    deadline_s = clock.monotonic() + within_s
    return Load(job=job, store="pool", keys=keys(1, NUM), deadline_s=deadline_s, slots=tuple(range(at, at + NUM)))


def test_a_call_returns_by_its_own_limit_whatever_the_executor_does() -> None:
    silent, clock = Silent(), FakeClock()
    caller = Caller(silent, ["pool"], identity=IDENTITY, clock=clock, limit_s=1.0, breaker_failures=1)
    said: list[End | Stuck] = []
    thread = threading.Thread(target=lambda: said.append(caller.call(load_order(7, clock, 5.0))), daemon=True)
    thread.start()
    wait_until(lambda: bool(silent.taken))
    clock.advance(5.9)
    thread.join(0.3)
    assert not said, "it has not waited as long as it may"
    clock.advance(0.2)
    thread.join(PATIENCE_S)
    assert [type(one) for one in said] == [Stuck]
    assert silent.taken[1:] == [Cancel(job=7)]
    assert caller.lent_slots() == {8, 9, 10, 11}
    assert caller.hears(JobFailed(now_s=clock.monotonic(), job=7, failure=Reason.CANCELLED))
    assert caller.lent_slots() == frozenset()
    assert len(said) == 1


def test_a_copy_that_hangs_is_told_once_and_lends_its_slots_until_it_ends(bench: Callable[..., Bench]) -> None:
    one = bench()
    assert one.put().results == ["stored"] * NUM
    gate = Gate()
    one.staging.on_scatter = gate
    gate.shut()
    stuck: list[Stuck] = []
    ended = Pending()
    order = load_order(one.caller.number(), one.clock, 0.3)
    assert one.caller.submit(order, ended.heard.put, stuck.append) is None
    gate.wait_for_arrival()
    wait_until(lambda: bool(stuck))
    assert one.caller.lent_slots() == set(order.slots)
    assert ended.heard.empty(), "it ended while it copies"
    gate.open()
    assert ended.failure is Reason.LATE
    assert one.caller.lent_slots() == frozenset()
    assert len(stuck) == 1


def test_a_probe_of_a_breaker_that_gets_stuck_is_a_failure(bench: Callable[..., Bench]) -> None:
    """Otherwise the store would be left alone for ever: the next probe comes when the last one has ended."""
    one = bench(breaker={"breaker_failures": 1, "breaker_pause_s": 0.05, "breaker_max_pause_s": 0.05})
    assert one.put().results == ["stored"] * NUM
    one.fail()
    time.sleep(0.06)
    gate = Gate()
    one.staging.on_scatter = gate
    gate.shut()
    stuck: list[Stuck] = []
    ended = Pending()
    order = load_order(one.caller.number(), one.clock, 0.3)
    assert one.caller.submit(order, ended.heard.put, stuck.append) is None
    gate.wait_for_arrival()
    assert one.contains().failure is Reason.DOWN, "one probe at a time"
    wait_until(lambda: bool(stuck))
    time.sleep(0.06)
    assert one.contains().results == ["held"] * NUM
    gate.open()
    assert ended.failure is Reason.LATE
    assert one.contains().results == ["held"] * NUM, "the end of what was stuck was held against the store again"


# --- answers ----------------------------------------------------------------------------------------------------------


def test_answers_are_the_store_s(bench: Callable[..., Bench]) -> None:
    one = bench()
    assert one.put().results == ["stored"] * NUM
    assert one.worker.num_held_pages == 0  # before the end is heard
    assert one.put().results == ["exists"] * NUM
    assert one.get().results == ["hit"] * NUM
    assert [one.staging.block(8 + at) for at in range(NUM)] == [bytes(one.original[at]) for at in range(NUM)]
    assert one.contains(num=NUM + 1).results == ["held"] * NUM + ["absent"]


def test_nothing_left(bench: Callable[..., Bench]) -> None:
    one = bench()
    assert one.put(-1.0).failure is Reason.LATE
    assert one.contains(-1.0).failure is Reason.LATE
    assert hanging_of(one).num_asked() == 0


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda odd: odd.raises.update(put=RuntimeError("no")), "pool raised RuntimeError: no"),
        (lambda odd: odd.raises.update(put=SystemExit(3)), "pool raised SystemExit: 3"),
        (lambda odd: odd.answers.update(put=lambda found: found[:-1]), "pool gave 3 answers for 4 pages"),
        (lambda odd: odd.answers.update(put=lambda found: ["stored"] * 4), "pool gave an answer that is no answer"),
        (lambda odd: odd.answers.update(put=lambda found: None), "pool raised TypeError"),
    ],
)
def test_what_is_no_answer_is_a_failure(
    bench: Callable[..., Bench], spoil: Callable[[OddStore], None], why: str
) -> None:
    odd = OddStore()
    spoil(odd)
    one = bench(odd)
    for chain in (1, 2, 3):
        end = one.put(chain=chain).end
        assert isinstance(end, JobFailed)
        assert end.failure is Reason.FAILED
        assert why in end.why
        assert one.worker.num_held_pages == 0
    assert one.left_alone
    assert one.put().failure is Reason.DOWN


def test_a_listener_that_raises_spoils_nothing(bench: Callable[..., Bench], caplog: pytest.LogCaptureFixture) -> None:
    one = bench()

    def raises(_: End) -> None:
        raise RuntimeError("mine")

    order = Probe(job=one.caller.number(), store="pool", keys=keys(1, 1), deadline_s=time.monotonic() + PATIENCE_S)
    assert one.caller.submit(order, raises) is None
    assert one.put().results == ["stored"] * NUM
    assert "nobody heard" in caplog.text


@pytest.mark.parametrize(
    "options",
    [{"breaker_failures": 0}, {"breaker_pause_s": float("nan")}, {"breaker_pause_s": -1.0}],
)
def test_options_that_cannot_work(bench: Callable[..., Bench], options: dict[str, Any]) -> None:
    one = bench()
    with pytest.raises(InvalidInput, match=next(iter(options))):
        Caller(one.worker, ["pool"], identity=IDENTITY, **options)
    with pytest.raises(InvalidInput, match="tape"):
        one.caller.submit(Probe(job=1, store="tape", keys=(), deadline_s=0.0), lambda _: None)


# --- deadlines --------------------------------------------------------------------------------------------------------


def test_every_call_ends_by_its_deadline_while_the_store_blocks(bench: Callable[..., Bench]) -> None:
    one = bench(breaker={"breaker_failures": 100})
    assert one.put().results == ["stored"] * NUM
    hanging_of(one).hang()
    until_s = time.monotonic() + 0.2
    put, get, contains = one.put(0.2, chain=2), one.get(0.2), one.contains(0.2)
    hanging_of(one).wait_inside(3)
    assert [pending.failure for pending in (put, get, contains)] == [Reason.LATE] * 3
    assert time.monotonic() <= until_s + SLACK_S
    assert one.num_stuck == 3
    assert one.worker.num_held_pages == NUM  # what the stuck get holds is its own; the put hung before it had any
    hanging_of(one).release()
    wait_until(lambda: one.num_stuck == 0)
    assert one.worker.num_held_pages == 0
    assert one.untouched()  # not believed, although the bytes came


def test_a_store_that_keeps_deadlines_says_what_it_did(bench: Callable[..., Bench]) -> None:
    """Pages done by the deadline count, although the answer comes a moment after it."""
    clock = FakeClock()

    def half(found: list[Any]) -> list[Any]:
        clock.advance(1.05)
        return [*found[:2], type(found[0]).LATE, type(found[0]).LATE]

    odd = OddStore(MemoryStore(4 << 20, clock=clock))
    odd.answers["put"] = half
    one = bench(odd, clock=clock)
    assert one.put(1.0).results == ["stored", "stored", "late", "late"]
    odd.answers["put"] = taking(clock, 1.2)
    assert one.put(1.0, chain=2).results == ["late"] * NUM


def test_a_job_that_finds_no_free_thread_is_late_and_never_made(bench: Callable[..., Bench]) -> None:
    one = bench(threads_per_store=1, max_extra_threads=0, breaker={"breaker_failures": 100})
    hanging_of(one).hang("put")
    first = one.put()
    hanging_of(one).wait_inside()
    second = one.put(0.05, chain=2).end
    assert isinstance(second, JobFailed)
    assert (second.failure, second.why) == (Reason.LATE, "it had not begun by its deadline")
    assert hanging_of(one).num_asked("put") == 1
    hanging_of(one).release()
    assert first.results == ["stored"] * NUM
    assert not one.left_alone


# --- threads ----------------------------------------------------------------------------------------------------------


def test_stuck_threads_are_replaced_up_to_a_bound_and_then_nothing_is_made(bench: Callable[..., Bench]) -> None:
    one = bench(threads_per_store=2, max_extra_threads=1, breaker={"breaker_failures": 100})
    hanging_of(one).hang("get_into")
    for number in range(3):
        assert one.get(BEGUN_S).failure is Reason.LATE
        wait_until(lambda number=number: one.num_stuck == number + 1)  # type: ignore[misc]
    asked = hanging_of(one).num_asked()
    assert one.put(0.05).failure is Reason.LATE
    assert hanging_of(one).num_asked() == asked
    hanging_of(one).release()
    wait_until(lambda: one.num_stuck == 0)
    wait_until(lambda: _num_threads() == 2)  # the surplus ends
    assert one.put().results == ["stored"] * NUM


def test_a_stuck_job_that_nobody_waits_for_is_replaced_too(bench: Callable[..., Bench]) -> None:
    one = bench(threads_per_store=1, max_extra_threads=1, breaker={"breaker_failures": 100})
    hanging_of(one).hang("get_into")
    one.get(BEGUN_S)
    hanging_of(one).wait_inside()
    wait_until(lambda: one.num_stuck == 1)
    assert one.put().results == ["stored"] * NUM


def test_reads_go_first_and_a_thread_is_kept_for_them(bench: Callable[..., Bench]) -> None:
    one = bench(threads_per_store=2)
    hanging_of(one).hang("put")
    puts = [one.put(chain=chain) for chain in (1, 2, 3)]
    hanging_of(one).wait_inside()
    assert one.contains().results == ["absent"] * NUM
    assert hanging_of(one).num_asked("put") == 1
    hanging_of(one).release()
    assert [pending.results for pending in puts] == [["stored"] * NUM] * 3


def test_one_thread_serves_everything(bench: Callable[..., Bench]) -> None:
    one = bench(threads_per_store=1, max_extra_threads=0)
    puts = [one.put() for _ in range(5)]
    assert [pending.results[0] for pending in puts] == ["stored"] + ["exists"] * 4
    assert _num_threads() == 1


def test_many_callers_get_their_own_answers(bench: Callable[..., Bench]) -> None:
    one = bench(threads_per_store=3)
    wrong: list[int] = []

    def call(chain: int) -> None:
        for _ in range(20):
            if one.put(chain=chain).results[0] not in ("stored", "exists"):
                wrong.append(chain)
            if one.contains(chain=chain).results != ["held"] * NUM:
                wrong.append(chain)

    threads = [threading.Thread(target=call, args=(chain,)) for chain in range(2, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def _num_threads() -> int:
    return sum(thread.name.startswith("headwater pool") for thread in threading.enumerate())


# --- the breaker ------------------------------------------------------------------------------------------------------


def test_a_dead_store_costs_one_probe_and_is_used_again_when_it_is_back(bench: Callable[..., Bench]) -> None:
    clock = FakeClock()
    one = bench(clock=clock, breaker={"breaker_failures": 3, "breaker_pause_s": 1.0})
    hanging = hanging_of(one)
    assert one.put(1.0).results == ["stored"] * NUM
    hanging.dead = True
    for _ in range(3):
        assert one.put(1.0, chain=2).failure is Reason.FAILED
    assert one.left_alone
    for pause_s in (1.0, 2.0, 4.0, 4.0, 4.0):
        before = hanging.num_asked()
        clock.advance(pause_s - 0.01)
        assert [one.contains(1.0).failure, one.put(1.0).failure] == [Reason.DOWN] * 2
        assert hanging.num_asked() == before
        clock.advance(0.01)
        ends = []
        for _ in range(50):  # a request, and all others: one probe between them
            ends += [one.contains(1.0).failure, one.put(1.0).failure]
        assert Counter(ends) == {Reason.FAILED: 1, Reason.DOWN: 99}
        assert hanging.num_asked() == before + 1
    hanging.dead = False
    assert one.contains(1.0).failure is Reason.DOWN  # still alone
    clock.advance(60.0)
    for _ in range(50):
        assert one.contains(1.0).results == ["held"] * NUM
        assert one.put(1.0).results == ["exists"] * NUM
    assert one.metrics.value("breaker_state", tier="pool") == 0
    assert [event.kind for event in one.metrics.events()] == ["tier_paused", "tier_resumed"]
    assert one.metrics.value("refused_calls_total", reason="left_alone") > 0


def test_a_blocking_store_costs_one_probe(bench: Callable[..., Bench]) -> None:
    """Timeouts count like failures; the probe alone pays for them."""
    one = bench(breaker={"breaker_failures": 1, "breaker_pause_s": 0.0, "breaker_max_pause_s": 0.0})
    assert one.put().results == ["stored"] * NUM
    hanging_of(one).hang()
    asked = hanging_of(one).num_asked()
    assert one.put(BEGUN_S, chain=2).failure is Reason.LATE
    probe = one.get(0.2)
    others = [*(one.put() for _ in range(20)), *(one.get() for _ in range(20))]
    assert {pending.failure for pending in others} == {Reason.DOWN}
    assert probe.failure is Reason.LATE
    assert hanging_of(one).num_asked() == asked + 2
    hanging_of(one).release()
    wait_until(lambda: one.num_stuck == 0)
    assert one.contains().results == ["held"] * NUM
    assert one.put().results == ["exists"] * NUM


@pytest.mark.parametrize("call", ["put", "get_into"])
@pytest.mark.parametrize("word", ["failed", "late"])
def test_nothing_but_failures_is_a_failure_and_one_page_that_is_none_is_not(
    bench: Callable[..., Bench], call: str, word: str
) -> None:
    odd = OddStore()
    one = bench(odd, breaker={"breaker_failures": 2, "breaker_pause_s": 1000.0})
    chains = iter(range(1, 100))

    def ask() -> Pending:
        chain = next(chains)
        if call == "put":
            return one.put(chain=chain)
        assert one.put(chain=chain).results == ["stored"] * NUM
        return one.get(chain=chain)

    odd.answers[call] = lambda found: [found[0], *(type(status)(word) for status in found[1:])]
    for _ in range(4):
        assert ask().results[:2] == ["stored" if call == "put" else "hit", word]
    assert not one.left_alone
    odd.answers[call] = lambda found: [type(status)(word) for status in found]
    if call == "get_into":  # each is behind a put, which is a success
        odd.answers["put"] = odd.answers[call]
        for _ in range(2):
            assert one.get().results[0] == word
    else:
        for _ in range(2):
            assert ask().results[0] == word
    assert one.get().failure is Reason.DOWN


def test_a_late_return_does_not_close_the_breaker(bench: Callable[..., Bench]) -> None:
    one = bench(breaker={"breaker_failures": 1, "breaker_pause_s": 1000.0})
    hanging_of(one).hang("put")
    assert one.put(BEGUN_S).failure is Reason.LATE
    hanging_of(one).release()
    wait_until(lambda: one.num_stuck == 0)
    assert one.put().failure is Reason.DOWN


def test_while_a_probe_is_out_only_the_probe_is_heard(bench: Callable[..., Bench]) -> None:
    clock = FakeClock()
    one = bench(clock=clock, breaker={"breaker_failures": 1, "breaker_pause_s": 1.0})
    hanging = hanging_of(one)
    hanging.hang("put")
    old = one.put(100.0)  # from before
    hanging.wait_inside()
    hanging.dead = True
    assert one.get(1.0).failure is Reason.FAILED
    clock.advance(1.0)
    hanging.hang("get_into")
    probe = one.get(100.0)
    hanging.wait_inside(2)
    hanging.dead = False
    hanging.release("put")
    assert old.results == ["stored"] * NUM
    assert one.put(1.0).failure is Reason.DOWN  # that one proved nothing
    hanging.release()
    assert probe.results == ["hit"] * NUM
    assert one.put(1.0).results == ["exists"] * NUM


def test_an_empty_store_that_is_back_is_found_out(bench: Callable[..., Bench]) -> None:
    """A restarted pool holds nothing, and who looks first is told so: that proves nothing, and locks nobody out."""
    clock = FakeClock()
    one = bench(clock=clock, breaker={"breaker_failures": 1, "breaker_pause_s": 5.0})
    hanging_of(one).dead = True
    assert one.put(1.0).failure is Reason.FAILED
    clock.advance(5.0)
    hanging_of(one).dead = False
    assert one.contains(1.0).results == ["absent"] * NUM
    assert one.left_alone
    assert one.put(1.0).results == ["stored"] * NUM
    assert not one.left_alone


def test_looks_that_find_nothing_do_not_hide_failures(bench: Callable[..., Bench]) -> None:
    one = bench(breaker={"breaker_failures": 2, "breaker_pause_s": 1000.0})
    one.fail()
    assert one.contains().results == ["absent"] * NUM
    one.fail()
    assert one.left_alone


def test_misses_and_full_stores_are_answers(bench: Callable[..., Bench]) -> None:
    one = bench(breaker={"breaker_failures": 2, "breaker_pause_s": 1000.0})
    for _ in range(5):
        assert one.get().results == ["miss"] * NUM
        assert one.put(chain=5, start=3, num=1).results == ["no_parent"]
    for _ in range(3):
        one.fail()
        assert one.get().results == ["miss"] * NUM  # a success between failures
    assert not one.left_alone


def test_what_the_device_does_says_nothing_of_the_store(bench: Callable[..., Bench]) -> None:
    one = bench(breaker={"breaker_failures": 1, "breaker_pause_s": 1000.0})

    def raises(slot: int, page: int) -> None:
        raise RuntimeError("no such luck")

    one.staging.on_gather = raises
    for _ in range(3):
        assert one.put().failure is Reason.FAILED
    one.staging.on_gather = None
    assert one.put().results == ["stored"] * NUM


# --- the end ----------------------------------------------------------------------------------------------------------


def test_close_ends_who_waits_and_says_what_is_stuck(
    bench: Callable[..., Bench], caplog: pytest.LogCaptureFixture
) -> None:
    one = bench(threads_per_store=1, max_extra_threads=0)
    hanging_of(one).hang("put")
    stuck, queued = one.put(), one.put(chain=2)
    hanging_of(one).wait_inside()
    assert not one.worker.close(0.05)
    assert "not back from a call" in caplog.text
    assert [stuck.failure, queued.failure] == [Reason.CANCELLED] * 2
    assert one.worker.num_held_pages == NUM
    assert not one.worker.close(0.0)
    assert one.put().failure is Reason.CANCELLED
    hanging_of(one).release()
    assert one.worker.close()
    assert one.worker.num_held_pages == 0


@given(st.data())
@settings(max_examples=25)
def test_whatever_happens_every_job_ends_and_every_page_comes_back(data: st.DataObject) -> None:
    threads, extra = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 2))
    one = Bench(
        threads_per_store=threads,
        max_extra_threads=extra,
        breaker={
            "breaker_failures": data.draw(st.integers(1, 4)),
            "breaker_pause_s": 0.0,
            "breaker_max_pause_s": 0.0,
        },
    )
    try:
        _whatever_happens(one, data)
        wait_until(lambda: _num_threads() <= threads + extra)
    finally:
        one.finish()


def _whatever_happens(one: Bench, data: st.DataObject) -> None:
    hanging = hanging_of(one)
    pending: list[Pending] = []
    for step in data.draw(
        st.lists(st.sampled_from(("put", "get", "wait", "hang", "release", "die", "live")), max_size=15)
    ):
        if step == "put":
            pending.append(one.put(0.004))
        elif step == "get":
            pending.append(one.get(0.004))
        elif step == "wait" and pending:
            _ = pending[-1].end
        elif step == "hang":
            hanging.hang()
        elif step == "release":
            hanging.release()
        elif step in ("die", "live"):
            hanging.dead = step == "die"
    for asked in pending:
        end = asked.end
        assert isinstance(end, JobFailed) or len(end.results) == NUM
