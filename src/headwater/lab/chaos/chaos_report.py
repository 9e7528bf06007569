"""What a fault campaign (`chaos.py`) says of one fault: pure, from what clients were told and which nodes were killed.

Every request has a right answer, computed by one engine beforehand. It ends

    right       with these tokens, all of them
    error       honestly: a status of 500 or more that says why; or, of a stream, an event that does, behind tokens
                that are right as far as they go
    wrong       with other tokens
    dishonest   any other way: broken off without a word, a status that blames the client
    left        because its client went away on purpose: what it got until then was right

and, besides, it is *late* if it ended more than `SLACK_S` behind its deadline, not counting time in which the kernel
says that the router, or the clients, were ready to run and had no processor. A stream that breaks behind its first
token is an error only where a node that answers clients was killed meanwhile, or its time was over. Otherwise a node
found out too late that it could not answer: a token preceded a 502.
"""

import enum
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from headwater.lab.campaigns.pool_fault_report import union

SLACK_S: Final = 1.0
_NOTICE_S: Final = 0.5  # until we hear that somebody died
_NUM_SHOWN: Final = 5
_TIME_OVER: Final = ("timeout",)

Span = tuple[float, float]


class Verdict(enum.StrEnum):
    """How a request ended."""

    RIGHT = "right"
    ERROR = "error"
    WRONG = "wrong"
    DISHONEST = "dishonest"
    LEFT = "left"


@dataclass(frozen=True, slots=True)
class RightAnswer:
    """What is right."""

    text: str
    finish: str


@dataclass(slots=True, kw_only=True)
class ClientAnswer:
    """What a client was told, and when."""

    request_id: str
    answer: RightAnswer  # what it should have been
    begin_s: float
    deadline_s: float
    end_s: float = 0.0
    stream: bool = False
    left: bool = False  # on purpose
    status: int = 0
    text: str = ""
    finish: str | None = None
    done: bool = False  # all of it came
    error: Mapping[str, Any] | None = None
    trouble: str = ""  # of the connection

    @property
    def code(self) -> str:
        """What sort of error it was."""
        said = (self.error or {}).get("code")
        return said if isinstance(said, str) else "none"

    def line(self) -> str:
        """For people."""
        said = (self.error or {}).get("message", self.trouble)
        took_s, had_s = self.end_s - self.begin_s, self.deadline_s - self.begin_s
        what = f"status {self.status}, {len(self.text)} of {len(self.answer.text)} characters"
        texts = "" if self.answer.text.startswith(self.text) else f": {self.text!r} for {self.answer.text!r}"
        return f"{self.request_id}: {what}, {took_s:.2f} of {had_s:.2f} s, {self.code} ({said}){texts}"[:600]


def verdict(told: ClientAnswer) -> Verdict:
    """How a request ended. Pure."""
    answer = told.answer
    said = (told.error or {}).get("message")
    if told.status == 200 and not answer.text.startswith(told.text):
        return Verdict.WRONG
    if told.left and told.status in (0, 200) and told.error is None:
        return Verdict.LEFT
    if told.status == 200 and told.error is None and told.done:
        return Verdict.RIGHT if (told.text, told.finish) == (answer.text, answer.finish) else Verdict.WRONG
    if told.status == 200 and told.stream and said and not told.done:
        return Verdict.ERROR
    if told.status >= 500 and said and not told.trouble:
        return Verdict.ERROR
    return Verdict.DISHONEST


def late_s(told: ClientAnswer, stalls: Iterable[Span] = ()) -> float:
    """Seconds behind the deadline that nobody but us is to blame for. Pure."""
    behind_s = told.end_s - told.deadline_s
    if behind_s <= SLACK_S:
        return behind_s
    spans = [(max(told.deadline_s, begin), min(told.end_s, end)) for begin, end in stalls]
    return behind_s - sum(end - begin for begin, end in union(span for span in spans if span[0] < span[1]))


def broke_by_itself(told: ClientAnswer, kills: Iterable[tuple[str, float]]) -> bool:
    """Whether a stream that had begun broke though nobody who may have answered it was killed. Pure."""
    if not (told.status == 200 and told.error is not None and told.text):
        return False
    if told.code.startswith("handoff_"):
        return True
    span = (told.begin_s, told.end_s + _NOTICE_S)
    killed = any(span[0] <= when_s <= span[1] for node, when_s in kills if not node.startswith("prefill"))
    return not (killed or told.code in _TIME_OVER)


@dataclass(slots=True)
class ChaosScene:
    """What happened while one fault was injected again and again."""

    fault: str
    wanted: int
    injected: int = 0
    told: Sequence[ClientAnswer] = ()
    kills: Sequence[tuple[str, float]] = ()  # node, and when
    stalls: Sequence[Span] = ()
    slots_left: int = 0
    died: Sequence[str] = ()  # without having been told to
    tracebacks: int = 0  # in logs: somebody was taken by surprise
    recovered: bool = True  # afterwards, undisturbed, everything was right
    seconds: float = 0.0
    notes: Counter[str] = field(default_factory=Counter)


def judge(scene: ChaosScene) -> dict[str, Any]:
    """The counts of one fault; `ok` if nothing is wrong with them. Pure."""
    verdicts = Counter[Verdict]()
    errors, examples = Counter[str](), list[str]()
    late = excused = too_soon = 0
    for told in scene.told:
        found = verdict(told)
        verdicts[found] += 1
        if found is Verdict.ERROR:
            errors[f"{'stream' if told.status == 200 else told.status} {told.code}"] += 1
        was_late = late_s(told, scene.stalls) > SLACK_S
        by_itself = broke_by_itself(told, scene.kills)
        late += was_late
        excused += not was_late and late_s(told) > SLACK_S
        too_soon += by_itself
        bad = found in (Verdict.WRONG, Verdict.DISHONEST) or was_late or by_itself
        if bad and len(examples) < _NUM_SHOWN:
            examples.append(f"{found}{', late' * was_late}{', tokens first' * by_itself}: {told.line()}")
    waits_s = sorted(one.end_s - one.begin_s for one in scene.told)
    result = {
        "injected": scene.injected,
        "requests": len(scene.told),
        "right": verdicts[Verdict.RIGHT],
        "honest_errors": dict(errors),
        "left_by_client": verdicts[Verdict.LEFT],
        "wrong": verdicts[Verdict.WRONG],
        "dishonest": verdicts[Verdict.DISHONEST],
        "late": late,
        "late_for_want_of_a_processor": excused,
        "tokens_before_502": too_soon,
        "slots_left": scene.slots_left,
        "tracebacks": scene.tracebacks,
        "died": list(scene.died),
        "recovered": scene.recovered,
        "median_s": round(waits_s[len(waits_s) // 2], 3) if waits_s else None,
        "longest_s": round(waits_s[-1], 3) if waits_s else None,
        "seconds": round(scene.seconds, 1),
        "starved_s": round(sum(end - begin for begin, end in union(scene.stalls)), 1),
        "notes": dict(scene.notes),
        "examples": examples,
    }
    nothing = ("wrong", "dishonest", "late", "tokens_before_502", "slots_left", "tracebacks")
    good = not any(result[name] for name in nothing) and not scene.died and scene.recovered
    return {"ok": good and scene.injected >= scene.wanted > 0 and verdicts[Verdict.RIGHT] > 0} | result
