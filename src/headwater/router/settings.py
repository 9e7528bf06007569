"""What a router can be told, with the limits of each. The command line makes one; no environment is read here."""

import math
import re
from dataclasses import dataclass, field, fields

from headwater.core.errors import InvalidConfig
from headwater.core.node_key import NodeKey


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """A router. Raises InvalidConfig for what cannot work."""

    api_key: str | None = field(default=None, repr=False)  # that clients send; None: nobody is asked for one
    node_key: NodeKey = field(default_factory=lambda: NodeKey.random(own=True))  # unless told, one that nobody knows
    request_timeout_s: float = 600.0  # from a request's arrival to the end of its answer, and the most a client may ask
    queue_timeout_s: float = 30.0  # that a request waits for a node with room
    lookup_timeout_s: float = 0.02  # for the residency index
    connect_timeout_s: float = 2.0
    silence_s: float = 10.0  # that a node may say nothing, before it is asked whether it hangs
    probe_timeout_s: float = 1.0  # for that question
    pause_s: float = 1.0  # that a node is left alone after trouble, doubled each time, up to
    max_pause_s: float = 10.0
    max_attempts: int = 4  # that may fail, per request
    max_refusals: int = 64  # that may refuse
    max_prefills: int = 3  # of one prompt, where the pool loses what was written; 1: never again
    max_requests: int = 1024  # at a time
    max_body_bytes: int = 8 << 20
    max_answer_bytes: int = 64 << 20
    num_decisions: int = 256  # that `/state` shows

    def __post_init__(self) -> None:
        """Check every field."""
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name == "node_key":
                if not isinstance(value, NodeKey):
                    raise InvalidConfig("node_key must be a NodeKey")
            elif one.name == "api_key":
                if value is not None and not (isinstance(value, str) and re.fullmatch("[!-~]+", value)):
                    raise InvalidConfig(f"{one.name} is printable ASCII without spaces, and not empty")
            elif one.name.endswith("_s"):
                good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
                if not (good and 0 < value <= 86_400):
                    raise InvalidConfig(f"{one.name} must be seconds, above 0 and at most a day, not {value!r}")
            elif not (isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 1 << 40):
                raise InvalidConfig(f"{one.name} must be a whole number from 1, not {value!r}")
