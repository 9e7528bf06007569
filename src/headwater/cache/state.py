"""The brain: a pure machine that hears events and answers with instructions. It decides and does nothing.

    handle(event) -> [instruction]        validate()        view(request) -> Match        digest()

No bytes, no clock, no thread, no store: time comes with the events, and what is in a store comes from asking it. Two
brains that hear the same events say the same and end in the same state (`digest`), so an incident is a list of events.

What it counts: device slots and known blocks (`index/`), requests, jobs under way, and what each store has queued.
What it keeps to:
- A block enters the index when it was computed (Filled) or loaded and verified (JobDone of a Load), never before. Two
  requests that compute one block end with one block: who commits first wins, the other's slot stays its own until it
  leaves (rule 1).
- A slot that a job may still write to belongs to nobody until that job has ended (rule 2). A request whose load is
  Stuck never gets those slots: it leaves, and comes again.
- A store is asked, read and written through jobs with deadlines, and no event waits for one: what a store does not do
  in time, or cannot keep up with, is a miss or a drop, and is counted with its reason.
- A suffix is only written behind its prefix: a Save begins at the first block of its path that the store may lack.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, Final

from headwater.cache import snapshot
from headwater.cache.accounts import Accounts
from headwater.cache.bill import bill
from headwater.cache.jobs import Jobs
from headwater.cache.loader import Loader
from headwater.cache.match import DEVICE, BlockStatus, Match, describe
from headwater.cache.moves import Moves
from headwater.cache.pinning import Pins
from headwater.cache.placement import ComputeCost, TierState
from headwater.cache.purging import Purges
from headwater.cache.records import JobKind, JobRecord, RequestRecord
from headwater.cache.reports import Reports
from headwater.cache.room import Room
from headwater.cache.saver import Saver
from headwater.cache.whys import Whys
from headwater.config.cache import CacheConfig
from headwater.core import events as ev
from headwater.core.errors import Contradiction, InvalidInput
from headwater.core.events import Event, Instruction
from headwater.core.identity import TENANT_BYTES
from headwater.core.keys import BlockKey, require_keys
from headwater.core.results import Reason, Status
from headwater.index.base import Hint, Hold, PathIndex, Victim
from headwater.index.radix import RadixIndex
from headwater.index.slots import DeviceSlots
from headwater.policy import policy_by_name

_GHOSTS_PER_SLOT: Final = 4
_WISHED_SHARE: Final = 4  # one in so many slots may be kept because clients wish it
_LOW_SHARE: Final = 8  # with less than one in so many slots free, blocks that leave next are saved


class Brain:
    """The state of one cache."""

    def __init__(self, config: CacheConfig, *, withheld: Collection[int] = (), first_job: int = 1) -> None:
        """`withheld`: slots not to be used before they are `Vacated`. Both are for who follows another brain."""
        self.config, self.policy = config, config.policy  # which may change
        self.first_job: Final = first_job
        self.cost = ComputeCost(config.compute_base_s, config.compute_slope_s)
        self.index, self.slots = self._device(config)
        self.evicting = self.index.evicting()  # the same, where blocks stay in it
        self.withheld = set(withheld)
        self.slots.withhold(self.withheld)
        self.accounts, self.moves = Accounts(), Moves()
        self.tiers = {tier.name: TierState(tier, 1 << i) for i, tier in enumerate(config.tiers)}
        self.requests: dict[str, RequestRecord] = {}
        self.pending: dict[BlockKey, str] = {}  # blocks that a request is about to have
        self._out: list[Instruction] = []
        self.jobs = Jobs(self.tiers, config.block_bytes, self._out, first=first_job)
        self.saver = Saver(self.index, self.jobs, self.accounts)
        self.whys = Whys(self.evicting, config.policy, self.tiers)
        self.loader = Loader(self.index, self.jobs, self.accounts, self.whys, cost=self.cost, enter=self._enter)
        reports = Reports(self.tiers, self.jobs, self.saver, self.moves, self._out, end=self._end)
        self.pins = Pins(self.index, config.num_slots, config.pin_share, self._out)
        parts, more = (self.index, self.slots, self.requests, self.saver, self.pins), (self.moves, self._out)
        self.room = Room(*parts)
        self.purges = Purges(*parts, *more, self.loader.give_up, forget_pending=self._forget_pending)
        self._handlers: dict[type[Event], Callable[[Any], None]] = {
            ev.Arrived: self._arrived,
            ev.Wanted: self._wanted,
            ev.Filled: self._filled,
            ev.Claimed: self._claimed,
            ev.GaveUp: self._gave_up,
            ev.Left: self._left,
            ev.Paced: self.cost.paced,
            ev.PolicyChosen: self._policy_chosen,
            ev.Vacated: self._vacated,
            ev.Pinned: self.pins.pinned,
            ev.Unpinned: self.pins.unpinned,
            ev.PurgeBegan: self.purges.began,
            ev.PurgeEnded: self.purges.ended,
            ev.Copied: reports.copied,
            ev.Stuck: reports.stuck,
            ev.JobDone: reports.job_done,
            ev.JobFailed: reports.job_failed,
            ev.StoreOff: reports.store_off,
            ev.StoreOn: reports.store_on,
        }

    def _device(self, config: CacheConfig) -> tuple[PathIndex, DeviceSlots]:
        """What counts the device's blocks and slots."""
        index = RadixIndex(
            policy_by_name(config.policy),
            block_bytes=config.block_bytes,
            num_ghosts=_GHOSTS_PER_SLOT * config.num_slots if config.ghosts is None else config.ghosts,
            cost=self.cost.block_s if config.weigh_cost else None,
            num_wished=config.num_slots // _WISHED_SHARE,
        )
        return index, DeviceSlots(config.num_slots, index)

    def handle(self, event: Event) -> list[Instruction]:
        """Take an event in and say what follows. Raises InvalidInput, and changes nothing, for what makes no sense."""
        handler = self._handlers.get(type(event))
        if handler is None:
            raise InvalidInput(f"a brain hears events, not {type(event).__name__}")
        self._out.clear()
        handler(event)
        self.pins.expire(event.now_s)
        self.purges.sweep()
        self._check()
        return self._out[:]

    def _check(self) -> None:
        """Raise Contradiction if what is cheap to look at cannot be. `validate` looks at everything."""
        if not 0 <= self.slots.num_available <= self.slots.num_slots:
            raise Contradiction(f"{self.slots.num_available} slots of {self.slots.num_slots} could be had")
        for tier in self.tiers.values():
            if tier.queued_load_bytes < 0 or tier.queued_save_bytes < 0 or tier.num_pinning < 0:
                raise Contradiction(f"more jobs of {tier.name} have ended than were begun")

    def validate(self) -> None:
        """Raise AssertionError if the state contradicts itself. Reads everything."""
        snapshot.validate(self)

    def blocks(self) -> list[tuple[BlockKey, BlockKey | None, int]]:
        """Every block that stays on the device without a request: (key, key before it, slot). Reads everything."""
        return [] if self.evicting is None else self.evicting.blocks()

    def digest(self) -> str:
        """A digest of the whole state. Two brains that heard the same events have the same."""
        return snapshot.digest(self)

    # --- a request asks -----------------------------------------------------------------------------------------------

    def _arrived(self, event: ev.Arrived) -> None:
        known = self.requests.get(event.request)
        if known is not None:
            if known.reserved or (known.keys, known.root, known.tenant) != (list(event.keys), event.root, event.tenant):
                raise InvalidInput(f"request {event.request!r} is here already, and is another or has reserved")
            if self._advance(known, event.now_s):
                self.saver.hit(known, event.now_s)
            if known.hold.num_blocks < known.probe_start:  # it had to give room, and lost blocks meanwhile
                self.loader.probe(known, event.now_s)
            return
        keys = list(event.keys)
        require_keys([event.root, *keys])
        if len(event.tenant) != TENANT_BYTES:
            raise InvalidInput(f"a tenant is {TENANT_BYTES} bytes (CacheIdentity.tenant), not {len(event.tenant)}")
        if len(event.session) not in (0, ev.SESSION_BYTES) or not 0 <= event.keep_s < float("inf"):
            raise InvalidInput(f"no session ({ev.SESSION_BYTES} bytes) and wish: {event.session!r}, {event.keep_s}")
        if event.num_unnamed < 0:
            raise InvalidInput(f"a prompt cannot have {event.num_unnamed} more blocks")
        request = RequestRecord(
            request=event.request,
            keys=keys,
            num_prompt=len(keys),
            num_unnamed=event.num_unnamed,
            root=event.root,
            tenant=event.tenant,
            hold=self._first_hold(event),
            resumed=event.resumed,
            asked_s=event.now_s,
        )
        self.requests[event.request] = request
        self.purges.bar(request)
        self.loader.probe(request, event.now_s)
        self.saver.hit(request, event.now_s)

    def _first_hold(self, event: ev.Arrived) -> Hold:
        """What is there of a request's blocks when it arrives."""
        return self.index.hold(event.keys, now_s=event.now_s, hint=Hint(event.session, event.keep_s, event.last))

    def view(self, name: str) -> Match:
        """What is there of a request's prompt now. Changes nothing."""
        request = self._request(name)

        def row_end(at: int, tier: str | None) -> int:
            return at + 1 if request.reserved or tier is None else self.loader.row_end(request, at, request.num_prompt)

        num_held, status = min(request.hold.num_blocks, request.num_prompt), partial(self._status, request)
        return describe(name, request.num_prompt, num_held, status, row_end, reserved=request.reserved)

    def _status(self, request: RequestRecord, at: int) -> tuple[BlockStatus, str | None]:
        if request.reserved:
            loading = any(job.start <= at < job.end for job in request.loads)
            return (BlockStatus.PENDING if loading else BlockStatus.MISS), None
        tier = self.loader.where(request, at)
        if tier is not None:
            return BlockStatus.HIT, tier
        pending = request.probes or request.keys[at] in self.pending
        return (BlockStatus.PENDING if pending else BlockStatus.MISS), None

    # --- a request takes slots ----------------------------------------------------------------------------------------

    def _wanted(self, event: ev.Wanted) -> None:
        request = self._request(event.request)
        if event.promised and event.promised not in self.tiers:
            raise InvalidInput(f"there is no store {event.promised!r} to load from")
        first = not request.reserved
        if first:
            self._advance(request, event.now_s)
        have = request.hold.num_blocks if first else request.num_blocks
        num_wanted = max(0, event.num_blocks - have)
        self.room.make(request, num_wanted, event.now_s)
        taken = self.slots.take(num_wanted)
        if taken is None:
            return
        slots, victims = taken
        self._bury(victims, event)
        request.own.extend(slots)
        if first:
            request.base = have
            request.reserved_s = event.now_s
        for key in request.keys[have : request.num_shared(request.num_blocks)]:
            self.pending.setdefault(key, event.request)
        self._out.append(ev.Granted(request=event.request, slots=self._table(request)))
        if first:
            self.loader.stop_probing(request)
            if event.load:
                self.loader.load(request, event.now_s, promised=event.promised, meet=event.meet)
            self._settle(request, event.now_s)
        self._clean(event.now_s)

    def _advance(self, request: RequestRecord, now_s: float) -> int:
        """Hold what is known by now of a request's blocks."""
        if self.evicting is None:
            return 0
        rest = request.keys[request.hold.num_blocks :]
        found = self.evicting.advance(request.hold, rest, now_s=now_s, hit=not request.gave_way)
        request.gave_way = False
        return found

    def _table(self, request: RequestRecord) -> tuple[int, ...]:
        return (*self.index.slots(request.hold)[: request.base], *request.own)

    def _gave_up(self, event: ev.GaveUp) -> None:
        request = self._request(event.request)
        self.loader.stop_probing(request)
        self.loader.give_up(request)

    # --- a request commits and leaves ---------------------------------------------------------------------------------

    def _filled(self, event: ev.Filled) -> None:
        request = self._request(event.request)
        start = request.hold.num_blocks
        end = start + len(event.keys)
        if not request.reserved or request.ready_s is None:
            raise InvalidInput(f"request {event.request!r} has no slots yet, or some are still being loaded")
        if end > request.num_blocks:
            raise InvalidInput(f"request {event.request!r} filled block {end - 1}, and has {request.num_blocks} slots")
        if request.meeting is not None and end > request.meeting.claimed:
            raise InvalidInput(f"request {event.request!r} filled blocks that it has not claimed")
        named = request.keys[start:end]
        if named != list(event.keys[: len(named)]):
            raise InvalidInput(f"request {event.request!r} was announced with other keys than it commits")
        require_keys(event.keys[len(named) :])
        request.keys.extend(event.keys[len(named) :])
        self.purges.bar(request)
        self._enter(request, event.keys, event.now_s)
        num_met = self.loader.settle(request, event.now_s)
        self.saver.commit(request, len(event.keys) + num_met, event.now_s)
        self._clean(event.now_s)

    def _claimed(self, event: ev.Claimed) -> None:
        request = self._request(event.request)
        if request.ready_s is None:
            raise InvalidInput(f"request {event.request!r} may not compute yet")
        self.loader.meetings.claim(request, event.num_blocks, event.now_s)

    def _enter(self, request: RequestRecord, keys: Sequence[BlockKey], now_s: float, *, seen: bool = False) -> None:
        """Finished blocks get into the index; those that were there already keep their earlier slot."""
        start = request.hold.num_blocks
        own = request.own[start - request.base : start - request.base + len(keys)]
        num_shared = max(0, request.num_shared(start + len(keys)) - start)
        if num_shared < len(keys):
            self._enter_apart(request, keys, own, num_shared, now_s, seen=seen)
            return
        if start == 0 and keys:
            self.saver.entered(request, keys[0])
        taken = self.index.extend(request.hold, keys, own, now_s=now_s, seen=seen)
        num_known = sum(slot != got for slot, got in zip(own, taken, strict=True))  # they come before all new ones
        self.slots.know(own[num_known:])
        self.accounts.add("duplicate_blocks_total", num_known)
        self.moves.entered(keys[num_known:], request.before(start + num_known), start + num_known)
        self._forget_pending(request.request, keys)

    def _enter_apart(
        self, request: RequestRecord, keys: Sequence[BlockKey], own: list[int], at: int, now_s: float, *, seen: bool
    ) -> None:
        """From `at` on, finished blocks are the request's alone."""
        if at:
            self._enter(request, keys[:at], now_s, seen=seen)
        self.index.extend_apart(request.hold, keys[at:], own[at:])
        self.slots.know_apart(own[at:])
        self._forget_pending(request.request, keys[at:])

    def _left(self, event: ev.Left) -> None:
        request = self._request(event.request)
        del self.requests[event.request]
        request.gone = True  # its saves, demotions and promotions go on: the next turn may want them
        self.loader.stop_probing(request)
        locked: set[int] = set()
        for job in request.all_loads:
            if job.results is None:
                first = job.start - request.base
                job.slots = tuple(request.own[first : job.end - request.base])
                locked.update(job.slots)
        self.loader.give_up(request)
        self.slots.quarantine(locked)
        self.slots.give_back(self.slots.still_own(request.own))
        self._forget_pending(event.request, request.keys)
        self.loader.meetings.end(request)
        self.whys.left(request, event.now_s)
        self.index.release(request.hold, now_s=event.now_s)
        finished = bill(request, self.accounts, self.cost, self.config.block_tokens)
        if finished is not None:
            self._out.append(finished)
        self._clean(event.now_s)  # what it held may be among the next to leave the device

    def _forget_pending(self, name: str, keys: Iterable[BlockKey]) -> None:
        pending = self.pending
        for key in keys:
            if pending.get(key) == name:
                del pending[key]

    # --- a job has ended ----------------------------------------------------------------------------------------------

    def _end(self, job: JobRecord, results: tuple[Status, ...], failure: Reason | None, now_s: float) -> None:
        if not job.stuck:  # that was held against the store already
            self.jobs.judge(job, results, failure, now_s)
        self.moves.ended(job, results, self.tiers[job.into])
        request = job.request if job.request is not None and not job.request.gone else None
        if job.kind is JobKind.SAVE:
            self.saver.saved(job, results, request, now_s)
        elif job.kind is JobKind.DEMOTE:
            self.saver.demoted(job, results, request, now_s)
        elif job.kind is JobKind.LOAD:
            job.results = results
            self.slots.unquarantine(job.slots)
            if request is not None:
                self.loader.meetings.ended(request, job, results)
                self._settle(request, now_s)
        elif job.kind is JobKind.PROMOTE:
            self.loader.promoted(job, request, results)
        elif request is not None and not request.reserved:
            self.loader.probed(request, job, results, failure)
            if not request.probes:
                request.answered_s = now_s
                if self.config.prefetch:
                    self.loader.prefetch(request, now_s)

    def _settle(self, request: RequestRecord, now_s: float) -> None:
        """When all that was to be loaded is there or is not coming, the request may compute the rest."""
        num_fresh = self.loader.settle(request, now_s)
        if num_fresh:
            self.saver.commit(request, num_fresh, now_s)

    # --- the rest -----------------------------------------------------------------------------------------------------

    def _vacated(self, event: ev.Vacated) -> None:
        if not self.withheld.issuperset(event.slots):
            raise InvalidInput("slots that are not withheld cannot be vacated")
        self.withheld.difference_update(event.slots)
        self.slots.unquarantine(event.slots)

    def _policy_chosen(self, event: ev.PolicyChosen) -> None:
        if self.evicting is None:
            raise InvalidInput("this engine evicts by itself, in an order of its own")
        self.evicting.rank_by(policy_by_name(event.policy))
        self.policy = event.policy

    def _bury(self, victims: list[Victim], event: ev.Wanted) -> None:
        """Blocks were evicted, for whoever wanted slots."""
        self.whys.evicted(victims, event.request, event.now_s)
        self.saver.on_evicted(victims)
        self.moves.evicted(victims)
        self.accounts.add("evicted_blocks_total", len(victims), tier=DEVICE)

    def _clean(self, now_s: float) -> None:
        if self.slots.num_free * _LOW_SHARE < self.slots.num_slots:
            self.saver.clean(now_s)

    def _request(self, name: str) -> RequestRecord:
        if name not in self.requests:
            raise InvalidInput(f"there is no request {name!r}: it has not asked, or has left")
        return self.requests[name]
