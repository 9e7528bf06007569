"""The fault campaign on a pool: two writers and two readers work on one real Mooncake pool while it is broken.

    python -m headwater.lab.campaigns.pool_faults --seconds 60 --json            # every fault, a minute each
    python -m headwater.lab.campaigns.pool_faults --fault master --fault full    # some of them
    python -m headwater.lab.campaigns.pool_faults --seconds 5 --inject wrong late held   # must end with exit code 1

Each fault (`pool_fault_kinds.py`) has a pool of its own, and rounds: the workers (`pool_fault_worker.py`) run
undisturbed, the pool is broken, it is repaired, and they have 5 s to be as fast as before. They take the ways that
there are: over TCP with memory of their own in the pool, over TCP without, and twice by shared memory through the
client process. Judged (`pool_fault_report.py`):

- every byte of every page that was handed out as verified is what its name says, at once and a while later;
- every call ends by its deadline + 0.5 s, but for time in which the machine itself stood still;
- every worker is at full speed again 5 s after each repair;
- no worker dies or hangs, and each of them got something done.
"""

import argparse
import datetime
import json
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from headwater.lab.bench.report import machine
from headwater.lab.campaigns.pool_fault_kinds import (
    DONATED_BYTES,
    FAULTS,
    SEGMENT_BYTES,
    SMALL_BYTES,
    CampaignChild,
    CrowdedPool,
    PoolFault,
    PoolScene,
)
from headwater.lab.campaigns.pool_fault_report import BASE_S, RECOVERY_S, ProcessRecord, Round, judge, read_record
from headwater.storage.base import Deadline

PACE: Final = 12.0  # on a loaded machine they still get it, and what is slower then is the pool
WARM_S: Final = 2.5  # until the world is filled
INJECTIONS: Final = {"wrong": "reader-tcp", "late": "writer-tcp", "held": "reader-shm"}  # what must be found: whose
_WORKER: Final = "headwater.lab.campaigns.pool_fault_worker"
_WITNESS: Final = "headwater.lab.campaigns.pool_fault_heart"
_STRIKE_S: Final = (2.0, 4.0)
_SHORT_S: Final = 15.0  # a run that has no time for a whole round: its strikes are short, and speed is not judged
_MOST_S: Final = 30.0  # for a process to come up, or to end
_FIRST_S: Final = 20.0  # for everybody's first page; who has none is found idle in the end


def campaign(
    faults: Sequence[str] = tuple(FAULTS),
    *,
    seconds: float = 60.0,
    seed: int = 0,
    pace: float = PACE,
    inject: Sequence[str] = (),
) -> dict[str, Any]:
    """Run the faults one after the other. `ok` is the verdict; `inject`: see `INJECTIONS`."""
    results = {}
    for name in faults:
        _tell(f"{name}: {seconds:g} s")
        results[name] = run(name, seconds=seconds, seed=seed, pace=pace, inject=inject)
        _tell(f"{name}: {json.dumps({what: results[name][what] for what in _IN_SHORT})}")
    return {"ok": all(one["ok"] for one in results.values()), "faults": results}


_IN_SHORT: Final = ("ok", "wrong_bytes", "late_calls", "recovery_s", "problems")


def run(name: str, *, seconds: float, seed: int = 0, pace: float = PACE, inject: Sequence[str] = ()) -> dict[str, Any]:
    """One fault, on a pool of its own. Blocks for `seconds` and what starting and ending take."""
    kind = FAULTS[name]
    with (
        tempfile.TemporaryDirectory(prefix="headwater-faults-") as place,
        CrowdedPool(segment_bytes=SMALL_BYTES if kind.small else SEGMENT_BYTES) as pool,
    ):
        scene = PoolScene(pool, Path(place), seed)
        workers: dict[str, CampaignChild] = {}
        try:
            fault = kind(scene)
            workers |= _start_workers(scene, kind, seed, pace=pace, inject=inject)
            _wait_until_busy(workers, Path(place))
            rounds = list(_rounds(fault, scene, seconds))
            died = _end(workers)
        finally:
            for child in workers.values():
                child.kill()
            scene.close()
        records = [_read(Path(place) / f"{one}.log", one) for one in workers]
    for one in records:
        if not one.ended:
            died.setdefault(one.name, "did not say that it ended")
    witnesses = [one for one in records if one.name.startswith("witness")]
    result = judge([one for one in records if one not in witnesses], witnesses, rounds, seconds=seconds)
    result |= {"faults_injected": scene.num_injected, "died": died, "notes": result["notes"] | scene.notes}
    good = not (died or result["problems"] or result["wrong_bytes"] or result["late_calls"])
    return {"ok": good and scene.num_injected > 0 and result["hits"] > 0 and result["stored"] > 0} | result


def _start_workers(
    scene: PoolScene, kind: type[PoolFault], seed: int, *, pace: float, inject: Sequence[str]
) -> dict[str, CampaignChild]:
    """Two writers, two readers, two witnesses, all of them ready."""
    pool, place = scene.pool, scene.directory
    own = pool.config(segment_bytes=0 if kind.small else DONATED_BYTES).url
    by_memory = pool.config(shm=True).url
    urls = {"writer-tcp": own, "writer-shm": by_memory, "reader-tcp": pool.config().url, "reader-shm": by_memory}
    children = {}
    for number, (name, url) in enumerate(urls.items()):
        options = ["--name", name, "--url", url, "--seed", seed * 100 + number, "--pace", pace]
        options += ["--inject", *(what for what in inject if INJECTIONS[what] == name)]
        children[name] = CampaignChild(_WORKER, name.partition("-")[0], place, *options, errors=place / f"{name}.err")
    for name in ("witness-0", "witness-1"):
        children[name] = CampaignChild(_WITNESS, place / f"{name}.log", errors=place / f"{name}.err")
    try:
        _wait_until_ready(children, place)
    except BaseException:
        for child in children.values():
            child.kill()
        raise
    return children


def _wait_until_ready(children: dict[str, CampaignChild], place: Path) -> None:
    wait = Deadline.after(_MOST_S)
    for name, child in children.items():
        log = place / f"{name}.log"
        while not (log.exists() and '["ready"]' in log.read_text(encoding="utf-8")):
            if child.process.poll() is not None or wait.expired:
                raise RuntimeError(f"{name} did not come up: {child.last_words()}")
            time.sleep(0.02)


def _wait_until_busy(children: dict[str, CampaignChild], place: Path) -> None:
    """Until all have written or read a page: on a busy machine a short campaign would be over before. Not for ever."""
    wait = Deadline.after(_FIRST_S)
    for name in children:
        while not name.startswith("witness") and not wait.expired:
            if any(call.good_pages for call in _read(place / f"{name}.log", name).calls):
                break
            time.sleep(0.02)


def _rounds(fault: PoolFault, scene: PoolScene, seconds: float) -> Iterator[Round]:
    """Break and repair until the time is over."""
    short = seconds < _SHORT_S
    time.sleep(0.0 if short else WARM_S)
    until_s = time.monotonic() + seconds
    before_s, after_s = (seconds * 0.2, seconds * 0.2) if short else (BASE_S + 0.2, RECOVERY_S + 0.2)
    done: list[tuple[float, float]] = []
    while time.monotonic() + before_s + after_s + (_STRIKE_S[1] if not short else seconds * 0.4) <= until_s + 0.1:
        fault.get_ready()
        time.sleep(before_s)
        begin_s = time.monotonic()
        fault.strike(seconds * 0.3 if short else scene.rng.uniform(*_STRIKE_S))
        done.append((begin_s, time.monotonic()))
        fault.look()
        time.sleep(after_s)
    time.sleep(max(0.0, until_s - time.monotonic()))
    ends = [*(begin_s for begin_s, _ in done[1:]), time.monotonic()]
    for (begin_s, repaired_s), end_s in zip(done, ends, strict=True):
        yield Round(begin_s, repaired_s, end_s)


def _end(workers: dict[str, CampaignChild]) -> dict[str, str]:
    """Ask all to end. Who was dead already, or does not, and what is known of it."""
    died = {
        name: f"ended by itself with {child.process.returncode}: {child.last_words()}"
        for name, child in workers.items()
        if child.process.poll() is not None
    }
    for child in workers.values():
        child.process.send_signal(signal.SIGTERM)
    return died | {name: "hangs" for name, child in workers.items() if not child.end(_MOST_S)}


def _read(log: Path, name: str) -> ProcessRecord:
    text = log.read_text(encoding="utf-8")
    return read_record(name, (json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()))


def _tell(what: str) -> None:
    sys.stderr.write(what + "\n")
    sys.stderr.flush()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each fault")
    parser.add_argument("--fault", action="append", choices=list(FAULTS), help="only this one; may be repeated")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pace", type=float, default=PACE, help="chains per second and worker; 0: what they get")
    parser.add_argument("--inject", nargs="+", choices=list(INJECTIONS), default=[], help="what must be found")
    parser.add_argument("--json", action="store_true", help="on one line")
    options = parser.parse_args()
    given = {"seconds": options.seconds, "seed": options.seed, "pace": options.pace, "inject": options.inject}
    result = campaign(options.fault or tuple(FAULTS), **given)
    command = shlex.join(["python", "-m", "headwater.lab.campaigns.pool_faults", *sys.argv[1:]])
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    document = result | {"command": command, "date": date, "machine": machine()}
    sys.stdout.write(json.dumps(document, indent=None if options.json else 2) + "\n")
    sys.exit(0 if result["ok"] else 1)


if __name__ == "__main__":
    main()
