"""How full a store is: what it says follows what is in it, through wrappers too, and costs no look at the disk."""

from pathlib import Path

from headwater.build import open_local
from headwater.config.stores import LocalStoreConfig
from headwater.core.results import Status
from headwater.storage.base import Deadline, Store
from headwater.storage.disabled import DisabledStore
from headwater.storage.local import LocalStore
from headwater.storage.memory import MemoryStore
from headwater.storage.wrappers import OpaqueStore
from headwater.testing.pages import sample_chain

LIMIT_BYTES = 8 << 20


def soon() -> Deadline:
    return Deadline.after(30.0)


def check(store: Store, num_pages: int, slot_bytes: int) -> None:
    pages = sample_chain(1, num_pages)
    empty = store.fill()
    assert empty is not None
    assert empty == (0, LIMIT_BYTES)
    assert (
        store.put([(page.name, memoryview(page.frame)) for page in pages], deadline=soon())
        == [Status.STORED] * num_pages
    )
    full = store.fill()
    assert full is not None
    assert full.used_bytes == num_pages * slot_bytes
    assert OpaqueStore(store).fill() == full
    assert store.delete([pages[-1].name], deadline=soon()) == [Status.REMOVED]
    less = store.fill()
    assert less is not None
    assert less.used_bytes == (num_pages - 1) * slot_bytes


def test_memory() -> None:
    with MemoryStore(LIMIT_BYTES) as store:
        check(store, 5, len(sample_chain(1, 1)[0].frame))


def test_local(place: Path) -> None:
    frame_bytes = len(sample_chain(1, 1)[0].frame)
    slot_bytes = -(-frame_bytes // 4096) * 4096
    with open_local(LocalStoreConfig(directory=place / "store", limit_bytes=LIMIT_BYTES)) as store:
        check(store, 5, slot_bytes)


def test_another_process_s_pages_count_once_they_were_seen(tmp_path: Path) -> None:
    config = LocalStoreConfig(directory=tmp_path / "store", limit_bytes=LIMIT_BYTES)
    page = sample_chain(1, 1)[0]
    with LocalStore(config) as one, LocalStore(config) as other:
        assert one.put([(page.name, memoryview(page.frame))], deadline=soon()) == [Status.STORED]
        assert other.contains([page.name], deadline=soon()) == [True]
        assert other.fill() == one.fill()


def test_who_knows_no_sizes_says_so(tmp_path: Path) -> None:
    assert DisabledStore("a test").fill() is None
    config = LocalStoreConfig(directory=tmp_path / "store", limit_bytes=LIMIT_BYTES)
    with open_local(config, only_probes=True) as names:
        assert names.fill() is None
