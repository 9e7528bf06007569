"""The random models of `bench vllm`: their shapes, and their files, which are made once and shared by all contenders.

Weights are real files (our connector refuses made-up ones, which have no identity), written by a process of its own:
when it is gone, so is what it had on the GPU.
"""

import json
import subprocess
from pathlib import Path
from typing import Any, Final

from headwater.core.errors import HeadwaterError
from headwater.lab.bench.vllm_client import SOURCES

_LLAMA: Final[dict[str, object]] = {"vocab_size": 1024, "max_position_embeddings": 1 << 15}
SHAPES: Final[dict[str, dict[str, object]]] = {
    "tiny": {
        **_LLAMA,
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 512,
    },
    "medium": {
        **_LLAMA,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "intermediate_size": 2048,
    },
    "8b": {
        "vocab_size": 32000,
        "max_position_embeddings": 1 << 17,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 14336,
    },
    "mla": {  # dense: the latent of 512 + 64 numbers per token that every kernel for MLA takes
        "model_type": "deepseek_v2",
        "vocab_size": 32000,
        "max_position_embeddings": 1 << 17,
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "first_k_dense_replace": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "intermediate_size": 8192,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    },
}
_MADE: Final = "made.json"  # last: what the files beside it are
_SHARDS: Final = 8  # read, and digested, side by side


def family_of(shape: str) -> str:
    """The model's family, by our own name."""
    return str(SHAPES[shape].get("model_type", "llama"))


def prepare_model(shape: str, directory: Path, *, python: str, device: str, timeout_s: float) -> bool:
    """Make a model's files, unless they are there. Returns whether they were made. Blocks. Raises HeadwaterError."""
    overrides = {**SHAPES[shape], "dtype": "bfloat16" if device == "cuda" else "float32"}
    wanted: dict[str, Any] = {"shape": shape, "overrides": overrides, "num_shards": _SHARDS if device == "cuda" else 1}
    if _is_made(directory, wanted):
        return False
    work = (
        f"import sys, json, shutil; from pathlib import Path; sys.path[:0] = [{SOURCES!r}]\n"
        "from headwater.engine.make_model import make_model\n"
        "directory, family, device, wanted = Path(sys.argv[1]), sys.argv[2], sys.argv[3], json.loads(sys.argv[4])\n"
        "shutil.rmtree(directory, ignore_errors=True)\n"
        "make_model(family, directory, overrides=wanted['overrides'], num_shards=wanted['num_shards'], device=device)\n"
        f"(directory / {_MADE!r}).write_text(json.dumps(wanted))\n"
    )
    command = [python, "-c", work, str(directory), family_of(shape), device, json.dumps(wanted)]
    _run(command, f"the weights of {shape}", timeout_s)
    if not _is_made(directory, wanted):
        raise HeadwaterError(f"the weights of {shape} were not written")
    return True


def digest_model(directory: Path, *, python: str, timeout_s: float) -> None:
    """Have a model's files digested, as our connector does at its first start with them. Blocks. Raises HeadwaterError.

    By a command of its own: what is measured here knows no integration.
    """
    work = f"import sys; sys.path[:0] = [{SOURCES!r}]; from headwater.integrations.vllm.weights import main; main()"
    _run([python, "-c", work, str(directory)], "the digest of the weights", timeout_s)


def _run(command: list[str], what: str, timeout_s: float) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s)  # noqa: S603
    except subprocess.TimeoutExpired as error:
        raise HeadwaterError(f"{what}: not made in {timeout_s:.0f} s") from error
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise HeadwaterError(f"{what} cannot be made: {said[-1] if said else 'it said nothing'}")


def _is_made(directory: Path, wanted: dict[str, Any]) -> bool:
    try:
        found: object = json.loads((directory / _MADE).read_text())
    except (OSError, ValueError):
        return False
    return found == wanted
