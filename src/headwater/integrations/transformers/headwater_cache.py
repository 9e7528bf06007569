"""HeadwaterCache: `generate` with the KV of prompts kept in a store. Load, compute the rest, generate, save.

How a prompt is computed, cold or not, so that both give the same bits:

    [block][block] ... [block]   each in a forward of its own, of `block_tokens` tokens: loaded, or computed here
                            [end of the prompt, 1 to block_tokens tokens]   computed by transformers' generate
                                     [answer]   token by token, likewise

Bits depend on how many tokens are computed at once, and on nothing behind them. So a block is only ever saved as
`_compute` made it, in a forward of its own behind whole blocks: what is loaded is what would have been computed. The
prompt's last token is always computed, and everything in its block: a prompt handed to `generate` with its whole KV is
silently answered wrong. An answer's tokens were computed one by one, which gives other bits: before they are saved,
their blocks are computed again, as blocks.

A store that fails, hangs or lies costs its deadlines, and what it had is computed. Errors are the caller's mistakes,
and come before anything was computed.
"""

import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal, Self, TypeAlias, get_args

import torch
from transformers import DynamicCache

from headwater.build import open_local, open_pool
from headwater.config.checks import require_count, require_seconds
from headwater.config.stores import DISK_BYTES, LocalStoreConfig
from headwater.core.closing import Closing
from headwater.core.errors import InvalidConfig, InvalidInput, ResourceClosed
from headwater.core.keys import as_tokens
from headwater.integrations.transformers.arguments import prompt_of, require_taken
from headwater.integrations.transformers.blocks import BlocksMoved, CacheBlocks, Ids
from headwater.integrations.transformers.identity import computed_with, model_identity_of, model_weights, stamp
from headwater.integrations.transformers.layout import cache_layout
from headwater.integrations.transformers.scope import first_layers, require_known
from headwater.integrations.transformers.usage import GenerateUsage
from headwater.metrics import Metrics
from headwater.storage.base import Store
from headwater.storage.local import directory

__all__ = ["GenerateUsage", "HeadwaterCache"]

Save: TypeAlias = Literal["all", "prompt", "nothing"]

_LEAST_READ_S: Final = 2.0  # for reading, however fast the model computes


class HeadwaterCache(Closing):
    """A model, and a store that keeps the KV of its prompts. Threads may share it as far as they may share the model.

    Reading gets as long as computing the same blocks took before in this process, at least two seconds, and at most
    `read_timeout_s`: a slow store costs no more than that.
    """

    def __init__(
        self,
        model: Any,
        store: Store,
        *,
        tier: str = "pool",
        block_tokens: int = 256,
        save: Save = "all",
        read_timeout_s: float = 30.0,
        write_timeout_s: float = 30.0,
        salt: bytes = b"",
        metrics: Metrics | None = None,
    ) -> None:
        """`store` stays the caller's, and outlives this; `tier` is what `usage` calls it. `salt`: a tenant's secret.

        Blocks while the weights are digested, and runs the model on one token. Raises InvalidInput for a model that is
        not taken, InvalidConfig for options that cannot work.
        """
        require_count("block_tokens", block_tokens, 1)
        require_seconds("read_timeout_s", read_timeout_s)
        require_seconds("write_timeout_s", write_timeout_s)
        if save not in get_args(Save):
            raise InvalidConfig(f"save is one of {', '.join(get_args(Save))}, not {save!r}")
        require_known(model)
        layout = cache_layout(first_layers(model), block_tokens)
        self._stamp = stamp(model)
        self._config = computed_with(model)
        self.identity = model_identity_of(
            model, weights=model_weights(model), config=self._config, layout=layout, salt=salt
        )
        self.usage: GenerateUsage | None = None  # of the call that ended last
        self._model = model
        self._tier = tier
        self._block_tokens = block_tokens
        self._save: Save = save
        self._read_timeout_s = read_timeout_s
        self._write_timeout_s = write_timeout_s
        self._block_s = 0.0  # what computing a block took
        self._lock = threading.Lock()  # one at a time moves blocks; each has its deadlines
        self._owned: Store | None = None
        self._closed = False
        self._blocks = CacheBlocks(
            store,
            identity=self.identity,
            layout=layout,
            device=model.device,
            metrics=metrics if metrics is not None else Metrics(),
        )

    @classmethod
    def open(cls, model: Any, where: str | Path, *, limit_gib: float | None = None, **options: Any) -> Self:
        """The cache of a model in a directory, or in a pool by its URL. It owns the store, and closes it.

        `limit_gib`: the size of a directory, for good; 1 GiB if nobody says. `options`: those of the class. Blocks
        while a store is made. Raises a StoreError for a store that cannot be opened, and as the class does.
        """
        require_known(model)  # before a store is made for nothing
        store, tier = _open_store(where, limit_gib)
        try:
            found = cls(model, store, tier=tier, **options)
        except BaseException:
            store.close()
            raise
        found._owned = store
        return found

    def generate(self, input_ids: torch.Tensor, *, attention_mask: torch.Tensor | None = None, **options: Any) -> Any:
        """What `model.generate` returns for one prompt, [1, tokens]. `usage` says afterwards what was loaded and why.

        `options` are those of `model.generate`. Blocks: for the model, and for the store by the deadlines. Raises
        InvalidInput for what is not taken, before anything is computed, and what the model raises.
        """
        self._require_unchanged()
        prompt = prompt_of(input_ids, attention_mask).to(self._model.device)
        require_taken(self._model, options)
        tokens = as_tokens(prompt[0].cpu())
        num_blocks = (len(tokens) - 1) // self._block_tokens  # the last token is computed, with what is in its block
        cache = DynamicCache(config=self._model.config)
        times = [time.monotonic()]
        with self._lock:
            loaded = self._blocks.load(tokens, num_blocks, cache, timeout_s=self._read_limit_s(num_blocks))
        times.append(time.monotonic())
        self._compute(prompt, cache, loaded.num_blocks, num_blocks)
        times.append(time.monotonic())
        if num_blocks > loaded.num_blocks:
            self._block_s = (times[2] - times[1]) / (num_blocks - loaded.num_blocks)
        output = self._model.generate(prompt, attention_mask=torch.ones_like(prompt), past_key_values=cache, **options)
        times.append(time.monotonic())
        sequence = output if isinstance(output, torch.Tensor) else output.sequences
        whole = torch.cat(
            [prompt, sequence[:, len(tokens) :]], 1
        )  # named by what was computed, whoever changed the rest
        saved = self._keep(whole, len(tokens), cache, num_blocks)
        times.append(time.monotonic())
        load_s, prefill_s, generate_s, save_s = (after - before for before, after in pairwise(times))
        num_hit = loaded.num_blocks * self._block_tokens
        self.usage = GenerateUsage(
            prompt_tokens=len(tokens),
            answer_tokens=sequence.shape[1] - len(tokens),
            hit_tokens={self._tier: num_hit} if num_hit else {},
            computed_tokens=len(tokens) - num_hit,
            saved_tokens=saved.num_blocks * self._block_tokens,
            missed=loaded.why,
            not_saved=saved.why,
            load_s=load_s,
            prefill_s=prefill_s,
            generate_s=generate_s,
            save_s=save_s,
        )
        return output

    def close(self) -> None:
        """Give everything back; idempotent. The model stays. Blocks, seconds, where a store's call does not return."""
        self._closed = True
        with self._lock:
            self._blocks.close()
            if self._owned is not None:
                self._owned.close()

    # ------------------------------------------------------------------------------------------------------------------

    def _require_unchanged(self) -> None:
        """The model is still the one that was digested, and still one that is taken."""
        if self._closed:
            raise ResourceClosed("the cache is closed")
        require_known(self._model)
        if stamp(self._model) != self._stamp or computed_with(self._model) != self._config:
            raise InvalidInput(
                "the model, or what it computes with (threads, precision), is not what it was when the cache was "
                "opened: open it again"
            )

    def _read_limit_s(self, num_blocks: int) -> float:
        computed_s = num_blocks * self._block_s if self._block_s else self._read_timeout_s
        return min(self._read_timeout_s, max(_LEAST_READ_S, computed_s))

    @torch.no_grad()
    def _compute(self, sequence: torch.Tensor, cache: Any, start: int, end: int) -> None:
        """Append blocks to a cache that holds `start` of them. The one way in which a block comes to be."""
        for first in range(start * self._block_tokens, end * self._block_tokens, self._block_tokens):
            chunk = sequence[:, first : first + self._block_tokens]
            self._model.base_model(input_ids=chunk, past_key_values=cache, use_cache=True)
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)

    def _keep(self, sequence: torch.Tensor, num_prompt: int, cache: Any, num_blocks: int) -> BlocksMoved:
        """Save what is to be saved, as blocks: those of the prompt's end and the answer are computed for that."""
        if self._save == "nothing":
            return BlocksMoved(0, "")
        end, why = (sequence.shape[1] if self._save == "all" else num_prompt) // self._block_tokens, ""
        tokens: Ids = as_tokens(sequence[0, : end * self._block_tokens].cpu())
        with self._lock:
            if self._blocks.holds(tokens, end):
                return BlocksMoved(0, "")
        exact = self._first_blocks(cache, num_blocks)
        try:
            self._compute(sequence, exact, num_blocks, end)
        except torch.OutOfMemoryError:  # the answer is there, and is worth more than its blocks
            exact, end, why = self._first_blocks(cache, num_blocks), num_blocks, "no memory to compute the last blocks"
        with self._lock:
            saved = self._blocks.save(tokens, end, exact, timeout_s=self._write_timeout_s)
        return BlocksMoved(saved.num_blocks, saved.why or why)

    def _first_blocks(self, cache: Any, num_blocks: int) -> Any:
        """A cache of the first blocks of another, which stays as it is. Nothing is copied yet."""
        end = num_blocks * self._block_tokens
        found = DynamicCache(config=self._model.config)
        for new, old in zip(found.layers, cache.layers, strict=True) if end else ():
            new.lazy_initialization(old.keys, old.values)
            new.keys, new.values = old.keys[:, :, :end], old.values[:, :, :end]
        return found


def _open_store(where: str | Path, limit_gib: float | None) -> tuple[Store, str]:
    """The store in a directory or behind a URL, and the name of its tier."""
    if isinstance(where, str) and ("://" in where or where.startswith("local:")):
        if limit_gib is not None:
            raise InvalidConfig("limit_gib is the size of a directory; a pool has its own")
        return open_pool(where), "pool"
    path = Path(where)
    limit = None if directory.has_slab(path) else DISK_BYTES
    if limit_gib is not None:
        if not 0 < limit_gib < float("inf"):
            raise InvalidConfig(f"limit_gib must be a positive number of GiB, not {limit_gib!r}")
        limit = int(limit_gib * (1 << 30))
    tier = "host" if directory.is_memory(path) else "disk"
    return open_local(LocalStoreConfig(directory=path, limit_bytes=limit)), tier
