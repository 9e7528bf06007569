"""The prefix index as a radix tree: blocks that were always used together are one run.

A run holds the keys of its blocks back to back, their slots, and one record of use for all of them. A walk compares a
whole run in one memcmp, so a match costs by the number of runs in its path, hardly by the number of blocks, and not at
all by how many blocks are known elsewhere. A run is split where paths part or where a hold ends, and grows in place
while one request fills it. A block costs its key, four bytes of slot, one of marks, and its share of the run.

Splits keep the *lower* part in the old object, so that holds and pins, which point at the run of their last block,
need no list of who points where.
"""

from array import array
from collections.abc import Callable, Sequence
from typing import Final, cast

from headwater.core.errors import Contradiction
from headwater.core.keys import BlockKey
from headwater.core.page import KEY_BYTES
from headwater.index.appraisal import Appraisal
from headwater.index.base import NO_HINT, Hint, Hold, PrefixIndex, Victim
from headwater.index.free_leaves import FreeLeaves
from headwater.index.ghosts import Ghosts, Past
from headwater.index.leaving import LeavingRuns
from headwater.index.radix_facts import blocks_of, runs_and_leaves, validate_runs
from headwater.index.runs import Run, below, num_marked, parts_of
from headwater.index.tails import Tails
from headwater.policy import Policy, Sessions

_K: Final = KEY_BYTES


class RadixIndex(PrefixIndex):
    """The index that is used."""

    def __init__(
        self,
        policy: Policy,
        *,
        block_bytes: int,
        num_ghosts: int = 0,
        cost: Callable[[int], float] | None = None,
        num_wished: int = 0,
    ) -> None:
        """`cost`: of the block at a depth, given those before it, in seconds; `num_wished`: blocks, see `Wishes`."""
        self.ghosts = Ghosts(num_ghosts)
        sessions = Sessions.of(num_ghosts) if policy.by_sessions else None
        self._worth = Appraisal(policy, sessions, block_bytes=block_bytes, cost=cost)
        self._root = Run(None, 0, Past(0, 0.0, 0), None)
        self._num_blocks = 0
        self._num_guarded = 0
        self._leaves = FreeLeaves(self._worth)
        self._leaving = LeavingRuns()
        self._tails = Tails(self._worth, self._leaves, self.ghosts, num_wished=num_wished)

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

    def _walk(self, run: Run, wanted: bytes) -> tuple[Run, int]:
        """Follow keys from the end of `run`. Returns the last run reached and how many of its blocks fit."""
        at, end = 0, len(wanted)
        while at < end:
            child = run.children.get(wanted[at : at + _K]) if run.children is not None else None
            if child is None:
                break
            num_bytes = min(len(child.keys), end - at)
            if child.keys[:num_bytes] != wanted[at : at + num_bytes]:
                return child, child.num_common(wanted[at : at + num_bytes])
            if num_bytes < len(child.keys):
                return child, num_bytes // _K
            run, at = child, at + num_bytes
        return run, len(run.slots)

    def hold(self, keys: Sequence[BlockKey], *, now_s: float, hint: Hint = NO_HINT) -> Hold:
        """Hold the longest known prefix. Counts a hit on each of its blocks."""
        hold = Hold(self._root, 0, hint)
        self._guard(self._root, holds=1)
        self.advance(hold, keys, now_s=now_s)
        self._tails.came(hold, keys, now_s)
        return hold

    def advance(self, hold: Hold, keys: Sequence[BlockKey], *, now_s: float, hit: bool = True) -> int:
        """Move a hold over those of the next keys that are known by now."""
        before, old = hold.num_blocks, self._end_of(hold)
        if old.cut:
            return 0
        run, inside = self._walk(old, b"".join(keys))
        if run is old:
            return 0
        if inside < len(run.slots):
            run = run.split(inside)
        self._use(run, old, now_s, hit=hit, session=hold.hint.session)
        self._move(hold, run)
        hold.turns = run.past.turns + 1
        return hold.num_blocks - before

    # --- changing -----------------------------------------------------------------------------------------------------

    def extend(
        self, hold: Hold, keys: Sequence[BlockKey], slots: Sequence[int], *, now_s: float, seen: bool = False
    ) -> "array[int]":
        """Get or create the blocks behind a hold, and move it to the last of them."""
        start = hold.num_blocks
        if keys and cast(Run, hold.at).cut:
            raise Contradiction("blocks for everybody behind some that nobody finds")
        self.advance(hold, keys, now_s=now_s)
        num_known = hold.num_blocks - start
        taken = self.slots(hold, start) if num_known else array("i")
        at = num_known
        while at < len(keys):  # rows of new blocks with the same past
            past, end = self.ghosts.take(keys[at]), at + 1
            while end < len(keys) and past is None and keys[end] not in self.ghosts:
                end += 1
            while end < len(keys) and past is not None and self.ghosts.take_like(keys[end], past):
                end += 1
            self._append(hold, keys[at:end], slots[at:end], past, now_s, seen=seen)
            if seen or past is not None:  # they were here before this request: what it adds grows from them
                hold.turns = cast(Run, hold.at).past.turns + 1
            at = end
        taken.extend(slots[num_known:])
        return taken

    def _append(
        self,
        hold: Hold,
        keys: Sequence[BlockKey],
        slots: Sequence[int],
        past: Past | None,
        now_s: float,
        *,
        seen: bool,
    ) -> None:
        """New blocks with one past behind a hold: in its own run if that has the same, or in a new one."""
        run = cast(Run, hold.at)
        if past is None:
            now, previous_s = Past(int(seen), now_s, hold.turns), None
        else:
            now, previous_s = Past(past.hits + 1, now_s, past.turns), past.used_s
        self._worth.used(past, now, len(keys))
        joined = b"".join(keys)
        fits = (run.past.hits, run.past.turns, run.previous_s) == (now.hits, now.turns, previous_s)
        if not (run.maker is hold and fits and run.children is None and run.refs == 1):
            child = Run(run, run.end, now, previous_s)
            child.maker, child.session = hold, hold.hint.session
            if run.children is None:
                run.children = {}
            run.children[joined[:_K]] = child
            self._move(hold, child)
            run = child
        num = len(keys)
        self._worth.came(run.end, num)
        run.keys += joined
        run.slots.extend(slots)
        run.marks += bytes(num)
        run.past = now
        hold.num_blocks = run.end
        self._num_blocks += num
        self._num_guarded += num

    def extend_apart(self, hold: Hold, keys: Sequence[BlockKey], slots: Sequence[int]) -> None:
        """Blocks behind a hold that nobody else finds."""
        if not keys:
            return
        run = self._end_of(hold)
        if not (run.cut and run.maker is hold and run.refs == 1 and not run.past.hits):
            child = Run(run, run.end, Past(0, 0.0, 0), None)
            child.maker = hold
            self._leaving.add(child)
            self._move(hold, child)
            run = child
        run.keys += b"".join(keys)
        run.slots.extend(slots)
        run.marks += bytes(len(keys))
        hold.num_blocks = run.end

    def cut(self, keys: Sequence[BlockKey]) -> list[tuple[BlockKey, int]]:
        """Have nobody find the last of these blocks any more, nor what builds on it."""
        run, inside = self._walk(self._root, b"".join(keys))
        if not keys or run.start + inside < len(keys):
            return []
        if run.start < len(keys) - 1:
            run.split(len(keys) - 1 - run.start)
        parent = run.parent
        if parent is None or parent.children is None:
            raise Contradiction("a run that nothing leads to")
        del parent.children[bytes(run.keys[:_K])]
        if not parent.children:
            parent.children = None
        gone: list[tuple[BlockKey, int]] = []
        for one in list(below(run)):
            gone += one.blocks()
            if one.ticket:
                self._leaves.withdraw(one)
            self._num_blocks -= len(one.slots)
            self._num_guarded -= len(one.slots) if one.guards else 0
            self._worth.gone(one.start, len(one.slots))
            one.children = None
            self._leaving.add(one)
        self._leaves.offer(parent)
        return gone

    def rank_by(self, policy: Policy) -> None:
        """Have blocks leave in another order from now on."""
        self._worth.follow(policy, self._worth.sessions or Sessions.of(self.ghosts.limit))
        self._leaves.rank_anew()

    def sweep(self) -> list[int]:
        """Forget blocks that nobody finds, holds or pins any more."""
        return self._leaving.sweep()

    def leaving(self) -> list[int]:
        """Slots of blocks that nobody finds, and somebody holds."""
        return [slot for run in self._leaving for slot in run.slots]

    def release(self, hold: Hold, *, now_s: float) -> None:
        """Give a hold back. Its blocks count as used until now."""
        run = self._end_of(hold)
        self._use(run, self._root, now_s, hit=False, session=hold.hint.session)
        self._tails.ended(hold, now_s)
        if run.maker is hold:
            run.maker = None
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
        self._guard(cast(Run, pin.at), pins=-1)

    def repin(self, pin: Hold) -> Hold | None:
        """Pin the blocks of a pin that was given back once more. A run that was evicted is cut short, or empty."""
        run = cast(Run, pin.at)
        while run.start >= pin.num_blocks and run.parent is not None:
            run = run.parent
        if run.cut or run.end < pin.num_blocks:
            return None
        self._guard(run, pins=1)
        return Hold(run, pin.num_blocks)

    def pin_coldest(self, bit: int) -> Hold | None:
        """Pin the next victim that is not marked with `bit`."""
        found = self._leaves.first_without(bit)
        if found is None:
            return None
        self._guard(found, pins=1)
        return Hold(found, found.end)

    def evict(self) -> Victim | None:
        """Remove the leaf with the lowest priority that nobody holds or pins."""
        run = self._leaves.first()
        if run is None:
            return None
        past, depth = run.past, run.end - 1
        key = BlockKey(bytes(run.keys[-_K:]))
        victim = Victim(key, run.slots.pop(), depth, past.hits, past.used_s, run.marks.pop())
        del run.keys[-_K:]
        self.ghosts.add(key, past)
        self._worth.left(past, depth)
        self._num_blocks -= 1
        if run.slots:
            self._leaves.is_shorter(run)
            return victim
        self._leaves.withdraw(run)
        parent = run.parent
        if parent is None or parent.children is None:
            raise Contradiction("a run that nothing leads to")
        del parent.children[key]
        if not parent.children:
            parent.children = None
            self._leaves.offer(parent)
        return victim

    # --- what is held -------------------------------------------------------------------------------------------------

    def slots(self, hold: Hold, start: int = 0) -> "array[int]":
        """Slots of the held blocks from `start` on."""
        found: array[int] = array("i")
        for run, first, last in parts_of(cast(Run, hold.at), start, hold.num_blocks):
            found += run.slots[first:last] if last - first < len(run.slots) else run.slots
        return found

    def keys(self, hold: Hold, start: int = 0) -> list[BlockKey]:
        """Keys of the held blocks from `start` on."""
        return [
            BlockKey(bytes(run.keys[i * _K : (i + 1) * _K]))
            for run, first, last in parts_of(cast(Run, hold.at), start, hold.num_blocks)
            for i in range(first, last)
        ]

    def num_hot(self, hold: Hold, hits: int) -> int:
        """How many held blocks there are up to the last that was hit at least so often."""
        run = cast(Run, hold.at)
        while run.parent is not None and run.past.hits < hits:
            run = run.parent
        return min(run.end, hold.num_blocks)

    def mark(self, hold: Hold, start: int, end: int, *, bit: int, on: bool) -> None:
        """Remember, or forget, that blocks [start, end) are in the store of this bit."""
        for run, first, last in parts_of(cast(Run, hold.at), start, end):
            run.mark(first, last, bit=bit, on=on)

    def unmark(self, bit: int) -> None:
        """Forget of every block that it is in the store of this bit."""
        for run in (*below(self._root), *self._leaving):
            run.mark(0, len(run.slots), bit=bit, on=False)

    def num_marked(self, hold: Hold, bit: int) -> int:
        """How many held blocks come before those at the end that lack `bit`."""
        return num_marked(cast(Run, hold.at), hold.num_blocks, bit)

    def blocks(self) -> list[tuple[BlockKey, BlockKey | None, int]]:
        """Every block as (key, key before it, slot)."""
        return list(blocks_of(below(self._root)))

    def facts(self) -> list[object]:
        """All that the index knows."""
        leaving = self._leaving.facts()
        known = (*runs_and_leaves(below(self._root), self._leaves), self.ghosts.facts(), self._worth.facts())
        return [*known, *self._tails.facts(), *([leaving] if leaving else [])]

    def validate(self) -> None:
        """Raise AssertionError if the index contradicts itself."""
        found = validate_runs(below(self._root), self._leaving, self._leaves, self._worth)
        assert found == (self._num_blocks, self._num_guarded), "blocks do not add up"
        assert len(self.ghosts) <= self.ghosts.limit, "too many ghosts"

    # --- inside -------------------------------------------------------------------------------------------------------

    def _end_of(self, hold: Hold) -> Run:
        """The run at whose end a request's hold is. Others' holds end there too, or nowhere in it."""
        run = cast(Run, hold.at)
        if run.end != hold.num_blocks:
            raise Contradiction("a hold inside a run")
        return run

    def _move(self, hold: Hold, run: Run) -> None:
        old = cast(Run, hold.at)
        if old.maker is hold:
            old.maker = None
        self._guard(run, holds=1)
        self._guard(old, holds=-1)
        hold.at, hold.num_blocks = run, run.end

    def _use(self, run: Run, until: Run, now_s: float, *, hit: bool, session: bytes) -> None:
        """Blocks of a path were used: those from behind `until` to the end of `run`."""
        at: Run | None = run
        while at is not None and at is not until:
            past = at.past
            at.past = Past(past.hits + hit, now_s, past.turns)
            if at.session != session:
                at.session = b""
            if hit:
                self._worth.used(past, at.past, len(at.slots))
                at.previous_s = past.used_s
                at.maker = None
            if at.ticket:  # a free leaf that was hit: it is about to be held, and asks again when it is free
                self._leaves.withdraw(at)
            at = at.parent

    def _guard(self, run: Run, *, holds: int = 0, pins: int = 0) -> None:
        """Add or remove a hold or pin; tell the runs before whether they are guarded."""
        run.refs += holds
        run.pins += pins
        change = holds + pins
        at: Run | None = run
        while at is not None:
            was = at.guards > 0
            at.guards += change
            now = at.guards > 0
            if was == now:
                return
            if at.cut:
                self._leaving.loosen(at)
            else:
                self._num_guarded += len(at.slots) if now else -len(at.slots)
                if now and at.ticket:
                    self._leaves.withdraw(at)
                elif not now:
                    self._leaves.offer(at)
            at = at.parent
