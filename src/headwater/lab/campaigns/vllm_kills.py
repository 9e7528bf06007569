"""The kill campaign under vLLM: processes are killed while they store, and the next one serves what is there.

    python -m headwater.lab.campaigns.vllm_kills --times 20 --json [--python PATH]

Each life is one vLLM process with the connector on one small disk directory. It first answers what was stored before
it: a prompt that is always asked again, and the one that was being stored when the life before ended. Then it is asked
for a new prompt, and gets SIGKILL as soon as saves of it are on their way, at a random moment. Judged in every life:

- all tokens are those of a vLLM without a connector;
- the prompt that is always asked is a hit, whole, from the disk;
- the directory is within its limit, which is too small for all prompts.

A kill counts only if a save was on its way when it hit: the process keeps that number in shared memory, which outlives
it. At the end every page of the directory is read and verified. Lives are forked from one process that has imported
vLLM and started nothing: importing it takes longer than the rest.
"""

import argparse
import contextlib
import json
import mmap
import os
import random
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from headwater.build import open_local
from headwater.config.stores import LocalStoreConfig
from headwater.core.events import Demote, Event, Instruction, JobDone, JobFailed, Save
from headwater.engine.make_model import make_model
from headwater.lab.bench.vllm_client import EngineProcess, WorkerFailed
from headwater.lab.bench.vllm_worker import serve
from headwater.lab.verify.vllm_scene import KINDS, Places, VllmScene
from headwater.lab.verify.vllm_worker import EngineStage, worker_side
from headwater.storage.local import audit
from headwater.storage.scratch import disk_root

LIMIT_BYTES: Final = 12 << 20
_BLOCKS: Final = 20
_ANSWER: Final = 16
_TRIES: Final = 3  # lives per kill that counts, at most, and
_SPARE_TRIES: Final = 8
_UP_S: Final = 120.0
_POLL_S: Final = 0.0002
_DELAYS_S: Final = (0.002, 0.03)  # a kill comes at most so long after saves began, by turns of chance
_SETTINGS: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "PYTHONHASHSEED": "0",
}


@dataclass
class KillReport:
    """What the campaign saw. `ok` is the verdict."""

    times: int
    lives: int = 0
    kills: int = 0
    kills_while_storing: int = 0
    answers: int = 0
    wrong_answers: int = 0
    hit_tokens: int = 0
    lives_without_hit: int = 0
    cut_hit_tokens: list[int] = field(default_factory=list)  # of each prompt whose saving was cut off, asked again
    limit_bytes: int = LIMIT_BYTES
    stored_bytes: int = 0  # of all prompts, had there been room
    most_bytes: int = 0
    over_limit: int = 0
    pages_at_end: int = 0
    bad_pages: int = 0
    reserved_at_end: int = 0
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether so many were killed while storing, and nothing went wrong."""
        bad = self.wrong_answers + self.lives_without_hit + self.over_limit + self.bad_pages + self.reserved_at_end
        return not bad and self.kills_while_storing >= self.times and self.hit_tokens > 0


class SaveTally:
    """Between a worker side and its executor: how many saves are on their way, where the killer can see it."""

    def __init__(self, side: Any, shared: mmap.mmap) -> None:
        self._executor = side._executor
        self._heard = side._executor.deliver
        self._shared = shared
        self._live: set[int] = set()
        self._executor.deliver = self.hear
        side._executor = self

    def submit(self, instructions: Iterable[Instruction]) -> None:
        """Count, then pass on."""
        instructions = list(instructions)
        self._live.update(one.job for one in instructions if isinstance(one, Save | Demote))
        self._tell()
        self._executor.submit(instructions)

    def __getattr__(self, name: str) -> Any:
        """Everything else is the executor's own."""
        return getattr(self._executor, name)

    def hear(self, event: Event) -> None:
        """Count, then pass on."""
        if isinstance(event, JobDone | JobFailed):
            self._live.discard(event.job)
            self._tell()
        self._heard(event)

    def _tell(self) -> None:
        self._shared[:8] = struct.pack("<q", len(self._live))


class KillStage(EngineStage):
    """What a life serves: engines, and the tally of the one that is open."""

    shared: mmap.mmap

    def open(self, setup: Mapping[str, Any], fault: str | None = None, num_good: int = 0) -> dict[str, Any]:
        """Start an engine, and watch its saves."""
        found = super().open(setup, fault, num_good)
        side = worker_side()
        if side is not None:
            SaveTally(side.side, self.shared)
        return found


class _Fork:
    """A forked process, with the part of Popen's face that a Worker uses."""

    def __init__(self, shared: mmap.mmap, log: Path) -> None:
        commands, answers = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(commands[1])
            os.close(answers[0])
            _live(commands[0], answers[1], shared, log)
        os.close(commands[0])
        os.close(answers[1])
        self.stdin, self.stdout = os.fdopen(commands[1], "wb", buffering=0), os.fdopen(answers[0], "rb", buffering=0)
        self._gone = False

    def kill(self) -> None:
        """SIGKILL."""
        if not self._gone:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout_s: float | None = None) -> int:
        """Until it is gone. Raises TimeoutExpired."""
        give_up_s = time.monotonic() + (timeout_s if timeout_s is not None else _UP_S)
        while not self._gone:
            self._gone = os.waitpid(self.pid, os.WNOHANG)[0] == self.pid
            if not self._gone and time.monotonic() > give_up_s:
                raise subprocess.TimeoutExpired("a life", timeout_s or _UP_S)
            time.sleep(0.01)
        return 0


def _live(commands: int, answers: int, shared: mmap.mmap, log: Path) -> None:
    """The whole life of a forked process."""
    try:
        printed = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        KillStage.shared = shared
        with os.fdopen(commands, encoding="utf-8") as asked, os.fdopen(answers, "w", encoding="utf-8") as said:
            serve({}, asked, said, start=KillStage)
    finally:
        os._exit(0)


class Life(EngineProcess):
    """The driver's end of one life."""

    def __init__(self, shared: mmap.mmap, log: Path) -> None:
        self.name = "a life"
        self._log = log
        self._unread = b""
        self._process = _Fork(shared, log)  # type: ignore[assignment]  # the part of its face that is used

    def begin(self, do: str, **arguments: Any) -> None:
        """Have something done, and do not wait for it."""
        line = json.dumps({"do": do, **arguments}).encode() + b"\n"
        os.write(self._process.stdin.fileno(), line)  # type: ignore[union-attr]

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self._process.kill()
        self._process.wait(_UP_S)


class KillCampaign:
    """All lives on one directory."""

    def __init__(self, root: Path, report: KillReport, *, seed: int) -> None:
        self._root = root
        self._report = report
        self._random = random.Random(seed)
        self._shared = mmap.mmap(-1, mmap.PAGESIZE)  # shared with what is forked
        self._log = root / "lives.log"
        self._right: dict[str, list[int]] = {}
        self._cut: str | None = None  # the prompt whose saving was cut off last
        maker = os.fork()  # whoever computed with torch must not fork: its threads would be missing
        if maker == 0:
            with contextlib.suppress(BaseException):
                make_model(KINDS["gqa"].family, root / "model", overrides=KINDS["gqa"].overrides)
            os._exit(0)
        os.waitpid(maker, 0)

    def run(self) -> None:
        """Live and die until there were enough kills that count."""
        report = self._report
        names = ["always", *(f"new {number}" for number in range(_TRIES * report.times + _SPARE_TRIES))]
        self._learn(names)
        for name in names[1:]:
            if report.kills_while_storing >= report.times:
                break
            self._life(name)
        self._life(None)
        self._judge_end()

    def _learn(self, names: Sequence[str]) -> None:
        """What vLLM answers without a connector."""
        life = self._born()
        try:
            scene = self._scene(life)
            scene.open()
            for name in names:
                said = scene.ask(self._prompt(scene, name), max_tokens=_ANSWER)
                (self._right[name],) = said["tokens"]
        finally:
            life.kill()
            life.close()

    def _life(self, name: str | None) -> None:
        """Answer what was stored before, then be killed while storing `name`; None: live on, and end well."""
        report = self._report
        life = self._born()
        report.lives += 1
        try:
            scene = self._scene(life)
            scene.open("disk")
            hits = self._ask(scene, "always")
            whole = _BLOCKS * scene.kind.block_tokens
            report.lives_without_hit += report.lives > 1 and hits != whole
            if self._cut is not None:
                report.cut_hit_tokens.append(self._ask(scene, self._cut))
            scene.settle()
            if name is not None:
                self._kill(life, scene, name)
        finally:
            life.kill()
            life.close()
        self._judge_size()

    def _kill(self, life: Life, scene: VllmScene, name: str) -> None:
        """Ask, and kill at a random moment after saves began."""
        life.begin("ask", prompts=[self._prompt(scene, name)], max_tokens=_ANSWER, give_up_s=_UP_S)
        give_up_s = time.monotonic() + _UP_S
        while not self._storing and time.monotonic() < give_up_s:
            time.sleep(_POLL_S)
        time.sleep(self._random.uniform(0, self._random.choice(_DELAYS_S)))
        life.kill()
        self._report.kills += 1
        self._report.kills_while_storing += self._storing > 0
        self._cut = name

    def _ask(self, scene: VllmScene, name: str) -> int:
        """Ask and compare; returns the tokens that came from the disk."""
        report = self._report
        said = scene.ask(self._prompt(scene, name), max_tokens=_ANSWER)
        report.answers += 1
        report.wrong_answers += not said["over"] or said["tokens"] != [self._right[name]]
        hits = int(said["counted"].get("source disk", 0))
        report.hit_tokens += hits
        return hits

    def _born(self) -> Life:
        self._shared[:8] = struct.pack("<q", 0)
        life = Life(self._shared, self._log)
        try:
            life.wait_up(_UP_S)
        except WorkerFailed:
            life.kill()
            raise
        return life

    def _scene(self, life: Life) -> VllmScene:
        places = Places(host=self._root / "none", disk=self._store, pool="")
        return VllmScene(life, KINDS["gqa"], places, self._root / "model", {}, disk_bytes=LIMIT_BYTES)

    @property
    def _store(self) -> Path:
        return self._root / "store"

    @staticmethod
    def _prompt(scene: VllmScene, name: str) -> list[int]:
        return scene.prompt(name, num_blocks=_BLOCKS)

    @property
    def _storing(self) -> int:
        found: int = struct.unpack("<q", self._shared[:8])[0]
        return found

    def _judge_size(self) -> None:
        num_bytes = sum(path.stat().st_blocks * 512 for path in self._store.rglob("*") if path.is_file())
        self._report.most_bytes = max(self._report.most_bytes, num_bytes)
        self._report.over_limit += num_bytes > LIMIT_BYTES

    def _judge_end(self) -> None:
        report = self._report
        with open_local(LocalStoreConfig(directory=self._store, limit_bytes=None)) as store:
            checked = audit.check(store)
            report.pages_at_end, report.bad_pages = checked.num_pages, len(checked.bad) + checked.num_unread
            report.reserved_at_end = audit.survey(store).num_reserved
            page_bytes = checked.num_bytes // max(1, checked.num_pages)
        report.stored_bytes = page_bytes * _BLOCKS * (report.kills + 1)


def campaign(root: Path, *, times: int, seed: int = 0) -> KillReport:
    """Run it in this process, which imports vLLM and forks. Blocks for minutes."""
    import vllm.v1.engine.llm_engine  # noqa: F401  here, so that lives have it

    begin_s = time.monotonic()
    report = KillReport(times)
    KillCampaign(root, report, seed=seed).run()
    report.seconds = round(time.monotonic() - begin_s, 1)
    return report


def main() -> None:
    """The command above."""
    parser = argparse.ArgumentParser(description="kill vLLM while it stores")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--python", default=sys.executable, help="an interpreter that has vLLM")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not set(_SETTINGS.items()) <= set(os.environ.items()):  # torch and vLLM look at them when they are loaded
        arguments = ["--times", str(options.times), "--seed", str(options.seed), *(["--json"] if options.json else [])]
        command = [options.python, "-m", "headwater.lab.campaigns.vllm_kills", *arguments]
        os.execve(options.python, command, {**os.environ, **_SETTINGS})
    answer = os.dup(1)
    os.dup2(2, 1)  # what libraries print is not the answer
    with tempfile.TemporaryDirectory(prefix="headwater-kills-", dir=disk_root()) as root:
        report = campaign(Path(root), times=options.times, seed=options.seed)
        if not report.ok:
            with contextlib.suppress(OSError):
                sys.stderr.write((Path(root) / "lives.log").read_text(errors="replace")[-4000:])
    found = {"command": "vllm_kills", "ok": report.ok, **asdict(report)}
    text = json.dumps(found, indent=2) if options.json else "\n".join(f"{key}: {found[key]}" for key in found)
    os.write(answer, text.encode() + b"\n")
    sys.stdout.flush()
    os._exit(0 if report.ok else 1)


if __name__ == "__main__":
    main()
