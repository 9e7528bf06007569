"""Why a prompt's blocks came from where they came from, or had to be computed: what a brain notes, for people.

Pure notes, taken where the brain learns a thing (`Why`, in `records.py`), put in order when the request leaves. They
decide nothing, so they are in no recording and in no digest. Who keeps them, and compares texts: `explanations.py`.

Invariants:
- The rows of a request that could compute follow each other without a gap and cover its prompt's full blocks; those of
  its misses add up to its bill's, reason by reason.
- There are at most `MOST_ROWS` of a request, and as many notes of evicted blocks as the index has ghosts.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from headwater.cache.match import DEVICE
from headwater.cache.placement import TierState
from headwater.cache.records import NO_FACTS, Facts, RequestRecord, Why
from headwater.core.keys import BlockKey
from headwater.core.results import Reason
from headwater.index.base import PrefixIndex, Victim

MOST_ROWS: Final = 64


class Eviction(NamedTuple):
    """Blocks left the device together."""

    at_s: float
    request: str  # that needed their slots
    stored: int  # bits of the stores that were believed to have them


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What became of one request's prompt, block by block. Times are on the brain's clock."""

    request: str
    tenant: bytes
    num_blocks: int  # full ones of its prompt
    asked_s: float
    ready_s: float | None  # when it could compute; None: it left before
    left_s: float
    num_known: int  # leading blocks that it left behind on the device, those of its answer among them
    resumed: bool
    rows: tuple[Why, ...]  # none, if it left before it could compute


class Whys:
    """A brain's notes."""

    def __init__(self, index: PrefixIndex | None, policy: str, tiers: Mapping[str, TierState]) -> None:
        """`index`: of a device whose blocks stay until `policy` evicts them; None: they leave with their request."""
        self.explained: Explanation | None = None  # of the request that left last
        self._stay = index is not None
        self._limit = 0 if index is None else index.ghosts.limit
        self._policy = policy
        self._tiers = tiers
        self._evictions: OrderedDict[BlockKey, Eviction] = OrderedDict()  # who left longest ago first

    def __len__(self) -> int:
        """Evicted blocks that are remembered."""
        return len(self._evictions)

    def evicted(self, victims: list[Victim], request: str, now_s: float) -> None:
        """Blocks had to leave the device, for a request."""
        evictions, last = self._evictions, Eviction(now_s, request, 0)
        for victim in victims:
            if victim.stored != last.stored:
                last = last._replace(stored=victim.stored)
            evictions[victim.key] = last
            evictions.move_to_end(victim.key)
        while len(evictions) > self._limit:
            evictions.popitem(last=False)

    def eviction(self, key: BlockKey) -> Facts:
        """What is known of how a block left the device; nothing, if that is not remembered."""
        found = self._evictions.get(key)
        if found is None:
            return NO_FACTS
        stored = " ".join(name for name, tier in self._tiers.items() if found.stored & tier.bit)
        return {"evicted_s": found.at_s, "for": found.request, "policy": self._policy, "was_stored_in": stored}

    def left(self, request: RequestRecord, now_s: float) -> None:
        """A request leaves. It still has its hold, and its meeting is over."""
        rows = () if request.ready_s is None else tuple(_limited(_joined(_whole(request))))
        self.explained = Explanation(
            request=request.request,
            tenant=request.tenant,
            num_blocks=request.num_prompt + request.num_unnamed,
            asked_s=request.asked_s,
            ready_s=request.ready_s,
            left_s=now_s,
            num_known=request.hold.num_blocks if self._stay else 0,
            resumed=request.resumed,
            rows=rows,
        )


def _whole(request: RequestRecord) -> Iterator[Why]:
    """Rows in order: what was there first, then what was noted. Gaps were computed while what was behind was loaded."""
    on_device = min(request.base, request.num_prompt)
    if on_device:
        yield Why(0, on_device, DEVICE)
    at = on_device
    for row in sorted(request.whys, key=lambda row: row.start):
        if row.start > at:
            yield Why(at, row.start, "", Reason.COMPUTED_MEANWHILE)
        yield row
        at = row.end
    if at < request.num_prompt:
        yield Why(at, request.num_prompt, "", Reason.COMPUTED_MEANWHILE)


def _joined(rows: Iterator[Why]) -> list[Why]:
    """Rows that were loaded one after another are one, where there is nothing else to say of them."""
    found: list[Why] = []
    for row in rows:
        if found and found[-1][2:] == row[2:]:
            found[-1] = found[-1]._replace(end=row.end)
        else:
            found.append(row)
    return found


def _limited(rows: list[Why]) -> list[Why]:
    """The last row stands for those that are too many, and says so."""
    if len(rows) <= MOST_ROWS:
        return rows
    last = rows[MOST_ROWS - 1]
    more = {**last.facts, "rows_left_out": len(rows) - MOST_ROWS}
    return [*rows[: MOST_ROWS - 1], last._replace(end=rows[-1].end, facts=more)]
