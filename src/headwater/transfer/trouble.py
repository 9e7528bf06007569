"""How a job goes wrong, and how a store's answers are looked at before they are believed: stores are foreign code."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from headwater.core.events import Failure

T = TypeVar("T")


class JobTrouble(Exception):
    """A job cannot go on: how it ends, and why."""

    def __init__(self, failure: Failure, why: str) -> None:
        super().__init__(why)
        self.failure = failure
        self.why = why


class StoreTrouble(JobTrouble):
    """A store raised, or answered what is no answer."""

    def __init__(self, why: str) -> None:
        super().__init__(Failure.FAILED, why)


def call(store: str, work: Callable[[], T]) -> T:
    """Call a store. Raises StoreTrouble for whatever it raises."""
    try:
        return work()
    except BaseException as error:
        raise StoreTrouble(f"{store} raised {type(error).__name__}: {error}") from error


def require(store: str, answers: Sequence[object], number: int, kind: type | tuple[type, ...]) -> None:
    """Raise StoreTrouble unless there is one answer of the right kind per page."""
    if len(answers) != number:
        raise StoreTrouble(f"{store} gave {len(answers)} answers for {number} pages")
    if not all(isinstance(answer, kind) for answer in answers):
        raise StoreTrouble(f"{store} gave an answer that is none of {kind}")


def fill(results: list[str], start: int, status: str, places: Sequence[int] | None = None) -> list[str]:
    """Give `status` to every place from the `start`-th on, of `places` or of all. Mutates and returns `results`."""
    for place in (range(len(results)) if places is None else places)[start:]:
        results[place] = status
    return results
