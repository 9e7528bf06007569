"""What the connector is told: `kv_connector_extra_config`, with the names of our own `ServeConfig`, checked at start.

Without any option: a host tier on tmpfs and a disk tier, in the user's own folders, of sizes that fit the machine. All
processes of a user on a node share them, so data-parallel replicas do too. What a directory was made with counts: sizes
are for new ones.
"""

import enum
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from headwater.config.cache import TierConfig
from headwater.config.environment import (
    default_host_directory,
    default_node,
    default_pool,
    default_residency,
    default_vllm_directory,
)
from headwater.config.residency import ResidencyConfig
from headwater.config.serve import MIN_RECORD_BYTES, RECORD_BYTES
from headwater.config.stores import MIN_LIMIT_BYTES, CacheTiers, pool_kind
from headwater.core.errors import InvalidConfig

_HOST_SHARE: Final = 8  # one in so many bytes of the machine's memory, and
_TMPFS_SHARE: Final = 4  # of the file system's that the host tier lies on, whichever is less
_DISK_SHARE: Final = 16  # of the disk
_MOST_DISK: Final = 256 << 30
_ANY_BYTES: Final = (1 << 62) - 1
AUTO_LAYOUT: Final = "auto"


class LoadMode(enum.StrEnum):
    """When a request's blocks are loaded."""

    ASYNC = "async"  # beside other requests' steps; it starts when they are there
    SYNC = "sync"  # at the beginning of its first step, which waits


class LoadWhen(enum.StrEnum):
    """Which hits are loaded."""

    PAYS = "pays"  # those for which loading is expected to be clearly faster than computing, by what was measured
    ALWAYS = "always"


class OnFailure(enum.StrEnum):
    """What becomes of a request whose blocks could not be loaded after all."""

    RECOMPUTE = "recompute"
    FAIL = "fail"


class ExecutorKind(enum.StrEnum):
    """Where blocks are moved."""

    AUTO = "auto"  # in a process of its own where vLLM's KV can be mapped there, which is on a GPU; or else in threads
    PROCESS = "process"  # vLLM's interpreter has nothing to do with it
    THREADS = "threads"  # of vLLM's worker


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorConfig(CacheTiers):
    """One vLLM engine's cache. New tiers whose size nobody said get one that fits the machine."""

    host_directory: Path | None = field(default_factory=default_host_directory)
    disk_directory: Path | None = field(default_factory=default_vllm_directory)
    pool: str | None = field(default_factory=default_pool, repr=False)
    residency: str | None = field(default_factory=default_residency, repr=False)
    node: str | None = None
    load: LoadMode = LoadMode.ASYNC
    load_when: LoadWhen | None = None  # None: a consumer (`kv_role`) always, others when it pays
    on_failed_load: OnFailure = OnFailure.RECOMPUTE
    probe_timeout_s: float = 0.5  # for stores to say what they have; then what they did not say is a miss
    load_timeout_s: float = 5.0
    save_timeout_s: float = 30.0
    free_timeout_s: float = 5.0  # after its end a request's blocks are kept for what is being saved, at most so long
    executor: ExecutorKind = ExecutorKind.AUTO
    threads_per_store: int = 2
    min_load_blocks: int = 1  # fewer are computed
    layout: str | None = AUTO_LAYOUT  # of vLLM's KV, by its name; auto: a block is one run if it can; None: vLLM's own
    switch_interval_s: float | None = 0.0005  # how long our threads may keep vLLM's interpreter; None: as it is
    record: Path | None = None  # all that the brain hears is written to this file, with the process' number behind it
    record_bytes: int = RECORD_BYTES  # how large it may get

    def __post_init__(self) -> None:
        """Take plain JSON, refuse what cannot work."""
        for name in ("host_directory", "disk_directory", "record"):
            value: object = getattr(self, name)
            if isinstance(value, str) and value:
                object.__setattr__(self, name, Path(value).expanduser())
            elif not (isinstance(value, Path) or value is None):
                raise InvalidConfig(f"{name} must be a path, or null for none, not {value!r}")
        if self.host_directory is not None and self.host_directory == self.disk_directory:
            raise InvalidConfig(f"host tier and disk tier need directories of their own, not {self.host_directory}")
        for name in ("host_bytes", "disk_bytes"):
            value = getattr(self, name)
            if value is not None:
                _require_whole(name, value, MIN_LIMIT_BYTES)
        for name in ("threads_per_store", "min_load_blocks"):
            _require_whole(name, getattr(self, name), 1)
        _require_whole("record_bytes", self.record_bytes, MIN_RECORD_BYTES)
        for name, kind in (
            ("load", LoadMode),
            ("load_when", LoadWhen),
            ("on_failed_load", OnFailure),
            ("executor", ExecutorKind),
        ):
            if getattr(self, name) is None and name == "load_when":
                continue
            try:
                object.__setattr__(self, name, kind(getattr(self, name)))
            except ValueError as error:
                raise InvalidConfig(f"{name} is one of {', '.join(kind)}, not {getattr(self, name)!r}") from error
        for name in ("pool", "residency", "node", "layout"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise InvalidConfig(f"{name} must be text, not {value!r}")
        if self.pool is not None:
            pool_kind(self.pool)
        if self.residency is not None:
            ResidencyConfig(url=self.residency, node=default_node() if self.node is None else self.node)
        elif self.node is not None:
            raise InvalidConfig("a node's name is for the residency index: say where that is, or leave the name out")
        for seconds in (self.free_timeout_s, *([] if self.switch_interval_s is None else [self.switch_interval_s])):
            TierConfig(name="free", probe_timeout_s=seconds)  # seconds are checked there
        self.tier("host")  # it checks the other seconds

    def tier(self, name: str) -> TierConfig:
        """How the brain uses one store.

        What waits to be written is bounded by time alone: it has no memory but vLLM's own blocks, of which vLLM has so
        many, and which it gets back when it needs them.
        """
        return TierConfig(
            name=name,
            probe_timeout_s=self.probe_timeout_s,
            load_timeout_s=self.load_timeout_s,
            save_timeout_s=self.save_timeout_s,
            max_queued_bytes=_ANY_BYTES,
            max_queued_s=self.save_timeout_s,
        )


def read_config(extra: Mapping[str, Any]) -> ConnectorConfig:
    """The options of `kv_connector_extra_config`. Raises InvalidConfig that names what is wrong."""
    known = {item.name for item in fields(ConnectorConfig)}
    unknown = sorted(set(extra) - known)
    if unknown:
        raise InvalidConfig(
            f"kv_connector_extra_config: there is no option {', '.join(map(repr, unknown))}; "
            f"there are {', '.join(sorted(known))}"
        )
    return ConnectorConfig(**extra)


def machine_host_bytes(directory: Path) -> int:
    """How large a new host tier is, from what the machine has: the same for every process that asks."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(MIN_LIMIT_BYTES, min(memory // _HOST_SHARE, _total_bytes(directory) // _TMPFS_SHARE))


def machine_disk_bytes(directory: Path) -> int:
    """How large a new disk tier is."""
    return max(MIN_LIMIT_BYTES, min(_total_bytes(directory) // _DISK_SHARE, _MOST_DISK))


def _total_bytes(directory: Path) -> int:
    """Of the file system that a directory lies on, or will."""
    there = next(path for path in (directory, *directory.parents) if path.exists())
    return shutil.disk_usage(there).total


def _require_whole(name: str, value: object, least: int) -> None:
    if not (isinstance(value, int) and not isinstance(value, bool) and least <= value < 1 << 62):
        raise InvalidConfig(f"{name} must be a whole number of at least {least}, not {value!r}")
