"""What can come of a handoff, at both ends, in plain values: done, or how far it got and why not further."""

from dataclasses import dataclass
from typing import Final

from headwater.core.results import Reason, Status
from headwater.disagg.protocol import Ticket
from headwater.transfer.executor.sliced import Reached

NOT_FINITE: Final = "not_finite"  # the code of an error: the model computed NaN or infinity
READ_TOO_SLOWLY: Final = "read_too_slowly"  # the code of a stream's end that its client has brought about


@dataclass(frozen=True, slots=True)
class Moved:
    """How far the blocks of a prompt came, on all ranks (`machine.py`). No reason: to the end."""

    num_blocks: int  # in a row, from the prompt's first
    reason: Reason | None = None
    detail: str = ""  # for people
    num_bytes: int = 0
    num_tries: int = 1
    stuck: bool = False  # a copy hangs that has slots behind these: they are not free yet


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """Every block is in the pool, and here is the ticket."""

    ticket: Ticket
    num_bytes: int  # that were written: what the pool had already was not
    num_tries: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsent:
    """There is no ticket. The first `num_blocks` blocks are in the pool all the same."""

    num_blocks: int
    reason: Reason
    detail: str
    num_tries: int
    seconds: float
    stuck: bool = False  # a copy hangs that may still read the slots


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """Every block is in its slot, verified."""

    num_blocks: int  # that were read
    num_bytes: int
    num_tries: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """Not every block came. Those before `first_block` are in their slots, verified; the rest is to be computed."""

    first_block: int  # counted from the prompt's first
    reason: Reason
    detail: str
    num_tries: int
    seconds: float
    stuck: bool = False  # a copy hangs that may still write to the slots from there on


#: Worth another try, if there is time: what was bad was removed, what is missing may be on its way.
AGAIN_READ: Final = frozenset({Reason.MISSING, Reason.DAMAGED, Reason.FOREIGN, Reason.FAILED, Reason.LATE})
AGAIN_WRITE: Final = frozenset({Reason.MISSING, Reason.FAILED})

_STATUSES: Final[dict[str, Reason]] = {
    Status.MISS: Reason.MISSING,
    Status.LATE: Reason.LATE,
    Status.FAILED: Reason.FAILED,
    Status.CORRUPT: Reason.DAMAGED,
    Status.SHORT: Reason.DAMAGED,
    Status.FOREIGN: Reason.FOREIGN,
    Status.STALE: Reason.EXPIRED,
    Status.UNKNOWN_VERSION: Reason.UNKNOWN_VERSION,
    Status.NO_ROOM: Reason.FULL,
    Status.NO_PARENT: Reason.MISSING,
    Status.REFUSED: Reason.REFUSED,
}


def why_row(reached: Reached) -> Reason | None:
    """Why a row ended; None: it is whole."""
    if reached.why is Reason.WHOLE:
        return None
    if reached.why is Reason.INCOMPLETE:
        return _STATUSES.get(reached.status, Reason.FAILED)
    late = (Reason.SLICE_TIMEOUT, Reason.TOTAL_TIMEOUT, Reason.STUCK)
    return Reason.LATE if reached.why in late else reached.why
