"""The command line: what it says, where it says it, and what it must never do."""

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from headwater import __version__
from headwater.build import open_local
from headwater.cli import app
from headwater.config.stores import LocalStoreConfig
from headwater.core.errors import InvalidInput, StoreDamaged
from headwater.core.page import PageName
from headwater.core.results import BAD_PAGE, Status
from headwater.lab import demo
from headwater.layout.frame import PageMeta, frame_bytes, header_bytes, seal
from headwater.layout.spec import opaque_layout
from headwater.storage.base import Deadline
from headwater.storage.local import LocalStore, audit, directory
from headwater.storage.local.families import FamilyUse
from headwater.storage.local.geometry import Geometry
from headwater.testing.copy import scatter

PLANES = (3000, 5000)
LAYOUT = opaque_layout(PLANES, 16)
LIMIT = 16 << 20
MODEL_A = hashlib.sha256(b"a").digest()
MODEL_B = hashlib.sha256(b"b").digest()
TENANT = hashlib.sha256(b"t").digest()[:16]


def invoke(*args: str | Path, input: str | None = None) -> Result:  # noqa: A002  the runner's own word
    return CliRunner().invoke(app, [str(arg) for arg in args], input=input)


def soon() -> Deadline:
    return Deadline.after(10)


def chain(identity: bytes, tenant: bytes = bytes(16), *, length: int, tag: str = "") -> list[PageMeta]:
    parent = hashlib.sha256(identity + tenant).digest()
    metas = []
    for depth in range(length):
        key = hashlib.sha256(parent + tag.encode()).digest()
        metas.append(PageMeta(key=key, identity=identity, tenant=tenant, parent=parent, depth=depth, valid_tokens=16))
        parent = key
    return metas


def put(store: LocalStore, metas: Sequence[PageMeta]) -> list[PageName]:
    pages = []
    for meta in metas:
        frame = memoryview(bytearray(frame_bytes(PLANES)))
        frame[header_bytes(len(PLANES)) :] = os.urandom(sum(PLANES))
        seal(frame, meta, LAYOUT, now_ms=int(time.time() * 1000))
        pages.append((meta.name, frame))
    assert set(store.put(pages, deadline=soon())) == {Status.STORED}
    return [name for name, _ in pages]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store on disk: five pages of A, three of A for a tenant, two of B."""
    place = tmp_path / "store"
    with open_local(LocalStoreConfig(directory=place, limit_bytes=LIMIT)) as store:
        put(store, chain(MODEL_A, length=5))
        put(store, chain(MODEL_A, TENANT, length=3))
        put(store, chain(MODEL_B, length=2))
        store.label(MODEL_A, bytes(16), "llama [base]", deadline=soon())
    return place


def spoil(path: Path, name: PageName, at: int = 5000) -> None:
    """Flip a byte of a page in the slab, found by its key."""
    slab = path / directory.SLAB
    data = bytearray(slab.read_bytes())
    start = data.index(name[:32], Geometry.plan(LIMIT).data_at) - 32  # behind the index, which has it too
    data[start + at] ^= 0x40
    slab.write_bytes(data)


# --- in general -------------------------------------------------------------------------------------------------------


def test_version() -> None:
    result = invoke("--version")
    assert result.exit_code == 0
    assert result.stdout == f"headwater {__version__}\n"


@pytest.mark.parametrize(
    "command", [(), ("demo",), ("bench",), ("bench", "index"), ("bench", "store"), ("ls",), ("purge",), ("check",)]
)
def test_every_command_explains_itself(command: tuple[str, ...]) -> None:
    result = invoke(*command, "--help")
    assert result.exit_code == 0
    assert "Usage:" in result.stdout


@pytest.mark.parametrize("command", [("ls",), ("check",), ("purge", "--all", "--yes"), ("purge", "--identity", "ab")])
@pytest.mark.parametrize("exists", [False, True])
def test_a_missing_store_is_said_and_not_made(tmp_path: Path, command: tuple[str, ...], exists: bool) -> None:
    place = tmp_path / "nothing"
    if exists:
        place.mkdir()
    result = invoke(command[0], place, *command[1:])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == f"headwater: no store in {place}\n"
    assert place.exists() == exists
    assert not exists or not list(place.iterdir())


def test_the_directory_comes_from_the_environment(path: Path) -> None:
    environment = {"HEADWATER_DIR": str(path)}
    done = subprocess.run(
        [sys.executable, "-c", "from headwater.cli import app; app()", "ls", "--json"],
        env=os.environ | environment,
        capture_output=True,
        check=True,
        timeout=60,
    )
    assert json.loads(done.stdout)["directory"] == str(path)


def test_errors_are_one_line_without_a_traceback(path: Path) -> None:
    (path / directory.SLAB).write_bytes(b"rubbish" * 4096)
    done = run("ls", str(path))
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("headwater: ")
    assert done.stderr.count("\n") == 1


def test_a_file_that_cannot_be_read_is_one_line_too(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(config: LocalStoreConfig) -> LocalStore:
        raise PermissionError(13, "Permission denied", str(config.directory))

    monkeypatch.setattr("headwater.cli.store.open_local", refuse)
    result = invoke("ls", path)
    assert result.exit_code == 1
    assert result.stderr == f"headwater: {path}: Permission denied\n"


# --- ls ---------------------------------------------------------------------------------------------------------------


def test_ls_shows_each_identity_and_tenant(path: Path) -> None:
    result = invoke("ls", path)
    assert result.exit_code == 0, result.stderr
    assert "llama [base]" in result.stdout
    assert MODEL_A.hex()[:12] in result.stdout
    assert MODEL_B.hex()[:12] in result.stdout
    assert TENANT.hex()[:12] in result.stdout
    assert "10 pages" in result.stdout
    assert "16.0 MiB" in result.stdout


def test_ls_json(path: Path) -> None:
    found = json.loads(invoke("ls", path, "--json").stdout)
    assert found["limit_bytes"] == LIMIT
    assert found["num_live"] == 10
    assert found["num_reserved"] == 0
    assert found["num_bytes"] == 10 * frame_bytes(PLANES)
    rows = {(row["identity"], row["tenant"]): row for row in found["families"]}
    assert set(rows) == {(MODEL_A.hex(), None), (MODEL_A.hex(), TENANT.hex()), (MODEL_B.hex(), None)}
    first = rows[MODEL_A.hex(), None]
    assert (first["label"], first["num_pages"], first["num_tokens"], first["max_depth"]) == ("llama [base]", 5, 80, 4)
    assert abs(first["last_used_s"] - time.time()) < 300


def test_ls_beside_a_process_that_uses_the_store(path: Path) -> None:
    with open_local(LocalStoreConfig(directory=path)) as store:
        put(store, chain(MODEL_B, length=1, tag="more"))
        assert json.loads(invoke("ls", path, "--json").stdout)["num_live"] == 11


# --- purge ------------------------------------------------------------------------------------------------------------


def left(path: Path) -> dict[tuple[bytes, bytes], int]:
    with open_local(LocalStoreConfig(directory=path)) as store:
        return {(use.identity, use.tenant): use.num_pages for use in store.usage(deadline=soon())}


def test_purge_an_identity(path: Path) -> None:
    result = invoke("purge", path, "--identity", MODEL_A.hex()[:6].upper(), "--yes")
    assert result.exit_code == 0, result.stderr
    assert "8 pages removed" in result.stdout
    assert left(path) == {(MODEL_B, bytes(16)): 2}


@pytest.mark.parametrize(("tenant", "removed"), [("-", 7), (TENANT.hex()[:4], 3)])
def test_purge_a_tenant(path: Path, tenant: str, removed: int) -> None:
    found = json.loads(invoke("purge", path, "--tenant", tenant, "--yes", "--json").stdout)
    assert (found["num_pages"], found["num_left"]) == (removed, 0)
    assert found["num_bytes"] == removed * frame_bytes(PLANES)
    assert sum(left(path).values()) == 10 - removed


def test_purge_a_tenant_of_an_identity(path: Path) -> None:
    invoke("purge", path, "--identity", MODEL_A.hex(), "--tenant", "-", "--yes")
    assert left(path) == {(MODEL_A, TENANT): 3, (MODEL_B, bytes(16)): 2}


def test_purged_pages_do_not_come_back_in_a_rebuild(path: Path) -> None:
    invoke("purge", path, "--identity", MODEL_A.hex(), "--yes")
    geometry = Geometry.plan(LIMIT)
    with (path / directory.SLAB).open("r+b") as slab:
        slab.seek(geometry.records_at)
        slab.write(bytes(geometry.uses_at - geometry.records_at))
    assert left(path) == {(MODEL_B, bytes(16)): 2}


def test_purge_asks_and_takes_no_for_an_answer(path: Path) -> None:
    result = invoke("purge", path, "--identity", MODEL_A.hex(), input="n\n")
    assert result.exit_code == 1
    assert "Remove 8 pages" in result.stderr
    assert sum(left(path).values()) == 10
    assert invoke("purge", path, "--identity", MODEL_A.hex(), input="y\n").exit_code == 0
    assert sum(left(path).values()) == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "say what to remove"),
        (("--all", "--identity", "ab"), "say what to remove"),
        (("--identity", "zz", "--yes"), "hex digits"),
        (("--identity", "", "--yes"), "hex digits"),
        (("--identity", "00000000", "--yes"), "no pages of identity 00000000 here"),
        (("--tenant", "12345678", "--yes"), "no pages of tenant 12345678 here"),
        (("--all", "--json"), "add --yes"),
    ],
)
def test_purge_refuses_what_is_not_clear(path: Path, options: tuple[str, ...], said: str) -> None:
    result = invoke("purge", path, *options)
    assert result.exit_code == 1
    assert said in result.stderr
    assert result.stdout == ""
    assert sum(left(path).values()) == 10


def test_an_ambiguous_prefix_is_refused(tmp_path: Path) -> None:
    twins = [b"\xab" + bytes([number]) * 31 for number in range(2)]
    with open_local(LocalStoreConfig(directory=tmp_path / "store", limit_bytes=LIMIT)) as store:
        for twin in twins:
            put(store, chain(twin, length=1))
    result = invoke("purge", tmp_path / "store", "--identity", "ab", "--yes")
    assert result.exit_code == 1
    assert "identity ab is ambiguous: ab000000" in result.stderr
    assert invoke("purge", tmp_path / "store", "--identity", "ab01", "--yes").exit_code == 0
    assert set(left(tmp_path / "store")) == {(twins[0], bytes(16))}


def test_select_is_exact() -> None:
    use = FamilyUse(MODEL_A, TENANT, "", 1, 1, 1, 0, 0.0)
    assert audit.select([use], identity_prefix=None, tenant_prefix=None) == [use]
    with pytest.raises(InvalidInput):
        audit.select([use], identity_prefix=None, tenant_prefix="-")
    with pytest.raises(InvalidInput):
        audit.select([], identity_prefix="ab", tenant_prefix=None)


def test_purge_all_removes_the_files(path: Path) -> None:
    found = json.loads(invoke("purge", path, "--all", "--yes", "--json").stdout)
    assert found["num_pages"] == 10
    assert not (path / directory.SLAB).exists()
    assert invoke("ls", path).exit_code == 1


def test_purge_all_waits_for_nobody(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.cli.store._DESTROY_S", 0.1)
    with open_local(LocalStoreConfig(directory=path)):
        result = invoke("purge", path, "--all", "--yes")
    assert result.exit_code == 1
    assert "in use" in result.stderr
    assert sum(left(path).values()) == 10


@pytest.mark.fault("A5")
def test_purge_all_touches_nothing_that_does_not_say_that_it_is_a_store(path: Path) -> None:
    (path / directory.SLAB).write_bytes(b"precious" * 4096)
    result = invoke("purge", path, "--all", "--yes")
    assert result.exit_code == 1
    assert "no readable header" in result.stderr
    assert (path / directory.SLAB).read_bytes() == b"precious" * 4096


# --- check ------------------------------------------------------------------------------------------------------------


def test_check_of_a_good_store(path: Path) -> None:
    result = invoke("check", path)
    assert result.exit_code == 0, result.stderr
    assert "10 pages" in result.stdout
    assert "all intact" in result.stdout


@pytest.mark.parametrize(("at", "fault"), [(5000, "corrupt"), (200, "corrupt"), (5, "unknown_version"), (0, "corrupt")])
def test_check_finds_a_flipped_byte(path: Path, at: int, fault: str) -> None:
    bad = chain(MODEL_A, length=5)[2].name
    spoil(path, bad, at)
    result = invoke("check", path, "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert not found["intact"]
    assert found["faults"] == {other.value: int(other.value == fault) for other in BAD_PAGE}
    assert found["bad"] == [{"name": bad.hex(), "fault": fault, "identity": MODEL_A.hex(), "tenant": None}]
    assert found["num_removed"] == 0
    drawn = invoke("check", path)
    assert drawn.exit_code == 1
    assert bad.hex() in drawn.stdout
    assert f"1 bad, 1 {fault}" in drawn.stdout


def test_check_removes_a_bad_page_and_what_builds_on_it(path: Path) -> None:
    spoil(path, chain(MODEL_A, length=5)[2].name)
    result = invoke("check", path, "--remove", "--json")
    assert result.exit_code == 1, "there was a bad page"
    assert json.loads(result.stdout)["num_removed"] == 1
    assert left(path)[MODEL_A, bytes(16)] == 2
    assert invoke("check", path).exit_code == 0


def test_check_leaves_pages_of_an_unknown_version(path: Path) -> None:
    spoil(path, chain(MODEL_A, length=5)[2].name, at=5)
    found = json.loads(invoke("check", path, "--remove", "--json").stdout)
    assert (found["num_bad"], found["num_removed"]) == (1, 0)
    assert sum(left(path).values()) == 10


def test_an_expired_page_is_no_damage(path: Path) -> None:
    with open_local(LocalStoreConfig(directory=path)) as store:
        (meta,) = chain(MODEL_B, length=1, tag="old")
        put(store, [replace(meta, expires_at_ms=1)])
        found = audit.check(store)
    assert found.intact
    assert found.num_expired == 1


def test_check_tells_when_the_index_is_wrong_about_the_family(path: Path) -> None:
    with open_local(LocalStoreConfig(directory=path)) as store:
        family = next(use for use in store.usage(deadline=soon()) if use.tenant == TENANT)
        (name, *_) = store.names(deadline=soon(), identity=MODEL_A, tenant=TENANT)
        frame = memoryview(bytearray(store.frame_bytes(name) or 0))
        liar = replace(family, tenant=bytes(16))
        assert audit._check_page(store, name, liar, frame) is Status.FOREIGN
        assert audit._check_page(store, name, family, frame) == "intact"


def test_a_store_that_is_down_is_an_error_and_not_an_empty_answer(path: Path) -> None:
    with open_local(LocalStoreConfig(directory=path)) as store:
        os.truncate(path / directory.SLAB, 1000)
        with pytest.raises(StoreDamaged):
            audit.survey(store)


# --- demo -------------------------------------------------------------------------------------------------------------


def test_demo_brings_every_layout_back(monkeypatch: pytest.MonkeyPatch) -> None:
    real = demo.run
    monkeypatch.setattr(demo, "run", lambda **options: real(target_bytes=1 << 16, **options))
    result = invoke("demo")
    assert result.exit_code == 0, result.output
    assert "layouts equal" in result.stdout
    assert "mla-bf16" in result.stdout


def test_demo_says_which_layout_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    good = demo.TierResult(medium="memory", write_gbs=1.0, read_gbs=1.0, problem="")
    bad = demo.TierResult(medium="disk", write_gbs=1.0, read_gbs=1.0, problem="plane key.0 differs")
    row = demo.LayoutResult(layout="odd", num_planes=1, page_bytes=1, num_pages=1, host=good, disk=bad)
    monkeypatch.setattr(demo, "run", lambda **_: [row])
    result = invoke("demo")
    assert result.exit_code == 1
    assert "odd on disk: plane key.0 differs" in result.stdout
    assert result.stdout.endswith("not equal: odd\n")
    document = json.loads(invoke("demo", "--json").stdout)
    assert document["all_equal"] is False
    assert document["results"][0]["disk"]["problem"] == "plane key.0 differs"


def test_demo_would_see_a_wrong_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(cache: Any, *args: Any, **options: Any) -> None:
        scatter(cache, *args, **options)
        cache.rows[-1][:, -1] ^= 1

    monkeypatch.setattr(demo, "scatter", spoiled)
    results = demo.run(target_bytes=1)
    assert results
    assert not any(result.equal for result in results)


def test_demo_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "memory_root", lambda need_bytes: tmp_path)
    monkeypatch.setattr(demo, "disk_root", lambda: tmp_path)
    monkeypatch.setattr(demo, "scatter", fail)
    with pytest.raises(KeyboardInterrupt):
        demo.run(target_bytes=1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("device", ["tpu", "cuda"])
def test_demo_needs_a_device_that_is_there(device: str) -> None:
    import torch

    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is one")
    result = invoke("demo", "--device", device)
    assert result.exit_code == 1
    assert device in result.stderr.lower()


# --- purity -----------------------------------------------------------------------------------------------------------


def run(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from headwater.cli import app; app()", *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize(
    "args",
    [
        ("ls", "{path}"),
        ("check", "{path}"),
        ("purge", "{path}", "--tenant", "-", "--yes"),
        ("bench", "index", "--tokens", "4096", "--rounds", "2"),
        (
            *("bench", "store", "--page-kib", "32", "--live-mib", "4", "--pool-mib", "4"),
            *("--entries", "100", "--seconds", "0", "--disk-dir", "{path}"),
        ),
    ],
    ids=lambda args: " ".join(args[:2]),
)
def test_json_is_all_there_is_on_standard_output(path: Path, args: tuple[str, ...]) -> None:
    done = run(*(arg.format(path=path) for arg in args), "--json")
    assert done.returncode == 0, done.stderr
    assert isinstance(json.loads(done.stdout), dict)
    assert done.stderr == "", "no terminal, no bar"
