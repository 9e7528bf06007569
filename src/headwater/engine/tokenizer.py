"""Text to tokens and back: tokenizer.json through `tokenizers`, special tokens and chat templates as transformers does.

A *stream* turns an answer into text while it grows: it holds back what the next token may still change (part of a
character), and what it has given out never changes. Joined, its pieces are the decoded answer.

Not here: limits on prompts, OpenAI's shapes. Chat templates come with the model and are run in jinja2's sandbox:
whatever one raises is its word against the messages (InvalidInput), and no fault of ours.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NoReturn

from headwater.core.errors import InvalidInput, NotInstalled

try:
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.parser
    import jinja2.sandbox
    import tokenizers
except ModuleNotFoundError as error:
    raise NotInstalled(f"reading a tokenizer needs {error.name}: pip install 'headwater[engine]'") from error

TOKENIZER: Final = "tokenizer.json"
CONFIG: Final = "tokenizer_config.json"
TEMPLATE: Final = "chat_template.jinja"

_GIVEN: Final = frozenset(("messages", "tools", "add_generation_prompt"))  # what every template hears, from us alone
_SPECIAL: Final = "_token"  # bos_token, eos_token ...: how the names of a model's special tokens end

_UNFINISHED: Final = "\ufffd"  # what decoders write for bytes that are no character, or none yet
_HELD: Final = 3  # bytes of a character that may still be completed
_LONGEST: Final = 32  # tokens that are looked at together; no character needs as many
_LONGEST_WORD: Final = 500  # characters of what a template says against messages; it may hold all of them
# What expressions of a template can come to, whose functions are Python's: "".index("x"), 1 / 0, a macro without end.
_RAISED: Final = (
    jinja2.TemplateError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


def is_given(name: str) -> bool:
    """Whether a template's variable is ours to say, or the model's, and nobody else's."""
    return name in _GIVEN or name.endswith(_SPECIAL)


class Tokenizer:
    """A model's tokenizer. Thread-safe."""

    def __init__(
        self, backend: tokenizers.Tokenizer, *, special: Mapping[str, str], templates: Mapping[str, str]
    ) -> None:
        self._backend = backend
        self._special = dict(special)  # bos_token, eos_token ... as text
        self._templates = {name: _environment().from_string(source) for name, source in templates.items()}
        self.vocab_size: Final[int] = backend.get_vocab_size()
        self.bos_id: Final = self._id("bos_token")
        eos = self._id("eos_token")
        self.eos_ids: Final[frozenset[int]] = frozenset() if eos is None else frozenset((eos,))

    @classmethod
    def load(cls, directory: Path) -> "Tokenizer":
        """Read a model directory; InvalidInput for files that are missing or damaged."""
        path = directory / TOKENIZER
        if not path.is_file():
            raise InvalidInput(f"{path} is missing")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises nothing more precise
            raise InvalidInput(f"{path} is not a tokenizer: {error}") from error
        config = _config(directory / CONFIG)
        special = {name: _content(value) for name, value in config.items() if name.endswith(_SPECIAL)}
        try:
            return cls(
                backend,
                special={name: text for name, text in special.items() if text is not None},
                templates=_read_templates(directory, config),
            )
        except (jinja2.TemplateError, RecursionError) as error:
            raise InvalidInput(f"the chat template of {directory} is no template: {error}") from error

    @property
    def has_chat_template(self) -> bool:
        """Whether messages can be turned into a prompt."""
        return bool(self._templates)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokens of a text, with what the tokenizer puts around it (such as the first token), or without.

        Other threads run meanwhile: of the package's calls, only those on several texts let go of the interpreter.
        """
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token: no token stands for more of a text."""
        return max(map(len, self._backend.get_vocab()), default=1)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of tokens; bytes that are no characters become U+FFFD, tokens that nobody knows nothing."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def stream(self, *, skip_special_tokens: bool = True) -> "Detokenizer":
        """An empty answer that will grow."""
        return Detokenizer(self, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        template: str = "default",
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt of a conversation, as text with special tokens in it; InvalidInput if the template refuses.

        `variables` are what this model's template knows besides, such as `enable_thinking`.
        """
        if template not in self._templates:
            raise InvalidInput(f"this model has no chat template{'' if not self._templates else f' {template!r}'}")
        more = variables or {}
        if taken := sorted(filter(is_given, more)):
            raise InvalidInput(f"a chat template's {', '.join(taken)} cannot be given as variables")
        try:
            return self._templates[template].render(
                {
                    **self._special,
                    **more,
                    "messages": [dict(message) for message in messages],
                    "tools": tools,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except _RAISED as error:
            said = str(error) or type(error).__name__
            said = said if len(said) <= _LONGEST_WORD else said[:_LONGEST_WORD] + " ..."
            raise InvalidInput(f"the chat template refuses these messages: {said}") from error

    def _id(self, name: str) -> int | None:
        text = self._special.get(name)
        return None if text is None else self._backend.token_to_id(text)


class Detokenizer:
    """The text of an answer that grows. For one thread."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []  # what is decoded together: tokens already shown, for context, and newer ones
        self._context = 0  # how many of them are only context
        self._shown = 0  # characters of their text that were given out

    def push(self, *ids: int) -> str:
        """Add tokens; return the text that is certain now."""
        self._ids += ids
        text = self._text()
        held = min(len(text) - len(text.rstrip(_UNFINISHED)), _HELD)
        if held and len(self._ids) - self._context <= _LONGEST:
            ready = text[self._shown : len(text) - held]
            self._shown += len(ready)
            return ready
        ready = text[self._shown :]
        self._ids = self._ids[self._context :]  # the tokens just finished are the next ones' context
        self._context = len(self._ids)
        self._shown = len(self._text())
        return ready

    def finish(self) -> str:
        """The rest: what was held back stays unfinished. The stream is empty again."""
        rest = self._text()[self._shown :]
        self._ids, self._context, self._shown = [], 0, 0
        return rest

    def _text(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=self._skip)


def _config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise InvalidInput(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise InvalidInput(f"{path} must hold an object, not {type(found).__name__}")
    return found


def _content(token: object) -> str | None:
    """A special token is text, or an object with its text in `content`."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _read_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name: a file of its own comes first, then the tokenizer's config, one or a list of them."""
    path = directory / TEMPLATE
    if path.is_file():
        return {"default": path.read_text(encoding="utf-8")}
    found = config.get("chat_template")
    if found is None:
        return {}
    if isinstance(found, str):
        return {"default": found}
    try:
        return {str(one["name"]): str(one["template"]) for one in found}
    except (TypeError, KeyError) as error:
        raise InvalidInput(f"{directory / CONFIG}: chat_template is neither text nor a list of named ones") from error


class Generation(jinja2.ext.Extension):
    """`{% generation %}` around what an assistant said: a mark for training. Rendered as if it was not there."""

    tags = {"generation"}  # noqa: RUF012  as jinja2 declares it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """The block, called like a macro: what is set inside is not seen outside, as in transformers."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_rendered"), [], [], body).set_lineno(line)

    def _rendered(self, caller: Callable[[], str]) -> str:
        return caller()


def _environment() -> jinja2.Environment:
    """What templates may use: the same names and whitespace rules as in transformers."""

    def to_json(value: object, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent, **options)

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
