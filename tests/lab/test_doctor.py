"""What a machine allows: that things are tried, that what does not work is said, and when that is a failure."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from headwater.cli import app
from headwater.core.errors import HostTierUnavailable, NotInstalled
from headwater.lab import doctor
from headwater.lab.doctor import CopySpeed, Findings
from headwater.lab.finding import FAIL, OK, WARN, Check
from headwater.transfer.device import arena, cuda
from headwater.transfer.device.torch_wire import TorchWire
from headwater.transfer.device.wire import Digests


def test_one_document_and_nothing_else() -> None:
    found = CliRunner().invoke(app, ["doctor", "--json"])
    assert found.exit_code == 0, found.output
    document = json.loads(found.stdout)
    assert document["command"] == "doctor"
    assert document["ok"] is True
    names = [check["name"] for check in document["checks"]]
    assert len(set(names)) == len(names)
    assert {"python", "torch", "triton", "tmpfs", "memory", "memlock", "gpu"} <= set(names)
    for check in document["checks"]:
        assert check["state"] in (OK, WARN)
        assert check["found"]
        assert check["state"] == OK or check["hint"], "a warning says what to do"


def test_a_table_for_people(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = [CopySpeed(8 << 20, "d2h", 55.0, 0.9, 0.2), CopySpeed(8 << 20, "h2d", 55.0, 0.91, 0.19)]
    checks = [Check("python", OK, "3.11"), Check("tmpfs", WARN, "[little]", "get [more]")]
    monkeypatch.setattr(doctor, "examine", lambda **_: Findings(checks, copies))
    found = CliRunner().invoke(app, ["doctor"])
    assert found.exit_code == 0
    for text in ("[little]", "get [more]", "to the device", "0.91", "could be better: tmpfs"):
        assert text in found.stdout
    checks.append(Check("copy kernels", FAIL, "none", "help"))
    found = CliRunner().invoke(app, ["doctor"])
    assert found.exit_code == 1
    assert "broken: copy kernels" in found.stdout
    del checks[1:]
    assert "all is well" in CliRunner().invoke(app, ["doctor"]).stdout


@pytest.mark.skipif(doctor._version("torch") is None, reason="needs torch")
def test_wrong_digests_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("of the reference for CPUs")
    move = TorchWire.finish

    def lie(self: TorchWire, place: int, **options: Any) -> Digests | None:
        found = move(self, place, **options)
        return None if found is None else found + np.uint64(1)

    monkeypatch.setattr(TorchWire, "finish", lie)
    found = CliRunner().invoke(app, ["doctor", "--json"])
    assert found.exit_code == 1
    document = json.loads(found.stdout)
    assert document["ok"] is False
    (broken,) = [check for check in document["checks"] if check["state"] == FAIL]
    assert "other digests than xxhash" in broken["found"]


@pytest.mark.parametrize(
    "error", [NotInstalled("the copy kernels need triton"), RuntimeError("no such\nthing"), ImportError("gone")]
)
def test_an_engine_that_cannot_be_made_is_a_failure(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> Any:
        raise error

    monkeypatch.setattr("headwater.transfer.device.copy_engine.CopyEngine", fail)
    import torch

    check = doctor._engine(torch.device("cpu"))
    assert check.state == FAIL
    assert str(error) in check.found
    assert check.hint


def test_a_copy_that_fails_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def fail(self: TorchWire, place: int, piece: object) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(TorchWire, "launch", fail)
    check = doctor._engine(torch.device("cpu"))
    assert check.state == FAIL
    assert "C compiler" in check.found


def test_without_torch_stores_still_work() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from headwater.lab import doctor; doctor._version = {}.get\n"
        "found = doctor.examine(); assert found.ok, found\n"
        "print({check.name: check.state for check in found.checks})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "'torch': 'warn', 'triton': 'warn'" in done.stdout
    assert "gpu" not in done.stdout


def test_little_room_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.storage.local.directory.free_bytes", lambda path: 64 << 20)
    monkeypatch.setattr("headwater.storage.local.directory.available_memory", lambda: 1 << 20)
    assert (doctor._shared_memory().state, doctor._memory().state) == (WARN, WARN)
    assert "--shm-size" in doctor._shared_memory().hint
    monkeypatch.setattr("headwater.storage.local.directory.is_memory", lambda path: False)
    assert "not in memory" in doctor._shared_memory().found


def test_memory_that_cannot_be_pinned_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(page: int, num_pages: int) -> None:
        raise HostTierUnavailable("67108864 bytes of host memory cannot be pinned: out of memory")

    assert doctor._pinned_memory().state == OK
    monkeypatch.setattr(arena, "create_host_cache", fail)
    check = doctor._pinned_memory()
    assert check.state == FAIL
    assert "out of memory" in check.found
    assert "memlock" in check.hint


def test_a_slab_that_cannot_be_registered_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "pin", lambda memory, address: "operation not permitted")
    check = doctor._registered_slab()
    assert (check.state, check.found) == (WARN, "operation not permitted")
    assert "pinned pages" in check.hint

    class Held:
        def release(self) -> None:
            pass

    monkeypatch.setattr(cuda, "pin", lambda memory, address: Held())
    assert doctor._registered_slab().state == OK
    monkeypatch.setattr("headwater.storage.local.directory.free_bytes", lambda path: 0)
    assert doctor._registered_slab().state == WARN


@pytest.mark.parametrize(
    ("answer", "state", "found"),
    [
        ("echo 5, 5, 16, 16", OK, "generation 5 of 5, 16 lanes of 16"),
        ("echo 5, 5, 8, 16", WARN, "8 lanes of 16"),
        ("echo '[N/A]'", OK, "unknown"),
        ("exit 9", OK, "unknown"),
    ],
)
def test_the_link(answer: str, state: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{answer}\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    check = doctor._link()
    assert check.state == state
    assert found in check.found
    program.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no nvidia-smi" in doctor._link().found


def test_ways_are_timed_in_turns() -> None:
    went: list[str] = []
    seconds = doctor._in_turns(lambda: went.append("a"), lambda: went.append("b"))
    assert len(seconds) == 2
    assert went == ["a", "b"] * (doctor._ROUNDS + 1)
