"""The whole cache as an engine has it: tensors, threads, a host tier on tmpfs and a disk tier, through a restart."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from headwater.build import open_cache, open_local
from headwater.cache.cache import TieredCache
from headwater.config.cache import CacheConfig, TierConfig
from headwater.config.stores import LocalStoreConfig
from headwater.core.errors import InvalidConfig, InvalidInput, ResourceClosed
from headwater.core.keys import BlockKey, block_keys
from headwater.lab.campaigns.virtual import EventList
from headwater.layout.frame import frame_bytes
from headwater.layout.spec import KVLayout
from headwater.metrics import Metrics
from headwater.storage.base import Store
from headwater.testing.layouts import randomise
from headwater.testing.samples import sample_layouts
from headwater.transfer.device.arena import DeviceCache, create_host_cache, create_kv_cache
from headwater.transfer.executor.staging import TorchStaging

IDENTITY = hashlib.sha256(b"identity").digest()
ROOT = BlockKey(hashlib.sha256(b"root").digest())
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"))]
LAYOUTS = {name: layout for name, layout in sample_layouts().items() if frame_bytes(layout.plane_bytes) < 4 << 20}
NUM_BLOCKS = 6


@contextmanager
def engine(
    layout: KVLayout, stores: dict[str, Store], device: str, *, num_slots: int = 16, metrics: Metrics | None = None
) -> Iterator[tuple[TieredCache, DeviceCache]]:
    """One engine process: a device cache of its own, stores that outlive it."""
    config = CacheConfig(
        num_slots=num_slots,
        block_tokens=layout.block_tokens,
        block_bytes=layout.page_bytes,
        tiers=tuple(TierConfig(name=name, probe_timeout_s=20, load_timeout_s=20) for name in stores),
    )
    with (
        create_kv_cache(layout, num_slots, device) as planes,
        create_host_cache(frame_bytes(layout.plane_bytes), 8) as pages,
        TorchStaging(planes, pages) as staging,
        open_cache(config, stores, staging, layout=layout, identity=IDENTITY, metrics=metrics) as cache,
    ):
        yield cache, planes


def keys_of(layout: KVLayout, num_blocks: int) -> list[BlockKey]:
    tokens = list(range(num_blocks * layout.block_tokens))
    return block_keys(tokens, parent=ROOT, block_tokens=layout.block_tokens)


def rows(planes: DeviceCache, slots: tuple[int, ...]) -> list[bytes]:
    """What the blocks in these slots hold, plane by plane."""
    return [bytes(row[slot].cpu().numpy().tobytes()) for slot in slots for row in planes.rows]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", list(LAYOUTS))
def test_what_one_engine_computed_another_finds(name: str, device: str, shm: Path, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    keys = keys_of(layout, NUM_BLOCKS)

    def open_stores() -> dict[str, Store]:
        return {
            "host": open_local(LocalStoreConfig(directory=shm / "store", limit_bytes=64 << 20)),
            "disk": open_local(LocalStoreConfig(directory=tmp_path / "store", limit_bytes=64 << 20)),
        }

    stores = open_stores()
    with engine(layout, stores, device) as (cache, planes):
        randomise(planes, seed=3)
        assert cache.match("first", keys, root=ROOT).num_hit == 0
        slots = cache.reserve("first", NUM_BLOCKS)
        assert slots is not None
        assert not cache.poll("first").loading
        assert cache.commit("first", keys) == NUM_BLOCKS
        written = rows(planes, slots)
        bill = cache.release("first")
        assert bill is not None
        assert bill.hit_tokens == ()
        assert cache.drain(30)
    for store in stores.values():
        store.close()

    for missing in ("nothing", "host"):  # the second time the host tier is gone, and the disk has everything
        stores = open_stores()
        if missing == "host":
            stores["host"].close()
            del stores["host"]
        with engine(layout, stores, device) as (cache, planes):
            randomise(planes, seed=4)
            cache.match("again", keys, root=ROOT)
            cache.wait("again", 30)
            match = cache.match("again", keys, root=ROOT)
            assert match.settled
            assert {tier for _, tier in match} == {"host" if missing == "nothing" else "disk"}
            slots = cache.reserve("again", NUM_BLOCKS + 1)
            assert slots is not None
            assert cache.wait("again", 30).num_ready == NUM_BLOCKS
            assert rows(planes, slots[:NUM_BLOCKS]) == written
            bill = cache.release("again")
            assert bill is not None
            assert sum(tokens for _, tokens in bill.hit_tokens) == bill.num_tokens == NUM_BLOCKS * layout.block_tokens
            assert cache.match("device", keys, root=ROOT).num_on_device == NUM_BLOCKS
            assert cache.drain(30)
        for store in stores.values():
            store.close()


def test_tiers_and_stores_must_fit() -> None:
    layout = next(iter(LAYOUTS.values()))
    config = CacheConfig(num_slots=4, block_tokens=layout.block_tokens, block_bytes=1, tiers=(TierConfig(name="host"),))
    with (
        create_kv_cache(layout, 4) as planes,
        create_host_cache(frame_bytes(layout.plane_bytes), 2) as pages,
        TorchStaging(planes, pages) as staging,
        pytest.raises(InvalidConfig, match=r"the tiers are \['host'\], the stores \[\]"),
    ):
        open_cache(config, {}, staging, layout=layout, identity=IDENTITY)


def test_without_stores_it_is_a_device_cache_that_knows_its_prefixes() -> None:
    layout = next(iter(LAYOUTS.values()))
    keys = keys_of(layout, 3)
    with engine(layout, {}, "cpu") as (cache, _):
        for request, num_hit in (("one", 0), ("two", 3)):
            assert cache.match(request, keys, root=ROOT).num_on_device == num_hit
            assert cache.reserve(request, 3) is not None
            cache.commit(request, keys[num_hit:])
            cache.release(request)


def test_what_an_engine_gets_wrong_is_said_at_the_door() -> None:
    layout = next(iter(LAYOUTS.values()))
    keys = keys_of(layout, 3)
    with engine(layout, {}, "cpu", num_slots=4) as (cache, _):
        for call in (cache.poll, cache.release, cache.give_up):
            with pytest.raises(InvalidInput, match="there is no request 'nobody'"):
                call("nobody")
        with pytest.raises(InvalidInput, match="a block key has 32 bytes"):
            cache.match("short", [BlockKey(b"key")], root=ROOT)
        cache.match("one", keys, root=ROOT)
        with pytest.raises(InvalidInput, match="no -1 blocks"):
            cache.reserve("one", -1)
        assert cache.reserve("one", 5) is None
        assert cache.reserve("one", 3) is not None
        with pytest.raises(InvalidInput, match="was announced with other keys"):
            cache.commit("one", keys[::-1])
    with pytest.raises(ResourceClosed):
        cache.match("late", keys, root=ROOT)
    assert cache.close()


def test_it_counts_what_it_does(shm: Path) -> None:
    layout = next(iter(LAYOUTS.values()))
    keys = keys_of(layout, 3)
    metrics = Metrics()
    with (
        open_local(LocalStoreConfig(directory=shm / "store", limit_bytes=64 << 20)) as host,
        engine(layout, {"host": host}, "cpu", metrics=metrics) as (cache, _),
    ):
        for request in ("one", "two"):
            cache.match(request, keys, root=ROOT)
            cache.wait(request, 30)
            assert cache.reserve(request, 4) is not None
            cache.commit(request, keys[cache.poll(request).num_ready :])
            cache.release(request)
        assert cache.drain(30)
        cache.gauges()
        text = metrics.prometheus()
    tokens = 3 * layout.block_tokens
    assert metrics.value("hit_tokens_total", tier="device") == tokens
    assert metrics.value("miss_tokens_total", reason="never_stored") == tokens
    assert metrics.value("moved_bytes_total", tier="host", direction="in") == 3 * frame_bytes(layout.plane_bytes)
    assert metrics.value("requests_total", outcome="served") == 2
    assert 'headwater_device_slots{state="known"} 3.0' in text
    assert 'headwater_breaker_state{tier="host"} 0.0' in text


def test_recorded_events_lead_to_the_same_state_again(shm: Path) -> None:
    from headwater.cache.state import Brain

    layout = next(iter(LAYOUTS.values()))
    events = EventList()
    config = CacheConfig(
        num_slots=8, block_tokens=layout.block_tokens, block_bytes=layout.page_bytes, tiers=(TierConfig(name="host"),)
    )
    with (
        open_local(LocalStoreConfig(directory=shm / "store", limit_bytes=64 << 20)) as host,
        create_kv_cache(layout, 8) as planes,
        create_host_cache(frame_bytes(layout.plane_bytes), 4) as pages,
        TorchStaging(planes, pages) as staging,
        open_cache(
            config,
            {"host": host},
            staging,
            layout=layout,
            identity=IDENTITY,
            recorder=events,
        ) as cache,
    ):
        for i in range(20):
            keys = keys_of(layout, 2 + i % 4)[: 2 + i % 4]
            cache.match(f"{i}", keys, root=ROOT)
            cache.wait(f"{i}", 30)
            assert cache.reserve(f"{i}", len(keys)) is not None
            cache.wait(f"{i}", 30)
            cache.commit(f"{i}", keys[cache.poll(f"{i}").num_ready :])
            cache.release(f"{i}")
        assert cache.drain(30)
        with cache.still() as brain:
            again = Brain(config)
            for event in events:
                again.handle(event)
            assert again.digest() == brain.digest()
