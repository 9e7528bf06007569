"""The benchmarks: that they measure what they say and check what they read. Never how fast."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headwater.build import open_local
from headwater.config.stores import LocalStoreConfig
from headwater.core.errors import InvalidConfig, StoreDamaged, StoreError
from headwater.core.keys import block_keys
from headwater.core.page import PageName
from headwater.lab.bench import index, placement, store
from headwater.lab.bench.contenders import FilePerBlock, Ours, PlainFile, SealThenPut, StoreContender, evict, sync
from headwater.lab.bench.pools import Page, Pool
from headwater.lab.bench.report import BenchReport
from headwater.lab.bench.store import BATCH_PAGES, Churn
from headwater.layout.frame import frame_bytes
from headwater.layout.spec import opaque_layout
from headwater.storage.local import directory
from headwater.storage.scratch import disk_root, limit_for, memory_root, num_slots

PAGE = 32 << 10
TINY: dict[str, Any] = {"page_kib": 32, "live_mib": 4, "pool_mib": 4, "entries": 300, "seconds": 0.0}


def pools(num_pages: int = 48) -> tuple[Pool, Pool]:
    layout = opaque_layout([PAGE // 4] * 4, block_tokens=64)
    source, target = (Pool(layout, num_pages) for _ in range(2))
    source.fill(seed=0)
    return source, target


def put(contenders: list[StoreContender], batches: list[list[Page]]) -> None:
    for contender in contenders:
        for batch in batches:
            contender.put(batch)


def assert_sane(report: BenchReport) -> None:
    document = report.document()
    assert set(document) == {"command", "date", "machine", "options", "notes", "samples", *report.results}
    assert document["machine"]["num_cores"] >= 1
    assert document["machine"]["cpu"]
    assert document["machine"]["python"]
    assert set(document["samples"]) <= set(report.results)
    for name in report.results:
        value = document[name]
        zero = name == "cold_resident_share" and value == 0
        assert isinstance(value, str) or zero or (math.isfinite(value) and value > 0), name


def test_index() -> None:
    report = index.run(num_tokens=4096, block_tokens=64, rounds=3)
    assert_sane(report)
    assert {"hash_ms", "hashlib_ms", "ratio", "hash_list_ms", "hash_extras_ms", "hash_best_ms"} <= set(report.results)
    assert report.results["num_keys"] == 64
    assert len(report.samples["hash_ms"]) == 3


@pytest.mark.parametrize("options", [{"num_tokens": 63}, {"block_tokens": 0}, {"rounds": 0}])
def test_index_refuses_nonsense(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig):
        index.run(**options)


def test_index_sees_a_wrong_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "block_keys", lambda tokens, **options: block_keys(tokens, **options)[::-1])
    with pytest.raises(Exception, match="documented"):
        index.run(num_tokens=256, rounds=1)


def test_placement() -> None:
    """In simulated time, so the figures are the same everywhere: these are bounds that a worse rule would break."""
    report = placement.run(seeds=1)
    found = report.results
    assert 1.0 <= found["steady_ratio"] <= 1.02
    assert found["ratio"] <= 1.04
    assert found["random_ratio"] <= 1.12
    assert found["ratio"] < min(found["always_load"], found["always_compute"])
    assert found["found_s"] <= 60.0
    assert max(value for name, value in found.items() if name.startswith("meet_") and "ratio" in name) <= 0.8
    assert found["right"] is (found["meet_ratio_worst"] <= 1.02)
    assert all(name in report.notes or name.startswith("meet_") for name in found)


@pytest.mark.parametrize("options", [{"num_requests": 0}, {"num_requests": 1500}, {"seeds": 0}])
def test_placement_refuses_nonsense(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig):
        placement.run(**options)


def test_store(tmp_path: Path, shm: Path) -> None:
    told: list[tuple[str, int, int]] = []
    options = store.StoreOptions(directory=shm, disk_directory=tmp_path, **TINY)
    report = store.run(options, tell=lambda *what: told.append(what))
    assert_sane(report)
    wanted = {"memcpy_gbs", "write_gbs", "read_gbs", "write_ratio", "read_ratio", "put_write_gbs"}
    wanted |= {"files_write_gbs", "files_read_gbs", "cold_resident_share", "cold_read_slowdown"}
    for moment in ("disk_write", "disk_read", "cached_write", "cached_read"):
        ratios = {f"{moment}_ratio{which}" for which in ("", "_digests_both", "_digests_neither")}
        wanted |= ratios
        assert all(len(report.samples[name]) == report.results["num_rounds"] >= 5 for name in ratios)
    wanted |= {"contains_us_per_key", "reopen_s", "reopen_entries"}
    assert wanted <= set(report.results)
    assert report.results["memory_medium"] == "tmpfs"
    if report.results["disk_medium"] == "disk":
        assert report.results["cold_resident_share"] < 0.01
        assert set(report.notes) <= set(report.results), "notes of figures, and no other"
    assert {stage for stage, _, _ in told} >= {"filling", "measuring", "reopening"}
    assert not list(shm.iterdir())
    assert not list(tmp_path.iterdir())


def test_store_skips_what_has_no_room(tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_small_limit_bytes", lambda num_entries: 1 << 62)
    options = store.StoreOptions(directory=shm, disk_directory=tmp_path, **TINY)
    report = store.run(options)
    assert "reopen_s" not in report.results
    assert "300 pages need" in report.notes["skipped"]


def test_store_says_when_the_disk_is_none(shm: Path) -> None:
    report = store.run(store.StoreOptions(directory=shm, disk_directory=shm, **TINY))
    assert report.results["disk_medium"] == "tmpfs"
    assert report.results["cold_resident_share"] == 1
    assert "no figure of a disk" in report.notes["not_cold"]


def test_an_evicted_file_is_on_the_disk_and_nowhere_else(tmp_path: Path) -> None:
    if directory.is_memory(tmp_path):
        pytest.skip("needs a disk")
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 4096)
    sync(path)
    assert evict(path) == 0
    assert path.read_bytes() == bytes(range(256)) * 4096


@pytest.mark.parametrize(
    "options", [{"page_kib": 0}, {"entries": 0}, {"seconds": -1.0}, {"live_mib": 1}, {"pool_mib": 1}]
)
def test_store_refuses_nonsense(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig):
        store.StoreOptions(**options)


def test_every_contender_keeps_its_room_and_its_bytes(tmp_path: Path, shm: Path) -> None:
    source, target = pools()
    layout = source.layout
    limit = limit_for(frame_bytes=source.frame_bytes, num_pages=64)
    capacity = num_slots(limit, source.frame_bytes)
    with (
        open_local(LocalStoreConfig(directory=shm / "slab", limit_bytes=limit)) as fast,
        open_local(LocalStoreConfig(directory=shm / "put", limit_bytes=limit)) as whole,
        open_local(LocalStoreConfig(directory=tmp_path / "slab", limit_bytes=limit)) as slow,
        PlainFile(tmp_path / "plain", layout, max_pages=64, digests=False) as plain,
        PlainFile(tmp_path / "digested", layout, max_pages=64, digests=True) as digested,
    ):
        contenders: list[StoreContender] = [
            Ours(fast, layout),
            SealThenPut(whole, layout),
            Ours(slow, layout, digests=False),
            FilePerBlock(shm / "files", layout, max_pages=64),
            digested,
            plain,
        ]
        churn = Churn(source, target, seed=0)
        written: list[PageName] = []
        while len(written) < capacity + BATCH_PAGES:
            batches = churn.new_pages(32)
            written += [meta.name for batch in batches for meta, _ in batch]
            put(contenders, batches)
        live = churn.live_pages(contenders, 32)
        names = [name for batch in live for name, _ in batch]
        assert len(set(names)) == len(names) == 32, "none twice: the second read would not be cold"
        for contender in contenders:
            assert churn.read_s(contender, live) > 0
            assert sum(contender.held(written)) <= capacity


def test_churn_sees_wrong_bytes(tmp_path: Path) -> None:
    source, target = pools()
    churn = Churn(source, target, seed=0)
    with PlainFile(tmp_path / "plain", source.layout, max_pages=64, digests=True) as plain:
        put([plain], churn.new_pages(48))
        live = churn.live_pages([plain], 16)
        churn.read_s(plain, live)
        with pytest.raises(StoreDamaged):
            churn.read_s(Forgetful(source.layout), live)
        first, second = [name for name, _ in live[0]][:2]
        plain._places[first], plain._places[second] = plain._places[second], plain._places[first]
        with pytest.raises(StoreError, match="other bytes"):
            churn.read_s(plain, live)
        source.fill(seed=1)
        plain.digests = False
        with pytest.raises(StoreDamaged):
            churn.read_s(plain, live)


class Forgetful(StoreContender):
    """Reads nothing, and hopes that the right bytes are still there from somebody else's read."""

    def put(self, pages: list[Page]) -> None:
        raise NotImplementedError

    def get(self, pages: list[tuple[PageName, memoryview]]) -> None:
        pass

    def held(self, names: Sequence[PageName]) -> list[bool]:
        raise NotImplementedError


def test_limits_hold_what_they_promise(tmp_path: Path) -> None:
    for size, num_pages in ((frame_bytes([588]), 64), (frame_bytes([1 << 20]), 17), (frame_bytes([4096]), 5000)):
        limit = limit_for(frame_bytes=size, num_pages=num_pages)
        assert num_slots(limit, size) >= num_pages
    with pytest.raises(ValueError, match="a frame has"):
        limit_for(frame_bytes=2 << 30, num_pages=1)
    assert memory_root(1).is_dir()
    assert memory_root(1 << 62).is_dir()
    assert disk_root().is_dir()


def test_pools_are_page_aligned() -> None:
    source, _ = pools(2)
    assert source.array(1).ctypes.data % 4096 == 0
