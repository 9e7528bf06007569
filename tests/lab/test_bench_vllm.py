"""The benchmark under vLLM, without one: its arithmetic, the protocol of its workers, what it says of trouble.

The engines here are made up: they keep prompts as vLLM and a connector would, answer at once, and name times that they
were told. The process, the pipes and the commands are the real ones.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from headwater.cli import app
from headwater.core.errors import HeadwaterError, InvalidConfig
from headwater.lab.bench import vllm, vllm_client, vllm_contenders
from headwater.lab.bench.pool_ways import NotHere
from headwater.lab.bench.vllm_client import EngineProcess, WorkerFailed
from headwater.lab.bench.vllm_contenders import OURS, PLAIN, VllmContender
from headwater.lab.bench.vllm_figures import ContenderCourse, differences, length_figures, median_interval, middle_half

# What a made-up engine takes: `ttft_s` from its own cache, the connector, and computed; and what is wrong with it.
FAKE = """
import sys; sys.path.insert(0, {sources!r})
import hashlib, os, time
import headwater.lab.bench.vllm_worker as worker

class Engine:
    def __init__(self, setup):
        self.traits = {traits!r}
        if "start" in self.traits:
            raise RuntimeError("no room for the KV cache")
        self.local, self.stored = [], []
        print("noise on standard output")

    def stats(self):
        return dict(vllm="9", torch="9", num_threads=1)

    def generate(self, prompt, max_tokens):
        def shared(kept):
            found = [sum(1 for _ in iter_equal(prompt, other)) // 128 * 128 for other in kept]
            return min(max(found, default=0), (len(prompt) - 1) // 128 * 128)
        def iter_equal(a, b):
            for x, y in zip(a, b):
                if x != y:
                    return
                yield x
        if "dies" in self.traits and len(self.stored) > 1:
            os._exit(3)
        if "hangs" in self.traits and len(self.stored) > 1:
            time.sleep(60)
        local, stored = shared(self.local), shared(self.stored) if self.traits["connector"] else 0
        external = max(0, stored - local - (128 if "partial" in self.traits else 0))
        self.local.append(prompt); self.stored.append(prompt)
        tokens = list(hashlib.sha256(repr(prompt).encode()).digest()[:max_tokens])
        if "wrong" in self.traits and external:
            tokens[-1] += 1
        cached = local + external - (128 if "short" in self.traits and external else 0)
        times = self.traits["times"]
        return dict(ttft_s=times["stored" if external else "local" if cached else "cold"], tokens=tokens,
                    cached_tokens=cached, external_tokens=external)

    def rest(self):
        return dict(quiet=True)

    def reset(self):
        if "keeps" in self.traits:
            return dict(reset=False)
        if "stale" not in self.traits:
            self.local = []
        return dict(reset=True)

worker.VllmEngine = Engine
worker.main()
"""
TIMES = {
    PLAIN: {"cold": 2.0, "local": 0.125},
    "offloading": {"cold": 2.0, "local": 0.125, "stored": 0.25},
    OURS: {"cold": 2.5, "local": 0.125, "stored": 0.1875},
}
SOURCES = str(Path(vllm.__file__).parents[3])
SMALL = vllm.VllmOptions(
    contenders=("offloading", OURS), shape="tiny", lengths=(256, 512), rounds=4, pairs=6, pair_tokens=256
)


def fake(name: str, log: Path, *traits: str) -> EngineProcess:
    wrong: dict[str, Any] = dict.fromkeys(traits, True)
    script = FAKE.format(sources=SOURCES, traits={"times": TIMES[name], "connector": name != PLAIN, **wrong})
    return EngineProcess(name, [sys.executable, "-c", script, "{}"], settings={}, log=log)


@pytest.fixture
def traits(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[str, ...]]:
    """What is wrong with whom; made-up engines in the place of vLLM."""
    found: dict[str, tuple[str, ...]] = {}

    def start(
        contender: VllmContender, *, python: str, setup: Mapping[str, Any], threads: int, log: Path, **more: Any
    ) -> EngineProcess:
        return fake(contender.name, log, *found.get(contender.name, ()))

    monkeypatch.setattr(vllm, "start_worker", start)
    monkeypatch.setattr(vllm, "require_vllm", lambda _: None)
    monkeypatch.setattr(vllm, "_PAUSE_S", 0.0)
    return found


def run() -> dict[str, Any]:
    return vllm.run(SMALL).document()


def test_costs_are_above_a_local_hit(traits: dict[str, tuple[str, ...]]) -> None:
    found = run()
    for length in (256, 512):
        assert found[f"{length}_cold_ms"] == 2000
        assert found[f"{length}_local_ms"] == 125
        assert found[f"{length}_offloading_cost_ms"] == 125
        assert found[f"{length}_headwater_cost_ms"] == found[f"{length}_headwater_cost_low_ms"] == 62.5
        assert found[f"{length}_headwater_against_offloading_ms"] == -62.5
        assert found["samples"][f"{length}_headwater_ms"] == [187.5] * SMALL.rounds
    assert found["overhead"] == found["overhead_low"] == found["overhead_high"] == 1.25
    assert found["samples"]["on_ms"] == [2500] * SMALL.pairs
    assert (found["tokens_equal"], found["absent"]) == (True, {})
    assert set(found["discarded"].values()) == {0}
    json.dumps(found)


@pytest.mark.parametrize("trait", ["partial", "short", "stale"])
def test_a_hit_that_is_not_whole_or_not_theirs_counts_nowhere(traits: dict[str, tuple[str, ...]], trait: str) -> None:
    traits["offloading"] = (trait,)
    found = run()
    assert found["discarded"]["offloading"] == 2 * SMALL.rounds
    assert not [name for name in found if name.startswith("256_offloading")]
    assert found["256_headwater_cost_ms"] == 62.5


def test_wrong_tokens_are_seen(traits: dict[str, tuple[str, ...]]) -> None:
    traits[OURS] = ("wrong",)
    assert run()["tokens_equal"] is False


@pytest.mark.parametrize(
    ("trait", "why"),
    [("start", "no room for the KV cache"), ("dies", "is gone"), ("keeps", "does not let vLLM empty its prefix cache")],
)
def test_who_does_not_play_is_told_of(traits: dict[str, tuple[str, ...]], trait: str, why: str) -> None:
    traits["offloading"] = (trait,)
    found = run()
    assert why in found["absent"]["offloading"]
    assert "256_headwater_cost_ms" in found
    assert not [name for name in found if name.startswith("512_offloading")]


def test_without_vllm_itself_there_is_nothing_to_compare_with(traits: dict[str, tuple[str, ...]]) -> None:
    traits[PLAIN] = ("start",)
    with pytest.raises(HeadwaterError, match="no room"):
        run()


def test_an_engine_that_hangs_is_given_up(tmp_path: Path) -> None:
    worker = fake(PLAIN, tmp_path / "log", "hangs")
    try:
        worker.wait_up(60)
        for _ in range(2):
            worker.ask("generate", timeout_s=60, prompt=[1, 2], max_tokens=1)
        with pytest.raises(WorkerFailed, match=r"did not answer in 0.2 s: noise on standard output"):
            worker.ask("generate", timeout_s=0.2, prompt=[1, 2], max_tokens=1)
    finally:
        worker._process.kill()
        worker.close()


def test_an_engine_that_starts_ends_with_its_parent(tmp_path: Path) -> None:
    """The parent is killed while the engine is being made: nobody reads the pipe then, and yet nobody stays behind."""
    up = tmp_path / "up"
    slow = FAKE.format(sources=SOURCES, traits={}).replace(
        "self.traits = {}", f"open({str(up)!r}, 'w').close(); time.sleep(600)"
    )
    hold = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {slow!r}, '{{}}'], stdin=subprocess.PIPE)"
    parent = subprocess.Popen([sys.executable, "-c", hold])
    until_s = time.monotonic() + 60
    while not up.exists():
        assert time.monotonic() < until_s
        time.sleep(0.02)
    (worker,) = (Path("/proc") / str(parent.pid) / "task" / str(parent.pid) / "children").read_text().split()
    parent.kill()
    parent.wait()
    while (Path("/proc") / worker).exists():
        assert time.monotonic() < until_s, "it stayed behind"
        time.sleep(0.05)


def test_a_command_that_fails_is_answered(tmp_path: Path) -> None:
    worker = fake(PLAIN, tmp_path / "log")
    try:
        worker.wait_up(60)
        with pytest.raises(WorkerFailed, match="AttributeError"):
            worker.ask("fly", timeout_s=60)
        assert worker.ask("reset", timeout_s=60) == {"reset": True}
        long = list(range(200_000))  # more than a pipe takes at once
        assert worker.ask("generate", timeout_s=60, prompt=long, max_tokens=2)["cached_tokens"] == 0
    finally:
        worker.close()


def test_without_vllm_it_is_one_line() -> None:
    found = CliRunner().invoke(app, ["bench", "vllm", "--json"])
    assert found.exit_code == 1
    assert not found.stdout
    assert f"headwater: {sys.executable} has no vLLM: `make vllm-venv`" in " ".join(found.stderr.split())
    found = CliRunner().invoke(app, ["bench", "vllm", "--python", "/nowhere/python", "--json"])
    assert found.exit_code == 1
    assert "cannot be started" in found.stderr


@pytest.mark.parametrize(
    "change",
    [{"contenders": ("redis",)}, {"lengths": (100,)}, {"lengths": ()}, {"rounds": 0}, {"pairs": -1}, {"shape": "9b"}],
)
def test_what_cannot_be_measured_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig):
        vllm.VllmOptions(**change)


def test_lmcache_that_is_not_there(tmp_path: Path) -> None:
    with (
        pytest.raises(NotHere, match="make vllm-peers"),
        vllm_contenders.open_contender("lmcache", python=sys.executable, lmcache=tmp_path, room_bytes=1 << 30),
    ):
        pass
    (tmp_path / "lmcache").mkdir()  # there, but no LMCache in it
    with (
        pytest.raises(NotHere, match=r"does not start: .*No module named"),
        vllm_contenders.open_contender("lmcache-shm", python=sys.executable, lmcache=tmp_path, room_bytes=1 << 30),
    ):
        pass


def test_ours_leaves_nothing_behind() -> None:
    with vllm_contenders.open_contender(OURS, python="", lmcache=Path(), room_bytes=1 << 20) as contender:
        assert contender.transfer is not None
        extra = contender.transfer["kv_connector_extra_config"]
        places = [Path(extra[name]).parent for name in ("host_directory", "disk_directory")]
        assert all(place.is_dir() for place in places)
    assert not any(place.exists() for place in places)


def test_workers_run_this_package_wherever_they_run() -> None:
    *_, start, setup = vllm_client.worker_command("python", ["/peer"], {"kv_gib": 1})
    assert SOURCES in start
    assert "'/peer'" in start
    assert json.loads(setup) == {"kv_gib": 1}
    assert os.path.samefile(vllm_client.SOURCES, SOURCES)


# --- arithmetic -------------------------------------------------------------------------------------------------------

seconds = st.floats(0.001, 100)


@given(st.lists(seconds, min_size=1, max_size=40))
def test_intervals_hold_their_median(values: list[float]) -> None:
    for spread in (middle_half(values), median_interval(values)):
        assert spread.low <= spread.median <= spread.high
        assert spread.median == statistics.median(values)
        assert {spread.low, spread.high} <= set(values)


def test_how_wide_an_interval_is() -> None:
    """As in every table of the sign test: of 6 values all, of 15 the 4th to the 12th, of 20 the 6th to the 15th."""
    expected = {1: (1, 1), 5: (1, 5), 6: (1, 6), 8: (1, 8), 9: (2, 8), 15: (4, 12), 20: (6, 15), 25: (8, 18)}
    for count, ranks in expected.items():
        spread = median_interval(range(1, count + 1))
        assert (spread.low, spread.high) == ranks, count
    assert (middle_half(range(1, 9)).low, middle_half(range(1, 9)).high) == (3, 6)
    for spread_of in (median_interval, middle_half):
        with pytest.raises(ValueError, match="nothing"):
            spread_of([])


@given(st.dictionaries(st.integers(0, 20), seconds), st.dictionaries(st.integers(0, 20), seconds))
def test_differences_are_within_rounds(of: dict[int, float], base: dict[int, float]) -> None:
    assert differences(of, base) == [of[number] - base[number] for number in sorted(of.keys() & base.keys())]


def test_noise_that_hits_a_round_hits_no_cost() -> None:
    """A machine that is ten times slower in half of the rounds moves medians, not differences."""
    slow = {number: 0.9 if number % 2 else 0.0 for number in range(10)}
    courses = {
        "local": ContenderCourse({number: 0.1 + more for number, more in slow.items()}),
        "theirs": ContenderCourse(
            {number: 0.3 + more for number, more in slow.items() if number != 3}, num_discarded=1
        ),
        "ours": ContenderCourse({number: 0.2 + more for number, more in slow.items()}),
        "never": ContenderCourse(num_discarded=10),
    }
    found = length_figures(64, courses, local="local", ours="ours")
    assert found["64_ours_cost_ms"] == pytest.approx(100)
    assert found["64_theirs_cost_ms"] == pytest.approx(200)
    assert found["64_theirs_cost_high_ms"] == pytest.approx(200)
    assert found["64_ours_against_theirs_ms"] == pytest.approx(-100)
    assert found["64_local_ms"] == pytest.approx(550)
    assert not [name for name in found if "never" in name or "local_cost" in name]
