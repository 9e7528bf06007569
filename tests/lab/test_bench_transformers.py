"""`headwater bench transformers`: that it measures what it says, and checks the bits. Never how fast."""

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from headwater.cli import app
from headwater.core.errors import InvalidConfig
from headwater.lab.bench.transformers import TransformersOptions


def test_it_compares_and_measures() -> None:
    words = ["bench", "transformers", "--tokens", "100", "--block", "32", "--rounds", "2", "--json"]
    ended = CliRunner().invoke(app, words)
    assert ended.exit_code == 0, ended.output
    found = json.loads(ended.stdout)
    assert found["equal"] is True
    for name in ("plain_s", "cold_s", "save_s", "hit_s", "load_s"):
        assert len(found["samples"][name]) == 2
        assert min(found["samples"][name]) > 0
    assert found["speed_up"] == pytest.approx(found["cold_s"] / found["hit_s"], rel=0.05)
    assert set(found["notes"]) <= set(found)


@pytest.mark.parametrize("options", [{"shape": "huge"}, {"dtype": "int8"}, {"rounds": 0}, {"tokens": 256}])
def test_it_refuses_nonsense(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig):
        TransformersOptions(**options)
