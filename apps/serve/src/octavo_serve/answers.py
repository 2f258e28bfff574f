"""HTTP answers, whole or streamed, that stop their work when the client goes away."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo_serve.protocol import BodyWriter

Result = TypeVar("Result")


class JsonAnswer(Response):
    """A JSON body that takes a while to make; `work` is cancelled when the client goes away."""

    def __init__(self, work: Coroutine[Any, Any, bytes]) -> None:
        super().__init__(media_type="application/json")
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await attended(receive, self._work)
        if body is not None:
            await Response(body, media_type="application/json")(scope, receive, send)


_SECONDS_OF_SILENCE = 5.0
_WAITING = b": waiting\n\n"
"""A comment, which clients pass over; proxies close a connection that is silent for a minute."""


class EventStream(Response):
    """Server-sent events, which are closed at the end, and when the client goes away.

    Nothing is sent before the first event, so an error until then still gets a status of its own; but where
    that is long in coming, comments go out meanwhile.
    """

    def __init__(self, make_events: Callable[["EventStream"], AsyncGenerator[bytes, None]]) -> None:
        """`make_events` returns the events, whose errors must be events once `started` is true."""
        super().__init__(media_type="text/event-stream")
        self.headers["content-type"] = "text/event-stream; charset=utf-8"
        self.headers["cache-control"] = "no-cache"
        # Tells nginx not to hold events back.
        self.headers["x-accel-buffering"] = "no"
        del self.headers["content-length"]
        self.started = False
        """Whether the status has been sent."""
        self._was_silent = True
        self._sending = asyncio.Lock()
        self._num_sending = 0
        """Events and comments that are being sent, or wait for their turn."""
        self._writer: BodyWriter | None = None
        """Of the connection, where the server has one."""
        self._events = make_events(self)

    @property
    def is_open(self) -> bool:
        """Whether `write` can be called now: the stream has begun, and nothing waits to be sent."""
        writer = self._writer
        return writer is not None and self._num_sending == 0 and writer.is_open

    def write(self, event: bytes) -> None:
        """Send an event at once, while `is_open`."""
        assert self._writer is not None, "a stream that is open has a writer"
        self._was_silent = False
        self._writer.write(event)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._writer = BodyWriter.of(scope)
        await attended(receive, self._send_events(send))

    async def _send_events(self, send: Send) -> None:
        comments = asyncio.create_task(self._send_comments(send))
        try:
            async for event in self._events:
                await self._send(send, event)
        finally:
            comments.cancel()
            await asyncio.wait({comments})
            await self._events.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_comments(self, send: Send) -> None:
        """Send a comment whenever nothing else was sent for a while."""
        while True:
            self._was_silent = True
            await asyncio.sleep(_SECONDS_OF_SILENCE)
            if self._was_silent:
                await self._send(send, _WAITING)

    async def _send(self, send: Send, body: bytes) -> None:
        self._was_silent = False
        # Before the lock: what waits for that must not be passed by what is written at once.
        self._num_sending += 1
        async with self._sending:
            if not self.started:
                self.started = True
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": body, "more_body": True})
        self._num_sending -= 1


async def attended(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result | None:
    """Return the result of `work`, or None if the client went away first; then `work` has been cancelled."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
    return None


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
