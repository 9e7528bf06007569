"""The benchmark of contenders one after another, without a vLLM: its course, its arithmetic, what it says of trouble.

The engines here are made up: they keep prompts as vLLM and a connector would, and name times that they were told. The
process, the pipes and the commands are the real ones.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headwater.cli import app
from headwater.core.errors import HeadwaterError, InvalidConfig
from headwater.lab.bench import vllm_alone, vllm_models, vllm_stages
from headwater.lab.bench.vllm_client import EngineProcess, WorkerFailed, engine_settings
from headwater.lab.bench.vllm_contenders import OURS, PLAIN, VllmContender, open_contender
from headwater.lab.bench.vllm_table import ratios_of, summary_of, table_of

FAKE = """
import sys; sys.path.insert(0, {sources!r})
import os, time
import headwater.lab.bench.vllm_worker as worker

SIZE = 256

class Engine:
    def __init__(self, setup):
        self.traits = {traits!r}
        if "start" in self.traits:
            raise RuntimeError("no room for the KV cache")
        self.local, self.stored, self.number = [], [], 0

    def stats(self):
        return dict(vllm="9", torch="9", num_blocks=9, gpu="", block_tokens=16, layout="L", engine_start_s=1.5)

    def _shared(self, prompt, kept):
        def common(other):
            num = next((at for at, pair in enumerate(zip(prompt, other)) if pair[0] != pair[1]), len(prompt))
            return min(num, len(prompt) - 1) // SIZE * SIZE
        return max(map(common, kept), default=0)

    def generate(self, prompt, max_tokens=1, logprobs=None):
        if "dies" in self.traits and len(self.stored) > 6:
            os._exit(3)
        local = self._shared(prompt, self.local)
        external = max(0, self._shared(prompt, self.stored) - local) if self.traits["connector"] else 0
        external = max(0, external - SIZE) if "partial" in self.traits else external
        self.local.append(prompt); self.stored.append(prompt)
        took = self.traits["times"]["stored" if external else "local" if local else "cold"]
        likely = 0.5 + ("wrong" in self.traits and external > 0) + ("other" in self.traits and not local + external) / 4
        self.number += 1
        if "restless" in self.traits and not local:
            likely += self.number
        return dict(ttft_s=took, seconds=2 * took, tokens=[7] * max_tokens, logprobs=[{{"7": likely}}],
                    cached_tokens=local + external, external_tokens=external)

    def rest(self, within_s=20.0):
        return dict(quiet=True)

    def empty(self, rest_s, within_s):
        if "keeps" not in self.traits:
            self.local = []
        return dict(reset="keeps" not in self.traits)

    def batch(self, prompts, max_tokens, give_up_s):
        found = [self.generate(prompt, max_tokens) for prompt in prompts]
        return dict(over=True, seconds=sum(one["seconds"] for one in found), tokens=[one["tokens"] for one in found],
                    external_tokens=sum(one["external_tokens"] for one in found))

    def stream(self, prompts, width, max_tokens, give_up_s, running=(), running_tokens=0):
        found = [self.generate(prompt, max_tokens) for prompt in prompts]
        token_s = dict(num=9, mean=0.01, p50=0.01, p99=0.02, max=0.03) if running else {{}}
        return dict(over="slow" not in self.traits, seconds=1.0, prompts=len(found), tokens_per_s=1000.0,
                    ttft_s=dict(p50=0.5) if found else {{}}, token_s=token_s,
                    external_tokens=sum(one["external_tokens"] for one in found))

worker.VllmEngine = Engine
worker.main()
"""
TIMES = {
    PLAIN: {"cold": 2.0, "local": 0.125},
    "offloading": {"cold": 2.0, "local": 0.125, "stored": 0.25},
    OURS: {"cold": 2.5, "local": 0.125, "stored": 0.1875},
}
SOURCES = str(Path(vllm_alone.__file__).parents[3])


def options(**more: Any) -> vllm_stages.StageOptions:
    return vllm_stages.StageOptions(
        **{
            "python": sys.executable,
            "device": "cpu",
            "contenders": (PLAIN, OURS, "offloading"),
            "shape": "tiny",
            "lengths": (256, 512),
            "repeats": 2,
            "crowds": (3,),
            "crowd_tokens": 256,
            "others_tokens": 256,
            "fresh_tokens": 256,
            "fresh": 2,
            "room_gib": 0.01,
            "seconds": 120.0,
            "warm": False,
            **more,
        }
    )


@pytest.fixture
def traits(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[str, ...]]:
    """What is wrong with whom; made-up engines in the place of vLLM, and no weights."""
    found: dict[str, tuple[str, ...]] = {}

    def start(contender: VllmContender, *, log: Path, **more: Any) -> EngineProcess:
        name = contender.name
        wrong: dict[str, Any] = dict.fromkeys(found.get(name, ()), True)
        script = FAKE.format(sources=SOURCES, traits={"times": TIMES[name], "connector": name != PLAIN, **wrong})
        return EngineProcess(name, [sys.executable, "-c", script, "{}"], settings={}, log=log)

    monkeypatch.setattr(vllm_alone, "start_worker", start)
    monkeypatch.setattr(vllm_alone, "require_vllm", lambda _: None)
    monkeypatch.setattr(vllm_alone, "_model", lambda *_: Path("model"))
    return found


def test_everything_is_measured_of_everybody(traits: dict[str, tuple[str, ...]]) -> None:
    kept: dict[str, Mapping[str, Any]] = {}
    found = vllm_alone.run(options(), keep=kept.__setitem__).document()
    assert (found["tokens_equal"], found["absent"]) == (True, {})
    ours = found["contenders"][OURS]["figures"]
    assert ours["256_cold_ms"]["median"] == 2500
    assert ours["512_hit_ms"] == {"median": 187.5, "low": 187.5, "high": 187.5, "num": 2}
    assert ours["crowd_3_share"]["median"] == 1
    assert ours["decode_hits_p99_ms"]["median"] == 20
    assert ours["decode_hits_share"]["median"] == 1
    assert "512_hit_ms" not in found["contenders"][PLAIN]["figures"]
    assert found["ratios"]["512_cold_ms"] == {"to_plain": 1.25, "to_better_peer": 1.25}
    assert found["ratios"]["512_hit_ms"] == {
        "to_better_peer": 0.75,
        "faster_than_cold": 10.67,
        "cost_ms": 62.5,
        "better_peer_cost_ms": 125,
    }
    assert found["ratios"]["decode_hits_p99_ms"] == {
        "to_plain_alone": 1,
        "to_plain_local": 1,
        "to_better_peer": 1,
    }
    assert found["samples"]["offloading_256_hit_ms"] == [250, 250]
    assert set(kept) == {PLAIN, OURS, "offloading"}
    assert kept[OURS]["lengths"]["512"]["hit_ms"] == [187.5, 187.5]
    json.dumps(found)


@pytest.mark.parametrize(("trait", "equal"), [("wrong", False), ("other", False), ("partial", True)])
def test_other_bits_are_seen_and_hits_that_are_not_whole_count_nowhere(
    traits: dict[str, tuple[str, ...]], trait: str, equal: bool
) -> None:
    traits[OURS] = (trait,)
    found = vllm_alone.run(options()).document()
    assert found["tokens_equal"] is equal
    if trait == "partial":
        assert found["contenders"][OURS]["partial_hits"] == {"256": 2, "512": 2}
        assert "512_hit_ms" not in found["contenders"][OURS]["figures"]


def test_what_vllm_itself_computes_differently_each_time_is_not_compared(traits: dict[str, tuple[str, ...]]) -> None:
    traits[PLAIN] = ("restless",)
    traits[OURS] = ("other",)
    assert vllm_alone.run(options()).document()["tokens_equal"] is True


@pytest.mark.parametrize(
    ("trait", "why"),
    [("start", "no room for the KV cache"), ("dies", "is gone"), ("keeps", "does not let vLLM empty its prefix cache")],
)
def test_who_does_not_play_is_told_of_and_what_it_showed_stays(
    traits: dict[str, tuple[str, ...]], trait: str, why: str
) -> None:
    traits["offloading"] = (trait,)
    found = vllm_alone.run(options()).document()
    assert why in found["absent"]["offloading"]
    assert "512_hit_ms" in found["contenders"][OURS]["figures"]
    assert ("offloading" in found["contenders"]) is (trait != "start")


def test_lmcache_that_is_not_there_is_told_of(traits: dict[str, tuple[str, ...]], tmp_path: Path) -> None:
    found = vllm_alone.run(options(contenders=(PLAIN, "lmcache"), lmcache=tmp_path)).document()
    assert "LMCache is not in" in found["absent"]["lmcache"]
    assert found["ratios"] == {}


def test_what_takes_too_long_is_named(traits: dict[str, tuple[str, ...]]) -> None:
    traits[OURS] = ("slow",)
    found = vllm_alone.run(options()).document()
    assert set(found["contenders"][OURS]["left_out"]) == {"decode", "fresh"}
    assert found["absent"] == {}


def test_without_vllm_itself_there_is_nothing_to_compare_with(traits: dict[str, tuple[str, ...]]) -> None:
    traits[PLAIN] = ("start",)
    with pytest.raises(WorkerFailed, match="no room"):
        vllm_alone.run(options(warm=True))


@pytest.mark.parametrize(
    "change",
    [
        {"contenders": (OURS,)},
        {"contenders": (PLAIN, "redis")},
        {"lengths": (100,)},
        {"lengths": ()},
        {"repeats": 0},
        {"device": "tpu"},
        {"shape": "9b"},
        {"seconds": 0.0},
        {"crowds": (0,)},
    ],
)
def test_what_cannot_be_measured_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig):
        options(**change)


def test_the_command_line_knows_both_courses() -> None:
    found = CliRunner().invoke(app, ["bench", "vllm", "--device", "cuda", "--contenders", "none,ours", "--json"])
    assert found.exit_code == 1
    assert not found.stdout
    assert "has no vLLM" in " ".join(found.stderr.split())
    found = CliRunner().invoke(app, ["bench", "vllm", "--device", "cuda", "--course", "turns"])
    assert found.exit_code != 0
    assert "--course is turns" in " ".join(found.output.split()) + str(found.exception)


# --- engines and models -----------------------------------------------------------------------------------------------


def test_on_a_gpu_everybody_is_as_shipped(tmp_path: Path) -> None:
    (tmp_path / "lmcache").mkdir()

    def extra(name: str, **more: Any) -> tuple[dict[str, Any], VllmContender]:
        with open_contender(
            name, python="", lmcache=tmp_path, room_bytes=1 << 30, device="cuda", ours=more
        ) as contender:
            assert contender.transfer is not None
            return contender.transfer["kv_connector_extra_config"], contender

    assert extra("offloading")[0] == {"cpu_bytes_to_use": 1 << 30}
    assert extra(OURS, disk_directory=None)[0]["disk_directory"] is None
    _, lmcache = extra("lmcache")
    assert lmcache.packed
    assert lmcache.settings["LMCACHE_MAX_LOCAL_CPU_SIZE"] == "1"
    assert lmcache.settings["PYTHONPATH"].endswith(str(tmp_path))
    assert "OMP_NUM_THREADS" not in engine_settings("cuda")
    graphs = options(device="cuda").engine()
    assert graphs["enforce_eager"] is False
    assert graphs["dtype"] == "bfloat16"


def test_weights_are_made_once_and_again_when_others_are_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make() -> bool:
        return vllm_models.prepare_model("tiny", tmp_path / "m", python=sys.executable, device="cpu", timeout_s=120)

    assert make() is True
    assert make() is False
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert (config["dtype"], config["num_hidden_layers"]) == ("float32", 4)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    vllm_models.digest_model(tmp_path / "m", python=sys.executable, timeout_s=120)
    monkeypatch.setitem(vllm_models.SHAPES, "tiny", {**vllm_models.SHAPES["tiny"], "num_hidden_layers": 2})
    assert make() is True
    with pytest.raises(HeadwaterError, match=r"digest of the weights cannot be made: .*holds no weights"):
        vllm_models.digest_model(tmp_path, python=sys.executable, timeout_s=120)


# --- arithmetic -------------------------------------------------------------------------------------------------------


def _found(hit: float, **more: Any) -> dict[str, Any]:
    row = {"cold_ms": [100.0], "local_ms": [10.0, 12.0], "rested_ms": [9.0], "hit_ms": [hit] if hit else []}
    return {"start_s": 20.0, "lengths": {"2048": row | {"num_partial": 0}}, "fresh": {"tokens_per_s": [50.0]}, **more}


def test_ratios_are_to_the_better_of_the_others() -> None:
    sides = {PLAIN: 0.0, OURS: 20.0, "offloading": 25.0, "lmcache": 16.0}
    summaries = {name: summary_of(_found(hit)) for name, hit in sides.items()}
    summaries["lmcache"]["figures"]["fresh_tokens_per_s"]["median"] = 100.0
    found = ratios_of(summaries, ours=OURS, plain=PLAIN)
    assert found["2048_hit_ms"]["to_better_peer"] == 1.25
    assert found["2048_hit_ms"]["better_peer_cost_ms"] == 5
    assert found["2048_hit_ms"]["cost_ms"] == 9
    assert found["fresh_tokens_per_s"] == {"to_plain": 1, "to_better_peer": 0.5}, "more is better"
    assert ratios_of({PLAIN: summaries[PLAIN]}, ours=OURS, plain=PLAIN) == {}


def test_a_table_has_a_column_for_each_and_a_dash_for_what_was_not_taken() -> None:
    summaries = {PLAIN: summary_of(_found(0.0)), OURS: summary_of(_found(20.0))}
    rows = {row[0]: row[1:] for row in table_of(summaries)}
    assert rows["figure"] == [PLAIN, OURS]
    assert rows["2048_hit_ms"] == ["-", "20"]
    assert rows["2048_local_ms"] == ["11 [10, 12]", "11 [10, 12]"]
