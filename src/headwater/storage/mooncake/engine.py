"""The Mooncake engine's client behind a few plain calls: keys and addresses in, the engine's codes out.

What its client does that a store must not do is mended here, each of it seen on 0.3.13:

- Opening while nobody listens holds the GIL for 90 s: here it is tried only after a knock (`mooncake/watch.py`).
- With its master gone every call waits 4.4 s, whatever its options say: here a call is made only while somebody
  listens. The first calls after a restart fail on old connections: they are made again.
- A call that another thread closes under crashes the process: the last call that is under way closes the engine.
- Memory is shared with a client process once: one that was started again does not know it. From then on over TCP.
- Through shared memory, a call that the client gave up after 30 s may still be carried out by the other process, which
  then writes into memory that was given back long ago. Such a call does not return before that memory is taken from
  the other process, and goes on with a new client whose requests cannot be mixed up with the old ones (rules 2, 3).
  The same for a network transfer that the engine gave up: the engine is closed first.

So a call may take long; an executor gives it up at its deadline. Not here: what keys mean and what codes are called.
"""

import ctypes
import dataclasses
import importlib
import logging
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from headwater.core.errors import ResourceClosed, StoreUnavailable
from headwater.storage.base import Deadline
from headwater.storage.mooncake.config import MooncakeConfig, address
from headwater.storage.mooncake.watch import Watch, knock, nobody_listens

log: Final = logging.getLogger("headwater")

INVALID: Final = -600
ABSENT: Final = -704
RPC_FAIL: Final = -900
UNSIZED: Final = -2  # ours: it is there, but not in memory
_UNANSWERED: Final = frozenset({-1, RPC_FAIL, -901})  # its client's words for: no answer
_UNSURE: Final = frozenset({-800, RPC_FAIL, -901})  # codes of a transfer that may still be under way
_GAVE_UP_S: Final = 25.0  # the engine gives a transfer up after 30 s or 60 s, never before
_TRIES: Final = 4  # of a call that found nothing but old connections
_LOOK_S: Final = 0.25  # for a new connection to who listens
_AGAIN_S: Final = 0.2

# Read by the engine when it is loaded; what somebody has set himself stays.
_SETTINGS: Final = {
    "MC_LOG_LEVEL": "ERROR",
    "MC_RPC_TIMEOUT_MS": "5000",  # for an answer of the master; otherwise 30 s
    "MC_RPC_CONNECT_TIMEOUT_MS": "2000",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "5",  # for the next bytes of a transfer; otherwise 30 s
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",  # each holds the GIL
}

_spare: Final[dict[int, list[int]]] = {}  # memory that the engine shares and never frees, by size: used again
_spare_lock: Final = threading.Lock()


def load() -> Any:
    """The engine's module, told to be quiet. Raises StoreUnavailable, which says what to install."""
    talk = os.environ.get("MC_LOG_LEVEL", _SETTINGS["MC_LOG_LEVEL"]) != _SETTINGS["MC_LOG_LEVEL"]
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        module = importlib.import_module("mooncake.store")
    except ImportError as error:
        if "libibverbs" in str(error):
            raise StoreUnavailable(
                "the Mooncake engine needs libibverbs, without RDMA too: apt-get install libibverbs1"
            ) from error
        message = f"a Mooncake pool needs its engine ({error}): pip install 'headwater[mooncake]'"
        raise StoreUnavailable(message) from error
    if not talk:
        try:  # it prints what we return as codes; only this, past its own settings, stops it
            ctypes.c_int.in_dll(ctypes.CDLL(module.__file__), "_ZN3fLI17FLAGS_minloglevelE").value = 3
        except (OSError, ValueError) as error:
            log.debug("the Mooncake engine will print its errors: %s", error)
    return module


class MooncakeEngine:
    """One client of a pool. Calls may come from several threads; they release the GIL while they wait."""

    def __init__(self, config: MooncakeConfig) -> None:
        """Open it. Raises StoreUnavailable. Blocks up to `open_timeout_s`, and some more if a server then goes away."""
        self.config = config
        self._module = load()
        self._watches = [Watch(*address("", where)) for where in (config.master, config.shm) if where is not None]
        self._lock = threading.Condition()
        self._renewing = threading.Lock()  # held by who replaces or closes the client
        self._client: Any = None
        self._old: list[Any] = []  # clients that were replaced; closing one holds the GIL, so that waits for the end
        self._regions: dict[int, int] = {}  # memory that the engine may touch: address, bytes
        self._own: list[memoryview] = []
        self._num_calls = 0
        self._num_unsure = 0  # of them, calls that the engine gave up
        self._closed = False
        until = Deadline.after(config.open_timeout_s)
        for watch in self._watches:
            trouble = knock(*watch.where, until.remaining_s)
            if trouble is not None:
                raise StoreUnavailable(f"the Mooncake pool does not answer: {trouble}; `headwater doctor` says more")
        self._client = self._open()
        if self._client is None:
            raise StoreUnavailable(f"the Mooncake client cannot be opened with {config.url}: see `headwater doctor`")
        self._up(until)  # from now on a connection that is made anew tells that a server was

    # --- calls: one code per key --------------------------------------------------------------------------------------

    def put(self, keys: list[str], addresses: list[int], sizes: list[int], deadline: Deadline) -> list[int]:
        """Store bytes under keys. 0: done, *or* there was something under the key, or somebody else is at it."""
        return self._call(lambda c: c.batch_put_from(keys, addresses, sizes), len(keys), deadline, moves=True)

    def get(self, keys: list[str], addresses: list[int], sizes: list[int], deadline: Deadline) -> list[int]:
        """Copy bytes out: how many, or a code. No key may be there twice: only one of them would be filled."""
        return self._call(lambda c: c.batch_get_into(keys, addresses, sizes), len(keys), deadline, moves=True)

    def exist(self, keys: list[str], deadline: Deadline) -> list[int]:
        """1, 0 or a code. Keeps what is there from being evicted for the time of a lease."""
        return self._call(lambda c: c.batch_is_exist(keys), len(keys), deadline)

    def remove(self, keys: list[str], deadline: Deadline) -> list[int]:
        """Remove by force, leased or not."""
        return self._call(lambda c: c.batch_remove(keys, True), len(keys), deadline)  # noqa: FBT003  its own order

    def sizes(self, keys: list[str], deadline: Deadline) -> list[int]:
        """Bytes of each object, or a code. Through shared memory one trip for each key: for few keys."""
        if self.config.shm is not None:
            return [self.size(key, deadline) for key in keys]
        return self._call(lambda c: _sizes(c.batch_get_replica_desc(keys), keys), len(keys), deadline)

    def size(self, key: str, deadline: Deadline) -> int:
        """Bytes of one object, or the code that says why not: absent, or somebody is writing it."""
        return self._call(lambda c: [c.get_size(key)], 1, deadline)[0]

    def seen(self, keys: list[str], sizes: list[int], deadline: Deadline) -> list[bool]:
        """Whether each object is there, complete, in this size. Shared memory has no batched call for the size."""
        if self.config.shm is not None:
            return [code == 1 for code in self.exist(keys, deadline)]
        return [found == size for found, size in zip(self.sizes(keys, deadline), sizes, strict=True)]

    # --- memory -------------------------------------------------------------------------------------------------------

    def reaches(self, where: int, num_bytes: int) -> bool:
        """Whether the engine may read and write memory where it lies. Over TCP it may anywhere."""
        if self.config.shm is None and self.config.protocol == "tcp":
            return True
        return any(start <= where and where + num_bytes <= start + length for start, length in self._regions.items())

    def register(self, memory: memoryview) -> bool:
        """Let the engine reach memory, which must not be freed before the engine is closed. False: it cannot be had."""
        where = address_of(memory)
        if self._regions.get(where, 0) >= len(memory):
            return True
        if self.config.shm is not None:
            return False  # only memory of the engine's own can be shared
        if self._ask(lambda c: c.register_buffer(where, len(memory))) != 0:
            return False
        self._regions[where] = len(memory)
        return True

    def allocate(self, num_bytes: int) -> memoryview:
        """Memory that the engine reaches, page aligned, until it is closed. Raises StoreUnavailable."""
        if self.config.shm is None:
            memory = memoryview(mmap.mmap(-1, num_bytes))
            if not self.register(memory):
                raise StoreUnavailable(f"{num_bytes} bytes cannot be registered with the Mooncake engine: ulimit -l?")
            self._own.append(memory)
            return memory
        with _spare_lock:
            spare = _spare.get(num_bytes, [])
            where = spare.pop() if spare else 0
        where = where or self._ask(lambda c: c.alloc_from_mem_pool(num_bytes))
        if where <= 0:
            raise StoreUnavailable(f"there are no {num_bytes} bytes of shared memory for the Mooncake client")
        if self._ask(lambda c: c.register_buffer(where, num_bytes)) != 0:
            _keep(num_bytes, where)
            raise StoreUnavailable(f"the client process of the pool does not take {num_bytes} bytes of shared memory")
        self._regions[where] = num_bytes
        return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(where)).data

    def close(self) -> None:
        """Leave the pool. Idempotent. Calls that are under way go on; the last of them closes the engine.

        Where this process gave memory to the pool and the master is gone, the engine takes up to 20 s, GIL and all.
        """
        with self._lock:
            self._closed = True
            last = not self._num_calls
        if last:
            self._shut()

    # --- how a call is made -------------------------------------------------------------------------------------------

    def _call(
        self, work: Callable[[Any], Sequence[int]], num_keys: int, deadline: Deadline, *, moves: bool = False
    ) -> list[int]:
        codes = [RPC_FAIL] * num_keys
        for _ in range(_TRIES):
            client = self._enter()
            begin_s = time.monotonic()
            try:
                if client is None or not self._up(deadline):
                    return codes
                if self._shared_in_vain(client):
                    continue
                answers = list(work(client))
                took_s = time.monotonic() - begin_s
                codes = answers if len(answers) == num_keys else codes
                if moves and took_s >= _GAVE_UP_S and not _UNSURE.isdisjoint(codes):
                    self._make_safe(client)
            finally:
                self._leave()
            if not all(code in _UNANSWERED for code in codes) or took_s > 1 or deadline.expired:
                break
        return codes

    def _ask(self, work: Callable[[Any], int]) -> int:
        return self._call(lambda client: [work(client)], 1, Deadline.after(self.config.open_timeout_s))[0]

    def _up(self, deadline: Deadline) -> bool:
        return all(watch.up(min(_LOOK_S, deadline.remaining_s)) for watch in self._watches)

    def _enter(self) -> Any:
        with self._lock:
            if self._closed:
                raise ResourceClosed("the store is closed")
            self._num_calls += 1
            client = self._client
        if client is None and self._renewing.acquire(blocking=False):
            try:
                self._renew()
            finally:
                self._renewing.release()
            client = self._client
        return client

    def _leave(self) -> None:
        with self._lock:
            self._num_calls -= 1
            self._lock.notify_all()
            last = self._closed and not self._num_calls
        if last:
            self._shut()

    # --- the client ---------------------------------------------------------------------------------------------------

    def _open(self) -> Any:
        """A new client, or None. Holds the GIL."""
        config, client = self.config, self._module.MooncakeDistributedStore()
        if config.shm is not None:
            return client if client.setup_dummy(0, 0, config.shm) == 0 else None
        local = config.local_hostname or _our_address(*address("master", config.master))
        options = (config.segment_bytes, 0, config.protocol, config.device, config.master)
        return client if client.setup(local, config.metadata, *options) == 0 else None

    def _make_safe(self, client: Any) -> None:
        """See to it that nobody touches our memory for a call that was given up. Blocks, for as long as it takes."""
        with self._lock:
            self._num_unsure += 1
            self._lock.notify_all()
        try:
            with self._renewing:
                with self._lock:
                    if self._client is not client:
                        return  # another call saw to it
                    self._client = None
                log.warning("the Mooncake engine gave a transfer up: its memory is taken back before it is used again")
                if self.config.shm is not None:
                    self._unshare(client)
                    self._old.append(client)
                else:
                    with self._lock:
                        self._lock.wait_for(lambda: self._num_calls == self._num_unsure)
                    client.close()
                self._renew()
        finally:
            with self._lock:
                self._num_unsure -= 1

    def _shared_in_vain(self, client: Any) -> bool:
        """Whether the process that shares our memory was started again: from then on bytes go over TCP.

        The new process knows nothing of our memory, and the engine shares the same memory only once: it says -600 for
        ever, most of the time. True: try again, with the client that is there then.
        """
        if self.config.shm is None or self._watches[-1].num_lines <= 1:
            return False
        if self._renewing.acquire(blocking=False):
            try:
                if self._client is client:
                    log.warning("the Mooncake client at %s was started again: bytes go over TCP now", self.config.shm)
                    with self._lock:
                        self._client = None
                    self._old.append(client)  # its memory stays as it is: it is ours until the end
                    *self._watches, local = self._watches
                    self.config = dataclasses.replace(self.config, shm=None)
                    local.close()
                    self._renew()
            finally:
                self._renewing.release()
        return True

    def _unshare(self, client: Any) -> None:
        """Until the other process has given all our memory up, or is gone."""
        left = list(self._regions)
        while left and not nobody_listens(*self._watches[-1].where, _LOOK_S):
            left = [where for where in left if client.unregister_buffer(where) not in (0, INVALID)]
            if left:
                time.sleep(_AGAIN_S)

    def _renew(self) -> None:
        """A new client in the place of one that is gone, if the pool answers. `_renewing` is held."""
        if self._closed or any(knock(*watch.where, _LOOK_S) is not None for watch in self._watches):
            return
        client = self._open()
        if client is None:
            return
        if any(client.register_buffer(where, num_bytes) for where, num_bytes in self._regions.items()):
            self._old.append(client)
            return
        with self._lock:
            self._client = client

    def _shut(self) -> None:
        with self._renewing:
            client, self._client = self._client, None
            up = self._up(Deadline.after(_LOOK_S))
            for where, num_bytes in self._regions.items():
                given_up = client is not None and up and client.unregister_buffer(where) == 0
                if given_up and self.config.shm is not None:
                    _keep(num_bytes, where)
            self._regions = {}
            for one in (client, *self._old):
                if one is not None:
                    one.close()
            self._old.clear()
            for watch in self._watches:
                watch.close()


def address_of(memory: memoryview) -> int:
    """Where memory lies, read-only memory too."""
    where: int = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
    return where


def _keep(num_bytes: int, where: int) -> None:
    with _spare_lock:
        _spare.setdefault(num_bytes, []).append(where)


def _sizes(found: dict[str, Any], keys: Sequence[str]) -> list[int]:
    """Bytes of each object, by its first replica in memory."""
    sizes = []
    for key in keys:
        replicas = found.get(key)
        if not replicas:
            sizes.append(ABSENT)
        elif replicas[0].is_memory_replica():
            sizes.append(int(replicas[0].get_memory_descriptor().buffer_descriptor.size))
        else:
            sizes.append(UNSIZED)
    return sizes


def _our_address(host: str, port: int) -> str:
    """The address of ours that the master sees. Sends nothing."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])
