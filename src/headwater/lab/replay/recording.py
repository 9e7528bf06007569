"""A recording, read back: what `storage/recording.py` wrote, line by line, as values."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from headwater.config.cache import CacheConfig, TierConfig
from headwater.core import encoding
from headwater.core import events as ev
from headwater.core.errors import InvalidInput
from headwater.core.keys import BlockKey
from headwater.core.results import Status
from headwater.storage.recording import FORMAT, FORMATS, Began, RecordingCut, RecordingEnded


@dataclass(frozen=True, slots=True)
class Heard:
    """It heard an event: what it said to that, as a fingerprint; or that it refused it; or why it failed at it."""

    event: ev.Event
    said: str = ""
    refused: bool = False
    failed: str = ""


Line: TypeAlias = Began | Heard | RecordingEnded | RecordingCut


class _Reader:
    """Reads documents back. Raises KeyError, TypeError, ValueError, IndexError for what is none."""

    def __init__(self) -> None:
        self._lists: list[tuple[BlockKey, ...]] = []

    def line(self, document: dict[str, Any]) -> Line:
        if "brain" in document:
            config = dict(document["config"])
            tiers = tuple(TierConfig(**tier) for tier in config.pop("tiers"))
            return Began(
                document["brain"],
                CacheConfig(**config, tiers=tiers),
                tuple(document["withheld"]),
                document["first_job"],
            )
        if "end" in document:
            return RecordingEnded(document["end"], document["events"])
        if "cut" in document:
            return RecordingCut(document["cut"])
        event = self._event(document["event"])
        return Heard(event, document.get("said", ""), document.get("refused", False), document.get("failed", ""))

    def _event(self, document: dict[str, Any]) -> ev.Event:
        more: dict[str, Any] = {}
        if document["is"] in (ev.Arrived.__name__, ev.Filled.__name__):
            more["keys"] = self._keys(document.pop("keys"))
            document["keys"] = []
        elif document["is"] == ev.JobDone.__name__:
            more["results"] = tuple(Status(result) for result, num in document.pop("results") for _ in range(num))
            document["results"] = []
        event = encoding.decode(document)
        if not isinstance(event, ev.Event):
            raise ValueError("an instruction, and no event")
        return replace(event, **more)

    def _keys(self, document: dict[str, Any]) -> tuple[BlockKey, ...]:
        before = self._lists[document["after"]] if document["after"] >= 0 else ()
        keys = (*before, *(BlockKey(bytes.fromhex(key)) for key in document["more"]))
        if document["more"]:
            self._lists.append(keys)
        return keys


class _OtherFormat(InvalidInput):
    """A recording, and of another version of the format."""


def _check_format(path: Path, document: dict[str, Any]) -> None:
    """Raise _OtherFormat for a recording of another version of the format, ValueError for what is none."""
    found = document.get("recording")
    if found == FORMAT:
        return
    if isinstance(found, str) and found.startswith(FORMATS) and found.removeprefix(FORMATS).isdecimal():
        by = document.get("headwater", "of no version")
        raise _OtherFormat(f"{path} is a {found!r}, written by Headwater {by}, and this one reads {FORMAT!r} only")
    raise ValueError(f"it does not begin with {FORMAT!r}")


def read(path: Path) -> Iterator[Line]:
    """What is in a recording, in order. Raises InvalidInput for a file that is none, or has a line that is none."""
    reader, number, last = _Reader(), 0, b""
    try:
        with path.open("rb") as file:
            for number, last in enumerate(file, 1):
                if not last.endswith(b"\n"):
                    break
                document = json.loads(last)
                if number == 1:
                    _check_format(path, document)
                else:
                    yield reader.line(document)
    except _OtherFormat:
        raise
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, RecursionError) as error:
        raise InvalidInput(f"{path} is no recording: line {number}: {error!r}") from error
    if number and not last.endswith(b"\n"):
        yield RecordingCut("who wrote it ended in the middle of a line")
    if not number:
        raise InvalidInput(f"{path} is no recording: it is empty")
