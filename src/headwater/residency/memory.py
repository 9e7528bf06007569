"""MemoryResidency: the index in one process. For a router or a test, fed by calls or by a link that loses and doubles.

A dict per node. A round is gathered beside what is claimed, and takes its place at its END; until then both count.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from headwater.core.keys import BlockKey
from headwater.residency.base import Found, Holder, Node, Residency, holder, ranked
from headwater.residency.events import TIERS, Applied, Update, UpdateKind, require
from headwater.storage.base import SYSTEM_CLOCK, Clock, Deadline

_REMEMBERED_S: Final = 3600.0  # how long the epoch of a node that went silent is known
_POOL: Final = TIERS["pool"]


@dataclass(slots=True, eq=False)
class _MemoryRecord:
    epoch: int
    sequence: int
    until_s: float  # of its lease
    begun: bool = False  # a round, since it came or came back
    claims: dict[BlockKey, int] = field(default_factory=dict)
    fresh: dict[BlockKey, int] | None = None  # what the round under way has said
    sound: bool = True  # nothing is missing of that round
    doubtful: bool = False

    @property
    def needs_round(self) -> bool:
        """Something was lost, and no round is under way that would put it right."""
        return self.doubtful and not (self.fresh is not None and self.sound)

    def void(self) -> None:
        """Its lease ran out, or it left: it has to say everything again."""
        self.claims, self.fresh, self.begun = {}, None, False


class MemoryResidency(Residency):
    """The index of this process. Nothing blocks."""

    def __init__(self, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._nodes: dict[str, _MemoryRecord] = {}

    def apply(self, update: Update, *, deadline: Deadline) -> Applied:
        """Take in what a node says. Raises InvalidInput for what no node could have said."""
        require(update)
        with self._lock:
            now_s = self._clock.monotonic()
            record = self._nodes.get(update.node)
            if record is None or update.epoch > record.epoch:
                self._sweep(now_s)
                record = self._nodes[update.node] = _MemoryRecord(update.epoch, update.sequence - 1, now_s)
            elif update.epoch < record.epoch:
                return Applied.FENCED
            elif update.sequence <= record.sequence:
                return Applied.RESYNC if record.needs_round else Applied.STALE
            return self._heard(record, update, now_s)

    def _heard(self, record: _MemoryRecord, update: Update, now_s: float) -> Applied:
        if record.until_s <= now_s:
            record.void()
        if not record.begun and update.kind in (UpdateKind.CHANGE, UpdateKind.END):
            return Applied.UNKNOWN  # and not STALE if it is said again
        if update.sequence > record.sequence + 1:
            record.doubtful, record.sound = True, False
        record.sequence = update.sequence
        if update.kind is UpdateKind.BEGIN:
            record.begun, record.fresh, record.sound = True, {}, True
        elif update.kind is UpdateKind.LEAVE:
            record.void()
            record.until_s = now_s
            return Applied.APPLIED
        record.until_s = now_s + update.lease_s
        for said in (record.claims, record.fresh):
            if said is not None:
                _say(said, update)
        if update.kind is UpdateKind.END:
            if record.fresh is not None and record.sound:
                record.claims, record.doubtful = record.fresh, False
            record.fresh = None
        return Applied.RESYNC if record.needs_round else Applied.APPLIED

    def lookup(self, keys: Sequence[BlockKey], *, deadline: Deadline) -> Found:
        """The longest prefix of a path per node and tier."""
        with self._lock:
            live = self._live()
            found = [holder(name, _runs(keys, one.claims), doubtful=one.doubtful) for name, one in live.items()]
            return Found(len(keys), ranked(found), _in_pool(keys, live, found))

    def nodes(self, *, deadline: Deadline) -> tuple[Node, ...]:
        """Who is there."""
        with self._lock:
            now_s = self._clock.monotonic()
            return tuple(Node(name, one.epoch, one.until_s - now_s, one.doubtful) for name, one in self._live().items())

    def last_epoch(self, node: str, *, deadline: Deadline) -> int | None:
        """The newest epoch that was heard of a node."""
        with self._lock:
            record = self._nodes.get(node)
            return None if record is None else record.epoch

    def close(self) -> None:
        """Forget everything."""
        with self._lock:
            self._nodes.clear()

    def _live(self) -> dict[str, _MemoryRecord]:
        now_s = self._clock.monotonic()
        return {name: one for name, one in self._nodes.items() if one.until_s > now_s}

    def _sweep(self, now_s: float) -> None:
        """Forget who has been silent for long, and what the dead have claimed."""
        for name, one in list(self._nodes.items()):
            if one.until_s <= now_s:
                one.void()
                if one.until_s <= now_s - _REMEMBERED_S:
                    del self._nodes[name]


def _say(said: dict[BlockKey, int], update: Update) -> None:
    for change in update.changes:
        if change.state:
            said.update(dict.fromkeys(change.keys, int(change.state)))
        else:
            for key in change.keys:
                said.pop(key, None)


def _runs(keys: Sequence[BlockKey], claims: Mapping[BlockKey, int]) -> Iterator[tuple[int, int]]:
    """Blocks of a path in the same tiers, row by row, up to the first that is in none."""
    last = count = 0
    for bits in map(claims.get, keys):
        if bits == last:
            count += 1
            continue
        if count:
            yield last, count
        if not bits:
            return
        last, count = bits, 1
    if count:
        yield last, count


def _in_pool(keys: Sequence[BlockKey], live: Mapping[str, _MemoryRecord], found: Sequence[Holder]) -> int:
    """How many leading blocks one or another saw in the pool: no less than who saw most of them."""
    at = max((one.pool for one in found), default=0)
    claims = [one.claims for one in live.values()]
    while at < len(keys) and any(one.get(keys[at], 0) & _POOL for one in claims):
        at += 1
    return at
