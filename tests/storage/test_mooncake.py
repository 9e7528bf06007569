"""MooncakeStore against real servers that the tests start themselves: the conformance suite, and what goes wrong."""

import gc
import importlib
import itertools
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from headwater.core.errors import InvalidConfig, InvalidInput, ResourceClosed, StoreForked, StoreUnavailable
from headwater.core.results import Status
from headwater.layout.frame import ALIGNMENT
from headwater.layout.spec import opaque_layout
from headwater.storage.base import Deadline, Store
from headwater.storage.mooncake import MooncakeStore
from headwater.storage.mooncake import engine as mooncake_engine
from headwater.storage.mooncake import store as mooncake
from headwater.storage.mooncake.config import MooncakeConfig, parse_size, parse_url
from headwater.storage.mooncake.engine import MooncakeEngine, address_of
from headwater.storage.mooncake.watch import Watch, knock, nobody_listens
from headwater.storage.sealed import put_sealed
from headwater.storage.verified import VerifiedStore
from headwater.testing.clock import FakeClock
from headwater.testing.mooncake import MooncakePool
from headwater.testing.pages import IDENTITY, PLANE_BYTES, SEALED_AT_MS, SamplePage, items, sample_chain, sample_page
from headwater.testing.stores import StoreTests, put, read, soon

MIB = 1 << 20
LARGE = (MIB - 4096,)  # with its header a frame of one MiB
_numbers = itertools.count()

os.environ.setdefault("MC_TCP_PROGRESS_TIMEOUT_SEC", "1")  # the engine reads it when it is loaded


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """In place of the one for all tests: engines that tests share open files when they like."""
    threads = set(threading.enumerate())
    yield
    gc.collect()
    left = [thread.name for thread in threading.enumerate() if thread not in threads and thread.is_alive()]
    assert not left, f"threads left running: {left}"


# --- pools and engines that tests share: opening is quick, closing an engine takes a second ---------------------------


@pytest.fixture(scope="module")
def small() -> Iterator[MooncakePool]:
    """Some 850 sample pages, in the memory of a client process."""
    with MooncakePool(segment_bytes=16 * MIB, evict_above=0.75, lease_ms=300) as pool:
        yield pool


@pytest.fixture(scope="module")
def alone() -> Iterator[MooncakePool]:
    """A master without a client process: memory comes from who uses it."""
    with MooncakePool(evict_above=0.75, lease_ms=300) as pool:
        yield pool


@pytest.fixture(scope="module")
def roomy() -> Iterator[MooncakePool]:
    with MooncakePool(segment_bytes=256 * MIB) as pool:
        yield pool


@pytest.fixture(scope="module")
def over_tcp(small: MooncakePool) -> Iterator[MooncakeEngine]:
    engine = MooncakeEngine(small.config())
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def by_memory(small: MooncakePool) -> Iterator[MooncakeEngine]:
    engine = MooncakeEngine(small.config(shm=True))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def own_segment(alone: MooncakePool) -> Iterator[MooncakeEngine]:
    engine = MooncakeEngine(alone.config(segment_bytes=16 * MIB))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def engine(roomy: MooncakePool) -> Iterator[MooncakeEngine]:
    """Over TCP, with room."""
    engine = MooncakeEngine(roomy.config())
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def shared(roomy: MooncakePool) -> Iterator[MooncakeEngine]:
    """By shared memory, with room."""
    engine = MooncakeEngine(roomy.config(shm=True))
    yield engine
    engine.close()


def fresh(pool: MooncakePool, engine: MooncakeEngine, **options: Any) -> MooncakeStore:
    """An empty store on an engine that others use too."""
    return MooncakeStore(pool.config(prefix=f"{next(_numbers)}:", **options), engine=engine)


@pytest.fixture
def store(roomy: MooncakePool, engine: MooncakeEngine) -> Iterator[MooncakeStore]:
    with fresh(roomy, engine) as store:
        yield store


class PoolTests(StoreTests):
    """The suite. A pool gives room only when the leases of what was read have run out: who puts may have to wait."""

    prefix_closed = False  # the master evicts page by page

    def test_a_full_store_makes_room_and_stays_right(self, store: Store) -> None:
        chains = [sample_chain(100 + i, 10) for i in range(130)]  # more than all of its memory
        for chain in chains:
            wait = Deadline.after(10)
            while not set(put(store, chain)) <= {Status.STORED, Status.EXISTS}:
                assert not wait.expired
            assert read(store, chain) == [Status.HIT] * 10
        held = [store.contains([page.name for page in chain], deadline=soon()) for chain in chains]
        assert not all(all(chain) for chain in held), "the store was to be smaller than this"
        for chain, there in zip(chains, held, strict=True):
            got = read(store, chain)
            assert all(status is Status.MISS for status, held_ in zip(got, there, strict=True) if not held_)
        # Others use the pool after us. While it is full, its master evicts in the background, and takes what they put.
        names, wait = [page.name for chain in chains for page in chain], Deadline.after(60)
        while any(store.contains(names, deadline=soon())):  # what was just read has a lease
            store.delete(names, deadline=soon())
            assert not wait.expired

    def test_threads_write_read_and_delete_at_once(self, store: Store) -> None:
        """Verified: the place of a page that is removed by force may be another's before its reader has finished."""
        reader = VerifiedStore(store, identity=IDENTITY, plane_bytes=PLANE_BYTES, max_bad=10**9)
        super().test_threads_write_read_and_delete_at_once(reader)


class TestOverTcp(PoolTests):
    @pytest.fixture
    def store(self, small: MooncakePool, over_tcp: MooncakeEngine) -> Iterator[Store]:
        with fresh(small, over_tcp) as store:
            yield store


class TestOwnSegment(PoolTests):
    @pytest.fixture
    def store(self, alone: MooncakePool, own_segment: MooncakeEngine) -> Iterator[Store]:
        with fresh(alone, own_segment) as store:
            yield store


class TestBySharedMemory(PoolTests):
    @pytest.fixture
    def store(self, small: MooncakePool, by_memory: MooncakeEngine) -> Iterator[Store]:
        with fresh(small, by_memory, buffer_bytes=MIB) as store:  # of which every page goes through the buffer
            yield store


# --- what the pool keeps ----------------------------------------------------------------------------------------------


def test_two_stores_share_a_pool_and_prefixes_keep_them_apart(roomy: MooncakePool, engine: MooncakeEngine) -> None:
    pages = sample_chain(1, 4)
    one, two, other = MooncakeStore(roomy.config(prefix="a:"), engine=engine), fresh(roomy, engine), None
    other = MooncakeStore(roomy.config(prefix="a:"), engine=engine)
    put(one, pages)
    assert read(other, pages) == [Status.HIT] * 4
    assert read(two, pages) == [Status.MISS] * 4


@pytest.mark.parametrize("way", ["tcp", "shm"])
def test_large_pages_and_long_batches(
    way: str, roomy: MooncakePool, engine: MooncakeEngine, shared: MooncakeEngine
) -> None:
    large, small = sample_chain(2, 20, plane_bytes=LARGE), sample_chain(3, 300, plane_bytes=(8,))
    with fresh(roomy, engine if way == "tcp" else shared, buffer_bytes=4 * MIB) as store:
        for pages in (large, small):
            assert put(store, pages) == [Status.STORED] * len(pages)
            assert put(store, pages) == [Status.EXISTS] * len(pages)
            assert read(store, pages) == [Status.HIT] * len(pages)
        names = [page.name for page in small]
        assert store.delete(names[:200], deadline=soon()) == [Status.REMOVED] * 200
        assert store.contains(names, deadline=soon()) == [False] * 200 + [True] * 100


def test_a_page_without_its_parent_is_not_taken(store: MooncakeStore) -> None:
    pages = sample_chain(4, 4)
    assert put(store, pages[2:]) == [Status.NO_PARENT] * 2
    assert put(store, pages[1::-1]) == [Status.NO_PARENT, Status.STORED]
    assert put(store, pages[1:]) == [Status.STORED] * 3


def test_sealing_and_verifying_beside_the_calls_changes_no_answer(
    store: MooncakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = sample_chain(9, 11)
    layout = opaque_layout(PLANE_BYTES, 16)
    reader = VerifiedStore(store, identity=IDENTITY, plane_bytes=PLANE_BYTES)
    names = [page.name for page in pages]
    for module in ("sealed", "verified"):
        monkeypatch.setattr(f"headwater.storage.{module}.ALONE_BYTES", 0)  # small planes, too
    for num_pages in (0, 1, 2, 5, 10, 11, 12):  # of a portion; 0: not beside
        monkeypatch.setattr(MooncakeStore, "portion_bytes", num_pages * len(pages[0].frame))
        unsealed = [(page.meta, memoryview(bytearray(page.frame))) for page in pages]
        for _, frame in unsealed:
            frame[:ALIGNMENT] = bytes(ALIGNMENT)
        results = put_sealed(store, unsealed, layout, now_ms=SEALED_AT_MS, deadline=soon())
        assert results == [Status.STORED] * 11
        assert read(reader, pages) == [Status.HIT] * 11
        store.delete([names[0], names[4], names[10]], deadline=soon())
        spoiled = bytearray(pages[4].frame)
        spoiled[-1] ^= 1
        _raw(store, names[4], bytes(spoiled))
        expected = [Status.MISS, *[Status.HIT] * 3, Status.CORRUPT, *[Status.HIT] * 5, Status.MISS]
        assert read(reader, pages) == expected
        assert store.contains(names, deadline=soon()) == [status is Status.HIT for status in expected]
        assert reader.get_into([], deadline=soon()) == []
        store.delete(names, deadline=soon())


@pytest.mark.parametrize("way", ["tcp", "shm"])
def test_a_name_that_is_asked_for_twice_is_filled_twice(
    way: str, roomy: MooncakePool, engine: MooncakeEngine, shared: MooncakeEngine
) -> None:
    pages = sample_chain(5, 3)
    with fresh(roomy, engine if way == "tcp" else shared) as store:
        put(store, pages)
        asked = [pages[0], pages[1], pages[0], pages[0], pages[2], pages[1]]
        assert read(store, asked) == [Status.HIT] * 6  # `read` compares the bytes


def test_two_clients_race_for_one_name(roomy: MooncakePool, engine: MooncakeEngine, shared: MooncakeEngine) -> None:
    results: list[list[Status]] = [[], []]
    both = threading.Barrier(2)
    prefix = f"{next(_numbers)}:"
    stores = [MooncakeStore(roomy.config(prefix=prefix), engine=one) for one in (engine, shared)]

    def write(who: int) -> None:
        for chain in range(40):
            page = sample_page(chain, plane_bytes=(200_000,), variant=who)
            both.wait(30)
            results[who] += put(stores[who], [page])

    threads = [threading.Thread(target=write, args=(who,)) for who in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(results[0] + results[1]) <= {Status.STORED, Status.EXISTS}
    for chain in range(40):  # whichever it was: whole, and the same for both
        buffers = [memoryview(bytearray(len(sample_page(chain, plane_bytes=(200_000,)).frame))) for _ in stores]
        for store, buffer in zip(stores, buffers, strict=True):
            name = sample_page(chain).name
            assert store.get_into([(name, buffer)], deadline=soon()) == [Status.HIT]
        assert buffers[0] == buffers[1]
        assert buffers[0] in [sample_page(chain, plane_bytes=(200_000,), variant=who).frame for who in range(2)]


def test_a_pool_that_is_full_and_may_not_evict_has_no_room() -> None:
    with MooncakePool(segment_bytes=16 * MIB, lease_ms=60_000) as pool:
        pages = sample_chain(6, 1500)
        with MooncakeStore(pool.config()) as store:
            results = put(store, pages)
            num_stored = results.count(Status.STORED)
            assert 500 < num_stored < 1300
            assert results[num_stored] is Status.NO_ROOM
            assert set(results[num_stored:]) <= {Status.NO_ROOM, Status.NO_PARENT}
            held = store.contains([page.name for page in pages], deadline=soon())
            assert held == [status is Status.STORED for status in results]
            assert read(store, pages[:num_stored]) == [Status.HIT] * num_stored


# --- rules 7 and 8: seen, and removed by force ------------------------------------------------------------------------


def _raw(store: MooncakeStore, name: bytes, value: bytes) -> None:
    """Put bytes under a page's name, past the store."""
    key, memory = store.config.prefix + name.hex(), memoryview(value)
    codes = store._engine.put([key], [address_of(memory)], [len(memory)], soon())
    assert codes == [0]


@pytest.mark.parametrize("way", ["tcp", "shm"])
def test_what_is_damaged_in_the_pool_is_thrown_out(
    way: str, roomy: MooncakePool, engine: MooncakeEngine, shared: MooncakeEngine
) -> None:
    pages = [sample_page(chain) for chain in range(10, 16)]
    flipped = bytearray(pages[1].frame)
    flipped[5000] ^= 1
    bad = [pages[0].frame, bytes(flipped), pages[2].frame[:-1], pages[0].frame, pages[4].frame + b"x"]
    # A buffer that would take one page only, so that the longer one is seen for what it is and not for its memory.
    with fresh(roomy, engine) as writer:
        store = MooncakeStore(writer.config, engine=engine if way == "tcp" else shared)
        reader = VerifiedStore(store, identity=IDENTITY, plane_bytes=PLANE_BYTES)
        for page, value in zip(pages, bad, strict=False):
            key, memory = store.config.prefix + page.name.hex(), memoryview(value)
            assert writer._engine.put([key], [address_of(memory)], [len(memory)], soon()) == [0]
        put_again = [Status.EXISTS, Status.EXISTS, Status.FAILED, Status.EXISTS, Status.FAILED]
        assert put(store, pages[:5]) == put_again  # who puts looks at lengths only
        faults = [Status.HIT, Status.CORRUPT, Status.SHORT, Status.FOREIGN, Status.SHORT, Status.MISS]
        assert read(reader, pages) == faults
        assert store.contains([page.name for page in pages], deadline=soon()) == [True] + [False] * 5
        assert put(store, pages) == [Status.EXISTS] + [Status.STORED] * 5
        assert read(reader, pages) == [Status.HIT] * 6


def test_the_first_value_stays_and_a_bad_one_is_replaced(store: MooncakeStore) -> None:
    bad, good = sample_page(17, identity=bytes(32)), sample_page(17)
    reader = VerifiedStore(store, identity=IDENTITY, plane_bytes=PLANE_BYTES)
    assert put(store, [bad]) == [Status.STORED]
    _raw(store, good.name, good.frame)  # the engine says success, and keeps the first
    assert read(store, [bad]) == [Status.HIT]
    assert store.contains([bad.name], deadline=soon()) == [True]  # and now it is leased
    assert read(reader, [good]) == [Status.FOREIGN]
    assert put(store, [good]) == [Status.STORED]
    assert read(reader, [good]) == [Status.HIT]


def test_a_put_that_somebody_elses_put_swallowed_is_not_stored(store: MooncakeStore) -> None:
    pages = sample_chain(18, 3)
    key = store.config.prefix + pages[1].name.hex()
    client = store._engine._client
    assert client.batch_put_session_start([key], [len(pages[1].frame)]) == [0]  # and its writer never comes back
    _raw(store, pages[1].name, pages[1].frame)  # to which the engine says success
    assert put(store, pages) == [Status.STORED, Status.FAILED, Status.NO_PARENT]
    assert read(store, pages) == [Status.HIT, Status.MISS, Status.MISS]
    assert store.contains([page.name for page in pages], deadline=soon()) == [True, False, False]
    assert store.delete([pages[1].name], deadline=soon()) == [Status.FAILED]
    # One that ends while we look: the page is there, and that is what counts.
    ending = threading.Timer(0.05, lambda: client.batch_put_session_revoke([key]))
    ending.start()
    ending.join()
    assert put(store, pages) == [Status.EXISTS, Status.STORED, Status.STORED]


_WRITER = """
import sys
from headwater.storage.base import Deadline
from headwater.storage.mooncake import MooncakeStore
from headwater.testing.pages import items, sample_chain
store = MooncakeStore(sys.argv[1])
chains = [sample_chain(600 + chain, 8, plane_bytes=(1 << 20,)) for chain in range(4)]
print("ready", flush=True)
for turn in range(10**6):
    store.put(items(chains[turn % 4]), deadline=Deadline.after(5))
    store.delete([page.name for page in chains[(turn + 2) % 4]], deadline=Deadline.after(5))
"""


def test_a_writer_that_is_killed_in_the_middle_leaves_no_wrong_byte(
    roomy: MooncakePool, engine: MooncakeEngine
) -> None:
    prefix = f"{next(_numbers)}:"
    url = f"{roomy.config().url}?prefix={prefix}"
    store = MooncakeStore(roomy.config(prefix=prefix), engine=engine)
    reader = VerifiedStore(store, identity=IDENTITY, plane_bytes=(MIB,), max_bad=10**9)
    seen: set[Status] = set()
    for chain in range(4):
        sample_chain(600 + chain, 8, plane_bytes=(MIB,))  # made before it counts
    writers = [subprocess.Popen([sys.executable, "-c", _WRITER, url], stdout=subprocess.PIPE) for _ in range(2)]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        until = Deadline.after(0.4)
        while not until.expired:
            for chain in range(4):
                seen.update(read(reader, sample_chain(600 + chain, 8, plane_bytes=(MIB,))))  # fails on a wrong byte
    for writer in writers:
        assert writer.stdout is not None
        writer.kill()
        writer.wait()
        writer.stdout.close()
    for chain in range(4):
        pages = sample_chain(600 + chain, 8, plane_bytes=(MIB,))
        seen.update(read(reader, pages))
        results = put(store, pages)  # what it was at is blocked until the master gives it up; nothing else
        assert set(results) <= {Status.STORED, Status.EXISTS, Status.FAILED, Status.NO_PARENT}
        held = [status is Status.HIT for status in read(reader, pages)]
        assert held == [status.held for status in results]
    assert Status.HIT in seen


# --- servers that go away ---------------------------------------------------------------------------------------------


def _calls(store: Store, page: SamplePage) -> dict[str, Callable[[], object]]:
    return {
        "put": lambda: store.put([page.item], deadline=soon())[0],
        "get": lambda: store.get_into([(page.name, page.buffer())], deadline=soon())[0],
        "contains": lambda: store.contains([page.name], deadline=soon())[0],
        "delete": lambda: store.delete([page.name], deadline=soon())[0],
    }


FAILED = {"put": Status.FAILED, "get": Status.FAILED, "contains": False, "delete": Status.FAILED}


def _works_again(store: Store, page: SamplePage) -> None:
    """Within the seconds that clients take to give the master their memory again."""
    wait = Deadline.after(10)
    while put(store, [page]) != [Status.STORED]:
        assert not wait.expired
        time.sleep(0.1)
    assert read(store, [page]) == [Status.HIT]


@pytest.mark.parametrize("shm", [False, True])
def test_a_master_that_is_killed_and_comes_back(shm: bool) -> None:
    pages = [sample_page(chain) for chain in range(30, 33)]
    with MooncakePool(segment_bytes=16 * MIB) as pool, MooncakeStore(pool.config(shm=shm)) as store:
        put(store, pages)
        pool.kill_master()
        for call, work in _calls(store, pages[0]).items():
            start_s = time.monotonic()
            assert work() == FAILED[call]
            assert time.monotonic() - start_s < 3, "nobody listens: that is known at once"
        many = sample_chain(34, 200)
        assert set(put(store, many)) == {Status.FAILED}
        assert set(read(store, many)) == {Status.FAILED}
        pool.start_master()
        assert read(store, pages) == [Status.MISS] * 3  # it forgot them, and answers the first call
        _works_again(store, pages[0])


def test_an_owner_of_memory_that_is_killed() -> None:
    pages = [sample_page(chain) for chain in range(35, 38)]
    with MooncakePool(segment_bytes=16 * MIB, client_ttl_s=1) as pool, MooncakeStore(pool.config()) as store:
        put(store, pages)
        pool.kill_client()
        results = read(store, pages)
        assert set(results) <= {Status.MISS, Status.FAILED}
        assert put(store, [sample_page(38)])[0] in (Status.FAILED, Status.NO_ROOM)
        pool.wait_for_bytes(0)  # the master took it for dead
        assert read(store, pages) == [Status.MISS] * 3
        assert put(store, [sample_page(38)]) == [Status.NO_ROOM]
        pool.start_client()
        _works_again(store, sample_page(38))


def test_the_client_process_that_shares_memory_is_killed_and_comes_back() -> None:
    page = sample_page(39)
    with MooncakePool(segment_bytes=16 * MIB, client_ttl_s=1) as pool, MooncakeStore(pool.config(shm=True)) as store:
        memory = store.memory(MIB)
        frame = memory[: len(page.frame)]
        frame[:] = page.frame
        assert store.put([(page.name, frame)], deadline=soon()) == [Status.STORED]
        pool.kill_client()
        for call, work in _calls(store, page).items():
            start_s = time.monotonic()
            assert work() == FAILED[call]
            assert time.monotonic() - start_s < 3
        pool.start_client()
        _works_again(store, page)
        assert store._engine.config.shm is None  # over TCP: the new process does not know our memory
        assert store.get_into([(page.name, frame)], deadline=soon()) == [Status.HIT]  # which can be used as before
        assert bytes(frame) == bytes(page.frame)


@pytest.mark.parametrize("shm", [False, True])
def test_memory_of_a_transfer_that_was_given_up_is_safe_before_the_call_returns(
    shm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = sample_page(40, plane_bytes=LARGE)
    monkeypatch.setattr(mooncake_engine, "_GAVE_UP_S", 0.0)
    with MooncakePool(segment_bytes=64 * MIB, client_ttl_s=60) as pool, MooncakeStore(pool.config(shm=shm)) as store:
        memory = store.memory(4 * MIB)
        frame = memory[: len(page.frame)]
        frame[:] = page.frame
        assert store.put([(page.name, frame)], deadline=soon()) == [Status.STORED]
        engine = store._engine
        first = engine._client
        if shm:
            # Its client waits 30 s, which is long for a test: the call goes on, and we say in its place that it failed.
            stuck = threading.Thread(
                target=first.batch_get_into, args=([store._key(page.name)], [address_of(memory)], [MIB])
            )
            monkeypatch.setattr(
                MooncakeEngine, "get", lambda self, keys, *_: self._call(_nothing, len(keys), soon(), moves=True)
            )
        pool.signal_client(signal.SIGSTOP)
        if shm:
            stuck.start()
            time.sleep(0.2)
        answers: list[Status] = []
        caller = threading.Thread(
            target=lambda: answers.extend(store.get_into([(page.name, memory[:MIB])], deadline=soon()))
        )
        caller.start()
        caller.join(1.0 if shm else 20)
        assert (
            caller.is_alive() == shm
        )  # over TCP it ended, with the connection; here the other process may still write
        pool.signal_client(signal.SIGCONT)
        caller.join(20)
        assert answers == [Status.FAILED]
        assert engine._client is not first
        memory[:] = bytes(len(memory))
        if shm:
            stuck.join()
            monkeypatch.undo()
        time.sleep(0.3)
        assert not any(memory[:: 1 << 12]), "somebody wrote into memory that was given back"
        assert store.get_into([(page.name, memory[:MIB])], deadline=soon()) == [Status.HIT]
        assert memory[:MIB] == page.frame


def _nothing(client: object) -> list[int]:
    return [mooncake_engine.RPC_FAIL]


# --- memory -----------------------------------------------------------------------------------------------------------


def test_pages_are_read_where_they_lie(roomy: MooncakePool, engine: MooncakeEngine, shared: MooncakeEngine) -> None:
    pages = sample_chain(50, 8)
    size = len(pages[0].frame)
    with fresh(roomy, engine) as store:
        memory = memoryview(mmap.mmap(-1, MIB))
        assert store.register(memory)
        assert store.register(memory)  # again changes nothing
        _through(store, pages, [memory[i * 16384 :][:size] for i in range(8)])
        _through(store, pages, [memoryview(bytearray(size)) for _ in pages])  # over TCP any memory will do
        assert store._memory._buffer is None
    with fresh(roomy, shared) as store:
        assert not store.register(memoryview(bytearray(size)))
        memory = store.memory(MIB)
        _through(store, pages, [memory[i * 16384 :][:size] for i in range(8)])
        assert store._memory._buffer is None, "pages in memory that is shared were copied"
        mixed = [memory[i * 16384 :][:size] if i % 3 else memoryview(bytearray(size)) for i in range(8)]
        _through(store, pages, mixed)
        assert store._memory._buffer is not None


def _through(store: MooncakeStore, pages: list[SamplePage], places: list[memoryview]) -> None:
    store.delete([page.name for page in pages], deadline=soon())
    for page, place in zip(pages, places, strict=True):
        place[:] = page.frame
    put_at = [(page.name, place) for page, place in zip(pages, places, strict=True)]
    assert store.put(put_at, deadline=soon()) == [Status.STORED] * len(pages)
    for place in places:
        place[:] = bytes(len(place))
    assert store.get_into(put_at, deadline=soon()) == [Status.HIT] * len(pages)
    assert [place == page.frame for page, place in zip(pages, places, strict=True)] == [True] * len(pages)


def test_what_cannot_be_written_to_is_not_read_into(store: MooncakeStore) -> None:
    page = sample_page(51)
    put(store, [page])
    value = bytes(len(page.frame))
    with pytest.raises(InvalidInput, match="may not be written"):
        store.get_into([(page.name, memoryview(value))], deadline=soon())
    assert not any(value)


def test_what_does_not_fit_the_buffer_is_refused(roomy: MooncakePool, shared: MooncakeEngine) -> None:
    large, small = sample_page(52, plane_bytes=(2 * MIB,)), sample_page(53)
    with fresh(roomy, shared, buffer_bytes=MIB) as store:
        assert put(store, [large, small]) == [Status.REFUSED, Status.STORED]
        assert read(store, [large, small]) == [Status.MISS, Status.HIT]


# --- deadlines --------------------------------------------------------------------------------------------------------


def test_the_deadline_is_looked_at_before_each_batch(store: MooncakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = sample_chain(60, 150)
    clock, calls = FakeClock(), []
    monkeypatch.setattr(mooncake, "_BATCH_PAGES", 64)
    for call in ("put", "get"):
        work = getattr(store._engine, call)

        def slow(*args: Any, work: Any = work, call: str = call) -> Any:
            calls.append(call)
            clock.advance(1.0)
            return work(*args)

        monkeypatch.setattr(store._engine, call, slow)
    results = store.put(items(pages), deadline=Deadline.after(1.5, clock))
    assert results == [Status.STORED] * 128 + [Status.LATE] * 22
    assert put(store, pages[128:]) == [Status.STORED] * 22
    calls.clear()
    wanted = [(page.name, page.buffer()) for page in pages]
    assert store.get_into(wanted, deadline=Deadline.after(0.5, clock)) == [Status.HIT] * 64 + [Status.LATE] * 86
    assert calls == ["get"]


def test_a_stopped_master_ends_opening() -> None:
    with MooncakePool() as pool:
        pool.signal_master(signal.SIGSTOP)
        start_s = time.monotonic()
        with pytest.raises(StoreUnavailable, match="does not answer"):
            MooncakeStore(pool.config(open_timeout_s=0.3))
        assert time.monotonic() - start_s < 3  # its client would wait for 5 s, and freeze us


# --- opening and closing ----------------------------------------------------------------------------------------------


def test_no_pool_says_what_to_do() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # and nobody listens
        with pytest.raises(StoreUnavailable, match=r"nobody listens.*headwater doctor"):
            MooncakeStore(f"mooncake://127.0.0.1:{probe.getsockname()[1]}")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ImportError("libibverbs.so.1: cannot open shared object file"), "apt-get install libibverbs1"),
        (ModuleNotFoundError("No module named 'mooncake'", name="mooncake"), r"headwater\[mooncake\]"),
    ],
)
def test_what_is_not_installed_is_said(error: ImportError, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise error

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(StoreUnavailable, match=words):
        MooncakeStore("mooncake://127.0.0.1:1")


def test_a_child_opens_its_own(store: MooncakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        with pytest.raises(StoreForked):
            store.contains([], deadline=soon())
    assert store.contains([], deadline=soon()) == []


def test_closing_under_a_call() -> None:
    page = sample_page(70)
    with MooncakePool(segment_bytes=16 * MIB, lease_ms=5000) as pool:
        store = MooncakeStore(pool.config())
        put(store, [page])
        engine = store._engine
        pool.signal_master(signal.SIGSTOP)
        answers: list[Status] = []
        thread = threading.Thread(target=lambda: answers.extend(read(store, [page])))
        thread.start()
        time.sleep(0.2)
        start_s = time.monotonic()
        store.close()
        assert time.monotonic() - start_s < 0.5
        with pytest.raises(ResourceClosed):
            store.put([page.item], deadline=soon())
        assert engine._client is not None, "it was closed under the call"
        pool.signal_master(signal.SIGCONT)
        thread.join(20)
        assert answers == [Status.HIT]
        assert engine._client is None
        assert [watch._line for watch in engine._watches] == [None]


_TALK = """
import sys
from headwater.storage.base import Deadline
from headwater.storage.mooncake import MooncakeStore
from headwater.testing.pages import sample_page
store = MooncakeStore(sys.argv[1])
page = sample_page(80)
print(store.put([page.item], deadline=Deadline.after(5))[0].value)
print(store.get_into([(page.name, memoryview(bytearray(7)))], deadline=Deadline.after(5))[0].value)
store.close()
"""


def test_the_engine_prints_nothing(roomy: MooncakePool) -> None:
    url = f"{roomy.config().url}?prefix={next(_numbers)}:"
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MC_", "GLOG_"))}
    run = [sys.executable, "-c", _TALK, url]
    done = subprocess.run(run, capture_output=True, text=True, env=environ, timeout=60, check=True)
    assert done.stdout == "stored\nshort\n"
    assert done.stderr == ""


# --- addresses --------------------------------------------------------------------------------------------------------


def test_a_url_says_everything() -> None:
    url = "mooncake://10.0.0.5:50051?protocol=rdma&device=mlx5_0,mlx5_1&segment=2GiB&buffer=128MiB&local=10.0.0.7"
    found = parse_url(f"{url}&metadata=http://10.0.0.5:8080/metadata&prefix=a:&timeout=2.5")
    assert found == MooncakeConfig(
        master="10.0.0.5:50051",
        metadata="http://10.0.0.5:8080/metadata",
        protocol="rdma",
        device="mlx5_0,mlx5_1",
        segment_bytes=2 << 30,
        buffer_bytes=128 << 20,
        local_hostname="10.0.0.7",
        prefix="a:",
        open_timeout_s=2.5,
    )
    assert parse_url("mooncake://[::1]:5?shm=localhost:6").shm == "localhost:6"
    for text in ("mooncake://h:1", "mooncake://h:1?shm=127.0.0.1:2", "mooncake://h:1?protocol=rdma&segment=16777216"):
        assert parse_url(text).url == text
        assert parse_url(parse_url(text).url) == parse_url(text)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "no address"),
        ("redis://h:1", "no address"),
        ("mooncake://h:1/path", "no address"),
        ("mooncake://me:secret@h:1", "no address"),
        ("mooncake://[", "no URL"),
        ("mooncake://h", "HOST:PORT"),
        ("mooncake://h:0", "no port"),
        ("mooncake://h:99999", "no port"),
        ("mooncake://h:1?shm=here", "shm must be HOST:PORT"),
        ("mooncake://h:1?shm=h:2&segment=2GiB", "the client process owns"),
        ("mooncake://h:1?segment=many", "a size is like"),
        ("mooncake://h:1?segment=1MiB", "at least 16 MiB"),
        ("mooncake://h:1?segment=-1", "a size is like"),
        ("mooncake://h:1?buffer=1", "buffer_bytes"),
        ("mooncake://h:1?protocol=udp", "tcp, rdma"),
        ("mooncake://h:1?timeout=soon", "number of seconds"),
        ("mooncake://h:1?timeout=nan", "open_timeout_s"),
        ("mooncake://h:1?prefix=", "prefix"),
        ("mooncake://h:1?sement=1GiB", "'sement' is not one of"),
        ("mooncake://h:1?segment=1GiB&segment=2GiB", "twice"),
        ("mooncake://h:1?segment", "no URL"),
    ],
)
def test_what_is_no_address_is_said(url: str, words: str) -> None:
    with pytest.raises(InvalidConfig, match=words):
        parse_url(url)


def test_sizes() -> None:
    assert [parse_size(text) for text in ("7", "2 KiB", "3mib", "1GiB", "2GB")] == [
        7,
        2048,
        3 << 20,
        1 << 30,
        2 * 10**9,
    ]
    for text in ("", "1.5GiB", "GiB", "1XiB", "-1", "1" * 20):
        with pytest.raises(InvalidConfig, match="a size is like"):
            parse_size(text)


def test_a_watch_sees_who_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        watch = Watch(host, port)
        assert watch.up(1)
        line, _ = server.accept()
        assert watch.up(0)  # without a new connection
        line.close()
        assert not watch.up(0)
        assert watch.up(1)
        assert not nobody_listens(host, port, 1)
        assert "does not answer" in str(knock(host, port, 0.1))
        line, _ = server.accept()
        line.close()
    assert not watch.up(1)
    assert nobody_listens(host, port, 1)
    assert "nobody listens" in str(knock(host, port, 1))
    watch.close()
    watch.close()
    assert not watch.up(1)


@pytest.mark.fault("X24")
def test_a_name_that_cannot_be_one_is_nobodys() -> None:
    """X24: UnicodeError."""
    assert not Watch("a..b", 1).up(1)
    assert not nobody_listens("a..b", 1, 1)
    assert "cannot be reached" in str(knock("a..b", 1, 1))
