"""AttentionStore: a pool of KV blocks addressed by tokens. match / read / write / flush_index.

The caller gives all tokens from position 0 and says at which block to begin; keys, frames, slices and deadlines are
made here. Counts are from `start_block`: `match(tokens, start_block=8).num_blocks == 3` says that blocks 8, 9 and 10
are there, and nothing of those before. Full blocks only: a partial tail is its reader's own, and enters no shared index
(rule 9).

It joins rooms and decides nothing: names come from `core/`, bytes are moved by an executor (`transfer/executor/`) with
one store and no brain, and the cluster hears through a `MoveListener`. What `write` saw durable
and `read` saw verified is told as being in the store's tier, exactly that and no more; what is in the other tiers only
the engine knows, and says with `flush_index`.

Index-only: no data goes to the store or comes from it, and it is not even asked; `match`, `read` and `write` say so,
`flush_index` works. So an index can be kept true for a router where nobody has a pool.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final

from headwater.config.environment import write_config
from headwater.config.writes import WriteConfig
from headwater.core.breaker import MAX_PAUSE_S
from headwater.core.closing import Closing
from headwater.core.errors import InvalidConfig, InvalidInput, ResourceClosed
from headwater.core.events import MoveListener, Removed, Stored
from headwater.core.identity import CacheIdentity
from headwater.core.keys import BlockKey, Extra, Tokens, as_tokens, block_keys
from headwater.core.results import Reason
from headwater.layout.shard import WHOLE, Shard
from headwater.layout.spec import KVLayout
from headwater.metrics import Metrics
from headwater.residency.events import TIERS
from headwater.storage.base import SYSTEM_CLOCK, Clock, Store
from headwater.transfer.executor.caller import Caller
from headwater.transfer.executor.rows import Rows
from headwater.transfer.executor.sliced import Reached
from headwater.transfer.executor.staging import Staging
from headwater.transfer.executor.worker import Worker

_TIER: Final = "pool"  # what the store is called, in events and counters
_SHARE: Final = 4  # a slice takes at most one of so many parts of the pages: two are in use, and others come too
_THREADS: Final = 4  # that call the store, and as many more for those that hang
_INDEX_ONLY: Final = Reached(0, Reason.INDEX_ONLY, "no data is moved")


class AttentionStore(Closing):
    """One identity's blocks on one device (or on one rank of it), and a store. Several threads may use it at once.

    Owns neither store nor staging, but the executor that moves blocks between them: close it before them. The pages of
    `staging` must be its alone.
    """

    def __init__(
        self,
        store: Store | None,
        staging: Staging | None,
        *,
        identity: CacheIdentity,
        layout: KVLayout,
        shard: Shard = WHOLE,
        part: int = 0,
        residency: MoveListener | None = None,
        config: WriteConfig | None = None,
        index_only: bool = False,
        match_timeout_s: float = 1.0,
        breaker_failures: int = 3,
        breaker_pause_s: float = 1.0,
        breaker_max_pause_s: float = MAX_PAUSE_S,
        clock: Clock = SYSTEM_CLOCK,
        metrics: Metrics | None = None,
    ) -> None:
        """`layout`, `shard` and `part` are those of a page; `config` None: as the environment says, read now.

        After `breaker_failures` in a row the store is left alone for a while, and then asked by one call at a time.
        Index-only there is no store, and there has to be a residency. Raises InvalidConfig and InvalidInput.
        """
        if layout.block_tokens != identity.block_tokens:
            raise InvalidInput(f"the identity's blocks have {identity.block_tokens} tokens, not {layout.block_tokens}")
        if shard == WHOLE and not part and layout.fingerprint != identity.layout:
            raise InvalidInput("the layout is not the identity's")
        if index_only and residency is None:
            raise InvalidConfig("index-only moves no data: without a residency index there is nothing to do")
        if index_only and store is not None:
            raise InvalidConfig("index-only moves no data: leave the store out, or the mode")
        if not index_only and (store is None or staging is None):
            raise InvalidConfig("an attention store needs a store and staging, unless it is index-only")
        if not 0 < match_timeout_s < float("inf"):
            raise InvalidConfig(f"match_timeout_s must be a positive number of seconds, not {match_timeout_s!r}")
        self.index_only = index_only
        self.identity = identity
        self._residency = residency
        self._match_timeout_s = match_timeout_s
        self._closed = False
        self._worker: Worker | None = None
        self._rows: Rows | None = None
        config = config if config is not None else write_config()
        if store is None or staging is None:
            return
        self._worker = worker = Worker(
            {_TIER: store},
            staging,
            layout=layout,
            identity=identity.digest,
            block_tokens=layout.block_tokens,
            shard=shard,
            part=part,
            clock=clock,
            metrics=metrics,
            threads_per_store=_THREADS,
            max_extra_threads=_THREADS,
            slice_pages=max(1, staging.num_pages // _SHARE),
            overlaps=True,
        )
        caller = Caller(
            worker,
            [_TIER],
            identity=identity.digest,
            breaker_failures=breaker_failures,
            breaker_pause_s=breaker_pause_s,
            breaker_max_pause_s=breaker_max_pause_s,
            clock=clock,
            metrics=metrics,
        )
        worker.deliver = caller.deliver
        self._rows = Rows(caller, _TIER, config=config)

    @property
    def num_held_pages(self) -> int:
        """Staging pages in use, those included that calls which do not return keep."""
        return self._worker.num_held_pages if self._worker is not None else 0

    @property
    def lent_slots(self) -> frozenset[int]:
        """Slots that a copy which hangs may still write to or read, after a call that ended STUCK.

        They are not the caller's to use before they have left this set, which may be never; `read` and `write` refuse
        them (rule 2).
        """
        return self._rows.lent_slots() if self._rows is not None else frozenset()

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        return self.identity.block_tokens

    def match(
        self,
        tokens: Tokens,
        *,
        start_block: int = 0,
        extras: Iterable[Extra] = (),
        salt: bytes | None = None,
        timeout_s: float | None = None,
    ) -> Reached:
        """How many full blocks from `start_block` on seem to be there, without a gap: a hint, from one question.

        Blocks until `timeout_s` (`match_timeout_s`) at most. `salt`: a tenant's, the identity's own unless given.
        """
        self._require_open()
        if self._rows is None:
            return _INDEX_ONLY
        keys, _, _ = self._path(tokens, start_block, None, extras, salt)
        return self._rows.probe(keys[start_block:], timeout_s=self._match_timeout_s if timeout_s is None else timeout_s)

    def read(
        self,
        tokens: Tokens,
        slots: Sequence[int],
        *,
        start_block: int = 0,
        extras: Iterable[Extra] = (),
        salt: bytes | None = None,
        timeout_s: float | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Reached:
        """Read blocks `start_block`, `start_block` + 1, ... into `slots`, verified; stops at the first it cannot have.

        Blocks: see `Rows.read`. Raises InvalidInput where the tokens do not fill the blocks.
        """
        self._require_open()
        if self._rows is None:
            return _INDEX_ONLY
        keys, parent, _ = self._path(tokens, start_block, len(slots), extras, salt)
        row = keys[start_block:]
        reached = self._rows.read(row, slots, depth=start_block, timeout_s=timeout_s, stopped=stopped)
        self._tell_came(row[: reached.num_blocks], parent, start_block)
        return reached

    def write(
        self,
        tokens: Tokens,
        slots: Sequence[int],
        *,
        start_block: int = 0,
        extras: Iterable[Extra] = (),
        salt: bytes | None = None,
        timeout_s: float | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Reached:
        """Write blocks `start_block`, `start_block` + 1, ... from `slots`, in slices, and say how many are durable.

        Only positions that were really computed may be named (rule 1). Blocks: see `Rows.write`. Raises InvalidInput
        where the tokens do not fill the blocks.
        """
        self._require_open()
        if self._rows is None:
            return _INDEX_ONLY
        keys, parent, tenant = self._path(tokens, start_block, len(slots), extras, salt)
        row = keys[start_block:]
        reached = self._rows.write(
            row, slots, parent=parent, depth=start_block, tenant=tenant, timeout_s=timeout_s, stopped=stopped
        )
        self._tell_came(row[: reached.num_blocks], parent, start_block)
        return reached

    def flush_index(
        self,
        tokens: Tokens,
        *,
        tier: str,
        held: bool,
        start_block: int = 0,
        num_blocks: int | None = None,
        extras: Iterable[Extra] = (),
        salt: bytes | None = None,
    ) -> int:
        """Tell the cluster that blocks are in a tier of this node now, or (`held=False`) are not any more.

        `tokens` are the whole path from position 0, however deep the blocks lie; those before `start_block`, and those
        behind `num_blocks` (None: all full blocks), are not spoken of. Moves no data, does not block. Returns how many
        blocks were told. Raises InvalidInput, and InvalidConfig where nobody would hear it.
        """
        self._require_open()
        told: object = held
        if self._residency is None:
            raise InvalidConfig("there is no residency index to be told")
        if tier not in TIERS:
            raise InvalidInput(f"a tier is one of {', '.join(TIERS)}, not {tier!r}")
        if not isinstance(told, bool):
            raise InvalidInput(f"blocks are held, or they are not: {told!r} is neither")
        keys, parent, _ = self._path(tokens, start_block, num_blocks, extras, salt)
        row = tuple(keys[start_block:])
        if row:
            came = Stored(tier=tier, keys=row, parent=parent, depth=start_block)
            self._residency.offer([came if held else Removed(tier=tier, keys=row)])
        return len(row)

    def close(self, timeout_s: float = 10.0) -> bool:
        """End the threads; idempotent. False: a call or a copy has not returned: store and staging must stay."""
        self._closed = True
        return self._worker is None or self._worker.close(timeout_s)

    # ------------------------------------------------------------------------------------------------------------------

    def _path(
        self, tokens: Tokens, start: int, num_blocks: int | None, extras: Iterable[Extra], salt: bytes | None
    ) -> tuple[list[BlockKey], BlockKey, bytes]:
        """The keys from block 0 to the last that is asked about, what is before `start`, and the tenant."""
        for what, value in (("start_block", start), ("num_blocks", num_blocks)):
            if value is not None and (type(value) is not int or value < 0):
                raise InvalidInput(f"{what} must be a whole number of at least 0, not {value!r}")
        ids = as_tokens(tokens)
        num_full = len(ids) // self.block_tokens
        end = num_full if num_blocks is None else start + num_blocks
        if max(start, end) > num_full:
            raise InvalidInput(f"{len(ids)} tokens fill {num_full} blocks; block {max(start, end) - 1} is asked about")
        identity = self.identity if salt is None else replace(self.identity, salt=salt)
        keys = block_keys(
            ids[: end * self.block_tokens], parent=identity.root, block_tokens=self.block_tokens, extras=extras
        )
        return keys, keys[start - 1] if start else identity.root, identity.tenant

    def _tell_came(self, keys: Sequence[BlockKey], parent: BlockKey, depth: int) -> None:
        if keys and self._residency is not None:
            self._residency.offer([Stored(tier=_TIER, keys=tuple(keys), parent=parent, depth=depth)])

    def _require_open(self) -> None:
        if self._closed:
            raise ResourceClosed("the attention store is closed")
