"""An engine and who is being answered: the way of a request from its body into the engine, whatever is asked of it.

    body (`bodies.py`) -> Asked, tokens (`reading.py`) -> a place -> Engine.submit -> an Answer

Not here: routes and keys (`app.py`, `door.py`), what fields mean (`openai.py`), how an answer is said (`generate.py`,
`tickets.py`), sockets and signals (`server.py`).

Invariants:
- Whatever ends a request, its engine request is cancelled or over.
- A request has a place from when it is read to the last byte of its answer; there are as many as the engine takes. So a
  body that does not come, or takes long to read, is in nobody's way.
- A request's time begins with its first byte, and everything here ends with it.
- An attempt of a router is known from its arrival to its end, and only once at a time.
"""

import asyncio
import re
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from headwater.build import Running
from headwater.config import ServeConfig
from headwater.core.errors import InvalidInput, NotInstalled, ResourceClosed
from headwater.disagg.relay import ATTEMPT
from headwater.engine.request import Sampling, Sending, Taking
from headwater.engine.scheduler import QueueFull
from headwater.serve import errors
from headwater.serve.answer import Answer, Transcript
from headwater.serve.bodies import Bodies
from headwater.serve.door import request_id, timeout_s, visit_of
from headwater.serve.errors import ApiError
from headwater.serve.limits import SMALL_BYTES, Limits, limits_of
from headwater.serve.openai import Api
from headwater.serve.phases import phases_of
from headwater.serve.prompts import require_room
from headwater.serve.reader_process import directory_digest
from headwater.serve.readers import Readers
from headwater.serve.reading import Envelope, Prompt, Reader

try:
    from starlette.requests import Request
except ModuleNotFoundError as error:
    raise NotInstalled(f"the server needs {error.name}: pip install 'headwater[serve]'") from error

_WORD: Final = re.compile(r"[!-~]{1,128}")
_NUM_READING: Final = 4  # small bodies that are read at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request at the door."""

    http: Request
    request_id: str  # one for its whole way, not unique
    attempt: str  # unique
    arrived_s: float  # its first byte, on the loop's clock
    timeout_s: float

    @property
    def name(self) -> str:
        """What the engine and its log call it."""
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
    """An engine and who is being answered. For the event loop's thread; `close` it there."""

    def __init__(self, running: Running, config: ServeConfig, limits: Limits | None = None) -> None:
        """`limits` of the door; None: as the config says."""
        self.running = running
        self.config = config
        self.limits: Final = limits or limits_of(config)
        self.bodies: Final = Bodies(self.limits)
        self.fingerprint: Final = f"hw-{running.engine.model.identity.digest.hex()[:12]}"
        self.tiers: Final = ("device", *running.cache.brain.tiers)
        self.stopping = False  # nothing new is taken
        self._attempts: dict[str, Answer | None] = {}  # under way
        self._num_inside = 0  # places that are taken
        max_tokens = running.engine.max_tokens
        max_chars = config.max_prompt_chars or max_tokens * running.tokenizer.longest_token
        self._reader = Reader(running.tokenizer, model=running.name, max_tokens=max_tokens, max_chars=max_chars)
        self._threads = ThreadPoolExecutor(_NUM_READING, thread_name_prefix="headwater reading")
        self._readers = Readers(
            max_body_bytes=config.max_body_bytes,
            directory=str(config.model),
            digest=directory_digest(config.model),
            model=running.name,
            max_tokens=max_tokens,
            max_chars=max_chars,
        )

    def start_readers(self) -> None:
        """Have what reads large bodies ready before the first one comes. Does not wait for it."""
        self._readers.start()

    def close(self) -> None:
        """Read no more. Blocks for a moment. Idempotent."""
        self._readers.close()
        self._threads.shutdown(cancel_futures=True)

    # --- in and out ---------------------------------------------------------------------------------------------------

    @contextmanager
    def arriving(self, http: Request) -> Iterator[Arrival]:
        """Come in with a request, before its body is read. Raises ApiError if there is no room now, or no more."""
        self._require_place()
        said = http.headers.get(ATTEMPT)
        if said is not None and not _WORD.fullmatch(said):
            raise errors.invalid(None, f"{ATTEMPT} must be a word of up to 128 characters, not {errors.shown(said)}")
        if said in self._attempts:
            raise ApiError(409, f"the attempt {said} is under way already", code="duplicate_attempt")
        arrival = Arrival(
            http=http,
            request_id=request_id(http.scope),
            attempt=said or secrets.token_hex(12),
            arrived_s=visit_of(http.scope).began_s,
            timeout_s=timeout_s(http),
        )
        self._attempts[arrival.attempt] = None
        try:
            yield arrival
        finally:
            del self._attempts[arrival.attempt]

    @contextmanager
    def place(self) -> Iterator[None]:
        """Take a place. Raises ApiError if there is none, or no more."""
        self._require_place()
        self._num_inside += 1
        try:
            yield
        finally:
            self._num_inside -= 1

    def _require_place(self) -> None:
        if self.stopping:
            raise errors.closing()
        if not self.num_free:
            raise errors.queue_full()

    @property
    def num_free(self) -> int:
        """Places that are free."""
        return self.config.max_running + self.config.max_waiting - self._num_inside

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
        """Requests that have not been answered, those whose bodies are still coming among them."""
        return len(self._attempts)

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

    async def read(self, arrival: Arrival, api: Api) -> Prompt:
        """What a client's body asks for. Raises ApiError; waits for the client."""
        async with self.bodies.body_of(arrival.http, self.config.max_body_bytes) as body:
            prompt: Prompt = await self._read(arrival, "prompt", api.endpoint, body)
            return prompt

    async def read_envelope(self, arrival: Arrival, more_bytes: int) -> Envelope:
        """The same, of a body in a router's envelope, which may have so many bytes more."""
        async with self.bodies.body_of(arrival.http, self.config.max_body_bytes + more_bytes) as body:
            envelope: Envelope = await self._read(arrival, "envelope", body)
            return envelope

    async def _read(self, arrival: Arrival, what: str, *arguments: Any) -> Any:
        """Have a body read by a method of Reader, here or elsewhere."""
        num_bytes, until_s = len(arguments[-1]), arrival.until_s
        if num_bytes > SMALL_BYTES:
            return await self._readers.read(what, *arguments, num_bytes=num_bytes, until_s=until_s)
        try:
            async with asyncio.timeout_at(until_s):
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._threads, getattr(self._reader, what), *arguments)
        except TimeoutError as error:
            raise errors.too_late(arrival.timeout_s) from error

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
                until_s=arrival.until_s,
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
        require_room(api, num_prompt, limit)
        room = limit - num_prompt
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
