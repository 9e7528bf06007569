"""Replays: small traces whose results were worked out by hand, Belady against brute force, and the command."""

import io
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from headwater.cli import app
from headwater.core.errors import InvalidConfig, InvalidInput
from headwater.lab.replay import plot, synthetic
from headwater.lab.replay.belady import Future
from headwater.lab.replay.bill import STORE, ReplayOutcome, ReplaySetup, ReplayStore, default_block_bytes
from headwater.lab.replay.run import Replay, replay
from headwater.lab.replay.sweep import capacities, policies, sweep
from headwater.lab.replay.synthetic import Synthetic
from headwater.lab.replay.trace import ROOT, Trace, TraceFile, TraceRecord, TraceRequest, keys_of, survey
from headwater.lab.replay.virtual import CountingStore

GB = 10**9
EVERY_POLICY = policies("all")
PROMPTS = st.lists(st.lists(st.integers(0, 2), max_size=4), min_size=1, max_size=12)


class Listed(Trace):
    """Prompts as lists of ids, ten seconds apart unless said otherwise, a token a block."""

    def __init__(self, prompts: Sequence[Sequence[int]], times_s: Sequence[float] | None = None) -> None:
        super().__init__("listed", block_tokens=1)
        self._prompts = prompts
        self._times_s = [10.0 * i for i in range(len(prompts))] if times_s is None else times_s

    def records(self) -> Iterator[TraceRecord]:
        for at_s, ids in zip(self._times_s, self._prompts, strict=True):
            yield TraceRecord(at_s * 1e3, len(ids), 1, tuple(ids))


def setup_of(
    *,
    policy: str = "lru",
    store_blocks: int = 0,
    store_gbs: float | None = None,
    behind_blocks: int = 0,
    behind_gbs: float | None = None,
    **options: Any,
) -> ReplaySetup:
    """A device, one store behind it if that has blocks, and a slower one behind that."""
    asked = ((STORE, store_blocks, store_gbs), ("behind", behind_blocks, behind_gbs))
    stores = tuple(ReplayStore(name=name, blocks=blocks, gbs=gbs) for name, blocks, gbs in asked if blocks)
    return ReplaySetup(policy=policy, stores=stores, **options)


def play(trace: Trace, **options: Any) -> ReplayOutcome:
    """Replay, with everything checked after every request."""
    run = Replay(setup_of(**{"block_bytes": 1, **options}), block_tokens=trace.block_tokens)
    for request in trace:
        run.feed(request)
        run.brain.validate()
        for store in run.stores.values():
            store.validate()
    outcome = run.finish()
    run.brain.validate()
    assert not run.brain.requests
    assert not list(run.brain.jobs)
    assert outcome.hit_blocks + sum(outcome.missed_blocks.values()) == outcome.requested_blocks
    return outcome


def future_of(trace: Trace) -> Future:
    future = Future()
    for request in trace:
        future.add(request)
    return future


def invoke(*args: str | Path | int) -> Result:
    return CliRunner().invoke(app, ["replay", *(str(arg) for arg in args)])


def line(timestamp: Any = 0, input_length: Any = 600, output_length: Any = 1, hash_ids: Any = (1, 2)) -> str:
    return json.dumps(
        {"timestamp": timestamp, "input_length": input_length, "output_length": output_length, "hash_ids": hash_ids}
    )


@pytest.fixture(scope="module", autouse=True)
def fonts() -> None:
    """matplotlib keeps its fonts open for ever, once it has drawn: not a test's leak."""
    found = sweep(Listed([[1]]), [ReplaySetup(policy="lru", blocks=1)])
    plot.draw(found, io.BytesIO(), format="png")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Three requests: the second repeats a block of the first, the third all of it."""
    place = tmp_path / "trace.jsonl"
    place.write_text("\n".join([line(0), line(10, 700, 1, [1, 3]), "", line(20)]) + "\n")
    return place


# --- worked out by hand -----------------------------------------------------------------------------------------------

FEW = [[1, 2, 3], [1, 2, 4], [5, 6], [1, 2, 3]]


def test_a_device_alone() -> None:
    outcome = play(Listed(FEW), blocks=4)
    # 1 2 3 | hits 1 2, fills 4 | evicts 3 and 4 for 5 6 | hits 1 2, evicts 6 for 3
    assert outcome.requested_blocks == 11
    assert outcome.hit_blocks == 4
    assert outcome.hit_ratio == 4 / 11
    assert outcome.missed_blocks == {"never_stored": 6, "evicted": 1}
    assert [tier.evicted_blocks for tier in outcome.tiers] == [3]
    assert outcome.tiers[0].written_bytes == outcome.tiers[0].read_bytes == 0


def test_a_store_behind_it() -> None:
    outcome = play(Listed(FEW), blocks=4, store_blocks=8, block_bytes=100)
    device, store = outcome.tiers
    assert (device.name, device.hit_blocks, device.evicted_blocks) == ("device", 4, 3)
    assert (store.name, store.hit_blocks, store.evicted_blocks) == ("store", 1, 0)
    assert outcome.missed_blocks == {"never_stored": 6}
    assert (store.written_bytes, store.read_bytes) == (600, 100)
    assert (device.read_bytes, device.written_bytes) == (600, 100)


def test_a_store_that_is_too_small_lets_leaves_go_and_gets_the_whole_path_again() -> None:
    outcome = play(Listed(FEW), blocks=4, store_blocks=3)
    # 1 2 3 | 4 for 3 | 5 6 for 4 2 | 3 has no parent there: 1 is, 2 and 3 for 6 and 5
    store = outcome.tiers[1]
    assert store.hit_blocks == 0
    assert store.evicted_blocks == 5
    assert store.written_bytes == 8
    assert outcome.dropped_blocks == {"no_parent": 1}


def test_lru_goes_by_last_use() -> None:
    outcome = play(Listed([[1], [2], [1], [3], [1], [2]]), blocks=2)
    assert outcome.hit_blocks == 2  # 1 twice; 2 left for 3
    assert outcome.missed_blocks == {"never_stored": 3, "evicted": 1}


def test_only_leading_blocks_are_hits() -> None:
    outcome = play(Listed([[1, 2], [3, 2], [2]]), blocks=9)
    assert outcome.hit_blocks == 0


def test_a_request_longer_than_the_device_is_cut() -> None:
    outcome = play(Listed([[1, 2, 3], [1, 2, 3]]), blocks=2)
    assert outcome.requested_blocks == 6
    assert outcome.hit_blocks == 2
    assert outcome.missed_blocks == {"too_long": 2, "never_stored": 2}
    assert outcome.cut_requests == 2


def test_a_request_without_blocks() -> None:
    assert play(Listed([[], [1], []]), blocks=1, store_blocks=1).num_requests == 3


def test_saved_seconds() -> None:
    outcome = play(Listed([[1, 2], [1, 2]]), blocks=2, compute_base_s=1.0, compute_slope_s=0.5)
    assert outcome.saved_s == 2.5  # 1 and 1.5
    assert outcome.document()["saved_s"] == 2.5
    assert play(Listed([[1]]), blocks=1).document()["saved_s"] is None


# --- virtual time -----------------------------------------------------------------------------------------------------

SLOW: dict[str, Any] = {"store_gbs": 1.0, "block_bytes": GB, "store_blocks": 100}  # a second a block


def test_loads_take_their_time() -> None:
    outcome = play(Listed([[1, 2], [3, 4], [1]]), blocks=2, compute_base_s=5.0, **SLOW)
    assert outcome.tiers[1].hit_blocks == 1
    assert outcome.waited_s == 1.0
    assert outcome.saved_s == 4.0


def test_loads_of_a_store_follow_each_other_and_requests_overlap() -> None:
    trace = Listed([[1], [2], [3], [4], [1], [2]], [0, 10, 20, 30, 40, 40])
    outcome = play(trace, blocks=2, compute_base_s=5.0, **SLOW)
    assert outcome.tiers[1].hit_blocks == 2
    assert outcome.waited_s == 3.0


def test_who_finds_no_room_waits_for_it() -> None:
    trace = Listed([[1, 2], [3, 4], [1, 2], [5, 6]], [0, 10, 20, 20])
    outcome = play(trace, blocks=2, compute_base_s=5.0, **SLOW)
    assert outcome.tiers[1].hit_blocks == 2
    assert outcome.missed_blocks == {"never_stored": 6}


def test_a_load_behind_its_deadline_is_a_miss() -> None:
    row = list(range(10))
    outcome = play(Listed([row, [77] * 10, row], [0, 100, 200]), blocks=10, compute_base_s=100.0, **SLOW)
    assert outcome.missed_blocks == {"never_stored": 20, "too_late": 10}
    assert outcome.waited_s == 5.0  # TierConfig.load_timeout_s


def test_what_is_slower_than_computing_is_not_loaded() -> None:
    outcome = play(Listed([[1], [2], [1], [2], [1]]), blocks=1, compute_base_s=0.5, **SLOW)
    assert outcome.tiers[1].hit_blocks == 1  # the first, when nobody knew how long it takes
    assert outcome.missed_blocks == {"never_stored": 2, "not_worth_it": 2}


def test_two_stores_behind_it() -> None:
    outcome = play(Listed(FEW), blocks=4, store_blocks=3, behind_blocks=8, block_bytes=100)
    device, store, behind = outcome.tiers
    assert (device.hit_blocks, store.hit_blocks, behind.hit_blocks) == (4, 0, 1)
    assert behind.evicted_blocks == 0
    assert behind.written_bytes == 600  # each block once


def test_computing_takes_its_time_step_by_step() -> None:
    trace = Listed([[1, 2, 3], [1, 2, 3]], [0, 4])
    options: dict[str, Any] = {"blocks": 9, "compute_base_s": 1.0, "compute_slope_s": 0.5}
    assert play(trace, **options).hit_blocks == 3  # at once
    assert play(trace, step_blocks=1, **options).hit_blocks == 2  # there at 1, 2.5 and 4.5 s
    assert play(trace, step_blocks=2, **options).hit_blocks == 2  # there at 2.5 and 4.5 s
    assert play(trace, step_blocks=3, **options).hit_blocks == 0
    late = Listed([[1, 2, 3], [1, 2, 3]], [0, 4.5])
    assert play(late, step_blocks=1, **options).hit_blocks == 3


def test_requests_compute_beside_each_other() -> None:
    trace = Listed([[1, 2], [3, 4], [1, 2], [3, 4]], [0, 0, 2, 2])
    outcome = play(trace, blocks=9, compute_base_s=1.0, step_blocks=1)
    assert outcome.hit_blocks == 4
    assert outcome.waited_s == 0


def test_who_computes_keeps_its_room() -> None:
    trace = Listed([[1, 2], [3, 4], [1, 2]], [0, 1, 5])
    outcome = play(trace, blocks=2, compute_base_s=1.0, step_blocks=1)  # the second waits until the first has ended
    assert outcome.hit_blocks == 0
    assert outcome.missed_blocks == {"never_stored": 4, "evicted": 2}


def test_a_counting_store_keeps_no_orphans() -> None:
    store = CountingStore(2, policy="lru", block_bytes=1)
    one, two, three = keys_of((1, 2, 3))
    assert store.put([two], parent=one, depth=1, now_s=0) == ["no_parent"]
    assert store.put([one, two, three], parent=ROOT, depth=0, now_s=0) == ["stored", "stored", "no_room"]
    assert store.put([one], parent=ROOT, depth=0, now_s=1) == ["exists"]
    assert store.contains([one, two, three]) == ["held", "held", "absent"]
    assert store.get([one, three, two], now_s=2) == ["hit", "miss", "miss"]
    assert (store.num_written, store.num_read, store.num_evicted) == (2, 1, 0)


@given(
    prompts=PROMPTS,
    blocks=st.integers(1, 6),
    store_blocks=st.integers(1, 6),
    behind=st.sampled_from([(0, None), (4, None), (9, 0.3)]),
    gap_s=st.sampled_from([0.0, 0.4, 3.0]),
    compute_s=st.sampled_from([0.0, 0.7, 9.0]),
    step_blocks=st.integers(0, 2),
    policy=st.sampled_from(EVERY_POLICY),
)
def test_any_trace_ends_and_adds_up(
    prompts: list[list[int]],
    blocks: int,
    store_blocks: int,
    behind: tuple[int, float | None],
    gap_s: float,
    compute_s: float,
    step_blocks: int,
    policy: str,
) -> None:
    trace = Listed(prompts, [i * gap_s for i in range(len(prompts))])
    slow = SLOW | {"store_blocks": store_blocks, "behind_blocks": behind[0], "behind_gbs": behind[1]}
    slow |= {"compute_base_s": compute_s, "step_blocks": step_blocks}
    assert play(trace, policy=policy, blocks=blocks, **slow).num_requests == len(prompts)


# --- what no policy can exceed ----------------------------------------------------------------------------------------


def brute_force(prompts: Sequence[Sequence[int]], capacity: int, *, hold_running: bool) -> int:
    """The most that can be hit, by trying everything that could be kept. Blocks are prefixes."""
    paths = [[tuple(ids[: i + 1]) for i in range(len(ids))] for ids in prompts]

    @cache
    def best(at: int, kept: frozenset[tuple[int, ...]]) -> int:
        if at == len(paths):
            return 0
        path = paths[at]
        hits = len(list(itertools.takewhile(lambda block: block in kept, path)))
        must = frozenset(path[:capacity]) if hold_running else frozenset()
        may = (kept if hold_running and len(path) > capacity else kept | frozenset(path)) | must
        return hits + max(
            best(at + 1, must | frozenset(more))
            for size in range(min(len(may - must), capacity - len(must)) + 1)
            for more in itertools.combinations(sorted(may - must), size)
        )

    return best(0, frozenset())


@given(prompts=st.lists(st.lists(st.integers(0, 1), max_size=3), max_size=6), capacity=st.integers(1, 4))
@pytest.mark.parametrize("hold_running", [False, True])
def test_belady_is_the_best_there_is(prompts: list[list[int]], capacity: int, hold_running: bool) -> None:
    found = future_of(Listed(prompts)).min_hits(capacity, hold_running=hold_running)
    assert found == brute_force(prompts, capacity, hold_running=hold_running)


def test_belady_by_hand() -> None:
    future = future_of(Listed([[1], [2], [3], [1], [2]]))
    assert [future.min_hits(n) for n in (1, 2)] == [1, 2]  # 1 is kept; 1 and 2
    assert [future.min_hits(n, hold_running=True) for n in (1, 2, 3)] == [0, 1, 2]  # one place is the running request's


@given(prompts=PROMPTS, blocks=st.integers(1, 8), store_blocks=st.integers(0, 4))
@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_no_policy_beats_belady(policy: str, prompts: list[list[int]], blocks: int, store_blocks: int) -> None:
    trace = Listed(prompts)
    future = future_of(trace)
    hits = play(trace, policy=policy, blocks=blocks, store_blocks=store_blocks).hit_blocks
    assert hits <= future.min_hits(blocks + store_blocks)
    if not store_blocks:
        assert hits <= future.min_hits(blocks, hold_running=True) <= future.min_hits(blocks)


@pytest.mark.parametrize("kind", synthetic.KINDS)
@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_with_room_for_all_everything_seen_before_hits(kind: str, policy: str) -> None:
    trace = Synthetic(kind, 200)
    found = survey(trace)
    assert found.unbounded_hit_blocks > 0
    for options in ({"blocks": found.num_unique_blocks}, {"blocks": 1 << 40}, {"blocks": 200, "store_blocks": 1 << 40}):
        outcome = replay(trace, setup_of(policy=policy, **options), survey=found)
        assert outcome.hit_blocks == found.unbounded_hit_blocks, options
        assert outcome.requested_blocks == found.num_blocks


# --- traces -----------------------------------------------------------------------------------------------------------


def test_a_trace_is_read_anew_each_time(path: Path) -> None:
    trace = TraceFile(path)
    first, second, third = trace
    assert list(trace) == [first, second, third]
    assert [request.at_s for request in trace] == [0.0, 0.01, 0.02]
    assert first.keys == third.keys
    assert first.keys[0] == second.keys[0]
    assert first.keys[1] != second.keys[1]


def test_a_key_is_an_id_behind_its_prefix() -> None:
    one = keys_of((7, 1 << 63, 7))
    assert len(set(one)) == 3
    assert all(len(key) == 32 for key in one)
    assert keys_of((7, 1 << 63)) == one[:2]
    assert keys_of((8, 1 << 63))[1] != one[1]
    assert keys_of(()) == ()


def test_a_survey(path: Path) -> None:
    found = survey(TraceFile(path))
    assert (found.num_requests, found.num_blocks, found.num_unique_blocks) == (3, 6, 3)
    assert found.unbounded_hit_blocks == 3
    assert found.num_ids_behind_two_prefixes == 0
    assert survey(Listed([[1, 2], [2], [3, 2, 3]])).num_ids_behind_two_prefixes == 2  # 2 and 3


def test_full_blocks_only_leaves_the_rest_of_a_prompt_out(path: Path) -> None:
    trace = TraceFile(path, full_blocks_only=True)
    assert [request.ids for request in trace] == [(1,), (1,), (1,)]
    assert survey(trace).num_blocks == 3
    exact = Synthetic("chat", 50, block_tokens=1, full_blocks_only=True)
    assert list(exact) == list(Synthetic("chat", 50, block_tokens=1))


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("{", "not JSON: '{'"),
        ('{"timestamp": 1e999}', "timestamp must be"),
        ("[" * 100_000, "not JSON"),
        ("[1]", "not an object of a request's fields: [1]"),
        ("{}", "no timestamp"),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1}', "no hash_ids"),
        (line(timestamp="0"), "timestamp must be a number of milliseconds, not '0'"),
        (line(timestamp=True), "timestamp must be a number"),
        (line(timestamp=float("nan")), "timestamp must be a number"),
        (line(timestamp=-1), "timestamp must be a number"),
        (line(timestamp=0), "timestamp goes back, from 5 to 0"),
        (line(9, input_length=-1), "input_length must be a whole number of tokens, not -1"),
        (line(9, output_length=1.5), "output_length must be"),
        (line(9, hash_ids="12"), "hash_ids must be a list of numbers, not '12'"),
        (line(9, hash_ids=[1, None]), "hash_ids must be whole numbers of 64 bits, not None"),
        (line(9, hash_ids=[1, True]), "hash_ids must be whole numbers"),
        (line(9, hash_ids=[1, 1 << 64]), "hash_ids must be whole numbers"),
        (line(9, hash_ids=[1, -2]), "hash_ids must be whole numbers"),
        (line(9, hash_ids=[1]), "1 hash_ids, and 600 tokens are 2 blocks of 512 (--block-tokens)"),
        ("\xff", "not JSON"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, bad: str, says: str) -> None:
    place = tmp_path / "bad.jsonl"
    place.write_bytes(f"{line(5)}\n\n{bad}\n{line(6)}\n".encode("latin-1"))
    with pytest.raises(InvalidInput) as caught:
        list(TraceFile(place))
    assert str(caught.value).startswith(f"{place}:3: ")
    assert says in str(caught.value)
    assert len(str(caught.value)) < len(str(place)) + 150
    result = invoke(place, "--policy", "lru", "--blocks", 5, "--plot", tmp_path / "out.png")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == f"headwater: {caught.value}\n"
    assert [file.name for file in tmp_path.iterdir()] == ["bad.jsonl"]


# --- made-up traces ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", synthetic.KINDS)
def test_made_up_traces_are_traces(kind: str, tmp_path: Path) -> None:
    trace = Synthetic(kind, 300, seed=3)
    records = list(trace.records())
    assert len(records) == 300
    assert records == list(trace.records())
    assert records != list(Synthetic(kind, 300, seed=4).records())
    place = tmp_path / "trace.jsonl"
    fields = ("timestamp", "input_length", "output_length", "hash_ids", "session_id")
    place.write_text("".join(json.dumps(dict(zip(fields, record, strict=True))) + "\n" for record in records))
    assert list(TraceFile(place)) == list(trace)
    found = survey(trace)
    assert found.num_ids_behind_two_prefixes == 0
    assert 0.2 < found.unbounded_hit_ratio < 1


def test_made_up_traces_are_refused_where_they_make_no_sense() -> None:
    with pytest.raises(InvalidConfig, match="chat, agents, documents"):
        Synthetic("poems", 1)
    with pytest.raises(InvalidConfig, match="at least one request"):
        Synthetic("chat", 0)


# --- several replays --------------------------------------------------------------------------------------------------


def test_a_sweep_has_a_bound_for_each_outcome() -> None:
    trace = Synthetic("chat", 300)
    setups = [ReplaySetup(policy="lru", blocks=blocks) for blocks in (50, 200)]
    setups.append(setup_of(blocks=50, store_blocks=150))
    told: list[str] = []
    found = sweep(trace, setups, tell=lambda stage, done, total: told.append(stage))
    assert [one.hit_blocks for one in found.outcomes] == [play(trace, blocks=n).hit_blocks for n in (50, 200)] + [
        play(trace, blocks=50, store_blocks=150).hit_blocks
    ]
    for outcome in found.outcomes:
        assert outcome.hit_ratio <= found.bound(outcome).min_hit_ratio <= found.survey.unbounded_hit_ratio
    assert {"lru, 50 blocks", "lru, 200 blocks"} <= set(told)


def test_requests_are_cut_alike_by_belady_and_by_the_device() -> None:
    trace = Listed([[1, 2, 3], [1, 2, 3]])
    assert future_of(trace).min_hits(2, hold_running=True) == play(trace, blocks=2).hit_blocks == 2


def test_numbers_of_blocks() -> None:
    assert capacities("1000,3000,1000") == [1000, 3000]
    for text in ("", "1000,", "many", "1e3"):
        with pytest.raises(InvalidConfig, match="--blocks is a number"):
            capacities(text)


def test_bytes_of_a_block() -> None:
    assert default_block_bytes(512) == 64 << 20


def test_a_request_is_plain() -> None:
    assert TraceRequest(1.0, (1,), keys_of((1,))).keys == keys_of((1,))


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_explains_itself() -> None:
    result = invoke("--help")
    assert result.exit_code == 0
    for option in ("--policy", "--blocks", "--store-blocks", "--plot", "--json", "--full-blocks-only", "--synthetic"):
        assert option in result.stdout


def test_one_replay_as_json(path: Path) -> None:
    result = invoke(path, "--policy", "lru", "--blocks", "2", "--store-blocks", 9, "--block-bytes", 10, "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["command"] == "replay"
    assert (found["hit_ratio"], found["hit_blocks"], found["requested_blocks"]) == (0.5, 3, 6)
    assert [(tier["name"], tier["hit_blocks"]) for tier in found["tiers"]] == [("device", 2), ("store", 1)]
    assert (found["policy"], found["blocks"], found["store_blocks"]) == ("lru", 2, 9)
    assert found["unbounded_hit_ratio"] == found["min_hit_ratio"] == 0.5
    assert found["tiers"][1]["written_bytes"] == 30
    assert found["missed_blocks"] == {"never_stored": 3}
    assert found["trace"]["num_requests"] == 3
    assert found["options"]["block_bytes"] == 10
    assert found["requests_per_s"] > 0


def test_several_replays_as_json(path: Path) -> None:
    result = invoke(path, "--policy", "all", "--blocks", "1,2,3", "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert [(run["policy"], run["blocks"]) for run in found["runs"]] == [
        (policy, blocks) for policy in EVERY_POLICY for blocks in (1, 2, 3)
    ]
    assert found["bounds"]["unbounded_hit_ratio"] == 0.5
    assert [bound["blocks"] for bound in found["bounds"]["min"]] == [1, 2, 3]
    assert all(run["hit_ratio"] <= run["min_hit_ratio"] <= 0.5 for run in found["runs"])


def test_a_table(path: Path) -> None:
    result = invoke(path, "--policy", "lru", "--blocks", "1", "--store-blocks", 1, "--compute-ms", 3)
    assert result.exit_code == 0, result.stderr
    for word in ("hit ratio", "MIN", "unbounded", "saved s", "read from store", "3 requests", "too_long", "were cut"):
        assert word in result.stdout


def test_full_blocks_only_by_the_command(path: Path) -> None:
    result = invoke(path, "--policy", "lru", "--blocks", "9", "--full-blocks-only", "--json")
    assert json.loads(result.stdout)["requested_blocks"] == 3


@pytest.mark.parametrize(("suffix", "begins"), [(".png", b"\x89PNG\r\n\x1a\n"), (".SVG", b"<?xml")])
def test_a_picture(tmp_path: Path, suffix: str, begins: bytes) -> None:
    place = tmp_path / f"out{suffix}"
    args = ("--synthetic", "chat", "--requests", 100, "--policy", "all", "--blocks", "10,100", "--plot", place)
    result = invoke(*args, "--json")
    assert result.exit_code == 0, result.stderr
    assert len(json.loads(result.stdout)["runs"]) == 2 * len(EVERY_POLICY)
    assert place.read_bytes().startswith(begins)
    assert list(tmp_path.iterdir()) == [place]
    assert invoke(*args).exit_code == 0  # over the old one


def test_a_picture_of_one_point(path: Path) -> None:
    odd = path.with_name("a$\\x$.jsonl")
    path.rename(odd)
    result = invoke(odd, "--policy", "lru", "--blocks", 1, "--plot", path.with_name("out.png"))
    assert result.exit_code == 0, result.stderr


def test_without_matplotlib(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = invoke(path, "--policy", "lru", "--plot", path.with_name("out.png"))
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == "headwater: --plot needs matplotlib: pip install 'headwater[plot]'\n"
    assert invoke(path, "--policy", "lru", "--blocks", 5).exit_code == 0


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("{path}", "--policy", "clever"), "no eviction policy 'clever'; there are: "),
        (("{path}", "--policy", "lru", "--blocks", "0"), "a device has at least one block, not 0"),
        (("{path}", "--policy", "lru", "--blocks", "-5"), "a device has at least one block, not -5"),
        (("{path}", "--policy", "lru", "--blocks", "many"), "--blocks is a number"),
        (("{path}", "--policy", "lru", "--store-blocks", "-1"), "a store has no -1 blocks"),
        (("{path}", "--policy", "lru", "--store-gbs", "1"), "there is no store whose speed could be set"),
        (("{path}", "--policy", "lru", "--store-blocks", "9", "--store-gbs", "nan"), "a store's speed is"),
        (("{path}", "--policy", "lru", "--block-tokens", "0"), "a block has a positive number of tokens"),
        (("{path}", "--policy", "lru", "--block-tokens", "16"), "{path}:1: 2 hash_ids, and 600 tokens are 38 blocks"),
        (("{path}", "--policy", "lru", "--block-bytes", "0"), "block_bytes must be"),
        (("{path}", "--policy", "lru", "--compute-ms", "-1"), "compute_base_s must be"),
        (("{path}", "--policy", "lru", "--compute-slope-ms", "nan"), "compute_slope_s must be"),
        (("{path}", "--policy", "lru", "--plot", "{folder}"), "--plot {folder}: the name must end in one of .png"),
        (("{path}", "--policy", "lru", "--plot", "{folder}/no/out.png"), "--plot {folder}/no/out.png: No such file"),
        (("{path}", "--policy", "lru", "--plot", "{folder}/d.png"), "--plot {folder}/d.png: that is a directory"),
        (("{folder}/nothing", "--policy", "lru"), "{folder}/nothing: No such file or directory"),
        (("{folder}", "--policy", "lru"), "{folder}: Is a directory"),
        (("{folder}/empty", "--policy", "lru"), "{folder}/empty: no block is requested in 0 requests"),
        (("--policy", "lru"), "say what to replay: a TRACE, --synthetic or --events"),
        (("{path}", "--policy", "lru", "--synthetic", "chat"), "say what to replay"),
        (("--policy", "lru", "--synthetic", "poems"), "no synthetic trace 'poems'; there are: chat, agents"),
        (("--policy", "lru", "--synthetic", "chat", "--requests", "0"), "a trace has at least one request"),
    ],
)
def test_what_cannot_be_replayed_is_one_line(path: Path, args: tuple[str, ...], says: str) -> None:
    folder = path.parent
    (folder / "d.png").mkdir()
    (folder / "empty").touch()
    before = sorted(folder.iterdir())
    result = invoke(*(arg.format(path=path, folder=folder) for arg in args))
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith(f"headwater: {says.format(path=path, folder=folder)}")
    assert result.stderr.count("\n") == 1
    assert sorted(folder.iterdir()) == before
