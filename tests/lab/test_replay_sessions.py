"""Replays of traces that say whose turn a request is: what the policy `session` makes of it."""

from collections.abc import Iterator

import pytest

from headwater.core.errors import InvalidInput
from headwater.lab.replay.bill import ReplayOutcome, ReplaySetup
from headwater.lab.replay.run import replay
from headwater.lab.replay.synthetic import Synthetic
from headwater.lab.replay.trace import Trace, TraceFile, TraceRecord, survey


class Rounds(Trace):
    """Agents that take their turns: two every ten seconds, nine every thirty, each with twenty blocks."""

    def __init__(self, *, named: bool) -> None:
        super().__init__("rounds", block_tokens=1)
        self._named = named

    def records(self) -> Iterator[TraceRecord]:
        for tick in range(200):
            now_s = 10.0 * tick
            for agent in range(11):
                if agent < 2 or tick % 3 == agent % 3:
                    ids = tuple(range(100 * agent, 100 * agent + 20))
                    session = f"agent {agent}" if self._named else ""
                    yield TraceRecord((now_s + agent / 2) * 1e3, len(ids), 1, ids, session)


def played(trace: Trace, policy: str, blocks: int) -> ReplayOutcome:
    return replay(trace, ReplaySetup(policy=policy, blocks=blocks), survey=survey(trace))


def test_where_not_all_fit_those_stay_that_come_back_soon() -> None:
    assert played(Rounds(named=True), "lru", 70).hit_blocks == 0  # each drives out the one whose turn is next
    assert played(Rounds(named=True), "session", 70).hit_ratio > 0.39  # the quick ones' turns are 0.4 of all


def test_without_names_it_is_value() -> None:
    outcomes = [played(Rounds(named=False), policy, 70) for policy in ("value", "session")]
    assert outcomes[0].hit_blocks == outcomes[1].hit_blocks


def test_other_policies_ask_for_no_names() -> None:
    for policy in ("lru", "lru-2", "value"):
        outcomes = [played(Rounds(named=named), policy, 70) for named in (False, True)]
        assert outcomes[0].hit_blocks == outcomes[1].hit_blocks


@pytest.mark.parametrize("kind", ["agents", "chat", "coding", "documents", "research"])
@pytest.mark.parametrize("blocks", [400, 1200])
def test_it_is_never_much_worse_than_lru(kind: str, blocks: int) -> None:
    trace = Synthetic(kind, 400, seed=5)
    lru, session = (played(trace, policy, blocks).hit_ratio for policy in ("lru", "session"))
    assert session >= lru - 0.002


def test_on_agents_that_do_not_fit_sessions_are_worth_something() -> None:
    trace = Synthetic("coding", 600, seed=3)
    lru, value, session = (played(trace, policy, 200).hit_ratio for policy in ("lru", "value", "session"))
    assert session > lru + 0.03
    assert session > value + 0.02


def test_a_session_is_text(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("traces") / "trace.jsonl"
    line = '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [1], "session_id": %s}\n'
    path.write_text(line % '"a"' + line % "null")
    assert [request.session for request in TraceFile(path, block_tokens=1)] == ["a", ""]
    path.write_text(line % "7")
    with pytest.raises(InvalidInput, match="session_id must be text, not 7"):
        list(TraceFile(path, block_tokens=1))
