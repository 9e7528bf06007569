"""Every option Headwater reads, and the only place that reads the environment. Values are checked here, at the door."""

import enum
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from headwater.core.errors import InvalidConfig

MIN_LIMIT_BYTES: Final = 8 << 20
DEFAULT_PORT: Final = 8000
HOST_BYTES: Final = 256 << 20  # of a host tier that a server makes, and
DISK_BYTES: Final = 1 << 30  # of a disk tier, where nobody said more


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
    ghosts: int | None = None  # evicted blocks that are remembered; None: four times the slots
    weigh_cost: bool = False  # whether `value` keeps deep blocks, dear to compute, longer. See docs/LOG.md: no gain yet
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """A server: what it listens on, the model, the tiers, the limits. See `headwater serve --help`."""

    model: Path  # a Hugging Face directory
    name: str | None = None  # what clients call it; None: the directory's name
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT  # 0: any free one
    api_key: str | None = field(default=None, repr=False)  # None: nobody is asked for one
    device: str = "cpu"
    dtype: str | None = None  # None: the model's own
    kv: str = "auto"
    block_tokens: int = 16
    num_blocks: int | None = None  # of KV on the device; or
    device_bytes: int | None = None  # their bytes; neither: most of a GPU's free memory, a GiB of a CPU's
    host_directory: Path | None = None  # None: no host tier
    host_bytes: int | None = None  # None: the directory's own limit, HOST_BYTES for a new one
    disk_directory: Path | None = None
    disk_bytes: int | None = None
    max_body_bytes: int = 8 << 20
    max_running: int = 16
    max_waiting: int = 256
    step_tokens: int = 2048
    request_timeout_s: float = 600.0  # from a request's arrival to the end of its answer
    cache: bool = True  # False: nothing is reused from request to request, and there are no tiers

    def __post_init__(self) -> None:
        """Take paths as text, refuse what cannot work."""
        for name in ("model", "host_directory", "disk_directory"):
            value: object = getattr(self, name)
            if isinstance(value, str):
                object.__setattr__(self, name, Path(value))
            elif not (isinstance(value, Path) or (value is None and name != "model")):
                raise InvalidConfig(f"{name} must be a path, not {value!r}")
        for name in ("block_tokens", "max_body_bytes", "max_running", "max_waiting", "step_tokens"):
            _require_count(name, getattr(self, name), 1)
        for name in ("num_blocks", "device_bytes"):
            if getattr(self, name) is not None:
                _require_count(name, getattr(self, name), 1)
        for name in ("host_bytes", "disk_bytes"):
            if getattr(self, name) is not None:
                _require_count(name, getattr(self, name), MIN_LIMIT_BYTES)
        _require_seconds("request_timeout_s", self.request_timeout_s)
        _require_count("port", self.port, 0)
        if self.port > 65535:
            raise InvalidConfig(f"port must be at most 65535, not {self.port}")
        for name in ("host", "device", "kv"):
            if not (isinstance(getattr(self, name), str) and getattr(self, name)):
                raise InvalidConfig(f"{name} must be text, not {getattr(self, name)!r}")
        if self.name is not None and not (self.name and self.name.isprintable()):
            raise InvalidConfig(f"a model's name must be printable, not {self.name!r}")
        if self.num_blocks is not None and self.device_bytes is not None:
            raise InvalidConfig("say num_blocks or device_bytes, not both")
        if self.host_directory is not None and self.host_directory == self.disk_directory:
            raise InvalidConfig(
                f"the host tier and the disk tier need directories of their own, not {self.host_directory}"
            )
        if not self.cache and (self.host_directory is not None or self.disk_directory is not None):
            raise InvalidConfig("a server without a cache has no host tier and no disk tier")
        if self.api_key is not None and not re.fullmatch("[!-~]+", self.api_key):
            raise InvalidConfig("an API key is printable ASCII without spaces, and not empty")


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


def default_host_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Where `headwater serve` keeps its host tier: `HEADWATER_HOST_DIR`, or a folder of the user's on tmpfs."""
    return Path(environ.get("HEADWATER_HOST_DIR") or f"/dev/shm/headwater-{os.geteuid()}")  # noqa: S108  checked when opened


def default_api_key(environ: Mapping[str, str] = os.environ) -> str | None:
    """The key that clients must show: `HEADWATER_API_KEY`; none where that is empty or missing."""
    return environ.get("HEADWATER_API_KEY") or None
