"""`headwater verify`: every case of a family is equal, and damage behind the checks is noticed."""

import json

import pytest
import torch
from typer.testing import CliRunner

from headwater.cli import app
from headwater.lab.verify import cases as proof


@pytest.mark.timeout(600)
def test_every_family_and_every_way_to_a_hit() -> None:
    result = CliRunner().invoke(app, ["verify", "--json"])
    document = json.loads(result.stdout)
    assert result.exit_code == 0, [case for case in document["cases"] if not case["equal"]]
    assert document["equal"]
    families = {case["family"] for case in document["cases"]}
    assert families >= {"gqa", "gqa-fp8", "mla", "dsa"}
    for family in families:
        assert len([case for case in document["cases"] if case["family"] == family]) >= 8


def test_damage_behind_the_checks_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "FAMILIES", {"gqa": ("llama", "auto")})
    result = CliRunner().invoke(app, ["verify", "--inject", "--json"])
    assert result.exit_code == 1
    cases = {case["case"]: case for case in json.loads(result.stdout)["cases"]}
    assert cases["cold"]["equal"]
    assert cases["device hit"]["equal"]  # nothing was loaded
    for name in ("host hit", "disk hit", "after eviction", "load fails half-way"):
        assert not cases[name]["equal"]
        assert cases[name]["problem"] in ("other tokens", "other logits", "other KV bytes")


@pytest.mark.fault("E")
def test_both_processes_of_a_restart_compute_with_as_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "FAMILIES", {"gqa": ("llama", "auto")})
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # what a new process would take; this one has one
    assert torch.get_num_threads() == 1
    cases = {case.case: case for case in proof.run()}
    assert cases["after a restart"].problem == ""
