"""The damage campaign: files of a store are spoiled at random, closed or open, and nothing wrong may come out.

    python -m headwater.testing.damage --damages 2000 --json

Every trial starts from the same two directories, an older and a newer state of one store, spoils something, opens (or
goes on using) the store, reads every page it ever held and writes new ones. A HIT must hold exactly the page's bytes;
the store must open, by rebuilding or from nothing, and work again; the process must live. Trials run in child
processes, so that a crash is seen as one.
"""

import argparse
import hashlib
import json
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from headwater.build import open_local
from headwater.config import LocalStoreConfig
from headwater.storage.base import Deadline, GetStatus, PutStatus
from headwater.storage.directory import INDEX, SLAB
from headwater.storage.local import LocalStore
from headwater.storage.verified import VerifiedStore
from headwater.testing.pages import IDENTITY, PLANE_BYTES, SamplePage, items, sample_chain

LIMIT_BYTES: Final = 8 << 20
OLD: Final = [page for chain in range(12) for page in sample_chain(chain, 5)]
NEW: Final = [page for chain in range(6, 24) for page in sample_chain(chain, 8)]
LATER: Final = [page for chain in range(30, 34) for page in sample_chain(chain, 4)]
_FILES: Final = (SLAB, INDEX, INDEX + "-wal", INDEX + "-shm")


def make_states(parent: Path) -> list[tuple[Path, Path]]:
    """(older, newer) states of one store, twice: copied while it was open, log and all, and closed cleanly."""
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
    """Changes with any byte of any file of a store."""
    digest = hashlib.sha256()
    for name in _FILES:
        path = directory / name
        digest.update(b"-" if not path.exists() else hashlib.sha256(path.read_bytes()).digest())
    return digest.digest()


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
        with open_local(config) as store:
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
            self.wrong += status is GetStatus.HIT and buffer != page.frame
        return Counter(status.value for status in results)

    def write(self, store: LocalStore) -> None:
        results = store.put(items(LATER), deadline=Deadline.after(30))
        if store.down is None and not all(status in (PutStatus.STORED, PutStatus.EXISTS) for status in results):
            self.failures.append(f"cannot put: {Counter(results)}")

    # --- damages ------------------------------------------------------------------------------------------------------

    def file(self) -> Path:
        """A random file of the store, the slab more often."""
        there = [self.directory / name for name in _FILES if (self.directory / name).exists()]
        return self.rng.choice([there[0], *there])

    def flip(self) -> str:
        """Flip bits of a few bytes, some of them in the headers."""
        path = self.file()
        data = bytearray(path.read_bytes())
        for _ in range(self.rng.choice([1, 1, 4, 64])):
            where = self.rng.randrange(min(len(data), self.rng.choice([256, 16384, len(data)])) or 1)
            if data:
                data[where] ^= 1 << self.rng.randrange(8)
        _overwrite(path, bytes(data))
        return f"flip {path.name}"

    def cut(self) -> str:
        """Cut the end off."""
        path = self.file()
        if path.name.endswith("-shm"):
            path = self.directory / SLAB  # SQLite maps its -shm file: see docs/STORES.md
        with path.open("r+b") as file:
            file.truncate(self.rng.randrange(path.stat().st_size + 1))
        return f"cut {path.name}"

    def zero(self) -> str:
        """Zero a range."""
        path = self.file()
        size = path.stat().st_size
        start = self.rng.randrange(size + 1)
        with path.open("r+b") as file:
            file.seek(start)
            file.write(bytes(min(size - start, self.rng.choice([512, 4096, 65536, size]))))
        return f"zero {path.name}"

    def swap(self) -> str:
        """Swap the bytes of two slots, or parts of them."""
        path = self.directory / SLAB
        data = bytearray(path.read_bytes())
        length = self.rng.choice([4096, 12288, 16384])
        first, second = (16384 + 4096 * self.rng.randrange((len(data) - 40000) // 4096) for _ in range(2))
        if abs(first - second) >= length:
            a, b = data[first : first + length], data[second : second + length]
            data[first : first + length], data[second : second + length] = b, a
        _overwrite(path, bytes(data))
        return "swap slots"

    def remove(self) -> str:
        """Delete a file."""
        path = self.file()
        path.unlink()
        return f"remove {path.name}"

    def grow(self) -> str:
        """Append rubbish."""
        path = self.file()
        with path.open("ab") as file:
            file.write(self.rng.randbytes(self.rng.choice([1, 4096, 100_000])))
        return f"grow {path.name}"

    def mix(self) -> str:
        """Old files over new ones: an old index over a new slab, an old slab under a new index, an old log."""
        names = self.rng.choice([_FILES[1:], _FILES[:1], _FILES[1:2], _FILES[2:3]])
        for name in names:
            with suppress(FileNotFoundError):
                _overwrite(self.directory / name, (self.old / name).read_bytes())
        return f"old {' '.join(names)}"

    def lie(self) -> str:
        """Write a sound index that says what is not so: an index is a hint, its content is never trusted."""
        live = "(SELECT slot FROM slots WHERE state = 2 ORDER BY RANDOM() LIMIT 1)"
        statement = self.rng.choice(_LIES).replace("SOME", live)
        connection = sqlite3.connect(self.directory / INDEX, timeout=5, isolation_level=None)
        try:
            with suppress(sqlite3.Error):  # some lies are against the schema
                connection.execute(statement)
        finally:
            connection.close()
        return "lie"


_LIES: Final = (
    "UPDATE slots SET num_bytes = num_bytes + 1 WHERE slot = SOME",
    "UPDATE slots SET num_bytes = 4096 WHERE state = 2",
    "UPDATE slots SET slot = 0 WHERE slot = SOME",
    "UPDATE slots SET slot = slot + 1 WHERE slot = SOME",
    "UPDATE slots SET slot = -slot WHERE slot = SOME",
    "UPDATE slots SET slot = slot + 1000000 WHERE slot = SOME",
    "UPDATE slots SET state = 0 WHERE state = 2",
    "UPDATE slots SET state = 0 WHERE slot = SOME",
    "UPDATE slots SET state = 1, owner = 77 WHERE slot = SOME",
    "UPDATE slots SET parent = name WHERE slot = SOME",
    "UPDATE slots SET parent = (SELECT name FROM slots WHERE slot = SOME) WHERE slot = SOME",
    "UPDATE slots SET name = randomblob(40) WHERE slot = SOME",
    "UPDATE slots SET name = randomblob(3) WHERE slot = SOME",
    "UPDATE slots SET name = NULL WHERE slot = SOME",
    "UPDATE slots SET slot_bytes = 4096 WHERE slot = SOME",
    "UPDATE slots SET generation = generation + 1 WHERE slot = SOME",
    "UPDATE slots SET priority = -1e300, used_s = 1e300, hits = -5, depth = -7 WHERE state = 2",
    "UPDATE slots SET family = 99 WHERE state = 2",
    "UPDATE slots SET expires_ms = 1 WHERE state = 2",
    "UPDATE extents SET slot_bytes = slot_bytes * 2",
    "DELETE FROM extents",
    "DELETE FROM families",
    "DELETE FROM owners",
    "DELETE FROM meta",
    "DELETE FROM log",
    "DELETE FROM slots WHERE slot = SOME",
    "INSERT INTO log SELECT MAX(seq) + 1000000, 5 FROM log",
    "INSERT INTO slots(slot, slot_bytes, state, generation, owner) SELECT slot + 1, slot_bytes, 0, 0, 0 FROM slots "
    "WHERE slot = SOME",
    "DROP TABLE slots",
    "DROP INDEX live_name",
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
            command = [sys.executable, "-m", "headwater.testing.damage", "--child", parent, "--damages", str(count)]
            child = subprocess.run([*command, "--seed", str(seed + done)], capture_output=True, text=True, check=False)
        done += count
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
