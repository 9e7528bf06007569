"""The key of a fleet: what its routers and nodes have in common, and nobody else. A value; it is never sent anywhere.

What is sent are HMACs with keys derived from it, one for each purpose, so that what was made for one of them proves
nothing for another. Not here: where a key comes from (`disagg/key_file.py`), what is signed (`disagg/node_auth.py`,
`disagg/protocol.py`).
"""

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass, field
from typing import Final, Self

from headwater.core.errors import InvalidConfig

MIN_KEY_CHARS: Final = 16
MAX_KEY_CHARS: Final = 1024
_MIN_DIFFERENT: Final = 5  # characters: fewer are not random


@dataclass(frozen=True, slots=True)
class NodeKey:
    """A fleet's key. Shows itself nowhere. Raises InvalidConfig for what is none."""

    text: str = field(repr=False)
    own: bool = False  # nobody chose it: this machine made it, for one user. It is good on loopback only

    def __post_init__(self) -> None:
        """Refuse what could be guessed, or does not survive a file or a variable."""
        text: object = self.text
        if not (isinstance(text, str) and re.fullmatch(f"[!-~]{{{MIN_KEY_CHARS},{MAX_KEY_CHARS}}}", text)):
            raise InvalidConfig(
                f"a node key is printable ASCII without spaces, {MIN_KEY_CHARS} to {MAX_KEY_CHARS} characters: make "
                "one with `openssl rand -hex 32`"
            )
        if len(set(text)) < _MIN_DIFFERENT or text in (text + text)[1:-1]:
            raise InvalidConfig(
                "this node key could be guessed: it repeats itself. Make one with `openssl rand -hex 32`"
            )

    @classmethod
    def random(cls, *, own: bool = False) -> Self:
        """A new one."""
        return cls(secrets.token_hex(32), own)

    def derived(self, purpose: str) -> bytes:
        """A key for one purpose."""
        return hmac.digest(self.text.encode(), b"headwater key 1\n" + purpose.encode(), hashlib.sha256)
