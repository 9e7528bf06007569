"""What the brain remembers of a request and of a job. No logic beyond reading them."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from headwater.core.keys import BlockKey
from headwater.core.results import Reason, Status
from headwater.index.base import Hold

Facts: TypeAlias = Mapping[str, str | int | float]
NO_FACTS: Final[Facts] = {}


class Why(NamedTuple):
    """Blocks [start, end) of a prompt, and where they came from, or why they had to be computed."""

    start: int
    end: int
    tier: str  # that had them; of a miss, the one that is to blame, "": none
    reason: Reason | None = None  # why they were computed; None: they were a hit
    facts: Facts = NO_FACTS


class JobKind(enum.StrEnum):
    """What a job does."""

    PROBE = "probe"
    LOAD = "load"
    SAVE = "save"
    DEMOTE = "demote"
    PROMOTE = "promote"


@dataclass(slots=True, kw_only=True)
class JobRecord:
    """One job that is under way."""

    job: int
    kind: JobKind
    store: str
    start: int  # depth of its first block
    end: int
    num_bytes: int
    begun_s: float
    keys: tuple[BlockKey, ...]  # its blocks
    parent: BlockKey  # the key before the first of them
    alone: bool = True  # a Load behind no other of its store
    cancelled: bool = False  # it was told to end
    stuck: bool = False  # a Load past its time whose copy has not ended
    elsewhere: bool = False  # it ended LATE, and its store was not reached
    request: "RequestRecord | None" = None  # for whom it is done; it may be gone
    target: str | None = None  # of a Demote or Promote
    pin: Hold | None = None  # of a Save: the blocks it reads; of a Demote: the path that it is of, kept by nobody
    copied: bool = False  # a Save that has read them; a Demote reads none
    after: int = 0  # of a Save or Demote: the job that is to end before it
    slots: tuple[int, ...] = ()  # of a Load whose request left: not to be used before the job ends
    results: tuple[Status, ...] | None = None  # of a Load that ended before the one in front of it

    @property
    def into(self) -> str:
        """The store that it writes to; of a Probe or a Load, the one that it asks."""
        return self.target or self.store


@dataclass(slots=True, kw_only=True)
class Meeting:
    """A request that computes from the front of what is stored while its end is loaded (`meeting.py`)."""

    start: int  # of the blocks that stores have
    end: int
    low: int  # from here on they are loaded, or on their way, or could not be had
    claimed: int  # blocks before this are computed, or being computed
    head_s: float = 0.0  # what was to pass, as expected, before `start` could be computed
    rows: list[JobRecord] = field(default_factory=list)  # in order of depth: on their way, or there and not entered
    due_s: float = 0.0  # when the row under way should be there
    waits_s: float | None = None  # since when the engine stands before it
    num_entered: int = 0
    lost: dict[Reason, int] = field(default_factory=dict)  # blocks of rows that did not come, and why
    stopped: bool = False  # no more rows are loaded
    given_up: bool = False  # because the engine said so

    @property
    def under_way(self) -> JobRecord | None:
        """The row that is being loaded; there is one at a time."""
        return next((row for row in self.rows if row.results is None), None)

    def facts(self) -> list[object]:
        """All that it knows, for snapshots."""
        rows = [[row.job, row.results] for row in self.rows]
        state = [self.start, self.end, self.low, self.claimed, self.head_s, self.due_s, self.waits_s, self.num_entered]
        return [*state, rows, self.lost, self.stopped, self.given_up]


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One request, from its first question until it leaves."""

    request: str
    keys: list[BlockKey]  # of all its full blocks that have a name: the prompt's, and those computed since
    num_prompt: int  # how many of them are the prompt's, and had their name when it asked
    root: BlockKey
    tenant: bytes
    hold: Hold
    num_unnamed: int = 0  # blocks of the prompt behind those: they get their names when they were computed
    num_marks: int = 0  # how often blocks had been marked as stored when it asked
    resumed: bool = False  # it was here before, and was preempted
    probes: dict[str, int] = field(default_factory=dict)  # stores that were asked and have not answered: the job
    asked_s: float = 0.0  # when the stores were asked, the last time
    answered_s: float | None = None  # when no store was being asked any more
    barred: int | None = None  # from here on nothing is loaded, saved, or found by others: see `purging.py`
    gave_way: bool = False  # it had to give up its hold: what it finds again counts as no hit
    probe_start: int = 0  # depth from which on stores were asked
    held: dict[str, bytearray] = field(default_factory=dict)  # their answers, one byte a block from there on
    unasked: dict[str, Reason] = field(default_factory=dict)  # stores that gave no answer, and why
    base: int = -1  # blocks that were on the device when it reserved; -1: it has not
    own: list[int] = field(default_factory=list)  # slots of its blocks from `base` on; some may be known by now
    loads: list[JobRecord] = field(default_factory=list)  # in order of depth
    load_end: int = 0  # blocks before this were worth loading; behind it the engine may compute meanwhile
    broken: Reason | None = None  # why loading stopped
    num_loaded: dict[str, int] = field(default_factory=dict)  # blocks that were loaded, by store
    loaded_bytes: int = 0
    reserved_s: float = 0.0
    ready_s: float | None = None  # when nothing was being loaded any more
    misses: dict[Reason, int] = field(default_factory=dict)
    may_meet: bool = False  # it can compute while what lies behind is loaded
    meeting: Meeting | None = None  # while it computes and what lies behind is being loaded
    met: list[tuple[int, int]] = field(default_factory=list)  # rows that were loaded so
    met_wait_s: float = 0.0  # for rows that it had come to
    gone: bool = False  # it left; jobs for it may still be under way
    # Notes for people, which decide nothing and are in no digest (`whys.py`):
    whys: list[Why] = field(default_factory=list)  # as they became known
    culprit: Why | None = None  # what stopped loading, at its first block
    estimate: Why | None = None  # what loading and computing were expected to take where loading did not pay

    @property
    def reserved(self) -> bool:
        """Whether it has slots."""
        return self.base >= 0

    @property
    def stuck(self) -> bool:
        """Whether one of its loads may never end: it has to begin anew, with other slots."""
        return any(job.stuck for job in self.all_loads)

    @property
    def all_loads(self) -> list[JobRecord]:
        """What is loaded for it, or has come and is not entered yet: before it computes, and while it does."""
        return [*self.loads, *self.meeting.rows] if self.meeting is not None else self.loads

    def before(self, at: int) -> BlockKey:
        """The key that its block at this depth builds on."""
        return self.keys[at - 1] if at else self.root

    def num_shared(self, end: int) -> int:
        """Up to where its first `end` blocks are, or will be, for others to find."""
        return end if self.barred is None else min(end, self.barred)

    @property
    def num_blocks(self) -> int:
        """How many blocks it has slots for."""
        return self.base + len(self.own)
