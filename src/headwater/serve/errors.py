"""What a client hears when something is wrong: a status and OpenAI's error object, for every kind of failure.

A message says what is wrong and what would be right; it never holds a traceback, a path, or another client's data.
"""

from collections.abc import Mapping
from typing import Any, Final

from headwater.core.errors import HeadwaterError
from headwater.core.results import Reason
from headwater.disagg.outcome import NOT_FINITE, READ_TOO_SLOWLY

RETRY_AFTER_S: Final = 1


class ApiError(HeadwaterError):
    """A request that gets an error for an answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        self.param = param
        self.code = code
        self.kind = kind

    def document(self) -> dict[str, object]:
        """The body, in OpenAI's shape."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


class PassedOn(ApiError):
    """Another server's own error, on its way to the client as it is."""

    def __init__(self, status: int, document: Mapping[str, Any]) -> None:
        super().__init__(status, "whoever was asked refused this request")
        self._document = dict(document)

    def document(self) -> dict[str, object]:
        """The body."""
        return self._document


def _try_later(status: int, message: str, code: str, *, kind: str = "server_error", **headers: str) -> ApiError:
    """There is no room now, and may soon be."""
    return ApiError(status, message, kind=kind, code=code, headers={"Retry-After": str(RETRY_AFTER_S), **headers})


def invalid(param: str | None, message: str, *, code: str | None = "invalid_value") -> ApiError:
    """400: a body that cannot be answered. `param` is the field that is wrong."""
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, message: str) -> ApiError:
    """400: a field that OpenAI's API has and this server has not."""
    return ApiError(400, message, param=param, code="unsupported_parameter")


def too_long(param: str, message: str) -> ApiError:
    """400: more tokens than a request may have."""
    return ApiError(400, message, param=param, code="context_length_exceeded")


def answer_too_large(limit_bytes: int) -> ApiError:
    """400: an answer that is not streamed is held until it is whole."""
    message = (
        f"the answer is larger than the {limit_bytes} bytes that one in one piece may have: ask for fewer or shorter "
        "answers, for fewer logprobs, or stream it"
    )
    return ApiError(400, message, code="answer_too_large")


def unknown_model(name: str, served: str) -> ApiError:
    """404: another model."""
    message = f"the model {shown(name)} does not exist here; this server has {served!r}"
    return ApiError(404, message, param="model", code="model_not_found")


def wrong_key() -> ApiError:
    """401: no key, or not the right one."""
    return ApiError(
        401,
        "this server wants its API key: send 'Authorization: Bearer KEY'",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def not_of_the_fleet(message: str) -> ApiError:
    """401: not signed with the node key, or not for us, or not for the first time."""
    return ApiError(401, message, code="invalid_node_key")


def too_large(limit_bytes: int) -> ApiError:
    """413: the body."""
    return ApiError(
        413, f"the body is larger than the {limit_bytes} bytes that this server reads", code="body_too_large"
    )


def too_large_to_read() -> ApiError:
    """413: not by its bytes, but by what they mean."""
    return ApiError(413, "the body takes too much memory to be read: send a smaller one", code="body_too_large")


def head_too_large(limit_bytes: int, limit_lines: int) -> ApiError:
    """431: what comes before the body, or after its chunks."""
    message = (
        f"the request's line and headers are more than the {limit_bytes} bytes in {limit_lines} lines that this server "
        "reads"
    )
    return ApiError(431, message, code="head_too_large")


def slow_head(patience_s: float) -> ApiError:
    """408: what comes before the body."""
    return ApiError(408, f"the request's headers did not come within {patience_s:g} s", code="timeout")


def crumbs(least_bytes: int) -> ApiError:
    """400: each chunk costs as much as a large one."""
    message = f"the body comes in too many small chunks: send it in chunks of {least_bytes} bytes or more"
    return ApiError(400, message, code="small_chunks")


def slow_body() -> ApiError:
    """408: it did not keep its pace."""
    return ApiError(408, "the body came too slowly", code="timeout")


def crowded() -> ApiError:
    """503: no connection is free."""
    message = "this server has as many connections as it takes: try again later"
    return _try_later(503, message, "too_many_connections", Connection="close")


def bodies_full() -> ApiError:
    """503: for a large body, when others' are held."""
    return _try_later(503, "this server holds as many bytes of bodies as it may: try again later", "too_many_bytes")


def bodies_waiting() -> ApiError:
    """503: for a body, when too many wait to be read."""
    return _try_later(503, "as many bodies wait to be read as may: try again later", "too_many_bodies")


def reader_ended() -> ApiError:
    """503: what reads large bodies ended in the middle of this one, twice."""
    return _try_later(503, "the process that reads large bodies ended: try again later", "not_read")


def wrong_host(host: str) -> ApiError:
    """421: another server's name; a page of some site may be behind it."""
    message = (
        f"this server is on loopback, wants no key, and so answers no Host but localhost's: not {shown(host)}. If that "
        "is its name, start it with --allow-host NAME, or with a key"
    )
    return ApiError(421, message, code="wrong_host")


def queue_full() -> ApiError:
    """429: come back later."""
    return _try_later(429, "too many requests are waiting: try again later", "queue_full", kind="rate_limit_error")


def closing() -> ApiError:
    """503: the server is going down."""
    return ApiError(503, "the server is shutting down", kind="server_error", code="shutting_down")


def draining() -> ApiError:
    """503: an administrator said so; what is under way goes on."""
    return _try_later(503, "this server is being drained: ask another one, or try again later", "draining")


def no_room() -> ApiError:
    """503: at once, and nothing was begun."""
    return _try_later(503, "there is no room for this request now: ask another node, or try again later", "no_room")


def wrong_role(message: str) -> ApiError:
    """421: another node answers this."""
    return ApiError(421, message, code="wrong_role")


class HandoffFailed(ApiError):
    """502: what prefill wrote did not get here, or not to the pool; no token was said. `kind` is for the router."""

    def __init__(self, message: str, *, reason: str, first_missing_block: int | None = None) -> None:
        super().__init__(502, message, kind="server_error", code=f"handoff_{reason}")
        self.reason = reason
        self._first_missing_block = first_missing_block

    def document(self) -> dict[str, object]:
        """The body: OpenAI's shape, and what the router asks for."""
        more = {} if self._first_missing_block is None else {"first_missing_block": self._first_missing_block}
        return {**super().document(), "kind": self.reason, **more}


def used_ticket() -> ApiError:
    """502: a ticket that was answered here before."""
    return HandoffFailed("the ticket was used before, and is good for one answer: prefill again", reason=Reason.USED)


def too_late(timeout_s: float) -> ApiError:
    """504: the answer did not come in time."""
    return ApiError(504, f"the answer took longer than {timeout_s:g} s", kind="server_error", code="timeout")


def too_slow() -> ApiError:
    """408: nobody read what was said, until there was too much of it."""
    return ApiError(408, "the answer was given up: it was read too slowly", code=READ_TOO_SLOWLY)


def not_finite() -> ApiError:
    """500: the model's numbers are none, so there is no token to say; what was said before stands."""
    return ApiError(
        500,
        "the model computed NaN or infinity for this request: its weights are damaged, or overflow in this dtype",
        kind="server_error",
        code=NOT_FINITE,
    )


def internal() -> ApiError:
    """500: our fault. What happened is in the server's log and nowhere else."""
    return ApiError(500, "the server failed to answer this request", kind="server_error", code="internal_error")


def shown(value: object, limit: int = 80) -> str:
    """A client's value inside a message: escaped, so that any text can be sent back, and not too long."""
    try:
        text = ascii(value)
    except RecursionError:  # it could be parsed just so
        text = "what is nested so deeply"
    return text if len(text) <= limit else text[: limit - 3] + "..."
