"""RedisResidency: the index in a Redis server, for a cluster. What lies there and what it runs: `redis_scripts.py`.

One round trip per update and per look-up, whatever the number of blocks. The server's clock decides about leases, so
the nodes' clocks need not agree. A server that was restarted knows nobody, says so, and hears everything again; one
that does not answer costs a look-up its deadline a few times, and then nothing for a while.
"""

import hashlib
import os
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from headwater.core.breaker import Breaker
from headwater.core.errors import InvalidConfig, ResourceClosed, StoreForked
from headwater.core.keys import BlockKey
from headwater.metrics import Metrics
from headwater.residency.base import Found, Node, Residency, holder, prefixes, ranked
from headwater.residency.events import TIERS, Applied, Update, require
from headwater.residency.redis_scripts import LOOKUP, REMEMBERED_MS, UPDATE
from headwater.storage.base import Deadline
from headwater.storage.redis.lines import RedisError, RedisLines, Refused

_ENTRY_BYTES: Final = 9
_POOL_AT: Final = list(TIERS).index("pool")


@dataclass(frozen=True, slots=True)
class _RedisRecord:
    epoch: int
    until_ms: int
    doubtful: bool


class RedisResidency(Residency):
    """The index of a cluster, in a Redis server 6.2 or newer, not a cluster of Redis. Connects when it is asked."""

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "headwater:residency:",
        keep_s: float = 5400.0,
        metrics: Metrics | None = None,
    ) -> None:
        """`keep_s`: how long a block's entry stays without being said again. Raises StoreUnavailable for no address."""
        if not 1 <= keep_s <= 365 * 86_400:
            raise InvalidConfig(f"keep_s must be between a second and a year, not {keep_s}")
        self._lines = RedisLines(url)
        self._prefix = prefix.encode()
        self._keep_ms = int(keep_s * 1000)
        self._metrics = metrics if metrics is not None else Metrics()
        self._breaker = Breaker(failures=2, pause_s=1.0)
        self._lock = threading.Lock()
        self._closed = False
        self._pid = os.getpid()

    # --- the interface ------------------------------------------------------------------------------------------------

    def apply(self, update: Update, *, deadline: Deadline) -> Applied:
        """Take in what a node says. Raises InvalidInput for what no node could have said."""
        require(update)
        self._require_usable()
        keys = b"".join(key for change in update.changes for key in change.keys)
        states = b"".join(bytes([change.state]) * len(change.keys) for change in update.changes)
        try:
            answer = self._run(
                UPDATE,
                (
                    *(update.node.encode(), update.kind.encode(), update.epoch, update.sequence, _term(update)),
                    *(int(update.lease_s * 1000), self._keep_ms, REMEMBERED_MS, keys, states),
                ),
                deadline,
            )
            return Applied(answer.decode())
        except (RedisError, AttributeError, ValueError):
            return Applied.FAILED

    def lookup(self, keys: Sequence[BlockKey], *, deadline: Deadline) -> Found:
        """The longest prefix of a path per node and tier."""
        self._require_usable()
        if not keys:
            return Found(0)
        begun_s = deadline.clock.monotonic()
        with self._lock:
            if not self._breaker.allows(begun_s):
                self._metrics.count("residency_lookups_total", outcome="paused")
                return Found(len(keys), answered=False)
        try:
            found = _found(len(keys), self._run(LOOKUP, (b"".join(keys),), deadline))
        except (RedisError, AttributeError, TypeError, ValueError):
            found = Found(len(keys), answered=False)
        now_s = deadline.clock.monotonic()
        with self._lock:
            if found.answered:
                self._breaker.succeeded()
            elif self._breaker.failed(now_s):
                self._metrics.event("residency_paused", where=self._lines.where)
        self._metrics.count("residency_lookups_total", outcome="answered" if found.answered else "failed")
        self._metrics.observe("residency_lookup_seconds", max(0.0, now_s - begun_s))
        return found

    def nodes(self, *, deadline: Deadline) -> tuple[Node, ...] | None:
        """Who is there."""
        try:
            now_ms, records = self._records(deadline)
        except (RedisError, AttributeError, TypeError, ValueError):
            return None
        live = {name: one for name, one in records.items() if one.until_ms > now_ms}
        return tuple(Node(name, one.epoch, (one.until_ms - now_ms) / 1000, one.doubtful) for name, one in live.items())

    def last_epoch(self, node: str, *, deadline: Deadline) -> int | None:
        """The newest epoch that was heard of a node."""
        try:
            _, records = self._records(deadline)
        except (RedisError, AttributeError, TypeError, ValueError):
            return None
        return records[node].epoch if node in records else None

    def close(self) -> None:
        """Leave the server. A call that is under way ends by its deadline."""
        self._closed = True
        if self._pid == os.getpid():
            self._lines.close()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _run(self, script: bytes, words: tuple[bytes | int, ...], deadline: Deadline) -> Any:
        """One round trip; two where the server does not know the script yet. Raises RedisError."""
        name = hashlib.sha1(script, usedforsecurity=False).hexdigest().encode()
        (answer,) = self._lines.ask([(b"EVALSHA", name, 0, self._prefix, *words)], deadline)
        if isinstance(answer, Refused) and answer.code == "NOSCRIPT":
            (answer,) = self._lines.ask([(b"EVAL", script, 0, self._prefix, *words)], deadline)
        if isinstance(answer, RedisError):
            raise answer
        return answer

    def _records(self, deadline: Deadline) -> tuple[int, dict[str, _RedisRecord]]:
        self._require_usable()
        time, flat = self._lines.ask([(b"TIME",), (b"HGETALL", self._prefix + b"nodes")], deadline)
        return _now_ms(time), _records(flat)

    def _require_usable(self) -> None:
        if self._pid != os.getpid():
            raise StoreForked("this index was opened before fork(): open it again in the child")
        if self._closed:
            raise ResourceClosed("the residency index is closed")


def _term(update: Update) -> bytes:
    """Eight bytes that no other round of any node has."""
    numbers = struct.pack("<QQ", update.epoch, update.round)
    return hashlib.sha256(b"headwater/residency/term" + numbers + update.node.encode()).digest()[:8]


def _now_ms(time: Sequence[bytes]) -> int:
    seconds, micros = map(int, time)
    return seconds * 1000 + micros // 1000


def _records(flat: Sequence[bytes]) -> dict[str, _RedisRecord]:
    """The nodes' records by name. What is none is left out."""
    found: dict[str, _RedisRecord] = {}
    for name, text in zip(flat[::2], flat[1::2], strict=True):
        words = text.split()
        if len(words) == 7:
            found[name.decode()] = _RedisRecord(int(words[0]), int(words[2]), words[5] == b"1")
    return found


def _found(num_blocks: int, answer: Sequence[Any]) -> Found:
    """What the look-up script says, in our words."""
    values, owners = answer
    node_of: dict[bytes, str] = {}
    doubtful: set[str] = set()
    at = 0
    while at < len(owners):  # a term, a length, a doubt, a name
        end = at + 12 + int(owners[at + 8 : at + 12])
        name = node_of[owners[at : at + 8]] = owners[at + 13 : end].decode()
        if owners[at + 12 : at + 13] == b"1":
            doubtful.add(name)
        at = end
    runs = [(_tiers(value, node_of), count) for value, count in zip(values[::2], values[1::2], strict=True)]
    first = runs[0][0] if runs else {}
    holders = [
        holder(name, ((tiers.get(name, 0), count) for tiers, count in runs), doubtful=name in doubtful)
        for name in first
    ]
    pool = prefixes((_union(tiers), count) for tiers, count in runs)[_POOL_AT]
    return Found(num_blocks, ranked(holders), pool)


def _tiers(value: bytes, node_of: Mapping[bytes, str]) -> dict[str, int]:
    """Which live nodes hold a block, and where."""
    found: dict[str, int] = {}
    for at in range(0, len(value) - _ENTRY_BYTES + 1, _ENTRY_BYTES):
        node = node_of.get(value[at : at + 8])
        if node is not None:
            found[node] = found.get(node, 0) | value[at + 8]
    return found


def _union(tiers: Mapping[str, int]) -> int:
    bits = 0
    for one in tiers.values():
        bits |= one
    return bits
