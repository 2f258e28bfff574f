"""HTTP on a connection: uvicorn's, answers to HTTP/1.0, and parts of a body that are written at once."""

from collections.abc import Awaitable, Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

BODY_WRITER = "octavo.body_writer"
"""Key of the connection's `BodyWriter` in the ASGI scope of a request."""


class BodyWriter:
    """Writes to the body of an answer that has begun and whose length is not known.

    A call in place of the coroutines of every layer that `send` goes through, for who writes thousands of
    small parts a second.
    """

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def is_open(self) -> bool:
        """Whether the body has begun, its client is there, and what was written is on its way."""
        cycle = self._cycle
        return (
            cycle.response_started
            and not cycle.flow.write_paused
            and not cycle.disconnected
            and not cycle.response_complete
        )

    def write(self, part: bytes) -> None:
        """Write a part, which is not empty."""
        cycle = self._cycle
        if cycle.chunked_encoding:
            part = b"%x\r\n%b\r\n" % (len(part), part)
        cycle.transport.write(part)


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's, without chunks for clients of HTTP/1.0, which know none (RFC 9112, section 6.1)."""

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self.cycle is not None:
            self.scope[BODY_WRITER] = BodyWriter(self.cycle)  # ty: ignore[invalid-typed-dict-key]
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
