"""MemoryStore: frames in a dict, with a byte limit. The simplest store that keeps every rule; for tests and teaching.

Not shared between processes and gone with its own; the host tier of a node is a MappedStore.
"""

import threading
from collections.abc import Sequence

from headwater.core.errors import InvalidConfig, ResourceClosed
from headwater.core.page import PageName
from headwater.core.results import Status
from headwater.layout.frame import Header, parse
from headwater.policy import BlockFacts, History, LeafOrder, Lru, Policy
from headwater.storage.base import SYSTEM_CLOCK, Clock, Deadline, Store, StoreFill


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
        self._history: History[PageName] | None = History(lambda: self._order) if self._policy.looks_back else None
        self._num_bytes = 0
        self._closed = False

    @property
    def num_bytes(self) -> int:
        """Bytes of all frames held."""
        return self._num_bytes

    def fill(self) -> StoreFill:
        """Bytes of all frames."""
        return StoreFill(self._num_bytes, self._limit_bytes)

    def names(self) -> list[PageName]:
        """The pages that are held, in no order."""
        with self._lock:
            return list(self._entries)

    def put(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[Status]:
        """Copy frames in, evicting leaves where the limit asks for it."""
        with self._lock:
            self._require_open()
            now_s = self._clock.time()
            return [Status.LATE if deadline.expired else self._put(name, frame, now_s) for name, frame in pages]

    def _put(self, name: PageName, frame: memoryview, now_s: float) -> Status:
        header = parse(frame)
        if isinstance(header, Status) or header.meta.name != name or len(frame) != header.frame_bytes:
            return Status.REFUSED
        if len(frame) > self._limit_bytes:
            return Status.REFUSED
        held = self._entries.get(name)
        if held is not None and 0 < held.header.meta.expires_at_ms <= self._clock.time() * 1000:
            self._remove(name)
        elif held is not None:
            self._touch(name, now_s, times=0)
            return Status.EXISTS
        if header.meta.depth and header.meta.parent_name not in self._entries:
            return Status.NO_PARENT
        while self._num_bytes + len(frame) > self._limit_bytes:
            victim = self._order.pop(spare={header.meta.parent_name})
            if victim is None:
                return Status.NO_ROOM
            self._num_bytes -= len(self._entries.pop(victim[0]).frame)
            if self._history is not None:
                self._history.evicted(victim[0])
        entry = self._entries[name] = _Entry(bytes(frame), header)
        self._order.add(name, header.meta.parent_name, self._policy.priority(self._facts(name, entry, now_s)))
        self._num_bytes += len(frame)
        return Status.STORED

    def get_into(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[Status]:
        """Copy frames out."""
        with self._lock:
            self._require_open()
            return [self._get(name, buffer, deadline, use=True) for name, buffer in pages]

    def peek_into(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[Status]:
        """Copy frames out. Who leaves next stays as it was."""
        with self._lock:
            self._require_open()
            return [self._get(name, buffer, deadline, use=False) for name, buffer in pages]

    def _get(self, name: PageName, buffer: memoryview, deadline: Deadline, *, use: bool) -> Status:
        entry = self._entries.get(name)
        if entry is None:
            return Status.MISS
        if deadline.expired:
            return Status.LATE
        if len(buffer) != len(entry.frame):
            return Status.SHORT
        buffer[:] = entry.frame
        if use:
            entry.hits += 1
            self._touch(name, self._clock.time(), times=1)
        return Status.HIT

    def contains(self, names: Sequence[PageName], *, deadline: Deadline) -> list[bool]:
        """Which pages are there."""
        with self._lock:
            self._require_open()
            late = deadline.expired
            return [not late and name in self._entries for name in names]

    def delete(self, names: Sequence[PageName], *, deadline: Deadline) -> list[Status]:
        """Remove pages and what builds on them."""
        with self._lock:
            self._require_open()
            if deadline.expired:
                return [Status.LATE] * len(names)
            there = [name in self._entries for name in names]
            for name in names:
                self._remove(name)
            return [Status.REMOVED if was else Status.ABSENT for was in there]

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

    def _facts(self, name: PageName, entry: _Entry, now_s: float, *, times: int = 1) -> BlockFacts:
        meta, num_bytes = entry.header.meta, len(entry.frame)
        if self._history is None:
            return BlockFacts(used_s=now_s, hits=entry.hits, depth=meta.depth, num_bytes=num_bytes)
        if name in self._order:
            return self._history.hit(name, now_s, depth=meta.depth, num_bytes=num_bytes, times=times)
        return self._history.inserted(name, meta.parent_name, now_s, depth=meta.depth, num_bytes=num_bytes)

    def _remove(self, name: PageName) -> None:
        for gone in list(self._order.subtree(name)):
            self._order.remove(gone)
            self._num_bytes -= len(self._entries.pop(gone).frame)

    def _touch(self, name: PageName, now_s: float, *, times: int) -> None:
        facts = self._facts(name, self._entries[name], now_s, times=times)
        self._order.touch(name, self._policy.priority(facts))
