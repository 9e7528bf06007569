"""One row of `bench copy`: some blocks on a device, their frames on the host, and everybody's way to move them.

Sources and targets are different blocks. Sources never change once they were checked, so frames hold the same bytes
whoever gathered last; only the limit writes something else there, and every round begins with it.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from headwater.lab.bench.copy_paths import Limit, Pieces
from headwater.lab.bench.report import Samples
from headwater.layout.digest import plane_digests
from headwater.layout.frame import frame_bytes, header_bytes
from headwater.layout.spec import KVLayout
from headwater.transfer.device.arena import PAGE_ALIGNMENT, DeviceCache
from headwater.transfer.device.copy_engine import CopyEngine
from headwater.transfer.device.cuda import copy_calls
from headwater.transfer.device.transfer import Transfer
from headwater.transfer.device.wire import Digests, Direction

NAMES: Final = {Direction.OUT: "d2h", Direction.IN: "h2d"}
_SCATTERED_BLOCKS: Final = (8, 512)
_PIECES_BLOCKS: Final = (8, 64)
_BATCH_BLOCKS: Final = (8, 64, 512)
_SAMPLED_BLOCKS: Final = 8  # whose digests are compared with xxhash

Way: TypeAlias = Callable[[], tuple[Transfer, ...]]  # what is still to be waited for


@dataclass(frozen=True, slots=True)
class CopyRows:
    """Blocks, and the frames they go to or come from."""

    sources: list[int]
    targets: list[int]
    frames: list[memoryview]
    digests: Digests | None = None

    def shuffled(self, order: Sequence[int]) -> "CopyRows":
        """The same, in another order."""
        return CopyRows(
            [self.sources[i] for i in order],
            [self.targets[i] for i in order],
            [self.frames[i] for i in order],
            None if self.digests is None else self.digests[list(order)],
        )


class CopyCourse:
    """A number of blocks of one layout."""

    def __init__(
        self,
        cache: DeviceCache,
        engines: tuple[CopyEngine, CopyEngine],
        limit: Limit,
        frames: Sequence[memoryview],
        *,
        ids: Sequence[int],
        num_blocks: int,
    ) -> None:
        """`engines`: with digests and without; `ids`: all blocks of the cache, at least twice as many as are moved."""
        self.num_blocks: Final = num_blocks
        self.num_bytes: Final = num_blocks * cache.layout.page_bytes
        self.both_blocks: Final = min(num_blocks, len(frames) // 2)
        self.correct = True
        self.seconds = Samples()
        self._cache = cache
        self._engine, self._plain = engines
        self._limit = limit
        self._all_frames = frames
        self.rows = CopyRows(list(ids[:num_blocks]), list(ids[num_blocks : 2 * num_blocks]), list(frames[:num_blocks]))

    def check(self) -> None:
        """Random blocks to the host, and back into others, by both engines; every byte is compared. Blocks."""
        cache, rows = self._cache, self.rows
        sources, targets = (torch.tensor(ids, device=cache.device) for ids in (rows.sources, rows.targets))
        for engine in (self._plain, self._engine):
            for row in cache.rows:
                row[sources] = torch.randint(
                    0, 256, (self.num_blocks, row.shape[1]), dtype=torch.uint8, device=cache.device
                )
            synchronise(cache.device)
            digests = finish(engine.gather(rows.sources, rows.frames)).digests
            back = finish(engine.scatter(rows.frames, rows.targets, expected=digests))
            self.correct &= back.num_good == self.num_blocks
            self.correct &= all(torch.equal(row[sources], row[targets]) for row in cache.rows)
            if engine.digests:
                self.correct &= digests is not None and self._digests_are_right(digests)
                self.rows = CopyRows(rows.sources, rows.targets, rows.frames, digests)

    def _digests_are_right(self, digests: Digests) -> bool:
        sizes = self._cache.layout.plane_bytes
        start = header_bytes(len(sizes))
        step = -(-self.num_blocks // _SAMPLED_BLOCKS)
        return all(
            digests[i].tolist() == plane_digests(self.rows.frames[i][start:], sizes)
            for i in range(0, self.num_blocks, step)
        )

    def take(self, rounds: int, *, baselines: bool) -> None:
        """Time everybody, in turns; once more before that, which is not counted. Blocks."""
        ways = self._ways(baselines=baselines)
        for number in range(-1, rounds):
            for name, way in ways.items():
                begin_s = time.perf_counter()
                transfers = way()
                submitted_s = time.perf_counter()
                for transfer in transfers:
                    finish(transfer)
                end_s = time.perf_counter()
                self.correct &= all(transfer.num_good == transfer.num_blocks for transfer in transfers)
                if number >= 0:
                    self.seconds.add(name, end_s - begin_s)
                    self.seconds.add(f"{name}_submit", submitted_s - begin_s)

    def submit(self, direction: Direction) -> Transfer:
        """Begin to move all blocks, with digests."""
        return self._move(self._engine, direction, self.rows)[0]

    def ratio(self, name: str, limit: str) -> float | None:
        """How near one way came to a limit; None: nobody went it."""
        if name not in self.seconds.values:
            return None
        return self.seconds.median(limit) / self.seconds.median(name)

    def figures(self) -> dict[str, Any]:
        """All but what belongs to products."""
        found: dict[str, Any] = {}
        for suffix in ("", "_plain", "_scattered", "_batch", "_pieces"):
            for name in NAMES.values():
                found[f"{name}_ratio{suffix}"] = self.ratio(f"{name}{suffix}", f"{name}_limit")
        found["both_ratio"] = self.ratio("both", "both_limit")
        found["both_blocks"] = self.both_blocks
        found["submit_ms"] = 1e3 * max(self.seconds.median(f"{name}_submit") for name in NAMES.values())
        for name in NAMES.values():
            found[f"{name}_limit_gbs"] = self.num_bytes / self.seconds.median(f"{name}_limit") / 1e9
        return found

    def _ways(self, *, baselines: bool) -> dict[str, Way]:
        ways: dict[str, Way] = {}
        order = np.random.default_rng(1).permutation(self.num_blocks).tolist()
        scattered = self.rows.shuffled(order)
        for direction, name in NAMES.items():  # out first: what the limit writes over, the others bring back
            ways[f"{name}_limit"] = _blocking(partial(self._limit.copy, direction, self.num_bytes))
            if baselines:
                ways |= self._baselines(direction, name)
            ways[f"{name}_plain"] = partial(self._move, self._plain, direction, self.rows)
            if self.num_blocks in _SCATTERED_BLOCKS:
                ways[f"{name}_scattered"] = partial(self._move, self._engine, direction, scattered)
            ways[name] = partial(self._move, self._engine, direction, self.rows)
        if self.both_blocks:
            num_bytes = self.both_blocks * self._cache.layout.page_bytes
            second_at = self.both_blocks * frame_stride(self._cache.layout)
            ways["both_limit"] = _blocking(partial(self._limit.both, num_bytes, second_at=second_at))
            ways["both"] = self._move_both
        return ways

    def _baselines(self, direction: Direction, name: str) -> dict[str, Way]:
        found: dict[str, Way] = {}
        if self.num_blocks not in (*_PIECES_BLOCKS, *_BATCH_BLOCKS):
            return found
        slots = self.rows.sources if direction is Direction.OUT else self.rows.targets
        pieces = Pieces(self._cache, slots, self.rows.frames, direction)
        if self.num_blocks in _BATCH_BLOCKS and copy_calls().batches:
            found[f"{name}_batch"] = _blocking(pieces.batch)
        if self.num_blocks in _PIECES_BLOCKS:
            found[f"{name}_pieces"] = _blocking(pieces.one_by_one)
        return found

    def _move(self, engine: CopyEngine, direction: Direction, rows: CopyRows) -> tuple[Transfer, ...]:
        if direction is Direction.OUT:
            return (engine.gather(rows.sources, rows.frames),)
        return (engine.scatter(rows.frames, rows.targets, expected=rows.digests if engine.digests else None),)

    def _move_both(self) -> tuple[Transfer, ...]:
        num, rows = self.both_blocks, self.rows
        return (
            self._engine.gather(rows.sources[:num], self._all_frames[:num]),
            self._engine.scatter(self._all_frames[num : 2 * num], rows.targets[:num]),
        )


def _blocking(call: Callable[[], None]) -> Way:
    """A way that leaves nothing to wait for."""

    def go() -> tuple[Transfer, ...]:
        call()
        return ()

    return go


def finish(transfer: Transfer) -> Transfer:
    """Wait until it is over. Raises what the device raised."""
    transfer.wait()
    if transfer.error is not None:
        raise transfer.error
    return transfer


def frame_stride(layout: KVLayout) -> int:
    """From one frame to the next."""
    return -(-frame_bytes(layout.plane_bytes) // PAGE_ALIGNMENT) * PAGE_ALIGNMENT


def cut_frames(area: memoryview, layout: KVLayout) -> list[memoryview]:
    """As many frames as an area holds."""
    size, stride = frame_bytes(layout.plane_bytes), frame_stride(layout)
    return [area[at : at + size] for at in range(0, len(area) - size + 1, stride)]


def synchronise(device: torch.device) -> None:
    """Wait for what torch has queued: the engine's streams do not follow its own."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
