"""Handoffs of an engine: which are under way, and what has come of them, as the engine's thread hears it.

`begin_send` and `begin_fetch` return at once; bytes are moved by jobs of the cache's executor; `take` gives what has
ended since, in the engine's thread, which is woken for it. Not here: which requests, what follows from an outcome
(`handover.py`), how bytes move (`disagg/handoff.py`).

Invariants: whatever happens, a request that began comes out of `take`, once; until then its slots are in use. Those of
an outcome that is `stuck` are in use until it comes out of `take_freed` too. No thread of its own, and nothing blocks
but `close`.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Final, TypeAlias

from headwater.core.errors import InvalidConfig
from headwater.core.results import Reason
from headwater.disagg.handoff import PoolReceiver, PoolSender
from headwater.disagg.outcome import Fetched, Missing, Sent, Unsent
from headwater.disagg.protocol import FirstToken, SamplerState, Ticket
from headwater.disagg.protocol import FirstTokenFinish as Over
from headwater.disagg.runner import RunningHandoff
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
        sender: PoolSender | None = None,
        receiver: PoolReceiver | None = None,
        tier: str = "",
    ) -> None:
        """Owns neither. `tier`: the cache's name of what they go through, where the cache uses it too."""
        self.tier: Final = tier
        self.can_send: Final = sender is not None
        self.can_fetch: Final = receiver is not None
        self._block_tokens = block_tokens
        self._sender = sender
        self._receiver = receiver
        self._ended: deque[tuple[Request, Outcome]] = deque()
        self._freed: deque[Request] = deque()
        self._changed = threading.Condition()
        self._running: dict[Request, RunningHandoff | None] = {}
        self.on_end: Callable[[], None] = lambda: None  # called, from whatever thread, when a handoff has ended

    def is_promised(self, ticket: Ticket) -> bool:
        """Whether the cache itself can load what a ticket names, because it has the same pool and the same pages."""
        return bool(self.tier) and self._receiver is not None and self._receiver.same_pages(ticket)

    def begin_send(
        self, request: Request, first: FirstToken, sampler: SamplerState, over: Over, until_s: float
    ) -> None:
        """Send a request's prompt, all of which is computed. Does not block."""
        sender, tokens = self._sender, list(request.prompt)
        name = (request.handoff.request if isinstance(request.handoff, Sending) else "") or request.name
        if sender is None:
            raise InvalidConfig("this engine sends nothing: it has no pool, or another role")
        slots = request.slots[: -(-len(tokens) // self._block_tokens)]

        def send() -> RunningHandoff | None:
            return sender.begin_send(
                name,
                tokens,
                slots,
                first=first,
                sampler=sampler,
                deadline=Deadline(until_s),
                done=lambda outcome: self._end(request, outcome),
                finish=over,
                salt=request.salt,
                stopped=lambda: request.cancelled,
                freed=lambda: self._free(request),
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

        def fetch() -> RunningHandoff | None:
            return receiver.begin_fetch(
                ticket,
                slots,
                start_block=start_block,
                deadline=Deadline(until_s),
                done=lambda outcome: self._end(request, outcome),
                stopped=lambda: request.cancelled,
                freed=lambda: self._free(request),
            )

        def failed(why: str) -> Outcome:
            return Missing(first_block=start_block, reason=Reason.FAILED, detail=why, num_tries=1, seconds=0.0)

        self._begin(request, fetch, failed)

    def is_running(self, request: Request) -> bool:
        """Whether jobs may still touch a request's slots."""
        return request in self._running

    def cancel(self, request: Request) -> None:
        """Nobody wants a request any more: its handoff, if one is under way, ends soon. Does not block."""
        with self._changed:
            running = self._running.get(request)
        if running is not None:
            running.cancel()

    def take(self) -> list[tuple[Request, Outcome]]:
        """What has ended since. For the engine's thread."""
        with self._changed:
            ended = list(self._ended)
            self._ended.clear()
        return ended

    @property
    def has_freed(self) -> bool:
        """Whether there is something for `take_freed`. From any thread."""
        return bool(self._freed)

    def take_freed(self) -> list[Request]:
        """Requests whose handoff was stuck, and touches no slot any more. For the engine's thread, behind `take`."""
        with self._changed:
            freed = list(self._freed)
            self._freed.clear()
        return freed

    def close(self) -> None:
        """Cancel what is under way. Blocks until it has ended: soon, or, where a copy hangs, by its deadline."""
        with self._changed:
            requests = list(self._running)
        for request in requests:
            self.cancel(request)
        with self._changed:
            self._changed.wait_for(lambda: not self._running)

    def _begin(
        self, request: Request, work: Callable[[], RunningHandoff | None], failed: Callable[[str], Outcome]
    ) -> None:
        with self._changed:
            self._running[request] = None
        try:
            running = work()
        except Exception as error:  # a fault of ours, or bad input: nobody is to wait for it
            log.exception("the handoff of request %s failed", request.name)
            self._end(request, failed(f"{type(error).__name__}: {error}"))
            return
        with self._changed:
            if request in self._running:
                self._running[request] = running

    def _free(self, request: Request) -> None:
        with self._changed:
            self._freed.append(request)
        self.on_end()

    def _end(self, request: Request, outcome: Outcome) -> None:
        with self._changed:
            del self._running[request]
            self._ended.append((request, outcome))
            self._changed.notify_all()
        self.on_end()
