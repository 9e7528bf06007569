"""An answer in one piece: its JSON is made while it comes, so that no part of the making takes long.

A token with twenty alternatives is a kilobyte of JSON, and an answer may have very many tokens: made at its end, all at
once, it would hold up everybody else for seconds. Made with each token it costs what a stream's events cost.

Invariant: an answer is no larger than its limit. It is given up when it grows beyond, not when it is complete.
"""

from collections.abc import Sequence
from typing import Any, Final

from headwater.serve import errors
from headwater.serve.answer import Choice
from headwater.serve.logprobs import NameToken
from headwater.serve.openai import Api, Head, Said, dump
from headwater.serve.transcript import TextPiece

MAX_ANSWER_BYTES: Final = 32 << 20  # less than a router holds (`max_answer_bytes`)


class WholeAnswer:
    """An answer that grows. For one thread."""

    def __init__(self, api: Api, head: Head, num_choices: int, *, max_bytes: int) -> None:
        self._api = api
        self._head = head
        self._said = [Said() for _ in range(num_choices)]
        self._left_bytes = max_bytes
        self._max_bytes = max_bytes

    def add(self, index: int, piece: TextPiece, name: NameToken) -> None:
        """More of a choice; `name` says what a token is called. Raises ApiError if that is too much."""
        told = self._api.logprobs(piece.likelihoods, name)
        self._left_bytes -= self._said[index].add(piece.text, told)
        if self._left_bytes < 0:
            raise errors.answer_too_large(self._max_bytes)

    def body(self, choices: Sequence[Choice], usage: dict[str, Any] | None) -> bytes:
        """All of it, when every choice has ended."""
        head = dump(self._head.document(self._api.whole, [])).removesuffix(b"]}")  # where the choices go
        parts = [
            self._api.whole_choice(one.index, said, one.finish_reason)
            for one, said in zip(choices, self._said, strict=True)
        ]
        return b"%b%b],%b:%b}" % (head, b",".join(parts), dump("usage"), dump(usage))
