"""What models are made of: where weights come from, the dense and the expert MLP, and expert routing.

Experts: a router scores all of them per token and picks a few, in two stages where experts come in groups. Tokens are
sorted by expert and go through one grouped matmul; what the picked experts say is summed in the router's order, so no
sum depends on which tokens came together. Nothing here waits for the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional


class Weights(Protocol):
    """Where a model gets its tensors from: a checkpoint, or something that only records what is asked for."""

    def take(self, name: str, *shape: int, fp32: bool = False) -> Tensor:
        """The tensor of that name and shape, in the model's dtype, or in fp32 where that matters; once each."""
        ...


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Tensors as one, row after row. Of tensors without memory only the shape: torch would load its compiler for it."""
    if parts[0].is_meta:
        return parts[0].new_empty(sum(len(part) for part in parts), *parts[0].shape[1:])
    return torch.cat(list(parts))


class Mlp:
    """down(silu(gate(x)) x up(x)), gate and up as one matmul."""

    def __init__(self, weights: Weights, name: str, *, hidden: int, inner: int, bias: bool = False) -> None:
        def both(kind: str, *shape: int) -> Tensor:
            return joined([weights.take(f"{name}.{part}_proj.{kind}", *shape) for part in ("gate", "up")])

        self.gate_up = both("weight", inner, hidden)
        self.down = weights.take(f"{name}.down_proj.weight", hidden, inner)
        self.gate_up_bias = both("bias", inner) if bias else None
        self.down_bias = weights.take(f"{name}.down_proj.bias", hidden) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """Compute [tokens, hidden]."""
        return functional.linear(
            _gated(functional.linear(x, self.gate_up, self.gate_up_bias)), self.down, self.down_bias
        )


class Scoring(Enum):
    """How experts are scored and picked."""

    SOFTMAX = "softmax"  # DeepSeek-V2: softmax over all experts; a group counts by its best
    SIGMOID = (
        "sigmoid"  # DeepSeek-V3: a sigmoid each, a correction that picks but does not weigh; a group by its best two
    )


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Which experts, and how much of each."""

    num_experts: int
    num_picked: int
    scoring: Scoring
    num_groups: int = 1
    num_groups_picked: int = 1
    normalise: bool = False
    scale: float = 1.0

    def pick(self, logits: Tensor, correction: Tensor | None) -> tuple[Tensor, Tensor]:
        """Weights and experts, [tokens, picked] each, of fp32 router logits [tokens, experts]."""
        scores = logits.softmax(-1) if self.scoring is Scoring.SOFTMAX else logits.sigmoid()
        ranked = scores if correction is None else scores + correction
        if self.num_groups > 1:
            grouped = ranked.unflatten(-1, (self.num_groups, -1))  # type: ignore[no-untyped-call]
            best = grouped.topk(1 if self.scoring is Scoring.SOFTMAX else 2, dim=-1).values.sum(-1)
            groups = best.topk(self.num_groups_picked, dim=-1).indices
            closed = torch.ones_like(best, dtype=torch.bool).scatter_(1, groups, 0)
            ranked = grouped.masked_fill(closed[..., None], float("-inf")).flatten(1)
        experts = ranked.topk(self.num_picked, dim=-1).indices
        weights = scores.gather(1, experts)
        if self.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.scale, experts


class Moe:
    """Picked experts, and shared ones that every token goes through."""

    def __init__(
        self, weights: Weights, name: str, *, routing: Routing, hidden: int, inner: int, shared_inner: int
    ) -> None:
        count = routing.num_experts
        self.routing = routing
        self.router = weights.take(f"{name}.gate.weight", count, hidden, fp32=True)
        self.correction = None
        if routing.scoring is Scoring.SIGMOID:
            self.correction = weights.take(f"{name}.gate.e_score_correction_bias", count, fp32=True)
        experts = [Mlp(weights, f"{name}.experts.{i}", hidden=hidden, inner=inner) for i in range(count)]
        self.gate_up = joined([expert.gate_up for expert in experts]).view(count, 2 * inner, hidden)
        self.down = joined([expert.down for expert in experts]).view(count, hidden, inner)
        self.shared = None
        if shared_inner:
            self.shared = Mlp(weights, f"{name}.shared_experts", hidden=hidden, inner=shared_inner)

    def __call__(self, x: Tensor) -> Tensor:
        """Compute [tokens, hidden]."""
        weights, experts = self.routing.pick(functional.linear(x.float(), self.router), self.correction)
        picked = experts.shape[1]
        ordered, order = experts.flatten().sort(stable=True)
        ends = torch.searchsorted(ordered, torch.arange(len(self.down), device=x.device), right=True, out_int32=True)
        inner = _gated(functional.grouped_mm(x[order // picked], self.gate_up.transpose(1, 2), offs=ends))
        said = functional.grouped_mm(inner, self.down.transpose(1, 2), offs=ends)
        said = torch.empty_like(said).index_copy_(0, order, said).view(len(x), picked, -1)
        out = (said.float() * weights[..., None]).sum(1).to(x.dtype)
        return out if self.shared is None else out.add_(self.shared(x))


def _gated(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)
