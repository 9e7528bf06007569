"""LocalStore: its index under interrupts, stops and flipped bits, looked at from inside."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from headwater.build import open_local, open_tier
from headwater.config.stores import LocalStoreConfig
from headwater.core.results import Status
from headwater.storage.base import Deadline
from headwater.storage.local import LocalStore
from headwater.storage.local.directory import SLAB
from headwater.storage.local.geometry import Geometry
from headwater.storage.local.locks import SlabLocks
from headwater.storage.local.mirror import Draft, Mirror, Page, Place
from headwater.storage.local.table import Table
from headwater.storage.verified import VerifiedStore
from headwater.testing.pages import IDENTITY, PLANE_BYTES, items, sample_chain
from headwater.testing.stores import put, soon
from kit import LIMIT, config, hits
from machines.processes import Helper

GRACE_S = 0.25


@pytest.mark.fault("A11")
def test_an_interrupt_in_the_middle_of_a_change_is_repaired_by_the_next_one(
    place: Path, monkeypatch: pytest.MonkeyPatch, helper: Callable[[], Helper]
) -> None:
    other = helper()
    pages = sample_chain(1, 6)
    with open_local(config(place)) as store:
        other("open", directory=str(place / "store"))
        put(store, pages[:2])
        set_rows = Table.set_rows
        left = [2]

        def breaks_off(table: Table, numbers: Sequence[int], rows: Any) -> None:
            num = min(left[0], len(numbers))
            left[0] -= num
            set_rows(table, numbers[:num], rows[:num])
            if num < len(numbers):
                raise KeyboardInterrupt

        monkeypatch.setattr(Table, "set_rows", breaks_off)
        with pytest.raises(KeyboardInterrupt):
            put(store, pages[2:])
        monkeypatch.undo()
        assert other("put", refs=[(5, 0)]) == ["stored"]
        assert other("validate") == []
        assert put(store, pages)[2:] == [Status.STORED] * 4
        assert other("get", refs=[(1, d) for d in range(6)]) == ["hit"] * 6
        assert store.validate(deadline=soon()) == []


@pytest.mark.fault("A11")
def test_what_is_newest_never_goes_back(place: Path) -> None:
    with open_local(config(place)) as first, open_local(config(place)) as second:
        seen = [0]
        for i in range(30):
            put(first if i % 2 else second, sample_chain(i, 3))
            newest = first._run(lambda at: at.catalog.table.newest(), None)
            assert newest is not None
            assert newest > seen[-1]
            seen.append(newest)


@pytest.mark.fault("A3")
def test_nobody_waits_past_a_deadline_for_who_is_stopped_in_a_change(place: Path) -> None:
    """The moment that cost ten seconds: in the middle of the index's own bookkeeping, with the lock in hand."""
    there, absent = sample_chain(1, 4), sample_chain(2, 2)
    with open_local(config(place)) as store:
        put(store, there)
        fd = os.open(place / "store" / SLAB, os.O_RDWR)
        try:
            assert SlabLocks(fd).begin_writing(soon())
            table = store._run(lambda at: at.catalog.table, None)
            assert table is not None
            table.set_busy(3)
            newest = os.pread(fd, 16, 8192)
            os.pwrite(fd, bytes(8) + newest[8:], 8192)  # half of it was written
            took: dict[str, float] = {}

            def timed(what: str, call: Callable[[Deadline], object]) -> object:
                deadline = Deadline.after(0.3)
                result = call(deadline)
                took[what] = time.monotonic() - deadline.at_s
                return result

            reader = VerifiedStore(store, identity=IDENTITY, plane_bytes=PLANE_BYTES)
            wanted = [(page.name, page.buffer()) for page in there]
            names = [page.name for page in (*there, *absent)]
            assert timed("get", lambda d: reader.get_into(wanted, deadline=d)) == [Status.HIT] * 4
            assert timed("contains", lambda d: store.contains(names, deadline=d)) == [True] * 4 + [False] * 2
            assert timed("contains_cached", lambda d: store.contains_cached(names)) is None
            assert timed("put", lambda d: store.put(items(absent), deadline=d)) == [Status.LATE] * 2
            assert timed("delete", lambda d: store.delete(names[:1], deadline=d)) == [Status.LATE]
            assert max(took.values()) < GRACE_S, took
            assert min(took["get"], took["contains"], took["contains_cached"]) < 0, "looking waits for nobody"
        finally:
            os.close(fd)
        assert put(store, absent) == [Status.STORED] * 2
        assert hits(store, there) == 4
        assert store.validate(deadline=soon()) == []


@pytest.mark.fault("A3")
def test_reading_needs_no_lock_at_all(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = sample_chain(1, 4)
    with open_local(config(place)) as store, open_local(config(place)) as second:
        put(store, pages)
        monkeypatch.setattr(SlabLocks, "_try", lambda *_: 1 / 0)
        assert hits(second, pages) == 4  # what another one has just put
        assert second.contains([page.name for page in pages], deadline=soon()) == [True] * 4
        assert [use.num_pages for use in second.usage(deadline=soon())] == [4]
        monkeypatch.undo()


@pytest.mark.fault("A4")
def test_any_bit_of_the_index_may_flip_and_the_store_opens(tmp_path: Path) -> None:
    pages = sample_chain(1, 8)
    with open_local(config(tmp_path)) as store:
        put(store, pages)
        store.label(IDENTITY, bytes(16), "a model", deadline=soon())
    slab, geometry = tmp_path / "store" / SLAB, Geometry.plan(LIMIT)
    ends = [8192, 8256, 8320, 12288, 16384, geometry.labels_at, geometry.changes_at, geometry.records_at]
    ends += [geometry.uses_at, geometry.records_at + 256]
    original = slab.read_bytes()
    for at in [end + step for end in ends for step in (0, 1, 9, 17, 41, 100, 170)]:
        spoiled = bytearray(original)
        spoiled[at] ^= 0x80
        slab.write_bytes(spoiled)
        with open_tier(LocalStoreConfig(directory=tmp_path / "store")) as tier:
            assert isinstance(tier, LocalStore)
            assert hits(tier, pages) == 8
            assert tier.usage(deadline=soon())[0].num_pages == 8
            assert tier.validate(deadline=soon()) == []


def test_a_name_that_an_index_has_twice_is_a_page_once() -> None:
    mirror = Mirror(Geometry.plan(LIMIT))
    names = [page.meta.name for page in sample_chain(1, 3)]
    rows = [
        Page(names[child], names[parent], Place(number, 1, 4096 * number, 4096), 4096, 0.0, 0, 1)
        for number, (child, parent) in enumerate([(1, 0), (2, 1), (1, 2)])
    ]
    draft = Draft(0, {0: 4096})
    draft.add(rows, (), 4096)
    mirror.take(draft)
    mirror.order.validate()
    given = []
    for name in mirror.order.leaves_first([names[2]]):
        given.append(name)
        mirror.forget([mirror.places[name].number])
    assert given == [names[1], names[2]]
