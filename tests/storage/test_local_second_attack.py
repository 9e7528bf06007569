"""LocalStore: what a second attack found (docs/FAULTS.md, L1 to L25), each with the way it was found."""

import faulthandler
import gc
import hashlib
import io
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from headwater.build import open_local, open_tier
from headwater.config.stores import LocalStoreConfig
from headwater.core.errors import InvalidConfig, StoreBusy, StoreForked, StoreUnavailable
from headwater.core.results import Status
from headwater.layout.frame import PageMeta, frame_bytes, seal
from headwater.layout.spec import opaque_layout
from headwater.storage.base import Addressable, Deadline, Reservation
from headwater.storage.local import LocalStore
from headwater.storage.local import directory as places
from headwater.storage.local.allocator import Allocator, Search
from headwater.storage.local.attach import destroy
from headwater.storage.local.attachment import Attachment
from headwater.storage.local.catalog import Catalog
from headwater.storage.local.directory import SLAB, Gate
from headwater.storage.local.geometry import CONTROL_AT, Geometry
from headwater.storage.local.locks import SlabLocks
from headwater.storage.local.mirror import Slot
from headwater.storage.local.table import Table
from headwater.testing.clock import FakeClock
from headwater.testing.pages import IDENTITY, PLANE_BYTES, items, sample_chain, sample_page
from headwater.testing.stores import put, soon
from kit import BIG, changing, config, hits

pytestmark = pytest.mark.fault("L")


def attachment_of(store: LocalStore) -> Attachment:
    found = store._attachment
    assert found is not None
    return found


def in_child(work: Callable[[], bool]) -> int:
    pid = os.fork()
    if pid == 0:  # pragma: no cover  the child reports through its exit code
        code = 9
        try:
            code = 0 if work() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# --- L1: whose file it is ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["removed", "overwritten"])
def test_a_users_file_is_not_taken_for_the_slab_that_was_there(place: Path, how: str) -> None:
    slab = place / "store" / SLAB
    words = b"my own words\n" * 1000
    with open_local(config(place)) as store:
        if how == "removed":
            slab.unlink()
            assert put(store, [sample_page(1)]) == [Status.FAILED]
            for _ in range(50):  # until the file system gives it the same number
                slab.write_bytes(words)
                if not store.revive():
                    break
                pytest.fail("it was taken")
        else:
            slab.write_bytes(words)  # into the same file
            assert put(store, [sample_page(1)]) == [Status.FAILED]
            assert not store.revive()
        assert slab.read_bytes() == words
        slab.unlink()
        assert store.revive()
        assert put(store, [sample_page(1)]) == [Status.STORED]


# --- L2, L7, L8: a mirror that is far behind --------------------------------------------------------------------------


def ring_of(store: LocalStore) -> int:
    return attachment_of(store).slab.geometry.num_changes


def test_a_look_at_an_index_that_went_far_ahead_ends_at_its_deadline(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()
    survey, rows = Table.survey, Table.rows

    def slow_survey(table: Table, *args: Any) -> Any:
        clock.advance(0.4)
        return survey(table, *args)

    def slow_rows(table: Table, numbers: Sequence[int]) -> Any:
        clock.advance(0.01 * len(numbers))
        return rows(table, numbers)

    pages = [sample_page(i, plane_bytes=BIG) for i in range(32)]
    with open_local(config(place)) as idle, open_local(config(place)) as busy:
        assert idle.contains([pages[0].name], deadline=soon()) == [False]
        for page in pages:
            put(busy, [page])
        monkeypatch.setattr(Table, "survey", slow_survey)
        monkeypatch.setattr(Table, "rows", slow_rows)
        for _ in range(100):
            begin_s = clock.monotonic()
            found = idle.contains([pages[-1].name], deadline=Deadline.after(0.05, clock))
            assert clock.monotonic() - begin_s < 1.1  # one step more, of sixteen extents or of 64 changes
            if found == [True]:
                break
        else:
            pytest.fail("it never got there")


def test_who_comes_after_a_death_recovers_in_steps_and_gets_there(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    survey = Table.survey

    def slow(table: Table, *args: Any) -> Any:
        clock.advance(0.4)
        return survey(table, *args)

    with open_local(config(place)) as store, open_local(config(place)) as other:
        put(store, [sample_page(i, plane_bytes=BIG) for i in range(20)])
        attachment_of(store).catalog.table.set_busy(77)  # as who was killed in the middle leaves it
        monkeypatch.setattr(Table, "survey", slow)
        page = sample_page(99, plane_bytes=BIG)
        results = []
        for _ in range(100):
            begin_s = clock.monotonic()
            results += other.put(items([page]), deadline=Deadline.after(0.5, clock))
            assert clock.monotonic() - begin_s < 2.0
            if results[-1] is Status.STORED:
                break
        assert set(results[:-1]) == {Status.LATE}
        assert results[-1] is Status.STORED
        monkeypatch.undo()
        assert hits(store, [page]) == 1
        assert store.validate(deadline=soon()) == []
        assert other.validate(deadline=soon()) == []


def test_coming_in_reads_the_index_before_it_takes_the_lock(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = threading.local()
    begin_writing = SlabLocks.begin_writing
    survey = Table.survey

    def begins(locks: SlabLocks, deadline: Deadline) -> bool:
        held.it = begin_writing(locks, deadline)
        return bool(held.it)

    def looks(table: Table, *args: Any) -> Any:
        assert not getattr(held, "it", False), "everybody waits"
        return survey(table, *args)

    with open_local(config(place)) as store:
        put(store, [sample_page(i, plane_bytes=BIG) for i in range(20)])
        monkeypatch.setattr(SlabLocks, "begin_writing", begins)
        monkeypatch.setattr(Table, "survey", looks)
        with open_local(config(place)):
            pass


def test_a_count_of_changes_that_was_damaged_is_set_right_for_everybody(place: Path) -> None:
    with open_local(config(place)) as a, open_local(config(place)) as b, open_local(config(place)) as c:
        put(a, [sample_page(i) for i in range(2)])
        assert c.contains([sample_page(0).name], deadline=soon()) == [True]  # more than b has seen
        with (place / "store" / SLAB).open("r+b") as slab:
            slab.seek(CONTROL_AT + 9)
            byte = slab.read(1)[0]
            slab.seek(CONTROL_AT + 9)
            slab.write(bytes([byte ^ 1]))
        names = [sample_page(100 + i).name for i in range(2)]
        assert put(b, [sample_page(100 + i) for i in range(2)]) == [Status.STORED] * 2
        assert c.contains(names, deadline=soon()) == a.contains(names, deadline=soon()) == [True, True]
        assert c.delete(names, deadline=soon()) == [Status.REMOVED] * 2
        assert b.contains(names, deadline=soon()) == [False, False]
        assert [store.validate(deadline=soon()) for store in (a, b, c)] == [[], [], []]
    with open_local(config(place)) as store:
        assert store.validate(deadline=soon()) == []


# --- L3: interrupts ---------------------------------------------------------------------------------------------------


class _Interrupt(Exception):
    """As a Ctrl-C, but of this test alone."""


@pytest.mark.timeout(120)
def test_an_interrupt_at_any_moment_leaves_nothing_locked_and_no_slot_lost(place: Path) -> None:
    rng = random.Random(5)
    pages = [sample_page(i) for i in range(64)]

    def interrupt(number: int, frame: object) -> None:
        raise _Interrupt

    before = signal.signal(signal.SIGVTALRM, interrupt)
    interrupts = 0
    gc.disable()  # what is raised in a callback of the collector (hypothesis has one) is lost, and the next never comes
    try:
        with open_local(config(place)) as store, open_local(config(place)) as other:
            until_s = time.monotonic() + 6
            while time.monotonic() < until_s:
                try:
                    signal.setitimer(signal.ITIMER_VIRTUAL, rng.uniform(0.00005, 0.003))
                    while True:
                        batch = rng.sample(pages, 8)
                        store.put(items(batch), deadline=soon())
                        store.contains([page.name for page in batch], deadline=soon())
                        if isinstance(store, Addressable):
                            taken = store.reserve(
                                [(page.meta, frame_bytes(PLANE_BYTES)) for page in batch], deadline=soon()
                            )
                            store.abandon([one for one in taken if isinstance(one, Reservation)], deadline=soon())
                        store.delete([page.name for page in batch], deadline=soon())
                except _Interrupt:
                    interrupts += 1
                finally:
                    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
                assert other.put(items(pages[:1]), deadline=Deadline.after(20)) != [Status.LATE]
                assert other.delete([pages[0].name], deadline=Deadline.after(20)) == [Status.REMOVED]
            signal.signal(signal.SIGVTALRM, before)
            assert interrupts > 50
            assert put(store, pages[:8]).count(Status.LATE) == 0
            assert store.validate(deadline=soon()) == []
            lent = {slot.number for slot in attachment_of(store)._lent}  # an interrupt took them from who had them
            reserved = store.slots(deadline=soon()).get(1, 0)
            assert reserved <= len(lent)
            assert not attachment_of(store).users
            assert not attachment_of(store)._takers
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
        gc.enable()


@pytest.mark.fault("L27")
def test_an_interrupt_while_others_changes_are_read_leaves_no_page_that_is_gone(place: Path) -> None:
    pages = [sample_page(i) for i in range(4)]
    interrupted: list[Any] = []

    class Places(dict[Any, Any]):
        def get(self, name: Any, default: Any = None) -> Any:
            if name == pages[1].name and not interrupted:
                interrupted.append(name)
                raise _Interrupt
            return super().get(name, default)

    with open_local(config(place)) as store, open_local(config(place)) as other:
        put(other, pages)
        assert all(store.contains([page.name for page in pages], deadline=soon()))
        assert other.delete([pages[1].name], deadline=soon()) == [Status.REMOVED]
        mirror = attachment_of(store).catalog.mirror
        mirror.places = Places(mirror.places)
        with pytest.raises(_Interrupt):
            store.contains([pages[1].name], deadline=soon())
        assert store.contains([pages[1].name], deadline=soon()) == [False]
        assert put(store, [pages[1]]) == [Status.STORED]
        assert store.validate(deadline=soon()) == []


@pytest.mark.fault("L28")
def test_what_comes_to_build_on_an_extent_that_changes_hands_goes_with_it(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chains = [sample_chain(chain, 2, plane_bytes=(200_000, 7)) for chain in range(32)]
    change_hands = Allocator._change_hands
    with open_local(config(place)) as store, open_local(config(place)) as other:
        for chain in chains:
            put(store, chain[:1])

        def changes(allocator: Allocator, at: Attachment, search: Search, deadline: Deadline) -> None:
            assert search.extent is not None
            last = at.catalog.mirror.pages_in(search.extent)[-1]
            assert put(other, [chain[1] for chain in chains if chain[0].name == last]) == [Status.STORED]
            at.catalog.mirror.seen = -1  # as after very many changes: everything is read again
            change_hands(allocator, at, search, deadline)

        monkeypatch.setattr(Allocator, "_change_hands", changes)
        assert put(store, [sample_page(99, plane_bytes=(5000, 7))]) == [Status.STORED]
        assert store.validate(deadline=soon()) == other.validate(deadline=soon()) == []


def test_a_signals_handler_in_the_middle_of_a_change_is_told_that_somebody_is_at_it(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = Catalog.begin
    found: list[Status] = []
    with open_local(config(place)) as store:

        def begins(catalog: Catalog, owner: int, deadline: Deadline) -> bool:
            begun = begin(catalog, owner, deadline)
            if not found:
                found.extend(store.put(items([sample_page(2)]), deadline=Deadline.after(0.2)))
            return begun

        monkeypatch.setattr(Catalog, "begin", begins)
        assert put(store, [sample_page(1)]) == [Status.STORED]
        assert found == [Status.LATE]
        assert put(store, [sample_page(2)]) == [Status.STORED]


# --- L4, L5, L17, L22: forks ------------------------------------------------------------------------------------------


def test_a_child_of_a_fork_does_not_keep_the_gate(place: Path) -> None:
    read_end, write_end = os.pipe()
    (place / "store").mkdir(mode=0o700)
    with Gate(place / "store", soon(), create=False):
        pid = os.fork()
        if pid == 0:  # pragma: no cover
            os.close(write_end)
            os.read(read_end, 1)
            os._exit(0)
    try:
        with open_local(config(place, open_timeout_s=5.0)) as store:
            assert put(store, [sample_page(1)]) == [Status.STORED]
    finally:
        os.close(write_end)
        os.close(read_end)
        os.waitpid(pid, 0)


@pytest.mark.timeout(120)
def test_forks_beside_threads_that_open_and_close_stores_take_nothing_else_away(shm: Path) -> None:
    over = threading.Event()
    failures: list[BaseException] = []

    def come_and_go(path: Path) -> None:
        try:
            while not over.is_set():
                with open_local(config(path)) as store:
                    put(store, [sample_page(1)])
        except BaseException as error:  # noqa: BLE001  told below
            failures.append(error)

    threads = [threading.Thread(target=come_and_go, args=(shm / str(i),)) for i in range(2)]
    for i in range(2):
        (shm / str(i)).mkdir()
    for thread in threads:
        thread.start()
    try:
        for _ in range(60):
            mine = os.pipe()

            def own(mine: tuple[int, int] = mine) -> bool:
                return os.write(mine[1], b"x") == 1 and os.read(mine[0], 1) == b"x"

            assert in_child(own) == 0
            for fd in mine:
                os.close(fd)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert not failures


def test_a_child_that_was_forked_in_the_middle_of_a_write_writes_no_more(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headwater.storage.local.slab import Slab

    write_frame = Slab.write_frame
    pids: list[int] = []

    def forks(slab: Slab, offset: int, frame: memoryview, header_bytes: int) -> None:
        slab.wipe(offset)
        if not pids:
            pids.append(os.fork())
            if pids[0] == 0:  # pragma: no cover
                code = 1
                try:
                    write_frame(slab, offset, frame, header_bytes)
                except StoreForked:
                    code = 0
                finally:
                    os._exit(code)
        write_frame(slab, offset, frame, header_bytes)

    with open_local(config(place)) as store:
        monkeypatch.setattr(Slab, "write_frame", forks)
        assert put(store, [sample_page(1)]) == [Status.STORED]
        assert os.waitstatus_to_exitcode(os.waitpid(pids[0], 0)[1]) == 0
        assert hits(store, [sample_page(1)]) == 1


def test_a_child_is_known_by_its_fork_and_not_by_its_number(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_local(config(place)) as store:
        number = os.getpid()

        def child() -> bool:
            os.getpid = lambda: number
            with pytest.raises(StoreForked):
                store.contains([sample_page(1).name], deadline=soon())
            store.close()
            return True

        assert in_child(child) == 0
        assert put(store, [sample_page(1)]) == [Status.STORED]


# --- L6, L9, L10, L12: deadlines --------------------------------------------------------------------------------------


def test_after_a_step_back_of_the_clock_uses_are_put_right_some_at_a_time(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()
    pages = [sample_page(i) for i in range(400)]
    written = [0]
    set_use = Table.set_use

    def counts(table: Table, *args: Any) -> None:
        written[0] += 1
        set_use(table, *args)

    with open_local(config(place), clock=clock) as store:
        put(store, pages)
        clock._now_s -= 1000.0
        monkeypatch.setattr(Table, "set_use", counts)
        catalog = attachment_of(store).catalog
        catalog.recency.now_s()
        assert 0 < written[0] <= 256
        catalog.recency.now_s()
        assert written[0] == 400
        uses = [catalog.table.use(place.number) for place in catalog.mirror.places.values()]
        assert all(use is not None and use.used_s <= clock.time() for use in uses)


def test_batches_end_at_their_deadline(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    pages = [sample_page(i) for i in range(200)]
    taken = Attachment.transact

    def slow(at: Attachment, *args: Any) -> Any:
        clock.advance(0.02)
        return taken(at, *args)

    with open_local(config(place)) as store:
        put(store, pages[:100])
        monkeypatch.setattr(Attachment, "transact", slow)
        found = store.put(items(pages[100:]), deadline=Deadline.after(0.05, clock))
        assert found.count(Status.LATE) >= 36
        assert Status.STORED in found
        if isinstance(store, Addressable):
            wanted = [(page.meta, frame_bytes(PLANE_BYTES)) for page in (sample_page(1000 + i) for i in range(600))]
            out = store.reserve(wanted, deadline=Deadline.after(0.05, clock))
            assert out.count(Status.LATE) >= 200
            store.abandon([one for one in out if isinstance(one, Reservation)], deadline=soon())
            over = Deadline.after(-1.0, clock)
            assert set(store.borrow([page.name for page in pages[:40]], deadline=over)) == {Status.LATE}


def test_pages_that_expire_are_found_by_their_dates(place: Path) -> None:
    clock = FakeClock()
    now_ms = int(clock.time() * 1000)

    def page(i: int, expires_at_ms: int) -> tuple[Any, memoryview]:
        key = hashlib.sha256(b"%d" % i).digest()
        meta = PageMeta(
            key=key, identity=IDENTITY, parent=bytes(32), depth=0, valid_tokens=16, expires_at_ms=expires_at_ms
        )
        frame = bytearray(frame_bytes(PLANE_BYTES))
        seal(memoryview(frame), meta, opaque_layout(PLANE_BYTES, 16), now_ms=now_ms)
        return meta.name, memoryview(bytes(frame))

    with open_local(config(place), clock=clock) as store:
        pages = [page(i, now_ms + 1000 * (1 + i)) for i in range(300)]
        assert set(store.put(pages, deadline=soon())) == {Status.STORED}
        mirror = attachment_of(store).catalog.mirror
        assert mirror.expired(now_ms + 10_500, 256) == mirror.expired(now_ms + 10_500, 256)
        assert len(mirror.expired(now_ms + 10_500, 256)) == 10
        assert len(mirror.expired(now_ms + 10_500, 4)) == 4
        clock.advance(11.0)
        put(store, [sample_page(1)])
        there = store.contains([name for name, _ in pages], deadline=soon())
        assert there == [False] * 11 + [True] * 289 or there == [False] * 10 + [True] * 290
        assert store.validate(deadline=soon()) == []


def test_the_last_to_leave_a_closed_store_does_not_wait_for_who_is_stopped(shm: Path) -> None:
    store = open_local(config(shm))
    assert isinstance(store, Addressable)
    (taken,) = store.reserve([(sample_page(1).meta, frame_bytes(PLANE_BYTES))], deadline=soon())
    assert isinstance(taken, Reservation)
    store.close()
    with changing(shm):
        begin_s = time.monotonic()
        store.abandon([taken], deadline=Deadline.after(0.05))
        assert time.monotonic() - begin_s < 0.9  # it was a second more than that
    with open_local(config(shm)) as again:
        assert again.validate(deadline=soon()) == []


def test_a_new_page_size_that_did_not_get_in_in_time_is_late(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_local(config(place)) as store:
        put(store, [sample_page(i, plane_bytes=BIG) for i in range(32)])
        transact = Attachment.transact
        calls = itertools.count()

        def ends(at: Attachment, work: Callable[[], Any], deadline: Deadline) -> Any:
            return transact(at, work, deadline if next(calls) == 0 else Deadline.after(-1.0))

        monkeypatch.setattr(Attachment, "transact", ends)
        assert store.put(items([sample_page(100)]), deadline=soon()) == [Status.LATE]
        monkeypatch.undo()
        assert put(store, [sample_page(100)]) == [Status.STORED]
        assert store.validate(deadline=soon()) == []


# --- L11, L13 to L16, L18 to L25 --------------------------------------------------------------------------------------


def test_a_mapping_that_is_gone_takes_no_other_ones_guard_along(shm: Path) -> None:
    from headwater.storage.local import sigbus

    with open_local(config(shm)) as store:
        guard = attachment_of(store).slab._range
        assert guard is not None
        other = object.__new__(sigbus.GuardedRange)
        other.start, other.end = guard.start, guard.end  # of a mapping that was at the same address before
        other.forget()
        assert guard in sigbus._ranges
    assert guard not in sigbus._ranges


def test_names_of_mount_points_need_not_be_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = b"20 1 0:1 / /mnt/\xff\xfe rw - ext4 /dev/x rw\n"
    odd += b"21 1 0:2 / /a\\040b rw - tmpfs tmpfs rw\n22 1 0:3 / / rw - ext4 x rw\n"
    monkeypatch.setattr(places, "open", lambda *_, **__: io.BytesIO(odd), raising=False)
    assert places.is_memory(Path("/a b/c"))
    assert not places.is_memory(tmp_path)


def test_blocks_in_a_circle_are_evicted_as_others_are(place: Path) -> None:
    def page(name: str, parent: str, depth: int) -> tuple[Any, memoryview]:
        key, before = (hashlib.sha256(one.encode()).digest() for one in (name, parent))
        meta = PageMeta(key=key, identity=IDENTITY, parent=before, depth=depth, valid_tokens=16)
        frame = bytearray(frame_bytes(BIG))
        seal(memoryview(frame), meta, opaque_layout(BIG, 16), now_ms=1)
        return meta.name, memoryview(bytes(frame))

    with open_local(config(place)) as store:
        for i in range(40):
            both = [page(f"a{i}", f"b{i}", 0), page(f"b{i}", f"a{i}", 1)]
            assert store.put(both, deadline=soon()) == [Status.STORED] * 2
        assert put(store, [sample_page(1, plane_bytes=BIG)]) == [Status.STORED]
    with open_local(config(place)) as store:
        for i in range(40):
            assert put(store, [sample_page(100 + i, plane_bytes=BIG)]) == [Status.STORED]


def test_a_slab_with_a_second_name_is_refused(place: Path) -> None:
    open_local(config(place)).close()
    os.link(place / "store" / SLAB, place / "elsewhere")
    with pytest.raises(StoreUnavailable, match="hard link"):
        open_local(config(place))
    (place / "elsewhere").unlink()
    open_local(config(place)).close()


def test_who_is_alone_by_another_way_is_not_joined(place: Path) -> None:
    with open_local(config(place)) as store:
        slab = attachment_of(store).slab
        slab.locks.drop_all()
        fd = os.open(place / "store" / SLAB, os.O_RDWR)
        try:
            assert SlabLocks(fd).come_in()  # alone, and repairs
            with pytest.raises(StoreBusy):
                slab.locks.come_in()
        finally:
            os.close(fd)


def test_directories_that_cannot_be_are_said_so(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="no name of a directory"):
        LocalStoreConfig(directory=tmp_path / "a\0b")
    for limit_bytes in (None, 8 << 20):
        with pytest.raises(StoreUnavailable):
            open_local(LocalStoreConfig(directory=tmp_path / ("n" * 300), limit_bytes=limit_bytes))
    disabled = open_tier(LocalStoreConfig(directory=tmp_path / ("n" * 300)))
    assert disabled.contains([sample_page(1).name], deadline=soon()) == [False]


def test_a_store_that_was_forgotten_leaves_when_it_is_collected(place: Path) -> None:
    for _ in range(3):
        open_local(config(place))
        gc.collect()
    destroy(place / "store", deadline=soon())


def test_a_signal_that_somebody_sends_does_what_it_did_before(shm: Path) -> None:
    def ends() -> bool:
        faulthandler.disable()
        with open_local(config(shm)):
            os.kill(os.getpid(), signal.SIGBUS)
            return True

    def hears() -> bool:
        heard: list[int] = []
        signal.signal(signal.SIGBUS, lambda number, frame: heard.append(number))
        with open_local(config(shm)) as store:  # which takes the signal from us, and passes on what is not its own
            os.kill(os.getpid(), signal.SIGBUS)
            os.truncate(shm / "store" / SLAB, 4096)
            put(store, [sample_page(1)])
            return heard == [signal.SIGBUS]

    assert in_child(ends) == -signal.SIGBUS
    assert in_child(hears) == 0


def test_a_label_is_any_text(place: Path) -> None:
    with open_local(config(place)) as store:
        put(store, sample_chain(1, 1))
        store.label(IDENTITY, bytes(16), "odd \ud800", deadline=soon())
        assert [one.label for one in store.usage(deadline=soon())] == ["odd ?"]


def test_a_limit_beyond_what_the_ring_can_name_is_refused() -> None:
    with pytest.raises(StoreUnavailable, match="lower limit"):
        Geometry.plan(1 << 46)
    assert Geometry.plan((1 << 46) - 4096).num_slots < 1 << 31


def test_slots_are_what_takers_hold() -> None:
    from headwater.storage.local.allocator import Search

    search = Search([(sample_page(1).meta, 4096), (sample_page(2).meta, 4096)])
    search.results[0] = Slot(3, 1, 0)
    search.emptied.append(Slot(4, 1, 0))
    assert {slot.number for slot in search.held()} == {3, 4}
