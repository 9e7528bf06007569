"""The bill of a request that leaves: where its prompt came from, and what that was worth. Decides nothing.

A resumed request is billed and told, but counts in no total of hits, misses or seconds: it mostly found its own blocks.
"""

from collections.abc import Mapping
from typing import Final

from headwater.cache.accounts import Accounts
from headwater.cache.match import DEVICE
from headwater.cache.placement import ComputeCost
from headwater.cache.records import RequestRecord
from headwater.core.events import Finished

NO_TIER: Final = "none"  # whose waiting brought nothing


def bill(request: RequestRecord, accounts: Accounts, cost: ComputeCost, block_tokens: int) -> Finished | None:
    """Add a request to the accounts, once, and say what it came to; None if it left before it could compute."""
    served = request.ready_s is not None
    outcome = "resumed" if request.resumed else "served"
    accounts.add("requests_total", 1, outcome=outcome if served else "left_early")
    if not served or request.ready_s is None:
        return None
    blocks = {DEVICE: min(request.base, request.num_prompt), **request.num_loaded}
    hits = tuple((tier, num * block_tokens) for tier, num in blocks.items() if num)
    misses = tuple((reason.value, num * block_tokens) for reason, num in request.misses.items())
    answered_s = request.asked_s if request.answered_s is None else request.answered_s
    waited_s = answered_s - request.asked_s + request.ready_s - request.reserved_s + request.met_wait_s
    num_met = sum(end - start for start, end in request.met)  # the other hits are the first blocks
    saved_s = cost.row_s(0, sum(blocks.values()) - num_met) - waited_s
    saved_s += sum(cost.row_s(start, end) for start, end in request.met)
    if not request.resumed:
        for tier, tokens in hits:
            accounts.add("hit_tokens_total", tokens, tier=tier)
        for reason, tokens in misses:
            accounts.add("miss_tokens_total", tokens, reason=reason)
        accounts.add("waited_seconds_total", waited_s)
        accounts.add("saved_seconds_total", max(saved_s, 0.0))
        accounts.add("lost_seconds_total", max(-saved_s, 0.0))
        for tier, seconds in by_tier(blocks, cost, waited_s).items():
            accounts.add("tier_saved_seconds_total", max(seconds, 0.0), tier=tier)
            accounts.add("tier_lost_seconds_total", max(-seconds, 0.0), tier=tier)
    return Finished(
        request=request.request,
        num_tokens=(request.num_prompt + request.num_unnamed) * block_tokens,
        hit_tokens=hits,
        miss_tokens=misses,
        loaded_bytes=request.loaded_bytes,
        waited_s=waited_s,
        saved_s=saved_s,
    )


def by_tier(blocks: Mapping[str, int], cost: ComputeCost, waited_s: float) -> dict[str, float]:
    """Seconds that each tier saved, below 0: lost, from how many blocks it had, in their order. They add up.

    Only what is loaded is waited for: tiers share the waiting by their blocks. Where nothing was, it is nobody's.
    """
    num_loaded = sum(num for tier, num in blocks.items() if tier != DEVICE)
    found: dict[str, float] = {}
    at = 0
    for tier, num in blocks.items():
        waiting_s = 0.0 if tier == DEVICE else waited_s * num / max(num_loaded, 1)
        found[tier] = cost.row_s(at, at + num) - waiting_s
        at += num
    if not num_loaded:
        found[NO_TIER] = -waited_s
    return found
