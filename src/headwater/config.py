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
        timeout: object = self.open_timeout_s
        if not (isinstance(timeout, int | float) and 0 < timeout < float("inf")):
            raise InvalidConfig(f"open_timeout_s must be a positive number of seconds, not {timeout!r}")


def default_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Where the commands look for a store: `HEADWATER_DIR`, or a folder in the user's cache directory."""
    if environ.get("HEADWATER_DIR"):
        return Path(environ["HEADWATER_DIR"])
    base = environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "headwater"
