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
from itertools import islice
from typing import Final

from headwater.core.errors import StoreBusy
from headwater.core.page import PageName
from headwater.layout.frame import Header
from headwater.policy import BlockFacts, History, Policy
from headwater.storage.base import Clock, Deadline, PutStatus
from headwater.storage.local.geometry import sectors
from headwater.storage.local.locks import MAX_OWNERS
from headwater.storage.local.mirror import Draft, Mirror, Page, PageRow, Place, Slot
from headwater.storage.local.table import NO_PAGE, Record, RecordState, Survey, Table, Use

_STEP_BACK_S: Final = 1.0  # of the clock, that is no jitter
_STEP_PAGES: Final = 256  # whose use is put right at once, after that
_FEW_CHANGES: Final = 1024  # that are followed one by one; more, if the index is large
_LOOK_CHANGES: Final = 64  # between two looks at the clock


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
        for _, _, place, slot_bytes, *_ in misfits:
            self._free(place.number, place.generation + 1, slot_bytes)
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
        """Look at what changed, one by one. False at the deadline; None if the ring does not say it any more."""
        for count in range(self.mirror.seen + 1, newest + 1):
            change = self.table.change(count)
            if change is None:
                return None
            number, extent = change
            if (number is None or not count % _LOOK_CHANGES) and deadline.expired:
                return False
            if number is not None:
                self._look(number)
            elif extent is not None:
                self._look_at_extent(extent)
            self.mirror.seen = count
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

    def _survey(self) -> dict[int, Survey]:
        return {
            extent: self.table.survey(extent, slot_bytes, self._now_s)
            for extent, slot_bytes in self.table.classes().items()
        }

    def _survey_all(self) -> Draft:
        """A draft of everything, whatever time that takes."""
        return self._drafted(self._survey())

    def _drafted(self, found: dict[int, Survey]) -> Draft:
        draft = Draft(0, {extent: one.slot_bytes for extent, one in found.items()})
        for one in found.values():
            draft.add(one.pages, [number for number, _ in one.free], one.slot_bytes)
        return draft

    def _look(self, number: int) -> None:
        """See what a slot holds now."""
        mirror = self.mirror
        record = self.table.record(number)
        mirror.forget(number)
        if record is None or record.slot_bytes != mirror.classes.get(self.geometry.extent_of(number)):
            return
        if record.state == RecordState.LIVE:
            mirror.remember(self._page(number, record))
        elif record.state == RecordState.FREE:
            mirror.remember_free(number, record.slot_bytes)

    def _look_at_extent(self, extent: int) -> None:
        slot_bytes = self.table.extent(extent) or 0
        self.mirror.set_class(extent, slot_bytes)
        if slot_bytes:
            found = self.table.survey(extent, slot_bytes, self._now_s)
            for row in found.pages:
                self.mirror.remember(Page(*row))
            for number, _ in found.free:
                self.mirror.remember_free(number, slot_bytes)

    def _page(self, number: int, record: Record) -> Page:
        use = self.table.use(number)
        priority = self._now_s if use is None else _in_time(use, self._now_s).priority
        offset = self.geometry.offset(number, record.slot_bytes)
        place = Place(number, record.generation, offset, record.num_bytes)
        parent = record.parent if record.depth else NO_PAGE
        return Page(record.name, parent, place, record.slot_bytes, priority, record.expires_ms, record.depth)

    def stands_by(self, place: Place) -> bool:
        """Whether the record says, now, that a page is still where the mirror had it. Takes no lock."""
        record = self.table.record(place.number)
        return record is not None and (record.state, record.generation) == (RecordState.LIVE, place.generation)

    def _set(self, number: int, record: Record, *, tell: bool = True) -> None:
        if tell:  # first: what was changed is told, wherever we are interrupted
            self._changed[number] = None
        self.table.set_record(number, record)

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
            for number, record in self.table.reserved_by(owners, extent, slot_bytes):
                self._free(number, record.generation, slot_bytes)
                count += 1
        for owner in owners:
            self.table.set_owner(owner, enrolled=False)
        return count

    def free_reserved(self, owner: int, but: Collection[int]) -> None:
        """Free, wiped, what an owner has reserved, but for slots of these numbers."""
        for extent, slot_bytes in self.mirror.classes.items():
            for number, record in self.table.reserved_by({owner}, extent, slot_bytes):
                if number not in but:
                    self._free(number, record.generation, slot_bytes)

    # --- slots --------------------------------------------------------------------------------------------------------

    def cut(self, extent: int, slot_bytes: int) -> None:
        """Cut an extent into free slots; whatever it was cut into before holds nothing."""
        numbers = self.geometry.numbers(extent, slot_bytes)
        self._changed_extents[extent] = None
        self.table.set_extent(extent, 0)
        for number in numbers:
            before = self.table.record(number)
            generation = 0 if before is None else before.generation + 1
            self.table.set_record(number, Record(RecordState.FREE, 0, generation, slot_bytes))
        self.table.set_extent(extent, slot_bytes)
        self.mirror.set_class(extent, slot_bytes)
        for number in numbers:
            self.mirror.remember_free(number, slot_bytes)

    def take_free(self, slot_bytes: int, owner: int, wanted: int) -> list[Slot]:
        """Reserve up to `wanted` free slots of this size."""
        found: list[Slot] = []
        while len(found) < wanted and (number := self.mirror.next_free(slot_bytes)) is not None:
            slot = self._take(number, owner)
            if slot is not None:
                found.append(slot)
        return found

    def _take(self, number: int, owner: int) -> Slot | None:
        """Reserve a slot if it is free. Nobody is told: who thinks that it is free looks before he takes it."""
        record = self.table.record(number)
        if record is None or record.state != RecordState.FREE or not self._is_sound(number, record):
            return None
        generation = record.generation + 1
        reserved = Record(RecordState.RESERVED, owner, generation, record.slot_bytes)
        self._set(number, reserved, tell=False)
        return Slot(number, generation, self.geometry.offset(number, record.slot_bytes))

    def _is_sound(self, number: int, record: Record) -> bool:
        return record.slot_bytes == self.mirror.classes.get(self.geometry.extent_of(number)) and self.geometry.has_slot(
            number, record.slot_bytes
        )

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
            for name, parent, priority in popped:
                use = self.table.use(places[name].number)
                current = priority if use is None else _in_time(use, self._now_s).priority
                order.add(name, parent, max(current, priority), group=slot_bytes)
                if current <= priority and order.is_leaf(name):  # a child that went back keeps its parent
                    if self._history is not None:
                        self._history.evicted(name)
                    slot = self._unpublish(name, owner)
                    if slot is not None:
                        slots.append(slot)
        return slots

    def _unpublish(self, name: PageName, owner: int) -> Slot | None:
        """Reserve the slot of a page, which is gone. None if it was gone before."""
        place = self.mirror.places[name]
        record = self.table.record(place.number)
        self.mirror.forget(place.number)
        if record is None or (record.state, record.generation) != (RecordState.LIVE, place.generation):
            return None
        generation = record.generation + 1
        self._set(place.number, Record(RecordState.RESERVED, owner, generation, record.slot_bytes))
        return Slot(place.number, generation, place.offset)

    def take_pages(self, names: Iterable[PageName], owner: int) -> list[Slot]:
        """Unpublish pages that nothing builds on but those before them here, and reserve their slots."""
        places = self.mirror.places
        return [slot for name in names if name in places and (slot := self._unpublish(name, owner)) is not None]

    def remove(self, names: Iterable[PageName], owner: int) -> None:
        """Unpublish pages that nothing builds on but those before them here; their slots are wiped and free."""
        for slot in self.take_pages(names, owner):
            self._free(slot.number, slot.generation, self.mirror.classes[self.geometry.extent_of(slot.number)])

    def _free(self, number: int, generation: int, slot_bytes: int) -> None:
        self.table.slab.wipe(self.geometry.offset(number, slot_bytes))
        self._set(number, Record(RecordState.FREE, 0, generation, slot_bytes))
        self.mirror.forget(number)
        self.mirror.remember_free(number, slot_bytes)

    def give_back(self, slots: Iterable[Slot], owner: int) -> None:
        """Free slots that this owner reserved and did not publish, wiped. Others are left alone."""
        for slot in slots:
            record = self.reserved(slot, owner)
            if record is not None:
                self._free(slot.number, slot.generation, record.slot_bytes)

    def reserved(self, slot: Slot, owner: int) -> Record | None:
        """The record of a slot that this owner holds; None if it does not, or not any more. Takes no lock."""
        record = self.table.record(slot.number)
        if record is None or (record.state, record.owner, record.generation) != (
            RecordState.RESERVED,
            owner,
            slot.generation,
        ):
            return None
        return record

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
        found = [slot for number in free if (slot := self._take(number, owner)) is not None]
        for number in free:
            self.mirror.forget(number)
        return found

    def is_ours(self, extent: int, owner: int) -> bool:
        """Whether every slot of an extent is reserved by this owner."""
        numbers = self.geometry.numbers(extent, self.mirror.classes.get(extent, 0))
        return all(
            record is not None and (record.state, record.owner) == (RecordState.RESERVED, owner)
            for _, record in self.table.records(numbers)
        )

    def publish(self, written: Sequence[tuple[Slot, Header]], owner: int) -> list[PutStatus]:
        """Make reserved slots LIVE, in order.

        FAILED for one that is no longer this owner's; EXISTS and NO_PARENT leave the slot reserved.
        """
        return [self._publish(slot, header, owner) for slot, header in written]

    def _publish(self, slot: Slot, header: Header, owner: int, *, used_s: float | None = None) -> PutStatus:
        meta, num_bytes = header.meta, header.frame_bytes
        if meta.name in self.mirror.places:
            return PutStatus.EXISTS
        if meta.depth and meta.parent_name not in self.mirror.places:
            return PutStatus.NO_PARENT
        reserved = self.reserved(slot, owner)
        if reserved is None or reserved.slot_bytes != sectors(num_bytes):
            return PutStatus.FAILED
        now_s = self._now_s if used_s is None else used_s
        if self._history is None:
            facts = BlockFacts(used_s=now_s, hits=0, depth=meta.depth, num_bytes=num_bytes)
        else:
            facts = self._history.inserted(meta.name, meta.parent_name, now_s, depth=meta.depth, num_bytes=num_bytes)
        priority = self._policy.priority(facts)
        self.table.set_use(slot.number, Use(now_s, priority, facts.hits))
        record = Record(
            RecordState.LIVE,
            0,
            slot.generation,
            reserved.slot_bytes,
            num_bytes=num_bytes,
            name=meta.name,
            parent=meta.parent_name,
            identity=meta.identity,
            tenant=meta.tenant,
            depth=meta.depth,
            valid_tokens=meta.valid_tokens,
            expires_ms=meta.expires_at_ms,
        )
        self._set(slot.number, record)
        place = Place(slot.number, slot.generation, slot.offset, num_bytes)
        parent = meta.parent_name if meta.depth else NO_PAGE  # whatever a first block says, it builds on nothing
        self.mirror.remember(
            Page(meta.name, parent, place, reserved.slot_bytes, priority, meta.expires_at_ms, meta.depth)
        )
        return PutStatus.STORED

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

    def touch(self, place: Place) -> None:
        """Remember a use, to be written with the next batch."""
        _, hits, _ = self._touched.get(place.number, (0, 0, 0.0))
        self._touched[place.number] = (place.generation, hits + 1, self._clock.time())

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
        for number, (generation, more, used_s) in touched.items():
            record = self.table.record(number)
            if record is None or (record.state, record.generation) != (RecordState.LIVE, generation):
                continue
            before = self.table.use(number) or Use(used_s, 0.0, 0)
            facts = self._facts_of_reads(record, before, min(used_s, now_s), more)
            priority = self._policy.priority(facts)
            self.table.set_use(number, Use(min(used_s, now_s), priority, facts.hits))
            self.mirror.order.touch(record.name, priority)

    def _facts_of_reads(self, record: Record, before: Use, used_s: float, reads: int) -> BlockFacts:
        if self._history is None:
            return BlockFacts(used_s=used_s, hits=before.hits + reads, depth=record.depth, num_bytes=record.num_bytes)
        return self._history.hit(
            record.name,
            used_s,
            depth=record.depth,
            num_bytes=record.num_bytes,
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
                for number, generation in one.reserved:
                    self._free(number, generation, one.slot_bytes)
            pages += self._adopt(lost, read_header)
        misfits = self._misfits(pages)
        for _, _, place, slot_bytes, *_ in misfits:
            self._free(place.number, place.generation + 1, slot_bytes)
        if misfits:  # the mirror may have had one of two, and not the one that stayed
            self._adopt_draft(self._survey_all())
        return len(lost)

    @staticmethod
    def _pages(found: dict[int, Survey]) -> list[PageRow]:
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
        for number, slot_bytes, generation in lost:
            offset = self.geometry.offset(number, slot_bytes)
            header = read_header(offset)
            if header is None or sectors(header.frame_bytes) != slot_bytes:
                self._free(number, generation + 1, slot_bytes)
            else:
                self._set(number, Record(RecordState.RESERVED, 0, generation + 1, slot_bytes))
                found.append((header, Slot(number, generation + 1, offset)))
        adopted: list[PageRow] = []
        for header, slot in sorted(found, key=lambda one: one[0].meta.depth):
            slot_bytes = sectors(header.frame_bytes)
            used_s = min(self._now_s, header.sealed_at_ms / 1000)
            if self._publish(slot, header, 0, used_s=used_s) is PutStatus.STORED:
                record = self.table.record(slot.number)
                adopted += [] if record is None else [self._page(slot.number, record)]
            else:
                self._free(slot.number, slot.generation, slot_bytes)
        return adopted

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


def _in_time(use: Use, now_s: float) -> Use:
    """A use that is not ahead of the clock. What it is worth besides its recency, it keeps."""
    ahead_s = use.used_s - now_s
    return use if ahead_s <= 0 else Use(now_s, use.priority - ahead_s, use.hits)
