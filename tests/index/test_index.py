"""The prefix index and the device slots: against an oracle that is easy to believe, and fault by fault."""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from headwater.core.errors import InvalidConfig
from headwater.core.keys import BlockKey
from headwater.index.base import Hold, PrefixIndex, Victim
from headwater.index.ghosts import Past
from headwater.index.radix import RadixIndex
from headwater.index.runs import below
from headwater.index.slots import DeviceSlots, SlotState
from headwater.policy import policy_by_name
from machines.index_machine import IndexMachine, Ranked, path_keys
from machines.naive_index import NaiveIndex

HOST, DISK = 1, 2  # bits


def test_radix_and_naive_agree_step_by_step() -> None:
    """Default: 100 examples of up to 40 steps, about 3,500 steps. Nightly: 600 of up to 100, about 50,000."""
    nightly = settings().max_examples > 100
    run_state_machine_as_test(
        IndexMachine,
        settings=settings(max_examples=600 if nightly else 100, stateful_step_count=100 if nightly else 40),
    )


@pytest.fixture(params=[RadixIndex, NaiveIndex])
def index(request: pytest.FixtureRequest) -> PrefixIndex:
    made: PrefixIndex = request.param(policy_by_name("lru"), block_bytes=7, num_ghosts=8)
    return made


def path(word: str) -> list[BlockKey]:
    return path_keys(tuple(map(ord, word)))


def put(index: PrefixIndex, word: str, *slots: int, now_s: float = 0.0) -> Hold:
    """A request computes a whole sequence, into the slots given, and goes on."""
    hold = index.hold([], now_s=now_s)
    index.extend(hold, path(word), slots, now_s=now_s)
    index.validate()
    return hold


def know(index: PrefixIndex, word: str, *slots: int, now_s: float = 0.0) -> None:
    """A request computed a sequence, and is gone."""
    index.release(put(index, word, *slots, now_s=now_s), now_s=now_s)
    index.validate()


def evict_all(index: PrefixIndex) -> list[Victim]:
    victims = []
    while (victim := index.evict()) is not None:
        index.validate()
        victims.append(victim)
    return victims


def names(victims: Sequence[Victim], *words: str) -> list[str]:
    """Each victim as the shortest word that ends with it."""
    known = {path(word[:end])[-1]: word[:end] for word in words for end in range(1, len(word) + 1)}
    return [known[victim.key] for victim in victims]


# --- the faults of others -----------------------------------------------------------------------------------------


def test_a_second_insert_of_a_key_finds_the_first(index: PrefixIndex) -> None:
    first = put(index, "abc", 0, 1, 2)
    second = index.hold([], now_s=1.0)
    assert list(index.extend(second, path("abcd"), [10, 11, 12, 13], now_s=1.0)) == [0, 1, 2, 13]
    assert len(index) == 4
    assert list(index.slots(second)) == [0, 1, 2, 13]
    # Whoever leaves first, the other still has all of it, and nothing is lost or doubled at the end.
    index.release(first, now_s=2.0)
    assert index.evict() is None
    assert index.find(path("abcd")) == 4
    index.release(second, now_s=3.0)
    assert names(evict_all(index), "abcd") == ["abcd", "abc", "ab", "a"]
    assert len(index) == 0


def test_two_that_part_in_the_middle_of_what_the_other_is_filling(index: PrefixIndex) -> None:
    first = put(index, "abcd", 0, 1, 2, 3)
    second = index.hold(path("abxy"), now_s=1.0)
    assert second.num_blocks == 2
    assert list(index.extend(second, path("abxy")[2:], [4, 5], now_s=1.0)) == [4, 5]
    assert list(index.extend(first, path("abcde")[4:], [6], now_s=2.0)) == [6]
    assert list(index.slots(first)) == [0, 1, 2, 3, 6]
    assert list(index.slots(second)) == [0, 1, 4, 5]
    index.validate()


def test_who_comes_along_unseen_stays_where_it_is_when_the_first_goes_on(index: PrefixIndex) -> None:
    """A hold that counts no hit leaves no trace in the records, and is one all the same."""
    first = put(index, "ab", 0, 1)
    second = index.hold([], now_s=1.0)
    assert index.advance(second, path("ab"), now_s=1.0, hit=False) == 2
    index.extend(first, path("abc")[2:], [2], now_s=2.0)
    assert (list(index.slots(first)), list(index.slots(second))) == ([0, 1, 2], [0, 1])
    index.validate()
    index.extend(second, path("abx")[2:], [3], now_s=3.0)
    third = index.hold([], now_s=4.0)
    index.extend(third, path("q"), [4], now_s=4.0)
    fourth = index.hold([], now_s=4.0)
    index.advance(fourth, path("q"), now_s=4.0, hit=False)
    index.extend(fourth, path("qr")[1:], [5], now_s=5.0)
    index.extend(third, path("qs")[1:], [6], now_s=6.0)
    index.validate()
    assert [list(index.slots(hold)) for hold in (second, third, fourth)] == [[0, 1, 3], [4, 6], [4, 5]]
    assert [index.num_hot(first, hits) for hits in (0, 1)] == [3, 0]


def test_only_leaves_leave_whatever_their_worth() -> None:
    for rank in (lambda facts: facts.depth, lambda facts: -facts.depth, lambda facts: 0.0):
        index = RadixIndex(Ranked(rank), block_bytes=7)
        words = ("abcd", "abxy", "az", "q")
        for at, word in enumerate(words):
            know(index, word, *range(10 * at, 10 * at + len(word)))
        before = {key: parent for key, parent, _ in index.blocks()}
        known = set(before)
        for victim in evict_all(index):
            known.remove(victim.key)
            assert all(before[key] != victim.key for key in known), "a suffix outlived its prefix"
        assert not known


def test_a_leaf_that_is_hit_again_does_not_leave(index: PrefixIndex) -> None:
    know(index, "ab", 0, 1, now_s=0.0)
    know(index, "cd", 2, 3, now_s=5.0)
    again = index.hold(path("ab"), now_s=6.0)  # the next victim, a moment before
    assert names(evict_all(index), "ab", "cd") == ["cd", "c"]
    index.release(again, now_s=7.0)
    (last, first) = evict_all(index)
    assert (last.hits, last.used_s, last.depth, last.slot) == (1, 7.0, 1, 1)
    assert (first.hits, first.used_s, first.depth, first.slot) == (1, 7.0, 0, 0)


def test_holds_are_given_back_to_the_last_block(index: PrefixIndex) -> None:
    """References that leak on some path would keep blocks for ever."""
    know(index, "abc", 0, 1, 2)
    holds = [index.hold(path("abc")[:num], now_s=1.0) for num in (0, 1, 2, 3, 3)]
    assert index.num_evictable == 0
    for num_left, hold in zip((0, 0, 0, 0, 3), holds, strict=True):
        index.release(hold, now_s=2.0)
        assert index.num_evictable == num_left
    shorter = index.hold(path("abx"), now_s=3.0)
    assert (shorter.num_blocks, index.num_evictable) == (2, 1)


# --- what is said of it -------------------------------------------------------------------------------------------


def test_find_changes_nothing(index: PrefixIndex) -> None:
    hold = put(index, "abc", 0, 1, 2)
    assert [index.find(path(word)) for word in ("", "abc", "abcd", "abx", "x")] == [0, 3, 3, 2, 0]
    assert index.num_hot(hold, 1) == 0
    index.release(hold, now_s=1.0)
    assert [(victim.hits, victim.used_s) for victim in evict_all(index)] == [(0, 1.0)] * 3


def test_a_hit_is_counted_once_for_each_who_passes_and_not_for_the_one_who_computes(index: PrefixIndex) -> None:
    hold = put(index, "ab", 0, 1)
    assert [index.num_hot(hold, hits) for hits in (0, 1)] == [2, 0]
    index.hold(path("a"), now_s=1.0)
    other = index.hold(path("ab"), now_s=1.0)
    assert [index.num_hot(hold, hits) for hits in (0, 1, 2, 3)] == [2, 2, 1, 0]
    assert index.advance(other, path("ab")[2:], now_s=2.0) == 0
    index.extend(hold, path("abc")[2:], [2], now_s=2.0)
    assert index.advance(other, path("abcd")[2:], now_s=3.0) == 1
    assert [index.num_hot(hold, hits) for hits in (0, 1, 2)] == [3, 3, 1]


def test_marks_follow_blocks_through_splits_and_end_with_them(index: PrefixIndex) -> None:
    hold = put(index, "abcd", 0, 1, 2, 3)
    index.mark(hold, 0, 3, bit=HOST, on=True)
    index.mark(hold, 1, 2, bit=DISK, on=True)
    index.hold(path("ab"), now_s=1.0)  # cuts it in two
    assert (index.num_marked(hold, HOST), index.num_marked(hold, DISK)) == (3, 2)
    index.mark(hold, 1, 4, bit=HOST, on=False)
    assert (index.num_marked(hold, HOST), index.num_marked(hold, DISK)) == (1, 2)
    index.release(hold, now_s=2.0)
    assert [victim.stored for victim in evict_all(index)] == [0, 0]
    again = index.hold(path("abcd"), now_s=3.0)
    assert (index.num_marked(again, HOST), index.num_marked(again, DISK)) == (1, 2)


def test_a_store_that_was_lost_has_nothing(index: PrefixIndex) -> None:
    hold, other = put(index, "abc", 0, 1, 2), put(index, "xy", 3, 4)
    for one in (hold, other):
        index.mark(one, 0, one.num_blocks, bit=HOST, on=True)
        index.mark(one, 0, one.num_blocks, bit=DISK, on=True)
    index.unmark(HOST)
    assert [index.num_marked(one, HOST) for one in (hold, other)] == [0, 0]
    assert [index.num_marked(one, DISK) for one in (hold, other)] == [3, 2]


def test_a_pin_keeps_its_blocks_and_its_marks_outlive_it(index: PrefixIndex) -> None:
    hold = put(index, "abc", 0, 1, 2)
    pin = index.pin(hold)
    index.release(hold, now_s=1.0)
    assert index.evict() is None
    index.unpin(pin)
    assert names([victim for victim in [index.evict()] if victim is not None], "abc") == ["abc"]
    know(index, "abc", 0, 1, 9, now_s=2.0)  # the third one is another block now: no job has saved it
    index.mark(pin, 0, 3, bit=HOST, on=True)
    assert index.num_marked(index.hold(path("abc"), now_s=3.0), HOST) == 2
    index.validate()


def test_a_pin_of_the_first_blocks(index: PrefixIndex) -> None:
    hold = put(index, "abcd", 0, 1, 2, 3)
    pins = [index.pin(hold, num) for num in (0, 2, 4)]
    assert [pin.num_blocks for pin in pins] == [0, 2, 4]
    assert [index.keys(pin) for pin in pins] == [path("abcd")[:num] for num in (0, 2, 4)]
    assert [list(index.slots(pin, 1)) for pin in pins] == [[], [1], [1, 2, 3]]
    index.release(hold, now_s=1.0)
    index.unpin(pins[2])
    evict_all(index)
    assert index.find(path("abcd")) >= 2
    index.unpin(pins[1])
    evict_all(index)
    assert len(index) == 0


def test_the_coldest_that_is_not_saved(index: PrefixIndex) -> None:
    for at, word in enumerate(("ab", "cd", "ef")):
        know(index, word, 2 * at, 2 * at + 1, now_s=float(at))
    first = index.pin_coldest(HOST)
    assert first is not None
    assert index.keys(first) == path("ab")
    index.mark(first, 0, 2, bit=HOST, on=True)
    second = index.pin_coldest(HOST)  # the first is pinned: it does not leave now
    assert second is not None
    assert index.keys(second) == path("cd")
    index.unpin(first)
    third = index.pin_coldest(HOST)  # the first is saved
    assert third is not None
    assert index.keys(third) == path("ef")
    assert index.pin_coldest(HOST) is None
    other = index.pin_coldest(DISK)
    assert other is not None
    assert index.keys(other) == path("ab")


def test_the_coldest_is_looked_for_among_the_next_victims_only() -> None:
    """A search through all leaves at every commit would cost more than it brings: what lies behind has time."""
    index = RadixIndex(policy_by_name("lru"), block_bytes=7)
    words = [chr(0x40 + at) for at in range(65)]
    for at, word in enumerate(words):
        know(index, word, at, now_s=float(at))
    saved = [index.hold(path(word), now_s=0.0) for word in words[:64]]
    for at, hold in enumerate(saved):
        index.mark(hold, 0, 1, bit=HOST, on=True)
        index.release(hold, now_s=float(at))
    assert index.pin_coldest(HOST) is None
    assert index.evict() is not None
    pin = index.pin_coldest(HOST)
    assert pin is not None
    assert index.keys(pin) == path(words[64])
    index.validate()


def test_a_block_that_comes_back_goes_on_where_it_left_off(index: PrefixIndex) -> None:
    know(index, "ab", 0, 1)
    index.release(index.hold(path("ab"), now_s=1.0), now_s=1.0)
    evict_all(index)
    assert list(index.ghosts) == path("ab")[::-1]
    hold = put(index, "abc", 0, 1, 2, now_s=2.0)
    assert list(index.ghosts) == []
    assert [index.num_hot(hold, hits) for hits in (1, 2, 3)] == [2, 2, 0]
    loaded = index.hold([], now_s=3.0)
    index.extend(loaded, path("x"), [3], now_s=3.0, seen=True)  # a store had it: somebody used it before
    assert [index.num_hot(loaded, hits) for hits in (1, 2)] == [1, 0]


def test_memory_of_the_gone_is_bounded_and_loses_the_oldest(index: PrefixIndex) -> None:
    for at, word in enumerate("abcdefghijkl"):
        know(index, word, at, now_s=float(at))
    assert len(evict_all(index)) == 12
    assert list(index.ghosts) == [path(word)[0] for word in "efghijkl"]
    know(index, "f", 0, now_s=20.0)
    evict_all(index)
    assert list(index.ghosts) == [path(word)[0] for word in "eghijklf"]


# --- what it costs ------------------------------------------------------------------------------------------------


def num_runs(index: RadixIndex) -> int:
    return sum(1 for _ in below(index._root)) - 1


def test_what_one_request_fills_is_one_run() -> None:
    index = RadixIndex(policy_by_name("lru"), block_bytes=7)
    hold = index.hold([], now_s=0.0)
    for at in range(1, 50):
        pin = index.pin(hold)  # a save is always under way
        index.extend(hold, path("x" * at)[at - 1 :], [at], now_s=float(at))
        index.unpin(pin)
    assert num_runs(index) == 1
    index.hold(path("x" * 20), now_s=60.0)
    assert num_runs(index) == 2
    index.hold(path("x" * 20), now_s=61.0)
    assert num_runs(index) == 2
    index.extend(hold, path("x" * 50)[49:], [50], now_s=62.0)
    assert num_runs(index) == 2


def test_stale_entries_do_not_pile_up() -> None:
    index = RadixIndex(policy_by_name("lru"), block_bytes=7)
    know(index, "ab", 0, 1)
    for at in range(2_000):
        index.release(index.hold(path("ab"), now_s=float(at)), now_s=float(at))
    assert len(index._leaves._heap) < 100
    index.validate()


def test_growing_behind_a_pin_keeps_no_more_than_the_run_and_not_for_long() -> None:
    """The liberty that the index takes: a pin may keep what was filled behind it, until it is given back."""
    index = RadixIndex(policy_by_name("lru"), block_bytes=7)
    hold = put(index, "ab", 0, 1)
    pin = index.pin(hold)
    index.extend(hold, path("abc")[2:], [2], now_s=1.0)
    index.release(hold, now_s=2.0)
    assert (index.num_evictable, index.evict()) == (0, None)
    assert index.keys(pin) == path("ab")
    index.unpin(pin)
    assert index.num_evictable == 3


# --- slots --------------------------------------------------------------------------------------------------------


def small(num_slots: int = 4) -> tuple[RadixIndex, DeviceSlots]:
    index = RadixIndex(policy_by_name("lru"), block_bytes=7)
    return index, DeviceSlots(num_slots, index)


def test_all_or_nothing() -> None:
    index, slots = small()
    taken = slots.take(3)
    assert taken == ([0, 1, 2], [])
    assert slots.take(2) is None
    assert (slots.num_free, slots.num_available) == (1, 1)
    hold = index.hold([], now_s=0.0)
    index.extend(hold, path("ab"), [0, 1], now_s=0.0)
    slots.know([0, 1])
    assert slots.take(2) is None  # held
    index.release(hold, now_s=0.0)
    assert slots.num_available == 3
    again = slots.take(3)
    assert again is not None
    assert [victim.slot for victim in again[1]] == [1, 0]
    assert sorted(again[0]) == [0, 1, 3]
    slots.validate()


def test_a_slot_makes_no_other_move() -> None:
    _, slots = small()
    assert slots.take(1) == ([0], [])
    with pytest.raises(AssertionError, match="slot 0 is OWN"):
        slots.unquarantine([0])
    for wrong in (slots.know, slots.give_back, slots.quarantine, slots.unquarantine):
        with pytest.raises(AssertionError, match="slot 1 is FREE"):
            wrong([1])
    slots.give_back([0])
    with pytest.raises(AssertionError, match="slot 0 is FREE"):
        slots.give_back([0])  # twice
    assert slots.counts() == {
        SlotState.FREE: 4, SlotState.OWN: 0, SlotState.KNOWN: 0, SlotState.QUARANTINED: 0, SlotState.LEAVING: 0,
    }  # fmt: skip


def test_a_locked_slot_is_nobodys_until_it_is_absolved() -> None:
    _, slots = small(2)
    assert slots.take(2) is not None
    slots.quarantine([0])
    slots.give_back([1])
    assert slots.take(2) is None
    assert slots.take(1) == ([1], [])
    assert slots.state(0) is SlotState.QUARANTINED
    slots.unquarantine([0])
    assert slots.take(1) == ([0], [])


@pytest.mark.parametrize("wrong", [-1, 1 << 31])
def test_a_number_of_slots(wrong: int) -> None:
    with pytest.raises(InvalidConfig, match=f"num_slots must be a number of blocks, not {wrong}"):
        small(wrong)


# --- what `validate` is for ---------------------------------------------------------------------------------------


@dataclass
class Held:
    """A small index with one hold on two blocks, from the inside."""

    index: RadixIndex
    slots: DeviceSlots
    hold: Hold
    run: Any


def free(held: Held) -> Held:
    """The hold is given back: the run is a free leaf."""
    held.index.release(held.hold, now_s=0.0)
    return held


def mark_state(held: Held, slot: int, state: SlotState) -> None:
    held.slots._states[slot] = state


def validate(held: Held) -> None:
    held.index.validate()
    held.slots.validate()


CONTRADICTIONS: dict[str, list[Callable[[Held], object]]] = {
    "keys, slots and marks differ": [lambda held: held.run.slots.append(9), lambda held: held.run.marks.pop()],
    "two blocks in one slot": [lambda held: operator.setitem(held.run.slots, 1, 0)],
    "given back more often than taken": [lambda held: held.index._guard(held.run, pins=-1)],
    "guards do not add up": [lambda held: setattr(held.run, "guards", 2)],
    "a run at the wrong depth": [lambda held: setattr(held.run, "start", 1)],
    "an empty dict of children": [lambda held: setattr(held.run, "children", {})],
    "a run under another's key": [lambda held: setattr(held.run.parent, "children", {b"x": held.run})],
    "a run whose parent is another": [lambda held: setattr(held.run, "parent", held.run)],
    "blocks do not add up": [
        lambda held: setattr(held.index, "_num_blocks", 3),
        lambda held: setattr(held.index, "_num_guarded", 0),
    ],
    "leaves do not add up": [lambda held: setattr(held.index._leaves, "_num_runs", 1)],
    "a priority that is not the policy's": [lambda held: setattr(free(held).run, "past", Past(0, 9.0, 0))],
    "a free leaf that is not in the order": [
        lambda held: setattr(free(held).run, "ticket", 0),
        lambda held: operator.setitem(free(held).index._leaves._heap, 0, (0.0, 99, held.run)),
    ],
    "a run that is filled by nobody": [lambda held: setattr(held.run, "maker", Hold(None, 0))],
    "blocks that were not appraised": [lambda held: setattr(held.index._worth, "num_blocks", 1)],
    "too many ghosts": [lambda held: setattr(held.index.ghosts, "limit", -1)],
    "a known block in a slot that is not": [lambda held: mark_state(held, 0, SlotState.OWN)],
    "a slot that nobody knows": [lambda held: mark_state(held, 2, SlotState.KNOWN)],
    "the free list is wrong": [
        lambda held: held.slots._free.pop(),
        lambda held: operator.setitem(held.slots._free, 0, held.slots._free[1]),
        lambda held: mark_state(held, 2, SlotState.OWN),
    ],
    "a free slot that is not": [lambda held: operator.setitem(held.slots._free, 0, 0)],
}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [(change, complaint) for complaint, changes in CONTRADICTIONS.items() for change in changes],
)
def test_validate_sees_what_contradicts_itself(change: Callable[[Held], object], complaint: str) -> None:
    index, slots = small()
    assert slots.take(2) is not None
    hold = index.hold([], now_s=0.0)
    index.extend(hold, path("ab"), [0, 1], now_s=0.0)
    slots.know([0, 1])
    held = Held(index, slots, hold, hold.at)
    validate(held)
    change(held)
    with pytest.raises(AssertionError, match=complaint):
        validate(held)
