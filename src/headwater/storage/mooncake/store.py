"""MooncakeStore: frames as objects of a Mooncake pool, shared by the machines of a cluster.

One object per page, under `prefix` and the name in hex; header and all planes are one frame already. Pages are handed
to the engine where they lie (rule: zero copy) and in batches, because it asks its master about each batch and not about
each page. Memory that the engine cannot reach (RDMA without `register`, shared memory that is not from `memory`) goes
through a buffer of the store's own.

What an answer means (rules 7 and 8):

- STORED: the engine said success, and the object was then seen, complete and in full length. The engine says success
  to a second put of a key too, keeps the first value, and does so even while somebody else is only writing it.
- HIT: exactly as many bytes as the destination has. Everything else is a miss; lengths that differ are SHORT.
- `delete` removes by force, whatever lease protects a page.

What is the pool's and not ours:

- Room, and what is evicted: the master's, page by page, by leases. It knows no chains: a put answers NO_PARENT where
  the page before is missing, but what builds on an evicted or deleted page stays, unread, until it goes itself.
- What is removed by force is removed under its readers too: the place may be another page's before they have finished,
  and a raw HIT then holds that one. `verified.py` turns it down, as it does all that is not the page asked for.
- Pages live in the memory of those who give it. A master that restarts has forgotten all of them.

Calls cannot be interrupted (`interruptible`): the deadline is looked at before each batch, and a batch that was begun
ends when the engine ends it. `mooncake/engine.py` says how long that may be.
"""

import logging
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, Final, Self

from headwater.core.errors import InvalidInput, ResourceClosed, StoreForked
from headwater.core.page import PageName
from headwater.core.results import Status
from headwater.layout.frame import PageMeta, parse
from headwater.storage.base import Deadline, Store
from headwater.storage.mooncake.config import MooncakeConfig, parse_url
from headwater.storage.mooncake.engine import ABSENT, INVALID, RPC_FAIL, UNSIZED, MooncakeEngine
from headwater.storage.mooncake.memory import MooncakeMemory, room

log: Final = logging.getLogger("headwater")

_BATCH_PAGES: Final = 512  # of one call of the engine, and
_BATCH_BYTES: Final = 64 << 20  # at most so many bytes: no gain beyond, and the deadline is looked at in between
_BATCH_NAMES: Final = 1024
_NO_ROOM: Final = -200
_NOT_READY: Final = -703
_ROOM_WAITS_S: Final = (0.02, 0.04, 0.08)  # the master makes room in the background, every 10 ms, when a put found none
_SEEN_WAITS_S: Final = (0.0, 0.01, 0.05, 0.2)  # for somebody else's put of the same page to end

Items = Sequence[tuple[PageName, memoryview]]


class MooncakeStore(Store):
    """Pages in a Mooncake pool. All calls may come from several threads; they block, and some for seconds."""

    interruptible: ClassVar[bool] = False
    portion_bytes: ClassVar[int] = 4 << 20

    def __init__(self, config: MooncakeConfig | str, *, engine: MooncakeEngine | None = None) -> None:
        """Join the pool of a config or `mooncake://` URL. Raises InvalidConfig, StoreUnavailable (says what to do).

        With `engine`, one that several stores of a process share: closing the store leaves it open.
        """
        self.config = parse_url(config) if isinstance(config, str) else config
        self._engine = engine if engine is not None else MooncakeEngine(self.config)
        self._owns_engine = engine is None
        self._memory = MooncakeMemory(self._engine, self.config.buffer_bytes)
        self._closed = False
        self._pid = os.getpid()

    # --- memory -------------------------------------------------------------------------------------------------------

    def registering(self) -> Self:
        """Itself."""
        return self

    def register(self, memory: memoryview) -> bool:
        """Let the engine reach the pages in this memory where they lie; it must stay until the store is closed.

        False: it cannot, and they will be copied through a buffer. Over TCP it reaches all memory.
        """
        self._require_usable()
        return self._engine.register(memory)

    def memory(self, num_bytes: int) -> memoryview:
        """Page-aligned memory that the engine reaches: shared with the client process where that is the way.

        It stays valid, but is given to the next who asks, once the store is closed. Raises StoreUnavailable.
        """
        self._require_usable()
        return self._engine.allocate(num_bytes)

    # --- the store interface ------------------------------------------------------------------------------------------

    def put(self, pages: Items, *, deadline: Deadline) -> list[Status]:
        """Store frames that are not there yet; STORED once each was seen there in full length."""
        self._require_usable()
        results = [Status.REFUSED] * len(pages)
        metas: dict[int, PageMeta] = {}
        for i, (name, frame) in enumerate(pages):
            header = parse(frame) if self._memory.takes(frame) else Status.FOREIGN
            if not isinstance(header, Status) and header.meta.name == name and len(frame) == header.frame_bytes:
                metas[i] = header.meta
        trouble = Status.LATE if deadline.expired else None
        held = self._look({i: (meta, len(pages[i][1])) for i, meta in metas.items()}, deadline) if not trouble else {}
        if held is None:
            trouble, held = Status.FAILED, {}
        for batch, reached in self._batches(pages, metas):
            twins: list[int] = []
            going: dict[PageName, int] = {}
            if trouble is None and deadline.expired:
                trouble = Status.LATE
            for i in batch:
                meta = metas[i]
                if trouble is not None:
                    results[i] = trouble
                elif meta.name in going:
                    twins.append(i)
                elif held[meta.name]:
                    results[i] = Status.EXISTS if held[meta.name] == len(pages[i][1]) else Status.FAILED
                elif meta.depth and not held[meta.parent_name] and meta.parent_name not in going:
                    results[i] = Status.NO_PARENT
                else:
                    going[meta.name] = i
            if going:
                sent = [(i, metas[i], pages[i][1]) for i in going.values()]
                trouble = self._send(sent, held, results, deadline, reached=reached)
            for i in twins:
                first = results[going[metas[i].name]]
                results[i] = Status.EXISTS if first is Status.STORED else first
        return results

    def get_into(self, pages: Items, *, deadline: Deadline) -> list[Status]:
        """Copy frames out, as they are: the caller verifies."""
        self._require_usable()
        if any(buffer.readonly for _, buffer in pages):
            raise InvalidInput("a page cannot be read into memory that may not be written to")  # the engine would
        results = [Status.LATE] * len(pages)
        for batch, reached in self._batches(pages, range(len(pages)), once=True):
            if deadline.expired:
                break
            wanted = [(self._key(pages[i][0]), pages[i][1]) for i in batch]
            codes = self._memory.move(wanted, deadline, reached=reached, out=True)
            if codes is None:
                break
            for i, code in zip(batch, codes, strict=True):
                results[i] = _GOT.get(code, Status.FAILED) if code < 0 else _whole(code, len(pages[i][1]))
                if code == INVALID:
                    results[i] = self._why_invalid(pages[i], deadline)
            _tell_trouble("read", [code for i, code in zip(batch, codes, strict=True) if results[i] is Status.FAILED])
            if all(code == RPC_FAIL for code in codes):
                return [*results[: batch[0]], *[Status.FAILED] * (len(pages) - batch[0])]
        return results

    def contains(self, names: Sequence[PageName], *, deadline: Deadline) -> list[bool]:
        """Which pages are there. Keeps those that are from being evicted for a while."""
        self._require_usable()
        found: list[bool] = []
        for start in range(0, len(names), _BATCH_NAMES):
            if deadline.expired:
                break
            keys = [self._key(name) for name in names[start : start + _BATCH_NAMES]]
            codes = self._engine.exist(keys, deadline)
            found += [code == 1 for code in codes]
            if all(code < 0 for code in codes):
                break
        return found + [False] * (len(names) - len(found))

    def delete(self, names: Sequence[PageName], *, deadline: Deadline) -> list[Status]:
        """Remove pages by force. What builds on them stays until it goes itself: the pool knows no chains."""
        self._require_usable()
        results: list[Status] = []
        for start in range(0, len(names), _BATCH_NAMES):
            if deadline.expired:
                return results + [Status.LATE] * (len(names) - len(results))
            codes = self._engine.remove([self._key(name) for name in names[start : start + _BATCH_NAMES]], deadline)
            results += [_DELETED.get(code, Status.FAILED) for code in codes]
            if all(code == RPC_FAIL for code in codes):
                break
        return results + [Status.FAILED] * (len(names) - len(results))

    def close(self) -> None:
        """Leave the pool; the pages stay there. Does not wait for calls that are under way."""
        self._closed = True
        if self._owns_engine and self._pid == os.getpid():
            self._engine.close()

    # --- putting ------------------------------------------------------------------------------------------------------

    def _look(self, pages: dict[int, tuple[PageMeta, int]], deadline: Deadline) -> dict[PageName, int] | None:
        """How many bytes the pool holds of pages, 0 for none; of parents, whether it holds any. None: no answer."""
        sizes = {meta.name: num_bytes for meta, num_bytes in pages.values()}
        names = dict.fromkeys(sizes) | {meta.parent_name: None for meta, _ in pages.values() if meta.depth}
        held: dict[PageName, int] = dict.fromkeys(names, 0)
        asked = list(names)
        for start in range(0, len(asked), _BATCH_NAMES):
            some = asked[start : start + _BATCH_NAMES]
            codes = self._engine.exist([self._key(name) for name in some], deadline)
            if any(code < 0 for code in codes):
                return None
            held |= dict(zip(some, codes, strict=True))
        there = [name for name in sizes if held[name]]
        for start in range(0, len(there), _BATCH_NAMES):
            some = there[start : start + _BATCH_NAMES]
            found = self._engine.sizes([self._key(name) for name in some], deadline)
            for name, size in zip(some, found, strict=True):
                held[name] = sizes[name] if size == UNSIZED else 0 if size == ABSENT else size
        return held

    def _send(
        self,
        pages: Sequence[tuple[int, PageMeta, memoryview]],
        held: dict[PageName, int],
        results: list[Status],
        deadline: Deadline,
        *,
        reached: bool,
    ) -> Status | None:
        """Put one batch, look what came of it, take back what lost its parent. What all further pages are, if bad."""
        frames = [(self._key(meta.name), frame) for _, meta, frame in pages]
        codes = self._put_with_room(frames, deadline, reached=reached)
        if codes is None:
            for i, _, _ in pages:
                results[i] = Status.LATE
            return Status.LATE
        _tell_trouble("write", [code for code in codes if code < 0 and code not in _PUT])
        done = [at for at, code in enumerate(codes) if code == 0]
        seen = dict(zip(done, self._wait_to_see([frames[at] for at in done], deadline), strict=True))
        orphans: list[str] = []
        for at, (i, meta, frame) in enumerate(pages):
            results[i] = seen[at] if at in seen else _PUT.get(codes[at], Status.FAILED)
            if results[i] is Status.STORED and meta.depth and not held[meta.parent_name]:
                results[i] = Status.NO_PARENT
                orphans.append(frames[at][0])
            elif results[i] is Status.STORED:
                held[meta.name] = len(frame)
        if orphans:
            self._engine.remove(orphans, Deadline.after(1))  # also behind the deadline: it must not be there
        return Status.FAILED if all(code == RPC_FAIL for code in codes) else None

    def _put_with_room(
        self, frames: Sequence[tuple[str, memoryview]], deadline: Deadline, *, reached: bool
    ) -> list[int] | None:
        """The codes of a put. Asks again for what found no room, while the master may be making some."""
        codes = self._memory.move(frames, deadline, reached=reached, out=False)
        for wait_s in _ROOM_WAITS_S:
            left = [at for at, code in enumerate(codes or ()) if code == _NO_ROOM]
            if codes is None or not left or deadline.remaining_s < wait_s:
                break
            time.sleep(wait_s)
            again = self._memory.move([frames[at] for at in left], deadline, reached=reached, out=False)
            for at, code in zip(left, again or (), strict=False):
                codes[at] = code
        return codes

    def _wait_to_see(self, frames: Sequence[tuple[str, memoryview]], deadline: Deadline) -> list[Status]:
        """STORED for objects that are there in full length. One look always, behind the deadline too; more until it.

        What is gone again was evicted at once: there is NO_ROOM. What somebody else is still writing has FAILED.
        """
        results = [Status.FAILED] * len(frames)
        left = list(range(len(frames)))
        for wait_s in _SEEN_WAITS_S:
            if not left or (wait_s and deadline.remaining_s < wait_s):
                break
            time.sleep(wait_s)
            until = Deadline.after(max(deadline.remaining_s, 1.0))
            found = self._engine.seen([frames[at][0] for at in left], [len(frames[at][1]) for at in left], until)
            for at, there in zip(left, found, strict=True):
                results[at] = Status.STORED if there else Status.FAILED
            left = [at for at, there in zip(left, found, strict=True) if not there]
            for at in left:
                if self._engine.size(frames[at][0], until) == ABSENT:
                    results[at] = Status.NO_ROOM
            left = [at for at in left if results[at] is Status.FAILED]
        return results

    # --- what goes together -------------------------------------------------------------------------------------------

    def _batches(self, pages: Items, chosen: Iterable[int], *, once: bool = False) -> Iterator[tuple[list[int], bool]]:
        """Indices in portions of one call of the engine each, and whether it reaches their memory.

        `once`: no name twice in one, where the engine would fill only one of the two.
        """
        batch: list[int] = []
        names: set[PageName] = set()
        num_bytes, reached = 0, False
        for i in chosen:
            name, memory = pages[i]
            size, reaches = room(len(memory)), self._memory.reaches(memory)
            limit = _BATCH_BYTES if reaches else self.config.buffer_bytes
            full = len(batch) == _BATCH_PAGES or num_bytes + size > limit or reaches != reached
            if batch and (full or (once and name in names)):
                yield batch, reached
                batch, names, num_bytes = [], set(), 0
            batch.append(i)
            names.add(name)
            num_bytes, reached = num_bytes + size, reaches
        if batch:
            yield batch, reached

    def _why_invalid(self, page: tuple[PageName, memoryview], deadline: Deadline) -> Status:
        """The engine says the same of an object that is too long and of memory it does not know: only one is damage."""
        (size,) = self._engine.sizes([self._key(page[0])], deadline)
        if size == ABSENT:
            return Status.MISS
        return Status.SHORT if size >= 0 and size != len(page[1]) else Status.FAILED

    def _key(self, name: PageName) -> str:
        return self.config.prefix + name.hex()

    def _require_usable(self) -> None:
        if self._pid != os.getpid():
            raise StoreForked("this store was opened before fork(): open it again in the child")
        if self._closed:
            raise ResourceClosed("the store is closed")


def _tell_trouble(what: str, codes: Sequence[int]) -> None:
    """A page that FAILED does not say why: the engine's own codes do."""
    if codes:
        said = ", ".join(f"{code} for {num} pages" for code, num in sorted(Counter(codes).items()))
        log.warning("the Mooncake engine answered a %s with %s", what, said)


def _whole(num_bytes: int, wanted: int) -> Status:
    return Status.HIT if num_bytes == wanted else Status.SHORT


_PUT: Final = {_NO_ROOM: Status.NO_ROOM}
_GOT: Final = {ABSENT: Status.MISS, _NOT_READY: Status.MISS}
_DELETED: Final = {0: Status.REMOVED, ABSENT: Status.ABSENT}
