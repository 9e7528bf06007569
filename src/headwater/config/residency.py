"""How a node tells the cluster what it holds, and where that index is."""

import re
from dataclasses import dataclass, field
from typing import Final, cast

from headwater.config.checks import require_count, require_seconds
from headwater.config.environment import INDEX_ONLY, default_node
from headwater.core.errors import InvalidConfig

MEMORY_URL: Final = "memory:"  # of a residency index in this process


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidencyConfig:
    """How a node tells the cluster what it holds, and where the index is. See docs/RESIDENCY.md."""

    url: str  # redis://HOST:PORT, rediss:// or unix:// for a cluster; `memory:` for an index in this process
    node: str = field(default_factory=lambda: default_node())  # one name per process
    lease_s: float = 15.0  # who is silent for so long is taken for dead
    linger_s: float = 0.02  # changes that come within this go together
    apply_timeout_s: float = 2.0  # for one update
    round_every_s: float = 1800.0  # everything is said again
    audit_every_s: float = 60.0  # this node's stores are asked what they hold
    max_blocks: int = 1 << 20  # that are written down here, besides those on the device
    prefix: str = "headwater:residency:"  # of all keys in a Redis server

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        url, node, linger_s, prefix = cast(tuple[object, ...], (self.url, self.node, self.linger_s, self.prefix))
        if not (isinstance(url, str) and (url == MEMORY_URL or url.startswith(("redis://", "rediss://", "unix://")))):
            shown = str(url).partition("//")[0]  # it may hold a password
            raise InvalidConfig(f"a residency index is at redis://, rediss://, unix:// or memory:, not {shown!r}")
        if not (isinstance(node, str) and re.fullmatch(r"[!-~]{1,200}", node)):
            raise InvalidConfig(f"a node's name is printable ASCII without spaces, not {node!r}")
        for name in ("lease_s", "apply_timeout_s", "round_every_s", "audit_every_s"):
            require_seconds(name, getattr(self, name))
        if not (isinstance(linger_s, int | float) and 0 <= linger_s <= 1):
            raise InvalidConfig(f"linger_s must be at most a second, not {linger_s!r}")
        if not self.apply_timeout_s <= self.lease_s / 3 <= 3600:
            raise InvalidConfig(f"a lease of {self.lease_s} s needs room for three updates of {self.apply_timeout_s} s")
        if self.round_every_s < self.lease_s:
            raise InvalidConfig(f"round_every_s must be at least the lease, not {self.round_every_s}")
        require_count("max_blocks", self.max_blocks, 1)
        if not (isinstance(prefix, str) and prefix):
            raise InvalidConfig(f"prefix must be text, not {prefix!r}")


def check_index_only(*, residency: str | None, pool: str | None, cache: bool = True) -> None:
    """Raise InvalidConfig where index-only mode makes no sense, and say what to change."""
    mode = f"index-only mode ({INDEX_ONLY}=1)"
    if not cache:
        raise InvalidConfig(f"{mode} tells the cluster what the cache holds: it needs a cache")
    if residency is None:
        raise InvalidConfig(f"{mode} keeps the residency index and nothing else: say where that is (a residency URL)")
    if residency == MEMORY_URL:
        raise InvalidConfig(f"{mode} is for others to read: an index in this process ({MEMORY_URL}) is not")
    if pool is not None:
        raise InvalidConfig(f"{mode} sends no data to a pool and reads none: leave the pool out, or the mode")
