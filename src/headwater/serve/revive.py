"""`POST /admin/revive`: what a server's cache has switched off comes back without a restart; and who asks for it.

A tier that gave nothing but bad pages, or was damaged, is put right; a brain that failed is followed by a fresh one.
The asking side is the standard library's: `headwater revive` needs no server's packages.
"""

import json
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass
from typing import Any, Final

from headwater.cache.cache import TieredCache
from headwater.config.checks import require_url
from headwater.core.errors import HeadwaterError, InvalidInput

REVIVE: Final = "/admin/revive"
BRAIN: Final = "brain"
_MOST_BYTES: Final = 1 << 20  # of an answer


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
    require_url("a server's address", url)
    body = json.dumps({} if what is None else {"what": what}).encode()
    request = urllib.request.Request(f"{url}{REVIVE}", body, {"content-type": "application/json"})  # noqa: S310  checked
    if key is not None:
        request.add_unredirected_header("authorization", f"Bearer {key}")
    try:
        straight = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the key is the server's alone
        with straight.open(request, timeout=timeout_s) as answer:
            found = json.loads(answer.read(_MOST_BYTES))
        return Revived(dict(found["was_off"]), tuple(found["revived"]), tuple(found["still_off"]))
    except urllib.error.HTTPError as error:
        raise HeadwaterError(f"{url} answers {error.code}: {_message(error.read(_MOST_BYTES))}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HeadwaterError(f"no headwater server answers at {url}: {error}") from error


def _message(body: bytes) -> str:
    """What an error says, in OpenAI's shape or not."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace")
