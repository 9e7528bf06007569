"""A node's snapshot for the dashboard (`dashboard.py`): tiers, paces, what is in flight. Changes nothing."""

import time

from headwater.core.errors import ResourceClosed, StoreError
from headwater.engine.request import Request
from headwater.serve.service import Service
from headwater.serve.state import Flight, Snapshot, TierFacts
from headwater.storage.base import Store, StoreFill


def node_snapshot(service: Service) -> Snapshot:
    """How things stand at a node. For the event loop's thread; waits for nothing but the cache's lock."""
    running, cache = service.running, service.running.cache
    engine, metrics = running.engine, running.metrics
    now, waiting, free = engine.load
    prefill, decode, pool = engine.rates
    return Snapshot(
        kind="node",
        name=service.node,
        model=running.name,
        role=str(service.config.role),
        ready=engine.alive and not (service.stopping or service.draining),
        now_s=time.time(),
        numbers=metrics.numbers(),
        tiers=_tiers(service),
        brain_failed=cache.failed,
        can_revive=True,
        engine={
            "running": now,
            "waiting": waiting,
            "free": free,
            "prefill_tokens_per_s": prefill,
            "decode_tokens_per_s": decode,
            "pool_tokens_per_s": pool,
        },
        flights=_flights(service),
        events=metrics.events(),
    )


def _tiers(service: Service) -> list[TierFacts]:
    cache, stores = service.running.cache, service.running.stores
    off = cache.troubles()
    with cache.still() as brain:
        config = brain.config
        taken = brain.slots.num_slots - brain.slots.num_free
        found = [
            TierFacts(
                name="device",
                state="closed",
                used_bytes=taken * config.block_bytes,
                limit_bytes=config.num_slots * config.block_bytes,
            )
        ]
        known = {
            tier.name: (tier.state.name.lower(), tier.loading.facts()[0], tier.saving.facts()[0],
                        tier.queued_load_bytes + tier.queued_save_bytes)
            for tier in brain.tiers.values()
        }  # fmt: skip
    for name in cache.tiers:
        state, load, save, queued = known.get(name, ("unused", None, None, None))  # a brain that failed uses none
        fill = _fill(stores[name]) if name in stores else None
        found.append(
            TierFacts(
                name=name,
                state="off" if name in off else state,
                why=off.get(name),
                used_bytes=None if fill is None else fill.used_bytes,
                limit_bytes=None if fill is None else fill.limit_bytes,
                load_s_per_byte=load,
                save_s_per_byte=save,
                queued_bytes=queued,
            )
        )
    return found


def _fill(store: Store) -> StoreFill | None:
    try:
        return store.fill()
    except (StoreError, ResourceClosed):  # busy, or being closed: nobody knows
        return None


def _flights(service: Service) -> list[Flight]:
    """Every answer that is not over, choice by choice; and requests whose bodies are still coming."""
    now_s = time.monotonic()
    found: list[Flight] = []
    for attempt, answer in service.under_way:
        if answer is None:
            found.append(Flight(id=attempt, phase="arriving", age_s=None))
            continue
        for choice in answer.choices:
            request = choice.request
            if choice.finish_reason is None:
                running = request.phase == "running"
                found.append(
                    Flight(
                        id=request.name.partition("/")[0] if len(answer.choices) == 1 else request.name,
                        phase=("decode" if request.num_generated else "prefill") if running else str(request.phase),
                        age_s=now_s - request.arrived_s,
                        prompt_tokens=len(request.prompt),
                        cached_tokens=_cached(request),
                        generated_tokens=request.num_generated,
                    )
                )
    return found


def _cached(request: Request) -> int | None:
    """Tokens of a prompt that did not have to be computed, so far: in its slots, and not by its own steps.

    The bill comes when it is over. None after a preemption: what it finds then it may have computed itself.
    """
    if request.preemptions:
        return None
    return max(0, min(request.num_computed - request.num_recomputed, len(request.prompt)))
