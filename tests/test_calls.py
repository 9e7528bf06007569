"""Every call of a store is answered by its deadline, whatever the store does; its memory comes back exactly once."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.core.errors import InvalidInput, ResourceClosed
from headwater.core.results import Status
from headwater.lab.campaigns.hanging import HangingStore
from headwater.metrics import Metrics
from headwater.storage.base import Deadline, Store
from headwater.storage.bounded import BoundedStore
from headwater.storage.calls import Calls
from headwater.storage.memory import MemoryStore
from headwater.storage.pending import CallEnd, Pending
from headwater.testing.clock import FakeClock
from headwater.testing.pages import items, sample_chain, sample_page
from headwater.testing.stores import StoreTests, past, soon
from worker_kit import OddStore, wait_until

SLACK_S = 0.5  # what the issue grants a call beyond its deadline
PAGES = sample_chain(1, 4)
NAMES = [page.name for page in PAGES]


class Bench:
    """Calls on a HangingStore, and who counts what was handed back."""

    def __init__(self, **options: Any) -> None:
        self.hanging = HangingStore(MemoryStore(4 << 20))
        self.metrics = Metrics()
        self.calls = Calls(self.hanging, **{"metrics": self.metrics, **options})
        self.returned: Counter[int] = Counter()
        self.num_handed = 0
        self._lock = threading.Lock()

    def hand(self) -> Callable[[], None]:
        with self._lock:
            number, self.num_handed = self.num_handed, self.num_handed + 1
        return lambda: self.came_back(number)

    def came_back(self, number: int) -> None:
        with self._lock:
            self.returned[number] += 1

    def put(self, deadline: Deadline | None = None, pages: Any = PAGES) -> Pending[Status]:
        return self.calls.put(items(pages), deadline=deadline or soon(), on_return=self.hand())

    def get(self, deadline: Deadline | None = None) -> tuple[Pending[Status], list[memoryview]]:
        buffers = [page.buffer() for page in PAGES]
        call = self.calls.get_into(
            list(zip(NAMES, buffers, strict=True)), deadline=deadline or soon(), on_return=self.hand()
        )
        return call, buffers

    def fail(self, times: int = 1) -> None:
        """Have the store raise so often."""
        self.hanging.dead = True
        for _ in range(times):
            assert self.put().wait() == [Status.FAILED] * 4
        self.hanging.dead = False

    def finish(self) -> None:
        self.hanging.release()
        assert self.calls.close(20.0)
        assert self.returned == Counter(range(self.num_handed)), "memory came back twice, or never"
        assert self.hanging.spoiled == []
        assert self.calls.num_stuck == 0
        self.hanging.close()


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(**options: Any) -> Bench:
        made.append(Bench(**options))
        return made[-1]

    yield make
    for one in made:
        one.finish()


BEGUN_S = 1.0  # within which a call has begun, also where its thread waits for a core


def taking(clock: FakeClock, seconds: float) -> Callable[[list[Any]], list[Any]]:
    """A right answer that takes a while."""

    def answer(found: list[Any]) -> list[Any]:
        clock.advance(seconds)
        return found

    return answer


class TestBoundedStore(StoreTests):
    """As a plain store it keeps all rules of stores."""

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        with MemoryStore(4 << 20) as inner:
            calls = Calls(inner)
            yield BoundedStore(calls)
            assert calls.close()


# --- answers ----------------------------------------------------------------------------------------------------------


def test_answers_are_the_store_s(bench: Callable[..., Bench]) -> None:
    one = bench()
    assert one.put().wait() == [Status.STORED] * 4
    assert one.returned == Counter([0])  # before the answer is heard
    call, buffers = one.get()
    assert call.wait() == [Status.HIT] * 4
    assert (call.end, call.why) == (CallEnd.ANSWERED, "")
    assert buffers == [page.frame for page in PAGES]
    assert one.calls.contains([*NAMES, sample_page(9).name], deadline=soon()).wait() == [True] * 4 + [False]
    assert one.calls.delete([NAMES[3]], deadline=soon()).wait() == [Status.REMOVED]
    assert call.wait() == [Status.HIT] * 4  # asking twice is fine


def test_nothing_asked_and_nothing_left(bench: Callable[..., Bench]) -> None:
    one = bench()
    assert one.put(pages=[]).wait() == []
    assert one.put(past()).wait() == [Status.LATE] * 4
    assert one.calls.contains(NAMES, deadline=past()).wait() == [False] * 4
    assert one.hanging.num_asked() == 0
    assert one.calls.ready


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda odd: odd.raises.update(put=RuntimeError("no")), "pool raised RuntimeError: no"),
        (lambda odd: odd.raises.update(put=SystemExit(3)), "pool raised SystemExit: 3"),
        (lambda odd: odd.answers.update(put=lambda found: found[:-1]), "pool gave no Status for each of its pages"),
        (lambda odd: odd.answers.update(put=lambda found: ["stored"] * 4), "gave no Status for each"),
        (lambda odd: odd.answers.update(put=lambda found: None), "pool raised TypeError"),
    ],
)
def test_what_is_no_answer_is_a_failure(spoil: Callable[[OddStore], None], why: str) -> None:
    odd = OddStore()
    spoil(odd)
    calls = Calls(odd)
    returned: list[int] = []
    for number in range(3):
        call = calls.put(items(PAGES), deadline=soon(), on_return=lambda number=number: returned.append(number))  # type: ignore[misc]
        assert call.wait() == [Status.FAILED] * 4
        assert call.end is CallEnd.RAISED
        assert why in call.why
    assert returned == [0, 1, 2]
    assert not calls.ready
    assert calls.close()
    odd.close()


def test_a_listener_that_raises_spoils_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with MemoryStore(4 << 20) as store:
        calls = Calls(store)

        def raises() -> None:
            raise RuntimeError("mine")

        assert calls.put(items(PAGES), deadline=soon(), on_return=raises).wait() == [Status.STORED] * 4
        assert calls.contains(NAMES, deadline=soon()).wait() == [True] * 4
        assert calls.close()
    assert "was told to do when a call returned failed" in caplog.text


@pytest.mark.parametrize(
    "options",
    [{"num_threads": 0}, {"max_extra_threads": -1}, {"breaker_failures": 0}, {"grace_s": float("nan")}],
)
def test_options_that_cannot_work(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=next(iter(options))):
        Calls(MemoryStore(1 << 20), **options)


# --- deadlines --------------------------------------------------------------------------------------------------------


def test_every_call_ends_by_its_deadline_while_the_store_blocks(bench: Callable[..., Bench]) -> None:
    one = bench(breaker_failures=100)
    one.put().wait()
    one.hanging.hang()
    deadline = Deadline.after(0.2)
    put, (get, buffers) = one.put(deadline), one.get(deadline)
    contains = one.calls.contains(NAMES, deadline=deadline)
    delete = one.calls.delete([sample_page(9).name], deadline=deadline)
    one.hanging.wait_inside(4)
    assert put.wait() == [Status.LATE] * 4
    assert get.wait() == [Status.LATE] * 4
    assert contains.wait() == [False] * 4
    assert delete.wait() == [Status.LATE]
    assert time.monotonic() <= deadline.at_s + SLACK_S
    assert {call.end for call in (put, get)} == {CallEnd.LATE}
    assert one.calls.num_stuck == 4
    assert one.returned == Counter([0])  # what the stuck calls hold is theirs
    one.hanging.release()
    wait_until(lambda: one.calls.num_stuck == 0)
    assert one.returned == Counter([0, 1, 2])
    assert get.wait() == [Status.LATE] * 4  # not believed, although the bytes came
    assert buffers == [page.frame for page in PAGES]


def test_a_store_that_keeps_deadlines_says_what_it_did() -> None:
    """Pages done by the deadline count, although the answer comes a moment after it."""
    clock = FakeClock()

    def half(found: list[Status]) -> list[Status]:
        clock.advance(1.05)
        return [*found[:2], Status.LATE, Status.LATE]

    odd = OddStore(MemoryStore(4 << 20, clock=clock))
    odd.answers["put"] = half
    calls = Calls(odd, clock=clock)
    call = calls.put(items(PAGES), deadline=Deadline.after(1.0, clock), on_return=lambda: None)
    assert call.wait() == [Status.STORED, Status.STORED, Status.LATE, Status.LATE]
    odd.answers["put"] = taking(clock, 1.2)
    call = calls.put(items(PAGES), deadline=Deadline.after(1.0, clock), on_return=lambda: None)
    assert call.wait() == [Status.LATE] * 4
    assert calls.close()
    odd.close()


def test_a_call_that_finds_no_free_thread_is_late_and_never_made(bench: Callable[..., Bench]) -> None:
    one = bench(num_threads=1, max_extra_threads=0, breaker_failures=100)
    one.hanging.hang("put")
    first = one.put()
    one.hanging.wait_inside()
    second = one.put(Deadline.after(0.05))
    assert second.wait() == [Status.LATE] * 4
    assert (second.end, second.why) == (CallEnd.LATE, "no thread was free")
    assert one.returned == Counter([1])
    assert one.hanging.num_asked("put") == 1
    one.hanging.release()
    assert first.wait() == [Status.STORED] * 4
    assert one.calls.ready


# --- threads ----------------------------------------------------------------------------------------------------------


def test_stuck_threads_are_replaced_up_to_a_bound_and_then_calls_are_answered_at_once(
    bench: Callable[..., Bench],
) -> None:
    one = bench(num_threads=2, max_extra_threads=1, breaker_failures=100)
    one.hanging.hang("get_into")
    for number in range(3):
        call, _ = one.get(Deadline.after(BEGUN_S))
        assert call.wait() == [Status.LATE] * 4
        assert one.calls.num_stuck == number + 1
    assert not one.calls.ready
    refused = one.put()
    assert (refused.wait(), refused.end) == ([Status.FAILED] * 4, CallEnd.NO_THREAD)
    assert one.returned == Counter([3])
    assert one.metrics.value("refused_calls_total", reason="no_thread") == 1
    assert one.metrics.value("stuck_calls") == 3
    one.hanging.release()
    wait_until(lambda: one.calls.num_stuck == 0)
    wait_until(lambda: _num_threads() == 2)  # the surplus ends
    assert one.put().wait() == [Status.STORED] * 4


def test_a_stuck_call_that_nobody_waits_for_is_replaced_too(bench: Callable[..., Bench]) -> None:
    one = bench(num_threads=1, max_extra_threads=1, breaker_failures=100)
    one.hanging.hang("get_into")
    one.get(Deadline.after(BEGUN_S))
    one.hanging.wait_inside()
    wait_until(lambda: one.calls.ready and one.calls.num_stuck == 1)
    assert one.put().wait() == [Status.STORED] * 4


def test_reads_go_first_and_a_thread_is_kept_for_them(bench: Callable[..., Bench]) -> None:
    one = bench(num_threads=2)
    one.hanging.hang("put")
    puts = [one.put() for _ in range(3)]
    one.hanging.wait_inside()
    assert one.calls.contains(NAMES, deadline=soon()).wait() == [False] * 4
    assert one.hanging.num_asked("put") == 1
    one.hanging.release()
    assert [call.wait() for call in puts] == [[Status.STORED] * 4] + [[Status.EXISTS] * 4] * 2


def test_one_thread_serves_everything(bench: Callable[..., Bench]) -> None:
    one = bench(num_threads=1, max_extra_threads=0)
    calls = [one.put() for _ in range(5)]
    assert [call.wait()[0] for call in calls] == [Status.STORED] + [Status.EXISTS] * 4
    assert _num_threads() == 1


def test_many_callers_get_their_own_answers(bench: Callable[..., Bench]) -> None:
    one = bench(num_threads=3)
    wrong: list[int] = []

    def call(chain: int) -> None:
        pages = sample_chain(chain, 3)
        for _ in range(20):
            if one.calls.put(items(pages), deadline=soon(), on_return=one.hand()).wait()[0].held is False:
                wrong.append(chain)
            if one.calls.contains([page.name for page in pages], deadline=soon()).wait() != [True] * 3:
                wrong.append(chain)

    threads = [threading.Thread(target=call, args=(chain,)) for chain in range(2, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def _num_threads() -> int:
    return sum(thread.name.startswith("headwater pool call") for thread in threading.enumerate())


# --- the breaker ------------------------------------------------------------------------------------------------------


def test_a_dead_store_costs_one_probe_and_is_used_again_when_it_is_back(bench: Callable[..., Bench]) -> None:
    clock = FakeClock()
    one = bench(clock=clock, breaker_failures=3, breaker_pause_s=1.0)

    def ask() -> list[bool]:
        return one.calls.contains(NAMES, deadline=Deadline.after(1.0, clock)).wait()

    def put() -> Pending[Status]:
        return one.put(Deadline.after(1.0, clock))

    def ready() -> bool:
        return one.calls.ready

    assert put().wait() == [Status.STORED] * 4
    one.hanging.dead = True
    for _ in range(3):
        put().wait()
    assert one.metrics.value("breaker_state", tier="pool") == 2
    for pause_s in (1.0, 2.0, 4.0, 4.0, 4.0):
        before = one.hanging.num_asked()
        clock.advance(pause_s - 0.01)
        assert not ready()
        assert (ask(), put().end) == ([False] * 4, CallEnd.LEFT_ALONE)
        assert one.hanging.num_asked() == before
        clock.advance(0.01)
        assert ready()
        for _ in range(50):  # a request, and all others: one probe between them
            ask()
            assert put().wait() == [Status.FAILED] * 4
        assert one.hanging.num_asked() == before + 1
    one.hanging.dead = False
    assert ask() == [False] * 4  # still alone
    clock.advance(60.0)
    for _ in range(50):
        assert ask() == [True] * 4
        assert put().wait() == [Status.EXISTS] * 4
    assert one.metrics.value("breaker_state", tier="pool") == 0
    assert [event.kind for event in one.metrics.events()] == ["tier_paused", "tier_resumed"]


def test_a_blocking_store_costs_one_probe(bench: Callable[..., Bench]) -> None:
    """Timeouts count like failures; the probe alone pays for them."""
    one = bench(breaker_failures=1, breaker_pause_s=0.0, breaker_max_pause_s=0.0)
    one.put().wait()
    one.hanging.hang()
    assert one.put(Deadline.after(BEGUN_S)).wait() == [Status.LATE] * 4
    probe, _ = one.get(Deadline.after(0.2))
    others: list[Pending[Any]] = [*(one.put() for _ in range(20)), *(one.get()[0] for _ in range(20))]
    assert {call.end for call in others} == {CallEnd.LEFT_ALONE}
    assert probe.wait() == [Status.LATE] * 4
    assert one.hanging.num_asked() == 3
    one.hanging.release()
    wait_until(lambda: one.calls.num_stuck == 0)
    assert one.calls.contains(NAMES, deadline=soon()).wait() == [True] * 4
    assert one.put().wait() == [Status.EXISTS] * 4


@pytest.mark.parametrize("call", ["put", "get_into", "delete"])
@pytest.mark.parametrize("word", ["failed", "late"])
def test_nothing_but_failures_is_a_failure_and_one_page_that_is_none_is_not(call: str, word: str) -> None:
    odd = OddStore()
    calls = Calls(odd, breaker_failures=2, breaker_pause_s=1000.0)
    asks: dict[str, Callable[[], Pending[Any]]] = {
        "put": lambda: calls.put(items(PAGES), deadline=soon(), on_return=lambda: None),
        "get_into": lambda: calls.get_into(
            [(page.name, page.buffer()) for page in PAGES], deadline=soon(), on_return=lambda: None
        ),
        "delete": lambda: calls.delete(NAMES, deadline=soon()),
    }
    odd.answers[call] = lambda found: [found[0], *(type(one)(word) for one in found[1:])]
    for _ in range(4):
        assert asks[call]().wait()[-1].value == word
    assert calls.ready
    odd.answers[call] = lambda found: [type(one)(word) for one in found]
    for _ in range(2):
        assert asks[call]().wait()[0].value == word
    assert asks[call]().end is CallEnd.LEFT_ALONE
    assert calls.close()
    odd.close()


def test_a_late_return_does_not_close_the_breaker(bench: Callable[..., Bench]) -> None:
    one = bench(breaker_failures=1, breaker_pause_s=1000.0)
    one.hanging.hang("put")
    assert one.put(Deadline.after(BEGUN_S)).wait() == [Status.LATE] * 4
    one.hanging.release()
    wait_until(lambda: one.calls.num_stuck == 0)
    assert one.put().end is CallEnd.LEFT_ALONE


def test_while_a_probe_is_out_only_the_probe_is_heard(bench: Callable[..., Bench]) -> None:
    clock = FakeClock()
    one = bench(clock=clock, breaker_failures=1, breaker_pause_s=1.0)
    one.hanging.hang("put")
    old = one.put(Deadline.after(100.0, clock))  # from before
    one.hanging.wait_inside()
    one.hanging.dead = True
    assert one.get(Deadline.after(1.0, clock))[0].wait() == [Status.FAILED] * 4
    clock.advance(1.0)
    one.hanging.hang("get_into")
    probe, _ = one.get(Deadline.after(100.0, clock))
    one.hanging.wait_inside(2)
    one.hanging.dead = False
    one.hanging.release("put")
    assert old.wait() == [Status.STORED] * 4
    assert one.put(Deadline.after(1.0, clock)).end is CallEnd.LEFT_ALONE  # that one proved nothing
    one.hanging.release()
    assert probe.wait() == [Status.HIT] * 4
    assert one.put(Deadline.after(1.0, clock)).wait() == [Status.EXISTS] * 4


def test_an_empty_store_that_is_back_is_found_out(bench: Callable[..., Bench]) -> None:
    """A restarted pool holds nothing, and who looks first is told so: that proves nothing, and locks nobody out."""
    clock = FakeClock()
    one = bench(clock=clock, breaker_failures=1, breaker_pause_s=5.0)
    one.hanging.dead = True
    one.put(Deadline.after(1.0, clock)).wait()
    clock.advance(5.0)
    one.hanging.dead = False
    assert one.calls.contains(NAMES, deadline=Deadline.after(1.0, clock)).wait() == [False] * 4
    assert one.metrics.value("breaker_state", tier="pool") == 2
    assert one.put(Deadline.after(1.0, clock)).wait() == [Status.STORED] * 4
    assert one.metrics.value("breaker_state", tier="pool") == 0


def test_looks_that_find_nothing_do_not_hide_failures(bench: Callable[..., Bench]) -> None:
    one = bench(breaker_failures=2, breaker_pause_s=1000.0)
    one.fail()
    assert one.calls.contains(NAMES, deadline=soon()).wait() == [False] * 4
    one.fail()
    assert not one.calls.ready


def test_misses_and_full_stores_are_answers(bench: Callable[..., Bench]) -> None:
    one = bench(breaker_failures=2, breaker_pause_s=1000.0)
    orphan = [sample_page(5, 3)]
    for _ in range(5):
        assert one.get()[0].wait() == [Status.MISS] * 4
        assert one.put(pages=orphan).wait() == [Status.NO_PARENT]
        assert one.calls.delete(NAMES, deadline=soon()).wait() == [Status.ABSENT] * 4
    for _ in range(3):
        one.fail()
        one.get()[0].wait()  # a success between failures
    assert one.calls.ready


# --- the end ----------------------------------------------------------------------------------------------------------


def test_close_answers_who_waits_and_says_what_is_stuck(
    bench: Callable[..., Bench], caplog: pytest.LogCaptureFixture
) -> None:
    one = bench(num_threads=1, max_extra_threads=0)
    one.hanging.hang("put")
    stuck, queued = one.put(Deadline.after(0.1)), one.put()
    one.hanging.wait_inside()
    assert not one.calls.close(0.05)
    assert "not back from a call of pool" in caplog.text
    assert (queued.wait(), queued.end) == ([Status.FAILED] * 4, CallEnd.CLOSED)
    assert one.returned == Counter([1])
    assert stuck.wait() == [Status.LATE] * 4
    assert not one.calls.close(0.0)
    refused = one.put()
    assert (refused.wait(), refused.end) == ([Status.FAILED] * 4, CallEnd.CLOSED)
    assert not one.calls.ready
    with pytest.raises(ResourceClosed):
        BoundedStore(one.calls).contains(NAMES, deadline=soon())
    one.hanging.release()
    assert one.calls.close()
    assert one.returned == Counter([0, 1, 2])


def test_a_bounded_store_never_touches_a_buffer_after_it_answered(bench: Callable[..., Bench]) -> None:
    one = bench(breaker_failures=100)
    store = BoundedStore(one.calls)
    frames = [memoryview(bytearray(page.frame)) for page in PAGES]
    one.hanging.hang("put")
    assert store.put(list(zip(NAMES, frames, strict=True)), deadline=Deadline.after(BEGUN_S)) == [Status.LATE] * 4
    for frame in frames:
        frame[:] = bytes(len(frame))  # the caller's again
    one.hanging.release()
    wait_until(lambda: one.calls.num_stuck == 0)
    buffers = [page.buffer() for page in PAGES]
    before = [bytes(buffer) for buffer in buffers]
    one.hanging.hang("get_into")
    wanted = list(zip(NAMES, buffers, strict=True))
    assert store.get_into(wanted, deadline=Deadline.after(BEGUN_S)) == [Status.LATE] * 4
    one.hanging.release()
    wait_until(lambda: one.calls.num_stuck == 0)
    assert buffers == before
    assert store.get_into(wanted, deadline=soon()) == [Status.HIT] * 4
    assert buffers == [page.frame for page in PAGES]


@given(st.data())
@settings(max_examples=25)
def test_whatever_happens_every_call_is_answered_and_every_page_comes_back(data: st.DataObject) -> None:
    one = Bench(
        num_threads=data.draw(st.integers(1, 3)),
        max_extra_threads=data.draw(st.integers(0, 2)),
        breaker_failures=data.draw(st.integers(1, 4)),
        breaker_pause_s=0.0,
        breaker_max_pause_s=0.0,
    )
    pending: list[Pending[Any]] = []
    for step in data.draw(
        st.lists(st.sampled_from(("put", "get", "wait", "hang", "release", "die", "live")), max_size=15)
    ):
        if step == "put":
            pending.append(one.put(Deadline.after(0.004)))
        elif step == "get":
            pending.append(one.get(Deadline.after(0.004))[0])
        elif step == "wait" and pending:
            pending[-1].wait()
        elif step == "hang":
            one.hanging.hang()
        elif step == "release":
            one.hanging.release()
        elif step in ("die", "live"):
            one.hanging.dead = step == "die"
    for call in pending:
        answers = call.wait()
        assert len(answers) == 4
        assert call.end is not None
        late = [answer.value == "late" for answer in answers]
        assert all(late) or call.end is not CallEnd.LATE
        assert all(answer.value == "failed" for answer in answers) or call.end in (CallEnd.ANSWERED, CallEnd.LATE)
    assert _num_threads() <= one.calls._max_threads
    one.finish()
