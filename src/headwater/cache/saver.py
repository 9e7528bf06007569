"""Brings finished blocks from the device to the stores: on commit, after hits, or before they are evicted.

A Save begins at the first block of its path that the store may lack, so that a prefix has no hole; who carries it out
leaves out what is there. Blocks are marked as saved when the job begins, so that nobody writes them twice, and unmarked
when it turns out otherwise. What a store cannot keep up with is dropped, and counted by reason; the next commit on the
same path tries again.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from headwater.cache.accounts import Accounts
from headwater.cache.jobs import Jobs
from headwater.cache.placement import TierState
from headwater.cache.records import JobKind, JobRecord, RequestRecord
from headwater.config import SaveWhen
from headwater.core.events import Cancel, Save
from headwater.core.keys import BlockKey
from headwater.core.results import PUT_HELD, Status
from headwater.index.base import Hold, PathIndex, Victim

_MAX_CLEANING: Final = 8  # leaves that are saved at one event, where blocks are saved on eviction


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
                refusal = self._save(tier, self._index.pin(request.hold), request.keys, now_s, request=request)
            if refusal is not None:  # counted once, though the next commit tries the whole path again
                self._accounts.add("dropped_blocks_total", num_fresh, tier=tier.name, reason=refusal)

    def hit(self, request: RequestRecord, now_s: float) -> None:
        """A request's blocks were hit: write those that were hit often enough."""
        if self._evicting is None:
            return  # hits are the engine's, and not counted
        for tier in self._of[SaveWhen.HITS]:
            num_hot = self._evicting.num_hot(request.hold, tier.config.save_after_hits)
            if num_hot and tier.refuses_save(self._jobs.block_bytes, now_s) is None:  # if it does: at the next hit
                pin = self._index.pin(request.hold, num_hot)
                self._save(tier, pin, request.keys, now_s, request=request)

    def clean(self, now_s: float) -> None:
        """Room is short: write those that leave next, where blocks are written on eviction."""
        if self._evicting is None:
            return
        for tier in self._of[SaveWhen.EVICTION]:
            while tier.num_pinning < _MAX_CLEANING and tier.refuses_save(self._jobs.block_bytes, now_s) is None:
                pin = self._evicting.pin_coldest(tier.bit)
                if pin is None or self._save(tier, pin, self._index.keys(pin), now_s, request=None) is not None:
                    break  # what leaves unsaved is counted when it leaves

    def make_way(self, num_blocks: int) -> None:
        """Room is short, and saves that have not begun keep blocks on the device: give the newest of them up."""
        for job in reversed(list(self._jobs)):
            if num_blocks <= 0:
                return
            running = job.request is not None and job.request.reserved and not job.request.gone  # and keeps them anyway
            if job.pin is not None and not (job.copied or job.cancelled or running):
                job.cancelled = True
                self._jobs.out.append(Cancel(job=job.job))
                num_blocks -= job.pin.num_blocks

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

    def ended(self, job: JobRecord, results: Sequence[Status], request: RequestRecord | None, now_s: float) -> None:
        """A Save has ended: what is not held is not marked any more."""
        self.copied(job)
        pin = job.pin
        first_bad = next((i for i, result in enumerate(results) if result not in PUT_HELD), None)
        if pin is None or first_bad is None:
            return
        bit = self._jobs.tiers[job.store].bit
        for result in results:
            if result not in PUT_HELD:
                self._accounts.add("dropped_blocks_total", 1, tier=job.store, reason=result)
        lost_path = results[first_bad] == Status.NO_PARENT and first_bad == 0 and job.start > 0
        start = 0 if lost_path else job.start + first_bad
        self._index.mark(pin, start, job.end, bit=bit, on=False)
        if request is not None:  # what was saved behind it meanwhile lacks its prefix there: to be written again, too
            self._index.mark(request.hold, start, request.hold.num_blocks, bit=bit, on=False)
        if lost_path and request is not None:  # the store evicted the blocks before: write the whole path
            tier = self._jobs.tiers[job.store]
            if tier.refuses_save(self._jobs.block_bytes, now_s) is None:
                self._save(tier, self._index.pin(request.hold), request.keys, now_s, request=request)

    def _save(
        self, tier: TierState, pin: Hold, path: Sequence[BlockKey], now_s: float, *, request: RequestRecord | None
    ) -> str | None:
        """Write what a pinned path lacks in a store; or say why that is dropped. Takes the pin over."""
        start, end = self._index.num_marked(pin, tier.bit), pin.num_blocks
        num_bytes = self._index.num_lacking(pin, start, tier.bit) * self._jobs.block_bytes  # the rest is there
        refusal = tier.refuses_save(num_bytes, now_s) if start < end else None
        if start == end or refusal is not None:
            self._index.unpin(pin)
            return refusal
        root, tenant = self.origins[path[0]] if request is None else (request.root, request.tenant)
        row = {"keys": tuple(path[start:end]), "parent": path[start - 1] if start else root}
        job = self._jobs.begin(
            JobKind.SAVE, tier, start, end, now_s, num_bytes=num_bytes, request=request, pin=pin, **row
        )
        tier.num_pinning += 1
        self._index.mark(pin, start, end, bit=tier.bit, on=True)
        self._jobs.out.append(
            Save(
                job=job.job,
                store=tier.name,
                keys=job.keys,
                slots=tuple(self._index.slots(pin, start)),
                parent=job.parent,
                depth=start,
                tenant=tenant,
                deadline_s=now_s + tier.config.save_timeout_s,
            )
        )
        return None
