"""The bill by tier: what each tier saved and lost adds up to what the request did."""

import math

from hypothesis import given
from hypothesis import strategies as st

from headwater.cache.bill import NO_TIER, by_tier
from headwater.cache.placement import ComputeCost

SECONDS = st.floats(0, 1e3)


@given(
    st.dictionaries(st.sampled_from(["device", "host", "disk", "pool"]), st.integers(0, 1000)),
    SECONDS,
    SECONDS,
    SECONDS,
)
def test_tiers_add_up_to_the_request(blocks: dict[str, int], base_s: float, slope_s: float, waited_s: float) -> None:
    cost = ComputeCost(base_s, slope_s)
    found = by_tier(blocks, cost, waited_s)
    whole = cost.row_s(0, sum(blocks.values())) - waited_s
    assert math.isclose(sum(found.values()), whole, rel_tol=1e-9, abs_tol=1e-6)
    assert found.get("device", 0.0) >= 0, "nobody waits for the device"
    assert (NO_TIER in found) == (not any(num for tier, num in blocks.items() if tier != "device"))


def test_waiting_is_shared_by_blocks_and_deeper_ones_are_worth_more() -> None:
    found = by_tier({"device": 1, "host": 3, "disk": 1}, ComputeCost(1.0, 0.5), 2.0)
    assert found == {"device": 1.0, "host": (1.5 + 2.0 + 2.5) - 1.5, "disk": 3.0 - 0.5}
    assert by_tier({"device": 2}, ComputeCost(1.0, 0.0), 0.25) == {"device": 2.0, NO_TIER: -0.25}
    assert by_tier({"host": 1}, ComputeCost(1.0, 0.0), 5.0) == {"host": -4.0}
