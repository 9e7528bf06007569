"""Sessions: who comes back, and how soon. Gaps between the turns of one client's work, learned for each.

A session is an id that the client chose (never part of a key, and no boundary of anything). Its gap is the time from
the end of its last request to the next, in the geometric mean of the last few; what comes while another of its requests
is under way comes after none. A session of few gaps is taken for a usual one, as far as they are few. `spread` says how
far off such expectations were lately, for all sessions together: where gaps follow no pattern it is large, and a policy
is to believe little.

Bounded: the sessions used last are remembered, `limit` of them. Pure: time is what the holder says; not safe from
several threads. Not here: blocks. Where a session's path ended is the holder's (`tail`), and nobody looks into it here.
"""

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_TICK_S: Final = 0.25  # what comes sooner comes side by side with the last, or is that one again: no gap
_LATEST: Final = 0.3  # what a session's last gap weighs in its mean
_PRIOR: Final = 1.0  # the usual gap weighs as so many of a session's own
_USUAL: Final = 0.02  # what one gap weighs in the mean of all, and in their spread
_FEWEST: Final = 64
_MOST: Final = 1 << 16  # sessions that are remembered: some hundred bytes each
_SPREAD: Final = 2.0  # before anything was measured: nearly nothing is believed


@dataclass(slots=True)
class Session:
    """What is remembered of one session."""

    last_s: float  # the end of its last request, or its last beginning
    log_gap: float = 0.0
    num_gaps: int = 0
    num_open: int = 0  # requests under way
    tail: object = None  # the holder's own: where its last path ended


class Sessions:
    """The last `limit` sessions."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._sessions: OrderedDict[bytes, Session] = OrderedDict()
        self._num_gaps = 0
        self._log_gap = 0.0  # the usual one
        self._variance = _SPREAD**2

    @classmethod
    def of(cls, num_blocks: int) -> "Sessions":
        """For a holder that remembers so many blocks that are gone: as many sessions, within reason."""
        return cls(max(_FEWEST, min(num_blocks, _MOST)))

    def __len__(self) -> int:
        """How many are remembered."""
        return len(self._sessions)

    @property
    def spread(self) -> float:
        """The standard deviation of the logarithm of gaps over what was expected."""
        return math.sqrt(self._variance)

    @property
    def usual_s(self) -> float:
        """The gap of all sessions together, in the geometric mean; a second before anything was measured."""
        return math.exp(self._log_gap)

    def get(self, name: bytes) -> Session | None:
        """A session, if it is remembered. Counts as no turn."""
        return self._sessions.get(name)

    def turn(self, name: bytes, now_s: float) -> Session:
        """A session's next request comes. Mutates: the gap before it is learned. Every turn is to be `ended`."""
        session = self._sessions.get(name)
        if session is None:
            session = self._sessions[name] = Session(now_s, num_open=1)
            if len(self._sessions) > self.limit:
                self._sessions.popitem(last=False)
            return session
        self._sessions.move_to_end(name)
        gap_s, session.last_s = now_s - session.last_s, max(session.last_s, now_s)
        beside, session.num_open = session.num_open > 0, session.num_open + 1
        if beside or gap_s < _TICK_S:
            return session
        log_gap = math.log(gap_s)
        if self._num_gaps:
            error = log_gap - self._expected(session)
            self._variance += (error * error - self._variance) * max(_USUAL, 1 / (self._num_gaps + 4))
        self._num_gaps += 1
        self._log_gap += (log_gap - self._log_gap) * max(_USUAL, 1 / self._num_gaps)
        session.num_gaps += 1
        session.log_gap += (log_gap - session.log_gap) * max(_LATEST, 1 / session.num_gaps)
        return session

    def ended(self, name: bytes, now_s: float, *, tail: object) -> None:
        """A session's request is over. Sessions that were forgotten meanwhile are passed over."""
        session = self._sessions.get(name)
        if session is not None:
            session.num_open, session.last_s, session.tail = max(0, session.num_open - 1), now_s, tail

    def gap_s(self, name: bytes) -> float | None:
        """The gap that is expected after a session's last request; None: nothing is known, or not of this session."""
        session = self._sessions.get(name)
        return math.exp(self._expected(session)) if session is not None and self._num_gaps else None

    def tails(self) -> Iterator[tuple[bytes, object]]:
        """Where the last path of each session ended, if it did."""
        return ((name, one.tail) for name, one in self._sessions.items() if one.tail is not None)

    def facts(self) -> list[object]:
        """All that is remembered, for snapshots; of tails nothing, they are the holder's."""
        sessions = [
            [name.hex(), one.last_s, one.log_gap, one.num_gaps, one.num_open] for name, one in self._sessions.items()
        ]
        return [sessions, self._num_gaps, self._log_gap, self._variance]

    def _expected(self, session: Session) -> float:
        own = session.num_gaps
        return (own * session.log_gap + _PRIOR * self._log_gap) / (own + _PRIOR)
