"""An answer on its way through the engine, as text: the event loop's side of `Engine.submit`.

An answer has one *choice* for each request of the engine that it takes: several, where a client wants several answers
to a prompt, or sent several prompts. They come as they come; each is a text of its own.

The engine's thread hands each output to the loop and never waits for it. Outputs that were not fetched yet, because a
client reads slowly, lie in the answer. How much lies in all answers together is bounded (`Unread`): when that is too
much, the answer in which most of it lies is given up.

Not here: HTTP, OpenAI's shapes, what a token is called.

Invariants:
- What was given out never changes, and a choice's pieces joined are the whole of it, whether it is streamed or not.
- What follows a stop string is never given out, nor the string itself unless asked for; what may begin one waits.
- A token's log-probability comes with the text in which the token begins, and not at all if a stop string cut that.
- All choices are taken by the engine, or none; what fails one of them ends the whole answer.
"""

import asyncio
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from headwater.core.errors import HeadwaterError
from headwater.disagg.outcome import Missing
from headwater.disagg.protocol import Ticket
from headwater.engine.engine import Engine
from headwater.engine.request import (
    NOTHING_SAID,
    Finish,
    Output,
    Request,
    RequestPhase,
    SaidOfTurn,
    Sampling,
    Sending,
    Taking,
    Usage,
)
from headwater.serve.errors import ApiError, HandoffFailed, closing, internal, no_room, not_finite, too_late, too_slow
from headwater.serve.transcript import TextPiece, Transcript

MAX_UNREAD: Final = 1 << 18  # outputs and alternatives that lie in all answers of a server: some 50 MB


class ClientLeft(HeadwaterError):
    """The client went away before its answer was complete: there is nobody to tell."""


@dataclass(slots=True, eq=False)
class Choice:
    """One text of an answer, and the engine's request behind it."""

    index: int
    request: Request
    transcript: Transcript
    echo: str = ""  # what is said before anything else, as long as it was not
    handoff: Sending | Taking | None = None  # the engine forgets it when it is done
    finish_reason: str | None = None  # known, like the usage, when it is over
    usage: Usage | None = None
    ticket: Ticket | None = None  # of one that goes on elsewhere

    @property
    def leads(self) -> bool:
        """Whether it is the first to its prompt."""
        return self.request.after is None

    def take(self, output: Output) -> TextPiece:
        """More of its text."""
        piece = self.transcript.push(output.tokens, output.logprobs)
        if output.finish is not None:
            rest = self.transcript.finish()
            piece = TextPiece(piece.text + rest.text, piece.likelihoods + rest.likelihoods)
            self.finish_reason = str(Finish.STOP if self.transcript.stopped else output.finish)
        if self.echo and (piece or output.finish is not None):
            piece, self.echo = TextPiece(self.echo + piece.text, piece.likelihoods), ""
        return piece


class Unread:
    """How much lies in the answers of a server: tokens, and alternatives to them. For one event loop."""

    def __init__(self, limit: int = MAX_UNREAD) -> None:
        self._limit = limit
        self._num = 0
        self._by_answer: dict[Answer, int] = {}

    @property
    def num(self) -> int:
        """In all."""
        return self._num

    def add(self, answer: "Answer", number: int) -> None:
        """So much more lies in an answer, or less. Where that is too much, the largest is given up."""
        self._num += number
        self._by_answer[answer] = self._by_answer.get(answer, 0) + number
        if number > 0 and self._num > self._limit:
            max(self._by_answer, key=self._by_answer.__getitem__).give_up()

    def forget(self, answer: "Answer") -> None:
        """Nothing lies in it any more. Idempotent."""
        self._num -= self._by_answer.pop(answer, 0)


class Answer:
    """What becomes of a client's request. Belongs to the event loop that made it; `close` it in the end, always."""

    def __init__(self, engine: Engine, unread: Unread, *, timeout_s: float, until_s: float) -> None:
        """`until_s` is on the loop's clock. `add` choices, then submit their requests to the engine."""
        self.choices: list[Choice] = []
        self.error: ApiError | None = None  # why there was no answer, or no more of it
        self.first_s: float | None = None  # on the loop's clock: when its first token came
        self._engine = engine
        self._unread = unread
        self._dropping = False  # nobody wants what still comes
        self._loop = asyncio.get_running_loop()
        self._outputs: asyncio.Queue[tuple[Choice, Output] | None] = asyncio.Queue()  # None: it was given up
        self._timeout_s = timeout_s
        self._until_s = until_s
        self._num_over = 0
        self._client_left = False

    def add(
        self,
        transcript: Transcript,
        *,
        name: str,
        prompt: list[int],
        sampling: Sampling,
        salt: bytes,
        said: SaidOfTurn = NOTHING_SAID,
        echo: str = "",
        handoff: Sending | Taking | None = None,
        after: Choice | None = None,
    ) -> Choice:
        """One more choice; `after` another one to the same prompt, which is then computed once."""
        request = Request(
            name=name,
            prompt=prompt,
            sampling=sampling,
            salt=salt,
            said=said,
            listen=lambda output: self._listen(choice, output),
            handoff=handoff,
            after=None if after is None else after.request,
        )
        choice = Choice(len(self.choices), request, transcript, echo, handoff)
        self.choices.append(choice)
        return choice

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer, those of stop strings included."""
        return sum(choice.transcript.num_tokens for choice in self.choices)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of its prompts, each counted once."""
        return sum(len(choice.request.prompt) for choice in self.choices if choice.leads)

    @property
    def finish_reason(self) -> str | None:
        """Why its first choice ended; known when all have."""
        return self.choices[0].finish_reason if self._num_over == len(self.choices) else None

    @property
    def begun(self) -> bool:
        """Whether anything is known of it: a token, or that a choice has none."""
        return self.first_s is not None or any(choice.finish_reason is not None for choice in self.choices)

    @property
    def usage(self) -> Usage | None:
        """What it cost; known when all choices have ended."""
        found = [(choice.leads, choice.usage) for choice in self.choices if choice.usage is not None]
        return total_usage(found) if len(found) == len(self.choices) else None

    @property
    def handoff(self) -> Sending | Taking | None:
        """Where it goes, or came from."""
        return self.choices[0].handoff

    @property
    def pool_s(self) -> float | None:
        """Seconds that handoffs spent in the pool; known when the first token is there."""
        return max((one for choice in self.choices if (one := choice.request.pool_s) is not None), default=None)

    @property
    def state(self) -> str:
        """Where it is, for people."""
        under_way = (choice for choice in self.choices if choice.finish_reason is None)
        return str(next(under_way, self.choices[0]).request.phase)

    @property
    def waits_for_pool(self) -> bool:
        """Whether it waits for the pool, and still has time to: then nothing needs to get done for it here."""
        now_s = time.monotonic()
        return any(
            choice.request.phase in (RequestPhase.FETCHING, RequestPhase.SENDING)
            and choice.handoff is not None
            and now_s < choice.handoff.until_s
            for choice in self.choices
        )

    async def next(self) -> tuple[Choice, TextPiece] | None:
        """More of a choice, or that it is over (it has a finish_reason then); None when all are.

        Raises ApiError if there is no answer, or no more of it in time; ClientLeft.
        """
        while self._num_over < len(self.choices):
            if self._client_left:  # what lies here is for nobody
                raise ClientLeft("the client went away")
            try:
                choice, output = await self._output()
                if self.first_s is None and output.tokens:
                    self.first_s = self._loop.time()
                if output.finish is not None:
                    self._end(choice, output)
            except ApiError as error:
                self.error = error
                raise
            piece = choice.take(output)
            if choice.transcript.stopped and output.finish is None:
                self._engine.cancel(choice.request)  # it says when it is over, and what it cost
            if piece or output.finish is not None:
                return choice, piece
        return None

    def cancel(self) -> None:
        """Nobody wants it any more. Does not wait: the engine frees what it holds at its next step. Idempotent."""
        for choice in self.choices:
            if choice.usage is None:
                self._engine.cancel(choice.request)

    def give_up(self) -> None:
        """Too much lies here that the client has not read: whoever calls `next` hears so."""
        self.close()
        self._outputs.put_nowait(None)

    def close(self) -> None:
        """Cancel it, and let go of what lies here and of what still comes. Idempotent."""
        self.cancel()
        self._dropping = True
        while not self._outputs.empty():
            self._outputs.get_nowait()
        self._unread.forget(self)

    def leave(self) -> None:
        """The client went away: whoever waits in `next` hears so."""
        self._client_left = True
        self.cancel()

    async def _output(self) -> tuple[Choice, Output]:
        if not self._outputs.empty():
            await asyncio.sleep(0)  # however much lies here: others have their turn between two outputs
        try:
            async with asyncio.timeout_at(self._until_s):
                found = await self._outputs.get()
        except TimeoutError as error:
            self.cancel()
            raise too_late(self._timeout_s) from error
        if found is None:
            raise too_slow()
        self._unread.add(self, -_weight(found[1]))
        return found

    def _end(self, choice: Choice, output: Output) -> None:
        self._num_over += 1
        choice.usage, choice.ticket = output.usage, output.ticket
        if self._client_left:
            raise ClientLeft("the client went away")
        if choice.transcript.stopped:  # it was complete before
            return
        if output.finish is Finish.REFUSED:
            raise no_room()
        if output.finish is Finish.NOT_FINITE:
            raise not_finite()
        if output.finish is Finish.FAILED:
            raise _failure(output)
        if output.finish is Finish.CANCELLED:
            raise closing()

    def _listen(self, choice: Choice, output: Output) -> None:
        """Called by the engine's thread."""
        with suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(self._put, choice, output)

    def _put(self, choice: Choice, output: Output) -> None:
        if not self._dropping:
            self._outputs.put_nowait((choice, output))
            self._unread.add(self, _weight(output))


def _weight(output: Output) -> int:
    """What it counts for in memory, roughly: itself, and its alternatives."""
    return 1 + sum(len(one.top) for one in output.logprobs)


def total_usage(found: Sequence[tuple[bool, Usage]]) -> Usage:
    """What several choices cost together. Prompts, and what was cached of them, count once: where the first is true.

    What tiers gave and what was computed is of all choices: those that come after the first find its blocks.
    """
    if len(found) == 1:
        return found[0][1]
    usages, leads = [usage for _, usage in found], [usage for first, usage in found if first]
    tiers = {tier for usage in usages for tier in usage.cached_by_tier}
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in leads),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in leads),
        cached_by_tier={tier: sum(usage.cached_by_tier.get(tier, 0) for usage in usages) for tier in tiers},
        computed_tokens=sum(usage.computed_tokens for usage in usages),
        ttft_s=_least(usage.ttft_s for usage in usages),
        total_s=max(usage.total_s for usage in usages),
        preemptions=sum(usage.preemptions for usage in usages),
        queue_s=_least(usage.queue_s for usage in usages),
        pool_s=max((usage.pool_s for usage in usages if usage.pool_s is not None), default=None),
        num_pool_bytes=sum(usage.num_pool_bytes for usage in usages),
    )


def _least(values: Iterable[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


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
