"""Policies and the order of leaves: against a naive model, after every step; and what policies are good for."""

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from headwater.build import open_local
from headwater.core.errors import InvalidConfig
from headwater.core.results import Status
from headwater.policy import (
    NUM_KINDS,
    BlockFacts,
    History,
    LeafOrder,
    Lru,
    LruK,
    Outlook,
    Policy,
    Returns,
    Value,
    kind_of,
    policy_by_name,
)
from headwater.storage.memory import MemoryStore
from headwater.testing.clock import FakeClock
from headwater.testing.pages import items, sample_chain
from headwater.testing.stores import soon
from kit import config, hits

KEYS = st.integers(0, 11)
PRIORITIES = st.integers(0, 5).map(float)
GROUPS = st.integers(0, 1)


class LeafOrderMachine(RuleBasedStateMachine):
    """The naive model: dicts, and a sort for every question."""

    def __init__(self) -> None:
        super().__init__()
        self.order: LeafOrder[int] = LeafOrder()
        self.model: dict[int, tuple[int, float, int]] = {}  # key: parent, priority, group

    def leaves(self, group: int) -> list[tuple[float, int]]:
        parents = {parent for parent, _, _ in self.model.values()}
        return sorted((p, key) for key, (_, p, g) in self.model.items() if g == group and key not in parents)

    @rule(key=KEYS, parent=st.integers(0, 30), priority=PRIORITIES, group=GROUPS)
    def add(self, key: int, parent: int, priority: float, group: int) -> None:
        if parent <= key:  # a forest: parents have higher numbers, or are never known
            parent = 100 + parent
        self.order.add(key, parent, priority, group=group)
        self.model[key] = (parent, priority, group)

    @rule(key=KEYS)
    def remove(self, key: int) -> None:
        self.order.remove(key)
        self.model.pop(key, None)

    @rule(key=KEYS, priority=PRIORITIES)
    def touch(self, key: int, priority: float) -> None:
        self.order.touch(key, priority)
        if key in self.model:
            parent, _, group = self.model[key]
            self.model[key] = (parent, priority, group)

    @rule(group=GROUPS, spare=st.sets(KEYS, max_size=4))
    def pop(self, group: int, spare: set[int]) -> None:
        allowed = [(p, key) for p, key in self.leaves(group) if key not in spare]
        popped = self.order.pop(group, spare)
        if not allowed:
            assert popped is None
            return
        assert popped is not None
        key, parent, priority = popped
        assert (priority, key) in allowed
        assert priority == allowed[0][0]
        assert self.model.pop(key)[0] == parent

    @invariant()
    def agree(self) -> None:
        self.order.validate()
        assert len(self.order) == len(self.model)
        for group in (0, 1):
            leaves = self.leaves(group)
            assert self.order.lowest(group) == (leaves[0][0] if leaves else None)
        for key in range(12):
            assert (key in self.order) == (key in self.model)
            assert set(self.order.subtree(key)) == self.subtree(key)

    def subtree(self, key: int) -> set[int]:
        if key not in self.model:
            return set()
        found = {key}
        while more := {k for k, (parent, _, _) in self.model.items() if parent in found} - found:
            found |= more
        return found


def test_leaf_order_against_a_naive_model() -> None:
    run_state_machine_as_test(LeafOrderMachine, settings=settings(max_examples=200, stateful_step_count=40))


@given(parents=st.lists(st.integers(0, 9), min_size=10, max_size=10), asked=st.lists(st.integers(0, 12), max_size=5))
def test_a_forest_that_is_none_is_given_all_the_same_each_once(parents: list[int], asked: list[int]) -> None:
    order = LeafOrder.of((key, parent, 0.0, 0) for key, parent in enumerate(parents))  # rings, and blocks on themselves
    wanted = {below for key in asked for below in order.subtree(key)}
    given_up = []
    for key in order.leaves_first(asked):
        given_up.append(key)
        order.remove(key)
        order.validate()
    assert sorted(given_up) == sorted(wanted)


def test_stale_entries_do_not_pile_up() -> None:
    order: LeafOrder[int] = LeafOrder()
    order.add(1, 0, 0.0)
    for i in range(10_000):
        order.touch(1, float(i))
    assert sum(map(len, order._heaps.values())) < 100


def test_lru_is_the_time_of_the_last_use() -> None:
    facts = BlockFacts(used_s=12.5, hits=3, depth=4, num_bytes=5)
    assert Lru().priority(facts) == 12.5
    assert isinstance(policy_by_name("lru"), Lru)
    with pytest.raises(InvalidConfig, match="no eviction policy 'best'; there are: lru, lru-2, session, value"):
        policy_by_name("best")


ANY = st.floats(allow_nan=False, allow_infinity=False)
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
    hits=st.integers(0, 1 << 40),
    depth=st.integers(0, 1 << 20),
    num_bytes=st.integers(0, 1 << 40),
    previous_s=st.none() | SECONDS,
    turns=st.integers(0, 1 << 40),
    cost_s=st.floats(0, 1e6),
    outlook=st.none() | OUTLOOKS,
)
WILD = st.builds(
    BlockFacts,
    used_s=ANY,
    hits=st.integers(),
    depth=st.integers(),
    num_bytes=st.integers(),
    previous_s=st.none() | ANY,
    turns=st.integers(),
    cost_s=ANY,
    outlook=st.builds(
        Outlook, chance=ANY, gap_s=ANY, new_chance=ANY, new_gap_s=ANY, horizon_s=ANY, cost_per_byte_s=ANY
    ),
)
POLICIES = st.sampled_from(["lru", "lru-2", "value", "session"]).map(policy_by_name)


@given(policy=POLICIES, facts=FACTS | WILD)
def test_every_number_is_finite_whatever_the_facts(policy: Policy, facts: BlockFacts) -> None:
    assert math.isfinite(policy.priority(facts))


@given(policy=POLICIES, facts=FACTS, later_s=SECONDS)
def test_a_hit_never_lowers_the_number(policy: Policy, facts: BlockFacts, later_s: float) -> None:
    """With the same outlook: if the holder has measured that hits bode ill, they may."""
    previous_s = None if facts.previous_s is None else min(facts.previous_s, facts.used_s)
    facts = replace(facts, previous_s=previous_s, hits=facts.hits if previous_s is None else max(1, facts.hits))
    if facts.hits > 0 and previous_s is None:
        facts = replace(facts, hits=0)
    hit = replace(facts, used_s=facts.used_s + later_s, previous_s=facts.used_s, hits=facts.hits + 1)
    assert policy.priority(hit) >= policy.priority(facts)


@given(policy=POLICIES, facts=FACTS, more=st.integers(1, 1 << 40))
def test_bytes_never_raise_the_number_and_cost_never_lowers_it(policy: Policy, facts: BlockFacts, more: int) -> None:
    number = policy.priority(facts)
    assert policy.priority(replace(facts, num_bytes=facts.num_bytes + more)) <= number
    if facts.cost_s > 0:  # 0 says that it is not known, which counts as the usual
        deeper = replace(facts, depth=facts.depth + 1, cost_s=facts.cost_s + more)  # attends to more, so costs more
        assert policy.priority(deeper) >= number


@given(facts=FACTS, outlook=OUTLOOKS, better=st.floats(0, 1), longer_s=SECONDS)
def test_value_follows_chance_and_gap(facts: BlockFacts, outlook: Outlook, better: float, longer_s: float) -> None:
    number = Value().priority(replace(facts, outlook=outlook))
    surer = replace(outlook, chance=max(outlook.chance, better))
    assert Value().priority(replace(facts, outlook=surer)) >= number
    slower = replace(outlook, gap_s=outlook.gap_s + longer_s)
    assert Value().priority(replace(facts, outlook=slower)) <= number


def test_value_is_lru_where_the_past_tells_nothing() -> None:
    facts = BlockFacts(used_s=12.5, hits=3, depth=4, num_bytes=5)
    assert Value().priority(facts) == 12.5
    same = Outlook(chance=0.25, gap_s=60.0, new_chance=0.25, new_gap_s=60.0, horizon_s=30.0)
    assert Value().priority(replace(facts, outlook=same)) == 12.5


def test_value_is_the_moment_at_which_the_worth_is_used_up() -> None:
    outlook = Outlook(chance=0.6, gap_s=40.0, new_chance=0.2, new_gap_s=60.0, horizon_s=90.0, cost_per_byte_s=2.0)
    facts = BlockFacts(used_s=1000.0, hits=1, depth=0, num_bytes=8, cost_s=24.0, outlook=outlook)
    age = Value().priority(facts) - facts.used_s + outlook.horizon_s
    worth = 0.6 * (24.0 / 8 / 2.0) / (40.0 + age)
    assert worth == pytest.approx(0.2 / (60.0 + 90.0))  # a new block's, at the age at which it leaves


def test_value_binds_no_space_for_ever() -> None:
    """Numbers are not revised when the workload changes."""
    outlook = Outlook(chance=1.0, gap_s=1.0, new_chance=0.001, new_gap_s=60.0, horizon_s=90.0)
    facts = BlockFacts(used_s=1000.0, hits=9, depth=0, num_bytes=8, outlook=outlook)
    assert Value().priority(facts) == 1000.0 + 4 * (60.0 + 90.0)


def test_lru_2_keeps_what_was_used_twice() -> None:
    once = BlockFacts(used_s=100.0, hits=0, depth=0, num_bytes=1)
    twice = BlockFacts(used_s=50.0, hits=1, depth=0, num_bytes=1, previous_s=1.0)
    assert LruK().priority(once) < LruK().priority(twice) == 1.0
    assert LruK().priority(once) < LruK().priority(replace(once, used_s=100.00001))
    assert LruK().priority(replace(once, hits=2)) == 100.0  # a holder that keeps hits alone


def test_kinds_tell_pasts_apart() -> None:
    kinds = [kind_of(0, turns) for turns in (0, 1, 2, 4)] + [kind_of(1 << i, 9) for i in range(9)]
    assert kinds == list(range(NUM_KINDS))
    assert kind_of(0, 1 << 50) == 3
    assert kind_of(1 << 50, 0) == NUM_KINDS - 1


def test_returns_measures_chance_and_gap() -> None:
    returns = Returns()
    new, known = kind_of(0, 0), kind_of(1, 0)
    for i in range(4000):
        returns.used(new, window=1e9)
        if i % 4 == 0:
            returns.returned(new, 100.0)
            returns.used(known, window=1e9)
            if i % 8 == 0:
                returns.returned(known, 10.0, blocks=2)
    returns.evicted(known, 1e6, held=10)  # what is kept for its past says nothing of how long new blocks stay
    returns.evicted(new, 30.0, held=10)
    outlook = returns.outlook(known)
    assert outlook.new_chance == pytest.approx(0.25, abs=0.01)
    assert outlook.chance == pytest.approx(1.0, abs=0.02)
    assert outlook.new_gap_s == pytest.approx(100.0)
    assert outlook.gap_s == pytest.approx(10.0, rel=0.1)
    assert outlook.horizon_s == returns.horizon_s == 30.0


@given(
    st.lists(st.tuples(st.integers(0, NUM_KINDS - 1), st.booleans(), st.floats(-10, 2.0**32)), max_size=300),
    st.integers(1, 50),
)
def test_an_outlook_is_always_in_range(events: list[tuple[int, bool, float]], window: int) -> None:
    returns = Returns()
    for kind, again, gap_s in events:
        if again:
            returns.returned(kind, gap_s)
        returns.used(kind, window=window)
        returns.evicted(kind, gap_s, held=window)
    for kind in range(NUM_KINDS):
        outlook = returns.outlook(kind)
        assert 0 < outlook.chance <= 1
        assert 0 < outlook.new_chance <= 1
        assert 0 < outlook.gap_s < math.inf
        assert 0 < outlook.new_gap_s < math.inf
        assert 0 <= outlook.horizon_s < math.inf


class Holder:
    """A prefix cache of numbered blocks, as small as can be: what every holder does for its policy."""

    def __init__(self, policy: Policy, capacity: int) -> None:
        self.policy = policy
        self.capacity = capacity
        self.order: LeafOrder[int] = LeafOrder()
        self.history: History[int] = History(lambda: self.order)
        self.hits = 0

    def request(self, now_s: float, blocks: list[int]) -> None:
        there = 0
        while there < len(blocks) and blocks[there] in self.order:
            there += 1
        self.hits += there
        for depth, key in enumerate(blocks):
            if depth < there:
                facts = self.history.hit(key, now_s, depth=depth, num_bytes=1)
                self.order.touch(key, self.policy.priority(facts))
                continue
            if len(self.order) == self.capacity:
                victim = self.order.pop(spare=blocks)
                assert victim is not None
                self.history.evicted(victim[0])
            parent = blocks[depth - 1] if depth else -1
            facts = self.history.inserted(key, parent, now_s, depth=depth, num_bytes=1)
            self.order.add(key, parent, self.policy.priority(facts))


def test_history_remembers_what_is_gone_and_no_more_than_it_may() -> None:
    holder = Holder(Value(), capacity=4)
    holder.request(0.0, [1, 2])
    holder.request(1.0, [3, 4, 5])  # evicts 2
    assert 2 not in holder.order
    holder.request(2.0, [1, 2, 6])
    facts = holder.history.hit(2, 3.0, depth=1, num_bytes=1, times=0)
    assert (facts.hits, facts.used_s, facts.previous_s, facts.turns) == (1, 3.0, 0.0, 0)
    grown = holder.history.hit(6, 4.0, depth=2, num_bytes=1)
    assert (grown.hits, grown.turns, grown.previous_s) == (1, 1, 2.0)
    for i in range(1000):
        holder.request(5.0 + i, [1000 + 2 * i, 1001 + 2 * i])
        assert len(holder.history) <= 5 * 5
        assert all(key in holder.history._pasts for key in range(3000) if key in holder.order)


def test_history_starts_from_what_the_holder_knows() -> None:
    history: History[int] = History(lambda: set(range(10)))
    facts = history.hit(1, 50.0, depth=3, num_bytes=1, times=2, hits_before=5, used_before_s=20.0)
    assert (facts.hits, facts.used_s, facts.previous_s) == (7, 50.0, 20.0)


def chats_and_scans(seed: int) -> list[tuple[float, list[int]]]:
    """Conversations, some of which come back again and again, among documents that are read once."""
    rng = random.Random(seed)
    numbers = iter(range(10**9))
    requests: list[tuple[float, list[int]]] = []
    for start in range(600):
        requests.append((start + rng.random(), [next(numbers) for _ in range(10)]))
        if start % 3 == 0:
            now_s, path = float(start), [next(numbers) for _ in range(4)]
            while now_s < 600:
                requests.append((now_s, list(path)))
                if rng.random() < (0.5 if len(path) == 4 else 0.1):
                    break
                now_s += rng.expovariate(1 / 40)
                path.append(next(numbers))
    return sorted(requests)


def test_value_and_lru_2_outdo_lru_where_some_come_back_and_scans_do_not() -> None:
    scores = {}
    for policy in (Lru(), LruK(), Value()):
        holder = Holder(policy, capacity=250)
        for now_s, blocks in chats_and_scans(7):
            holder.request(now_s, blocks)
            assert len(holder.order) <= 250
        holder.order.validate()
        scores[policy.name] = holder.hits
    assert scores["value"] > 1.25 * scores["lru"]
    assert scores["lru-2"] > 1.25 * scores["lru"]


def test_the_scale_of_time_does_not_matter() -> None:
    def score(scale: float) -> int:
        holder = Holder(Value(), capacity=250)
        for now_s, blocks in chats_and_scans(8):
            holder.request(scale * now_s, blocks)
        return holder.hits

    assert score(64.0) == pytest.approx(score(1.0), rel=0.01)


@pytest.mark.parametrize("name", ["lru", "lru-2", "value"])
def test_a_memory_store_evicts_by_each_policy(name: str) -> None:
    clock = FakeClock()
    chains = [sample_chain(i, 3) for i in range(400)]
    store = MemoryStore(12 * len(chains[0][0].item[1]), policy=policy_by_name(name), clock=clock)
    hot, read = chains[0], 0
    for i, chain in enumerate(chains[1:]):
        clock.advance(1.0)
        assert set(store.put(items(chain), deadline=soon())) == {Status.STORED}
        if i % 5 == 0:  # too late for LRU, which keeps four chains
            found = store.get_into([(page.name, page.buffer()) for page in hot], deadline=soon())
            read += found == [Status.HIT] * 3
            store.put(items(hot), deadline=soon())
    assert read == 0 if name == "lru" else read > 60
    store.close()


@pytest.mark.parametrize("name", ["lru", "lru-2", "value"])
def test_a_local_store_evicts_by_each_policy(name: str, place: Path) -> None:
    hot, clock = sample_chain(0, 3), FakeClock()
    with open_local(config(place, policy=name), clock=clock) as store:
        assert set(store.put(items(hot), deadline=soon())) == {Status.STORED}
        assert hits(store, hot) == 3
    with open_local(config(place), clock=clock) as store:  # a memory that begins now, over pages that were there before
        for i in range(1, 2000):
            clock.advance(0.01)  # what is new in a new memory is worth up to a second more than what follows
            assert set(store.put(items(sample_chain(i, 3)), deadline=soon())) == {Status.STORED}
            if i % 100 == 0 and name == "lru-2":  # value goes by the times that the store's own clock shows
                assert hits(store, hot) == 3
        assert hits(store, sample_chain(1, 3)) == 0  # it was full, and old ones went
        assert hits(store, sample_chain(1999, 3)) == 3
