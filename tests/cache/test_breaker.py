"""When a store is left alone, how fast it is believed to be, and what it is told to take: pure arithmetic."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from headwater.cache.accounts import Accounts
from headwater.cache.placement import BytePace, ComputeCost, TierState, load_pays
from headwater.cache.records import JobKind
from headwater.config.cache import TierConfig
from headwater.core.breaker import MAX_PAUSE_S, Breaker, BreakerState


class BreakerMachine(RuleBasedStateMachine):
    """A breaker beside its drawing: the state, when it began, and how long pauses are."""

    @initialize(
        failures=st.integers(1, 3),
        pause_s=st.sampled_from((0.5, 20.0)),
        max_pause_s=st.sampled_from((None, 30.0)),
    )
    def begin(self, failures: int, pause_s: float, max_pause_s: float | None) -> None:
        options = {} if max_pause_s is None else {"max_pause_s": max_pause_s}
        self.max_pause_s = max(pause_s, max_pause_s or MAX_PAUSE_S)
        self.breaker = Breaker(failures=failures, pause_s=pause_s, **options)
        self.allowed, self.first_pause_s, self.pause_s = failures, pause_s, pause_s
        self.state, self.row, self.until_s, self.now_s = BreakerState.CLOSED, 0, 0.0, 0.0

    @rule(seconds=st.sampled_from((0.0, 0.5, 1.0, 19.5, 61.0)))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule()
    def ask(self) -> None:
        probe = self.state is BreakerState.OPEN and self.now_s >= self.until_s
        assert self.breaker.allows(self.now_s) == (probe or self.state is BreakerState.CLOSED)
        self.state = BreakerState.HALF_OPEN if probe else self.state

    @rule()
    def succeed(self) -> None:
        closes = self.state is BreakerState.HALF_OPEN
        assert self.breaker.succeeded() == closes
        if closes:
            self.state, self.pause_s = BreakerState.CLOSED, self.first_pause_s
        if self.state is BreakerState.CLOSED:
            self.row = 0

    @rule()
    def fail(self) -> None:
        self.row += 1
        again = self.state is BreakerState.HALF_OPEN
        opens = again or (self.state is BreakerState.CLOSED and self.row >= self.allowed)
        assert self.breaker.failed(self.now_s) == opens
        if again:
            self.pause_s = min(2 * self.pause_s, self.max_pause_s)
        if opens:
            self.state, self.until_s = BreakerState.OPEN, self.now_s + self.pause_s

    @rule()
    def end_without_proof(self) -> None:
        self.breaker.unproven(self.now_s)
        if self.state is BreakerState.HALF_OPEN:
            self.state, self.until_s = BreakerState.OPEN, self.now_s + self.pause_s

    @rule()
    def end_undecided(self) -> None:
        self.breaker.undecided(self.now_s)
        if self.state is BreakerState.HALF_OPEN:
            self.state, self.until_s = BreakerState.OPEN, self.now_s

    @rule(on=st.booleans())
    def switch(self, on: bool) -> None:
        if on:
            self.breaker.on()
            self.state, self.row, self.pause_s = BreakerState.CLOSED, 0, self.first_pause_s
        else:
            self.breaker.off()
            self.state = BreakerState.OFF

    @invariant()
    def agree(self) -> None:
        assert self.breaker.facts() == (int(self.state), self.row, self.pause_s, self.until_s)


def test_a_breaker_against_its_drawing() -> None:
    """Default: 50 examples of up to 30 steps. Nightly: 200 of up to 50, about 9,000 steps."""
    nightly = settings().max_examples > 100
    some = settings(max_examples=200 if nightly else 50, stateful_step_count=50 if nightly else 30)
    run_state_machine_as_test(BreakerMachine, settings=some)


def test_failures_in_a_row_open_it_and_a_success_between_them_does_not() -> None:
    breaker = Breaker(failures=2, pause_s=1.0)
    assert not breaker.failed(0.0)
    assert not breaker.succeeded()
    assert not breaker.failed(0.0)
    assert breaker.allows(0.0)
    assert breaker.failed(5.0)
    assert not breaker.failed(5.5)  # a call that was under way: it is open already, and does not stay so longer
    assert not breaker.allows(5.99)
    assert breaker.allows(6.0)
    assert not breaker.allows(6.0)  # one probe at a time
    assert breaker.succeeded()
    assert breaker.allows(6.0)


def test_pauses_double_up_to_four_seconds_and_begin_again() -> None:
    breaker = Breaker(failures=1, pause_s=0.75)
    now_s = 0.0
    assert breaker.failed(now_s)
    for pause_s in (0.75, 1.5, 3.0, 4.0, 4.0):
        assert not breaker.allows(now_s + pause_s - 0.5)
        now_s += pause_s
        assert breaker.allows(now_s)
        assert breaker.failed(now_s)
    assert breaker.allows(now_s + 60.0)
    assert breaker.succeeded()
    assert breaker.failed(now_s)
    assert breaker.allows(now_s + 10.0)


def test_a_call_that_was_under_way_when_it_opened_does_not_close_it() -> None:
    breaker = Breaker(failures=1, pause_s=10.0)
    assert breaker.failed(0.0)
    assert not breaker.succeeded()
    assert not breaker.allows(0.0)
    assert not breaker.would_allow(9.0)
    assert breaker.would_allow(10.0)
    assert breaker.state is BreakerState.OPEN  # looking spends no probe
    assert breaker.allows(10.0)
    assert breaker.succeeded()


def test_off_is_off() -> None:
    breaker = Breaker(failures=1, pause_s=1.0)
    breaker.off()
    assert not breaker.succeeded()
    assert not breaker.failed(0.0)
    breaker.unproven(0.0)
    assert not breaker.allows(1e9)
    assert breaker.state is BreakerState.OFF
    breaker.on()
    assert breaker.allows(0.0)
    assert breaker.failed(0.0)


# --- how fast ---------------------------------------------------------------------------------------------------------


def test_a_pace_is_unknown_then_smoothed() -> None:
    pace = BytePace()
    assert pace.seconds(1000, 0.0) == 0.0
    for nothing in ((0, 1.0), (-5, 1.0), (10, -1.0), (10, float("nan")), (10, float("inf"))):
        pace.measured(*nothing, 0.0)
    assert pace.facts()[0] is None
    pace.measured(10, 1.0, 0.0)
    assert pace.seconds(100, 0.0) == pytest.approx(10.0)
    pace.measured(10, 2.0, 0.0)
    assert pace.seconds(100, 0.0) == pytest.approx(12.0)
    pace.measured(10, 0.0, 0.0)
    assert pace.seconds(100, 30.0) == pytest.approx(9.6)
    assert pace.seconds(100, 31.0) == 0.0  # too long ago: somebody has to try again


def test_deeper_blocks_cost_more() -> None:
    cost = ComputeCost(2.0, 0.5)
    assert [cost.block_s(depth) for depth in range(3)] == [2.0, 2.5, 3.0]
    assert cost.row_s(1, 4) == sum(cost.block_s(depth) for depth in range(1, 4))
    assert cost.row_s(3, 3) == 0.0


def test_loading_pays_if_it_is_clearly_faster_than_computing() -> None:
    def pays(num_blocks: int, *, queued_bytes: int = 0, base_s: float = 4 / 3) -> bool:
        tier.queued_load_bytes = queued_bytes
        return load_pays(tier, ComputeCost(base_s, 0.0), start=0, end=num_blocks, block_bytes=10, now_s=0.0)

    tier = TierState(TierConfig(name="host"), 1)
    assert pays(3)  # never measured
    tier.loading.measured(10, 1.0, 0.0)
    assert pays(3)  # three quarters of it
    assert not pays(3, queued_bytes=1)
    assert not pays(3, base_s=1.3)
    assert pays(3, base_s=0.0)  # computing was never measured
    tier.loading.measured(10, 0.0, 0.0)
    assert pays(3, queued_bytes=1)


def test_what_it_takes_to_be_told_counts_too() -> None:
    def pays(base_s: float) -> bool:
        return load_pays(tier, ComputeCost(base_s, 0.0), start=0, end=3, block_bytes=10, now_s=0.0)

    tier = TierState(TierConfig(name="host"), 1)
    tier.loaded(10, 1.0, 3.0, 0.0)
    assert tier.load_s(30, 0.0) == pytest.approx(6.0)
    assert pays(8 / 3 + 1e-6)
    assert not pays(8 / 3 - 1e-6)
    for nothing in (None, -1.0, float("nan"), float("inf")):  # it stood behind others, or clocks disagree
        tier.loaded(10, 1.0, nothing, 0.0)
    assert tier.load_s(30, 0.0) == pytest.approx(6.0)
    tier.loaded(10, 1.0, 8.0, 0.0)
    assert tier.lag_s == pytest.approx(4.0)  # smoothed
    assert tier.load_s(30, 31.0) == 0.0  # too long ago: somebody has to try again


def test_what_a_store_takes() -> None:
    tier = TierState(TierConfig(name="host", max_queued_bytes=100, max_queued_s=2.0, breaker_failures=1), 1)
    assert tier.refuses_save(1000, 0.0) is None  # nothing is queued: something has to go first
    tier.queued_save_bytes = 60
    assert tier.refuses_save(40, 0.0) is None
    assert tier.refuses_save(41, 0.0) == tier.overloaded(41, 0.0) == "queue_full"
    tier.saving.measured(10, 0.25, 0.0)
    assert tier.refuses_save(20, 0.0) is None
    assert tier.refuses_save(21, 0.0) == tier.overloaded(21, 0.0) == "too_slow"
    tier.breakers[JobKind.SAVE].failed(0.0)
    assert (tier.refuses_save(1, 0.0), tier.overloaded(1, 0.0)) == ("store_down", None)
    assert tier.refuses_save(1000, 10.0) == "queue_full"
    assert tier.refuses_save(1, 10.0) is None
    assert tier.state is BreakerState.OPEN  # asking spends no probe


# --- sums -------------------------------------------------------------------------------------------------------------


def test_accounts_are_sums_by_name_and_labels() -> None:
    accounts = Accounts()
    accounts.add("hits", 2, tier="host", kind="a")
    accounts.add("hits", 3, kind="a", tier="host")
    accounts.add("hits", 1)
    accounts.add("nothing", 0)
    series = ("hits", (("kind", "a"), ("tier", "host")))
    assert accounts.totals == {series: 5, ("hits", ()): 1}
    assert accounts.take() == {series: 5, ("hits", ()): 1}
    accounts.add("hits", 1.5)
    assert accounts.take() == {("hits", ()): 1.5}
    assert accounts.take() == {}
    assert accounts.totals["hits", ()] == 2.5
