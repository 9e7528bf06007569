"""GroupJob: what has become of one job of a group so far, member by member. No lock of its own, no clock."""

from collections.abc import Sequence

from headwater.core.events import Demote, Job, JobDone, JobFailed, Load, Probe, Save
from headwater.core.keys import BlockKey
from headwater.core.results import Reason, Status
from headwater.transfer.ranks.group_result import GroupResult, RankAnswer, agree, num_good
from headwater.transfer.ranks.members import Member

End = JobDone | JobFailed


class GroupJob:
    """One job, the members that do it, and their answers. Guarded by the lock of the group."""

    __slots__ = (
        *(Status.CANCELLED, "copied", "ends", "kind", "order", "overdue", "said_copied", "said_stuck", "members"),
        *("killed", "started_s", "told", "waiting", "writes"),
    )

    def __init__(self, order: Job, members: Sequence[int], started_s: float) -> None:
        self.order = order
        self.kind = type(order).__name__.lower()
        self.writes: frozenset[BlockKey] = frozenset(order.keys if isinstance(order, Save | Demote) else ())
        self.members = tuple(members)
        self.started_s = started_s
        self.waiting = set(members)  # those that owe an answer
        self.ends: dict[int, End] = {}
        self.copied: set[int] = set()  # members that read their slots no more
        self.said_copied = False
        self.said_stuck = False
        self.cancelled = False  # somebody asked for that, or nothing that is still being loaded would count
        self.overdue = False  # the deadline passed, and it was cancelled for that
        self.killed = False  # all who did not answer were killed for it: their death is waited for
        self.told = False  # its event was said

    def answer(self, at: int, end: End) -> bool:
        """Take a member's answer in. False if it has answered before."""
        if at not in self.waiting:
            return False
        self.waiting.remove(at)
        self.ends[at] = end
        return True

    def is_decided_by(self, end: End) -> bool:
        """Whether one answer is the group's, whatever the others say: nobody needs to go on.

        A late one is not: the others are late by then too, or about to answer, and all who are late shall be named.
        """
        if isinstance(end, JobFailed):
            return isinstance(self.order, Probe | Load) and end.failure is not Reason.LATE
        return isinstance(self.order, Load) and end.results[:1] != (Status.LATE,) and not num_good(self.order, end)

    def is_decided_at(self, at: int) -> bool:
        """Whether there is nothing to wait for at a member: it has answered, or the job is stuck somewhere."""
        return self.said_stuck or at in self.ends

    @property
    def is_copied(self) -> bool:
        """Whether no member of a Save reads its slots any more, and none of them failed."""
        failed = any(isinstance(end, JobFailed) for end in self.ends.values())
        return isinstance(self.order, Save) and not failed and (self.copied | self.ends.keys()) >= set(self.members)

    @property
    def is_whole(self) -> bool:
        """Whether every answer so far is that all is there."""
        return all(num_good(self.order, end) == len(self.order.keys) for end in self.ends.values())

    def agreed(self, members: Sequence[Member], *, silent: str | None = None) -> GroupResult:
        """What the answers so far come to. With `silent`, who has not answered counts as late, for this reason."""
        ends = dict(self.ends)
        if silent is not None:
            late = JobFailed(now_s=0.0, job=self.order.job, failure=Reason.LATE, why=silent)
            ends |= dict.fromkeys(self.waiting, late)
        telling = {at: end for at, end in ends.items() if not _is_cancelled(end)}
        if isinstance(self.order, Load) and any(num_good(self.order, end) == 0 for end in telling.values()):
            ends = telling  # nothing counts, and the reason is not that the others were cancelled therefore
        return agree(self.order, [RankAnswer(members[at].rank, members[at].page, ends[at]) for at in sorted(ends)])


def _is_cancelled(end: End) -> bool:
    return isinstance(end, JobFailed) and end.failure is Reason.CANCELLED
