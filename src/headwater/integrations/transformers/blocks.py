"""Blocks of a DynamicCache to and from a store, through a few slots: copied, digested, verified, each with a deadline.

A prompt's blocks pass in runs of as many as there are slots, so the memory beside the model's own cache is bounded.
What is in the store is asked first: a hint; what counts is what came verified. All calls to the store are the attention
store's, so a store that fails, hangs or lies ends a run early, and nothing else.

Invariants:
- A cache gets whole runs of verified blocks from its beginning, or nothing.
- Slots are written to only while no job reads or writes them. A call that was interrupted (Ctrl-C) leaves its job
  behind: its slots are given up with everything around them, and the next call gets new ones.

Not here: what the blocks are of (`headwater_cache.py`).
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from headwater.attention_store import AttentionStore
from headwater.build.tiered import open_staging
from headwater.config.writes import WriteConfig
from headwater.core.errors import HeadwaterError, HostTierUnavailable
from headwater.core.identity import CacheIdentity
from headwater.core.results import Reason
from headwater.layout.spec import KVLayout
from headwater.metrics import Metrics
from headwater.storage.base import Store
from headwater.transfer.device.arena import DeviceCache, create_kv_cache
from headwater.transfer.executor.sliced import Reached

log: Final = logging.getLogger("headwater")

Ids = npt.NDArray[np.uint32]

_SLOTS: Final = 64  # at most, and
_SLOT_BYTES: Final = 256 << 20  # but at least
_LEAST_SLOTS: Final = 2
_MATCH_S: Final = 1.0
_CLOSE_S: Final = 5.0
_NO_MEMORY: Final = "there is no memory for pages, or the cache was closed"
_TOO_LONG: Final = "it took too long"


class BlocksMoved(NamedTuple):
    """How many blocks were moved, and in words why not more; empty: all that were asked for."""

    num_blocks: int
    why: str


class _Passage(NamedTuple):
    """Slots, and the way between them and the store."""

    stack: ExitStack
    slots: DeviceCache
    attention: AttentionStore


class CacheBlocks:
    """The blocks of one identity in one store. One call at a time; does not own the store."""

    def __init__(
        self, store: Store, *, identity: CacheIdentity, layout: KVLayout, device: torch.device, metrics: Metrics
    ) -> None:
        """Take memory for slots and pages. Raises HostTierUnavailable, or what torch raises for a full device."""
        self.layout = layout
        self._store = store
        self._identity = identity
        self._device = device
        self._metrics = metrics
        self._closed = False
        self._run: _Passage | None = self._open()

    @property
    def num_slots(self) -> int:
        """Blocks in one run."""
        return max(_LEAST_SLOTS, min(_SLOTS, _SLOT_BYTES // self.layout.page_bytes))

    def load(self, tokens: Ids, num_blocks: int, cache: Any, *, timeout_s: float) -> BlocksMoved:
        """Fill an empty cache with the first blocks of `tokens`, as many as there are, at most `num_blocks`. Blocks."""
        run = self._ready()
        if run is None or not num_blocks:
            return BlocksMoved(0, _NO_MEMORY if run is None else "")
        until_s = time.monotonic() + timeout_s
        path = tokens[: num_blocks * self.layout.block_tokens]
        matched = self._match(run, path, timeout_s)
        why = "" if matched.num_blocks == num_blocks else _said(matched, "not in the store")
        states = self._empty(run, matched.num_blocks)
        read = partial(self._read, run, states, path)
        done, stopped = self._in_runs(read, 0, matched.num_blocks, until_s, "the store had no good page")
        if done:
            end = done * self.layout.block_tokens
            for layer, keys, values in zip(cache.layers, states[::2], states[1::2], strict=True):
                layer.update(keys[:, :, :end], values[:, :, :end])
        return BlocksMoved(done, stopped or why)

    def holds(self, tokens: Ids, num_blocks: int) -> bool:
        """Whether the store seems to have the first blocks of `tokens`, all of them. Blocks, a second at most."""
        run = self._ready()
        path = tokens[: num_blocks * self.layout.block_tokens]
        return run is not None and self._match(run, path, _MATCH_S).num_blocks == num_blocks

    def save(self, tokens: Ids, num_blocks: int, cache: Any, *, timeout_s: float) -> BlocksMoved:
        """Write the first blocks of a cache, of `tokens`, those that are not there yet. Blocks. Counts new ones."""
        run = self._ready()
        if run is None or not num_blocks:
            return BlocksMoved(0, _NO_MEMORY if run is None else "")
        until_s = time.monotonic() + timeout_s
        path = tokens[: num_blocks * self.layout.block_tokens]
        matched = self._match(run, path, timeout_s)
        if matched.why not in (Reason.WHOLE, Reason.INCOMPLETE):
            return BlocksMoved(0, _said(matched, ""))
        write = partial(self._write, run, _states(cache), path)
        done, why = self._in_runs(write, matched.num_blocks, num_blocks, until_s, "the store did not take it")
        return BlocksMoved(done - matched.num_blocks, why)

    def _in_runs(
        self, move: Callable[[range, float], Reached], start: int, end: int, until_s: float, short: str
    ) -> tuple[int, str]:
        """Move blocks, as many at a time as there are slots. Blocks. Up to which block that went, and why not to `end`.

        `short` says it where the store says nothing.
        """
        done = start
        while done < end:
            rows = range(done, min(done + self.num_slots, end))
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return done, _TOO_LONG
            reached = move(rows, left_s)
            done += reached.num_blocks
            if reached.num_blocks < len(rows):
                return done, _said(reached, short)
        return done, ""

    def _empty(self, run: _Passage, num_blocks: int) -> list[torch.Tensor]:
        """Room for blocks in a row, as transformers has them: [1, heads, tokens, dim] for each plane."""
        size = num_blocks * self.layout.block_tokens
        return [
            torch.empty((1, plane.shape[1], size, plane.shape[3]), dtype=plane.dtype, device=self._device)
            for plane in run.slots.flat
        ]

    def close(self) -> None:
        """End all jobs, give the memory up. Idempotent. Blocks for seconds where a store's call does not return."""
        self._closed = True
        run, self._run = self._run, None
        if run is not None:
            run.attention.close(_CLOSE_S)
            run.stack.close()

    # ------------------------------------------------------------------------------------------------------------------

    def _open(self) -> _Passage:
        with ExitStack() as stack:
            slots = stack.enter_context(create_kv_cache(self.layout, self.num_slots, self._device))
            staging = open_staging(slots, {"store": self._store}, stack, metrics=self._metrics)
            if staging is None:
                raise HostTierUnavailable("there is no host memory for the pages through which blocks travel")
            config = WriteConfig(slice_blocks=self.num_slots, slice_timeout_s=86_400.0)  # a call's own limit counts
            attention = AttentionStore(
                self._store, staging, identity=self._identity, layout=self.layout, config=config, metrics=self._metrics
            )
            stack.callback(attention.close, _CLOSE_S)
            return _Passage(stack.pop_all(), slots, attention)

    def _ready(self) -> _Passage | None:
        """What moves blocks; made anew where the last call was interrupted. None: it cannot be had."""
        if self._run is None and not self._closed:
            try:
                self._run = self._open()
            except (HeadwaterError, torch.OutOfMemoryError) as error:
                log.warning("the store is not in use: %s", error)
        return self._run

    @contextmanager
    def _given_up_if_interrupted(self, run: _Passage) -> Iterator[None]:
        """Around a call: its job goes on after Ctrl-C, and may read or write its slots."""
        try:
            yield
        except BaseException:
            self._run = None
            run.attention.close(_CLOSE_S)
            run.stack.close()
            raise

    def _match(self, run: _Passage, path: Ids, timeout_s: float) -> Reached:
        with self._given_up_if_interrupted(run):
            return run.attention.match(path, timeout_s=min(_MATCH_S, timeout_s))

    def _read(self, run: _Passage, states: list[torch.Tensor], path: Ids, rows: range, timeout_s: float) -> Reached:
        """Read blocks into slots, and copy those that came to their places."""
        path = path[: rows.stop * self.layout.block_tokens]
        with self._given_up_if_interrupted(run):
            reached = run.attention.read(path, range(len(rows)), start_block=rows.start, timeout_s=timeout_s)
            for state, plane in zip(states, run.slots.flat, strict=True):
                _blocks(state, rows.start, reached.num_blocks, self.layout).copy_(plane[: reached.num_blocks])
            self._settle()
        return reached

    def _write(self, run: _Passage, states: list[torch.Tensor], path: Ids, rows: range, timeout_s: float) -> Reached:
        """Copy blocks into slots, and write those."""
        path = path[: rows.stop * self.layout.block_tokens]
        with self._given_up_if_interrupted(run):
            for state, plane in zip(states, run.slots.flat, strict=True):
                plane[: len(rows)].copy_(_blocks(state, rows.start, len(rows), self.layout))
            self._settle()
            return run.attention.write(path, range(len(rows)), start_block=rows.start, timeout_s=timeout_s)

    def _settle(self) -> None:
        """Wait for the device: the executor's streams do not wait for the model's (rule 1)."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _blocks(state: torch.Tensor, start: int, count: int, layout: KVLayout) -> torch.Tensor:
    """Blocks of one plane as slots have them, [count, heads, block, dim]: a view of [1, heads, tokens, dim]."""
    size = layout.block_tokens
    rows = state[0, :, start * size : (start + count) * size]
    return rows.view(len(rows), count, size, rows.shape[2]).transpose(0, 1)


def _states(cache: Any) -> list[torch.Tensor]:
    """The tensors of a cache in the order of the layout's planes."""
    return [state for layer in cache.layers for state in (layer.keys, layer.values)]


def _said(reached: Reached, incomplete: str) -> str:
    """Why no more blocks came or went, in words."""
    said = incomplete if reached.why is Reason.INCOMPLETE else reached.why.value.replace("_", " ")
    return f"{said} ({reached.detail})" if reached.detail else said
