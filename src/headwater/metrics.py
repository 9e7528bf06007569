"""Counters and a ring of recent events, behind one small class.

Not a logger and not an exporter: rooms count what happened here, faces (CLI, server) read it. Counting never blocks on
anything but a short lock and never raises.
"""

import threading
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Event:
    """Something worth telling a person: what, and the facts."""

    kind: str
    facts: dict[str, Any] = field(default_factory=dict)


class Metrics:
    """Counters by name, and the last `ring_size` events. Safe from several threads."""

    def __init__(self, ring_size: int = 1024) -> None:
        self._lock = threading.Lock()
        self._counters: Counter[str] = Counter()
        self._events: deque[Event] = deque(maxlen=ring_size)

    def count(self, name: str, amount: int = 1) -> None:
        """Add `amount` to the counter `name` (dotted: tier.what)."""
        with self._lock:
            self._counters[name] += amount

    def event(self, kind: str, **facts: Any) -> None:
        """Remember an event, and count it under its kind."""
        with self._lock:
            self._counters[kind] += 1
            self._events.append(Event(kind, facts))

    def counters(self) -> dict[str, int]:
        """A copy of all counters."""
        with self._lock:
            return dict(self._counters)

    def events(self, kind: str | None = None) -> list[Event]:
        """The remembered events, oldest first, of one kind or all."""
        with self._lock:
            return [event for event in self._events if kind is None or event.kind == kind]
