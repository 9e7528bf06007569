"""What a node says about the blocks it holds: plain values that survive JSON, and are true whenever they are read.

A `Change` gives the *state* of a row of blocks: every tier of the node that they are in now, none included. It is no
difference to what was said before. So it may be said twice, and of several changes of one block only the last counts.
A block's key is a chained digest of all tokens from the first on (`core/keys.py`): the key *is* the whole token path,
and `parent` and `depth` say where in it the row lies. A shared block has one key, whoever uses it.

An `Update` is what goes over a link: changes, numbered without gaps (`sequence`) in the life of one process of a node
(`epoch`). Changes may get lost on the way; so now and then a node says everything (a *round*): BEGIN, changes, END.
What was not said in a round is not there. `Applied` is what comes back.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from headwater.core.errors import InvalidInput
from headwater.core.keys import BlockKey
from headwater.core.page import KEY_BYTES

FORMAT: Final = "headwater/residency/1"
MAX_EPOCH: Final = 1 << 53  # epochs and sequence numbers are exact in everybody's arithmetic


class Applied(enum.StrEnum):
    """What became of an update, and what its node has to do."""

    APPLIED = "applied"
    STALE = "stale"  # heard before: nothing to do
    RESYNC = "resync"  # applied, now or before, but something else was lost: begin a round
    UNKNOWN = "unknown"  # not applied: nothing is known of this node, or its lease ran out: begin a round
    FENCED = "fenced"  # not applied: a newer process has the node's name
    FAILED = "failed"  # nobody knows: say it again


class State(enum.IntFlag):
    """In which tiers of a node a block is. NONE: it is gone."""

    NONE = 0
    DEVICE = 1
    HOST = 2
    DISK = 4
    POOL = 8

    @property
    def tiers(self) -> tuple[str, ...]:
        """The names of the tiers, fastest first; none for NONE."""
        return tuple(name for name, bit in TIERS.items() if self & bit)


TIERS: Final[Mapping[str, int]] = {name: int(State[name.upper()]) for name in ("device", "host", "disk", "pool")}
_ALL: Final = sum(TIERS.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Blocks in a row are in exactly these tiers of the node now. `parent` is the key before the first."""

    parent: BlockKey
    depth: int  # of the first
    keys: tuple[BlockKey, ...]
    state: State


class UpdateKind(enum.StrEnum):
    """What an update is for."""

    BEGIN = "begin"  # of a round: everything will be said again
    CHANGE = "change"  # something changed; with no changes: the node lives
    END = "end"  # of a round: what was not said since its BEGIN is not there
    LEAVE = "leave"  # the node goes, and nothing of it is there


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One message of a node. Holds for `lease_s` seconds; who then hears nothing takes the node for dead."""

    node: str
    epoch: int
    sequence: int
    round: int
    kind: UpdateKind
    lease_s: float
    changes: tuple[Change, ...] = ()

    @property
    def num_blocks(self) -> int:
        """Blocks that it speaks of."""
        return sum(len(change.keys) for change in self.changes)


def encode(update: Update) -> dict[str, Any]:
    """An update as plain JSON."""
    return {
        "is": FORMAT,
        "node": update.node,
        "epoch": update.epoch,
        "sequence": update.sequence,
        "round": update.round,
        "kind": update.kind.value,
        "lease_s": update.lease_s,
        "changes": [
            [change.parent.hex(), change.depth, b"".join(change.keys).hex(), list(change.state.tiers)]
            for change in update.changes
        ],
    }


def decode(document: Mapping[str, Any]) -> Update:
    """What `encode` made. Raises InvalidInput for what it did not make."""
    try:
        if document["is"] != FORMAT:
            raise InvalidInput(f"not of the format {FORMAT}")
        update = Update(
            node=document["node"],
            epoch=document["epoch"],
            sequence=document["sequence"],
            round=document["round"],
            kind=UpdateKind(document["kind"]),
            lease_s=document["lease_s"],
            changes=tuple(map(_change, document["changes"])),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidInput(f"not what a node says: {error!r}") from error
    require(update)
    return update


def require(update: Update) -> None:
    """Raise InvalidInput for an update that nobody could have made."""
    node: object = update.node
    if not (isinstance(node, str) and node and node.isprintable() and len(node) <= 200):
        raise InvalidInput(f"a node's name is printable and at most 200 characters, not {node!r}")
    for name in ("epoch", "sequence", "round"):
        number: object = getattr(update, name)
        if not (isinstance(number, int) and not isinstance(number, bool) and 0 <= number < MAX_EPOCH):
            raise InvalidInput(f"{name} must be a whole number below 2**53, not {number!r}")
    lease_s: object = update.lease_s
    if not (isinstance(lease_s, int | float) and 0 < lease_s < 86_400):
        raise InvalidInput(f"lease_s must be seconds of a day at most, not {lease_s!r}")
    for change in update.changes:
        depth: object = change.depth
        if not (isinstance(depth, int) and 0 <= depth < 1 << 32) or not 0 <= change.state <= _ALL:
            raise InvalidInput(f"no state of a row of blocks: {change}")
        if {len(key) for key in (change.parent, *change.keys)} != {KEY_BYTES} or not change.keys:
            raise InvalidInput(f"a change is about blocks, whose keys have {KEY_BYTES} bytes")


def _change(document: Any) -> Change:
    parent, depth, keys, tiers = document
    joined = bytes.fromhex(keys)
    rows = [BlockKey(joined[at : at + KEY_BYTES]) for at in range(0, len(joined), KEY_BYTES)]
    bits = sum(TIERS[name] for name in set(tiers))
    return Change(parent=BlockKey(bytes.fromhex(parent)), depth=depth, keys=tuple(rows), state=State(bits))
