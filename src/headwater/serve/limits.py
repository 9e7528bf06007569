"""What the door of a server lets in: how many, how large, how slow. One value, for both servers; nothing is done here.

Time: a request has one deadline, `request_timeout_s` from the first byte of its head (or what its client asks for, if
that is less). Within it, a client that keeps us waiting is cut earlier: a head has `patience_s`; a body has as much,
and more for as long as it comes at `pace_bytes_s`; so has an answer, to be read.

Memory: what all connections together may make a server hold is bounded by these numbers: heads by `head_bytes` each,
bodies by SMALL_BYTES each, larger ones by `bodies_bytes` together, answers by what a socket takes each and
`unread_bytes` together.
"""

import logging
import re
import resource
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Final
from urllib.parse import urlsplit

from headwater.config.checks import is_loopback
from headwater.config.serve import ServeConfig
from headwater.core.errors import InvalidConfig

log = logging.getLogger("headwater")

SMALL_BYTES: Final = 64 << 10  # a body that everybody may send. A larger one counts, and is read elsewhere

MAX_CONNECTIONS: Final = 1024

_HOST: Final = re.compile(r"(?:\[(?P<address>[0-9a-f:.]+)\]|(?P<name>[^\[\]:/@\s]+))(?::[0-9]*)?")
LOOPBACK: Final = "127.0.0.1"
NUM_BODIES: Final = 16  # of full size, that may be held
_OTHER_FILES: Final = 256  # descriptors for everything but connections


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The door's numbers. Raises InvalidConfig for what cannot work."""

    request_timeout_s: float = 600.0  # from the first byte of a request's head to the last of its answer
    max_connections: int = MAX_CONNECTIONS
    idle_timeout_s: float = 15.0  # for a connection's first request, and between two. Clients close theirs before
    patience_s: float = (
        10.0  # for a head; for a body or an answer, that long for each piece that it has to come or go at
    )
    pace_bytes_s: int = 16 << 10
    linger_s: float = 5.0  # that what is left of a body is thrown away, once its request was answered
    grace_s: float = 2.0  # for the last word to a client whose time is over
    head_bytes: int = 16 << 10
    head_lines: int = 100  # in it: each takes as long as a kilobyte
    free_pieces: int = 512  # of a body in chunks may come at any size and speed; of what is beyond
    piece_bytes: int = 128  # each is that large, or no more than
    pieces_s: int = 100  # come in a second
    bodies_bytes: int = 128 << 20  # of all bodies that are held and are not small
    unread_bytes: int = 64 << 20  # of all answers that are not read
    hosts: frozenset[str] | None = None  # names in `Host` that are answered, besides this machine's own; None: any

    def __post_init__(self) -> None:
        """Check every number."""
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name != "hosts" and not (isinstance(value, int | float) and 0 < value < float("inf")):
                raise InvalidConfig(f"{one.name} must be above 0, not {value!r}")

    @property
    def max_unread(self) -> int:
        """Whole bodies that may wait to be read, of one sort: they hold connections that nobody else can have."""
        return max(1, self.max_connections // 4)

    def timeout_s(self, said: str | None) -> float | None:
        """How long a request may take of which its client said that; None if that is no number of seconds."""
        if said is None:
            return self.request_timeout_s
        try:
            seconds = float(said)
        except ValueError:
            return None
        return min(seconds, self.request_timeout_s) if 0 < seconds < float("inf") else None

    def answers_host(self, host: str) -> bool:
        """Whether a request that was sent to this `Host` is answered."""
        if self.hosts is None:
            return True
        name = host_name(host)
        return is_loopback(name) or name in self.hosts


class Pace:
    """Whether bytes keep moving: in each `patience_s` as many as the pace asks for, or all that are left."""

    def __init__(self, limits: Limits, begin_s: float) -> None:
        self.until_s = begin_s + limits.patience_s  # then it is too slow
        self._patience_s = limits.patience_s
        self._step_bytes = limits.patience_s * limits.pace_bytes_s
        self._next_bytes = self._step_bytes

    def moved(self, now_s: float, num_bytes: int) -> None:
        """So many have moved by now."""
        if num_bytes >= self._next_bytes:
            self._next_bytes = num_bytes + self._step_bytes
            self.until_s = now_s + self._patience_s


def host_name(host: str) -> str:
    """The name in a `Host`, without a port: an address of IPv6 without its brackets. Empty for what is none."""
    found = _HOST.fullmatch(host.strip().lower())
    return "" if found is None else (found["address"] or found["name"]).removesuffix(".")


def hosts_for(bound: str, *, key: str | None, allowed: Iterable[str]) -> frozenset[str] | None:
    """Which names a server answers to. Where it is safe, or wants a key, any.

    A server on loopback that wants no key is safe from other machines, but not from pages in this machine's browsers:
    a name of theirs may be made to lead here. Their `Host` gives them away.
    """
    if key is not None or not is_loopback(bound):
        return None
    return frozenset(host_name(one) for one in allowed)


def limits_of(config: ServeConfig, *, bound: str | None = None, max_connections: int | None = None) -> Limits:
    """The limits of a node that is bound to that address, and may have so many connections; None: as configured."""
    advertised = None if config.advertise is None else urlsplit(config.advertise).hostname
    allowed = (*config.allowed_hosts, *(() if advertised is None else (advertised,)))
    return Limits(
        request_timeout_s=config.request_timeout_s,
        max_connections=max_connections or config.max_connections,
        bodies_bytes=NUM_BODIES * config.max_body_bytes,
        hosts=hosts_for(bound or config.host, key=config.api_key, allowed=allowed),
    )


def fit_connections(wanted: int, *, other_files: int = 0) -> int:
    """How many connections this process has descriptors for; asks for more where it may. `other_files` are for others'.

    A server that runs out of them cannot answer anybody, nor open its own files.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = wanted + other_files + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < need:
        more = need if hard == resource.RLIM_INFINITY else min(need, hard)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))
            soft = more
        except (OSError, ValueError) as error:
            log.warning("this process may open %d files, and not more: %s", soft, error)
    if soft == resource.RLIM_INFINITY or soft >= need:
        return wanted
    fits = max(1, wanted * (soft - min(_OTHER_FILES, soft // 2)) // (wanted + other_files))
    log.warning("this process may open %d files: it takes %d connections, not %d (see ulimit -n)", soft, fits, wanted)
    return fits
