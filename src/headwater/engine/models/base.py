"""What every model offers a scheduler: a layout, an identity, and one step over parts of several requests.

Not here: memory for KV (`transfer.arena.create_kv_cache(model.layout, ...)`), which slots a request has, sampling.

Invariants: a forward writes only the positions of its spans' tokens, in those spans' slots; what it reads of earlier
positions it reads from the planes. A model keeps nothing of a request between steps.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from headwater.core.identity import CacheIdentity
from headwater.layout.spec import KVLayout
from headwater.transfer.device.arena import DeviceCache


@dataclass(frozen=True, slots=True)
class Span:
    """One request's part of a step."""

    tokens: Sequence[int]  # to compute, at positions start, start + 1 ...
    start: int  # the positions before it are in the blocks already
    slots: Sequence[int]  # the request's device blocks in order; they cover start + len(tokens) positions
    num_logits: int = 1  # for how many of its last positions logits are wanted, 0 .. len(tokens)


@dataclass(frozen=True, slots=True)
class Computed:
    """What a step gave. On CUDA the device may not be done with it."""

    logits: torch.Tensor  # float32 [sum of num_logits, vocab_size], spans in order
    sums: torch.Tensor  # float32 [tokens]: of what entered each token's last MLP; not finite where a value was not
    spans: Sequence[slice]  # each span's part of them

    def finite(self) -> list[bool]:
        """Of each span, whether all its tokens have keys and values that are numbers. Waits for the device.

        What is NaN or infinite in a token's residual stream stays so in every later layer, and so enters its last MLP;
        and a token attends to itself, so what is NaN in its keys or values comes there too. An infinite key that gets
        no weight does not: it is what this model computes, and whoever gives it weight has NaN. Nor does what an
        indexer computes: it chooses positions, and adds nothing.
        """
        found = torch.isfinite(self.sums.cpu())
        if found.all():
            return [True] * len(self.spans)
        return [bool(found[span].all()) for span in self.spans]


class Model(ABC):
    """A model whose weights are on a device. Frozen after it was made; `forward` is for one thread at a time."""

    name: str
    layout: KVLayout
    block_tokens: int
    vocab_size: int
    max_positions: int
    eos_ids: frozenset[int]
    identity: CacheIdentity  # without a tenant: the salt is the request's
    device: torch.device
    dtype: torch.dtype

    @abstractmethod
    def forward(
        self, planes: DeviceCache, spans: Sequence[Span], *, before_layer: Callable[[int], None] | None = None
    ) -> Computed:
        """Compute the spans' tokens.

        `before_layer` is called with each layer's number before that layer's planes are read or written: it may block,
        and what it raises ends the forward.
        Mutates the planes at the tokens' positions and nowhere else. Raises InvalidInput, before anything was written,
        for a span that does not fit the model or the planes. On CUDA it returns before the device is done.
        """
