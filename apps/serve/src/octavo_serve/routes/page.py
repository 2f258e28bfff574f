"""GET /: the live page, and its scripts and styles under /page/."""

import hashlib
from functools import cache
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

from octavo_serve.root_path import route_path

_TYPES = {
    "index.html": "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
    "main.js": "text/javascript; charset=utf-8",
    "chat.js": "text/javascript; charset=utf-8",
    "engine.js": "text/javascript; charset=utf-8",
    "charts.js": "text/javascript; charset=utf-8",
    "connection.js": "text/javascript; charset=utf-8",
    "tokens.js": "text/javascript; charset=utf-8",
    "tooltip.js": "text/javascript; charset=utf-8",
}
"""Files of the page, in the folder `page` of this package."""

_PATHS = {"/" if name == "index.html" else f"/page/{name}": name for name in _TYPES}
PAGE_PATHS = tuple(_PATHS)

_HEADERS = {
    # Nothing but what comes from this server, and no other page may show this one in a frame.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


async def show_page(request: Request) -> Response:
    """Return a file of the page, or say that the browser has it already."""
    name = _PATHS[route_path(request.scope)]
    body, tag = _file(name)
    headers = {**_HEADERS, "ETag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(body, headers={**headers, "Content-Type": _TYPES[name]})


@cache
def _file(name: str) -> tuple[bytes, str]:
    """Return a file of the page, and a tag of its content."""
    body = files("octavo_serve").joinpath("page", name).read_bytes()
    return body, f'"{hashlib.sha256(body).hexdigest()[:16]}"'
