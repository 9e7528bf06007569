"""MappedStore: a LocalStore on tmpfs, whose pages have addresses.

The same directory, slab and index; in addition a copy engine can write straight into a reserved slot and read
straight out of a borrowed page. Rule 3: a reservation that is out keeps the store's sign of life, even past close(),
so that no other process is given the slot while a copy may still be writing to it.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from headwater.core.page import PageName
from headwater.layout.frame import PREFIX_BYTES, Fault, Header, PageMeta, claims, parse
from headwater.storage.base import Addressable, Borrow, Deadline, GetStatus, PutStatus, Reservation
from headwater.storage.local.attachment import Attachment
from headwater.storage.local.mirror import Slot
from headwater.storage.local.store import LocalStore


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
            for i, taken in enumerate(self._allocator.take(at, pages, deadline)):
                if isinstance(taken, PutStatus):
                    results[i] = taken
                else:
                    meta, num_bytes = pages[i]
                    at.lend(taken, meta.name)
                    at.wipe(taken)
                    results[i] = Reservation(
                        meta, at.slab.view(taken.offset, num_bytes), taken.number, taken.generation, _Lease(at, taken)
                    )

        self._run(work, None)
        return results

    def publish(self, reservations: Sequence[Reservation], *, deadline: Deadline) -> list[PutStatus]:
        """Make written frames visible; what is not the frame its slot was reserved for is REFUSED."""
        results = [PutStatus.REFUSED] * len(reservations)  # those that were consumed before

        def work(at: Attachment, out: list[tuple[int, Slot]]) -> None:
            written: list[tuple[int, Slot, Header]] = []
            unused: list[Slot] = []
            for i, slot in out:
                header = parse(reservations[i].view, known=reservations[i].meta)
                if isinstance(header, Fault) or not _fits(header, reservations[i]):
                    unused.append(slot)
                    results[i] = PutStatus.REFUSED
                else:
                    written.append((i, slot, header))
            at.give_back(unused, deadline)
            statuses = self._publish(at, [(slot, header) for _, slot, header in written], deadline)
            for (i, _, _), status in zip(written, statuses, strict=True):
                results[i] = status

        self._require_same_process()
        for at, out in _still_out(reservations):
            for i, _ in out:
                results[i] = PutStatus.FAILED  # unless `work` gets to say otherwise: the store may be damaged
            self._run_in(at, len(out), partial(work, out=out), None)
        return results

    def abandon(self, reservations: Sequence[Reservation], *, deadline: Deadline) -> None:
        """Give slots back unpublished; whatever was written there is wiped."""

        def work(at: Attachment, out: list[tuple[int, Slot]]) -> None:
            at.give_back([slot for _, slot in out], deadline)

        self._require_same_process()
        for at, out in _still_out(reservations):
            self._run_in(at, len(out), partial(work, out=out), None)

    def borrow(self, names: Sequence[PageName], *, deadline: Deadline) -> list[Borrow | GetStatus]:
        """Addresses of pages. Takes no lock: verify the copy, then ask `still_valid`."""
        results: list[Borrow | GetStatus] = [GetStatus.FAILED] * len(names)

        def work(at: Attachment) -> None:
            if not all(at.catalog.mirror.has_all(names)):
                at.refresh(deadline)
            for i, name in enumerate(names):
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


def _still_out(reservations: Sequence[Reservation]) -> list[tuple[Attachment, list[tuple[int, Slot]]]]:
    """Reservations that were not consumed before, with their index, by the attachment that lent them."""
    groups: dict[Attachment, list[tuple[int, Slot]]] = {}
    for i, reservation in enumerate(reservations):
        lease = reservation.lease
        if isinstance(lease, _Lease) and lease.at.take_back(lease.slot):
            groups.setdefault(lease.at, []).append((i, lease.slot))
    return list(groups.items())
