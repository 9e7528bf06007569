"""Which blocks came to a tier and which left one, in order: what the cluster may hear (`headwater.residency`).

Pure notes, taken where the brain learns a thing, and only while somebody listens. A store's blocks are noted when the
store was *seen* to have them: it took them, or gave them verified. What it says when asked is a hint, and notes only
that a block is not there. Of a row that went wrong in the middle only the first bad block is known: nobody tried the
rest.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Final

from headwater.cache.jobs import UNREAD
from headwater.cache.match import DEVICE
from headwater.cache.placement import TierState
from headwater.cache.records import JobKind, JobRecord
from headwater.core.breaker import BreakerState
from headwater.core.events import Move, Removed, Stored, TierLost
from headwater.core.keys import BlockKey
from headwater.core.results import BAD_PAGE, PUT_HELD, Status
from headwater.index.base import Victim

_THERE: Final = {
    JobKind.SAVE: PUT_HELD,
    JobKind.DEMOTE: PUT_HELD,
    JobKind.PROMOTE: PUT_HELD,
    JobKind.LOAD: frozenset({Status.HIT}),
}
_NOT_THERE: Final = {
    JobKind.SAVE: frozenset({Status.NO_PARENT, Status.NO_ROOM, Status.REFUSED}),
    JobKind.DEMOTE: frozenset({Status.NO_PARENT, Status.NO_ROOM, Status.REFUSED}),
    JobKind.PROMOTE: frozenset({Status.NO_PARENT, Status.NO_ROOM, Status.REFUSED}),
    JobKind.LOAD: frozenset({Status.MISS, *BAD_PAGE}),
}


class Moves:
    """Notes since last asked. Nothing is noted until `watched`."""

    def __init__(self) -> None:
        self.watched = False
        self._fresh: list[Move] = []

    def take(self) -> list[Move]:
        """What was noted since the last call."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def entered(self, keys: Sequence[BlockKey], parent: BlockKey, depth: int) -> None:
        """Blocks were computed or loaded: they are on the device."""
        if self.watched and keys:
            self._fresh.append(Stored(tier=DEVICE, keys=tuple(keys), parent=parent, depth=depth))

    def evicted(self, victims: Iterable[Victim]) -> None:
        """Blocks were evicted from the device."""
        if self.watched:
            self.left(victim.key for victim in victims)

    def left(self, keys: Iterable[BlockKey]) -> None:
        """Blocks are not to be found on the device any more."""
        if self.watched:
            self._went(DEVICE, keys)

    def ended(self, job: JobRecord, results: Sequence[Status], into: TierState) -> None:
        """A job says of each of its blocks what became of it, in the tier that it read or wrote."""
        if not self.watched:
            return
        tier, off = into.name, into.state is BreakerState.OFF
        if job.kind is JobKind.PROBE:
            absent = Status.ABSENT
            self._went(tier, (key for key, result in zip(job.keys, results, strict=True) if result == absent))
            return
        there = _THERE[job.kind]
        at = 0
        for held, row in groupby(results, there.__contains__):
            end = at + sum(1 for _ in row)
            if held and not off:
                parent = job.keys[at - 1] if at else job.parent
                self._fresh.append(Stored(tier=tier, keys=job.keys[at:end], parent=parent, depth=job.start + at))
            at = end
        bad = next((i for i, result in enumerate(results) if result not in there), None)
        if bad is not None and job.kind is JobKind.DEMOTE and results[bad] == UNREAD:
            self._went(job.store, (job.keys[bad],))
        if bad is None or results[bad] not in _NOT_THERE[job.kind]:
            return
        orphan = results[bad] == Status.NO_PARENT and job.start + bad > 0
        before = [job.keys[bad - 1] if bad else job.parent] if orphan else []
        self._went(tier, (*before, job.keys[bad]))

    def lost(self, tier: str) -> None:
        """A store was switched off."""
        if self.watched:
            self._fresh.append(TierLost(tier=tier))

    def _went(self, tier: str, keys: Iterable[BlockKey]) -> None:
        gone = tuple(keys)
        if gone:
            self._fresh.append(Removed(tier=tier, keys=gone))
