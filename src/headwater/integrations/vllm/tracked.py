"""A request of vLLM as the scheduler's side follows it, and what the next step takes along."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from headwater.integrations.vllm.naming import Prompt


class BlockPins(Protocol):
    """Keeps vLLM from giving blocks to anybody, whoever frees them."""

    def hold(self, blocks: Sequence[int], /) -> None:
        """They stay where they are."""
        ...

    def let_go(self, blocks: Sequence[int], /) -> None:
        """They may be free."""
        ...


@dataclass(slots=True)
class Tracked:
    """One vLLM request."""

    request: Any
    prompt: Prompt
    epoch: int = 0
    asked_s: float | None = None  # None: the brain does not know it now
    num_local: int = 0
    num_asked: int = 0  # blocks that had their names when the brain was asked
    num_unnamed: int = 0  # and that had none
    promised: int = 0  # blocks that vLLM was told of
    sources: tuple[tuple[str, int], ...] = ()  # and where they are
    lent: bool = False  # it has blocks, and the brain knows which
    preemptions: int = 0  # when it got them
    barred: bool = False  # a load failed: nothing is loaded for it any more
    num_told: int = 0  # blocks that others have heard of
    num_named: int = 0  # blocks that have their names, at least

    @property
    def name(self) -> str:
        """What the brain knows it by."""
        return f"{self.request.request_id}#{self.epoch}"


@dataclass(slots=True)
class NextStep:
    """What the next step takes along besides jobs."""

    loading: dict[str, tuple[int, ...]] = field(default_factory=dict)
    waiting: list[int] = field(default_factory=list)
    missing: dict[str, tuple[int, ...]] = field(default_factory=dict)
    leaving: dict[str, tuple[tuple[int, ...], float]] = field(default_factory=dict)
    vacated: list[int] = field(default_factory=list)
