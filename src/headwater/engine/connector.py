"""The only engine module that knows the cache: asks it, takes slots, commits what was computed, gives everything back.

What is loaded and what is computed is the cache's decision, by what was measured: this module measures what computing
costs (`measured`) and tells. A load that fails or is late has become tokens to compute by the time `loaded` says yes.
One whose copy hangs is `stuck`: its request begins anew in other slots, and computes.

A request starts when its blocks are there, or, where nobody else has work (`coming`), as soon as its first layer is:
`wait_layer` holds each layer up until its bytes are on the device and verified, and `arrived` says at the end whether
all of them came. If not, the step was for nothing, and is thrown away (rule 1).

Where loading is slow, the cache loads from the end of what it has while the request computes from the front (`meets`).
Then `reach` says before each step how far that may go, and moves the request on over what has come meanwhile.
"""

import time
from array import array
from collections import deque
from dataclasses import replace
from typing import Final

import numpy as np

from headwater.cache.cache import TieredCache
from headwater.cache.explanations import Text
from headwater.cache.match import Match
from headwater.core.events import Finished, session_of
from headwater.core.identity import CacheIdentity
from headwater.core.keys import BlockKey, block_keys
from headwater.engine.request import Request, RequestPhase, Taking
from headwater.index.base import Hint

_FORGET: Final = 0.9  # of what earlier steps said, at each new one
_FEW_TOKENS: Final = 8  # a step of so few costs what every step costs, however few tokens it has
_MANY_TOKENS: Final = 64  # a step of fewer says little of what a token costs
_NUM_SMALL: Final = 32  # such steps that are remembered
_LEAST_S: Final = 1e-9  # nothing, but not "unknown"
_NUM_SALTS: Final = 1024
_LOAD_S: Final = 60.0  # longer than any load's own deadline: that one ends the waiting


class Connector:
    """One engine's cache. Called from the engine's thread."""

    def __init__(
        self, cache: TieredCache, identity: CacheIdentity, *, probe_s: float = 0.1, meets: bool = True
    ) -> None:
        """`probe_s`: how long a request at the head of the queue waits for stores to say what they have.

        `meets`: whether requests may compute while what lies behind is loaded.
        """
        self.cache = cache
        self._meets = meets
        self.block_tokens: Final = identity.block_tokens
        self._identity = identity
        self._probe_s = probe_s
        self._named: dict[bytes, tuple[BlockKey, bytes]] = {}  # by salt: root and tenant
        self._small_s: deque[float] = deque(maxlen=_NUM_SMALL)
        # Weighted sums over steps of t = a x tokens + b x (tokens x context): a least-squares fit in two unknowns.
        self._sums = np.zeros(7)  # over steps of many tokens: x, y, xx, xy, yy, xt, yt of tokens, contexts, seconds

    def ask(self, request: Request, now_s: float) -> None:
        """Ask what is there of a request's tokens, or ask again."""
        self._match(request, now_s)

    def may_start(self, request: Request, now_s: float) -> bool:
        """Whether the stores have said what they have, or have taken too long, or nothing is to be loaded."""
        settled = self._match(request, now_s).settled
        return settled or request.computes_all or now_s - request.asked_s >= self._probe_s

    def _match(self, request: Request, now_s: float) -> Match:
        self._extend_keys(request, len(request.tokens) // self.block_tokens)
        if not request.asked_s:
            request.asked_s = now_s
        root, tenant = self._names(request.salt)
        said = request.said
        return self.cache.match(
            self._name(request),
            request.keys,
            root=root,
            tenant=tenant,
            resumed=request.preemptions > 0,
            hint=Hint(session_of(said.session, tenant), said.keep_s, said.last),
        )

    def _names(self, salt: bytes) -> tuple[BlockKey, bytes]:
        """Root and tenant of a salt: digests, made once."""
        found = self._named.get(salt)
        if found is None:
            if len(self._named) >= _NUM_SALTS:
                self._named.clear()
            identity = replace(self._identity, salt=salt)
            found = self._named[salt] = identity.root, identity.tenant
        return found

    def admit(self, request: Request, *, promised: str = "") -> bool:
        """Take slots for all tokens and the next one, and begin to load. False: there is no room now.

        `promised`: a tier that is known to have all blocks of the prompt.
        """
        num_blocks = self._num_blocks(len(request.tokens) + 1)
        load = not request.computes_all
        meet = self._meets and not isinstance(request.handoff, Taking)  # what does not come is fetched into its slots
        slots = self.cache.reserve(self._name(request), num_blocks, load=load, promised=promised, meet=meet)
        if slots is None:
            return False
        request.slots = slots
        request.phase = RequestPhase.LOADING
        if request.admitted_s is None:
            request.admitted_s = time.monotonic()
        return True

    def loaded(self, request: Request) -> bool:
        """Whether nothing is being loaded any more; then the request's computed tokens are what is there."""
        progress = self.cache.poll(self._name(request))
        if progress.loading:
            return False
        self._set_computed(request, progress.num_ready)
        request.meets = progress.meeting
        return True

    def reach(self, request: Request, num_tokens: int) -> int:
        """Up to which token the next step of a request that `meets` may go, if it has so many; and that is claimed.

        Before that, the request moves on over what was loaded. Not beyond its computed tokens: it stands before what is
        on its way. Does not block.
        """
        progress = self.cache.poll(self._name(request))
        if progress.loading:  # for a brain that has failed since: it will begin anew
            return request.num_computed
        if progress.num_ready > request.num_committed:  # it came to what had been loaded
            self._set_computed(request, progress.num_ready)
        end = min(len(request.tokens), request.num_computed + num_tokens)
        if progress.meeting:
            progress = self.cache.claim(self._name(request), self._num_blocks(end))
            end = min(end, progress.num_claimed * self.block_tokens)
        request.meets = progress.meeting
        return end

    def stuck(self, request: Request) -> bool:
        """Whether what is being loaded may never come, nor its slots be usable: the request has to begin anew."""
        return self.cache.poll(self._name(request)).stuck

    def num_ready(self, request: Request) -> int | None:
        """Leading blocks that are on the device; None as long as some are being loaded."""
        progress = self.cache.poll(self._name(request))
        return None if progress.loading else progress.num_ready

    def taken(self, request: Request, num_tokens: int) -> None:
        """The first tokens of a request came from elsewhere, verified, into its slots: name the blocks they fill."""
        request.num_committed = self.cache.poll(self._name(request)).num_ready
        request.num_computed = num_tokens
        request.whole = False
        self.commit(request)

    def saving(self, request: Request, tier: str) -> bool:
        """Whether blocks of a request are on their way to a tier. Does not block."""
        return self.cache.saving(self._name(request), tier)

    def _set_computed(self, request: Request, num_blocks: int) -> None:
        ready = num_blocks * self.block_tokens
        request.num_committed = num_blocks
        request.whole = ready >= len(request.tokens)
        request.num_computed = min(ready, len(request.tokens) - 1)

    def coming(self, request: Request) -> bool:
        """Whether a request that loads may begin: the first layer of all its blocks is there.

        Then its computed tokens are what will be there, if all goes well.
        """
        name = self._name(request)
        if self.cache.poll(name).meeting or not self.cache.wait_layer(name, 0, 0.0):
            return False
        self._set_computed(request, self.cache.poll(name).num_expected)
        return True

    def wait_layer(self, request: Request, layer: int) -> bool:
        """Wait for a layer of what is being loaded. Blocks, as long as a load may take. False: it will not come."""
        return self.cache.wait_layer(self._name(request), layer, _LOAD_S)

    def arrived(self, request: Request) -> bool:
        """Wait until nothing is being loaded any more; whether all came that was coming. Blocks, as `wait_layer`.

        If not, the request's computed tokens are what is there.
        """
        expected = request.num_computed, request.whole
        self.cache.wait(self._name(request), _LOAD_S)
        return self.loaded(request) and (request.num_computed, request.whole) == expected

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Slots for so many tokens. False: there is no room now."""
        num_blocks = self._num_blocks(num_tokens)
        if num_blocks <= len(request.slots):
            return True
        slots = self.cache.reserve(self._name(request), num_blocks)
        if slots is None:
            return False
        request.slots = slots
        return True

    def commit(self, request: Request) -> None:
        """Name the blocks that are full of computed tokens (rule 1: a sampled token has no KV yet)."""
        num_full = request.num_computed // self.block_tokens
        if num_full <= request.num_committed:
            return
        self._extend_keys(request, num_full)
        self.cache.commit(self._name(request), request.keys[request.num_committed : num_full])
        request.num_committed = num_full

    def release(self, request: Request) -> Finished | None:
        """Give everything back; finished blocks stay known."""
        if not request.asked_s:  # preempted, and not asked for again since: it holds nothing
            return None
        text = Text(array("I", request.tokens), len(request.prompt), self._identity)
        bill = self.cache.release(self._name(request), text)
        if bill is not None and not request.preemptions:  # coming back to one's own blocks is no hit
            request.cached_by_tier = dict(bill.hit_tokens)
        request.slots = ()
        request.meets = False
        request.asked_s = 0.0
        request.num_committed = request.num_computed = 0
        return bill

    def lend(self, request: Request) -> str:
        """A copy that hangs may still touch a request's slots: it leaves without them. Returns whose they are now.

        To the cache they are a request's until `give_back`, so nobody else gets them (rule 2).
        """
        name = self._name(request)
        request.slots = ()
        request.asked_s = 0.0
        request.num_committed = request.num_computed = 0
        return name

    def give_back(self, name: str) -> None:
        """What was lent is touched no more."""
        self.cache.release(name)

    def throttle_saves(self, *, on: bool) -> None:
        """The engine is in a hurry, or not any more: what the cache writes can be written a little later."""
        self.cache.throttle_saves(on=on)

    def measured(self, num_tokens: int, token_contexts: int, seconds: float) -> None:
        """A step computed so many tokens; `token_contexts`: the sum over them of tokens before each.

        What a step costs however few tokens it has is left out of what a token costs: loading does not save it, because
        a request with a hit needs a step too.
        """
        fixed_s = self._fixed_s()
        if num_tokens <= _FEW_TOKENS:
            self._small_s.append(seconds)
        if num_tokens >= _MANY_TOKENS:
            x, y, t = float(num_tokens), float(token_contexts), seconds
            self._sums = _FORGET * self._sums + np.array([x, y, x * x, x * y, y * y, x * t, y * t])
        elif self._fixed_s() == fixed_s or not self._sums.any():
            return  # nothing new
        fixed_s = self._fixed_s()
        x, y, xx, xy, yy, xt, yt = self._sums.tolist()
        xt, yt = max(_LEAST_S * x, xt - fixed_s * x), max(0.0, yt - fixed_s * y)
        det = xx * yy - xy * xy
        per_token_s, per_context_s = xt / xx, 0.0
        if det > 1e-9 * xx * yy:
            a, b = (xt * yy - yt * xy) / det, (yt * xx - xt * xy) / det
            if a > 0 and b >= 0:
                per_token_s, per_context_s = a, b
        size = self.block_tokens
        self.cache.pace(per_token_s * size, per_context_s * size * size)

    def _fixed_s(self) -> float:
        """What a step costs however few tokens it has: the upper quartile of what was seen.

        Small steps vary by half, and whatever a token seems to cost is an argument for loading: so rather too much.
        """
        ordered = sorted(self._small_s)
        return ordered[3 * len(ordered) // 4] if ordered else 0.0

    def _extend_keys(self, request: Request, num_blocks: int) -> None:
        done = len(request.keys)
        if done >= num_blocks:
            return
        size = self.block_tokens
        root, _ = self._names(request.salt)
        request.keys += block_keys(
            request.tokens[done * size : num_blocks * size],
            parent=request.keys[-1] if done else root,
            block_tokens=size,
            start=done * size,
        )

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)

    @staticmethod
    def _name(request: Request) -> str:
        return f"{request.name}#{request.preemptions}"
