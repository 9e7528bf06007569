"""Which of our functions a block or a request passes: a profile of a run that is cut down to the way to some stations.

A *station* is a function at which something happens to the block or request: it gets a name, is queued, copied,
published, sent. Where a station is first called, the functions of ours that are on the stack, outermost first, are on
its way. Each counts once. Functions that were called on the way, did their part and returned are not on the stack, and
do not count; nor do lambdas and comprehensions.
"""

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import headwater

_ROOT = str(Path(headwater.__file__).parent) + "/"


@dataclass(frozen=True, eq=False)
class Hop:
    """One call of a function of ours."""

    function: str
    path: str

    def __str__(self) -> str:
        return f"`{self.function}` in `{self.path}`"


class Trace:
    """Who was on the stack when each station was called, call by call."""

    def __init__(self, stations: Sequence[str]) -> None:
        self._stations = {station.rpartition(" > ")[2] for station in stations}
        self._calls: list[list[Hop]] = []
        self._hops: dict[FrameType, Hop] = {}
        self._lock = threading.Lock()

    def heard(self, frame: FrameType, event: str, _: Any) -> None:
        """What `sys.setprofile` calls. A coroutine that goes on is called again, and was heard before."""
        if event != "call" or frame.f_code.co_qualname not in self._stations or not _is_ours(frame):
            return
        if frame in self._hops:
            return
        stack: list[Hop] = []
        with self._lock:
            one: FrameType | None = frame
            while one is not None:
                if _is_ours(one):
                    known = self._hops.get(one)
                    if known is None:
                        path = one.f_code.co_filename.removeprefix(_ROOT)
                        known = self._hops[one] = Hop(one.f_code.co_qualname, path)
                    stack.append(known)
                one = one.f_back
            self._calls.append(stack[::-1])

    def passed(self, station: str) -> bool:
        """Whether a station was called."""
        with self._lock:
            return any(stack[-1].function == station for stack in self._calls)

    def forget(self) -> None:
        """What was called so far does not count."""
        with self._lock:
            self._calls.clear()

    def close(self) -> None:
        """Let go of the frames, and of all that they hold."""
        with self._lock:
            self._hops.clear()

    def _calls_of(self, station: str) -> list[list[Hop]]:
        caller, _, name = station.rpartition(" > ")
        calls = [
            stack
            for stack in self._calls
            if stack[-1].function == name and (not caller or any(one.function == caller for one in stack))
        ]
        assert calls, f"{station} was not called"
        return calls

    def way(self, stations: Sequence[str], *, first: str = "") -> list[str]:
        """The functions on the way through these stations, in their order, from the function `first` on.

        `A > B` is a B that was called, directly or not, by an A. A station that is named twice is passed twice.
        """
        first_calls = [self._calls_of(station)[0] for station in stations]
        found: list[Hop] = []
        for at, station in enumerate(stations):
            calls, turn = self._calls_of(station), stations[:at].count(station)
            assert turn < len(calls), f"{station} was called {len(calls)} times"
            stack = calls[turn]
            if stations.count(station) == 1:  # of several calls, by several threads, that of the others' thread
                others = {hop for i, one in enumerate(first_calls) if i != at for hop in one}
                stack = max(calls, key=lambda one: len(others.intersection(one)))
            found += [hop for hop in stack if hop not in found]
        begin = next((i for i, hop in enumerate(found) if hop.function == first), 0)
        return list(map(str, found[begin:]))


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_ROOT) and not frame.f_code.co_name.startswith("<")


@contextmanager
def traced(stations: Sequence[str]) -> Iterator[Trace]:
    """While it is open, calls of these functions are heard in this thread and in all that begin meanwhile."""
    trace = Trace(stations)
    threading.setprofile(trace.heard)
    sys.setprofile(trace.heard)
    try:
        yield trace
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        trace.close()
