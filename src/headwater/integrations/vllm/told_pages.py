"""What a request's answer says of its prompt's pages, where somebody asked: for prefill and decode apart.

    kv_transfer_params {"headwater": "tell"} in a request -> {"headwater": {identity, layout, block_tokens, pages}} in
    its answer

`pages` are the names of the pages of all full blocks of the prompt, on all ranks, in base64. They may still be on their
way to the stores: whoever hands the prompt on looks until the pool has them (`serve/vllm_node.py`). No vLLM here.
"""

import base64
from collections.abc import Mapping, Sequence
from typing import Any, Final

from headwater.core.identity import CacheIdentity
from headwater.core.keys import BlockKey
from headwater.core.page import page_name
from headwater.integrations.vllm.metadata import RankFacts

TOLD: Final = "headwater"


def is_asked(params: Any) -> bool:
    """Whether a request wants to be told."""
    return isinstance(params, Mapping) and params.get(TOLD) == "tell"


def told_pages(identity: CacheIdentity, ranks: Sequence[RankFacts], keys: Sequence[BlockKey]) -> dict[str, Any]:
    """The answer's part, by the keys of the prompt's full blocks."""
    names = [page_name(key, one.rank, one.world) for key in keys for one in ranks]
    return {
        TOLD: {
            "identity": identity.digest.hex(),
            "layout": identity.layout.hex(),
            "block_tokens": identity.block_tokens,
            "pages": base64.b64encode(b"".join(names)).decode("ascii"),
        }
    }
