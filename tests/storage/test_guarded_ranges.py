"""Guards of mappings that threads open and close at one address: one that ends never takes another one's away."""

import itertools
import mmap
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from headwater.storage.local.sigbus import GuardedRange, _ranges


def end_with(old: GuardedRange, step: int, other: Callable[[], None]) -> bool:
    """End a range, and before its instruction number `step` do what another thread might. False: it has fewer."""
    code = GuardedRange.forget.__code__
    steps = itertools.count()
    done = False

    def trace(frame: FrameType, what: str, _: object) -> Any:
        nonlocal done
        if frame.f_code is not code:
            return None
        frame.f_trace_opcodes = True
        if what == "opcode" and next(steps) == step:
            other()
            done = True
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        old.forget()
    finally:
        sys.settrace(before)
    return done


@pytest.mark.fault("X20")
@pytest.mark.parametrize("it_ends_too", [False, True])
def test_a_guard_may_begin_at_any_step_of_the_end_of_another(*, it_ends_too: bool) -> None:
    for step in itertools.count():
        with mmap.mmap(-1, mmap.PAGESIZE) as mapping:
            old = GuardedRange(mapping)
            new: list[GuardedRange] = []

            def begin(mapping: mmap.mmap = mapping, new: list[GuardedRange] = new) -> None:
                new.append(GuardedRange(mapping))
                if it_ends_too:
                    new[0].forget()

            if not end_with(old, step, begin):
                break
            assert old not in _ranges
            assert (new[0] in _ranges) is not it_ends_too
            new[0].forget()
    assert step > 2  # there were some
