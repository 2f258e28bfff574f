"""Authentication of clients by an API key."""

import secrets

from starlette.types import ASGIApp, Receive, Scope, Send

from octavo_serve.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/ping", "/metrics"})
"""For supervisors and scrapers, which hold no key."""


class KeyGuard:
    """Lets a request pass when it carries `key` as its bearer token, or asks for an open path."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._carries_key(scope):
            await self._app(scope, receive, send)
        else:
            error = ApiError(
                401,
                "a valid API key is needed: send the header `Authorization: Bearer KEY`",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await error.response()(scope, receive, send)

    def _carries_key(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        return scheme.lower() == b"bearer" and secrets.compare_digest(key.strip(), self._key)
