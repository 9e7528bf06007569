"""HeadwaterConnector: vLLM's interface, and nothing behind it but the two sides (`scheduler.py`, `worker.py`).

One object in the scheduler's process, one in each worker's. The workers read off the registered tensors whose bytes
they have, and tell the scheduler at start (vLLM's handshake); until then nothing is cached.
"""

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from headwater.core.errors import InvalidConfig
from headwater.integrations.vllm.build import OpenScheduler, OpenWorker, open_scheduler
from headwater.integrations.vllm.counted import Counted
from headwater.integrations.vllm.engine_facts import (
    checkpoint_directory,
    engine_facts,
    is_only_rank,
    one_run_layout,
    require_cacheable,
    require_orderly,
)
from headwater.integrations.vllm.executor import ExecutorProcess, begin_ahead, give_up_ahead
from headwater.integrations.vllm.identity import as_fields, rank_identity
from headwater.integrations.vllm.metadata import Orders, RankFacts, Report
from headwater.integrations.vllm.opening import Opening
from headwater.integrations.vllm.pacer import Flight, scheduled_tokens
from headwater.integrations.vllm.registered import RegisteredCache
from headwater.integrations.vllm.settings import AUTO_LAYOUT, ExecutorKind, LoadMode, OnFailure, read_config
from headwater.integrations.vllm.stats import HeadwaterProm, HeadwaterStats, kv_events, stats_of
from headwater.integrations.vllm.weights import remembered, weights_digest

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log: Final = logging.getLogger("vllm.headwater")  # vLLM shows its own loggers

_SOURCES: Final = {"host": CacheHitSource.HOST, "disk": CacheHitSource.DISK, "pool": CacheHitSource.P2P}


@dataclass(frozen=True, slots=True)
class StepOrders(KVConnectorMetadata):
    """What the scheduler tells the workers with a step."""

    orders: Orders


@dataclass(frozen=True, slots=True)
class StepReport(KVConnectorWorkerMetadata):
    """What a worker tells the scheduler with a step's output."""

    report: Report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "StepReport":
        """Two ranks' reports as one."""
        return StepReport(self.report.with_other(other.report))


@dataclass(frozen=True, slots=True)
class Introduction(KVConnectorHandshakeMetadata):
    """What a worker says of itself at start."""

    facts: RankFacts


class _PoolPins:
    """Blocks of vLLM's pool, each with one owner more."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def hold(self, blocks: Sequence[int]) -> None:
        """Own them too."""
        self._pool.touch([self._pool.blocks[block] for block in blocks])

    def let_go(self, blocks: Sequence[int]) -> None:
        """Own them no more."""
        self._pool.free_blocks([self._pool.blocks[block] for block in blocks])


class HeadwaterConnector(KVConnectorBase_V1, SupportsHMA):
    """Headwater's tiers under a vLLM engine."""

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        """Check options and model. Raises InvalidConfig with a sentence for what cannot work."""
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._config = read_config(transfer.kv_connector_extra_config)
        try:
            require_cacheable(vllm_config, kv_cache_config)
            require_orderly(vllm_config, sync=self._config.load is LoadMode.SYNC)
            if self._config.executor is ExecutorKind.PROCESS and vllm_config.device_config.device_type != "cuda":
                raise InvalidConfig("executor=process: another process can map a GPU's memory only; leave it out")
        except BaseException:
            give_up_ahead()  # vLLM asked for a layout before
            raise
        spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
        self._block_tokens = int(spec.block_size)
        self._saves, self._loads = transfer.is_kv_producer, transfer.is_kv_consumer
        self._worker: OpenWorker | ExecutorProcess | None = None
        self._opening = Opening(self._config, overlapping=vllm_config.max_concurrent_batches)
        self._facts: RankFacts | None = None
        self._scheduler: OpenScheduler | None = None
        self._counted: Counted | None = None
        # On a GPU: what was on the stream when the last steps began. The oldest is of the steps that orders speak of.
        self._marks: deque[torch.cuda.Event] = deque(maxlen=vllm_config.max_concurrent_batches)
        self._on_gpu = False
        self._flight = Flight()
        self._pool: Any = None
        if role is KVConnectorRole.SCHEDULER:  # vLLM reads it after this; by default it fails a request whose load did
            transfer.kv_load_failure_policy = self._config.on_failed_load.value

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: "VllmConfig") -> str | None:
        """How vLLM shall lay out its KV; None: as it likes. What a backend does not have, vLLM drops itself."""
        config = read_config(vllm_config.kv_transfer_config.kv_connector_extra_config)
        # Its worker is in this process, and busy for a while.
        if torch.cuda.is_initialized() and is_only_rank(vllm_config):  # type: ignore[no-untyped-call]
            begin_ahead(config)
        return one_run_layout(vllm_config) if config.layout == AUTO_LAYOUT else config.layout

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is dropped is a miss later, and nothing else."""
        return False

    # --- worker -------------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Look at the KV tensors, open the stores. Blocks, while a new checkpoint is digested. Raises InvalidConfig."""
        try:
            self._register(kv_caches)
        except BaseException:
            self._opening.give_up()
            raise

    def _register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        config, parallel = self._vllm_config, self._vllm_config.parallel_config
        world = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        rank = parallel.rank % world
        device = RegisteredCache(
            kv_caches, num_blocks=self._kv_cache_config.num_blocks, block_tokens=self._block_tokens
        )
        model = config.model_config
        identity = rank_identity(
            architecture=",".join(model.architectures),
            weights=weights_digest(checkpoint_directory(config), remembered()),
            model_config=model.hf_config.to_dict(),
            engine=engine_facts(config, self._kv_cache_config, version=vllm.__version__),
            tensors=device.facts,
            layout=device.layout.fingerprint,
            block_tokens=self._block_tokens,
        )
        self._on_gpu = device.device.type == "cuda"
        self._opening.begin(device, identity=identity.digest, rank=rank, world=world)
        self._take_worker()
        self._facts = RankFacts(
            rank=rank,
            world=world,
            block_tokens=self._block_tokens,
            plane_bytes=device.layout.plane_bytes,
            num_blocks=device.num_blocks,
            identity=as_fields(identity),
        )

    def _take_worker(self) -> None:
        """From when there is one, steps use it."""
        if self._opening.worker is not None and self._opening.worker is not self._worker:
            self._worker = self._opening.worker
            self._counted = Counted(self._worker.metrics)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """What this worker says of itself: vLLM has warmed up, and from now on everything is ready. Blocks for that."""
        self._opening.wait()
        self._take_worker()
        if self._facts is not None:
            self._facts = replace(self._facts, far=self._opening.is_far)
        return Introduction(self._facts) if self._facts is not None else None

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """A step begins: blocks that are taken away are read no more when this returns, or their saves are void."""
        if self._worker is not None and isinstance(kv_connector_metadata, StepOrders):
            if self._on_gpu:
                mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
                mark.record()
                self._marks.append(mark)
            self._worker.side.begin(kv_connector_metadata.orders)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin loads; those that this step needs are there, or reported, when it returns."""
        if self._worker is not None:
            if self._on_gpu and self._worker.side.step_waits:  # vLLM may be zeroing the blocks
                torch.cuda.current_stream().synchronize()
            self._worker.side.load()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Everything is there already."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are saved when their step is over."""

    def wait_for_save(self) -> None:
        """Begin saves. Does not wait: vLLM keeps the blocks."""
        if self._worker is not None:
            if self._marks and self._worker.side.step_saves:  # the scheduler heard of another rank that it is over
                self._marks[0].synchronize()
            self._worker.side.save()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """The same, and those among the latter that must begin anew in other blocks: copies into theirs hang."""
        found = super().get_transfer_results(finished_req_ids)
        failed = self._worker.side.take_failed() if self._worker is not None else set()
        return replace(found, failed_recving=failed)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose blocks are read no more, and those whose loads have ended."""
        if self._worker is None:
            return None, None
        return self._worker.side.finished()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that failed to load."""
        return self._worker.side.take_bad() if self._worker is not None else set()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """What became of jobs."""
        report = self._worker.side.report() if self._worker is not None else None
        return StepReport(report) if report is not None else None

    # --- scheduler ----------------------------------------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """All workers have said who they are: open the stores to look at them, and begin."""
        ranks = [one.facts for one in metadata.values() if isinstance(one, Introduction)]
        events = self._vllm_config.kv_events_config
        self._scheduler = open_scheduler(
            self._config,
            ranks,
            loads=self._loads,
            saves=self._saves,
            events=events is not None and events.enable_kv_cache_events,
        )
        self._counted = Counted(self._scheduler.metrics)
        self._watch_device()
        log.info("Headwater: %s", self._sentence(ranks))

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded; None: stores have not answered yet."""
        if self._scheduler is None:
            return 0, False
        return self._scheduler.side.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        """A request has blocks: load into them."""
        if self._scheduler is not None:
            self._scheduler.side.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def get_external_cache_hit_sources(self, request: "Request", num_external_tokens: int) -> dict[CacheHitSource, int]:
        """Which tier a request's loaded tokens are from, for vLLM's own metrics."""
        found: dict[Any, int] = {}
        for store, num in self._scheduler.side.sources(request.request_id) if self._scheduler is not None else ():
            source = _SOURCES.get(store, CacheHitSource.EXTERNAL_UNSPECIFIED)
            found[source] = found.get(source, 0) + num * self._block_tokens
        if sum(found.values()) != num_external_tokens:
            return {CacheHitSource.EXTERNAL_UNSPECIFIED: num_external_tokens} if num_external_tokens else {}
        return found

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        """What the workers shall do in this step."""
        if self._scheduler is None:
            return StepOrders(Orders())
        manager = self._kv_cache_manager
        orders = self._scheduler.side.orders(lambda name: manager.get_block_ids(name)[0] if manager is not None else ())
        if self._scheduler.pacer is not None:
            self._scheduler.pacer.begun(scheduled_tokens(scheduler_output), waits=bool(orders.waiting))
        idle = self._flight.begun(computes=scheduler_output.total_num_scheduled_tokens > 0)
        return StepOrders(replace(orders, idle=idle))

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """What the workers did."""
        if self._scheduler is not None:
            report = connector_output.kv_connector_worker_meta
            self._scheduler.side.heard(
                report.report if isinstance(report, StepReport) else None,
                tuple(connector_output.finished_sending or ()),
                tuple(connector_output.failed_recving or ()),
            )

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """A request ended. True: its blocks are still being saved."""
        if self._scheduler is None:
            return False, None
        told = self._scheduler.told(request)
        return self._scheduler.side.finished(request, block_ids), told

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same; there is one group."""
        return self.request_finished(request, block_ids[0])

    def has_pending_block_frees(self) -> bool:
        """Whether blocks of ended requests will be free soon."""
        return self._scheduler is not None and self._scheduler.side.is_freeing()

    def reset_cache(self) -> bool | None:
        """Find nothing any more of what was stored by now (`reset_prefix_cache(reset_connector=True)`)."""
        if self._scheduler is not None:
            self._scheduler.side.reset()
            log.info("Headwater: reset. Blocks have new names from now on; nothing was deleted")
        return True

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Where vLLM says which blocks it has on the device."""
        self._pool = gpu_block_pool
        self._watch_device()

    def _watch_device(self) -> None:
        """From when both are there, blocks can be kept from use, and the cluster may hear what is on the device."""
        pool, side = self._pool, self._scheduler.side if self._scheduler is not None else None
        if pool is not None and side is not None:
            side.pins = _PoolPins(pool)
        if pool is not None and side is not None and side.teller is not None and pool.enable_caching:
            side.teller.is_cached = lambda block_hash: pool.get_cached_block(block_hash, [0]) is not None

    def take_events(self) -> Iterable["KVCacheEvent"]:
        """What came to our tiers, and left them. VLLM asks at the end of each step."""
        self._flight.ended()
        if self._scheduler is not None and self._scheduler.pacer is not None:
            self._scheduler.pacer.ended()
        teller = self._scheduler.side.teller if self._scheduler is not None else None
        return kv_events(teller.take(), self._block_tokens) if teller is not None else ()

    def get_kv_connector_stats(self) -> HeadwaterStats | None:
        """What this side counted since it was last asked."""
        return stats_of(self._counted) if self._counted is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> HeadwaterStats:
        """Numbers that came from another process."""
        return HeadwaterStats(data)

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> HeadwaterProm:
        """Our counters at vLLM's endpoint."""
        return HeadwaterProm(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # ------------------------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """End threads, let go of the stores; idempotent. Saves get a few seconds to arrive."""
        self._opening.give_up()
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()

    def _sentence(self, ranks: list[RankFacts]) -> str:
        """What this engine's cache is, in a line."""
        if self._scheduler is None:
            raise InvalidConfig("the scheduler has not begun")
        where = {"host": self._config.host_directory, "disk": self._config.disk_directory}
        tiers = ", ".join(f"{name} ({where[name]})" if name in where else name for name in self._scheduler.stores)
        size = sum(one.page_bytes for one in ranks)
        doing = " and ".join(what for what, does in (("saves", self._saves), ("loads", self._loads)) if does)
        failing = "recomputed" if self._config.on_failed_load is OnFailure.RECOMPUTE else "failed"
        return (
            f"{doing} blocks of {self._block_tokens} tokens ({size:,} bytes), verified, in: {tiers}. Loads are "
            f"{self._config.load.value}; a request whose load fails is {failing}. Blocks are copied whole, so another "
            "tensor-parallel size finds nothing of them."
        )
