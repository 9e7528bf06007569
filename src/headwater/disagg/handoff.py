"""Handoff through the pool: a prefill instance sends a prompt's KV, a decode instance fetches it.

    prefill   begin_send(request, tokens, slots, ...) -> Sent(ticket)   only when the pool has every block, or Unsent
    decode    begin_fetch(ticket, slots, ...)         -> Fetched        only when every block is in its slot, or Missing

Neither blocks: what came of it is told, by the deadline, to who began it. Bytes are moved by Saves, Loads and Probes of
an executor (`exports.py`, `imports.py`, `runner.py`), which may be the cache's own, and that of a group of ranks.

Not here: requests, engines, HTTP, who goes where (`router/router.py`), what is done about what is missing.

Invariants:
- No ticket without all blocks seen in the pool, the tail included (rule 7).
- What `begin_fetch` says is there, is there on all ranks: verified, in its slot. It never says ready for less than all.
- Residency hears of full blocks only (rule 9), and only of what was seen.
"""

import logging
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from headwater.core.errors import InvalidConfig, InvalidInput
from headwater.core.events import MoveListener, Stored
from headwater.core.identity import CacheIdentity
from headwater.core.keys import BlockKey, Extra, Tokens
from headwater.core.results import Reason
from headwater.disagg.exports import Export
from headwater.disagg.imports import Import
from headwater.disagg.machine import Tries
from headwater.disagg.outcome import Fetched, Missing, Moved, Sent, Unsent
from headwater.disagg.prompt import NamedPrompt, name_prompt
from headwater.disagg.protocol import NONCE_BYTES, FirstToken, FirstTokenFinish, SamplerState, Ticket, check
from headwater.disagg.runner import RunningHandoff
from headwater.layout.spec import KVLayout
from headwater.layout.tail import require_tails
from headwater.storage.base import SYSTEM_CLOCK, Clock, Deadline
from headwater.transfer.executor.caller import Caller

log: Final = logging.getLogger("headwater")

TAIL_GRACE_S: Final = 30.0  # a tail outlives its ticket: who began in time shall finish, and clocks differ


class PoolSender:
    """Sends through the pool. Several threads may use it at once. Owns nothing."""

    def __init__(
        self,
        caller: Caller | None,
        *,
        identity: CacheIdentity,
        layout: KVLayout,
        pool: str,
        store: str = "pool",
        tp_size: int = 1,
        ttl_s: float = 120.0,
        tries: Tries | None = None,
        residency: MoveListener | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`layout` is the unsharded one, `pool` the sort of pool (`config.pool_kind`), `ttl_s` how long tickets live.

        `caller` is of an executor of all ranks, to which the pool is `store`. Raises InvalidConfig.
        """
        self._caller = _check_end(caller, identity, layout, tp_size)
        if not 0 < ttl_s < float("inf"):
            raise InvalidConfig(f"a ticket lives for a positive number of seconds, not {ttl_s!r}")
        self._identity = identity
        self._layout = layout
        self._pool = pool
        self._store = store
        self._tp_size = tp_size
        self._ttl_s = ttl_s
        self._tries = tries if tries is not None else Tries()
        self._residency = residency
        self._clock = clock

    def begin_send(
        self,
        request: str,
        tokens: Tokens,
        slots: Sequence[int],
        *,
        first: FirstToken,
        sampler: SamplerState,
        deadline: Deadline,
        done: Callable[[Sent | Unsent], None],
        finish: FirstTokenFinish = FirstTokenFinish.GOES_ON,
        extras: Iterable[Extra] = (),
        salt: bytes | None = None,
        stopped: Callable[[], bool] = lambda: False,
        freed: Callable[[], None] = lambda: None,
    ) -> RunningHandoff | None:
        """Have every block of the prompt in the pool, and make the ticket; `done` hears of it. Does not block.

        `tokens` are the prompt, of which every position is computed; `slots` those of its blocks, the partial one
        included. They may change as soon as `done` was called, whatever it is told but `stuck`: then when `freed` was.
        A request that is over with its first token (`finish`) writes nothing and names no block: `done` has heard when
        this returns None. `stopped` is asked before each job. Raises InvalidInput.
        """
        nonce = secrets.token_bytes(NONCE_BYTES)
        prompt = name_prompt(tokens, identity=self._identity, nonce=nonce, salt=salt, extras=extras)
        begin_s = self._caller.clock.monotonic()
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
            done(Sent(ticket=ticket, num_bytes=0, num_tries=0, seconds=0.0))
            return None

        def ended(moved: Moved) -> None:
            done(self._outcome(ticket, prompt, moved, self._caller.clock.monotonic() - begin_s))

        export = Export(
            prompt,
            slots,
            store=self._store,
            expires_at_ms=int((expires_at_s + TAIL_GRACE_S) * 1000),
            deadline_s=begin_s + deadline.remaining_s,
            tries=self._tries,
            number=self._caller.number,
        )
        running = RunningHandoff(self._caller, export, ended, stopped, freed)
        running.begin()
        return running

    def _outcome(self, ticket: Ticket, prompt: NamedPrompt, moved: Moved, seconds: float) -> Sent | Unsent:
        _tell(self._residency, self._store, prompt.keys[: moved.num_blocks], prompt.root, 0)
        if moved.reason is None:
            return Sent(ticket=ticket, num_bytes=moved.num_bytes, num_tries=moved.num_tries, seconds=seconds)
        log.warning(
            "request %s: %d of %d blocks are in the pool, no ticket: %s (%s)",
            *(ticket.request, moved.num_blocks, prompt.num_blocks, moved.reason.value, moved.detail),
        )
        return Unsent(
            num_blocks=moved.num_blocks,
            reason=moved.reason,
            detail=moved.detail,
            num_tries=moved.num_tries,
            seconds=seconds,
            stuck=moved.stuck,
        )


class PoolReceiver:
    """Fetches from the pool. Several threads may use it at once, one for each request. Owns nothing."""

    def __init__(
        self,
        caller: Caller | None,
        *,
        identity: CacheIdentity,
        layout: KVLayout,
        pool: str,
        store: str = "pool",
        view: str | None = None,
        tp_size: int = 1,
        tries: Tries | None = None,
        residency: MoveListener | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """As PoolSender. `view`: what other tensor-parallel sizes wrote, as a store of the executor (`resharded.py`).

        Raises InvalidConfig.
        """
        self._caller = _check_end(caller, identity, layout, tp_size)
        self._identity = identity
        self._layout = layout
        self._pool = pool
        self._store = store
        self._view = view
        self._tp_size = tp_size
        self._tries = tries if tries is not None else Tries()
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
        if found is None and self._is_resharded(ticket) and self._view is None:
            return (
                f"the ticket's pages were written by {ticket.tp_size} ranks and this node reads those of "
                f"{self._tp_size}: give it a view of other sizes, or start both ends with the same tensor-parallel size"
            )
        return found

    def same_pages(self, ticket: Ticket) -> bool:
        """Whether the full blocks that a ticket names are pages as this node itself writes them."""
        return self.refusal(ticket) is None and not self._is_resharded(ticket)

    def begin_fetch(
        self,
        ticket: Ticket,
        slots: Sequence[int],
        *,
        deadline: Deadline,
        done: Callable[[Fetched | Missing], None],
        start_block: int = 0,
        stopped: Callable[[], bool] = lambda: False,
        freed: Callable[[], None] = lambda: None,
    ) -> RunningHandoff | None:
        """Read all blocks that a ticket names into slots: all of them, or `done` hears Missing. Does not block.

        `slots` are for the blocks from `start_block` on, the partial one included; those before are there already. The
        slots are the caller's to keep until `done` was called, and nothing writes to them after that; if it was told
        `stuck`, until `freed` was called. Where nothing is to be read, or the ticket is refused, `done` has heard when
        this returns None. Raises InvalidInput where slots and blocks differ.
        """
        if len(slots) != ticket.num_blocks - start_block or start_block < 0:
            raise InvalidInput(f"{ticket.num_blocks} blocks from block {start_block} on, and {len(slots)} slots")
        begin_s = self._caller.clock.monotonic()

        def ended(moved: Moved) -> None:
            done(self._outcome(ticket, start_block, moved, self._caller.clock.monotonic() - begin_s))

        refusal = self.refusal(ticket)
        if refusal is not None and not ticket.over:
            ended(Moved(start_block, Reason.REFUSED, refusal, num_tries=0))
            return None
        if start_block == ticket.num_blocks:
            ended(Moved(start_block))
            return None
        prompt = NamedPrompt(
            num_tokens=ticket.num_prompt_tokens,
            block_tokens=ticket.block_tokens,
            keys=ticket.keys,
            tail=ticket.tail,
            root=ticket.root,
            tenant=bytes(16),
            nonce=ticket.nonce,
        )
        machine = Import(
            prompt,
            slots,
            store=self._view if self._is_resharded(ticket) and self._view is not None else self._store,
            start_block=start_block,
            deadline_s=begin_s + deadline.remaining_s,
            tries=self._tries,
            number=self._caller.number,
        )
        running = RunningHandoff(self._caller, machine, ended, stopped, freed)
        running.begin()
        return running

    def _outcome(self, ticket: Ticket, start: int, moved: Moved, seconds: float) -> Fetched | Missing:
        if not self._is_resharded(ticket):  # the pool has those of another size, and they are not what others look for
            parent = ticket.keys[start - 1] if 0 < start <= len(ticket.keys) else ticket.root
            _tell(self._residency, self._store, ticket.keys[start : moved.num_blocks], parent, start)
        if moved.reason is None:
            num_blocks = ticket.num_blocks - start
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
            stuck=moved.stuck,
        )

    def _is_resharded(self, ticket: Ticket) -> bool:
        """Whether the writer's pages are others than ours. Where nothing is divided, all sizes have the same pages."""
        return ticket.tp_size != self._tp_size and any(plane.split is not None for plane in self._layout.planes)


def _check_end(caller: Caller | None, identity: CacheIdentity, layout: KVLayout, tp_size: int) -> Caller:
    if caller is None:
        raise InvalidConfig("a handoff through the pool needs a pool: say which (--pool), or do not part the roles")
    if tp_size < 1:
        raise InvalidConfig(f"a tensor-parallel size is at least 1, not {tp_size}")
    if layout.fingerprint != identity.layout or layout.block_tokens != identity.block_tokens:
        raise InvalidConfig("the layout is not the identity's")
    if caller.identity != identity.digest:
        raise InvalidConfig("the executor moves pages of another identity")
    require_tails(layout)
    return caller


def _tell(residency: MoveListener | None, tier: str, keys: Sequence[BlockKey], parent: BlockKey, depth: int) -> None:
    if keys and residency is not None:
        residency.offer([Stored(tier=tier, keys=tuple(keys), parent=parent, depth=depth)])
