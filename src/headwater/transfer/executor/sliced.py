"""A row of blocks as jobs, slice by slice, in order: so a write leaves no hole, and a read stops at the first it lacks.

A row is cut into slices of `slice_blocks`, each a job with a deadline of its own: `slice_timeout_s` from when it is
asked for, or what is left of the total if that is less. The next job is made when the last one has ended well.

Pure: no clock, no threads. Who gives the jobs to an executor and hears their ends is `rows.py`, or a handoff.

Invariant: `num_done` counts blocks from the row's first, without a gap: each was answered stored or exists, or was
verified and is in its slot. It is never more than that, whatever went wrong.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Final

from headwater.config.writes import WriteConfig
from headwater.core.errors import InvalidInput
from headwater.core.events import JobDone, JobFailed, Load, Save
from headwater.core.results import PUT_HELD, Reason, Status

_GOOD: Final = PUT_HELD | {Status.HIT}


@dataclass(frozen=True, slots=True)
class Reached:
    """How many blocks in a row, counted from the first that was asked for, and why not more."""

    num_blocks: int
    why: Reason
    detail: str = ""  # for people
    status: str = field(default="", compare=False)  # a store's word for the first block that did not do, if it gave one


class SlicedRow:
    """One row under way."""

    def __init__(self, order: Save | Load, config: WriteConfig, number: Callable[[], int], *, depth: int = 0) -> None:
        """`order` says which blocks, the first at `depth`; its deadline is the total's. `number` gives each job one.

        Raises InvalidInput.
        """
        if len(order.keys) != len(order.slots):
            raise InvalidInput(f"{len(order.keys)} blocks and {len(order.slots)} slots")
        self.order = order
        self.num_done = 0
        self.num_bytes = 0
        self._config = config
        self._number = number
        self._depth = depth
        self._ended: Reached | None = None

    @property
    def over(self) -> bool:
        """Whether there is nothing more to do."""
        return self._ended is not None or self.num_done == len(self.order.keys)

    @property
    def reached(self) -> Reached:
        """How far it came, and why not further; of one that is over."""
        return self._ended if self._ended is not None else Reached(self.num_done, Reason.WHOLE)

    def next_job(self, now_s: float) -> Save | Load | None:
        """The next slice; None: it is over. Not to be asked for while one is under way."""
        order, start = self.order, self.num_done
        if not self.over and now_s >= order.deadline_s:
            self._end(Reason.TOTAL_TIMEOUT, "no time is left")
        if self.over:
            return None
        end = min(start + self._config.slice_blocks, len(order.keys))
        until_s = min(now_s + self._config.slice_timeout_s, order.deadline_s)
        job = replace(
            order, job=self._number(), keys=order.keys[start:end], slots=order.slots[start:end], deadline_s=until_s
        )
        if isinstance(job, Save) and isinstance(order, Save) and start:
            return replace(job, parent=order.keys[start - 1], depth=order.depth + start)
        return job

    def heard(self, end: JobDone | JobFailed, now_s: float) -> None:
        """A slice has ended. `now_s` is when that is looked at."""
        if isinstance(end, JobFailed):
            if end.failure is Reason.LATE:
                self._time_out(end.why, now_s)
            else:
                self._end(end.failure, end.why)
            return
        num_good = sum(1 for _ in takewhile(_GOOD.__contains__, end.results))
        self.num_done += num_good
        self.num_bytes += end.num_bytes
        if num_good < len(end.results):
            first = end.results[num_good]
            detail = f"block {self._depth + self.num_done}: {first}"
            if first is Status.LATE:
                self._time_out(detail, now_s)
            else:
                self._end(Reason.INCOMPLETE, detail, first)

    def stop(self) -> None:
        """Nobody wants the rest."""
        if not self.over:
            self._end(Reason.CANCELLED, "nobody wants the rest")

    def stick(self) -> None:
        """The copy of the slice that is under way hangs, and its slots are lent."""
        self._end(Reason.STUCK, "a copy did not end in time, and has the slots of its slice until it does")

    def _time_out(self, detail: str, now_s: float) -> None:
        """Some time is over: the slice's, or the total."""
        self._end(Reason.TOTAL_TIMEOUT if now_s >= self.order.deadline_s else Reason.SLICE_TIMEOUT, detail)

    def _end(self, why: Reason, detail: str, status: str = "") -> None:
        self._ended = Reached(self.num_done, why, detail, status)
