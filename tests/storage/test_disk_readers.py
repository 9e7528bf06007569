"""Readers: every item once, nobody inside when a call returns; who hangs holds up nobody else; who waits is first."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.storage import readers as module
from headwater.storage.base import Deadline
from headwater.storage.readers import MOST_READERS, Readers, ReadStuck, default_readers
from worker_kit import PATIENCE_S, Gate, wait_until


def own_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "headwater reads"]


@pytest.fixture
def make() -> Iterator[Callable[[int], Readers]]:
    """Makes readers, and closes them."""
    made: list[Readers] = []

    def make(num_readers: int) -> Readers:
        made.append(Readers(num_readers))
        return made[-1]

    yield make
    assert all(one.close(PATIENCE_S) for one in made)
    assert not own_threads()


@given(st.integers(1, 6), st.lists(st.tuples(st.integers(0, 40), st.booleans(), st.integers(1, 8)), max_size=4))
def test_every_item_is_done_once_and_in_the_thread_of_who_asks_or_a_helper(
    num_readers: int, calls: list[tuple[int, bool, int]]
) -> None:
    readers = Readers(num_readers)
    try:
        for num_items, hurry, most in calls:
            done: list[tuple[int, int]] = []
            readers.run(lambda i: done.append((i, threading.get_ident())), num_items, most=most, hurry=hurry)  # noqa: B023
            assert sorted(i for i, _ in done) == list(range(num_items))
            assert len({thread for _, thread in done}) <= min(num_readers, most, max(1, num_items))
    finally:
        assert readers.close(PATIENCE_S)
    assert not own_threads()


def test_several_calls_share_the_helpers(make: Callable[[int], Readers]) -> None:
    readers = make(3)
    done: list[list[int]] = [[] for _ in range(8)]
    with ThreadPoolExecutor(8) as callers:
        for _ in callers.map(lambda n: readers.run(done[n].append, 50, hurry=n % 2 == 0), range(8)):
            pass
    assert [sorted(one) for one in done] == [list(range(50))] * 8
    assert len(own_threads()) <= 2


def test_no_thread_before_it_is_needed_and_none_that_has_nothing_to_do(
    make: Callable[[int], Readers], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_IDLE_S", 0.05)
    readers = make(4)
    readers.run(lambda _: None, 1)
    readers.run(lambda _: None, 5, most=1)
    assert not own_threads()
    come = threading.Barrier(3)

    def meet(_: int) -> None:  # so three are at it at once
        come.wait(PATIENCE_S)

    readers.run(meet, 3)
    wait_until(lambda: not own_threads())
    readers.run(meet, 3)


def test_a_call_returns_when_nobody_is_at_an_item_of_it_any_more(make: Callable[[int], Readers]) -> None:
    """Rule 3, also for who was interrupted: what a helper writes to is not given back before."""
    readers, gate = make(2), Gate()
    gate.shut()
    helped = threading.Event()

    def work(_: int) -> None:
        if threading.current_thread().name == "headwater reads":
            helped.set()
            gate()
        else:
            assert helped.wait(PATIENCE_S)
            raise KeyboardInterrupt

    over: list[type[BaseException]] = []

    def call() -> None:
        try:
            readers.run(work, 100)
        except BaseException as error:  # noqa: BLE001
            over.append(type(error))

    caller = threading.Thread(target=call)
    caller.start()
    gate.wait_for_arrival()
    caller.join(0.1)
    assert caller.is_alive()
    assert not over
    gate.open()
    caller.join(PATIENCE_S)
    assert over == [KeyboardInterrupt]


def test_what_a_helper_raises_is_raised_and_nothing_is_begun_after_it(
    make: Callable[[int], Readers], monkeypatch: pytest.MonkeyPatch
) -> None:
    readers = make(3)
    begun: list[int] = []
    noted = threading.Event()  # the call knows of the error

    def note(turn: Any, error: BaseException | None) -> None:
        turn.__dict__["noted"] = error
        if error is not None:
            noted.set()

    monkeypatch.setattr(module._Round, "error", property(lambda turn: turn.__dict__["noted"], note), raising=False)

    def work(i: int) -> None:
        begun.append(i)
        if i == 4:
            raise OSError("a bad sector")
        if i > 4:
            assert noted.wait(PATIENCE_S)

    with pytest.raises(OSError, match="a bad sector"):
        readers.run(work, 1000)
    assert len(begun) <= 7  # those up to the bad one, and one that each of the two others was at
    done: list[int] = []
    readers.run(done.append, 10)
    assert sorted(done) == list(range(10))


def test_a_helper_that_hangs_holds_up_its_own_call_only(make: Callable[[int], Readers]) -> None:
    readers, gate = make(2), Gate()
    gate.shut()
    caller = threading.Thread(target=readers.run, args=(lambda _: gate(), 2))
    caller.start()
    for _ in range(2):
        gate.wait_for_arrival()
    done: list[int] = []
    readers.run(done.append, 20)
    assert done == list(range(20)), "alone, so in order"
    assert caller.is_alive()
    gate.open()
    caller.join(PATIENCE_S)
    assert not caller.is_alive()


def test_a_helper_leaves_a_call_that_nobody_waits_for(make: Callable[[int], Readers]) -> None:
    readers, held, helper = make(2), Gate(), Gate()
    held.shut()
    helper.shut()
    order: list[str] = []

    def unhurried(i: int) -> None:
        if threading.current_thread().name == "headwater reads":
            helper()
            order.append(f"slow {i}")
        else:
            held()

    caller = threading.Thread(target=readers.run, args=(unhurried, 50), kwargs={"hurry": False})
    caller.start()
    held.wait_for_arrival()
    helper.wait_for_arrival()
    come = threading.Barrier(2)

    def hurried(i: int) -> None:
        order.append(f"fast {i}")
        come.wait(PATIENCE_S)

    waited = threading.Thread(target=readers.run, args=(hurried, 2))
    waited.start()
    wait_until(lambda: "fast 0" in order)
    helper.open()
    waited.join(PATIENCE_S)
    assert not waited.is_alive()
    fast = order.index("fast 1")
    assert sum(one.startswith("slow") for one in order[:fast]) <= 1, "the item it was at, and no other"
    held.open()
    caller.join(PATIENCE_S)
    assert not caller.is_alive()


def test_closing_says_who_is_not_back(make: Callable[[int], Readers], caplog: pytest.LogCaptureFixture) -> None:
    readers, gate = make(2), Gate()
    gate.shut()
    done: list[int] = []

    def work(i: int) -> None:
        if threading.current_thread().name == "headwater reads":
            gate()
        done.append(i)
        time.sleep(0)

    caller = threading.Thread(target=readers.run, args=(work, 300))
    caller.start()
    gate.wait_for_arrival()
    assert not readers.close(0.01)
    assert "not back from a read" in caplog.text
    gate.open()
    caller.join(PATIENCE_S)
    assert sorted(done) == list(range(300))
    assert readers.close(PATIENCE_S)
    readers.run(done.append, 3)
    assert done[-3:] == [0, 1, 2]
    assert not own_threads()


def test_how_many_there_are_unless_configured() -> None:
    assert 4 <= default_readers() <= MOST_READERS


# --- a helper that hangs, and a deadline ------------------------------------------------------------------------------


def test_a_call_ends_a_little_after_its_deadline_though_a_helper_hangs(
    make: Callable[[int], Readers], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_GRACE_S", 0.01)
    readers, gate, caller = make(2), Gate(), threading.current_thread()
    gate.shut()

    def work(_: int) -> None:
        if threading.current_thread() is caller:
            gate.wait_for_arrival()  # the other item is the helper's
        else:
            gate()

    with pytest.raises(ReadStuck) as raised:
        readers.run(work, 2, deadline=Deadline.after(0.0))
    stuck, told = raised.value, threading.Event()
    stuck.when_over(told.set)
    assert not stuck.over.is_set()
    done: list[int] = []
    readers.run(done.append, 20, deadline=Deadline.after(PATIENCE_S))
    assert done == list(range(20)), "alone, so in order"
    assert not told.is_set()
    gate.open()
    assert stuck.over.wait(PATIENCE_S)
    assert told.wait(PATIENCE_S)
    at_once = threading.Event()
    stuck.when_over(at_once.set)
    assert at_once.is_set()


def test_an_interrupt_between_two_items_does_not_hide_that_a_read_hangs(
    make: Callable[[int], Readers], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_GRACE_S", 0.1)
    readers, gate, inside = make(2), threading.Event(), threading.Event()
    claim, caller = readers._claim, threading.get_ident()
    num_claimed = 0

    def interrupted(turn: Any, *, helps: bool) -> int | None:
        nonlocal num_claimed
        if not helps:
            num_claimed += 1
            if num_claimed == 2:
                raise KeyboardInterrupt
        return claim(turn, helps=helps)

    def work(_: int) -> None:
        if threading.get_ident() == caller:
            assert inside.wait(PATIENCE_S)
        else:
            inside.set()
            assert gate.wait(PATIENCE_S)

    monkeypatch.setattr(readers, "_claim", interrupted)
    with pytest.raises(ReadStuck) as raised:
        readers.run(work, 3, deadline=Deadline.after(0.0))
    assert isinstance(raised.value.__cause__, KeyboardInterrupt)
    gate.set()
    assert raised.value.over.wait(PATIENCE_S)


def test_who_waits_for_a_hanging_read_may_raise(caplog: pytest.LogCaptureFixture) -> None:
    stuck, told = ReadStuck(), threading.Event()

    def fail() -> None:
        raise RuntimeError("boom")

    stuck.when_over(fail)
    stuck.when_over(told.set)
    stuck.end()
    assert told.is_set()
    assert "boom" in caplog.text
