"""What the brain hears and says survives JSON, whatever is in it; what is neither is refused."""

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.core import encoding
from headwater.core import events as ev
from headwater.core.errors import InvalidInput
from headwater.core.keys import BlockKey
from headwater.core.results import JOB_FAILURES, Reason, Status

KINDS = [
    *(ev.Arrived, ev.Wanted, ev.Lent, ev.Filled, ev.Claimed, ev.GaveUp, ev.Left, ev.Paced, ev.Vacated),
    *(ev.Copied, ev.Stuck, ev.JobDone, ev.JobFailed, ev.StoreOff, ev.StoreOn),
    *(ev.Probe, ev.Load, ev.Save, ev.Demote, ev.Promote, ev.Cancel, ev.Granted, ev.Finished, ev.Tell),
    *(ev.Stored, ev.Removed, ev.TierLost, ev.PolicyChosen, ev.Pinned, ev.Unpinned),
    *(ev.PurgeBegan, ev.PurgeEnded, ev.Purged),
]
ODD = ("", "#", "=", "#00", "#zz", "=x", "==", "=#", "is", "\x00", "naïve ☃ \U0001f980", "\ud800", '"\\', " #x")

texts = st.text() | st.sampled_from(ODD)
keys = st.binary(min_size=32, max_size=32) | st.binary(max_size=3)
numbers = st.integers(-(1 << 70), 1 << 70)
seconds = st.floats(allow_nan=False)
FIELDS: dict[Any, st.SearchStrategy[Any]] = {
    float: seconds,
    int: numbers,
    str: texts,
    bool: st.booleans(),
    bytes: st.binary(),
    BlockKey: keys,
    Reason: st.sampled_from(sorted(JOB_FAILURES)),
    tuple[Status, ...]: st.lists(st.sampled_from(Status)).map(tuple),
    tuple[BlockKey, ...]: st.lists(keys).map(tuple),
    tuple[int, ...]: st.lists(numbers).map(tuple),
    tuple[str, ...]: st.lists(texts).map(tuple),
    tuple[tuple[str, int], ...]: st.lists(st.tuples(texts, numbers)).map(tuple),
    tuple[tuple[str, str], ...]: st.lists(st.tuples(texts, texts)).map(tuple),
}


def values_of(kind: type[Any]) -> st.SearchStrategy[Any]:
    return st.builds(kind, **{field.name: FIELDS[field.type] for field in dataclasses.fields(kind)})


@given(st.one_of(*map(values_of, KINDS)))
def test_everything_survives_json(value: ev.Event | ev.Instruction) -> None:
    text = json.dumps(encoding.encode(value))
    again = encoding.decode(json.loads(text))
    assert again == value
    assert type(again) is type(value)
    assert json.dumps(encoding.encode(again)) == text


def test_every_kind_is_tried() -> None:
    found = {name for name, kind in vars(ev).items() if isinstance(kind, type) and dataclasses.is_dataclass(kind)}
    assert found - {"Event", "Instruction", "Job", "StoreCopy"} == {kind.__name__ for kind in KINDS}


@pytest.mark.parametrize("word", ODD)
def test_odd_words_stay_what_they_are(word: str) -> None:
    for value in (ev.Left(now_s=0.0, request=word), ev.Tell(kind=word, facts=((word, word),))):
        assert encoding.decode(json.loads(json.dumps(encoding.encode(value)))) == value


def test_text_and_bytes_are_told_apart() -> None:
    text = encoding.encode(ev.Granted(request="#00", slots=()))
    assert text["request"] == "=#00"
    assert encoding.encode(ev.Probe(job=1, store="s", keys=(BlockKey(b"\x00"),), deadline_s=0.0))["keys"] == ["#00"]
    assert encoding.encode(ev.JobFailed(now_s=0.0, job=1, failure=Reason.LATE))["failure"] == "late"


def test_keys_in_a_row_are_one_text_and_keys_one_by_one_are_still_read() -> None:
    keys = tuple(BlockKey(bytes([at]) * 32) for at in range(3))
    look = ev.Probe(job=1, store="host", keys=keys, deadline_s=1.0)
    document = encoding.encode(look)
    assert document["keys"] == "#32*" + b"".join(keys).hex()
    # As older recordings have them.
    assert (
        encoding.decode({**document, "keys": [f"#{key.hex()}" for key in keys]}) == look
    )  # as older recordings have them


@pytest.mark.parametrize("row", ["#32*", "#0*00", "#-1*00", "#2*000000", "#x*00", "#2*zz", "#1*00*00"])
def test_a_row_of_keys_that_is_none_is_refused(row: str) -> None:
    document = encoding.encode(ev.Probe(job=1, store="host", keys=(), deadline_s=1.0))
    with pytest.raises(InvalidInput):
        encoding.decode({**document, "keys": row})


def test_a_failure_comes_back_as_one() -> None:
    failed = encoding.decode({"is": "JobFailed", "now_s": 0.0, "job": 1, "failure": "late"})
    assert isinstance(failed, ev.JobFailed)
    assert failed.failure is Reason.LATE


GARBAGE: list[dict[Any, Any]] = [
    {},
    {"is": None},
    {"is": []},
    {"is": "Nothing"},
    {"is": "Event", "now_s": 0.0},
    {"is": "Job", "job": 1, "store": "host", "keys": [], "deadline_s": 0.0},
    {"is": "=Left", "now_s": 0.0, "request": "a"},
    {"now_s": 0.0},
    {"is": "Left"},
    {"is": "Left", "now_s": 0.0, "request": "a", "more": 1},
    {"is": "Left", "now_s": 0.0, "request": "a", 3: 1},
    {"is": "Left", "now_s": 0.0, "request": "#not hex"},
    {"is": "Filled", "now_s": 0.0, "request": "a", "keys": ["#0"]},
    {"is": "JobFailed", "now_s": 0.0, "job": 1},
]


@pytest.mark.parametrize("document", GARBAGE)
def test_garbage_is_refused(document: dict[Any, Any]) -> None:
    before = dict(document)
    with pytest.raises(InvalidInput, match="neither an event nor an instruction"):
        encoding.decode(document)
    assert document == before


WRONG_TYPES: list[Any] = [
    None,
    7,
    "Left",
    ["is", "Left"],
    {"is": "JobFailed", "now_s": 0.0, "job": 1, "failure": "nonsense"},
    {"is": "JobFailed", "now_s": 0.0, "job": 1, "failure": ["late"]},
    {"is": "Left", "now_s": "soon", "request": "a"},
    {"is": "Wanted", "now_s": 0.0, "request": "a", "num_blocks": None},
    {"is": "Wanted", "now_s": 0.0, "request": 7, "num_blocks": 1},
    {"is": "Filled", "now_s": 0.0, "request": "a", "keys": "#00"},
    {"is": "Filled", "now_s": 0.0, "request": "a", "keys": ["text"]},
    {"is": "Filled", "now_s": 0.0, "request": "a", "keys": {}},
    {"is": "JobDone", "now_s": 0.0, "job": 1, "results": [1]},
    {"is": "JobDone", "now_s": 0.0, "job": 1, "results": ["hit", "nonsense"]},
    {"is": "JobDone", "now_s": 0.0, "job": 1, "results": "hit"},
    {"is": "JobFailed", "now_s": 0.0, "job": 1, "failure": "evicted"},  # a reason, and none for which a job fails
    {"is": "Load", "job": 1, "store": "s", "keys": [], "deadline_s": 0.0, "slots": ["#00"]},
]


@pytest.mark.parametrize("document", WRONG_TYPES)
def test_garbage_of_the_right_kind_is_refused(document: Any) -> None:
    with pytest.raises(InvalidInput, match="neither an event nor an instruction"):
        encoding.decode(document)
