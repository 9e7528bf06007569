"""What another engine's answer says of its prompt's pages, where somebody asked: for prefill and decode apart.

    kv_transfer_params {"headwater": "tell"} in a request
    -> {"headwater": {"identity", "layout", "block_tokens", "pages"}} in its answer

`pages` are the names of the pages of all full blocks of the prompt, on all ranks, in base64. They may still be on their
way to the stores: whoever hands the prompt on looks until the pool has them (`integrations/vllm/node.py`). Both ends of
it are here: the engine's connector says it, the node before the engine's server reads it. Pure.
"""

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from headwater.core.errors import InvalidInput
from headwater.core.identity import CacheIdentity
from headwater.core.keys import BlockKey
from headwater.core.page import NAME_BYTES, PageName, page_name

TOLD: Final = "headwater"
TELL: Final = {TOLD: "tell"}  # what asks for it


@dataclass(frozen=True, slots=True)
class ToldPages:
    """Whose pages, and which."""

    identity: str  # hex
    layout: str  # hex
    block_tokens: int
    pages: tuple[PageName, ...]


def is_asked(params: object) -> bool:
    """Whether a request wants to be told."""
    return isinstance(params, Mapping) and params.get(TOLD) == TELL[TOLD]


def say_pages(identity: CacheIdentity, ranks: Sequence[tuple[int, int]], keys: Sequence[BlockKey]) -> dict[str, Any]:
    """The answer's part, by the keys of the prompt's full blocks; `ranks`: the number of each, and of all."""
    names = [page_name(key, rank, world) for key in keys for rank, world in ranks]
    return {
        TOLD: {
            "identity": identity.digest.hex(),
            "layout": identity.layout.hex(),
            "block_tokens": identity.block_tokens,
            "pages": base64.b64encode(b"".join(names)).decode("ascii"),
        }
    }


def read_pages(params: object) -> ToldPages:
    """What an answer's `kv_transfer_params` say. Raises InvalidInput for anything else."""
    try:
        told = params[TOLD]  # type: ignore[index]  # whatever it is
        packed = base64.b64decode(told["pages"], validate=True)
        identity, layout, block_tokens = told["identity"], told["layout"], told["block_tokens"]
    except (KeyError, IndexError, TypeError, ValueError, binascii.Error) as error:
        raise InvalidInput("nothing is said of the prompt's pages") from error
    if not (isinstance(identity, str) and isinstance(layout, str) and type(block_tokens) is int):
        raise InvalidInput("what is said of the prompt's pages is of another format")
    if len(packed) % NAME_BYTES:
        raise InvalidInput(f"{len(packed)} bytes are no names of pages")
    names = tuple(PageName(packed[at : at + NAME_BYTES]) for at in range(0, len(packed), NAME_BYTES))
    return ToldPages(identity, layout, block_tokens, names)
