"""Every option Headwater reads, and the only place that reads the environment. Values are checked here, at the door."""

import enum
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from headwater.core.errors import InvalidConfig

MIN_LIMIT_BYTES: Final = 8 << 20


class Durability(enum.StrEnum):
    """What a stored page survives. See docs/STORES.md for what is synced when."""

    PROCESS = "process"  # kill -9 and a clean reboot; a power cut costs what the kernel had not written
    POWER = "power"  # a power cut as well: pages and index are synced before put() answers


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalStoreConfig:
    """How to open the store in one directory."""

    directory: Path
    limit_bytes: int | None = None  # all bytes of the directory, index included; None: the directory's own limit
    durability: Durability = Durability.PROCESS
    policy: str | None = None  # None: the directory's own, LRU for a new one
    prefault: bool = False  # map all memory at open (tmpfs only)
    open_timeout_s: float = 120.0  # for others who are just coming in; making a large store takes its time

    def __post_init__(self) -> None:
        """Take plain values where they are clear (`"power"`, a path as text), refuse what cannot work."""
        try:
            object.__setattr__(self, "directory", Path(self.directory))
            object.__setattr__(self, "durability", Durability(self.durability))
        except (TypeError, ValueError) as error:
            raise InvalidConfig(f"{error}; durability is one of {', '.join(Durability)}") from error
        limit: object = self.limit_bytes
        if limit is not None and not (isinstance(limit, int) and MIN_LIMIT_BYTES <= limit < 1 << 62):
            raise InvalidConfig(f"limit_bytes must be a whole number of at least {MIN_LIMIT_BYTES}, not {limit!r}")
        _require_seconds("open_timeout_s", self.open_timeout_s)


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
    look_timeout_s: float = 0.5
    load_timeout_s: float = 5.0
    save_timeout_s: float = 30.0
    max_queued_bytes: int = 1 << 30  # of blocks that wait to be written; what comes on top is dropped, and counted
    max_queued_s: float = 10.0  # the same, by the measured speed of writing
    breaker_failures: int = 3  # calls in a row that fail before the store is left alone
    breaker_pause_s: float = 1.0  # until one call tries again; doubles each time, up to a minute

    def __post_init__(self) -> None:
        """Take plain values where they are clear, refuse what cannot work."""
        try:
            object.__setattr__(self, "save", SaveWhen(self.save))
        except ValueError as error:
            raise InvalidConfig(f"save is one of {', '.join(SaveWhen)}, not {self.save!r}") from error
        if not self.name or self.name == "device" or not self.name.isidentifier():
            raise InvalidConfig(f"a tier's name is a word other than 'device', not {self.name!r}")
        for name in ("save_after_hits", "max_queued_bytes", "breaker_failures"):
            _require_count(name, getattr(self, name), 1)
        for name in ("look_timeout_s", "load_timeout_s", "save_timeout_s", "max_queued_s", "breaker_pause_s"):
            _require_seconds(name, getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """What the brain has to know."""

    num_slots: int
    block_tokens: int
    block_bytes: int  # of a block on the device
    tiers: tuple[TierConfig, ...] = ()
    policy: str = "value"
    prefetch: bool = True  # bring what a waiting request needs from slower stores to the fastest
    ghosts: int | None = None  # keys of evicted blocks that are remembered; None: four times the slots
    compute_base_s: float = 0.0  # cost of computing a block until it is measured; see `events.Paced`
    compute_slope_s: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        _require_count("num_slots", self.num_slots, 1)
        _require_count("block_tokens", self.block_tokens, 1)
        _require_count("block_bytes", self.block_bytes, 1)
        if self.ghosts is not None:
            _require_count("ghosts", self.ghosts, 0)
        object.__setattr__(self, "tiers", tuple(self.tiers))
        names = [tier.name for tier in self.tiers]
        if len(set(names)) != len(names):
            raise InvalidConfig(f"two tiers have one name: {', '.join(names)}")
        if len(names) > 8:
            raise InvalidConfig(f"at most 8 tiers, not {len(names)}")
        for name in ("compute_base_s", "compute_slope_s"):
            value: object = getattr(self, name)
            if not (isinstance(value, int | float) and 0 <= value < float("inf")):
                raise InvalidConfig(f"{name} must be a number of seconds, not {value!r}")


def _require_count(name: str, value: object, least: int) -> None:
    if not (isinstance(value, int) and not isinstance(value, bool) and least <= value < 1 << 62):
        raise InvalidConfig(f"{name} must be a whole number of at least {least}, not {value!r}")


def _require_seconds(name: str, value: object) -> None:
    if not (isinstance(value, int | float) and 0 < value < float("inf")):
        raise InvalidConfig(f"{name} must be a positive number of seconds, not {value!r}")


def default_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Where the commands look for a store: `HEADWATER_DIR`, or a folder in the user's cache directory."""
    if environ.get("HEADWATER_DIR"):
        return Path(environ["HEADWATER_DIR"])
    base = environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "headwater"
