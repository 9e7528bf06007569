"""What a call of a store is while it is under way, and what its end says of the store. The threads are `calls.py`'s.

Counts and remembers only. Whoever submitted a call uses `wait`, `end`, `why` and `deadline`; the rest is between
`calls.py` and the call, and guarded by the lock they share.
"""

import enum
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from headwater.core.results import DELETE_ANSWERS, GET_ANSWERS, PUT_ANSWERS, Status
from headwater.storage.base import Deadline

S = TypeVar("S")


class CallEnd(enum.StrEnum):
    """How a call came to its answers."""

    ANSWERED = "answered"  # the store gave them
    LATE = "late"  # it did not, in time
    RAISED = "raised"  # it raised, or what it answered is no answer
    LEFT_ALONE = "left_alone"  # the breaker is open: it was not asked
    NO_THREAD = "no_thread"  # all threads are in calls that do not return: it was not asked
    CLOSED = "closed"  # nobody is asked any more


@dataclass(frozen=True, slots=True)
class Sort(Generic[S]):
    """A sort of call, and what it answers where the store did not."""

    name: str
    kind: type
    answers: frozenset[S]  # that make sense
    late: S
    failed: S
    hurried: bool  # somebody waits for it


PUT: Final = Sort("put", Status, PUT_ANSWERS, Status.LATE, Status.FAILED, hurried=False)
GET: Final = Sort("get_into", Status, GET_ANSWERS, Status.LATE, Status.FAILED, hurried=True)
CONTAINS: Final = Sort("contains", bool, frozenset({True, False}), late=False, failed=False, hurried=True)
DELETE: Final = Sort("delete", Status, DELETE_ANSWERS, Status.LATE, Status.FAILED, hurried=False)


class Pending(Generic[S]):
    """A call that was submitted: wait for its answers, or do not."""

    def __init__(
        self,
        lock: threading.Lock,
        wait: Callable[["Pending[S]"], list[S]],
        sort: Sort[S],
        work: Callable[[], Sequence[S]],
        *,
        num_pages: int,
        deadline: Deadline,
        on_return: Callable[[], None],
    ) -> None:
        self.deadline = deadline
        self.end: CallEnd | None = None  # set with the answers
        self.why = ""  # for people, where the store did not answer
        self.sort = sort
        self.work = work
        self.num_pages = num_pages
        self.on_return = on_return
        self.answers: list[S] = []
        self.changed = threading.Condition(lock)
        self.begun = False  # the store was asked
        self.stuck = False  # and did not return in time
        self.probe = False  # it shows whether the store is back
        self._wait = wait

    def wait(self) -> list[S]:
        """The answers, one per page. Blocks until they are there, at the latest until the deadline and the grace."""
        return self._wait(self)


def says(call: Pending[Any]) -> bool | None:
    """What an ended call says of its store: that it works, that it does not, or (None) nothing. Pure.

    A page that is missing or has no room is a fine answer. A look that found nothing is none: what cannot be reached
    looks the same.
    """
    if not call.begun:
        return None
    if call.end is not CallEnd.ANSWERED:
        return False
    if call.sort is CONTAINS:
        return True if True in call.answers else False if call.deadline.expired else None
    return not all(answer in (call.sort.late, call.sort.failed) for answer in call.answers)
