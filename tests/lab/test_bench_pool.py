"""The benchmark of pools: that it measures what it says, on real servers, and sees a wrong byte. Never how fast."""

import json
import shutil
import subprocess
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from headwater.cli import app
from headwater.core.errors import HeadwaterError, InvalidConfig
from headwater.core.results import Status
from headwater.lab.bench import pool
from headwater.lab.bench.pool_ways import NAMES
from headwater.storage.base import Deadline
from headwater.storage.memory import MemoryStore
from headwater.storage.verified import VerifiedStore

TINY = ["--page-kib", "16", "--batch", "8", "--round-mib", "1", "--rounds", "2"]


def run(*arguments: str) -> dict[str, Any]:
    found = CliRunner().invoke(app, ["bench", "pool", *TINY, *arguments, "--json"])
    assert found.exit_code == 0, found.output
    document: dict[str, Any] = json.loads(found.stdout)
    return document


def test_a_run_over_all_stores() -> None:
    """In a process of its own: the Mooncake engine keeps files open as long as its process lives."""
    command = [sys.executable, "-c", "from headwater.cli import app; app()", "bench", "pool", *TINY, "--json"]
    document = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=240).stdout)
    assert document["command"] == "bench pool"
    assert [row["store"] for row in document["rows"]] == list(NAMES)
    for row in document["rows"]:
        assert "skipped" not in row
        assert min(row["put_gbs"], row["get_gbs"], row["memcpy_gbs"], row["checks_per_s_64"]) > 0
        has_bare = row["store"] not in ("memory", "local")
        assert (row["bare_put_gbs"] is not None) == (row["get_ratio"] is not None) == has_bare
        if has_bare:
            assert row["put_ratio"] == pytest.approx(row["put_gbs"] / row["bare_put_gbs"], rel=0.05)
        assert row["bytes"] == 1 << 20
        assert len(document["samples"][f"{row['store']}_16_put_gbs"]) == 2
    assert document["residency_lookups_per_s"] > 0


def test_it_can_be_read_by_people() -> None:
    found = CliRunner().invoke(app, ["bench", "pool", *TINY, "--stores", "memory"])
    assert found.exit_code == 0
    assert "memory" in found.stdout


def test_what_cannot_be_had_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    document = run("--stores", "redis,memory")
    assert "apt-get install redis-server" in document["rows"][0]["skipped"]
    assert "put_gbs" in document["rows"][1]
    assert "redis-server" in document["residency_skipped"]


def test_a_wrong_byte_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    get_into = VerifiedStore.get_into

    def spoil(self: VerifiedStore, pages: Any, *, deadline: Deadline) -> list[Status]:
        found = get_into(self, pages, deadline=deadline)
        pages[0][1][-1] ^= 1
        return found

    monkeypatch.setattr(VerifiedStore, "get_into", spoil)
    with pytest.raises(HeadwaterError, match="wrong bytes"):
        pool.run(pool.PoolOptions(stores=("memory",), page_kib=(16,), batch_pages=8, round_mib=1, rounds=1))


def test_a_page_that_is_lost_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryStore, "get_into", lambda _, pages, *, deadline: [Status.MISS] * len(pages))
    with pytest.raises(HeadwaterError, match="did not give a page back"):
        pool.run(pool.PoolOptions(stores=("memory",), page_kib=(16,), batch_pages=8, round_mib=1, rounds=1))


@pytest.mark.parametrize(
    "options", [{"stores": ("ftp",)}, {"stores": ()}, {"page_kib": ()}, {"page_kib": (1,)}, {"rounds": 0}]
)
def test_nonsense_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig):
        pool.PoolOptions(**options)
