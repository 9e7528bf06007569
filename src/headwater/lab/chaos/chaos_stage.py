"""The process that has loaded everything, and forks the router and nodes of a fault campaign (`chaos_node.py`)."""

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

START_S: Final = 180.0  # a machine that is busy takes its time
LOOK_S: Final = 0.005
_ENVIRONMENT: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class ForkServer:
    """What all processes are forked from. As a context: there, and gone with all of them at its end."""

    def __init__(self, directory: Path) -> None:
        """`directory` is for its log."""
        self._log = directory / "stage.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._said = b""
        self._started: list[int] = []
        self.ended: dict[int, int] = {}  # exit codes, by pid

    def __enter__(self) -> Self:
        """Start it; what it loads takes a while."""
        command = [sys.executable, "-P", "-m", "headwater.lab.chaos.chaos_node"]
        environment = {**os.environ, **_ENVIRONMENT}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                start_new_session=True,  # a Ctrl-C is ours: it has to be there to end the others
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        """End it."""
        process, self._process = self._process, None
        if process is not None and process.stdin is not None and process.stdout is not None:
            process.stdin.close()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()

    def fork(self, what: Mapping[str, Any]) -> int:
        """Have it fork one more; its pid. Blocks."""
        if self._process is None or self._process.stdin is None:
            raise RuntimeError("nothing was started")
        self._process.stdin.write(json.dumps(what).encode() + b"\n")
        self._process.stdin.flush()
        until_s = time.monotonic() + START_S
        while not self._started:
            if time.monotonic() > until_s:
                raise TimeoutError(f"{what['name']} was not forked")
            self.poll(LOOK_S)
        return self._started.pop()

    def poll(self, wait_s: float = 0.0) -> None:
        """Hear who came and who went."""
        process = self._process
        if process is None or process.stdout is None:
            raise RuntimeError("nothing was started")
        while select.select([process.stdout], [], [], wait_s)[0]:
            data = os.read(process.stdout.fileno(), 1 << 16)
            if not data:
                said = self._log.read_text(encoding="utf-8", errors="replace")[-800:]
                raise RuntimeError(f"the process that forks ended with {process.wait()}: {said}")
            self._said += data
            while b"\n" in self._said:  # a Ctrl-C may come at any step: no message is lost, or somebody waits for it
                line, _, rest = self._said.partition(b"\n")
                message = json.loads(line)
                if "started" in message:
                    self._started.append(message["started"])
                elif "ended" in message:
                    self.ended[message["ended"]] = message["code"]
                self._said = rest
            wait_s = 0.0
