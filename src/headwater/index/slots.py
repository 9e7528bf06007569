"""Device slots: which are free, which are some request's own, which hold known blocks, which nobody may touch yet.

A slot is in exactly one state, and only the moves drawn here exist:

    FREE -> OWN          a request takes it, to compute or load into
    OWN -> KNOWN         its block is finished and entered the index (it won)
    OWN -> FREE          given back unfinished, or finished second: the block is known in another slot (it lost)
    OWN -> QUARANTINED   given back while a job may still write there (rule 2); -> FREE when the job has ended
    FREE -> QUARANTINED  withheld: somebody whom nobody here knows may still use it; -> FREE when they are gone
    KNOWN -> FREE        its block was evicted
    KNOWN -> LEAVING     its block is to be found by nobody any more, and may be held; -> FREE with its last holder
    OWN -> LEAVING       its block is finished, and was never to be found by anybody

A slot that lost stays OWN until its request ends: nothing is pulled from under a running request.
"""

import enum
from array import array
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from headwater.core.errors import Contradiction, InvalidConfig
from headwater.index.base import PrefixIndex, Victim


class SlotState(enum.IntEnum):
    """Where a slot is in its life."""

    FREE = 0
    OWN = 1
    KNOWN = 2
    QUARANTINED = 3
    LEAVING = 4


class DeviceSlots:
    """Counts the slots of one device. Holds no blocks: the index does."""

    def __init__(self, num_slots: int, index: PrefixIndex | None) -> None:
        """`index`: who may be asked to evict; None: nothing is known for longer than its request runs."""
        if not 0 <= num_slots < 1 << 31:
            raise InvalidConfig(f"num_slots must be a number of blocks, not {num_slots!r}")
        self.num_slots: Final = num_slots
        self._index = index
        self._states = bytearray(num_slots)
        self._free = array("i", range(num_slots - 1, -1, -1))  # taken from the end: slot 0 first

    @property
    def num_free(self) -> int:
        """Slots that hold nothing."""
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Slots that `take` could hand out now, victims included."""
        return len(self._free) + self.num_evictable

    @property
    def num_evictable(self) -> int:
        """Slots of known blocks that could leave, one after another."""
        return 0 if self._index is None else self._index.num_evictable

    def take(self, num: int) -> tuple[list[int], list[Victim]] | None:
        """Take `num` slots, all or none. Evicts what it must, and says what it evicted."""
        if num > self.num_available:
            return None
        victims: list[Victim] = []
        while len(self._free) < num:
            victim = None if self._index is None else self._index.evict()
            if victim is None:
                raise Contradiction("blocks that could leave, and none does")
            if self._states[victim.slot] != SlotState.KNOWN:
                raise Contradiction(f"a victim in slot {victim.slot}, which is no known block's")
            self._states[victim.slot] = SlotState.FREE
            self._free.append(victim.slot)
            victims.append(victim)
        taken = self._free[len(self._free) - num :].tolist()[::-1]
        del self._free[len(self._free) - num :]
        self._move(taken, SlotState.FREE, SlotState.OWN)
        return taken, victims

    def know(self, slots: Iterable[int]) -> None:
        """Blocks in these slots entered the index."""
        self._move(slots, SlotState.OWN, SlotState.KNOWN)

    def know_apart(self, slots: Iterable[int]) -> None:
        """Blocks in these slots are finished, and nobody but their request finds them."""
        self._move(slots, SlotState.OWN, SlotState.LEAVING)

    def cut(self, slots: Iterable[int]) -> None:
        """Blocks in these slots are found by nobody any more."""
        self._move(slots, SlotState.KNOWN, SlotState.LEAVING)

    def vacate(self, slots: Sequence[int]) -> None:
        """Nobody holds the blocks in these slots any more, and nobody finds them."""
        self._move(slots, SlotState.LEAVING, SlotState.FREE)
        self._free.extend(reversed(slots))

    def give_back(self, slots: Sequence[int]) -> None:
        """A request's own slots are free again."""
        self._move(slots, SlotState.OWN, SlotState.FREE)
        self._free.extend(reversed(slots))

    def quarantine(self, slots: Iterable[int]) -> None:
        """A request is gone, and a job may still write into its slots."""
        self._move(slots, SlotState.OWN, SlotState.QUARANTINED)

    def withhold(self, slots: Collection[int]) -> None:
        """Free slots are not to be taken until they are unquarantined: others may still use them."""
        self._move(slots, SlotState.FREE, SlotState.QUARANTINED)
        held = frozenset(slots)
        self._free = array("i", [slot for slot in self._free if slot not in held])

    def unquarantine(self, slots: Sequence[int]) -> None:
        """The job has ended, or they who used them are gone: the slots are free."""
        self._move(slots, SlotState.QUARANTINED, SlotState.FREE)
        self._free.extend(reversed(slots))

    def still_own(self, slots: Iterable[int]) -> list[int]:
        """Those of a request's slots whose blocks did not enter the index, and that no job may write to."""
        states = self._states
        return [slot for slot in slots if states[slot] == SlotState.OWN]

    def state(self, slot: int) -> SlotState:
        """Where a slot is in its life."""
        return SlotState(self._states[slot])

    def counts(self) -> dict[SlotState, int]:
        """How many slots are in each state."""
        return {state: self._states.count(state) for state in SlotState}

    def free(self) -> list[int]:
        """The slots that hold nothing, the next to be taken last. For snapshots."""
        return list(self._free)

    def validate(self) -> None:
        """Raise AssertionError if slots and index disagree. Reads everything."""
        known = [] if self._index is None else [slot for _, _, slot in self._index.blocks()]
        leaving = [] if self._index is None else self._index.leaving()
        assert len({*known, *leaving}) == len(known) + len(leaving), "two blocks in one slot"
        assert all(self._states[slot] == SlotState.LEAVING for slot in leaving), "a block that left, in another's slot"
        assert all(self._states[slot] == SlotState.KNOWN for slot in known), "a known block in a slot that is not"
        counts = self.counts()
        assert counts[SlotState.KNOWN] == len(known), "a slot that nobody knows"
        assert counts[SlotState.LEAVING] == len(leaving), "a slot that nobody will free"
        assert len(set(self._free)) == len(self._free) == counts[SlotState.FREE], "the free list is wrong"
        assert all(self._states[slot] == SlotState.FREE for slot in self._free), "a free slot that is not"

    def _move(self, slots: Iterable[int], before: SlotState, after: SlotState) -> None:
        states = self._states
        for slot in slots:
            if states[slot] != before:
                raise Contradiction(f"slot {slot} is {SlotState(states[slot]).name}, and not {before.name}")
            states[slot] = after
