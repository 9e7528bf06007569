"""LocalStore: directories that cannot be used, and what people ask of one."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from headwater import policy
from headwater.build import open_local, open_tier
from headwater.config.environment import default_directory
from headwater.config.stores import Durability, LocalStoreConfig
from headwater.core.errors import (
    InvalidConfig,
    ResourceClosed,
    StoreBusy,
    StoreError,
    StoreForked,
    StoreMismatch,
    StoreUnavailable,
)
from headwater.core.results import Status
from headwater.metrics import Metrics
from headwater.policy import Lru
from headwater.storage.base import Deadline
from headwater.storage.disabled import DisabledStore
from headwater.storage.local import directory
from headwater.storage.local.attach import destroy
from headwater.storage.local.records import RecordState
from headwater.testing.pages import sample_chain, sample_page
from headwater.testing.stores import put, soon
from kit import LIMIT, config, hits

# --- bad directories --------------------------------------------------------------------------------------------------


def test_a_new_directory_needs_a_limit(place: Path) -> None:
    with pytest.raises(StoreUnavailable, match="give limit_bytes"):
        open_local(config(place, limit_bytes=None))


def test_what_cannot_be_a_store_says_so_and_the_cache_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "store"
    file.write_text("not a directory")
    metrics = Metrics()
    store = open_tier(config(tmp_path), metrics=metrics)
    assert isinstance(store, DisabledStore)
    assert "cannot use" in store.reason
    page = sample_page(1)
    assert store.put([page.item], deadline=soon()) == [Status.FAILED]
    assert store.get_into([(page.name, page.buffer())], deadline=soon()) == [Status.MISS]
    assert store.contains([page.name], deadline=soon()) == [False]
    assert metrics.value("events_total", kind="tier_disabled") == 1
    store.close()
    with pytest.raises(ResourceClosed):
        store.contains([page.name], deadline=soon())


def test_a_full_file_system_is_told_at_the_door_and_leaves_nothing(place: Path) -> None:
    with pytest.raises(StoreUnavailable, match="choose a lower limit"):
        open_local(config(place, limit_bytes=1 << 50))
    assert not (place / "store" / directory.SLAB).exists()
    with open_local(config(place)) as store:
        assert put(store, [sample_page(1)]) == [Status.STORED]


def test_a_file_system_that_fills_up_meanwhile_is_told_too(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, start: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StoreUnavailable, match=r"cannot allocate .* No space left"):
        open_local(config(place))
    assert not (place / "store" / directory.SLAB).exists()


def test_a_directory_of_another_user_or_open_to_others_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store").chmod(0o777)
    with pytest.raises(StoreUnavailable, match="can be written by other users"):
        open_local(config(tmp_path))
    (tmp_path / "store").chmod(0o700)
    if os.geteuid() == 0:
        os.chown(tmp_path / "store", 12345, 12345)
        with pytest.raises(StoreUnavailable, match="belongs to user 12345"):
            open_local(config(tmp_path))


def test_another_version_is_refused_and_not_touched(place: Path) -> None:
    with open_local(config(place)) as store:
        put(store, [sample_page(1)])
    slab = place / "store" / directory.SLAB
    from headwater.storage.local import slab_header as slab_module

    original = slab_module.VERSION
    try:
        slab_module.VERSION = 3  # type: ignore[misc]
        before = slab.read_bytes()
        with pytest.raises(StoreUnavailable, match="written in format 2, this version reads 3"):
            open_local(config(place))
        assert slab.read_bytes() == before
    finally:
        slab_module.VERSION = original  # type: ignore[misc]
    with open_local(config(place)) as store:
        assert hits(store, [sample_page(1)]) == 1


def test_another_policy_is_refused(place: Path) -> None:
    with open_local(config(place)), pytest.raises(StoreMismatch, match="evicts by 'lru', 'best' was asked for"):
        open_local(config(place, policy="best"))


def test_a_directory_with_a_policy_of_another_version_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Later(Lru):
        name = "later"

    monkeypatch.setitem(policy._POLICIES, "later", Later)
    with open_local(config(place, policy="later")):
        pass
    monkeypatch.undo()
    with pytest.raises(StoreMismatch, match="another version of Headwater: no eviction policy 'later'"):
        open_local(config(place))


def test_an_unknown_policy_is_refused_before_anything_is_made(place: Path) -> None:
    with pytest.raises(InvalidConfig, match="there are: lru"):
        open_local(config(place, policy="fifo"))
    assert not (place / "store" / directory.SLAB).exists()


@pytest.mark.parametrize(
    "options",
    [
        {"limit_bytes": 1000},
        {"limit_bytes": 2e7},
        {"limit_bytes": "1GiB"},
        {"open_timeout_s": 0},
        {"open_timeout_s": float("nan")},
        {"open_timeout_s": "soon"},
        {"durability": "forever"},
        {"directory": 7},
    ],
)
def test_options_are_checked_at_the_door(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig):
        LocalStoreConfig(**{"directory": tmp_path, **options})


def test_plain_values_are_taken_for_what_they_say(tmp_path: Path) -> None:
    config = LocalStoreConfig(directory=str(tmp_path), durability="power")  # type: ignore[arg-type]
    assert config.durability is Durability.POWER
    assert config.directory == tmp_path
    assert default_directory({"HEADWATER_DIR": "/x"}) == Path("/x")
    assert default_directory({"XDG_CACHE_HOME": "/c"}) == Path("/c/headwater/store")


def test_power_safe_puts_are_synced(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    real = os.fdatasync

    def count(fd: int) -> None:
        synced.append(fd)
        real(fd)

    monkeypatch.setattr(os, "fdatasync", count)
    with open_local(config(place, durability="power")) as store:
        synced.clear()
        put(store, sample_chain(1, 3))
        assert len(synced) == 2  # the pages, before they are published; what publishes them, before they are STORED

        def fails(fd: int) -> None:
            raise OSError(errno.EIO, "input/output error")

        monkeypatch.setattr(os, "fdatasync", fails)
        assert put(store, sample_chain(2, 3)) == [Status.FAILED] * 3
        assert "cannot sync" in str(store.down)
        monkeypatch.undo()
        assert store.revive()
        assert hits(store, sample_chain(1, 3)) == 3
        assert hits(store, sample_chain(2, 3)) == 0


# --- destroy, usage ---------------------------------------------------------------------------------------------------


def test_destroy_only_when_nobody_is_inside(place: Path) -> None:
    with open_local(config(place)) as store:
        put(store, [sample_page(1)])
        with pytest.raises(StoreBusy, match="in use"):
            destroy(place / "store", deadline=Deadline.after(0.1))
    destroy(place / "store", deadline=soon())
    assert not (place / "store" / directory.SLAB).exists()
    with open_local(config(place, limit_bytes=2 * LIMIT)) as store:
        assert hits(store, [sample_page(1)]) == 0


def test_usage_names_identities_and_tenants(place: Path) -> None:
    tenant = b"t" * 16
    with open_local(config(place)) as store:
        put(store, sample_chain(1, 4))
        put(store, [sample_page(50 + i, tenant=tenant) for i in range(2)])
        store.label(sample_page(1).meta.identity, bytes(16), "a model", deadline=soon())
        usage = store.usage(deadline=soon())
        assert [(use.label, use.num_pages, use.num_tokens, use.max_depth) for use in usage] == [
            ("a model", 4, 64, 3),
            ("", 2, 32, 0),
        ]
        assert usage[1].tenant == tenant
        assert len(store.names(deadline=soon(), tenant=tenant)) == 2
        assert store.slots(deadline=soon())[RecordState.LIVE] == 6
        assert store.slots(deadline=soon())[RecordState.FREE] > 0


def test_prefaulting_and_creating_show_progress(shm: Path) -> None:
    seen: list[tuple[int, int]] = []
    with open_local(
        config(shm, limit_bytes=96 << 20, prefault=True), progress=lambda done, total: seen.append((done, total))
    ):
        pass
    assert len(seen) >= 4
    assert seen[0][0] < seen[0][1]
    assert seen[-1][0] == seen[-1][1]


def test_errors_share_one_root() -> None:
    assert issubclass(StoreForked, StoreError)
    assert issubclass(InvalidConfig, ValueError)
