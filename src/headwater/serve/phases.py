"""How long each part of a request took, by the engine's own account: one set of names for usage, router and metrics.

    queue_s        from the engine's door to its slots
    prefill_s      computing the prompt, or what of it did not come from elsewhere, up to the first token
    pool_write_s   from the first token until the pool has every block: what computing did not hide
    pool_read_s    from slots until every block is there
    decode_s       from the first token to the end of the answer

Parts follow one another and do not overlap; in sum they are the engine's total. Pure.
"""

from headwater.engine.request import Sending, Taking, Usage


def phases_of(usage: Usage, handoff: Sending | Taking | None) -> dict[str, float]:
    """Seconds by part; only those that the request has reached."""
    found: dict[str, float] = {}
    first_s = usage.total_s if usage.ttft_s is None else usage.ttft_s
    if usage.queue_s is not None:
        found["queue_s"] = min(usage.queue_s, first_s)
    rest_s = first_s - found.get("queue_s", 0.0)
    if isinstance(handoff, Taking) and usage.pool_s is not None:
        found["pool_read_s"] = min(usage.pool_s, rest_s)
        rest_s -= found["pool_read_s"]
    if usage.ttft_s is not None:
        found["prefill_s"] = rest_s
        if isinstance(handoff, Sending):
            found["pool_write_s"] = usage.total_s - first_s
        else:
            found["decode_s"] = usage.total_s - first_s
    return {name: round(max(0.0, seconds), 6) for name, seconds in found.items()}
