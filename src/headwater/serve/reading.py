"""From the bytes of a body to what is asked, in tokens: everything about it that takes time by its size.

Parsing JSON, running a chat template and making tokens hold up whoever does them. So the server reads small bodies in
a thread, where 64 KiB take some milliseconds, and large ones in another process (`readers.py`). Both call this.

Pure: bytes in, values out; ApiError for what cannot be answered. Loads no torch: the process that reads starts soon and
is small.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from headwater.disagg.prompt import Asking
from headwater.disagg.width import num_prompts
from headwater.engine.tokenizer import Tokenizer
from headwater.serve import errors
from headwater.serve.asked import MAX_SALT_CHARACTERS, Asked, Prompt, is_token, read_asked
from headwater.serve.body import Fields, parse
from headwater.serve.openai import Api, Chat, Completions
from headwater.serve.prompts import encode, require_room

APIS: Final[Mapping[str, Api]] = {api.endpoint: api for api in (Completions(), Chat())}

_MOST_LOOKED_UP: Final = 1 << 18  # tokens whose place a router asks for. Who sends more has to wait for a node anyway
_LONGEST_ROUTED: Final = 256  # characters of a field that a router looks at
# What a router looks at, besides prompts.
_ROUTED: Final = ("model", "stream", "n", "max_tokens", "max_completion_tokens")


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, with the prompts in tokens. It is held for as long as the answer takes, so it has nothing else."""

    asked: Asked  # without prompts
    prompts: list[list[int]]
    echoes: list[str] = field(default_factory=list)  # prompts as text, where they are to be sent back

    @property
    def num_answers(self) -> int:
        """Choices of all prompts."""
        return self.asked.num_choices * len(self.prompts)


@dataclass(frozen=True, slots=True)
class Envelope:
    """What a router asks of a node: a client's body, and perhaps a ticket."""

    endpoint: str
    question: Question
    ticket: object


class Reader:
    """Reads bodies for one model. Thread-safe."""

    def __init__(
        self, tokenizer: Tokenizer, *, model: str, max_tokens: int, max_chars: int, max_answers: int, vocab_size: int
    ) -> None:
        """`max_tokens` of a prompt and its answer; `max_chars` of a prompt are looked at; `max_answers` at once."""
        self._tokenizer = tokenizer
        self._model = model
        self._max_tokens = max_tokens
        self._max_chars = max_chars
        self._max_answers = max_answers
        self._vocab_size = vocab_size

    def question(self, endpoint: str, body: bytes | dict[str, object]) -> Question:
        """A client's body, as it came or as it lay in an envelope."""
        api = APIS[endpoint]
        fields = Fields(parse(body) if isinstance(body, bytes) else body)
        asked = read_asked(fields, endpoint, api.fields(fields))
        if asked.model not in (None, self._model):
            raise errors.unknown_model(asked.model or "", self._model)
        self._check(asked, api)
        prompts = []
        for prompt in asked.prompts:
            tokens = encode(
                self._tokenizer, api, prompt, add_special_tokens=asked.add_special_tokens, max_chars=self._max_chars
            )
            require_room(api, len(tokens), self._max_tokens)
            prompts.append(tokens)
        echoes = [self._echo(asked, *one) for one in zip(asked.prompts, prompts, strict=True)] if asked.echo else []
        return Question(replace(asked, prompts=()), prompts, echoes)

    def envelope(self, body: bytes) -> Envelope:
        """A router's."""
        fields = Fields(parse(body))
        endpoint = fields.text("endpoint") or ""
        if endpoint not in APIS:
            raise errors.invalid("endpoint", f"endpoint must be one of {', '.join(APIS)}")
        asked = fields.get("body")
        if not isinstance(asked, dict):
            raise errors.invalid("body", "body must be the client's, an object")
        return Envelope(endpoint, self.question(endpoint, asked), fields.get("ticket"))

    def _echo(self, asked: Asked, prompt: Prompt, tokens: list[int]) -> str:
        """A prompt as text."""
        if isinstance(prompt, str):
            return prompt
        return self._tokenizer.decode(tokens, skip_special_tokens=asked.skip_special_tokens)

    def _check(self, asked: Asked, api: Api) -> None:
        """Refuse what this server and this model can never do."""
        if asked.num_answers > self._max_answers:
            most = f"the {self._max_answers} that this server takes at once"
            message = f"{asked.num_answers} answers are more than {most}"
            raise errors.invalid("n" if asked.num_choices > 1 else api.prompt_param, message)
        for name, tokens in (("logit_bias", dict(asked.logit_bias).keys()), ("stop_token_ids", asked.stop_ids)):
            unknown = next((token for token in tokens if token >= self._vocab_size), None)
            if unknown is not None:
                message = f"{name} names the token {unknown}, and the vocabulary has {self._vocab_size}"
                raise errors.invalid(name, message)


class LargeBody(dict[str, object]):
    """What a router needs to know of a large body: the few fields that it looks at, and tokens if it has some."""

    asking: Asking | None = None


@dataclass(frozen=True, slots=True)
class Routable:
    """A client's body as a router passes it on: an object, and the same as JSON."""

    body: Mapping[str, object]
    content: bytes
    num_prompts: int = 1  # as far as that can be seen: nodes know it for certain


def routable(body: bytes) -> Routable:
    """A client's body, whole."""
    found = parse(body)
    try:
        content = json.dumps(found, allow_nan=False, separators=(",", ":")).encode()
    except (ValueError, RecursionError) as error:
        raise errors.invalid(None, "a number in the body is too large", code="invalid_json") from error
    return Routable(found, content, num_prompts(found))


def large_routable(body: bytes) -> Routable:
    """A client's body that is too large to be kept as an object. Its text is not made into tokens: a node will."""
    whole = routable(body)
    brief = LargeBody({name: value for name in _ROUTED if _is_brief(value := whole.body.get(name))})
    prompt, salt = whole.body.get("prompt"), whole.body.get("cache_salt")
    short = salt is None or (isinstance(salt, str) and len(salt) <= MAX_SALT_CHARACTERS)
    if short and isinstance(prompt, list) and len(prompt) <= _MOST_LOOKED_UP and all(map(is_token, prompt)):
        brief.asking = Asking(prompt, salt.encode(errors="replace") if isinstance(salt, str) else b"")
    return Routable(brief, whole.content, whole.num_prompts)


def _is_brief(value: object) -> bool:
    """Whether a router wants to know it; whatever else it is, a node will say what is wrong with it."""
    if isinstance(value, str):
        return len(value) <= _LONGEST_ROUTED
    return isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 1 << 63)
