"""Tokens of one answer as text: what is certain of it is given out, what may begin a stop string waits.

Invariants: what was given out never changes; what follows a stop string is never given out, nor the string itself
unless asked for; a token's log-probability comes with the text in which the token begins, and not at all if a stop
string cut that.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from headwater.engine.request import TokenLogprob
from headwater.engine.tokenizer import Detokenizer


@dataclass(frozen=True, slots=True)
class Likelihood:
    """A token's log-probability, and where in the answer its text begins."""

    told: TokenLogprob
    offset: int


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text that is certain, with the log-probabilities of the tokens that begin in it, if wanted."""

    text: str = ""
    likelihoods: tuple[Likelihood, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.text or self.likelihoods)


class Transcript:
    """The text of an answer as it grows, up to the first stop string."""

    def __init__(
        self, detokenizer: Detokenizer, stops: Sequence[str] = (), *, include_stop: bool = False, min_tokens: int = 0
    ) -> None:
        """`include_stop`: the stop string is part of the text. In the first `min_tokens` tokens none is looked for."""
        self.stopped = False  # by a stop string: nothing more will come
        self.num_tokens = 0  # up to the one that ended the answer
        self._detokenizer = detokenizer
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._num_given = 0  # characters
        self._free = ""  # text that no stop string can be in, and
        self._held = ""  # behind it the beginning of a stop string, perhaps
        self._waiting: list[Likelihood] = []  # of tokens that begin in either or behind it

    def push(self, tokens: Sequence[int], told: Sequence[TokenLogprob] = ()) -> TextPiece:
        """Add tokens; return what is certain now. After a stop string there is nothing."""
        for i, token in enumerate(tokens):
            if self.stopped:
                break
            offset = self._num_given + len(self._free) + len(self._held)
            if i < len(told):
                self._waiting.append(Likelihood(told[i], offset))
            text = self._detokenizer.push(token)
            self.num_tokens += 1
            if self.num_tokens <= self._min_tokens:
                self._free += text
            else:
                self._held += text
                self._look()
        return self._give(len(self._held) if self.stopped else len(self._held) - self._num_suspicious())

    def finish(self) -> TextPiece:
        """The rest, when no more tokens come."""
        if not self.stopped:
            self._held += self._detokenizer.finish()
            self._look()
        return self._give(len(self._held), last=not self.stopped)

    def _look(self) -> None:
        """Cut at the first stop string, or behind it."""
        found = [(at, len(stop)) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            at, length = min(found)
            self.stopped = True
            self._held = self._held[: at + length if self._include_stop else at]

    def _num_suspicious(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0

    def _give(self, length: int, *, last: bool = False) -> TextPiece:
        text, self._free, self._held = self._free + self._held[:length], "", self._held[length:]
        self._num_given += len(text)
        ready = [one for one in self._waiting if last or one.offset < self._num_given]
        self._waiting = self._waiting[len(ready) :]
        return TextPiece(text, tuple(ready))
