"""The one place that names concrete classes and introduces rooms to each other."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from headwater.cache.cache import NoHands, TieredCache
from headwater.cache.state import Brain
from headwater.config import (
    DISK_BYTES,
    HOST_BYTES,
    MEMORY_URL,
    CacheConfig,
    LocalStoreConfig,
    ResidencyConfig,
    ServeConfig,
    TierConfig,
    default_node,
    pool_kind,
)
from headwater.core.errors import HostTierUnavailable, InvalidConfig, InvalidInput, NotInstalled, StoreError
from headwater.core.events import Event
from headwater.layout.frame import frame_bytes
from headwater.layout.reshard import part_number
from headwater.layout.shard import parts
from headwater.metrics import Metrics
from headwater.residency.base import Residency
from headwater.residency.events import TIERS
from headwater.residency.holdings import WHOLE, StoreHoldings
from headwater.residency.memory import MemoryResidency
from headwater.residency.publisher import Publisher
from headwater.storage import directory
from headwater.storage.base import SYSTEM_CLOCK, Clock, Registering, Store
from headwater.storage.disabled import DisabledStore
from headwater.storage.local import LocalStore
from headwater.storage.mapped import MappedStore
from headwater.storage.resharded import SIZES, ReshardedStore
from headwater.storage.slab import Progress
from headwater.transfer.ranks import Ranks
from headwater.transfer.seats import Seat
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


def open_rank(
    rank: int,
    tp_size: int,
    stores: Mapping[str, Store],
    stagings: Sequence["Staging"],
    *,
    layout: "KVLayout",
    identity: bytes,
    views: Mapping[str, str] | None = None,
    sizes: Sequence[int] = SIZES,
    threads_per_store: int = 2,
    clock: Clock = SYSTEM_CLOCK,
    metrics: Metrics | None = None,
) -> list[Seat]:
    """The seats of one rank of a tensor-parallel group: a worker for each of its parts, in this process.

    `layout` is the unsharded one; `stagings` are those of `parts(layout, rank, tp_size)`, in this order. `views`, by
    name: what groups of other `sizes` wrote to one of the stores, as one more store that is only read. Raises
    InvalidInput with no worker started.
    """
    mine = parts(layout, rank, tp_size)
    if len(stagings) != len(mine):
        raise InvalidInput(f"rank {rank} of {tp_size} has {len(mine)} parts, and not {len(stagings)}")
    others = [size for size in sizes if size != tp_size]
    seats: list[Seat] = []
    try:
        for part, staging in zip(mine, stagings, strict=True):
            seen = {
                name: ReshardedStore(
                    stores[of], layout, part, identity=identity, sizes=others, metrics=metrics, clock=clock
                )
                for name, of in (views or {}).items()
            }
            number = part_number(part, layout)
            worker = Worker(
                {**stores, **seen},
                staging,
                layout=part.layout,
                identity=identity,
                block_tokens=layout.block_tokens,
                shard=part.shard,
                part=number,
                threads_per_store=threads_per_store,
                clock=clock,
                metrics=metrics,
            )
            seats.append(Seat(rank, part.shard, number, worker))
    except BaseException:
        for seat in seats:
            seat.hands.close(0.0)
        raise
    return seats


def open_group(
    config: CacheConfig,
    seats: Sequence[Seat],
    *,
    clock: Clock = SYSTEM_CLOCK,
    metrics: Metrics | None = None,
    record: Callable[[Event], None] | None = None,
) -> TieredCache:
    """A cache for an engine of several ranks: one brain, and the seats of all ranks as its hands.

    `config.block_bytes` are those of a block on all ranks together. Raises InvalidInput for seats that are no group.
    """
    metrics = metrics if metrics is not None else Metrics()
    ranks = Ranks(seats, stores=[tier.name for tier in config.tiers], clock=clock, metrics=metrics)
    cache = TieredCache(Brain(config), ranks, clock=clock, metrics=metrics, record=record)
    ranks.deliver = cache.deliver
    ranks.on_first_layer(cache.notice)
    return cache


def open_residency(config: ResidencyConfig, *, metrics: Metrics | None = None) -> Residency:
    """The index of who holds what. Connects when it is asked. Raises StoreUnavailable for no address, NotInstalled."""
    if config.url == MEMORY_URL:
        return MemoryResidency()
    from headwater.residency.redis import RedisResidency  # an extra

    return RedisResidency(config.url, prefix=config.prefix, keep_s=3 * config.round_every_s, metrics=metrics)


def open_publisher(
    cache: TieredCache,
    config: ResidencyConfig,
    stores: Mapping[str, Store],
    *,
    identity: bytes,
    pages: Sequence[tuple[int, int, int]] = WHOLE,
    residency: Residency | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> Publisher:
    """Tell the cluster what a cache holds. To be called before its first request; close it before the stores.

    `stores` are the cache's; those of this node (host, disk) are asked now and then what they hold. `pages`: shard,
    number of shards and part of each page that a block has. `residency`: an index that is there already; it is taken
    over. Raises InvalidConfig for tiers that the index has no name for.
    """
    strange = [name for name in stores if name not in TIERS]
    if strange:
        raise InvalidConfig(f"the residency index knows the tiers {', '.join(TIERS)}, not {', '.join(strange)}")
    tokens = cache.brain.config.block_tokens
    holdings = {
        name: StoreHoldings(stores[name], identity=identity, block_tokens=tokens, pages=pages, clock=clock)
        for name in ("host", "disk")
        if name in stores
    }
    index = residency if residency is not None else open_residency(config, metrics=cache.metrics)
    publisher = Publisher(index, config, holdings=holdings, clock=clock, metrics=cache.metrics)
    try:
        cache.announce(publisher)
    except BaseException:
        publisher.close()
        raise
    return publisher


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
                for store in stores.values():
                    if isinstance(store, Registering):
                        store.register(pages.memory)
        cache_config = CacheConfig(
            num_slots=planes.num_blocks,
            block_tokens=layout.block_tokens,
            block_bytes=layout.page_bytes,
            tiers=tuple(TierConfig(name=name) for name in stores),
        )
        cache = stack.enter_context(
            open_cache(cache_config, stores, staging, layout=layout, identity=model.identity.digest, metrics=metrics)
        )
        if config.residency is not None:
            told = ResidencyConfig(url=config.residency, node=config.node or default_node())
            publisher = open_publisher(cache, told, stores, identity=model.identity.digest)
            stack.callback(publisher.close)
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
    if config.pool is not None:
        try:
            stores["pool"] = stack.enter_context(open_pool(config.pool, metrics=metrics, progress=progress))
        except (StoreError, NotInstalled) as error:
            log.warning("tier disabled: %s", error)
            metrics.event("tier_disabled", tier="pool", reason=str(error))
    return stores


def open_pool(url: str, *, metrics: Metrics | None = None, progress: Progress | None = None) -> Store:
    """The store that is shared with others, by its address. Raises InvalidConfig, or what says what to do about it."""
    kind = pool_kind(url)
    if kind == "local":
        path = Path(url.partition(":")[2])
        new = not (path / directory.SLAB).exists()
        limit = LocalStoreConfig(directory=path, limit_bytes=DISK_BYTES if new else None)
        return open_local(limit, metrics=metrics, progress=progress)
    if kind == "redis":
        from headwater.storage.redis import RedisStore  # an extra

        return RedisStore(url)
    from headwater.storage.mooncake import MooncakeStore  # an extra

    return MooncakeStore(url)
