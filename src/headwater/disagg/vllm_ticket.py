"""The ticket of a vLLM node: that the pool has a prompt's whole blocks, told by one node to another. Values only.

It names no pages: vLLM's connector finds them by the prompt, which comes with the request. So it says of which request
it is, as the client's body, and that is compared. Sealed and used like every ticket (`protocol.py`, `used.py`).
"""

import hashlib
import hmac
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final, Self

from headwater.core.errors import InvalidInput
from headwater.core.node_key import NodeKey
from headwater.disagg.protocol import mac_of

_FORMAT: Final = 2
_MARK: Final = "vllm"  # of the field that says the format


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmTicket:
    """A prompt's blocks in the pool. Raises InvalidInput for what is none."""

    model: str
    identity: str  # hex: of the cache
    body: str  # hex: `body_digest` of what the client asks
    num_prompt_tokens: int
    nonce: str  # hex: what makes it one of its own
    expires_at_ms: int  # wall clock
    mac: str = ""

    def __post_init__(self) -> None:
        """Check every field."""
        for one in fields(self):
            value: object = getattr(self, one.name)
            kind = int if one.name in ("num_prompt_tokens", "expires_at_ms") else str
            if type(value) is not kind or (kind is int and not 0 < value < 1 << 63):  # type: ignore[operator]
                raise InvalidInput(f"a ticket's {one.name} cannot be {value!r:.80}")
        if not re.fullmatch("[0-9a-f]{64}", self.nonce) or not re.fullmatch("|[0-9a-f]{64}", self.mac):
            raise InvalidInput("a ticket's nonce and MAC are 64 digits in hex")

    @classmethod
    def read(cls, document: object) -> Self:
        """A ticket as it came. Raises InvalidInput."""
        names = {_MARK, *(one.name for one in fields(cls))}
        if not isinstance(document, Mapping) or document.get(_MARK) != _FORMAT or document.keys() != names:
            raise InvalidInput(f"no ticket of a vLLM node, of format {_FORMAT}: are all nodes of the same version?")
        return cls(**{name: value for name, value in document.items() if name != _MARK})

    def document(self) -> dict[str, Any]:
        """Its JSON."""
        return {_MARK: _FORMAT, **asdict(self)}

    def sealed(self, key: NodeKey) -> Self:
        """The same, with its MAC."""
        return replace(self, mac=mac_of(self.document(), key))

    def refusal(self, key: NodeKey, *, model: str, identity: str, body: str, now_ms: float) -> str | None:
        """Why a node cannot use it, as a sentence; None: it can. Pure."""
        if not hmac.compare_digest(mac_of(self.document(), key), self.mac):
            return "the ticket is not sealed with this node's key: start all nodes with the same one"
        if (self.model, self.identity) != (model, identity):
            return (
                "the ticket is of another model or cache identity: start both vLLM servers with the same model, dtype, "
                "block size and version"
            )
        if self.body != body:
            return "the ticket is of another request"
        late_s = (now_ms - self.expires_at_ms) / 1000
        return None if late_s < 0 else f"the ticket expired {late_s:.1f} s ago: prefill again (or mend the clocks)"


def body_digest(body: Mapping[str, Any]) -> str:
    """What a client's body is known by, whoever wrote it down."""
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
