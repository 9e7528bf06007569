"""What the tests of copies share: a wire that waits, raises and lies; hooks for it."""

import logging
import threading
from collections.abc import Callable, Iterator

import pytest

from headwater.layout.spec import KVLayout
from headwater.transfer.device.arena import DeviceCache
from headwater.transfer.device.torch_wire import TorchWire
from headwater.transfer.device.wire import Digests, Direction, WirePiece

WAIT_S = 60.0  # nothing here takes that long


@pytest.fixture
def no_traces() -> Iterator[None]:
    """What is logged keeps no traceback: pytest would keep it, and with it the memory of the frames in it."""

    def forget(record: logging.LogRecord) -> bool:
        record.exc_info = None
        return True

    logger = logging.getLogger("headwater")
    logger.addFilter(forget)
    yield
    logger.removeFilter(forget)


class OddWire(TorchWire):
    """A wire that can be made to wait, to raise and to lie. Checks that places are used as they are meant to be."""

    def __init__(self, cache: DeviceCache, layout: KVLayout, direction: Direction, **options: int | bool) -> None:
        super().__init__(cache, layout, direction, **options)  # type: ignore[arg-type]
        self.on_launch: Callable[[WirePiece], None] | None = None
        self.on_finish: Callable[[WirePiece], None] | None = None
        self.judge: Callable[[WirePiece, Digests | None], Digests | None] | None = None
        self.launched: list[WirePiece] = []
        self.finished: list[WirePiece] = []
        self.closed = False
        self._under_way: list[tuple[int, WirePiece]] = []
        self._order = threading.Lock()

    def launch(self, place: int, piece: WirePiece) -> None:
        with self._order:
            assert not self.closed
            assert place not in [one for one, _ in self._under_way], "a place was given away before it was finished"
            self._under_way.append((place, piece))
            self.launched.append(piece)
        if self.on_launch is not None:
            self.on_launch(piece)
        super().launch(place, piece)

    def finish(self, place: int, *, hurry: bool = False) -> Digests | None:
        with self._order:
            assert not self.closed
            first, piece = self._under_way[0]
            assert first == place, "not the oldest one"
        interrupted = True  # then it is still on the wire
        try:
            if self.on_finish is not None:
                self.on_finish(piece)
            found = super().finish(place, hurry=hurry)
            interrupted = False
        except Exception:
            interrupted = False
            raise
        finally:
            with self._order:
                if not interrupted:
                    self._under_way = self._under_way[1:]
                    self.finished.append(piece)
        return found if self.judge is None else self.judge(piece, found)

    def close(self) -> None:
        assert not self._under_way, "closed while copies are under way"
        self.closed = True
        super().close()


class Count:
    """Counts calls, and lets a test wait for the first."""

    def __init__(self) -> None:
        self.number = 0
        self.called = threading.Event()

    def __call__(self) -> None:
        self.number += 1
        self.called.set()


class Hold:
    """A hook that stops at the k-th call until it is let go."""

    def __init__(self, at: int = 0) -> None:
        self._left = at
        self.arrived = threading.Event()
        self.go_on = threading.Event()

    def __call__(self, _: WirePiece) -> None:
        self._left -= 1
        if self._left < 0:
            self.arrived.set()
            assert self.go_on.wait(WAIT_S)


def at_call(number: int, act: Callable[[], None]) -> Callable[[WirePiece], None]:
    """A hook that does something at the k-th call."""
    left = [number]

    def hook(_: WirePiece) -> None:
        left[0] -= 1
        if left[0] == -1:
            act()

    return hook


def interrupt(kind: type[BaseException]) -> Callable[[], None]:
    """What ends a program, once."""
    left = [kind]

    def act() -> None:
        if left:
            raise left.pop()

    return act


def raise_trouble() -> None:
    raise RuntimeError("the device is gone")
