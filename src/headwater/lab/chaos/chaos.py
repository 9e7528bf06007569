"""`headwater chaos`: a router, prefill nodes and decode nodes under load, while they and their pool break.

    python -m headwater.lab.chaos.chaos --times 50 --json                     # every fault, 50 times
    python -m headwater.lab.chaos.chaos --times 5 --fault pool_slow           # one of them
    python -m headwater.lab.chaos.chaos --times 2 --fault object_cut --inject spoil      # must end with exit code 1

Real processes on loopback: two prefill nodes, two decode nodes (one computes what it cannot read, the other says 502),
a router, and a pool: a store in memory, or for the master's death real Mooncake servers. Clients ask all the time
(`chaos_load.py`); faults come one sort after the other (`chaos_faults.py`), each at the call of the pool that it is
meant for (`chaos_store.py`); who died is started again. Then the load ends, everything must be given back, and some
questions, undisturbed, must be answered. Every request is judged (`chaos_report.py`).

Follows from the seed, as far as processes let it.
"""

import argparse
import datetime
import json
import logging
import random
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.table import Table
from rich.text import Text

from headwater.build import open_local
from headwater.config.stores import LocalStoreConfig
from headwater.lab.bench.report import machine
from headwater.lab.bench.serve import make_talker
from headwater.lab.chaos.chaos_faults import FAULTS, ON_LOCAL, ON_MOONCAKE, ChaosFault
from headwater.lab.chaos.chaos_fleet import ChaosFleet, FleetSetup
from headwater.lab.chaos.chaos_load import ChaosLoad, ChaosQuestion, Witness, make_questions, solve
from headwater.lab.chaos.chaos_report import ChaosScene, judge
from headwater.lab.chaos.chaos_stage import ForkServer
from headwater.storage.scratch import memory_root
from headwater.testing.mooncake import MooncakePool

log = logging.getLogger("headwater")

Tell = Callable[[str, int, int], None]  # stage, done, total

_POOL_BYTES: Final = 64 << 20
_SEGMENT_BYTES: Final = 32 << 20
_IDLE_S: Final = 30.0  # for everything to be given back
_CALM_S: Final = 30.0  # for every question to be answered rightly again
_NUM_CALM: Final = 8
_PAUSE_S: Final = 3.0
_END_S: Final = 20.0  # for a process that was asked to end
_BAD: Final = ("wrong", "dishonest", "late", "tokens_before_502", "slots_left", "tracebacks")
_NUMBERS: Final = ("injected", "requests", "right", *_BAD)
_IN_SHORT: Final = ("ok", *_NUMBERS, "honest_errors", "longest_s", "died", "recovered", "seconds", "examples")
POOLS: Final = ("local", "mooncake")
_INTERRUPTED: Final = 130  # the exit code, as shells have it
INJECTIONS: Final = ("spoil", "leak")  # what must be found


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosOptions:
    """How much of it."""

    faults: Sequence[str] = tuple(FAULTS)
    times: int = 50
    clients: int = 6
    questions: int = 78
    seed: int = 0
    pool: str = POOLS[0]  # for faults that do not need a certain one
    inject: str = ""
    keep: Path | None = None  # where the logs go; None: nowhere, when it is over


def campaign(options: ChaosOptions, *, tell: Tell | None = None) -> dict[str, Any]:
    """Run the faults one after the other. Blocks, for many minutes. `ok` is the verdict."""
    tell = tell if tell is not None else lambda stage, done, total: None
    results: dict[str, Any] = {}
    wrong: list[str] = []
    with ground(options) as here:
        for on_mooncake in (False, True):
            chosen = [name for name in options.faults if _is_on_mooncake(name, options.pool) == on_mooncake]
            if chosen:
                with world(options, here, on_mooncake=on_mooncake) as one:
                    for name in chosen:
                        results[name] = one.run(name, tell)
                        log.info("%s: %s", name, json.dumps({what: results[name][what] for what in _IN_SHORT}))
                    wrong += one.end()
    return {"ok": all(one["ok"] for one in results.values()) and not wrong, "wrong_ends": wrong, "faults": results}


def _is_on_mooncake(fault: str, pool: str) -> bool:
    return fault in ON_MOONCAKE or (pool == "mooncake" and fault not in ON_LOCAL)


@dataclass(frozen=True, slots=True)
class Ground:
    """What all worlds share: a model, questions with their answers, and what processes are forked from."""

    place: Path
    model: Path
    questions: Sequence[ChaosQuestion]
    stage: ForkServer
    witness: Witness


@contextmanager
def ground(options: ChaosOptions) -> Iterator[Ground]:
    """Make a model, and have one engine answer the questions. Blocks for some seconds."""
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headwater-chaos-")))
        if options.keep is not None:
            stack.callback(shutil.copytree, place, options.keep, dirs_exist_ok=True)
        model = place / "model"
        stage = stack.enter_context(ForkServer(place))
        make_talker(model, seed=options.seed)
        with ChaosFleet(FleetSetup(directory=place, model=model, pool=""), stage) as fleet:
            fleet.start_single()
            questions = solve(fleet.processes["single"].url, make_questions(options.questions, options.seed))
        yield Ground(place, model, questions, stage, stack.enter_context(Witness()))


@contextmanager
def world(options: ChaosOptions, here: Ground, *, on_mooncake: bool = False) -> Iterator["ChaosWorld"]:
    """A router, nodes and a pool that answer. Blocks until they do."""
    with ExitStack() as stack:
        memory = tempfile.TemporaryDirectory(prefix="headwater-chaos-", dir=memory_root(_POOL_BYTES))
        place = Path(stack.enter_context(memory)) / "pool"
        pool = stack.enter_context(MooncakePool(segment_bytes=_SEGMENT_BYTES)) if on_mooncake else None
        if pool is None:
            open_local(LocalStoreConfig(directory=place, limit_bytes=_POOL_BYTES)).close()
        setup = FleetSetup(
            directory=Path(tempfile.mkdtemp(prefix="world-", dir=here.place)),
            model=here.model,
            pool=pool.config().url if pool is not None else f"local:{place}",
            seed=options.seed,
            inject=options.inject,
            options={"decode-1": ("--no-recompute",)},
        )
        fleet = stack.enter_context(ChaosFleet(setup, here.stage))
        fleet.start_router()
        for name in setup.nodes:
            fleet.start(name)
        fleet.until_found(setup.nodes)
        yield ChaosWorld(options, here, fleet, pool)


class ChaosWorld:
    """A fleet that runs, and what is asked of it."""

    def __init__(self, options: ChaosOptions, here: Ground, fleet: ChaosFleet, pool: MooncakePool | None) -> None:
        self._options = options
        self._fleet = fleet
        self._pool = pool
        self._questions = here.questions
        self._witness = here.witness

    def run(self, name: str, tell: Tell = lambda stage, done, total: None) -> dict[str, Any]:
        """One fault, as often as wanted."""
        options, fleet = self._options, self._fleet
        fault = FAULTS[name](fleet, random.Random(f"{options.seed} {name}"), pool=self._pool)
        seed = options.seed * 100 + list(FAULTS).index(name)
        begin_s = time.monotonic()
        load = ChaosLoad(fleet.url, self._questions, clients=options.clients, timeouts_s=fault.timeouts_s, seed=seed)
        fault.num_right = lambda: load.num_right
        self._witness.watch(str(fleet.processes["router"].pid), load.task)
        num_kills, num_died, num_stalls = len(fleet.kills), len(fleet.died), len(self._witness.stalls)
        scene = ChaosScene(name, options.times)
        before, num_tracebacks = fleet.seen(), fleet.num_tracebacks()
        over = False
        try:
            self._strike(fault, scene, load, tell)
            over = True
        finally:
            load.stop(at_once=not over)
            fault.close()
        fleet.until_found(fleet.setup.nodes)
        held = fleet.until_idle(_IDLE_S)
        scene.recovered = self._calm()
        scene.told = load.told
        scene.kills = fleet.kills[num_kills:]
        scene.died = fleet.died[num_died:]
        scene.stalls = self._witness.stalls[num_stalls:]
        scene.slots_left = sum(held.values())
        scene.notes = fault.notes + held + _counted(before, fleet.seen())
        scene.tracebacks = fleet.num_tracebacks() - num_tracebacks
        scene.seconds = time.monotonic() - begin_s
        return {"pool": POOLS[self._pool is not None], **judge(scene)}

    def end(self) -> list[str]:
        """Ask everybody to end; who does not, or not well. Nothing can be run afterwards."""
        return self._fleet.end(_END_S)

    def _strike(self, fault: ChaosFault, scene: ChaosScene, load: ChaosLoad, tell: Tell) -> None:
        misses = 0
        while scene.injected < scene.wanted and misses < 3:
            tell(scene.fault, scene.injected, scene.wanted)
            try:
                struck = fault.strike()
            except TimeoutError as error:
                fault.notes[str(error)] += 1
                struck = False
            scene.injected += struck
            self._pause(load)
            misses = 0 if struck else misses + 1
        tell(scene.fault, scene.injected, scene.wanted)

    def _pause(self, load: ChaosLoad) -> None:
        """Until some requests have ended, so that each strike meets others."""
        enough = len(load.told) + self._options.clients // 2
        with suppress(TimeoutError):
            self._fleet.wait(lambda: len(load.told) >= enough, "", _PAUSE_S)

    def _calm(self) -> bool:
        """Whether all is well again when nobody breaks anything: a row of right answers, by a deadline."""
        until_s = time.monotonic() + _CALM_S
        wanted = self._questions[:_NUM_CALM]
        while time.monotonic() < until_s:
            try:
                found = solve(self._fleet.url, wanted)
            except RuntimeError:
                time.sleep(0.2)
                continue
            return [one.answer for one in found] == [one.answer for one in wanted] or bool(self._options.inject)
        return False


def _counted(before: Mapping[int, Counter[str]], after: Mapping[int, Counter[str]]) -> Counter[str]:
    """What processes counted meanwhile; what those counted that died is lost."""
    total: Counter[str] = Counter()
    for pid, counts in after.items():
        total += counts - before.get(pid, Counter())
    return total


def _draw(result: Mapping[str, Any]) -> None:
    """A table, and a verdict."""
    from headwater.lab.draw import output  # of the command line's own

    shown = [*_NUMBERS, "honest_errors", "seconds"]
    table = Table("fault", *(name.replace("_", " ") for name in shown), "ok")
    for fault, one in result["faults"].items():
        errors = sum(one["honest_errors"].values())
        cells = [str(errors if name == "honest_errors" else one[name]) for name in shown]
        table.add_row(fault, *cells, "yes" if one["ok"] else "NO")
    output().print(table)
    for fault, one in result["faults"].items():
        for line in (*one["examples"], *one["died"]):
            output().print(Text(f"{fault}: {line}"), style="red", soft_wrap=True)
    output().print(
        "everything ended in time, rightly or honestly" if result["ok"] else "NOT everything was as it should"
    )


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def read_options(arguments: Sequence[str]) -> tuple[ChaosOptions, bool]:
    """What a command line says; whether JSON is wanted. Exits with code 2 where it makes no sense."""
    parser = argparse.ArgumentParser(prog="headwater chaos", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--times", type=int, default=50, help="of each fault")
    parser.add_argument("--fault", action="append", choices=list(FAULTS), help="only this one; may be repeated")
    parser.add_argument("--clients", type=int, default=6, help="requests at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pool", choices=POOLS, default=POOLS[0], help="for faults that do not need a certain one")
    parser.add_argument("--inject", choices=INJECTIONS, default="", help="what must be found: exit code 1")
    parser.add_argument("--keep", type=Path, help="a directory for the logs of all processes")
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    given = parser.parse_args(arguments)
    options = ChaosOptions(
        faults=tuple(given.fault or FAULTS),
        times=given.times,
        clients=given.clients,
        seed=given.seed,
        pool=given.pool,
        inject=given.inject,
        keep=given.keep,
    )
    return options, given.json


def main(arguments: Sequence[str]) -> int:
    """Command line: what is printed, and the exit code. A Ctrl-C ends everything, and is no verdict."""
    options, as_json = read_options(arguments)
    signal.signal(signal.SIGTERM, _interrupt)  # so that nothing stays behind
    try:
        return _run(options, arguments, as_json=as_json)
    except KeyboardInterrupt:
        sys.stderr.write("headwater: interrupted, so nothing was proven\n")
        return _INTERRUPTED


def _run(options: ChaosOptions, arguments: Sequence[str], *, as_json: bool) -> int:
    from headwater.lab.draw import progress  # of the command line's own

    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(message)s")
    began_s = time.monotonic()
    with progress() as tell:
        result = campaign(options, tell=tell)
    document = result | {
        "command": shlex.join(["headwater", "chaos", *arguments]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - began_s, 1),
        "machine": machine(),
    }
    if as_json:
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    else:
        _draw(result)
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
