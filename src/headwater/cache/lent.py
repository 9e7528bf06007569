"""The brain of an engine that allocates its device by itself: it decides what is loaded and saved, and counts no slots.

Everything else is the brain's own: probing, loading, saving, breakers, bills, what the cluster hears. What is different
is who owns the device (`index/lent.py`): a request's slots are known while it runs, and the engine must not use them
for others before `reading` says that nothing of the request is read any more, nor while something is loaded into them.
"""

from collections.abc import Collection, Sequence
from typing import Final

from headwater.cache import snapshot
from headwater.cache.placement import how_much_to_load
from headwater.cache.records import JobKind, JobRecord, RequestRecord
from headwater.cache.state import Brain
from headwater.config.cache import CacheConfig, SaveWhen
from headwater.core import events as ev
from headwater.core.errors import InvalidConfig, InvalidInput
from headwater.core.keys import BlockKey
from headwater.core.results import Reason, Status
from headwater.index.base import Hold, PathIndex
from headwater.index.lent import LentIndex, LentSlots
from headwater.index.slots import DeviceSlots

_SEEN: Final = {JobKind.PROBE: Status.HELD, JobKind.LOAD: Status.HIT}  # what these jobs say of a block that is there
_MARKS_PER_SLOT: Final = 8  # blocks of which it is remembered where they were written


class LentBrain(Brain):
    """A brain whose device is another's."""

    def __init__(self, config: CacheConfig, *, withheld: Collection[int] = (), first_job: int = 1) -> None:
        """Raises InvalidConfig for tiers that are written when blocks are hit or evicted: only the engine knows."""
        wrong = [tier.name for tier in config.tiers if tier.save in (SaveWhen.HITS, SaveWhen.EVICTION)]
        if wrong:
            raise InvalidConfig(
                f"{', '.join(wrong)}: hits and evictions are the engine's, so blocks are saved on commit or never"
            )
        super().__init__(config, first_job=first_job)  # the engine itself knows which slots are used
        self._handlers[ev.Lent] = self._lent
        del self._handlers[ev.Wanted]

    def _device(self, config: CacheConfig) -> tuple[PathIndex, DeviceSlots]:
        self._paths = LentIndex(num_marks=_MARKS_PER_SLOT * config.num_slots)
        return self._paths, LentSlots()

    def _first_hold(self, event: ev.Arrived) -> Hold:
        if not 0 <= event.num_local <= len(event.keys):
            raise InvalidInput(f"{event.num_local} blocks of {len(event.keys)} cannot be there")
        return self._paths.take_over(event.keys[: event.num_local])

    def _arrived(self, event: ev.Arrived) -> None:
        is_new = event.request not in self.requests
        super()._arrived(event)
        if is_new:
            self.requests[event.request].num_marks = self._paths.num_marks_made

    def worth(self, name: str, now_s: float) -> int:
        """How many blocks behind those that the engine has would be loaded now. Changes nothing."""
        request = self._request(name)
        start = at = request.hold.num_blocks
        while at < request.num_prompt and (store := self.loader.where(request, at)) is not None:
            tier, end = self.tiers[store], self.loader.row_end(request, at, request.num_prompt)
            size = self.config.block_bytes
            num_blocks = how_much_to_load(tier, self.cost, start=at, end=end, block_bytes=size, now_s=now_s)
            if not tier.breakers[JobKind.LOAD].would_allow(now_s):
                break
            at += num_blocks
            if at < end:
                break
        return at - start

    def _lent(self, event: ev.Lent) -> None:
        request = self._request(event.request)
        first = not request.reserved
        have = request.hold.num_blocks if first else request.num_blocks
        if len(event.slots) < have + (event.num_load if first else 0):
            raise InvalidInput(f"{len(event.slots)} slots for {have} blocks and {event.num_load} to be loaded")
        if not first and event.slots[:have] != self._table(request):
            raise InvalidInput(f"the engine moved blocks of {event.request!r} that are in use")
        if first:
            self._paths.place(request.hold, event.slots[:have])
            request.base = have
            request.reserved_s = event.now_s
        request.own.extend(event.slots[have : have + event.num_load] if first else event.slots[have:])
        if first:
            self.loader.stop_probing(request)
            self.loader.load(request, event.now_s, agreed=True)
            self._settle(request, event.now_s)
            request.own.extend(event.slots[have + event.num_load :])

    def _enter(self, request: RequestRecord, keys: Sequence[BlockKey], now_s: float, *, seen: bool = False) -> None:
        start = request.hold.num_blocks
        end = request.num_prompt + request.num_unnamed
        unnamed = keys[max(0, request.num_prompt - start) : max(0, end - start)]
        if unnamed:  # no store had what they build on: they are to be written again, whatever was believed then
            for tier in self.tiers.values():
                self._paths.forget(unnamed, tier.bit, before=request.num_marks)
        super()._enter(request, keys, now_s, seen=seen)

    def _end(self, job: JobRecord, results: tuple[Status, ...], failure: Reason | None, now_s: float) -> None:
        if job.kind in _SEEN:  # what a store has lost is to be written again
            there = _SEEN[job.kind]
            lacking = (key for key, result in zip(job.keys, results, strict=True) if result != there)
            if failure is None or job.kind is JobKind.LOAD:
                self._paths.forget(lacking, self.tiers[job.store].bit)
        super()._end(job, results, failure, now_s)

    def reading(self, record: RequestRecord) -> tuple[int, ...]:
        """Jobs that may still read blocks of a request."""
        return tuple(job.job for job in self.jobs if job.request is record and job.pin is not None and not job.copied)

    def validate(self) -> None:
        """Raise AssertionError if the state contradicts itself. Reads everything."""
        self.index.validate()
        loading: set[int] = set()
        for name, request in self.requests.items():
            assert request.request == name, "a request under another's name"
            assert self.index.keys(request.hold) == request.keys[: request.hold.num_blocks], "a hold on other blocks"
            assert len(self.index.slots(request.hold)) == request.hold.num_blocks, "a hold without its slots"
            if request.reserved:
                assert list(self._table(request))[: request.hold.num_blocks] == list(self.index.slots(request.hold))
            loading |= {job.job for job in request.loads if job.results is None}
        snapshot.validate_jobs(self, loading)
