"""Every option Headwater reads, and the only place that reads the environment. Values are checked here, at the door."""

import enum
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from headwater.core.errors import InvalidConfig

MIN_LIMIT_BYTES: Final = 8 << 20
_UNITS: Final = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


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
        """Refuse what cannot work."""
        if self.limit_bytes is not None and self.limit_bytes < MIN_LIMIT_BYTES:
            raise InvalidConfig(f"limit_bytes must be at least {MIN_LIMIT_BYTES} (8 MiB), not {self.limit_bytes}")
        if not self.open_timeout_s > 0:
            raise InvalidConfig(f"open_timeout_s must be positive, not {self.open_timeout_s}")


def parse_bytes(text: str) -> int:
    """A number of bytes from text such as `4GiB`, `512 MiB` or `1048576`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS:
        raise InvalidConfig(f"{text!r} is not a size; write for example 512MiB or 4GiB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def default_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Where the commands look for a store: `HEADWATER_DIR`, or a folder in the user's cache directory."""
    if environ.get("HEADWATER_DIR"):
        return Path(environ["HEADWATER_DIR"])
    base = environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "headwater"
