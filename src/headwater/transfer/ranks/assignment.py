"""Which members of a group do a job. Pure but for the turns that it counts.

What ranks share is written once, by one of them, in turns; so is asking for it and promoting it. A Save or Demote that
builds on a block which is still being written, wherever to, goes to the rank that writes that block: one rank writes in
order, two would race, and the second would find no parent. One that comes after another job goes where that is done.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from headwater.core.events import Demote, Job, Load, Save
from headwater.layout.shard import is_writer
from headwater.transfer.ranks.group_job import GroupJob
from headwater.transfer.ranks.members import Member, Page


class Assignment:
    """Who holds which page, and whose turn it is."""

    def __init__(self, members: Sequence[Member], tp_size: int) -> None:
        self._members = tuple(members)
        self._tp_size = tp_size
        self._turns: Counter[type[Job]] = Counter()  # by sort of job: else saves and probes might each have their rank
        self._holders: dict[Page, list[int]] = {}
        for at, member in enumerate(members):
            self._holders.setdefault(member.page, []).append(at)

    def who(self, order: Job, live: Iterable[GroupJob]) -> list[int]:
        """The members that do a job: all for a Load, for the rest one per page. `live`, newest first: what is going on.

        Takes a turn.
        """
        if isinstance(order, Load):
            return list(range(len(self._members)))
        self._turns[type(order)] += 1
        writing = _writing(order, live) if isinstance(order, Save | Demote) else ()
        chosen = []
        for holders in self._holders.values():
            behind = [at for at in holders if at in writing]
            chosen += behind or [at for at in holders if self._is_turn(at, order)]
        return chosen

    def _is_turn(self, at: int, order: Job) -> bool:
        member = self._members[at]
        return is_writer(member.shard, member.rank, self._tp_size, turn=self._turns[type(order)])


def _writing(order: Save | Demote, live: Iterable[GroupJob]) -> tuple[int, ...]:
    """The members of the job that a write comes after, or that are writing the block on which it builds, if any are."""
    behind: tuple[int, ...] = ()
    for job in live:
        if job.order.job == order.after:
            return job.members
        if order.parent in job.writes:
            behind = behind or job.members
    return behind
