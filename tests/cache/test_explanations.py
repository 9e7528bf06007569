"""Explanations: what is kept of how many requests, and what is said when it is not known any more."""

import random
import tracemalloc
from array import array
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from explain_kit import BLOCK, IDENTITY, Stage
from headwater.cache.explanations import Compared, Explained, Explanations, Text, TextReason, compare
from headwater.cache.records import Why
from headwater.cache.whys import MOST_ROWS, Explanation, _limited
from headwater.core import events as ev
from headwater.core.results import Reason

ROW = Why(0, 2, "", Reason.NEVER_STORED)


def explanation(name: str, asked_s: float = 0.0, **changes: Any) -> Explanation:
    one = Explanation(
        request=name,
        tenant=bytes(16),
        num_blocks=2,
        asked_s=asked_s,
        ready_s=asked_s + 0.5,
        left_s=asked_s + 1.0,
        num_known=1 << 20,
        resumed=False,
        rows=(ROW,),
    )
    return replace(one, **changes)


def text(*tokens: int) -> Text:
    return Text(array("I", tokens), len(tokens), IDENTITY)


def test_what_is_kept_is_bounded_in_requests_and_in_bytes() -> None:
    known = Explanations(most=100, most_text_bytes=4000)
    for number in range(1000):
        known.add(explanation(str(number)), text(*range(number % 300)) if number % 3 else None)
        kept = known.newest()
        assert [one.explanation.request for one in kept] == [str(i) for i in range(number, max(-1, number - 100), -1)]
        texts = [one.text for one in kept if one.text is not None]
        assert sum(4 * len(one.tokens) for one in texts) == 4000 - known._left_bytes <= 4000
        assert [one for one in known._all if one.text is not None] == list(known._texts)
    known.add(explanation("large"), text(*range(1001)))
    assert not [one for one in known.newest() if one.text is not None], "larger than all that may be kept"
    assert known._left_bytes == 4000


def test_texts_of_a_tenant_are_forgotten_and_no_others() -> None:
    known = Explanations(most=100, most_text_bytes=4000)
    for number in range(60):
        known.add(explanation(str(number), tenant=bytes([number % 2] * 16)), text(*range(10)) if number % 3 else None)
    known.forget_texts(bytes(16))
    assert len(known.newest()) == 60, "what was said of them stays"
    left = [one for one in known.newest() if one.text is not None]
    assert left == list(reversed(known._texts))
    assert {one.explanation.tenant for one in left} == {bytes([1] * 16)}
    assert known._left_bytes == 4000 - 40 * len(left)


def test_ten_thousand_requests_take_some_hundred_bytes_each_and_their_texts() -> None:
    tracemalloc.start()
    try:
        known = Explanations()
        for number in range(10_000):
            rows = tuple(Why(i, i + 1, "disk", Reason.EVICTED, {"found": "miss", "block": i}) for i in range(2))
            tokens = array("I", range(64))
            known.add(explanation(f"req-{number}", rows=rows), Text(tokens, 64, IDENTITY))
        before, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert before < 10_000 * (2000 + 64 * 4), f"{before / 10_000:.0f} bytes each"


def test_a_text_that_is_not_known_any_more() -> None:
    stage = Stage(2)
    first = stage.text(3)
    stage.live(first)
    request = stage.live([*first[:9], first[9] ^ 1, *first[10:]])
    assert stage.explained(request)[1]["why"] == "text_differs"
    known = stage.cache._explanations
    known._forget(known._texts[0])
    hit, row = stage.explained(request)
    assert (hit["from"], row["why"], row["facts"]) == ("device", "never_stored", {})
    known._forget(known._texts[0])
    assert stage.explained(request)[1]["facts"] == {"text": "not known any more"}


def test_a_block_that_was_forgotten_among_the_ghosts() -> None:
    stage = Stage(3)
    tokens = stage.text(2)
    stage.live(tokens)
    with stage.cache.still() as brain:
        assert brain.evicting is not None
        brain.evicting.ghosts.limit = 0
    while stage.on_device().issuperset(stage.keys(tokens)):
        stage.live(stage.text(8))
    row = stage.explained(stage.live(tokens))[-1]
    assert (row["why"], row["counted_as"]) == ("evicted", "never_stored"), "it was here, and nobody knows when it left"


def test_who_left_early_and_who_came_back() -> None:
    stage = Stage(5)
    request = stage.begin(stage.text(2))
    stage.connector.release(request)
    (one,) = stage.explainer.explained(request.name)["requests"]
    assert (one["outcome"], one["rows"], one["hit_blocks"], one["misses"]) == ("left_early", [], 0, {})
    first = stage.begin(stage.text(2))
    stage.end(ev.Probe)
    assert stage.connector.admit(first)
    stage.connector.release(first)  # preempted, with nothing computed
    first.preemptions = 1
    stage.connector.ask(first, stage.clock.monotonic())
    assert stage.connector.admit(first)
    stage.finish(first)
    found = stage.explainer.explained(first.name)["requests"]
    assert [(one["id"], one["outcome"]) for one in found] == [(first.name, "resumed"), (first.name, "served")]
    assert found[0]["rows"][0]["why"] == "too_late", "nobody waited for the store"


def test_rows_that_are_too_many_are_told_in_the_last() -> None:
    rows = [Why(i, i + 1, "", Reason.EVICTED, {"n": i}) for i in range(3 * MOST_ROWS)]
    found = _limited(rows)
    assert len(found) == MOST_ROWS
    assert (found[-1].start, found[-1].end) == (MOST_ROWS - 1, 3 * MOST_ROWS)
    assert found[-1].facts == {"n": MOST_ROWS - 1, "rows_left_out": 2 * MOST_ROWS}
    assert _limited(rows[:MOST_ROWS]) == rows[:MOST_ROWS]


def test_blocks_behind_a_hole_are_told_of_the_hole() -> None:
    stage = Stage(4)
    tokens = stage.text(4)
    stage.stored.update(stage.keys(tokens)[2:])
    row, behind = stage.explained(stage.live(tokens))
    assert (row["blocks"], row["why"], row["facts"]) == ([0, 2], "never_stored", {})
    assert (behind["blocks"], behind["why"], behind["facts"]) == ([2, 4], "never_stored", {"behind": 0})


@given(
    shared=st.integers(0, 40),
    rest=st.integers(0, 12),
    known=st.integers(0, 12),
    start=st.integers(0, 9),
    seed=st.integers(0, 99),
)
def test_two_texts_differ_where_they_do(shared: int, rest: int, known: int, start: int, seed: int) -> None:
    """Of any two texts: the first token that is not the same, if it lies in the row's first block, and is stored."""
    dice = random.Random(seed)
    same = [dice.randrange(1 << 30) for _ in range(shared)]
    mine, others = [*same, *(1 for _ in range(rest))], [*same, *(2 for _ in range(dice.randrange(12)))]
    one = Explained(explanation("one", 10.0), text(*mine, *([1] * (start * BLOCK + BLOCK))))
    other = Explained(explanation("other", num_known=known), text(*others))
    stored = min(known * BLOCK, len(others))
    found = compare(one, Why(start, start + 1, "", Reason.NEVER_STORED), [other])
    num_same = min(shared, stored)
    if num_same >= (start + 1) * BLOCK:
        assert found == Compared(reason=Reason.EVICTED, nearest="other")
    elif num_same >= max(8, start * BLOCK) and num_same < stored:
        assert found == Compared(reason=TextReason.TEXT_DIFFERS, nearest="other", token=num_same)
    else:
        assert found == Compared(reason=Reason.NEVER_STORED)
    later = Explained(replace(other.explanation, asked_s=11.0), other.text)
    assert compare(one, ROW, [later]).reason is Reason.NEVER_STORED, "what came later cannot have been there"
