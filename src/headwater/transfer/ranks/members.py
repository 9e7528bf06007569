"""Members: who moves one page of each block for one rank. A rank has one for each of its parts (`layout/shard.py`).

A member's executor is a `Worker` in this process, or a link to one in another (`ranks/link.py`). Not here: what a group
does with its members (`ranks.py`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from headwater.core.errors import InvalidInput
from headwater.core.events import Event, Instruction
from headwater.layout.shard import Shard

Page: TypeAlias = tuple[int, int, int]  # shard index, shard count, part: what a page's name says besides the block


class JobExecutor(Protocol):
    """Who carries jobs out."""

    @property
    def deliver(self) -> Callable[[Event], None] | None:
        """Who hears what becomes of them."""
        ...

    @deliver.setter
    def deliver(self, deliver: Callable[[Event], None], /) -> None: ...

    def submit(self, instructions: Iterable[Instruction], /) -> None:
        """Begin jobs, or cancel them. Does not block; raises with nothing taken."""
        ...

    def throttle_saves(self, *, on: bool) -> None:
        """Have saves leave the interpreter to the engine while it is in a hurry. Does not block."""
        ...


class MemberExecutor(JobExecutor, Protocol):
    """Who carries a member's jobs out: a `Worker`, or what looks like one from here."""

    def wait_layer(self, job: int, layer: int, timeout_s: float, /) -> bool:
        """Wait until a load has brought all planes up to a layer's. Blocks. False: too late, or over, or unknown."""
        ...

    def on_first_layer(self, wake: Callable[[], None], /) -> None:
        """Have `wake` called when the first layers of a load have arrived, if that is heard of in this process."""
        ...

    def remote(self) -> "RemoteExecutor | None":
        """Itself, if it may end while we live; None: it is part of this process."""
        ...

    def revive(self, store: str, /) -> bool:
        """Put a store right that was switched off. Blocks."""
        ...

    def close(self, timeout_s: float, /) -> bool:
        """End all jobs; False if that took too long. May be asked again."""
        ...


class RemoteExecutor(Protocol):
    """An executor that may end while we live: one in another process. Dead, it touches nothing any more."""

    on_death: Callable[[str], None] | None  # called once, with what is known of it

    @property
    def death(self) -> str | None:
        """Why it is known to be dead, or None."""
        ...

    def kill(self) -> bool:
        """End the process at once, if that was allowed; `on_death` follows. Does not block. False: it was not."""
        ...


@dataclass(frozen=True, slots=True)
class Member:
    """One rank's executor for one page of each block."""

    rank: int
    shard: Shard
    part: int  # of the page's name
    executor: MemberExecutor

    @property
    def page(self) -> Page:
        """Equal for members that hold the same page."""
        return self.shard.index, self.shard.count, self.part


def check_members(members: Sequence[Member]) -> int:
    """How many ranks there are. Raises InvalidInput unless every rank has the same parts, each shard its holders."""
    by_rank: dict[int, list[Member]] = {}
    for member in members:
        by_rank.setdefault(member.rank, []).append(member)
    tp_size = len(by_rank)
    if not tp_size or set(by_rank) != set(range(tp_size)):
        raise InvalidInput(f"a group has ranks from 0 on, each of them, not {sorted(by_rank)}")
    counts = {rank: sorted(member.shard.count for member in mine) for rank, mine in by_rank.items()}
    if len(set(counts[0])) < len(counts[0]) or any(of != counts[0] for of in counts.values()):
        raise InvalidInput(f"every rank has the same parts, each once, not shards of {counts}")
    parts: dict[Shard, int] = {}
    for member in members:
        count = member.shard.count
        if tp_size % count or member.shard.index != member.rank * count // tp_size:
            raise InvalidInput(f"rank {member.rank} of {tp_size} does not hold {member.shard}")
        if parts.setdefault(member.shard, member.part) != member.part:
            raise InvalidInput(f"ranks that hold {member.shard} call it part {member.part} and {parts[member.shard]}")
    return tp_size
