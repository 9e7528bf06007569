"""The router: one OpenAI address in front of prefill, decode and mixed nodes. It decides who is asked, and how often.

What happens to one request: a look into the residency index, bounded (`lookup.py`); a place in line until some node has
room for all its answers (`wait_line.py`); a choice (`choice.py`); a node does its part (`asking.py`, `relay.py`); and
perhaps again. Not here: HTTP towards clients (`router/app.py`), who is there (`nodes.py`).

Invariants:
- Every request ends by its deadline: with an answer, or with an error that says why.
- What can still fail reaches no client: a stream begins with the first whole event of a node that has everything it
  needs, an answer in one piece is sent when it is whole. Until then another node may be tried; afterwards never. So a
  client's tokens are one node's, and no token precedes a 502.
- Trying again is bounded: `max_attempts` failures, `max_refusals` refusals, `max_prefills` prefills, the deadline.
- Whatever ends a request, its exchange is closed and its slots given back.

# The protocol

    client --/v1/...--> router --/pd/prefill--> prefill node   computes, writes the pool, answers with a ticket
                          |-----/pd/decode----> decode node    reads the pool, answers: the first token too
                          `-----/v1/...-------> mixed node     does both

All bodies are JSON. Everything under `/pd/`, and what the router sends to mixed nodes, is signed with the fleet's key,
and so is the head of every answer: `node_auth.py` has those headers. 401: it is not, or not for this process, or for
the second time. A prompt goes only to a process that has proven to hold the key (`GET /pd/hello`: 204) and is still
there (`signing.py`). Every request of the router also has these headers:

    x-request-id            the client's, or one that the router made: for logs, tickets, the answer's id. Not unique
    x-headwater-attempt     hex, one per attempt: unique
    x-headwater-timeout-s   seconds until nobody waits any more: no work after that

**A connection that closes is a cancellation**: at whatever stage, the node stops working on it and frees what it holds.

`POST /pd/prefill`: {"endpoint": "/v1/completions" or "/v1/chat/completions", "body": the client's}

    200  {"ticket": {...}, "usage": {"prompt_tokens", "cached_tokens", "computed_tokens"},
          "phases": {"pool_s", "queue_s", "prefill_s", "pool_write_s"}}
         only when the pool has every block. `ticket` is sealed, and opaque here but for its `identity` (hex), which
         must be the one in the heartbeat. `pool_s`: seconds spent writing that computing did not hide. All but the
         ticket may lack. The parts become some of `usage.headwater.phases` of the answer, beside those that the decode
         node says there

`POST /pd/decode`: {"endpoint", "ticket", "body"}

    200  OpenAI's answer: with `stream` true in the body `text/event-stream`, that ends with `data: [DONE]`; else JSON.
         It holds the whole answer, the ticket's first token included, and begins only when every block was read and
         verified. Headers: `x-headwater-pool-s`, seconds spent reading; where the answer is JSON,
         `x-headwater-first-s`, seconds from the request to the first token. An event {"error": {...}} ends a stream
         that cannot go on
    502  {"error": {...}, "kind": K, "first_missing_block": N}, never after a token. With K missing, damaged, foreign,
         expired, unknown_version or used the router has the prompt prefilled again; with any other it asks another node

A mixed node gets the client's body at the client's path, and answers as above.

What all three may answer, in OpenAI's error shape {"error": {"message", "type", "param", "code"}}:

    503, 429            no room. At once: nothing was begun. Another node is asked, and this one left alone for a moment
    400, 413, 422,      the client's fault: the client gets this body and status
    404 `model_not_found`
                        So is a 200 of more than `max_answer_bytes`: 400 `answer_too_large`
    500 `not_finite`    the model computed NaN: one more node is asked. Only if that one answers, it was a failure
    any other           a failure, told in `message`: another node is asked; three in a row and the node is left alone

`GET /pd/attempts/{x-headwater-attempt}`, asked when a node says nothing for `silence_s`:

    200  {"idle_s": seconds since the engine last got anything done, 0 while this attempt waits for the pool and has
         time left to, "state": for people}: it is waited for, unless `idle_s` is more than `silence_s`
    404  it does not know that attempt (any more): the router gives it up, and leaves the node alone for a while

`POST /pd/nodes` at the router, the heartbeat, every third of the lease (`heartbeat.py` has the value and its JSON):

    {"node": name, as in the residency index,  "url": "http://HOST:PORT",  "role": "prefill" | "decode" | "mixed",
     "model": name,  "identity": hex,  "block_tokens": int,  "layout": hex,  "lease_s": seconds; 0: I leave,
     "epoch": int that grows with each start,  "max_model_len": int,  "draining": bool,  "clock_s": wall clock,
     "max_answers": int, that a request may ask for in all. Who says it counts slots by answers (a prefill node: by
                    prompts), who does not by requests,
     "load": {"running", "waiting", "free_slots": that it would give now; at 0 it would refuse},
     "rates": {"prefill_tokens_per_s", "decode_tokens_per_s", "pool_tokens_per_s"}}      all from "epoch" on may lack

    200  {"node", "came": "new" | "known" | "left", "draining": whether it will be given anything new}
    400  a field is wrong           409  it does not fit those that are here: the message says what to change. With the
                                         code `name_taken` another node has its name, until its lease ends

`POST /pd/drain` at the router: {"node", "draining": bool, true if left out}. 200 {"node", "draining", "requests": of
this router that it still works on}, 404 if no such node is there.
"""

import asyncio
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from headwater.core.role import Role
from headwater.disagg.events import event_of
from headwater.metrics import Metrics
from headwater.router.asking import Asker
from headwater.router.choice import Candidate, choose_decode, choose_entry
from headwater.router.client import Client
from headwater.router.lookup import Looker, Lookup
from headwater.router.membership import Membership
from headwater.router.nodes import NodeSlot, NodeTable
from headwater.router.relay import Relay
from headwater.router.routed_request import Call, NoAnswer, Outcome, RoutedRequest
from headwater.router.settings import RouterConfig
from headwater.router.trouble import Trouble, Unanswered
from headwater.router.wait_line import WaitLine
from headwater.tracing.spans import NO_TRACING, Tracing

_GRACE_S: Final = 0.2  # for the last word to a client whose time is over
_SECOND_OPINION: Final = 2  # nodes that computed NaN for a prompt, until nobody else is asked
_Taken = tuple[Candidate, NodeSlot]


class Router:
    """Routes. For one event loop; `aclose` it there."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        metrics: Metrics,
        lookup: Lookup | None = None,
        tracing: Tracing = NO_TRACING,
    ) -> None:
        """`lookup` asks the residency index; without it, nodes come round robin."""
        self.config = config
        self.metrics = metrics
        self._tracing = tracing
        self.nodes = NodeTable(pause_s=config.pause_s, max_pause_s=config.max_pause_s)
        self._relay = Relay(
            connect_s=config.connect_timeout_s,
            silence_s=config.silence_s,
            probe_s=config.probe_timeout_s,
            max_answer_bytes=config.max_answer_bytes,
            node_key=config.node_key,
        )
        self._asker = Asker(
            self._relay, self.nodes, metrics, fair_s=config.request_timeout_s / 2, changed=self._changed
        )
        self.membership = Membership(self.nodes, self._relay, metrics, node_key=config.node_key, changed=self._changed)
        self._looker = Looker(lookup, timeout_s=config.lookup_timeout_s)
        self._entrance, self._handover = WaitLine(), WaitLine()
        self._trips: set[RoutedRequest] = set()
        self._num_promised = 0  # slots of decode nodes
        self._turns = {False: 0, True: 0}  # of entries, and of those with a ticket
        self._decisions: deque[dict[str, Any]] = deque(maxlen=config.num_decisions)

    async def aclose(self) -> None:
        """Close connections. Idempotent."""
        self._looker.close()
        await self.membership.aclose()
        await self._relay.aclose()

    def _changed(self) -> None:
        self._entrance.changed()
        self._handover.changed()

    # --- what is told -------------------------------------------------------------------------------------------------

    @property
    def num_requests(self) -> int:
        """Under way."""
        return len(self._trips)

    def ready(self) -> bool:
        """Whether a request could be answered, as far as anybody knows; a node without room will have some."""
        usable = {one.role for one in self.nodes.facts(self.membership.sweep()) if not (one.draining or one.resting)}
        return Role.MIXED in usable or {Role.PREFILL, Role.DECODE} <= usable

    def state(self) -> dict[str, Any]:
        """Nodes, queues, and the last decisions with their reasons, newest first."""
        now_s = self.membership.sweep()
        return {
            "ready": self.ready(),
            "nodes": self.nodes.documents(now_s),
            "queues": {
                "requests": len(self._trips),
                "waiting_for_entry": self._entrance.num_waiting,
                "waiting_for_decode": self._handover.num_waiting,
                "promised_to_decode": self._num_promised,
            },
            "index": self._looker.state,
            "under_way": [{**one.document(), "age_s": round(now_s - one.began_s, 3)} for one in self._trips],
            "decisions": list(self._decisions)[::-1],
        }

    def models(self) -> dict[str, tuple[int | None, float]]:
        """Models that can be asked for: tokens that every node takes, and since when, on the event loop's clock."""
        self.membership.sweep()
        return self.nodes.models()

    def gauges(self) -> None:
        """Say how things stand, to the metrics."""
        for (role, state), count in self.nodes.counts(self.membership.sweep()).items():
            self.metrics.gauge("router_nodes", count, role=role, state=state)
        waiting = self._entrance.num_waiting + self._handover.num_waiting
        self.metrics.gauge("router_under_way", waiting, state="waiting")
        self.metrics.gauge("router_under_way", len(self._trips) - waiting, state="running")

    # --- one request --------------------------------------------------------------------------------------------------

    async def route(self, call: Call, client: Client) -> None:
        """Answer a request. Raises NoAnswer if there is none and nothing was sent; cancelled if the client leaves."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        span = self._tracing.begin(f"route {call.endpoint}", at_s=began_s, traceparent=call.traceparent)
        span.tell({"headwater.request_id": call.request_id})
        routed = RoutedRequest(call, began_s, span)
        self._trips.add(routed)
        try:
            try:
                async with asyncio.timeout_at(call.until_s):
                    await self._travel(routed, client)
                routed.outcome = routed.outcome or Outcome.ANSWERED
            except TimeoutError:
                took_s = loop.time() - routed.began_s
                message = f"there was no answer within {took_s:.3g} s"
                raise NoAnswer(Outcome.LATE, 504, message, code="timeout") from routed.trouble
        except NoAnswer as failure:
            if routed.done:
                routed.outcome = routed.outcome or Outcome.ANSWERED
            elif routed.begun:
                routed.outcome = Outcome.BROKEN
                await self._break_off(client, failure)
            else:
                routed.outcome = failure.outcome
                raise
        finally:
            self._end(routed, routed.outcome or Outcome.GONE, loop.time())

    @staticmethod
    async def _break_off(client: Client, failure: NoAnswer) -> None:
        """Too late for a status: an event says what happened, and no `[DONE]` follows."""
        error = {"message": str(failure), "type": "server_error", "param": None, "code": failure.code}
        with suppress(TimeoutError):
            async with asyncio.timeout(_GRACE_S):
                await client.event(event_of({"error": error}))
                await client.end()

    def _end(self, routed: RoutedRequest, outcome: Outcome, now_s: float) -> None:
        self._trips.discard(routed)
        self._promise(routed, 0)
        routed.seconds["total"] = now_s - routed.began_s
        routed.outcome = outcome
        self.metrics.count("router_requests_total", outcome=outcome)
        routed.span.tell({"headwater.outcome": outcome.value, "headwater.attempts": len(routed.attempts)})
        if outcome is not Outcome.ANSWERED:
            routed.span.fail(outcome.value)
        routed.span.end(now_s)
        if outcome is Outcome.ANSWERED:
            for phase, seconds in routed.seconds.items():
                self.metrics.observe("router_phase_seconds", seconds, phase=phase)
        self._decisions.append(routed.document())
        self._changed()

    async def _travel(self, routed: RoutedRequest, client: Client) -> None:
        self._require_answers(routed.call)
        routed.held = await self._looker.look(routed.call.endpoint, routed.call.body)
        routed.add("queue", asyncio.get_running_loop().time() - routed.began_s)
        ticket: Mapping[str, Any] | None = None
        while True:
            candidate, slot = await self._next(routed, with_ticket=ticket is not None)
            try:
                if candidate.role is Role.PREFILL:
                    ticket = await self._asker.prefill(routed, slot)
                else:
                    with_ticket = ticket if candidate.role is Role.DECODE else None
                    await self._asker.answer(routed, slot, with_ticket, client)
                    return
            except Unanswered as trouble:
                if self._must_prefill(routed, candidate, trouble):
                    ticket = None

    def _require_answers(self, call: Call) -> None:
        """Refuse what no node that is here could ever do. Raises NoAnswer."""
        most = self.nodes.max_answers()
        if most is not None and call.num_answers > most:
            message = f"{call.num_answers} answers are more than the {most} that a node gives at once"
            param = "prompt" if call.body.get("n") in (None, 1) else "n"
            error = {"message": message, "type": "invalid_request_error", "param": param, "code": "invalid_value"}
            raise NoAnswer(Outcome.REJECTED, 400, message, code="rejected", document={"error": error})

    def _must_prefill(self, routed: RoutedRequest, candidate: Candidate, trouble: Unanswered) -> bool:
        """What to do next: whether a ticket is worth nothing any more. Raises NoAnswer if nobody else may be tried."""
        kind = trouble.trouble
        if kind is Trouble.REJECTED:
            raise NoAnswer(
                Outcome.REJECTED, trouble.status, str(trouble), code="rejected", document=trouble.document
            ) from trouble
        if kind is Trouble.REFUSED:
            routed.num_refused += 1
            if routed.num_refused <= self.config.max_refusals:
                return False
            raise NoAnswer(Outcome.REFUSED, 503, "all nodes are busy: try again later", code="no_room") from trouble
        routed.trouble = trouble
        lost = kind is Trouble.MISSING and candidate.role is Role.DECODE
        if lost:
            routed.failed.add(routed.nodes["prefill"])  # others first: it may be what it wrote that is bad
            enough = routed.num_prefills >= self.config.max_prefills
        else:
            routed.failed.add(candidate.node)
            routed.num_failed += 1
            enough = routed.num_failed >= self.config.max_attempts or len(routed.suspects) >= _SECOND_OPINION
        if enough or routed.begun:
            raise _failed(routed) from trouble
        return lost

    # --- who is asked -------------------------------------------------------------------------------------------------

    async def _next(self, routed: RoutedRequest, *, with_ticket: bool) -> _Taken:
        """The node to ask now; waits for room. Raises NoAnswer."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        left_out: dict[str, str] = {}
        num_slots = self._num_slots(routed)
        self._promise(routed, num_slots if with_ticket else 0)

        line = self._handover if with_ticket else self._entrance
        taken = await line.wait(
            lambda: self._take(routed, left_out, with_ticket=with_ticket),
            until_s=began_s + self.config.queue_timeout_s - routed.waited_s,  # in all: who is refused comes again
            num_slots=num_slots,
            in_front=bool(routed.attempts),
        )
        routed.waited_s += loop.time() - began_s
        routed.add("queue", loop.time() - began_s)
        if taken is not None:
            return taken
        if routed.trouble is not None:
            raise _failed(routed) from routed.trouble
        why = "; ".join(f"{node} {reason}" for node, reason in sorted(left_out.items())[:8])
        raise NoAnswer(
            Outcome.REFUSED,
            503,
            f"no node could take the request within {self.config.queue_timeout_s:g} s: {why or 'there is none'}",
            code="no_room" if left_out else "no_node",
        )

    def _take(self, routed: RoutedRequest, left_out: dict[str, str], *, with_ticket: bool) -> _Taken | None:
        """The best node that takes a request now; None: there is none, and `left_out` says why."""
        now_s = self.membership.sweep()
        if now_s >= routed.call.until_s:  # a machine that stood still wakes us before it wakes the deadline
            return None
        facts, size, held, turn = self.nodes.facts(now_s), routed.size, routed.held, self._turns[with_ticket]
        if with_ticket:
            choice = choose_decode(facts, size, held, turn=turn, failed=routed.failed)
        else:
            choice = choose_entry(facts, size, held, turn=turn, promised=self._num_promised, failed=routed.failed)
        left_out.clear()
        left_out.update(choice.left_out)
        for one in choice.candidates:
            known = 0 if held is None else held.at(one.node)
            tokens = 0 if one.role is Role.DECODE else max(0, size.prompt - known)
            slot = self.nodes.take_slot(one.node, tokens=tokens, now_s=now_s, num_slots=one.num_slots)
            if slot is not None:
                self._turns[with_ticket] += 1
                self._promise(routed, self._num_slots(routed) if one.role is Role.PREFILL else 0)
                routed.decided(choice, one)
                self.metrics.count("router_choices_total", role=one.role, how=choice.how)
                return one, slot
        return None

    def _num_slots(self, routed: RoutedRequest) -> int:
        """What a request takes of the slots of whoever will answer it."""
        if routed.call.num_answers == 1:
            return 1
        facts = self.nodes.facts(self.membership.sweep())
        return max((one.num_slots(routed.size) for one in facts if one.role is not Role.PREFILL), default=1)

    def _promise(self, routed: RoutedRequest, num_slots: int) -> None:
        """While a request is in prefill, or waits with a ticket, slots of some decode node are as good as taken."""
        self._num_promised += num_slots - routed.num_promised
        routed.num_promised = num_slots


def _failed(routed: RoutedRequest) -> NoAnswer:
    tried = f"{len(routed.attempts)} attempts" if len(routed.attempts) > 1 else "one attempt"
    return NoAnswer(Outcome.FAILED, 502, f"no answer after {tried}; the last: {routed.trouble}", code="upstream_failed")
