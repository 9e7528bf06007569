"""A worker's stores are purged behind what is being written, in threads that were given up too."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headwater.build import open_local
from headwater.config.stores import LocalStoreConfig
from headwater.core.events import PurgeBegan
from headwater.core.page import page_name
from headwater.core.results import Reason, Status
from headwater.storage.base import Store
from headwater.storage.memory import MemoryStore
from headwater.testing.stores import soon
from worker_kit import PATIENCE_S, TENANT, OddStore, Rig, keys, rigs


@pytest.fixture
def make() -> Iterator[Callable[..., Rig]]:
    yield from rigs()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Store]:
    with open_local(LocalStoreConfig(directory=tmp_path / "disk", limit_bytes=16 << 20)) as store:
        yield store


def order(num_blocks: int) -> PurgeBegan:
    return PurgeBegan(now_s=0.0, keys=keys(1, num_blocks))


def there(store: Store, chain: int, num_blocks: int) -> int:
    return sum(store.contains([page_name(one) for one in keys(chain, num_blocks)], deadline=soon()))


def test_a_list_says_what_builds_on_a_block_and_helps_stores_without_one(make: Callable[..., Rig], disk: Store) -> None:
    pool = MemoryStore(64 << 20)
    rig = make({"disk": disk, "pool": pool})
    for store in ("disk", "pool"):
        for chain, num_blocks in ((1, 6), (2, 3)):
            job = rig.save(range(num_blocks), chain=chain, store=store)
            assert rig.ear.results(job) == [Status.STORED] * num_blocks
    found = rig.worker.purge(order(3), ("disk", "pool"), (), PATIENCE_S)
    assert [(one.tier, one.num_removed, one.num_left) for one in found] == [("disk", 4, 0), ("pool", 4, 0)]
    assert found[0].unreached == ""
    assert "no list" in found[1].unreached
    assert [there(store, 1, 6) for store in (disk, pool)] == [2, 2]
    assert [there(store, 2, 3) for store in (disk, pool)] == [3, 3]
    everything = PurgeBegan(now_s=0.0, tenant=TENANT)
    found = rig.worker.purge(everything, ("disk", "pool"), (), PATIENCE_S)
    assert [one.num_removed for one in found] == [5, 5]
    assert [one.num_removed for one in rig.worker.purge(everything, ("disk",), (), PATIENCE_S)] == [0]


def test_a_write_that_was_given_up_is_waited_for(make: Callable[..., Rig]) -> None:
    host = OddStore()
    rig = make({"host": host})
    host.gates["put"].shut()
    job = rig.save(range(4), within_s=0.1)
    host.gates["put"].wait_for_arrival()
    assert rig.ear.failure(job) is Reason.LATE
    (found,) = rig.worker.purge(order(1), ("host",), keys(1, 4), 0.0)
    assert "has not ended" in found.unreached, "it may still come"
    host.open()
    (found,) = rig.worker.purge(order(1), ("host",), keys(1, 4), PATIENCE_S)
    assert "has not ended" not in found.unreached
    assert there(host, 1, 4) == 0


def test_a_store_that_raises_or_answers_nonsense_is_named(make: Callable[..., Rig]) -> None:
    host, pool = OddStore(), OddStore()
    rig = make({"host": host, "pool": pool})
    host.raises["delete"] = OSError("broken")
    pool.answers["delete"] = lambda found: [*found, Status.REMOVED]
    found = rig.worker.purge(order(2), ("host", "pool"), (), PATIENCE_S)
    assert ["broken" in found[0].unreached, "answers for 1 pages" in found[1].unreached] == [True, True]
    assert [one.num_left for one in found] == [1, 1]
