"""What one call of `generate` took from the store, computed and saved."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateUsage:
    """Tokens and seconds of one call. Prompt tokens are loaded or computed: the two add up to `prompt_tokens`."""

    prompt_tokens: int
    answer_tokens: int
    hit_tokens: Mapping[str, int]  # by tier: host, disk or pool
    computed_tokens: int
    saved_tokens: int  # new in the store, of prompt and answer
    missed: str  # why not more of the prompt was loaded; empty: all was that can be
    not_saved: str  # why not everything was saved; empty: everything was
    load_s: float
    prefill_s: float  # computing the prompt's blocks that were missing
    generate_s: float  # the prompt's end, and the answer
    save_s: float  # computing the answer's blocks once more, and writing

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were loaded, from whichever tier."""
        return sum(self.hit_tokens.values())
