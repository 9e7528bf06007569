"""The heartbeat of the fault campaign on a pool (`pool_faults.py`): who sees that something stood still.

Each worker has one. A process that has nothing else is a witness: what it does not beat through is the machine's doing.
Imports nothing that takes long or has threads of its own. What a gap proves is `pool_fault_report.py`'s business.
"""

import argparse
import json
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Final

BEAT_S: Final = 0.01
GAP_S: Final = 0.05  # a beat that comes so much too late is written down


class Log:
    """One line of JSON per fact, written at once. Several threads may use it."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def say(self, *facts: object) -> None:
        os.write(self._fd, (json.dumps(facts) + "\n").encode())


class Heart(threading.Thread):
    """Beats, and says when it could not, and how long it waited for a processor. Ends with the parent, by force."""

    def __init__(self, log: Log) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._log = log
        self.stopped = False

    def run(self) -> None:
        parent = os.getppid()
        with open("/proc/thread-self/schedstat", "rb", buffering=0) as stat:
            before_s, waited_s = time.monotonic(), _waited_s(stat.fileno())
            while os.getppid() == parent:
                time.sleep(BEAT_S)
                now_s, now_waited_s = time.monotonic(), _waited_s(stat.fileno())
                if now_s - before_s > BEAT_S + GAP_S and not self.stopped:
                    self._log.say("gap", before_s + BEAT_S, now_s, now_waited_s - waited_s)
                before_s, waited_s = now_s, now_waited_s
        os._exit(1)


def _waited_s(stat: int) -> float:
    """Seconds that the thread was ready to run and did not, since it began."""
    return int(os.pread(stat, 100, 0).split()[1]) / 1e9


def _end(log: Log, number: int, frame: object) -> None:
    log.say("ended")
    os._exit(0)


def main() -> None:
    """Be a witness."""
    parser = argparse.ArgumentParser()
    parser.add_argument("log", type=Path)
    log = Log(parser.parse_args().log)
    signal.signal(signal.SIGTERM, partial(_end, log))
    log.say("ready")
    Heart(log).run()


if __name__ == "__main__":
    main()
