"""Authentication of clients by an API key."""

import secrets
from collections.abc import Mapping

from starlette.types import ASGIApp, Receive, Scope, Send

from octavo_serve.errors import ApiError
from octavo_serve.root_path import route_path

OPEN_PATHS = frozenset({"/health", "/ping", "/metrics"})
"""For supervisors and scrapers, which hold no key."""


_NAME = "octavo.key"
"""Where a request's ASGI scope has the name of its key."""


def key_name(scope: Scope) -> str | None:
    """Return the name of the key that a request carries; None where none is needed."""
    return scope.get(_NAME)


class KeyGuard:
    """Lets a request pass when it carries one of the keys, or asks for an open path.

    A key comes as a bearer token, as OpenAI's clients send it, or in `x-api-key`, as Anthropic's do.
    """

    def __init__(self, app: ASGIApp, keys: Mapping[str, str]) -> None:
        """`keys` are by name."""
        self._app = app
        self._keys = {name: key.encode() for name, key in keys.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name = self.name_of(_given(scope))
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

    def name_of(self, given: bytes) -> str | None:
        """Return the name of the key `given`, None if it is none; all keys take the same time."""
        names = [name for name, key in self._keys.items() if secrets.compare_digest(given, key)]
        return names[0] if names else None


def _given(scope: Scope) -> bytes:
    headers = dict(scope["headers"])
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"").strip()
