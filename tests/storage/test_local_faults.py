"""LocalStore: what an outside attack found, each with the way it was found. docs/FAULTS.md has the list.

Nothing here looks inside: these tests run, and fail, on the code that was attacked (see `test_local_index.py` for what
needs to look).
"""

import errno
import hashlib
import os
import shutil
import signal
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from xxhash import xxh3_64_intdigest

from headwater.build import open_local
from headwater.config.stores import LocalStoreConfig
from headwater.core.errors import StoreError, StoreForked, StoreUnavailable
from headwater.core.page import PageName
from headwater.core.results import Status
from headwater.layout.frame import PageMeta, frame_bytes, header_bytes, parse, seal, seal_into
from headwater.layout.spec import opaque_layout
from headwater.storage.base import Addressable, Deadline, Reservation
from headwater.storage.local import writing
from headwater.storage.verified import VerifiedStore
from headwater.testing.pages import IDENTITY, PLANE_BYTES, SEALED_AT_MS, sample_chain, sample_page
from headwater.testing.stores import put, read, soon
from kit import BIG, LIMIT, config, hits
from machines.processes import Helper

SLAB = "slab"
GRACE_S = 0.25


def in_child(work: Callable[[], bool]) -> int:
    """Fork, and say whether `work` was right there; 9 if it raised, by the name in the output."""
    pid = os.fork()
    if pid == 0:  # pragma: no cover  the child reports through its exit code
        code = 9
        try:
            code = 0 if work() else 1
        except BaseException as error:  # noqa: BLE001  told by the exit code
            sys.stderr.write(repr(error))
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# --- A1: wrong bytes --------------------------------------------------------------------------------------------------


@pytest.mark.fault("A1")
def test_a_digest_is_made_of_the_private_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process writes into the same slot while we seal: the digests are of what we had, so a mixture fails."""
    layout = opaque_layout(PLANE_BYTES, 16)
    page = sample_page(1)
    start = header_bytes(len(PLANE_BYTES))
    slot = memoryview(bytearray(len(page.frame)))

    def disturbed(*args: Any, **options: Any) -> int:
        slot[start + 5000] = page.frame[start + 5000] ^ 0xFF
        return xxh3_64_intdigest(*args, **options)

    monkeypatch.setattr("headwater.layout.digest.xxh3_64_intdigest", disturbed)
    seal_into(slot, memoryview(bytearray(page.frame)), page.meta, layout, now_ms=SEALED_AT_MS)
    monkeypatch.undo()
    header = parse(slot)
    assert header == parse(memoryview(page.frame))


@pytest.mark.fault("A1")
def test_a_tail_is_sealed_from_the_private_source_too() -> None:
    layout = opaque_layout(PLANE_BYTES, 16)
    full = sample_page(2)
    with pytest.raises(ValueError, match="axis"):  # opaque planes have no tokens: their tails are refused before a copy
        seal_into(
            memoryview(bytearray(len(full.frame))),
            memoryview(bytearray(full.frame)),
            PageMeta(key=full.meta.key, identity=IDENTITY, parent=full.meta.parent, depth=0, valid_tokens=3),
            layout,
            now_ms=1,
        )


@pytest.mark.fault("A1")
def test_a_fork_a_close_and_a_third_process_share_one_index(shm: Path, helper: Callable[[], Helper]) -> None:
    store = open_local(config(shm))
    put(store, [sample_page(0, plane_bytes=BIG)])
    ready, go = os.pipe(), os.pipe()
    mine = [sample_page(100 + i, plane_bytes=BIG) for i in range(8)]
    theirs = [(200 + i, 0) for i in range(8)]

    def child() -> bool:
        with open_local(config(shm)) as own:
            put(own, mine[:4])
            os.write(ready[1], b"1")
            os.read(go[0], 1)  # the parent has closed, a third process is inside
            put(own, mine[4:])
            os.write(ready[1], b"2")
            os.read(go[0], 1)
            return hits(own, mine) == 8 and hits(own, [sample_page(c, plane_bytes=BIG) for c, _ in theirs]) == 8

    pid = os.fork()
    if pid == 0:  # pragma: no cover
        code = 1
        try:
            code = 0 if child() else 2
        finally:
            os._exit(code)
    os.read(ready[0], 1)
    store.close()
    other = helper()
    other("open", directory=str(shm / "store"), planes=list(BIG))
    os.write(go[1], b"1")
    os.read(ready[0], 1)
    assert other("put", refs=theirs) == ["stored"] * 8
    assert other("get", refs=[(100 + i, 0) for i in range(8)]) == ["hit"] * 8
    os.write(go[1], b"2")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert other("validate") == []
    for fd in (*ready, *go):
        os.close(fd)


@pytest.mark.fault("A1")
def test_there_is_nothing_beside_the_slab_that_a_cleaner_could_take(place: Path, helper: Callable[[], Helper]) -> None:
    other = helper()
    with open_local(config(place)) as store:
        other("open", directory=str(place / "store"))
        put(store, sample_chain(1, 5))
        assert os.listdir(place / "store") == [SLAB]
        assert other("get", refs=[(1, d) for d in range(5)]) == ["hit"] * 5
    assert os.listdir(place / "store") == [SLAB]


@pytest.mark.fault("A1")
def test_who_lost_its_slab_writes_nothing_into_anybody_elses(shm: Path, helper: Callable[[], Helper]) -> None:
    """A reservation is out while the slab is deleted and a new store made: neither store sees the other's bytes."""
    other = helper()
    page = sample_page(1, plane_bytes=BIG)
    with open_local(config(shm)) as store:
        assert isinstance(store, Addressable)
        reservation = store.reserve([(page.meta, frame_bytes(BIG))], deadline=soon())[0]
        assert isinstance(reservation, Reservation)
        (shm / "store" / SLAB).unlink()
        other("open", directory=str(shm / "store"), limit_bytes=LIMIT, planes=list(BIG))
        assert other("put", refs=[(i, 0) for i in range(40, 50)]) == ["stored"] * 10
        reservation.view[:] = page.frame
        assert store.publish([reservation], deadline=soon()) == [Status.FAILED]
        assert other("get", refs=[(i, 0) for i in range(40, 50)]) == ["hit"] * 10
        assert other("contains", refs=[(1, 0)]) == [False]
        assert store.revive()
        assert hits(store, [sample_page(i, plane_bytes=BIG) for i in range(40, 50)]) == 10


# --- A2, A11: forks ---------------------------------------------------------------------------------------------------


@pytest.mark.fault("A2")
def test_a_child_opens_its_own_while_a_thread_of_the_parent_writes(place: Path) -> None:
    stop = threading.Event()
    with open_local(config(place)) as store:

        def busy() -> None:
            while not stop.is_set():
                put(store, [sample_page(1)])
                store.delete([sample_page(1).name], deadline=soon())

        def child() -> bool:
            with open_local(config(place, open_timeout_s=10.0)) as own:
                return put(own, [sample_page(9)])[0].held and hits(own, [sample_page(9)]) == 1

        thread = threading.Thread(target=busy)
        thread.start()
        try:
            codes = [in_child(child) for _ in range(12)]
        finally:
            stop.set()
            thread.join()
        assert codes == [0] * 12
        assert store.validate(deadline=soon()) == []


@pytest.mark.fault("A11")
def test_closing_in_a_child_takes_no_lock_and_nothing_from_the_parent(place: Path) -> None:
    with open_local(config(place)) as store:
        put(store, sample_chain(1, 3))
        with store._state, store._reviving:  # as if another thread was in a call at the moment of the fork

            def child() -> bool:
                signal.alarm(10)
                store.close()
                with pytest.raises(StoreForked):
                    store.revive()
                with open_local(config(place)) as own:
                    return hits(own, sample_chain(1, 3)) == 3

            assert in_child(child) == 0
        assert hits(store, sample_chain(1, 3)) == 3
        assert put(store, sample_chain(2, 3)) == [Status.STORED] * 3


@pytest.mark.fault("A1")
def test_a_parents_death_is_seen_although_a_child_lives(shm: Path) -> None:
    """A child that was forked off does not keep its parent's locks alive."""
    script = f"""
import os, sys, time
from pathlib import Path
from headwater.build import open_local
from headwater.config.stores import LocalStoreConfig
from headwater.testing.pages import sample_page
from headwater.testing.stores import soon
store = open_local(LocalStoreConfig(directory=Path({str(shm / "store")!r}), limit_bytes={LIMIT}))
page = sample_page(1)
store.reserve([(page.meta, len(page.frame))], deadline=soon())
if os.fork() == 0:
    print("forked", flush=True)
    time.sleep(60)
    os._exit(0)
sys.stdin.readline()
os.kill(os.getpid(), 9)
"""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True) as parent:
        try:
            assert parent.stdout is not None
            assert parent.stdin is not None
            assert parent.stdout.readline() == "forked\n"
            parent.stdin.write("\n")
            parent.stdin.flush()
            parent.wait()
            with open_local(config(shm)) as store:
                assert store.slots(deadline=soon()).get(1, 0) == 0
                assert store.metrics.value("events_total", kind="local_rebuilt") == 0
        finally:
            os.killpg(parent.pid, signal.SIGKILL)


@pytest.mark.fault("A11")
def test_an_interrupt_after_publishing_leaves_the_pages_alone(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = sample_chain(1, 4)
    with open_local(config(place)) as store:
        publish = writing.publish_slots

        def interrupted(*args: Any) -> list[Status]:
            publish(*args)
            raise KeyboardInterrupt

        monkeypatch.setattr(writing, "publish_slots", interrupted)
        with pytest.raises(KeyboardInterrupt):
            put(store, pages)
        monkeypatch.undo()
        assert hits(store, pages) == 4
        assert store.validate(deadline=soon()) == []
    with open_local(config(place)) as store:
        assert hits(store, pages) == 4


# --- A4, A10: what was damaged, or is of another version --------------------------------------------------------------


@pytest.mark.fault("A4")
@pytest.mark.parametrize("which", ["A", "B"])
def test_any_bit_of_a_header_may_flip(tmp_path: Path, which: str) -> None:
    """One copy of the header, bit by bit: the store opens from the other one, and puts it right."""
    pages = sample_chain(1, 3)
    with open_local(config(tmp_path)) as store:
        put(store, pages)
    slab = tmp_path / "store" / SLAB
    whole = slab.read_bytes()[:8192]
    base = 0 if which == "A" else 4096
    for bit in [*range(0, 64 * 8, 5), 4095 * 8]:
        with slab.open("r+b") as file:
            file.seek(base + bit // 8)
            file.write(bytes([whole[base + bit // 8] ^ 1 << bit % 8]))
        with open_local(config(tmp_path)) as store:
            assert hits(store, pages) == 3
        assert slab.read_bytes()[:8192] == whole


def rewrite_header(slab: Path, change: Callable[[bytearray], None]) -> None:
    """Both copies, with a checksum that fits."""
    raw = bytearray(slab.read_bytes()[:4096])
    change(raw)
    raw[-8:] = struct.pack("<Q", xxh3_64_intdigest(bytes(raw[:-8])))
    with slab.open("r+b") as file:
        file.write(raw)
        file.write(raw)


@pytest.mark.fault("A10")
@pytest.mark.parametrize("inside", [False, True])
def test_a_store_of_the_future_is_refused_also_while_somebody_is_inside(place: Path, inside: bool) -> None:
    with open_local(config(place)) as store:
        put(store, [sample_page(1)])
        if inside:
            rewrite_header(place / "store" / SLAB, lambda raw: struct.pack_into("<I", raw, 8, 99))
            with pytest.raises(StoreUnavailable, match="written in format 99"):
                open_local(config(place))
    if not inside:
        rewrite_header(place / "store" / SLAB, lambda raw: struct.pack_into("<I", raw, 8, 99))
        before = (place / "store" / SLAB).read_bytes()
        with pytest.raises(StoreUnavailable, match="written in format 99"):
            open_local(config(place))
        assert (place / "store" / SLAB).read_bytes() == before


@pytest.mark.fault("A10")
@pytest.mark.parametrize("limit_bytes", [0, 1, 4096, 1 << 40, 1 << 62, (1 << 64) - 1])
def test_a_header_with_an_absurd_limit_is_refused_and_nothing_grows(tmp_path: Path, limit_bytes: int) -> None:
    with open_local(config(tmp_path)) as store:
        put(store, [sample_page(1)])
    slab = tmp_path / "store" / SLAB
    rewrite_header(slab, lambda raw: struct.pack_into("<Q", raw, 56, limit_bytes))
    before = slab.read_bytes()
    with pytest.raises(StoreError):
        open_local(config(tmp_path, limit_bytes=None))
    assert slab.read_bytes() == before


@pytest.mark.fault("A10")
def test_a_relative_directory_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    with open_local(LocalStoreConfig(directory=Path("relative"), limit_bytes=LIMIT)) as store:
        put(store, sample_chain(1, 2))
        monkeypatch.chdir(elsewhere)
        assert put(store, sample_chain(2, 2)) == [Status.STORED] * 2
        os.truncate(tmp_path / "relative" / SLAB, 100)
        store.contains([], deadline=soon())
        assert store.down is not None
        assert store.revive()
        assert put(store, sample_chain(2, 2)) == [Status.STORED] * 2
    assert not list(elsewhere.iterdir())


# --- A5: foreign files ------------------------------------------------------------------------------------------------


def everything(directory: Path) -> dict[str, object]:
    """Names, kinds and contents, links not followed."""
    found: dict[str, object] = {}
    for path in sorted(directory.rglob("*")):
        info = path.lstat()
        content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[str(path.relative_to(directory))] = (info.st_mode, info.st_size, info.st_mtime_ns, content)
    return found


def foreign_file(home: Path) -> None:
    (home / "thesis.tex").write_text("precious")


def foreign_slab(home: Path) -> None:
    (home / SLAB).write_bytes(b"precious" * 4096)


def foreign_index(home: Path) -> None:
    (home / "index.db").write_text("precious database")
    (home / "owners").mkdir()
    (home / "owners" / "contract.pdf").write_text("precious")


def empty_slab(home: Path) -> None:
    (home / SLAB).touch()


def linked_slab(home: Path) -> None:
    (home.parent / "foreign.bin").write_bytes(b"precious" * 4096)
    (home / SLAB).symlink_to(home.parent / "foreign.bin")


def dangling_slab(home: Path) -> None:
    (home / SLAB).symlink_to(home.parent / "nothing")


def slab_directory(home: Path) -> None:
    (home / SLAB).mkdir()
    (home / SLAB / "letter.txt").write_text("precious")


def slab_fifo(home: Path) -> None:
    os.mkfifo(home / SLAB)


def unfinished(home: Path) -> None:
    (home / "slab.new").write_text("precious")


@pytest.mark.fault("A5")
@pytest.mark.parametrize("limit_bytes", [None, LIMIT])
@pytest.mark.parametrize(
    "make",
    [
        foreign_file, foreign_slab, foreign_index, empty_slab, linked_slab, dangling_slab, slab_directory, slab_fifo,
        unfinished,
    ],
)  # fmt: skip
def test_foreign_files_are_never_touched(place: Path, make: Callable[[Path], None], limit_bytes: int | None) -> None:
    home = place / "store"
    home.mkdir(mode=0o700)
    make(home)
    before = everything(place)
    with pytest.raises(StoreError):
        open_local(config(place, limit_bytes=limit_bytes))
    assert everything(place) == before


@pytest.mark.fault("A5")
def test_a_directory_that_is_a_link_is_refused(place: Path) -> None:
    (place / "real").mkdir(mode=0o700)
    (place / "store").symlink_to(place / "real")
    with pytest.raises(StoreUnavailable, match="symbolic link"):
        open_local(config(place))
    assert not list((place / "real").iterdir())


@pytest.mark.fault("A5")
def test_files_are_private(place: Path) -> None:
    before = os.umask(0)
    try:
        with open_local(config(place / "deep")) as store:
            put(store, [sample_page(1)])
            home = place / "deep" / "store"
            assert stat.S_IMODE(home.stat().st_mode) == 0o700
            assert [stat.S_IMODE(path.stat().st_mode) for path in home.iterdir()] == [0o600]
    finally:
        os.umask(before)


@pytest.mark.fault("A5")
def test_a_file_system_without_unnamed_files_gets_a_whole_slab_or_none(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open, real_link = os.open, os.link

    def without(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not here")
        return real_open(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", without)
    monkeypatch.setattr(os, "link", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        open_local(config(place))
    assert not list((place / "store").iterdir())
    with monkeypatch.context() as crash:
        crash.setattr(os, "unlink", lambda *_, **__: None)
        with pytest.raises(ZeroDivisionError):
            open_local(config(place))
    assert os.listdir(place / "store") == ["slab.new"]
    monkeypatch.setattr(os, "link", real_link)
    with open_local(config(place)) as store:
        assert put(store, [sample_page(1)]) == [Status.STORED]
    assert os.listdir(place / "store") == [SLAB]
    shutil.move(place / "store" / SLAB, place / "store" / "slab.new")  # somebody put it aside: it is not ours to remove
    with pytest.raises(StoreUnavailable, match=r"slab\.new"):
        open_local(config(place))
    assert os.listdir(place / "store") == ["slab.new"]


# --- A6: the clock ----------------------------------------------------------------------------------------------------


TEN_YEARS_S = 10 * 365 * 86400.0


class WallClock:
    """A clock that can be set."""

    def __init__(self) -> None:
        self.wall_s = 1_700_000_000.0

    def monotonic(self) -> float:
        return time.monotonic()

    def time(self) -> float:
        return self.wall_s


def hits_of_a_new_working_set(path: Path, policy: str, *, ahead_s: float, restart: bool) -> list[int]:
    """Fill a store while the clock is ahead, put the clock right, then use new pages that would fit: hits by round."""
    clock = WallClock()
    store = open_local(config(path, policy=policy), clock=clock)
    try:
        clock.wall_s += ahead_s
        for i in range(32):
            put(store, [sample_page(i, plane_bytes=BIG)])
            read(store, [sample_page(i, plane_bytes=BIG)])
            clock.wall_s += 1.0
        clock.wall_s -= ahead_s
        if restart:
            store.close()
            store = open_local(config(path), clock=clock)
        rounds = []
        for _ in range(6):
            found = 0
            for i in range(100, 116):
                clock.wall_s += 0.1
                page = sample_page(i, plane_bytes=BIG)
                if read(store, [page]) == [Status.HIT]:
                    found += 1
                else:
                    put(store, [page])
            rounds.append(found)
        assert store.validate(deadline=soon()) == []
        return rounds
    finally:
        store.close()


@pytest.mark.fault("A6")
@pytest.mark.parametrize("policy", ["lru", "lru-2", "value"])
@pytest.mark.parametrize("restart", [False, True])
def test_a_clock_that_was_wrong_for_a_while_costs_no_later_hit(place: Path, policy: str, restart: bool) -> None:
    right = hits_of_a_new_working_set(place / "right", policy, ahead_s=0.0, restart=restart)
    wrong = hits_of_a_new_working_set(place / "wrong", policy, ahead_s=TEN_YEARS_S, restart=restart)
    assert sum(right) >= 64
    assert sum(wrong) >= 0.9 * sum(right), (wrong, right)


# --- A7: the limit ----------------------------------------------------------------------------------------------------


@pytest.mark.fault("A7")
def test_any_number_of_tenants_stays_within_the_limit(shm: Path) -> None:
    with open_local(config(shm)) as store:
        for i in range(0, 12_000, 500):
            pages = [sample_page(k, plane_bytes=(1,), tenant=k.to_bytes(16, "little")) for k in range(i, i + 500)]
            assert all(status.held for status in put(store, pages))
            used = sum(path.stat().st_blocks * 512 for path in (shm / "store").iterdir())
            assert used <= LIMIT
        assert len(store.usage(deadline=soon())) > 500
    assert sum(path.stat().st_size for path in (shm / "store").iterdir()) <= LIMIT


@pytest.mark.fault("A7")
def test_labels_are_bounded_too(place: Path) -> None:
    with open_local(config(place)) as store:
        for i in range(200):
            page = sample_page(i, tenant=i.to_bytes(16, "little"))
            put(store, [page])
            store.label(IDENTITY, page.meta.tenant, "é" * 500, deadline=soon())
        labelled = [use.label for use in store.usage(deadline=soon()) if use.label]
        assert 1 <= len(labelled) <= 64
        assert all(set(label) == {"é"} for label in labelled)
    assert sum(path.stat().st_size for path in (place / "store").iterdir()) <= LIMIT


# --- A8: very many descendants ----------------------------------------------------------------------------------------


def family(num_children: int) -> tuple[tuple[PageName, memoryview], Iterator[tuple[PageName, memoryview]]]:
    """A page, and many that build on it, as (name, frame)."""
    layout = opaque_layout((64,), 16)

    def page(key: bytes, parent: bytes, depth: int) -> tuple[PageName, memoryview]:
        meta = PageMeta(key=key, identity=IDENTITY, parent=parent, depth=depth, valid_tokens=16)
        frame = memoryview(bytearray(frame_bytes((64,))))
        seal(frame, meta, layout, now_ms=SEALED_AT_MS)
        return meta.name, frame

    root = hashlib.sha256(b"a system prompt").digest()
    children = (page(hashlib.sha256(b"child %d" % i).digest(), root, 1) for i in range(num_children))
    return page(root, bytes(32), 0), children


@pytest.mark.fault("A8")
@pytest.mark.parametrize("how", ["deleted", "damaged"])
def test_a_page_with_very_many_descendants_overruns_no_deadline(shm: Path, how: str) -> None:
    num_children = 12_000
    (name, frame), children = family(num_children)
    with open_local(config(shm, limit_bytes=1 << 30)) as store:
        store.put([(name, frame)], deadline=soon())
        stored = store.put(list(children), deadline=Deadline.after(60))
        assert stored == [Status.STORED] * num_children
        reader = VerifiedStore(store, identity=IDENTITY, plane_bytes=(64,))
        if how == "damaged":
            place = store._run(lambda at: at.catalog.mirror.places[name], None)
            memory = store.memory() if isinstance(store, Addressable) else None
            assert place is not None
            assert memory is not None
            memory[place.offset + 4096] ^= 1
            memory.release()
        tries = 0
        while store.contains([name], deadline=soon()) == [True]:
            deadline = Deadline.after(0.02)
            if how == "damaged":
                status = reader.get_into([(name, memoryview(bytearray(len(frame))))], deadline=deadline)
                assert status[0] in (Status.LATE, Status.CORRUPT)  # a busy machine may not come to read it in time
            else:
                assert store.delete([name], deadline=deadline)[0] in (Status.LATE, Status.REMOVED)
            assert time.monotonic() - deadline.at_s < GRACE_S
            tries += 1
        assert tries > 1, "each try went as far as it could"
        assert sum(use.num_pages for use in store.usage(deadline=soon())) == 0
        assert store.validate(deadline=soon()) == []


@pytest.mark.fault("A8")
def test_an_extent_full_of_others_changes_hands_within_the_deadline(shm: Path) -> None:
    (name, frame), children = family(4000)
    with open_local(config(shm)) as store:
        store.put([(name, frame)], deadline=soon())
        store.put(list(children), deadline=soon())
        big = [sample_page(i, plane_bytes=BIG) for i in range(40)]
        for page in big:
            deadline = Deadline.after(0.05)
            store.put([page.item], deadline=deadline)
            assert time.monotonic() - deadline.at_s < GRACE_S
        assert all(status.held for status in put(store, big[:2]))
        assert store.validate(deadline=soon()) == []


# --- A9: a slab that is cut under a process ---------------------------------------------------------------------------

_VICTIM = """
import sys, time
from pathlib import Path
from headwater.build import open_local
from headwater.config.stores import LocalStoreConfig
from headwater.layout.spec import opaque_layout
from headwater.storage.sealed import put_sealed
from headwater.storage.verified import VerifiedStore
from headwater.testing.pages import IDENTITY, items, sample_page
from headwater.testing.stores import soon

directory, mode = Path(sys.argv[1]), sys.argv[2]
planes = (262144,)
layout = opaque_layout(planes, 16)
store = open_local(LocalStoreConfig(directory=directory))
reader = VerifiedStore(store, identity=IDENTITY, plane_bytes=planes)
pages = [sample_page(c, 0, plane_bytes=planes) for c in range(64)]
store.put(items(pages), deadline=soon())
wanted = [(page.name, page.buffer()) for page in pages]
unsealed = [(page.meta, memoryview(bytearray(page.frame))) for page in pages[:8]]
names = [page.name for page in pages[:8]]
print("up", flush=True)
end_s = time.monotonic() + 20
while store.down is None and time.monotonic() < end_s:
    if mode == "read":
        reader.get_into(wanted, deadline=soon())
    else:
        store.delete(names, deadline=soon())
        put_sealed(store, unsealed, layout, now_ms=1, deadline=soon())
print("survived", store.down is not None, flush=True)
"""


@pytest.mark.fault("A9")
@pytest.mark.parametrize("mode", ["read", "put"])
@pytest.mark.parametrize("size", [0, 4096, 20_000, 5 << 20])
def test_a_slab_that_is_cut_under_a_process_does_not_kill_it(shm: Path, mode: str, size: int) -> None:
    for delay_s in (0.003, 0.017):
        shutil.rmtree(shm / "store", ignore_errors=True)
        open_local(config(shm, limit_bytes=32 << 20)).close()
        command = [sys.executable, "-c", _VICTIM, str(shm / "store"), mode]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as victim:
            assert victim.stdout is not None
            assert victim.stdout.readline() == "up\n"
            time.sleep(delay_s)  # a moment among many: no order is needed
            os.truncate(shm / "store" / SLAB, size)
            assert victim.stdout.readline() == "survived True\n"
            assert victim.wait() == 0


@pytest.mark.fault("A9")
def test_a_cut_slab_reads_zeros_and_is_made_whole_again(shm: Path) -> None:
    page = sample_page(1, plane_bytes=BIG)
    with open_local(config(shm)) as store:
        assert isinstance(store, Addressable)
        put(store, [page])
        (borrow,) = store.borrow([page.name], deadline=soon())
        assert not isinstance(borrow, Status)
        os.truncate(shm / "store" / SLAB, 0)
        assert not any(bytes(borrow.view))
        assert read(store, [page]) == [Status.FAILED]
        assert store.revive()
        assert put(store, [page]) == [Status.STORED]
        assert hits(store, [page]) == 1
