"""The prefix index as a radix tree: blocks that were always used together are one run.

A run holds the keys of its blocks back to back, their slots, and one record of use for all of them. A walk compares a
whole run in one memcmp, so a match costs by the number of runs in its path, hardly by the number of blocks, and not at
all by how many blocks are known elsewhere. A run is split where paths part or where a hold ends, and grows in place
while one request fills it. A block costs its key, four bytes of slot, one of marks, and its share of the run.

Splits keep the *lower* part in the old object, so that holds and pins, which point at the run of their last block,
need no list of who points where.
"""

import heapq
from array import array
from collections.abc import Iterator, Sequence
from typing import Final, cast

from headwater.core.keys import BlockKey
from headwater.core.page import KEY_BYTES
from headwater.index.base import Hold, PrefixIndex, Victim
from headwater.policy import BlockFacts, Policy

_K: Final = KEY_BYTES
_REACH: Final = 64  # how far from the next victim `pin_coldest` looks: what lies behind has time


class _Run:
    """Blocks in a row with one history. `start` is the depth of the first."""

    __slots__ = (
        "children", "guards", "hits", "keys", "marks", "parent", "pins", "refs", "slots", "start", "ticket", "used_s",
    )  # fmt: skip

    def __init__(self, parent: "_Run | None", start: int, used_s: float) -> None:
        self.parent = parent
        self.start = start
        self.keys = bytearray()
        self.slots: array[int] = array("i")
        self.marks = bytearray()
        self.children: dict[bytes, _Run] | None = None
        self.refs = 0  # holds that end here
        self.pins = 0  # pins that end here
        self.guards = 0  # refs + pins + children that are guarded: with any, the run cannot leave
        self.hits = 0
        self.used_s = used_s
        self.ticket = 0  # of its valid entry among the free leaves; 0: it is none of them

    @property
    def end(self) -> int:
        return self.start + len(self.slots)


class RadixIndex(PrefixIndex):
    """The index that is used."""

    def __init__(self, policy: Policy, *, block_bytes: int) -> None:
        self._policy = policy
        self._block_bytes = block_bytes
        self._root = _Run(None, 0, 0.0)
        self._num_blocks = 0
        self._num_guarded = 0
        # Free leaves: (priority, ticket, run). Entries whose ticket is no longer the run's are stale.
        self._leaves: list[tuple[float, int, _Run]] = []
        self._num_leaves = 0
        self._ticket = 0

    def __len__(self) -> int:
        """Blocks known."""
        return self._num_blocks

    @property
    def num_evictable(self) -> int:
        """Blocks that no hold or pin keeps."""
        return self._num_blocks - self._num_guarded

    # --- finding ------------------------------------------------------------------------------------------------------

    def find(self, keys: Sequence[BlockKey]) -> int:
        """How many leading blocks of a sequence are known."""
        run, inside = self._walk(self._root, b"".join(keys))
        return run.start + inside

    def _walk(self, run: _Run, wanted: bytes) -> tuple[_Run, int]:
        """Follow keys from the end of `run`. Returns the last run reached and how many of its blocks fit."""
        at, end = 0, len(wanted)
        while at < end:
            child = run.children.get(wanted[at : at + _K]) if run.children is not None else None
            if child is None:
                break
            num_bytes = min(len(child.keys), end - at)
            if child.keys[:num_bytes] != wanted[at : at + num_bytes]:
                return child, _common(child.keys, wanted[at : at + num_bytes])
            if num_bytes < len(child.keys):
                return child, num_bytes // _K
            run, at = child, at + num_bytes
        return run, len(run.slots)

    def hold(self, keys: Sequence[BlockKey], *, now_s: float) -> Hold:
        """Hold the longest known prefix. Counts a hit on each of its blocks."""
        hold = Hold(self._root, 0)
        self._guard(self._root, holds=1)
        self.advance(hold, keys, now_s=now_s)
        return hold

    def advance(self, hold: Hold, keys: Sequence[BlockKey], *, now_s: float) -> int:
        """Move a hold over those of the next keys that are known by now."""
        before, old = hold.num_blocks, self._end_of(hold)
        run, inside = self._walk(old, b"".join(keys))
        if run is old:
            return 0
        if inside < len(run.slots):
            run = self._split(run, inside)
        self._use(run, old, now_s, hit=True)
        self._move(hold, run)
        return hold.num_blocks - before

    # --- changing -----------------------------------------------------------------------------------------------------

    def extend(self, hold: Hold, keys: Sequence[BlockKey], slots: Sequence[int], *, now_s: float) -> "array[int]":
        """Get or create the blocks behind a hold, and move it to the last of them."""
        start, old = hold.num_blocks, self._end_of(hold)
        self.advance(hold, keys, now_s=now_s)
        num_known = hold.num_blocks - start
        taken = self.slots(hold, start) if num_known else array("i")
        if num_known == len(keys):
            return taken
        run = cast(_Run, hold.at)
        joined = b"".join(keys[num_known:])
        fresh = array("i", slots[num_known:])
        if not (run is old and run.refs == 1 and run.hits == 0 and run.children is None and run.parent is not None):
            child = _Run(run, run.end, now_s)
            if run.children is None:
                run.children = {}
            run.children[joined[:_K]] = child
            self._move(hold, child)
            run = child
        run.keys += joined
        run.slots += fresh
        run.marks += bytes(len(fresh))
        run.used_s = now_s
        hold.num_blocks = run.end
        self._num_blocks += len(fresh)
        self._num_guarded += len(fresh)
        taken.extend(fresh)
        return taken

    def release(self, hold: Hold, *, now_s: float) -> None:
        """Give a hold back. Its blocks count as used until now."""
        run = self._end_of(hold)
        self._use(run, self._root, now_s, hit=False)
        self._guard(run, holds=-1)
        hold.at = None

    def pin(self, hold: Hold, num_blocks: int | None = None) -> Hold:
        """Keep the first blocks of a hold, or all, for a job."""
        wanted = hold.num_blocks if num_blocks is None else num_blocks
        run = self._end_of(hold)
        while run.start >= wanted and run.parent is not None:
            run = run.parent
        self._guard(run, pins=1)
        return Hold(run, wanted)

    def unpin(self, pin: Hold) -> None:
        """Give a pin back. Its run may be cut short or gone after this; what it says of its path stays true."""
        self._guard(cast(_Run, pin.at), pins=-1)

    def pin_coldest(self, bit: int) -> Hold | None:
        """Pin the next victim that is not marked with `bit`."""
        seen: list[tuple[float, int, _Run]] = []
        found: _Run | None = None
        while found is None and len(seen) < _REACH and self._settle():
            seen.append(heapq.heappop(self._leaves))
            run = seen[-1][2]
            found = None if run.marks[-1] & bit else run
        for entry in seen:
            heapq.heappush(self._leaves, entry)
        if found is None:
            return None
        self._guard(found, pins=1)
        return Hold(found, found.end)

    def evict(self) -> Victim | None:
        """Remove the leaf with the lowest priority that nobody holds or pins."""
        if not self._settle():
            return None
        leaves = self._leaves
        _, ticket, run = leaves[0]
        depth = run.end - 1
        key = BlockKey(bytes(run.keys[-_K:]))
        victim = Victim(key, run.slots.pop(), depth, run.hits, run.used_s, run.marks.pop())
        del run.keys[-_K:]
        self._num_blocks -= 1
        if run.slots:
            heapq.heapreplace(leaves, (self._priority(run), ticket, run))
            return victim
        heapq.heappop(leaves)
        run.ticket = 0
        self._num_leaves -= 1
        parent = run.parent
        assert parent is not None
        assert parent.children is not None
        del parent.children[key]
        if not parent.children:
            parent.children = None
            self._offer(parent)
        return victim

    # --- what is held -------------------------------------------------------------------------------------------------

    def slots(self, hold: Hold, start: int = 0) -> "array[int]":
        """Slots of the held blocks from `start` on."""
        found: array[int] = array("i")
        for run, first, last in self._parts(hold, start, hold.num_blocks):
            found += run.slots[first:last] if last - first < len(run.slots) else run.slots
        return found

    def keys(self, hold: Hold, start: int = 0) -> list[BlockKey]:
        """Keys of the held blocks from `start` on."""
        return [
            BlockKey(bytes(run.keys[i * _K : (i + 1) * _K]))
            for run, first, last in self._parts(hold, start, hold.num_blocks)
            for i in range(first, last)
        ]

    def num_hot(self, hold: Hold, hits: int) -> int:
        """How many leading held blocks were hit at least so often."""
        run = cast(_Run, hold.at)
        while run.parent is not None and run.hits < hits:  # who comes before was hit at least as often
            run = run.parent
        return min(run.end, hold.num_blocks)

    def mark(self, hold: Hold, start: int, end: int, *, bit: int, on: bool) -> None:
        """Remember, or forget, that blocks [start, end) are in the store of this bit."""
        table = bytes(marks | bit if on else marks & ~bit for marks in range(256))
        for run, first, last in self._parts(hold, start, end):
            run.marks[first:last] = run.marks[first:last].translate(table)

    def num_marked(self, hold: Hold, bit: int) -> int:
        """How many held blocks come before those at the end that lack `bit`."""
        at = hold.num_blocks
        run: _Run | None = cast(_Run, hold.at)
        while run is not None:
            while at > run.start:
                if run.marks[at - 1 - run.start] & bit:
                    return at
                at -= 1
            run = run.parent
        return 0

    def blocks(self) -> list[tuple[BlockKey, BlockKey | None, int]]:
        """Every block as (key, key before it, slot)."""
        found: list[tuple[BlockKey, BlockKey | None, int]] = []
        for run in self._runs():
            parent = run.parent
            before = BlockKey(bytes(parent.keys[-_K:])) if parent is not None and parent.keys else None
            for i, slot in enumerate(run.slots):
                key = BlockKey(bytes(run.keys[i * _K : (i + 1) * _K]))
                found.append((key, before, slot))
                before = key
        return found

    def validate(self) -> None:
        """Raise AssertionError if the index contradicts itself."""
        num_blocks = num_guarded = num_leaves = 0
        valid = {id(run): priority for priority, ticket, run in self._leaves if run.ticket == ticket}
        for run in self._runs():
            children = list((run.children or {}).items())
            assert run.children is None or children, "an empty dict of children"
            assert len(run.keys) == _K * len(run.slots) == _K * len(run.marks), "keys, slots and marks differ"
            assert run.parent is None or run.slots, "an empty run"
            for key, child in children:
                assert child.keys[:_K] == key, "a run under another's key"
                assert child.parent is run, "a run whose parent is another"
                assert child.start == run.end, "a run at the wrong depth"
                assert child.hits <= run.hits or run.parent is None, "a block used more often than the one before it"
            guards = run.refs + run.pins + sum(child.guards > 0 for _, child in children)
            assert min(run.refs, run.pins) >= 0, "given back more often than taken"
            assert run.guards == guards, "guards do not add up"
            free_leaf = run.parent is not None and not guards and not children
            assert free_leaf == (run.ticket != 0) == (id(run) in valid), "a free leaf that is not in the order"
            assert not free_leaf or valid[id(run)] == self._priority(run), "a priority that is not the policy's"
            num_blocks += len(run.slots)
            num_guarded += len(run.slots) if guards else 0
            num_leaves += free_leaf
        assert (num_blocks, num_guarded) == (self._num_blocks, self._num_guarded), "blocks do not add up"
        assert num_leaves == self._num_leaves, "leaves do not add up"

    # --- inside -------------------------------------------------------------------------------------------------------

    def _end_of(self, hold: Hold) -> _Run:
        """The run at whose end a request's hold is. Others' holds end there too, or nowhere in it."""
        run = cast(_Run, hold.at)
        assert run.end == hold.num_blocks, "a hold inside a run"
        return run

    def _runs(self) -> Iterator[_Run]:
        stack = [self._root]
        while stack:
            run = stack.pop()
            yield run
            stack.extend((run.children or {}).values())

    def _parts(self, hold: Hold, start: int, end: int) -> list[tuple[_Run, int, int]]:
        """Runs of a hold's path that lie in [start, end), in order, each with the range inside it."""
        found = []
        run: _Run | None = cast(_Run, hold.at)
        while run is not None and run.end > start:
            first, last = max(start - run.start, 0), min(end - run.start, len(run.slots))
            if first < last:
                found.append((run, first, last))
            run = run.parent
        found.reverse()
        return found

    def _move(self, hold: Hold, run: _Run) -> None:
        old = cast(_Run, hold.at)
        self._guard(run, holds=1)
        self._guard(old, holds=-1)
        hold.at, hold.num_blocks = run, run.end

    def _use(self, run: _Run, until: _Run, now_s: float, *, hit: bool) -> None:
        """Blocks of a path were used: those from behind `until` to the end of `run`."""
        at: _Run | None = run
        while at is not None and at is not until:
            at.hits += hit
            at.used_s = now_s
            if at.ticket:  # a free leaf that was hit: it is about to be held, and asks again when it is free
                self._withdraw(at)
            at = at.parent

    def _guard(self, run: _Run, *, holds: int = 0, pins: int = 0) -> None:
        """Add or remove a hold or pin; tell the runs before whether they are guarded."""
        run.refs += holds
        run.pins += pins
        change = holds + pins
        at: _Run | None = run
        while at is not None:
            was = at.guards > 0
            at.guards += change
            now = at.guards > 0
            if was == now:
                return
            self._num_guarded += len(at.slots) if now else -len(at.slots)
            if now and at.ticket:
                self._withdraw(at)
            elif not now:
                self._offer(at)
            at = at.parent

    def _offer(self, run: _Run) -> None:
        """Put a run among the free leaves if it is one."""
        if run.guards or run.children is not None or run.parent is None or run.ticket:
            return
        self._ticket += 1
        run.ticket = self._ticket
        self._num_leaves += 1
        heapq.heappush(self._leaves, (self._priority(run), run.ticket, run))
        if len(self._leaves) > 2 * self._num_leaves + 64:
            self._leaves = [entry for entry in self._leaves if entry[2].ticket == entry[1]]
            heapq.heapify(self._leaves)

    def _settle(self) -> bool:
        """Bring a valid entry to the top of the free leaves; False if there is none."""
        leaves = self._leaves
        while leaves and leaves[0][2].ticket != leaves[0][1]:
            heapq.heappop(leaves)
        return bool(leaves)

    def _withdraw(self, run: _Run) -> None:
        run.ticket = 0
        self._num_leaves -= 1

    def _priority(self, run: _Run) -> float:
        """What the last block of a run is worth."""
        facts = BlockFacts(used_s=run.used_s, hits=run.hits, depth=run.end - 1, num_bytes=self._block_bytes)
        return self._policy.priority(facts)

    def _split(self, run: _Run, inside: int) -> _Run:
        """Cut a run behind its first `inside` blocks. Returns the new upper part; the lower keeps its identity."""
        parent = run.parent
        assert parent is not None
        assert parent.children is not None
        assert 0 < inside < len(run.slots)
        upper = _Run(parent, run.start, run.used_s)
        upper.hits = run.hits
        upper.keys, run.keys = run.keys[: inside * _K], run.keys[inside * _K :]
        upper.slots, run.slots = run.slots[:inside], run.slots[inside:]
        upper.marks, run.marks = run.marks[:inside], run.marks[inside:]
        upper.children = {bytes(run.keys[:_K]): run}
        upper.guards = int(run.guards > 0)
        run.parent, run.start = upper, upper.end
        parent.children[bytes(upper.keys[:_K])] = upper
        return upper


def _common(known: bytearray, wanted: bytes) -> int:
    """How many leading keys two rows share. They differ somewhere."""
    low, high = 0, len(wanted) // _K  # the first `low` are equal, the first `high` are not
    while high - low > 1:
        middle = (low + high) // 2
        if known[low * _K : middle * _K] == wanted[low * _K : middle * _K]:
            low = middle
        else:
            high = middle
    return low
