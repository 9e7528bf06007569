"""OpenAI's two APIs: bodies to what is asked of the engine, answers to response bodies and stream chunks.

Pure values in and out; no sockets, no engine. A field is one of three: it is read and checked; it is refused, because
the answer would not be what it asks for; or it is ignored, because nobody here knows it.

Beyond OpenAI's fields, bodies may have `cache_salt` (text: only requests with the same salt share cached blocks) and
`ignore_eos`; answers have `usage.headwater`.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeAlias

from headwater.engine.request import MAX_LOGPROBS, Usage
from headwater.serve.body import Fields, as_text
from headwater.serve.errors import invalid, shown, unsupported
from headwater.serve.logprobs import NameToken, chat_logprobs, completion_logprobs

if TYPE_CHECKING:  # loads torch, and who only reads bodies has no use for it
    from headwater.serve.answer import Piece

Document: TypeAlias = dict[str, Any]

MAX_STOPS: Final = 16
MAX_STOP_CHARACTERS: Final = 256
MAX_SALT_CHARACTERS: Final = 1024

_ROLES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

# A field that would change the answer, the values that ask for nothing, and what to do instead.
_Refusal: TypeAlias = tuple[str, tuple[object, ...], str]
_SHARED_REFUSALS: Final[tuple[_Refusal, ...]] = (
    ("n", (1,), "one answer per request; send several requests, they share the prompt's cache"),
    ("logit_bias", ({},), "leave it out"),
    ("presence_penalty", (0, 0.0), "leave it out or send 0"),
    ("frequency_penalty", (0, 0.0), "leave it out or send 0"),
)
_COMPLETION_REFUSALS: Final[tuple[_Refusal, ...]] = (
    ("best_of", (1,), "one answer is computed; leave it out or send 1"),
    ("echo", (False,), "the prompt is not sent back"),
    ("suffix", ("",), "leave it out"),
)
_CHAT_REFUSALS: Final[tuple[_Refusal, ...]] = (
    ("tools", ([],), "models cannot call tools here"),
    ("tool_choice", ("none", "auto"), "models cannot call tools here"),
    ("functions", ([],), "models cannot call functions here"),
    ("function_call", ("none", "auto"), "models cannot call functions here"),
    ("response_format", ({"type": "text"},), "only text"),
    ("modalities", (["text"],), "only text"),
    ("audio", (), "only text"),
    ("prediction", (), "leave it out"),
    ("web_search_options", (), "leave it out"),
    ("reasoning_effort", ("none",), "leave it out"),
)


@dataclass(frozen=True, slots=True)
class Messages:
    """A conversation: each message a role and a text."""

    messages: list[dict[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A body that makes sense. What depends on the model (lengths, token ids) is not checked yet."""

    model: str | None
    prompt: str | list[int] | Messages  # text, tokens, or a conversation
    max_tokens: int | None
    temperature: float
    top_p: float
    seed: int | None
    stops: tuple[str, ...]
    logprobs: int | None
    ignore_eos: bool
    salt: bytes
    stream: bool
    include_usage: bool


class Api(ABC):
    """One of the two. Stateless."""

    endpoint: ClassVar[str]
    prompt_param: ClassVar[str]
    id_prefix: ClassVar[str]
    whole: ClassVar[str]  # `object` of an answer, and
    part: ClassVar[str]  # of a chunk
    default_max_tokens: ClassVar[int | None]  # None: as many as there is room for

    @abstractmethod
    def read(self, body: Fields) -> Asked:
        """Check a body; ApiError says which field is wrong."""

    @abstractmethod
    def choice(self, piece: "Piece", finish_reason: str | None, name: NameToken) -> Document:
        """A whole answer as a response's only choice. `name` says what a token is called."""

    @abstractmethod
    def delta(self, piece: "Piece", finish_reason: str | None, name: NameToken, *, first: bool) -> Document:
        """More of an answer as a chunk's only choice."""

    def _read(self, body: Fields, **own: Any) -> Asked:
        for field, harmless, message in _SHARED_REFUSALS:
            body.refuse(field, harmless, message)
        stream = body.flag("stream")
        if not stream and body.get("stream_options") is not None:
            raise invalid("stream_options", "stream_options needs stream to be true")
        top_p = body.number("top_p", 0, 1, 1.0)
        if top_p == 0:
            raise invalid("top_p", "top_p must be above 0; for the most likely tokens send temperature 0")
        return Asked(
            model=body.text("model"),
            temperature=body.number("temperature", 0, 2, 1.0),
            top_p=top_p,
            seed=body.integer("seed", -(1 << 63), (1 << 63) - 1),
            stops=_stops(body),
            ignore_eos=body.flag("ignore_eos"),
            salt=_salt(body),
            stream=stream,
            include_usage=body.inner("stream_options").flag("include_usage"),
            **own,
        )


class Completions(Api):
    """`/v1/completions`: text or tokens in, text out."""

    endpoint = "/v1/completions"
    prompt_param = "prompt"
    id_prefix = "cmpl-"
    whole = part = "text_completion"
    default_max_tokens = 16

    def read(self, body: Fields) -> Asked:
        """Check a body; ApiError says which field is wrong."""
        for field, harmless, message in _COMPLETION_REFUSALS:
            body.refuse(field, harmless, message)
        return self._read(
            body,
            prompt=_prompt(body.get("prompt")),
            max_tokens=body.integer("max_tokens", 1, 1 << 31),
            logprobs=body.integer("logprobs", 0, MAX_LOGPROBS),
        )

    def choice(self, piece: "Piece", finish_reason: str | None, name: NameToken) -> Document:
        """A whole answer."""
        logprobs = completion_logprobs(piece.likelihoods, name)
        return {"index": 0, "text": piece.text, "logprobs": logprobs, "finish_reason": finish_reason}

    def delta(self, piece: "Piece", finish_reason: str | None, name: NameToken, *, first: bool) -> Document:
        """The same as a whole one, with less in it."""
        return self.choice(piece, finish_reason, name)


class Chat(Api):
    """`/v1/chat/completions`: messages in, the assistant's next one out."""

    endpoint = "/v1/chat/completions"
    prompt_param = "messages"
    id_prefix = "chatcmpl-"
    whole = "chat.completion"
    part = "chat.completion.chunk"
    default_max_tokens = None

    def read(self, body: Fields) -> Asked:
        """Check a body; ApiError says which field is wrong."""
        for field, harmless, message in _CHAT_REFUSALS:
            body.refuse(field, harmless, message)
        num_top = body.integer("top_logprobs", 0, MAX_LOGPROBS)
        wanted = body.flag("logprobs")
        if num_top is not None and not wanted:
            raise invalid("top_logprobs", "top_logprobs needs logprobs to be true")
        max_tokens = body.integer("max_completion_tokens", 1, 1 << 31)
        older = body.integer("max_tokens", 1, 1 << 31)  # its name before; checked all the same
        return self._read(
            body,
            prompt=_messages(body.get("messages")),
            max_tokens=max_tokens if max_tokens is not None else older,
            logprobs=(num_top or 0) if wanted else None,
        )

    def choice(self, piece: "Piece", finish_reason: str | None, name: NameToken) -> Document:
        """A whole answer."""
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return {"index": 0, "message": message, **self._rest(piece, finish_reason, name)}

    def delta(self, piece: "Piece", finish_reason: str | None, name: NameToken, *, first: bool) -> Document:
        """More of an answer; the first says whose it is."""
        delta: Document = {"role": "assistant"} if first else {}
        if first or piece:
            delta["content"] = piece.text
        return {"index": 0, "delta": delta, **self._rest(piece, finish_reason, name)}

    @staticmethod
    def _rest(piece: "Piece", finish_reason: str | None, name: NameToken) -> Document:
        return {"logprobs": chat_logprobs(piece.likelihoods, name), "finish_reason": finish_reason}


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


def usage_document(usage: Usage, num_tokens: int, tiers: Sequence[str], phases: Mapping[str, float]) -> Document:
    """What an answer of `num_tokens` cost; `tiers` are those of the cache, the device first."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": usage.prompt_tokens + num_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "headwater": {
            "cached_tokens": {tier: usage.cached_by_tier.get(tier, 0) for tier in tiers},
            "computed_tokens": usage.computed_tokens,
            "ttft_s": usage.ttft_s,
            "total_s": usage.total_s,
            "preemptions": usage.preemptions,
            "phases": dict(phases),
        },
    }


# --- bodies -----------------------------------------------------------------------------------------------------------


def _stops(body: Fields) -> tuple[str, ...]:
    value = body.get("stop")
    given = [] if value is None else value if isinstance(value, list) else [value]
    if len(given) > MAX_STOPS:
        raise invalid("stop", f"stop may be up to {MAX_STOPS} texts, not {len(given)}")
    stops = tuple(as_text(stop, "stop") for stop in given)
    for stop in stops:
        if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            raise invalid("stop", f"each text in stop has 1 to {MAX_STOP_CHARACTERS} characters, not {len(stop)}")
    return stops


def _salt(body: Fields) -> bytes:
    salt = body.text("cache_salt")
    if salt is not None and not 1 <= len(salt) <= MAX_SALT_CHARACTERS:  # an empty one would share with everybody
        raise invalid("cache_salt", f"cache_salt has 1 to {MAX_SALT_CHARACTERS} characters, not {len(salt)}")
    return b"" if salt is None else salt.encode()


def _prompt(value: object) -> str | list[int]:
    if isinstance(value, list) and value and not isinstance(value[0], int):
        if len(value) > 1:
            raise unsupported("prompt", f"prompt must be one prompt, not {len(value)}: send several requests")
        value = value[0]
    if isinstance(value, str):
        return as_text(value, "prompt")
    if isinstance(value, list) and value and all(type(token) is int for token in value):
        return value
    raise invalid("prompt", "prompt must be text or a list of token ids, not empty")


def _messages(value: object) -> Messages:
    if not isinstance(value, list) or not value:
        raise invalid("messages", "messages must be a list of at least one message")
    return Messages([_message(message, f"messages[{i}]") for i, message in enumerate(value)])


def _message(value: object, where: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise invalid(where, f"{where} must be an object, not {shown(value)}")
    message = Fields(value, where)
    message.refuse("tool_calls", ([],), "models cannot call tools here")
    role = message.text("role")
    if role not in _ROLES:
        raise invalid(f"{where}.role", f"{where}.role must be one of {', '.join(_ROLES)}, not {shown(role)}")
    content = message.get("content")
    if isinstance(content, list):
        parts = [_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
        return {"role": _ROLES[role], "content": "".join(parts)}
    return {"role": _ROLES[role], "content": as_text(content, f"{where}.content")}


def _part(value: object, where: str) -> str:
    if not isinstance(value, dict):
        raise invalid(where, f"{where} must be an object, not {shown(value)}")
    if value.get("type") != "text":
        raise unsupported(f"{where}.type", f"{where}.type must be 'text', not {shown(value.get('type'))}")
    return as_text(value.get("text"), f"{where}.text")
