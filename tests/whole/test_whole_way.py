"""Device to store and back, for every layout, every medium and several tensor-parallel sizes, bit for bit."""

import hashlib
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headwater.build import open_local
from headwater.config.stores import LocalStoreConfig
from headwater.core.identity import CacheIdentity, config_digest
from headwater.core.keys import block_keys
from headwater.core.results import Status
from headwater.layout.frame import PageMeta, frame_bytes, header_bytes
from headwater.layout.shard import Part, is_writer, parts
from headwater.layout.spec import DType, KVLayout, Plane, combine, declare_role
from headwater.storage.base import Store
from headwater.storage.memory import MemoryStore
from headwater.storage.sealed import put_sealed
from headwater.storage.verified import VerifiedStore
from headwater.testing.copy import gather, scatter
from headwater.testing.layouts import randomise
from headwater.testing.samples import sample_layouts
from headwater.testing.stores import soon
from headwater.transfer.device.arena import DeviceCache, create_host_cache, create_kv_cache

# A new attention variant: this is all that has to be written. No room of the house knows it.
STATE = declare_role("whole_way_state", 2000)


def new_variant() -> KVLayout:
    planes = [Plane(STATE, layer, (8, 3, 5), DType.FP32, split=0) for layer in range(2)]
    marks = [Plane(declare_role("whole_way_marks", 2001), layer, (3,), DType.UINT8) for layer in range(2)]
    return KVLayout(4, (*planes, *marks))


LAYOUTS = {**sample_layouts(), "a new variant": new_variant()}
NUM_BLOCKS = 5


@pytest.fixture(params=["memory", "tmpfs", "disk"])
def store(request: pytest.FixtureRequest, shm: Path, tmp_path: Path) -> Iterator[Store]:
    if request.param == "memory":
        with MemoryStore(256 << 20) as memory:
            yield memory
    else:
        path = (shm if request.param == "tmpfs" else tmp_path) / "store"
        with open_local(LocalStoreConfig(directory=path, limit_bytes=96 << 20)) as local:
            yield local


def identity_of(layout: KVLayout) -> CacheIdentity:
    return CacheIdentity(
        model="test",
        weights=hashlib.sha256(b"weights").digest(),
        config=config_digest({"layers": layout.num_layers}),
        layout=layout.fingerprint,
        block_tokens=layout.block_tokens,
    )


def metas(part: Part, identity: CacheIdentity, num_tokens: int) -> list[PageMeta]:
    keys = block_keys(list(range(num_tokens)), parent=identity.root, block_tokens=identity.block_tokens, tail=True)
    size = identity.block_tokens
    return [
        PageMeta(
            key=key,
            identity=identity.digest,
            tenant=identity.tenant,
            parent=keys[i - 1] if i else identity.root,
            depth=i,
            shard_index=part.shard.index,
            shard_count=part.shard.count,
            part=part.tag,
            valid_tokens=min(size, num_tokens - i * size),
        )
        for i, key in enumerate(keys)
    ]


def write(store: Store, cache: DeviceCache, part: Part, pages: list[PageMeta], block_ids: list[int]) -> list[Status]:
    sizes = part.layout.plane_bytes
    with create_host_cache(frame_bytes(sizes), len(pages)) as host:
        order = list(range(len(pages)))
        gather(cache, block_ids, host.pages, order, layout=part.layout, payload_offset=header_bytes(len(sizes)))
        unsealed = [(meta, host.page(i)) for i, meta in enumerate(pages)]
        return put_sealed(store, unsealed, part.layout, now_ms=int(time.time() * 1000), deadline=soon())


def load(store: Store, cache: DeviceCache, part: Part, pages: list[PageMeta], block_ids: list[int]) -> list[Status]:
    sizes = part.layout.plane_bytes
    reader = VerifiedStore(store, identity=pages[0].identity, plane_bytes=sizes)
    with create_host_cache(reader.frame_bytes, len(pages)) as host:
        wanted = [(meta.name, host.page(i)) for i, meta in enumerate(pages)]
        results = reader.get_into(wanted, deadline=soon())
        hit = [i for i, status in enumerate(results) if status is Status.HIT]
        ids = [block_ids[i] for i in hit]
        scatter(cache, ids, host.pages, hit, layout=part.layout, payload_offset=header_bytes(len(sizes)))
        return results


def blocks(cache: DeviceCache, block_ids: list[int]) -> list[bytes]:
    return [b"".join(bytes(rows[i].cpu().numpy()) for rows in cache.rows) for i in block_ids]


@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_comes_back_bit_for_bit(store: Store, name: str, device: str) -> None:
    layout = LAYOUTS[name]
    identity = identity_of(layout)
    (part,) = parts(layout, 0, 1)
    pages = metas(part, identity, NUM_BLOCKS * layout.block_tokens)
    there, back = [7, 0, 3, 9, 4], [1, 8, 2, 6, 5]
    with create_kv_cache(layout, 10, device) as source, create_kv_cache(layout, 10, device) as target:
        randomise(source, seed=1)
        assert write(store, source, part, pages, there) == [Status.STORED] * NUM_BLOCKS
        assert load(store, target, part, pages, back) == [Status.HIT] * NUM_BLOCKS
        assert blocks(target, back) == blocks(source, there)
        assert any(map(any, blocks(target, back)))


def test_ranks_share_a_store_and_replicated_planes_are_stored_once(store: Store) -> None:
    layout = LAYOUTS["mixed-gqa-mla"]
    identity = identity_of(layout)
    stored: set[bytes] = set()
    for tp_size in (1, 2, 4):
        for rank in range(tp_size):
            for part in parts(layout, rank, tp_size):
                pages = metas(part, identity, layout.block_tokens)
                if not is_writer(part.shard, rank, tp_size, turn=0):
                    continue
                with create_kv_cache(part.layout, 1) as cache, create_kv_cache(part.layout, 1) as target:
                    randomise(cache, seed=len(stored))
                    status = write(store, cache, part, pages, [0])
                    assert status == [Status.EXISTS if pages[0].name in stored else Status.STORED]
                    stored.add(pages[0].name)
                    if status == [Status.STORED]:
                        assert load(store, target, part, pages, [0]) == [Status.HIT]
                        assert blocks(target, [0]) == blocks(cache, [0])
    # One whole block; then the latent part once for both sizes, and two and four shards of the heads.
    assert len(stored) == 1 + 1 + 2 + 4


def test_a_partial_tail_comes_back_with_zeros_behind_it(store: Store) -> None:
    layout = combine(LAYOUTS["gqa-fp8-scales"])
    identity = identity_of(layout)
    (part,) = parts(layout, 0, 1)
    pages = metas(part, identity, layout.block_tokens + 10)
    assert [meta.valid_tokens for meta in pages] == [64, 10]
    with create_kv_cache(layout, 2) as source, create_kv_cache(layout, 2) as target:
        randomise(source, seed=3)
        write(store, source, part, pages, [0, 1])
        assert load(store, target, part, pages, [0, 1]) == [Status.HIT] * 2
        assert blocks(target, [0]) == blocks(source, [0])
        before, after = (cache.rows[layout.index("key", 1)][1].view(8, 64, 128) for cache in (source, target))
        assert torch.equal(after[:, :10], before[:, :10])
        assert not after[:, 10:].any()
        assert before[:, 10:].any()


def test_pages_of_another_identity_or_tenant_are_misses(store: Store) -> None:
    layout = LAYOUTS["gqa-bf16"]
    (part,) = parts(layout, 0, 1)
    mine = identity_of(layout)
    others = [
        replace(mine, weights=hashlib.sha256(b"finer weights").digest()),
        replace(mine, salt=b"tenant"),
        replace(mine, adapter=hashlib.sha256(b"adapter").digest()),
    ]
    with create_kv_cache(layout, 2) as cache:
        write(store, cache, part, metas(part, mine, 128), [0, 1])
        for other in others:
            assert load(store, cache, part, metas(part, other, 128), [0, 1]) == [Status.MISS] * 2
