"""Around a model's forward: what can be computed, spans, layers that are still being loaded, a first step."""

import logging
import time
from collections.abc import Callable, Iterable
from typing import Final

import torch

from headwater.core.errors import InvalidInput
from headwater.engine.connector import Connector
from headwater.engine.models.base import Model, Span
from headwater.engine.request import Request
from headwater.engine.scheduler import Work
from headwater.transfer.device.arena import DeviceCache

log = logging.getLogger("headwater")

_NUM_WARM: Final = 4  # steps to see what a step costs,
_WARM_PAUSE_S: Final = 0.02  # each after a pause, as requests come: a machine that sleeps is slower at first
_WARM_TOKENS: Final = (1, 8, 512)  # computed behind a context, besides a block: what follows a hit


class LoadFailed(Exception):
    """What was being loaded will not come."""


class StepComputer:
    """A model on a device, for one thread. Owns neither."""

    def __init__(self, model: Model, planes: DeviceCache, connector: Connector) -> None:
        self._model = model
        self._planes = planes
        self._connector = connector

    def check(self, request: Request, max_tokens: int) -> None:
        """Raise InvalidInput for a request that cannot be computed in so many tokens, prompt and answer."""
        sampling, vocab_size = request.sampling, self._model.vocab_size
        total = len(request.prompt) + sampling.max_tokens
        if total > max_tokens:
            raise InvalidInput(
                f"{len(request.prompt)} prompt tokens and {sampling.max_tokens} to generate are more than {max_tokens}"
            )
        if not all(0 <= token < vocab_size for token in request.prompt):
            raise InvalidInput(f"a token of the prompt is outside the vocabulary of {vocab_size}")
        for what, tokens in (("biased", [token for token, _ in sampling.logit_bias]), ("stop", sampling.stop_ids)):
            if not all(0 <= token < vocab_size for token in tokens):
                raise InvalidInput(f"a {what} token is outside the vocabulary of {vocab_size}")
        if sampling.min_tokens and len(sampling.ends(self._model.eos_ids)) >= vocab_size:
            raise InvalidInput("every token would end the answer, which must have some: min_tokens cannot be had")

    def warm_up(self, step_tokens: int) -> None:
        """Have everything made that a device makes at its first use, and find out what a small step costs.

        `step_tokens`: the most that a step computes. Computes in a slot that nobody has yet. Blocks, for a second or
        two on a GPU.
        """
        last = self._model.block_tokens - 1  # of the block: the step looks back, as those do that follow a hit
        try:
            if self._planes.device.type == "cuda":
                self._load_kernels(step_tokens)
            for turn in range(1 + _NUM_WARM):
                time.sleep(_WARM_PAUSE_S)
                begin_s = time.perf_counter()
                self._model.forward(self._planes, [Span(tokens=[0], start=last, slots=(0,))])
                self.wait_for_device()
                if turn:  # the first one compiles and allocates
                    self._connector.measured(1, 0, time.perf_counter() - begin_s)
        except Exception:  # who asks will hear of it
            log.exception("a first step failed")

    def _load_kernels(self, step_tokens: int) -> None:
        """Compute spans of many shapes: which kernels a shape needs is the libraries' choice, and each loads late.

        A first hit of 2,048 tokens took 0.6 s, nearly all of it in the attention of its first layer.
        """
        begin_s, size = time.perf_counter(), self._model.block_tokens
        most = min(self._model.max_positions, self._planes.num_blocks * size)
        total = size
        while total <= most:
            slots = (0,) * (total // size)
            if total <= step_tokens:
                self._model.forward(self._planes, [Span(tokens=[0] * total, start=0, slots=slots)])
            for num in (*_WARM_TOKENS, size):
                if num < total:
                    self._model.forward(self._planes, [Span(tokens=[0] * num, start=total - num, slots=slots)])
            if total > size:  # two that decode, one of them shorter
                pair = [Span(tokens=[0], start=start, slots=slots) for start in (total - 1, total - 2)]
                self._model.forward(self._planes, pair)
            total *= 2
        self.wait_for_device()
        log.info("kernels for up to %d tokens were loaded in %.1f s", most, time.perf_counter() - begin_s)

    def wait_for_device(self) -> None:
        """Until the device has done all it was told. Blocks."""
        if self._planes.device.type == "cuda":
            torch.cuda.current_stream(self._planes.device).synchronize()

    def span(self, one: Work) -> Span:
        """What is computed of a request in a step. Copies a block, where a whole prompt is cached (see `engine.py`)."""
        request = one.request
        slots = request.slots
        if request.whole:
            at = one.start // self._model.block_tokens
            if not one.early:
                self._copy_block(slots[at], slots[at + 1], range(len(self._planes.rows)))
            slots = (*slots[:at], slots[at + 1])
        return Span(
            tokens=request.tokens[one.start : one.end], start=one.start, slots=slots, num_logits=int(one.samples)
        )

    def gate(self, one: Work) -> Callable[[int], None]:
        """What a step does before each layer whose bytes are still on their way. LoadFailed if they never come."""
        at = one.start // self._model.block_tokens
        layers = [plane.layer for plane in self._model.layout.planes]

        def wait(layer: int) -> None:
            if not self._connector.wait_layer(one.request, layer):
                raise LoadFailed
            if one.request.whole:
                slots = one.request.slots
                self._copy_block(slots[at], slots[at + 1], [i for i, of in enumerate(layers) if of == layer])

        return wait

    def _copy_block(self, source: int, target: int, planes: Iterable[int]) -> None:
        for plane in planes:
            row = self._planes.rows[plane]
            row[target] = row[source]
