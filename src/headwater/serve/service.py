"""An engine and who is being answered: the way of a request from its body into the engine, whatever is asked of it.

    body -> Asked -> tokens (in a thread) -> Engine.submit -> an Answer

Not here: routes and keys (`app.py`, `door.py`), what fields mean (`openai.py`), how an answer is said (`generate.py`,
`tickets.py`), sockets and signals (`server.py`).

Invariants:
- Whatever ends a request, its engine request is cancelled or over.
- At most as many bodies are held at a time as the engine takes requests.
- An attempt of a router is known from its arrival to its end, and only once at a time.
"""

import asyncio
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from headwater.build import Running
from headwater.config import ServeConfig, default_node
from headwater.core.errors import InvalidInput, NotInstalled, ResourceClosed
from headwater.disagg.relay import ATTEMPT
from headwater.engine.request import Sampling, Sending, Taking
from headwater.engine.sampler import seed_of_choice
from headwater.engine.scheduler import QueueFull
from headwater.serve import errors
from headwater.serve.answer import Answer, Transcript
from headwater.serve.asked import Asked
from headwater.serve.body import Fields
from headwater.serve.door import request_id, timeout_s
from headwater.serve.errors import ApiError
from headwater.serve.openai import Api
from headwater.serve.phases import phases_of
from headwater.serve.prompts import encode

try:
    from starlette.requests import Request
except ModuleNotFoundError as error:
    raise NotInstalled(f"the server needs {error.name}: pip install 'headwater[serve]'") from error

_WORD: Final = re.compile(r"[!-~]{1,128}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request at the door."""

    http: Request
    request_id: str  # one for its whole way, not unique
    attempt: str  # unique
    arrived_s: float  # on the loop's clock
    timeout_s: float

    @property
    def name(self) -> str:
        """What the engine and its log call it."""
        return f"{self.request_id}/{self.attempt}"

    @property
    def left_s(self) -> float:
        """How much of its time is left."""
        return self.arrived_s + self.timeout_s - asyncio.get_running_loop().time()


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, with the prompts in tokens."""

    asked: Asked
    prompts: list[list[int]]


class Service:
    """An engine and who is being answered. For the event loop's thread."""

    def __init__(self, running: Running, config: ServeConfig, *, url: str = "") -> None:
        """`url` is where routers find this node."""
        self.running = running
        self.config = config
        self.url: Final = url
        self.node: Final = config.node or default_node()
        self.fingerprint: Final = f"hw-{running.engine.model.identity.digest.hex()[:12]}"
        self.tiers: Final = ("device", *running.cache.brain.tiers)
        self.stopping = False  # nothing new is taken
        self._attempts: dict[str, Answer | None] = {}  # under way
        self._num_inside = 0

    # --- in and out ---------------------------------------------------------------------------------------------------

    @contextmanager
    def inside(self, http: Request) -> Iterator[Arrival]:
        """Come in with a request. Raises ApiError if there is no room, or no more."""
        if self.stopping:
            raise errors.closing()
        if self._num_inside >= self.config.max_running + self.config.max_waiting:
            raise errors.queue_full()
        said = http.headers.get(ATTEMPT)
        if said is not None and not _WORD.fullmatch(said):
            raise errors.invalid(None, f"{ATTEMPT} must be a word of up to 128 characters, not {errors.shown(said)}")
        if said in self._attempts:
            raise ApiError(409, f"the attempt {said} is under way already", code="duplicate_attempt")
        arrival = Arrival(
            http=http,
            request_id=request_id(http.scope),
            attempt=said or secrets.token_hex(12),
            arrived_s=asyncio.get_running_loop().time(),
            timeout_s=timeout_s(http, self.config.request_timeout_s),
        )
        self._num_inside += 1
        self._attempts[arrival.attempt] = None
        try:
            yield arrival
        finally:
            self._num_inside -= 1
            del self._attempts[arrival.attempt]

    @contextmanager
    def answering(self, arrival: Arrival, answer: Answer) -> Iterator[None]:
        """While somebody waits for an answer; it is cancelled if it is not over then, or if its client leaves."""
        self._attempts[arrival.attempt] = answer
        listener = asyncio.create_task(_notice_leaving(arrival.http, answer))
        try:
            yield
        finally:
            listener.cancel()
            answer.cancel()
            self._count(answer)

    @property
    def num_inside(self) -> int:
        """Requests that have not been answered."""
        return self._num_inside

    def progress_of(self, attempt: str) -> dict[str, Any] | None:
        """How it goes with an attempt, as a router wants to know; None if it is not here."""
        if attempt not in self._attempts:
            return None
        answer = self._attempts[attempt]
        idle_s = 0.0 if answer is not None and answer.waits_for_pool else self.running.engine.idle_s
        return {"idle_s": round(idle_s, 3), "state": "arriving" if answer is None else answer.state}

    def stop(self) -> None:
        """Cancel all answers, and take no more requests."""
        self.stopping = True
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

    async def read(self, api: Api, body: Fields) -> Question:
        """What a body asks for. Raises ApiError."""
        asked = api.read(body)
        if asked.model not in (None, self.running.name):
            raise errors.unknown_model(asked.model or "", self.running.name)
        self._check(asked, api)
        prompts = await asyncio.to_thread(self._encode, api, asked)  # a long text takes a while
        return Question(asked, prompts)

    def _encode(self, api: Api, asked: Asked) -> list[list[int]]:
        added = asked.add_special_tokens
        return [encode(self.running.tokenizer, api, one, add_special_tokens=added) for one in asked.prompts]

    def _check(self, asked: Asked, api: Api) -> None:
        """Refuse what this server and this model can never do."""
        engine, vocab_size = self.running.engine, self.running.engine.model.vocab_size
        if asked.num_answers > engine.max_requests:
            message = (
                f"{asked.num_answers} answers are more than the {engine.max_requests} that this server takes at once"
            )
            raise errors.invalid("n" if asked.num_choices > 1 else api.prompt_param, message)
        for name, tokens in (("logit_bias", dict(asked.logit_bias).keys()), ("stop_token_ids", asked.stop_ids)):
            unknown = next((token for token in tokens if token >= vocab_size), None)
            if unknown is not None:
                message = f"{name} names the token {unknown}, and the vocabulary has {vocab_size}"
                raise errors.invalid(name, message)

    def submit(
        self, arrival: Arrival, api: Api, question: Question, *, handoffs: Sequence[Sending | Taking] = ()
    ) -> Answer:
        """Give it to the engine, all of it or nothing. Raises ApiError; then nothing was begun.

        `handoffs`, one for each prompt: only its first choice comes from another node, or goes to one. The other
        choices are computed where the prompt's blocks are read to.
        """
        asked = question.asked
        answer = Answer(self.running.engine, timeout_s=arrival.timeout_s, until_s=arrival.arrived_s + arrival.timeout_s)
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
                    name=arrival.name if asked.num_answers == 1 else f"{arrival.name}/{len(answer.choices)}",
                    prompt=tokens,
                    sampling=self._sampling(asked, max_tokens, number),
                    salt=salt,
                    echo=self._echo(asked, i, tokens) if asked.echo else "",
                    handoff=handoff if first is None else None,
                    after=first,
                )
                first = first or choice
        try:
            answer.begin()
        except QueueFull as error:
            raise errors.queue_full() from error
        except ResourceClosed as error:
            raise errors.closing() from error
        except InvalidInput as error:
            raise errors.invalid(api.prompt_param, str(error)) from error
        return answer

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

    def _echo(self, asked: Asked, number: int, tokens: list[int]) -> str:
        """A prompt as text."""
        prompt = asked.prompts[number]
        if isinstance(prompt, str):
            return prompt
        return self.running.tokenizer.decode(tokens, skip_special_tokens=asked.skip_special_tokens)

    def _max_tokens(self, api: Api, asked: Asked, num_prompt: int) -> int:
        wanted, limit = asked.max_tokens, self.running.engine.max_tokens
        room = limit - num_prompt
        if room < 1:
            message = f"the prompt has {num_prompt} tokens, and with its answer may have {limit}"
            raise errors.too_long(api.prompt_param, message)
        if wanted is not None and wanted > room:
            message = (
                f"the prompt has {num_prompt} tokens and {wanted} are to be generated; together they may be {limit}"
            )
            raise errors.too_long("max_tokens", message)
        most = wanted or min(room, api.default_max_tokens or room)
        if asked.min_tokens > most:
            raise errors.invalid("min_tokens", f"min_tokens is {asked.min_tokens}, and at most {most} are generated")
        return most


async def _notice_leaving(http: Request, answer: Answer) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
    answer.leave()
