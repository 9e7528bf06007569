"""How many prompts a client's body has and how many answers it wants: what it takes of a node's slots.

Pure, and quick: a look at two fields, for whoever passes a body on. Where something is wrong with them a node will say
so; until then it counts as one.
"""

from collections.abc import Mapping
from typing import Final

_MOST: Final = 1 << 31  # beyond which it makes no difference, and numbers only get long


def num_prompts(body: Mapping[str, object]) -> int:
    """How many prompts there are."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return len(prompt)
    return 1


def num_choices(body: Mapping[str, object]) -> int:
    """How many answers each of them is to get."""
    number = body.get("n")
    return min(number, _MOST) if type(number) is int and number > 0 else 1
