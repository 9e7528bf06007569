"""A clock that moves when it is told to."""


class FakeClock:
    """Stands in for `storage.base.Clock`: both hands move together, by `advance` or by `sleep`."""

    def __init__(self, start_s: float = 1_000_000.0) -> None:
        self._now_s = start_s

    def monotonic(self) -> float:
        """Seconds that never go back."""
        return self._now_s

    def time(self) -> float:
        """Seconds since some 1970."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move on."""
        if seconds < 0:
            raise ValueError("time does not go back")
        self._now_s += seconds

    def sleep(self, seconds: float) -> None:
        """Take the place of time.sleep."""
        self.advance(seconds)
