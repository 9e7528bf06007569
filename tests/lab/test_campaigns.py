"""The fault campaigns of the test kit: kill and stop, damage, cleaners and forks, two caches on one directory.

What is run here is short; the nightly profile runs ten times as much (1,100 rounds, 8,000 damages), and each campaign
can be run alone for as long as wanted.
"""

import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from headwater.core.results import Status
from headwater.lab.campaigns import cleaner, crash, damage, stopped, two_caches
from headwater.storage.base import Deadline
from headwater.storage.local import LocalStore

NIGHTLY = os.environ.get("HEADWATER_TEST_PROFILE") == "nightly"
FACTOR = 10 if NIGHTLY else 1

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(600 * FACTOR)]


@pytest.mark.long
@pytest.mark.parametrize(("medium", "tight", "rounds"), [("tmpfs", True, 50), ("disk", True, 30), ("tmpfs", False, 30)])
def test_processes_are_killed_and_stopped(shm: Path, tmp_path: Path, medium: str, tight: bool, rounds: int) -> None:
    parent = shm if medium == "tmpfs" else tmp_path
    report = crash.campaign(
        parent / "store", rounds=rounds * FACTOR, seed=rounds, tight=tight, evictions=1001 if tight else 0
    )
    assert report.ok, report
    assert report.kills > rounds // 4
    assert report.stops > rounds // 4
    assert report.evictions > 1000 if tight else report.evictions == 0


@pytest.mark.long
@pytest.mark.parametrize(("medium", "damages"), [("tmpfs", 600), ("disk", 200)])
def test_files_are_damaged(shm: Path, tmp_path: Path, medium: str, damages: int) -> None:
    result = damage.campaign(damages * FACTOR, seed=3, directory=shm if medium == "tmpfs" else tmp_path)
    assert result["ok"], {key: value for key, value in result.items() if key != "kinds"}
    assert result["damages"] == damages * FACTOR


@pytest.mark.fault("A1")
def test_files_are_cleaned_away_under_processes_that_fork(shm: Path) -> None:
    result = cleaner.campaign(shm, seconds=15 * FACTOR, seed=2, interval_s=0.3)
    assert result["ok"], result
    assert result["seen"]["forks"] > 5
    assert result["seen"]["revived"] > 5


@pytest.mark.long
@pytest.mark.fault("A3")
@pytest.mark.parametrize(("medium", "calls"), [("tmpfs", 150), ("disk", 600)])  # on a disk, reading is a call too
def test_a_process_is_stopped_wherever_it_may_be(shm: Path, tmp_path: Path, medium: str, calls: int) -> None:
    parent = shm if medium == "tmpfs" else tmp_path
    for seen in (
        stopped.at_moments(parent / "moments", moments=100 * FACTOR, seed=3),
        stopped.at_system_calls(parent / "calls", calls=calls * FACTOR, seed=4),
    ):
        assert seen.ok, seen
    assert seen.blocked["put"] > 0, "it was never stopped with the lock in hand"  # between any two system calls


@pytest.mark.fault("A3")
@pytest.mark.parametrize("what", ["sleeps", "computes"])
def test_who_is_late_by_itself_is_not_taken_for_starved(shm: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    put = LocalStore.put

    def slow_put(self: LocalStore, pages: Any, *, deadline: Deadline) -> list[Status]:
        if what == "sleeps":
            time.sleep(0.4)
        else:
            until_s = time.thread_time() + 0.4
            while time.thread_time() < until_s:
                pass
        return put(self, pages, deadline=deadline)

    watcher = stopped.Watcher(shm / "store", random.Random(1))
    monkeypatch.setattr(LocalStore, "put", slow_put)
    watcher.look()
    watcher.store.close()
    assert not watcher.seen.ok
    assert +watcher.seen.late == Counter(put=1)
    assert "put" in [why["what"] for why in watcher.seen.why]


@pytest.mark.fault("A3")
def test_a_read_that_waits_until_its_deadline_is_not_taken_for_starved(tmp_path: Path) -> None:
    watcher = stopped.Watcher(tmp_path / "store", random.Random(1))  # on a disk, where pages are read by that call

    def waits(pages: Any, *, deadline: Deadline, **_: Any) -> list[Status]:  # for a lock, and wakes up now and then
        while not deadline.expired:
            time.sleep(min(0.001, deadline.remaining_s))
        return [Status.LATE] * len(pages)

    watcher.store.read_pieces = waits  # type: ignore[method-assign]
    for _ in range(10):
        watcher.look()
    watcher.store.close()
    assert watcher.seen.missed == 10 * len(stopped.THERE)


@pytest.mark.long
def test_two_caches_on_one_directory_are_killed_and_stopped(shm: Path) -> None:
    report = two_caches.campaign(shm / "store", seconds=30 * FACTOR, seed=1, least=3)
    assert report.ok, report
    assert report.kills > 2
    assert report.stops > 2
    assert report.requests > 1000
