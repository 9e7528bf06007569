"""RedisStore: frames as values of a Redis server, shared by the machines of a small deployment.

One value per page under `prefix + name`. A value appears whole or not at all, so readers see no half page. Values of
1 MiB gain nothing from long pipelines, so a round trip carries few large pages or many small ones (`_TRIP_BYTES`).

What is the server's and not ours:

- The byte limit: `maxmemory`. With the policy `noeviction` a full server makes NO_ROOM. With `volatile-ttl` it evicts
  what nobody used for longest: every page carries a time to live (`keep_s`), counted anew whenever it is read or put
  again, and shorter by a millisecond for each page further back in the call, so that leaves go first. `allkeys-lru`
  counts in seconds and samples: it works, and now and then evicts a page that was just put.
- Parents: a put answers NO_PARENT where the page before is not there, but the server evicts page by page and knows no
  chain, and `delete` removes the page alone. What builds on a missing page is not reached by a reader, who stops at the
  hole, and goes unread until its time is up.
- A request that it received and had no time for. A put that is LATE because the server did not answer may still be
  carried out when it wakes: the page is then there, whole. Nothing that expired before it was sent is ever sent.

The client's own time limits hold for one read of a socket, not for a call: a server that drips would stretch them. So
each socket is told before each read and write how much is left until the deadline (`_Paced`). Only finding a host's
address is the system's business: give an address where its resolver is not to be trusted.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Final, TypeVar
from urllib.parse import urlsplit

from headwater.core.errors import InvalidConfig, NotInstalled, ResourceClosed, StoreForked, StoreUnavailable
from headwater.core.page import PageName
from headwater.layout.frame import Fault, Header, parse
from headwater.storage.base import Deadline, DeleteStatus, GetStatus, PutStatus, Store

try:
    from redis.backoff import NoBackoff
    from redis.connection import AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection, parse_url
    from redis.exceptions import ConnectionError as RedisConnectionError
    from redis.exceptions import OutOfMemoryError, RedisError, ResponseError
    from redis.exceptions import TimeoutError as RedisTimeoutError
    from redis.retry import Retry
except ImportError as error:
    raise NotInstalled(f"a store on Redis needs {error.name}: pip install 'headwater[redis]'") from error

MAX_VALUE_BYTES: Final = 512 << 20  # Redis' own limit
_TRIP_BYTES: Final = 1 << 20  # frames in one round trip: larger ones were slower
_TRIP_NAMES: Final = 512  # small commands in one round trip
_READ_BYTES: Final = 256 << 10

T = TypeVar("T")
Command = tuple[bytes | memoryview | int, ...]


class RedisStore(Store):
    """Pages in a Redis server (6.2 or newer). Blocks for the network, until the deadline."""

    prefix_closed: ClassVar[bool] = False

    def __init__(
        self, url: str, *, prefix: str = "headwater:", keep_s: float = 86_400.0, open_timeout_s: float = 5.0
    ) -> None:
        """Connect to `redis://`, `rediss://` or `unix://`. Raises StoreUnavailable that says what to do."""
        if not keep_s >= 1 or keep_s > 10 * 365 * 86_400:
            raise InvalidConfig(f"keep_s must be between a second and ten years, not {keep_s}")
        self._where = _without_secrets(url)
        self._prefix = prefix.encode()
        self._keep_ms = int(keep_s * 1000)
        self._kind, self._options = _connection_of(url, self._where)
        self._lock = threading.Lock()
        self._idle: list[_Line] = []
        self._closed = False
        self._pid = os.getpid()
        self._say_hello(Deadline.after(open_timeout_s))

    # --- the store interface ------------------------------------------------------------------------------------------

    def put(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[PutStatus]:
        """Store frames that are not there yet; STORED once the server was seen to hold all their bytes."""
        self._require_usable()
        results = [PutStatus.REFUSED] * len(pages)
        headers: dict[int, Header] = {}
        for i, (name, frame) in enumerate(pages):
            header = parse(frame) if len(frame) <= MAX_VALUE_BYTES else Fault.FOREIGN
            if not isinstance(header, Fault) and header.meta.name == name and len(frame) == header.frame_bytes:
                headers[i] = header
        asked = {header.meta.name for header in headers.values()}
        asked |= {header.meta.parent_name for header in headers.values() if header.meta.depth}
        try:
            held = self._refresh(list(asked), deadline)
        except RedisError as error:
            late = PutStatus.LATE if _is_late(error) else PutStatus.FAILED
            return [late if i in headers else PutStatus.REFUSED for i in range(len(pages))]
        trouble: PutStatus | None = None
        for trip in _trips(headers, [len(frame) for _, frame in pages]):
            # A page that builds on one of this trip goes along, and is taken back if that one was not held.
            going = [] if trouble else self._choose(trip, pages, headers, held, results)
            if going:
                commands = [one for i in going for one in self._put_commands(pages[i], i)]
                try:
                    answers = self._ask(commands, deadline)
                except RedisError as error:
                    trouble = PutStatus.LATE if _is_late(error) else PutStatus.FAILED
                else:
                    for i, (set_, seen) in zip(going, _pairs(answers), strict=True):
                        results[i] = _what_became(set_, seen, len(pages[i][1]))
                        held[pages[i][0]] = len(pages[i][1]) if results[i].held else 0
            if trouble:
                for i in trip if not going else going:
                    results[i] = trouble
        return results

    def _choose(
        self,
        trip: Sequence[int],
        pages: Sequence[tuple[PageName, memoryview]],
        headers: dict[int, Header],
        held: dict[PageName, int],
        results: list[PutStatus],
    ) -> list[int]:
        """Which pages to send; says of the others why not. A page waits for the trip after its parent's."""
        going: list[int] = []
        for i in trip:
            name, meta = pages[i][0], headers[i].meta
            if held[name]:
                results[i] = PutStatus.EXISTS if held[name] == len(pages[i][1]) else PutStatus.FAILED
            elif meta.depth and not held[meta.parent_name]:
                results[i] = PutStatus.NO_PARENT
            else:
                going.append(i)
        return going

    def _put_commands(self, page: tuple[PageName, memoryview], position: int) -> tuple[Command, Command]:
        key = self._prefix + page[0]
        return (b"SET", key, page[1], b"NX", b"PX", self._ttl_ms(position)), (b"STRLEN", key)
