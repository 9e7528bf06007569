"""What loads take is learned from few samples, one bad one changes nothing, and a slow store is tried in small."""

import random
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from brain_kit import ask, fill_store, jobs, the, tier, total, world
from headwater.cache.pace import LoadPace
from headwater.cache.placement import ComputeCost, TierState, how_much_to_load, load_pays
from headwater.config.cache import TierConfig
from headwater.core import events as ev

BLOCK_BYTES = 1 << 20
SIZES = st.integers(1, 1 << 12)
PACES = st.floats(1e-6, 1e2)
FACTORS = st.floats(1e-2, 1e2)


def store(samples: list[tuple[int, float]], now_s: float = 0.0) -> TierState:
    """A store whose loads moved so many blocks in so many seconds."""
    found = TierState(TierConfig(name="disk"), 1)
    for num_blocks, seconds in samples:
        found.loaded(num_blocks * BLOCK_BYTES, seconds, 0.0, now_s)
    return found


def decisions(one: TierState, cost: ComputeCost, num_blocks: int, now_s: float = 0.0) -> tuple[bool, bool]:
    """Whether loading pays, and whether all is loaded."""
    row: dict[str, Any] = {"start": 0, "end": num_blocks, "block_bytes": BLOCK_BYTES, "now_s": now_s}
    return load_pays(one, cost, **row), how_much_to_load(one, cost, **row) == num_blocks


# --- what is learned --------------------------------------------------------------------------------------------------


@given(size=SIZES, pace=PACES, num=st.integers(3, 20), data=st.data(), factor=FACTORS, asked=SIZES, compute_s=PACES)
def test_one_bad_sample_changes_no_decision_where_the_others_agree(
    size: int, pace: float, num: int, data: st.DataObject, factor: float, asked: int, compute_s: float
) -> None:
    samples = [(size, pace * size)] * num
    at = data.draw(st.integers(0, num - 1))
    spoiled = [*samples[:at], (size, pace * size * factor), *samples[at + 1 :]]
    cost = ComputeCost(compute_s, 0.0)
    assert decisions(store(spoiled), cost, asked) == decisions(store(samples), cost, asked)


@given(
    sizes=st.tuples(st.integers(1, 50), st.integers(100, 4000)),
    start_s=st.floats(1e-4, 1.0),
    pace=st.floats(1e-5, 1e-1),
    num=st.integers(8, 16),
    data=st.data(),
    factor=FACTORS,
    asked=SIZES,
    compute_s=PACES,
)
def test_nor_where_they_agree_about_the_start_of_a_load(
    sizes: tuple[int, int],
    start_s: float,
    pace: float,
    num: int,
    data: st.DataObject,
    factor: float,
    asked: int,
    compute_s: float,
) -> None:
    samples = [(sizes[at % 2], start_s + pace * sizes[at % 2]) for at in range(num)]
    at = data.draw(st.integers(0, num - 1))
    size, seconds = samples[at]
    spoiled = store([*samples[:at], (size, seconds * factor), *samples[at + 1 :]])
    right = store(samples)
    true_s = start_s + pace * asked
    floor_s = 0.2 * (start_s + pace * sizes[0]) / sizes[0] * asked  # of a small load that is hardly more than a start
    if floor_s <= pace * asked:
        assert right.load_s(asked * BLOCK_BYTES, 0.0) == pytest.approx(true_s, rel=1e-6)
    for one in (right, spoiled):
        assert one.worth in (0.75, 0.95) or 0.75 < one.worth < 0.95
    edge = abs(right.load_s(asked * BLOCK_BYTES, 0.0) / (right.worth * asked * compute_s) - 1)
    if edge > 1e-6 and floor_s <= pace * asked:
        cost = ComputeCost(compute_s, 0.0)
        assert decisions(spoiled, cost, asked) == decisions(right, cost, asked)


@given(size=SIZES, before=PACES, after=PACES, num=st.integers(1, 20), asked=SIZES)
def test_a_step_is_believed_after_two_samples(size: int, before: float, after: float, num: int, asked: int) -> None:
    one = store([(size, before * size)] * num + [(size, after * size)] * 2)
    expected = min(before, after) if num == 0 else after
    assert one.load_s(asked * BLOCK_BYTES, 0.0) == pytest.approx(expected * asked)


@given(share=st.floats(0.01, 3.9), before=st.floats(1e-3, 1e-1), factor=st.floats(0.5, 20.0), seed=st.integers(0, 99))
def test_a_step_is_found_by_loads_of_other_sizes(share: float, before: float, factor: float, seed: int) -> None:
    """Sizes go up and down; the start stays what it is, and bytes get slower or faster."""
    start_s = share * 100 * before * min(1.0, factor)  # four times what the bytes of the smallest take, at most
    dice = random.Random(seed)
    sizes = [dice.choice([100, 1000, 4000][at % 2 :: 2]) for at in range(14)]
    one = store([(size, start_s + before * size) for size in sizes])
    for size in sizes[:2]:
        one.loaded(size * BLOCK_BYTES, start_s + before * factor * size, 0.0, 0.0)
    assert one.load_s(2000 * BLOCK_BYTES, 0.0) == pytest.approx(start_s + before * factor * 2000, rel=0.1)


def test_what_is_no_measurement_is_not_learned() -> None:
    pace = LoadPace()
    for nothing in ((0, 1.0), (-5, 1.0), (10, -1.0), (10, float("nan")), (10, float("inf"))):
        pace.measured(*nothing, 0.0)
    assert (pace.facts()[0], pace.recall(100), pace.level, pace.start_s, pace.spread) == (None, 0.0, 0.0, 0.0, None)
    assert (pace.newest, pace.bytes_in(1.0)) == (1.0, float("inf"))


def test_one_long_lag_does_not_count_for_much() -> None:
    one = store([(1, 1.0)])
    for lag_s in (0.01, 0.01, 0.01, 60.0):
        one.loaded(BLOCK_BYTES, 1.0, lag_s, 0.0)
    assert one.lag_s is not None
    assert one.lag_s < 0.02


def test_loads_that_are_alike_may_take_nearly_as_long_as_computing() -> None:
    cost = ComputeCost(1.0, 0.0)
    assert not load_pays(store([(10, 8.0)] * 5), cost, start=0, end=10, block_bytes=BLOCK_BYTES, now_s=0.0)
    assert load_pays(store([(10, 8.0)] * 6), cost, start=0, end=10, block_bytes=BLOCK_BYTES, now_s=0.0)
    unlike = [(10, 8.0), (10, 6.0)] * 3
    assert store(unlike).worth == pytest.approx(0.75)


# --- trials -----------------------------------------------------------------------------------------------------------


@given(
    num_blocks=st.integers(2, 2000),
    pace=st.floats(1e-4, 10.0),
    cost_s=st.floats(1e-5, 1e-2),
    age_s=st.floats(0.0, 1e4),
    size=st.integers(1, 500),
)
def test_a_trial_is_small_and_rare(num_blocks: int, pace: float, cost_s: float, age_s: float, size: int) -> None:
    one, cost = store([(size, pace * size)] * 3), ComputeCost(cost_s, 0.0)
    facts = one.loading.facts()
    row: dict[str, Any] = {"start": 0, "end": num_blocks, "block_bytes": BLOCK_BYTES, "now_s": age_s}
    found = how_much_to_load(one, cost, **row)
    assert one.loading.facts() == facts
    if one.recall_s(num_blocks * BLOCK_BYTES) <= one.worth * cost.row_s(0, num_blocks):
        assert found == num_blocks
        return
    assert 0 <= found < num_blocks
    assert found == 0 or age_s >= 5.0
    assert found > 0 or age_s < 30.0
    budget_s = min(0.05, 0.05 * cost.row_s(0, num_blocks))
    assert found <= 1 or one.recall_s(found * BLOCK_BYTES) <= (0.05 if found == 2 else budget_s) * (1 + 1e-9)
    one.queued_load_bytes = 1
    assert how_much_to_load(one, cost, **row) == 0, "what a load under way takes will be known"


@given(
    every_s=st.floats(0.05, 2.0),
    slow=st.floats(2.0, 1000.0),
    fast=st.floats(0.01, 0.5),
    num_blocks=st.integers(16, 500),
    slow_for_s=st.floats(0.0, 200.0),
    start_s=st.floats(0.0, 0.005),
)
@example(every_s=2.0, slow=137.0, fast=0.375, num_blocks=52, slow_for_s=0.0, start_s=0.002)
@example(every_s=2.0, slow=924.0, fast=0.5, num_blocks=500, slow_for_s=0.0, start_s=0.005)
def test_a_store_that_became_fast_is_used_again_within_a_minute(
    every_s: float, slow: float, fast: float, num_blocks: int, slow_for_s: float, start_s: float
) -> None:
    cost, block_s = ComputeCost(0.002, 0.0), 0.002
    one = store([(num_blocks, start_s + slow * block_s * num_blocks)] * 2)
    now_s, slow_s, found_s = 0.0, 0.0, None
    while now_s < slow_for_s + 60.0 and found_s is None:
        row: dict[str, Any] = {"start": 0, "end": num_blocks, "block_bytes": BLOCK_BYTES, "now_s": now_s}
        num = how_much_to_load(one, cost, **row)
        is_fast = now_s >= slow_for_s
        seconds = start_s + num * block_s * (fast if is_fast else slow) if num else 0.0
        if num == num_blocks:
            assert is_fast, "a whole load from a store that is slow"
            found_s = now_s
        elif not is_fast:
            slow_s += seconds
        now_s += seconds + cost.row_s(num, num_blocks)
        if num:
            one.loaded(num * BLOCK_BYTES, seconds, 0.0, now_s)
        now_s += every_s
    assert found_s is not None, "nobody found out that it is fast"
    assert slow_s <= 0.1 * (slow_for_s + 30.0) + slow * block_s


# --- in the brain -----------------------------------------------------------------------------------------------------


def test_a_slow_store_gets_a_small_part_of_a_load_now_and_then() -> None:
    here = world(tier(), num_slots=64, compute_base_s=1.0)
    path = "0123456701234567"
    fill_store(here, "host", path)
    first = ask(here, "first", path[:2])
    here.want(first, 2)
    here.end(the(here, ev.Load), seconds=10.0)  # five seconds a block, where computing takes one
    here.leave(first)
    here.now_s += 31.0
    second = ask(here, "second", path)
    here.want(second, len(path))
    load = the(here, ev.Load)
    assert len(load.order.keys) == 1, "a whole load from a store that was slow"
    here.end(load, seconds=0.1)
    here.fill(second, len(path) - 3)
    assert total(here, "trial_loads_total", tier="host") == 1
    here.leave(second)
    assert here.bills[-1].miss_tokens == (("not_worth_it", 4 * 13),)
    here.close()


def test_two_trials_that_were_fast_are_believed() -> None:
    here = world(tier(), num_slots=256, compute_base_s=1.0)
    paths = ["".join(str((at + shift) % 8) for at in range(16)) for shift in range(5)]
    for path in paths:
        fill_store(here, "host", path)
    sizes = []
    for number, path in enumerate(paths):
        if number in (1, 2):
            here.now_s += 31.0
        guest = ask(here, str(number), path)
        here.want(guest, len(path))
        sizes.append([len(one.order.keys) for one in jobs(here, ev.Load)])
        for one in jobs(here, ev.Load):
            here.end(one, seconds=len(one.order.keys) * (10.0 if number < 2 else 0.01))
        here.leave(guest)
    assert sizes == [[16], [1], [1], [1], [16]], "a block takes ten seconds: two of them are no small part"
    here.close()
