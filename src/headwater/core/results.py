"""Results: what became of one page or block (`Status`), and why something did not happen (`Reason`).

One enum each, for stores, jobs, events, handoffs and what is counted of them; their values are the words that metrics,
recordings, answers and documents show. Nothing here decides.

One enum says less to a type checker than one for each call: that a get cannot answer STORED is not in the types. So
there are small sets of what a call may answer, and whoever looks at foreign code's answers checks them against these
(`transfer/executor/trouble.py`).
"""

import enum
from dataclasses import dataclass
from typing import Final


class Status(enum.StrEnum):
    """What became of one page or block."""

    # of a put
    STORED = "stored"
    EXISTS = "exists"  # a complete page of this name is there already
    NO_ROOM = "no_room"  # the byte limit holds, and nothing may be evicted for it
    NO_PARENT = "no_parent"  # the block before it is not here, and a suffix without its prefix is worth nothing
    REFUSED = "refused"  # not a frame, not the frame of this name, or larger than the store can take
    # of a get: everything but HIT is a miss
    HIT = "hit"
    MISS = "miss"
    CORRUPT = "corrupt"  # checksum or digest does not fit the bytes
    FOREIGN = "foreign"  # an intact page, but another key's, identity's, shard's or layout's
    SHORT = "short"  # fewer bytes than the header promises
    STALE = "stale"  # past its time
    UNKNOWN_VERSION = "unknown_version"  # a format or digest this reader does not know
    # of a delete
    REMOVED = "removed"
    # of a probe; ABSENT of a delete, too
    HELD = "held"
    ABSENT = "absent"
    # of any call
    LATE = "late"
    FAILED = "failed"
    CANCELLED = "cancelled"  # its job was: nobody knows

    @property
    def held(self) -> bool:
        """Of a put: whether the store holds the page now."""
        return self in PUT_HELD


#: Why bytes that were read are a miss all the same (`layout/frame.py` finds them).
BAD_PAGE: Final = frozenset({Status.CORRUPT, Status.FOREIGN, Status.SHORT, Status.STALE, Status.UNKNOWN_VERSION})
#: Speaks of the store, not of the page.
STORE_TROUBLE: Final = frozenset({Status.LATE, Status.FAILED})
PUT_HELD: Final = frozenset({Status.STORED, Status.EXISTS})
PUT_ANSWERS: Final = PUT_HELD | STORE_TROUBLE | {Status.NO_ROOM, Status.NO_PARENT, Status.REFUSED}
GET_ANSWERS: Final = BAD_PAGE | STORE_TROUBLE | {Status.HIT, Status.MISS}


class Reason(enum.StrEnum):
    """Why something did not happen, or not all of it."""

    # why a job, or a handoff, ended without a result
    FAILED = "failed"  # a store or a device raised, or said that it failed; it could not be asked or read
    LATE = "late"  # not done by the deadline
    CANCELLED = "cancelled"
    DOWN = "down"  # the store was not asked: it is off or left alone, or its calls keep what this one needs
    # why a block had to be computed; FAILED and CORRUPT, too
    NEVER_STORED = "never_stored"
    EVICTED = "evicted"  # it was known once, or a store said it had it and then had not
    CORRUPT = "corrupt"  # what was read did not verify
    TOO_LATE = "too_late"  # an answer or the bytes did not come in time
    NOT_WORTH_IT = "not_worth_it"  # computing was expected to be faster than loading
    COMPUTED_MEANWHILE = "computed_meanwhile"  # a store has it, and computing came to it before loading did
    # why a handoff ended before its end; FAILED, LATE, CANCELLED and DOWN, too
    MISSING = "missing"  # the pool does not have a block, or not any more
    DAMAGED = "damaged"  # what it had was cut, or its bytes did not fit their digests
    FOREIGN = "foreign"  # what it had is another page, or no such tail
    EXPIRED = "expired"
    UNKNOWN_VERSION = "unknown_version"  # somebody newer wrote it
    USED = "used"  # the ticket was answered before
    FULL = "full"  # the pool has no room
    REFUSED = "refused"  # the ticket is not for this node, or the page not for this pool
    # why a row of blocks was written or read so far and no further; FAILED, DOWN and CANCELLED, too
    STUCK = "stuck"  # a copy hangs: slots behind what is done are lent to it until it ends
    WHOLE = "whole"  # there are no more of them
    INCOMPLETE = "incomplete"  # the store did not take, or have, all of a slice
    SLICE_TIMEOUT = "slice_timeout"
    TOTAL_TIMEOUT = "total_timeout"
    INDEX_ONLY = "index_only"  # no data is moved at all


#: What a job may fail for.
JOB_FAILURES: Final = frozenset({Reason.FAILED, Reason.LATE, Reason.CANCELLED, Reason.DOWN})
#: What a miss may be counted under.
MISS_REASONS: Final = frozenset(
    {
        *(Reason.NEVER_STORED, Reason.EVICTED, Reason.FAILED, Reason.CORRUPT, Reason.TOO_LATE),
        *(Reason.NOT_WORTH_IT, Reason.COMPUTED_MEANWHILE),
    }
)
#: What a handoff may end for.
HANDOFF_REASONS: Final = JOB_FAILURES | {
    *(Reason.MISSING, Reason.DAMAGED, Reason.FOREIGN, Reason.EXPIRED, Reason.UNKNOWN_VERSION, Reason.USED),
    *(Reason.FULL, Reason.REFUSED),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPurge:
    """What became of pages that somebody wanted gone from one store."""

    tier: str
    num_removed: int = 0
    num_left: int = 0  # that were found, and not removed in time
    unreached: str = ""  # why there may be more of them that nobody removed; empty: there are none
