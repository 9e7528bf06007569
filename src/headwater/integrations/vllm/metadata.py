"""What scheduler and workers tell each other with a step: plain values, in the cache's own words (`core/events.py`).

`Orders` go down with the step's metadata, `Report` comes up with its output. Deadlines are on the scheduler's clock;
`sent_s` says what that clock showed, so that a worker on another machine can use its own. No vLLM here.
"""

from dataclasses import dataclass, field, replace
from typing import TypeAlias

from headwater.core.events import Event, Instruction, Job

RankEvent: TypeAlias = tuple[int, Event]


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What the workers shall do in a step."""

    sent_s: float = 0.0
    jobs: tuple[Instruction, ...] = ()  # loads, saves, cancels
    loading: tuple[tuple[str, tuple[int, ...]], ...] = ()  # requests that wait for these jobs, and hear when they ended
    waiting: tuple[int, ...] = ()  # loads that the step itself waits for
    missing: tuple[tuple[str, tuple[int, ...]], ...] = ()  # blocks that were promised and will not be loaded
    leaving: tuple[tuple[str, tuple[int, ...], float], ...] = ()  # ended requests; jobs that read them; until when
    vacated: tuple[int, ...] = ()  # jobs whose blocks vLLM gives to others with this step
    released: tuple[str, ...] = ()  # ended requests whose blocks vLLM needs: they are not kept for saves any more
    idle: bool = False  # nothing is computed, neither in this step nor in one that is under way

    def on_clock(self, now_s: float) -> "Orders":
        """The same with deadlines on another clock, which shows `now_s`."""
        shift_s = now_s - self.sent_s
        jobs = tuple(
            replace(job, deadline_s=job.deadline_s + shift_s) if isinstance(job, Job) else job for job in self.jobs
        )
        leaving = tuple((name, numbers, until_s + shift_s) for name, numbers, until_s in self.leaving)
        return replace(self, sent_s=now_s, jobs=jobs, leaving=leaving)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What became of jobs since the last step, by rank, in order."""

    events: tuple[RankEvent, ...] = ()

    def with_other(self, other: "Report") -> "Report":
        """The reports of two ranks as one."""
        return Report(events=self.events + other.events)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """What a worker says of itself at start: whose bytes its pages are."""

    rank: int
    world: int
    block_tokens: int
    plane_bytes: tuple[int, ...]  # of a block on this rank, as it is stored
    num_blocks: int
    far: bool = False  # whether a process of its own, its executor, writes its pages
    identity: dict[str, bytes | str | int] = field(default_factory=dict)  # the fields of its CacheIdentity

    @property
    def page_bytes(self) -> int:
        """Bytes of a block on this rank."""
        return sum(self.plane_bytes)
