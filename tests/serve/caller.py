"""A client at the ASGI interface."""

import asyncio
import json
from typing import Any


class Caller:
    """A client at the ASGI interface, who sees every message and may leave at any time."""

    def __init__(
        self,
        app,
        body: dict[str, Any],
        headers: dict[str, str] | None = None,
        *,
        path: str = "/v1/completions",
    ) -> None:
        self.messages: list[dict[str, Any]] = []
        self._unread = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
        self._left = asyncio.Event()
        self._sent = asyncio.Event()
        self.reading = asyncio.Event()
        self.reading.set()
        named = {"content-type": "application/json", **(headers or {})}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "scheme": "http",
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in named.items()],
            "client": ("client", 1),
            "server": ("server", 80),
        }
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._unread:
            return self._unread.pop()
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        await self.reading.wait()
        self.messages.append(message)
        self._sent.set()

    def leave(self) -> None:
        self._left.set()

    async def received(self, count: int) -> None:
        """Wait for so many messages."""
        while len(self.messages) < count:
            self._sent.clear()
            await self._sent.wait()

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)
