"""The commands of docs/VLLM.md are what they say: the serving lines start a vLLM that answers, options exist."""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import fields
from pathlib import Path

import models

from headwater.integrations.vllm.settings import ConnectorConfig, read_config

PAGE = (Path(__file__).parent.parent / "docs" / "VLLM.md").read_text(encoding="utf-8")


def lines() -> list[str]:
    """The commands of the page, each on one line: what is indented goes on with the line before it."""
    blocks = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    return [line for block in blocks for line in re.sub(r"\n +", " ", block).strip().splitlines()]


def test_every_option_is_told_and_every_one_that_is_told_exists() -> None:
    table = PAGE.split("## Options")[1].split("## ")[0]
    told = {name for row in re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert told == {one.name for one in fields(ConnectorConfig)}


def test_every_transfer_config_is_taken() -> None:
    configs = [json.loads(shlex.split(line)[-1]) for line in lines() if "--kv-transfer-config" in line]
    assert len(configs) == 3
    for one in configs:
        assert one["kv_connector"] == "HeadwaterConnector"
        read_config(one.get("kv_connector_extra_config", {}))


def test_every_command_of_ours_has_its_options() -> None:
    ours = [shlex.split(line) for line in lines() if line.startswith("headwater ")]
    assert len(ours) >= 5
    for words in ours:
        name = [word for word in words[1:3] if not word.startswith("-")]
        command = [sys.executable, "-c", "from headwater.cli import app; app()", *name, "--help"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "200"})
        for option in [word for word in words if word.startswith("--")]:
            assert option in done.stdout, (words, option)


def test_the_first_line_serves(tmp_path: Path) -> None:
    """As it stands, with a tiny model and a port of its own; twice the same prompt, and the log's one sentence."""
    model = tmp_path / "model"
    models.make("gqa", model)
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    (line,) = [line for line in lines() if line.startswith("vllm serve") and '"kv_both"' in line]
    words = [str(model) if word == "MODEL" else word for word in shlex.split(line)[1:]]
    more = [
        "--port",
        str(port),
        "--dtype",
        "float32",
        "--enforce-eager",
        "--block-size",
        "32",
        "--max-model-len",
        "1024",
    ]
    shm = tempfile.mkdtemp(prefix="headwater-test-", dir="/dev/shm")  # and not what others left in the usual place
    homes = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "HOME": str(tmp_path), "HEADWATER_HOST_DIR": f"{shm}/host"}
    homes |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.cli.main", *words, *more],
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, **homes},
        )
    try:
        until = time.monotonic() + 300
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                assert process.poll() is None, log.read_text(errors="replace")[-3000:]
                assert time.monotonic() < until, "it does not answer"
                time.sleep(0.5)
        body = json.dumps(
            {"model": str(model), "prompt": list(range(3, 103)), "max_tokens": 4, "temperature": 0}
        ).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
        )
        answers = []
        for _ in range(2):
            with urllib.request.urlopen(request, timeout=60) as found:
                answers.append(json.load(found)["choices"][0]["text"])
        assert answers[0] == answers[1]
        assert "Headwater:" in log.read_text(errors="replace")
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        shutil.rmtree(shm)
