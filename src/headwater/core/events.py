"""What the brain hears and what it says: plain values that survive JSON.

Events come in (what an engine asks for, what became of a job), instructions go out (what the executor shall do, what
the engine may do). Both are frozen and hold nothing but numbers, text, bytes and tuples of them, so that brain and
executor may live in different processes, and an incident is a file of events that can be handled again (`encode`,
`decode`).

Every event says when it happened, in seconds on the clock of whoever runs the brain; the brain has no other.
A *job* is one instruction to the executor, by number. Each job ends with exactly one JobDone or JobFailed, whatever
happens to it; what comes after that is ignored. One whose copy hangs has not ended: of a Load, Stuck says so.
"""

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Protocol, TypeAlias, get_args, get_origin, get_type_hints

from headwater.core.errors import InvalidInput
from headwater.core.keys import BlockKey
from headwater.core.results import JOB_FAILURES, Reason, Status

NO_TENANT: Final = bytes(16)


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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wanted(Event):
    """A request wants slots for its first `num_blocks` blocks, and what pays to be loaded into them."""

    request: str
    num_blocks: int
    load: bool = True
    promised: str = ""  # a store that is known to have all blocks of the prompt: loaded unasked, whatever it costs


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


# --- what the executor says -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Copied(Event):
    """A Save has read its blocks from the device; they may change now. The job goes on."""

    job: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stuck(Event):
    """A Load is past its time, and one of its copies has not ended: nobody is to wait for it any longer.

    Its slots may still be written to, and are nobody's, until the job ends, which may be never (rule 2).
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

    A Load whose copy takes longer is Stuck until it ends.
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


_KINDS: Final[dict[str, type[Event | Instruction]]] = {
    kind.__name__: kind
    for kind in (
        *(Arrived, Wanted, Lent, Filled, GaveUp, Left, Paced, Vacated),
        *(Copied, Stuck, JobDone, JobFailed, StoreOff, StoreOn),
        *(Probe, Load, Save, Demote, Promote, Cancel, Granted, Finished, Tell, Stored, Removed, TierLost),
    )
}
_HINTS: Final = {kind: get_type_hints(kind) for kind in _KINDS.values()}  # to find them takes longer than to decode


def encode(value: Event | Instruction) -> dict[str, Any]:
    """A value as plain JSON: what it is, and its fields. Bytes become `#` and hex, text that begins so gets a `=`.

    Many keys in a row become one text, `#32*` and the hex of all: they are made and read in a twentieth of the time.
    """
    fields = {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return {"is": type(value).__name__, **fields}


def decode(document: Mapping[str, Any]) -> Event | Instruction:
    """What `encode` made. Raises InvalidInput for what it did not make."""
    try:
        fields = {name: _lively(field) for name, field in document.items() if name != "is"}
        kind = _KINDS[document["is"]]
        if kind is JobFailed:
            fields["failure"] = failure = Reason(fields["failure"])
            if failure not in JOB_FAILURES:
                raise ValueError(f"no job fails for {failure.value!r}")
        elif kind is JobDone:
            known = {word: Status(word) for word in set(fields["results"])}  # few, of thousands
            fields["results"] = tuple(map(known.__getitem__, fields["results"]))
        value = kind(**fields)
        hints = _HINTS[kind]
        wrong = [name for name, field in fields.items() if not _fits(field, hints[name])]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidInput(f"neither an event nor an instruction: {error!r}") from error
    if wrong:
        raise InvalidInput(f"neither an event nor an instruction: {', '.join(wrong)} of {document}")
    return value


def fingerprint(values: Iterable[Event | Instruction]) -> str:
    """16 hex digits over values in their order: equal for equal values, in every process. Made to be quick.

    A field that came later says nothing at its default: what was recorded before keeps its fingerprint.
    """
    found = hashlib.blake2b(digest_size=8)
    for value in values:
        found.update(type(value).__name__.encode())
        for field in dataclasses.fields(value):
            one = getattr(value, field.name)
            if field.metadata and one == field.default:
                continue
            if isinstance(one, tuple) and one and all(isinstance(item, bytes) for item in one):
                found.update(b"#%d:%s" % (len(one), b"".join(one)))
            else:
                found.update(f"={one!r}".encode())
    return found.hexdigest()


def _fits(value: object, hint: Any) -> bool:
    """Whether a value is of a type that fields here have."""
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if get_origin(hint) is tuple:
        items = get_args(hint)
        if not isinstance(value, tuple):
            return False
        if items[-1] is Ellipsis:
            plain = getattr(items[0], "__supertype__", items[0])
            if plain in (int, str, bytes, Status):  # thousands of them, of one type
                return set(map(type, value)) <= {plain}
            return all(_fits(item, items[0]) for item in value)
        return len(value) == len(items) and all(map(_fits, value, items))
    return isinstance(value, getattr(hint, "__supertype__", hint))


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return f"#{value.hex()}"
    if isinstance(value, str):
        return f"={value}" if value.startswith(("#", "=")) else str(value)
    if isinstance(value, tuple):
        kinds = set(map(type, value))
        if kinds == {int}:
            return list(value)
        if kinds == {bytes} and len(sizes := set(map(len, value))) == 1 and len(value) > 1 and sizes != {0}:
            return f"#{sizes.pop()}*{b''.join(value).hex()}"
        known: dict[Any, Any] = (
            {item: _plain(item) for item in set(value)} if all(issubclass(kind, str) for kind in kinds) else {}
        )
        return [known[item] if known else _plain(item) for item in value]
    return value


def _lively(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("#"):
        size, star, row = value[1:].partition("*")
        if not star:
            return bytes.fromhex(size)
        width, raw = int(size), bytes.fromhex(row)
        if width < 1 or not raw or len(raw) % width:
            raise ValueError(f"{len(raw)} bytes are no row of {width} each")
        return tuple(raw[at : at + width] for at in range(0, len(raw), width))
    if isinstance(value, str) and value.startswith("="):
        return value[1:]
    if isinstance(value, list):
        kinds = set(map(type, value))  # of thousands, mostly one; and of the words of results there are few
        if kinds <= {int, float}:
            return tuple(value)
        if kinds == {str}:
            known = {item: _lively(item) for item in set(value)}
            return tuple(map(known.__getitem__, value))
        return tuple(_lively(item) for item in value)
    return value
