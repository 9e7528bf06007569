"""The crash campaign: processes that share one directory are killed and stopped at random moments.

    python -m headwater.lab.campaigns.crash --rounds 200 --json

Each round kills a worker with SIGKILL, or stops it with SIGSTOP for a while (and sometimes kills it then), while all
of them put, read and thereby evict. Every worker writes down which page it is about to evict, before it does; that is
the truth against which the end of each era is judged, in a fresh process' view:

- a read that says HIT holds exactly the page's bytes (checked by every worker, always);
- a page whose put said STORED is still readable, unless an eviction is on record;
- no call of a running worker ends later than its deadline and a half second (a call during which its own worker was
  stopped does not count);
- the directory stays within its limit, no reservation of a dead process is left, and the index is sound;
- at the end, after some deletions and the loss of all records, a rebuild finds exactly what was there.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from headwater.build import open_local
from headwater.config.stores import LocalStoreConfig
from headwater.core.page import PageName
from headwater.core.results import Status
from headwater.storage.base import Deadline
from headwater.storage.local import LocalStore
from headwater.storage.local.catalog import Catalog
from headwater.storage.local.directory import SLAB
from headwater.storage.local.geometry import Geometry
from headwater.storage.local.mirror import Slot
from headwater.storage.local.records import RecordState
from headwater.storage.verified import VerifiedStore
from headwater.testing.pages import IDENTITY, items, sample_chain

SMALL: Final = (16384, 16384, 3000)
LARGE: Final = (60000, 60000, 1)
DEPTH: Final = 6
DEADLINE_S: Final = 0.5
GRACE_S: Final = 0.5
LIMIT_BYTES: Final = 24 << 20  # about 300 pages


def planes(chain: int) -> tuple[int, ...]:
    """Two page sizes share the store, so that extents change hands."""
    return LARGE if chain % 2 else SMALL


@dataclass
class CrashReport:
    """What the campaign saw. `ok` is the verdict."""

    rounds: int = 0
    kills: int = 0
    stops: int = 0
    calls: int = 0
    stored: int = 0
    hits: int = 0
    evictions: int = 0
    wrong_bytes: int = 0
    lost: int = 0
    late: int = 0
    overruns: int = 0
    over_limit: int = 0
    stuck_reservations: int = 0
    resurrected: int = 0
    rebuilt: int = 0
    worker_failures: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every promise held."""
        bad = self.wrong_bytes + self.lost + self.resurrected + self.overruns + self.over_limit
        bad += self.stuck_reservations + self.rebuilt
        return bad == 0 and not self.worker_failures and self.hits > 0 and self.stored > 0


# --- a worker: writes what it did to a log that survives its death ----------------------------------------------------


def worker(directory: Path, log: Path, seed: int, num_chains: int) -> None:
    """Put and read pages for ever. One line per fact, written before anything else happens."""
    rng = random.Random(seed)
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def say(*words: object) -> None:
        os.write(fd, (" ".join(map(str, words)) + "\n").encode())

    unpublish = Catalog._unpublish

    def tell(catalog: Catalog, names: Sequence[PageName], owner: int) -> list[Slot]:
        for name in names:
            say("evicting", name.hex())
        return unpublish(catalog, names, owner)

    setattr(Catalog, "_unpublish", tell)  # noqa: B010  a method; this process does nothing else
    with open_local(LocalStoreConfig(directory=directory, limit_bytes=LIMIT_BYTES)) as store:
        readers = [VerifiedStore(store, identity=IDENTITY, plane_bytes=planes(i)) for i in range(2)]
        say("ready")
        while True:
            chain_id, length = rng.randrange(num_chains), rng.randint(1, DEPTH)
            chain = sample_chain(chain_id, length, plane_bytes=planes(chain_id))
            start_s = time.monotonic()
            say("begin", start_s)
            if rng.random() < 0.5:
                for page, status in zip(
                    chain, store.put(items(chain), deadline=Deadline.after(DEADLINE_S)), strict=True
                ):
                    if status is Status.STORED:
                        say("stored", page.name.hex())
            else:
                pages = [(page.name, page.buffer()) for page in chain]
                results = readers[chain_id % 2].get_into(pages, deadline=Deadline.after(DEADLINE_S))
                for page, (_, buffer), got in zip(chain, pages, results, strict=True):
                    if got is Status.HIT:
                        say("hit" if bytes(buffer) == page.frame else "wrong")
                    elif got is Status.LATE:
                        say("late")
                    elif got is not Status.MISS:
                        say("fault", got.value)
            end_s = time.monotonic()
            say("call", start_s, end_s)
            if store.down is not None:
                say("fault", "down", store.down)
                store.revive()


# --- the campaign -----------------------------------------------------------------------------------------------------


class _Worker:
    def __init__(self, directory: Path, logs: Path, seed: int, num_chains: int) -> None:
        self.log = logs / f"{seed}.log"
        command = [sys.executable, "-m", "headwater.lab.campaigns.crash", "--worker", str(directory), str(self.log)]
        self.process = subprocess.Popen([*command, "--seed", str(seed), "--chains", str(num_chains)])
        self.stopped: list[tuple[float, float]] = []
        self.killed_s = 0.0

    def stop_for(self, seconds: float) -> None:
        start_s = time.monotonic()
        self.process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self.process.send_signal(signal.SIGCONT)
        self.stopped.append((start_s, time.monotonic()))

    def kill(self) -> None:
        self.killed_s = time.monotonic()
        self.process.kill()
        self.process.wait()

    def overran(self, begun_s: float, ended_s: float) -> bool:
        """Whether a call lasted too long, though its own process was not stopped."""
        own_stop = any(begun_s < end_s and ended_s > start_s for start_s, end_s in self.stopped)
        return ended_s - begun_s > DEADLINE_S + GRACE_S and not own_stop

    def lines(self) -> list[list[str]]:
        if not self.log.exists():
            return []
        text = self.log.read_text()
        return [line.split() for line in text[: text.rfind("\n") + 1].splitlines()]  # the last one may be torn


def campaign(
    directory: Path,
    *,
    rounds: int,
    seed: int = 0,
    tight: bool = True,
    workers: int = 3,
    rounds_per_era: int = 20,
    evictions: int = 0,
) -> CrashReport:
    """Run the campaign on a fresh directory. `tight`: pages must be evicted; otherwise all fit, and none may go.

    `evictions`: it goes on until there were so many, for five times the rounds at most.
    """
    rng = random.Random(seed)
    report = CrashReport()
    num_chains = 200 if tight else 30
    open_local(LocalStoreConfig(directory=directory, limit_bytes=LIMIT_BYTES)).close()
    held: set[bytes] = set()  # pages that must be there, unless they were evicted
    with tempfile.TemporaryDirectory() as logs:
        next_seed = seed * 1_000_000
        while report.rounds < rounds or (report.evictions < evictions and report.rounds < 5 * rounds):
            running = []
            for _ in range(workers):
                next_seed += 1
                running.append(_Worker(directory, Path(logs), next_seed, num_chains))
            everyone = list(running)
            _wait_until_ready(running)
            left = rounds - report.rounds
            for _ in range(min(rounds_per_era, left if left > 0 else rounds)):
                report.rounds += 1
                time.sleep(rng.uniform(0.02, 0.3))
                victim = rng.choice(running)
                if rng.random() < 0.5:
                    report.stops += 1
                    victim.stop_for(rng.uniform(0.05, 0.8))
                else:
                    if rng.random() < 0.3:  # dies while it is stopped
                        victim.stopped.append((time.monotonic(), float("inf")))
                        victim.process.send_signal(signal.SIGSTOP)
                        time.sleep(rng.uniform(0.0, 0.2))
                    report.kills += 1
                    victim.kill()
                    next_seed += 1
                    successor = _Worker(directory, Path(logs), next_seed, num_chains)
                    running[running.index(victim)] = successor
                    everyone.append(successor)
            for one in running:
                if one.process.poll() is not None:
                    report.worker_failures.append(f"a worker ended by itself with {one.process.returncode}")
                one.kill()
            stored, evicted = _read_logs(everyone, report)
            report.lost += 0 if tight else len(evicted)
            held = _judge(directory, (held | stored) - evicted, report, num_chains=num_chains)
            for one in everyone:
                one.log.unlink(missing_ok=True)
    _judge_rebuild(directory, report, num_chains=num_chains)
    return report


def _wait_until_ready(workers: list[_Worker]) -> None:
    give_up = time.monotonic() + 30
    while not all(["ready"] in one.lines() for one in workers):
        if time.monotonic() > give_up:
            raise RuntimeError("a worker did not come up in 30 s")
        time.sleep(0.02)


def _read_logs(workers: list[_Worker], report: CrashReport) -> tuple[set[bytes], set[bytes]]:
    """Pages that were stored, and pages that somebody at least began to evict, in whatever order."""
    stored: set[bytes] = set()
    evicted: set[bytes] = set()
    for one in workers:
        begun: float | None = None
        for line in one.lines():
            match line:
                case ["stored", name]:
                    stored.add(bytes.fromhex(name))
                    report.stored += 1
                case ["evicting", name]:
                    evicted.add(bytes.fromhex(name))
                    report.evictions += 1
                case ["hit"]:
                    report.hits += 1
                case ["wrong"]:
                    report.wrong_bytes += 1
                case ["fault", *what]:
                    report.worker_failures.append(" ".join(what))
                case ["late"]:
                    report.late += 1
                case ["begin", start]:
                    begun = float(start)
                case ["call", start, end]:
                    report.calls += 1
                    report.overruns += one.overran(float(start), float(end))
                    begun = None
        if begun is not None:  # killed in the middle of a call: which was not to have lasted for ever
            report.overruns += one.overran(begun, one.killed_s)
    return stored, evicted


def _judge(directory: Path, held: set[bytes], report: CrashReport, *, num_chains: int) -> set[bytes]:
    """Compare a fresh process' view with what must be there. Returns what is."""
    size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    report.over_limit += size > LIMIT_BYTES
    with open_local(LocalStoreConfig(directory=directory)) as store:
        found = _read_all(store, num_chains, report)
        report.lost += len(held - found)
        report.stuck_reservations += store.slots(deadline=Deadline.after(10)).get(RecordState.RESERVED, 0)
        report.rebuilt += len(store.metrics.events("local_rebuilt"))
        report.worker_failures += store.validate(deadline=Deadline.after(10))
    return set(found)


def _judge_rebuild(directory: Path, report: CrashReport, *, num_chains: int) -> None:
    """The end: delete some pages, lose all records, and compare what the rebuild finds with what was there."""
    with open_local(LocalStoreConfig(directory=directory)) as store:
        doomed = [sample_chain(i, 1, plane_bytes=planes(i))[0].name for i in range(0, num_chains, 3)]
        store.delete(doomed, deadline=Deadline.after(10))
        before = _read_all(store, num_chains, report)
    geometry = Geometry.plan(LIMIT_BYTES)
    with (directory / SLAB).open("r+b") as slab:
        slab.seek(geometry.records_at)
        slab.write(bytes(geometry.uses_at - geometry.records_at))
    with open_local(LocalStoreConfig(directory=directory)) as store:
        after = _read_all(store, num_chains, report)
        report.worker_failures += store.validate(deadline=Deadline.after(10))
    report.lost += len(before - after)
    report.resurrected += len(after - before)


def _read_all(store: LocalStore, num_chains: int, report: CrashReport) -> set[PageName]:
    found = set()
    for chain_id in range(num_chains):
        reader = VerifiedStore(store, identity=IDENTITY, plane_bytes=planes(chain_id))
        for page in sample_chain(chain_id, DEPTH, plane_bytes=planes(chain_id)):
            buffer = page.buffer()
            if reader.get_into([(page.name, buffer)], deadline=Deadline.after(10))[0] is Status.HIT:
                report.wrong_bytes += bytes(buffer) != page.frame
                found.add(page.name)
    return found


def main() -> None:
    """Command line: the campaign, or one of its workers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--roomy", action="store_true", help="all pages fit: none may go")
    parser.add_argument("--dir", type=Path, default=None, help="parent of the store's directory (default: tmpfs)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--chains", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--worker", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        directory, log = options.worker
        worker(directory, log, options.seed, options.chains)
        return
    with tempfile.TemporaryDirectory(prefix="headwater-crash-", dir=options.dir or "/dev/shm") as parent:
        report = campaign(Path(parent) / "store", rounds=options.rounds, seed=options.seed, tight=not options.roomy)
    result = {"ok": report.ok, **asdict(report)} | {"worker_failures": Counter(report.worker_failures)}
    sys.stdout.write(json.dumps(result, indent=None if options.json else 2) + "\n")
    sys.exit(0 if report.ok else 1)


if __name__ == "__main__":
    main()
