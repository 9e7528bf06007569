"""What a body asks about, in tokens: for the engine, and for whoever wants to know who holds such a prompt."""

from headwater.core.errors import InvalidInput
from headwater.engine.tokenizer import Tokenizer
from headwater.serve import errors
from headwater.serve.asked import Messages, Prompt
from headwater.serve.openai import Api


def encode(
    tokenizer: Tokenizer, api: Api, prompt: Prompt, *, add_special_tokens: bool, max_chars: int | None = None
) -> list[int]:
    """A prompt's tokens. A long text takes a while; one of more than `max_chars` is not looked at.

    Raises ApiError for that, and for messages that the chat template refuses.
    """
    if isinstance(prompt, str):
        _require_chars(api, len(prompt), max_chars)
        return tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
    if isinstance(prompt, Messages):
        _require_chars(api, sum(len(text) for one in prompt.messages for text in one.values()), max_chars)
        try:
            text = tokenizer.apply_chat_template(
                prompt.messages, add_generation_prompt=prompt.add_generation_prompt, variables=prompt.variables
            )
        except InvalidInput as error:
            raise errors.invalid(api.prompt_param, str(error)) from error
        _require_chars(api, len(text), max_chars)
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return prompt


def require_room(api: Api, num_tokens: int, limit: int) -> None:
    """Raise ApiError for a prompt that leaves no room for an answer."""
    if num_tokens >= limit:
        message = f"the prompt has {num_tokens} tokens, and with its answer may have {limit}"
        raise errors.too_long(api.prompt_param, message)


def _require_chars(api: Api, number: int, limit: int | None) -> None:
    if limit is not None and number > limit:
        raise errors.too_long(api.prompt_param, f"the prompt has {number} characters, and may have {limit}")
