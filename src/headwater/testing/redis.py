"""A Redis server of this machine for as long as a block lasts: on loopback, empty, without a disk, of bounded memory.

For benchmarks and proofs. Nothing here is needed to *use* a Redis server as a pool: its address is.
"""

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from headwater.core.errors import StoreUnavailable
from headwater.pool.servers import LOOPBACK, free_port
from headwater.storage.base import Deadline

_PROGRAM: Final = "redis-server"
_UP_S: Final = 20.0
_STARTS: Final = 3  # a port that was free may be gone a moment later
_SPARE_BYTES: Final = 64 << 20  # what the server needs itself


@contextmanager
def redis_server(room_bytes: int) -> Iterator[str]:
    """A server with room for so many bytes; its address. Raises StoreUnavailable, which says what to install."""
    program = shutil.which(_PROGRAM)
    if program is None:
        raise StoreUnavailable(f"there is no {_PROGRAM}: apt-get install {_PROGRAM}")
    with tempfile.TemporaryDirectory(prefix="headwater-redis-") as directory:
        port, process = _start(program, directory, room_bytes)
        try:
            yield f"redis://{LOOPBACK}:{port}"
        finally:
            _end(process)


def _start(program: str, directory: str, room_bytes: int) -> tuple[int, "subprocess.Popen[bytes]"]:
    trouble = ""
    for _ in range(_STARTS):
        port = free_port()
        options = ["--port", str(port), "--bind", LOOPBACK, "--save", "", "--dir", directory]
        options += ["--maxmemory", str(room_bytes + _SPARE_BYTES)]
        process = subprocess.Popen([program, *options], stdout=subprocess.DEVNULL)
        try:
            trouble = _wait_for(process, port)
        except BaseException:
            _end(process)
            raise
        if not trouble:
            return port, process
        _end(process)
    raise StoreUnavailable(f"{_PROGRAM} does not come up: {trouble}")


def _wait_for(process: "subprocess.Popen[bytes]", port: int) -> str:
    """Until it takes connections; else why not."""
    until = Deadline.after(_UP_S)
    while True:
        if process.poll() is not None:
            return f"it ended with {process.returncode}"
        try:
            socket.create_connection((LOOPBACK, port), 0.5).close()
        except OSError as error:
            if until.expired:
                return str(error)
            time.sleep(0.02)
        else:
            return ""


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    process.wait()
