"""Tells the residency index what this node holds, in a thread of its own, and never holds up who computes.

`offer` writes down what changed and returns: it waits for no server, only for a lock that is held for microseconds.
Everything else happens in the thread: changes that came close together go as one update, updates go one at a time with
a deadline each, an index that does not answer is tried again after a pause that grows, and what could not be said in
time is dropped and said again as a whole (`session.py`).

The brain knows exactly what is on the device. What its stores keep they decide themselves, and other processes write to
them too: so the stores of this node are asked now and then what they hold (`Holdings`), and the book is put right.
"""

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Final, Protocol, Self

from headwater.config.residency import ResidencyConfig
from headwater.core.events import Move, Removed, Stored
from headwater.core.keys import BlockKey
from headwater.metrics import Metrics
from headwater.residency.base import Residency
from headwater.residency.book import Book
from headwater.residency.events import TIERS, Applied, State, Update, UpdateKind
from headwater.residency.session import ResidencySession
from headwater.storage.base import SYSTEM_CLOCK, Clock, Deadline

log = logging.getLogger("headwater")

_SLICE_BLOCKS: Final = 512  # in one update, and in one question to a store
_FIRST_PAUSE_S: Final = 0.05
_MAX_PAUSE_S: Final = 5.0

Row = tuple[BlockKey, BlockKey, int]  # a block, the one before it, its depth


class Holdings(Protocol):
    """What a store of this node says it holds. Called in the publisher's thread; each call ends by itself in time."""

    def held(self, keys: Sequence[BlockKey]) -> Sequence[bool] | None:
        """Which of these blocks are there; None: it could not be asked."""
        ...

    def listed(self) -> Iterator[Sequence[Row]]:
        """All blocks that are there, in portions; none where the store keeps no list. Ends early in trouble."""
        ...


class Publisher:
    """Speaks for this process. Takes the residency index it was given over: `close` closes it."""

    def __init__(
        self,
        residency: Residency,
        config: ResidencyConfig,
        *,
        holdings: Mapping[str, Holdings] | None = None,
        clock: Clock = SYSTEM_CLOCK,
        metrics: Metrics | None = None,
    ) -> None:
        """Starts the thread. `holdings` by tier: stores that are of this node alone, not the pool."""
        self.residency = residency
        self.metrics = metrics if metrics is not None else Metrics()
        self._config = config
        self._holdings = dict(holdings or {})
        self._clock = clock
        self._changed = threading.Condition(threading.Lock())
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._close_by: Deadline | None = None
        self._book = Book(max_blocks=config.max_blocks)
        self._herald = ResidencySession(
            self._book,
            node=config.node,
            epoch=int(clock.time() * 1000),
            lease_s=config.lease_s,
            round_every_s=config.round_every_s,
            slice_blocks=_SLICE_BLOCKS,
        )
        self._lost: list[str] = []
        self._audit: Iterator[None] | None = None
        self._audit_due_s = clock.monotonic()
        self._strangers: set[str] = set()
        self._told = (0, 0)
        self._thread = threading.Thread(target=self._run, name="headwater-residency", daemon=True)
        self._thread.start()

    # --- the cache's side ---------------------------------------------------------------------------------------------

    def offer(self, moves: Iterable[Move]) -> None:
        """Hear what came to a tier or left one, in order. Does not block, does not raise."""
        with self._changed:
            for move in moves:
                tier = TIERS.get(move.tier)
                if tier is None:
                    self._strangers.add(move.tier)
                elif isinstance(move, Stored):
                    self._book.came(tier, move.keys, move.parent, move.depth)
                elif isinstance(move, Removed):
                    self._book.went(tier, move.keys)
                else:
                    self._lost.append(move.tier)
        if not self._wake.is_set():
            self._wake.set()

    def state(self, key: BlockKey) -> State:
        """Where this node believes a block to be."""
        with self._changed:
            return self._book.state(key)

    def resync(self) -> None:
        """Ask the stores what they hold, and say everything again."""
        with self._changed:
            self._herald.resync()
            self._audit_due_s = 0.0
        self._wake.set()

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything was said and heard. Blocks, until the time is over at most; False if it was."""
        self._wake.set()
        with self._changed:
            return self._changed.wait_for(self._settled, timeout_s)

    def _settled(self) -> bool:
        heard = self._herald.settled and not self._herald.fenced
        return heard and self._audit is None and not (self._lost or self._audit_is_due())

    def close(self, timeout_s: float = 5.0) -> bool:
        """Say that the node goes, end the thread, close the index. Idempotent. False if a call has not returned yet."""
        with self._changed:
            if not self._closing.is_set():
                self._herald.leave()
                self._close_by = Deadline.after(timeout_s, self._clock)
                self._closing.set()
        self._wake.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        self.residency.close()
        return True

    def __enter__(self) -> Self:
        """Return self; it closes itself at the end of the block."""
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        """Close."""
        if not self.close():
            log.error("the residency index has not answered: its call is still under way")

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            with self._changed:
                update = self._herald.next(self._clock.monotonic())
                if self._herald.left or (self._herald.fenced and self._closing.is_set()):
                    return
            answer = None if update is None else self._send(update)
            if answer is Applied.FENCED:
                answer = self._fenced()
            worked = self._examine()
            if answer in (Applied.FAILED, Applied.RESYNC, Applied.UNKNOWN):
                if update is not None and update.kind is UpdateKind.LEAVE:
                    return  # its lease will end without us
                self._closing.wait(pause_s)  # nor is it flooded with rounds if it never knows us
                pause_s = min(2 * pause_s, _MAX_PAUSE_S)
            elif answer is None and not worked:
                pause_s = _FIRST_PAUSE_S
                self._rest()

    def _rest(self) -> None:
        """Wait until something is to be done, and a moment longer: more may come."""
        with self._changed:
            due_s = float("inf") if self._herald.fenced else self._herald.due_s()
            if self._holdings:
                due_s = min(due_s, self._audit_due_s)
        left_s = min(max(0.0, due_s - self._clock.monotonic()), 60.0)
        if self._wake.wait(left_s) and not self._closing.is_set():
            self._closing.wait(self._config.linger_s)
        self._wake.clear()

    def _send(self, update: Update) -> Applied:
        deadline = Deadline.after(self._config.apply_timeout_s, self._clock)
        if self._close_by is not None and self._close_by.at_s < deadline.at_s:
            deadline = self._close_by
        try:
            answer = self.residency.apply(update, deadline=deadline)
        except Exception:  # whatever an index does wrong, the cache goes on
            log.exception("the residency index could not take in an update")
            answer = Applied.FAILED
        with self._changed:
            self._herald.heard(answer, self._clock.monotonic())
            self._changed.notify_all()
        self._count(update, answer)
        return answer

    def _fenced(self) -> Applied:
        """A newer process has our name. If it was here before us, its clock was ahead: speak under a newer epoch."""
        if not self._herald.accepted:
            known: int | None = None
            deadline = Deadline.after(self._config.apply_timeout_s, self._clock)
            try:
                known = self.residency.last_epoch(self._config.node, deadline=deadline)
            except Exception:
                log.exception("the residency index could not be asked")
            with self._changed:
                self._herald.outbid(max(known or 0, self._herald.epoch) + 1)
            return Applied.APPLIED if known is not None else Applied.FAILED
        with self._changed:
            self._book.stop()
        log.error("another process speaks as node %s: this one is silent from now on", self._config.node)
        self.metrics.event("residency_fenced", node=self._config.node)
        return Applied.FENCED

    def _count(self, update: Update, answer: Applied) -> None:
        self.metrics.count("residency_updates_total", outcome=answer.value)
        if answer is not Applied.FAILED:
            self.metrics.count("residency_said_blocks_total", update.num_blocks)
        with self._changed:
            before, self._told = self._told, (self._herald.num_dropped, self._book.num_refused)
            strangers, self._strangers = self._strangers, set()
            self.metrics.gauge("residency_blocks", len(self._book))
        self.metrics.count("residency_dropped_blocks_total", self._told[0] - before[0], reason="unheard")
        self.metrics.count("residency_dropped_blocks_total", self._told[1] - before[1], reason="book_full")
        for tier in strangers:
            self.metrics.event("residency_unknown_tier", tier=tier)

    # --- what the stores hold -----------------------------------------------------------------------------------------

    def _examine(self) -> bool:
        """One portion of comparing the book with the stores. False: nothing to do now."""
        if self._closing.is_set():
            return False
        try:
            if self._audit is not None:
                next(self._audit)
                return True
        except StopIteration:
            pass
        except Exception:  # whatever a store does wrong, the rest goes on
            log.exception("a store could not be asked what it holds")
        with self._changed:
            self._audit = None
            self._changed.notify_all()
            lost, self._lost = self._lost, []
            due = self._audit_is_due()
            if due:
                self._audit_due_s = self._clock.monotonic() + self._config.audit_every_s
            if lost or due:
                self._audit = self._compare(lost, list(self._holdings) if due else [])
            return self._audit is not None

    def _audit_is_due(self) -> bool:
        return bool(self._holdings) and self._clock.monotonic() >= self._audit_due_s

    def _compare(self, lost: Sequence[str], tiers: Sequence[str]) -> Iterator[None]:
        for name in lost:
            yield from self._cross_out(name, None)
        for name in tiers:
            yield from self._cross_out(name, self._holdings[name])
            yield from self._adopt(name, self._holdings[name])

    def _cross_out(self, name: str, holdings: Holdings | None) -> Iterator[None]:
        """Strike out what a store does not hold; all of it, where the store was lost."""
        tier = TIERS[name]
        with self._changed:
            keys = self._book.blocks()
        for at in range(0, len(keys), _SLICE_BLOCKS):
            with self._changed:
                asked = self._book.watch(tier, keys[at : at + _SLICE_BLOCKS])
            held = [False] * len(asked) if holdings is None else holdings.held(asked) if asked else []
            with self._changed:
                rest = self._book.untouched(asked)
                gone = set() if held is None else {key for key, one in zip(asked, held, strict=True) if not one}
                self._book.went(tier, [key for key in rest if key in gone])
            if held is None:
                return
            yield

    def _adopt(self, name: str, holdings: Holdings) -> Iterator[None]:
        """Write down what a store holds besides: from before a restart, or by another process of this node."""
        tier = TIERS[name]
        portions = holdings.listed()
        while True:
            with self._changed:
                self._book.watch(tier, ())
            rows = next(portions, None)
            with self._changed:
                rest = set(self._book.untouched(row[0] for row in rows or ()))
                for key, parent, depth in rows or ():
                    if key in rest:
                        self._book.came(tier, (key,), parent, depth)
            if rows is None:
                return
            yield
