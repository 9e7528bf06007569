"""A request's body: parsed strictly, its fields taken by name and type. How it is read is in `bodies.py`.

Null means absent, as in OpenAI's API. Fields that nobody took can be refused, so that none is ignored (`refuse_rest`).
Whatever a client sends ends as a value of the right type or as an ApiError that names the field; text that UTF-8 cannot
say is refused here, once.
"""

import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import NoReturn

from headwater.serve.errors import invalid, shown, unsupported


def parse(body: bytes) -> dict[str, object]:
    """JSON to an object; ApiError for anything else."""
    try:
        found = json.loads(body.decode(), parse_constant=_refuse)
    except RecursionError as error:
        raise invalid(None, "the body is nested too deeply", code="invalid_json") from error
    except ValueError as error:
        raise invalid(None, f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(found, dict):
        raise invalid(None, "the body must be a JSON object", code="invalid_json")
    return found


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


class Fields:
    """The fields of an object, by name and type. `where` names the object inside the body."""

    def __init__(self, values: Mapping[str, object], where: str = "") -> None:
        self._values = values
        self._where = where
        self._taken: set[str] = set()  # names that somebody asked for
        self._refused: set[str] = set()  # those that are known, and whose value was harmless

    def param(self, name: str) -> str:
        """A field's name as messages say it."""
        return f"{self._where}.{name}" if self._where else name

    def get(self, name: str) -> object:
        """A field as it came; None where it is null or missing."""
        self._taken.add(name)
        return self._values.get(name)

    def text(self, name: str) -> str | None:
        """Text."""
        value = self.get(name)
        return None if value is None else as_text(value, self.param(name))

    def flag(self, name: str, *, default: bool = False) -> bool:
        """True or false; the default where it is missing."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise invalid(self.param(name), f"{self.param(name)} must be true or false, not {shown(value)}")
        return value

    def integer(self, name: str, least: int, most: int) -> int | None:
        """A whole number."""
        value = self.get(name)
        if value is None:
            return None
        if not (isinstance(value, int) and not isinstance(value, bool) and least <= value <= most):
            message = f"{self.param(name)} must be a whole number from {least} to {most}, not {shown(value)}"
            raise invalid(self.param(name), message)
        return value

    def number(self, name: str, least: float, most: float) -> float | None:
        """A number."""
        value = self.get(name)
        if value is None:
            return None
        if not (isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most):
            message = f"{self.param(name)} must be a number from {least:g} to {most:g}, not {shown(value)}"
            raise invalid(self.param(name), message)
        return float(value)

    def inner(self, name: str) -> "Fields":
        """An object; an empty one where it is missing."""
        value = self.get(name)
        if value is not None and not isinstance(value, dict):
            raise invalid(self.param(name), f"{self.param(name)} must be an object, not {shown(value)}")
        return Fields(value or {}, self.param(name))

    def refuse(self, name: str, harmless: Sequence[object], message: str) -> None:
        """Refuse a field that is not supported, unless its value asks for nothing."""
        self._refused.add(name)
        value = self._values.get(name)
        if value is not None and not any(type(value) is type(one) and value == one for one in harmless):
            raise unsupported(self.param(name), f"{self.param(name)} is not supported here: {message}")

    def refuse_rest(self, what: str) -> None:
        """Refuse what nobody asked for, so that no field is ignored. `what` has these fields, for people."""
        known = self._taken | self._refused
        for name, value in self._values.items():
            if name in known or value is None:
                continue
            close = get_close_matches(name, sorted(self._taken), n=1)
            meant = f" (did you mean {close[0]}?)" if close else ""
            named = name if name.isprintable() and len(name) <= 80 else shown(name)
            raise unsupported(
                self.param(named),
                f"{what} has no field {shown(name)}{meant}; it takes {', '.join(sorted(self._taken))}",
            )


def as_text(value: object, param: str) -> str:
    """Text that UTF-8 can say; ApiError for anything else."""
    if not isinstance(value, str):
        raise invalid(param, f"{param} must be text, not {shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise invalid(param, f"{param} holds half a surrogate pair, which is no text") from error
    return value
