"""Compute meets load: where they meet, what is loaded and computed, and what becomes of rows that do not come."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from brain_kit import ask, fill_store, finish, jobs, the, tier, total, world
from headwater.cache.placement import ComputeCost
from headwater.cache.split import best_split, split_pays
from headwater.core import events as ev
from headwater.core.results import Reason
from headwater.index.slots import SlotState
from machines.brain_world import Errand, World, WorldRequest
from machines.meet_machine import MeetMachine

PROMPT = "0" * 12
seconds = st.floats(0, 10, allow_nan=False)


def test_anything_may_happen_in_a_meeting() -> None:
    """Default: 60 examples of up to 30 steps. Nightly: 600 of up to 60."""
    nightly = settings().max_examples > 100
    MeetMachine.num_blocks.clear()
    run_state_machine_as_test(
        MeetMachine,
        settings=settings(max_examples=600 if nightly else 60, stateful_step_count=60 if nightly else 30),
    )
    assert min(MeetMachine.num_blocks[how] for how in ("meetings", "loaded", "computed")) > 50, MeetMachine.num_blocks
    assert MeetMachine.num_blocks["late meetings"] > 5, "loads that were late met too rarely"


@given(base_s=seconds, slope_s=seconds, head_s=seconds, block_s=seconds, lag_s=seconds, start=st.integers(0, 9),
       num=st.integers(0, 40))  # fmt: skip
def test_the_split_is_the_best_there_is(
    base_s: float, slope_s: float, head_s: float, block_s: float, lag_s: float, start: int, num: int
) -> None:
    cost, end = ComputeCost(base_s, slope_s), start + num

    def load_s(at: int) -> float:
        return lag_s + block_s * (end - at) if at < end else 0.0

    def both_s(at: int) -> float:
        return max(head_s + cost.row_s(start, at) if at > start else 0.0, load_s(at))

    found = best_split(cost, load_s, start, end, head_s=head_s)
    assert start <= found.at <= end
    assert found.seconds == both_s(found.at)
    assert math.isclose(found.seconds, min(map(both_s, range(start, end + 1))), rel_tol=1e-12)
    alone_s = min(load_s(start), head_s + cost.row_s(start, end)) if num else 0.0
    assert found.seconds <= alone_s or not num
    if split_pays(cost, load_s, start, end, head_s=head_s):
        assert found.seconds <= 0.8 * alone_s
        assert min(found.at - start, end - found.at) >= 2


# --- one by one -------------------------------------------------------------------------------------------------------


def slow_world(seconds: float = 1.0) -> World:
    """A store that has a prompt of twelve blocks, and gives one in so many seconds; computing one takes a second."""
    here = world(tier(), num_slots=40, compute_base_s=1.0)
    fill_store(here, "host", "9")
    here.want(ask(here, "first", "9"), 1)
    here.end(the(here, ev.Load), seconds=seconds)
    here.leave(here.guests["first"])
    finish(here)
    fill_store(here, "host", PROMPT)
    return here


def begin(here: World, *, meet: bool = True, path: str = PROMPT) -> WorldRequest:
    guest = ask(here, "guest", path)
    assert here.want(guest, len(path) + 1, meet=meet) is not None
    here.check()
    return guest


def rows(here: World) -> list[tuple[int, int]]:
    """Loads under way: their blocks."""
    return [(errand.start, errand.start + len(errand.order.keys)) for errand in jobs(here, ev.Load)]


def test_it_is_loaded_from_its_end_and_computed_from_its_front() -> None:
    here = slow_world()
    guest = begin(here)
    assert guest.ready, "it need not wait"
    assert rows(here) == [(10, 12)]
    here.end(the(here, ev.Load), seconds=2.0)
    assert [end for _, end in rows(here)] == [10]
    assert guest.num_done == 0, "what has come waits for what is before it"
    while guest.num_done < 12:
        here.fill(guest, 2)  # two blocks are computed while two are loaded
        here.check()
        finish(here, ev.Save)
        for errand in jobs(here, ev.Load)[:1]:
            here.end(errand, seconds=1.0 * len(errand.order.keys))
        here.check()
    here.leave(guest)
    bill = here.bills[-1]
    hits, misses = dict(bill.hit_tokens), dict(bill.miss_tokens)
    assert 0 < hits["host"] < 48
    assert misses == {"computed_meanwhile": 48 - hits["host"]}
    assert total(here, "split_blocks_total", how="loaded") * 4 == hits["host"]
    assert total(here, "split_blocks_total", how="computed") * 4 == misses["computed_meanwhile"]
    assert bill.saved_s == hits["host"] / 4, "each of them would have taken a second"
    here.close()


@pytest.mark.parametrize(("seconds", "num_loads"), [(0.01, 1), (50.0, 0)])
def test_where_one_of_both_is_far_better_nothing_is_split(seconds: float, num_loads: int) -> None:
    here = slow_world(seconds=seconds)
    guest = begin(here)
    assert not here.meets(guest)
    assert rows(here) == [(0, 12)] * num_loads
    here.close()


def test_who_cannot_compute_meanwhile_loads_all_or_nothing() -> None:
    here = slow_world(seconds=0.5)
    assert rows(here) == []
    begin(here, meet=False)
    assert rows(here) == [(0, 12)]
    here.close()


def test_what_is_promised_is_loaded_whole() -> None:
    here = slow_world()
    guest = ask(here, "guest", PROMPT)
    here.want(guest, 12, promised="host", meet=True)
    assert rows(here) == [(0, 12)]
    here.close()


def fast_then_slow_world(slow: str, seconds: float) -> World:
    """The same prompt; its first four blocks are in a fast store before the slow one."""
    here = world(tier("host"), tier(slow), num_slots=40, compute_base_s=1.0)
    for name, path, took_s in (("host", "8", 0.01), (slow, "9", seconds)):
        fill_store(here, name, path)
        here.want(ask(here, name, path), 1)
        here.end(the(here, ev.Load), seconds=took_s)
        here.leave(here.guests[name])
        finish(here)
    fill_store(here, slow, PROMPT)
    fill_store(here, "host", "0000")
    return here


def test_what_a_fast_store_has_comes_first_and_the_rest_meets() -> None:
    here = fast_then_slow_world("disk", 1.0)
    guest = begin(here)
    assert sorted(rows(here)) == [(0, 4), (10, 12)]
    here.end(jobs(here, ev.Load, store="disk")[0], seconds=2.0)
    assert (guest.ready, guest.num_done, here.meets(guest)) == (False, 0, True)
    finish(here, ev.Load, store="host")
    assert (guest.ready, guest.num_done, here.meets(guest)) == (True, 4, True)
    here.close()


def is_cancelled(errand: Errand) -> bool:
    """A function, because what changes it is not seen by the type checker."""
    return errand.cancelled


def test_a_row_on_its_way_is_waited_for_as_long_as_computing_it_takes() -> None:
    here = slow_world()
    guest = begin(here)
    here.end(the(here, ev.Load), seconds=2.0)
    row = the(here, ev.Load)
    while guest.num_done < row.start:
        here.fill(guest, 2)
    assert here.claim(guest, guest.num_done + 1) == guest.num_done
    assert not is_cancelled(row)
    here.wait(0.5)
    here.claim(guest, guest.num_done + 1)
    assert not is_cancelled(row)
    here.wait(10.0)
    here.claim(guest, guest.num_done + 1)
    assert is_cancelled(row), "it was waited for too long"
    assert here.claim(guest, 12) == guest.num_done, "its slots may still be written to"
    here.fail(row, Reason.CANCELLED)
    assert here.claim(guest, 12) == 10, "now they may be used, up to the row behind"
    here.fill(guest, 10 - guest.num_done)
    assert guest.num_done == 12, "and that one counts"
    here.leave(guest)
    assert dict(here.bills[-1].hit_tokens) == {"host": 8}
    assert dict(here.bills[-1].miss_tokens) == {"computed_meanwhile": 40}
    assert here.bills[-1].waited_s >= 10.5
    here.close()


@pytest.mark.parametrize(("bad", "reason"), [("corrupt", "corrupt"), ("late", "too_late"), ("failed", "failed")])
def test_a_row_that_came_in_part_is_used_in_part(bad: str, reason: str) -> None:
    here = slow_world()
    guest = begin(here)
    here.end(the(here, ev.Load), ["hit", bad], seconds=2.0)
    assert bool(rows(here)) == (bad == "corrupt"), "a store that fails is not asked for more"
    for errand in jobs(here, ev.Load):
        here.fail(errand, Reason.CANCELLED)
    for _ in range(20):
        if guest.num_done < 12:
            here.fill(guest, 12 - guest.num_done)
            here.check()
        finish(here, ev.Load)
    here.leave(guest)
    assert dict(here.bills[-1].miss_tokens)[reason] == 4
    assert dict(here.bills[-1].hit_tokens)["host"] >= 4
    here.close()


def test_what_was_not_claimed_cannot_be_filled() -> None:
    here = slow_world()
    guest = begin(here)
    here.refuse(ev.Filled(now_s=here.now_s, request="guest", keys=tuple(guest.keys)))
    here.close()


def test_slots_of_a_row_are_nobodys_until_it_has_ended() -> None:
    here = slow_world()
    guest = begin(here)
    row = the(here, ev.Load)
    here.leave(guest)
    assert row.cancelled
    assert here.brain.slots.counts()[SlotState.QUARANTINED] == 2
    here.fail(row, Reason.CANCELLED)
    assert here.brain.slots.counts()[SlotState.QUARANTINED] == 0
    here.close()


def test_a_row_that_is_stuck_sends_its_request_away() -> None:
    here = slow_world()
    guest = begin(here)
    here.tell(ev.Stuck(now_s=here.now_s, job=the(here, ev.Load).order.job))
    assert here.brain.requests["guest"].stuck
    here.leave(guest)
    here.close()


def test_what_was_to_be_loaded_whole_and_is_late_is_split_after_all() -> None:
    here = slow_world(0.1)
    guest = begin(here)
    assert rows(here) == [(0, 12)], "ten times as fast as computing: loaded whole"
    late = the(here, ev.Load)
    assert late.order.deadline_s == here.now_s + 5.0  # of a timeout of five; computing would take twelve
    here.wait(5.0)
    here.end(late, ["hit"] * 2 + ["late"] * 10, seconds=5.0)
    here.check()
    assert here.meets(guest)
    assert rows(here)[0][1] == 12, "what is left comes from its end"
    assert guest.num_done == 2


@pytest.mark.fault("X21")
@pytest.mark.parametrize("good", [0, 2])
def test_what_is_late_before_a_meeting_is_computed_and_the_meeting_goes_on(good: int) -> None:
    """X21: another began over it, and loaded the same blocks a second time; the first row was nobody's from then on."""
    here = fast_then_slow_world("disk", 1.0)
    guest = begin(here)
    assert sorted(rows(here)) == [(0, 4), (10, 12)]
    here.wait(5.0)
    here.end(the(here, ev.Load, store="host"), ["hit"] * good + ["late"] * (4 - good), seconds=5.0)
    here.check()
    assert rows(here) == [(10, 12)], "the row on its way is still its own"
    assert guest.ready
    for errand in jobs(here, ev.Load):
        here.end(errand, seconds=2.0)
    while guest.num_done < 12:
        here.fill(guest, 2)
        here.check()
        for errand in jobs(here, ev.Load):
            here.end(errand, seconds=1.0)
    here.leave(guest)
    assert dict(here.bills[-1].miss_tokens)["too_late"] == 4 * (4 - good)
    finish(here)
    here.close()


@pytest.mark.fault("X22")
def test_what_is_late_is_split_as_far_as_it_was_to_be_loaded() -> None:
    """X22: behind that a request computes while its load arrives layer by layer, into the slots of a row."""
    here = fast_then_slow_world("disk", 5.0)
    guest = begin(here)
    assert rows(here) == [(0, 4)], "what lies behind does not pay"
    here.wait(5.0)
    here.end(the(here, ev.Load), ["hit"] + ["late"] * 3, seconds=5.0)
    here.check()
    assert here.meets(guest)
    assert all(end <= 4 for _, end in rows(here))
    finish(here, ev.Load)
    here.fill(guest, 12)
    here.leave(guest)
    finish(here)
    here.close()


def test_what_was_given_up_is_not_split() -> None:
    here = slow_world(0.1)
    guest = begin(here)
    late = the(here, ev.Load)
    here.give_up(guest)
    here.end(late, ["hit"] * 2 + ["cancelled"] * 10)
    here.check()
    assert not here.meets(guest)
    assert not rows(here)
    assert guest.num_done == 2
    here.close()


def test_what_is_late_is_not_split_where_nobody_knows_what_computing_takes() -> None:
    """Who comes to a row waits for it as long as computing it takes: for ever, or never."""
    here = world(tier(), num_slots=40)
    fill_store(here, "host", PROMPT)
    guest = begin(here)
    here.wait(5.0)
    here.end(the(here, ev.Load), ["hit"] * 2 + ["late"] * 10, seconds=5.0)
    here.check()
    assert not here.meets(guest)
    assert not rows(here)
    here.close()


def test_a_crowd_of_first_loads_is_waited_for_as_long_as_the_tier_may_take() -> None:
    """Nobody knows how fast it is, so nothing was expected that it could fall short of."""
    here = world(tier(), num_slots=40, compute_base_s=0.01)
    fill_store(here, "host", PROMPT)
    begin(here)
    assert the(here, ev.Load).order.deadline_s == here.now_s + 5.0
    here.close()
