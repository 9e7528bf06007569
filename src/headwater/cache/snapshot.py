"""The whole state of a brain: as one digest, to compare two; and checked for contradictions."""

import hashlib
import json
from collections import Counter
from collections.abc import Collection
from typing import TYPE_CHECKING

from headwater.cache.records import JobKind, RequestRecord
from headwater.index.slots import SlotState

if TYPE_CHECKING:
    from headwater.cache.state import Brain


_THERE = (SlotState.KNOWN, SlotState.LEAVING)


def digest(brain: "Brain") -> str:
    """SHA-256 over all that the brain knows. Two that heard the same events have the same, and say the same next."""
    requests = [
        [
            *(request.request, [key.hex() for key in request.keys], request.hold.num_blocks, request.base),
            *(request.own, request.probes, {name: held.hex() for name, held in request.held.items()}),
            *(
                [[job.job, job.results] for job in request.loads],
                request.ready_s,
                request.misses,
                request.broken,
                request.probe_start,
            ),
            *(request.unasked, request.num_loaded, request.loaded_bytes, request.reserved_s, request.num_prompt),
            *(
                request.root.hex(),
                request.tenant.hex(),
                request.asked_s,
                request.answered_s,
                request.gave_way,
                request.resumed,
                request.num_unnamed,
                request.num_marks,
            ),
            *([request.meeting.facts()] if request.meeting is not None else []),
            *(["may meet", request.load_end] if request.may_meet else []),
            *([["barred", request.barred]] if request.barred is not None else []),
            *([hint.session.hex(), hint.keep_s, hint.last] if (hint := request.hold.hint).session else []),
            *([request.met, request.met_wait_s] if request.met or request.met_wait_s else []),
        ]
        for request in brain.requests.values()
    ]
    tiers = [
        [
            *(
                tier.name,
                [one.facts() for one in tier.breakers.values()],
                tier.queued_load_bytes,
                tier.queued_save_bytes,
            ),
            *(tier.loading.facts(), tier.saving.facts(), tier.lag_s, list(tier.lags), tier.num_pinning),
        ]
        for tier in brain.tiers.values()
    ]
    state = {
        "index": brain.index.facts(),
        "slots": {state.name: num for state, num in brain.slots.counts().items() if num or state < SlotState.LEAVING},
        "free": brain.slots.free(),
        "withheld": sorted(brain.withheld),
        "origins": [[key.hex(), root.hex(), tenant.hex()] for key, (root, tenant) in brain.saver.origins.items()],
        "cost": [brain.cost.base_s, brain.cost.slope_s],
        "requests": requests,
        "jobs": brain.jobs.facts(),
        "pending": [[key.hex(), name] for key, name in brain.pending.items()],
        "promoting": [[key.hex(), number] for key, number in brain.loader.promoting.items()],
        "tiers": tiers,
        "totals": sorted([name, labels, amount] for (name, labels), amount in brain.accounts.totals.items()),
    }
    if brain.purges.open is not None:
        state["purge"] = [[key.hex() for key in brain.purges.open.keys], brain.purges.open.tenant.hex()]
    if brain.policy != brain.config.policy:
        state["policy"] = brain.policy
    if pins := brain.pins.facts():
        state["pins"] = pins
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def validate(brain: "Brain") -> None:
    """Raise AssertionError if the brain contradicts itself. Reads everything."""
    brain.index.validate()
    brain.slots.validate()
    brain.pins.validate()
    own: list[int] = []
    loading: set[int] = set()
    for name, request in brain.requests.items():
        assert request.request == name, "a request under another's name"
        table = list(brain.index.slots(request.hold))
        assert len(table) == request.hold.num_blocks, "a hold without its slots"
        assert brain.index.keys(request.hold) == request.keys[: request.hold.num_blocks], "a hold on other blocks"
        if not request.reserved:
            assert not [*request.own, *request.loads], "slots before they were reserved"
            continue
        mine = [slot for slot in request.own if brain.slots.state(slot) is SlotState.OWN]
        own += mine
        assert len(set(request.own)) == len(request.own), "one slot for two blocks"
        for at, slot in enumerate(request.own, request.base):
            known = at < request.hold.num_blocks and table[at] == slot
            assert known == (brain.slots.state(slot) in _THERE), "a block that is known and not in the index"
        loading |= {job.job for job in request.all_loads if job.results is None}
        assert bool(request.loads) == (request.ready_s is None), (
            "a request that waits for nothing, or not for its loads"
        )
        validate_meeting(request)
    counts = brain.slots.counts()
    assert len(set(own)) == len(own) == counts[SlotState.OWN], "slots that are nobody's, or two requests'"
    locked = [*brain.withheld, *(slot for job in brain.jobs for slot in job.slots)]
    assert len(set(locked)) == len(locked) == counts[SlotState.QUARANTINED], "slots that nobody will free"
    for key, name in brain.pending.items():
        assert key in brain.requests[name].keys, "a block that nobody is about to have"
    validate_jobs(brain, loading)


def validate_meeting(request: RequestRecord) -> None:
    """Raise AssertionError if a request computes into what is being loaded, or knows blocks without their parents."""
    meeting, ready = request.meeting, request.hold.num_blocks
    if meeting is None:
        return
    assert request.base <= meeting.start <= meeting.low <= meeting.end, "a meeting that is not in order"
    assert meeting.end <= min(request.num_blocks, request.num_prompt), "a meeting behind its blocks"
    assert meeting.start <= meeting.claimed, "less is claimed than was there"
    assert ready < meeting.end, "a meeting that is over"
    at = max(ready, meeting.claimed, meeting.low)
    for row in meeting.rows:
        assert row.start >= at, "a block that is loaded and computed, or loaded twice"
        assert row.end <= meeting.end, "a row behind the end"
        at = row.end
    assert sum(row.results is None for row in meeting.rows) <= 1, "two rows under way"
    first = meeting.rows[0] if meeting.rows else None
    if first is not None and first.results is not None and request.ready_s is not None:
        assert first.start > ready, "a row that could have been entered"
    assert meeting.num_entered + sum(meeting.lost.values()) <= meeting.end - meeting.low, "blocks counted twice"


def validate_jobs(brain: "Brain", loading: Collection[int]) -> None:
    """Raise AssertionError if jobs belong to nobody, or do not add up. `loading`: loads that requests wait for."""
    queued: Counter[str] = Counter()
    for job in brain.jobs:
        waiting = job.request if job.request is not None and not job.request.gone else None
        assert waiting is None or brain.requests.get(waiting.request) is waiting, "a job of nobody"
        assert job.kind is not JobKind.LOAD or job.job in loading or waiting is None, "a lost load"
        queued[f"{job.kind} {job.into}"] += job.num_bytes
    for tier in brain.tiers.values():
        saves = sum(queued[f"{kind} {tier.name}"] for kind in (JobKind.SAVE, JobKind.DEMOTE, JobKind.PROMOTE))
        assert tier.queued_load_bytes == queued[f"{JobKind.LOAD} {tier.name}"], "loads do not add up"
        assert tier.queued_save_bytes == saves, "saves do not add up"
