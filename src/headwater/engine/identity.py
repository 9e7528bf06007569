"""The cache identity of a model directory (rule 6): what KV bytes depend on besides the tokens.

    weights     digest of the tensors' content (`checkpoint.py`)
    config      config.json, less what only says who wrote it, with the dtype that is really computed in
    layout      fingerprint: KV dtype, planes, block size
    quantisation  how values became bytes, where the dtypes do not say it
    tokenizer   content of tokenizer.json: keys are made of token ids

The label is the architecture's name, not the directory's: the same model under another path is the same model.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch

from headwater.core.identity import CacheIdentity, computed_config, config_digest
from headwater.engine.attention.base import Attention
from headwater.engine.tokenizer import TOKENIZER


def model_identity(
    *,
    architecture: str,
    config: Mapping[str, object],
    dtype: torch.dtype,
    weights: bytes,
    attention: Attention,
    tokenizer: bytes,
) -> CacheIdentity:
    """Put the parts together; pure."""
    return CacheIdentity(
        model=architecture,
        weights=weights,
        config=config_digest({"config": computed_config(config), "computed_in": str(dtype)}),
        layout=attention.layout.fingerprint,
        block_tokens=attention.layout.block_tokens,
        quantisation=attention.quantisation,
        tokenizer=tokenizer,
    )


def tokenizer_digest(directory: Path) -> bytes:
    """Digest of tokenizer.json; empty where there is none, as for a model that is only ever given token ids."""
    path = directory / TOKENIZER
    if not path.is_file():
        return b""
    return hashlib.sha256(b"headwater/tokenizer/1" + path.read_bytes()).digest()
