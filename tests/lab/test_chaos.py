"""The fault campaign on prefill and decode apart: each fault once, what it must find, and how it judges."""

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import router_kit
from fleet_kit import signature
from headwater.cli import app
from headwater.fleet import COMMAND
from headwater.lab.chaos import chaos, chaos_load
from headwater.lab.chaos.chaos import ChaosOptions, Ground
from headwater.lab.chaos.chaos_faults import FAULTS, ON_MOONCAKE
from headwater.lab.chaos.chaos_report import (
    SLACK_S,
    ChaosScene,
    ClientAnswer,
    RightAnswer,
    Verdict,
    broke_by_itself,
    judge,
    late_s,
    verdict,
)
from headwater.lab.chaos.chaos_store import HARMS

OPTIONS = ChaosOptions(times=1, clients=4, questions=26)
NOTHING = ("wrong", "dishonest", "late", "tokens_before_502", "slots_left", "tracebacks")
LOCAL = [name for name in FAULTS if name not in ON_MOONCAKE]

# --- the campaign itself ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def here() -> Iterator[Ground]:
    with chaos.ground(OPTIONS) as found:
        yield found


@pytest.fixture(scope="module")
def world(here: Ground) -> Iterator[chaos.ChaosWorld]:
    with chaos.world(OPTIONS, here) as found:
        yield found


@pytest.mark.parametrize("fault", LOCAL)
def test_every_request_ends_rightly_or_honestly(fault: str, world: chaos.ChaosWorld) -> None:
    found = world.run(fault)
    assert found["ok"], found
    assert found["injected"] == 1
    assert not any(found[name] for name in NOTHING)
    assert _is_seen(fault, found["notes"]), found


def _is_seen(fault: str, notes: dict[str, int]) -> bool:
    """Whether somebody noticed what was done: a fault that nobody notices proves nothing."""
    kind = fault.removeprefix("object_")
    if fault == "pool_full":
        return notes["puts_refused"] > 0
    if fault == "pool_slow":
        return notes["slow_calls"] > 0
    if kind not in HARMS:
        return "_dies" in fault  # by the exit of its process, without which it was not injected
    wanted = "missing" if kind == "missing" else "bad_pages_total"
    return any(wanted in what for what in notes)


def test_a_real_pool_is_full_and_its_master_dies(here: Ground) -> None:
    with chaos.world(OPTIONS, here, on_mooncake=True) as found:
        results = [found.run(fault) for fault in ("mooncake_full", "mooncake_master_dies")]
        assert found.end() == []
    assert all(one["ok"] and one["injected"] == 1 for one in results), results


def test_wrong_tokens_and_lost_slots_are_found(here: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read is changed behind its verification, and some requests never give their slots back."""
    monkeypatch.setattr(chaos, "_IDLE_S", 0.5)
    monkeypatch.setattr(chaos, "_CALM_S", 0.0)
    with chaos.world(replace(OPTIONS, inject="spoil leak"), here) as found:
        result = found.run("object_damaged")
    assert result["wrong"] > 0
    assert result["slots_left"] > 0
    assert not result["ok"]
    assert result["examples"]


def test_the_command_says_the_same_as_its_program(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[list[str]] = []

    def run(arguments: list[str]) -> int:
        called.append(arguments)
        return 3

    monkeypatch.setattr(chaos, "main", run)
    words = "chaos --times 3 --fault pool_slow --fault object_cut --seed 7 --clients 2 --pool mooncake --inject spoil"
    assert CliRunner().invoke(app, [*words.split(), "--keep", "DIR", "--json"]).exit_code == 3
    (command,) = called
    expected = ChaosOptions(
        faults=("pool_slow", "object_cut"),
        times=3,
        seed=7,
        clients=2,
        pool="mooncake",
        inject="spoil",
        keep=Path("DIR"),
    )
    assert chaos.read_options(command) == (expected, True)
    with pytest.raises(SystemExit) as exit_:
        chaos.read_options(["--fault", "no such"])
    assert exit_.value.code == 2


def _hear_interrupts() -> None:
    """Who runs the tests in the background may ignore them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.fault("B11")
def test_a_ctrl_c_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    """Of everybody who hears it: the terminal tells the whole group."""
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    options = ["chaos", "--times", "50", "--fault", "pool_slow"]
    pipe = subprocess.PIPE
    chaos = subprocess.Popen(
        [*COMMAND, *options],
        env=env,
        stdout=pipe,
        stderr=pipe,
        text=True,
        start_new_session=True,
        preexec_fn=_hear_interrupts,
    )
    try:
        logs: list[Path] = []
        until_s = time.monotonic() + 120
        while not (logs := list(tmp_path.rglob("decode-1.log"))):  # it has begun
            assert chaos.poll() is None, chaos.communicate()
            assert time.monotonic() < until_s
            time.sleep(0.05)
        os.killpg(chaos.pid, signal.SIGINT)
        output, errors = chaos.communicate(timeout=120)
    finally:
        chaos.kill()
        chaos.wait()
    assert (chaos.returncode, output) == (130, "")
    assert errors.splitlines()[-1] == "headwater: interrupted, so nothing was proven"
    assert "Traceback" not in errors
    assert not logs[0].exists()
    assert not list(tmp_path.iterdir())


# --- what it found ----------------------------------------------------------------------------------------------------


def test_a_node_that_dies_in_its_heartbeat_is_no_error_of_the_router(caplog: pytest.LogCaptureFixture) -> None:
    with router_kit.world() as found:
        parts = urlsplit(found.url)
        with socket.create_connection((parts.hostname or "", parts.port or 0)) as node:
            signed = "".join(f"{name}: {value}\r\n" for name, value in signature(found.url, "/pd/nodes", b"").items())
            node.sendall(b"POST /pd/nodes HTTP/1.1\r\nhost: one\r\ncontent-type: application/json\r\n")
            node.sendall(signed.encode())
            node.sendall(b'content-length: 500\r\n\r\n{"node": "prefill-0", "url": "http')
        found.until(lambda: 'endpoint="/pd/nodes",status=' in found.client.get("/metrics").text)
        assert 'endpoint="/pd/nodes",status="gone"} 1' in found.client.get("/metrics").text
    assert "Traceback" not in caplog.text


# --- how it judges ----------------------------------------------------------------------------------------------------


def _told(**changed: Any) -> ClientAnswer:
    right: dict[str, Any] = {
        "request_id": "one",
        "answer": RightAnswer("abcdef", "length"),
        "begin_s": 10.0,
        "deadline_s": 20.0,
        "end_s": 11.0,
        "status": 200,
        "text": "abcdef",
        "finish": "length",
        "done": True,
    }
    return ClientAnswer(**right | changed)


ERROR = {"message": "the pool is full", "code": "upstream_failed"}
REFUSED: dict[str, Any] = {"status": 502, "text": "", "finish": None, "done": False, "error": ERROR}
BROKEN: dict[str, Any] = {"text": "abc", "finish": None, "done": False, "error": ERROR, "stream": True}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, Verdict.RIGHT),
        ({"stream": True}, Verdict.RIGHT),
        ({"text": "abcdeX"}, Verdict.WRONG),
        ({"text": "abcde"}, Verdict.WRONG),
        ({"text": "abcdefg"}, Verdict.WRONG),
        ({"finish": "stop"}, Verdict.WRONG),
        (REFUSED, Verdict.ERROR),
        ({**REFUSED, "status": 504}, Verdict.ERROR),
        ({**REFUSED, "status": 400}, Verdict.DISHONEST),
        ({**REFUSED, "error": {"message": ""}}, Verdict.DISHONEST),
        ({**REFUSED, "trouble": "it ended in the middle"}, Verdict.DISHONEST),
        (BROKEN, Verdict.ERROR),
        ({**BROKEN, "text": "abX"}, Verdict.WRONG),
        ({**BROKEN, "error": None}, Verdict.DISHONEST),
        ({**BROKEN, "error": None, "left": True}, Verdict.LEFT),
        ({**BROKEN, "error": None, "left": True, "text": "X"}, Verdict.WRONG),
        ({"status": 0, "text": "", "done": False, "trouble": "it hangs"}, Verdict.DISHONEST),
        ({"status": 0, "text": "", "done": False, "left": True}, Verdict.LEFT),
    ],
)
def test_a_verdict(changed: dict[str, Any], expected: Verdict) -> None:
    assert verdict(_told(**changed)) is expected


def test_a_request_is_late_unless_the_machine_was() -> None:
    late = _told(end_s=20.0 + SLACK_S + 1.0)
    assert late_s(late) > SLACK_S
    assert late_s(late, [(5.0, 9.0)]) > SLACK_S  # before it was asked
    assert late_s(late, [(19.5, 20.5)]) > SLACK_S  # half of that is before its deadline
    assert late_s(late, [(20.0, 21.5)]) <= SLACK_S
    assert late_s(late, [(20.0, 20.6), (20.1, 20.6)]) > SLACK_S  # the same moment
    assert late_s(_told(end_s=20.0 + SLACK_S)) <= SLACK_S


def test_what_is_excused_is_told() -> None:
    late = _told(end_s=20.0 + SLACK_S + 1.0)
    found = judge(ChaosScene("fault", 1, 1, [_told(), late, late], stalls=[(20.0, 21.5)]))
    assert (found["late"], found["late_for_want_of_a_processor"], found["ok"]) == (0, 2, True)
    found = judge(ChaosScene("fault", 1, 1, [_told(), late, late]))
    assert (found["late"], found["late_for_want_of_a_processor"], found["ok"]) == (2, 0, False)


def test_a_stream_may_break_where_a_node_was_killed() -> None:
    broken = _told(**BROKEN)
    assert broke_by_itself(broken, [])
    assert broke_by_itself(broken, [("decode-0", 9.0), ("decode-1", 12.0)])  # before, and afterwards
    assert broke_by_itself(broken, [("prefill-0", 10.5)])  # which no longer had anything to do with it
    assert not broke_by_itself(broken, [("decode-0", 10.5)])
    late = _told(**{**BROKEN, "error": {"message": "too late", "code": "timeout"}})
    assert not broke_by_itself(late, [])
    handoff = _told(**{**BROKEN, "error": {"message": "a block is gone", "code": "handoff_missing"}})
    assert broke_by_itself(handoff, [("decode-0", 10.5)])
    assert not broke_by_itself(_told(**REFUSED), [])
    assert not broke_by_itself(_told(), [])


_DEFECTS: list[dict[str, Any]] = [
    {"told": [_told(), _told(text="abcdeX")]},
    {"told": [_told(), _told(**{**BROKEN, "error": None})]},
    {"told": [_told(), _told(**BROKEN)]},
    {"told": [_told(), _told(end_s=30.0)]},
    {"told": [_told(**REFUSED)]},  # nothing was right
    {"told": []},
    {"slots_left": 1},
    {"tracebacks": 1},
    {"died": ["decode-0"]},
    {"recovered": False},
    {"injected": 2},
]


@given(st.sets(st.sampled_from(range(len(_DEFECTS)))))
def test_anything_that_is_not_right_is_not_ok(chosen: set[int]) -> None:
    good: dict[str, Any] = {"injected": 3, "told": [_told(), _told(**REFUSED)]}
    scene = ChaosScene("fault", 3, **good)
    for number in chosen:
        for name, value in _DEFECTS[number].items():
            setattr(scene, name, value)
    assert judge(scene)["ok"] == (not chosen)


def test_errors_are_counted_by_kind() -> None:
    kills = [("decode-0", 10.5)]
    found = judge(ChaosScene("fault", 1, 1, [_told(), _told(**REFUSED), _told(**REFUSED), _told(**BROKEN)], kills))
    assert found["honest_errors"] == {"502 upstream_failed": 2, "stream upstream_failed": 1}
    assert (found["requests"], found["right"], found["ok"]) == (4, 1, True)


# --- what clients read ------------------------------------------------------------------------------------------------


def _events(*documents: object, done: bool = True) -> bytes:
    data = b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in documents)
    return data + b"data: [DONE]\n\n" * done


def _piece(text: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"text": text, "finish_reason": finish}]}


def _chunked(body: bytes, size: int) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return head + b"".join(b"%x\r\n%s\r\n" % (len(one), one) for one in pieces) + b"0\r\n\r\n"


@given(st.integers(1, 200), st.data())
def test_a_stream_is_read_whole_or_not_at_all(size: int, data: st.DataObject) -> None:
    """However it is cut into chunks; and what is cut off anywhere is never taken for a whole answer."""
    whole = _chunked(_events(_piece("abc"), _piece("def"), _piece("", "length")), size)
    fresh = {"status": 0, "text": "", "finish": None, "done": False, "stream": True}
    told = _told(**fresh)
    chaos_load.read_answer(whole, told)
    assert verdict(told) is Verdict.RIGHT
    told = _told(**fresh)
    chaos_load.read_answer(whole[: data.draw(st.integers(0, len(whole) - 1))], told)
    assert verdict(told) is Verdict.DISHONEST
    assert told.trouble


def test_an_error_in_a_stream_and_one_with_a_status() -> None:
    told = _told(status=0, text="", finish=None, done=False, stream=True)
    chaos_load.read_answer(_chunked(_events(_piece("abc"), {"error": ERROR}, done=False), 50), told)
    assert (verdict(told), told.text, told.code) == (Verdict.ERROR, "abc", "upstream_failed")
    body = json.dumps({"error": ERROR}).encode()
    told = _told(status=0, text="", finish=None, done=False)
    head = b"HTTP/1.1 503 Busy\r\ncontent-length: %d\r\n\r\n" % len(body)
    chaos_load.read_answer(head + body, told)
    assert (verdict(told), told.status) == (Verdict.ERROR, 503)
    told = _told(status=0, text="", finish=None, done=False)
    chaos_load.read_answer(head + body[:-1], told)
    assert verdict(told) is Verdict.DISHONEST
