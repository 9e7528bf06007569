"""What several options must keep to: counts, seconds, addresses. Each raises InvalidConfig with the option's name."""

import re
from collections.abc import Iterable
from ipaddress import ip_address
from urllib.parse import urlsplit

from headwater.core.errors import InvalidConfig


def require_count(name: str, value: object, least: int) -> None:
    """Raise InvalidConfig unless it is a whole number, from `least` on."""
    if not (isinstance(value, int) and not isinstance(value, bool) and least <= value):
        raise InvalidConfig(f"{name} must be a whole number of at least {least}, not {value!r}")
    if value >= 1 << 62:
        raise InvalidConfig(f"{name} must be a whole number below 2**62, not {value!r}")


def require_seconds(name: str, value: object) -> None:
    """Raise InvalidConfig unless it is a positive number."""
    if not (isinstance(value, int | float) and 0 < value < float("inf")):
        raise InvalidConfig(f"{name} must be a positive number of seconds, not {value!r}")


def require_pin_share(value: object) -> None:
    """Raise InvalidConfig unless it is a share of the device that leaves room for requests."""
    if not (isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 0.9):
        raise InvalidConfig(f"pin_share is a number from 0 to 0.9, not {value!r}")


def require_url(what: str, url: object) -> None:
    """Raise InvalidConfig unless it is http://HOST:PORT, or https."""
    try:
        parts = urlsplit(url) if isinstance(url, str) and re.fullmatch("[!-~]+", url) else None
        fine = parts is not None and parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        bare = parts is not None and not (parts.path or parts.query or parts.fragment or parts.username)
    except ValueError:
        fine = bare = False
    if not (fine and bare):
        raise InvalidConfig(f"{what} is http://HOST:PORT, not {str(url).rpartition('@')[2]!r:.80}")


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
