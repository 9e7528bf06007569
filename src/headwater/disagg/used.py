"""Which tickets a decode node has answered: each is good for one answer, as long as it lives. Pure; told the time.

An attempt that fails before anything is known of its answer gives its ticket back: the router may try it again, here
too. What is remembered is a ticket's nonce, until it expires, so there is an end to it; when MAX_USED are remembered,
no more are taken for a while. A process that is started again has forgotten them.
"""

import enum
from typing import Final

MAX_USED: Final = 1 << 17

_SWEEP: Final = 1024  # the least to look through for those that are over


class TicketUse(enum.Enum):
    """Whether a ticket may be used."""

    FIRST = enum.auto()  # it is, from now on
    AGAIN = enum.auto()  # it was before
    NO_ROOM = enum.auto()  # too many are to be remembered


class UsedTickets:
    """Tickets in use, and those that were used. For one thread."""

    def __init__(self, max_used: int = MAX_USED) -> None:
        self._max_used = max_used
        self._expiry_ms: dict[bytes, int] = {}  # by nonce
        self._sweep_at = min(_SWEEP, max_used)  # so many, and those that are over are thrown out

    def take(self, nonce: bytes, *, expires_at_ms: int, now_ms: float) -> TicketUse:
        """Use a ticket."""
        if nonce in self._expiry_ms:
            return TicketUse.AGAIN
        if len(self._expiry_ms) >= self._sweep_at:
            self._expiry_ms = {one: expiry_ms for one, expiry_ms in self._expiry_ms.items() if expiry_ms > now_ms}
            self._sweep_at = min(self._max_used, max(_SWEEP, 2 * len(self._expiry_ms)))
            if len(self._expiry_ms) >= self._max_used:
                return TicketUse.NO_ROOM
        self._expiry_ms[nonce] = expires_at_ms
        return TicketUse.FIRST

    def give_back(self, nonce: bytes) -> None:
        """It came to nothing: it may be used again."""
        self._expiry_ms.pop(nonce, None)
