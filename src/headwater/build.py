"""The one place that names concrete classes and introduces rooms to each other."""

import logging

from headwater.config import LocalStoreConfig
from headwater.core.errors import StoreError
from headwater.metrics import Metrics
from headwater.storage import directory
from headwater.storage.base import SYSTEM_CLOCK, Clock, Store
from headwater.storage.disabled import DisabledStore
from headwater.storage.local import LocalStore
from headwater.storage.mapped import MappedStore
from headwater.storage.slab import Progress

log = logging.getLogger("headwater")


def open_local(
    config: LocalStoreConfig,
    *,
    metrics: Metrics | None = None,
    clock: Clock = SYSTEM_CLOCK,
    progress: Progress | None = None,
) -> LocalStore:
    """Open the store of a directory, addressable where it lies in memory. Raises a StoreError that says what to do."""
    directory.prepare(config.directory)
    kind = MappedStore if directory.is_memory(config.directory) else LocalStore
    return kind(config, metrics=metrics, clock=clock, progress=progress)


def open_tier(
    config: LocalStoreConfig,
    *,
    metrics: Metrics | None = None,
    clock: Clock = SYSTEM_CLOCK,
    progress: Progress | None = None,
) -> Store:
    """Open the store of a directory, or say in the log why not and go on without the tier."""
    try:
        return open_local(config, metrics=metrics, clock=clock, progress=progress)
    except StoreError as error:
        log.warning("tier disabled: %s", error)
        if metrics is not None:
            metrics.event("tier.disabled", directory=str(config.directory), reason=str(error))
        return DisabledStore(str(error))
