"""What the jobs of an executor are done with. Values and references: nothing here decides or waits."""

from collections.abc import Mapping
from dataclasses import dataclass

from headwater.metrics import Metrics
from headwater.storage.base import Clock
from headwater.transfer.executor.ledger import Ledger
from headwater.transfer.executor.pages import PagePool
from headwater.transfer.executor.save_throttle import SaveThrottle
from headwater.transfer.executor.staging import Staging
from headwater.transfer.executor.tier import Naming, TierStore


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTools:
    """The stores, the pages, the books, and how much goes at a time."""

    tiers: Mapping[str, TierStore]
    staging: Staging
    pool: PagePool
    ledger: Ledger
    naming: Naming
    throttle: SaveThrottle
    clock: Clock
    metrics: Metrics
    slice_pages: int  # that go together through staging, at most
    in_place_pages: int  # the same, straight into a store's memory
    overlaps: bool  # whether a store is called for one slice while the device is at another
    grace_s: float  # after a job's deadline

    def moved(self, tier: str, direction: str, num_pages: int) -> int:
        """Count pages that went "in" to a tier or came "out" of it; how many bytes that is."""
        num_bytes = num_pages * self.naming.frame_bytes
        self.metrics.count("moved_bytes_total", num_bytes, tier=tier, direction=direction)
        return num_bytes
