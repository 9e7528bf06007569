"""Pages read from a disk by several threads: bit for bit, and whatever goes wrong is a miss at the right page."""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from headwater.build import open_local
from headwater.config.stores import LocalStoreConfig
from headwater.core.errors import InvalidConfig, ResourceClosed
from headwater.core.page import PageName
from headwater.core.results import Status
from headwater.layout.digest import plane_digests
from headwater.layout.frame import header_bytes
from headwater.storage import arriving
from headwater.storage import readers as disk_readers
from headwater.storage.base import Deadline
from headwater.storage.local import LocalStore, reading
from headwater.storage.local.slab import Slab
from headwater.storage.readers import ReadStuck
from headwater.storage.verified import VerifiedStore
from headwater.testing.clock import FakeClock
from headwater.testing.pages import IDENTITY, PLANE_BYTES, SamplePage, sample_chain
from headwater.testing.stores import put, soon
from kit import config
from worker_kit import PATIENCE_S, Gate, wait_until

NUM_PAGES = 24
READERS = (1, 2, 5)


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of the tests are small: cut all the same, and shared."""
    monkeypatch.setattr(reading, "UNIT_BYTES", 3000)
    monkeypatch.setattr(reading, "SHARE_BYTES", 1)
    monkeypatch.setattr(arriving, "PIECE_BYTES", 2500)


class Brake:
    """Called before each read of a page, with the page's number, by whichever thread reads it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hook: Callable[[int], None] | None = None
        self.inside = 0  # reads that are under way
        self.names: list[PageName] = []
        self._lock = threading.Lock()
        self._store: LocalStore | None = None
        real = Slab.read_into

        def braked(slab: Slab, offset: int, buffer: memoryview) -> bool:
            number = self._page_at(offset, len(buffer))
            if number is None or self.hook is None:
                return real(slab, offset, buffer)
            with self._lock:
                self.inside += 1
            try:
                self.hook(number)
                return real(slab, offset, buffer)
            finally:
                with self._lock:
                    self.inside -= 1

        monkeypatch.setattr(Slab, "read_into", braked)

    def watch(self, store: LocalStore, pages: list[SamplePage]) -> None:
        """Whose pages these are."""
        self._store, self.names = store, [page.name for page in pages]
        at = store._attachment
        assert at is not None
        self._places = [at.catalog.mirror.places[name] for name in self.names]

    def _page_at(self, offset: int, num_bytes: int) -> int | None:
        if self._store is None or num_bytes < 256:  # a header that is looked at once more
            return None
        return next(
            (i for i, one in enumerate(self._places) if one.offset <= offset < one.offset + one.num_bytes), None
        )


@pytest.fixture
def brake(monkeypatch: pytest.MonkeyPatch) -> Brake:
    return Brake(monkeypatch)


@pytest.fixture(params=READERS)
def store(tmp_path: Path, request: pytest.FixtureRequest, brake: Brake) -> Iterator[LocalStore]:
    with open_local(config(tmp_path, readers=request.param)) as store:
        assert type(store) is LocalStore
        assert put(store, PAGES) == [Status.STORED] * NUM_PAGES
        brake.watch(store, PAGES)
        yield store


PAGES = sample_chain(1, NUM_PAGES)


def verified(store: LocalStore) -> VerifiedStore:
    return VerifiedStore(store, identity=IDENTITY, plane_bytes=PLANE_BYTES)


def buffers() -> list[tuple[PageName, memoryview]]:
    return [(page.name, page.buffer()) for page in PAGES]


def right(wanted: list[tuple[PageName, memoryview]], results: list[Status]) -> None:
    """Every HIT holds exactly the page's bytes."""
    assert len(results) == len(wanted)
    for page, (_, buffer), status in zip(PAGES, wanted, results, strict=True):
        assert status is not Status.HIT or buffer == page.frame


def spoil(store: LocalStore, number: int, at: int) -> None:
    """Flip a byte of a page in the file."""
    attachment = store._attachment
    assert attachment is not None
    offset = attachment.catalog.mirror.places[PAGES[number].name].offset + at
    attachment.slab.write(offset, bytes([attachment.slab.read(offset, 1)[0] ^ 0x10]))


# --- all is well ------------------------------------------------------------------------------------------------------


def test_every_way_to_read_gives_the_same_bytes(store: LocalStore) -> None:
    reader = verified(store)
    for read in (store.get_into, store.peek_into, reader.get_into, reader.peek_into):
        wanted = buffers()
        results = read(wanted, deadline=soon())
        assert results == [Status.HIT] * NUM_PAGES
        right(wanted, results)
    wanted = buffers()
    for page, (_, buffer), digests in zip(PAGES, wanted, reader.fetch(wanted, deadline=soon()), strict=True):
        assert isinstance(digests, np.ndarray)
        assert buffer == page.frame
        payload = memoryview(page.frame)[header_bytes(len(PLANE_BYTES)) :]
        assert digests.tolist() == plane_digests(payload, PLANE_BYTES)
    assert reader.settle_fetched(wanted, NUM_PAGES, deadline=soon()) is Status.HIT


def test_pieces_are_told_while_they_are_there(store: LocalStore) -> None:
    ends = [1000, 5000, len(PAGES[0].frame)]
    wanted = buffers()
    told: set[tuple[int, int]] = set()

    def arrived(page: int, piece: int) -> None:
        start = ends[piece - 1] if piece else 0
        assert wanted[page][1][start : ends[piece]] == PAGES[page].frame[start : ends[piece]]
        assert (page, piece) not in told
        told.add((page, piece))

    results = store.read_pieces(wanted, ends=ends, arrived=arrived, use=True, deadline=soon())
    assert results == [Status.HIT] * NUM_PAGES
    assert told == {(page, piece) for page in range(NUM_PAGES) for piece in range(3)}


def test_what_is_not_there_or_of_another_size_spoils_nothing_else(store: LocalStore) -> None:
    wanted = buffers()
    wanted[3] = (PageName(bytes(len(PAGES[3].name))), wanted[3][1])
    wanted[5] = (wanted[5][0], memoryview(bytearray(77)))
    results = store.get_into(wanted, deadline=soon())
    expected = [Status.HIT] * NUM_PAGES
    expected[3], expected[5] = Status.MISS, Status.SHORT
    assert results == expected
    right(wanted, results)
    assert store.get_into([], deadline=soon()) == []


def test_several_calls_at_once(store: LocalStore) -> None:
    reader = verified(store)

    def call(_: int) -> None:
        wanted = buffers()
        results = reader.get_into(wanted, deadline=soon())
        assert results == [Status.HIT] * NUM_PAGES
        right(wanted, results)

    with ThreadPoolExecutor(6) as callers:
        for _ in callers.map(call, range(12)):
            pass


def test_how_many_readers_is_configured(tmp_path: Path) -> None:
    for readers in (0, -1, 257, 2.5, "2"):
        with pytest.raises(InvalidConfig, match="readers"):
            LocalStoreConfig(directory=tmp_path / "none", readers=readers)  # type: ignore[arg-type]
    assert LocalStoreConfig(directory=tmp_path / "none").readers is None


# --- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", ["header", "first plane", "last plane"])
@pytest.mark.parametrize("number", [0, 11, NUM_PAGES - 1])
def test_one_bad_page_is_one_miss_and_is_removed(store: LocalStore, number: int, at: str) -> None:
    where = {"header": 70, "first plane": header_bytes(len(PLANE_BYTES)) + 9, "last plane": len(PAGES[0].frame) - 1}
    spoil(store, number, where[at])
    reader, wanted = verified(store), buffers()
    results = reader.get_into(wanted, deadline=soon())
    assert results[:number] + results[number + 1 :] == [Status.HIT] * (NUM_PAGES - 1)
    assert results[number] is Status.CORRUPT
    right(wanted, results)
    assert reader.metrics.value("bad_pages_total", fault="corrupt") == 1
    held = store.contains([page.name for page in PAGES], deadline=soon())
    assert held == [True] * number + [False] * (NUM_PAGES - number), "it, and what builds on it"


def test_a_page_that_arrived_wrong_is_looked_at_before_it_is_blamed(store: LocalStore) -> None:
    reader, wanted = verified(store), buffers()
    assert not any(isinstance(one, Status) for one in reader.fetch(wanted, deadline=soon()))
    assert reader.settle_fetched(wanted, 7, deadline=soon()) is Status.HIT, "the copy was wrong, not the page"
    assert all(store.contains([page.name for page in PAGES], deadline=soon()))
    wanted[7][1][-1] ^= 1
    heard: list[Status] = []
    assert reader.settle_fetched(wanted, 7, deadline=soon(), judged=heard.append) is Status.CORRUPT
    assert heard == [Status.CORRUPT]
    assert store.contains([page.name for page in PAGES], deadline=soon()) == [True] * 7 + [False] * (NUM_PAGES - 7)


def test_pages_whose_bytes_are_never_right_switch_the_store_off_however_good_their_headers(store: LocalStore) -> None:
    reader = VerifiedStore(store, identity=IDENTITY, plane_bytes=PLANE_BYTES, max_bad=3)
    for number in (9, 6, 3):
        spoil(store, number, len(PAGES[0].frame) - 5)
        wanted = buffers()[number:]
        reader.fetch(wanted, deadline=soon())
        assert reader.settle_fetched(wanted, 0, deadline=soon()) is Status.CORRUPT
    assert reader.switched_off
    assert reader.fetch(buffers(), deadline=soon()) == [Status.FAILED] * NUM_PAGES


def test_a_read_that_hangs_keeps_the_call_and_other_calls_go_on(store: LocalStore, brake: Brake) -> None:
    gate = Gate()
    gate.shut()
    first = threading.Event()

    def hang(number: int) -> None:
        if number == 5 and not first.is_set():
            first.set()
            gate()

    brake.hook = hang
    wanted, over = buffers(), []
    caller = threading.Thread(target=lambda: over.append(verified(store).get_into(wanted, deadline=soon())))
    caller.start()
    gate.wait_for_arrival()
    others = buffers()
    results = verified(store).get_into(others, deadline=soon())
    assert results == [Status.HIT] * NUM_PAGES
    right(others, results)
    assert not over, "one of its readers has not let go"
    gate.open()
    caller.join(PATIENCE_S)
    assert over == [[Status.HIT] * NUM_PAGES]
    right(wanted, over[0])
    assert not brake.inside


@pytest.mark.parametrize("number", [0, 9, NUM_PAGES - 1])
def test_a_deadline_in_the_middle(store: LocalStore, brake: Brake, number: int) -> None:
    clock = FakeClock()
    brake.hook = lambda page: clock.advance(2.0) if page == number else None
    wanted = buffers()
    results = verified(store).get_into(wanted, deadline=Deadline.after(1.0, clock))
    assert set(results) <= {Status.HIT, Status.LATE}
    right(wanted, results)
    assert not brake.inside
    num_readers = store._readers.num_readers
    if num_readers == 1:
        last = results.index(Status.LATE) if Status.LATE in results else NUM_PAGES
        assert last in (number, number + 1), "its own last pieces may be late"
        assert results == [Status.HIT] * last + [Status.LATE] * (NUM_PAGES - last)
    in_hand = num_readers * (NUM_PAGES // num_readers // 4 + 2)  # pages of the units that readers were at
    assert results[:number].count(Status.LATE) <= in_hand, "what was there before it is a hit"


def test_a_slab_that_is_cut_meanwhile(store: LocalStore, brake: Brake, tmp_path: Path) -> None:
    """Other readers may be anywhere at that moment: far ahead, or still at a page before it."""
    cut = threading.Event()
    begun: set[int] = set()  # pages that somebody was at before the cut
    lowest = brake._places[14].offset

    def shorten(number: int) -> None:
        if number == 7 and not cut.is_set():
            os.truncate(tmp_path / "store" / "slab", lowest)
            cut.set()
        elif not cut.is_set():
            begun.add(number)

    brake.hook = shorten
    wanted = buffers()
    results = verified(store).get_into(wanted, deadline=soon())
    right(wanted, results)
    whole = {i for i, one in enumerate(brake._places) if one.offset + one.num_bytes <= lowest}
    assert len(whole) < NUM_PAGES
    hits = {i for i, status in enumerate(results) if status is Status.HIT}
    assert not hits - whole - begun
    others = store._readers.num_readers - 1
    assert len(whole & set(range(7)) - hits) <= others * (NUM_PAGES // (others + 1) // 4 + 2), "more than was in hand"
    assert store.get_into(buffers(), deadline=soon()) == [Status.FAILED] * NUM_PAGES
    assert store.down is not None
    assert not brake.inside


def test_a_bad_sector_is_one_miss(store: LocalStore, monkeypatch: pytest.MonkeyPatch, brake: Brake) -> None:
    real, bad = os.preadv, brake._places[4]

    def failing(fd: int, into: list[memoryview], offset: int) -> int:
        if bad.offset + 3000 <= offset + len(into[0]) and offset < bad.offset + bad.num_bytes and offset >= bad.offset:
            raise OSError(5, "Input/output error")
        return real(fd, into, offset)

    monkeypatch.setattr(os, "preadv", failing)
    wanted = buffers()
    results = verified(store).get_into(wanted, deadline=soon())
    monkeypatch.undo()
    assert [i for i, status in enumerate(results) if status is not Status.HIT] == [4]
    assert results[4] is Status.SHORT
    right(wanted, results)


def test_closing_under_a_read(store: LocalStore, brake: Brake, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is left open for who is inside, and nobody else comes in."""
    monkeypatch.setattr("headwater.storage.local.store._CLOSE_S", 0.05)
    gate = Gate()
    gate.shut()
    brake.hook = lambda number: gate() if number == 2 else None
    wanted, over = buffers(), []
    caller = threading.Thread(target=lambda: over.append(store.get_into(wanted, deadline=soon())))
    caller.start()
    gate.wait_for_arrival()
    store.close()
    with pytest.raises(ResourceClosed):
        store.get_into(wanted, deadline=soon())
    assert not over
    gate.open()
    caller.join(PATIENCE_S)
    assert over == [[Status.HIT] * NUM_PAGES]
    right(wanted, over[0])
    wait_until(lambda: not any(thread.name == "headwater reads" for thread in threading.enumerate()))


def test_a_page_that_moves_while_it_is_read_is_read_again(store: LocalStore, brake: Brake) -> None:
    """Deleted and written anew by somebody else, in another slot: its digests are those of the second time."""
    moved = threading.Event()

    def move(number: int) -> None:
        if number == NUM_PAGES - 1 and not moved.is_set():
            moved.set()
            brake.hook = None
            store.delete([PAGES[-1].name], deadline=soon())
            filler = sample_chain(2, 1)
            assert put(store, filler) == [Status.STORED]
            assert put(store, PAGES[-1:]) == [Status.STORED]

    brake.hook = move
    wanted = buffers()
    results = verified(store).get_into(wanted, deadline=soon())
    assert moved.is_set()
    assert results[:-1] == [Status.HIT] * (NUM_PAGES - 1)
    assert results[-1] in (Status.HIT, Status.MISS)
    right(wanted, results)
    assert store.contains([PAGES[-1].name], deadline=soon()) == [True], "a lost race is not damage"


def test_a_read_that_hangs_holds_its_memory_and_the_slab_and_not_its_caller(
    tmp_path: Path, brake: Brake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_readers, "_GRACE_S", 0.01)
    gate, caller, clock, hung = Gate(), threading.current_thread(), FakeClock(), set[int]()
    gate.shut()

    def hook(number: int) -> None:
        if threading.current_thread() is not caller:
            hung.add(number)
            gate()
        elif not clock_stopped.is_set():
            gate.wait_for_arrival()
            clock_stopped.set()
            clock.advance(10)  # past the deadline

    clock_stopped = threading.Event()
    with open_local(config(tmp_path, readers=2)) as store:
        assert put(store, PAGES) == [Status.STORED] * NUM_PAGES
        brake.watch(store, PAGES)
        brake.hook, wanted = hook, buffers()
        at = store._attachment
        assert at is not None
        with pytest.raises(ReadStuck) as raised:
            store.get_into(wanted, deadline=Deadline.after(5, clock))
        brake.hook = None
        again = buffers()
        results = store.get_into(again, deadline=soon())  # others go on
        assert results == [Status.HIT] * NUM_PAGES
        right(again, results)
    assert not at._closed, "the slab that is read from is closed when the read is back"
    gate.open()
    assert raised.value.over.wait(PATIENCE_S)
    wait_until(lambda: at._closed)
    wait_until(lambda: all(thread.name != "headwater reads" for thread in threading.enumerate()))
    assert hung
