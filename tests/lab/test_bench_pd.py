"""`headwater bench pd`: what it asks, counts and compares, and that it sees what is wrong. Never how fast."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from typer.testing import CliRunner

from headwater.cli import app
from headwater.core.errors import HeadwaterError, InvalidConfig, InvalidInput
from headwater.lab.bench import pd
from headwater.lab.bench.client import BenchClient
from headwater.lab.bench.pd import AskedBoth, PdOptions
from headwater.lab.bench.pd_load import ReplayedPlan, TimedAnswer, ask, body_of, percentile, plan, prompt_of, replay
from headwater.lab.bench.pd_steady import figures, median_of, note, time_per_token
from headwater.lab.bench.report import BenchReport, Samples
from headwater.lab.replay.synthetic import Synthetic
from headwater.lab.replay.trace import Trace, TraceRecord

ANSWER = TimedAnswer(
    text="yes",
    num_tokens=3,
    prompt_tokens=100,
    cached_tokens=96,
    computed_tokens=2,
    ttft_s=0.5,
    last_s=0.9,
    phases={"queue_s": 0.1, "pool_write_s": 0.03, "pool_read_s": 0.02, "decode_s": 0.4},
)


def test_both_set_ups_answer_the_same_and_bytes_go_through_the_pool() -> None:
    arguments = ["--shape", "demo", "--lengths", "40,100", "--rounds", "1", "--max-tokens", "4", "--streams", "1"]
    arguments += ["--pairs", "1", "--load-every-ms", "150", "--requests", "4", "--rate", "20"]
    found = CliRunner().invoke(app, ["bench", "pd", *arguments, "--json"])
    assert found.exit_code == 0, found.output
    document = json.loads(found.stdout)
    assert document["command"] == "bench pd"
    assert document["answers_equal"] is True
    assert document["errors"] == []
    assert [row["tokens"] for row in document["lengths"]] == [40, 100]
    for name in ("ttft_mixed_ms", "ttft_pd_ms", "tpot_mixed_ms", "tpot_pd_ms", "load_ms", "tpot_while_loading_ratio"):
        assert document[name] > 0, name
    assert 0 < document["pool_share"] < 1
    low, high = (document[f"tpot_while_loading_ratio_{end}"] for end in ("low", "high"))
    assert low <= document["tpot_while_loading_ratio"] <= high
    for setup in ("mixed", "pd"):
        assert document["replay"][setup]["answers"] == 4
    assert document["replay"]["mixed"]["prompt_tokens"] == document["replay"]["pd"]["prompt_tokens"] > 0
    assert document["replay"]["mixed"]["pool_share_p50"] == 0 < document["replay"]["pd"]["pool_share_p50"]
    # Tails go through the pool too; a set-up of one node reads nothing back. More may be read than was written: two
    # requests at once that share a page both read it.
    moved = document["bytes_moved"]
    assert moved["from_pool"] > 0
    assert moved["to_pool"] > 0
    assert document["bytes_moved_mixed"]["to_pool"] > 0 == document["bytes_moved_mixed"]["from_pool"]


def test_a_set_up_that_does_not_start_is_one_line_that_says_why() -> None:
    found = CliRunner().invoke(app, ["bench", "pd", "--model", "/nowhere", "--json"])
    assert found.exit_code == 1
    assert found.stdout == ""
    assert "did not start" in found.stderr
    assert "/nowhere" in found.stderr


@pytest.mark.parametrize(
    "options",
    [
        {"shape": "giant"},
        {"kind": "song"},
        {"pool": "ftp://somewhere"},
        {"rounds": 0},
        {"lengths": (2048, 0)},
        {"scale": 0.0},
        {"rate_per_s": 0.0},
        {"load_every_s": 0.0},
        {"max_tokens": 1},
    ],
)
def test_nonsense_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig):
        PdOptions(**options)


@pytest.mark.parametrize("equal", [True, False])
def test_the_command_fails_if_answers_differ(equal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(options: PdOptions, **more: Any) -> BenchReport:
        return BenchReport(command="bench pd", options={}, results={"answers_equal": equal}, notes={}, samples={})

    monkeypatch.setattr(pd, "run", run)
    for arguments in ([], ["--json"]):
        found = CliRunner().invoke(app, ["bench", "pd", *arguments])
        assert found.exit_code == (0 if equal else 1)
        assert "answers_equal" in found.stdout


# --- figures ----------------------------------------------------------------------------------------------------------


def test_another_answer_is_seen() -> None:
    asked = [AskedBoth(100, ANSWER, ANSWER)]
    same = {setup: ReplayedPlan([ANSWER, ANSWER], [], 1.0) for setup in ("mixed", "pd")}
    assert pd.difference(asked, same) is None
    other = replace(ANSWER, text="yes.")
    assert "prompt 1 of 7 tokens" in (pd.difference([*asked, AskedBoth(7, ANSWER, other)], same) or "")
    for answer, said in ((other, "by two"), (None, "no answer")):
        for setup in ("mixed", "pd"):
            found = pd.difference(asked, {**same, setup: ReplayedPlan([ANSWER, answer], [], 1.0)})
            assert found is not None
            assert "replayed request 1" in found
            assert setup == "mixed" or said in found


def test_the_pools_share_is_of_long_prompts() -> None:
    slow = replace(ANSWER, ttft_s=1.0, last_s=1.6)
    asked = [AskedBoth(512, ANSWER, ANSWER), *(AskedBoth(2048, ANSWER, slow) for _ in range(3))]
    found = pd.figures_alone(asked)
    assert found["pool_share"] == pytest.approx(0.05)
    assert found["pool_share_high"] == pytest.approx(0.05)
    assert (found["ttft_mixed_ms"], found["ttft_pd_ms"]) == pytest.approx((500, 1000))
    assert (found["tpot_mixed_ms"], found["tpot_pd_ms"]) == pytest.approx((200, 300))
    assert [row["tokens"] for row in found["lengths"]] == [512, 2048]
    assert found["lengths"][0]["pool_share"] == pytest.approx(0.1)
    assert pd.figures_alone(asked[:1])["pool_share"] == pytest.approx(0.1)  # none is long: all of them


def test_time_per_token_is_of_the_window_and_of_no_break() -> None:
    first, second = [0.0, 1.0, 2.0, 3.0, 9.0, 9.5, 10.0], [0.5, 2.5, 4.5]
    assert time_per_token([first, second], [[], []], (0.0, 4.0)) == pytest.approx((1 + 1 + 1 + 2) / 4)
    assert time_per_token([first, second], [[], []], (0.0, 20.0)) == pytest.approx((10 + 4) / 8)
    assert time_per_token([first, second], [[5.0], []], (0.0, 20.0)) == pytest.approx((3 + 1 + 4) / 7)
    assert time_per_token([first, second], [[], []], (2.1, 4.0)) is None
    assert time_per_token([[], []], [[], []], (0.0, 4.0)) is None


def test_ratios_are_of_neighbours() -> None:
    samples = Samples()

    def pair(idle_s: float, loading_s: float, prefilling_s: float | None) -> None:
        windows = {"prefilling": (0.0, 100.0), "idle": (100.0, 200.0), "loading": (200.0, 300.0)}
        times_s = [100 + at * idle_s for at in range(6)] + [200 + at * loading_s for at in range(6)]
        times_s += [] if prefilling_s is None else [at * prefilling_s for at in range(6)]
        note(samples, [sorted(times_s)], [[]], windows)

    pair(10, 11, 15)
    pair(19, 19.95, None)
    pair(1, 1.2, 1)
    pair(1, 90, 1)  # too few tokens while loading to say anything
    samples.add("load_ms", 7)
    found = figures(samples)
    assert found["tpot_while_loading_ratio"] == pytest.approx(1.1)
    assert (found["tpot_while_loading_ratio_low"], found["tpot_while_loading_ratio_high"]) == pytest.approx((1.05, 1.2))
    assert found["tpot_while_prefilling_ratio"] == pytest.approx(1.25)
    assert (found["tpot_idle_ms"], found["load_ms"]) == (pytest.approx(10_000), 7)
    with pytest.raises(HeadwaterError, match="next to nothing"):
        figures(Samples())


def test_the_interval_narrows_with_more_values() -> None:
    assert median_of([3.0]) == (3.0, 3.0, 3.0)
    assert median_of([1.0, 2.0]) == (1.5, 1.0, 2.0)
    middle, low, high = median_of([float(i) for i in range(100)])
    assert middle == 49.5
    assert (low, high) == (39.0, 60.0)  # the 40th and 61st of 100: the binomial's 95 %
    assert percentile([], 50) is None
    assert (percentile([4, 1, 3], 50), percentile(range(100), 95)) == (3, 95)


# --- what is asked ----------------------------------------------------------------------------------------------------


class Lines(Trace):
    """A trace of given lines."""

    def __init__(self, *records: TraceRecord) -> None:
        super().__init__("lines", block_tokens=512)
        self._records = records

    def records(self) -> Iterator[TraceRecord]:
        yield from self._records


def test_a_plan_keeps_what_prompts_share_and_who_comes_together() -> None:
    trace = Lines(
        TraceRecord(1000, 1100, 100, (7, 8, 9)),
        TraceRecord(1000, 1536, 1, (7, 8, 10)),
        TraceRecord(4000, 600, 900, (7, 11)),
        TraceRecord(5000, 1, 1, (12,)),
    )
    asked = plan(trace, num_requests=3, scale=1 / 16, max_prompt=90, max_tokens=20, rate_per_s=0.5)
    assert [one.at_s for one in asked] == pytest.approx([0, 0, 4])  # two gaps at a request in two seconds
    assert [len(one.prompt) for one in asked] == [69, 90, 38]
    assert [one.max_tokens for one in asked] == [6, 2, 20]
    first, second, third = (one.prompt for one in asked)
    assert first[:64] == second[:64]  # two blocks of 512 tokens, at a sixteenth
    assert first[64:] != second[64:69]
    assert third[:32] == first[:32]
    assert third[32:] != first[32:38]
    assert asked == plan(trace, num_requests=3, scale=1 / 16, max_prompt=90, max_tokens=20, rate_per_s=0.5)
    together = plan(Lines(*trace._records[:2]), num_requests=9, scale=1, max_prompt=9, max_tokens=9, rate_per_s=1)
    assert [one.at_s for one in together] == [0, 0]
    with pytest.raises(InvalidInput):
        plan(Lines(), num_requests=3, scale=1, max_prompt=9, max_tokens=9, rate_per_s=1)


@pytest.mark.parametrize("scale", [1 / 345, 1 / 16, 1.0])
def test_prompts_of_any_scale_have_their_length(scale: float) -> None:
    trace = Synthetic("chat", 20)
    asked = plan(trace, num_requests=20, scale=scale, max_prompt=700, max_tokens=8, rate_per_s=1)
    wanted = [max(1, min(700, round(record.input_tokens * scale))) for record in trace.records()]
    assert [len(one.prompt) for one in asked] == wanted


# --- over HTTP --------------------------------------------------------------------------------------------------------


@contextmanager
def serving(status: int, *events: object) -> Iterator[str]:
    """A server that always says the same."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.end_headers()
            for event in events:
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())

        def log_message(self, *what: object) -> None:
            return

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


USAGE = {
    "prompt_tokens": 3,
    "completion_tokens": 2,
    "prompt_tokens_details": {"cached_tokens": 0},
    "headwater": {"computed_tokens": 4, "phases": {"pool_read_s": 0.25, "pool_write_s": 0.5, "decode_s": 9}},
}
PIECE = {"choices": [{"text": "a", "finish_reason": None}], "usage": None}
END = {"choices": [{"text": "", "finish_reason": "length"}], "usage": None}
LAST = {"choices": [], "usage": USAGE}


def test_an_answer_is_read_to_its_end() -> None:
    with serving(200, PIECE, PIECE, END, LAST) as url:
        answer = ask(url, body_of((1, 2, 3), max_tokens=2, salt="x"))
    assert (answer.text, answer.num_tokens, answer.computed_tokens) == ("aa", 2, 4)
    assert answer.pool_s == pytest.approx(0.75)
    assert 0 < answer.ttft_s <= answer.last_s
    assert answer.tpot_s == answer.last_s - answer.ttft_s


@pytest.mark.parametrize(
    ("status", "events", "why"),
    [
        (200, (PIECE, END), "ended before"),
        (200, (PIECE, LAST), "ended before"),
        (200, (END, LAST), "ended before"),
        (200, (PIECE, {"error": {"message": "the pool is gone"}}), "the pool is gone"),
        (502, ({"error": {"message": "no block 3"}},), "status 502.*no block 3"),
    ],
)
def test_half_an_answer_is_an_error(status: int, events: tuple[object, ...], why: str) -> None:
    with serving(status, *events) as url:
        with pytest.raises(HeadwaterError, match=why):
            ask(url, body_of((1, 2, 3), max_tokens=2, salt="x"))
        asked = plan(Synthetic("chat", 2), num_requests=2, scale=1, max_prompt=9, max_tokens=2, rate_per_s=100)
        found = replay(url, asked, stage="replay", salt="x", tell=None)
    assert list(found.answers) == [None, None]
    assert len(found.errors) == 2
    assert found.figures()["answers"] == 0


def test_nobody_there_is_an_error() -> None:
    with serving(200) as url:
        pass
    with pytest.raises(HeadwaterError, match="Refused"):
        ask(url, body_of((1, 2, 3), max_tokens=2, salt="x"))
    with BenchClient(url) as client, pytest.raises(OSError, match="refused"):
        client.metrics()


def test_prompts_follow_from_their_seed() -> None:
    assert prompt_of(50, seed="a") == prompt_of(50, seed="a") != prompt_of(50, seed="b")
    assert all(0x20 <= token < 0x7F for token in prompt_of(500, seed="a"))
