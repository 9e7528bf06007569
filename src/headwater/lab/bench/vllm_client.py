"""The other end of `vllm_worker`: a process that holds one vLLM engine, asked one thing at a time, with a deadline.

Knows the protocol, not what is measured.
"""

import contextlib
import json
import os
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import headwater
from headwater.core.errors import HeadwaterError
from headwater.lab.bench.vllm_contenders import VllmContender, last_line

SOURCES: Final = str(Path(headwater.__file__).parent.parent)
_STOP_S: Final = 10.0


class WorkerFailed(HeadwaterError):
    """An engine did not start, did not answer in time, or answered with an error."""


def worker_command(
    python: str, paths: Sequence[str], setup: Mapping[str, Any], *, module: str = "headwater.lab.bench.vllm_worker"
) -> list[str]:
    """What starts a worker: this package under another interpreter, whatever that has installed."""
    start = f"import sys; sys.path[:0] = {[SOURCES, *paths]!r}; from {module} import main; main()"
    return [python, "-c", start, json.dumps(setup)]


class EngineProcess:
    """One engine in one process. Not for several threads."""

    def __init__(self, name: str, command: Sequence[str], *, settings: Mapping[str, str], log: Path) -> None:
        self.name = name
        self._log = log
        self._unread = b""
        with log.open("ab") as printed:
            self._process = subprocess.Popen(  # noqa: S603  the interpreter that the user named
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=printed,
                env={**os.environ, **settings},
                bufsize=0,
            )

    def wait_up(self, timeout_s: float) -> dict[str, Any]:
        """Until the engine is up; says what it is. Blocks. Raises WorkerFailed."""
        return self._answer(timeout_s)

    def ask(self, do: str, *, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        """Have one thing done. Blocks until the answer is there. Raises WorkerFailed."""
        line = json.dumps({"do": do, **arguments}).encode() + b"\n"
        pipe = self._process.stdin
        assert pipe is not None  # noqa: S101  for the type checker
        try:
            while line:  # a pipe that is not buffered may take a part
                line = line[pipe.write(line) :]
        except OSError as error:
            raise self._failure("is gone") from error
        return self._answer(timeout_s)

    def kill(self) -> None:
        """SIGKILL, as a machine's memory guard would. Blocks until it is gone."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """End the process. Blocks for seconds at most."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        pipe = self._process.stdout
        assert pipe is not None  # noqa: S101  for the type checker
        give_up_s = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            left_s = give_up_s - time.monotonic()
            if left_s <= 0 or not select.select([pipe], [], [], left_s)[0]:
                raise self._failure(f"did not answer in {timeout_s:g} s")
            part = os.read(pipe.fileno(), 1 << 16)
            if not part:
                raise self._failure("is gone")
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise WorkerFailed(f"{self.name}: {found['error']}")
        return found

    def _failure(self, what: str) -> WorkerFailed:
        return WorkerFailed(f"{self.name} {what}: {last_line(self._log)}")


def start_worker(
    contender: VllmContender,
    *,
    python: str,
    setup: Mapping[str, Any],
    threads: int,
    log: Path,
    module: str = "headwater.lab.bench.vllm_worker",
    device: str = "cpu",
) -> EngineProcess:
    """Begin to start an engine; `EngineProcess.wait_up` waits for it. `module`: what is served."""
    whole = {**setup, "transfer": contender.transfer, "odd_objects": contender.odd_objects, "packed": contender.packed}
    settings = engine_settings(device, threads=threads, kv_gib=int(setup["kv_gib"])) | dict(contender.settings)
    command = worker_command(python, contender.paths, whole, module=module)
    return EngineProcess(contender.name, command, settings=settings, log=log)


def engine_settings(device: str, *, threads: int = 1, kv_gib: int = 1) -> dict[str, str]:
    """The environment of an engine that is measured or compared: in the process that is asked, and quiet."""
    found = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONHASHSEED": "0",
    }
    if device == "cuda":
        return found | {"VLLM_USE_FLASHINFER_SAMPLER": "0", "TVM_FFI_DISABLE_TORCH_C_DLPACK": "1"}
    return found | {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several engines take turns on the same cores
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
    }
