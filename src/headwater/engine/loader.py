"""From a Hugging Face directory to a model or a tokenizer: config.json, safetensors, tokenizer.json.

A directory is checked before anything large is made: the model is built once without memory, which says what tensors it
wants, and stops when that is far more than there are; names, shapes and dtypes are compared with the files' headers;
only then (`ModelPlan.load`) contents are read.

Not here: where directories come from. Nothing is downloaded, and no code of a directory is run, except the expressions
of its chat template, in a sandbox.
"""

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from headwater.core.errors import InvalidInput
from headwater.core.identity import CacheIdentity
from headwater.engine.checkpoint import Checkpoint
from headwater.engine.identity import model_identity, tokenizer_digest
from headwater.engine.models.base import Model
from headwater.engine.models.decoder import Decoder, ModelOptions, Network
from headwater.engine.models.registry import Builder, find_architecture
from headwater.engine.models.settings import Settings
from headwater.engine.request import Defaults
from headwater.engine.tokenizer import Tokenizer
from headwater.layout.spec import DType, KVLayout

CONFIG: Final = "config.json"
GENERATION: Final = "generation_config.json"

_DTYPES: Final = {
    **dict.fromkeys(("bf16", "bfloat16", "BF16"), DType.BF16),
    **dict.fromkeys(("fp16", "float16", "F16"), DType.FP16),
    **dict.fromkeys(("fp32", "float32", "F32"), DType.FP32),
}
_COMPUTED: Final = {DType.BF16: torch.bfloat16, DType.FP16: torch.float16, DType.FP32: torch.float32}
_FAR_MORE: Final = 10_000  # tensors that a config may ask for and the files do not hold, until it is not read further
_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.")


def load_model(
    directory: Path, *, device: str = "cpu", dtype: str | None = None, kv: str = "auto", block_tokens: int = 16
) -> Model:
    """Load a model onto a device. Blocks; raises InvalidInput for a directory or an option that cannot work.

    `dtype` is what is computed in, bf16, fp16 or fp32; None: what the config says. `kv` is what is cached: auto (as it
    is computed), bf16, fp16, fp32, or fp8 (quantised with scales, where the family's layout has them).
    """
    return plan_model(Path(directory), dtype=dtype, kv=kv, block_tokens=block_tokens).load(find_device(device))


def identify(directory: Path, *, dtype: str | None = None, kv: str = "auto", block_tokens: int = 16) -> CacheIdentity:
    """The identity that `load_model` with these options would give; reads all weights and keeps none. Blocks."""
    plan = plan_model(Path(directory), dtype=dtype, kv=kv, block_tokens=block_tokens)
    return plan.identity(plan.checkpoint.read(plan.dtypes, None)[1])


def load_tokenizer(directory: Path) -> Tokenizer:
    """Load a directory's tokenizer with its special tokens and chat template; InvalidInput where there is none."""
    require_directory(Path(directory))
    return Tokenizer.load(Path(directory))


def load_defaults(directory: Path) -> Defaults:
    """What a directory's generation_config.json says of sampling; ours where it says nothing, or is not there."""
    path = Path(directory) / GENERATION
    said = Settings(read_json(path) if path.is_file() else {}, str(path))
    found = {field.name: said.number(field.name) for field in fields(Defaults) if field.name in said}
    top_k = found.pop("top_k", 0.0)
    try:
        return Defaults(**found, top_k=int(top_k) if top_k.is_integer() else -1)
    except InvalidInput as error:
        raise InvalidInput(f"{path}: {error}") from error


def require_directory(directory: Path) -> None:
    """Raise InvalidInput if a model's directory is none."""
    if not directory.exists():
        raise InvalidInput(f"there is no model directory {directory}")
    if not directory.is_dir():
        raise InvalidInput(f"{directory} is not a directory")


def find_device(name: str) -> torch.device:
    """The device of that name; InvalidInput where there is none."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidInput(f"{name!r} is not a device: {error}") from error
    if device.type not in ("cpu", "cuda"):
        raise InvalidInput(f"models run on cpu or cuda, not on {name}")
    if device.type == "cuda" and not (torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()):
        raise InvalidInput(f"there is no CUDA device here for {name}")
    return device


def build_options(dtype: str, kv: str, block_tokens: int) -> ModelOptions:
    """Names to types; InvalidInput for a name that is not known."""
    computed = _DTYPES.get(dtype)
    if computed is None:
        raise InvalidInput(f"dtype must be bf16, fp16 or fp32, not {dtype!r}")
    cached = {"auto": computed, "fp8": DType.FP8_E4M3, **_DTYPES}.get(kv)
    if cached is None:
        raise InvalidInput(f"kv must be auto, bf16, fp16, fp32 or fp8, not {kv!r}")
    if type(block_tokens) is not int or block_tokens < 1:
        raise InvalidInput(f"block_tokens must be a positive integer, not {block_tokens!r}")
    return ModelOptions(_COMPUTED[computed], cached, block_tokens)


@dataclass
class WantedWeights:
    """Weights that only record what a model asks for; tensors without memory."""

    dtype: torch.dtype
    most: int | None = None  # tensors that may be asked for; None: any number
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)

    def take(self, name: str, *shape: int, fp32: bool = False) -> Tensor:
        """A tensor on the meta device. Raises InvalidInput when there were too many."""
        if self.most is not None and len(self.shapes) >= self.most:
            raise InvalidInput(f"the config asks for more than {self.most} tensors, which is far more than there are")
        self.shapes[name] = shape
        self.dtypes[name] = torch.float32 if fp32 else self.dtype
        return torch.empty(shape, dtype=self.dtypes[name], device="meta")


@dataclass
class _Loaded:
    tensors: dict[str, Tensor]

    def take(self, name: str, *shape: int, fp32: bool = False) -> Tensor:
        return self.tensors.pop(name)  # the last reference: what is merged into another tensor is freed at once


@dataclass(frozen=True)
class ModelPlan:
    """A checked directory: everything but the weights' contents."""

    directory: Path
    architecture: str
    config: Settings
    checkpoint: Checkpoint
    builder: Builder
    options: ModelOptions
    outline: Network  # on the meta device
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]

    @property
    def layout(self) -> KVLayout:
        """Of the KV."""
        return self.outline.attention.layout

    @property
    def num_weight_bytes(self) -> int:
        """That the weights take on a device."""
        return sum(math.prod(shape) * self.dtypes[name].itemsize for name, shape in self.shapes.items())

    def load(self, device: torch.device) -> Model:
        """Read the weights onto a device. Blocks."""
        tensors, weights = self.checkpoint.read(self.dtypes, device)
        return Decoder(
            self.builder(self.config, _Loaded(tensors), self.options),
            name=self.directory.resolve().name,
            identity=self.identity(weights),
            eos_ids=_eos_ids(self.directory, self.config),
            device=device,
        )

    def identity(self, weights: bytes) -> CacheIdentity:
        """The model's, given the digest of its weights."""
        return model_identity(
            architecture=self.architecture,
            config=self.config.values,
            dtype=self.options.dtype,
            weights=weights,
            attention=self.outline.attention,
            tokenizer=tokenizer_digest(self.directory),
        )


def plan_model(directory: Path, *, dtype: str | None = None, kv: str = "auto", block_tokens: int = 16) -> ModelPlan:
    """Check a directory and the options; see `load_model`. Reads no weights, and allocates nothing."""
    require_directory(directory)
    config = Settings(read_json(directory / CONFIG), str(directory / CONFIG))
    architecture, builder = find_architecture(config)
    if "quantization_config" in config:
        raise InvalidInput(f"{config.where}: the weights are quantised; only bf16, fp16 and fp32 ones are read here")
    checkpoint = Checkpoint(directory)
    options = build_options(dtype or _stored_dtype(config, checkpoint), kv, block_tokens)
    wanted = WantedWeights(options.dtype, most=len(checkpoint.names) + _FAR_MORE)
    outline = builder(config, wanted, options)
    checkpoint.check(wanted.shapes, ignored=_ignored(config, outline))
    return ModelPlan(
        directory, architecture, config, checkpoint, builder, options, outline, wanted.shapes, wanted.dtypes
    )


def _stored_dtype(config: Settings, checkpoint: Checkpoint) -> str:
    for name in ("dtype", "torch_dtype"):
        if name in config:
            return config.text(name).removeprefix("torch.")
    return checkpoint.dtype(min(checkpoint.names))


def _ignored(config: Settings, outline: Network) -> Callable[[str], bool]:
    """Tensors that checkpoints hold and models do not use: tables, a tied head, prediction layers behind the last."""
    tied = outline.head is outline.embedding

    def ignored(name: str) -> bool:
        layer = _LAYER.match(name)
        return (
            name.endswith(".rotary_emb.inv_freq")
            or (tied and name == "lm_head.weight")
            or ("num_nextn_predict_layers" in config and layer is not None and int(layer[1]) >= len(outline.blocks))
        )

    return ignored


def _eos_ids(directory: Path, config: Settings) -> frozenset[int]:
    """The tokens that end an answer, as the generation config or, without one, the model config says."""
    path = directory / GENERATION
    said = Settings(read_json(path), str(path)) if path.is_file() else config
    if "eos_token_id" not in said:
        said = config
    found = said.values.get("eos_token_id")
    ids = [] if found is None else found if isinstance(found, list) else [found]
    if not all(type(one) is int and one >= 0 for one in ids):
        raise said.error("eos_token_id", "a token id or a list of them")
    return frozenset(ids)


def read_json(path: Path) -> dict[str, object]:
    """An object from a JSON file; InvalidInput if the file is missing or holds something else."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise InvalidInput(f"{path} is missing") from error
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise InvalidInput(f"{path} must hold an object, not {type(found).__name__}")
    return found
