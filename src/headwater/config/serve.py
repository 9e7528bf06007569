"""A server's options: what it listens on, the model, the tiers, the limits, its part in a fleet."""

import enum
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, cast
from urllib.parse import urlsplit

from headwater.config.cache import TierConfig
from headwater.config.checks import (
    is_loopback,
    require_count,
    require_hosts,
    require_pin_share,
    require_seconds,
    require_url,
)
from headwater.config.environment import PD_VIA, POOL_WAY, default_node
from headwater.config.residency import ResidencyConfig, check_index_only
from headwater.config.stores import MIN_LIMIT_BYTES, CacheTiers, pool_kind
from headwater.core.errors import InvalidConfig
from headwater.core.node_key import NodeKey
from headwater.core.role import Role

MIN_RECORD_BYTES: Final = 64 << 10
RECORD_BYTES: Final = 256 << 20  # of a recording, where nobody said more
DEFAULT_PORT: Final = 8000


class ExplainLevel(enum.StrEnum):
    """How much `/admin/requests/ID` tells of why a prompt missed: each tells what those before it do."""

    BLOCKS = "blocks"  # of the same salt, block by block: no more than timing tells
    TOKENS = "tokens"  # from which token on a text differs, and that it is stored under another salt
    TEXT = "text"  # a request's own text around that token


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig(CacheTiers):
    """A server: what it listens on, the model, the tiers, the limits. See `headwater serve --help`."""

    model: Path  # a Hugging Face directory
    name: str | None = None  # what clients call it; None: the directory's name
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT  # 0: any free one
    api_key: str | None = field(default=None, repr=False)  # None: nobody is asked for one
    device: str = "cpu"
    dtype: str | None = None  # None: the model's own
    kv: str = "auto"
    generation_config: bool = True  # whether the model's generation_config.json says what sampling is unless asked
    block_tokens: int = 16
    num_blocks: int | None = None  # of KV on the device; or
    device_bytes: int | None = None  # their bytes; neither: most of a GPU's free memory, a GiB of a CPU's
    residency: str | None = field(default=None, repr=False)  # where the index of who holds what is; None: none
    node: str | None = None  # what this process is called there; None: see `default_node`
    index_only: bool = False  # only the index is kept: see `check_index_only`
    role: Role = Role.MIXED
    node_key: NodeKey = field(default_factory=lambda: NodeKey.random(own=True))  # unless told, one that nobody knows
    routers: tuple[str, ...] = ()  # who is told that this node is here: http://HOST:PORT
    advertise: str | None = None  # where routers find this node; None: where it listens
    lease_s: float = 6.0  # routers believe for so long that it is here
    drain_s: float = 0.0  # at the end, for requests under way; then they are cancelled
    pd_via: str = POOL_WAY  # how KV goes from prefill to decode: see `pd_via`
    pd_timeout_s: float = (
        10.0  # for a prompt's KV: to the pool (then an error), or from it (then computed, or an error)
    )
    pd_recompute: bool = True  # whether a decode node may compute what it could not read
    probe_timeout_s: float = 0.5  # for stores to say what they have; then what they did not say is a miss
    load_timeout_s: float = 5.0
    max_body_bytes: int = 8 << 20
    max_prompt_chars: int | None = None  # None: as many as the context's tokens could stand for
    max_connections: int = 1024
    allowed_hosts: tuple[str, ...] = ()  # names in `Host` that a server on loopback without a key answers to
    max_running: int = 16
    max_waiting: int = 256
    pin_share: float = 0.1  # of the device's blocks, that pins may keep
    step_tokens: int = 2048
    request_timeout_s: float = 600.0  # from a request's first byte to the end of its answer
    policy: str = "value"  # which blocks leave the device first; see `CacheConfig`
    cache: bool = True  # False: nothing is reused from request to request, and there are no tiers
    record: Path | None = None  # a file of all that the cache's brain hears; None: nothing is recorded
    record_bytes: int = RECORD_BYTES  # how large it may get
    traces: str | None = None  # the OpenTelemetry collector that is told of requests; None: nobody is
    explain: ExplainLevel | None = None  # None: blocks; tokens on loopback without a key, where nobody else is

    def __post_init__(self) -> None:
        """Take paths as text, refuse what cannot work."""
        for name in ("model", "host_directory", "disk_directory", "record"):
            value: object = getattr(self, name)
            if isinstance(value, str):
                object.__setattr__(self, name, Path(value))
            elif not (isinstance(value, Path) or (value is None and name != "model")):
                raise InvalidConfig(f"{name} must be a path, not {value!r}")
        for name in (
            "block_tokens",
            "max_body_bytes",
            "max_connections",
            "max_running",
            "max_waiting",
            "step_tokens",
        ):
            require_count(name, getattr(self, name), 1)
        require_pin_share(self.pin_share)
        object.__setattr__(self, "allowed_hosts", require_hosts(self.allowed_hosts))
        for name in ("num_blocks", "device_bytes", "max_prompt_chars"):
            if getattr(self, name) is not None:
                require_count(name, getattr(self, name), 1)
        for name in ("host_bytes", "disk_bytes"):
            if getattr(self, name) is not None:
                require_count(name, getattr(self, name), MIN_LIMIT_BYTES)
        require_count("record_bytes", self.record_bytes, MIN_RECORD_BYTES)
        if self.traces is not None:
            require_url("--traces", self.traces)
        for name in ("request_timeout_s", "lease_s", "pd_timeout_s", "probe_timeout_s", "load_timeout_s"):
            require_seconds(name, getattr(self, name))
        require_count("port", self.port, 0)
        if self.port > 65535:
            raise InvalidConfig(f"port must be at most 65535, not {self.port}")
        for name in ("host", "device", "kv"):
            if not (isinstance(getattr(self, name), str) and getattr(self, name)):
                raise InvalidConfig(f"{name} must be text, not {getattr(self, name)!r}")
        if self.name is not None and not (self.name and self.name.isprintable()):
            raise InvalidConfig(f"a model's name must be printable, not {self.name!r}")
        self._check_role()
        self._check_cluster()
        self._check_explain()
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

    def _check_explain(self) -> None:
        own = is_loopback(self.host) and self.api_key is None and not self.in_fleet
        unsaid = ExplainLevel.TOKENS if own else ExplainLevel.BLOCKS
        try:
            object.__setattr__(self, "explain", ExplainLevel(unsaid if self.explain is None else self.explain))
        except ValueError as error:
            raise InvalidConfig(f"explain is one of {', '.join(ExplainLevel)}, not {self.explain!r}") from error

    def _check_cluster(self) -> None:
        for name in ("pool", "residency", "node"):
            if getattr(self, name) is not None and not (isinstance(getattr(self, name), str) and getattr(self, name)):
                raise InvalidConfig(f"{name} must be text, not {getattr(self, name)!r}")
        if self.index_only:
            check_index_only(residency=self.residency, pool=self.pool, cache=self.cache)
        if not self.cache and (self.pool or self.residency):
            raise InvalidConfig("without a cache there is nothing for a pool or a residency index: leave them out")
        if self.pool is not None:
            pool_kind(self.pool)
        if self.residency is not None:
            ResidencyConfig(url=self.residency, node=default_node() if self.node is None else self.node)
        elif self.node is not None and not self.routers:
            raise InvalidConfig("a node's name is for the residency index and routers: name one, or leave the name out")

    def _check_role(self) -> None:
        try:
            object.__setattr__(self, "role", Role(self.role))
        except ValueError as error:
            raise InvalidConfig(f"a role is one of {', '.join(Role)}, not {self.role!r}") from error
        if self.role is not Role.MIXED:
            self._check_handoff(f"a {self.role} node")
        object.__setattr__(self, "routers", tuple(self.routers))
        for url in (*self.routers, *(() if self.advertise is None else (self.advertise,))):
            require_url("an address of a router, or of this node for routers,", url)
            if self.advertise is None and not is_loopback(urlsplit(url).hostname or ""):
                self._check_reach(url)
        if self.advertise is not None and not self.routers:
            raise InvalidConfig("advertise says where a router finds this node: name the router, or leave it out")
        drain_s: object = self.drain_s
        if not (isinstance(drain_s, int | float) and 0 <= drain_s < float("inf")):
            raise InvalidConfig(f"drain_s must be a number of seconds, not {drain_s!r}")
        if self.routers and not re.fullmatch(r"[!-~]{1,200}", default_node() if self.node is None else self.node):
            raise InvalidConfig(f"a node's name is printable ASCII without spaces, not {self.node!r}")
        if self.routers and self.lease_s > 3600:
            raise InvalidConfig(f"a lease is at most an hour, not {self.lease_s} s")
        if not isinstance(cast(object, self.node_key), NodeKey):
            raise InvalidConfig("node_key must be a NodeKey")
        if self.in_fleet:
            places = (self.host, *self.routers, *(() if self.advertise is None else (self.advertise,)))
            require_node_key(self.node_key, *places)

    def tier(self, name: str) -> TierConfig:
        """How the brain uses one store."""
        return TierConfig(name=name, probe_timeout_s=self.probe_timeout_s, load_timeout_s=self.load_timeout_s)

    @property
    def in_fleet(self) -> bool:
        """Whether this server works for routers."""
        return bool(self.routers) or self.role is not Role.MIXED

    def _check_reach(self, router: str) -> None:
        """A router on another machine has to find this node."""
        if self.host in ("0.0.0.0", "::") or is_loopback(self.host):  # noqa: S104  nothing is bound here
            raise InvalidConfig(
                f"the router at {router} cannot find a node at {self.host}: say --advertise http://HOST:PORT, with a "
                "name or address of this machine, and listen there"
            )

    def _check_handoff(self, who: str) -> None:
        if self.pd_via != POOL_WAY:
            raise InvalidConfig(
                f"{self.pd_via!r} is no way from prefill to decode; there is only one yet: set {PD_VIA}={POOL_WAY}"
            )
        if self.index_only:
            raise InvalidConfig(
                f"{who} moves KV through the pool, and index-only mode moves none: leave one of them out"
            )
        if not self.cache:
            raise InvalidConfig(f"{who} needs its cache, to hand KV over: leave --no-cache out, or the role")
        if self.pool is None:
            raise InvalidConfig(
                f"{who} hands KV over through a pool, and none is named: say --pool URL (or HEADWATER_POOL), the same "
                "for prefill and decode"
            )


def require_node_key(key: NodeKey, *places: str) -> None:
    """Raise InvalidConfig if a fleet that was given no key reaches beyond loopback. `places` are hosts or URLs."""
    for place in places if key.own else ():
        host = (urlsplit(place).hostname or "") if "://" in place else place
        if not is_loopback(host):
            raise InvalidConfig(
                f"without a node key routers and nodes are on loopback only, and {place} is not: start all of them "
                "with the same --node-key-file (or HEADWATER_NODE_KEY)"
            )
