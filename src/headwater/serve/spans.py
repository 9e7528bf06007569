"""What a request's span says, in the words of OpenTelemetry's conventions for GenAI where they have one."""

from typing import Final

from headwater.serve.answer import Answer, Choice
from headwater.serve.asked import Asked
from headwater.serve.phases import phases_of
from headwater.tracing.spans import Attributes, Span

_OPERATIONS: Final = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}
#: Parts of a request (`phases.py`), as spans are called, in the order in which they follow each other.
_PARTS: Final = {
    "queue_s": "queue",
    "pool_read_s": "import",
    "prefill_s": "prefill",
    "pool_write_s": "export",
    "decode_s": "decode",
}


def operation(path: str) -> str:
    """What a path does; the path itself, where the conventions have no word."""
    return _OPERATIONS.get(path, path)


def of_question(endpoint: str, asked: Asked, model: str) -> Attributes:
    """What a client asked for. Nothing of what it wrote."""
    said = {
        "gen_ai.request.max_tokens": asked.max_tokens,
        "gen_ai.request.temperature": asked.temperature,
        "gen_ai.request.top_p": asked.top_p,
        "gen_ai.request.top_k": asked.top_k,
        "gen_ai.request.seed": asked.seed,
    }
    return {
        "gen_ai.operation.name": operation(endpoint),
        "gen_ai.provider.name": "headwater",
        "gen_ai.request.model": model,
        "gen_ai.request.choice.count": asked.num_choices,
        "headwater.stream": asked.stream,
        **{name: value for name, value in said.items() if value is not None},
    }


def tell_answer(span: Span, answer: Answer, model: str) -> None:
    """What came of it: tokens, where the prompt came from, and each choice's parts as spans below."""
    usage = answer.usage
    reasons = [choice.finish_reason for choice in answer.choices if choice.finish_reason is not None]
    if reasons:
        span.tell({"gen_ai.response.finish_reasons": reasons})
    if usage is not None:
        span.tell(
            {
                "gen_ai.response.model": model,
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
                "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
                "headwater.computed_tokens": usage.computed_tokens,
                "headwater.preemptions": usage.preemptions,
                **{f"headwater.cached_tokens.{tier}": tokens for tier, tokens in usage.cached_by_tier.items()},
            }
        )
    for choice in answer.choices:
        _tell_parts(span, choice, len(answer.choices))


def _tell_parts(span: Span, choice: Choice, number: int) -> None:
    if choice.usage is None:
        return
    at_s = choice.request.arrived_s
    found = phases_of(choice.usage, choice.handoff)
    more: Attributes = {"headwater.choice": choice.index} if number > 1 else {}
    for part, name in _PARTS.items():
        if part in found:
            below = span.child(name, at_s=at_s, attributes=more)
            at_s += found[part]
            below.end(at_s)
