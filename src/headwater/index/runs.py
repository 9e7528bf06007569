"""A run: blocks in a row that were always used together, with one record of use. What `radix.py` is made of.

Knows keys, slots and marks; nothing of holds' owners, priorities or who else is in the tree.
"""

from array import array
from collections.abc import Iterator
from functools import cache
from typing import Final

from headwater.core.errors import Contradiction
from headwater.core.keys import BlockKey
from headwater.core.page import KEY_BYTES
from headwater.index.base import Hold
from headwater.index.ghosts import Past

_K: Final = KEY_BYTES


class Run:
    """Blocks in a row with one history. `start` is the depth of the first."""

    __slots__ = (
        "children", "cut", "guards", "keys", "level", "maker", "marks", "parent", "past", "pins", "previous_s", "refs",
        "session", "slots", "start", "ticket", "wished_s",
    )  # fmt: skip

    def __init__(self, parent: "Run | None", start: int, past: Past, previous_s: float | None) -> None:
        self.parent = parent
        self.start = start
        self.keys = bytearray()
        self.slots: array[int] = array("i")
        self.marks = bytearray()
        self.children: dict[bytes, Run] | None = None
        self.refs = 0  # holds that end here
        self.pins = 0  # pins that end here
        self.guards = 0  # refs + pins + children that are guarded: with any, the run cannot leave
        self.past = past
        self.previous_s = previous_s  # the use before the last, if there was one
        self.maker: Hold | None = None  # the hold that fills it, until somebody else uses it
        self.session = b""  # the one session that ever used it; empty: none, or several
        self.wished_s = 0.0  # until when that session wishes it to stay; 0: it does not, or may not
        self.level = False  # as a free leaf: whether all its blocks are worth the same
        self.ticket = 0  # of its valid entry among the free leaves; 0: it is none of them
        self.cut = False  # nobody finds it any more (`leaving.py`)

    @property
    def end(self) -> int:
        """The depth behind its last block."""
        return self.start + len(self.slots)

    def blocks(self) -> list[tuple[BlockKey, int]]:
        """Its blocks, in order, and their slots."""
        return [(BlockKey(bytes(self.keys[i * _K : (i + 1) * _K])), slot) for i, slot in enumerate(self.slots)]

    def facts(self) -> list[object]:
        """All of it, for snapshots; that of before there were sessions is the same."""
        return [
            *(self.keys.hex(), self.slots.tolist(), self.marks.hex(), self.start, self.past.facts(), self.previous_s),
            *(self.refs, self.pins, self.guards, self.ticket),
            *([self.session.hex(), self.wished_s] if self.session or self.wished_s else []),
        ]

    def split(self, inside: int) -> "Run":
        """Cut it behind its first `inside` blocks. Returns the new upper part; the lower keeps its identity."""
        parent = self.parent
        if parent is None or parent.children is None or not 0 < inside < len(self.slots):
            raise Contradiction("a run that cannot be cut there")
        upper = Run(parent, self.start, self.past, self.previous_s)
        upper.session, upper.wished_s = self.session, self.wished_s
        upper.keys, self.keys = self.keys[: inside * _K], self.keys[inside * _K :]
        upper.slots, self.slots = self.slots[:inside], self.slots[inside:]
        upper.marks, self.marks = self.marks[:inside], self.marks[inside:]
        upper.children = {bytes(self.keys[:_K]): self}
        upper.guards = int(self.guards > 0)
        self.parent, self.start = upper, upper.end
        parent.children[bytes(upper.keys[:_K])] = upper
        return upper

    def num_common(self, wanted: bytes) -> int:
        """How many of its leading keys are those of a row that differs from it somewhere."""
        low, high = 0, len(wanted) // _K  # the first `low` are equal, the first `high` are not
        while high - low > 1:
            middle = (low + high) // 2
            if self.keys[low * _K : middle * _K] == wanted[low * _K : middle * _K]:
                low = middle
            else:
                high = middle
        return low

    def mark(self, first: int, last: int, *, bit: int, on: bool) -> None:
        """Set or clear a bit of the marks of blocks [first, last)."""
        self.marks[first:last] = self.marks[first:last].translate(_marking(bit, on))


def below(run: Run) -> Iterator[Run]:
    """A run and all that builds on it, parents first."""
    stack = [run]
    while stack:
        one = stack.pop()
        yield one
        stack.extend((one.children or {}).values())


def parts_of(run: Run, start: int, end: int) -> list[tuple[Run, int, int]]:
    """Runs of the path to a run that lie in [start, end), in order, each with the range inside it."""
    found = []
    at: Run | None = run
    while at is not None and at.end > start:
        first, last = max(start - at.start, 0), min(end - at.start, len(at.slots))
        if first < last:
            found.append((at, first, last))
        at = at.parent
    found.reverse()
    return found


def num_marked(run: Run, num_blocks: int, bit: int) -> int:
    """How many blocks of the path to a run, of its first `num_blocks`, come before those at the end that lack `bit`."""
    found: Run | None = run
    while found is not None:
        while num_blocks > found.start:
            if found.marks[num_blocks - 1 - found.start] & bit:
                return num_blocks
            num_blocks -= 1
        found = found.parent
    return 0


@cache
def _marking(bit: int, on: bool) -> bytes:  # noqa: FBT001  private, and cached by position
    """What each byte of marks becomes."""
    return bytes(marks | bit if on else marks & ~bit for marks in range(256))
