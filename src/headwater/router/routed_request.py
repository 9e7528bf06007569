"""One request's way through the router: what was asked, who was tried and why, how long each part took.

Values and arithmetic, no sockets. A routed request is what `/state` shows, what the histograms get, and what the client
is told in `usage.headwater.router`.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from headwater.core.errors import HeadwaterError
from headwater.disagg.width import num_choices
from headwater.router.choice import Candidate, Held, NodeChoice, Size
from headwater.router.nodes import NodeSlot
from headwater.router.trouble import Unanswered
from headwater.tracing.spans import NO_SPAN, Span

_NUM_SHOWN: Final = 16  # decisions of one request
_WANTED: Final = 128  # tokens, where the client does not say
_BYTES_PER_TOKEN: Final = 4  # of a body whose tokens nobody has counted
_PARTS: Final = ("queue_s", "prefill_s", "pool_write_s", "pool_read_s", "decode_s")  # that nodes tell of


class RoutePhase(enum.StrEnum):
    """What a node is asked for."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


class Outcome(enum.StrEnum):
    """How a routed request ended."""

    ANSWERED = "answered"
    REJECTED = "rejected"  # the client's fault
    REFUSED = "refused"  # no room
    FAILED = "failed"  # nobody could, before anything reached the client
    LATE = "late"
    BROKEN = "broken"  # in the middle of a stream
    GONE = "gone"  # the client went away


class NoAnswer(HeadwaterError):
    """A request that gets an error; `document` is a node's own, where the client is to hear that."""

    def __init__(
        self, outcome: Outcome, status: int, message: str, *, code: str, document: dict[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.outcome = outcome
        self.status = status
        self.code = code
        self.document = document


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What a client asks."""

    endpoint: str
    body: Mapping[str, object]
    content: bytes  # the body as JSON
    request_id: str
    until_s: float  # on the event loop's clock
    num_prompts: int = 1  # as far as that can be seen here
    traceparent: str = ""  # of the client's trace

    @property
    def stream(self) -> bool:
        """Whether events are wanted."""
        return self.body.get("stream") is True

    @property
    def num_answers(self) -> int:
        """How many are asked for, as far as that can be seen here: nodes know it for certain."""
        return num_choices(self.body) * self.num_prompts

    def size(self, held: Held | None) -> Size:
        """How large it is, roughly."""
        prompt = self.body.get("prompt")
        counted = max(1, len(self.content) // _BYTES_PER_TOKEN)
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
            counted = len(prompt)
        if held is not None and held.num_tokens is not None:
            counted = held.num_tokens
        asked = [self.body.get(name) for name in ("max_completion_tokens", "max_tokens")]
        wanted = next((one for one in asked if isinstance(one, int) and 0 < one < 1 << 31), _WANTED)
        return Size(counted, wanted, self.num_prompts, self.num_answers)


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One node that was asked."""

    phase: RoutePhase
    node: str
    began_s: float
    outcome: str = "under way"
    seconds: float = 0.0
    why: str = ""
    span: Span = NO_SPAN

    def document(self) -> dict[str, Any]:
        """For people."""
        return {
            "phase": self.phase,
            "node": self.node,
            "outcome": self.outcome,
            "seconds": round(self.seconds, 6),
            "why": self.why,
        }


@dataclass(slots=True, eq=False)
class RoutedRequest:
    """A request under way."""

    call: Call
    began_s: float
    span: Span = NO_SPAN
    held: Held | None = None
    outcome: Outcome | None = None
    begun: bool = False  # something has reached the client
    done: bool = False  # everything has
    num_promised: int = 0  # slots of a decode node that it will want: it is in prefill
    attempts: list[Attempt] = field(default_factory=list)
    decisions: list[dict[str, Any]] = field(default_factory=list)
    failed: set[str] = field(default_factory=set)  # nodes
    suspects: list[NodeSlot] = field(default_factory=list)  # that computed NaN: they or the prompt, nobody knows yet
    waited_s: float = 0.0  # in line
    num_failed: int = 0
    num_refused: int = 0
    num_prefills: int = 0
    trouble: Unanswered | None = None  # the last that was not a refusal
    seconds: dict[str, float] = field(default_factory=dict)  # by phase: see `usage`
    nodes: dict[str, str] = field(default_factory=dict)  # who did it, by phase
    parts: dict[str, float] = field(default_factory=dict)  # what prefill nodes said of their time, by name

    @property
    def size(self) -> Size:
        """How large it is."""
        return self.call.size(self.held)

    def add(self, phase: str, seconds: float) -> None:
        """Time that a phase took."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + max(0.0, seconds)

    def told(self, phases: object) -> None:
        """Take in what a prefill node says of its time."""
        self.parts = _sum(self.parts, phases)

    def decided(self, choice: NodeChoice, taken: Candidate) -> None:
        """Remember a choice, and why."""
        if len(self.decisions) < _NUM_SHOWN:
            self.decisions.append(
                {
                    "how": choice.how,
                    "node": taken.node,
                    "why": taken.reason,
                    "seconds": taken.seconds,
                    "candidates": [one.node for one in choice.candidates],
                    "left_out": dict(choice.left_out),
                }
            )

    def usage(self) -> dict[str, Any]:
        """What the client is told of its way.

        Seconds in line (queue), of prefill, in the pool (both ends; part of prefill and decode), from asking the decode
        or mixed node to its first token, of attempts that came to nothing (retries), from arrival to the first token
        (ttft) and to now (total).
        """
        took = {f"{phase}_s": round(seconds, 6) for phase, seconds in self.seconds.items()}
        return {"request_id": self.call.request_id, "nodes": self.nodes, "attempts": len(self.attempts), **took}

    def document(self) -> dict[str, Any]:
        """What people are shown. Nothing of what the client wrote."""
        return {
            **self.usage(),
            "endpoint": self.call.endpoint,
            "outcome": self.outcome,
            "why": "" if self.trouble is None else str(self.trouble),
            "decisions": self.decisions,
            "attempts": [one.document() for one in self.attempts],
        }


def with_usage(document: dict[str, Any], routed: RoutedRequest) -> bool:
    """Add what the way took to an answer's usage, if it has one; whether it has.

    `phases` becomes the whole way's: the answering node's parts, the prefill node's, and time in line here.
    """
    usage = document.get("usage")
    if not isinstance(usage, dict):
        return False
    own = usage.get("headwater")
    own = own if isinstance(own, dict) else {}
    here = {"queue_s": routed.seconds.get("queue", 0.0)}
    phases = _sum(_sum(here, routed.parts), own.get("phases"))
    if "retries" in routed.seconds:
        phases["retries_s"] = routed.seconds["retries"]
    rounded = {name: round(seconds, 6) for name, seconds in phases.items()}
    usage["headwater"] = {**own, "phases": rounded, "router": routed.usage()}
    return True


def _sum(before: Mapping[str, float], more: object) -> dict[str, float]:
    """Seconds by part, with what somebody said on top, as far as it makes sense."""
    found = dict(before)
    for name in _PARTS:
        seconds = more.get(name) if isinstance(more, Mapping) else None
        if isinstance(seconds, int | float) and 0 <= seconds < 1e6:
            found[name] = found.get(name, 0.0) + seconds
    return found
