"""What a group and the process of a rank say to each other: one JSON document after another, over a socket.

    group to rank    {"hello": true, "ask": N}        say who you are
                     {"do": [...], "member": 0}         instructions (`core/events.py`)
                     {"revive": STORE, "member": 0, "ask": N}
                     {"close": SECONDS, "ask": N}
    rank to group    {"answer": N, "is": ...}         to a question
                     {"said": {...}, "member": 0}       an event; "counted": counters that grew by then, by title

Each is a u32 of its length, little-endian, and the text. No pickle: what comes in can be anything, and is at worst
nonsense, which ends the link. Not here: who says what when (`ranks/link.py`, `ranks/server.py`).
"""

import json
import socket
import struct
from collections.abc import Iterator
from typing import Any, Final

from headwater.core.errors import InvalidInput

_LENGTH: Final = struct.Struct("<I")
_MOST_BYTES: Final = 256 << 20  # of one document: a job of a million blocks has less
_CHUNK_BYTES: Final = 1 << 16


def packed(document: dict[str, Any]) -> bytes:
    """A document as it goes over the wire."""
    text = json.dumps(document, separators=(",", ":")).encode()
    return _LENGTH.pack(len(text)) + text


class Incoming:
    """Documents out of what came in so far."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def read(self, sock: socket.socket) -> bool:
        """Wait for something to come, and take it in. False: the other end is closed. Raises OSError."""
        chunk = sock.recv(_CHUNK_BYTES)
        self._bytes += chunk
        return bool(chunk)

    def documents(self) -> Iterator[dict[str, Any]]:
        """Those that are complete. Raises InvalidInput for what is none."""
        while len(self._bytes) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes)
            if length > _MOST_BYTES:
                raise InvalidInput(f"a document of {length} bytes")
            end = _LENGTH.size + length
            if len(self._bytes) < end:
                return
            text = bytes(self._bytes[_LENGTH.size : end])
            del self._bytes[:end]
            try:
                document = json.loads(text)
            except ValueError as error:
                raise InvalidInput(f"not a document: {error}") from error
            if not isinstance(document, dict):
                raise InvalidInput(f"not a document: {text[:80]!r}")
            yield document
