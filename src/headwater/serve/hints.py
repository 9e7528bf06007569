"""What a body says of its turn: whose it is, how long its blocks are wished for, whether the session ends with it.

Hints in the fields that clients of OpenAI, Anthropic and vLLM send. They change no answer and no block's name: the
cache's policy may heed them, within its budget (`policy/sessions.py`). Their values are checked all the same, so that a
typing error is an error; what they cannot mean here is refused.
"""

from collections.abc import Mapping
from typing import Final

from headwater.disagg.headers import SESSION_ID
from headwater.engine.request import SaidOfTurn
from headwater.serve.body import Fields
from headwater.serve.errors import invalid, shown

MAX_SESSION_CHARACTERS: Final = 256

_RETENTIONS: Final = {"in_memory": 0.0, "in-memory": 0.0, "24h": 86_400.0}
_TTLS: Final = {"30m": 1_800.0, "12h": 43_200.0}
_CONTROL_TTLS: Final = {"5m": 300.0, "1h": 3_600.0}


def hints_of(body: Fields) -> SaidOfTurn:
    """What a body says. Of several wishes the longest counts. Raises ApiError."""
    own, key = body.text("session_id"), body.text("prompt_cache_key")
    session = _named("prompt_cache_key", key) if key else ""
    if own is not None:
        session = _named("session_id", own)
    options, control = body.inner("prompt_cache_options"), body.inner("cache_control")
    options.refuse("mode", ("implicit",), "prefixes are cached without marks")
    if body.get("cache_control") is not None and control.text("type") != "ephemeral":
        raise invalid("cache_control.type", f"cache_control.type must be 'ephemeral', not {shown(control.get('type'))}")
    wishes = [
        _seconds(body, "prompt_cache_retention", _RETENTIONS),
        _seconds(options, "ttl", _TTLS),
        _seconds(control, "ttl", _CONTROL_TTLS),
        _CONTROL_TTLS["5m"] if control.get("type") is not None and control.get("ttl") is None else 0.0,
    ]
    options.refuse_rest("prompt_cache_options")
    control.refuse_rest("cache_control")
    return SaidOfTurn(session, max(wishes), body.flag("session_end"))


def with_header(said: SaidOfTurn, session: str | None) -> SaidOfTurn:
    """The same with the session of a header, where the body names none. Raises ApiError."""
    return said if said.session or session is None else said._replace(session=_named(SESSION_ID, session))


def _named(param: str, name: str) -> str:
    if not 1 <= len(name) <= MAX_SESSION_CHARACTERS:
        raise invalid(param, f"{param} has 1 to {MAX_SESSION_CHARACTERS} characters, not {len(name)}")
    return name


def _seconds(body: Fields, name: str, known: Mapping[str, float]) -> float:
    value = body.text(name)
    if value is not None and value not in known:
        param = body.param(name)
        raise invalid(param, f"{param} must be one of {', '.join(known)}, not {shown(value)}")
    return 0.0 if value is None else known[value]
