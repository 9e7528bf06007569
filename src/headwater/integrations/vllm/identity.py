"""Whose bytes a vLLM cache holds: one value from what vLLM registered and loaded, so that any change becomes misses.

    weights       digest of the checkpoint's files (`weights.py`)
    config        the model's configuration as vLLM uses it (overrides included), and how it computes: dtype,
                  quantisation, vLLM's version, attention backend, instruction set where blocks are packed for it, world
                  and group sizes, the kind of each KV group, every registered tensor's shape, strides and dtype
    layout        the planes as they are copied
    block_tokens  of vLLM's block

Prefixes are told apart by tokens, adapters (by content), images (by vLLM's hash of their content), and the request's
salt: see `naming.py`. Not in it: how many blocks there are, where they lie, the data-parallel rank. No vLLM here.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace

from headwater.core.errors import InvalidConfig
from headwater.core.identity import CacheIdentity, computed_config, config_digest
from headwater.integrations.vllm.metadata import RankFacts


def plain(value: object) -> object:
    """A value as JSON has it; what JSON does not know by its text. An object's address would change with each start."""
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(json.dumps(plain(item)) for item in value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return repr(value)
    text = str(value)
    if " at 0x" in text:
        raise InvalidConfig(f"a setting of type {type(value).__name__} has no value that could be compared: {text}")
    return text


def rank_identity(
    *,
    architecture: str,
    weights: bytes,
    model_config: Mapping[str, object],
    engine: Mapping[str, object],
    tensors: Sequence[Mapping[str, object]],
    layout: bytes,
    block_tokens: int,
) -> CacheIdentity:
    """The identity of one rank's pages. Raises InvalidConfig."""
    return CacheIdentity(
        model=architecture,
        weights=weights,
        config=config_digest(
            {"model": plain(computed_config(model_config)), "engine": plain(engine), "tensors": plain(list(tensors))}
        ),
        layout=layout,
        block_tokens=block_tokens,
        quantisation="vllm",
    )


def as_fields(identity: CacheIdentity) -> dict[str, bytes | str | int]:
    """An identity as plain values, for another process."""
    return asdict(identity)


def engine_identity(ranks: Sequence[RankFacts]) -> CacheIdentity:
    """The identity under which all ranks of an engine name their blocks. Raises InvalidConfig if they do not agree.

    Of one rank it is that rank's; of several, everything but the layout is the same, and the layouts are digested.
    """
    names = {item.name for item in fields(CacheIdentity)}
    found = [CacheIdentity(**{n: v for n, v in one.identity.items() if n in names}) for one in ranks]  # type: ignore[arg-type]
    if not found or {one.rank for one in ranks} != set(range(ranks[0].world)):
        raise InvalidConfig(
            f"of {ranks[0].world if ranks else 0} workers these answered: {[one.rank for one in ranks]}"
        )
    if len(found) == 1:
        return found[0]
    if len({(one.weights, one.block_tokens) for one in found}) > 1:
        raise InvalidConfig("the workers do not have the same weights, or blocks of different sizes")
    ordered = sorted(zip(ranks, found, strict=True), key=lambda pair: pair[0].rank)
    layouts = hashlib.sha256(b"headwater/vllm-ranks/1" + b"".join(one.digest for _, one in ordered)).digest()
    return replace(ordered[0][1], layout=layouts)
