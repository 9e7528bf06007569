"""What makes KV bytes interchangeable: everything they depend on besides the tokens, in one value (rule 6).

    digest = SHA-256( "headwater/identity/1" ‖ u32 num_fields
                    ‖ for each field in declared order, the salt left out:
                        u32 len(name) ‖ name ‖ u64 len(value) ‖ value )
    tenant = SHA-256( "headwater/tenant/1" ‖ salt )[:16], sixteen zeros without a salt
    root   = SHA-256( "headwater/root/" ‖ decimal keys.FORMAT ‖ digest[32] ‖ u32 len(salt) ‖ salt )

Integers are little-endian, text is UTF-8, an int's value is a u64. `root` is the parent of every sequence's first
block, so nothing that another model, configuration or tenant computed can have a key of ours.

Not in it: rank and tensor-parallel size (they are in a page's name and frame; the layout here is the *unsharded* one),
and anything a user merely says. Digests are of content; a weights digest that is a hash of a model's name breaks the
promise without anybody noticing. Prompts given as embeddings have no tokens and are never cached.

The salt is a secret between tenants: it is not in `digest`, not in `repr`, and leaves the process only hashed.
"""

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Final

from headwater.core.errors import InvalidInput
from headwater.core.keys import FORMAT, BlockKey

DIGEST_BYTES: Final = 32
TENANT_BYTES: Final = 16
_SHOWN: Final = 8  # hexadecimal digits of a digest, where people read it

_REQUIRED: Final = ("weights", "config", "layout")
_OPTIONAL: Final = ("scales", "adapter", "tokenizer", "processor")
# Who wrote a config.json, with what, and the dtype its weights were stored in: nothing of it changes a byte of KV.
_NOT_COMPUTED_WITH: Final = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")


@dataclass(frozen=True, kw_only=True)
class CacheIdentity:
    """The cache identity. Immutable; raises InvalidInput for a field of the wrong type or length."""

    model: str  # a label for people; part of the digest all the same
    weights: bytes  # digest of the weights' content
    config: bytes  # `config_digest` of the model's configuration, RoPE overrides included
    layout: bytes  # fingerprint of the unsharded KVLayout
    block_tokens: int
    quantisation: str = ""  # scheme of the KV values, where the layout's dtypes do not say it all
    scales: bytes = b""  # digest of scales kept outside the pages
    adapter: bytes = b""  # digest of a LoRA's or other adapter's content
    tokenizer: bytes = b""
    processor: bytes = b""  # image or audio processor settings
    salt: bytes = field(default=b"", repr=False)  # tenant; any length

    def __post_init__(self) -> None:
        """Check every field; a digest has 32 bytes, and one that does not apply is empty."""
        for name in (*_REQUIRED, *_OPTIONAL):
            _check_digest(name, getattr(self, name), may_be_empty=name in _OPTIONAL)
        _check_text("model", self.model)
        _check_text("quantisation", self.quantisation)
        if not self.model:
            raise InvalidInput("model must not be empty")
        if type(self.block_tokens) is not int or not 0 < self.block_tokens < 1 << 32:
            raise InvalidInput(f"block_tokens must be a positive u32, not {self.block_tokens!r}")
        if type(self.salt) is not bytes:
            raise InvalidInput(f"salt must be bytes, not {type(self.salt).__name__}")

    def in_short(self) -> dict[str, str]:
        """The fields that apply, but the salt, for people: digests are cut."""
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "salt"}
        return {
            name: value.hex()[:_SHOWN] if isinstance(value, bytes) else str(value)
            for name, value in values.items()
            if value not in (b"", "")
        }

    @cached_property
    def digest(self) -> bytes:
        """32 bytes over every field but the salt: the identity that a frame carries."""
        encoded = [_encode(item.name, getattr(self, item.name)) for item in fields(self) if item.name != "salt"]
        return hashlib.sha256(b"headwater/identity/1" + struct.pack("<I", len(encoded)) + b"".join(encoded)).digest()

    @cached_property
    def tenant(self) -> bytes:
        """16 bytes that tell tenants apart without giving the salt away; zeros where there is none."""
        if not self.salt:
            return bytes(TENANT_BYTES)
        return hashlib.sha256(b"headwater/tenant/1" + self.salt).digest()[:TENANT_BYTES]

    @cached_property
    def root(self) -> BlockKey:
        """The parent of every first block."""
        return root_of(self.digest, self.salt)


def differences(one: Mapping[str, str], other: Mapping[str, str]) -> dict[str, str]:
    """Fields of two identities in short that differ, and what the other has there. Pure."""
    return {name: other.get(name, "") for name in {**one, **other} if one.get(name) != other.get(name)}


def root_of(digest: bytes, salt: bytes = b"") -> BlockKey:
    """The parent of every first block of a tenant, for who knows an identity by its digest only. Pure."""
    tag = f"headwater/root/{FORMAT}".encode()
    return BlockKey(hashlib.sha256(tag + digest + struct.pack("<I", len(salt)) + salt).digest())


def computed_config(config: Mapping[str, object]) -> dict[str, object]:
    """Of a model's config.json, what is computed with. Pure."""
    return {name: value for name, value in config.items() if name not in _NOT_COMPUTED_WITH}


def config_digest(config: Mapping[str, object]) -> bytes:
    """32 bytes over the canonical JSON of a configuration: keys sorted, no spaces, ASCII, no NaN or infinity.

    Pure. `1` and `1.0` differ, a tuple is a list. Raises InvalidInput for what JSON cannot say and for keys that are no
    strings, because JSON would write 1 and "1" alike.
    """
    try:
        _check_keys(config, "config")
        text = json.dumps({**config}, sort_keys=True, allow_nan=False, separators=(",", ":"))
    except InvalidInput:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(f"the config has no canonical JSON: {error}") from error
    return hashlib.sha256(b"headwater/config/1" + text.encode("ascii")).digest()


def _check_keys(value: object, path: str) -> None:
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise InvalidInput(f"{path} has the key {key!r}, which is not a string")
            _check_keys(item, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_keys(item, f"{path}[{index}]")


def _check_digest(name: str, value: object, *, may_be_empty: bool) -> None:
    if not isinstance(value, bytes):
        raise InvalidInput(f"{name} must be a digest of {DIGEST_BYTES} bytes, not {type(value).__name__}")
    if len(value) != DIGEST_BYTES and not (may_be_empty and not value):
        raise InvalidInput(f"{name} must be a digest of {DIGEST_BYTES} bytes, this one has {len(value)}")


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise InvalidInput(f"{name} must be text, not {type(value).__name__}")
    if not value.isprintable():
        raise InvalidInput(f"{name} must be printable, not {value!r}")


def _encode(name: str, value: str | bytes | int) -> bytes:
    if isinstance(value, int):
        value = struct.pack("<Q", value)
    elif isinstance(value, str):
        value = value.encode()
    return struct.pack("<I", len(name)) + name.encode() + struct.pack("<Q", len(value)) + value
