"""From the bytes of a body to what a vLLM server is sent: everything about it that takes time by its size.

A node in front of vLLM passes bodies on as bytes, and holds none as an object. Pure: bytes in, values out; ApiError for
what cannot be answered. Called in threads and in other processes (`readers.py`).
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from headwater.disagg.headers import ENDPOINTS
from headwater.disagg.prompt_pages import TELL
from headwater.disagg.vllm_ticket import body_digest
from headwater.disagg.width import num_choices, num_prompts
from headwater.serve import errors
from headwater.serve.body import Fields, parse

_NOT_FOR_ONE: Final = ("stream_options", "min_tokens", "max_completion_tokens", "best_of", "use_beam_search")


@dataclass(frozen=True, slots=True)
class VllmWork:
    """What vLLM is to be asked."""

    path: str  # empty: the one that was asked
    content: bytes  # JSON
    num_answers: int  # that it is to give, to all prompts together
    digest: str = ""  # of the client's body (`body_digest`)
    ticket: object = None


def prefill(data: bytes) -> VllmWork:
    """A router's envelope: the prompt is computed, one token is said, and what pages it has."""
    path, body = _envelope(Fields(parse(data)))
    one = {name: value for name, value in body.items() if name not in _NOT_FOR_ONE}
    one |= {"max_tokens": 1, "stream": False, "n": 1, "kv_transfer_params": TELL}
    return VllmWork(path, _dumped(one), num_prompts(body), body_digest(body))


def decode(data: bytes) -> VllmWork:
    """A router's envelope: the client's body as it is, and the ticket."""
    fields = Fields(parse(data))
    path, body = _envelope(fields)
    return VllmWork(path, _dumped(body), _num_answers(body), body_digest(body), fields.get("ticket"))


def plain(data: bytes) -> VllmWork:
    """A client's body, which is an object."""
    return VllmWork("", data, _num_answers(parse(data)))


READS: Final[Mapping[str, Callable[[bytes], VllmWork]]] = {
    "vllm_prefill": prefill,
    "vllm_decode": decode,
    "vllm_plain": plain,
}


def _envelope(fields: Fields) -> tuple[str, dict[str, Any]]:
    endpoint = fields.text("endpoint")
    if endpoint not in ENDPOINTS:
        raise errors.invalid("endpoint", f"endpoint must be one of {', '.join(ENDPOINTS)}")
    body = fields.get("body")
    if not isinstance(body, dict):
        raise errors.invalid("body", "body must be the client's, an object")
    return endpoint, body


def _num_answers(body: Mapping[str, object]) -> int:
    return num_prompts(body) * num_choices(body)


def _dumped(body: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(body, allow_nan=False, separators=(",", ":")).encode()
    except (ValueError, RecursionError) as error:
        raise errors.invalid(None, "a number in the body is too large", code="invalid_json") from error
