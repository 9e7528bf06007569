"""Who asks a server for its state document (`GET /admin/state`): `headwater top`. The standard library's HTTP alone."""

import json
import urllib.error
import urllib.request
from typing import Any, Final

from headwater.config.checks import require_url
from headwater.core.errors import HeadwaterError

PATH: Final = "/admin/state"
_MOST_BYTES: Final = 8 << 20  # of an answer


def ask_state(url: str, *, key: str | None, timeout_s: float = 10.0) -> dict[str, Any]:
    """The document of the server at a URL. Blocks. Raises HeadwaterError with what it said, or why it did not."""
    require_url("a server's address", url)
    request = urllib.request.Request(f"{url}{PATH}")  # noqa: S310  checked
    if key is not None:
        request.add_unredirected_header("authorization", f"Bearer {key}")
    try:
        straight = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the key is the server's alone
        with straight.open(request, timeout=timeout_s) as answer:
            found = json.loads(answer.read(_MOST_BYTES))
    except urllib.error.HTTPError as error:
        with error:
            raise HeadwaterError(f"{url} answers {error.code} to {PATH}: is the key right?") from error
    except (OSError, ValueError) as error:
        raise HeadwaterError(f"no headwater server answers at {url}: {error}") from error
    if not isinstance(found, dict) or found.get("format") != 1:
        raise HeadwaterError(f"what answers at {url} has no state document that this version reads")
    return found
