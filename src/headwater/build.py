"""The one place that names concrete classes and introduces rooms to each other."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from headwater.cache.cache import NoHands, TieredCache
from headwater.cache.state import Brain
from headwater.config import DISK_BYTES, HOST_BYTES, CacheConfig, LocalStoreConfig, ServeConfig, TierConfig
from headwater.core.errors import HostTierUnavailable, InvalidConfig, StoreError
from headwater.core.events import Event
from headwater.layout.frame import frame_bytes
from headwater.metrics import Metrics
from headwater.storage import directory
from headwater.storage.base import SYSTEM_CLOCK, Clock, Store
from headwater.storage.disabled import DisabledStore
from headwater.storage.local import LocalStore
from headwater.storage.mapped import MappedStore
from headwater.storage.slab import Progress
from headwater.transfer.worker import Worker

if TYPE_CHECKING:
    from headwater.engine.engine import Engine
    from headwater.engine.models.base import Model
    from headwater.engine.tokenizer import Tokenizer
    from headwater.layout.spec import KVLayout
    from headwater.transfer.arena import HostCache
    from headwater.transfer.staging import Staging

log = logging.getLogger("headwater")

_STAGING_PAGES: Final = 256  # at most, and
_STAGING_BYTES: Final = 256 << 20  # of host memory through which blocks travel, but at least
_LEAST_STAGING: Final = 8
_CPU_BYTES: Final = 1 << 30  # of KV on a CPU, where nobody said how many
_GPU_SHARE: Final = 0.85  # of a GPU's free memory, the same
_DRAIN_S: Final = 5.0  # at the end, for blocks on their way to the stores


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


def open_cache(
    config: CacheConfig,
    stores: Mapping[str, Store],
    staging: "Staging | None",
    *,
    layout: "KVLayout",
    identity: bytes,
    clock: Clock = SYSTEM_CLOCK,
    metrics: Metrics | None = None,
    record: Callable[[Event], None] | None = None,
) -> TieredCache:
    """A cache for one engine: the brain, and threads that move its blocks between `staging`'s device and the stores.

    `stores` are those of `config.tiers`, by name; they stay the caller's, and outlive the cache. Without any, `staging`
    may be None. `identity` is the digest of the CacheIdentity. Raises InvalidConfig if tiers and stores do not fit.
    """
    names = [tier.name for tier in config.tiers]
    if sorted(names) != sorted(stores):
        raise InvalidConfig(f"the tiers are {names}, the stores {sorted(stores)}: each tier needs its store")
    metrics = metrics if metrics is not None else Metrics()
    brain = Brain(config)
    if not stores:
        return TieredCache(brain, NoHands(), clock=clock, metrics=metrics, record=record)
    if staging is None:
        raise InvalidConfig("stores need staging: host pages through which blocks travel")
    block_tokens = config.block_tokens
    worker = Worker(
        stores, staging, layout=layout, identity=identity, block_tokens=block_tokens, clock=clock, metrics=metrics
    )
    cache = TieredCache(brain, worker, clock=clock, metrics=metrics, record=record)
    worker.deliver = cache.deliver
    worker.on_first_layer(cache.notice)
    return cache


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


@dataclass(frozen=True, slots=True)
class Running:
    """An engine at work with all that belongs to it."""

    name: str
    engine: "Engine"
    tokenizer: "Tokenizer"
    cache: TieredCache
    metrics: Metrics


@contextmanager
def open_engine(
    config: ServeConfig,
    *,
    model: "Model | None" = None,
    metrics: Metrics | None = None,
    progress: Progress | None = None,
) -> Iterator[Running]:
    """Load the model and start an engine on a cache of all tiers that can be had; close everything at the end.

    `model`: one that was loaded before, as `config` says; it stays the caller's. Blocks while weights are read and
    stores are made. A tier that cannot be had is left out, with a sentence in the log. At the end requests are
    cancelled, and blocks on their way to the stores get a few seconds to arrive.
    """
    from headwater.engine.connector import Connector  # torch takes a second to load; stores do without
    from headwater.engine.engine import Engine, EngineConfig
    from headwater.engine.loader import load_model, load_tokenizer
    from headwater.transfer.arena import create_kv_cache
    from headwater.transfer.staging import TorchStaging

    metrics = metrics if metrics is not None else Metrics()
    tokenizer = load_tokenizer(config.model)
    if model is None:
        model = load_model(
            config.model, device=config.device, dtype=config.dtype, kv=config.kv, block_tokens=config.block_tokens
        )
    layout = model.layout
    with ExitStack() as stack:
        planes = stack.enter_context(create_kv_cache(layout, _num_blocks(config, model), model.device))
        stores = _open_tiers(config, stack, metrics=metrics, progress=progress)
        staging = None
        if stores:
            page = frame_bytes(layout.plane_bytes)
            num_pages = max(_LEAST_STAGING, min(_STAGING_PAGES, _STAGING_BYTES // page))
            pages = open_host_pages(page, num_pages, metrics=metrics)
            if pages is None:
                stores = {}
            else:
                staging = stack.enter_context(TorchStaging(planes, stack.enter_context(pages)))
        cache_config = CacheConfig(
            num_slots=planes.num_blocks,
            block_tokens=layout.block_tokens,
            block_bytes=layout.page_bytes,
            tiers=tuple(TierConfig(name=name) for name in stores),
        )
        cache = stack.enter_context(
            open_cache(cache_config, stores, staging, layout=layout, identity=model.identity.digest, metrics=metrics)
        )
        stack.callback(cache.drain, _DRAIN_S)
        limits = EngineConfig(
            max_running=config.max_running, max_waiting=config.max_waiting, step_tokens=config.step_tokens
        )
        engine = stack.enter_context(Engine(model, planes, Connector(cache, model.identity), limits))
        yield Running(config.name or model.name, engine, tokenizer, cache, metrics)


def _num_blocks(config: ServeConfig, model: "Model") -> int:
    if config.num_blocks is not None:
        return config.num_blocks
    num_bytes = config.device_bytes
    if num_bytes is None and model.device.type == "cuda":
        import torch

        num_bytes = int(torch.cuda.mem_get_info(model.device)[0] * _GPU_SHARE)
    elif num_bytes is None:
        num_bytes = min(_CPU_BYTES, directory.available_memory() // 4)
    num_blocks = num_bytes // model.layout.page_bytes
    if num_blocks < 1:
        raise InvalidConfig(f"{num_bytes} bytes hold no block of {model.layout.page_bytes} bytes")
    return num_blocks


def _open_tiers(
    config: ServeConfig, stack: ExitStack, *, metrics: Metrics, progress: Progress | None
) -> dict[str, Store]:
    """The stores that can be had, fastest first, by name; the stack closes them."""
    tiers: list[tuple[str, Path | None, int | None, int]] = [
        ("host", config.host_directory, config.host_bytes, HOST_BYTES),
        ("disk", config.disk_directory, config.disk_bytes, DISK_BYTES),
    ]
    stores: dict[str, Store] = {}
    for name, path, num_bytes, default in tiers:
        if path is None:
            continue
        if num_bytes is None and not (path / directory.SLAB).exists():
            num_bytes = default  # otherwise the directory's own limit
        store_config = LocalStoreConfig(directory=path, limit_bytes=num_bytes)
        store = stack.enter_context(open_tier(store_config, metrics=metrics, progress=progress))
        if not isinstance(store, DisabledStore):
            stores[name] = store
    return stores
