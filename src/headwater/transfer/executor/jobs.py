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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Final

from headwater.core.errors import InvalidInput
from headwater.core.events import Cancel, Demote, Instruction, Job, Load, Probe, Save, StoreCopy
from headwater.core.results import PUT_ANSWERS, Reason, Status
from headwater.layout.frame import PageMeta
from headwater.storage.sealed import put_sealed, seal_pages
from headwater.transfer.executor.in_place import InPlaceJobs
from headwater.transfer.executor.ledger import JobState
from headwater.transfer.executor.loads import PagedLoads
from headwater.transfer.executor.pieces import JobPages, RowPiece
from headwater.transfer.executor.store_queue import PRIORITY
from headwater.transfer.executor.tier import Item
from headwater.transfer.executor.tools import JobTools
from headwater.transfer.executor.trouble import JobTrouble, StoreTrouble, calling, fill, require

if TYPE_CHECKING:
    from headwater.transfer.device.wire import Digests

log: Final = logging.getLogger("headwater")

DEMOTE_BYTES: Final = 32 << 20  # that one demotion has in its hands, or is writing, at most
STAND_BACK_S: Final = 0.05  # that a slice of it waits for loads from the store that it writes to


def checked(instructions: Iterable[Instruction], stores: Collection[str]) -> list[Instruction]:
    """What an executor is asked, in a list. Raises InvalidInput for what can never be done."""
    asked = list(instructions)
    for one in asked:
        if isinstance(one, Job) and type(one) in PRIORITY:
            check_job(one, stores)
        elif not isinstance(one, Cancel):
            raise InvalidInput(f"not the executor's work: {one!r}")
    return asked


def require_new(asked: Iterable[Instruction], live: Mapping[int, object]) -> None:
    """Raise InvalidInput unless each job has a number that no other has, nor one that is under way."""
    numbers = [one.job for one in asked if isinstance(one, Job)]
    if len(set(numbers)) < len(numbers) or not live.keys().isdisjoint(numbers):
        raise InvalidInput(f"each job needs a number of its own: {numbers}")


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

    def __init__(self, tools: JobTools) -> None:
        self._tiers, self._staging, self._ledger = tools.tiers, tools.staging, tools.ledger
        self._naming, self._clock, self._throttle = tools.naming, tools.clock, tools.throttle
        self._pages = JobPages(tools.pool, tools.ledger, tools.slice_pages)
        self._demote_pages = max(1, DEMOTE_BYTES // tools.naming.frame_bytes)
        self._overlaps = tools.overlaps
        self._grace_s = tools.grace_s
        self._moved = tools.moved
        self._paged = PagedLoads(tools, self._pages)
        engine = tools.staging.in_place()
        self._in_place = None if engine is None else InPlaceJobs(tools, engine)

    def way(self, order: Job) -> Callable[[JobState], list[Status]]:
        """How a job is done: a call that blocks and gives one result per block, in order. Raises JobTrouble.

        That call raises JobTrouble, or what staging raises. The results of a job that ended meanwhile mean nothing.
        """
        if isinstance(order, Probe):
            return partial(self._probe, order=order)
        if isinstance(order, Load):
            return partial((self._in_place_for(order) or self._paged).load, order=order)
        if isinstance(order, Save):
            in_place = self._in_place_for(order)
            return partial(self._save if in_place is None else in_place.save, order=order)
        if isinstance(order, StoreCopy):
            return partial(self._copy, order=order)
        raise JobTrouble(Reason.FAILED, f"the executor does not know how to {type(order).__name__.lower()}")

    def _in_place_for(self, order: Load | Save) -> InPlaceJobs | None:
        """Who needs no pages for it; None: it goes through pages, as a tail does."""
        ours = self._in_place
        return ours if ours is not None and not order.valid_tokens and ours.reaches(order.store) else None

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

    def _save(self, job: JobState, order: Save) -> list[Status]:
        if not order.awaited:
            self._throttle.wait()
        # A tail has a name of its own: nobody else has written it, and a second try is told EXISTS.
        names, tier = self._naming.names(order.keys), self._tiers[order.store]
        results, todo = tier.missing(names, job.deadline, ask=not order.valid_tokens)
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
        results, todo = target.missing(names, job.deadline, ask=demoting)
        done = 0
        while done < len(todo):
            if demoting:
                self._throttle.wait()
                self._ledger.await_loads(order.target, STAND_BACK_S)
            most = self._demote_pages if demoting else len(todo)
            with self._pages.slice_of(job, min(most, len(todo) - done)) as pages:
                if not pages:
                    break
                some = todo[done : done + len(pages)]
                items = [(names[i], self._staging.frame(page)) for i, page in zip(some, pages, strict=True)]
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
            with calling(tier.name):
                said = put_sealed(tier.store, unsealed, layout, digests=digests, now_ms=now_ms, deadline=deadline)
                statuses = list(said)
            require(tier.name, statuses, len(unsealed), PUT_ANSWERS)
            return statuses

        return put


def _statuses(held: Sequence[bool]) -> tuple[Status, ...]:
    return tuple(map((Status.ABSENT, Status.HELD).__getitem__, held))


def _leading_hits(got: Sequence[Status]) -> int:
    return sum(1 for _ in takewhile(lambda status: status is Status.HIT, got))
