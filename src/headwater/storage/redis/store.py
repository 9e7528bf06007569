"""RedisStore: frames as values of a Redis server, shared by the machines of a small deployment.

One value per page under `prefix + name`. A value appears whole or not at all, so readers see no half page. Long
pipelines of large values are slower than short ones, so a round trip carries one large page or some small ones.

What is the server's and not ours:

- The byte limit: `maxmemory`. With the policy `noeviction` a full server makes NO_ROOM. With `volatile-ttl` it evicts
  what nobody used for longest: every page carries a time to live (`keep_s`), counted anew whenever it is read or put
  again, and shorter by a millisecond for each page further back in the call, so that leaves go first. `allkeys-lru`
  counts in seconds and samples: it works, and now and then evicts a page that was just used. A page that expires by
  itself (a partial tail) is kept no longer than that, however often it is read.
- Parents: a put answers NO_PARENT where the page before is not there, but the server evicts page by page and knows no
  chain, and `delete` removes the page alone. What builds on a missing page is not reached by a reader, who stops at the
  hole, and goes unread until its time is up.
- A request that it received and had no time for. A put that is LATE because the server did not answer may still be
  carried out when it wakes: the page is then there, whole. Nothing that expired before it was sent is ever sent.
"""

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Final

from headwater.core.errors import InvalidConfig, ResourceClosed, StoreForked, StoreUnavailable
from headwater.core.page import PageName
from headwater.core.results import Status
from headwater.layout.frame import PageMeta, expiry_ms, parse
from headwater.storage.base import Deadline, Store
from headwater.storage.redis.lines import Command, LineLate, RedisError, RedisLines, Refused, Skipped, Unauthorised
from headwater.storage.redis.protocol import MAX_VALUE_BYTES

_DELETED: Final = {1: Status.REMOVED, 0: Status.ABSENT}
_TRIP_BYTES: Final = 256 << 10  # frames in one round trip: with more, reading was slower (measured)
_TRIP_NAMES: Final = 512  # small commands in one round trip


class RedisStore(Store):
    """Pages in a Redis server, 6.2 or newer and not a cluster. Blocks for the network, until the deadline."""

    def __init__(
        self, url: str, *, prefix: str = "headwater:", keep_s: float = 86_400.0, open_timeout_s: float = 5.0
    ) -> None:
        """Connect to `redis://`, `rediss://` or `unix://`. Raises a StoreUnavailable that says what to do."""
        if not 1 <= keep_s <= 10 * 365 * 86_400:
            raise InvalidConfig(f"keep_s must be between a second and ten years, not {keep_s}")
        self._prefix = prefix.encode()
        self._keep_ms = int(keep_s * 1000)
        self._lines = RedisLines(url)
        self._closed = False
        self._pid = os.getpid()
        self._say_hello(Deadline.after(open_timeout_s))

    # --- the store interface ------------------------------------------------------------------------------------------

    def put(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[Status]:
        """Store frames that are not there yet; STORED once the server was seen to hold all their bytes."""
        self._require_usable()
        results = [Status.REFUSED] * len(pages)
        metas: dict[int, PageMeta] = {}
        for i, (name, frame) in enumerate(pages):
            header = parse(frame) if len(frame) <= MAX_VALUE_BYTES else Status.FOREIGN
            if not isinstance(header, Status) and header.meta.name == name and len(frame) == header.frame_bytes:
                metas[i] = header.meta
        try:
            held = self._look(metas.values(), deadline)
        except RedisError as error:
            return [_put_trouble(error) if i in metas else Status.REFUSED for i in range(len(pages))]
        trouble: Status | None = None
        for trip in _trips([(i, len(pages[i][1])) for i in metas]):
            going: list[int] = []
            coming: set[PageName] = set()
            for i in trip:
                meta, num_bytes = metas[i], held[metas[i].name]
                orphan = meta.depth and not held[meta.parent_name] and meta.parent_name not in coming
                if num_bytes:
                    results[i] = Status.EXISTS if num_bytes == len(pages[i][1]) else Status.FAILED
                elif orphan and trouble is None:
                    results[i] = Status.NO_PARENT
                else:
                    going.append(i)
                    coming.add(meta.name)
            try:
                if going and trouble is None:
                    self._send([(i, metas[i], pages[i][1]) for i in going], held, results, deadline)
            except RedisError as error:
                trouble = _put_trouble(error)
            if trouble is not None:
                for i in going:
                    results[i] = trouble
        return results

    def _look(self, metas: Iterable[PageMeta], deadline: Deadline) -> dict[PageName, int]:
        """How many bytes the server holds of pages and their parents, 0 for none. Counts as a use."""
        names: dict[PageName, int] = {}
        expiries: dict[PageName, int] = {}
        for meta in metas:
            expiries[meta.name] = meta.expires_at_ms
            if meta.depth:
                names.setdefault(meta.parent_name, 0)
            names.setdefault(meta.name, 0)
        for start, asked in _portions(list(names)):
            commands: list[Command] = []
            for i, name in enumerate(asked):
                key = self._prefix + name
                ttl_ms = self._ttl_ms(start + i, expiries.get(name, 0))
                commands += [(b"STRLEN", key), (b"PEXPIRE", key, ttl_ms)]
            for name, length in zip(asked, self._lines.ask(commands, deadline)[::2], strict=True):
                names[name] = length if isinstance(length, int) else -1  # something else than a page lies there
        return names

    def _send(
        self,
        pages: Sequence[tuple[int, PageMeta, memoryview]],
        held: dict[PageName, int],
        results: list[Status],
        deadline: Deadline,
    ) -> None:
        """Put pages in one round trip, and look at each behind its write. Takes back what lost its parent there."""
        commands: list[Command] = []
        for i, meta, frame in pages:
            key = self._prefix + meta.name
            commands += [(b"SET", key, frame, b"NX", b"PX", self._ttl_ms(i, meta.expires_at_ms)), (b"STRLEN", key)]
        answers = self._lines.ask(commands, deadline)
        orphans: list[Command] = []
        for (i, meta, frame), done, seen in zip(pages, answers[::2], answers[1::2], strict=True):
            results[i] = _put_status(done, seen, len(frame))
            if results[i] is Status.STORED and meta.depth and not held[meta.parent_name]:
                results[i] = Status.NO_PARENT
                orphans.append((b"UNLINK", self._prefix + meta.name))
            elif results[i].held:
                held[meta.name] = len(frame)
        if orphans:
            self._lines.ask(orphans, deadline)

    def get_into(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[Status]:
        """Copy frames out, as they are: the caller verifies."""
        self._require_usable()
        results = [Status.FAILED] * len(pages)
        for trip in _trips([(i, len(buffer)) for i, (_, buffer) in enumerate(pages)]):
            commands = [(b"GETEX", self._prefix + pages[i][0], b"PX", self._ttl_ms(i)) for i in trip]
            try:
                answers = self._lines.ask(commands, deadline, into=[pages[i][1] for i in trip])
            except RedisError as error:
                rest = Status.LATE if isinstance(error, LineLate) else Status.FAILED
                return results[: trip[0]] + [rest] * (len(pages) - trip[0])
            for i, value in zip(trip, answers, strict=True):
                results[i] = _got(value, pages[i][1])
            self._keep_expiry([pages[i] for i in trip if results[i] is Status.HIT], deadline)
        return results

    def _keep_expiry(self, pages: Iterable[tuple[PageName, memoryview]], deadline: Deadline) -> None:
        """Reading renews a page's time; one that expires does not live longer for it."""
        dated = [(name, expires) for name, frame in pages if (expires := expiry_ms(frame))]
        if dated:
            with suppress(RedisError):  # it has been read; the server keeps it for longer than it need
                self._lines.ask([(b"PEXPIREAT", self._prefix + name, min(at, 1 << 52)) for name, at in dated], deadline)

    def contains(self, names: Sequence[PageName], *, deadline: Deadline) -> list[bool]:
        """Which pages are there: one command where all or none are, which is what a prefix mostly is."""
        self._require_usable()
        found = [False] * len(names)
        for start, asked in _portions(names):
            keys = [self._prefix + name for name in asked]
            try:
                (count,) = self._lines.ask([(b"EXISTS", *keys)], deadline)
                if count == 0:
                    continue
                one_by_one = [1] * len(keys)
                if count != len(keys):
                    one_by_one = self._lines.ask([(b"EXISTS", key) for key in keys], deadline)
            except RedisError:
                break
            found[start : start + len(keys)] = [answer == 1 for answer in one_by_one]
        return found

    def delete(self, names: Sequence[PageName], *, deadline: Deadline) -> list[Status]:
        """Remove pages. What builds on them stays until its time is up: the server knows no chains."""
        self._require_usable()
        results: list[Status] = []
        for _, asked in _portions(names):
            try:
                answers = self._lines.ask([(b"UNLINK", self._prefix + name) for name in asked], deadline)
            except RedisError as error:
                rest = Status.LATE if isinstance(error, LineLate) else Status.FAILED
                return results + [rest] * (len(names) - len(results))
            results += [
                _DELETED.get(answer, Status.FAILED) if isinstance(answer, int) else Status.FAILED for answer in answers
            ]
        return results

    def close(self) -> None:
        """Leave the server; the pages stay there. A call that is under way ends by its deadline."""
        self._closed = True
        if self._pid == os.getpid():
            self._lines.close()

    # --- coming and going ---------------------------------------------------------------------------------------------

    def _say_hello(self, deadline: Deadline) -> None:
        where = self._lines.where
        try:
            (answer,) = self._lines.ask([(b"GETEX", self._prefix + b"hello")], deadline)
        except Unauthorised as error:
            message = f"the Redis server at {where} wants other credentials ({error}): redis://USER:PASSWORD@HOST:PORT"
            raise StoreUnavailable(message) from error
        except RedisError as error:
            message = (
                f"no Redis server answers at {where} ({error}): mend the address, or start one, for example "
                "redis-server --save '' --maxmemory 4gb --maxmemory-policy volatile-ttl"
            )
            raise StoreUnavailable(message) from error
        if isinstance(answer, Refused):
            self.close()
            message = f"the Redis server at {where} refuses GETEX ({answer}): it must be 6.2 or newer, no cluster"
            raise StoreUnavailable(f"{message}, and let us use the keys that begin with {self._prefix.decode()!r}")

    def _ttl_ms(self, position: int, expires_at_ms: int = 0) -> int:
        """How long a page is kept from now on; one that expires, no longer than that."""
        keep_ms = max(1000, self._keep_ms - position)
        return keep_ms if not expires_at_ms else max(1, min(keep_ms, expires_at_ms - int(time.time() * 1000)))

    def _require_usable(self) -> None:
        if self._pid != os.getpid():
            raise StoreForked("this store was opened before fork(): open it again in the child")
        if self._closed:
            raise ResourceClosed("the store is closed")


def _put_status(done: object, seen: object, num_bytes: int) -> Status:
    """Of what SET and the STRLEN behind it said."""
    if isinstance(done, Refused):
        return Status.NO_ROOM if done.code == "OOM" else Status.FAILED
    if done is None:
        return Status.EXISTS if seen == num_bytes else Status.FAILED
    if done != b"OK" or seen not in (0, num_bytes):
        return Status.FAILED
    return Status.STORED if seen == num_bytes else Status.NO_ROOM  # evicted at once


def _put_trouble(error: RedisError) -> Status:
    return Status.LATE if isinstance(error, LineLate) else Status.FAILED


def _got(value: object, buffer: memoryview) -> Status:
    """Of what came for a page, which is in its buffer if all of it was there."""
    if value is None:
        return Status.MISS
    if isinstance(value, Skipped):
        return Status.SHORT
    return Status.HIT if value is buffer else Status.FAILED


def _trips(sizes: Iterable[tuple[int, int]]) -> Iterator[list[int]]:
    """Indices in portions of a round trip each."""
    trip: list[int] = []
    num_bytes = 0
    for i, size in sizes:
        if trip and (num_bytes + size > _TRIP_BYTES or len(trip) == _TRIP_NAMES):
            yield trip
            trip, num_bytes = [], 0
        trip.append(i)
        num_bytes += size
    if trip:
        yield trip


def _portions(names: Sequence[PageName]) -> Iterator[tuple[int, Sequence[PageName]]]:
    for start in range(0, len(names), _TRIP_NAMES):
        yield start, names[start : start + _TRIP_NAMES]
