"""LocalStore shared by processes: visibility, liveness, locks, forks."""

import os
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
from headwater.core.results import Status
from headwater.layout.frame import frame_bytes
from headwater.storage.base import Addressable, Deadline, Reservation
from headwater.storage.local import directory
from headwater.storage.local.records import RecordState
from headwater.testing.clock import FakeClock
from headwater.testing.pages import sample_chain, sample_page
from headwater.testing.stores import put, soon
from kit import BIG, LIMIT, changing, config, hits
from machines.processes import Helper

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
        assert store.slots(deadline=soon())[RecordState.RESERVED] == 30
        other.kill()
        assert all(status.held for status in put(store, pages))
        assert store.slots(deadline=soon()).get(RecordState.RESERVED, 0) == 0
        assert hits(store, pages) == 10


def test_a_stopped_lock_holder_costs_a_late_answer_never_a_hang(place: Path) -> None:
    page, other = sample_page(1), sample_page(2)
    with open_local(config(place)) as store:
        put(store, [page])
        with changing(place):
            start = time.monotonic()
            assert store.put([other.item], deadline=Deadline.after(0.3)) == [Status.LATE]
            assert store.get_into([(page.name, page.buffer())], deadline=Deadline.after(0.3)) == [Status.HIT]
            assert store.contains([page.name, other.name], deadline=Deadline.after(0.3)) == [True, False]
            assert time.monotonic() - start < 5  # a hang would be for ever
        assert put(store, [other]) == [Status.STORED]


def test_the_gate_is_closed_while_another_opens(place: Path) -> None:
    with directory.Gate(place / "store", soon(), create=True), pytest.raises(StoreBusy, match="opening or repairing"):
        open_local(config(place, open_timeout_s=0.1))
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
        assert store.slots(deadline=soon())[RecordState.LIVE] == 3


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
        assert watcher.slots(deadline=soon())[RecordState.RESERVED] == 1
        store.abandon([reservation], deadline=soon())
        assert watcher.slots(deadline=soon()).get(RecordState.RESERVED, 0) == 0
        assert hits(watcher, [page]) == 0


def test_a_locked_index_is_told_to_people_who_ask(place: Path) -> None:
    with open_local(config(place)) as store:
        with changing(place):
            with pytest.raises(StoreBusy, match="stays locked"):
                store.label(bytes(32), bytes(16), "a model", deadline=Deadline.after(0.05))
            assert store.usage(deadline=soon()) == []  # looking does not wait for a writer
        assert store.usage(deadline=soon()) == []
        os.truncate(place / "store" / directory.SLAB, 1000)
        with pytest.raises(StoreDamaged, match="cut"):
            store.usage(deadline=soon())


@pytest.mark.fault("A5")
@pytest.mark.parametrize("limit_bytes", [None, LIMIT])
def test_a_destroyed_header_is_told_and_the_file_is_not_touched(place: Path, limit_bytes: int | None) -> None:
    with open_local(config(place)) as store:
        put(store, [sample_page(1)])
    slab = place / "store" / directory.SLAB
    destroyed = b"x" * slab.stat().st_size
    slab.write_bytes(destroyed)
    with pytest.raises(StoreDamaged, match=r"no readable header: .* remove it to start anew"):
        open_local(config(place, limit_bytes=limit_bytes))
    assert slab.read_bytes() == destroyed
    slab.unlink()
    with open_local(config(place)) as store:
        assert put(store, [sample_page(1)]) == [Status.STORED]


def test_peeking_is_not_using(shm: Path) -> None:
    clock = FakeClock()
    with open_local(config(shm), clock=clock) as store:
        pages = [sample_page(i, plane_bytes=BIG) for i in range(32)]
        for page in pages:
            clock.advance(1)
            put(store, [page])
        assert store.peek_into([(pages[0].name, pages[0].buffer())], deadline=soon()) == [Status.HIT]
        clock.advance(1)
        put(store, [sample_page(99, plane_bytes=BIG)])
        assert hits(store, [pages[0]]) == 0
