"""How a job goes wrong, and how a store's answers are looked at before they are believed: stores are foreign code.

What ends a program (Ctrl-C, SystemExit) is nobody's trouble: on a caller's thread it passes. A thread of our own has no
caller, and its other jobs would end with it: there it is the trouble of the job that raised it.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import repeat

from headwater.core.results import Reason, Status
from headwater.storage.readers import ReadStuck

_thread = threading.local()


def has_no_caller() -> None:
    """Say that the calling thread is one of our own. To be called once, when it starts."""
    _thread.is_ours = True


def is_trouble(error: BaseException) -> bool:
    """Whether what foreign code raised is to be dealt with where it was called; else it must be raised again."""
    return isinstance(error, Exception) or getattr(_thread, "is_ours", False)


class JobTrouble(Exception):
    """A job cannot go on: how it ends, and why."""

    def __init__(self, failure: Reason, why: str) -> None:
        super().__init__(why)
        self.failure = failure
        self.why = why


class StoreTrouble(JobTrouble):
    """A store raised, or answered what is no answer."""

    def __init__(self, why: str) -> None:
        super().__init__(Reason.FAILED, why)


class PagesKept(StoreTrouble):
    """All pages are with calls that do not return, and may never come back."""

    def __init__(self, store: str) -> None:
        super().__init__(f"the {store}'s calls keep all pages")
        self.failure = Reason.DOWN


@contextmanager
def calling(store: str) -> Iterator[None]:
    """While a store is called: whatever trouble it makes is raised as StoreTrouble."""
    try:
        yield
    except ReadStuck as stuck:  # what the call was given is not to be used before: the watchdog sees that it hangs
        stuck.over.wait()
        raise StoreTrouble(f"{store}: {stuck}") from stuck
    except BaseException as error:
        if not is_trouble(error):
            raise
        raise StoreTrouble(f"{store} raised {type(error).__name__}: {error}") from error


def require(store: str, answers: Sequence[object], number: int, wanted: frozenset[Status] | None, *kinds: type) -> None:
    """Raise StoreTrouble unless there is one answer per page: a status that is wanted, or something of another kind.

    The plain word "hit" equals HIT, and is none.
    """
    if len(answers) != number:
        raise StoreTrouble(f"{store} gave {len(answers)} answers for {number} pages")
    if not all(map(isinstance, answers, repeat(kinds if wanted is None else (Status, *kinds)))):
        raise StoreTrouble(f"{store} gave an answer that is no answer to that question")
    if wanted is not None:
        statuses = answers if not kinds else [one for one in answers if isinstance(one, Status)]
        if not wanted.issuperset(statuses):
            raise StoreTrouble(f"{store} gave an answer that is no answer to that question")


def fill(results: list[Status], start: int, status: Status, places: Sequence[int] | None = None) -> list[Status]:
    """Give `status` to every place from the `start`-th on, of `places` or of all. Mutates and returns `results`."""
    for place in (range(len(results)) if places is None else places)[start:]:
        results[place] = status
    return results
