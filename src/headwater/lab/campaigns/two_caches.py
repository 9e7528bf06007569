"""The two-process campaign: caches with real threads share one LocalStore directory, and are killed and stopped.

    python -m headwater.lab.campaigns.two_caches --seconds 60 --json

Each process is an engine with a device of its own: requests come, match, load, compute, commit and leave, conversations
return in whichever process, and what one saved the other loads. Judged:

- every byte that a request may read is what its key says, after every step that changed it;
- a process that is asked to end gives everything back: no slot is a request's or in quarantine, no block is held or
  pinned, no staging page is out, no job is under way, every thread has ended;
- nobody hangs: each step of a running process ends within seconds;
- afterwards the directory is sound and no slot of it is reserved.
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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from headwater.build import open_local
from headwater.config.cache import SaveWhen, TierConfig
from headwater.config.stores import LocalStoreConfig
from headwater.core.errors import HeadwaterError
from headwater.lab.campaigns.virtual import BLOCK_TOKENS, LAYOUT, SimulatedEngine
from headwater.storage.base import Deadline
from headwater.storage.local.records import RecordState
from headwater.testing.device import BytesStaging
from headwater.testing.pages import IDENTITY
from headwater.transfer.executor.worker import Worker

LIMIT_BYTES: Final = 8 << 20
STEP_S: Final = 5.0  # a step of a process that was not stopped takes longer only if something hangs
MAX_RUNNING: Final = 6


@dataclass
class TwoCachesReport:
    """What the campaign saw. `ok` is the verdict."""

    seconds: float = 0.0
    kills: int = 0
    stops: int = 0
    ended: int = 0  # processes that were asked to end, and did
    requests: int = 0
    steps: int = 0
    hit_tokens: dict[str, int] = field(default_factory=dict)
    miss_tokens: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    held: list[str] = field(default_factory=list)  # what was not given back
    hung: int = 0
    store_problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every promise held, and the campaign saw what it came for."""
        saw = self.ended >= 2 and self.hit_tokens.get("device", 0) > 0 and self.hit_tokens.get("host", 0) > 0
        return saw and not (self.wrong or self.held or self.hung or self.store_problems)


# --- one process ------------------------------------------------------------------------------------------------------


class _CacheProcess:
    """An engine that serves until it is told to end. One line per fact, written before anything else happens."""

    def __init__(self, directory: Path, log: Path, seed: int) -> None:
        self._rng = random.Random(seed)
        self._fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._told_to_end = False
        signal.signal(signal.SIGTERM, self._end)
        self._store = open_local(LocalStoreConfig(directory=directory, limit_bytes=LIMIT_BYTES))
        staging = BytesStaging(LAYOUT, num_slots=70, num_pages=12, seed=seed)
        self._executor = Worker(
            {"host": self._store},
            staging,
            layout=LAYOUT,
            identity=IDENTITY,
            block_tokens=BLOCK_TOKENS,
            slice_pages=3,
            in_place_pages=3,
        )
        save = self._rng.choice([SaveWhen.COMMIT, SaveWhen.COMMIT, SaveWhen.EVICTION, SaveWhen.HITS])
        self._engine = SimulatedEngine(
            f"process {seed}", staging, self._executor, [TierConfig(name="host", save=save)], clock=time
        )
        self._executor.deliver = self._engine.cache.deliver
        self._turns: list[list[int]] = []

    def _end(self, number: int, frame: object) -> None:
        self._told_to_end = True

    def say(self, *words: object) -> None:
        os.write(self._fd, (" ".join(map(str, words)) + "\n").encode())

    def serve(self) -> None:
        """Serve until told to end, then give everything back and say so."""
        self.say("ready")
        try:
            while not self._told_to_end:
                self.say("begin", time.monotonic())
                self._step()
                self.say("end", time.monotonic())
                if self._rng.random() < 0.02:
                    self._say_tally()
        except AssertionError as error:
            self.say("wrong", str(error).replace("\n", " ")[:200])
        try:
            self._engine.finish(timeout_s=20.0)
            if not self._engine.cache.close(20.0):
                self.say("held", "a thread did not end")
            self._store.close()
        except (AssertionError, HeadwaterError) as error:
            self.say("held", str(error).replace("\n", " ")[:200])
        self._say_tally()
        self.say("ended")

    def _say_tally(self) -> None:
        self.say("tally", json.dumps(asdict(self._engine.tally)))

    def _step(self) -> None:
        engine, rng = self._engine, self._rng
        if len(engine.running) < MAX_RUNNING and rng.random() < 0.3:
            engine.arrive(self._prompt())
        if not engine.running:
            return
        request = rng.choice(list(engine.running))
        one = engine.running[request]
        chance = rng.random()
        if chance < 0.03:
            engine.leave(request)
        elif chance < 0.06:
            engine.cache.give_up(request)
        elif not one.slots:
            if chance < 0.9:
                engine.cache.wait(request, 0.2)
                engine.ask(request)
            if not engine.reserve(request, rng.randint(0, 3)):
                engine.leave(request)
        else:
            if chance < 0.8:
                engine.cache.wait(request, 0.2)
            if engine.compute(request, rng.randint(1, 6)):
                engine.check_request(request)
                if one.num_computed == len(one.slots):
                    self._turns.append(list(one.path))
                    engine.leave(request)
        if rng.random() < 0.02:
            engine.check()

    def _prompt(self) -> list[int]:
        """A turn of a conversation that another process may have begun: the numbers are from a small world."""
        rng = self._rng
        if self._turns and rng.random() < 0.5:
            return [*rng.choice(self._turns[-30:]), *(rng.randrange(3) for _ in range(rng.randint(0, 3)))][:24]
        topic = random.Random(rng.randrange(60))
        return [topic.randrange(4) for _ in range(topic.randint(2, 20))]


# --- the campaign -----------------------------------------------------------------------------------------------------


_FAULTS: Final = ("stop", "stop", "kill", "kill", "kill")


class _Child:
    def __init__(self, directory: Path, logs: Path, seed: int) -> None:
        self.log = logs / f"{seed}.log"
        command = [
            sys.executable,
            "-m",
            "headwater.lab.campaigns.two_caches",
            "--process",
            str(directory),
            str(self.log),
        ]
        self.process = subprocess.Popen([*command, "--seed", str(seed)])
        self.was_stopped = False
        self.killed_s: float | None = None

    def lines(self) -> list[list[str]]:
        if not self.log.exists():
            return []
        text = self.log.read_text()
        return [line.split(maxsplit=1) for line in text[: text.rfind("\n") + 1].splitlines()]

    def wait_until_ready(self) -> None:
        give_up_s = time.monotonic() + 30
        while ["ready"] not in self.lines():
            if time.monotonic() > give_up_s or self.process.poll() is not None:
                raise RuntimeError("a process did not come up")
            time.sleep(0.02)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.killed_s = time.monotonic()


def campaign(directory: Path, *, seconds: float, seed: int = 0, processes: int = 2, least: int = 1) -> TwoCachesReport:
    """Run the campaign on a fresh directory, for `seconds`; four times that, if need be, for `least` of each fault."""
    rng = random.Random(seed)
    report = TwoCachesReport(seconds=seconds)
    next_seed = seed * 1000
    with tempfile.TemporaryDirectory() as logs:

        def start() -> _Child:
            nonlocal next_seed
            next_seed += 1
            child = _Child(directory, Path(logs), next_seed)
            child.wait_until_ready()
            everyone.append(child)
            return child

        everyone: list[_Child] = []
        running = [start() for _ in range(processes)]
        until_s = time.monotonic() + seconds
        last_s = until_s + 3 * seconds
        deck: list[str] = []  # what comes next: a slow machine, which has few of them, has some of both too
        while time.monotonic() < (until_s if min(report.kills, report.stops) >= least else last_s):
            time.sleep(rng.uniform(0.3, 2.0))
            at = rng.randrange(processes)
            victim = running[at]
            deck = deck or rng.sample(_FAULTS, len(_FAULTS))
            if deck.pop() == "stop":
                report.stops += 1
                victim.was_stopped = True
                victim.process.send_signal(signal.SIGSTOP)
                time.sleep(rng.uniform(0.05, 1.0))
                victim.process.send_signal(signal.SIGCONT)
            else:
                report.kills += 1
                victim.kill()
                running[at] = start()
        for child in running:
            child.process.send_signal(signal.SIGTERM)
        for child in running:
            try:
                child.process.wait(60)
            except subprocess.TimeoutExpired:
                report.hung += 1
                child.kill()
        for child in everyone:
            _read(child, report)
    with open_local(LocalStoreConfig(directory=directory)) as store:
        report.store_problems += store.validate(deadline=Deadline.after(10))
        reserved = store.slots(deadline=Deadline.after(10)).get(RecordState.RESERVED, 0)
        if reserved:
            report.store_problems.append(f"{reserved} slots are still reserved")
    return report


def _read(child: _Child, report: TwoCachesReport) -> None:
    begun_s: float | None = None
    tally: dict[str, Any] = {}
    for line in child.lines():
        match line:
            case ["wrong", what]:
                report.wrong.append(what)
            case ["held", what]:
                report.held.append(what)
            case ["begin", at]:
                begun_s = float(at)
            case ["end", at]:
                report.steps += 1
                report.hung += begun_s is not None and not child.was_stopped and float(at) - begun_s > STEP_S
                begun_s = None
            case ["tally", text]:
                tally = json.loads(text)
            case ["ended"]:
                report.ended += 1
    report.requests += tally.get("served", 0) + tally.get("left_early", 0)
    for sums, parts in ((report.hit_tokens, "hit_tokens"), (report.miss_tokens, "miss_tokens")):
        for name, tokens in tally.get(parts, {}).items():
            sums[name] = sums.get(name, 0) + tokens
    if begun_s is not None and child.killed_s is not None and not child.was_stopped:
        report.hung += child.killed_s - begun_s > STEP_S
    if child.killed_s is None and ["ended"] not in child.lines():
        report.held.append(f"a process ended by itself with {child.process.returncode}")


def main() -> None:
    """Command line: the campaign, or one of its processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--dir", type=Path, default=None, help="parent of the store's directory (default: tmpfs)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--process", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.process:
        directory, log = options.process
        _CacheProcess(directory, log, options.seed).serve()
        return
    with tempfile.TemporaryDirectory(prefix="headwater-two-", dir=options.dir or "/dev/shm") as parent:
        report = campaign(
            Path(parent) / "store", seconds=options.seconds, seed=options.seed, processes=options.processes
        )
    sys.stdout.write(json.dumps({"ok": report.ok, **asdict(report)}, indent=None if options.json else 2) + "\n")
    sys.exit(0 if report.ok else 1)


if __name__ == "__main__":
    main()
