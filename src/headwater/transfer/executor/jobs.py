"""What the executor does for each sort of job, step by step: probe, load, save, copy. Runs in `worker.py`'s threads.

A job works slice by slice: it takes pages for one slice, uses them, gives them back. Before each copy from or to device
slots it asks the ledger; after its end or its deadline it begins no copy and no call of a store. It ends nothing
itself: it returns a result per block, or raises, and the worker tells.

Rules kept here: pages are given back only when the call that was given them has returned (3); what is scattered was
verified in the page it is scattered from (4); a store's answers are believed only if they are one status per page.
A job of several slices that loses its store in the middle keeps what it has: the rest is "failed".
Not here: threads, queues, deadlines that pass while a call hangs (`worker.py`).
"""

import contextlib
import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Final, TypeAlias

from headwater.core.errors import InvalidInput
from headwater.core.events import Demote, Job, Load, Probe, Save, StoreCopy
from headwater.core.page import PageName
from headwater.core.results import GET_ANSWERS, PUT_ANSWERS, Reason, Status
from headwater.layout.frame import PageMeta
from headwater.metrics import Metrics
from headwater.storage.base import Clock
from headwater.storage.sealed import put_sealed
from headwater.transfer.executor.courtesy import Courtesy
from headwater.transfer.executor.in_place import InPlaceJobs
from headwater.transfer.executor.ledger import JobState, Ledger
from headwater.transfer.executor.pages import Account, PagePool
from headwater.transfer.executor.staging import Staging
from headwater.transfer.executor.tier import Naming, TierStore
from headwater.transfer.executor.trouble import JobTrouble, StoreTrouble, call, fill, require

if TYPE_CHECKING:
    from headwater.transfer.device.wire import Digests

log: Final = logging.getLogger("headwater")

Item: TypeAlias = tuple[PageName, memoryview]


def check_job(order: Job, stores: Collection[str]) -> None:
    """Raise InvalidInput for a job that can never be done."""
    named = {order.store, order.target} if isinstance(order, StoreCopy) else {order.store}
    if not named <= set(stores):
        raise InvalidInput(f"job {order.job} names {', '.join(sorted(named))}; there are {', '.join(stores)}")
    if isinstance(order, StoreCopy) and len(named) == 1:
        raise InvalidInput(f"job {order.job} copies from {order.store} to itself")
    if isinstance(order, Load | Save) and len(order.slots) != len(order.keys):
        raise InvalidInput(f"job {order.job} has {len(order.keys)} blocks and {len(order.slots)} slots")
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
        clock: Clock,
        courtesy: Courtesy,
        metrics: Metrics,
    ) -> None:
        self._tiers = tiers
        self._staging = staging
        self._pool = pool
        self._ledger = ledger
        self._naming = naming
        self._frame_bytes = naming.frame_bytes
        self._slice_pages = slice_pages
        self._clock = clock
        self._courtesy = courtesy
        self._metrics = metrics
        self._in_place = InPlaceJobs(
            tiers,
            staging,
            ledger,
            naming=naming,
            slice_pages=in_place_pages,
            clock=clock,
            courtesy=courtesy,
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
        store = self._tiers[order.store].store.cached_names()
        if store is None:
            return None
        names = self._naming.names(order.keys)

        def contains_cached() -> list[bool] | None:
            found = store.contains_cached(names)
            return None if found is None else list(found)

        try:
            held = call(order.store, contains_cached)
            if held is None:
                return None
            require(order.store, held, len(names), None, bool)
        except StoreTrouble:
            return None  # whatever it is, asking will show it
        return _statuses(held)

    def _probe(self, job: JobState, order: Probe) -> list[Status]:
        held = self._contains(self._tiers[order.store], job, self._naming.names(order.keys))
        trouble = self._tiers[order.store].trouble
        if trouble is not None:  # a store that is down misses everything: that is no answer
            raise StoreTrouble(trouble)
        if job.deadline.expired:  # nor is "in doubt, or too late, False"
            raise JobTrouble(Reason.LATE, "the answer came after the deadline")
        return list(_statuses(held))

    def _load(self, job: JobState, order: Load) -> list[Status]:
        names = self._naming.names(order.keys)
        if self._in_place.reaches(order.store):
            return self._in_place.load(job, order, names)
        results: list[Status] = [Status.LATE] * len(names)
        done = 0
        while done < len(names):
            with self._pages(job, len(names) - done) as pages:
                if not pages:
                    break
                try:
                    got = self._read(job, self._items(names[done:], pages))
                except StoreTrouble:
                    if not done:
                        raise
                    return fill(results, done, Status.FAILED)
                num_hits = _leading_hits(got)
                if num_hits:
                    with self._ledger.copying(job) as may_copy:
                        if not may_copy:
                            break
                        self._staging.scatter(pages[:num_hits], order.slots[done : done + num_hits])
            results[done : done + num_hits] = [Status.HIT] * num_hits
            job.num_bytes += self._moved(order.store, "out", num_hits)
            done += num_hits
            if num_hits < len(got):
                results[done] = got[num_hits]
                return fill(results, done + 1, Status.MISS)
        return results

    def _save(self, job: JobState, order: Save) -> list[Status]:
        self._courtesy.wait()
        there = self._contains(self._tiers[order.store], job, self._naming.names(order.keys))
        results: list[Status] = [Status.EXISTS if one else Status.LATE for one in there]
        todo = [i for i, one in enumerate(there) if not one]
        if self._in_place.reaches(order.store):
            return self._in_place.save(job, order, results, todo)
        done = 0
        while done < len(todo):
            self._courtesy.wait()
            with self._pages(job, len(todo) - done) as pages:
                if not pages:
                    break
                slice_ = todo[done : done + len(pages)]
                with self._ledger.copying(job) as may_copy:
                    if not may_copy:
                        break
                    digests = self._staging.gather([order.slots[i] for i in slice_], pages)
                if done + len(slice_) == len(todo):
                    self._ledger.copied(job)
                    self._ledger.flush()
                if not self._ledger.goes_on(job):
                    break
                try:
                    statuses = self._seal_and_put(job, [self._naming.meta(order, i) for i in slice_], pages, digests)
                except StoreTrouble:
                    if not done:
                        raise
                    return fill(results, done, Status.FAILED, todo)
            for i, status in zip(slice_, statuses, strict=True):
                results[i] = status
            job.num_bytes += self._moved(order.store, "in", statuses.count(Status.STORED))
            done += len(slice_)
            if not all(status.held for status in statuses):
                return fill(results, done, Status.NO_PARENT, todo)
        return results

    def _copy(self, job: JobState, order: StoreCopy) -> list[Status]:
        """Sealed frames from one store to another, as they are.

        Through pages of our own: each is checked there, generation and digests, before the target sees it. A slot that
        is evicted and written anew while it is read ends as a miss, and no torn frame takes a name (rule 4).
        """
        names, target = self._naming.names(order.keys), self._tiers[order.target]
        demoting = isinstance(order, Demote)  # a row that a request waits for was just seen not to be there
        there = self._contains(target, job, names) if demoting else [False] * len(names)
        results: list[Status] = [Status.EXISTS if one else Status.LATE for one in there]
        todo = [i for i, one in enumerate(there) if not one]
        done = 0
        while done < len(todo):
            if demoting:
                self._courtesy.wait()
            with self._pages(job, len(todo) - done) as pages:
                if not pages:
                    break
                items = self._items([names[i] for i in todo[done : done + len(pages)]], pages)
                try:
                    got = self._read_source(job, items) if demoting else self._read(job, items)
                    num_hits = _leading_hits(got)
                    if not self._ledger.goes_on(job):
                        break
                    statuses = self._put(target, job, items[:num_hits])
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
                lacking = Status.MISS if demoting else Status.FAILED
                return fill(results, done, Status.LATE if got[num_hits] is Status.LATE else lacking, todo)
        return results

    # --- pages --------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _pages(self, job: JobState, num_wanted: int) -> Iterator[list[int]]:
        """Pages for one slice, or none where the job has ended or its time is over. Blocks until then."""
        order = job.order  # a copy is a kind of write
        account: Account = (order.target if isinstance(order, StoreCopy) else order.store, isinstance(order, Load))
        number = min(num_wanted, self._slice_pages)
        pages = self._pool.take(account, number, deadline=job.deadline, stopped=lambda: job.ended)
        try:
            yield pages
        finally:
            self._pool.give_back(account, pages)

    def _items(self, names: Sequence[PageName], pages: Sequence[int]) -> list[Item]:
        return [(name, self._staging.frame(page)) for name, page in zip(names, pages, strict=False)]

    # --- stores: foreign code, whose answers are looked at before they are believed -----------------------------------

    def _contains(self, tier: TierStore, job: JobState, names: list[PageName]) -> list[bool]:
        held = call(tier.name, lambda: list(tier.store.contains(names, deadline=job.deadline)))
        require(tier.name, held, len(names), None, bool)
        return held

    def _read(self, job: JobState, items: list[Item]) -> list[Status]:
        reader = self._tiers[job.order.store].reader
        got = call(job.order.store, lambda: list(reader.get_into(items, deadline=job.deadline)))
        require(job.order.store, got, len(items), GET_ANSWERS)
        return got

    def _read_source(self, job: JobState, items: list[Item]) -> list[Status]:
        """What the source of a Demote gives. That counts as no use: nobody asked for the blocks.

        Its trouble is not the target's, and the blocks may still be on the device: a miss.
        """
        tier = self._tiers[job.order.store]
        try:
            got = call(tier.name, lambda: list(tier.reader.peek_into(items, deadline=job.deadline)))
            require(tier.name, got, len(items), GET_ANSWERS)
            return got
        except StoreTrouble as trouble:
            log.warning("nothing to be demoted from %s: %s", job.order.store, trouble.why)
            return [Status.FAILED] * len(items)

    def _seal_and_put(
        self, job: JobState, metas: list[PageMeta], pages: list[int], digests: "Digests | None"
    ) -> list[Status]:
        tier = self._tiers[job.order.store]
        unsealed = [(meta, self._staging.frame(page)) for meta, page in zip(metas, pages, strict=False)]
        now_ms = int(self._clock.time() * 1000)
        statuses = call(
            tier.name,
            lambda: list(
                put_sealed(
                    tier.store, unsealed, self._naming.layout, digests=digests, now_ms=now_ms, deadline=job.deadline
                )
            ),
        )
        require(tier.name, statuses, len(unsealed), PUT_ANSWERS)
        return statuses

    def _put(self, tier: TierStore, job: JobState, items: list[Item]) -> list[Status]:
        if not items:
            return []
        statuses = call(tier.name, lambda: list(tier.store.put(items, deadline=job.deadline)))
        require(tier.name, statuses, len(items), PUT_ANSWERS)
        return statuses

    def _moved(self, tier: str, direction: str, num_pages: int) -> int:
        num_bytes = num_pages * self._frame_bytes
        self._metrics.count("moved_bytes_total", num_bytes, tier=tier, direction=direction)
        return num_bytes


def _statuses(held: Sequence[bool]) -> tuple[Status, ...]:
    return tuple(map((Status.ABSENT, Status.HELD).__getitem__, held))


def _leading_hits(got: Sequence[Status]) -> int:
    return sum(1 for _ in takewhile(lambda status: status is Status.HIT, got))
