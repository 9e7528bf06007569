"""Plans: sizes of models, paces from our own measurements, money worked out by hand, and the command."""

import html
import io
import itertools
import json
import math
import os
import signal
import sys
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from headwater.cache.placement import ComputeCost
from headwater.cli import app
from headwater.core.errors import HeadwaterError, InvalidConfig, InvalidInput
from headwater.lab.plan import answer, paces, page
from headwater.lab.plan.search import GIB, HOURS_A_MONTH, Plan, PlanOptions, Prices, make_plan
from headwater.lab.plan.shape import read_token_bytes
from headwater.lab.replay.bill import ReplaySetup, ReplayStore
from headwater.lab.replay.run import replay
from headwater.lab.replay.synthetic import Synthetic
from headwater.lab.replay.trace import TraceRecord, survey

RESULTS = Path(__file__).parents[2] / "bench" / "results"
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}
BLOCK_BYTES = 1 << 20
CHAT = Synthetic("chat", 300, seed=3)
PACES = {"host": paces.Pace(40.0), "disk": paces.Pace(3.0), "pool": paces.Pace(3.0)}
FREE = {"host": 0.0, "disk": 0.0, "pool": 0.0}


def options(**changed: Any) -> PlanOptions:
    """A device of 64 blocks, and as many again twice and four times behind it."""
    usual: dict[str, Any] = {
        "device_gib": 64 * BLOCK_BYTES / GIB,
        "sizes": {"host": (64 * BLOCK_BYTES / GIB, 128 * BLOCK_BYTES / GIB), "disk": (256 * BLOCK_BYTES / GIB,)},
        "token_bytes": BLOCK_BYTES // CHAT.block_tokens,
        "computing": ComputeCost(0.01, 0.0),
        "computing_source": paces.GIVEN,
        "paces": PACES,
        "prices": Prices(gpu_hour=2.0, gib_month=FREE),
        "jobs": 1,
    }
    return PlanOptions(**usual | changed)


@pytest.fixture(scope="module")
def free() -> Plan:
    return make_plan(CHAT, options())


@pytest.fixture(scope="module", autouse=True)
def kept_open(free: Plan) -> None:
    """matplotlib keeps its fonts, and multiprocessing its tracker, for ever: not a test's leak."""
    page.write(free, io.BytesIO(), format="png")
    resource_tracker.ensure_running()


def write_config(path: Path, config: object) -> Path:
    path.write_text(json.dumps(config))
    return path


# --- how large a token is ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "num_bytes"),
    [
        ({}, 128 << 10),
        ({"torch_dtype": "float32"}, 256 << 10),
        ({"head_dim": 64}, 64 << 10),
        ({"num_key_value_heads": None}, 512 << 10),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, 32 * 576 * 2),
        ({"sliding_window": 4096, "use_sliding_window": False}, 128 << 10),
        ({"sliding_window": None}, 128 << 10),
        ({"layer_types": ["full_attention"] * 32, "sliding_window": 4096}, 128 << 10),
    ],
)
def test_bytes_of_a_token(tmp_path: Path, changed: dict[str, object], num_bytes: int) -> None:
    config = write_config(tmp_path / "config.json", LLAMA | changed)
    assert read_token_bytes(config) == read_token_bytes(tmp_path) == num_bytes
    nested = write_config(tmp_path / "nested.json", {"text_config": LLAMA | changed, "vision_config": {}})
    assert read_token_bytes(nested) == num_bytes


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"sliding_window": 4096}, "sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"layer_types": ["linear_attention"]}, "layer_types"),
        ({"mamba_d_state": 128}, "mamba_d_state"),
        ({"model_type": "falcon", "multi_query": True}, "a model falcon is, is not known"),
        ({"multi_query": True, "num_key_value_heads": None}, "multi_query"),
        ({"model_type": "recurrent_gemma"}, "recurrent_gemma"),
        ({"model_type": None}, "model_type"),
        ({"model_type": 3}, "model_type"),
        ({"hybrid_override_pattern": "M-M*"}, "hybrid_override_pattern"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"torch_dtype": "float8"}, "torch_dtype"),
        ({"num_hidden_layers": 1024, "num_key_value_heads": 1 << 18}, "no model has so many"),
    ],
)
def test_a_model_whose_tokens_cannot_be_sized_is_refused(tmp_path: Path, changed: dict[str, object], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        read_token_bytes(write_config(tmp_path / "config.json", LLAMA | changed))


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000])
def test_what_is_no_config_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(InvalidInput, match=str(path)):
        read_token_bytes(path)


# --- paces ------------------------------------------------------------------------------------------------------------


@given(
    base_ms=st.floats(0.1, 100),
    slope_ms=st.floats(0, 1),
    blocks=st.lists(st.integers(1, 500), min_size=2, max_size=5, unique=True),
)
def test_a_fit_finds_what_the_points_were_made_of(base_ms: float, slope_ms: float, blocks: list[int]) -> None:
    made = ComputeCost(base_ms / 1e3, slope_ms / 1e3)
    points = tuple((64 * number, 1e3 * made.row_s(0, number)) for number in blocks)
    found = paces.fit(points, block_tokens=64)
    for number in blocks:
        assert found.row_s(0, number) == pytest.approx(made.row_s(0, number), rel=1e-3)


def test_a_fit_of_one_point_and_of_noise() -> None:
    assert paces.fit(((640, 100.0),), block_tokens=64).base_s == pytest.approx(0.01)
    noisy = paces.fit(((640, 100.0), (1280, 150.0)), block_tokens=64)  # the longer the cheaper: not so
    assert noisy.slope_s == 0
    assert 0.0075 < noisy.base_s < 0.01
    steep = paces.fit(((640, 1.0), (1280, 100.0)), block_tokens=64)
    assert steep.base_s == 0 < steep.slope_s


@pytest.mark.parametrize("text", ["", "1", "1:2:3", "a:1", "1:x", "1.5:2", "1:2,"])
def test_points_that_are_none(text: str) -> None:
    with pytest.raises(InvalidConfig, match="TOKENS:MS"):
        paces.read_points(text)


@pytest.mark.parametrize(
    "points",
    [(), ((0, 1.0),), ((1, 0.0),), ((1, math.nan),), ((1, math.inf),), ((-1, 1.0),), ((10**400, 1.0),), ((1, 1e300),)],
)
def test_points_that_make_no_sense(points: paces.Points) -> None:
    with pytest.raises(InvalidConfig):
        paces.fit(points, block_tokens=64)


def test_our_own_measurements_are_understood() -> None:
    files = [RESULTS / f"{name}.json" for name in ("store", "pool", "h200-ttft")]
    found = paces.read_files(files)
    stored = json.loads(files[0].read_text())
    assert found.tiers["host"] == paces.Pace(stored["read_gbs"], str(files[0]))
    assert found.tiers["disk"].gbs == stored["disk_read_gbs"]
    assert found.tiers["pool"].source == str(files[1])
    assert [tokens for tokens, _ in found.prefill] == [512, 2048, 8192, 32768]
    assert found.shape == paces.H200_SHAPE
    assert paces.pace("disk", None, found).gbs == stored["disk_read_gbs"]
    assert paces.pace("disk", 7.0, found) == paces.Pace(7.0, paces.GIVEN)
    assert paces.pace("disk", None, paces.Measured()).source == paces.ASSUMED


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ("", "not JSON"),
        ([], "understood"),
        ({"command": "headwater bench index"}, "understood"),
        ({"command": "headwater bench store"}, "not what bench store prints"),
        ({"command": "bench store", "read_gbs": 0, "disk_read_gbs": 1}, "not what bench store prints"),
        ({"command": "bench store", "read_gbs": None, "disk_read_gbs": 1}, "not what bench store prints"),
        ({"command": "bench pool", "rows": []}, "no pool was measured"),
        ({"command": "bench pool", "rows": [1]}, "not what bench pool prints"),
        ({"command": "bench ttft", "lengths": [{}]}, "not what bench ttft prints"),
        ({"command": "bench ttft", "lengths": []}, "no prompt was measured"),
        ({"command": "bench ttft", "lengths": [{"tokens": math.inf, "cold_ms": 1}]}, "not what bench ttft prints"),
        ({"command": "bench ttft", "lengths": [{"tokens": 1, "cold_ms": 1}]}, "not what bench ttft prints"),
    ],
)
def test_measurements_that_are_none(tmp_path: Path, found: object, says: str) -> None:
    path = tmp_path / "found.json"
    path.write_text(json.dumps(found) if found != "" else "")
    with pytest.raises(InvalidInput, match=says) as raised:
        paces.read_files([path])
    assert str(path) in str(raised.value)


# --- plans ------------------------------------------------------------------------------------------------------------


def test_a_plan_says_what_a_replay_of_those_sizes_says(free: Plan) -> None:
    found = survey(CHAT)
    for amounts, row in free.rows.items():
        stores = tuple(
            ReplayStore(name=tier, blocks=round(size * GIB / BLOCK_BYTES), gbs=PACES[tier].gbs)
            for tier, size in zip(paces.TIERS, amounts, strict=True)
            if size
        )
        setup = ReplaySetup(
            policy="value",
            blocks=64,
            stores=stores,
            block_bytes=BLOCK_BYTES,
            compute_base_s=0.01,
            step_blocks=8192 // CHAT.block_tokens,
        )
        assert replay(CHAT, setup, survey=found).document()["hit_ratio"] == row.outcome.document()["hit_ratio"]


def test_what_is_tried(free: Plan) -> None:
    small, large, disk = (number * BLOCK_BYTES / GIB for number in (64, 128, 256))
    alone = {(0, 0, 0), (small, 0, 0), (large, 0, 0), (0, disk, 0)}
    assert alone <= set(free.rows)
    assert set(free.rows) - alone <= {(small, disk, 0), (large, disk, 0)}
    assert [row.amounts[0] for row in free.curve("host")] == [0, small, large]
    assert [row.amounts for row in free.curve("pool")] == [(0, 0, 0)]


def test_money_is_seconds_and_sizes(free: Plan) -> None:
    span_s = free.survey.span_s
    saved_s = free.best.outcome.saved_s - free.device.outcome.saved_s
    assert saved_s > 0
    assert free.best.gained == pytest.approx(saved_s / span_s * HOURS_A_MONTH * 2.0)
    assert (free.best.spent, free.device.gained, free.device.net) == (0, 0, 0)
    assert free.best.net == max(row.net for row in free.rows.values())
    assert answer.sentence(free).startswith("Take ")
    prices = Prices(gpu_hour=2.0, gib_month={"host": 10.0, "disk": 1.0, "pool": 0.0})
    paid = make_plan(CHAT, options(prices=prices))
    for amounts, row in paid.rows.items():
        assert row.spent == pytest.approx(10 * amounts[0] + amounts[1])
        if amounts in free.rows:
            assert row.gained == pytest.approx(free.rows[amounts].gained)


def test_what_does_not_pay_is_not_bought() -> None:
    prices = Prices(gpu_hour=1e-6, gib_month={"host": 1e6, "disk": 1e6, "pool": 1e6})
    dear = make_plan(CHAT, options(prices=prices))
    assert dear.best is dear.device
    assert dear.tried == ["host", "disk"]
    assert all(dear.knee(tier) == 0 for tier in dear.tried)
    assert answer.sentence(dear).startswith("Buy nothing at these prices")
    assert answer.agree(dear) is None
    assert "host memory alone does not pay" in answer.remarks(dear)
    nothing = make_plan(CHAT, options(sizes={}))
    assert answer.sentence(nothing) == "No size was tried."


def test_a_knee_is_one_only_where_a_larger_size_was_tried(free: Plan) -> None:
    for tier in free.tried:
        rows = free.curve(tier)
        largest = rows[-1]
        if all(row.net < largest.net for row in rows[:-1]):
            assert free.knee(tier) is None
            assert any("the largest that was tried" in remark for remark in answer.remarks(free))
        else:
            assert free.knee(tier) == max(rows, key=lambda row: row.net).amounts[paces.TIERS.index(tier)]


def test_a_half_without_a_block_is_not_asked() -> None:
    class Late(Synthetic):
        def records(self) -> Iterator[TraceRecord]:
            yield from (TraceRecord(i, 0, 1, ()) for i in range(100))
            yield from (
                one._replace(timestamp_ms=one.timestamp_ms + 100) for one in itertools.islice(CHAT.records(), 90)
            )

    found = make_plan(Late("chat", 1), options())
    assert found.halves == ()
    assert any(found.best.amounts)
    assert "the trace is too short to ask its halves" in answer.sentence(found)


def test_several_processes_say_the_same(free: Plan) -> None:
    told: list[tuple[str, int, int]] = []
    several = make_plan(CHAT, options(jobs=2), tell=lambda *one: told.append(one))
    documents = [answer.document(plan) for plan in (free, several)]
    assert documents[0] == documents[1]
    replays = [(done, total) for stage, done, total in told if stage == "replays"]
    assert replays[-1][0] == replays[-1][1] == len(replays)


def test_halves_are_halves(free: Plan) -> None:
    assert len(free.halves) == 2
    assert sum(half.outcome.num_requests for half in free.halves) == free.survey.num_requests
    assert {half.amounts for half in free.halves} == {free.best.amounts}
    assert answer.agree(free) == all(half.net > 0 for half in free.halves)


def test_a_trace_of_minutes_says_so() -> None:
    short = make_plan(Synthetic("chat", 40, seed=3), options())
    assert short.survey.span_s < 3000
    assert any("of trace say little about a month" in remark for remark in answer.remarks(short))
    assert "of trace;" in answer.sentence(short)


def test_a_process_that_is_killed_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.lab.plan.search._play", _dies)
    with pytest.raises(HeadwaterError, match="--jobs 1"):
        make_plan(CHAT, options(jobs=2))


def _dies(*args: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_trace_of_one_moment_is_refused() -> None:
    with pytest.raises(InvalidInput, match="one moment"):
        make_plan(Synthetic("chat", 1), options())


# --- the command ------------------------------------------------------------------------------------------------------


def invoke(*args: object) -> Result:
    return CliRunner().invoke(app, ["plan", *(str(arg) for arg in args)])


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "trace.jsonl"
    lines = [
        {
            "timestamp": record.timestamp_ms,
            "input_length": record.input_tokens,
            "output_length": record.output_tokens,
            "hash_ids": record.ids,
        }
        for record in CHAT.records()
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


QUICK = ("--host-gib", "4,8", "--disk-gib", "16", "--pool-gib", "0", "--device-gib", "4", "--jobs", "1")


def test_the_command(trace: Path, tmp_path: Path) -> None:
    drawn = tmp_path / "plan.html"
    told = invoke(trace, *QUICK, "--json", "--plot", drawn)
    assert told.exit_code == 0, told.stderr
    document = json.loads(told.stdout)
    assert document["command"] == "plan"
    assert [row["host_gib"] for row in document["alone"]["host"]] == [0, 4, 8]
    assert document["options"]["paces"]["disk"] == {"gbs": 3.0, "source": "assumed"}
    written = drawn.read_text()
    assert "<svg" in written
    assert document["recommendation"] in written
    assert "http://" not in written.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", ""
    )  # names of XML, and nothing to fetch
    shown = invoke(trace, *QUICK)
    assert shown.exit_code == 0
    assert document["recommendation"] in shown.stdout
    for remark in document["remarks"]:
        assert remark in shown.stdout
        assert html.escape(remark) in written
    assert "assumed, not measured here" in shown.stdout
    png = tmp_path / "plan.png"
    assert invoke(trace, *QUICK, "--plot", png).exit_code == 0
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--host-gib", "x"), "--host-gib"),
        (("--block-tokens", "0"), "a block has a positive number of tokens"),
        (("--prefill", "9" * 400 + ":1"), "a measured prompt has tokens and milliseconds"),
        (("--host-gib", "-1"), "--host-gib is a positive number"),
        (("--host-gib", "0.0001"), "--host-gib 0.0001: a block of the trace has"),
        (("--device-gib", "nan"), "--device-gib"),
        (("--disk-gbs", "0"), "--disk-gbs"),
        (("--gpu-price", "-1"), "--gpu-price"),
        (("--jobs", "0"), "--jobs"),
        (("--policy", "nope"), "nope"),
        (("--prefill", "1"), "TOKENS:MS"),
        (("--token-bytes", "1000"), "what does this model take to compute?"),
        (("--token-bytes", "0", "--prefill", "512:10"), "a token has at least one byte"),
        (("--model", "nowhere", "--token-bytes", "3"), "give one"),
        (("--model", "nowhere", "--prefill", "512:10"), "nowhere"),
        (("--paces", "nowhere"), "nowhere"),
        (("--plot", "plan.doc"), ".html"),
    ],
)
def test_what_cannot_be_planned_is_one_line(trace: Path, args: tuple[str, ...], says: str) -> None:
    found = invoke(trace, *QUICK, *args)
    assert found.exit_code == 1
    assert found.stdout == ""
    assert found.stderr.count("\n") == 1
    assert says in found.stderr


def test_what_another_model_takes_says_nothing_of_this_one(trace: Path, tmp_path: Path) -> None:
    found = json.loads((RESULTS / "h200-ttft.json").read_text())
    paces_of = tmp_path / "ttft.json"
    paces_of.write_text(json.dumps(found | {"options": found["options"] | {"shape": "tiny"}}))
    refused = invoke(trace, *QUICK, "--paces", paces_of)
    assert refused.exit_code == 1
    assert "measured a model tiny" in refused.stderr
    assert invoke(trace, *QUICK, "--paces", paces_of, "--token-bytes", "131072").exit_code == 0
    assert invoke(trace, *QUICK, "--paces", RESULTS / "h200-ttft.json").exit_code == 0


def test_a_trace_that_cannot_be_read_twice_is_refused() -> None:
    found = invoke("/dev/null", *QUICK)
    assert found.exit_code == 1
    assert "read several times" in found.stderr


def test_blocks_that_are_not_full_are_not_sold(tmp_path: Path) -> None:
    path = tmp_path / "short.jsonl"
    lines = [{"timestamp": i, "input_length": 100, "output_length": 1, "hash_ids": [i % 7]} for i in range(50)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = invoke(path, *QUICK)
    assert found.exit_code == 1
    assert "no block is requested" in found.stderr


def test_no_size_among_others_is_none(trace: Path) -> None:
    found = invoke(trace, *QUICK, "--host-gib", "0,4", "--json")
    assert [row["host_gib"] for row in json.loads(found.stdout)["alone"]["host"]] == [0, 4]


def test_without_matplotlib_a_picture_is_refused_first(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    found = invoke(trace, *QUICK, "--plot", "plan.png")
    assert found.exit_code == 1
    assert "headwater[plot]" in found.stderr
