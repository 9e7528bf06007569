"""An answer in one piece, on its way to the client, with what its way took in its usage. Pure.

A router's loop has no time to take megabytes apart, and another thread would hold it up as much. A large answer stays
as it is, but for its usage: nodes write that at the end, so only the end is read.

Invariant: what is changed is the usage of the answer itself and nothing in it. In JSON, `"usage"` behind a comma or a
brace is a name and no part of a text; where all that follows makes up one object with the brace before it, that object
is the outermost one. Where no such place is found, the answer goes on as it came.
"""

import json
import re
from dataclasses import dataclass, field
from typing import Any, Final, Self

from headwater.router.routed_request import RoutedRequest, with_usage
from headwater.router.trouble import object_in

PARSED_BYTES: Final = 64 << 10  # an answer up to there is read as a whole; of a larger one, so much of the end

_NAME: Final = b'"usage"'
_BLANKS: Final = 16  # before it, at most
_CHOICES: Final = re.compile(rb'[{,]\s*"choices"\s*:\s*\[')


@dataclass(frozen=True, slots=True)
class WholeNodeAnswer:
    """A node's answer: bytes that stay as they are, and behind them the fields of what was read."""

    head: bytes
    end: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, body: bytes) -> Self | None:
        """An answer as it came; None: it is none."""
        if len(body) > PARSED_BYTES:
            return cls._read_large(body)
        document = object_in(body)
        return cls(b"{", document) if document is not None and isinstance(document.get("choices"), list) else None

    @classmethod
    def _read_large(cls, body: bytes) -> Self | None:
        if body[:1] != b"{" or body[-1:] != b"}" or _CHOICES.search(body, 0, PARSED_BYTES) is None:
            return None
        at = body.rfind(_NAME, len(body) - PARSED_BYTES)
        behind_name = at >= 0 and body[at - _BLANKS : at].rstrip()[-1:] in (b",", b"{")
        end = object_in(b"{" + body[at:]) if behind_name else None
        return cls(body) if end is None else cls(body[:at], end)

    def content(self, routed: RoutedRequest) -> bytes:
        """What the client gets."""
        if not self.end:
            return self.head
        with_usage(self.end, routed)
        return self.head + json.dumps(self.end, allow_nan=False, separators=(",", ":")).encode()[1:]
