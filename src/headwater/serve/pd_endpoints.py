"""What routers ask of a node: a prompt's ticket (`/pd/prefill`), and the answer to one (`/pd/decode`).

The protocol is in `router/router.py`. A prefill node says a ticket only when the pool has every block; a decode node
begins to answer only when it has them all, and says in OpenAI's shapes what a mixed node would say (`generate.py`).

Invariants: what a ticket may not do is refused before the engine hears of it; one that nobody with the fleet's key has
sealed is no ticket, and each is good for one answer of this process; a connection that closes is a cancellation,
whatever the stage; every request of a router is one line in the log, with its one id.
"""

import asyncio
import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from headwater.core.errors import InvalidInput, needs_extra
from headwater.core.node_key import NodeKey
from headwater.core.results import Reason
from headwater.core.role import Role
from headwater.disagg.headers import DECODE, PREFILL
from headwater.disagg.prompt import check_prompt
from headwater.disagg.protocol import Ticket, decode
from headwater.disagg.used import TicketUse, UsedTickets
from headwater.engine.request import Sending, Taking
from headwater.serve import errors
from headwater.serve.answer import Answer
from headwater.serve.errors import HandoffFailed
from headwater.serve.generate import Reply
from headwater.serve.phases import phases_of
from headwater.serve.reading import APIS, Question
from headwater.serve.service import Arrival, Service

with needs_extra("serve"):
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.types import Receive, Scope, Send

log = logging.getLogger("headwater")

_TICKET_BYTES: Final = 16 << 20  # more of a body, for a ticket in it
_SEVERAL: Final = "tickets"  # of a body with several prompts, one for each
_UNSEALED: Final = "the ticket is not sealed with this node's key, or was changed: start all nodes with the same key"


class _ForRouters(ABC):
    """An endpoint for routers, at nodes of one role."""

    role: Role
    path: str

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Raises ApiError."""
        role = self._service.config.role
        if role is not self.role:
            raise errors.wrong_role(f"this is a {role} node, and {self.path} wants one with --role {self.role}")
        with self._service.arriving(Request(scope, receive)) as arrival:
            await self._handle(arrival, send)

    @abstractmethod
    async def _handle(self, arrival: Arrival, send: Send) -> None:
        """Answer. Raises ApiError."""


class Prefill(_ForRouters):
    """A prompt, computed and written; its ticket."""

    role = Role.PREFILL
    path = PREFILL

    async def _handle(self, arrival: Arrival, send: Send) -> None:
        service = self._service
        envelope = await service.read_envelope(arrival, _TICKET_BYTES)
        api, question = APIS[envelope.endpoint], envelope.question
        handoff = Sending(
            until_s=time.monotonic() + arrival.left_s,
            timeout_s=service.config.pd_timeout_s,
            request=arrival.request_id,
        )
        with service.places(len(question.prompts)):
            answer = service.submit(arrival, api, question, handoffs=[handoff] * len(question.prompts))
            with service.answering(arrival, answer), _logged(self.path, arrival, answer):
                while await answer.next() is not None:
                    pass
                document = _sent(answer, service.config.node_key)
                await JSONResponse(document)(arrival.http.scope, arrival.http.receive, send)


class Decode(_ForRouters):
    """The answer to a ticket."""

    role = Role.DECODE
    path = DECODE

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._used = UsedTickets()

    async def _handle(self, arrival: Arrival, send: Send) -> None:
        service, config = self._service, self._service.config
        envelope = await service.read_envelope(arrival, _TICKET_BYTES)
        api, question = APIS[envelope.endpoint], envelope.question
        num_answers, asked = question.num_answers, question.asked
        if num_answers > config.max_running:  # nobody waits here: what does not run at once would be in others' way
            message = f"{num_answers} answers are more than the {config.max_running} that run here at once"
            raise errors.invalid("n" if asked.num_choices > 1 else api.prompt_param, message)
        tickets = await asyncio.to_thread(self._tickets, envelope.ticket, question)
        # Half of the time at most for reading: what does not come is to be computed in the rest.
        until_s = time.monotonic() + min(config.pd_timeout_s, arrival.left_s / 2)
        handoffs = [Taking(ticket=one, until_s=until_s, recompute=config.pd_recompute) for one in tickets]
        answer: Answer | None = None
        taken: list[bytes] = []
        try:
            for ticket in tickets:
                self._take(ticket)
                taken.append(ticket.nonce)
            with service.places(num_answers):
                answer = service.submit(arrival, api, question, handoffs=handoffs)
                with service.answering(arrival, answer), _logged(self.path, arrival, answer):
                    await Reply(service, arrival, api, question.asked, answer).send(send)
        finally:
            if answer is None or not answer.begun:
                for nonce in taken:
                    self._used.give_back(nonce)

    def _take(self, ticket: Ticket) -> None:
        """Use a ticket. Raises ApiError if that may not be."""
        use = self._used.take(ticket.nonce, expires_at_ms=ticket.expires_at_ms, now_ms=time.time() * 1000)
        if use is not TicketUse.FIRST:
            raise errors.no_room() if use is TicketUse.NO_ROOM else errors.used_ticket()

    def _tickets(self, given: object, question: Question) -> list[Ticket]:
        """A ticket for each prompt, if they can be used here. Raises HandoffFailed."""
        several = given.get(_SEVERAL) if isinstance(given, dict) else None
        each = several if isinstance(several, list) else [given]
        if len(each) != len(question.prompts):
            message = f"{len(each)} tickets are not for {len(question.prompts)} prompts"
            raise HandoffFailed(message, reason=Reason.FOREIGN)
        salt = question.asked.salt
        return [self._ticket(one, tokens, salt) for one, tokens in zip(each, question.prompts, strict=True)]

    def _ticket(self, given: object, tokens: list[int], salt: bytes) -> Ticket:
        running = self._service.running
        try:
            ticket = decode(json.dumps(given))
            why = _UNSEALED if not ticket.is_sealed(self._service.config.node_key) else running.refusal(ticket)
            why = why or check_prompt(ticket, tokens, identity=running.engine.model.identity, salt=salt)
        except (InvalidInput, ValueError, RecursionError) as error:
            raise HandoffFailed(str(error), reason=Reason.FOREIGN) from error
        if why is not None:
            late = ticket.expires_at_ms <= time.time() * 1000
            raise HandoffFailed(why, reason=Reason.EXPIRED if late else Reason.FOREIGN)
        return ticket


@contextmanager
def _logged(path: str, arrival: Arrival, answer: Answer) -> Iterator[None]:
    """One line in the log for each request, whatever became of it."""
    raised: BaseException | None = None
    try:
        yield
    except BaseException as error:
        raised = error
        raise
    finally:
        why, usage = answer.error or raised, answer.usage
        end = "gone" if why is None and answer.finish_reason is None else answer.finish_reason or str(why)
        phases = {} if usage is None else phases_of(usage, answer.handoff)
        told = ", ".join(f"{name} {seconds:.4f}" for name, seconds in phases.items())
        level = logging.INFO if answer.error is None else logging.WARNING
        log.log(level, "%s %s attempt %s: %s (%s)", path, arrival.request_id, arrival.attempt, end, told)


def _sent(answer: Answer, key: NodeKey) -> dict[str, Any]:
    """What a prefill node says. Routers pass a ticket on as it is, and look at nothing of it but the identity."""
    usage = answer.usage
    tickets = [one.ticket.sealed(key).document() for one in answer.choices if one.ticket is not None]
    if usage is None or len(tickets) < len(answer.choices):  # it ended well, so they are there
        raise errors.internal()
    phases = phases_of(usage, answer.handoff)
    several = {"identity": tickets[0]["identity"], _SEVERAL: tickets}
    return {
        "ticket": tickets[0] if len(tickets) == 1 else several,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "computed_tokens": usage.computed_tokens,
            "pool_bytes": usage.num_pool_bytes,
        },
        "phases": {**phases, "pool_s": phases.get("pool_write_s", 0.0)},
    }
