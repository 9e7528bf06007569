"""A recording, handled again: the same events into brains made as they were made, and whether they say the same.

Stops at the first difference and names the event. What is compared: what the brain said to each event, by fingerprint;
whether it refused it, or failed at it; and the digest of its state at the end, where the recording has one.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from headwater.cache.lent import LentBrain
from headwater.cache.misses import LentMissBrain, MissBrain
from headwater.cache.state import Brain
from headwater.core.encoding import fingerprint
from headwater.core.errors import InvalidInput
from headwater.lab.replay.recording import Heard, read
from headwater.storage.recording import Began, RecordingCut, RecordingEnded

Tell = Callable[[str, int, int], None]  # stage, done, total

_KINDS: Final[dict[str, type[Brain]]] = {kind.__name__: kind for kind in (Brain, LentBrain, MissBrain, LentMissBrain)}
_EVERY: Final = 256  # events between two reports of progress


@dataclass(frozen=True, slots=True)
class Replayed:
    """What came of a recording."""

    num_events: int  # that were handled
    num_brains: int  # that thought, one after another
    num_failed: int  # of them that failed, then and now
    digest: str  # of the last one's state
    cut: str | None  # why the recording has no end; None: it has
    difference: str | None  # what was not the same, and at which event; None: everything was

    @property
    def same(self) -> bool:
        """Whether everything was as it was."""
        return self.difference is None

    def document(self) -> dict[str, Any]:
        """As plain JSON."""
        return {**asdict(self), "same": self.same}


def replay_events(path: Path, *, tell: Tell | None = None) -> Replayed:
    """Handle a recording again. Blocks for as long as brains think; raises InvalidInput for what is none."""
    brain: Brain | None = None
    num_events = num_brains = num_failed = 0
    cut: str | None = "it ends without a last line: who wrote it was killed"
    difference: str | None = None
    for line in read(path):
        if isinstance(line, Began):
            if line.kind not in _KINDS:
                raise InvalidInput(f"{path}: nobody knows a {line.kind!r}")
            brain = _KINDS[line.kind](line.config, withheld=line.withheld, first_job=line.first_job)
            num_brains += 1
        elif brain is None:
            raise InvalidInput(f"{path}: an event before there was a brain")
        elif isinstance(line, Heard):
            num_events += 1
            num_failed += bool(line.failed)
            if tell is not None and not num_events % _EVERY:
                tell("events", num_events, 0)
            found = _differs(line, brain)
            if found is not None:
                difference = f"event {num_events}, a {type(line.event).__name__}: {found}"
                break
        elif isinstance(line, RecordingEnded):
            cut = None
            if line.digest != brain.digest():
                difference = f"after event {num_events}: it said the same to every event, and its state is another"
        elif isinstance(line, RecordingCut):
            cut = line.why
    return Replayed(num_events, num_brains, num_failed, _digest(brain), cut, difference)


def _digest(brain: Brain | None) -> str:
    """Of its state; nothing for one that failed so that it cannot even be read."""
    try:
        return brain.digest() if brain is not None else ""
    except Exception:  # noqa: BLE001  it has been said that it failed
        return ""


def _differs(line: Heard, brain: Brain) -> str | None:
    """What is not as it was, if anything is."""
    was = "took it in"
    if line.failed:
        was = f"failed ({line.failed})"
    elif line.refused:
        was = "refused it"
    try:
        said = fingerprint(brain.handle(line.event))
    except InvalidInput as error:
        return None if line.refused else f"it {was} then, and refuses it now: {error}"
    except Exception as error:  # noqa: BLE001  whatever it is: that is what is looked for
        return None if line.failed else f"it {was} then, and fails now: {type(error).__name__}: {error}"
    if line.failed or line.refused:
        return f"it {was} then, and takes it in now"
    return None if said == line.said else f"it said {line.said} then, and {said} now"
