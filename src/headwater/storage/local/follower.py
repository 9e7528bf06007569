"""How a process keeps its mirror of a LocalStore's index current: by what changed, or by reading everything.

Takes no lock between processes and waits for nobody: a record that is just being written has a wrong checksum, and the
ring tells of it afterwards (`table.py`). What could not be read by a deadline is kept as a draft, and the next call
goes on with it.
"""

from typing import Final

import numpy as np

from headwater.storage.base import Deadline
from headwater.storage.local.mirror import Draft, Mirror, PageRow, Place
from headwater.storage.local.recency import Recency
from headwater.storage.local.records import RecordState, in_state
from headwater.storage.local.table import ExtentSurvey, Table, changed_extent

_FEW_CHANGES: Final = 1024  # that are followed one by one; more, if the index is large
_LOOK_CHANGES: Final = 64  # that are followed between two looks at the clock


class Follower:
    """Reads the index into a mirror. Not safe from several threads: `attachment.py` holds a lock around it."""

    def __init__(self, table: Table, mirror: Mirror, recency: Recency) -> None:
        self.table = table
        self.mirror = mirror
        self._geometry = table.geometry
        self._recency = recency
        self._draft: Draft | None = None  # of a mirror that could not be finished in time
        self._recovery: Draft | None = None  # the same, begun after somebody died

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
            few = min(self._geometry.num_changes - 1, max(_FEW_CHANGES, len(self.mirror.places) // 8))
            if self.mirror.seen >= 0 and 0 < behind <= few:
                found = self._follow(newest, deadline)
                if found is not None:
                    return found
            draft = self._draft
            if draft is None or draft.newest is None or not 0 <= newest - draft.newest < self._geometry.num_changes:
                draft = self._draft = Draft(newest, self.table.classes())
            if not self.fill(draft, deadline):
                return False
            self.adopt(draft)

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

    def fill(self, draft: Draft, deadline: Deadline) -> bool:
        """Read what a draft has not read yet. False at the deadline."""
        while draft.left:
            if deadline.expired:
                return False
            extent, slot_bytes = draft.left[-1]
            one = self.table.survey(extent, slot_bytes, self._recency.seen_s)
            draft.left.pop()
            draft.add(one.pages, [number for number, _ in one.free], slot_bytes)
        return True

    def adopt(self, draft: Draft) -> None:
        """Take what a draft says for what is there. Mutates the mirror."""
        self._draft = self._recovery = None
        self.mirror.take(draft)

    def survey(self) -> dict[int, ExtentSurvey]:
        """What the slots of each extent hold, whatever time that takes."""
        return {
            extent: self.table.survey(extent, slot_bytes, self._recency.seen_s)
            for extent, slot_bytes in self.table.classes().items()
        }

    def reread(self) -> Draft:
        """A draft of everything, whatever time that takes."""
        return self.drafted(self.survey())

    def drafted(self, found: dict[int, ExtentSurvey]) -> Draft:
        """A draft of what was surveyed."""
        draft = Draft(0, {extent: one.slot_bytes for extent, one in found.items()})
        for one in found.values():
            draft.add(one.pages, [number for number, _ in one.free], one.slot_bytes)
        return draft

    def _look(self, numbers: list[int]) -> None:
        """See what slots hold now, each once."""
        if not numbers:
            return
        mirror, per_extent = self.mirror, self._geometry.max_slots
        rows, right = self.table.rows(numbers)
        mirror.forget(numbers)
        sizes = np.array([mirror.classes.get(number // per_extent, 0) for number in numbers], np.uint64)
        right &= (rows["slot_bytes"] == sizes) & (sizes > 0)
        live, free = (np.flatnonzero(right & in_state(rows, one)) for one in (RecordState.LIVE, RecordState.FREE))
        if len(live):
            held = [numbers[i] for i in live.tolist()]
            mirror.remember(self.table.pages(held, rows[live], self.table.priorities(held, self._recency.seen_s)))
        for i in free.tolist():
            mirror.remember_free(numbers[i], int(sizes[i]))

    def _look_at_extent(self, extent: int) -> None:
        slot_bytes = self.table.extent(extent) or 0
        self.mirror.set_class(extent, slot_bytes)
        if slot_bytes:
            found = self.table.survey(extent, slot_bytes, self._recency.seen_s)
            self.mirror.remember(found.pages)
            for number, _ in found.free:
                self.mirror.remember_free(number, slot_bytes)

    def stands_by(self, place: Place) -> bool:
        """Whether the record says, now, that a page is still where the mirror had it. Takes no lock."""
        record = self.table.record(place.number)
        return record is not None and (record.state, record.generation) == (RecordState.LIVE, place.generation)

    def recover(self, newest: int | None, deadline: Deadline) -> list[PageRow] | None:
        """Read everything, after somebody died: all pages. None at the deadline; the next one goes on."""
        draft = self._recovery
        if draft is None or draft.newest != newest:
            draft = self._recovery = Draft(newest, self.table.classes())
        if not self.fill(draft, deadline):
            return None
        self.adopt(draft)
        return draft.rows
