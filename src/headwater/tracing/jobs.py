"""Spans of a cache's jobs: probes, loads, saves and copies from store to store, below the request they are done for.

A recorder (`cache/executor.py`): it hears what a brain hears and says, with the cache's lock held, and never waits.
Jobs of requests that nobody follows are passed over.
"""

import time
from collections import Counter
from collections.abc import Sequence
from typing import Final

from headwater.cache.state import Brain
from headwater.core import events as ev
from headwater.tracing.otel import OtelSpan, OtelTracing

_NAMES: Final[dict[type[ev.Job], str]] = {
    ev.Probe: "probe",
    ev.Load: "load",
    ev.Save: "save",
    ev.Demote: "demote",
    ev.Promote: "promote",
}


class JobSpans:
    """Makes them. For one cache."""

    def __init__(self, tracing: OtelTracing) -> None:
        self._tracing = tracing
        self._brain: Brain | None = None
        self._open: dict[int, tuple[OtelSpan, OtelSpan]] = {}  # by job: its span, and what that is below

    def began(self, brain: Brain) -> None:
        """Jobs of the one before are cancelled, and this one does not hear how they end."""
        self._brain = brain
        self._give_up()

    def heard(self, event: ev.Event, said: Sequence[ev.Instruction]) -> None:
        """End spans of jobs that ended, begin those of new ones."""
        ended = None
        if isinstance(event, ev.JobDone | ev.JobFailed):
            ended = self._end(event)
        for one in said:
            if isinstance(one, ev.Job):
                self._begin(one, event, ended)

    def refused(self, event: ev.Event) -> None:
        """Nothing changed."""

    def failed(self, event: ev.Event, why: str) -> None:
        """Another brain comes."""

    def ended(self, digest: str) -> None:
        """The cache is closed."""
        self._give_up()

    def _give_up(self) -> None:
        for span, _ in self._open.values():
            span.fail("cancelled")
            span.end(time.monotonic())
        self._open.clear()

    def _begin(self, job: ev.Job, event: ev.Event, ended: OtelSpan | None) -> None:
        request = getattr(event, "request", None) or self._waiting_for(job.job)
        name = request.rpartition("#")[0] if request is not None else ""  # behind it, how often it was preempted
        parent = self._tracing.span_of(name)
        parent = parent or ended  # what follows from a job belongs where that belonged
        if parent is None:
            return
        where: dict[str, str | int] = {"headwater.tier": job.store, "headwater.blocks": len(job.keys)}
        if isinstance(job, ev.StoreCopy):
            where["headwater.target"] = job.target
        title = f"{_NAMES[type(job)]} {job.target if isinstance(job, ev.StoreCopy) else job.store}"
        self._open[job.job] = parent.child(title, at_s=event.now_s, attributes=where), parent

    def _end(self, event: ev.JobDone | ev.JobFailed) -> OtelSpan | None:
        found = self._open.pop(event.job, None)
        if found is None:
            return None
        span, parent = found
        if isinstance(event, ev.JobFailed):
            span.fail(event.failure.value)
        else:
            counts = Counter(result.value for result in event.results)
            span.tell({f"headwater.results.{name}": number for name, number in counts.items()})
            span.tell({"headwater.bytes": event.num_bytes})
        span.end(event.now_s)
        return parent

    def _waiting_for(self, number: int) -> str | None:
        """The request that a job is done for, where the event does not say."""
        assert self._brain is not None, "a brain says something before it began"  # noqa: S101
        record = self._brain.jobs.get(number)
        return record.request.request if record is not None and record.request is not None else None
