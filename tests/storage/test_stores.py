"""Every store, wrappers included, through the shipped conformance suite."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from headwater.build import open_local
from headwater.config.stores import Durability, LocalStoreConfig
from headwater.storage.base import Store
from headwater.storage.local import LocalStore, MappedStore
from headwater.storage.memory import MemoryStore
from headwater.testing.faulty_stores import DelayStore, Faults, FaultyStore
from headwater.testing.stores import StoreTests

LIMIT_BYTES = 8 << 20


class TestMemoryStore(StoreTests):
    @pytest.fixture
    def store(self) -> Iterator[Store]:
        with MemoryStore(4 << 20) as store:
            yield store


class TestLocalStoreInMemory(StoreTests):
    @pytest.fixture
    def store(self, shm: Path) -> Iterator[Store]:
        with open_local(LocalStoreConfig(directory=shm, limit_bytes=LIMIT_BYTES)) as store:
            assert isinstance(store, MappedStore)
            yield store


class TestLocalStoreOnDisk(StoreTests):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        with LocalStore(LocalStoreConfig(directory=tmp_path / "store", limit_bytes=LIMIT_BYTES)) as store:
            yield store


class TestPowerSafeStore(StoreTests):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        config = LocalStoreConfig(directory=tmp_path / "s", limit_bytes=LIMIT_BYTES, durability=Durability.POWER)
        with open_local(config) as store:
            yield store


class TestWrappers(StoreTests):
    @pytest.fixture
    def store(self) -> Iterator[Store]:
        inner = FaultyStore(MemoryStore(4 << 20), Faults())
        with DelayStore(inner, 0.0001) as store:
            yield store
