"""Waiting until the pool has been seen to hold pages (rule 7), for many prompts at once.

One probe at a time asks the pool for the pages of everybody who waits, on a thread of its own: however many wait, the
pool gets one call after the other, and a probe's time runs from when it begins. Everybody gets one probe at least.
Probes become rarer while they see nothing new. Who stops waiting is probed for no more.

For one event loop; `close` it there.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

from headwater.core.errors import HeadwaterError
from headwater.core.page import PageName
from headwater.storage.base import Deadline, Store

_ONE_LOOK_S: Final = 2.0
_PAUSE_S: Final = 0.01  # between probes, at first;
_MAX_PAUSE_S: Final = 0.25  # doubled up to this, while they see nothing new


@dataclass(slots=True, eq=False)
class _PoolWaiter:
    names: Sequence[PageName]
    num_held: int = 0  # from the first on, when last probed for
    probed: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)


class PoolProbes:
    """Who waits for which pages."""

    def __init__(self, pool: Store) -> None:
        """Does not own the pool."""
        self._pool = pool
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="headwater-probes")
        self._waiters: set[_PoolWaiter] = set()
        self._came = asyncio.Event()
        self._probing: asyncio.Task[None] | None = None

    async def until_held(self, names: Sequence[PageName], wait_s: float) -> int:
        """Wait until the pool holds all, for `wait_s` or one probe. How many from the first on it was seen to hold."""
        waiter = _PoolWaiter(names)
        self._waiters.add(waiter)
        self._came.set()
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self._probe())
        try:
            async with asyncio.timeout(max(0.0, wait_s)):
                await waiter.over.wait()
        except TimeoutError:
            await waiter.probed.wait()
        finally:
            self._waiters.discard(waiter)
        return waiter.num_held

    async def close(self) -> None:
        """Probe no more; who still waits hears what was seen. Idempotent."""
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.wait({self._probing})
        for waiter in self._waiters:
            waiter.over.set()
            waiter.probed.set()
        self._thread.shutdown(wait=False)

    async def _probe(self) -> None:
        loop, pause_s = asyncio.get_running_loop(), _PAUSE_S
        while self._waiters:
            self._came.clear()
            asked = list(self._waiters)
            names = [name for waiter in asked for name in waiter.names]
            held, news = await loop.run_in_executor(self._thread, self._contains, names), False
            for waiter in asked:
                own, held = held[: len(waiter.names)], held[len(waiter.names) :]
                num_held = own.index(False) if False in own else len(own)
                news = news or num_held != waiter.num_held
                waiter.num_held = num_held
                waiter.probed.set()
                if num_held == len(own):
                    waiter.over.set()
            pause_s = _PAUSE_S if news else min(_MAX_PAUSE_S, 2 * pause_s)
            try:
                async with asyncio.timeout(pause_s):
                    await self._came.wait()
                pause_s = _PAUSE_S
            except TimeoutError:
                continue

    def _contains(self, names: Sequence[PageName]) -> list[bool]:
        try:
            return self._pool.contains(names, deadline=Deadline.after(_ONE_LOOK_S))
        except HeadwaterError:  # it is closed, or broken: nothing was seen
            return [False] * len(names)
