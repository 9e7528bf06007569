"""Request traces: read, checked line by line, and named as production names blocks.

A trace is one JSON object a line, in order of time: `timestamp` (milliseconds), `input_length` and `output_length`
(tokens), `hash_ids` (one number per block of the prompt, the last one maybe not full), and maybe `session_id` (text:
whose turn it is; only the policy `session` looks at it). Other fields are passed over. It is read anew for each pass
and never held as a whole.

A block's key is `core.keys.block_keys` over the ids, each as one block of two tokens (a 64-bit id is two u32). So two
blocks share a key exactly where their ids *and* all ids before them are equal, whatever a trace means by an id;
`survey` counts the ids that stand behind different prefixes. Not here: tokens, which a trace does not have, and so
nothing of what a request generated, until a later prompt repeats it.
"""

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from headwater.core.errors import InvalidConfig, InvalidInput
from headwater.core.keys import BlockKey, block_keys

ROOT: Final = BlockKey(hashlib.sha256(b"headwater replay").digest())
_MAX_ID: Final = 1 << 64
_MAX_NUMBER: Final = 1 << 53
_SHOWN: Final = 40  # characters of a bad value
_EVERY: Final = 512  # requests between two reports of progress

Tell = Callable[[str, int, int], None]  # stage, done, total


class TraceRecord(NamedTuple):
    """One line of a trace."""

    timestamp_ms: float
    input_tokens: int
    output_tokens: int
    ids: tuple[int, ...]
    session: str = ""


class TraceRequest(NamedTuple):
    """One request as the cache sees it: when it came, and its blocks by the trace's ids and by our keys."""

    at_s: float
    ids: tuple[int, ...]
    keys: tuple[BlockKey, ...]
    session: str = ""  # whose turn it is, if the trace says it


class Trace(ABC):
    """Requests in order of time, as often as they are asked for."""

    def __init__(self, name: str, *, block_tokens: int = 512, full_blocks_only: bool = False) -> None:
        """With `full_blocks_only` a last block that is not full is left out, as an engine leaves it unnamed."""
        if not 0 < block_tokens < 1 << 31:
            raise InvalidConfig(f"a block has a positive number of tokens, not {block_tokens}")
        self.name = name
        self.block_tokens = block_tokens
        self.full_blocks_only = full_blocks_only

    @abstractmethod
    def records(self) -> Iterator[TraceRecord]:
        """The lines, checked, from the first on."""

    def __iter__(self) -> Iterator[TraceRequest]:
        """The requests, from the first on. Raises InvalidInput at a line that is none."""
        for record in self.records():
            ids = record.ids
            if self.full_blocks_only:
                ids = ids[: record.input_tokens // self.block_tokens]
            yield TraceRequest(record.timestamp_ms / 1e3, ids, keys_of(ids), record.session)


class TraceFile(Trace):
    """A trace in a JSONL file."""

    def __init__(self, path: Path, *, block_tokens: int = 512, full_blocks_only: bool = False) -> None:
        super().__init__(str(path), block_tokens=block_tokens, full_blocks_only=full_blocks_only)
        if path.exists() and not (path.is_file() or path.is_dir()):  # a pipe; of a directory open() tells
            raise InvalidConfig(f"{path}: a trace is read several times, so it must be a file")
        self._path = path

    def records(self) -> Iterator[TraceRecord]:
        """Read the file. Raises OSError, and InvalidInput with file and line for what is not a request."""
        before_ms = 0.0
        with self._path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    record = _record(line, self.block_tokens)
                    if record.timestamp_ms < before_ms:
                        raise InvalidInput(f"timestamp goes back, from {before_ms:g} to {record.timestamp_ms:g}")
                except InvalidInput as error:
                    raise InvalidInput(f"{self.name}:{number}: {error}") from None
                before_ms = record.timestamp_ms
                yield record


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSurvey:
    """What a trace holds, and what an unbounded cache would hit of it."""

    num_requests: int
    num_blocks: int  # requested, every request's own
    num_unique_blocks: int
    longest_blocks: int
    span_s: float
    unbounded_hit_blocks: int  # blocks that were requested before, behind the same prefix
    num_ids_behind_two_prefixes: int

    @property
    def unbounded_hit_ratio(self) -> float:
        """Hit blocks over requested blocks where nothing is ever evicted: what no cache can exceed."""
        return self.unbounded_hit_blocks / self.num_blocks


def keys_of(ids: tuple[int, ...]) -> tuple[BlockKey, ...]:
    """Keys of a prompt's blocks: equal where an id and all before it are equal."""
    return tuple(block_keys(np.array(ids, dtype="<u8").view("<u4"), parent=ROOT, block_tokens=2))


def survey(
    trace: Trace, *, each: Callable[[TraceRequest], None] | None = None, tell: Tell | None = None
) -> TraceSurvey:
    """Read a trace once; `each` hears every request. Raises InvalidInput for a bad line, or if there is no block."""
    seen: set[BlockKey] = set()
    first_key: dict[int, BlockKey] = {}
    ambiguous: set[int] = set()
    num_requests = num_blocks = hits = longest = 0
    begin_s = end_s = 0.0
    for request in trace:
        end_s = request.at_s
        if not num_requests:
            begin_s = end_s
        num_requests += 1
        num_blocks += len(request.keys)
        longest = max(longest, len(request.keys))
        hits += sum(key in seen for key in request.keys)  # of a path that was seen all was seen: keys are chained
        seen.update(request.keys)
        for number, key in zip(request.ids, request.keys, strict=True):
            if first_key.setdefault(number, key) != key:
                ambiguous.add(number)
        if each is not None:
            each(request)
        if tell is not None and not num_requests % _EVERY:
            tell("reading", num_requests, num_requests)
    if not num_blocks:
        raise InvalidInput(f"{trace.name}: no block is requested in {num_requests} requests")
    return TraceSurvey(
        num_requests=num_requests,
        num_blocks=num_blocks,
        num_unique_blocks=len(seen),
        longest_blocks=longest,
        span_s=end_s - begin_s,
        unbounded_hit_blocks=hits,
        num_ids_behind_two_prefixes=len(ambiguous),
    )


def _record(line: bytes, block_tokens: int) -> TraceRecord:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        raise InvalidInput(f"not JSON: {_short(line.decode(errors='replace').strip())}") from None
    if not isinstance(found, dict):
        raise InvalidInput(f"not an object of a request's fields: {_short(found)}")
    timestamp = _field(found, "timestamp")
    if not (isinstance(timestamp, int | float) and not isinstance(timestamp, bool) and 0 <= timestamp < _MAX_NUMBER):
        raise InvalidInput(f"timestamp must be a number of milliseconds, not {_short(timestamp)}")
    input_tokens, output_tokens = (_count(found, name) for name in ("input_length", "output_length"))
    ids = _field(found, "hash_ids")
    if not isinstance(ids, list):
        raise InvalidInput(f"hash_ids must be a list of numbers, not {_short(ids)}")
    bad = next((one for one in ids if type(one) is not int or not 0 <= one < _MAX_ID), None)
    if bad is not None or None in ids:
        raise InvalidInput(f"hash_ids must be whole numbers of 64 bits, not {_short(bad)}")
    wanted = math.ceil(input_tokens / block_tokens)
    if len(ids) != wanted:
        raise InvalidInput(
            f"{len(ids)} hash_ids, and {input_tokens} tokens are {wanted} blocks of {block_tokens} (--block-tokens)"
        )
    session = found.get("session_id")
    if not (session is None or isinstance(session, str)):
        raise InvalidInput(f"session_id must be text, not {_short(session)}")
    return TraceRecord(float(timestamp), input_tokens, output_tokens, tuple(ids), session or "")


def _field(found: dict[str, Any], name: str) -> Any:
    if name not in found:
        raise InvalidInput(f"no {name}")
    return found[name]


def _count(found: dict[str, Any], name: str) -> int:
    value = _field(found, name)
    if type(value) is not int or not 0 <= value < _MAX_NUMBER:
        raise InvalidInput(f"{name} must be a whole number of tokens, not {_short(value)}")
    return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."
