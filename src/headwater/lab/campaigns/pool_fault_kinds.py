"""How the fault campaign breaks a pool (`pool_faults.py`): one class for each fault, and the scene that it happens on.

A fault gets ready (not yet felt by anybody), strikes for some seconds, and has repaired everything when `strike`
returns. The processes that it needs are the scene's, and end with it.
"""

import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from headwater.pool.local import summary
from headwater.storage.base import Deadline
from headwater.testing.mooncake import MooncakePool

MIB: Final = 1 << 20
SEGMENT_BYTES: Final = 128 * MIB  # of the client process
DONATED_BYTES: Final = 64 * MIB  # of one worker, and of the donor who is killed
SMALL_BYTES: Final = 16 * MIB  # two thirds of the world
_VANDAL: Final = "headwater.lab.campaigns.pool_fault_vandal"


class CrowdedPool(MooncakePool):
    """A pool to which others give memory too, living and dead: the sum says nothing of who is there."""

    def wait_for_bytes(self, num_bytes: int) -> None:
        """Until the master knows at least so much memory. Raises TimeoutError."""
        wait = Deadline.after(20)
        while (found := summary(self.metrics_port)) is None or found["capacity_bytes"] < num_bytes:
            if wait.expired:
                raise TimeoutError(f"the pool does not have {num_bytes} bytes, but {found}")
            time.sleep(0.02)


class CampaignChild:
    """A process of the campaign, with a line in and a line out."""

    def __init__(self, module: str, *arguments: object, errors: Path) -> None:
        self._errors = errors
        with errors.open("ab") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *map(str, arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )

    def tell(self, *words: object) -> None:
        """Have it do something."""
        if self.process.stdin is not None:
            self.process.stdin.write(json.dumps(words) + "\n")
            self.process.stdin.flush()

    def answer(self) -> Any:
        """What it says next. Blocks. Raises RuntimeError if it ended instead."""
        line = self.process.stdout.readline() if self.process.stdout is not None else ""
        if not line:
            raise RuntimeError(f"a process ended with {self.process.wait()}: {self.last_words()}")
        return json.loads(line)

    def last_words(self) -> str:
        return self._errors.read_text(encoding="utf-8", errors="replace")[-300:]

    def end(self, patience_s: float = 30.0) -> bool:
        """Ask it to end; False if it had to be killed. Blocks."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            return False
        else:
            return True
        finally:
            self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


class PoolScene:
    """A pool and what was done to it."""

    def __init__(self, pool: MooncakePool, directory: Path, seed: int) -> None:
        self.pool = pool
        self.rng = random.Random(seed)
        self.num_injected = 0
        self.notes: Counter[str] = Counter()
        self.epoch = 0
        self.directory = directory
        self._children: list[CampaignChild] = []
        self._epoch_file = directory / "epoch"
        self._epoch_file.write_bytes(bytes(8))

    def start(self, role: str, *, number: int = 1, segment_bytes: int = 0) -> list[CampaignChild]:
        """Start some who do harm; they are ready when this returns."""
        url = self.pool.config(segment_bytes=segment_bytes).url
        errors = self.directory / f"{role}.err"
        started = [
            CampaignChild(_VANDAL, role, url, "--seed", self.rng.randrange(1 << 30), errors=errors)
            for _ in range(number)
        ]
        self._children += started
        for child in started:
            child.answer()
        return started

    def enter_next_epoch(self) -> None:
        """All workers move on to a world where nobody was yet."""
        self.epoch += 1
        with self._epoch_file.open("r+b") as file:
            file.write(self.epoch.to_bytes(8, "little"))

    def close(self) -> None:
        for child in self._children:
            child.kill()


class PoolFault:
    """One way to break a pool."""

    small = False  # the pool holds only a part of the world

    def __init__(self, scene: PoolScene) -> None:
        """Called before there is any worker."""
        self.scene = scene

    def get_ready(self) -> None:
        """Before each strike; what it does is not felt."""

    def strike(self, seconds: float) -> None:
        """Break the pool, and repair it. Blocks."""
        raise NotImplementedError

    def look(self) -> None:
        """See what a strike did, after it."""


class MasterKilled(PoolFault):
    """The master is killed, is down for a while, and starts again with an empty memory."""

    def strike(self, seconds: float) -> None:
        self.scene.pool.kill_master()
        time.sleep(seconds)
        self.scene.pool.start_master()
        self.scene.num_injected += 1


class ProcessStopped(PoolFault):
    """The master, or the client process, does not answer for a while: calls block, and end when it goes on."""

    def strike(self, seconds: float) -> None:
        self.scene.num_injected += 1
        send = self.scene.pool.signal_master if self.scene.num_injected % 2 else self.scene.pool.signal_client
        send(signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            send(signal.SIGCONT)


class OwnerKilled(PoolFault):
    """A process whose memory holds pages is killed: the client process, or one that only gave memory."""

    def __init__(self, scene: PoolScene) -> None:
        super().__init__(scene)
        (self._donor,) = scene.start("donor", segment_bytes=DONATED_BYTES)

    def strike(self, seconds: float) -> None:
        self.scene.num_injected += 1
        if self.scene.num_injected % 2:
            self.scene.pool.kill_client()
            time.sleep(self.scene.rng.choice([0.0, seconds]))  # it may be back before anybody noticed
            self.scene.pool.start_client()
        else:
            self._donor.kill()
            time.sleep(seconds)
            (self._donor,) = self.scene.start("donor", segment_bytes=DONATED_BYTES)


class _ByVandal(PoolFault):
    def __init__(self, scene: PoolScene) -> None:
        super().__init__(scene)
        (self._vandal,) = scene.start("vandal")

    def ask(self, *words: object) -> int:
        self._vandal.tell(*words)
        number: int = self._vandal.answer()
        return number


class PoolFullFault(_ByVandal):
    """The pool is always full; in a strike, of what may not be evicted."""

    small = True

    def strike(self, seconds: float) -> None:
        self.scene.num_injected += self.ask("hog", seconds)


class Damaged(_ByVandal):
    """Objects are damaged, cut, grown, and swapped between keys, all the time."""

    def strike(self, seconds: float) -> None:
        self.scene.num_injected += self.ask("damage", self.scene.epoch, seconds)


class BadFirst(_ByVandal):
    """Half of all pages have a bad first value before any writer comes. The strike is that all come."""

    def __init__(self, scene: PoolScene) -> None:
        super().__init__(scene)
        self._spoil(0)

    def get_ready(self) -> None:
        self._spoil(self.scene.epoch + 1)

    def strike(self, seconds: float) -> None:
        self.scene.enter_next_epoch()

    def _spoil(self, epoch: int) -> None:
        self.scene.num_injected += self.ask("bad_first", epoch, 0.5)


class PutterKilled(_ByVandal):
    """Clients are killed in the middle of puts of pages that everybody wants."""

    num_putters = 3

    def __init__(self, scene: PoolScene) -> None:
        super().__init__(scene)
        self._putters: Sequence[CampaignChild] = []

    def get_ready(self) -> None:
        self._putters = self.scene.start("putter", number=self.num_putters)

    def strike(self, seconds: float) -> None:
        for putter in self._putters:
            putter.tell("put_for_ever")
            time.sleep(seconds / self.num_putters * self.scene.rng.uniform(0.5, 1.5))
            putter.kill()
            self.scene.num_injected += 1

    def look(self) -> None:
        self.scene.notes["puts_left_unfinished"] += self.ask("unfinished", self.scene.epoch)


FAULTS: Final[dict[str, type[PoolFault]]] = {
    "master": MasterKilled,
    "owner": OwnerKilled,
    "full": PoolFullFault,
    "damaged": Damaged,
    "bad_first": BadFirst,
    "putter": PutterKilled,
    "stopped": ProcessStopped,
}
