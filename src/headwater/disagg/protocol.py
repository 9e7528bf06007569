"""The ticket: what a prefill instance tells a decode instance, in plain values. Neither needs to know the other.

A ticket names the pages that hold a prompt's KV, every full block and the partial tail, and says where to go on: the
first token and the sampler's state. It is made only when the pool has all of them (rule 7), so whoever has one may
read. It holds no KV, no address and no secret; what it names proves itself (rule 5). When it leaves its node it is
sealed (`sealed`): a MAC over all it says, with a key of the fleet's. A node takes none that is not (`is_sealed`), and
each once (`used.py`).

Here is what it may say, how it looks as JSON, and whether a node can use it (`check`). Not here: how its keys are made
(`prompt.py`), who reads and writes the pages (`handoff.py`).

Invariants: a Ticket is consistent, whoever made it (blocks, tail and number of tokens fit one another); `decode` takes
what `encode` made, of this format, and nothing else; both keep the bounds below.
"""

import base64
import binascii
import enum
import hashlib
import hmac
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, cast

from headwater.core.errors import InvalidInput
from headwater.core.keys import BlockKey
from headwater.core.node_key import NodeKey
from headwater.core.page import KEY_BYTES

FORMAT: Final = 2  # of the JSON below; another one is refused, never guessed at
NONCE_BYTES: Final = 32
MAX_TICKET_BYTES: Final = 8 << 20  # of JSON
MAX_BLOCKS: Final = 1 << 17
MAX_NAME_CHARS: Final = 256  # of a request's id, or a pool's kind
MAX_TOP: Final = 64  # alternatives to the first token
MAX_COUNTS: Final = 1 << 16  # different tokens of an answer
MAX_HELD_CHARS: Final = 4096  # of text that may begin a stop string

_PURPOSE: Final = "tickets 1"  # of the key that they are sealed with
_U32: Final = 1 << 32
_U63: Final = 1 << 63


class FirstTokenFinish(enum.StrEnum):
    """Whether the first token was the last one too, and why."""

    GOES_ON = ""
    STOP = "stop"  # the end of the sequence, or a stop token
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """The token that prefill chose, and how likely it was, where somebody asked."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens

    def __post_init__(self) -> None:
        """Refuse what no sampler says."""
        _require_int("a token", self.token, 0, _U32)
        if self.logprob is not None:
            _require_number("a token's log-probability", self.logprob)
        _require_pairs("alternatives", self.top, MAX_TOP)
        for token, logprob in self.top:
            _require_int("a token", token, 0, _U32)
            _require_number("a token's log-probability", logprob)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerState:
    """Where the sampler stands after the first token, so that the next draw is the one that would have come."""

    seed: int  # of the stream it draws from, also where the client gave none
    position: int  # of the next draw in that stream
    counts: tuple[tuple[int, int], ...] = ()  # token, how often it was generated: for penalties; by token
    held_text: str = ""  # text of the answer that may begin a stop string, and was not given out

    def __post_init__(self) -> None:
        """Refuse what no sampler says."""
        _require_int("a seed", self.seed, -_U63, _U63)
        _require_int("a position", self.position, 0, _U63)
        _require_pairs("counts", self.counts, MAX_COUNTS)
        last = -1
        for token, number in self.counts:
            _require_int("a token", token, last + 1, _U32)
            _require_int("a count", number, 1, _U63)
            last = token
        _require_text("held text", self.held_text, 0, MAX_HELD_CHARS)


@dataclass(frozen=True, slots=True)
class Tail:
    """The partial last block: its key, which is this ticket's alone, and how many of its positions hold a token."""

    key: BlockKey
    valid_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """A prompt's KV in the pool, and where to go on. Immutable; raises InvalidInput for what contradicts itself.

    A ticket whose answer is over already names no pages: there is nothing to read.
    """

    request: str  # the one id that router, prefill and decode know it by
    identity: bytes  # digest of the cache identity
    layout: bytes  # fingerprint of the unsharded layout
    block_tokens: int
    tp_size: int  # of who wrote the pages
    root: BlockKey  # the parent of the first block
    nonce: bytes  # what makes the tail's key this ticket's alone
    num_prompt_tokens: int
    keys: tuple[BlockKey, ...]  # of all full blocks
    tail: Tail | None
    first: FirstToken
    sampler: SamplerState
    expires_at_ms: int  # wall clock; the tail lives a little longer
    pool: str  # which sort of pool the pages are in
    finish: FirstTokenFinish = FirstTokenFinish.GOES_ON
    mac: str = ""  # hex, over all the rest: see `sealed`

    def __post_init__(self) -> None:
        """Refuse what is no ticket."""
        for what, text in (("a request's id", self.request), ("a pool's kind", self.pool)):
            _require_text(what, text, 1, MAX_NAME_CHARS)
            if not text.isprintable():
                raise InvalidInput(f"{what} is printable, not {text!r}")
        for what in ("identity", "layout", "root", "nonce"):
            _require_digest(what, getattr(self, what))
        _require_int("block_tokens", self.block_tokens, 1, _U32)
        _require_int("tp_size", self.tp_size, 1, 1 << 16)
        _require_int("num_prompt_tokens", self.num_prompt_tokens, 1, _U63)
        _require_int("expires_at_ms", self.expires_at_ms, 1, _U63)
        if not isinstance(self.finish, FirstTokenFinish):
            raise InvalidInput(f"not a finish: {self.finish!r}")
        if not (isinstance(cast(object, self.mac), str) and re.fullmatch("|[0-9a-f]{64}", self.mac)):
            raise InvalidInput("a MAC is 64 digits in lower-case hex")
        self._check_blocks()

    def _check_blocks(self) -> None:
        if len(self.keys) > MAX_BLOCKS:
            raise InvalidInput(f"{len(self.keys)} blocks are more than {MAX_BLOCKS}")
        num_full, num_rest = divmod(self.num_prompt_tokens, self.block_tokens)
        if self.over:
            num_full = num_rest = 0
        for key in self.keys:
            _require_digest("a key", key)
        if len(self.keys) != num_full or len({*self.keys, self.root}) != num_full + 1:
            raise InvalidInput(f"{self.num_prompt_tokens} tokens fill {num_full} blocks, each with a key of its own")
        if (self.tail is None) != (num_rest == 0):
            raise InvalidInput(f"{num_rest} tokens are left for a tail, and there is {'no' if num_rest else 'one'}")
        if self.tail is not None:
            _require_digest("the tail's key", self.tail.key)
            if self.tail.valid_tokens != num_rest or self.tail.key in {*self.keys, self.root}:
                raise InvalidInput(f"the tail holds the last {num_rest} tokens, under a key of its own")

    @property
    def over(self) -> bool:
        """Whether the first token was the last: there is nothing to read, and nothing to compute."""
        return self.finish is not FirstTokenFinish.GOES_ON

    @property
    def num_blocks(self) -> int:
        """Blocks to be read, the tail included: so many slots are needed for the prompt."""
        return len(self.keys) + (self.tail is not None)

    def document(self) -> dict[str, Any]:
        """The ticket as plain values."""
        tail = None if self.tail is None else {"key": self.tail.key.hex(), "valid_tokens": self.tail.valid_tokens}
        return {
            "headwater_ticket": FORMAT,
            "request": self.request,
            "identity": self.identity.hex(),
            "layout": self.layout.hex(),
            "block_tokens": self.block_tokens,
            "tp_size": self.tp_size,
            "root": self.root.hex(),
            "nonce": self.nonce.hex(),
            "num_prompt_tokens": self.num_prompt_tokens,
            "keys": base64.b64encode(b"".join(self.keys)).decode("ascii"),
            "tail": tail,
            "first": {"token": self.first.token, "logprob": self.first.logprob, "top": self.first.top},
            "sampler": {
                "seed": self.sampler.seed,
                "position": self.sampler.position,
                "counts": self.sampler.counts,
                "held_text": self.sampler.held_text,
            },
            "expires_at_ms": self.expires_at_ms,
            "pool": self.pool,
            "finish": self.finish.value,
            "mac": self.mac,
        }

    def encode(self) -> str:
        """The ticket as JSON."""
        return json.dumps(self.document(), separators=(",", ":"), allow_nan=False)

    def sealed(self, key: NodeKey) -> "Ticket":
        """The same ticket, with a MAC that nobody can make who has not the fleet's key."""
        return replace(self, mac=mac_of(self.document(), key))

    def is_sealed(self, key: NodeKey) -> bool:
        """Whether somebody with that key sealed it, and nothing was changed since."""
        return hmac.compare_digest(mac_of(self.document(), key), self.mac)


def decode(text: str | bytes) -> Ticket:
    """The ticket that `encode` made. Raises InvalidInput for anything else, and says what is wrong with it."""
    if len(text) > MAX_TICKET_BYTES:
        raise InvalidInput(f"not a ticket: {len(text)} bytes, and at most {MAX_TICKET_BYTES} are one")
    try:
        document = json.loads(text, object_pairs_hook=_fields)
        if not isinstance(document, dict) or document.get("headwater_ticket") != FORMAT:
            raise InvalidInput(f"no JSON of a ticket of format {FORMAT}: are both ends of the same version?")
        return _ticket(document)
    except (KeyError, TypeError, ValueError, RecursionError) as error:  # InvalidInput is a ValueError
        said = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise InvalidInput(f"not a ticket: {said:.200}") from error


def mac_of(document: Mapping[str, Any], key: NodeKey) -> str:
    """The MAC of a ticket's values, whatever order they are in and whatever `mac` they have already. Pure.

    Also for tickets that are not of this format: those of other engines (`vllm_ticket.py`).
    """
    said = json.dumps({**document, "mac": ""}, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hmac.digest(key.derived(_PURPOSE), said.encode(), hashlib.sha256).hex()


def check(
    ticket: Ticket, *, identity: bytes, fingerprint: bytes, block_tokens: int, now_s: float, pool: str | None = None
) -> str | None:
    """Why a node that reads as this cannot use a ticket, as a sentence that says what to change; None: it can. Pure.

    `identity` is the node's identity's digest, `fingerprint` that of its unsharded layout, `now_s` the wall clock, and
    `pool` the sort of its pool, if it is to be compared.
    """
    if ticket.block_tokens != block_tokens:
        return (
            f"the ticket's blocks have {ticket.block_tokens} tokens and this node's {block_tokens}: "
            "start prefill and decode with the same block size"
        )
    if ticket.layout != fingerprint:
        return (
            f"the ticket's KV layout is {ticket.layout.hex()[:12]} and this node's {fingerprint.hex()[:12]}: "
            "start prefill and decode with the same model and the same KV dtype"
        )
    if ticket.identity != identity:
        return (
            f"the ticket's cache identity is {ticket.identity.hex()[:12]} and this node's {identity.hex()[:12]}: start "
            "prefill and decode with the same weights, configuration, adapter and quantisation"
        )
    if pool is not None and ticket.pool != pool:
        return f"the ticket's pages are in a {ticket.pool} pool and this node's is {pool}: give both ends the same pool"
    late_s = now_s - ticket.expires_at_ms / 1000
    if late_s >= 0:
        return f"the ticket expired {late_s:.1f} s ago: prefill again, and give tickets more time (or mend the clocks)"
    return None


# --- what JSON says ---------------------------------------------------------------------------------------------------


def _ticket(document: Mapping[str, Any]) -> Ticket:
    _require_fields(document, {"headwater_ticket", *Ticket.__dataclass_fields__})
    packed = base64.b64decode(document["keys"], validate=True)
    if len(packed) % KEY_BYTES:
        raise InvalidInput(f"the keys have {len(packed)} bytes")
    tail, first, sampler = document["tail"], document["first"], document["sampler"]
    if tail is not None:
        _require_fields(tail, {"key", "valid_tokens"})
        _require_int("valid_tokens", tail["valid_tokens"], 1, _U32)
    _require_fields(first, set(FirstToken.__dataclass_fields__))
    _require_fields(sampler, set(SamplerState.__dataclass_fields__))
    return Ticket(
        request=document["request"],
        identity=_digest(document["identity"]),
        layout=_digest(document["layout"]),
        block_tokens=document["block_tokens"],
        tp_size=document["tp_size"],
        root=BlockKey(_digest(document["root"])),
        nonce=_digest(document["nonce"]),
        num_prompt_tokens=document["num_prompt_tokens"],
        keys=tuple(BlockKey(packed[at : at + KEY_BYTES]) for at in range(0, len(packed), KEY_BYTES)),
        tail=None if tail is None else Tail(BlockKey(_digest(tail["key"])), tail["valid_tokens"]),
        first=FirstToken(token=first["token"], logprob=first["logprob"], top=_pairs(first["top"])),
        sampler=SamplerState(
            seed=sampler["seed"],
            position=sampler["position"],
            counts=_pairs(sampler["counts"]),
            held_text=sampler["held_text"],
        ),
        expires_at_ms=document["expires_at_ms"],
        pool=document["pool"],
        finish=FirstTokenFinish(document["finish"]),
        mac=document["mac"],
    )


def _fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise InvalidInput("a field is there twice")
    return found


def _require_fields(document: object, names: set[str]) -> None:
    if not isinstance(document, dict) or document.keys() != names:
        raise InvalidInput(f"fields are to be {', '.join(sorted(names))}")


def _digest(text: object) -> bytes:
    if not isinstance(text, str) or len(text) != 2 * KEY_BYTES:
        raise InvalidInput(f"{text!r:.80} is no digest")
    try:
        return binascii.unhexlify(text)
    except binascii.Error as error:
        raise InvalidInput(f"{text!r} is no digest") from error


def _pairs(value: object) -> tuple[tuple[Any, Any], ...]:
    if not isinstance(value, list) or not all(isinstance(one, list) and len(one) == 2 for one in value):
        raise InvalidInput("a list of pairs was expected")
    return tuple((one[0], one[1]) for one in value)


# --- what may be said -------------------------------------------------------------------------------------------------


def _require_int(what: str, value: object, low: int, end: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value < end:
        raise InvalidInput(f"{what} is a whole number from {low} to {end - 1}, not {value!r:.80}")


def _require_number(what: str, value: object) -> None:
    small = isinstance(value, int) and not isinstance(value, bool) and abs(value) < _U63
    if not small and not (isinstance(value, float) and math.isfinite(value)):
        raise InvalidInput(f"{what} is a finite number, not {value!r:.80}")


def _require_text(what: str, value: object, least: int, most: int) -> None:
    if not isinstance(value, str) or not least <= len(value) <= most:
        raise InvalidInput(f"{what} is text of {least} to {most} characters, not {value!r:.80}")


def _require_digest(what: str, value: object) -> None:
    if not isinstance(value, bytes) or len(value) != KEY_BYTES:
        raise InvalidInput(f"{what} is {KEY_BYTES} bytes, not {value!r:.80}")


def _require_pairs(what: str, value: object, most: int) -> None:
    if not isinstance(value, tuple) or not all(isinstance(one, tuple) and len(one) == 2 for one in value):
        raise InvalidInput(f"{what} are pairs, not {value!r:.80}")
    if len(value) > most:
        raise InvalidInput(f"{what}: {len(value)} are more than {most}")
