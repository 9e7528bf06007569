"""OpenAI's two APIs in shapes: which bodies they read (`asked.py`), and answers as response bodies and stream chunks.

Pure values in and out; no sockets, no engine. Beyond OpenAI's shapes, answers have `usage.headwater`.
"""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from headwater.engine.request import Usage
from headwater.serve.asked import (
    Prompt,
    chat_fields,
    chat_prompts,
    completion_fields,
    completion_prompts,
)
from headwater.serve.body import Fields
from headwater.serve.logprobs import NameToken, chat_logprobs, completion_logprobs

if TYPE_CHECKING:  # loads torch, and who only reads bodies has no use for it
    from headwater.serve.transcript import Likelihood, TextPiece

Document: TypeAlias = dict[str, Any]


class Api(ABC):
    """One of the two. Stateless."""

    endpoint: ClassVar[str]
    prompt_param: ClassVar[str]
    id_prefix: ClassVar[str]
    whole: ClassVar[str]  # `object` of an answer, and
    part: ClassVar[str]  # of a chunk
    default_max_tokens: ClassVar[int | None]  # None: as many as there is room for

    # The fields of a body that this API says in its own way; its prompts alone, whatever else it says. Raise ApiError.
    fields: Callable[[Fields], dict[str, Any]]
    prompts: Callable[[Fields], tuple[Prompt, ...]]
    # Log-probabilities of tokens; None where there are none. The second argument says what a token is called.
    logprobs: Callable[[Sequence["Likelihood"], NameToken], Document | None]

    @abstractmethod
    def whole_choice(self, index: int, said: "Said", finish_reason: str | None) -> bytes:
        """A whole answer as one of a response's choices, as JSON."""

    @abstractmethod
    def delta(
        self, index: int, piece: "TextPiece", finish_reason: str | None, name: NameToken, *, first: bool
    ) -> Document:
        """More of an answer as a chunk's only choice."""


class Completions(Api):
    """`/v1/completions`: text or tokens in, text out."""

    endpoint = "/v1/completions"
    prompt_param = "prompt"
    id_prefix = "cmpl-"
    whole = part = "text_completion"
    default_max_tokens = 16
    fields = staticmethod(completion_fields)
    prompts = staticmethod(completion_prompts)
    logprobs = staticmethod(completion_logprobs)

    def whole_choice(self, index: int, said: "Said", finish_reason: str | None) -> bytes:
        """A whole answer."""
        form = b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b}'
        return form % (index, said.text, said.logprobs, dump(finish_reason))

    def delta(
        self, index: int, piece: "TextPiece", finish_reason: str | None, name: NameToken, *, first: bool
    ) -> Document:
        """The same as a whole one, with less in it."""
        logprobs = self.logprobs(piece.likelihoods, name)
        return {"index": index, "text": piece.text, "logprobs": logprobs, "finish_reason": finish_reason}


class Chat(Api):
    """`/v1/chat/completions`: messages in, the assistant's next one out."""

    endpoint = "/v1/chat/completions"
    prompt_param = "messages"
    id_prefix = "chatcmpl-"
    whole = "chat.completion"
    part = "chat.completion.chunk"
    default_max_tokens = None
    fields = staticmethod(chat_fields)
    prompts = staticmethod(chat_prompts)
    logprobs = staticmethod(chat_logprobs)

    def whole_choice(self, index: int, said: "Said", finish_reason: str | None) -> bytes:
        """A whole answer."""
        message = b'{"role":"assistant","content":%b,"refusal":null}' % said.text
        form = b'{"index":%d,"message":%b,"logprobs":%b,"finish_reason":%b}'
        return form % (index, message, said.logprobs, dump(finish_reason))

    def delta(
        self, index: int, piece: "TextPiece", finish_reason: str | None, name: NameToken, *, first: bool
    ) -> Document:
        """More of an answer; the first says whose it is."""
        delta: Document = {"role": "assistant"} if first else {}
        if first or piece:
            delta["content"] = piece.text
        logprobs = self.logprobs(piece.likelihoods, name)
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


class Said:
    """What a choice has said so far, as JSON that grows: pieces of a text are escaped one by one, lists are joined."""

    def __init__(self) -> None:
        self._text = bytearray()  # between its quotes
        self._lists: dict[str, bytearray] = {}  # of log-probabilities, between their brackets
        self._others: Document = {}  # fields that are no lists

    def add(self, text: str, logprobs: Document | None) -> int:
        """More of it; returns how many bytes that is."""
        more = dump(text)[1:-1]
        self._text += more
        num_bytes = len(more)
        for field, value in (logprobs or {}).items():
            if not isinstance(value, list):
                self._others[field] = value
                continue
            entries, joined = dump(value)[1:-1], self._lists.setdefault(field, bytearray())
            joined += b"," + entries if joined else entries
            num_bytes += len(entries) + 1
        return num_bytes

    @property
    def text(self) -> bytes:
        """All of it, with its quotes."""
        return b'"%b"' % bytes(self._text)

    @property
    def logprobs(self) -> bytes:
        """All of them, or null."""
        if not self._lists:
            return b"null"
        lists = [b"%b:[%b]" % (dump(field), bytes(joined)) for field, joined in self._lists.items()]
        others = [b"%b:%b" % (dump(field), dump(value)) for field, value in self._others.items()]
        return b"{%b}" % b",".join(lists + others)


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What all bodies of one answer begin with."""

    name: str
    model: str
    created: int
    fingerprint: str

    @staticmethod
    def of(name: str, model: str, fingerprint: str) -> "Head":
        """The head of an answer that begins now."""
        return Head(name=name, model=model, created=int(time.time()), fingerprint=fingerprint)

    def document(self, kind: str, choices: Sequence[Document], **more: Any) -> Document:
        """A body of this answer."""
        return {
            "id": self.name,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": list(choices),
            **more,
        }


def token_counts(num_prompt: int, num_tokens: int) -> Document:
    """How many tokens were read and said."""
    return {"prompt_tokens": num_prompt, "completion_tokens": num_tokens, "total_tokens": num_prompt + num_tokens}


def usage_document(
    usage: Usage,
    num_tokens: int,
    tiers: Sequence[str],
    phases: Mapping[str, float],
    paces: Mapping[str, tuple[float, float]],
    request: str,
) -> Document:
    """What an answer of `num_tokens` cost; `tiers` are those of the cache, the device first.

    `paces`: what a load from a tier takes to start, and each GiB, as the cache believes now. `request`: what
    `headwater explain` knows it by.
    """
    return {
        **token_counts(usage.prompt_tokens, num_tokens),
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "headwater": {
            "request": request,
            "cached_tokens": {tier: usage.cached_by_tier.get(tier, 0) for tier in tiers},
            "computed_tokens": usage.computed_tokens,
            "ttft_s": usage.ttft_s,
            "total_s": usage.total_s,
            "preemptions": usage.preemptions,
            "phases": dict(phases),
            "load_paces": {
                tier: {"start_s": _short(start_s), "gib_s": _short(gib_s)} for tier, (start_s, gib_s) in paces.items()
            },
        },
    }


def _short(seconds: float) -> float:
    return float(f"{seconds:.3g}")


def dump(value: object) -> bytes:
    """JSON without blanks."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
