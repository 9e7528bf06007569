"""What a request hears: for each block of its prompt HIT (where), PENDING or MISS; and how far its loads are."""

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

DEVICE: Final = "device"


class BlockStatus(enum.StrEnum):
    """What is known of one block."""

    HIT = "hit"  # there, in the tier that is named; in a store, as far as that store says
    PENDING = "pending"  # being looked up, loaded, or computed by another request: ask again
    MISS = "miss"


class MatchPart(NamedTuple):
    """Blocks [start, end) of a prompt, all in one state. `tier` is where they are, if they are."""

    status: BlockStatus
    tier: str | None
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Match:
    """What is there of a prompt, in parts that follow each other. From the first MISS on everything is MISS."""

    request: str
    num_blocks: int
    parts: tuple[MatchPart, ...]

    def __iter__(self) -> Iterator[tuple[BlockStatus, str | None]]:
        """Block by block."""
        for part in self.parts:
            for _ in range(part.start, part.end):
                yield part.status, part.tier

    @property
    def num_hit(self) -> int:
        """Leading blocks that are there, in whatever tier."""
        return next((part.start for part in self.parts if part.status is not BlockStatus.HIT), self.num_blocks)

    @property
    def num_on_device(self) -> int:
        """Leading blocks that are on the device."""
        return self.parts[0].end if self.parts and self.parts[0].tier == DEVICE else 0

    @property
    def settled(self) -> bool:
        """Whether asking again would not tell more."""
        return all(part.status is not BlockStatus.PENDING for part in self.parts)


def describe(
    request: str,
    num_blocks: int,
    num_held: int,
    status: Callable[[int], tuple[BlockStatus, str | None]],
    row_end: Callable[[int, str | None], int],
    *,
    reserved: bool,
) -> Match:
    """The answer for a prompt whose first `num_held` blocks are on the device. Pure.

    `status`: of one block behind those; `row_end`: up to where it is the same in that tier, at least.
    """
    parts = [MatchPart(BlockStatus.HIT, DEVICE, 0, num_held)] if num_held else []
    at = num_held
    while at < num_blocks:
        found, tier = status(at)
        end = row_end(at, tier)
        if parts and parts[-1][:2] == (found, tier):
            parts[-1] = parts[-1]._replace(end=end)
        else:
            parts.append(MatchPart(found, tier, at, end))
        at = end
        if found is BlockStatus.MISS or (found is BlockStatus.PENDING and not reserved):
            parts[-1] = parts[-1]._replace(end=num_blocks)  # nobody can say more of what comes behind
            break
    return Match(request, num_blocks, tuple(parts))


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a request is: its first `num_ready` blocks are on the device and may be used.

    While it is `loading`, the first `num_expected` will be, if all goes well. If it is `stuck`, its loads may never
    end: it is to be released, and to come again; the slots that it had stay out of use until they end.

    While it is `meeting`, it may compute, and blocks behind those are loaded at the same time: `num_ready` jumps when
    it has come to them. It is to `claim` what it computes: blocks before `num_claimed`, and no others.
    """

    num_ready: int
    loading: bool
    num_expected: int
    stuck: bool = False
    meeting: bool = False
    num_claimed: int = 0
