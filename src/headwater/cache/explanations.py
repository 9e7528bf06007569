"""Explanations of the last requests, with their texts as tokens, and what only texts tell: why nobody had a block.

To the brain a block that nobody has is `never_stored`: it knows names, not texts. Here the texts of recent requests are
compared: perhaps the same text was stored under another salt or identity, or the text went another way at some token,
or it was computed at that very time. Texts are compared when somebody asks, and not before.

Not here: what of that may be told to whom (`serve/explain.py`), and the lock (`cache.py`).

Invariants: there are at most `MOST` explanations and `MOST_TEXT_BYTES` of tokens; who left longest ago is forgotten
first. A text is compared with texts of requests that asked before, as far as their blocks were known when they left.
"""

import enum
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from headwater.cache.records import Facts, Why
from headwater.cache.whys import Explanation
from headwater.core.identity import CacheIdentity, differences
from headwater.core.results import Reason

MOST: Final = 10_000
MOST_TEXT_BYTES: Final = 16 << 20
LEAST_SHARED: Final = 8  # tokens that two texts begin with; with fewer they have nothing to do with each other


class Text(NamedTuple):
    """What a request's blocks are of."""

    tokens: "array[int]"  # of prompt and answer
    num_prompt: int
    identity: CacheIdentity  # without a salt


class TextReason(enum.StrEnum):
    """Why a block that was never stored was not, where texts tell."""

    TEXT_DIFFERS = "text_differs"  # a stored text begins the same and goes on differently
    ANOTHER_SALT = "another_salt"  # the same text is stored under another salt
    ANOTHER_IDENTITY = "another_identity"  # and under another model, configuration, adapter ...
    BEING_COMPUTED = "being_computed"  # another request was computing it at that time


@dataclass(slots=True)
class Explained:
    """One request, and its text as long as there is room for it."""

    explanation: Explanation
    text: Text | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """What texts tell of a row of blocks that were never stored."""

    reason: Reason | TextReason
    nearest: str = ""  # the request whose text that is
    token: int = -1  # the first at which texts differ; -1: that is not the reason
    fields: Facts | None = None  # of the other identity, that differ


class Explanations:
    """The last requests, oldest first. Not for several threads."""

    def __init__(self, *, most: int = MOST, most_text_bytes: int = MOST_TEXT_BYTES) -> None:
        self._all: deque[Explained] = deque(maxlen=most)
        self._texts: deque[Explained] = deque()  # those that have theirs
        self._left_bytes = most_text_bytes

    def add(self, explanation: Explanation, text: Text | None) -> None:
        """A request left. Its text is not changed any more."""
        one = Explained(explanation, text)
        if len(self._all) == self._all.maxlen:
            self._forget(self._all[0])
        self._all.append(one)
        if text is None:
            return
        self._texts.append(one)
        self._left_bytes -= _num_bytes(text)
        while self._left_bytes < 0:
            self._forget(self._texts[0])

    def _forget(self, one: Explained) -> None:
        """The oldest text, if this has it."""
        if one.text is not None:
            self._left_bytes += _num_bytes(one.text)
            one.text = None
            self._texts.popleft()

    def forget_texts(self, tenant: bytes) -> None:
        """A tenant wants blocks gone: no text of its requests stays. What was said of them does."""
        for one in self._texts:
            if one.explanation.tenant == tenant and one.text is not None:
                self._left_bytes += _num_bytes(one.text)
                one.text = None
        self._texts = deque(one for one in self._texts if one.text is not None)

    def newest(self) -> list[Explained]:
        """All of them, newest first."""
        return list(reversed(self._all))


def compare(
    one: Explained, row: Why, others: Sequence[Explained], *, least_shared: int = LEAST_SHARED, salts: bool = True
) -> Compared:
    """What the texts of earlier requests say of blocks of one that were never stored, from the row's first on. Pure.

    `others`: newest first. Texts that share fewer tokens than `least_shared` are not called nearest. `salts`: whether
    texts of other salts are looked at.
    """
    nothing, mine = Compared(reason=Reason.NEVER_STORED), one.text  # which may be forgotten while this looks at it
    if mine is None or one.explanation.resumed:
        return nothing
    need = (row.start + 1) * mine.identity.block_tokens  # tokens that say which block it is
    salted = foreign = differs = None
    longest = max(least_shared, row.start * mine.identity.block_tokens) - 1
    for other, text, stored in _earlier(one, others):
        same_salt = other.tenant == one.explanation.tenant
        if not (same_salt or salts):
            continue
        num_same = _num_same(mine.tokens, text.tokens, stored)
        same_identity = text.identity.digest == mine.identity.digest
        if num_same >= need and same_identity and same_salt:
            computing = one.explanation.ready_s is not None and other.left_s >= one.explanation.ready_s
            reason = TextReason.BEING_COMPUTED if computing else Reason.EVICTED
            return Compared(reason=reason, nearest=other.request)
        if num_same >= need and same_identity and salted is None:
            salted = Compared(reason=TextReason.ANOTHER_SALT)
        elif num_same >= need and same_salt and foreign is None:
            found = differences(mine.identity.in_short(), text.identity.in_short())
            foreign = Compared(reason=TextReason.ANOTHER_IDENTITY, nearest=other.request, fields=found)
        elif same_identity and same_salt and longest < num_same < need:
            longest = num_same
            ends = num_same == stored  # this request only goes on where that one ended
            differs = None if ends else _differs(other, num_same)
    return salted or foreign or differs or nothing


def _differs(other: Explanation, token: int) -> Compared:
    return Compared(reason=TextReason.TEXT_DIFFERS, nearest=other.request, token=token)


def _earlier(one: Explained, others: Sequence[Explained]) -> Iterator[tuple[Explanation, Text, int]]:
    """Requests that asked before, their texts, and how many tokens of those were stored."""
    for other in others:
        explanation, text = other.explanation, other.text
        if other is one or text is None or explanation.asked_s > one.explanation.asked_s:
            continue
        stored = min(explanation.num_known * text.identity.block_tokens, len(text.tokens))
        if stored:
            yield explanation, text, stored


def _num_same(tokens: "array[int]", others: "array[int]", stored: int) -> int:
    """How many tokens two texts begin with, at most those that are stored of the second."""
    num = min(len(tokens), stored)
    if not num or tokens[0] != others[0]:
        return 0
    same = np.frombuffer(tokens, np.uint32, num) == np.frombuffer(others, np.uint32, num)
    at = int(same.argmin())
    return num if same[at] else at


def _num_bytes(text: Text) -> int:
    return len(text.tokens) * text.tokens.itemsize
