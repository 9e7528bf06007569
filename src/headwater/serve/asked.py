"""What a body asks for: every field of OpenAI's two APIs and of vLLM's is honoured, known to be harmless, or refused.

Pure values in and out. A field is read and checked; or it asks for nothing that would change an answer (`user`); or it
is refused with its name, because the answer would not be what it asks for. That goes for names that nobody knows too,
so a typing error is an error, and nothing is ever ignored in silence.

Null is absent. What depends on the model (lengths, token ids, unsaid temperatures) is not decided here.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from headwater.engine.request import MAX_LOGPROBS, MAX_REPETITION_PENALTY, SaidOfTurn
from headwater.engine.tokenizer import is_given
from headwater.serve.body import Fields, as_text
from headwater.serve.errors import invalid, shown, unsupported
from headwater.serve.hints import hints_of

MAX_CHOICES: Final = 128
MAX_PROMPTS: Final = 2048
MAX_STOPS: Final = 16
MAX_STOP_CHARACTERS: Final = 256
MAX_STOP_IDS: Final = 256
MAX_BIASES: Final = 1024
MAX_SALT_CHARACTERS: Final = 1024
MAX_TEMPLATE_BYTES: Final = 8 << 10  # of what a chat template hears besides messages

_MAX_TOKENS: Final = 1 << 31
_ROLES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

# A field that would change the answer, the values that ask for nothing, and what to do instead.
_Refusal: TypeAlias = tuple[str, tuple[object, ...], str]

_FORM: Final = "the form of an answer cannot be forced"
_TOOLS: Final = "models cannot call tools here"
_REFUSED: Final[tuple[_Refusal, ...]] = (
    ("response_format", ({"type": "text"},), f"{_FORM}; only text"),
    *((name, (), _FORM) for name in ("structured_outputs", "structural_tag", "guided_json", "guided_regex")),
    *((name, (), _FORM) for name in ("guided_choice", "guided_grammar", "guided_decoding_backend")),
    ("guided_whitespace_pattern", (), _FORM),
    ("use_beam_search", (False,), "answers are drawn token by token"),
    ("length_penalty", (1, 1.0), "it is for beam search"),
    ("allowed_token_ids", (), "use logit_bias"),
    ("bad_words", ([],), "use logit_bias"),
    ("logits_processors", ([],), "no code of a client is run"),
    ("prompt_logprobs", (), "only tokens of the answer have log-probabilities"),
    ("truncate_prompt_tokens", (), "prompts are taken whole"),
    ("return_token_ids", (False,), "token ids are told with logprobs and return_tokens_as_token_ids"),
    ("spaces_between_special_tokens", (True,), "special tokens stand as the tokenizer has them"),
    ("mm_processor_kwargs", ({},), "only text"),
    ("priority", (0,), "all requests are equal"),
    ("request_id", (), "send the header x-request-id"),
    ("kv_transfer_params", (), "the cache decides that"),
    ("vllm_xargs", ({},), "leave it out"),
    ("store", (False,), "no answer is kept"),
    ("service_tier", ("auto", "default"), "there is one tier of service"),
    ("moderation", (), "nothing is moderated"),
)
_COMPLETION_REFUSED: Final[tuple[_Refusal, ...]] = (("suffix", ("",), "leave it out"),)
_CHAT_REFUSED: Final[tuple[_Refusal, ...]] = (
    ("tools", ([],), _TOOLS),
    ("tool_choice", ("none", "auto"), _TOOLS),
    ("parallel_tool_calls", (True, False), _TOOLS),
    ("functions", ([],), _TOOLS),
    ("function_call", ("none", "auto"), _TOOLS),
    ("modalities", (["text"],), "only text"),
    ("audio", (), "only text"),
    ("prediction", (), "leave it out"),
    ("web_search_options", (), "leave it out"),
    ("reasoning_effort", ("none",), "models are not told how long to think; see chat_template_kwargs"),
    ("include_reasoning", (True,), "what a model says is not taken apart"),
    ("verbosity", ("medium",), "models are not told how much to say"),
    ("echo", (False,), "messages are not sent back"),
    ("chat_template", (), "the model's own is used"),
    ("documents", ([],), "put them into a message"),
    ("continue_final_message", (False,), "an answer is a message of its own; send the text to /v1/completions"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """A conversation: each message a role and a text; and what the model's template hears besides."""

    messages: list[dict[str, str]]
    add_generation_prompt: bool = True
    variables: Mapping[str, object] = field(default_factory=dict)


Prompt: TypeAlias = str | list[int] | Messages  # text, tokens, or a conversation


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A body that makes sense. None: it was not said, and what is done then is the model's or the server's affair."""

    model: str | None
    prompts: tuple[Prompt, ...]  # at least one; none once they are tokens
    num_choices: int  # for each of them
    add_special_tokens: bool  # to text
    max_tokens: int | None
    min_tokens: int
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float
    frequency_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    seed: int | None
    stops: tuple[str, ...]
    include_stop: bool
    stop_ids: frozenset[int]
    logprobs: int | None
    tokens_as_ids: bool  # what log-probabilities call tokens
    ignore_eos: bool
    skip_special_tokens: bool
    echo: bool
    salt: bytes
    said: SaidOfTurn  # hints to the cache
    stream: bool
    include_usage: bool
    continuous_usage: bool

    @property
    def num_answers(self) -> int:
        """Choices of all prompts."""
        return self.num_choices * len(self.prompts)


def completion_fields(body: Fields) -> dict[str, Any]:
    """Those of `Asked` that a completion's body says in its own way. Raises ApiError."""
    for name, harmless, message in _COMPLETION_REFUSED:
        body.refuse(name, harmless, message)
    logprobs = body.integer("logprobs", 0, MAX_LOGPROBS)
    echo = body.flag("echo")
    if echo and logprobs is not None:
        raise unsupported("echo", "echo is not supported together with logprobs: a prompt's tokens have none here")
    return {
        "prompts": completion_prompts(body),
        "add_special_tokens": body.flag("add_special_tokens", default=True),
        "max_tokens": body.integer("max_tokens", 1, _MAX_TOKENS),
        "logprobs": logprobs,
        "echo": echo,
    }


def chat_fields(body: Fields) -> dict[str, Any]:
    """The same for a chat's."""
    for name, harmless, message in _CHAT_REFUSED:
        body.refuse(name, harmless, message)
    num_top = body.integer("top_logprobs", 0, MAX_LOGPROBS)
    wanted = body.flag("logprobs")
    if num_top and not wanted:
        raise invalid("top_logprobs", "top_logprobs needs logprobs to be true")
    max_tokens = body.integer("max_completion_tokens", 1, _MAX_TOKENS)
    older = body.integer("max_tokens", 1, _MAX_TOKENS)  # its name before; checked all the same
    return {
        "prompts": chat_prompts(body),
        "add_special_tokens": body.flag("add_special_tokens"),
        "max_tokens": max_tokens if max_tokens is not None else older,
        "logprobs": (num_top or 0) if wanted else None,
        "echo": False,
    }


def read_asked(body: Fields, endpoint: str, own: Mapping[str, Any]) -> Asked:
    """What a body asks for, with the fields that are its API's `own`. Raises ApiError, which names what is wrong."""
    for name, harmless, message in _REFUSED:
        body.refuse(name, harmless, message)
    for name in ("user", "safety_identifier"):  # hints that change no answer
        body.text(name)
    body.inner("metadata")
    stream, options = body.flag("stream"), body.inner("stream_options")
    if not stream and body.get("stream_options") is not None:
        raise invalid("stream_options", "stream_options needs stream to be true")
    options.refuse("include_obfuscation", (False,), "events are not padded")
    include_usage, continuous = options.flag("include_usage"), options.flag("continuous_usage_stats")
    if continuous and not include_usage:
        where = "stream_options.continuous_usage_stats"
        raise invalid(where, f"{where} needs stream_options.include_usage to be true")
    top_p, repetition = body.number("top_p", 0, 1), body.number("repetition_penalty", 0, MAX_REPETITION_PENALTY)
    if top_p == 0:
        raise invalid("top_p", "top_p must be above 0; for the most likely tokens send temperature 0")
    if repetition == 0:
        raise invalid("repetition_penalty", "repetition_penalty must be above 0; 1 is none")
    num_choices, top_k = body.integer("n", 1, MAX_CHOICES) or 1, body.integer("top_k", -1, 1 << 31)
    best_of = body.integer("best_of", 1, MAX_CHOICES)
    if best_of not in (None, num_choices):
        raise unsupported("best_of", f"best_of must be n ({num_choices}) or left out: every answer is sent")
    asked = Asked(
        model=body.text("model"),
        num_choices=num_choices,
        min_tokens=body.integer("min_tokens", 0, _MAX_TOKENS) or 0,
        temperature=body.number("temperature", 0, 2),
        top_p=top_p,
        top_k=None if top_k is None else max(0, top_k),
        min_p=body.number("min_p", 0, 1),
        repetition_penalty=repetition,
        presence_penalty=body.number("presence_penalty", -2, 2) or 0.0,
        frequency_penalty=body.number("frequency_penalty", -2, 2) or 0.0,
        logit_bias=_logit_bias(body),
        seed=body.integer("seed", -(1 << 63), (1 << 63) - 1),
        stops=_stops(body),
        include_stop=body.flag("include_stop_str_in_output"),
        stop_ids=_stop_ids(body),
        tokens_as_ids=body.flag("return_tokens_as_token_ids"),
        ignore_eos=body.flag("ignore_eos"),
        skip_special_tokens=body.flag("skip_special_tokens", default=True),
        salt=salt_of(body),
        said=hints_of(body),
        stream=stream,
        include_usage=include_usage,
        continuous_usage=continuous,
        **own,
    )
    options.refuse_rest("stream_options")
    body.refuse_rest(endpoint)
    return asked


# --- fields -----------------------------------------------------------------------------------------------------------


def salt_of(body: Fields) -> bytes:
    """Whose blocks a request shares."""
    salt = body.text("cache_salt")
    if salt is not None and not 1 <= len(salt) <= MAX_SALT_CHARACTERS:  # an empty one would share with everybody
        raise invalid("cache_salt", f"cache_salt has 1 to {MAX_SALT_CHARACTERS} characters, not {len(salt)}")
    return b"" if salt is None else salt.encode()


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


def _stop_ids(body: Fields) -> frozenset[int]:
    value = body.get("stop_token_ids")
    given = [] if value is None else value
    if not isinstance(given, list) or len(given) > MAX_STOP_IDS or not all(is_token(one) for one in given):
        raise invalid("stop_token_ids", f"stop_token_ids must be a list of up to {MAX_STOP_IDS} token ids")
    return frozenset(given)


def _logit_bias(body: Fields) -> tuple[tuple[int, float], ...]:
    value = body.get("logit_bias")
    given = {} if value is None else value
    if not isinstance(given, dict) or len(given) > MAX_BIASES:
        raise invalid("logit_bias", f"logit_bias must be an object of up to {MAX_BIASES} token ids and their biases")
    found = {}
    for token, bias in given.items():
        if not (token.isascii() and token.isdecimal() and len(token) < 20):
            raise invalid("logit_bias", f"logit_bias must have token ids for names, not {shown(token)}")
        if not (isinstance(bias, int | float) and not isinstance(bias, bool) and -100 <= bias <= 100):
            raise invalid("logit_bias", f"a bias in logit_bias must be a number from -100 to 100, not {shown(bias)}")
        found[int(token)] = float(bias)
    return tuple(found.items())


def is_token(value: object) -> bool:
    """Whether it may be a token's id."""
    return type(value) is int and 0 <= value < 1 << 63


# --- prompts ----------------------------------------------------------------------------------------------------------


def completion_prompts(body: Fields) -> tuple[Prompt, ...]:
    """A text, a list of token ids, or a list of one of them."""
    value = body.get("prompt")
    several = value if isinstance(value, list) and value and not isinstance(value[0], int) else [value]
    if len(several) > MAX_PROMPTS:
        raise invalid("prompt", f"prompt may be up to {MAX_PROMPTS} prompts, not {len(several)}")
    return tuple(_prompt(one) for one in several)


def _prompt(value: object) -> Prompt:
    if isinstance(value, str):
        return as_text(value, "prompt")
    if isinstance(value, list) and value and all(type(token) is int for token in value):
        return value
    raise invalid("prompt", "prompt must be text, a list of token ids, or a list of several of these, not empty")


def chat_prompts(body: Fields) -> tuple[Prompt, ...]:
    """A conversation."""
    value = body.get("messages")
    if not isinstance(value, list) or not value:
        raise invalid("messages", "messages must be a list of at least one message")
    variables = body.get("chat_template_kwargs")
    if not isinstance(variables, dict | None):
        raise invalid("chat_template_kwargs", f"chat_template_kwargs must be an object, not {shown(variables)}")
    if taken := sorted(filter(is_given, variables or {})):
        raise invalid(
            "chat_template_kwargs",
            f"chat_template_kwargs cannot say {', '.join(one[:80] for one in taken[:3])}: a field of its own does, or "
            "the model",
        )
    if variables and not _is_small(variables):
        raise invalid(
            "chat_template_kwargs", f"chat_template_kwargs may have {MAX_TEMPLATE_BYTES} bytes of JSON, and has more"
        )
    return (
        Messages(
            messages=[_message(message, f"messages[{i}]") for i, message in enumerate(value)],
            add_generation_prompt=body.flag("add_generation_prompt", default=True),
            variables=variables or {},
        ),
    )


def _is_small(variables: Mapping[str, object]) -> bool:
    try:
        return len(json.dumps(variables)) <= MAX_TEMPLATE_BYTES
    except RecursionError:  # it could be parsed just so
        return False


def _message(value: object, where: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise invalid(where, f"{where} must be an object, not {shown(value)}")
    message = Fields(value, where)
    for name, harmless in (("tool_calls", ([],)), ("tool_call_id", ()), ("function_call", ())):
        message.refuse(name, harmless, _TOOLS)
    for name in ("refusal", "audio", "annotations"):  # as answers of others have them
        message.refuse(name, ([], ""), "leave it out")
    role = message.text("role")
    if role not in _ROLES:
        raise invalid(f"{where}.role", f"{where}.role must be one of {', '.join(_ROLES)}, not {shown(role)}")
    found = {"role": _ROLES[role], "content": _content(message.get("content"), f"{where}.content")}
    for name in ("name", "reasoning_content"):  # for templates that know them
        text = message.text(name)
        if text is not None:
            found[name] = text
    message.refuse_rest("a message")
    return found


def _content(content: object, where: str) -> str:
    if isinstance(content, list):
        return "".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))
    return as_text(content, where)


def _part(value: object, where: str) -> str:
    if not isinstance(value, dict):
        raise invalid(where, f"{where} must be an object, not {shown(value)}")
    part = Fields(value, where)
    if part.get("type") != "text":
        raise unsupported(f"{where}.type", f"{where}.type must be 'text', not {shown(value.get('type'))}")
    text = as_text(part.get("text"), f"{where}.text")
    part.refuse_rest("a part of a message")
    return text
