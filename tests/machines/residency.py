"""What every residency index keeps to, as tests: derive from `ResidencyTests` and give it an `index`."""

import hashlib
from typing import Final

import pytest

from headwater.core.errors import InvalidInput
from headwater.core.keys import BlockKey
from headwater.residency.base import Found, Residency
from headwater.residency.events import Applied, Change, State, Update, UpdateKind
from machines.residency_machine import soon

ROOT: Final = BlockKey(hashlib.sha256(b"root").digest())


def chain(name: str, num_blocks: int) -> list[BlockKey]:
    """Keys that stand for a path."""
    return [BlockKey(hashlib.sha256(f"{name} {i}".encode()).digest()) for i in range(num_blocks)]


def said(
    kind: UpdateKind,
    sequence: int,
    keys: list[BlockKey],
    state: State = State.DEVICE,
    *,
    node: str = "a",
    epoch: int = 1,
    round_: int = 1,
    lease_s: float = 60.0,
) -> Update:
    """An update that says of blocks where they are."""
    changes = (Change(parent=ROOT, depth=0, keys=tuple(keys), state=state),) if keys else ()
    return Update(node=node, epoch=epoch, sequence=sequence, round=round_, kind=kind, lease_s=lease_s, changes=changes)


def held(index: Residency, keys: list[BlockKey]) -> dict[str, tuple[int, ...]]:
    """The longest prefix by node: in any tier, and on device, host, disk, and in the pool."""
    found = index.lookup(keys, deadline=soon())
    assert found.answered
    return {one.node: (one.num_blocks, one.device, one.host, one.disk, one.pool) for one in found.holders}


class ResidencyTests:
    """The contract of `residency/base.py`."""

    @pytest.fixture
    def index(self) -> Residency:
        """An empty index, on the system's clock. The deriving class brings it."""
        raise NotImplementedError

    def test_an_empty_index_knows_nobody(self, index: Residency) -> None:
        assert index.lookup([], deadline=soon()) == Found(0)
        assert index.lookup(chain("a", 3), deadline=soon()) == Found(3)
        assert index.nodes(deadline=soon()) == ()
        assert index.last_epoch("a", deadline=soon()) is None

    def test_nodes_that_share_a_prefix(self, index: Residency) -> None:
        keys = chain("a", 100)
        assert index.apply(said(UpdateKind.BEGIN, 1, keys), deadline=soon()) is Applied.APPLIED
        index.apply(said(UpdateKind.BEGIN, 1, keys[:40], State.HOST | State.POOL, node="b"), deadline=soon())
        index.apply(said(UpdateKind.CHANGE, 2, keys[40:60], State.POOL, node="b"), deadline=soon())
        index.apply(said(UpdateKind.CHANGE, 2, keys[50:], State.POOL), deadline=soon())
        found = index.lookup([*keys, *chain("other", 3)], deadline=soon())
        assert [one.node for one in found.holders] == ["a", "b"]
        assert held(index, keys) == {"a": (100, 50, 0, 0, 0), "b": (60, 0, 40, 0, 60)}
        assert (found.num_blocks, found.pool) == (103, 100)  # one node or the other saw each in the pool
        assert index.lookup(keys[70:], deadline=soon()).pool == 30
        index.apply(said(UpdateKind.LEAVE, 3, []), deadline=soon())
        assert held(index, keys) == {"b": (60, 0, 40, 0, 60)}
        assert [node.name for node in index.nodes(deadline=soon()) or ()] == ["b"]

    def test_a_prefix_ends_at_its_first_hole(self, index: Residency) -> None:
        keys = chain("a", 200)
        index.apply(said(UpdateKind.BEGIN, 1, keys), deadline=soon())
        index.apply(said(UpdateKind.BEGIN, 1, keys, State.DISK, node="b"), deadline=soon())
        index.apply(said(UpdateKind.CHANGE, 2, keys[90:91], State.NONE), deadline=soon())
        assert held(index, keys) == {"a": (90, 90, 0, 0, 0), "b": (200, 0, 0, 200, 0)}
        index.apply(said(UpdateKind.CHANGE, 2, keys[70:71], State.NONE, node="b"), deadline=soon())
        assert held(index, keys) == {"a": (90, 90, 0, 0, 0), "b": (70, 0, 0, 70, 0)}
        index.apply(said(UpdateKind.CHANGE, 3, keys[70:71], State.NONE), deadline=soon())
        assert held(index, keys) == {"a": (70, 70, 0, 0, 0), "b": (70, 0, 0, 70, 0)}
        assert held(index, keys[70:]) == {}

    def test_updates_count_in_order_and_once(self, index: Residency) -> None:
        keys = chain("a", 2)
        index.apply(said(UpdateKind.BEGIN, 1, keys), deadline=soon())
        gone = said(UpdateKind.CHANGE, 2, keys, State.NONE)
        assert index.apply(gone, deadline=soon()) is Applied.APPLIED
        assert index.apply(said(UpdateKind.CHANGE, 3, keys[:1]), deadline=soon()) is Applied.APPLIED
        for late in (gone, said(UpdateKind.BEGIN, 1, keys), said(UpdateKind.CHANGE, 3, keys)):
            assert index.apply(late, deadline=soon()) is Applied.STALE
        assert held(index, keys) == {"a": (1, 1, 0, 0, 0)}

    def test_a_node_that_nobody_knows_has_to_begin(self, index: Residency) -> None:
        keys = chain("a", 2)
        for _ in range(2):  # the second time it is not stale: it did not count
            assert index.apply(said(UpdateKind.CHANGE, 5, keys), deadline=soon()) is Applied.UNKNOWN
        assert index.apply(said(UpdateKind.END, 6, keys), deadline=soon()) is Applied.UNKNOWN
        assert held(index, keys) == {}
        assert index.apply(said(UpdateKind.BEGIN, 7, keys), deadline=soon()) is Applied.APPLIED
        assert index.apply(said(UpdateKind.END, 8, []), deadline=soon()) is Applied.APPLIED
        assert held(index, keys) == {"a": (2, 2, 0, 0, 0)}

    def test_a_newer_epoch_ends_the_older(self, index: Residency) -> None:
        keys = chain("a", 2)
        index.apply(said(UpdateKind.BEGIN, 9, keys, epoch=4), deadline=soon())
        assert index.apply(said(UpdateKind.CHANGE, 2, keys[:1], epoch=5), deadline=soon()) is Applied.UNKNOWN
        assert held(index, keys) == {}  # the process that said it is dead
        assert index.last_epoch("a", deadline=soon()) == 5
        for kind in UpdateKind:
            assert index.apply(said(kind, 10, keys, epoch=4), deadline=soon()) is Applied.FENCED
        assert index.apply(said(UpdateKind.BEGIN, 3, keys[:1], epoch=5), deadline=soon()) is Applied.APPLIED
        assert held(index, keys) == {"a": (1, 1, 0, 0, 0)}

    def test_a_silent_node_is_not_there_and_has_to_say_everything_again(self, index: Residency) -> None:
        keys = chain("a", 2)
        index.apply(said(UpdateKind.BEGIN, 1, keys, lease_s=0.05), deadline=soon())
        while held(index, keys):
            pass
        assert index.nodes(deadline=soon()) == ()
        assert index.last_epoch("a", deadline=soon()) == 1
        assert index.apply(said(UpdateKind.CHANGE, 2, keys[:1]), deadline=soon()) is Applied.UNKNOWN
        assert held(index, keys) == {}
        assert index.apply(said(UpdateKind.BEGIN, 3, keys[:1], round_=2), deadline=soon()) is Applied.APPLIED
        assert held(index, keys) == {"a": (1, 1, 0, 0, 0)}

    def test_a_node_that_lost_something_is_doubtful_until_its_round_ends(self, index: Residency) -> None:
        keys = chain("a", 4)
        index.apply(said(UpdateKind.BEGIN, 1, keys), deadline=soon())
        assert index.apply(said(UpdateKind.CHANGE, 3, keys[3:], State.NONE), deadline=soon()) is Applied.RESYNC
        assert index.lookup(keys, deadline=soon()).of("a").doubtful
        for _ in range(2):  # who did not hear the answer, and says it again, hears the same
            assert index.apply(said(UpdateKind.END, 4, []), deadline=soon()) is Applied.RESYNC  # a round with a hole
        assert index.apply(said(UpdateKind.CHANGE, 5, []), deadline=soon()) is Applied.RESYNC
        assert held(index, keys) == {"a": (3, 3, 0, 0, 0)}
        assert index.apply(said(UpdateKind.BEGIN, 6, keys[:1], round_=2), deadline=soon()) is Applied.APPLIED
        assert held(index, keys) == {"a": (3, 3, 0, 0, 0)}  # until the round is whole, both count
        assert index.apply(said(UpdateKind.END, 7, keys[1:2], round_=2), deadline=soon()) is Applied.APPLIED
        assert not index.lookup(keys, deadline=soon()).of("a").doubtful
        assert held(index, keys) == {"a": (2, 2, 0, 0, 0)}

    def test_what_no_node_says_is_refused(self, index: Residency) -> None:
        with pytest.raises(InvalidInput, match="whose keys have 32 bytes"):
            index.apply(said(UpdateKind.BEGIN, 1, [BlockKey(b"short")]), deadline=soon())
        with pytest.raises(InvalidInput, match="a node's name"):
            index.apply(said(UpdateKind.BEGIN, 1, [], node="two\nlines"), deadline=soon())
        assert index.nodes(deadline=soon()) == ()
