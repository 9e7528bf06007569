"""Stores by what they are called in a configuration: tiers of a node, pools of a cluster, host memory for pages."""

import logging
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

from headwater.config.stores import DISK_BYTES, HOST_BYTES, CacheTiers, LocalStoreConfig, pool_kind
from headwater.core.errors import HostTierUnavailable, InvalidConfig, NotInstalled, StoreError
from headwater.metrics import Metrics
from headwater.storage.base import SYSTEM_CLOCK, Clock, Store
from headwater.storage.disabled import DisabledStore
from headwater.storage.local import LocalNames, LocalStore, MappedStore, directory
from headwater.storage.local.slab import Progress

if TYPE_CHECKING:
    from headwater.layout.spec import KVLayout
    from headwater.transfer.device.arena import HostCache

log = logging.getLogger("headwater")

POOL_TIER: Final = "pool"


def open_local(
    config: LocalStoreConfig,
    *,
    metrics: Metrics | None = None,
    clock: Clock = SYSTEM_CLOCK,
    progress: Progress | None = None,
    only_probes: bool = False,
) -> LocalStore:
    """Open the store of a directory, addressable where it lies in memory. Raises a StoreError that says what to do.

    `only_probes`: this process will ask what is there, and hardly anything else.
    """
    kind = LocalNames if only_probes else MappedStore if directory.is_memory(config.directory) else LocalStore
    return kind(config, metrics=metrics, clock=clock, progress=progress)


def open_tier(
    config: LocalStoreConfig,
    *,
    metrics: Metrics | None = None,
    clock: Clock = SYSTEM_CLOCK,
    progress: Progress | None = None,
    only_probes: bool = False,
) -> Store:
    """Open the store of a directory, or say in the log why not and go on without the tier."""
    try:
        return open_local(config, metrics=metrics, clock=clock, progress=progress, only_probes=only_probes)
    except StoreError as error:
        log.warning("tier disabled: %s", error)
        if metrics is not None:
            metrics.event("tier_disabled", directory=str(config.directory), reason=str(error))
        return DisabledStore(str(error))


def open_tiers(
    config: CacheTiers,
    stack: ExitStack,
    *,
    metrics: Metrics,
    progress: Progress | None,
    needs_pool: bool = False,
    only_probes: bool = False,
) -> dict[str, Store]:
    """The stores that can be had, fastest first, by name; the stack closes them.

    `needs_pool`: a pool that cannot be had is not left out, but raises InvalidConfig. `only_probes`: see `open_local`.
    """
    tiers: list[tuple[str, Path | None, int | None, int]] = [
        ("host", config.host_directory, config.host_bytes, HOST_BYTES),
        ("disk", config.disk_directory, config.disk_bytes, DISK_BYTES),
    ]
    stores: dict[str, Store] = {}
    for name, path, num_bytes, default in tiers:
        if path is None:
            continue
        if num_bytes is None and not directory.has_slab(path):
            num_bytes = default  # otherwise the directory's own limit
        store_config = LocalStoreConfig(directory=path, limit_bytes=num_bytes)
        store = stack.enter_context(
            open_tier(store_config, metrics=metrics, progress=progress, only_probes=only_probes)
        )
        if not isinstance(store, DisabledStore):
            stores[name] = store
    if config.pool is not None:
        try:
            stores[POOL_TIER] = stack.enter_context(open_pool(config.pool, metrics=metrics, progress=progress))
        except (StoreError, NotInstalled) as error:
            if needs_pool:
                raise InvalidConfig(f"a prefill or decode node is of no use without its pool: {error}") from error
            log.warning("tier disabled: %s", error)
            metrics.event("tier_disabled", tier="pool", reason=str(error))
    return stores


def open_pool(url: str, *, metrics: Metrics | None = None, progress: Progress | None = None) -> Store:
    """The store that is shared with others, by its address. Raises InvalidConfig, or what says what to do about it."""
    kind = pool_kind(url)
    if kind == "local":
        path = Path(url.partition(":")[2])
        new = not directory.has_slab(path)
        limit = LocalStoreConfig(directory=path, limit_bytes=DISK_BYTES if new else None)
        return open_local(limit, metrics=metrics, progress=progress)
    if kind == "redis":
        from headwater.storage.redis.store import RedisStore  # sockets and TLS, for who has a server

        return RedisStore(url)
    if kind == "mooncake":
        from headwater.storage.mooncake.store import MooncakeStore  # an extra

        return MooncakeStore(url)
    raise InvalidConfig(f"nobody opens pools of the kind {kind!r}: {url}")


def open_host_pages(page: "int | KVLayout", num_pages: int, *, metrics: Metrics | None = None) -> "HostCache | None":
    """Host memory for pages, or None, said in the log: then the tier is disabled, and the rest goes on."""
    from headwater.transfer.device.arena import create_host_cache  # torch takes a second to load; stores do without

    try:
        return create_host_cache(page, num_pages)
    except HostTierUnavailable as error:
        log.warning("tier disabled: %s", error)
        if metrics is not None:
            metrics.event("tier_disabled", reason=str(error))
        return None
