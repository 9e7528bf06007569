"""Whom a cache works with: who carries instructions out, and who writes down what it heard.

Interfaces only, and the executor of a cache that has no stores.
"""

from collections.abc import Sequence
from typing import Protocol

from headwater.cache.state import Brain
from headwater.core import events as ev
from headwater.core.errors import InvalidInput
from headwater.core.keys import BlockKey
from headwater.core.results import Status, TierPurge


class Executor(Protocol):
    """Who carries instructions out (`transfer/executor/worker.py`). Reports through the callback it was given."""

    def submit(self, instructions: Sequence[ev.Instruction]) -> None:
        """Begin jobs, or cancel them. Does not block."""
        ...

    def contains_cached(self, probe: ev.Probe) -> tuple[Status, ...] | None:
        """The answer to a Probe, if memory has it; None: the store has to be asked. Does not block."""
        ...

    def throttle_saves(self, *, on: bool) -> None:
        """Do what nobody waits for a little later, while the engine is in a hurry. Does not block."""
        ...

    def drain(self, timeout_s: float) -> bool:
        """Wait until no job is under way; False if that took too long."""
        ...

    def close(self, timeout_s: float) -> bool:
        """End all jobs and threads; False if one did not end in time. May be asked again."""
        ...

    def revive(self, store: str) -> bool:
        """Put a store right that was switched off; False if that did not work. Blocks."""
        ...

    def wait_layer(self, job: int, layer: int, timeout_s: float) -> bool:
        """Wait until a load has brought all planes up to a layer's. Blocks. False: too late, or it is over."""
        ...


class Purger(Protocol):
    """Who removes blocks from the stores because somebody wants them gone (`transfer/executor/purger.py`)."""

    def purge(
        self, order: ev.PurgeBegan, stores: Sequence[str], known: Sequence[BlockKey], timeout_s: float
    ) -> list[TierPurge]:
        """Remove them, behind what is being written; `known`: blocks among them that were on the device. Blocks.

        Says store by store what became of them. Raises nothing.
        """
        ...


class NoExecutor:
    """The executor of a cache without stores: nothing is to be done, and nothing is."""

    def submit(self, instructions: Sequence[ev.Instruction]) -> None:
        """Forget them."""

    def contains_cached(self, probe: ev.Probe) -> tuple[Status, ...] | None:
        """Nobody knows."""
        return None

    def throttle_saves(self, *, on: bool) -> None:
        """Nobody is in the way."""

    def drain(self, timeout_s: float) -> bool:
        """Nothing is under way."""
        return True

    def close(self, timeout_s: float) -> bool:
        """Nothing to end."""
        return True

    def revive(self, store: str) -> bool:
        """There is none."""
        raise InvalidInput(f"there is no store {store!r}")

    def wait_layer(self, job: int, layer: int, timeout_s: float) -> bool:
        """There is no load."""
        return False


class Recorder(Protocol):
    """Who writes down what a brain heard and said, so that it can be handled again (`storage/recording.py`).

    Called with the cache's lock held, in order. Must neither block nor raise.
    """

    def began(self, brain: Brain) -> None:
        """What follows is heard by this brain, which has heard nothing yet."""
        ...

    def heard(self, event: ev.Event, said: Sequence[ev.Instruction]) -> None:
        """It heard an event, and said this."""
        ...

    def refused(self, event: ev.Event) -> None:
        """It heard an event that made no sense, and changed nothing."""
        ...

    def failed(self, event: ev.Event, why: str) -> None:
        """It could not take an event in, and is not used any more."""
        ...

    def ended(self, digest: str) -> None:
        """The cache is closed; this is what its brain's state comes to."""
        ...


class SeveralRecorders:
    """Recorders that all hear the same."""

    def __init__(self, *recorders: Recorder) -> None:
        self._recorders = recorders

    def began(self, brain: Brain) -> None:
        """See `Recorder`."""
        for one in self._recorders:
            one.began(brain)

    def heard(self, event: ev.Event, said: Sequence[ev.Instruction]) -> None:
        """See `Recorder`."""
        for one in self._recorders:
            one.heard(event, said)

    def refused(self, event: ev.Event) -> None:
        """See `Recorder`."""
        for one in self._recorders:
            one.refused(event)

    def failed(self, event: ev.Event, why: str) -> None:
        """See `Recorder`."""
        for one in self._recorders:
            one.failed(event, why)

    def ended(self, digest: str) -> None:
        """See `Recorder`."""
        for one in self._recorders:
            one.ended(digest)


class MonotonicClock(Protocol):
    """Where time comes from."""

    def monotonic(self) -> float:
        """Seconds that never go back."""
        ...
