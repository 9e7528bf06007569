"""What routers ask of a node: a prompt's ticket (`/pd/prefill`), and the answer to one (`/pd/decode`).

The protocol is in `disagg/router.py`. A prefill node says a ticket only when the pool has every block; a decode node
begins to answer only when it has them all, and says in OpenAI's shapes what a mixed node would say (`generate.py`).

Invariants: what a ticket may not do is refused before the engine hears of it; a connection that closes is a
cancellation, whatever the stage; every request of a router is one line in the log, with its one id.
"""

import asyncio
import json
import logging
import time
from typing import Any, Final

from headwater.core.errors import InvalidInput, NotInstalled
from headwater.core.role import Role
from headwater.disagg.outcome import Reason
from headwater.disagg.prompt import check_prompt
from headwater.disagg.protocol import Ticket, decode
from headwater.engine.request import Sending, Taking
from headwater.serve import errors
from headwater.serve.answer import Answer
from headwater.serve.errors import HandoffFailed
from headwater.serve.generate import Endpoint, Reply
from headwater.serve.phases import phases_of
from headwater.serve.reading import APIS, Prompt
from headwater.serve.service import Arrival

try:
    from starlette.responses import JSONResponse
    from starlette.types import Send
except ModuleNotFoundError as error:
    raise NotInstalled(f"the server needs {error.name}: pip install 'headwater[serve]'") from error

log = logging.getLogger("headwater")

PREFILL: Final = "/pd/prefill"
DECODE: Final = "/pd/decode"
ATTEMPTS: Final = "/pd/attempts"

_TICKET_BYTES: Final = 16 << 20  # more of a body, for a ticket in it


class _Asked(Endpoint):
    """An endpoint for routers, at nodes of one role."""

    role: Role
    path: str

    def _check_role(self) -> None:
        role = self._service.config.role
        if role is not self.role:
            raise errors.wrong_role(f"this is a {role} node, and {self.path} wants one with --role {self.role}")


class Prefill(_Asked):
    """A prompt, computed and written; its ticket."""

    role = Role.PREFILL
    path = PREFILL

    async def _handle(self, arrival: Arrival, send: Send) -> None:
        service = self._service
        asked = await service.read_envelope(arrival, _TICKET_BYTES)
        handoff = Sending(
            until_s=time.monotonic() + arrival.left_s,
            timeout_s=service.config.pd_timeout_s,
            request=arrival.request_id,
        )
        with service.place():
            answer = service.submit(arrival, APIS[asked.endpoint], asked.prompt, handoff=handoff)
            with service.answering(arrival, answer), _Line(self.path, arrival, answer):
                while await answer.next() is not None:
                    pass
                await JSONResponse(_sent(answer))(arrival.http.scope, arrival.http.receive, send)


class Decode(_Asked):
    """The answer to a ticket."""

    role = Role.DECODE
    path = DECODE

    async def _handle(self, arrival: Arrival, send: Send) -> None:
        service, config = self._service, self._service.config
        asked = await service.read_envelope(arrival, _TICKET_BYTES)
        api, prompt = APIS[asked.endpoint], asked.prompt
        ticket = await asyncio.to_thread(self._ticket, asked.ticket, prompt)
        # Half of the time at most for reading: what does not come is to be computed in the rest.
        until_s = time.monotonic() + min(config.pd_timeout_s, arrival.left_s / 2)
        handoff = Taking(ticket=ticket, until_s=until_s, recompute=config.pd_recompute)
        with service.place():
            answer = service.submit(arrival, api, prompt, handoff=handoff)
            with service.answering(arrival, answer), _Line(self.path, arrival, answer):
                await Reply(service, arrival, api, prompt.asked, answer).send(send)

    def _ticket(self, given: object, prompt: Prompt) -> Ticket:
        """The ticket, if it can be used here, for this prompt. Raises HandoffFailed."""
        running = self._service.running
        try:
            ticket = decode(json.dumps(given))
            why = running.refusal(ticket) or check_prompt(
                ticket, prompt.tokens, identity=running.engine.model.identity, salt=prompt.asked.salt
            )
        except (InvalidInput, ValueError, RecursionError) as error:
            raise HandoffFailed(str(error), reason=Reason.FOREIGN) from error
        if why is not None:
            late = ticket.expires_at_ms <= time.time() * 1000
            raise HandoffFailed(why, reason=Reason.EXPIRED if late else Reason.FOREIGN)
        return ticket


class _Line:
    """One line in the log for each request, whatever became of it."""

    def __init__(self, path: str, arrival: Arrival, answer: Answer) -> None:
        self._path = path
        self._arrival = arrival
        self._answer = answer

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, raised: BaseException | None, trace: object) -> None:
        answer, usage = self._answer, self._answer.usage
        error = answer.error or raised
        end = "gone" if error is None and answer.finish_reason is None else answer.finish_reason or str(error)
        phases = {} if usage is None else phases_of(usage, answer.handoff)
        told = ", ".join(f"{name} {seconds:.4f}" for name, seconds in phases.items())
        level = logging.INFO if answer.error is None else logging.WARNING
        log.log(
            level, "%s %s attempt %s: %s (%s)", self._path, self._arrival.request_id, self._arrival.attempt, end, told
        )


def _sent(answer: Answer) -> dict[str, Any]:
    """What a prefill node says."""
    ticket, usage = answer.ticket, answer.usage
    if ticket is None or usage is None:  # it ended well, so there is one
        raise errors.internal()
    phases = phases_of(usage, answer.handoff)
    return {
        "ticket": json.loads(ticket.encode()),
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "computed_tokens": usage.computed_tokens,
            "pool_bytes": usage.num_pool_bytes,
        },
        "phases": {**phases, "pool_s": phases.get("pool_write_s", 0.0)},
    }
