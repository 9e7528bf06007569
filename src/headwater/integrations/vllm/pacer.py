"""What computing costs under vLLM, measured from outside: the time from a step's beginning to its output.

With that the brain can tell whether a load pays (`cache/placement.py`); until there are measurements it does. The sums
are those of our own engine (`engine/connector.py`). Where steps overlap, a step's time is that since the last output.
Steps that waited for loads say nothing of computing. `Flight` only knows whether anything is computed at all. No vLLM
here.
"""

from collections import deque
from collections.abc import Callable
from typing import Any, Final

from headwater.storage.base import SYSTEM_CLOCK, Clock

_MOST_IN_FLIGHT: Final = 8  # more steps than that have lost their ends


def scheduled_tokens(scheduler_output: Any) -> list[tuple[int, int]]:
    """Of each request of a step, tokens that are computed already, and tokens that are computed in it."""
    num_tokens = scheduler_output.num_scheduled_tokens
    cached = scheduler_output.scheduled_cached_reqs
    computed = {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
    computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return [(computed.get(name, 0), num) for name, num in num_tokens.items()]


class Pacer:
    """Hears of steps, tells what they cost. Called from the scheduler's thread."""

    def __init__(self, measured: Callable[[int, int, float], None], *, clock: Clock = SYSTEM_CLOCK) -> None:
        """`measured` hears tokens, the sum over them of tokens before each, and seconds."""
        self._measured = measured
        self._clock = clock
        self._steps: deque[tuple[float, int, int]] = deque()
        self._last_s = 0.0

    def begun(self, requests: list[tuple[int, int]], *, waits: bool) -> None:
        """A step begins: of each request, tokens that were there and tokens to compute. `waits`: for loads, too."""
        num_tokens = 0 if waits else sum(num for _, num in requests)
        contexts = sum(num * before + num * (num - 1) // 2 for before, num in requests)
        if len(self._steps) >= _MOST_IN_FLIGHT:
            self._steps.clear()
        self._steps.append((self._clock.monotonic(), num_tokens, contexts))

    def ended(self) -> None:
        """The oldest step has ended."""
        now_s = self._clock.monotonic()
        if self._steps:
            begun_s, num_tokens, contexts = self._steps.popleft()
            if num_tokens:
                self._measured(num_tokens, contexts, now_s - max(begun_s, self._last_s))
        self._last_s = now_s


class Flight:
    """Which steps are under way. Called from the scheduler's thread."""

    def __init__(self) -> None:
        self._computing: deque[bool] = deque(maxlen=_MOST_IN_FLIGHT)  # oldest first

    def begun(self, *, computes: bool) -> bool:
        """A step begins. Returns whether nothing is computed now, neither in it nor in those before it."""
        self._computing.append(computes)
        return not any(self._computing)

    def ended(self) -> None:
        """The oldest step has ended."""
        if self._computing:
            self._computing.popleft()
