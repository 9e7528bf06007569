"""When pages of a LocalStore were used, and what they are worth to its policy: in this process, and in the index.

Reads are remembered here and written in batches, without a lock between processes (`table.py`). What follows from them,
the order in which pages leave, is the mirror's. Not here: who leaves, and when (`catalog.py`).
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final

import numpy as np

from headwater.core.page import PageName
from headwater.layout.frame import PageMeta
from headwater.policy import BlockFacts, History, Policy
from headwater.storage.base import Clock
from headwater.storage.local.mirror import Mirror, Place
from headwater.storage.local.records import PageUse, RecordState, in_state, use_rows
from headwater.storage.local.table import Table

_TOUCHES_KEPT: Final = 1024
_TOUCH_INTERVAL_S: Final = 1.0
_STEP_BACK_S: Final = 1.0  # of the clock, that is no jitter
_STEP_PAGES: Final = 256  # whose use is put right at once, after that


class Recency:
    """Uses and priorities of the pages that a mirror knows. Not safe from several threads, but for `touch`."""

    def __init__(self, table: Table, mirror: Mirror, policy: Policy, clock: Clock) -> None:
        self.table = table
        self.mirror = mirror
        self.policy = policy
        self.seen_s = clock.time()  # the time by the wall, at the last look at it
        self._clock = clock
        # What this process saw. Another's reads are not in it, and it is gone with the process: policies that look back
        # get what there is, and the priorities that follow from it are in the index for all.
        self._history: History[PageName] | None = History(lambda: mirror.order) if policy.looks_back else None
        self._touched: dict[int, tuple[int, int, float]] = {}
        self._tried_at_s = clock.monotonic()  # to write them
        self._ahead: Iterator[PageName] = iter(())  # pages whose use may lie ahead, since the clock stepped back

    def now_s(self) -> float:
        """The time by the wall. When it steps back, uses that lie ahead by now become uses of this moment.

        Else pages that were used while the clock was wrong would be newer than every new one, for years. Some at each
        call: nobody waits for all of them.
        """
        now_s = self._clock.time()
        before_s, self.seen_s = self.seen_s, now_s
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

    def is_due(self) -> bool:
        """Whether uses are to be written: many wait, or the last time is a while ago. Mutates: this time counts."""
        now_s = self._clock.monotonic()
        if len(self._touched) < _TOUCHES_KEPT and now_s - self._tried_at_s < _TOUCH_INTERVAL_S:
            return False
        self._tried_at_s = now_s
        return True

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
        if not self.policy.by_recency:
            for i, name in enumerate(names):
                used_s = float(uses["used_s"][i])
                use = (
                    PageUse(float(before["used_s"][i]), 0.0, int(before["hits"][i]))
                    if known[i]
                    else PageUse(used_s, 0.0, 0)
                )
                facts = self._of_reads(name, rows[i], use, used_s, int(reads[at[i]]))
                uses["priority"][i], uses["hits"][i] = self.policy.priority(facts), facts.hits
        self.table.set_uses(numbers, uses)
        touch = self.mirror.order.touch
        for name, priority in zip(names, uses["priority"].tolist(), strict=True):
            touch(name, priority)

    def facts_of_new(self, meta: PageMeta, num_bytes: int, used_s: float) -> BlockFacts:
        """What the policy looks at, of a page that is being published. Mutates: the past is kept."""
        if self._history is None:
            return BlockFacts(used_s=used_s, hits=0, depth=meta.depth, num_bytes=num_bytes)
        return self._history.inserted(meta.name, meta.parent_name, used_s, depth=meta.depth, num_bytes=num_bytes)

    def evicted(self, names: Iterable[PageName]) -> None:
        """Keep the past of pages that leave, for policies that look back."""
        if self._history is not None:
            for name in names:
                self._history.evicted(name)

    def _of_reads(self, name: PageName, row: np.void, before: PageUse, used_s: float, reads: int) -> BlockFacts:
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


def _in_time(use: PageUse, now_s: float) -> PageUse:
    """A use that is not ahead of the clock. What it is worth besides its recency, it keeps."""
    ahead_s = use.used_s - now_s
    return use if ahead_s <= 0 else PageUse(now_s, use.priority - ahead_s, use.hits)
