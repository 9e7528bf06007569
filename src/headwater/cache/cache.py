"""TieredCache: what an engine calls. `match / reserve / commit / release` over the brain, with an executor and a clock.

    match      what is there of a prompt: on the device at once, in the stores as their answers come in
    reserve    slots for a request, and loads into them where that pays
    poll       how far the loads are; `wait` blocks for them, until a deadline
    claim      how far the next step may go, where blocks behind it are loaded meanwhile
    commit     blocks that were really computed get their names, and go to the stores
    release    the request is over: everything it held is given back, and its bill is handed out

No call waits for a store, but those named `wait`, `drain` and `close`, each until its deadline. Calls may come from
any thread; what the executor reports comes from its own. One lock keeps them apart, held only while the brain thinks.

If the brain fails (`failed`, `shell.py`) every block is a miss. Requests that are left over from before keep their
slots until they are released, have what they were told they have, and get no more slots: an engine that sees another
`generation` begins them anew.
"""

import logging
from collections.abc import Sequence
from types import TracebackType
from typing import Final, NamedTuple, Self

from headwater.cache.explanations import Explained, Text
from headwater.cache.match import DEVICE, Match, Progress
from headwater.cache.records import JobKind
from headwater.cache.shell import Shell
from headwater.core import events as ev
from headwater.core.errors import HeadwaterError, InvalidInput
from headwater.core.keys import BlockKey
from headwater.core.results import Status, TierPurge
from headwater.index.base import NO_HINT, Hint

log = logging.getLogger("headwater")


class PinFacts(NamedTuple):
    """A pin, as people see it."""

    name: str
    num_blocks: int
    left_s: float | None  # None: for good


_HIT: Final = frozenset({Status.HIT})


class TieredCache(Shell):
    """The cache of one engine process."""

    # --- the engine's side --------------------------------------------------------------------------------------------

    def match(
        self,
        request: str,
        keys: Sequence[BlockKey],
        *,
        root: BlockKey,
        tenant: bytes = ev.NO_TENANT,
        resumed: bool = False,
        hint: Hint = NO_HINT,
    ) -> Match:
        """What is there of a prompt, by the keys of its full blocks. What is on the device is held until release.

        `resumed`: the request was preempted and comes back; its own blocks are not counted as hits. `hint`: what the
        client says of its turn, for the policy `session`.
        Ask again to see what the stores answered since. Raises InvalidInput for keys that are none, and for a request
        that is here already with other keys.
        """
        with self._lock:
            arrived = ev.Arrived(
                now_s=self._now_s(),
                request=request,
                keys=tuple(keys),
                root=root,
                tenant=tenant,
                resumed=resumed,
                session=hint.session,
                keep_s=hint.keep_s,
                last=hint.last,
            )
            return self._match(arrived)

    def reserve(
        self, request: str, num_blocks: int, *, load: bool = True, promised: str = "", meet: bool = False
    ) -> tuple[int, ...] | None:
        """Slots for the first `num_blocks` blocks of a request, in order; None if there is no room now.

        Evicts what it must. The first call begins to load what the stores have, if that pays: those slots are not to
        be used before `poll` says that nothing is loading. Later calls add slots. `promised`: a store that is known to
        have all blocks of the prompt; it is not asked, and they are loaded whether that pays or not. `meet`: the caller
        can compute while what lies behind is loaded from its end (`claim`); then, where loading is slow, it is.
        """
        if num_blocks < 0:
            raise InvalidInput(f"a request has no {num_blocks} blocks")
        with self._lock:
            now_s = self._now_s()
            if request in self._old.grants:
                return None
            if self.failed is not None:
                promised = ""  # no store can be promised to a brain that uses none
            wanted = ev.Wanted(
                now_s=now_s, request=request, num_blocks=num_blocks, load=load, promised=promised, meet=meet
            )
            return next((one.slots for one in self._handle(wanted) if isinstance(one, ev.Granted)), None)

    def poll(self, request: str) -> Progress:
        """How far a request is."""
        with self._lock:
            return self._progress(request)

    def claim(self, request: str, num_blocks: int) -> Progress:
        """A request that is `meeting` would compute up to block `num_blocks` next: how far it may. Does not block.

        If `num_claimed` is not beyond `num_ready`, it has come to blocks that are on their way: ask again when
        something has changed, and every few milliseconds, because after a while it may compute them itself.
        """
        with self._lock:
            now_s = self._now_s()
            if request not in self._old.grants:
                self._handle(ev.Claimed(now_s=now_s, request=request, num_blocks=num_blocks))
            return self._progress(request)

    def wait(self, request: str, timeout_s: float) -> Progress:
        """Wait until nothing is being looked up or loaded for a request, or it is stuck. Blocks, until time is over."""
        until_s = self._clock.monotonic() + timeout_s
        with self._lock:
            while True:
                progress = self._progress(request)
                record = self.brain.requests.get(request)
                waiting = progress.loading or (record is not None and bool(record.probes))
                waiting = waiting and not progress.stuck
                left_s = until_s - self._clock.monotonic()
                if not waiting or left_s <= 0 or self._closed:
                    return progress
                self._changed.wait(left_s)

    def wait_layer(self, request: str, layer: int, timeout_s: float) -> bool:
        """Wait until all blocks that are being loaded have their planes up to a layer's on the device, verified.

        Blocks, until the time is over at most. False: it was, or a load failed or hangs. What True allows is to compute
        with that layer; the blocks count as loaded when `poll` says so, and not before.
        """
        until_s = self._clock.monotonic() + timeout_s
        with self._lock:
            if request in self._old.grants:
                return False
            self._progress(request)
            record, generation = self.brain.requests[request], self.generation
            jobs = list(record.loads)
        for job in jobs:
            if job.results is None and self._executor.wait_layer(job.job, layer, until_s - self._clock.monotonic()):
                continue
            with self._lock:  # it is over, or late: then its event says what came of it
                while (
                    job.results is None
                    and not job.stuck
                    and not self._closed
                    and generation == self.generation
                    and (left_s := until_s - self._clock.monotonic()) > 0
                ):
                    self._changed.wait(left_s)
                if job.results is None or not _HIT.issuperset(job.results):
                    return False
        return record.broken is None and generation == self.generation

    def give_up(self, request: str) -> None:
        """Do not wait for stores any longer. Loads under way are cancelled; `poll` says when their slots are usable."""
        with self._lock:
            now_s = self._now_s()
            if request not in self._old.grants:
                self._handle(ev.GaveUp(now_s=now_s, request=request))

    def commit(self, request: str, keys: Sequence[BlockKey]) -> int:
        """The next blocks of a request were computed, on every rank, and are named so. Returns how many it has now.

        A block that another request committed first stays in that one's slot for others; this request keeps its own.
        """
        with self._lock:
            now_s = self._now_s()
            if request not in self._old.grants:
                self._handle(ev.Filled(now_s=now_s, request=request, keys=tuple(keys)))
            if request in self._old.grants:  # since now, perhaps
                num = self._old.num_named.get(request, 0) + len(keys)
                self._old.named(request, num)
                return num
            num = self.brain.requests[request].hold.num_blocks
            self._custody.named(request, num)
            return num

    def saving(self, request: str, store: str) -> bool:
        """Whether blocks of a request are on their way to a store. Does not block."""
        with self._lock:
            record = self.brain.requests.get(request)
            return record is not None and any(
                job.kind in (JobKind.SAVE, JobKind.DEMOTE) and job.into == store and job.request is record
                for job in self.brain.jobs
            )

    def release(self, request: str, text: Text | None = None) -> ev.Finished | None:
        """A request is over, or preempted: give back what it holds. Returns its bill; None if it never reserved.

        `text`: what its blocks are of, for explanations.
        """
        with self._lock:
            now_s = self._now_s()
            if request in self._old.grants:
                self._drop(request)
                return None
            record = self.brain.requests.get(request)
            is_barred = record is not None and record.barred is not None  # it was to be purged: so is its text
            out = self._handle(ev.Left(now_s=now_s, request=request))
            if (explained := self.brain.whys.explained) is not None and explained.request == request:
                self._explanations.add(explained, None if is_barred else text)
            return next((one for one in out if isinstance(one, ev.Finished)), None)

    def explanations(self) -> tuple[float, list[Explained]]:
        """Now, on the clock of their times, and why the last requests hit or missed what they did, newest first."""
        with self._lock:
            return self._clock.monotonic(), self._explanations.newest()

    def pace(self, base_s: float, slope_s: float) -> None:
        """What computing a block costs here, as measured: `base_s`, and `slope_s` more for each block before it."""
        with self._lock:
            paced = ev.Paced(now_s=self._now_s(), base_s=base_s, slope_s=slope_s)
            self._handle(paced)
            self._pace = paced

    def throttle_saves(self, *, on: bool) -> None:
        """The engine is in a hurry, or not any more: what nobody waits for is done a little later. Does not block."""
        self._executor.throttle_saves(on=on)

    # --- who runs it --------------------------------------------------------------------------------------------------

    def purge(
        self, keys: Sequence[BlockKey] = (), *, tenant: bytes = ev.NO_TENANT, timeout_s: float = 60.0
    ) -> tuple[ev.Purged, list[TierPurge]]:
        """Have the last of these blocks gone, with all that builds on it; without keys, all of a tenant.

        `keys` are of the whole path, from its first block on. When this returns, nobody who asks finds them here, on
        the device or in a store, but where the answer says that a store could not be reached; requests that run keep
        what they have, alone. Blocks: for writes that had begun, and for the stores, about `timeout_s` at most. Raises
        InvalidInput while another purge is under way, and where nobody can reach the stores; HeadwaterError if the
        brain fails meanwhile.
        """
        if self._purger is None and self.tiers:
            raise InvalidInput(f"nobody here can remove blocks from {', '.join(self.tiers)}")
        with self._lock:
            order = ev.PurgeBegan(now_s=self._now_s(), keys=tuple(keys), tenant=tenant)
            said = [one for one in self._handle(order) if isinstance(one, ev.Purged)]
            generation = self.generation
        try:
            known = said[0].keys if said else ()
            tiers = self._purger.purge(order, self.tiers, known, timeout_s) if self._purger is not None else []
        finally:
            with self._lock:
                whole = bool(said) and generation == self.generation
                if whole:
                    self._handle(ev.PurgeEnded(now_s=self._clock.monotonic()))
                self._explanations.forget_texts(tenant)
        if not whole:
            raise HeadwaterError("the cache's brain failed meanwhile: some of it may be back, so purge again")
        for tier, num in ((DEVICE, len(known)), *((one.tier, one.num_removed) for one in tiers)):
            self.metrics.count("purged_blocks_total", num, tier=tier)
        return said[0], tiers

    def pin(
        self, name: str, keys: Sequence[BlockKey], *, tenant: bytes = ev.NO_TENANT, ttl_s: float | None = None
    ) -> PinFacts:
        """Keep on the device what is there of a prefix, until `unpin`, for `ttl_s`, or until a purge takes it.

        Counts against `CacheConfig.pin_share`. One of the same name is replaced. Raises InvalidInput, with what there
        is, for more than the budget, and where nothing of the prefix is on the device.
        """
        with self._lock:
            now_s = self._now_s()
            until_s = 0.0 if ttl_s is None else now_s + ttl_s
            self._handle(ev.Pinned(now_s=now_s, name=name, keys=tuple(keys), tenant=tenant, until_s=until_s))
            return next((pin for pin in self.pins() if pin.name == name), PinFacts(name, 0, None))

    def unpin(self, name: str) -> None:
        """Let it go again. Raises InvalidInput for a pin that is not there."""
        with self._lock:
            self._handle(ev.Unpinned(now_s=self._now_s(), name=name))

    def pins(self) -> list[PinFacts]:
        """Every pin, oldest first. Does not block."""
        with self._lock:
            now_s = self._now_s()
            left = ((pin, pin.until_s - now_s if pin.until_s else None) for pin in self.brain.pins)
            return [PinFacts(pin.name, len(pin.keys), left_s) for pin, left_s in left if left_s is None or left_s > 0]

    def choose_policy(self, name: str) -> None:
        """Have blocks leave the device in another order from now on. Raises InvalidInput for a name that is none."""
        with self._lock:
            self._handle(ev.PolicyChosen(now_s=self._now_s(), policy=name))

    def warm(
        self,
        request: str,
        keys: Sequence[BlockKey],
        *,
        root: BlockKey,
        tenant: bytes = ev.NO_TENANT,
        timeout_s: float = 30.0,
    ) -> Match:
        """Bring what slower stores have of a prompt to the fastest, and nothing to the device. Returns what is where.

        As a request that only waits does it: one row at a time, behind nobody's load. `request`: a name of its own.
        Blocks, about `timeout_s` at most. Raises InvalidInput where there are not two stores, or no prefetch.
        """
        if len(self.tiers) < 2 or not self._config.prefetch:
            raise InvalidInput("there is nothing to warm: it needs a second store, and prefetch")
        until_s = self._clock.monotonic() + timeout_s
        num_before = -1
        while True:
            with self._lock:
                now_s = self._now_s()
                arrived = ev.Arrived(now_s=now_s, request=request, keys=tuple(keys), root=root, tenant=tenant)
                try:
                    found = self._match(arrived)
                    while self._is_brought(request) and (left_s := until_s - self._clock.monotonic()) > 0:
                        self._changed.wait(left_s)
                    if request in self.brain.requests:
                        found = self.brain.view(request)
                finally:
                    self.release(request)
            num_there = sum(part.end - part.start for part in found.parts if part.tier in (DEVICE, self.tiers[0]))
            if num_there in (found.num_hit, num_before) or self._clock.monotonic() >= until_s:
                return found
            num_before = num_there

    def _is_brought(self, request: str) -> bool:
        """Whether stores are asked, or read, for a request that only waits."""
        record = self.brain.requests.get(request)
        if record is None or self._closed:
            return False
        copies = (job for job in self.brain.jobs if job.kind is JobKind.PROMOTE)
        return bool(record.probes) or any(job.request is record for job in copies)

    # --- the end ------------------------------------------------------------------------------------------------------

    def drain(self, timeout_s: float) -> bool:
        """Wait until no job is under way. Blocks, until the time is over at most; False if it was."""
        return self._executor.drain(timeout_s)

    def close(self, timeout_s: float = 10.0) -> bool:
        """End all jobs; requests that are still here keep nothing. Idempotent. False if a store did not let go."""
        with self._lock:
            for request in list(self.brain.requests):
                if request in self.brain.requests:  # unless the brain fails at one of them
                    self._handle(ev.Left(now_s=self._clock.monotonic(), request=request))
            for request in list(self._old.grants):
                self._drop(request)
            if self._recorder is not None and not self._closed:
                self._recorder.ended(self.brain.digest())
            self._closed = True
            self._changed.notify_all()
        return self._executor.close(timeout_s)

    def __enter__(self) -> Self:
        """Return self; it closes itself at the end of the block."""
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        """Close."""
        if not self.close():
            log.error("a store's call has not returned: its pages and the store itself must stay until it does")

    # --- inside -------------------------------------------------------------------------------------------------------

    def _match(self, arrived: ev.Arrived) -> Match:
        """A request asks. If the brain fails at that, the next one is asked, which finds nothing. The lock is held."""
        request = arrived.request
        if request in self._old.grants:
            if self._old.grants[request] is not None:
                raise InvalidInput(f"request {request!r} is left over from a brain that failed, and has reserved")
            self._drop(request)  # it has nothing: it is as if it came now
        self._handle(arrived)
        if request not in self.brain.requests:
            self._drop(request)
            self._handle(arrived)
        self._custody.asked(request)
        return self.brain.view(request)

    def _progress(self, request: str) -> Progress:
        record = self.brain.requests.get(request)
        if record is None and request in self._old.grants:
            num_ready = self._old.num_named.get(request, 0)
            loading, stuck = bool(self._old.loads(request)), self._old.waits_in_vain(request)
            return Progress(num_ready, loading=loading, num_expected=num_ready, stuck=stuck, num_claimed=num_ready)
        if record is None:
            raise InvalidInput(f"there is no request {request!r}: it has not asked, or has left")
        ready, loading = record.hold.num_blocks, bool(record.loads)
        self._custody.named(request, ready)
        expected = record.load_end if loading else ready
        meeting = record.meeting
        claimed = record.num_blocks if meeting is None else meeting.claimed
        return Progress(ready, loading, expected, record.stuck, meeting is not None, claimed)
