"""Rows: blocks in a row written to a store and read from it through an executor, slice by slice, and waited for.

For who has neither a brain nor a loop of its own: `write` and `read` give the slices of a row (`sliced.py`) to the
executor one after another and block until the last has ended. Runs in the thread of whoever asks; decides nothing about
what is worth writing, and keeps nothing between calls. Which tokens the blocks are of is `attention_store.py`'s
business.

Invariants:
- The result counts blocks from the row's first, without a gap (`sliced.py`).
- `write` and `read` return by the total deadline + the executor's grace, and touch no slot after that, with one
  exception: a slice whose copy hangs. Then they say STUCK, and its slots are lent (`lent_slots`) until the copy ends;
  rows with such slots are refused (rule 2).
"""

import logging
from collections.abc import Callable, Sequence
from typing import Final

from headwater.config.writes import WriteConfig
from headwater.core.errors import InvalidInput
from headwater.core.events import NO_TENANT, JobFailed, Load, Probe, Save, Stuck
from headwater.core.keys import BlockKey
from headwater.core.results import Reason, Status
from headwater.transfer.executor.caller import Caller
from headwater.transfer.executor.sliced import Reached, SlicedRow

log: Final = logging.getLogger("headwater")


class Rows:
    """Sliced writes and reads of one store. Several threads may use it at once; it owns nothing."""

    def __init__(self, caller: Caller, store: str, *, config: WriteConfig | None = None) -> None:
        self.store = store
        self._caller = caller
        self._config = config if config is not None else WriteConfig()

    def probe(self, keys: Sequence[BlockKey], *, timeout_s: float) -> Reached:
        """How many blocks seem to be there, without a gap: a hint, from one question. Blocks, `timeout_s` at most."""
        until_s = self._caller.clock.monotonic() + timeout_s
        if not keys:
            return Reached(0, Reason.WHOLE)
        order = Probe(job=self._caller.number(), store=self.store, keys=tuple(keys), deadline_s=until_s)
        end = self._caller.call(order)
        if isinstance(end, Stuck):  # a question has no slots: that is all there is to say
            return Reached(0, Reason.TOTAL_TIMEOUT, "the executor does not answer")
        if isinstance(end, JobFailed):
            late = end.failure is Reason.LATE
            return Reached(0, Reason.TOTAL_TIMEOUT if late else end.failure, end.why)
        num_blocks = end.results.index(Status.ABSENT) if Status.ABSENT in end.results else len(end.results)
        return Reached(num_blocks, Reason.WHOLE if num_blocks == len(keys) else Reason.INCOMPLETE)

    def write(
        self,
        keys: Sequence[BlockKey],
        slots: Sequence[int],
        *,
        parent: BlockKey,
        depth: int = 0,
        tenant: bytes = NO_TENANT,
        timeout_s: float | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Reached:
        """Write a row of full blocks from device slots. Blocks, by the deadlines; raises InvalidInput only.

        `parent` is the key before the first, which lies at `depth`. `timeout_s` is the total, the configuration's
        unless given. `stopped` is asked before each slice, and must not block. The slots must not change meanwhile.
        """
        order = Save(
            job=0,
            store=self.store,
            keys=tuple(keys),
            deadline_s=self._until_s(timeout_s),
            slots=tuple(slots),
            parent=parent,
            depth=depth,
            tenant=tenant,
            awaited=True,
        )
        return self._run("write", SlicedRow(order, self._config, self._caller.number, depth=depth), depth, stopped)

    def read(
        self,
        keys: Sequence[BlockKey],
        slots: Sequence[int],
        *,
        depth: int = 0,
        timeout_s: float | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Reached:
        """Read a row of blocks into device slots, verified. Blocks, by the deadlines; raises InvalidInput only.

        Slots behind the result are as they were, but for one slice's where the device failed, the store hung or a page
        was bad. STUCK: those of one slice may still be written to, as long as they are among `lent_slots`.
        """
        order = Load(job=0, store=self.store, keys=tuple(keys), deadline_s=self._until_s(timeout_s), slots=tuple(slots))
        return self._run("read", SlicedRow(order, self._config, self._caller.number, depth=depth), depth, stopped)

    def lent_slots(self) -> frozenset[int]:
        """Slots that copies which hang may still write to or read: nobody may use them. Does not block."""
        return self._caller.lent_slots()

    def _until_s(self, timeout_s: float | None) -> float:
        timeout_s = self._config.total_timeout_s if timeout_s is None else timeout_s
        if not 0 < timeout_s < float("inf"):
            raise InvalidInput(f"a timeout is a positive number of seconds, not {timeout_s}")
        return self._caller.clock.monotonic() + timeout_s

    def _run(self, call: str, row: SlicedRow, depth: int, stopped: Callable[[], bool]) -> Reached:
        """Do it, and say in the log and the counters what came of it: once."""
        clock = self._caller.clock
        lent = self._caller.lent_slots().intersection(row.order.slots)
        if lent:
            raise InvalidInput(
                f"a copy that hangs may still touch slots {sorted(lent)}: take others until it has ended"
            )
        while not row.over:
            if stopped():
                row.stop()
            job = row.next_job(clock.monotonic())
            if job is not None:
                said = self._caller.call(job)
                if isinstance(said, Stuck):
                    row.stick()
                else:
                    row.heard(said, clock.monotonic())
        reached = row.reached
        self._caller.metrics.count("sliced_total", tier=self.store, call=call, why=reached.why.value)
        log.log(
            logging.DEBUG if reached.why is Reason.WHOLE else logging.WARNING,
            "%s of %d blocks from block %d on, store %s: %d done, %s%s",
            *(call, len(row.order.keys), depth, self.store, reached.num_blocks, reached.why.value),
            f" ({reached.detail})" if reached.detail else "",
        )
        return reached
