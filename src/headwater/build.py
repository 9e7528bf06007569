"""The one place that names concrete classes and introduces rooms to each other."""

import logging
from typing import TYPE_CHECKING

from headwater.config import LocalStoreConfig
from headwater.core.errors import HostTierUnavailable, StoreError
from headwater.metrics import Metrics
from headwater.storage import directory
from headwater.storage.base import SYSTEM_CLOCK, Clock, Store
from headwater.storage.disabled import DisabledStore
from headwater.storage.local import LocalStore
from headwater.storage.mapped import MappedStore
from headwater.storage.slab import Progress

if TYPE_CHECKING:
    from headwater.layout.spec import KVLayout
    from headwater.transfer.arena import HostCache

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
            metrics.event("tier_disabled", directory=str(config.directory), reason=str(error))
        return DisabledStore(str(error))


def open_host_pages(page: "int | KVLayout", num_pages: int, *, metrics: Metrics | None = None) -> "HostCache | None":
    """Host memory for pages, or None, said in the log: then the tier is disabled, and the rest goes on."""
    from headwater.transfer.arena import create_host_cache  # torch takes a second to load; stores do without

    try:
        return create_host_cache(page, num_pages)
    except HostTierUnavailable as error:
        log.warning("tier disabled: %s", error)
        if metrics is not None:
            metrics.event("tier_disabled", reason=str(error))
        return None
