"""The past of blocks, also of some that are gone: gathers the facts that policies ask for, block by block.

A conversation comes back after minutes. In a small cache its blocks are gone by then, and a cache that forgets them
with their bytes takes them for new each time, so that nothing ever looks worth keeping. This memory outlives the bytes:
it knows the blocks that are held and those used last, together `_MEMORY` times as many as are held; the oldest use is
forgotten first. (The *retained information* of LRU-2, the ghosts of other policies.) What follows from it is counted in
`Returns`.

Nothing has to be told when a block is deleted, or evicted by another process. A held block that was never told of (the
holder is older than this memory) starts from what the holder knows of it.

Pure: time is what the holder says. Not safe from several threads. Knows no bytes and no order of eviction.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Final, Generic, Protocol, TypeVar

from headwater.policy.base import BlockFacts
from headwater.policy.returns import Returns, kind_of

K = TypeVar("K", bound=Hashable)
K_contra = TypeVar("K_contra", contravariant=True)

# Blocks known for each one held. The memory must span the usual gap between two uses, or returns are not recognised; it
# costs some hundred bytes a block, where a block has megabytes.
_MEMORY: Final = 5
_WINDOW: Final = 4  # memories' worth of uses that weigh in the counts; at less, they are noisy in a small cache


class HeldBlocks(Protocol[K_contra]):
    """The blocks that a holder holds, as a `LeafOrder` is."""

    def __len__(self) -> int:
        """How many."""

    def __contains__(self, key: K_contra, /) -> bool:
        """Whether this one."""


class _Past:
    __slots__ = ("born_s", "hits", "previous_s", "turns", "used_s")

    def __init__(self, born_s: float, hits: int, turns: int) -> None:
        self.born_s = born_s
        self.used_s = born_s
        self.previous_s: float | None = None
        self.hits = hits
        self.turns = turns


class History(Generic[K]):
    """What is remembered of blocks, held or not, and what follows for such blocks."""

    def __init__(self, held: Callable[[], HeldBlocks[K]]) -> None:
        """`held`: the blocks that the holder holds, now."""
        self.returns = Returns()
        self._held = held
        self._pasts: OrderedDict[K, _Past] = OrderedDict()
        self._latest_s = 0.0

    def __len__(self) -> int:
        """Blocks remembered."""
        return len(self._pasts)

    def inserted(
        self, key: K, parent: K, now_s: float, *, depth: int, num_bytes: int, cost_s: float = 0.0
    ) -> BlockFacts:
        """A block was written. If it is remembered, it has come back; all blocks of one request have one `now_s`."""
        past = self._pasts.get(key)
        if past is not None:
            self._again(key, past, now_s, 1)
        else:
            before = self._pasts.get(parent) if depth else None
            # A block that was there before this request was grown from; one that came with it grows along.
            turns = 0 if before is None else before.turns + (before.born_s < now_s)
            past = self._begin(key, _Past(now_s, 0, turns), now_s)
        return self._facts(past, depth, num_bytes, cost_s)

    def hit(
        self,
        key: K,
        now_s: float,
        *,
        depth: int,
        num_bytes: int,
        cost_s: float = 0.0,
        times: int = 1,
        hits_before: int = 0,
        used_before_s: float | None = None,
    ) -> BlockFacts:
        """A held block was used `times` times, the last time now. With 0 it is as recent, and no use is counted.

        `hits_before` and `used_before_s`: what the holder itself knows, for a block that is not remembered.
        """
        past = self._pasts.get(key)
        if past is None:
            born_s = now_s if used_before_s is None else min(used_before_s, now_s)
            past = self._begin(key, _Past(born_s, hits_before, 0), now_s)
        self._again(key, past, now_s, times)
        return self._facts(past, depth, num_bytes, cost_s)

    def evicted(self, key: K) -> None:
        """A block was evicted to make room (not: deleted). It is remembered, and its age tells the horizon."""
        past = self._pasts.get(key)
        if past is not None:
            self.returns.evicted(kind_of(past.hits, past.turns), self._latest_s - past.used_s, held=len(self._held()))

    def rebase(self, now_s: float) -> None:
        """The holder's clock was put back to this moment: what lies ahead of it was now."""
        self._latest_s = min(self._latest_s, now_s)
        for past in self._pasts.values():
            past.born_s, past.used_s = min(past.born_s, now_s), min(past.used_s, now_s)
            past.previous_s = None if past.previous_s is None else min(past.previous_s, now_s)

    def _begin(self, key: K, past: _Past, now_s: float) -> _Past:
        self._pasts[key] = past
        self._latest_s = max(self._latest_s, now_s)
        self._count(past)
        held = self._held()
        while len(self._pasts) > _MEMORY * (len(held) + 1):  # so there is one to forget besides those held and `key`
            oldest, forgotten = self._pasts.popitem(last=False)
            if oldest in held:  # one in five at most, so turning the queue costs little
                self._pasts[oldest] = forgotten
        return past

    def _again(self, key: K, past: _Past, now_s: float, times: int) -> None:
        self._pasts.move_to_end(key)
        self._latest_s = max(self._latest_s, now_s)
        if times:
            self.returns.returned(kind_of(past.hits, past.turns), now_s - past.used_s)
            past.previous_s = past.used_s
            past.hits += times
            self._count(past)
        past.used_s = max(past.used_s, now_s)

    def _count(self, past: _Past) -> None:
        self.returns.used(kind_of(past.hits, past.turns), window=_WINDOW * _MEMORY * max(64, len(self._held())))

    def _facts(self, past: _Past, depth: int, num_bytes: int, cost_s: float) -> BlockFacts:
        return BlockFacts(
            used_s=past.used_s,
            hits=past.hits,
            depth=depth,
            num_bytes=num_bytes,
            previous_s=past.previous_s,
            turns=past.turns,
            cost_s=cost_s,
            outlook=self.returns.outlook(kind_of(past.hits, past.turns)),
        )
