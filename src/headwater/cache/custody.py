"""Who uses which slots, and which jobs are under way: written down by the shell, whatever the brain thinks.

A brain that failed cannot be asked. What it promised still holds: requests compute in the slots that they were granted,
and a job that was begun may write or read its slots until it has ended (rule 2). So whoever follows that brain is told
to keep off them, and this book says which they are, and when they are free.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from headwater.core.events import Job, Load, Save


@dataclass(frozen=True, slots=True)
class OpenJob:
    """A job that has not ended."""

    slots: tuple[int, ...]  # that it may still write or read
    request: str | None  # for whom it is done
    loads: bool
    stuck: bool = False  # a load that may never end


@dataclass(slots=True)
class Custody:
    """The book of one brain, or of all that were before it. Not safe from several threads."""

    grants: dict[str, tuple[int, ...] | None] = field(default_factory=dict)  # slots of requests; None: it has none yet
    num_named: dict[str, int] = field(default_factory=dict)  # blocks that a request has, as it was told
    jobs: dict[int, OpenJob] = field(default_factory=dict)
    next_job: int = 1

    def asked(self, request: str) -> None:
        """A request is here."""
        self.grants.setdefault(request)

    def granted(self, request: str, slots: tuple[int, ...]) -> None:
        """A request has these slots, all of them."""
        self.grants[request] = slots

    def named(self, request: str, num_blocks: int) -> None:
        """A request was told that so many blocks are there and have names."""
        self.num_named[request] = num_blocks

    def left(self, request: str) -> None:
        """A request is over; jobs may still use its slots."""
        self.grants.pop(request, None)
        self.num_named.pop(request, None)

    def began(self, job: Job, request: str | None) -> None:
        """A job may use its slots."""
        slots = job.slots if isinstance(job, Load | Save) else ()
        self.jobs[job.job] = OpenJob(slots, request, isinstance(job, Load))
        self.next_job = max(self.next_job, job.job + 1)

    def copied(self, number: int) -> None:
        """A Save reads its slots no more."""
        job = self.jobs.get(number)
        if job is not None:
            self.jobs[number] = replace(job, slots=())

    def stuck(self, number: int) -> None:
        """A Load may never end: nobody is to wait for it."""
        job = self.jobs.get(number)
        if job is not None:
            self.jobs[number] = replace(job, stuck=True)

    def ended(self, number: int) -> None:
        """A job touches nothing any more."""
        self.jobs.pop(number, None)

    # --- reading it ---------------------------------------------------------------------------------------------------

    def slots(self) -> set[int]:
        """Every slot that somebody may use."""
        used = {slot for slots in self.grants.values() if slots is not None for slot in slots}
        return used.union(*(job.slots for job in self.jobs.values()))

    def loads(self, request: str) -> tuple[int, ...]:
        """Jobs that load blocks of a request."""
        return tuple(number for number, job in self._of(request) if job.loads)

    def waits_in_vain(self, request: str) -> bool:
        """Whether one of the loads of a request may never end."""
        return any(job.stuck for _, job in self._of(request))

    def reads(self, request: str) -> tuple[int, ...]:
        """Jobs that may still read blocks of a request."""
        return tuple(number for number, job in self._of(request) if not job.loads and job.slots)

    def take_over(self, other: "Custody") -> None:
        """What another book says is written down here; the other one is not used any more."""
        self.grants |= other.grants
        self.num_named |= other.num_named
        self.jobs |= other.jobs
        self.next_job = max(self.next_job, other.next_job)

    def _of(self, request: str) -> Iterator[tuple[int, OpenJob]]:
        return ((number, job) for number, job in self.jobs.items() if job.request == request)
