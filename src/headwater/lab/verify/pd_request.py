"""One request of `verify --pd`: prefill sends it, decode takes it over, and both are held against one engine alone.

The reference has no pool. It computes a prompt from nothing, but for the turns before it, which it had itself: a token
that was computed as part of an answer differs in its last bits from one that was computed as part of a prompt. Equal
are the tokens and, where they are told, the log-probabilities, to the last bit.

What else has to be so, every time: prefill says no token itself; the ticket goes from node to node as text, and names
the prompt's blocks; when it is there the pool has every page that it names; decode computes its own tokens and none of
the prompt, and every block was read from the pool or on its device before, the tail read.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from headwater.build import POOL_TIER
from headwater.disagg.protocol import Ticket, decode
from headwater.engine.models.base import Model
from headwater.engine.request import Finish, Sampling
from headwater.lab.verify.pd_nodes import WAIT_S, HeardRequest, PdNode
from headwater.lab.verify.pd_ranks import TP_SIZE, rank_namings
from headwater.storage.base import Deadline, Store
from headwater.transfer.executor.tier import Naming


class Different(Exception):
    """It is not equal, or not what it says."""


class Unlucky(Exception):
    """It was not what it says, and that may be nobody's fault: once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """Who takes part."""

    alone: PdNode  # the reference
    prefill: PdNode
    other: PdNode  # prefill, too
    ranks: PdNode  # prefill, with the pages of two ranks
    decode: PdNode


@dataclass(slots=True)
class Talk:
    """A conversation, as the reference has it."""

    salt: bytes = field(default_factory=lambda: secrets.token_bytes(32))  # it finds nothing of other conversations
    num_there: int = 0  # tokens of the turns before whose KV it keeps


@dataclass(frozen=True, slots=True)
class ComparedTurn:
    """One request, compared and found equal."""

    ticket: Ticket
    tokens: list[int]
    found: dict[str, int]  # tokens that prefill found, by tier
    read_blocks: int  # by decode, from the pool
    computed: int  # tokens, by decode


class Comparison:
    """Asks and compares. Blocks; raises Different and Unlucky."""

    def __init__(self, model: Model, nodes: Nodes, store: Store) -> None:
        """`store`: the pool, to look at. Owns nothing."""
        self.nodes: Final = nodes
        self._store = store
        self._block_tokens = model.block_tokens
        self._whole = Naming(identity=model.identity.digest, layout=model.layout)
        self._ranks = rank_namings(model)

    def alone(self, prompt: Sequence[int], sampling: Sampling, talk: Talk) -> HeardRequest:
        """What one engine answers by itself."""
        heard = self.nodes.alone.ask(prompt, sampling, salt=talk.salt)
        if heard.finish not in (Finish.LENGTH, Finish.STOP) or heard.usage.cached_tokens != talk.num_there:
            raise Different(f"the engine alone ended with {heard.finish}, and found {heard.usage.cached_by_tier}")
        return heard

    def request(self, node: PdNode, prompt: list[int], sampling: Sampling, talk: Talk) -> ComparedTurn:
        """Have a prompt computed by one node and answered by another."""
        sent = node.send(prompt, sampling)
        return self.taken(sent, self.ticket(sent, prompt), prompt, sampling, talk)

    def ticket(self, sent: HeardRequest, prompt: list[int]) -> Ticket:
        """What prefill answered, as it arrives elsewhere."""
        end = sent.end()
        if end.finish is not Finish.SENT or end.ticket is None or sent.tokens:
            raise Different(f"prefill ended with {end.finish} and {len(sent.tokens)} tokens: {end.error}")
        ticket = decode(end.ticket.encode())
        wanted = divmod(0 if ticket.over else len(prompt), self._block_tokens)
        if (len(ticket.keys), ticket.tail.valid_tokens if ticket.tail else 0) != wanted:
            raise Different(f"the ticket of {len(prompt)} tokens names {len(ticket.keys)} blocks and {ticket.tail}")
        keys = [*ticket.keys, *([ticket.tail.key] if ticket.tail else [])]
        namings = self._ranks if ticket.tp_size == TP_SIZE else [self._whole]
        if not all(self._there(keys, namings)):
            raise Different("the ticket names pages that the pool does not have")
        if self._whole not in namings and any(self._there(keys, [self._whole])):
            raise Different("the pool has whole pages beside those of the ranks")
        return ticket

    def taken(
        self, sent: HeardRequest, ticket: Ticket, prompt: list[int], sampling: Sampling, talk: Talk
    ) -> ComparedTurn:
        """Have decode go on, and compare."""
        chosen = sampling.temperature > 0 and sampling.seed is None  # by prefill
        expected = self.alone(prompt, replace(sampling, seed=ticket.sampler.seed) if chosen else sampling, talk)
        node = self.nodes.decode
        before = node.num_computed
        taken = node.take(ticket, prompt, sampling)
        if taken.finish not in (Finish.LENGTH, Finish.STOP):
            raise Different(f"decode ended with {taken.finish}: {taken.end().error}")
        computed = node.num_computed - before
        not_told = taken.finish is Finish.STOP  # the token that ended it
        if computed != max(0, len(taken.tokens) - 1) + (not_told and bool(taken.tokens)):  # prefill chose the first
            raise Different(f"decode computed {computed} tokens for an answer of {len(taken.tokens)}")
        if (taken.finish, taken.tokens) != (expected.finish, expected.tokens):
            raise Different("other tokens")
        if taken.logprobs != expected.logprobs:
            raise Different("other log-probabilities")
        return ComparedTurn(ticket, taken.tokens, sent.usage.cached_by_tier, self._num_read(taken, ticket), computed)

    def _num_read(self, taken: HeardRequest, ticket: Ticket) -> int:
        """Blocks that decode read: full ones by its cache or by the handoff, the tail by the handoff."""
        usage = taken.usage
        moved, rest = divmod(usage.num_pool_bytes, self._whole.frame_bytes)
        by_tier = {tier: num // self._block_tokens for tier, num in usage.cached_by_tier.items()}
        read = moved + by_tier.pop(POOL_TIER, 0)
        kept = by_tier.pop("device", 0)
        if rest or by_tier or read + kept != ticket.num_blocks or (ticket.tail is not None and not moved):
            raise Different(f"of {ticket.num_blocks} blocks {read} were read, {kept} were there: {usage}")
        return read

    def _there(self, keys: Sequence[bytes], namings: Sequence[Naming]) -> list[bool]:
        names = [naming.name(key) for naming in namings for key in keys]
        return self._store.contains(names, deadline=Deadline.after(WAIT_S)) if names else []
