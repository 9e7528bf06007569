"""A cache from its parts, for an engine of one rank or of several; and who tells the cluster of it."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from headwater.cache.cache import TieredCache
from headwater.cache.executor import NoExecutor, Recorder
from headwater.cache.state import Brain
from headwater.config.cache import CacheConfig
from headwater.config.residency import MEMORY_URL, ResidencyConfig
from headwater.core.errors import InvalidConfig, InvalidInput
from headwater.layout.reshard import part_number
from headwater.layout.shard import parts
from headwater.metrics import Metrics
from headwater.residency.base import Residency
from headwater.residency.events import TIERS
from headwater.residency.holdings import WHOLE, StoreHoldings
from headwater.residency.memory import MemoryResidency
from headwater.residency.publisher import Publisher
from headwater.storage.base import SYSTEM_CLOCK, Clock, Store
from headwater.storage.recording import FileRecorder
from headwater.storage.resharded import SIZES, ReshardedStore
from headwater.transfer.executor.worker import Worker
from headwater.transfer.ranks.group import Ranks
from headwater.transfer.ranks.members import Member

if TYPE_CHECKING:
    from headwater.layout.spec import KVLayout
    from headwater.transfer.executor.staging import Staging


def open_cache(
    config: CacheConfig,
    stores: Mapping[str, Store],
    staging: "Staging | None",
    *,
    layout: "KVLayout",
    identity: bytes,
    clock: Clock = SYSTEM_CLOCK,
    metrics: Metrics | None = None,
    recorder: Recorder | None = None,
    views: Mapping[str, Store] | None = None,
    threads_per_store: int = 2,
) -> TieredCache:
    """A cache for one engine: the brain, and threads that move its blocks between `staging`'s device and the stores.

    `stores` are those of `config.tiers`, by name; they stay the caller's, and outlive the cache. Without any, `staging`
    may be None. `views` are stores that the brain does not know: for who shares its executor. `identity` is the digest
    of the CacheIdentity. Raises InvalidConfig if tiers and stores do not fit.
    """
    names = [tier.name for tier in config.tiers]
    if sorted(names) != sorted(stores):
        raise InvalidConfig(f"the tiers are {names}, the stores {sorted(stores)}: each tier needs its store")
    metrics = metrics if metrics is not None else Metrics()
    brain = Brain(config)
    if not stores:
        return TieredCache(brain, NoExecutor(), clock=clock, metrics=metrics, recorder=recorder)
    if staging is None:
        raise InvalidConfig("stores need staging: host pages through which blocks travel")
    block_tokens = config.block_tokens
    worker = Worker(
        {**stores, **(views or {})},
        staging,
        layout=layout,
        identity=identity,
        block_tokens=block_tokens,
        clock=clock,
        metrics=metrics,
        threads_per_store=threads_per_store,
    )
    cache = TieredCache(brain, worker, clock=clock, metrics=metrics, recorder=recorder, purger=worker)
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
) -> list[Member]:
    """The members of one rank of a tensor-parallel group: a worker for each of its parts, in this process.

    `layout` is the unsharded one; `stagings` are those of `parts(layout, rank, tp_size)`, in this order. `views`, by
    name: what groups of other `sizes` wrote to one of the stores, as one more store that is only read. Raises
    InvalidInput with no worker started.
    """
    mine = parts(layout, rank, tp_size)
    if len(stagings) != len(mine):
        raise InvalidInput(f"rank {rank} of {tp_size} has {len(mine)} parts, and not {len(stagings)}")
    others = [size for size in sizes if size != tp_size]
    members: list[Member] = []
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
            members.append(Member(rank, part.shard, number, worker))
    except BaseException:
        for member in members:
            member.executor.close(0.0)
        raise
    return members


def open_group(
    config: CacheConfig,
    members: Sequence[Member],
    *,
    clock: Clock = SYSTEM_CLOCK,
    metrics: Metrics | None = None,
    recorder: Recorder | None = None,
) -> TieredCache:
    """A cache for an engine of several ranks: one brain, and the members of all ranks as its executor.

    `config.block_bytes` are those of a block on all ranks together. Raises InvalidInput for members that are no group.
    """
    metrics = metrics if metrics is not None else Metrics()
    ranks = Ranks(members, stores=[tier.name for tier in config.tiers], clock=clock, metrics=metrics)
    cache = TieredCache(Brain(config), ranks, clock=clock, metrics=metrics, recorder=recorder)
    ranks.deliver = cache.deliver
    ranks.on_first_layer(cache.notice)
    return cache


def open_recorder(
    path: Path | None, limit_bytes: int, stack: ExitStack, *, metrics: Metrics | None = None
) -> FileRecorder | None:
    """Who writes down what a brain hears, for `open_cache`; the stack closes it. None: nobody. Raises InvalidConfig."""
    if path is None:
        return None
    recorder = FileRecorder(path, limit_bytes=limit_bytes, metrics=metrics)
    stack.callback(recorder.close)
    return recorder


def open_residency(config: ResidencyConfig, *, metrics: Metrics | None = None) -> Residency:
    """The index of who holds what. Connects when it is asked. Raises StoreUnavailable for no address."""
    if config.url == MEMORY_URL:
        return MemoryResidency()
    from headwater.residency.redis import RedisResidency  # sockets and TLS, for who has a server

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
