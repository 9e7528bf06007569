"""A part of `headwater verify --vllm`, some mixed requests, and one kill: the whole takes minutes (`bench/results`)."""

import json
import subprocess
import sys

from headwater.lab.verify import vllm as verify_vllm

CASES = ("cold", "host", "load hangs half-way, async", "flipped bits in the slab", "control")
TOGETHER = ("cold", "crowd", "host full, disk behind it", "two engines, one slab", "killed while it saves")


def test_what_is_loaded_equals_what_is_computed_and_damage_is_seen() -> None:
    report = verify_vllm.run(python=sys.executable, kinds=("gqa",), only=CASES.__contains__)
    assert [case.case for case in report.cases] == list(CASES)
    assert report.ok, report.document()


def test_crowds_and_neighbours_equal_what_is_computed_and_so_does_what_a_kill_left() -> None:
    report = verify_vllm.run(python=sys.executable, kinds=("gqa",), only=TOGETHER.__contains__)
    assert [case.case for case in report.cases] == list(TOGETHER)
    assert report.ok, report.document()


def test_what_was_stored_when_the_process_was_killed_is_right() -> None:
    command = [sys.executable, "-m", "headwater.lab.campaigns.vllm_kills", "--times", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=230)
    found = json.loads(done.stdout)
    assert done.returncode == 0, found
    assert found["kills_while_storing"] == 1
    assert found["hit_tokens"] > 0


def test_mixed_requests_are_answered_as_without_us_and_nothing_is_kept() -> None:
    command = [sys.executable, "-m", "headwater.lab.campaigns.vllm_mixed", "--requests", "200", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    found = json.loads(done.stdout)
    assert done.returncode == 0, found
    assert found["compared"] > 150
    assert found["preemptions"] > 0
