"""LocalStore after restarts and damage: what is kept, and what must not come back."""

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from headwater.build import open_local
from headwater.config.stores import Durability, LocalStoreConfig
from headwater.core.errors import (
    StoreForked,
    StoreMismatch,
)
from headwater.core.results import Status
from headwater.storage.base import Addressable, Deadline, Reservation
from headwater.storage.local import MappedStore, directory, mend
from headwater.storage.local.geometry import CONTROL_AT, EXTENTS_AT, Geometry
from headwater.storage.local.records import RecordState
from headwater.storage.verified import VerifiedStore
from headwater.testing.clock import FakeClock
from headwater.testing.pages import IDENTITY, PLANE_BYTES, SEALED_AT_MS, items, sample_chain, sample_page
from headwater.testing.stores import put, read, soon
from kit import BIG, LIMIT, changing, config, hits, lose_records
from machines.processes import Helper

# --- restart and rebuild ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", list(Durability))
def test_a_restart_keeps_what_was_stored(place: Path, durability: Durability) -> None:
    pages = sample_chain(1, 30)
    with open_local(config(place, durability=durability)) as store:
        put(store, pages)
    with open_local(config(place, limit_bytes=None, durability=durability)) as store:
        assert hits(store, pages) == 30
        assert store.metrics.value("events_total", kind="local_rebuilt") == 0
        assert store.validate(deadline=soon()) == []


@pytest.mark.parametrize("damage", ["zeroed", "rubbish", "other slab", "extents", "changes", "everything"])
def test_a_lost_index_is_rebuilt_from_frames(place: Path, damage: str) -> None:
    pages = [*sample_chain(1, 20), *(sample_page(i, plane_bytes=BIG) for i in range(40, 45))]
    slab = place / "store" / directory.SLAB
    with open_local(config(place)) as store:
        put(store, pages)
        store.delete([pages[15].name], deadline=soon())
    geometry = Geometry.plan(LIMIT)
    begin, end = {
        "extents": (EXTENTS_AT, geometry.labels_at),
        "changes": (CONTROL_AT, EXTENTS_AT),
        "everything": (geometry.changes_at, geometry.data_at),
    }.get(damage, (geometry.records_at, geometry.uses_at))
    spoiled = bytes(end - begin)
    if damage == "rubbish":
        spoiled = os.urandom(end - begin)
    elif damage == "other slab":
        with open_local(LocalStoreConfig(directory=place / "other", limit_bytes=LIMIT)) as store:
            put(store, sample_chain(1, 20))
        spoiled = (place / "other" / directory.SLAB).read_bytes()[begin:end]
    with slab.open("r+b") as file:
        file.seek(begin)
        file.write(spoiled)
    with open_local(config(place)) as store:
        rebuilt = damage != "extents"  # those follow from the records; with the changes goes how it was left
        assert store.metrics.value("events_total", kind="local_rebuilt") == rebuilt
        assert store.validate(deadline=soon()) == []
        assert hits(store, pages) == 20, "what was deleted, and what built on it, must not come back"
        assert hits(store, pages[15:20]) == 0
        assert all(status.held for status in put(store, pages))


def test_an_unclean_reboot_rebuilds_and_a_clean_one_does_not(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = sample_chain(1, 10)
    with open_local(config(place)) as store:
        put(store, pages)
        shutil.copytree(place / "store", place / "crashed")
    monkeypatch.setattr(directory, "boot_id", lambda: "another start of the machine")
    with open_local(config(place)) as store:
        assert store.metrics.value("events_total", kind="local_rebuilt") == 0
        assert hits(store, pages) == 10
    crashed = LocalStoreConfig(directory=place / "crashed")
    with open_local(crashed) as store:
        assert "went down" in store.metrics.events("local_rebuilt")[0].facts["reason"]
        assert hits(store, pages) == 10


def test_a_rebuild_begins_a_new_epoch_and_keeps_the_limit(place: Path) -> None:
    with open_local(config(place)) as store:
        put(store, sample_chain(1, 5))
    lose_records(place)
    with open_local(config(place, limit_bytes=None)) as store:
        assert store.limit_bytes == LIMIT
    with pytest.raises(StoreMismatch, match="limit of 8388608 bytes, 16777216 was asked for"):
        open_local(config(place, limit_bytes=2 * LIMIT))


def test_damage_under_a_running_process_turns_the_store_off_until_it_is_revived(place: Path) -> None:
    pages = sample_chain(1, 10)
    with open_local(config(place)) as store:
        put(store, pages)
        os.truncate(place / "store" / directory.SLAB, Geometry.plan(LIMIT).data_at + 100_000)
        assert read(store, pages) == [Status.FAILED] * 10
        assert put(store, pages) == [Status.FAILED] * 10
        assert store.contains([pages[0].name], deadline=soon()) == [False]
        assert "cut" in str(store.down)
        assert store.metrics.value("events_total", kind="local_down") == 1
        assert store.revive()
        assert store.down is None
        reader = VerifiedStore(store, identity=IDENTITY, plane_bytes=PLANE_BYTES)
        kept = read(reader, pages).count(Status.HIT)  # those before the cut; a page across it is thrown out
        assert 0 < kept < 10
        assert put(store, pages).count(Status.STORED) == 10 - kept
        assert hits(store, pages) == 10


@pytest.mark.fault("A1")
@pytest.mark.parametrize("how", ["slab removed", "slab replaced", "directory renamed", "directory replaced"])
def test_a_store_that_was_replaced_under_us_is_noticed_before_anything_is_written(place: Path, how: str) -> None:
    pages, home = sample_chain(1, 10), place / "store"
    with open_local(config(place)) as store:
        put(store, pages)
        if how == "slab removed":
            (home / directory.SLAB).unlink()
        elif how == "slab replaced":
            shutil.copy(home / directory.SLAB, place / "copy")
            (place / "copy").rename(home / directory.SLAB)
        else:
            home.rename(place / "elsewhere")
        if how == "directory replaced":
            open_local(config(place)).close()
        assert put(store, sample_chain(2, 3)) == [Status.FAILED] * 3
        assert "under this process" in str(store.down)
        assert store.revive()
        assert put(store, sample_chain(2, 3)) == [Status.STORED] * 3
        assert hits(store, pages) == (10 if how == "slab replaced" else 0)


def test_a_reservation_on_a_damaged_store_fails_and_lets_go(shm: Path) -> None:
    page = sample_page(1)
    with open_local(config(shm)) as store:
        assert isinstance(store, Addressable)
        reservation = store.reserve([(page.meta, len(page.frame))], deadline=soon())[0]
        assert isinstance(reservation, Reservation)
        reservation.view[:] = page.frame
        slab = shm / "store" / directory.SLAB
        os.truncate(slab, slab.stat().st_size + 1)
        assert store.publish([reservation], deadline=soon()) == [Status.FAILED]
        assert store.down is not None
        assert store.revive()
        assert store.slots(deadline=soon()).get(RecordState.RESERVED, 0) == 0


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
        assert put(first, sample_chain(2, 3)) == [Status.STORED] * 3
        assert hits(second, sample_chain(2, 3)) == 3


# --- what a rebuild must not bring back -------------------------------------------------------------------------------


def test_a_page_put_twice_and_deleted_stays_deleted(place: Path) -> None:
    page = sample_page(1)
    with open_local(config(place)) as store:
        put(store, [page, page])
        store.delete([page.name], deadline=soon())
    lose_records(place)
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
    lose_records(shm)
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
    lose_records(place)
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
    lose_records(place)
    monkeypatch.setattr(mend, "_adopt", lambda *_, **__: 1 / 0)
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
        assert store.publish([reservation], deadline=soon()) == [Status.NO_PARENT]
        assert put(store, [child]) == [Status.NO_PARENT]
        assert store.slots(deadline=soon()).get(RecordState.RESERVED, 0) == 0


def test_an_expired_page_makes_way_for_its_successor(place: Path) -> None:
    clock = FakeClock(SEALED_AT_MS / 1000)
    old = sample_page(1, expires_at_ms=SEALED_AT_MS + 1000)
    new = sample_page(1, expires_at_ms=SEALED_AT_MS + 9000)
    with open_local(config(place), clock=clock) as store:
        put(store, [old])
        assert put(store, [new]) == [Status.EXISTS]
        clock.advance(5)
        assert put(store, [new]) == [Status.STORED]
        assert hits(store, [new]) == 1


def test_owners_are_dead_only_when_their_lock_is_free(shm: Path, helper: Callable[[], Helper]) -> None:
    other = helper()
    with open_local(config(shm)) as store:
        other("open", directory=str(shm / "store"), planes=list(BIG))
        other("reserve", refs=[(i, 0) for i in range(30)])
        put(store, [sample_page(100 + i, plane_bytes=BIG) for i in range(10)])
        assert store.slots(deadline=soon())[RecordState.RESERVED] == 30
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
        assert store.publish([reservation], deadline=soon()) == [Status.STORED]


def test_a_failed_lock_costs_no_reload(place: Path) -> None:
    with open_local(config(place)) as store:
        put(store, sample_chain(1, 5))
        mirror = store._run(lambda at: at.catalog.mirror, None)
        assert mirror is not None
        before = mirror.places
        with changing(place):
            assert store.put([sample_page(9).item], deadline=Deadline.after(0.05)) == [Status.LATE]
        put(store, sample_chain(2, 3))
        assert mirror.places is before  # not made anew


def test_reviving_holds_nobody_up(place: Path) -> None:
    with open_local(config(place, open_timeout_s=2.0)) as store:
        put(store, [sample_page(1)])
        os.truncate(place / "store" / directory.SLAB, 1000)
        store.contains([], deadline=soon())
        gate = directory.Gate(place / "store", soon(), create=False)
        reviving = threading.Thread(target=store.revive)
        reviving.start()
        assert store.put([sample_page(2).item], deadline=soon()) == [Status.FAILED]
        assert reviving.is_alive(), "the call above answered while the other one waited"
        gate.close()
        reviving.join()
        assert store.down is None


def test_deadlines_of_any_size(place: Path) -> None:
    with open_local(config(place)) as store:
        for seconds in (1e9, float("inf")):
            pages = [sample_page(int(min(seconds, 2.0)))]
            store.delete([pages[0].name], deadline=Deadline.after(seconds))
            assert store.put(items(pages), deadline=Deadline.after(seconds)) == [Status.STORED]
