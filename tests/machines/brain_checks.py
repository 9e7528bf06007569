"""What must be true of a brain and the world around it (`brain_world.py`), at any time and at the end."""

import itertools
import json
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from headwater.cache.match import DEVICE, BlockStatus
from headwater.cache.records import JobKind
from headwater.cache.state import Brain
from headwater.core import encoding
from headwater.core import events as ev
from headwater.core.breaker import BreakerState
from headwater.core.keys import BlockKey
from headwater.core.page import KEY_BYTES
from headwater.core.results import MISS_REASONS
from headwater.index.slots import SlotState

if TYPE_CHECKING:
    from machines.brain_world import World, WorldRequest

KINDS: Final[dict[JobKind, type[ev.Job]]] = {
    JobKind.PROBE: ev.Probe,
    JobKind.LOAD: ev.Load,
    JobKind.SAVE: ev.Save,
}


def check(world: "World") -> None:
    """Everything."""
    brain = world.brain
    brain.validate()
    assert brain.digest() == world.twin.digest(), "two brains that heard the same differ"
    for key, before, slot in brain.blocks():
        parent, depth, tenant = world.origin[key]
        assert world.content[slot] == key, "a known block whose slot holds other bytes"
        assert before == (None if depth == 0 else parent)
        assert before is None or before in world.known, "a suffix without its prefix"
        assert depth or brain.saver.origins[key] == (parent, world.tenants[tenant])
    assert len(brain.saver.origins) == sum(world.origin[key][1] == 0 for key in world.known), "origins left behind"
    assert {job.job for job in brain.jobs} == set(world.errands), "jobs lost, or kept"
    for errand in world.errands.values():
        if isinstance(errand.order, ev.Save) and not errand.copied:
            check_save(world, errand.order)
    assert set(brain.requests) == set(world.guests)
    for guest in world.guests.values():
        check_guest(world, guest)
        check_view(world, guest)
    check_marks(world)
    check_purged(world)
    check_pins(world)
    check_sums(world)


def check_purged(world: "World") -> None:
    """What is being purged nobody finds; what was purged is nowhere, until somebody computes it anew."""
    assert not any(map(world.is_doomed, world.known)), "found, and is to be gone"
    for held in (world.known.keys(), *world.stores.values()):
        assert world.gone.isdisjoint(held), "purged, and back"
    assert world.guests or world.read() or not world.leaving(), "kept for nobody"


def check_pins(world: "World") -> None:
    """What is pinned is there, whatever happened since."""
    assert [pin.name for pin in world.brain.pins] == list(world.pins)
    for keys, _, _ in world.pins.values():
        assert world.known.keys() >= set(keys), "pinned, and gone"


def check_marks(world: "World") -> None:
    """What is marked as stored, some job has said so, and none has taken it back."""
    for key, bits in index_marks(world).items():
        for name, tier in world.brain.tiers.items():
            assert not bits & tier.bit or world.claims[name, key], "believed to be stored, and is not"


def index_marks(world: "World") -> dict[BlockKey, int]:
    """The stores that each known block is marked with, as bits."""
    runs: Any = world.brain.index.facts()[0]
    return {
        BlockKey(bytes.fromhex(row[2 * KEY_BYTES * at : 2 * KEY_BYTES * (at + 1)])): bits
        for row, _, marks, *_ in runs
        for at, bits in enumerate(bytes.fromhex(marks))
    }


def check_save(world: "World", save: ev.Save) -> None:
    """What is to be saved is there."""
    for key, slot in zip(save.keys, save.slots, strict=True):
        there = world.known.get(key) == slot or slot in world.leaving()
        assert there, "a save of a block that is not there any more"
        assert world.content[slot] == key, "a save of other bytes"


def check_demote(world: "World", demote: ev.Demote) -> None:
    """What is to be demoted is believed to be in the source, or is on its way there, and then that comes first."""
    assert world.claims[demote.store, demote.keys[-1]], "a demotion of what nobody has"
    writers = [
        errand.order.job
        for errand in world.errands.values()
        if isinstance(errand.order, ev.Save | ev.StoreCopy)
        and errand.order.job != demote.job
        and (errand.order.target if isinstance(errand.order, ev.StoreCopy) else errand.order.store) == demote.store
        and not set(demote.keys).isdisjoint(errand.order.keys)
    ]
    assert demote.after == max(writers, default=0), "a demotion before its source has the row"


def check_source(world: "World", save: ev.Save) -> None:
    """The device is not read for what a faster store has, or was just told to take."""
    key, marks = save.keys[-1], index_marks(world)
    for name, tier in world.brain.tiers.items():
        if name == save.store:
            break
        begun = max(world.claims[name, key], default=0) > world.num_jobs_before
        held = world.marks_before.get(key, 0) & marks.get(key, 0) & tier.bit
        readable = tier.breakers[JobKind.LOAD].state is BreakerState.CLOSED
        assert not (readable and (begun or held)), "read from the device once more"


def check_guest(world: "World", guest: "WorldRequest") -> None:
    """A request's blocks hold its bytes, and stay where they are."""
    record = world.brain.requests[guest.name]
    assert record.barred == guest.barred, "barred from somewhere else"
    held = world.brain.index.slots(record.hold)
    assert [world.content[slot] for slot in held] == guest.keys[: len(held)], "other bytes under a hold"
    if guest.table is None:
        assert not record.reserved
        return
    assert record.reserved
    assert guest.ready == (record.ready_s is not None), "ready, and is not"
    rows = record.meeting.rows if record.meeting is not None else []
    assert [row.job for row in rows] == [row.order.job for row in guest.rows], "rows lost, or kept"
    assert len(held) == guest.num_done
    table = guest.table[: guest.num_done]
    assert [world.content[slot] for slot in table] == guest.keys[: guest.num_done], "its own bytes changed"
    num_before = len(guest.known_slots)
    assert list(held[:num_before]) == guest.known_slots, "a held block changed its slot"
    guest.known_slots = list(held)
    assert not world.locked().intersection(table), "a load may write into a finished block"


def check_view(world: "World", guest: "WorldRequest") -> None:
    """What a request is told of each block follows from what has happened."""
    match = world.brain.view(guest.name)
    blocks = list(match)
    assert match.num_blocks == len(blocks) == guest.num_prompt
    assert [part.start for part in match.parts] == [0, *(part.end for part in match.parts)][: len(match.parts)]
    num_held = min(world.brain.requests[guest.name].hold.num_blocks, guest.num_prompt)
    assert match.num_on_device == num_held <= match.num_hit
    assert match.settled == (BlockStatus.PENDING not in [status for status, _ in blocks])
    probing = any(job.guest is guest for job in world.errands.values() if isinstance(job.order, ev.Probe))
    waiting = itertools.dropwhile(lambda load: load.results is not None, guest.loads)
    loading = {key for load in waiting for key in load.order.keys}
    before = BlockStatus.HIT
    for at, (status, tier) in enumerate(blocks):
        key = guest.keys[at]
        if at < num_held:
            assert (status, tier) == (BlockStatus.HIT, DEVICE)
        elif before is BlockStatus.MISS:
            assert (status, tier) == (BlockStatus.MISS, None), "something behind a miss"
        elif guest.table is not None:
            assert (status, tier) == (BlockStatus.PENDING if key in loading else BlockStatus.MISS, None)
        elif status is BlockStatus.HIT:
            assert guest.barred is None or at < guest.barred, "a hit on what was purged"
            assert before is BlockStatus.HIT
            assert tier == next(name for name in world.stores if key in guest.said.get(name, ())), "not the fastest"
        else:
            assert tier is None
            assert (status is BlockStatus.PENDING) >= probing, "given up before the stores have answered"
            if status is not before:
                assert status is BlockStatus.MISS or probing or _coming(world, key, guest), "waits for nobody"
        before = status


def _coming(world: "World", key: BlockKey, guest: "WorldRequest") -> bool:
    return any(
        other is not guest and other.table is not None and key in other.keys[other.base : len(other.table)]
        for other in world.guests.values()
    )


def check_sums(world: "World") -> None:
    """What is queued, probed and billed adds up."""
    queued: Counter[tuple[str, bool]] = Counter()
    for errand in world.errands.values():
        order = errand.order
        if not isinstance(order, ev.Probe):
            store = order.target if isinstance(order, ev.StoreCopy) else order.store
            queued[store, isinstance(order, ev.Load)] += len(order.keys) * world.config.block_bytes
    for name, tier in world.brain.tiers.items():
        orders = [errand.order for errand in world.errands.values() if errand.order.store == name]
        for kind, breaker in tier.breakers.items():
            if breaker.state is BreakerState.HALF_OPEN:
                demoted = kind is JobKind.SAVE and any(
                    isinstance(errand.order, ev.Demote) and errand.order.target == name
                    for errand in world.errands.values()
                )
                assert demoted or any(isinstance(order, KINDS[kind]) for order in orders), "a probe that nobody makes"
        reading = [errand for errand in world.errands.values() if errand.order.store == name and not errand.copied]
        assert tier.num_pinning == sum(isinstance(errand.order, ev.Save) for errand in reading)
        assert tier.queued_load_bytes == queued[name, True]
        assert tier.queued_save_bytes == queued[name, False]
    totals: Counter[str] = Counter()
    for (series, _), amount in world.brain.accounts.totals.items():
        if series.endswith("_tokens_total"):
            totals[series] += int(amount)
    hits = sum(tokens for bill in world.bills for _, tokens in bill.hit_tokens)
    assert totals["hit_tokens_total"] == hits
    assert totals["miss_tokens_total"] == sum(bill.num_tokens for bill in world.bills) - hits


def check_loads(world: "World", guest: "WorldRequest", promised: str = "") -> None:
    """What is there and pays is loaded; what is promised, whether it pays or not."""
    tiers = [tier for tier in world.brain.tiers.values() if guest.keys[guest.base] in guest.said.get(tier.name, ())]
    up = [tier.name for tier in tiers if tier.state is BreakerState.CLOSED]
    free_of_charge = world.brain.cost.row_s(0, 1 << 20) == 0  # to compute: then to load pays always
    assert guest.loads or guest.rows or not up or not (free_of_charge or promised), "a hit that nobody wanted"


def check_bill(world: "World", one: ev.Finished, guest: "WorldRequest") -> None:
    """A bill tells all, and nothing else."""
    size = world.config.block_tokens
    hits = {DEVICE: guest.base, **guest.loaded}
    assert dict(one.hit_tokens) == {tier: num * size for tier, num in hits.items() if num}, "hits that were none"
    assert all(tokens > 0 for _, tokens in (*one.hit_tokens, *one.miss_tokens))
    assert {reason for reason, _ in one.miss_tokens} <= MISS_REASONS
    assert one.num_tokens == guest.num_prompt * size
    assert one.num_tokens == sum(tokens for _, tokens in (*one.hit_tokens, *one.miss_tokens)), "not all told"
    assert one.loaded_bytes == sum(guest.loaded.values()) * world.config.block_bytes
    assert one.waited_s >= 0
    check_explanation(world, one)


def check_explanation(world: "World", one: ev.Finished) -> None:
    """Rows cover the prompt without a gap, and say block by block what the bill says in sums."""
    explained = world.brain.whys.explained
    assert explained is not None
    assert explained == world.twin.whys.explained, "a second brain explains it otherwise"
    assert explained.request == one.request
    at, told = 0, Counter[str]()
    for row in explained.rows:
        assert row.start == at < row.end, "rows with a gap, or without blocks"
        at = row.end
        told[row.reason or f"from {row.tier}"] += (row.end - row.start) * world.config.block_tokens
    assert at == explained.num_blocks
    assert told == {f"from {tier}": num for tier, num in one.hit_tokens} | dict(one.miss_tokens)
    evicting = world.brain.evicting
    assert len(world.brain.whys) <= (evicting.ghosts.limit if evicting is not None else 0), "notes without end"


def check_closed(world: "World") -> None:
    """Nothing is left but known blocks, and the record leads to the same state."""
    brain = world.brain
    counts = brain.slots.counts()
    assert counts[SlotState.OWN] == counts[SlotState.QUARANTINED] == 0, "slots left behind"
    assert counts[SlotState.LEAVING] == 0, "purged, and still here"
    assert brain.slots.num_evictable == len(brain.blocks()) == counts[SlotState.KNOWN], "holds or pins left behind"
    assert not brain.pending, "blocks that nobody will have"
    assert not brain.loader.promoting, "blocks that nobody brings"
    assert not list(brain.jobs)
    assert all(not tier.queued_load_bytes and not tier.queued_save_bytes for tier in brain.tiers.values())
    again = Brain(world.config)
    for text in world.recorded:
        event = encoding.decode(json.loads(text))
        assert isinstance(event, ev.Event)
        again.handle(event)
    assert again.digest() == brain.digest(), "the record does not lead to the same state"
