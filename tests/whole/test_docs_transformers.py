"""The example of docs/TRANSFORMERS.md runs as it stands, but for the model, which nobody downloads here, and sizes."""

import re
from pathlib import Path

import pytest
import transformers

from headwater.engine.make_model import make_model

PAGE = Path(__file__).resolve().parents[2] / "docs" / "TRANSFORMERS.md"


def test_the_example_of_transformers_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers.utils.logging.disable_progress_bar()  # it starts a thread
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    make_model("llama", tmp_path / "model")
    for written, here in (('"Qwen/Qwen3-0.6B"', repr(str(tmp_path / "model"))), ("limit_gib=4", "limit_gib=0.05")):
        assert written in example
        example = example.replace(written, here)
    monkeypatch.chdir(tmp_path)
    said = []
    for _ in range(2):
        exec(compile(example, "TRANSFORMERS.md", "exec"), {})
        said.append(capsys.readouterr().out)
    answers = [one.partition("GenerateUsage")[0] for one in said]
    assert answers[0] == answers[1]
    assert "hit_tokens={}" in said[0]
    assert "hit_tokens={'disk': 1536}" in said[1]  # 1,712 letters are as many tokens here, in 6 whole blocks
