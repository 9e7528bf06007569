"""What the executor does for each sort of job, step by step: probe, load, save, copy. Runs in `worker.py`'s threads.

A job works slice by slice: it takes pages for one slice, uses them, gives them back. Where slices overlap, the store's
call for one goes on in a thread beside, while the next is read from the device, or the one before is written to it, if
pages for that are to be had at once. Before each copy from or to device slots it asks the ledger; after its end or its
deadline it begins no copy and no call of a store. It ends nothing itself: it returns a result per block, or raises, and
the worker tells.

Rules kept here: pages are given back only when the call that was given them has returned (3); what is copied from store
to store was verified in the page between (4); a store's answers are believed only if they are one status per page.
A job of several slices that loses its store in the middle keeps what it has: the rest is "failed". A demotion, which
nobody waits for, has few bytes in hand and lets loads go first.
Not here: loads (`loads.py`), threads, queues, deadlines that pass while a call hangs (`worker.py`).
"""

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Final

from headwater.core.errors import InvalidInput
from headwater.core.events import Demote, Job, Load, Probe, Save, StoreCopy
from headwater.core.page import PageName
from headwater.core.results import PUT_ANSWERS, Reason, Status
from headwater.layout.frame import PageMeta
from headwater.metrics import Metrics
from headwater.storage.base import Clock
from headwater.storage.sealed import put_sealed, seal_pages
from headwater.transfer.executor.in_place import InPlaceJobs
from headwater.transfer.executor.ledger import JobState, Ledger
from headwater.transfer.executor.loads import PagedLoads
from headwater.transfer.executor.pages import PagePool
from headwater.transfer.executor.pieces import JobPages, RowPiece
from headwater.transfer.executor.save_throttle import SaveThrottle
from headwater.transfer.executor.staging import Staging
from headwater.transfer.executor.tier import Item, Naming, TierStore
from headwater.transfer.executor.trouble import JobTrouble, StoreTrouble, call, fill, require

if TYPE_CHECKING:
    from headwater.transfer.device.wire import Digests

log: Final = logging.getLogger("headwater")

DEMOTE_BYTES: Final = 32 << 20  # that one demotion has in its hands, or is writing, at most
STAND_BACK_S: Final = 0.05  # that a slice of it waits for loads from the store that it writes to


def check_job(order: Job, stores: Collection[str]) -> None:
    """Raise InvalidInput for a job that can never be done."""
    named = {order.store, order.target} if isinstance(order, StoreCopy) else {order.store}
    if not named <= set(stores):
        raise InvalidInput(f"job {order.job} names {', '.join(sorted(named))}; there are {', '.join(stores)}")
    if isinstance(order, StoreCopy) and len(named) == 1:
        raise InvalidInput(f"job {order.job} copies from {order.store} to itself")
    if isinstance(order, Load | Save) and len(order.slots) != len(order.keys):
        raise InvalidInput(f"job {order.job} has {len(order.keys)} blocks and {len(order.slots)} slots")
    if isinstance(order, Load | Save) and order.valid_tokens and (order.valid_tokens < 0 or len(order.keys) != 1):
        raise InvalidInput(f"job {order.job}: a tail of {order.valid_tokens} tokens is one block, by itself")
    if math.isnan(order.deadline_s):
        raise InvalidInput(f"job {order.job} has no deadline")


class JobRunner:
    """Does jobs, each in the calling thread. Holds no state of a job."""

    def __init__(
        self,
        tiers: Mapping[str, TierStore],
        staging: Staging,
        pool: PagePool,
        ledger: Ledger,
        *,
        naming: Naming,
        slice_pages: int,
        in_place_pages: int,
        overlaps: bool,
        grace_s: float,
        clock: Clock,
        throttle: SaveThrottle,
        metrics: Metrics,
    ) -> None:
        self._tiers = tiers
        self._staging = staging
        self._pages = JobPages(pool, ledger, slice_pages)
        self._ledger = ledger
        self._naming = naming
        self._frame_bytes = naming.frame_bytes
        self._demote_pages = max(1, DEMOTE_BYTES // naming.frame_bytes)
        self._overlaps = overlaps
        self._grace_s = grace_s
        self._clock = clock
        self._throttle = throttle
        self._metrics = metrics
        self._paged = PagedLoads(
            tiers, staging, self._pages, ledger, naming=naming, overlaps=overlaps, moved=self._moved
        )
        self._in_place = InPlaceJobs(
            tiers,
            staging,
            ledger,
            naming=naming,
            slice_pages=in_place_pages,
            clock=clock,
            throttle=throttle,
            moved=self._moved,
        )

    def run(self, job: JobState) -> list[Status]:
        """Do a job: one result per block, in order. Blocks. Raises JobTrouble, or what staging raises.

        The results of a job that ended meanwhile mean nothing.
        """
        order = job.order
        if isinstance(order, Probe):
            return self._probe(job, order)
        if isinstance(order, Load):
            return self._load(job, order)
        if isinstance(order, Save):
            return self._save(job, order)
        if isinstance(order, StoreCopy):
            return self._copy(job, order)
        raise JobTrouble(Reason.FAILED, f"the executor does not know how to {job.kind}")

    def contains_cached(self, order: Probe) -> tuple[Status, ...] | None:
        """A Probe's answer from memory; None: there is none, or the store raised. Does not block."""
        try:
            held = self._tiers[order.store].contains_cached(self._naming.names(order.keys))
        except StoreTrouble:
            return None  # whatever it is, asking will show it
        return None if held is None else _statuses(held)

    def _probe(self, job: JobState, order: Probe) -> list[Status]:
        held = self._tiers[order.store].contains(self._naming.names(order.keys), job.deadline)
        trouble = self._tiers[order.store].trouble
        if trouble is not None:  # a store that is down misses everything: that is no answer
            raise StoreTrouble(trouble)
        if job.deadline.expired:  # nor is "in doubt, or too late, False"
            raise JobTrouble(Reason.LATE, "the answer came after the deadline")
        return list(_statuses(held))

    def _load(self, job: JobState, order: Load) -> list[Status]:
        names = self._naming.names(order.keys)
        if not order.valid_tokens and self._in_place.reaches(order.store):
            return self._in_place.load(job, order, names)
        return self._paged.load(job, order, names)

    def _save(self, job: JobState, order: Save) -> list[Status]:
        if not order.awaited:
            self._throttle.wait()
        # A tail has a name of its own: nobody else has written it, and a second try is told EXISTS.
        names = self._naming.names(order.keys)
        there = [False] * len(names) if order.valid_tokens else self._tiers[order.store].contains(names, job.deadline)
        results: list[Status] = [Status.EXISTS if one else Status.LATE for one in there]
        todo = [i for i, one in enumerate(there) if not one]
        if not order.valid_tokens and self._in_place.reaches(order.store):
            return self._in_place.save(job, order, results, todo)
        piece = self._gather(job, order, todo, 0)
        ahead: RowPiece[list[Status]] | None = None
        try:
            while piece is not None:
                if self._overlaps and piece.end < len(todo):
                    piece.begin()
                    ahead = self._gather(job, order, todo, piece.end, wait=False)
                statuses = piece.wait()
                if self._is_past(job):
                    break  # whatever it says now: a store that keeps no time has proved nothing by the deadline
                for i, status in zip(todo[piece.start : piece.end], statuses, strict=True):
                    results[i] = status
                num_held = sum(1 for _ in takewhile(lambda status: status.held, statuses))
                job.num_bytes += self._moved(order.store, "in", statuses[:num_held].count(Status.STORED))
                if num_held < len(statuses):
                    return fill(results, piece.end, Status.NO_PARENT, todo)
                done = piece.end
                self._pages.settle(job, piece)
                piece, ahead = ahead, None
                if piece is None:
                    piece = self._gather(job, order, todo, done)
                elif not self._ledger.goes_on(job):
                    break
        except StoreTrouble:
            done = next((at for at, i in enumerate(todo) if results[i] == Status.LATE), len(todo))
            if not done:
                raise
            return fill(results, done, Status.FAILED, todo)
        finally:
            self._pages.settle(job, piece, ahead)
        return results

    def _gather(
        self, job: JobState, order: Save, todo: Sequence[int], start: int, *, wait: bool = True
    ) -> "RowPiece[list[Status]] | None":
        """The blocks `todo` from `start` on, as many as there are pages for, read from the device and ready to be put.

        None: there are none, or no time is left. Those that are not the row's last ones are sealed already.
        """
        if start >= len(todo):
            return None
        if not order.awaited:
            self._throttle.wait()
        pages = self._pages.take(job, len(todo) - start, wait=wait)
        if not pages:
            return None
        try:
            places = todo[start : start + len(pages)]
            with self._ledger.copying(job) as may_copy:
                digests = self._staging.gather([order.slots[i] for i in places], pages) if may_copy else None
            if may_copy and start + len(places) == len(todo):
                self._ledger.copied(job)
                self._ledger.flush()
            if not may_copy or not self._ledger.goes_on(job):
                self._pages.give_back(job, pages)
                return None
            unsealed = [
                (self._naming.meta(order, i), self._staging.frame(page)) for i, page in zip(places, pages, strict=True)
            ]
            put = self._seal_and_put(job, unsealed, digests, ahead=self._overlaps and len(places) < len(todo))
        except BaseException:
            self._pages.give_back(job, pages)
            raise
        return RowPiece(start, pages, put)

    def _copy(self, job: JobState, order: StoreCopy) -> list[Status]:
        """Sealed frames from one store to another, as they are.

        Through pages of our own: each is checked there, generation and digests, before the target sees it. A slot that
        is evicted and written anew while it is read ends as a miss, and no torn frame takes a name (rule 4).
        """
        names, source, target = self._naming.names(order.keys), self._tiers[order.store], self._tiers[order.target]
        demoting = isinstance(order, Demote)  # a row that a request waits for was just seen not to be there
        there = target.contains(names, job.deadline) if demoting else [False] * len(names)
        results: list[Status] = [Status.EXISTS if one else Status.LATE for one in there]
        todo = [i for i, one in enumerate(there) if not one]
        done = 0
        while done < len(todo):
            if demoting:
                self._throttle.wait()
                self._ledger.await_loads(order.target, STAND_BACK_S)
            most = self._demote_pages if demoting else len(todo)
            with self._pages.slice_of(job, min(most, len(todo) - done)) as pages:
                if not pages:
                    break
                items = self._items([names[i] for i in todo[done : done + len(pages)]], pages)
                try:
                    got = self._read_source(job, items) if demoting else source.read(items, job.deadline)
                    num_hits = _leading_hits(got)
                    if not self._ledger.goes_on(job):
                        return fill(results, done, Status.MISS, todo) if demoting else results
                    statuses = target.put(items[:num_hits], job.deadline)
                except StoreTrouble:
                    if not done:
                        raise
                    return fill(results, done, Status.FAILED, todo)
            for i, status in zip(todo[done:], statuses, strict=False):
                results[i] = status
            self._moved(order.store, "out", num_hits)
            job.num_bytes += self._moved(order.target, "in", statuses.count(Status.STORED))
            done += num_hits
            if not all(status.held for status in statuses):
                return fill(results, done, Status.NO_PARENT, todo)
            if num_hits < len(got):
                late = got[num_hits] is Status.LATE  # of a Demote that is its source's fault, as whatever else it says
                return fill(results, done, Status.MISS if demoting else Status.LATE if late else Status.FAILED, todo)
        return results

    # --- pages --------------------------------------------------------------------------------------------------------

    def _is_past(self, job: JobState) -> bool:
        """Whether the watchdog has given a job up, or would have, had it looked."""
        return self._clock.monotonic() > job.order.deadline_s + self._grace_s

    def _items(self, names: Sequence[PageName], pages: Sequence[int]) -> list[Item]:
        return [(name, self._staging.frame(page)) for name, page in zip(names, pages, strict=False)]

    # --- stores: foreign code, whose answers are looked at before they are believed -----------------------------------

    def _read_source(self, job: JobState, items: list[Item]) -> list[Status]:
        """What the source of a Demote gives. That counts as no use: nobody asked for the blocks.

        Its trouble is not the target's, and the blocks may still be on the device: a miss. Nor does it get more of the
        target's threads while it keeps one in a call that hangs.
        """
        source = job.order.store
        try:
            if self._ledger.hangs_at(source):
                raise StoreTrouble("a call of it does not return")
            job.at_source = True
            return self._tiers[source].peek(items, job.deadline)
        except StoreTrouble as trouble:
            log.warning("nothing to be demoted from %s: %s", source, trouble.why)
            return [Status.FAILED] * len(items)
        finally:
            job.at_source = False

    def _seal_and_put(
        self, job: JobState, unsealed: list[tuple[PageMeta, memoryview]], digests: "Digests | None", *, ahead: bool
    ) -> Callable[[], list[Status]]:
        """How to put pages. One of several pieces (`ahead`) is sealed now, while the one before it is being put.

        Digests of a whole block, if the copy made some, are not a tail's: `seal_pages` looks at that.
        """
        tier, layout = self._tiers[job.order.store], self._naming.layout
        now_ms, deadline = int(self._clock.time() * 1000), job.deadline
        sealed = ahead and (digests is not None or tier.store.addressable() is None)
        if sealed:
            seal_pages(unsealed, layout, now_ms=now_ms, digests=digests)

        def put() -> list[Status]:
            if sealed:
                return tier.put([(meta.name, frame) for meta, frame in unsealed], deadline)
            statuses = call(
                tier.name,
                lambda: list(
                    put_sealed(tier.store, unsealed, layout, digests=digests, now_ms=now_ms, deadline=deadline)
                ),
            )
            require(tier.name, statuses, len(unsealed), PUT_ANSWERS)
            return statuses

        return put

    def _moved(self, tier: str, direction: str, num_pages: int) -> int:
        num_bytes = num_pages * self._frame_bytes
        self._metrics.count("moved_bytes_total", num_bytes, tier=tier, direction=direction)
        return num_bytes


def _statuses(held: Sequence[bool]) -> tuple[Status, ...]:
    return tuple(map((Status.ABSENT, Status.HELD).__getitem__, held))


def _leading_hits(got: Sequence[Status]) -> int:
    return sum(1 for _ in takewhile(lambda status: status is Status.HIT, got))
