"""How a prompt's blocks are called, at both ends: one function for full blocks and the tail, for writers and readers.

The tail's key is made like every other (`core/keys.py`), with one extra: the ticket's nonce, at the tail's positions.
So a tail is its ticket's alone (rule 9). Two tickets of the same prompt share all full blocks and have two tails, each
with its own expiry, in stores that keep the first value under a name and cannot prolong it; and whoever throws a bad
tail out, or lets one expire, takes it from nobody else.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from headwater.core.errors import InvalidInput
from headwater.core.identity import CacheIdentity
from headwater.core.keys import BlockKey, Extra, Tokens, as_tokens, block_keys
from headwater.disagg.protocol import Tail, Ticket

TICKET_EXTRA: Final = "headwater.ticket"  # the kind of the extra in a tail's key


@dataclass(frozen=True, slots=True)
class Asking:
    """A body's prompt in tokens, and whose it is."""

    tokens: Sequence[int]
    salt: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedPrompt:
    """A prompt's blocks by name. `root` is before the first."""

    num_tokens: int
    block_tokens: int
    keys: tuple[BlockKey, ...]  # of its full blocks
    tail: Tail | None
    root: BlockKey
    tenant: bytes
    nonce: bytes

    @property
    def num_blocks(self) -> int:
        """Blocks, the tail included."""
        return len(self.keys) + (self.tail is not None)


def name_prompt(
    tokens: Tokens,
    *,
    identity: CacheIdentity,
    nonce: bytes,
    salt: bytes | None = None,
    extras: Iterable[Extra] = (),
) -> NamedPrompt:
    """The names of a prompt's blocks. Pure. `salt`: a tenant's, the identity's own unless given. Raises InvalidInput.

    `nonce` is the ticket's; it has a say in the tail's key only.
    """
    ids = as_tokens(tokens)
    size = identity.block_tokens
    num_full, num_rest = divmod(len(ids), size)
    if not len(ids):
        raise InvalidInput("a prompt needs at least one token")
    if salt is not None:
        identity = replace(identity, salt=salt)
    own = [Extra(TICKET_EXTRA, nonce, num_full * size, num_rest)] if num_rest else []
    keys = block_keys(ids, parent=identity.root, block_tokens=size, extras=[*extras, *own], tail=True)
    return NamedPrompt(
        num_tokens=len(ids),
        block_tokens=size,
        keys=tuple(keys[:num_full]),
        tail=Tail(keys[num_full], num_rest) if num_rest else None,
        root=identity.root,
        tenant=identity.tenant,
        nonce=nonce,
    )


def check_prompt(
    ticket: Ticket,
    tokens: Tokens,
    *,
    identity: CacheIdentity,
    salt: bytes | None = None,
    extras: Iterable[Extra] = (),
) -> str | None:
    """Why a ticket is not of this prompt, as a sentence; None: it is. Pure. Raises InvalidInput for such tokens.

    For whoever has both: a decode instance gets the prompt from the client and the ticket from a prefill instance. One
    that is over names no blocks, so there only the number of tokens can differ.
    """
    own = name_prompt(tokens, identity=identity, nonce=ticket.nonce, salt=salt, extras=extras)
    if own.num_tokens != ticket.num_prompt_tokens:
        return f"the ticket is of {ticket.num_prompt_tokens} prompt tokens and the request has {own.num_tokens}"
    if own.root != ticket.root:
        return "the ticket is of another tenant's prompt, or of another cache identity"
    if not ticket.over and (own.keys, own.tail) != (ticket.keys, ticket.tail):
        same = sum(1 for ours, theirs in zip(own.keys, ticket.keys, strict=False) if ours == theirs)
        return f"the ticket is of another prompt: its blocks differ from block {same} on"
    return None
