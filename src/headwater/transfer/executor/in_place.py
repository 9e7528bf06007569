"""Loads and saves without a page between: blocks go straight into a store's own memory, and straight out of it.

For stores whose pages have addresses, where staging reaches their memory. A save goes slice by slice: slots are
reserved and filled, and each slice is published while the next is being copied. A load borrows pages and has them
copied, a row at a time, while the next row is being looked up; what arrives is checked on arrival against what the
pages' headers vouch for.

Rules kept here: a slot goes back only when no copy can write to it any more (3); a page is believed for what its copy's
digests prove (4, 5); what was published is contiguous. A load that loses its store in the middle keeps what it has. Not
here: threads, deadlines that pass while a call hangs.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np

from headwater.core.errors import InvalidCopy
from headwater.core.events import Load, Save
from headwater.core.page import PageName
from headwater.core.results import GET_ANSWERS, PUT_ANSWERS, PUT_HELD, Status
from headwater.layout.headers import write_headers
from headwater.storage.base import Addressable, Reservation
from headwater.storage.verified import Loan
from headwater.transfer.executor.ledger import JobState
from headwater.transfer.executor.tools import JobTools
from headwater.transfer.executor.trouble import StoreTrouble, calling, fill, is_trouble, require

if TYPE_CHECKING:
    from headwater.transfer.device.copy_engine import CopyEngine
    from headwater.transfer.device.transfer import Transfer

log: Final = logging.getLogger("headwater")

_HELD_OR_LATE: Final = PUT_HELD | {Status.LATE}
_HEAD_PAGES: Final = 64  # of a long load go first, where nothing else is on the wire,
_FIRST_PAGES: Final = 16  # and where nobody computes layer by layer
_ROW_PAGES: Final = 128  # are borrowed in one call: to look them up takes less than to copy those before them
_BREATH_S: Final = 1e-6  # who drives the copies needs the interpreter now and then; less than a sleep does not do


@dataclass(frozen=True, slots=True)
class _Slice:
    """Blocks of a save that are being copied, or were: where they are in the row, and the slots they go to."""

    places: list[int]
    slots: list[Reservation]
    transfer: "Transfer"


@dataclass(frozen=True, slots=True)
class _Row:
    """Blocks of a load that are being copied, or were: where they begin, and the pages they come from."""

    start: int
    loans: list[Loan]
    transfer: "Transfer"


class InPlaceJobs:
    """Does loads and saves in the calling thread. Holds no state of a job."""

    def __init__(self, tools: JobTools, engine: "CopyEngine") -> None:
        self._tiers, self._staging, self._ledger = tools.tiers, tools.staging, tools.ledger
        self._naming, self._clock, self._throttle = tools.naming, tools.clock, tools.throttle
        self._slice_pages = tools.in_place_pages
        self._moved = tools.moved
        self._engine = engine

    def reaches(self, name: str) -> bool:
        """Whether a store's pages can be copied in place. Registers its memory the first time."""
        store = self._tiers[name].store.addressable()
        if store is None:
            return False
        with calling(name):
            memory = store.memory()
        return memory is not None and self._staging.in_place(memory) is not None

    # --- out of a store -----------------------------------------------------------------------------------------------

    def load(self, job: JobState, order: Load) -> list[Status]:
        """All blocks, in rows: while one is on its way the next is looked up.

        Loses it its store at a later row, what came before that counts, and the rest is "failed". Blocks. Raises
        JobTrouble, or what staging raises.
        """
        names, reader = self._naming.names(order.keys), self._tiers[order.store].reader
        results: list[Status] = [Status.LATE] * len(names)
        begun: list[_Row] = []
        trouble: StoreTrouble | None = None
        try:
            for start, end in pairwise(self._cut(len(names))):
                if not self._begin_row(job, order, names[start:end], start, results, begun):
                    break
        except StoreTrouble as error:
            trouble = error
        finally:
            self._await_rows(job, begun)
        num_done = 0  # blocks in a row that the store was at hand for
        try:
            for row in begun:
                if not row.transfer.complete:
                    break
                num_good = row.transfer.num_good
                with calling(order.store):
                    settled = reader.settle(row.loans, num_good, deadline=job.deadline)
                results[row.start : row.start + len(row.loans)] = settled
                job.num_bytes += self._moved(order.store, "out", num_good)
                if num_good < len(row.loans):
                    break
                num_done = row.start + len(row.loans)
        except StoreTrouble as error:
            trouble = error
        if trouble is not None and results[num_done] is Status.LATE:
            if not num_done:
                raise trouble
            return fill(results, num_done, Status.FAILED)
        return fill_behind(results, Status.HIT, Status.MISS)

    @staticmethod
    def _await_rows(job: JobState, begun: Sequence[_Row]) -> None:
        """Wait for every row, also behind one that failed: its copy must not land when the job is over (rule 2).

        Raises what the device raised first.
        """
        failed: list[Exception] = []
        for row in begun:
            try:
                row.transfer.see_through(lambda: not failed and job.is_wanted())
            except Exception as error:  # noqa: BLE001  raised below
                failed.append(error)
        if failed:
            raise failed[0]

    def _cut(self, num_pages: int) -> list[int]:
        """Where the rows of a load begin, and the end of the last.

        Where an engine computes behind its bytes, layer by layer, a load's layers come for all blocks at a time: so
        everything behind the first blocks is one row. Elsewhere rows are short, or the wire would stand still while a
        long one is looked up; the first ones are shorter, each twice the one before it: to look a page up takes about
        half of what it takes to copy it.
        """
        is_first = not self._engine.is_loading
        if self._engine.layerwise:
            return [0, *([_HEAD_PAGES] if is_first and num_pages >= 2 * _HEAD_PAGES else []), num_pages]
        starts, size = [0], _FIRST_PAGES if is_first else _ROW_PAGES
        while starts[-1] + size < num_pages:
            starts.append(starts[-1] + size)
            size = min(2 * size, _ROW_PAGES)
        return [*starts, num_pages]

    def _begin_row(
        self,
        job: JobState,
        order: Load,
        names: Sequence[PageName],
        start: int,
        results: list[Status],
        begun: list[_Row],
    ) -> bool:
        """Borrow pages and have them copied. False: the row ends here. Does not wait for the bytes."""
        reader = self._tiers[order.store].reader
        lent: list[Loan | Status] = []
        for at in range(0, len(names), _ROW_PAGES):
            asked = names[at : at + _ROW_PAGES]
            with calling(order.store):
                lent += reader.lend(asked, deadline=job.deadline)
            require(order.store, lent, at + len(asked), GET_ANSWERS, Loan)
            if isinstance(lent[-1], Status):
                lent += [Status.MISS] * (len(names) - len(lent))
                break
            if len(lent) < len(names):
                time.sleep(_BREATH_S)
        loans = [one for one in lent if isinstance(one, Loan)]  # the first ones
        for i, one in enumerate(lent, start):
            if isinstance(one, Status):
                results[i] = one
        if not loans or not self._ledger.begin_copy(job):
            return False
        before = list(begun)

        def tell(num_planes: int) -> None:  # what went before is over by now, and may have been wrong
            if all(row.transfer.num_good == len(row.loans) for row in before):
                self._ledger.planes_ready(job, num_planes)

        try:
            transfer = self._engine.scatter(
                [loan.borrow.view for loan in loans],
                order.slots[start : start + len(loans)],
                expected=np.stack([loan.digests for loan in loans]),
                on_planes=tell if start + len(loans) == len(order.keys) else None,
                on_over=lambda: self._ledger.end_copy(job),
            )
        except BaseException:
            self._ledger.end_copy(job)
            raise
        begun.append(_Row(start, loans, transfer))
        time.sleep(_BREATH_S)  # who drives the copies begins with these before more are looked up
        return len(loans) == len(names)

    # --- into a store -------------------------------------------------------------------------------------------------

    def save(self, job: JobState, order: Save) -> list[Status]:
        """Those blocks of a row that the store has not. Blocks. Raises JobTrouble, or what staging raises."""
        if not order.awaited:
            self._throttle.wait()
        results, todo = self._tiers[order.store].missing(self._naming.names(order.keys), job.deadline)
        store = self._addressable(order.store)
        reserved: list[Reservation] = []
        begun: list[_Slice] = []
        try:
            is_sound = goes_on = True
            for at in range(0, len(todo), self._slice_pages):
                if not order.awaited:
                    self._throttle.wait()
                goes_on = self._begin_slice(job, order, todo[at : at + self._slice_pages], results, reserved, begun)
                if len(begun) > 1:
                    is_sound = self._publish(job, order, begun[0], results)
                    begun.pop(0)  # not before: while a copy may write to its slots, they must not go back
                if not (goes_on and is_sound):
                    break
            if goes_on and is_sound:
                if begun:
                    begun[-1].transfer.see_through(job.is_wanted, hurry=False)
                self._ledger.copied(job)  # the device may have its slots again
                self._ledger.flush()
            while is_sound and begun:
                if not order.awaited:
                    self._throttle.wait()
                is_sound = self._publish(job, order, begun[0], results)
                begun.pop(0)
        except StoreTrouble:
            if Status.STORED not in results:
                raise
            results = [Status.FAILED if status is Status.LATE else status for status in results]
        finally:
            for slice_ in begun:
                slice_.transfer.cancel()
                slice_.transfer.wait()
            try:
                store.abandon(reserved, deadline=job.deadline)  # those that were published are not out any more
            except BaseException as error:  # foreign code: the results stand, and the slots stay the store's trouble
                if not is_trouble(error):
                    raise
                log.exception("%s did not take %d slots back", order.store, len(reserved))
        if not _HELD_OR_LATE.issuperset(results):
            return fill_behind(results, (Status.STORED, Status.EXISTS), Status.NO_PARENT)
        return results

    def _begin_slice(
        self,
        job: JobState,
        order: Save,
        places: Sequence[int],
        results: list[Status],
        reserved: list[Reservation],
        begun: list[_Slice],
    ) -> bool:
        """Reserve slots for blocks and have them copied there. False: the row ends here. Does not wait for the bytes.

        The block before a slice may still be on its way: it is published first.
        """
        store, size = self._addressable(order.store), self._naming.frame_bytes
        if not self._ledger.goes_on(job):
            return False
        wanted = [(meta, size) for meta in self._naming.metas(order, places)]
        with calling(order.store):
            taken = list(store.reserve(wanted, deadline=job.deadline))
        reserved += [one for one in taken if isinstance(one, Reservation)]
        time.sleep(_BREATH_S)
        require(order.store, taken, len(places), PUT_ANSWERS, Reservation)
        slots: dict[int, Reservation] = {}
        ends = False
        for i, one in zip(places, taken, strict=True):
            if isinstance(one, Reservation):
                slots[i] = one
                continue
            results[i] = one
            ends = not one.held
            if ends:
                break  # what comes behind would have no parent
        if not slots:
            return not ends
        if not self._ledger.begin_copy(job):
            return False
        try:
            transfer = self._engine.gather(
                [order.slots[i] for i in slots],
                [slot.view for slot in slots.values()],
                on_over=lambda: self._ledger.end_copy(job),
            )
        except BaseException:
            self._ledger.end_copy(job)
            raise
        begun.append(_Slice(list(slots), list(slots.values()), transfer))
        return not ends

    def _publish(self, job: JobState, order: Save, slice_: _Slice, results: list[Status]) -> bool:
        """Wait for a slice's bytes, seal them, make them visible. False: the row ends here."""
        transfer = slice_.transfer
        transfer.see_through(job.is_wanted, hurry=False)
        if not transfer.complete or not self._ledger.goes_on(job):
            return False
        store, sizes, now_ms = self._addressable(order.store), self._naming.layout.plane_bytes, self._now_ms()
        if transfer.digests is None:  # made of the slot, which is shared, they would prove nothing (rule 4)
            raise InvalidCopy("a copy into a store's memory needs a copy engine that digests what it reads")
        views, metas = [slot.view for slot in slice_.slots], [slot.meta for slot in slice_.slots]
        write_headers(views, metas, sizes, transfer.digests, now_ms=now_ms)
        time.sleep(_BREATH_S)
        with calling(order.store):
            statuses = list(store.publish(slice_.slots, deadline=job.deadline))
        require(order.store, statuses, len(slice_.slots), PUT_ANSWERS)
        for i, status in zip(slice_.places, statuses, strict=True):
            results[i] = status
        time.sleep(_BREATH_S)
        job.num_bytes += self._moved(order.store, "in", statuses.count(Status.STORED))
        return PUT_HELD.issuperset(statuses)

    # ------------------------------------------------------------------------------------------------------------------

    def _addressable(self, name: str) -> Addressable:
        store = self._tiers[name].store.addressable()
        if store is None:
            raise StoreTrouble(f"the pages of {name} have no address")
        return store

    def _now_ms(self) -> int:
        return int(self._clock.time() * 1000)


def fill_behind(results: list[Status], good: Status | tuple[Status, ...], status: Status) -> list[Status]:
    """Behind the first result that is not good, what is undecided becomes `status`. Mutates and returns `results`."""
    wanted = (good,) if isinstance(good, str) else good
    first_bad = next((i for i, one in enumerate(results) if one not in wanted), len(results))
    for i in range(first_bad + 1, len(results)):
        if results[i] not in wanted:
            results[i] = status
    return results
