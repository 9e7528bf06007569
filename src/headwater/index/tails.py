"""Where the paths of sessions ended, and what a session leaves behind when it goes on elsewhere.

An agent that sums up its context goes on from its system prompt, and what it had behind that is never asked for again.
So when a session's next request parts from the path of its last one and goes to where nobody was before, the blocks
behind the parting are *left behind*, as far as nobody else used them, and nothing else builds on them. One that goes
back to an older path, or begins one from nothing (a sub-agent), leaves nothing behind. A session that says that it is
over leaves all of it behind. What a session wishes to stay is its last path, as far as nobody else uses it.

Only marks and counts (`Past.left`, `Appraisal`): whether blocks that are left behind come back is measured, by how many
there are (one is the end of a prompt that did not fill its block, many are a context that was summed up), and what
follows is the policy's. A path may have been evicted in part, or split: what a tail says stays true, as for a pin.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, cast

from headwater.core.keys import BlockKey
from headwater.index.appraisal import ENDED, Appraisal
from headwater.index.base import Hold
from headwater.index.free_leaves import FreeLeaves
from headwater.index.ghosts import Ghosts
from headwater.index.runs import Run
from headwater.policy import MOST_KEPT_S, Wishes

_WAYS: Final = 5  # how many blocks: 1, 2 to 3, 4 to 7, 8 to 15, more


class Tails:
    """The last paths of sessions in a radix index; nothing is done where its policy asks for no sessions."""

    def __init__(self, worth: Appraisal, leaves: FreeLeaves, ghosts: Ghosts, *, num_wished: int) -> None:
        """`num_wished`: blocks that sessions may wish for, all together."""
        self._wishes = Wishes(num_wished)
        self._worth = worth
        self._leaves = leaves
        self._ghosts = ghosts

    def came(self, hold: Hold, keys: Sequence[BlockKey], now_s: float) -> None:
        """The request of a hold has found what is known of its keys. Mutates: it is its session's next turn."""
        if self._worth.sessions is None or not hold.hint.session or not keys:
            return
        tail = cast(Run | None, self._worth.sessions.turn(hold.hint.session, now_s).tail)
        if tail is not None and hold.num_blocks < len(keys) and keys[hold.num_blocks] not in self._ghosts:
            self._leave(tail, cast(Run, hold.at), hold.hint.session)

    def ended(self, hold: Hold, now_s: float) -> None:
        """The request of a hold is over, and the hold is about to be given back."""
        name, keep_s, last = hold.hint
        if self._worth.sessions is None or not name:
            return
        self._worth.sessions.ended(name, now_s, tail=None if last else hold.at)
        tail = cast(Run, hold.at)
        before = self._wishes.take_back(name)
        if before is not None:
            self._wish(_path(cast(Run, before.what)), before.until_s, 0.0)
        if last:
            self._end(tail, name)
        elif keep_s:
            own = [run for run in _path(tail) if run.session == name]
            until_s = now_s + min(keep_s, MOST_KEPT_S)
            if self._wishes.grant(name, until_s, sum(len(run.slots) for run in own), tail, now_s=now_s):
                self._wish(own, 0.0, until_s)

    def facts(self) -> list[object]:
        """Where paths ended and what is wished for, for snapshots; nothing where nobody asks for sessions."""
        if self._worth.sessions is None:
            return []
        tails = [
            [name.hex(), cast(Run, tail).start, len(cast(Run, tail).slots)]
            for name, tail in self._worth.sessions.tails()
        ]
        return [tails, self._wishes.facts()]

    def _wish(self, runs: Iterable[Run], old_s: float, new_s: float) -> None:
        """Runs that are wished for until `old_s` are from now on until `new_s`."""
        for run in runs:
            if run.wished_s == old_s:
                run.wished_s = new_s
                self._leaves.renew(run)

    def _leave(self, tail: Run, end: Run, session: bytes) -> None:
        """Mark the runs of a session from `tail` back to `end`, where its next request goes on to somewhere new."""
        left: list[Run] = []
        at: Run = tail
        while at is not end and at.parent is not None and (not at.slots or at.session == session):
            if not _ends_here(at, left[-1] if left else None):
                return
            if at.slots:
                left.append(at)
            at = at.parent
        if at is end and at.parent is not None:  # else it went back to an older path, or begins one beside it
            self._mark(left, min(sum(len(run.slots) for run in left).bit_length(), _WAYS))

    def _end(self, tail: Run, session: bytes) -> None:
        """Mark the runs of a session that is over, from its tail on."""
        left: list[Run] = []
        at: Run | None = tail
        while at is not None and at.session == session and _ends_here(at, left[-1] if left else None):
            left.append(at)
            at = at.parent
        self._mark(left, ENDED)

    def _mark(self, left: Sequence[Run], way: int) -> None:
        for run in left:
            if not run.past.left:
                self._worth.left_behind(way, len(run.slots))
                run.past = run.past._replace(left=way)
                self._leaves.renew(run)


def _path(run: Run) -> Iterator[Run]:
    """A run and all before it, the last first."""
    at: Run | None = run
    while at is not None:
        yield at
        at = at.parent


def _ends_here(run: Run, behind: Run | None) -> bool:
    """Whether nothing builds on a run but the one behind it."""
    return run.children is None or list(run.children.values()) == [behind]
