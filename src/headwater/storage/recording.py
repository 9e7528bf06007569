"""A recording: a file of all that a brain heard, so that it can be handled again (`headwater replay --events FILE`).

JSON lines. First what wrote it; then, for each brain that thought for the cache, with what it began and every event it
heard, each with a fingerprint of what it said; at the end a digest of its state. A recording is of use only from its
beginning on, so it is bounded by stopping: at `limit_bytes`, or where events come faster than they are written, a last
line says that it is *cut*, the log too, and what comes afterwards is counted as dropped.

Who records (`FileRecorder`) puts events into a queue, and never waits; a thread makes lines of them. Prompts are long
and come again and again, so a list of keys is written as the list that it begins with and the rest.

Not here: how it is read, and what happens with the events then (`lab/replay/recording.py`, `events.py`).
"""

import dataclasses
import hashlib
import json
import logging
import os
import queue
import threading
from collections.abc import Collection, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

from headwater.config.cache import CacheConfig
from headwater.config.serve import MIN_RECORD_BYTES
from headwater.core import encoding
from headwater.core import events as ev
from headwater.core.errors import InvalidConfig
from headwater.core.keys import BlockKey
from headwater.core.version import __version__
from headwater.metrics import Metrics

log: Final = logging.getLogger("headwater")

FORMATS: Final = "headwater recording "  # and a number
FORMAT: Final = f"{FORMATS}2"  # a new number whenever events, instructions or configs change their names or meaning
_LAST_BYTES: Final = 512  # kept for the last line
_MOST_QUEUED: Final = 8192  # events that are not written yet
_BATCH_BYTES: Final = 1 << 20
_MOST_LISTS: Final = 1 << 16  # lists of keys that others may begin with
_CLOSE_S: Final = 5.0


class Thinker(Protocol):
    """What is to be known of a brain (`cache/state.py`)."""

    @property
    def config(self) -> CacheConfig:
        """What it knows of the cache."""
        ...

    @property
    def first_job(self) -> int:
        """The number of its first job."""
        ...

    @property
    def withheld(self) -> Collection[int]:
        """Slots that it does not use yet."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Began:
    """A brain began to think."""

    kind: str
    config: CacheConfig
    withheld: tuple[int, ...] = ()
    first_job: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class RecordingEnded:
    """The cache was closed: the state of its brain, and how many events it had heard of all brains."""

    digest: str
    num_events: int


@dataclasses.dataclass(frozen=True, slots=True)
class RecordingCut:
    """The recording ends here, and the story does not."""

    why: str


_Raw: TypeAlias = tuple[ev.Event, tuple[ev.Instruction, ...] | None, str]  # None: refused; else why it failed


class FileRecorder:
    """Writes a recording. A Recorder of a cache (`cache/executor.py`): nothing but `close` blocks, nothing raises."""

    def __init__(self, path: Path, *, limit_bytes: int, metrics: Metrics | None = None) -> None:
        """Begins a new file; one of an earlier run is kept as `FILE.1`. Raises InvalidConfig if that cannot be."""
        if limit_bytes < MIN_RECORD_BYTES:
            raise InvalidConfig(f"a recording needs at least {MIN_RECORD_BYTES} bytes, not {limit_bytes}")
        try:
            if path.is_file() and not path.is_symlink():
                os.replace(path, path.with_name(f"{path.name}.1"))
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise InvalidConfig(f"nothing can be recorded in {path}: {error.strerror}") from error
        self.path: Final = path
        self._limit_bytes = limit_bytes
        self._metrics = metrics if metrics is not None else Metrics()
        self._queue: queue.SimpleQueue[Began | _Raw | RecordingEnded | RecordingCut | None] = queue.SimpleQueue()
        self._is_cut = False  # nothing more is queued,
        self._is_full = False  # and nothing more written
        self._num_events = 0
        self._lines = _RecordingLines()
        self._batch: list[bytes] = []  # the thread's: lines that are not written yet
        self._batch_bytes = self._batch_events = 0
        self._num_bytes = 0
        self._thread = threading.Thread(target=self._run, name="headwater recording", daemon=True)
        self._thread.start()

    # --- what a cache says, with its lock held ------------------------------------------------------------------------

    def began(self, brain: Thinker) -> None:
        """Another brain thinks from now on."""
        if not self._is_cut:
            self._queue.put(Began(type(brain).__name__, brain.config, tuple(sorted(brain.withheld)), brain.first_job))

    def heard(self, event: ev.Event, said: Sequence[ev.Instruction]) -> None:
        """It took an event in."""
        self._put((event, tuple(said), ""))

    def refused(self, event: ev.Event) -> None:
        """It did not, and changed nothing."""
        self._put((event, None, ""))

    def failed(self, event: ev.Event, why: str) -> None:
        """It failed."""
        self._put((event, None, why))

    def ended(self, digest: str) -> None:
        """The cache is closed."""
        if not self._is_cut:
            self._queue.put(RecordingEnded(digest, self._num_events))

    def _put(self, raw: _Raw) -> None:
        if not self._is_cut and self._queue.qsize() >= _MOST_QUEUED:
            self._is_cut = True
            self._queue.put(RecordingCut(f"{_MOST_QUEUED} events came faster than they were written"))
        if self._is_cut:
            self._metrics.count("recorded_events_total", outcome="dropped")
            return
        self._num_events += 1
        self._queue.put(raw)

    def close(self, timeout_s: float = _CLOSE_S) -> bool:
        """Write what is left, and end. Blocks, until the time is over at most; then False. Idempotent."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._add(_packed({"recording": FORMAT, "headwater": __version__}))
        try:
            while (item := self._queue.get()) is not None:
                if not self._is_full:
                    self._take(item)
                if self._queue.empty() or self._batch_bytes >= _BATCH_BYTES:
                    self._write()
            self._write()
        finally:
            os.close(self._fd)

    def _take(self, item: Began | _Raw | RecordingEnded | RecordingCut) -> None:
        line = _packed(self._lines.document(item))
        if not isinstance(item, RecordingCut) and self._num_bytes + len(line) > self._limit_bytes - _LAST_BYTES:
            item = RecordingCut(f"{self._limit_bytes} bytes are full")
            line = _packed(self._lines.document(item))
        self._add(line, is_event=isinstance(item, tuple))
        if isinstance(item, RecordingCut):
            self._write()
            self._stop(item.why)

    def _add(self, line: bytes, *, is_event: bool = False) -> None:
        self._batch.append(line)
        self._batch_bytes += len(line)
        self._num_bytes += len(line)
        self._batch_events += is_event

    def _write(self) -> None:
        view, num_events = memoryview(b"".join(self._batch)), self._batch_events
        self._batch, self._batch_bytes, self._batch_events = [], 0, 0
        try:
            while view:
                view = view[os.write(self._fd, view) :]
            self._metrics.count("recorded_events_total", num_events, outcome="written")
        except OSError as error:
            self._metrics.count("recorded_events_total", num_events, outcome="dropped")
            self._stop(str(error.strerror))

    def _stop(self, why: str) -> None:
        """Nothing more is written."""
        self._is_cut = self._is_full = True
        log.warning("the recording %s is cut, and is written no further: %s", self.path, why)
        self._metrics.event("recording_cut", path=str(self.path), why=why)


# --- lines ------------------------------------------------------------------------------------------------------------


class _RecordingLines:
    """Makes documents of what is to be written. Remembers which lists of keys it has written."""

    def __init__(self) -> None:
        self._lists: dict[BlockKey, tuple[int, int, bytes]] = {}  # by their last key: which, how long, a digest
        self._num_lists = 0

    def document(self, item: Began | _Raw | RecordingEnded | RecordingCut) -> dict[str, Any]:
        if isinstance(item, Began):
            return {
                "brain": item.kind,
                "config": dataclasses.asdict(item.config),
                "withheld": item.withheld,
                "first_job": item.first_job,
            }
        if isinstance(item, RecordingEnded):
            return {"end": item.digest, "events": item.num_events}
        if isinstance(item, RecordingCut):
            return {"cut": item.why}
        event, said, why = item
        document: dict[str, Any] = {"event": self._event(event)}
        if said is not None:
            document["said"] = encoding.fingerprint(said)
        elif why:
            document["failed"] = why
        else:
            document["refused"] = True
        return document

    def _event(self, event: ev.Event) -> dict[str, Any]:
        if isinstance(event, ev.Arrived | ev.Filled):
            return {**encoding.encode(dataclasses.replace(event, keys=())), "keys": self._keys(event.keys)}
        if isinstance(event, ev.JobDone):
            runs = [[result, sum(1 for _ in same)] for result, same in groupby(event.results)]
            return {**encoding.encode(dataclasses.replace(event, results=())), "results": runs}
        return encoding.encode(event)

    def _keys(self, keys: tuple[BlockKey, ...]) -> dict[str, Any]:
        """A list of keys: those of an earlier one, and more."""
        after, start = -1, 0
        for end in range(len(keys), 0, -1):
            found = self._lists.get(keys[end - 1])
            if found is not None and found[1] == end and found[2] == _digest(keys[:end]):
                after, start = found[0], end
                break
        if start < len(keys):
            if len(self._lists) >= _MOST_LISTS:
                self._lists.clear()
            self._lists[keys[-1]] = (self._num_lists, len(keys), _digest(keys))
            self._num_lists += 1
        return {"after": after, "more": [key.hex() for key in keys[start:]]}


def _packed(document: dict[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode() + b"\n"


def _digest(keys: Sequence[BlockKey]) -> bytes:
    return hashlib.blake2b(b"".join(keys), digest_size=16).digest()
