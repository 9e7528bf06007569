"""What runs in an executor's process (`executor.py`): the executor on vLLM's KV, mapped, until vLLM's worker is gone.

What it is to open comes as a JSON document on standard input, and whose KV it moves in a file that comes over its
socket later, when there is one. It ends when the other end of its socket is closed, and for no
other reason: whoever ends vLLM politely, with a signal to all its processes, wants its last blocks saved.
"""

import contextlib
import json
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from headwater.core.errors import HeadwaterError
from headwater.integrations.vllm.build import OpenWorker, open_worker, provide_memory, shared_tiers
from headwater.integrations.vllm.counted import Counted
from headwater.integrations.vllm.settings import ConnectorConfig, read_config
from headwater.layout.shard import Shard
from headwater.metrics import Metrics
from headwater.storage.base import SYSTEM_CLOCK
from headwater.transfer.ranks.members import Member
from headwater.transfer.ranks.server import serve_rank

_KV_S: Final = 1800.0  # for vLLM to have its KV: it compiles meanwhile. Then this one ends, and another can be begun
_PROVIDED_S: Final = 30.0  # for memory to be provided ahead of that; the rest comes with it
_READY_S: Final = 60.0  # for memory to be registered: vLLM warms up meanwhile
_LAST_S: Final = 30.0  # for what was begun, after vLLM's worker is gone
log: Final = logging.getLogger("headwater")


def main(descriptor: int) -> None:
    """Serve one worker of vLLM."""
    for polite in (signal.SIGINT, signal.SIGTERM):
        signal.signal(polite, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="Headwater's executor: %(message)s")
    order: dict[str, Any] = json.load(sys.stdin)

    def say(what: str) -> None:
        log.info("%s, after %.1f s", what, SYSTEM_CLOCK.monotonic() - order["begun_s"])

    with socket.socket(fileno=descriptor) as sock:
        threading.Thread(target=_watch, args=(order["parent"], sock), name="headwater parent", daemon=True).start()
        try:
            worker = _open(order, sock, say)
        except _NotWanted:
            return
        except (HeadwaterError, RuntimeError, OSError) as error:  # torch says RuntimeError for whatever the device says
            log.error("it cannot begin: %s: %s", type(error).__name__, error)
            sys.exit(1)
        worker.get_ready(log.info, timeout_s=_READY_S)
        say("it is ready")
        member = Member(order["rank"], Shard(order["rank"], order["world"]), 0, worker.executor)
        counted = Counted(worker.metrics)
        serve_rank(sock, [member], identity=bytes.fromhex(order["identity"]), counted=lambda: counted.grown(now=True))
        worker.close()


def _watch(parent: int, sock: socket.socket) -> None:
    """End with vLLM's worker, even if a fork of it holds our socket, and even if a copy hangs."""
    with contextlib.suppress(OSError):  # it is dead already
        process = os.pidfd_open(parent)
        if os.getppid() == parent:
            select.select([process], [], [])
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    time.sleep(_LAST_S)
    os._exit(1)


class _NotWanted(Exception):
    """The other end was closed before there was any KV."""


def _open(order: dict[str, Any], sock: socket.socket, say: Callable[[str], None]) -> OpenWorker:
    """Open everything. What `order` lacks comes over the socket, and is added to it."""
    say("it is up")
    config: ConnectorConfig = read_config(order["config"])
    metrics = Metrics()
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(1) as beside:

        def open_stores() -> None:
            stores = stack.enter_context(shared_tiers(config, metrics))
            if order["on_gpu"]:
                provide_memory(stores, timeout_s=_PROVIDED_S)

        opening = beside.submit(open_stores)  # a large slab takes seconds
        from headwater.integrations.vllm.registered import MappedCache  # and so does torch

        say("torch is loaded")
        opening.result()
        say("stores are open")
        order |= _rest_of_order(sock)
        say("vLLM has its KV")
        device = MappedCache(order["planes"])
        identity = bytes.fromhex(order["identity"])
        rank, world = order["rank"], order["world"]
        worker = open_worker(config, device, identity=identity, rank=rank, world=world, metrics=metrics)
    say("kernels are compiled")
    return worker


def _rest_of_order(sock: socket.socket) -> dict[str, Any]:
    """Wait for it. Blocks, for as long as vLLM takes, `_KV_S` at most. Raises _NotWanted."""
    sock.settimeout(_KV_S)
    try:
        _, numbers, _, _ = socket.recv_fds(sock, 1, 1)
    except TimeoutError as error:
        log.warning("vLLM had no KV for %.0f s: it ends", _KV_S)
        raise _NotWanted from error
    sock.settimeout(None)
    if not numbers:
        raise _NotWanted
    with os.fdopen(numbers[0], "rb") as document:
        rest: dict[str, Any] = json.load(document)
    return rest
