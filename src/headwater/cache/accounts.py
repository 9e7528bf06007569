"""What the cache has to account for, in plain sums: totals since the start, and what came on top since last asked."""

Series = tuple[str, tuple[tuple[str, str], ...]]  # a name and its labels


class Accounts:
    """Sums by name and labels. The names are those of `headwater.metrics`."""

    def __init__(self) -> None:
        self.totals: dict[Series, float] = {}
        self._fresh: dict[Series, float] = {}

    def add(self, name: str, amount: float, **labels: str) -> None:
        """Add to a sum."""
        if amount:
            series = (name, tuple(sorted(labels.items())))
            self.totals[series] = self.totals.get(series, 0) + amount
            self._fresh[series] = self._fresh.get(series, 0) + amount

    def take(self) -> dict[Series, float]:
        """What was added since the last call."""
        fresh, self._fresh = self._fresh, {}
        return fresh
