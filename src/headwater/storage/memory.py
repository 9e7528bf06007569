"""MemoryStore: frames in a dict, with a byte limit. The simplest store that keeps every rule; for tests and teaching.

Not shared between processes and gone with its own; the host tier of a node is a MappedStore.
"""

import threading
from collections.abc import Sequence

from headwater.core.errors import InvalidConfig, ResourceClosed
from headwater.core.page import PageName
from headwater.layout.frame import Fault, Header, parse
from headwater.policy import BlockFacts, LeafOrder, Lru, Policy
from headwater.storage.base import SYSTEM_CLOCK, Clock, Deadline, DeleteStatus, GetStatus, PutStatus, Store


class _Entry:
    __slots__ = ("frame", "header", "hits")

    def __init__(self, frame: bytes, header: Header) -> None:
        self.frame = frame
        self.header = header
        self.hits = 0


class MemoryStore(Store):
    """A dict of frames under one lock."""

    def __init__(self, limit_bytes: int, *, policy: Policy | None = None, clock: Clock = SYSTEM_CLOCK) -> None:
        if limit_bytes <= 0:
            raise InvalidConfig(f"limit_bytes must be positive, not {limit_bytes}")
        self._limit_bytes = limit_bytes
        self._policy = policy or Lru()
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: dict[PageName, _Entry] = {}
        self._order: LeafOrder[PageName] = LeafOrder()
        self._num_bytes = 0
        self._closed = False

    @property
    def num_bytes(self) -> int:
        """Bytes of all frames held."""
        return self._num_bytes

    def put(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[PutStatus]:
        """Copy frames in, evicting leaves where the limit asks for it."""
        with self._lock:
            self._require_open()
            return [PutStatus.LATE if deadline.expired else self._put(name, frame) for name, frame in pages]

    def _put(self, name: PageName, frame: memoryview) -> PutStatus:
        header = parse(frame)
        if isinstance(header, Fault) or header.meta.name != name or len(frame) != header.frame_bytes:
            return PutStatus.REFUSED
        if len(frame) > self._limit_bytes:
            return PutStatus.REFUSED
        held = self._entries.get(name)
        if held is not None and 0 < held.header.meta.expires_at_ms <= self._clock.time() * 1000:
            self._remove(name)
        elif held is not None:
            self._touch(name)
            return PutStatus.EXISTS
        if header.meta.depth and header.meta.parent_name not in self._entries:
            return PutStatus.NO_PARENT
        while self._num_bytes + len(frame) > self._limit_bytes:
            victim = self._order.pop(spare={header.meta.parent_name})
            if victim is None:
                return PutStatus.NO_ROOM
            self._num_bytes -= len(self._entries.pop(victim[0]).frame)
        entry = self._entries[name] = _Entry(bytes(frame), header)
        self._order.add(name, header.meta.parent_name, self._priority(entry))
        self._num_bytes += len(frame)
        return PutStatus.STORED

    def get_into(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[GetStatus]:
        """Copy frames out."""
        with self._lock:
            self._require_open()
            return [self._get(name, buffer, deadline) for name, buffer in pages]

    def _get(self, name: PageName, buffer: memoryview, deadline: Deadline) -> GetStatus:
        entry = self._entries.get(name)
        if entry is None:
            return GetStatus.MISS
        if deadline.expired:
            return GetStatus.LATE
        if len(buffer) != len(entry.frame):
            return GetStatus.SHORT
        buffer[:] = entry.frame
        entry.hits += 1
        self._touch(name)
        return GetStatus.HIT

    def contains(self, names: Sequence[PageName], *, deadline: Deadline) -> list[bool]:
        """Which pages are there."""
        with self._lock:
            self._require_open()
            late = deadline.expired
            return [not late and name in self._entries for name in names]

    def delete(self, names: Sequence[PageName], *, deadline: Deadline) -> list[DeleteStatus]:
        """Remove pages and what builds on them."""
        with self._lock:
            self._require_open()
            if deadline.expired:
                return [DeleteStatus.LATE] * len(names)
            there = [name in self._entries for name in names]
            for name in names:
                self._remove(name)
            return [DeleteStatus.REMOVED if was else DeleteStatus.ABSENT for was in there]

    def close(self) -> None:
        """Forget everything."""
        with self._lock:
            self._closed = True
            self._entries.clear()
            self._order = LeafOrder()
            self._num_bytes = 0

    def _require_open(self) -> None:
        if self._closed:
            raise ResourceClosed("the store is closed")

    def _priority(self, entry: _Entry) -> float:
        used_s, meta = self._clock.time(), entry.header.meta
        facts = BlockFacts(used_s=used_s, hits=entry.hits, depth=meta.depth, num_bytes=len(entry.frame))
        return self._policy.priority(facts)

    def _remove(self, name: PageName) -> None:
        for gone in list(self._order.subtree(name)):
            self._order.remove(gone)
            self._num_bytes -= len(self._entries.pop(gone).frame)

    def _touch(self, name: PageName) -> None:
        self._order.touch(name, self._priority(self._entries[name]))
