"""The copy engine: every byte and digest right, one end for each transfer, and nobody waits for who does not come."""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from copy_kit import WAIT_S, Count, Hold, OddWire, at_call, interrupt, raise_trouble
from headwater.core.errors import CopyDamaged, InvalidCopy, ResourceClosed
from headwater.integrations.vllm.registered import RegisteredCache
from headwater.layout.digest import plane_digests
from headwater.layout.frame import PageMeta, frame_bytes, header_bytes, seal
from headwater.layout.spec import KVLayout, opaque_layout
from headwater.testing.layouts import randomise
from headwater.testing.samples import sample_layouts
from headwater.transfer.device import copy_engine
from headwater.transfer.device.arena import DeviceCache, HostCache, create_host_cache, create_kv_cache
from headwater.transfer.device.copy_engine import CopyEngine
from headwater.transfer.device.cuda_wire import RunWire, StagedWire, one_run
from headwater.transfer.device.transfer import Transfer
from headwater.transfer.device.wire import Digests, Direction, Wire
from headwater.transfer.executor.staging import TorchStaging
from worker_kit import wait_until

LAYOUTS = sample_layouts()
TINY = opaque_layout((24, 7, 40), 4)
PIECES = {"one": 32 << 20, "many": 1}  # place bytes: a transfer is one piece; each plane of each block is one
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]
KINDS = [("cpu", False), *(pytest.param("cuda", runs, marks=needs_cuda) for runs in (False, True))]
FILL = 0xA5


@dataclass
class Rig:
    """An engine on a small device with wires under a test's control."""

    cache: DeviceCache
    layout: KVLayout
    engine: CopyEngine
    wires: dict[Direction, OddWire]
    original: list[torch.Tensor] = field(default_factory=list)

    @property
    def out(self) -> OddWire:
        return self.wires[Direction.OUT]

    @property
    def into(self) -> OddWire:
        return self.wires[Direction.IN]

    def frames(self, number: int) -> list[memoryview]:
        return [memoryview(bytearray([FILL]) * frame_bytes(self.layout.plane_bytes)) for _ in range(number)]

    def full_frames(self, number: int, seed: int = 7) -> list[memoryview]:
        rng = random.Random(seed)
        return [memoryview(bytearray(rng.randbytes(frame_bytes(self.layout.plane_bytes)))) for _ in range(number)]

    def digests(self, frames: Sequence[memoryview]) -> Digests:
        start = header_bytes(len(self.layout.planes))
        found = [plane_digests(frame[start:], self.layout.plane_bytes) for frame in frames]
        return np.array(found, np.uint64).reshape(len(frames), len(self.layout.planes))

    def block(self, slot: int) -> bytes:
        return torch.cat([row[slot] for row in self.cache.rows]).numpy().tobytes()

    def payload(self, frame: memoryview) -> bytes:
        return bytes(frame[header_bytes(len(self.layout.planes)) :])

    def untouched(self, slots: Sequence[int]) -> bool:
        pairs = zip(self.cache.rows, self.original, strict=True)
        return all(torch.equal(row[list(slots)], old[list(slots)]) for row, old in pairs)


@contextmanager
def rig(
    layout: KVLayout = TINY, *, num_blocks: int = 32, place_bytes: int = 1, num_places: int = 2, digests: bool = True
) -> Iterator[Rig]:
    with create_kv_cache(layout, num_blocks) as cache:
        randomise(cache, seed=5)
        wires: dict[Direction, OddWire] = {}

        def make(cache: DeviceCache, layout: KVLayout, direction: Direction) -> Wire:
            wires[direction] = OddWire(
                cache, layout, direction, num_places=num_places, place_bytes=place_bytes, digests=digests
            )
            return wires[direction]

        with CopyEngine(cache, digests=digests, wires=make) as engine:
            yield Rig(cache, layout, engine, wires, [row.clone() for row in cache.rows])
        assert all(wire.closed for wire in wires.values())


# --- bytes ------------------------------------------------------------------------------------------------------------


def check_both_ways(layout: KVLayout, *, count: int, place_bytes: int, num_places: int = 2, seed: int = 0) -> None:
    """Blocks out into frames and in again elsewhere; nothing else changes, and all digests are right."""
    rng = random.Random(seed)
    num_blocks = count + 3
    source, target = rng.sample(range(num_blocks), count), rng.sample(range(num_blocks), count)
    with rig(layout, num_blocks=num_blocks, place_bytes=place_bytes, num_places=num_places) as here:
        frames, start = here.frames(count), header_bytes(len(layout.planes))
        transfer = here.engine.gather(source, frames)
        assert transfer.wait(WAIT_S)
        assert transfer.complete
        assert [here.payload(frame) for frame in frames] == [here.block(slot) for slot in source]
        assert all(bytes(frame[:start]) == bytes([FILL]) * start for frame in frames)
        found = here.digests(frames)
        assert transfer.digests is None if not count else np.array_equal(transfer.digests, found)  # type: ignore[arg-type]
        assert here.untouched(range(num_blocks))

        randomise(here.cache, seed=6)
        here.original = [row.clone() for row in here.cache.rows]
        said: list[int] = []
        transfer = here.engine.scatter(frames, target, expected=found, on_planes=said.append)
        assert transfer.wait_planes(len(layout.planes), WAIT_S)
        assert transfer.wait(WAIT_S)
        assert (transfer.complete, transfer.num_good, transfer.num_planes_ready) == (True, count, len(layout.planes))
        assert said == sorted(set(said))
        assert not count or said[-1] == len(layout.planes)
        assert [here.block(slot) for slot in target] == [here.payload(frame) for frame in frames]
        assert here.untouched(sorted(set(range(num_blocks)) - set(target)))
        starts = [piece.planes.start for piece in here.into.launched]
        assert starts == sorted(starts), "groups of layers out of order"
        ends = {piece.planes: piece.planes.stop for piece in here.into.launched}
        assert said == sorted(ends.values())
        for wire in here.wires.values():
            moved = sorted(
                (int(slot), plane) for piece in wire.launched for slot in piece.slots for plane in piece.planes
            )
            ids = source if wire is here.out else target
            assert moved == sorted((slot, plane) for slot in ids for plane in range(len(layout.planes)))


@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_bit_for_bit(name: str, pieces: str) -> None:
    check_both_ways(LAYOUTS[name], count=5, place_bytes=PIECES[pieces])


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=7),
    count=st.integers(0, 9),
    place_bytes=st.integers(1, 30_000),
    num_places=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_any_sizes_bit_for_bit(sizes: list[int], count: int, place_bytes: int, num_places: int, seed: int) -> None:
    layout = opaque_layout(tuple(sizes), 4)
    check_both_ways(layout, count=count, place_bytes=place_bytes, num_places=num_places, seed=seed)


@given(num=st.integers(0, 5000), rows=st.integers(1, 1024), up=st.booleans(), down=st.booleans())
def test_cuts_are_without_gap_and_overlap(num: int, rows: int, up: bool, down: bool) -> None:
    cuts = copy_engine._cut_rows(num, rows, ramp_up=up, ramp_down=down)
    assert [start for start, _ in cuts] == [0, *(end for _, end in cuts)][: len(cuts)]
    assert (cuts[-1][1] if cuts else 0) == num
    assert all(0 < end - start <= rows for start, end in cuts)


def test_groups_are_whole_layers_where_a_place_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = LAYOUTS["gqa-fp8-scales"]
    monkeypatch.setattr(copy_engine, "GROUP_BYTES", 1)
    monkeypatch.setattr(copy_engine, "_GROUP_PLACES", 0)
    with rig(layout, place_bytes=2 * layout.page_bytes) as here:
        frames = here.full_frames(4)
        assert here.engine.scatter(frames, range(4)).wait(WAIT_S)
        groups = {piece.planes for piece in here.into.launched}
        layers = [{layout.planes[i].layer for i in group} for group in sorted(groups, key=lambda group: group.start)]
        assert layers == [{0}, {1}, {2}]
        assert here.engine.gather(range(4), frames).wait(WAIT_S)
        assert {piece.planes for piece in here.out.launched} == {range(len(layout.planes))}


def test_some_planes_of_a_cache() -> None:
    layout = LAYOUTS["gqa-fp8-scales"]
    part = KVLayout(layout.block_tokens, layout.planes[1::2])
    with create_kv_cache(layout, 6) as cache, CopyEngine(cache, layout=part) as engine:
        randomise(cache, seed=1)
        before = [row.clone() for row in cache.rows]
        frame = memoryview(bytearray(frame_bytes(part.plane_bytes)))
        transfer = engine.gather([4], [frame])
        assert transfer.wait(WAIT_S)
        start = header_bytes(len(part.planes))
        assert bytes(frame[start:]) == torch.cat([row[4] for row in cache.rows[1::2]]).numpy().tobytes()
        assert engine.scatter([frame], [2], expected=transfer.digests).wait_planes(len(part.planes), WAIT_S)
        for number, (row, old) in enumerate(zip(cache.rows, before, strict=True)):
            assert torch.equal(row[2], old[4 if number % 2 else 2])


def test_what_cannot_be_copied_is_refused_before_a_byte_moves() -> None:
    with rig() as here:
        frames = here.frames(2)
        short, read_only = frames[1][:-1], frames[1].toreadonly()
        bad: list[tuple[list[int], list[memoryview]]] = [
            *(([0], frames), ([0, 32], frames), ([-1, 0], frames), ([0, 1], [frames[0], short])),
        ]
        for slots, buffers in bad:
            with pytest.raises(InvalidCopy):
                here.engine.gather(slots, buffers)
            with pytest.raises(InvalidCopy):
                here.engine.scatter(buffers, slots)
        with pytest.raises(InvalidCopy):
            here.engine.gather([0, 1], [frames[0], read_only])
        with pytest.raises(InvalidCopy, match="more than once"):
            here.engine.scatter(frames, [3, 3])
        with pytest.raises(InvalidCopy, match="digests"):
            here.engine.scatter(frames, [3, 4], expected=np.zeros((2, 2), np.uint64))
        assert not here.out.launched
        assert not here.into.launched
        assert here.untouched(range(32))


def test_nothing_at_all_is_over_at_once() -> None:
    with rig() as here:
        over = Count()
        transfer = here.engine.gather([], [], on_over=over)
        assert transfer.wait(0)
        assert (transfer.complete, over.number) == (True, 1)
        transfer = here.engine.scatter([], [], expected=np.zeros((0, 3), np.uint64))
        assert transfer.wait_planes(3, 0)
        assert transfer.num_good == 0


# --- what is wrong is found -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place_bytes", PIECES.values(), ids=PIECES.keys())
@pytest.mark.parametrize("plane", range(3))
@pytest.mark.parametrize("bad", [0, 2, 5])
def test_a_wrong_block_is_found(bad: int, plane: int, place_bytes: int) -> None:
    with rig(place_bytes=place_bytes) as here:
        frames = here.full_frames(6)
        expected = here.digests(frames)
        start = header_bytes(3) + TINY.offsets[plane]
        frames[bad][start + TINY.plane_bytes[plane] - 1] ^= 1
        frames[5][start] ^= 2  # a later one, too
        said: list[int] = []
        transfer = here.engine.scatter(frames, range(6), expected=expected, on_planes=said.append)
        assert transfer.wait_planes(plane, WAIT_S) == (place_bytes == 1 or plane == 0)  # what is before it is right
        assert not transfer.wait_planes(plane + 1, WAIT_S)
        assert transfer.wait(WAIT_S)
        assert (transfer.complete, transfer.num_good) == (True, bad)
        assert transfer.num_planes_ready == (plane if place_bytes == 1 else 0)
        assert said == ([*range(1, plane + 1)] if place_bytes == 1 else [])


def test_planes_are_ready_when_every_block_has_them() -> None:
    with rig() as here, ThreadPoolExecutor(1) as pool:
        hold = Hold(4)  # the second group's second block
        here.into.on_finish = hold
        frames = here.full_frames(3)
        transfer = here.engine.scatter(frames, range(3), expected=here.digests(frames))
        driving = pool.submit(transfer.wait, WAIT_S)
        assert transfer.wait_planes(1, WAIT_S)
        assert hold.arrived.wait(WAIT_S)
        assert not transfer.wait_planes(2, 0)
        assert (transfer.num_planes_ready, transfer.num_good, transfer.over) == (1, 0, False)
        assert not transfer.wait(0)
        hold.go_on.set()
        assert transfer.wait_planes(3, WAIT_S)
        assert driving.result(WAIT_S)


def test_who_waits_for_planes_hears_that_they_will_not_come() -> None:
    with rig() as here, ThreadPoolExecutor(1) as pool:
        hold = Hold(2)
        here.into.on_finish = hold
        transfer = here.engine.scatter(here.full_frames(4), range(4))
        waiting = pool.submit(transfer.wait_planes, 3, WAIT_S)
        assert hold.arrived.wait(WAIT_S)
        transfer.cancel()
        hold.go_on.set()
        assert waiting.result(WAIT_S) is False
        assert (transfer.over, transfer.complete, transfer.num_good) == (True, False, 0)


def test_a_wire_that_lies_about_one_digest() -> None:
    with rig() as here:
        here.into.judge = lambda piece, found: found if found is None or 9 not in piece.slots else found ^ np.uint64(1)
        frames = here.full_frames(4)
        transfer = here.engine.scatter(frames, [3, 9, 4, 5], expected=here.digests(frames))
        assert transfer.wait(WAIT_S)
        assert (transfer.num_good, transfer.num_planes_ready) == (1, 0)


def test_without_digests_nothing_is_proven() -> None:
    with rig(digests=False) as here:
        frames = here.full_frames(3)
        transfer = here.engine.scatter(frames, range(3), expected=here.digests(frames))
        assert transfer.wait(WAIT_S)
        assert (transfer.num_good, transfer.num_planes_ready) == (0, 0)
        transfer = here.engine.scatter(frames, range(3))  # nobody asked
        assert transfer.wait(WAIT_S)
        assert (transfer.num_good, transfer.num_planes_ready) == (3, 3)
        assert [here.block(slot) for slot in range(3)] == [here.payload(frame) for frame in frames]
        transfer = here.engine.gather(range(3), frames)
        assert transfer.wait(WAIT_S)
        assert transfer.digests is None


# --- trouble ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("queued", [False, True], ids=["inline", "queued"])
@pytest.mark.parametrize("call", ["launch", "finish"])
@pytest.mark.parametrize("at", [0, 1, 5, 8])
def test_a_wire_that_raises_fails_one_transfer(at: int, call: str, queued: bool) -> None:
    with rig(num_places=16 if not queued else 2) as here:
        setattr(here.out, f"on_{call}", at_call(at, raise_trouble))
        over, after = Count(), Count()
        frames, others = here.frames(3), here.frames(3)
        transfer = here.engine.gather(range(3), frames, on_over=over if queued else None)
        other = here.engine.gather(range(10, 13), others, on_over=after if queued else None)
        assert transfer.wait(WAIT_S)
        assert isinstance(transfer.error, RuntimeError)
        assert (transfer.complete, transfer.num_good, over.number) == (False, 0, int(queued))
        seen = [bytes(frame) for frame in frames]
        assert other.wait(WAIT_S)
        assert (other.complete, other.error) == (True, None)
        assert [here.payload(frame) for frame in others] == [here.block(slot) for slot in range(10, 13)]
        assert [bytes(frame) for frame in frames] == seen
        assert here.engine.gather([7], here.frames(1)).wait(WAIT_S)


@pytest.mark.parametrize("call", ["launch", "finish"])
def test_planes_stay_as_far_as_they_were_when_a_wire_raises(call: str) -> None:
    with rig() as here:
        setattr(here.into, f"on_{call}", at_call(7, raise_trouble))  # in the third group
        frames = here.full_frames(3)
        transfer = here.engine.scatter(frames, range(3), expected=here.digests(frames))
        assert not transfer.wait_planes(3, WAIT_S)
        assert (transfer.over, transfer.num_planes_ready, transfer.num_good) == (True, 2, 0)


def test_who_hears_of_the_end_may_raise(caplog: pytest.LogCaptureFixture) -> None:
    def raise_at(_: int) -> None:
        raise_trouble()

    with rig() as here:
        transfer = here.engine.gather(range(3), here.frames(3), on_over=raise_trouble)
        assert transfer.wait(WAIT_S)
        assert transfer.complete
        transfer = here.engine.scatter(here.full_frames(3), range(3), on_planes=raise_at)
        assert transfer.wait(WAIT_S)
        assert transfer.complete
        over = Count()
        assert here.engine.gather(range(3), here.frames(3), on_over=over).wait(WAIT_S)
        assert over.number == 1


@pytest.mark.fault("D2")
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("call", ["launch", "finish"])
@pytest.mark.parametrize("at", [0, 1, 5, 8])
def test_what_interrupts_who_waits_is_theirs(at: int, call: str, kind: type[BaseException]) -> None:
    """And nothing hangs afterwards, and no block counts that was not copied."""
    with rig(num_places=16) as here:  # all of it is launched by who submits, and finished by who waits
        setattr(here.into, f"on_{call}", at_call(at, interrupt(kind)))
        frames, others = here.full_frames(3), here.full_frames(3, seed=8)
        transfers: list[Transfer] = []

        def submit_and_wait() -> None:
            transfers.append(here.engine.scatter(frames, range(3)))
            transfers[0].wait(WAIT_S)

        with pytest.raises(kind):
            submit_and_wait()
        other = here.engine.scatter(others, range(10, 13), expected=here.digests(others))
        assert other.wait(WAIT_S)
        assert (other.num_good, other.error) == (3, None)
        assert [here.block(slot) for slot in range(10, 13)] == [here.payload(frame) for frame in others]
        for transfer in transfers:
            assert transfer.wait(WAIT_S)
            there = [here.block(slot) for slot in range(3)] == [here.payload(frame) for frame in frames]
            assert transfer.num_good in (0, 3 if there else 0)
            assert (transfer.error is None) == (transfer.num_good == 3)


@pytest.mark.fault("D2")
def test_a_copy_that_was_interrupted_does_not_count() -> None:
    """The interrupt comes in the middle of the bytes of a piece: whoever looks at it later hears so."""
    with rig(num_places=16) as here:
        copy, act = here.into._copy, interrupt(KeyboardInterrupt)
        here.into._copy = lambda piece: (act(), copy(piece))[1]  # type: ignore[method-assign]
        transfer = here.engine.scatter(here.full_frames(3), range(3))
        with pytest.raises(KeyboardInterrupt):
            transfer.wait(WAIT_S)
        assert transfer.wait(WAIT_S)
        assert isinstance(transfer.error, CopyDamaged)
        assert transfer.num_good == 0
        assert here.engine.scatter(here.full_frames(3), range(3)).wait(WAIT_S)


@pytest.mark.fault("D2")
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_what_a_listener_raises_to_end_the_program_passes(kind: type[BaseException]) -> None:
    with rig(num_places=16) as here:  # all of it is launched by who submits, and finished by who waits
        act = interrupt(kind)
        frames = here.full_frames(3)
        transfer = here.engine.scatter(frames, range(3), on_planes=lambda _: act())
        with pytest.raises(kind):
            transfer.wait(WAIT_S)
        assert transfer.wait(WAIT_S)
        assert transfer.num_good == 3
        assert [here.block(slot) for slot in range(3)] == [here.payload(frame) for frame in frames]
        with pytest.raises(kind):
            here.engine.scatter([], [], on_over=interrupt(kind))


def test_who_sees_the_end_knows_that_it_was_told() -> None:
    with rig() as here, ThreadPoolExecutor(1) as pool:
        telling, go_on = threading.Event(), threading.Event()

        def on_over() -> None:
            telling.set()
            assert go_on.wait(WAIT_S)

        transfer = here.engine.gather(range(3), here.frames(3), on_over=on_over)
        waiting = pool.submit(transfer.wait, WAIT_S)
        assert telling.wait(WAIT_S)
        assert not transfer.wait(0)
        assert not waiting.done()
        go_on.set()
        assert waiting.result(WAIT_S)


# --- cancelling -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["launch", "finish"])
@pytest.mark.parametrize("at", range(10))
def test_cancelled_at_any_piece_it_ends_once(at: int, call: str) -> None:
    with rig() as here:
        begun, over = threading.Event(), Count()
        found: list[Transfer] = []

        def cancel() -> None:
            assert begun.wait(WAIT_S)
            found[0].cancel()

        setattr(here.out, f"on_{call}", at_call(at, cancel))
        frames = here.frames(3)
        found.append(here.engine.gather(range(3), frames, on_over=over))
        begun.set()
        transfer = found[0]
        assert transfer.wait(WAIT_S)
        seen, num_finished = [bytes(frame) for frame in frames], len(here.out.finished)
        assert num_finished == len(here.out.launched)
        assert at <= num_finished <= min(9, at + 1 + here.out.num_places)
        assert transfer.complete == (num_finished == 9)
        transfer.cancel()
        assert here.engine.gather(range(3), here.frames(3)).wait(WAIT_S)  # whatever was under way is through
        assert [bytes(frame) for frame in frames] == seen
        assert (over.number, transfer.over, transfer.error) == (1, True, None)


def test_cancelled_before_it_begins_it_copies_nothing() -> None:
    with rig() as here:
        hold = Hold()
        here.out.on_finish = hold
        first_over, over = Count(), Count()
        first = here.engine.gather(range(3), here.frames(3), on_over=first_over)
        assert hold.arrived.wait(WAIT_S)
        frames = here.frames(3)
        transfer = here.engine.gather(range(3, 6), frames, on_over=over)
        last = here.engine.gather(range(6, 9), here.frames(3))
        transfer.cancel()
        hold.go_on.set()
        for one in (transfer, first, last):
            assert one.wait(WAIT_S)
        assert (transfer.complete, first.complete, last.complete) == (False, True, True)
        assert (over.number, first_over.number) == (1, 1)
        assert not any(slot in piece.slots for piece in here.out.launched for slot in range(3, 6))
        assert all(bytes(frame) == bytes([FILL]) * len(frame) for frame in frames)


def test_cancelling_what_is_over_changes_nothing() -> None:
    with rig() as here:
        frames = here.full_frames(3)
        transfer = here.engine.scatter(frames, range(3), expected=here.digests(frames))
        assert transfer.wait(WAIT_S)
        transfer.cancel()
        assert (transfer.complete, transfer.num_good, transfer.num_planes_ready) == (True, 3, 3)


# --- nobody comes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [Direction.OUT, Direction.IN])
def test_small_transfers_that_nobody_waits_for_hold_up_nobody(way: Direction) -> None:
    layout = opaque_layout((16,), 4)
    with rig(layout) as here:

        def begin(slots: range, on_over: Callable[[], None] | None = None) -> Transfer:
            if way is Direction.OUT:
                return here.engine.gather(slots, here.frames(len(slots)), on_over=on_over)
            return here.engine.scatter(here.full_frames(len(slots)), slots)

        left = [begin(range(i, i + 1)) for i in range(2)]  # all places
        assert not any(one.over for one in left)
        large = begin(range(2, 12), Count() if way is Direction.OUT else None)
        assert large.wait(WAIT_S)
        assert large.complete
        small = begin(range(12, 13))
        for one in (small, *reversed(left)):
            assert one.wait(WAIT_S)
            assert one.complete


def test_a_small_transfer_is_finished_by_who_waits_for_it() -> None:
    with rig(opaque_layout((16,), 4)) as here:
        transfer = here.engine.gather([1], here.frames(1))
        assert here.engine._queues[Direction.OUT]._thread is None
        assert transfer.wait(WAIT_S)
        assert here.engine._queues[Direction.OUT]._thread is None


def test_the_thread_takes_over_also_where_all_that_is_queued_was_cancelled() -> None:
    with rig(opaque_layout((16,), 4), num_places=3) as here, ThreadPoolExecutor(2) as pool:
        hold = Hold()
        here.out.on_finish = hold
        small = [here.engine.gather([i], here.frames(1)) for i in range(2)]
        over = Count()
        large = here.engine.gather(range(2, 12), here.frames(10), on_over=over)
        assert hold.arrived.wait(WAIT_S)  # the thread, at the first small one: no place is free
        large.cancel()
        waiting = [pool.submit(one.wait, WAIT_S) for one in small]
        hold.go_on.set()
        assert all(one.result(WAIT_S) for one in waiting)
        assert large.wait(WAIT_S)
        assert (over.number, large.complete) == (1, False)
        again = here.engine.gather([20], here.frames(1))
        assert again.wait(WAIT_S)


def test_a_place_that_another_took_meanwhile_is_waited_for() -> None:
    """One launches a transfer that takes all places; what was queued meanwhile must not count on them."""
    with rig(opaque_layout((16,), 4)) as here, ThreadPoolExecutor(1) as pool:
        hold = Hold()
        here.out.on_launch = hold
        inline = pool.submit(here.engine.gather, [0, 1], here.frames(2))
        assert hold.arrived.wait(WAIT_S)
        over = Count()
        frames = here.frames(4)
        queued = here.engine.gather(range(2, 6), frames, on_over=over)  # the thread may look before the places are gone
        queue = here.engine._queues[Direction.OUT]
        assert queue._thread is not None
        queue._thread.join(0.05)  # it must still be there; and has had the time to look
        hold.go_on.set()
        assert queued.wait(5.0), "it was lost"
        assert queued.complete
        assert [here.payload(frame) for frame in frames] == [here.block(slot) for slot in range(2, 6)]
        assert inline.result(WAIT_S).wait(WAIT_S)


def test_two_wait_and_the_first_is_through() -> None:
    """Who finds no place free waits for who finishes one; then the place is free, and nobody else comes."""
    with rig(opaque_layout((16,), 4), num_places=1) as here, ThreadPoolExecutor(2) as pool:
        hold = Hold()
        here.out.on_finish = hold
        first, second = here.engine.gather([0], here.frames(1)), here.engine.gather([1, 2], here.frames(2))
        waiting = pool.submit(first.wait, WAIT_S)
        assert hold.arrived.wait(WAIT_S)
        also = pool.submit(second.wait, 10.0)
        with suppress(TimeoutError):
            also.result(0.05)  # time to find no place free
        hold.go_on.set()
        assert waiting.result(WAIT_S)
        assert also.result(WAIT_S), "nobody drives it"


def test_close_while_somebody_else_drives_what_must_end_by_itself() -> None:
    with rig(opaque_layout((16,), 4), num_places=3) as here, ThreadPoolExecutor(2) as pool:
        overs = [Count() for _ in range(2)]
        here.engine.gather([5], here.frames(1), on_over=overs[0])
        assert overs[0].called.wait(WAIT_S)
        queue = here.engine._queues[Direction.OUT]
        asleep = queue._work._waiters  # type: ignore[attr-defined]
        wait_until(lambda: bool(asleep))  # so there is a thread, and it has nothing to do
        hold = Hold()
        here.out.on_finish = hold
        small = here.engine.gather([0], here.frames(1))
        waiting = pool.submit(small.wait, WAIT_S)
        assert hold.arrived.wait(WAIT_S)
        told = here.engine.gather([1], here.frames(1), on_over=overs[1])
        also = pool.submit(told.wait, WAIT_S)
        wait_until(lambda: len(here.out.launched) == 3 and not queue._queue)
        assert asleep
        closing = threading.Thread(target=here.engine.close)
        closing.start()
        wait_until(lambda: queue._closed)
        closing.join(0.05)  # the thread may look, and finds others driving
        hold.go_on.set()
        assert waiting.result(WAIT_S)
        assert also.result(WAIT_S)
        closing.join(10.0)
        left = closing.is_alive()
        with queue._lock:  # so that a thread that was forgotten does not hang the test
            queue._work.notify_all()
        closing.join(WAIT_S)
        assert not left, "the thread was forgotten"
        assert [over.number for over in overs] == [1, 1]


def test_it_goes_on_when_who_waited_leaves() -> None:
    with rig(opaque_layout((16,), 4)) as here:
        transfer = here.engine.gather([1], here.frames(1))
        assert not transfer.wait(0)
        wait_until(lambda: transfer.over)
        assert transfer.complete


def test_who_waits_finishes_what_others_left() -> None:
    with rig(opaque_layout((16,), 4), num_places=4) as here:
        transfers = [here.engine.gather([i], here.frames(1)) for i in range(4)]
        assert transfers[2].wait(WAIT_S)
        assert [one.over for one in transfers] == [True, True, True, False]
        assert transfers[3].wait(WAIT_S)


# --- the end ----------------------------------------------------------------------------------------------------------


def test_close_ends_what_runs_what_is_queued_and_what_nobody_waits_for() -> None:
    layout = opaque_layout((16,), 4)
    with rig(layout, num_places=3) as here, ThreadPoolExecutor(2) as pool:
        left = here.engine.gather([30], here.frames(1))
        hold = Hold()
        here.out.on_finish = hold
        overs = [Count() for _ in range(3)]
        frames = [here.frames(5) for _ in overs]
        slots = [range(5 * i, 5 * i + 5) for i in range(3)]
        running = [here.engine.gather(slots[i], frames[i], on_over=overs[i]) for i in range(3)]
        loads = here.engine.scatter(here.full_frames(1), [31])
        assert hold.arrived.wait(WAIT_S)
        closing = [pool.submit(here.engine.close) for _ in range(2)]
        closed = here.engine._queues[Direction.OUT]
        with closed._lock:  # until it says so, transfers are taken
            pass
        hold.go_on.set()
        for one in closing:
            one.result(WAIT_S)
        here.engine.close()
        for transfer in (left, *running, loads):
            assert transfer.over
        assert (left.complete, loads.complete) == (True, True)
        assert [over.number for over in overs] == [1, 1, 1]
        for i, transfer in enumerate(running):
            for frame, slot in zip(frames[i], slots[i], strict=True):
                assert here.payload(frame) in (here.block(slot), bytes([FILL]) * 16)
            assert transfer.complete == all(
                here.payload(frame) == here.block(slot) for frame, slot in zip(frames[i], slots[i], strict=True)
            )
        assert len(here.out.launched) == len(here.out.finished)
        over = Count()
        with pytest.raises(ResourceClosed):
            here.engine.gather([1], here.frames(1), on_over=over)
        with pytest.raises(ResourceClosed):
            here.engine.scatter(here.frames(1), [1])
        assert over.number == 0


def test_who_waits_while_it_is_closed_is_let_go() -> None:
    with rig() as here, ThreadPoolExecutor(2) as pool:
        hold = Hold(1)
        here.into.on_finish = hold
        transfers = [here.engine.scatter(here.full_frames(4), range(4 * i, 4 * i + 4)) for i in range(2)]
        waiting = [pool.submit(one.wait_planes, 3, WAIT_S) for one in transfers]
        assert hold.arrived.wait(WAIT_S)
        closing = threading.Thread(target=here.engine.close)
        closing.start()
        hold.go_on.set()
        found = [one.result(WAIT_S) for one in waiting]
        closing.join(WAIT_S)
        assert found == [one.complete for one in transfers]
        assert here.untouched(range(8, 32))


def test_close_leaves_a_copy_that_does_not_return_behind() -> None:
    with rig() as here:
        here.into.on_finish = hold = Hold(0)
        transfer = here.engine.scatter(here.full_frames(4), range(4))
        assert not transfer.wait(0.0)
        assert hold.arrived.wait(WAIT_S), "the thread has it, since nobody waits"
        assert not here.engine.close(0.1)
        assert not here.into.closed, "it may still be written through"
        assert here.out.closed
        hold.go_on.set()
        assert here.engine.close()
        assert transfer.over


def test_close_leaves_a_copy_behind_that_nobody_waits_for() -> None:
    """It is on the wire, and no thread is at it: who closes must not be the one that hangs."""
    with rig() as here:
        here.into.on_finish = hold = Hold(0)
        here.engine.scatter(here.full_frames(1), [3])
        assert not here.engine.close(0.1)
        assert hold.arrived.wait(WAIT_S)
        hold.go_on.set()
        assert here.engine.close()


def test_memory_that_a_hanging_copy_may_touch_stays_registered(caplog: pytest.LogCaptureFixture) -> None:
    released: list[int] = []

    class Pinned:
        alive = True

        def __init__(self) -> None:
            self.kept = False

        def keep(self) -> None:
            self.kept = True

        def release(self) -> None:
            if not self.kept:
                released.append(1)

    size = frame_bytes(TINY.plane_bytes)
    with create_kv_cache(TINY, 16) as cache, create_host_cache(size, 8) as pages:
        pages._held, slab = Pinned(), Pinned()  # type: ignore[assignment]  # as on a GPU
        staging = TorchStaging(cache, pages)
        staging._pins[1] = slab  # type: ignore[assignment]
        with patch.object(staging.engine, "close", return_value=False):
            staging.close()
        assert "does not return" in caplog.text
        assert slab.kept
        pages.close()
        assert not released
        staging.engine.close()


def test_staging_does_not_take_a_copy_for_done_that_was_broken_off() -> None:
    """Whoever closes the engine under a job ends its copies: then the bytes are not there."""
    size = frame_bytes(TINY.plane_bytes)
    with create_kv_cache(TINY, 16) as cache, create_host_cache(size, 8) as pages:
        randomise(cache, seed=3)
        seal_all(pages, TINY)
        with TorchStaging(cache, pages) as staging, ThreadPoolExecutor(2) as pool:
            staging.engine.close()
            wires: dict[Direction, OddWire] = {}

            def make(cache: DeviceCache, layout: KVLayout, direction: Direction) -> Wire:
                return wires.setdefault(direction, OddWire(cache, layout, direction, place_bytes=1))

            staging.engine = CopyEngine(cache, wires=make)
            holds = {direction: Hold(3) for direction in Direction}
            for direction, hold in holds.items():
                wires[direction].on_finish = hold
            jobs: list[Future[object]] = [
                pool.submit(staging.gather, range(8), range(8)),
                pool.submit(staging.scatter, range(8), range(8)),
            ]
            for hold in holds.values():
                assert hold.arrived.wait(WAIT_S)
            closing = threading.Thread(target=staging.close)
            closing.start()
            queues = staging.engine._queues
            for direction in Direction:  # the second queue is closed when the first one is
                while not queues[direction]._closed:
                    holds[Direction.OUT].go_on.wait(0.001)
                holds[direction].go_on.set()
            for job in jobs:
                with pytest.raises(ResourceClosed):
                    job.result(WAIT_S)
            closing.join(WAIT_S)


def seal_all(pages: HostCache, layout: KVLayout) -> None:
    for page in range(pages.num_pages):
        meta = PageMeta(
            key=bytes([1 + page]) * 32, identity=bytes(32), parent=bytes(32), depth=0, valid_tokens=layout.block_tokens
        )
        seal(pages.page(page), meta, layout, now_ms=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["gqa-bf16", "gqa-draft", "dsa"])
def test_a_page_that_changed_since_it_was_verified_is_no_block(name: str, device: str) -> None:
    """Rule 4: whatever happens to bytes between a page and the device is seen there."""
    layout = sample_layouts()[name]
    size = frame_bytes(layout.plane_bytes)
    rng = random.Random(5)
    with create_kv_cache(layout, 8, device) as cache, create_host_cache(size, 4) as pages:
        randomise(cache, seed=3)
        with TorchStaging(cache, pages) as staging:
            staging.gather([0, 1, 2, 3], range(4))
            seal_all(pages, layout)
            staging.scatter(range(4), [4, 5, 6, 7])
            assert all(torch.equal(row[:4], row[4:8]) for row in cache.rows)
            for _ in range(20):
                page, at = rng.randrange(4), rng.randrange(header_bytes(len(layout.planes)), size)
                pages.page(page)[at] ^= 1 << rng.randrange(8)
                before = bytes(pages.page(page))
                with pytest.raises(CopyDamaged, match=f"block {page} of 4"):
                    staging.scatter(range(4), [4, 5, 6, 7])
                assert bytes(pages.page(page)) == before
                staging.gather([page], [page])
            pages.page(2)[8] ^= 1  # its header
            with pytest.raises(CopyDamaged, match="sealed"):
                staging.scatter(range(4), [4, 5, 6, 7])
            staging.scatter([], [])


# --- many -------------------------------------------------------------------------------------------------------------

NUM_THREADS, NUM_TRANSFERS, OWN_SLOTS, OWN_FRAMES = 4, 2500, 8, 6


class Client:
    """One thread's share of device and host memory, and what must be in it."""

    def __init__(self, engine: CopyEngine, cache: DeviceCache, pages: list[memoryview], number: int) -> None:
        self._engine = engine
        self._cache = cache
        self._rng = random.Random(number)
        self._slots = [number * OWN_SLOTS + i for i in range(OWN_SLOTS)]
        self._frames = pages[number * OWN_FRAMES : (number + 1) * OWN_FRAMES]
        self._start = header_bytes(len(engine.layout.planes))
        sizes = engine.layout.plane_bytes
        self._spans = [(at, at + size) for at, size in zip(engine.layout.offsets, sizes, strict=True)]
        for frame in self._frames:
            frame[self._start :] = self._rng.randbytes(len(frame) - self._start)
        self._left: list[Transfer] = []
        self.num_cancelled = 0
        self.overs: list[tuple[Count, Transfer]] = []

    def run(self, num_transfers: int) -> None:
        for _ in range(num_transfers):
            count = self._rng.randint(1, OWN_FRAMES)
            slots, frames = self._rng.sample(self._slots, count), self._rng.sample(self._frames, count)
            if self._rng.random() < 0.5:
                self._out(slots, frames)
            else:
                self._into(slots, frames)
        for transfer in self._left:
            assert transfer.wait(WAIT_S)

    def _out(self, slots: list[int], frames: list[memoryview]) -> None:
        before, blocks = self._planes(frames), self._blocks(slots)
        over = Count()
        told = self._rng.random() < 0.5
        transfer = self._engine.gather(slots, frames, on_over=over if told else None)
        if told:
            self.overs.append((over, transfer))
        self._see_through(transfer)
        after = self._planes(frames)
        self._check(transfer, before, blocks, after)
        if transfer.complete:
            digests = [plane_digests(frame[self._start :], self._engine.layout.plane_bytes) for frame in frames]
            assert transfer.digests is not None
            assert transfer.digests.tolist() == digests
        if told:
            assert over.number == 1

    def _into(self, slots: list[int], frames: list[memoryview]) -> None:
        before, sent = self._blocks(slots), self._planes(frames)
        expected = np.array(
            [plane_digests(frame[self._start :], self._engine.layout.plane_bytes) for frame in frames], np.uint64
        )
        bad = self._rng.randrange(len(slots)) if self._rng.random() < 0.2 else len(slots)
        if bad < len(slots):
            expected[bad, self._rng.randrange(expected.shape[1])] ^= np.uint64(1 << self._rng.randrange(64))
        said: list[int] = []
        transfer = self._engine.scatter(frames, slots, expected=expected, on_planes=said.append)
        self._see_through(transfer)
        self._check(transfer, before, sent, self._blocks(slots))
        assert said == sorted(set(said))
        if transfer.complete:
            assert transfer.num_good == bad
            assert (transfer.num_planes_ready == expected.shape[1]) == (bad == len(slots))
        else:
            assert transfer.num_good == 0

    def _see_through(self, transfer: Transfer) -> None:
        chance = self._rng.random()
        if chance < 0.15:
            transfer.cancel()
        elif chance < 0.3:
            transfer.wait_planes(1, 0.0001 * self._rng.random())
            transfer.cancel()
        self.num_cancelled += chance < 0.3
        if chance > 0.9 and len(self._left) < 3:  # something that nobody waits for, for now
            self._left.append(self._engine.gather([self._slots[0]], [self._spare()]))
        elif chance > 0.85 and self._left:
            assert self._left.pop(self._rng.randrange(len(self._left))).wait(WAIT_S)
        assert transfer.wait(WAIT_S)

    def _spare(self) -> memoryview:
        return memoryview(bytearray(len(self._frames[0])))

    def _check(
        self, transfer: Transfer, before: list[list[bytes]], sent: list[list[bytes]], after: list[list[bytes]]
    ) -> None:
        assert transfer.error is None
        if transfer.complete:
            assert after == sent
            return
        assert transfer.cancelled
        for old, new, found in zip(before, sent, after, strict=True):  # each plane is what it was, or what was sent
            assert all(one in pair for one, pair in zip(found, zip(old, new, strict=True), strict=True))

    def _planes(self, frames: list[memoryview]) -> list[list[bytes]]:
        return [[bytes(frame[self._start + a : self._start + b]) for a, b in self._spans] for frame in frames]

    def _blocks(self, slots: list[int]) -> list[list[bytes]]:
        return [[row[slot].cpu().numpy().tobytes() for row in self._cache.rows] for slot in slots]


def one_run_cache(num_blocks: int, device: str) -> RegisteredCache:
    """A block is one run of bytes, with some behind it that belong to nobody."""
    blocks = torch.zeros(num_blocks, 200_704, dtype=torch.uint8, device=device)[:, :198_912]
    return RegisteredCache({"all": blocks}, num_blocks=num_blocks, block_tokens=4, plane_bytes=40_000)


@pytest.mark.parametrize(("device", "runs"), KINDS)
def test_ten_thousand_transfers_from_four_threads(device: str, *, runs: bool) -> None:
    num_blocks = NUM_THREADS * OWN_SLOTS
    if runs:
        cache: DeviceCache = one_run_cache(num_blocks, device)
    else:
        sizes = (24, 7, 40) if device == "cpu" else (100_000, 33_333, 64, 7, 65_536)
        cache = create_kv_cache(opaque_layout(sizes, 4), num_blocks, device)

    def small(cache: DeviceCache, layout: KVLayout, direction: Direction) -> Wire:
        if device == "cuda":
            return (RunWire if runs else StagedWire)(cache, layout, direction, num_places=3, place_bytes=300_000)
        return OddWire(cache, layout, direction, num_places=3, place_bytes=100)

    with (
        cache,
        create_host_cache(frame_bytes(cache.layout.plane_bytes), NUM_THREADS * OWN_FRAMES) as host,
        CopyEngine(cache, wires=small) as engine,
        ThreadPoolExecutor(NUM_THREADS) as pool,
    ):
        randomise(cache, seed=9)
        pages = [host.page(i) for i in range(host.num_pages)]
        clients = [Client(engine, cache, pages, i) for i in range(NUM_THREADS)]
        for done in [pool.submit(client.run, NUM_TRANSFERS) for client in clients]:
            done.result(4 * WAIT_S)
        engine.close()
        assert all(client.num_cancelled > NUM_TRANSFERS // 10 for client in clients)
        assert all(count.number == 1 and one.over for client in clients for count, one in client.overs)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("headwater copies")]


def test_which_blocks_are_one_run() -> None:
    cache = one_run_cache(3, "cpu")
    assert len(cache.rows) == 6
    begin = cache.rows[0].data_ptr()
    assert one_run(cache, cache.layout) == (begin, 200_704)
    with create_kv_cache(TINY, 3) as apart:
        assert one_run(apart, apart.layout) is None
    first = KVLayout(4, cache.layout.planes[:2])
    assert one_run(cache, first) == (begin, 200_704)
    without_first = KVLayout(4, cache.layout.planes[1:])
    assert one_run(cache, without_first) == (begin + cache.layout.plane_bytes[0], 200_704)
    with_a_gap = KVLayout(4, (cache.layout.planes[0], *cache.layout.planes[2:]))
    assert one_run(cache, with_a_gap) is None
