"""Pages that are digested while they arrive: each run of planes by the thread that has just read it.

A page that is read whole and digested then has left the core's cache in between; one of 8 MiB costs a fifth more
processor time that way. So a frame is cut behind planes, into pieces that a core's cache holds, and each is digested
while it is hot. What the digests are worth is `verified.py`'s business. Any thread may come with any piece, and the
last who comes with a piece counts. `copy_frame` does the same for a page in memory that others may write to.
"""

from collections.abc import Sequence
from typing import Final

from headwater.core.page import PageName
from headwater.core.results import Status
from headwater.layout.digest import copy_digests, plane_digests, plane_runs
from headwater.layout.frame import expect, header_bytes, parse

PIECE_BYTES: Final = 512 << 10  # measured: less costs calls, more has left the cache when it is digested


class FrameCut:
    """Where the pieces of a frame end, and which planes are in each. The header goes with the first."""

    def __init__(self, header_bytes: int, plane_bytes: Sequence[int]) -> None:
        runs = plane_runs(tuple(plane_bytes), PIECE_BYTES)
        self.num_planes: Final = len(plane_bytes)
        self.ends: Final = [header_bytes + end for _, end, _ in runs]
        self.runs: Final = [
            (header_bytes + start, header_bytes + end, first, lengths)
            for (start, end, lengths), first in zip(runs, _firsts(runs), strict=True)
        ]


def _firsts(runs: Sequence[tuple[int, int, tuple[int, ...]]]) -> list[int]:
    """The number of the first plane of each run."""
    firsts, plane = [], 0
    for _, _, lengths in runs:
        firsts.append(plane)
        plane += len(lengths)
    return firsts


class ArrivingPages:
    """Frames of one call, and the digests of those of their planes that have arrived."""

    def __init__(self, cut: FrameCut, frames: Sequence[memoryview]) -> None:
        self.digests: Final = [[0] * cut.num_planes for _ in frames]
        self._cut = cut
        self._frames = frames

    def digest_piece(self, page: int, piece: int) -> None:
        """A piece is there: digest its planes. Reads every byte of it."""
        start, end, first, lengths = self._cut.runs[piece]
        self.digests[page][first : first + len(lengths)] = plane_digests(self._frames[page][start:end], lengths)


def copy_frame(
    source: memoryview,
    target: memoryview,
    name: PageName,
    *,
    now_ms: int,
    identity: bytes,
    plane_bytes: Sequence[int],
) -> Status:
    """Copy a frame out of shared memory and verify the copy, planes while they are hot (rule 4). Mutates `target`."""
    if len(source) != len(target):
        return Status.SHORT
    start = header_bytes(len(plane_bytes))
    target[:start] = source[:start]
    header = parse(target[:start])
    if isinstance(header, Status):
        return header
    fault = expect(header, name, now_ms=now_ms, identity=identity, plane_bytes=plane_bytes)
    if fault is not None:
        return fault
    copy = target[start:]
    if copy_digests(source[start:], copy, header.plane_bytes, private=copy) != list(header.digests):
        return Status.CORRUPT
    return Status.HIT
