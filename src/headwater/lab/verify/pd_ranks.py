"""A prefill node whose pages are those of two ranks: what `verify --pd` sends from tensor-parallel size 2 to 1.

The reference engine computes on one device, so nothing is computed in parallel here: the planes it computed are cut as
two ranks would hold them, and each rank's parts are gathered, sealed and sent by workers of their own, as pages of two
ranks. What a decode node of one rank reads is therefore what a group of two would have written.

Its cache has no tiers: the pool gets what is sent, and no whole page beside it.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Final

import numpy as np

from headwater.build import open_cache, open_pool, open_rank
from headwater.config.cache import CacheConfig
from headwater.config.stores import pool_kind
from headwater.core.errors import InvalidInput
from headwater.disagg.handoff import PoolSender
from headwater.engine.connector import Connector
from headwater.engine.engine import Engine, EngineConfig
from headwater.engine.handoffs import Handoffs
from headwater.engine.models.base import Model
from headwater.lab.verify.pd_nodes import NUM_BLOCKS, PdNode
from headwater.layout.frame import frame_bytes, header_bytes
from headwater.layout.reshard import part_number
from headwater.layout.shard import Part, byte_ranges, parts
from headwater.transfer.device.arena import DeviceCache, HostCache, create_host_cache, create_kv_cache
from headwater.transfer.executor.caller import Caller
from headwater.transfer.executor.tier import Naming
from headwater.transfer.ranks.group import Ranks

if TYPE_CHECKING:
    from headwater.transfer.device.wire import Digests

TP_SIZE: Final = 2
_TIER: Final = "pool"
_PAGES: Final = 8


class RankStaging:
    """Pages of one part of one rank, gathered from planes that hold all of it. Sends only."""

    def __init__(self, planes: DeviceCache, part: Part, host: HostCache) -> None:
        self._planes = planes
        self._host = host
        self._at = header_bytes(len(part.layout.planes))
        self._cuts: list[tuple[int, tuple[tuple[int, int], ...]]] = []
        for local in part.layout.planes:
            index = planes.layout.index(local.role.name, local.layer)
            self._cuts.append((index, byte_ranges(planes.layout.planes[index], part.shard)))

    @property
    def num_pages(self) -> int:
        """How many pages there are."""
        return self._host.num_pages

    def in_place(self, memory: memoryview | None = None) -> None:
        """None: everything goes through pages."""
        return

    def frame(self, page: int) -> memoryview:
        """A page's memory."""
        return self._host.page(page)

    def gather(self, slots: Sequence[int], pages: Sequence[int]) -> "Digests | None":
        """Copy what the rank holds of blocks into payloads. Blocks."""
        for slot, page in zip(slots, pages, strict=True):
            payload = np.frombuffer(self._host.page(page), np.uint8)[self._at :]
            end = 0
            for index, ranges in self._cuts:
                row = self._planes.rows[index][slot].cpu().numpy()
                for offset, length in ranges:
                    payload[end : end + length] = row[offset : offset + length]
                    end += length
        return None

    def scatter(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        """Raise: nothing is read here."""
        raise InvalidInput("a node that only sends reads no pages")


def rank_namings(model: Model) -> list[Naming]:
    """What the pages are called that two ranks hold of a block, each once."""
    found = {}
    for rank in range(TP_SIZE):
        for part in parts(model.layout, rank, TP_SIZE):
            naming = _naming(model, part)
            found[naming.shard, naming.part] = naming
    return list(found.values())


@contextmanager
def open_ranks(name: str, model: Model, pool: str) -> Iterator[PdNode]:
    """The node. Raises what its pool raises."""
    layout, identity = model.layout, model.identity
    with ExitStack() as stack:
        planes = stack.enter_context(create_kv_cache(layout, NUM_BLOCKS, model.device))
        store = stack.enter_context(open_pool(pool))
        members = []
        for rank in range(TP_SIZE):
            stagings = []
            for part in parts(layout, rank, TP_SIZE):
                pages = stack.enter_context(create_host_cache(frame_bytes(part.layout.plane_bytes), _PAGES))
                if (registering := store.registering()) is not None:
                    registering.register(pages.memory)
                stagings.append(RankStaging(planes, part, pages))
            members += open_rank(rank, TP_SIZE, {_TIER: store}, stagings, layout=layout, identity=identity.digest)
        ranks = Ranks(members, stores=[_TIER])
        stack.callback(ranks.close)
        caller = Caller(ranks, [_TIER], identity=identity.digest)
        ranks.deliver = caller.deliver
        sender = PoolSender(
            caller, identity=identity, layout=layout, pool=pool_kind(pool), store=_TIER, tp_size=TP_SIZE
        )
        handoffs = Handoffs(block_tokens=layout.block_tokens, sender=sender)
        config = CacheConfig(num_slots=NUM_BLOCKS, block_tokens=layout.block_tokens, block_bytes=layout.page_bytes)
        cache = stack.enter_context(open_cache(config, {}, None, layout=layout, identity=identity.digest))
        engine = Engine(
            model,
            planes,
            Connector(cache, identity),
            EngineConfig(step_tokens=layout.block_tokens),
            handoffs=handoffs,
        )
        yield PdNode(name, stack.enter_context(engine))


def _naming(model: Model, part: Part) -> Naming:
    number = part_number(part, model.layout)
    return Naming(identity=model.identity.digest, layout=part.layout, shard=part.shard, part=number)
