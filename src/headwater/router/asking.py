"""Having a node do its part for one request: a prompt computed, or the client answered; and what that says of the node.

Between `router.py`, which decides who is asked and whether again, and `relay.py`, which speaks HTTP. Every attempt
gives its slots back, whatever ends it, and is told to the node table and the metrics.
"""

import asyncio
import json
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from headwater.disagg.events import event_of
from headwater.disagg.headers import DECODE, FIRST_SECONDS, POOL_SECONDS, PREFILL
from headwater.disagg.outcome import NOT_FINITE, READ_TOO_SLOWLY
from headwater.metrics import Metrics
from headwater.router.client import Client
from headwater.router.nodes import NodeSlot, NodeTable
from headwater.router.relay import NodeCall, Relay, RelayedAnswer
from headwater.router.routed_request import Attempt, Outcome, RoutedRequest, RoutePhase, with_usage
from headwater.router.trouble import Trouble, Unanswered, object_in
from headwater.router.whole import WholeNodeAnswer

_LAST_WORDS: Final = {  # of a stream, by code, that say nothing against the node
    READ_TOO_SLOWLY: Trouble.REJECTED,
    NOT_FINITE: Trouble.NOT_FINITE,
}


class Asker:
    """Asks nodes. For one event loop."""

    def __init__(
        self, relay: Relay, nodes: NodeTable, metrics: Metrics, *, fair_s: float, changed: Callable[[], None]
    ) -> None:
        """A node that was given `fair_s` is too slow; one that was given less, by a client in a hurry, may not be.

        `changed` is called when a slot was given back.
        """
        self._relay = relay
        self._nodes = nodes
        self._metrics = metrics
        self._fair_s = fair_s
        self._changed = changed

    async def prefill(self, routed: RoutedRequest, slot: NodeSlot) -> dict[str, Any]:
        """Have the prompt computed and written; the ticket, once the pool has everything. Raises Unanswered."""
        with self._attempting(routed, slot, RoutePhase.PREFILL) as attempt:
            async with self._relay.exchange(_node_call(routed, slot, PREFILL, {})) as heard:
                document = object_in(await heard.body())
            if document is None:
                raise Unanswered(Trouble.FAILED, f"{slot.name} sent no JSON object")
            ticket = document.get("ticket")
            if not isinstance(ticket, dict):
                raise Unanswered(Trouble.FAILED, f"{slot.name} answered without a ticket")
            if ticket.get("identity") != slot.entry.heartbeat.identity:
                raise Unanswered(Trouble.FAILED, f"{slot.name} gave a ticket of another identity than it told")
        routed.num_prefills += 1
        routed.add("prefill", attempt.seconds)
        phases, usage = document.get("phases"), document.get("usage")
        routed.told(phases)
        pool_s = phases.get("pool_s") if isinstance(phases, dict) else None
        if isinstance(pool_s, int | float) and 0 <= pool_s < 1e6:
            routed.add("pool", pool_s)
        computed = usage.get("computed_tokens") if isinstance(usage, dict) else None
        if isinstance(computed, int) and 0 < computed < 1e9 and attempt.seconds > 0:
            self._nodes.measured(slot, prefill_tokens_per_s=computed / attempt.seconds)
        return ticket

    async def answer(
        self, routed: RoutedRequest, slot: NodeSlot, ticket: Mapping[str, Any] | None, client: Client
    ) -> None:
        """Have a decode node, or without a ticket a mixed one, answer the client. Raises Unanswered.

        Before `routed.begun`, nothing has reached the client, and another may be asked.
        """
        phase = RoutePhase.MIXED if ticket is None else RoutePhase.DECODE
        path, more = (routed.call.endpoint, None) if ticket is None else (DECODE, {"ticket": ticket})
        with self._attempting(routed, slot, phase) as attempt:
            async with self._relay.exchange(_node_call(routed, slot, path, more)) as heard:
                if routed.call.stream:
                    await self._stream(routed, slot, attempt, heard, client)
                else:
                    await self._whole(routed, slot, attempt, heard, client)

    async def _whole(
        self, routed: RoutedRequest, slot: NodeSlot, attempt: Attempt, heard: RelayedAnswer, client: Client
    ) -> None:
        answer = WholeNodeAnswer.read(await heard.body(asked_for=True))
        if answer is None:
            raise Unanswered(Trouble.FAILED, f"{slot.name} sent no answer")
        now_s = asyncio.get_running_loop().time()
        first_s = heard.seconds(FIRST_SECONDS)
        _first(routed, slot, attempt, heard, now_s if first_s is None else min(now_s, attempt.began_s + first_s))
        routed.seconds["total"] = now_s - routed.began_s
        content = answer.content(routed)
        routed.begun = routed.done = True
        await client.whole(content)

    async def _stream(
        self, routed: RoutedRequest, slot: NodeSlot, attempt: Attempt, heard: RelayedAnswer, client: Client
    ) -> None:
        now_s = asyncio.get_running_loop().time
        trouble = Trouble.FAILED
        async for event, said in heard.events():
            if not routed.begun:
                if "choices" not in said:
                    raise Unanswered(Trouble.FAILED, f"{slot.name} began a stream without an answer")
                _first(routed, slot, attempt, heard, now_s())
                self._nodes.lives(slot, now_s())
                routed.begun = True
                await client.begin()
            if said.get("usage"):
                routed.seconds["total"] = now_s() - routed.began_s
                event = event_of(said) if with_usage(said, routed) else event
            await client.event(event)
            if "error" in said:  # the node's own last word; the client has it
                routed.outcome = Outcome.BROKEN
                code = said["error"].get("code") if isinstance(said["error"], dict) else None
                trouble = _LAST_WORDS.get(code, trouble) if isinstance(code, str) else trouble
        await client.end()
        routed.done = True
        await heard.tidy()
        if routed.outcome is Outcome.BROKEN:
            raise Unanswered(trouble, f"{slot.name} ended its stream with an error")

    @contextmanager
    def _attempting(self, routed: RoutedRequest, slot: NodeSlot, phase: RoutePhase) -> Iterator[Attempt]:
        """While a node is asked: remembers what became of it, and gives the slot back."""
        now_s = asyncio.get_running_loop().time
        span = routed.span.child(phase.value, at_s=now_s(), attributes={"headwater.node": slot.name})
        attempt = Attempt(phase=phase, node=slot.name, began_s=now_s(), span=span)
        routed.attempts.append(attempt)
        try:
            yield attempt
            attempt.outcome = "ok"
            self._nodes.lives(slot, now_s())
            self._nodes.went_well(slot)
            while routed.suspects:  # it was they, and not the prompt
                self._nodes.failed(routed.suspects.pop(), now_s(), at_once=False)
            routed.nodes[phase] = slot.name
        except Unanswered as error:
            attempt.outcome, attempt.why = error.trouble, str(error)
            self._blame(routed, slot, error.trouble, now_s())
            raise
        except BaseException as error:  # nobody waits any more, or a fault of our own: a probe must not stay open
            late = isinstance(error, asyncio.CancelledError) and now_s() >= routed.call.until_s
            attempt.outcome = "late" if late else "gone"
            if late and now_s() - attempt.began_s >= self._fair_s:
                self._nodes.failed(slot, now_s(), at_once=False)
            else:
                self._nodes.unproven(slot, now_s())
            raise
        finally:
            attempt.seconds = now_s() - attempt.began_s
            if attempt.outcome != "ok":
                routed.add("retries", attempt.seconds)
                span.fail(attempt.outcome)
            span.end(now_s())
            slot.end()
            self._metrics.count("router_attempts_total", phase=phase, outcome=attempt.outcome)
            self._changed()

    def _blame(self, routed: RoutedRequest, slot: NodeSlot, trouble: Trouble, now_s: float) -> None:
        lived_s, began_s = slot.entry.lived_s, routed.attempts[-1].began_s
        if trouble in (Trouble.REJECTED, Trouble.MISSING, Trouble.NOT_FINITE, Trouble.FAILED):
            self._nodes.lives(slot, now_s)  # only a node that has proven itself says so
        if trouble is Trouble.REFUSED:
            self._nodes.refused(slot, now_s)
        elif trouble in (Trouble.REJECTED, Trouble.MISSING):  # it works; others do not
            self._nodes.went_well(slot)
        elif trouble is Trouble.NOT_FINITE:
            self._nodes.unproven(slot, now_s)
            routed.suspects.append(slot)
        elif trouble is Trouble.UNREACHED and lived_s >= began_s:  # it is slow, or we are
            self._nodes.unproven(slot, now_s)
        else:
            hung = trouble is Trouble.HUNG and lived_s < now_s - self._relay.probe_s  # and not this request alone
            at_once = hung or trouble in (Trouble.BROKEN, Trouble.UNREACHED)
            if self._nodes.failed(slot, now_s, at_once=at_once):
                self._metrics.event("node_resting", node=slot.name, why=trouble)


def _first(routed: RoutedRequest, slot: NodeSlot, attempt: Attempt, heard: RelayedAnswer, now_s: float) -> None:
    """The first token is there."""
    pool_s = heard.seconds(POOL_SECONDS)
    if pool_s is not None:
        routed.add("pool", pool_s)
    slot.computed()
    routed.nodes[attempt.phase] = slot.name
    routed.add("decode" if attempt.phase is RoutePhase.DECODE else "mixed", now_s - attempt.began_s)
    routed.seconds["ttft"] = now_s - routed.began_s


def _node_call(routed: RoutedRequest, slot: NodeSlot, path: str, more: Mapping[str, Any] | None) -> NodeCall:
    """What is sent: the client's body, in an envelope where there is `more` to say."""
    call, content = routed.call, routed.call.content
    if more is not None:
        envelope = json.dumps({"endpoint": call.endpoint, **more}, allow_nan=False, separators=(",", ":"))
        content = envelope[:-1].encode() + b',"body":' + content + b"}"
    return NodeCall(
        node=slot.name,
        url=slot.entry.heartbeat.url,
        path=path,
        content=content,
        request_id=call.request_id,
        attempt=secrets.token_hex(8),
        timeout_s=call.until_s - asyncio.get_running_loop().time(),
        stream=call.stream and path != PREFILL,
        traceparent=routed.attempts[-1].span.traceparent or call.traceparent,
    )
