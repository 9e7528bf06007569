"""What a body asks about, in tokens: for the engine, and for whoever wants to know who holds such a prompt."""

from headwater.core.errors import InvalidInput
from headwater.engine.tokenizer import Tokenizer
from headwater.serve import errors
from headwater.serve.asked import Messages, Prompt
from headwater.serve.openai import Api


def encode(tokenizer: Tokenizer, api: Api, prompt: Prompt, *, add_special_tokens: bool) -> list[int]:
    """A prompt's tokens. A long text takes a while. Raises ApiError for messages that the chat template refuses."""
    if isinstance(prompt, str):
        return tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
    if isinstance(prompt, Messages):
        try:
            return tokenizer.encode_chat(
                prompt.messages,
                add_special_tokens=add_special_tokens,
                add_generation_prompt=prompt.add_generation_prompt,
                variables=prompt.variables,
            )
        except InvalidInput as error:
            raise errors.invalid(api.prompt_param, str(error)) from error
    return prompt
