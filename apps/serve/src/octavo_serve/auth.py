"""Authentication of clients by an API key."""

import secrets
from collections.abc import Mapping

from starlette.types import ASGIApp, Receive, Scope, Send

from octavo_serve.errors import ApiError
from octavo_serve.root_path import route_path
from octavo_serve.routes.docs import DOCS_PATHS
from octavo_serve.routes.page import PAGE_PATHS

OPEN_PATHS = frozenset({"/health", "/ping", "/metrics", *DOCS_PATHS, *PAGE_PATHS})
"""For supervisors and scrapers, which hold no key, and for the page, which asks for it.

The description of the routes is open too: it is that of every server of this version, which /metrics names.
"""


_NAME = "octavo.key"
"""Where a request's ASGI scope has the name of its key."""


def key_name(scope: Scope) -> str | None:
    """Return the name of the key that a request carries; None where none is needed."""
    return scope.get(_NAME)


class Keys:
    """The keys that clients may show, by name."""

    def __init__(self, keys: Mapping[str, str]) -> None:
        self._keys = {name: key.encode() for name, key in keys.items()}

    @property
    def needed(self) -> bool:
        """Whether there are any."""
        return bool(self._keys)

    def name_of(self, given: bytes) -> str | None:
        """Return the name of the key `given`, None if it is none; all keys take the same time."""
        names = [name for name, key in self._keys.items() if secrets.compare_digest(given, key)]
        return names[0] if names else None


class KeyGuard:
    """Lets an HTTP request pass when it carries one of the keys, or asks for an open path.

    A key comes as a bearer token, as OpenAI's clients send it, or in `x-api-key`, as Anthropic's do.
    WebSockets pass: their key may come in the first frame, so who accepts them asks for it.
    """

    def __init__(self, app: ASGIApp, keys: Mapping[str, str]) -> None:
        """`keys` are by name."""
        self._app = app
        self._keys = Keys(keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name = self._keys.name_of(given_key(scope) or b"")
        if name is not None or route_path(scope) in OPEN_PATHS:
            scope[_NAME] = name
            await self._app(scope, receive, send)
        else:
            error = ApiError(
                401,
                "a valid API key is needed: send the header `Authorization: Bearer KEY`",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await error.response(route_path(scope))(scope, receive, send)


def given_key(scope: Scope) -> bytes | None:
    """Return the key that a request's headers carry, right or wrong; None if they have none."""
    headers = dict(scope["headers"])
    if b"authorization" in headers:
        scheme, _, key = headers[b"authorization"].partition(b" ")
        if scheme.lower() == b"bearer":
            return key.strip()
    other = headers.get(b"x-api-key")
    if other is not None:
        return other.strip()
    return b"" if b"authorization" in headers else None
