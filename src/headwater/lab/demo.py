"""The demonstration: every sample layout from the device to host and disk, through a restart, and back, bit for bit.

Random bytes on the device are gathered into frames, sealed and put into a store in memory and one on disk. Both are
closed and opened again; the device and the buffers are wiped; the pages are read back verified and scattered into
*other* blocks, where they must equal what was there before. Speeds are of sealed writes and verified reads, without the
copies to and from the device: a hint of what to expect, no benchmark (`bench/`).

Invariant: the temporary directories are gone afterwards, whatever happened.
"""

import hashlib
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch

from headwater.build import open_local
from headwater.config.stores import LocalStoreConfig
from headwater.core.errors import InvalidConfig
from headwater.core.identity import CacheIdentity, config_digest
from headwater.core.keys import block_keys
from headwater.core.results import Status
from headwater.layout.frame import PageMeta, frame_bytes, header_bytes, seal
from headwater.layout.spec import KVLayout
from headwater.storage.base import Deadline
from headwater.storage.local import directory
from headwater.storage.scratch import disk_root, limit_for, memory_root
from headwater.storage.verified import VerifiedStore
from headwater.testing.copy import gather, scatter
from headwater.testing.samples import sample_layouts
from headwater.transfer.device.arena import DeviceCache, HostCache, create_host_cache, create_kv_cache

DEFAULT_TARGET_BYTES: Final = 16 << 20  # of payload per layout: enough for a speed, little enough for a small /dev/shm
_MAX_PAGES: Final = 64
_MIN_PAGES: Final = 4
_SPARE_BLOCKS: Final = 3  # so that blocks and pages never happen to have the same numbers
_CALL_S: Final = 60.0
_ROOM_BYTES: Final = 64 << 20  # what memory_root must have: Docker gives 64 MiB unless told otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class TierResult:
    """One layout through one tier."""

    medium: str  # "memory" or "disk", by what the directory really lies on
    write_gbs: float
    read_gbs: float
    problem: str  # empty where every byte came back


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutResult:
    """One layout through both tiers."""

    layout: str
    num_planes: int
    page_bytes: int
    num_pages: int
    host: TierResult
    disk: TierResult

    @property
    def equal(self) -> bool:
        """Whether every byte came back from both."""
        return not self.host.problem and not self.disk.problem


def run(
    *,
    device: str = "cpu",
    target_bytes: int = DEFAULT_TARGET_BYTES,
    tell: Callable[[str, int, int], None] | None = None,
) -> list[LayoutResult]:
    """Take every sample layout around. Blocks for seconds; raises HeadwaterError where a tier cannot be had."""
    if device not in ("cpu", "cuda"):
        raise InvalidConfig(f"device must be cpu or cuda, not {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise InvalidConfig("no CUDA device here: use --device cpu")
    layouts = sample_layouts()
    results = []
    with (
        tempfile.TemporaryDirectory(prefix="headwater-demo-", dir=memory_root(_ROOM_BYTES)) as host,
        tempfile.TemporaryDirectory(prefix="headwater-demo-", dir=disk_root()) as disk,
    ):
        for done, (name, layout) in enumerate(layouts.items()):
            if tell is not None:
                tell(name, done, len(layouts))
            num_pages = max(_MIN_PAGES, min(_MAX_PAGES, target_bytes // layout.page_bytes))
            journey = _Journey(name, layout, num_pages=num_pages, device=device)
            try:
                results.append(journey.result(Path(host) / name, Path(disk) / name))
            finally:
                journey.close()
    return results


class _Journey:
    """One layout's pages: on the device as they were, and where they go."""

    def __init__(self, name: str, layout: KVLayout, *, num_pages: int, device: str) -> None:
        self.name = name
        self.layout = layout
        self.num_pages = num_pages
        self.identity = _identity(name, layout)
        self.metas = _metas(self.identity, num_pages)
        self.start = header_bytes(len(layout.planes))
        rng = np.random.default_rng(0)
        num_blocks = num_pages + _SPARE_BLOCKS
        self.sources = rng.permutation(num_blocks)[:num_pages]
        self.targets = rng.permutation(num_blocks)[:num_pages]
        self.host: HostCache = create_host_cache(frame_bytes(layout.plane_bytes), num_pages)
        self.cache: DeviceCache = create_kv_cache(layout, num_blocks, device)
        for row in self.cache.rows:
            row.random_(0, 256)
        self.before = [row[torch.from_numpy(self.sources).to(row.device)] for row in self.cache.rows]

    def close(self) -> None:
        """Give the memory back."""
        self.before = []
        self.cache.close()
        self.host.close()

    def result(self, host: Path, disk: Path) -> LayoutResult:
        """Both ways, one after the other."""
        pages = list(range(self.num_pages))
        gather(self.cache, self.sources, self.host.pages, pages, payload_offset=self.start)
        kept = self.host.pages.clone()
        first = self._through(host)
        self.host.pages.copy_(kept)
        return LayoutResult(
            layout=self.name,
            num_planes=len(self.layout.planes),
            page_bytes=self.layout.page_bytes,
            num_pages=self.num_pages,
            host=first,
            disk=self._through(disk),
        )

    def _through(self, path: Path) -> TierResult:
        """Seal and put what is in the host pages, restart, read it back verified, scatter, compare."""
        frames = [self.host.page(i) for i in range(self.num_pages)]
        limit_bytes = limit_for(frame_bytes=len(frames[0]), num_pages=self.num_pages)
        with open_local(LocalStoreConfig(directory=path, limit_bytes=limit_bytes, prefault=True)) as store:
            label = f"demo {self.name}"
            begin_s = time.perf_counter()
            for frame, meta in zip(frames, self.metas, strict=True):
                seal(frame, meta, self.layout, now_ms=int(time.time() * 1000))
            pages = [(meta.name, frame) for meta, frame in zip(self.metas, frames, strict=True)]
            stored = store.put(pages, deadline=Deadline.after(_CALL_S))
            write_s = time.perf_counter() - begin_s
            store.label(self.identity.digest, self.identity.tenant, label, deadline=Deadline.after(_CALL_S))
        self.host.pages.zero_()
        for row in self.cache.rows:
            row.zero_()
        with open_local(LocalStoreConfig(directory=path)) as store:
            verified = VerifiedStore(store, identity=self.identity.digest, plane_bytes=self.layout.plane_bytes)
            begin_s = time.perf_counter()
            got = verified.get_into(pages, deadline=Deadline.after(_CALL_S))
            read_s = time.perf_counter() - begin_s
        scatter(self.cache, self.targets, self.host.pages, list(range(self.num_pages)), payload_offset=self.start)
        num_bytes = self.num_pages * self.layout.page_bytes
        return TierResult(
            medium="memory" if directory.is_memory(path) else "disk",
            write_gbs=num_bytes / write_s / 1e9,
            read_gbs=num_bytes / read_s / 1e9,
            problem=self._problem(stored, got),
        )

    def _problem(self, stored: Sequence[Status], got: Sequence[Status]) -> str:
        if set(stored) != {Status.STORED}:
            return f"put answered {', '.join(sorted(set(stored)))}"
        if set(got) != {Status.HIT}:
            return f"get answered {', '.join(sorted(set(got)))}"
        for plane, row, before in zip(self.layout.planes, self.cache.rows, self.before, strict=True):
            if not torch.equal(row[torch.from_numpy(self.targets).to(row.device)], before):
                return f"plane {plane.name} differs"
        return ""


def _identity(name: str, layout: KVLayout) -> CacheIdentity:
    return CacheIdentity(
        model=f"demo/{name}",
        weights=hashlib.sha256(b"headwater demo weights").digest(),
        config=config_digest({"num_hidden_layers": layout.num_layers}),
        layout=layout.fingerprint,
        block_tokens=layout.block_tokens,
    )


def _metas(identity: CacheIdentity, num_pages: int) -> list[PageMeta]:
    """Name one sequence of random tokens, block by block."""
    tokens = np.random.default_rng(1).integers(0, 128_000, num_pages * identity.block_tokens, dtype=np.uint32)
    keys = block_keys(tokens, parent=identity.root, block_tokens=identity.block_tokens)
    return [
        PageMeta(
            key=key,
            identity=identity.digest,
            tenant=identity.tenant,
            parent=parent,
            depth=depth,
            valid_tokens=identity.block_tokens,
        )
        for depth, (key, parent) in enumerate(zip(keys, [identity.root, *keys], strict=False))
    ]
