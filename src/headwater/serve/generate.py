"""Saying an answer, in one piece or as a stream of events, in the shapes of OpenAI's APIs; and the plain endpoints.

Invariant: a stream begins with the first piece of text, so what fails before it is a plain error with a status.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from headwater.core.errors import needs_extra
from headwater.core.role import Role
from headwater.disagg.headers import FIRST_SECONDS, POOL_SECONDS
from headwater.serve import errors
from headwater.serve.answer import Answer, Choice
from headwater.serve.asked import Asked
from headwater.serve.errors import ApiError
from headwater.serve.logprobs import NameToken, token_id
from headwater.serve.openai import Api, Head, Said, dump, token_counts, usage_document
from headwater.serve.phases import phases_of
from headwater.serve.reading import Question
from headwater.serve.service import Arrival, Service
from headwater.serve.transcript import TextPiece

with needs_extra("serve"):
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import Receive, Scope, Send

MAX_ANSWER_BYTES: Final = 32 << 20  # of one in one piece; less than a router holds (`max_answer_bytes`)
_STREAM_HEADERS: Final = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))


class Generate:
    """One of OpenAI's endpoints, at a node that does all of it."""

    def __init__(self, service: Service, api: Api) -> None:
        self._service = service
        self._api = api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Raises ApiError."""
        service, api, config = self._service, self._api, self._service.config
        if config.role is not Role.MIXED:
            where = " or ".join(config.routers) or "its router (`headwater router`)"
            raise errors.wrong_role(f"this is a {config.role} node, which answers routers only: ask {where}")
        with service.arriving(Request(scope, receive)) as arrival:
            async with service.bodies.body_of(arrival.http, config.max_body_bytes) as body:
                question: Question = await service.readers.read(
                    "question", api.endpoint, body, num_bytes=len(body), until_s=arrival.until_s
                )
                del body  # an answer takes long
            with service.places(question.num_answers):
                answer = service.submit(arrival, api, question)
                with service.answering(arrival, answer):
                    await Reply(service, arrival, api, question.asked, answer).send(send)


class Reply:
    """An answer on its way to a client."""

    def __init__(self, service: Service, arrival: Arrival, api: Api, asked: Asked, answer: Answer) -> None:
        self._service = service
        self._arrival = arrival
        self._api = api
        self._asked = asked
        self._answer = answer
        self._head = Head.of(api.id_prefix + arrival.request_id, service.running.name, service.fingerprint)

    async def send(self, send: Send) -> None:
        """All of it. Raises ApiError if nothing of it was sent."""
        if self._asked.stream:
            await self._stream(send)
            return
        answer, http = self._answer, self._arrival.http
        whole = WholeAnswer(self._api, self._head, len(answer.choices), max_bytes=MAX_ANSWER_BYTES)
        while (more := await answer.next()) is not None:
            choice, piece = more
            whole.add(choice.index, piece, self._name)
        body = whole.body(answer.choices, self._usage())
        response = Response(body, media_type="application/json", headers=dict(self._times()))
        await response(http.scope, http.receive, send)

    async def _stream(self, send: Send) -> None:
        answer, head, asked = self._answer, self._head, self._asked
        silent = set(range(len(answer.choices)))  # choices of which nothing was said yet

        async def event(index: int, piece: TextPiece, finish_reason: str | None = None) -> None:
            choice = self._api.delta(index, piece, finish_reason, self._name, first=index in silent)
            silent.discard(index)
            await _send_event(send, head.document(self._api.part, [choice], **self._usage_so_far()))

        more = await answer.next()
        times = [(name.encode(), value.encode()) for name, value in self._times()]
        await send({"type": "http.response.start", "status": 200, "headers": [*_STREAM_HEADERS, *times]})
        try:
            while more is not None:
                choice, piece = more
                if piece:
                    await event(choice.index, piece)
                if choice.finish_reason is not None:
                    await event(choice.index, TextPiece(), choice.finish_reason)
                more = await answer.next()
            if asked.include_usage:
                await _send_event(send, head.document(self._api.part, [], usage=self._usage()))
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": True})
        except ApiError as error:  # too late for a status
            self._arrival.span.fail(error.code or str(error.status))
            await _send_event(send, error.document())
        await send({"type": "http.response.body", "body": b""})

    def _times(self) -> list[tuple[str, str]]:
        """What a router wants to know: seconds in the pool, and to the first token."""
        first_s = self._answer.first_s
        found = {
            POOL_SECONDS: self._answer.pool_s,
            FIRST_SECONDS: None if first_s is None else first_s - self._arrival.arrived_s,
        }
        return [(name, f"{seconds:.6f}") for name, seconds in found.items() if seconds is not None]

    def _usage_so_far(self) -> dict[str, Any]:
        """What each event says of it."""
        if not self._asked.include_usage:
            return {}
        if not self._asked.continuous_usage:
            return {"usage": None}
        return {"usage": token_counts(self._answer.num_prompt_tokens, self._answer.num_tokens)}

    def _usage(self) -> dict[str, Any] | None:
        usage = self._answer.usage
        if usage is None:
            return None
        phases = phases_of(usage, self._answer.handoff)
        paces = self._service.running.cache.paces()
        return usage_document(usage, self._answer.num_tokens, self._service.tiers, phases, paces, self._arrival.name)

    def _name(self, token: int) -> str:
        return token_id(token) if self._asked.tokens_as_ids else self._service.token_names(token)


class WholeAnswer:
    """An answer in one piece: its JSON is made while it comes, so that no part of the making takes long.

    A token with twenty alternatives is a kilobyte of JSON, and an answer may have very many tokens: made at its end,
    all at once, it would hold up everybody else for seconds. Made with each token it costs what a stream's events cost.

    Invariant: it is no larger than its limit. It is given up when it grows beyond, not when it is complete.
    """

    def __init__(self, api: Api, head: Head, num_choices: int, *, max_bytes: int) -> None:
        self._api = api
        self._head = head
        self._said = [Said() for _ in range(num_choices)]
        self._left_bytes = max_bytes
        self._max_bytes = max_bytes

    def add(self, index: int, piece: TextPiece, name: NameToken) -> None:
        """More of a choice; `name` says what a token is called. Raises ApiError if that is too much."""
        told = self._api.logprobs(piece.likelihoods, name)
        self._left_bytes -= self._said[index].add(piece.text, told)
        if self._left_bytes < 0:
            raise errors.answer_too_large(self._max_bytes)

    def body(self, choices: Sequence[Choice], usage: dict[str, Any] | None) -> bytes:
        """All of it, when every choice has ended."""
        head = dump(self._head.document(self._api.whole, [])).removesuffix(b"]}")  # where the choices go
        parts = [
            self._api.whole_choice(one.index, said, one.finish_reason)
            for one, said in zip(choices, self._said, strict=True)
        ]
        return b"%b%b],%b:%b}" % (head, b",".join(parts), dump("usage"), dump(usage))


async def _send_event(send: Send, document: Mapping[str, Any]) -> None:
    data = json.dumps(document, allow_nan=False, separators=(",", ":"))
    await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})
