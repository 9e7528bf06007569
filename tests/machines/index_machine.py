"""A hypothesis machine: the prefix index that is used beside the one that is easy to believe, and the slots over both.

Every call goes to `RadixIndex` and to `NaiveIndex`, and every answer is compared. Where several blocks may leave with
equal right, the oracle is asked whether the choice was right, and makes the same one. Paths are sequences over two
tokens, so that they share, part and meet again. `DeviceSlots` counts over the index under test; beside it stands the
state that each slot must be in.

One liberty is granted to the index: a pin may keep, besides its own blocks, those that lie behind it in the same run,
as long as it lasts. So with pins out, what lies behind one may be evictable there or not; nothing else may differ.
"""

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar, Final

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from headwater.core.keys import BlockKey
from headwater.index.base import Hint, Hold, Victim
from headwater.index.radix import RadixIndex
from headwater.index.slots import DeviceSlots, SlotState
from headwater.policy import BlockFacts, Policy, policy_by_name
from machines.naive_index import NaiveIndex

SESSIONS: Final = (b"", b"a" * 16, b"a" * 16, b"b" * 16)
NUM_BITS: Final = 2  # stores whose marks are tried
NOBODY: Final = BlockKey(hashlib.sha256(b"headwater test root").digest())

# Mostly one path and its beginnings, so that requests meet on it, and some that part from it.
PATHS: Final = ("0000", "00000", "000", "00", "0", "0010", "001", "01", "1", "10", "101", "")  # they share, and part
MOVES: Final = (
    *("compute", "compute", "race", "hold", "advance", "extend", "extend", "release", "release"),
    *("rank", "cut", "cut", "part", "pin", "pin_coldest", "unpin", "repin", "mark", "mark", "unmark"),
    *("squeeze", "squeeze", "unquarantine", "wait"),
)
moves = st.lists(
    st.tuples(st.sampled_from(MOVES), st.integers(0, 7), st.sampled_from(PATHS), st.integers(0, 63)),
    min_size=4,
    max_size=10,
)


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
    **{name: policy_by_name(name) for name in ("lru", "lru-2", "value", "session")},
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
    num_shared: int = 1 << 30  # blocks before this one are found by others, too


class IndexMachine(RuleBasedStateMachine):
    """Radix and naive side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.holds: list[Grip] = []
        self.pins: list[Grip] = []
        self.ended: list[Grip] = []  # pins that were given back, and may still be marked
        self.now_s = 0.0

    @initialize(
        policy=st.sampled_from(sorted(POLICIES)),
        num_slots=st.sampled_from((8, 12, 20, 4, 1)),
        num_ghosts=st.sampled_from((0, 3, 64)),
    )
    def begin(self, policy: str, num_slots: int, num_ghosts: int) -> None:
        """Empty, under one of the policies."""
        self.policy = POLICIES[policy]
        self.radix = RadixIndex(self.policy, block_bytes=7, num_ghosts=num_ghosts)
        self.naive = NaiveIndex(self.policy, block_bytes=7, num_ghosts=num_ghosts)
        self.slots = DeviceSlots(num_slots, self.radix)
        self.states = [SlotState.FREE] * num_slots

    @rule(moves=moves)
    def bustle(self, moves: list[tuple[str, int, str, int]]) -> None:
        """Several moves, each by somebody, on some path; the dice decide the rest. Everything is checked in between.

        One rule of many moves, and not a rule for each: hypothesis would leave out half of the rules in every example,
        and the states worth seeing need most of them.
        """
        for name, which, path, number in moves:
            getattr(self, name)(which, [int(token) for token in path], random.Random(number))
            self.check()

    # --- requests -----------------------------------------------------------------------------------------------------

    def hold(self, which: int, tokens: list[int], dice: random.Random) -> None:
        """A request comes and holds what is known."""
        keys = path_keys(tokens)
        assert self.radix.find(keys) == self.naive.find(keys)
        hint = Hint(dice.choice(SESSIONS), dice.choice((0.0, 0.0, 5.0)), dice.random() < 0.2)  # it changes no answer
        radix = self.radix.hold(keys, now_s=self.now_s, hint=hint)
        grip = Grip(radix, self.naive.hold(keys, now_s=self.now_s, hint=hint), keys)
        assert grip.radix.num_blocks == grip.naive.num_blocks
        grip.keys = keys[: grip.naive.num_blocks]
        self.holds.append(grip)

    def advance(self, which: int, tokens: list[int], dice: random.Random) -> None:
        """It looks again."""
        if self.holds:
            grip = pick(self.holds, which)
            keys, hit = self.behind(grip, tokens), dice.random() < 0.7
            moved = self.naive.advance(grip.naive, keys, now_s=self.now_s, hit=hit)
            assert self.radix.advance(grip.radix, keys, now_s=self.now_s, hit=hit) == moved
            grip.keys += keys[:moved]

    def extend(self, which: int, tokens: list[int], dice: random.Random) -> None:
        """It computed blocks, or loaded them; with some of them another was faster."""
        if self.holds:
            self.fill(pick(self.holds, which), tokens, seen=dice.random() < 0.3)

    def fill(self, grip: Grip, tokens: list[int], *, seen: bool) -> None:
        """Get or create the blocks behind a hold."""
        keys = self.behind(grip, tokens)
        slots = self.take(len(keys))
        if slots is None:
            return
        if len(grip.keys) > grip.num_shared:
            self.fill_apart(grip, keys, slots)
            return
        taken = self.naive.extend(grip.naive, keys, slots, now_s=self.now_s, seen=seen)
        assert self.radix.extend(grip.radix, keys, slots, now_s=self.now_s, seen=seen) == taken
        grip.keys += keys
        won = [slot for slot, got in zip(slots, taken, strict=True) if slot == got]
        grip.own += [slot for slot in slots if slot not in won]
        self.slots.know(won)
        self.become(won, SlotState.KNOWN)

    def fill_apart(self, grip: Grip, keys: list[BlockKey], slots: list[int]) -> None:
        """Blocks behind a hold that nobody else finds."""
        self.naive.extend_apart(grip.naive, keys, slots)
        self.radix.extend_apart(grip.radix, keys, slots)
        self.slots.know_apart(slots)
        self.become(slots, SlotState.LEAVING)
        if keys:
            grip.num_shared = min(grip.num_shared, len(grip.keys))
        grip.keys += keys

    def part(self, which: int, tokens: list[int], dice: random.Random) -> None:
        """A request computed blocks that nobody is to find."""
        if self.holds:
            grip = pick(self.holds, which)
            keys = self.behind(grip, tokens)
            slots = self.take(len(keys))
            if slots is not None:
                self.fill_apart(grip, keys, slots)

    def rank(self, which: int, tokens: list[int], dice: random.Random) -> None:
        """Blocks leave in another order from now on."""
        self.policy = POLICIES[sorted(POLICIES)[which % len(POLICIES)]]
        self.naive.rank_by(self.policy)
        self.radix.rank_by(self.policy)

    def cut(self, which: int, tokens: list[int], dice: random.Random) -> None:
        """Somebody wants a block gone, and what builds on it."""
        keys = path_keys(tokens)
        gone = self.naive.cut(keys)
        assert sorted(self.radix.cut(keys)) == sorted(gone)
        slots = [slot for _, slot in gone]
        self.slots.cut(slots)
        self.become(slots, SlotState.LEAVING)
        for grip in [*self.holds, *self.pins, *self.ended]:
            if gone and grip.keys[: len(keys)] == keys:
                grip.num_shared = min(grip.num_shared, len(keys) - 1)
        self.sweep()

    def sweep(self) -> None:
        """What nobody finds and nobody holds is gone; a pin may keep what lies behind it in its run."""
        before = set(self.radix.leaving())
        gone = self.radix.sweep()
        assert set(self.naive.leaving()) - set(self.naive.sweep()) <= before - set(gone), "gone from under a holder"
        assert len(self.radix.leaving()) == len(before) - len(gone)
        self.slots.vacate(gone)
        self.become(gone, SlotState.FREE)

    def compute(self, which: int, tokens: list[int], dice: random.Random) -> None:
        """A request comes, computes what is missing, and may stay."""
        self.hold(which, tokens, dice)
        grip = self.holds[-1]
        self.fill(grip, tokens[len(grip.keys) :], seen=False)
        if dice.random() < 0.6:
            self.release(-1, tokens, dice)

    def race(self, which: int, tokens: list[int], dice: random.Random) -> None:
        """Two requests come, find the same, and compute the same, in turns."""
        self.hold(which, tokens, dice)
        self.hold(which, tokens, dice)
        for grip in (self.holds[-1], self.holds[-2], self.holds[-1]):
            self.fill(grip, tokens[len(grip.keys) :][: dice.randint(1, 3)], seen=False)
            self.check()

    def release(self, which: int, tokens: list[int], dice: random.Random) -> None:
        """It leaves; what is its own is free, or somebody may still write there."""
        if self.holds:
            grip = pick(self.holds, which)
            self.holds.remove(grip)
            self.naive.release(grip.naive, now_s=self.now_s)
            self.radix.release(grip.radix, now_s=self.now_s)
            self.give_back(grip.own, locked=dice.random() < 0.2)

    # --- jobs ---------------------------------------------------------------------------------------------------------

    def pin(self, which: int, tokens: list[int], dice: random.Random) -> None:
        """A job keeps the first blocks of a hold."""
        if self.holds:
            grip = pick(self.holds, which)
            num = dice.choice((None, dice.randint(0, len(grip.keys))))
            pins = self.radix.pin(grip.radix, num), self.naive.pin(grip.naive, num)
            self.pins.append(Grip(*pins, grip.keys[:num], num_shared=grip.num_shared))

    def pin_coldest(self, which: int, tokens: list[int], dice: random.Random) -> None:
        """A job saves who would leave next."""
        bit = 1 << which % NUM_BITS
        lacking = [key for key in self.naive.free_leaves() if not self.naive.marks(key) & bit]
        pin = self.radix.pin_coldest(bit)
        if pin is None:
            assert not self.sure(lacking)
            return
        keys = self.radix.keys(pin)
        assert keys[-1] in lacking
        self.check_lowest(keys[-1], lacking)
        self.pins.append(Grip(pin, self.naive.pin_leaf(keys[-1]), keys))

    def repin(self, which: int, tokens: list[int], dice: random.Random) -> None:
        """What was copied is to be copied once more, if it is still there."""
        if self.ended:
            grip = pick(self.ended, which)
            radix, naive = self.radix.repin(grip.radix), self.naive.repin(grip.naive)
            assert (radix is None) == (naive is None), "there for one, and gone for the other"
            if radix is not None and naive is not None:
                assert self.radix.keys(radix) == grip.keys
                self.pins.append(Grip(radix, naive, grip.keys, num_shared=grip.num_shared))

    def unpin(self, which: int, tokens: list[int], dice: random.Random) -> None:
        """The job has read its blocks."""
        if self.pins:
            grip = pick(self.pins, which)
            self.pins.remove(grip)
            self.naive.unpin(grip.naive)
            self.radix.unpin(grip.radix)
            self.ended = [*self.ended, grip][-4:]

    def mark(self, which: int, tokens: list[int], dice: random.Random) -> None:
        """A store said what it has: of a hold, of a pin, or of what is left of one that was given back."""
        grips = [*self.holds, *self.pins, *self.ended]
        if grips:
            grip = dice.choice(grips)
            start = dice.randint(0, len(grip.keys))
            end, bit, on = dice.randint(start, len(grip.keys)), 1 << which % NUM_BITS, dice.random() < 0.7
            self.naive.mark(grip.naive, start, end, bit=bit, on=on)
            self.radix.mark(grip.radix, start, end, bit=bit, on=on)

    def unmark(self, which: int, tokens: list[int], dice: random.Random) -> None:
        """A store was lost."""
        self.naive.unmark(1 << which % NUM_BITS)
        self.radix.unmark(1 << which % NUM_BITS)

    # --- room ---------------------------------------------------------------------------------------------------------

    def squeeze(self, which: int, tokens: list[int], dice: random.Random) -> None:
        """Somebody takes slots, and gives them back unused: what had to leave for them is gone."""
        taken = self.take(which if dice.random() < 0.8 else len(self.states))
        self.check()
        self.give_back(taken or [], locked=dice.random() < 0.2)

    def unquarantine(self, which: int, tokens: list[int], dice: random.Random) -> None:
        """No job writes any more."""
        locked = [slot for slot, state in enumerate(self.states) if state is SlotState.QUARANTINED]
        self.slots.unquarantine(locked)
        self.become(locked, SlotState.FREE)

    def wait(self, which: int, tokens: list[int], dice: random.Random) -> None:
        """Time passes; without it, all that happens, happens at once."""
        self.now_s += 1 + which

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

    # --- what must be true --------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Everything."""
        self.sweep()
        self.both_agree_with_themselves()
        self.both_agree_with_each_other()
        self.pins_keep_little_more()
        self.every_slot_is_where_it_belongs()

    def both_agree_with_themselves(self) -> None:
        """Nothing contradicts itself."""
        self.radix.validate()
        self.naive.validate()
        self.slots.validate()

    def both_agree_with_each_other(self) -> None:
        """The same blocks, in the same slots, for the same holders."""
        assert len(self.radix) == len(self.naive)
        assert list(self.radix.ghosts) == list(self.naive.ghosts)
        assert not any(key in self.radix.ghosts for key, _, _ in self.radix.blocks()), "gone, and here"
        assert sorted(self.radix.blocks(), key=block_order) == sorted(self.naive.blocks(), key=block_order)
        if not self.pins:
            assert self.radix.num_evictable == self.naive.num_evictable
            assert sorted(self.radix.leaving()) == sorted(self.naive.leaving())
        for grip in [*self.holds, *self.pins]:
            assert grip.radix.num_blocks == grip.naive.num_blocks == len(grip.keys)
            assert self.radix.keys(grip.radix) == self.naive.keys(grip.naive) == grip.keys
            if len(grip.keys) <= grip.num_shared:
                assert self.radix.find(grip.keys) == len(grip.keys)
            middle = len(grip.keys) // 2
            assert self.radix.keys(grip.radix, middle) == grip.keys[middle:]
            for start in (0, middle):
                assert self.radix.slots(grip.radix, start) == self.naive.slots(grip.naive, start)
            for i in range(NUM_BITS):
                assert self.radix.num_marked(grip.radix, 1 << i) == self.naive.num_marked(grip.naive, 1 << i)
            for hits in range(4):
                assert self.radix.num_hot(grip.radix, hits) == self.naive.num_hot(grip.naive, hits)

    def pins_keep_little_more(self) -> None:
        """What could leave differs by no more than what lies behind pins."""
        fewer = self.naive.num_evictable - self.radix.num_evictable
        assert 0 <= fewer <= len(self.behind_pins())

    def every_slot_is_where_it_belongs(self) -> None:
        """Each slot is in exactly one state, the one it was brought to."""
        assert [self.slots.state(slot) for slot in range(len(self.states))] == self.states
        assert self.slots.counts() == {state: self.states.count(state) for state in SlotState}

    def teardown(self) -> None:
        """Everybody leaves: all that is known could leave, and does, leaf by leaf."""
        if not hasattr(self, "radix"):
            return
        dice = random.Random(0)
        while self.holds:
            self.release(0, [], dice)
        while self.pins:
            self.unpin(0, [], dice)
        self.unquarantine(0, [], dice)
        self.sweep()
        assert not self.radix.leaving()
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
