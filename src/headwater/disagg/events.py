"""Server-sent events out of chunks of bytes: each whole, checked to be one, and its bytes kept as they came. Pure."""

import json
import math
import re
from typing import Any, Final

from headwater.core.errors import HeadwaterError

MAX_EVENT_BYTES: Final = 4 << 20

_DATA: Final = b"data:"
_END: Final = re.compile(rb"\n\r?\n")  # of an event


class NotEvents(HeadwaterError):
    """These bytes are no stream of OpenAI's events."""


class EventReader:
    """Takes chunks, gives events."""

    def __init__(self, limit_bytes: int = MAX_EVENT_BYTES) -> None:
        self._rest = bytearray()
        self._limit_bytes = limit_bytes

    def feed(self, chunk: bytes) -> list[tuple[bytes, dict[str, Any]]]:
        """The events that are whole now, each with the object in it ({} for `[DONE]`). Raises NotEvents.

        Comments are left out: they say that somebody lives, and that was heard.
        """
        seen = len(self._rest)
        self._rest += chunk
        whole: list[bytes] = []
        if _END.search(self._rest, max(0, seen - 2)) is not None:  # or a large event in crumbs would be split each time
            *whole, rest = bytes(self._rest).replace(b"\r\n", b"\n").split(b"\n\n")
            self._rest = bytearray(rest)
        if len(self._rest) > self._limit_bytes:
            raise NotEvents(f"an event of more than {self._limit_bytes} bytes")
        return [(event + b"\n\n", _said(event)) for event in whole if event and not event.startswith(b":")]


def read_json(data: bytes) -> Any:
    """What a node sent, as JSON has it: no NaN, and no number that is none here. Raises ValueError, RecursionError.

    So what was read can always be written again.
    """
    return json.loads(data, parse_constant=_refuse, parse_float=_finite)


def event_of(document: dict[str, Any]) -> bytes:
    """An object as an event."""
    return _DATA + b" " + json.dumps(document, allow_nan=False, separators=(",", ":")).encode() + b"\n\n"


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number")


def _finite(text: str) -> float:
    found = float(text)
    if not math.isfinite(found):
        raise ValueError(f"{text[:40]} is too large")
    return found


def _said(event: bytes) -> dict[str, Any]:
    if not event.startswith(_DATA) or b"\n" in event:
        raise NotEvents(f"{event[:40]!r} is no data of one line")
    data = event[len(_DATA) :].strip()
    if data == b"[DONE]":
        return {}
    try:
        found = read_json(data)
    except (ValueError, RecursionError) as error:
        raise NotEvents(f"{data[:40]!r} is no JSON") from error
    if not isinstance(found, dict) or not (isinstance(found.get("choices"), list) or "error" in found):
        raise NotEvents(f"{data[:40]!r} is no part of an answer")
    return found
