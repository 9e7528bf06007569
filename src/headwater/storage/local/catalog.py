"""What the records of a LocalStore mean: slots given out, published, taken back, and what leaves first.

Changes run inside `begin` and `commit`, under the index's lock (`attachment.py`), with a mirror that is current.
Every step is one record, in an order that is right at each point: a slot is wiped before it is free, a page is
published after the one before it and removed before it. So nothing has to be undone when a process dies in between;
what others did not hear of, they hear of from who comes next (`begin`), because the dead one left `busy` behind.

Not here: the bytes of records (`table.py`) and pages (`slab.py`), locks, what to do about a page (`store.py`). Not safe
from several threads: `attachment.py` holds a lock around it.
"""

import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress, islice
from typing import Final

import numpy as np
import numpy.typing as npt

from headwater.core.errors import StoreBusy
from headwater.core.page import PageName
from headwater.core.results import Status
from headwater.layout.frame import Header, PageMeta
from headwater.policy import BlockFacts, History, Policy
from headwater.storage.base import Clock, Deadline
from headwater.storage.local.geometry import sectors
from headwater.storage.local.locks import MAX_OWNERS
from headwater.storage.local.mirror import Draft, Mirror, PageRow, Place, Slot
from headwater.storage.local.table import (
    NO_PAGE,
    ExtentSurvey,
    PageUse,
    Record,
    RecordRows,
    RecordState,
    Table,
    changed_extent,
    in_state,
    record_rows,
    use_rows,
)

_STEP_BACK_S: Final = 1.0  # of the clock, that is no jitter
_STEP_PAGES: Final = 256  # whose use is put right at once, after that
_FEW_CHANGES: Final = 1024  # that are followed one by one; more, if the index is large
_LOOK_CHANGES: Final = 64  # that are followed between two looks at the clock

_as_slot = partial(tuple.__new__, Slot)  # no Python call each
_as_place = partial(tuple.__new__, Place)


class Catalog:
    """The index, opened."""

    def __init__(self, table: Table, policy: Policy, clock: Clock) -> None:
        self.table = table
        self.geometry = table.geometry
        self.mirror = Mirror(table.geometry)
        self._policy = policy
        self._clock = clock
        self._now_s = clock.time()
        # What this process saw. Another's reads are not in it, and it is gone with the process: policies that look back
        # get what there is, and the priorities that follow from it are in the index for all.
        self._history: History[PageName] | None = History(lambda: self.mirror.order) if policy.looks_back else None
        self._touched: dict[int, tuple[int, int, float]] = {}
        self._changed: dict[int, None] = {}
        self._changed_extents: dict[int, None] = {}
        self._draft: Draft | None = None  # of a mirror that could not be finished in time
        self._recovery: Draft | None = None  # the same, begun after somebody died
        self._ahead: Iterator[PageName] = iter(())  # pages whose use may lie ahead, since the clock stepped back

    # --- changes, ours and others' ------------------------------------------------------------------------------------

    def begin(self, owner: int, deadline: Deadline) -> bool:
        """Change something: the index's lock is held. False at the deadline; then nothing is changed."""
        table = self.table
        newest = table.newest()
        if table.busy or newest is None:  # somebody died while he changed something, or who counts was damaged
            if not self._recover(newest, deadline):
                return False
        elif not self.catch_up(deadline):
            return False
        table.set_busy(owner)
        self.now_s()
        return True

    def _recover(self, newest: int | None, deadline: Deadline) -> bool:
        """Read everything, and have everybody read everything. False at the deadline; the next one goes on."""
        draft = self._recovery
        if draft is None or draft.newest != newest:
            draft = self._recovery = Draft(newest, self.table.classes())
        if not self._fill(draft, deadline):
            return False
        self._adopt_draft(draft)
        misfits = self._misfits(draft.rows)
        self._free([(place.number, place.generation + 1, slot_bytes) for _, _, place, slot_bytes, *_ in misfits])
        if misfits:  # the mirror may have had one of two, and not the one that stayed
            self._adopt_draft(self._survey_all())
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

    def is_current(self) -> bool:
        """Whether nobody has told of a change that the mirror does not know."""
        return self.table.newest() == self.mirror.seen

    def catch_up(self, deadline: Deadline) -> bool:
        """Bring the mirror up to date. Takes no lock between processes. False at the deadline: the next one goes on."""
        try:
            return self._catch_up(deadline)
        except BaseException:  # it may have heard of one half of a change
            self.mirror.seen = -1
            raise

    def _catch_up(self, deadline: Deadline) -> bool:
        while True:
            newest = self.table.newest()
            if newest is None:  # it is just being written, or damaged
                if self.mirror.seen >= 0:
                    return True
                newest = 0
            behind = newest - self.mirror.seen
            if not behind:
                return True
            few = min(self.geometry.num_changes - 1, max(_FEW_CHANGES, len(self.mirror.places) // 8))
            if self.mirror.seen >= 0 and 0 < behind <= few:
                found = self._follow(newest, deadline)
                if found is not None:
                    return found
            draft = self._draft
            if draft is None or draft.newest is None or not 0 <= newest - draft.newest < self.geometry.num_changes:
                draft = self._draft = Draft(newest, self.table.classes())
            if not self._fill(draft, deadline):
                return False
            self._adopt_draft(draft)

    def _follow(self, newest: int, deadline: Deadline) -> bool | None:
        """Look at what changed. False at the deadline; None if the ring does not say it any more."""
        mirror = self.mirror
        is_first = True
        while mirror.seen < newest:
            if not is_first and deadline.expired:
                return False
            is_first = False
            begin = mirror.seen
            changes = self.table.changes(begin + 1, min(newest, begin + _LOOK_CHANGES))
            if changes is None:
                return None
            numbers: dict[int, None] = {}
            for done, entry in enumerate(changes):
                extent = changed_extent(entry)
                if extent is None:
                    numbers[entry] = None
                    continue
                self._look(list(numbers))
                numbers.clear()
                mirror.seen = begin + done
                if deadline.expired:
                    return False
                self._look_at_extent(extent)
            self._look(list(numbers))
            mirror.seen = begin + len(changes)
        return True

    def _fill(self, draft: Draft, deadline: Deadline) -> bool:
        """Read what a draft has not read yet. False at the deadline."""
        while draft.left:
            if deadline.expired:
                return False
            extent, slot_bytes = draft.left[-1]
            one = self.table.survey(extent, slot_bytes, self._now_s)
            draft.left.pop()
            draft.add(one.pages, [number for number, _ in one.free], slot_bytes)
        return True

    def _adopt_draft(self, draft: Draft) -> None:
        self._draft = self._recovery = None
        self.mirror.take(draft)

    def _survey(self) -> dict[int, ExtentSurvey]:
        return {
            extent: self.table.survey(extent, slot_bytes, self._now_s)
            for extent, slot_bytes in self.table.classes().items()
        }

    def _survey_all(self) -> Draft:
        """A draft of everything, whatever time that takes."""
        return self._drafted(self._survey())

    def _drafted(self, found: dict[int, ExtentSurvey]) -> Draft:
        draft = Draft(0, {extent: one.slot_bytes for extent, one in found.items()})
        for one in found.values():
            draft.add(one.pages, [number for number, _ in one.free], one.slot_bytes)
        return draft

    def _look(self, numbers: list[int]) -> None:
        """See what slots hold now, each once."""
        if not numbers:
            return
        mirror, per_extent = self.mirror, self.geometry.max_slots
        rows, right = self.table.rows(numbers)
        mirror.forget(numbers)
        sizes = np.array([mirror.classes.get(number // per_extent, 0) for number in numbers], np.uint64)
        right &= (rows["slot_bytes"] == sizes) & (sizes > 0)
        live, free = (np.flatnonzero(right & in_state(rows, one)) for one in (RecordState.LIVE, RecordState.FREE))
        if len(live):
            held = [numbers[i] for i in live.tolist()]
            mirror.remember(self.table.pages(held, rows[live], self.table.priorities(held, self._now_s)))
        for i in free.tolist():
            mirror.remember_free(numbers[i], int(sizes[i]))

    def _look_at_extent(self, extent: int) -> None:
        slot_bytes = self.table.extent(extent) or 0
        self.mirror.set_class(extent, slot_bytes)
        if slot_bytes:
            found = self.table.survey(extent, slot_bytes, self._now_s)
            self.mirror.remember(found.pages)
            for number, _ in found.free:
                self.mirror.remember_free(number, slot_bytes)

    def stands_by(self, place: Place) -> bool:
        """Whether the record says, now, that a page is still where the mirror had it. Takes no lock."""
        record = self.table.record(place.number)
        return record is not None and (record.state, record.generation) == (RecordState.LIVE, place.generation)

    def _write(self, numbers: Sequence[int], rows: RecordRows, *, tell: bool = True) -> None:
        """Say what slots hold, one after the other."""
        if tell:  # first: what was changed is told, wherever we are interrupted
            self._changed.update(dict.fromkeys(numbers))
        self.table.set_rows(numbers, rows)

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
            self._free([(number, record.generation, slot_bytes) for number, record in found])
            count += len(found)
        for owner in owners:
            self.table.set_owner(owner, enrolled=False)
        return count

    def free_reserved(self, owner: int, but: Collection[int]) -> None:
        """Free, wiped, what an owner has reserved, but for slots of these numbers."""
        for extent, slot_bytes in self.mirror.classes.items():
            found = self.table.reserved_by({owner}, extent, slot_bytes)
            self._free([(number, record.generation, slot_bytes) for number, record in found if number not in but])

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
        self._write(numbers, rows, tell=False)
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
        self._write(numbers, rows, tell=tell)
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
            worth = self.table.priorities([places[name].number for name, _, _ in popped], self._now_s).tolist()
            chosen: list[PageName] = []
            for (name, parent, priority), current in zip(popped, worth, strict=True):
                if current > priority or order.has_children(name):  # a child that went back keeps its parent
                    order.add(name, parent, max(current, priority), group=slot_bytes)
                else:
                    chosen.append(name)
            if self._history is not None:
                for name in chosen:
                    self._history.evicted(name)
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
        self._free([(number, generation, classes[extent_of(number)]) for number, generation, _ in slots])

    def _free(self, slots: Sequence[tuple[int, int, int]]) -> None:
        """Wipe slots, and let them go: (number, generation, slot size)."""
        if not slots:
            return
        numbers = [number for number, _, _ in slots]
        rows = record_rows(RecordState.FREE, len(slots))
        rows["generation"] = np.array([generation for _, generation, _ in slots], np.uint64)
        rows["slot_bytes"] = np.array([slot_bytes for _, _, slot_bytes in slots], np.uint64)
        self.table.slab.wipe_all(self.geometry.offsets(numbers, rows["slot_bytes"]).tolist())
        self._write(numbers, rows)
        self.mirror.forget(numbers)
        for number, _, slot_bytes in slots:
            self.mirror.remember_free(number, slot_bytes)

    def give_back(self, slots: Iterable[Slot], owner: int) -> None:
        """Free slots that this owner reserved and did not publish, wiped. Others are left alone."""
        wanted = list(dict.fromkeys(slots))
        if wanted:
            rows, ours = self._reserved(wanted, owner)
            sizes = rows["slot_bytes"].tolist()
            self._free([(*wanted[i][:2], sizes[i]) for i in np.flatnonzero(ours).tolist()])

    def ours(self, slots: Sequence[Slot], owner: int) -> list[Slot]:
        """Those of these slots that this owner holds. Takes no lock."""
        return list(compress(slots, self._reserved(slots, owner)[1].tolist())) if slots else []

    def _reserved(self, slots: Sequence[Slot], owner: int) -> tuple[RecordRows, npt.NDArray[np.bool_]]:
        """The records of slots, and which of them say that this owner holds it."""
        rows, right = self.table.rows([slot.number for slot in slots])
        same = rows["generation"] == np.array([slot.generation for slot in slots], np.uint64)
        return rows, right & same & in_state(rows, RecordState.RESERVED) & (rows["owner"] == owner)

    def coldest_extents(self, slot_bytes: int) -> list[tuple[float, int]]:
        """Extents of other slot sizes with the mean priority of their pages, the lowest first. Reads all priorities."""
        found = []
        for extent, size in self.mirror.classes.items():
            if size != slot_bytes:
                pages = self.pages_in(extent)
                worth = sum(map(self.mirror.order.priority, pages)) / len(pages) if pages else float("-inf")
                found.append((worth, extent))
        return sorted(found)

    def pages_in(self, extent: int) -> list[PageName]:
        """The pages of an extent."""
        numbers = self.geometry.numbers(extent, self.mirror.classes.get(extent, 0))
        return [name for number in numbers if (name := self.mirror.name_in(number)) is not None]

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
                [self._now_s] * len(fresh) if used_s is None else list(compress(used_s, is_new)),
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
        if not self._policy.by_recency:
            for i, (meta, page) in enumerate(zip(metas, pages, strict=True)):
                facts = self._facts_of_new(meta, lengths[i], used_s[i])
                priority = self._policy.priority(facts)
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
        self._write(numbers, rows)
        if self._policy.by_recency:
            self.mirror.remember(pages)

    def _facts_of_new(self, meta: PageMeta, num_bytes: int, used_s: float) -> BlockFacts:
        if self._history is None:
            return BlockFacts(used_s=used_s, hits=0, depth=meta.depth, num_bytes=num_bytes)
        return self._history.inserted(meta.name, meta.parent_name, used_s, depth=meta.depth, num_bytes=num_bytes)

    def expired(self, now_ms: int, limit: int = 256) -> list[PageName]:
        """Pages whose time is over."""
        return self.mirror.expired(now_ms, limit)

    # --- recency ------------------------------------------------------------------------------------------------------

    def now_s(self) -> float:
        """The time by the wall. When it steps back, uses that lie ahead by now become uses of this moment.

        Else pages that were used while the clock was wrong would be newer than every new one, for years. Some at each
        call: nobody waits for all of them.
        """
        now_s = self._clock.time()
        before_s, self._now_s = self._now_s, now_s
        if now_s < before_s - _STEP_BACK_S:
            self._ahead = iter(list(self.mirror.places))
            if self._history is not None:
                self._history.rebase(now_s)
        for name in islice(self._ahead, _STEP_PAGES):
            place = self.mirror.places.get(name)
            use = None if place is None else self.table.use(place.number)
            if place is not None and use is not None and use.used_s > now_s:
                use = _in_time(use, now_s)
                self.table.set_use(place.number, use)
                self.mirror.order.touch(name, use.priority)
        return now_s

    def touch(self, places: Iterable[Place]) -> None:
        """Remember uses, to be written with the next batch."""
        touched, now_s = self._touched, self._clock.time()
        for number, generation, _, _ in places:
            before = touched.get(number)
            touched[number] = (generation, 1 if before is None else before[1] + 1, now_s)

    @property
    def num_touched(self) -> int:
        """Uses that wait to be written."""
        return len(self._touched)

    def write_touches(self) -> None:
        """Write remembered uses and the priorities that follow from them. Takes no lock between processes."""
        if not self._touched:
            return
        now_s = self.now_s()
        touched, self._touched = self._touched, {}  # other threads go on touching
        items = list(touched.items())  # one call of C: who has just begun to touch does so in the old ones
        numbers = [number for number, _ in items]
        generations, reads, used = (np.array(column) for column in zip(*[use for _, use in items], strict=True))
        rows, right = self.table.rows(numbers)
        at = np.flatnonzero(
            right & in_state(rows, RecordState.LIVE) & (rows["generation"] == generations.astype(np.uint64))
        )
        if not len(at):
            return
        rows, numbers = rows[at], [numbers[i] for i in at.tolist()]
        before, known = self.table.uses(numbers)
        uses = use_rows(len(at))
        uses["used_s"] = uses["priority"] = np.minimum(used[at], now_s)
        uses["hits"] = np.where(known, before["hits"], np.uint64(0)) + reads[at].astype(np.uint64)
        names = rows["name"].tolist()
        if not self._policy.by_recency:
            for i, name in enumerate(names):
                used_s = float(uses["used_s"][i])
                use = (
                    PageUse(float(before["used_s"][i]), 0.0, int(before["hits"][i]))
                    if known[i]
                    else PageUse(used_s, 0.0, 0)
                )
                facts = self._facts_of_reads(name, rows[i], use, used_s, int(reads[at[i]]))
                uses["priority"][i], uses["hits"][i] = self._policy.priority(facts), facts.hits
        self.table.set_uses(numbers, uses)
        touch = self.mirror.order.touch
        for name, priority in zip(names, uses["priority"].tolist(), strict=True):
            touch(name, priority)

    def _facts_of_reads(self, name: PageName, row: np.void, before: PageUse, used_s: float, reads: int) -> BlockFacts:
        depth, num_bytes = int(row["depth"]), int(row["num_bytes"])
        if self._history is None:
            return BlockFacts(used_s=used_s, hits=before.hits + reads, depth=depth, num_bytes=num_bytes)
        return self._history.hit(
            name,
            used_s,
            depth=depth,
            num_bytes=num_bytes,
            times=reads,
            hits_before=before.hits,
            used_before_s=before.used_s,
        )

    # --- soundness ----------------------------------------------------------------------------------------------------

    def mend(self, read_header: Callable[[int], Header | None] | None = None, *, trusted: bool = True) -> int:
        """Read everything, and make it agree with itself: no page without the one before it, no name twice.

        `read_header` (offset): only for who is alone in the directory; then what dead owners had reserved is free, and
        slots whose record cannot be believed hold what their header says. Without `trusted` no record is believed.
        Returns how many were not.
        """
        found = self._survey()
        pages = self._pages(found)
        lost = [(number, one.slot_bytes, 0) for one in found.values() for number in one.lost]
        if not trusted:
            lost += [(place.number, size, place.generation) for _, _, place, size, *_ in pages]
            lost += [(number, one.slot_bytes, generation) for one in found.values() for number, generation in one.free]
            found, pages = {extent: replace(one, pages=[], free=[]) for extent, one in found.items()}, []
        self._adopt_draft(self._drafted(found))
        if read_header is not None:
            for one in found.values():
                self._free([(number, generation, one.slot_bytes) for number, generation in one.reserved])
            pages += self._adopt(lost, read_header)
        misfits = self._misfits(pages)
        self._free([(place.number, place.generation + 1, slot_bytes) for _, _, place, slot_bytes, *_ in misfits])
        if misfits:  # the mirror may have had one of two, and not the one that stayed
            self._adopt_draft(self._survey_all())
        return len(lost)

    @staticmethod
    def _pages(found: dict[int, ExtentSurvey]) -> list[PageRow]:
        return [page for one in found.values() for page in one.pages]

    @staticmethod
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

    def _adopt(
        self, lost: Sequence[tuple[int, int, int]], read_header: Callable[[int], Header | None]
    ) -> list[PageRow]:
        """Make pages LIVE again that are found in slots of which nothing is known. The rest is wiped, and free.

        `lost`: (number, slot size, generation). Returns the pages.
        """
        found: list[tuple[Header, Slot]] = []
        empty: list[tuple[int, int, int]] = []
        for number, slot_bytes, generation in lost:
            offset = self.geometry.offset(number, slot_bytes)
            header = read_header(offset)
            if header is None or sectors(header.frame_bytes) != slot_bytes:
                empty.append((number, generation + 1, slot_bytes))
            else:
                found.append((header, Slot(number, generation + 1, offset)))
        self._free(empty)
        if not found:
            return []
        found.sort(key=lambda one: one[0].meta.depth)
        numbers = [slot.number for _, slot in found]
        rows = record_rows(RecordState.RESERVED, len(found))
        rows["generation"] = np.array([slot.generation for _, slot in found], np.uint64)
        rows["slot_bytes"] = [sectors(header.frame_bytes) for header, _ in found]
        self._write(numbers, rows)
        statuses = self.publish(
            [(slot, header.meta, header.frame_bytes) for header, slot in found],
            0,
            used_s=[min(self._now_s, header.sealed_at_ms / 1000) for header, _ in found],
        )
        stored = [status is Status.STORED for status in statuses]
        held = list(compress(numbers, stored))
        self._free(
            [
                (slot.number, slot.generation, sectors(header.frame_bytes))
                for (header, slot), is_stored in zip(found, stored, strict=True)
                if not is_stored
            ]
        )
        return self.table.pages(held, self.table.rows(held)[0], self.table.priorities(held, self._now_s))

    def problems(self) -> list[str]:
        """What contradicts itself in the index; nothing, in a sound one. Reads all of it."""
        found: list[str] = []
        live: dict[PageName, Record] = {}
        enrolled = set(self.table.owners())
        places: dict[PageName, Place] = {}
        for extent, slot_bytes in self.table.classes().items():
            for number, record in self.table.records(self.geometry.numbers(extent, slot_bytes)):
                if record is None or record.slot_bytes != slot_bytes or record.num_bytes > slot_bytes:
                    found.append(f"slot {number} has a record that makes no sense")
                elif record.state == RecordState.LIVE:
                    if record.name in live:
                        found.append(f"a page is in slot {number} and in another one")
                    live[record.name] = record
                    offset = self.geometry.offset(number, slot_bytes)
                    places[record.name] = Place(number, record.generation, offset, record.num_bytes)
                elif record.state == RecordState.RESERVED and record.owner not in enrolled:
                    found.append(f"slot {number} is reserved, and nobody holds it")
        orphans = sum(record.depth > 0 and record.parent not in live for record in live.values())
        if orphans:
            found.append(f"{orphans} pages without the one before them")
        if places != self.mirror.places:
            found.append("the mirror differs from the index")
        order = self.mirror.order
        if len(order) != len(live) or any(name not in order for name in live):
            found.append("the order of pages differs from the index")
        order.validate()
        if self.table.classes() != self.mirror.classes:
            found.append("the mirror has other extents than the slab")
        return found


def _joined(values: Sequence[bytes]) -> npt.NDArray[np.void]:
    """A column of values of one length."""
    return np.frombuffer(b"".join(values), f"V{len(values[0])}")


def _in_time(use: PageUse, now_s: float) -> PageUse:
    """A use that is not ahead of the clock. What it is worth besides its recency, it keeps."""
    ahead_s = use.used_s - now_s
    return use if ahead_s <= 0 else PageUse(now_s, use.priority - ahead_s, use.hits)
