"""The index of a LocalStore: which slot holds which page, who holds which slot, and what leaves first.

Slots are rows, and a row's state says who may touch the slot's bytes:

    FREE      nobody's
    RESERVED  its owner's alone, until published, abandoned, or the owner is dead (never because time passed)
    LIVE      readable; the page of `name`

Every change of what is LIVE also appends to `log`, so that other processes bring their mirrors up to date by reading
what is new. Questions about pages go to `mirror`; everything else runs inside `transaction`.

Not here: bytes (`slab.py`), SQLite itself (`database.py`), liveness of owners (`directory.py`), what to do about a page
(`local.py`). Not safe from several threads: `local.py` holds a lock around it.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from headwater.core.errors import StoreDamaged
from headwater.core.page import PageName
from headwater.layout.frame import Header
from headwater.policy import BlockFacts, History, Policy
from headwater.storage.base import Deadline, PutStatus
from headwater.storage.database import Database
from headwater.storage.families import Families
from headwater.storage.mirror import Mirror, Page, Place, Slot
from headwater.storage.slab import SECTOR, Geometry, sectors

# Both end with the fields of `mirror.Page`, in their order. NOT INDEXED: SQLite would walk the index of names and look
# every row up by itself, which takes twice as long as reading the table from its start.
_LIVE_PAGES: Final = """
SELECT name, parent, slot, generation, num_bytes, slot_bytes, priority FROM slots NOT INDEXED WHERE state = 2"""
_CHANGED: Final = """
SELECT log.slot, name, parent, slots.slot, generation, num_bytes, slot_bytes, priority
FROM log LEFT JOIN slots ON slots.slot = log.slot AND state = 2 WHERE seq > ?"""
_SENSELESS: Final = """
SELECT COUNT(*) FROM slots NOT INDEXED WHERE state = 2 AND (typeof(name) <> 'blob' OR length(name) <> 40
    OR typeof(parent) <> 'blob' OR num_bytes > slot_bytes)"""
_MISPLACED: Final = """
SELECT COUNT(*) FROM slots LEFT JOIN extents ON extent = (slot - :data) / :size
WHERE slot < :data OR extent IS NULL OR extents.slot_bytes <> slots.slot_bytes
    OR ((slot - :data) % :size) % (slots.slot_bytes / :sector) <> 0
    OR ((slot - :data) % :size) / (slots.slot_bytes / :sector) >= MIN(:size * :sector / slots.slot_bytes, :most)"""
_OTHERS: Final = """
SELECT owner, token FROM owners
WHERE owner <> :myself AND (:idle OR owner IN (SELECT owner FROM slots WHERE state = 1))"""
_PRIORITIES: Final = "SELECT slot, priority FROM slots WHERE slot IN (SELECT value FROM json_each(?))"
_PUBLISH: Final = """
UPDATE slots SET state = 2, owner = 0, name = ?, parent = ?, family = ?, depth = ?, num_bytes = ?, valid_tokens = ?,
    expires_ms = ?, hits = ?, used_s = ?, priority = ? WHERE slot = ? AND generation = ? AND state = 1 AND owner = ?"""
_PROBLEMS: Final = (
    (
        "SELECT COUNT(*) FROM slots WHERE state = 1 AND owner NOT IN (SELECT owner FROM owners)",
        "reservations that nobody holds",
    ),
    (_SENSELESS, "pages that make no sense"),
    ("SELECT COUNT(*) FROM slots WHERE state <> 2 AND name IS NOT NULL", "names without a page"),
    (
        "SELECT COUNT(*) FROM slots AS s WHERE state = 2 AND depth > 0 AND NOT EXISTS "
        "(SELECT 1 FROM slots AS p WHERE p.state = 2 AND p.name = s.parent)",
        "pages without the one before them",
    ),
)


class Catalog:
    """The index, opened."""

    def __init__(self, database: Database, policy: Policy, *, log_kept: int) -> None:
        """`log_kept`: changes that are remembered for others; a mirror that is further behind reads everything."""
        self.database = database
        self.mirror = Mirror()
        self._policy = policy
        # What this process saw. Another's reads are not in it, and it is gone with the process: policies that look back
        # get what there is, and the priorities that follow from it are in the index for all.
        self._history: History[PageName] | None = History(lambda: self.mirror.order) if policy.looks_back else None
        self._log_kept = log_kept
        self._db = database.db
        self.families = Families(database.db)
        self._touched: dict[int, tuple[int, int, float]] = {}

    def close(self) -> None:
        """Disconnect."""
        self.database.close()

    @contextmanager
    def transaction(self, deadline: Deadline) -> Iterator[None]:
        """Hold the write lock, with a mirror that is current. Raises what `Database.writing` raises."""
        if self.mirror.seq < 0:
            with self.snapshot(deadline):  # reading it all takes a while: not with the lock in hand
                pass
        began = False
        try:
            with self.database.writing(deadline):
                began = True
                self._catch_up()
                yield
        except BaseException:
            if began:
                self.mirror.seq = -1  # it may hold what was rolled back: read it all at the next look
                self.families.forget()
            raise

    @contextmanager
    def snapshot(self, deadline: Deadline) -> Iterator[None]:
        """One moment of the index for several questions, with a mirror of the same moment."""
        with self.database.reading(deadline):
            self._catch_up()
            yield

    def _catch_up(self) -> None:
        seen = self.mirror.seq
        first, last = self._db.execute("SELECT (SELECT MIN(seq) FROM log), (SELECT MAX(seq) FROM log)").fetchone()
        last = last or 0
        if last == seen:
            return
        if seen < 0 or last < seen or (first or 0) > seen + 1:
            if self._db.execute(_SENSELESS).fetchone()[0]:
                raise StoreDamaged(f"{self.database.path} holds pages that make no sense")
            self.mirror.reload(self._db.execute(_LIVE_PAGES), last)
            return
        for slot, *page in self._db.execute(_CHANGED, (seen,)).fetchall():
            self.mirror.forget(slot)
            if page[0] is not None:
                found = Page.from_row(page)
                if found is None:
                    raise StoreDamaged(f"{self.database.path} holds a page that makes no sense")
                self.mirror.remember(found)
        self.mirror.seq = last

    def _log(self, slots: Sequence[int]) -> None:
        start = self.mirror.seq + 1
        self._db.executemany("INSERT INTO log VALUES (?, ?)", [(start + i, slot) for i, slot in enumerate(slots)])
        self.mirror.seq += len(slots)
        if self.mirror.seq % 1024 < len(slots):
            self._db.execute("DELETE FROM log WHERE seq <= ?", (self.mirror.seq - self._log_kept,))

    # --- owners -------------------------------------------------------------------------------------------------------

    def enrol(self, token: str) -> int:
        """A number for an owner, to stand beside what it reserves."""
        return int(self._db.execute("INSERT INTO owners(token) VALUES (?)", (token,)).lastrowid or 0)

    def num_owners(self) -> int:
        """How many stores have the directory open, or died with it open."""
        return int(self._db.execute("SELECT COUNT(*) FROM owners").fetchone()[0])

    def retire_dead(
        self, myself: int, is_alive: Callable[[str], bool], wipe: Callable[[Slot], None], *, idle: bool = False
    ) -> int:
        """Free the reservations of owners that are dead; with `idle` also forget those that held none.

        Returns how many slots came back. Wiping before the commit is safe: the slots were nobody else's.
        """
        others = self._db.execute(_OTHERS, {"myself": myself, "idle": idle}).fetchall()
        return sum(self.leave(owner, wipe) for owner, token in others if not is_alive(token))

    def leave(self, owner: int, wipe: Callable[[Slot], None]) -> int:
        """Free what an owner still has reserved, and forget it."""
        held = self._db.execute("SELECT slot, generation FROM slots WHERE state = 1 AND owner = ?", (owner,)).fetchall()
        for row in held:
            wipe(Slot(*row))
        self._db.execute("UPDATE slots SET state = 0, owner = 0 WHERE state = 1 AND owner = ?", (owner,))
        self._db.execute("DELETE FROM owners WHERE owner = ?", (owner,))
        return len(held)

    # --- slots --------------------------------------------------------------------------------------------------------

    def slot_classes(self) -> dict[int, int]:
        """Slot size of each extent in use."""
        return dict(self._db.execute("SELECT extent, slot_bytes FROM extents").fetchall())

    def misplaced(self, geometry: Geometry) -> int:
        """How many slots are not where the extents say that slots are. Reads all of them."""
        places = {"data": geometry.data_at // SECTOR, "size": geometry.extent_bytes // SECTOR}
        with self.database.translated():
            row = self._db.execute(_MISPLACED, {**places, "sector": SECTOR, "most": geometry.max_slots}).fetchone()
        return int(row[0])

    def cut(self, geometry: Geometry, extent: int, slot_bytes: int) -> None:
        """Cut an unused extent into free slots."""
        start = geometry.extent_offset(extent) // SECTOR
        step = slot_bytes // SECTOR
        self._db.execute("INSERT INTO extents VALUES (?, ?)", (extent, slot_bytes))
        self._db.executemany(
            "INSERT INTO slots(slot, slot_bytes, state, generation, owner) VALUES (?, ?, 0, 0, 0)",
            [(start + i * step, slot_bytes) for i in range(geometry.slots_in_extent(slot_bytes))],
        )

    def uncut(self, geometry: Geometry, extent: int) -> None:
        """Forget an extent and its slots, all of which must be free."""
        self._db.execute("DELETE FROM slots WHERE slot >= ? AND slot < ?", _span(geometry, extent))
        self._db.execute("DELETE FROM extents WHERE extent = ?", (extent,))

    def take_free(self, slot_bytes: int, owner: int, wanted: int) -> list[Slot]:
        """Reserve up to `wanted` free slots of this size."""
        rows = self._db.execute(
            "SELECT slot, generation + 1 FROM slots WHERE state = 0 AND slot_bytes = ? LIMIT ?",
            (slot_bytes, wanted),
        ).fetchall()
        return self._take(rows, owner)

    def _take(self, rows: Sequence[tuple[int, int]], owner: int) -> list[Slot]:
        self._db.executemany(
            "UPDATE slots SET state = 1, owner = ?, generation = ? WHERE slot = ?",
            [(owner, generation, slot) for slot, generation in rows],
        )
        return [Slot(*row) for row in rows]

    def take_victims(self, slot_bytes: int, owner: int, *, wanted: int, spare: frozenset[PageName]) -> list[Slot]:
        """Evict up to `wanted` pages of this slot size, in the order of `LeafOrder`, and reserve their slots.

        Pages in `spare` stay. Other processes' reads change priorities in the index alone, so each choice is compared
        with it, and a page that was used since goes back into the order.
        """
        order, places = self.mirror.order, self.mirror.places
        chosen: list[PageName] = []
        while len(chosen) < wanted:
            popped: list[tuple[PageName, PageName, float]] = []
            while len(chosen) + len(popped) < wanted and (found := order.pop(slot_bytes, spare)) is not None:
                popped.append(found)
            if not popped:
                break
            slots = json.dumps([places[name].slot for name, _, _ in popped])
            now = dict(self._db.execute(_PRIORITIES, (slots,)).fetchall())
            for name, parent, priority in popped:
                current = now.get(places[name].slot, priority)
                used_since = current > priority
                order.add(name, parent, max(current, priority), group=slot_bytes)
                if not used_since and order.is_leaf(name):  # a child that went back keeps its parent
                    order.remove(name)
                    chosen.append(name)
                    if self._history is not None:
                        self._history.evicted(name)
        return self._unpublish(chosen, owner)

    def take_pages(self, names: Sequence[PageName], owner: int) -> list[Slot]:
        """Unpublish pages and all that build on them, and reserve their slots."""
        return self._unpublish(self._with_descendants(names), owner)

    def _with_descendants(self, names: Sequence[PageName]) -> list[PageName]:
        return list(dict.fromkeys(found for name in names for found in self.mirror.order.subtree(name)))

    def take_extent(self, geometry: Geometry, extent: int, owner: int, spare: frozenset[PageName]) -> list[Slot] | None:
        """Reserve every slot of an extent, its pages and all that build on them unpublished; None if `spare` is hit."""
        span = _span(geometry, extent)
        rows = self._db.execute("SELECT name FROM slots WHERE state = 2 AND slot >= ? AND slot < ?", span).fetchall()
        doomed = self._with_descendants([PageName(row[0]) for row in rows])
        if any(name in spare for name in doomed):
            return None
        free = self._db.execute(
            "SELECT slot, generation + 1 FROM slots WHERE state = 0 AND slot >= ? AND slot < ?", span
        ).fetchall()
        return self._take(free, owner) + self._unpublish(doomed, owner)

    def coldest_extent(self, geometry: Geometry, slot_bytes: int) -> tuple[int, float] | None:
        """The extent of another slot size with the lowest mean priority and no reservation, and that mean."""
        best: tuple[int, float] | None = None
        for extent, size in self.slot_classes().items():
            if size == slot_bytes:
                continue
            reserved, mean = self._db.execute(
                "SELECT SUM(state = 1), AVG(CASE state WHEN 2 THEN priority END) FROM slots "
                "WHERE slot >= ? AND slot < ?",
                _span(geometry, extent),
            ).fetchone()
            heat = float("-inf") if mean is None else float(mean)
            if not reserved and (best is None or heat < best[1]):
                best = (extent, heat)
        return best

    def expired(self, now_ms: int, limit: int = 256) -> list[PageName]:
        """Pages whose time is over."""
        rows = self._db.execute(
            "SELECT name FROM slots WHERE state = 2 AND expires_ms > 0 AND expires_ms <= ? LIMIT ?",
            (now_ms, limit),
        ).fetchall()
        return [PageName(row[0]) for row in rows]

    def publish(self, written: Sequence[tuple[Slot, Header]], owner: int, *, now_s: float) -> list[PutStatus]:
        """Make reserved slots LIVE, in order.

        FAILED for one that is no longer this owner's; EXISTS and NO_PARENT leave the slot reserved.
        """
        results = [self._publish(slot, header, owner, now_s) for slot, header in written]
        stored = zip(written, results, strict=True)
        self._log([slot.slot for (slot, _), status in stored if status is PutStatus.STORED])
        return results

    def _publish(self, slot: Slot, header: Header, owner: int, now_s: float) -> PutStatus:
        meta, num_bytes = header.meta, header.frame_bytes
        if meta.name in self.mirror.places:
            return PutStatus.EXISTS
        if meta.depth and meta.parent_name not in self.mirror.places:
            return PutStatus.NO_PARENT
        if self._history is None:
            facts = BlockFacts(used_s=now_s, hits=0, depth=meta.depth, num_bytes=num_bytes)
        else:
            facts = self._history.inserted(meta.name, meta.parent_name, now_s, depth=meta.depth, num_bytes=num_bytes)
        priority = self._policy.priority(facts)
        family = self.families.number(meta.identity, meta.tenant)
        row = (
            *(meta.name, meta.parent_name, family, meta.depth, num_bytes, meta.valid_tokens, meta.expires_at_ms),
            *(facts.hits, now_s, priority, slot.slot, slot.generation, owner),
        )
        if self._db.execute(_PUBLISH, row).rowcount != 1:
            return PutStatus.FAILED
        self.mirror.remember(
            Page(meta.name, meta.parent_name, slot.slot, slot.generation, num_bytes, sectors(num_bytes), priority)
        )
        return PutStatus.STORED

    def adopt(self, slot: int, header: Header, *, used_s: float) -> bool:
        """Make a page LIVE that was found in a free slot. False if its name is taken, or the page before it is not."""
        self._db.execute("UPDATE slots SET state = 1, generation = 1 WHERE slot = ?", (slot,))
        found = Slot(slot, 1)
        if self.publish([(found, header)], 0, now_s=used_s) == [PutStatus.STORED]:
            return True
        self.give_back([found], 0)
        return False

    def give_back(self, slots: Sequence[Slot], owner: int) -> None:
        """Free reserved slots without publishing them."""
        self._db.executemany(
            "UPDATE slots SET state = 0, owner = 0 WHERE slot = ? AND generation = ? AND state = 1 AND owner = ?",
            [(*slot, owner) for slot in slots],
        )

    def _unpublish(self, names: Sequence[PageName], owner: int) -> list[Slot]:
        places = [self.mirror.places[name] for name in names]
        slots = [Slot(place.slot, place.generation + 1) for place in places]
        self._db.executemany(
            "UPDATE slots SET state = 1, owner = ?, generation = ?, name = NULL, parent = NULL WHERE slot = ?",
            [(owner, slot.generation, slot.slot) for slot in slots],
        )
        for slot in slots:
            self.mirror.forget(slot.slot)
        self._log([slot.slot for slot in slots])
        return slots

    # --- recency and soundness ----------------------------------------------------------------------------------------

    def touch(self, place: Place, now_s: float) -> None:
        """Remember a use, to be written with the next batch."""
        _, hits, _ = self._touched.get(place.slot, (0, 0, 0.0))
        self._touched[place.slot] = (place.generation, hits + 1, now_s)

    @property
    def num_touched(self) -> int:
        """Uses that wait to be written."""
        return len(self._touched)

    def write_touches(self) -> None:
        """Write remembered uses and the priorities that follow from them."""
        if not self._touched:
            return
        touched, self._touched = self._touched, {}  # other threads go on touching
        updates = []
        for slot, (generation, more, used_s) in touched.items():
            row = self._db.execute(
                "SELECT hits, depth, num_bytes, name, used_s FROM slots "
                "WHERE slot = ? AND generation = ? AND state = 2",
                (slot, generation),
            ).fetchone()
            if row is not None:
                facts = self._facts_of_reads(row, used_s, more)
                priority = self._policy.priority(facts)
                updates.append((facts.hits, used_s, priority, slot))
                self.mirror.order.touch(PageName(row[3]), priority)
        self._db.executemany("UPDATE slots SET hits = ?, used_s = ?, priority = ? WHERE slot = ?", updates)

    def _facts_of_reads(self, row: tuple[int, int, int, bytes, float], used_s: float, reads: int) -> BlockFacts:
        hits, depth, num_bytes, name, before_s = row
        if self._history is None:
            return BlockFacts(used_s=used_s, hits=hits + reads, depth=depth, num_bytes=num_bytes)
        return self._history.hit(
            PageName(name),
            used_s,
            depth=depth,
            num_bytes=num_bytes,
            times=reads,
            hits_before=hits,
            used_before_s=before_s,
        )

    def counts(self) -> dict[int, int]:
        """How many slots are in each state."""
        return dict(self._db.execute("SELECT state, COUNT(*) FROM slots GROUP BY state").fetchall())

    def problems(self, geometry: Geometry) -> list[str]:
        """What contradicts itself in the index; nothing, in a sound one. Reads all of it."""
        found = []
        for question, what in _PROBLEMS:
            count = self._db.execute(question).fetchone()[0]
            if count:
                found.append(f"{count} {what}")
        if self.misplaced(geometry):
            found.append("slots that are not where their extents say")
        for extent, slot_bytes in self.slot_classes().items():
            question = "SELECT COUNT(*) FROM slots WHERE slot >= ? AND slot < ?"
            count = self._db.execute(question, _span(geometry, extent)).fetchone()[0]
            if count != geometry.slots_in_extent(slot_bytes):
                found.append(f"extent {extent} is cut into {count} slots of {slot_bytes} bytes")
        pages = [Page(*row) for row in self._db.execute(_LIVE_PAGES)]
        if {page.name: Place(page.slot, page.generation, page.num_bytes) for page in pages} != self.mirror.places:
            found.append("the mirror differs from the index")
        if len(self.mirror.order) != len(pages) or any(page.name not in self.mirror.order for page in pages):
            found.append("the order of pages differs from the index")
        self.mirror.order.validate()
        return found


def _span(geometry: Geometry, extent: int) -> tuple[int, int]:
    start = geometry.extent_offset(extent)
    return start // SECTOR, (start + geometry.extent_bytes) // SECTOR
