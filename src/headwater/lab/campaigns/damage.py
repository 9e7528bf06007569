"""The damage campaign: files of a store are spoiled at random, closed or open, and nothing wrong may come out.

    python -m headwater.lab.campaigns.damage --damages 2000 --json

Every trial starts from the same two directories, an older and a newer state of one store, spoils something, opens (or
goes on using) the store, reads every page it ever held and writes new ones. A HIT must hold exactly the page's bytes;
the store must open, by rebuilding or from nothing, and work again; the process must live. (A slab without a readable
header must be refused, and not be touched: it might be anybody's.) Trials run in child processes, so that a crash is
seen as one.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

import xxhash

from headwater.build import open_local
from headwater.config.stores import LocalStoreConfig
from headwater.core.errors import StoreDamaged
from headwater.core.page import PageName
from headwater.core.results import Status
from headwater.storage.base import Deadline
from headwater.storage.local import LocalStore
from headwater.storage.local.directory import SLAB
from headwater.storage.local.families import live_records
from headwater.storage.local.geometry import Geometry
from headwater.storage.local.records import PageUse, Record
from headwater.storage.local.slab import Slab
from headwater.storage.local.slab_header import read_slab_header
from headwater.storage.local.table import Table
from headwater.storage.verified import VerifiedStore
from headwater.testing.pages import IDENTITY, PLANE_BYTES, SamplePage, items, sample_chain

LIMIT_BYTES: Final = 8 << 20
GEOMETRY: Final = Geometry.plan(LIMIT_BYTES)
OLD: Final = [page for chain in range(12) for page in sample_chain(chain, 5)]
NEW: Final = [page for chain in range(6, 24) for page in sample_chain(chain, 8)]
LATER: Final = [page for chain in range(30, 34) for page in sample_chain(chain, 4)]


def make_states(parent: Path) -> list[tuple[Path, Path]]:
    """(older, newer) states of one store, twice: copied while it was open, and closed cleanly."""
    config = LocalStoreConfig(directory=parent / "live", limit_bytes=LIMIT_BYTES)
    names = ("crashed-old", "closed-old", "crashed-new", "closed-new")
    states = dict(zip(names, (parent / name for name in names), strict=True))
    for age in ("old", "new"):
        with open_local(config) as store:
            if age == "new":
                store.delete([page.name for page in OLD[:20]], deadline=Deadline.after(60))
            store.put(items(OLD if age == "old" else NEW), deadline=Deadline.after(60))
            shutil.copytree(config.directory, states[f"crashed-{age}"])
        shutil.copytree(config.directory, states[f"closed-{age}"])
    shutil.rmtree(config.directory)
    return [(states["crashed-old"], states["crashed-new"]), (states["closed-old"], states["closed-new"])]


def fingerprint(directory: Path) -> bytes:
    """Changes with any byte of a store."""
    slab = directory / SLAB
    return xxhash.xxh3_128_digest(slab.read_bytes()) if slab.exists() else b""


class Trial:
    """One damage and what came of it."""

    def __init__(self, rng: random.Random, directory: Path, old: Path, new: Path) -> None:
        self.rng = rng
        self.directory = directory
        self.old = old
        self.new = new
        self.wrong = 0
        self.failures: list[str] = []

    def run(self) -> tuple[str, Counter[str]]:
        """Spoil, use, judge. Returns what was done, and the results of all reads."""
        shutil.rmtree(self.directory, ignore_errors=True)
        shutil.copytree(self.new, self.directory)
        kinds = (self.flip, self.cut, self.zero, self.swap, self.remove, self.grow, self.mix, self.lie)
        damages: list[Callable[[], str]] = list(kinds)
        damage = self.rng.choice(damages)
        while_open = self.rng.random() < 0.3
        whole = fingerprint(self.directory)
        results: Counter[str] = Counter()
        config = LocalStoreConfig(directory=self.directory, limit_bytes=LIMIT_BYTES, open_timeout_s=5.0)
        kind = ""
        while not while_open and (not kind or fingerprint(self.directory) == whole):  # until something was damaged
            kind = damage()
        try:
            store = open_local(config)
        except StoreDamaged as error:
            if "no readable header" not in str(error):
                raise
            (self.directory / SLAB).unlink()  # as the error says
            store = open_local(config)
        with store:
            if while_open:
                kind = damage() + " while open"
            results += self.read(store, [*OLD, *NEW])
            self.write(store)
            results += self.read(store, [*NEW, *LATER])
            if store.down is not None and not store.revive():
                self.failures.append(f"{kind}: not revived: {store.down}")
            self.write(store)
            if self.read(store, LATER[:4])["hit"] != 4:
                self.failures.append(f"{kind}: the store does not work any more")
        return kind, results

    def read(self, store: LocalStore, pages: list[SamplePage]) -> Counter[str]:
        reader = VerifiedStore(store, identity=IDENTITY, plane_bytes=PLANE_BYTES)
        buffers = [page.buffer() for page in pages]
        named = [(page.name, buffer) for page, buffer in zip(pages, buffers, strict=True)]
        results = reader.get_into(named, deadline=Deadline.after(30))
        for page, buffer, status in zip(pages, buffers, results, strict=True):
            self.wrong += status is Status.HIT and bytes(buffer) != page.frame
        return Counter(status.value for status in results)

    def write(self, store: LocalStore) -> None:
        results = store.put(items(LATER), deadline=Deadline.after(30))
        if store.down is None and not all(status in (Status.STORED, Status.EXISTS) for status in results):
            self.failures.append(f"cannot put: {Counter(results)}")

    # --- damages ------------------------------------------------------------------------------------------------------

    @property
    def slab(self) -> Path:
        """The store's file."""
        return self.directory / SLAB

    def somewhere(self, size: int) -> int:
        """An offset: in the headers, in the index, or anywhere."""
        return self.rng.randrange(min(size, self.rng.choice([256, 16384, GEOMETRY.data_at, size])) or 1)

    def flip(self) -> str:
        """Flip bits of a few bytes."""
        data = bytearray(self.slab.read_bytes())
        for _ in range(self.rng.choice([1, 1, 4, 64])):
            data[self.somewhere(len(data))] ^= 1 << self.rng.randrange(8)
        _overwrite(self.slab, bytes(data))
        return "flip"

    def cut(self) -> str:
        """Cut the end off."""
        os.truncate(self.slab, self.somewhere(self.slab.stat().st_size + 1))
        return "cut"

    def zero(self) -> str:
        """Zero a range."""
        size = self.slab.stat().st_size
        start = self.somewhere(size)
        with self.slab.open("r+b") as file:
            file.seek(start)
            file.write(bytes(min(size - start, self.rng.choice([512, 4096, 65536, size]))))
        return "zero"

    def swap(self) -> str:
        """Swap the bytes of two slots, or of two parts of the index."""
        data = bytearray(self.slab.read_bytes())
        length = self.rng.choice([256, 4096, 12288, 16384])
        low, high = self.rng.choice([(16384, GEOMETRY.data_at), (GEOMETRY.data_at, len(data))])
        first, second = (low + 256 * self.rng.randrange((high - low - length) // 256) for _ in range(2))
        if abs(first - second) >= length:
            a, b = data[first : first + length], data[second : second + length]
            data[first : first + length], data[second : second + length] = b, a
        _overwrite(self.slab, bytes(data))
        return "swap"

    def remove(self) -> str:
        """Delete the file."""
        self.slab.unlink()
        return "remove"

    def grow(self) -> str:
        """Append rubbish."""
        with self.slab.open("ab") as file:
            file.write(self.rng.randbytes(self.rng.choice([1, 4096, 100_000])))
        return "grow"

    def mix(self) -> str:
        """Old bytes over new ones: an old index over new pages, old pages under a new index, an old slab, any part."""
        old, size = (self.old / SLAB).read_bytes(), GEOMETRY.file_bytes
        parts = [(0, GEOMETRY.data_at), (GEOMETRY.data_at, size), (0, size), (8192, 12288)]
        parts += [(GEOMETRY.records_at, GEOMETRY.uses_at), (self.rng.randrange(size), size)]
        start, end = self.rng.choice(parts)
        with self.slab.open("r+b") as file:
            file.seek(start)
            file.write(old[start:end])
        return "mix"

    def lie(self) -> str:
        """Write sound records that say what is not so: an index is a hint, its content is never trusted."""
        fd = os.open(self.slab, os.O_RDWR)
        header = read_slab_header(fd, self.slab)
        if header is None:
            os.close(fd)
            return "lie"
        slab = Slab(self.slab, fd, header, mapped=False)
        try:
            table = Table(slab)
            live = list(live_records(table, Deadline.after(30)))
            for number, record in self.rng.sample(live, min(len(live), self.rng.choice([1, 1, 8, len(live)]))):
                other = self.rng.choice(live)
                table.set_record(number, self.rng.choice(_LIES)(record, other[1]))
                if self.rng.random() < 0.2:
                    table.set_use(
                        number, PageUse(self.rng.choice([1e300, -1e300, float("nan")]), float("inf"), 1 << 63)
                    )
            if self.rng.random() < 0.3:
                table.set_newest(self.rng.choice([0, 1, 1 << 40, (1 << 64) - 2]))
            if self.rng.random() < 0.1:
                table.set_extent(self.rng.randrange(GEOMETRY.num_extents), self.rng.choice([0, 4096, 16384, 32768]))
            if self.rng.random() < 0.3:
                table.set_busy(7)
        finally:
            slab.close()
        return "lie"


def _some_name(record: Record, other: Record) -> Record:
    return record._replace(name=PageName(bytes(reversed(record.name))))


_LIES: Final[tuple[Callable[[Record, Record], Record], ...]] = (
    lambda record, other: record._replace(num_bytes=record.num_bytes + 1),
    lambda record, other: record._replace(num_bytes=4096),
    lambda record, other: record._replace(num_bytes=1 << 40),
    lambda record, other: record._replace(slot_bytes=4096),
    lambda record, other: record._replace(slot_bytes=0),
    lambda record, other: record._replace(slot_bytes=1 << 62),
    lambda record, other: record._replace(state=0),
    lambda record, other: record._replace(state=1, owner=77),
    lambda record, other: record._replace(state=1, owner=1 << 31),
    lambda record, other: record._replace(state=9),
    lambda record, other: record._replace(generation=record.generation + 1),
    lambda record, other: record._replace(generation=(1 << 64) - 1),
    lambda record, other: record._replace(parent=record.name),
    lambda record, other: record._replace(parent=other.name),
    lambda record, other: record._replace(name=other.name),
    lambda record, other: record._replace(depth=(1 << 32) - 1),
    lambda record, other: record._replace(depth=0),
    lambda record, other: record._replace(expires_ms=1),
    lambda record, other: record._replace(identity=bytes(32), tenant=bytes(16)),
    lambda record, other: other,
    _some_name,
)


def _overwrite(path: Path, data: bytes) -> None:
    with path.open("r+b" if path.exists() else "wb") as file:  # in place: whoever has it open sees it
        file.write(data)
        file.truncate()


def trials(count: int, seed: int, parent: Path) -> dict[str, object]:
    """Run trials in this process."""
    rng = random.Random(seed)
    states = make_states(parent)
    kinds: Counter[str] = Counter()
    results: Counter[str] = Counter()
    wrong = 0
    failures: list[str] = []
    for _ in range(count):
        trial = Trial(rng, parent / "store", *rng.choice(states))
        kind, read = trial.run()
        kinds[kind] += 1
        results += read
        wrong += trial.wrong
        failures += trial.failures
    return {"damages": count, "wrong_bytes": wrong, "failures": failures, "reads": results, "kinds": kinds}


def campaign(
    damages: int, *, seed: int = 0, directory: Path = Path("/dev/shm"), per_process: int = 250
) -> dict[str, object]:
    """Run trials in child processes and add up what they saw; a child that dies is a crash."""
    total: dict[str, object] = {}
    crashes = done = wrong = 0
    failures: list[str] = []
    kinds: Counter[str] = Counter()
    reads: Counter[str] = Counter()
    while done < damages:
        count = min(per_process, damages - done)
        with tempfile.TemporaryDirectory(prefix="headwater-damage-", dir=directory) as parent:
            command = [
                sys.executable,
                "-m",
                "headwater.lab.campaigns.damage",
                "--child",
                parent,
                "--damages",
                str(count),
            ]
            command += ["--seed", str(seed + done)]
            done += count
            try:
                child = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60 + count)
            except subprocess.TimeoutExpired:
                failures.append(f"{' '.join(command[1:])} did not end")
                continue
        if child.returncode != 0:
            crashes += 1
            failures.append(f"exit {child.returncode}: {child.stderr[-2000:]}")
            continue
        seen = json.loads(child.stdout)
        wrong += seen["wrong_bytes"]
        failures += seen["failures"]
        kinds += Counter(seen["kinds"])
        reads += Counter(seen["reads"])
    ok = not (crashes or wrong or failures) and reads["hit"] > 0
    total.update(ok=ok, damages=done, wrong_bytes=wrong, crashes=crashes, failures=failures, reads=reads, kinds=kinds)
    return total


def main() -> None:
    """Command line: the campaign, or one of its children."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--damages", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm"), help="parent of the store's directory")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        result = trials(options.damages, options.seed, options.child)
    else:
        result = campaign(options.damages, seed=options.seed, directory=options.dir)
    sys.stdout.write(json.dumps(result, indent=None if options.json else 2) + "\n")
    sys.exit(0 if options.child or result["ok"] else 1)


if __name__ == "__main__":
    main()
