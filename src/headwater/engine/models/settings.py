"""A model's config.json, read with care: every value is checked for its type, and a bad one is named.

Sizes have bounds, far above what there is, so that a file that lies is refused and not built for ever.

Not a schema of all models: each family asks for what it needs.
"""

from collections.abc import Mapping
from typing import Final, TypeVar, overload

from headwater.core.errors import InvalidInput

_T = TypeVar("_T")

_MOST: Final = {
    "num_hidden_layers": 1 << 10,
    "n_routed_experts": 1 << 12,
    "vocab_size": 1 << 24,
    "max_position_embeddings": 1 << 31,
    "original_max_position_embeddings": 1 << 31,
}
_MOST_OTHERS: Final = 1 << 18  # three of them multiplied are still a size that torch can say


class Settings:
    """A part of config.json. Raises InvalidInput for a value that is missing or of another type."""

    def __init__(self, values: Mapping[str, object], where: str = "config.json") -> None:
        self.values = values
        self.where = where

    def __contains__(self, name: str) -> bool:
        """Whether there is such a value, and not null."""
        return self.values.get(name) is not None

    def size(self, name: str, default: int | None = None) -> int:
        """A positive int, within bounds."""
        value, most = self._get(name, default), _MOST.get(name, _MOST_OTHERS)
        if type(value) is not int or value < 1:
            raise self.error(name, "a positive integer")
        if value > most:
            raise self.error(name, f"at most {most}")
        return value

    @overload
    def number(self, name: str) -> float: ...
    @overload
    def number(self, name: str, default: _T) -> float | _T: ...
    def number(self, name: str, default: object = None) -> object:
        """A finite number, as a float."""
        if name not in self and default is None:
            raise self.error(name, "a number")
        value = self.values[name] if name in self else default
        if name in self and (type(value) not in (int, float) or not -1e30 < value < 1e30):  # type: ignore[operator]
            raise self.error(name, "a number")
        return float(value) if type(value) is int else value

    def flag(self, name: str, *, default: bool) -> bool:
        """True or false."""
        value = self._get(name, default)
        if type(value) is not bool:
            raise self.error(name, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A string."""
        value = self._get(name, default)
        if type(value) is not str:
            raise self.error(name, "a string")
        return value

    def strings(self, name: str) -> list[str]:
        """A list of strings; empty where there is none."""
        value = self._get(name, ())
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise self.error(name, "a list of strings")
        return list(value)

    def part(self, name: str) -> "Settings":
        """An object inside; empty where there is none."""
        value = self._get(name, {})
        if not isinstance(value, Mapping):
            raise self.error(name, "an object")
        return Settings(value, f"{self.where}: {name}")

    def expect(self, name: str, *allowed: object, why: str) -> None:
        """Refuse a value other than the allowed ones; one that is missing or null will do."""
        if name in self and self.values[name] not in allowed:
            known = " or ".join(map(repr, allowed))
            raise InvalidInput(f"{self.where}: {name} is {self.values[name]!r}; {why}, only {known}")

    def error(self, name: str, wanted: str) -> InvalidInput:
        """What is wrong with a value."""
        if name not in self:
            return InvalidInput(f"{self.where}: {name} is missing; it must be {wanted}")
        return InvalidInput(f"{self.where}: {name} must be {wanted}, not {self.values[name]!r}")

    def _get(self, name: str, default: object) -> object:
        return self.values[name] if name in self else default
