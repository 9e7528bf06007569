"""Import: have all blocks that a ticket names in device slots, the tail included. The decode end of a handoff. Pure.

What is missing may be on its way, what is bad was removed: so it goes on where it stopped, a few times.
"""

from collections.abc import Callable, Sequence

from headwater.core.events import Instruction, Load
from headwater.disagg.machine import Handoff, Tries
from headwater.disagg.outcome import AGAIN_READ
from headwater.disagg.prompt import NamedPrompt
from headwater.transfer.executor.sliced import SlicedRow


class Import(Handoff):
    """`moved.num_blocks`: blocks in a row, from the prompt's first, that are in their slots, verified."""

    def __init__(
        self,
        prompt: NamedPrompt,
        slots: Sequence[int],
        *,
        store: str,
        start_block: int,
        deadline_s: float,
        tries: Tries,
        number: Callable[[], int],
    ) -> None:
        """The blocks before `start_block` count as there, and have no slots here."""
        super().__init__(
            prompt,
            slots,
            store=store,
            start_block=start_block,
            deadline_s=deadline_s,
            again=AGAIN_READ,
            tries=tries,
            number=number,
        )

    def _cut(self) -> list[SlicedRow]:
        keys, tail, done = self.prompt.keys, self.prompt.tail, self._num_done
        slots = self._slots[done - self._start :]
        num_full = max(0, len(keys) - done)
        full = Load(job=0, store=self._store, keys=keys[done:], deadline_s=self._deadline_s, slots=slots[:num_full])
        if tail is None or done > len(keys):
            return self._cut_rows(full, None)
        last = Load(
            job=0,
            store=self._store,
            keys=(tail.key,),
            deadline_s=self._deadline_s,
            slots=slots[-1:],
            valid_tokens=tail.valid_tokens,
        )
        return self._cut_rows(full, last)

    def _behind_rows(self, now_s: float) -> list[Instruction]:
        return self._end()
