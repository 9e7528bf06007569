"""How fast an engine is, as measured over its steps, and when it last got something done. Numbers only."""

from typing import Final

_NEWEST: Final = 0.2  # weight of the newest measurement


class Rate:
    """Tokens a second, smoothed; None until something was measured."""

    def __init__(self) -> None:
        self.rate: float | None = None

    def measured(self, num_tokens: int, seconds: float) -> None:
        """So many in such a time."""
        if seconds > 0 and num_tokens > 0:
            now = num_tokens / seconds
            self.rate = now if self.rate is None else self.rate + _NEWEST * (now - self.rate)


class EnginePace:
    """The rates of an engine: prompts, answers (all requests together), prompts handed over."""

    def __init__(self) -> None:
        self.prompt, self.answer, self.pool = Rate(), Rate(), Rate()
        self.done_s = 0.0  # when something was last got done, on the monotonic clock
