"""Errors as clients get them: always OpenAI's error shape."""

import logging
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from enginecore.errors import EngineDeadError, RequestAbortedError, RequestError
from enginecore.frontend.openai import ModelNotFound, error_answer
from octavo_serve.root_path import route_path

_UNEXPECTED = "the server failed to answer this request"

_ROUTING = {404: "there is no route {1}", 405: "{0} is not allowed on {1}"}
"""Messages, of method and path, of what no endpoint was asked about."""
_CODES = {405: "method_not_supported"}
_LONGEST_PATH = 200
_ANTHROPIC_PATH = "/v1/messages"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}

logger = logging.getLogger(__name__)


class ApiError(Exception):
    """A request that is answered with an error; `param` names the field at fault when one is."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers

    def answer(self) -> dict[str, Any]:
        """Return the error in OpenAI's shape."""
        return error_answer(self.status, str(self), self.param, self.code)

    def body(self) -> bytes:
        """Return the error as JSON."""
        return msgspec.json.encode(self.answer())

    def anthropic_body(self) -> bytes:
        """Return the error as Anthropic's API tells it."""
        other = "invalid_request_error" if self.status < 500 else "api_error"
        kind = _ANTHROPIC_TYPES.get(self.status, other)
        return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": str(self)}})

    def response(self, path: str) -> Response:
        """Return the error as a whole response to a request for `path`, in that API's shape."""
        body = self.anthropic_body() if is_anthropic(path) else self.body()
        return Response(body, self.status, self.headers, "application/json")


def is_anthropic(path: str) -> bool:
    """Whether errors of a path have Anthropic's shape."""
    return path == _ANTHROPIC_PATH or path.startswith(_ANTHROPIC_PATH + "/")


def as_api_error(error: Exception) -> ApiError:
    """Return how a client is told of `error`; one that nobody foresaw is logged and not described."""
    match error:
        case ApiError():
            return error
        case ModelNotFound():
            return ApiError(404, str(error), error.param, error.code)
        case RequestError():
            return ApiError(400, str(error), error.param, error.code)
        case EngineDeadError() | RequestAbortedError():
            return ApiError(503, str(error))
        case HTTPException():
            return ApiError(
                error.status_code, error.detail, code=_CODES.get(error.status_code), headers=error.headers
            )
    logger.error("a request failed", exc_info=error)
    return ApiError(500, _UNEXPECTED)


async def _answer(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException) and error.status_code in _ROUTING:
        error.detail = _ROUTING[error.status_code].format(request.method, request.url.path[:_LONGEST_PATH])
    if isinstance(error, HTTPException) and error.status_code == 405:
        error.headers = {"Allow": ", ".join(_methods(request))}
    return as_api_error(error).response(route_path(request.scope))


def _methods(request: Request) -> list[str]:
    """Return the methods of the path of a request, of which each has a route of its own."""
    found = set()
    for route in request.app.routes:
        match, _ = route.matches(request.scope)
        if match is not Match.NONE and isinstance(route, Route):
            found |= route.methods or set()
    return sorted(found)


async def _answer_unexpected(request: Request, error: Exception) -> Response:
    # The framework raises the error again once this is sent, and the HTTP server logs it.
    return ApiError(500, _UNEXPECTED).response(route_path(request.scope))


HANDLERS: dict[int | type[Exception], Any] = {
    **dict.fromkeys((ApiError, RequestError, EngineDeadError, RequestAbortedError, HTTPException), _answer),
    Exception: _answer_unexpected,
}
"""Exception handlers that answer every error in OpenAI's shape."""
