"""Nodes of `verify --pd`: engines of each role in this process, as the server builds them, asked and listened to.

Each has a model of its own in memory, as if it were another machine. One request at a time, in steps of one block, so
that what is computed for a prompt does not depend on how much of it was found: answers can be compared bit for bit.
Nothing is judged here (`pd_cases.py`).
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from headwater.build import open_engine
from headwater.config.serve import ServeConfig
from headwater.core.errors import HeadwaterError
from headwater.core.role import Role
from headwater.disagg.protocol import Ticket
from headwater.engine.engine import Engine
from headwater.engine.models.base import Computed, Model, Span
from headwater.engine.request import Finish, Output, Request, Sampling, Sending, Taking, TokenLogprob, Usage
from headwater.transfer.device.arena import DeviceCache

NUM_BLOCKS: Final = 256  # on each device: nothing has to leave
WAIT_S: Final = 60.0


@dataclass(slots=True)
class HeardRequest:
    """What a request's listener heard so far. `end` waits for the rest."""

    name: str
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    last: Output | None = None
    over: threading.Event = field(default_factory=threading.Event)

    def listen(self, output: Output) -> None:
        """Take it down."""
        self.tokens.extend(output.tokens)
        self.logprobs.extend(output.logprobs)
        if output.finish is not None:
            self.last = output
            self.over.set()

    def end(self) -> Output:
        """How it ended. Blocks; raises HeadwaterError if it does not."""
        if not self.over.wait(WAIT_S) or self.last is None:
            raise HeadwaterError(f"{self.name} did not end in {WAIT_S:g} s")
        return self.last

    @property
    def finish(self) -> Finish | None:
        """Why it ended."""
        return self.end().finish

    @property
    def usage(self) -> Usage:
        """What it cost. Raises HeadwaterError where nobody said."""
        usage = self.end().usage
        if usage is None:
            raise HeadwaterError(f"{self.name} has no usage")
        return usage


class PdNode:
    """One engine, and what it was asked."""

    def __init__(self, name: str, engine: Engine) -> None:
        self.name = name
        self.engine = engine
        self._num = 0

    @property
    def num_computed(self) -> int:
        """Tokens that were computed here so far."""
        return self.engine.num_computed_tokens

    def ask(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        handoff: Sending | Taking | None = None,
        salt: bytes = b"",
    ) -> HeardRequest:
        """Submit a request. Does not block."""
        self._num += 1
        heard = HeardRequest(f"request {self._num} of {self.name}")
        self.engine.submit(
            Request(
                name=heard.name,
                prompt=list(prompt),
                sampling=sampling,
                listen=heard.listen,
                handoff=handoff,
                salt=salt,
            )
        )
        return heard

    def send(self, prompt: Sequence[int], sampling: Sampling) -> HeardRequest:
        """Have a prompt computed and sent. Does not block."""
        return self.ask(prompt, sampling, handoff=Sending(until_s=time.monotonic() + WAIT_S))

    def take(self, ticket: Ticket, prompt: Sequence[int], sampling: Sampling) -> HeardRequest:
        """Have one taken over, computing nothing of its prompt. Does not block."""
        taking = Taking(ticket=ticket, until_s=time.monotonic() + WAIT_S, recompute=False)
        return self.ask(prompt, sampling, handoff=taking)

    def rest(self) -> None:
        """Wait until what it computed is in the pool. Raises HeadwaterError."""
        if not self.engine.connector.cache.drain(WAIT_S):
            raise HeadwaterError(f"the cache of {self.name} did not come to rest")


class Spoiling(Model):
    """A model that flips a bit of every block it looks back at, behind all checks: the answers must differ."""

    def __init__(self, model: Model) -> None:
        for name in Model.__annotations__:
            setattr(self, name, getattr(model, name))
        self._model = model
        self._at = model.layout.planes[0].dtype.itemsize - 1  # with sign and exponent, where it is a float
        self._spoilt: dict[int, int] = {}  # by slot

    def forward(
        self, planes: DeviceCache, spans: Sequence[Span], *, before_layer: Callable[[int], None] | None = None
    ) -> Computed:
        """Spoil, then compute."""
        row = planes.rows[0]
        for span in spans:
            for slot in span.slots[: -(-span.start // self.block_tokens)]:
                byte = int(row[slot, self._at])
                if self._spoilt.get(slot) != byte:  # it was written since
                    self._spoilt[slot] = row[slot, self._at] = byte ^ 0x10
        return self._model.forward(planes, spans, before_layer=before_layer)


@contextmanager
def open_node(name: str, model: Model, path: Path, *, role: Role, pool: str | None) -> Iterator[PdNode]:
    """A node as `headwater serve` would build it. Raises InvalidConfig, and what its pool raises."""
    config = ServeConfig(
        model=path,
        role=role,
        pool=pool,
        device=str(model.device),
        block_tokens=model.block_tokens,
        num_blocks=NUM_BLOCKS,
        step_tokens=model.block_tokens,
    )
    with open_engine(config, model=model) as running:
        yield PdNode(name, running.engine)
