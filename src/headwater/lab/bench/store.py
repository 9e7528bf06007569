"""`headwater bench store`: how fast pages rest and come back, in memory and on disk, beside the plain ways to do it.

One thread, steady churn (everyone is full, each put evicts), batches of 16, sources and targets larger than any CPU
cache. In each round all contenders are given the same new pages, and asked for the same live ones in the same random
order; the order of the contenders alternates, so that noise meets all alike. Figures are medians of rounds.

On disk a round begins with nothing of the file in the page cache, as in a store much larger than memory: write, sync,
evict, read, read again. `disk_*` are the write with its sync and the first read, `cached_*` the write without its sync
and the second read. What several readers bring (`readers.py`), and what `contains` and a restart cost in a store of
very many small pages, is taken afterwards.
"""

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from headwater.build import open_local
from headwater.config.stores import MOST_READERS, LocalStoreConfig
from headwater.core.errors import InvalidConfig, StoreDamaged, StoreError
from headwater.core.page import PageName
from headwater.lab.bench import readers
from headwater.lab.bench.contenders import (
    FilePerBlock,
    Ours,
    PlainFile,
    SealThenPut,
    StoreContender,
    evict,
    sync,
)
from headwater.lab.bench.pools import Page, Pool, endless, memcpy_gbs, seal_all
from headwater.lab.bench.report import BenchReport, Samples, Tell
from headwater.lab.bench.store_reopen import SMALL, reopen
from headwater.layout.frame import frame_bytes
from headwater.layout.spec import opaque_layout
from headwater.storage.local import directory
from headwater.storage.readers import default_readers
from headwater.storage.scratch import disk_root, limit_for, memory_root, num_slots

BATCH_PAGES: Final = 16
_NUM_PLANES: Final = 32  # one layer's key or value each, in a model of 16 layers
_BLOCK_TOKENS: Final = 64
_MIN_ROUNDS: Final = 5
_ROUND_BYTES: Final = 256 << 20
_SPOT_CHECKS: Final = 8
_COLD_SHARE: Final = 0.01  # of a file may stay in the page cache and we still call it cold

_IN_MEMORY: Final = ("", "put_", "files_")
_SIDES: Final = {
    "": "LocalStore, digests made in the timed path and checked on every byte read",
    "raw_": "LocalStore, frames sealed before and not verified",
    "plain_": "pwrite and pread of the same frames in one preallocated file, no digests",
    "plain_digested_": "the same pwrite and pread, digests made in the timed path and checked on every byte read",
}
_MOMENTS: Final = {
    "disk_write": "new pages over evicted ones, from an empty page cache until fdatasync returns (not of the index)",
    "disk_read": "random live pages, nothing of the file in the page cache",
    "cached_write": "the writes of disk_write before their fdatasync: in the page cache, not on the disk",
    "cached_read": "the reads of disk_read once more: from the page cache, not from the disk",
}
_RATIOS: Final = {
    "": ("", "plain_", "digests on our side only"),
    "_digests_both": ("", "plain_digested_", "digests on both sides"),
    "_digests_neither": ("raw_", "plain_", "digests on neither side"),
}
_NOTES: Final = {
    "memcpy_gbs": "random pages copied between two prefaulted pools, one thread, the faster of numpy and memoryview",
    "write_gbs": "LocalStore in memory: pages sealed straight into reserved slots, each write evicts; GB/s of payload",
    "read_gbs": "LocalStore in memory: random live pages through VerifiedStore, every byte digested",
    "put_write_gbs": "the same, but batches are sealed where they lie and then put: once more over the memory bus",
    "files_write_gbs": "one file per block in memory: same frames sealed, temporary file, rename, oldest unlinked",
    "files_read_gbs": "one file per block in memory: open, read, every byte digested",
    "cold_resident_share": "of the files' pages in the page cache when disk_read begins, the worst round (mincore)",
    "cold_read_slowdown": "cached_plain_read_gbs / disk_plain_read_gbs: well above 1, or the reads were not cold",
    "contains_us_per_key": "2,048 known keys per call, in the store with reopen_entries pages",
    "contains_miss_us_per_key": "2,048 unknown keys per call: one look at the index",
    "reopen_s": "opening a closed store with reopen_entries pages, until the first verified get has answered",
    "reopen_first_s": "the same, the first time after the store was made and filled",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """How much to measure. Directories are where temporary ones are made; None picks tmpfs and a disk."""

    directory: Path | None = None
    disk_directory: Path | None = None
    page_kib: int = 1024
    live_mib: int = 512
    pool_mib: int = 320
    entries: int = 100_000
    seconds: float = 40.0
    readers: int | None = None  # None: as many as a store has by default

    def __post_init__(self) -> None:
        """Refuse what cannot be measured."""
        if self.page_kib < 1 or self.entries < 1 or not 0 <= self.seconds <= 3600:
            raise InvalidConfig("--page-kib and --entries must be positive, --seconds from 0 to 3600")
        if self.readers is not None and not 1 <= self.readers <= MOST_READERS:
            raise InvalidConfig(f"--readers must be from 1 to {MOST_READERS}")
        for path in (self.directory, self.disk_directory):
            if path is not None and not path.is_dir():
                raise InvalidConfig(f"{path} is not a directory")
        if min(self.live_mib, self.pool_mib) * 1024 < 2 * BATCH_PAGES * self.page_kib:
            raise InvalidConfig(f"--live-mib and --pool-mib must hold {2 * BATCH_PAGES} pages of {self.page_kib} KiB")


def run(options: StoreOptions, *, tell: Tell | None = None) -> BenchReport:
    """Measure all of it. Blocks for `seconds` and what building takes; removes what it made. Raises HeadwaterError."""
    samples = Samples()
    memory = options.directory or memory_root((4 * options.live_mib << 20) + (64 << 20))
    disk = options.disk_directory or disk_root()
    facts = _churn(options, memory, disk, samples, tell)
    facts |= _readers(options, disk, samples, tell)
    notes = _notes() | readers.notes()
    if facts["cold_resident_share"] > _COLD_SHARE:
        notes["not_cold"] = f"{disk} keeps its files in memory: disk_read is no figure of a disk"
    need_bytes = _small_limit_bytes(options.entries)
    if directory.free_bytes(memory) < need_bytes:
        notes["skipped"] = f"reopen and contains: {options.entries} pages need {need_bytes} bytes in {memory}"
    else:
        with tempfile.TemporaryDirectory(prefix="headwater-bench-", dir=memory) as path:
            reopen(Path(path), num_entries=options.entries, limit_bytes=need_bytes, samples=samples, tell=tell)
    results = samples.medians()
    results["memcpy_gbs"] = max(results["memcpy_numpy_gbs"], results["memcpy_memoryview_gbs"])
    for name in _IN_MEMORY:
        for call in ("write", "read"):
            if f"{name}{call}_gbs" in results:
                results[f"{name}{call}_ratio"] = results[f"{name}{call}_gbs"] / results["memcpy_gbs"]
    results["cold_read_slowdown"] = results["cached_plain_read_gbs"] / results["disk_plain_read_gbs"]
    return BenchReport(
        command="bench store",
        options={name: str(value) if isinstance(value, Path) else value for name, value in asdict(options).items()},
        results={**results, **facts},
        notes=notes,
        samples=samples.values,
    )


def _readers(options: StoreOptions, disk: Path, samples: Samples, tell: Tell | None) -> dict[str, Any]:
    """What several readers bring, in a quarter of the time."""
    page_bytes = options.page_kib << 10
    if tell is not None:
        tell("reading with several threads", 0, 1)
    with tempfile.TemporaryDirectory(prefix="headwater-bench-", dir=disk) as path:
        return readers.measure_readers(
            Path(path),
            opaque_layout([page_bytes // _NUM_PLANES] * _NUM_PLANES, _BLOCK_TOKENS),
            num_pages=max(BATCH_PAGES, (options.pool_mib << 20) // page_bytes),
            num_readers=options.readers if options.readers is not None else default_readers(),
            seconds=options.seconds / 4,
            min_rounds=_MIN_ROUNDS,
            samples=samples,
        )


# --- churn ------------------------------------------------------------------------------------------------------------


class Churn:
    """New pages, the same for everyone, and which of the source's payloads each one is."""

    def __init__(self, source: Pool, target: Pool, *, seed: int) -> None:
        self._source = source
        self._target = target
        self._rng = np.random.default_rng(seed)
        self._metas = endless(source.layout, seed=seed, chain=BATCH_PAGES)
        self._origin: dict[PageName, int] = {}

    def new_pages(self, num_pages: int) -> list[list[Page]]:
        """Batches of sealed pages that nobody holds, at most as many as the source has."""
        pages: list[Page] = []
        for index in self._rng.permutation(self._source.num_pages)[:num_pages].tolist():
            meta = next(self._metas)
            self._origin[meta.name] = index
            pages.append((meta, self._source.frame(index)))
        seal_all(pages, self._source.layout)
        return [pages[i : i + BATCH_PAGES] for i in range(0, len(pages), BATCH_PAGES)]

    def live_pages(self, contenders: Sequence[StoreContender], num_pages: int) -> list[list[tuple[PageName, int]]]:
        """Batches of random pages that all of them hold, none twice, each with the target's frame it goes to."""
        names = list(self._origin)
        answers = zip(*(contender.held(names) for contender in contenders), strict=True)
        live = [name for name, held in zip(names, answers, strict=True) if all(held)]
        self._origin = {name: self._origin[name] for name in live}
        chosen = self._rng.permutation(len(live))[: min(num_pages, self._target.num_pages)].tolist()
        places = self._rng.permutation(self._target.num_pages)[: len(chosen)].tolist()
        pages = [(live[name], place) for name, place in zip(chosen, places, strict=True)]
        return [pages[i : i + BATCH_PAGES] for i in range(0, len(pages), BATCH_PAGES)]

    def read_s(self, contender: StoreContender, batches: list[list[tuple[PageName, int]]]) -> float:
        """Seconds to get these pages. Some are compared byte for byte: raises StoreDamaged."""
        looked_at = [page for batch in batches for page in batch][-_SPOT_CHECKS:]
        for _, place in looked_at:
            self._target.array(place)[:] = 0  # another contender may have left the right bytes there
        calls = [[(name, self._target.frame(place)) for name, place in batch] for batch in batches]
        begin_s = time.perf_counter()
        for call in calls:
            contender.get(call)
        taken_s = time.perf_counter() - begin_s
        for name, place in looked_at:
            if self._target.payload(place) != self._source.payload(self._origin[name]):
                raise StoreDamaged(f"{type(contender).__name__} gave back wrong bytes for {name.hex()}")
        return taken_s


def _churn(options: StoreOptions, memory: Path, disk: Path, samples: Samples, tell: Tell | None) -> dict[str, Any]:
    """Rounds until the time is over. Return what is not a figure of rounds."""
    page_bytes = options.page_kib << 10
    layout = opaque_layout([page_bytes // _NUM_PLANES] * _NUM_PLANES, _BLOCK_TOKENS)
    source, target = (Pool(layout, (options.pool_mib << 20) // page_bytes) for _ in range(2))
    source.fill(seed=0)
    churn = Churn(source, target, seed=0)
    rng = np.random.default_rng(2)
    live_pages = (options.live_mib << 20) // page_bytes
    num_pages = min(source.num_pages, live_pages // 2, max(BATCH_PAGES, _ROUND_BYTES // page_bytes))
    shares: list[float] = []
    with (
        tempfile.TemporaryDirectory(prefix="headwater-bench-", dir=memory) as in_memory,
        tempfile.TemporaryDirectory(prefix="headwater-bench-", dir=disk) as on_disk,
        _contenders(source, churn, live_pages, Path(in_memory), Path(on_disk), tell) as contenders,
    ):
        begin_s = time.perf_counter()
        while len(shares) < _MIN_ROUNDS or time.perf_counter() - begin_s < options.seconds:
            if tell is not None:
                tell("measuring", int(time.perf_counter() - begin_s), max(1, int(options.seconds)))
            for name, gbs in memcpy_gbs(source, target, num_pages=num_pages, rng=rng).items():
                samples.add(name, gbs)
            turn = contenders if len(shares) % 2 else contenders[::-1]
            shares.append(_round(churn, turn, num_pages, page_bytes, samples))
    for moment in _MOMENTS:
        for suffix, sides in _RATIOS.items():
            pairs = [samples.values[_figure(moment, side)] for side in sides[:2]]
            for ours_gbs, plain_gbs in zip(*pairs, strict=True):
                samples.add(f"{moment}_ratio{suffix}", ours_gbs / plain_gbs)
    return {
        "cold_resident_share": max(shares),
        "num_rounds": len(shares),
        "num_planes": _NUM_PLANES,
        "batch_pages": BATCH_PAGES,
        "round_pages": num_pages,
        "reopen_entries": options.entries,
        "memory_medium": "tmpfs" if directory.is_memory(memory) else "disk",
        "disk_medium": "tmpfs" if directory.is_memory(disk) else "disk",
    }


@contextmanager
def _contenders(
    source: Pool, churn: Churn, live_pages: int, in_memory: Path, on_disk: Path, tell: Tell | None
) -> Iterator[list[tuple[str, StoreContender]]]:
    """Open every contender, each in a room of its own, and fill it, so that from here on each put evicts."""
    layout = source.layout
    limit_bytes = limit_for(frame_bytes=source.frame_bytes, num_pages=live_pages)
    with ExitStack() as stack:
        stores = [
            stack.enter_context(
                open_local(LocalStoreConfig(directory=path, limit_bytes=limit_bytes, prefault=True, readers=1))
            )
            for path in (in_memory / "slab", in_memory / "put", on_disk / "slab", on_disk / "raw")
        ]
        fast, whole, slow, raw = stores
        plain, digested = (
            stack.enter_context(PlainFile(on_disk / name, layout, max_pages=live_pages, digests=name == "digested"))
            for name in ("plain", "digested")
        )
        contenders: list[tuple[str, StoreContender]] = [
            ("", Ours(fast, layout)),
            ("put_", SealThenPut(whole, layout)),
            ("files_", FilePerBlock(in_memory / "files", layout, max_pages=live_pages)),
            ("plain_", plain),
            ("", Ours(slow, layout, file=on_disk / "slab" / directory.SLAB)),
            ("plain_digested_", digested),
            ("raw_", Ours(raw, layout, digests=False, file=on_disk / "raw" / directory.SLAB)),
        ]
        capacity = num_slots(limit_bytes, source.frame_bytes) + BATCH_PAGES
        for done in range(0, capacity, source.num_pages):
            if tell is not None:
                tell("filling", done, capacity)
            batches = churn.new_pages(min(source.num_pages, capacity - done))
            for _, contender in contenders:
                for batch in batches:
                    contender.put(batch)
        for store in stores:
            if not store.metrics.value("local_evicted_pages_total"):
                raise StoreError(f"the store in {store.config.directory} is not full: this would be no churn")
        yield contenders


def _round(
    churn: Churn, contenders: Sequence[tuple[str, StoreContender]], num_pages: int, page_bytes: int, samples: Samples
) -> float:
    """Everyone writes the same pages, then everyone reads the same. Return how much of a file was still cached."""
    new = churn.new_pages(num_pages)
    for name, contender in contenders:
        if contender.file is not None:
            evict(contender.file)
        begin_s = time.perf_counter()
        for batch in new:
            contender.put(batch)
        put_s = time.perf_counter() - begin_s
        if contender.file is None:
            samples.add(f"{name}write_gbs", _gbs(num_pages * page_bytes, put_s))
        else:
            sync(contender.file)
            synced_s = time.perf_counter() - begin_s
            samples.add(_figure("cached_write", name), _gbs(num_pages * page_bytes, put_s))
            samples.add(_figure("disk_write", name), _gbs(num_pages * page_bytes, synced_s))
    readers = [(name, contender) for name, contender in contenders if not isinstance(contender, SealThenPut)]
    live = churn.live_pages([contender for _, contender in readers], num_pages)
    num_bytes = sum(map(len, live)) * page_bytes
    shares = [0.0]
    for name, contender in readers:
        if contender.file is None:
            samples.add(f"{name}read_gbs", _gbs(num_bytes, churn.read_s(contender, live)))
        else:
            shares.append(evict(contender.file))
            for moment in ("disk_read", "cached_read"):
                samples.add(_figure(moment, name), _gbs(num_bytes, churn.read_s(contender, live)))
    return max(shares)


def _figure(moment: str, side: str) -> str:
    medium, call = moment.split("_")
    return f"{medium}_{side}{call}_gbs"


def _notes() -> dict[str, str]:
    notes = dict(_NOTES)
    for moment, how in _MOMENTS.items():
        for side, who in _SIDES.items():
            notes[_figure(moment, side)] = f"{how}: {who}"
        for suffix, (ours, plain, what) in _RATIOS.items():
            notes[f"{moment}_ratio{suffix}"] = f"{what}: {_figure(moment, ours)} / {_figure(moment, plain)}, by rounds"
    return notes


def _gbs(num_bytes: int, seconds: float) -> float:
    return num_bytes / seconds / 1e9


def _small_limit_bytes(num_entries: int) -> int:
    return limit_for(frame_bytes=frame_bytes(SMALL.plane_bytes), num_pages=num_entries)
