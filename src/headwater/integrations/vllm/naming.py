"""What a vLLM request's blocks are called: keys from its tokens, and from everything else that its KV depends on.

Adapters count by content, multimodal input by the hash that vLLM made of it, at its positions; a salt makes a tenant.
Prompts given as embeddings have no tokens: they are not cached. When vLLM says that what was computed is not to be used
any more (weights that were changed in place), a *generation*, drawn at random, is part of all names from then on: what
has an old name stays where it is, and is not asked for any more. No vLLM here: a request is what has its attributes.
"""

import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from headwater.core.errors import InvalidConfig, InvalidInput
from headwater.core.identity import CacheIdentity
from headwater.core.keys import BlockKey, Extra, block_keys
from headwater.integrations.vllm.weights import adapter_digest

_GENERATION_BYTES: Final = 16
_NUM_NAMED: Final = 1024  # salts and adapters of which the root is kept


@dataclass(slots=True)
class Prompt:
    """The names of a request's blocks, as far as its tokens go."""

    root: BlockKey
    tenant: bytes
    extras: tuple[Extra, ...]
    block_tokens: int
    keys: list[BlockKey] = field(default_factory=list)

    def extend(self, tokens: Sequence[int], num_blocks: int) -> list[BlockKey]:
        """Keys of the first `num_blocks` blocks of these tokens."""
        done, size = len(self.keys), self.block_tokens
        if done < num_blocks:
            self.keys += block_keys(
                list(tokens[done * size : num_blocks * size]),
                parent=self.keys[-1] if done else self.root,
                block_tokens=size,
                start=done * size,
                extras=self.extras,
            )
        return self.keys[:num_blocks]


class Namer:
    """Makes prompts of requests. One thread asks; adapters are read by others."""

    def __init__(self, identity: CacheIdentity, *, digest: Callable[[Path], bytes] = adapter_digest) -> None:
        self._identity = identity
        self._digest = digest
        self._generation = b""  # none: the weights are those of the checkpoint
        self._named: dict[tuple[bytes, bytes], tuple[BlockKey, bytes]] = {}
        # By path and vLLM's number, new where an adapter is loaded anew. None: it is being read, b"": it cannot be.
        self._adapters: dict[tuple[str, int], bytes | None] = {}
        self._lock = threading.Lock()

    def renew(self) -> None:
        """Name everything anew: nothing that has a name by now is found any more, not even after a second time."""
        self._generation = os.urandom(_GENERATION_BYTES)
        self._named.clear()
        with self._lock:
            self._adapters.clear()

    def prompt(self, request: Any) -> Prompt | None:
        """How a request's blocks are called; None: it is not to be cached, at least not now."""
        if request.prompt_embeds is not None or getattr(request, "prompt_is_token_ids", None) is not None:
            return None
        adapter = self._adapter(request.lora_request)
        if adapter is None:
            return None
        try:
            extras = tuple(_extra(feature) for feature in request.mm_features)
        except (InvalidInput, AttributeError, TypeError):
            return None  # input of which nobody can say what it is
        salt = (request.cache_salt or "").encode()
        root, tenant = self._names(salt, adapter)
        return Prompt(root, tenant, extras, self._identity.block_tokens)

    def _names(self, salt: bytes, adapter: bytes) -> tuple[BlockKey, bytes]:
        found = self._named.get((salt, adapter))
        if found is None:
            if len(self._named) >= _NUM_NAMED:
                self._named.clear()
            identity = replace(self._identity, salt=salt, adapter=adapter)
            found = self._named[salt, adapter] = self._root(identity), identity.tenant
        return found

    def _root(self, identity: CacheIdentity) -> BlockKey:
        if not self._generation:
            return identity.root
        return BlockKey(hashlib.sha256(b"headwater/vllm-generation/1" + self._generation + identity.root).digest())

    def _adapter(self, lora: Any) -> bytes | None:
        """Digest of a request's adapter, empty without one; None: it is not known yet, or cannot be read."""
        if lora is None:
            return b""
        if getattr(lora, "load_inplace", False):
            return None  # other weights under the same number: nobody can say which of them a block was computed with
        which = str(getattr(lora, "lora_path", "") or ""), int(lora.lora_int_id)
        with self._lock:
            if which not in self._adapters:
                reading = threading.Thread(target=self._read, args=(which,), name="headwater adapter", daemon=True)
                with suppress(RuntimeError):  # the machine has no more: the next request tries again
                    reading.start()
                    self._adapters[which] = None
            return self._adapters.get(which) or None

    def _read(self, which: tuple[str, int]) -> None:
        try:
            found = self._digest(Path(which[0]))
        except (InvalidConfig, OSError):
            found = b""
        with self._lock:
            if which in self._adapters:  # else all was forgotten meanwhile
                self._adapters[which] = found


def _extra(feature: Any) -> Extra:
    position = feature.mm_position
    content = hashlib.sha256(str(feature.identifier).encode()).digest()
    return Extra(str(feature.modality), content, int(position.offset), int(position.length))
