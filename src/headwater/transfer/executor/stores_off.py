"""StoresOff: which stores of a worker turned themselves off, and why. Each is said once, and once when it is back.

Puts no store right and calls none: a store says itself that it is in trouble (`tier.py`), `Worker.revive` mends it.
"""

from collections.abc import Iterable

from headwater.core.events import StoreOff, StoreOn
from headwater.core.results import Reason
from headwater.storage.base import Clock
from headwater.transfer.executor.ledger import Ledger
from headwater.transfer.executor.tier import TierStore
from headwater.transfer.executor.trouble import JobTrouble


class StoresOff:
    """The stores that are not used. The ledger's lock guards every change."""

    def __init__(self, ledger: Ledger, *, clock: Clock) -> None:
        self._ledger = ledger
        self._clock = clock
        self._why: dict[str, str] = {}  # by store

    def __contains__(self, store: str) -> bool:
        """Whether a store is off. Takes no lock."""
        return store in self._why

    def notice(self, tiers: Iterable[TierStore]) -> None:
        """Say StoreOff, once, for stores that turned themselves off. Takes the lock."""
        for tier in tiers:
            with self._ledger.lock:
                trouble = tier.trouble  # asked with the lock held, so that it is not older than a revive()
                if trouble is not None and tier.name not in self._why:
                    self._why[tier.name] = trouble
                    self._ledger.say(StoreOff(now_s=self._clock.monotonic(), store=tier.name, why=trouble))

    def require_on(self, tiers: Iterable[TierStore]) -> None:
        """Raise JobTrouble if one of them is off. Takes no lock."""
        for tier in tiers:
            why = self._why.get(tier.name)
            if why is not None:
                raise JobTrouble(Reason.FAILED, f"{tier.name} is off: {why}")

    def put_right(self, store: str) -> None:
        """A store is right again: say StoreOn. The lock is held."""
        self._why.pop(store, None)
        self._ledger.say(StoreOn(now_s=self._clock.monotonic(), store=store))
