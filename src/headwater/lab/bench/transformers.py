"""`headwater bench transformers`: the time to the first token of `generate`, alone, cold and from a store.

A Llama of random weights. In each round a prompt that nobody has seen is answered with one token: by transformers
alone (one prefill), by `HeadwaterCache` cold (in blocks), and again, when its blocks come from a directory on a disk.
The page cache is warm, as it is soon after a block was written. Cold and hit must give the same logits, bit for bit.
"""

import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from headwater.core.errors import HeadwaterError, InvalidConfig, NotInstalled
from headwater.lab.bench.report import BenchReport, Samples, Tell
from headwater.lab.bench.shapes import SHAPES, require_shape
from headwater.layout.frame import frame_bytes
from headwater.layout.gqa import gqa_layout
from headwater.layout.spec import DType
from headwater.storage.scratch import disk_root, limit_for

_NOTES: Final = {
    "plain_s": "transformers alone, the whole prompt in one prefill",
    "cold_s": "nothing is stored: computed in blocks, without the saving that follows the answer",
    "save_s": "that saving; one more block may be computed for it",
    "hit_s": "the blocks come from the directory, verified; the prompt's end is computed",
    "load_s": "of that, reading",
    "speed_up": "cold / hit, of the medians",
    "speed_up_plain": "plain / hit, of the medians",
    "open_s": "to open the cache: digest of the weights, one token, the directory",
    "equal": "whether cold and hit gave the same tokens and logits, bit for bit, in every round",
}


@dataclass(frozen=True, slots=True)
class TransformersOptions:
    """What to measure."""

    shape: str = "tiny"
    device: str = "cpu"
    dtype: str = "float32"
    tokens: int = 4096
    block_tokens: int = 256
    rounds: int = 3

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        require_shape(self.shape)
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise InvalidConfig(f"dtype is float32, bfloat16 or float16, not {self.dtype!r}")
        if min(self.tokens, self.block_tokens, self.rounds) < 1 or self.tokens <= self.block_tokens:
            raise InvalidConfig("tokens, block_tokens and rounds must be positive, and a prompt longer than a block")


def run(options: TransformersOptions | None = None, *, tell: Tell | None = None) -> BenchReport:
    """Measure. Blocks for minutes on a large shape. Raises NotInstalled without transformers."""
    options = options if options is not None else TransformersOptions()
    try:
        import torch
        from transformers import AutoModelForCausalLM, LlamaConfig
    except ModuleNotFoundError as error:
        raise NotInstalled(f"there is no {error.name} here: pip install 'headwater[transformers]'") from error
    from headwater.integrations.transformers import HeadwaterCache

    shape = SHAPES[options.shape]
    config = LlamaConfig(**shape, max_position_embeddings=options.tokens + 64, pad_token_id=0)
    torch.manual_seed(1)
    with torch.device(options.device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, options.dtype)).eval()
    samples, equal = Samples(), True
    asked: dict[str, Any] = {
        "max_new_tokens": 1,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    with tempfile.TemporaryDirectory(prefix="headwater-transformers-", dir=disk_root()) as place:
        began_s = time.monotonic()
        limit_gib = _limit_bytes(shape, options) / (1 << 30)
        where = Path(place) / "store"
        with HeadwaterCache.open(model, where, limit_gib=limit_gib, block_tokens=options.block_tokens) as headwater:
            open_s = time.monotonic() - began_s
            for number in range(options.rounds + 1):  # the first is a warm-up, and counts for nothing
                if tell is not None:
                    tell("warm-up" if not number else f"round {number}", number, options.rounds + 1)
                prompt = torch.randint(3, shape["vocab_size"], (1, options.tokens), device=options.device)
                taken = Samples() if not number else samples
                began_s = time.monotonic()
                model.generate(prompt, attention_mask=torch.ones_like(prompt), **asked).sequences.cpu()
                taken.add("plain_s", time.monotonic() - began_s)
                cold = headwater.generate(prompt, **asked)
                usage = headwater.usage
                if usage is None or usage.cached_tokens or usage.not_saved:
                    raise HeadwaterError(f"a prompt that is new was not computed and saved: {usage}")
                taken.add("cold_s", usage.load_s + usage.prefill_s + usage.generate_s)
                taken.add("save_s", usage.save_s)
                hit = headwater.generate(prompt, **asked)
                usage = headwater.usage
                if usage is None or usage.missed:
                    raise HeadwaterError(f"a prompt that was saved is not there: {usage}")
                taken.add("hit_s", usage.load_s + usage.prefill_s + usage.generate_s)
                taken.add("load_s", usage.load_s)
                equal = equal and all(map(torch.equal, cold.logits, hit.logits))
                equal = equal and torch.equal(cold.sequences, hit.sequences)
    medians = samples.medians()
    ratios = {
        "speed_up": medians["cold_s"] / medians["hit_s"],
        "speed_up_plain": medians["plain_s"] / medians["hit_s"],
    }
    return BenchReport(
        command="bench transformers",
        options={name: getattr(options, name) for name in options.__slots__},
        results={**medians, **ratios, "open_s": open_s, "equal": equal},
        notes=_NOTES,
        samples=samples.values,
    )


def _limit_bytes(shape: Mapping[str, int], options: TransformersOptions) -> int:
    """Room for all rounds."""
    layout = gqa_layout(
        num_layers=shape["num_hidden_layers"],
        num_kv_heads=shape["num_key_value_heads"],
        head_dim=shape["head_dim"],
        block_tokens=options.block_tokens,
        dtype=DType.FP32 if options.dtype == "float32" else DType.BF16,
    )
    num_pages = (options.rounds + 1) * (options.tokens // options.block_tokens + 1)
    return limit_for(frame_bytes=frame_bytes(layout.plane_bytes), num_pages=num_pages)
