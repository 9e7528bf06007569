"""One small, realistic layout of every sort we support, by name: for the demonstration, the benchmarks and the tests.

Not a registry: a layout is data, and a new one needs no entry here to work.
"""

from headwater.layout.dsa import dsa_layout, dsa_plain_layout
from headwater.layout.gqa import gqa_fp8_layout, gqa_layout
from headwater.layout.mla import mla_layout
from headwater.layout.spec import DType, KVLayout, combine


def sample_layouts() -> dict[str, KVLayout]:
    """Return the layouts, unsharded; pure."""
    gqa = gqa_layout(num_layers=4, num_kv_heads=8, head_dim=128, block_tokens=64, dtype=DType.BF16)
    draft = gqa_layout(num_layers=1, num_kv_heads=2, head_dim=64, block_tokens=64, dtype=DType.BF16)
    windowed = gqa_layout(num_layers=2, num_kv_heads=4, head_dim=64, block_tokens=64, dtype=DType.BF16)
    return {
        "gqa-bf16": gqa,
        "gqa-fp16-few-heads": gqa_layout(num_layers=3, num_kv_heads=2, head_dim=128, block_tokens=32, dtype=DType.FP16),
        "gqa-int8": gqa_layout(num_layers=3, num_kv_heads=8, head_dim=64, block_tokens=64, dtype=DType.INT8),
        "gqa-fp8-scales": gqa_fp8_layout(num_layers=3, num_kv_heads=8, head_dim=128, block_tokens=64),
        "mla-bf16": mla_layout(num_layers=3, block_tokens=64),
        "dsa": dsa_layout(num_layers=3, block_tokens=64),
        "dsa-plain": dsa_plain_layout(num_layers=3, block_tokens=64),
        "mixed-gqa-mla": combine(windowed, mla_layout(num_layers=2, block_tokens=64, layer_offset=2)),
        "gqa-draft": combine(gqa, draft.with_layer_offset(gqa.num_layers)),
        "odd": gqa_fp8_layout(num_layers=2, num_kv_heads=3, head_dim=5, block_tokens=7, dtype=DType.UINT8),
    }
