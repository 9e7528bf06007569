"""Policies and the order of leaves: against a naive model, after every step."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from headwater.core.errors import InvalidConfig
from headwater.policy import BlockFacts, LeafOrder, Lru, policy_by_name

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
    with pytest.raises(InvalidConfig, match="no eviction policy 'best'; there are: lru"):
        policy_by_name("best")
