"""Pages that leave a LocalStore because somebody said so, however many build on them."""

from collections.abc import Iterator, Sequence
from itertools import islice

from headwater.core.page import PageName
from headwater.core.results import Status
from headwater.policy import LeafOrder
from headwater.storage.local.allocator import STEP_PAGES
from headwater.storage.local.attachment import Attachment


class Removal:
    """Pages on their way out, what builds on them first, in steps that are changes of their own."""

    def __init__(self, at: Attachment, names: Sequence[PageName]) -> None:
        self.begun = False
        self._at = at
        self._names = names
        self._there: list[bool] = []
        self._order: LeafOrder[PageName] | None = None
        self._doomed: Iterator[PageName] = iter(())

    def begin(self) -> None:
        """See what is there."""
        self._at.catalog.retire_dead(self._at.owner)  # one of them may have left a page behind that it never published
        self._there = self._at.catalog.mirror.has_all(self._names)
        self.begun = True

    def go_on(self) -> bool:
        """Remove some pages. Whether there may be more."""
        order = self._at.catalog.mirror.order
        if order is not self._order:  # at first, and where everything had to be read again
            self._order, self._doomed = order, order.leaves_first(self._names)
        batch = list(islice(self._doomed, STEP_PAGES))
        self._at.catalog.remove(batch, self._at.owner)
        return bool(batch)

    def results(self) -> list[Status]:
        """What became of each page that was to go."""
        held = self._at.catalog.mirror.has_all(self._names)
        return [
            Status.ABSENT if not was else Status.LATE if is_ else Status.REMOVED
            for was, is_ in zip(self._there, held, strict=True)
        ]
