"""What saving and loading blocks costs the interpreter that an engine shares with us: the last part of `bench cache`.

The whole way, brain, executor and a store in memory, over a wire that moves no byte: what is left is what holds the
interpreter. Counted is the processor's time of all threads of this process, so other work on the machine matters
little; frequency and neighbours still do.
"""

import hashlib
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import numpy as np

from headwater.build import open_cache, open_local
from headwater.cache.cache import TieredCache
from headwater.config.cache import CacheConfig
from headwater.config.stores import LocalStoreConfig
from headwater.core.errors import HeadwaterError
from headwater.core.keys import BlockKey
from headwater.lab.bench.patient import chain, patient_tier
from headwater.lab.bench.report import Samples
from headwater.layout.frame import frame_bytes
from headwater.layout.spec import KVLayout, opaque_layout
from headwater.storage.base import Store
from headwater.storage.scratch import limit_for, memory_root
from headwater.transfer.device.arena import DeviceCache, create_host_cache, create_kv_cache
from headwater.transfer.device.wire import Digests, Direction, WirePiece
from headwater.transfer.executor.staging import TorchStaging

_ROOT: Final = BlockKey(hashlib.sha256(b"headwater bench interpreter").digest())
_NUM_PLANES: Final = 64  # keys and values of a model of 32 layers
_PLANE_BYTES: Final = 128
_BLOCK_TOKENS: Final = 16
_TIER: Final = "host"
_WAIT_S: Final = 60.0


class _StillWire:
    """A wire on which nothing moves: every digest is 0, and so is what was promised."""

    num_places: Final = 4
    place_bytes: Final = 32 << 20
    by_address: Final = True
    in_stages: Final = True

    def __init__(self, cache: DeviceCache, layout: KVLayout, direction: Direction) -> None:
        self._pieces: dict[int, WirePiece] = {}

    def direct(self) -> None:
        """None: there is one way."""
        return

    def launch(self, place: int, piece: WirePiece) -> None:
        """Remember how large the piece is."""
        self._pieces[place] = piece

    def finish(self, place: int, *, hurry: bool = False) -> Digests:
        """At once."""
        piece = self._pieces[place]
        return np.zeros((len(piece.slots), len(piece.planes)), np.uint64)

    def close(self) -> None:
        """Nothing is held."""


def measure(num_blocks: int, rounds: int, samples: Samples) -> None:
    """Save and load `num_blocks` blocks, `rounds` times and once before. Blocks; removes what it made. Raises."""
    layout = opaque_layout([_PLANE_BYTES] * _NUM_PLANES, _BLOCK_TOKENS)
    frame = frame_bytes(layout.plane_bytes)
    limit = max(limit_for(frame_bytes=frame, num_pages=2 * num_blocks), 2 * num_blocks << 16)  # a record per 64 KiB
    with ExitStack() as stack:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headwater-", dir=memory_root(limit))))
        store = stack.enter_context(open_local(LocalStoreConfig(directory=path, limit_bytes=limit, prefault=True)))
        planes = stack.enter_context(create_kv_cache(layout, num_blocks))
        pages = stack.enter_context(create_host_cache(frame, 8))
        staging = stack.enter_context(TorchStaging(planes, pages, wires=_StillWire))
        for number in range(rounds + 1):  # from the third on, the store is full, and others leave for each block
            _there_and_back(
                store, staging, layout, chain(b"interpreter %d" % number, num_blocks), samples if number else Samples()
            )


def _there_and_back(
    store: Store, staging: TorchStaging, layout: KVLayout, keys: list[BlockKey], samples: Samples
) -> None:
    num = len(keys)
    with _open(store, staging, layout, num) as cache:
        cache.match("save", keys, root=_ROOT)
        cache.wait("save", _WAIT_S)
        cache.reserve("save", num, load=False)
        begin_s = time.process_time()
        cache.commit("save", keys)
        if not cache.drain(_WAIT_S):
            raise HeadwaterError("the cache did not come to rest")
        samples.add("save_us_per_block", (time.process_time() - begin_s) / num * 1e6)
    with _open(store, staging, layout, num) as cache:
        cache.match("load", keys, root=_ROOT)
        cache.wait("load", _WAIT_S)
        begin_s = time.process_time()
        cache.reserve("load", num)
        progress = cache.wait("load", _WAIT_S)
        samples.add("load_us_per_block", (time.process_time() - begin_s) / num * 1e6)
        if progress.num_ready < num:
            raise HeadwaterError(f"{progress.num_ready} blocks were loaded of {num}")


def _open(store: Store, staging: TorchStaging, layout: KVLayout, num_slots: int) -> TieredCache:
    tier = patient_tier(_TIER, _WAIT_S)
    config = CacheConfig(num_slots=num_slots, block_tokens=_BLOCK_TOKENS, block_bytes=layout.page_bytes, tiers=(tier,))
    return open_cache(config, {_TIER: store}, staging, layout=layout, identity=bytes(32))
