"""The benchmark, small, with real engines: what it measures is what vLLM says it is. Never how fast."""

import json
import subprocess
import sys

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
