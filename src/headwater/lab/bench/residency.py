"""How fast a residency index in a Redis server answers: blocks looked up per second, over a real connection."""

import hashlib
import time
from dataclasses import dataclass
from statistics import median

from headwater.core.errors import HeadwaterError
from headwater.core.keys import BlockKey
from headwater.residency.events import Applied, Change, State, Update, UpdateKind
from headwater.residency.redis import RedisResidency
from headwater.storage.base import Deadline
from headwater.storage.redis.lines import RedisError, RedisLines

_TIMEOUT_S = 30.0
_SLICE_BLOCKS = 512


@dataclass(frozen=True, slots=True)
class LookupSpeed:
    """What was measured."""

    blocks_per_s: float  # median over repetitions: blocks of the looked-up paths
    lookup_ms: float  # one path, median
    said_blocks_per_s: float  # while the index was filled
    num_blocks: int  # of one path
    num_nodes: int


def bench_lookups(
    url: str, num_blocks: int = 1024, *, num_nodes: int = 4, num_paths: int = 16, seconds: float = 1.0
) -> LookupSpeed:
    """Look up paths of `num_blocks` blocks, all of them held by each of `num_nodes` nodes. Blocks.

    Fills the index under a prefix of its own first, and leaves nothing behind. Each look-up is one round trip on one
    connection. Raises HeadwaterError where the server does not answer, or answers something else than what is there.
    """
    prefix = f"headwater:bench:{time.monotonic_ns()}:"
    with RedisResidency(url, prefix=prefix, keep_s=120) as index:
        paths = [_path(number, num_blocks) for number in range(num_paths)]
        try:
            begun_s = time.perf_counter()
            for node in range(num_nodes):
                _say(index, f"node {node}", paths, State.DEVICE if node % 2 else State.DEVICE | State.HOST)
            said_s = time.perf_counter() - begun_s
            took_s = _look(index, paths, num_nodes, seconds)
        finally:
            _clear(url, prefix, paths)
    one_s = median(took_s)
    return LookupSpeed(
        blocks_per_s=num_blocks / one_s,
        lookup_ms=one_s * 1000,
        said_blocks_per_s=num_nodes * num_paths * num_blocks / said_s,
        num_blocks=num_blocks,
        num_nodes=num_nodes,
    )


def _path(number: int, num_blocks: int) -> list[BlockKey]:
    return [BlockKey(hashlib.sha256(f"headwater bench {number} {i}".encode()).digest()) for i in range(num_blocks)]


def _look(index: RedisResidency, paths: list[list[BlockKey]], num_nodes: int, seconds: float) -> list[float]:
    took_s: list[float] = []
    until_s = time.perf_counter() + seconds
    while not took_s or time.perf_counter() < until_s:
        for path in paths:
            begun_s = time.perf_counter()
            found = index.lookup(path, deadline=Deadline.after(_TIMEOUT_S))
            took_s.append(time.perf_counter() - begun_s)
            if [one.device for one in found.holders] != [len(path)] * num_nodes:
                raise HeadwaterError(f"the index does not know what it was told: {found}")
    return took_s


def _say(index: RedisResidency, node: str, paths: list[list[BlockKey]], state: State) -> None:
    keys = [key for path in paths for key in path]
    slices = [keys[at : at + _SLICE_BLOCKS] for at in range(0, len(keys), _SLICE_BLOCKS)]
    for number, row in enumerate(slices, 1):
        _apply(index, _update(node, number, UpdateKind.BEGIN if number == 1 else UpdateKind.CHANGE, row, state))
    _apply(index, _update(node, len(slices) + 1, UpdateKind.END, [], state))


def _clear(url: str, prefix: str, paths: list[list[BlockKey]]) -> None:
    """Remove what was said; should that not work, most of it goes by itself, in two minutes."""
    lines = RedisLines(url)
    try:
        names = [prefix.encode() + word for path in paths for word in path] + [f"{prefix}nodes".encode()]
        for at in range(0, len(names), _SLICE_BLOCKS):
            lines.ask([(b"UNLINK", *names[at : at + _SLICE_BLOCKS])], Deadline.after(_TIMEOUT_S))
        lines.ask([(b"UNLINK", f"{prefix}terms".encode())], Deadline.after(_TIMEOUT_S))
    except RedisError:
        return
    finally:
        lines.close()


def _apply(index: RedisResidency, update: Update) -> None:
    answer = index.apply(update, deadline=Deadline.after(_TIMEOUT_S))
    if answer is not Applied.APPLIED:
        raise HeadwaterError(f"the residency index did not take an update in: {answer}")


def _update(node: str, sequence: int, kind: UpdateKind, keys: list[BlockKey], state: State) -> Update:
    changes = (Change(parent=BlockKey(bytes(32)), depth=0, keys=tuple(keys), state=state),) if keys else ()
    return Update(node=node, epoch=1, sequence=sequence, round=1, kind=kind, lease_s=120.0, changes=changes)
