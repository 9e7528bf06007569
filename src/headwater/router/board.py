"""A router's snapshot for the dashboard (`serve/dashboard.py`): nodes, roles, load, leases, and what is under way.

A router caches nothing, so its document has no tiers: those are at its nodes, each with a page of its own.
"""

import time
from collections.abc import Mapping
from typing import Any

from headwater.router.router import Router
from headwater.serve.state import MAX_NODES, Flight, Snapshot, number, text


def router_snapshot(router: Router) -> Snapshot:
    """How things stand at a router. For its event loop's thread; waits for nothing."""
    state = router.state()
    nodes = state["nodes"]
    models = sorted({str(node["model"]) for node in nodes})
    return Snapshot(
        kind="router",
        name="router",
        model=", ".join(models) or None,
        role="router",
        ready=state["ready"],
        now_s=time.time(),
        numbers=router.metrics.numbers(),
        flights=[_flight(one) for one in state["under_way"]],
        fleet={
            "num_nodes": len(nodes),
            "nodes": [_node(node) for node in nodes[:MAX_NODES]],
            "queues": state["queues"],
            "index": text(state["index"]),
        },
        events=router.metrics.events(),
    )


def _node(node: Mapping[str, Any]) -> dict[str, Any]:
    load, rates = node["load"], node["rates"]
    state = (
        "draining" if node["draining"]
        else "unproven" if node["doubted"]
        else "resting" if node["breaker"] != "closed"
        else "usable" if node["believed_free_slots"]
        else "full"
    )  # fmt: skip
    return {
        "name": text(node["node"]),
        "role": str(node["role"]),
        "state": state,
        "url": text(node["url"]),
        "running": load["running"],
        "waiting": load["waiting"],
        "free_slots": node["believed_free_slots"],
        "requests_of_this_router": node["requests_of_this_router"],
        "pending_tokens": node["pending_tokens"],
        "lease_s": number(node["lease_s"]),
        "lease_left_s": number(node["lease_left_s"]),
        "prefill_tokens_per_s": number(rates["prefill_tokens_per_s"]),
        "decode_tokens_per_s": number(rates["decode_tokens_per_s"]),
    }


def _flight(one: Mapping[str, Any]) -> Flight:
    """A request under way: at which node it is, or that it waits."""
    last = one["attempts"][-1] if one["attempts"] else None
    at = last if last is not None and last["outcome"] == "under way" else None
    return Flight(
        id=str(one["request_id"]),
        phase="waiting" if at is None else str(at["phase"]),
        age_s=one["age_s"],
        node=None if at is None else text(at["node"]),
    )
