"""The stop campaign: another process is stopped wherever it may be, and nobody waits for it past a deadline.

    python -m headwater.lab.campaigns.stopped --moments 10000 --json     # at random moments
    python -m headwater.lab.campaigns.stopped --calls 3000 --json  # around each system call that it makes

A victim puts, reads and deletes pages of a store, and opens and closes it, without end. It is stopped; this process
makes every sort of call on the same directory; the victim goes on. What must hold: each call ends by its deadline and a
quarter of a second, pages that are there are read all the same, and a HIT holds the page's bytes.

Where a machine has more to do than cores, this process waits for one, for seconds at worst, and no store can help that.
The kernel counts that time, per thread, and it is taken off: what was late by the clock alone is `starved`. Whatever
else a call waits for, a lock, a disk, a sleep, stays with it.
"""

import argparse
import ctypes
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from headwater.build import open_local
from headwater.config.stores import LocalStoreConfig
from headwater.core.errors import StoreBusy
from headwater.core.results import Status
from headwater.storage.base import Deadline
from headwater.storage.local import LocalStore
from headwater.storage.verified import VerifiedStore
from headwater.testing.pages import IDENTITY, PLANE_BYTES, items, sample_chain

LIMIT_BYTES: Final = 8 << 20
DEADLINE_S: Final = 0.05
GRACE_S: Final = 0.25
THERE: Final = sample_chain(1, 6)  # kept in use, so that nobody evicts them
_TRACEME, _CONT, _SYSCALL = 0, 7, 24  # of ptrace


def victim(directory: Path, seed: int) -> None:
    """Use the store, for ever."""
    rng = random.Random(seed)
    config = LocalStoreConfig(directory=directory, limit_bytes=LIMIT_BYTES)
    sys.stdout.write("up\n")
    sys.stdout.flush()
    while True:
        with open_local(config) as store:
            for _ in range(rng.randrange(1, 30)):
                chain = sample_chain(rng.randrange(10, 200), rng.randrange(1, 6))
                kind = rng.random()
                if kind < 0.6:
                    store.put(items(chain), deadline=Deadline.after(5))
                elif kind < 0.8:
                    store.delete([chain[0].name], deadline=Deadline.after(5))
                else:
                    store.get_into([(page.name, page.buffer()) for page in chain], deadline=Deadline.after(5))


@dataclass
class Watched:
    """What was seen while the victim stood still."""

    moments: int = 0
    calls: int = 0
    late: Counter[str] = field(default_factory=Counter)
    blocked: Counter[str] = field(default_factory=Counter)  # changes that were not to be had: the victim held the lock
    worst_s: dict[str, float] = field(default_factory=dict)
    wrong: int = 0
    missed: int = 0  # pages that are there, and were not read
    starved: Counter[str] = field(default_factory=Counter)  # calls that were late, or read late, for want of a core
    why: list[dict[str, Any]] = field(default_factory=list)  # of each late or starved call: what the kernel says

    @property
    def ok(self) -> bool:
        """Whether every promise held."""
        return not (self.late.total() or self.wrong or self.missed) and self.moments > 0

    def document(self) -> dict[str, Any]:
        """Plain values."""
        return {"ok": self.ok, **self.__dict__}


class Watcher:
    """Calls on a store beside a victim that is stopped."""

    def __init__(self, directory: Path, rng: random.Random) -> None:
        self.config = LocalStoreConfig(directory=directory, limit_bytes=LIMIT_BYTES)
        self.store: LocalStore = open_local(self.config)
        self.store.put(items(THERE), deadline=Deadline.after(10))
        self.seen = Watched()
        self._rng = rng
        self._is_starved = False  # whether the last call was over its deadline only for want of a core

    def look(self) -> None:
        """Every sort of call, once."""
        self.seen.moments += 1
        store, new = self.store, sample_chain(self._rng.randrange(300, 400), 2)
        reader = VerifiedStore(store, identity=IDENTITY, plane_bytes=PLANE_BYTES)
        wanted = [(page.name, page.buffer()) for page in THERE]
        statuses = self._timed("get", lambda d: reader.get_into(wanted, deadline=d))
        for page, (_, buffer), status in zip(THERE, wanted, statuses, strict=True):
            self.seen.missed += status is not Status.HIT and not (status is Status.LATE and self._is_starved)
            self.seen.wrong += status is Status.HIT and bytes(buffer) != page.frame
        self._timed("contains", lambda d: store.contains([page.name for page in (*THERE, *new)], deadline=d))
        puts = self._timed("put", lambda d: store.put(items(new), deadline=d))
        self.seen.blocked["put"] += any(status == "late" for status in puts)
        deletes = self._timed("delete", lambda d: store.delete([new[0].name], deadline=d))
        self.seen.blocked["delete"] += any(status == "late" for status in deletes)
        if self.seen.moments % 50 == 0:
            self._timed("open", self._open)

    def _open(self, deadline: Deadline) -> list[str]:
        config = LocalStoreConfig(directory=self.config.directory, open_timeout_s=DEADLINE_S)
        try:
            open_local(config).close()
        except StoreBusy:
            self.seen.blocked["open"] += 1
        return []

    def _timed(self, what: str, call: Callable[[Deadline], list[Any]]) -> list[Any]:
        with _on_one_core():
            begin_s, begin = time.monotonic(), _kernel_says()
            deadline = Deadline.after(DEADLINE_S)
            found = call(deadline)
            spent = {name: round(now - begin[name], 4) for name, now in _kernel_says().items()}
            # All core waits that are taken off lie inside what is measured: the clock is looked at first and last.
            wall_s = time.monotonic() - begin_s
        net_s = wall_s - spent["waited_for_a_core_s"]
        by_clock_s, over_s = wall_s - DEADLINE_S, net_s - DEADLINE_S
        # One that waits for something else until its deadline waits for a core as well, whenever it wakes up; so who
        # ever went to sleep is not excused. A read of pages that are there does not sleep.
        self._is_starved = by_clock_s > 0 and net_s < DEADLINE_S / 2 and not spent["slept"]
        self.seen.calls += 1
        self.seen.worst_s[what] = max(self.seen.worst_s.get(what, -1.0), round(over_s, 4))
        grace_s = GRACE_S + (1.0 if what == "open" else 0.0)  # closing tries to sign out for a second
        is_late = over_s > grace_s
        self.seen.late[what] += is_late
        if is_late or by_clock_s > grace_s or (what == "get" and self._is_starved):
            self.seen.starved[what] += not is_late
            self.seen.why.append({"what": what, "wall_s": round(wall_s, 4), **spent})
        return found


@contextmanager
def _on_one_core() -> Iterator[None]:
    """Keep this thread on the core where it is.

    Linux 6.12 and later leave a thread that sleeps in its core's queue for a while. If it is moved to another core
    just then, its whole sleep is counted as a wait for a core: that was so for one sleep in a hundred beside busy
    processes, and for none of a thread that could not be moved.
    """
    cores = os.sched_getaffinity(0)
    fields_after_the_name = Path("/proc/thread-self/stat").read_text().rpartition(")")[2].split()
    os.sched_setaffinity(0, {int(fields_after_the_name[36])})  # field 39, the core it ran on last
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def _kernel_says() -> dict[str, float]:
    """Of this thread and this machine, up to now; seconds, and numbers of faults and switches."""
    used = resource.getrusage(resource.RUSAGE_THREAD)
    run_ns, ready_ns, _ = map(int, Path("/proc/thread-self/schedstat").read_text().split())
    stolen = int(Path("/proc/stat").read_text().split(None, 9)[8])  # of all cores, by who runs this machine
    return {
        "ran_s": run_ns / 1e9,
        "waited_for_a_core_s": ready_ns / 1e9,
        "stolen_s": stolen / os.sysconf("SC_CLK_TCK"),
        "disk_faults": used.ru_majflt,
        "slept": used.ru_nvcsw,
        "was_interrupted": used.ru_nivcsw,
    }


def _start(directory: Path, seed: int, *, traced: bool) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "headwater.lab.campaigns.stopped", "--victim", str(directory), "--seed", str(seed)]
    return subprocess.Popen([*command, *(["--traced"] if traced else [])], stdout=subprocess.PIPE, text=True)


def at_moments(directory: Path, *, moments: int, seed: int = 0) -> Watched:
    """Stop the victim at random moments."""
    rng = random.Random(seed)
    watcher = Watcher(directory, rng)
    process = _start(directory, seed, traced=False)
    try:
        if process.stdout is None or process.stdout.readline() != "up\n":
            raise RuntimeError("the victim did not come up")
        for _ in range(moments):
            time.sleep(rng.expovariate(2000))
            process.send_signal(signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)
            watcher.look()
            process.send_signal(signal.SIGCONT)
    finally:
        process.kill()
        process.communicate()
        watcher.store.close()
    return watcher.seen


def at_system_calls(directory: Path, *, calls: int, seed: int = 0) -> Watched:
    """Stop the victim before and after system calls, one by one, with the debugger's interface of the kernel."""
    watcher = Watcher(directory, random.Random(seed))
    process = _start(directory, seed, traced=True)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    try:
        if process.stdout is None:
            raise RuntimeError("the victim has no output")
        os.waitpid(process.pid, 0)  # it stops itself when it is ready
        for _ in range(calls):
            libc.ptrace(_SYSCALL, process.pid, None, None)
            _, status = os.waitpid(process.pid, 0)
            if not os.WIFSTOPPED(status):
                raise RuntimeError(f"the victim died with {status}")
            watcher.look()
    finally:
        process.kill()
        process.communicate()
        watcher.store.close()
    return watcher.seen


def main() -> None:
    """Command line: a campaign, or its victim."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--moments", type=int, default=0)
    parser.add_argument("--calls", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, default=None, help="parent of the store's directory (default: tmpfs)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--victim", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--traced", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.victim:
        if options.traced:
            ctypes.CDLL(None).ptrace(_TRACEME, 0, None, None)
            os.kill(os.getpid(), signal.SIGSTOP)
        victim(options.victim, options.seed)
        return
    result: dict[str, Any] = {"ok": True}
    for what, count, run in (("moments", options.moments, at_moments), ("calls", options.calls, at_system_calls)):
        if count:
            with tempfile.TemporaryDirectory(prefix="headwater-stopped-", dir=options.dir or "/dev/shm") as parent:
                seen = run(Path(parent) / "store", **{what: count}, seed=options.seed)
            result[what] = seen.document()
            result["ok"] = result["ok"] and seen.ok
    sys.stdout.write(json.dumps(result, indent=None if options.json else 2) + "\n")
    sys.exit(0 if result["ok"] else 1)


if __name__ == "__main__":
    main()
