"""Shared by the routes that take a body: reading it, naming the answer, preparing prompts."""

import asyncio
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from starlette.requests import ClientDisconnect, Request

from enginecore import RequestOutput
from enginecore.errors import ContextLengthError, NoTokenError, RequestError
from octavo_serve.access import request_id
from octavo_serve.errors import ApiError
from octavo_serve.records import RequestRecord
from octavo_serve.state import ServerState

INLINE_CHARACTERS = 16_384
"""Longer texts are tokenised in a thread, so that other clients' tokens are not held up."""

Prepared = TypeVar("Prepared")


class Client(NamedTuple):
    """Client of a request: the answer's id, its log record and its key."""

    id: str
    """That the answer carries."""
    record: RequestRecord
    key: str | None
    """Name of the client's key."""


def server_of(request: Request) -> ServerState:
    """Return the server that a request came to."""
    return request.app.state.server


async def read_body(request: Request) -> bytes:
    """Return the body of a JSON request.

    Raises:
        ApiError: it is not declared as JSON (415), or too large (413).
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise ApiError(415, f"Content-Type must be application/json, got {media_type or 'none'}")
    most = server_of(request).options.max_body_bytes
    declared = request.headers.get("content-length", "")
    body = bytearray()
    try:
        if declared.isdecimal() and int(declared) > most:
            raise _too_large(most)
        async for piece in request.stream():
            body += piece
            if len(body) > most:
                raise _too_large(most)
    except ClientDisconnect as error:
        raise ApiError(400, "the client left before its request was complete") from error
    return bytes(body)


def answer_id(request: Request, prefix: str) -> str:
    """Return the id that an answer carries in its body: the request's, with a prefix as OpenAI's."""
    return f"{prefix}-{request_id(request)}"


async def off_loop(characters: int, prepare: Callable[[], Prepared]) -> Prepared:
    """Return `prepare()`, run in a thread when the text it works on is long."""
    return prepare() if characters <= INLINE_CHARACTERS else await asyncio.to_thread(prepare)


def raise_failure(output: RequestOutput) -> None:
    """Raise the error of a request that could not be run, if it could not.

    Raises:
        RequestError: it is too long, or its grammar and the rest leave no token, as only the core could tell.
        ApiError: 500.
    """
    for sample in output.outputs:
        if sample.finish_reason == "error":
            reason = str(sample.stop_reason or "the engine gave this request up")
            if reason.startswith(ContextLengthError.START):
                raise RequestError(reason, "prompt", ContextLengthError.CODE)
            if reason.startswith(NoTokenError.START):
                raise RequestError(reason, "structured_outputs")
            raise ApiError(500, reason)


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body is larger than {most} bytes")
