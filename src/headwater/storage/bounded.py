"""BoundedStore: any store as one whose every call is answered by its deadline, for who knows nothing of `calls.py`.

A plain Store promises not to touch a caller's buffers once it has answered, and a call that is stuck cannot promise
that. So the bytes go through memory of the call's own, one copy more each way, and a buffer that was given for a page
that came late is never written to. Who can wait for `on_return` before it uses its memory again asks `Calls` itself.
What the store inside can do besides (in place, from memory) is not passed on: nobody could bound it, or take it back.
"""

from collections.abc import Sequence

from headwater.core.errors import ResourceClosed
from headwater.core.page import PageName
from headwater.core.results import Status
from headwater.storage.base import Deadline, Store
from headwater.storage.calls import Calls


class BoundedStore(Store):
    """The store of a Calls. Owns neither: close() ends only itself."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._closed = False

    def put(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[Status]:
        """Put copies of the frames. Blocks until the deadline at most."""
        self._require_open()
        copies = [(name, memoryview(bytes(frame))) for name, frame in pages]
        return self._calls.put(copies, deadline=deadline, on_return=_nothing).wait()

    def get_into(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[Status]:
        """Get frames into memory of the call's own; copy out what came in time. Blocks until the deadline at most."""
        self._require_open()
        copies = [(name, memoryview(bytearray(len(buffer)))) for name, buffer in pages]
        results = self._calls.get_into(copies, deadline=deadline, on_return=_nothing).wait()
        for (_, buffer), (_, copy), status in zip(pages, copies, results, strict=True):
            if status is Status.HIT:
                buffer[:] = copy
        return results

    def contains(self, names: Sequence[PageName], *, deadline: Deadline) -> list[bool]:
        """Ask. Blocks until the deadline at most."""
        self._require_open()
        return self._calls.contains(names, deadline=deadline).wait()

    def delete(self, names: Sequence[PageName], *, deadline: Deadline) -> list[Status]:
        """Remove. Blocks until the deadline at most."""
        self._require_open()
        return self._calls.delete(names, deadline=deadline).wait()

    def close(self) -> None:
        """Answer no more; the calls and the store stay open."""
        self._closed = True

    def _require_open(self) -> None:
        if self._closed or self._calls.closed:
            raise ResourceClosed("the store is closed")


def _nothing() -> None:
    """The memory is the call's own: the collector hears of its end."""
