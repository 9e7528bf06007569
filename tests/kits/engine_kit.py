"""An engine of a tiny model in front of one cache, whose requests are watched token by token and block by block."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from headwater.cache.cache import TieredCache
from headwater.core.keys import BlockKey
from headwater.engine.connector import Connector
from headwater.engine.engine import Engine, EngineConfig
from headwater.engine.models.base import Model
from headwater.engine.request import Finish, Output, Request, Sampling, Usage
from headwater.index.slots import SlotState
from headwater.transfer.device.arena import DeviceCache

WAIT_S = 60.0


class Patient(Connector):
    """Does not learn what computing costs, however fast a tiny model is."""

    def measured(self, num_tokens: int, token_contexts: int, seconds: float) -> None:
        pass


@dataclass
class Run:
    """What became of a request."""

    request: Request
    over: threading.Event = field(default_factory=threading.Event)
    tokens: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    finish: Finish | None = None
    usage: Usage | None = None
    blocks: dict[BlockKey, bytes] = field(default_factory=dict)


class EngineRig:
    """An engine, and what its requests said."""

    def __init__(
        self,
        model: Model,
        planes: DeviceCache,
        cache: TieredCache,
        *,
        step_tokens: int,
        num_answer: int,
        meets: bool = True,
    ) -> None:
        self.planes, self.cache = planes, cache
        self._num_answer = num_answer  # tokens, unless told
        self.runs: dict[str, Run] = {}
        connector = Patient(cache, model.identity, probe_s=WAIT_S, meets=meets)
        self.engine = Engine(model, planes, connector, EngineConfig(step_tokens=step_tokens), watch=self._watch)

    def _watch(self, request: Request, logits: torch.Tensor) -> None:
        self.runs[request.name].logits.append(logits.clone())

    def begin(
        self,
        prompt: list[int],
        *,
        max_tokens: int | None = None,
        preempt_at: int | None = None,
        heard: Callable[[], None] | None = None,
    ) -> Run:
        """Submit a request; `heard` is called with each of its outputs."""

        def listen(output: Output) -> None:
            run.tokens.extend(output.tokens)
            if heard is not None:
                heard()
            if output.finish is not None:
                run.finish, run.usage = output.finish, output.usage
                run.over.set()

        sampling = Sampling(max_tokens=max_tokens or self._num_answer, temperature=0, ignore_eos=True)
        request = Request(name=f"request {len(self.runs)}", prompt=prompt, sampling=sampling, listen=listen)
        request.preempt_at = preempt_at
        run = self.runs[request.name] = Run(request)
        self.engine.submit(request)
        return run

    def end(self, run: Run, num_blocks: int | None = None) -> Run:
        """Wait until it is over, and look at its first blocks on the device; at all of them, unless told."""
        assert run.over.wait(WAIT_S)
        with self.cache.still() as brain:
            known = {key: slot for key, _, slot in brain.blocks()}
        run.blocks = {key: self.block(known[key]) for key in run.request.keys[:num_blocks] if key in known}
        return run

    def ask(self, prompt: list[int]) -> Run:
        """Submit a request, and wait for it."""
        return self.end(self.begin(prompt))

    def block(self, slot: int) -> bytes:
        """What a slot holds."""
        return torch.cat([row[slot] for row in self.planes.rows]).numpy().tobytes()

    def check_nothing_is_held(self) -> None:
        """When everything has ended."""
        assert self.cache.drain(WAIT_S)
        with self.cache.still() as brain:
            brain.validate()
            counts = brain.slots.counts()
            assert (counts[SlotState.OWN], counts[SlotState.QUARANTINED]) == (0, 0)
            assert not [*brain.requests, *brain.jobs, *brain.pending]


def make_prompt(model: Model, num_tokens: int, seed: int = 1) -> list[int]:
    """Random tokens, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, model.vocab_size, (num_tokens,), generator=generator).tolist()
