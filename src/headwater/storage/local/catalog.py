"""What the records of a LocalStore mean: slots given out, published, taken back, and what leaves first.

Changes run inside `begin` and `commit`, under the index's lock (`attachment.py`), with a mirror that is current.
Every step is one record, in an order that is right at each point: a slot is wiped before it is free, a page is
published after the one before it and removed before it. So nothing has to be undone when a process dies in between;
what others did not hear of, they hear of from who comes next (`begin`), because the dead one left `busy` behind.

Not here: the bytes of records (`table.py`) and pages (`slab.py`), locks, what to do about a page (`store.py`). Not safe
from several threads: `attachment.py` holds a lock around it.
"""

import secrets
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from itertools import compress

import numpy as np
import numpy.typing as npt

from headwater.core.errors import StoreBusy
from headwater.core.page import PageName
from headwater.core.results import Status
from headwater.layout.frame import PageMeta
from headwater.policy import Policy
from headwater.storage.base import Clock, Deadline
from headwater.storage.local.follower import Follower
from headwater.storage.local.geometry import sectors
from headwater.storage.local.locks import MAX_OWNERS
from headwater.storage.local.mirror import Mirror, PageRow, Place, Slot
from headwater.storage.local.recency import Recency
from headwater.storage.local.records import NO_PAGE, RecordRows, RecordState, in_state, record_rows, use_rows
from headwater.storage.local.table import Table

_as_slot = partial(tuple.__new__, Slot)  # no Python call each
_as_place = partial(tuple.__new__, Place)


class Catalog:
    """The index, opened."""

    def __init__(self, table: Table, policy: Policy, clock: Clock) -> None:
        self.table = table
        self.geometry = table.geometry
        self.mirror = Mirror(table.geometry)
        self.recency = Recency(table, self.mirror, policy, clock)
        self.follower = Follower(table, self.mirror, self.recency)
        self._changed: dict[int, None] = {}
        self._changed_extents: dict[int, None] = {}

    # --- changes, ours and others' ------------------------------------------------------------------------------------

    def begin(self, owner: int, deadline: Deadline) -> bool:
        """Change something: the index's lock is held. False at the deadline; then nothing is changed."""
        table = self.table
        newest = table.newest()
        if table.busy or newest is None:  # somebody died while he changed something, or who counts was damaged
            if not self._recover(newest, deadline):
                return False
        elif not self.follower.catch_up(deadline):
            return False
        table.set_busy(owner)
        self.recency.now_s()
        return True

    def _recover(self, newest: int | None, deadline: Deadline) -> bool:
        """Read everything, and have everybody read everything. False at the deadline; the next one goes on."""
        pages = self.follower.recover(newest, deadline)
        if pages is None:
            return False
        self.drop_misfits(pages)
        jump = self.geometry.num_changes + 1
        if newest is None:  # beyond whatever anybody has seen
            newest, jump = max(0, self.mirror.seen), jump + secrets.randbelow(1 << 48)
        self.mirror.seen = newest + jump
        self.table.set_newest(self.mirror.seen)
        self._changed, self._changed_extents = {}, {}
        return True

    def commit(self) -> None:
        """Tell the others."""
        if self._changed or self._changed_extents:
            newest = self.table.tell(self.mirror.seen, self._changed, self._changed_extents)
            self._changed, self._changed_extents = {}, {}
            self.table.set_newest(newest)
            self.mirror.seen = newest
        self.table.set_busy(0)

    def abort(self) -> None:
        """Something broke off in the middle. What was changed stays changed, and the others are told of it.

        If that breaks off too, who begins next has them read everything. We do in any case: the mirror may have heard
        of one half of a change.
        """
        try:
            self.commit()
        finally:
            self._changed, self._changed_extents = {}, {}
            self.mirror.seen = -1

    def write(self, numbers: Sequence[int], rows: RecordRows, *, tell: bool = True) -> None:
        """Say what slots hold, one after the other."""
        if tell:  # first: what was changed is told, wherever we are interrupted
            self._changed.update(dict.fromkeys(numbers))
        self.table.set_rows(numbers, rows)

    def drop_misfits(self, pages: list[PageRow]) -> None:
        """Free the slots of those of all pages that have no page before them, or a name that another one has."""
        misfits = _misfits(pages)
        self.free([(place.number, place.generation + 1, slot_bytes) for _, _, place, slot_bytes, *_ in misfits])
        if misfits:  # the mirror may have had one of two, and not the one that stayed
            self.follower.adopt(self.follower.reread())

    # --- owners -------------------------------------------------------------------------------------------------------

    def enrol(self) -> int:
        """A number for an owner, to stand in what it reserves, with a lock that tells whether it lives.

        Raises StoreBusy where there are too many.
        """
        enrolled = set(self.table.owners())
        for owner in range(1, MAX_OWNERS + 1):
            if owner not in enrolled and self.table.slab.locks.take_owner(owner):
                self.table.set_owner(owner, enrolled=True)
                return owner
        raise StoreBusy(f"{MAX_OWNERS} stores have {self.table.slab.path} open; close some")

    def retire_dead(self, myself: int) -> int:
        """Free what owners had reserved that are dead. Returns how many slots came back."""
        alive = self.table.slab.locks.is_alive
        dead = {owner for owner in self.table.owners() if owner != myself and not alive(owner)}
        return self.leave(dead) if dead else 0

    def leave(self, owners: Collection[int]) -> int:
        """Free, wiped, what these owners still have reserved, and forget them. Returns how many slots came back."""
        count = 0
        for extent, slot_bytes in self.mirror.classes.items():
            found = self.table.reserved_by(owners, extent, slot_bytes)
            self.free([(number, record.generation, slot_bytes) for number, record in found])
            count += len(found)
        for owner in owners:
            self.table.set_owner(owner, enrolled=False)
        return count

    def free_reserved(self, owner: int, but: Collection[int]) -> None:
        """Free, wiped, what an owner has reserved, but for slots of these numbers."""
        for extent, slot_bytes in self.mirror.classes.items():
            found = self.table.reserved_by({owner}, extent, slot_bytes)
            self.free([(number, record.generation, slot_bytes) for number, record in found if number not in but])

    # --- slots --------------------------------------------------------------------------------------------------------

    def cut(self, extent: int, slot_bytes: int) -> None:
        """Cut an extent into free slots; whatever it was cut into before holds nothing."""
        numbers = self.geometry.numbers(extent, slot_bytes)
        self._changed_extents[extent] = None
        self.table.set_extent(extent, 0)
        before, right = self.table.rows(numbers)
        rows = record_rows(RecordState.FREE, len(numbers))
        rows["generation"] = np.where(right, before["generation"] + np.uint64(1), np.uint64(0))
        rows["slot_bytes"] = slot_bytes
        self.write(numbers, rows, tell=False)
        self.table.set_extent(extent, slot_bytes)
        self.mirror.set_class(extent, slot_bytes)
        for number in numbers:
            self.mirror.remember_free(number, slot_bytes)

    def take_free(self, slot_bytes: int, owner: int, wanted: int) -> list[Slot]:
        """Reserve up to `wanted` free slots of this size."""
        found: list[Slot] = []
        while len(found) < wanted and (numbers := self.mirror.next_free(slot_bytes, wanted - len(found))):
            found += self._take(numbers, slot_bytes, owner)
        return found

    def _take(self, numbers: list[int], slot_bytes: int, owner: int) -> list[Slot]:
        """Reserve those of these slots that are free. Nobody is told: who thinks so of one looks before he takes it."""
        per_extent, most = self.geometry.max_slots, self.geometry.slots_in_extent(slot_bytes)
        classes = self.mirror.classes
        numbers = [n for n in numbers if n % per_extent < most and classes.get(n // per_extent) == slot_bytes]
        rows, right = self.table.rows(numbers)
        free = np.flatnonzero(right & in_state(rows, RecordState.FREE) & (rows["slot_bytes"] == slot_bytes))
        return self._reserve([numbers[i] for i in free.tolist()], rows[free], owner, tell=False)

    def _reserve(self, numbers: list[int], before: RecordRows, owner: int, *, tell: bool = True) -> list[Slot]:
        """Give slots to an owner, whatever they were before."""
        if not numbers:
            return []
        rows = record_rows(RecordState.RESERVED, len(numbers))
        rows["owner"] = owner
        rows["generation"] = before["generation"] + np.uint64(1)
        rows["slot_bytes"] = before["slot_bytes"]
        self.write(numbers, rows, tell=tell)
        offsets = self.geometry.offsets(numbers, before["slot_bytes"]).tolist()
        return list(map(_as_slot, zip(numbers, rows["generation"].tolist(), offsets, strict=True)))

    def take_victims(self, slot_bytes: int, owner: int, *, wanted: int, spare: frozenset[PageName]) -> list[Slot]:
        """Evict up to `wanted` pages of this slot size, in the order of `LeafOrder`, and reserve their slots.

        Pages in `spare` stay. Other processes' reads change priorities in the index alone, so each choice is compared
        with it, and a page that was used since goes back into the order.
        """
        order, places = self.mirror.order, self.mirror.places
        slots: list[Slot] = []
        while len(slots) < wanted:
            popped: list[tuple[PageName, PageName, float]] = []
            while len(slots) + len(popped) < wanted and (found := order.pop(slot_bytes, spare)) is not None:
                popped.append(found)
            if not popped:
                break
            worth = self.table.priorities([places[name].number for name, _, _ in popped], self.recency.seen_s).tolist()
            chosen: list[PageName] = []
            for (name, parent, priority), current in zip(popped, worth, strict=True):
                if current > priority or order.has_children(name):  # a child that went back keeps its parent
                    order.add(name, parent, max(current, priority), group=slot_bytes)
                else:
                    chosen.append(name)
            self.recency.evicted(chosen)
            slots += self._unpublish(chosen, owner)
        return slots

    def _unpublish(self, names: Sequence[PageName], owner: int) -> list[Slot]:
        """Reserve the slots of pages, which are gone, but for those that were gone before."""
        places = [self.mirror.places[name] for name in names]
        if not places:
            return []
        numbers = [place.number for place in places]
        rows, right = self.table.rows(numbers)
        self.mirror.forget(numbers)
        same = rows["generation"] == np.array([place.generation for place in places], np.uint64)
        held = np.flatnonzero(right & same & in_state(rows, RecordState.LIVE))
        return self._reserve([numbers[i] for i in held.tolist()], rows[held], owner)

    def take_pages(self, names: Iterable[PageName], owner: int) -> list[Slot]:
        """Unpublish pages that nothing builds on but those before them here, and reserve their slots."""
        places = self.mirror.places
        return self._unpublish([name for name in dict.fromkeys(names) if name in places], owner)

    def remove(self, names: Iterable[PageName], owner: int) -> None:
        """Unpublish pages that nothing builds on but those before them here; their slots are wiped and free."""
        classes, extent_of = self.mirror.classes, self.geometry.extent_of
        slots = self.take_pages(names, owner)
        self.free([(number, generation, classes[extent_of(number)]) for number, generation, _ in slots])

    def free(self, slots: Sequence[tuple[int, int, int]]) -> None:
        """Wipe slots, and let them go: (number, generation, slot size)."""
        if not slots:
            return
        numbers = [number for number, _, _ in slots]
        rows = record_rows(RecordState.FREE, len(slots))
        rows["generation"] = np.array([generation for _, generation, _ in slots], np.uint64)
        rows["slot_bytes"] = np.array([slot_bytes for _, _, slot_bytes in slots], np.uint64)
        self.table.slab.wipe_all(self.geometry.offsets(numbers, rows["slot_bytes"]).tolist())
        self.write(numbers, rows)
        self.mirror.forget(numbers)
        for number, _, slot_bytes in slots:
            self.mirror.remember_free(number, slot_bytes)

    def give_back(self, slots: Iterable[Slot], owner: int) -> None:
        """Free slots that this owner reserved and did not publish, wiped. Others are left alone."""
        wanted = list(dict.fromkeys(slots))
        if wanted:
            rows, ours = self._reserved(wanted, owner)
            sizes = rows["slot_bytes"].tolist()
            self.free([(*wanted[i][:2], sizes[i]) for i in np.flatnonzero(ours).tolist()])

    def ours(self, slots: Sequence[Slot], owner: int) -> list[Slot]:
        """Those of these slots that this owner holds. Takes no lock."""
        return list(compress(slots, self._reserved(slots, owner)[1].tolist())) if slots else []

    def _reserved(self, slots: Sequence[Slot], owner: int) -> tuple[RecordRows, npt.NDArray[np.bool_]]:
        """The records of slots, and which of them say that this owner holds it."""
        rows, right = self.table.rows([slot.number for slot in slots])
        same = rows["generation"] == np.array([slot.generation for slot in slots], np.uint64)
        return rows, right & same & in_state(rows, RecordState.RESERVED) & (rows["owner"] == owner)

    def take_extent(self, extent: int, owner: int) -> list[Slot] | None:
        """Reserve all free slots of an extent. None, and nothing taken, while one of them is reserved by somebody."""
        slot_bytes = self.mirror.classes.get(extent, 0)
        numbers = self.geometry.numbers(extent, slot_bytes)
        free = []
        for number, record in self.table.records(numbers):
            if record is None or record.state == RecordState.RESERVED:
                return None
            if record.state == RecordState.FREE:
                free.append(number)
        found = self._take(free, slot_bytes, owner)
        self.mirror.forget(free)
        return found

    def is_ours(self, extent: int, owner: int) -> bool:
        """Whether every slot of an extent is reserved by this owner."""
        numbers = self.geometry.numbers(extent, self.mirror.classes.get(extent, 0))
        return all(
            record is not None and (record.state, record.owner) == (RecordState.RESERVED, owner)
            for _, record in self.table.records(numbers)
        )

    def publish(
        self, written: Sequence[tuple[Slot, PageMeta, int]], owner: int, *, used_s: Sequence[float] | None = None
    ) -> list[Status]:
        """Make reserved slots LIVE, in order: (slot, page, frame bytes).

        FAILED for one that is no longer this owner's; EXISTS and NO_PARENT leave the slot reserved. `used_s`: when each
        was used; now, by default.
        """
        places = self.mirror.places
        slots, metas = [slot for slot, _, _ in written], [meta for _, meta, _ in written]
        lengths = [num_bytes for _, _, num_bytes in written]
        rows, ours = self._reserved(slots, owner)
        sizes = np.array([*map(sectors, lengths)], np.uint64)
        fits = (ours & (rows["slot_bytes"] == sizes)).tolist()
        statuses: list[Status] = []
        fresh: set[PageName] = set()
        for meta, is_fit in zip(metas, fits, strict=True):
            name = meta.name
            status = Status.STORED
            if name in places or name in fresh:
                status = Status.EXISTS
            elif meta.depth and (parent := meta.parent_name) not in fresh and parent not in places:
                status = Status.NO_PARENT
            elif not is_fit:
                status = Status.FAILED
            else:
                fresh.add(name)
            statuses.append(status)
        if fresh:
            is_new = [status is Status.STORED for status in statuses]
            self._publish(
                list(compress(slots, is_new)),
                list(compress(metas, is_new)),
                list(compress(lengths, is_new)),
                [self.recency.seen_s] * len(fresh) if used_s is None else list(compress(used_s, is_new)),
            )
        return statuses

    def _publish(self, slots: list[Slot], metas: list[PageMeta], lengths: list[int], used_s: list[float]) -> None:
        """Pages that are new, with frames of these lengths, in slots that are the caller's and have their size."""
        numbers, generations, offsets = ([slot[i] for slot in slots] for i in range(3))
        names, parents = [meta.name for meta in metas], [meta.parent_name for meta in metas]
        depths, expiries_ms = [meta.depth for meta in metas], [meta.expires_at_ms for meta in metas]
        sizes = [*map(sectors, lengths)]
        # Whatever a first block says, it builds on nothing.
        built_on = [parent if depth else NO_PAGE for parent, depth in zip(parents, depths, strict=True)]
        places = list(map(_as_place, zip(numbers, generations, offsets, lengths, strict=True)))
        pages: list[PageRow] = list(zip(names, built_on, places, sizes, used_s, expiries_ms, depths, strict=True))
        uses = use_rows(len(slots))
        uses["used_s"] = uses["priority"] = used_s
        if not self.recency.policy.by_recency:
            for i, (meta, page) in enumerate(zip(metas, pages, strict=True)):
                facts = self.recency.facts_of_new(meta, lengths[i], used_s[i])
                priority = self.recency.policy.priority(facts)
                uses["priority"][i], uses["hits"][i] = priority, facts.hits
                self.mirror.remember([(*page[:4], priority, *page[5:])])  # now: the history looks at what is held
        self.table.set_uses(numbers, uses)
        rows = record_rows(RecordState.LIVE, len(slots))
        for field, values in (
            ("generation", generations),
            ("slot_bytes", sizes),
            ("num_bytes", lengths),
            ("name", _joined(names)),
            ("parent", _joined(parents)),
            ("identity", _joined([meta.identity for meta in metas])),
            ("tenant", _joined([meta.tenant for meta in metas])),
            ("depth", depths),
            ("valid_tokens", [meta.valid_tokens for meta in metas]),
            ("expires_ms", expiries_ms),
        ):
            rows[field] = values
        self.write(numbers, rows)
        if self.recency.policy.by_recency:
            self.mirror.remember(pages)


def _joined(values: Sequence[bytes]) -> npt.NDArray[np.void]:
    """A column of values of one length."""
    return np.frombuffer(b"".join(values), f"V{len(values[0])}")


def _misfits(pages: list[PageRow]) -> list[PageRow]:
    """Pages without the one before them, and all but one of those that have one name."""
    names = {page[0] for page in pages}
    if len(names) == len(pages) and all(page[6] == 0 or page[1] in names for page in pages):
        return []
    kept: set[PageName] = set()
    misfits = []
    for page in sorted(pages, key=lambda page: page[6]):
        name, parent, *_, depth = page
        if name in kept or (depth and parent not in kept):
            misfits.append(page)
        else:
            kept.add(name)
    return misfits
