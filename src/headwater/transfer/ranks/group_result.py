"""What a group of ranks says of a job, from what each rank said: pure, no threads, no clock.

A block counts only if every page of it was read or written, and everything before it: the shortest contiguous prefix
over ranks. A rank that failed, was late, or answered nonsense counts zero. Who made it shorter is named.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

from headwater.core.events import Demote, Job, JobDone, JobFailed, Load, Probe, Promote, Save
from headwater.core.results import Reason, Status

_GOOD: Final[dict[type[Job], tuple[Status, ...]]] = {
    Probe: (Status.HELD, Status.ABSENT),
    Load: (Status.HIT,),
    Save: (Status.STORED, Status.EXISTS),
    Demote: (Status.STORED, Status.EXISTS),
    Promote: (Status.STORED, Status.EXISTS),
}
_TROUBLE: Final = (Status.LATE, Status.FAILED)  # says something of a rank, not only of a page; and goes on behind it
_WORST_FIRST: Final = (Reason.FAILED, Reason.DOWN, Reason.LATE, Reason.CANCELLED)


@dataclass(frozen=True, slots=True)
class RankAnswer:
    """What one rank said of a job, for one page of each block. `page` is equal where ranks share it."""

    rank: int
    page: object
    end: JobDone | JobFailed


@dataclass(frozen=True, slots=True)
class Blame:
    """A rank because of which fewer blocks count than were asked for, and the reason in a word and in a sentence."""

    rank: int
    reason: str
    why: str


@dataclass(frozen=True, slots=True)
class GroupResult:
    """How a group's job ends: a result per block, or a failure; and by whose fault less came of it than was asked."""

    results: tuple[Status, ...]
    failure: Reason | None = None
    why: str = ""
    on_device: bool = False  # wherever it failed, it was the device
    elsewhere: bool = False  # wherever it failed, its store was not reached
    num_bytes: int = 0
    seconds: float = 0.0
    blamed: tuple[Blame, ...] = ()

    def end(self, job: int, now_s: float) -> JobDone | JobFailed:
        """The event that tells it."""
        if self.failure is not None:
            facts = {"on_device": self.on_device, "elsewhere": self.elsewhere}
            return JobFailed(now_s=now_s, job=job, failure=self.failure, why=self.why, **facts)
        return JobDone(now_s=now_s, job=job, results=self.results, num_bytes=self.num_bytes, seconds=self.seconds)


def num_good(order: Job, end: JobDone | JobFailed) -> int:
    """How many leading blocks one answer counts for."""
    if isinstance(end, JobFailed) or len(end.results) != len(order.keys):
        return 0
    good = _GOOD[type(order)]
    if set(end.results).issubset(good):  # of hundreds of blocks, mostly all
        return len(end.results)
    return sum(1 for _ in takewhile(good.__contains__, end.results))


def agree(order: Job, answers: Sequence[RankAnswer]) -> GroupResult:
    """The result over one answer or more, of all that were asked."""
    counts = [num_good(order, answer.end) for answer in answers]
    short = [answer for answer, num in zip(answers, counts, strict=True) if num == min(counts) < len(order.keys)]
    failures = [failure for answer in answers if (failure := _failure(order, answer.end)) is not None]
    if failures:
        failure = min(failures, key=_WORST_FIRST.index)
        # Who failed is named also where nobody is short: of a job without blocks.
        named = [_blame(order, one) for one in answers if one in short or _failure(order, one.end) is not None]
        said = [one for one in named if one.reason in _TROUBLE] or [one for one in named if one.reason == failure]
        why = "; ".join(f"rank {one.rank}: {one.why}" for one in said)
        failed = [one.end for one in answers if _failure(order, one.end) is not None]
        on_device = all(isinstance(end, JobFailed) and end.on_device for end in failed)
        elsewhere = all(isinstance(end, JobFailed) and end.elsewhere for end in failed)
        blamed = tuple(one for one in named if one.reason != Reason.CANCELLED)
        return GroupResult((), failure, why, on_device=on_device, elsewhere=elsewhere, blamed=blamed)
    done = [(answer, answer.end) for answer in answers if isinstance(answer.end, JobDone)]
    by_page: dict[object, int] = {}
    for answer, end in done:  # a page that several ranks read is one page
        by_page[answer.page] = max(by_page.get(answer.page, 0), end.num_bytes)
    return GroupResult(
        tuple(_combined(order, [end for _, end in done])),
        num_bytes=sum(by_page.values()),
        seconds=max(end.seconds for _, end in done),
        blamed=tuple(_blame(order, answer) for answer in short),
    )


def _failure(order: Job, end: JobDone | JobFailed) -> Reason | None:
    """How an answer failed altogether; None: it has a result for each block."""
    if isinstance(end, JobFailed):
        return end.failure
    return None if len(end.results) == len(order.keys) else Reason.FAILED


def _blame(order: Job, answer: RankAnswer) -> Blame:
    end, num = answer.end, num_good(order, answer.end)
    if isinstance(end, JobFailed):
        return Blame(answer.rank, end.failure.value, end.why or end.failure.value)
    if len(end.results) != len(order.keys):
        return Blame(answer.rank, Reason.FAILED.value, f"{len(end.results)} results for {len(order.keys)} blocks")
    return Blame(answer.rank, end.results[num], f"{num} of {len(order.keys)} blocks, then {end.results[num]}")


def _combined(order: Job, done: Sequence[JobDone]) -> list[Status]:
    """One result per block; all answers have one for each."""
    if len(done) == 1 and set(done[0].results).issubset(_GOOD[type(order)]):
        return list(done[0].results)
    columns = list(zip(*(end.results for end in done), strict=True))
    if isinstance(order, Probe):
        return [Status.HELD if set(column) == {Status.HELD} else Status.ABSENT for column in columns]
    good = _GOOD[type(order)]
    combined: list[Status] = []
    for column in columns:
        bad = next((result for result in column if result not in good), None)
        if bad is not None:
            behind = bad if bad in _TROUBLE else Status.MISS if isinstance(order, Load) else Status.NO_PARENT
            return [*combined, bad, *[behind] * (len(columns) - len(combined) - 1)]
        combined.append(good[0] if good[0] in column else good[-1])
    return combined
