"""What the tests of LocalStore share: a small store, large pages, and how many of them are hit."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headwater.config.stores import LocalStoreConfig
from headwater.core.results import Status
from headwater.storage.base import Deadline
from headwater.storage.local import LocalStore
from headwater.storage.local.directory import SLAB
from headwater.storage.local.geometry import Geometry
from headwater.storage.local.locks import SlabLocks
from headwater.testing.pages import SamplePage
from headwater.testing.stores import read

LIMIT = 8 << 20
BIG = (200_000, 7)  # two pages an extent, 32 in all


def config(path: Path, **options: object) -> LocalStoreConfig:
    return LocalStoreConfig(directory=path / "store", **{"limit_bytes": LIMIT, **options})  # type: ignore[arg-type]


def lose_records(path: Path) -> None:
    """Destroy what the index of a closed store says of its slots."""
    geometry = Geometry.plan(LIMIT)
    with (path / "store" / SLAB).open("r+b") as slab:
        slab.seek(geometry.records_at)
        slab.write(bytes(geometry.uses_at - geometry.records_at))


@contextmanager
def changing(path: Path) -> Iterator[None]:
    """As a process that is stopped while it changes the index: the lock is held, and nothing happens."""
    fd = os.open(path / "store" / SLAB, os.O_RDWR)
    try:
        assert SlabLocks(fd).begin_writing(Deadline.after(20.0))
        yield
    finally:
        os.close(fd)


def hits(store: LocalStore, pages: list[SamplePage]) -> int:
    return read(store, pages).count(Status.HIT)
