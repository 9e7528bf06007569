"""Compute meets load: where they meet, what is loaded and computed, and what becomes of rows that do not come."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from headwater.cache.placement import ComputeCost
from headwater.cache.split import best_split, split_pays
from machines.meet_machine import MeetMachine

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
