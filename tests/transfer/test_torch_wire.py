"""The wire of a CPU with its helper: every piece copied once, by whoever, and nothing left behind."""

import threading
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.layout.digest import plane_digest
from headwater.layout.frame import frame_bytes, header_bytes
from headwater.layout.spec import KVLayout, opaque_layout
from headwater.transfer.device.arena import DeviceCache, create_kv_cache
from headwater.transfer.device.copy_engine import CopyEngine
from headwater.transfer.device.torch_wire import TorchWire
from headwater.transfer.device.wire import Digests, Direction, WirePiece

WAIT_S = 60.0


def frames_of(layout: KVLayout, number: int, seed: int) -> list[memoryview]:
    source = np.random.default_rng(seed)
    return [
        memoryview(bytearray(source.integers(0, 256, frame_bytes(layout.plane_bytes), np.uint8).tobytes()))
        for _ in range(number)
    ]


def digests_of(layout: KVLayout, frames: Sequence[memoryview]) -> Digests:
    found = []
    for frame in frames:
        start = header_bytes(len(layout.planes))
        ends = np.cumsum(layout.plane_bytes) + start
        found.append(
            [plane_digest(frame[end - size : end]) for end, size in zip(ends, layout.plane_bytes, strict=True)]
        )
    return np.array(found, np.uint64)


def held(cache: DeviceCache, slot: int) -> bytes:
    return b"".join(row[slot].numpy().tobytes() for row in cache.rows)


def payload(layout: KVLayout, frame: memoryview) -> bytes:
    return bytes(frame[header_bytes(len(layout.planes)) :])


class Both(TorchWire):
    """Holds whoever copies the first piece until another thread has begun one: so both are at it."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.who: dict[str, int] = {}
        self._two = threading.Event()
        self.fails_for: str | None = None

    def _copy(self, piece: WirePiece) -> Digests | None:
        name = threading.current_thread().name
        self.who[name] = self.who.get(name, 0) + 1
        if len(self.who) > 1:
            self._two.set()
        assert self._two.wait(WAIT_S)
        if self.fails_for is not None and (name == "headwater copies too") == (self.fails_for == "helper"):
            raise MemoryError("no more")
        return super()._copy(piece)


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=6),
    number=st.integers(1, 12),
    place_bytes=st.integers(1, 2000),
    num_places=st.integers(1, 4),
    shared_bytes=st.integers(1, 1500),
    seed=st.integers(0, 99),
)
def test_bits_are_right_whoever_copies(
    sizes: list[int], number: int, place_bytes: int, num_places: int, shared_bytes: int, seed: int
) -> None:
    layout = opaque_layout(sizes, block_tokens=4)
    frames = frames_of(layout, number, seed)
    slots = np.random.default_rng(seed).permutation(2 * number)[:number]

    def wire(cache: DeviceCache, layout: KVLayout, direction: Direction) -> TorchWire:
        return TorchWire(
            cache, layout, direction, place_bytes=place_bytes, num_places=num_places, shared_bytes=shared_bytes
        )

    with create_kv_cache(layout, 2 * number, torch.device("cpu")) as cache, CopyEngine(cache, wires=wire) as engine:
        expected = digests_of(layout, frames)
        wrong = expected.copy()
        wrong[-1, -1] += np.uint64(1)
        for promised, num_good in ((expected, number), (wrong, number - 1)):
            transfer = engine.scatter(frames, slots.tolist(), expected=promised)
            assert transfer.wait(WAIT_S)
            assert transfer.num_good == num_good
        for slot, frame in zip(slots.tolist(), frames, strict=True):
            assert held(cache, slot) == payload(layout, frame)
        back = frames_of(layout, number, seed + 1)
        transfer = engine.gather(slots.tolist(), back)
        assert transfer.wait(WAIT_S)
        assert [payload(layout, frame) for frame in back] == [payload(layout, frame) for frame in frames]
        assert transfer.digests is not None
        assert (transfer.digests == expected).all()


@pytest.mark.parametrize("fails_for", [None, "helper", "caller"])
def test_two_copy_at_once_and_each_ones_error_is_told(fails_for: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    layout = opaque_layout([64, 64], block_tokens=4)
    frames = frames_of(layout, 4, seed=1)
    with create_kv_cache(layout, 4, torch.device("cpu")) as cache:
        wire = Both(cache, layout, Direction.IN, num_places=4, shared_bytes=1)
        wire.fails_for = fails_for
        for place in range(4):
            wire.launch(place, WirePiece(np.array([place]), [frames[place]], range(2)))
        errors = 0
        for place in range(4):
            try:
                found = wire.finish(place)
                assert found is not None
                assert (found == digests_of(layout, [frames[place]])).all()
                assert held(cache, place) == payload(layout, frames[place])
            except MemoryError:
                errors += 1
        assert sum(wire.who.values()) == 4
        assert len(wire.who) == 2
        helped = wire.who["headwater copies too"]
        assert errors == {None: 0, "helper": helped, "caller": 4 - helped}[fails_for]
        wire.close()
        wire.close()


@pytest.mark.parametrize(
    ("direction", "cores", "shared_bytes"), [(Direction.OUT, 2, 1), (Direction.IN, 1, 1), (Direction.IN, 2, 257)]
)
def test_who_is_not_to_have_help_has_none(
    direction: Direction, cores: int, shared_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    layout = opaque_layout([64, 64], block_tokens=4)
    frames = frames_of(layout, 2, seed=1)
    with create_kv_cache(layout, 2, torch.device("cpu")) as cache:
        wire = TorchWire(cache, layout, direction, shared_bytes=shared_bytes)
        wire.launch(0, WirePiece(np.arange(2), frames, range(2)))
        assert "headwater copies too" not in [thread.name for thread in threading.enumerate()]
        assert wire.finish(0) is not None
        assert wire.finish(1) is None  # nothing was launched there
        wire.close()
