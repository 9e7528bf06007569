"""A machine that has no more threads: copies end where they began, never in slots that are another's by then."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest

from copy_kit import no_traces
from headwater.layout.spec import opaque_layout
from headwater.transfer.device.arena import create_kv_cache
from headwater.transfer.device.copy_engine import CopyEngine
from headwater.transfer.device.torch_wire import TorchWire
from headwater.transfer.device.wire import Direction
from test_in_place import rig
from test_torch_wire import WAIT_S, digests_of, frames_of, held, payload

pytestmark = pytest.mark.usefixtures(no_traces.__name__)


@contextmanager
def no_threads_for(name: str) -> Iterator[list[str]]:
    """Threads of that name cannot be started. Gives those that were wanted."""
    start, wanted = threading.Thread.start, list[str]()

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith(name):
            wanted.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    with patch.object(threading.Thread, "start", refuse):
        yield wanted


@pytest.mark.parametrize("paged", [False, True])
def test_a_load_without_a_thread_for_its_copies_ends_well(shm: Path, *, paged: bool) -> None:
    with rig(shm) as here:
        here.saved(range(3))
        here.staging.far = paged
        here.staging.into.on_finish = lambda _: time.sleep(0.03)  # longer than a look whether it is wanted
        with no_threads_for("headwater copies") as wanted:
            here.loaded([20, 21, 22], range(3))
        assert wanted, "otherwise this shows nothing"
        assert not here.staging.engine._queues[Direction.IN].is_busy
        here.staging.into.on_finish = None
        here.loaded([30, 31, 32], range(3))


def test_a_save_without_a_thread_for_its_copies_gives_no_slot_back_too_early(shm: Path) -> None:
    with rig(shm) as here:
        with no_threads_for("headwater copies") as wanted:
            here.saved(range(6))
        assert wanted
        assert not here.staging.engine._queues[Direction.OUT].is_busy
        here.nothing_is_out()
        here.loaded(range(20, 26), range(6))


def test_a_thread_for_copies_is_tried_again_when_it_is_needed_next(shm: Path) -> None:
    with rig(shm) as here:
        with no_threads_for("headwater copies"):
            here.saved(range(2))
        queue = here.staging.engine._queues[Direction.OUT]
        found = [queue._thread]
        here.saved(range(2), chain=2)
        found.append(queue._thread)
        assert [one is not None and one.is_alive() for one in found] == [False, True]


def test_a_wire_without_a_helper_copies_alone() -> None:
    layout = opaque_layout((64, 100, 33), 4)
    with create_kv_cache(layout, 8) as cache:
        wire = TorchWire(cache, layout, Direction.IN, shared_bytes=0)
        wire._shares = True  # also where there is one core
        with CopyEngine(cache, wires=lambda *_: wire) as engine, no_threads_for("headwater copies too") as wanted:
            frames = frames_of(layout, 4, seed=1)
            transfer = engine.scatter(frames, range(4), expected=digests_of(layout, frames))
            assert transfer.wait(WAIT_S)
            assert transfer.num_good == 4
        assert wanted
        assert [held(cache, slot) for slot in range(4)] == [payload(layout, frame) for frame in frames]
