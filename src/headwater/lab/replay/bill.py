"""What a replay is given and what it hands over: plain values, and how they look as JSON. Nothing runs here."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from headwater.cache.placement import ComputeCost
from headwater.config.cache import CacheConfig, TierConfig
from headwater.core.errors import InvalidConfig
from headwater.layout.gqa import gqa_layout
from headwater.layout.spec import DType
from headwater.policy import policy_by_name

STORE: Final = "store"  # the one tier behind the device, where nobody asks for more
#: What waits to be written is bounded by seconds alone. The limit in bytes is for one engine's memory; a trace may be
#: of several, and its blocks are large and are finished many in one moment.
_MOST_QUEUED: Final = 1 << 50
LAYOUT: Final = "32 layers, 8 KV heads of 128, BF16 (Llama 3.1 8B)"


def default_block_bytes(block_tokens: int) -> int:
    """Bytes of a block of `LAYOUT`: 128 KiB a token."""
    return gqa_layout(
        num_layers=32, num_kv_heads=8, head_dim=128, block_tokens=block_tokens, dtype=DType.BF16
    ).page_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayStore:
    """A store behind the device, written through."""

    name: str
    blocks: int
    gbs: float | None = None  # how fast it reads, and writes; None: at once

    def __post_init__(self) -> None:
        """Refuse what cannot be replayed."""
        if self.blocks < 1:
            raise InvalidConfig(f"a store has no {self.blocks} blocks")
        if self.gbs is not None and not 0 < self.gbs < float("inf"):
            raise InvalidConfig(f"a store's speed is a positive number of GB/s, not {self.gbs}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySetup:
    """What a trace is replayed on."""

    policy: str
    blocks: int  # of the device
    stores: tuple[ReplayStore, ...] = ()  # behind it, in the order of their speed
    block_bytes: int | None = None  # None: by `LAYOUT`
    compute_base_s: float = 0.0  # what a block costs to compute; 0 and 0: nobody knows
    compute_slope_s: float = 0.0  # and more for each block before it
    step_blocks: int = 0  # that are computed, and told, at a time, each step taking its time; 0: computing takes none

    def __post_init__(self) -> None:
        """Refuse what cannot be replayed."""
        if self.blocks < 1:
            raise InvalidConfig(f"a device has at least one block, not {self.blocks}")
        if self.step_blocks < 0:
            raise InvalidConfig(f"a step has no {self.step_blocks} blocks")
        policy_by_name(self.policy)

    @property
    def cost(self) -> ComputeCost:
        """What blocks take to compute."""
        return ComputeCost(self.compute_base_s, self.compute_slope_s)

    @property
    def store_blocks(self) -> int:
        """Blocks behind the device, in all stores together."""
        return sum(store.blocks for store in self.stores)

    @property
    def costs(self) -> bool:
        """Whether it is known what computing costs."""
        return self.compute_base_s > 0 or self.compute_slope_s > 0

    def cache_config(self, block_tokens: int, *, most_blocks: int | None = None) -> CacheConfig:
        """What the brain is told. `most_blocks`: all that will be requested; more slots would stay empty."""
        return CacheConfig(
            num_slots=self.blocks if most_blocks is None else max(1, min(self.blocks, most_blocks)),
            block_tokens=block_tokens,
            block_bytes=default_block_bytes(block_tokens) if self.block_bytes is None else self.block_bytes,
            tiers=tuple(TierConfig(name=store.name, max_queued_bytes=_MOST_QUEUED) for store in self.stores),
            policy=self.policy,
            compute_base_s=self.compute_base_s,
            compute_slope_s=self.compute_slope_s,
        )


@dataclass(slots=True, kw_only=True)
class TierUse:
    """What one tier did. Bytes are those copied from one tier to another; computing a block copies none."""

    name: str
    blocks: int
    hit_blocks: int = 0
    evicted_blocks: int = 0
    read_bytes: int = 0
    written_bytes: int = 0


@dataclass(slots=True, kw_only=True)
class ReplayOutcome:
    """What became of a trace."""

    setup: ReplaySetup
    num_requests: int = 0
    requested_blocks: int = 0
    cut_requests: int = 0  # those of more blocks than the device has
    tiers: list[TierUse] = field(default_factory=list)
    missed_blocks: Counter[str] = field(default_factory=Counter)  # by reason
    dropped_blocks: Counter[str] = field(default_factory=Counter)  # not written to the store, by reason
    saved_s: float = 0.0  # of computing, less the waiting for loads
    waited_s: float = 0.0
    elapsed_s: float = 0.0  # of real time

    @property
    def hit_blocks(self) -> int:
        """Blocks that did not have to be computed."""
        return sum(tier.hit_blocks for tier in self.tiers)

    @property
    def hit_ratio(self) -> float:
        """Hit blocks over requested blocks."""
        return self.hit_blocks / self.requested_blocks if self.requested_blocks else 0.0

    @property
    def requests_per_s(self) -> float:
        """How fast the replay itself was."""
        return self.num_requests / self.elapsed_s if self.elapsed_s else 0.0

    def document(self) -> dict[str, Any]:
        """All of it as plain JSON values."""
        setup = self.setup
        total = max(self.requested_blocks, 1)
        return {
            "policy": setup.policy,
            "blocks": setup.blocks,
            "store_blocks": setup.store_blocks,
            "hit_ratio": round(self.hit_ratio, 6),
            "num_requests": self.num_requests,
            "requested_blocks": self.requested_blocks,
            "hit_blocks": self.hit_blocks,
            "tiers": [asdict(tier) | {"hit_ratio": round(tier.hit_blocks / total, 6)} for tier in self.tiers],
            "missed_blocks": dict(self.missed_blocks),
            "dropped_blocks": dict(self.dropped_blocks),
            "cut_requests": self.cut_requests,
            "saved_s": round(self.saved_s, 3) if setup.costs else None,
            "waited_s": round(self.waited_s, 3),
            "elapsed_s": round(self.elapsed_s, 3),
            "requests_per_s": round(self.requests_per_s, 1),
        }
