"""The wire of a CPU (see `wire.py`), and the reference: plane by plane, digests through xxhash.

A piece is copied by who finishes it. Large ones on their way in may also be taken by a helper, a thread of the wire's
own: it begins with what was launched, and who has to wait for the helper's piece copies another one meanwhile. A load
is waited for, and one core does not fill a machine's memory bus. What goes out nobody waits for: that leaves the other
cores to the model.

Invariants: a piece is copied once, by one thread; nothing is written for it after `finish`; `close` ends the helper.
"""

import os
import threading
from contextlib import suppress
from typing import Final

import numpy as np
import numpy.typing as npt

from headwater.core.errors import CopyDamaged, InvalidInput
from headwater.layout.digest import plane_digest
from headwater.layout.frame import header_bytes
from headwater.layout.spec import KVLayout
from headwater.transfer.device.arena import DeviceCache
from headwater.transfer.device.wire import Digests, Direction, WirePiece

SHARED_BYTES: Final = 1 << 20  # of a piece that the helper may take: less is over before it wakes up


class TorchWire:
    """One direction, on a CPU."""

    by_address: Final = False
    in_stages: Final = True

    def __init__(
        self,
        cache: DeviceCache,
        layout: KVLayout,
        direction: Direction,
        *,
        num_places: int = 4,
        place_bytes: int = 8 << 20,
        digests: bool = True,
        shared_bytes: int = SHARED_BYTES,
    ) -> None:
        """Pieces of `shared_bytes` and more, on their way in, are shared with a helper."""
        self.num_places: Final = num_places
        self.place_bytes: Final = place_bytes
        indices = [cache.layout.index(plane.role.name, plane.layer) for plane in layout.planes]
        self._rows: list[npt.NDArray[np.uint8]] = [cache.rows[index].numpy() for index in indices]
        self._layout = layout
        self._payload_at = header_bytes(len(layout.planes))
        self._direction = direction
        self._digests = digests
        self._shared_bytes = shared_bytes
        self._shares = direction is Direction.IN and len(os.sched_getaffinity(0)) > 1
        self._pieces: list[WirePiece | None] = [None] * num_places
        self._changed = threading.Condition()
        self._waiting: dict[int, bool] = {}  # places whose piece nobody has begun, oldest first: may the helper take it
        self._begun: set[int] = set()
        self._over: dict[int, Digests | Exception | None] = {}
        self._helper: threading.Thread | None = None  # from the first time there is something to share
        self._closed = False

    def direct(self) -> None:
        """None: there is one way."""
        return

    def launch(self, place: int, piece: WirePiece) -> None:
        """Remember the piece; the helper may begin with it."""
        size = sum(self._layout.plane_bytes[piece.planes.start : piece.planes.stop])
        shared = self._shares and size * len(piece.slots) >= self._shared_bytes
        with self._changed:
            self._pieces[place] = piece
            self._waiting[place] = shared
            if shared and self._helper is None and not self._closed:
                helper = threading.Thread(target=self._help, name="headwater copies too", daemon=True)
                with suppress(RuntimeError):  # the machine has no more: who finishes a piece copies it
                    helper.start()
                    self._helper = helper
            self._changed.notify_all()

    def finish(self, place: int, *, hurry: bool = False) -> Digests | None:
        """Copy, unless the helper is at it: then copy what waits behind it, and wait."""
        while True:
            with self._changed:
                while place in self._begun and self._next() is None:
                    self._changed.wait()
                if place not in self._begun and place not in self._waiting:
                    found, self._pieces[place] = self._over.pop(place, None), None
                    break
                at = self._begin(place if place in self._waiting else self._next())
            self._do(at)
        if isinstance(found, Exception):
            raise found
        return found

    def close(self) -> None:
        """End the helper, let go of the memory. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            helper, self._helper = self._helper, None
        if helper is not None:
            helper.join()
        self._rows = []

    # ------------------------------------------------------------------------------------------------------------------

    def _help(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._next() is not None)
                if self._closed:
                    return
                at = self._begin(self._next())
            self._do(at)

    def _next(self) -> int | None:
        """The oldest piece that anybody may begin. The lock is held."""
        return next((place for place, shared in self._waiting.items() if shared), None)

    def _begin(self, place: int | None) -> int:
        """It is the caller's from now on. The lock is held."""
        if place is None:
            raise InvalidInput("no piece waits")
        del self._waiting[place]
        self._begun.add(place)
        return place

    def _do(self, place: int) -> None:
        """Copy a piece that was begun, and keep what came of it for who finishes it."""
        piece = self._pieces[place]
        found: Digests | Exception | None = CopyDamaged("who copied was interrupted")
        try:
            found = self._copy(piece) if piece is not None else None
        except Exception as error:  # noqa: BLE001  raised by `finish`
            found = error
        finally:  # an interrupt is the caller's own; who finishes the piece hears that it was not copied
            with self._changed:
                self._begun.discard(place)
                self._over[place] = found
                self._changed.notify_all()

    def _copy(self, piece: WirePiece) -> Digests | None:
        layout, first = self._layout, piece.planes.start
        start = self._payload_at + layout.offsets[first]
        sizes = layout.plane_bytes[first : piece.planes.stop]
        found = np.zeros((len(piece.slots), len(sizes)), np.uint64)
        for i, (slot, frame) in enumerate(zip(piece.slots.tolist(), piece.frames, strict=True)):
            at, page = start, np.frombuffer(frame, np.uint8)
            for plane, size in zip(piece.planes, sizes, strict=True):
                block, payload = self._rows[plane][slot], page[at : at + size]
                source, target = (block, payload) if self._direction is Direction.OUT else (payload, block)
                target[:] = source  # numpy lets other threads run meanwhile
                if self._digests:
                    found[i, plane - first] = plane_digest(block.data)  # ours alone (rule 4), and hot
                at += size
        return found if self._digests else None
