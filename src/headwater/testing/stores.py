"""The conformance suite that every store runs: subclass `StoreTests` in a test module and give it a `store` fixture.

    class TestMyStore(StoreTests):
        @pytest.fixture
        def store(self): ...      # empty, with room for at least 64 sample pages and for fewer than 1,000

A store with addresses (`Store.addressable`) gets the rules about reservations and borrows as well.
"""

import threading
from collections.abc import Sequence

import pytest

from headwater.core.errors import ResourceClosed
from headwater.core.results import Status
from headwater.layout.frame import ALIGNMENT, verify
from headwater.layout.spec import opaque_layout
from headwater.metrics import Metrics
from headwater.storage.base import Addressable, Borrow, Deadline, Reservation, Store
from headwater.storage.sealed import put_sealed
from headwater.storage.verified import VerifiedStore
from headwater.testing.faulty_stores import Faults, FaultyStore
from headwater.testing.pages import IDENTITY, PLANE_BYTES, SEALED_AT_MS, SamplePage, items, sample_chain, sample_page


def soon() -> Deadline:
    """A deadline that no healthy call comes near."""
    return Deadline.after(20.0)


def past() -> Deadline:
    """A deadline that has passed."""
    return Deadline.after(-1.0)


def read(store: Store, pages: Sequence[SamplePage]) -> list[Status]:
    """Get pages and insist that every HIT holds exactly the page's bytes."""
    buffers = [page.buffer() for page in pages]
    results = store.get_into([(page.name, b) for page, b in zip(pages, buffers, strict=True)], deadline=soon())
    assert len(results) == len(pages)
    for page, buffer, status in zip(pages, buffers, results, strict=True):
        if status is Status.HIT:
            assert bytes(buffer) == page.frame, "a HIT with other bytes than were put"
    return results


def put(store: Store, pages: Sequence[SamplePage]) -> list[Status]:
    """Put pages, with one result each."""
    results = store.put(items(pages), deadline=soon())
    assert len(results) == len(pages)
    return results


class StoreTests:
    """What every store keeps. Set `prefix_closed = False` for one that does not know parents.

    And `expires_pages` for one that removes pages itself when their time is over.
    """

    expires_pages = False

    prefix_closed = True
    checks_frames = True  # refuses what is not a frame of the name

    # --- one page, many pages -----------------------------------------------------------------------------------------

    def test_what_was_put_comes_back(self, store: Store) -> None:
        pages = sample_chain(1, 40)
        assert put(store, pages) == [Status.STORED] * 40
        assert store.contains([page.name for page in pages], deadline=soon()) == [True] * 40
        assert read(store, pages) == [Status.HIT] * 40

    def test_empty_batches(self, store: Store) -> None:
        assert store.put([], deadline=soon()) == []
        assert store.get_into([], deadline=soon()) == []
        assert store.contains([], deadline=soon()) == []
        assert store.delete([], deadline=soon()) == []

    def test_results_stand_in_the_order_asked(self, store: Store) -> None:
        pages = sample_chain(2, 8)
        put(store, pages[:4])
        mixed = [pages[7], pages[0], pages[6], pages[3]]
        assert read(store, mixed) == [Status.MISS, Status.HIT, Status.MISS, Status.HIT]
        assert store.contains([page.name for page in mixed], deadline=soon()) == [False, True, False, True]

    def test_pages_of_different_sizes_live_together(self, store: Store) -> None:
        sizes = [(100,), (4096,), (5000, 3), (16384, 1, 4096)]
        pages = [sample_page(i, plane_bytes=size) for i, size in enumerate(sizes)]
        assert put(store, pages) == [Status.STORED] * len(pages)
        assert read(store, pages) == [Status.HIT] * len(pages)

    def test_shards_of_one_block_are_different_pages(self, store: Store) -> None:
        pages = [sample_page(3, shard=(index, 2)) for index in range(2)]
        put(store, pages)
        assert read(store, pages) == [Status.HIT] * 2

    # --- first writer wins, and a bad page can be replaced ------------------------------------------------------------

    def test_the_first_frame_stays(self, store: Store) -> None:
        first, second = sample_page(4), sample_page(4, variant=1)
        assert put(store, [first]) == [Status.STORED]
        assert put(store, [second]) == [Status.EXISTS]
        assert read(store, [first]) == [Status.HIT]

    def test_the_same_name_twice_in_one_batch(self, store: Store) -> None:
        page = sample_page(5)
        assert put(store, [page, page]) == [Status.STORED, Status.EXISTS]
        assert read(store, [page, page]) == [Status.HIT] * 2

    def test_a_deleted_page_is_gone_and_can_be_put_again(self, store: Store) -> None:
        first, second = sample_page(6), sample_page(6, variant=1)
        put(store, [first])
        assert store.delete([first.name, sample_page(7).name], deadline=soon()) == [
            Status.REMOVED,
            Status.ABSENT,
        ]
        assert read(store, [first]) == [Status.MISS]
        assert put(store, [second]) == [Status.STORED]
        assert read(store, [second]) == [Status.HIT]

    def test_no_suffix_outlives_its_prefix(self, store: Store) -> None:
        if not self.prefix_closed:
            return
        pages = sample_chain(8, 6)
        put(store, pages)
        store.delete([pages[2].name], deadline=soon())
        assert store.contains([page.name for page in pages], deadline=soon()) == [True] * 2 + [False] * 4

    def test_a_put_leaves_no_hole(self, store: Store) -> None:
        if not self.checks_frames:
            return
        pages, other = sample_chain(90, 5), sample_page(91)
        spoiled = memoryview(bytearray(pages[2].frame))
        spoiled[0] ^= 1
        batch = [*items(pages[:2]), (pages[2].name, spoiled), *items(pages[3:]), other.item]
        results = store.put(batch, deadline=soon())
        assert results[:3] == [Status.STORED, Status.STORED, Status.REFUSED]
        assert not any(status.held for status in results[3:5])
        assert results[5] is Status.STORED
        assert store.contains([page.name for page in pages], deadline=soon()) == [True, True, False, False, False]

    def test_sealing_on_the_way_in_is_the_same_page(self, store: Store) -> None:
        layout = opaque_layout(PLANE_BYTES, 16)
        pages = sample_chain(95, 5)
        unsealed = [(page.meta, memoryview(bytearray(len(page.frame)))) for page in pages]
        for (_, frame), page in zip(unsealed, pages, strict=True):
            frame[ALIGNMENT:] = page.frame[ALIGNMENT:]
        put(store, pages[:1])
        results = put_sealed(store, unsealed, layout, now_ms=SEALED_AT_MS, deadline=soon())
        assert results == [Status.EXISTS] + [Status.STORED] * 4
        assert read(store, pages) == [Status.HIT] * 5
        late = put_sealed(store, [(sample_page(96).meta, unsealed[0][1])], layout, now_ms=0, deadline=past())
        assert late == [Status.LATE]
        assert store.contains([sample_page(96).name], deadline=soon()) == [False]

    # --- bad input ----------------------------------------------------------------------------------------------------

    def test_a_destination_of_the_wrong_size_is_no_hit(self, store: Store) -> None:
        page = sample_page(9)
        put(store, [page])
        for size in (0, len(page.frame) - 1, len(page.frame) + 1):
            assert store.get_into([(page.name, memoryview(bytearray(size)))], deadline=soon()) != [Status.HIT]
        assert read(store, [page]) == [Status.HIT]

    def test_what_is_no_frame_is_refused(self, store: Store) -> None:
        if not self.checks_frames:
            return
        page, other = sample_page(10), sample_page(11)
        bad = [
            (page.name, memoryview(b"")),
            (page.name, memoryview(bytes(len(page.frame)))),
            (page.name, memoryview(page.frame)[:-1]),
            (page.name, memoryview(other.frame)),
        ]
        assert store.put([*bad, other.item], deadline=soon()) == [Status.REFUSED] * 4 + [Status.STORED]
        assert store.contains([page.name], deadline=soon()) == [False]

    # --- deadlines ----------------------------------------------------------------------------------------------------

    def test_a_call_that_is_late_does_nothing(self, store: Store) -> None:
        held, new = sample_page(12), sample_page(13)
        put(store, [held])
        assert store.put([new.item], deadline=past()) == [Status.LATE]
        assert store.get_into([(held.name, held.buffer())], deadline=past()) == [Status.LATE]
        assert store.contains([held.name], deadline=past()) == [False]
        assert store.delete([held.name], deadline=past()) == [Status.LATE]
        assert store.contains([held.name, new.name], deadline=soon()) == [True, False]
        assert put(store, [new]) == [Status.STORED]

    # --- the limit ----------------------------------------------------------------------------------------------------

    def test_a_full_store_makes_room_and_stays_right(self, store: Store) -> None:
        chains = [sample_chain(100 + i, 10) for i in range(100)]
        for chain in chains:
            assert all(status.held for status in put(store, chain))
            assert read(store, chain) == [Status.HIT] * 10  # what was just put is there
        held = [store.contains([page.name for page in chain], deadline=soon()) for chain in chains]
        assert not all(all(chain) for chain in held), "the store was to be smaller than this"
        if self.prefix_closed:
            assert all(chain == sorted(chain, reverse=True) for chain in held), "a suffix without its prefix"
        for chain, there in zip(chains, held, strict=True):
            assert read(store, chain) == [Status.HIT if held_ else Status.MISS for held_ in there]

    def test_what_is_used_stays(self, store: Store) -> None:
        hot = sample_chain(200, 4)
        put(store, hot)
        for i in range(100):
            put(store, sample_chain(300 + i, 10))
            assert read(store, hot) == [Status.HIT] * 4

    # --- life and threads ---------------------------------------------------------------------------------------------

    def test_close_twice_and_use_after_close(self, store: Store) -> None:
        page = sample_page(14)
        store.close()
        store.close()
        with pytest.raises(ResourceClosed):
            store.put([page.item], deadline=soon())
        with pytest.raises(ResourceClosed):
            store.get_into([(page.name, page.buffer())], deadline=soon())
        with pytest.raises(ResourceClosed):
            store.contains([page.name], deadline=soon())
        with pytest.raises(ResourceClosed):
            store.delete([page.name], deadline=soon())

    def test_threads_write_read_and_delete_at_once(self, store: Store) -> None:
        errors: list[BaseException] = []

        def work(seed: int) -> None:
            try:
                for step in range(30):
                    chain = sample_chain(400 + (seed + step) % 7, 6)
                    put(store, chain)
                    read(store, chain)
                    if step % 5 == seed:
                        store.delete([chain[3].name], deadline=soon())
            except BaseException as error:  # noqa: BLE001  handed to the test below
                errors.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors

    # --- verified reading ---------------------------------------------------------------------------------------------

    def test_a_bad_first_page_is_thrown_out(self, store: Store) -> None:
        bad, good = sample_page(15, identity=bytes(32)), sample_page(15)
        put(store, [bad])
        reader = VerifiedStore(store, identity=IDENTITY, plane_bytes=PLANE_BYTES)
        assert read(reader, [good]) == [Status.FOREIGN]
        assert put(store, [good]) == [Status.STORED]
        assert read(reader, [good]) == [Status.HIT]

    def test_an_expired_page_is_a_miss(self, store: Store) -> None:
        page = sample_page(16, expires_at_ms=SEALED_AT_MS + 1)
        put(store, [page])
        reader = VerifiedStore(store, identity=IDENTITY, plane_bytes=PLANE_BYTES)
        (found,) = read(reader, [page])
        assert found is Status.STALE or (self.expires_pages and found is Status.MISS)
        assert store.contains([page.name], deadline=soon()) == [False]

    def test_faults_below_the_verifier_are_misses(self, store: Store) -> None:
        everything = Faults(
            put_fails=0.1,
            get_fails=0.1,
            get_misses=0.1,
            flips_byte=0.2,
            cuts_tail=0.2,
            swaps_page=0.2,
            contains_lies=0.1,
        )
        faulty = FaultyStore(store, everything, seed=1)
        metrics = Metrics()
        reader = VerifiedStore(faulty, identity=IDENTITY, plane_bytes=PLANE_BYTES, metrics=metrics)
        seen = set()
        for _ in range(60):
            pages = sample_chain(500, 8)
            put(faulty, pages)
            seen.update(read(reader, pages))  # `read` fails on any wrong byte
        assert faulty.num_injected > 100
        assert {Status.HIT, Status.MISS, Status.FAILED, Status.CORRUPT, Status.FOREIGN} <= seen
        assert metrics.value("bad_pages_total", fault="corrupt") > 0
        assert metrics.value("bad_pages_total", fault="foreign") > 0

    # --- stores with addresses ----------------------------------------------------------------------------------------

    def test_a_reservation_is_invisible_until_published(self, store: Store) -> None:
        in_place = store.addressable()
        if in_place is None:
            return
        page = sample_page(17)
        reservation = _reserve(in_place, page)
        assert store.contains([page.name], deadline=soon()) == [False]
        reservation.view[:] = page.frame
        assert store.contains([page.name], deadline=soon()) == [False]
        assert in_place.publish([reservation], deadline=soon()) == [Status.STORED]
        assert read(store, [page]) == [Status.HIT]
        assert in_place.publish([reservation], deadline=soon()) == [Status.REFUSED]  # it was consumed
        assert read(store, [page]) == [Status.HIT]

    def test_what_is_abandoned_or_not_written_is_never_seen(self, store: Store) -> None:
        in_place = store.addressable()
        if in_place is None:
            return
        page, empty, other = sample_page(18), sample_page(19), sample_page(20)
        reservation = _reserve(in_place, page)
        reservation.view[:] = page.frame
        in_place.abandon([reservation], deadline=soon())
        in_place.abandon([reservation], deadline=soon())
        unwritten, misnamed = _reserve(in_place, empty), _reserve(in_place, other)
        misnamed.view[:] = page.frame
        assert in_place.publish([unwritten, misnamed], deadline=soon()) == [Status.REFUSED] * 2
        assert store.contains([page.name, empty.name, other.name], deadline=soon()) == [False] * 3
        assert put(store, [page, empty, other]) == [Status.STORED] * 3

    def test_two_writers_of_one_page_end_with_one(self, store: Store) -> None:
        in_place = store.addressable()
        if in_place is None:
            return
        page = sample_page(21)
        first, second = _reserve(in_place, page), _reserve(in_place, page)
        first.view[:] = page.frame
        second.view[:] = page.frame
        assert in_place.publish([second], deadline=soon()) == [Status.STORED]
        assert in_place.publish([first], deadline=soon()) == [Status.EXISTS]
        assert read(store, [page]) == [Status.HIT]

    def test_a_borrowed_page_is_told_when_it_was_replaced(self, store: Store) -> None:
        in_place = store.addressable()
        if in_place is None:
            return
        page = sample_page(22)
        put(store, [page])
        borrow = in_place.borrow([page.name], deadline=soon())[0]
        assert isinstance(borrow, Borrow)
        copy = memoryview(bytearray(borrow.view))
        assert in_place.still_valid(borrow)
        assert not isinstance(verify(copy, page.name, now_ms=0), Status)
        store.delete([page.name], deadline=soon())
        assert not in_place.still_valid(borrow)

    def test_reserved_slots_are_not_given_to_others(self, store: Store) -> None:
        in_place = store.addressable()
        if in_place is None:
            return
        pages = [sample_page(600 + i) for i in range(16)]
        reservations = [_reserve(in_place, page) for page in pages]
        for reservation, page in zip(reservations, pages, strict=True):
            reservation.view[:] = page.frame
        for i in range(100):
            put(store, sample_chain(700 + i, 10))
        assert all(bytes(r.view) == page.frame for r, page in zip(reservations, pages, strict=True))
        assert in_place.publish(reservations, deadline=soon()) == [Status.STORED] * 16


def _reserve(in_place: Addressable, page: SamplePage) -> Reservation:
    reservation = in_place.reserve([(page.meta, len(page.frame))], deadline=soon())[0]
    assert isinstance(reservation, Reservation)
    return reservation
