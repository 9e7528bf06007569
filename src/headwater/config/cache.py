"""What the brain has to know: slots, tiers, when blocks are written where. Values; nothing here needs a machine."""

import enum
from dataclasses import dataclass

from headwater.config.checks import require_count, require_pin_share, require_seconds
from headwater.core.errors import InvalidConfig


class SaveWhen(enum.StrEnum):
    """When a finished block is written to a store."""

    COMMIT = "commit"  # as soon as it is finished
    HITS = "hits"  # when it has been hit so often (`save_after_hits`)
    EVICTION = "eviction"  # when it is among the next to leave the device
    NEVER = "never"  # the store is only read


@dataclass(frozen=True, slots=True, kw_only=True)
class TierConfig:
    """How the cache uses one store. The order in `CacheConfig.tiers` is their order of speed."""

    name: str
    save: SaveWhen = SaveWhen.COMMIT
    save_after_hits: int = 1
    probe_timeout_s: float = 0.5
    load_timeout_s: float = 5.0
    save_timeout_s: float = 30.0
    max_queued_bytes: int = 1 << 30  # of blocks that wait to be written; what comes on top is dropped, and counted
    max_queued_s: float = 10.0  # the same, by the measured speed of writing
    breaker_failures: int = 3  # calls in a row that fail before the store is left alone
    breaker_pause_s: float = 1.0  # until one call tries again; doubles each time, up to four seconds

    def __post_init__(self) -> None:
        """Take plain values where they are clear, refuse what cannot work."""
        try:
            object.__setattr__(self, "save", SaveWhen(self.save))
        except ValueError as error:
            raise InvalidConfig(f"save is one of {', '.join(SaveWhen)}, not {self.save!r}") from error
        if not self.name or self.name == "device" or not self.name.isidentifier():
            raise InvalidConfig(f"a tier's name is a word other than 'device', not {self.name!r}")
        for name in ("save_after_hits", "max_queued_bytes", "breaker_failures"):
            require_count(name, getattr(self, name), 1)
        for name in ("probe_timeout_s", "load_timeout_s", "save_timeout_s", "max_queued_s", "breaker_pause_s"):
            require_seconds(name, getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """What the brain has to know."""

    num_slots: int
    block_tokens: int
    block_bytes: int  # of a block on the device
    tiers: tuple[TierConfig, ...] = ()
    policy: str = "value"
    prefetch: bool = True  # bring what a waiting request needs from slower stores to the fastest
    pin_share: float = 0.1  # of the slots, that pins may keep
    ghosts: int | None = None  # evicted blocks that are remembered; None: four times the slots
    weigh_cost: bool = False  # whether `value` keeps deep blocks, dear to compute, longer. See docs/LOG.md: no gain yet
    compute_base_s: float = 0.0  # cost of computing a block until it is measured; see `events.Paced`
    compute_slope_s: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        require_count("num_slots", self.num_slots, 1)
        require_count("block_tokens", self.block_tokens, 1)
        require_count("block_bytes", self.block_bytes, 1)
        if self.ghosts is not None:
            require_count("ghosts", self.ghosts, 0)
        object.__setattr__(self, "tiers", tuple(self.tiers))
        names = [tier.name for tier in self.tiers]
        if len(set(names)) != len(names):
            raise InvalidConfig(f"two tiers have one name: {', '.join(names)}")
        if len(names) > 8:
            raise InvalidConfig(f"at most 8 tiers, not {len(names)}")
        require_pin_share(self.pin_share)
        for name in ("compute_base_s", "compute_slope_s"):
            value: object = getattr(self, name)
            if not (isinstance(value, int | float) and 0 <= value < float("inf")):
                raise InvalidConfig(f"{name} must be a number of seconds, not {value!r}")
