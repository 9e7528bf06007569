"""Purges: blocks that somebody wants gone, from the device, the stores, and what is under way.

A purge is *open* from PurgeBegan to PurgeEnded, while somebody else removes blocks from the stores. What it is about
is cut out of the index at once: nobody finds it, and what a request holds of it leaves with that request. A request
whose path leads there is *barred* from there on, for as long as it lives: nothing is loaded for it and nothing saved,
and what it computes or was just loading is found by nobody else. So what stores still have, or what was on its way,
does not come back.

Not here: writes that had begun before. Who removes blocks from the stores lets those end first.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from headwater.cache.moves import Moves
from headwater.cache.pinning import Pins
from headwater.cache.records import RequestRecord
from headwater.cache.saver import Saver
from headwater.core import events as ev
from headwater.core.errors import InvalidInput
from headwater.core.identity import TENANT_BYTES
from headwater.core.keys import BlockKey
from headwater.index.base import PathIndex
from headwater.index.slots import DeviceSlots


class Purges:
    """The open purge of one brain, if there is one, and blocks that leave with their holders."""

    def __init__(
        self,
        index: PathIndex,
        slots: DeviceSlots,
        requests: Mapping[str, RequestRecord],
        saver: Saver,
        pins: Pins,
        moves: Moves,
        out: list[ev.Instruction],
        give_up: Callable[[RequestRecord], None],
        *,
        forget_pending: Callable[[str, Iterable[BlockKey]], None],
    ) -> None:
        self.open: ev.PurgeBegan | None = None
        self._index: Final = index
        self._evicting: Final = index.evicting()
        self._slots = slots
        self._requests = requests
        self._saver = saver
        self._pins = pins
        self._moves = moves
        self._out = out
        self._give_up = give_up  # loading
        self._forget_pending = forget_pending

    def began(self, event: ev.PurgeBegan) -> None:
        """Nobody finds these blocks from now on. Raises InvalidInput while another purge is open."""
        if self.open is not None:
            raise InvalidInput("a purge is under way: one at a time")
        if len(event.tenant) != TENANT_BYTES:
            raise InvalidInput(f"a tenant is {TENANT_BYTES} bytes (CacheIdentity.tenant), not {len(event.tenant)}")
        self.open = event
        self._pins.purged(event)
        cut = self._cut(event)
        for request in self._requests.values():
            depth = self._depth(request)
            if depth is None:
                continue
            self.bar(request)
            self._forget_pending(request.request, request.keys[depth:])
            self._give_up(request)
            held = request.hold.num_blocks > depth  # one that was barred before may have found what came since
            if self._evicting is not None and held and not request.reserved:  # it would be new to them
                self._index.release(request.hold, now_s=event.now_s)
                request.hold = self._index.hold([], now_s=event.now_s, hint=request.hold.hint)
                request.gave_way = True
        num_gone = self.sweep()
        self._out.append(ev.Purged(keys=tuple(cut), num_held=len(cut) - num_gone))

    def _cut(self, event: ev.PurgeBegan) -> list[BlockKey]:
        if self._evicting is None:
            return []  # where the engine evicts by itself, requests are barred, and no more is known
        origins = self._saver.origins
        firsts = [[first] for first, (_, tenant) in origins.items() if tenant == event.tenant]
        found = [one for path in ([event.keys] if event.keys else firsts) for one in self._evicting.cut(path)]
        self._slots.cut(slot for _, slot in found)
        for key, _ in found:
            origins.pop(key, None)
        keys = [key for key, _ in found]
        self._moves.left(keys)
        return keys

    def bar(self, request: RequestRecord) -> bool:
        """Bar a request whose path leads to what is being purged; one may be barred already, from further on.

        Whether that is new.
        """
        depth = self._depth(request)
        if depth is None or (request.barred is not None and request.barred <= depth):
            return False
        request.barred = depth
        return True

    def _depth(self, request: RequestRecord) -> int | None:
        """From which block on a request's path leads to what is being purged."""
        if self.open is None:
            return None
        path, depth = self.open.keys, len(self.open.keys) - 1
        if not path:
            return 0 if request.tenant == self.open.tenant else None
        return depth if len(request.keys) > depth and request.keys[depth] == path[-1] else None

    def ended(self, event: ev.PurgeEnded) -> None:
        """No store has them any more. Raises InvalidInput where no purge is open."""
        if self.open is None:
            raise InvalidInput("no purge is under way")
        self.open = None

    def sweep(self) -> int:
        """Free the slots of blocks that nobody finds or holds any more. Returns how many."""
        slots = self._evicting.sweep() if self._evicting is not None else []
        if slots:
            self._slots.vacate(slots)
        return len(slots)
