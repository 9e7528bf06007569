"""What a body asks about, in tokens: for the engine, and for whoever wants to know who holds such a prompt."""

from headwater.core.errors import InvalidInput
from headwater.engine.tokenizer import Tokenizer
from headwater.serve import errors
from headwater.serve.openai import Api, Asked, Messages


def encode(tokenizer: Tokenizer, api: Api, asked: Asked, *, max_chars: int | None = None) -> list[int]:
    """The prompt's tokens. A long text takes a while; one of more than `max_chars` is not looked at.

    Raises ApiError for that, and for messages that the chat template refuses.
    """
    if isinstance(asked.prompt, str):
        _require_chars(api, len(asked.prompt), max_chars)
        return tokenizer.encode(asked.prompt)
    if isinstance(asked.prompt, Messages):
        _require_chars(api, sum(len(one["content"]) for one in asked.prompt.messages), max_chars)
        try:
            text = tokenizer.apply_chat_template(asked.prompt.messages)
        except InvalidInput as error:
            raise errors.invalid(api.prompt_param, str(error)) from error
        _require_chars(api, len(text), max_chars)
        return tokenizer.encode(text, add_special_tokens=False)
    return asked.prompt


def require_room(api: Api, num_tokens: int, limit: int) -> None:
    """Raise ApiError for a prompt that leaves no room for an answer."""
    if num_tokens >= limit:
        message = f"the prompt has {num_tokens} tokens, and with its answer may have {limit}"
        raise errors.too_long(api.prompt_param, message)


def _require_chars(api: Api, number: int, limit: int | None) -> None:
    if limit is not None and number > limit:
        raise errors.too_long(api.prompt_param, f"the prompt has {number} characters, and may have {limit}")
