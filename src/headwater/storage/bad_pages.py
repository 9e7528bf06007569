"""What becomes of pages that failed verification: counted, told, removed by force; and when a store gives no others.

A store that keeps the first value of a name would serve a bad one for ever (rule 8). Whether a page is bad is
`verified.py`'s business.
"""

from collections.abc import Sequence

from headwater.core.page import PageName
from headwater.core.results import Status
from headwater.metrics import Metrics
from headwater.storage.base import Deadline, Store


class BadPages:
    """Bad pages of one store, since the last good one."""

    def __init__(self, store: Store, *, max_bad: int, metrics: Metrics) -> None:
        """`max_bad` of them in a row are `too_many`."""
        self._store = store
        self._max_bad = max_bad
        self._metrics = metrics
        self._num_bad = 0

    @property
    def too_many(self) -> bool:
        """Whether so many pages were bad that none is worth reading any more."""
        return self._num_bad >= self._max_bad

    def forget(self) -> None:
        """A good page came, or somebody wants to try again."""
        self._num_bad = 0

    def throw_out(self, bad: Sequence[tuple[PageName, Status]], deadline: Deadline) -> None:
        """Count and tell pages, and remove them by force. Blocks; raises what the store raises."""
        for name, status in bad:
            self._metrics.count("bad_pages_total", fault=status.value)
            self._metrics.event("bad_page", fault=status.value, name=name.hex())
        were_few = not self.too_many
        self._num_bad += sum(status is not Status.STALE for _, status in bad)  # expiry is no sign of trouble
        if were_few and self.too_many:
            self._metrics.event("tier_switched_off", reason=f"{self._num_bad} bad pages and no good one")
        # A page of an unknown version may be a newer process's good one: a miss here, but not ours to remove.
        doomed = [name for name, status in bad if status is not Status.UNKNOWN_VERSION]
        removed = self._store.delete(doomed, deadline=deadline) if doomed else []
        kept = sum(status in (Status.LATE, Status.FAILED) for status in removed)
        if kept:
            self._metrics.count("bad_pages_kept_total", kept)
