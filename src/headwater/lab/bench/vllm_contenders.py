"""Who takes part in `bench vllm`: how each is switched on in vLLM, and what must run beside it.

Contenders are vLLM alone, vLLM's own offloading, LMCache, and ours. On CPUs vLLM's offloading has memcpy as its copy,
and LMCache its server; on a GPU both are as they are shipped, in the engine's process. One that cannot be had on this
machine raises NotHere, which says why. Servers are started here, on loopback, and end with the block.
"""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from headwater.core.errors import NotInstalled
from headwater.lab.bench.pool_ways import NotHere
from headwater.pool.servers import LOOPBACK, free_port
from headwater.storage.scratch import disk_root, memory_root

PLAIN: Final = "plain"  # vLLM alone: cold, and its own prefix cache
OURS: Final = "headwater"
SYNC: Final = f"{OURS}-sync"  # the same, with loads inside the step that needs them
THREADS: Final = f"{OURS}-threads"  # the same, with blocks moved in vLLM's own process
NAMES: Final = ("offloading", "lmcache", "lmcache-shm", OURS, SYNC)
_SHM: Final = Path("/dev/shm")  # noqa: S108  where a server of somebody else puts its pool
_UP_S: Final = 60.0
_POLL_S: Final = 0.1
_STOP_S: Final = 10.0
_CHUNK_TOKENS: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmContender:
    """How one engine is started. `transfer` is what `--kv-transfer-config` takes."""

    name: str
    transfer: Mapping[str, Any] | None = None
    paths: tuple[str, ...] = ()
    odd_objects: bool = False
    packed: bool = False  # it has to be told before its first copy that K and V are packed
    settings: Mapping[str, str] = field(default_factory=dict)


@contextmanager
def open_contender(
    name: str,
    *,
    python: str,
    lmcache: Path,
    room_bytes: int,
    device: str = "cpu",
    ours: Mapping[str, Any] | None = None,
) -> Iterator[VllmContender]:
    """One contender, with its servers and its files. Blocks until they are up. Raises NotHere.

    `ours`: more options of our connector, or others.
    """
    on_gpu = device == "cuda"
    if name == PLAIN:
        yield VllmContender(name=name)
    elif name == "offloading":
        spec = {"spec_name": "MemcpyOffloadingSpec", "spec_module_path": "headwater.lab.bench.vllm_memcpy"}
        transfer = _transfer("OffloadingConnector", {"cpu_bytes_to_use": room_bytes, **({} if on_gpu else spec)})
        yield VllmContender(name=name, transfer=transfer)
    elif name in (OURS, SYNC, THREADS):
        with _scratch(memory_root(room_bytes)) as host, _scratch(disk_root()) as disk:
            extra = {"host_directory": f"{host}/store", "host_bytes": room_bytes}
            extra |= {"disk_directory": f"{disk}/store", "disk_bytes": room_bytes}
            extra |= {"load": "sync"} if name == SYNC else {}
            extra |= {"executor": "threads"} if name == THREADS else {}
            transfer = _transfer("HeadwaterConnector", extra | dict(ours or {}), module="headwater.integrations.vllm")
            yield VllmContender(name=name, transfer=transfer)
    elif on_gpu:
        yield _lmcache_inside(name, where=lmcache, room_bytes=room_bytes)
    else:
        with _lmcache(name, python=python, where=lmcache, room_bytes=room_bytes) as contender:
            yield contender


def _scratch(root: Path | None) -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="headwater-bench-", dir=root)


def _transfer(connector: str, extra: Mapping[str, Any], *, module: str | None = None) -> dict[str, Any]:
    found = {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": dict(extra)}
    return found if module is None else {**found, "kv_connector_module_path": module}


def _lmcache_inside(name: str, *, where: Path, room_bytes: int) -> VllmContender:
    """LMCache in the engine's process, as on GPUs. Of 0.5.3's ways to copy only one addresses vLLM's packed K and V."""
    if name != "lmcache":
        raise NotHere(f"{name} is a way of LMCache's server, which is for CPUs here")
    if not (where / "lmcache").is_dir():
        raise NotHere(f"LMCache is not in {where}: --lmcache says where it is")
    settings = {
        "PYTHONPATH": os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH", ""), str(where.resolve())))),
        "LMCACHE_LOCAL_CPU": "True",
        "LMCACHE_CHUNK_SIZE": str(_CHUNK_TOKENS),
        "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_USE_GPU_CONNECTOR_V3": "True",
        "LMCACHE_MAX_LOCAL_CPU_SIZE": str(-(-room_bytes // (1 << 30))),
        "VLLM_KV_CACHE_LAYOUT": "LBNHC",
    }
    return VllmContender(name=name, transfer=_transfer("LMCacheConnectorV1", {}), packed=True, settings=settings)


@contextmanager
def _lmcache(name: str, *, python: str, where: Path, room_bytes: int) -> Iterator[VllmContender]:
    """LMCache with its server: its own default, which sends pages through a socket, or over shared memory."""
    if not (where / "lmcache").is_dir():
        raise NotHere(f"LMCache is not in {where}: `make vllm-peers` puts it there")
    port = free_port()
    pool = f"headwater-bench-{uuid4().hex[:12]}"
    settings = {"PYTHONPATH": str(where.resolve()), "PYTHONHASHSEED": "0"}
    command = [python, "-m", "lmcache.v1.multiprocess.server", "--host", LOOPBACK, "--port", str(port)]
    command += ["--chunk-size", str(_CHUNK_TOKENS), "--l1-size-gb", str(-(-room_bytes // (1 << 30)))]
    command += ["--eviction-policy", "LRU", "--supported-transfer-mode", "engine_driven", "--disable-observability"]
    if name == "lmcache-shm":
        command += ["--shm-name", pool]
    with _scratch(None) as directory:
        log = Path(directory) / "log"
        with log.open("ab") as printed:
            server = subprocess.Popen(command, env={**os.environ, **settings}, stdout=printed, stderr=printed)  # noqa: S603
        try:
            give_up_s = time.monotonic() + _UP_S
            while not _answers(port):
                if server.poll() is not None or time.monotonic() > give_up_s:
                    raise NotHere(f"LMCache's server does not start: {last_line(log)}")
                time.sleep(_POLL_S)
            reach = {"host": f"tcp://{LOOPBACK}", "port": port, "mp_transfer_mode": "engine_driven"}
            yield VllmContender(
                name=name,
                transfer=_transfer("LMCacheMPConnector", {f"lmcache.mp.{key}": value for key, value in reach.items()}),
                paths=(str(where.resolve()),),
                odd_objects=True,
                settings={"PYTHONHASHSEED": "0"},
            )
        finally:
            server.terminate()
            try:
                server.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
            for left in _SHM.glob(f"*{pool}*"):  # it leaves its pool behind
                left.unlink(missing_ok=True)


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((LOOPBACK, port), timeout=1.0):
        return True
    return False


def last_line(log: Path) -> str:
    """The last line of a log that says something."""
    with contextlib.suppress(OSError):
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        for line in reversed(lines):
            if line.strip():
                return line.strip()[-300:]
    return "it said nothing"


def require_vllm(python: str) -> None:
    """Raise NotInstalled unless this interpreter has vLLM. Blocks for a moment; does not import it."""
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        found = subprocess.run([python, "-c", look], capture_output=True, check=False, timeout=_UP_S)  # noqa: S603
    except OSError as error:
        raise NotInstalled(f"{python} cannot be started: {error.strerror}") from error
    if found.returncode != 0:
        hint = "`make vllm-venv` makes one that has, for --python" if python == sys.executable else "another --python?"
        raise NotInstalled(f"{python} has no vLLM: {hint}")
