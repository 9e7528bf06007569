"""A world around a brain: engines, executors and stores as plain models, which know at any moment what must be true.

The world models the *bytes*: for every device slot, the key whose KV it holds, or rubbish. Engines compute into the
slots that they were granted, executors write into the slots of loads until those have ended, saves read until they have
copied. Whatever the brain says is checked when it says it (`tell`), and everything is checked after every step
(`check`). A second brain hears every event through JSON, and must say the same.

The world lets anything happen that the contract in `core/events.py` allows: jobs end in any order, late, failed, twice,
with holes and with nonsense; stores evict and lie. It only never lets an engine name what it has not computed, and
never lets an executor write after the end of a job: that is what the brain relies on.
"""

import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pytest

from headwater.cache.state import Brain
from headwater.config.cache import CacheConfig, SaveWhen
from headwater.core import encoding
from headwater.core import events as ev
from headwater.core.errors import InvalidInput
from headwater.core.keys import BlockKey
from headwater.core.results import Reason, Status
from headwater.index.slots import SlotState
from machines import brain_checks
from machines.index_machine import NOBODY, child_key, path_keys

HELD: Final = (Status.STORED, Status.EXISTS)
TENANTS: Final = (ev.NO_TENANT, b"another tenant..")
ROOTS: Final = (NOBODY, child_key(NOBODY, 255))


@dataclass(eq=False)
class Errand:
    """A job that has not ended."""

    order: ev.Job
    guest: "WorldRequest | None"  # who waits for it
    start: int  # depth of its first block
    copied: bool = False
    cancelled: bool = False
    results: tuple[Status, ...] | None = None


@dataclass(eq=False)
class WorldRequest:
    """A request, as its engine sees it."""

    name: str
    keys: list[BlockKey]  # the prompt's, then those that were generated
    num_prompt: int
    tenant: int
    table: tuple[int, ...] | None = None  # its slots; None: it has not reserved
    base: int = 0  # blocks that were on the device then
    num_done: int = 0  # leading blocks that are loaded or computed
    loads: list[Errand] = field(default_factory=list)
    rows: list[Errand] = field(default_factory=list)  # of a meeting: on their way, or there and not entered; by depth
    low: int = 1 << 30  # where the lowest of its rows began
    claimed: int = 0  # blocks before this it computes, or may
    early: int = 1 << 30  # from here on it may compute already while it loads, layer by layer
    loaded: Counter[str] = field(default_factory=Counter)
    probe_start: int = -1  # where the stores were asked from
    said: dict[str, set[BlockKey]] = field(default_factory=dict)  # what stores say they have
    known_slots: list[int] = field(default_factory=list)  # of its finished blocks, in the index
    barred: int | None = None  # from here on its blocks are nobody else's, because of a purge

    @property
    def ready(self) -> bool:
        """Whether it may compute."""
        return self.table is not None and all(load.results is not None for load in self.loads)


class World:
    """One brain, and all around it."""

    tenants: Final = TENANTS

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.brain = Brain(config)
        self.twin = Brain(config)
        self.now_s = 0.0
        self.guests: dict[str, WorldRequest] = {}
        self.errands: dict[int, Errand] = {}
        self.num_jobs = 0
        self.stores: dict[str, set[BlockKey]] = {tier.name: set() for tier in config.tiers}
        self.room: dict[str, int] = {}  # blocks that a store has room for, where that is little
        self.origin: dict[BlockKey, tuple[BlockKey, int, int]] = {}  # of every name: the one before, depth, tenant
        self.claims: defaultdict[tuple[str, BlockKey], set[int]] = defaultdict(set)  # jobs that say: it is stored
        self.known: dict[BlockKey, int] = {}  # what the index holds, and where
        self.num_jobs_before = 0  # when the last event was told
        self.marks_before: dict[BlockKey, int] = {}  # then
        self.purge: ev.PurgeBegan | None = None  # that is open
        self.purge_from = 0  # jobs up to this one had begun before it
        self.pins: dict[str, tuple[tuple[BlockKey, ...], float, int]] = {}  # keys, until when, tenant
        self.gone: set[BlockKey] = set()  # purged, and computed by nobody since
        self.recorded: list[str] = []
        self.bills: list[ev.Finished] = []
        self._rubbish = itertools.count()
        self._news = True
        self.content: list[object] = [self.rubbish() for _ in range(config.num_slots)]

    def rubbish(self) -> object:
        """Bytes that are nobody's."""
        return next(self._rubbish)

    # --- engines ------------------------------------------------------------------------------------------------------

    def arrive(self, name: str, tokens: Sequence[int], *, tenant: int = 0) -> WorldRequest:
        """A request asks; one that is here asks again, for the same."""
        self.now_s += 0.25
        guest = self.guests.get(name)
        if guest is None:
            keys = path_keys(tokens, ROOTS[tenant])
            self.register(keys, tenant)
            guest = self.guests[name] = WorldRequest(name, keys, len(keys), tenant)
            self.bar(guest)
        self.tell(self.arrival(guest), guest)
        return guest

    def arrival(self, guest: WorldRequest) -> ev.Arrived:
        """The event of a request that asks."""
        root, tenant = ROOTS[guest.tenant], TENANTS[guest.tenant]
        keys = tuple(guest.keys[: guest.num_prompt])
        session = ev.session_of(f"session {len(guest.name) % 3}" if keys else "", tenant)
        return ev.Arrived(now_s=self.now_s, request=guest.name, keys=keys, root=root, tenant=tenant, session=session)

    def register(self, keys: Sequence[BlockKey], tenant: int, start: int = 0, before: BlockKey | None = None) -> None:
        """Remember where names come from."""
        parent = ROOTS[tenant] if before is None else before
        for depth, key in enumerate(keys, start):
            self.origin[key] = (parent, depth, tenant)
            parent = key

    def want(
        self, guest: WorldRequest, num_blocks: int, *, load: bool = True, promised: str = "", meet: bool = False
    ) -> tuple[int, ...] | None:
        """A request wants slots; somebody may say that a store has all of its prompt, and be wrong."""
        before = guest.table
        said = {name: set(keys) for name, keys in guest.said.items()}
        if promised and before is None:
            guest.said[promised] = set(guest.keys[: guest.num_prompt])
        have = self.num_known(guest.keys) if before is None else len(before)
        room = self._room(guest)
        event = ev.Wanted(
            now_s=self.now_s, request=guest.name, num_blocks=num_blocks, load=load, promised=promised, meet=meet
        )
        out = self.tell(event, guest, asked=num_blocks)
        if not any(isinstance(one, ev.Granted) for one in out):
            guest.said = said
            assert num_blocks - have > room, "refused, with enough slots that could be had"
            assert guest.table == before
            assert not any(isinstance(one, ev.Job) for one in out)
            return None
        if (
            guest.barred is None
            and before is None
            and load
            and guest.base < min(guest.num_prompt, len(guest.table or ()))
        ):
            brain_checks.check_loads(self, guest, promised)
        if before is None and guest.loads and not self.meets(guest):
            guest.early = guest.loads[-1].start + len(guest.loads[-1].order.keys)
        return guest.table

    def _room(self, guest: WorldRequest) -> int:
        """Slots that must be to be had: free, or of blocks that no other running request and no save can keep."""
        kept = set(guest.keys[: self.num_known(guest.keys)])
        for other in self.guests.values():
            kept.update(other.keys[: other.num_done])
        for keys, _, _ in self.pins.values():
            kept.update(keys)
        for errand in self.errands.values():
            if isinstance(errand.order, ev.Save) and not errand.copied:
                kept.update(self._lineage(errand.order.keys[-1]))
        behind = {key for key in self.known if kept.intersection(self._lineage(key))} if self.read() else kept
        num_free = self.brain.slots.counts()[SlotState.FREE]
        return num_free + len(self.known.keys() - behind)

    def _lineage(self, key: BlockKey) -> set[BlockKey]:
        """A block and all before it."""
        found: set[BlockKey] = set()
        at: BlockKey | None = key
        while at in self.origin:
            found.add(at)
            at = self.origin[at][0]
        return found

    def fill(self, guest: WorldRequest, num: int, tokens: Sequence[int] = ()) -> None:
        """A request computed blocks: of its prompt, then generated ones as the tokens say. In a meeting, it claims."""
        assert guest.ready
        assert guest.table is not None
        num = min(num, len(guest.table) - guest.num_done)
        if self.meets(guest):
            num = min(num, max(0, self.claim(guest, guest.num_done + num) - guest.num_done))
        missing = max(0, guest.num_done + num - len(guest.keys))
        before = guest.keys[-1] if guest.keys else ROOTS[guest.tenant]
        more = path_keys(tokens[:missing], before)
        self.register(more, guest.tenant, len(guest.keys), before)
        guest.keys += more
        keys = guest.keys[guest.num_done : guest.num_done + num]
        for at, key in enumerate(keys, guest.num_done):
            self.compute(guest, at, key)
        self.bar(guest)
        num_shared = len(keys) if guest.barred is None else max(0, guest.barred - guest.num_done)
        self.gone.difference_update(keys[:num_shared])
        guest.num_done += len(keys)
        self._move_on(guest)
        num_dropped = self._num_dropped()
        self.tell(ev.Filled(now_s=self.now_s, request=guest.name, keys=tuple(keys)), guest)
        for tier in self.config.tiers:
            saves = tier.save is SaveWhen.COMMIT and guest.barred is None
            if saves and keys and self._num_dropped() == num_dropped:
                assert self.claims[tier.name, guest.keys[guest.num_done - 1]], "not saved, and nobody says why"

    def meets(self, guest: WorldRequest) -> bool:
        """Whether a request computes while what lies behind is loaded."""
        return self.brain.requests[guest.name].meeting is not None

    def claim(self, guest: WorldRequest, end: int) -> int:
        """A request that meets is about to compute up to a block. Returns up to where it may."""
        self.tell(ev.Claimed(now_s=self.now_s, request=guest.name, num_blocks=end), guest)
        meeting = self.brain.requests[guest.name].meeting
        assert meeting is not None
        assert guest.claimed <= meeting.claimed <= max(guest.claimed, guest.num_done, end, meeting.start)
        guest.claimed = meeting.claimed
        assert not guest.rows or guest.claimed <= guest.rows[0].start, "a claim on what is loaded"
        stands = bool(guest.rows) and guest.rows[0].start == guest.num_done
        assert stands or end <= guest.num_done or guest.claimed > guest.num_done, "it waits for nothing"
        return guest.claimed

    def _move_on(self, guest: WorldRequest) -> None:
        """What was loaded behind counts when all before it is there, up to the first block that was not to be had."""
        while (
            guest.ready and guest.rows and guest.rows[0].start == guest.num_done and guest.rows[0].results is not None
        ):
            row = guest.rows.pop(0)
            num_hit = num_leading(row.results or (), (Status.HIT,))
            guest.num_done += num_hit
            guest.loaded[row.order.store] += num_hit

    def _num_dropped(self) -> float:
        totals = self.brain.accounts.totals
        return sum(amount for (series, _), amount in totals.items() if series == "dropped_blocks_total")

    def compute(self, guest: WorldRequest, at: int, content: object) -> None:
        """A kernel writes into the slot of a block that is not finished."""
        assert guest.table is not None
        slot = guest.table[at]
        assert guest.base <= guest.num_done <= at
        assert slot not in self.known.values(), "an engine would write into a known block"
        assert slot not in self.locked(), "an engine and a load would write into one slot"
        loaded = {row.start + i for row in guest.rows for i in range(num_leading(row.results or (), (Status.HIT,)))}
        assert at not in loaded, "an engine would write over what was loaded"
        self.content[slot] = content
        self._news = True

    def scribble(self, guest: WorldRequest) -> None:
        """A step writes all over the blocks that are not finished."""
        if guest.ready and guest.table is not None:
            for at in range(guest.num_done, guest.claimed if self.meets(guest) else len(guest.table)):
                self.compute(guest, at, self.rubbish())

    def give_up(self, guest: WorldRequest) -> None:
        """A request waits no longer."""
        waiting = self._waiting(guest)
        out = self.tell(ev.GaveUp(now_s=self.now_s, request=guest.name), guest)
        assert {one.job for one in out if isinstance(one, ev.Cancel)} == waiting, "somebody works for nothing"

    def leave(self, guest: WorldRequest) -> None:
        """A request ends."""
        waiting = self._waiting(guest)
        del self.guests[guest.name]
        out = self.tell(ev.Left(now_s=self.now_s, request=guest.name), guest)
        assert guest.ready == any(isinstance(one, ev.Finished) for one in out), "no bill, or one for nothing"
        assert {one.job for one in out if isinstance(one, ev.Cancel)} == waiting, "somebody works for nothing"
        for errand in self.errands.values():
            if errand.guest is guest:
                errand.guest = None

    # --- who wants blocks gone ----------------------------------------------------------------------------------------

    def is_doomed(self, key: BlockKey) -> bool:
        """Whether a block is among what is being purged."""
        if self.purge is None:
            return False
        path = self.purge.keys
        return path[-1] in self._lineage(key) if path else TENANTS[self.origin[key][2]] == self.purge.tenant

    def bar(self, guest: WorldRequest) -> None:
        """A request's path may lead to what is being purged."""
        if self.purge is None:
            return
        doomed = (at for at, key in enumerate(guest.keys) if self.is_doomed(key))
        whole = not self.purge.keys and TENANTS[guest.tenant] == self.purge.tenant
        barred = 0 if whole else next(doomed, None)
        if barred is not None:
            guest.barred = barred if guest.barred is None else min(guest.barred, barred)

    def pin(self, name: str, keys: Sequence[BlockKey], tenant: int, ttl_s: float | None) -> None:
        """Somebody wants a prefix to stay, within a budget."""
        until_s = 0.0 if ttl_s is None else self.now_s + ttl_s
        event = ev.Pinned(now_s=self.now_s, name=name, keys=tuple(keys), tenant=TENANTS[tenant], until_s=until_s)
        there = event.keys[: self.num_known(keys)]
        lasting = [
            kept for other, (kept, end_s, _) in self.pins.items() if other != name and not 0 < end_s <= self.now_s
        ]
        others = {key for kept in lasting for key in kept}
        budget = int(self.config.num_slots * self.config.pin_share)
        if not there or len(others.union(there)) > budget:
            said = self.refuse(event)
            assert not there or f"may keep {budget}" in said
            return
        assert self.tell(event) == []
        self.pins.pop(name, None)
        self.pins[name] = there, until_s, tenant

    def unpin(self, name: str) -> None:
        """It may go again."""
        event = ev.Unpinned(now_s=self.now_s, name=name)
        if name not in self.pins:
            self.refuse(event)
            return
        del self.pins[name]
        self.tell(event)

    def begin_purge(self, keys: Sequence[BlockKey], tenant: int) -> ev.Purged:
        """Somebody wants blocks gone."""
        event = self.purge = ev.PurgeBegan(now_s=self.now_s, keys=tuple(keys), tenant=TENANTS[tenant])
        self.purge_from = self.num_jobs
        doomed = {key for key in self.known if self.is_doomed(key)}
        for name, (kept, _, of) in list(self.pins.items()):
            if any(map(self.is_doomed, kept)) or (not keys and of == tenant):
                del self.pins[name]
        for guest in self.guests.values():
            self.bar(guest)
            if guest.barred is not None and guest.table is None:
                guest.known_slots = guest.known_slots[: guest.barred]
        *cancelled, said = self.tell(event)
        assert all(isinstance(one, ev.Cancel) for one in cancelled)
        assert isinstance(said, ev.Purged)
        assert set(said.keys) == doomed
        assert 0 <= said.num_held <= len(said.keys)
        return said

    def end_purge(self) -> None:
        """What had begun before has ended, the stores have nothing of it any more, and that is said."""
        for number, errand in list(self.errands.items()):
            if number <= self.purge_from and isinstance(errand.order, ev.Save | ev.StoreCopy):
                self.end(errand)
                self.check()
        for store in self.stores.values():
            store -= {key for key in store if self.is_doomed(key)}
        self.gone |= {key for key in self.origin if self.is_doomed(key)}
        assert self.tell(ev.PurgeEnded(now_s=self.now_s)) == []
        self.purge = None

    def _waiting(self, guest: WorldRequest) -> set[int]:
        """Jobs whose results only this request waits for."""
        errands = [errand for errand in self.errands.values() if errand.guest is guest and not errand.cancelled]
        return {errand.order.job for errand in errands if isinstance(errand.order, ev.Probe | ev.Load)}

    # --- executors ----------------------------------------------------------------------------------------------------

    def write(self, errand: Errand) -> None:
        """A load that has not ended writes: rubbish first, as far as anybody knows."""
        self._news = True
        if isinstance(errand.order, ev.Load):
            for slot in errand.order.slots:
                self.content[slot] = self.rubbish()

    def copied(self, errand: Errand) -> None:
        """A save has read its blocks."""
        errand.copied = True
        assert self.tell(ev.Copied(now_s=self.now_s, job=errand.order.job)) == []

    def honest(self, errand: Errand) -> tuple[Status, ...]:
        """What a store does with a job that goes well."""
        order = errand.order
        store = self.stores[order.store]
        if isinstance(order, ev.Probe):
            return tuple(Status.HELD if key in store else Status.ABSENT for key in order.keys)
        there = list(itertools.takewhile(lambda key: key in store, order.keys))
        if isinstance(order, ev.Load):
            return (Status.HIT,) * len(there) + (Status.MISS,) * (len(order.keys) - len(there))
        if isinstance(order, ev.StoreCopy):
            lacking = Status.MISS if isinstance(order, ev.Demote) else Status.FAILED
            return self.put(order.target, there) + (lacking,) * (len(order.keys) - len(there))
        return self.put(order.store, order.keys)

    def put(self, store: str, keys: Sequence[BlockKey]) -> tuple[Status, ...]:
        """A store that knows parents takes blocks."""
        held, results = self.stores[store], []
        for key in keys:
            parent, depth, _ = self.origin[key]
            if key in held:
                results.append(Status.EXISTS)
            elif depth and parent not in held:
                results.append(Status.NO_PARENT)
            elif len(held) >= self.room.get(store, 1 << 30):
                results.append(Status.NO_ROOM)
            else:
                held.add(key)
                results.append(Status.STORED)
        return tuple(results)

    def end(self, errand: Errand, words: Sequence[str] | None = None, *, seconds: float = 0.0) -> None:
        """A job is done; `words`: how, if not as its store would have it."""
        order = errand.order
        results = self.honest(errand) if words is None else tuple(map(Status, words))
        fits = len(results) == len(order.keys)
        if isinstance(order, ev.Load):
            self.write(errand)
            for key, slot, result in zip(order.keys, order.slots, results, strict=False):
                if result == Status.HIT:
                    self.content[slot] = key
        num_bytes = self.config.block_bytes * sum(result in (Status.HIT, *HELD) for result in results)
        event = ev.JobDone(
            now_s=self.now_s, job=order.job, results=results, num_bytes=num_bytes, seconds=seconds
        )  # fmt: skip
        self._ended(errand, results if fits else None, event)

    def fail(self, errand: Errand, failure: Reason = Reason.FAILED, *, elsewhere: bool = False) -> None:
        """A job ends without a result."""
        self.write(errand)
        facts: dict[str, Any] = {"failure": failure, "why": "so it is", "elsewhere": elsewhere}
        self._ended(errand, None, ev.JobFailed(now_s=self.now_s, job=errand.order.job, **facts))

    def _ended(self, errand: Errand, results: tuple[Status, ...] | None, event: ev.Event) -> None:
        order, guest = errand.order, errand.guest
        errand.results = results if results is not None else (Status.FAILED,) * len(order.keys)
        del self.errands[order.job]
        if isinstance(order, ev.Save | ev.Demote):
            num_held = num_leading(errand.results, HELD)
            for key in order.keys[num_held:]:
                self.claims[into(order), key].discard(order.job)
                if Status.MISS in errand.results[num_held : num_held + 1]:
                    # Whoever said that the source has it was wrong; but a job that began later knows better.
                    said = self.claims[order.store, key]
                    said -= {job for job in said if job not in self.errands and job < order.job}
        elif isinstance(order, ev.Load):
            for key in order.keys[: num_leading(errand.results, (Status.HIT,))]:
                self.claims[order.store, key].add(order.job)
                if guest is not None and guest.barred is None and key not in self.stores[order.store]:
                    self.gone.discard(key)  # a store that lies, and was promised to have it
            if guest is not None and errand in guest.rows:
                if not num_leading(errand.results, (Status.HIT,)):
                    guest.rows.remove(errand)
            elif guest is not None:
                self._settle(guest)
            if guest is not None:
                self._move_on(guest)
        elif guest is not None and guest.table is None:
            if isinstance(order, ev.Promote) and order.target in guest.said:
                pairs = zip(order.keys, errand.results, strict=True)
                guest.said[order.target] |= {key for key, result in pairs if result in HELD}
            elif isinstance(order, ev.Probe) and results is not None and isinstance(event, ev.JobDone):
                pairs = zip(order.keys, results, strict=True)
                guest.said[order.store] = {key for key, result in pairs if result == Status.HELD}
                self.gone -= guest.said[order.store]  # where a store lies, all may happen
        self.tell(event, guest)

    def _settle(self, guest: WorldRequest) -> None:
        """What was loaded counts in order, up to the first block that was not to be had."""
        guest.num_done = guest.base
        guest.loaded.clear()
        for load in guest.loads:
            if load.results is None:
                return
            if load.start == guest.num_done:
                num_hit = num_leading(load.results, (Status.HIT,))
                guest.num_done += num_hit
                guest.loaded[load.order.store] += num_hit

    # --- time and stores ----------------------------------------------------------------------------------------------

    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.now_s += seconds

    def evict(self, store: str, key: BlockKey) -> None:
        """A store drops a block and all that builds on it, and tells nobody."""
        gone = {key}
        while more := {other for other in self.stores[store] if self.origin[other][0] in gone} - gone:
            gone |= more
        self.stores[store] -= gone

    # --- what the brain says ------------------------------------------------------------------------------------------

    def tell(self, event: ev.Event, guest: WorldRequest | None = None, *, asked: int = 0) -> list[ev.Instruction]:
        """Let something happen, and check every instruction that follows."""
        self._news = True
        text = json.dumps(encoding.encode(event))
        self.recorded.append(text)
        copy = encoding.decode(json.loads(text))
        assert copy == event, "an event that does not survive JSON"
        known = self.known
        self.num_jobs_before, self.marks_before = self.num_jobs, brain_checks.index_marks(self)
        out = self.brain.handle(event)
        for name, (_, until_s, _) in list(self.pins.items()):
            if 0 < until_s <= event.now_s:
                del self.pins[name]
        self.known = {key: slot for key, _, slot in self.brain.blocks()}
        assert isinstance(copy, ev.Event)
        assert self.twin.handle(copy) == out, "a second brain said something else"
        if guest is not None and isinstance(event, ev.Arrived):
            probe_start = self.brain.requests[guest.name].probe_start
            if probe_start != guest.probe_start:  # all stores are asked anew
                guest.probe_start = probe_start
                guest.said.clear()
        for one in out:
            assert encoding.decode(json.loads(json.dumps(encoding.encode(one)))) == one, (
                "an instruction that does not survive"
            )
            self._check_instruction(one, event, guest, asked, known)
        return out

    def refuse(self, event: ev.Event) -> str:
        """Nonsense is refused, and changes nothing. Returns what was said."""
        before = self.brain.digest()
        try:
            self.brain.handle(event)
        except InvalidInput as error:
            assert self.brain.digest() == before, "refused, and yet something changed"
            return str(error)
        raise AssertionError(f"not refused: {event}")

    def ignore(self, event: ev.Event) -> None:
        """What is too late changes nothing, but that time passes: pins whose time is up end with any event."""
        if any(0 < pin.until_s <= self.now_s for pin in self.brain.pins):
            assert self.tell(event) == []
        before = self.brain.digest()
        assert self.tell(event) == []
        assert self.brain.digest() == before, "ignored, and yet something changed"

    def _check_instruction(
        self,
        one: ev.Instruction,
        event: ev.Event,
        guest: WorldRequest | None,
        asked: int,
        known: dict[BlockKey, int],
    ) -> None:
        if isinstance(one, ev.Tell) and one.kind == "pin_gave_way":
            assert guest is not None
            assert isinstance(event, ev.Wanted)
            kept, _, _ = self.pins.popitem()[1]
            others = {key for keys, _, _ in self.pins.values() for key in keys}.union(kept) - set(guest.keys)
            assert event.num_blocks > self.config.num_slots - len(others), "it would have fitted beside the pins"
        elif isinstance(one, ev.Granted):
            assert guest is not None
            assert isinstance(event, ev.Wanted)
            assert guest.name == one.request
            self._granted(one, guest, asked, known)
        elif isinstance(one, ev.Job):
            self._ordered(one, event, guest)
        elif isinstance(one, ev.Cancel):
            errand = self.errands[one.job]
            assert not errand.cancelled, "told twice"
            errand.cancelled = True
            if isinstance(errand.order, ev.Probe):
                errand.guest = None  # whatever it says comes too late
            elif isinstance(errand.order, ev.Save):
                assert isinstance(event, ev.Wanted), "a save that is in nobody's way"
                assert not errand.copied, "a save that keeps nothing"
            elif isinstance(errand.order, ev.Demote):
                assert self.errands[errand.order.after].cancelled, "a demotion that is in nobody's way"
            assert not isinstance(errand.order, ev.Promote)
        elif isinstance(one, ev.Finished):
            assert guest is not None
            assert isinstance(event, ev.Left)
            assert guest.name == one.request
            brain_checks.check_bill(self, one, guest)
            self.bills.append(one)

    def _granted(self, one: ev.Granted, guest: WorldRequest, asked: int, known: dict[BlockKey, int]) -> None:
        old = guest.table
        if old is None:
            old = tuple(known[key] for key in guest.keys[: self._prefix(guest.keys, known)])
            guest.base = guest.num_done = len(old)
            guest.known_slots = list(old)
        assert one.slots[: len(old)] == old, "a block of a running request changed its slot"
        assert len(one.slots) == max(asked, len(old))
        fresh = one.slots[len(old) :]
        taken = {slot for other in self.guests.values() if other.table for slot in other.table}
        assert len(set(one.slots)) == len(one.slots), "one slot twice"
        assert not taken.intersection(fresh), "one slot for two requests"
        assert not self.locked().intersection(fresh), "a slot that a load may still write to"
        assert not self.read().intersection(fresh), "a slot that a save still reads"
        assert not set(self.known.values()).intersection(fresh), "a slot of a known block"
        assert not self.leaving().intersection(fresh), "a slot of a block that somebody still holds"
        guest.table = one.slots
        for slot in fresh:
            self.content[slot] = self.rubbish()

    def _ordered(self, one: ev.Job, event: ev.Event, guest: WorldRequest | None) -> None:
        assert one.job == self.num_jobs + 1, "job numbers are not in order"
        assert one.keys
        self.num_jobs = one.job
        parent, start, tenant = self.origin[one.keys[0]]
        for key, after in itertools.pairwise(one.keys):
            assert self.origin[after][0] == key, "not a row"
        if not isinstance(one, ev.Probe):
            assert not any(map(self.is_doomed, one.keys)), "something is moved that is to be gone"
            record = self.brain.jobs[one.job].request
            assert record is None or record.barred is None or start + len(one.keys) <= record.barred
        tier = self.brain.tiers[one.store].config
        errand = self.errands[one.job] = Errand(one, None, start)
        if isinstance(one, ev.Probe):
            assert guest is not None
            assert isinstance(event, ev.Arrived)
            assert one.keys == tuple(guest.keys[start : guest.num_prompt])
            assert one.deadline_s == self.now_s + tier.probe_timeout_s
            errand.guest = guest
        elif isinstance(one, ev.Load):
            assert guest is not None
            assert guest.table is not None
            end = start + len(one.keys)
            waits_s = tier.load_timeout_s
            if any(job.job == one.job for job in self.brain.requests[guest.name].loads):
                assert isinstance(event, ev.Wanted)
                compute_s = 0.0 if event.promised else sum(map(self.brain.cost.block_s, range(start, end)))
                if compute_s and self.brain.tiers[one.store].loading.known:
                    waits_s = min(waits_s, max(1.25 * compute_s, 0.2 * waits_s))
                assert start == (guest.loads[-1].start + len(guest.loads[-1].order.keys) if guest.loads else guest.base)
                guest.loads.append(errand)
            else:
                assert all(row.results is not None for row in guest.rows), "two rows under way"
                assert end == guest.low or guest.low > guest.num_prompt, "rows that leave out a block"
                assert start >= max(guest.claimed, guest.num_done), "a row of what is computed"
                assert end <= guest.early, "a row of what may be computed by now"
                guest.low = start
                guest.rows.insert(0, errand)
            assert one.keys == tuple(guest.keys[start:end])
            assert end <= guest.num_prompt
            assert one.slots == guest.table[start:end]
            assert set(one.keys) <= guest.said[one.store], "a load of what nobody has"
            assert one.deadline_s == pytest.approx(self.now_s + waits_s)
            errand.guest = guest
        elif isinstance(one, ev.Save):
            assert tier.save is not SaveWhen.NEVER
            assert (one.parent, one.depth, one.tenant) == (parent, start, TENANTS[tenant])
            assert one.deadline_s == self.now_s + tier.save_timeout_s
            assert len(one.slots) == len(one.keys)
            assert start == 0 or self.claims[one.store, parent], "a suffix without its prefix"
            brain_checks.check_source(self, one)
            for key in one.keys:
                self.claims[one.store, key].add(one.job)
            brain_checks.check_save(self, one)
        elif isinstance(one, ev.Demote):
            names = list(self.stores)
            target = self.brain.tiers[one.target].config
            assert target.save is not SaveWhen.NEVER
            assert names.index(one.store) < names.index(one.target), "a demotion to a faster store"
            assert one.parent == parent
            assert start == 0 or self.claims[one.target, parent], "a suffix without its prefix"
            assert one.deadline_s == self.now_s + target.save_timeout_s + (tier.save_timeout_s if one.after else 0)
            brain_checks.check_demote(self, one)
            for key in one.keys:
                self.claims[one.target, key].add(one.job)
        else:
            assert isinstance(one, ev.Promote)
            assert guest is not None
            assert guest.table is None
            assert self.config.prefetch
            assert one.target == self.config.tiers[0].name != one.store
            assert one.deadline_s == self.now_s + tier.load_timeout_s
            errand.guest = guest

    # --- what must be true at any time --------------------------------------------------------------------------------

    def locked(self) -> set[int]:
        """Slots that a load may still write to."""
        return {slot for job in self.errands.values() if isinstance(job.order, ev.Load) for slot in job.order.slots}

    def read(self) -> set[int]:
        """Slots that a save still reads."""
        saves = [job.order for job in self.errands.values() if isinstance(job.order, ev.Save) and not job.copied]
        return {slot for save in saves for slot in save.slots}

    def leaving(self) -> set[int]:
        """Slots of blocks that were purged, and are held."""
        index = self.brain.index.evicting()
        assert index is not None
        return set(index.leaving())

    def num_known(self, keys: Sequence[BlockKey]) -> int:
        """How many leading blocks are on the device."""
        return self._prefix(keys, self.known)

    def _prefix(self, keys: Sequence[BlockKey], known: dict[BlockKey, int]) -> int:
        return next((i for i, key in enumerate(keys) if key not in known), len(keys))

    def check(self) -> None:
        """Everything, if anything has happened since it was last done."""
        if not self._news:
            return
        self._news = False
        brain_checks.check(self)

    def close(self) -> None:
        """Everybody leaves and every job ends: nothing must be left but known blocks."""
        if self.purge is not None:
            self.end_purge()
        for name in list(self.pins):
            self.unpin(name)
        for guest in list(self.guests.values()):
            self.leave(guest)
            self.check()
        for errand in list(self.errands.values()):
            self.fail(errand, Reason.CANCELLED)
            self.check()
        brain_checks.check_closed(self)


def num_leading(results: Sequence[Status], good: Sequence[Status]) -> int:
    """How many leading results are good."""
    return next((i for i, result in enumerate(results) if result not in good), len(results))


def into(order: ev.Job) -> str:
    """The store that a job writes to, or asks."""
    return order.target if isinstance(order, ev.StoreCopy) else order.store
