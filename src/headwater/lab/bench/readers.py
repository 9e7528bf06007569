"""What several readers bring: pages of a LocalStore on a disk, beside bare threads that read the same frames.

Part of `headwater bench store`. In each round everybody reads the same pages in the same random order, once with
nothing of its file in the page cache and once with all of it; who begins alternates. *Bare* threads call `preadv` for
whole frames in one preallocated file, and nothing else. *Verified* is `VerifiedStore`: every byte digested. *Fetched*
are pages whose headers were checked and whose bytes are digested by who uses them, as loads to a device do. The time of
processors is taken too: on a machine that has other work it is the steadier figure.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from headwater.build import open_local
from headwater.config.stores import LocalStoreConfig
from headwater.core.errors import StoreDamaged, StoreError
from headwater.core.results import Status
from headwater.lab.bench.contenders import CALL_S, evict, require
from headwater.lab.bench.pools import IDENTITY, Page, Pool, Wanted, endless, seal_all
from headwater.lab.bench.report import Samples
from headwater.layout.spec import KVLayout
from headwater.storage.base import Deadline
from headwater.storage.local import LocalStore, directory
from headwater.storage.scratch import limit_for
from headwater.storage.verified import VerifiedStore

_CALL_BYTES: Final = 64 << 20  # that one call asks for, as the executor's do
_CHAIN: Final = 16
_SPOT_CHECKS: Final = 4
_MOMENTS: Final = ("cold", "warm")

Read = Callable[[Sequence[Wanted]], None]

NOTES: Final = {
    "readers_MOMENT_bare_one_gbs": "one thread that calls preadv for whole frames",
    "readers_MOMENT_bare_all_gbs": "num_readers such threads",
    "readers_MOMENT_verified_one_gbs": "LocalStore with one reader, every byte digested",
    "readers_MOMENT_verified_all_gbs": "LocalStore with num_readers, every byte digested",
    "readers_MOMENT_fetched_all_gbs": "LocalStore with num_readers, headers checked: who uses the bytes digests them",
    "readers_MOMENT_verified_ratio": "verified_all / bare_all, by rounds",
    "readers_MOMENT_fetched_ratio": "fetched_all / bare_all, by rounds",
    "readers_MOMENT_speedup": "verified_all / verified_one, by rounds",
    "readers_MOMENT_verified_cpu_ratio": "processor time of bare_all / that of verified_all, by rounds",
    "readers_MOMENT_fetched_cpu_ratio": "processor time of bare_all / that of fetched_all, by rounds",
}


def measure_readers(
    path: Path, layout: KVLayout, *, num_pages: int, num_readers: int, seconds: float, min_rounds: int, samples: Samples
) -> dict[str, Any]:
    """Rounds until the time is over, in an empty directory. Blocks. Returns what is no figure of rounds."""
    source, target = Pool(layout, num_pages), Pool(layout, num_pages)
    source.fill(seed=3)
    metas = endless(layout, seed=3, chain=_CHAIN)
    pages: list[Page] = [(next(metas), source.frame(i)) for i in range(num_pages)]
    seal_all(pages, layout)
    rng = np.random.default_rng(3)
    num_rounds = 0
    with _sides(path, layout, pages, num_readers) as (bare, stores):
        sides: list[tuple[str, Path, Read]] = [
            ("bare_one", bare.file, lambda wanted: bare.read(wanted, 1)),
            ("bare_all", bare.file, lambda wanted: bare.read(wanted, num_readers)),
            *(
                (f"verified_{which}", _file(store), _verified(store, layout))
                for which, store in zip(("one", "all"), stores, strict=True)
            ),
            ("fetched_all", _file(stores[1]), _fetched(stores[1], layout)),
        ]
        begin_s = time.perf_counter()
        while num_rounds < min_rounds or time.perf_counter() - begin_s < seconds:
            order = rng.permutation(num_pages).tolist()
            wanted = [(pages[i][0].name, target.frame(place)) for place, i in enumerate(order)]
            for name, file, read in sides if num_rounds % 2 else sides[::-1]:
                evict(file)
                for moment in _MOMENTS:
                    for place in range(_SPOT_CHECKS):
                        target.array(place)[:] = 0
                    _time(f"readers_{moment}_{name}", read, wanted, num_pages * source.page_bytes, samples)
                    for place in range(_SPOT_CHECKS):
                        if target.payload(place) != source.payload(order[place]):
                            raise StoreDamaged(f"{name} gave back wrong bytes")
            num_rounds += 1
    for moment in _MOMENTS:
        _ratios(f"readers_{moment}", samples)
    return {"num_readers": num_readers, "num_reader_rounds": num_rounds, "reader_pages": num_pages}


def notes() -> dict[str, str]:
    """What the figures are."""
    how = {"cold": "nothing of the file in the page cache", "warm": "all of it in the page cache"}
    return {
        name.replace("MOMENT", moment): f"{note}; {how[moment]}" for moment in _MOMENTS for name, note in NOTES.items()
    }


class BareFile:
    """Frames back to back in one file, and threads that read them."""

    def __init__(self, file: Path, pages: Sequence[Page]) -> None:
        self.file = file
        self._fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        stride = -(-len(pages[0][1]) // 4096) * 4096
        os.posix_fallocate(self._fd, 0, stride * len(pages))
        self._offsets = {meta.name: i * stride for i, (meta, _) in enumerate(pages)}
        for meta, frame in pages:
            if os.pwrite(self._fd, frame, self._offsets[meta.name]) != len(frame):
                raise StoreError(f"{file} was not written whole")
        os.fdatasync(self._fd)

    def read(self, wanted: Sequence[Wanted], num_threads: int) -> None:
        """Every thread reads its share, and nothing else."""

        def work(mine: Sequence[Wanted]) -> None:
            for name, frame in mine:
                done, offset = 0, self._offsets[name]
                while done < len(frame):
                    done += os.preadv(self._fd, [frame[done:]], offset + done)

        others = [threading.Thread(target=work, args=(wanted[i::num_threads],)) for i in range(1, num_threads)]
        for thread in others:
            thread.start()
        work(wanted[::num_threads])
        for thread in others:
            thread.join()

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


@contextmanager
def _sides(
    path: Path, layout: KVLayout, pages: Sequence[Page], num_readers: int
) -> Iterator[tuple[BareFile, tuple[LocalStore, LocalStore]]]:
    """The bare file, and stores with one reader and with all."""
    limit_bytes = limit_for(frame_bytes=len(pages[0][1]), num_pages=len(pages))
    configs = [
        LocalStoreConfig(directory=path / name, limit_bytes=limit_bytes, readers=readers)
        for name, readers in (("one", 1), ("all", num_readers))
    ]
    bare = BareFile(path / "bare", pages)
    try:
        with open_local(configs[0]) as one, open_local(configs[1]) as several:
            for store in (one, several):
                frames = [(meta.name, frame) for meta, frame in pages]
                require(store.put(frames, deadline=Deadline.after(CALL_S)), Status.STORED)
            yield bare, (one, several)
    finally:
        bare.close()


def _file(store: LocalStore) -> Path:
    return store.config.directory / directory.SLAB


def _calls(wanted: Sequence[Wanted]) -> Iterator[Sequence[Wanted]]:
    num_pages = max(1, _CALL_BYTES // len(wanted[0][1]))
    for start in range(0, len(wanted), num_pages):
        yield wanted[start : start + num_pages]


def _verified(store: LocalStore, layout: KVLayout) -> Read:
    reader = VerifiedStore(store, identity=IDENTITY, plane_bytes=layout.plane_bytes)

    def read(wanted: Sequence[Wanted]) -> None:
        for call in _calls(wanted):
            require(reader.get_into(call, deadline=Deadline.after(CALL_S)), Status.HIT)

    return read


def _fetched(store: LocalStore, layout: KVLayout) -> Read:
    reader = VerifiedStore(store, identity=IDENTITY, plane_bytes=layout.plane_bytes)

    def read(wanted: Sequence[Wanted]) -> None:
        for call in _calls(wanted):
            found = reader.fetch(call, deadline=Deadline.after(CALL_S))
            require([one for one in found if isinstance(one, Status)], Status.HIT)  # none that is a status

    return read


def _time(name: str, read: Read, wanted: Sequence[Wanted], num_bytes: int, samples: Samples) -> None:
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    read(wanted)
    taken_s, taken_cpu_s = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
    samples.add(f"{name}_gbs", num_bytes / taken_s / 1e9)
    samples.add(f"{name}_cpu_us_per_mib", taken_cpu_s * 1e6 / (num_bytes / (1 << 20)))


def _ratios(prefix: str, samples: Samples) -> None:
    pairs = {
        "verified_ratio": ("verified_all_gbs", "bare_all_gbs"),
        "fetched_ratio": ("fetched_all_gbs", "bare_all_gbs"),
        "speedup": ("verified_all_gbs", "verified_one_gbs"),
        "verified_cpu_ratio": ("bare_all_cpu_us_per_mib", "verified_all_cpu_us_per_mib"),
        "fetched_cpu_ratio": ("bare_all_cpu_us_per_mib", "fetched_all_cpu_us_per_mib"),
    }
    for name, (over, under) in pairs.items():
        values = zip(samples.values[f"{prefix}_{over}"], samples.values[f"{prefix}_{under}"], strict=True)
        for first, second in values:
            samples.add(f"{prefix}_{name}", first / second)
