"""Pins: prefixes that somebody wants to stay on the device, under a name, within a budget, for a time or for good.

A pin holds the blocks of its prefix that are there when it is made, as a request holds its own: they are not evicted.
It keeps nothing that it should not: a purge takes its blocks from it, and a brain that failed has forgotten it. It
ends by `Unpinned`, when its time is up, or where a request is so large that it would not fit beside the pins however
long it waited: then the newest give way, and that is told.

Invariant: all pins together keep no more blocks than the budget.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Final

from headwater.core import events as ev
from headwater.core.errors import InvalidInput
from headwater.core.keys import BlockKey
from headwater.index.base import Hold, PathIndex, PrefixIndex

MAX_PINS: Final = 1024


@dataclass(frozen=True, slots=True)
class PinRecord:
    """One pin."""

    name: str
    keys: tuple[BlockKey, ...]  # of the blocks that it keeps
    tenant: bytes
    until_s: float  # 0: for good
    hold: Hold


class Pins:
    """The pins of one brain, by name, oldest first. Nothing here blocks."""

    def __init__(self, index: PathIndex, num_slots: int, share: float, out: list[ev.Instruction]) -> None:
        self._index: Final = index.evicting()
        self.most_blocks: Final = int(num_slots * share)
        self._num_slots = num_slots
        self._out = out
        self._pins: dict[str, PinRecord] = {}
        self._next_s = float("inf")  # when the first of them ends

    def __iter__(self) -> Iterator[PinRecord]:
        """Every one."""
        return iter(self._pins.values())

    def pinned(self, event: ev.Pinned) -> None:
        """Keep what is there of a prefix; one of the same name is replaced. Raises InvalidInput over the budget."""
        index = self._need_index()
        num_there = index.find(event.keys)
        if not num_there:
            raise InvalidInput("none of these blocks is on the device: send the prompt once, and pin it then")
        if event.name not in self._pins and len(self._pins) >= MAX_PINS:
            raise InvalidInput(f"there are {MAX_PINS} pins already: unpin one")
        keys = event.keys[:num_there]
        over = {pin.name for pin in self if 0 < pin.until_s <= event.now_s}
        others = self._kept(leave_out={event.name, *over})
        num_blocks = len(others | set(keys))
        if num_blocks > self.most_blocks:
            raise InvalidInput(
                f"these are {num_there} blocks, pins keep {len(others)}, and may keep {self.most_blocks} of "
                f"{self._num_slots}: pin less, unpin something, or start with a larger --pin-share"
            )
        hold = index.hold([], now_s=event.now_s)
        index.advance(hold, keys, now_s=event.now_s, hit=False)
        if event.name in self._pins:
            self._drop(event.name, event.now_s)
        self._pins[event.name] = PinRecord(event.name, keys, event.tenant, event.until_s, hold)
        self._plan()

    def unpinned(self, event: ev.Unpinned) -> None:
        """Raises InvalidInput for a pin that is not there."""
        if event.name not in self._pins:
            raise InvalidInput(f"there is no pin {event.name!r}: it never was, or it ended")
        self._drop(event.name, event.now_s)

    def expire(self, now_s: float) -> None:
        """Time has passed."""
        while self._next_s <= now_s:
            self._drop(min(self, key=lambda pin: pin.until_s or float("inf")).name, now_s)

    def purged(self, order: ev.PurgeBegan) -> None:
        """Blocks are to be gone: no pin keeps them."""
        depth = len(order.keys) - 1
        for pin in list(self):
            hit = pin.keys[depth : depth + 1] == order.keys[-1:] if order.keys else pin.tenant == order.tenant
            if hit:
                self._drop(pin.name, order.now_s)

    def make_way(self, num_blocks: int, keys: list[BlockKey], now_s: float) -> None:
        """A request needs so many blocks at once, its own `keys` among them: pins beside which it never fits end."""
        self.expire(now_s)
        while self._pins and num_blocks > self._num_slots - len(self._kept() - set(keys)):
            name = next(reversed(self._pins))
            self._drop(name, now_s)
            facts = (("name", name), ("why", f"a request needs {num_blocks} of {self._num_slots} blocks"))
            self._out.append(ev.Tell(kind="pin_gave_way", facts=facts))

    def facts(self) -> list[object]:
        """All of them, for snapshots."""
        return [[pin.name, [key.hex() for key in pin.keys], pin.tenant.hex(), pin.until_s] for pin in self]

    def validate(self) -> None:
        """Raise AssertionError if a pin does not keep what it should, or all of them too much."""
        assert len(self._kept()) <= self.most_blocks, "more is pinned than may be"
        for pin in self:
            index = self._need_index()
            assert tuple(index.keys(pin.hold)) == pin.keys, "a pin on other blocks"
            assert index.find(pin.keys) == len(pin.keys), "a pinned block that nobody finds"

    def _kept(self, *, leave_out: Collection[str] = ()) -> set[BlockKey]:
        return set(chain.from_iterable(pin.keys for pin in self if pin.name not in leave_out))

    def _drop(self, name: str, now_s: float) -> None:
        self._need_index().release(self._pins.pop(name).hold, now_s=now_s)
        self._plan()

    def _plan(self) -> None:
        self._next_s = min((pin.until_s for pin in self if pin.until_s), default=float("inf"))

    def _need_index(self) -> PrefixIndex:
        if self._index is None:
            raise InvalidInput("this engine evicts by itself, so nothing can be pinned here")
        return self._index
