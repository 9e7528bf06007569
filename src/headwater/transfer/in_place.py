"""Loads and saves without a page between: blocks go straight into a store's own memory, and straight out of it.

For stores whose pages have addresses, where staging reaches their memory. A save reserves slots for its whole row, has
them filled slice by slice, and publishes each slice while the next is being copied. A load borrows pages and has them
copied layer by layer; what arrives is checked on arrival against what the pages' headers vouch for.

Rules kept here: a slot goes back only when no copy can write to it any more (3); a page is believed for what its copy's
digests prove (4, 5); what was published is contiguous. Not here: threads, deadlines that pass while a call hangs.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from headwater.core.events import Load, Save
from headwater.core.page import PageName
from headwater.layout.digest import plane_digests
from headwater.layout.frame import PageMeta, header_bytes, write_header
from headwater.storage.base import Addressable, Clock, GetStatus, PutStatus, Reservation
from headwater.storage.verified import Loan
from headwater.transfer.ledger import JobState, Ledger
from headwater.transfer.staging import InPlace, Staging
from headwater.transfer.tier import Naming, Tier
from headwater.transfer.trouble import StoreTrouble, call, require

if TYPE_CHECKING:
    from headwater.transfer.copy_engine import Transfer

_LOOK_S: Final = 0.02  # between looks whether a job is still wanted, while its bytes are on their way


@dataclass(frozen=True, slots=True)
class _Slice:
    """Blocks of a save that are being copied, or were: where they are in the row, and the slots they go to."""

    places: list[int]
    slots: list[Reservation]
    transfer: "Transfer"


class InPlaceJobs:
    """Does loads and saves in the calling thread. Holds no state of a job."""

    def __init__(
        self,
        tiers: Mapping[str, Tier],
        staging: Staging,
        ledger: Ledger,
        *,
        naming: Naming,
        slice_pages: int,
        clock: Clock,
        moved: Callable[[str, str, int], int],
    ) -> None:
        """`moved` counts pages that went to or came from a tier, and says how many bytes that is."""
        self._tiers = tiers
        self._staging = staging if isinstance(staging, InPlace) else None
        self._ledger = ledger
        self._naming = naming
        self._slice_pages = slice_pages
        self._clock = clock
        self._moved = moved

    def reaches(self, name: str) -> bool:
        """Whether a store's pages can be copied in place. Registers its memory the first time."""
        store = self._tiers[name].store
        if self._staging is None or not isinstance(store, Addressable):
            return False
        memory = call(name, store.memory)
        return memory is not None and self._staging.reaches(memory)

    # --- out of a store -----------------------------------------------------------------------------------------------

    def load(self, job: JobState, order: Load, names: Sequence[PageName]) -> list[str]:
        """All blocks in one transfer. Blocks. Raises JobTrouble, or what staging raises."""
        staging, reader = self._need_staging(), self._tiers[order.store].reader
        lent = call(order.store, lambda: reader.lend(names, deadline=job.deadline))
        require(order.store, lent, len(names), (Loan, GetStatus))
        results: list[str] = [one if isinstance(one, GetStatus) else GetStatus.LATE for one in lent]
        loans = [one for one in lent if isinstance(one, Loan)]  # the first ones
        if not loans:
            return results
        with self._ledger.copying(job) as may_copy:
            if not may_copy:
                return results
            transfer = staging.scatter_from(
                [loan.borrow.view for loan in loans],
                order.slots[: len(loans)],
                expected=np.array([loan.digests for loan in loans], np.uint64),
                on_planes=lambda num_planes: self._ledger.planes_ready(job, num_planes),
            )
            self._see_through(job, transfer)
        if not transfer.complete:
            return results
        num_good = transfer.num_good
        results[: len(loans)] = call(order.store, lambda: reader.settle(loans, num_good, deadline=job.deadline))
        job.num_bytes += self._moved(order.store, "out", num_good)
        return fill_behind(results, GetStatus.HIT, GetStatus.MISS)

    # --- into a store -------------------------------------------------------------------------------------------------

    def save(
        self, job: JobState, order: Save, metas: Sequence[PageMeta], results: list[str], todo: Sequence[int]
    ) -> list[str]:
        """The blocks `todo` of a row; the store has the others. Blocks. Raises JobTrouble, or what staging raises."""
        store = self._addressable(order.store)
        size = self._naming.frame_bytes
        taken = call(order.store, lambda: list(store.reserve([(metas[i], size) for i in todo], deadline=job.deadline)))
        out = [one for one in taken if isinstance(one, Reservation)]
        begun: list[_Slice] = []
        try:
            require(order.store, taken, len(todo), (Reservation, PutStatus))
            slots: dict[int, Reservation] = {}
            for i, one in zip(todo, taken, strict=True):
                if isinstance(one, Reservation):
                    slots[i] = one
                    continue
                results[i] = one
                if not one.held:
                    break  # what comes behind would have no parent
            mine = list(slots)
            goes_on = True
            for at in range(0, len(mine), self._slice_pages):
                places = mine[at : at + self._slice_pages]
                slice_ = self._begin(job, order, places, [slots[i] for i in places])
                if slice_ is None:
                    break
                begun.append(slice_)
                goes_on = len(begun) == 1 or self._publish(job, order, begun.pop(0), metas, results)
                if not goes_on:
                    break
            if goes_on and begun and begun[-1].places[-1] == mine[-1]:
                self._see_through(job, begun[-1].transfer)
                self._ledger.copied(job)  # the device may have its slots again
                self._ledger.flush()
            while goes_on and begun and self._publish(job, order, begun[0], metas, results):
                begun.pop(0)
        except StoreTrouble:
            if PutStatus.STORED not in results:
                raise
            results = [PutStatus.FAILED if status is PutStatus.LATE else status for status in results]
        finally:
            for slice_ in begun:
                slice_.transfer.cancel()
                slice_.transfer.wait()
            with contextlib.suppress(BaseException):  # those that were published are not out any more
                store.abandon(out, deadline=job.deadline)
        if any(not PutStatus(status).held and status is not PutStatus.LATE for status in results):
            return fill_behind(results, (PutStatus.STORED, PutStatus.EXISTS), PutStatus.NO_PARENT)
        return results

    def _begin(self, job: JobState, order: Save, places: list[int], slots: list[Reservation]) -> _Slice | None:
        """Have blocks copied into slots. None: the job is not wanted any more. Does not block."""
        if not self._ledger.begin_copy(job):
            return None
        try:
            transfer = self._need_staging().gather_into(
                [order.slots[i] for i in places],
                [slot.view for slot in slots],
                on_over=lambda: self._ledger.end_copy(job),
            )
        except BaseException:
            self._ledger.end_copy(job)
            raise
        return _Slice(places, slots, transfer)

    def _publish(
        self, job: JobState, order: Save, slice_: _Slice, metas: Sequence[PageMeta], results: list[str]
    ) -> bool:
        """Wait for a slice's bytes, seal them, make them visible. False: the row ends here."""
        transfer = slice_.transfer
        self._see_through(job, transfer)
        if not transfer.complete or not self._ledger.goes_on(job):
            return False
        store, sizes, now_ms = self._addressable(order.store), self._naming.layout.plane_bytes, self._now_ms()
        for at, (i, slot) in enumerate(zip(slice_.places, slice_.slots, strict=True)):
            if transfer.digests is not None:
                digests: list[int] = transfer.digests[at].tolist()
            else:
                digests = plane_digests(slot.view[header_bytes(len(sizes)) :], sizes)
            write_header(slot.view, metas[i], sizes, digests, now_ms=now_ms)
        statuses = call(order.store, lambda: list(store.publish(slice_.slots, deadline=job.deadline)))
        require(order.store, statuses, len(slice_.slots), PutStatus)
        for i, status in zip(slice_.places, statuses, strict=True):
            results[i] = status
        job.num_bytes += self._moved(order.store, "in", statuses.count(PutStatus.STORED))
        return all(status.held for status in statuses)

    # ------------------------------------------------------------------------------------------------------------------

    def _see_through(self, job: JobState, transfer: "Transfer") -> None:
        """Wait for a transfer; one that nobody wants any more is cancelled, and waited for. Raises its error."""
        while not transfer.wait(_LOOK_S, hurry=isinstance(job.order, Load)):
            if job.failing is not None or job.deadline.expired:
                transfer.cancel()
        if transfer.error is not None:
            raise transfer.error

    def _addressable(self, name: str) -> Addressable:
        store = self._tiers[name].store
        if not isinstance(store, Addressable):
            raise StoreTrouble(f"the pages of {name} have no address")
        return store

    def _need_staging(self) -> InPlace:
        if self._staging is None:
            raise StoreTrouble("staging reaches no store's memory")
        return self._staging

    def _now_ms(self) -> int:
        return int(self._clock.time() * 1000)


def fill_behind(results: list[str], good: str | tuple[str, ...], status: str) -> list[str]:
    """Behind the first result that is not good, what is undecided becomes `status`. Mutates and returns `results`."""
    wanted = (good,) if isinstance(good, str) else good
    first_bad = next((i for i, one in enumerate(results) if one not in wanted), len(results))
    for i in range(first_bad + 1, len(results)):
        if results[i] not in wanted:
            results[i] = status
    return results
