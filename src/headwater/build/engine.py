"""An engine with all that belongs to it, of every role."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from headwater.cache.cache import TieredCache
from headwater.cache.executor import Recorder, SeveralRecorders
from headwater.config.cache import CacheConfig
from headwater.config.environment import default_node
from headwater.config.residency import ResidencyConfig
from headwater.config.serve import ServeConfig
from headwater.config.stores import pool_kind
from headwater.core.errors import InvalidConfig, StoreError
from headwater.core.events import NO_TENANT
from headwater.core.identity import CacheIdentity
from headwater.core.role import Role
from headwater.disagg.handoff import PoolReceiver, PoolSender
from headwater.disagg.protocol import Ticket
from headwater.layout.shard import parts
from headwater.metrics import Metrics
from headwater.residency.publisher import Publisher
from headwater.storage.base import Deadline, Store
from headwater.storage.local import LocalStore, directory
from headwater.storage.local.slab import Progress
from headwater.storage.resharded import SIZES, ReshardedStore
from headwater.tracing.spans import NO_TRACING, Tracing
from headwater.transfer.executor.caller import BESIDE, Caller

if TYPE_CHECKING:
    import torch

    from headwater.engine.engine import Engine
    from headwater.engine.handoffs import Handoffs
    from headwater.engine.models.base import Model
    from headwater.engine.request import Defaults
    from headwater.engine.tokenizer import Tokenizer
    from headwater.layout.spec import KVLayout
from headwater.build.cache import open_cache, open_publisher, open_recorder
from headwater.build.stores import POOL_TIER, open_tiers
from headwater.build.tiered import open_staging

_CPU_BYTES: Final = 1 << 30  # of KV on a CPU, where nobody said how many
_GPU_SHARE: Final = 0.85  # of a GPU's free memory, the same
_VIEW_TIER: Final = "pool_tp"  # what others wrote to the pool, at other tensor-parallel sizes
_HANDOFF_THREADS: Final = (
    4  # that call each store where prompts are handed over: one that hangs is not another's affair
)
_WARM_S: Final = 60.0  # for an engine to have its kernels
_NAME_S: Final = 1.0  # for a store to take down whose pages come
_DRAIN_S: Final = 5.0  # at the end, for blocks on their way to the stores


@dataclass(frozen=True, slots=True)
class Running:
    """An engine at work with all that belongs to it."""

    name: str
    engine: "Engine"
    tokenizer: "Tokenizer"
    cache: TieredCache
    metrics: Metrics
    defaults: "Defaults"  # of sampling
    receiver: PoolReceiver | None = None  # of a decode node
    tracing: Tracing = NO_TRACING
    stores: Mapping[str, Store] = field(default_factory=dict)  # the cache's, by tier

    def refusal(self, ticket: Ticket) -> str | None:
        """Why a ticket cannot be used here, as a sentence that says what to change; None: it can. Does not block."""
        if self.receiver is None:
            return "this node takes nothing over: send tickets to one that was started with --role decode"
        return self.receiver.refusal(ticket)


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
    from headwater.engine.loader import find_device, load_defaults, load_tokenizer, plan_model
    from headwater.engine.request import Defaults
    from headwater.transfer.device.arena import create_kv_cache

    metrics = metrics if metrics is not None else Metrics()
    tokenizer = load_tokenizer(config.model)
    defaults = load_defaults(config.model) if config.generation_config else Defaults()
    if model is None:
        plan = plan_model(config.model, dtype=config.dtype, kv=config.kv, block_tokens=config.block_tokens)
        device = find_device(config.device)
        _require_room(config, plan.layout, device, num_weight_bytes=plan.num_weight_bytes)
        model = plan.load(device)
    else:
        _require_room(config, model.layout, model.device)
    layout = model.layout
    with ExitStack() as stack:
        num_blocks = _num_blocks(config, model)
        try:
            planes = stack.enter_context(create_kv_cache(layout, num_blocks, model.device))
        except RuntimeError as error:  # torch's word for no memory, on every device
            message = f"{num_blocks} blocks of {layout.page_bytes} bytes cannot be allocated on {model.device}"
            raise InvalidConfig(f"{message}: take fewer (--num-blocks, --device-mib)") from error
        stores = open_tiers(config, stack, metrics=metrics, progress=progress, needs_pool=config.role is not Role.MIXED)
        staging = open_staging(planes, stores, stack, metrics=metrics)
        if staging is None:
            if config.role is not Role.MIXED:
                raise InvalidConfig(f"a {config.role} node needs host memory for the pages of its cache")
            stores = {}
        cache_config = CacheConfig(
            num_slots=planes.num_blocks,
            block_tokens=layout.block_tokens,
            block_bytes=layout.page_bytes,
            tiers=tuple(map(config.tier, stores)),
            pin_share=config.pin_share,
            policy=config.policy,
        )
        recorder: Recorder | None = open_recorder(config.record, config.record_bytes, stack, metrics=metrics)
        tracing: Tracing = NO_TRACING
        if config.traces is not None:
            tracing, spans = _open_tracing(config.traces, config, stack)
            recorder = spans if recorder is None else SeveralRecorders(recorder, spans)
        cache = stack.enter_context(
            open_cache(
                cache_config,
                stores,
                staging,
                layout=layout,
                identity=model.identity.digest,
                metrics=metrics,
                recorder=recorder,
                views=_open_views(config, model, stores, metrics),
                threads_per_store=2 if config.role is Role.MIXED else _HANDOFF_THREADS,
            )
        )
        _name_identity(stores, model.identity)
        publisher = None
        if config.residency is not None:
            told = ResidencyConfig(url=config.residency, node=config.node or default_node())
            publisher = open_publisher(cache, told, stores, identity=model.identity.digest)
            stack.callback(publisher.close)
        stack.callback(cache.drain, _DRAIN_S)
        handoffs = receiver = None
        if config.role is not Role.MIXED:
            handoffs, receiver = _open_handoffs(config, cache, model, publisher=publisher, metrics=metrics)
        limits = EngineConfig(
            max_running=config.max_running, max_waiting=config.max_waiting, step_tokens=config.step_tokens
        )
        engine = stack.enter_context(Engine(model, planes, Connector(cache, model.identity), limits, handoffs=handoffs))
        engine.wait_warm(_WARM_S)
        name = config.name or model.name
        yield Running(name, engine, tokenizer, cache, metrics, defaults, receiver, tracing, stores)


def _open_tracing(url: str, config: ServeConfig, stack: ExitStack) -> tuple[Tracing, Recorder]:
    """Spans of requests, and of the cache's jobs."""
    from headwater.tracing.jobs import JobSpans  # OpenTelemetry: an extra
    from headwater.tracing.otel import OtelTracing

    tracing = OtelTracing(url, service="headwater", instance=config.node or default_node())
    stack.callback(tracing.close)
    return tracing, JobSpans(tracing)


def _open_handoffs(
    config: ServeConfig, cache: TieredCache, model: "Model", *, publisher: Publisher | None, metrics: Metrics
) -> "tuple[Handoffs, PoolReceiver | None]":
    """What a prefill or a decode node hands KV over with: jobs beside the cache's own, on its executor."""
    from headwater.engine.handoffs import Handoffs

    layout, identity, kind = model.layout, model.identity, pool_kind(config.pool or "")
    executor = cache.share_executor(lambda event: caller.hears(event))
    caller = Caller(executor, [POOL_TIER, _VIEW_TIER], identity=identity.digest, first_job=BESIDE, metrics=metrics)
    sender = receiver = None
    if config.role is Role.PREFILL:
        sender = PoolSender(caller, identity=identity, layout=layout, pool=kind, store=POOL_TIER, residency=publisher)
    else:
        receiver = PoolReceiver(
            caller,
            identity=identity,
            layout=layout,
            pool=kind,
            store=POOL_TIER,
            view=_VIEW_TIER,
            residency=publisher,
        )
    return Handoffs(block_tokens=layout.block_tokens, sender=sender, receiver=receiver, tier=POOL_TIER), receiver


def _open_views(config: ServeConfig, model: "Model", stores: Mapping[str, Store], metrics: Metrics) -> dict[str, Store]:
    """What nodes of other tensor-parallel sizes wrote to the pool, as pages of this one's, for who takes them over."""
    if config.role is Role.MIXED:
        return {}
    layout, digest = model.layout, model.identity.digest
    others = [size for size in SIZES if size != 1]
    part = parts(layout, 0, 1)[0]
    return {_VIEW_TIER: ReshardedStore(stores[POOL_TIER], layout, part, identity=digest, sizes=others, metrics=metrics)}


def _name_identity(stores: Mapping[str, Store], identity: CacheIdentity) -> None:
    """Write into each local store what an identity is in short. Blocks, a second at most; that it failed is no loss."""
    text = " ".join(f"{name}={value}" for name, value in identity.in_short().items())
    for store in stores.values():
        if isinstance(store, LocalStore):
            with suppress(StoreError):
                store.label(identity.digest, NO_TENANT, text, deadline=Deadline.after(_NAME_S))


def _require_room(
    config: ServeConfig, layout: "KVLayout", device: "torch.device", *, num_weight_bytes: int = 0
) -> None:
    """Refuse a size that cannot be had, before anything is allocated; also weights that are still to be read."""
    free = _free_bytes(device)
    if num_weight_bytes > free:
        raise InvalidConfig(f"the weights take {num_weight_bytes} bytes, and {free} are free on {device}")
    num_bytes = config.device_bytes or (config.num_blocks or 0) * layout.page_bytes
    if num_bytes > free - num_weight_bytes:
        beside = f" beside {num_weight_bytes} of weights" if num_weight_bytes else ""
        raise InvalidConfig(
            f"{num_bytes} bytes of KV (--num-blocks, --device-mib) cannot be had on {device}: {free} are free{beside}"
        )


def _free_bytes(device: "torch.device") -> int:
    if device.type == "cuda":
        import torch

        return torch.cuda.mem_get_info(device)[0]
    return directory.available_memory()


def _num_blocks(config: ServeConfig, model: "Model") -> int:
    if config.num_blocks is not None:
        return config.num_blocks
    num_bytes = config.device_bytes
    if num_bytes is None:
        free = _free_bytes(model.device)
        num_bytes = int(free * _GPU_SHARE) if model.device.type == "cuda" else min(_CPU_BYTES, free // 4)
    num_blocks = num_bytes // model.layout.page_bytes
    if num_blocks < 1:
        raise InvalidConfig(f"{num_bytes} bytes hold no block of {model.layout.page_bytes} bytes")
    return num_blocks
