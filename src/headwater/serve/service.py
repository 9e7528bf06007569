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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from headwater.build import Running
from headwater.config import ServeConfig, default_node
from headwater.core.errors import InvalidInput, NotInstalled, ResourceClosed
from headwater.disagg.relay import ATTEMPT
from headwater.engine.request import Sampling, Sending, Taking
from headwater.engine.scheduler import QueueFull
from headwater.serve import errors
from headwater.serve.answer import Answer, Transcript
from headwater.serve.body import Fields
from headwater.serve.door import request_id, timeout_s
from headwater.serve.errors import ApiError
from headwater.serve.openai import Api, Asked
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
class Prompt:
    """What is asked, with the prompt in tokens."""

    asked: Asked
    tokens: list[int]


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
        usage, metrics = answer.usage, self.running.metrics
        if usage is None:
            return
        metrics.count("prompt_tokens_total", usage.prompt_tokens)
        metrics.count("generated_tokens_total", usage.completion_tokens)
        metrics.observe("answer_seconds", usage.total_s)
        if usage.ttft_s is not None:
            metrics.observe("ttft_seconds", usage.ttft_s)
        if answer.handoff is not None and answer.finish_reason is not None:
            for name, seconds in phases_of(usage, answer.handoff).items():
                metrics.observe("pd_phase_seconds", seconds, phase=name.removesuffix("_s"))

    # --- into the engine ----------------------------------------------------------------------------------------------

    async def read(self, api: Api, body: Fields) -> Prompt:
        """What a body asks for. Raises ApiError."""
        asked = api.read(body)
        if asked.model not in (None, self.running.name):
            raise errors.unknown_model(asked.model or "", self.running.name)
        tokens = await asyncio.to_thread(encode, self.running.tokenizer, api, asked)  # a long text takes a while
        return Prompt(asked, tokens)

    def submit(self, arrival: Arrival, api: Api, prompt: Prompt, *, handoff: Sending | Taking | None = None) -> Answer:
        """Give it to the engine. Raises ApiError; then nothing was begun."""
        asked = prompt.asked
        try:
            return Answer(
                self.running.engine,
                Transcript(self.running.tokenizer.stream(), asked.stops),
                name=arrival.name,
                prompt=prompt.tokens,
                sampling=Sampling(
                    max_tokens=self._max_tokens(api, prompt),
                    temperature=asked.temperature,
                    top_p=asked.top_p,
                    seed=asked.seed,
                    logprobs=asked.logprobs,
                    ignore_eos=asked.ignore_eos,
                ),
                # Without a cache each request is a tenant of its own, whose blocks nobody else can find.
                salt=asked.salt if self.config.cache else secrets.token_bytes(32),
                timeout_s=arrival.timeout_s,
                until_s=arrival.arrived_s + arrival.timeout_s,
                handoff=handoff,
            )
        except QueueFull as error:
            raise errors.queue_full() from error
        except ResourceClosed as error:
            raise errors.closing() from error
        except InvalidInput as error:
            raise errors.invalid(api.prompt_param, str(error)) from error

    def _max_tokens(self, api: Api, prompt: Prompt) -> int:
        wanted, limit, num_prompt = prompt.asked.max_tokens, self.running.engine.max_tokens, len(prompt.tokens)
        room = limit - num_prompt
        if room < 1:
            message = f"the prompt has {num_prompt} tokens, and with its answer may have {limit}"
            raise errors.too_long(api.prompt_param, message)
        if wanted is not None and wanted > room:
            message = (
                f"the prompt has {num_prompt} tokens and {wanted} are to be generated; together they may be {limit}"
            )
            raise errors.too_long("max_tokens", message)
        return wanted or min(room, api.default_max_tokens or room)


async def _notice_leaving(http: Request, answer: Answer) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
    answer.leave()
