"""What the brain hears and what it says: plain values that survive JSON.

Events come in (what an engine asks for, what became of a job), instructions go out (what the executor shall do, what
the engine may do). Both are frozen and hold nothing but numbers, text, bytes and tuples of them, so that brain and
executor may live in different processes, and an incident is a file of events that can be handled again
(`encoding.py`).

Every event says when it happened, in seconds on the clock of whoever runs the brain; the brain has no other.
A *job* is one instruction to the executor, by number. Each job ends with exactly one JobDone or JobFailed, whatever
happens to it; what comes after that is ignored. One whose copy hangs has not ended: if somebody waits for it
(`is_waited_for`), Stuck says so.
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Final, Protocol, TypeAlias

from headwater.core.keys import BlockKey
from headwater.core.results import Reason, Status

NO_TENANT: Final = bytes(16)
SESSION_BYTES: Final = 16


def session_of(name: str, tenant: bytes = NO_TENANT) -> bytes:
    """What a session that a client named so is called here; two tenants' are never the same. Empty for no name."""
    return hashlib.blake2b(name.encode(), key=tenant, digest_size=SESSION_BYTES).digest() if name else b""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something happened."""

    now_s: float


# --- what an engine says ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Arrived(Event):
    """A request asks what is there of its prompt. It may ask again until it has reserved."""

    request: str
    keys: tuple[BlockKey, ...]  # of the prompt's full blocks
    root: BlockKey  # what the first of them builds on
    tenant: bytes = NO_TENANT
    resumed: bool = False  # it was preempted: what it finds is mostly its own, and counts as no hit
    num_local: int = 0  # of an engine that keeps its blocks itself: how many of them it has
    num_unnamed: int = 0  # full blocks of the prompt behind those with keys: no store has what they build on
    session: bytes = dataclasses.field(default=b"", metadata={"later": True})  # whose turn it is (`session_of`): a hint
    keep_s: float = dataclasses.field(default=0.0, metadata={"later": True})  # how long the session wishes it to stay
    last: bool = dataclasses.field(default=False, metadata={"later": True})  # whether it is the session's last turn


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wanted(Event):
    """A request wants slots for its first `num_blocks` blocks, and what pays to be loaded into them."""

    request: str
    num_blocks: int
    load: bool = True
    promised: str = ""  # a store that is known to have all blocks of the prompt: loaded unasked, whatever it costs
    meet: bool = dataclasses.field(default=False, metadata={"later": True})  # it computes while the end is loaded


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lent(Event):
    """An engine that allocates by itself says which slots a request's first blocks have: all of them, in order.

    The first time, `num_load` blocks behind those that it had are to be loaded into theirs.
    """

    request: str
    slots: tuple[int, ...]
    num_load: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Filled(Event):
    """The next blocks of a request were computed on every rank, and these are their names (rule 1)."""

    request: str
    keys: tuple[BlockKey, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Claimed(Event):
    """A request that computes while its end is loaded would compute up to block `num_blocks` in its next step.

    How far it may is the brain's word: blocks before that are not loaded any more, and no others are computed.
    """

    request: str
    num_blocks: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GaveUp(Event):
    """A request does not wait any longer for what is being looked up or loaded."""

    request: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Left(Event):
    """A request ended, in whatever way, or was preempted."""

    request: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Paced(Event):
    """What computing a block costs, as measured: `base_s`, and `slope_s` more for each block before it."""

    base_s: float
    slope_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Vacated(Event):
    """Slots that the brain was told at its start to withhold are used by nobody any more."""

    slots: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PolicyChosen(Event):
    """Blocks are to leave the device in another order from now on."""

    policy: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pinned(Event):
    """Somebody wants what is on the device of a prefix to stay there, under a name."""

    name: str
    keys: tuple[BlockKey, ...]
    tenant: bytes = NO_TENANT
    until_s: float = 0.0  # 0: for good


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Unpinned(Event):
    """It may go again."""

    name: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PurgeBegan(Event):
    """Somebody wants blocks gone: the last of these and all that builds on it; without keys, all of a tenant.

    Until PurgeEnded nothing of them is read from a store or written to one, and what requests have of them is found by
    nobody else, then or later.
    """

    keys: tuple[BlockKey, ...] = ()  # from the first of the path on
    tenant: bytes = NO_TENANT


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PurgeEnded(Event):
    """They were removed from the stores, as far as those can be reached."""


# --- what the executor says -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Copied(Event):
    """A Save has read its blocks from the device; they may change now. The job goes on."""

    job: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stuck(Event):
    """A job is past its time, and one of its copies has not ended: nobody is to wait for it any longer.

    Said of a Load, and of a Save that is `awaited`. Its slots may still be written to or read, and are nobody's, until
    the job ends, which may be never (rule 2).
    """

    job: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobDone(Event):
    """A job ended with a result per block.

    For a Probe HELD or ABSENT; for a Load what a get answers; for Save, Demote and Promote what a put answers, or of a
    Demote MISS where its source did not give the block, whatever the reason. A Load that hit nothing, or a Save that
    stored nothing, is done too. `seconds` is what it took from its start, queueing left out.
    """

    job: int
    results: tuple[Status, ...]
    num_bytes: int = 0
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobFailed(Event):
    """A job ended without a result. A Load that failed may have written to some slots, and writes to none any more."""

    job: int
    failure: Reason  # one of JOB_FAILURES
    why: str = ""
    on_device: bool = dataclasses.field(default=False, metadata={"later": True})  # that says nothing of the store
    elsewhere: bool = dataclasses.field(default=False, metadata={"later": True})  # its store was not reached: see below

    # LATE `elsewhere`: of a Demote, its source did not answer, which says nothing of its target; of a job that comes
    # after another, that one had not ended, so that it never began, which says nothing of any store.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoreOff(Event):
    """A store is not to be used any more: it keeps failing verification, or was damaged (rule 8)."""

    store: str
    why: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoreOn(Event):
    """Somebody put a store right: use it again."""

    store: str


# --- what the brain says ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """Something is to be done, or may be done."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job(Instruction):
    """Work for the executor. Each ends with one JobDone or JobFailed, by its deadline and the time of one copy.

    One whose copy takes longer is Stuck until it ends, if somebody waits for it.
    """

    job: int
    store: str
    keys: tuple[BlockKey, ...]
    deadline_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Probe(Job):
    """Ask a store which blocks it has."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Load(Job):
    """Read and verify blocks, in order, up to the first that is not to be had, into device slots.

    With `valid_tokens` its one block is a prompt's partial tail, of so many tokens (rule 9).
    """

    slots: tuple[int, ...]
    valid_tokens: int = dataclasses.field(default=0, metadata={"later": True})  # 0: full blocks


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Save(Job):
    """Write a row of blocks from device slots to a store, in order. `parent` is the key before the first.

    With `valid_tokens` its one block is a partial tail, which is kept until `expires_at_ms`, in milliseconds since
    1970: zeroed behind its tokens, known to nobody but who was told its name (rule 9).
    """

    slots: tuple[int, ...]
    parent: BlockKey
    depth: int  # of the first
    tenant: bytes
    valid_tokens: int = dataclasses.field(default=0, metadata={"later": True})  # 0: full blocks
    expires_at_ms: int = dataclasses.field(default=0, metadata={"later": True})  # 0: never
    awaited: bool = dataclasses.field(default=False, metadata={"later": True})  # somebody waits: before other saves
    after: int = dataclasses.field(default=0, metadata={"later": True})  # not before this job has ended


def is_waited_for(job: Job) -> bool:
    """Whether somebody who has slots of their own in it waits for a job: if its copy hangs, that is to be said."""
    return isinstance(job, Load) or (isinstance(job, Save) and job.awaited)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoreCopy(Job):
    """Copy a row of sealed blocks as they are, each verified on the way, from `store` to the store `target`."""

    target: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Promote(StoreCopy):
    """To the fastest store, for a request that waits."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Demote(StoreCopy):
    """To a slower store, so that the device is read only once. `parent` is the key before the first."""

    parent: BlockKey
    after: int = 0  # not to begin before this job has ended, however it ends: it writes the row to `store`


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cancel(Instruction):
    """Nobody waits for this job any more. It still ends with an event."""

    job: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Granted(Instruction):
    """The engine may use these slots for a request: all of them, from its first block on."""

    request: str
    slots: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Purged(Instruction):
    """Blocks that were on the device, and that nobody finds there any more. `num_held` leave with who holds them."""

    keys: tuple[BlockKey, ...]
    num_held: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finished(Instruction):
    """What the cache did for a request, in tokens; hits and misses add up to the prompt's full blocks."""

    request: str
    num_tokens: int
    hit_tokens: tuple[tuple[str, int], ...]  # by tier
    miss_tokens: tuple[tuple[str, int], ...]  # by reason
    loaded_bytes: int
    waited_s: float  # for stores to answer, and for what was loaded
    saved_s: float  # what computing the hits would have cost, less the waiting; may be negative


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tell(Instruction):
    """Something a person should know."""

    kind: str
    facts: tuple[tuple[str, str], ...] = ()


# --- what the cluster may hear ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stored(Instruction):
    """A row of blocks is in a tier now: "device", or a store that was seen to have them. `parent` is before the first.

    Said of what was computed, of what a store took or gave verified; never of what somebody merely asked about.
    """

    tier: str
    keys: tuple[BlockKey, ...]
    parent: BlockKey
    depth: int  # of the first


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Removed(Instruction):
    """Blocks are not in a tier any more, or were seen not to be there. Where they lay, who heard them come knows."""

    tier: str
    keys: tuple[BlockKey, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TierLost(Instruction):
    """A store was switched off: nothing is in it, as far as anybody can rely on it."""

    tier: str


Move: TypeAlias = Stored | Removed | TierLost


class MoveListener(Protocol):
    """Who hears what is in which tier; `residency/publisher.py` has one that tells the cluster."""

    def offer(self, moves: Sequence[Move]) -> None:
        """Hear what came to a tier or left one, in order. Must neither block nor raise."""
        ...
