"""All connections of a server: how many there are, who has waited too long, and who has to go when there are too many.

When the last place is taken, a newcomer is not sent away. A connection goes whose request was answered before all of it
was here, then the one whose request has been on its way for longest, then the one that has been idle for longest. A
client that means it sends its request within milliseconds, so those that are in the way are in the way of nobody else;
were newcomers refused instead, a thousand silent connections would lock everybody out. Only where all connections have
whole requests is a newcomer told to come back (503).

Not here: HTTP, and what a connection does when it is late or has to go (`connection.py`).

Invariants: every connection is looked at when its time is over, `_LOOK_S` later at most; no more than `max_connections`
and `_MORE` are open, and of the latter each hears 503 and is closed. What clients do is counted, and told in one line
every `_TELL_S` at most.
"""

import asyncio
import enum
import errno
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from headwater.metrics import Metrics
from headwater.serve.limits import Limits

log = logging.getLogger("headwater")

_LOOK_S: Final = 0.25
_TELL_S: Final = 10.0
_MORE: Final = 64  # connections beyond the limit, to be told so
_NUM_FREED: Final = 16  # connections to close where the process has no descriptor left,
_FREE_S: Final = 1.0  # once in so long: then it is tried again


class ConnectionPhase(enum.Enum):
    """What a connection is at."""

    ARRIVING = "arriving"  # its first request is awaited, or a request comes
    ANSWERING = "answering"  # a whole request is here
    LINGERING = "lingering"  # it was answered before all of it was here; the rest is thrown away
    IDLE = "idle"  # between two requests
    CLOSING = "closing"


class Cut(enum.StrEnum):
    """Why a connection was ended by us."""

    SILENT = "silent"  # no request, or no other one
    SLOW = "slow"  # a head, or what was left of a body
    LATE = "late"  # a request was not over by its deadline
    UNREAD = "unread"  # an answer
    CROWDED = "crowded"  # others wanted to come in
    MALFORMED = "malformed"  # it was not HTTP


@dataclass(frozen=True, slots=True)
class Admission:
    """What the door knows of a request, on the event loop's clock."""

    began_s: float  # its first byte
    timeout_s: float | None  # that it has from then on; None: its client said something that is no time
    turned_away: bool = False  # there are too many connections


class Guest(Protocol):
    """A connection, as seen from here."""

    @property
    def phase(self) -> ConnectionPhase:
        """What it is at."""

    @property
    def num_unread_bytes(self) -> int:
        """Of answers that its client has not taken."""

    def look(self, now_s: float) -> float:
        """End it, if it has waited too long. When to look again, if nothing changes until then."""

    def leave(self, why: Cut) -> None:
        """End it now, with a word if one can be said."""


class Connections:
    """The connections of one server. For one event loop."""

    def __init__(self, limits: Limits, metrics: Metrics) -> None:
        self.limits = limits
        self.metrics = metrics
        self._phases: dict[Guest, ConnectionPhase] = {}  # all that are open, and
        self._looks_s: dict[Guest, float] = {}  # when to look at them
        self._lingering: dict[Guest, None] = {}  # the longest first
        self._arriving: dict[Guest, None] = {}  # the longest first
        self._idle: dict[Guest, None] = {}  # the longest first
        self._unread: dict[Guest, None] = {}  # whose answers lie here: the longest first
        self._timer: asyncio.TimerHandle | None = None
        self._cuts: Counter[str] = Counter()  # since they were told
        self._told_s = self._freed_s = float("-inf")

    def __len__(self) -> int:
        return len(self._phases)

    # --- coming and going ---------------------------------------------------------------------------------------------

    def enter(self, guest: Guest) -> bool:
        """Let a connection in, at another's cost if need be. Whether it may ask something."""
        welcome = len(self._phases) < self.limits.max_connections or self._make_room()
        if not welcome and len(self._phases) >= self.limits.max_connections + _MORE:
            guest.leave(Cut.CROWDED)
            return False
        self._phases[guest] = ConnectionPhase.ARRIVING
        self._looks_s[guest] = 0.0
        self._arriving[guest] = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_S, self._look)
        return welcome

    def moved(self, guest: Guest) -> None:
        """Note what a connection is at now."""
        before, now = self._phases.get(guest), guest.phase
        if before is None or before is now:
            return
        self._phases[guest] = now
        self._looks_s[guest] = 0.0
        for phase, line in (
            (ConnectionPhase.LINGERING, self._lingering),
            (ConnectionPhase.ARRIVING, self._arriving),
            (ConnectionPhase.IDLE, self._idle),
        ):
            if now is phase:
                line[guest] = None
            else:
                line.pop(guest, None)

    def changed(self, guest: Guest) -> None:
        """It waits for something else, or for less long, than when it was looked at."""
        if guest in self._looks_s:
            self._looks_s[guest] = 0.0

    def left(self, guest: Guest) -> None:
        """A connection is closed, or as good as. Idempotent."""
        for line in (self._phases, self._looks_s, self._lingering, self._arriving, self._idle, self._unread):
            line.pop(guest, None)

    def cut(self, why: Cut) -> None:
        """Count a connection that we ended."""
        self.metrics.count("connections_cut_total", why=why)
        self._cuts[why] += 1

    def _make_room(self) -> bool:
        lines = (self._lingering, self._arriving, self._idle)
        guest = next((guest for line in lines for guest in line), None)
        if guest is None:
            return False
        self.left(guest)
        guest.leave(Cut.CROWDED)
        return True

    # --- answers that nobody reads ------------------------------------------------------------------------------------

    def unread(self, guest: Guest) -> None:
        """A client does not take its answer as fast as it is made. Those that let most lie for longest have to go."""
        self._unread[guest] = None
        self.changed(guest)
        while len(self._unread) > 1 and sum(one.num_unread_bytes for one in self._unread) > self.limits.unread_bytes:
            longest = next(iter(self._unread))
            self.left(longest)
            longest.leave(Cut.UNREAD)

    def read(self, guest: Guest) -> None:
        """It has taken most of it."""
        self._unread.pop(guest, None)

    # --- time ---------------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(_LOOK_S, self._look) if self._phases else None  # first: whatever happens below
        now_s = loop.time()
        for guest in [guest for guest, look_s in self._looks_s.items() if look_s <= now_s]:
            look_s = guest.look(now_s)
            if guest in self._looks_s:
                self._looks_s[guest] = look_s
        self.metrics.gauge("connections", len(self._phases))
        self._tell(now_s)

    def _tell(self, now_s: float) -> None:
        if self._cuts and now_s - self._told_s >= _TELL_S:
            told = ", ".join(f"{number} {why}" for why, number in sorted(self._cuts.items()))
            log.warning("connections were closed: %s; %d are open", told, len(self._phases))
            self._told_s = now_s
            self._cuts.clear()

    def on_trouble(self, loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
        """The loop's handler of exceptions: without descriptors, close some connections; else as ever."""
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)):
            loop.default_exception_handler(dict(context))
            return
        if loop.time() >= self._freed_s + _FREE_S:  # it comes once for each that waits at the door
            self._freed_s = loop.time()
            self.metrics.event("out_of_descriptors", open=len(self._phases))
            for _ in range(_NUM_FREED):
                self._make_room()
