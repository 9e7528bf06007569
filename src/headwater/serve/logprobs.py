"""Log-probabilities in the shapes of OpenAI's two APIs, and what tokens are called in them."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

if TYPE_CHECKING:  # loads torch, and who only reads bodies has no use for it
    from headwater.engine.tokenizer import Tokenizer
    from headwater.serve.transcript import Likelihood

Document: TypeAlias = dict[str, Any]
NameToken: TypeAlias = Callable[[int], str]  # what a token is called

_BY_NUMBER: Final = "token_id:"
_LEAST: Final = -9999.0  # JSON has no infinity
_MAX_NAMES: Final = 1 << 16


class TokenNames:
    """What the tokens of a vocabulary are called, remembered: a token of an answer asks for up to twenty-one names.

    `max_names` are kept. For one thread.
    """

    def __init__(self, tokenizer: "Tokenizer", max_names: int = _MAX_NAMES) -> None:
        self._tokenizer = tokenizer
        self._max_names = max_names
        self._names: dict[int, str] = {}

    def __call__(self, token: int) -> str:
        """A token's name."""
        found = self._names.get(token)
        if found is None:
            if len(self._names) >= self._max_names:
                self._names.clear()
            found = self._names[token] = token_name(self._tokenizer, token)
        return found


def token_name(tokenizer: "Tokenizer", token: int) -> str:
    """A token's text, or its number where its bytes alone are no text."""
    text = tokenizer.decode([token], skip_special_tokens=False)
    return text if text and "\ufffd" not in text else token_id(token)


def token_id(token: int) -> str:
    """A token's number."""
    return f"{_BY_NUMBER}{token}"


def completion_logprobs(likelihoods: Sequence["Likelihood"], name: NameToken) -> Document | None:
    """The older shape: lists side by side."""
    if not likelihoods:
        return None
    top = []
    for one in likelihoods:
        names: dict[str, float] = {}
        for token, logprob in (*one.told.top, (one.told.token, one.told.logprob)):
            names.setdefault(name(token), _finite(logprob))
        top.append(names)
    return {
        "tokens": [name(one.told.token) for one in likelihoods],
        "token_logprobs": [_finite(one.told.logprob) for one in likelihoods],
        "top_logprobs": top,
        "text_offset": [one.offset for one in likelihoods],
    }


def chat_logprobs(likelihoods: Sequence["Likelihood"], name: NameToken) -> Document | None:
    """The newer shape: one entry per token."""
    if not likelihoods:
        return None

    def entry(token: int, logprob: float) -> Document:
        text = name(token)
        known = None if text.startswith(_BY_NUMBER) else list(text.encode())
        return {"token": text, "logprob": _finite(logprob), "bytes": known}

    return {
        "content": [
            {
                **entry(one.told.token, one.told.logprob),
                "top_logprobs": [entry(token, logprob) for token, logprob in one.told.top],
            }
            for one in likelihoods
        ],
        "refusal": None,
    }


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LEAST
