"""A hypothesis machine: the prefix index that is used beside the one that is easy to believe, and the slots over both.

Every call goes to `RadixIndex` and to `NaiveIndex`, and every answer is compared. Where several blocks may leave with
equal right, the oracle is asked whether the choice was right, and makes the same one. Paths are sequences over two
tokens, so that they share, part and meet again. `DeviceSlots` counts over the index under test; beside it stands the
state that each slot must be in.

One liberty is granted to the index: a pin may keep, besides its own blocks, those that lie behind it in the same run,
as long as it lasts. So with pins out, what lies behind one may be evictable there or not; nothing else may differ.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar, Final

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headwater.core.keys import BlockKey
from headwater.index.base import Hold, Victim
from headwater.index.naive import NaiveIndex
from headwater.index.radix import RadixIndex
from headwater.index.slots import DeviceSlots, SlotState
from headwater.policy import BlockFacts, Policy, policy_by_name

NUM_BITS: Final = 2  # stores whose marks are tried
NOBODY: Final = BlockKey(hashlib.sha256(b"headwater test root").digest())

# Mostly one path and its beginnings, so that requests meet on it, and some that part from it.
TOKENS = st.sampled_from(["0" * num for num in range(6)] + ["1", "01", "001", "0010", "10", "101"]).map(
    lambda word: [int(token) for token in word]
)
WHICH = st.integers(0, 7)
BIT = st.integers(0, NUM_BITS - 1).map(lambda i: 1 << i)


@lru_cache(maxsize=1 << 16)
def child_key(parent: BlockKey, token: int) -> BlockKey:
    """The name of the block with `token` behind a block."""
    return BlockKey(hashlib.sha256(parent + bytes([token])).digest())


def path_keys(tokens: Sequence[int], root: BlockKey = NOBODY) -> list[BlockKey]:
    """The names of the blocks of a sequence, one token a block."""
    keys: list[BlockKey] = []
    for token in tokens:
        keys.append(child_key(keys[-1] if keys else root, token))
    return keys


class Ranked(Policy):
    """A policy from a function: for orders that no real policy has."""

    name: ClassVar[str] = "ranked"

    def __init__(self, rank: Callable[[BlockFacts], float]) -> None:
        self._rank = rank

    def priority(self, facts: BlockFacts) -> float:
        return self._rank(facts)


POLICIES: Final[dict[str, Policy]] = {
    **{name: policy_by_name(name) for name in ("lru", "lru-2", "value")},
    "fewest_hits": Ranked(lambda facts: facts.hits),
    "deepest": Ranked(lambda facts: -facts.depth),
    "shallowest": Ranked(lambda facts: facts.depth),
    "all_alike": Ranked(lambda facts: 0.0),
    "mixed": Ranked(lambda facts: facts.used_s + 3 * facts.hits - 2 * facts.depth),
}


@dataclass(eq=False)
class Grip:
    """One hold or pin in both indexes, and what the one who has it knows."""

    radix: Hold
    naive: Hold
    keys: list[BlockKey]
    own: list[int] = field(default_factory=list)  # slots that lost


class IndexMachine(RuleBasedStateMachine):
    """Radix and naive side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.holds: list[Grip] = []
        self.pins: list[Grip] = []
        self.ended: list[Grip] = []  # pins that were given back, and may still be marked
        self.loose: list[int] = []  # slots that somebody took and put nothing into
        self.now_s = 0.0

    @initialize(
        policy=st.sampled_from(sorted(POLICIES)), num_slots=st.integers(1, 16), num_ghosts=st.sampled_from((0, 3, 64))
    )
    def begin(self, policy: str, num_slots: int, num_ghosts: int) -> None:
        """Empty, under one of the policies."""
        self.policy = POLICIES[policy]
        self.radix = RadixIndex(self.policy, block_bytes=7, num_ghosts=num_ghosts)
        self.naive = NaiveIndex(self.policy, block_bytes=7, num_ghosts=num_ghosts)
        self.slots = DeviceSlots(num_slots, self.radix)
        self.states = [SlotState.FREE] * num_slots

    # --- requests -----------------------------------------------------------------------------------------------------

    @rule(tokens=TOKENS)
    def hold(self, tokens: list[int]) -> None:
        """A request comes and holds what is known."""
        keys = path_keys(tokens)
        assert self.radix.find(keys) == self.naive.find(keys)
        grip = Grip(self.radix.hold(keys, now_s=self.now_s), self.naive.hold(keys, now_s=self.now_s), keys)
        assert grip.radix.num_blocks == grip.naive.num_blocks
        grip.keys = keys[: grip.naive.num_blocks]
        self.holds.append(grip)

    @precondition(lambda self: self.holds)
    @rule(which=WHICH, tokens=TOKENS, hit=st.booleans())
    def advance(self, which: int, tokens: list[int], hit: bool) -> None:
        """It looks again."""
        grip = pick(self.holds, which)
        keys = self.behind(grip, tokens)
        moved = self.naive.advance(grip.naive, keys, now_s=self.now_s, hit=hit)
        assert self.radix.advance(grip.radix, keys, now_s=self.now_s, hit=hit) == moved
        grip.keys += keys[:moved]

    @precondition(lambda self: self.holds)
    @rule(which=WHICH, tokens=TOKENS, seen=st.booleans())
    def extend(self, which: int, tokens: list[int], seen: bool) -> None:
        """It computed blocks, or loaded them; with some of them another was faster."""
        grip = pick(self.holds, which)
        keys = self.behind(grip, tokens)
        slots = self.take(len(keys))
        if slots is None:
            return
        taken = self.naive.extend(grip.naive, keys, slots, now_s=self.now_s, seen=seen)
        assert self.radix.extend(grip.radix, keys, slots, now_s=self.now_s, seen=seen) == taken
        grip.keys += keys
        won = [slot for slot, got in zip(slots, taken, strict=True) if slot == got]
        grip.own += [slot for slot in slots if slot not in won]
        self.slots.know(won)
        self.become(won, SlotState.KNOWN)

    @precondition(lambda self: self.holds)
    @rule(which=WHICH, locked=st.booleans())
    def release(self, which: int, locked: bool) -> None:
        """It leaves; what is its own is free, or somebody may still write there."""
        grip = pick(self.holds, which)
        self.holds.remove(grip)
        self.naive.release(grip.naive, now_s=self.now_s)
        self.radix.release(grip.radix, now_s=self.now_s)
        self.give_back(grip.own, locked=locked)

    # --- jobs ---------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.holds)
    @rule(which=WHICH, num=st.none() | st.integers(0, 6))
    def pin(self, which: int, num: int | None) -> None:
        """A job keeps the first blocks of a hold."""
        grip = pick(self.holds, which)
        num = None if num is None else min(num, len(grip.keys))
        self.pins.append(Grip(self.radix.pin(grip.radix, num), self.naive.pin(grip.naive, num), grip.keys[:num]))

    @rule(bit=BIT)
    def pin_coldest(self, bit: int) -> None:
        """A job saves who would leave next."""
        lacking = [key for key in self.naive.free_leaves() if not self.naive.marks(key) & bit]
        pin = self.radix.pin_coldest(bit)
        if pin is None:
            assert not self.sure(lacking)
            return
        keys = self.radix.keys(pin)
        assert keys[-1] in lacking
        self.check_lowest(keys[-1], lacking)
        self.pins.append(Grip(pin, self.naive.pin_leaf(keys[-1]), keys))

    @precondition(lambda self: self.pins)
    @rule(which=WHICH)
    def unpin(self, which: int) -> None:
        """The job has read its blocks."""
        grip = pick(self.pins, which)
        self.pins.remove(grip)
        self.naive.unpin(grip.naive)
        self.radix.unpin(grip.radix)
        self.ended.append(grip)

    @precondition(lambda self: self.holds or self.pins or self.ended)
    @rule(which=WHICH, start=st.integers(0, 5), num=st.integers(0, 5), bit=BIT, on=st.booleans())
    def mark(self, which: int, start: int, num: int, bit: int, on: bool) -> None:
        """A store said what it has: of a hold, of a pin, or of what is left of one that was given back."""
        grip = pick([*self.ended, *self.pins, *self.holds], which)
        start = min(start, len(grip.keys))
        end = min(start + num, len(grip.keys))
        self.naive.mark(grip.naive, start, end, bit=bit, on=on)
        self.radix.mark(grip.radix, start, end, bit=bit, on=on)

    @rule(bit=BIT)
    def unmark(self, bit: int) -> None:
        """A store was lost."""
        self.naive.unmark(bit)
        self.radix.unmark(bit)

    # --- room ---------------------------------------------------------------------------------------------------------

    @rule(num=st.integers(0, 17))
    def grab(self, num: int) -> None:
        """Somebody takes slots, and puts nothing into them yet."""
        taken = self.take(num)
        self.loose += taken or []

    @precondition(lambda self: self.loose)
    @rule(locked=st.booleans())
    def drop(self, locked: bool) -> None:
        """And gives them back."""
        self.give_back(self.loose, locked=locked)
        self.loose = []

    @rule()
    def absolve(self) -> None:
        """No job writes any more."""
        locked = [slot for slot, state in enumerate(self.states) if state is SlotState.QUARANTINED]
        self.slots.absolve(locked)
        self.become(locked, SlotState.FREE)

    @rule(seconds=st.integers(1, 3))
    def wait(self, seconds: int) -> None:
        """Time passes; without it, all that happens, happens at once."""
        self.now_s += seconds

    # --- helpers ------------------------------------------------------------------------------------------------------

    def behind(self, grip: Grip, tokens: list[int]) -> list[BlockKey]:
        """The names of blocks behind a hold."""
        return path_keys(tokens, grip.keys[-1] if grip.keys else NOBODY)

    def take(self, num: int) -> list[int] | None:
        """Take slots, and let the oracle judge and follow every eviction."""
        free = self.states.count(SlotState.FREE)
        assert self.slots.num_free == free
        assert self.slots.num_available == free + self.radix.num_evictable
        taken = self.slots.take(num)
        if taken is None:
            assert num > free + self.radix.num_evictable
            return None
        slots, victims = taken
        assert len(slots) == num
        assert len(victims) == max(0, num - free)  # no more than needed
        for victim in victims:
            self.follow(victim)
            self.become([victim.slot], SlotState.FREE)
        assert all(self.states[slot] is SlotState.FREE for slot in slots)
        self.become(slots, SlotState.OWN)
        return slots

    def follow(self, victim: Victim) -> None:
        """The oracle says whether this one could go, and lets it go."""
        leaves = self.naive.free_leaves()
        assert victim.key in leaves, "not a leaf, or not free"
        self.check_lowest(victim.key, leaves)
        assert self.naive.remove(victim.key) == victim

    def check_lowest(self, chosen: BlockKey, among: list[BlockKey]) -> None:
        """Nobody whose place is certain is worth less; under a policy that looks back, the oracle cannot tell."""
        if self.policy.looks_back:
            return
        worth = self.naive.priority(chosen)
        assert all(worth <= self.naive.priority(key) for key in self.sure(among))

    def sure(self, leaves: list[BlockKey]) -> list[BlockKey]:
        """Those behind no pin: nothing can keep them."""
        behind = self.behind_pins()
        return [key for key in leaves if key not in behind]

    def behind_pins(self) -> set[BlockKey]:
        """Blocks that a pin may keep beyond its own."""
        pinned = {grip.keys[-1] for grip in self.pins if grip.keys}
        before = {key: parent for key, parent, _ in self.naive.blocks()}
        found = set()
        for key in before:
            at = before[key]
            while at is not None and at not in pinned:
                at = before[at]
            if at is not None:
                found.add(key)
        return found

    def give_back(self, slots: list[int], *, locked: bool) -> None:
        """Give slots back, or lock them."""
        if locked:
            self.slots.quarantine(slots)
        else:
            self.slots.give_back(slots)
        self.become(slots, SlotState.QUARANTINED if locked else SlotState.FREE)

    def become(self, slots: list[int], state: SlotState) -> None:
        """What the slots must be now."""
        for slot in slots:
            self.states[slot] = state

    # --- invariants ---------------------------------------------------------------------------------------------------

    @invariant()
    def both_agree_with_themselves(self) -> None:
        """Nothing contradicts itself."""
        self.radix.validate()
        self.naive.validate()
        self.slots.validate()

    @invariant()
    def both_agree_with_each_other(self) -> None:
        """The same blocks, in the same slots, for the same holders."""
        assert len(self.radix) == len(self.naive)
        assert list(self.radix.ghosts) == list(self.naive.ghosts)
        assert not any(key in self.radix.ghosts for key, _, _ in self.radix.blocks()), "gone, and here"
        assert sorted(self.radix.blocks(), key=block_order) == sorted(self.naive.blocks(), key=block_order)
        if not self.pins:
            assert self.radix.num_evictable == self.naive.num_evictable
        for grip in [*self.holds, *self.pins]:
            assert grip.radix.num_blocks == grip.naive.num_blocks == len(grip.keys)
            assert self.radix.keys(grip.radix) == self.naive.keys(grip.naive) == grip.keys
            assert self.radix.find(grip.keys) == len(grip.keys)
            middle = len(grip.keys) // 2
            assert self.radix.keys(grip.radix, middle) == grip.keys[middle:]
            for start in (0, middle):
                assert self.radix.slots(grip.radix, start) == self.naive.slots(grip.naive, start)
            for i in range(NUM_BITS):
                assert self.radix.num_marked(grip.radix, 1 << i) == self.naive.num_marked(grip.naive, 1 << i)
            for hits in range(4):
                assert self.radix.num_hot(grip.radix, hits) == self.naive.num_hot(grip.naive, hits)

    @invariant()
    def pins_keep_little_more(self) -> None:
        """What could leave differs by no more than what lies behind pins."""
        fewer = self.naive.num_evictable - self.radix.num_evictable
        assert 0 <= fewer <= len(self.behind_pins())

    @invariant()
    def every_slot_is_where_it_belongs(self) -> None:
        """Each slot is in exactly one state, the one it was brought to."""
        assert [self.slots.state(slot) for slot in range(len(self.states))] == self.states
        assert self.slots.counts() == {state: self.states.count(state) for state in SlotState}

    def teardown(self) -> None:
        """Everybody leaves: all that is known could leave, and does, leaf by leaf."""
        if not hasattr(self, "radix"):
            return
        while self.holds:
            self.release(0, locked=False)
        while self.pins:
            self.unpin(0)
        self.drop(locked=False)
        self.absolve()
        assert self.radix.num_evictable == len(self.radix) == len(self.naive)
        assert self.take(len(self.states)) is not None
        assert len(self.radix) == len(self.naive) == 0
        assert self.radix.evict() is None
        self.both_agree_with_themselves()


def block_order(block: tuple[BlockKey, BlockKey | None, int]) -> bytes:
    """To compare blocks as sets, with messages that can be read."""
    return block[0]


def pick(grips: list[Grip], which: int) -> Grip:
    """One of them."""
    return grips[which % len(grips)]
