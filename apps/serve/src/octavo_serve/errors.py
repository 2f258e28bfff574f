"""Errors as clients get them: always OpenAI's error shape."""

import logging
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from enginecore.errors import EngineDeadError, RequestAbortedError, RequestError
from enginecore.frontend.openai import ModelNotFound, error_answer

_UNEXPECTED = "the server failed to answer this request"

logger = logging.getLogger(__name__)


class ApiError(Exception):
    """A request that is answered with an error; `param` names the field at fault when one is."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param

    def body(self) -> bytes:
        """Return the error as JSON."""
        return msgspec.json.encode(error_answer(self.status, str(self), self.param))

    def response(self) -> Response:
        """Return the error as a whole response."""
        headers = {"WWW-Authenticate": "Bearer"} if self.status == 401 else None
        return Response(self.body(), self.status, headers, "application/json")


def as_api_error(error: Exception) -> ApiError:
    """Return how a client is told of `error`; one that nobody foresaw is logged and not described."""
    match error:
        case ApiError():
            return error
        case ModelNotFound():
            return ApiError(404, str(error), error.param)
        case RequestError():
            return ApiError(400, str(error), error.param)
        case EngineDeadError() | RequestAbortedError():
            return ApiError(503, str(error))
        case HTTPException():
            return ApiError(error.status_code, error.detail)
    logger.error("a request failed", exc_info=error)
    return ApiError(500, _UNEXPECTED)


async def _answer(request: Request, error: Exception) -> Response:
    return as_api_error(error).response()


async def _answer_unexpected(request: Request, error: Exception) -> Response:
    # The framework raises the error again once this is sent, and the HTTP server logs it.
    return ApiError(500, _UNEXPECTED).response()


HANDLERS: dict[int | type[Exception], Any] = {
    **dict.fromkeys((ApiError, RequestError, EngineDeadError, RequestAbortedError, HTTPException), _answer),
    Exception: _answer_unexpected,
}
"""Exception handlers that answer every error in OpenAI's shape."""
