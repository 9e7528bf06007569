"""LocalStore within its limit: who leaves first, and how page sizes share."""

from pathlib import Path

from headwater.build import open_local
from headwater.core.results import Status
from headwater.testing.clock import FakeClock
from headwater.testing.pages import SEALED_AT_MS, sample_chain, sample_page
from headwater.testing.stores import put, read, soon
from kit import BIG, LIMIT, config, hits

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
        assert put(store, [huge, sample_page(2)]) == [Status.REFUSED, Status.STORED]
