"""Asking who holds a prompt, without ever waiting long for it: a bounded look into the residency index.

A look has two parts, and both block, so each runs in a thread. The first (`Lookup`) makes a prompt's keys, which takes
time by its size and is nobody's fault; the second (`Ask`) asks the index. What does not come in time is not waited for:
then requests are routed round robin. An index that keeps silent is left alone for a while, at no cost; it must answer
by itself, soon after the time that it is given. How long a prompt took to be read says nothing about the index.
"""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, TypeAlias, TypeVar

from headwater.core.breaker import Breaker
from headwater.core.errors import InvalidInput
from headwater.core.identity import root_of
from headwater.core.keys import block_keys
from headwater.disagg.prompt import Asking
from headwater.residency.base import Found, Residency
from headwater.router.choice import Held
from headwater.storage.base import Deadline

# Given the seconds that it has, what nodes and pool hold of a prompt; None: the index did not say.
Ask: TypeAlias = Callable[[float], Held | None]
# From an endpoint and a body, the question; None: there is none, because nobody could hold such a prompt.
Lookup: TypeAlias = Callable[[str, Mapping[str, object]], Ask | None]

_Found = TypeVar("_Found")

_NUM_THREADS: Final = 4  # for each part
_READ_S: Final = 0.25  # for the first


class PrefixLookup:
    """The question: a prompt's keys, as the nodes that are here make them, asked of the index. A `Lookup`."""

    def __init__(
        self,
        residency: Residency,
        *,
        read: Callable[[str, Mapping[str, object]], Asking | None],
        blocks: Callable[[], tuple[bytes, int] | None],
    ) -> None:
        """`read` gives a body's prompt in tokens, None if it cannot; `blocks` the nodes' identity and block size."""
        self._residency = residency
        self._read = read
        self._blocks = blocks

    def __call__(self, endpoint: str, body: Mapping[str, object]) -> Ask | None:
        """The question about a body's prompt. One that cannot be read is one that nobody is known to hold."""
        asking, blocks = self._read(endpoint, body), self._blocks()
        if asking is None or blocks is None:
            return None
        identity, block_tokens = blocks
        try:
            keys = block_keys(asking.tokens, parent=root_of(identity, asking.salt), block_tokens=block_tokens)
        except InvalidInput:  # a node will say so
            return None
        num_tokens = len(asking.tokens)

        def ask(timeout_s: float) -> Held | None:
            found = self._residency.lookup(keys, deadline=Deadline.after(timeout_s))
            return held_of(found, block_tokens=block_tokens, num_tokens=num_tokens)

        return ask


class _LookupThreads:
    """Threads for one of the two parts: who finds all of them busy does not wait for one. For one event loop."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pool: ThreadPoolExecutor | None = None
        self._under_way: set[Future[Any]] = set()

    def run(self, what: Callable[..., _Found], *arguments: object) -> asyncio.Future[_Found] | None:
        """Have it done; None: all are busy."""
        self._under_way = {one for one in self._under_way if not one.done()}
        if len(self._under_way) >= _NUM_THREADS:
            return None
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix=f"headwater router {self._name}")
        begun = self._pool.submit(what, *arguments)
        self._under_way.add(begun)
        return asyncio.wrap_future(begun)

    def close(self) -> None:
        """What is under way ends by itself."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


class Looker:
    """Asks. For one event loop; `close` it."""

    def __init__(self, lookup: Lookup | None, *, timeout_s: float) -> None:
        """Without a `lookup` the index is silent."""
        self._lookup = lookup
        self._timeout_s = timeout_s
        self._breaker = Breaker(failures=3, pause_s=1.0)
        self._reading, self._asking = _LookupThreads("reading"), _LookupThreads("lookup")

    @property
    def state(self) -> str:
        """For people."""
        return "none" if self._lookup is None else self._breaker.state.name.lower()

    async def look(self, endpoint: str, body: Mapping[str, object]) -> Held | None:
        """What is held of a body's prompt; None: nobody says. Waits for a moment at most, and never raises."""
        if self._lookup is None or not self._breaker.would_allow(asyncio.get_running_loop().time()):
            return None
        reading = self._reading.run(self._lookup, endpoint, body)
        if reading is None:
            return None
        try:
            async with asyncio.timeout(_READ_S):
                ask = await reading
        except Exception:  # noqa: BLE001  whatever it is, routing goes on without it
            return None
        return Held() if ask is None else await self._ask(ask)

    async def _ask(self, ask: Ask) -> Held | None:
        """Ask the index, which has `timeout_s`, and is left alone if it does not answer."""
        now_s = asyncio.get_running_loop().time
        if self._lookup is None or not self._breaker.allows(now_s()):  # closed meanwhile, or silent
            return None
        asked = self._asking.run(ask, self._timeout_s)
        if asked is None:
            self._breaker.unproven(now_s())
            return None
        try:
            async with asyncio.timeout(self._timeout_s):
                held = await asked
        except asyncio.CancelledError:
            self._breaker.unproven(now_s())
            raise
        except Exception:  # noqa: BLE001  whatever it is, routing goes on without it
            held = None
        if held is None:
            self._breaker.failed(now_s())
        else:
            self._breaker.succeeded()
        return held

    def close(self) -> None:
        """Ask nothing more. What is under way ends by itself."""
        self._lookup = None
        self._reading.close()
        self._asking.close()


def held_of(found: Found, *, block_tokens: int, num_tokens: int) -> Held | None:
    """What an index's answer on a prompt of `num_tokens` means for routing; None if it is none."""
    if not found.answered:
        return None
    return Held(
        by_node={one.node: one.num_blocks * block_tokens for one in found.holders},
        local={one.node: max(one.device, one.host, one.disk) * block_tokens for one in found.holders},
        pool=found.pool * block_tokens,
        num_tokens=num_tokens,
    )
