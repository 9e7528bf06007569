"""Ways to a pool for `bench pool`: a store as the cache uses it, and bare calls of the same client beside it.

Servers are real ones on loopback, started here and ended with the block. A way that cannot be had on this machine
raises NotHere, which says why.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from headwater.build import open_local
from headwater.config.stores import LocalStoreConfig
from headwater.core.errors import NotInstalled, StoreError
from headwater.core.page import PageName
from headwater.pool.process import spawn
from headwater.pool.servers import LOOPBACK, QUIET, client_command, free_port, master_command
from headwater.storage.base import Deadline, Store
from headwater.storage.memory import MemoryStore
from headwater.storage.mooncake import MooncakeStore
from headwater.storage.mooncake.config import MooncakeConfig
from headwater.storage.mooncake.engine import address_of
from headwater.storage.mooncake.watch import knock
from headwater.storage.scratch import memory_root
from headwater.testing.redis import redis_server

NAMES: Final = ("memory", "local", "redis", "mooncake-own", "mooncake-shm", "mooncake-tcp")
_UP_S: Final = 20.0

Items = Sequence[tuple[PageName, memoryview]]


class NotHere(Exception):
    """This way cannot be measured here."""


@dataclass(frozen=True, slots=True)
class Bare:
    """The same client's own batched calls: nothing sealed, nothing verified, nothing looked at twice."""

    put: Callable[[Items], None]
    get: Callable[[Items], None]
    exist: Callable[[Sequence[PageName]], object]


@dataclass(frozen=True, slots=True)
class Way:
    """A store, what it is compared with, and where pages must lie that it reaches without a copy."""

    store: Store
    bare: Bare | None = None
    memory: Callable[[int], memoryview] | None = None
    forget: Callable[[Sequence[PageName]], object] | None = None  # what the bare client put


@contextmanager
def open_way(name: str, room_bytes: int) -> Iterator[Way]:
    """One way, with its servers. Raises NotHere."""
    with ExitStack() as stack:
        try:
            yield stack.enter_context(_OPENERS[name](room_bytes))
        except (StoreError, NotInstalled) as error:
            raise NotHere(str(error)) from error


@contextmanager
def _memory(room_bytes: int) -> Iterator[Way]:
    with MemoryStore(room_bytes) as store:
        yield Way(store)


@contextmanager
def _local(room_bytes: int) -> Iterator[Way]:
    root = memory_root(room_bytes)
    with tempfile.TemporaryDirectory(prefix="headwater-bench-", dir=root) as path:
        config = LocalStoreConfig(directory=Path(path) / "pool", limit_bytes=room_bytes, prefault=True)
        with open_local(config) as store:
            yield Way(store)


@contextmanager
def _redis(room_bytes: int) -> Iterator[Way]:
    from headwater.storage.redis import RedisStore

    try:
        import redis
    except ModuleNotFoundError as error:
        raise NotInstalled("the client to compare with is missing: pip install redis") from error
    with redis_server(room_bytes) as url, RedisStore(url) as store:
        client = redis.Redis.from_url(url)

        def put(pages: Items) -> None:
            for name, frame in pages:  # one at a time: pipelines of large values are slower
                client.set(b"bare:" + name, frame)

        def get(pages: Items) -> None:
            for name, buffer in pages:
                value = client.get(b"bare:" + name)
                if not isinstance(value, bytes) or len(value) != len(buffer):
                    raise NotHere("the server lost a value")
                buffer[:] = value

        try:
            bare = Bare(put, get, partial(_exist, client))
            yield Way(store, bare, forget=lambda names: client.unlink(*(b"bare:" + name for name in names)))
        finally:
            client.close()


@contextmanager
def _mooncake(room_bytes: int, *, how: str) -> Iterator[Way]:
    port, client_port = free_port(), free_port()
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as directory, ExitStack() as stack:

        def start(name: str, command: list[str], at: int) -> None:
            process = spawn(command, settings=QUIET, output=Path(directory) / f"{name}.log")
            stack.callback(process.stop, patience_s=5.0)
            _wait_for(at)

        start("master", master_command(port=port, metrics_port=free_port()), port)
        if how != "own":
            segment = client_command(port=client_port, master_port=port, segment_bytes=room_bytes)
            start("client", segment, client_port)
        config = MooncakeConfig(
            master=f"{LOOPBACK}:{port}",
            shm=f"{LOOPBACK}:{client_port}" if how == "shm" else None,
            segment_bytes=room_bytes if how == "own" else 0,
        )
        with MooncakeStore(config) as store:
            yield Way(store, _bare(store), store.memory, lambda names: _remove(store, names))


def _bare(store: MooncakeStore) -> Bare:
    client: Any = store._engine._client

    def put(pages: Items) -> None:
        keys, sizes = ["bare:" + name.hex() for name, _ in pages], [len(frame) for _, frame in pages]
        if any(client.batch_put_from(keys, [address_of(frame) for _, frame in pages], sizes)):
            raise NotHere("the pool took a page only in part")

    def get(pages: Items) -> None:
        keys, sizes = ["bare:" + name.hex() for name, _ in pages], [len(frame) for _, frame in pages]
        if list(client.batch_get_into(keys, [address_of(frame) for _, frame in pages], sizes)) != sizes:
            raise NotHere("the pool lost a page")

    return Bare(put, get, lambda names: client.batch_is_exist(["bare:" + name.hex() for name in names]))


def _remove(store: MooncakeStore, names: Sequence[PageName]) -> None:
    client: Any = store._engine._client
    client.batch_remove(["bare:" + name.hex() for name in names], True)  # noqa: FBT003  its own order


def _exist(client: Any, names: Sequence[PageName]) -> object:
    """One round trip of one EXISTS a page: the command counts, and does not say which."""
    pipe = client.pipeline(transaction=False)
    for name in names:
        pipe.exists(b"bare:" + name)
    return pipe.execute()


def _wait_for(port: int) -> None:
    """Until a server answers a Mooncake client. Raises NotHere."""
    until = Deadline.after(_UP_S)
    while (trouble := knock(LOOPBACK, port, 0.5)) is not None:
        if until.expired:
            raise NotHere(f"a server does not come up: {trouble}")
        time.sleep(0.02)


_OPENERS: Final[dict[str, Callable[[int], Any]]] = {
    "memory": _memory,
    "local": _local,
    "redis": _redis,
    "mooncake-own": lambda room_bytes: _mooncake(room_bytes, how="own"),
    "mooncake-shm": lambda room_bytes: _mooncake(room_bytes, how="shm"),
    "mooncake-tcp": lambda room_bytes: _mooncake(room_bytes, how="tcp"),
}
