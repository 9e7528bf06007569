"""How routers and nodes prove to each other that they hold the fleet's key, without ever sending it.

Both ends of it, as values and arithmetic: no sockets, no HTTP library. The one that is asked is an `Authenticator`, the
one that asks signs as a `Signer`. What is sent are headers:

    hello      GET /pd/hello      x-headwater-hello: NONCE.MAC
    request    any                x-headwater-auth: CHALLENGE.NONCE.DIGEST.MAC      DIGEST: SHA-256 of the body
    answer     to both            x-headwater-challenge: CHALLENGE     x-headwater-proof: MAC

A *challenge* is a random number of whoever is asked, new every minute. It is signed in every request, so that a request
is good for one process, for a few minutes by that process' own clock: nobody's wall clock has a say. Within that time
its *nonce* is remembered, so it is good once. The answer signs the request's nonce, its status, and who answers; it
brings the challenge for the next request. Who knows no challenge, or an old one, says hello first.

Signed are the method, the path with its query, and the body; of an answer its head. Nothing is encrypted: who can read
the network reads prompts and answers, and who can change it can change an answer's body. That is what TLS is for.

Invariants: nothing is admitted twice; memory is bounded by `max_nonces`, after which challenges change faster; MACs are
compared in constant time; no message holds a key or a MAC.
"""

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from headwater.core.errors import HeadwaterError
from headwater.core.node_key import NodeKey

HELLO_PATH: Final = "/pd/hello"
HELLO: Final = "x-headwater-hello"
AUTH: Final = "x-headwater-auth"
CHALLENGE: Final = "x-headwater-challenge"
PROOF: Final = "x-headwater-proof"

ROUTER: Final = "router"  # who a router is

_PURPOSE: Final = "nodes 1"
_ROUND_S: Final = 60.0  # that a challenge is given out; it counts for as long again
_MAX_NONCES: Final = 1 << 16  # in that time: then there is a new one
_NONCE: Final = "[0-9a-f]{32}"
_DIGEST: Final = "[0-9a-f]{64}"
_HELLO: Final = re.compile(rf"({_NONCE})\.({_DIGEST})")
_AUTH: Final = re.compile(rf"({_NONCE})\.({_NONCE})\.({_DIGEST})\.({_DIGEST})")


def node_called(name: str, url: str) -> str:
    """Who a node is: its name, and where routers find it."""
    return f"node {name} at {url}"


class NotAdmitted(HeadwaterError):
    """A request that is not of this fleet, or not of now. The message is for whoever asked."""


class NotProven(HeadwaterError):
    """An answer of somebody who has not proven to hold the fleet's key; anybody may have given that status."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that may come in."""

    nonce: str
    body_digest: str  # hex: what its body must have

    def fits(self, body_sha256: str) -> bool:
        """Whether this is its body."""
        return hmac.compare_digest(self.body_digest, body_sha256)


class Authenticator:
    """Whoever is asked. For one thread."""

    def __init__(
        self,
        key: NodeKey,
        who: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        max_nonces: int = _MAX_NONCES,
    ) -> None:
        """`who` is what answers say: ROUTER, or `node_called`."""
        self._key = key.derived(_PURPOSE)
        self._who = who
        self._clock = clock
        self._max_nonces = max_nonces
        self._seen: dict[str, set[str]] = {}  # by challenge, the older one first: nonces
        self._until_s = 0.0
        self._now()

    def _now(self) -> str:
        """The challenge that counts; a new one where its time is over, or its room."""
        now_s = self._clock()
        newest = next(reversed(self._seen), None)
        if newest is None or now_s >= self._until_s or len(self._seen[newest]) >= self._max_nonces:
            late = now_s >= self._until_s + _ROUND_S  # nobody came for long: not even the last one counts any more
            self._seen = {} if newest is None or late else {newest: self._seen[newest]}
            newest = secrets.token_hex(16)
            self._seen[newest] = set()
            self._until_s = now_s + _ROUND_S
        return newest

    def admit_hello(self, header: str | None) -> Admitted:
        """Let somebody in who wants to know whether we hold the key. Raises NotAdmitted."""
        found = _HELLO.fullmatch(header or "")
        if found is None or not hmac.compare_digest(_mac(self._key, "hello", found[1]), found[2]):
            raise NotAdmitted(_STRANGER)
        return Admitted(found[1], hashlib.sha256().hexdigest())

    def admit(self, header: str | None, *, method: str, target: str) -> Admitted:
        """Let a request in, once; its body has to be compared when it is there. Raises NotAdmitted."""
        found = _AUTH.fullmatch(header or "")
        if found is None:
            raise NotAdmitted(_STRANGER)
        challenge, nonce, digest, mac = found.groups()
        if not hmac.compare_digest(_request_mac(self._key, method, target, challenge, nonce, digest), mac):
            raise NotAdmitted(_STRANGER)
        self._now()
        seen = self._seen.get(challenge)
        if seen is None:
            raise NotAdmitted("this was signed for another process than this one, or too long ago: say hello again")
        if nonce in seen:
            raise NotAdmitted("this was said before, and counts once")
        seen.add(nonce)
        return Admitted(nonce, digest)

    def answer(self, admitted: Admitted, status: int) -> dict[str, str]:
        """The headers of an answer."""
        challenge = self._now()
        return {CHALLENGE: challenge, PROOF: _answer_mac(self._key, self._who, admitted.nonce, status, challenge)}


class Signer:
    """Whoever asks, of one other. For one thread."""

    def __init__(self, key: NodeKey, who: str) -> None:
        """`who` must answer: ROUTER, or `node_called`."""
        self.challenge: str | None = None  # of the last answer that was proven; None: say hello first
        self._key = key.derived(_PURPOSE)
        self._who = who

    def hello(self) -> tuple[str, str]:
        """A nonce, and the header of a hello."""
        nonce = secrets.token_hex(16)
        return nonce, f"{nonce}.{_mac(self._key, 'hello', nonce)}"

    def sign(self, *, method: str, target: str, body: bytes) -> tuple[str, str]:
        """A nonce, and the header of a request. There must be a challenge."""
        if self.challenge is None:
            raise NotProven(f"nobody has proven yet to be {self._who}")
        nonce, digest = secrets.token_hex(16), hashlib.sha256(body).hexdigest()
        mac = _request_mac(self._key, method, target, self.challenge, nonce, digest)
        return nonce, f"{self.challenge}.{nonce}.{digest}.{mac}"

    def check(self, nonce: str, status: int, headers: Mapping[str, str]) -> None:
        """Take in an answer to what was sent with `nonce`. Raises NotProven; then nobody has proven anything."""
        self.challenge = None
        challenge, proof = headers.get(CHALLENGE, ""), headers.get(PROOF, "")
        fine = re.fullmatch(_NONCE, challenge) and re.fullmatch(_DIGEST, proof)
        if not fine or not hmac.compare_digest(_answer_mac(self._key, self._who, nonce, status, challenge), proof):
            if status == 401:
                raise NotProven(
                    "it refuses our node key: routers and nodes need the same one (--node-key-file), and a client's "
                    "API key is none",
                    status,
                )
            raise NotProven(f"who answered with status {status} has not proven to be {self._who}", status)
        self.challenge = challenge


_STRANGER: Final = (
    "this is for routers and nodes that hold one node key (--node-key-file), and was not signed with it; a client's "
    "API key opens nothing here"
)


def _request_mac(key: bytes, method: str, target: str, challenge: str, nonce: str, digest: str) -> str:
    return _mac(key, "request", method, target, challenge, nonce, digest)


def _answer_mac(key: bytes, who: str, nonce: str, status: int, challenge: str) -> str:
    return _mac(key, "answer", who, nonce, str(status), challenge)


def _mac(key: bytes, *parts: str) -> str:
    """Over all parts, of which none can be taken for two."""
    said = b"".join(b"%d:%s," % (len(part), part) for part in (one.encode() for one in parts))
    return hmac.digest(key, said, hashlib.sha256).hex()
