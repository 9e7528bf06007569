"""`GET /admin/requests` and `/admin/requests/ID`: why requests hit or missed; what of it is told; and who asks for it.

What is known is in `cache/explanations.py`. It is put into a document when somebody asks, in a thread, and nothing of
this runs before. The asking side needs no server's packages.

Invariants:
- Nothing of another request's text is told, but that it is the same, or from where on it is not.
- At the level `blocks` nobody learns more than timing tells: blocks are compared whole, and with those of the same salt
  only. So nobody can guess another's prompt token by token. `tokens` and `text` are for servers whose clients may know
  each other's prompts; `text` also shows a request's own text around the place.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from headwater.cache.explanations import LEAST_SHARED, Explained, Text, TextReason, compare
from headwater.cache.records import Why
from headwater.config.serve import ExplainLevel
from headwater.core.errors import HeadwaterError
from headwater.core.events import NO_TENANT
from headwater.core.results import Reason
from headwater.disagg.headers import REQUESTS
from headwater.serve import errors
from headwater.serve.ask_server import ask_server
from headwater.serve.errors import ApiError
from headwater.storage.base import Deadline

if TYPE_CHECKING:
    from headwater.cache.cache import TieredCache

_MOST_LISTED: Final = 1000
_MOST_SHOWN: Final = 64  # of one id: choices, and what was preempted
_FOREIGN_S: Final = 2.0  # for local stores to be looked through
_AROUND: Final = 16  # tokens that are shown before and behind a place


class Explainer:
    """Makes documents of a cache's explanations. Its methods take a while, where many requests are known."""

    def __init__(
        self,
        cache: "TieredCache",
        *,
        block_tokens: int,
        level: ExplainLevel,
        decode: Callable[[Sequence[int]], str],
        find_foreign: Callable[[Text, int, Deadline], dict[str, Any] | None] = lambda text, start, deadline: None,
    ) -> None:
        """`find_foreign`: whether a block of a text is stored under another identity (`foreign.py`)."""
        self._cache = cache
        self._block_tokens = block_tokens
        self._level = level
        self._decode = decode
        self._find_foreign = find_foreign

    def listed(self, limit: str | None) -> dict[str, Any]:
        """The newest requests. Raises ApiError for a limit that is none."""
        try:
            number = 50 if limit is None else int(limit)
        except ValueError:
            number = 0
        if not 1 <= number <= _MOST_LISTED:
            raise errors.invalid("limit", f"limit is a number from 1 to {_MOST_LISTED}, not {errors.shown(limit)}")
        now_s, known = self._cache.explanations()
        return {"format": 1, "known": len(known), "requests": [_summary(one, now_s) for one in known[:number]]}

    def explained(self, name: str) -> dict[str, Any]:
        """Choices of an answer, or of the last answers with one `x-request-id`. Raises ApiError if there are none."""
        now_s, known = self._cache.explanations()
        found = [one for one in known if _is_called(one, name)][:_MOST_SHOWN]
        if not found:
            message = f"no request {errors.shown(name)} is among the last {len(known)} that are over"
            raise ApiError(404, message, code="not_found")
        until = Deadline.after(_FOREIGN_S)  # for all of them together
        return {"format": 1, "id": name, "requests": [self._document(one, known, now_s, until) for one in found]}

    def _document(self, one: Explained, known: Sequence[Explained], now_s: float, until: Deadline) -> dict[str, Any]:
        text = one.text
        return {
            **_summary(one, now_s),
            "block_tokens": self._block_tokens,
            "prompt_tokens": None if text is None else text.num_prompt,
            "rows": [self._row(one, row, known, now_s, until) for row in one.explanation.rows],
        }

    def _row(
        self, one: Explained, row: Why, known: Sequence[Explained], now_s: float, until: Deadline
    ) -> dict[str, Any]:
        size = self._block_tokens
        place = {"blocks": [row.start, row.end], "tokens": [row.start * size, row.end * size]}
        if row.reason is None:
            return {**place, "from": row.tier}
        facts: dict[str, Any] = dict(row.facts)
        if "evicted_s" in facts:
            facts["evicted_ago_s"] = round(now_s - facts.pop("evicted_s"), 3)
        if "for" in facts:
            facts["for"] = _called(facts["for"])
        why: Reason | TextReason = row.reason
        if why is Reason.NEVER_STORED:
            why, compared = self._compared(one, row, known, until)
            facts |= compared
        return {**place, "why": why.value, "counted_as": row.reason.value, "tier": row.tier or None, "facts": facts}

    def _compared(
        self, one: Explained, row: Why, known: Sequence[Explained], until: Deadline
    ) -> tuple[Reason | TextReason, dict[str, Any]]:
        text = one.text  # which may be forgotten meanwhile
        if text is None:
            return Reason.NEVER_STORED, {"text": "not known any more"}
        whole = self._level is ExplainLevel.BLOCKS
        least = self._block_tokens if whole else LEAST_SHARED
        found = compare(one, row, known, least_shared=least, salts=not whole)
        if found.reason in (Reason.NEVER_STORED, TextReason.TEXT_DIFFERS) and one.explanation.tenant == NO_TENANT:
            foreign = self._find_foreign(text, row.start, until)
            if foreign is not None:
                return TextReason.ANOTHER_IDENTITY, foreign
        facts: dict[str, Any] = {} if found.fields is None else {"differs_in": dict(found.fields)}
        if found.token >= 0 and not whole:
            facts["token"] = found.token
        if found.token >= 0 and self._level is ExplainLevel.TEXT:
            tokens, at = text.tokens, found.token
            facts["before"] = self._decode(tokens[max(0, at - _AROUND) : at])
            facts["after"] = self._decode(tokens[at : min(at + _AROUND, text.num_prompt)])
        if found.nearest and not whole:
            facts["nearest"] = _called(found.nearest)
        return found.reason, facts


def _summary(one: Explained, now_s: float) -> dict[str, Any]:
    told = one.explanation
    misses: dict[str, int] = {}
    for row in told.rows:
        if row.reason is not None:
            misses[row.reason.value] = misses.get(row.reason.value, 0) + row.end - row.start
    served = "resumed" if told.resumed else "served"
    return {
        "id": _called(told.request),
        "outcome": "left_early" if told.ready_s is None else served,
        "asked_ago_s": round(now_s - told.asked_s, 3),
        "blocks": told.num_blocks,
        "hit_blocks": sum(row.end - row.start for row in told.rows if row.reason is None),
        "misses": misses,
    }


def _called(request: str) -> str:
    """What a client calls a request of the engine, which may have been preempted."""
    return request.rpartition("#")[0] or request


def _is_called(one: Explained, name: str) -> bool:
    found = _called(one.explanation.request)
    return found == name or found.startswith(f"{name}/")


def ask_to_explain(url: str, request: str | None, *, key: str | None, timeout_s: float = 30.0) -> dict[str, Any]:
    """The document of a request, None: of the last one, of the server at a URL. Blocks. Raises HeadwaterError."""

    def ask(path: str) -> dict[str, Any]:
        found = ask_server(url, path, key=key, timeout_s=timeout_s)
        if not isinstance(found, dict) or found.get("format") != 1:
            raise HeadwaterError(f"what answers at {url} has no explanations that this version reads")
        return found

    if request is None:
        listed = ask(f"{REQUESTS}?limit=1")["requests"]
        if not listed:
            return {"format": 1, "id": "", "requests": []}
        request = listed[0]["id"]
    return ask(f"{REQUESTS}/{quote(request, safe='')}")
