"""The index and the slots of a device that is not ours: an engine allocates and evicts there by itself (vLLM).

Such an engine lends us a request's slots for as long as the request runs, or until what is saved from them was read. It
does not say which blocks it keeps afterwards, so none is known here: each hold is a path of its own, with the slots of
its own request, and no two requests ever share one. What is remembered beyond a request is which stores are believed to
have a block, for so many blocks as were used last: otherwise each turn of a conversation would be written again. A
store that evicts page by page leaves holes in a path, and so do marks: writing begins at the first hole.

Slots are numbers of the engine's: nothing is free, taken or given back.
"""

from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from headwater.core.errors import Contradiction, InvalidInput
from headwater.core.keys import BlockKey
from headwater.index.base import NO_HINT, Hint, Hold, PathIndex
from headwater.index.slots import DeviceSlots, SlotState

UNKNOWN: Final = -1  # the slot of a block that the engine has, until it says where
_STAMP: Final = 16  # a mark has its stores' bits below this one, and when it was made from there on
_BITS: Final = (1 << _STAMP) - 1


@dataclass(slots=True)
class _Path:
    keys: list[BlockKey] = field(default_factory=list)
    slots: "array[int]" = field(default_factory=lambda: array("q"))
    # By bit: so many leading blocks had it when so many marks had been lost. A path and its pins have it together.
    whole: dict[int, tuple[int, int]] = field(default_factory=dict)


class LentIndex(PathIndex):
    """Paths of running requests, and marks by key."""

    def __init__(self, *, num_marks: int) -> None:
        """`num_marks`: blocks of which it is remembered where they were written."""
        self._num_marks = num_marks
        self._marks: OrderedDict[BlockKey, int] = OrderedDict()
        self._num_lost = 0  # how often a store was seen to lack what was marked
        self.num_marks_made = 0  # how often something was marked

    def hold(self, keys: Sequence[BlockKey], *, now_s: float, hint: Hint = NO_HINT) -> Hold:
        """A path of no blocks: none is known beyond its request. Which the engine has, it says itself (`take_over`)."""
        return Hold(_Path(), 0)

    def take_over(self, keys: Sequence[BlockKey]) -> Hold:
        """A path of blocks that the engine has already, wherever they lie."""
        return Hold(_Path(list(keys), array("q", [UNKNOWN] * len(keys))), len(keys))

    def place(self, hold: Hold, slots: Sequence[int]) -> None:
        """The engine says where the first blocks of a path lie. Raises InvalidInput if it said otherwise before."""
        known = _path(hold).slots
        given = array("q", slots)
        if any(old not in (UNKNOWN, new) for old, new in zip(known, given, strict=False)):
            raise InvalidInput("the engine moved blocks of a request that are in use")
        known[: len(given)] = given[: len(known)]

    def extend(
        self, hold: Hold, keys: Sequence[BlockKey], slots: Sequence[int], *, now_s: float, seen: bool = False
    ) -> "array[int]":
        """Blocks behind a path, in the request's own slots."""
        path = _path(hold)
        path.keys.extend(keys)
        path.slots.extend(slots)
        hold.num_blocks = len(path.keys)
        return array("q", slots)

    def extend_apart(self, hold: Hold, keys: Sequence[BlockKey], slots: Sequence[int]) -> None:
        """The same: nobody finds a path of another's."""
        self.extend(hold, keys, slots, now_s=0.0)

    def release(self, hold: Hold, *, now_s: float) -> None:
        """The path is forgotten; its pins keep theirs."""
        hold.at = _Path()

    def pin(self, hold: Hold, num_blocks: int | None = None) -> Hold:
        """A copy of the path: the request may leave before the job is over."""
        path = _path(hold)
        num = len(path.keys) if num_blocks is None else num_blocks
        return Hold(_Path(path.keys[:num], path.slots[:num], path.whole), num)

    def unpin(self, pin: Hold) -> None:
        """It was a copy, and kept nothing; it may still be marked."""

    def slots(self, hold: Hold, start: int = 0) -> "array[int]":
        """Slots of a path from `start` on."""
        return _path(hold).slots[start:]

    def keys(self, hold: Hold, start: int = 0) -> list[BlockKey]:
        """Keys of a path from `start` on."""
        return _path(hold).keys[start:]

    def mark(self, hold: Hold, start: int, end: int, *, bit: int, on: bool) -> None:
        """Remember, or forget, that blocks are in a store."""
        self._num_lost += not on
        self.num_marks_made += on
        stamp = self.num_marks_made << _STAMP
        for key in _path(hold).keys[start:end]:
            marks = self._marks.pop(key, 0)
            marks = stamp | (marks & _BITS) | bit if on else marks & ~bit
            if marks & _BITS:
                self._marks[key] = marks
        while len(self._marks) > self._num_marks:
            self._marks.popitem(last=False)

    def unmark(self, bit: int) -> None:
        """Forget of every block that it is in a store."""
        self._num_lost += 1
        kept = ((key, marks & ~bit) for key, marks in self._marks.items())
        self._marks = OrderedDict((key, marks) for key, marks in kept if marks & _BITS)

    def forget(self, keys: Iterable[BlockKey], bit: int, *, before: int | None = None) -> None:
        """Blocks were seen not to be in a store; `before`: when so many marks had been made."""
        for key in self._marks.keys() & set(keys):
            marks = self._marks[key]
            if marks & bit and (before is None or marks >> _STAMP <= before):
                self._num_lost += 1
                self._marks[key] = marks & ~bit
                if not marks & ~bit & _BITS:
                    del self._marks[key]

    def num_marked(self, hold: Hold, bit: int) -> int:
        """Where writing has to begin: at the first block that the store is not believed to have.

        What was whole is not read again until a mark is lost: a long answer asks this with every block.
        """
        path, marks = _path(hold), self._marks
        num_lost, at = path.whole.get(bit, (self._num_lost, 0))
        if num_lost != self._num_lost:
            at = 0
        while at < len(path.keys) and marks.get(path.keys[at], 0) & bit:
            at += 1
        path.whole[bit] = (self._num_lost, at)
        return min(at, len(path.keys))

    def num_lacking(self, hold: Hold, start: int, bit: int) -> int:
        """How many blocks from `start` on are not believed to be in the store."""
        marks = self._marks
        return sum(not marks.get(key, 0) & bit for key in _path(hold).keys[start:])

    def facts(self) -> list[object]:
        """What is remembered."""
        return [[key.hex(), marks] for key, marks in self._marks.items()]

    def validate(self) -> None:
        """Raise AssertionError if the index contradicts itself."""
        assert len(self._marks) <= self._num_marks, "more is remembered than may be"
        assert all(marks & _BITS for marks in self._marks.values()), "a mark that says nothing"


class LentSlots(DeviceSlots):
    """Slots that are the engine's: there is nothing to count."""

    def __init__(self) -> None:
        super().__init__(0, None)

    def know(self, slots: Iterable[int]) -> None:
        """Their blocks have names; they stay the engine's."""

    def know_apart(self, slots: Iterable[int]) -> None:
        """The same."""

    def give_back(self, slots: Sequence[int]) -> None:
        """They were never taken."""

    def quarantine(self, slots: Iterable[int]) -> None:
        """The engine keeps them until it hears that the job has ended."""

    def withhold(self, slots: Collection[int]) -> None:
        """The engine knows who uses them."""

    def unquarantine(self, slots: Sequence[int]) -> None:
        """The engine hears of it."""

    def still_own(self, slots: Iterable[int]) -> list[int]:
        """None."""
        return []

    def state(self, slot: int) -> SlotState:
        """Whatever it holds, it is the engine's."""
        return SlotState.OWN


def _path(hold: Hold) -> _Path:
    if not isinstance(hold.at, _Path):
        raise Contradiction("a hold of another index")
    return hold.at
