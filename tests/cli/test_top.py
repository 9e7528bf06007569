"""`headwater top`: the state document as tables, of a server and of a router; and what is said if there is none."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from headwater.cli import app
from headwater.engine.models.base import Model
from headwater.lab.draw_state import screen
from headwater.serve.ask_server import ask_state
from router_kit import world
from serve_kit import Served, directory, model, serving
from test_serve_revive import KEY, ask, switch_off

__all__ = ["directory", "model"]  # fixtures


def drawn(url: str, key: str | None) -> str:
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(screen(ask_state(url, key=key)))
        return console.export_text()


def command(here: Served, *words: str, key: str = KEY) -> tuple[int, str, str]:
    found = CliRunner().invoke(app, ["top", "--url", here.url, "--api-key", key, *words])
    return found.exit_code, found.stdout, found.stderr


def test_a_server_s_state_is_shown(directory: Path, model: Model, tmp_path: Path) -> None:
    disk: dict[str, Any] = {"disk_directory": tmp_path / "disk", "disk_bytes": 16 << 20}
    with serving(directory, model, api_key=KEY, num_blocks=64, **disk) as here:
        ask(here)
        ask(here)
        status, out, _ = command(here)
        assert status == 0
        assert "hit ratio 50.0 %" in out
        assert "never_stored 100.0 %" in out
        assert "16.0 MiB" in out
        status, out, _ = command(here, "--json")
        assert (status, json.loads(out)["miss_tokens"]) == (0, 96)
        switch_off(here)
        assert "headwater revive disk" in drawn(here.url, KEY)
        status, _, errors = command(here, key="another")
        assert (status, "answers 401" in errors) == (1, True)
        assert command(here, "--every", "0")[0] == 1


def test_a_router_s_state_is_shown() -> None:
    with world() as here:
        here.add("[red]m1", "mixed", load={"running": 3, "waiting": 2, "free_slots": 5})
        out = drawn(here.url, None)
        assert "[red]m1" in out, "a name is no markup"
        assert "node_joined" in out


@pytest.mark.parametrize("url", ["http://127.0.0.1:{port}", "nowhere"])
def test_nobody_there_is_one_line(url: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        found = CliRunner().invoke(app, ["top", "--url", url.format(port=probe.getsockname()[1])])
    assert found.exit_code == 1
    assert len(found.stderr.strip().splitlines()) == 1
