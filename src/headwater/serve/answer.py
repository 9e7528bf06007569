"""One request on its way through the engine, and its answer as text: the event loop's side of `Engine.submit`.

The engine's thread hands each output to the loop and never waits for it. Outputs that were not fetched yet lie in a
queue without a bound of its own: one output per token, so `max_tokens` bounds it, however slowly a client reads.

Not here: HTTP, OpenAI's shapes, what a token is called.

Invariants:
- What was given out never changes, and pieces joined are the whole answer, whether it is streamed or not.
- A stop string and what follows it is never given out; text that may be the beginning of one waits.
- A token's log-probability comes with the text in which the token begins, and not at all if a stop string cut that.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from headwater.core.errors import HeadwaterError
from headwater.disagg.outcome import Missing
from headwater.disagg.protocol import Ticket
from headwater.engine.engine import Engine
from headwater.engine.request import Finish, Output, Phase, Request, Sampling, Sending, Taking, TokenLogprob, Usage
from headwater.engine.tokenizer import Detokenizer
from headwater.serve.errors import ApiError, HandoffFailed, closing, internal, no_room, too_late


class ClientLeft(HeadwaterError):
    """The client went away before its answer was complete: there is nobody to tell."""


@dataclass(frozen=True, slots=True)
class Likelihood:
    """A token's log-probability, and where in the answer its text begins."""

    told: TokenLogprob
    offset: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that is certain, with the log-probabilities of the tokens that begin in it, if wanted."""

    text: str = ""
    likelihoods: tuple[Likelihood, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.text or self.likelihoods)


class Transcript:
    """The text of an answer as it grows, up to the first stop string."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str] = ()) -> None:
        self.stopped = False  # by a stop string: nothing more will come
        self.num_tokens = 0  # up to the one that ended the answer
        self._detokenizer = detokenizer
        self._stops = tuple(stops)
        self._num_given = 0  # characters
        self._held = ""  # the beginning of a stop string, perhaps
        self._waiting: list[Likelihood] = []  # of tokens that begin in `_held` or behind it

    def push(self, tokens: Sequence[int], told: Sequence[TokenLogprob] = ()) -> Piece:
        """Add tokens; return what is certain now. After a stop string there is nothing."""
        for i, token in enumerate(tokens):
            if self.stopped:
                break
            offset = self._num_given + len(self._held)
            if i < len(told):
                self._waiting.append(Likelihood(told[i], offset))
            self._held += self._detokenizer.push(token)
            self.num_tokens += 1
            self._look()
        return self._give(len(self._held) if self.stopped else len(self._held) - self._num_suspicious())

    def finish(self) -> Piece:
        """The rest, when no more tokens come."""
        if not self.stopped:
            self._held += self._detokenizer.finish()
            self._look()
        return self._give(len(self._held), last=not self.stopped)

    def _look(self) -> None:
        """Cut at the first stop string."""
        found = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.stopped = True
            self._held = self._held[: min(found)]

    def _num_suspicious(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0

    def _give(self, length: int, *, last: bool = False) -> Piece:
        text, self._held = self._held[:length], self._held[length:]
        self._num_given += len(text)
        ready = [one for one in self._waiting if last or one.offset < self._num_given]
        self._waiting = self._waiting[len(ready) :]
        return Piece(text, tuple(ready))


class Answer:
    """A request that was submitted. Belongs to the event loop that made it; `cancel` it in the end, in any case."""

    def __init__(
        self,
        engine: Engine,
        transcript: Transcript,
        *,
        name: str,
        prompt: list[int],
        sampling: Sampling,
        salt: bytes,
        timeout_s: float,
        until_s: float,
        handoff: Sending | Taking | None = None,
    ) -> None:
        """Submit it; `until_s` is on the loop's clock. Raises what `Engine.submit` raises; then nothing was taken."""
        self.finish_reason: str | None = None  # known, like the usage, when `next` has said that there is no more
        self.usage: Usage | None = None
        self.ticket: Ticket | None = None  # of one that goes on elsewhere, then too
        self.error: ApiError | None = None  # why there was no answer, or no more of it
        self.first_s: float | None = None  # on the loop's clock: when its first token came
        self._engine = engine
        self._transcript = transcript
        self._loop = asyncio.get_running_loop()
        self._outputs: asyncio.Queue[Output] = asyncio.Queue()
        self._timeout_s = timeout_s
        self._until_s = until_s
        self._over = False
        self._client_left = False
        self._handoff = handoff  # the engine forgets it when it is done
        self._request = Request(
            name=name, prompt=prompt, sampling=sampling, salt=salt, listen=self._listen, handoff=handoff
        )
        engine.submit(self._request)

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer, those of a stop string included."""
        return self._transcript.num_tokens

    @property
    def name(self) -> str:
        """What the engine calls it."""
        return self._request.name

    @property
    def handoff(self) -> Sending | Taking | None:
        """Where it goes, or came from."""
        return self._handoff

    @property
    def pool_s(self) -> float | None:
        """Seconds that a handoff spent in the pool; known when the first token is there."""
        return self._request.pool_s

    @property
    def state(self) -> str:
        """Where it is, for people."""
        return str(self._request.phase)

    @property
    def waits_for_pool(self) -> bool:
        """Whether it waits for the pool, and still has time to: then nothing needs to get done for it here."""
        moving = self._request.phase in (Phase.FETCHING, Phase.SENDING)
        return moving and self._handoff is not None and time.monotonic() < self._handoff.until_s

    async def next(self) -> Piece | None:
        """More of the answer, None at its end. Raises ApiError if there is none, or no more in time; ClientLeft."""
        try:
            return await self._next()
        except ApiError as error:
            self.error = error
            raise

    async def _next(self) -> Piece | None:
        while self.finish_reason is None:
            if self._client_left:  # what lies here is for nobody
                raise ClientLeft("the client went away")
            output = await self._output()
            if self.first_s is None and output.tokens:
                self.first_s = self._loop.time()
            piece = self._transcript.push(output.tokens, output.logprobs)
            if self._transcript.stopped:
                self._engine.cancel(self._request)  # it says when it is over, and what it cost
            if output.finish is not None:
                self._end(output)
                rest = self._transcript.finish()
                piece = Piece(piece.text + rest.text, piece.likelihoods + rest.likelihoods)
                self.finish_reason = str(Finish.STOP if self._transcript.stopped else output.finish)
            if piece:
                return piece
        return None

    def cancel(self) -> None:
        """Nobody wants it any more. Does not wait: the engine frees what it holds at its next step. Idempotent."""
        if not self._over:
            self._engine.cancel(self._request)

    def leave(self) -> None:
        """The client went away: whoever waits in `next` hears so."""
        self._client_left = True
        self.cancel()

    async def _output(self) -> Output:
        try:
            async with asyncio.timeout_at(self._until_s):
                return await self._outputs.get()
        except TimeoutError as error:
            self.cancel()
            raise too_late(self._timeout_s) from error

    def _end(self, output: Output) -> None:
        self._over = True
        self.usage, self.ticket = output.usage, output.ticket
        if self._client_left:
            raise ClientLeft("the client went away")
        if output.finish is Finish.REFUSED:
            raise no_room()
        if output.finish is Finish.FAILED:
            raise _failure(output)
        if output.finish is Finish.CANCELLED and not self._transcript.stopped:
            raise closing()

    def _listen(self, output: Output) -> None:
        """Called by the engine's thread."""
        with suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(self._outputs.put_nowait, output)


def _failure(output: Output) -> ApiError:
    """What a client hears of a request that failed. Faults of ours are in the log and nowhere else."""
    found = output.unmoved
    if found is None:
        return internal()
    if isinstance(found, Missing):
        message = f"block {found.first_block} of the prompt could not be had from the pool: {found.detail}"
        return HandoffFailed(message, reason=found.reason, first_missing_block=found.first_block)
    message = f"the pool did not take block {found.num_blocks} of the prompt: {found.detail}"
    return ApiError(502, message, kind="server_error", code=f"handoff_{found.reason}")
