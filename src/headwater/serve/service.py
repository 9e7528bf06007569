"""The way of one request from its body to the last byte of its answer.

    body -> Asked -> tokens (in a thread) -> Engine.submit -> pieces of text -> one JSON document, or a stream of events

Not here: routes and keys (`app.py`), what fields mean (`openai.py`), text and stop strings (`answer.py`), sockets and
signals (`server.py`).

Invariants:
- Whatever ends a request, its engine request is cancelled or over: a client that goes away, in the queue or in the
  middle of a stream, is noticed by a task that does nothing but listen for it.
- A stream begins with the first piece of text, so what fails before it is a plain error with a status.
- At most as many bodies are held at a time as the engine takes requests.
"""

import asyncio
import json
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from headwater.build import Running
from headwater.config import ServeConfig
from headwater.core.errors import InvalidInput, NotInstalled, ResourceClosed
from headwater.engine.request import Sampling
from headwater.engine.scheduler import QueueFull
from headwater.serve import errors
from headwater.serve.answer import Answer, ClientLeft, Piece, Transcript
from headwater.serve.body import Fields, read_json
from headwater.serve.errors import ApiError
from headwater.serve.logprobs import token_name
from headwater.serve.openai import Api, Asked, Head, Messages, usage_document

try:
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse
    from starlette.types import Receive, Scope, Send
except ModuleNotFoundError as error:
    raise NotInstalled(f"the server needs {error.name}: pip install 'headwater[serve]'") from error

_STREAM_HEADERS: Final = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))


class Service:
    """An engine and who is being answered. For the event loop's thread."""

    def __init__(self, running: Running, config: ServeConfig) -> None:
        self.running = running
        self.config = config
        self.fingerprint: Final = f"hw-{running.engine.model.identity.digest.hex()[:12]}"
        self.tiers: Final = ("device", *running.cache.brain.tiers)
        self.stopping = False
        self._answers: set[Answer] = set()
        self._num_inside = 0

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Come in with a request. Raises ApiError if there is no room, or no more."""
        if self.stopping:
            raise errors.closing()
        if self._num_inside >= self.config.max_running + self.config.max_waiting:
            raise errors.queue_full()
        self._num_inside += 1
        try:
            yield
        finally:
            self._num_inside -= 1

    @contextmanager
    def answering(self, answer: Answer) -> Iterator[None]:
        """While somebody waits for an answer; it is cancelled if it is not over then."""
        self._answers.add(answer)
        try:
            yield
        finally:
            self._answers.discard(answer)
            answer.cancel()
            self._count(answer)

    def stop(self) -> None:
        """Cancel all answers, and take no more requests."""
        self.stopping = True
        for answer in self._answers:
            answer.cancel()

    def _count(self, answer: Answer) -> None:
        usage, metrics = answer.usage, self.running.metrics
        if usage is not None:
            metrics.count("prompt_tokens_total", usage.prompt_tokens)
            metrics.count("generated_tokens_total", usage.completion_tokens)
            metrics.observe("answer_seconds", usage.total_s)
            if usage.ttft_s is not None:
                metrics.observe("ttft_seconds", usage.ttft_s)


class Generate:
    """An endpoint that generates, in the shapes of one API."""

    def __init__(self, service: Service, api: Api) -> None:
        self._service = service
        self._api = api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        try:
            with self._service.inside():
                await self._handle(Request(scope, receive), send)
        except (ClientDisconnect, ClientLeft):  # nobody is there
            return

    async def _handle(self, http: Request, send: Send) -> None:
        service, api = self._service, self._api
        body = await read_json(
            http.stream(),
            content_type=http.headers.get("content-type"),
            length=http.headers.get("content-length"),
            limit_bytes=service.config.max_body_bytes,
        )
        asked = api.read(Fields(body))
        if asked.model not in (None, service.running.name):
            raise errors.unknown_model(asked.model or "", service.running.name)
        prompt = await asyncio.to_thread(self._encode, asked)  # a long text takes a while
        name = api.id_prefix + secrets.token_hex(12)
        answer = self._submit(name, asked, prompt)
        head = Head.of(name, service.running.name, service.fingerprint)
        with service.answering(answer):
            listener = asyncio.create_task(_notice_leaving(http.receive, answer))
            try:
                if asked.stream:
                    await self._stream(answer, head, send, include_usage=asked.include_usage)
                else:
                    document = await self._whole(answer, head)
                    await JSONResponse(document)(http.scope, http.receive, send)
            finally:
                listener.cancel()

    def _encode(self, asked: Asked) -> list[int]:
        tokenizer, param = self._service.running.tokenizer, self._api.prompt_param
        if isinstance(asked.prompt, str):
            return tokenizer.encode(asked.prompt)
        if isinstance(asked.prompt, Messages):
            try:
                return tokenizer.encode_chat(asked.prompt.messages)
            except InvalidInput as error:
                raise errors.invalid(param, str(error)) from error
        return asked.prompt

    def _submit(self, name: str, asked: Asked, prompt: list[int]) -> Answer:
        engine, param = self._service.running.engine, self._api.prompt_param
        room = engine.max_tokens - len(prompt)
        if room < 1:
            message = f"the prompt has {len(prompt)} tokens, and with its answer may have {engine.max_tokens}"
            raise errors.too_long(param, message)
        if asked.max_tokens is not None and asked.max_tokens > room:
            message = (
                f"the prompt has {len(prompt)} tokens and {asked.max_tokens} are to be generated; "
                f"together they may be {engine.max_tokens}"
            )
            raise errors.too_long("max_tokens", message)
        try:
            return Answer(
                engine,
                Transcript(self._service.running.tokenizer.stream(), asked.stops),
                name=name,
                prompt=prompt,
                sampling=Sampling(
                    max_tokens=asked.max_tokens or min(room, self._api.default_max_tokens or room),
                    temperature=asked.temperature,
                    top_p=asked.top_p,
                    seed=asked.seed,
                    logprobs=asked.logprobs,
                    ignore_eos=asked.ignore_eos,
                ),
                # Without a cache each request is a tenant of its own, whose blocks nobody else can find.
                salt=asked.salt if self._service.config.cache else secrets.token_bytes(32),
                timeout_s=self._service.config.request_timeout_s,
            )
        except QueueFull as error:
            raise errors.queue_full() from error
        except ResourceClosed as error:
            raise errors.closing() from error
        except InvalidInput as error:
            raise errors.invalid(param, str(error)) from error

    async def _whole(self, answer: Answer, head: Head) -> dict[str, Any]:
        pieces = []
        while (piece := await answer.next()) is not None:
            pieces.append(piece)
        whole = Piece("".join(one.text for one in pieces), tuple(like for one in pieces for like in one.likelihoods))
        choice = self._api.choice(whole, answer.finish_reason, self._name)
        return head.document(self._api.whole, [choice], usage=self._usage(answer))

    async def _stream(self, answer: Answer, head: Head, send: Send, *, include_usage: bool) -> None:
        more = {"usage": None} if include_usage else {}

        async def event(piece: Piece, finish_reason: str | None, *, first: bool) -> None:
            choice = self._api.delta(piece, finish_reason, self._name, first=first)
            await _send_event(send, head.document(self._api.part, [choice], **more))

        piece, first = await answer.next(), True
        await send({"type": "http.response.start", "status": 200, "headers": list(_STREAM_HEADERS)})
        try:
            while piece is not None:
                await event(piece, None, first=first)
                piece, first = await answer.next(), False
            await event(Piece(), answer.finish_reason, first=first)
            if include_usage:
                await _send_event(send, head.document(self._api.part, [], usage=self._usage(answer)))
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": True})
        except ApiError as error:  # too late for a status
            await _send_event(send, error.document())
        await send({"type": "http.response.body", "body": b""})

    def _usage(self, answer: Answer) -> dict[str, Any] | None:
        if answer.usage is None:
            return None
        return usage_document(answer.usage, answer.num_tokens, self._service.tiers)

    def _name(self, token: int) -> str:
        return token_name(self._service.running.tokenizer, token)


async def _notice_leaving(receive: Receive, answer: Answer) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    answer.leave()


async def _send_event(send: Send, document: Mapping[str, Any]) -> None:
    data = json.dumps(document, allow_nan=False, separators=(",", ":"))
    await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})
