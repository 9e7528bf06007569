"""MappedStore: a LocalStore on tmpfs, whose pages have addresses.

The same directory, slab and index; in addition a copy engine can write straight into a reserved slot and read
straight out of a borrowed page. Rule 3: a reservation that is out keeps the store's sign of life, even past close(),
so that no other process is given the slot while a copy may still be writing to it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress, repeat
from typing import Final, NamedTuple, Self

from headwater.core.page import PageName
from headwater.core.results import Status
from headwater.layout.frame import PREFIX_BYTES, PageMeta, claims, parse
from headwater.layout.headers import are_of, claim_all
from headwater.storage.base import Addressable, Borrow, Deadline, Reservation
from headwater.storage.local.allocator import Search
from headwater.storage.local.attachment import Attachment, HeldSlots
from headwater.storage.local.mirror import Slot
from headwater.storage.local.store import LocalStore
from headwater.storage.local.writing import publish_slots

BATCH_PAGES: Final = 128  # in one transaction: no bytes are copied in it, so more than of pages that are put


class _Lease(NamedTuple):
    """What keeps a slot ours: who lent it, and which one."""

    at: Attachment
    slot: Slot


_as_lease = partial(tuple.__new__, _Lease)  # no Python call each
_as_reservation = partial(tuple.__new__, Reservation)


class MappedStore(LocalStore, Addressable):
    """A LocalStore that can be addressed. Made by `build.open_local` where the directory lies on tmpfs."""

    def addressable(self) -> Self:
        """Itself."""
        return self

    def piecewise(self) -> None:
        """None: pages are copied where they lie, and one thread fills the memory bus that others need."""
        return

    def memory(self) -> memoryview | None:
        """The slab's mapping. A view of it keeps it mapped, past close() and past a rebuild."""
        return self._run(lambda at: at.slab.memory, None)

    def reserve(self, pages: Sequence[tuple[PageMeta, int]], *, deadline: Deadline) -> list[Reservation | Status]:
        """Take a slot for each (page, frame bytes)."""
        results: list[Reservation | Status] = [Status.FAILED] * len(pages)

        def work(at: Attachment) -> None:
            for start in range(0, len(pages), BATCH_PAGES):
                if deadline.expired:
                    results[start:] = [Status.LATE] * (len(pages) - start)
                    return
                search = Search(pages[start : start + BATCH_PAGES])
                with at.taking(search):
                    self._allocator.take(at, search, deadline)
                    results[start : start + BATCH_PAGES] = self._lend(at, search)

        self._run(work, None)
        return results

    @staticmethod
    def _lend(at: Attachment, search: Search) -> list[Reservation | Status]:
        """What a search found, lent to the caller."""
        found = [(one, *page) for one, page in zip(search.results, search.pages, strict=True) if isinstance(one, Slot)]
        slots = [slot for slot, _, _ in found]
        metas = [meta for _, meta, _ in found]
        at.lend(slots, [meta.name for meta in metas])
        at.slab.wipe_all([slot.offset for slot in slots])  # ours, as we have just seen to ourselves
        views = at.slab.views([(slot.offset, num_bytes) for slot, _, num_bytes in found])
        leases = map(_as_lease, zip(repeat(at), slots))
        numbers, generations = [slot.number for slot in slots], [slot.generation for slot in slots]
        lent = map(_as_reservation, zip(metas, views, numbers, generations, leases, strict=True))
        return [next(lent) if isinstance(one, Slot) else one for one in search.results]

    def publish(self, reservations: Sequence[Reservation], *, deadline: Deadline) -> list[Status]:
        """Make written frames visible; what is not the frame its slot was reserved for is REFUSED."""
        results = [Status.REFUSED] * len(reservations)  # those that were consumed before
        refused: set[int] = set()

        def publish(at: Attachment, out: list[tuple[int, Slot]]) -> None:
            views, metas = [reservations[i].view for i, _ in out], [reservations[i].meta for i, _ in out]
            written: list[tuple[int, Slot]] = []
            unused: list[Slot] = []
            for (i, slot), is_right in zip(out, are_of(views, metas), strict=True):
                if is_right or _fits(reservations[i]):
                    written.append((i, slot))
                else:
                    unused.append(slot)
                    refused.add(i)
            at.give_back(unused, deadline)
            ready = [(slot, reservations[i].meta, len(reservations[i].view)) for i, slot in written]
            for (i, _), status in zip(written, publish_slots(at, ready, deadline), strict=True):
                results[i] = status

        def work(at: Attachment, out: list[tuple[int, Slot]]) -> None:
            for start in range(0, len(out), BATCH_PAGES):
                publish(at, out[start : start + BATCH_PAGES])

        for i in self._consume(reservations, work):
            if results[i] is Status.REFUSED and i not in refused:
                results[i] = Status.FAILED  # nobody got to say anything: the store is damaged
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
            held = HeldSlots()
            try:
                if not at.enter(user):
                    continue
                with at.taking(held):
                    held.add(slot for _, slot in lent)
                    out = list(compress(lent, at.take_back([slot for _, slot in lent])))
                    consumed += [i for i, _ in out]
                    if out:
                        self._run_in(at, lambda at: work(at, out), None)  # noqa: B023  called at once
            finally:
                try:
                    users.discard(user)
                finally:
                    at.close_if_over()
        return consumed

    def borrow(self, names: Sequence[PageName], *, deadline: Deadline) -> list[Borrow | Status]:
        """Addresses of pages. Takes no lock: verify the copy, then ask `still_valid`."""
        results: list[Borrow | Status] = [Status.FAILED] * len(names)

        def work(at: Attachment) -> None:
            if not all(at.catalog.mirror.has_all(names)):
                at.refresh(deadline)
            for start in range(0, len(names), BATCH_PAGES):
                if deadline.expired:
                    results[start:] = [Status.LATE] * (len(names) - start)
                    break
                results[start : start + BATCH_PAGES] = self._borrow(at, names[start : start + BATCH_PAGES])
            at.flush_touches()

        self._run(work, None)
        return results

    @staticmethod
    def _borrow(at: Attachment, names: Sequence[PageName]) -> list[Borrow | Status]:
        places = at.catalog.mirror.places
        found = [(name, place) for name in names if (place := places.get(name)) is not None]
        stamps = at.slab.prefixes([place.offset for _, place in found])
        if not claim_all(stamps, [name for name, _ in found]):
            # Some have moved; where the index stands by one, its verifier will say.
            ends = range(PREFIX_BYTES, len(stamps) + 1, PREFIX_BYTES)
            claimed = [
                claims(memoryview(stamps)[end - PREFIX_BYTES : end], name) or at.catalog.follower.stands_by(place)
                for end, (name, place) in zip(ends, found, strict=True)
            ]
            found = list(compress(found, claimed))
            stamps = b"".join(compress((stamps[end - PREFIX_BYTES : end] for end in ends), claimed))
        at.catalog.recency.touch(place for _, place in found)
        views = at.slab.views([(place.offset, place.num_bytes) for _, place in found])
        ends = range(PREFIX_BYTES, len(stamps) + 1, PREFIX_BYTES)
        lent = {
            name: Borrow(name, view.toreadonly(), place.number, stamps[end - PREFIX_BYTES : end])
            for (name, place), view, end in zip(found, views, ends, strict=True)
        }
        return [lent.get(name, Status.MISS) for name in names]

    def still_valid(self, borrow: Borrow) -> bool:
        """Whether the slot's header is what it was. Reads the mapping only."""
        return bytes(borrow.view[:PREFIX_BYTES]) == borrow.stamp


def _fits(reservation: Reservation) -> bool:
    """Whether a slot holds the frame that it was reserved for."""
    header = parse(reservation.view, known=reservation.meta)
    if isinstance(header, Status):
        return False
    return header.meta == reservation.meta and header.frame_bytes == len(reservation.view)


def _by_attachment(reservations: Sequence[Reservation]) -> dict[Attachment, list[tuple[int, Slot]]]:
    """Reservations with their index, by the attachment that lent them."""
    groups: dict[Attachment, list[tuple[int, Slot]]] = {}
    for i, reservation in enumerate(reservations):
        if isinstance(reservation.lease, _Lease):
            groups.setdefault(reservation.lease.at, []).append((i, reservation.lease.slot))
    return groups
