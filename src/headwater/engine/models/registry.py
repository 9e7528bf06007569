"""Which architectures we can build, by the names that config.json uses."""

from collections.abc import Callable
from typing import Final, TypeAlias

from headwater.core.errors import InvalidInput
from headwater.engine.models.decoder import ModelOptions, Network
from headwater.engine.models.deepseek import build_deepseek_v2, build_deepseek_v3, build_deepseek_v32
from headwater.engine.models.layers import Weights
from headwater.engine.models.llama import build_llama, build_qwen2, build_qwen3
from headwater.engine.models.settings import Settings

Builder: TypeAlias = Callable[[Settings, Weights, ModelOptions], Network]

ARCHITECTURES: Final[dict[str, Builder]] = {
    "LlamaForCausalLM": build_llama,
    "Qwen2ForCausalLM": build_qwen2,
    "Qwen3ForCausalLM": build_qwen3,
    "DeepseekV2ForCausalLM": build_deepseek_v2,
    "DeepseekV3ForCausalLM": build_deepseek_v3,
    "DeepseekV32ForCausalLM": build_deepseek_v32,
}


def find_architecture(config: Settings) -> tuple[str, Builder]:
    """The architecture that a config names; InvalidInput, with the known ones, if we have none of them."""
    named = config.strings("architectures")
    for name in named:
        if name in ARCHITECTURES:
            return name, ARCHITECTURES[name]
    known = ", ".join(ARCHITECTURES)
    if not named:
        raise InvalidInput(f"{config.where}: architectures is missing; known are {known}")
    raise InvalidInput(f"{config.where}: architecture {', '.join(named)} is not known; known are {known}")
