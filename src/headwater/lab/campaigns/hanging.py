"""HangingStore: a store whose calls block, whatever their deadline says, as a client does whose server is gone.

What hung is done all the same when it is let go: late bytes arrive. It watches the memory it was given (rule 3): what a
hanging call holds must be as it was when the call goes on. Frames to be put are compared; buffers to be filled are
painted first, and looked at again. What was touched is in `spoiled`.
"""

import math
import threading
from collections.abc import Callable, Sequence
from typing import ClassVar, Final, TypeVar

from headwater.core.page import PageName
from headwater.core.results import Status
from headwater.storage.base import Deadline, Store
from headwater.storage.wrappers import OpaqueStore

S = TypeVar("S")
CALLS: Final = ("put", "get_into", "contains", "delete")
PATIENCE_S: Final = 30.0  # a test that waits so long has failed
_PAINT: Final = 0xA5


class HangingStore(OpaqueStore):
    """Passes calls on; while told to `hang`, holds them at the door until `release`."""

    interruptible: ClassVar[bool] = False

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.dead = False  # what hung, or comes, raises, and is not passed on
        self.asked: list[tuple[str, list[PageName]]] = []
        self.spoiled: list[str] = []
        self._to_hold: dict[str, float] = dict.fromkeys(CALLS, 0)
        self._num_releases = dict.fromkeys(CALLS, 0)
        self._num_inside = 0
        self._changed = threading.Condition()

    def hang(self, *calls: str, times: float = math.inf) -> None:
        """Hold so many of the next of these calls, each; of all, if none is named."""
        with self._changed:
            for call in calls or CALLS:
                self._to_hold[call] = times

    def release(self, *calls: str) -> None:
        """Let go what hangs of these calls, and hold no more; of all, if none is named."""
        with self._changed:
            for call in calls or CALLS:
                self._to_hold[call] = 0
                self._num_releases[call] += 1
            self._changed.notify_all()

    def wait_inside(self, number: int = 1) -> None:
        """Wait until so many calls hang."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._num_inside >= number, PATIENCE_S), f"only {self._num_inside}"

    def num_asked(self, call: str | None = None) -> int:
        """How often the store was called, in one way or all."""
        with self._changed:
            return sum(call in (None, name) for name, _ in self.asked)

    def put(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[Status]:
        """Put, after the hang."""
        before = [bytes(frame) for _, frame in pages]
        real = lambda: self.store.put(pages, deadline=_whenever())  # noqa: E731
        untouched = lambda: all(frame == old for (_, frame), old in zip(pages, before, strict=True))  # noqa: E731
        return self._do("put", [name for name, _ in pages], real, untouched)

    def get_into(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[Status]:
        """Get, after the hang."""
        for _, buffer in pages:
            buffer[:] = bytes([_PAINT]) * len(buffer)
        real = lambda: self.store.get_into(pages, deadline=_whenever())  # noqa: E731
        untouched = lambda: all(buffer == bytes([_PAINT]) * len(buffer) for _, buffer in pages)  # noqa: E731
        return self._do("get_into", [name for name, _ in pages], real, untouched)

    def contains(self, names: Sequence[PageName], *, deadline: Deadline) -> list[bool]:
        """Look, after the hang."""
        return self._do("contains", list(names), lambda: self.store.contains(names, deadline=_whenever()), lambda: True)

    def delete(self, names: Sequence[PageName], *, deadline: Deadline) -> list[Status]:
        """Delete, after the hang."""
        return self._do("delete", list(names), lambda: self.store.delete(names, deadline=_whenever()), lambda: True)

    def _do(
        self, call: str, names: list[PageName], real: Callable[[], list[S]], untouched: Callable[[], bool]
    ) -> list[S]:
        with self._changed:
            self.asked.append((call, names))
            if self._to_hold[call] > 0:
                self._to_hold[call] -= 1
                self._wait(call)
            if not untouched():
                self.spoiled.append(call)
            dead = self.dead
        if dead:
            raise ConnectionError("nobody is there")
        return real()

    def _wait(self, call: str) -> None:
        seen = self._num_releases[call]
        self._num_inside += 1
        self._changed.notify_all()
        try:
            released = self._changed.wait_for(lambda: self._num_releases[call] > seen, 4 * PATIENCE_S)
            assert released, "nobody let go"
        finally:
            self._num_inside -= 1


def _whenever() -> Deadline:
    """An engine that blocks knows no deadline."""
    return Deadline.after(PATIENCE_S)
