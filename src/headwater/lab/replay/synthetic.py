"""Traces made up by a seed: conversations, agents, questions about documents. For tests, and for who has no trace.

    chat       people who think between turns, behind a handful of shared system prompts; some ask once and go
    agents     long shared instructions, many quick steps that each add a tool's answer, now and then a second attempt
    documents  many questions about few long documents, the popular ones far more often
    coding     agents at work for hours: steps at a pace of their own, people's pauses, sub-agents with prompts of their
               own, contexts that are summed up when they are full
    research   agents that send out sub-agents with their own instructions and question, again and again

Not a model of anybody's traffic: the shapes are plausible and the numbers are made up, so results on them say how a
policy behaves and not what it will save. The same arguments give the same requests, at each pass.

A prompt is a path of *segments* (a system prompt, a message, an answer), each of which follows one other segment only,
so a block is told by where in which segment it ends. Ids are given in order of first use.
"""

import heapq
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from headwater.core.errors import InvalidConfig
from headwater.lab.replay.trace import Trace, TraceRecord


@dataclass(slots=True)
class _Session:
    """One user, agent or reader: what its next prompt is, and how it goes on."""

    segments: list[tuple[str, int]]  # name and tokens
    turns_left: int
    answer_tokens: int = 0
    grown: int = 0  # segments of its own that were made so far
    ways: list[int] = field(default_factory=list)  # where an agent may begin anew
    pace_s: float = 0.0  # between two steps, of an agent with a pace of its own
    away: list[tuple[str, int]] = field(default_factory=list)  # of an agent whose sub-agent is at work: its own prompt
    steps_left: int = 0  # of that sub-agent


@dataclass(frozen=True, slots=True)
class _Kind:
    """What makes a sort of traffic: how sessions come, begin and go on, in seconds and tokens."""

    arrival_s: float  # mean time between two sessions
    begin: Callable[[random.Random, str], _Session]
    go_on: Callable[[random.Random, str, _Session], float]  # extends the session's prompt; returns the time until then


def _tokens(rng: random.Random, median: int) -> int:
    """A length: most are around the median, some are far longer."""
    return max(1, min(20 * median, round(rng.lognormvariate(0, 0.8) * median)))


def _popular(rng: random.Random, number: int) -> int:
    """One of `number` things, of which the n-th is wanted about 1/n as often as the first."""
    return min(number - 1, int((number + 1) ** rng.random()) - 1)


def _grow(session: _Session, name: str, tokens: int) -> None:
    session.segments.append((f"{name}/{session.grown}", tokens))
    session.grown += 1


def _begin_chat(rng: random.Random, name: str) -> _Session:
    system = _popular(rng, 8)
    session = _Session([(f"system {system}", 300 + 700 * system)], turns_left=0)
    if rng.random() < 0.6:
        session.turns_left = 1 + int(rng.expovariate(1 / 4))
    _grow(session, name, _tokens(rng, 900))
    return session


def _go_on_chat(rng: random.Random, name: str, session: _Session) -> float:
    _grow(session, name, session.answer_tokens)
    _grow(session, name, _tokens(rng, 150))
    return rng.lognormvariate(0, 1.0) * 60


def _begin_agent(rng: random.Random, name: str) -> _Session:
    role = _popular(rng, 4)
    session = _Session([(f"instructions {role}", 6_000 + 2_000 * role)], turns_left=5 + int(rng.expovariate(1 / 15)))
    _grow(session, name, _tokens(rng, 600))
    session.ways.append(len(session.segments))
    return session


def _go_on_agent(rng: random.Random, name: str, session: _Session) -> float:
    if rng.random() < 0.1:  # it drops what it tried, and takes another way from where it still seemed right
        del session.segments[rng.choice(session.ways) :]
        session.ways = [way for way in session.ways if way <= len(session.segments)]
    else:
        _grow(session, name, session.answer_tokens)
    _grow(session, name, _tokens(rng, 700))
    session.ways.append(len(session.segments))
    return 2 + rng.expovariate(1 / 6)


def _begin_document(rng: random.Random, name: str) -> _Session:
    number = _popular(rng, 60)
    length = 4_000 + random.Random(number).randrange(60_000)  # noqa: S311  a document has one length
    session = _Session([("system", 400), (f"document {number}", length)], turns_left=int(rng.expovariate(1 / 1.5)))
    _grow(session, name, _tokens(rng, 80))
    return session


def _go_on_document(rng: random.Random, name: str, session: _Session) -> float:
    _grow(session, name, session.answer_tokens)
    _grow(session, name, _tokens(rng, 80))
    return rng.lognormvariate(0, 0.8) * 40


def _begin_coding(rng: random.Random, name: str) -> _Session:
    session = _Session([(f"tools {_popular(rng, 3)}", 14_000)], turns_left=10 + int(rng.expovariate(1 / 60)))
    session.pace_s = 12 * rng.lognormvariate(0, 0.7)
    _grow(session, name, _tokens(rng, 6_000))
    return session


def _go_on_coding(rng: random.Random, name: str, session: _Session) -> float:
    _grow(session, name, session.answer_tokens)
    _grow(session, name, _tokens(rng, 900))
    if sum(tokens for _, tokens in session.segments) > 120_000:  # summed up: what came before is not asked for again
        del session.segments[1:]
        _grow(session, name, 5_000)
    if rng.random() < 0.07 and not session.away:
        return 300 * rng.lognormvariate(0, 1.2)
    _send_out(rng, name, session, often=0.04, steps=10, prompt=("tools of a helper", 4_000))
    return session.pace_s * rng.lognormvariate(0, 0.6)


def _begin_research(rng: random.Random, name: str) -> _Session:
    session = _Session([("instructions", 5_000)], turns_left=20 + int(rng.expovariate(1 / 40)))
    session.pace_s = 6 * rng.lognormvariate(0, 0.5)
    _grow(session, name, _tokens(rng, 20_000))
    return session


def _go_on_research(rng: random.Random, name: str, session: _Session) -> float:
    _grow(session, name, session.answer_tokens)
    _grow(session, name, _tokens(rng, 1_500))
    _send_out(rng, name, session, often=0.3, steps=4, prompt=session.segments[0])
    return session.pace_s * rng.lognormvariate(0, 0.8)


def _send_out(
    rng: random.Random, name: str, session: _Session, *, often: float, steps: int, prompt: tuple[str, int]
) -> None:
    """Now and then a sub-agent goes on in an agent's place; when it is done, the agent has its report."""
    if session.away:
        session.steps_left -= 1
        if session.steps_left <= 0:
            session.segments, session.away = session.away, []
            _grow(session, name, _tokens(rng, 600))
    elif rng.random() < often:
        session.away, session.segments = session.segments, [prompt]
        session.steps_left = 1 + int(rng.expovariate(1 / steps))
        _grow(session, name, _tokens(rng, 1_500))


_KINDS: Final = {
    "chat": _Kind(2.0, _begin_chat, _go_on_chat),
    "agents": _Kind(20.0, _begin_agent, _go_on_agent),
    "documents": _Kind(5.0, _begin_document, _go_on_document),
    "coding": _Kind(60.0, _begin_coding, _go_on_coding),
    "research": _Kind(30.0, _begin_research, _go_on_research),
}
KINDS: Final = tuple(_KINDS)


class Synthetic(Trace):
    """A made-up trace of `num_requests`."""

    def __init__(
        self,
        kind: str,
        num_requests: int,
        *,
        seed: int = 0,
        block_tokens: int = 512,
        full_blocks_only: bool = False,
    ) -> None:
        if kind not in _KINDS:
            raise InvalidConfig(f"no synthetic trace {kind!r}; there are: {', '.join(KINDS)}")
        if num_requests < 1:
            raise InvalidConfig(f"a trace has at least one request, not {num_requests}")
        name = f"synthetic {kind} (seed {seed})"
        super().__init__(name, block_tokens=block_tokens, full_blocks_only=full_blocks_only)
        self._kind = _KINDS[kind]
        self._num_requests = num_requests
        self._seed = seed

    def records(self) -> Iterator[TraceRecord]:
        """Make the requests."""
        rng = random.Random(self._seed)  # noqa: S311  no secrets here
        ids: dict[tuple[str, int], int] = {}
        arrival_s = rng.expovariate(1 / self._kind.arrival_s)
        waiting: list[tuple[float, int, _Session]] = []  # sessions by the time of their next request
        num_sessions = 0
        for _ in range(self._num_requests):
            while not waiting or arrival_s <= waiting[0][0]:
                session = self._kind.begin(rng, f"session {num_sessions}")
                heapq.heappush(waiting, (arrival_s, num_sessions, session))
                num_sessions += 1
                arrival_s += rng.expovariate(1 / self._kind.arrival_s)
            now_s, number, session = heapq.heappop(waiting)
            session.answer_tokens = _tokens(rng, 250)
            input_tokens = sum(tokens for _, tokens in session.segments)
            found = self._ids(session, ids)
            yield TraceRecord(round(now_s * 1e3), input_tokens, session.answer_tokens, found, f"session {number}")
            if session.turns_left:
                session.turns_left -= 1
                now_s += self._kind.go_on(rng, f"session {number}", session)
                heapq.heappush(waiting, (now_s, number, session))

    def _ids(self, session: _Session, ids: dict[tuple[str, int], int]) -> tuple[int, ...]:
        """Ids of a prompt's blocks, each told by its end; a full one and a part of it end at different places."""
        found: list[int] = []
        size, start = self.block_tokens, 0  # `start`: where the segment begins, in the prompt
        last = len(session.segments) - 1
        for at, (name, tokens) in enumerate(session.segments):
            end = start + tokens
            ends = list(range((start // size + 1) * size, end + 1, size))
            if at == last and end % size:
                ends.append(end)
            found.extend(ids.setdefault((name, one - start), len(ids)) for one in ends)
            start = end
        return tuple(found)
