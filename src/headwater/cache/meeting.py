"""Compute meets load: what is stored but slow to read is loaded from its end, while the engine computes from its front.

A *meeting* is of one request, over the blocks [start, end) that stores say they have. Rows of it are loaded one after
another, the last one first. Before each step the engine *claims* the blocks that it will compute next; no row reaches
below that. Both are cut again each time, by the newest paces (`split.py`), so they meet where they meet: at the end the
engine has computed up to the first row that has come, and goes on behind the last.

What keeps it right:
- A block is either claimed or in a row, never both: nothing is computed into a slot that a load may write (rule 2).
- What has come waits in its slots until the block before it is known, and enters the index then: no block without its
  parent. A row that failed, or only in part, is computed when the engine comes there; those behind it still count.
- Whoever comes to a row that is still on its way waits for it no longer than computing it takes. Then it is cancelled,
  and computed when its job has ended.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from headwater.cache.accounts import Accounts
from headwater.cache.jobs import Jobs, reason_of
from headwater.cache.placement import ComputeCost, TierState
from headwater.cache.records import JobKind, JobRecord, Meeting, RequestRecord, Why
from headwater.cache.split import LoadSeconds, best_split, split_pays
from headwater.core.events import Cancel, Load
from headwater.core.results import BAD_PAGE, Reason, Status

_ROW_S: Final = 0.03  # a row takes about as long, or a part of what is left: events are cheap beside that
_PART: Final = 4  # of what is left to be loaded, for a row
_MOST_BLOCKS: Final = 32  # of a row
_FINE: Final = 16  # a claim is at least such a part of the meeting: steps cost something too
_LEAST_CLAIM: Final = 2  # blocks
_GOES_ON: Final = BAD_PAGE | {Status.MISS, Status.CANCELLED}  # a row that ended so says nothing of the next


class Meetings:
    """Begins meetings, and cuts them as they go. Changes requests; whoever calls enters blocks into the index."""

    def __init__(
        self,
        jobs: Jobs,
        accounts: Accounts,
        *,
        cost: ComputeCost,
        where: Callable[[RequestRecord, int], str | None],
        row_end: Callable[[RequestRecord, int, int], int],
    ) -> None:
        """`where`: the store to load a block from. `row_end`: up to where that one has them, at most `end`."""
        self._jobs = jobs
        self._accounts = accounts
        self._cost = cost
        self._where = where
        self._row_end = row_end

    def begin(
        self, request: RequestRecord, start: int, end: int, now_s: float, *, head_s: float = 0.0, late: bool = False
    ) -> bool:
        """Load stored blocks from their end, if that pays. `head_s`: what passes before `start` can be computed.

        `late`: loading them all took longer than it should have, so what was measured before is not asked. But nobody
        would know when to wait no longer where computing was never measured.
        """
        parts = list(self._parts(request, start, end))
        if not parts:
            return False
        row_end = parts[0][2]
        if late and self._cost.row_s(start, row_end) <= 0:
            return False
        if not late and not split_pays(self._cost, self._seconds(parts[:1], now_s), start, row_end, head_s=head_s):
            return False
        if any(not tier.breakers[JobKind.LOAD].would_allow(now_s) for tier, _, _ in parts):
            return False
        stop = parts[-1][2]
        request.meeting = Meeting(start=start, end=stop, low=stop, claimed=start, head_s=head_s)
        self._accounts.add("split_loads_total", 1)
        self.go_on(request, now_s)
        return True

    def go_on(self, request: RequestRecord, now_s: float) -> None:
        """Load the next row towards the front, if it can be there before the engine could have computed it."""
        meeting = request.meeting
        if meeting is None or meeting.stopped or meeting.under_way is not None:
            return
        ready, low = request.hold.num_blocks, meeting.low
        floor = max(meeting.claimed, ready)
        if floor >= low or (name := self._where(request, low - 1)) is None:
            return
        tier = self._jobs.tiers[name]
        if not tier.breakers[JobKind.LOAD].would_allow(now_s):
            meeting.stopped = True
            return
        load_s = self._load_s(request, meeting, now_s)
        at = max(floor, self._cut(request, meeting, load_s))
        if at >= low:
            return
        block_s = load_s(at) / (low - at)
        in_time = int(min(_MOST_BLOCKS, _ROW_S / block_s)) if block_s > 0 else _MOST_BLOCKS
        num = min(_MOST_BLOCKS, max(-(-(low - at) // _PART), in_time))
        start = max(at, low - num)
        start = next((i + 1 for i in range(low - 1, start - 1, -1) if self._where(request, i) != name), start)
        row: dict[str, Any] = {"keys": tuple(request.keys[start:low]), "parent": request.before(start)}
        meeting.due_s = now_s + load_s(start)
        job = self._jobs.begin(JobKind.LOAD, tier, start, low, now_s, request=request, **row)
        meeting.rows.insert(0, job)
        meeting.low = start
        self._jobs.out.append(
            Load(
                job=job.job,
                store=name,
                keys=job.keys,
                slots=tuple(request.own[start - request.base : job.end - request.base]),
                deadline_s=now_s + tier.config.load_timeout_s,
            )
        )

    def claim(self, request: RequestRecord, end: int, now_s: float) -> None:
        """The engine would compute up to block `end` next: say how far it may (`Meeting.claimed`).

        Where it has come to a row that is still on its way, it may not at all; then it waits, or the row is cancelled.
        """
        meeting, ready = request.meeting, request.hold.num_blocks
        if meeting is None:
            return
        row = meeting.rows[0] if meeting.rows else None
        if row is not None and row.start <= ready:
            self._wait(meeting, row, now_s)
            return
        if meeting.waits_s is not None:
            request.met_wait_s += now_s - meeting.waits_s
            meeting.waits_s = None
        limit = request.num_blocks if row is None else row.start
        if not meeting.stopped and ready < meeting.low:  # the rest of the way is halved each time, as paces are guesses
            load_s = self._load_s(request, meeting, now_s)
            least = max(_LEAST_CLAIM, (meeting.end - meeting.start) // _FINE)
            limit = min(limit, ready + max(least, -(-(self._cut(request, meeting, load_s) - ready) // 2)))
        meeting.claimed = max(meeting.claimed, min(end, limit))
        self.go_on(request, now_s)

    def _wait(self, meeting: Meeting, row: JobRecord, now_s: float) -> None:
        """The engine stands before a row: it waits, or the row is cancelled."""
        if meeting.waits_s is None:
            meeting.waits_s = now_s
        compute_s = self._cost.row_s(row.start, row.end)
        if not row.cancelled and (now_s - meeting.waits_s >= compute_s or meeting.due_s - now_s > compute_s):
            self._cancel(row)

    def ended(self, request: RequestRecord, job: JobRecord, results: Sequence[Status]) -> None:
        """A row has come, or has not, or only in part."""
        meeting = request.meeting
        if meeting is None or job not in meeting.rows:
            return
        num_hit = leading_hits(results)
        if num_hit < len(results):
            bad = results[num_hit]
            reason = Reason.COMPUTED_MEANWHILE if job.cancelled and not meeting.given_up else reason_of(bad)
            meeting.lost[reason] = meeting.lost.get(reason, 0) + len(results) - num_hit
            request.whys.append(Why(job.start + num_hit, job.end, job.store, reason, {"found": str(bad)}))
            meeting.stopped |= bad not in _GOES_ON
        if not num_hit:
            meeting.rows.remove(job)

    def next_row(self, request: RequestRecord) -> tuple[JobRecord, int] | None:
        """The row that has come and whose parent is known, and how many blocks of it are good; it is struck out."""
        meeting = request.meeting
        if meeting is None or not meeting.rows or request.ready_s is None:
            return None
        row = meeting.rows[0]
        if row.results is None or row.start != request.hold.num_blocks:
            return None
        del meeting.rows[0]
        num = leading_hits(row.results)
        meeting.num_entered += num
        request.met.append((row.start, row.start + num))
        return row, num

    def give_up(self, request: RequestRecord) -> None:
        """Load no more rows. The one under way ends with an event."""
        meeting = request.meeting
        if meeting is not None:
            meeting.stopped = meeting.given_up = True
            row = meeting.under_way
            if row is not None and not row.cancelled:
                self._cancel(row)

    def end_if_over(self, request: RequestRecord) -> None:
        """The meeting is over when its last block is known, or when nothing more comes."""
        meeting = request.meeting
        if meeting is None:
            return
        no_more = meeting.stopped and not meeting.rows and request.ready_s is not None
        if no_more or request.hold.num_blocks >= meeting.end:
            self.end(request)

    def end(self, request: RequestRecord) -> None:
        """Account for a meeting, whether it came to its end or its request leaves."""
        meeting = request.meeting
        if meeting is None:
            return
        request.meeting = None
        met = meeting.end - meeting.start - meeting.num_entered - sum(meeting.lost.values())
        for reason, num in (*meeting.lost.items(), (Reason.COMPUTED_MEANWHILE, met)):
            if num:
                request.misses[reason] = request.misses.get(reason, 0) + num
        self._accounts.add("split_blocks_total", meeting.num_entered, how="loaded")
        self._accounts.add("split_blocks_total", meeting.end - meeting.start - meeting.num_entered, how="computed")

    # --- estimates ----------------------------------------------------------------------------------------------------

    def _cut(self, request: RequestRecord, meeting: Meeting, load_s: LoadSeconds) -> int:
        """Where computing and loading would meet now, below what is loaded or on its way."""
        head_s = meeting.head_s if request.ready_s is None else 0.0
        return best_split(self._cost, load_s, request.hold.num_blocks, meeting.low, head_s=head_s).at

    def _load_s(self, request: RequestRecord, meeting: Meeting, now_s: float) -> LoadSeconds:
        """What loading more would take, from some block up to those that are loaded or on their way."""
        return self._seconds(list(self._parts(request, meeting.start, meeting.low)), now_s)

    def _seconds(self, parts: Sequence[tuple[TierState, int, int]], now_s: float) -> LoadSeconds:
        """What loading rows would take from some block on, one store after another."""
        size = self._jobs.block_bytes

        def seconds(at: int) -> float:
            rows = ((tier, part_end - max(at, part)) for tier, part, part_end in parts)
            return sum(tier.load_s(num * size, now_s) for tier, num in rows if num > 0)

        return seconds

    def _parts(self, request: RequestRecord, start: int, end: int) -> Iterator[tuple[TierState, int, int]]:
        """The rows that stores have of blocks [start, end), up to the first that none has."""
        at = start
        while at < end and (name := self._where(request, at)) is not None:
            row_end = self._row_end(request, at, end)
            yield self._jobs.tiers[name], at, row_end
            at = row_end

    def _cancel(self, row: JobRecord) -> None:
        row.cancelled = True
        self._jobs.out.append(Cancel(job=row.job))


def leading_hits(results: Sequence[Status]) -> int:
    """How many blocks of a row are good: those before the first that was not to be had."""
    hit = Status.HIT  # a name of an enum is slow to find
    return next((i for i, result in enumerate(results) if result != hit), len(results))
