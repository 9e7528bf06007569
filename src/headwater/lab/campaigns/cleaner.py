"""The cleaner campaign: writers that fork share a directory in which somebody deletes, replaces and renames files.

    python -m headwater.lab.campaigns.cleaner --seconds 600 --json

Three processes put, read and delete pages, in place and through frames, and fork now and then: the child opens the
directory again and goes on beside its parent, or after its parent has closed. Every second or so a cleaner deletes a
file of the directory, cuts it, puts an old copy over it or in its place, or renames the whole directory. What must
hold: a read that says HIT has exactly the page's bytes; every call ends by its deadline and a quarter of a second; no
process dies; and when the cleaner has gone, the directory works.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from headwater.build import open_local
from headwater.config.stores import LocalStoreConfig
from headwater.core.errors import StoreError
from headwater.core.results import Status
from headwater.layout.frame import header_bytes
from headwater.layout.spec import opaque_layout
from headwater.storage.base import Deadline
from headwater.storage.local import LocalStore
from headwater.storage.sealed import put_sealed
from headwater.storage.verified import VerifiedStore
from headwater.testing.pages import IDENTITY, SamplePage, items, sample_page

PLANES: Final = (65536, 65536)
LIMIT_BYTES: Final = 16 << 20
NUM_PAGES: Final = 64  # of each writer; about as many as fit in all
DEADLINE_S: Final = 0.5
GRACE_S: Final = 0.25
_START: Final = header_bytes(len(PLANES))


class Writer:
    """One process' work, until its time is up."""

    def __init__(self, directory: Path, seed: int, end_s: float) -> None:
        self.config = LocalStoreConfig(directory=directory, limit_bytes=LIMIT_BYTES, open_timeout_s=5.0)
        self.rng = random.Random(seed)
        self.end_s = end_s
        self.counts: Counter[str] = Counter()
        self.layout = opaque_layout(PLANES, 16)

    def page(self) -> SamplePage:
        """One of the pages that all writers share."""
        return sample_page(self.rng.randrange(3 * NUM_PAGES), plane_bytes=PLANES)

    def open(self) -> LocalStore | None:
        """The store, or None while the directory is being moved about."""
        try:
            return open_local(self.config)
        except StoreError as error:
            self.counts[f"not opened: {type(error).__name__}"] += 1
            if "no readable header" in str(error):
                with suppress(FileNotFoundError):
                    (self.config.directory / "slab").unlink()  # as the error says
            time.sleep(0.01)
            return None

    def run(self, until_s: float) -> None:
        """Work; forks are the driver's."""
        store = None
        while time.monotonic() < until_s:
            store = store or self.open()
            if store is not None:
                self.step(store)
                if store.down is not None:
                    self.counts["down"] += 1
                    self.counts["revived"] += store.revive()
        if store is not None:
            store.close()

    def step(self, store: LocalStore) -> None:
        """A write, some reads, now and then a removal; all of them timed."""
        page, kind = self.page(), self.rng.random()
        reader = VerifiedStore(store, identity=IDENTITY, plane_bytes=PLANES, max_bad=1 << 30)
        begin_s, waited_s = time.monotonic(), _waited_s()
        deadline = Deadline.after(DEADLINE_S)
        if kind < 0.3:
            frame = memoryview(bytearray(page.frame))
            status = put_sealed(store, [(page.meta, frame)], self.layout, now_ms=1, deadline=deadline)[0]
            self.counts[f"put {status}"] += 1
        elif kind < 0.5:
            self.counts[f"put {store.put(items([page]), deadline=deadline)[0]}"] += 1
        elif kind < 0.55:
            store.delete([page.name], deadline=deadline)
        else:
            buffer = page.buffer()
            status_ = reader.get_into([(page.name, buffer)], deadline=deadline)[0]
            wrong = status_ is Status.HIT and bytes(buffer[_START:]) != page.frame[_START:]
            self.counts["wrong" if wrong else f"get {status_}"] += 1
        self.counts["calls"] += 1
        if time.monotonic() - begin_s > DEADLINE_S + GRACE_S:
            starved = time.monotonic() - begin_s - (_waited_s() - waited_s) <= DEADLINE_S + GRACE_S
            self.counts["late for want of a processor" if starved else "late"] += 1


def _waited_s() -> float:
    """Seconds that this thread was ready to run, and had no processor."""
    with open("/proc/thread-self/schedstat", encoding="ascii") as file:
        return int(file.read().split()[1]) / 1e9


def worker(directory: Path, seed: int, seconds: float) -> None:
    """Work, fork, work; print what was seen, children's counts included."""
    end_s = time.monotonic() + seconds
    total: Counter[str] = Counter()
    rng = random.Random(seed)
    children: list[tuple[int, int]] = []
    round_ = 0
    while time.monotonic() < end_s:
        round_ += 1
        writer = Writer(directory, seed * 1000 + round_, end_s)
        store = writer.open()
        if store is not None:
            writer.step(store)
            children.append(_fork(directory, seed * 1000 + round_ + 500, end_s, rng))
            total["forks"] += 1
            if rng.random() < 0.5:
                store.close()  # while the child works on
        writer.run(min(end_s, time.monotonic() + rng.uniform(0.2, 2.0)))
        if store is not None:
            store.close()
        total += writer.counts
        children = [child for child in children if not _reap(child, total, wait=False)]
    for child in children:
        _reap(child, total, wait=True)
    sys.stdout.write(json.dumps(total) + "\n")


def _fork(directory: Path, seed: int, end_s: float, rng: random.Random) -> tuple[int, int]:
    out, into = os.pipe()
    pid = os.fork()
    if pid == 0:  # pragma: no cover
        code = 1
        try:
            writer = Writer(directory, seed, end_s)
            writer.run(min(end_s, time.monotonic() + rng.uniform(0.2, 3.0)))
            os.write(into, json.dumps(writer.counts).encode())
            code = 0
        except BaseException:  # noqa: BLE001  told here, because the process ends at once
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(into)
    return pid, out


def _reap(child: tuple[int, int], total: Counter[str], *, wait: bool) -> bool:
    pid, out = child
    ended, status = os.waitpid(pid, 0 if wait else os.WNOHANG)
    if not ended:
        return False
    total.update(json.loads(os.read(out, 1 << 20) or b"{}"))
    code = os.waitstatus_to_exitcode(status)
    if code:
        total["deaths"] += 1
        total[f"died with {code}"] += 1
    os.close(out)
    return True


def clean(directory: Path, old: Path, rng: random.Random) -> str:
    """Do what cleaners, backups and people do to files."""
    slab, kind = directory / "slab", rng.choice(["delete", "delete", "cut", "copy over", "replace", "rename"])
    with suppress(FileNotFoundError, NotADirectoryError):
        if kind == "delete":
            names = os.listdir(directory)
            (directory / rng.choice(names)).unlink() if names else None
        elif kind == "cut":
            os.truncate(slab, rng.choice([0, 4096, 100_000, 1 << 20, 9 << 20]))
        elif kind == "copy over":
            now = slab.read_bytes()
            if old.exists():
                shutil.copyfile(old, slab)
            old.write_bytes(now)
        elif kind == "replace" and old.exists():
            shutil.copyfile(old, directory.parent / "other")
            (directory.parent / "other").rename(slab)
        else:
            directory.rename(directory.parent / f"moved-{rng.randrange(1 << 30)}")
            for moved in sorted(directory.parent.glob("moved-*"))[:-1]:
                shutil.rmtree(moved, ignore_errors=True)
    return kind


def campaign(
    parent: Path, *, seconds: float, seed: int = 0, interval_s: float = 1.0, writers: int = 3
) -> dict[str, Any]:
    """Run it in a directory of its own below `parent`. `ok` is the verdict."""
    rng = random.Random(seed)
    directory = parent / "store"
    command = [
        sys.executable,
        "-m",
        "headwater.lab.campaigns.cleaner",
        "--worker",
        str(directory),
        "--seconds",
        str(seconds),
    ]
    running = [
        subprocess.Popen([*command, "--seed", str(seed * 100 + i)], stdout=subprocess.PIPE, text=True)
        for i in range(1, writers + 1)
    ]
    cleaned: Counter[str] = Counter()
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        time.sleep(rng.uniform(0.5, 1.5) * interval_s)
        cleaned[clean(directory, parent / "old", rng)] += 1
    seen: Counter[str] = Counter()
    deaths = 0
    for one in running:
        try:
            out, _ = one.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            one.send_signal(signal.SIGKILL)
            out, _ = one.communicate()
            seen["hung"] += 1
        deaths += one.returncode != 0
        seen.update(json.loads(out.splitlines()[-1]) if out else {})
    works = _works(directory)
    ok = (
        works
        and not (deaths or seen["deaths"] or seen["wrong"] or seen["late"] or seen["hung"])
        and seen["get hit"] > 0
    )
    return {
        "ok": ok,
        "works": works,
        "died": deaths,
        "seen": seen,
        "cleaned": cleaned,
        "seconds": seconds,
        "seed": seed,
    }


def _works(directory: Path) -> bool:
    """Whether the directory is of use when the cleaner has gone; a destroyed slab is removed, as its error says."""
    config = LocalStoreConfig(directory=directory, limit_bytes=LIMIT_BYTES)
    pages = [sample_page(9_000 + i, plane_bytes=PLANES) for i in range(8)]
    try:
        store = open_local(config)
    except StoreError:
        shutil.rmtree(directory, ignore_errors=True)
        store = open_local(config)
    with store:
        stored = store.put(items(pages), deadline=Deadline.after(10))
        return all(status in (Status.STORED, Status.EXISTS) for status in stored) and not store.validate(
            deadline=Deadline.after(10)
        )


def main() -> None:
    """Command line: the campaign, or one of its workers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between two deeds of the cleaner, about")
    parser.add_argument("--dir", type=Path, default=None, help="parent of the store's directory (default: tmpfs)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.seed, options.seconds)
        return
    with tempfile.TemporaryDirectory(prefix="headwater-cleaner-", dir=options.dir or "/dev/shm") as parent:
        result = campaign(Path(parent), seconds=options.seconds, seed=options.seed, interval_s=options.interval)
    sys.stdout.write(json.dumps(result, indent=None if options.json else 2) + "\n")
    sys.exit(0 if result["ok"] else 1)


if __name__ == "__main__":
    main()
