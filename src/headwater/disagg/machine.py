"""What the two ends of a handoff have in common: rows of blocks as jobs, tried a few times, until one deadline.

Pure: `handle(event) -> [instruction]`. Jobs go to whatever executor the cache uses, events come back from it; who
carries that out is `runner.py`. What is particular to each end is in `exports.py` and `imports.py`.

Invariants:
- One job at a time is under way, and the handoff is over only when it has ended: then nothing touches its slots (rule
  2). Of a job that hangs in its copy Stuck is heard; then the handoff is over too, LATE and `stuck`, and its slots are
  in use (`uses_slots`) until that job ends, which may be never.
- It is over once, with `moved`; after that events change nothing and nothing is said.
- Everything is tried `num_tries` times at most, and nothing is begun behind the deadline.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headwater.config.writes import WriteConfig
from headwater.core.errors import InvalidConfig, InvalidInput
from headwater.core.events import Cancel, Event, Instruction, Job, JobDone, JobFailed, Load, Save, Stuck
from headwater.core.results import Reason
from headwater.disagg.outcome import Moved, why_row
from headwater.disagg.prompt import NamedPrompt
from headwater.transfer.executor.sliced import SlicedRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause(Instruction):
    """Say `Resumed` after so long."""

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed(Event):
    """A pause is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped(Event):
    """Nobody wants the handoff any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tries:
    """How often a handoff is tried, with which pause between, and in slices of how many blocks."""

    num_tries: int = 3
    pause_s: float = 0.02
    slices: WriteConfig = field(default_factory=WriteConfig)

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        if self.num_tries < 1 or not 0 <= self.pause_s < float("inf"):
            raise InvalidConfig(f"at least one try and a pause of seconds, not {self.num_tries} and {self.pause_s}")


class Handoff(ABC):
    """One handoff under way. Not for several threads at once."""

    def __init__(
        self,
        prompt: NamedPrompt,
        slots: Sequence[int],
        *,
        store: str,
        start_block: int = 0,
        deadline_s: float,
        again: frozenset[Reason],
        tries: Tries,
        number: Callable[[], int],
    ) -> None:
        """`slots` are those of the blocks from `start_block` on, the tail included. Raises InvalidInput.

        `deadline_s` is on the executor's clock; `again`: what is worth another try; `number` gives each job one.
        """
        if not 0 <= start_block <= prompt.num_blocks or len(slots) != prompt.num_blocks - start_block:
            raise InvalidInput(f"blocks {start_block} to {prompt.num_blocks} of a prompt, and {len(slots)} slots")
        self.moved: Moved | None = None  # how it ended
        self.prompt = prompt
        self._slots = tuple(slots)
        self._start = start_block
        self._store = store
        self._deadline_s = deadline_s
        self._again = again
        self._tries = tries
        self._number = number
        self._num_done = start_block  # blocks in a row, from the prompt's first, in this try
        self._num_bytes = 0
        self._num_tries = 0
        self._rows: list[SlicedRow] = []
        self._job: int | None = None
        self._pausing = False
        self._stopped = False
        self._worst: tuple[int, Reason, str] | None = None  # what was first wrong with the last block

    @property
    def uses_slots(self) -> bool:
        """Whether a job is under way."""
        return self._job is not None

    def begin(self, now_s: float) -> list[Instruction]:
        """The first instructions."""
        return self._try(now_s)

    def handle(self, event: Event) -> list[Instruction]:
        """What follows from an event."""
        if self.moved is not None:
            if isinstance(event, JobDone | JobFailed) and event.job == self._job:
                self._job = None
            return []
        if isinstance(event, Stuck) and event.job == self._job:
            self._pausing = False
            self.moved = Moved(self._num_done, Reason.LATE, _HANGS, self._num_bytes, self._num_tries, stuck=True)
            return []
        if isinstance(event, Stopped):
            self._stopped = True
            if self._job is not None:
                return [Cancel(job=self._job)]
            return self._failed(Reason.CANCELLED, _UNWANTED, event.now_s) if self._pausing else []
        if isinstance(event, Resumed) and self._pausing:
            self._pausing = False
            return self._try(event.now_s)
        if isinstance(event, JobDone | JobFailed) and event.job == self._job:
            self._job = None
            return self._ended(event)
        return []

    def _try(self, now_s: float) -> list[Instruction]:
        self._num_tries += 1
        self._rows = self._cut()
        return self._go_on(now_s)

    def _go_on(self, now_s: float) -> list[Instruction]:
        """The next job of the rows, or what comes behind them."""
        while self._rows:
            row = self._rows[0]
            if self._stopped:
                row.stop()
            job = row.next_job(now_s)
            if job is not None:
                return self._say(job)
            reached = row.reached
            reason = why_row(reached)
            if reason is not None:
                return self._failed(reason, reached.detail, now_s)
            self._rows.pop(0)
        return self._behind_rows(now_s)

    def _ended(self, end: JobDone | JobFailed) -> list[Instruction]:
        """The job that was under way has ended."""
        row = self._rows[0]
        before = row.num_done
        row.heard(end, end.now_s)
        self._num_done += row.num_done - before
        self._num_bytes += end.num_bytes if isinstance(end, JobDone) else 0
        return self._go_on(end.now_s)

    def _say(self, job: Job) -> list[Instruction]:
        self._job = job.job
        return [job]

    def _failed(self, reason: Reason, detail: str, now_s: float) -> list[Instruction]:
        """A try came to nothing: another one, or that was it."""
        worst = self._worst
        was_removed = worst is not None and worst[0] == self._num_done and reason is Reason.MISSING  # as bad, since
        if worst is None or not was_removed:
            self._worst = worst = self._num_done, reason, detail
        over = self._num_tries >= self._tries.num_tries or self._stopped
        if over or reason not in self._again or self._deadline_s - now_s <= self._tries.pause_s:
            return self._given_up(worst[1], worst[2], now_s)
        self._pausing = True
        return [Pause(seconds=self._tries.pause_s)]

    def _end(self, reason: Reason | None = None, detail: str = "") -> list[Instruction]:
        self._pausing = False
        self.moved = Moved(self._num_done, reason, detail, self._num_bytes, self._num_tries)
        return []

    # --- what the two ends do in their own way ------------------------------------------------------------------------

    @abstractmethod
    def _cut(self) -> list[SlicedRow]:
        """The rows of a try: the full blocks, then the tail."""

    @abstractmethod
    def _behind_rows(self, now_s: float) -> list[Instruction]:
        """All rows are whole."""

    def _given_up(self, reason: Reason, detail: str, now_s: float) -> list[Instruction]:
        """No more tries."""
        return self._end(reason, detail)

    def _cut_rows(self, full: Save | Load, tail: Save | Load | None) -> list[SlicedRow]:
        rows: list[SlicedRow] = []
        depth = self._num_done
        for order in (full, tail):
            if order is None or not order.keys:
                continue
            rows.append(SlicedRow(order, self._tries.slices, self._number, depth=depth))
            depth += len(order.keys)
        return rows


_UNWANTED = "nobody wants it any more"
_HANGS = "a copy between the device and a page hangs"
