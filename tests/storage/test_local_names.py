"""LocalNames see what a LocalStore sees, whatever others write, delete, evict, cut anew or break."""

import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.build import open_local
from headwater.config.stores import LocalStoreConfig
from headwater.core.errors import StoreDamaged
from headwater.core.results import Status
from headwater.storage.base import Deadline, Store
from headwater.storage.local import LocalNames, LocalStore
from headwater.storage.local import names as names_module
from headwater.storage.local.attach import destroy
from headwater.storage.local.names import NameView
from headwater.testing.clock import FakeClock
from headwater.testing.pages import SamplePage, sample_page
from headwater.testing.stores import StoreTests

LIMIT_BYTES = 8 << 20  # for about half of the pages
USUAL, WIDE = (60_000, 40_000), (180_000, 180_000)  # two sizes: they take extents away from each other
CHAINS, DEPTH = 24, 4
PAGES: list[SamplePage] = [
    sample_page(chain, depth, plane_bytes=WIDE if chain % 3 == 2 else USUAL)
    for chain in range(CHAINS)
    for depth in range(DEPTH)
]
NAMES = [page.name for page in PAGES]
CHANGES = st.lists(
    st.tuples(st.sampled_from(["put", "put", "put", "delete"]), st.integers(0, CHAINS - 1), st.integers(1, DEPTH)),
    min_size=1,
    max_size=60,
)


def later() -> Deadline:
    return Deadline.after(30)


def change(store: LocalStore, what: str, chain: int, num: int) -> None:
    pages = PAGES[chain * DEPTH : chain * DEPTH + num]
    if what == "put":
        store.put([page.item for page in pages], deadline=later())
    else:
        store.delete([pages[-1].name], deadline=later())


def open_both(path: Path) -> tuple[LocalStore, LocalNames]:
    writer = open_local(LocalStoreConfig(directory=path, limit_bytes=LIMIT_BYTES))
    eyes = open_local(LocalStoreConfig(directory=path), only_probes=True)
    assert isinstance(eyes, LocalNames)
    return writer, eyes


def sight_of(eyes: LocalNames) -> NameView:
    assert eyes._seen is not None
    return eyes._seen[1]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("eyes")


@given(CHANGES, st.integers(1, 8))
def test_they_see_what_the_writer_sees(root: Path, changes: list[tuple[str, int, int]], every: int) -> None:
    path = root / os.urandom(8).hex()
    writer, eyes = open_both(path)
    with writer, eyes:
        for at, one in enumerate(changes):
            change(writer, *one)
            if at % every == 0:
                held = writer.contains(NAMES, deadline=later())
                assert eyes.contains_cached(NAMES) in (held, None)
                assert eyes.contains(NAMES, deadline=later()) == held
                assert eyes.contains_cached(NAMES) == held
        held = writer.contains(NAMES, deadline=later())
        assert eyes.contains(NAMES, deadline=later()) == held
        with open_local(LocalStoreConfig(directory=path), only_probes=True) as fresh:
            assert fresh.contains(NAMES, deadline=later()) == held


def test_they_read_it_all_where_the_ring_has_gone_on(place: Path) -> None:
    writer, eyes = open_both(place / "store")
    with writer, eyes:
        ring = sight_of(eyes)._table.geometry.num_changes
        seen = sight_of(eyes).seen
        while (sight_of(eyes)._table.newest() or 0) - seen <= ring:
            for chain in range(CHAINS):
                change(writer, "put", chain, DEPTH)
                change(writer, "delete", chain, 1)
        change(writer, "put", 1, 3)
        assert eyes.contains_cached(NAMES) is None  # that would take too long
        assert eyes.contains(NAMES, deadline=later()) == writer.contains(NAMES, deadline=later())
        assert sum(eyes.contains(NAMES, deadline=later())) == 3


def test_they_follow_many_changes_at_once(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names_module, "_CACHED_S", 30.0)  # this machine may be busy
    writer, eyes = open_both(place / "store")
    with writer, eyes:
        seen = sight_of(eyes).seen
        for _ in range(45):
            change(writer, "put", 1, DEPTH)
            change(writer, "delete", 1, 1)
        change(writer, "put", 3, 2)
        assert (
            256 < (sight_of(eyes)._table.newest() or 0) - seen <= 512
        )  # several steps, and yet few enough for a glance
        assert eyes.contains_cached(NAMES) == writer.contains(NAMES, deadline=later())
        assert sum(eyes.contains(NAMES, deadline=later())) == 2


def test_little_time_is_used_and_the_next_one_goes_on(place: Path) -> None:
    writer, eyes = open_both(place / "store")
    with writer, eyes:
        for chain in range(CHAINS):
            change(writer, "put", chain, DEPTH)
        sight = NameView(sight_of(eyes)._table)
        clock = FakeClock()
        rounds = 0
        while not sight.refresh(_Ticks(at_s=clock.monotonic() + 1.5, clock=clock)):
            rounds += 1
            assert sight.num_behind() is None  # not all of it is known: nobody is told that it is
            assert rounds < 1000
        assert rounds > 1
        assert sight.has_all(NAMES) == writer.contains(NAMES, deadline=later())


def test_extents_that_change_are_read_one_by_one(place: Path) -> None:
    """However little time there is, each look goes on where the last one ended."""
    writer, eyes = open_both(place / "store")
    clock = FakeClock()
    with writer, eyes:
        sight = sight_of(eyes)
        for chain in [
            *range(2, CHAINS, 3),
            *range(0, CHAINS, 3),
            *range(2, CHAINS, 3),
        ]:  # sizes that push each other out
            change(writer, "put", chain, DEPTH)
        rounds = 0
        while not sight.refresh(_Ticks(at_s=clock.monotonic() + 1.5, clock=clock)):
            rounds += 1
            assert rounds < 1000
        assert rounds > 1
        assert sight.has_all(NAMES) == writer.contains(NAMES, deadline=later())


class _Ticks(Deadline):
    """A second passes whenever somebody looks."""

    @property
    def expired(self) -> bool:
        assert isinstance(self.clock, FakeClock)
        self.clock.advance(1.0)
        return super().expired


def test_what_they_believe_after_an_interrupt_is_read_anew(place: Path) -> None:
    """At whatever line it comes: the next look sees what the writer sees."""
    writer, eyes = open_both(place / "store")
    chance = random.Random(1)
    codes = {
        getattr(NameView, name).__code__ for name in ("_forget", "_look", "_look_at_extent", "_follow", "_catch_up")
    }
    places = set()
    with writer, eyes:
        for _ in range(300):
            for _ in range(chance.randrange(1, 4)):
                kind = "put" if chance.random() < 0.7 else "delete"
                change(writer, kind, chance.randrange(CHAINS), chance.randrange(1, DEPTH + 1))
            left = chance.randrange(1, 60)

            def line(frame: FrameType, event: str, _: object) -> Any:
                nonlocal left
                left -= event == "line"
                if event == "line" and left == 0:
                    places.add((frame.f_code.co_name, frame.f_lineno))
                    raise KeyboardInterrupt
                return line

            before = sys.gettrace()
            sys.settrace(lambda frame, event, _: line if frame.f_code in codes else None)
            try:
                eyes.contains(NAMES, deadline=later())
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(before)
            assert eyes.contains(NAMES, deadline=later()) == writer.contains(NAMES, deadline=later()), places
    assert len(places) > 15


def test_they_do_not_follow_a_writer_for_ever(place: Path) -> None:
    """One that has a change ready whenever somebody has read the last one."""
    writer, eyes = open_both(place / "store")
    with writer, eyes:
        table, num = sight_of(eyes)._table, 0
        changes = table.changes

        def busy(first: int, last: int) -> list[int] | None:
            nonlocal num
            num += 1
            assert num < 100, "it never ends"
            found = changes(first, last)
            change(writer, "put", 1, 1)
            change(writer, "delete", 1, 1)
            return found

        asks: list[Callable[[], object]] = [
            lambda: eyes.contains(NAMES, deadline=later()),
            lambda: eyes.contains_cached(NAMES),
        ]
        for ask in asks:
            change(writer, "put", 2, 1)
            change(writer, "delete", 2, 1)
            table.changes = busy  # type: ignore[method-assign]
            ask()
            table.changes = changes  # type: ignore[method-assign]
        assert num == 2


def test_a_first_look_that_fails_leaves_nobody_inside(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = place / "store"
    open_local(LocalStoreConfig(directory=path, limit_bytes=LIMIT_BYTES)).close()
    with monkeypatch.context() as patch:

        def fails(self: NameView, deadline: Deadline) -> bool:
            raise StoreDamaged("it was cut meanwhile")

        patch.setattr(NameView, "_catch_up", fails)
        with pytest.raises(StoreDamaged):
            open_local(LocalStoreConfig(directory=path), only_probes=True)
    destroy(path, deadline=later())  # StoreBusy, if anybody were


def test_a_store_that_is_taken_away_has_nothing_and_comes_back(place: Path) -> None:
    path = place / "store"
    writer, eyes = open_both(path)
    change(writer, "put", 1, 4)
    assert sum(eyes.contains(NAMES, deadline=later())) == 4
    writer.close()
    for left in path.iterdir():
        left.unlink()
    with eyes:
        assert not any(eyes.contains(NAMES, deadline=later()))
        assert eyes.down is not None
        assert eyes.contains_cached(NAMES) is None
        with open_local(LocalStoreConfig(directory=path, limit_bytes=LIMIT_BYTES)) as writer:
            assert eyes.revive()
            change(writer, "put", 3, 2)
            assert sum(eyes.contains(NAMES, deadline=later())) == 2


class TestEyes(StoreTests):
    """Everything else is a LocalStore's."""

    @pytest.fixture
    def store(self, place: Path) -> Iterator[Store]:
        config = LocalStoreConfig(directory=place / "store", limit_bytes=LIMIT_BYTES)
        with open_local(config, only_probes=True) as store:
            yield store


def test_they_can_read(place: Path) -> None:
    writer, eyes = open_both(place / "store")
    with writer, eyes:
        change(writer, "put", 1, 4)
        page = PAGES[DEPTH]
        buffer = page.buffer()
        assert eyes.get_into([(page.name, buffer)], deadline=later()) == [Status.HIT]
        assert bytes(buffer) == page.frame
