"""Export: have all blocks of a prompt in the pool, the tail included, and prove it. The prefill end of a handoff. Pure.

A Save writes what the pool does not have: a prompt's prefix is mostly there, from other requests or because the cache
has saved it meanwhile. Then the tail; and then a probe whether all of it is there (rule 7): a pool that makes room page
by page may have dropped the first block for the last.
"""

from collections.abc import Callable, Sequence

from headwater.core.events import Instruction, JobDone, JobFailed, Probe, Save
from headwater.core.results import Reason, Status
from headwater.disagg.machine import Handoff, Tries
from headwater.disagg.outcome import AGAIN_WRITE
from headwater.disagg.prompt import NamedPrompt
from headwater.transfer.executor.sliced import SlicedRow


class Export(Handoff):
    """`moved.num_blocks`: blocks in a row, from the first, that were seen in the pool. Whole only with a proof."""

    def __init__(
        self,
        prompt: NamedPrompt,
        slots: Sequence[int],
        *,
        store: str,
        expires_at_ms: int,
        deadline_s: float,
        tries: Tries,
        number: Callable[[], int],
    ) -> None:
        """From slots whose every position of the prompt is computed (rule 1). `expires_at_ms` is the tail's."""
        super().__init__(
            prompt, slots, store=store, deadline_s=deadline_s, again=AGAIN_WRITE, tries=tries, number=number
        )
        self._expires_at_ms = expires_at_ms
        self._asking = False  # what the pool has: a proof, or what is left to say
        self._why: tuple[Reason, str] | None = None  # there will be no proof

    def _cut(self) -> list[SlicedRow]:
        prompt, keys, tail = self.prompt, self.prompt.keys, self.prompt.tail
        self._num_done = 0
        full = Save(
            job=0,
            store=self._store,
            keys=keys,
            deadline_s=self._deadline_s,
            slots=self._slots[: len(keys)],
            parent=prompt.root,
            depth=0,
            tenant=prompt.tenant,
            awaited=True,
        )
        if tail is None:
            return self._cut_rows(full, None)
        last = Save(
            job=0,
            store=self._store,
            keys=(tail.key,),
            deadline_s=self._deadline_s,
            slots=self._slots[-1:],
            parent=keys[-1] if keys else prompt.root,
            depth=len(keys),
            tenant=prompt.tenant,
            valid_tokens=tail.valid_tokens,
            expires_at_ms=self._expires_at_ms,
            awaited=True,
        )
        return self._cut_rows(full, last)

    def _behind_rows(self, now_s: float) -> list[Instruction]:
        if self._stopped:
            return self._failed(Reason.CANCELLED, "nobody wants it any more", now_s)
        return self._ask()

    def _given_up(self, reason: Reason, detail: str, now_s: float) -> list[Instruction]:
        """Say how many blocks are there all the same: where pages of several ranks made room for each other, ask."""
        if reason in _SILENT or self._why is not None or now_s >= self._deadline_s:
            return self._end(reason, detail)
        self._why = reason, detail
        return self._ask()

    def _ask(self) -> list[Instruction]:
        tail = (self.prompt.tail.key,) if self.prompt.tail is not None else ()
        self._asking = True
        keys = (*self.prompt.keys, *tail)
        return self._say(Probe(job=self._number(), store=self._store, keys=keys, deadline_s=self._deadline_s))

    def _ended(self, end: JobDone | JobFailed) -> list[Instruction]:
        if not self._asking:
            return super()._ended(end)
        self._asking = False
        if isinstance(end, JobDone):
            self._num_done = end.results.index(Status.ABSENT) if Status.ABSENT in end.results else len(end.results)
        if self._why is not None:
            return self._end(*self._why)
        if isinstance(end, JobFailed):
            self._num_done = 0
            return self._failed(end.failure, end.why, end.now_s)
        if self._num_done < self.prompt.num_blocks:
            return self._failed(Reason.MISSING, f"block {self._num_done} is not in the pool", end.now_s)
        return self._end()


_SILENT = frozenset({Reason.LATE, Reason.DOWN, Reason.CANCELLED})  # it would not answer either, or nobody asks
