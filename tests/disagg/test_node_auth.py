"""How routers and nodes prove that they hold one key: what is taken, what is not, and what is never said."""

import hmac
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from headwater.config import environment
from headwater.core.errors import InvalidConfig
from headwater.core.node_key import NodeKey
from headwater.disagg.key_file import find_node_key, own_node_key, read_node_key, write_node_key
from headwater.disagg.node_auth import (
    CHALLENGE,
    PROOF,
    ROUTER,
    Admitted,
    Authenticator,
    NotAdmitted,
    NotProven,
    Signer,
    node_called,
)

KEY = NodeKey("0123456789abcdef-of-the-fleet")
OTHER = NodeKey("0123456789abcdef-of-another")
NODE = node_called("n", "http://127.0.0.1:1")


def met(signer: Signer, door: Authenticator) -> Signer:
    """One that has said hello."""
    nonce, header = signer.hello()
    signer.check(nonce, 204, door.answer(door.admit_hello(header), 204))
    return signer


def asked(signer: Signer, **changes: Any) -> tuple[str, dict[str, Any]]:
    what: dict[str, Any] = {"method": "POST", "target": "/pd/prefill?x=1", "body": b"{}", **changes}
    nonce, header = signer.sign(**what)
    return nonce, {"header": header, "method": what["method"], "target": what["target"]}


def admit(door: Authenticator, request: dict[str, Any]) -> Admitted:
    return door.admit(request["header"], method=request["method"], target=request["target"])


# --- what is taken ----------------------------------------------------------------------------------------------------


def test_both_ends_prove_themselves_and_go_on_without_a_hello() -> None:
    door = Authenticator(KEY, NODE)
    signer = met(Signer(KEY, NODE), door)
    for status in (200, 400, 503):
        nonce, request = asked(signer)
        found = admit(door, request)
        assert found.fits("44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a")  # SHA-256 of {}
        assert not found.fits("0" * 64)
        signer.check(nonce, status, door.answer(found, status))


@pytest.mark.fault("B3")
@given(st.data())
def test_whatever_is_changed_is_not_taken(data: st.DataObject) -> None:
    door = Authenticator(KEY, NODE)
    _, request = asked(met(Signer(KEY, NODE), door))
    name = data.draw(st.sampled_from(sorted(request)))
    at = data.draw(st.integers(0, len(request[name]) - 1))
    other = data.draw(st.characters(codec="ascii"))
    assume(other != request[name][at])
    changed = {**request, name: request[name][:at] + other + request[name][at + 1 :]}
    with pytest.raises(NotAdmitted):
        admit(door, changed)
    admit(door, request)  # the true one counts all the same


@pytest.mark.fault("B3")
def test_what_was_said_once_counts_once() -> None:
    door = Authenticator(KEY, ROUTER)
    _, request = asked(met(Signer(KEY, ROUTER), door))
    admit(door, request)
    with pytest.raises(NotAdmitted, match="before"):
        admit(door, request)


@pytest.mark.fault("B3")
def test_a_process_that_was_started_again_takes_nothing_of_before() -> None:
    _, request = asked(met(Signer(KEY, ROUTER), Authenticator(KEY, ROUTER)))
    with pytest.raises(NotAdmitted, match="another process"):
        admit(Authenticator(KEY, ROUTER), request)


@pytest.mark.fault("B3")
@pytest.mark.parametrize("idle", [True, False])
def test_what_was_signed_long_ago_is_not_taken(*, idle: bool) -> None:
    """By the clock of whoever is asked, and no other; also if nobody came in the meantime."""
    now = [100.0]
    door = Authenticator(KEY, ROUTER, clock=lambda: now[0])
    signer = met(Signer(KEY, ROUTER), door)
    _, first = asked(signer)
    _, soon = asked(signer)
    now[0] += 59.0
    admit(door, first)
    for _ in range(1 if idle else 18):
        now[0] += 180.0 if idle else 10.0
        if not idle:
            door.answer(Admitted("0" * 32, ""), 200)
    with pytest.raises(NotAdmitted, match="too long ago"):
        admit(door, soon)


def test_a_challenge_outlives_its_successor_s_birth() -> None:
    """Whoever got one at the last moment has time to use it."""
    now = [0.0]
    door = Authenticator(KEY, ROUTER, clock=lambda: now[0])
    now[0] = 59.9
    signer = met(Signer(KEY, ROUTER), door)
    now[0] = 115.0
    admit(door, asked(signer)[1])


def test_memory_is_bounded_and_nothing_is_forgotten_that_still_counts() -> None:
    door = Authenticator(KEY, ROUTER, clock=lambda: 0.0, max_nonces=10)
    signer, said = met(Signer(KEY, ROUTER), door), []
    for _ in range(95):
        nonce, request = asked(signer)
        signer.check(nonce, 200, door.answer(admit(door, request), 200))
        said.append(request)
        assert sum(map(len, door._seen.values())) <= 20
    for request in said:
        with pytest.raises(NotAdmitted):
            admit(door, request)


# --- who is none ------------------------------------------------------------------------------------------------------


@pytest.mark.fault("B3")
@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "x",
        "." * 3,
        f"{'0' * 32}.{'0' * 32}.{'0' * 64}.{'0' * 64}",
        f"{'é' * 32}.{'0' * 32}.{'0' * 64}.{'0' * 64}",
    ],
)
def test_a_stranger_comes_nowhere(header: str | None) -> None:
    door = Authenticator(KEY, ROUTER)
    with pytest.raises(NotAdmitted, match="API key opens nothing"):
        door.admit(header, method="GET", target="/")
    with pytest.raises(NotAdmitted, match="API key opens nothing"):
        door.admit_hello(header)


@pytest.mark.fault("B3")
def test_another_key_proves_nothing_either_way() -> None:
    theirs, ours = Authenticator(OTHER, NODE), Authenticator(KEY, NODE)
    nonce, header = Signer(KEY, NODE).hello()
    with pytest.raises(NotAdmitted):
        theirs.admit_hello(header)
    signer = met(Signer(KEY, NODE), ours)
    nonce, request = asked(signer)
    with pytest.raises(NotAdmitted):
        admit(theirs, request)
    with pytest.raises(NotProven):
        signer.check(nonce, 200, theirs.answer(admit(ours, request), 200))
    assert signer.challenge is None


@pytest.mark.fault("B3")
@pytest.mark.parametrize(
    "other", [ROUTER, node_called("n", "http://127.0.0.1:2"), node_called("m", "http://127.0.0.1:1")]
)
def test_nobody_answers_for_another(other: str) -> None:
    """Not one who holds the key either: not by another name, not from another address."""
    door, signer = Authenticator(KEY, other), Signer(KEY, NODE)
    nonce, header = signer.hello()
    with pytest.raises(NotProven):
        signer.check(nonce, 204, door.answer(door.admit_hello(header), 204))


@pytest.mark.fault("B3")
def test_an_answer_is_to_one_request_with_one_status() -> None:
    door = Authenticator(KEY, NODE)
    signer = met(Signer(KEY, NODE), door)
    nonce, request = asked(signer)
    recorded = door.answer(admit(door, request), 200)
    signer.check(nonce, 200, recorded)
    second, _ = asked(signer)
    for replayed, status in ((nonce, 503), (second, 200)):
        with pytest.raises(NotProven):
            signer.check(replayed, status, recorded)
    for missing in ({}, {CHALLENGE: recorded[CHALLENGE]}, {PROOF: recorded[PROOF]}, {**recorded, CHALLENGE: "0" * 32}):
        with pytest.raises(NotProven):
            signer.check(nonce, 200, missing)
    with pytest.raises(NotProven, match="nobody has proven"):
        asked(signer)


def test_what_is_said_holds_no_key() -> None:
    door = Authenticator(KEY, NODE)
    signer = met(Signer(KEY, NODE), door)
    nonce, request = asked(signer)
    said = [repr(KEY), str(request), str(door.answer(admit(door, request), 200)), str(signer.hello())]
    for wrong in (lambda: admit(door, request), lambda: signer.check(nonce, 401, {}), lambda: NodeKey("short")):
        with pytest.raises((NotAdmitted, NotProven, InvalidConfig)) as raised:
            wrong()
        said.append(str(raised.value))
    assert KEY.text not in "".join(said)
    assert "short" not in said[-1]


def test_comparisons_take_the_same_time_whatever_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every MAC is compared by the function that is made for it."""
    compared, real = [], hmac.compare_digest

    def compare(one: str, other: str) -> bool:
        compared.append((one, other))
        return real(one, other)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    door = Authenticator(KEY, NODE)
    signer = met(Signer(KEY, NODE), door)
    nonce, request = asked(signer)
    signer.check(nonce, 200, door.answer(admit(door, request), 200))
    assert len(compared) == 4


# --- where a key comes from -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["", "short", "x" * 15, "x" * 1025, "has spaces in it, and more", "zeile\n" + "x" * 20, "é" * 20]
)
def test_what_is_no_key_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="node key"):
        NodeKey(text)
    file = tmp_path / "key"
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(InvalidConfig, match="node key"):
        read_node_key(file)


@pytest.mark.fault("S23")
@pytest.mark.parametrize("text", ["a" * 20, "0123456789" * 2, "abab" * 5, "aaaaaaaaaaaaaaab"])
def test_what_could_be_guessed_is_no_key(text: str) -> None:
    with pytest.raises(InvalidConfig, match="guessed"):
        NodeKey(text)


def test_purposes_have_keys_of_their_own() -> None:
    assert len({KEY.derived("a"), KEY.derived("b"), OTHER.derived("a"), KEY.text.encode()}) == 4
    assert NodeKey.random() != NodeKey.random()


def test_a_key_survives_a_file_that_nobody_else_can_read(tmp_path: Path) -> None:
    file, key = tmp_path / "key", NodeKey.random()
    write_node_key(file, key)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert read_node_key(file) == key
    assert [path.name for path in tmp_path.iterdir()] == ["key"]
    with pytest.raises(FileExistsError):
        write_node_key(file, NodeKey.random())
    assert read_node_key(file) == key
    for mode in (0o604, 0o606, 0o622):
        file.chmod(mode)
        with pytest.raises(InvalidConfig, match="chmod 600"):
            read_node_key(file)
    file.chmod(0o640)  # a group that somebody chose
    assert read_node_key(file) == key
    with pytest.raises(InvalidConfig, match="cannot be read"):
        read_node_key(tmp_path / "nowhere")


def test_which_key_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEADWATER_NODE_KEY", "HEADWATER_NODE_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    named, other = tmp_path / "named", tmp_path / "other"
    write_node_key(named, KEY)
    write_node_key(other, OTHER)
    own = find_node_key(None)
    assert own.own
    assert find_node_key(None) == own  # made once
    assert environment.own_node_key_file() == tmp_path / "state" / "headwater" / "node.key"
    assert find_node_key(named) == KEY
    monkeypatch.setenv("HEADWATER_NODE_KEY", OTHER.text)
    assert find_node_key(None) == OTHER
    assert find_node_key(named) == KEY
    monkeypatch.setenv("HEADWATER_NODE_KEY_FILE", str(other))
    with pytest.raises(InvalidConfig, match="which of them"):
        find_node_key(None)
    monkeypatch.delenv("HEADWATER_NODE_KEY")
    assert find_node_key(None) == OTHER
    assert not OTHER.own


def test_a_place_where_no_key_can_be_kept_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidConfig, match="--node-key-file"):
        own_node_key(tmp_path / "file" / "node.key")


def test_processes_that_make_it_at_once_have_the_same(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from headwater.disagg.key_file import own_node_key
print("ready", flush=True)
sys.stdin.readline()
print(own_node_key(Path(sys.argv[1])).text)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "deep" / "node.key")]
    options: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": os.environ}
    processes = [subprocess.Popen(command, **options) for _ in range(6)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    said = {process.communicate(timeout=60)[0] for process in processes}
    assert len(said) == 1
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["node.key"]
