"""A circuit breaker: a store that keeps failing is left alone, and tried again with one call at a time.

Pure: told what happened and when. It does not run calls and does not judge bytes. The brain has one per tier and kind
of call (`cache/placement.py`), who uses an executor without a brain one per store (`transfer/executor/caller.py`).

    CLOSED    --failures in a row-->  OPEN
    OPEN      --pause is over, somebody asks-->  HALF_OPEN (that one may try)
    HALF_OPEN --success-->  CLOSED          --failure-->  OPEN, for twice as long, up to four seconds
              --no proof-->  OPEN, for as long again, or due at once
    any       --off-->  OFF                 --on-->  CLOSED
"""

import enum
from typing import Final

MAX_PAUSE_S: Final = 4.0  # so that a store that is back is in use again within five seconds


class BreakerState(enum.IntEnum):
    """Whether calls pass."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2
    OFF = 3


class Breaker:
    """The breaker of one store, or of one kind of its calls: what can be asked may still not be read, or written."""

    def __init__(self, *, failures: int, pause_s: float, max_pause_s: float = MAX_PAUSE_S) -> None:
        self.state = BreakerState.CLOSED
        self._allowed = failures
        self._first_pause_s = pause_s
        self._max_pause_s = max(pause_s, max_pause_s)
        self._pause_s = pause_s
        self._num_failed = 0
        self._until_s = 0.0

    def would_allow(self, now_s: float) -> bool:
        """Whether a call might be made now. Changes nothing."""
        return self.state is BreakerState.CLOSED or (self.state is BreakerState.OPEN and now_s >= self._until_s)

    def allows(self, now_s: float) -> bool:
        """Whether a call may be made now. After a pause, yes to one: it is the probe, and must be made and reported."""
        if not self.would_allow(now_s):
            return False
        if self.state is BreakerState.OPEN:
            self.state = BreakerState.HALF_OPEN
        return True

    def succeeded(self) -> bool:
        """A call went well. True if that closed the breaker; one that began before it opened does not close it."""
        if self.state is BreakerState.CLOSED:
            self._num_failed = 0
        if self.state is not BreakerState.HALF_OPEN:
            return False
        self.on()
        return True

    def failed(self, now_s: float) -> bool:
        """A call failed. True if that opened the breaker."""
        self._num_failed += 1
        if self.state is BreakerState.HALF_OPEN:
            self._pause_s = min(2 * self._pause_s, self._max_pause_s)
        elif self.state is not BreakerState.CLOSED or self._num_failed < self._allowed:
            return False
        self.state = BreakerState.OPEN
        self._until_s = now_s + self._pause_s
        return True

    def unproven(self, now_s: float) -> None:
        """A call ended without saying anything about the store. If it was the probe, the next is due after a pause."""
        if self.state is BreakerState.HALF_OPEN:
            self.state = BreakerState.OPEN
            self._until_s = now_s + self._pause_s

    def undecided(self, now_s: float) -> None:
        """A probe came back in time and proved nothing: a `contains` that found nothing. The next may be made now."""
        if self.state is BreakerState.HALF_OPEN:
            self.state = BreakerState.OPEN
            self._until_s = now_s

    def off(self) -> None:
        """Make no call until `on`."""
        self.state = BreakerState.OFF

    def on(self) -> None:
        """Call again."""
        self.state = BreakerState.CLOSED
        self._num_failed = 0
        self._pause_s = self._first_pause_s

    def facts(self) -> tuple[int, int, float, float]:
        """All that it knows, for snapshots."""
        return int(self.state), self._num_failed, self._pause_s, self._until_s
