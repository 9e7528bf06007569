"""A store that knows from memory what it has answers a match at once; in doubt it is asked as before."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import pytest

from headwater.build import open_local
from headwater.cache.match import BlockStatus
from headwater.config.stores import LocalStoreConfig
from headwater.core.encoding import encode
from headwater.core.errors import ResourceClosed
from headwater.core.events import JobDone, Probe
from headwater.core.page import PageName
from headwater.core.results import Reason
from headwater.lab.campaigns.virtual import EventList
from headwater.storage.base import Store
from headwater.storage.local import LocalStore, attachment
from headwater.testing.pages import items, sample_chain
from headwater.testing.stores import past, put, soon
from headwater.transfer.executor.trouble import calling
from test_open_cache import LAYOUTS, NUM_BLOCKS, ROOT, engine, keys_of
from worker_kit import OddStore, Rig, keys, odd, rigs

LIMIT_BYTES = 64 << 20


@pytest.fixture
def make() -> Iterator[Callable[..., Rig]]:
    """Makes rigs, and finishes them."""
    yield from rigs()


def opened(path: Path) -> LocalStore:
    return open_local(LocalStoreConfig(directory=path, limit_bytes=LIMIT_BYTES))


@pytest.mark.parametrize("medium", ["memory", "disk"])
def test_what_a_store_says_at_a_glance_is_what_it_contains(medium: str, shm: Path, tmp_path: Path) -> None:
    pages = sample_chain(1, 4)
    names = [name for name, _ in items(pages)]
    with opened((shm if medium == "memory" else tmp_path) / "store") as store:
        assert store.contains_cached(names) == [False] * 4
        assert store.contains_cached([]) == []
        put(store, pages[:2])
        assert store.contains_cached(names) == store.contains(names, deadline=soon()) == [True, True, False, False]
        store.delete(names[1:], deadline=soon())
        assert store.contains_cached(names) == [True, False, False, False]
    with pytest.raises(ResourceClosed):
        store.contains_cached(names)


def test_what_another_process_did_is_known_at_a_glance_if_it_is_little(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attachment, "_CACHED_S", 30.0)  # this machine may be busy
    pages = sample_chain(1, 2)
    names = [name for name, _ in items(pages)]
    with opened(shm / "store") as ours, opened(shm / "store") as theirs:
        put(theirs, pages)
        assert ours.contains_cached(names) == [True, True]
        theirs.delete(names[1:], deadline=soon())
        assert ours.contains_cached(names) == [True, False]
        for chain in range(10, 60):
            put(theirs, sample_chain(chain, 6))
        assert ours.contains_cached(names) is None, "more than can be read in no time"
        assert ours.contains(names, deadline=soon()) == [True, False]
        assert ours.contains_cached(names) == [True, False]


class Knowing(OddStore):
    """A store that is asked in vain, and answers a glance."""

    answer: Any = None

    def cached_names(self) -> Self:
        return self

    def contains_cached(self, names: Sequence[PageName]) -> Any:
        return self.answer(names) if callable(self.answer) else self.answer


def probe(rig: Rig, num: int) -> Probe:
    return Probe(job=99, store="host", keys=keys(1, num), deadline_s=rig.clock.monotonic() + 10)


def test_a_worker_says_what_its_store_knows(make: Callable[..., Rig]) -> None:
    store = Knowing()
    rig = make({"host": store})
    store.answer = [True, False]
    assert rig.worker.contains_cached(probe(rig, 2)) == ("held", "absent")
    assert rig.worker.contains_cached(probe(rig, 3)) is None  # not one answer a page
    for nonsense in (None, ["yes", "no"], 1 / 3):
        store.answer = nonsense
        assert rig.worker.contains_cached(probe(rig, 2)) is None
    store.answer = [True, True]
    assert rig.worker.contains_cached(Probe(job=1, store="nowhere", keys=(), deadline_s=0.0)) is None
    assert odd(rig).calls() == []


def test_whatever_it_raises_the_store_is_asked(make: Callable[..., Rig]) -> None:
    def trouble(_: object) -> None:
        raise OSError("away")

    store = Knowing()
    rig = make({"host": store})
    store.answer = trouble
    assert rig.worker.contains_cached(probe(rig, 2)) is None
    assert rig.ear.results(rig.probe(2)) == ["absent"] * 2


@pytest.mark.fault("D2")
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_what_ends_the_program_passes_on_the_callers_thread(
    make: Callable[..., Rig], kind: type[BaseException]
) -> None:
    def ends(_: object) -> None:
        raise kind("for the caller")

    store = Knowing()
    rig = make({"host": store})
    store.answer = ends
    with pytest.raises(kind):
        rig.worker.contains_cached(probe(rig, 2))
    with pytest.raises(kind), calling("host"):
        store.answer(None)
    rig.saved(range(2))  # in threads that have no caller
    odd(rig).raises["get_into"] = kind("in a thread of ours")
    assert rig.ear.failure(rig.load([100, 101])) is Reason.FAILED
    odd(rig).raises.clear()
    rig.loaded([200, 201], range(2))


def test_a_store_that_is_off_is_not_believed_at_a_glance(make: Callable[..., Rig], tmp_path: Path) -> None:
    store = opened(tmp_path / "store")
    rig = make({"host": store})
    assert rig.worker.contains_cached(probe(rig, 2)) == ("absent", "absent")
    (tmp_path / "store" / "slab").write_bytes(b"")
    assert not any(store.contains([PageName(bytes(40))], deadline=past()))
    rig.ear.end(rig.probe(2))
    assert rig.worker.contains_cached(probe(rig, 2)) is None


def test_a_match_is_settled_at_once_and_the_record_can_be_replayed(shm: Path, tmp_path: Path) -> None:
    layout = LAYOUTS["gqa-bf16"]
    wanted = keys_of(layout, NUM_BLOCKS)
    stores: dict[str, Store] = {"host": opened(shm / "store"), "disk": opened(tmp_path / "store")}
    with engine(layout, stores, "cpu") as (cache, _):
        cache.match("first", wanted, root=ROOT)
        assert cache.reserve("first", NUM_BLOCKS) is not None
        cache.commit("first", wanted[:4])
        cache.release("first")
        assert cache.drain(20)
    heard = EventList()
    with engine(layout, stores, "cpu") as (cache, _):
        cache._recorder = heard
        found = cache.match("second", wanted, root=ROOT)  # once: nobody waited
        assert found.settled
        assert [(part.status, part.tier, part.end) for part in found.parts] == [
            (BlockStatus.HIT, "host", 4),
            (BlockStatus.MISS, None, NUM_BLOCKS),
        ]
    answers = [event for event in heard if isinstance(event, JobDone)]
    assert [event.results for event in answers] == [("held",) * 4 + ("absent",) * 2] * 2
    assert all(encode(event) for event in heard)
    for store in stores.values():
        store.close()
