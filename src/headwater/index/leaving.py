"""Runs that were cut out of the tree: nobody finds them any more, and they leave with the last who holds or pins them.

No run has one of them among its children, and none of them has any: each stands alone. What was before it is still its
parent, so who holds one holds its whole path, as before, and the parent counts it among its guards. Their slots stay
theirs until `sweep`.
"""

from collections.abc import Iterator

from headwater.index.runs import Run


class LeavingRuns:
    """Runs that are held, or were until just now."""

    def __init__(self) -> None:
        self._runs: dict[Run, None] = {}
        self._loose: list[Run] = []  # that nobody may hold any more

    def __iter__(self) -> Iterator[Run]:
        """Every one, in the order in which they were cut."""
        return iter(self._runs)

    def add(self, run: Run) -> None:
        """A run was cut out, or begins outside the tree."""
        run.cut = True
        self._runs[run] = None
        if not run.guards:
            self._loose.append(run)

    def loosen(self, run: Run) -> None:
        """Its last holder let go."""
        self._loose.append(run)

    def sweep(self) -> list[int]:
        """Let those go that nobody holds. Returns their slots."""
        slots: list[int] = []
        for run in self._loose:
            if not run.guards and run in self._runs:
                slots += run.slots
                del self._runs[run]
                run.keys, run.slots, run.marks = run.keys[:0], run.slots[:0], run.marks[:0]
        self._loose.clear()
        return slots

    def facts(self) -> list[object]:
        """All of them, for snapshots."""
        return [
            [run.keys.hex(), run.slots.tolist(), run.marks.hex(), run.start, run.refs, run.pins, run.guards]
            for run in self._runs
        ]

    def validate(self) -> None:
        """Raise AssertionError if one is not as it must be."""
        for run in self._runs:
            assert run.cut, "a run that left, and is in the tree"
            assert run.guards, "a run that nobody holds, and is still here"
            assert run.children is None, "a run that left, and leads on"
            assert not run.ticket, "a run that left, among those to be evicted"
            assert run.slots, "an empty run"
