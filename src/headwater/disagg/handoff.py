"""Handoff through the pool: a prefill instance sends a prompt's KV, a decode instance fetches it.

    prefill   send(request, tokens, slots, ...) -> Sent(ticket)   only when the pool has every block, or Unsent
    decode    fetch(ticket, slots, ...)         -> Fetched        only when every block is in its slot, or Missing

Both block, in the thread of whoever asks, and return by their deadline. `Sender` and `Receiver` are the seam: another
way from device to device has these two faces and the same ticket. Here it is the pool, through movers (`mover.py`), one
for each page that the ranks of this process hold of a block.

Not here: requests, engines, HTTP, who goes where (`router.py`), what is done about what is missing.

Invariants:
- No ticket without all blocks seen in the pool, the tail included (rule 7).
- What `fetch` says is there, is there on all movers: verified, in its slot. It never says ready for less than all.
- Residency hears of full blocks only (rule 9), and only of what was seen.
"""

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final, Protocol

from headwater.core.errors import InvalidConfig, InvalidInput
from headwater.core.events import MoveListener, Stored
from headwater.core.identity import CacheIdentity
from headwater.core.keys import BlockKey, Extra, Tokens
from headwater.core.results import Reason
from headwater.disagg.mover import Mover
from headwater.disagg.outcome import Fetched, Missing, Moved, Sent, Unsent
from headwater.disagg.prompt import NamedPrompt, name_prompt
from headwater.disagg.protocol import NONCE_BYTES, FirstToken, FirstTokenFinish, SamplerState, Ticket, check
from headwater.layout.spec import KVLayout
from headwater.storage.base import SYSTEM_CLOCK, Clock, Deadline

log: Final = logging.getLogger("headwater")

TAIL_GRACE_S: Final = 30.0  # a tail outlives its ticket: who began in time shall finish, and clocks differ


class Sender(Protocol):
    """The prefill end of a handoff, whatever goes between."""

    def send(
        self,
        request: str,
        tokens: Tokens,
        slots: Sequence[int],
        *,
        first: FirstToken,
        sampler: SamplerState,
        deadline: Deadline,
        finish: FirstTokenFinish = FirstTokenFinish.GOES_ON,
        extras: Iterable[Extra] = (),
        salt: bytes | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Sent | Unsent:
        """Make a prompt's KV readable for whoever gets the ticket. Blocks, until the deadline."""
        ...


class Receiver(Protocol):
    """The decode end."""

    def fetch(
        self,
        ticket: Ticket,
        slots: Sequence[int],
        *,
        deadline: Deadline,
        start_block: int = 0,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Fetched | Missing:
        """Bring what a ticket names into slots. Blocks, until the deadline."""
        ...

    def same_pages(self, ticket: Ticket) -> bool:
        """Whether the full blocks that a ticket names are pages as this node itself writes them."""
        ...


class PoolSender:
    """Sends through the pool. Several threads may use it at once. Owns nothing."""

    def __init__(
        self,
        movers: Sequence[Mover],
        *,
        identity: CacheIdentity,
        layout: KVLayout,
        pool: str,
        tp_size: int = 1,
        ttl_s: float = 120.0,
        residency: MoveListener | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`layout` is the unsharded one, `pool` the sort of pool (`config.pool_kind`), `ttl_s` how long tickets live.

        `movers` are of all pages that all ranks hold of a block. Raises InvalidConfig.
        """
        _check_end(movers, identity, layout, tp_size)
        if not 0 < ttl_s < float("inf"):
            raise InvalidConfig(f"a ticket lives for a positive number of seconds, not {ttl_s!r}")
        self._movers = tuple(movers)
        self._identity = identity
        self._layout = layout
        self._pool = pool
        self._tp_size = tp_size
        self._ttl_s = ttl_s
        self._residency = residency
        self._clock = clock

    def send(
        self,
        request: str,
        tokens: Tokens,
        slots: Sequence[int],
        *,
        first: FirstToken,
        sampler: SamplerState,
        deadline: Deadline,
        finish: FirstTokenFinish = FirstTokenFinish.GOES_ON,
        extras: Iterable[Extra] = (),
        salt: bytes | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Sent | Unsent:
        """Have every block of the prompt in the pool, and make the ticket. Blocks, until the deadline.

        `tokens` are the prompt, of which every position is computed; `slots` those of its blocks, the partial one
        included. They may change as soon as this returned, whatever it says. A request that is over with its first
        token (`finish`) writes nothing and names no block. Raises InvalidInput.
        """
        begin_s = time.monotonic()
        nonce = secrets.token_bytes(NONCE_BYTES)
        prompt = name_prompt(tokens, identity=self._identity, nonce=nonce, salt=salt, extras=extras)
        expires_at_s = self._clock.time() + deadline.remaining_s + self._ttl_s
        ticket = Ticket(
            request=request,
            identity=self._identity.digest,
            layout=self._layout.fingerprint,
            block_tokens=self._identity.block_tokens,
            tp_size=self._tp_size,
            root=prompt.root,
            nonce=nonce,
            num_prompt_tokens=prompt.num_tokens,
            keys=() if finish else prompt.keys,
            tail=None if finish else prompt.tail,
            first=first,
            sampler=sampler,
            expires_at_ms=int(expires_at_s * 1000),
            pool=self._pool,
            finish=finish,
        )
        if ticket.over:
            return Sent(ticket=ticket, num_bytes=0, num_tries=0, seconds=time.monotonic() - begin_s)
        moved = self._write(prompt, slots, int((expires_at_s + TAIL_GRACE_S) * 1000), deadline, stopped)
        seconds = time.monotonic() - begin_s
        _tell(self._residency, self._movers[0].tier, prompt.keys[: moved.num_blocks], prompt.root, 0)
        if moved.reason is None:
            return Sent(ticket=ticket, num_bytes=moved.num_bytes, num_tries=moved.num_tries, seconds=seconds)
        log.warning(
            "request %s: %d of %d blocks are in the pool, no ticket: %s (%s)",
            *(request, moved.num_blocks, prompt.num_blocks, moved.reason.value, moved.detail),
        )
        return Unsent(
            num_blocks=moved.num_blocks,
            reason=moved.reason,
            detail=moved.detail,
            num_tries=moved.num_tries,
            seconds=seconds,
        )

    def _write(
        self,
        prompt: NamedPrompt,
        slots: Sequence[int],
        expires_at_ms: int,
        deadline: Deadline,
        stopped: Callable[[], bool],
    ) -> Moved:
        num_bytes, num_tries = 0, 0
        moved = Moved(0)
        for mover in self._movers:
            moved = mover.write(prompt, slots, expires_at_ms=expires_at_ms, deadline=deadline, stopped=stopped)
            num_bytes, num_tries = num_bytes + moved.num_bytes, max(num_tries, moved.num_tries)
            if moved.reason is not None:
                break
        if len(self._movers) > 1:  # a full pool may have dropped the pages of one for those of another: look at all
            looks = [mover.look(prompt, deadline=deadline) for mover in self._movers]
            least = min(looks, key=lambda seen: seen.num_blocks)
            moved = least if moved.reason is None else replace(moved, num_blocks=least.num_blocks)
        return replace(moved, num_bytes=num_bytes, num_tries=num_tries)


class PoolReceiver:
    """Fetches from the pool. Several threads may use it at once, one for each request. Owns nothing."""

    def __init__(
        self,
        movers: Sequence[Mover],
        *,
        identity: CacheIdentity,
        layout: KVLayout,
        pool: str,
        tp_size: int = 1,
        residency: MoveListener | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """As PoolSender; movers with a view also read what other tensor-parallel sizes wrote. Raises InvalidConfig."""
        _check_end(movers, identity, layout, tp_size)
        self._movers = tuple(movers)
        self._identity = identity
        self._layout = layout
        self._pool = pool
        self._tp_size = tp_size
        self._residency = residency
        self._clock = clock

    def refusal(self, ticket: Ticket) -> str | None:
        """Why this node cannot use a ticket, as a sentence that says what to change; None: it can. Does not block."""
        found = check(
            ticket,
            identity=self._identity.digest,
            fingerprint=self._layout.fingerprint,
            block_tokens=self._identity.block_tokens,
            pool=self._pool,
            now_s=self._clock.time(),
        )
        if found is None and self._is_resharded(ticket) and not all(mover.has_view for mover in self._movers):
            return (
                f"the ticket's pages were written by {ticket.tp_size} ranks and this node reads those of "
                f"{self._tp_size}: give it a view of other sizes, or start both ends with the same tensor-parallel size"
            )
        return found

    def same_pages(self, ticket: Ticket) -> bool:
        """Whether the full blocks that a ticket names are pages as this node itself writes them."""
        return self.refusal(ticket) is None and not self._is_resharded(ticket)

    def fetch(
        self,
        ticket: Ticket,
        slots: Sequence[int],
        *,
        deadline: Deadline,
        start_block: int = 0,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Fetched | Missing:
        """Read all blocks that a ticket names into slots: all of them, or it says Missing. Blocks, until the deadline.

        `slots` are for the blocks from `start_block` on, the partial one included; those before are there already. The
        slots are the caller's to keep until this returned, and nothing writes to them after that. A ticket that is over
        is fetched without a call. Raises InvalidInput where slots and blocks differ.
        """
        begin_s = time.monotonic()
        if len(slots) != ticket.num_blocks - start_block or start_block < 0:
            raise InvalidInput(f"{ticket.num_blocks} blocks from block {start_block} on, and {len(slots)} slots")
        refusal = self.refusal(ticket)
        if refusal is not None and not ticket.over:
            moved = Moved(start_block, Reason.REFUSED, refusal, num_tries=0)
        else:
            moved = self._read(ticket, slots, start_block, deadline, stopped)
        seconds = time.monotonic() - begin_s
        if moved.reason is None:
            num_blocks = ticket.num_blocks - start_block
            return Fetched(num_blocks=num_blocks, num_bytes=moved.num_bytes, num_tries=moved.num_tries, seconds=seconds)
        log.warning(
            "request %s: %d of %d blocks came: %s (%s)",
            *(ticket.request, moved.num_blocks, ticket.num_blocks, moved.reason.value, moved.detail),
        )
        return Missing(
            first_block=moved.num_blocks,
            reason=moved.reason,
            detail=moved.detail,
            num_tries=moved.num_tries,
            seconds=seconds,
        )

    def _read(
        self, ticket: Ticket, slots: Sequence[int], start: int, deadline: Deadline, stopped: Callable[[], bool]
    ) -> Moved:
        prompt = NamedPrompt(
            num_tokens=ticket.num_prompt_tokens,
            block_tokens=ticket.block_tokens,
            keys=ticket.keys,
            tail=ticket.tail,
            root=ticket.root,
            tenant=bytes(16),
            nonce=ticket.nonce,
        )
        if start == ticket.num_blocks:
            return Moved(start)
        resharded = self._is_resharded(ticket)
        end, num_bytes, num_tries = prompt.num_blocks, 0, 0
        failed: Moved | None = None
        for mover in self._movers:  # once one came short, the others read no further than it did
            moved = mover.read(
                prompt,
                slots[: end - start],
                start_block=start,
                end_block=end,
                resharded=resharded,
                deadline=deadline,
                stopped=stopped,
            )
            num_bytes, num_tries = num_bytes + moved.num_bytes, max(num_tries, moved.num_tries)
            if moved.reason is not None:
                failed, end = moved, moved.num_blocks
        tier = self._movers[0].tier
        parent = ticket.keys[start - 1] if start else ticket.root
        if not resharded:  # the pool has those of another size, and they are not what others look for
            _tell(self._residency, tier, ticket.keys[start:end], parent, start)
        if failed is None:
            return Moved(end, None, "", num_bytes, num_tries)
        return Moved(end, failed.reason, failed.detail, num_bytes, num_tries)

    def _is_resharded(self, ticket: Ticket) -> bool:
        """Whether the writer's pages are others than ours. Where nothing is divided, all sizes have the same pages."""
        return ticket.tp_size != self._tp_size and any(plane.split is not None for plane in self._layout.planes)


def _check_end(movers: Sequence[Mover], identity: CacheIdentity, layout: KVLayout, tp_size: int) -> None:
    if not movers:
        raise InvalidConfig("a handoff through the pool needs a pool: say which (--pool), or do not part the roles")
    if tp_size < 1:
        raise InvalidConfig(f"a tensor-parallel size is at least 1, not {tp_size}")
    if layout.fingerprint != identity.layout or layout.block_tokens != identity.block_tokens:
        raise InvalidConfig("the layout is not the identity's")
    for mover in movers:
        if mover.naming.identity != identity.digest or mover.naming.layout.block_tokens != layout.block_tokens:
            raise InvalidConfig("a mover is of another identity, or of another block size")


def _tell(residency: MoveListener | None, tier: str, keys: Sequence[BlockKey], parent: BlockKey, depth: int) -> None:
    if keys and residency is not None:
        residency.offer([Stored(tier=tier, keys=tuple(keys), parent=parent, depth=depth)])
