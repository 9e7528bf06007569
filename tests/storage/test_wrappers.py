"""Wrappers of stores: each through the conformance suite, and nothing that a store can do is lost silently."""

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self

import pytest

import headwater
from headwater.build import open_local
from headwater.config.stores import LocalStoreConfig
from headwater.core.page import PageName
from headwater.core.results import Status
from headwater.lab.campaigns.hanging import HangingStore
from headwater.layout.spec import opaque_layout
from headwater.storage.base import Addressable, Deadline, Store
from headwater.storage.local.mapped import MappedStore
from headwater.storage.memory import MemoryStore
from headwater.storage.sealed import put_sealed
from headwater.storage.wrappers import OpaqueStore, WrapperStore
from headwater.testing.faulty_stores import DelayStore, Faults, FaultyStore, ThrottledStore
from headwater.testing.pages import PLANE_BYTES, SEALED_AT_MS, sample_chain
from headwater.testing.stores import StoreTests, past, soon

LIMIT_BYTES = 8 << 20
WRAPPERS: dict[str, Callable[[Store], Store]] = {
    "plain": WrapperStore,
    "opaque": OpaqueStore,
    "delay": lambda store: DelayStore(store, 0.0001),
    "throttled": lambda store: ThrottledStore(store, 0.0001, in_place=True),
    "two": lambda store: WrapperStore(DelayStore(WrapperStore(store), 0.0)),
    "faulty": lambda store: FaultyStore(store, Faults()),
}
IN_PLACE = {"plain", "delay", "throttled", "two"}  # through these a store's pages are written and read where they lie


@pytest.fixture
def mapped(shm: Path) -> Iterator[MappedStore]:
    with open_local(LocalStoreConfig(directory=shm / "store", limit_bytes=LIMIT_BYTES)) as store:
        assert isinstance(store, MappedStore)
        yield store


class TestEveryWrapperOfAMappedStore(StoreTests):
    @pytest.fixture(params=WRAPPERS)
    def store(self, request: pytest.FixtureRequest, mapped: MappedStore) -> Store:
        store = WRAPPERS[request.param](mapped)
        assert (store.addressable() is not None) == (request.param in IN_PLACE)
        return store


class Registered(MemoryStore):
    """A store that is as odd as a store can be."""

    cheap_calls = True
    portion_bytes = 77
    interruptible = False

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.shown: list[memoryview] = []

    def registering(self) -> Self:
        return self

    def cached_names(self) -> Self:
        return self

    def register(self, memory: memoryview) -> bool:
        self.shown.append(memory)
        return True

    def contains_cached(self, names: Sequence[PageName]) -> list[bool]:
        return [True] * len(names)


@pytest.mark.fault("D8")
def test_what_a_store_can_do_besides_is_passed_on(mapped: MappedStore) -> None:
    for wrapped in (WrapperStore(mapped), WrapperStore(WrapperStore(mapped))):
        assert wrapped.addressable() is mapped
        assert wrapped.cached_names() is mapped
        assert (wrapped.damageable(), wrapped.listing()) == (mapped, mapped)
        assert wrapped.cheap_calls is mapped.cheap_calls is True
    odd = Registered()
    wrapped = WrapperStore(WrapperStore(odd))
    assert (wrapped.registering(), wrapped.cached_names(), wrapped.addressable()) == (odd, odd, None)
    assert (wrapped.cheap_calls, wrapped.portion_bytes, wrapped.interruptible) == (True, 77, False)
    assert HangingStore(mapped).addressable() is None
    for name, wrap in WRAPPERS.items():
        assert wrap(odd).registering() is odd, name
        assert wrap(odd).interruptible is False, name
        assert (wrap(mapped).damageable(), wrap(mapped).listing()) == (mapped, mapped), name
        assert (wrap(odd).damageable(), wrap(odd).listing()) == (None, None), name


@pytest.mark.fault("D8")
def test_what_goes_in_place_comes_by_the_delay(mapped: MappedStore) -> None:
    slept: list[float] = []
    store = DelayStore(mapped, 0.25, sleep=slept.append)
    in_place = store.addressable()
    assert isinstance(in_place, Addressable)
    assert in_place.memory() == mapped.memory()
    pages = sample_chain(1, 3)
    layout = opaque_layout(PLANE_BYTES, 16)
    frames = [(page.meta, memoryview(bytearray(page.frame))) for page in pages]
    assert put_sealed(store, frames, layout, now_ms=SEALED_AT_MS, deadline=soon()) == [Status.STORED] * 3
    assert len(slept) >= 2, "reserved and published"
    num_slept = len(slept)
    assert [borrow.name for borrow in in_place.borrow([pages[0].name], deadline=soon()) if not isinstance(borrow, str)]
    assert len(slept) == num_slept + 1
    assert in_place.borrow([pages[0].name], deadline=past()) == [Status.LATE]
    assert in_place.reserve([(pages[0].meta, len(pages[0].frame))], deadline=past()) == [Status.LATE]
    assert store.cached_names() is None


@pytest.mark.fault("D8")
def test_a_wrapper_must_say_what_becomes_of_the_other_ways() -> None:
    with pytest.raises(TypeError, match="Half changes get_into: what becomes of addressable and cached_names"):

        class Half(WrapperStore):
            def get_into(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[Status]:
                return [Status.MISS] * len(pages)


def test_every_wrapper_that_is_shipped_is_tried_here() -> None:
    """Or is one of those with tests of their own, because they are no ordinary stores."""
    for module in pkgutil.walk_packages(headwater.__path__, "headwater."):
        if ".storage." in module.name or module.name == "headwater.testing.faulty_stores":
            importlib.import_module(module.name)

    def below(kind: type[Store]) -> set[type[Store]]:
        return {kind}.union(*map(below, kind.__subclasses__()))

    shipped = {
        one.__name__
        for one in below(WrapperStore)
        if one.__module__.startswith(("headwater.storage", "headwater.testing"))
    }
    assert shipped == {"WrapperStore", "OpaqueStore", "DelayStore", "FaultyStore", "ReshardedStore", "ThrottledStore"}
