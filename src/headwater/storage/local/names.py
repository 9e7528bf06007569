"""LocalNames: a store that is only asked what it has, by a process that leaves reading and writing to others.

Such a process (vLLM's scheduler) hears of every page that another writes, and has little time for that. So it keeps
names, and nothing else: no places, no order in which pages leave, no free slots (`mirror.py`). That is a tenth of the
work per page, and the records that are read are checked in the same way. Everything but `contains` and
`contains_cached` is a LocalStore's, and works.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from headwater.core.page import PageName
from headwater.storage.base import Deadline, StoreFill
from headwater.storage.local.attachment import Attachment, IndexLocked, Turn
from headwater.storage.local.records import RecordState, in_state
from headwater.storage.local.slab import Progress
from headwater.storage.local.store import LocalStore
from headwater.storage.local.table import Table, changed_extent

_STEP_CHANGES: Final = 256  # that are followed between two looks at the clock
_CACHED_CHANGES: Final = 512  # of others, that are read at once: about a millisecond
_CACHED_S: Final = 0.005


class NameView:
    """The names of pages that are there. One thread at a time brings it up to date; any may look names up."""

    def __init__(self, table: Table) -> None:
        self._looking = Turn()
        self.seen = -1  # the newest change that it knows; -1: nothing, read it all
        self._table = table
        self._names: dict[int, PageName] = {}  # by slot
        self._slots: dict[PageName, int] = {}
        self._sizes = np.zeros(table.geometry.num_extents, np.uint64)  # of the slots of each extent; 0: not cut
        self._left: list[int] = []  # extents that are still to be read as a whole

    def has_all(self, names: Sequence[PageName]) -> list[bool]:
        """Which of these pages seem to be there."""
        slots = self._slots
        return [name in slots for name in names]

    def num_behind(self) -> int | None:
        """How many changes it does not know; None: there is no telling, and all is to be read."""
        newest = self._table.newest()
        if newest is None or self.seen < 0 or self._left:
            return None
        behind = newest - self.seen
        return behind if 0 <= behind < self._table.geometry.num_changes else None

    def refresh(self, deadline: Deadline, *, patience_s: float | None = None) -> bool:
        """Bring it up to date. Takes no lock between processes. False at the deadline: the next one goes on.

        `patience_s`: for how long to wait for another thread that is at it; until the deadline, by default.
        """
        if self.num_behind() == 0:
            return True
        try:
            waits_s = deadline.remaining_s if patience_s is None else patience_s
            return self._looking.alone(lambda: self._refresh(deadline), waits_s)
        except IndexLocked:
            return False

    def _refresh(self, deadline: Deadline) -> bool:
        try:
            return self._catch_up(deadline)
        except BaseException:  # it may have heard of one half of a change
            self.seen, self._left = -1, []
            raise

    def _catch_up(self, deadline: Deadline) -> bool:
        while self._read_all(deadline):
            behind = self.num_behind()
            if behind is not None:
                if not self._follow(self.seen + behind, deadline):
                    return False
                if self.seen >= 0:  # what came meanwhile is the next one's: somebody may write without end
                    return self._read_all(deadline)
            newest = self._table.newest()
            if newest is None and self.seen >= 0:  # it is just being written, or damaged
                return True
            self._left = list(range(self._table.geometry.num_extents))  # first: nobody takes the rest for all there is
            self.seen = newest or 0  # what changes while all is read is followed after that
        return False

    def _read_all(self, deadline: Deadline) -> bool:
        """Read what is still to be read, if anything is. False at the deadline."""
        while self._left:
            if deadline.expired:
                return False
            self._look_at_extent(self._left[-1])
            self._left.pop()
        return True

    def _follow(self, newest: int, deadline: Deadline) -> bool:
        """Look at what changed, as it is now. False at the deadline."""
        is_first = True
        while self.seen < newest:
            if not is_first and deadline.expired:
                return False
            is_first = False
            last = min(newest, self.seen + _STEP_CHANGES)
            changes = self._table.changes(self.seen + 1, last)
            if changes is None:  # the ring does not say it any more
                self.seen = -1
                return True
            numbers = dict.fromkeys(changes)  # each once
            if changed_extent(max(numbers)) is not None:  # they are numbered behind all slots, and are rare
                extents = {entry: extent for entry in numbers if (extent := changed_extent(entry)) is not None}
                self._left += extents.values()  # whole ones take longer: they are read after this, one by one
                for entry in extents:
                    del numbers[entry]
            self._look(list(numbers))
            self.seen = last
        return True

    def _look_at_extent(self, extent: int) -> None:
        """Forget what was in an extent, and see how it is cut, and what is in it."""
        geometry = self._table.geometry
        before, now = int(self._sizes[extent]), self._table.extent(extent) or 0
        if not geometry.slots_in_extent(now):
            now = 0
        if before and before != now:
            self._forget(geometry.numbers(extent, before))
        self._sizes[extent] = now
        if now:
            self._look(geometry.numbers(extent, now))

    def _look(self, numbers: Sequence[int]) -> None:
        """See what slots hold now, each once."""
        if not numbers:
            return
        rows, right = self._table.rows(numbers)
        at = np.asarray(numbers)
        sizes = self._sizes[at // self._table.geometry.max_slots]
        live = np.flatnonzero(right & (sizes > 0) & (rows["slot_bytes"] == sizes) & in_state(rows, RecordState.LIVE))
        held, names = at[live].tolist(), rows["name"][live].tolist()
        self._forget(numbers)
        self._names.update(zip(held, names, strict=True))
        self._slots.update(zip(names, held, strict=True))

    def _forget(self, numbers: Sequence[int]) -> None:
        """Slots hold no page any more; a page of the same name in another slot stays."""
        slots, names = self._slots, self._names
        for number in numbers:
            name = names.get(number)
            if name is not None:  # in this order: an interrupt in between leaves nothing that nobody finds again
                if slots.get(name) == number:
                    del slots[name]
                del names[number]


class LocalNames(LocalStore):
    """A directory of pages, to be looked at."""

    _seen: tuple[Attachment, NameView] | None = None  # what was seen of which attachment

    def _attach(self, progress: Progress | None = None) -> Attachment:
        at = super()._attach(progress)
        try:
            self._sight(at).refresh(Deadline.after(self.config.open_timeout_s))
        except BaseException:
            self._seen = None
            at.retire()
            raise
        return at

    def fill(self) -> StoreFill | None:
        """None: who knows names alone does not know sizes."""
        return None

    def contains(self, names: Sequence[PageName], *, deadline: Deadline) -> list[bool]:
        """Which pages seem to be there: one look at what is new in the index, then memory."""

        def work(at: Attachment) -> list[bool]:
            sight = self._sight(at)
            sight.refresh(deadline)
            return sight.has_all(names)

        nothing = [False] * len(names)
        return nothing if deadline.expired else self._run(work, nothing)

    def contains_cached(self, names: Sequence[PageName]) -> list[bool] | None:
        """What `contains` would say, where others changed little since we looked; otherwise None. Never waits."""

        def work(at: Attachment) -> list[bool] | None:
            sight = self._sight(at)
            behind = sight.num_behind()
            if behind is None or behind > _CACHED_CHANGES:
                return None
            return sight.has_all(names) if sight.refresh(Deadline.after(_CACHED_S), patience_s=0.0) else None

        return self._run(work, None)

    def _sight(self, at: Attachment) -> NameView:
        """What is seen of an attachment: a new one after `revive`, and a call may still be inside the old one."""
        seen = self._seen
        if seen is None or seen[0] is not at:
            seen = self._seen = at, NameView(at.catalog.table)
        return seen[1]
