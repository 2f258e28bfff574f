"""The application behind a real socket, in the test's own event loop, and a client of its WebSocket."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

from octavo_serve.config import ServeConfig
from octavo_serve.listening import listen
from octavo_serve.server import http_server


@asynccontextmanager
async def serving(app) -> AsyncIterator[str]:
    """Serve `app` on a free port; yields `host:port`."""
    listener = listen("127.0.0.1", 0)
    host, port = listener.getsockname()
    server = http_server(app, ServeConfig())
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield f"{host}:{port}"
    finally:
        server.should_exit = True
        await task


class Client:
    """A client of /v1/stream."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection

    async def send(self, type: str | None = None, id: object = None, **fields: Any) -> None:
        given = {"type": type, "id": id}
        await self.connection.send(json.dumps({k: v for k, v in given.items() if v is not None} | fields))

    async def receive(self) -> dict[str, Any]:
        text = await self.connection.recv()
        assert isinstance(text, str)
        return json.loads(text)

    async def until_end(self, id: str) -> list[dict[str, Any]]:
        """Receive up to the last frame of a request, and return its frames; others are dropped."""
        found = []
        while not found or found[-1]["type"] not in ("done", "error"):
            frame = await self.receive()
            if frame["id"] == id:
                found.append(frame)
        return found

    async def error(self) -> dict[str, Any]:
        """Receive the next frame, which is an error about a frame."""
        frame = await self.receive()
        assert (frame["type"], frame["id"]) == ("error", None), frame
        return frame["error"]


@asynccontextmanager
async def client(address: str, **options: Any) -> AsyncIterator[Client]:
    async with connect(f"ws://{address}/v1/stream", **options) as connection:
        yield Client(connection)


def text_of(frames: list[dict[str, Any]]) -> str:
    """Return the text of a completion's chunks."""
    return "".join(choice["text"] for frame in frames[:-1] for choice in frame["choices"])
