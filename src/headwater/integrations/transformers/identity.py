"""Whose bytes they are: one value from the model as it stands in memory, so that any change becomes misses (rule 6).

    weights       SHA-256 over every parameter and buffer, by name, dtype, shape and content
    config        the configuration with its overrides (RoPE included), the class, and how it computes: dtype, attention
                  implementation, versions of torch and transformers, kind of device, numerical settings, and on a CPU
                  instruction set and number of threads: another number of threads sums in another order
    layout        the planes as they are copied
    block_tokens  of a block, and of the chunks in which prompts are computed

    weights = SHA-256( "headwater/transformers-weights/1" ‖ u32 num_tensors
                     ‖ for each tensor, sorted by name:
                         u32 len(name) ‖ name ‖ u32 len(dtype) ‖ dtype ‖ u32 num_dims ‖ num_dims x u64 dim
                         ‖ SHA-256(its bytes) )

The content is that of the tensors, not of the files that they came from: whoever changed a weight after loading, or
loaded the model as another dtype, has another model. Nothing is remembered between starts.

`stamp` says cheaply whether a tensor was replaced or written to since. What goes round torch's own counting (`.data`)
it does not see.
"""

import hashlib
import json
import os
import struct
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import torch
import transformers

from headwater.core.identity import CacheIdentity, computed_config, config_digest
from headwater.layout.spec import KVLayout

_READERS: Final = 8


def model_weights(model: Any) -> bytes:
    """Digest of every tensor of a model. Blocks while they are read: about a second for each GB and core."""
    tensors = sorted(_tensors(model).items())
    with ThreadPoolExecutor(min(_READERS, os.cpu_count() or 1)) as pool:
        contents = list(pool.map(lambda item: _content(item[1]), tensors))
    total = hashlib.sha256(b"headwater/transformers-weights/1" + struct.pack("<I", len(tensors)))
    for (name, tensor), content in zip(tensors, contents, strict=True):
        shape = tuple(tensor.shape)
        total.update(_text(name) + _text(str(tensor.dtype)) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape))
        total.update(content)
    return total.digest()


def stamp(model: Any) -> tuple[object, ...]:
    """What changes when a tensor is replaced or written to. Milliseconds."""
    return tuple(
        (name, id(tensor), tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version)
        for name, tensor in _tensors(model).items()
    )


def computed_with(model: Any) -> bytes:
    """Digest of what a model computes with besides its tensors, and how. Milliseconds. Raises InvalidInput."""
    config = json.loads(model.config.to_json_string(use_diff=False))
    return config_digest(
        {
            "config": computed_config(config),
            "class": f"{type(model).__module__}.{type(model).__qualname__}",
            "attention": model.config._attn_implementation,
            "dtype": str(model.dtype),
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "device": _device(model.device),
            "numerics": _numerics(),
        }
    )


def model_identity_of(
    model: Any, *, weights: bytes, config: bytes, layout: KVLayout, salt: bytes = b""
) -> CacheIdentity:
    """Put the parts together."""
    return CacheIdentity(
        model=type(model).__name__,
        weights=weights,
        config=config,
        layout=layout.fingerprint,
        block_tokens=layout.block_tokens,
        quantisation="transformers",
        salt=salt,
    )


def _tensors(model: Any) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _content(tensor: torch.Tensor) -> bytes:
    private: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(private.numpy()).digest()


def _device(device: torch.device) -> Mapping[str, object]:
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return {"kind": "cuda", "name": found.name, "capability": f"{found.major}.{found.minor}"}
    return {
        "kind": device.type,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def _numerics() -> Mapping[str, object]:
    cuda = torch.backends.cuda
    return {
        "float32_matmul": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "mkldnn": torch.backends.mkldnn.enabled,
        "sdp": [bool(getattr(cuda, f"{name}_sdp_enabled")()) for name in ("flash", "mem_efficient", "math", "cudnn")],
        "reduced": [
            cuda.matmul.allow_fp16_reduced_precision_reduction,
            cuda.matmul.allow_bf16_reduced_precision_reduction,
        ],
    }


def _text(value: str) -> bytes:
    encoded = value.encode()
    return struct.pack("<I", len(encoded)) + encoded
