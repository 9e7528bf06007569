"""Our metrics and our tiers' events in vLLM's own words.

What each side counted since it was last asked is carried by vLLM to its Prometheus endpoint.

Every counter of `headwater.metrics` has its own family there, with vLLM's labels in front of ours: hits and misses by
tier and reason, bytes moved, blocks dropped, bad pages. Histograms and gauges stay in the process. Each is there twice,
under our name and with vLLM's prefix: `LLM.get_metrics()` shows what has that, and nothing else.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_STORAGE,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from headwater.core.events import Move, Removed, Stored
from headwater.integrations.vllm.counted import Counted, merged
from headwater.integrations.vllm.kv_events import Named
from headwater.metrics import COUNTER, FAMILIES, PREFIX, Family, labels_of

_MEDIA: Final = {"host": MEDIUM_CPU, "disk": MEDIUM_STORAGE, "pool": "POOL"}
_made: dict[tuple[Any, str, tuple[str, ...]], Any] = {}  # Prometheus takes a name once
_PREFIXES: Final = (PREFIX, "vllm:" + PREFIX)
_LOGGED: Final = ("hit_tokens_total", "miss_tokens_total", "moved_bytes_total", "dropped_blocks_total")


class HeadwaterStats(KVConnectorStats):
    """Counters that grew, by title, as `Metrics.counters` has them."""

    def __init__(self, data: Mapping[str, Any] | None = None) -> None:
        super().__init__(data=dict(data or {}))

    def reset(self) -> None:
        """Forget everything."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> "HeadwaterStats":
        """The sum of two."""
        return HeadwaterStats(merged(self.data, other.data))

    def reduce(self) -> dict[str, int | float]:
        """What vLLM's log says of an interval."""
        return {title: round(value, 3) for title, value in self.data.items() if title.startswith(_LOGGED)}

    def is_empty(self) -> bool:
        """Whether nothing grew."""
        return not self.data


class HeadwaterProm(KVConnectorPromMetrics):
    """One Prometheus counter for each of our families."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine)
        self._families = {
            family.name: [self._counter(prefix + family.name, family, labelnames) for prefix in _PREFIXES]
            for family in FAMILIES.values()
            if family.kind is COUNTER
        }

    def _counter(self, name: str, family: Family, labelnames: list[str]) -> Any:
        """A family's counter; of one process there is one, however many engines come and go in it.

        But for those with vLLM's prefix: it takes them off with each new engine.
        """
        labels = (*labelnames, *(_ours(label, labelnames) for label in family.labels))
        made = (self._counter_cls, name, labels)
        try:
            _made[made] = self._counter_cls(name=name, documentation=family.help, labelnames=list(labels))
        except ValueError:  # it is there
            if made not in _made:
                raise
        return _made[made]

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what an engine counted."""
        theirs = [str(value) for value in self.per_engine_labelvalues[engine_idx]]
        for title, amount in transfer_stats_data.items():
            name, ours = labels_of(title)
            for counter in self._families.get(name, ()):
                counter.labels(*theirs, *ours).inc(amount)


def stats_of(counted: Counted) -> HeadwaterStats | None:
    """What grew since the last call; None: nothing, or it was asked a moment ago."""
    grown = counted.grown()
    return HeadwaterStats(grown) if grown else None


def kv_events(moves: Iterable[tuple[Move, Sequence[Named]]], block_tokens: int) -> list[KVCacheEvent]:
    """What came to our tiers and left them, as vLLM's listeners hear it; blocks by vLLM's own hashes."""
    found: list[KVCacheEvent] = []
    for move, blocks in moves:
        medium = _MEDIA.get(move.tier, MEDIUM_STORAGE)
        if isinstance(move, Stored) and blocks:
            found.append(
                BlockStored(
                    block_hashes=[maybe_convert_block_hash(block.hash) for block in blocks],
                    parent_block_hash=None if blocks[0].parent is None else maybe_convert_block_hash(blocks[0].parent),
                    token_ids=[token for block in blocks for token in block.tokens],
                    block_size=block_tokens,
                    lora_id=None,
                    medium=medium,
                    lora_name=None,
                    group_idx=0,
                )
            )
        elif isinstance(move, Removed) and blocks:
            hashes = [maybe_convert_block_hash(block.hash) for block in blocks]
            found.append(BlockRemoved(block_hashes=hashes, medium=medium, group_idx=0))
    return found


def _ours(label: str, theirs: list[str]) -> str:
    """A label of ours that vLLM has too."""
    return f"headwater_{label}" if label in theirs else label
