"""Where requests wait for room, each until its time is over. Those that want one slot, and those that want many.

Each sort has a line of its own, in the order in which they came, and the two take turns: one that wants many slots
lets as many pass that want one. Were there one line, whoever wants all slots would keep everybody behind it waiting
until the last of them is free; were the wide ones to wait until nobody else does, they would wait for ever.

Invariants: the first of a line is tried when it is that line's turn, or nobody stands in the other. A turn of the wide
ones in which there is no room is over after as long as the narrow ones had before, and `_MOST_HELD_S` at most: so
narrow ones have half of the time, whatever the wide ones want. Nobody is woken but the first of each line.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeVar

T = TypeVar("T")

_LOOK_AGAIN_S: Final = 0.05  # leases run out and pauses end without anybody saying so
_MOST_HELD_S: Final = 1.0


class _LineWaiter:
    """Somebody in line."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.news = asyncio.Event()  # there may be room, and it is first


class WaitLine:
    """Two lines. For one event loop."""

    def __init__(self) -> None:
        self._narrow: deque[_LineWaiter] = deque()
        self._wide: deque[_LineWaiter] = deque()
        self._num_left = 0  # narrow ones that may still pass, before it is the wide ones' turn
        self._narrow_since_s = 0.0  # it is the narrow ones' turn, and
        self._wide_until_s = 0.0  # when that of the wide ones ends

    @property
    def num_waiting(self) -> int:
        """How many stand here."""
        return len(self._narrow) + len(self._wide)

    def changed(self) -> None:
        """There may be room now."""
        for line in (self._narrow, self._wide):
            if line:
                line[0].news.set()

    async def wait(
        self, take: Callable[[], T | None], *, until_s: float, num_slots: int = 1, in_front: bool = False
    ) -> T | None:
        """What `take` gives as soon as it gives something and it is our turn; None if it did not by then.

        Who was through before and comes again stands `in_front`.
        """
        loop = asyncio.get_running_loop()
        me, line = _LineWaiter(num_slots), self._narrow if num_slots == 1 else self._wide
        if line is self._wide and not line and self._num_left <= 0:
            self._narrow_turn(num_slots, loop.time())
        if in_front:
            line.appendleft(me)
        else:
            line.append(me)
        try:
            while True:
                me.news.clear()
                is_first = line[0] is me
                if is_first and self._is_turn(line, loop.time()) and (found := take()) is not None:
                    self._passed(me, loop.time())
                    return found
                left_s = until_s - loop.time()
                if left_s <= 0:
                    return None
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(left_s, _LOOK_AGAIN_S) if is_first else left_s):
                        await me.news.wait()
        finally:
            line.remove(me)
            self.changed()

    # --- whose turn it is ---------------------------------------------------------------------------------------------

    def _is_turn(self, line: deque[_LineWaiter], now_s: float) -> bool:
        if not (self._narrow and self._wide):
            return True
        if self._num_left <= 0 and now_s >= self._wide_until_s:  # there was no room for it: the others go on
            self._narrow_turn(self._wide[0].num_slots, now_s)
        return (self._num_left > 0) is (line is self._narrow)

    def _narrow_turn(self, num_left: int, now_s: float) -> None:
        self._num_left, self._narrow_since_s = num_left, now_s

    def _passed(self, who: _LineWaiter, now_s: float) -> None:
        if who.num_slots > 1:
            self._narrow_turn(who.num_slots, now_s)
        elif self._wide and self._num_left > 0:
            self._num_left -= 1
            self._wide_until_s = now_s + min(_MOST_HELD_S, now_s - self._narrow_since_s)
