"""Jobs under way: who waits for them, what they have queued at each store, and what their ends say of the store."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from headwater.cache.placement import TierState
from headwater.cache.records import JobKind, JobRecord
from headwater.core.breaker import Breaker
from headwater.core.events import Instruction, Tell
from headwater.core.keys import BlockKey
from headwater.core.results import BAD_PAGE, PUT_HELD, STORE_TROUBLE, Reason, Status

_GOOD: Final = PUT_HELD | {Status.HIT}
_BREAKERS: Final = {  # which of a store's breakers a job is a call of
    JobKind.PROBE: JobKind.PROBE,
    JobKind.LOAD: JobKind.LOAD,
    JobKind.SAVE: JobKind.SAVE,
    JobKind.DEMOTE: JobKind.SAVE,
}
_WRITES: Final = frozenset({JobKind.SAVE, JobKind.DEMOTE, JobKind.PROMOTE})
UNREAD: Final = Status.MISS  # of a Demote: its source did not give the block
_PATIENCE_S: Final = 0.1  # a Probe that an engine gave up after this speaks against the store


class Jobs:
    """The book of jobs, and the list of instructions they go out by. Says when a store is left alone, and when not."""

    def __init__(
        self, tiers: Mapping[str, TierState], block_bytes: int, out: list[Instruction], *, first: int = 1
    ) -> None:
        self.tiers = tiers
        self.block_bytes = block_bytes
        self.out = out
        self._jobs: dict[int, JobRecord] = {}
        self._next = first

    def __getitem__(self, job: int) -> JobRecord:
        """A job that is under way."""
        return self._jobs[job]

    def get(self, job: int) -> JobRecord | None:
        """A job that is under way; None if it has ended."""
        return self._jobs.get(job)

    def __iter__(self) -> Iterator[JobRecord]:
        """All jobs under way, oldest first."""
        return iter(self._jobs.values())

    def begin(
        self,
        kind: JobKind,
        tier: TierState,
        start: int,
        end: int,
        now_s: float,
        *,
        num_bytes: int | None = None,
        **more: Any,
    ) -> JobRecord:
        """Write a job down, and what it queues: `num_bytes`, else all its blocks. A breaker's probe is used up."""
        if num_bytes is None:
            num_bytes = 0 if kind is JobKind.PROBE else (end - start) * self.block_bytes
        job = JobRecord(
            job=self._next,
            kind=kind,
            store=tier.name,
            start=start,
            end=end,
            num_bytes=num_bytes,
            begun_s=now_s,
            alone=not tier.queued_load_bytes,
            **more,
        )
        breaker = self._breaker(job)
        if breaker is not None:
            breaker.allows(now_s)
        self._jobs[job.job] = job
        self._next += 1
        self._queue(job, num_bytes)
        return job

    def end(self, number: int) -> JobRecord | None:
        """Strike a job out; None if it has ended before."""
        job = self._jobs.pop(number, None)
        if job is not None:
            self._queue(job, -job.num_bytes)
        return job

    def judge(self, job: JobRecord, results: Sequence[Status] | None, failure: Reason | None, now_s: float) -> None:
        """Tell the store's breaker how a job went.

        A Promote says nothing: two stores took part, and nobody knows which of them it was. So it is no probe either.
        A Demote is a write of its target's; one whose source gave nothing proves nothing, and one whose source does
        not answer speaks against that. What never began, because it waited for another job, speaks against nobody.
        """
        if job.elsewhere:
            self._blame_source(job, now_s)
            return
        breaker = self._breaker(job)
        if breaker is None:
            return
        kind = _BREAKERS[job.kind].value
        hesitant = job.kind is JobKind.PROBE and now_s - job.begun_s >= _PATIENCE_S  # the engine did not wait for it
        unread = job.kind is JobKind.DEMOTE and results is not None and results[0] == UNREAD
        if (failure is Reason.CANCELLED and not hesitant) or unread:
            breaker.unproven(now_s)
        elif failure is not None or _all_trouble(results or ()):
            if breaker.failed(now_s):
                self._tell("tier_paused", tier=job.into, job=kind, why=str(failure or Reason.FAILED))
        elif breaker.succeeded():
            self._tell("tier_resumed", tier=job.into, job=kind)

    def _blame_source(self, job: JobRecord, now_s: float) -> None:
        """A job was late, and its store had no part in it. `end` has struck it out, and perhaps what it waited for."""
        own = self._breaker(job)
        if own is not None:
            own.unproven(now_s)
        if job.kind is JobKind.DEMOTE and self.get(job.after) is None:  # so it began, and hung in its source
            kind = JobKind.LOAD
            if self.tiers[job.store].breakers[kind].failed(now_s):
                self._tell("tier_paused", tier=job.store, job=kind.value, why=str(Reason.LATE))

    def _breaker(self, job: JobRecord) -> Breaker | None:
        """Whose word a job's end is; None: nobody's."""
        kind = _BREAKERS.get(job.kind)
        return None if kind is None else self.tiers[job.into].breakers[kind]

    def writing(self, store: str, path: Sequence[BlockKey], start: int, end: int) -> Iterator[JobRecord]:
        """Jobs that write some of a path's blocks [start, end) to a store, newest first."""
        for job in reversed(self._jobs.values()):
            at = max(start, job.start)
            overlaps = job.kind in _WRITES and job.into == store and at < min(end, job.end)
            if overlaps and job.keys[at - job.start] == path[at]:
                yield job

    def facts(self) -> list[object]:
        """All that is under way, and the next number, for snapshots."""
        return [
            self._next,
            *self._facts(),
        ]

    def _facts(self) -> list[object]:
        return [
            [
                job.job,
                job.kind,
                job.store,
                job.start,
                job.end,
                job.request and job.request.request,
                job.target,
                job.copied,
                job.cancelled,
                job.slots,
                job.results,
                job.begun_s,
                job.alone,
                job.after,
                *(["stuck"] if job.stuck else []),
            ]
            for job in self
        ]

    def _queue(self, job: JobRecord, num_bytes: int) -> None:
        if job.kind is JobKind.LOAD:
            self.tiers[job.store].queued_load_bytes += num_bytes
        elif job.kind is not JobKind.PROBE:
            self.tiers[job.into].queued_save_bytes += num_bytes

    def _tell(self, kind: str, **facts: str) -> None:
        self.out.append(Tell(kind=kind, facts=tuple(facts.items())))


def _all_trouble(results: Sequence[Status]) -> bool:
    """Whether a store did nothing but fail. What comes behind the first failure was not even tried."""
    return not _GOOD.intersection(results) and not STORE_TROUBLE.isdisjoint(results)


def reason_of(result: Status) -> Reason:
    """Why a block that a store said it had was not loaded."""
    if result in BAD_PAGE:
        return Reason.CORRUPT
    return {Status.MISS: Reason.EVICTED, Status.LATE: Reason.TOO_LATE, Status.CANCELLED: Reason.TOO_LATE}.get(
        result, Reason.FAILED
    )
