"""What a node says next, and what it makes of the answer: rounds, changes, and signs of life, in order.

Pure: told the time, asked for the next update, told what became of it. One update is on its way at any time, and is
said again, the same under the same number, until somebody has heard it. What could not be said for as long as a lease
lasts is dropped: by then nobody believes this node any more, and a round will say everything.

    silent --begin a round--> telling --END was heard--> up to date --changes, signs of life-->
       ^                         |                           |
       +---- lease ran out, or the index knows nothing of us, or lost something ----+
"""

from headwater.core.keys import BlockKey
from headwater.residency.book import Book
from headwater.residency.events import Applied, Change, Update, UpdateKind


class ResidencySession:
    """Speaks for one process of a node. Not safe from several threads."""

    def __init__(
        self,
        book: Book,
        *,
        node: str,
        epoch: int,
        lease_s: float,
        round_every_s: float,
        slice_blocks: int = 512,
    ) -> None:
        self.node = node
        self.epoch = epoch
        self.num_rounds = 0
        self.num_dropped = 0  # blocks whose change was never said as such
        self.accepted = False  # somebody has heard this epoch
        self.fenced = False  # a newer process has the name: say nothing any more
        self.left = False
        self._book = book
        self._lease_s = lease_s
        self._round_every_s = round_every_s
        self._slice_blocks = slice_blocks
        self._sequence = 0
        self._under_way: Update | None = None
        self._unheard_s: float | None = None  # since when nobody has answered
        self._heard_s = 0.0  # when somebody last did
        self._wants_round = True
        self._todo: list[BlockKey] | None = None  # what the round under way has still to say, last first
        self._round_due_s = 0.0
        self._leaving = False

    @property
    def settled(self) -> bool:
        """Whether everything was said and heard."""
        return not (self._wants_round or self._todo is not None or self._under_way or self._book.num_unsaid)

    def resync(self) -> None:
        """Say everything again."""
        self._wants_round = True

    def leave(self) -> None:
        """The node goes: say that, and nothing more."""
        self._leaving = True
        self._under_way = None

    def outbid(self, epoch: int) -> None:
        """A process was here whose clock was ahead of ours: speak under a newer epoch. Only before ours was heard."""
        self.epoch, self.fenced = epoch, False
        self._under_way, self._wants_round = None, True

    def due_s(self) -> float:
        """When something is to be said, if nothing happens before."""
        if not self.settled or self._leaving:
            return 0.0
        return min(self._heard_s + self._lease_s / 3, self._round_due_s)

    def next(self, now_s: float) -> Update | None:
        """What to say now; the same until it was answered. None: nothing."""
        if self.fenced or self.left:
            return None
        if self._unheard_s is not None and now_s - self._unheard_s >= self._lease_s and not self._leaving:
            self._drop(now_s)
        if self._under_way is None:
            self._under_way = self._make(now_s)
            if self._under_way is not None and self._unheard_s is None:
                self._unheard_s = now_s
        return self._under_way

    def _drop(self, now_s: float) -> None:
        self.num_dropped += self._book.num_unsaid + (self._under_way.num_blocks if self._under_way else 0)
        self._book.stop()
        self._under_way, self._todo = None, None
        self._wants_round, self._unheard_s = True, now_s

    def _make(self, now_s: float) -> Update | None:
        size = self._slice_blocks
        if self._leaving:
            if not self._sequence:  # nobody knows of us
                self.left = True
                return None
            return self._update(UpdateKind.LEAVE, [])
        if self._wants_round or (self._todo is None and now_s >= self._round_due_s):
            self._wants_round = False
            self.num_rounds += 1
            self._todo = self._book.begin()[::-1]
            return self._update(UpdateKind.BEGIN, self._from_round(self._todo, size))
        if self._todo is not None:
            changes = self._book.take(size // 2)
            changes += self._from_round(self._todo, size - sum(len(change.keys) for change in changes))
            if self._todo:
                return self._update(UpdateKind.CHANGE, changes)
            self._todo = None
            return self._update(UpdateKind.END, changes)
        if self._book.num_unsaid:
            return self._update(UpdateKind.CHANGE, self._book.take(size))
        if now_s >= self._heard_s + self._lease_s / 3:
            return self._update(UpdateKind.CHANGE, [])
        return None

    def _from_round(self, todo: list[BlockKey], num_blocks: int) -> list[Change]:
        keys = todo[: -num_blocks - 1 : -1]
        del todo[-num_blocks:]
        return self._book.say(keys)

    def _update(self, kind: UpdateKind, changes: list[Change]) -> Update:
        self._sequence += 1
        return Update(
            node=self.node,
            epoch=self.epoch,
            sequence=self._sequence,
            round=self.num_rounds,
            kind=kind,
            lease_s=self._lease_s,
            changes=tuple(changes),
        )

    def heard(self, answer: Applied, now_s: float) -> None:
        """What became of the update under way. Where a link does not say, APPLIED: a round puts right what was lost."""
        update = self._under_way
        if update is None or answer is Applied.FAILED:
            return
        self._under_way, self._unheard_s, self._heard_s = None, None, now_s
        if update.kind is UpdateKind.LEAVE:
            self.left = True
        elif answer is Applied.FENCED:
            self.fenced = True
        elif answer in (Applied.RESYNC, Applied.UNKNOWN):
            self._wants_round, self._todo = True, None
        else:
            self.accepted = True
            if update.kind is UpdateKind.END:
                self._round_due_s = now_s + self._round_every_s
