"""DisabledStore: what stands in for a tier that could not be opened. Everything misses; the reason is kept."""

from collections.abc import Sequence

from headwater.core.errors import ResourceClosed
from headwater.core.page import PageName
from headwater.core.results import Status
from headwater.storage.base import Deadline, Store


class DisabledStore(Store):
    """Holds nothing and takes nothing, at once."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self._closed = False

    def put(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[Status]:
        """FAILED for each page."""
        self._require_open()
        return [Status.FAILED] * len(pages)

    def get_into(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[Status]:
        """MISS for each page."""
        self._require_open()
        return [Status.MISS] * len(pages)

    def contains(self, names: Sequence[PageName], *, deadline: Deadline) -> list[bool]:
        """False for each page."""
        self._require_open()
        return [False] * len(names)

    def delete(self, names: Sequence[PageName], *, deadline: Deadline) -> list[Status]:
        """ABSENT for each page."""
        self._require_open()
        return [Status.ABSENT] * len(names)

    def close(self) -> None:
        """Nothing to give back."""
        self._closed = True

    def _require_open(self) -> None:
        if self._closed:
            raise ResourceClosed("the store is closed")
