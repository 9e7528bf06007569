"""`POST /admin/revive`: what a server's cache has switched off comes back without a restart; and who asks for it.

A tier that gave nothing but bad pages, or was damaged, is put right; a brain that failed is followed by a fresh one.
The asking side needs no server's packages.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any, Final

from headwater.cache.cache import TieredCache
from headwater.core.errors import HeadwaterError, InvalidInput
from headwater.serve.ask_server import ask_server

REVIVE: Final = "/admin/revive"
BRAIN: Final = "brain"


@dataclass(frozen=True, slots=True)
class Revived:
    """What came of it."""

    was_off: dict[str, str]  # and why
    revived: tuple[str, ...]
    still_off: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """As plain JSON."""
        return asdict(self)


def revive(cache: TieredCache, what: str | None = None) -> Revived:
    """Put right what is off, or only `what`: a tier's name, or `brain`. Blocks, seconds where a store is rebuilt.

    Raises InvalidInput for a name that nothing has.
    """
    off = cache.troubles()
    if what is not None and what not in (BRAIN, *cache.tiers):
        raise InvalidInput(f"there is no {what!r} to revive; there are {', '.join((BRAIN, *cache.tiers))}")
    asked = [name for name in off if what in (None, name)]
    done = {name: cache.revive_brain() if name == BRAIN else cache.revive(name) for name in asked}
    return Revived(
        was_off={name: off[name] for name in asked},
        revived=tuple(name for name, fine in done.items() if fine),
        still_off=tuple(name for name, fine in done.items() if not fine),
    )


def ask_to_revive(url: str, *, what: str | None, key: str | None, timeout_s: float) -> Revived:
    """Have the server at a URL do it. Blocks. Raises HeadwaterError with what the server said, or why it did not."""
    body = json.dumps({} if what is None else {"what": what}).encode()
    found = ask_server(url, REVIVE, key=key, timeout_s=timeout_s, body=body)
    try:
        return Revived(dict(found["was_off"]), tuple(found["revived"]), tuple(found["still_off"]))
    except (ValueError, KeyError, TypeError) as error:
        raise HeadwaterError(f"no headwater server answers at {url}: {error}") from error
