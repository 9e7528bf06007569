"""What only a GPU shows: memory given back to the byte, damage caught on arrival, two processes on one device."""

import gc
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headwater.build import open_local
from headwater.config.stores import LocalStoreConfig
from headwater.core.events import Event, JobDone, Load, Save
from headwater.integrations.vllm.registered import RegisteredCache
from headwater.layout.frame import frame_bytes, header_bytes
from headwater.layout.gqa import gqa_layout
from headwater.layout.spec import DType
from headwater.storage.local import MappedStore
from headwater.testing.pages import IDENTITY
from headwater.testing.samples import sample_layouts
from headwater.transfer.device.arena import create_host_cache, create_kv_cache
from headwater.transfer.device.copy_engine import CopyEngine
from headwater.transfer.device.wire import Direction
from headwater.transfer.executor.staging import TorchStaging
from headwater.transfer.executor.worker import Worker
from worker_kit import TENANT, key, keys

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
WAIT_S = 60.0


def test_memory_is_given_back_to_the_byte() -> None:
    layout = gqa_layout(num_layers=32, num_kv_heads=8, head_dim=128, block_tokens=64, dtype=DType.BF16)
    with create_kv_cache(layout, 8, "cuda") as cache, create_host_cache(frame_bytes(layout.plane_bytes), 8) as host:
        before = torch.cuda.memory_allocated()
        engine = CopyEngine(cache)
        assert 0 < torch.cuda.memory_allocated() - before <= 256 << 20
        assert engine.gather(range(8), [host.page(i) for i in range(8)]).wait(WAIT_S)
        engine.close()
        gc.collect()
        assert torch.cuda.memory_allocated() == before


def test_blocks_of_one_run_need_no_memory_of_the_device() -> None:
    cache = one_run(8)
    before = torch.cuda.memory_allocated()
    with CopyEngine(cache) as engine, create_host_cache(frame_bytes(cache.layout.plane_bytes), 8) as host:
        assert torch.cuda.memory_allocated() - before < 1 << 16  # tables of planes
        assert engine.gather(range(8), [host.page(i) for i in range(8)]).wait(WAIT_S)


def test_who_was_interrupted_before_a_digest_makes_it_later() -> None:
    """The place has the digests of another piece from before, which would have been right for the bytes before."""
    cache = one_run(2)
    with CopyEngine(cache) as engine, create_host_cache(frame_bytes(cache.layout.plane_bytes), 2) as host:
        cache.rows[0].random_(0, 256)
        gathered = engine.gather([0], [host.page(0)])
        assert gathered.wait(WAIT_S)
        wanted = gathered.digests
        assert wanted is not None
        wire = engine._queues[Direction.IN].wire
        for _ in range(wire.num_places):  # every place has seen the right bytes
            loaded = engine.scatter([host.page(0)], [1], expected=wanted)
            assert loaded.wait(WAIT_S)
            assert loaded.num_good == 1
        host.page(0)[header_bytes(len(cache.layout.planes))] ^= 1
        run_kernel, calls = wire._run_kernel, 0  # type: ignore[attr-defined]

        def interrupted(*args: Any, **kwargs: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == 1:
                raise KeyboardInterrupt
            run_kernel(*args, **kwargs)

        wire._run_kernel = interrupted  # type: ignore[attr-defined]
        damaged = engine.scatter([host.page(0)], [1], expected=wanted)
        with pytest.raises(KeyboardInterrupt):
            damaged.wait(WAIT_S)
        assert damaged.wait(WAIT_S)
        assert calls == 2
        assert damaged.num_good == 0


def one_run(num_blocks: int) -> RegisteredCache:
    """As vLLM has it: a block is one run of bytes, a plane a part of it."""
    blocks = torch.zeros(num_blocks, 2 << 20, dtype=torch.uint8, device="cuda")
    return RegisteredCache({"all": blocks}, num_blocks=num_blocks, block_tokens=16)


ONE_RUN = "one run"


@pytest.mark.parametrize("kind", [*sample_layouts(), ONE_RUN])
def test_a_flipped_byte_never_arrives(kind: str, shm: Path) -> None:
    """A hundred for each of eleven layouts."""
    cache = one_run(8) if kind == ONE_RUN else create_kv_cache(sample_layouts()[kind], 8, "cuda")
    layout = cache.layout
    size, dice = frame_bytes(layout.plane_bytes), np.random.default_rng(7)
    config = LocalStoreConfig(directory=shm / "store", limit_bytes=64 * size + (8 << 20))
    ends: list[Event] = []
    with (
        open_local(config) as store,
        cache,
        create_host_cache(size, 2) as pages,
        TorchStaging(cache, pages) as staging,
    ):
        assert isinstance(store, MappedStore)
        for row in cache.rows:
            row.random_(0, 256)
        worker = Worker({"host": store}, staging, layout=layout, identity=IDENTITY, block_tokens=layout.block_tokens)
        worker.deliver = ends.append
        name = keys(1, 1)
        for number in range(100):
            fields: dict[str, Any] = {"store": "host", "keys": name, "deadline_s": time.monotonic() + WAIT_S}
            save = Save(job=3 * number, slots=(0,), parent=key(1, -1), depth=0, tenant=TENANT, **fields)
            worker.submit([save])
            assert worker.drain(WAIT_S)
            worker.submit([Load(job=3 * number + 1, slots=(1,), **fields)])
            assert worker.drain(WAIT_S)
            at = store._attachment
            assert at is not None
            (place,) = at.catalog.mirror.places.values()
            offset = int(dice.integers(0, size))
            view = at.slab.view(place.offset, size)
            view[offset] ^= 1 << int(dice.integers(0, 8))
            worker.submit([Load(job=3 * number + 2, slots=(1,), **fields)])
            assert worker.drain(WAIT_S)
        assert worker.close()
        results = [event.results for event in ends if isinstance(event, JobDone)]
        assert results[0::3] == [("stored",)] * 100
        assert results[1::3] == [("hit",)] * 100
        assert ("hit",) not in results[2::3]


CHILD = """
import json, sys, time
import torch
from pathlib import Path
from headwater.build import open_local
from headwater.config.stores import LocalStoreConfig
from headwater.core.events import JobDone, Load, Save
from headwater.layout.frame import frame_bytes, header_bytes
from headwater.testing.samples import sample_layouts
from headwater.testing.pages import IDENTITY
from headwater.transfer.device.arena import create_host_cache, create_kv_cache
from headwater.transfer.executor.staging import TorchStaging
from headwater.transfer.device.wire import Direction
from headwater.transfer.executor.worker import Worker
sys.path.insert(0, sys.argv[3])
from worker_kit import TENANT, key, keys

directory, me = Path(sys.argv[1]), int(sys.argv[2])
layout = sample_layouts()["gqa-bf16"]
size, ends, wrong, hits = frame_bytes(layout.plane_bytes), [], 0, 0
with (
    open_local(LocalStoreConfig(directory=directory)) as store,
    create_kv_cache(layout, 64, "cuda") as cache,
    create_host_cache(size, 2) as pages,
    TorchStaging(cache, pages) as staging,
):
    worker = Worker({"host": store}, staging, layout=layout, identity=IDENTITY, block_tokens=layout.block_tokens)
    worker.deliver = ends.append
    for turn in range(60):
        chain = turn % 7  # both write the same bytes under the same names, and each reads what the other wrote
        for row in cache.rows:
            row[:8] = torch.arange(8, device="cuda", dtype=torch.uint8)[:, None] * 16 + chain
        job = {"store": "host", "keys": keys(chain, 8), "deadline_s": time.monotonic() + 60}
        place = {"parent": key(chain, -1), "depth": 0, "tenant": bytes(16)}
        worker.submit([Save(job=3 * turn, slots=tuple(range(8)), **place, **job)])
        worker.submit([Load(job=3 * turn + 1, slots=tuple(range(20, 28)), **job)])  # it goes first, beside the save
        assert worker.drain(60)
        # There is room for four chains of seven, and they are used in a circle: what was written a round ago is gone,
        # unless the other one has just written it. So what the save left is read, too.
        worker.submit([Load(job=3 * turn + 2, slots=tuple(range(30, 38)), **job)])
        assert worker.drain(60)
        for number, first in ((3 * turn + 1, 20), (3 * turn + 2, 30)):
            done = [event for event in ends if isinstance(event, JobDone) and event.job == number]
            num = sum(1 for result in done[0].results if result == "hit") if done else 0
            hits += num
            for row in cache.rows:
                right = torch.arange(num, device="cuda", dtype=torch.uint8)[:, None] * 16 + chain
                wrong += int(not (row[first : first + num] == right).all())
    assert worker.close()
print(json.dumps({"wrong": wrong, "hits": hits}))
"""


def test_two_processes_on_one_device_and_one_slab(shm: Path) -> None:
    directory = shm / "store"
    size = frame_bytes(sample_layouts()["gqa-bf16"].plane_bytes)
    open_local(LocalStoreConfig(directory=directory, limit_bytes=40 * size + (8 << 20))).close()
    command = [sys.executable, "-c", CHILD, str(directory)]
    kits = str(Path(__file__).parents[1] / "kits")
    children = [
        subprocess.Popen([*command, str(me), kits], stdout=subprocess.PIPE, text=True)  # ourselves
        for me in range(2)
    ]
    said = [json.loads(child.communicate(timeout=300)[0]) for child in children]
    assert [child.returncode for child in children] == [0, 0]
    assert [one["wrong"] for one in said] == [0, 0]
    assert all(one["hits"] > 0 for one in said)
