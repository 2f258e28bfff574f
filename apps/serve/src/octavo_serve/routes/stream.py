"""WebSocket /v1/stream: any number of requests at once on one socket, in JSON text frames.

The client sends `completion` and `chat`, which have the fields of the HTTP bodies and an `id`, and `cancel`.
The live page also sends `watch`, which is answered with `engine` frames until it is cancelled.
A request is answered with `chunk` frames, which have the fields of the HTTP chunks, and one `done`; or an
`error` with its id is its end. An `error` whose id is null is about a frame and ends no request.
"""

import asyncio
import contextlib
import time
from contextlib import aclosing
from typing import Any, NamedTuple

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from enginecore import RequestStream
from enginecore.errors import RequestAbortedError, RequestError
from enginecore.frontend import openai
from octavo_serve.access import log_request
from octavo_serve.auth import given_key
from octavo_serve.chunks import FRAME
from octavo_serve.engine_feed import SECONDS_BETWEEN_FRAMES, EngineFeed
from octavo_serve.errors import ApiError, as_api_error
from octavo_serve.records import CLIENT_LEFT, Answered, RequestRecord
from octavo_serve.routes.generate import Job, prepare_chat_completion, prepare_completion
from octavo_serve.routes.requests import Client
from octavo_serve.spans import OPERATIONS, TRACE_FIELDS
from octavo_serve.state import ServerState

PATH = "/v1/stream"

MOST_FRAME_BYTES = 16 << 20
MOST_REQUESTS = 1024
"""Of one socket at once."""

_LONGEST_ID = 256
_SECONDS_FOR_THE_KEY = 30
_POLICY_VIOLATION = 1008
"""Close code (RFC 6455, 7.4.1) of a client without the key."""

_encode = msgspec.json.Encoder().encode


async def serve(socket: WebSocket) -> None:
    """Answer the requests of one socket until its client leaves; what has not finished then is aborted."""
    server: ServerState = socket.app.state.server
    if not _is_own_origin(socket, server):
        await socket.close()  # before it was accepted: the answer is a 403
        return
    await socket.accept()
    session = _Session(socket, server)
    try:
        if await session.authenticate():
            await session.run()
    except WebSocketDisconnect:
        return
    finally:
        await session.end()


async def require_upgrade() -> None:
    """Tell a client that speaks plain HTTP what is here."""
    message = f"{PATH} is a WebSocket: connect to it as one"
    raise ApiError(426, message, code="upgrade_required", headers={"Upgrade": "websocket"})


class _Frame(NamedTuple):
    """A client's frame."""

    fields: dict[str, Any]
    size: int
    """In bytes."""


class _Open:
    """A request that has not ended."""

    def __init__(self) -> None:
        self.started = False
        """Whether a chunk was sent."""
        self.cancelled = False
        self.wake = asyncio.Event()
        """Set when it is cancelled."""
        self.stream: RequestStream | None = None
        """While it is in the engine."""


class _Session:
    """One socket and its requests."""

    def __init__(self, socket: WebSocket, server: ServerState) -> None:
        self._socket = socket
        self._server = server
        self._key: str | None = None
        """Name of the client's key."""
        self._requests: dict[str, _Open] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._sending = asyncio.Lock()
        """Lets one frame at a time wait for a slow reader, so that not all requests' frames pile up."""

    async def authenticate(self) -> bool:
        """Look for the key in the headers, or else in the first frame; end the socket where it is not.

        Raises:
            WebSocketDisconnect: the client has left.
        """
        if not self._server.keys.needed:
            return True
        key = given_key(self._socket.scope)
        if key is None:
            frame = await self._first()
            key = b"" if frame is None or frame.fields.get("type") != "auth" else _key_of(frame)
        self._key = self._server.keys.name_of(key)
        if self._key is not None:
            return True
        await self._fail(None, _no_key())
        await self._socket.close(_POLICY_VIOLATION)
        return False

    async def _first(self) -> _Frame | None:
        try:
            async with asyncio.timeout(_SECONDS_FOR_THE_KEY):
                return await self._next()
        except TimeoutError:
            return None

    async def run(self) -> None:
        """Take frames until the client leaves.

        Raises:
            WebSocketDisconnect: it has left.
        """
        while True:
            frame = await self._next()
            if frame is not None:
                await self._take(frame)

    async def end(self) -> None:
        """Abort what has not finished."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _next(self) -> _Frame | None:
        """Return the next frame; None for a bad one, which has been answered."""
        message = await self._socket.receive()
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message.get("code", 1000))
        text = message.get("text")
        try:
            if text is None:
                raise RequestError("frames are JSON in text, this one is binary")
            raw = text.encode()
            most = min(MOST_FRAME_BYTES, self._server.options.max_body_bytes)
            if len(raw) > most:
                raise ApiError(413, f"the frame is larger than {most} bytes")
            return _Frame(openai.decode(raw), len(raw))
        except (RequestError, ApiError) as error:
            await self._fail(None, as_api_error(error))
            return None

    async def _take(self, frame: _Frame) -> None:
        fields = frame.fields
        kind, name = fields.pop("type", None), fields.pop("id", None)
        try:
            match kind:
                case "completion" | "chat":
                    self._start(kind, self._new_id(name), frame)
                case "watch":
                    self._watch(self._new_id(name))
                case "cancel":
                    self._cancel(name)
                case "auth":
                    keys = self._server.keys
                    if keys.needed and keys.name_of(_key_of(frame)) is None:
                        raise _no_key()
                case _:
                    raise RequestError(
                        f"type must be completion, chat, cancel, watch or auth, got {kind!r:.80}", "type"
                    )
        except (RequestError, ApiError) as error:
            # One with the id of a running request would look like the end of that.
            own = isinstance(name, str) and 0 < len(name) <= _LONGEST_ID and name not in self._requests
            await self._fail(name if own else None, as_api_error(error))

    def _new_id(self, name: object) -> str:
        if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_ID:
            raise RequestError(f"id must be a text of 1 to {_LONGEST_ID} characters, got {name!r:.80}", "id")
        if name in self._requests:
            raise RequestError(f"id {name!r:.80} is that of a request which has not ended", "id")
        if len(self._requests) >= MOST_REQUESTS:
            raise ApiError(429, f"a socket may have {MOST_REQUESTS} requests at once")
        return name

    def _start(self, kind: str, name: str, frame: _Frame) -> None:
        if frame.fields.get("stream") is False:
            raise RequestError("stream is always true here: answers come in chunks", "stream")
        frame.fields["stream"] = True
        request = self._requests[name] = _Open()
        task = asyncio.create_task(self._answer(kind, name, frame, request))
        for tasks in (self._tasks, self._server.frames):
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    def _watch(self, name: str) -> None:
        if not self._server.options.live_page:
            raise ApiError(404, "the live page is switched off, and what it watches too")
        request = self._requests[name] = _Open()
        task = asyncio.create_task(self._send_engine(name, request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send_engine(self, name: str, request: _Open) -> None:
        """Send the engine's state twice a second until that is cancelled, or the client leaves."""
        try:
            try:
                with self._server.engine.watch() as watch:
                    feed = EngineFeed(self._server, watch)
                    while not request.cancelled:
                        await self._send(_encode({"type": "engine", "id": name, **feed.frame()}))
                        with contextlib.suppress(TimeoutError):
                            await asyncio.wait_for(request.wake.wait(), SECONDS_BETWEEN_FRAMES)
                last: dict[str, Any] = {"type": "done", "id": name, "usage": None}
            except WebSocketDisconnect:
                return
            except Exception as error:
                last = _error_frame(name, as_api_error(error))
            del self._requests[name]
            await self._send(_encode(last))
        except WebSocketDisconnect:
            return

    def _cancel(self, name: object) -> None:
        request = self._requests.get(name) if isinstance(name, str) else None
        if request is None:
            raise RequestError(f"no request with the id {name!r:.80} is running", "id")
        request.cancelled = True
        request.wake.set()
        if request.stream is not None:
            self._interrupt(request.stream)

    def _interrupt(self, stream: RequestStream) -> None:
        self._server.engine.interrupt(stream, RequestAbortedError("the request was cancelled"))

    async def _answer(self, kind: str, name: str, frame: _Frame, request: _Open) -> None:
        """Run a request and send its frames, of which the last is `done` or `error`."""
        record = RequestRecord()
        began = time.perf_counter()
        status = CLIENT_LEFT
        try:
            try:
                usage = await self._chunks(request, await self._prepare(kind, name, frame, record))
                last: dict[str, Any] = {"type": "done", "id": name, "usage": usage}
                status = 200
            except WebSocketDisconnect:
                return
            except Exception as error:
                refused = as_api_error(error)
                status = refused.status
                last = _error_frame(name, refused)
            # The id is free again once the client has read this.
            del self._requests[name]
            await self._send(_encode(last))
        except WebSocketDisconnect:
            return
        finally:
            if self._requests.get(name) is request:
                del self._requests[name]
            seconds = time.perf_counter() - began
            self._server.engine.metrics.answered("WS", PATH, status)
            answered = Answered("WS", PATH, PATH, status, self._key, record, seconds)
            log_request(answered, self._trace(kind, frame, answered))

    def _trace(self, kind: str, frame: _Frame, answered: Answered) -> str | None:
        """Hand out the span of a request, which continues the frame's trace or else the handshake's."""
        if self._server.traces is None:
            return None
        given = {name: frame.fields.get(name) for name in TRACE_FIELDS}
        headers = [
            (name.encode(), value.encode("ascii", "replace"))
            for name, value in given.items()
            if isinstance(value, str)
        ]
        operation = OPERATIONS["WS", kind]
        return self._server.traces.add(headers or self._socket.scope["headers"], operation, answered)

    async def _prepare(self, kind: str, name: str, frame: _Frame, record: RequestRecord) -> Job:
        self._server.require_ready()
        client = Client(name, record, self._key)
        if kind == "chat":
            return await prepare_chat_completion(self._server, frame.fields, frame.size, client)
        return await prepare_completion(self._server, frame.fields, client)

    async def _chunks(self, request: _Open, job: Job) -> dict[str, Any]:
        """Send a request's chunks as they come, and return its usage."""

        def opened(stream: RequestStream) -> None:
            request.stream = stream
            if request.cancelled:
                self._interrupt(stream)

        chunks = job.events(FRAME)
        answer = job.stream(chunks, lambda: request.started or request.cancelled, opened)
        async with aclosing(answer) as outputs:
            async for frames in outputs:
                for frame in frames:
                    request.started = True
                    await self._send(frame)
        return chunks.usage()

    async def _fail(self, name: str | None, error: ApiError) -> None:
        await self._send(_encode(_error_frame(name, error)))

    async def _send(self, frame: bytes) -> None:
        async with self._sending:
            if self._socket.application_state is WebSocketState.DISCONNECTED:
                # Another request's frame has found that out.
                raise WebSocketDisconnect(1006)
            await self._socket.send_text(frame.decode())


def _error_frame(name: str | None, error: ApiError) -> dict[str, Any]:
    return {"type": "error", "id": name, **error.answer()}


def _key_of(frame: _Frame) -> bytes:
    key = frame.fields.get("key")
    return key.encode() if isinstance(key, str) else b""


def _no_key() -> ApiError:
    return ApiError(
        401,
        'a valid API key is needed: the header `Authorization: Bearer KEY`, or {"type": "auth", "key": KEY} '
        "as the first frame",
        code="invalid_api_key",
    )


def _is_own_origin(socket: WebSocket, server: ServerState) -> bool:
    """Whether a browser's page may use the socket: it is from here, or from one of the allowed origins.

    Browsers let any page open a WebSocket to any host, and ask nobody; other programs send no Origin.
    """
    origin = socket.headers.get("origin")
    allowed = server.options.cors_origins
    if origin is None or origin in allowed or "*" in allowed:
        return True
    scheme, _, host = origin.partition("://")
    return scheme in ("http", "https") and host == socket.headers.get("host")
