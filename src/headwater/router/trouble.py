"""Why a node did not answer, and what follows from what it said. Values; nothing here waits or sends."""

import enum
import re
from collections.abc import Mapping
from typing import Any, Final

from headwater.core.errors import HeadwaterError
from headwater.disagg.events import read_json
from headwater.disagg.node_auth import NotProven
from headwater.disagg.outcome import NOT_FINITE

# What a decode node may say of the pages that a ticket names, where only another prefill helps; all else that goes
# wrong with its reading is its own, and another node may do better.
PREFILL_AGAIN: Final = frozenset({"missing", "damaged", "foreign", "expired", "unknown_version", "used"})
NO_ROOM: Final = (429, 503)
MAX_REASON: Final = 300
_CODE: Final = re.compile("[a-z_]{1,64}")


class Trouble(enum.StrEnum):
    """Why a node did not answer."""

    REFUSED = "refused"  # no room: ask another
    REJECTED = "rejected"  # the client's fault: it hears what the node said
    MISSING = "missing"  # the pool has not, or not whole, what the ticket names: prefill again
    NOT_FINITE = "not_finite"  # the model computed NaN: by this prompt, or on that node, which another will tell
    FAILED = "failed"  # the node said so, or said nonsense
    BROKEN = "broken"  # no connection, or it broke
    UNREACHED = "unreached"  # no connection in time: it may be gone, or have too much to do, or we have
    HUNG = "hung"  # not a word, not even about itself


class Unanswered(HeadwaterError):
    """A node did not answer. The message is for the client; `document` is the node's own, where that is to go on."""

    def __init__(
        self, trouble: Trouble, reason: str, *, status: int = 502, document: dict[str, Any] | None = None
    ) -> None:
        super().__init__(reason)
        self.trouble = trouble
        self.status = status
        self.document = document


def judge(node: str, status: int, document: Mapping[str, Any] | None) -> Unanswered:
    """What an answer that is not 200 means. Pure."""
    error = (document or {}).get("error")
    error = error if isinstance(error, dict) else {}
    said = error.get("message")
    reason = said[:MAX_REASON] if isinstance(said, str) and said else f"status {status}"
    about = f"{node}: {reason}"
    if status in NO_ROOM:
        return Unanswered(Trouble.REFUSED, about, status=503)
    unknown = status == 404 and error.get("code") == "model_not_found"
    if document is not None and error and (status in (400, 413, 422) or unknown):
        # Only the client hears the message, which may hold what it wrote: what is said here is shown to others.
        return Unanswered(Trouble.REJECTED, _code(error), status=status, document=dict(document))
    kind = (document or {}).get("kind")
    if status == 502 and isinstance(kind, str) and kind in PREFILL_AGAIN:
        at = (document or {}).get("first_missing_block")
        where = f" from block {at} on" if isinstance(at, int) else ""
        return Unanswered(Trouble.MISSING, f"{about} (what the ticket names is {kind}{where})")
    return Unanswered(Trouble.NOT_FINITE if error.get("code") == NOT_FINITE else Trouble.FAILED, about)


def object_in(data: bytes) -> dict[str, Any] | None:
    """The JSON object that a node sent; None: it is none."""
    try:
        found = read_json(data)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def too_large(limit_bytes: int) -> Unanswered:
    """What an answer means that is larger than a router holds, where its size was the client's choice."""
    message = f"the answer is larger than the {limit_bytes} bytes that a router holds: ask for less of it, or stream it"
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": "answer_too_large"}
    return Unanswered(Trouble.REJECTED, "answer_too_large", status=400, document={"error": error})


def untrusted(node: str, error: NotProven) -> Unanswered:
    """What an answer means that anybody may have given. Nothing of it counts, but that there is no room."""
    if error.status in NO_ROOM:
        return Unanswered(Trouble.REFUSED, f"{node}: status {error.status}", status=503)
    return Unanswered(Trouble.BROKEN, f"{node} is not trusted: {error}")


def no_connection(node: str, connect_s: float) -> Unanswered:
    """A node that could not be reached in time."""
    return Unanswered(Trouble.UNREACHED, f"there was no connection to {node} within {connect_s:g} s")


def _code(error: Mapping[str, Any]) -> str:
    """What is wrong, in a word of a node's own."""
    code = error.get("code")
    return code if isinstance(code, str) and _CODE.fullmatch(code) else "no code"


def words(error: Exception) -> str:
    """An error of a connection, in as many words as are shown."""
    return f"{type(error).__name__}: {error}"[:MAX_REASON]
