"""HTTP on a connection: uvicorn's, and answers to HTTP/1.0."""

from collections.abc import Awaitable, Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's, without chunks for clients of HTTP/1.0, which know none (RFC 9112, section 6.1)."""

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0" and self.cycle is not None:
            self.cycle.send = _until_close(self.cycle)  # ty: ignore[invalid-assignment]


def _until_close(cycle: RequestResponseCycle) -> Callable[[Any], Awaitable[None]]:
    """Return a `send` whose body, where its length is not known, lasts until the connection is closed."""
    send = cycle.send
    has_length = True

    async def send_message(message: Any) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message["headers"])
            if not has_length:
                cycle.chunked_encoding = False
        elif not has_length:
            # What the protocol checks the body against.
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return send_message
