"""`headwater verify --pd`: every case of a family is equal on every sort of pool, and what is not so is noticed."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from headwater.cli import app
from headwater.core.errors import InvalidConfig
from headwater.core.events import Instruction
from headwater.disagg.exports import Export
from headwater.engine.connector import Connector
from headwater.engine.handover import Handover
from headwater.engine.request import Request, Taking
from headwater.lab.verify import FAMILIES, pd, pd_cases, pd_ranks
from headwater.layout.shard import Shard, byte_ranges
from headwater.layout.spec import Plane

NUM_CASES = 16
ONE = {"gqa": FAMILIES["gqa"]}
LOADED = ("other tokens", "other log-probabilities")


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str, families: Sequence[str] = ("gqa",)) -> tuple[int, Any]:
    monkeypatch.setattr(pd, "FAMILIES", {name: FAMILIES[name] for name in families})
    result = CliRunner().invoke(app, ["verify", "--pd", "--json", *arguments])
    return result.exit_code, json.loads(result.stdout)


def wrong(document: Any) -> list[Any]:
    return [case for case in document["cases"] if not case["equal"]]


@pytest.mark.timeout(300)
def test_prefill_and_decode_answer_as_one_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    code, document = run(monkeypatch, "--pool", "local", families=("gqa", "mla"))
    assert (code, document["ok"], document["equal"]) == (0, True, True), wrong(document)
    assert document["num_cases"] == len(document["cases"]) == 2 * NUM_CASES
    for family in ("gqa", "mla"):
        cases = {case["case"]: case for case in document["cases"] if case["family"] == family}
        assert len(cases) == NUM_CASES
        for length, num_blocks in ((1, 1), (15, 1), (16, 1), (17, 2), (87, 6)):
            case = cases["1 token" if length == 1 else f"{length} tokens"]
            assert (case["read_blocks"], case["computed_tokens"], case["found_tokens"]) == (num_blocks, 7, {})
        assert cases["second turn"]["found_tokens"] == {"device": 32, "pool": 32}
        assert cases["turns at two prefill nodes"]["num_requests"] == 3
        assert cases["one prompt at two prefill nodes"]["num_requests"] == 2
        assert cases["over with its first token"]["read_blocks"] == 0
        assert cases["TP 2 to 1, 87 tokens"]["read_blocks"] == 6


def test_on_a_redis_server(monkeypatch: pytest.MonkeyPatch) -> None:
    code, document = run(monkeypatch, "--pool", "redis", families=("gqa-fp8",))
    assert (code, document["ok"]) == (0, True), wrong(document)
    assert {(case["pool"], case["family"]) for case in document["cases"]} == {("redis", "gqa-fp8")}
    assert len(document["cases"]) == NUM_CASES


def test_on_a_mooncake_pool() -> None:
    """In a process of its own: the Mooncake engine keeps files open as long as its process lives."""
    code = f"from headwater.cli import app; from headwater.lab.verify import pd; pd.FAMILIES = {ONE}; app()"
    command = [sys.executable, "-c", code, "verify", "--pd", "--pool", "mooncake", "--json"]
    done = subprocess.run(command, capture_output=True, check=False, timeout=240)
    document = json.loads(done.stdout)
    assert (done.returncode, document["ok"]) == (0, True), (wrong(document), done.stderr)
    assert document["pools"][0]["absent"] == ""
    assert {(case["pool"], case["family"]) for case in document["cases"]} == {("mooncake", "gqa")}
    assert len(document["cases"]) == NUM_CASES


def test_damage_behind_the_checks_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    code, document = run(monkeypatch, "--pool", "local", "--inject")
    assert (code, document["ok"]) == (1, False)
    cases = {case["case"]: case for case in document["cases"]}
    assert cases.pop("over with its first token")["equal"]  # it reads nothing
    assert {case["problem"] for case in cases.values()} <= set(LOADED)


def only(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    every = pd_cases.Suite.cases
    monkeypatch.setattr(pd_cases.Suite, "cases", lambda suite: {name: every(suite)[name] for name in names})


def swap_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def ranges(plane: Plane, shard: Shard) -> tuple[tuple[int, int], ...]:
        return byte_ranges(plane, Shard(shard.count - 1 - shard.index, shard.count))

    monkeypatch.setattr(pd_ranks, "byte_ranges", ranges)


def lose_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = Handover._begin

    def forget(self: Handover, request: Request, taking: Taking) -> None:
        sampler = replace(taking.ticket.sampler, seed=1)
        begin(self, request, replace(taking, ticket=replace(taking.ticket, sampler=sampler)))

    monkeypatch.setattr(Handover, "_begin", forget)


def lose_the_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    cut = Export._cut

    def believe(self: Export, _now_s: float) -> list[Instruction]:
        self._num_done = self.prompt.num_blocks
        return self._end()

    monkeypatch.setattr(Export, "_cut", lambda self: [row for row in cut(self) if not row.order.valid_tokens])
    monkeypatch.setattr(Export, "_behind_rows", believe)


def answer_nothing_to_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = Connector.commit

    def forget(self: Connector, request: Request) -> None:
        if request.pool_s is None or request.num_computed <= len(request.prompt):  # decode's have been in the pool
            commit(self, request)

    monkeypatch.setattr(Connector, "commit", forget)


def compute_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = Connector.taken
    monkeypatch.setattr(Connector, "taken", lambda self, request, num: taken(self, request, num - 1))


@pytest.mark.parametrize(
    ("mutate", "case", "problem"),
    [
        (swap_ranks, "TP 2 to 1, 16 tokens", "other tokens"),
        (lose_the_seed, "no seed of the client's", "other tokens"),
        (lose_the_tail, "17 tokens", "the ticket names pages that the pool does not have"),
        (answer_nothing_to_the_pool, "second turn", "prefill found {'device': 32} of 64 tokens"),
        (compute_it_again, "17 tokens", "decode computed 8 tokens for an answer of 8"),
    ],
)
def test_what_is_not_so_is_noticed(
    mutate: Callable[[pytest.MonkeyPatch], None], case: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    only(monkeypatch, case)
    code, document = run(monkeypatch, "--pool", "local")
    assert (code, document["ok"], document["cases"][0]["problem"]) == (1, False, problem)


def test_a_server_that_cannot_be_had_is_absent_and_not_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    code, document = run(monkeypatch, "--pool", "redis")
    assert (code, document["ok"], document["equal"], document["cases"]) == (1, False, True, [])
    assert "apt-get install redis-server" in document["pools"][0]["absent"]
    monkeypatch.setattr(pd_cases.Suite, "cases", lambda _: {})
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    code, document = run(monkeypatch, "--pool", "mooncake")
    assert (code, document["ok"]) == (1, False)
    assert "headwater[mooncake]" in document["pools"][0]["absent"]
    code, document = run(monkeypatch, "--pool", "local")
    assert (code, document["ok"]) == (1, False), "nothing was compared"


def test_it_can_be_read_by_people(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(pd, "FAMILIES", ONE)
    monkeypatch.setattr(pd, "POOLS", ("local", "redis"))
    only(monkeypatch, "17 tokens")
    result = CliRunner().invoke(app, ["verify", "--pd"])
    assert result.exit_code == 1
    for said in (
        "pool: local",
        "17 tokens",
        "equal",
        "pool: redis, absent: there is no redis-server",
        "not everything",
    ):
        assert said in result.stdout


@pytest.mark.fault("X28")
def test_what_makes_no_sense_is_refused() -> None:
    """X28: most of it was passed over, and another proof ran for minutes than was asked for."""
    for arguments, said in (
        (["--pd", "--pool", "ftp"], "local, mooncake, redis or all"),
        (["--pd", "--pool", ""], "local, mooncake, redis or all"),
        (["--pool", "all"], "--pd"),
        (["--only", "gqa"], "--only is for --vllm"),
        (["--out", "report.json"], "--out is for --vllm"),
        (["--pd", "--python", "python3"], "--python is for --vllm"),
        (["--pd", "--vllm"], "two proofs"),
        (["--vllm", "--model", "somewhere"], "models of its own"),
    ):
        result = CliRunner().invoke(app, ["verify", *arguments])
        assert result.exit_code == 1
        assert said in result.stderr
    with pytest.raises(InvalidConfig, match="none"):
        pd.run(pools=())
