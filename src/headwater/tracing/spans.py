"""What is traced, as whoever traces says it; and nothing at all, which is the usual case.

Times are of the monotonic clock, on which the engine and the cache work. Nothing here blocks, raises or decides.
"""

from collections.abc import Mapping, Sequence
from typing import Final, Protocol, TypeAlias

Attributes: TypeAlias = Mapping[str, str | bool | int | float | Sequence[str]]


class Span(Protocol):
    """Something that takes time, inside something larger or the first of all."""

    @property
    def traceparent(self) -> str:
        """How another process says that its own spans belong below this one (W3C); empty: nothing is traced."""
        ...

    def child(self, name: str, *, at_s: float, attributes: Attributes | None = None) -> "Span":
        """A part of it begins. `end` it."""
        ...

    def tell(self, attributes: Attributes) -> None:
        """More is known of it."""
        ...

    def fail(self, why: str) -> None:
        """It went wrong: a word, of few that there are."""
        ...

    def end(self, at_s: float) -> None:
        """It is over. Idempotent; nothing is told of it afterwards."""
        ...


class Tracing(Protocol):
    """Who takes spans."""

    def begin(self, name: str, *, at_s: float, traceparent: str) -> Span:
        """A request came in, from who says `traceparent`, or from somebody who says nothing."""
        ...

    def follow(self, request: str, span: Span) -> None:
        """From now on what the cache does for a request, by the name it has there, is part of this span."""
        ...

    def forget(self, request: str) -> None:
        """Not any more. Idempotent."""
        ...


class _Nothing:
    """No span, and nobody who takes any."""

    traceparent: Final = ""

    def begin(self, name: str, *, at_s: float, traceparent: str) -> Span:
        return self

    def follow(self, request: str, span: Span) -> None:
        pass

    def forget(self, request: str) -> None:
        pass

    def child(self, name: str, *, at_s: float, attributes: Attributes | None = None) -> Span:
        return self

    def tell(self, attributes: Attributes) -> None:
        pass

    def fail(self, why: str) -> None:
        pass

    def end(self, at_s: float) -> None:
        pass


_NOTHING: Final = _Nothing()
NO_SPAN: Final[Span] = _NOTHING
NO_TRACING: Final[Tracing] = _NOTHING
