"""Brings finished blocks from the device to the stores: on commit, after hits, or before they are evicted.

The device is read once: what a faster store has, or is just being given by a Save, comes to the slower ones from there
(Demote), as it was sealed. A Demote of what is still being saved names that Save (`after`), and goes out with it: so it
is lost neither when the request leaves nor where a brain hears of the end of a job long after it. If its source turns
out not to have a block, the block is saved from the device after all, if it is still there.

A Save or Demote begins at the first block of its path that the store may lack, so that a prefix has no hole; who
carries it out leaves out what is there. Blocks are marked as stored when the job begins, so that nobody writes them
twice, and unmarked when it turns out otherwise. What a store cannot keep up with is dropped, and counted by reason; the
next commit on the same path tries again.
"""

from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any, Final

from headwater.cache.accounts import Accounts
from headwater.cache.jobs import UNREAD, Jobs
from headwater.cache.placement import TierState
from headwater.cache.records import JobKind, JobRecord, RequestRecord
from headwater.config.cache import SaveWhen
from headwater.core.breaker import BreakerState
from headwater.core.events import Cancel, Demote, Save
from headwater.core.keys import BlockKey
from headwater.core.results import PUT_HELD, Status
from headwater.index.base import Hold, PathIndex, Victim

_MAX_CLEANING: Final = 8  # leaves that are saved at one event, where blocks are saved on eviction
_LOST: Final = "source_evicted"  # why a block is dropped that neither the source of a Demote nor the device has


class Saver:
    """Decides what is written, and remembers what became of it."""

    def __init__(self, index: PathIndex, jobs: Jobs, accounts: Accounts) -> None:
        self._index = index
        self._evicting = index.evicting()
        self._jobs = jobs
        self._accounts = accounts
        self._of = {when: [tier for tier in jobs.tiers.values() if tier.config.save is when] for when in SaveWhen}
        # Root and tenant of each known first block: for saves that are nobody's, when blocks are evicted.
        self.origins: dict[BlockKey, tuple[BlockKey, bytes]] = {}

    def entered(self, request: RequestRecord, first: BlockKey) -> None:
        """A request's first block is known to the index."""
        if self._evicting is not None:
            self.origins[first] = (request.root, request.tenant)

    def commit(self, request: RequestRecord, num_fresh: int, now_s: float) -> None:
        """A request's last blocks were finished, or loaded: write them where that is the rule."""
        for tier in self._of[SaveWhen.COMMIT]:
            refusal = tier.refuses_save(self._jobs.block_bytes, now_s)
            if refusal is None:
                refusal = self._bring(tier, self._pin(request), request.keys, now_s, request=request)
            if refusal is not None:  # counted once, though the next commit tries the whole path again
                self._accounts.add("dropped_blocks_total", num_fresh, tier=tier.name, reason=refusal)

    def hit(self, request: RequestRecord, now_s: float) -> None:
        """A request's blocks were hit: write those that were hit often enough."""
        if self._evicting is None:
            return  # hits are the engine's, and not counted
        for tier in self._of[SaveWhen.HITS]:
            num_hot = self._evicting.num_hot(request.hold, tier.config.save_after_hits)
            if num_hot and tier.refuses_save(self._jobs.block_bytes, now_s) is None:  # if it does: at the next hit
                pin = self._pin(request, num_hot)
                self._bring(tier, pin, request.keys, now_s, request=request)

    def clean(self, now_s: float) -> None:
        """Room is short: write those that leave next, where blocks are written on eviction."""
        if self._evicting is None:
            return
        for tier in self._of[SaveWhen.EVICTION]:
            for _ in range(_MAX_CLEANING - tier.num_pinning):
                if tier.refuses_save(self._jobs.block_bytes, now_s) is not None:
                    break
                pin = self._evicting.pin_coldest(tier.bit)
                if pin is None or self._bring(tier, pin, self._index.keys(pin), now_s, request=None) is not None:
                    break  # what leaves unsaved is counted when it leaves

    def make_way(self, num_blocks: int) -> None:
        """Room is short, and saves that have not begun keep blocks on the device: give the newest of them up.

        What was to be demoted from there is given up with them; other demotions keep nothing on the device.
        """
        for job in reversed(list(self._jobs)):
            if num_blocks <= 0:
                return
            running = job.request is not None and job.request.reserved and not job.request.gone  # and keeps them anyway
            if job.pin is not None and not (job.copied or job.cancelled or running):
                num_blocks -= job.pin.num_blocks
                for one in [job, *(one for one in self._jobs if one.kind is JobKind.DEMOTE and one.after == job.job)]:
                    if not one.cancelled:
                        one.cancelled = True
                        self._jobs.out.append(Cancel(job=one.job))

    def forget(self, tier: TierState) -> None:
        """A store was lost: nothing is known to be in it any more."""
        self._index.unmark(tier.bit)

    def on_evicted(self, victims: Iterable[Victim]) -> None:
        """Blocks were evicted."""
        for victim in victims:
            if victim.depth == 0:
                self.origins.pop(victim.key, None)
            for tier in self._of[SaveWhen.EVICTION]:
                if not victim.stored & tier.bit:
                    self._accounts.add("dropped_blocks_total", 1, tier=tier.name, reason="evicted_unsaved")

    def copied(self, job: JobRecord) -> None:
        """A Save has read its blocks."""
        if job.pin is not None and not job.copied:
            job.copied = True
            self._jobs.tiers[job.store].num_pinning -= 1
            self._index.unpin(job.pin)

    def saved(self, job: JobRecord, results: Sequence[Status], request: RequestRecord | None, now_s: float) -> None:
        """A Save has ended: what is not held is not marked any more."""
        self.copied(job)
        first_bad = _first_bad(results)
        if first_bad is not None:
            self._drop(job, results)
            self._not_held(job, results, first_bad, request, now_s)

    def demoted(self, job: JobRecord, results: Sequence[Status], request: RequestRecord | None, now_s: float) -> None:
        """A Demote has ended. What its source did not have is brought in another way, or dropped."""
        first_bad = _first_bad(results)
        if first_bad is None:
            return
        if results[first_bad] != UNREAD:
            self._drop(job, results)
            self._not_held(job, results, first_bad, request, now_s)
            return
        source, tier, start = self._jobs.tiers[job.store], self._jobs.tiers[job.into], job.start + first_bad
        for one in (source, tier):
            self._unmark(job, one.bit, start, request)
        refusal = self._elsewhere(job, source, start, request, now_s)
        if refusal is not None:
            num_lost = sum(result not in PUT_HELD for result in results)
            self._accounts.add("dropped_blocks_total", num_lost, tier=tier.name, reason=refusal)

    def _elsewhere(
        self, job: JobRecord, source: TierState, start: int, request: RequestRecord | None, now_s: float
    ) -> str | None:
        """Bring what the source of a Demote did not have from wherever it is; or say why that is dropped."""
        owner = request if request is not None and request.hold.num_blocks >= job.end else None
        if owner is not None and owner.num_shared(job.end) < job.end:
            return _LOST
        pin = self._index.pin(owner.hold, job.end) if owner is not None else self._repin(job)
        if pin is None:
            return _LOST
        path = owner.keys if owner is not None else self._index.keys(pin)
        for one in self._jobs.writing(source.name, path, start, job.end):
            if one.kind is not JobKind.PROMOTE:  # it is on its way there again, and what becomes of it will be heard
                at = max(start, one.start)
                pairs = zip(one.keys[at - one.start :], path[at : job.end], strict=False)
                num_shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))  # then paths part
                self._index.mark(pin, at, at + num_shared, bit=source.bit, on=True)
        return self._bring(self._jobs.tiers[job.into], pin, path, now_s, request=owner)

    def _repin(self, job: JobRecord) -> Hold | None:
        """Where the engine evicts by itself, only the request could say whether its blocks are still there."""
        return None if job.pin is None or self._evicting is None else self._evicting.repin(job.pin)

    def _drop(self, job: JobRecord, results: Sequence[Status]) -> None:
        for result in results:
            if result not in PUT_HELD:
                self._accounts.add("dropped_blocks_total", 1, tier=job.into, reason=result)

    def _not_held(
        self, job: JobRecord, results: Sequence[Status], first_bad: int, request: RequestRecord | None, now_s: float
    ) -> None:
        """A store did not take all of a row."""
        tier = self._jobs.tiers[job.into]
        lost_path = results[first_bad] == Status.NO_PARENT and first_bad == 0 and job.start > 0
        self._unmark(job, tier.bit, 0 if lost_path else job.start + first_bad, request)
        if lost_path and request is not None and tier.refuses_save(self._jobs.block_bytes, now_s) is None:
            # The store evicted the blocks before: write the whole path.
            self._bring(tier, self._pin(request), request.keys, now_s, request=request)

    def _pin(self, request: RequestRecord, num_blocks: int | None = None) -> Hold:
        """The first blocks of a request, or all, of those that may be written."""
        num_held = request.hold.num_blocks
        return self._index.pin(request.hold, request.num_shared(num_held if num_blocks is None else num_blocks))

    def _unmark(self, job: JobRecord, bit: int, start: int, request: RequestRecord | None) -> None:
        """A store lacks the blocks of a job from `start` on."""
        if job.pin is not None:
            self._index.mark(job.pin, start, job.end, bit=bit, on=False)
        if request is not None:  # what was saved behind it meanwhile lacks its prefix there: to be written again, too
            self._index.mark(request.hold, start, request.hold.num_blocks, bit=bit, on=False)

    def _bring(
        self, tier: TierState, pin: Hold, path: Sequence[BlockKey], now_s: float, *, request: RequestRecord | None
    ) -> str | None:
        """Write what a pinned path lacks in a store; or say why that is dropped. Takes the pin over."""
        start, end = self._index.num_marked(pin, tier.bit), pin.num_blocks
        num_bytes = self._index.num_lacking(pin, start, tier.bit) * self._jobs.block_bytes  # the rest is there
        refusal = tier.refuses_save(num_bytes, now_s) if start < end else None
        if start == end or refusal is not None:
            self._index.unpin(pin)
            return refusal
        source = self._source(tier, pin)
        after = self._comes_after(source, tier, path, start, end)
        root, tenant = self.origins[path[0]] if request is None else (request.root, request.tenant)
        job = self._jobs.begin(
            JobKind.SAVE if source is None else JobKind.DEMOTE,
            source or tier,
            start,
            end,
            now_s,
            num_bytes=num_bytes,
            keys=tuple(path[start:end]),
            parent=path[start - 1] if start else root,
            request=request,
            pin=pin,
            target=None if source is None else tier.name,
            copied=source is not None,
            after=after,
        )
        self._index.mark(pin, start, end, bit=tier.bit, on=True)
        row: dict[str, Any] = {"job": job.job, "keys": job.keys, "parent": job.parent, "after": after}
        deadline_s = now_s + tier.config.save_timeout_s
        if source is None:
            tier.num_pinning += 1
            row |= {"slots": tuple(self._index.slots(pin, start)), "depth": start, "tenant": tenant}
            self._jobs.out.append(Save(store=tier.name, deadline_s=deadline_s, **row))
        else:
            self._index.unpin(pin)  # nothing keeps it on the device
            deadline_s += source.config.save_timeout_s if after else 0.0
            self._jobs.out.append(Demote(store=source.name, target=tier.name, deadline_s=deadline_s, **row))
        return None

    def _source(self, tier: TierState, pin: Hold) -> TierState | None:
        """The fastest store before another that is believed to have a whole path, and can be read."""
        for source in self._jobs.tiers.values():
            if source is tier:
                return None
            up = source.breakers[JobKind.LOAD].state is BreakerState.CLOSED
            if up and self._index.num_marked(pin, source.bit) == pin.num_blocks:
                return source
        return None

    def _comes_after(
        self, source: TierState | None, tier: TierState, path: Sequence[BlockKey], start: int, end: int
    ) -> int:
        """The job that has to end before a row can be written: it gives it to the source, or brings what is before."""
        if source is not None:
            return next((job.job for job in self._jobs.writing(source.name, path, start, end)), 0)
        parents = self._jobs.writing(tier.name, path, start - 1, start) if start else ()
        return next((job.job for job in parents if job.kind is JobKind.DEMOTE), 0)


def _first_bad(results: Sequence[Status]) -> int | None:
    return next((i for i, result in enumerate(results) if result not in PUT_HELD), None)
