"""MappedStore: a LocalStore on tmpfs, whose pages have addresses.

The same directory, slab and index; in addition a copy engine can write straight into a reserved slot and read
straight out of a borrowed page. Rule 3: a reservation that is out keeps the store's sign of life, even past close(),
so that no other process is given the slot while a copy may still be writing to it.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from headwater.core.page import PageName
from headwater.layout.frame import PREFIX_BYTES, Fault, Header, PageMeta, claims, parse
from headwater.storage.base import Addressable, Borrow, Deadline, GetStatus, PutStatus, Reservation
from headwater.storage.local.allocator import Search
from headwater.storage.local.attachment import Attachment, Held
from headwater.storage.local.mirror import Slot
from headwater.storage.local.store import BATCH_PAGES, LocalStore


class _Lease(NamedTuple):
    """What keeps a slot ours: who lent it, and which one."""

    at: Attachment
    slot: Slot


class MappedStore(LocalStore, Addressable):
    """A LocalStore that can be addressed. Made by `build.open_local` where the directory lies on tmpfs."""

    def memory(self) -> memoryview | None:
        """The slab's mapping. A view of it keeps it mapped, past close() and past a rebuild."""
        return self._run(lambda at: at.slab.memory, None)

    def reserve(self, pages: Sequence[tuple[PageMeta, int]], *, deadline: Deadline) -> list[Reservation | PutStatus]:
        """Take a slot for each (page, frame bytes)."""
        results: list[Reservation | PutStatus] = [PutStatus.FAILED] * len(pages)

        def work(at: Attachment) -> None:
            for start in range(0, len(pages), BATCH_PAGES):
                if deadline.expired:
                    results[start:] = [PutStatus.LATE] * (len(pages) - start)
                    return
                search = Search(pages[start : start + BATCH_PAGES])
                with at.taking(search):
                    self._allocator.take(at, search, deadline)
                    for i, taken in enumerate(search.results, start):
                        results[i] = taken if isinstance(taken, PutStatus) else self._lend(at, taken, *pages[i])

        self._run(work, None)
        return results

    @staticmethod
    def _lend(at: Attachment, slot: Slot, meta: PageMeta, num_bytes: int) -> Reservation:
        at.lend(slot, meta.name)
        at.wipe(slot)
        view = at.slab.view(slot.offset, num_bytes)
        return Reservation(meta, view, slot.number, slot.generation, _Lease(at, slot))

    def publish(self, reservations: Sequence[Reservation], *, deadline: Deadline) -> list[PutStatus]:
        """Make written frames visible; what is not the frame its slot was reserved for is REFUSED."""
        results = [PutStatus.REFUSED] * len(reservations)  # those that were consumed before
        refused: set[int] = set()

        def publish(at: Attachment, out: list[tuple[int, Slot]]) -> None:
            written: list[tuple[int, Slot, Header]] = []
            unused: list[Slot] = []
            for i, slot in out:
                header = parse(reservations[i].view, known=reservations[i].meta)
                if isinstance(header, Fault) or not _fits(header, reservations[i]):
                    unused.append(slot)
                    refused.add(i)
                else:
                    written.append((i, slot, header))
            at.give_back(unused, deadline)
            statuses = self._publish(at, [(slot, header) for _, slot, header in written], deadline)
            for (i, _, _), status in zip(written, statuses, strict=True):
                results[i] = status

        def work(at: Attachment, out: list[tuple[int, Slot]]) -> None:
            for start in range(0, len(out), BATCH_PAGES):
                publish(at, out[start : start + BATCH_PAGES])

        for i in self._consume(reservations, work):
            if results[i] is PutStatus.REFUSED and i not in refused:
                results[i] = PutStatus.FAILED  # nobody got to say anything: the store is damaged
        return results

    def abandon(self, reservations: Sequence[Reservation], *, deadline: Deadline) -> None:
        """Give slots back unpublished; whatever was written there is wiped."""
        self._consume(reservations, lambda at, out: at.give_back([slot for _, slot in out], deadline))

    def _consume(
        self, reservations: Sequence[Reservation], work: Callable[[Attachment, list[tuple[int, Slot]]], None]
    ) -> list[int]:
        """Take reservations back and do `work` with those that were still out, by who lent them. Returns which."""
        self._require_same_process()
        consumed: list[int] = []
        for at, lent in _by_attachment(reservations).items():
            user, users = object(), at.users
            held = Held()
            try:
                if not at.enter(user):
                    continue
                with at.taking(held):
                    out = [(i, held.add(slot)) for i, slot in lent if at.take_back(slot)]
                    consumed += [i for i, _ in out]
                    if out:
                        self._run_in(at, lambda at: work(at, out), None)  # noqa: B023  called at once
            finally:
                try:
                    users.discard(user)
                finally:
                    at.close_if_over()
        return consumed

    def borrow(self, names: Sequence[PageName], *, deadline: Deadline) -> list[Borrow | GetStatus]:
        """Addresses of pages. Takes no lock: verify the copy, then ask `still_valid`."""
        results: list[Borrow | GetStatus] = [GetStatus.FAILED] * len(names)

        def work(at: Attachment) -> None:
            if not all(at.catalog.mirror.has_all(names)):
                at.refresh(deadline)
            for i, name in enumerate(names):
                if not i % BATCH_PAGES and deadline.expired:
                    results[i:] = [GetStatus.LATE] * (len(names) - i)
                    break
                place = at.catalog.mirror.places.get(name)
                if place is None:
                    results[i] = GetStatus.MISS
                    continue
                view = at.slab.view(place.offset, place.num_bytes).toreadonly()
                stamp = bytes(view[:PREFIX_BYTES])
                if not claims(memoryview(stamp), name) and not at.catalog.stands_by(place):
                    results[i] = GetStatus.MISS  # moved; where the index stands by it, its verifier will say
                    continue
                at.catalog.touch(place)
                results[i] = Borrow(name, view, place.number, stamp)
            self._flush_touches(at)

        self._run(work, None)
        return results

    def still_valid(self, borrow: Borrow) -> bool:
        """Whether the slot's header is what it was. Reads the mapping only."""
        return bytes(borrow.view[:PREFIX_BYTES]) == borrow.stamp


def _fits(header: Header, reservation: Reservation) -> bool:
    return header.meta == reservation.meta and header.frame_bytes == len(reservation.view)


def _by_attachment(reservations: Sequence[Reservation]) -> dict[Attachment, list[tuple[int, Slot]]]:
    """Reservations with their index, by the attachment that lent them."""
    groups: dict[Attachment, list[tuple[int, Slot]]] = {}
    for i, reservation in enumerate(reservations):
        if isinstance(reservation.lease, _Lease):
            groups.setdefault(reservation.lease.at, []).append((i, reservation.lease.slot))
    return groups
