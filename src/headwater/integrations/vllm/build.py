"""The connector's own `build.py`: the one place here that names concrete classes and introduces them to each other."""

import os
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from headwater.build import open_publisher, open_recorder, open_staging
from headwater.build import open_tiers as open_tiers  # tests put stores in its place
from headwater.cache.lent import LentBrain
from headwater.cache.lent_cache import LentCache
from headwater.config.cache import CacheConfig
from headwater.config.environment import default_node
from headwater.config.residency import ResidencyConfig
from headwater.core.errors import InvalidConfig
from headwater.core.identity import CacheIdentity
from headwater.disagg.prompt_pages import is_asked, say_pages
from headwater.engine.connector import Connector
from headwater.integrations.vllm.identity import engine_identity
from headwater.integrations.vllm.kv_events import Teller
from headwater.integrations.vllm.metadata import RankFacts
from headwater.integrations.vllm.naming import Namer
from headwater.integrations.vllm.pacer import Pacer
from headwater.integrations.vllm.scheduler import SchedulerSide
from headwater.integrations.vllm.settings import (
    ConnectorConfig,
    LoadWhen,
    machine_disk_bytes,
    machine_host_bytes,
)
from headwater.integrations.vllm.step_executor import StepExecutor
from headwater.integrations.vllm.worker import WorkerSide
from headwater.layout.frame import frame_bytes
from headwater.layout.shard import Shard
from headwater.layout.spec import KVLayout, opaque_layout
from headwater.metrics import Metrics
from headwater.storage.base import SYSTEM_CLOCK, Deadline, Store
from headwater.storage.local import directory
from headwater.transfer.device.populate import populate
from headwater.transfer.executor.worker import Worker
from headwater.transfer.ranks.group import Ranks
from headwater.transfer.ranks.members import Member

if TYPE_CHECKING:
    from headwater.integrations.vllm.registered import RowsCache
    from headwater.transfer.executor.staging import TorchStaging

_READY_S: Final = 4.0  # at the beginning, for memory to be registered; a large slab takes longer, beside requests
_DRAIN_S: Final = 5.0  # at the end, for blocks on their way to the stores


class _NoPages:
    """Staging of a worker that only probes."""

    num_pages: Final = 1

    def __init__(self, num_bytes: int) -> None:
        self._frame = memoryview(bytearray(num_bytes))

    def in_place(self, memory: memoryview | None = None) -> None:
        """None: nothing is copied."""
        return

    def frame(self, page: int) -> memoryview:
        """The one page, which is never used."""
        return self._frame

    def gather(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        """Not here."""
        raise InvalidConfig("the scheduler has no blocks")

    def scatter(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        """Not here."""
        raise InvalidConfig("the scheduler has no blocks")


@dataclass(slots=True)
class _Shared:
    """Tiers that are open in this process, and how many use them."""

    stores: Mapping[str, Store]
    stack: ExitStack
    num_users: int = 0


_shared: Final[dict[Hashable, _Shared]] = {}
_sharing: Final = threading.Lock()


@contextmanager
def shared_tiers(
    config: ConnectorConfig, metrics: Metrics, *, only_probes: bool = False
) -> Iterator[Mapping[str, Store]]:
    """The tiers of a process, opened once: scheduler and worker are in one where there is one GPU.

    So the scheduler sees at once what the worker wrote, and nobody reads that back from the index. `metrics` of who
    comes first count what stores count. `only_probes`: the workers are in other processes.
    """
    where = (config.host_directory, config.host_bytes), (config.disk_directory, config.disk_bytes), config.pool
    key = os.getpid(), open_tiers, where, only_probes
    with _sharing:
        found = _shared.get(key)
        if found is None:
            with ExitStack() as stack:
                stores = open_tiers(sized(config), stack, metrics=metrics, progress=None, only_probes=only_probes)
                found = _shared[key] = _Shared(stores, stack.pop_all())
        found.num_users += 1
    try:
        yield found.stores
    finally:
        with _sharing:
            found.num_users -= 1
            if not found.num_users:
                del _shared[key]
                found.stack.close()


def sized(config: ConnectorConfig) -> ConnectorConfig:
    """The same, with sizes from the machine for directories that are not there yet, where nobody said otherwise."""

    def size(path: Path | None, asked: int | None, machine: int) -> int | None:
        return asked if path is None or asked is not None or (path / directory.SLAB).exists() else machine

    host, disk = config.host_directory, config.disk_directory
    return replace(
        config,
        host_bytes=size(host, config.host_bytes, machine_host_bytes(host) if host else 0),
        disk_bytes=size(disk, config.disk_bytes, machine_disk_bytes(disk) if disk else 0),
    )


@dataclass(slots=True)
class OpenWorker:
    """A rank's side with all that belongs to it."""

    side: WorkerSide
    executor: Worker
    staging: "TorchStaging"
    stores: Mapping[str, Store]
    metrics: Metrics
    stack: ExitStack

    def get_ready(self, say: Callable[[str], None], *, timeout_s: float = _READY_S) -> None:
        """Do what a first request would have to wait for: register the stores' memory. Blocks; tells what it does.

        After `timeout_s` the rest goes on beside requests, which go through pinned pages meanwhile.
        """
        until = Deadline.after(timeout_s)
        for name, store in self.stores.items():
            memory = _memory_of(store)
            if memory is None or not self.staging.on_gpu:
                continue
            size = f"{memory.nbytes / (1 << 30):.1f} GiB of the {name} tier"
            say(f"{size} are being registered with the GPU")
            begin_s = SYSTEM_CLOCK.monotonic()
            if self.staging.register(memory, timeout_s=until.remaining_s):
                say(f"{size} are registered, after {SYSTEM_CLOCK.monotonic() - begin_s:.1f} s")
            else:
                say(f"{size} go on being registered; until then blocks go through pinned pages, which is slower")

    def close(self, timeout_s: float = _DRAIN_S) -> None:
        """Let saves arrive, then end everything. Blocks, `timeout_s` and a little more at most; idempotent."""
        self.executor.drain(timeout_s)
        self.stack.close()


def provide_memory(stores: Mapping[str, Store], *, timeout_s: float) -> None:
    """Have the kernel provide what `get_ready` will register with a GPU, which is not touched. Blocks, not for longer.

    What is left then is provided when it is registered, which goes on beside requests.
    """
    until = Deadline.after(timeout_s)
    for store in stores.values():
        memory = _memory_of(store)
        if memory is not None:
            populate(memory, timeout_s=until.remaining_s)


def _memory_of(store: Store) -> memoryview | None:
    in_place = store.addressable()
    return in_place.memory() if in_place is not None else None


def open_worker(
    config: ConnectorConfig,
    device: "RowsCache",
    *,
    identity: bytes,
    rank: int,
    world: int,
    overlapping: int = 1,
    metrics: Metrics | None = None,
) -> OpenWorker:
    """The executor of one rank. A tier that cannot be had is left out, with a sentence in the log.

    `overlapping`: steps that vLLM begins before it has heard of the first of them. `metrics`: what its stores count in,
    if they are open already.
    """
    metrics = metrics if metrics is not None else Metrics()
    stack = ExitStack()
    with stack:
        if config.switch_interval_s is not None:
            stack.callback(sys.setswitchinterval, sys.getswitchinterval())
            sys.setswitchinterval(config.switch_interval_s)
        stores = stack.enter_context(shared_tiers(config, metrics))
        if not stores:
            raise InvalidConfig("no tier can be had (see the log): leave the connector out, or give it a directory")
        staging = open_staging(device, stores, stack, metrics=metrics)
        if staging is None:
            raise InvalidConfig("the host memory through which blocks travel cannot be had (see the log)")
        executor = Worker(
            stores,
            staging,
            layout=device.layout,
            identity=identity,
            block_tokens=device.layout.block_tokens,
            shard=Shard(rank, world),
            metrics=metrics,
            threads_per_store=config.threads_per_store,
        )
        stack.callback(executor.close, _DRAIN_S)
        side = WorkerSide(executor, rank=rank, overlapping=overlapping)
        return OpenWorker(side, executor, staging, stores, metrics, stack.pop_all())
    raise AssertionError  # the stack swallows nothing


@dataclass(slots=True)
class OpenScheduler:
    """The scheduler's side with all that belongs to it."""

    side: SchedulerSide
    pacer: Pacer | None  # None: loads are not weighed against computing
    cache: LentCache
    stores: Mapping[str, Store]
    metrics: Metrics
    stack: ExitStack
    identity: CacheIdentity
    ranks: Sequence[RankFacts]

    def told(self, request: Any) -> dict[str, Any] | None:
        """What a request's answer says of its pages, if it was asked to; before it is `finished`."""
        if not is_asked(getattr(request, "kv_transfer_params", None)):
            return None
        ranks = [(one.rank, one.world) for one in self.ranks]
        return say_pages(self.identity, ranks, self.side.prompt_keys(request))

    def close(self) -> None:
        """End everything. Blocks, seconds at most; idempotent."""
        self.side.close()
        self.stack.close()


def open_scheduler(
    config: ConnectorConfig,
    ranks: Sequence[RankFacts],
    *,
    loads: bool = True,
    saves: bool = True,
    events: bool = False,
) -> OpenScheduler:
    """The brain of one engine, from what its workers said of themselves. Raises InvalidConfig if they do not agree.

    `events`: whether somebody listens to vLLM's KV events.
    """
    identity = engine_identity(ranks)
    metrics = Metrics()
    stack = ExitStack()
    with stack:
        first = ranks[0]
        far = len(ranks) > 1 or first.far
        stores = stack.enter_context(shared_tiers(config, metrics, only_probes=far))
        cache_config = CacheConfig(
            num_slots=first.num_blocks,
            block_tokens=first.block_tokens,
            block_bytes=sum(one.page_bytes for one in ranks),
            tiers=tuple(config.tier(name) for name in stores),
            prefetch=False,  # what is loaded from a slower store is saved to the faster ones afterwards
        )
        executor = StepExecutor(_prober(stores, ranks, metrics), num_ranks=len(ranks), others_write=far)
        path = config.record
        if path is not None:  # replicas have one configuration
            path = path.with_name(f"{path.name}.{os.getpid()}")
        recorder = open_recorder(path, config.record_bytes, stack, metrics=metrics)
        brain = LentBrain(cache_config)
        cache = LentCache(brain, executor, clock=SYSTEM_CLOCK, metrics=metrics, recorder=recorder)
        executor.deliver = cache.deliver
        listener = None
        if config.residency is not None:
            told = ResidencyConfig(url=config.residency, node=config.node or default_node())
            pages = [(one.rank, one.world, 0) for one in ranks]
            listener = open_publisher(cache, told, stores, identity=identity.digest, pages=pages)
            stack.callback(listener.close)
        teller = Teller(events=events, listener=listener)
        if teller.active:
            cache.announce(teller)
        side = SchedulerSide(
            cache,
            executor,
            Namer(identity),
            config,
            block_tokens=first.block_tokens,
            loads=loads,
            saves=saves,
            teller=teller if teller.active else None,
        )
        weighs = config.load_when is LoadWhen.PAYS or (config.load_when is None and saves)
        pacer = Pacer(Connector(cache, identity).measured) if weighs else None
        return OpenScheduler(side, pacer, cache, stores, metrics, stack.pop_all(), identity, tuple(ranks))
    raise AssertionError


def _prober(stores: Mapping[str, Store], ranks: Sequence[RankFacts], metrics: Metrics) -> Worker | Ranks:
    """Who probes: for one rank's pages, or for those of all."""
    members = []
    for one in sorted(ranks, key=lambda facts: facts.rank):
        layout = _layout_of(one)
        executor = Worker(
            stores,
            _NoPages(frame_bytes(layout.plane_bytes)),
            layout=layout,
            identity=engine_identity([replace(one, rank=0, world=1)]).digest,
            block_tokens=one.block_tokens,
            shard=Shard(one.rank, one.world),
            metrics=metrics,
        )
        members.append(Member(one.rank, Shard(one.rank, one.world), 0, executor))
    if len(members) == 1:
        return members[0].executor  # type: ignore[return-value]  # it is the worker above
    return Ranks(members, stores=list(stores), metrics=metrics)


def _layout_of(one: RankFacts) -> KVLayout:
    return opaque_layout(one.plane_bytes, one.block_tokens)
