"""Which members of a group do a job. Pure but for the turns that it counts.

What ranks share is written once, by one of them, in turns; so is asking for it and promoting it. A Save that builds on
a block which is still being written goes to the rank that writes that block: one rank writes in order, two would race,
and the second would find no parent.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from headwater.core.events import Job, Load, Save
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
        writing = _writing(order, live) if isinstance(order, Save) else ()
        chosen = []
        for holders in self._holders.values():
            behind = [at for at in holders if at in writing]
            chosen += behind or [at for at in holders if self._is_turn(at, order)]
        return chosen

    def _is_turn(self, at: int, order: Job) -> bool:
        member = self._members[at]
        return is_writer(member.shard, member.rank, self._tp_size, turn=self._turns[type(order)])


def _writing(order: Save, live: Iterable[GroupJob]) -> tuple[int, ...]:
    """The members that are writing the block on which a Save builds, if any are."""
    for job in live:
        if order.parent in job.writes and job.order.store == order.store:
            return job.members
    return ()
