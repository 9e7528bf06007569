"""The dashboard's page: files that a browser loads as they are. No build step, nothing from elsewhere.

The page holds no data: it asks for the state document (`serve/state.py`), with the key where there is one. So everybody
may have it. Its policy lets it run its own script, use its own style, and talk to its own server, and nothing else.
"""

from functools import cache
from importlib import resources
from typing import Final

#: By path: the file, and what it is.
FILES: Final = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/dashboard.css": ("dashboard.css", "text/css; charset=utf-8"),
    **{
        f"/{name}": (name, "text/javascript; charset=utf-8")
        for name in ("dashboard-parts.js", "dashboard-draw.js", "dashboard.js")
    },
}
HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@cache
def content(path: str) -> bytes:
    """A file of the page, by its path in a URL. Reads it once; blocks for that."""
    return resources.files(__package__).joinpath(FILES[path][0]).read_bytes()
