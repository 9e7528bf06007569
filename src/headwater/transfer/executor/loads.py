"""Loads through pages of staging: read a slice, copy it to the device, while the next one is being read.

Where the device digests what arrives there, that is the one time the bytes are looked at: pages are fetched with their
headers checked, and a block counts when its digests are those that its header vouches for. Elsewhere the store's reader
verifies them in the page. A store that reads with several threads is always read ahead; its first slice is a small one,
so that copying begins early.

Rules kept here: pages are given back only when the call that was given them has returned (3); a block is believed for
what was digested of it, in the page it is copied from or where it arrived (4). A load of several slices that loses its
store in the middle keeps what it has: the rest is "failed". Not here: threads, and deadlines that pass while a call
hangs (`worker.py`); loads that need no page (`in_place.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Final

import numpy as np

from headwater.core.errors import CopyDamaged
from headwater.core.events import Load
from headwater.core.page import PageName
from headwater.core.results import BAD_PAGE, Status
from headwater.transfer.executor.ledger import JobState
from headwater.transfer.executor.pieces import JobPages, RowPiece
from headwater.transfer.executor.tier import Item
from headwater.transfer.executor.tools import JobTools
from headwater.transfer.executor.trouble import StoreTrouble, calling, fill

if TYPE_CHECKING:
    from headwater.transfer.device.wire import Digests

AHEAD_BYTES: Final = 64 << 20  # of a slice of a load that is read ahead, at most: a few milliseconds
_FIRST_SHARE: Final = 4  # the first slice of such a load is a quarter


@dataclass(frozen=True, slots=True)
class _Slice:
    """What a store gave: a status per page, and, where it is to be checked on arrival, what must arrive."""

    items: list[Item]
    statuses: list[Status]
    digests: "list[Digests] | None"  # of the first pages, those that are there


class PagedLoads:
    """Does loads in the calling thread. Holds no state of a job."""

    def __init__(self, tools: JobTools, pages: JobPages) -> None:
        self._tiers, self._staging, self._ledger = tools.tiers, tools.staging, tools.ledger
        self._naming, self._overlaps, self._moved = tools.naming, tools.overlaps, tools.moved
        self._checking = tools.staging.in_place()  # who digests what arrives, if anybody does
        self._pages = pages
        most = tools.staging.num_pages // _FIRST_SHARE
        self._ahead_pages = max(1, min(AHEAD_BYTES // tools.naming.frame_bytes, most))

    def load(self, job: JobState, order: Load) -> list[Status]:
        """All blocks: one result each. Blocks. Raises JobTrouble, or what staging raises."""
        names = self._naming.names(order.keys)
        reads_ahead = self._tiers[order.store].reads_ahead
        overlaps = self._overlaps or reads_ahead
        most = self._ahead_pages if reads_ahead else len(names)
        results: list[Status] = [Status.LATE] * len(names)
        piece = self._ask(job, order, names, results, 0, most=max(1, most // _FIRST_SHARE) if reads_ahead else most)
        ahead: RowPiece[_Slice] | None = None
        try:
            while piece is not None:
                got = piece.wait()
                num_hits = _leading_hits(got.statuses)
                if overlaps and num_hits == len(got.statuses):
                    ahead = self._ask(job, order, names, results, piece.end, most=most, beside=True)
                status, num_good = Status.HIT, 0
                if num_hits:
                    with self._ledger.copying(job) as may_copy:
                        if not may_copy:
                            break
                        slots = order.slots[piece.start : piece.start + num_hits]
                        num_good = self._scatter(piece.pages[:num_hits], slots, got)
                done = piece.start + num_good
                results[piece.start : done] = [Status.HIT] * num_good
                job.num_bytes += self._moved(order.store, "out", num_good)
                if got.digests is not None:
                    status = self._settle(job, order, got.items[:num_hits], num_good, results, done)
                if num_good < len(got.statuses):
                    results[done] = status if num_good < num_hits else got.statuses[num_hits]
                    return fill(results, done + 1, Status.MISS)
                self._pages.settle(job, piece)
                job.judged = tuple(results)  # if the next call does not return, this has come all the same
                piece, ahead = ahead, None
                if piece is None:
                    piece = self._ask(job, order, names, results, done, most=most)
        except StoreTrouble:
            if Status.HIT not in results:
                raise
            return fill(results, results.index(Status.LATE), Status.FAILED)
        finally:
            self._pages.settle(job, piece, ahead)
        return results

    def _ask(
        self,
        job: JobState,
        order: Load,
        names: Sequence[PageName],
        results: list[Status],
        start: int,
        *,
        most: int,
        beside: bool = False,
    ) -> RowPiece[_Slice] | None:
        """The blocks from `start` on, as many as there are pages for, and `most`. None: there are none, or no time.

        With `beside` they are on their way when this returns, and nobody waited for a page.
        """
        pages = self._pages.take(job, min(most, len(names) - start), wait=not beside)
        if not pages:
            return None
        try:
            items = [(name, self._staging.frame(page)) for name, page in zip(names[start:], pages, strict=False)]
        except BaseException:
            self._pages.give_back(job, pages)
            raise

        def judged(got: Sequence[Status]) -> None:  # the row ends with a bad page, and all before it is in its slots
            if got[0] in BAD_PAGE and results.count(Status.HIT) == start:
                job.judged = (*results[:start], got[0], *(Status.MISS,) * (len(names) - start - 1))

        return RowPiece(start, pages, lambda: self._read(job, order, items, judged), beside=beside)

    def _read(
        self, job: JobState, order: Load, items: list[Item], judged: Callable[[Sequence[Status]], None]
    ) -> _Slice:
        """Pages, verified, or with what must arrive. `judged` hears what was found before bad pages are removed."""
        tier = self._tiers[order.store]
        if self._checking is not None and not order.valid_tokens and tier.store.addressable() is None:
            found = tier.fetch(items, job.deadline, judged)
            digests = list(takewhile(lambda one: not isinstance(one, Status), found))
            statuses = [one if isinstance(one, Status) else Status.HIT for one in found]
            return _Slice(items, statuses, digests)  # type: ignore[arg-type]  # those that are no Status
        got = tier.read(items, job.deadline, judged)
        if order.valid_tokens and got == [Status.HIT]:
            ((name, frame),) = items
            if not self._naming.is_tail(frame, order.valid_tokens):  # sealed by somebody who does not keep the rules
                got = [Status.FOREIGN]
                judged(got)
                with calling(order.store):
                    tier.reader.refuse(name, deadline=job.deadline)
        return _Slice(items, got, None)

    def _scatter(self, pages: Sequence[int], slots: Sequence[int], got: _Slice) -> int:
        """Copy pages to the device. Blocks. Returns how many first blocks are there, and right."""
        if self._checking is None or got.digests is None:
            self._staging.scatter(pages, slots)
            return len(pages)
        frames = [frame for _, frame in got.items[: len(pages)]]
        transfer = self._checking.scatter(frames, slots, expected=np.stack(got.digests))
        transfer.see_through()
        return transfer.num_good

    def _settle(
        self, job: JobState, order: Load, items: list[Item], num_good: int, results: Sequence[Status], done: int
    ) -> Status:
        """Tell the reader what arrived: what is wrong with the first block that was not right. Raises CopyDamaged.

        That is where a page is as it should be, and what arrived of it is not: the store has nothing to do with it.
        """

        def judged(status: Status) -> None:
            if status in BAD_PAGE:
                job.judged = (*results[:done], status, *(Status.MISS,) * (len(results) - done - 1))

        reader = self._tiers[order.store].reader
        with calling(order.store):
            status = reader.settle_fetched(items, num_good, deadline=job.deadline, judged=judged)
        if num_good < len(items) and status is Status.HIT:
            raise CopyDamaged(f"block {num_good} of {len(items)} is not what its page is on the device")
        return status


def _leading_hits(got: Sequence[Status]) -> int:
    return sum(1 for _ in takewhile(lambda status: status is Status.HIT, got))
