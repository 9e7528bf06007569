"""What a body asks about, in tokens: for the engine, and for whoever wants to know who holds such a prompt."""

from headwater.core.errors import InvalidInput
from headwater.engine.tokenizer import Tokenizer
from headwater.serve import errors
from headwater.serve.openai import Api, Asked, Messages


def encode(tokenizer: Tokenizer, api: Api, asked: Asked) -> list[int]:
    """The prompt's tokens. A long text takes a while. Raises ApiError for messages that the chat template refuses."""
    if isinstance(asked.prompt, str):
        return tokenizer.encode(asked.prompt)
    if isinstance(asked.prompt, Messages):
        try:
            return tokenizer.encode_chat(asked.prompt.messages)
        except InvalidInput as error:
            raise errors.invalid(api.prompt_param, str(error)) from error
    return asked.prompt
