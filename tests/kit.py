"""What the tests of LocalStore share: a small store, large pages, and how many of them are hit."""

from pathlib import Path

from headwater.config import LocalStoreConfig
from headwater.storage.base import GetStatus
from headwater.storage.local import LocalStore
from headwater.testing.pages import SamplePage
from headwater.testing.stores import read

LIMIT = 8 << 20
BIG = (100_000, 7)  # two pages an extent, 32 in all


def config(path: Path, **options: object) -> LocalStoreConfig:
    return LocalStoreConfig(directory=path / "store", **{"limit_bytes": LIMIT, **options})  # type: ignore[arg-type]


def hits(store: LocalStore, pages: list[SamplePage]) -> int:
    return read(store, pages).count(GetStatus.HIT)
