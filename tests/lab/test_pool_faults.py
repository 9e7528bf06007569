"""The fault campaign on a Mooncake pool: short runs of it, what it must find, and how it judges."""

import json
import subprocess
import sys
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from headwater.lab.campaigns import pool_faults
from headwater.lab.campaigns.pool_fault_report import (
    BASE_S,
    RECOVERY_S,
    SLACK_S,
    ProcessRecord,
    Round,
    WorkerCall,
    judge,
    overlap_s,
    read_record,
    recovery_s,
    union,
)

DAMAGE = {"check:corrupt", "check:foreign", "check:short", "check:unknown_version"}

# --- the campaign itself ----------------------------------------------------------------------------------------------


def test_a_killed_master_ends_in_misses_and_in_time() -> None:
    result = pool_faults.run("master", seconds=2.0, seed=1)
    assert result["ok"], (result["problems"], result["died"], result)
    assert result["wrong_bytes"] == result["late_calls"] == 0
    assert result["hits"] > 0
    assert result["stored"] > 0
    assert result["faults_injected"] == 1
    assert result["statuses"]["put:down"] > 0


def test_what_must_be_found_is_found() -> None:
    """A byte that is wrong past verification, a call that overruns, and one that somebody with the GIL held up.

    And nothing else is wrong or late, with all the damage that is done to the pool meanwhile.
    """
    command = [
        sys.executable,
        "-m",
        "headwater.lab.campaigns.pool_faults",
        "--fault",
        "damaged",
        "--seconds",
        "6",
        "--json",
    ]
    ended = subprocess.run([*command, "--inject", "wrong", "late", "held"], capture_output=True, text=True, check=False)
    assert ended.returncode == 1, ended.stderr
    result = json.loads(ended.stdout)["faults"]["damaged"]
    assert result["wrong_bytes"] == 1
    kinds = sorted(" ".join(problem.split()[:3]) for problem in result["problems"])
    assert kinds == [
        "reader-shm: check overran",  # which reads and verifies
        "reader-tcp: 1 bytes",
        "writer-tcp: put overran",
    ]
    assert result["late_calls"] == 2
    assert result["died"] == {}
    assert result["hits"] > 0
    assert result["stored"] > 0
    assert result["faults_injected"] > 10
    assert sum(number for what, number in result["statuses"].items() if what in DAMAGE) > 10


# --- how it judges ----------------------------------------------------------------------------------------------------


def _call(end_s: float, *, deadline_s: float | None = None, good: int = 8) -> WorkerCall:
    return WorkerCall(
        "put", end_s - 0.01, end_s + 0.9 if deadline_s is None else deadline_s, end_s, good, {"stored": good}
    )


def _verdict(
    record: ProcessRecord, witness: ProcessRecord | None = None, rounds: tuple[Round, ...] = ()
) -> dict[str, Any]:
    return judge([record], [witness] if witness is not None else [], rounds, seconds=10)


def test_a_call_is_late_unless_the_machine_was() -> None:
    late = _call(11.0, deadline_s=10.0)
    assert _verdict(ProcessRecord("writer-0", [_call(10.0 + SLACK_S, deadline_s=10.0)]))["late_calls"] == 0
    assert _verdict(ProcessRecord("writer-0", [late]))["late_calls"] == 1
    behind, before = ProcessRecord("witness-0", gaps=[(10.1, 10.7)]), ProcessRecord("witness-0", gaps=[(9.0, 10.0)])
    assert _verdict(ProcessRecord("writer-0", [late]), behind)["late_calls"] == 0
    assert _verdict(ProcessRecord("writer-0", [late]), before)["late_calls"] == 1, (
        "what came before the deadline excuses nothing"
    )
    held = read_record("writer-0", [["gap", 9.0, 11.0, 0.01]])  # its heart did not beat, and could have
    held.calls.append(late)
    assert _verdict(held)["late_calls"] == 1
    assert _verdict(held)["held_s"] > 1.9
    starved = read_record("writer-0", [["gap", 9.0, 11.0, 0.9]])
    starved.calls.append(late)
    assert _verdict(starved)["late_calls"] == 0


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)).map(lambda pair: (min(pair), max(pair)))))
def test_stalls_that_overlap_count_once(spans: list[tuple[int, int]]) -> None:
    moments = {moment for begin, end in spans for moment in range(begin, end)}
    merged = union(spans)
    assert overlap_s(merged, 0, 50) == len(moments)
    assert overlap_s(merged, 10, 30) == len(moments & set(range(10, 30)))


@given(st.floats(0.0, 6.0))
def test_full_speed_again_is_when_a_window_has_it(silent_s: float) -> None:
    """One call each 50 ms before the strike and from `silent_s` behind the repair on; a lone call between is none."""
    one = Round(begin_s=10.0, repaired_s=12.0, until_s=20.0)
    ends = [10.0 - BASE_S + 0.05 * i for i in range(50)]
    ends += [12.0 + silent_s + 0.05 * i for i in range(200) if 12.0 + silent_s + 0.05 * i < 20.0]
    took_s = recovery_s([_call(end_s) for end_s in ends], one, base=20 * 8)
    assert took_s is not None
    assert silent_s + 0.3 <= took_s <= silent_s + 0.7


def test_who_stays_slow_or_idle_is_told() -> None:
    one = Round(begin_s=10.0, repaired_s=12.0, until_s=12.0 + RECOVERY_S + 3.0)
    before = [_call(5.0 + 0.05 * i) for i in range(100)]
    fast = [_call(12.5 + 0.05 * i) for i in range(140)]
    slow = [_call(12.5 + 0.2 * i) for i in range(37)]
    lucky = [_call(12.5 + 0.01 * i) for i in range(40)] + [call for call in slow if call.end_s > 13.0]
    assert _verdict(ProcessRecord("reader-0", before + fast), rounds=(one,))["problems"] == []
    assert len(_verdict(ProcessRecord("reader-0", before + slow), rounds=(one,))["problems"]) == 2
    assert "stay slow" in _verdict(ProcessRecord("reader-0", before + lucky), rounds=(one,))["problems"][0]
    assert len(_verdict(ProcessRecord("reader-0", before), rounds=(one,))["problems"]) == 2
    assert "nothing done" in _verdict(ProcessRecord("reader-0", [_call(1.0, good=0)]))["problems"][0]


def test_bad_pages_that_stay_are_told() -> None:
    one = Round(begin_s=10.0, repaired_s=10.0, until_s=20.0)
    early = WorkerCall("check", 12.0, 13.0, 12.1, 1, {"hit": 1, "corrupt": 7})
    later = WorkerCall("check", 16.0, 17.0, 16.1, 1, {"hit": 1, "foreign": 7})
    good = [WorkerCall("check", 9.0 + 0.1 * i, 20.0, 9.0 + 0.1 * i, 8, {"hit": 8}) for i in range(100)]
    assert not any(
        "bad" in what for what in _verdict(ProcessRecord("reader-0", [*good, early]), rounds=(one,))["problems"]
    )
    assert any(
        "7 of" in what for what in _verdict(ProcessRecord("reader-0", [*good, later]), rounds=(one,))["problems"]
    )
