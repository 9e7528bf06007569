"""The roster of a group: which ranks are up, silent or dead, and how each has done. Counts and names; no threads.

Everything here wants the lock of the group held (`ranks.py`).
"""

import enum
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from headwater.core.results import Reason
from headwater.metrics import Metrics
from headwater.transfer.ranks.group_result import Blame

log: Final = logging.getLogger("headwater")

_TROUBLE: Final = (Reason.FAILED.value, Reason.LATE.value)


class RankState(enum.StrEnum):
    """Whether a rank can be given work."""

    UP = "up"
    SILENT = "silent"  # it owes answers that are long overdue, and may still touch slots
    DEAD = "dead"  # its process ended: it owes nothing, and touches nothing


@dataclass(frozen=True, slots=True)
class RankReport:
    """How a rank has done so far."""

    rank: int
    state: RankState = RankState.UP
    why: str = ""  # it is not up
    num_answers: int = 0
    num_slowest: int = 0  # it was the last to answer
    num_failed: int = 0  # jobs that it failed
    num_late: int = 0  # jobs that it was late for
    num_short: int = 0  # jobs that ended early because of a page that it did not have
    seconds: float = 0.0  # from asking it to its answers


class Roster:
    """The ranks of one group."""

    def __init__(self, tp_size: int, metrics: Metrics) -> None:
        self._ranks = [RankReport(rank) for rank in range(tp_size)]
        self._metrics = metrics

    def reports(self) -> tuple[RankReport, ...]:
        """All ranks."""
        return tuple(self._ranks)

    def unfit(self) -> str | None:
        """Why the group can do nothing now: the ranks that are not up. None: all are."""
        bad = [one for one in self._ranks if one.state is not RankState.UP]
        return "; ".join(f"rank {one.rank} is {one.state.value}: {one.why}" for one in bad) or None

    def state(self, rank: int) -> RankState:
        """How a rank is."""
        return self._ranks[rank].state

    def answered(self, rank: int, seconds: float, *, job: str, last: bool) -> None:
        """A rank answered, so long after it was asked; as the last of those that were asked."""
        one = self._ranks[rank]
        self._ranks[rank] = replace(
            one,
            num_answers=one.num_answers + 1,
            num_slowest=one.num_slowest + last,
            seconds=one.seconds + seconds,
        )
        self._metrics.observe("rank_seconds", seconds, rank=str(rank), job=job)

    def blame(self, blamed: Sequence[Blame], *, job: str, store: str, num_blocks: int) -> None:
        """Less came of a job than was asked for, because of these. One warning, if one of them is in trouble."""
        for blame in blamed:
            one = self._ranks[blame.rank]
            self._ranks[blame.rank] = replace(
                one,
                num_failed=one.num_failed + (blame.reason == Reason.FAILED),
                num_late=one.num_late + (blame.reason == Reason.LATE),
                num_short=one.num_short + (blame.reason not in _TROUBLE),
            )
            self._metrics.count("rank_trouble_total", rank=str(blame.rank), job=job, reason=blame.reason)
        said = "; ".join(f"rank {blame.rank}: {blame.why}" for blame in blamed if blame.reason in _TROUBLE)
        if said:  # a page that was evicted, or turned out bad, is no rank's trouble
            log.warning("a %s of %d blocks, %s: %s", job, num_blocks, store, said)
            self._metrics.event("rank_trouble", job=job, store=store, why=said)

    def change(self, rank: int, state: RankState, why: str = "") -> bool:
        """A rank went, or came back. False: that was known, or it is dead, which it stays."""
        one = self._ranks[rank]
        if one.state in (state, RankState.DEAD):
            return False
        self._ranks[rank] = replace(one, state=state, why=why)
        log.warning("rank %d is %s%s%s", rank, state.value, ": " if why else "", why)
        self._metrics.event(f"rank_{state.value}", rank=rank, why=why)
        return True
