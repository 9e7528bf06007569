"""TieredCache over real job code and real stores, in virtual time: a machine, and a simulation from one seed."""

import os

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from headwater.lab.campaigns.simulation import Simulation
from machines.cache_machine import TieredCacheMachine

NIGHTLY = os.environ.get("HEADWATER_TEST_PROFILE") == "nightly"


@pytest.mark.timeout(3600 if NIGHTLY else 300)
def test_two_caches_against_what_each_byte_must_be() -> None:
    """Nightly: 600 examples of up to 60 steps."""
    examples, steps = (600, 60) if NIGHTLY else (60, 40)
    run_state_machine_as_test(TieredCacheMachine, settings=settings(max_examples=examples, stateful_step_count=steps))


@pytest.mark.timeout(3600 if NIGHTLY else 300)
@pytest.mark.parametrize("policy", ["lru", "value"])
def test_one_seed_ends_in_one_state(policy: str) -> None:
    """Three caches on two faulty stores. Nightly: 10,000 requests each."""
    num_requests = 10_000 if NIGHTLY else 200
    first = Simulation(7, policy=policy).run(num_requests)
    again = Simulation(7, policy=policy).run(num_requests)
    assert first == again
    assert first.state_hash != Simulation(8, policy=policy).run(200).state_hash
    assert first.injected_faults > num_requests
    assert min(first.hit_tokens[tier] for tier in ("device", "host", "pool")) > 0
    assert set(first.miss_tokens) == {"never_stored", "evicted", "failed", "corrupt", "too_late", "not_worth_it"}
