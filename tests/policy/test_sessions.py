"""Sessions: the gaps that are learned, the policy that goes by them, and what an index makes of both."""

import hashlib
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.core.keys import BlockKey
from headwater.index.base import Hint
from headwater.index.radix import RadixIndex
from headwater.policy import BlockFacts, BySession, Outlook, Sessions, Value, Wishes

SECONDS = st.floats(0, 2.0**32)
OUTLOOKS = st.builds(
    Outlook,
    chance=st.floats(0, 1),
    gap_s=SECONDS,
    new_chance=st.floats(0, 1),
    new_gap_s=SECONDS,
    horizon_s=SECONDS,
    cost_per_byte_s=st.floats(0, 1),
)
FACTS = st.builds(
    BlockFacts,
    used_s=SECONDS,
    hits=st.integers(0, 1 << 20),
    depth=st.integers(0, 1 << 20),
    num_bytes=st.integers(0, 1 << 40),
    outlook=st.none() | OUTLOOKS,
    gap_s=SECONDS,
    spread=st.floats(0, 100),
    wished_s=st.none() | SECONDS,
    left_chance=st.none() | st.floats(0, 1),
)
NAMES = st.sampled_from([b"a", b"b", b"c", b"d", b"e"])


# --- gaps -------------------------------------------------------------------------------------------------------------


@given(turns=st.lists(st.tuples(NAMES, st.floats(0, 1e6)), max_size=60), limit=st.integers(1, 4))
def test_a_gap_lies_between_those_that_were_seen_and_few_sessions_are_remembered(
    turns: list[tuple[bytes, float]], limit: int
) -> None:
    sessions, now_s, seen = Sessions(limit), 0.0, []
    for name, later_s in turns:
        now_s += later_s
        before = sessions.get(name)
        if before is not None and now_s - before.last_s >= 0.25:
            seen.append(now_s - before.last_s)
        sessions.turn(name, now_s)
        sessions.ended(name, now_s, tail=None)
        assert len(sessions) <= limit
        gap_s = sessions.gap_s(name)
        assert (gap_s is None) == (not seen)
        assert gap_s is None or min(seen) * 0.999 <= gap_s <= max(seen) * 1.001
        assert math.isfinite(sessions.spread)
    assert sessions.gap_s(b"nobody") is None


def test_each_session_has_its_own_gap_and_a_new_one_the_usual() -> None:
    sessions = Sessions(10)
    for i in range(200):
        sessions.turn(b"quick", 10.0 * i)
        sessions.ended(b"quick", 10.0 * i, tail=None)
        if i % 10 == 0:
            sessions.turn(b"slow", 10.0 * i - 5)
            sessions.ended(b"slow", 10.0 * i, tail=None)  # a gap begins where the answer ends
    sessions.turn(b"new", 2000.0)
    quick, slow, new = (sessions.gap_s(name) or 0.0 for name in (b"quick", b"slow", b"new"))
    assert quick == pytest.approx(10, rel=0.05)
    assert slow == pytest.approx(95, rel=0.2)
    assert 10 < new < 100
    assert sessions.spread < 0.5  # they come as expected


def test_what_comes_side_by_side_is_no_gap() -> None:
    sessions = Sessions(10)
    for i in range(50):
        for after_s in (0, 3, 6):
            sessions.turn(b"a", 20.0 * i + after_s)
        for after_s in (4, 7, 10):
            sessions.ended(b"a", 20.0 * i + after_s, tail=None)
        sessions.turn(b"a", 20.0 * i + 10)  # the same once more, having been preempted
        sessions.ended(b"a", 20.0 * i + 10, tail=None)
    assert sessions.gap_s(b"a") == pytest.approx(10)


# --- the policy -------------------------------------------------------------------------------------------------------


@given(facts=FACTS)
def test_without_sessions_it_is_value(facts: BlockFacts) -> None:
    facts = replace(facts, gap_s=None, spread=0.0, wished_s=None, left_chance=None)
    assert BySession().priority(facts) == Value().priority(facts)
    assert BySession().due_s(facts) is None


@given(facts=FACTS, longer_s=SECONDS, wider=st.floats(0, 10))
def test_a_block_is_due_after_its_gap_and_the_sooner_the_less_gaps_are_believed(
    facts: BlockFacts, longer_s: float, wider: float
) -> None:
    due_s = BySession().due_s(facts)
    if due_s is None:
        assert facts.wished_s is not None or (facts.left_chance or 0.0) < 0.5
        return
    assert facts.gap_s is not None
    assert facts.used_s <= due_s <= facts.used_s + 1.5 * facts.gap_s
    later_s = BySession().due_s(replace(facts, gap_s=facts.gap_s + longer_s))
    sooner_s = BySession().due_s(replace(facts, spread=facts.spread + wider))
    assert later_s is not None
    assert sooner_s is not None
    assert sooner_s <= due_s <= later_s


@given(facts=FACTS, other=FACTS)
def test_what_was_left_behind_goes_before_all_others(facts: BlockFacts, other: BlockFacts) -> None:
    left = replace(facts, left_chance=0.0)
    assert BySession().due_s(left) is None
    kept = replace(other, left_chance=None, used_s=left.used_s)
    assert BySession().priority(left) < BySession().priority(kept)
    assert BySession().priority(replace(facts, left_chance=1.0)) == BySession().priority(
        replace(facts, left_chance=None)
    )


@given(due_s=SECONDS, priority=SECONDS, now_s=SECONDS, later_s=SECONDS, usual_s=st.floats(0.25, 1e6))
def test_the_longer_wait_leaves(due_s: float, priority: float, now_s: float, later_s: float, usual_s: float) -> None:
    policy = BySession()
    if policy.leaves_before(due_s, priority, now_s, usual_s=usual_s):
        assert due_s > now_s
        assert policy.leaves_before(due_s + later_s, priority, now_s, usual_s=usual_s)
        assert policy.leaves_before(due_s, priority + later_s, now_s, usual_s=usual_s)
    assert not policy.leaves_before(now_s, priority, now_s, usual_s=usual_s)  # who is due is waited for


# --- an index that knows sessions -------------------------------------------------------------------------------------


class Device:
    """A radix index, and requests of one after the other. A block is a letter behind those before it."""

    def __init__(self, policy: BySession | Value) -> None:
        self.index = RadixIndex(policy, block_bytes=1, num_ghosts=64, num_wished=8)
        self.slot = 0

    def request(self, word: str, now_s: float, session: bytes = b"", **more: Any) -> None:
        keys, hint = self.keys(word), Hint(session, **more)
        hold = self.index.hold(keys, now_s=now_s, hint=hint)
        rest = keys[hold.num_blocks :]
        self.index.extend(hold, rest, range(self.slot, self.slot + len(rest)), now_s=now_s)
        self.slot += len(rest)
        self.index.release(hold, now_s=now_s)
        self.index.validate()

    def keys(self, word: str) -> list[BlockKey]:
        return [BlockKey(hashlib.sha256(word[: i + 1].encode()).digest()) for i in range(len(word))]

    def num_left(self, word: str) -> int:
        return self.index.find(self.keys(word))

    def evict(self, num: int) -> None:
        for _ in range(num):
            assert self.index.evict() is not None
            self.index.validate()


def agents(policy: BySession | Value) -> Device:
    """Two that come every ten seconds, one every hundred; the slow one came last, at 1,000 s."""
    device = Device(policy)
    for i in range(101):
        device.request("abc", 10.0 * i, b"a" * 16)
        device.request("def", 10.0 * i + 5, b"d" * 16)
        if i % 10 == 0:
            device.request("ghi", 10.0 * i, b"g" * 16)
    return device


def test_who_comes_back_late_leaves_first_though_it_came_last() -> None:
    device = agents(BySession())
    device.evict(3)
    assert [device.num_left(word) for word in ("abc", "def", "ghi")] == [3, 3, 0]


def test_who_was_to_come_and_did_not_leaves_first() -> None:
    device = agents(BySession())
    for i in range(101, 140):
        device.request("def", 10.0 * i + 5, b"d" * 16)
    device.evict(3)
    assert [device.num_left(word) for word in ("abc", "def")] == [0, 3]


def test_what_two_sessions_use_is_neithers() -> None:
    device = agents(BySession())
    device.request("ghi", 1005.0, b"a" * 16)
    device.evict(3)
    assert device.num_left("ghi") == 3  # it is not waited for by the gap of either


def summed_up(policy: BySession | Value, *, back: bool) -> Device:
    """A session that goes on from its first block ever again; `back`: and takes up what it left behind."""
    device = Device(policy)
    tails = ["".join(chr(1000 + 10 * i + j) for j in range(9)) for i in range(30)]
    for i, tail in enumerate(tails):
        device.request("s" + tail, 20.0 * i, b"s" * 16)
        if back and i:
            device.request("s" + tails[i - 1] + "x", 20.0 * i + 5, b"s" * 16)
            device.request("s" + tail + "x", 20.0 * i + 10, b"s" * 16)
    device.request("s" + tails[-1] + "y", 600.0, b"s" * 16)
    return device


@pytest.mark.parametrize("back", [False, True])
def test_what_a_session_left_behind_goes_first_unless_such_things_come_back(*, back: bool) -> None:
    device = summed_up(BySession(), back=back)
    old = "s" + "".join(chr(1000 + 10 * 28 + j) for j in range(9))
    assert device.num_left(old) == 10
    device.evict(81)
    assert device.num_left(old) == (10 if back else 1)  # the latest of them, and the oldest by far are still there
    assert (device.num_left("s" + chr(1000)) == 2) == (not back)


def test_a_session_that_is_over_leaves_first_at_its_word() -> None:
    device = Device(BySession())
    for i in range(60):
        device.request(chr(1000 + i) + "abc", float(i), i.to_bytes(16, "big"), last=True)
    device.request("mine", 0.0, b"m" * 16)
    device.request("over", 99.0, b"n" * 16, last=True)
    num_over = len(device.index) - 4
    device.evict(num_over - 3)
    assert device.num_left("mine") == 4  # older than they all
    device.evict(7)
    assert len(device.index) == 0


def test_what_is_wished_for_stays_until_then_and_within_the_budget() -> None:
    device = Device(BySession())
    device.request("abcd", 0.0, b"a" * 16, keep_s=100.0)
    device.request("efgh", 1.0, b"e" * 16, keep_s=50.0)
    device.request("ijkl", 2.0, b"i" * 16, keep_s=500.0)  # there is room for eight blocks
    device.request("mnop", 3.0)
    device.evict(8)
    assert [device.num_left(word) for word in ("abcd", "efgh", "ijkl", "mnop")] == [4, 4, 0, 0]
    device.request("qrst", 60.0, b"q" * 16, keep_s=500.0)  # in the place of what was wished for until 51 s
    device.request("uvwx", 61.0)
    device.evict(8)
    assert [device.num_left(word) for word in ("abcd", "efgh", "qrst", "uvwx")] == [4, 0, 4, 0]
    device.request("abcd", 62.0, b"a" * 16)  # a turn without a wish takes it back
    device.evict(4)
    assert [device.num_left(word) for word in ("abcd", "qrst")] == [0, 4]


def test_one_session_gets_no_more_by_wishing_again_and_again() -> None:
    device = Device(BySession())
    for i in range(20):
        device.request(chr(1000 + i) + "abc", 10.0 * i, b"a" * 16, keep_s=1000.0)
        device.request(chr(2000 + i) + "abc", 10.0 * i + 5)  # of nobody
    device.evict(20 * 4)
    kept = [i for i in range(20) if device.num_left(chr(1000 + i) + "abc")]
    assert kept[-1] == 19
    assert len(kept) == 10  # the wish is for the last path alone: the rest goes as it would


@given(
    wishes=st.lists(st.tuples(NAMES, st.floats(0, 50), st.integers(0, 6), st.floats(0, 30)), max_size=40),
    most=st.integers(0, 12),
)
def test_wishes_are_never_for_more_than_they_may_be(wishes: list[tuple[bytes, float, int, float]], most: int) -> None:
    kept, now_s, granted = Wishes(most), 0.0, dict[bytes, tuple[float, int]]()
    for name, keep_s, num_blocks, later_s in wishes:
        now_s += later_s
        until_s = now_s + keep_s
        before = kept.take_back(name)
        assert name not in granted or (before is not None and before[:2] == granted[name])
        granted = {one: wish for one, wish in granted.items() if wish[0] > now_s and one != name}
        fits = num_blocks > 0 and until_s > now_s and sum(num for _, num in granted.values()) + num_blocks <= most
        assert kept.grant(name, until_s, num_blocks, None, now_s=now_s) == fits
        if fits:
            granted[name] = (until_s, num_blocks)


def test_a_session_is_forgotten_with_all_that_was_kept_of_it() -> None:
    device = Device(BySession())
    for i in range(200):
        device.request("abc", float(i), i.to_bytes(16, "big"))
    sessions = device.index._worth.sessions
    assert sessions is not None
    assert len(sessions) == 64
