"""Two engines and a pool: one that sends prompts, one that takes them over, one that does both by itself."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headwater.build import Running, open_engine, open_local
from headwater.config.serve import ServeConfig
from headwater.config.stores import LocalStoreConfig
from headwater.core.role import Role
from headwater.disagg.protocol import Ticket
from headwater.engine.models.base import Model
from headwater.engine.request import Finish, Output, Request, Sampling, Sending, Taking
from headwater.index.slots import SlotState

WAIT_S = 60.0


@dataclass
class Heard:
    """What a request's listener heard."""

    request: Request | None = None
    tokens: list[int] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def listen(self, output: Output) -> None:
        """Take it down."""
        self.outputs.append(output)
        self.tokens.extend(output.tokens)
        if output.finish is not None:
            self.over.set()

    @property
    def last(self) -> Output:
        """How it ended; waits for that."""
        assert self.over.wait(WAIT_S), "it did not end"
        return self.outputs[-1]

    @property
    def ticket(self) -> Ticket:
        """Its ticket; it must have one."""
        assert self.last.finish is Finish.SENT, self.last
        ticket = self.last.ticket
        assert ticket is not None
        return ticket


class Node:
    """An engine, by role."""

    def __init__(self, running: Running) -> None:
        self.running = running
        self._num = 0

    def ask(self, prompt: list[int], handoff: Sending | Taking | None = None, **sampling: Any) -> Heard:
        """Submit a request."""
        heard = Heard()
        self._num += 1
        heard.request = Request(
            name=f"request {id(self)} {self._num}",
            prompt=list(prompt),
            sampling=Sampling(**{"max_tokens": 12, "temperature": 0, "ignore_eos": True, **sampling}),
            listen=heard.listen,
            handoff=handoff,
        )
        self.running.engine.submit(heard.request)
        return heard

    def send(self, prompt: list[int], *, timeout_s: float = WAIT_S, **sampling: Any) -> Heard:
        """Have a prompt computed and sent."""
        return self.ask(prompt, Sending(until_s=time.monotonic() + timeout_s), **sampling)

    def take(
        self, ticket: Ticket, prompt: list[int], *, recompute: bool = True, timeout_s: float = WAIT_S, **sampling: Any
    ) -> Heard:
        """Have one taken over."""
        taking = Taking(ticket=ticket, until_s=time.monotonic() + timeout_s, recompute=recompute)
        return self.ask(prompt, taking, **sampling)

    @property
    def num_computed(self) -> int:
        """Tokens that were computed here so far."""
        return self.running.engine.num_computed_tokens

    def until_free(self) -> None:
        """Wait until nobody holds anything, and see that the books agree."""
        end = time.monotonic() + WAIT_S
        while True:
            with self.running.cache.still() as brain:
                brain.validate()
                counts = brain.slots.counts()
                if (
                    not brain.requests
                    and counts[SlotState.OWN] + counts[SlotState.QUARANTINED] == 0
                    and self.running.engine.num_requests == 0
                ):
                    return
            assert time.monotonic() < end, f"something is held: {counts}"
            time.sleep(0.005)


def new_pool(directory: Path, limit_bytes: int = 32 << 20) -> str:
    """A small pool in a directory; its address."""
    open_local(LocalStoreConfig(directory=directory / "pool", limit_bytes=limit_bytes)).close()
    return f"local:{directory / 'pool'}"


@contextmanager
def open_node(model: Model, path: Path, pool: str, role: Role, **more: Any) -> Iterator[Node]:
    """A node of a role."""
    config = ServeConfig(
        model=path, role=role, pool=pool, **{"block_tokens": model.block_tokens, "num_blocks": 64, **more}
    )
    with open_engine(config, model=model) as running:
        yield Node(running)


@contextmanager
def open_pair(model: Model, path: Path, pool: str, **more: Any) -> Iterator[tuple[Node, Node]]:
    """A prefill node and a decode node on one pool."""
    with ExitStack() as stack:
        prefill = stack.enter_context(open_node(model, path, pool, Role.PREFILL, **more))
        decode = stack.enter_context(open_node(model, path, pool, Role.DECODE, **more))
        yield prefill, decode
