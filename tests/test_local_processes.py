"""LocalStore shared by processes: visibility, liveness, locks, forks."""

import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from headwater.build import open_local
from headwater.core.errors import (
    StoreBusy,
    StoreDamaged,
    StoreForked,
)
from headwater.layout.frame import frame_bytes
from headwater.storage import directory
from headwater.storage.base import Addressable, Deadline, GetStatus, PutStatus, Reservation
from headwater.storage.database import LIVE, RESERVED
from headwater.testing.clock import FakeClock
from headwater.testing.pages import sample_chain, sample_page
from headwater.testing.processes import Helper
from headwater.testing.stores import put, soon
from kit import BIG, LIMIT, config, hits

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
        assert store.metrics.value("local_log_full_total") > 0
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
        assert store.metrics.value("events_total", kind="local_slab_lost") == 1
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
