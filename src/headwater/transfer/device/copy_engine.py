"""The copy engine: whole transfers between device blocks and host frames, in pieces, verified, without anybody waiting.

    gather(slots, frames)                 frame payloads <- blocks, and the digest of each plane
    scatter(frames, slots, expected=...)  blocks <- frame payloads, checked against the digests the frames vouch for

Both return a Transfer at once. Each direction has a bounded number of pieces under way (`wire.py`), a queue and a
thread. Who submits a transfer puts its first pieces on the wire, and who waits for it drives it on: no thread has to
wake up in between. The thread drives what nobody waits for.

A scatter goes by groups of layers: first the first group of every block, and so on. `num_planes_ready` planes of every
block have arrived and were found right; `wait_planes` waits for that, so an engine can compute with a layer while the
next is on its way (rule 5). The blocks are not to be named before the transfer is over and `num_good` counts them.

Invariants:
- A transfer ends exactly once; after it is over nothing is copied for it any more. `cancel` ends it at the next piece.
- `close` ends every transfer, and gives back all memory on the device.
- Who holds a place finishes it: nothing waits for a caller that does not come back.
Not here: which memory is a frame's and whether it may be written (`worker.py`), what is registered (`staging.py`).
"""

import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import Final, NamedTuple

import numpy as np

from headwater.core.errors import InvalidCopy
from headwater.layout.frame import frame_bytes
from headwater.layout.spec import KVLayout
from headwater.transfer.device.arena import DeviceCache, Owned
from headwater.transfer.device.copy_queue import CLOSE_S, CopyQueue
from headwater.transfer.device.cuda_wire import RunWire, StagedWire, one_run
from headwater.transfer.device.torch_wire import TorchWire
from headwater.transfer.device.transfer import Cut, Transfer
from headwater.transfer.device.wire import MAX_ROWS, Digests, Direction, Wire, frame_address

GROUP_BYTES: Final = 512 << 10  # of a block, at least, in one group of layers: smaller pieces slow the wire down
_GROUP_PLACES: Final = 2  # that a group of layers, of all blocks together, fills at least
_MOST_DIRECT: Final = 4  # blocks for which the direct way is tried
_NUM_TIMED: Final = 5
_NUM_BYTES: Final = attrgetter("nbytes")
_READONLY: Final = attrgetter("readonly")
_RAMP: Final = 4  # the first piece out, and the last one in, is so much smaller: the other half of the way starts early


class PathChoice(NamedTuple):
    """What was measured for so many blocks one way, and whether the kernel copies them itself."""

    direction: Direction
    num_blocks: int
    staged_s: float
    direct_s: float
    direct: bool


class CopyEngine(Owned):
    """All copies of one device cache. Safe from several threads."""

    def __init__(
        self,
        cache: DeviceCache,
        *,
        layout: KVLayout | None = None,
        digests: bool = True,
        wires: Callable[[DeviceCache, KVLayout, Direction], Wire] | None = None,
    ) -> None:
        """`layout` picks the planes that make a page; all of the cache's by default. `digests`: verify what passes."""
        self.layout: Final = layout if layout is not None else cache.layout
        self.num_blocks: Final = cache.num_blocks
        self.digests: Final = digests
        self.layerwise: Final = cache.layerwise
        self._known_groups: dict[int, list[tuple[range, int]]] = {}

        def make(cache: DeviceCache, layout: KVLayout, direction: Direction) -> Wire:
            if cache.device.type != "cuda":
                return TorchWire(cache, layout, direction, digests=digests)
            kind = StagedWire if one_run(cache, layout) is None else RunWire
            return kind(cache, layout, direction, digests=digests)

        self._queues = {
            direction: CopyQueue((wires or make)(cache, self.layout, direction), direction.value)
            for direction in Direction
        }

    @property
    def is_loading(self) -> bool:
        """Whether blocks are on their way to the device, or wait to be."""
        return self._queues[Direction.IN].is_busy

    def gather(
        self, slots: Sequence[int], frames: Sequence[memoryview], *, on_over: Callable[[], None] | None = None
    ) -> Transfer:
        """Copy the blocks in `slots` into the payloads of `frames`. Does not block. Raises InvalidCopy, ResourceClosed.

        The frames' memory must be registered where the device is a GPU, and stay untouched until it is over. `on_over`
        is called once it is, by whatever thread, whether somebody waits for it or not.
        """
        transfer = self._transfer(Direction.OUT, slots, frames, self._groups(len(slots), whole=True), on_over=on_over)
        self._queues[Direction.OUT].submit(transfer, alone=not self.is_loading)
        return transfer

    def scatter(
        self,
        frames: Sequence[memoryview],
        slots: Sequence[int],
        *,
        expected: Digests | None = None,
        on_planes: Callable[[int], None] | None = None,
        on_over: Callable[[], None] | None = None,
    ) -> Transfer:
        """Copy the payloads of `frames` into the blocks in `slots`, group of layers by group. Does not block.

        Where nobody waits for layers (`DeviceCache.layerwise`), all are one group, as far as a place takes them.

        `expected`: what the digests must be, [blocks, planes]; None: they were verified before. `on_planes` hears from
        the finishing thread how many leading planes of all blocks are there; `on_over` as in `gather`. Raises
        InvalidCopy, ResourceClosed.
        """
        if expected is not None and expected.shape != (len(slots), len(self.layout.planes)):
            raise InvalidCopy(f"{expected.shape} digests for {len(slots)} blocks of {len(self.layout.planes)} planes")
        groups = self._groups(len(slots), whole=not self.layerwise)
        transfer = self._transfer(
            Direction.IN, slots, frames, groups, expected=expected, on_planes=on_planes, on_over=on_over
        )
        self._queues[Direction.IN].submit(transfer, alone=not self._queues[Direction.OUT].is_busy)
        return transfer

    def calibrate(self, frames: Sequence[memoryview]) -> list[PathChoice]:
        """Find out, for a few blocks, whether a kernel over the bus is faster than staging, and do so from then on.

        Blocks, milliseconds. For the beginning, when nobody else uses the device's first blocks: they are copied into
        `frames` and back. On a CPU there is nothing to choose.
        """
        choices: list[PathChoice] = []
        for direction, queue in self._queues.items():
            wire = queue.wire.direct()
            if wire is None:
                continue
            faster = True
            count = 1
            while count <= min(_MOST_DIRECT, len(frames), self.num_blocks):
                took = {}
                for way, direct_bytes in (("staged", 0), ("direct", count * self.layout.page_bytes)):
                    wire.direct_bytes = direct_bytes
                    took[way] = min(self._time(direction, frames[:count]) for _ in range(_NUM_TIMED))
                faster = faster and took["direct"] < took["staged"]
                choices.append(PathChoice(direction, count, took["staged"], took["direct"], faster))
                count *= 2
            blocks = max((one.num_blocks for one in choices if one.direction is direction and one.direct), default=0)
            wire.direct_bytes = blocks * self.layout.page_bytes
        return choices

    def warm(self, frames: Sequence[memoryview]) -> None:
        """Copy blocks out and back once, as many as there are frames: a kernel is loaded when it is first launched.

        Blocks, milliseconds. For the beginning, as `calibrate`.
        """
        for direction in (Direction.OUT, Direction.IN):
            self._time(direction, frames)

    def _time(self, direction: Direction, frames: Sequence[memoryview]) -> float:
        slots = range(len(frames))
        begin_s = time.perf_counter()
        transfer = self.gather(slots, frames) if direction is Direction.OUT else self.scatter(frames, slots)
        transfer.wait()
        return time.perf_counter() - begin_s

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """End every transfer and give the memory back. Idempotent. Blocks until what has begun is over.

        That takes `timeout_s` at most. False: a copy does not return, so all that it may touch must stay.
        """
        until_s = time.monotonic() + timeout_s
        ended = [queue.close(max(0.0, until_s - time.monotonic())) for queue in self._queues.values()]
        return all(ended)

    def _transfer(
        self,
        direction: Direction,
        slots: Sequence[int],
        frames: Sequence[memoryview],
        groups: list[tuple[range, int]],
        *,
        expected: Digests | None = None,
        on_planes: Callable[[int], None] | None = None,
        on_over: Callable[[], None] | None = None,
    ) -> Transfer:
        """What is asked for, checked and cut into pieces. Raises InvalidCopy."""
        ids = np.asarray(slots, np.int64)
        if ids.shape != (len(frames),):
            raise InvalidCopy(f"{ids.shape} slots do not fit {len(frames)} frames")
        if len(ids) and (ids.min() < 0 or ids.max() >= self.num_blocks):
            raise InvalidCopy(f"slots are 0 to {self.num_blocks - 1}, not {ids.min()} to {ids.max()}")
        needed = frame_bytes(self.layout.plane_bytes)
        too_small = min(map(_NUM_BYTES, frames), default=needed) < needed
        if too_small or (direction is Direction.OUT and any(map(_READONLY, frames))):
            raise InvalidCopy(f"a frame has {needed} bytes, which can be written to where blocks are gathered")
        if direction is Direction.IN and len(np.unique(ids)) < len(ids):
            raise InvalidCopy("a slot is a destination more than once")
        by_address = self._queues[direction].wire.by_address
        return Transfer(
            ids,
            frames,
            *self._cut(direction, len(ids), groups),
            addresses=list(map(frame_address, frames)) if by_address else [],  # once, and not for each group of layers
            num_planes=len(self.layout.planes),
            expected=expected,
            on_planes=on_planes,
            on_over=on_over,
        )

    def _groups(self, num_blocks: int, *, whole: bool) -> list[tuple[range, int]]:
        """Ranges of planes and their bytes: whole layers where that is possible, and at most a place each."""
        page, most = self.layout.page_bytes, self._queues[Direction.IN].wire.place_bytes
        # A group of all blocks together fills a few places, or the pieces get too small for the wire.
        least = page if whole else min(page, max(GROUP_BYTES, _GROUP_PLACES * most // max(1, num_blocks)))
        groups = self._known_groups.get(least)
        if groups is None:
            groups = self._known_groups[least] = _group(self.layout, least, most - 4096)  # a row's alignment
        return groups

    def _cut(
        self, direction: Direction, num_blocks: int, groups: list[tuple[range, int]]
    ) -> tuple[list[Cut], dict[range, int]]:
        """Pieces in the order in which they go, group by group, and how many each group has."""
        wire = self._queues[direction].wire
        most = wire.place_bytes
        cuts: list[Cut] = []
        left: dict[range, int] = {}
        known: dict[tuple[int, bool, bool], list[tuple[int, int]]] = {}  # most groups are alike
        for number, (planes, width) in enumerate(groups):
            rows = max(1, min(MAX_ROWS, most // (-(-width // 16) * 16)))
            last = direction is Direction.IN and number == len(groups) - 1
            ramps = wire.in_stages and number == 0, wire.in_stages and last
            ends = known.get((rows, *ramps))
            if ends is None:
                ends = known[rows, *ramps] = _cut_rows(num_blocks, rows, ramp_up=ramps[0], ramp_down=ramps[1])
            cuts += [(start, end, planes) for start, end in ends]
            left[planes] = len(ends)
        return cuts, left


def _group(layout: KVLayout, least: int, most: int) -> list[tuple[range, int]]:
    groups: list[tuple[range, int]] = []
    start, size = 0, 0
    planes = layout.planes
    for at, num_bytes in enumerate(layout.plane_bytes):
        new_layer = at > 0 and planes[at].layer != planes[at - 1].layer
        if at > start and (size + num_bytes > most or (new_layer and size >= least)):
            groups.append((range(start, at), size))
            start, size = at, 0
        size += num_bytes
    groups.append((range(start, len(planes)), size))
    return groups


def _cut_rows(num: int, rows: int, *, ramp_up: bool, ramp_down: bool) -> list[tuple[int, int]]:
    """Cut `num` blocks into runs of at most `rows`, of one size, but smaller where the way begins or ends."""
    small = max(1, rows // _RAMP)
    first: list[int] = []
    last: list[int] = []
    left = num
    while (ramp_up or ramp_down) and left > small and small < rows:
        for ramps, sizes in ((ramp_up, first), (ramp_down, last)):
            if ramps and left > small:
                sizes.append(small)
                left -= small
        small *= _RAMP
    count = -(-left // rows)
    middle = [left // count + (i < left % count) for i in range(count)]
    sizes = [*first, *middle, *reversed(last)]
    return [(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True)]
