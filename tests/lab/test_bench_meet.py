"""`headwater bench meet`: that it measures the three ways, and that some of a prompt was loaded. Never how fast."""

import pytest

from headwater.core.errors import InvalidConfig
from headwater.lab.bench import meet


def test_three_ways_at_each_pace() -> None:
    options = meet.MeetOptions(tokens=1024, block_tokens=32, step_tokens=128, paces=(1.0,), rounds=2, block_ms=5.0)
    report = meet.run(options)
    (row,) = report.results["paces"]
    assert min(row[name] for name in ("page_ms", "compute_ms", "load_ms", "meet_ms")) > 0
    assert row["ratio"] == row["meet_ms"] / min(row["compute_ms"], row["load_ms"])
    assert 0 < row["loaded"] < 1, "they did not meet"
    assert report.results["worst_ratio"] == report.results["best_ratio"] == row["ratio"]
    assert report.document()["options"]["tokens"] == 1024


@pytest.mark.parametrize(
    "wrong", [{"shape": "huge"}, {"tokens": 3}, {"rounds": 0}, {"paces": ()}, {"paces": (0.0,)}, {"block_ms": -1}]
)
def test_what_cannot_be_measured_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidConfig):
        meet.MeetOptions(**wrong)  # type: ignore[arg-type]
