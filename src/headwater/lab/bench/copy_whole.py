"""The whole way of `bench copy`: blocks from the device into a store in memory and back, through cache and index.

Saving is timed from `commit` until nothing is under way. For each load another cache is opened, which knows nothing of
the device, on the same store: it asks the store, reserves, loads; timed from `reserve` until nothing is loading. Every
byte that came back is compared on the device.
"""

import hashlib
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from headwater.build import open_cache, open_local
from headwater.cache.cache import TieredCache
from headwater.config.cache import CacheConfig
from headwater.config.stores import LocalStoreConfig
from headwater.core.errors import HeadwaterError
from headwater.core.keys import BlockKey
from headwater.lab.bench.patient import chain, patient_tier
from headwater.lab.bench.report import Samples
from headwater.layout.frame import frame_bytes
from headwater.layout.spec import KVLayout
from headwater.storage.base import Store
from headwater.storage.local import directory
from headwater.storage.scratch import limit_for, memory_root
from headwater.transfer.device.arena import DeviceCache, create_host_cache, create_kv_cache
from headwater.transfer.executor.staging import TorchStaging

_ROOT: Final = BlockKey(hashlib.sha256(b"headwater bench copy").digest())
_IDENTITY: Final = hashlib.sha256(b"headwater bench copy identity").digest()
_TIER: Final = "host"
_STAGING_PAGES: Final = 8  # for a store that cannot be registered
_WARM_UP_BLOCKS: Final = 2
_LOADS: Final = 2  # of each row that was saved
_WAIT_S: Final = 60.0


def run(layout: KVLayout, num_blocks: int, *, rounds: int, device: torch.device, samples: Samples) -> dict[str, Any]:
    """Save and load `num_blocks` blocks, `rounds` times. Blocks; removes what it made. Raises HeadwaterError."""
    frame = frame_bytes(layout.plane_bytes)
    limit = limit_for(frame_bytes=frame, num_pages=rounds * num_blocks + _WARM_UP_BLOCKS)
    root = memory_root(limit)
    found: dict[str, Any] = {"whole_blocks": num_blocks, "whole_bytes": num_blocks * layout.page_bytes}
    if not directory.is_memory(root) or directory.free_bytes(root) < limit:
        return found | {"whole_skipped": f"{limit} bytes are not free in memory: {root}"}
    with ExitStack() as stack:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headwater-copy-", dir=root)))
        store = stack.enter_context(open_local(LocalStoreConfig(directory=path, limit_bytes=limit, prefault=True)))
        planes = stack.enter_context(create_kv_cache(layout, max(num_blocks, _WARM_UP_BLOCKS), device))
        pages = stack.enter_context(create_host_cache(frame, _STAGING_PAGES))
        staging = stack.enter_context(TorchStaging(planes, pages))
        way = _Way(store, planes, staging)
        correct = way.there_and_back("warm up", _WARM_UP_BLOCKS, Samples())
        for number in range(rounds):
            correct &= way.there_and_back(f"{number}", num_blocks, samples)
        addressable = store.addressable()
        memory = addressable.memory() if addressable is not None else None
        in_place = memory is not None and staging.reaches(memory)
    return found | {
        "whole_in_place": in_place,
        "whole_correct": correct,
        "store_gbs": samples.median("store_gbs"),
        "load_gbs": samples.median("load_gbs"),
    }


class _Way:
    """A device, a store, and the caches that are opened between them, one at a time."""

    def __init__(self, store: Store, planes: DeviceCache, staging: TorchStaging) -> None:
        self._store = store
        self._planes = planes
        self._staging = staging

    def there_and_back(self, name: str, num_blocks: int, samples: Samples) -> bool:
        """Save new blocks, wipe the device, load them, each time into another cache. Whether every byte was right."""
        keys = chain(_ROOT + name.encode(), num_blocks)
        num_bytes = num_blocks * self._planes.layout.page_bytes
        for row in self._planes.rows:
            row.random_(0, 256)
        self._synchronise()
        with self._cache() as cache:
            cache.match(name, keys, root=_ROOT)
            cache.wait(name, _WAIT_S)
            slots = self._reserve(cache, name, num_blocks, load=False)
            before = self._blocks(slots)
            self._synchronise()
            begin_s = time.perf_counter()
            cache.commit(name, keys)
            self._rest(cache)
            samples.add("store_gbs", num_bytes / (time.perf_counter() - begin_s) / 1e9)
        equal = True
        for _ in range(_LOADS):
            for row in self._planes.rows:
                row.zero_()
            self._synchronise()
            with self._cache() as cache:
                cache.match(name, keys, root=_ROOT)
                cache.wait(name, _WAIT_S)
                found = cache.match(name, keys, root=_ROOT).num_hit
                if found < num_blocks:
                    raise HeadwaterError(f"{found} blocks are in the store of {num_blocks} that were saved")
                begin_s = time.perf_counter()
                slots = self._reserve(cache, name, num_blocks, load=True)
                progress = cache.wait(name, _WAIT_S)
                samples.add("load_gbs", num_bytes / (time.perf_counter() - begin_s) / 1e9)
                if progress.loading or progress.num_ready < num_blocks:
                    raise HeadwaterError(f"{progress.num_ready} blocks were loaded of {num_blocks}")
                equal &= all(map(torch.equal, self._blocks(slots), before))
        return equal

    @contextmanager
    def _cache(self) -> Iterator[TieredCache]:
        layout = self._planes.layout
        tier = patient_tier(_TIER, _WAIT_S)
        config = CacheConfig(
            num_slots=self._planes.num_blocks,
            block_tokens=layout.block_tokens,
            block_bytes=layout.page_bytes,
            tiers=(tier,),
        )
        stores = {_TIER: self._store}
        with open_cache(config, stores, self._staging, layout=layout, identity=_IDENTITY) as cache:
            yield cache
            self._rest(cache)

    def _reserve(self, cache: TieredCache, name: str, num_blocks: int, *, load: bool) -> list[int]:
        slots = cache.reserve(name, num_blocks, load=load)
        if slots is None:
            raise HeadwaterError(f"no room for {num_blocks} blocks on a device of {self._planes.num_blocks}")
        return list(slots)

    def _rest(self, cache: TieredCache) -> None:
        if not cache.drain(_WAIT_S):
            raise HeadwaterError("the cache did not come to rest")

    def _blocks(self, slots: list[int]) -> list[torch.Tensor]:
        """Copies of blocks, plane by plane, on the device."""
        ids = torch.tensor(slots, device=self._planes.device)
        return [row[ids] for row in self._planes.rows]

    def _synchronise(self) -> None:
        if self._planes.device.type == "cuda":
            torch.cuda.synchronize(self._planes.device)
