"""What a node says of itself to a router, every third of its lease: the heartbeat, checked field by field.

A value and its JSON, for both ends: a node makes one and sends `document()`, the router reads it with `Heartbeat.read`.
The fields, with their types, are in `router.py`, where the whole protocol is.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final, Self
from urllib.parse import urlsplit

from headwater.core.errors import InvalidInput
from headwater.core.role import Role

MAX_LEASE_S: Final = 3600.0
MAX_NAME: Final = 200
NAME_TAKEN: Final = "name_taken"  # the code of a refusal that a lease's end may mend

_COUNT: Final = 1 << 53
_HEX: Final = re.compile(r"(?:[0-9a-f]{2}){1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLoad:
    """How busy a node is."""

    running: int = 0
    waiting: int = 0
    free_slots: int = 0  # requests that it would take now, to run or to wait; at 0 it refuses

    def __post_init__(self) -> None:
        """Refuse what cannot be counted."""
        for one in fields(self):
            _require_count(f"load.{one.name}", getattr(self, one.name), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a node has measured of itself, over all its requests; None: nothing yet."""

    prefill_tokens_per_s: float | None = None  # computed
    decode_tokens_per_s: float | None = None  # generated
    pool_tokens_per_s: float | None = None  # read from the pool, or written to it

    def __post_init__(self) -> None:
        """Refuse what is no rate."""
        for one in fields(self):
            value = getattr(self, one.name)
            if value is not None:
                _require_number(f"rates.{one.name}", value, above=0, most=1e12)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """One heartbeat. Raises InvalidInput, with a sentence, for what a node cannot be."""

    node: str  # its name: in the residency index, in tickets, here
    url: str  # where the router finds it
    role: Role
    model: str  # what clients call it
    identity: str  # hex: `CacheIdentity.digest`, or with its salt
    block_tokens: int
    layout: str  # hex: the unsharded layout's fingerprint
    lease_s: float  # believed for so long; 0: it leaves
    epoch: int = 0  # grows with every start of the process that has this name
    max_model_len: int | None = None  # tokens that a request may have, its answer included
    max_answers: int | None = None  # that a request may ask for, all its prompts together
    draining: bool = False  # takes nothing new
    clock_s: float | None = None  # what its clock on the wall shows
    load: NodeLoad = field(default_factory=NodeLoad)
    rates: Rates = field(default_factory=Rates)

    def __post_init__(self) -> None:
        """Check every field."""
        for name in ("node", "model"):
            value = getattr(self, name)
            if not (isinstance(value, str) and 0 < len(value) <= MAX_NAME and value.isprintable()):
                raise InvalidInput(f"{name} must be a printable text of 1 to {MAX_NAME} characters, not {value!r:.80}")
        for name in ("identity", "layout"):
            value = getattr(self, name)
            if not (isinstance(value, str) and _HEX.fullmatch(value)):
                raise InvalidInput(f"{name} must be a digest in lower-case hex, not {value!r:.80}")
        _require_url(self.url)
        _require_count("block_tokens", self.block_tokens, 1)
        _require_count("epoch", self.epoch, 0, 1 << 64)
        for name in ("max_model_len", "max_answers"):
            if getattr(self, name) is not None:
                _require_count(name, getattr(self, name), 1)
        _require_number("lease_s", self.lease_s, above=-1, most=MAX_LEASE_S)
        if self.lease_s < 0:
            raise InvalidInput(f"lease_s must not be negative, not {self.lease_s!r}")
        if self.clock_s is not None:
            _require_number("clock_s", self.clock_s, above=0, most=1e12)
        if not isinstance(self.draining, bool):
            raise InvalidInput(f"draining must be true or false, not {self.draining!r:.80}")

    @classmethod
    def read(cls, document: Mapping[str, object]) -> Self:
        """A heartbeat as it came. Fields that nobody knows are ignored: a newer node may have more."""
        known = {one.name: document[one.name] for one in fields(cls) if document.get(one.name) is not None}
        missing = [name for name in _REQUIRED if name not in known]
        if missing:
            raise InvalidInput(f"a heartbeat needs {', '.join(missing)}")
        try:
            role = Role(str(known["role"]))
        except ValueError as error:
            raise InvalidInput(f"role must be one of {', '.join(Role)}, not {known['role']!r:.80}") from error
        inner: dict[str, Any] = {"load": _part(NodeLoad, known.get("load")), "rates": _part(Rates, known.get("rates"))}
        return cls(**{**known, **inner, "role": role})

    def document(self) -> dict[str, Any]:
        """Its JSON."""
        return asdict(self)


_REQUIRED: Final = ("node", "url", "role", "model", "identity", "block_tokens", "layout", "lease_s")


def _part(kind: type[NodeLoad] | type[Rates], value: object) -> NodeLoad | Rates:
    if value is None:
        return kind()
    if not isinstance(value, dict):
        raise InvalidInput(f"{kind.__name__.lower()} must be an object, not {value!r:.80}")
    return kind(**{one.name: value[one.name] for one in fields(kind) if value.get(one.name) is not None})


def _require_count(name: str, value: object, least: int, end: int = _COUNT) -> None:
    if not (isinstance(value, int) and not isinstance(value, bool) and least <= value < end):
        raise InvalidInput(f"{name} must be a whole number from {least}, not {value!r:.80}")


def _require_number(name: str, value: object, *, above: float, most: float) -> None:
    if not (isinstance(value, int | float) and not isinstance(value, bool) and above < value <= most):  # NaN is neither
        raise InvalidInput(f"{name} must be a number of at most {most:g}, not {value!r:.80}")


def _require_url(url: object) -> None:
    message = f"url must be http://HOST:PORT or https://HOST:PORT, not {url!r:.80}"
    if not (isinstance(url, str) and url.isascii() and url.isprintable()):
        raise InvalidInput(message)
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise InvalidInput(message) from error
    bare = not (parts.path or parts.query or parts.fragment or parts.username or parts.password)
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or not bare or " " in url:
        raise InvalidInput(message)
