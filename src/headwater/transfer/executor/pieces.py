"""Pages of staging for the slices of a job, and the store's call that has them meanwhile.

Who waits for pages holds none (`pages.py`); what a call was given is returned when the call has returned (rule 3). Not
here: what a job does with its pages (`jobs.py`).
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from headwater.core.events import Load, StoreCopy
from headwater.transfer.executor.ledger import JobState, Ledger
from headwater.transfer.executor.pages import Account, PagePool
from headwater.transfer.executor.trouble import PagesKept, has_no_caller

T = TypeVar("T")


class RowPiece(Generic[T]):
    """Some blocks of a row on their way through pages, and the store's call for them: in a thread beside, or here."""

    def __init__(self, start: int, pages: list[int], work: Callable[[], T], *, beside: bool = False) -> None:
        self.start = start
        self.end = start + len(pages)
        self.pages = pages
        self._work = work
        self._future: Future[T] | None = None
        if beside:
            self.begin()

    def begin(self) -> None:
        """Make the call in a thread of its own, which ends with it."""
        self._future = future = Future[T]()
        work = self._work

        def run() -> None:
            has_no_caller()
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001  it is raised again where it is waited for
                future.set_exception(error)

        try:
            threading.Thread(target=run, name="headwater call", daemon=True).start()
        except RuntimeError:  # the machine has no more: then it is made where it is waited for
            self._future = None

    def wait(self) -> T:
        """What the store says. Blocks until it does. Raises what the call raised."""
        return self._work() if self._future is None else self._future.result()

    def settle(self) -> None:
        """Wait until no call has the pages any more."""
        if self._future is not None:
            self._future.exception()


class JobPages:
    """Takes pages for jobs and returns them. Several threads may use it at once."""

    def __init__(self, pool: PagePool, ledger: Ledger, slice_pages: int) -> None:
        """`slice_pages`: of one slice, at most."""
        self._pool = pool
        self._ledger = ledger
        self._slice_pages = slice_pages

    @contextlib.contextmanager
    def slice_of(self, job: JobState, num_wanted: int) -> Iterator[list[int]]:
        """Pages for one slice, or none where the job has ended or its time is over. Blocks until then."""
        pages = self.take(job, num_wanted)
        try:
            yield pages
        finally:
            self.give_back(job, pages)

    def take(self, job: JobState, num_wanted: int, *, wait: bool = True) -> list[int]:
        """Pages for one slice; none where the job has ended or its time is over, or where it would have to wait.

        Blocks until then. Raises JobTrouble where all pages are with calls that do not return: they may never come.
        """
        number = min(num_wanted, self._slice_pages)
        if number <= 0:
            return []
        account, ledger = _account(job), self._ledger
        if not wait:
            pages = self._pool.take_now(account, number)
        else:

            def hopeless() -> bool:
                return job.ended or self._pool.is_spent(account, sum(one.num_pages for one in ledger.stuck))

            pages = self._pool.take(account, number, deadline=job.deadline, stopped=hopeless)
            if not pages and not job.ended and not job.deadline.expired:
                raise PagesKept(job.order.store)
        with ledger.lock:
            job.num_pages += len(pages)
        return pages

    def give_back(self, job: JobState, pages: Sequence[int]) -> None:
        """Return pages that were taken. Does not block."""
        with self._ledger.lock:
            job.num_pages -= len(pages)
        self._pool.give_back(_account(job), pages)

    def settle(self, job: JobState, *pieces: RowPiece[Any] | None) -> None:
        """Return the pages of pieces, each when its call has returned (rule 3). Blocks until then. Once for each."""
        for piece in pieces:
            if piece is not None and piece.pages:
                piece.settle()
                pages, piece.pages = piece.pages, []
                self.give_back(job, pages)


def _account(job: JobState) -> Account:
    order = job.order  # a copy is a kind of write
    return order.target if isinstance(order, StoreCopy) else order.store, isinstance(order, Load)
