"""What there is to know of a vLLM engine, read off its configuration objects: what it is, and what we cannot cache.

No vLLM import: the objects are vLLM's, and are looked at by attribute. Whatever cannot be stored correctly is refused
by name at start (`require_cacheable`), with what to do about it.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Final

from headwater.core.errors import InvalidConfig

_CACHEABLE: Final = ("FullAttentionSpec", "MLAAttentionSpec")
_UNIFORM: Final = "UniformTypeKVCacheSpecs"
_ONE_RUN: Final = "BLNHC"  # by vLLM's name: blocks outside, so all layers of a block are one run of bytes


def layer_specs(kv_cache_config: Any) -> dict[str, Any]:
    """The KV spec of each layer."""
    found: dict[str, Any] = {}
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        many = spec.kv_cache_specs if type(spec).__name__ == _UNIFORM else {}
        found |= {name: many.get(name, spec) for name in group.layer_names}
    return found


def require_cacheable(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raise InvalidConfig for what cannot be cached correctly, by its name."""
    groups = kv_cache_config.kv_cache_groups
    for name, spec in layer_specs(kv_cache_config).items():
        kind = type(spec).__name__
        if kind not in _CACHEABLE:
            raise InvalidConfig(
                f"layer {name} keeps its KV as {kind}: Headwater stores whole blocks of full attention and MLA, and "
                "neither windows nor recurrent state. Where vLLM can, --disable-hybrid-kv-cache-manager makes all "
                "layers full attention; otherwise leave the connector out"
            )
        if getattr(spec, "non_causal", False):
            raise InvalidConfig(f"layer {name} is not causal: a block's KV depends on what comes behind it")
    if len(groups) != 1:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups)
        raise InvalidConfig(
            f"vLLM made {len(groups)} KV groups ({kinds}), with blocks of their own: Headwater stores one group. Try "
            "--disable-hybrid-kv-cache-manager"
        )
    if groups[0].host_resident:
        raise InvalidConfig("vLLM keeps this KV on the host already: leave the connector out")
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise InvalidConfig(f"{name} = {getattr(parallel, name)}: blocks that are spread over ranks are not stored")
    speculative = vllm_config.speculative_config
    if speculative is not None and getattr(speculative, "method", "") != "ngram":
        raise InvalidConfig(
            f"speculative decoding with {getattr(speculative, 'method', 'a draft model')}: a draft's KV lags behind "
            "the model's, and is not stored. Leave one of them out"
        )
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise InvalidConfig(
            "calculate_kv_scales: scales that are computed from the first requests are in no page, so what one process "
            "stored would be wrong for the next. Use a checkpoint with scales"
        )
    if getattr(getattr(vllm_config, "model_config", None), "enable_sleep_mode", False):
        raise InvalidConfig(
            "enable_sleep_mode: vLLM takes the KV's memory away while blocks of it may still be read or written, and "
            "tells no connector's worker. Leave one of them out"
        )
    if str(getattr(vllm_config.load_config, "load_format", "")) == "dummy":
        raise InvalidConfig("load_format=dummy: weights that are made up have no identity, so nothing can be cached")


def require_orderly(vllm_config: Any, *, sync: bool) -> None:
    """Raise InvalidConfig where a load that fails could not be taken back."""
    if sync and vllm_config.max_concurrent_batches > 1:
        raise InvalidConfig(
            "load=sync: vLLM begins a request's next step before it knows that a load failed, and would use its token. "
            "Add --no-async-scheduling (and no pipeline), or load asynchronously, as by default"
        )
    if sync and not _is_cpu(vllm_config) and getattr(vllm_config, "use_v2_model_runner", False):
        raise InvalidConfig(
            "load=sync: vLLM's model runner V2 keeps on the GPU how far a request is, and is not told when a load "
            "failed: it would go on with the wrong tokens. Set VLLM_USE_V2_MODEL_RUNNER=0, or load asynchronously, as "
            "by default"
        )


def one_run_layout(vllm_config: Any) -> str | None:
    """The layout in which a block is one run of bytes, where this engine can have it. None: vLLM decides.

    VLLM itself drops a layout that a backend does not read, but ends where a backend wants blocks smaller than the
    engine's: in this layout they cannot be split. Where layers are in other processes (several ranks), nobody here can
    ask them; vLLM then has blocks that backends take whole, unless somebody else said how large they are.
    """
    if _is_cpu(vllm_config):
        return None
    cache = vllm_config.cache_config
    found = vllm_config.compilation_config.static_forward_context
    layers = [layer for layer in found.values() if hasattr(layer, "get_attn_backend")]
    if not layers:
        return None if getattr(cache, "user_specified_block_size", True) else _ONE_RUN
    for layer in layers:
        backend = layer.get_attn_backend()
        layouts = backend.supported_kv_cache_layouts()
        if layouts is not None and _ONE_RUN not in {one.name for one in layouts}:
            return None
        sizes = backend.get_supported_kernel_block_sizes(layer.get_kv_cache_spec(vllm_config))
        if not any(_takes(size, cache.block_size) for size in sizes):
            return None
    return _ONE_RUN


def _is_cpu(vllm_config: Any) -> bool:
    return str(getattr(vllm_config.device_config, "device_type", "")) == "cpu"


def _takes(size: Any, block_tokens: int) -> bool:
    """Whether a kernel takes blocks of this size whole; it names a size, or what its sizes are multiples of."""
    return block_tokens == size if isinstance(size, int) else block_tokens % int(size.base) == 0


def facts_of(value: Any) -> object:
    """A spec as plain values: its type and fields."""
    if is_dataclass(value) and not isinstance(value, type):
        return {"is": type(value).__name__} | {item.name: facts_of(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): facts_of(item) for name, item in value.items()}
    return value


def engine_facts(vllm_config: Any, kv_cache_config: Any, *, version: str) -> dict[str, object]:
    """What decides which bytes a block has, besides weights and tensors."""
    parallel, cache, model = vllm_config.parallel_config, vllm_config.cache_config, vllm_config.model_config
    layers = vllm_config.compilation_config.static_forward_context
    specs = layer_specs(kv_cache_config)
    return {
        "vllm": version,
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "cache_dtype": str(cache.cache_dtype),
        "layout": str(getattr(kv_cache_config, "kv_cache_layout", None)),
        "tensor_parallel": parallel.tensor_parallel_size,
        "pipeline_parallel": parallel.pipeline_parallel_size,
        "custom_ops": sorted(getattr(vllm_config.compilation_config, "custom_ops", None) or ()),  # another kernel
        "backends": sorted({_backend(layers.get(name)) for name in specs}),
        "groups": [sorted(group.layer_names) for group in kv_cache_config.kv_cache_groups],
        "specs": {name: facts_of(spec) for name, spec in specs.items()},
    }


def _backend(layer: Any) -> str:
    """How a layer's attention is computed, and for which instructions its blocks are packed."""
    if layer is None:
        return "unknown"
    backend = layer.get_attn_backend().get_name() if hasattr(layer, "get_attn_backend") else type(layer).__name__
    return f"{backend}/{getattr(layer, 'isa', '')}"


def checkpoint_directory(vllm_config: Any) -> Path:
    """Where the weights were loaded from. Raises InvalidConfig if that is no directory here."""
    model = vllm_config.model_config
    named = str(getattr(model, "model_weights", "") or model.model)
    if Path(named).is_dir():
        return Path(named)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(named, revision=model.revision, local_files_only=True))
    except Exception as error:
        raise InvalidConfig(f"the weights of {named} are in no directory that could be read: {error}") from error


def is_only_rank(vllm_config: Any) -> bool:
    """Whether this engine has one worker."""
    parallel = vllm_config.parallel_config
    return int(parallel.tensor_parallel_size * parallel.pipeline_parallel_size) == 1
