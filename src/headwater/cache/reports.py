"""Reports: the events that the executor says. A job has copied, is stuck, done or failed; a store is off or on again.

Measures stores by them and holds failures against them. What follows for requests and blocks is the brain's
(`Brain._end`), which is called once for each job, when it has ended. A report of a job that is not known changes
nothing: it is of an earlier brain's.
"""

from collections.abc import Callable, Mapping
from typing import Final

from headwater.cache.jobs import Jobs
from headwater.cache.moves import Moves
from headwater.cache.placement import TierState
from headwater.cache.records import JobKind, JobRecord
from headwater.cache.saver import Saver
from headwater.core import events as ev
from headwater.core.errors import InvalidInput
from headwater.core.results import STORE_TROUBLE, Reason, Status

_STATUSES: Final = {Reason.LATE: Status.LATE, Reason.CANCELLED: Status.CANCELLED}  # of blocks whose job failed


class Reports:
    """Hears what the executor says, for one brain, whose state it changes. Nothing here blocks."""

    def __init__(
        self,
        tiers: Mapping[str, TierState],
        jobs: Jobs,
        saver: Saver,
        moves: Moves,
        out: list[ev.Instruction],
        *,
        end: Callable[[JobRecord, tuple[Status, ...], Reason | None, float], None],
    ) -> None:
        """`out`: where instructions go. `end`: job, results, failure and now; what follows from the end of a job."""
        self._tiers = tiers
        self._jobs = jobs
        self._saver = saver
        self._moves = moves
        self._out = out
        self._end = end

    def copied(self, event: ev.Copied) -> None:
        """A job reads its slots no more."""
        job = self._jobs.get(event.job)
        if job is not None:
            self._saver.copied(job)

    def stuck(self, event: ev.Stuck) -> None:
        """Who waits for a load begins anew, with other slots; these are the job's until it has ended."""
        job = self._jobs.get(event.job)
        if job is not None and job.kind is JobKind.LOAD and not job.stuck:
            job.stuck = True
            self._jobs.judge(job, None, Reason.LATE, event.now_s)

    def job_done(self, event: ev.JobDone) -> None:
        """A job ended with a result for each block. One with another number of results has failed."""
        job = self._jobs.end(event.job)
        if job is None:
            return
        tier = self._tiers[job.store]
        if len(event.results) != job.end - job.start:
            self._end(job, (Status.FAILED,) * (job.end - job.start), Reason.FAILED, event.now_s)
            return
        whole = STORE_TROUBLE.isdisjoint(event.results)  # one that was cut short tells nothing of speed
        if job.kind is JobKind.LOAD and whole:
            lag_s = event.now_s - job.begun_s - event.seconds if job.alone else None
            tier.loaded(event.num_bytes, event.seconds, lag_s, event.now_s)
        elif job.kind is JobKind.LOAD and Status.LATE in event.results:  # but one that took too long does
            tier.loaded(event.num_bytes, event.seconds, None, event.now_s)
        elif job.kind in (JobKind.SAVE, JobKind.DEMOTE) and whole:
            self._tiers[job.into].saving.measured(event.num_bytes, event.seconds, event.now_s)
        self._end(job, event.results, None, event.now_s)

    def job_failed(self, event: ev.JobFailed) -> None:
        """A job ended with nothing."""
        job = self._jobs.end(event.job)
        if job is not None:
            job.elsewhere = event.elsewhere and event.failure is Reason.LATE
            self._end(
                job, (_STATUSES.get(event.failure, Status.FAILED),) * (job.end - job.start), event.failure, event.now_s
            )

    def store_off(self, event: ev.StoreOff) -> None:
        """A store turned itself off. Raises InvalidInput for one that is not here."""
        tier = self._tier(event.store)
        self._saver.forget(tier)  # it may come back empty
        self._moves.lost(tier.name)
        for breaker in tier.breakers.values():
            breaker.off()
        self._out.append(ev.Tell(kind="tier_switched_off", facts=(("tier", event.store), ("why", event.why))))

    def store_on(self, event: ev.StoreOn) -> None:
        """A store is right again. Raises InvalidInput for one that is not here."""
        for breaker in self._tier(event.store).breakers.values():
            breaker.on()
        self._out.append(ev.Tell(kind="tier_switched_on", facts=(("tier", event.store),)))

    def _tier(self, name: str) -> TierState:
        if name not in self._tiers:
            raise InvalidInput(f"there is no tier {name!r}; there are: {', '.join(self._tiers) or 'none'}")
        return self._tiers[name]
