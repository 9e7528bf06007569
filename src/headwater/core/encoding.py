"""Events and instructions as plain JSON, and back; and a fingerprint of them.

For links between processes and for recordings. What is not of `core/events.py` is refused. No bytes but these: what is
sent or written, and when, is not decided here.
"""

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, Final, get_args, get_origin, get_type_hints

from headwater.core import events as ev
from headwater.core.errors import InvalidInput
from headwater.core.results import JOB_FAILURES, Reason, Status

_KINDS: Final[dict[str, type[ev.Event | ev.Instruction]]] = {
    kind.__name__: kind
    for kind in (
        *(ev.Arrived, ev.Wanted, ev.Lent, ev.Filled, ev.Claimed, ev.GaveUp, ev.Left, ev.Paced, ev.Vacated),
        *(ev.PolicyChosen, ev.Pinned, ev.Unpinned, ev.PurgeBegan, ev.PurgeEnded, ev.Purged),
        *(ev.Copied, ev.Stuck, ev.JobDone, ev.JobFailed, ev.StoreOff, ev.StoreOn),
        *(ev.Probe, ev.Load, ev.Save, ev.Demote, ev.Promote, ev.Cancel, ev.Granted, ev.Finished),
        *(ev.Tell, ev.Stored, ev.Removed, ev.TierLost),
    )
}
_HINTS: Final = {kind: get_type_hints(kind) for kind in _KINDS.values()}  # to find them takes longer than to decode


def encode(value: ev.Event | ev.Instruction) -> dict[str, Any]:
    """A value as plain JSON: what it is, and its fields. Bytes become `#` and hex, text that begins so gets a `=`.

    Many keys in a row become one text, `#32*` and the hex of all: they are made and read in half the time.
    """
    fields = {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return {"is": type(value).__name__, **fields}


def decode(document: Mapping[str, Any]) -> ev.Event | ev.Instruction:
    """What `encode` made. Raises InvalidInput for what it did not make."""
    try:
        fields = {name: _lively(field) for name, field in document.items() if name != "is"}
        kind = _KINDS[document["is"]]
        if kind is ev.JobFailed:
            fields["failure"] = failure = Reason(fields["failure"])
            if failure not in JOB_FAILURES:
                raise ValueError(f"no job fails for {failure.value!r}")
        elif kind is ev.JobDone:
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


def fingerprint(values: Iterable[ev.Event | ev.Instruction]) -> str:
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
