"""Handoffs of an engine: sends and fetches in threads of their own, a request in each, ended in the engine's thread.

`begin_send` and `begin_fetch` return at once; `take` gives what has ended since, in the engine's thread, which is woken
for it. Not here: which requests, what follows from an outcome (`engine.py`), how bytes move (`disagg/handoff.py`).

Invariants: whatever happens in a thread, its request comes out of `take`, once; until then its slots are in use. A
request that is cancelled is told to its thread, which then ends soon.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeAlias

from headwater.core.errors import InvalidConfig
from headwater.core.results import Reason
from headwater.disagg.handoff import Receiver, Sender
from headwater.disagg.outcome import Fetched, Missing, Sent, Unsent
from headwater.disagg.protocol import FirstToken, SamplerState, Ticket
from headwater.disagg.protocol import FirstTokenFinish as Over
from headwater.engine.request import Request, Sending
from headwater.storage.base import Deadline

Outcome: TypeAlias = Sent | Unsent | Fetched | Missing

log = logging.getLogger("headwater")


class Handoffs:
    """Both ends of an engine's handoffs, as far as it has them."""

    def __init__(
        self,
        *,
        block_tokens: int,
        sender: Sender | None = None,
        receiver: Receiver | None = None,
        tier: str = "",
        num_threads: int,
    ) -> None:
        """Owns neither. `tier`: the cache's name of what they go through, where the cache uses it too.

        A thread for each request that may run: one that waits for a slow store keeps nobody else from handing over.
        """
        if num_threads < 1:
            raise InvalidConfig(f"handoffs need at least one thread, not {num_threads}")
        self.tier: Final = tier
        self.can_send: Final = sender is not None
        self.can_fetch: Final = receiver is not None
        self._block_tokens = block_tokens
        self._sender = sender
        self._receiver = receiver
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="headwater handoff")
        self._ended: deque[tuple[Request, Outcome]] = deque()
        self._lock = threading.Lock()
        self.on_end: Callable[[], None] = lambda: None  # called from a thread when a handoff has ended

    def is_promised(self, ticket: Ticket) -> bool:
        """Whether the cache itself can load what a ticket names, because it has the same pool and the same pages."""
        return bool(self.tier) and self._receiver is not None and self._receiver.same_pages(ticket)

    def begin_send(
        self,
        request: Request,
        first: FirstToken,
        sampler: SamplerState,
        over: Over,
        until_s: float,
        *,
        wait: Callable[[], None] = lambda: None,
    ) -> None:
        """Send a request's prompt, all of which is computed, after a `wait` in its thread. Does not block."""
        sender, tokens = self._sender, list(request.prompt)
        name = (request.handoff.request if isinstance(request.handoff, Sending) else "") or request.name
        if sender is None:
            raise InvalidConfig("this engine sends nothing: it has no pool, or another role")
        slots = request.slots[: -(-len(tokens) // self._block_tokens)]

        def send() -> Outcome:
            wait()
            return sender.send(
                name,
                tokens,
                slots,
                first=first,
                sampler=sampler,
                deadline=Deadline(until_s),
                finish=over,
                salt=request.salt,
                stopped=lambda: request.cancelled,
            )

        def failed(why: str) -> Outcome:
            return Unsent(num_blocks=0, reason=Reason.FAILED, detail=why, num_tries=1, seconds=0.0)

        self._begin(request, send, failed)

    def begin_fetch(self, request: Request, ticket: Ticket, start_block: int, until_s: float) -> None:
        """Fetch what a request's ticket names from `start_block` on. Does not block."""
        receiver = self._receiver
        if receiver is None:
            raise InvalidConfig("this engine fetches nothing: it has no pool, or another role")
        slots = request.slots[start_block : ticket.num_blocks]

        def fetch() -> Outcome:
            return receiver.fetch(
                ticket,
                slots,
                start_block=start_block,
                deadline=Deadline(until_s),
                stopped=lambda: request.cancelled,
            )

        def failed(why: str) -> Outcome:
            return Missing(first_block=start_block, reason=Reason.FAILED, detail=why, num_tries=1, seconds=0.0)

        self._begin(request, fetch, failed)

    def take(self) -> list[tuple[Request, Outcome]]:
        """What has ended since. For the engine's thread."""
        with self._lock:
            ended = list(self._ended)
            self._ended.clear()
        return ended

    def close(self) -> None:
        """End the threads. Blocks until those that run have ended: by their deadline, or soon after a cancel."""
        self._threads.shutdown(wait=True)

    def _begin(self, request: Request, work: Callable[[], Outcome], failed: Callable[[str], Outcome]) -> None:
        def run() -> None:
            try:
                outcome = work()
            except Exception as error:  # a fault of ours, or bad input: nobody is to wait for it
                log.exception("the handoff of request %s failed", request.name)
                outcome = failed(f"{type(error).__name__}: {error}")
            with self._lock:
                self._ended.append((request, outcome))
            self.on_end()

        self._threads.submit(run)
