"""What the fault campaign on a pool (`pool_faults.py`) says of one fault: pure, from what its processes wrote down.

Every moment is CLOCK_MONOTONIC's, which all processes of a machine share. A call is *late* when it ended more than
`SLACK_S` behind its deadline, not counting the time behind the deadline in which the machine itself stood still. That
it did must be proven: a process that does nothing but sleep saw it, or the kernel says that the process's own heartbeat
was ready to run and had no processor. A process that merely did not run Python (a library that keeps the interpreter's
lock) proves nothing: that is reported as `held_s`, and its calls are late.

*Full speed again* is judged for each worker alone: good pages per second (verified, or held by the store after a put)
in the first window of `WINDOW_S` behind the repair that reaches `SPEED` of what it was before a strike, at its best.
One window may be luck, so there is a second look: from `RECOVERY_S` behind a repair to the next strike all readers
together, and all writers, reach it too, in the median of the rounds.
"""

import bisect
import itertools
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

SLACK_S: Final = 0.5
WINDOW_S: Final = 0.5
STEP_S: Final = 0.1
SPEED: Final = 0.8
RECOVERY_S: Final = 5.0
BASE_S: Final = 2.5
BAD: Final = 0.02
_FAULTS: Final = frozenset({"corrupt", "foreign", "short"})

Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class WorkerCall:
    """One call of a worker."""

    kind: str
    begin_s: float
    deadline_s: float
    end_s: float
    good_pages: int
    statuses: Mapping[str, int]  # pages by what became of them; no page was asked for: how the call ended


@dataclass(frozen=True, slots=True)
class Round:
    """One injection: from when on the pool was broken, and when nothing was any more."""

    begin_s: float
    repaired_s: float
    until_s: float  # the next one began, or the campaign ended


@dataclass(slots=True)
class ProcessRecord:
    """All that one process wrote down."""

    name: str
    calls: list[WorkerCall] = field(default_factory=list)
    wrong_bytes: int = 0
    wrong: list[str] = field(default_factory=list)
    starved: list[Span] = field(default_factory=list)  # its heartbeat was ready and had no processor
    gaps: list[Span] = field(default_factory=list)  # its heartbeat did not beat, for whatever reason
    notes: Counter[str] = field(default_factory=Counter)
    ended: bool = False


def read_record(name: str, lines: Iterable[Sequence[Any]]) -> ProcessRecord:
    """What the lines of a process's log say."""
    record = ProcessRecord(name)
    for what, *facts in lines:
        match what:
            case "call":
                record.calls.append(WorkerCall(*facts))
            case "wrong":
                record.wrong_bytes += facts[0]
                record.wrong.append(facts[1])
            case "gap":
                begin_s, end_s, waited_s = facts
                record.gaps.append((begin_s, end_s))
                if waited_s > 0:
                    record.starved.append((max(begin_s, end_s - waited_s), end_s))
            case "ended":
                record.ended = True
            case _:
                record.notes[what] += 1
    return record


def union(spans: Iterable[Span]) -> list[Span]:
    """The same moments, in order and without overlap."""
    merged: list[Span] = []
    for begin_s, end_s in sorted(spans):
        if merged and begin_s <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end_s))
        else:
            merged.append((begin_s, end_s))
    return merged


def overlap_s(spans: Sequence[Span], begin_s: float, end_s: float) -> float:
    """Seconds between two moments that lie in spans, which do not overlap."""
    return sum(max(0.0, min(end_s, to) - max(begin_s, since)) for since, to in spans)


def unexcused_s(call: WorkerCall, stalls: Sequence[Span]) -> float:
    """How far a call ran past its deadline, without the machine's own stalls in that time."""
    return call.end_s - call.deadline_s - overlap_s(stalls, call.deadline_s, call.end_s)


def recovery_s(calls: Sequence[WorkerCall], one: Round, base: float, stalls: Sequence[Span] = ()) -> float | None:
    """Seconds from the repair to the end of the first window at full speed, without stalls; None: there was none."""
    pages = Pages(calls)
    at_s = one.repaired_s
    while at_s + WINDOW_S <= one.until_s and base > 0:
        if pages.per_second(at_s, at_s + WINDOW_S) >= SPEED * base:
            took_s = at_s + WINDOW_S - one.repaired_s
            return round(took_s - overlap_s(stalls, one.repaired_s, one.repaired_s + took_s), 2)
        at_s += STEP_S
    return None


def speed_after(records: Sequence[ProcessRecord], one: Round, rounds: Sequence[Round]) -> float | None:
    """How fast workers together are from `RECOVERY_S` behind a repair on, as a part of what they were at their best."""
    since_s = one.repaired_s + RECOVERY_S
    before = base_speed(records, rounds)
    after = sum(Pages(record.calls).per_second(since_s, one.until_s) for record in records)
    return round(after / before, 2) if before and one.until_s - since_s >= WINDOW_S else None


def base_speed(records: Sequence[ProcessRecord], rounds: Sequence[Round]) -> float:
    """Good pages per second before a strike, of all the most: what an earlier strike left behind is no excuse."""
    pages = [Pages(record.calls) for record in records]
    return max(sum(some.per_second(one.begin_s - BASE_S, one.begin_s) for some in pages) for one in rounds)


class Pages:
    """Good pages over time. The calls are in the order in which they ended."""

    def __init__(self, calls: Sequence[WorkerCall]) -> None:
        self._ends = [call.end_s for call in calls]
        self._sums = list(itertools.accumulate((call.good_pages for call in calls), initial=0))

    def per_second(self, begin_s: float, end_s: float) -> float:
        """How many there were, in the mean, between two moments."""
        number = self._sums[bisect.bisect_left(self._ends, end_s)] - self._sums[bisect.bisect_left(self._ends, begin_s)]
        return number / (end_s - begin_s) if end_s > begin_s else 0.0


def judge(
    records: Sequence[ProcessRecord], witnesses: Sequence[ProcessRecord], rounds: Sequence[Round], *, seconds: float
) -> dict[str, Any]:
    """One fault's part of the report. `problems` says in words what is not as it must be."""
    seen = union(span for one in witnesses for span in one.gaps)
    calls = [call for record in records for call in record.calls]
    statuses = Counter[str]()
    for call in calls:
        statuses.update({f"{call.kind}:{status}": number for status, number in call.statuses.items()})
    late, times = _judge_times(records, seen)
    bad, bad_after = _judge_bad(calls, rounds)
    slow, speeds = _judge_speed(records, rounds, seen)
    idle = [f"{record.name} got nothing done" for record in records if not any(one.good_pages for one in record.calls)]
    wrong = [f"{record.name}: {what}" for record in records for what in record.wrong]
    checked = {what: number for what, number in statuses.items() if what.startswith("check:")}
    return {
        "seconds": seconds,
        "rounds": len(rounds),
        "calls": dict(sorted(Counter(call.kind for call in calls).items())),
        "hits": statuses["check:hit"],
        "misses": sum(checked.values()) - statuses["check:hit"],
        "stored": statuses["put:stored"],
        "wrong_bytes": sum(record.wrong_bytes for record in records),
        "late_calls": len(late),
        **times,
        **speeds,
        "bad_after": bad_after,
        "statuses": dict(sorted(statuses.items())),
        "notes": dict(sorted(sum((record.notes for record in records), Counter[str]()).items())),
        "problems": [*wrong[:5], *late[:5], *bad, *slow, *idle],
    }


def _judge_times(records: Sequence[ProcessRecord], seen: Sequence[Span]) -> tuple[list[str], dict[str, float]]:
    """Calls that were late, in words, and by how much calls overran at all."""
    late: list[str] = []
    overruns, unexcused, held = [0.0], [0.0], [0.0]
    for record in records:
        stalls = union([*seen, *record.starved])
        held += [to - since - overlap_s(stalls, since, to) for since, to in record.gaps]
        for call in record.calls:
            if call.end_s > call.deadline_s:
                overruns.append(call.end_s - call.deadline_s)
                unexcused.append(unexcused_s(call, stalls))
                if unexcused[-1] > SLACK_S:
                    late.append(f"{record.name}: {call.kind} overran by {unexcused[-1]:.3f} s")
    times = {
        "worst_overrun_s": max(overruns),
        "worst_unexcused_s": max(unexcused),  # without the machine's stalls
        "stalls_s": sum(to - since for since, to in seen),  # of the machine, as the witnesses saw them
        "starved_s": sum(to - since for one in records for since, to in one.starved),  # of all workers
        "held_s": max(held),  # the longest time in which one did not run Python, and the machine was not to blame
    }
    return late, {what: round(value, 3) for what, value in times.items()}


def _judge_bad(calls: Sequence[WorkerCall], rounds: Sequence[Round]) -> tuple[list[str], int]:
    """Bad pages that readers still found long after a repair. Who finds one removes it, so there are next to none.

    A page that somebody deletes while it is read may turn out bad, and is counted too: `BAD` of all are nothing.
    """
    checked, bad = 0, 0
    for one in rounds:
        for call in calls:
            if call.kind == "check" and one.repaired_s + RECOVERY_S <= call.begin_s < one.until_s:
                checked += sum(call.statuses.values())
                bad += sum(number for status, number in call.statuses.items() if status in _FAULTS)
    return [f"{bad} of {checked} pages are bad long after a repair"] if bad > BAD * checked else [], bad


def _judge_speed(
    records: Sequence[ProcessRecord], rounds: Sequence[Round], seen: Sequence[Span]
) -> tuple[list[str], dict[str, Any]]:
    """What is slower than before, in words, and how fast it was. Only rounds that had the time to recover count."""
    fit = [one for one in rounds if one.until_s - one.repaired_s >= RECOVERY_S]
    worst: list[float | None] = []
    for one in fit:
        each = [recovery_s(record.calls, one, base_speed([record], rounds), seen) for record in records]
        worst.append(None if None in each else max(took_s or 0.0 for took_s in each))
    known = [took_s for took_s in worst if took_s is not None]
    num_slow = len(worst) - sum(took_s <= RECOVERY_S for took_s in known)
    problems = [f"not at full speed {RECOVERY_S:g} s after {num_slow} of {len(fit)} repairs"] if num_slow else []
    after = {}
    for role in sorted({record.name.partition("-")[0] for record in records}):
        some = [record for record in records if record.name.startswith(role)]
        after[f"{role}s"] = [speed_after(some, one, rounds) for one in fit]
        speeds = [speed for speed in after[f"{role}s"] if speed is not None]
        if speeds and statistics.median(speeds) < SPEED:
            problems.append(f"the {role}s stay slow after repairs: {speeds} of what they were")
    recovery = {"worst": max(known) if known and None not in worst else None, "rounds": worst}
    return problems, {"recovery_s": recovery, "speed_after": after}
