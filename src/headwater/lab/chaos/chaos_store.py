"""A node's pool that goes wrong when it is told to: orders come by a file, what was done goes into another.

`FaultOrders` are one node's: the newest is in `NAME.order`, and each is obeyed in the node's process, at the calls of
its pool, so that a fault comes exactly before, in or after a write or a read. `haunt` hooks the methods of the store
itself: it stays what it is, with all that it can do besides, and what is damaged is damaged in the pool.

    die before | during | after     the process is killed (-9) before, in or after a write: after is behind the tail
    die reading                     the same before, in or behind a read
    full, slow                      until the order is taken back: no room; each call takes `seconds`
    missing, cut, damaged, foreign  one of the next pages to be read is removed, half written, changed, another's

Not here: who gives orders (`chaos_faults.py`), the process (`chaos_node.py`).
"""

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from headwater.core.page import PageName
from headwater.core.results import Status
from headwater.layout.frame import parse
from headwater.storage.base import Borrow, Deadline, Reservation, Store
from headwater.storage.local import MappedStore

DIE: Final = ("before", "during", "after", "reading")
HARMS: Final = ("missing", "cut", "damaged", "foreign")
_SPREAD_S: Final = 0.02  # in which a process dies after a write
_SOON_S: Final = 2.0  # for the vandal's own calls


class FaultOrders:
    """What a node is to do wrong, and what it did. Several threads may ask."""

    def __init__(self, directory: Path, name: str) -> None:
        self._path = directory / f"{name}.order"
        self._fd = os.open(directory / f"{name}.done", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._lock = threading.Lock()
        self._stamp: tuple[int, int] | None = None
        self._order: dict[str, Any] = {}
        self._over = 0  # the newest order that was carried out

    def now(self) -> dict[str, Any]:
        """The order in force, which is empty if there is none."""
        with self._lock:
            try:
                found = os.stat(self._path)
            except FileNotFoundError:
                return {}
            stamp = (found.st_ino, found.st_mtime_ns)
            if stamp != self._stamp:
                self._order, self._stamp = json.loads(self._path.read_text(encoding="utf-8")), stamp
            return self._order if self._order.get("id", 0) > self._over else {}

    def take(self, order: dict[str, Any]) -> bool:
        """Whether it is the caller's to carry out: one does it, and once."""
        with self._lock:
            before, self._over = self._over, max(self._over, order["id"])
            return self._over > before

    def did(self, order: dict[str, Any], what: str) -> None:
        """Say so, at once."""
        os.write(self._fd, (json.dumps({"id": order["id"], "what": what}) + "\n").encode())


def haunt(store: Store, orders: FaultOrders, *, seed: int = 0) -> Store:
    """Hook a store's methods, in place; the same store."""
    ghost = _Ghost(store, orders, random.Random(seed))
    for name in ("put", "publish", "reserve"):
        _hook(store, name, ghost.writing)
    for name in ("get_into", "borrow"):
        _hook(store, name, ghost.reading)
    setattr(store, "piecewise", lambda: None)  # noqa: B010  what is read comes by here, whole
    for name in ("contains", "delete"):
        _hook(store, name, ghost.looking)
    return store


_Real = Callable[..., Any]
_Around = Callable[[str, _Real, Sequence[Any], Deadline], Any]


def _hook(store: Store, name: str, around: _Around) -> None:
    real: _Real | None = getattr(store, name, None)
    if real is None:  # not every store has addresses
        return

    def hooked(items: Sequence[Any], *, deadline: Deadline) -> Any:
        return around(name, real, items, deadline)

    setattr(store, name, hooked)


class _Ghost:
    """What happens around a store's calls."""

    def __init__(self, store: Store, orders: FaultOrders, rng: random.Random) -> None:
        self._store = store
        self._orders = orders
        self._rng = rng
        self._seen: tuple[PageName, bytes] | None = None  # a page that came by, for others to get

    def writing(self, name: str, real: _Real, items: Sequence[Any], deadline: Deadline) -> Any:
        order = self._orders.now()
        match order.get("do"):
            case "slow":
                if self._dawdle(order, deadline):
                    return [Status.LATE] * len(items)
            case "full" if name != "publish":
                self._orders.did(order, name)
                return [Status.NO_ROOM] * len(items)
            case "before":
                self._die(order)
            case "during":
                if name == "reserve":
                    return real(items, deadline=deadline)
                self._half(order, real, items, deadline)
            case "after" if any(map(_is_tail, items)):
                found = real(items, deadline=deadline)
                self._die_soon(order, self._rng.uniform(0, _SPREAD_S))
                return found
        return real(items, deadline=deadline)

    def reading(self, name: str, real: _Real, items: Sequence[Any], deadline: Deadline) -> Any:
        order = self._orders.now()
        what = order.get("do")
        if what == "slow" and self._dawdle(order, deadline):
            return [Status.LATE] * len(items)
        if what == "reading":
            if self._rng.random() < 0.5:
                self._half(order, real, items, deadline)
            self._die_soon(order, self._rng.choice([0.0, self._rng.uniform(0, 0.002)]))
        if what in HARMS and items:
            names: list[PageName] = [one[0] if isinstance(one, tuple) else one for one in items]
            self._harm(order, names)
        found = real(items, deadline=deadline)
        self._remember(items, found)
        return found

    def looking(self, name: str, real: _Real, items: Sequence[Any], deadline: Deadline) -> Any:
        order = self._orders.now()
        if order.get("do") == "slow" and name == "contains" and self._dawdle(order, deadline):
            return [False] * len(items)
        return real(items, deadline=deadline)

    # --- slow ---------------------------------------------------------------------------------------------------------

    def _dawdle(self, order: dict[str, Any], deadline: Deadline) -> bool:
        """Take as long as ordered; whether the call's time is over. A store that keeps deadlines keeps this one."""
        self._orders.did(order, "slow")
        seconds = float(order["seconds"])
        time.sleep(min(seconds, deadline.remaining_s) if self._store.interruptible else seconds)
        return deadline.expired

    # --- dying --------------------------------------------------------------------------------------------------------

    def _die(self, order: dict[str, Any]) -> None:
        if self._orders.take(order):
            self._orders.did(order, "die")
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1.0)  # another thread does it: this one does no more than it had

    def _die_soon(self, order: dict[str, Any], seconds: float) -> None:
        """In a moment, whatever this thread does meanwhile."""
        timer = threading.Timer(seconds, self._die, [order])
        timer.daemon = True
        timer.start()

    def _half(self, order: dict[str, Any], real: _Real, items: Sequence[Any], deadline: Deadline) -> None:
        """Some of a call's pages, and die; of a call with one page, die in the middle of it, or nearly."""
        if len(items) > 1:
            real(items[: len(items) // 2], deadline=deadline)
            self._die(order)
        self._die_soon(order, self._rng.uniform(0, 0.0005))

    # --- harm ---------------------------------------------------------------------------------------------------------

    def _harm(self, order: dict[str, Any], names: Sequence[PageName]) -> None:
        """Do it to one of these pages, in the pool, if it is there."""
        store, soon = self._store, Deadline.after(_SOON_S)
        name = self._rng.choice(list(names))
        kind = order["do"]
        if not isinstance(store, MappedStore):
            raise TypeError("only pages of a pool in memory can be damaged from here")
        place = store._run(lambda at: at.catalog.mirror.places.get(name), None)
        memory = store.memory()
        other = self._seen
        if place is None or memory is None or (kind == "foreign" and (other is None or other[0] == name)):
            return
        if not self._orders.take(order):
            return
        if kind == "missing":
            type(store).delete(store, [name], deadline=soon)
        else:
            page = memory[place.offset : place.offset + place.num_bytes]
            self._spoil(kind, page, other[1] if other is not None else b"")
        self._orders.did(order, kind)

    def _spoil(self, kind: str, page: memoryview, other: bytes) -> None:
        if kind == "foreign":
            page[: len(other)] = other[: len(page)]
        elif kind == "cut":
            cut = self._rng.randrange(len(page))
            page[cut:] = bytes(len(page) - cut)
            page[-1] = 0xA5  # where zeros were
        else:
            for _ in range(self._rng.choice([1, 1, 100])):
                page[self._rng.randrange(len(page))] ^= 1 << self._rng.randrange(8)

    def _remember(self, items: Sequence[Any], found: Sequence[Any]) -> None:
        """Keep a page that was read, now and then."""
        if self._seen is not None and self._rng.random() > 0.1:
            return
        for one, status in zip(items, found, strict=True):
            if isinstance(status, Borrow):
                self._seen = (status.name, bytes(status.view))
            elif status is Status.HIT:
                self._seen = (one[0], bytes(one[1]))


def _is_tail(item: Any) -> bool:
    """Whether something that is written is the last, partial block of a prompt: no other page expires."""
    if isinstance(item, Reservation):
        return False
    name, frame = item
    if not isinstance(name, bytes):  # to be reserved
        return False
    header = parse(frame)
    return not isinstance(header, Status) and header.meta.expires_at_ms != 0
