"""What a cache may be told, and what it says of what cannot work."""

from typing import Any

import pytest

from headwater.cache.state import Brain
from headwater.config.cache import CacheConfig, SaveWhen, TierConfig
from headwater.core.errors import InvalidConfig

SIZES: dict[str, Any] = {"num_slots": 4, "block_tokens": 16, "block_bytes": 100}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_slots": 0}, "num_slots must be a whole number of at least 1, not 0"),
        ({"num_slots": 2.0}, "num_slots must be a whole number of at least 1, not 2.0"),
        ({"num_slots": True}, "num_slots must be a whole number of at least 1, not True"),
        ({"block_tokens": -1}, "block_tokens must be a whole number of at least 1, not -1"),
        ({"block_bytes": "100"}, "block_bytes must be a whole number of at least 1, not '100'"),
        ({"block_bytes": 1 << 62}, "block_bytes must be a whole number"),
        ({"ghosts": -1}, "ghosts must be a whole number of at least 0, not -1"),
        ({"compute_base_s": -0.1}, "compute_base_s must be a number of seconds, not -0.1"),
        ({"compute_slope_s": float("nan")}, "compute_slope_s must be a number of seconds, not nan"),
        ({"compute_slope_s": float("inf")}, "compute_slope_s must be a number of seconds, not inf"),
        ({"compute_base_s": None}, "compute_base_s must be a number of seconds, not None"),
        ({"tiers": (TierConfig(name="a"), TierConfig(name="b"), TierConfig(name="a"))}, "have one name: a, b, a"),
        ({"tiers": [TierConfig(name=f"t{i}") for i in range(9)]}, "at most 8 tiers, not 9"),
    ],
)
def test_a_cache_that_cannot_work(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidConfig, match=words):
        CacheConfig(**{**SIZES, **options})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": ""}, "a tier's name is a word other than 'device', not ''"),
        ({"name": "device"}, "a tier's name is a word other than 'device', not 'device'"),
        ({"name": "two words"}, "a tier's name is a word other than 'device', not 'two words'"),
        ({"save": "sometimes"}, "save is one of commit, hits, eviction, never, not 'sometimes'"),
        ({"save": None}, "save is one of commit, hits, eviction, never, not None"),
        ({"save_after_hits": 0}, "save_after_hits must be a whole number of at least 1, not 0"),
        ({"max_queued_bytes": 0}, "max_queued_bytes must be a whole number of at least 1, not 0"),
        ({"breaker_failures": 1.5}, "breaker_failures must be a whole number of at least 1, not 1.5"),
        ({"probe_timeout_s": 0}, "probe_timeout_s must be a positive number of seconds, not 0"),
        ({"load_timeout_s": -1}, "load_timeout_s must be a positive number of seconds, not -1"),
        ({"save_timeout_s": float("inf")}, "save_timeout_s must be a positive number of seconds, not inf"),
        ({"max_queued_s": float("nan")}, "max_queued_s must be a positive number of seconds, not nan"),
        ({"breaker_pause_s": "1"}, "breaker_pause_s must be a positive number of seconds, not '1'"),
    ],
)
def test_a_tier_that_cannot_work(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidConfig, match=words):
        TierConfig(**{"name": "host", **options})


def test_plain_values_are_taken_where_they_are_clear() -> None:
    assert TierConfig(name="host", save="hits").save is SaveWhen.HITS  # type: ignore[arg-type]
    tiers: Any = [TierConfig(name="host"), TierConfig(name="disk")]
    assert CacheConfig(**SIZES, tiers=tiers).tiers == tuple(tiers)
    assert CacheConfig(**SIZES, ghosts=0, compute_base_s=0, compute_slope_s=1).compute_slope_s == 1


def test_a_policy_that_there_is_not() -> None:
    with pytest.raises(InvalidConfig, match="no eviction policy 'best'; there are: "):
        Brain(CacheConfig(**SIZES, policy="best"))


def test_the_default_policy_is_there() -> None:
    brain = Brain(CacheConfig(**SIZES))
    brain.validate()
    assert len(brain.blocks()) == 0


def test_eight_tiers_have_eight_bits() -> None:
    brain = Brain(CacheConfig(**SIZES, tiers=tuple(TierConfig(name=f"t{i}") for i in range(8))))
    assert [tier.bit for tier in brain.tiers.values()] == [1, 2, 4, 8, 16, 32, 64, 128]
