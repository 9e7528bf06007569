"""The two programs of a Mooncake pool, as they are started here: everything on loopback that can be told to be.

The master knows which object is where; a client process owns memory that objects lie in, and shares it with the
processes of its machine. What cannot be told: the client's ports for transfers and handshakes listen on every address
of the machine (`docs/STORES.md`).
"""

import importlib.util
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from headwater.core.errors import StoreUnavailable
from headwater.storage.mooncake.config import P2P

LOOPBACK: Final = "127.0.0.1"
# Of the environment: print what went wrong and no more.
QUIET: Final[Mapping[str, str]] = {"MC_LOG_LEVEL": "ERROR", "GLOG_minloglevel": "2", "MC_STORE_CLIENT_METRIC": "0"}
PUT_S: Final = 4  # what was not put in this time may be put by another: keys of a client that died are free again
LEASE_MS: Final = 5000  # how long a page that was looked at or read is not evicted


def program(name: str) -> str:
    """Where the wheel keeps a program. Raises StoreUnavailable, which says what to install."""
    found = importlib.util.find_spec("mooncake")
    places = list(found.submodule_search_locations or ()) if found is not None else []
    path = Path(places[0]) / name if places else None
    if path is None or not path.is_file():
        raise StoreUnavailable("a Mooncake pool needs its programs: pip install 'headwater[mooncake]'")
    if not os.access(path, os.X_OK):
        raise StoreUnavailable(f"{path} may not be executed: chmod +x it")
    return str(path)


def master_command(
    *, port: int, metrics_port: int, lease_ms: int = LEASE_MS, client_ttl_s: int = 10, evict_above: float = 0.95
) -> list[str]:
    """A master on loopback. Clients that are silent for `client_ttl_s` are taken for dead, with what they hold."""
    return [
        program("mooncake_master"),
        f"--rpc_address={LOOPBACK}",
        f"--rpc_port={port}",
        f"--metrics_host={LOOPBACK}",
        f"--metrics_port={metrics_port}",
        "--enable_metric_reporting=false",
        f"--default_kv_lease_ttl={lease_ms}",
        f"--client_ttl={client_ttl_s}",
        f"--put_start_discard_timeout_sec={PUT_S}",
        f"--eviction_high_watermark_ratio={evict_above}",
    ]


def client_command(*, port: int, master_port: int, segment_bytes: int, threads: int = 2) -> list[str]:
    """A client process that owns `segment_bytes` of memory, for the processes of this machine and for TCP."""
    return [
        program("mooncake_client"),
        f"--host={LOOPBACK}",
        f"--port={port}",
        f"--master_server_address={LOOPBACK}:{master_port}",
        f"--metadata_server={P2P}",
        "--protocol=tcp",
        f"--global_segment_size={segment_bytes}",
        f"--threads={threads}",
    ]


def free_port() -> int:
    """A port of loopback that nobody has at this moment."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])
