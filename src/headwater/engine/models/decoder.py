"""The frame that all our models share: embed, a stack of blocks with residuals, a norm, logits where they are wanted.

A family fills it with its attention layer and its MLPs (`llama.py`, `deepseek.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from headwater.core.errors import InvalidInput
from headwater.core.identity import CacheIdentity
from headwater.engine.attention.base import Attention
from headwater.engine.models.base import Computed, Model, Span
from headwater.engine.models.layers import Weights
from headwater.engine.models.rope import Rope, Rotation
from headwater.engine.models.settings import Settings
from headwater.engine.step import Step, StepLimits, plan
from headwater.layout.spec import DType
from headwater.transfer.device.arena import DeviceCache


@dataclass(frozen=True)
class ModelOptions:
    """How a model is to be built, besides its config."""

    dtype: torch.dtype
    kv_dtype: DType  # FP8_E4M3: quantised, as the family's layout says
    block_tokens: int


class AttentionLayer(Protocol):
    """One layer's projections around a backend."""

    def __call__(self, x: Tensor, *, planes: DeviceCache, layer: int, step: Step, rotation: Rotation) -> Tensor:
        """Compute [tokens, hidden]; writes the layer's planes."""
        ...


@dataclass(frozen=True)
class Block:
    """One layer."""

    input_norm: Tensor
    attention: AttentionLayer
    mlp_norm: Tensor
    mlp: Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Network:
    """A model's tensors and shapes, as a family builds them."""

    embedding: Tensor  # [vocab, hidden]
    blocks: Sequence[Block]
    norm: Tensor
    head: Tensor  # [vocab, hidden]; the embedding itself where they are tied
    eps: float
    rope: Rope
    attention: Attention
    max_positions: int


class Decoder(Model):
    """A network with a name and an identity."""

    def __init__(
        self, network: Network, *, name: str, identity: CacheIdentity, eos_ids: frozenset[int], device: torch.device
    ) -> None:
        self.name = name
        self.identity = identity
        self.eos_ids = eos_ids
        self.layout = network.attention.layout
        self.block_tokens = self.layout.block_tokens
        self.vocab_size = network.head.shape[0]
        self.max_positions = network.max_positions
        self.device = device
        self.dtype = network.embedding.dtype
        self._network = network
        self._rope = network.rope.to(device)

    @torch.no_grad()
    def forward(
        self, planes: DeviceCache, spans: Sequence[Span], *, before_layer: Callable[[int], None] | None = None
    ) -> Computed:
        """Compute the spans' tokens; see `Model.forward`."""
        if planes.layout != self.layout:
            raise InvalidInput("the planes were made for another layout than this model's")
        if planes.device.type != self.device.type:
            raise InvalidInput(f"the planes are on {planes.device}, the model is on {self.device}")
        net = self._network
        limits = StepLimits(self.vocab_size, self.max_positions, planes.num_blocks, self.block_tokens)
        step = plan(spans, limits=limits, heads=net.attention.heads, device=self.device)
        if not spans:
            return Computed(torch.empty(0, self.vocab_size, device=self.device), torch.empty(0), ())
        rotation = self._rope.at(step.positions, self.dtype)
        x = functional.embedding(step.tokens, net.embedding)
        sums = x[:, 0]  # of the last layer, in the end
        for layer, block in enumerate(net.blocks):
            if before_layer is not None:
                before_layer(layer)
            x += block.attention(
                self._normed(x, block.input_norm), planes=planes, layer=layer, step=step, rotation=rotation
            )
            if layer == len(net.blocks) - 1:  # the last MLP makes logits, and no keys and values
                sums = x.sum(dim=-1, dtype=torch.float32)
            x += block.mlp(self._normed(x, block.mlp_norm))
        logits = functional.linear(self._normed(x.index_select(0, step.logits), net.norm), net.head).float()
        return Computed(logits, sums, step.spans)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, self._network.eps)


def build_network(
    config: Settings,
    weights: Weights,
    *,
    rope: Rope,
    attention: Attention,
    parts: Callable[[str, int], tuple[AttentionLayer, Callable[[Tensor], Tensor]]],
) -> Network:
    """The shared frame; `parts` makes the attention layer and the MLP of a layer from its name and number."""
    hidden, vocab = config.size("hidden_size"), config.size("vocab_size")
    embedding = weights.take("model.embed_tokens.weight", vocab, hidden)
    blocks = []
    for layer in range(config.size("num_hidden_layers")):
        name = f"model.layers.{layer}"
        attends, mlp = parts(name, layer)
        before = weights.take(f"{name}.input_layernorm.weight", hidden)
        between = weights.take(f"{name}.post_attention_layernorm.weight", hidden)
        blocks.append(Block(before, attends, between, mlp))
    tied = config.flag("tie_word_embeddings", default=False)
    return Network(
        embedding=embedding,
        blocks=blocks,
        norm=weights.take("model.norm.weight", hidden),
        head=embedding if tied else weights.take("lm_head.weight", vocab, hidden),
        eps=config.number("rms_norm_eps", 1e-6),
        rope=rope,
        attention=attention,
        max_positions=config.size("max_position_embeddings"),
    )
