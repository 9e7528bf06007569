"""An engine and who is being answered: the way of a request from its body into the engine, whatever is asked of it.

    body (`bodies.py`) -> Asked, tokens (`reading.py`) -> places -> Engine.submit -> an Answer

Not here: routes and keys (`app.py`, `middleware.py`), what fields mean (`openai.py`), how an answer is said
(`generate.py`, `pd_endpoints.py`), sockets and signals (`server.py`).

Invariants:
- Whatever ends a request, its engine request is cancelled or over.
- A request has a place for each of its choices, from when it is read to the last byte of its answer; there are as many
  as the engine takes. So a body that does not come, or takes long to read, is in nobody's way.
- A request's time begins with its first byte, and everything here ends with it.
- An attempt of a router is known from its arrival to its end, and only once at a time.
"""

import asyncio
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

from headwater.build import Running
from headwater.config.environment import default_node
from headwater.config.serve import ServeConfig
from headwater.core.errors import InvalidInput, ResourceClosed, needs_extra
from headwater.disagg.headers import ATTEMPT, SESSION_ID, TRACEPARENT
from headwater.engine.request import Sampling, Sending, Taking
from headwater.engine.sampler import seed_of_choice
from headwater.engine.scheduler import QueueFull
from headwater.serve import errors
from headwater.serve.answer import Answer, ClientLeft, Unread
from headwater.serve.asked import Asked
from headwater.serve.bodies import Bodies
from headwater.serve.errors import ApiError
from headwater.serve.hints import with_header
from headwater.serve.limits import Limits, limits_of
from headwater.serve.logprobs import TokenNames
from headwater.serve.middleware import admission_of, request_id, timeout_s, until_gone
from headwater.serve.openai import Api
from headwater.serve.phases import phases_of
from headwater.serve.prompts import require_room
from headwater.serve.reader_process import directory_digest
from headwater.serve.readers import Readers
from headwater.serve.reading import Envelope, Question, Reader
from headwater.serve.spans import of_question, operation, tell_answer
from headwater.serve.transcript import Transcript
from headwater.tracing.spans import Span

with needs_extra("serve"):
    from starlette.requests import ClientDisconnect, Request

_WORD: Final = re.compile(r"[!-~]{1,128}")
_MAX_TOLD: Final = 1 << 18  # log-probabilities in an answer in one piece: 12,483 tokens with 20 alternatives each


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request at the door."""

    http: Request
    request_id: str  # one for its whole way, not unique
    attempt: str  # unique
    arrived_s: float  # its first byte, on the loop's clock
    timeout_s: float
    span: Span

    @property
    def name(self) -> str:
        """What the engine and its log call its choices, with a number of their own behind."""
        return f"{self.request_id}/{self.attempt}"

    @property
    def until_s(self) -> float:
        """When it is over, on the loop's clock."""
        return self.arrived_s + self.timeout_s

    @property
    def left_s(self) -> float:
        """How much of its time is left."""
        return self.until_s - asyncio.get_running_loop().time()


class Service:
    """An engine and who is being answered. For the event loop's thread; close its `readers` there."""

    def __init__(self, running: Running, config: ServeConfig, limits: Limits | None = None, *, url: str = "") -> None:
        """`limits` of the door; None: as the config says. `url` is where routers find this node."""
        self.running = running
        self.config = config
        self.limits: Final = limits or limits_of(config)
        self.bodies: Final = Bodies(self.limits)
        self.url: Final = url
        self.node: Final = config.node or default_node()
        self.fingerprint: Final = f"hw-{running.engine.model.identity.digest.hex()[:12]}"
        self.tiers: Final = ("device", *running.cache.brain.tiers)
        self.token_names: Final = TokenNames(running.tokenizer)
        self.unread: Final = Unread()
        self.stopping = False  # nothing new is taken, and the end has come
        self.draining = False  # nothing new is taken, until somebody says otherwise
        self.max_waiting = config.max_waiting  # choices that may wait; never more than at the start
        self._attempts: dict[str, Answer | None] = {}  # under way
        self._num_inside = 0  # places that are taken: choices
        self._numbers: Final = count()  # of what the engine is given
        max_tokens = running.engine.max_tokens
        max_chars = config.max_prompt_chars or max_tokens * running.tokenizer.longest_token
        reader: dict[str, Any] = {
            "model": running.name,
            "max_tokens": max_tokens,
            "max_chars": max_chars,
            "max_answers": running.engine.max_requests,
            "vocab_size": running.engine.model.vocab_size,
        }
        here = Reader(running.tokenizer, **reader)
        self.readers: Final = Readers(
            {"question": here.question, "envelope": here.envelope},
            max_body_bytes=config.max_body_bytes,
            max_waiting=self.limits.max_unread,
            directory=str(config.model),
            digest=directory_digest(config.model),
            **reader,
        )

    # --- in and out ---------------------------------------------------------------------------------------------------

    @contextmanager
    def arriving(self, http: Request) -> Iterator[Arrival]:
        """Come in with a request, before its body is read; a client that leaves ends the block.

        Raises ApiError if there is no room now, or no more.
        """
        self._require_places(1)
        said = http.headers.get(ATTEMPT)
        if said is not None and not _WORD.fullmatch(said):
            raise errors.invalid(None, f"{ATTEMPT} must be a word of up to 128 characters, not {errors.shown(said)}")
        if said in self._attempts:
            raise ApiError(409, f"the attempt {said} is under way already", code="duplicate_attempt")
        arrival = Arrival(
            http=http,
            request_id=request_id(http.scope),
            attempt=said or secrets.token_hex(12),
            arrived_s=admission_of(http.scope).began_s,
            timeout_s=timeout_s(http),
            span=self._begin_span(http),
        )
        self._attempts[arrival.attempt] = None
        try:
            yield arrival
        except (ClientDisconnect, ClientLeft):  # nobody is there
            arrival.span.fail("gone")
            return
        except ApiError as error:
            arrival.span.fail(error.code or str(error.status))
            raise
        except asyncio.CancelledError:
            arrival.span.fail("cancelled")
            raise
        except BaseException:
            arrival.span.fail("fault")
            raise
        finally:
            del self._attempts[arrival.attempt]
            arrival.span.end(asyncio.get_running_loop().time())

    def _begin_span(self, http: Request) -> Span:
        name = f"{operation(http.url.path)} {self.running.name}"
        began_s = admission_of(http.scope).began_s
        span = self.running.tracing.begin(name, at_s=began_s, traceparent=http.headers.get(TRACEPARENT, ""))
        span.tell({"headwater.request_id": request_id(http.scope), "headwater.node": self.node})
        return span

    @contextmanager
    def places(self, number: int) -> Iterator[None]:
        """Take places, one for each choice. Raises ApiError if there are not so many, or no more."""
        self._require_places(number)
        self._num_inside += number
        try:
            yield
        finally:
            self._num_inside -= number

    def _require_places(self, number: int) -> None:
        if self.stopping:
            raise errors.closing()
        if self.draining:
            raise errors.draining()
        if number > self.num_free:
            raise errors.queue_full()

    @property
    def num_free(self) -> int:
        """Choices that would be taken now."""
        engine = self.running.engine  # which may have some that nobody waits for any more
        most = min(engine.max_requests, self.config.max_running + self.max_waiting)
        return max(0, most - max(self._num_inside, engine.num_requests))

    @contextmanager
    def answering(self, arrival: Arrival, answer: Answer) -> Iterator[None]:
        """While somebody waits for an answer; it is cancelled if it is not over then, or if its client leaves."""
        self._attempts[arrival.attempt] = answer
        listener = asyncio.create_task(_notice_leaving(arrival.http, answer))
        try:
            yield
        finally:
            listener.cancel()
            answer.close()
            self._count(answer)
            tell_answer(arrival.span, answer, self.running.name)
            self._forget(answer)

    @property
    def num_inside(self) -> int:
        """Requests that have not been answered, those whose bodies are still coming among them."""
        return len(self._attempts)

    @property
    def under_way(self) -> list[tuple[str, Answer | None]]:
        """The same, by attempt; None: its body is still coming."""
        return list(self._attempts.items())

    def progress_of(self, attempt: str) -> dict[str, Any] | None:
        """How it goes with an attempt, as a router wants to know; None if it is not here."""
        if attempt not in self._attempts:
            return None
        answer = self._attempts[attempt]
        idle_s = 0.0 if answer is not None and answer.waits_for_pool else self.running.engine.idle_s
        return {"idle_s": round(idle_s, 3), "state": "arriving" if answer is None else answer.state}

    def refuse(self) -> None:
        """Take no more requests: those that are not here yet, or not read, hear so at once."""
        self.stopping = True
        self.bodies.stop()
        self.readers.stop()

    def stop(self) -> None:
        """Cancel all answers, and take no more requests."""
        self.refuse()
        for answer in self._attempts.values():
            if answer is not None:
                answer.cancel()

    def _count(self, answer: Answer) -> None:
        metrics = self.running.metrics
        for choice in answer.choices:
            usage = choice.usage
            if usage is None:
                continue
            metrics.count("prompt_tokens_total", usage.prompt_tokens if choice.leads else 0)
            metrics.count("generated_tokens_total", usage.completion_tokens)
            metrics.observe("answer_seconds", usage.total_s)
            if usage.ttft_s is not None:
                metrics.observe("ttft_seconds", usage.ttft_s)
            if choice.handoff is not None and choice.finish_reason is not None:
                for name, seconds in phases_of(usage, choice.handoff).items():
                    metrics.observe("pd_phase_seconds", seconds, phase=name.removesuffix("_s"))

    # --- into the engine ----------------------------------------------------------------------------------------------

    async def read_envelope(self, arrival: Arrival, more_bytes: int) -> Envelope:
        """What the body in a router's envelope asks for, which may have so many bytes more. Raises ApiError; waits."""
        async with self.bodies.body_of(arrival.http, self.config.max_body_bytes + more_bytes) as body:
            envelope: Envelope = await self.readers.read("envelope", body, num_bytes=len(body), until_s=arrival.until_s)
            return envelope

    def submit(
        self, arrival: Arrival, api: Api, question: Question, *, handoffs: Sequence[Sending | Taking] = ()
    ) -> Answer:
        """Give it to the engine, all of it or nothing. Raises ApiError; then nothing was begun.

        `handoffs`, one for each prompt: only its first choice comes from another node, or goes to one. The other
        choices are computed where the prompt's blocks are read to.
        """
        asked = question.asked
        _require_few_logprobs(question)
        said = with_header(asked.said, arrival.http.headers.get(SESSION_ID))
        answer = Answer(self.running.engine, self.unread, timeout_s=arrival.timeout_s, until_s=arrival.until_s)
        for i, tokens in enumerate(question.prompts):
            handoff = handoffs[i] if handoffs else None
            # Without a cache each prompt is a tenant of its own, whose blocks nobody else can find.
            salt = asked.salt if self.config.cache else secrets.token_bytes(32)
            max_tokens = self._max_tokens(api, asked, len(tokens))
            first = None
            for number in range(1 if isinstance(handoff, Sending) else asked.num_choices):
                choice = answer.add(
                    Transcript(
                        self.running.tokenizer.stream(skip_special_tokens=asked.skip_special_tokens),
                        asked.stops,
                        include_stop=asked.include_stop,
                        min_tokens=asked.min_tokens,
                    ),
                    name=f"{arrival.name}/{next(self._numbers)}",  # clients choose the rest, and may choose the same
                    prompt=tokens,
                    sampling=self._sampling(asked, max_tokens, number),
                    salt=salt,
                    said=said,
                    echo=question.echoes[i] if asked.echo else "",
                    handoff=handoff if first is None else None,
                    after=first,
                )
                first = first or choice
        arrival.span.tell(of_question(api.endpoint, asked, self.running.name))
        for choice in answer.choices:
            self.running.tracing.follow(choice.request.name, arrival.span)
        try:
            try:
                self.running.engine.submit(*(choice.request for choice in answer.choices))
            except BaseException:  # nobody will hear how they end
                self._forget(answer)
                raise
        except QueueFull as error:
            raise errors.queue_full() from error
        except ResourceClosed as error:
            raise errors.closing() from error
        except InvalidInput as error:
            raise errors.invalid(api.prompt_param, str(error)) from error
        return answer

    def _forget(self, answer: Answer) -> None:
        for choice in answer.choices:
            self.running.tracing.forget(choice.request.name)

    def _sampling(self, asked: Asked, max_tokens: int, number: int) -> Sampling:
        """How a prompt's choice of that number is drawn: what nobody said is the model's default."""
        unsaid = self.running.defaults
        return Sampling(
            max_tokens=max_tokens,
            min_tokens=asked.min_tokens,
            temperature=unsaid.temperature if asked.temperature is None else asked.temperature,
            top_p=unsaid.top_p if asked.top_p is None else asked.top_p,
            top_k=unsaid.top_k if asked.top_k is None else asked.top_k,
            min_p=unsaid.min_p if asked.min_p is None else asked.min_p,
            repetition_penalty=(
                unsaid.repetition_penalty if asked.repetition_penalty is None else asked.repetition_penalty
            ),
            presence_penalty=asked.presence_penalty,
            frequency_penalty=asked.frequency_penalty,
            logit_bias=asked.logit_bias,
            seed=None if asked.seed is None else seed_of_choice(asked.seed, number),
            stop_ids=asked.stop_ids,
            logprobs=asked.logprobs,
            ignore_eos=asked.ignore_eos,
        )

    def _max_tokens(self, api: Api, asked: Asked, num_prompt: int) -> int:
        wanted, limit = asked.max_tokens, self.running.engine.max_tokens
        require_room(api, num_prompt, limit)
        room = limit - num_prompt
        if wanted is not None and wanted > room:
            message = (
                f"the prompt has {num_prompt} tokens and {wanted} are to be generated; together they may be {limit}"
            )
            raise errors.too_long("max_tokens", message)
        most = wanted or min(room, api.default_max_tokens or room)
        if asked.min_tokens > most:
            raise errors.invalid("min_tokens", f"min_tokens is {asked.min_tokens}, and at most {most} are generated")
        return most


def _require_few_logprobs(question: Question) -> None:
    """Refuse more of them than one body should hold. Where nobody said how many tokens, the body's size decides."""
    asked = question.asked
    if asked.logprobs is None or asked.stream or asked.max_tokens is None:
        return
    number = question.num_answers * asked.max_tokens * (asked.logprobs + 1)
    if number > _MAX_TOLD:
        message = (
            f"{question.num_answers} answers of {asked.max_tokens} tokens with {asked.logprobs} alternatives each are "
            f"{number} log-probabilities, and an answer in one piece may have {_MAX_TOLD}: ask for fewer, or stream"
        )
        raise errors.invalid("logprobs", message)


async def _notice_leaving(http: Request, answer: Answer) -> None:
    await until_gone(http.receive)
    answer.leave()
