"""How a store in a directory is opened, and which sort of pool an address is of."""

import enum
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from headwater.config.checks import require_seconds
from headwater.core.errors import InvalidConfig

MIN_LIMIT_BYTES: Final = 8 << 20
HOST_BYTES: Final = 256 << 20  # of a host tier that is made, and
DISK_BYTES: Final = 1 << 30  # of a disk tier, where nobody said more
MOST_READERS: Final = 256


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
    readers: int | None = None  # threads that read from a disk at once, for one call; None: as many as cores, 4 to 16

    def __post_init__(self) -> None:
        """Take plain values where they are clear (`"power"`, a path as text), refuse what cannot work."""
        try:
            object.__setattr__(self, "directory", Path(self.directory).absolute())  # a process may change its own
            object.__setattr__(self, "durability", Durability(self.durability))
        except (TypeError, ValueError) as error:
            raise InvalidConfig(f"{error}; durability is one of {', '.join(Durability)}") from error
        if "\0" in str(self.directory):
            raise InvalidConfig(f"{str(self.directory)!r} is no name of a directory")
        limit: object = self.limit_bytes
        if limit is not None and not (isinstance(limit, int) and MIN_LIMIT_BYTES <= limit < 1 << 62):
            raise InvalidConfig(f"limit_bytes must be a whole number of at least {MIN_LIMIT_BYTES}, not {limit!r}")
        require_seconds("open_timeout_s", self.open_timeout_s)
        readers: object = self.readers
        if readers is not None and not (isinstance(readers, int) and 1 <= readers <= MOST_READERS):
            raise InvalidConfig(f"readers must be a whole number from 1 to {MOST_READERS}, not {readers!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheTiers:
    """Where the tiers are, and how large. What is None is left out, or has its default size."""

    host_directory: Path | None = None  # on tmpfs, as /dev/shm is
    host_bytes: int | None = None  # None: the directory's own limit, HOST_BYTES for a new one
    disk_directory: Path | None = None
    disk_bytes: int | None = None  # None: the directory's own limit, DISK_BYTES for a new one
    pool: str | None = field(default=None, repr=False)  # mooncake://, redis:// or local:DIR, shared with others


def pool_kind(url: str) -> str:
    """Which sort of pool an address is of: mooncake, redis or local. Raises InvalidConfig."""
    kinds = {
        "mooncake://": "mooncake",
        "redis://": "redis",
        "rediss://": "redis",
        "unix://": "redis",
        "local:": "local",
    }
    for start, kind in kinds.items():
        if url.startswith(start) and len(url) > len(start):
            return kind
    shown = url.partition("//")[0]  # it may hold a password
    raise InvalidConfig(f"a pool is at mooncake://HOST:PORT, redis://HOST:PORT or local:DIR, not {shown!r}")
