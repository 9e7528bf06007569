"""Who asks a server that runs, from a command: `headwater top`, `revive` and `admin`. The standard library's HTTP."""

import json
import urllib.error
import urllib.request
from typing import Any, Final

from headwater.config.checks import require_url
from headwater.core.errors import HeadwaterError

PATH: Final = "/admin/state"
DRAIN: Final = "/admin/drain"
PINS: Final = "/admin/pins"
UNPIN: Final = "/admin/unpin"
WARM: Final = "/admin/warm"
LIMITS: Final = "/admin/limits"
_MOST_BYTES: Final = 8 << 20  # of an answer


def ask_server(url: str, path: str, *, key: str | None, timeout_s: float, body: bytes | None = None) -> Any:
    """What a server answers to a GET, or to a POST of a JSON `body`. Blocks.

    Raises HeadwaterError with what it said, or why it did not.
    """
    require_url("a server's address", url)
    headers = {} if body is None else {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}{path}", body, headers)  # noqa: S310  checked
    if key is not None:
        request.add_unredirected_header("authorization", f"Bearer {key}")
    try:
        straight = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the key is the server's alone
        with straight.open(request, timeout=timeout_s) as answer:
            return json.loads(answer.read(_MOST_BYTES))
    except urllib.error.HTTPError as error:
        with error:
            said = _message(error.read(_MOST_BYTES))
            raise HeadwaterError(f"{url} answers {error.code} to {path}: {said}") from error
    except (OSError, ValueError) as error:
        raise HeadwaterError(f"no headwater server answers at {url}: {error}") from error


def ask_state(url: str, *, key: str | None, timeout_s: float = 10.0) -> dict[str, Any]:
    """The document of the server at a URL. Blocks. Raises HeadwaterError."""
    found = ask_server(url, PATH, key=key, timeout_s=timeout_s)
    if not isinstance(found, dict) or found.get("format") != 1:
        raise HeadwaterError(f"what answers at {url} has no state document that this version reads")
    return found


def _message(body: bytes) -> str:
    """What an error says, in OpenAI's shape or not."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace")
