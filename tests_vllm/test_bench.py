"""The benchmark, small, with real engines: what it measures is what vLLM says it is. Never how fast."""

import json
import subprocess
import sys
from pathlib import Path

SMALL = ["--lengths", "256", "--rounds", "1", "--pairs", "1", "--pair-tokens", "256"]


def test_a_small_run() -> None:
    command = [sys.executable, "-c", "from headwater.cli import app; app()", "bench", "vllm", *SMALL, "--json"]
    done = subprocess.run([*command, "--contenders", "offloading,headwater"], capture_output=True, timeout=240)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    found = json.loads(done.stdout)
    assert found["absent"] == {}
    assert found["tokens_equal"] is True
    assert found["discarded"] == dict.fromkeys(("cold", "local", "offloading", "headwater"), 0)
    for name in ("cold", "local", "offloading", "headwater"):
        assert found[f"256_{name}_ms"] > 0
    assert "256_headwater_cost_ms" in found
    assert found["overhead"] > 0
    assert found["vllm"]


def test_a_small_run_of_each_alone(tmp_path: Path) -> None:
    """What runs on a GPU, with everything that is measured there: nothing is left out, every hit is whole and equal."""
    command = [sys.executable, "-c", "from headwater.cli import app; app()", "bench", "vllm", "--course", "alone"]
    command += ["--shape", "tiny", "--lengths", "256", "--repeats", "1", "--crowds", "3", "--crowd-tokens", "256"]
    command += ["--running", "2", "--answer", "48", "--beside", "256", "--fresh", "2", "--room-gib", "0.25"]
    command += ["--contenders", "none,ours", "--seconds", "350", "--out", str(tmp_path), "--json"]
    done = subprocess.run(command, capture_output=True, timeout=380)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    found = json.loads(done.stdout)
    assert (found["absent"], found["tokens_equal"]) == ({}, True)
    ours = found["contenders"]["headwater"]
    assert ours["num_unequal"] == 0
    assert ours["partial_hits"] == {}
    assert "left_out" not in ours
    assert ours["figures"]["crowd_3_share"]["low"] == ours["figures"]["decode_hits_share"]["low"] == 1
    for name in ("start_s", "first_ms", "256_hit_ms", "decode_hits_p99_ms", "fresh_tokens_per_s"):
        assert ours["figures"][name]["median"] > 0, name
    names = {f"vllm-{name}.{end}" for name in ("plain", "headwater") for end in ("json", "log")}
    assert {path.name for path in tmp_path.iterdir()} == {*names, "vllm.json"}
