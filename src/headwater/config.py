"""Every option Headwater reads, and the only place that reads the environment. Values are checked here, at the door."""

import enum
import logging
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import urlsplit

from headwater.core.errors import InvalidConfig
from headwater.core.node_key import NodeKey
from headwater.core.role import Role

log: Final = logging.getLogger("headwater")

MIN_LIMIT_BYTES: Final = 8 << 20
MIN_RECORD_BYTES: Final = 64 << 10
RECORD_BYTES: Final = 256 << 20  # of a recording, where nobody said more
DEFAULT_PORT: Final = 8000
HOST_BYTES: Final = 256 << 20  # of a host tier that a server makes, and
DISK_BYTES: Final = 1 << 30  # of a disk tier, where nobody said more
MEMORY_URL: Final = "memory:"  # of a residency index in this process
INDEX_ONLY: Final = "HEADWATER_INDEX_ONLY"
INDEX_ONLY_ALIAS: Final = "FD_AS_ONLY_FLUSH"  # what FastDeploy's users know it by
PD_VIA: Final = "HEADWATER_PD_VIA"
PD_VIA_ALIAS: Final = "FD_PD_TRANSFER_VIA_STORAGE"  # the same
POOL_WAY: Final = "pool"  # how KV goes from prefill to decode: the only way yet


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
            object.__setattr__(self, "directory", Path(self.directory).absolute())  # a process may change its own
            object.__setattr__(self, "durability", Durability(self.durability))
        except (TypeError, ValueError) as error:
            raise InvalidConfig(f"{error}; durability is one of {', '.join(Durability)}") from error
        if "\0" in str(self.directory):
            raise InvalidConfig(f"{str(self.directory)!r} is no name of a directory")
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
            _require_count(name, getattr(self, name), 1)
        for name in ("probe_timeout_s", "load_timeout_s", "save_timeout_s", "max_queued_s", "breaker_pause_s"):
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
class WriteConfig:
    """How rows of blocks are cut into slices on their way to a pool, and back. `write_config` reads the environment."""

    slice_blocks: int = 500
    slice_timeout_s: float = 10.0  # or what is left of the total
    total_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        _require_count("slice_blocks", self.slice_blocks, 1)
        _require_seconds("slice_timeout_s", self.slice_timeout_s)
        _require_seconds("total_timeout_s", self.total_timeout_s)


# Our names first: if both are set, they win.
_WRITE_VARIABLES: Final[Mapping[str, tuple[str, str]]] = {
    "slice_blocks": ("HEADWATER_WRITE_SLICE_BLOCKS", "AS_WRITE_SLICE_BLOCK_NUM"),
    "slice_timeout_s": ("HEADWATER_WRITE_SLICE_TIMEOUT_S", "AS_WRITE_SLICE_TIMEOUT"),
    "total_timeout_s": ("HEADWATER_WRITE_TOTAL_TIMEOUT_S", "AS_WRITE_TOTAL_TIMEOUT"),
}


def write_config(
    environ: Mapping[str, str] = os.environ,
    *,
    slice_blocks: int | None = None,
    slice_timeout_s: float | None = None,
    total_timeout_s: float | None = None,
) -> WriteConfig:
    """Slices as the options say, where they are None as the environment does, else by default. Read once, at start.

    Raises InvalidConfig with the variable's name for 0, negative numbers and nonsense.
    """
    options = {"slice_blocks": slice_blocks, "slice_timeout_s": slice_timeout_s, "total_timeout_s": total_timeout_s}
    chosen: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    for name, variables in _WRITE_VARIABLES.items():
        found = [(variable, environ[variable]) for variable in variables if environ.get(variable)]
        if name in chosen or not found:
            continue
        (variable, text), *others = found
        for other, ignored in others:
            if ignored != text:
                log.warning("%s=%s counts, and %s=%s does not", variable, text, other, ignored)
        chosen[name] = _number(variable, text, whole=name == "slice_blocks")
    return WriteConfig(**chosen)


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
    generation_config: bool = True  # whether the model's generation_config.json says what sampling is unless asked
    block_tokens: int = 16
    num_blocks: int | None = None  # of KV on the device; or
    device_bytes: int | None = None  # their bytes; neither: most of a GPU's free memory, a GiB of a CPU's
    host_directory: Path | None = None  # None: no host tier
    host_bytes: int | None = None  # None: the directory's own limit, HOST_BYTES for a new one
    disk_directory: Path | None = None
    disk_bytes: int | None = None
    pool: str | None = field(default=None, repr=False)  # mooncake://, redis:// or local:DIR, shared; None: no pool tier
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
    step_tokens: int = 2048
    request_timeout_s: float = 600.0  # from a request's first byte to the end of its answer
    cache: bool = True  # False: nothing is reused from request to request, and there are no tiers
    record: Path | None = None  # a file of all that the cache's brain hears; None: nothing is recorded
    record_bytes: int = RECORD_BYTES  # how large it may get

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
            _require_count(name, getattr(self, name), 1)
        object.__setattr__(self, "allowed_hosts", require_hosts(self.allowed_hosts))
        for name in ("num_blocks", "device_bytes", "max_prompt_chars"):
            if getattr(self, name) is not None:
                _require_count(name, getattr(self, name), 1)
        for name in ("host_bytes", "disk_bytes"):
            if getattr(self, name) is not None:
                _require_count(name, getattr(self, name), MIN_LIMIT_BYTES)
        _require_count("record_bytes", self.record_bytes, MIN_RECORD_BYTES)
        for name in ("request_timeout_s", "lease_s", "pd_timeout_s", "probe_timeout_s", "load_timeout_s"):
            _require_seconds(name, getattr(self, name))
        _require_count("port", self.port, 0)
        if self.port > 65535:
            raise InvalidConfig(f"port must be at most 65535, not {self.port}")
        for name in ("host", "device", "kv"):
            if not (isinstance(getattr(self, name), str) and getattr(self, name)):
                raise InvalidConfig(f"{name} must be text, not {getattr(self, name)!r}")
        if self.name is not None and not (self.name and self.name.isprintable()):
            raise InvalidConfig(f"a model's name must be printable, not {self.name!r}")
        self._check_role()
        self._check_cluster()
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
            _require_seconds(name, getattr(self, name))
        if not (isinstance(linger_s, int | float) and 0 <= linger_s <= 1):
            raise InvalidConfig(f"linger_s must be at most a second, not {linger_s!r}")
        if not self.apply_timeout_s <= self.lease_s / 3 <= 3600:
            raise InvalidConfig(f"a lease of {self.lease_s} s needs room for three updates of {self.apply_timeout_s} s")
        if self.round_every_s < self.lease_s:
            raise InvalidConfig(f"round_every_s must be at least the lease, not {self.round_every_s}")
        _require_count("max_blocks", self.max_blocks, 1)
        if not (isinstance(prefix, str) and prefix):
            raise InvalidConfig(f"prefix must be text, not {prefix!r}")


def _require_count(name: str, value: object, least: int) -> None:
    if not (isinstance(value, int) and not isinstance(value, bool) and least <= value):
        raise InvalidConfig(f"{name} must be a whole number of at least {least}, not {value!r}")
    if value >= 1 << 62:
        raise InvalidConfig(f"{name} must be a whole number below 2**62, not {value!r}")


def _require_seconds(name: str, value: object) -> None:
    if not (isinstance(value, int | float) and 0 < value < float("inf")):
        raise InvalidConfig(f"{name} must be a positive number of seconds, not {value!r}")


def _number(variable: str, text: str, *, whole: bool) -> float:
    """A positive number from the environment. Raises InvalidConfig that names the variable."""
    try:
        plain = re.fullmatch(r"\s*[0-9.]+(e[-+]?[0-9]+)?\s*", text, re.IGNORECASE)  # no "inf", "nan", "1_000"
        value = (int if whole else float)(text) if plain else 0
    except ValueError:
        value = 0
    if not 0 < value < (1 << 62 if whole else float("inf")):
        kind = "whole number" if whole else "number of seconds"
        raise InvalidConfig(f"{variable} must be a positive {kind}, not {text!r}")
    return value


def cache_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Ours in the user's cache directory: models made here, digests of weights, stores in folders of their own."""
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headwater"


def default_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Where the commands look for a store: `HEADWATER_DIR`, or a folder of its own, which holds nothing else."""
    return Path(environ.get("HEADWATER_DIR") or cache_directory(environ) / "store")


def default_host_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Where `headwater serve` keeps its host tier: `HEADWATER_HOST_DIR`, or a folder of the user's on tmpfs."""
    return Path(environ.get("HEADWATER_HOST_DIR") or f"/dev/shm/headwater-{os.geteuid()}")  # noqa: S108  checked when opened


def default_pool_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Where `headwater pool` writes down what it started: the user's runtime directory, or one of theirs in /tmp."""
    base = environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "headwater-pool" if base else Path(f"/tmp/headwater-pool-{os.geteuid()}")  # noqa: S108  checked when used


def default_api_key(environ: Mapping[str, str] = os.environ) -> str | None:
    """The key that clients must show: `HEADWATER_API_KEY`; none where that is missing. Raises InvalidConfig.

    One that is empty is refused: a secret that was not found must not open the server.
    """
    key = environ.get("HEADWATER_API_KEY")
    if key == "":
        raise InvalidConfig("HEADWATER_API_KEY is empty: set it to a key, or unset it to want none")
    return key


def default_node(environ: Mapping[str, str] = os.environ) -> str:
    """What this process is called in the cluster: `HEADWATER_NODE`, or the machine's name and the process' number."""
    return environ.get("HEADWATER_NODE") or f"{os.uname().nodename}:{os.getpid()}"


def default_pool(environ: Mapping[str, str] = os.environ) -> str | None:
    """Which pool is shared with others: `HEADWATER_POOL`; none where that is empty or missing."""
    return environ.get("HEADWATER_POOL") or None


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


def default_residency(environ: Mapping[str, str] = os.environ) -> str | None:
    """Where the residency index is: `HEADWATER_RESIDENCY`; none where that is empty or missing."""
    return environ.get("HEADWATER_RESIDENCY") or None


def index_only(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether no data goes to or comes from the pool, and only the residency index is kept: `HEADWATER_INDEX_ONLY`.

    `FD_AS_ONLY_FLUSH` is taken for it. Raises InvalidConfig for anything but 0 and 1, and where the two disagree.
    """
    said: dict[str, bool] = {}
    for name in (INDEX_ONLY, INDEX_ONLY_ALIAS):
        text = environ.get(name, "").strip()
        if text and text not in ("0", "1"):
            raise InvalidConfig(f"{name} must be 0 or 1, not {text!r}")
        if text:
            said[name] = text == "1"
    if len(set(said.values())) > 1:
        raise InvalidConfig(f"{' and '.join(f'{name}={value:d}' for name, value in said.items())}: which of them?")
    return any(said.values())


def pd_via(environ: Mapping[str, str] = os.environ) -> str:
    """How KV goes from prefill to decode: `HEADWATER_PD_VIA`, which is checked where it is used.

    `FD_PD_TRANSFER_VIA_STORAGE=1` is taken for `pool`, 0 for `direct`. Raises InvalidConfig where the two disagree.
    """
    alias = environ.get(PD_VIA_ALIAS, "").strip()
    if alias not in ("", "0", "1"):
        raise InvalidConfig(f"{PD_VIA_ALIAS} must be 0 or 1, not {alias!r}")
    said = {PD_VIA: environ.get(PD_VIA, "").strip(), PD_VIA_ALIAS: {"1": POOL_WAY, "0": "direct"}.get(alias, "")}
    ways = {way for way in said.values() if way}
    if len(ways) > 1:
        raise InvalidConfig(f"{PD_VIA}={said[PD_VIA]} and {PD_VIA_ALIAS}={alias}: which of them?")
    return ways.pop() if ways else POOL_WAY


def default_node_key_file(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The file with the key of a fleet's routers and nodes: `HEADWATER_NODE_KEY_FILE`; none where that is missing.

    Raises InvalidConfig where the key itself is named too.
    """
    named = environ.get("HEADWATER_NODE_KEY_FILE")
    if named and environ.get("HEADWATER_NODE_KEY"):
        raise InvalidConfig("HEADWATER_NODE_KEY_FILE and HEADWATER_NODE_KEY: which of them?")
    return Path(named) if named else None


def default_node_key(environ: Mapping[str, str] = os.environ) -> str | None:
    """The key itself: `HEADWATER_NODE_KEY`; none where that is empty or missing."""
    return environ.get("HEADWATER_NODE_KEY") or None


def default_vllm_key(environ: Mapping[str, str] = os.environ) -> str | None:
    """What a vLLM server wants to be shown: `HEADWATER_VLLM_KEY`; none where that is empty or missing."""
    return environ.get("HEADWATER_VLLM_KEY") or None


def own_node_key_file(environ: Mapping[str, str] = os.environ) -> Path:
    """Where this user's own key is kept, for fleets that are given none."""
    base = environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "headwater" / "node.key"


def require_url(what: str, url: object) -> None:
    """Raise InvalidConfig unless it is http://HOST:PORT, or https."""
    try:
        parts = urlsplit(url) if isinstance(url, str) and url.isascii() and url.isprintable() else None
        fine = parts is not None and parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        bare = parts is not None and not (parts.path or parts.query or parts.fragment or parts.username)
    except ValueError:
        fine = bare = False
    if not (fine and bare):
        raise InvalidConfig(f"{what} is http://HOST:PORT, not {str(url).rpartition('@')[2]!r:.80}")


def require_node_key(key: NodeKey, *places: str) -> None:
    """Raise InvalidConfig if a fleet that was given no key reaches beyond loopback. `places` are hosts or URLs."""
    for place in places if key.own else ():
        host = (urlsplit(place).hostname or "") if "://" in place else place
        if not is_loopback(host):
            raise InvalidConfig(
                f"without a node key routers and nodes are on loopback only, and {place} is not: start all of them "
                "with the same --node-key-file (or HEADWATER_NODE_KEY)"
            )


def require_hosts(names: Iterable[str]) -> tuple[str, ...]:
    """Names that a server may be called by. Raises InvalidConfig for what is none."""
    found = tuple(names)
    for name in found:
        if not re.fullmatch(r"[0-9A-Za-z._-]+|\[[0-9A-Fa-f:.]+\]", name):
            raise InvalidConfig(f"a host's name has no port and no scheme: not {name!r:.80}")
    return found


def is_loopback(host: str) -> bool:
    """Whether a host is this machine, as far as its name says."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


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
