"""LocalStore beyond the conformance suite: restarts, rebuilds, limits, other processes, bad directories."""

import errno
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headwater import policy
from headwater.build import open_local, open_tier
from headwater.config import Durability, LocalStoreConfig, default_directory
from headwater.core.errors import (
    InvalidConfig,
    ResourceClosed,
    StoreBusy,
    StoreDamaged,
    StoreError,
    StoreForked,
    StoreMismatch,
    StoreUnavailable,
)
from headwater.layout.frame import frame_bytes
from headwater.metrics import Metrics
from headwater.policy import Lru
from headwater.storage import directory
from headwater.storage.attach import destroy
from headwater.storage.base import Addressable, Deadline, GetStatus, PutStatus, Reservation
from headwater.storage.catalog import Catalog
from headwater.storage.database import FREE, LIVE, RESERVED
from headwater.storage.disabled import DisabledStore
from headwater.storage.local import LocalStore
from headwater.storage.mapped import MappedStore
from headwater.storage.verified import VerifiedStore
from headwater.testing.clock import FakeClock
from headwater.testing.pages import IDENTITY, PLANE_BYTES, SEALED_AT_MS, SamplePage, items, sample_chain, sample_page
from headwater.testing.processes import Helper
from headwater.testing.stores import put, read, soon

LIMIT = 8 << 20
BIG = (100_000, 7)  # two pages an extent, 32 in all


def config(path: Path, **options: object) -> LocalStoreConfig:
    return LocalStoreConfig(directory=path / "store", **{"limit_bytes": LIMIT, **options})  # type: ignore[arg-type]


@pytest.fixture(params=["tmpfs", "disk"])
def place(request: pytest.FixtureRequest, shm: Path, tmp_path: Path) -> Path:
    """Both media."""
    return shm if request.param == "tmpfs" else tmp_path


@pytest.fixture
def helper() -> Iterator[Callable[[], Helper]]:
    """Starts other processes, and ends them."""
    started: list[Helper] = []

    def start() -> Helper:
        started.append(Helper())
        return started[-1]

    yield start
    for one in started:
        one.kill()


def hits(store: LocalStore, pages: list[SamplePage]) -> int:
    return read(store, pages).count(GetStatus.HIT)


# --- restart and rebuild ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", list(Durability))
def test_a_restart_keeps_what_was_stored(place: Path, durability: Durability) -> None:
    pages = sample_chain(1, 30)
    with open_local(config(place, durability=durability)) as store:
        put(store, pages)
    with open_local(config(place, limit_bytes=None, durability=durability)) as store:
        assert hits(store, pages) == 30
        assert store.metrics.counters().get("local.rebuilt", 0) == 0
        assert store.validate(deadline=soon()) == []


@pytest.mark.parametrize("damage", ["missing", "rubbish", "empty", "other slab", "old", "cut log"])
def test_a_lost_index_is_rebuilt_from_frames(place: Path, damage: str) -> None:
    pages = [*sample_chain(1, 20), *(sample_page(i, plane_bytes=BIG) for i in range(40, 45))]
    index = place / "store" / directory.INDEX
    with open_local(config(place)) as store:
        put(store, pages[:10])
    old = index.read_bytes()
    with open_local(config(place)) as store:
        put(store, pages[10:])
        store.delete([pages[15].name], deadline=soon())
        if damage == "cut log":  # as a crash leaves it: the newest changes are in the log alone
            shutil.copytree(place / "store", place / "copy")
    if damage == "missing":
        index.unlink()
    elif damage == "rubbish":
        index.write_bytes(os.urandom(100_000))
    elif damage == "empty":
        index.write_bytes(b"")
    elif damage == "other slab":
        with open_local(LocalStoreConfig(directory=place / "other", limit_bytes=LIMIT)):
            pass
        shutil.copy(place / "other" / directory.INDEX, index)
    elif damage == "old":
        index.write_bytes(old)
    else:
        shutil.rmtree(place / "store")
        shutil.copytree(place / "copy", place / "store")
        log = index.with_name(directory.INDEX + "-wal")
        os.truncate(log, log.stat().st_size // 2)
    with open_local(config(place)) as store:
        assert store.metrics.counters()["local.rebuilt"] == 1
        assert store.validate(deadline=soon()) == []
        assert hits(store, pages) == 20, "what was deleted, and what built on it, must not come back"
        assert hits(store, pages[15:20]) == 0


def test_an_unclean_reboot_rebuilds_and_a_clean_one_does_not(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = sample_chain(1, 10)
    with open_local(config(place)) as store:
        put(store, pages)
        shutil.copytree(place / "store", place / "crashed")
    monkeypatch.setattr(directory, "boot_id", lambda: "another start of the machine")
    with open_local(config(place)) as store:
        assert store.metrics.counters().get("local.rebuilt", 0) == 0
        assert hits(store, pages) == 10
    crashed = LocalStoreConfig(directory=place / "crashed")
    with open_local(crashed) as store:
        assert "went down" in store.metrics.events("local.rebuilt")[0].facts["reason"]
        assert hits(store, pages) == 10


def test_a_rebuild_begins_a_new_epoch_and_keeps_the_limit(place: Path) -> None:
    with open_local(config(place)) as store:
        put(store, sample_chain(1, 5))
    (place / "store" / directory.INDEX).unlink()
    with open_local(config(place, limit_bytes=None)) as store:
        assert store.limit_bytes == LIMIT
    with pytest.raises(StoreMismatch, match="limit of 8388608 bytes, 16777216 was asked for"):
        open_local(config(place, limit_bytes=2 * LIMIT))


def test_damage_under_a_running_process_turns_the_store_off_until_it_is_revived(place: Path) -> None:
    pages = sample_chain(1, 10)
    with open_local(config(place)) as store:
        put(store, pages)
        os.truncate(place / "store" / directory.SLAB, 100_000)
        assert read(store, pages) == [GetStatus.FAILED] * 10
        assert put(store, pages) == [PutStatus.FAILED] * 10
        assert store.contains([pages[0].name], deadline=soon()) == [False]
        assert "cut" in str(store.down)
        assert store.metrics.counters()["local.down"] == 1
        assert store.revive()
        assert store.down is None
        reader = VerifiedStore(store, identity=IDENTITY, plane_bytes=PLANE_BYTES)
        kept = read(reader, pages).count(GetStatus.HIT)  # those before the cut; a page across it is thrown out
        assert 0 < kept < 10
        assert put(store, pages).count(PutStatus.STORED) == 10 - kept
        assert hits(store, pages) == 10


def test_an_index_that_was_replaced_under_us_is_noticed(place: Path) -> None:
    pages = sample_chain(1, 10)
    with open_local(config(place)) as store:
        put(store, pages)
        (place / "store" / directory.INDEX).unlink()
        assert put(store, sample_chain(2, 3)) == [PutStatus.FAILED] * 3
        assert "removed or replaced" in str(store.down)
        assert store.revive()
        assert hits(store, pages) == 10


def test_two_users_of_a_damaged_directory_both_come_back(place: Path) -> None:
    pages = sample_chain(1, 10)
    with open_local(config(place)) as first, open_local(config(place)) as second:
        put(first, pages)
        slab = place / "store" / directory.SLAB
        os.truncate(slab, slab.stat().st_size + 1)
        put(first, sample_chain(2, 3))
        assert first.down is not None
        assert not first.revive(), "the other one is still inside"
        put(second, sample_chain(2, 3))
        assert second.down is not None
        assert first.revive()
        assert second.revive()
        assert hits(second, pages) == 10
        assert put(first, sample_chain(2, 3)) == [PutStatus.STORED] * 3
        assert hits(second, sample_chain(2, 3)) == 3


# --- bad directories --------------------------------------------------------------------------------------------------


def test_a_new_directory_needs_a_limit(place: Path) -> None:
    with pytest.raises(StoreUnavailable, match="give limit_bytes"):
        open_local(config(place, limit_bytes=None))


def test_what_cannot_be_a_store_says_so_and_the_cache_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "store"
    file.write_text("not a directory")
    metrics = Metrics()
    store = open_tier(config(tmp_path), metrics=metrics)
    assert isinstance(store, DisabledStore)
    assert "cannot use" in store.reason
    page = sample_page(1)
    assert store.put([page.item], deadline=soon()) == [PutStatus.FAILED]
    assert store.get_into([(page.name, page.buffer())], deadline=soon()) == [GetStatus.MISS]
    assert store.contains([page.name], deadline=soon()) == [False]
    assert metrics.counters()["tier.disabled"] == 1
    store.close()
    with pytest.raises(ResourceClosed):
        store.contains([page.name], deadline=soon())


def test_a_full_file_system_is_told_at_the_door_and_leaves_nothing(place: Path) -> None:
    with pytest.raises(StoreUnavailable, match="choose a lower limit"):
        open_local(config(place, limit_bytes=1 << 50))
    assert not (place / "store" / directory.SLAB).exists()
    with open_local(config(place)) as store:
        assert put(store, [sample_page(1)]) == [PutStatus.STORED]


def test_a_file_system_that_fills_up_meanwhile_is_told_too(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, start: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StoreUnavailable, match=r"cannot allocate .* No space left"):
        open_local(config(place))
    assert not (place / "store" / directory.SLAB).exists()


def test_a_directory_of_another_user_or_open_to_others_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store").chmod(0o777)
    with pytest.raises(StoreUnavailable, match="can be written by other users"):
        open_local(config(tmp_path))
    (tmp_path / "store").chmod(0o700)
    if os.geteuid() == 0:
        os.chown(tmp_path / "store", 12345, 12345)
        with pytest.raises(StoreUnavailable, match="belongs to user 12345"):
            open_local(config(tmp_path))


def test_another_version_is_refused_and_not_touched(place: Path) -> None:
    with open_local(config(place)) as store:
        put(store, [sample_page(1)])
    slab = place / "store" / directory.SLAB
    from headwater.storage import slab as slab_module

    original = slab_module.VERSION
    try:
        slab_module.VERSION = 2  # type: ignore[misc]
        before = slab.read_bytes()
        with pytest.raises(StoreUnavailable, match="written in format 1, this version reads 2"):
            open_local(config(place))
        assert slab.read_bytes() == before
    finally:
        slab_module.VERSION = original  # type: ignore[misc]
    with open_local(config(place)) as store:
        assert hits(store, [sample_page(1)]) == 1


def test_another_policy_is_refused(place: Path) -> None:
    with open_local(config(place)), pytest.raises(StoreMismatch, match="evicts by 'lru', 'best' was asked for"):
        open_local(config(place, policy="best"))


def test_a_directory_with_a_policy_of_another_version_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Later(Lru):
        name = "later"

    monkeypatch.setitem(policy._POLICIES, "later", Later)
    with open_local(config(place, policy="later")):
        pass
    monkeypatch.undo()
    with pytest.raises(StoreMismatch, match="another version of Headwater: no eviction policy 'later'"):
        open_local(config(place))


def test_an_unknown_policy_is_refused_before_anything_is_made(place: Path) -> None:
    with pytest.raises(InvalidConfig, match="there are: lru"):
        open_local(config(place, policy="fifo"))
    assert not (place / "store" / directory.SLAB).exists()


@pytest.mark.parametrize(
    "options",
    [
        {"limit_bytes": 1000},
        {"limit_bytes": 2e7},
        {"limit_bytes": "1GiB"},
        {"open_timeout_s": 0},
        {"open_timeout_s": float("nan")},
        {"open_timeout_s": "soon"},
        {"durability": "forever"},
        {"directory": 7},
    ],
)
def test_options_are_checked_at_the_door(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig):
        LocalStoreConfig(**{"directory": tmp_path, **options})


def test_plain_values_are_taken_for_what_they_say(tmp_path: Path) -> None:
    config = LocalStoreConfig(directory=str(tmp_path), durability="power")  # type: ignore[arg-type]
    assert config.durability is Durability.POWER
    assert config.directory == tmp_path
    assert default_directory({"HEADWATER_DIR": "/x"}) == Path("/x")
    assert default_directory({"XDG_CACHE_HOME": "/c"}) == Path("/c/headwater")


def test_power_safe_puts_are_synced(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    real = os.fdatasync

    def count(fd: int) -> None:
        synced.append(fd)
        real(fd)

    monkeypatch.setattr(os, "fdatasync", count)
    with open_local(config(place, durability="power")) as store:
        put(store, sample_chain(1, 3))
        assert len(synced) == 1

        def fails(fd: int) -> None:
            raise OSError(errno.EIO, "input/output error")

        monkeypatch.setattr(os, "fdatasync", fails)
        assert put(store, sample_chain(2, 3)) == [PutStatus.FAILED] * 3
        assert "cannot sync" in str(store.down)
        monkeypatch.undo()
        assert store.revive()
        assert hits(store, sample_chain(1, 3)) == 3
        assert hits(store, sample_chain(2, 3)) == 0


# --- limits and eviction ----------------------------------------------------------------------------------------------


def test_the_directory_never_outgrows_its_limit(place: Path) -> None:
    with open_local(config(place)) as store:
        for i in range(60):
            put(store, sample_chain(i, 10))
            size = sum(path.stat().st_size for path in (place / "store").rglob("*") if path.is_file())
            assert size <= LIMIT


def test_many_tiny_pages_cannot_outgrow_the_index(place: Path) -> None:
    tiny = [sample_page(i, plane_bytes=(1,)) for i in range(4000)]
    with open_local(config(place)) as store:
        assert all(status.held for status in put(store, tiny))
        size = sum(path.stat().st_size for path in (place / "store").rglob("*") if path.is_file())
        assert size <= LIMIT


def test_the_least_recently_used_leaf_goes_first(shm: Path) -> None:
    clock = FakeClock()
    chains = [sample_chain(i, 8, plane_bytes=BIG) for i in range(4)]  # 32 slots: full
    with open_local(config(shm), clock=clock) as store:
        for chain in chains:
            clock.advance(10)
            put(store, chain)
        clock.advance(10)
        read(store, chains[0])
        clock.advance(10)
        put(store, [sample_page(99, plane_bytes=BIG)])
        there = [store.contains([page.name for page in chain], deadline=soon()).count(True) for chain in chains]
        assert there == [8, 7, 8, 8]
        put(store, sample_chain(98, 10, plane_bytes=BIG))
        there = [store.contains([page.name for page in chain], deadline=soon()).count(True) for chain in chains]
        assert there == [8, 0, 5, 8]


def test_expired_pages_go_before_any_other(shm: Path) -> None:
    clock = FakeClock(SEALED_AT_MS / 1000)
    lasting = sample_chain(1, 28, plane_bytes=BIG)
    passing = [sample_page(i, plane_bytes=BIG, expires_at_ms=SEALED_AT_MS + 5000) for i in range(50, 54)]
    with open_local(config(shm), clock=clock) as store:
        put(store, [*lasting, *passing])
        assert hits(store, [*lasting, *passing]) == 32
        clock.advance(10)
        put(store, [sample_page(99, plane_bytes=BIG)])
        assert hits(store, lasting) == 28
        assert store.contains([page.name for page in passing], deadline=soon()) == [False] * 4


def test_page_sizes_share_one_limit(place: Path) -> None:
    clock = FakeClock()
    small = [sample_page(i) for i in range(300)]
    large = [sample_page(i, plane_bytes=BIG) for i in range(1000, 1064)]
    with open_local(config(place), clock=clock) as store:
        put(store, small)
        clock.advance(10)
        put(store, large)  # a new layout gets room at once, but not everything at once
        assert hits(store, large) >= 2
        assert hits(store, small) >= 200
        for _ in range(40):  # while it is used and the other is not, the old layout's pages make way
            clock.advance(1)
            put(store, large)
        assert hits(store, large) >= 30
        assert hits(store, small) <= 16
        for _ in range(40):  # and the other way round
            clock.advance(1)
            put(store, small)
        assert hits(store, small) >= 200
        assert store.validate(deadline=soon()) == []


def test_a_page_larger_than_the_store_is_refused(place: Path) -> None:
    with open_local(config(place)) as store:
        huge = sample_page(1, plane_bytes=(LIMIT,))
        assert put(store, [huge, sample_page(2)]) == [PutStatus.REFUSED, PutStatus.STORED]


# --- other processes --------------------------------------------------------------------------------------------------


def test_what_one_process_puts_another_reads_at_once(place: Path, helper: Callable[[], Helper]) -> None:
    other = helper()
    with open_local(config(place)) as store:
        other("open", directory=str(place / "store"))
        put(store, sample_chain(1, 5))
        assert other("get", refs=[(1, d) for d in range(5)]) == ["hit"] * 5
        other("delete", refs=[(1, 2)])
        assert hits(store, sample_chain(1, 5)) == 2
        assert other("put", refs=[(2, 0)]) == ["stored"]
        assert hits(store, [sample_page(2)]) == 1


def test_a_dead_writers_slots_come_back_and_a_stopped_ones_do_not(shm: Path, helper: Callable[[], Helper]) -> None:
    other = helper()
    with open_local(config(shm)) as store:
        other("open", directory=str(shm / "store"), planes=list(BIG))
        assert other("reserve", refs=[(i, 0) for i in range(30)]) == ["held"] * 30
        other.stop()
        pages = [sample_page(100 + i, plane_bytes=BIG) for i in range(10)]
        assert [status.held for status in put(store, pages)].count(True) == 2
        assert store.slots(deadline=soon())[RESERVED] == 30
        other.kill()
        assert all(status.held for status in put(store, pages))
        assert store.slots(deadline=soon()).get(RESERVED, 0) == 0
        assert hits(store, pages) == 10


def test_a_stopped_lock_holder_costs_a_late_answer_never_a_hang(place: Path) -> None:
    page, other = sample_page(1), sample_page(2)
    with open_local(config(place)) as store:
        put(store, [page])
        blocker = sqlite3.connect(place / "store" / directory.INDEX, isolation_level=None)
        blocker.execute("BEGIN IMMEDIATE")
        start = time.monotonic()
        assert store.put([other.item], deadline=Deadline.after(0.3)) == [PutStatus.LATE]
        assert store.get_into([(page.name, page.buffer())], deadline=Deadline.after(0.3)) == [GetStatus.HIT]
        assert store.contains([page.name, other.name], deadline=Deadline.after(0.3)) == [True, False]
        assert time.monotonic() - start < 5  # a hang would be for ever
        blocker.close()
        assert put(store, [other]) == [PutStatus.STORED]


def test_a_reader_that_never_ends_cannot_make_the_log_grow_for_ever(place: Path) -> None:
    with open_local(config(place)) as store:
        put(store, sample_chain(0, 10))
        reader = sqlite3.connect(place / "store" / directory.INDEX, isolation_level=None)
        reader.execute("BEGIN")
        reader.execute("SELECT COUNT(*) FROM slots").fetchone()
        statuses = set()
        for i in range(1, 400):
            statuses.update(put(store, sample_chain(i, 6)))
        size = sum(path.stat().st_size for path in (place / "store").rglob("*") if path.is_file())
        assert size <= LIMIT
        assert PutStatus.NO_ROOM in statuses
        assert store.metrics.counters()["local.log_full"] > 0
        reader.close()
        assert put(store, sample_chain(500, 6)) == [PutStatus.STORED] * 6


def test_the_gate_is_closed_while_another_opens(place: Path) -> None:
    directory.prepare(place / "store")
    lock = directory.PresenceLock(place / "store")
    try:
        lock.come_in(soon())
        with pytest.raises(StoreBusy, match="opening or rebuilding"):
            open_local(config(place, open_timeout_s=0.1))
    finally:
        lock.close()
    open_local(config(place)).close()


def test_a_child_must_open_its_own(place: Path) -> None:
    with open_local(config(place)) as store:
        put(store, sample_chain(1, 3))
        pid = os.fork()
        if pid == 0:  # pragma: no cover  the child reports through its exit code
            code = 1
            try:
                store.contains([], deadline=soon())
            except StoreForked:
                store.close()
                with open_local(config(place)) as own:
                    code = 0 if hits(own, sample_chain(1, 3)) == 3 else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert hits(store, sample_chain(1, 3)) == 3
        assert store.slots(deadline=soon())[LIVE] == 3


def test_a_reservation_outlives_close_and_is_then_given_back(shm: Path) -> None:
    page = sample_page(1, plane_bytes=BIG)
    with open_local(config(shm)) as watcher:
        store = open_local(config(shm))
        assert isinstance(store, Addressable)
        reservation = store.reserve([(page.meta, frame_bytes(BIG))], deadline=soon())[0]
        assert isinstance(reservation, Reservation)
        store.close()
        reservation.view[:] = page.frame  # a copy engine that has not finished
        others = [sample_page(100 + i, plane_bytes=BIG) for i in range(40)]
        put(watcher, others)
        assert bytes(reservation.view) == page.frame
        assert watcher.slots(deadline=soon())[RESERVED] == 1
        store.abandon([reservation], deadline=soon())
        assert watcher.slots(deadline=soon()).get(RESERVED, 0) == 0
        assert hits(watcher, [page]) == 0


def test_a_locked_index_is_told_to_people_who_ask(place: Path) -> None:
    with open_local(config(place)) as store:
        blocker = sqlite3.connect(place / "store" / directory.INDEX, isolation_level=None)
        blocker.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreBusy, match="stays locked"):
            store.label(bytes(32), bytes(16), "a model", deadline=Deadline.after(0.05))
        assert store.usage(deadline=soon()) == []  # looking does not wait for a writer
        blocker.close()
        assert store.usage(deadline=soon()) == []
        os.truncate(place / "store" / directory.SLAB, 1000)
        with pytest.raises(StoreDamaged, match="cut"):
            store.usage(deadline=soon())


def test_a_destroyed_header_is_told_to_who_has_no_limit_to_offer(place: Path) -> None:
    with open_local(config(place)) as store:
        put(store, [sample_page(1)])
    slab = place / "store" / directory.SLAB
    slab.write_bytes(b"x" * slab.stat().st_size)
    with pytest.raises(StoreDamaged, match="no readable header: open it with a limit to start anew"):
        open_local(config(place, limit_bytes=None))
    with open_local(config(place)) as store:
        assert store.metrics.counters()["local.slab_lost"] == 1
        assert hits(store, [sample_page(1)]) == 0


def test_peeking_is_not_using(shm: Path) -> None:
    clock = FakeClock()
    with open_local(config(shm), clock=clock) as store:
        pages = [sample_page(i, plane_bytes=BIG) for i in range(32)]
        for page in pages:
            clock.advance(1)
            put(store, [page])
        assert store.peek(pages[0].name, pages[0].buffer(), deadline=soon()) is GetStatus.HIT
        clock.advance(1)
        put(store, [sample_page(99, plane_bytes=BIG)])
        assert hits(store, [pages[0]]) == 0


# --- what a rebuild must not bring back -------------------------------------------------------------------------------


def lose_index(place: Path) -> None:
    (place / "store" / directory.INDEX).unlink()


def test_a_page_put_twice_and_deleted_stays_deleted(place: Path) -> None:
    page = sample_page(1)
    with open_local(config(place)) as store:
        put(store, [page, page])
        store.delete([page.name], deadline=soon())
    lose_index(place)
    with open_local(config(place)) as store:
        assert hits(store, [page]) == 0


def test_a_dead_writers_page_does_not_come_back(shm: Path, helper: Callable[[], Helper]) -> None:
    other = helper()
    with open_local(config(shm)) as store:
        other("open", directory=str(shm / "store"))
        other("reserve", refs=[(1, 0)])  # written, never published
        other.kill()
        put(store, [sample_page(1)])
        store.delete([sample_page(1).name], deadline=soon())
    lose_index(shm)
    with open_local(config(shm)) as store:
        assert hits(store, [sample_page(1)]) == 0


def test_a_rebuild_keeps_no_suffix_without_its_prefix(place: Path) -> None:
    pages = sample_chain(1, 6)
    with open_local(config(place)) as store:
        put(store, pages)
        offset = store._run(lambda at: at.catalog.mirror.places[pages[2].name].offset, 0)
    with (place / "store" / directory.SLAB).open("r+b") as slab:
        slab.seek(offset)
        slab.write(bytes(4096))
    lose_index(place)
    with open_local(config(place)) as store:
        assert store.contains([page.name for page in pages], deadline=soon()) == [
            True,
            True,
            False,
            False,
            False,
            False,
        ]
        assert store.validate(deadline=soon()) == []


def test_an_interrupted_rebuild_is_begun_anew(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = sample_chain(1, 6)
    with open_local(config(place)) as store:
        put(store, pages)
    lose_index(place)
    monkeypatch.setattr(Catalog, "adopt", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        open_local(config(place))
    monkeypatch.undo()
    with open_local(config(place)) as store:
        assert hits(store, pages) == 6


def test_a_child_whose_parent_went_meanwhile_is_not_published(shm: Path) -> None:
    parent, child = sample_chain(1, 2)
    with open_local(config(shm)) as store:
        assert isinstance(store, Addressable)
        put(store, [parent])
        reservation = store.reserve([(child.meta, len(child.frame))], deadline=soon())[0]
        assert isinstance(reservation, Reservation)
        reservation.view[:] = child.frame
        store.delete([parent.name], deadline=soon())
        assert store.publish([reservation], deadline=soon()) == [PutStatus.NO_PARENT]
        assert put(store, [child]) == [PutStatus.NO_PARENT]
        assert store.slots(deadline=soon()).get(RESERVED, 0) == 0


def test_an_expired_page_makes_way_for_its_successor(place: Path) -> None:
    clock = FakeClock(SEALED_AT_MS / 1000)
    old = sample_page(1, expires_at_ms=SEALED_AT_MS + 1000)
    new = sample_page(1, expires_at_ms=SEALED_AT_MS + 9000)
    with open_local(config(place), clock=clock) as store:
        put(store, [old])
        assert put(store, [new]) == [PutStatus.EXISTS]
        clock.advance(5)
        assert put(store, [new]) == [PutStatus.STORED]
        assert hits(store, [new]) == 1


def test_owners_are_dead_only_when_their_lock_is_free(shm: Path, helper: Callable[[], Helper]) -> None:
    other = helper()
    with open_local(config(shm)) as store:
        other("open", directory=str(shm / "store"), planes=list(BIG))
        other("reserve", refs=[(i, 0) for i in range(30)])
        for path in (shm / "store" / "owners").iterdir():
            path.unlink()  # a cleaner
        put(store, [sample_page(100 + i, plane_bytes=BIG) for i in range(10)])
        assert store.slots(deadline=soon())[RESERVED] == 30
        assert other("publish", refs=[(0, 0)]) == ["stored"]


def test_a_reservation_is_not_a_childs(shm: Path) -> None:
    page = sample_page(1)
    with open_local(config(shm)) as store:
        assert isinstance(store, MappedStore)
        reservation = store.reserve([(page.meta, len(page.frame))], deadline=soon())[0]
        assert isinstance(reservation, Reservation)
        reservation.view[:] = page.frame
        pid = os.fork()
        if pid == 0:  # pragma: no cover  the child reports through its exit code
            try:
                store.publish([reservation], deadline=soon())
            except StoreForked:
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert store.publish([reservation], deadline=soon()) == [PutStatus.STORED]


def test_a_failed_lock_costs_no_reload(place: Path) -> None:
    with open_local(config(place)) as store:
        put(store, sample_chain(1, 5))
        before = store._run(lambda at: at.catalog.mirror.seq, 0)
        blocker = sqlite3.connect(place / "store" / directory.INDEX, isolation_level=None)
        blocker.execute("BEGIN IMMEDIATE")
        assert store.put([sample_page(9).item], deadline=Deadline.after(0.05)) == [PutStatus.LATE]
        assert store._run(lambda at: at.catalog.mirror.seq, 0) == before
        blocker.close()


def test_reviving_holds_nobody_up(place: Path) -> None:
    with open_local(config(place, open_timeout_s=2.0)) as store:
        put(store, [sample_page(1)])
        os.truncate(place / "store" / directory.SLAB, 1000)
        store.contains([], deadline=soon())
        gate = directory.PresenceLock(place / "store")
        gate.come_in(soon())
        reviving = threading.Thread(target=store.revive)
        reviving.start()
        assert store.put([sample_page(2).item], deadline=soon()) == [PutStatus.FAILED]
        assert reviving.is_alive(), "the call above answered while the other one waited"
        gate.close()
        reviving.join()
        assert store.down is None


def test_deadlines_of_any_size(place: Path) -> None:
    with open_local(config(place)) as store:
        for seconds in (1e9, float("inf")):
            pages = [sample_page(int(min(seconds, 2.0)))]
            store.delete([pages[0].name], deadline=Deadline.after(seconds))
            assert store.put(items(pages), deadline=Deadline.after(seconds)) == [PutStatus.STORED]


# --- destroy, usage ---------------------------------------------------------------------------------------------------


def test_destroy_only_when_nobody_is_inside(place: Path) -> None:
    with open_local(config(place)) as store:
        put(store, [sample_page(1)])
        with pytest.raises(StoreBusy, match="in use"):
            destroy(place / "store", deadline=Deadline.after(0.1))
    destroy(place / "store", deadline=soon())
    assert not (place / "store" / directory.SLAB).exists()
    with open_local(config(place, limit_bytes=2 * LIMIT)) as store:
        assert hits(store, [sample_page(1)]) == 0


def test_usage_names_identities_and_tenants(place: Path) -> None:
    tenant = b"t" * 16
    with open_local(config(place)) as store:
        put(store, sample_chain(1, 4))
        put(store, [sample_page(50 + i, tenant=tenant) for i in range(2)])
        store.label(sample_page(1).meta.identity, bytes(16), "a model", deadline=soon())
        usage = store.usage(deadline=soon())
        assert [(use.label, use.num_pages, use.num_tokens, use.max_depth) for use in usage] == [
            ("a model", 4, 64, 3),
            ("", 2, 32, 0),
        ]
        assert usage[1].tenant == tenant
        assert len(store.names(tenant=tenant, deadline=soon())) == 2
        assert store.slots(deadline=soon())[LIVE] == 6
        assert store.slots(deadline=soon())[FREE] > 0


def test_prefaulting_and_creating_show_progress(shm: Path) -> None:
    seen: list[tuple[int, int]] = []
    with open_local(
        config(shm, limit_bytes=96 << 20, prefault=True), progress=lambda done, total: seen.append((done, total))
    ):
        pass
    assert len(seen) >= 4
    assert seen[0][0] < seen[0][1]
    assert seen[-1][0] == seen[-1][1]


def test_errors_share_one_root() -> None:
    assert issubclass(StoreForked, StoreError)
    assert issubclass(InvalidConfig, ValueError)
