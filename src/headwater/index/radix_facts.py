"""The runs of a radix index as people and snapshots see them, and what must be true of them. Changes nothing."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

from headwater.core.keys import BlockKey
from headwater.core.page import KEY_BYTES
from headwater.index.appraisal import Appraisal
from headwater.index.free_leaves import FreeLeaves
from headwater.index.leaving import LeavingRuns
from headwater.index.runs import Run

_K: Final = KEY_BYTES


def blocks_of(tree: Iterable[Run]) -> Iterator[tuple[BlockKey, BlockKey | None, int]]:
    """Every block as (key, key before it, slot)."""
    for run in tree:
        parent = run.parent
        before = BlockKey(bytes(parent.keys[-_K:])) if parent is not None and parent.keys else None
        for key, slot in run.blocks():
            yield key, before, slot
            before = key


def runs_and_leaves(tree: Iterable[Run], leaves: FreeLeaves) -> list[object]:
    """All that the runs and the order of leaves say, as plain JSON values."""
    return [[run.facts() for run in tree], sorted([priority, run.ticket] for priority, run in leaves)]


def validate_runs(tree: Iterable[Run], leaving: LeavingRuns, leaves: FreeLeaves, worth: Appraisal) -> tuple[int, int]:
    """Raise AssertionError if they contradict each other. Returns how many blocks the tree has, and how many are held.

    `leaving`: runs that were cut out of it.
    """
    leaving.validate()
    num_blocks = num_guarded = num_leaves = 0
    valid = {id(run): priority for priority, run in leaves}
    apart = Counter(id(run.parent) for run in leaving if run.guards)
    for run in (*tree, *leaving):
        children = list((run.children or {}).items())
        assert run.children is None or children, "an empty dict of children"
        assert len(run.keys) == _K * len(run.slots) == _K * len(run.marks), "keys, slots and marks differ"
        assert run.parent is None or run.slots, "an empty run"
        for key, child in children:
            assert child.keys[:_K] == key, "a run under another's key"
            assert child.parent is run, "a run whose parent is another"
            assert child.start == run.end, "a run at the wrong depth"
            assert not child.cut, "a run that was cut out, and is in the tree"
        guards = run.refs + run.pins + sum(child.guards > 0 for _, child in children) + apart[id(run)]
        assert min(run.refs, run.pins) >= 0, "given back more often than taken"
        assert run.guards == guards, "guards do not add up"
        assert run.maker is None or run.maker.at is run, "a run that is filled by nobody"
        if run.cut:
            continue
        free_leaf = run.parent is not None and not guards and not children
        assert free_leaf == (run.ticket != 0) == (id(run) in valid), "a free leaf that is not in the order"
        timeless = free_leaf and worth.timeless
        assert not timeless or valid[id(run)] == leaves.priority(run), "a priority that is not the policy's"
        num_blocks += len(run.slots)
        num_guarded += len(run.slots) if guards else 0
        num_leaves += free_leaf
    leaves.validate(num_leaves)
    assert worth.num_blocks == num_blocks, "blocks that were not appraised"
    return num_blocks, num_guarded
