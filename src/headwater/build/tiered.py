"""A cache of all tiers that can be had, over the blocks of a device: what an engine of one's own begins with."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Final

from headwater.build.cache import open_cache
from headwater.build.stores import open_host_pages, open_tiers
from headwater.cache.cache import TieredCache
from headwater.config.cache import CacheConfig, TierConfig
from headwater.config.stores import CacheTiers
from headwater.core.errors import InvalidConfig
from headwater.core.identity import CacheIdentity
from headwater.layout.frame import frame_bytes
from headwater.metrics import Metrics
from headwater.storage.base import Store
from headwater.storage.local.slab import Progress

if TYPE_CHECKING:
    from headwater.transfer.device.arena import DeviceCache
    from headwater.transfer.executor.staging import TorchStaging

_PAGES: Final = 256  # of host memory through which blocks travel, at most, and
_BYTES: Final = 512 << 20  # but at least
_LEAST_PAGES: Final = 8
_DRAIN_S: Final = 5.0  # at the end, for blocks on their way to the stores


@contextmanager
def open_tiered_cache(
    device: "DeviceCache",
    tiers: CacheTiers,
    *,
    identity: CacheIdentity,
    metrics: Metrics | None = None,
    progress: Progress | None = None,
) -> Iterator[TieredCache]:
    """A cache over `device`, which stays the caller's, and outlives it.

    Blocks while stores are made. A tier that cannot be had is left out, with a sentence in the log. At the end blocks
    on their way to the stores get a few seconds to arrive. Raises InvalidConfig if the identity is of another layout.
    """
    layout = device.layout
    if (identity.layout, identity.block_tokens) != (layout.fingerprint, layout.block_tokens):
        raise InvalidConfig("the identity is of other blocks than the device's: make it with device.layout.fingerprint")
    metrics = metrics if metrics is not None else Metrics()
    with ExitStack() as stack:
        stores = open_tiers(tiers, stack, metrics=metrics, progress=progress)
        staging = open_staging(device, stores, stack, metrics=metrics)
        stores = stores if staging is not None else {}
        config = CacheConfig(
            num_slots=device.num_blocks,
            block_tokens=layout.block_tokens,
            block_bytes=layout.page_bytes,
            tiers=tuple(TierConfig(name=name) for name in stores),
        )
        cache = open_cache(config, stores, staging, layout=layout, identity=identity.digest, metrics=metrics)
        stack.enter_context(cache)
        stack.callback(cache.drain, _DRAIN_S)
        yield cache


def open_staging(
    device: "DeviceCache", stores: Mapping[str, Store], stack: ExitStack, *, metrics: Metrics
) -> "TorchStaging | None":
    """Host pages through which blocks travel. None without stores, or, said in the log, without memory for pages."""
    from headwater.transfer.executor.staging import TorchStaging  # torch takes a second to load; stores do without

    if not stores:
        return None
    page = frame_bytes(device.layout.plane_bytes)
    pages = open_host_pages(page, max(_LEAST_PAGES, min(_PAGES, _BYTES // page)), metrics=metrics)
    if pages is None:
        return None
    staging = stack.enter_context(TorchStaging(device, stack.enter_context(pages)))
    for store in stores.values():
        if (registering := store.registering()) is not None:
            registering.register(pages.memory)
    return staging
