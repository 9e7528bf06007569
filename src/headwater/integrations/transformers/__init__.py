"""Headwater under transformers: `HeadwaterCache`, which keeps the KV of prompts between calls of `generate`.

    with HeadwaterCache.open(model, "DIRECTORY-or-URL", limit_gib=4) as headwater:
        output = headwater.generate(input_ids, max_new_tokens=64)

transformers has no place for a cache before its prefill, so this is a function around `model.generate`:

    scope.py      which models are taken; the others are refused by name     identity.py   whose bytes they are
    arguments.py  which calls of generate are taken                          layout.py     what a block looks like
    headwater_cache.py  load, compute the rest, generate, save               blocks.py     to and from the store

Nothing is decided about bytes here: keys, frames, deadlines and verification are the attention store's
(`attention_store.py`).

Nothing here is imported before it is asked for.
"""

from typing import TYPE_CHECKING, Any, Final

from headwater.core.errors import NotInstalled

if TYPE_CHECKING:
    from headwater.integrations.transformers.headwater_cache import HeadwaterCache
    from headwater.integrations.transformers.usage import GenerateUsage

__all__ = ["GenerateUsage", "HeadwaterCache"]

_NEEDED: Final = ("torch", "transformers")


def __getattr__(name: str) -> Any:
    """A name of the list above, when somebody asks for it. Raises NotInstalled where transformers is not there."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from headwater.integrations.transformers import headwater_cache
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _NEEDED:
            raise
        raise NotInstalled(f"there is no {error.name} here: pip install 'headwater[transformers]'") from error
    return getattr(headwater_cache, name)
