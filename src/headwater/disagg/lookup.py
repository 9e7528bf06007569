"""Asking who holds a prompt, without ever waiting long for it: a bounded look into the residency index.

The question (`Lookup`) makes a prompt's keys and asks the index; it blocks, so it runs in a thread of its own. What
does not come in time is not waited for, and an index that keeps silent is left alone for a while: requests are then
routed round robin, at no cost. It must end by itself, soon after the time that it is given.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeAlias

from headwater.core.breaker import Breaker
from headwater.core.errors import InvalidInput
from headwater.core.identity import root_of
from headwater.core.keys import block_keys
from headwater.disagg.choice import Held
from headwater.residency.base import Found, Residency
from headwater.storage.base import Deadline

# From an endpoint, a body and the seconds it has, what nodes and pool hold of the prompt; None: nobody knows.
Lookup: TypeAlias = Callable[[str, Mapping[str, object], float], Held | None]

_NUM_THREADS: Final = 4


@dataclass(frozen=True, slots=True)
class Asking:
    """A body's prompt in tokens, and whose it is."""

    tokens: Sequence[int]
    salt: bytes = b""


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

    def __call__(self, endpoint: str, body: Mapping[str, object], timeout_s: float) -> Held | None:
        """What is held of a body's prompt. A prompt that cannot be read is one that nobody is known to hold."""
        deadline = Deadline.after(timeout_s)
        asking, blocks = self._read(endpoint, body), self._blocks()
        if asking is None or blocks is None:
            return Held()
        identity, block_tokens = blocks
        try:
            keys = block_keys(asking.tokens, parent=root_of(identity, asking.salt), block_tokens=block_tokens)
        except InvalidInput:  # a node will say so
            return Held()
        found = self._residency.lookup(keys, deadline=deadline)
        return held_of(found, block_tokens=block_tokens, num_tokens=len(asking.tokens))


class Looker:
    """Asks. For one event loop; `close` it."""

    def __init__(self, lookup: Lookup | None, *, timeout_s: float) -> None:
        """Without a `lookup` the index is silent."""
        self._lookup = lookup
        self._timeout_s = timeout_s
        self._breaker = Breaker(failures=3, pause_s=1.0)
        self._threads: ThreadPoolExecutor | None = None
        self._under_way: set[Future[Held | None]] = set()

    @property
    def state(self) -> str:
        """For people."""
        return "none" if self._lookup is None else self._breaker.state.name.lower()

    async def look(self, endpoint: str, body: Mapping[str, object]) -> Held | None:
        """What is held of a body's prompt; None: the index is silent. Waits `timeout_s` at most, and never raises."""
        loop = asyncio.get_running_loop()
        self._under_way = {one for one in self._under_way if not one.done()}
        if self._lookup is None or len(self._under_way) >= _NUM_THREADS or not self._breaker.allows(loop.time()):
            return None
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="headwater router lookup")
        asked = self._threads.submit(self._lookup, endpoint, body, self._timeout_s)
        self._under_way.add(asked)
        try:
            async with asyncio.timeout(self._timeout_s):
                held = await asyncio.wrap_future(asked)
        except asyncio.CancelledError:
            self._breaker.unproven(loop.time())
            raise
        except Exception:  # noqa: BLE001  whatever it is, routing goes on without it
            held = None
        if held is None:
            self._breaker.failed(loop.time())
        else:
            self._breaker.succeeded()
        return held

    def close(self) -> None:
        """Ask nothing more. What is under way ends by itself."""
        self._lookup = None
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)


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
