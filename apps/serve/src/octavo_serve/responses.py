"""Responses that stop their work when the client goes away."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

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


class EventStream(Response):
    """Server-sent events. `events` is closed at the end, and when the client goes away.

    Nothing is sent before the first event, so an error until then still gets a status of its own.
    """

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(media_type="text/event-stream")
        self.headers["content-type"] = "text/event-stream; charset=utf-8"
        self.headers["cache-control"] = "no-cache"
        # Tells nginx not to hold events back.
        self.headers["x-accel-buffering"] = "no"
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await attended(receive, self._send_events(send))

    async def _send_events(self, send: Send) -> None:
        started = False
        try:
            async for event in self._events:
                if not started:
                    started = True
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._events.aclose()


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
