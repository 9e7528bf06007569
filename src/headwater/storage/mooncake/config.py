"""How to reach a Mooncake pool: what is asked for, checked at the door, and the URL that says it in one line.

    mooncake://HOST:PORT                                a client of its own, over TCP, that keeps nothing itself
    mooncake://HOST:PORT?segment=2GiB                   and gives 2 GiB of this process's memory to the pool
    mooncake://HOST:PORT?protocol=rdma&device=mlx5_0    the same over RDMA
    mooncake://HOST:PORT?shm=127.0.0.1:50072            through the client process of this machine, by shared memory

HOST:PORT is the master's. Nothing here opens anything.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

from headwater.core.errors import InvalidConfig

SCHEME: Final = "mooncake"
P2P: Final = "P2PHANDSHAKE"  # clients find each other by themselves, without a metadata server
PROTOCOLS: Final = ("tcp", "rdma")
MIN_SEGMENT_BYTES: Final = 16 << 20  # the engine's own limit
MIN_BUFFER_BYTES: Final = 1 << 20
_UNITS: Final = {"": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 10**3, "mb": 10**6, "gb": 10**9}
_EXAMPLE: Final = f"{SCHEME}://127.0.0.1:50051?segment=2GiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeConfig:
    """Which pool, and by which way."""

    master: str  # HOST:PORT
    shm: str | None = None  # HOST:PORT of a client process on this machine: bytes go through memory shared with it
    metadata: str = P2P  # or http://HOST:PORT/metadata, etcd://...: all clients of a pool say the same
    protocol: str = "tcp"
    device: str = ""  # of RDMA, several with commas; empty: the engine looks itself
    segment_bytes: int = 0  # of this process's memory, for the pool to keep objects in
    buffer_bytes: int = 64 << 20  # memory through which pages go that the engine cannot reach where they lie
    local_hostname: str | None = None  # where other clients find this one; None: the address that the master sees
    prefix: str = "headwater:"  # of every key
    open_timeout_s: float = 5.0

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        address("master", self.master)
        if self.shm is not None:
            address("shm", self.shm)
            if self.segment_bytes:
                raise InvalidConfig("with shm the client process owns the memory: say segment there, not here")
        if self.protocol not in PROTOCOLS:
            raise InvalidConfig(f"protocol is one of {', '.join(PROTOCOLS)}, not {self.protocol!r}")
        for name, least in (("segment_bytes", 0), ("buffer_bytes", MIN_BUFFER_BYTES)):
            value: object = getattr(self, name)
            if not (isinstance(value, int) and not isinstance(value, bool) and least <= value < 1 << 50):
                raise InvalidConfig(f"{name} must be a whole number of at least {least}, not {value!r}")
        if 0 < self.segment_bytes < MIN_SEGMENT_BYTES:
            raise InvalidConfig(f"a segment has at least {MIN_SEGMENT_BYTES >> 20} MiB, not {self.segment_bytes} bytes")
        for name, needed in (("metadata", True), ("prefix", True), ("device", False), ("local_hostname", False)):
            text: object = getattr(self, name)
            if text is not None and not (
                isinstance(text, str) and re.fullmatch("[!-~]*", text) and (text or not needed)
            ):
                raise InvalidConfig(f"{name} must be plain text without spaces, not {text!r}")
        seconds: object = self.open_timeout_s
        if not (isinstance(seconds, int | float) and 0 < seconds < float("inf")):
            raise InvalidConfig(f"open_timeout_s must be a positive number of seconds, not {seconds!r}")

    @property
    def url(self) -> str:
        """The same as a URL, for who shall use the same pool."""
        said = {"shm": self.shm, "metadata": None if self.metadata == P2P else self.metadata}
        said |= {"protocol": None if self.protocol == "tcp" else self.protocol, "device": self.device}
        said |= {"segment": str(self.segment_bytes) if self.segment_bytes else None, "local": self.local_hostname}
        options = "&".join(f"{name}={value}" for name, value in said.items() if value)
        return f"{SCHEME}://{self.master}" + (f"?{options}" if options else "")


_OPTIONS: Final[Mapping[str, str]] = {
    "shm": "shm",
    "metadata": "metadata",
    "protocol": "protocol",
    "device": "device",
    "segment": "segment_bytes",
    "buffer": "buffer_bytes",
    "local": "local_hostname",
    "prefix": "prefix",
    "timeout": "open_timeout_s",
}


def parse_url(url: str) -> MooncakeConfig:
    """What a URL asks for. Raises InvalidConfig, which says what is wrong with it."""
    try:
        parts = urlsplit(url)
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError as error:
        raise InvalidConfig(f"{url!r} is no URL ({error}); one is {_EXAMPLE}") from error
    if parts.scheme != SCHEME or parts.path.strip("/") or parts.fragment or "@" in parts.netloc:
        raise InvalidConfig(f"{url!r} is no address of a Mooncake pool; one is {_EXAMPLE}")
    given: dict[str, Any] = {"master": parts.netloc}
    for name, value in pairs:
        field = _OPTIONS.get(name)
        if field is None:
            raise InvalidConfig(f"{url!r}: {name!r} is not one of {', '.join(_OPTIONS)}")
        if field in given:
            raise InvalidConfig(f"{url!r} says {name} twice")
        given[field] = value
    for field in ("segment_bytes", "buffer_bytes"):
        if field in given:
            given[field] = parse_size(given[field])
    if "open_timeout_s" in given:
        try:
            given["open_timeout_s"] = float(given["open_timeout_s"])
        except ValueError as error:
            raise InvalidConfig(f"timeout must be a number of seconds, not {given['open_timeout_s']!r}") from error
    return MooncakeConfig(**given)


def parse_size(text: str) -> int:
    """Bytes of `2GiB`, `512MB` or a plain number. Raises InvalidConfig."""
    found = re.fullmatch(r"(\d{1,15})\s*([a-z]*)", text.strip().lower())
    if found is None or found[2] not in _UNITS:
        raise InvalidConfig(f"a size is like 2GiB, 512MiB or a number of bytes, not {text!r}")
    return int(found[1]) * _UNITS[found[2]]


def address(what: str, text: str) -> tuple[str, int]:
    """Host and port of HOST:PORT. Raises InvalidConfig."""
    host, _, port = str(text).rpartition(":")
    if not re.fullmatch(r"[0-9A-Za-z._-]+|\[[0-9A-Fa-f:.]+\]", host) or not re.fullmatch(r"\d{1,5}", port):
        raise InvalidConfig(f"{what} must be HOST:PORT, not {text!r}")
    if not 0 < int(port) < 1 << 16:
        raise InvalidConfig(f"{what}: {port} is no port")
    return host.strip("[]"), int(port)
