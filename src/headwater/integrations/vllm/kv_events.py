"""What others hear of an engine's blocks: vLLM's KV events for our tiers, and the cluster's residency index.

The brain says what came to a store and left it (`Stored`, `Removed`, `TierLost`), by our keys. For vLLM's listeners
keys become the hashes that vLLM gave the same blocks, as long as they are remembered. What is on the device only vLLM
knows: blocks are told to be there when they were computed or loaded, and vLLM's pool is asked again, some with each
step, until one is not there any more. Where vLLM keeps no prefixes, nothing is told of the device.

Called from the scheduler's thread, but for `offer`, which takes what any thread says. No vLLM here.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from headwater.cache.match import DEVICE
from headwater.core.events import Move, MoveListener, Removed, Stored, TierLost
from headwater.core.keys import BlockKey

_REMEMBERED: Final = 1 << 18  # blocks of which vLLM's hash is known
_MOST_QUEUED: Final = 1 << 14  # moves that nobody takes
_ASKED_AT_ONCE: Final = 256  # blocks on the device, with each step


@dataclass(frozen=True, slots=True)
class Named:
    """What vLLM calls a block, and what is in it."""

    hash: Any
    parent: Any  # None: it is the first
    tokens: tuple[int, ...]


class Teller:
    """Passes on what the brain says, and watches the device."""

    def __init__(self, *, events: bool, listener: MoveListener | None = None) -> None:
        """`events`: whether vLLM's own listeners want to hear; `listener`: who tells the cluster."""
        self._events = events
        self._listener = listener
        self._lock = threading.Lock()
        self._moves: list[Move] = []
        self._named: OrderedDict[BlockKey, Named] = OrderedDict()
        self._device: OrderedDict[BlockKey, Any] = OrderedDict()  # blocks that are told to be there: vLLM's hash
        self.is_cached: Callable[[Any], bool] | None = None  # whether vLLM has a block on the device, by its hash

    @property
    def active(self) -> bool:
        """Whether anybody listens."""
        return self._events or self._listener is not None

    def offer(self, moves: Sequence[Move]) -> None:
        """Hear what the brain says. What it says of the device is not ours to say."""
        kept = [move for move in moves if move.tier != DEVICE]
        if kept:
            self._pass_on(kept)

    def computed(self, keys: Sequence[BlockKey], request: Any, *, start: int, parent: BlockKey, size: int) -> None:
        """A request's blocks `start`, `start` + 1, ... have names: `keys`. vLLM has names for them, too."""
        hashes = request.block_hashes
        known = min(len(keys), max(0, len(hashes) - start))
        for at, key in enumerate(keys[:known], start):
            tokens = tuple(request.all_token_ids[at * size : (at + 1) * size]) if self._events else ()
            self._named[key] = Named(hashes[at], hashes[at - 1] if at else None, tokens)
            self._named.move_to_end(key)
            if self.is_cached is not None and self.is_cached(hashes[at]):
                self._device[key] = hashes[at]
        while len(self._named) > _REMEMBERED:
            self._named.popitem(last=False)
        there = [key for key in keys[:known] if key in self._device]
        if there and there == list(keys[: len(there)]) and self._listener is not None:
            self._listener.offer([Stored(tier=DEVICE, keys=tuple(there), parent=parent, depth=start)])

    def watch(self) -> None:
        """Ask vLLM of some blocks whether they are still on the device."""
        if self.is_cached is None or self._listener is None or not self._device:
            return
        gone: list[BlockKey] = []
        for key in [key for key, _ in zip(self._device, range(_ASKED_AT_ONCE), strict=False)]:
            if self.is_cached(self._device[key]):
                self._device.move_to_end(key)
            else:
                del self._device[key]
                gone.append(key)
        if gone:
            self._listener.offer([Removed(tier=DEVICE, keys=tuple(gone))])

    def take(self) -> list[tuple[Move, list[Named]]]:
        """Moves since the last call, with vLLM's names of their blocks; those without one are left out."""
        with self._lock:
            moves, self._moves = self._moves, []
        return [(move, self._names(() if isinstance(move, TierLost) else move.keys)) for move in moves]

    def _names(self, keys: Iterable[BlockKey]) -> list[Named]:
        return [self._named[key] for key in keys if key in self._named]

    def _pass_on(self, moves: Sequence[Move]) -> None:
        if self._listener is not None:
            self._listener.offer(moves)
        if self._events:
            with self._lock:
                self._moves += moves
                del self._moves[:-_MOST_QUEUED]
