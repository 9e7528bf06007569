"""Where requests wait for room, in the order in which they came, each until its time is over."""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeVar

T = TypeVar("T")

_LOOK_AGAIN_S: Final = 0.05  # leases run out and pauses end without anybody saying so


class Gate:
    """One line. For one event loop."""

    def __init__(self) -> None:
        self._line: deque[object] = deque()
        self._changed = asyncio.Event()

    @property
    def num_waiting(self) -> int:
        """How many stand here."""
        return len(self._line)

    def changed(self) -> None:
        """There may be room now."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self, take: Callable[[], T | None], *, until_s: float, in_front: bool = False) -> T | None:
        """What `take` gives as soon as it gives something and it is our turn; None if it did not by then.

        Who was through before and comes again stands `in_front`.
        """
        me, loop = object(), asyncio.get_running_loop()
        if in_front:
            self._line.appendleft(me)
        else:
            self._line.append(me)
        try:
            while True:
                is_first = self._line[0] is me
                if is_first and (found := take()) is not None:
                    return found
                left_s = until_s - loop.time()
                if left_s <= 0:
                    return None
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(left_s, _LOOK_AGAIN_S) if is_first else left_s):
                        await self._changed.wait()
        finally:
            self._line.remove(me)
            self.changed()
