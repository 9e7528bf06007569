"""`headwater bench pool`: how fast pages go to a shared pool and come back, beside memcpy and the bare client.

One thread, batches of pages that nobody has put before. In each round pages are put and read twice: through the store
as the cache uses it (sealed and digested in the timed path, verified on every byte), and by bare calls of the same
client on the same memory; who goes first alternates. Then existence checks, by both, and look-ups of prefixes in a
residency index. Figures are medians of rounds; ratios are of medians in this run.
"""

import mmap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Final, TypeAlias

import numpy as np

from headwater.core.errors import HeadwaterError, InvalidConfig, StoreUnavailable
from headwater.core.page import PageName
from headwater.core.results import Status
from headwater.lab.bench.pool_ways import NAMES, Items, NotHere, Way, open_way
from headwater.lab.bench.pools import IDENTITY, Page, endless
from headwater.lab.bench.report import BenchReport, Samples, Tell
from headwater.lab.bench.residency import bench_lookups
from headwater.layout.frame import ALIGNMENT, frame_bytes, header_bytes
from headwater.layout.spec import KVLayout, opaque_layout
from headwater.storage.base import Deadline
from headwater.storage.sealed import put_sealed
from headwater.storage.verified import VerifiedStore
from headwater.testing.redis import redis_server

_NUM_PLANES: Final = 32
_CALL_S: Final = 60.0
_CHECKED: Final = (64, 512)  # names in one existence check
_CHECKS: Final = 50
_LOOKUP_BYTES: Final = 256 << 20  # of a Redis server for the residency index
Timed: TypeAlias = tuple[str, Callable[[], None]]
_NOTES: Final = {
    "rows": "one per store and page size; GB/s of payload, ratios to memcpy and to the bare client in this run",
    "put_gbs, get_gbs": "through the store, as the cache uses it: digests made on the way in, every byte verified",
    "bare_*": "the same client's own batched calls on the same memory; nothing sealed, looked at or verified",
    "checks_per_s": "pages asked for with `contains`, by pages in one call",
    "lookups": "blocks per second that a residency index finds holders of, one round trip for a path",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOptions:
    """What to measure."""

    stores: tuple[str, ...] = NAMES
    page_kib: tuple[int, ...] = (128, 1024, 4096)
    batch_pages: int = 32
    round_mib: int = 256
    rounds: int = 5

    def __post_init__(self) -> None:
        """Refuse what cannot be measured."""
        strange = [name for name in self.stores if name not in NAMES]
        if strange or not self.stores:
            raise InvalidConfig(f"--stores are some of {', '.join(NAMES)}, not {', '.join(strange) or 'none'}")
        if not self.page_kib or min(self.page_kib) < 4 or max(self.page_kib) > 1 << 16:
            raise InvalidConfig("--page-kib are from 4 to 65536")
        if min(self.batch_pages, self.round_mib, self.rounds) < 1:
            raise InvalidConfig("--batch, --round-mib and --rounds must be positive")


class _Frames:
    """Frames of one layout in memory that a way reaches."""

    def __init__(self, layout: KVLayout, num_pages: int, memory: Callable[[int], memoryview] | None) -> None:
        self._size = frame_bytes(layout.plane_bytes)
        self._stride = -(-self._size // ALIGNMENT) * ALIGNMENT
        need = self._stride * num_pages
        self.memory = memoryview(mmap.mmap(-1, need)) if memory is None else memory(need)
        self._payload_at = header_bytes(len(layout.plane_bytes))
        np.frombuffer(self.memory, np.uint8)[:] = 1  # touched: no copy pays for a page fault later

    def frame(self, at: int) -> memoryview:
        return self.memory[at * self._stride : at * self._stride + self._size]

    def payload(self, at: int) -> memoryview:
        return self.frame(at)[self._payload_at :]


class _PoolRow:
    """One store, one page size."""

    def __init__(self, way: Way, layout: KVLayout, options: PoolOptions, samples: Samples, name: str) -> None:
        self._way = way
        self._layout = layout
        self._batch = options.batch_pages
        self._samples = samples
        self._name = name
        self._num_pages = max(options.batch_pages, (options.round_mib << 20) // layout.page_bytes)
        self._num_bytes = self._num_pages * layout.page_bytes
        self._source = _Frames(layout, self._num_pages, way.memory)
        self._target = _Frames(layout, self._num_pages, way.memory)
        np.frombuffer(self._source.memory, np.uint8)[:] = np.random.default_rng(1).integers(
            0, 256, len(self._source.memory), np.uint8
        )
        self._metas = endless(layout, seed=hash(name) & 0xFFFF, chain=options.batch_pages)
        self._reader = VerifiedStore(way.store, identity=IDENTITY, plane_bytes=layout.plane_bytes)

    def take(self, number: int) -> None:
        """One round."""
        metas = list(islice(self._metas, self._num_pages))
        pages = [(meta, self._source.frame(i)) for i, meta in enumerate(metas)]
        names = [meta.name for meta in metas]
        ours: list[Timed] = [("put", partial(self._put, pages)), ("get", partial(self._get, names))]
        bare: list[Timed] = []
        if self._way.bare is not None:
            items = [(name, self._source.frame(i)) for i, name in enumerate(names)]
            targets = [(name, self._target.frame(i)) for i, name in enumerate(names)]
            bare = [
                ("bare_put", partial(self._in_batches, self._way.bare.put, items)),
                ("bare_get", partial(self._in_batches, self._way.bare.get, targets)),
            ]
        for what, work in (*ours, *bare) if number % 2 else (*bare, *ours):
            begin_s = time.perf_counter()
            work()
            if number >= 0:  # the first one warms up
                took_s = time.perf_counter() - begin_s
                self._samples.add(f"{self._name}_{what}_gbs", self._num_bytes / took_s / 1e9)
            if what == "get":
                self._check()
        self._memcpy(number)
        if number == 0:
            self._exist(names)
        self._forget(names)

    def _put(self, pages: Sequence[Page]) -> None:
        now_ms = int(time.time() * 1000)
        for at in range(0, len(pages), self._batch):
            statuses = put_sealed(
                self._way.store,
                pages[at : at + self._batch],
                self._layout,
                now_ms=now_ms,
                deadline=Deadline.after(_CALL_S),
            )
            if any(status is not Status.STORED for status in statuses):
                raise HeadwaterError(f"{self._name} did not store a page: {set(statuses)}")

    def _get(self, names: Sequence[PageName]) -> None:
        for at in range(0, len(names), self._batch):
            wanted = [(name, self._target.frame(at + i)) for i, name in enumerate(names[at : at + self._batch])]
            statuses = self._reader.get_into(wanted, deadline=Deadline.after(_CALL_S))
            if any(status is not Status.HIT for status in statuses):
                raise HeadwaterError(f"{self._name} did not give a page back: {set(statuses)}")

    def _in_batches(self, call: Callable[[Items], None], items: Items) -> None:
        for at in range(0, len(items), self._batch):
            call(items[at : at + self._batch])

    def _check(self) -> None:
        for at in (0, self._num_pages // 2, self._num_pages - 1):
            if self._target.payload(at) != self._source.payload(at):
                raise HeadwaterError(f"{self._name} gave back wrong bytes")
            self._target.payload(at)[:] = bytes(self._layout.page_bytes)

    def _memcpy(self, number: int) -> None:
        begin_s = time.perf_counter()
        for at in range(self._num_pages):
            self._target.payload(at)[:] = self._source.payload(at)
        if number >= 0:
            self._samples.add(f"{self._name}_memcpy_gbs", self._num_bytes / (time.perf_counter() - begin_s) / 1e9)

    def _exist(self, names: Sequence[PageName]) -> None:
        for count in _CHECKED:
            asked = [names[i % len(names)] for i in range(count)]
            for _ in range(_CHECKS):
                for what, call in self._checks(asked):
                    begin_s = time.perf_counter()
                    call()
                    self._samples.add(f"{self._name}_{what}_{count}", count / (time.perf_counter() - begin_s))

    def _checks(self, asked: list[PageName]) -> Iterator[tuple[str, Callable[[], object]]]:
        yield "checks", lambda: self._way.store.contains(asked, deadline=Deadline.after(_CALL_S))
        if self._way.bare is not None:
            bare = self._way.bare
            yield "bare_checks", lambda: bare.exist(asked)

    def _forget(self, names: Sequence[PageName]) -> None:
        """Make room: ours by the store, the bare client's as the pool does."""
        self._way.store.delete(names, deadline=Deadline.after(_CALL_S))
        if self._way.forget is not None:
            self._way.forget(names)

    def figures(self) -> dict[str, Any]:
        """The row."""
        found: dict[str, Any] = {"pages": self._num_pages, "bytes": self._num_bytes}
        for what in ("put", "get"):
            found[f"{what}_gbs"] = self._samples.median(f"{self._name}_{what}_gbs")
            found[f"{what}_memcpy_ratio"] = found[f"{what}_gbs"] / self._samples.median(f"{self._name}_memcpy_gbs")
            bare = f"{self._name}_bare_{what}_gbs"
            found[f"bare_{what}_gbs"] = self._samples.median(bare) if bare in self._samples.values else None
            found[f"{what}_ratio"] = (
                found[f"{what}_gbs"] / found[f"bare_{what}_gbs"] if found[f"bare_{what}_gbs"] else None
            )
        found["memcpy_gbs"] = self._samples.median(f"{self._name}_memcpy_gbs")
        for count in _CHECKED:
            for what in ("checks", "bare_checks"):
                name = f"{self._name}_{what}_{count}"
                found[f"{what}_per_s_{count}"] = self._samples.median(name) if name in self._samples.values else None
        return found


def run(options: PoolOptions, *, tell: Tell | None = None) -> BenchReport:
    """Measure. Blocks for minutes; starts servers on loopback and ends them. Raises HeadwaterError."""
    samples = Samples()
    rows: list[dict[str, Any]] = []
    total = len(options.stores) * len(options.page_kib) + 1
    for name in options.stores:
        for kib in options.page_kib:
            if tell is not None:
                tell(f"{name}, {kib} KiB", len(rows), total)
            rows.append({"store": name, "page_kib": kib, **_measure(name, kib, options, samples)})
    if tell is not None:
        tell("residency", total - 1, total)
    return BenchReport(
        command="bench pool",
        options={name: getattr(options, name) for name in options.__slots__},
        results={"rows": rows, **_lookups()},
        notes=_NOTES,
        samples=samples.values,
    )


def _measure(name: str, kib: int, options: PoolOptions, samples: Samples) -> dict[str, Any]:
    layout = opaque_layout([kib * 1024 // _NUM_PLANES] * _NUM_PLANES, block_tokens=64)
    num_bytes = max(options.round_mib << 20, options.batch_pages * layout.page_bytes)
    try:
        with open_way(name, 3 * num_bytes + (64 << 20)) as way:
            row = _PoolRow(way, layout, options, samples, f"{name}_{kib}")
            for number in range(-1, options.rounds):
                row.take(number)
            return row.figures()
    except NotHere as error:
        return {"skipped": str(error)}


def _lookups() -> dict[str, Any]:
    try:
        with redis_server(_LOOKUP_BYTES) as url:
            found = bench_lookups(url)
    except StoreUnavailable as error:
        return {"residency_skipped": str(error)}
    return {
        "residency_lookups_per_s": found.blocks_per_s,
        "residency_lookup_ms": found.lookup_ms,
        "residency_path_blocks": found.num_blocks,
        "residency_nodes": found.num_nodes,
        "residency_told_blocks_per_s": found.said_blocks_per_s,
    }
